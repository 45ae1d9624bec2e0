"""The audit's kernels: ids out of range, duplicates, zeros and repeated rows, counted while the rows lie in cache.

One pass, no allocation. A stretch that ``_lines`` lets pass costs no more than that. What does not pass is looked at
again in short stretches, and then row by row: as lanes of 64-bit words, all pairs of them at once. Layers of a shape
that ``_lines`` does not know begin there. Only a row that fails there too, or of a width that is no whole number of
half words, is looked at id by id.
"""

from __future__ import annotations

from ._kernels import load_id, move_piece
from ._lines import finish, passes, same_row
from ._numba import address_of, int64, jit, load_uint8, load_uint32, load_uint64, uint64
from ._tally import DUPLICATE, PASSED, RANGE, REPEATED, ZERO, ZERO_ROW

#: A block that does not pass is looked at again in stretches of so many rows; row by row, where one does not pass.
SHORT_ROWS = 16


@jit(parallel=False)
def load_lanes(address, index, words):
    """Return word ``index`` of a layer; the half word that may follow the last whole one is doubled into one."""
    if index < words:
        return load_uint64(address, index)
    half = uint64(load_uint32(address, 2 * words))
    return half | (half << uint64(32))


@jit(parallel=False)
def suspicious_lanes(address, itemsize, by_layer, topk, keep, limit):
    """Say whether a row may hold a duplicate or an id from ``limit`` on; a layer is a whole number of half words.

    Ids are lanes of 64-bit words. A word xor itself turned has a zero lane exactly where two ids are equal: there
    alone the highest bit is 0 both in it and in its lower bits plus 0x7f... For the limit, too, the lower bits of a
    lane carry into its highest when they reach it. Nothing carries into the next lane.

    Two different words are compared at every rotation, a word with itself at the first half of them; a doubled half
    word repeats after half of its lanes, which halves both.
    """
    bits = 8 * itemsize
    lanes = 8 // itemsize
    ones = uint64(0xFFFFFFFFFFFFFFFF) // uint64((1 << bits) - 1)
    high = ones << uint64(bits - 1)
    low = ~high
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
            reached = (word & low) + carry
            found |= (word | reached) if small else (word & reached)
            for turn in range(1, period // 2 + 1):
                shift = uint64(turn * bits)
                x = word ^ ((word << shift) | (word >> (uint64(64) - shift)))
                found |= ~(((x & low) + low) | x)
            for j in range(i):
                x = word ^ load_lanes(base, j, words)
                found |= ~(((x & low) + low) | x)
                for turn in range(1, period):
                    shift = uint64(turn * bits)
                    x = ((word << shift) | (word >> (uint64(64) - shift))) ^ load_lanes(base, j, words)
                    found |= ~(((x & low) + low) | x)
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
def recorded(missing, token):
    """Say whether the engine recorded a row; ``missing`` is the address of a mask, or 0."""
    return not missing or load_uint8(missing, token) == 0


@jit(parallel=False)
def audit_rows(
    address, first, end, rows, missing, itemsize, by_row, by_layer, by_id, topk, keep, limit, lines, long_run, tally,
    zeros, passed,
):  # fmt: skip
    """Audit rows ``[first, end)`` of one trajectory of ``rows`` rows that begins at ``address``.

    A run of one repeated row is counted where it begins, and followed past ``end`` to the first row that differs or was
    not recorded. ``passed`` says that ``_lines`` has let these rows pass, the last one apart. A stretch is looked at
    with the row behind it, which tells whether its last one is repeated; only the last row of the trajectory is always
    looked at by itself. What rows hold that were not recorded counts for nothing, but may keep a stretch from passing.
    """
    layers = keep.size
    kind, wide, step = lines[itemsize, 0], lines[itemsize, 1], lines[itemsize, 2]
    lined = kind >= 0 and by_id == itemsize and by_layer == topk * by_id and by_row == layers * by_layer
    lanes = by_id == itemsize and topk * itemsize % 4 == 0
    bound = limit[itemsize]
    if passed:
        first = end - 1
    count = end - first
    while first < end:
        stop = min(end, first + count)
        behind = min(rows, stop + 1)
        if lined:
            nbytes = (behind - first) * by_row
            if passes(False, False, 0, address + first * by_row, nbytes, 0, 0, kind, step, by_row, wide, bound - 1):
                first = behind - 1
            elif count > SHORT_ROWS:
                count = SHORT_ROWS
                continue
        for token in range(first, stop):
            if not recorded(missing, token):
                continue
            row = address + token * by_row
            if not lanes or suspicious_lanes(row, itemsize, by_layer, topk, keep, bound):
                audit_row(row, itemsize, by_layer, by_id, topk, keep, bound, token, tally, zeros)
            before = token > 0 and recorded(missing, token - 1)
            if before and same_row(row, by_row, itemsize, by_layer, by_id, layers, topk):
                continue
            after = token + 1
            while after < rows and recorded(missing, after):
                if not same_row(address + after * by_row, by_row, itemsize, by_layer, by_id, layers, topk):
                    break
                after += 1
            if after - token >= long_run:
                if tally[REPEATED] == 0:
                    tally[REPEATED + 1] = token
                tally[REPEATED] += 1
                tally[REPEATED + 2] = max(tally[REPEATED + 2], after - token)
        first = stop


@jit(parallel=False)
def audit_block(
    row, end, span, tally, zeros, keep, limit, lines, long_run, bounds, first, address, rows, itemsizes, strides,
    missing, layer_of, topk,
):  # fmt: skip
    """Audit the source rows that land in destination rows ``[row, end)``, all of ``span``; read and clear the note."""
    begin = max(0, row - bounds[span] - first[span])
    stop = min(rows[span], end - bounds[span] - first[span])
    if begin < stop:
        itemsize = int64(itemsizes[span])
        by_id = itemsize
        by_layer = topk * by_id
        by_row = keep.size * by_layer
        if strides.size:
            by_row, by_layer, by_id = strides[span, 0], strides[span, 1], strides[span, 2]
        audit_rows(
            address[span], begin, stop, rows[span], missing[span] if missing.size else 0, itemsize, by_row, by_layer,
            by_id, topk, keep, limit, lines, long_run, tally, zeros,
            tally[PASSED] == (stop - begin) * keep.size * topk,
        )  # fmt: skip
    tally[PASSED] = 0


@jit(parallel=False)
def audit_piece(row, end, span, segment, block, tallies, zeros, keep, limit, lines, long_run, bounds, *table):
    """Audit what lands in rows ``[row, end)``, block by block; ``segment + span`` is the tally of a span."""
    while row < end:
        while row >= bounds[span + 1]:
            span += 1
        until = min(end, bounds[span + 1], row + block)
        audit_block(
            row, until, span, tallies[segment + span], zeros[segment + span], keep, limit, lines, long_run, bounds,
            *table,
        )  # fmt: skip
        row = until


@jit(parallel=False)
def audit_serial(pieces, *arguments):
    """Audit the pieces one after the other."""
    for piece in range(pieces.shape[0]):
        audit_piece(pieces[piece, 0], pieces[piece, 1], pieces[piece, 2], pieces[piece, 3], *arguments)


@jit(parallel=False)
def both_piece(
    stores, row, end, span, segment, block, tallies, zeros, keep, limit, lines, long_run, out, mask, dummies, bounds,
    first, address, rows, itemsizes, strides, missing, layer_of, topk, row_stride, layer_stride, size,
):  # fmt: skip
    """Move and audit destination rows ``[row, end)``, block by block, so that the audit finds its rows in cache.

    Where a block is one run, the move looks at it in passing, and the audit finds that noted.
    """
    row_bytes = keep.size * topk * size
    kind = lines[size, 0] if row_stride == row_bytes and layer_of.size == keep.size else -1
    while row < end:
        while row >= bounds[span + 1]:
            span += 1
        until = min(end, bounds[span + 1], row + block)
        tally = tallies[segment + span]
        audited = (
            stores, address_of(dummies), address_of(tally) + PASSED * 8, kind, lines[size, 2], row_bytes,
            lines[size, 1], limit[size] - 1,
        )  # fmt: skip
        move_piece(
            audited, out, mask, row, until, span, dummies, bounds, first, address, rows, itemsizes, strides, missing,
            layer_of, topk, row_stride, layer_stride, size,
        )  # fmt: skip
        audit_block(
            row, until, span, tally, zeros[segment + span], keep, limit, lines, long_run, bounds, first, address, rows,
            itemsizes, strides, missing, layer_of, topk,
        )  # fmt: skip
        row = until


@jit(parallel=False)
def both_serial(pieces, stores, *arguments):
    """Move and audit the pieces one after the other; ``stores`` is as ``_kernels`` has it."""
    for piece in range(pieces.shape[0]):
        both_piece(stores, pieces[piece, 0], pieces[piece, 1], pieces[piece, 2], pieces[piece, 3], *arguments)
    finish(stores)
