"""What tables and figures of a training have in common: which heads are shown, how steps and values are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import amount
from attnscope.records.training import Training
from attnscope.report.wording import corpus_line, label, printable

PREDICTED = {"causal": "each next token", "masked": "masked tokens", "target": "the decoder's target"}
EVENLY = 5.0
"""Where the last step is more than so many times the middle one, steps are spread as logarithms."""
_MOST = 6


@dataclass(frozen=True, eq=False)
class Series:
    """A quantity over the checkpoints, of heads or of pairs of them.

    Attributes:
        title: Its name, with its unit.
        what: "heads" or "pairs".
        names: The names of these.
        parts: Values and the ends of their intervals, (checkpoint, name, 3).
        limits: Ends of the scale if they are known.
        level: The value by chance, if that is the same for all.
    """

    title: str
    what: str
    names: tuple[str, ...]
    parts: NDArray[np.float64]
    limits: tuple[float, float] | None = None
    level: float | None = None

    @property
    def values(self) -> NDArray[np.float64]:
        """(checkpoint, name)."""
        return self.parts[..., 0]


def series_of(training: Training) -> list[Series]:
    """The quantities that are followed: each measure, and each composition above that of random directions."""
    series = []
    for row, measure in enumerate(training.measures):
        parts = np.stack([training.value[row], training.low[row], training.high[row]], -1)
        facts = training.measure_facts(measure)
        most = 1.0 if np.nanmax(training.value[row], initial=0.0) > 0.5 else 0.5
        limits = (0.0, most) if (facts.low, facts.high) == (0, 1) else None
        uniform = training.uniform[row][np.isfinite(training.uniform[row])]
        level = float(uniform[0]) if len(uniform) and np.ptp(uniform) < 1e-6 else None
        unit, name = printable(facts.unit, 40), label(measure.removesuffix("_nats").removesuffix("_tokens"))
        title = f"{name}, {unit}" if unit and unit != "share" else name
        series.append(Series(title, "heads", training.head_names, parts, limits, level))
    for by in dict.fromkeys(pair.by for pair in training.pairs):
        pairs = [pair for pair in training.pairs if pair.by == by]
        parts = np.full((len(training.checkpoints), len(pairs), 3), np.nan)
        parts[..., 0] = np.stack([pair.excess for pair in pairs], 1)
        names = tuple(training.pair_name(pair) for pair in pairs)
        series.append(Series(f"{by} composition above chance", "pairs", names, parts, level=0.0))
    return series


def find_moving(values: NDArray[np.float64], most: int) -> list[int]:
    """The columns, (checkpoint, column), that change most between any two checkpoints, in their order.

    Of a single checkpoint those with the largest values.
    """
    is_finite = np.isfinite(values)
    with np.errstate(all="ignore"):
        spread = np.where(is_finite, values, -np.inf).max(0)
        spread = spread - np.where(is_finite, values, np.inf).min(0) * (len(values) > 1)
    spread = np.where(np.isfinite(spread), spread, -np.inf)
    ranked = np.argsort(-spread, kind="stable")[:most]
    return sorted(column for column in ranked.tolist() if is_finite[:, column].any())


def are_logarithmic(steps: Sequence[int]) -> bool:
    """Whether steps are better told apart by their logarithms, as where they double."""
    later = [step for step in steps if step > 0]
    return len(later) > 4 and later[-1] > EVENLY * later[len(later) // 2]


def spread_evenly(n: int, room: int) -> list[int]:
    """At most `room` of n places, spread evenly, the first and the last among them."""
    if n <= room:
        return list(range(n))
    return sorted({round(place * (n - 1) / (room - 1)) for place in range(room)}) if room > 1 else [n - 1]


def every_nth(n: int, room: int) -> list[int]:
    """At most `room` of n places, from the first on and all as far apart: what ticks of an axis are."""
    return list(range(0, n, max(1, -(-n // room))))


def since_lines(training: Training) -> list[tuple[str, str]]:
    """Each role, and the heads that have it at the last step with the step since which they do."""
    lines = []
    for role in training.roles:
        steps = training.since(role)
        names = sorted(steps, key=lambda name: (steps[name], training.head_names.index(name)))
        listed = [
            f"{name} from the first" if steps[name] == training.steps[0] else f"{name} since {steps[name]:,}"
            for name in names[:_MOST]
        ]
        listed += [f"and {len(names) - _MOST} more"] if len(names) > _MOST else []
        lines.append((label(role), ", ".join(listed) or "no head at the last step"))
    return lines


def title_line(training: Training) -> str:
    """Such as "13 checkpoints, steps 0 to 600"."""
    n = amount(len(training.checkpoints), "checkpoint")
    first, last = training.steps[0], training.steps[-1]
    return f"{n}, step {first:,}" if first == last else f"{n}, steps {first:,} to {last:,}"


def notes(training: Training) -> list[str]:
    """What a reader must know beside the numbers: one sentence each."""
    lines = [corpus_line(training)]
    if predicted := PREDICTED.get(str(training.options.get("loss"))):
        lines.append(f"predicted: {predicted}")
    if training.pairs:
        lines.append("composition: the share of a pair's norm, less that of random directions, by the weights alone")
    if np.isfinite(training.low).any():
        lines.append("intervals: 95% over texts, of each checkpoint for itself")
    if (training.has_role == 1).any():
        lines.append("some roles rest on few texts, and are tentative")
    if skipped := training.run.get("skipped"):
        lines.append(f"{amount(len(skipped), 'checkpoint')} left out")
    if not training.corpus.get("complete", True):
        lines.append("interrupted: later checkpoints were not measured")
    return [printable(line, 400) for line in lines if line]


def finite_range(values: NDArray[np.float64]) -> tuple[float, float]:
    """The least and the largest finite number; 0 and 1 without any."""
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
