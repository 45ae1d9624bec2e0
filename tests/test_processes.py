"""What r3numba does to the process it runs in: each case in a process of its own, with a time limit.

Layers are chosen by NUMBA_THREADING_LAYER in the child's environment. A layer that does not load here is skipped with
a reason from the list in ``conftest.py``.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import paths
import pytest

import r3numba

pytestmark = pytest.mark.skipif(paths.available() == ("slices",), reason="needs Numba")

PRELUDE = """
import os, sys, threading, warnings
import numpy as np
import r3numba
from dataclasses import replace
from r3numba._policy import DEFAULT_POLICY
import r3numba._dispatch as dispatch
dispatch.permitted_cpus_cached = lambda: 2

def batch(seed=0, rows=30_000):
    rng = np.random.default_rng(seed)
    routes = [rng.integers(0, 128, (n, 48, 8)).astype(np.uint8) for n in (rows, 7, rows // 2)]
    return routes, [len(r) + 1 for r in routes]

def right(result, routes, lengths):
    width = max(lengths)
    for row, (r, t) in enumerate(zip(routes, lengths)):
        start = width - t
        assert (result.array[row, :start] == np.arange(8)).all()
        assert (result.array[row, start : start + len(r)] == r).all()
        assert (result.array[row, start + len(r) :] == np.arange(8)).all()
    return True

def collate(seed=0, **options):
    routes, lengths = batch(seed)
    result = r3numba.collate_routes(routes, lengths, **options)
    assert right(result, routes, lengths)
    return dict(r3numba.backend_info())
"""


def layer_loads(layer):
    if layer == "tbb":
        try:
            return importlib.util.find_spec("numba.np.ufunc.tbbpool") is not None and _tbb_imports()
        except ImportError:
            return False
    return True


def _tbb_imports():
    done = subprocess.run(
        [sys.executable, "-c", "import numba.np.ufunc.tbbpool"],
        capture_output=True,
        env=environment("tbb"),
        check=False,
    )
    return done.returncode == 0


def environment(layer=None, **more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("R3NUMBA_", "NUMBA_"))}
    if layer is not None:
        kept["NUMBA_THREADING_LAYER"] = layer
    if layer == "tbb":  # pip puts the library where Numba does not look for it
        kept["LD_LIBRARY_PATH"] = os.path.join(sys.prefix, "lib") + os.pathsep + kept.get("LD_LIBRARY_PATH", "")
    return {**kept, "NUMBA_NUM_THREADS": "2", **more}


def run(body, layer=None, timeout=240, arguments=("-W", "error"), **more):
    """Run ``PRELUDE + body`` in a fresh interpreter; return what it printed."""
    code = PRELUDE + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, *arguments, "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(layer, **more),
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(params=["omp", "workqueue", "tbb"])
def layer(request):
    if not layer_loads(request.param):
        pytest.skip("needs a tbb library that Numba finds")
    return request.param


def test_each_layer_takes_its_path(layer):
    out = run("print(*[collate()[key] for key in ('path', 'layer', 'threads')])", layer)
    path = "pool" if layer == "workqueue" else "parallel"
    assert out.split() == [path, layer, "2"]


def test_concurrent_calls_and_a_foreign_parallel_kernel(layer):
    """Two threads collate at once while a third runs another library's parallel kernel (numba#8563, #9288)."""
    foreign = layer != "workqueue"  # two foreign launches at once abort by themselves there; one alone must not
    out = run(
        f"""
        import numba
        @numba.njit(parallel=True)
        def foreign(a):
            for i in numba.prange(a.size):
                a[i] += 1.0
        foreign(np.zeros(8))
        failures, finished = [], []
        def ours(seed):
            try:
                for k in range(6):
                    collate(seed + k)
                finished.append(seed)
            except BaseException as error:
                failures.append(error)
        def theirs():
            a = np.zeros(1_000_000)
            for k in range(60):
                foreign(a)
            assert (a == 60.0).all()
            finished.append("theirs")
        threads = [threading.Thread(target=ours, args=(s,)) for s in (1, 100)] + [threading.Thread(target=theirs)]
        for t in threads: t.start()
        for t in threads: t.join()
        assert not failures, failures
        print(len(finished), {foreign!r})
        """,
        layer,
    )
    assert out.split()[0] == "3"


def test_fork_after_a_collation(layer):
    """GNU OpenMP dies in a forked child at its first launch (fast-array-utils#179)."""
    out = run(
        """
        before = collate()
        child = os.fork()
        if child == 0:
            try:
                info = collate(5)
                print("child", info["path"], flush=True)
                os._exit(0)
            except BaseException:
                import traceback; traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert status == 0, status
        after = collate(9)
        print("parent", before["path"], after["path"])
        """,
        layer,
        arguments=(),
    )
    expected = {"omp": "pool", "workqueue": "pool", "tbb": "parallel"}[layer]
    assert f"child {expected}" in out
    path = "pool" if layer == "workqueue" else "parallel"
    assert f"parent {path} {path}" in out


def test_fork_before_the_first_collation_and_a_foreign_launch(layer):
    """The parent launched through another library and r3numba is first used in the child: nobody told us of it."""
    out = run(
        """
        import numba
        @numba.njit(parallel=True)
        def foreign(a):
            for i in numba.prange(a.size):
                a[i] += 1.0
        foreign(np.zeros(8))
        child = os.fork()
        if child == 0:
            for name in [n for n in sys.modules if n.startswith("r3numba")]:
                del sys.modules[name]  # as if the package were imported after the fork
            import r3numba
            import r3numba._dispatch as dispatch
            dispatch.permitted_cpus_cached = lambda: 2
            routes, lengths = batch()
            assert right(r3numba.collate_routes(routes, lengths), routes, lengths)
            print("child", r3numba.backend_info()["path"], flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0, status
        """,
        layer,
        arguments=(),
    )
    assert "child" in out


def test_pool_is_rebuilt_after_fork_and_raises_in_the_caller():
    run(
        """
        routes, lengths = batch()
        policy = replace(DEFAULT_POLICY, path="pool")
        def once():
            assert right(r3numba.collate_routes(routes, lengths, num_threads=2, _policy=policy), routes, lengths)
        once()
        child = os.fork()
        if child == 0:
            once()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        once()
        seen = []
        def work(pieces):
            seen.append(len(pieces))
            if threading.current_thread() is not threading.main_thread():
                raise KeyError("from a worker")
        try:
            dispatch._over_pool(work, np.zeros((4, 3), np.int64), 2)
        except KeyError as error:
            assert error.args == ("from a worker",) and len(seen) == 2
        else:
            raise AssertionError("a worker's exception was lost")
        """,
        arguments=(),
    )


def test_settings_of_torch_and_numba_are_unchanged(layer):
    """The first omp launch resets torch's thread count (numba#9387); masks are restored in every thread."""
    pytest.importorskip("torch", reason="needs torch")
    run(
        """
        import torch, numba
        environment = dict(os.environ)
        settings = {name: value for name, value in vars(numba.config).items() if name.isupper()}
        torch.set_num_threads(1)
        torch.ones(100_000).sum()  # torch applies its count at a thread's first use
        def check():
            torch.ones(100_000).sum()
            before = torch.get_num_threads(), numba.get_num_threads()
            numba.set_num_threads(1)
            assert collate()["threads"] == 2
            assert numba.get_num_threads() == 1
            numba.set_num_threads(before[1])
            assert collate(num_threads=1)["threads"] == 1
            assert (torch.get_num_threads(), numba.get_num_threads()) == before, before
            seen.append(before[0])
        seen = []
        collate()
        assert torch.get_num_threads() == 1, torch.get_num_threads()
        check()
        worker = threading.Thread(target=check); worker.start(); worker.join()
        assert len(seen) == 2 and seen[0] == 1, seen
        assert dict(os.environ) == environment
        assert {name: value for name, value in vars(numba.config).items() if name.isupper()} == settings
        """,
        layer,
    )


def test_a_refused_launch_restores_the_mask(layer):
    run(
        """
        import numba
        collate()
        before = numba.get_num_threads()
        from r3numba import _numba
        try:
            with _numba.thread_mask(1):
                raise KeyError
        except KeyError:
            pass
        assert numba.get_num_threads() == before
        """,
        layer,
    )


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_torch_data_loader_workers(method, layer, tmp_path):
    pytest.importorskip("torch", reason="needs torch")
    script = tmp_path / "loader.py"
    script.write_text(
        PRELUDE
        + textwrap.dedent(
            f"""
            import torch
            class Trajectories(torch.utils.data.Dataset):
                def __len__(self): return 4
                def __getitem__(self, index):
                    rng = np.random.default_rng(index)
                    return rng.integers(0, 128, (20_000 + index, 48, 8)).astype(np.uint8)
            def together(routes):
                lengths = [len(r) + 1 for r in routes]
                result = r3numba.collate_routes(routes, lengths)
                assert right(result, routes, lengths)
                return result.indices, r3numba.backend_info()["path"]
            if __name__ == "__main__":
                collate()  # the parent has launched before it forks
                loader = torch.utils.data.DataLoader(
                    Trajectories(), batch_size=2, num_workers=2, collate_fn=together,
                    multiprocessing_context={method!r},
                )
                seen = [(tuple(indices.shape), path) for indices, path in loader]
                assert [shape for shape, _ in seen] == [(2, 20_002, 48, 8), (2, 20_004, 48, 8)], seen
                print(*[path for _, path in seen])
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, env=environment(layer), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    expected = "pool" if layer == "workqueue" or (method == "fork" and layer == "omp") else "parallel"
    assert done.stdout.split() == [expected, expected]


def test_one_cpu_quota_runs_one_thread():
    out = run(
        """
        import r3numba.topology as topology
        dispatch.permitted_cpus_cached = lambda: 1
        info = collate()
        print(info["threads"], info["path"])
        info = collate(num_threads=8)
        print(info["threads"], info["path"])
        """,
        "omp",
    )
    assert out.split() == ["1", "serial", "1", "serial"]


def test_import_is_light():
    code = (
        "import sys, r3numba, r3numba.topology, r3numba.guards\n"
        "heavy = {'numpy', 'numba', 'torch', 'llvmlite'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import threading; assert threading.active_count() == 1\n"
        "assert 'collate_routes' in dir(r3numba)\n"
        "try:\n    r3numba.nothing\nexcept AttributeError as error:\n    assert 'nothing' in str(error)\n"
        "else:\n    raise AssertionError\n"
        "r3numba.collate_routes\n"
        "assert 'numba' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_a_host_without_numba_warns_once_and_gives_the_same():
    out = run(
        """
        sys.modules["numba"] = None
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            first, second = collate(), collate(3)
        assert [str(w.message).startswith("r3numba runs without Numba") for w in seen] == [True], seen
        print(first["backend"], first["path"], second["path"])
        r3numba.warmup()
        """,
        arguments=(),
    )
    assert out.split() == ["numpy", "slices", "slices"]


def test_backend_numba_without_numba_is_an_import_error():
    run(
        """
        sys.modules["numba"] = None
        for _ in range(2):
            try:
                collate()
            except ImportError as error:
                assert "R3NUMBA_BACKEND=numba" in str(error)
            else:
                raise AssertionError
        """,
        R3NUMBA_BACKEND="numba",
    )


@pytest.mark.parametrize(
    ("word", "expected"),
    [("force_parallel", "parallel"), ("force_pool", "pool"), ("force_serial", "serial"), ("force_slices", "slices")],
)
def test_environment_forces_a_path_at_any_size_but_no_thread_count(word, expected):
    out = run(
        """
        r3numba.collate_routes([np.ones((1, 1, 1), np.uint8)], [2])
        small = dict(r3numba.backend_info())
        large = collate(num_threads=2)
        print(small["path"], small["threads"], large["path"], large["threads"])
        """,
        "omp",
        R3NUMBA_POLICY=word,
    )
    threads = "1" if word == "force_serial" else "2"
    assert out.split() == [expected, "1", expected, threads]


def test_warmup_compiles_everything_a_later_call_needs():
    out = run(
        """
        r3numba.warmup()
        from r3numba import _audit_kernels, _kernels, _streaming
        def compiled():
            return sum(len(kernel.signatures) for kernel in (
                _kernels.move_serial, _kernels.move_parallel, _kernels.scan_serial, _kernels.scan_parallel,
                _kernels.narrow_serial, _streaming.stream_serial, _audit_kernels.audit_serial,
                _audit_kernels.both_serial))
        before = compiled()
        routes, lengths = batch()
        strided = [r[:, ::2, ::-1] for r in routes]
        for sources in (routes, strided, [np.asfortranarray(r) for r in routes]):
            for dtype in ("uint8", "int16", "int32"):
                for audit in (False, True):
                    r3numba.collate_routes(sources, lengths, dtype=dtype, audit=audit)
                    r3numba.audit_routes(sources, num_experts=100)
                r3numba.collate_routes(sources[1:2], lengths[1:2], dtype=dtype, missing=[np.arange(7) == 3])
                r3numba.pack_routes(sources, lengths, dtype=dtype, out=None)
        out = np.empty((sum(lengths), 48, 8), np.uint8)
        r3numba.pack_routes(routes, lengths, out=out)
        for dtype in (np.uint8, np.int8, np.uint16, np.int16, np.int32, np.int64):
            r3numba.compact_routes(np.abs(routes[0].astype(dtype)))
            frozen = np.abs(routes[1].astype(dtype)); frozen.flags.writeable = False
            r3numba.compact_routes(frozen)
            for experts in (128, 512, 1 << 20):
                r3numba.compact_routes(np.abs(routes[0].astype(dtype)) % 120, num_experts=experts)
                r3numba.compact_routes(np.abs(routes[1].astype(dtype)) % 120, num_experts=experts)
        large = r3numba.pack_routes(routes * 2, lengths * 2, dtype="uint8").array
        for dtype in ("uint8", "int16", "int32"):
            large = np.empty((sum(lengths) * 2, 48, 8), dtype)
            r3numba.pack_routes(routes * 2, lengths * 2, dtype=dtype, out=large, audit=True)
            r3numba.pack_routes(routes * 2, lengths * 2, dtype=dtype, out=large)
            assert r3numba.backend_info()["path"] == "streaming"
        assert compiled() == before, (before, compiled())
        print(before)
        """,
        "omp",
    )
    assert int(out) > 0


def test_cache_switch_is_guarded_where_nothing_is_writable(tmp_path):
    """R3NUMBA_CACHE=1: Numba raises at decoration without a writable place; with one, files appear there."""
    run("collate()", "omp", R3NUMBA_CACHE="1", NUMBA_CACHE_DIR=str(tmp_path))
    assert list(tmp_path.rglob("*.nbi"))
    names = {index.name.split("-")[0] for index in tmp_path.rglob("*.nbi")}
    assert {"_kernels.move_serial", "_kernels.move_parallel"} <= names or {"_kernels.move_parallel"} <= names
    run("for _ in '12': collate(audit=True)", "omp", R3NUMBA_CACHE="1", NUMBA_CACHE_DIR=str(tmp_path))
    found = {index: index.stat().st_mtime_ns for index in tmp_path.rglob("*.nbi")}
    assert any("both_serial" in index.name for index in found)
    run("collate(audit=True)", "omp", R3NUMBA_CACHE="1", NUMBA_CACHE_DIR=str(tmp_path))  # loaded, not written again
    assert {index: index.stat().st_mtime_ns for index in tmp_path.rglob("*.nbi")} == found
    out = run(
        """
        import numba.core.caching as caching
        caching.CacheImpl._locator_classes = []
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            collate()
        print(sum("R3NUMBA_CACHE=1 has no effect" in str(w.message) for w in seen))
        """,
        "omp",
        arguments=(),
        R3NUMBA_CACHE="1",
    )
    assert int(out) >= 1


def test_a_kernel_on_disk_is_never_older_than_what_it_calls(tmp_path):
    """Another constant in another file, every date as it was: the kernel is compiled again."""
    package = tmp_path / "r3numba"
    shutil.copytree(Path(r3numba.__file__).parent, package)
    code = "import numpy, r3numba; r3numba.collate_routes([numpy.ones((3, 1, 2), 'u1')], [4]); print(r3numba.__file__)"
    counts = []
    for change in ("", "\n# another constant\n"):
        plan = package / "_plan.py"
        before = plan.stat()
        plan.write_text(plan.read_text() + change)
        os.utime(plan, ns=(before.st_atime_ns, before.st_mtime_ns))
        shutil.rmtree(package / "__pycache__", ignore_errors=True)
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120,
            env=environment("omp", R3NUMBA_CACHE="1", NUMBA_CACHE_DIR=str(tmp_path / "kernels")),
        )  # fmt: skip
        assert done.stdout.strip() == str(package / "__init__.py"), done.stderr
        counts.append(len(list(tmp_path.rglob("*move_serial*.nbi"))))
    assert counts == [1, 2]


def test_releases_the_gil_while_bytes_move():
    """Another thread counts while a large batch is collated from an event loop's worker thread."""
    run(
        """
        import asyncio, time
        routes, lengths = batch(rows=200_000)
        r3numba.collate_routes(routes, lengths, num_threads=1)
        async def main():
            task = asyncio.create_task(asyncio.to_thread(r3numba.collate_routes, routes, lengths, num_threads=1))
            ticks = 0
            while not task.done():
                await asyncio.sleep(0.001)
                ticks += 1
            assert right(task.result(), routes, lengths)
            assert ticks > 5, ticks
        asyncio.run(main())
        """,
        "omp",
    )
