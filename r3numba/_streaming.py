"""Streaming stores: each line of the result goes to memory past the caches, unread.

A plain store reads the line that it is about to overwrite, because it might change only a part of it. A non-temporal
store collects a whole line in the processor and sends it off. On memory that is mapped already that saves a third of
the traffic of a copy and half of that of a fill; on fresh pages, which the kernel has just cleared in cache, and on
results that the caches hold, it loses. So ``_dispatch`` uses it for large recycled or caller-owned memory only, and
``R3NUMBA_STREAMING=0`` never. The figures are in docs/performance.md.

Importing this module compiles a probe. Where the processor or LLVM has no such store, the import fails, and the plain
stores of ``_kernels`` serve: same walk, same bytes.
"""

from __future__ import annotations

import platform

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ._kernels import move_piece, plain_run
from ._numba import JIT_DISABLED, jit, prefetch
from ._plan import AHEAD, LINE

if JIT_DISABLED or platform.machine().lower() not in ("x86_64", "amd64"):
    raise ImportError("streaming stores are for compiled kernels on x86-64: nothing else was measured")


def _line(from_bits, to_bits, signed):
    """Return the intrinsic that streams one line of ids of ``to_bits`` bits, read from ids of ``from_bits`` bits."""

    @intrinsic
    def stream_line(typing_context, target, source):
        def generate(context, builder, signature, arguments):
            ids = 8 * LINE // to_bits  # as many as make one line
            read = ir.VectorType(ir.IntType(from_bits), ids)
            written = ir.VectorType(ir.IntType(to_bits), ids)
            # Load them at once from any address: a payload that was decoded in place begins at any byte.
            value = builder.load(builder.inttoptr(arguments[1], read.as_pointer()))
            value.align = 1
            if to_bits > from_bits:  # widen in registers; uint8 has no sign to keep
                value = (builder.sext if signed else builder.zext)(value, written)
            # One store of the whole line. Its address is a multiple of 64, which the caller sees to.
            store = builder.store(value, builder.inttoptr(arguments[0], written.as_pointer()), align=LINE)
            # LLVM's mark for "will not be read soon"; with it, and with the alignment, x86 gets MOVNT instructions.
            store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))

        return types.void(types.int64, types.int64), generate

    return stream_line


stream_line = _line(8, 8, signed=False)
_uint8_to_int16 = _line(8, 16, signed=False)
_uint8_to_int32 = _line(8, 32, signed=False)
_int16_to_int32 = _line(16, 32, signed=True)


@intrinsic
def fence(typing_context):
    def generate(context, builder, signature, arguments):
        # SFENCE: all streamed lines are visible to other threads before any store that follows. x86 orders plain
        # stores by itself, but not these; without it a thread that hears "done" could read old bytes.
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse.sfence"
        )
        builder.call(function, [])

    return types.void(), generate


@jit(parallel=False)
def stream_run(target, size, address, itemsize, count):
    """Write what ``plain_run`` writes: whole lines streamed, the ends before and after them with plain stores.

    Ids of 8 bytes, which no layout has yet, get plain stores only.
    """
    a_line = LINE // size  # ids
    head = min(count, (-target & (LINE - 1)) // size) if size <= 4 else count
    lines = (count - head) // a_line
    source = address + head * itemsize
    start = target + head * size
    end = start + lines * LINE
    if itemsize == size:
        for line in range(start, end, LINE):
            prefetch(source + AHEAD)
            stream_line(line, source)
            source += LINE
    elif size == 2:
        for line in range(start, end, LINE):
            prefetch(source + AHEAD)
            _uint8_to_int16(line, source)
            source += LINE // 2
    elif itemsize == 1:
        for line in range(start, end, LINE):
            prefetch(source + AHEAD)
            _uint8_to_int32(line, source)
            source += LINE // 4
    else:
        for line in range(start, end, LINE):
            prefetch(source + AHEAD)
            _int16_to_int32(line, source)
            source += LINE // 2
    tail = head + lines * a_line
    for first, stop in ((0, head), (tail, count)):
        plain_run(target + first * size, size, address + first * itemsize, itemsize, stop - first)


@jit(parallel=False)
def stream_serial(pieces, shortest, out, mask, *table):
    """Do what ``move_serial`` does, with streaming stores from runs of ``shortest`` bytes on; every thread sees it.

    It has no prange form: more threads run it over our own pool, which is as fast (0.4 GB, two threads, plain stores:
    29 ms, prange 30) and starts no layer.
    """
    for piece in range(pieces.shape[0]):
        move_piece(shortest, out, mask, pieces[piece, 0], pieces[piece, 1], pieces[piece, 2], *table)
    fence()


def _probe(target, source):
    stream_line(target, source)
    fence()


def _refuse_without_stores() -> None:
    """Raise ImportError unless this processor and this LLVM turn the marks above into streaming stores and a fence."""
    probe = numba.njit(_probe)  # never cached: its assembly is what is looked at
    probe.compile("void(int64, int64)")
    (code,) = probe.inspect_asm().values()
    if "movnt" not in code or "sfence" not in code:
        raise ImportError("the compiler makes no streaming stores here")


_refuse_without_stores()
