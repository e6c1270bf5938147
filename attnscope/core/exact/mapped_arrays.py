"""Arrays in memory mappings of their own, outside the C library's heap, for data that outlives large arrays.

In the heap such an array would lie in the gap of a larger one, and the next large one then does not fit: the heap
grows, though nothing in it does. Batches of 40 short texts took 50 MB more (MiniLM, 450 MB in all).
"""

import contextlib
import math
import mmap
import sys
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", np.float64, np.int64)

SMALLEST = 32_768
"""Bytes below which an array stays in the heap: a mapping takes whole pages, and a call of the system."""

LARGEST_SPARE = 2**20
"""Bytes up to which a mapping waits for the next array of its size: making its pages takes longer than filling them."""

_SPARE: deque[mmap.mmap] = deque(maxlen=12)


def zeros(shape: tuple[int, ...], dtype: type[Number]) -> NDArray[Number]:
    """An array of zeros of a shape and dtype, writeable, C-contiguous."""
    array = _empty(math.prod(shape), dtype).reshape(shape)
    array[...] = 0
    return array


class _Lent:
    """A mapping that an array lies in; once no array does, it waits for the next one of its size."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self.__array_interface__ = np.frombuffer(mapping, np.uint8).__array_interface__

    def __del__(self, spare: deque[mmap.mmap] = _SPARE) -> None:
        if len(self._mapping) <= LARGEST_SPARE:
            spare.append(self._mapping)


def _empty(size: int, dtype: type[Number]) -> NDArray[Number]:
    n_bytes = size * np.dtype(dtype).itemsize
    return np.empty(size, dtype) if n_bytes < SMALLEST else np.asarray(_Lent(_mapping(n_bytes))).view(dtype)


def _mapping(n_bytes: int) -> mmap.mmap:
    for spare in [*_SPARE]:
        if len(spare) == n_bytes:
            with contextlib.suppress(ValueError):  # another thread has just taken it
                _SPARE.remove(spare)
                return spare
    if sys.platform == "linux":
        # All pages at once: one by one they take twice as long as what is written to them.
        return mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    return mmap.mmap(-1, n_bytes)


def copy_together(arrays: Sequence[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """Copies of some arrays, in one piece of memory that stays as long as one of them does."""
    whole = _empty(sum(array.size for array in arrays), np.float64)
    copies, start = [], 0
    for array in arrays:
        copy = whole[start : start + array.size].reshape(array.shape)
        copy[...] = array
        copies.append(copy)
        start += array.size
    return copies
