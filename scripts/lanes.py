"""Run the test lanes: each in the environment that it needs, made here when it is missing. Used by ``make test``.

python scripts/lanes.py            all lanes
python scripts/lanes.py main bare  some of them
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEST = ("pytest>=8", "hypothesis>=6.100")
MAIN = (
    *TEST, "numba>=0.60", "torch==2.13.0", "httpx>=0.27", "pybase64>=1.4", "safetensors>=0.4",
    "omegaconf>=2.3", "megatron-core==0.16.1", "rich>=13", "matplotlib>=3.8",
    "asv>=0.6.4", "virtualenv", "tbb", "ruff==0.17.6", "mypy==2.4.1",
)  # fmt: skip
EXECUTOR = "tests/test_executor.py"


@dataclass(frozen=True)
class Lane:
    """One run of pytest: in which environment, over what, and with which variables."""

    name: str
    environment: str
    tests: tuple[str, ...] = ("tests",)
    variables: dict[str, str] = field(default_factory=dict)


#: name: (python, requirements). The directory is .venv for main and .venv-NAME for the others.
ENVIRONMENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "main": ("3.11", MAIN),
    "bare": ("3.11", (*TEST, "numpy>=1.26")),
    "python3.10": ("3.10", (*TEST, "numba>=0.60")),
    "python3.12": ("3.12", (*TEST, "numba>=0.60")),
    "python3.13": ("3.13", (*TEST, "numba>=0.60")),
}
#: What a lane on another Python proves: the core. The processes' cases need torch or are slow, and ran on main.
CORE = (EXECUTOR, "tests/test_topology.py", "tests/test_routes.py", "tests/test_bad_input.py", "tests/test_batch.py",
        "tests/test_audit.py", "tests/test_wire.py", "tests/test_wire_refusals.py", "tests/test_trace.py")  # fmt: skip
#: The same, and the intrinsics that another Numba may build otherwise.
COMPILED = (*CORE, "tests/test_lines.py")

LANES = (
    Lane("main", "main", ("tests", "--doctest-modules", "r3numba")),
    Lane("numpy backend", "main", CORE, {"R3NUMBA_BACKEND": "numpy"}),
    Lane(
        "without JIT",
        "main",
        (EXECUTOR, "tests/test_audit.py", "-m", "not large"),
        {"NUMBA_DISABLE_JIT": "1", "R3NUMBA_BACKEND": "numba"},
    ),
    Lane("bounds checked", "main", (EXECUTOR, "-k", "serial or any_batch"), {"NUMBA_BOUNDSCHECK": "1"}),
    Lane("workqueue", "main", (EXECUTOR,), {"NUMBA_THREADING_LAYER": "workqueue"}),
    Lane("bare", "bare", ("tests",)),
    Lane("python3.10", "python3.10", COMPILED),
    Lane("python3.12", "python3.12", COMPILED),
    Lane("python3.13", "python3.13", COMPILED),
)
#: Skips that the main lane may have; everything else in conftest's list is for the other lanes.
MAIN_MAY_SKIP = ("needs a tbb library", "needs root and a writable cgroup v1")


def find_python(version: str) -> str | None:
    """Return a command of that Python, from PATH or from pyenv, or None where there is none."""
    if sys.version_info[:2] == tuple(int(part) for part in version.split(".")):
        return sys.executable
    found = shutil.which(f"python{version}")
    if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
        return found
    if shutil.which("pyenv"):
        listed = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True).stdout.split()
        for full in reversed([name for name in listed if name.startswith(version + ".")]):
            prefix = subprocess.run(["pyenv", "prefix", full], capture_output=True, text=True).stdout.strip()
            if prefix:
                return str(Path(prefix) / "bin" / "python")
    return None


def prepare(name: str) -> Path | None:
    """Return the interpreter of an environment, made or brought up to date; None where its Python is missing."""
    version, requirements = ENVIRONMENTS[name]
    directory = ROOT / (".venv" if name == "main" else f".venv-{name}")
    python, stamp = directory / "bin" / "python", directory / ".requirements"
    wanted = hashlib.sha256(repr((version, requirements)).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    base = find_python(version)
    if base is None:
        return None
    shutil.rmtree(directory, ignore_errors=True)
    subprocess.run([base, "-m", "venv", str(directory)], check=True)
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", "constraints.txt", *requirements], check=True, cwd=ROOT)
    subprocess.run([*pip, "--no-deps", "-e", "."], check=True, cwd=ROOT)
    stamp.write_text(wanted)
    return python


def run_lane(lane: Lane) -> tuple[str, float]:
    """Return the verdict of a lane and its seconds."""
    begin = time.monotonic()
    python = prepare(lane.environment)
    if python is None:
        return f"not run: no Python {ENVIRONMENTS[lane.environment][0]} here", time.monotonic() - begin
    print(f"\n=== {lane.name}: {' '.join(lane.tests)} {lane.variables or ''}", flush=True)
    environment = {**os.environ, **lane.variables}
    if lane.environment == "main":
        environment["R3NUMBA_MAIN_LANE"] = "|".join(MAIN_MAY_SKIP)
    command = [str(python), "-m", "pytest", "-q", "--durations=5", *lane.tests]
    code = subprocess.run(command, cwd=ROOT, env=environment).returncode
    return ("passed" if code == 0 else f"FAILED ({code})"), time.monotonic() - begin


def main(names: list[str]) -> int:
    """Run the lanes named (all by default), print a table, and return 1 if one failed."""
    unknown = set(names) - {lane.name for lane in LANES}
    if unknown:
        print(f"unknown lanes {sorted(unknown)}, need some of {[lane.name for lane in LANES]}")
        return 2
    results = {lane.name: run_lane(lane) for lane in LANES if not names or lane.name in names}
    print("\nlane             seconds  verdict")
    for name, (verdict, seconds) in results.items():
        print(f"{name:16} {seconds:7.0f}  {verdict}")
    return int(any(verdict.startswith("FAILED") for verdict, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
