"""What a figure depends on: CPU, memory, huge pages, versions. Standard library alone; nothing heavy is imported."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any, Final

from .. import __version__
from ..topology import permitted_cpus

PACKAGES: Final = ("numpy", "numba", "llvmlite", "torch", "tbb")
HUGE_PAGES: Final = "/sys/kernel/mm/transparent_hugepage/enabled"


def package_versions() -> dict[str, str | None]:
    """Return the installed version of each package that matters, None where it is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version(), "r3numba": __version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def cpu_model(cpuinfo: str | os.PathLike[str] = "/proc/cpuinfo") -> str:
    """Return the CPU's name as the kernel gives it, else what Python knows."""
    try:
        for line in Path(cpuinfo).read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model") and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def huge_page_setting(path: str | os.PathLike[str] = HUGE_PAGES) -> str | None:
    """Return the word in brackets of the kernel's setting: always, madvise or never; None where it has none."""
    try:
        text = Path(path).read_text()
    except OSError:
        return None
    begin, end = text.find("["), text.find("]")
    return text[begin + 1 : end] if 0 <= begin < end else None


def memory_bytes() -> int | None:
    """Return the host's memory in bytes, None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def host_record() -> dict[str, Any]:
    """Return all of it, for JSON and for the head of a report."""
    return {
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "permitted_cpus": permitted_cpus(),
        "memory_bytes": memory_bytes(),
        "huge_pages": huge_page_setting(),
        "system": f"{platform.system()} {platform.release()}",
        "versions": package_versions(),
    }
