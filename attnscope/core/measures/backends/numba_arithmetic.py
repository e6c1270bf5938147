"""Arithmetic over vectors of numbers, compiled into `numba_kernel`: exponentials, logarithms, small products. Ours."""

import numpy as np
from numba import njit

from attnscope.core.measures.backends.numba_vectors import (
    LANES,
    choose,
    exponent,
    fraction,
    fused,
    load,
    put,
    raise_exponent,
    spread,
    store,
    take,
)

LOW = -87.0
"""Where exponentials end: further below the largest, a score has no weight."""


@njit(forceinline=True)
def single(x):
    """A vector of one float32 number."""
    return spread(np.float32(x))


@njit(forceinline=True)
def exponential(x):
    """E to the power of LOW to 0, and 0 for LOW: a power of two, put in by its bits, times a polynomial."""
    magic = single(12582912.0)
    shifted = fused(x, single(1.44269504), magic)
    whole = shifted - magic
    rest = fused(whole, single(-0.6931471805599453), x)
    p = single(1.381454010472719e-3)
    p = fused(p, rest, single(8.368745195609744e-3))
    p = fused(p, rest, single(4.166839079138633e-2))
    p = fused(p, rest, single(1.6666520398318580e-1))
    p = fused(p, rest, single(4.9999993432076767e-1))
    p = fused(p, rest, single(1.0))
    p = fused(p, rest, single(1.0))
    return choose(single(LOW), x, single(0.0), raise_exponent(p, shifted))


@njit(forceinline=True)
def logarithm(x):
    """The natural logarithm of positive float64 numbers, within 1e-11: the series of the inverse hyperbolic tangent."""
    part, power, root = fraction(x), exponent(x), spread(1.4142135623730951)
    power = choose(part, root, power + spread(1.0), power)
    part = choose(part, root, part * spread(0.5), part)
    s = (part - spread(1.0)) / (part + spread(1.0))
    z = s * s
    p = spread(1 / 13)
    p = fused(p, z, spread(1 / 11))
    p = fused(p, z, spread(1 / 9))
    p = fused(p, z, spread(1 / 7))
    p = fused(p, z, spread(1 / 5))
    p = fused(p, z, spread(1 / 3))
    p = fused(p, z, spread(1.0))
    return fused(power, spread(0.6931471805599453), (s + s) * p)


@njit
def lay_by_number(keys, first, step, n_keys, width, scale, n_padded, found):
    """Keys times the scale, (width, padded key), with zeros behind."""
    for k in range(n_keys):
        for i in range(width):
            put(found, i * n_padded + k, take(keys, first + k * step + i) * scale)
    for i in range(width):
        for k in range(n_keys, n_padded):
            put(found, i * n_padded + k, np.float32(0))


@njit
def multiply(rows, row, row_step, n_rows, n_shared, columns, column, column_step, n_columns, product, to, to_step):
    """A product of matrices, (row, shared) times (shared, column), for some too small for BLAS. Arrays are flat.

    Args:
        rows: From `row` on, `row_step` apart.
        row: Where they begin.
        row_step: How far apart they lie.
        n_rows: How many.
        n_shared: How many numbers each has.
        columns: From `column` on, `column_step` apart.
        column: Where they begin.
        column_step: How far apart they lie.
        n_columns: A multiple of LANES.
        product: From `to` on, rows `to_step` apart; overwritten.
        to: Where it begins.
        to_step: How far apart its rows lie.
    """
    zeros = single(0.0)
    for row_before in range(0, n_rows, 4):
        r = max(min(row_before, n_rows - 4), 0)  # the last four again: one alone takes as long as four
        first, there = row + r * row_step, to + r * to_step
        second = first + row_step * min(1, n_rows - 1)
        third, fourth = first + row_step * min(2, n_rows - 1), first + row_step * min(3, n_rows - 1)
        for c in range(0, n_columns, LANES):
            a, b, d, e = zeros, zeros, zeros, zeros
            for i in range(n_shared):
                x = load(columns, column + i * column_step + c)
                a = fused(spread(take(rows, first + i)), x, a)
                b = fused(spread(take(rows, second + i)), x, b)
                d = fused(spread(take(rows, third + i)), x, d)
                e = fused(spread(take(rows, fourth + i)), x, e)
            store(product, there + c, a)
            if n_rows > 1:
                store(product, there + to_step + c, b)
            if n_rows > 2:
                store(product, there + 2 * to_step + c, d)
            if n_rows > 3:
                store(product, there + 3 * to_step + c, e)
