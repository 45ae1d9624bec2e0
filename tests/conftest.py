"""One list of the skips that are allowed; any other one fails the run."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings
from support import examples

# A suite that draws other examples in each run is green or red by luck; `make explore` looks for what it has not seen.
settings.register_profile("r3numba", derandomize="R3NUMBA_EXPLORE" not in os.environ, max_examples=examples(100))
settings.load_profile("r3numba")

#: Each reason begins with one of these: what a lane lacks, and why the test cannot run there.
ALLOWED_SKIPS = {
    "needs torch": "lanes without torch: the core must work there, tensors cannot exist",
    "needs Numba": "lanes without Numba: nothing to compile, fork or launch",
    "needs streaming stores": "processors that are not x86-64, kernels that are not compiled: plain stores serve there",
    "needs megatron-core": "lanes without the guard's extra: the real TransformerConfig",
    "needs omegaconf": "lanes without the guard's extra: the real OmegaConf node",
    "needs the client extra": "lanes without the client extra",
    "needs the cli extra": "lanes without rich and matplotlib",
    "needs asv": "lanes without the benchmark group",
    "needs a tbb library that Numba finds": "the layer loads only where the library is on the loader's path",
    "needs root and a writable cgroup v1": "containers that may not make a control group",
}

#: The main lane has torch, Numba and the extras, so that only these may be missing there.
_MAIN_MAY_SKIP = os.environ.get("R3NUMBA_MAIN_LANE", "")
_unlisted: list[str] = []


def pytest_runtest_logreport(report):
    if report.skipped and not hasattr(report, "wasxfail"):
        _check(report.nodeid, report.longrepr)


def pytest_collectreport(report):
    if report.skipped:
        _check(report.nodeid, report.longrepr)


def _check(nodeid, longrepr):
    reason = str(longrepr[2] if isinstance(longrepr, tuple) else longrepr).removeprefix("Skipped: ")
    allowed = tuple(ALLOWED_SKIPS)
    if _MAIN_MAY_SKIP:
        allowed = tuple(_MAIN_MAY_SKIP.split("|"))
    if not reason.startswith(allowed):
        _unlisted.append(f"{nodeid}: {reason}")


def pytest_sessionfinish(session, exitstatus):
    if _unlisted and exitstatus == 0:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter):
    for line in _unlisted:
        terminalreporter.write_line(f"skip that is not on the list: {line}", red=True)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Tests see the variables that their lane sets on purpose, and no user's thread counts or forced paths."""
    for name in ("R3NUMBA_NUM_THREADS", "R3NUMBA_MAX_THREADS", "R3NUMBA_RESERVED_CPUS", "R3NUMBA_POLICY",
                 "R3NUMBA_STREAMING"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
