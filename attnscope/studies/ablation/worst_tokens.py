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
    from torch import Tensor

    from attnscope.models.model import Loss, Model
    from attnscope.studies.ablation.reading import ReadBatch

MOST = 20
"""Tokens that are kept of each set of heads."""

BEFORE = 6
"""Tokens that are shown before one."""


@dataclass(frozen=True)
class WorstTokens:
    """For sets of heads, by number, the tokens for which most changes, the worst first."""

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
            {cut: tuple(token for token in tokens if token.text not in texts) for cut, tokens in self.by_cut.items()}
        )


def _worst(tokens: Sequence[TokenChange]) -> tuple[TokenChange, ...]:
    return tuple(sorted(tokens, key=lambda token: (-token.change, token.text, token.place))[:MOST])


def worst_of_batch(
    read: ReadBatch,
    nll: Tensor,
    size: Tensor,
    moved: Sequence[tuple[Sequence[int], tuple[Tensor, Tensor, Tensor]]],
    wanted: Collection[int],
    model: Model,
    loss: Loss | None,
    block: Block,
) -> WorstTokens:
    """The tokens of a batch for which most changes: their loss, or without a loss their last hidden state.

    Args:
        read: The batch.
        nll: The loss of the whole model at each prediction, (prediction,), in nats.
        size: Its squared hidden states, (row, token).
        moved: Sets of heads by number, how far states move, squared, (set, row, token), and losses, (set, prediction).
        wanted: The numbers of the sets whose tokens are wanted.
        model: The model.
        loss: What it predicts.
        block: The texts.
    """
    texts = {text.index: text for text in block.texts}
    if loss is None:
        rows, places = np.nonzero(_ordinary(read))
    else:
        rows, places = read.rows.cpu().numpy(), read.places.cpu().numpy() + (loss == "causal")
    by_cut = {}
    numbered = [
        (cut, changed[at], losses[at] if loss else None)
        for cuts, (changed, losses, _) in moved
        for at, cut in enumerate(cuts)
        if cut in wanted
    ]
    for cut, changed, losses in numbered:
        of_token = (changed / size).sqrt()[rows, places] if losses is None else losses - nll
        change = of_token.cpu().double().numpy()
        change = np.where(np.isfinite(change), change, -np.inf)
        by_cut[cut] = _worst([
            _token(read, number, texts, model, (int(rows[number]), int(places[number])),
                   float(nll[number]) if loss else math.nan, float(change[number]))
            for number in np.argsort(-change, kind="stable")[:MOST].tolist() if np.isfinite(change[number])
        ])  # fmt: skip
    return WorstTokens(by_cut)


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
    row, position = read.made_of[where[0]], where[1]
    text, labels = texts[row.text], row.tokens.labels
    spelled = labels[position]
    if not math.isnan(loss) and int(row.tokens.ids[position]) != (answer := int(read.answers[number])):
        spelled = model.tokenizer.spell(answer)  # it is hidden
    before = " ".join(labels[max(0, position - BEFORE) : position])
    return TokenChange("", row.text, f"{text.source}:{text.line}", position, before, spelled, loss, change)
