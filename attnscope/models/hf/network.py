"""A transformers model whose attention is known, run with a probe at its seam: what its forward gets, what comes of it.

What it is run for, a text read or written, a photo, a recording, others know.
"""

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from attnscope.core.attention.probes import Gate, Place, Weights
from attnscope.core.attention.seam import AttentionCall, Kind, Probe, attend
from attnscope.errors import AttnscopeError
from attnscope.models.hf.check.compare import hidden_states, run_for_weights, takes_light_masks, tolerance
from attnscope.models.hf.check.examples import (
    accepts,
    causal_types,
    pad_id,
    position_table,
    standing_arguments,
    vocab_size,
)
from attnscope.models.hf.check.longer import Survey, check_beyond, mixes_lengths
from attnscope.models.hf.dispatch import input_device, is_dispatched
from attnscope.models.hf.parts import in_one_line, reads_pictures, reads_text, wordless
from attnscope.models.hf.seam import LIGHT_FROM, Plan, perform
from attnscope.models.hf.tokenizer import HuggingFaceTokenizer, NumbersTokenizer
from attnscope.models.info import ModelInfo, require_length, require_numbers
from attnscope.models.inside.projections import hooks
from attnscope.models.inside.tape import blocks_of
from attnscope.models.model import Batch, Loss, MixedLengthsError, Outputs, Rerun


class Network:
    """A transformers model, and what was found out of it.

    Attributes:
        model: The model, with its head if it has one.
        base: The part of it that attends.
        device: Where it takes its inputs.
        is_spread: Whether accelerate moves what its parts get.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        base: PreTrainedModel,
        tokenizer: HuggingFaceTokenizer | NumbersTokenizer,
        info: ModelInfo,
        survey: Survey,
    ) -> None:
        self.model: Any = model
        self.base: Any = base
        self.tokenizer, self.info, self.survey = tokenizer, info, survey
        self.device = input_device(base)
        self.is_spread = is_dispatched(base)
        self._takes_light: bool | None = None

    @property
    def at_seam(self) -> bool:
        """Whether its attention passes the seam."""
        return self.survey.path == "seam"

    @cached_property
    def loss(self) -> Loss | None:
        """What its language-model head predicts; None without one that does."""
        return loss_of(self.model, self.info.kinds) if self.at_seam else None

    def run(self, inputs: Mapping[str, Any], probe: Probe) -> Tensor:
        """Runs what the forward takes: input_ids, pixel_values, input_features … Returns the last hidden states."""
        with in_one_line(self.info.name, "does not run on this input"):
            return self._run(inputs, probe)

    def outputs(
        self,
        inputs: Mapping[str, Any],
        probe: Probe,
        *,
        logits: bool,
        skipped: Mapping[nn.Module, int] | None = None,
        last: int | None = None,
    ) -> Outputs:
        """As `run`, with what the head predicts if asked for, at the last so many tokens; None = at all.

        With a number of tokens, masks are by key alone where texts are long. Modules do not make the first calls that
        are skipped, as a part of the model is not computed.
        """
        inputs = self._forward_inputs(inputs)
        self.require_seam("its heads cannot be changed")
        with in_one_line(self.info.name, "does not run on this input"):
            if logits and self.loss is not None:
                light = None if last is None else self._light_from(inputs)
                return run_with_logits(
                    self.model, self.base, inputs, self.survey.plan, probe, skipped=skipped, light=light, last=last
                )
            return Outputs(self._hidden(perform(self.base, inputs, self.survey.plan, probe, skipped=skipped)))

    def text_inputs(self, batch: Batch, *, target: bool = True) -> dict[str, Tensor]:
        """What the forward gets for texts, with the model's own padding."""
        if self.survey.beside:
            raise AttnscopeError(
                f"{self.info.name} reads words beside a picture alone", "give it one: --image photo.jpg"
            )
        if not reads_text(self.base):
            wordless(self.info.name, self.base).encode("")
        batch = batch.to(batch.ids.device)
        ids = self._pad(batch.ids, batch.mask)
        inputs = {"input_ids": ids, **causal_types(self.base, ids)}
        if batch.mask is not None:
            inputs["attention_mask"] = batch.mask.long()
        segments = batch.segments
        # Segments that say nothing are left out: GPT-2 would add the embedding of token 0 to every token for them.
        if segments is not None and (not bool(segments.any()) or getattr(self.base.config, "type_vocab_size", 0) < 2):
            segments = None
        if accepts(self.base, "token_type_ids") and (segments is not None or self.tokenizer.type_ids):
            types = torch.zeros_like(ids) if segments is None else segments.clone()
            for number, kind in self.tokenizer.type_ids.items():
                types[ids == number] = kind
            inputs["token_type_ids"] = types
        if target and self.base.config.is_encoder_decoder:
            if batch.target_ids is None:
                raise AttnscopeError(
                    f"{self.info.name} has an encoder and a decoder, and nothing is given that its decoder reads",
                    "use encode_target or greedy_target",
                )
            inputs["decoder_input_ids"] = self._pad(batch.target_ids, batch.target_mask)
            if batch.target_mask is not None:
                inputs["decoder_attention_mask"] = batch.target_mask.long()
        return inputs

    def require_seam(self, otherwise: str) -> None:
        """Refuses models of which only the weights can be seen."""
        if not self.at_seam:
            raise AttnscopeError(
                f"{self.info.name} does not pass its attention through the seam: {otherwise}",
                "only its weights can be seen: attnscope heatmap",
            )

    def require_whole(self, inputs: Mapping[str, Any], n_tokens: int, where: str, hint: str) -> None:
        """Refuses models whose layers do not each see all of the `n_tokens` that they are given.

        `where` says where there are so many, and what the model does instead; the hint names models that can be shown.
        """
        sizes: set[tuple[int, int]] = set()

        def observe(call: AttentionCall) -> Tensor:
            sizes.add((call.query.shape[2], call.key.shape[2]))
            return attend(call)

        weights_probe = Weights()
        with torch.no_grad():
            self._run(inputs, observe if self.at_seam else weights_probe)
        sizes |= {(w.shape[2], w.shape[3]) for by_layer in weights_probe.maps.values() for w in by_layer.values()}
        if others := sorted(sizes - {(n_tokens, n_tokens)}):
            queries, keys = others[0]
            raise AttnscopeError(
                f"{self.info.name} has attention of {queries} queries on {keys} keys where {where}", hint
            )

    def require_known(self, ids: Tensor) -> None:
        """Refuses token numbers that the model has no embedding for."""
        require_numbers(self.info, ids, vocab_size(self.base))

    def _run(self, inputs: Mapping[str, Any], probe: Probe) -> Tensor:
        inputs, survey = self._forward_inputs(inputs), self.survey
        if not self.at_seam:
            return self._hidden(run_for_weights(self.base, inputs, survey.layers, self.info.name, probe))
        beside = survey.beside or ("pixel_values" in inputs and reads_pictures(self.base))
        light = None if survey.beside else self._light_from(inputs)
        return self._hidden(
            perform(self.base, inputs, survey.plan, probe, light, through=survey.through, beside=beside)
        )

    def _forward_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """All that the forward gets, on the model's device."""
        for mask in (inputs.get("attention_mask"), inputs.get("decoder_attention_mask")):
            if isinstance(mask, Tensor) and mask.ndim == 2 and mixes_lengths(self.base.config, mask):
                raise MixedLengthsError(
                    f"padding a text of {int(mask.sum(1).min())} tokens to {mask.shape[1]} changes what "
                    f"{self.info.name} computes: the longest text of a batch decides on rotary "
                    "factors, or on the kind of attention",
                    "run short and long texts in separate batches",
                )
        check_beyond(self.base, self.survey, inputs)
        inputs = {**standing_arguments(self.base), **self.survey.extras, **inputs}
        return {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in inputs.items()}

    def _hidden(self, output: Any) -> Tensor:
        hidden = hidden_states(output)
        if hidden is None and self.survey.beside:  # some give out what their head says, and no more
            hidden = getattr(output, "logits", None)
        if hidden is None:
            raise AttnscopeError(f"{self.info.name} returns no hidden states")
        return hidden

    def _light_from(self, inputs: Mapping[str, Any]) -> int | None:
        """Whether this run gets light masks: on long texts, where the model is known to understand them."""
        tokens = [inputs[name].shape[1] for name in ("input_ids", "decoder_input_ids") if name in inputs]
        # accelerate moves masks from device to device, so that they are not known again.
        if max(tokens, default=0) < LIGHT_FROM or self.is_spread:
            return None
        if self._takes_light is None:
            self._takes_light = takes_light_masks(self.base, self.survey.plan, self.survey.extras)
        return LIGHT_FROM if self._takes_light else None

    def _pad(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Numbers with the model's own padding, checked."""
        if position_table(self.base) is not None:
            require_length(self.info, ids.shape[1])
        ids = ids if mask is None else ids.masked_fill(~mask, pad_id(self.base))
        self.require_known(ids)
        return ids


_LOSSES: tuple[tuple[Loss, dict[str, Any]], ...] = (
    ("masked", modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    ("causal", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    ("causal", modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),  # of text alone: the language model's head
    ("target", modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
)


def loss_of(model: PreTrainedModel, kinds: tuple[str, ...]) -> Loss | None:
    """What a model's head predicts, by its class and by what its attention hides; None without such a head.

    A head that was trained to write but whose attention looks both ways (BERT's, without `is_decoder`) predicts
    nothing.
    """
    suits: dict[Loss, bool] = {
        "masked": kinds == ("encoder",), "causal": kinds == ("decoder",), "target": "cross" in kinds,
    }  # fmt: skip
    name = type(model).__name__
    untyped: Any = model
    for loss, names in _LOSSES:
        if suits[loss] and name in names.values() and untyped.get_output_embeddings() is not None:
            return loss
    return None


def run_with_logits(
    model: PreTrainedModel,
    base: PreTrainedModel,
    inputs: Mapping[str, Any],
    plan: Plan,
    probe: Probe,
    *,
    skipped: Mapping[nn.Module, int] | None = None,
    light: int | None = None,
    last: int | None = None,
) -> Outputs:
    """Runs a model with its head on top, at the last so many tokens where it can take that; else see `seam.perform`."""
    base_outputs: list[Any] = []

    # OPT's head calls the decoder in the base and not the base; where the base is called, it ends last.
    decoder = getattr(base, "decoder", None)
    watched = [module for module in (base, decoder) if isinstance(module, PreTrainedModel)]

    def run(**arguments: Any) -> Any:
        with hooks(watched, lambda module, arguments, output: base_outputs.append(output)):
            return model(**arguments)

    arguments = {**standing_arguments(model), **inputs}
    heads: list[nn.Module] = []
    if last is not None and accepts(model, "logits_to_keep"):
        arguments["logits_to_keep"] = last
        untyped: Any = model
        heads = [head for head in (untyped.get_output_embeddings(),) if isinstance(head, nn.Module)]
    # Torch multiplies a slice text by text, and a copy of it at once: four times as fast.
    with hooks(heads, lambda _, values, named: ((values[0].contiguous(), *values[1:]), named), before=True):
        output = perform(base, arguments, plan, probe, light, through=run, skipped=skipped)
    hidden = hidden_states(base_outputs[-1]) if base_outputs else None
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor) and last is not None:
        logits = logits[:, -last:]
    n = None if hidden is None else (len(hidden), min(hidden.shape[1], last or hidden.shape[1]))
    if hidden is None or not isinstance(logits, Tensor) or logits.shape[:2] != n:
        raise AttnscopeError(f"the head of {type(model).__name__} gives no prediction for each token")
    return Outputs(hidden, logits)


def blocks_by_layer(base: PreTrainedModel, plan: Plan) -> dict[tuple[Kind, int], nn.Module]:
    """The block of each attention whose hidden states are its keys'; a block that holds several such is nobody's."""
    blocks: dict[tuple[Kind, int], nn.Module] = {}
    n_attentions: Counter[nn.Module] = Counter()
    for module, places in plan.items():
        own = [place for place in places if place[0] != "cross"]
        for block in blocks_of(base, [module]) if own else ():
            n_attentions[block] += 1
            blocks |= dict.fromkeys(own, block)
    return {place: block for place, block in blocks.items() if n_attentions[block] == 1}


def skipped_calls(plan: Plan, block_of: Mapping[Place, int], first: int) -> dict[nn.Module, int]:
    """How many of its calls each module does not make where blocks before `first` are not computed."""
    return {module: sum(block_of.get(place, first) < first for place in places) for module, places in plan.items()}


def can_resume(rerun: Rerun, plan: Plan, base: PreTrainedModel) -> bool:
    """Whether a rerun from each block on is what a whole forward with the same change gives.

    Tried with the first head of each attention taken out, on the texts twice over.
    """
    places = [place for of_module in plan.values() for place in of_module]
    allowed = tolerance(base, len(places))
    shapes: dict[Place, tuple[int, int]] = {}

    def observe(call: AttentionCall) -> Tensor:
        shapes[call.kind, call.layer] = (call.query.shape[0], call.n_heads)
        return attend(call)

    try:
        rerun.again(observe)
        for place in places:
            batch, n_heads = shapes[place]
            factors = torch.ones(2 * batch, n_heads)
            factors[batch:, 0] = 0
            gate = Gate({place: factors})
            short, long = (rerun.again(gate, first, 2) for first in (rerun.block([place]), 0))
            for ours, theirs in ((short.hidden, long.hidden), (short.logits, long.logits)):
                if ours is None or theirs is None:
                    continue
                size = max(float(theirs.abs().max()), 1e-30)
                if ours.shape != theirs.shape or not float((ours - theirs).abs().max()) <= allowed * size:
                    return False
    except Exception:  # a model may fail in any way where part of it is set aside
        return False
    return True
