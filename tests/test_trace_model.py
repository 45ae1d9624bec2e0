"""Random call sequences on traces against the naive model of ``trace_model.py``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import trace_model

from r3numba import _rows

SEED = 20261130
SOAK = Path(__file__).resolve().parent.parent / "scripts" / "soak_trace.py"


@pytest.mark.parametrize("block", range(10))
def test_random_call_sequences_agree_with_the_model(block):
    for index in range(block * 200, (block + 1) * 200):
        trace_model.drive(np.random.default_rng([SEED, index]))


def test_random_call_sequences_without_the_c_api(monkeypatch):
    monkeypatch.setattr(_rows, "resize", _rows._resize_and_fill)
    for index in range(300):
        trace_model.drive(np.random.default_rng([SEED, index]))


def test_the_sequences_reach_every_outcome(monkeypatch):
    """A driver that never rewinds, or never refuses, would agree with anything."""
    seen = {"appended": 0, "rewound": 0, "no token": 0, "no routes": 0, "refused": 0, "uncovered": 0, "parts": 0}
    record, finalize = trace_model.RoutesModel.record, trace_model.RoutesModel.finalize
    gather = _rows.RowStore.gather

    def watch_record(self, **call):
        faults, result = record(self, **call)
        if faults:
            seen["refused"] += 1
        elif result[2]:
            seen[result[2]] += 1
        else:
            seen["appended"] += result[0] > 0
            seen["rewound"] += result[1] > 0
        return faults, result

    def watch_finalize(self, *call):
        faults = finalize(self, *call)
        seen["uncovered"] += not faults and len(self.uncovered) > 0
        return faults

    def watch_gather(self, count):
        seen["parts"] += len(self._state.frozen) > 1
        return gather(self, count)

    monkeypatch.setattr(trace_model.RoutesModel, "record", watch_record)
    monkeypatch.setattr(trace_model.RoutesModel, "finalize", watch_finalize)
    monkeypatch.setattr(_rows.RowStore, "gather", watch_gather)
    for index in range(300):
        trace_model.drive(np.random.default_rng([SEED, index]))
    assert min(seen.values()) > 20, seen


def test_the_soak_runs_the_same_sequences():
    spec = importlib.util.spec_from_file_location("soak_trace", SOAK)
    soak_trace = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(soak_trace)
    for index in range(20):
        soak_trace.check_case(SEED, index)
