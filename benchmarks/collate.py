"""Time and peak memory of one collation, by arm, threads, spread and size."""

from __future__ import annotations

from . import common


class _OneCall:
    """One cold or warm call a sample, its memory freed outside of the timed part."""

    number = 1
    rounds = 1
    repeat = (1, 2, 1.0) if common.SMALL else (3, 9, 30.0)
    warmup_time = 0.0
    result = None

    def _prepare(self, name, work):
        self.arm = common.arm(name)
        self.work = work
        common.warmed(name, work)
        if work.torch is not None:
            work.torch.set_num_threads(1)
        if self.arm.cold:
            common.touch_and_free(work.batch.nbytes, self.arm.threads)

    def teardown(self, *params):
        self.result = None

    def _run(self):
        self.result = self.arm.run(self.work)


class Ours(_OneCall):
    """Our call: into fresh pages, into recycled ones (streamed, and with plain stores), and the NumPy fallback."""

    params = (
        common.some([1, 2], [2]),
        common.some(["parallel", "recycled", "plain", "slices"], ["parallel", "recycled"]),
        common.SPREADS,
        common.SIZES,
    )
    param_names = ("threads", "arm", "spread", "size")

    def setup(self, threads, arm, spread, size):
        if spread != "typical" and size != common.SIZES[0]:
            raise NotImplementedError("the other spreads at one size")
        self._prepare(f"{arm}_{threads}", common.workbench("48x8", spread, size))

    def time_collate(self, threads, arm, spread, size):
        self._run()


class Baselines(_OneCall):
    """What trainers write by hand, bare slices, and our serial twin beside them."""

    params = (
        common.some(["prefill", "single", "single_huge", "pool_2", "bare", "serial", "prefill_reused", "single_reused",
                     "pool_2_reused", "out_2"], ["single", "serial"]),
        ["typical"],
        common.SIZES,
    )  # fmt: skip
    param_names = ("arm", "spread", "size")

    def setup(self, arm, spread, size):
        self._prepare(arm, common.workbench("48x8", spread, size))

    def time_collate(self, arm, spread, size):
        self._run()


class Widening(_OneCall):
    """Uint8 routes to wider ids, in memory that is used again."""

    params = (
        common.some(["assign", "recycled_1", "recycled_2", "plain_1", "plain_2"], ["recycled_2"]),
        common.some(["int16", "int32"], ["int16"]),
        common.SIZES[:1],
    )
    param_names = ("arm", "dtype", "size")

    def setup(self, arm, dtype, size):
        module = common.bench_module("arms")
        if not hasattr(module, "widening_arms"):
            raise NotImplementedError("an earlier commit")
        self.work = common.workbench("48x8", "typical", size // (4 if dtype == "int32" else 2))
        found = {each.name: each for each in module.widening_arms(dtype)}
        self.arm = found[arm]
        self.arm.run(self.work)

    def time_collate(self, arm, dtype, size):
        self._run()


class Shapes(_OneCall):
    """Production shapes, and one huge trajectory among small ones."""

    params = (
        common.some([1, 2], [2]),
        common.some(["48x8", "58x8", "47x4", "60x8", "40x22"], ["40x22"]),
        common.some(["typical", "skewed"], ["skewed"]),
        common.SIZES[:1],
    )
    param_names = ("threads", "shape", "spread", "size")

    def setup(self, threads, shape, spread, size):
        self._prepare(f"parallel_{threads}", common.workbench(shape, spread, size))

    def time_collate(self, threads, shape, spread, size):
        self._run()


class Tiny:
    """10 KB to 2 MB, as users call it."""

    params = (common.some(["default", "single", "prefill", "bare"], ["default"]), common.TINY)
    param_names = ("arm", "batch")
    repeat = (1, 2, 1.0) if common.SMALL else (3, 10, 10.0)

    def setup(self, arm, batch):
        self.work = common.tiny_workbench(batch)
        self.arm = common.arm(arm)
        common.warmed(arm, self.work)
        if self.work.torch is not None:
            self.work.torch.set_num_threads(1)

    def time_collate(self, arm, batch):
        self.arm.run(self.work)


class PeakMemory:
    """Resident memory of the process; ``nothing`` is what batch and libraries take, the others less it the call."""

    params = (common.some(["nothing", "default", "single", "prefill"], ["default"]), common.SIZES[:1])
    param_names = ("arm", "size")

    def setup(self, arm, size):
        self.work = common.workbench("48x8", "typical", size)
        self.arm = None if arm == "nothing" else common.arm(arm)
        common.warmed("default", common.tiny_workbench("4x7"))

    def peakmem_collate(self, arm, size):
        return None if self.arm is None else self.arm.run(self.work)
