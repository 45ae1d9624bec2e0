"""The executor: carries out any plan on the path that the fixed policy names, and remembers what ran.

=========  ==================================================  ============================================
path       what runs                                           when
=========  ==================================================  ============================================
serial     the nogil twin, in the calling thread               one thread
parallel   the prange kernel                                   more threads on the tbb and omp layers
pool       the twin over a small thread pool of our own        more threads on workqueue, in a forked child, or for
                                                               what has no prange kernel (audits, narrowing)
slices     NumPy slices                                        no working Numba
streaming  a twin with streaming stores, over our pool         a large result in recycled or caller-owned memory
=========  ==================================================  ============================================

workqueue aborts the process when two Python threads launch at once (numba#8563, #9288), whoever launched the other
one, so it is never launched at all; GNU OpenMP dies in a forked child (fast-array-utils#179).
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import os
import threading
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _slices
from ._checks import integer
from ._plan import Plan, cut_pieces, dummy_bytes
from ._policy import DEFAULT_POLICY, PathName, Policy
from .topology import (
    MAX_THREADS_VARIABLE,
    NUM_THREADS_VARIABLE,
    RESERVED_CPUS_VARIABLE,
    permitted_cpus_cached,
    plan_threads,
)

_BACKENDS = ("auto", "numba", "numpy")
_NEVER = 1 << 62  # bytes that no run has
_THREAD_VARIABLES = (NUM_THREADS_VARIABLE, MAX_THREADS_VARIABLE, RESERVED_CPUS_VARIABLE)


@dataclass(slots=True)
class _LastCall(threading.local):
    backend: str = "none"
    path: str = "none"
    threads: int = 0


_last = _LastCall()
_backend_lock = threading.Lock()
_kernels: types.ModuleType | None = None
_kernels_failed = False


def backend_info() -> Mapping[str, Any]:
    """Return what this thread's last call ran on.

    Returns
    -------
    mapping
        ``backend`` ("numba" or "numpy"), ``path`` ("parallel", "pool", "serial", "slices" or "streaming"), ``layer``
        (Numba's threading layer, "none" while nothing has started one) and ``threads``; all "none" and 0 before the
        first call.

    Notes
    -----
    Thread-safe: each thread sees its own calls. Nothing is imported or started by asking.

    Examples
    --------
    >>> sorted(backend_info())
    ['backend', 'layer', 'path', 'threads']
    """
    layer = _kernels.runtime.layer_name() if _last.backend == "numba" and _kernels else None
    return types.MappingProxyType(
        {"backend": _last.backend, "path": _last.path, "layer": layer or "none", "threads": _last.threads}
    )


def kernels() -> types.ModuleType | None:
    """Return the module of kernels, or None where the NumPy fallback has to serve.

    ``R3NUMBA_BACKEND``: ``auto`` (Numba where it imports, one warning where it does not), ``numba`` (its absence is an
    ImportError) or ``numpy``.
    """
    global _kernels, _kernels_failed
    wanted = os.environ.get("R3NUMBA_BACKEND", "") or "auto"
    if wanted not in _BACKENDS:
        raise ValueError(f"R3NUMBA_BACKEND is {wanted!r}, need one of {', '.join(_BACKENDS)}")
    if wanted == "numpy":
        return None
    if _kernels is None and (wanted == "numba" or not _kernels_failed):
        with _backend_lock:
            if _kernels is None:
                try:
                    from . import _kernels as module
                except Exception as error:  # a broken Numba fails in many ways; every one means "not here"
                    if wanted == "numba":
                        raise ImportError(f"R3NUMBA_BACKEND=numba, but Numba does not import: {error}") from error
                    if not _kernels_failed:
                        _kernels_failed = True
                        warnings.warn(
                            f"r3numba runs without Numba, on its NumPy fallback ({type(error).__name__}: {error})",
                            RuntimeWarning,
                            stacklevel=2,
                        )
                    return None
                _kernels = module
    if _kernels is not None and _kernels.runtime.JIT_DISABLED and wanted == "auto":
        return None  # plain-Python kernels are for tests; a forced path or R3NUMBA_BACKEND=numba asks for them
    return _kernels


def compiled() -> bool:
    """Say whether the kernels here are compiled ones."""
    module = kernels()
    return module is not None and not module.runtime.JIT_DISABLED


def execute(
    plan: Plan, out: NDArray[Any], mask: NDArray[np.bool_], *, fresh: bool, num_threads: int | None, policy: Policy
) -> None:
    """Write ``out`` (the flat destination) and ``mask`` (bool, one a destination row), every cell once.

    ``fresh`` says that the pages were never touched, which moves the serial threshold. The GIL is released while
    bytes move. Thread-safe as long as no two calls share a destination.
    """
    threads = thread_count(out.nbytes, fresh=fresh, num_threads=num_threads, policy=policy)
    pieces, arguments = cut_pieces(plan, out, threads, policy.piece_align), move_arguments(plan, out, mask)

    def slices(part: NDArray[np.int64]) -> None:
        _slices.move_pieces(plan, part, out, mask)

    if streams(out.nbytes, fresh=fresh, policy=policy):
        run(
            pieces, threads, policy, twin="stream_serial", home="_streaming", streamed=True, slices=slices,
            arguments=(policy.stream_run_from, *arguments),
        )  # fmt: skip
    else:
        run(
            pieces, threads, policy, twin="move_serial", kernel="move_parallel", arguments=arguments, slices=slices
        )  # fmt: skip


def move_arguments(plan: Plan, out: NDArray[Any], mask: NDArray[np.bool_]) -> tuple[Any, ...]:
    """Return what the kernels that move take after their pieces: bytes and strides in bytes, whatever the dtype."""
    size = plan.dtype.itemsize
    dummies = dummy_bytes(plan.sources.layers, plan.sources.topk, plan.dtype)
    strides = (plan.row_stride * size, plan.layer_stride * size, size)
    return (out.view(np.uint8), mask, dummies, *source_arguments(plan), *strides)


def source_arguments(plan: Plan) -> tuple[Any, ...]:
    """Return where a plan's sources lie and land, as every kernel takes it."""
    sources = plan.sources
    return (
        plan.bounds, plan.first, sources.address, sources.rows, sources.itemsize, sources.strides, plan.missing,
        plan.layer_of, sources.topk,
    )  # fmt: skip


def run(
    pieces: NDArray[np.int64],
    threads: int,
    policy: Policy,
    *,
    twin: str,
    arguments: tuple[Any, ...],
    slices: Callable[[NDArray[np.int64]], None],
    kernel: str | None = None,
    home: str = "_kernels",
    streamed: bool = False,
) -> None:
    """Do the work items ``pieces`` on the path of the policy, on at most ``threads`` threads, and record what ran.

    ``twin`` and ``kernel`` name functions of the module ``home`` that take ``(pieces, *arguments)``; without a kernel
    the twin runs over our pool, ``streamed`` or not, and no layer is started. ``slices`` takes the pieces alone.
    """
    module = kernels()
    if streamed:
        path: PathName = "streaming"
    else:
        path, threads = _choose(module, threads, policy, layer=kernel is not None)
    if path == "slices":
        _over_pool(slices, pieces, threads)
    else:
        module = module or _forced_kernels(policy.path)
        source = module if home == "_kernels" else importlib.import_module(f"{__package__}.{home}")
        if path == "parallel" and kernel is not None:
            with module.runtime.thread_mask(threads):
                getattr(source, kernel)(pieces, *arguments)
        elif path == "serial":
            getattr(source, twin)(pieces, *arguments)
        else:
            serial = getattr(source, twin)
            _over_pool(lambda part: serial(part, *arguments), pieces, threads)
    _remember("numpy" if path == "slices" else "numba", path, threads)


def _remember(backend: str, path: PathName, threads: int) -> None:
    _last.backend, _last.path, _last.threads = backend, path, threads


def stores_for(streamed: bool, policy: Policy) -> int | None:
    """Return the ``stores`` of a kernel that can do both: None where streaming is off or absent, else a length."""
    if policy.stream_from is None or not _streaming_here():
        return None
    return policy.stream_run_from if streamed else _NEVER


def streams(nbytes: int, *, fresh: bool, policy: Policy) -> bool:
    """Say whether a move of ``nbytes`` gets streaming stores: large, into mapped pages, on a host that has them.

    A forced path other than ``streaming`` has plain stores.
    """
    if policy.stream_from is None or (policy.path is None and (fresh or nbytes < policy.stream_from)):
        return False
    return policy.path in (None, "streaming") and _streaming_here()


def _streaming_here() -> bool:
    """Say whether this process has kernels, and streaming stores for them."""
    return kernels() is not None and _has_streaming()


@functools.lru_cache(maxsize=1)
def _has_streaming() -> bool:
    try:
        importlib.import_module(f"{__package__}._streaming")
    except Exception:  # another processor, another LLVM: every failure means "not here", and plain stores serve
        return False
    return True


def thread_count(nbytes: int, *, fresh: bool, num_threads: int | None, policy: Policy) -> int:
    """Return how many threads a result of ``nbytes`` gets; quotas are read only where more than one may run."""
    if num_threads is not None:
        return 1 if num_threads == 1 else min(num_threads, permitted_cpus_cached())
    if not any(map(os.environ.get, _THREAD_VARIABLES)):
        below = policy.serial_below_fresh if fresh else policy.serial_below_recycled
        if nbytes < below:
            return 1
        slices = policy.path == "slices" or (policy.path is None and kernels() is None)
        if slices and nbytes < policy.slices_serial_below:
            return 1
    return plan_threads(nbytes, permitted_cpus_cached(), fresh=fresh, cap=policy.thread_cap, _policy=policy)


def checked_num_threads(num_threads: object) -> int | None:
    """Return ``num_threads`` as None or an int of at least 1."""
    return None if num_threads is None else integer("num_threads", num_threads, 1)


def would_run(nbytes: int, *, fresh: bool, policy: Policy) -> tuple[PathName, int]:
    """Return path and threads of a call with a result of ``nbytes``, starting the layer as the call would."""
    threads = thread_count(nbytes, fresh=fresh, num_threads=None, policy=policy)
    if streams(nbytes, fresh=fresh, policy=policy):
        return "streaming", threads
    return _choose(kernels(), threads, policy, layer=True)


def _choose(module: types.ModuleType | None, threads: int, policy: Policy, *, layer: bool) -> tuple[PathName, int]:
    """Return the path for ``threads`` threads, by the policy at the top of this file, and how many of them it uses.

    Without ``layer`` Numba's threads are no choice.
    """
    if policy.path == "slices" or (module is None and policy.path is None):
        return "slices", threads
    if policy.path == "serial" or (threads == 1 and policy.path in (None, "streaming")):
        return "serial", 1
    if policy.path == "pool" or not layer:
        return "pool", threads
    runtime = (module or _forced_kernels(policy.path)).runtime
    if runtime.in_forked_child() and runtime.layer_name() != "tbb":
        return "pool", threads
    if runtime.start_layer(_probe) == "workqueue":
        return "pool", threads
    return "parallel", min(threads, runtime.thread_limit())


def _forced_kernels(path: PathName | None) -> types.ModuleType:
    """Return the kernels that a forced path needs although the backend is NumPy (JIT disabled), or say why not."""
    if _kernels is None or os.environ.get("R3NUMBA_BACKEND") == "numpy":
        raise ValueError(f"the path {path!r} is forced and needs Numba, but the backend here is NumPy")
    return _kernels


def _probe() -> None:
    assert _kernels is not None
    _kernels.compile_probe()


# --- Our own pool -------------------------------------------------------------------------------------------------

_pool: concurrent.futures.ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()


def _after_fork_in_child() -> None:
    """Forget the parent's threads, and locks that one of them may have held: a child has neither."""
    global _pool, _pool_lock, _backend_lock
    _pool = None
    _pool_lock = threading.Lock()
    _backend_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _over_pool(run: Callable[[NDArray[np.int64]], None], pieces: NDArray[np.int64], threads: int) -> None:
    """Run a contiguous share of ``pieces`` in each of ``threads`` threads, the calling one among them.

    Returns, or raises a worker's exception, only after every worker has finished: they write into the caller's memory.
    """
    shares = [share for share in np.array_split(pieces, threads) if len(share)]
    futures: list[concurrent.futures.Future[None]] = []
    try:
        while len(shares) > 1:
            try:
                futures.append(_workers().submit(run, shares[-1]))
            except RuntimeError:  # the interpreter is shutting down and starts no more threads
                break
            shares.pop()
        for share in shares:
            run(share)
    finally:
        concurrent.futures.wait(futures)
    for future in futures:
        future.result()


def _workers() -> concurrent.futures.ThreadPoolExecutor:
    global _pool
    with _pool_lock:
        if _pool is None:
            # Threads start on demand, so the bound costs nothing; a call asks for at most permitted_cpus of them.
            _pool = concurrent.futures.ThreadPoolExecutor(
                max_workers=max(DEFAULT_POLICY.thread_cap, os.cpu_count() or 1), thread_name_prefix="r3numba"
            )
        return _pool
