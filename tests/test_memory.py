"""Where results live: shared with torch, checked against the limit, recycled by weak ownership, and within the peak."""

from __future__ import annotations

import ctypes
import gc
import pickle
import random
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import support
from support import CALLS, LENGTHS, ROWS, address, batch_of, captured, need_torch, same

from r3numba import RouteCollator, collate_routes, pack_routes
from r3numba._policy import DEFAULT_POLICY

BOTH_FIGURES = r"^a batch of shape \[.*\] \(.*\) needs {need:,} bytes, but only {have:,} bytes can still be allocated"

# ---- the memory check ------------------------------------------------------------------------------------------------


@pytest.fixture
def room(monkeypatch):
    """Return a function that says how many bytes the container still allows."""
    return lambda figure: monkeypatch.setattr("r3numba._memory.cgroup_memory_available", lambda: figure)


@pytest.mark.parametrize("call", ["collate", "collator"])
def test_the_check_begins_above_256_mib(room, call):
    """63 ids and a mask byte a row: exactly 256 MiB are allocated without a look, one row more is refused."""
    room(1000)
    routes = [np.ones((1, 9, 7), np.uint8)]
    need = 64 * (1 << 22)
    more = need + (64 if call == "collate" else 65)
    with pytest.raises(MemoryError, match=BOTH_FIGURES.format(need=more, have=1000)):
        CALLS[call](routes, [(1 << 22) + 1])
    assert CALLS[call](routes, [1 << 22], num_threads=2).array.nbytes == need - (1 << 22)


@pytest.mark.parametrize("call", CALLS)
def test_the_check_is_for_new_memory_alone(room, call, monkeypatch):
    arguments = {"_policy": replace(DEFAULT_POLICY, memory_check_from=100)}
    need = int(np.prod(support.out_shape(call))) + int(np.prod(support.out_shape(call)[:-2]))
    need += -int(np.prod(support.out_shape(call))) % 64 if "collator" in call else 0  # the mask has a line of its own
    room(need)
    CALLS[call](batch_of(ROWS), LENGTHS, **arguments)
    room(need - 1)
    support.refused(call, MemoryError, BOTH_FIGURES.format(need=need, have=need - 1), out=None, **arguments)
    CALLS[call](batch_of(ROWS), LENGTHS, out=support.good(call)[0]["out"], **arguments)
    room(None)
    CALLS[call](batch_of(ROWS), LENGTHS, **arguments)
    room(0)
    with monkeypatch.context() as patch:
        patch.setenv("R3NUMBA_MEMORY_CHECK", "0")
        CALLS[call](batch_of(ROWS), LENGTHS, **arguments)
        with pytest.raises(MemoryError):  # from the allocator itself
            collate_routes(batch_of(ROWS), [2**50] * 5, **arguments)
    support.refused(call, MemoryError, "bytes can still be allocated", out=None, **arguments)


def test_the_check_covers_select_and_pad(room, monkeypatch):
    rectangle, pack = collate_routes(batch_of(ROWS), LENGTHS), support.packed()
    for module in ("collate", "pack"):
        small = replace(DEFAULT_POLICY, memory_check_from=0)
        monkeypatch.setattr(f"r3numba.{module}.policy_from_environment", lambda small=small: small)
    room(50)
    for call in (lambda: rectangle.select([0, 1]), lambda: pack.select([0, 1]), pack.pad):
        with pytest.raises(MemoryError, match=r"needs \d+ bytes, but only 50 bytes can still be allocated"):
            call()
    pack.pad(out=support.guarded(rectangle.array.shape)[1])


def test_a_recycled_buffer_is_not_checked_and_a_refusal_keeps_it(room):
    collator, checked = RouteCollator(), {"_policy": replace(DEFAULT_POLICY, memory_check_from=0)}
    room(10_000)
    place = address(collator.collate_routes(batch_of(ROWS), LENGTHS, **checked).array)
    idle = collator.idle_bytes
    room(0)
    assert address(collator.pack_routes(batch_of(ROWS), LENGTHS, **checked).array) == place
    with pytest.raises(MemoryError, match=r"only [\d,]+ bytes"):
        collator.collate_routes(batch_of(ROWS), LENGTHS, max_length=60, **checked)
    assert collator.idle_bytes == idle


# ---- recycling by weak ownership -------------------------------------------------------------------------------------


def out_of_band(batch):
    buffers = []
    return pickle.dumps(batch, protocol=5, buffer_callback=buffers.append), buffers


HOLDERS = {
    "batch": lambda b: b,
    "array": lambda b: b.array,
    "slice": lambda b: b.array[1:2],
    "step": lambda b: b.array[::2, ..., ::-1],
    "reshaped": lambda b: b.array.reshape(-1),
    "dtype-view": lambda b: b.array.view(np.int8),
    "mask": lambda b: b.padding_mask,
    "missing": lambda b: b.missing[0],
    "memoryview": lambda b: memoryview(b.array),
    "frombuffer": lambda b: np.frombuffer(b.array, np.int8),
    "as-strided": lambda b: np.lib.stride_tricks.as_strided(b.array, (3,), (1,)),
    "flat-iterator": lambda b: b.array.flat,
    "numpy-dlpack": lambda b: np.from_dlpack(b.array),
    "capsule": lambda b: b.array.__dlpack__(),
    "pickle-buffers": lambda b: out_of_band(b)[1],
    "unpickled": lambda b: pickle.loads(out_of_band(b)[0], buffers=out_of_band(b)[1]),
    "tensor": lambda b: need_torch() and b.indices,
    "tensor-slice": lambda b: need_torch() and b.indices[1:, 0],
    "tensor-view": lambda b: need_torch() and b.indices.view(-1),
    "tensor-dtype-view": lambda b: need_torch() and b.indices.view(need_torch().int8),
    "tensor-numpy": lambda b: need_torch() and b.indices.numpy(),
    "tensor-storage": lambda b: need_torch() and b.indices.untyped_storage(),
    "tensor-dlpack": lambda b: need_torch() and np.from_dlpack(b.indices),
    "from-dlpack": lambda b: need_torch().from_dlpack(b.array),
    "mask-tensor": lambda b: need_torch() and b.padding_mask_tensor,
}


def fill(collator, layout, seed):
    """Collate a batch whose size never changes and whose content does; one row of it is missing."""
    missing = [np.array([True, False, False]), None]
    method = collator.collate_routes if layout == "rectangle" else collator.pack_routes
    return method([captured(3, seed=seed), captured(4, seed=seed + 1)], [4, 4], missing=missing)


@pytest.mark.parametrize("cycle", [False, True], ids=["direct", "in-a-cycle"])
@pytest.mark.parametrize("layout", ["rectangle", "pack"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_buffer_waits_for_all_that_shares_it(holder, layout, cycle):
    """Case 41: while anything lives the content stays and nobody gets the buffer; afterwards the next one does."""
    collator = RouteCollator()
    batch = fill(collator, layout, 0)
    place, size = address(batch.array), batch.array.nbytes
    content = batch.array.tobytes(), batch.padding_mask.tobytes()
    mask_place = address(batch.padding_mask)
    held = HOLDERS[holder](batch)
    gc.disable()
    gc.freeze()  # so that the collection below looks at what is new, which is all that this needs
    if cycle:
        node = types.SimpleNamespace(held=held)
        node.itself = node
        del node, held  # nothing but the cycle keeps it now
    del batch
    try:
        successors = [fill(collator, layout, seed) for seed in range(10, 40, 10)]
        for successor in successors:
            assert address(successor.array) != place
            successor.array[...] = 5
            successor.padding_mask[...] = True
        assert ctypes.string_at(place, size) == content[0]
        assert ctypes.string_at(mask_place, len(content[1])) == content[1]
        assert collator.idle_bytes == 0
        if not cycle:
            del held
        else:
            gc.collect()
        assert collator.idle_bytes > 0
    finally:
        gc.enable()
        gc.unfreeze()
    following = fill(collator, layout, 50)
    assert address(following.array) == place
    same(following, fill(RouteCollator(), layout, 50))


def test_a_resurrected_batch_keeps_its_buffer():
    class Phoenix:
        def __del__(self):
            risen.append(self.array)

    risen, collator = [], RouteCollator()
    phoenix = Phoenix()
    phoenix.itself, phoenix.array = phoenix, fill(collator, "rectangle", 0).array
    content = phoenix.array.tobytes()
    del phoenix
    gc.collect()
    fill(collator, "rectangle", 7).array[...] = 3
    assert risen[0].tobytes() == content


def test_case_41_a_loop_that_keeps_old_views():
    """Batches of changing size, some kept, all written over by their owners; every live byte stays right."""
    collator, chance, kept = RouteCollator(), random.Random(3), []
    for step in range(300):
        rows = [chance.randint(1, 9) for _ in range(chance.randint(1, 4))]
        routes, lengths = batch_of(rows, seed=step), [count + chance.randint(0, 2) for count in rows]
        layout = chance.choice(["collate_routes", "pack_routes"])
        batch = getattr(collator, layout)(routes, lengths)
        same(batch, {"collate_routes": collate_routes, "pack_routes": pack_routes}[layout](routes, lengths))
        batch.array[...] = step % 251
        view = chance.choice([batch.array, batch.array[0], batch.array.reshape(-1)[3:]])
        kept.append((view, step % 251))
        del batch, view
        for old, value in kept:
            assert (old == value).all()
        chance.shuffle(kept)
        del kept[chance.randint(0, 6) :]


def test_two_threads_share_a_collator():
    collator, start = RouteCollator(), threading.Barrier(2)

    def loop(number):
        start.wait(30)
        kept = []
        for step in range(200):
            layout, seed = "rectangle" if step % 3 else "pack", 1000 * number + step
            kept.append((fill(collator, layout, seed), layout, seed))
            if len(kept) > 1 + step % 4:
                for batch, kind, old in kept:
                    same(batch, fill(RouteCollator(), kind, old))
                kept.clear()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(loop, number) for number in range(2)]:
                future.result(timeout=120)
    finally:
        sys.setswitchinterval(interval)


def test_rectangle_and_pack_share_buffers_and_the_best_fit_is_taken():
    collator, need = RouteCollator(), [1000, 300, 600]
    batches = [collator.collate_routes([np.ones((1, 1, 1), np.uint8)], [size]) for size in need]
    places = [address(batch.array) for batch in batches]
    batches.clear()
    one = collator.pack_routes([np.ones((1, 1, 1), np.uint8)], [500])
    two = collator.pack_routes([np.ones((1, 1, 2), np.int16)], [150])
    three = collator.collate_routes([np.ones((1, 1, 1), np.uint8)], [10])
    assert [address(batch.array) for batch in (one, two, three)] == [places[2], places[0], places[1]]


@pytest.mark.parametrize("most", [None, 0, 1])
def test_max_bytes_bounds_what_is_idle(most):
    size = RouteCollator()
    fill(size, "rectangle", 0)
    limit = None if most is None else most * size.idle_bytes
    collator = RouteCollator(max_bytes=limit)
    batches = [fill(collator, "rectangle", seed) for seed in range(3)]
    assert collator.idle_bytes == 0  # what is on loan does not count
    batches.clear()
    assert collator.idle_bytes == (3 if most is None else most) * size.idle_bytes


def sized(collator, kilobytes):
    """Return a batch of so many kilobytes (its indices; the mask is an eighth)."""
    return collator.pack_routes([np.zeros((kilobytes * 125, 1, 8), np.uint8)], [kilobytes * 125])


def test_one_long_batch_is_not_hoarded():
    collator, held = RouteCollator(), []
    sized(collator, 100)
    held = [collator.idle_bytes]
    for _ in range(40):
        sized(collator, 10)
        held.append(collator.idle_bytes)
    assert held[0] > 100_000
    assert held[15] == held[0]  # it serves the small ones meanwhile
    assert held[-1] < held[0] / 9


def test_many_batches_held_once_are_not_hoarded():
    collator = RouteCollator()
    sized(collator, 3)
    one = collator.idle_bytes
    batches = [sized(collator, 3) for _ in range(50)]
    assert collator.idle_bytes == 0
    batches.clear()
    assert collator.idle_bytes == 50 * one
    for _ in range(20):
        sized(collator, 3)
    assert collator.idle_bytes == one


@pytest.mark.parametrize("live", [1, 2, 5])
def test_a_steady_loop_keeps_its_buffers(live):
    """As many buffers as the loop holds at a time, for good."""
    collator, batches, places = RouteCollator(), [], set()
    for _ in range(100):
        batches.append(sized(collator, 3))
        places.add(address(batches[-1].array))
        del batches[:-live]
    assert len(places) == live + 1


def test_skewed_steps_hold_no_more_than_twice_the_recent_largest():
    collator, chance, sizes = RouteCollator(), random.Random(5), []
    for _ in range(400):
        sizes.append(max(1, min(100, round(chance.lognormvariate(2, 1)))))
        sized(collator, sizes[-1])
        assert collator.idle_bytes <= 2 * 1125 * max(sizes[-16:]) + 64


def test_clear_with_live_loans():
    collator = RouteCollator()
    live, dead = fill(collator, "rectangle", 0), fill(collator, "pack", 5)
    del dead
    assert collator.idle_bytes > 0
    collator.clear()
    assert collator.idle_bytes == 0
    same(live, fill(RouteCollator(), "rectangle", 0))
    del live
    assert collator.idle_bytes == 0  # lent before the clear: freed, not kept
    place = address(fill(collator, "rectangle", 9).array)
    assert address(fill(collator, "rectangle", 1).array) == place


@pytest.mark.parametrize("layout", ["rectangle", "pack", "pack-slice"])
def test_pickles_out_of_band_without_a_copy(layout):
    for collator in (RouteCollator(), types.SimpleNamespace(collate_routes=collate_routes, pack_routes=pack_routes)):
        batch = fill(collator, layout, 3)
        batch = batch[1:] if layout == "pack-slice" else batch
        stream, buffers = out_of_band(batch)
        places = {address(np.frombuffer(buffer.raw(), np.uint8)) for buffer in buffers}
        assert {address(batch.array), address(batch.padding_mask)} <= places
        again = pickle.loads(stream, buffers=buffers)
        assert address(again.array) == address(batch.array)
        assert address(again.padding_mask) == address(batch.padding_mask)
        same(again, batch)
    assert len(out_of_band(collate_routes([captured(30_000)], [30_000]))[0]) < 2_000


# ---- peak memory of a call -------------------------------------------------------------------------------------------

COUNTS = {"one": [200_000], "thousand": [300] * 1000, "many": [index % 4 for index in range(50_000)]}


def trajectories(kind, count):
    """Return routes of one kind, lengths one token past them, and masks with every eighth row missing."""
    rows, shape = COUNTS[count], (1, 2) if count == "many" else (2, 4)
    routes = [np.full((number, *shape), 3, np.uint8) for number in rows]
    missing = [np.arange(number) % 8 == 2 for number in rows] if "missing" in kind else None
    if "strided" in kind:
        routes = [np.repeat(entry, 2, axis=2)[:, :, ::2] for entry in routes]
        missing = missing and [np.repeat(mask, 2)[::2] for mask in missing]
    if "mixed" in kind:
        routes = [entry.astype((np.int32, np.int16, np.uint8)[index % 3]) for index, entry in enumerate(routes)]
    if "tensors" in kind:
        routes = [need_torch().from_numpy(entry) for entry in routes]
        missing = missing and [need_torch().from_numpy(mask) for mask in missing]
    return routes, [number + 1 for number in rows], missing


#: Every kind on two paths, two kinds on every path; of 50,000 trajectories only those that differ before any path.
PEAKS = [
    (path, kind, count)
    for path in support.available_paths()
    for kind in ("contiguous", "missing", "strided", "mixed", "strided-missing", "tensors", "tensors-missing")
    for count in ("one", "thousand")
    if kind in ("contiguous", "missing") or path == "serial" or (path == "slices" and count == "one")
]
if "serial" in support.available_paths():
    PEAKS += [("serial", kind, "many") for kind in ("contiguous", "strided-missing", "tensors-missing")]


@pytest.mark.parametrize(("path", "kind", "count"), PEAKS)
def test_peak_memory(path, kind, count, monkeypatch):
    """Result, 1 MiB, and 64 bytes a trajectory: whatever the sources, the path and the call."""
    routes, lengths, missing = trajectories(kind, count)
    monkeypatch.setenv("R3NUMBA_POLICY", f"force_{path}")
    options = {"missing": missing, "num_threads": 2}
    rectangle, pack = collate_routes(routes, lengths, **options), pack_routes(routes, lengths, **options)
    calls = {
        "collate": lambda: collate_routes(routes, lengths, **options),
        "collate-out": lambda: collate_routes(routes, lengths, out=rectangle.array, **options),
        "pack": lambda: pack_routes(routes, lengths, **options),
        "pack-out": lambda: pack_routes(routes, lengths, out=pack.array, **options),
        "collator": lambda: RouteCollator().collate_routes(routes, lengths, **options),
        "select": lambda: rectangle.select(order, num_threads=2),
        "pack-select": lambda: pack.select(order, num_threads=2),
        "pad": lambda: pack.pad(num_threads=2),
        "pad-out": lambda: pack.pad(out=rectangle.array, num_threads=2),
    }
    order, over = np.arange(len(routes)), {}
    # Known excess: a mask of missing rows that is not contiguous is copied, and the copy is an object of 112 bytes.
    a_trajectory = 160 if kind == "strided-missing" else 64
    slow = count == "many" or (path == "slices" and "missing" in kind)  # much of it in Python, and traced
    for name in ("collate-out", "select") if slow else calls:
        for _ in range(2):  # now and then a table of the interpreter's own grows in a call: a second try is fair
            peak, result = support.peak_of(calls[name])
            allowed = result.padding_mask.nbytes + (1 << 20) + a_trajectory * len(routes)
            over[name] = peak - allowed - (0 if "out" in name else result.array.nbytes)
            if over[name] <= 0:
                break
    assert all(excess <= 0 for excess in over.values()), {name: excess for name, excess in over.items() if excess > 0}
