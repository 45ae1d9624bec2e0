"""The kernels: bare loops over typed arrays that carry out a plan. They allocate nothing and raise nothing.

``out`` is the destination as one flat array; every integer below that is not a row, layer or id counts elements of it,
or bytes of a source. The loops trust the plan: all checks were made before (``_sources``, ``_plan``).
"""

from __future__ import annotations

from ._numba import JIT_DISABLED, address_of, copy_bytes, jit, load_int16, load_int32, load_uint8, prange


@jit(parallel=False)
def fill_rows(out, row, end, dummies, layers, topk, row_stride, layer_stride):
    """Write dummy rows ``[row, end)``; ``dummies`` is the flat template, a whole number of rows."""
    width = layers * topk
    if row_stride == width and layer_stride == topk:
        size = out.itemsize
        block = dummies.size // width
        base = address_of(out)
        template = address_of(dummies)
        while row < end:
            count = min(block, end - row)
            copy_bytes(base + row * width * size, template, count * width * size)
            row += count
    else:
        for current in range(row, end):
            for layer in range(layers):
                start = current * row_stride + layer * layer_stride
                for k in range(topk):
                    out[start + k] = dummies[layer * topk + k]


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
    """Write rows ``[row, end)`` from the source rows that begin at ``address``, with the source's strides in bytes."""
    layers = layer_of.size
    width = layers * topk
    whole = by_id == itemsize and by_layer == topk * itemsize and row_stride == width and layer_stride == topk
    for layer in range(layers):  # a few ns beside the row: only consecutive layers are one run
        whole = whole and layer_of[layer] == layer_of[0] + layer
    if whole:
        address += layer_of[0] * by_layer
        if by_row == width * itemsize:
            move_run(out, row * width, address, itemsize, (end - row) * width)
        else:
            for current in range(row, end):
                move_run(out, current * width, address + (current - row) * by_row, itemsize, width)
        return
    for current in range(row, end):
        for layer in range(layers):
            source = address + (current - row) * by_row + layer_of[layer] * by_layer
            start = current * row_stride + layer * layer_stride
            if by_id == itemsize:
                move_run(out, start, source, itemsize, topk)
            else:
                for k in range(topk):
                    move_run(out, start + k, source + k * by_id, itemsize, 1)


@jit(parallel=False)
def move_piece(
    out, mask, row, end, span, dummies, bounds, first, address, rows, itemsizes, strides, missing, layer_of, topk,
    row_stride, layer_stride,
):  # fmt: skip
    """Write destination rows ``[row, end)`` and their padding mask; ``span`` is the one that ``row`` lies in."""
    layers = layer_of.size
    while row < end:
        stop = min(end, bounds[span + 1])
        routes_begin = bounds[span] + first[span]
        begin = min(max(row, routes_begin), stop)
        finish = min(max(row, routes_begin + rows[span]), stop)
        fill_rows(out, row, begin, dummies, layers, topk, row_stride, layer_stride)
        mask[row:begin] = True
        if begin < finish:
            itemsize = int(itemsizes[span])
            if strides.size:
                by_row, by_layer, by_id = strides[span, 0], strides[span, 1], strides[span, 2]
            else:
                by_id = itemsize
                by_layer = topk * itemsize
                by_row = layers * by_layer
            absent = missing[span] if missing.size else 0
            while begin < finish:
                until = finish
                dummy = False
                if absent:  # a run of rows that are all there, or all missing
                    dummy = load_uint8(absent, begin - routes_begin) != 0
                    until = begin + 1
                    while until < finish and (load_uint8(absent, until - routes_begin) != 0) == dummy:
                        until += 1
                mask[begin:until] = dummy
                if dummy:
                    fill_rows(out, begin, until, dummies, layers, topk, row_stride, layer_stride)
                else:
                    source = address[span] + (begin - routes_begin) * by_row
                    move_rows(
                        out, begin, until, source, itemsize, by_row, by_layer, by_id, layer_of, topk, row_stride,
                        layer_stride,
                    )  # fmt: skip
                begin = until
        fill_rows(out, finish, stop, dummies, layers, topk, row_stride, layer_stride)
        mask[finish:stop] = True
        row = stop
        span += 1


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


@jit(parallel=True)
def _probe(array):
    for index in prange(array.size):
        array[index] = 0


def compile_probe() -> None:
    """Compile a small parallel function, which starts Numba's threading layer, without launching anything on it."""
    if not JIT_DISABLED:
        _probe.compile("void(uint8[::1])")


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
