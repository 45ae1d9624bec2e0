"""Measure what docs/performance.md says of stores, and write the page. Used by ``make performance``.

The page's first table comes from docs/benchmarks.json, which ``make bench-table`` writes.
"""

from __future__ import annotations

import datetime
import functools
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from r3numba import RouteCollator, audit_routes, collate_routes
from r3numba._bench import figures
from r3numba._bench.host import host_record
from r3numba._bench.limit import aligned_buffer
from r3numba._bench.measure import Task, Timing, measure
from r3numba._bench.shapes import SHAPES, make_batch
from r3numba._memory import RecycledMemory
from r3numba._numba import address_of as address_of_array
from r3numba._numba import copy_bytes, jit, prefetch
from r3numba._plan import address_of
from r3numba._policy import DEFAULT_POLICY, Policy
from r3numba._streaming import fence, stream_line

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
MEGABYTE = 1_000_000
REPEAT = 7
PLAIN = replace(DEFAULT_POLICY, stream_from=None)
STREAMED = replace(DEFAULT_POLICY, path="streaming")


def rate(timing: Timing, nbytes: int) -> str:
    """Return GB/s of the median."""
    return f"{nbytes / timing.median / 1e9:.1f}"


def milliseconds(timing: Timing) -> str:
    """Return the median in ms."""
    return f"{timing.median * 1e3:.1f}"


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Yield a Markdown table."""
    yield f"| {' | '.join(columns)} |"
    yield f"|{' --- |' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


# ---- inner loops that were tried -------------------------------------------------------------------------------------


def streams(count: int, width: int, ahead: int) -> Callable[[Any, int, int], None]:
    """Return a copy in ``count`` interleaved streams of ``width`` bytes, its source asked for ``ahead`` of it."""
    block = count * width

    @jit(parallel=False)
    def copy(out: Any, source: int, nbytes: int) -> None:
        target = address_of_array(out)
        for begin in range(0, nbytes - block + 1, block):
            for k in range(0, width, 64):
                for stream in range(count):
                    place = begin + stream * width + k
                    if ahead:
                        prefetch(source + place + ahead)
                    stream_line(target + place, source + place)
        fence()

    return copy


def plain(step: int) -> Callable[[Any, int, int], None]:
    """Return a copy by the C library's memcpy, in parts of ``step`` bytes."""

    @jit(parallel=False)
    def copy(out: Any, source: int, nbytes: int) -> None:
        for begin in range(0, nbytes, step):
            copy_bytes(address_of_array(out) + begin, source + begin, min(step, nbytes - begin))

    return copy


def filled(template_bytes: int, copy: Callable[[Any, int, int], None]) -> Callable[[Any, int, int], None]:
    """Return a fill from a template of so many bytes, by a copy of it again and again."""

    @jit(parallel=False)
    def fill(out: Any, source: int, nbytes: int) -> None:
        for begin in range(0, nbytes - template_bytes + 1, template_bytes):
            copy(out[begin : begin + template_bytes], source, template_bytes)

    return fill


def inner_loops() -> Iterator[str]:
    """Measure the inner loops on warm memory, one thread."""
    nbytes = 256 << 20
    source, out = aligned_buffer(nbytes), aligned_buffer(nbytes)
    source[:], out[:] = 3, 1
    candidates = {
        "copy: memcpy, in parts of 2 MiB": plain(2 << 20),
        "copy: streaming, no prefetch": streams(1, 4096, 0),
        **{f"copy: streaming, prefetch {ahead} ahead": streams(1, 4096, ahead) for ahead in (256, 1024, 2048, 4096)},
        "copy: streaming, 2 interleaved streams of 4 KiB": streams(2, 4096, 2048),
        "copy: streaming, 4 interleaved streams of 4 KiB": streams(4, 4096, 2048),
        "fill: memcpy from a template of 16 KiB": filled(16 << 10, plain(16 << 10)),
        "fill: memcpy from a template of 64 KiB": filled(64 << 10, plain(64 << 10)),
        "fill: streaming from a template of 16 KiB": filled(16 << 10, streams(1, 4096, 0)),
        "fill: streaming from a template of 64 KiB": filled(64 << 10, streams(1, 4096, 0)),
    }
    tasks = [Task(name, functools.partial(run, out, address_of(source), nbytes)) for name, run in candidates.items()]
    for task in tasks:
        task.run()
    timings = measure(tasks, REPEAT)
    yield from table(
        ("inner loop, 268 MB, warm, 1 thread", "GB/s"),
        [(name, rate(timing, nbytes)) for name, timing in timings.items()],
    )


# ---- where streaming begins ------------------------------------------------------------------------------------------


def by_size() -> Iterator[str]:
    """Measure plain against streaming stores by the size of the result, into warm and into fresh memory."""
    rows = []
    for megabytes in (4, 8, 16, 32, 64, 128, 256):
        batch = make_batch(SHAPES["48x8"], "typical", megabytes * MEGABYTE)
        out = np.ones(batch.result_shape, np.uint8)

        def call(policy: Policy, threads: int, given: Any, batch: Any = batch) -> Any:
            return collate_routes(batch.routes, batch.lengths, out=given, num_threads=threads, _policy=policy)

        tasks = [
            Task(f"{memory} {threads} {name}", functools.partial(call, policy, threads, given),
                 0 if memory == "warm" else batch.nbytes, threads=threads)
            for memory, given in (("warm", out), ("fresh", None))
            for threads in (1, 2)
            for name, policy in (("plain", PLAIN), ("streamed", STREAMED))
        ]  # fmt: skip
        for task in tasks:
            task.run()
        timings = measure(tasks, REPEAT)
        rows.append((str(megabytes), *(milliseconds(timing) for timing in timings.values())))
    columns = [f"{m}, {t} thread{'s' * (t > 1)}, {s}" for m in ("warm", "fresh") for t in (1, 2)
               for s in ("plain", "streamed")]  # fmt: skip
    yield from table(("MB, 48x8 typical", *(f"ms {column}" for column in columns)), rows)


def by_run() -> Iterator[str]:
    """Measure plain against streaming stores by the length of the runs: rows that do not follow each other."""
    rows = []
    for layers in (48, 192, 768, 1536, 3072, 6144):
        count = 200 * MEGABYTE // (layers * 8)
        routes, out = np.ones((count, layers, 8), np.uint8)[::-1], np.ones((1, count, layers, 8), np.uint8)

        def call(policy: Policy, routes: Any = routes, out: Any = out) -> Any:
            return collate_routes([routes], [len(routes)], out=out, num_threads=1, _policy=policy)

        every = replace(STREAMED, stream_run_from=1)
        tasks = [Task(name, functools.partial(call, policy)) for name, policy in (("plain", PLAIN), ("all", every))]
        for task in tasks:
            task.run()
        timings = measure(tasks, REPEAT)
        rows.append((f"{layers * 8:,}", *(milliseconds(timing) for timing in timings.values())))
    yield from table(("bytes of a run (200 MB, warm, 1 thread)", "ms plain", "ms, every run streamed"), rows)


def by_source_pages() -> Iterator[str]:
    """Measure what it costs that routes lie on small pages, as decoded payloads do."""
    batch = make_batch(SHAPES["48x8"], "typical", 400 * MEGABYTE)
    store = aligned_buffer(sum(part.nbytes for part in batch.routes) + 64 * len(batch.routes))
    huge, begin = [], 0
    for part in batch.routes:
        huge.append(store[begin : begin + part.nbytes].reshape(part.shape))
        huge[-1][...] = part
        begin += -(-part.nbytes // 64) * 64
    out = np.ones(batch.result_shape, np.uint8)
    call = functools.partial(collate_routes, sequence_lengths=batch.lengths, out=out)
    tasks = [
        Task(f"{name} {threads}", functools.partial(call, routes, num_threads=threads))
        for name, routes in (("4 KiB", batch.routes), ("huge", huge))
        for threads in (1, 2)
    ]
    for task in tasks:
        task.run()
    timings = measure(tasks, REPEAT)
    rows = [
        (f"{name} pages", *(milliseconds(timings[f"{name} {threads}"]) for threads in (1, 2)))
        for name in ("4 KiB", "huge")
    ]
    yield from table(("routes lie on (400 MB, warm, streamed)", "ms, 1 thread", "ms, 2 threads"), rows)


# ---- strided sources -------------------------------------------------------------------------------------------------


def strided() -> Iterator[str]:
    """Measure sources that are not contiguous against NumPy's assignment of the same view."""
    rows, layers, topk = 65_536, 48, 8
    rng = np.random.default_rng(0)

    def ids(*shape: int) -> Any:
        return rng.integers(0, 128, shape, dtype=np.uint8)

    views = {
        "contiguous": ids(rows, layers, topk),
        "layer-major, `[layers, rows, topk]` transposed: runs of 8 bytes": ids(layers, rows, topk).transpose(1, 0, 2),
        "every second layer: runs of 8 bytes": ids(rows, 2 * layers, topk)[:, ::2],
        "8 of 16 ids: runs of 8 bytes": ids(rows, layers, 2 * topk)[:, :, :topk],
        "6 of 8 ids: runs of 6 bytes": ids(rows, layers, topk)[:, :, :6],
        "layers cut out: runs of a row": ids(rows, layers + 4, topk)[:, 2:-2],
        "every second id": ids(rows, layers, 2 * topk)[:, :, ::2],
        "id-major, `[topk, rows, layers]` transposed": ids(topk, rows, layers).transpose(1, 2, 0),
        "Fortran order": np.asfortranarray(ids(rows, layers, topk)),
    }
    found = []
    for name, view in views.items():
        for dtype in ("uint8", "int32"):
            out = np.ones((1, rows, *view.shape[1:]), dtype)

            def ours(view: Any = view, out: Any = out, dtype: str = dtype, threads: int = 1) -> Any:
                return collate_routes([view], [len(view)], out=out, dtype=dtype, num_threads=threads)

            def assigned(view: Any = view, out: Any = out) -> None:
                out[0] = view

            tasks = [Task("ours", ours), Task("two", functools.partial(ours, threads=2)), Task("numpy", assigned)]
            for task in tasks:
                task.run()
            timings = measure(tasks, 5)
            found.append((name, f"uint8 to {dtype}", *(milliseconds(timing) for timing in timings.values())))
    yield from table(("source `[65536, 48, 8]`", "", "ms, 1 thread", "ms, 2 threads", "ms, NumPy's assignment"), found)


# ---- the audit -------------------------------------------------------------------------------------------------------


def audits() -> Iterator[str]:
    """Measure what an audit adds, by the width of the ids and top-k, on as many threads as a call takes by itself."""
    rows = []
    for name, layers, topk, experts, dtype in (
        ("Qwen3: top-8 of 128", 48, 8, 128, "uint8"),
        ("DeepSeek-V3: top-8 of 256", 61, 8, 256, "uint8"),
        ("gpt-oss: top-4 of 128", 36, 4, 128, "uint8"),
        ("Mixtral: top-2 of 8", 32, 2, 8, "uint8"),
        ("Moonlight: top-6 of 64", 26, 6, 64, "uint8"),
        ("Kimi K2: top-8 of 384", 60, 8, 384, "int16"),
        ("Qwen3-Next: top-10 of 512", 48, 10, 512, "int16"),
        ("top-8 of 128, not compacted", 48, 8, 128, "int32"),
        ("top-5 of 128: by id", 48, 5, 128, "uint8"),
    ):
        count = 200 * MEGABYTE // 16 // (layers * topk * np.dtype(dtype).itemsize)
        start = np.random.default_rng(0).integers(0, experts, (count, layers, 1))
        ids = ((start + np.arange(topk)) % experts).astype(dtype)
        batch, lengths, nbytes = [ids.copy() for _ in range(16)], [count + 1] * 16, 16 * ids.nbytes
        collator = RouteCollator()

        def call(collate: Any, audit: bool, batch: Any = batch, lengths: Any = lengths, experts: int = experts) -> Any:
            return collate(batch, lengths, num_experts=experts, dtype=batch[0].dtype, audit=audit)

        def largest(batch: Any = batch) -> Any:
            return [part.max() for part in batch]

        tasks = [
            *(
                Task(f"{memory} {audit}", functools.partial(call, collate, audit), cold, threads=2)
                for memory, collate, cold in (
                    ("fresh", collate_routes, nbytes),
                    ("recycled", collator.collate_routes, 0),
                )
                for audit in (False, True)
            ),
            Task("max", largest),
            Task("alone", functools.partial(audit_routes, batch, num_experts=experts)),
        ]
        for task in tasks:
            task.run()
        timings = measure(tasks, REPEAT)
        found = [milliseconds(timings[task.name]) for task in tasks]
        for slow, fast in (("fresh True", "fresh False"), ("recycled True", "recycled False"), ("alone", "max")):
            found.append(f"{timings[slow].median / timings[fast].median:.2f}x")
        rows.append((name, dtype, *found))
    columns = ("200 MB of ids", "", "fresh", "audited", "recycled", "audited", "NumPy's `max()`", "`audit_routes`")
    ratios = ("audited / fresh", "audited / recycled", "alone / `max()`")
    yield from table((*columns, *ratios), rows)


# ---- the recycler ----------------------------------------------------------------------------------------------------


def recycling() -> Iterator[str]:
    """Count fresh buffers and held bytes over steps of skewed sizes; nothing is written or timed."""
    spreads: dict[str, Callable[[random.Random], int]] = {
        "equal": lambda chance: 1000,
        "uniform, 500 to 1000": lambda chance: chance.randint(500, 1000),
        "lognormal, sigma 0.5": lambda chance: round(min(4000, 500 * chance.lognormvariate(0, 0.5))),
        "lognormal, sigma 1": lambda chance: round(min(4000, 500 * chance.lognormvariate(0, 1))),
        "one of 20 is 10 times as long": lambda chance: 2000 if chance.random() < 0.05 else 200,
    }
    rows = []
    for name, draw in spreads.items():
        for held in (1, 2):
            chance, memory, live, sizes = random.Random(7), RecycledMemory(None), [], []
            fresh_count, most = 0, 0.0
            for _ in range(500):
                size = draw(chance)
                sizes.append(size * 9)  # indices and mask
                indices, _, fresh = memory.empty((size, 1, 8), np.dtype(np.uint8), (size,), DEFAULT_POLICY)
                live.append(indices)
                del live[:-held], indices
                fresh_count += fresh
                most = max(most, memory.idle_bytes / max(sizes[-16:]))
            rows.append((name, str(held), str(fresh_count), f"{most:.1f}"))
    columns = ("sizes of 500 steps", "batches held", "fresh buffers", "most that was idle, in largest batches of 16")
    yield from table(columns, rows)


# ---- the page --------------------------------------------------------------------------------------------------------


def recycled_table(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the arms in memory that is used again, from the record of the benchmark."""
    cases = record["cases"]
    names = ("single_reused", "pool_2_reused", "plain_1", "plain_2", "recycled_1", "recycled_2", "out_2")
    rows = []
    for name in names:
        arms = [case["arms"].get(name) for case in cases]
        if any(arm is None for arm in arms):
            continue
        shares = [figures.share_of_limit(case, name) for case in cases]
        rows.append((
            arms[0]["label"], str(arms[0]["threads"]), *(f"{arm['median'] * 1e3:.1f}" for arm in arms),
            ", ".join("" if share is None else f"{share:.0%}" for share in shares),
        ))  # fmt: skip
    for threads in (1, 2):
        limits = [case["limits"][f"warm_{threads}"] for case in cases]
        rows.append((
            f"limit ({', '.join(sorted({limit['candidate'] for limit in limits}))})", str(threads),
            *(f"{limit['median'] * 1e3:.1f}" for limit in limits), "100%",
        ))  # fmt: skip
    fresh = [case["arms"][figures.ours_cold(case)]["median"] for case in cases]
    saved = [(one - case["arms"]["recycled_2"]["median"]) * 1e3 for one, case in zip(fresh, cases, strict=True)]
    rows.append(("saved per step: recycled against fresh", "2", *(f"{value:.1f}" for value in saved), ""))
    sizes = tuple(f"{case['nbytes'] / 1e6:.0f} MB" for case in cases)
    yield from table(("ms per step, memory that is used again", "threads", *sizes, "of the limit"), rows)


TEXT = """
A collation does no arithmetic: its cost is the traffic between processor and memory. A plain store reads the line that
it overwrites; a streaming (non-temporal) store does not, so that a copy moves two bytes for each one of the result in
place of three, and a fill one in place of two. Fresh pages are another matter: the kernel has to clear them first,
which costs more than the copy and leaves them in the cache; plain stores are right there.

**What runs when.** Recycled (`RouteCollator`) or caller-owned (`out=`) memory of 32 MB and more: streaming stores, for
every run of 16 KiB and more. Everything else: plain stores. An audit looks at each line on its way and changes nothing
of this.
`R3NUMBA_STREAMING=0` turns streaming off; without it (another processor, another LLVM) plain stores write the same
bytes. `r3numba doctor` says which it is, and `backend_info()["path"]` what a call used.

## Memory that is used again

{recycled}
The limit is the best copy and fill found, on huge pages, for the same mix of bytes, in the same run.

{pages}
What one thread lacks to the limit is the input: routes of a few MB lie on small pages, and the limit's source does not.

## Inner loops

{loops}
One stream with a prefetch 2 KiB ahead is what runs. Interleaved streams, which win on some Intel processors, lost
here, and the simpler loop stays.

## From which size on

{sizes}
Where streaming loses (fresh pages, results that the caches hold) it is not used.

{runs}
A short run loses its stream at both ends, so runs below 16 KiB get plain stores.

## Sources that are not contiguous

{strided}
Runs of whole 8-byte words are copied word by word, as a call of memcpy for each took 2.5 to 5 times as long; ids that
lie apart are moved place by place over a block of 32 rows. NumPy's assignment is faster where ids lie apart and it can
merge axes (every second id) or reorder them (id-major). Such views are rare, and one walk for all of them is worth more
than a second executor; `np.ascontiguousarray` before the call is the way out.

## What an audit adds

ms per call:

{audits}
Ids are looked at a line at a time, between load and store: layers of 1, 2, 4, 6, 8, 10, 12, 16 and 22 ids in
contiguous rows of 64 bytes and more. Others are looked at row by row, as lanes of 64-bit words where a layer is a whole
number of half words, else id by id; and so are runs in which something is wrong.

## Buffers that a loop keeps

{recycling}
A new buffer has the size of its batch. Buffers that 16 calls had no use for, and those more than twice as large as the
last 16 batches, are freed: skewed steps pay for some fresh buffers, and nothing is hoarded.
"""


def page() -> str:
    """Return the page."""
    record = json.loads((ROOT / "docs" / "benchmarks.json").read_text())
    host = host_record()
    versions = ", ".join(f"{name} {version}" for name, version in host["versions"].items() if version)
    head = (
        "# Performance: the limit of the memory bus, and what was tried\n\n"
        f"Generated by `make performance` on {datetime.date.today()}; do not edit. {host['cpu']}, "
        f"{host['permitted_cpus']} CPUs, huge pages {host['huge_pages']}; {versions}. Medians of {REPEAT} quiet "
        "repetitions, interleaved. The first table is from `make bench-table`.\n"
    )
    sections = {
        "recycled": recycled_table(record), "pages": by_source_pages(), "loops": inner_loops(), "sizes": by_size(),
        "runs": by_run(), "strided": strided(), "audits": audits(), "recycling": recycling(),
    }  # fmt: skip
    return head + TEXT.format(**{name: "\n".join(section) for name, section in sections.items()})


def main() -> int:
    """Write the page."""
    PAGE.write_text(page())
    print("wrote", PAGE.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
