"""Helpers of test_topology: fake ``/proc`` and cgroup trees, random ones with a naive oracle, and real v1 groups."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import strategies as st

REPOSITORY = Path(__file__).resolve().parent.parent
GIB = 1 << 30

#: What a file may hold when it sets no limit.
NO_QUOTA = [b"max 100000\n", b"", b"\n", b"not-a-quota 100000\n", b"200000\n", b"200000 0\n", b"200000 -5\n"]
NO_QUOTA += [b"-1 100000\n", b"-5 -5\n", b"0 100000\n", b"1_0 10\n", b"1.5 1\n", b"+1 1\n", b"200000 100000 7\n"]
NO_QUOTA += [
    b"\xff\xfe\x00\n",
    "\u0663 \u0661\n".encode(),
    b"9" * 5000 + b" 1\n",
    b"9" * 400 + b" 1\n",
    b"100000 max\n",
]
#: v1 keeps the period in a file of its own, so that one of these would be a quota there.
NO_QUOTA_V1 = {b"200000\n": b"-1\n"}


class Tree:
    """A fake root. Nothing in it refers to the real one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc/self").mkdir(parents=True, exist_ok=True)
        self._groups: list[str] = []
        self._mounts = ["21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw", "22 21 0:5 / /proc rw - proc proc rw"]

    def own(self, controllers: str, path: str) -> Tree:
        """State the process's group; no controllers means v2."""
        self._groups.append(f"{0 if not controllers else len(self._groups) + 1}:{controllers}:{path}")
        self.write("proc/self/cgroup", "\n".join(self._groups) + "\n")
        return self

    def mount(self, point: str, controllers: str = "", *, root: str = "/", source: str = "cgroup") -> Tree:
        """Add a line of mountinfo; `point` and `root` as the kernel escapes them."""
        kind = f"cgroup {source} rw,{controllers}" if controllers else f"cgroup2 {source} rw,nsdelegate"
        optional = " shared:9 master:3" if len(self._mounts) % 2 else ""
        self._mounts.append(f"{30 + len(self._mounts)} 21 0:26 {root} {point} rw,nosuid{optional} - {kind}")
        self.write("proc/self/mountinfo", "\n".join(self._mounts) + "\n")
        return self

    def write(self, path: str, content: str | bytes) -> Tree:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.fsencode(content))
        return self

    def quota_v1(self, directory: str, quota: int | str, period: int | str = 100000) -> Tree:
        self.write(f"{directory}/cpu.cfs_quota_us", f"{quota}\n")
        return self.write(f"{directory}/cpu.cfs_period_us", f"{period}\n")

    def memory(
        self, directory: str, limit: int | str, usage: int, inactive: int = 0, active: int = 0, *, v1: bool = False
    ) -> Tree:
        names = ("limit_in_bytes", "usage_in_bytes") if v1 else ("max", "current")
        self.write(f"{directory}/memory.{names[0]}", f"{limit}\n").write(f"{directory}/memory.{names[1]}", f"{usage}\n")
        # In v1 the plain figures leave out the descendants: here they are wrong on purpose.
        plain = f"inactive_file {1 if v1 else inactive}\nactive_file {1 if v1 else active}\n"
        total = f"total_inactive_file {inactive}\ntotal_active_file {active}\n" if v1 else "inactive_anon 77\nfile 99\n"
        return self.write(f"{directory}/memory.stat", f"anon 12345\n{plain}{total}")

    def host(self, available: int) -> Tree:
        text = f"MemTotal: 99999999 kB\nMemFree:  1 kB\nMemAvailable:   {available // 1024} kB\nHugePages_Total: 0\n"
        return self.write("proc/meminfo", text)


# ------------------------------------------------------------------------------------------------- random and oracle
@dataclass
class Level:
    """What one group says, as data: the oracle never looks at a file."""

    quota: tuple[int, int] | bytes  #: quota and period, or text that sets no limit
    memory: tuple[int, int, int, int] | None  #: limit, usage, inactive, active


@dataclass
class Hierarchy:
    unified: bool
    hidden: list[
        str
    ]  #: groups above the mount's root: the process's path begins with them, the mount does not show them
    names: list[str]  #: groups below the mount point
    levels: list[Level] = field(default_factory=list)  #: the mount point's first, then one for each name

    def build(self, tree: Tree) -> None:
        base = "sys/fs/cgroup/unified" if self.unified else "sys/fs/cgroup/all"
        controllers = "" if self.unified else "memory,cpu,cpuacct"
        hidden = "".join(f"/{name}" for name in self.hidden)
        tree.own(controllers, hidden + "".join(f"/{name}" for name in self.names) or "/")
        tree.mount(f"/{base}", controllers, root=hidden.replace(" ", r"\040") or "/")
        for depth, level in enumerate(self.levels):
            directory = "/".join([base, *self.names[:depth]])
            (tree.root / directory).mkdir(parents=True, exist_ok=True)
            if level.memory is not None:
                tree.memory(directory, *level.memory, v1=not self.unified)
            quota = level.quota if isinstance(level.quota, bytes) else b"%d %d\n" % level.quota
            if self.unified:
                tree.write(f"{directory}/cpu.max", quota)
            elif isinstance(level.quota, bytes):
                tree.quota_v1(directory, -1).write(f"{directory}/cpu.cfs_quota_us", NO_QUOTA_V1.get(quota, quota))
            else:
                tree.quota_v1(directory, *level.quota)


def oracle_quota(hierarchies: list[Hierarchy]) -> float | None:
    best: float | None = None
    for hierarchy in hierarchies:
        for level in hierarchy.levels:
            if not isinstance(level.quota, bytes) and (best is None or level.quota[0] / level.quota[1] < best):
                best = level.quota[0] / level.quota[1]
    return best


def oracle_memory(hierarchies: list[Hierarchy], host: int | None) -> int | None:
    best = host
    for hierarchy in hierarchies:
        for level in hierarchy.levels:
            if level.memory is not None:
                limit, usage, inactive, active = level.memory
                left = limit - (usage - inactive - active)
                left = 0 if left < 0 else left
                best = left if best is None or left < best else best
    return best


@st.composite
def _levels(draw: st.DrawFn) -> Level:
    quota = draw(st.one_of(st.sampled_from(NO_QUOTA), st.tuples(st.integers(1, 10**6), st.integers(1, 10**6))))
    memory = None
    if draw(st.booleans()):
        inactive, active = draw(st.integers(0, GIB)), draw(st.integers(0, GIB))
        memory = (draw(st.integers(0, 8 * GIB)), inactive + active + draw(st.integers(0, 4 * GIB)), inactive, active)
    return Level(quota, memory)


@st.composite
def hierarchies(draw: st.DrawFn) -> list[Hierarchy]:
    """Draw a v1, v2 or hybrid host, the process 0 to 4 groups below the mount, the mount's root 0 to 2 groups down."""
    names = st.sampled_from(["team", "job", "kubepods.slice", "a b", "x:y", "größe"])
    versions: list[bool] = draw(st.sampled_from([[True], [False], [True, False]]))
    made = []
    for unified in versions:
        hidden, below = draw(st.lists(names, max_size=2)), draw(st.lists(names, max_size=4))
        levels = draw(st.lists(_levels(), min_size=len(below) + 1, max_size=len(below) + 1))
        made.append(Hierarchy(unified, hidden, below, levels))
    return made


# ------------------------------------------------------------------------------------------------------- real groups
def run_python(code: str, **environment: str) -> str:
    """Run `code` in a fresh interpreter that finds the package; return what it printed."""
    command = [sys.executable, "-W", "error", "-c", code]
    surroundings = child_environment(**environment)
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def child_environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("R3NUMBA_")}
    return {**kept, "PYTHONPATH": str(REPOSITORY), **more}


def v1_mount(controller: str) -> tuple[Path, Path]:
    """Return the mount point of a v1 hierarchy and this process's group in it, or skip."""
    reason = f"needs root and a writable cgroup v1 {controller} hierarchy"
    for line in Path("/proc/self/mountinfo").read_text().splitlines() if sys.platform == "linux" else ():
        before, _, after = line.partition(" - ")
        if not after.startswith("cgroup ") or controller not in after.split()[-1].split(","):
            continue
        root, point = before.split()[3:5]
        for group in Path("/proc/self/cgroup").read_text().splitlines():
            if controller in group.split(":")[1].split(","):
                own = Path(point) / os.path.relpath(group.split(":", 2)[2], root)
                if os.geteuid() == 0 and own.is_dir() and os.access(own, os.W_OK):
                    return Path(point), own
    pytest.skip(reason)


@contextmanager
def real_groups(controller: str, parent: Path, depth: int) -> Iterator[list[Path]]:
    """Make `depth` nested groups of a name of their own below `parent`, and remove them whatever happens."""
    name = f"r3numba-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    groups = [parent / name]
    groups += [groups[0].joinpath(*["inner"] * step) for step in range(1, depth)]
    made: list[Path] = []
    try:
        for group in groups:
            try:
                group.mkdir()
            except OSError as error:
                pytest.skip(f"needs root and a writable cgroup v1 {controller} hierarchy: {error}")
            made.append(group)
        yield groups
    finally:
        for group in reversed(made):
            _remove(group)


def _remove(group: Path) -> None:
    for _ in range(100):  # a group stays busy for a moment after its last process was reaped
        try:
            group.rmdir()
        except OSError:
            time.sleep(0.02)
        else:
            return
    group.rmdir()


def set_limit(file: Path, value: int, controller: str) -> None:
    """Write a limit, or skip where an outer group is tighter than the one that the test wants."""
    try:
        file.write_text(f"{value}\n")
    except OSError as error:
        pytest.skip(f"needs root and a writable cgroup v1 {controller} hierarchy that takes {value}: {error}")


def run_inside(group: Path, code: str) -> str:
    """Run `code` in a process of our own that was moved into `group` before; return what it printed."""
    code = f"import sys\nprint('ready', flush=True)\nsys.stdin.readline()\n{code}"
    pipe = subprocess.PIPE
    command = [sys.executable, "-W", "error", "-c", code]
    with subprocess.Popen(command, env=child_environment(), stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            (group / "cgroup.procs").write_text(f"{process.pid}\n")
            output, errors = process.communicate("\n", timeout=60)
        finally:
            process.kill()  # does nothing to a process that has ended
    assert process.returncode == 0, errors
    return output.strip()
