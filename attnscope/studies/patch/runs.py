"""Patch activations: run one side of a batch of pairs, with the activations of some heads copied from the other side.

A pair has a clean and a corrupt side. The base side is run again for each patch; the activations come from a run of the
source side. A rerun begins at the first layer that is patched. `study` chooses the patches, and makes tables of their
effects.
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
    """Hold the heads that are patched together, a unit: one head, or for keys and values all heads of a key/value head.

    Attributes:
        layer_key: The kind of attention and the layer.
        number: The number of the head; for keys and values, the number of the key/value head.
        n_heads: How many query heads are patched together.
    """

    layer_key: LayerKey
    number: int
    n_heads: int

    @property
    def heads(self) -> range:
        """Return the numbers of the query heads."""
        first = self.number * self.n_heads
        return range(first, first + self.n_heads)

    @property
    def name(self) -> str:
        """Return the names of the heads, such as L3H1 or L3H0+L3H1."""
        return "+".join(f"L{self.layer_key[1]}H{head}" for head in self.heads)


def list_units(
    calls: Mapping[LayerKey, AttentionCall], by: ActivationName
) -> dict[tuple[LayerKey, int], PatchedHeads]:
    """Return the unit of each query head, by (layer key, head), in the order of layers and heads.

    Args:
        calls: The attention calls of one run, by layer key.
        by: Which values are patched: z, query, key, value or pattern.
    """
    units = {}
    for layer_key, call in calls.items():
        n_patchable = call.n_kv_heads if by in ("key", "value") else call.n_heads
        n_heads = call.n_heads // n_patchable
        for head in range(call.n_heads):
            units[layer_key, head] = PatchedHeads(layer_key, head // n_heads, n_heads)
    return units


class PatchSpec(NamedTuple):
    """Name the heads that get values of the source run, which values (`by`), and at which tokens."""

    unit: PatchedHeads
    by: ActivationName
    tokens: slice = slice(None)


class PairRuns:
    """Hold the clean and the corrupt run of a batch of pairs, and run one of them again with patches.

    The run that is patched is the base run. The run that the patches come from is the source run.

    Args:
        model: A model with an output head.
        batch: The pairs.
        direction: "denoise" patches the corrupt run, "noise" the clean run.

    Attributes:
        batch: The pairs.
        source_activations: The activations of all heads in the source run.
        clean_differences: The logit differences of the clean run, (pair,), float64, on the CPU.
        corrupt_differences: The logit differences of the corrupt run, (pair,), float64, on the CPU.
    """

    def __init__(self, model: Model, batch: PairBatch, direction: Direction) -> None:
        self.batch = batch
        self._model = model
        # An effect is positive if the patch favours the right answers (denoise) or the wrong answers (noise).
        if direction == "denoise":
            self._sign = 1
            self._base_batch = batch.corrupt
            source_batch = batch.clean
        else:
            self._sign = -1
            self._base_batch = batch.clean
            source_batch = batch.corrupt
        # Run the source side once, and keep its activations. The result of `_logit_differences` is (run, pair): take
        # the only run.
        self.source_activations = ActivationRecorder()
        outputs = model.outputs(source_batch, self.source_activations, last=batch.last)
        source_differences = self._logit_differences(outputs)[0]
        # Run the base side once without patches. Reruns resume from the outputs of its layers.
        self._rerun = model.rerun(self._base_batch, last=batch.last)
        self._base_differences = self._logit_differences(self._rerun.clean_outputs)[0]
        # Holds the unembedding (the linear map to the vocabulary) if reruns compute the logits of the answers alone;
        # else empty.
        self._narrowed_unembeddings: list[nn.Linear] = []
        self._skip_needless_work()
        self.clean_differences = source_differences
        self.corrupt_differences = self._base_differences
        if direction == "noise":
            self.clean_differences = self._base_differences
            self.corrupt_differences = source_differences
        # The activations of the base run without patches. `isolate_sender` fills it when it is first called.
        self._base_activations = ActivationRecorder()

    def _skip_needless_work(self) -> None:
        """Let reruns skip early tokens and most logits, if a rerun without patches then gives the same result.

        In a decoder, no patch changes the tokens before the first token that differs. Of the logits, only those of the
        answers are read.
        """
        logits = self._rerun.clean_outputs.logits
        unembedding = self._model.unembedding()
        if logits is None or not self._model.resumes:
            return
        if self._model.info.kinds == ("decoder",):
            self._rerun.first_token = self.batch.first_difference
        if type(unembedding) is nn.Linear:
            self._narrowed_unembeddings = [unembedding]
        # Logits may differ by rounding errors. These grow with the largest logit and the square root of the depth. The
        # factor 64 is our choice.
        n_layers = max(self._model.info.n_layers)
        epsilon = torch.finfo(logits.dtype).eps
        tolerance = 64 * epsilon * n_layers**0.5 * logits.abs().max().cpu()
        # A model may raise any exception if part of it is skipped. Then nothing is skipped.
        with suppress(Exception):
            rerun_differences = self._logit_differences(self._rerun_base(attend))[0]
            if ((rerun_differences - self._base_differences).abs() <= tolerance).all():
                # All reruns have the same rounding errors as this one. Compare with it, so that a patch that changes
                # nothing has an effect of exactly 0.
                self._base_differences = rerun_differences
                return
        self._rerun.first_token = 0
        self._narrowed_unembeddings = []

    def _rerun_base(self, probe: Probe, first_block: int = 0, n_copies: int = 1) -> Outputs:
        """Run copies of the base side again from a block of the network on; see `ResumableRun.run_from`."""
        # Unembeddings in `_narrowed_unembeddings` compute only the logits of the answers.
        answer_ids = self.batch.answer_ids

        def answer_logits(unembedding: nn.Linear, forward: Callable[..., Any], hidden: Tensor) -> Tensor:
            bias = None if unembedding.bias is None else unembedding.bias[answer_ids]
            return F.linear(hidden, unembedding.weight[answer_ids], bias)

        with replace_forwards(self._narrowed_unembeddings, answer_logits):
            return self._rerun.run_from(probe, first_block, n_copies)

    def _logit_differences(self, outputs: Outputs) -> Tensor:
        """Return the logit differences right - wrong, (run, pair), float64, on the CPU."""
        assert outputs.logits is not None  # the model has an output head
        return self.batch.logit_differences(outputs.logits).cpu().double()

    def measure_effects(
        self,
        patch_specs: Sequence[PatchSpec],
        source_activations: ActivationRecorder | None = None,
        report: Callable[[float], None] | None = None,
    ) -> Tensor:
        """Return the effect of each patch alone on the logit difference, (patch, pair), float64, on the CPU.

        It is positive if the patch restores the answer (denoise), or destroys it (noise).

        Args:
            patch_specs: The patches.
            source_activations: The activations that patches copy; None = those of the source run.
            report: Called after each pass with the share of the patches that is done.
        """
        source_activations = source_activations or self.source_activations
        n_pairs = len(self._base_batch.ids)
        differences = torch.empty(len(patch_specs), n_pairs, dtype=torch.float64)
        layer_keys = [[spec.unit.layer_key] for spec in patch_specs]
        n_done = 0
        for first_block, indices in self._rerun.plan_passes(layer_keys, MAX_PASS_TOKENS):
            # A pass runs several patches at once, each on its own copy of the pairs: the axis of texts is
            # (patch * pair).
            patches: dict[LayerKey, list[Patch]] = {}
            for copy_index, index in enumerate(indices):
                unit, by, tokens = patch_specs[index]
                heads = (unit.number,)
                head_values = source_activations.values(by, unit.layer_key, heads)[:, :, tokens]
                texts = slice(copy_index * n_pairs, (copy_index + 1) * n_pairs)
                patch = Patch(by, heads, head_values, texts, tokens)
                patches.setdefault(unit.layer_key, []).append(patch)
            outputs = self._rerun_base(HeadPatcher(patches), first_block, len(indices))
            differences[indices] = self._logit_differences(outputs)
            n_done += len(indices)
            if report is not None:
                report(n_done / len(patch_specs))
        return self._sign * (differences - self._base_differences)

    def isolate_sender(self, sender: PatchedHeads) -> tuple[ActivationRecorder, Tensor]:
        """Patch the output z of one head, and freeze the z of all other heads; MLPs are computed again.

        Args:
            sender: The head; its z comes from the source run.

        Returns:
            The queries, keys and values that later heads then compute, as `source_activations` of `measure_effects`;
            and the effect, (pair,), of the paths from the sender to the logits that pass through no other head.
        """
        # Patch each head with its own z of the base run, which freezes it. The sender's patch comes after these: of two
        # patches of a head, the later one wins.
        if not self._base_activations.outputs:
            self._rerun_base(self._base_activations)
        patches: dict[LayerKey, list[Patch]] = {}
        for layer_key, output in self._base_activations.outputs.items():
            all_heads = tuple(range(output.shape[1]))
            patches[layer_key] = [Patch("z", all_heads, output)]
        heads = (sender.number,)
        head_values = self.source_activations.values("z", sender.layer_key, heads)
        patches[sender.layer_key].append(Patch("z", heads, head_values))
        # Rerun from the sender's layer, and keep the activations of later heads.
        later_activations = ActivationRecorder(HeadPatcher(patches))
        outputs = self._rerun_base(later_activations, self._rerun.first_block_of([sender.layer_key]))
        return later_activations, self._sign * (
            self._logit_differences(outputs)[0] - self._base_differences
        )

    def estimate_effects(self, by: ActivationName) -> dict[LayerKey, Tensor]:
        """Estimate each head's effect at each token (attribution patching), by layer key: (pair, head, token).

        The estimate is the effect to first order, from one forward and one backward pass of the base run. For keys and
        values, heads are key/value heads. Estimates are float64, on the CPU.
        """
        # One backward pass of the summed differences gives the gradient of each pair's logit difference with respect
        # to the values of all heads, as pairs do not affect each other.
        leaves = GradientLeaves(by)
        with torch.enable_grad():
            outputs = self._model.outputs(self._base_batch, leaves, last=self.batch.last)
            sum_of_differences = self._logit_differences(outputs).sum()
            head_values = list(leaves.by_layer.values())
            gradients = torch.autograd.grad(sum_of_differences, head_values, materialize_grads=True)
        # To first order, the effect is the gradient times the change from the base to the source values:
        # (pair, head, token).
        estimates = {}
        for (layer_key, base_values), gradient in zip(leaves.by_layer.items(), gradients, strict=True):
            source_values = self.source_activations.values(by, layer_key, range(base_values.shape[1]))
            estimate = estimate_effect(gradient, base_values.detach(), source_values)
            estimates[layer_key] = self._sign * estimate.cpu().double()
        return estimates
