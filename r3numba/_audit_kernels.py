"""The audit's kernels: ids out of range, duplicates, zeros and repeated rows, counted while the rows lie in cache.

One pass, no allocation. Ids are tested as lanes of 64-bit words, all pairs of them at once; a row that passes costs no
more than that. Only a row that does not, or of a width that is no whole number of half words, is looked at id by id.
"""

from __future__ import annotations

from ._kernels import load_id, move_piece
from ._numba import jit, load_uint8, load_uint32, load_uint64, prange, uint64
from ._tally import DUPLICATE, RANGE, REPEATED, ZERO, ZERO_ROW


@jit(parallel=False)
def suspicious_words(address, keep, limit):
    """Say whether a row of layers of eight uint8 ids, one word each, may hold a duplicate or an id from ``limit`` on.

    Byte against byte: a word xor itself rotated by 1 to 4 bytes has a zero byte exactly where two ids are equal, and
    ``(x - 0x01..) & ~x & 0x80..`` is not zero exactly if x has a zero byte. For the limit, the lower seven bits carry
    into the eighth when they reach it. There is no branch in the loop, so that several layers go through at once.
    """
    ones = uint64(0x0101010101010101)
    high = uint64(0x8080808080808080)
    small = limit <= 128
    carry = uint64((128 if small else 256) - limit) * ones
    found = uint64(0)
    for layer in range(keep.size):
        word = load_uint64(address, layer)
        wrong = uint64(0)
        for shift in (8, 16, 24, 32):
            x = word ^ ((word << uint64(shift)) | (word >> uint64(64 - shift)))
            wrong |= (x - ones) & ~x
        reached = (word & ~high) + carry
        wrong |= (word | reached) if small else (word & reached)
        found |= wrong & keep[layer]
    return (found & high) != 0


@jit(parallel=False)
def load_lanes(address, index, words):
    """Return word ``index`` of a layer; the half word that may follow the last whole one is doubled into one."""
    if index < words:
        return load_uint64(address, index)
    half = uint64(load_uint32(address, 2 * words))
    return half | (half << uint64(32))


@jit(parallel=False)
def suspicious_lanes(address, itemsize, by_layer, topk, keep, limit):
    """Say the same of any width whose layer is a whole number of half words: ids are lanes of 64-bit words.

    Two different words are compared at every rotation, a word with itself at the first half of them; a doubled half
    word repeats after half of its lanes, which halves both.
    """
    bits = 8 * itemsize
    lanes = 8 // itemsize
    ones = uint64(0xFFFFFFFFFFFFFFFF) // uint64((1 << bits) - 1)
    high = ones << uint64(bits - 1)
    small = limit <= 1 << (bits - 1)
    carry = uint64(((1 << (bits - 1)) if small else (1 << bits)) - limit) * ones
    words = topk * itemsize // 8
    parts = words + (topk * itemsize % 8) // 4
    for layer in range(keep.size):
        base = address + layer * by_layer
        found = uint64(0)
        for i in range(parts):
            word = load_lanes(base, i, words)
            period = lanes if i < words else lanes // 2
            reached = (word & ~high) + carry
            found |= (word | reached) if small else (word & reached)
            for turn in range(1, period // 2 + 1):
                shift = uint64(turn * bits)
                x = word ^ ((word << shift) | (word >> (uint64(64) - shift)))
                found |= (x - ones) & ~x
            for j in range(i):
                x = word ^ load_lanes(base, j, words)
                found |= (x - ones) & ~x
                for turn in range(1, period):
                    shift = uint64(turn * bits)
                    x = ((word << shift) | (word >> (uint64(64) - shift))) ^ load_lanes(base, j, words)
                    found |= (x - ones) & ~x
        if (found & high & keep[layer]) != 0:
            return True
    return False


@jit(parallel=False)
def audit_row(address, itemsize, by_layer, by_id, topk, keep, limit, token, tally, zeros):
    """Look at one row id by id; ``zeros`` int64 [layers] counts the rows in which a layer is all zero."""
    all_zero = topk > 1
    for layer in range(keep.size):
        if keep[layer] == 0:
            continue
        base = address + layer * by_layer
        zero = topk > 1
        twice = False
        outside = False
        for k in range(topk):
            value = load_id(base + k * by_id, itemsize)
            zero = zero and value == 0
            outside = outside or value < 0 or value >= limit
            for other in range(k):
                twice = twice or load_id(base + other * by_id, itemsize) == value
        all_zero = all_zero and zero
        if outside:
            if tally[RANGE] == 0:
                tally[RANGE + 1] = token
                tally[RANGE + 2] = layer
            tally[RANGE] += 1
        if zero:
            if tally[ZERO] == 0:
                tally[ZERO + 1] = token
                tally[ZERO + 2] = layer
            tally[ZERO] += 1
            zeros[layer] += 1
        elif twice:
            if tally[DUPLICATE] == 0:
                tally[DUPLICATE + 1] = token
                tally[DUPLICATE + 2] = layer
            tally[DUPLICATE] += 1
    if all_zero:
        if tally[ZERO_ROW] == 0:
            tally[ZERO_ROW + 1] = token
        tally[ZERO_ROW] += 1


@jit(parallel=False)
def same_row(address, by_row, itemsize, by_layer, by_id, layers, topk):
    """Say whether the row at ``address`` equals the one before it; nearly always the first ids tell."""
    for layer in range(layers):
        for k in range(topk):
            offset = layer * by_layer + k * by_id
            if load_id(address + offset, itemsize) != load_id(address - by_row + offset, itemsize):
                return False
    return True


@jit(parallel=False)
def audit_rows(
    address, first, end, rows, missing, itemsize, by_row, by_layer, by_id, topk, keep, limit, long_run, tally, zeros
):
    """Audit rows ``[first, end)`` of one trajectory of ``rows`` rows that begins at ``address``.

    A run of one repeated row is counted where it begins, and followed past ``end`` as far as it goes.
    """
    lanes = by_id == itemsize and topk * itemsize % 4 == 0
    words = lanes and itemsize == 1 and topk == 8 and by_layer == 8
    for token in range(first, end):
        if missing and load_uint8(missing, token) != 0:
            continue
        row = address + token * by_row
        if words:
            look = suspicious_words(row, keep, limit)
        elif lanes:
            look = suspicious_lanes(row, itemsize, by_layer, topk, keep, limit)
        else:
            look = True
        if look:
            audit_row(row, itemsize, by_layer, by_id, topk, keep, limit, token, tally, zeros)
        if token == 0 or not same_row(row, by_row, itemsize, by_layer, by_id, keep.size, topk):
            stop = token + 1
            while stop < rows and same_row(address + stop * by_row, by_row, itemsize, by_layer, by_id, keep.size, topk):
                stop += 1
            if stop - token >= long_run:
                if tally[REPEATED] == 0:
                    tally[REPEATED + 1] = token
                tally[REPEATED] += 1
                tally[REPEATED + 2] = max(tally[REPEATED + 2], stop - token)


@jit(parallel=False)
def audit_piece(
    row, end, span, segment, keep, limit, long_run, tallies, zeros, bounds, first, address, rows, itemsizes, strides,
    missing, layer_of, topk,
):  # fmt: skip
    """Audit the source rows that land in destination rows ``[row, end)``; ``segment + span`` is the tally of a span."""
    layers = layer_of.size
    while row < end:
        while row >= bounds[span + 1]:
            span += 1
        until = min(end, bounds[span + 1])
        begin = max(0, row - bounds[span] - first[span])
        stop = min(rows[span], until - bounds[span] - first[span])
        if begin < stop:
            itemsize = int(itemsizes[span])
            by_id = itemsize
            by_layer = topk * by_id
            by_row = layers * by_layer
            if strides.size:
                by_row, by_layer, by_id = strides[span, 0], strides[span, 1], strides[span, 2]
            audit_rows(
                address[span], begin, stop, rows[span], missing[span] if missing.size else 0, itemsize, by_row,
                by_layer, by_id, topk, keep, limit[itemsize], long_run, tallies[segment + span], zeros[segment + span],
            )  # fmt: skip
        row = until


@jit(parallel=False)
def audit_serial(
    pieces, keep, limit, long_run, tallies, zeros, bounds, first, address, rows, itemsizes, strides, missing, layer_of,
    topk,
):  # fmt: skip
    """Audit the pieces one after the other."""
    for piece in range(pieces.shape[0]):
        audit_piece(
            pieces[piece, 0], pieces[piece, 1], pieces[piece, 2], pieces[piece, 3], keep, limit, long_run, tallies,
            zeros, bounds, first, address, rows, itemsizes, strides, missing, layer_of, topk,
        )  # fmt: skip


@jit(parallel=True)
def audit_parallel(
    pieces, keep, limit, long_run, tallies, zeros, bounds, first, address, rows, itemsizes, strides, missing, layer_of,
    topk,
):  # fmt: skip
    """Audit the pieces, each by one thread."""
    for piece in prange(pieces.shape[0]):
        audit_piece(
            pieces[piece, 0], pieces[piece, 1], pieces[piece, 2], pieces[piece, 3], keep, limit, long_run, tallies,
            zeros, bounds, first, address, rows, itemsizes, strides, missing, layer_of, topk,
        )  # fmt: skip


@jit(parallel=False)
def both_piece(
    row, end, span, segment, block, keep, limit, long_run, tallies, zeros, out, mask, dummies, bounds, first, address,
    rows, itemsizes, strides, missing, layer_of, topk, row_stride, layer_stride, size,
):  # fmt: skip
    """Move and audit destination rows ``[row, end)``, block by block, so that the audit finds its rows in cache."""
    while row < end:
        until = min(end, row + block)
        while row >= bounds[span + 1]:
            span += 1
        move_piece(
            None, out, mask, row, until, span, dummies, bounds, first, address, rows, itemsizes, strides, missing,
            layer_of, topk, row_stride, layer_stride, size,
        )  # fmt: skip
        audit_piece(
            row, until, span, segment, keep, limit, long_run, tallies, zeros, bounds, first, address, rows, itemsizes,
            strides, missing, layer_of, topk,
        )  # fmt: skip
        row = until


@jit(parallel=False)
def both_serial(
    pieces, block, keep, limit, long_run, tallies, zeros, out, mask, dummies, bounds, first, address, rows, itemsizes,
    strides, missing, layer_of, topk, row_stride, layer_stride, size,
):  # fmt: skip
    """Move and audit the pieces one after the other."""
    for piece in range(pieces.shape[0]):
        both_piece(
            pieces[piece, 0], pieces[piece, 1], pieces[piece, 2], pieces[piece, 3], block, keep, limit, long_run,
            tallies, zeros, out, mask, dummies, bounds, first, address, rows, itemsizes, strides, missing, layer_of,
            topk, row_stride, layer_stride, size,
        )  # fmt: skip


@jit(parallel=True)
def both_parallel(
    pieces, block, keep, limit, long_run, tallies, zeros, out, mask, dummies, bounds, first, address, rows, itemsizes,
    strides, missing, layer_of, topk, row_stride, layer_stride, size,
):  # fmt: skip
    """Move and audit the pieces, each by one thread."""
    for piece in prange(pieces.shape[0]):
        both_piece(
            pieces[piece, 0], pieces[piece, 1], pieces[piece, 2], pieces[piece, 3], block, keep, limit, long_run,
            tallies, zeros, out, mask, dummies, bounds, first, address, rows, itemsizes, strides, missing, layer_of,
            topk, row_stride, layer_stride, size,
        )  # fmt: skip
