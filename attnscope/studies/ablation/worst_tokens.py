"""The tokens that suffer most when heads are replaced, batch by batch: few are kept of each set of heads."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.corpus import Block, CorpusText
from attnscope.records.ablation import TokenChange

if TYPE_CHECKING:
    from attnscope.models.model import Loss, Model
    from attnscope.studies.ablation.reading import ReadBatch
    from attnscope.studies.ablation.sweep import Measured

MOST = 20
"""Tokens that are kept of each set of heads."""

BEFORE = 6
"""Tokens that are shown before one."""


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
        return WorstTokens({cut: tuple(one for one in of if one.text not in texts) for cut, of in self.by_cut.items()})


def _worst(tokens: Sequence[TokenChange]) -> tuple[TokenChange, ...]:
    return tuple(sorted(tokens, key=lambda one: (-one.change, one.text, one.place))[:MOST])


def worst_of_batch(
    read: ReadBatch, measured: Measured, cuts: Collection[int], model: Model, loss: Loss | None, block: Block
) -> WorstTokens:
    """The tokens of a batch for which most changes: their loss, or without a loss their last hidden state.

    Args:
        read: The batch.
        measured: What was measured on it.
        cuts: Of which sets of heads.
        model: The model.
        loss: What it predicts.
        block: The texts.
    """
    texts = {text.index: text for text in block.texts}
    if loss is None:
        rows, places = np.nonzero(_ordinary(read))
    else:
        rows, places = read.rows.cpu().numpy(), read.places.cpu().numpy() + (loss == "causal")
    found = {}
    for numbers, (changed, nll, _) in measured.cuts:
        for at, cut in enumerate(numbers):
            if cut not in cuts:
                continue
            moved = (changed[at] / measured.size).sqrt()[rows, places] if loss is None else nll[at] - measured.nll
            change = moved.cpu().double().numpy()
            change = np.where(np.isfinite(change), change, -np.inf)
            found[cut] = _worst([
                _token(read, number, texts, model, (int(rows[number]), int(places[number])),
                       float(measured.nll[number]) if loss else math.nan, float(change[number]))
                for number in np.argsort(-change, kind="stable")[:MOST].tolist() if np.isfinite(change[number])
            ])  # fmt: skip
    return WorstTokens(found)


def _ordinary(read: ReadBatch) -> NDArray[np.bool_]:
    """Which tokens are neither special nor padding, (row, token)."""
    ordinary = read.padded.real.copy()
    for row, tokens in zip(ordinary, read.padded.tokens, strict=True):
        row[row] = ~tokens.special
    return ordinary


def _token(
    read: ReadBatch, number: int, texts: Mapping[int, CorpusText], model: Model, where: tuple[int, int],
    loss: float, change: float,
) -> TokenChange:  # fmt: skip
    row, place = read.made_of[where[0]], where[1]
    text, labels = texts[row.text], row.tokens.labels
    shown = labels[place]
    if not math.isnan(loss) and int(row.tokens.ids[place]) != (answer := int(read.answers[number])):
        shown = model.tokenizer.spell(answer)  # it is hidden
    before = " ".join(labels[max(0, place - BEFORE) : place])
    return TokenChange("", row.text, f"{text.source}:{text.line}", place, before, shown, loss, change)
