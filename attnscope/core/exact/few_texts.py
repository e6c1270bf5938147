"""The interval of a ratio of sums over texts where few of the texts may carry the sum."""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

Floats = NDArray[np.float64]


def unseen_share(n_texts: ArrayLike, level: float = 0.95) -> Floats:
    """The largest share u of texts of another kind of which so many independent texts may show none.

    (1 - u)^n = (1 - level) / 2: none is shown with the probability with which an end of an interval may miss.

    Args:
        n_texts: How many texts there are, or their effective number; at least 1.
        level: The coverage, between 0 and 1.

    Returns:
        0 to 1.
    """
    with np.errstate(divide="ignore"):  # of no texts at all every kind is unseen
        share: Floats = 1 - ((1 - level) / 2) ** (1 / np.asarray(n_texts, np.float64))
    return share


def interval_of_few_texts(
    ratio: ArrayLike, half: ArrayLike, n_texts: ArrayLike, highest: ArrayLike, level: float = 0.95
) -> tuple[Floats, Floats]:
    """The confidence interval of r = Σs / Σc over texts, 0 <= s, where few texts may carry Σs.

    A head that fires in one text of forty has nearly all of Σs in that text. r ± t·se is wrong there for two reasons,
    and each has an error of its own:

    1. *The texts that were seen vary.* k = (z r / half)² is how many equal and independent events would vary as much:
       about ten where ten texts carry Σs alike. The ends are those of a Poisson mean of which k events were seen
       (Garwood 1936, Biometrika 28), by Byar's approximation (Breslow & Day 1987, Statistical Methods in Cancer
       Research II, section 2.3):

           low  = r / k · k (1 - 1/(9k) - z / (3 √k))³,   and r α^(1/k) for k below 1, α = (1 - level) / 2
           high = r / k · (k + 1) (1 - 1/(9(k + 1)) + z / (3 √(k + 1)))³

       For many events these are r ± half. For few they are skewed, as such sums are.
    2. *A kind of text was not seen.* No spread shows that. A share u of the texts may be of such a kind, see
       `unseen_share`. Then the ratio is (1 - u) r where s is 0 in these texts, and (1 - u) r + u·highest at most.

    The errors are independent. So their distances from r are added as squares on each side, those to lower ends as
    logarithms (MOVER: Zou & Donner 2008, Statistics in Medicine 27). The combination is ours.

    Args:
        ratio: r, at least 0.
        half: t·se of the ratio, as of `RunningSums.interval`.
        n_texts: The effective number of texts, as of `RunningSums.effective_texts`.
        highest: What the ratio is, at most, in texts of a kind that was not seen; no bound where it is below r.
        level: The coverage, between 0 and 1.

    Returns:
        The low end, from 0, and the high end; NaN where `half` is.
    """
    r, half = np.asarray(ratio, np.float64), np.asarray(half, np.float64)
    z, unseen = float(ndtri((1 + level) / 2)), unseen_share(n_texts, level)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        k = np.clip(np.where(r > 0, (z * r / half) ** 2, 1.0), 1e-6, 1e12)
        k = np.where(np.isnan(half), np.nan, k)
        byar = np.maximum(1 - 1 / (9 * k) - z / (3 * np.sqrt(k)), 0.0) ** 3
        fewer = np.where(k < 1, ((1 - level) / 2) ** (1 / k), byar)
        more = (1 + 1 / k) * (1 - 1 / (9 * (k + 1)) + z / (3 * np.sqrt(k + 1))) ** 3
        low = r * np.exp(-np.hypot(np.log(fewer), np.log1p(-unseen)))
    high = r + np.hypot(r * (more - 1), np.maximum(np.asarray(highest) - r, 0.0) * unseen)
    return low, high
