"""The kernels: bare loops over typed arrays that carry out a plan. They allocate nothing and raise nothing.

Destination and sources are addresses, item sizes and strides in bytes, so that one compilation serves every dtype and
layout. The loops trust the plan: all checks were made before (``_sources``, ``_plan``). With plain stores each function
has one call site, because LLVM inlines them all and every further copy costs compile time.

One walk serves every kind of store. ``stores`` is None for plain ones; the bytes from which a run is streamed, by
``_streaming``; or a tuple for runs that an audit looks at in passing, in ``_lines``, which begins with either. Its
*type* decides when the walk is compiled, so that plain moves contain nothing else. (A function as argument would do,
but Numba cannot cache that on disk.)
"""

from __future__ import annotations

from . import _numba as runtime
from ._numba import (
    address_of,
    copy_bytes,
    int64,
    jit,
    load_int16,
    load_int32,
    load_uint8,
    prange,
    store_int16,
    store_int32,
    store_int64,
    store_uint8,
)

#: A run of at most so many words of 8 bytes is written word by word: a call of memcpy takes longer.
SHORT_WORDS = 8
#: Rows that are written place by place, so that both they and their source stay in the first-level cache.
BLOCK_ROWS = 32


@jit(parallel=False)
def plain_run(target, size, address, itemsize, count):
    """Write ``count`` consecutive ids of ``itemsize`` bytes at ``address`` to ``target``, widened to ``size`` bytes."""
    if itemsize == size:
        copy_bytes(target, address, count * size)
    elif itemsize == 1:
        if size == 2:
            for k in range(count):
                store_int16(target, k, load_uint8(address, k))
        elif size == 4:
            for k in range(count):
                store_int32(target, k, load_uint8(address, k))
        else:
            for k in range(count):
                store_int64(target, k, load_uint8(address, k))
    elif itemsize == 2:
        if size == 4:
            for k in range(count):
                store_int32(target, k, load_int16(address, k))
        else:
            for k in range(count):
                store_int64(target, k, load_int16(address, k))
    else:
        for k in range(count):
            store_int64(target, k, load_int32(address, k))


def store_run(stores, target, size, address, itemsize, count):
    """Write a run with the stores that the type of ``stores`` names; as plain Python, with plain ones."""
    plain_run(target, size, address, itemsize, count)


@runtime.choose_when_compiled(store_run)
def _choose_stores(stores, target, size, address, itemsize, count):
    if runtime.is_none(stores):
        return lambda stores, target, size, address, itemsize, count: plain_run(target, size, address, itemsize, count)
    if runtime.is_tuple(stores):
        from ._lines import audited_run

        return audited_run
    from ._streaming import stream_run

    def plain_or_streamed(stores, target, size, address, itemsize, count):
        if count * size < stores:
            plain_run(target, size, address, itemsize, count)
        else:
            stream_run(target, size, address, itemsize, count)

    return plain_or_streamed


@jit(parallel=False)
def move_words(target, end, address, by_row, by_layer, layer_of, words, row_stride, layer_stride):
    """Write ``end`` rows of layers that are so many words of 8 bytes each: too short for a call of memcpy."""
    for row in range(end):
        for layer in range(layer_of.size):
            source = address + row * by_row + layer_of[layer] * by_layer
            start = target + row * row_stride + layer * layer_stride
            for word in range(words):
                copy_bytes(start + word * 8, source + word * 8, 8)


@jit(parallel=False)
def move_ids(target, size, end, address, itemsize, by_row, by_layer, by_id, layer_of, topk, row_stride, layer_stride):
    """Write ``end`` rows id by id, place by place over a block of rows that the first-level cache holds."""
    for first in range(0, end, BLOCK_ROWS):
        for layer in range(layer_of.size):
            for k in range(topk):
                source = address + layer_of[layer] * by_layer + k * by_id
                start = target + layer * layer_stride + k * size
                for row in range(first, min(end, first + BLOCK_ROWS)):
                    value = load_id(source + row * by_row, itemsize)
                    store_id(start + row * row_stride, size, value)


@jit(parallel=False)
def load_id(address, itemsize):
    """Return the id at ``address``, of an item size that names its canonical dtype."""
    if itemsize == 1:
        return int64(load_uint8(address, 0))
    if itemsize == 2:
        return int64(load_int16(address, 0))
    return int64(load_int32(address, 0))


@jit(parallel=False)
def store_id(target, size, value):
    """Write one id of ``size`` bytes."""
    if size == 1:
        store_uint8(target, 0, value)
    elif size == 2:
        store_int16(target, 0, value)
    elif size == 4:
        store_int32(target, 0, value)
    else:
        store_int64(target, 0, value)


@jit(parallel=False)
def move_rows(
    stores, target, size, rows, address, itemsize, by_row, by_layer, by_id, layer_of, topk, row_stride, layer_stride,
):  # fmt: skip
    """Write ``rows`` rows to ``target`` from those that begin at ``address``, in the longest runs that there are."""
    layers = layer_of.size
    length = topk
    whole = by_id == itemsize and by_layer == topk * itemsize
    whole = whole and layer_stride == topk * size and row_stride == layers * topk * size
    for layer in range(layers):
        whole = whole and layer_of[layer] == layer_of[0] + layer
    if whole:  # a row's layers are one run
        length = layers * topk
        layers = 1
        if by_row == length * itemsize:  # all rows are one run
            length *= rows
            rows = 1
    words = length * itemsize // 8
    if by_id != itemsize:
        move_ids(
            target, size, rows, address, itemsize, by_row, by_layer, by_id, layer_of, topk, row_stride, layer_stride,
        )  # fmt: skip
    elif not whole and itemsize == size and words <= SHORT_WORDS and words * 8 == length * itemsize:
        move_words(target, rows, address, by_row, by_layer, layer_of, words, row_stride, layer_stride)
    else:
        for row in range(rows):
            for layer in range(layers):
                store_run(
                    stores, target + row * row_stride + layer * layer_stride, size,
                    address + row * by_row + layer_of[layer] * by_layer, itemsize, length,
                )  # fmt: skip


@jit(parallel=False)
def move_piece(
    stores, out, mask, row, end, span, dummies, bounds, first, address, rows, itemsizes, strides, missing, layer_of,
    topk, row_stride, layer_stride, size,
):  # fmt: skip
    """Write destination rows ``[row, end)`` and their padding mask, run by run; ``row`` lies in ``span``.

    ``out`` is the destination as bytes, its ids ``size`` bytes each; ``dummies`` are rows of the template in the same
    type, ``[n, layers, bytes]`` with all layers of a source.
    """
    block, layers, _ = dummies.shape
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
        itemsize = int64(itemsizes[span])
        source = address[span]
        if dummy:  # the template is a source like any other: as many rows as it has
            until = min(until, row + block)
            itemsize = size
            source = address_of(dummies)
            token = 0
        by_id = itemsize
        by_layer = topk * by_id
        by_row = layers * by_layer
        if strides.size and not dummy:
            by_row, by_layer, by_id = strides[span, 0], strides[span, 1], strides[span, 2]
        for current in range(row, until):
            mask[current] = dummy
        move_rows(
            stores, address_of(out) + row * row_stride, size, until - row, source + token * by_row, itemsize, by_row,
            by_layer, by_id, layer_of, topk, row_stride, layer_stride,
        )  # fmt: skip
        row = until


@jit(parallel=False)
def move_serial(pieces, out, mask, *table):
    """Write the pieces one after the other: the twin of ``move_parallel``, which starts no pool."""
    for piece in range(pieces.shape[0]):
        move_piece(None, out, mask, pieces[piece, 0], pieces[piece, 1], pieces[piece, 2], *table)


@jit(parallel=True)
def move_parallel(pieces, out, mask, *table):
    """Write the pieces, each by one thread: trajectories cut into equal bytes, so that none of them waits."""
    for piece in prange(pieces.shape[0]):
        move_piece(None, out, mask, pieces[piece, 0], pieces[piece, 1], pieces[piece, 2], *table)


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


@jit(parallel=False)
def narrow_piece(low, high, out, array, begin, end, index):
    """Scan ``array[begin:end]`` as ``scan_piece`` does, and write it to ``out`` in the same pass, high bits cut off."""
    part = array[begin:end]
    target = out[begin:end]
    least = part[0]
    most = part[0]
    for k in range(part.size):
        value = part[k]
        target[k] = value
        least = min(least, value)
        most = max(most, value)
    low[index] = least
    high[index] = most


@jit(parallel=False)
def narrow_serial(pieces, low, high, out, array):
    """Narrow the pieces one after the other; more threads do it over our own pool, so that no pair compiles twice."""
    for piece in range(pieces.shape[0]):
        narrow_piece(low, high, out, array, pieces[piece, 0], pieces[piece, 1], pieces[piece, 2])


@jit(parallel=True)
def _probe(array):
    for index in prange(array.size):
        array[index] = 0


def compile_probe() -> None:
    """Compile a small parallel function, which starts Numba's threading layer, without launching anything on it."""
    if not runtime.JIT_DISABLED:
        _probe.compile("void(uint8[::1])")
