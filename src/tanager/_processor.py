"""The processor and memory of this machine.

Timings and rounding can differ on another.
"""

import functools
import os
import platform
from pathlib import Path


_THREADS = Path("/proc/self/task")
_CONTAINER = Path("/sys/fs/cgroup/memory.max")
_VECTORS = ("sse", "ssse", "avx", "amx", "fma", "f16c", "asimd", "sve", "bf16", "i8mm")


def name() -> str:
    """Return the name of the processor."""
    return _line("model name") or platform.processor() or platform.machine()


def instructions() -> tuple[str, ...]:
    """Return its sets of vector instructions; empty if unknown."""
    flags = (_line("flags") or _line("Features")).split()
    return tuple(sorted({flag for flag in flags if flag.startswith(_VECTORS)}))


def cores() -> int:
    """Return how many cores this process may use; all of them if unknown."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


def share_waited(before: tuple[int, int] | None) -> float:
    """Return how long threads waited for a core since `times`, over how long they ran.

    0 if unknown. On an idle machine it is below 0.1; beside programs that use the other
    cores it is nearly 1.
    """
    after = times()
    if before is None or after is None:
        return 0.0
    ran, waited = (late - early for early, late in zip(before, after, strict=True))
    return max(waited, 0) / max(ran, 1)


def times() -> tuple[int, int] | None:
    """Return for how many ns this process's threads ran, and waited for a core.

    None if unknown: Linux alone tells.
    """
    ran = waited = 0
    try:
        for thread in _THREADS.iterdir():
            each = (thread / "schedstat").read_text().split()
            ran, waited = ran + int(each[0]), waited + int(each[1])
    except (OSError, IndexError, ValueError):
        return None
    return ran, waited


def memory() -> int:
    """Return the bytes of memory that this process may use, in a container its own."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if _CONTAINER.exists() and (limit := _CONTAINER.read_text().strip()).isdigit():
        total = min(total, int(limit))
    return total


@functools.cache
def _line(field: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == field:
            return value.strip()
    return ""
