"""What tables and figures of a timeline have in common: which heads are shown, how steps and values are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import amount
from attnscope.records.timeline import Timeline
from attnscope.views.tables.wording import corpus_line, label, printable

PREDICTED = {"causal": "each next token", "masked": "masked tokens", "target": "the decoder's target"}
EVENLY = 5.0
"""Where the last step is more than so many times the middle one, steps are spread as logarithms."""


@dataclass(frozen=True, eq=False)
class Series:
    """A quantity over the checkpoints, of heads or of pairs of them.

    Attributes:
        title: Its name, with its unit.
        what: What it is of, in the plural.
        names: Of what, one by one.
        parts: Values and the ends of their intervals, (checkpoint, name, 3).
        limits: Ends of the scale where they are known.
        level: What it would be by chance, where that is the same for all.
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


def series_of(timeline: Timeline) -> list[Series]:
    """What is followed: each measure, and each composition above that of random directions."""
    found = []
    for row, measure in enumerate(timeline.measures):
        parts = np.stack([timeline.value[row], timeline.low[row], timeline.high[row]], -1)
        facts = timeline.measure_facts(measure)
        most = 1.0 if np.nanmax(timeline.value[row], initial=0.0) > 0.5 else 0.5
        limits = (0.0, most) if (facts.low, facts.high) == (0, 1) else None
        known = timeline.uniform[row][np.isfinite(timeline.uniform[row])]
        level = float(known[0]) if len(known) and np.ptp(known) < 1e-6 else None
        found.append(Series(measure_title(timeline, measure), "heads", timeline.head_names, parts, limits, level))
    for by in dict.fromkeys(pair.by for pair in timeline.pairs):
        pairs = [pair for pair in timeline.pairs if pair.by == by]
        parts = np.full((len(timeline.checkpoints), len(pairs), 3), np.nan)
        parts[..., 0] = np.stack([pair.excess for pair in pairs], 1)
        names = tuple(timeline.pair_name(pair) for pair in pairs)
        found.append(Series(f"{by} composition above chance", "pairs", names, parts, level=0.0))
    return found


def find_moving(values: NDArray[np.float64], most: int) -> list[int]:
    """The columns, (checkpoint, column), that change most between any two checkpoints, in their order.

    Of a single checkpoint those with the largest values.
    """
    with np.errstate(all="ignore"):
        spread = np.where(np.isfinite(values), values, -np.inf).max(0) - np.where(
            np.isfinite(values), values, np.inf
        ).min(0) * (len(values) > 1)
    spread = np.where(np.isfinite(spread), spread, -np.inf)
    ranked = sorted(range(values.shape[1]), key=lambda place: (-spread[place], place))
    return sorted(place for place in ranked[:most] if np.isfinite(values[:, place]).any())


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


def since_lines(timeline: Timeline) -> list[tuple[str, str]]:
    """Each role, and the heads that have it at the last step with the step since which they do."""
    lines = []
    for role in timeline.roles:
        held = timeline.since(role)
        names = sorted(held, key=lambda name: (held[name], timeline.head_names.index(name)))
        shown = ", ".join(f"{name} {_since(timeline, held[name])}" for name in names[:_MOST])
        more = f", and {len(names) - _MOST} more" if len(names) > _MOST else ""
        lines.append((label(role), shown + more if names else "no head at the last step"))
    return lines


def _since(timeline: Timeline, step: int) -> str:
    return "from the first" if step == timeline.steps[0] else f"since {step:,}"


_MOST = 6


def title_line(timeline: Timeline) -> str:
    """Such as "13 checkpoints, steps 0 to 600"."""
    n = amount(len(timeline.checkpoints), "checkpoint")
    first, last = timeline.steps[0], timeline.steps[-1]
    return f"{n}, step {first:,}" if first == last else f"{n}, steps {first:,} to {last:,}"


def notes(timeline: Timeline) -> list[str]:
    """What a reader must know beside the numbers: one sentence each."""
    said = [corpus_line(timeline)]
    if predicted := PREDICTED.get(str(timeline.options.get("loss"))):
        said.append(f"predicted: {predicted}")
    if timeline.pairs:
        said.append("composition: the share of a pair's norm, less that of random directions, by the weights alone")
    if np.isfinite(timeline.low).any():
        said.append("intervals: 95% over texts, of each checkpoint for itself")
    if (timeline.has_role == 1).any():
        said.append("some roles rest on few texts, and are tentative")
    if skipped := timeline.run.get("skipped"):
        said.append(f"{amount(len(skipped), 'checkpoint')} left out")
    if not timeline.corpus.get("complete", True):
        said.append("interrupted: later checkpoints were not measured")
    return [printable(line, 400) for line in said if line]


def measure_title(timeline: Timeline, measure: str) -> str:
    """A measure's name as people read it, with its unit where it has one."""
    unit = printable(timeline.measure_facts(measure).unit, 40)
    name = label(measure.removesuffix("_nats").removesuffix("_tokens"))
    return f"{name}, {unit}" if unit and unit != "share" else name


def finite_range(values: Sequence[float]) -> tuple[float, float]:
    """The least and the largest of numbers that are some; 0 and 1 where there are none."""
    known = [value for value in values if math.isfinite(value)]
    return (min(known), max(known)) if known else (0.0, 1.0)
