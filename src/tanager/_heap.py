"""Keep freed memory for the next step instead of giving it back to the system."""

import ctypes


_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc's allocator to keep what is freed; return whether it could be told.

    XLA on a CPU allocates a program's temporary memory anew at every call. Blocks above
    32 MiB glibc maps and unmaps each time, so that every step pays for the system to
    clear and map each page again. With the setting that ends for blocks up to 64 MiB;
    larger ones are kept for the main thread only, as glibc has it, and XLA allocates on
    others (all threads on one heap kept them too, and made a WRN-16-4 15 % slower).

    The setting holds for the whole process, whose memory then stays at its peak: it is
    the command line's to choose, not a library's. The same without tanager:
    ``MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=2147483647 python …``.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    kept = [mallopt(_M_MMAP_MAX, 0), mallopt(_M_TRIM_THRESHOLD, _LARGEST)]
    return all(kept)
