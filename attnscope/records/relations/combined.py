"""What several heads reach together on a relation, on texts on which nothing was chosen. NumPy only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from attnscope.records.frame.checks import SHARE

NAMES = ("best head", "mean", "regression")
"""What is compared, in this order."""


@dataclass(frozen=True)
class Score:
    """How often something is right, and by how much more often than the best head.

    Attributes:
        value: Share of links that are right; of undirected ones the mean precision over texts.
        low: Lower end of its 95% interval.
        high: Upper end.
        gain: How much more than the best head's on the same texts, 0 for that head itself.
        gain_low: Lower end of its 95% interval, text by text.
        gain_high: Upper end.
    """

    value: float = field(metadata=SHARE)
    low: float = field(metadata=SHARE)
    high: float = field(metadata=SHARE)
    gain: float
    gain_low: float
    gain_high: float


class _Scored:
    """What has a score for each of NAMES."""

    best_head: Score
    mean: Score
    regression: Score | None

    @property
    def scores(self) -> tuple[Score | None, ...]:
        """In the order of NAMES."""
        return self.best_head, self.mean, self.regression


@dataclass(frozen=True)
class Precision(_Scored):
    """How precise predicted pairs are, the L / cut of the largest scores of a text of L words.

    Attributes:
        separation: Only pairs count whose words are so many tokens apart, or more.
        cut: What L is divided by.
        chance: The share of all such pairs that are linked.
        best_head: That of the best head.
        mean: Of the mean of the chosen heads.
        regression: Of the regression; None = there is none.
        below: Only pairs count whose words are fewer tokens apart than this; None = however many.
        range: What these pairs are called: "short", "medium", "long", or "all".
    """

    separation: int
    cut: int
    chance: float = field(metadata=SHARE)
    best_head: Score
    mean: Score
    regression: Score | None = None
    below: int | None = None
    range: str = "all"


@dataclass(frozen=True)
class Combined(_Scored):
    """A relation by several heads.

    Heads, how many of them, and the regression come from the half that heads are chosen on; scores are of the other.

    Attributes:
        relation: Its name.
        heads: The heads whose mean is taken, (layer, head), the best first.
        tried: Numbers of heads that were tried, and what the mean of so many reaches on the half for choosing.
        n_scored: Links of the other half; of undirected links its texts.
        n_texts_scored: Its texts.
        chance: What picking any word, or any pair, reaches.
        best_head: What the best head reaches.
        mean: What the mean of the heads reaches.
        regression: What a logistic regression over all heads reaches; None = it was not fitted.
        coefficients: Its coefficients that are not 0, (layer, head, coefficient), the largest by size first.
        n_texts_fitted: Texts that it was fitted on.
        precisions: Of undirected links in each range of separation and at each cut.
    """

    relation: str
    heads: tuple[tuple[int, int], ...]
    tried: tuple[tuple[int, float], ...]
    n_scored: int
    n_texts_scored: int
    chance: float = field(metadata=SHARE)
    best_head: Score
    mean: Score
    regression: Score | None = None
    coefficients: tuple[tuple[int, int, float], ...] = ()
    n_texts_fitted: int = 0
    precisions: tuple[Precision, ...] = ()

    def rows(self) -> Iterator[dict[str, Any]]:
        """For each combination, and of undirected links for each range and cut, what a table has of it."""
        groups: list[tuple[dict[str, Any], Combined | Precision]] = [
            ({"range": each.range, "separation": each.separation, "below": each.below, "cut": each.cut}, each)
            for each in self.precisions
        ]
        for pairs, scored in groups or [({}, self)]:
            for name, score in zip(NAMES, scored.scores, strict=True):
                if score is not None:
                    shares = {"accuracy": score.value, "low": score.low, "high": score.high, "baseline": scored.chance}
                    more = {"combination": name, "n_heads": len(self.heads) if name == "mean" else None}
                    gains = {"gain": score.gain, "gain_low": score.gain_low, "gain_high": score.gain_high}
                    yield {"relation": self.relation, "n_scored": self.n_scored, **shares, **more, **pairs, **gains}
