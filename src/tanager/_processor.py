"""The processor of this machine: timings and rounding can differ on another."""

import functools
import os
import platform
from pathlib import Path


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
