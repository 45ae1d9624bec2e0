"""Ids looked at a cache line at a time, on their way from source to result.

A copy waits for memory, so a look at what it moves costs next to nothing where it is woven into it line by line (403 MB
of uint8 top-8, two threads: copied in 33.3 ms, copied and looked at in 34.1; streamed 17.0 and 16.8; where the look
came 192 KiB later, 39 and 31). A run that passes has no id out of range, no id twice in a layer, and no row that
equals the one before it. ``_audit_kernels`` counts and names what is wrong in the others.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import _numba as runtime
from ._kernels import load_id, plain_run, store_run
from ._numba import copy_bytes, jit, load_uint64, prefetch, store_int64, uint64
from ._plan import AHEAD, LINE
from ._tally import LAYERS, kind_of, step_of


def _bad_ids_of(itemsize, topk, builder, address, keep, last):
    """Build the code of ``bad_ids`` for one kind of layer."""
    bits, ids, used = 8 * itemsize, LINE // itemsize, step_of(itemsize, topk) // itemsize
    line = ir.VectorType(ir.IntType(bits), ids)
    nothing = ir.Constant(line, [0] * ids)

    def load(address):
        value = builder.load(builder.inttoptr(address, line.as_pointer()))
        value.align = 1
        return value

    def places(value, order):
        return builder.shuffle_vector(value, nothing, ir.Constant(ir.VectorType(ir.IntType(32), ids), order))

    value = load(address)
    least = ir.Constant(line, [-1] * ids)  # of the xors: 0 where two ids are equal
    for turn in range(1, topk // 2 + 1):
        order = [k // topk * topk + (k + turn) % topk for k in range(used)]
        differ = builder.xor(value, places(value, order + [0] * (ids - used)))
        least = builder.select(builder.icmp_unsigned("<", differ, least), differ, least)
    first = builder.insert_element(nothing, builder.trunc(last, ir.IntType(bits)), ir.Constant(ir.IntType(32), 0))
    wrong = builder.icmp_unsigned(">", value, places(first, [0] * ids))
    wrong = builder.or_(wrong, builder.icmp_unsigned("==", least, nothing))
    wrong = builder.and_(wrong, builder.icmp_unsigned("!=", load(keep), nothing))
    found = builder.bitcast(wrong, ir.IntType(ids))
    found = builder.zext(found, ir.IntType(64)) if ids < 64 else found
    return builder.and_(found, ir.Constant(ir.IntType(64), (1 << used) - 1))


@intrinsic
def bad_ids(typing_context, kind, address, keep, last):
    """Look at the line at ``address``, which begins with whole layers of a ``kind``; return a bit for each wrong id.

    Wrong is an id above ``last`` (as unsigned, so that negative ids are), or equal to another one of its layer: each
    layer is turned by one place, by two, and so on to half of it. ``keep`` is the address of a line of bytes that are
    not zero for ids that count.
    """

    def generate(context, builder, signature, arguments):
        kind, *rest = arguments
        before, end = builder.basic_block, builder.append_basic_block("end")
        choice = builder.switch(kind, end)
        cases = [(ir.Constant(ir.IntType(64), -1), before)]  # a kind that is not known here never passes
        for layer in LAYERS:
            block = builder.append_basic_block("layer")
            choice.add_case(ir.Constant(kind.type, kind_of(*layer)), block)
            builder.position_at_end(block)
            cases.append((_bad_ids_of(*layer, builder, *rest), builder.basic_block))
            builder.branch(end)
        builder.position_at_end(end)
        found = builder.phi(ir.IntType(64))
        for case in cases:
            found.add_incoming(*case)
        return found

    return types.uint64(types.int64, types.int64, types.int64, types.int64), generate


def store_line(stores, streamed, target, source):
    """Write a line, ``streamed`` or not; nothing where ``stores`` is a bool. For compiled code alone."""


@runtime.choose_when_compiled(store_line)
def _choose_line(stores, streamed, target, source):
    if isinstance(stores, types.Boolean):
        return lambda stores, streamed, target, source: None
    if runtime.is_none(stores):
        return lambda stores, streamed, target, source: copy_bytes(target, source, LINE)
    from ._streaming import stream_line

    def copied_or_streamed(stores, streamed, target, source):
        if streamed:
            stream_line(target, source)
        else:
            copy_bytes(target, source, LINE)

    return copied_or_streamed


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
def repeats(row, row_bytes, word, before):
    """Say whether a contiguous row equals the one before it; ``word`` and ``before``, their last ones, mostly tell."""
    return word == before and same_row(row, row_bytes, 1, 0, 1, 1, row_bytes)


@jit(parallel=False)
def passes(stores, streamed, target, address, nbytes, head, stop, kind, step, row_bytes, keep, last):
    """Look at a run of whole rows, and write its lines from ``head`` to ``stop`` on the way; say whether it passes.

    The last row is left to the caller, but for whether it repeats the one before; so nothing behind the run is read. A
    row is a line or longer, and ``keep`` goes on for a line past the row, so that a look may begin at any layer. There
    are at least as many looks, ``step`` bytes apart, as lines.
    """
    wrong = uint64(0)
    place = 0
    row_end = address + row_bytes
    before = ~load_uint64(row_end - 8, 0)
    repeated = False
    at = head
    for look in range(address, address + nbytes - row_bytes, step):
        prefetch(look + AHEAD)
        if at < stop:
            store_line(stores, streamed, target + at, address + at)
            at += LINE
        wrong |= bad_ids(kind, look, keep + place, last)
        place += step
        if place >= row_bytes:
            place -= row_bytes
            word = load_uint64(row_end - 8, 0)
            repeated |= repeats(row_end - row_bytes, row_bytes, word, before)
            before = word
            row_end += row_bytes
    if nbytes > row_bytes:
        repeated |= repeats(row_end - row_bytes, row_bytes, load_uint64(row_end - 8, 0), before)
    return wrong == 0 and not repeated


@jit(parallel=False)
def long_enough(stores, nbytes):
    """Say whether a run of so many bytes is streamed, under ``stores`` as ``_kernels`` has it."""
    if stores is None:
        return False
    return nbytes >= stores


def audited_run(stores, target, size, address, itemsize, count):
    """Write what ``plain_run`` writes; where a run passes, note how many ids it has.

    ``stores``: how to store (see ``_kernels``), the address of the template, which is not looked at, that of the note,
    and of the layers looked at their kind (-1: none are), the step of looks, a row's bytes, ``keep`` and ``last``.
    """
    inner, template, note, kind, step, row_bytes, keep, last = stores
    nbytes = count * size
    if kind >= 0 and address != template and itemsize == size and nbytes % row_bytes == 0:
        streamed = long_enough(inner, nbytes)
        head = -target & (LINE - 1)
        looks = (nbytes - row_bytes + step - 1) // step
        stop = head + min(looks, (nbytes - head) // LINE) * LINE
        if passes(inner, streamed, target, address, nbytes, head, stop, kind, step, row_bytes, keep, last):
            store_int64(note, 0, count)
        for first, end in ((0, head), (stop, nbytes)):
            plain_run(target + first, 1, address + first, 1, end - first)
    else:
        store_run(inner, target, size, address, itemsize, count)


def finish(stores):
    """Let every thread see what was stored; plain stores need nothing for it."""


@runtime.choose_when_compiled(finish)
def _choose_finish(stores):
    if runtime.is_none(stores):
        return lambda stores: None
    from ._streaming import fence

    return lambda stores: fence()
