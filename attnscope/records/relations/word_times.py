"""How well lists of heads time words: errors in seconds on recordings that chose none of them. NumPy only."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attnscope.records.ablation import Effect

BEST, UPPER, RANDOM, EVEN = "best", "upper half", "random", "even spacing"
"""How the heads of a list are chosen; even spacing needs none."""


@dataclass(frozen=True)
class TimedList:
    """The error of the word times that one list of heads tells.

    The error of a recording is the mean of |predicted − known start| over its words, in seconds. Each recording counts
    once.

    Attributes:
        by: "best", the most accurate heads of the other half of the recordings; "upper half", all heads of the
            decoder's upper half, as Whisper takes by default; "random", heads drawn anew for each recording; "even
            spacing", no head: all words of a recording last equally long.
        n_heads: How many heads the list has.
        mean: The mean error over recordings.
        median: The median error over recordings, with the interval of its order statistics; NaN below 6 recordings.
        change: The median difference to the upper half's error, recording by recording, with the same kind of
            interval; below 0 = this list is better.
    """

    by: str
    n_heads: int
    mean: float
    median: Effect
    change: Effect


@dataclass(frozen=True)
class WordTimes:
    """How well heads time words on recordings on which they were not chosen.

    Heads are chosen twice: on each half of the recordings for the other one. So every recording is scored once.

    Attributes:
        n_recordings: Recordings that are scored.
        n_words: Their words that are scored. The first word is not: every alignment begins with the recording.
        lists: The lists: the best 1, 2, 3 … heads, random heads, the upper half, and even spacing.
    """

    n_recordings: int
    n_words: int
    lists: tuple[TimedList, ...]

    def require_whole(self) -> None:
        """Refuses errors below 0, and lists without heads."""
        for each in self.lists:
            if each.n_heads < (each.by != EVEN) or min(each.mean, each.median.value) < 0:
                raise ValueError(f"its word times by {each.by!r} heads make no sense")
            if not (math.isfinite(each.mean) and math.isfinite(each.median.value)):
                raise ValueError(f"its word times by {each.by!r} heads are not finite")
