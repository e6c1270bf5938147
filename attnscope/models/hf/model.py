"""Hugging Face models: a transformers model in memory as a Model whose attention passes our seam.

Whether its attention is seen truly, hf.survey finds out; how it comes from files, hf.loading knows.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnscope.core.attention.probes import Place, Weights
from attnscope.core.attention.seam import Kind, Probe
from attnscope.errors import AttnscopeError
from attnscope.models.devices import name_dtype
from attnscope.models.hf.adapters import NONE, Adapter, unwrap
from attnscope.models.hf.check.compare import run_one_by_one
from attnscope.models.hf.check.examples import accepts, examples, max_tokens
from attnscope.models.hf.check.longer import Survey, mixes_lengths
from attnscope.models.hf.check.remembered import Identity, Memory
from attnscope.models.hf.check.survey import survey_attention
from attnscope.models.hf.dispatch import input_device
from attnscope.models.hf.network import Network, blocks_by_layer, can_resume, skipped_calls
from attnscope.models.hf.parts import (
    base_of,
    in_one_line,
    notes_on_quantisation,
    picture_tower,
    reads_pictures,
    reads_text,
    sees_pictures,
    silence,
    takes_recordings,
    text_tower,
    wordless,
)
from attnscope.models.hf.senses.cross_readers import cross_reader
from attnscope.models.hf.senses.hearing import HuggingFaceEars
from attnscope.models.hf.senses.seeing import HuggingFaceEyes, hides_patches
from attnscope.models.hf.senses.vision_language import InterleavedReader, VisionLanguageReader
from attnscope.models.hf.senses.writing import HuggingFaceWriter
from attnscope.models.hf.tokenizer import HuggingFaceTokenizer, NumbersTokenizer, WordlessTokenizer
from attnscope.models.hf.weights import head_slices, output_projections
from attnscope.models.info import ModelInfo, ShownModel
from attnscope.models.inside.tape import blocks_of
from attnscope.models.model import Batch, Loss, Outputs, Rerun, Slice
from attnscope.models.turns import share_lock, take_turn


@dataclass(frozen=True, eq=False)
class RawModel:
    """What a model is made of, before it is known what its attention is."""

    model: PreTrainedModel  # with its head if it has one
    tokenizer: HuggingFaceTokenizer | NumbersTokenizer
    name: str
    source: str = "memory"
    sha256: str = ""
    notes: tuple[str, ...] = ()  # what a user must know of how it was read
    processor: Any = None  # makes what it reads of pictures or sound; None where there is none
    adapter: Adapter = NONE
    identity: Identity | None = None  # by which its verdict is remembered; None = it is not


class HuggingFaceModel(ShownModel):
    """A loaded transformers model; see models.model.Model.

    `open_eyes` makes a model of what sees pictures, where that is another part of the same files; `open_viewer` of what
    reads pictures and words, where that is more than this.

    Attributes:
        layers: Kind -> numbers of the layers that have attention; fewer than info.n_layers in hybrid models.
    """

    look = None

    def __init__(
        self,
        network: Network,
        processor: Any = None,
        open_eyes: "Callable[[], HuggingFaceModel] | None" = None,
        open_viewer: "Callable[[], HuggingFaceModel] | None" = None,
        memory: Memory | None = None,
    ) -> None:
        self.network, self.info = network, network.info
        self.tokenizer: HuggingFaceTokenizer | NumbersTokenizer = network.tokenizer
        if network.survey.beside:
            self.tokenizer = WordlessTokenizer(
                network.info.name, "reads words beside a picture alone", "give it one: --image photo.jpg"
            )
        self.layers: Mapping[Kind, tuple[int, ...]] = network.survey.layers
        self._processor, self._open_eyes, self._open_viewer = processor, open_eyes, open_viewer
        self._memory = memory

    @cached_property
    def writer(self) -> HuggingFaceWriter | None:
        """Its decoder."""
        return HuggingFaceWriter(self.network) if "decoder" in self.info.kinds else None

    @cached_property
    def eyes(self) -> HuggingFaceEyes | None:
        """What of it sees pictures."""
        if self._open_eyes is not None:
            return self._open_eyes().eyes
        sees = sees_pictures(self.network.base)
        return HuggingFaceEyes(self, self.network, self._processor) if sees else None

    @cached_property
    def viewer(self) -> VisionLanguageReader | None:
        """What of it reads pictures and words."""
        if self._open_viewer is not None:
            return self._open_viewer().viewer
        base = self.network.base
        if self.network.survey.beside and (reader := cross_reader(base)) is not None:
            return reader(self, self.network, self._processor)
        interleaved = self.writer is not None and reads_pictures(base)
        return InterleavedReader(self, self.network, self._processor) if interleaved else None

    @cached_property
    def ears(self) -> HuggingFaceEars | None:
        """What of it hears recordings, or says why that is not supported."""
        base = self.network.base
        if not takes_recordings(base) and (reads_text(base) or sees_pictures(base)):
            return None
        return HuggingFaceEars(self.network, self._processor)

    @property
    def loss(self) -> Loss | None:
        """What its language-model head predicts; None without one that does."""
        return self.network.loss

    @cached_property
    def resumes(self) -> bool:
        """Whether what `rerun` gives from a layer on is what a whole forward gives; tried once, remembered if so."""
        base, plan = self.network.base, self.network.survey.plan
        if not self.network.at_seam:
            return False
        if self._memory is not None and self._memory.resumes:
            return True
        example = examples(base)[1].inputs
        batch = Batch(example["input_ids"], target_ids=example.get("decoder_input_ids"))
        with torch.no_grad():
            resumes = can_resume(self._rerun(batch, self.loss is not None, blocks_of(base, plan)), plan, base)
        # A failure may be for want of memory.
        if resumes and self._memory is not None:
            self._memory.remember_resumes()
        return resumes

    def run(self, batch: Batch, probe: Probe) -> Tensor:
        """See models.model.Model. Where info.path is "eager", the probe can only be a `Weights`.

        Where padding would change what the model computes of a text, texts are run one by one for a `Weights`.
        """
        config = self.network.base.config
        if isinstance(probe, Weights) and any(mixes_lengths(config, m) for m in (batch.mask, batch.target_mask)):
            return run_one_by_one(self.run, batch, probe)
        return self.run_inputs(self.network.text_inputs(batch), probe)

    def run_inputs(self, inputs: Mapping[str, Any], probe: Probe) -> Tensor:
        """Runs whatever the model's forward takes, by name: pixel_values, input_features … Otherwise as `run`."""
        return self.network.run(inputs, probe)

    def outputs(self, batch: Batch, probe: Probe, *, logits: bool = True, last: int | None = None) -> Outputs:
        """As `run`, with what the language-model head predicts, if there is one and it is asked for."""
        return self.network.outputs(self.network.text_inputs(batch), probe, logits=logits, last=last)

    def rerun(self, batch: Batch, *, logits: bool = True, last: int | None = None) -> Rerun:
        """Runs a batch, and keeps what is needed to run it again from a layer on."""
        blocks = blocks_of(self.network.base, self.network.survey.plan) if self.resumes else []
        return self._rerun(batch, logits, blocks, last)

    def _rerun(self, batch: Batch, logits: bool, blocks: Sequence[nn.Module], last: int | None = None) -> Rerun:
        def forward(again: Batch, probe: Probe, block_of: Mapping[Place, int], first: int) -> Outputs:
            skipped = skipped_calls(self.network.survey.plan, block_of, first)
            inputs = self.network.text_inputs(again)
            return self.network.outputs(inputs, probe, logits=logits, skipped=skipped, last=last)

        return Rerun(forward, batch, blocks)

    def modules(self) -> list[nn.Module]:
        """The transformers model, without what it has on top for its task."""
        return [self.network.base]

    def blocks(self) -> dict[Place, nn.Module]:
        """The blocks of layers, by (kind, layer); see hf.network.blocks_by_layer."""
        return blocks_by_layer(self.network.base, self.network.survey.plan)

    def output_projections(self) -> dict[Place, Tensor]:
        """W_O by (kind, layer), each (d_model, n_heads * d_value); see hf.weights.output_projections."""
        return output_projections(self.network.base, self.network.survey) if self.network.at_seam else {}

    def unembedding(self) -> nn.Module | None:
        """What its scores of the vocabulary come from; None where its head predicts no words."""
        head: Any = None if self.loss is None else self.network.model.get_output_embeddings()
        return head if isinstance(head, nn.Module) else None

    def head_slices(self, heads: Mapping[Place, Sequence[int]]) -> list[Slice]:
        """Which of its weights are the heads' alone; see hf.weights.head_slices."""
        if self.network.is_spread:
            raise AttnscopeError(f"the weights of {self.info.name} are spread over devices", "leave out --device all")
        self.network.require_seam("its heads cannot be told apart")
        return head_slices(self.network.model, self.network.base, self.network.survey, heads)

    @torch.no_grad()
    def static_embeddings(self, ids: Tensor) -> Tensor:
        """The rows of the token embedding: (batch, token) numbers -> (batch, token, d), without gradient."""
        self.network.require_known(ids)
        with take_turn([self.network.base]):
            output = self.network.base.get_input_embeddings()(ids.to(self.network.device))
        # I-BERT gives the scale of its quantisation besides.
        rows: Tensor = output[0] if isinstance(output, tuple) else output
        return rows.detach()  # a model in memory may be one that is trained

    def untrained(self, seed: int) -> "HuggingFaceModel":
        """The same architecture with random weights, as transformers draws them before training."""
        base = self.network.base
        with torch.random.fork_rng(devices=[]), silence():
            torch.manual_seed(seed)
            twin = type(base)(copy.deepcopy(base.config)).to(base.dtype).to(self.network.device)
            twin.train(False).requires_grad_(False)
            notes = (f"random weights, seed {seed}",)
            return assemble(RawModel(twin, self.tokenizer, f"{self.info.name} untrained", notes=notes), check=False)


def wrap(hf_model: PreTrainedModel, tokenizer: Any = None, *, name: str = "", check: bool = True) -> HuggingFaceModel:
    """Makes a Model of a transformers model that is in memory already, or of a PeftModel. It is left as it is.

    Of a vision model the tokenizer is its image processor. Without one, texts are given as token numbers.
    """
    hf_model, adapter = unwrap(hf_model)
    if type(hf_model).__module__.startswith("sentence_transformers."):
        # It is a list of modules: the first one holds the transformer, later ones pool and normalise its output.
        tokenizer = tokenizer or getattr(hf_model, "tokenizer", None)
        hf_model = next((part for part in hf_model.modules() if isinstance(part, PreTrainedModel)), hf_model)
    if not isinstance(hf_model, PreTrainedModel):
        raise AttnscopeError(f"{type(hf_model).__name__} is no transformers model", _inner_model(hf_model))
    name = name or str(hf_model.config.name_or_path).rstrip("/").rpartition("/")[2] or hf_model.config.model_type
    base = base_of(hf_model)
    if hides_patches(base):
        raise AttnscopeError(
            f"{name} hides {base.config.mask_ratio:.0%} of the patches, others each time",
            "with model.config.mask_ratio = 0.0 it sees them all",
        )
    # A processor for two senses holds a tokenizer and an image processor or a feature extractor.
    words = getattr(tokenizer, "tokenizer", tokenizer if hasattr(tokenizer, "get_vocab") else None)
    parts = (getattr(tokenizer, name, None) for name in ("image_processor", "feature_extractor"))
    senses = next((part for part in parts if part is not None), None if words is tokenizer else tokenizer)
    is_joint = reads_pictures(base) or (cross_reader(base) is not None and picture_tower(base) is None)
    senses = tokenizer if is_joint and hasattr(tokenizer, "image_processor") else senses
    reader: HuggingFaceTokenizer | NumbersTokenizer
    reader = NumbersTokenizer() if words is None else HuggingFaceTokenizer(words)
    if not reads_text(base) and not accepts(base, "decoder_input_ids"):
        reader = wordless(name, base)
    notes = notes_on_quantisation(hf_model.config)
    return assemble(RawModel(hf_model, reader, name, notes=notes, processor=senses, adapter=adapter), check=check)


def _inner_model(wrapper: Any) -> str:
    """Say where an object that is no transformers model holds one: torch.compile, DataParallel, a pipeline."""
    parts = wrapper.named_modules() if isinstance(wrapper, nn.Module) else getattr(wrapper, "__dict__", {}).items()
    for name, part in parts:
        if isinstance(part, PreTrainedModel):
            path = "".join(f"[{step}]" if step.isdigit() else f".{step}" for step in name.split("."))
            return f"pass the model inside it: model{path}"
    return "give a PreTrainedModel"


def assemble(raw: RawModel, *, check: bool) -> HuggingFaceModel:
    """A Model of a transformers model, once its attention has been surveyed; of two towers the one that reads text."""
    base, name = base_of(raw.model), raw.name
    words, eyes = text_tower(base), picture_tower(base)

    def part(model: PreTrainedModel, tokenizer: HuggingFaceTokenizer | NumbersTokenizer, note: str) -> RawModel:
        return replace(raw, model=model, tokenizer=tokenizer, notes=(*raw.notes, note))

    with silence(), in_one_line(f"{name} ({base.config.model_type})", "cannot be read"):
        reader = cross_reader(base)
        whole = None if reader is None else (lambda: _build(raw, check, survey=reader.survey(base)))
        if reader is not None and not reader.stands_alone:
            return _build(raw, check, survey=reader.survey(base))
        if eyes is None:
            return _build(raw, check, open_viewer=whole)
        if words is None:
            note = "This is its encoder, which sees pictures; its decoder is not shown."
            if whole is not None:
                note = "This is its encoder, which sees pictures; with a text beside --image its decoder is shown."
            return _build(part(eyes, wordless(name, eyes), note), check, open_viewer=whole)
        apart = "It has a part for text and one for pictures, and neither attends to the other: this is the one for"
        seeing = part(eyes, wordless(name, eyes), f"{apart} pictures.")
        reading = part(words, raw.tokenizer, f"{apart} text. With --image the other is shown.")
        return _build(reading, check, lambda: assemble(seeing, check=check))


def assemble_on(
    model: PreTrainedModel, inputs: Mapping[str, Any], *, name: str, source: str, check: bool
) -> HuggingFaceModel:
    """A Model of a transformers model that is surveyed on inputs that come with it, by name.

    Where its base takes them it is the base that runs, else the model with what it has on top.
    """
    base = base_of(model)
    runs = base if all(accepts(base, name_of_input) for name_of_input in inputs) else model
    with silence(), in_one_line(f"{name} ({base.config.model_type})", "cannot be read"):
        raw = RawModel(runs, wordless(name, base), name, source, notes=notes_on_quantisation(model.config))
        return _build(raw, check, survey=survey_attention(runs, check=check, inputs=inputs), base=runs)


def _build(
    raw: RawModel,
    check: bool,
    open_eyes: Callable[[], HuggingFaceModel] | None = None,
    open_viewer: Callable[[], HuggingFaceModel] | None = None,
    survey: Survey | None = None,
    base: PreTrainedModel | None = None,
) -> HuggingFaceModel:
    base = base or base_of(raw.model)
    share_lock([raw.model])
    memory = None
    if survey is None and raw.identity is not None:
        memory = Memory(raw.model, base, raw.identity)
        survey = memory.survey(lambda: survey_attention(base, check=check))
    survey = survey or survey_attention(base, check=check)
    kinds = tuple(survey.layers)
    info = ModelInfo(
        name=raw.name,
        source=raw.source,
        sha256=raw.sha256,
        architecture=base.config.model_type,
        engine="hf",
        path=survey.path,
        kinds=kinds,
        n_layers=tuple(survey.n_layers[kind] for kind in kinds),
        n_heads=tuple(survey.n_heads[kind] for kind in kinds),
        n_kv_heads=tuple(survey.n_kv_heads[kind] for kind in kinds),
        d_model=survey.d_model,
        n_parameters=sum(parameter.numel() for parameter in raw.model.parameters()),
        max_tokens=max_tokens(base),
        dtype=name_dtype(base.dtype),
        device=str(input_device(base)),
        checked=survey.checked,
        remembered=survey.remembered,
        notes=tuple(note for note in (raw.adapter.note, *raw.notes, *survey.notes, raw.tokenizer.note) if note),
        adapter=raw.adapter.name,
        adapter_sha256=raw.adapter.sha256,
    )
    network = Network(raw.model, base, raw.tokenizer, info, survey)
    return HuggingFaceModel(network, raw.processor, open_eyes, open_viewer, memory)
