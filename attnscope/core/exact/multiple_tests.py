"""p-values of several tests: one for a claim (Simes), and the false discovery rate (Benjamini and Hochberg)."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def simes(p: ArrayLike) -> Floats:
    """One p-value for several tests of one claim: the least n·p_(i) / i of the n p-values in ascending order.

    Simes 1986, Biometrika 73. Valid for independent tests and for positively dependent ones, as tests of one head on
    the same texts are (Sarkar 1998).

    Args:
        p: p-values, 0 to 1; the tests of a claim along the last axis. NaN = no test, not counted in n.

    Returns:
        The p-values, without the last axis; NaN if there is no test.
    """
    ascending = np.sort(np.asarray(p, np.float64), axis=-1)  # NaN last
    n = (~np.isnan(ascending)).sum(-1, keepdims=True)
    # A test that is not there says nothing against.
    combined: Floats = np.where(np.isnan(ascending), np.inf, ascending * n / np.arange(1, ascending.shape[-1] + 1)).min(
        -1
    )
    return np.where(n[..., 0] > 0, combined, np.nan)


def benjamini_hochberg(p: ArrayLike) -> Floats:
    """q-values: the smallest false discovery rate at which each hypothesis is rejected.

    q of the i-th smallest of n p-values is the least n·p_j / j over j >= i (Benjamini & Hochberg 1995; adjusted as in
    Yekutieli & Benjamini 1999). Valid for independent tests and for positively dependent ones.

    Args:
        p: p-values, 0 to 1, of any shape. NaN = no test: it stays NaN and is not counted in n.

    Returns:
        The q-values, in the shape of p.

    Raises:
        ValueError: A p-value is outside 0 .. 1.
    """
    p_values = np.asarray(p, np.float64)
    q = np.full(p_values.shape, np.nan)
    tested = ~np.isnan(p_values)
    values = p_values[tested]
    if ((values < 0) | (values > 1)).any():
        raise ValueError("p-values are between 0 and 1")
    order = np.argsort(values, kind="stable")
    n = len(values)
    stepwise = values[order] * (n / np.arange(1, n + 1))
    adjusted = np.empty(n)
    adjusted[order] = np.minimum(np.minimum.accumulate(stepwise[::-1])[::-1], 1.0)
    q[tested] = adjusted
    return q
