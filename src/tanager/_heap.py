"""Keep freed memory for the next step instead of giving it back to the system."""

import ctypes
import os
import sys
from typing import Any


_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_LARGEST = 2**31 - 1

kept = False
"""Whether `keep_freed_memory` was asked for in this process, and could be had."""


def keep_freed_memory() -> bool:
    """Tell glibc's allocator to keep what is freed; return whether it could be told.

    XLA on a CPU allocates a program's temporary memory anew at every call. Blocks above
    32 MiB glibc maps and unmaps each time, so that every step pays for the system to
    clear and map each page again: 10 % of a step of WRN-16-4 at a physical batch of 32,
    20 % of ViT-Tiny's at 16. glibc keeps blocks above 64 MiB for the main thread alone,
    so JAX is told to run a CPU's programs on the thread that calls them.

    The setting holds for the whole process, whose memory then stays at its peak: it is
    the command line's to choose, not a library's. To be called before JAX has looked
    for devices. The same without tanager:
    ``MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=2147483647 python …`` and
    ``jax.config.update("jax_cpu_enable_async_dispatch", False)``.
    """
    global kept
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    kept = all([mallopt(_M_MMAP_MAX, 0), mallopt(_M_TRIM_THRESHOLD, _LARGEST)])
    if "jax" in sys.modules:
        run_in_place()
    return kept


def run_in_place() -> None:
    """Tell JAX, if freed memory is kept, to run programs where it is.

    Not with several devices of one CPU, which would wait for each other.
    """
    import jax

    config: Any = jax.config
    flags = os.environ.get("XLA_FLAGS", "")
    several = "host_platform_device_count" in flags or config.jax_num_cpu_devices > 1
    if kept and not several:
        config.update("jax_cpu_enable_async_dispatch", False)
