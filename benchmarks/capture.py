"""Decoding, traces and the audit: the path before a batch exists."""

from __future__ import annotations

import functools

from . import common

NAMES = [
    "base64", "decode_npy", "base64_raw", "decode_raw", "three_passes", "compact",
    "copy", "trace_1", "trace_32", "trace_512", "max", "audit",
    "fresh", "fresh_audit", "recycled", "recycled_audit",
]  # fmt: skip


@functools.lru_cache(maxsize=1)
def arms():
    capture = common.bench_module("capture")
    found = {arm.name: arm for arm in capture.capture_arms(1_024 if common.SMALL else capture.TOKENS)}
    for arm in found.values():
        arm.run()
    return found


class Capture:
    """One call a sample."""

    params = (common.some(NAMES, ["decode_npy", "trace_32", "fresh_audit"]),)
    param_names = ("arm",)
    number = 1
    repeat = (1, 2, 1.0) if common.SMALL else (3, 9, 20.0)
    warmup_time = 0.0
    result = None

    def setup(self, name):
        if name not in arms():
            raise NotImplementedError("an earlier commit")
        self.run = arms()[name].run

    def teardown(self, name):
        self.result = None

    def time_capture(self, name):
        self.result = self.run()
