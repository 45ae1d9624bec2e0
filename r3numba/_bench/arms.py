"""The arms: every way to make the same rectangle from the same batch, ours and those to beat.

The baselines are the collations that trainers write by hand, in our own words: torch copies, one trajectory at a time,
with torch at one thread (``measure`` sees to that). An arm takes a ``Workbench`` and returns the rectangle.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from .._dispatch import kernels
from .._policy import DEFAULT_POLICY, PathName, Policy
from ..collate import collate_routes
from ..collator import RouteCollator
from ..routes import dummy_routes
from .shapes import BenchBatch

Need = Literal["torch", "numba"]


def has_torch() -> bool:
    """Say whether torch can be imported, without importing it."""
    return importlib.util.find_spec("torch") is not None


class Workbench:
    """What the arms need beside a batch, made once: tensors, a dummy row and block, a pool, buffers that are reused.

    A context manager; leaving it ends the pool and drops the buffers. One thread uses it.
    """

    def __init__(self, batch: BenchBatch) -> None:
        self.batch = batch
        self.begins = [batch.width - length for length in batch.lengths]
        self.collator = RouteCollator()
        self.dummy_row = dummy_routes((batch.shape.topk,), batch.shape.dtype)
        self.dummy_block = dummy_routes((batch.width, batch.shape.layers, batch.shape.topk), batch.shape.dtype)
        self.pool = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="r3numba-bench")
        self._reused: Any = None
        self._wide: Any = None
        self.torch: Any = importlib.import_module("torch") if has_torch() else None
        if self.torch is not None:
            self.tensors = [self.torch.from_numpy(part) for part in batch.routes]
            self.tensor_dummy = self.torch.from_numpy(self.dummy_row)
            self.tensor_dtype = self.tensor_dummy.dtype

    def __enter__(self) -> Workbench:
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.shutdown()
        self.collator.clear()
        self._reused = self._wide = None

    def fresh_tensor(self) -> Any:
        """Return an uninitialised tensor from torch's allocator, as the usual collations make it."""
        return self.torch.empty(self.batch.result_shape, dtype=self.tensor_dtype)

    def huge_tensor(self) -> Any:
        """Return an uninitialised tensor over NumPy's memory, which asks for huge pages."""
        return self.torch.from_numpy(np.empty(self.batch.result_shape, self.batch.shape.dtype))

    def reused(self) -> Any:
        """Return the one buffer that all arms of reused memory share: a tensor, without torch an array."""
        if self._reused is None:
            array = None if self.torch else np.empty(self.batch.result_shape, self.batch.shape.dtype)
            self._reused = self.fresh_tensor() if array is None else array
        return self._reused

    def collate(self, threads: int, path: PathName) -> NDArray[Any]:
        """Return our rectangle, on a forced path."""
        policy = replace(DEFAULT_POLICY, path=path)
        return collate_routes(self.batch.routes, self.batch.lengths, num_threads=threads, _policy=policy).array

    def collate_as_users_do(self, **options: Any) -> NDArray[Any]:
        """Return our rectangle, nothing forced."""
        return collate_routes(self.batch.routes, self.batch.lengths, **options).array

    def recycle(self, threads: int, **options: Any) -> NDArray[Any]:
        """Return our rectangle in recycled memory: the previous one must be gone."""
        return self.collator.collate_routes(self.batch.routes, self.batch.lengths, num_threads=threads, **options).array

    def assign(self, dtype: str) -> Any:
        """Return the rectangle in a wider dtype, by NumPy's assignment into a buffer that is used again."""
        if self._wide is None or self._wide.dtype != dtype:
            self._wide = np.empty(self.batch.result_shape, dtype)
        return self.slices_into(self._wide)

    def slices_into(self, out: NDArray[Any]) -> NDArray[Any]:
        """Write the rectangle to ``out`` in three slice assignments a trajectory; a dummy block lies ready."""
        block = self.dummy_block
        for index, (part, begin) in enumerate(zip(self.batch.routes, self.begins, strict=True)):
            end = begin + len(part)
            out[index, :begin] = block[:begin]
            out[index, begin:end] = part
            out[index, end:] = block[: self.batch.width - end]
        return out


_PLAIN: Final = replace(DEFAULT_POLICY, stream_from=None)


def _original_prefill(work: Workbench, out: Any) -> Any:
    """Prefill everything with dummies; scan and cast every sample again; overwrite."""
    out[...] = work.tensor_dummy
    for index, (tensor, begin) in enumerate(zip(work.tensors, work.begins, strict=True)):
        if int(tensor.min()) < 0 or int(tensor.max()) >= work.batch.shape.experts:
            raise ValueError(f"sample {index} has ids out of range")
        sample = tensor.to(work.tensor_dtype)
        out[index, begin : begin + len(sample)] = sample
    return out


def _write_one(work: Workbench, out: Any, index: int) -> None:
    tensor, begin = work.tensors[index], work.begins[index]
    out[index, :begin] = work.tensor_dummy
    out[index, begin : begin + len(tensor)] = tensor
    out[index, begin + len(tensor) :] = work.tensor_dummy


def _single_write(work: Workbench, out: Any) -> Any:
    """Write pad, routes and tail of every trajectory once."""
    for index in range(len(work.tensors)):
        _write_one(work, out, index)
    return out


def _single_write_pool(work: Workbench, out: Any) -> Any:
    """Do the same with one job a trajectory on a pool of two threads that outlives the call."""
    for _ in work.pool.map(lambda index: _write_one(work, out, index), range(len(work.tensors))):
        pass
    return out


def _bare_slices(work: Workbench) -> NDArray[Any]:
    """Write fresh memory in slice assignments and do nothing else: no check, no mask."""
    return work.slices_into(np.empty(work.batch.result_shape, work.batch.shape.dtype))


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to make the rectangle. ``cold``: into pages that were never touched; ``ours``: a call of this library."""

    name: str
    label: str
    run: Callable[[Workbench], Any]
    threads: int = 1
    cold: bool = True
    ours: bool = False
    needs: Need | None = "torch"


def _ours(name: str, label: str, run: Callable[[Workbench], Any], threads: int, needs: Need | None, cold: bool) -> Arm:
    return Arm(name, label, run, threads, cold, ours=True, needs=needs)


ARMS: Final = {
    arm.name: arm
    for arm in (
        Arm("prefill", "original prefill", lambda work: _original_prefill(work, work.fresh_tensor())),
        Arm("single", "single write", lambda work: _single_write(work, work.fresh_tensor())),
        Arm("single_huge", "single write, huge pages", lambda work: _single_write(work, work.huge_tensor())),
        Arm("pool_2", "single write, pool of 2", lambda work: _single_write_pool(work, work.fresh_tensor()), 2),
        Arm("bare", "bare NumPy slices", _bare_slices, needs=None),
        _ours("slices_1", "NumPy fallback", lambda work: work.collate(1, "slices"), 1, None, True),
        _ours("slices_2", "NumPy fallback", lambda work: work.collate(2, "slices"), 2, None, True),
        _ours("serial", "collate_routes, serial twin", lambda work: work.collate(1, "serial"), 1, "numba", True),
        _ours("parallel_1", "collate_routes, prange", lambda work: work.collate(1, "parallel"), 1, "numba", True),
        _ours("parallel_2", "collate_routes, prange", lambda work: work.collate(2, "parallel"), 2, "numba", True),
        _ours("default", "collate_routes", lambda work: work.collate_as_users_do(), 0, None, True),
        Arm("prefill_reused", "original prefill, reused", lambda work: _original_prefill(work, work.reused()),
            cold=False),
        Arm("single_reused", "single write, reused", lambda work: _single_write(work, work.reused()), cold=False),
        Arm("pool_2_reused", "pool of 2, reused", lambda work: _single_write_pool(work, work.reused()), 2, cold=False),
        _ours("out_2", "collate_routes(out=)", lambda work: work.collate_as_users_do(num_threads=2, out=work.reused()),
              2, None, False),
        _ours("recycled_1", "RouteCollator", lambda work: work.recycle(1), 1, None, False),
        _ours("recycled_2", "RouteCollator", lambda work: work.recycle(2), 2, None, False),
        _ours("plain_1", "RouteCollator, plain stores", lambda work: work.recycle(1, _policy=_PLAIN), 1, None, False),
        _ours("plain_2", "RouteCollator, plain stores", lambda work: work.recycle(2, _policy=_PLAIN), 2, None, False),
    )
}  # fmt: skip


def widening_arms(dtype: str) -> list[Arm]:
    """Return the arms that widen to ``dtype``, all into memory that is used again: held against each other alone."""

    def ours(name: str, threads: int, policy: Policy) -> Arm:
        label = f"RouteCollator, {dtype}{', plain stores' if policy is _PLAIN else ''}"
        run = functools.partial(Workbench.recycle, threads=threads, dtype=dtype, _policy=policy)
        return _ours(name, label, run, threads, None, False)

    return _present([
        Arm("assign", f"NumPy's assignment to {dtype}", lambda work: work.assign(dtype), cold=False, needs=None),
        ours("recycled_1", 1, DEFAULT_POLICY),
        ours("recycled_2", 2, DEFAULT_POLICY),
        ours("plain_1", 1, _PLAIN),
        ours("plain_2", 2, _PLAIN),
    ])  # fmt: skip


def _present(arms: Iterable[Arm]) -> list[Arm]:
    present = {None: True, "torch": has_torch(), "numba": kernels() is not None}
    return [arm for arm in arms if present[arm.needs]]


def available(names: Iterable[str] | None = None) -> list[Arm]:
    """Return the arms, or those named, that can run here: torch and a working Numba are needed by some."""
    return _present(ARMS.values() if names is None else [ARMS[name] for name in names])


def check_equal(work: Workbench, arms: Iterable[Arm]) -> Iterator[Arm]:
    """Run every arm once and yield it; AssertionError unless all give the rectangle that the first one gives.

    Compared one trajectory at a time, so that no third array of the batch's size exists.
    """
    expected: NDArray[Any] | None = None
    first = ""
    for arm in arms:
        result = np.asarray(arm.run(work))
        if expected is None:
            expected, first = (result if arm.cold else result.copy()), arm.name
        if result.shape != expected.shape or result.dtype != expected.dtype:
            raise AssertionError(f"{arm.name} gives {result.shape} {result.dtype}, {first} {expected.shape}")
        for index in range(len(expected)):
            if not np.array_equal(result[index], expected[index]):
                raise AssertionError(f"{arm.name} differs from {first} in trajectory {index}")
        del result
        yield arm
