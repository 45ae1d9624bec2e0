"""The command line: each command does what it says, says what is missing, and fails when the batch is wrong."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import r3numba
from r3numba import cli
from r3numba._bench import fresh_process, suite
from r3numba.cli import bench, checks, diagnosis, doctor, rollouts

EXTRA = importlib.util.find_spec("rich") is not None and importlib.util.find_spec("matplotlib") is not None
needs_extra = pytest.mark.skipif(not EXTRA, reason="needs the cli extra")
ROLLOUTS = [rollout for part in rollouts.read_rollouts().values() for rollout in part]


@pytest.fixture(autouse=True, scope="module")
def warned_once():
    """Without Numba the process's first call warns, once: that is not these tests' subject."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        checks.kernels()


def run_module(*arguments, **variables):
    """Run the command in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(Path(r3numba.__file__).parents[1]), **variables}
    without = "ignore:r3numba runs without Numba:RuntimeWarning"
    command = [sys.executable, "-W", "error", "-W", without, "-m", "r3numba.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def is_picture(path):
    """Say whether a file is a PNG that can be read and shows something."""
    from matplotlib import image

    pixels = image.imread(path)
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and pixels.size > 100_000 and pixels.std() > 0.01


# ---- all commands ----------------------------------------------------------------------------------------------------


def test_importing_and_asking_for_help_imports_nothing_heavy():
    code = (
        "import sys, contextlib, io\nfrom r3numba import cli\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n    cli.main(['--help'])\n"
        "print(sorted({'numba', 'torch', 'matplotlib', 'rich', 'numpy'} & set(sys.modules)))"
    )
    assert fresh_process.run_python(code).strip() == "[]"


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["bench", "--sizes", "big"],
        ["bench", "--sizes", "0.0001"],
        ["bench", "--sizes", ""],
        ["bench", "--repeat", "0"],
        ["demo", "--size", "0"],
        ["demo", "--repeat", "none"],
        ["bench", "--json", "no/such/directory/file"],
        ["demo", "--plot", "no/such/directory/file"],
    ],
)
def test_arguments_that_make_no_sense_are_refused_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


@needs_extra
@pytest.mark.parametrize(("option", "known"), [("--shape", "48x8"), ("--spread", "typical")])
def test_unknown_shapes_and_spreads_name_the_known_ones(option, known, capsys):
    assert cli.main(["bench", option, "none"]) == 2
    assert known in capsys.readouterr().err


@pytest.mark.parametrize(("command", "package"), [("demo", "rich"), ("demo", "matplotlib"), ("bench", "rich")])
def test_a_missing_extra_is_one_line_that_names_it(command, package, capsys, monkeypatch):
    if package == "matplotlib" and not EXTRA:
        pytest.skip("needs the cli extra")
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.console", None)
    assert cli.main([command]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "pip install 'r3numba[cli]'" in error
    assert package in error


@needs_extra
def test_a_variable_that_makes_no_sense_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("R3NUMBA_POLICY", "faster")
    assert cli.main(["demo"]) == 2
    assert "R3NUMBA_POLICY is 'faster'" in capsys.readouterr().err


# ---- demo ------------------------------------------------------------------------------------------------------------


def test_the_shipped_rollouts_are_those_of_the_capture():
    assert len(ROLLOUTS) == 33
    assert all(len(rollout.routes) == rollout.sequence_length - 1 for rollout in ROLLOUTS)
    assert {rollout.routes.shape[1:] for rollout in ROLLOUTS} == {(4, 4)}
    assert max(int(rollout.routes.max()) for rollout in ROLLOUTS) < rollouts.EXPERTS
    data = Path(__file__).parent / "data"
    shipped = Path(r3numba.__file__).parent / "data"
    for name in rollouts.FILES:
        assert (shipped / name).read_bytes() == (data / name).read_bytes()


@needs_extra
def test_demo_in_a_process_of_its_own(tmp_path):
    done = run_module("demo", "--size", "0.002", "--repeat", "1", "--plot", str(tmp_path / "demo.png"))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for text in ("Rollouts read", "Batch made", "token by token", "Time per step", "two_turn.npz", "33 x 312 rows"):
        assert text in done.stdout
    assert "FAIL" not in done.stdout
    assert is_picture(tmp_path / "demo.png")


@needs_extra
def test_demo_without_torch_leaves_its_arms_out_and_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    plot = tmp_path / "demo.png"
    assert cli.main(["demo", "--size", "0.001", "--repeat", "1", "--plot", str(plot)]) == 0
    shown = capsys.readouterr().out
    assert "torch is not installed" in shown
    assert "not here" in shown
    assert "single write" not in shown.partition("torch is not installed: the torch baselines")[0]
    assert is_picture(plot)


def test_every_check_passes_on_the_rollouts():
    made = checks.run_checks(ROLLOUTS)
    assert len(made) == 8
    torch_here = importlib.util.find_spec("torch") is not None
    assert [check.passed for check in made] == [True] * 5 + [True if torch_here else None] + [True] * 2


def planted(monkeypatch, name, spoil):
    """Let the library return what ``spoil`` makes of its result, as a fault in it would."""
    original = getattr(checks, name)

    def spoiled(*arguments, **options):
        return spoil(original(*arguments, **options), options)

    monkeypatch.setattr(checks, name, spoiled)


def failures():
    return [check.name for check in checks.run_checks(ROLLOUTS) if check.passed is False]


def only(option, value, change):
    """Return a spoiler that acts on calls with this option alone."""

    def spoil(result, options):
        if options.get(option) == value:
            change(result)
        return result

    return spoil


def wrong_byte(batch):
    batch.array[3, -5, 2, 1] ^= 1


def one_row_early(batch):
    batch.array[7, -20:-1] = batch.array[7, -19:].copy()


def wrong_mask(batch):
    batch.padding_mask[4, -1] = False


def wrong_padding(batch):
    batch.array[1, 0, 0] = 0


@pytest.mark.parametrize("change", [wrong_byte, one_row_early, wrong_mask, wrong_padding])
def test_a_fault_in_the_left_rectangle_fails_its_check(monkeypatch, change):
    planted(monkeypatch, "collate_routes", only("padding", None, change))
    assert failures()[0].startswith("left padding")


def test_a_fault_on_the_right_fails_only_the_right(monkeypatch):
    def change(batch):
        batch.array[0, 0, 0, 0] ^= 1

    planted(monkeypatch, "collate_routes", only("padding", "right", change))
    assert [name.partition(":")[0] for name in failures()] == ["right padding"]


def test_a_trajectory_that_starts_elsewhere_fails_starts(monkeypatch):
    def spoil(batch, options):
        if "starts" in options:
            batch.starts[2] += 1
        return batch

    planted(monkeypatch, "collate_routes", spoil)
    assert [name.partition(":")[0] for name in failures()] == ["starts = Pmax - P_i"]


def test_a_wrong_row_in_the_pack_fails_the_pack(monkeypatch):
    def spoil(packed, options):
        packed.array[1000, 0, 0] ^= 1
        return packed

    planted(monkeypatch, "pack_routes", spoil)
    assert [name.partition(":")[0] for name in failures()] == ["pack"]


def test_an_illegal_dummy_fails_the_dummies(monkeypatch):
    def spoil(packed, options):
        packed.array[packed.padding_mask] = 0
        return packed

    planted(monkeypatch, "pack_routes", spoil)
    assert "dummy routes are legal" in failures()


def test_a_path_that_differs_fails_the_paths(monkeypatch):
    def spoil(batch, options):
        if "_policy" in options and options["_policy"].path == "slices":
            batch.array[0, 0, 0, 0] ^= 1
        elif "_policy" in options and checks.kernels() is None:
            pytest.fail("only slices may run without Numba")
        return batch

    planted(monkeypatch, "collate_routes", spoil)
    if checks.kernels() is None:
        pytest.skip("needs Numba")
    assert failures() == ["same bytes on every path"]


def test_a_copy_fails_zero_copy(monkeypatch):
    torch = pytest.importorskip("torch", reason="needs torch")
    from r3numba import collate

    monkeypatch.setattr(collate, "tensor_of", lambda array: torch.from_numpy(array.copy()))
    assert failures() == ["torch shares the memory (zero copy)"]


def test_a_changed_input_fails(monkeypatch):
    routes = [rollout.routes.copy() for rollout in ROLLOUTS]

    def spoil(packed, options):
        routes[5][0, 0, 0] ^= 1
        return packed

    monkeypatch.setattr(checks, "routes_of", lambda rollouts: routes)
    planted(monkeypatch, "pack_routes", spoil)
    assert "inputs untouched" in failures()


@needs_extra
def test_a_failing_check_is_status_1_and_nothing_is_timed(monkeypatch, tmp_path, capsys):
    planted(monkeypatch, "collate_routes", only("padding", None, wrong_byte))
    plot = tmp_path / "demo.png"
    assert cli.main(["demo", "--plot", str(plot)]) == 1
    shown = capsys.readouterr().out
    assert "FAIL" in shown
    assert "rollouts_bf16\\[3], column" in shown or "rollouts_bf16[3], column" in shown
    assert "Time per step" not in shown
    assert not plot.exists()


# ---- doctor ----------------------------------------------------------------------------------------------------------


def test_doctor_names_every_limit_with_its_source(capsys):
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    topology = r3numba.topology.Topology.detect()
    for name, source in topology.sources:
        assert name in shown
        assert source.split(" ")[0] in shown
    for size in ("1 MB", "100 MB", "1 GB", "16 GB"):
        assert f"\n  {size} " in shown
    assert max(len(line) for line in shown.splitlines()) <= 120


@pytest.mark.parametrize(
    "variables",
    [{}, {"R3NUMBA_BACKEND": "numpy"}, {"R3NUMBA_POLICY": "force_slices"}, {"NUMBA_NUM_THREADS": "1"},
     {"R3NUMBA_MAX_THREADS": "1"}, {"R3NUMBA_NUM_THREADS": "2"}, {"NUMBA_THREADING_LAYER": "workqueue"}],
    ids=str,
)  # fmt: skip
def test_doctor_json_says_what_a_call_does(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    record = json.loads(run_module("doctor", "--json").stdout)
    sections = "versions limits backend paths stores huge_pages environment warnings"
    assert record.keys() == set(sections.split())
    assert all(limit.keys() == {"name", "value", "source", "why"} for limit in record["limits"])
    assert [path["nbytes"] for path in record["paths"]] == list(diagnosis.SIZES)
    code = (
        "import numpy, json, r3numba\n"
        "for rows in (1000, 130_000):\n"
        "    r3numba.collate_routes([numpy.zeros((rows, 96, 8), numpy.uint8)], [rows])\n"
        "    print(json.dumps(dict(r3numba.backend_info())))"
    )
    small, large = (json.loads(line) for line in fresh_process.run_python(code).splitlines())
    ran = {path["nbytes"]: path for path in record["paths"]}
    assert (ran[1_000_000]["path"], ran[1_000_000]["threads"]) == (small["path"], small["threads"])
    assert (ran[100_000_000]["path"], ran[100_000_000]["threads"]) == (large["path"], large["threads"])
    assert record["backend"]["backend"] == large["backend"]
    if large["layer"] != "none":
        assert record["backend"]["layer"] == large["layer"]


def paths_of(monkeypatch, cpus=64, **variables):
    """Return the paths by size on a host with so many CPUs and these variables."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    topology = r3numba.topology.Topology.detect()
    changed = {field: getattr(topology, field) for field in topology.__slots__} | {"permitted_cpus": cpus}
    monkeypatch.setattr(diagnosis.Topology, "detect", classmethod(lambda cls, root="/": cls(**changed)))
    monkeypatch.setattr(diagnosis._dispatch, "permitted_cpus_cached", lambda: cpus)
    monkeypatch.setattr(diagnosis._dispatch, "kernels", lambda: None)  # the rule is about threads, not about Numba
    return [
        diagnosis._path_at(nbytes, diagnosis.Topology.detect())
        for nbytes in (1_000_000, 100_000_000, 10**9, 16 * 10**9)
    ]


@pytest.mark.parametrize(
    ("cpus", "variables", "threads", "reasons"),
    [
        (
            64,
            {},
            [1, 3, 8, 4],
            ["below 64 MB", "one for each 32 MB", "cap of 8", "cap of 8 (half of it"],
        ),
        (2, {}, [1, 2, 2, 2], ["below 64 MB", "CPUs are permitted (2)", "CPUs are permitted", "CPUs are permitted"]),
        (1, {}, [1, 1, 1, 1], ["below 64 MB", "CPUs are permitted (1)", "CPUs are permitted", "CPUs are permitted"]),
        (4, {"R3NUMBA_RESERVED_CPUS": "1"}, [1, 3, 3, 3], ["below", "each 32 MB", "4 less 1 reserved", "reserved"]),
        (64, {"R3NUMBA_MAX_THREADS": "2"}, [1, 2, 2, 1], ["below", "cap of 2", "cap of 2", "cap of 2 (half"]),
        (4, {"R3NUMBA_NUM_THREADS": "9"}, [4, 4, 4, 4], ["R3NUMBA_NUM_THREADS"] * 4),
    ],
)
def test_doctor_says_which_rule_decided_the_threads(monkeypatch, cpus, variables, threads, reasons):
    paths = paths_of(monkeypatch, cpus, **variables)
    planned = [r3numba.topology.plan_threads(path["nbytes"], cpus, fresh=True) for path in paths]
    assert planned == threads
    for path, reason in zip(paths, reasons, strict=True):
        assert reason in path["why"]


def test_doctor_says_that_numbas_pool_is_the_bound():
    policy = diagnosis.policy_from_environment()
    rule = diagnosis._thread_rule(400_000_000, "parallel", 3, 64, policy)
    assert rule == "3 threads, as Numba's pool has no more (NUMBA_NUM_THREADS)"


def test_doctor_tells_of_a_setting_that_makes_no_sense(monkeypatch):
    paths = paths_of(monkeypatch, R3NUMBA_MAX_THREADS="many")
    assert {path["path"] for path in paths[1:]} == {None}
    assert "A call would raise ValueError: R3NUMBA_MAX_THREADS" in paths[1]["why"]


def test_doctor_warns_of_what_hurts(monkeypatch):
    record = {
        "backend": {"backend": "numba", "layer": "workqueue", "forked": True, "why": ""},
        "huge_pages": {"value": "never"},
        "paths": [{"nbytes": 10**6, "path": None, "why": "A call would raise ValueError: x"}],
    }
    topology = argparse.Namespace(cpu_quota=1.5, affinity_cpus=8, permitted_cpus=4)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    text = " ".join(diagnosis._warnings(record, topology))
    for part in (
        "workqueue", "CFS quota allows 1.5 of 8 CPUs", "torch is not installed", "forked", "Huge pages are off",
        "A call would raise", "3 trainer processes", "R3NUMBA_MAX_THREADS=1 in each",
    ):  # fmt: skip
        assert part in text


def test_doctor_without_numba(monkeypatch):
    record = json.loads(run_module("doctor", "--json", R3NUMBA_BACKEND="numpy").stdout)
    assert record["backend"]["backend"] == "numpy"
    assert {path["path"] for path in record["paths"]} == {"slices"}
    assert any("NumPy fallback serves" in warning for warning in record["warnings"])
    assert {"name": "R3NUMBA_BACKEND", "value": "numpy", "why": diagnosis._VARIABLES["R3NUMBA_BACKEND"]} in record[
        "environment"
    ]


def test_doctor_in_a_forked_process():
    if checks.kernels() is None:
        pytest.skip("needs Numba")
    code = (
        "import os\nfrom r3numba.cli import diagnosis\nread, write = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    record = diagnosis.diagnose()\n"
        "    os.write(write, repr([record['backend']['forked'], record['backend']['layer'] in (None, 'tbb'),\n"
        "                          any('forked' in w for w in record['warnings'])]).encode())\n"
        "    os._exit(0)\n"
        "os.wait()\nprint(os.read(read, 999).decode())"
    )
    assert fresh_process.run_python(code).strip() == "[True, True, True]"


def test_every_limit_has_its_sentence():
    record = diagnosis._limits(r3numba.topology.Topology.detect())
    assert all(limit["why"].endswith(".") for limit in record)
    assert list(doctor.report({**diagnosis.diagnose(), "environment": []}))


# ---- bench -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench_run(tmp_path_factory):
    """One run of the whole command at a small size; the first call, which compiles for long, is a fixed figure."""
    if not EXTRA:
        pytest.skip("needs the cli extra")
    directory = tmp_path_factory.mktemp("bench")
    files = {name: directory / f"out.{name}" for name in ("json", "plot", "markdown")}
    arguments = ["bench", "--quick", "--sizes", "0.001,0.002", "--repeat", "1"]
    for name, path in files.items():
        arguments += [f"--{name}", str(path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "first_call_times", lambda repeat: {"samples": {}, "median": dict.fromkeys(
            ("small", "large", "warmup"), 1.0)})  # fmt: skip
        patch.setattr(suite, "_TINY_SECONDS", 0.001)
        status = cli.main(arguments)
    return status, files


def test_bench_writes_every_repetition_as_json(bench_run):
    status, files = bench_run
    assert status == 0
    record = json.loads(files["json"].read_text())
    assert record["schema"] == suite.SCHEMA
    assert record.keys() == {
        "schema", "command", "date", "host", "settings", "cases", "left_out", "others", "skewed", "tiny", "imports",
        "widening",        "captures", "first_call", "peak_memory",
    }  # fmt: skip
    assert record["host"]["versions"]["numpy"] == np.__version__
    assert [round(case["nbytes"] / 1e6) for case in record["cases"]] == [1, 2]
    for case in [*record["cases"], record["skewed"]]:
        assert 0 < case["copied_bytes"] < case["nbytes"]
        assert set(case["arms"]) >= {"bare", "slices_1"} or case is record["skewed"]
        for timing in (*case["arms"].values(), *case["limits"].values()):
            assert timing["samples"]
            assert all(sample["seconds"] > 0 for sample in timing["samples"])
            low, high = timing["quartiles"]
            assert low <= timing["median"] <= high
    for case in record["cases"]:
        assert set(case["limits"]) == {"fresh_1", "fresh_2", "warm_1", "warm_2"}
        for name, arm in case["arms"].items():
            assert (arm["ran"] is not None) == arm["ours"], name
            if name.startswith("slices"):
                assert arm["ran"]["path"] == "slices"
    assert len(record["tiny"]["cases"]) == 6


def test_bench_leaves_no_path_of_this_machine(bench_run):
    _, files = bench_run
    for name in ("json", "markdown"):
        text = files[name].read_text()
        assert str(files["json"].parent) not in text
        assert "out.json" in text


def test_bench_draws_and_writes_the_table(bench_run):
    _, files = bench_run
    assert is_picture(files["plot"])
    text = files["markdown"].read_text()
    assert "r3numba bench --quick" in text.splitlines()[0]
    for part in ("ms per step", "ms saved per step against", "target", "r3numba 0.", "**RouteCollator**"):
        assert part in text
    tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    assert len(tables) == 3
    assert all(len({line.count("|") for line in lines}) == 1 for lines in tables), "rows of equal width"


def test_the_report_reads_the_record_alone(bench_run, capsys):
    from r3numba.cli.bench_report import print_report
    from r3numba.cli.console import console

    _, files = bench_run
    print_report(console(), json.loads(files["json"].read_text()))
    shown = capsys.readouterr().out
    order = [
        shown.index(text) for text in ("GB/s", "ms saved", "Ratios", "Tiny batches", "Peak memory", "Speed targets")
    ]
    assert order == sorted(order)


def test_command_text_keeps_names_of_files_only():
    text = bench.command_text(["r3numba", "bench", "--json", "/some/where/a b.json", "--plot=/x/y.png", "--quick"])
    assert text == "r3numba bench --json 'a b.json' --plot=y.png --quick"
