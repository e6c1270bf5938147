"""The interval of a ratio of sums over texts, for sums that a few of the texts may dominate."""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

Floats = NDArray[np.float64]


def unseen_share(n_texts: ArrayLike) -> Floats:
    """The largest share u, 0 to 1, of all texts that may be of a kind which n independent texts do not show.

    u solves (1 - u)^n = 2.5%, the probability with which one end of a 95% interval may miss. `n_texts` is at least 1,
    and may be an effective number.
    """
    with np.errstate(divide="ignore"):  # of no texts at all every kind is unseen
        share: Floats = 1 - 0.025 ** (1 / np.asarray(n_texts, np.float64))
    return share


def allow_for_unseen(
    ratio: ArrayLike, low: ArrayLike, high: ArrayLike, unseen: ArrayLike, lowest: ArrayLike, highest: ArrayLike
) -> tuple[Floats, Floats]:
    """An interval that also allows for texts of an unseen kind.

    If they hold a share u of the counts, as of `unseen_share`, the ratio is between (1 - u) r + u·lowest and
    (1 - u) r + u·highest, the least and largest ratio in such texts. This error and that of the ends `low` and `high`,
    which know of no unseen kind, are independent. So their distances from r are added as squares on each side (MOVER:
    Zou & Donner 2008, Statistics in Medicine 27). `lowest` is ignored if it is above r, `highest` if it is below.

    Returns:
        The low and the high end.
    """
    r, u = np.asarray(ratio, np.float64), np.asarray(unseen, np.float64)
    below = np.hypot(r - np.asarray(low), u * np.maximum(r - np.asarray(lowest), 0.0))
    above = np.hypot(np.asarray(high) - r, u * np.maximum(np.asarray(highest) - r, 0.0))
    return r - below, r + above


def interval_of_few_texts(
    ratio: ArrayLike, half: ArrayLike, n_texts: ArrayLike, highest: ArrayLike
) -> tuple[Floats, Floats]:
    """The 95% confidence interval of r = Σs / Σc over texts, 0 <= s, if a few texts may dominate Σs.

    If a head fires in one text of forty, that text holds nearly all of Σs. Then r ± t·se misses two errors:

    1. *The texts that were seen vary.* k = (z r / half)² equal and independent events would vary as much: k is about
       ten if ten texts share Σs equally. The ends are the limits of a Poisson mean after k observed events (Garwood
       1936, Biometrika 28), by Byar's approximation (Breslow & Day 1987, Statistical Methods in Cancer Research II,
       section 2.3):

           low  = r / k · k (1 - 1/(9k) - z / (3 √k))³,   and r α^(1/k) for k below 1, α = 2.5%
           high = r / k · (k + 1) (1 - 1/(9(k + 1)) + z / (3 √(k + 1)))³

       For many events these are r ± half. For few they are skewed, as such sums are.
    2. *A kind of text was not seen.* The spread of the others cannot show this. A share u of all texts may be of such a
       kind (`unseen_share`). Then the ratio is between (1 - u) r, if s is 0 in them, and (1 - u) r + u·highest.

    The errors are independent, so their distances from r are added as squares on each side; at the low end, as
    logarithms (MOVER: Zou & Donner 2008, Statistics in Medicine 27). The combination is ours.

    Args:
        ratio: r, at least 0.
        half: t·se of the ratio, as of `RunningSums.interval`.
        n_texts: The effective number of texts, as of `RunningSums.effective_texts`.
        highest: The largest ratio in texts of an unseen kind; ignored if it is below r.

    Returns:
        The low end (at least 0) and the high end; NaN if `half` is NaN.
    """
    r, half = np.asarray(ratio, np.float64), np.asarray(half, np.float64)
    z, unseen = float(ndtri(0.975)), unseen_share(n_texts)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        k = np.clip(np.where(r > 0, (z * r / half) ** 2, 1.0), 1e-6, 1e12)
        k = np.where(np.isnan(half), np.nan, k)
        byar = np.maximum(1 - 1 / (9 * k) - z / (3 * np.sqrt(k)), 0.0) ** 3
        fewer = np.where(k < 1, 0.025 ** (1 / k), byar)
        more = (1 + 1 / k) * (1 - 1 / (9 * (k + 1)) + z / (3 * np.sqrt(k + 1))) ** 3
        low = r * np.exp(-np.hypot(np.log(fewer), np.log1p(-unseen)))
        high = allow_for_unseen(r, low, r * more, unseen, r, highest)[1]
    return low, high
