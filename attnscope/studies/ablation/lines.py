"""What the descriptions of heads expect in the batches of an ablation: scores that take the place of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.corpus import CorpusText
from attnscope.errors import AttnscopeError
from attnscope.models.model import Model
from attnscope.studies.describe.expected import Expectations
from attnscope.studies.describe.study import lot_of

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention.probes import Place
    from attnscope.studies.ablation.reading import ReadBatch

FEWEST = 4
"""Texts below which there are not two to fit lines on and two to put them in place on."""


@dataclass(eq=False)
class Lines:
    """The descriptions of a model's heads, as scores of the rows of batches.

    Attributes:
        expectations: What they expect in a text.
    """

    expectations: Expectations
    _batch: ReadBatch | None = field(default=None, repr=False)
    _of_batch: dict[tuple[Place, int], Tensor] = field(default_factory=dict, repr=False)

    def scores(self, read: ReadBatch, place: Place, head: int) -> Callable[[Tensor], Tensor]:
        """What gives one head's scores, (row, 1, query, key), float32, for the keys that are allowed; padding has 0.

        Args:
            read: A batch; what was made of the last one is kept.
            place: Kind and layer.
            head: The head.
        """
        if self._batch is not read:
            self._batch, self._of_batch = read, {}

        def score(allowed: Tensor) -> Tensor:
            if (place, head) not in self._of_batch:
                self._of_batch[place, head] = self._score(read, place, head, allowed)
            return self._of_batch[place, head]

        return score

    def _score(self, read: ReadBatch, place: Place, head: int, allowed: Tensor) -> Tensor:
        import torch

        n_rows, n_tokens = read.real.shape
        made = np.zeros((n_rows, 1, n_tokens, n_tokens), np.float32)
        masks = allowed.expand(n_rows, -1, -1, -1)[:, 0].cpu().numpy()
        for row, mask, of_row in zip(made, masks, read.made_of, strict=True):
            n = len(of_row.tokens)
            row[0, :n, :n] = self.expectations.scores(of_row.tokens, place, head, mask[:n, :n])
        return torch.from_numpy(made)


def require_one_kind(model: Model) -> None:
    """Refuses models with several kinds of attention, whose rows are of different texts.

    Raises:
        AttnscopeError: It is one.
    """
    if len(model.info.kinds) > 1:
        raise AttnscopeError(
            f"{model.info.name} has {' and '.join(model.info.kinds)} attention: lines can take the place of weights "
            "in models with one kind",
            "--by uniform,sink needs no lines",
        )


def apart(texts: Sequence[CorpusText], seed: int) -> tuple[list[CorpusText], list[CorpusText]]:
    """Texts that lines are fitted on, and those on which they take the place of weights: halves by lots.

    Raises:
        AttnscopeError: There are too few.
    """
    if len(texts) < FEWEST:
        raise AttnscopeError(
            f"{len(texts)} different texts are too few: lines are fitted on some and tried on others",
            f"give {FEWEST} texts or more (one a line, or --split paragraph)",
        )
    order = np.argsort([lot_of(text, seed).hex() for text in texts], kind="stable")
    halves: NDArray[np.bool_] = np.zeros(len(texts), np.bool_)
    halves[order[: len(texts) // 2]] = True
    fitted, others = ([texts[at] for at in np.flatnonzero(halves == wanted).tolist()] for wanted in (True, False))
    return fitted, others
