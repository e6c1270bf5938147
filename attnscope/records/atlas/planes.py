"""Queries, keys and outputs of heads as points: what an atlas shows of them. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from attnscope.records.frame.checks import shaped

N_DIRECTIONS = 3
"""How many directions of each head are kept."""

_BY_DIRECTION = shaped(f"{N_DIRECTIONS}")

PLACE_GROUPS = 16
"""Into how many groups of equal size tokens are divided by their places, to tell what of a direction goes by place."""

STEPS = 127
"""How many steps coordinates have on either side of 0."""

Side = Literal["queries", "keys", "outputs"]
SIDES: tuple[Side, ...] = ("queries", "keys", "outputs")

TokenKind = Literal["word", "capitalised", "piece", "number", "punctuation"]
"""What tokens are by their letters; a piece is a part of a word that is not its first."""


@dataclass(frozen=True)
class PlaneToken:
    """A sampled token.

    Attributes:
        kind: The kind of attention that it is sampled for.
        text: The text's number in the corpus.
        place: Its place in the text, or in the chunk of a long one.
        label: Its label.
        what: What it is by its letters.
        excerpt: The source's own characters around it; of some tokenizers labels.
        start: Its first character in the excerpt.
        stop: Its last + 1.
    """

    kind: str
    text: int
    place: int
    label: str
    what: TokenKind
    excerpt: str
    start: int
    stop: int

    def require_whole(self) -> None:
        """Refuses a token that is not in its excerpt."""
        if not 0 <= self.start <= self.stop <= len(self.excerpt):
            raise ValueError("a sampled token stands beside its text")


def share_by_place(coordinates: NDArray[np.float64], places: NDArray[np.int64]) -> NDArray[np.float64]:
    """Of coordinates of tokens, (token, direction), the share of variance between groups of neighbouring places.

    Returns:
        (direction,), 0 to 1; NaN where there are fewer than 8 tokens for each group, or no variance.
    """
    if len(places) < 8 * PLACE_GROUPS:
        return np.full(coordinates.shape[1], np.nan)
    centred = coordinates - coordinates.mean(0)
    groups = np.array_split(centred[np.argsort(places, kind="stable")], PLACE_GROUPS)
    between = sum(len(group) * group.mean(0) ** 2 for group in groups)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares: NDArray[np.float64] = between / (centred**2).sum(0)
    return shares


@dataclass(frozen=True)
class Plane:
    """What is known of a head's points.

    Attributes:
        explained: Of each direction the share of the variance of the scores of all sampled queries with all sampled
            keys; NaN where they do not vary.
        common: Of each direction the share that all queries have in common: 1 = all look for the same keys along it.
        by_place: Of each direction how much of its keys' variance lies between `PLACE_GROUPS` groups of tokens of
            neighbouring places in their texts; NaN with too few tokens.
        explained_outputs: Of each component of the outputs its share of their variance.
        largest: What a code of `STEPS` is worth in queries and keys.
        largest_output: Likewise of outputs.
        d_head: Width of queries and keys.
        turned: "never": no positions turn queries and keys; "before": these are as they were before rotary positions,
            so that scores are those of two tokens at one place; "after": they could not be seen before.
    """

    explained: tuple[float, ...] = field(metadata=_BY_DIRECTION)
    common: tuple[float, ...] = field(metadata=_BY_DIRECTION)
    by_place: tuple[float, ...] = field(metadata=_BY_DIRECTION)
    explained_outputs: tuple[float, ...] = field(metadata=_BY_DIRECTION)
    largest: float
    largest_output: float
    d_head: int
    turned: str


@dataclass(frozen=True, eq=False)
class Points:
    """The points of one head.

    Attributes:
        tokens: The sampled tokens.
        plane: What is known of them.
        queries: The leading directions, (token, direction), float32. Over all directions, the products of a query and a
            key sum to their score, up to what is the same for all keys.
        keys: Likewise.
        outputs: (token, component), float32.
    """

    tokens: tuple[PlaneToken, ...]
    plane: Plane
    queries: NDArray[np.float32]
    keys: NDArray[np.float32]
    outputs: NDArray[np.float32]
