"""Hugging Face models: a transformers model whose attention is known, run with a probe at its seam.

Whether its attention is seen truly, `hf.check` finds out. `hf.assembling` and `hf.loading` know how one is made. What
it is run for beside texts, a photo, a recording or writing, the senses know.
"""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnscope.core.attention.probes import Gate, Place, Weights
from attnscope.core.attention.seam import AttentionCall, Kind, Probe
from attnscope.errors import AttnscopeError
from attnscope.models.devices import input_device, is_spread, name_dtype
from attnscope.models.hf.check import check_beyond, require_equal, survey_attention, takes_light_masks
from attnscope.models.hf.eager import run_for_weights, tolerance
from attnscope.models.hf.examples import count_tokens, examples, mixes_lengths
from attnscope.models.hf.heads import (
    CLASS_LOSSES,
    describe_head,
    labels_of,
    loss_of,
    output_embeddings,
    run_with_logits,
)
from attnscope.models.hf.parts import (
    Adapter,
    accepts,
    causal_types,
    hidden_states,
    in_one_line,
    input_name,
    max_tokens,
    pad_id,
    position_table,
    reads_pictures_in_text,
    reads_text,
    sees_pictures_only,
    silence,
    standing_arguments,
    takes_recordings,
    vocab_size,
    wordless,
)
from attnscope.models.hf.seam import LIGHT_FROM, Plan, perform
from attnscope.models.hf.senses.cross_readers import cross_reader
from attnscope.models.hf.senses.eyes_and_ears import HuggingFaceEars, HuggingFaceEyes
from attnscope.models.hf.senses.vision_language import VisionLanguageReader
from attnscope.models.hf.senses.writing import HuggingFaceWriter
from attnscope.models.hf.survey import Memory, Survey
from attnscope.models.hf.tokenizer import HuggingFaceTokenizer, NumbersTokenizer, WordlessTokenizer
from attnscope.models.hf.weights import head_slices
from attnscope.models.info import ModelInfo, require_length, require_numbers, require_seam
from attnscope.models.inside.tape import Rerun, blocks_of
from attnscope.models.model import Batch, Loss, MixedLengthsError, Model, Outputs, Slice
from attnscope.models.turns import take_turn


@dataclass(frozen=True, eq=False)
class RawModel:
    """A model with its tokenizer, processor and adapter, before its attention is surveyed.

    Attributes:
        model: With its head if it has one.
        tokenizer: Makes tokens of texts, or refuses them.
        name: What it is called.
        source: Where its files are from, or "memory".
        sha256: Of its weights; "" where it is not from files.
        notes: What a user must know of how it was read.
        processor: Makes pictures or sound into what the model reads; None where there is none.
        adapter: What was merged into its weights.
        hashes: Of its files, by which the verdict of the check is remembered; None = it is not.
        again: Whether to compare, whatever is remembered.
    """

    model: PreTrainedModel
    tokenizer: HuggingFaceTokenizer | NumbersTokenizer
    name: str
    source: str = "memory"
    sha256: str = ""
    notes: tuple[str, ...] = ()
    processor: Any = None
    adapter: Adapter = field(default_factory=Adapter)
    hashes: Mapping[str, str] | None = None
    again: bool = False


class HuggingFaceModel(Model):
    """A loaded transformers model, as a Model.

    Args:
        raw: The model with all that it came with.
        base: The part of it that attends.
        survey: What is known of its attention.
        open_eyes: Makes a model of the part that sees pictures, where that is another one of the same files.
        open_viewer: Makes a model of pictures and words together, where that is more than this.
        memory: What is remembered of it; None = nothing.

    Attributes:
        model: The transformers model, with its head if it has one.
        base: The part of it that attends.
        survey: What is known of its attention.
        layers: Kind -> numbers of the layers that have attention; fewer than info.n_layers in hybrid models.
        at_seam: Whether all of its attention passes the seam.
        vocabulary: The tokenizer that it came with.
        tokenizer: The same, or one that refuses texts where they are read beside a picture alone.
        device: Where it takes its inputs.
        is_spread: Whether accelerate moves what its parts get.
    """

    def __init__(
        self,
        raw: RawModel,
        base: PreTrainedModel,
        survey: Survey,
        open_eyes: "Callable[[], HuggingFaceModel] | None" = None,
        open_viewer: "Callable[[], HuggingFaceModel] | None" = None,
        memory: Memory | None = None,
    ) -> None:
        self.model: Any = raw.model
        self.base: Any = base
        self.info = _describe(raw, base, survey)
        self.survey = survey
        self.layers: Mapping[Kind, tuple[int, ...]] = survey.layers
        self.at_seam = survey.path == "seam"
        self.device = input_device(base)
        self.is_spread = is_spread(base)
        self.vocabulary = raw.tokenizer
        self.tokenizer: HuggingFaceTokenizer | NumbersTokenizer = raw.tokenizer
        if survey.beside and not isinstance(raw.tokenizer, WordlessTokenizer):
            hint = "give it one: --image photo.jpg"
            self.tokenizer = WordlessTokenizer(f"{raw.name} reads words beside a picture alone", hint)
        self._processor = raw.processor
        self._open_eyes = open_eyes
        self._open_viewer = open_viewer
        self._memory = memory
        self._expected: dict[tuple[int, ...], int] = {}

    @cached_property
    def writer(self) -> HuggingFaceWriter | None:
        """Return its decoder."""
        return HuggingFaceWriter(self) if "decoder" in self.info.kinds else None

    @cached_property
    def eyes(self) -> HuggingFaceEyes | None:
        """Return the part that sees pictures; None if it sees none."""
        if self._open_eyes is not None:
            return self._open_eyes().eyes
        return HuggingFaceEyes(self, self._processor) if sees_pictures_only(self.base) else None

    @cached_property
    def viewer(self) -> VisionLanguageReader | None:
        """Return the part that reads pictures and words; None if it has none."""
        if self._open_viewer is not None:
            return self._open_viewer().viewer
        reader = cross_reader(self.base) if self.survey.beside else None
        if reader is not None:
            return reader(self, self._processor)
        interleaved = self.writer is not None and reads_pictures_in_text(self.base)
        return VisionLanguageReader(self, self._processor) if interleaved else None

    @cached_property
    def ears(self) -> HuggingFaceEars | None:
        """Return the part that hears recordings, or refuses them with a reason; None for other models."""
        if not takes_recordings(self.base) and (reads_text(self.base) or sees_pictures_only(self.base)):
            return None
        return HuggingFaceEars(self, self._processor)

    @cached_property
    def loss(self) -> Loss | None:
        """Return the target of its head; None without a head that predicts."""
        return loss_of(self.model, self.info.kinds) if self.at_seam else None

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of its classes, where its head is a classifier's."""
        return labels_of(self.model) if self.loss in CLASS_LOSSES else ()

    @cached_property
    def resumes(self) -> bool:
        """Return whether what `rerun` gives from a layer on is what a whole forward gives.

        Tried once, remembered if so.
        """
        if not self.at_seam:
            return False
        if self._memory is not None and self._memory.resumes:
            return True
        _, inputs = examples(self.base)
        batch = Batch(inputs["input_ids"], target_ids=inputs.get("decoder_input_ids"))
        with torch.no_grad():
            rerun = self._rerun(batch, self.loss is not None, resumes=True)
            resumes = can_resume(rerun, self.base)
        # A failure may be for want of memory.
        if resumes and self._memory is not None:
            self._memory.remember_resumes()
        return resumes

    def run(self, batch: Batch, probe: Probe) -> Tensor:
        """Run a batch as `Model.run` says. Where info.path is "eager", the probe can only be a `Weights`."""
        return self.run_inputs(self.text_inputs(batch), probe)

    def run_inputs(self, inputs: Mapping[str, Any], probe: Probe) -> Tensor:
        """Run the forward on its arguments, input_ids, pixel_values and so on; return the last hidden states.

        Raises:
            AttnscopeError: It does not run, or layers do not each see all tokens of a picture or a sound.
        """
        n_tokens = self._expected.get(self._shape_of(inputs))
        if n_tokens is None:
            return self.outputs_of_inputs(inputs, probe, logits=False).hidden

        def require(queries: int, keys: int) -> None:
            """Refuse attention of other sizes than the tokens of the picture or sound."""
            if (queries, keys) != (n_tokens, n_tokens):
                raise AttnscopeError(
                    f"{self.info.name} has attention of {queries} queries on {keys} keys where it is given {n_tokens} "
                    "tokens: it adds or merges tokens, or attends within windows, which is not supported",
                    "choose a model whose layers all see the same tokens, such as ViT, DINOv2 or wav2vec 2.0",
                )

        def watch(call: AttentionCall) -> Tensor:
            require(call.query.shape[2], call.key.shape[2])
            return probe(call)

        if self.at_seam:
            return self.outputs_of_inputs(inputs, watch, logits=False).hidden
        # Weights that the model gives out have their sizes afterwards: (batch, head, query, key)
        hidden = self.outputs_of_inputs(inputs, probe, logits=False).hidden
        if isinstance(probe, Weights):
            for by_layer in probe.maps.values():
                for weights in by_layer.values():
                    require(*weights.shape[2:])
        return hidden

    def outputs(
        self, batch: Batch, probe: Probe, *, logits: bool = True, last: int | None = None
    ) -> Outputs:
        """Run a batch as `Model.outputs` says, with the language-model head if there is one and it is asked for."""
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

        `plan` names the attentions that are computed, where that is a part of the model; None = all.
        """
        inputs = self._forward_inputs(inputs)
        survey = self.survey
        plan = survey.plan if plan is None else plan
        with in_one_line(self.info.name, "does not run on this input"):
            if not self.at_seam:
                output = run_for_weights(self.base, inputs, survey, self.info.name, probe)
            elif logits and self.loss is not None:
                # Masks by key alone serve long texts, of which no more than the last tokens have scores.
                light = None if last is None else self._light_from(inputs)
                return run_with_logits(
                    self.model, self.base, inputs, plan, probe, light_from=light, last=last
                )
            else:
                light = None if survey.beside else self._light_from(inputs)
                beside = survey.beside or (
                    "pixel_values" in inputs and reads_pictures_in_text(self.base)
                )
                output = perform(
                    self.base, inputs, plan, probe, light, through=survey.through, beside=beside
                )
        hidden = hidden_states(output)
        if hidden is None and survey.beside:  # some give out what their head says, and no more
            hidden = getattr(output, "logits", None)
        if hidden is None:
            raise AttnscopeError(f"{self.info.name} returns no hidden states")
        return Outputs(hidden)

    def rerun(self, batch: Batch, *, logits: bool = True, last: int | None = None) -> Rerun:
        """Run a batch, and keep what is needed to run it again from a layer on."""
        return self._rerun(batch, logits, last, resumes=self.resumes)

    def _rerun(self, batch: Batch, logits: bool, last: int | None = None, *, resumes: bool) -> Rerun:
        def forward(again: Batch, probe: Probe, block_of: Mapping[Place, int], first: int) -> Outputs:
            # Attentions of blocks before the first are not computed.
            plan = {}
            for module, places in self.survey.plan.items():
                plan[module] = [place for place in places if block_of.get(place, first) >= first]
            return self.outputs_of_inputs(self.text_inputs(again), probe, logits, last, plan)

        return Rerun(forward, batch, blocks_of(self.base, self.survey.plan) if resumes else [])

    def expect(self, inputs: Mapping[str, Any], n_tokens: int) -> None:
        """Refuse later runs on pictures or sounds of this shape whose layers do not see `n_tokens` tokens."""
        self._expected[self._shape_of(inputs)] = n_tokens

    def _shape_of(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        values = inputs.get(input_name(self.base))
        return tuple(values.shape) if isinstance(values, Tensor) else ()

    def text_inputs(self, batch: Batch, *, target: bool = True) -> dict[str, Tensor]:
        """Return the forward's arguments for texts, (batch, token) each, with the model's own padding."""
        # Where texts alone cannot be read, a tokenizer for such models raises an error that says why.
        if self.survey.beside:
            self.tokenizer.encode("")
        if not reads_text(self.base):
            wordless(self.info.name, self.base).encode("")
        batch = batch.to(batch.ids.device)
        inputs = self._padded("", batch.ids, batch.mask)
        inputs |= causal_types(self.base, batch.ids)
        segments = batch.segments
        n_types = getattr(self.base.config, "type_vocab_size", 0)
        knows_segments = n_types > 1 and accepts(self.base, "token_type_ids")
        # Segments that say nothing are left out: GPT-2 would add the embedding of token 0 to every token for them.
        if knows_segments and segments is not None and bool(segments.any()):
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
        """Return token numbers, checked, with the model's own padding, and their mask if there is one."""
        if position_table(self.base) is not None:
            require_length(self.info, ids.shape[1])
        if mask is not None:
            ids = ids.masked_fill(~mask, pad_id(self.base))
        self.require_known(ids)
        inputs = {f"{prefix}input_ids": ids}
        if mask is not None:
            inputs[f"{prefix}attention_mask"] = mask.long()
        return inputs

    def modules(self) -> list[nn.Module]:
        """Return the transformers model, without what it has on top for its task."""
        return [self.base]

    def blocks(self) -> dict[Place, nn.Module]:
        """Return the block of each attention whose keys are made of that block's own hidden states.

        Cross-attention has none; nor have attentions of which one block holds several.
        """
        blocks: dict[Place, nn.Module] = {}
        n_attentions: Counter[nn.Module] = Counter()
        for module, places in self.survey.plan.items():
            own = [place for place in places if place[0] != "cross"]
            if not own:
                continue
            for block in blocks_of(self.base, [module]):
                n_attentions[block] += 1
                blocks |= dict.fromkeys(own, block)
        return {place: block for place, block in blocks.items() if n_attentions[block] == 1}

    def unembedding(self) -> nn.Module | None:
        """Return the map from hidden states to scores of the vocabulary; None where its head predicts no words."""
        return None if self.loss is None or self.labels else output_embeddings(self.model)

    def head_slices(self, heads: Mapping[Place, Sequence[int]]) -> list[Slice]:
        """Return which of its weights are the heads' alone; see hf.weights.head_slices."""
        if self.is_spread:
            raise AttnscopeError(
                f"the weights of {self.info.name} are spread over devices", "leave out --device all"
            )
        require_seam(self.info, "which weights its heads have")
        return head_slices(self.model, self.base, self.survey, heads)

    @torch.no_grad()
    def static_embeddings(self, ids: Tensor) -> Tensor:
        """Return the rows of the token embedding: (batch, token) numbers -> (batch, token, d), without gradient."""
        self.require_known(ids)
        with take_turn([self.base]):
            output = self.base.get_input_embeddings()(ids.to(self.device))
        # I-BERT gives the scale of its quantisation besides.
        rows: Tensor = output[0] if isinstance(output, tuple) else output
        return rows.detach()  # a model in memory may be one that is trained

    def untrained(self, seed: int) -> "HuggingFaceModel":
        """Return the same architecture with random weights, as transformers draws them before training."""
        with torch.random.fork_rng(devices=[]), silence():
            torch.manual_seed(seed)
            twin = type(self.base)(copy.deepcopy(self.base.config)).to(self.base.dtype).to(self.device)
            twin.train(False).requires_grad_(False)
            survey = survey_attention(twin, check=False)
        note = f"random weights, seed {seed}"
        raw = RawModel(twin, self.vocabulary, f"{self.info.name} untrained", notes=(note,))
        return HuggingFaceModel(raw, twin, replace(survey, checked=False))

    def require_known(self, ids: Tensor) -> None:
        """Refuse token numbers that the model has no embedding for."""
        require_numbers(self.info, ids, vocab_size(self.base))

    def _forward_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments of the forward, on the model's device.

        Lengths are checked: mixed ones may be refused, and one beyond a window is compared with eager attention first.
        """
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

    def _light_from(self, inputs: Mapping[str, Any]) -> int | None:
        """Return the keys from which this run gets light masks (`seam.Light`); None = it gets none.

        Long texts get them, where the model is known to understand them.
        """
        # accelerate moves masks from device to device, so that they are not known again.
        if count_tokens(inputs) < LIGHT_FROM or self.is_spread:
            return None
        return LIGHT_FROM if self._takes_light else None

    @cached_property
    def _takes_light(self) -> bool:
        return takes_light_masks(self.base, self.survey)


def _describe(raw: RawModel, base: PreTrainedModel, survey: Survey) -> ModelInfo:
    """Return the facts on a model that `attnscope models` shows and that results keep."""
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
        notes=tuple(filter(None, [raw.adapter.note, *raw.notes, *survey.notes, raw.tokenizer.note])),
        adapter=raw.adapter.name,
        adapter_sha256=raw.adapter.sha256,
        head=describe_head(raw.model, base),
    )


def can_resume(rerun: Rerun, base: PreTrainedModel) -> bool:
    """Return whether a rerun of one text from a block on gives what a whole forward with the same change gives.

    It is tried from each block, with the first head of its attention taken out, on two copies of the text.
    """
    try:
        allowed = tolerance(base, len(rerun.calls))
        for place, call in rerun.calls.items():
            # The first copy is left as it is, of the second the first head is taken out: (copy, head).
            factors = torch.ones(2, call.n_heads)
            factors[1, 0] = 0
            gate = Gate({place: factors})
            resumed = rerun.again(gate, rerun.block([place]), 2)
            whole = rerun.again(gate, 0, 2)
            require_equal({}, {"hidden": resumed.hidden}, {"hidden": whole.hidden}, allowed)
            if resumed.logits is not None and whole.logits is not None:
                require_equal({}, {"hidden": resumed.logits}, {"hidden": whole.logits}, allowed)
    except Exception:  # a model may fail in any way where part of it is set aside
        return False
    return True
