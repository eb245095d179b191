"""Arrays that travel between processes in memory without a name.

A file in /dev/shm stays there when the processes that use it are killed, with the
images in it. Memory without a name is freed with the last process that holds it.
"""

import mmap
import os
from multiprocessing import reduction
from typing import Any

import numpy as np


_SMALL = 1 << 16  # bytes that travel through the pipe


class Unnamed:
    """An array to send: pickled in one process, it is opened in another.

    It is copied into unnamed memory when it is pickled. Small arrays, and all arrays on
    systems other than Linux, travel through the pipe.
    """

    def __init__(self, array: np.ndarray):
        self._array = array

    def open(self) -> np.ndarray:
        """Return the array, once; the process that sent it must still be there."""
        return self._array

    def __reduce__(self) -> tuple[Any, ...]:
        array = np.ascontiguousarray(self._array)
        if array.nbytes < _SMALL or not hasattr(os, "memfd_create"):
            return Unnamed, (array,)
        descriptor = os.memfd_create("tanager")
        try:
            os.ftruncate(descriptor, array.nbytes)
            with mmap.mmap(descriptor, array.nbytes) as memory:
                into = np.frombuffer(memory, array.dtype).reshape(array.shape)
                np.copyto(into, array)
                del into  # the map cannot be closed while it is in use
            handle: Any = reduction.DupFd(descriptor)
        finally:
            os.close(descriptor)
        return _Arrived, (handle, array.dtype, array.shape)


class _Arrived:
    def __init__(self, handle: Any, dtype: np.dtype, shape: tuple[int, ...]):
        self._handle, self._dtype, self._shape = handle, dtype, shape

    def open(self) -> np.ndarray:
        try:
            descriptor = self._handle.detach()
        except (OSError, EOFError) as error:
            raise RuntimeError(
                "a process that reads examples ended unexpectedly, maybe for lack of "
                "memory: run the same command again, with fewer workers"
            ) from error
        try:
            memory = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        return np.frombuffer(memory, self._dtype).reshape(self._shape)
