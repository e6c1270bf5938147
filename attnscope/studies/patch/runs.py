"""A batch of pairs, run with values of its other side: sets of changes, each from its first layer on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from attnscope.core.interventions.patched import Activations, By, Leaves, Patch, Patched, attribute
from attnscope.models.model import Model
from attnscope.questions.patch import Direction
from attnscope.studies.ablate.measurers import LOGITS_AT_ONCE, PASS_TOKENS
from attnscope.studies.patch.reading import PairBatch

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention.probes import Place


MOST_SLOPES = 2**22
"""Numbers whose slopes are followed at once."""


@dataclass(frozen=True)
class Unit:
    """What is patched together: a head, or all heads that read one key/value head.

    Attributes:
        place: Kind of attention and layer.
        heads: The query heads.
        patched: The heads of what is patched: the same, or the key/value head.
    """

    place: Place
    heads: tuple[int, ...]
    patched: tuple[int, ...]

    @property
    def name(self) -> str:
        """What its heads are called: L3H1, or L3H0+L3H1."""
        return "+".join(f"L{self.place[1]}H{head}" for head in self.heads)


class Change(NamedTuple):
    """Values of another run for a head at a place."""

    place: Place
    by: By
    heads: tuple[int, ...]
    tokens: slice = slice(None)


class PairRuns:
    """The two runs of a batch of pairs.

    Args:
        model: A model that predicts tokens.
        batch: The pairs.
        direction: "denoise": the corrupt run is changed; "noise": the clean one.

    Attributes:
        source: What heads computed in the run that values come from.
        clean: The logit differences of the clean run, (pair,), on the CPU.
        corrupt: Those of the corrupt run.
    """

    def __init__(self, model: Model, batch: PairBatch, direction: Direction) -> None:
        self._model, self._batch, self.direction = model, batch, direction
        self._changed, unchanged_batch = (
            (batch.corrupt, batch.clean) if direction == "denoise" else (batch.clean, batch.corrupt)
        )
        self.source, self._own = Activations(), Activations()
        unchanged = self._difference(model.outputs(unchanged_batch, self.source, last=batch.last).logits)[0]
        self._rerun = model.rerun(self._changed, last=batch.last)
        changed = self._difference(self._rerun.whole.logits)[0]
        self.clean, self.corrupt = (unchanged, changed) if direction == "denoise" else (changed, unchanged)

    def units(self, by: By) -> list[Unit]:
        """What can be patched, in the order of layers and heads."""
        units = []
        for place, call in self.source.calls.items():
            group = call.n_heads // call.n_kv_heads if by in ("key", "value") else 1
            for number in range(call.n_heads // group):
                units.append(Unit(place, tuple(range(number * group, (number + 1) * group)), (number,)))
        return units

    def run(self, sets: Sequence[Sequence[Change]], source: Activations | None = None) -> Tensor:
        """The logit differences with each of several sets of changes, (set, pair), float64, on the CPU.

        Values come from `source`; None = the other run.
        """
        import torch

        n_pairs, n_tokens = self._batch.shape
        source = source or self.source
        whole = self._rerun.whole.logits
        step = max(
            1, min(PASS_TOKENS // (n_pairs * n_tokens), LOGITS_AT_ONCE // (1 if whole is None else whole.numel()))
        )
        by_first: dict[int, list[int]] = {}
        for number, changes in enumerate(sets):
            by_first.setdefault(self._rerun.block(change.place for change in changes), []).append(number)
        differences = torch.empty(len(sets), n_pairs, dtype=torch.float64)
        for first, numbers in by_first.items():
            for start in range(0, len(numbers), step):
                some = numbers[start : start + step]
                patches: dict[Place, list[Patch]] = {}
                for row, number in enumerate(some):
                    texts = slice(row * n_pairs, (row + 1) * n_pairs)
                    for place, by, heads, tokens in sets[number]:
                        values = source.values(by, place, heads)[:, :, tokens]
                        patches.setdefault(place, []).append(Patch(by, heads, values, texts, tokens))
                differences[some] = self._difference(self._rerun.again(Patched(patches), first, len(some)).logits)
        return differences

    def isolate(self, sender: Unit) -> tuple[Activations, Tensor]:
        """A run in which one head has the z of the other run, and all other heads keep theirs; MLPs compute anew.

        Returns:
            The queries, keys and values that later heads compute, as `run` takes them, and the logit differences,
            (pair,). These change by the paths from the head that pass through no other head.
        """
        first = self._rerun.block([sender.place])
        if not self._own.outputs:
            self._rerun.again(self._own)
        every = slice(None)
        patches = {
            place: [Patch("z", tuple(range(output.shape[1])), output, every, every)]
            for place, output in self._own.outputs.items()
        }
        values = self.source.values("z", sender.place, sender.heads)
        patches[sender.place].append(Patch("z", sender.heads, values, every, every))
        reached = Activations(Patched(patches))
        return reached, self._difference(self._rerun.again(reached, first).logits)[0]

    def effects(self, differences: Tensor) -> Tensor:
        """How much of the difference comes with a change of the corrupt run, or goes with a change of the clean run."""
        return differences - self.corrupt if self.direction == "denoise" else self.clean - differences

    def attribution(self, by: By) -> dict[Place, Tensor]:
        """The effects to first order at each token: (pair, head, token) by place; for keys and values, key/value heads.

        One forward and one backward pass of the changed run, whose other run was kept.
        """
        leaves, slopes = self._slopes(Leaves(by))
        return {
            place: self._sign
            * attribute(slopes[place, by], base.detach(), self._source_values(by, place, base)).cpu().double()
            for (place, _), base in leaves.tensors.items()
        }

    def path_attribution(self) -> tuple[dict[Place, Tensor], Iterator[tuple[Place, By, dict[Place, Tensor]]]]:
        """The effects of paths to first order, as `isolate` patches them: no third head on the way, MLPs pass them on.

        It takes two forward and two backward passes, and for each place that heads read at one backward pass per head
        through the layers before, without attention.

        Returns:
            For each place the effects of its heads on the logits, (pair, sender). And for each place and each of query,
            key and value, the effects by the place of the senders, (receiver, pair, sender); keys and values are those
            of key/value heads.
        """
        import torch

        _, slopes = self._slopes(Leaves("query", "key", "value"))
        leaves, to_logits = self._slopes(Leaves("z", "query", "key", "value", cut=True))
        outputs = {place: tensor for (place, by), tensor in leaves.tensors.items() if by == "z"}
        change = {place: self._sign * (self._source_values("z", place, z) - z).detach() for place, z in outputs.items()}

        def paths() -> Iterator[tuple[Place, By, dict[Place, Tensor]]]:
            for (place, by), reads in leaves.tensors.items():
                senders = [sender for sender in outputs if sender[1] < place[1]]
                if by == "z" or not senders or not reads.requires_grad:
                    continue
                n = reads.shape[1]
                each = torch.eye(n, dtype=reads.dtype, device=reads.device)[:, None, :, None, None] * slopes[place, by]
                at_once, parts = max(1, MOST_SLOPES // reads.numel()), []
                for some in torch.split(each, at_once):
                    gradients = torch.autograd.grad(
                        reads, [outputs[sender] for sender in senders], some, retain_graph=True, is_grads_batched=True
                    )
                    parts.append([(f * change[s]).sum((3, 4)).cpu() for s, f in zip(senders, gradients, strict=True)])
                yield place, by, {s: torch.cat(part) for s, part in zip(senders, zip(*parts), strict=True)}  # noqa: B905

        return {place: (to_logits[place, "z"] * change[place]).sum((2, 3)).cpu() for place in outputs}, paths()

    def _slopes(self, leaves: Leaves) -> tuple[Leaves, dict[tuple[Place, By], Tensor]]:
        """Gradients of the logit difference of the changed run; 0 where it does not depend on a leaf."""
        import torch

        with torch.enable_grad():
            outputs = self._model.outputs(self._changed, leaves, last=self._batch.last)
            assert outputs.logits is not None  # the model predicts tokens
            target = self._batch.difference(outputs.logits).sum()
            tensors = leaves.tensors
            gradients = torch.autograd.grad(target, list(tensors.values()), allow_unused=True, retain_graph=True)
        pairs = zip(tensors.items(), gradients, strict=True)
        return leaves, {key: torch.zeros_like(leaf) if slope is None else slope for (key, leaf), slope in pairs}

    @property
    def _sign(self) -> int:
        return 1 if self.direction == "denoise" else -1

    def _source_values(self, by: By, place: Place, base: Tensor) -> Tensor:
        return self.source.values(by, place, range(base.shape[1]))

    def _difference(self, logits: Tensor | None) -> Tensor:
        assert logits is not None  # the model predicts tokens
        return self._batch.difference(logits).cpu().double()
