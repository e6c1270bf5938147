"""A transformers model whose attention is known, run with a probe at its seam: what its forward gets, what comes of it.

What it is run for, a text read or written, a photo, a recording, others know. `probe_forwards` has a probe at the seam
of a model that others call.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnscope.core.attention.probes import Weights
from attnscope.core.attention.seam import AttentionCall, Probe, attend
from attnscope.errors import AttnscopeError
from attnscope.models.hf.check.compare import hidden_states, takes_light_masks
from attnscope.models.hf.check.eager import run_for_weights
from attnscope.models.hf.check.examples import causal_types, pad_id, position_table, standing_arguments, vocab_size
from attnscope.models.hf.check.longer import Survey, check_beyond
from attnscope.models.hf.check.reach import mixes_lengths
from attnscope.models.hf.dispatch import input_device, is_dispatched
from attnscope.models.hf.outputs import loss_of, run_with_logits
from attnscope.models.hf.parts import in_one_line, reads_pictures, reads_text, wordless
from attnscope.models.hf.seam import LIGHT_FROM, is_in_progress, perform
from attnscope.models.hf.tokenizer import HuggingFaceTokenizer, NumbersTokenizer
from attnscope.models.info import ModelInfo, require_length, require_numbers
from attnscope.models.model import Batch, Loss, MixedLengthsError, Outputs
from attnscope.records import Tokens


class Network:
    """A transformers model, and what was found out of it."""

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
        """As `run`, with what the head predicts if asked for."""
        given = self._forward_inputs(inputs)
        self.require_seam("its heads cannot be changed")
        with in_one_line(self.info.name, "does not run on this input"):
            if logits and self.loss is not None:
                light = None if last is None else self._light_from(given)
                return run_with_logits(
                    self.model, self.base, given, self.survey.plan, probe, skipped=skipped, light=light, last=last
                )
            return Outputs(self._hidden(perform(self.base, given, self.survey.plan, probe, skipped=skipped)))

    def text_inputs(self, batch: Batch, *, target: bool = True) -> dict[str, Tensor]:
        """What the forward gets for texts, with the model's own padding."""
        if self.survey.beside:
            raise AttnscopeError(
                f"{self.info.name} reads words beside a picture alone", "give it one: --image photo.jpg"
            )
        accepted = inspect.signature(self.base.forward).parameters
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
        if "token_type_ids" in accepted and (segments is not None or self.tokenizer.type_ids):
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
        """Refuses models whose layers do not each see all that they are given."""
        sizes: set[tuple[int, int]] = set()

        def observe(call: AttentionCall) -> Tensor:
            sizes.add((call.query.shape[2], call.key.shape[2]))
            return attend(call)

        kept = Weights()
        with torch.no_grad():
            self._run(inputs, observe if self.at_seam else kept)
        sizes |= {(w.shape[2], w.shape[3]) for by_layer in kept.maps.values() for w in by_layer.values()}
        for queries, keys in sorted(sizes - {(n_tokens, n_tokens)}):
            raise AttnscopeError(
                f"{self.info.name} has attention of {queries} queries on {keys} keys where {where}", hint
            )

    def require_known(self, ids: Tensor) -> None:
        """Refuses token numbers that the model has no embedding for."""
        require_numbers(self.info, ids, vocab_size(self.base))

    def _run(self, inputs: Mapping[str, Any], probe: Probe) -> Tensor:
        given = self._forward_inputs(inputs)
        if self.at_seam:
            survey = self.survey
            beside = survey.beside or ("pixel_values" in inputs and reads_pictures(self.base))
            light = None if survey.beside else self._light_from(given)
            return self._hidden(
                perform(self.base, given, survey.plan, probe, light, through=survey.through, beside=beside)
            )
        return self._hidden(run_for_weights(self.base, given, self.survey.layers, self.info.name, probe))

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
        given = {**standing_arguments(self.base), **self.survey.extras, **inputs}
        return {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in given.items()}

    def _hidden(self, output: Any) -> Tensor:
        hidden = hidden_states(output)
        if hidden is None and self.survey.beside:  # some give out what their head says, and no more
            hidden = getattr(output, "logits", None)
        if hidden is None:
            raise AttnscopeError(f"{self.info.name} returns no hidden states")
        return hidden

    def _light_from(self, given: Mapping[str, Any]) -> int | None:
        """Whether this run gets light masks: on long texts, where the model is known to understand them."""
        tokens = [given[name].shape[1] for name in ("input_ids", "decoder_input_ids") if name in given]
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


ProbeOf = Callable[[Sequence[Tokens], NDArray[np.bool_]], Probe]
"""Makes a probe of the texts of a batch, and where in it their tokens are, (text, token), bool."""


@contextlib.contextmanager
def probe_forwards(network: Network, probe_of: ProbeOf) -> Iterator[Any]:
    """Within it, each forward pass of a model has a probe at its seam, made of the tokens that it reads.

    Yields:
        The torch module, with its head. Parts of it that are called by themselves are probed too.
    """
    # The outermost of these that is called makes the probe: some heads call only a part of the base.
    modules = list(dict.fromkeys([network.model, network.base]))
    is_running = False

    def probe(forward: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(forward).parameters)

        @functools.wraps(forward)  # whoever calls it may ask for its signature
        def run(*args: Any, **named: Any) -> Any:
            nonlocal is_running
            if is_running:
                return forward(*args, **named)
            if is_in_progress():
                raise AttnscopeError(
                    f"attnscope runs {network.info.name} while its attention is replaced", "leave the context first"
                )
            given = dict(zip(names, args, strict=False)) | named
            at_seam = probe_of(*_texts(network, given))
            is_running = True
            try:
                return perform(network.base, given, network.survey.plan, at_seam, through=forward)
            finally:
                is_running = False

        return run

    before = [vars(module).get("forward") for module in modules]
    for module in modules:
        module.forward = probe(module.forward)
    try:
        yield network.model
    finally:
        for module, forward in zip(modules, before, strict=True):
            if forward is None:  # the class's own is behind it
                del module.forward
            else:
                module.forward = forward


def _texts(network: Network, given: Mapping[str, Any]) -> tuple[list[Tokens], NDArray[np.bool_]]:
    """The texts of a batch, and where in it their tokens are."""
    ids = given.get("input_ids")
    if ids is None:
        raise AttnscopeError(f"{network.info.name} is given no token numbers here", "pass input_ids")
    numbers, mask = ids.cpu().numpy(), given.get("attention_mask")
    if mask is not None and mask.ndim != 2:
        raise AttnscopeError(f"the attention mask has {mask.ndim} dimensions", "pass one of (batch, token)")
    real = np.ones(numbers.shape, np.bool_) if mask is None else mask.cpu().numpy() > 0
    if real.shape != numbers.shape:
        raise AttnscopeError(
            f"the model reads {numbers.shape[1]} tokens and is told of {real.shape[1]}: it continues cached ones",
            "pass use_cache=False",
        )
    hidden = network.tokenizer.mask_id
    made = [network.tokenizer.encode_ids(row[kept].tolist()) for row, kept in zip(numbers, real, strict=True)]
    # A hidden token stands for an ordinary one.
    return [replace(one, special=one.special & (one.ids != hidden)) for one in made], real
