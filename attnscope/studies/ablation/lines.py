"""What the descriptions of heads expect in the batches of an ablation: scores that take the place of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus import Copies, Corpus, CorpusText, distinct
from attnscope.errors import AttnscopeError, amount
from attnscope.models.model import Model
from attnscope.studies.describe.expected import Expectations, describe_to_expect
from attnscope.studies.describe.sample import DescribeOptions, lot_of
from attnscope.studies.inputs.texts import texts_of

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention.probes import Place
    from attnscope.studies.ablation.reading import PaddedTexts

FEWEST = 4
"""Texts below which there are not two to fit lines on and two to put them in place on."""


@dataclass(eq=False)
class Lines:
    """The descriptions of a model's heads, as scores of the rows of batches.

    Attributes:
        texts: The texts that they were fitted on.
    """

    expectations: Expectations
    texts: tuple[CorpusText, ...]
    _batch: PaddedTexts | None = field(default=None, repr=False)
    _of_batch: dict[tuple[Place, int], Tensor] = field(default_factory=dict, repr=False)

    def n_heads(self, place: Place) -> int:
        """How many heads an attention has."""
        return 1 + max(head.head for head in self.expectations.heads if (head.kind, head.layer) == place)

    def of_model(self, model: Model) -> Lines:
        """The same in a worker, for its model."""
        return Lines(self.expectations.of_model(model), self.texts)

    def scores(self, texts: PaddedTexts, place: Place, head: int) -> Callable[[Tensor], Tensor]:
        """A function to one head's scores, (row, 1, query, key), float32, for the keys that are allowed; padding has 0.

        The scores of the last batch are kept.
        """
        if self._batch is not texts:
            self._batch, self._of_batch = texts, {}

        def score(allowed: Tensor) -> Tensor:
            if (place, head) not in self._of_batch:
                self._of_batch[place, head] = self._score(texts, place, head, allowed)
            return self._of_batch[place, head]

        return score

    def _score(self, texts: PaddedTexts, place: Place, head: int, allowed: Tensor) -> Tensor:
        import torch

        n_rows, n_tokens = texts.real.shape
        if allowed.shape[-2:] != (n_tokens, n_tokens):
            raise AttnscopeError(
                f"a forward pass reads {n_tokens} tokens and attends to {allowed.shape[-1]}: lines need whole texts",
                "pass use_cache=False",
            )
        scores = np.zeros((n_rows, 1, n_tokens, n_tokens), np.float32)
        masks = allowed.expand(n_rows, -1, -1, -1)[:, 0].cpu().numpy()
        for row, mask, tokens, real in zip(scores, masks, texts.tokens, texts.real, strict=True):
            inside = np.ix_(real, real)
            row[0][inside] = self.expectations.scores(tokens, place, head, mask[inside])
        return torch.from_numpy(scores)


@with_plain_torch
def fit_lines(
    model: Model,
    texts: Corpus | str | Sequence[str] | Sequence[CorpusText],
    others: Sequence[CorpusText] | None = None,
    seed: int = 0,
) -> Lines:
    """Fits a line to every head of a model, to be put in the place of its weights.

        lines = attnscope.fit_lines(model, attnscope.Corpus("corpus.txt"))

    Args:
        model: A loaded model with one kind of attention.
        texts: What to fit on. Copies of a text count once.
        others: The texts on which the lines are used; None = any texts, which takes longer and needs a model from
            transformers.
        seed: Of the choice of texts and queries.

    Returns:
        The lines, for `attnscope.replaced`.

    Raises:
        AttnscopeError: The model has several kinds of attention, or there are fewer than two texts.
    """
    require_one_kind(model)
    fitted = list(distinct(texts_of(texts), Copies()))
    if len(fitted) < FEWEST // 2:
        raise AttnscopeError(f"lines cannot be fitted on {amount(len(fitted), 'text')}", f"give {FEWEST // 2} or more")
    return Lines(describe_to_expect(model, fitted, others, DescribeOptions(seed=seed)), tuple(fitted))


def require_one_kind(model: Model) -> None:
    """Refuses models with several kinds of attention, whose rows are of different texts."""
    if len(model.info.kinds) > 1:
        raise AttnscopeError(
            f"{model.info.name} has {' and '.join(model.info.kinds)} attention: lines can take the place of weights "
            "in models with one kind",
            "--by uniform,sink needs no lines",
        )


def apart(texts: Sequence[CorpusText], seed: int) -> tuple[list[CorpusText], list[CorpusText]]:
    """The texts that lines are fitted on, and those on which they replace weights: halves at random."""
    if len(texts) < FEWEST:
        raise AttnscopeError(
            f"{len(texts)} different texts are too few: lines are fitted on some and tried on others",
            f"give {FEWEST} texts or more (one a line, or --split paragraph)",
        )
    order = np.argsort([lot_of(text, seed).hex() for text in texts], kind="stable")
    halves: NDArray[np.bool_] = np.zeros(len(texts), np.bool_)
    halves[order[: len(texts) // 2]] = True
    fitted, others = ([texts[at] for at in np.flatnonzero(halves == is_fitted).tolist()] for is_fitted in (True, False))
    return fitted, others
