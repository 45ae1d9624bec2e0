"""How many CPUs and how many bytes this process may use (standard library alone).

``os.cpu_count()`` reports the host. A container is limited by its affinity mask, by CFS quotas and by memory limits
of its cgroup **and of every ancestor**: the kernel enforces the tightest of them. Reading one level only is a common
fault (lxc/lxcfs#688, spiceai/spiceai#12299), and so is not stripping the mount's root (golang/go#76390).

Every function reads the files below ``root``, so that a test, or a sidecar that sees another mount namespace, can
point it at a tree of its own. A file that is missing, unreadable or malformed sets no limit and raises nothing.

References: cgroup-v2.rst, sched-bwc.rst and cgroup-v1/memory.rst of the kernel's documentation, proc(5), cgroups(7)
and cgroup_namespaces(7).
"""

from __future__ import annotations

import math
import operator
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, SupportsIndex, TypeVar

from ._policy import DEFAULT_POLICY, Policy

__all__ = [
    "Topology",
    "affinity_cpu_count",
    "cgroup_cpu_quota",
    "cgroup_memory_available",
    "permitted_cpus",
    "permitted_cpus_cached",
    "plan_threads",
    "pool_workers",
]

NUM_THREADS_VARIABLE: Final = "R3NUMBA_NUM_THREADS"
MAX_THREADS_VARIABLE: Final = "R3NUMBA_MAX_THREADS"
RESERVED_CPUS_VARIABLE: Final = "R3NUMBA_RESERVED_CPUS"

_MOST_DIGITS: Final = len(str(2**64 - 1))  # the kernel's figures have 64 bits; a longer one is malformed

RootPath = str | os.PathLike[str]
_Number = TypeVar("_Number", int, float)


# ----------------------------------------------------------------------------------------------------------- reading
def _integer(text: str) -> int | None:
    """Return the number that ``text`` spells in plain ASCII digits, or None (``int`` alone would take ``1_0`` too)."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdecimal() and len(digits) <= _MOST_DIGITS else None


def _read_bytes(path: str) -> bytes:
    """Return a file's content; nothing where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except (OSError, ValueError):  # ValueError: a path with a null byte in it
        return b""


def _read_words(path: str) -> list[str]:
    """Return the words of a file of figures. Bytes that are no ASCII become U+FFFD, which is part of no number."""
    return _read_bytes(path).decode("ascii", "replace").split()


def _read_paths(path: str) -> list[str]:
    """Return the lines of a file that names paths; such names may hold any byte but a newline."""
    return os.fsdecode(_read_bytes(path)).split("\n")


def _read_number(path: str) -> int | None:
    """Return the one non-negative number that a file holds, or None (``max`` and ``-1`` mean no limit)."""
    words = _read_words(path)
    number = _integer(words[0]) if len(words) == 1 else None
    return None if number is None or number < 0 else number


def _read_table(path: str) -> dict[str, int]:
    """Return the ``name value`` or ``name: value kB`` lines of a file, in the file's own unit."""
    table = {}
    for line in _read_bytes(path).decode("ascii", "replace").split("\n"):
        words = line.split()
        number = _integer(words[1]) if len(words) in (2, 3) else None
        if number is not None and number >= 0:
            table[words[0].removesuffix(":")] = number
    return table


def _inside(root: RootPath, path: str) -> str:
    return os.path.join(os.fspath(root), path.lstrip("/"))


# ----------------------------------------------------------------------------------------------------------- cgroups
class _Mount(NamedTuple):
    """A cgroup hierarchy as mountinfo shows it."""

    root: str  #: the group that is visible at `point`
    point: str
    controllers: frozenset[str] | None  #: None for the unified (v2) hierarchy


class _Level(NamedTuple):
    """A directory whose limits bind this process."""

    directory: str
    unified: bool


def _unescape(field: str) -> str:
    """Undo mountinfo's octal escapes (a blank in a mount point is written as backslash 040)."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), field)


def _cgroup_mounts(root: RootPath) -> list[_Mount]:
    mounts: dict[str, _Mount] = {}
    for line in _read_paths(_inside(root, "proc/self/mountinfo")):
        # Not split(): the field of the mount source may be empty. The optional fields end at a lone hyphen.
        before, hyphen, after = line.partition(" - ")
        fields, filesystem = before.split(" "), after.split(" ")
        if not hyphen or len(fields) < 6 or len(filesystem) < 3 or filesystem[0] not in ("cgroup", "cgroup2"):
            continue
        controllers = None if filesystem[0] == "cgroup2" else frozenset(filesystem[2].split(","))
        point = _unescape(fields[4])
        mounts[point] = _Mount(_unescape(fields[3]), point, controllers)  # of two at one point the later is visible
    return list(mounts.values())


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _names_below(mount: _Mount, path: str) -> list[str] | None:
    """Return the directories from the mount point down to the group at ``path``; None where it is not below it."""
    own, top = _parts(path), _parts(mount.root)
    below = own[len(top) :]
    # A leading ".." (in either path) climbs out of the cgroup namespace: the names up there are not ours to see.
    return None if own[: len(top)] != top or ".." in below else below


def _cgroup_levels(root: RootPath, controller: str) -> list[_Level]:
    """Return every directory that may limit ``controller`` for this process, its own group first in each hierarchy.

    A hybrid host mounts both versions and only one of them has the controller; the other has no such files, so that
    taking the tightest of both needs no decision which one is in charge.
    """
    levels: list[_Level] = []
    mounts = _cgroup_mounts(root)
    for line in _read_paths(_inside(root, "proc/self/cgroup")):
        fields = line.split(":", 2)  # a path may hold colons
        if len(fields) != 3 or (fields[1] and controller not in fields[1].split(",")):
            continue
        unified = not fields[1]
        hierarchy = [
            mount
            for mount in mounts
            if (mount.controllers is None if unified else mount.controllers and controller in mount.controllers)
        ]
        found = [(mount, names) for mount in hierarchy if (names := _names_below(mount, fields[2])) is not None]
        # A container that shows only a part of the host's hierarchy, but the host's path: what it shows is its own.
        for mount, names in found or [(mount, []) for mount in hierarchy]:
            for depth in range(len(names), -1, -1):
                directory = os.path.join(_inside(root, mount.point), *names[:depth])
                levels.append(_Level(directory.rstrip("/") or "/", unified))
    return levels


def _quota_at(level: _Level) -> tuple[float, str] | None:
    """Return the CPUs that one level allows, and the file that says so."""
    if level.unified:
        source = f"{level.directory}/cpu.max"
        words = _read_words(source)
        if len(words) != 2:
            return None
        quota, period = _integer(words[0]), _integer(words[1])
    else:
        source = f"{level.directory}/cpu.cfs_quota_us"
        quota, period = _read_number(source), _read_number(f"{level.directory}/cpu.cfs_period_us")
    if quota is None or period is None or quota <= 0 or period <= 0:
        return None
    return quota / period, source


def _memory_at(level: _Level) -> tuple[int, str] | None:
    """Return the bytes that one level leaves free, and the file that holds its limit."""
    if level.unified:
        names, prefix = ("memory.max", "memory.current"), ""
    else:
        names, prefix = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
    source = f"{level.directory}/{names[0]}"
    limit, usage = _read_number(source), _read_number(f"{level.directory}/{names[1]}")
    if limit is None or usage is None:
        return None
    statistics = _read_table(f"{level.directory}/memory.stat")
    # The kernel drops clean page cache before it refuses an allocation, so the cache is not use. The three files are
    # read one after the other: a cache larger than the usage is the race between them, and frees no more than all.
    cache = statistics.get(f"{prefix}inactive_file", 0) + statistics.get(f"{prefix}active_file", 0)
    return max(0, limit - max(0, usage - cache)), source


def _tightest(levels: list[_Level], read: Callable[[_Level], tuple[_Number, str] | None]) -> tuple[_Number, str] | None:
    figures = [figure for level in levels if (figure := read(level)) is not None]
    return min(figures, key=operator.itemgetter(0), default=None)


def _host_memory_available(root: RootPath) -> tuple[int, str] | None:
    source = _inside(root, "proc/meminfo")
    kibibytes = _read_table(source).get("MemAvailable")
    return None if kibibytes is None else (kibibytes * 1024, source)  # meminfo's "kB" are 1024 bytes


# ------------------------------------------------------------------------------------------------------------ public
def cgroup_cpu_quota(root: RootPath = "/") -> float | None:
    """CPUs that the CFS quota allows this process: the tightest along its whole cgroup path.

    Parameters
    ----------
    root : path, optional
        Where ``proc`` and the cgroup mounts are looked for.

    Returns
    -------
    float or None
        Quota divided by period, in CPUs (1.5 is one and a half); None where no level sets one.

    Notes
    -----
    Reads ``cpu.max`` (v2) and ``cpu.cfs_quota_us`` with ``cpu.cfs_period_us`` (v1) at the process's own group and at
    every ancestor up to and including the mount point; on hybrid hosts, of both versions. A level that says ``max`` or
    ``-1``, or whose file is missing, empty, unreadable or malformed, sets no limit. Raises nothing of its own.
    Conventions: the kernel's cgroup-v2.rst ("cpu.max") and sched-bwc.rst. Thread-safe: it only reads files.

    Examples
    --------
    >>> cgroup_cpu_quota("/a/directory/without/proc") is None
    True
    """
    figure = _tightest(_cgroup_levels(root, "cpu"), _quota_at)
    return None if figure is None else figure[0]


def affinity_cpu_count() -> int:
    """CPUs in the affinity mask of the calling thread, at least 1.

    Where the call is missing (macOS, Windows) or refused (some sandboxes), ``os.cpu_count()``, else 1.

    Notes
    -----
    Raises nothing. Convention: sched_setaffinity(2), which ``taskset``, cpusets and Slurm set. Linux keeps one mask a
    thread: a thread that an OpenMP runtime has bound (``OMP_PROC_BIND``) sees its own. Thread-safe.

    Examples
    --------
    >>> affinity_cpu_count() >= 1
    True
    """
    return _affinity()[0]


def _affinity() -> tuple[int, str]:
    try:
        return max(1, len(os.sched_getaffinity(0))), "os.sched_getaffinity(0)"
    except (AttributeError, OSError) as error:
        return max(1, os.cpu_count() or 1), f"os.cpu_count(), as os.sched_getaffinity gave {type(error).__name__}"


def permitted_cpus(root: RootPath = "/") -> int:
    """CPUs that this process may keep busy: ``max(1, min(affinity, floor(quota)))``.

    Parameters
    ----------
    root : path, optional
        Where ``proc`` and the cgroup mounts are looked for.

    Notes
    -----
    The quota is rounded down: a thread more than the quota carries is throttled for the rest of every period. Raises
    nothing of its own. Thread-safe. Reads its files on every call; see `permitted_cpus_cached`.

    Examples
    --------
    >>> permitted_cpus() <= affinity_cpu_count()
    True
    """
    return _permitted(affinity_cpu_count(), cgroup_cpu_quota(root))


def _permitted(affinity: int, quota: float | None) -> int:
    return affinity if quota is None else max(1, min(affinity, math.floor(quota)))


class _Reading(NamedTuple):
    at: float  #: seconds of the monotonic clock
    cpus: int


_readings: dict[int, _Reading] = {}  # by process id, so that a forked child does not take its parent's for its own


def permitted_cpus_cached() -> int:
    """Return `permitted_cpus`, read again at most once per ``Policy.topology_seconds`` (one second).

    Quotas change while a process lives (a resized pod), so a figure is never kept for good. Raises nothing of its own.
    Thread-safe without a lock, so a fork cannot inherit a held one; a forked child reads anew.

    Examples
    --------
    >>> permitted_cpus_cached() >= 1
    True
    """
    process, now = os.getpid(), time.monotonic()
    last = _readings.get(process)
    if last is not None:
        if now - last.at < DEFAULT_POLICY.topology_seconds:
            return last.cpus
        # Restart the clock before the files are read: threads that come meanwhile take the old figure and do not all
        # read. Two that pass the line above at once both read, which costs a little time and nothing else.
        _readings[process] = last._replace(at=now)
    cpus = permitted_cpus()
    _readings[process] = _Reading(now, cpus)
    return cpus


def _whole(name: str, value: SupportsIndex, least: int) -> int:
    """Check that ``value`` is a whole number (NumPy's included, a bool not) of at least ``least``."""
    try:
        number = operator.index(None if isinstance(value, bool) else value)  # type: ignore[arg-type]  # None is refused
    except TypeError:
        raise TypeError(f"{name} needs an integer, got {type(value).__name__} {value!r}") from None
    if number < least:
        raise ValueError(f"{name} needs at least {least}, got {number}")
    return number


def _environment_whole(variable: str, least: int) -> int | None:
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    number = _integer(text)
    if number is None or number < least:
        raise ValueError(f"{variable} needs an integer of at least {least}, got {text!r}")
    return number


def pool_workers(*, cap: int, reserved: int, cpus: int | None = None) -> int:
    """Return the workers of a thread pool: ``max(1, min(cap, cpus - reserved))``.

    Parameters
    ----------
    cap : int
        Most workers that the work is worth.
    reserved : int
        CPUs left to others. A decision, hence no default: 8 beside Ray's services, 0 for work that everyone waits
        for, such as the pools that publish (``cap=8``) and apply (``cap=32``) a checkpoint's delta.
    cpus : int, optional
        CPUs to share; by default `permitted_cpus`.

    Raises
    ------
    TypeError
        If an argument is no integer.
    ValueError
        If ``cap`` or ``cpus`` is below 1, or ``reserved`` below 0.

    Notes
    -----
    Thread-safe. The environment plays no part: the caller's pool is not one of this library's calls.

    Examples
    --------
    >>> pool_workers(cap=32, reserved=0, cpus=12), pool_workers(cap=32, reserved=8, cpus=12)
    (12, 4)
    """
    cap, reserved = _whole("cap", cap, 1), _whole("reserved", reserved, 0)
    cpus = permitted_cpus() if cpus is None else _whole("cpus", cpus, 1)
    return max(1, min(cap, cpus - reserved))


def plan_threads(
    nbytes: int,
    cpus: int,
    *,
    fresh: bool,
    cap: int = DEFAULT_POLICY.thread_cap,
    reserved: int = 0,
    _policy: Policy = DEFAULT_POLICY,
) -> int:
    """Return the threads that moving ``nbytes`` is worth: few, and never more than were measured to win.

    Parameters
    ----------
    nbytes : int
        Bytes of the result.
    cpus : int
        CPUs that may be kept busy, as `permitted_cpus` gives them.
    fresh : bool
        Whether the result's pages are new (each faults once) or recycled.
    cap : int, optional
        Most threads; ``R3NUMBA_MAX_THREADS`` replaces it.
    reserved : int, optional
        CPUs left to others; ``R3NUMBA_RESERVED_CPUS`` replaces it.

    Returns
    -------
    int
        1 below 8 MB (fresh) or 3 MB (recycled). Above, one thread per 32 MB but at least 2, at most ``cap`` (half of
        it, rounded down, from 16 GB on), at most ``cpus - reserved``, and at least 1. ``R3NUMBA_NUM_THREADS`` replaces
        all of this at any size, bounded by ``cpus``. MB = 1e6 bytes, GB = 1e9.

    Raises
    ------
    TypeError
        If ``nbytes``, ``cpus``, ``cap`` or ``reserved`` is no integer.
    ValueError
        If one of them is out of range, or if one of the three variables is set to something that is no integer or is
        out of range. An empty variable counts as not set.

    Notes
    -----
    The thresholds are those of ``r3numba._policy``, with the measurements behind them. Thread-safe.

    Examples
    --------
    >>> plan_threads(400_000_000, 91, fresh=True), plan_threads(4_000_000, 91, fresh=True)
    (8, 1)
    """
    nbytes, cpus = _whole("nbytes", nbytes, 0), _whole("cpus", cpus, 1)
    cap, reserved = _whole("cap", cap, 1), _whole("reserved", reserved, 0)
    # All three are checked at every size: a typing error must not wait for the first large batch to be seen.
    exact = _environment_whole(NUM_THREADS_VARIABLE, 1)
    cap = _environment_whole(MAX_THREADS_VARIABLE, 1) or cap
    from_environment = _environment_whole(RESERVED_CPUS_VARIABLE, 0)
    reserved = reserved if from_environment is None else from_environment
    if exact is not None:
        return min(exact, cpus)
    if nbytes < (_policy.serial_below_fresh if fresh else _policy.serial_below_recycled):
        return 1
    if nbytes >= _policy.half_cap_from:
        cap //= 2
    return max(1, min(max(2, nbytes // _policy.bytes_per_thread), cap, cpus - reserved))


def cgroup_memory_available(root: RootPath = "/") -> int | None:
    """Bytes that this process could still allocate before its container, or the host, runs out.

    Parameters
    ----------
    root : path, optional
        Where ``proc`` and the cgroup mounts are looked for.

    Returns
    -------
    int or None
        The least of ``limit - (usage - inactive_file - active_file)`` over the process's own cgroup and all its
        ancestors, and of the host's ``MemAvailable``; never below 0. None where none of them can be read.

    Notes
    -----
    Page cache is not use: a limit of 8 GiB with 7.9 GiB used, 7 of which are cache, leaves 7.1. v1 counts the
    descendants in its ``total_`` figures. A level without a limit or a usage that can be read sets no limit; a cache
    figure that cannot be read counts as 0. Swap is not counted. Raises nothing of its own. Conventions: the kernel's
    cgroup-v2.rst ("Memory Interface Files") and cgroup-v1/memory.rst. Thread-safe: it only reads files, on each call.

    Examples
    --------
    >>> cgroup_memory_available("/a/directory/without/proc") is None
    True
    """
    figure = _memory_available(root)
    return None if figure is None else figure[0]


def _memory_available(root: RootPath) -> tuple[int, str] | None:
    figures = [_tightest(_cgroup_levels(root, "memory"), _memory_at), _host_memory_available(root)]
    return min((figure for figure in figures if figure is not None), key=operator.itemgetter(0), default=None)


def _setting(variable: str) -> tuple[str | None, str]:
    value = os.environ.get(variable)
    return value, f"{variable}, {'not set' if value is None else 'from the environment'}"


@dataclass(frozen=True, slots=True)
class Topology:
    """All figures of this module at one moment, and where each came from; `detect` makes it.

    Frozen, hashable and picklable, and so safe to share between threads.
    """

    cpu_count: int | None  #: CPUs of the host, as ``os.cpu_count()`` says
    affinity_cpus: int  #: CPUs, see `affinity_cpu_count`
    cpu_quota: float | None  #: CPUs, see `cgroup_cpu_quota`
    permitted_cpus: int  #: CPUs, see `permitted_cpus`
    memory_available: int | None  #: bytes, see `cgroup_memory_available`
    host_memory_available: int | None  #: bytes, MemAvailable of the host
    num_threads: str | None  #: ``R3NUMBA_NUM_THREADS`` as set, not checked
    max_threads: str | None  #: ``R3NUMBA_MAX_THREADS`` as set, not checked
    reserved_cpus: str | None  #: ``R3NUMBA_RESERVED_CPUS`` as set, not checked
    sources: tuple[tuple[str, str], ...]  #: (name of a figure, the file or call it came from), in the order above

    @classmethod
    def detect(cls, root: RootPath = "/") -> Topology:
        """Read every figure once.

        Parameters
        ----------
        root : path, optional
            Where ``proc`` and the cgroup mounts are looked for.

        Notes
        -----
        Raises nothing of its own, not even for a malformed variable: a report must show what is wrong. Thread-safe.

        Examples
        --------
        >>> Topology.detect("/a/directory/without/proc").source_of("memory_available")
        'nothing could be read'
        """
        affinity, affinity_source = _affinity()
        levels = _cgroup_levels(root, "cpu")
        quota, quota_source = _tightest(levels, _quota_at) or (None, f"no limit at any of {len(levels)} cgroup levels")
        unread = (None, "nothing could be read")
        memory, memory_source = _memory_available(root) or unread
        host_memory, host_memory_source = _host_memory_available(root) or unread
        num_threads, num_threads_source = _setting(NUM_THREADS_VARIABLE)
        max_threads, max_threads_source = _setting(MAX_THREADS_VARIABLE)
        reserved_cpus, reserved_cpus_source = _setting(RESERVED_CPUS_VARIABLE)
        return cls(
            cpu_count=os.cpu_count(),
            affinity_cpus=affinity,
            cpu_quota=quota,
            permitted_cpus=_permitted(affinity, quota),
            memory_available=memory,
            host_memory_available=host_memory,
            num_threads=num_threads,
            max_threads=max_threads,
            reserved_cpus=reserved_cpus,
            sources=(
                ("cpu_count", "os.cpu_count()"),
                ("affinity_cpus", affinity_source),
                ("cpu_quota", quota_source),
                ("permitted_cpus", "max(1, min(affinity_cpus, floor(cpu_quota)))"),
                ("memory_available", memory_source),
                ("host_memory_available", host_memory_source),
                ("num_threads", num_threads_source),
                ("max_threads", max_threads_source),
                ("reserved_cpus", reserved_cpus_source),
            ),
        )

    def source_of(self, figure: str) -> str:
        """Return the file or call that a figure came from.

        Raises
        ------
        KeyError
            If there is no figure of that name.
        """
        return dict(self.sources)[figure]
