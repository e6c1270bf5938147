"""What the heads of a batch move onto tokens, here and at other places of the same rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.measures.catalogue import OFFSETS
from attnscope.studies.ablation.reading import ReadBatch
from attnscope.studies.writes.copy_targets import NOTHING, RAISED, Numbers, Standing

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention.moved import Moved
    from attnscope.core.attention.probes import Place
    from attnscope.core.attention.seam import AttentionCall
    from attnscope.models.inside.attribution import Traced


ATTENDED = 0.1
"""The weight that a head must give to the answer's own occurrences to count as attending to it: a convention."""


_MOVED = ("above", "even_above", "nats", "even_nats")


class Mover:
    """Finds what the heads of a batch move onto tokens, one token of each prediction."""

    def __init__(
        self, read: ReadBatch, traced: Traced, calls: Mapping[Place, AttentionCall], special: frozenset[int]
    ) -> None:
        import torch

        self.read, self.traced, self._calls = read, traced, calls
        self._sinks = torch.isin(read.batch.ids, read.batch.ids.new_tensor(sorted(special))).bool()
        self._sinks[:, 0] = True

    def tensor(self, numbers: Sequence[NDArray[Any]]) -> Tensor:
        """Numbers of the predictions, row by row, where the model is."""
        import torch

        return torch.from_numpy(np.concatenate(numbers)).to(self.read.rows.device)

    def move(self, tokens: Tensor, others: Tensor, after: Tensor | None = None) -> dict[Place, tuple[Moved, Tensor]]:
        """By place, each (prediction, head): what is moved onto tokens, and what heads add to them on the whole.

        `tokens` and the `others` to compare with are those of each prediction; NOTHING = none. For `after` see
        `core.moved.Targets`.
        """
        from attnscope.core.attention.moved import Moved, Targets, measure_moves

        read, traced = self.read, self.traced
        targets = Targets(
            read.batch.ids,
            self._sinks,
            self._lay(tokens),
            self._lay(others),
            None if after is None else self._lay(after),
        )
        slopes, other_slopes = traced.slopes(tokens.clamp(min=0)), traced.slopes(others.clamp(min=0))
        by_place = {}
        for place, call in self._calls.items():
            onto = measure_moves(call, targets, slopes[place], other_slopes[place])
            whole = (traced.leaves.heads[place].detach() * slopes[place]).float().sum(-1)
            by_place[place] = Moved(*(traced.at(part) for part in vars(onto).values())), traced.at(whole)
        return by_place

    def move_elsewhere(
        self, standing: Sequence[Standing], wanted: Sequence[tuple[Numbers, Numbers]], offsets: Sequence[int]
    ) -> Elsewhere:
        """What is moved onto the same tokens at other places of their rows; see `Standing.controls`.

        `wanted` are by row the tokens, and the others that they are compared with. `offsets` are those at which a head
        of one offset may look.
        """
        laid, hits, first = [], [], 0
        for row, (tokens, others) in zip(standing, wanted, strict=True):
            index, *there = row.controls(tokens)
            of_row = np.zeros((len(index), len(OFFSETS)), np.float32)
            for offset in offsets:
                less = row.hits(there[0], there[1], offset)[index]
                of_row[:, OFFSETS.index(offset)] = np.where(index >= 0, row.hits(tokens, others, offset) - less, 0)
            laid.append((np.where(index >= 0, index + first, NOTHING), *there))
            hits.append(of_row)
            first += len(index)
        which, tokens_there, others_there = map(self.tensor, zip(*laid, strict=True))
        return Elsewhere(which, self.move(tokens_there, others_there), self.tensor(hits))

    def _lay(self, tokens: Tensor) -> Tensor:
        """(prediction,) -> (row, token)."""
        laid = self.read.batch.ids.new_full(self.read.batch.ids.shape, NOTHING)
        laid[self.read.rows, self.read.places] = tokens.to(laid)
        return laid


@dataclass(frozen=True, eq=False)
class Elsewhere:
    """What is moved onto the tokens of predictions at other places, where they stand and do not come.

    Attributes:
        index: The prediction that is made there; NOTHING = there is none to compare with.
        moved: By place, each (prediction made there, head).
        hits: What a head of one offset has here, less what it has there, (prediction, offset).
    """

    index: Tensor
    moved: dict[Place, tuple[Moved, Tensor]]
    hits: Tensor

    def less(self, here: Moved, place: Place) -> Moved:
        """What is moved here, less what the same attention, excluding sinks, would move there."""
        at = self.index.clamp(min=0)
        there = self.moved[place][0]
        active = there.active[at]
        # The mean first: where nearly all of the head rests there, `here.active / active` would be infinite.
        means = {name: (getattr(there, name)[at] / active).where(active > 0, 0.0) for name in _MOVED}
        return replace(here, **{name: getattr(here, name) - mean * here.active for name, mean in means.items()})


@dataclass(frozen=True, eq=False)
class Answered:
    """What heads move at the predictions of a batch.

    Attributes:
        stands: Which answers stand in what is read, with another token to compare with.
        answers: What is moved onto answers.
        elsewhere: The same where they are not the answer.
        repeated: Which predictions have an induction key, and what is moved onto what stands there; None for a model
            that hides what it predicts.
        candidates: For each candidate its logit above the vocabulary's mean, what is moved onto it, its logit at
            another place, and what is moved there.
        least: The logit that is just among the likeliest.
        hits: What a head of one offset would reach on MOVED_PAIRS, (prediction, pair, offset); on suppression by the
            likeliest candidate of the whole model.
        of_hits: Which of them count.
    """

    stands: Tensor
    answers: dict[Place, tuple[Moved, Tensor]]
    elsewhere: Elsewhere
    repeated: tuple[Tensor, dict[Place, tuple[Moved, Tensor]]] | None
    candidates: list[tuple[Tensor, dict[Place, tuple[Moved, Tensor]], Tensor, Elsewhere]]
    least: Tensor
    hits: Tensor
    of_hits: Tensor

    def columns(self, place: Place, added: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values, counts and values under even attention, each (prediction, measure of WRITTEN, head).

        `added` is what each head adds to the answer's logit, (prediction, head).
        """
        import torch

        on_answer, _ = self.answers[place]
        ones = torch.ones_like(added)
        looks = (on_answer.weight >= ATTENDED).to(added)
        rows = [
            (added, ones, on_answer.even_whole),
            (added, looks, on_answer.even_whole),
            (added, 1 - looks, on_answer.even_whole),
            (on_answer.weight, ones, on_answer.even_weight),
        ]
        paired = self.stands & (self.elsewhere.index >= 0)
        rows += _pair(self.elsewhere.less(on_answer, place), paired[:, None].to(added).expand_as(added))
        rests, chosen = [], []
        for logit, by_layer, other_logit, control in self.candidates:
            here, whole = by_layer[place]
            at = control.index.clamp(min=0)
            rest = logit[:, None] - whole
            is_raised = rest - (other_logit[:, None] - control.moved[place][1][at]) >= RAISED
            rests.append(rest.where(is_raised, rest.new_tensor(-torch.inf)))
            chosen.append(vars(control.less(here, place)).values())
        rest, best = torch.stack(rests).max(0)
        of_best = type(on_answer)(
            *(torch.stack(arrays).gather(0, best[None])[0] for arrays in zip(*chosen, strict=True))
        )
        rows += _pair(of_best, (rest >= self.least[:, None]).to(added), sign=-1)
        if self.repeated is None:
            rows += [(ones * 0,) * 3] * 3
        else:
            there, by_layer = self.repeated
            rows += _pair(by_layer[place][0], there[:, None].to(added).expand_as(added))
        values, counts, even = (torch.stack(arrays, 1) for arrays in zip(*rows, strict=True))
        # Not a product alone: 0 times infinity is none.
        return values.where(counts > 0, values.new_zeros(())), counts, even.where(counts > 0, even.new_zeros(()))


def _pair(here: Moved, there: Tensor, sign: int = 1) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The measures of a role: what is moved and the weight, by attention excluding sinks, and how much that is."""
    active = there * here.active
    return [
        (sign * here.nats, active, sign * here.even_nats),
        (here.above, active, here.even_above),
        (here.active, there, here.even_active),
    ]
