"""Arrays in memory mappings of their own, outside the C library's heap, for what stays while large arrays come and go.

In the heap such an array comes to lie in the gap that a larger one has left, which the next large one then does not
fit: the heap grows, though nothing in it does. Batches of 40 short texts took 50 MB more so (MiniLM, 450 MB in all).
"""

import math
import mmap
import sys
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", np.float64, np.int64)

SMALLEST = 32_768
"""Bytes below which an array stays in the heap: a mapping takes whole pages, and a call of the system."""


def zeros(shape: tuple[int, ...], dtype: type[Number]) -> NDArray[Number]:
    """An array of zeros, writeable, C-contiguous.

    Args:
        shape: Its shape.
        dtype: Its type.
    """
    size = math.prod(shape)
    if size * np.dtype(dtype).itemsize < SMALLEST:
        return np.zeros(shape, dtype)
    # The array holds the mapping, which goes when the array does.
    return np.frombuffer(_mapping(size * np.dtype(dtype).itemsize), dtype, count=size).reshape(shape)


def _mapping(n_bytes: int) -> mmap.mmap:
    if sys.platform == "linux":
        # All pages at once: one by one they take twice as long as what is written to them.
        return mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    return mmap.mmap(-1, n_bytes)


def copy_together(arrays: Sequence[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """Copies of some arrays, in one piece of memory that is there as long as one of them is."""
    whole = zeros((sum(array.size for array in arrays),), np.float64)
    found, start = [], 0
    for array in arrays:
        copy = whole[start : start + array.size].reshape(array.shape)
        copy[...] = array
        found.append(copy)
        start += array.size
    return found
