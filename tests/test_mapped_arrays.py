import numpy as np
import pytest

from attnscope.core.exact import mapped_arrays


@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (24, 1000), (7, 11, 130)])
@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_zeros_are_writeable_arrays_of_zeros(shape: tuple[int, ...], dtype: type[np.float64] | type[np.int64]) -> None:
    array = mapped_arrays.zeros(shape, dtype)
    assert array.shape == shape
    assert array.dtype == dtype
    assert array.flags.c_contiguous
    assert not array.any()
    array[...] = 7
    assert (array == 7).all()


def test_large_arrays_lie_outside_the_heap_and_small_ones_in_it() -> None:
    for n, in_heap in ((mapped_arrays.SMALLEST // 8, False), (mapped_arrays.SMALLEST // 8 - 1, True)):
        whole = mapped_arrays.zeros((n,), np.float64)
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        assert whole.flags.owndata == in_heap


def test_copies_are_equal_separate_and_outlive_each_other() -> None:
    given = [np.arange(6.0).reshape(2, 3), np.zeros((0, 5)), np.random.default_rng(0).random((3, 2000)), np.array(2.5)]
    copies = mapped_arrays.copy_together(given)
    for copy, array in zip(copies, given, strict=True):
        assert np.array_equal(copy, array)
        assert not np.shares_memory(copy, array)
    copies[0][:] = -1.0
    assert np.array_equal(copies[2], given[2])
    last = copies[2]
    del copies, copy
    assert np.array_equal(last, given[2])


def test_memory_goes_to_the_next_array_of_its_size_once_no_view_of_it_is_left() -> None:
    n = mapped_arrays.SMALLEST // 8 + 512 * 977  # a size that nothing else has
    first = mapped_arrays.zeros((n,), np.float64)
    first[:] = 3.0
    place, view = first.ctypes.data, first[5:7]
    del first
    second = mapped_arrays.copy_together([np.ones(n)])[0]
    assert second.ctypes.data != place
    assert (view == 3.0).all()
    del view
    third = mapped_arrays.zeros((n,), np.float64)
    assert third.ctypes.data == place
    assert not third.any()
    assert (second == 1.0).all()


def test_copies_of_nothing() -> None:
    assert mapped_arrays.copy_together([]) == []
    assert [copy.shape for copy in mapped_arrays.copy_together([np.zeros((0, 3))])] == [(0, 3)]
