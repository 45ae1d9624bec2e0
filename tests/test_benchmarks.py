"""The benchmarks measure what they say: equal rectangles, honest figures, a judge of quietness, an asv suite that runs.

Speed itself is never a test.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import oracle
import pytest

from r3numba._bench import arms, figures, fresh_process, host, limit, measure, quiet, shapes, suite

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True, scope="module")
def warned_once():
    """Without Numba the process's first call warns, once: that is not these tests' subject."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        arms.kernels()


# ---- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shapes.SHAPES)
@pytest.mark.parametrize("spread", shapes.SPREADS)
def test_batches_have_their_size_spread_and_legal_routes(name, spread):
    batch = shapes.make_batch(shapes.SHAPES[name], spread, 4_000_000, seed=3)
    assert abs(batch.nbytes / 4_000_000 - 1) < 0.05
    assert max(batch.lengths) == batch.width
    assert abs(min(batch.lengths) / max(batch.lengths) - shapes.SPREADS[spread]) < 0.02
    assert [len(part) for part in batch.routes] == [length - 1 for length in batch.lengths]
    rows = batch.routes[0].reshape(-1, batch.shape.topk)
    assert rows.dtype == batch.shape.dtype
    assert (np.diff(np.sort(rows, axis=1).astype(int), axis=1) > 0).all(), "ids of a row are distinct"
    assert rows.min() >= 0
    assert rows.max() < batch.shape.experts
    again = shapes.make_batch(shapes.SHAPES[name], spread, 4_000_000, seed=3)
    assert all(np.array_equal(one, other) for one, other in zip(batch.routes, again.routes, strict=True))


def test_the_middle_size_is_the_batch_of_the_lead():
    """0.4 GB of 48x8 are about 128 trajectories of 8192 tokens."""
    shape = shapes.RouteShape("48x8", 48, 8, 128)
    rows = 403e6 / shape.row_bytes
    assert round(math.sqrt(rows / shapes.ASPECT)) == 128


def test_skewed_and_tiny_batches():
    skewed = shapes.make_skewed(shapes.SHAPES["47x4"], 10_000_000)
    assert sorted(set(skewed.lengths)) == [512, 16384]
    assert skewed.lengths.count(16384) == 1
    row_bytes = shapes.SHAPES["48x8"].row_bytes
    sizes = [count * tokens * row_bytes for count, tokens in shapes.TINY]
    assert min(sizes) >= 10_000
    assert max(sizes) <= 2_000_000


def test_tiled_captures_keep_rows_in_order():
    captured = [np.arange(5 * 2 * 3, dtype=np.uint8).reshape(5, 2, 3), np.ones((2, 2, 3), np.uint8)]
    batch = shapes.tiled("captured", 30, captured, 2_000_000)
    assert len(batch.routes) == 64
    assert batch.shape.layers == 48
    assert (batch.routes[0][:5, :2] == captured[0]).all()
    assert (batch.routes[0][5:10, 2:4] == captured[0]).all()


# ---- arms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["48x8", "40x22"])
def test_every_arm_gives_the_rectangle_of_the_oracle(name):
    shape = shapes.SHAPES[name]
    batch = shapes.batch_of(shape, [9, 2, 17, 5], "test")
    columns = oracle.left(batch.lengths, batch.width)
    expected, _ = oracle.rectangle(batch.routes, batch.lengths, columns, batch.width, shape.dtype)
    with arms.Workbench(batch) as work:
        chosen = arms.available()
        assert [arm.name for arm in arms.check_equal(work, chosen)] == [arm.name for arm in chosen]
        for arm in chosen:
            result = np.asarray(arm.run(work))
            assert result.tobytes() == expected.tobytes(), arm.name
            del result


def test_equality_is_checked_before_anything_is_timed(monkeypatch):
    batch = shapes.batch_of(shapes.SHAPES["48x8"], [9, 2], "test")
    wrong = arms.Arm("wrong", "wrong", lambda work: _with_a_wrong_byte(arms.ARMS["bare"].run(work)), needs=None)
    with arms.Workbench(batch) as work, pytest.raises(AssertionError, match="wrong differs from bare in trajectory 1"):
        list(arms.check_equal(work, [arms.ARMS["bare"], wrong]))


def _with_a_wrong_byte(array):
    array[1, -1, -1, -1] ^= 1
    return array


def test_arms_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    batch = shapes.batch_of(shapes.SHAPES["48x8"], [9, 2], "test")
    with arms.Workbench(batch) as work:
        names = {arm.name for arm in arms.check_equal(work, arms.available())}
    assert names >= {"bare", "slices_1", "slices_2", "out_2", "recycled_1"}
    assert not names & {"prefill", "single", "pool_2", "single_reused"}


def test_recycled_arms_recycle_and_cold_ones_do_not():
    batch = shapes.batch_of(shapes.SHAPES["48x8"], [900, 20], "test")
    with arms.Workbench(batch) as work:
        addresses = set()
        for _ in range(3):
            result = arms.ARMS["recycled_1"].run(work)
            addresses.add(result.ctypes.data)
            del result
        assert len(addresses) == 1
        kept = [arms.ARMS["slices_1"].run(work) for _ in range(3)]
        assert len({array.ctypes.data for array in kept}) == 3


# ---- limit -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("copied", "filled"), [(5_000_000, 3_000_001), (1_000, 50), (0, 4_500_000), (9_000_000, 0)])
def test_the_limit_moves_every_byte(copied, filled):
    with limit.Limit(copied, filled) as host_limit:
        tasks = host_limit.tasks()
        assert {task.name.split("_")[1] for task in tasks} == {"fresh", "warm"}
        for task in tasks:
            destination = task.run()
            assert task.cold_bytes == (copied + filled if "fresh" in task.name else 0)
            if "libc" in task.name:
                counts = np.bincount(destination[: copied + filled], minlength=8)
                assert (counts[3], counts[7]) == (copied, filled), task.name


def test_the_best_candidate_is_the_limit():
    with limit.Limit(3_000_000, 2_000_000) as host_limit:
        timings = measure.measure(host_limit.tasks([1]), 2, extra=0)
    best = limit.limit_of(timings, "warm", 1)
    assert best.median > 0
    assert best.median == min(timing.median for name, timing in timings.items() if "warm" in name)
    assert limit.limit_of(timings, "warm", 2) is None


# ---- quietness -------------------------------------------------------------------------------------------------------


def write_waits(directory, waits):
    for thread, text in waits.items():
        (directory / thread).mkdir(exist_ok=True)
        (directory / thread / "schedstat").write_text(text)


def test_waiting_is_read_from_every_thread(tmp_path):
    write_waits(tmp_path, {"10": "900 100 5\n", "11": "1 0 1\n", "12": "", "13": "1 x 3", "14": "1"})
    (tmp_path / "15").mkdir()
    assert quiet.read_waits(tmp_path) == {"10": 100, "11": 0}
    assert quiet.read_waits(tmp_path / "nowhere") == {}


@pytest.mark.parametrize(
    ("after", "share"),
    [
        ({"10": 100, "11": 50}, 0.0),
        ({"10": 130, "11": 80}, 0.06),
        ({"10": 100, "11": 50, "12": 59}, 0.059),  # a thread that began brings all its waiting
        ({"10": 700}, 0.6),  # one that ended brings nothing
    ],
)
def test_the_share_of_waiting(after, share):
    assert quiet.wait_share({"10": 100, "11": 50}, after, 1000) == pytest.approx(share)


def test_a_share_of_six_percent_is_noisy_and_an_unknown_one_is_not():
    assert quiet.is_quiet(0.0599)
    assert not quiet.is_quiet(0.06)
    assert quiet.is_quiet(None)
    assert quiet.wait_share({}, {}, 1000) is None


def test_this_kernel_is_read_like_the_fake_one():
    waits = quiet.read_waits()
    assert all(value >= 0 for value in waits.values())
    if Path("/proc/self/schedstat").exists():
        assert str(os.getpid()) in waits


# ---- measuring -------------------------------------------------------------------------------------------------------


def fake_shares(monkeypatch, shares):
    """Let the next repetitions wait for these shares of their wall time, the last one for ever after."""
    left = list(shares)
    monkeypatch.setattr(measure, "wait_share", lambda *_: left.pop(0) if len(left) > 1 else left[0])


def test_quiet_repetitions_end_the_measurement(monkeypatch):
    fake_shares(monkeypatch, [0.0])
    steps = []
    timings = measure.measure([measure.Task("a", int), measure.Task("b", int)], 3, step=steps.append)
    assert {len(timing.samples) for timing in timings.values()} == {3}
    assert steps == ["a", "b", "b", "a", "a", "b"], "interleaved, and the order turns"
    assert not timings["a"].noisy


def test_noisy_repetitions_are_marked_repeated_and_left_out(monkeypatch):
    fake_shares(monkeypatch, [0.0, 0.5, 0.5, 0.0, 0.0])
    timing = measure.measure([measure.Task("a", int)], 3)["a"]
    assert [sample.quiet for sample in timing.samples] == [True, False, False, True, True]
    middle = sorted(sample.seconds for sample in timing.samples if sample.quiet)[1]
    assert timing.median == middle
    assert timing.record()["quiet"] == 3


def test_repeating_is_bounded_and_all_noisy_says_so(monkeypatch):
    fake_shares(monkeypatch, [0.5])
    timing = measure.measure([measure.Task("a", int)], 3, extra=2)["a"]
    assert len(timing.samples) == 5
    assert timing.noisy
    assert timing.record()["noisy"] is True
    assert timing.median > 0


def test_a_cold_repetition_touches_its_size_first(monkeypatch):
    touched = []
    monkeypatch.setattr(measure, "touch_and_free", lambda nbytes, threads: touched.append((nbytes, threads)))
    measure.measure([measure.Task("cold", int, cold_bytes=4096, threads=2), measure.Task("warm", int)], 2, extra=0)
    assert touched == [(4096, 2), (4096, 2)]


def test_torch_threads_come_back_and_are_one_inside():
    torch = pytest.importorskip("torch", reason="needs torch")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        seen = []
        measure.measure([measure.Task("a", lambda: seen.append(torch.get_num_threads()))], 2, extra=0)
        assert seen == [1, 1]
        assert torch.get_num_threads() == 3
        with pytest.raises(ZeroDivisionError):
            measure.measure([measure.Task("a", lambda: 1 / 0)], 1)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_calls_for_fills_its_time():
    assert measure.calls_for(int, 0.001) > 10


# ---- processes of their own, and the host ----------------------------------------------------------------------------


def test_peak_memory_of_a_call_is_its_result():
    record = fresh_process.peak_memory(20_000_000)
    allowed = (1 << 20) + 64 * record["trajectories"]
    assert abs(record["result"] / 20_000_000 - 1) < 0.05
    assert 0 <= record["allocated"] - record["result"] <= allowed
    if record["resident"] is not None:
        assert record["resident"] - record["result"] <= allowed


def test_import_times_leave_the_first_round_out():
    record = fresh_process.import_times(1)
    assert {len(samples) for samples in record["samples"].values()} == {1}
    assert record["median"].keys() == fresh_process.IMPORTS.keys()
    assert all(value > 0 for value in record["median"].values())


def test_a_failing_process_is_an_error():
    with pytest.raises(RuntimeError, match="division by zero"):
        fresh_process.run_python("1 / 0")


def test_host_figures_come_from_their_files(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n")
    assert host.cpu_model(tmp_path / "cpuinfo") == "Some CPU @ 2 GHz"
    assert host.cpu_model(tmp_path / "none")
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert host.huge_page_setting(tmp_path / "enabled") == "madvise"
    assert host.huge_page_setting(tmp_path / "none") is None
    assert host.package_versions()["numpy"] == np.__version__


# ---- figures ---------------------------------------------------------------------------------------------------------


def timing(milliseconds, *, cold=True, ours=False, threads=1, noisy=False):
    return {
        "median": milliseconds / 1e3, "quartiles": [0, 0], "noisy": noisy, "quiet": 1, "samples": [], "cold": cold,
        "ours": ours, "threads": threads, "label": "x", "ran": None,
    }  # fmt: skip


def record(**changes):
    """Return a record with round figures: ours on two threads 10 ms, its limit 8 ms."""
    case = {
        "name": "c", "nbytes": 100_000_000,
        "arms": {
            "prefill": timing(50), "single": timing(40), "slices_1": timing(20, ours=True),
            "slices_2": timing(15, ours=True, threads=2), "serial": timing(18, ours=True),
            "parallel_2": timing(10, ours=True, threads=2), "single_reused": timing(30, cold=False),
            "pool_2_reused": timing(15, cold=False, threads=2), "recycled_1": timing(10, cold=False, ours=True),
            "recycled_2": timing(5, cold=False, ours=True, threads=2),
        },
        "limits": {"fresh_2": timing(8), "fresh_1": timing(15), "warm_2": timing(4), "warm_1": timing(9)},
    }  # fmt: skip
    case["arms"].update(changes)
    tiny = {"name": "t", "trajectories": 4, "overhead": 30e-6, "arms": {
        "single": timing(2), "prefill": timing(3), "bare": timing(0.5), "default": timing(1),
    }}  # fmt: skip
    return {
        "cases": [case], "others": [], "skewed": case, "tiny": {"cases": [tiny]},
        "widening": [{"name": "w", "arms": {"assign": timing(11), "recycled_2": timing(5)}}],
        "captures": [{"name": "three_passes", **timing(31)}, {"name": "compact", **timing(10)}],
        "peak_memory": {"result": 1000, "resident": 1000 + (1 << 20), "allocated": 2000},
        "imports": {"median": {"numpy": 0.1, "r3numba": 0.13}},
    }  # fmt: skip


def test_figures_of_a_case():
    case = record()["cases"][0]
    assert figures.ratio(case, "single", "parallel_2") == pytest.approx(4)
    assert figures.ratio(case, "pool_2", "parallel_2") is None
    assert figures.saved(case, "single") == pytest.approx(0.030)
    assert figures.saved(case, "single_reused") == pytest.approx(0.025)
    assert figures.saved(case, "parallel_2") is None
    assert figures.share_of_limit(case, "parallel_2") == pytest.approx(0.8)
    assert figures.share_of_limit(case, "serial") == pytest.approx(15 / 18)
    assert figures.share_of_limit(case, "recycled_2") == pytest.approx(0.8)


def test_targets_that_are_met():
    rows = figures.targets(record())
    assert [row.met for row in rows] == [True] * len(rows)
    assert not any(row.noisy for row in rows)
    assert [row.measured for row in rows[:3]] == ["4.00x", "5.00x", "1.50x"]


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({"parallel_2": timing(14, ours=True, threads=2)}, {0, 2, 5, 7}),
        ({"slices_1": timing(17, ours=True)}, {3}),
        ({"slices_1": timing(26, ours=True)}, {4}),
        ({"serial": timing(25, ours=True)}, {3, 6}),
        ({"recycled_2": timing(8, cold=False, ours=True, threads=2)}, {8, 9, 11, 14}),
        ({"recycled_1": timing(14, cold=False, ours=True)}, {10, 12}),
    ],
)
def test_targets_that_are_missed(change, missed):
    rows = figures.targets(record(**change))
    assert {index for index, row in enumerate(rows) if row.met is False} == missed


def test_targets_of_tiny_batches_memory_and_import():
    made = record()
    made["tiny"]["cases"][0]["overhead"] = 36.1e-6
    made["tiny"]["cases"][0]["arms"]["default"] = timing(2.5)
    made["peak_memory"]["resident"] += 1
    made["imports"]["median"]["r3numba"] = 0.131
    assert [row.met for row in figures.targets(made)[16:]] == [False, True, False, False, False]


def test_noise_and_absence_are_said():
    made = record(single=timing(40, noisy=True))
    rows = figures.targets(made)
    assert rows[0].noisy
    assert not rows[1].noisy
    assert "c: 1 of 10" in figures.noise_text(made)
    assert figures.noise_text(record()) == "Every timing has quiet repetitions."
    for name in ("single", "prefill"):
        del made["cases"][0]["arms"][name]
        del made["tiny"]["cases"][0]["arms"][name]
    assert [row.met for row in figures.targets(made)][:2] == [None, None]


def test_a_size_that_does_not_fit_is_left_out(monkeypatch):
    monkeypatch.setattr(suite, "cgroup_memory_available", lambda: 1_000)
    assert suite._fitting(1_000, lambda: pytest.fail("must not be made")) is None
    monkeypatch.setattr(suite, "cgroup_memory_available", lambda: None)
    assert suite._fitting(1_000, lambda: "batch") == "batch"


# ---- asv -------------------------------------------------------------------------------------------------------------


def test_asv_runs_every_benchmark_once(tmp_path):
    """A smoke run of the suite in this environment, with a configuration, a home and results of its own."""
    pytest.importorskip("asv", reason="needs asv")
    text = re.sub(r"^\s*//.*$", "", (ROOT / "asv.conf.json").read_text(), flags=re.MULTILINE)
    conf = json.loads(text)
    conf.update(repo=str(ROOT), benchmark_dir=str(ROOT / "benchmarks"), branches=["HEAD"])
    (tmp_path / "asv.conf.json").write_text(json.dumps(conf))
    environment = {
        **os.environ,
        "HOME": str(tmp_path), "ASV_PYTHONPATH": str(ROOT), "R3NUMBA_ASV_SMALL": "1",
        "R3NUMBA_CACHE": "1", "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1",
        "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
    }  # fmt: skip

    def asv(*arguments):
        command = [sys.executable, "-m", "asv", *arguments, "--config", str(tmp_path / "asv.conf.json")]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
        )

    assert asv("machine", "--yes", "--machine", "ci").returncode == 0
    done = asv("run", "--python=same", "--quick", "--show-stderr", "--launch-method", "spawn", "--machine", "ci")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout, done.stdout
    names = set(re.findall(r"^\[.*?%\] ··· ([\w.]+\.\w+) ", done.stdout, flags=re.MULTILINE))
    assert len(names) == 16, done.stdout
    assert {name.rpartition(".")[2].partition("_")[0] for name in names} == {"time", "timeraw", "track", "peakmem"}
    assert "n/a" not in done.stdout, done.stdout
