"""Batches to measure with: production shapes and length spreads, scaled to a result of a given size.

Everything is seeded, every page is touched (the values are written), and each trajectory has ``T - 1`` captured rows,
as engines send them. No two trajectories share memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .._checks import experts_dtype

#: Tokens a trajectory may have, for each trajectory of a batch: what makes 0.4 GB of 48x8 128 trajectories of 8192.
ASPECT: Final = 64
#: Rows of legal routes that every trajectory is drawn from.
_POOL_ROWS: Final = 512
LONG_TOKENS: Final = 16_384
SHORT_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class RouteShape:
    """Layers, ids a row and experts of a model; ``name`` is how the command line and asv call it."""

    name: str
    layers: int
    topk: int
    experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the canonical dtype of this many experts."""
        return experts_dtype(self.experts, self.topk)[1]

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one token's routes."""
        return self.layers * self.topk * self.dtype.itemsize


SHAPES: Final = {
    shape.name: shape
    for shape in (
        RouteShape("48x8", 48, 8, 128),
        RouteShape("58x8", 58, 8, 256),
        RouteShape("47x4", 47, 4, 64),
        RouteShape("60x8", 60, 8, 384),
        RouteShape("40x22", 40, 22, 512),
    )
}
#: Shortest trajectory as a share of the longest.
SPREADS: Final = {"uniform": 1.0, "mild": 1 / 2, "typical": 1 / 16, "heavy": 1 / 64}
#: Tiny batches as (trajectories, tokens): 10 KB to 2 MB of 48x8.
TINY: Final = ((4, 7), (8, 32), (16, 64), (32, 160), (256, 20), (1024, 5))


@dataclass(frozen=True, slots=True, eq=False)
class BenchBatch:
    """One input: ``routes[i]`` is ``[lengths[i] - 1, layers, topk]``; the result is left-padded to ``width`` tokens."""

    name: str
    shape: RouteShape
    routes: Sequence[NDArray[Any]]
    lengths: Sequence[int]
    width: int

    @property
    def result_shape(self) -> tuple[int, int, int, int]:
        """Return the shape of the rectangle."""
        return len(self.lengths), self.width, self.shape.layers, self.shape.topk

    @property
    def nbytes(self) -> int:
        """Return the bytes of the rectangle."""
        return math.prod(self.result_shape) * self.shape.dtype.itemsize

    @property
    def copied_bytes(self) -> int:
        """Return how many bytes of the rectangle are captured routes; the others are dummies."""
        return sum(len(part) for part in self.routes) * self.shape.row_bytes


def make_batch(shape: RouteShape, spread: str, nbytes: int, seed: int = 0) -> BenchBatch:
    """Return a batch whose rectangle has about ``nbytes``: one trajectory at the maximum, one at the minimum.

    The others are drawn evenly between the two; in the heavy tail evenly in the logarithm, so that most are short.
    """
    rows = nbytes / shape.row_bytes
    count = max(1, round(math.sqrt(rows / ASPECT)))
    longest = max(2, round(rows / count))
    shortest = max(2, round(longest * SPREADS[spread]))
    random = np.random.default_rng(seed)
    if spread == "heavy":
        drawn = np.exp(random.uniform(math.log(shortest), math.log(longest), count)).round()
    else:
        drawn = random.integers(shortest, longest + 1, count)
    drawn[-1] = shortest
    drawn[0] = longest
    return batch_of(shape, random.permutation(drawn).astype(int).tolist(), f"{shape.name} {spread}", seed)


def make_skewed(shape: RouteShape, nbytes: int, seed: int = 0) -> BenchBatch:
    """Return a batch of about ``nbytes`` in which one trajectory is long and all others are short."""
    count = max(2, round(nbytes / (LONG_TOKENS * shape.row_bytes)))
    return batch_of(shape, [LONG_TOKENS, *[SHORT_TOKENS] * (count - 1)], f"{shape.name} skewed", seed)


def batch_of(shape: RouteShape, lengths: Sequence[int], name: str, seed: int = 0) -> BenchBatch:
    """Return a batch of trajectories of these ``lengths``, with legal routes (distinct ids in a row)."""
    random = np.random.default_rng(seed)
    scores = random.random((_POOL_ROWS, shape.layers, shape.experts), dtype=np.float32)
    pool = np.argpartition(scores, shape.topk, axis=-1) if shape.topk < shape.experts else scores.argsort(axis=-1)
    pool = pool[..., : shape.topk].astype(shape.dtype)
    routes = [_cycled(pool, length - 1, int(random.integers(_POOL_ROWS))) for length in lengths]
    return BenchBatch(name, shape, routes, list(lengths), max(lengths))


def _cycled(pool: NDArray[Any], rows: int, begin: int) -> NDArray[Any]:
    """Return ``rows`` rows of the pool, from row ``begin`` on and round again, in memory of their own."""
    result = np.empty((rows, *pool.shape[1:]), pool.dtype)
    filled = min(rows, len(pool) - begin)
    result[:filled] = pool[begin : begin + filled]
    while filled < rows:
        step = min(rows - filled, len(pool))
        result[filled : filled + step] = pool[:step]
        filled += step
    return result


def tiled(name: str, experts: int, captured: Sequence[NDArray[Any]], nbytes: int) -> BenchBatch:
    """Return captured routes ``[T - 1, layers, topk]`` repeated over tokens and layers to about ``nbytes``.

    Layers repeat up to 48, trajectories up to 64; the relative lengths are those of the capture.
    """
    layers, topk = captured[0].shape[1:]
    stacked = max(1, 48 // layers)
    count = max(64, len(captured))
    shape = RouteShape(name, layers * stacked, topk, experts)
    longest = max(len(part) + 1 for part in captured)
    factor = max(1.0, nbytes / (count * longest * shape.row_bytes))
    lengths = [round((len(captured[i % len(captured)]) + 1) * factor) for i in range(count)]
    routes = [
        np.ascontiguousarray(np.tile(_cycled(captured[i % len(captured)], length - 1, 0), (1, stacked, 1)))
        for i, length in enumerate(lengths)
    ]
    return BenchBatch(name, shape, routes, lengths, max(lengths))
