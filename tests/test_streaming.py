"""Streaming stores: when they are used, that they write what plain stores write, and that every thread sees it."""

from __future__ import annotations

import platform
import subprocess
import sys
import threading

import numpy as np
import paths
import pytest

from r3numba import RouteCollator, backend_info, collate_routes
from r3numba._dispatch import move_arguments, streams
from r3numba._plan import row_major
from r3numba._policy import DEFAULT_POLICY, policy_from_environment
from r3numba._sources import read_sources

pytestmark = pytest.mark.skipif(paths.available() == ("slices",), reason="needs Numba")
FORCED = paths.forced("streaming", **paths.TINY_PIECES)
WIDENINGS = [("uint8", "uint8"), ("uint8", "int16"), ("uint8", "int32"), ("int16", "int16"), ("int16", "int32"),
             ("int32", "int32")]  # fmt: skip


def has_stores():
    return paths.may_report("streaming") == ("streaming",)


def need_stores():
    if not has_stores():
        pytest.skip("needs streaming stores")


def test_x86_has_them():
    """So that a lane where they broke cannot pass by skips and by plain stores."""
    assert has_stores() == (platform.machine() in ("x86_64", "AMD64") and paths.compiled())


def guarded(offset, count, dtype):
    """Return ``count`` elements that begin ``offset`` bytes past a cache line, between bytes of a sentinel."""
    size = np.dtype(dtype).itemsize
    raw = np.full(count * size + 256, 0xA5, np.uint8)
    begin = -raw.ctypes.data % 64 + 64 + offset
    return raw[begin : begin + count * size].view(dtype), raw, begin


@pytest.mark.parametrize(("source", "dtype"), WIDENINGS)
def test_every_alignment_and_length(source, dtype):
    """From every address to every aligned one, every length around the shortest run and around a few lines."""
    rng = np.random.default_rng(1)
    info, size = np.iinfo(source), np.dtype(dtype).itemsize
    sizes = [1, 2, 63, 64, 65, *range(120, 200), 1023, 1024, 1025, 2047, 4096 + 63]
    for offset in range(0, 64, size):
        for count in sizes:
            routes, *_ = guarded((offset * 7 + count) % 64, count, source)
            routes = routes if routes.flags.aligned else routes.copy()
            routes[:] = rng.integers(0, info.max, count, dtype=source, endpoint=True)
            out, raw, begin = guarded(offset, count, dtype)
            options = {"dtype": dtype, "out": out.reshape(1, -1, 1, 1), "_policy": FORCED}
            collate_routes([routes.reshape(-1, 1, 1)], [count], **options)
            assert np.array_equal(out, routes), (offset, count)
            raw[begin : begin + count * size] = 0xA5
            assert (raw == 0xA5).all(), (offset, count)
    assert backend_info()["path"] in paths.may_report("streaming")


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32"])
@pytest.mark.parametrize("threads", [1, 2])
def test_dummies_at_every_alignment(dtype, threads, monkeypatch):
    """Left padding and suffix of rows that no line holds a whole number of, longer than the fill's template."""
    monkeypatch.setattr("r3numba._dispatch.permitted_cpus_cached", lambda: 2)
    routes, size = np.full((2, 1, 7), 9, np.uint8), np.dtype(dtype).itemsize
    for offset in range(0, 64, size):
        for suffix in (0, 1, 20, 3_000):
            width = 5_000 + suffix
            out, raw, begin = guarded(offset, width * 7, dtype)
            result = out.reshape(1, width, 1, 7)
            options = {"dtype": dtype, "out": result, "num_threads": threads, "_policy": FORCED}
            collate_routes([routes], [2 + suffix], max_length=width, **options)
            assert (result[0, : width - suffix - 2] == np.arange(7)).all()
            assert (result[0, width - suffix - 2 : width - suffix] == 9).all()
            assert (result[0, width - suffix :] == np.arange(7)).all()
            raw[begin : begin + out.nbytes] = 0xA5
            assert (raw == 0xA5).all()


# ---- when they are used ----------------------------------------------------------------------------------------------


def large(nbytes):
    """Return routes whose rectangle has ``nbytes``, and its length."""
    return [np.zeros((nbytes // 400 - 1, 50, 8), np.uint8)], [nbytes // 400]


def ran():
    return backend_info()["path"]


@pytest.mark.large
def test_only_large_results_in_mapped_memory(monkeypatch):
    monkeypatch.setenv("R3NUMBA_NUM_THREADS", "1")
    for nbytes, above in ((31_999_600, False), (32_000_000, True)):
        expected = paths.may_report("streaming")[0] if above else "serial"
        routes, lengths = large(nbytes)
        out = collate_routes(routes, lengths).array
        assert ran() == "serial"  # fresh
        collate_routes(routes, lengths, out=out)
        assert ran() == expected
        collator = RouteCollator()
        collator.collate_routes(routes, lengths)
        assert ran() == "serial"  # its first buffer is fresh
        collator.collate_routes(routes, lengths)
        assert ran() == expected
        packed = collator.pack_routes(routes, lengths)
        assert ran() == expected
        packed.select([0])
        assert ran() == "serial"  # fresh


@pytest.mark.parametrize("word", ["", "force_streaming"])
def test_the_switch_turns_them_off(monkeypatch, word):
    monkeypatch.setenv("R3NUMBA_POLICY", word)
    for switch in ("", "1", "0"):
        monkeypatch.setenv("R3NUMBA_STREAMING", switch)
        policy = policy_from_environment()
        assert streams(1 << 40, fresh=False, policy=policy) == (has_stores() and switch != "0")
        collate_routes([np.ones((9, 1, 1), np.uint8)], [9], num_threads=1)
        assert ran() == (paths.may_report("streaming")[0] if word and switch != "0" else "serial")


@pytest.mark.parametrize("word", ["off", "2", "true", " 0"])
def test_an_unknown_word_is_refused(monkeypatch, word):
    monkeypatch.setenv("R3NUMBA_STREAMING", word)
    with pytest.raises(ValueError, match=f"^R3NUMBA_STREAMING is '{word}', need 0 or 1$"):
        collate_routes([np.ones((9, 1, 1), np.uint8)], [9])


def test_forced_paths_keep_plain_stores():
    for path in ("serial", "parallel", "pool", "slices"):
        assert not streams(1 << 40, fresh=False, policy=paths.forced(path))
    assert not streams((32 * 10**6) - 1, fresh=False, policy=DEFAULT_POLICY)
    assert not streams(1 << 40, fresh=True, policy=DEFAULT_POLICY)


# ---- hosts without them ----------------------------------------------------------------------------------------------

ABSENT = {
    "another processor": "import platform; platform.machine = lambda: 'aarch64'",
    "the compiler ignores the mark": (
        "from llvmlite import ir; old = ir.Instruction.set_metadata\n"
        "def forget(self, name, node):\n"
        "    return None if name == 'nontemporal' else old(self, name, node)\n"
        "ir.Instruction.set_metadata = forget"
    ),
    "the compiler refuses it": (
        "from llvmlite import ir; old = ir.Instruction.set_metadata\n"
        "def fail(self, name, node):\n"
        "    if name == 'nontemporal':\n"
        "        raise NotImplementedError(name)\n"
        "    old(self, name, node)\n"
        "ir.Instruction.set_metadata = fail"
    ),
    "the module is gone": "import sys; sys.modules['r3numba._streaming'] = None",
    "no fence": (
        "from numba.core import cgutils; old = cgutils.get_or_insert_function\n"
        "def find(module, signature, name):\n"
        "    if 'sfence' in name:\n"
        "        raise RuntimeError(name)\n"
        "    return old(module, signature, name)\n"
        "cgutils.get_or_insert_function = find"
    ),
}


@pytest.mark.parametrize("how", ABSENT)
def test_without_them_plain_stores_write_the_same(how):
    """No warning, no error: the same bytes by the plain path, forced or large."""
    code = f"""
import warnings
warnings.simplefilter("error")
{ABSENT[how]}
import numpy as np, r3numba
rng = np.random.default_rng(3)
routes = [rng.integers(0, 256, (n, 50, 8), np.uint8) for n in (79_999, 5_000)]
lengths = [80_000, 5_001]
out = np.zeros((2, 80_000, 50, 8), np.uint8)
r3numba.collate_routes(routes, lengths, out=out, num_threads=1)
print(r3numba.backend_info()["path"])
expected = r3numba.collate_routes(routes, lengths).array
assert np.array_equal(out, expected)
import os
os.environ["R3NUMBA_POLICY"] = "force_streaming"
out[:] = 0
r3numba.collate_routes(routes, lengths, out=out, num_threads=1)
print(r3numba.backend_info()["path"])
assert np.array_equal(out, expected)
r3numba.warmup()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.split() == ["serial", "serial"]


# ---- what other threads see ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("audit", [False, True])
def test_the_fence_is_the_last_thing_a_worker_does(audit):
    need_stores()
    from r3numba import _audit_kernels, _streaming

    collate_routes([np.ones((9, 8, 8), np.uint8)], [9], audit=audit, num_threads=1, _policy=FORCED)
    kernel = _audit_kernels.both_serial if audit else _streaming.stream_serial
    codes = [code for arguments, code in kernel.inspect_asm().items() if not audit or "none" not in str(arguments)]
    assert codes
    for code in codes:
        lines = [line.split()[0] for line in code.splitlines() if line.startswith("\t") and line.split()]
        streamed = [index for index, word in enumerate(lines) if word.startswith(("movnt", "vmovnt"))]
        fences = [index for index, word in enumerate(lines) if word == "sfence"]
        assert streamed
        assert fences
        after = lines[fences[-1] :]
        assert not any(word.startswith(("movnt", "vmovnt")) for word in after[: after.index("retq")])


def test_another_thread_sees_every_byte_right_after_the_call():
    """A plain store, the next instruction after the kernel's fence, tells a thread that spins on it: no lock between.

    Locks order everything by themselves and would hide a missing fence.
    """
    need_stores()
    from r3numba._numba import jit
    from r3numba._streaming import stream_serial

    @jit(parallel=False)
    def stream_and_tell(pieces, flag, turn, out, mask, *table):
        stream_serial(pieces, 1, out, mask, *table)
        flag[0] = turn

    rows, turns = 4_000, 1_500
    batches = [np.full((rows, 8, 8), value, np.uint8) for value in (3, 200)]
    out, mask = np.zeros(rows * 64, np.uint8), np.empty(rows, np.bool_)
    plans = [row_major(read_sources([b]), np.array([0, rows]), np.zeros(1, np.int64), out.dtype) for b in batches]
    pieces, flag = np.array([[0, rows, 0, 0]]), np.zeros(1, np.int64)
    stream_and_tell(pieces, flag, 0, *move_arguments(plans[0], out, mask))
    wrong, seen = [], threading.Barrier(2)

    def read():
        for turn in range(1, turns + 1):
            while flag[0] != turn:
                pass
            if not (out[-8192:] == (3, 200)[turn % 2]).all():
                wrong.append(turn)
            seen.wait(60)

    reader = threading.Thread(target=read)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        reader.start()
        for turn in range(1, turns + 1):
            stream_and_tell(pieces, flag, turn, *move_arguments(plans[turn % 2], out, mask))
            seen.wait(60)
        reader.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


@pytest.mark.parametrize("threads", [1, 2])
def test_tensors_and_threads_see_the_batch(threads, monkeypatch):
    """The whole call, recycled, many times: a waiting thread compares every byte as soon as it returns."""
    monkeypatch.setattr("r3numba._dispatch.permitted_cpus_cached", lambda: 2)
    monkeypatch.setenv("R3NUMBA_POLICY", "force_streaming")
    collator, values = RouteCollator(), (5, 90)
    inputs = [[np.full((700, 4, 8), value, np.uint8)] for value in values]
    ready, done, wrong, current = threading.Event(), threading.Event(), [], []

    def read():
        for turn in range(300):
            assert ready.wait(60)
            ready.clear()
            if not (current[0].array[0, 100:800] == values[turn % 2]).all():
                wrong.append(turn)
            current.clear()
            done.set()

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(300):
        current.append(collator.collate_routes(inputs[turn % 2], [700], max_length=800, num_threads=threads))
        ready.set()
        assert done.wait(60)
        done.clear()
    reader.join()
    assert wrong == []
