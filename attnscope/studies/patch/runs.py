"""Run a batch of pairs with values of heads taken from the other run, each time from the first changed layer on.

`study` says what is changed, and makes tables of the effects.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import AttentionCall, Probe, attend
from attnscope.core.interventions import Activations, By, Leaves, Patch, Patched, attribute
from attnscope.models.inside.tape import run_instead
from attnscope.models.model import PASS_TOKENS, Model, Outputs
from attnscope.questions.patch import Direction
from attnscope.studies.patch.pairs import PairBatch


@dataclass(frozen=True)
class Unit:
    """Hold the heads that are patched together: one head, or for keys and values all that read one key/value head.

    Attributes:
        place: Kind of attention and layer.
        number: The number of the head, or of the key/value head.
        group: How many query heads are patched together.
    """

    place: Place
    number: int
    group: int = 1

    @property
    def heads(self) -> range:
        """Return the numbers of the query heads."""
        first = self.number * self.group
        return range(first, first + self.group)

    @property
    def name(self) -> str:
        """Return the names of its heads, such as L3H1 or L3H0+L3H1."""
        return "+".join(f"L{self.place[1]}H{head}" for head in self.heads)


def units_of(calls: Mapping[Place, AttentionCall], by: By) -> dict[tuple[Place, int], Unit]:
    """Return the unit of each head in a run, by its place and number, in the order of layers and heads."""
    units = {}
    for place, call in calls.items():
        n_units = call.n_kv_heads if by in ("key", "value") else call.n_heads
        group = call.n_heads // n_units
        for head in range(call.n_heads):
            units[place, head] = Unit(place, head // group, group)
    return units


class Change(NamedTuple):
    """A unit that gets values of another run, and the tokens at which it gets them."""

    unit: Unit
    by: By
    tokens: slice = slice(None)


class PairRuns:
    """Hold the two runs of a batch of pairs, and repeat the changed one with patches.

    Args:
        model: A model with answers.
        batch: The pairs.
        direction: "denoise": the corrupt run is changed; "noise": the clean one.

    Attributes:
        batch: The pairs.
        source: What heads computed in the other run, from which values come.
        clean: The logit differences of the clean run, (pair,), float64, on the CPU.
        corrupt: Those of the corrupt run.
    """

    def __init__(self, model: Model, batch: PairBatch, direction: Direction) -> None:
        self.batch = batch
        self._model = model
        self._sign = 1
        self._changed = batch.corrupt
        other = batch.clean
        if direction == "noise":
            self._sign = -1
            self._changed, other = other, self._changed
        # What heads compute in the changed run, and the head whose logits are narrowed: both are filled in later.
        self._own = Activations()
        self._narrowed: list[nn.Linear] = []
        # Run the other side once, and keep what its heads compute.
        self.source = Activations()
        outputs = model.outputs(other, self.source, last=batch.last)
        other_difference = self._difference(outputs)[0]
        # Run the changed side once; later runs resume from its layers.
        self._rerun = model.rerun(self._changed, last=batch.last)
        self._base = self._difference(self._rerun.whole)[0]
        self._shorten()
        self.clean = other_difference
        self.corrupt = self._base
        if direction == "noise":
            self.clean, self.corrupt = self.corrupt, self.clean

    def _shorten(self) -> None:
        """Compute no more in later runs than the answers need, if a run without changes gives the same so.

        In a decoder no change reaches tokens before the first that differs. Of the vocabulary, the answers suffice.
        """
        logits = self._rerun.whole.logits
        head = self._model.unembedding()
        if logits is None or not self._model.resumes:
            return
        if self._model.info.kinds == ("decoder",):
            self._rerun.start = self.batch.first_difference
        if type(head) is nn.Linear:
            self._narrowed = [head]
        # Logits may differ by rounding, which grows with the largest one and the root of the depth; 64 is ours.
        n_layers = max(self._model.info.n_layers)
        epsilon = torch.finfo(logits.dtype).eps
        allowed = 64 * epsilon * n_layers**0.5 * logits.abs().max().cpu()
        # A model may fail in any way where part of it is set aside.
        with suppress(Exception):
            base = self._difference(self._again(attend))[0]
            if ((base - self._base).abs() <= allowed).all():
                # Rounded as later runs are, so that a change of nothing has an effect of 0.
                self._base = base
                return
        self._rerun.start = 0
        self._narrowed = []

    def _again(self, probe: Probe, first: int = 0, times: int = 1) -> Outputs:
        """Run the changed side again, as `Rerun.again` does; logits may be those of the answers alone."""
        asked = self.batch.asked

        def answer(head: nn.Linear, forward: Callable[..., Any], hidden: Tensor) -> Tensor:
            bias = None if head.bias is None else head.bias[asked]
            return F.linear(hidden, head.weight[asked], bias)

        with run_instead(self._narrowed, answer):
            return self._rerun.again(probe, first, times)

    def _difference(self, outputs: Outputs) -> Tensor:
        """Return the logit differences right - wrong of a run, (time, pair), float64, on the CPU."""
        assert outputs.logits is not None  # the model has answers
        return self.batch.difference(outputs.logits).cpu().double()

    def effects(self, changes: Sequence[Change], source: Activations | None = None) -> Tensor:
        """Return by how much each change alone restores or destroys the answer, (change, pair), float64, on the CPU.

        Values come from `source`; None = the other run.
        """
        source = source or self.source
        n_pairs = len(self._changed.ids)
        differences = torch.empty(len(changes), n_pairs, dtype=torch.float64)
        places = [[change.unit.place] for change in changes]
        for first, numbers in self._rerun.plan(places, PASS_TOKENS):
            # Each change has a repetition of the pairs of its own. (change * pair, …)
            patches: dict[Place, list[Patch]] = {}
            for row, number in enumerate(numbers):
                unit, by, tokens = changes[number]
                heads = (unit.number,)
                values = source.values(by, unit.place, heads)[:, :, tokens]
                texts = slice(row * n_pairs, (row + 1) * n_pairs)
                patch = Patch(
                    by,
                    heads,
                    values,
                    texts,
                    tokens,
                )
                patches.setdefault(unit.place, []).append(patch)
            outputs = self._again(Patched(patches), first, len(numbers))
            differences[numbers] = self._difference(outputs)
        return self._sign * (differences - self._base)

    def isolate(self, sender: Unit) -> tuple[Activations, Tensor]:
        """Run with one head's z of the other run, while all other heads keep theirs; MLPs compute anew.

        Returns:
            The queries, keys and values that later heads compute, as `effects` takes them, and the effect, (pair,), of
            the paths from the head that pass through no other head.
        """
        # All heads keep their z, and the sender takes that of the other run.
        if not self._own.outputs:
            self._again(self._own)
        patches: dict[Place, list[Patch]] = {}
        for place, output in self._own.outputs.items():
            every_head = tuple(range(output.shape[1]))
            patches[place] = [Patch("z", every_head, output)]
        heads = (sender.number,)
        values = self.source.values("z", sender.place, heads)
        patches[sender.place].append(Patch("z", heads, values))
        reached = Activations(Patched(patches))
        outputs = self._again(reached, self._rerun.block([sender.place]))
        return reached, self._sign * (self._difference(outputs)[0] - self._base)

    def attribution(self, by: By) -> dict[Place, Tensor]:
        """Return the effects of heads to first order at each token, (pair, head, token), by kind and layer.

        For keys and values heads are key/value heads. It takes one forward and one backward pass of the changed run.
        """
        # One backward pass gives the slope of the logit difference at each head and token.
        leaves = Leaves(by)
        with torch.enable_grad():
            outputs = self._model.outputs(self._changed, leaves, last=self.batch.last)
            assert outputs.logits is not None  # the model has answers
            total = self.batch.difference(outputs.logits).sum()
            tensors = leaves.tensors
            slopes = torch.autograd.grad(
                total,
                list(tensors.values()),
                materialize_grads=True,
            )
        # First order: the slope times the change of the values. (pair, head, token)
        estimates = {}
        for (place, base), slope in zip(tensors.items(), slopes, strict=True):
            source = self.source.values(by, place, range(base.shape[1]))
            change = attribute(slope, base.detach(), source)
            estimates[place] = self._sign * change.cpu().double()
        return estimates
