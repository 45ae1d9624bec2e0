"""r3numba.topology: fake trees read through ``root=``, a naive oracle, and the real kernel where it lets us.

The cases ``case-1`` to ``case-6``, ``case-30``, ``case-31`` and ``case-40`` are public reports, rebuilt small.
"""

from __future__ import annotations

import copy
import dataclasses
import doctest
import json
import os
import pickle
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import examples
from topology_trees import (
    GIB,
    NO_QUOTA,
    NO_QUOTA_V1,
    Hierarchy,
    Tree,
    hierarchies,
    oracle_memory,
    oracle_quota,
    real_groups,
    run_inside,
    run_python,
    set_limit,
    v1_mount,
)

from r3numba import topology
from r3numba._policy import DEFAULT_POLICY
from r3numba.topology import (
    Topology,
    affinity_cpu_count,
    cgroup_cpu_quota,
    cgroup_memory_available,
    permitted_cpus,
    permitted_cpus_cached,
    plan_threads,
    pool_workers,
)

MB = 10**6
GB = 10**9
VARIABLES = ("R3NUMBA_NUM_THREADS", "R3NUMBA_MAX_THREADS", "R3NUMBA_RESERVED_CPUS")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(topology, "_readings", {})


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "fake")


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


# ------------------------------------------------------------------------------------------------------------- quota
V2 = "sys/fs/cgroup"


def v2(tree: Tree, path: str, *, root: str = "/") -> Tree:
    return tree.own("", path).mount("/sys/fs/cgroup", root=root)


def case_1(tree: Tree) -> None:
    v2(tree, "/team/job").write(f"{V2}/team/job/cpu.max", "max 100000").write(f"{V2}/team/cpu.max", "max 100000")
    tree.write(f"{V2}/cpu.max", "200000 100000")


def case_2(tree: Tree) -> None:
    v2(tree, "/all/team/job").write(f"{V2}/all/team/job/cpu.max", "max 100000\n")
    tree.write(f"{V2}/all/team/cpu.max", "400000 100000\n").write(f"{V2}/all/cpu.max", "800000 100000\n")


def case_4(tree: Tree) -> None:
    tree.own("cpuset", "/").own("cpu,cpuacct", "/docker/abc").own("memory", "/elsewhere")
    tree.mount("/somewhere/else/cpu,cpuacct", "cpu,cpuacct").mount("/somewhere/else/cpuset", "cpuset")
    tree.quota_v1("somewhere/else/cpu,cpuacct/docker/abc", 150000).quota_v1("somewhere/else/cpuset", 1)


def own_group_only(tree: Tree) -> None:
    v2(tree, "/a/b").write(f"{V2}/a/b/cpu.max", "250000 100000").write(f"{V2}/a/cpu.max", "900000 100000")


def period_differs(tree: Tree) -> None:  # the tightest by ratio, not by quota: 3 against 2
    v2(tree, "/a/b").write(f"{V2}/a/b/cpu.max", "30000 10000").write(f"{V2}/a/cpu.max", "200000 100000")


def sibling_is_no_ancestor(tree: Tree) -> None:
    v2(tree, "/team2/job").write(f"{V2}/team/cpu.max", "100000 100000").write(f"{V2}/team2/other/cpu.max", "1 1")
    tree.write(f"{V2}/cpu.max", "500000 100000")


def prefix_of_a_name(tree: Tree) -> None:  # "/docker/abcdef" begins with "/docker/abc", and is not below it
    v2(tree, "/docker/abcdef/job", root="/docker/abc").write(f"{V2}/cpu.max", "300000 100000")
    tree.write(f"{V2}/def/job/cpu.max", "100000 100000").write(f"{V2}/job/cpu.max", "100000 100000")


def mount_root_is_stripped(tree: Tree) -> None:  # golang/go#76390
    v2(tree, "/kubepods/pod1/job", root="/kubepods/pod1").write(f"{V2}/job/cpu.max", "600000 100000")
    tree.write(f"{V2}/cpu.max", "700000 100000")


def mount_root_is_own_group(tree: Tree) -> None:
    tree.own("cpu,cpuacct", "/docker/abc").mount("/sys/fs/cgroup/cpu", "cpu,cpuacct", root="/docker/abc")
    tree.quota_v1("sys/fs/cgroup/cpu", 350000)


def names_repeat(tree: Tree) -> None:  # only the first "job" is the mount's root
    v2(tree, "/job/job/job", root="/job").write(f"{V2}/job/job/cpu.max", "200000 100000")


def docker_shows_its_part_only(tree: Tree) -> None:  # host's path, and a mount of another root
    tree.own("cpu,cpuacct", "/docker/abc").mount("/sys/fs/cgroup/cpu", "cpu,cpuacct", root="/system/x")
    tree.quota_v1("sys/fs/cgroup/cpu", 250000)


def docker_path_is_not_there(tree: Tree) -> None:  # host's path, mount's root says "/", the directories do not exist
    tree.own("cpu,cpuacct", "/docker/abc").mount("/sys/fs/cgroup/cpu", "cpu,cpuacct")
    tree.quota_v1("sys/fs/cgroup/cpu", 250000)


def fitting_mount_wins(
    tree: Tree,
) -> None:  # a second mount of the hierarchy that does not show our group is no ancestor
    v2(tree, "/a/b").mount("/mnt/other", root="/c/d").write("mnt/other/cpu.max", "1 1")
    tree.write(f"{V2}/a/cpu.max", "500000 100000")


def namespace(tree: Tree) -> None:
    v2(tree, "/").write(f"{V2}/cpu.max", "150000 100000")


def outside_of_the_namespace(tree: Tree) -> None:
    v2(tree, "/../sibling").write(f"{V2}/cpu.max", "150000 100000").write("sys/fs/sibling/cpu.max", "1 1")


def mount_from_above_the_namespace(tree: Tree) -> None:  # the names between the mount's root and ours cannot be known
    v2(tree, "/", root="/../..").write(f"{V2}/cpu.max", "150000 100000")


def mount_and_path_above_the_namespace(tree: Tree) -> None:
    v2(tree, "/../sibling/job", root="/..").write(f"{V2}/sibling/cpu.max", "150000 100000")


def climbs_past_the_mount(tree: Tree) -> None:
    v2(tree, "/../../x", root="/..").write(f"{V2}/cpu.max", "150000 100000").write("sys/fs/x/cpu.max", "1 1")


def escaped_mount_point(tree: Tree) -> None:
    tree.own("", "/p q/r").mount(r"/my\040cgroup\011s\134\043", root=r"/p\040q")
    tree.write("my cgroup\ts\\#/r/cpu.max", "450000 100000")


def odd_names(tree: Tree) -> None:  # colons, blanks, a line separator that str.splitlines would break at, and no UTF-8
    name = "a:b c\u2028d" + os.fsdecode(b"\xff")
    v2(tree, f"/{name}").write(f"{V2}/{name}/cpu.max", "450000 100000")


def removed_group(tree: Tree) -> None:  # the kernel marks a group that was removed below a living process
    v2(tree, "/team/job (deleted)").write(f"{V2}/team/cpu.max", "100000 50000")


def empty_mount_source(tree: Tree) -> None:
    tree.own("", "/a").mount("/sys/fs/cgroup", source="").write(f"{V2}/a/cpu.max", "450000 100000")


def later_mount_hides(tree: Tree) -> None:
    tree.own("cpu", "/x").own("", "/a").mount("/sys/fs/cgroup", "cpu").mount("/sys/fs/cgroup")
    tree.quota_v1(V2, 100000).write(f"{V2}/cpu.max", "450000 100000")


def hybrid_v1_has_cpu(tree: Tree) -> None:
    tree.own("cpu,cpuacct", "/job").own("", "/user/job")
    tree.mount("/sys/fs/cgroup/cpu,cpuacct", "cpu,cpuacct").mount("/sys/fs/cgroup/unified")
    tree.quota_v1("sys/fs/cgroup/cpu,cpuacct/job", 350000).write("sys/fs/cgroup/unified/user/job/cgroup.procs", "1\n")


def hybrid_v2_has_cpu(tree: Tree) -> None:
    tree.own("memory", "/job").own("", "/user/job").mount("/sys/fs/cgroup/memory", "memory")
    tree.mount("/sys/fs/cgroup/unified").write("sys/fs/cgroup/unified/user/cpu.max", "350000 100000")


def hybrid_both(tree: Tree) -> None:
    tree.own("cpu", "/job").own("", "/job").mount("/sys/fs/cgroup/cpu", "cpu").mount("/sys/fs/cgroup/unified")
    tree.quota_v1("sys/fs/cgroup/cpu", 700000).write("sys/fs/cgroup/unified/job/cpu.max", "350000 100000")


def other_controllers_do_not_count(tree: Tree) -> None:
    tree.own("cpuset", "/a").own("cpuacct", "/a").own("name=systemd", "/a").mount("/sys/fs/cgroup/cpuset", "cpuset")
    tree.mount("/sys/fs/cgroup/cpuacct", "cpuacct").mount("/sys/fs/cgroup/systemd", "xattr,name=systemd")
    tree.quota_v1("sys/fs/cgroup/cpuset", 1).quota_v1("sys/fs/cgroup/cpuacct/a", 1).quota_v1("sys/fs/cgroup/systemd", 1)


def other_controllers_path(tree: Tree) -> None:  # "cpu" is a part of the word "cpuset"; that group's path is another
    tree.own("cpuset,cpuacct", "/x").own("cpu", "/y").mount("/cg", "cpu").quota_v1("cg/x", 1).quota_v1("cg/y", 450000)


def quota_above_the_affinity(tree: Tree) -> None:
    v2(tree, "/a").write(f"{V2}/a/cpu.max", "2000000 100000")


def v1_ancestor(tree: Tree) -> None:
    tree.own("cpu,cpuacct", "/pod/job").mount("/sys/fs/cgroup/cpu", "cpu,cpuacct")
    tree.quota_v1("sys/fs/cgroup/cpu/pod/job", -1).quota_v1("sys/fs/cgroup/cpu/pod", 550000)


def v1_mount_root_counts(tree: Tree) -> None:
    tree.own("cpu,cpuacct", "/pod/job").mount("/sys/fs/cgroup/cpu", "cpu,cpuacct")
    tree.quota_v1("sys/fs/cgroup/cpu/pod/job", 750000).quota_v1("sys/fs/cgroup/cpu", 650000)


def v1_unlimited(tree: Tree) -> None:
    tree.own("cpu,cpuacct", "/pod").mount("/sys/fs/cgroup/cpu", "cpu,cpuacct")
    tree.quota_v1("sys/fs/cgroup/cpu/pod", -1).quota_v1("sys/fs/cgroup/cpu", -1)


def v2_unlimited(tree: Tree) -> None:
    v2(tree, "/pod").write(f"{V2}/pod/cpu.max", "max 100000\n")


def below_one_cpu(tree: Tree) -> None:
    v2(tree, "/pod").write(f"{V2}/pod/cpu.max", "50000 100000\n")


def mounted_at_the_root(tree: Tree) -> None:
    tree.own("", "/a").mount("/").write("a/cpu.max", "450000 100000")


def nothing_mounted(tree: Tree) -> None:
    tree.own("", "/a").write(f"{V2}/a/cpu.max", "450000 100000")


def no_own_group(tree: Tree) -> None:
    tree.mount("/sys/fs/cgroup").write(f"{V2}/cpu.max", "450000 100000")


def malformed_lists(tree: Tree) -> None:
    tree.mount("/sys/fs/cgroup").write(f"{V2}/a/cpu.max", "450000 100000")
    mountinfo = (tree.root / "proc/self/mountinfo").read_bytes()
    tree.write("proc/self/mountinfo", b"\xff\n\ngarbage - \n1 2 3 - cgroup2 x rw\n" + mountinfo + b"31 - cgroup2")
    tree.write("proc/self/cgroup", b"nonsense\n\xff\xfe\n::\n0:only-two\n0::/a\n")


QUOTAS: list[tuple[str, Callable[[Tree], None], float | None, int]] = [
    ("case-1", case_1, 2.0, 2),
    ("case-2", case_2, 4.0, 4),
    ("case-4", case_4, 1.5, 1),
    ("case-5-v1", v1_unlimited, None, 8),
    ("case-5-v2", v2_unlimited, None, 8),
    ("case-5-below-one", below_one_cpu, 0.5, 1),
    *[
        (maker.__name__, maker, quota, permitted)
        for maker, quota, permitted in [
            (own_group_only, 2.5, 2),
            (period_differs, 2.0, 2),
            (sibling_is_no_ancestor, 5.0, 5),
            (prefix_of_a_name, 3.0, 3),
            (mount_root_is_stripped, 6.0, 6),
            (mount_root_is_own_group, 3.5, 3),
            (names_repeat, 2.0, 2),
            (docker_shows_its_part_only, 2.5, 2),
            (docker_path_is_not_there, 2.5, 2),
            (fitting_mount_wins, 5.0, 5),
            (namespace, 1.5, 1),
            (outside_of_the_namespace, 1.5, 1),
            (mount_from_above_the_namespace, 1.5, 1),
            (mount_and_path_above_the_namespace, 1.5, 1),
            (climbs_past_the_mount, 1.5, 1),
            (escaped_mount_point, 4.5, 4),
            (odd_names, 4.5, 4),
            (removed_group, 2.0, 2),
            (empty_mount_source, 4.5, 4),
            (later_mount_hides, 4.5, 4),
            (hybrid_v1_has_cpu, 3.5, 3),
            (hybrid_v2_has_cpu, 3.5, 3),
            (hybrid_both, 3.5, 3),
            (other_controllers_do_not_count, None, 8),
            (other_controllers_path, 4.5, 4),
            (quota_above_the_affinity, 20.0, 8),
            (v1_ancestor, 5.5, 5),
            (v1_mount_root_counts, 6.5, 6),
            (mounted_at_the_root, 4.5, 4),
            (nothing_mounted, None, 8),
            (no_own_group, None, 8),
            (malformed_lists, 4.5, 4),
        ]
    ],
]


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(("make", "quota", "permitted"), [pytest.param(*rest, id=name) for name, *rest in QUOTAS])
def test_quota(tree: Tree, make: Callable[[Tree], None], quota: float | None, permitted: int) -> None:
    make(tree)
    assert cgroup_cpu_quota(root=tree.root) == quota
    assert cgroup_cpu_quota(root=str(tree.root) + "/") == quota
    assert permitted_cpus(root=tree.root) == permitted


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize("content", [*NO_QUOTA, b"200000 100000"], ids=lambda content: f"case-3-{content[:20]!r}")
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_level_without_limit(tree: Tree, content: bytes, version: str) -> None:
    """Case 3 and its kind: one bad level sets no limit, and does not hide its parent's either."""
    if version == "v2":
        v2(tree, "/team/job").write(f"{V2}/team/job/cpu.max", content).write(f"{V2}/team/cpu.max", "300000 100000")
        expected = 2.0 if content not in NO_QUOTA else 3.0
    else:
        tree.own("cpu,cpuacct", "/team/job").mount("/cg", "cpu,cpuacct").quota_v1("cg/team", 300000)
        tree.quota_v1("cg/team/job", 1).write("cg/team/job/cpu.cfs_quota_us", NO_QUOTA_V1.get(content, content))
        expected = 3.0
    assert cgroup_cpu_quota(root=tree.root) == expected


@pytest.mark.parametrize("period", ["0", "-100000", "", "max", "1 2", "\xff"])
def test_v1_period_without_meaning(tree: Tree, period: str) -> None:
    tree.own("cpu", "/a").mount("/cg", "cpu").quota_v1("cg/a", 100000, period).quota_v1("cg", 250000, 50000)
    assert cgroup_cpu_quota(root=tree.root) == 5.0


@pytest.mark.parametrize("how", ["directory", "dangling link", "no permission", "no file"])
def test_unreadable_level(tree: Tree, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    v2(tree, "/a").write(f"{V2}/cpu.max", "300000 100000")
    file = tree.root / V2 / "a/cpu.max"
    file.parent.mkdir()
    if how == "directory":
        file.mkdir()
    elif how == "dangling link":
        file.symlink_to(tree.root / "nowhere")
    elif how == "no permission":
        file.write_text("100000 100000")
        refuse_to_open(file, monkeypatch)
    assert cgroup_cpu_quota(root=tree.root) == 3.0


def refuse_to_open(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for a mode that forbids reading, which would not stop root."""

    def refusing(path: str, mode: str) -> Any:
        if Path(path) == file:
            raise PermissionError(13, "Permission denied", path)
        return open(path, mode)

    monkeypatch.setattr(topology, "open", refusing, raising=False)


@pytest.mark.parametrize("name", ["mountinfo", "cgroup"])
def test_unreadable_process_files(tree: Tree, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case_1(tree)
    refuse_to_open(tree.root / "proc/self" / name, monkeypatch)
    assert cgroup_cpu_quota(root=tree.root) is None
    assert cgroup_memory_available(root=tree.root) is None


@pytest.mark.parametrize("root", ["/no/such/directory", "a\0b"])
def test_nothing_to_read(root: str) -> None:
    assert cgroup_cpu_quota(root=root) is None
    assert cgroup_memory_available(root=root) is None
    assert permitted_cpus(root=root) == affinity_cpu_count()


@settings(deadline=None, max_examples=examples(100))
@given(hosts=hierarchies(), available=st.one_of(st.none(), st.integers(0, 8 * GIB // 1024).map(lambda kib: kib * 1024)))
def test_against_the_oracle(hosts: list[Hierarchy], available: int | None) -> None:
    with tempfile.TemporaryDirectory() as directory:
        tree = Tree(Path(directory))
        for hierarchy in hosts:
            hierarchy.build(tree)
        if available is not None:
            tree.host(available)
        assert cgroup_cpu_quota(root=directory) == oracle_quota(hosts)
        assert cgroup_memory_available(root=directory) == oracle_memory(hosts, available)


# ---------------------------------------------------------------------------------------------------------- affinity
@pytest.mark.parametrize("error", [OSError(1, "Operation not permitted"), AttributeError("sched_getaffinity")])
@pytest.mark.parametrize(("count", "expected"), [(6, 6), (None, 1)])
def test_case_6_affinity_refused(
    monkeypatch: pytest.MonkeyPatch, error: Exception, count: int | None, expected: int
) -> None:
    def refuse(pid: int) -> set[int]:
        raise error

    monkeypatch.setattr(os, "sched_getaffinity", refuse, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert affinity_cpu_count() == expected
    assert permitted_cpus("/no/such/directory") == expected
    assert type(error).__name__ in Topology.detect().source_of("affinity_cpus")


def test_case_6_affinity_call_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert affinity_cpu_count() == 5


def test_affinity_of_a_real_process() -> None:
    code = (
        "import os\n"
        "from r3numba.topology import affinity_cpu_count, permitted_cpus\n"
        "whole = affinity_cpu_count()\n"
        "call = getattr(os, 'sched_setaffinity', None)\n"
        "if call: call(0, {min(os.sched_getaffinity(0))})\n"
        "print(whole, affinity_cpu_count(), permitted_cpus(), bool(call))"
    )
    whole, bound, permitted, can_bind = run_python(code).split()
    assert int(whole) == affinity_cpu_count()
    assert can_bind == "False" or (bound, permitted) == ("1", "1")


@pytest.mark.usefixtures("eight_cpus")
def test_case_30_quota_of_one_cpu(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    v2(tree, "/job").write(f"{V2}/job/cpu.max", "100000 100000")
    cpus = permitted_cpus(root=tree.root)
    assert cpus == 1
    assert plan_threads(4 * GB, cpus, fresh=True) == 1
    monkeypatch.setenv("R3NUMBA_NUM_THREADS", "16")
    assert plan_threads(4 * GB, cpus, fresh=True) == 1


# ------------------------------------------------------------------------------------------------------------ memory
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_case_31_page_cache_is_not_use(tree: Tree, version: str) -> None:
    limit, usage = 8 * GIB, 79 * GIB // 10
    if version == "v2":
        v2(tree, "/job").memory(f"{V2}/job", limit, usage, 5 * GIB, 2 * GIB)
    else:
        tree.own("memory", "/job").mount("/cg", "memory").memory("cg/job", limit, usage, 5 * GIB, 2 * GIB, v1=True)
    tree.host(100 * GIB)
    available = cgroup_memory_available(root=tree.root)
    assert available == limit - usage + 7 * GIB
    assert available / GIB == pytest.approx(7.1)
    assert available > 5 * GIB


def test_memory_tightest_ancestor_and_mount_root(tree: Tree) -> None:
    v2(tree, "/team/job").memory(f"{V2}/team/job", "max", 1 * GIB).memory(f"{V2}/team", 9 * GIB, 4 * GIB)
    assert cgroup_memory_available(root=tree.root) == 5 * GIB
    tree.memory(V2, 6 * GIB, 4 * GIB, GIB)
    assert cgroup_memory_available(root=tree.root) == 3 * GIB
    tree.host(2 * GIB)
    assert cgroup_memory_available(root=tree.root) == 2 * GIB


def test_memory_v1_without_limit_is_the_hosts(tree: Tree) -> None:
    tree.own("memory", "/job").mount("/cg", "memory").memory("cg/job", 9223372036854771712, GIB, v1=True).host(3 * GIB)
    assert cgroup_memory_available(root=tree.root) == 3 * GIB


def test_memory_hybrid_takes_the_tightest(tree: Tree) -> None:
    tree.own("memory", "/a").own("", "/b").mount("/one", "memory").mount("/two")
    tree.memory("one/a", 4 * GIB, GIB, v1=True).memory("two/b", 3 * GIB, GIB)
    assert cgroup_memory_available(root=tree.root) == 2 * GIB


def test_memory_is_never_negative_and_never_above_the_limit(tree: Tree) -> None:
    v2(tree, "/job").memory(f"{V2}/job", GIB, 3 * GIB)
    assert cgroup_memory_available(root=tree.root) == 0
    tree.memory(f"{V2}/job", GIB, GIB // 2, GIB, GIB)  # the three files were read at different moments
    assert cgroup_memory_available(root=tree.root) == GIB
    tree.memory(f"{V2}/job", 0, 0)
    assert cgroup_memory_available(root=tree.root) == 0


@pytest.mark.parametrize("content", [b"", b"max\n", b"-1\n", b"1_000\n", b"1 2\n", b"\xff\n", b"9" * 5000])
@pytest.mark.parametrize("name", ["memory.max", "memory.current"])
def test_memory_level_without_a_figure(tree: Tree, name: str, content: bytes) -> None:
    v2(tree, "/job").memory(f"{V2}/job", 2 * GIB, GIB).write(f"{V2}/job/{name}", content)
    assert cgroup_memory_available(root=tree.root) is None
    tree.memory(V2, 6 * GIB, GIB)
    assert cgroup_memory_available(root=tree.root) == 5 * GIB


@pytest.mark.parametrize(
    ("content", "cache"),
    [
        (b"", 0),
        (b"inactive_file 4096\n", 4096),
        (b"active_file\ninactive_file x\n", 0),
        (b"\xff\xfe 1\nactive_file 4096\nsolitary\n\n", 4096),
        (b"inactive_file -4096\nactive_file 8192\n", 8192),
        (b"total_inactive_file 4096\n", 0),
    ],
)
def test_memory_statistics_in_part(tree: Tree, content: bytes, cache: int) -> None:
    v2(tree, "/job").memory(f"{V2}/job", 2 * GIB, GIB).write(f"{V2}/job/memory.stat", content)
    assert cgroup_memory_available(root=tree.root) == GIB + cache


@pytest.mark.parametrize("content", [b"", b"MemFree: 1 kB\n", b"MemAvailable: x kB\n", b"\xffMemAvailable: 1 kB\n"])
def test_memory_host_figure_missing(tree: Tree, content: bytes) -> None:
    tree.write("proc/meminfo", content)
    assert cgroup_memory_available(root=tree.root) is None


# ------------------------------------------------------------------------------------------------------------- plans
FRESH, RECYCLED, HALF = 8 * MB, 3 * MB, 16 * GB


@pytest.mark.parametrize(
    ("nbytes", "cpus", "options", "threads"),
    [
        pytest.param(400 * MB, 91, {}, 8, id="case-40-cap"),
        pytest.param(32 * GB, 91, {}, 4, id="case-40-half-cap"),
        pytest.param(4 * MB, 91, {}, 1, id="case-40-small"),
        pytest.param(400 * MB, 9, {"reserved": 8}, 1, id="case-40-reserved"),
        pytest.param(400 * MB, 1, {}, 1, id="case-40-one-cpu"),
        pytest.param(0, 91, {}, 1, id="nothing"),
        pytest.param(FRESH - 1, 91, {}, 1, id="fresh-1"),
        pytest.param(FRESH, 91, {}, 2, id="fresh+0"),
        pytest.param(FRESH + 1, 91, {}, 2, id="fresh+1"),
        pytest.param(RECYCLED - 1, 91, {"fresh": False}, 1, id="recycled-1"),
        pytest.param(RECYCLED, 91, {"fresh": False}, 2, id="recycled+0"),
        pytest.param(RECYCLED + 1, 91, {"fresh": False}, 2, id="recycled+1"),
        pytest.param(FRESH, 1, {}, 1, id="threshold-one-cpu"),
        pytest.param(FRESH, 91, {"cap": 1}, 1, id="threshold-cap-1"),
        pytest.param(96 * MB - 1, 91, {}, 2, id="third-thread-1"),
        pytest.param(96 * MB, 91, {}, 3, id="third-thread+0"),
        pytest.param(96 * MB, 91, {"fresh": False}, 3, id="third-thread-recycled"),
        pytest.param(GB, 3, {}, 3, id="few-cpus"),
        pytest.param(GB, 91, {"cap": 32}, 31, id="one-per-32-MB"),
        pytest.param(GB, 12, {"cap": 32, "reserved": 8}, 4, id="reserved"),
        pytest.param(GB, 4, {"reserved": 99}, 1, id="reserved-more-than-all"),
        pytest.param(HALF - 1, 91, {}, 8, id="half-1"),
        pytest.param(HALF, 91, {}, 4, id="half+0"),
        pytest.param(HALF + 1, 91, {}, 4, id="half+1"),
        pytest.param(HALF, 91, {"cap": 5}, 2, id="half-rounds-down"),
        pytest.param(HALF, 91, {"cap": 1}, 1, id="half-of-one"),
        pytest.param(HALF, 3, {}, 3, id="half-cap-not-half-cpus"),
    ],
)
def test_plan_threads(nbytes: int, cpus: int, options: dict[str, Any], threads: int) -> None:
    assert plan_threads(nbytes, cpus, **{"fresh": True, **options}) == threads


def test_thresholds_come_from_the_policy() -> None:
    found = (DEFAULT_POLICY.serial_below_fresh, DEFAULT_POLICY.serial_below_recycled, DEFAULT_POLICY.half_cap_from)
    assert found == (FRESH, RECYCLED, HALF)
    policy = dataclasses.replace(DEFAULT_POLICY, serial_below_fresh=10, bytes_per_thread=5, half_cap_from=1000)
    assert [plan_threads(nbytes, 91, fresh=True, _policy=policy) for nbytes in (9, 10, 15, 999, 1000)] == [
        1,
        2,
        3,
        8,
        4,
    ]


@settings(deadline=None)
@given(st.integers(0, 40 * GB), st.integers(1, 256), st.booleans(), st.integers(1, 64), st.integers(0, 64))
def test_plan_stays_in_its_bounds(nbytes: int, cpus: int, fresh: bool, cap: int, reserved: int) -> None:
    threads = plan_threads(nbytes, cpus, fresh=fresh, cap=cap, reserved=reserved)
    assert 1 <= threads <= cap
    assert threads == 1 or threads <= min(cpus - reserved, max(2, nbytes // (32 * MB)))


class Four:
    """A stand-in for NumPy's integers."""

    def __index__(self) -> int:
        return 4


@pytest.mark.parametrize("call", [plan_threads, pool_workers])
@pytest.mark.parametrize("bad", [True, 4.0, "4", None, [4]], ids=repr)
def test_wrong_types(call: Callable[..., int], bad: object) -> None:
    good: dict[str, Any] = {"nbytes": GB, "cpus": 9, "fresh": True, "cap": 3, "reserved": 1}
    if call is pool_workers:
        good = {"cpus": 9, "cap": 3, "reserved": 1}
    assert call(**good) >= 1
    for name in set(good) - {"fresh"}:
        if bad is None and call is pool_workers and name == "cpus":
            continue  # None stands for the permitted CPUs
        with pytest.raises(TypeError, match=f"^{name} needs an integer, got {type(bad).__name__}"):
            call(**{**good, name: bad})
        assert call(**{**good, name: Four()}) == call(**{**good, name: 4})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nbytes": -1}, "nbytes needs at least 0, got -1"),
        ({"cpus": 0}, "cpus needs at least 1, got 0"),
        ({"cap": 0}, "cap needs at least 1, got 0"),
        ({"reserved": -1}, "reserved needs at least 0, got -1"),
    ],
)
def test_wrong_values(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        plan_threads(**{"nbytes": 1, "cpus": 1, "fresh": True, "cap": 1, "reserved": 0, **wrong})
    if "nbytes" not in wrong:
        with pytest.raises(ValueError, match=f"^{message}$"):
            pool_workers(**{"cpus": 1, "cap": 1, "reserved": 0, **wrong})


@pytest.mark.parametrize(
    ("settings", "nbytes", "cpus", "threads"),
    [
        ({"NUM_THREADS": "5"}, 400 * MB, 91, 5),
        ({"NUM_THREADS": "5"}, 1, 91, 5),
        ({"NUM_THREADS": "1"}, 400 * MB, 91, 1),
        ({"NUM_THREADS": "64"}, 32 * GB, 12, 12),
        ({"NUM_THREADS": "6", "MAX_THREADS": "2", "RESERVED_CPUS": "90"}, GB, 91, 6),
        ({"MAX_THREADS": "3"}, 400 * MB, 91, 3),
        ({"MAX_THREADS": "20"}, GB, 91, 20),
        ({"MAX_THREADS": "20"}, 32 * GB, 91, 10),
        ({"MAX_THREADS": "20"}, MB, 91, 1),
        ({"RESERVED_CPUS": "89"}, 400 * MB, 91, 2),
        ({"RESERVED_CPUS": "0"}, 400 * MB, 91, 8),
        ({"NUM_THREADS": "", "MAX_THREADS": " ", "RESERVED_CPUS": ""}, 400 * MB, 91, 8),
        ({"NUM_THREADS": " 5 "}, 1, 91, 5),
    ],
)
def test_environment(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], nbytes: int, cpus: int, threads: int
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(f"R3NUMBA_{name}", value)
    assert plan_threads(nbytes, cpus, fresh=True) == threads


def test_environment_replaces_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R3NUMBA_MAX_THREADS", "3")
    monkeypatch.setenv("R3NUMBA_RESERVED_CPUS", "0")
    assert plan_threads(GB, 16, fresh=True, cap=8, reserved=15) == 3
    assert pool_workers(cap=8, reserved=1, cpus=16) == 8


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("text", ["four", "2.5", "-1", "0", "1_0", "\u0664", "0x4", "4 4", "true"])
@pytest.mark.parametrize("nbytes", [1, GB])
def test_environment_malformed(monkeypatch: pytest.MonkeyPatch, variable: str, text: str, nbytes: int) -> None:
    monkeypatch.setenv(variable, text)
    least = 0 if variable == "R3NUMBA_RESERVED_CPUS" else 1
    if text == "0" and least == 0:
        assert plan_threads(nbytes, 2, fresh=True) >= 1
        return
    message = f"^{variable} needs an integer of at least {least}, got '{text}'$"
    with pytest.raises(ValueError, match=message):
        plan_threads(nbytes, 2, fresh=True)
    assert "from the environment" in str(Topology.detect().sources)  # the report shows it instead of raising


# -------------------------------------------------------------------------------------------------- the cached figure
def counting(monkeypatch: pytest.MonkeyPatch, cpus: list[int]) -> list[float]:
    """Let `permitted_cpus` give `cpus` one after the other, and return the settable clock (its last item)."""
    clock = [100.0]
    monkeypatch.setattr(topology, "time", SimpleNamespace(monotonic=lambda: clock[-1]))
    monkeypatch.setattr(topology, "permitted_cpus", lambda: cpus.pop(0))
    return clock


def test_cached_figure_is_read_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = counting(monkeypatch, left := [8, 4, 2])
    found = []
    for now in (100.0, 100.5, 100.999, 101.0, 101.9, 102.0):
        clock.append(now)
        found.append(permitted_cpus_cached())
    assert (found, left) == ([8, 8, 8, 4, 4, 2], [])


def test_cached_figure_is_served_while_another_thread_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = counting(monkeypatch, [8])
    assert permitted_cpus_cached() == 8
    clock.append(200.0)
    reading, go_on, found = threading.Event(), threading.Event(), []

    def slow() -> int:
        reading.set()
        assert go_on.wait(30)
        return 3

    monkeypatch.setattr(topology, "permitted_cpus", slow)
    reader = threading.Thread(target=lambda: found.append(permitted_cpus_cached()))
    reader.start()
    assert reading.wait(30)
    assert permitted_cpus_cached() == 8  # neither blocked by the reader nor reading as well
    go_on.set()
    reader.join(30)
    assert found == [3]
    assert permitted_cpus_cached() == 3


def test_cached_figure_after_fork() -> None:
    code = (
        "import os\n"
        "from r3numba import topology\n"
        "topology.permitted_cpus = lambda: 8\n"
        "assert topology.permitted_cpus_cached() == 8\n"
        "topology.permitted_cpus = lambda: 2\n"
        "child = os.fork()\n"
        "if not child: os._exit(topology.permitted_cpus_cached())\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), topology.permitted_cpus_cached())"
    )
    assert run_python(code) == "2 8"


# -------------------------------------------------------------------------------------------------------------- pools
@pytest.mark.parametrize(
    ("cap", "reserved", "cpus", "workers"),
    [
        (8, 0, 91, 8),
        (32, 0, 91, 32),
        (8, 0, 4, 4),
        (32, 0, 12, 12),
        (8, 8, 12, 4),
        (8, 8, 8, 1),
        (8, 99, 2, 1),
        (1, 0, 9, 1),
    ],
)
def test_pool_workers(cap: int, reserved: int, cpus: int, workers: int) -> None:
    assert pool_workers(cap=cap, reserved=reserved, cpus=cpus) == workers


def test_pool_workers_by_default_from_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "permitted_cpus", lambda: 6)
    assert pool_workers(cap=8, reserved=0) == 6
    assert pool_workers(cap=8, reserved=2) == 4


def test_pool_workers_needs_both_decisions() -> None:
    for arguments in ({"cap": 8}, {"reserved": 0}, {}):
        with pytest.raises(TypeError, match="required keyword-only argument"):
            pool_workers(**arguments)


@pytest.mark.parametrize(("cpus", "publishers", "appliers"), [(91, 8, 32), (12, 8, 12), (3, 3, 3), (1, 1, 1)])
def test_recipe_checkpoint_delta_pools(
    monkeypatch: pytest.MonkeyPatch, cpus: int, publishers: int, appliers: int
) -> None:
    """Publish and apply of a checkpoint's delta are barriers: everybody waits, so nothing is reserved for others."""
    monkeypatch.setattr(topology, "permitted_cpus", lambda: cpus)
    for cap, workers in ((8, publishers), (32, appliers)):
        with ThreadPoolExecutor(max_workers=pool_workers(cap=cap, reserved=0)) as pool:
            everyone = threading.Barrier(workers)  # breaks unless as many tasks run side by side
            list(pool.map(lambda _, barrier=everyone: barrier.wait(30), range(workers)))
            assert len({*pool.map(lambda _: threading.get_ident(), range(workers * 3))}) <= workers


# ------------------------------------------------------------------------------------------------------------- record
@pytest.mark.usefixtures("eight_cpus")
def test_topology_record(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    case_1(tree)
    tree.memory(f"{V2}/team", 4 * GIB, GIB).host(8 * GIB)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setenv("R3NUMBA_MAX_THREADS", "many")
    found = Topology.detect(root=tree.root)
    figures = {name: getattr(found, name) for name, _ in found.sources}
    assert figures == {
        "cpu_count": 16,
        "affinity_cpus": 8,
        "cpu_quota": 2.0,
        "permitted_cpus": 2,
        "memory_available": 3 * GIB,
        "host_memory_available": 8 * GIB,
        "num_threads": None,
        "max_threads": "many",
        "reserved_cpus": None,
    }
    assert [field.name for field in dataclasses.fields(found)] == [*figures, "sources"]
    assert found.source_of("cpu_quota") == f"{tree.root}/{V2}/cpu.max"
    assert found.source_of("memory_available") == f"{tree.root}/{V2}/team/memory.max"
    assert found.source_of("host_memory_available") == f"{tree.root}/proc/meminfo"
    assert found.source_of("affinity_cpus") == "os.sched_getaffinity(0)"
    assert found.source_of("max_threads") == "R3NUMBA_MAX_THREADS, from the environment"
    assert found.source_of("num_threads") == "R3NUMBA_NUM_THREADS, not set"
    with pytest.raises(KeyError):
        found.source_of("sources")


def test_topology_record_is_frozen_and_travels(tree: Tree) -> None:
    found = Topology.detect(root=tree.root)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.permitted_cpus = 3  # type: ignore[misc]  # what the test is about
    assert not hasattr(found, "__dict__")
    assert pickle.loads(pickle.dumps(found)) == copy.deepcopy(found) == found
    assert hash(found) == hash(Topology.detect(root=tree.root))
    assert json.loads(json.dumps(dataclasses.asdict(found)))["cpu_quota"] is None
    assert found.source_of("cpu_quota") == "no limit at any of 0 cgroup levels"
    assert found.source_of("memory_available") == "nothing could be read"


def test_record_agrees_with_the_functions() -> None:
    found = Topology.detect()
    assert (found.cpu_count, found.affinity_cpus) == (os.cpu_count(), affinity_cpu_count())
    assert (found.cpu_quota, found.permitted_cpus) == (cgroup_cpu_quota(), permitted_cpus())
    assert 1 <= found.permitted_cpus <= found.affinity_cpus
    assert all(source for _, source in found.sources)


def test_imports_the_standard_library_alone() -> None:
    code = (
        "import os, sys, threading\n"
        "variables, modules = dict(os.environ), set(sys.modules)\n"  # a .pth file of the environment may import a lot
        "import r3numba.topology\n"
        "roots = {name.partition('.')[0] for name in set(sys.modules) - modules}\n"
        "print(roots - set(sys.stdlib_module_names), threading.active_count(), variables == dict(os.environ))"
    )
    assert run_python(code) == "{'r3numba'} 1 True"


def test_doctests() -> None:
    outcome = doctest.testmod(topology)
    assert outcome.failed == 0
    assert outcome.attempted >= 8


# ------------------------------------------------------------------------------------------------------- real kernel
READ_QUOTA = "from r3numba.topology import *\nprint(cgroup_cpu_quota(), permitted_cpus(), Topology.detect().cpu_quota)"


def test_real_v1_quota() -> None:
    _, own = v1_mount("cpu")
    with real_groups("cpu", own, 1) as [group]:
        set_limit(group / "cpu.cfs_period_us", 100000, "cpu")
        set_limit(group / "cpu.cfs_quota_us", 150000, "cpu")
        assert run_inside(group, READ_QUOTA) == "1.5 1 1.5"
    assert not group.exists()


def test_real_v1_quota_of_the_parent() -> None:
    """The process's own group has a wider quota per se (none): the parent's is what throttles it."""
    _, own = v1_mount("cpu")
    with real_groups("cpu", own, 3) as [outer, middle, inner]:
        set_limit(outer / "cpu.cfs_quota_us", 150000, "cpu")
        set_limit(middle / "cpu.cfs_quota_us", 120000, "cpu")
        assert (inner / "cpu.cfs_quota_us").read_text() == "-1\n"
        assert run_inside(inner, READ_QUOTA) == "1.2 1 1.2"


def test_real_v1_memory_limit(tree: Tree) -> None:
    """The kernel's own files, read from where a process in the group would; no process is moved.

    A supervisor may account for this process in its memory group, so that the test leaves it there.
    """
    point, _ = v1_mount("memory")
    limit = 64 << 20
    with real_groups("memory", point, 2) as [outer, inner]:
        set_limit(outer / "memory.limit_in_bytes", limit, "memory")
        tree.own("memory", f"/{outer.name}/{inner.name}").mount("/memory", "memory")
        (tree.root / "memory").symlink_to(point, target_is_directory=True)
        available = cgroup_memory_available(root=tree.root)
        assert available is not None
        assert limit // 2 < available <= limit  # the kernel charges a group for its own bookkeeping
        assert Topology.detect(tree.root).source_of("memory_available").endswith(f"{outer.name}/memory.limit_in_bytes")


def test_real_memory_figures() -> None:
    available = cgroup_memory_available()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert available is None or 0 <= available <= total
