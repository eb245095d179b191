"""Keep freed memory for the next step instead of giving it back to the system."""

import ctypes
import gc
import os
import sys
from typing import Any


_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_LARGEST = 2**31 - 1

_active = False
"""Whether `keep_freed_memory` has succeeded in this process."""


def keep_freed_memory() -> bool:
    """Make glibc's allocator keep freed memory; return whether this is glibc.

    XLA on a CPU allocates a program's temporary memory at every call. glibc maps and
    unmaps blocks above 32 MiB each time, and the system clears every page again: 10 %
    of a step of WRN-16-4 at a physical batch of 32, 20 % of ViT-Tiny's at 16. glibc
    keeps blocks above 64 MiB for the main thread alone, so JAX must run a CPU's
    programs on the thread that calls them: see `run_in_place`.

    The setting holds for the whole process, whose memory then stays at its peak, so
    the command makes it and importing the library does not: other programs call
    `tanager.keep_memory`.
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


def give_back() -> None:
    """Give what ended runs left back to the system, where freed memory is kept.

    What comes next may need larger blocks, which do not fit into theirs.
    """
    if _active:
        gc.collect()  # a run is a circle of objects
        ctypes.CDLL(None).malloc_trim(0)


def keeps_freed() -> bool:
    """Return whether this process keeps its freed memory."""
    return _active


def run_in_place() -> None:
    """Make JAX run a CPU's programs on the thread that calls them, if memory is kept.

    A command calls this once it needs JAX, before it looks for devices. Several devices
    of one CPU would wait for each other, so with them nothing is changed.
    """
    import jax

    config: Any = jax.config
    flags = os.environ.get("XLA_FLAGS", "")
    several = "host_platform_device_count" in flags or config.jax_num_cpu_devices > 1
    if _active and not several:
        config.update("jax_cpu_enable_async_dispatch", False)
