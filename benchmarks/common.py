"""What the benchmarks share: sizes, and batches made once a process (asv calls ``setup`` before each sample)."""

from __future__ import annotations

import functools
import importlib
import os

SMALL = os.environ.get("R3NUMBA_ASV_SMALL") == "1"
#: Bytes of the results.
SIZES = [1_000_000] if SMALL else [100_000_000, 400_000_000]
SPREADS = ["typical"] if SMALL else ["typical", "uniform", "mild", "heavy"]
REPEAT = 1 if SMALL else 7


def some(values, small):
    """Return the values of a parameter; only the ``small`` ones in a smoke run, where each costs a process."""
    return small if SMALL else values


TINY = some(["4x7", "8x32", "16x64", "32x160", "256x20", "1024x5"], ["4x7"])


def bench_module(name):
    """Return a module of ``r3numba._bench``; a commit from before it has none."""
    try:
        return importlib.import_module(f"r3numba._bench.{name}")
    except ImportError as error:
        raise NotImplementedError(str(error)) from error


@functools.lru_cache(maxsize=1)
def workbench(shape, spread, nbytes):
    """Return a workbench over a seeded batch; ``spread`` may be "skewed"."""
    shapes, arms = bench_module("shapes"), bench_module("arms")
    if spread == "skewed":
        batch = shapes.make_skewed(shapes.SHAPES[shape], nbytes)
    else:
        batch = shapes.make_batch(shapes.SHAPES[shape], spread, nbytes)
    return arms.Workbench(batch)


@functools.lru_cache(maxsize=1)
def tiny_workbench(name):
    """Return a workbench over a tiny batch, "trajectories x tokens"."""
    shapes, arms = bench_module("shapes"), bench_module("arms")
    trajectories, tokens = (int(part) for part in name.split("x"))
    return arms.Workbench(shapes.batch_of(shapes.SHAPES["48x8"], [tokens] * trajectories, name))


def arm(name):
    """Return an arm that can run here, at a commit that has it."""
    module = bench_module("arms")
    found = module.available([name]) if name in module.ARMS else []
    if not found:
        raise NotImplementedError(f"{name} needs what is not installed here")
    return found[0]


@functools.cache
def warmed(name, work):
    """Call an arm once, so that nothing is compiled or started in a timed call."""
    module = bench_module("arms").kernels()
    if module is not None and module.runtime.in_forked_child():
        # A forked child gets another path (GNU OpenMP would die there): figures of it would be called prange's.
        raise RuntimeError("asv forks by default, which changes what runs: pass --launch-method spawn")
    arm(name).run(work)


def tasks(names, work):
    """Return the tasks of ``measure`` for some arms, each warm."""
    measure = bench_module("measure")
    made = []
    for name in names:
        warmed(name, work)
        chosen = arm(name)
        threads = {"threads": chosen.threads} if hasattr(measure.Task, "threads") else {}  # an earlier commit
        cold_bytes = work.batch.nbytes if chosen.cold else 0
        made.append(measure.Task(name, functools.partial(chosen.run, work), cold_bytes, **threads))
    return made


def touch_and_free(nbytes, threads):
    """Make the host back the memory of a cold sample, by as many threads as will use it."""
    measure = bench_module("measure")
    measure.touch_and_free(nbytes, *([threads] if hasattr(measure.Task, "threads") else []))  # an earlier commit


def figure(value, *timings):
    """Return ``value`` rounded, or NaN where one of the timings has no quiet repetition: asv then keeps no point."""
    return float("nan") if any(timing.noisy for timing in timings) and not SMALL else round(value, 4)
