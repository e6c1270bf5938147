"""From sums to effects: values, intervals and counts by name; over pairs, means and shares of the total."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnscope.core.sums import RunningSums
from attnscope.models.model import Loss
from attnscope.records.ablation import Effect
from attnscope.studies.ablation.importance import DIRECTIONS
from attnscope.studies.ablation.options import AblateOptions
from attnscope.studies.ablation.reading import PLACES
from attnscope.studies.ablation.sweep import ALL_QUANTITIES, Cut, CutPart
from attnscope.studies.run import Run

Floats = NDArray[np.float64]


def describe_quantities(options: AblateOptions) -> dict[str, dict[str, str]]:
    """What every name in a record means."""
    instead = {
        "zero": "without the head",
        "mean": "with the mean of its outputs in the head's place",
    }
    quantities: dict[str, dict[str, str]] = {}
    for mode in options.modes:
        quantities |= {
            f"{mode}_l2": {"what": f"relative change of the last hidden states {instead[mode]}", "unit": "relative L2"},
            f"{mode}_loss": {"what": f"how much the loss rises {instead[mode]}", "unit": "nats"},
            f"{mode}_kl": {"what": f"KL divergence of the predictions {instead[mode]}", "unit": "nats"},
        }
        quantities |= {
            f"{mode}_loss_{position}": {"what": f"how much the loss {which} rises {instead[mode]}", "unit": "nats"}
            for position, which in PLACES.items()
        }
    scale = ", divided by the norm of its layer's" if options.by_layer else ""
    unit = "" if options.by_layer else "nats"
    quantities["importance"] = {"what": f"E |dL/dξ|, ξ the factor on a head's output{scale}", "unit": unit}
    quantities["sensitivity"] = {
        "what": f"mean |d⟨u, h⟩/dξ| over {DIRECTIONS} random directions u of the last hidden states{scale}", "unit": "",
    }  # fmt: skip
    quantities["loss"] = {"what": "negative log-likelihood of a prediction", "unit": "nats"}
    quantities |= {
        f"loss_{position}": {"what": f"the same {which}", "unit": "nats"} for position, which in PLACES.items()
    }
    return quantities


def effects_of(sums: RunningSums, from_zero: ArrayLike = True) -> list[Effect]:
    """Value, interval and count of each quantity, flattened.

    `from_zero` says which of them, and so their intervals, are never below 0; it is broadcast to their shape.
    """
    low, high = sums.interval()
    low = np.where(from_zero, np.maximum(low, 0), low)
    parts: list[list[float]] = [part.ravel().tolist() for part in (sums.ratio(), low, high, sums.total("c"))]
    return [Effect(*row) for row in zip(*parts, strict=True)]


def rows_of(sums: RunningSums, mode: str, loss: Loss | None) -> list[dict[str, Effect]]:
    """The effects of each row by name; without a loss, only what needs no predictions."""
    # Losses may fall; the others are never below 0.
    flat = effects_of(sums, [name in ("l2", "kl") for name in ALL_QUANTITIES])
    names = [f"{mode}_{name}" for name in ALL_QUANTITIES]
    measured = names if loss else names[:1]
    step = len(ALL_QUANTITIES)
    return [dict(zip(measured, flat[start : start + step], strict=False)) for start in range(0, len(flat), step)]


def effects_by_cut(result: Run[CutPart], cuts: Sequence[Cut], loss: Loss | None) -> dict[Cut, dict[str, Effect]]:
    """The effects of each cut by name."""
    rows = {mode: rows_of(result.done.sums, mode, loss) for mode in {cut.mode for cut in cuts}}
    return {cut: rows[cut.mode][row] for row, cut in enumerate(cuts)}


def whole_losses(result: Run[CutPart]) -> dict[str, Effect]:
    """The loss of the whole model, and that by position."""
    return dict(zip(("loss", *(f"loss_{position}" for position in PLACES)), effects_of(result.done.whole), strict=True))
