"""The tokens that suffer most when heads are replaced, batch by batch: few are kept of each set of heads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.corpus import CorpusText
from attnscope.records.ablation import TokenChange

if TYPE_CHECKING:
    from attnscope.models.model import Tokenizer
    from attnscope.studies.ablation.reading import ReadBatch

MOST = 20
"""Tokens that are kept of each set of heads."""

BEFORE = 6
"""Tokens that are shown before one."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class WorstTokens:
    """Of sets of heads, by number, the tokens for which most changes, the worst first."""

    by_cut: Mapping[int, tuple[TokenChange, ...]] = field(default_factory=dict)

    def merge(self, other: WorstTokens) -> WorstTokens:
        """Those of both."""
        return WorstTokens({
            cut: _worst((*self.by_cut.get(cut, ()), *other.by_cut.get(cut, ())))
            for cut in dict.fromkeys([*self.by_cut, *other.by_cut])
        })  # fmt: skip

    def without(self, texts: Collection[int]) -> WorstTokens:
        """Those of other texts."""
        return WorstTokens(
            {cut: tuple(one for one in of if one.text not in texts) for cut, of in self.by_cut.items()}
        )


def _worst(tokens: Sequence[TokenChange]) -> tuple[TokenChange, ...]:
    return tuple(sorted(tokens, key=lambda one: (-one.change, one.text, one.place))[:MOST])


def worst_of_batch(
    read: ReadBatch,
    texts: Mapping[int, CorpusText],
    tokenizer: Tokenizer,
    changes: Mapping[int, Floats],
    own: Floats | None,
) -> WorstTokens:
    """The tokens of a batch for which most changes.

    Args:
        read: The batch.
        texts: The texts, by their index.
        tokenizer: Spells tokens that are hidden from a masked model.
        changes: By set of heads, the rise of the loss of each prediction, in nats (prediction,); without a loss the
            relative change of the hidden state of each token, (row, token).
        own: The loss of the whole model at each prediction; None = there is none.
    """
    if own is None:
        ordinary = np.zeros(read.padded.real.shape, np.bool_)
        for row, tokens in enumerate(read.padded.tokens):
            ordinary[row][read.padded.real[row]] = ~tokens.special
        rows, places = np.nonzero(ordinary)
    else:
        rows, places = (np.asarray(part.cpu()) for part in (read.rows, read.token_places))
    found = {}
    for cut, change in changes.items():
        of_token = change if own is not None else change[rows, places]
        of_token = np.where(np.isfinite(of_token), of_token, -np.inf)
        made = []
        for at in np.argsort(-of_token, kind="stable")[:MOST].tolist():
            row, place = read.made_of[int(rows[at])], int(places[at])
            text, labels = texts[row.text], row.tokens.labels
            shown = labels[place] if own is None else tokenizer.spell(int(read.answers[at])) or labels[place]
            loss = float("nan") if own is None else float(own[at])
            before = " ".join(labels[max(0, place - BEFORE) : place])
            made.append(
                TokenChange("", row.text, f"{text.source}:{text.line}", place, before, shown, loss, float(of_token[at]))
            )
        found[cut] = _worst([one for one in made if np.isfinite(one.change)])
    return WorstTokens(found)
