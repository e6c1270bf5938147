"""Run a transformers model with a probe at the seam, the one function through which all of its attention passes.

`hf.survey` finds out what attention a model has, and `hf.check` whether the seam shows it truly. `hf.loading` and
`hf.assembling` make the models. `hf.senses` turns photos and recordings into inputs, and writes texts.
"""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnscope.core.attention.probes import HeadGate, LayerKey, WeightsRecorder
from attnscope.core.attention.seam import AttentionCall, Probe
from attnscope.errors import AttnscopeError
from attnscope.models.devices import input_device, is_spread, name_dtype
from attnscope.models.hf.check import check_beyond, require_equal, survey_attention, takes_light_masks
from attnscope.models.hf.eager import run_for_weights, tolerance
from attnscope.models.hf.examples import depends_on_batch_length, make_examples
from attnscope.models.hf.heads import (
    CLASS_LOSSES,
    class_labels,
    describe_head,
    find_loss_kind,
    output_embeddings,
    run_with_logits,
)
from attnscope.models.hf.parts import (
    Adapter,
    causal_token_types,
    count_tokens,
    fixed_arguments,
    forward_accepts,
    hidden_states,
    input_name,
    make_wordless_tokenizer,
    max_tokens,
    mute_transformers,
    pad_token_id,
    position_table,
    reads_pictures_in_text,
    reads_text,
    sees_pictures_only,
    takes_audio,
    translate_errors,
    vocab_size,
)
from attnscope.models.hf.seam import LIGHT_FROM, Plan, run_with_probe
from attnscope.models.hf.senses.cross_readers import choose_cross_reader
from attnscope.models.hf.senses.media_readers import AudioReader, ImageReader
from attnscope.models.hf.senses.text_generator import TextGenerator
from attnscope.models.hf.senses.vision_language import VisionLanguageReader
from attnscope.models.hf.survey import AttentionSurvey, SurveyCache
from attnscope.models.hf.tokenizer import HuggingFaceTokenizer, NumbersTokenizer, WordlessTokenizer
from attnscope.models.hf.weights import head_slices
from attnscope.models.info import ModelInfo, require_known_ids, require_length, require_seam
from attnscope.models.inside.tape import ResumableRun, blocks_of
from attnscope.models.locks import lock_model
from attnscope.models.model import Batch, LossKind, MixedLengthsError, Model, Outputs, WeightSlice


@dataclass(frozen=True, eq=False)
class RawModel:
    """A model with its tokenizer, processor and adapter, before its attention is surveyed.

    Attributes:
        model: The transformers model, with the head for its task if it has one.
        tokenizer: Turns texts into tokens, or refuses texts.
        name: What it is called.
        source: Where its files are from, or "memory".
        sha256: The hash of its weights; "" where it is not from files.
        notes: What a user must know of how it was loaded, one sentence each.
        processor: Turns pictures or sound into the model's inputs; None where there is none.
        adapter: The adapter that is part of it.
        hashes: Hashes of its files, under which the result of the self-check is stored; None = it is not stored.
        recheck: Whether to run the self-check even if a result is stored.
    """

    model: PreTrainedModel
    tokenizer: HuggingFaceTokenizer | NumbersTokenizer
    name: str
    source: str = "memory"
    sha256: str = ""
    notes: tuple[str, ...] = ()
    processor: Any = None
    adapter: Adapter = Adapter()
    hashes: Mapping[str, str] | None = None
    recheck: bool = False


class HuggingFaceModel(Model):
    """A loaded transformers model, as a Model.

    Some files hold several models here: CLIP has one for texts and one for pictures, and TrOCR's vision tower can be
    shown alone, or with the decoder that reads it. One of them opens the others.

    Args:
        raw: The transformers model, and what it was loaded with.
        base: The transformers model without the head for its task.
        survey: Its attention layers, and how far they were checked.
        open_image_model: Makes the model for pictures of the same files; None = there is no other one.
        open_image_text_model: Makes the model for pictures and words of the same files; None = there is no other one.
        memory: The stored result of the self-check; None = it is not stored.

    Attributes:
        model: The transformers model, with the head for its task if it has one.
        base: The same without that head.
        survey: Its attention layers, and how far they were checked.
        at_seam: Whether all of its attention passes the seam; else weights that the model itself returns are shown.
        vocabulary: The tokenizer that it was loaded with.
        tokenizer: The same, or one that refuses texts, if the model reads them only with a picture.
        device: Where it takes its inputs.
        is_spread: Whether accelerate spreads it over several devices.
    """

    def __init__(
        self,
        raw: RawModel,
        base: PreTrainedModel,
        survey: AttentionSurvey,
        open_image_model: "Callable[[], HuggingFaceModel] | None" = None,
        open_image_text_model: "Callable[[], HuggingFaceModel] | None" = None,
        memory: SurveyCache | None = None,
    ) -> None:
        self.model: Any = raw.model
        self.base: Any = base
        self.info = _make_info(raw, base, survey)
        self.survey = survey
        self.at_seam = survey.path == "seam"
        self.device = input_device(base)
        self.is_spread = is_spread(base)
        self.vocabulary = raw.tokenizer
        self.tokenizer: HuggingFaceTokenizer | NumbersTokenizer = raw.tokenizer
        # `has_unplanned_modules`: a vision tower attends too, unseen, as a picture is read with the words.
        if survey.has_unplanned_modules and not isinstance(raw.tokenizer, WordlessTokenizer):
            hint = "give it one: --image photo.jpg"
            self.tokenizer = WordlessTokenizer(f"{raw.name} reads words beside a picture alone", hint)
        self._processor = raw.processor
        self._open_image_model = open_image_model
        self._open_image_text_model = open_image_text_model
        self._memory = memory
        # Shape of a picture or sound -> how many tokens each layer must see of it.
        self._expected: dict[tuple[int, ...], int] = {}

    @cached_property
    def text_generator(self) -> TextGenerator | None:
        """Return the part that writes text by the model's decoder; None without a decoder."""
        return TextGenerator(self) if "decoder" in self.info.kinds else None

    @cached_property
    def image_reader(self) -> ImageReader | None:
        """Return the part that sees pictures; None if it sees none."""
        if self._open_image_model is not None:
            return self._open_image_model().image_reader
        return ImageReader(self, self._processor) if sees_pictures_only(self.base) else None

    @cached_property
    def image_text_reader(self) -> VisionLanguageReader | None:
        """Return the part that reads pictures and words; None if it has none."""
        if self._open_image_text_model is not None:
            return self._open_image_text_model().image_text_reader
        # Words that attend across to a picture (Mllama), or a picture among the tokens of the text (LLaVA).
        reader = choose_cross_reader(self.base) if self.survey.has_unplanned_modules else None
        if reader is not None:
            return reader(self, self._processor)
        if self.text_generator is not None and reads_pictures_in_text(self.base):
            return VisionLanguageReader(self, self._processor)
        return None

    @cached_property
    def audio_reader(self) -> AudioReader | None:
        """Return the part that hears recordings; None for models that read texts or see pictures instead.

        It refuses recordings where the model takes them in a way that is not supported.
        """
        if not takes_audio(self.base) and (reads_text(self.base) or sees_pictures_only(self.base)):
            return None
        return AudioReader(self, self._processor)

    @cached_property
    def loss(self) -> LossKind | None:
        """Return what its head predicts, such as "causal"; None without a head that predicts."""
        return find_loss_kind(self.model, self.info.kinds) if self.at_seam else None

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of the classes that its head tells apart; () if that is no classifier."""
        return class_labels(self.model) if self.loss in CLASS_LOSSES else ()

    @cached_property
    def resumes(self) -> bool:
        """Return whether the model can be run again from a block on: this must give what a whole forward gives.

        It is tried on a small input, and a success is stored with the result of the self-check.
        """
        if not self.at_seam:
            return False
        if self._memory is not None and self._memory.resumes:
            return True
        _, inputs = make_examples(self.base)
        batch = Batch(inputs["input_ids"], target_ids=inputs.get("decoder_input_ids"))
        with torch.no_grad():
            rerun = self._rerun(batch, self.loss is not None, resumes=True)
            resumes = can_resume(rerun, self.base)
        # A failure is not stored: it may be for want of memory.
        if resumes and self._memory is not None:
            self._memory.remember_resumes()
        return resumes

    def run(self, batch: Batch, probe: Probe) -> Tensor:
        """Run a batch as `Model.run` says. Where `at_seam` is False, the probe must be a `WeightsRecorder`."""
        return self.run_inputs(self.text_inputs(batch), probe)

    def run_inputs(self, inputs: Mapping[str, Any], probe: Probe) -> Tensor:
        """Run the forward on its arguments, such as input_ids or pixel_values; return the last hidden states.

        Raises:
            AttnscopeError: It does not run, or a layer does not see all tokens that `expect` named for the input.
        """
        n_tokens = self._expected.get(self._shape_of(inputs))

        def require_sizes(queries: int, keys: int) -> None:
            if n_tokens is not None and (queries, keys) != (n_tokens, n_tokens):
                raise AttnscopeError(
                    f"{self.info.name} has attention of {queries} queries on {keys} keys where it is given {n_tokens} "
                    "tokens: it adds or merges tokens, or attends within windows, which is not supported",
                    "choose a model whose layers all see the same tokens, such as ViT, DINOv2 or wav2vec 2.0",
                )

        def watch(call: AttentionCall) -> Tensor:
            require_sizes(call.query.shape[2], call.key.shape[2])
            return probe(call)

        if self.at_seam:
            return self.outputs_of_inputs(inputs, watch, logits=False).hidden
        # Weights that the model itself returns, (batch, head, query, key), are looked at afterwards.
        hidden = self.outputs_of_inputs(inputs, probe, logits=False).hidden
        if isinstance(probe, WeightsRecorder):
            for maps in probe.maps.values():
                for weights in maps.values():
                    require_sizes(*weights.shape[2:])
        return hidden

    def outputs(
        self, batch: Batch, probe: Probe, *, logits: bool = True, last: int | None = None
    ) -> Outputs:
        """Run a batch as `Model.outputs` says; without logits, the head on top is not run."""
        return self.outputs_of_inputs(self.text_inputs(batch), probe, logits, last)

    def outputs_of_inputs(
        self,
        inputs: Mapping[str, Any],
        probe: Probe,
        logits: bool = True,
        last: int | None = None,
        plan: Plan | None = None,
    ) -> Outputs:
        """Run as `outputs` does, on the forward's arguments.

        `plan` says which call of which module is which layer, if only a part of the model is to be computed; None = all
        of the survey's.
        """
        inputs = self._forward_inputs(inputs)
        survey = self.survey
        plan = survey.plan if plan is None else plan
        with translate_errors(self.info.name, "does not run on this input"):
            if not self.at_seam:
                output = run_for_weights(self.base, inputs, survey, self.info.name, probe)
            elif logits and self.loss is not None:
                # Texts of which all tokens have logits are short enough for masks that are written out.
                min_light_keys = None if last is None else self._min_light_keys(inputs)
                return run_with_logits(
                    self.model, self.base, inputs, plan, probe, min_light_keys=min_light_keys, last=last
                )
            else:
                # A vision tower attends too, past the probe.
                has_picture = "pixel_values" in inputs and reads_pictures_in_text(self.base)
                output = run_with_probe(
                    self.base,
                    inputs,
                    plan,
                    probe,
                    self._min_light_keys(inputs),
                    run_forward=survey.run_forward,
                    has_unplanned_modules=survey.has_unplanned_modules or has_picture,
                )
        hidden = hidden_states(output)
        # Some readers of pictures and words return logits and no hidden states.
        if hidden is None and survey.has_unplanned_modules:
            hidden = getattr(output, "logits", None)
        if hidden is None:
            raise AttnscopeError(f"{self.info.name} returns no hidden states")
        return Outputs(hidden)

    def rerun(self, batch: Batch, *, logits: bool = True, last: int | None = None) -> ResumableRun:
        """Run a batch, and keep what is needed to run it again from a block on."""
        return self._rerun(batch, logits, last, resumes=self.resumes)

    def _rerun(
        self, batch: Batch, logits: bool, last: int | None = None, *, resumes: bool
    ) -> ResumableRun:
        def forward(batch: Batch, probe: Probe, block_of: Mapping[LayerKey, int], first: int) -> Outputs:
            # Attentions in blocks before the first are not computed; those outside of all blocks always are.
            plan = {}
            for module, layer_keys in self.survey.plan.items():
                plan[module] = [
                    layer_key for layer_key in layer_keys if block_of.get(layer_key, first) >= first
                ]
            return self.outputs_of_inputs(self.text_inputs(batch), probe, logits, last, plan)

        return ResumableRun(forward, batch, blocks_of(self.base, self.survey.plan) if resumes else [])

    def expect(self, inputs: Mapping[str, Any], n_tokens: int) -> None:
        """Refuse later runs on pictures or sounds of this shape in which a layer does not see `n_tokens` tokens."""
        self._expected[self._shape_of(inputs)] = n_tokens

    def _shape_of(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        values = inputs.get(input_name(self.base))
        return tuple(values.shape) if isinstance(values, Tensor) else ()

    def text_inputs(self, batch: Batch, *, target: bool = True) -> dict[str, Tensor]:
        """Return the forward's arguments for texts, (batch, token) each, with the model's own padding.

        `target` is whether an encoder-decoder also gets the text of its decoder.
        """
        # Models that cannot read a text alone have a tokenizer that raises an error, which says why.
        if self.survey.has_unplanned_modules:
            self.tokenizer.encode("")
        if not reads_text(self.base):
            make_wordless_tokenizer(self.info.name, self.base).encode("")
        batch = batch.to(batch.ids.device)
        inputs = self._padded("", batch.ids, batch.mask)
        inputs |= causal_token_types(self.base, batch.ids)
        segments = batch.segments
        n_types = getattr(self.base.config, "type_vocab_size", 0)
        knows_segments = n_types > 1 and forward_accepts(self.base, "token_type_ids")
        # Leave out segments that are all 0: for them GPT-2 would add the embedding of token 0 to every token.
        if knows_segments and segments is not None and segments.any():
            inputs["token_type_ids"] = segments
        if target and self.base.config.is_encoder_decoder:
            if batch.target_ids is None:
                raise AttnscopeError(
                    f"{self.info.name} has an encoder and a decoder, and nothing is given that its decoder reads",
                    "use encode_target or greedy_target",
                )
            inputs |= self._padded("decoder_", batch.target_ids, batch.target_mask)
        return inputs

    def _padded(self, prefix: str, ids: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        """Return the arguments for one text of the forward: checked ids with the model's own padding, and their mask.

        Their names begin with the prefix, "" or "decoder_".
        """
        if position_table(self.base) is not None:
            require_length(self.info, ids.shape[1])
        if mask is not None:
            ids = ids.masked_fill(~mask, pad_token_id(self.base))
        require_known_ids(self.info, ids, vocab_size(self.base))
        inputs = {f"{prefix}input_ids": ids}
        if mask is not None:
            inputs[f"{prefix}attention_mask"] = mask.long()
        return inputs

    def modules(self) -> list[nn.Module]:
        """Return the transformers model, without the head for its task."""
        return [self.base]

    def blocks(self) -> dict[LayerKey, nn.Module]:
        """Return the block of each attention that reads the hidden states of its block, by layer key, (kind, layer).

        Cross-attention has none, for it reads the encoder's; nor have attentions of which one block holds several.
        """
        blocks: dict[LayerKey, nn.Module] = {}
        n_attentions: Counter[nn.Module] = Counter()
        for module, layer_keys in self.survey.plan.items():
            self_attentions = [(kind, layer) for kind, layer in layer_keys if kind != "cross"]
            if self_attentions:
                for block in blocks_of(self.base, [module]):
                    n_attentions[block] += 1
                    blocks |= dict.fromkeys(self_attentions, block)
        return {layer_key: block for layer_key, block in blocks.items() if n_attentions[block] == 1}

    def unembedding(self) -> nn.Module | None:
        """Return the layer from hidden states to logits over the vocabulary; None where the head predicts no tokens."""
        return None if self.loss is None or self.labels else output_embeddings(self.model)

    def head_slices(self, heads: Mapping[LayerKey, Sequence[int]]) -> list[WeightSlice]:
        """Return the parts of its weights that belong to these heads alone; see `hf.weights.head_slices`."""
        if self.is_spread:
            raise AttnscopeError(
                f"the weights of {self.info.name} are spread over devices", "leave out --device all"
            )
        require_seam(self.info, "which weights its heads have")
        return head_slices(self.model, self.base, self.survey, heads)

    @torch.no_grad()
    def static_embeddings(self, ids: Tensor) -> Tensor:
        """Return the rows of the token embedding: ids (batch, token) -> (batch, token, d), without gradient."""
        require_known_ids(self.info, ids, vocab_size(self.base))
        with lock_model([self.base]):
            output = self.base.get_input_embeddings()(ids.to(self.device))
        # I-BERT returns (rows, scale of its quantisation).
        rows: Tensor = output[0] if isinstance(output, tuple) else output
        return rows

    def untrained(self, seed: int) -> "HuggingFaceModel":
        """Return the same architecture with random weights, as transformers draws them before training."""
        with torch.random.fork_rng(devices=[]), mute_transformers():
            torch.manual_seed(seed)
            twin = type(self.base)(copy.deepcopy(self.base.config)).to(self.base.dtype).to(self.device)
            twin.train(False).requires_grad_(False)
            survey = survey_attention(twin, check=False)
        note = f"random weights, seed {seed}"
        raw = RawModel(twin, self.vocabulary, f"{self.info.name} untrained", notes=(note,))
        return HuggingFaceModel(raw, twin, replace(survey, checked=False))

    def _forward_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments of the forward, on the model's device.

        Refuse texts of lengths that must not be mixed. The first text beyond a sliding window starts a self-check.
        """
        for mask in (inputs.get("attention_mask"), inputs.get("decoder_attention_mask")):
            if (
                isinstance(mask, Tensor)
                and mask.ndim == 2
                and depends_on_batch_length(self.base.config, mask)
            ):
                raise MixedLengthsError(
                    f"padding a text of {int(mask.sum(1).min())} tokens to {mask.shape[1]} changes what "
                    f"{self.info.name} computes: the longest text of a batch decides on rotary "
                    "factors, or on the kind of attention",
                    "run short and long texts in separate batches",
                )
        n_tokens = count_tokens(inputs)
        if any(reach < n_tokens for reach in self.survey.reaches):
            check_beyond(self.base, self.survey, n_tokens)
        inputs = {**fixed_arguments(self.base), **self.survey.extras, **inputs}
        return {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in inputs.items()}

    def _min_light_keys(self, inputs: Mapping[str, Any]) -> int | None:
        """Return how many keys a mask must have to be a light one in a run on these inputs; None = none is.

        A light mask holds padding alone; `hf.seam` explains them. Long texts get them, if the model does not change
        its masks.
        """
        # accelerate copies masks from device to device: the seam would not know them again.
        if count_tokens(inputs) < LIGHT_FROM or self.is_spread or self.survey.has_unplanned_modules:
            return None
        return LIGHT_FROM if self._takes_light else None

    @cached_property
    def _takes_light(self) -> bool:
        return takes_light_masks(self.base, self.survey)


def _make_info(raw: RawModel, base: PreTrainedModel, survey: AttentionSurvey) -> ModelInfo:
    """Return the facts on a model that `attnscope models` shows and that results keep."""
    notes = (raw.adapter.note, *raw.notes, *survey.notes, raw.tokenizer.note)
    return ModelInfo(
        name=raw.name,
        source=raw.source,
        sha256=raw.sha256,
        architecture=base.config.model_type,
        engine="hf",
        path=survey.path,
        kinds=tuple(survey.layers),
        n_layers=tuple(survey.n_layers.values()),
        n_heads=tuple(survey.n_heads.values()),
        n_kv_heads=tuple(survey.n_kv_heads.values()),
        d_model=survey.d_model,
        n_parameters=sum(parameter.numel() for parameter in raw.model.parameters()),
        max_tokens=max_tokens(base),
        dtype=name_dtype(base.dtype),
        device=str(input_device(base)),
        checked=survey.checked,
        remembered=survey.remembered,
        notes=tuple(note for note in notes if note),
        adapter=raw.adapter.name,
        adapter_sha256=raw.adapter.sha256,
        head=describe_head(raw.model, base),
    )


def can_resume(rerun: ResumableRun, base: PreTrainedModel) -> bool:
    """Return whether running a text again from each block on gives what a whole forward with the same change gives.

    The change: the first head of the block's attention is taken out, in the second of two copies of the text.
    """
    try:
        allowed = tolerance(base, len(rerun.calls))
        for layer_key, call in rerun.calls.items():
            # What each head's output is multiplied by: (copy, head)
            factors = torch.ones(2, call.n_heads)
            factors[1, 0] = 0
            gate = HeadGate({layer_key: factors})
            resumed = rerun.again(gate, first=rerun.block([layer_key]), times=2)
            whole = rerun.again(gate, first=0, times=2)
            for ours, theirs in ((resumed.hidden, whole.hidden), (resumed.logits, whole.logits)):
                # Logits are compared like hidden states, relative to the largest.
                if ours is not None and theirs is not None:
                    require_equal({}, {"hidden": ours}, {"hidden": theirs}, allowed)
    except Exception:  # a model may fail in any way where part of it is set aside
        return False
    return True
