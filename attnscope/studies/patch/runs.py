"""Run one side of a batch of pairs again and again, each time with some heads' values from a run of the other side.

Each run begins at the first layer that changes. `study` says what is changed, and makes tables of the effects.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnscope.core.attention.probes import LayerKey
from attnscope.core.attention.seam import AttentionCall, Probe, attend
from attnscope.core.interventions import (
    ActivationName,
    ActivationRecorder,
    GradientLeaves,
    HeadPatcher,
    Patch,
    estimate_effect,
)
from attnscope.models.inside.tape import replace_forwards
from attnscope.models.model import MAX_PASS_TOKENS, Model, Outputs
from attnscope.questions.patch import Direction
from attnscope.studies.patch.pairs import PairBatch


class PatchedHeads(NamedTuple):
    """Hold the heads that are patched together: one head, or for keys and values all that read one key/value head.

    Attributes:
        layer_key: The kind of attention and the layer.
        number: The number of the head; for keys and values, of the key/value head.
        group: How many query heads are patched together.
    """

    layer_key: LayerKey
    number: int
    group: int

    @property
    def heads(self) -> range:
        """Return the numbers of the query heads."""
        first = self.number * self.group
        return range(first, first + self.group)

    @property
    def name(self) -> str:
        """Return the names of its heads, such as L3H1 or L3H0+L3H1."""
        return "+".join(f"L{self.layer_key[1]}H{head}" for head in self.heads)


def units_of(
    calls: Mapping[LayerKey, AttentionCall], by: ActivationName
) -> dict[tuple[LayerKey, int], PatchedHeads]:
    """Return the unit of each query head, by layer key and number of the head, in the order of layers and heads.

    `calls` are those of a run, by layer key; `by` says which values are patched.
    """
    units = {}
    for layer_key, call in calls.items():
        n_units = call.n_kv_heads if by in ("key", "value") else call.n_heads
        group = call.n_heads // n_units
        for head in range(call.n_heads):
            units[layer_key, head] = PatchedHeads(layer_key, head // group, group)
    return units


class PatchSpec(NamedTuple):
    """Say which heads get values of another run, which values, and at which tokens."""

    unit: PatchedHeads
    by: ActivationName
    tokens: slice = slice(None)


class PairRuns:
    """Hold the clean and the corrupt run of a batch of pairs, and run one of them again with patches.

    The run with patches is called the changed one, and the run from which their values come the other one.

    Args:
        model: A model with answers.
        batch: The pairs.
        direction: "denoise" changes the corrupt run, "noise" the clean one.

    Attributes:
        batch: The pairs.
        source: What all heads computed in the other run.
        clean: The logit differences of the clean run, (pair,), float64, on the CPU.
        corrupt: The logit differences of the corrupt run, likewise.
    """

    def __init__(self, model: Model, batch: PairBatch, direction: Direction) -> None:
        self.batch = batch
        self._model = model
        # Effects are positive if they lead towards the right answers when denoising, and away from them when noising.
        if direction == "denoise":
            self._sign = 1
            self._changed = batch.corrupt
            other = batch.clean
        else:
            self._sign = -1
            self._changed = batch.clean
            other = batch.corrupt
        # Run the other side once, and keep what its heads compute.
        self.source = ActivationRecorder()
        outputs = model.outputs(other, self.source, last=batch.last)
        other_difference = self._difference(outputs)[0]
        # Run the changed side once, as yet without patches; later runs resume from its layers.
        self._rerun = model.rerun(self._changed, last=batch.last)
        self._unpatched = self._difference(self._rerun.clean_outputs)[0]
        # The linear map to the vocabulary, if later runs compute the logits of the answers alone.
        self._narrowed: list[nn.Linear] = []
        self._skip_needless_work()
        self.clean = other_difference
        self.corrupt = self._unpatched
        if direction == "noise":
            self.clean, self.corrupt = self.corrupt, self.clean
        # What heads compute in the changed run without patches; `isolate` fills it when it is first needed.
        self._kept = ActivationRecorder()

    def _skip_needless_work(self) -> None:
        """Let later runs leave out early tokens and most logits, if a run without patches shows the same result so.

        In a decoder, no change reaches the tokens before the first that differs. Of the vocabulary, only the logits of
        the answers are read.
        """
        logits = self._rerun.clean_outputs.logits
        head = self._model.unembedding()
        if logits is None or not self._model.resumes:
            return
        if self._model.info.kinds == ("decoder",):
            self._rerun.first_token = self.batch.first_difference
        if type(head) is nn.Linear:
            self._narrowed = [head]
        # Logits may differ by rounding, which grows with the largest one and the root of the depth; the factor 64 is
        # our choice.
        n_layers = max(self._model.info.n_layers)
        epsilon = torch.finfo(logits.dtype).eps
        tolerance = 64 * epsilon * n_layers**0.5 * logits.abs().max().cpu()
        # A model may fail in any way where part of it is left out.
        with suppress(Exception):
            unpatched = self._difference(self._rerun_from(attend))[0]
            if ((unpatched - self._unpatched).abs() <= tolerance).all():
                # Later runs are rounded in the same way: so a patch that changes nothing has an effect of 0.
                self._unpatched = unpatched
                return
        self._rerun.first_token = 0
        self._narrowed = []

    def _rerun_from(self, probe: Probe, first_block: int = 0, n_copies: int = 1) -> Outputs:
        """Run the changed side again by `ResumableRun.run_from`. Maps in `_narrowed` give only logits of answers."""
        answer_ids = self.batch.answer_ids

        def answer_logits(head: nn.Linear, forward: Callable[..., Any], hidden: Tensor) -> Tensor:
            bias = None if head.bias is None else head.bias[answer_ids]
            return F.linear(hidden, head.weight[answer_ids], bias)

        with replace_forwards(self._narrowed, answer_logits):
            return self._rerun.run_from(probe, first_block, n_copies)

    def _difference(self, outputs: Outputs) -> Tensor:
        """Return the logit differences right - wrong, (run, pair), float64, on the CPU."""
        assert outputs.logits is not None  # the model has answers
        return self.batch.difference(outputs.logits).cpu().double()

    def effects(
        self,
        changes: Sequence[PatchSpec],
        source: ActivationRecorder | None = None,
        report: Callable[[float], None] | None = None,
    ) -> Tensor:
        """Return the effect of each change alone on the logit difference, (change, pair), float64, on the CPU.

        It is positive where the change restores the answer (denoise), or destroys it (noise).

        Args:
            changes: The changes.
            source: The run that values come from; None = the other run.
            report: Called with the share of the changes that is done, after each pass.
        """
        source = source or self.source
        n_pairs = len(self._changed.ids)
        differences = torch.empty(len(changes), n_pairs, dtype=torch.float64)
        layer_keys = [[change.unit.layer_key] for change in changes]
        n_done = 0
        for first_block, indices in self._rerun.plan_passes(layer_keys, MAX_PASS_TOKENS):
            # Several changes run side by side, each on its own copy of the pairs: texts are (change * pair).
            patches: dict[LayerKey, list[Patch]] = {}
            for row, index in enumerate(indices):
                unit, by, tokens = changes[index]
                heads = (unit.number,)
                values = source.values(by, unit.layer_key, heads)[:, :, tokens]
                texts = slice(row * n_pairs, (row + 1) * n_pairs)
                patch = Patch(by, heads, values, texts, tokens)
                patches.setdefault(unit.layer_key, []).append(patch)
            outputs = self._rerun_from(HeadPatcher(patches), first_block, len(indices))
            differences[indices] = self._difference(outputs)
            n_done += len(indices)
            if report is not None:
                report(n_done / len(changes))
        return self._sign * (differences - self._unpatched)

    def isolate(self, sender: PatchedHeads) -> tuple[ActivationRecorder, Tensor]:
        """Change what one head writes, its z, and hold the z of all other heads fixed; MLPs compute anew.

        Args:
            sender: The head; its z comes from the other run.

        Returns:
            The queries, keys and values that later heads then compute, as a source for `effects`; and the effect,
            (pair,), of the paths from the sender to the logits that pass through no other head.
        """
        # Every head keeps the z that it has without patches; of two patches of a head, the later one holds.
        if not self._kept.outputs:
            self._rerun_from(self._kept)
        patches: dict[LayerKey, list[Patch]] = {}
        for layer_key, output in self._kept.outputs.items():
            all_heads = tuple(range(output.shape[1]))
            patches[layer_key] = [Patch("z", all_heads, output)]
        heads = (sender.number,)
        values = self.source.values("z", sender.layer_key, heads)
        patches[sender.layer_key].append(Patch("z", heads, values))
        # Keep what later heads compute from that.
        reached = ActivationRecorder(HeadPatcher(patches))
        outputs = self._rerun_from(reached, self._rerun.first_block_of([sender.layer_key]))
        return reached, self._sign * (self._difference(outputs)[0] - self._unpatched)

    def attribution(self, by: ActivationName) -> dict[LayerKey, Tensor]:
        """Estimate each head's effect at each token, by layer key: (pair, head, token), float64, on the CPU.

        It is the effect to first order, from one forward and one backward pass of the changed run. For keys and values,
        heads are key/value heads.
        """
        # One backward pass gives the slope of the logit difference with respect to the values of all heads.
        leaves = GradientLeaves(by)
        with torch.enable_grad():
            outputs = self._model.outputs(self._changed, leaves, last=self.batch.last)
            total = self._difference(outputs).sum()
            values = list(leaves.by_layer.values())
            slopes = torch.autograd.grad(total, values, materialize_grads=True)
        # First order: the slope times the change from this run's values to the other's. (pair, head, token)
        estimates = {}
        for (layer_key, changed), slope in zip(leaves.by_layer.items(), slopes, strict=True):
            other = self.source.values(by, layer_key, range(changed.shape[1]))
            effect = estimate_effect(slope, changed.detach(), other)
            estimates[layer_key] = self._sign * effect.cpu().double()
        return estimates
