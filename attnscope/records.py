"""Frozen results: what was measured, on what, by what. NumPy only; they load and draw without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEATMAP_SCHEMA = "attnscope.heatmap/1"


@dataclass(frozen=True, eq=False)
class Tokens:
    """A tokenised text, token by token.

    Attributes:
        text: The text that was tokenised (of a pair: the first).
        ids: The tokenizer's numbers, (token,), int64.
        labels: What to show for each token: pieces as the tokenizer writes them (`##ing`), a leading space as `·`, bytes that
            are no character by themselves as `<0xE4>`. Never empty.
        offsets: First and last + 1 character of each token in its text, (token, 2), int32; (-1, -1) for tokens that stand for
            no text, such as [CLS], and for all tokens where the tokenizer cannot tell.
        special: Whether the tokenizer added the token ([CLS], [SEP], <s>), (token,), bool.
        words: Number of the word that a token is part of, from 0 in each segment, (token,), int32; -1 = part of none. None where the
            tokenizer cannot tell.
        segments: 0 for tokens of the first text, 1 for those of the second of a pair, (token,), int32.
        pair: The second text of a pair, else None.
        n_given: How many tokens were given; those from here on the model wrote itself.
    """

    text: str
    ids: NDArray[np.int64]
    labels: tuple[str, ...]
    offsets: NDArray[np.int32]
    special: NDArray[np.bool_]
    words: NDArray[np.int32] | None
    segments: NDArray[np.int32]
    pair: str | None = None
    n_given: int = -1

    def __len__(self) -> int:
        return len(self.labels)
