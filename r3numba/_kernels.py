"""The kernels: bare loops over typed arrays that carry out a plan. They allocate nothing and raise nothing.

``out`` is the destination as one flat array; strides of it count elements, strides of a source count bytes. The loops
trust the plan: all checks were made before (``_sources``, ``_plan``). Each function below has one call site in the one
above it, because LLVM inlines them all and every further copy costs compile time.
"""

from __future__ import annotations

from . import _numba as runtime
from ._numba import address_of, copy_bytes, jit, load_int16, load_int32, load_uint8, prange


@jit(parallel=False)
def move_run(out, start, address, itemsize, count):
    """Write ``count`` consecutive ids from ``address``, widened to the type of ``out``."""
    if itemsize == out.itemsize:
        copy_bytes(address_of(out) + start * itemsize, address, count * itemsize)
        return
    target = out[start : start + count]  # a slice has no negative index to wrap, so that the loops vectorise
    if itemsize == 1:
        for k in range(count):
            target[k] = load_uint8(address, k)
    elif itemsize == 2:
        for k in range(count):
            target[k] = load_int16(address, k)
    else:
        for k in range(count):
            target[k] = load_int32(address, k)


@jit(parallel=False)
def move_rows(out, row, end, address, itemsize, by_row, by_layer, by_id, layer_of, topk, row_stride, layer_stride):
    """Write rows ``[row, end)`` from the source rows that begin at ``address``, in the longest runs that there are."""
    rows = end - row
    layers = layer_of.size
    ids = topk
    length = 1
    if by_id == itemsize:  # a layer's ids are one run
        ids = 1
        length = topk
        whole = by_layer == topk * itemsize and layer_stride == topk and row_stride == layers * topk
        for layer in range(layers):
            whole = whole and layer_of[layer] == layer_of[0] + layer
        if whole:  # a row's layers are one run
            length = layers * topk
            layers = 1
            if by_row == length * itemsize:  # all rows are one run
                length *= rows
                rows = 1
    for current in range(rows):
        for layer in range(layers):
            source = address + current * by_row + layer_of[layer] * by_layer
            start = (row + current) * row_stride + layer * layer_stride
            for k in range(ids):
                move_run(out, start + k, source + k * by_id, itemsize, length)


@jit(parallel=False)
def fill_rows(out, row, end, dummies, layers, topk, row_stride, layer_stride):
    """Write dummy rows ``[row, end)``; ``dummies`` is the flat template, a whole number of rows."""
    width = layers * topk
    size = out.itemsize
    block = dummies.size // width
    if layer_stride == topk and row_stride == width:
        while row < end:
            count = min(block, end - row)
            copy_bytes(address_of(out) + row * width * size, address_of(dummies), count * width * size)
            row += count
    else:
        for current in range(row, end):
            for layer in range(layers):
                for k in range(topk):
                    out[current * row_stride + layer * layer_stride + k] = dummies[layer * topk + k]


@jit(parallel=False)
def move_piece(
    out, mask, row, end, span, dummies, bounds, first, address, rows, itemsizes, strides, missing, layer_of, topk,
    row_stride, layer_stride,
):  # fmt: skip
    """Write destination rows ``[row, end)`` and their padding mask, run by run; ``row`` lies in ``span``."""
    layers = layer_of.size
    while row < end:
        while row >= bounds[span + 1]:
            span += 1
        token = row - bounds[span] - first[span]
        until = min(end, bounds[span + 1])
        dummy = token < 0 or token >= rows[span]
        if token < 0:
            until = min(until, row - token)
        elif not dummy:
            until = min(until, row - token + rows[span])
            if missing.size and missing[span]:  # a run of rows that are all there, or all missing
                dummy = load_uint8(missing[span], token) != 0
                stop = until
                until = row + 1
                while until < stop and (load_uint8(missing[span], token + until - row) != 0) == dummy:
                    until += 1
        for current in range(row, until):
            mask[current] = dummy
        if dummy:
            fill_rows(out, row, until, dummies, layers, topk, row_stride, layer_stride)
        else:
            itemsize = int(itemsizes[span])
            by_id = itemsize
            by_layer = topk * by_id
            by_row = layers * by_layer
            if strides.size:
                by_row, by_layer, by_id = strides[span, 0], strides[span, 1], strides[span, 2]
            move_rows(
                out, row, until, address[span] + token * by_row, itemsize, by_row, by_layer, by_id, layer_of, topk,
                row_stride, layer_stride,
            )  # fmt: skip
        row = until


@jit(parallel=False)
def move_serial(pieces, out, mask, *table):
    """Write the pieces one after the other: the twin of ``move_parallel``, which starts no pool."""
    for piece in range(pieces.shape[0]):
        move_piece(out, mask, pieces[piece, 0], pieces[piece, 1], pieces[piece, 2], *table)


@jit(parallel=True)
def move_parallel(pieces, out, mask, *table):
    """Write the pieces, each by one thread: trajectories cut into equal bytes, so that none of them waits."""
    for piece in prange(pieces.shape[0]):
        move_piece(out, mask, pieces[piece, 0], pieces[piece, 1], pieces[piece, 2], *table)


@jit(parallel=False)
def scan_piece(low, high, array, begin, end, index):
    """Write the least and the largest value of ``array[begin:end]`` to ``low[index]`` and ``high[index]``."""
    part = array[begin:end]
    least = part[0]
    most = part[0]
    for k in range(part.size):
        least = min(least, part[k])
        most = max(most, part[k])
    low[index] = least
    high[index] = most


@jit(parallel=False)
def scan_serial(pieces, low, high, array):
    """Scan the pieces one after the other: the twin of ``scan_parallel``."""
    for piece in range(pieces.shape[0]):
        scan_piece(low, high, array, pieces[piece, 0], pieces[piece, 1], pieces[piece, 2])


@jit(parallel=True)
def scan_parallel(pieces, low, high, array):
    """Scan the pieces, each by one thread."""
    for piece in prange(pieces.shape[0]):
        scan_piece(low, high, array, pieces[piece, 0], pieces[piece, 1], pieces[piece, 2])


@jit(parallel=True)
def _probe(array):
    for index in prange(array.size):
        array[index] = 0


def compile_probe() -> None:
    """Compile a small parallel function, which starts Numba's threading layer, without launching anything on it."""
    if not runtime.JIT_DISABLED:
        _probe.compile("void(uint8[::1])")
