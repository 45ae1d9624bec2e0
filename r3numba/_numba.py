"""The one module that touches Numba: options, address intrinsics, layer, thread mask, cache switch.

Importing it imports Numba (0.4 to 0.9 s) and nothing else happens: no pool starts, no setting changes, no file is
written. ``_dispatch`` imports it at the first call that needs it, and treats a failure as "no Numba here".
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

__all__ = [
    "address_of", "copy_bytes", "int64", "jit", "load_int16", "load_int32", "load_uint8", "load_uint32", "load_uint64",
    "prange", "prefetch", "store_int16", "store_int32", "store_int64", "store_uint8", "uint64",
]  # fmt: skip

#: NUMBA_DISABLE_JIT=1 runs the kernels as plain Python: for debuggers, coverage and bounds checks.
JIT_DISABLED: bool = bool(numba.config.DISABLE_JIT)


@functools.lru_cache(maxsize=1)
def _sources() -> str:
    """Return a digest of the package's sources.

    A kernel on disk holds what it calls and every constant, from whatever file, but Numba's own stamp is the date of
    one file: after an update, or with dates that an image has made equal, an old kernel could serve new callers.
    """
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def jit(*, parallel: bool) -> Callable[[Any], Any]:
    """Return the decorator of every kernel: ``nogil``; ``cache`` where R3NUMBA_CACHE=1 and a writable place allow."""

    def decorate(function: Any) -> Any:
        if os.environ.get("R3NUMBA_CACHE", "") == "1":
            name = function.__qualname__
            function.__qualname__ = f"{name}-{_sources()}"  # Numba names the file after it
            try:
                return numba.njit(function, parallel=parallel, nogil=True, cache=True)
            except RuntimeError as error:  # Numba raises at decoration where it finds no writable place
                warnings.warn(f"R3NUMBA_CACHE=1 has no effect: {error}", RuntimeWarning, stacklevel=2)
            finally:
                function.__qualname__ = name
        return numba.njit(function, parallel=parallel, nogil=True)

    return decorate


def choose_when_compiled(function: Any) -> Callable[[Any], Any]:
    """Return the decorator of what chooses, by types of arguments, the form of ``function`` that is compiled."""

    def decorate(choose: Any) -> Any:
        return choose if JIT_DISABLED else overload(function)(choose)

    return decorate


def is_none(numba_type: Any) -> bool:
    """Say whether an argument of this type is None."""
    return isinstance(numba_type, (types.NoneType, types.Omitted))


def is_tuple(numba_type: Any) -> bool:
    """Say whether an argument of this type is a tuple."""
    return isinstance(numba_type, types.BaseTuple)


# --- Addresses ----------------------------------------------------------------------------------------------------
# A kernel takes a table of addresses, because every container of arrays costs more than the copy of a small batch
# (a reflected list of 1024 arrays: 16 to 27 ms). The loads are marked "align 1": a payload that was decoded in place
# may start at any byte. The plain-Python twins below serve NUMBA_DISABLE_JIT, under which intrinsics do not exist.


def _load(numba_type: Any, bits: int) -> Any:
    @intrinsic
    def load(typing_context: Any, address: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            base = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            value = builder.load(builder.gep(base, [arguments[1]]))
            value.align = 1
            return value

        return numba_type(types.int64, types.int64), generate

    return load


def _store(bits: int) -> Any:
    @intrinsic
    def store(typing_context: Any, address: Any, index: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            base = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            whole = context.cast(
                builder, arguments[2], value, types.int64
            )  # LLVM narrows it again where that is enough
            builder.store(builder.trunc(whole, ir.IntType(bits)) if bits < 64 else whole,
                          builder.gep(base, [arguments[1]]), align=1)  # fmt: skip

        return types.void(types.int64, types.int64, value), generate

    return store


@intrinsic
def _copy_bytes(typing_context: Any, destination: Any, source: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        to, start = (builder.inttoptr(value, byte) for value in arguments[:2])
        cgutils.raw_memcpy(builder, to, start, arguments[2], ir.Constant(ir.IntType(64), 1))

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _prefetch(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        number, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        signature = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
        # For a read (0), of data that will be used once (locality 0), into the data cache (1). Past the end of the
        # source it asks for nothing: a prefetch never faults.
        hints = [ir.Constant(number, hint) for hint in (0, 0, 1)]
        builder.call(function, [builder.inttoptr(arguments[0], byte), *hints])

    return types.void(types.int64), generate


@intrinsic
def _address_of(typing_context: Any, array: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(context.make_array(array)(context, builder, arguments[0]).data, ir.IntType(64))

    return types.int64(array), generate


def _python_load(c_type: Any) -> Callable[[int, int], int]:
    size = ctypes.sizeof(c_type)
    return lambda address, index: int(c_type.from_address(int(address) + int(index) * size).value)


def _python_store(c_type: Any) -> Callable[[int, int, int], None]:
    size = ctypes.sizeof(c_type)

    def store(address: int, index: int, value: int) -> None:
        c_type.from_address(int(address) + int(index) * size).value = int(value)

    return store


def _python_copy(destination: int, source: int, count: int) -> None:
    ctypes.memmove(int(destination), int(source), int(count))


if JIT_DISABLED:
    load_uint8: Any = _python_load(ctypes.c_uint8)
    load_int16: Any = _python_load(ctypes.c_int16)
    load_int32: Any = _python_load(ctypes.c_int32)
    load_uint32: Any = _python_load(ctypes.c_uint32)
    load_uint64: Any = lambda address, index: np.uint64(_python_load(ctypes.c_uint64)(address, index))  # noqa: E731
    store_uint8: Any = _python_store(ctypes.c_uint8)
    store_int16: Any = _python_store(ctypes.c_int16)
    store_int32: Any = _python_store(ctypes.c_int32)
    store_int64: Any = _python_store(ctypes.c_int64)
    int64: Any = int
    uint64: Any = np.uint64
    copy_bytes: Any = _python_copy
    prefetch: Any = lambda address: None  # noqa: E731
    address_of: Any = lambda array: array.ctypes.data  # noqa: E731  (a def would need the annotation twice)
else:
    load_uint8 = _load(types.uint8, 8)
    load_int16 = _load(types.int16, 16)
    load_int32 = _load(types.int32, 32)
    load_uint32 = _load(types.uint32, 32)
    load_uint64 = _load(types.uint64, 64)
    store_uint8 = _store(8)
    store_int16 = _store(16)
    store_int32 = _store(32)
    store_int64 = _store(64)
    int64 = numba.int64
    uint64 = numba.uint64
    copy_bytes = _copy_bytes
    prefetch = _prefetch
    address_of = _address_of


# --- Threads ------------------------------------------------------------------------------------------------------


def _never_executed() -> bool:
    """Say whether this process was forked and never replaced its image (exec), by the kernel's own record.

    The parent may have launched in another library before this module was imported, and nobody else can tell.
    """
    try:
        with open("/proc/self/stat", "rb") as stat:
            flags = int(stat.read().rpartition(b")")[2].split()[6])
    except (OSError, ValueError, IndexError):
        return False
    return bool(flags & 0x40)  # PF_FORKNOEXEC


_forked = _never_executed()


def _after_fork_in_child() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def in_forked_child() -> bool:
    """Say whether this is a forked child, where GNU OpenMP may die at its first launch (fast-array-utils#179)."""
    return _forked


def layer_name() -> str | None:
    """Return the threading layer that this process runs on, or None while nothing has started it."""
    try:
        return str(numba.threading_layer())
    except ValueError:
        return None


def thread_limit() -> int:
    """Return the largest thread count that a launch can have (NUMBA_NUM_THREADS)."""
    return int(numba.config.NUMBA_NUM_THREADS)


@contextlib.contextmanager
def thread_mask(threads: int) -> Iterator[None]:
    """Run the body with this thread's Numba mask at ``threads``, and leave Numba's and torch's settings as they were.

    The mask is thread-local, so other threads see nothing. The first launch on the omp layer, and already the first
    compilation, resets torch's thread count (numba#9387): it is read before either and written back if it changed.
    """
    if JIT_DISABLED:
        yield
        return
    with torch_threads_kept():
        before = numba.get_num_threads()
        numba.set_num_threads(threads)
        try:
            yield
        finally:
            numba.set_num_threads(before)


@contextlib.contextmanager
def torch_threads_kept() -> Iterator[None]:
    """Restore this thread's torch thread count after the body, where torch is loaded at all."""
    torch = sys.modules.get("torch")
    read = getattr(torch, "get_num_threads", None)  # absent while another thread is still importing torch
    if torch is None or read is None:
        yield
        return
    before = read()
    try:
        yield
    finally:
        if read() != before:
            torch.set_num_threads(before)


_start_lock = threading.Lock()


def start_layer(probe: Callable[[], None]) -> str:
    """Return the threading layer, starting it with ``probe`` (a compilation of a parallel function) if need be."""
    name = layer_name()
    if name is None:
        with _start_lock, torch_threads_kept():
            probe()
            name = layer_name()
    return name or "none"
