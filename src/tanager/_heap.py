"""Keep freed memory for the next step instead of giving it back to the system."""

import ctypes
import os
import sys
from typing import Any


_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_LARGEST = 2**31 - 1

_active = False
"""Whether `keep_freed_memory` has succeeded in this process."""


def keep_freed_memory() -> bool:
    """Make glibc's allocator keep freed memory; return whether it was possible.

    XLA on a CPU allocates the temporary memory of a program again at every call. glibc
    maps and unmaps blocks above 32 MiB each time, so the system clears and maps their
    pages in every step: 10 % of a step of WRN-16-4 at a physical batch of 32, 20 % of
    ViT-Tiny's at 16. glibc keeps blocks above 64 MiB for the main thread only, so JAX
    then runs programs on the thread that calls them.

    The setting is for the whole process, whose memory stays at its peak; so the command
    line sets it, and the library does not. Call it before JAX looks for devices. The
    same without tanager:
    ``MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=2147483647 python …`` and
    ``jax.config.update("jax_cpu_enable_async_dispatch", False)``.
    """
    global _active
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    _active = all([mallopt(_M_MMAP_MAX, 0), mallopt(_M_TRIM_THRESHOLD, _LARGEST)])
    if "jax" in sys.modules:
        run_in_place()
    return _active


def run_in_place() -> None:
    """Make JAX run programs on the calling thread, if freed memory is kept.

    Not with several devices on one CPU, which would wait for each other.
    """
    import jax

    config: Any = jax.config
    flags = os.environ.get("XLA_FLAGS", "")
    several = "host_platform_device_count" in flags or config.jax_num_cpu_devices > 1
    if _active and not several:
        config.update("jax_cpu_enable_async_dispatch", False)
