"""How often the intervals of `patch` hold the truth: means over few pairs, and shares of a weak total.

    python -m benchmarks.patch_intervals [--draws 10000] [--seed 0]

Pairs are simulated: their totals have a standard deviation of 1 and a mean of 0.05 to 4. Distributions are normal or
exponential, with the long tail on either side of the mean. Effects have a true share of 0.3. They are the same for all
pairs, independent of the totals, larger where totals are larger, or smaller there.

A cell fails if fewer intervals than 90% of those shown hold the share, and if so few come by chance with a probability
below 5% in any of all cells (Bonferroni). It needs no torch. The last line is JSON.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit
from scipy.stats import binom

from attnscope.core.pairs import min_total_strength, pair_means, shares_of_total

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, tuple[int, int]], Floats]

SHARE = 0.3
N_PAIRS = (5, 10, 20, 50)
STRENGTHS = (0.05, 0.1, 0.13, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)
"""The mean total by its standard deviation."""

DISTRIBUTIONS: dict[str, Draw] = {
    "normal": lambda chance, shape: chance.standard_normal(shape),
    "exponential": lambda chance, shape: chance.exponential(size=shape) - 1,
    "exponential, tail to 0": lambda chance, shape: 1 - chance.exponential(size=shape),
}
"""Values with a mean of 0 and a standard deviation of 1."""

EFFECTS: dict[str, Callable[[float, Floats, Floats], Floats]] = {
    "the same": lambda mean, around, other: np.full_like(around, SHARE * mean),
    "independent": lambda mean, around, other: SHARE * mean + 0.3 * other,
    "rising": lambda mean, around, other: SHARE * (mean + around) + 0.2 * other,
    "falling": lambda mean, around, other: SHARE * (mean - around),
}
"""Effects, from the mean total, the totals around it, and values that are independent of them."""


def simulate(chance: np.random.Generator, n_draws: int) -> Iterator[dict[str, Any]]:
    """Yield each cell: how many shares are shown, and how many of their intervals hold the true share."""
    for n, (distribution, draw), (kind, make), strength in product(
        N_PAIRS, DISTRIBUTIONS.items(), EFFECTS.items(), STRENGTHS
    ):
        around, other = draw(chance, (n, n_draws)), draw(chance, (n, n_draws))
        share, low, high = shares_of_total(make(strength, around, other), strength + around)
        is_shown = np.isfinite(share)
        n_held = int((is_shown & (low <= SHARE) & (high >= SHARE)).sum())
        cell = {"pairs": n, "distribution": distribution, "effects": kind, "strength": strength}
        yield {**cell, "shown": int(is_shown.sum()), "held": n_held}


def coverage_of_means(chance: np.random.Generator, n_draws: int) -> dict[str, dict[str, float]]:
    """Return how often intervals hold a mean: those of `patch`, and those with n - 1 degrees of freedom."""
    found = {}
    for name, n in product(("normal", "exponential"), N_PAIRS):
        values = DISTRIBUTIONS[name](chance, (n, n_draws))
        mean, low, high, _ = pair_means(values)
        usual = np.abs(mean) <= -stdtrit(n - 1, 0.025) * values.std(0, ddof=1) / np.sqrt(n)
        held = (low <= 0) & (high >= 0)
        found[f"{name}, {n} pairs"] = {"patch": float(held.mean()), "n - 1 degrees": float(usual.mean())}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = np.random.default_rng(arguments.seed)
    cells = list(simulate(chance, arguments.draws))
    shown = [cell for cell in cells if cell["shown"]]
    for cell in shown:
        # The probability that so few are held if 90% are.
        cell["p"] = float(binom.cdf(cell["held"], cell["shown"], 0.9))
    failed = [cell for cell in shown if cell["p"] < 0.05 / len(cells)]
    often = [cell for cell in shown if cell["shown"] >= arguments.draws / 100]
    worst = sorted(often, key=lambda cell: cell["held"] / cell["shown"])[:5]
    for cell in [*failed, *worst, *sorted(shown, key=lambda cell: cell["p"])[:10]]:
        print(cell)
    report = {
        "benchmark": "patch_intervals",
        "draws": arguments.draws,
        "cells": len(cells),
        "cells_with_shares": len(shown),
        "failed": failed,
        "worst_where_1_percent_are_shown": worst,
        "weakest_total": {n: min_total_strength(n) for n in N_PAIRS},
        "means": coverage_of_means(chance, arguments.draws),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
