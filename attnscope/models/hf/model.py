"""Hugging Face models: a transformers model in memory as a Model whose attention passes our seam.

Whether its attention is seen truly, hf.survey finds out; how it comes from files, hf.loading knows.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnscope.core.attention import Kind, Probe
from attnscope.core.probes import Place, Weights
from attnscope.errors import AttnscopeError
from attnscope.models.hf.adapters import NONE, Adapter, unwrap
from attnscope.models.hf.check import hidden_states, takes_light_masks
from attnscope.models.hf.dispatch import input_device, is_dispatched
from attnscope.models.hf.eager import mixes_lengths, run_for_weights, run_one_by_one
from attnscope.models.hf.examples import (
    accepts,
    examples,
    max_tokens,
    pad_id,
    position_table,
    standing_arguments,
    vocab_size,
)
from attnscope.models.hf.hearing import (
    frames_heard_by,
    heard_by,
    hears,
    listens,
    require_all_frames,
    sees_sound,
    spectrogram_seen_by,
    written_by,
)
from attnscope.models.hf.outputs import (
    blocks_by_place,
    blocks_of_plan,
    can_resume,
    loss_of,
    run_with_logits,
    skipped_calls,
)
from attnscope.models.hf.parts import base_of, in_one_line, picture_tower, quiet, reads_text, sees_pictures, text_tower
from attnscope.models.hf.seam import LIGHT_FROM, perform, switched
from attnscope.models.hf.senses import (
    WordlessTokenizer,
    require_whole_grid,
    seen_by,
    sizes_seen,
    taking,
)
from attnscope.models.hf.survey import Survey, check_beyond, survey
from attnscope.models.hf.tokenizer import HuggingFaceTokenizer, NumbersTokenizer
from attnscope.models.hf.weights import Slice, head_slices, output_projections
from attnscope.models.hf.writing import answer, continue_text, end_ids, require_writing, start_id
from attnscope.models.model import Batch, HeardSound, Loss, ModelInfo, SeenPicture
from attnscope.models.rerun import Outputs, Rerun
from attnscope.records import Tokens
from attnscope.senses.photos import Photo
from attnscope.senses.recordings import Recording

_Tokenizer = HuggingFaceTokenizer | NumbersTokenizer | WordlessTokenizer


class HuggingFaceModel:
    """A loaded transformers model; see models.model.Model.

    Attributes:
        info: What is known of it.
        tokenizer: Its tokenizer, or a stand-in that takes token numbers.
        layers: Kind -> numbers of the layers that have attention; fewer than info.n_layers in hybrid models.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        base: PreTrainedModel,
        tokenizer: _Tokenizer,
        info: ModelInfo,
        found: Survey,
        processor: Any = None,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.layers: Mapping[Kind, tuple[int, ...]] = found.layers
        self._model: Any = model
        self._base: Any = base
        self._found = found
        self._takes_light: bool | None = None
        self._processor = processor
        self._whole: set[tuple[int, ...]] = set()
        self.open_eyes: Callable[[], HuggingFaceModel] | None = None
        self._device = input_device(base)
        # accelerate moves masks from device to device, so that they are not known again.
        self._is_spread = is_dispatched(base)

    def run(self, batch: Batch, probe: Probe) -> Tensor:
        """Runs a batch with the probe at the seam of every attention.

        Padding is never attended to. No gradient is kept for weights; through a probe's own numbers they flow.

        Args:
            batch: Token numbers. Segments are passed over where the model knows none.
            probe: What happens at the seam. On the eager road (see info.road) only a `Weights` can be used.

        Returns:
            The last hidden states, (batch, token, d_model), of an encoder-decoder the decoder's; those of padding mean
            nothing.

        Raises:
            AttnscopeError: The batch is longer than the model's limit, holds numbers that it has no embedding for, or
                lacks what the decoder reads.
        """
        if self._found.road == "eager" and mixes_lengths(self._base.config, batch.mask):
            return run_one_by_one(self.run, batch, probe)
        return self.run_inputs(self._inputs(batch), probe)

    @cached_property
    def eyes(self) -> "HuggingFaceModel":
        """The part of the model that sees pictures, where that is a model for itself; else all of it."""
        return self if self.open_eyes is None else self.open_eyes()

    @cached_property
    def loss(self) -> Loss | None:
        """What its language-model head predicts; None without one that does."""
        return loss_of(self._model, self.info.kinds) if self._found.road == "seam" else None

    @cached_property
    def resumes(self) -> bool:
        """Whether what `rerun` gives from a layer on is what a whole forward gives; tried once."""
        if self._found.road != "seam":
            return False
        example = examples(self._base)[1].inputs
        rerun = self._rerun(
            Batch(example["input_ids"], target_ids=example.get("decoder_input_ids")),
            logits=self.loss is not None,
            blocks=blocks_of_plan(self._base, self._found.plan),
        )
        with torch.no_grad():
            return can_resume(rerun, self._found.plan, self._base)

    def outputs(self, batch: Batch, probe: Probe, *, logits: bool = True) -> Outputs:
        """As `run`, with what the language-model head predicts, if there is one and it is asked for."""
        return self._outputs(batch, probe, logits=logits)

    def rerun(self, batch: Batch, *, logits: bool = True) -> Rerun:
        """Runs a batch, and keeps what is needed to run it again from a layer on."""
        blocks = blocks_of_plan(self._base, self._found.plan) if self.resumes else []
        return self._rerun(batch, logits=logits, blocks=blocks)

    def head_slices(self, heads: Mapping[Place, Sequence[int]]) -> list[Slice]:
        """Which of its weights are the heads' alone; see hf.weights.head_slices."""
        if self._is_spread:
            raise AttnscopeError(f"the weights of {self.info.name} are spread over devices", "leave out --device-map")
        if self._found.road != "seam":
            raise AttnscopeError(
                f"{self.info.name} does not pass its attention through the seam: its heads cannot be told apart",
                "only its weights can be seen: attnscope heatmap",
            )
        return head_slices(self._model, self._base, self._found, heads)

    def blocks(self) -> dict[Place, nn.Module]:
        """The blocks of layers, by (kind, layer); see hf.outputs.blocks_by_place."""
        return blocks_by_place(self._base, self._found.plan) if self._found.road == "seam" else {}

    def output_projections(self) -> dict[Place, Tensor]:
        """W_O by (kind, layer), each (d_model, n_heads * d_value); see hf.weights.output_projections."""
        return output_projections(self._base, self._found)

    def _rerun(self, batch: Batch, *, logits: bool, blocks: Sequence[nn.Module]) -> Rerun:
        def forward(given: Batch, probe: Probe, block_of: Mapping[Place, int], first: int) -> Outputs:
            skipped = skipped_calls(self._found.plan, block_of, first)
            return self._outputs(given, probe, logits=logits, skipped=skipped)

        return Rerun(forward, batch, blocks)

    def _outputs(
        self, batch: Batch, probe: Probe, *, logits: bool, skipped: Mapping[nn.Module, int] | None = None
    ) -> Outputs:
        given = self._given(self._inputs(batch))
        if self._found.road != "seam":
            raise AttnscopeError(
                f"{self.info.name} does not pass its attention through the seam: its heads cannot be changed",
                "only its weights can be seen: attnscope heatmap",
            )
        with in_one_line(self.info.name, "does not run on this input"):
            if logits and self.loss is not None:
                return run_with_logits(self._model, self._base, given, self._found.plan, probe, skipped)
            hidden = hidden_states(perform(self._base, given, self._found.plan, probe, skipped=skipped))
        if hidden is None:
            raise AttnscopeError(f"{self.info.name} returns no hidden states")
        return Outputs(hidden)

    def _given(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """All that the forward gets, on the model's device."""
        check_beyond(self._base, self._found, inputs)
        given = {**standing_arguments(self._base), **self._found.extras, **inputs}
        return {name: x.to(self._device) if isinstance(x, Tensor) else x for name, x in given.items()}

    def run_inputs(self, inputs: Mapping[str, Any], probe: Probe) -> Tensor:
        """Runs whatever the model's forward takes: pixel_values, input_features … Otherwise as `run`.

        Args:
            inputs: Arguments of the forward by name.
            probe: What happens at the seam.
        """
        with in_one_line(self.info.name, "does not run on this input"):
            return self._run_inputs(inputs, probe)

    def _run_inputs(self, inputs: Mapping[str, Any], probe: Probe) -> Tensor:
        given = self._given(inputs)
        if self._found.road == "seam":
            output = perform(self._base, given, self._found.plan, probe, self._light_from(given))
        else:
            output = run_for_weights(self._base, given, self.layers, self.info.name, probe)
        hidden = hidden_states(output)
        if hidden is None:
            raise AttnscopeError(f"{self.info.name} returns no hidden states")
        return hidden

    def see(self, photo: Photo) -> SeenPicture:
        """A photo as the model sees it: through its own image processor, cut into its patches.

        Raises:
            AttnscopeError: It reads no pictures, has no image processor, or does not see all patches in each layer.
        """
        if not sees_pictures(self._base):
            raise AttnscopeError(
                f"{self.info.name} sees no pictures", "leave out --image, or name a vision transformer, such as DINOv2"
            )
        if self._processor is None:
            raise AttnscopeError(
                f"{self.info.name} came without its image processor",
                "hand it over: attnscope.load(model, image_processor)",
            )
        seen = seen_by(self._base, self._processor, self.info.name, photo)
        shape = tuple(seen.inputs["pixel_values"].shape)
        if shape not in self._whole:
            with taking(self.info.name, seen.picture):
                sizes = self._sizes(seen.inputs)
            require_whole_grid(sizes, len(seen.tokens), self.info.name)
            self._whole.add(shape)
        return seen

    def hear(self, recording: Recording) -> HeardSound | SeenPicture:
        """A recording as the model hears it, through its own feature extractor; or sees it, in a spectrogram.

        Raises:
            AttnscopeError: It takes no recordings, or has no feature extractor.
        """
        if not sees_sound(self._base) and not hears(self._base) and not listens(self._base):
            takes = "texts" if reads_text(self._base) else "pictures" if sees_pictures(self._base) else "neither"
            raise AttnscopeError(
                f"{self.info.name} takes {takes}, not recordings"
                if takes != "neither"
                else f"{self.info.name} hears recordings in a way that is not supported",
                "leave out --audio, or name a model such as Whisper or wav2vec 2.0",
            )
        if self._processor is None:
            raise AttnscopeError(
                f"{self.info.name} came without its feature extractor",
                "save it beside the model as preprocessor_config.json, or: attnscope.load(model, extractor)",
            )
        if sees_sound(self._base):
            seen = spectrogram_seen_by(self._base, self._processor, self.info.name, recording)
            require_whole_grid(self._sizes(seen.inputs), len(seen.tokens), self.info.name)
            return seen
        if hears(self._base):
            return heard_by(self._base, self._processor, self.info.name, recording)
        heard = frames_heard_by(self._base, self._processor, self.info.name, recording)
        with in_one_line(self.info.name, "does not take what its feature extractor makes of the recording"):
            sizes = self._sizes(heard.inputs)
        require_all_frames(sizes, len(heard.tokens), self.info.name)
        return heard

    def transcribe(self, heard: HeardSound, n: int) -> Tokens:
        """What the decoder reads as it writes what it heard, by plain greedy search: no token is suppressed or forced.

        Begins with what the tokenizer puts before a transcript (language, task, no times).

        Raises:
            AttnscopeError: The model cannot write.
        """
        require_writing(self._model, self._base, self.info, is_encoder_decoder=True)
        start = self._start_id()
        prompt = list(self.tokenizer.prefix_ids) or [start]
        features = heard.inputs["input_features"].to(self._device)
        room = n if self.info.max_tokens is None else min(n, self.info.max_tokens - len(prompt))
        with switched(self._base, None):
            written = written_by(self._model, features, prompt, end_ids(self._model, self._base), room)
        return self.tokenizer.extend(self.tokenizer.encode_ids(prompt), written[len(prompt) :])

    def decoder_inputs(self, target: Tokens) -> dict[str, Tensor]:
        """What the forward gets for its decoder."""
        return {"decoder_input_ids": torch.from_numpy(target.ids)[None].to(self._device)}

    def _sizes(self, inputs: Mapping[str, Any]) -> set[tuple[int, int]]:
        """Queries and keys of all attentions on an input."""
        if self._found.road == "seam":
            return sizes_seen(lambda probe: self._run_inputs(inputs, probe))
        kept = Weights()
        with torch.no_grad():
            self._run_inputs(inputs, kept)
        return {(w.shape[2], w.shape[3]) for by_layer in kept.maps.values() for w in by_layer.values()}

    def _light_from(self, given: Mapping[str, Any]) -> int | None:
        """Whether this run gets light masks: on long texts, where the model is known to understand them."""
        tokens = [given[name].shape[1] for name in ("input_ids", "decoder_input_ids") if name in given]
        if max(tokens, default=0) < LIGHT_FROM or self._is_spread:
            return None
        if self._takes_light is None:
            self._takes_light = takes_light_masks(self._base, self._found.plan, self._found.extras)
        return LIGHT_FROM if self._takes_light else None

    def generate(self, ids: Sequence[int], n: int) -> list[int]:
        """Continues a text greedily: at each step the token that the model gives the most probability.

        One forward pass over the result shows what the model attended to as it wrote, since no query sees later keys.

        Args:
            ids: Token numbers of the text.
            n: How many tokens to write at most; fewer if the model ends the text or reaches its limit.

        Returns:
            The numbers given and those written, without the one that ends a text.

        Raises:
            AttnscopeError: The model cannot continue a text (an encoder, or without its language-model head).
        """
        require_writing(self._model, self._base, self.info, is_encoder_decoder=False)
        if not len(ids):
            raise AttnscopeError("there is nothing to continue", "give at least one token")
        room = n if self.info.max_tokens is None else min(n, self.info.max_tokens - len(ids))
        return continue_text(self._model, self._base, ids, room, self._device)

    def generate_tokens(self, tokens: Tokens, n: int) -> Tokens:
        """As `generate`, from Tokens to Tokens, with `n_given` saying where the model's own begin."""
        return self.tokenizer.extend(tokens, self.generate(tokens.ids.tolist(), n)[len(tokens) :])

    def encode_target(self, text: str) -> Tokens:
        """What the decoder of an encoder-decoder reads that is to write `text`: the start token, then the text.

        Raises:
            AttnscopeError: The model is no encoder-decoder, or names no start token.
        """
        return self.tokenizer.encode_target(text, self._start_id())

    def greedy_target(self, tokens: Tokens, n: int = 64) -> Tokens:
        """What the decoder reads as it answers a text by its own greedy output.

        Written with the model's own settings (forced and suppressed tokens …) but without sampling and beams.

        Args:
            tokens: What the encoder reads.
            n: How many tokens to write at most.

        Returns:
            The start token (`n_given` is 1) and what was written, without the token that ends a text.

        Raises:
            AttnscopeError: The model is no encoder-decoder, or cannot write.
        """
        require_writing(self._model, self._base, self.info, is_encoder_decoder=True)
        start = self._start_id()
        inputs = self._inputs(Batch(torch.from_numpy(tokens.ids)[None]), target=False)
        given = {name: x.to(self._device) for name, x in inputs.items()}
        written = answer(self._model, self._base, given, start, n)
        return self.tokenizer.extend(self.tokenizer.encode_ids(written[:1]), written[1:])

    def modules(self) -> list[nn.Module]:
        """The transformers model, without what it has on top for its task."""
        return [self._base]

    def static_embeddings(self, ids: Tensor) -> Tensor:
        """The rows of the token embedding, whatever the place: (batch, token) numbers -> (batch, token, d)."""
        self._require_known(ids)
        found = self._base.get_input_embeddings()(ids.to(self._device))
        # I-BERT gives the scale of its quantisation besides.
        rows: Tensor = found[0] if isinstance(found, tuple) else found
        return rows

    def untrained(self, seed: int) -> "HuggingFaceModel":
        """The same architecture with random weights, as transformers draws them before training."""
        with torch.random.fork_rng(devices=[]), quiet():
            torch.manual_seed(seed)
            twin = type(self._base)(copy.deepcopy(self._base.config)).to(self._base.dtype).to(self._device)
            twin.train(False).requires_grad_(False)
            notes = [f"random weights, seed {seed}"]
            name = f"{self.info.name} untrained"
            return assemble(twin, self.tokenizer, name, "memory", "", check=False, notes=notes)

    # What a forward gets ----------------------------------------------------------------------------------------

    def _inputs(self, batch: Batch, *, target: bool = True) -> dict[str, Tensor]:
        accepted = inspect.signature(self._base.forward).parameters
        if not reads_text(self._base):
            wordless(self.info.name, self._base).encode("")
        ids, mask = self._padded(batch.ids, batch.mask)
        inputs = {"input_ids": ids}
        if mask is not None:
            inputs["attention_mask"] = mask.long()
        segments = batch.segments
        # Segments that say nothing are left out: GPT-2 would add the embedding of token 0 to every token for them.
        if segments is not None and (not bool(segments.any()) or getattr(self._base.config, "type_vocab_size", 0) < 2):
            segments = None
        if "token_type_ids" in accepted and (segments is not None or self.tokenizer.type_ids):
            types = torch.zeros_like(ids) if segments is None else segments.clone()
            for number, kind in self.tokenizer.type_ids.items():
                types[ids == number] = kind
            inputs["token_type_ids"] = types
        if target and self._base.config.is_encoder_decoder:
            if batch.target_ids is None:
                raise AttnscopeError(
                    f"{self.info.name} has an encoder and a decoder, and nothing is given that its decoder reads",
                    "use encode_target or greedy_target",
                )
            target_ids, target_mask = self._padded(batch.target_ids, batch.target_mask)
            inputs["decoder_input_ids"] = target_ids
            if target_mask is not None:
                inputs["decoder_attention_mask"] = target_mask.long()
        return inputs

    def _padded(self, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Numbers with the model's own padding, checked; and the mask, None if all is real."""
        limit = self.info.max_tokens
        if limit is not None and ids.shape[1] > limit and position_table(self._base) is not None:
            raise AttnscopeError(
                f"a text of {ids.shape[1]} tokens is longer than the {limit} that {self.info.name} takes",
                "give a shorter text",
            )
        if mask is not None and bool(mask.all()):
            mask = None
        if mask is not None:
            ids = ids.masked_fill(~mask, pad_id(self._base))
        self._require_known(ids)
        return ids, mask

    def _require_known(self, ids: Tensor) -> None:
        """Refuses token numbers that the model has no embedding for."""
        size = vocab_size(self._base)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            raise AttnscopeError(
                f"token number {int(ids.max())} is beyond the {size} that {self.info.name} has",
                "its tokenizer belongs to another model",
            )

    def _start_id(self) -> int:
        return start_id(self._model, self._base, self.info.name)


def wrap(hf_model: PreTrainedModel, tokenizer: Any = None, *, name: str = "", check: bool = True) -> HuggingFaceModel:
    """Makes a Model of a transformers model that is in memory already. It is left as it is.

    Args:
        hf_model: Any PreTrainedModel, with or without a head; a PeftModel is taken with what is active in it.
        tokenizer: Its tokenizer; None = texts are given as token numbers. Of a vision model: its image processor.
        name: What to call it; empty = as it calls itself.
        check: Whether to compare what is seen with the model's own eager attention.

    Raises:
        AttnscopeError: It has no attention, or cannot be shown truly.
    """
    hf_model, adapter = unwrap(hf_model)
    if not isinstance(hf_model, PreTrainedModel):
        raise AttnscopeError(f"{type(hf_model).__name__} is no transformers model", "give a PreTrainedModel")
    name = name or str(hf_model.config.name_or_path).rstrip("/").rpartition("/")[2] or hf_model.config.model_type
    base = base_of(hf_model)
    if getattr(base.config, "mask_ratio", 0) and accepts(base, "noise"):
        raise AttnscopeError(
            f"{name} hides {base.config.mask_ratio:.0%} of the patches, others each time",
            "with model.config.mask_ratio = 0 it sees them all",
        )
    # A processor for two senses holds a tokenizer and an image processor or a feature extractor.
    words = getattr(tokenizer, "tokenizer", tokenizer if hasattr(tokenizer, "get_vocab") else None)
    parts = (getattr(tokenizer, name, None) for name in ("image_processor", "feature_extractor"))
    senses = next((part for part in parts if part is not None), None if words is tokenizer else tokenizer)
    reader: _Tokenizer = NumbersTokenizer() if words is None else HuggingFaceTokenizer(words)
    if not reads_text(base) and not accepts(base, "decoder_input_ids"):
        reader = wordless(name, base)
    return assemble(hf_model, reader, name, "memory", "", check=check, notes=[], processor=senses, adapter=adapter)


def wordless(name: str, base: PreTrainedModel) -> WordlessTokenizer:
    """What stands for the tokenizer of a model that reads no text."""
    if sees_pictures(base):
        return WordlessTokenizer(name, "sees pictures", "attnscope heatmap --image photo.png")
    if hears(base) or listens(base) or sees_sound(base):
        return WordlessTokenizer(name, "hears recordings", "attnscope heatmap --audio speech.wav")
    return WordlessTokenizer(name, f"reads {base.main_input_name}", "models of text, pictures and sound can be shown")


def assemble(
    model: PreTrainedModel,
    tokenizer: _Tokenizer,
    name: str,
    origin: str,
    sha256: str,
    *,
    check: bool,
    notes: list[str],
    processor: Any = None,
    adapter: Adapter = NONE,
) -> HuggingFaceModel:
    """A Model of a transformers model, once its attention has been surveyed; of two towers the one that reads text."""
    base = base_of(model)
    words, eyes = text_tower(base), picture_tower(base)

    def of(part: PreTrainedModel, reader: _Tokenizer, *said: str) -> HuggingFaceModel:
        with quiet(), in_one_line(f"{name} ({base.config.model_type})", "cannot be read"):
            return _assembled(
                part, reader, name, origin, sha256, check=check, notes=[*notes, *said], processor=processor,
                adapter=adapter,
            )  # fmt: skip

    if words is not None and eyes is not None:
        apart = "It has a part for text and one for pictures, and neither attends to the other: this is the one for"
        shown = of(words, tokenizer, f"{apart} text. With --image the other is shown.")
        shown.open_eyes = lambda: of(eyes, wordless(name, eyes), f"{apart} pictures.")
        return shown
    if eyes is not None:
        return of(eyes, wordless(name, eyes), "This is its encoder, which sees pictures; its decoder is not shown.")
    return of(model, tokenizer)


def _assembled(
    model: PreTrainedModel,
    tokenizer: _Tokenizer,
    name: str,
    origin: str,
    sha256: str,
    *,
    check: bool,
    notes: list[str],
    processor: Any,
    adapter: Adapter,
) -> HuggingFaceModel:
    base = base_of(model)
    found = survey(base, check=check)
    kinds = tuple(found.layers)
    info = ModelInfo(
        name=name,
        source=origin,
        sha256=sha256,
        architecture=base.config.model_type,
        engine="hf",
        road=found.road,
        kinds=kinds,
        n_layers=tuple(found.n_layers[kind] for kind in kinds),
        n_heads=tuple(found.n_heads[kind] for kind in kinds),
        n_kv_heads=tuple(found.n_kv_heads[kind] for kind in kinds),
        d_model=found.d_model,
        n_parameters=sum(parameter.numel() for parameter in model.parameters()),
        max_tokens=max_tokens(base),
        dtype=str(base.dtype).removeprefix("torch."),
        device=str(input_device(base)),
        checked=found.checked,
        notes=tuple(note for note in (adapter.note, *notes, *found.notes, tokenizer.note) if note),
        adapter=adapter.name,
        adapter_sha256=adapter.sha256,
    )
    return HuggingFaceModel(model, base, tokenizer, info, found, processor)
