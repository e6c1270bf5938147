"""What tables and figures of a timeline have in common: which heads are shown, how steps and values are written."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from attnscope.errors import amount
from attnscope.records.timeline import Timeline
from attnscope.views.heads_summary import corpus_line, label, printable

PREDICTED = {"causal": "each next token", "masked": "masked tokens", "target": "the decoder's target"}
EVENLY = 5.0
"""Where the last step is more than so many times the middle one, steps are spread as logarithms."""


def moving_heads(timeline: Timeline, measure: str, most: int) -> list[int]:
    """The heads of which a measure changes most between any two checkpoints, in order of their names.

    Of a single checkpoint those with the largest values.
    """
    values = timeline.value[timeline.measures.index(measure)]
    with np.errstate(all="ignore"):
        spread = np.where(np.isfinite(values), values, -np.inf).max(0) - np.where(
            np.isfinite(values), values, np.inf
        ).min(0) * (len(values) > 1)
    spread = np.where(np.isfinite(spread), spread, -np.inf)
    ranked = sorted(range(values.shape[1]), key=lambda place: (-spread[place], place))
    return sorted(place for place in ranked[:most] if np.isfinite(values[:, place]).any())


def step_text(step: int) -> str:
    """A step as it is written: 500, 2k, 143k."""
    return f"{step // 1000}k" if step >= 1000 and step % 1000 == 0 else str(step)


def are_logarithmic(steps: Sequence[int]) -> bool:
    """Whether steps are better told apart by their logarithms, as where they double."""
    later = [step for step in steps if step > 0]
    return len(later) > 4 and later[-1] > EVENLY * later[len(later) // 2]


def thinned(n: int, room: int) -> list[int]:
    """At most `room` of n places, spread evenly, the first and the last among them."""
    if n <= room:
        return list(range(n))
    return sorted({round(place * (n - 1) / (room - 1)) for place in range(room)}) if room > 1 else [n - 1]


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
