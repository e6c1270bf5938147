"""Run a transformers model with a probe at the *seam*, the function that replaces transformers' attention function.

A *probe* is a hook: it gets each attention call, and returns the attention's output. `hf.survey` finds the attention
layers of a model, and `hf.check` checks that the seam shows their true weights. `hf.loading` and `hf.assembling` make
the models. `hf.senses` turns photos and recordings into inputs, and generates texts.
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
from attnscope.models.hf.examples import depends_on_batch, make_examples
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
from attnscope.models.inside.tape import ResumableRun, find_blocks
from attnscope.models.locks import lock_model
from attnscope.models.model import Batch, LossKind, MixedLengthsError, Model, Outputs, WeightSlice


@dataclass(frozen=True, eq=False)
class RawModel:
    """A model with its tokenizer, processor and adapter, before its attention is surveyed.

    Attributes:
        model: The transformers model, with the head for its task if it has one.
        tokenizer: Turns texts into tokens, or refuses texts.
        name: The name in messages and results.
        source: Where its files came from, in words, or "memory".
        sha256: The hash of its weights; "" = it is not from files.
        notes: Sentences for the user on how it was loaded.
        processor: transformers' processor of pictures or sound; None if there is none.
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

    The files of some models hold several HuggingFaceModels: CLIP has one for texts and one for pictures, and TrOCR's
    vision tower can be shown alone, or with the decoder that attends to it. The first one opens the others.

    Args:
        raw: The transformers model with its tokenizer, processor and adapter.
        base: The transformers model without the head for its task.
        survey: Its attention layers, and how far they were checked.
        open_image_model: Makes the second model, for pictures; None if there is none.
        open_image_text_model: Makes the second model, for pictures with words; None if there is none.
        survey_cache: The stored result of the self-check; None = it is not stored.

    Attributes:
        model: The transformers model, with the head for its task if it has one.
        base: The transformers model without that head.
        survey: Its attention layers, and how far they were checked.
        at_seam: Whether all of its attention passes the seam. If not, weights that the model itself returns are shown.
        vocabulary: The tokenizer that it was loaded with.
        tokenizer: The same tokenizer; if the model reads texts only with a picture, a placeholder that refuses texts.
        device: The device of its inputs.
        is_spread: Whether accelerate spreads it over several devices.
    """

    def __init__(
        self,
        raw: RawModel,
        base: PreTrainedModel,
        survey: AttentionSurvey,
        open_image_model: "Callable[[], HuggingFaceModel] | None" = None,
        open_image_text_model: "Callable[[], HuggingFaceModel] | None" = None,
        survey_cache: SurveyCache | None = None,
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
        # `has_unplanned_modules`: a vision tower attends too, past the probe. So texts need a picture.
        if survey.has_unplanned_modules and not isinstance(raw.tokenizer, WordlessTokenizer):
            self.tokenizer = WordlessTokenizer(
                f"{raw.name} reads words beside a picture alone", "give it one: --image photo.jpg"
            )
        self._processor = raw.processor
        self._open_image_model = open_image_model
        self._open_image_text_model = open_image_text_model
        self._survey_cache = survey_cache
        # Shape of the main input, a picture or sound -> how many tokens each layer must attend to.
        self._n_tokens_by_shape: dict[tuple[int, ...], int] = {}

    @cached_property
    def text_generator(self) -> TextGenerator | None:
        """Return the object that generates text with the model's decoder; None without a decoder."""
        return TextGenerator(self) if "decoder" in self.info.kinds else None

    @cached_property
    def image_reader(self) -> ImageReader | None:
        """Return the object that turns pictures into inputs; None if the model takes no pictures alone."""
        if self._open_image_model is not None:
            return self._open_image_model().image_reader
        return ImageReader(self, self._processor) if sees_pictures_only(self.base) else None

    @cached_property
    def image_text_reader(self) -> VisionLanguageReader | None:
        """Return the object that turns pictures with words into inputs; None if the model takes no such inputs."""
        if self._open_image_text_model is not None:
            return self._open_image_text_model().image_text_reader
        # Words have cross-attention on a picture (Mllama), or a picture is among the tokens of the text (LLaVA).
        reader = choose_cross_reader(self.base) if self.survey.has_unplanned_modules else None
        if reader is not None:
            return reader(self, self._processor)
        if self.text_generator is not None and reads_pictures_in_text(self.base):
            return VisionLanguageReader(self, self._processor)
        return None

    @cached_property
    def audio_reader(self) -> AudioReader | None:
        """Return the object that turns recordings into inputs; None for models of texts or pictures.

        It raises an error if the model takes audio in a way that is not supported.
        """
        if not takes_audio(self.base) and (reads_text(self.base) or sees_pictures_only(self.base)):
            return None
        return AudioReader(self, self._processor)

    @cached_property
    def loss(self) -> LossKind | None:
        """Return what its task head predicts, such as "causal"; None if it has no task head."""
        return find_loss_kind(self.model, self.info.kinds) if self.at_seam else None

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of the classes that its task head predicts; () if it is no classifier."""
        return class_labels(self.model) if self.loss in CLASS_LOSSES else ()

    @cached_property
    def resumes(self) -> bool:
        """Return whether rerunning the model from a block on, with stored inputs, gives the same as a full forward.

        This is tested on a small input. Success is stored with the result of the self-check.
        """
        if not self.at_seam:
            return False
        if self._survey_cache is not None and self._survey_cache.model_resumes:
            return True
        _, inputs = make_examples(self.base)
        batch = Batch(inputs["input_ids"], target_ids=inputs.get("decoder_input_ids"))
        with torch.no_grad():
            rerun = self._rerun(batch, self.loss is not None, resumes=True)
            resumes = can_resume(rerun, self.base)
        # A failure is not stored, because it may come from a lack of memory.
        if resumes and self._survey_cache is not None:
            self._survey_cache.remember_resumes()
        return resumes

    def run(self, batch: Batch, probe: Probe) -> Tensor:
        """Run a batch as `Model.run` says. Where `at_seam` is False, the probe must be a `WeightsRecorder`."""
        return self.run_inputs(self.text_inputs(batch), probe)

    def run_inputs(self, inputs: Mapping[str, Any], probe: Probe) -> Tensor:
        """Run the forward on its arguments, such as input_ids or pixel_values; return the last hidden states.

        Raises:
            AttnscopeError: The model fails, or a layer attends to another number of tokens than `expect` set.
        """
        n_tokens = self._n_tokens_by_shape.get(self._shape_of(inputs))

        def require_sizes(n_queries: int, n_keys: int) -> None:
            if n_tokens is not None and (n_queries, n_keys) != (n_tokens, n_tokens):
                raise AttnscopeError(
                    f"{self.info.name} has attention of {n_queries} queries on {n_keys} keys where it is given "
                    f"{n_tokens} tokens: it adds or merges tokens, or attends within windows, which is not supported",
                    "choose a model whose layers all see the same tokens, such as ViT, DINOv2 or wav2vec 2.0",
                )

        def checking_probe(call: AttentionCall) -> Tensor:
            # query and key are (batch, head, token, d_head).
            require_sizes(call.query.shape[2], call.key.shape[2])
            return probe(call)

        if self.at_seam:
            return self.outputs_of_inputs(inputs, checking_probe, logits=False).hidden
        # The probe gets weights that the model itself returns, (batch, head, query, key): check them after the run.
        hidden = self.outputs_of_inputs(inputs, probe, logits=False).hidden
        if isinstance(probe, WeightsRecorder):
            for maps in probe.maps.values():
                for weights in maps.values():
                    require_sizes(*weights.shape[2:])
        return hidden

    def outputs(
        self, batch: Batch, probe: Probe, *, logits: bool = True, last: int | None = None
    ) -> Outputs:
        """Run a batch as `Model.outputs` says. If `logits` is False, the task head is not run."""
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

        `plan`, module -> layers, names the attentions to compute if only a part of the model is to be run; None = all
        attentions of the survey.
        """
        inputs = self._forward_inputs(inputs)
        survey = self.survey
        plan = survey.plan if plan is None else plan
        with translate_errors(self.info.name, "does not run on this input"):
            if not self.at_seam:
                output = run_for_weights(self.base, inputs, survey, self.info.name, probe)
            elif logits and self.loss is not None:
                # A text of which all tokens get logits is short enough for full masks, (query, key).
                min_light_keys = None if last is None else self._min_light_keys(inputs)
                return run_with_logits(
                    self.model, self.base, inputs, plan, probe, min_light_keys=min_light_keys, last=last
                )
            else:
                # With a picture, a vision tower attends too, past the probe.
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
        # Some models of pictures with words return logits and no hidden states.
        if hidden is None and survey.has_unplanned_modules:
            hidden = getattr(output, "logits", None)
        if hidden is None:
            raise AttnscopeError(f"{self.info.name} returns no hidden states")
        return Outputs(hidden)

    def rerun(self, batch: Batch, *, logits: bool = True, last: int | None = None) -> ResumableRun:
        """Run a batch, and store what is needed to run it again from a block on."""
        return self._rerun(batch, logits, last, resumes=self.resumes)

    def _rerun(
        self, batch: Batch, logits: bool, last: int | None = None, *, resumes: bool
    ) -> ResumableRun:
        def forward(batch: Batch, probe: Probe, block_of: Mapping[LayerKey, int], first: int) -> Outputs:
            # Compute the attentions from block `first` on, and the attentions outside of all blocks.
            plan = {}
            for module, layer_keys in self.survey.plan.items():
                plan[module] = [
                    layer_key for layer_key in layer_keys if block_of.get(layer_key, first) >= first
                ]
            return self.outputs_of_inputs(self.text_inputs(batch), probe, logits, last, plan)

        return ResumableRun(forward, batch, find_blocks(self.base, self.survey.plan) if resumes else [])

    def expect(self, inputs: Mapping[str, Any], n_tokens: int) -> None:
        """Make later runs on a main input of this shape fail if a layer does not attend to `n_tokens` tokens."""
        self._n_tokens_by_shape[self._shape_of(inputs)] = n_tokens

    def _shape_of(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the shape of the main input, such as pixel_values; () if it is missing."""
        values = inputs.get(input_name(self.base))
        return tuple(values.shape) if isinstance(values, Tensor) else ()

    def text_inputs(self, batch: Batch, *, target: bool = True) -> dict[str, Tensor]:
        """Return the forward's arguments for texts, (batch, token) each, with the model's own padding token.

        `target` is whether an encoder-decoder also gets the text of its decoder.
        """
        # If the model cannot read a text alone, its tokenizer raises an error that says why.
        if self.survey.has_unplanned_modules:
            self.tokenizer.encode("")
        if not reads_text(self.base):
            make_wordless_tokenizer(self.info.name, self.base).encode("")
        batch = batch.to(batch.ids.device)
        inputs = self._text_arguments("", batch.ids, batch.mask)
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
            inputs |= self._text_arguments("decoder_", batch.target_ids, batch.target_mask)
        return inputs

    def _text_arguments(self, prefix: str, ids: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        """Return token ids, checked and with the model's own padding token, and their mask as arguments of the forward.

        `ids` and `mask` are (batch, token). The names of the arguments begin with the prefix, "" or "decoder_".
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
        """Return (kind, layer) -> the block of that attention, if the block's input is all that the attention reads.

        Cross-attention is left out, because it reads the encoder's hidden states. So are the attentions of a block that
        holds several.
        """
        blocks: dict[LayerKey, nn.Module] = {}
        n_attentions: Counter[nn.Module] = Counter()
        for module, layer_keys in self.survey.plan.items():
            self_attentions = [(kind, layer) for kind, layer in layer_keys if kind != "cross"]
            if self_attentions:
                for block in find_blocks(self.base, [module]):
                    n_attentions[block] += 1
                    blocks |= dict.fromkeys(self_attentions, block)
        return {layer_key: block for layer_key, block in blocks.items() if n_attentions[block] == 1}

    def unembedding(self) -> nn.Module | None:
        """Return the layer from hidden states to logits over the vocabulary; None if the model predicts no tokens."""
        return None if self.loss is None or self.labels else output_embeddings(self.model)

    def head_slices(self, heads: Mapping[LayerKey, Sequence[int]]) -> list[WeightSlice]:
        """Return the parts of the model's weights that only these heads use; see `hf.weights.head_slices`."""
        if self.is_spread:
            raise AttnscopeError(
                f"the weights of {self.info.name} are spread over devices", "leave out --device all"
            )
        require_seam(self.info, "which weights its heads have")
        return head_slices(self.model, self.base, self.survey, heads)

    @torch.no_grad()
    def static_embeddings(self, ids: Tensor) -> Tensor:
        """Return the rows of the token embedding: ids (batch, token) -> (batch, token, d_model), without gradient."""
        require_known_ids(self.info, ids, vocab_size(self.base))
        with lock_model([self.base]):
            output = self.base.get_input_embeddings()(ids.to(self.device))
        # I-BERT returns a tuple (rows, scale of its quantisation).
        rows: Tensor = output[0] if isinstance(output, tuple) else output
        return rows

    def untrained(self, seed: int) -> "HuggingFaceModel":
        """Return the same architecture with random weights, as transformers initialises them before training."""
        with torch.random.fork_rng(devices=[]), mute_transformers():
            torch.manual_seed(seed)
            twin = type(self.base)(copy.deepcopy(self.base.config)).to(self.base.dtype).to(self.device)
            twin.train(False).requires_grad_(False)
            survey = survey_attention(twin, check=False)
        raw = RawModel(
            twin, self.vocabulary, f"{self.info.name} untrained", notes=(f"random weights, seed {seed}",)
        )
        return HuggingFaceModel(raw, twin, replace(survey, checked=False))

    def _forward_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments of the forward, on the model's device.

        Refuse a batch whose longest text changes the results of the others. The first text that is longer than a reach,
        such as a sliding window, starts another self-check.
        """
        for mask in (inputs.get("attention_mask"), inputs.get("decoder_attention_mask")):
            if isinstance(mask, Tensor) and mask.ndim == 2 and depends_on_batch(self.base.config, mask):
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
        """Return how many keys a mask must have to be a light one in a run on these inputs; None = no mask is.

        A light mask holds only the padding, to save memory on long texts; `hf.seam` explains them. The model must pass
        it on unchanged.
        """
        # The seam recognises a mask by its address, and accelerate copies masks from device to device.
        if count_tokens(inputs) < LIGHT_FROM or self.is_spread or self.survey.has_unplanned_modules:
            return None
        return LIGHT_FROM if self._takes_light else None

    @cached_property
    def _takes_light(self) -> bool:
        """Return whether the model passes light masks on unchanged; tested once, on a small input."""
        return takes_light_masks(self.base, self.survey)


def _make_info(raw: RawModel, base: PreTrainedModel, survey: AttentionSurvey) -> ModelInfo:
    """Return the facts about a model that `attnscope models` prints and that results store."""
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
        notes=tuple(filter(None, (raw.adapter.note, *raw.notes, *survey.notes, raw.tokenizer.note))),
        adapter=raw.adapter.name,
        adapter_sha256=raw.adapter.sha256,
        head=describe_head(raw.model, base),
    )


def can_resume(rerun: ResumableRun, base: PreTrainedModel) -> bool:
    """Return whether a rerun from each block on gives the same as a full forward with the same intervention.

    The intervention ablates the first head of the block's attention, in the second of two copies of the text.
    """
    try:
        allowed = tolerance(base, len(rerun.calls))
        for layer_key, call in rerun.calls.items():
            # Factors of the heads' outputs, (copy, head)
            factors = torch.ones(2, call.n_heads)
            factors[1, 0] = 0
            gate = HeadGate({layer_key: factors})
            resumed = rerun.run_from(gate, first_block=rerun.first_block_of([layer_key]), n_copies=2)
            full = rerun.run_from(gate, first_block=0, n_copies=2)
            for actual, expected in ((resumed.hidden, full.hidden), (resumed.logits, full.logits)):
                # The name "hidden" makes logits be compared like hidden states, relative to the largest one.
                if actual is not None and expected is not None:
                    require_equal({}, {"hidden": actual}, {"hidden": expected}, allowed)
    except Exception:  # a model may fail in any way where part of it is set aside
        return False
    return True
