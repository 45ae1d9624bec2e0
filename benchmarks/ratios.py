"""Ratios of arms that are interleaved in one process, so that a slow minute of the host slows both."""

from __future__ import annotations

from . import common


def _measured(names, work):
    return common.bench_module("measure").measure(common.tasks(names, work), common.REPEAT)


class Against:
    """How many times faster our call on two threads is than a baseline: cold, or both into memory in use."""

    params = (
        common.some(["single", "prefill", "single_huge", "pool_2", "bare", "slices_1", "slices_2", "serial",
                     "single_reused", "pool_2_reused", "plain_2"], ["single"]),
        common.SIZES,
    )  # fmt: skip
    param_names = ("baseline", "size")
    unit = "times faster"

    def setup(self, baseline, size):
        self.work = common.workbench("48x8", "typical", size)
        self.ours = "recycled_2" if baseline.endswith("_reused") or baseline.startswith("plain") else "parallel_2"
        common.arm(self.ours)
        common.arm(baseline)

    def track_ratio(self, baseline, size):
        timings = _measured([baseline, self.ours], self.work)
        slow, fast = timings[baseline], timings[self.ours]
        return common.figure(slow.median / fast.median, slow, fast)


class Scaling:
    """One thread's time over that of two, by spread."""

    params = (common.some([*common.SPREADS, "skewed"], ["skewed"]), common.SIZES[:1])
    param_names = ("spread", "size")
    unit = "times faster"

    def setup(self, spread, size):
        self.work = common.workbench("48x8", spread, size)
        common.arm("parallel_2")

    def track_two_threads(self, spread, size):
        timings = _measured(["serial", "parallel_2"], self.work)
        one, two = timings["serial"], timings["parallel_2"]
        return common.figure(one.median / two.median, one, two)


class ShareOfLimit:
    """The host's limit for the same mix of copied and filled bytes, over our time."""

    params = (common.some(["parallel_1", "parallel_2", "recycled_1", "recycled_2"], ["parallel_2"]), common.SIZES)
    param_names = ("arm", "size")
    unit = "share"

    def setup(self, arm, size):
        self.work = common.workbench("48x8", "typical", size)
        common.arm(arm)

    def track_share(self, arm, size):
        module, measure = common.bench_module("limit"), common.bench_module("measure")
        threads, batch = int(arm[-1]), self.work.batch
        memory = "fresh" if common.arm(arm).cold else "warm"
        with module.Limit(batch.copied_bytes, batch.nbytes - batch.copied_bytes) as limit:
            limits = [task for task in limit.tasks([threads]) if task.name.startswith(f"limit_{memory}")]
            for task in limits:
                task.run()
            timings = measure.measure([*common.tasks([arm], self.work), *limits], common.REPEAT)
        best = module.limit_of(timings, memory, threads)
        return common.figure(best.median / timings[arm].median, best, timings[arm])


class TinyOverhead:
    """Microseconds that a call of a tiny batch costs over three bare slice assignments a trajectory."""

    params = (common.TINY,)
    param_names = ("batch",)
    unit = "us"

    def setup(self, batch):
        self.work = common.tiny_workbench(batch)

    def track_over_bare_slices(self, batch):
        measure = common.bench_module("measure")
        tasks = [
            measure.Task(task.name, task.run, 0, measure.calls_for(task.run, 0.02))
            for task in common.tasks(["bare", "default"], self.work)
        ]
        timings = measure.measure(tasks, common.REPEAT)
        bare, ours = timings["bare"], timings["default"]
        return common.figure((ours.median - bare.median) * 1e6, bare, ours)
