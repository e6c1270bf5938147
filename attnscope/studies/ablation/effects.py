"""From exact sums to effects: values, intervals and counts by name; over pairs, means and shares of the total."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnscope.core.exact.multiple_tests import benjamini_hochberg
from attnscope.core.exact.running import RunningSums
from attnscope.models.model import Loss
from attnscope.records.ablation import Effect, Effects
from attnscope.studies.ablation.importance import DIRECTIONS
from attnscope.studies.ablation.options import AblateOptions
from attnscope.studies.ablation.reading import PLACES
from attnscope.studies.ablation.sweep import (
    ALL_QUANTITIES,
    Cut,
    Found,
)
from attnscope.studies.running.passes import Pass

Floats = NDArray[np.float64]


def describe_quantities(options: AblateOptions) -> dict[str, dict[str, str]]:
    """What every name in a record means."""
    places = {
        "zero": "without the head",
        "mean": "with the mean of its outputs in the head's place",
        "line": "with the weights that the head's description expects",
        "pattern": "with the head's mean attention pattern",
        "uniform": "with uniform attention",
        "sink": "with all attention on the first token",
        "other": "with the weights that the description of the next head of its layer expects",
    }
    found: dict[str, dict[str, str]] = {}
    for mode in options.modes:
        found |= {
            f"{mode}_l2": {"what": f"relative change of the last hidden states {places[mode]}", "unit": "relative L2"},
            f"{mode}_loss": {"what": f"how much the loss rises {places[mode]}", "unit": "nats"},
            f"{mode}_kl": {"what": f"KL divergence of the predictions {places[mode]}", "unit": "nats"},
        }
        found |= {
            f"{mode}_loss_{place}": {"what": f"how much the loss {of} rises {places[mode]}", "unit": "nats"}
            for place, of in PLACES.items()
        }
    scale = ", divided by the norm of its layer's" if options.by_layer else ""
    unit = "" if options.by_layer else "nats"
    found["importance"] = {"what": f"E |dL/dξ|, ξ the factor on a head's output{scale}", "unit": unit}
    found["sensitivity"] = {
        "what": f"mean |d⟨u, h⟩/dξ| over {DIRECTIONS} random directions u of the last hidden states{scale}", "unit": "",
    }  # fmt: skip
    if {"line", "uniform"} <= set(options.modes):
        found["causal_share"] = {
            "what": "1 - what changes with the weights that the head's description expects / with uniform attention",
            "unit": "",
        }
    found["loss"] = {"what": "negative log-likelihood of a prediction", "unit": "nats"}
    found |= {f"loss_{place}": {"what": f"the same {of}", "unit": "nats"} for place, of in PLACES.items()}
    return found


def effects_of(sums: RunningSums, from_zero: ArrayLike = True) -> list[Effect]:
    """Value, interval and count of each quantity, flattened.

    Args:
        sums: Of the quantities.
        from_zero: Which of them are never below 0, nor their intervals then; broadcast to their shape.
    """
    low, high = sums.interval()
    low = np.where(from_zero, np.maximum(low, 0), low)
    parts: list[list[float]] = [part.ravel().tolist() for part in (sums.ratio(), low, high, sums.total("c"))]
    return [Effect(*row) for row in zip(*parts, strict=True)]


def rows_of(
    sums: RunningSums, mode: str, loss: Loss | None, wanted: Sequence[str] = ALL_QUANTITIES, *, signed: bool = False
) -> list[dict[str, Effect]]:
    """The effects of each row by name; a quantity that needs predictions only where there are some.

    `signed`: rows are differences of effects, which may all be below 0; else losses alone may be, as they may fall.
    """
    flat = effects_of(sums, [not signed and name in ("l2", "kl") for name in ALL_QUANTITIES])
    names = [f"{mode}_{name}" if mode else name for name in wanted]
    kept = names if loss else names[:1]
    step = len(ALL_QUANTITIES)
    return [dict(zip(kept, flat[start : start + step], strict=False)) for start in range(0, len(flat), step)]


def effects_by_cut(found: Pass[Found], cuts: Sequence[Cut], loss: Loss | None) -> dict[Cut, dict[str, Effect]]:
    """The effects of each cut by name."""
    rows = {mode: rows_of(found.done.sums, mode, loss) for mode in {cut.mode for cut in cuts}}
    return {cut: rows[cut.mode][row] for row, cut in enumerate(cuts)}


def causal_share(line: Effect, uniform: Effect, difference: Effect) -> Effect:
    """1 - line / uniform of what changes with a head's line and with uniform attention in its place, text by text.

    The interval is that of a ratio of two paired sums (delta method). NaN where the interval of what changes with
    uniform attention contains 0: then these texts cannot show that the head's choice matters.

    Args:
        line: What changes with the line.
        uniform: What changes with uniform attention.
        difference: What changes more with the line, text by text: it tells how far both rise together.
    """
    if not uniform.low > 0:
        return Effect(math.nan, math.nan, math.nan, uniform.count)
    ratio = line.value / uniform.value
    of_line, of_uniform, of_both = ((one.high - one.low) / 2 for one in (line, uniform, difference))
    together = (of_line**2 + of_uniform**2 - of_both**2) / 2
    half = math.sqrt(max(0.0, of_line**2 + ratio**2 * of_uniform**2 - 2 * ratio * together)) / uniform.value
    return Effect(1 - ratio, 1 - ratio - half, 1 - ratio + half, uniform.count)


def whole_losses(found: Pass[Found]) -> dict[str, Effect]:
    """The loss of the whole model, and that by position."""
    return dict(zip(("loss", *(f"loss_{place}" for place in PLACES)), effects_of(found.done.whole), strict=True))


def add_loss(point: Effects, whole: Effect | None) -> dict[str, Effect]:
    """A point of a curve with the loss itself in place of its rise; the interval is that of the rise."""
    if whole is None:
        return dict(point)
    rise = point["loss"]
    there = Effect(whole.value + rise.value, whole.value + rise.low, whole.value + rise.high, rise.count)
    return {**point, "loss": there}


def estimate_means(values: Floats) -> tuple[list[Effect], Floats]:
    """Means over pairs with 95% intervals, and q-values of being 0; values are (pair, quantity)."""
    sums = RunningSums((values.shape[1],))
    sums.add(values, 1.0)
    above = sums.p_above(0)
    return effects_of(sums, False), benjamini_hochberg(np.minimum(2 * np.minimum(above, 1 - above), 1))


def estimate_shares(values: Floats, total: Floats) -> list[Effect]:
    """Mean values by the mean total effect; intervals by the delta method, for values and totals of the same pairs.

    NaN where the total effect may be 0: then it has no shares.
    """
    whole = estimate_means(total[:, None])[0][0]
    if whole.low <= 0 <= whole.high or not whole.value:
        return [Effect(np.nan, np.nan, np.nan, whole.count)] * values.shape[1]
    ratios = values.mean(0) / whole.value
    beside, _ = estimate_means(values - ratios * total[:, None])
    return [
        Effect(ratio, ratio - half, ratio + half, one.count)
        for ratio, one in zip(ratios.tolist(), beside, strict=True)
        for half in [(one.high - one.low) / 2 / abs(whole.value)]
    ]


def rank_correlation(one: Floats, other: Floats) -> float:
    """Spearman's rank correlation."""
    from scipy.stats import rankdata

    return float(np.corrcoef(rankdata(one), rankdata(other))[0, 1])
