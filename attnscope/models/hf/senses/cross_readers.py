"""Models with cross-attention from words, or learned queries, to the patches of a picture: a class a family.

To add a family, add its class here and to `CROSS_READERS`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from attnscope.core.attention.seam import Kind
from attnscope.errors import AttnscopeError
from attnscope.models.hf.parts import accepts, as_failure, in_one_line, silence
from attnscope.models.hf.seam import use_attention
from attnscope.models.hf.senses.cross_attention import (
    Patterns,
    compare_cross_attention,
    find_modules,
    result_of,
    survey_cross_attention,
)
from attnscope.models.hf.senses.patch_places import Cut, Pane, PhotoPrompt, join_tiles, one_grid
from attnscope.models.hf.senses.seeing import merges_patches, patch_size, tokens_before
from attnscope.models.hf.senses.vision_language import Named, VisionLanguageReader
from attnscope.models.hf.senses.writing import HuggingFaceWriter
from attnscope.models.hf.survey import Survey
from attnscope.models.hf.tokenizer import HuggingFaceTokenizer
from attnscope.models.inside.projections import hooks
from attnscope.models.inside.tape import replace_forwards
from attnscope.models.model import AttentionAxes
from attnscope.results.tokens import Tokens
from attnscope.senses.photos import Photo
from attnscope.senses.tokens import key_tokens, query_tokens

if TYPE_CHECKING:
    from attnscope.models.hf.model import HuggingFaceModel


class CrossAttentionReader(VisionLanguageReader):
    """A reader for families whose words or queries attend across to the patches of one picture.

    Attributes:
        modules: The modules of each kind of attention by name, with the layer's number. The first kind goes to the
            picture; the queries of the second are those of the first, with or without more.
    """

    modules: ClassVar[Patterns]
    takes_several_photos = False

    @classmethod
    def fits(cls, base: PreTrainedModel) -> bool:
        """Return whether a model has such attention; BLIP that answers questions has another kind."""
        return bool(find_modules(base, cls.modules["cross"])) and not hasattr(base, "text_encoder")

    @classmethod
    def stands_alone(cls, base: PreTrainedModel) -> bool:
        """Return whether a part of the model is shown without a picture, or without words."""
        return False

    @classmethod
    def survey(cls, base: PreTrainedModel) -> Survey:
        """Return the survey of its attention, found by the names of its modules."""
        return survey_cross_attention(base, cls.modules, cls.notes_on(base))

    @classmethod
    def notes_on(cls, base: PreTrainedModel) -> list[str]:
        """Return notes, one sentence each, that a user must know to read the pictures correctly."""
        return []

    @property
    def _tower(self) -> Any:
        """Return the module that sees the picture."""
        return self._base.vision_model

    def _cut(self, output: PhotoPrompt) -> Cut:
        """Return one picture of patches, after the tokens that stand for no place."""
        return one_grid(output, patch_size(self._tower, self._name), len(tokens_before(self._tower)))

    def _stand_ins(self, ids: Sequence[int]) -> list[int]:
        """Return where tokens of the text stand for pictures."""
        return [position for position, number in enumerate(ids) if number == self._picture_id]

    def _filling(self, inputs: Mapping[str, Tensor]) -> NDArray[np.bool_] | None:
        """Return a mask of the keys that fill up a batch and that no query sees, (key,); None = there are none."""
        return None

    def _write(self, inputs: Mapping[str, Tensor], prompt: list[int], n: int) -> list[int]:
        model = self.model.model
        if not model.can_generate():
            message = f"{self._name} was loaded without a language-model head and cannot write"
            raise AttnscopeError(message, "leave out --generate")
        never = getattr(self._base.config, "image_token_id", None)

        def predict(ids: list[int]) -> Tensor:
            scores = result_of(model(**self._extend(inputs, ids)))
            if never is not None:
                scores[..., never] = -torch.inf
            return scores

        # The picture stays the same while the model writes: the tower runs once.
        once = replace_forwards([self._tower], _compute_once)
        with silence(), torch.no_grad(), use_attention(self._base, None), once:
            return self._writer.extend_greedily(predict, prompt, n)

    def _name_tokens(
        self, inputs: Mapping[str, Tensor], photos: Sequence[Photo], labels: Mapping[int, str], n_given: int
    ) -> Named:
        words, queries, first = self._queries(inputs, n_given)
        filling = self._filling(inputs)
        axes: dict[str, AttentionAxes] = {}
        # Only cross-attention has keys in the picture; other kinds attend among words or queries.
        for kind, layers in self.model.survey.layers.items():
            tokens = queries[kind]
            first_query = first if tokens is words else 0
            if kind == "cross":
                axes[kind] = AttentionAxes(tokens, self._keys(photos, labels, filling), layers, first_query, filling)
            else:
                axes[kind] = AttentionAxes(tokens, tokens, layers, first_query)
        return words, axes

    def _queries(self, inputs: Mapping[str, Tensor], n_given: int) -> tuple[Tokens, dict[Kind, Tokens], int]:
        """Return the words, what attends in each kind of attention, and the first word after the picture."""
        ids = inputs[self.ids_name][0].tolist()
        stand_ins = self._stand_ins(ids)
        words = self.model.vocabulary.encode_among(ids, dict.fromkeys(stand_ins, "picture"), n_given)
        return words, {"cross": words, "decoder": words}, max(stand_ins, default=-1) + 1

    def _keys(
        self, photos: Sequence[Photo], labels: Mapping[int, str], filling: NDArray[np.bool_] | None = None
    ) -> Tokens:
        """Return the keys as Tokens: patches, tokens of the tower without a place, and filling."""
        # Keys are patches by their labels, tokens of the tower that stand for no place, and what fills up the batch.
        n_keys = max(labels) + 1 if filling is None else len(filling)
        is_real = np.ones(n_keys, bool) if filling is None else ~filling
        beside = dict.fromkeys(np.flatnonzero(is_real).tolist(), "CLS")
        return key_tokens(n_keys, {**beside, **labels}, [photo.source for photo in photos])

    def _compare(self, inputs: dict[str, Tensor], axes: Mapping[str, AttentionAxes]) -> None:
        """Compare the seam with the model's own output, once for each new shape of a picture."""
        shape = (*inputs["pixel_values"].shape, len(next(iter(axes.values())).keys))
        if shape not in self._compared:
            sizes = {kind: (len(sides.queries), len(sides.keys)) for kind, sides in axes.items()}
            with in_one_line(self._name, "does not run on this picture and these words"):
                compare_cross_attention(self._base, self.model.survey, inputs, sizes)
            self._compared.add(shape)


def _compute_once(module: nn.Module) -> Callable[..., Any]:
    """Return a forward that gives what it gave at first: what a tower sees stays the same as words are written."""
    forward = module.forward
    outputs: list[Any] = []

    def call(*args: Any, **named: Any) -> Any:
        if not outputs:
            outputs.append(forward(*args, **named))
        return outputs[0]

    return call


class MllamaReader(CrossAttentionReader):
    """Some layers of the language model attend to tiles of photos, which a token of the text stands for."""

    modules: ClassVar[Patterns] = {
        "cross": r"language_model\.layers\.(\d+)\.cross_attn",
        "decoder": r"language_model\.layers\.(\d+)\.self_attn",
    }
    takes_several_photos = True

    @classmethod
    def stands_alone(cls, base: PreTrainedModel) -> bool:
        """Return True: its layers without cross-attention are shown on text alone."""
        return True

    def _cut(self, output: PhotoPrompt) -> Cut:
        """Return tiles row by row, each behind a CLS token; a photo that has fewer is filled up with empty ones."""
        config = self._base.config.vision_config
        # Keys lie by photo, tile and patch; each tile has its CLS token first.
        side = config.image_size // config.patch_size
        _, n_photos, n_tiles = output.pixels.shape[:3]
        each = self._tower.num_patches
        # (photo, tile, patch), without the CLS token of each tile
        cells = torch.arange(n_photos * n_tiles * each).view(n_photos, n_tiles, each)[..., 1:]
        covered = output.pixels[0, ..., : side * config.patch_size, : side * config.patch_size]
        panes = []
        for number, shape in enumerate(output.inputs["aspect_ratio_ids"][0].tolist()):
            down, across = config.supported_aspect_ratios[shape - 1]
            tiles = cells[number].reshape(-1, side, side)
            panes.append(Pane(number, join_tiles(covered[number], down, across), join_tiles(tiles, down, across)))
        return panes, n_photos * n_tiles * each

    def _filling(self, inputs: Mapping[str, Tensor]) -> NDArray[np.bool_] | None:
        # (photo, tile) of the last token, repeated to one per key: (key,)
        is_real = inputs["cross_attention_mask"][0, -1].reshape(-1).cpu().numpy() > 0
        return np.repeat(~is_real, int(self._tower.num_patches))

    def _write(self, inputs: Mapping[str, Tensor], prompt: list[int], n: int) -> list[int]:
        return self._writer.answer(inputs, n, [self._picture_id])

    def _extend(self, inputs: Mapping[str, Tensor], ids: Sequence[int]) -> dict[str, Tensor]:
        """Have what is written see what the last token of the prompt does."""
        seen = inputs["cross_attention_mask"]
        last = seen[:, -1:].expand(-1, len(ids) - seen.shape[1], -1, -1)
        return {**super()._extend(inputs, ids), "cross_attention_mask": torch.cat([seen, last], 1)}


class QFormerReader(CrossAttentionReader):
    """Learned queries attend to the patches; a language model reads what comes of them before its text (BLIP-2)."""

    modules: ClassVar[Patterns] = {
        "cross": r"qformer\.encoder\.layer\.(\d+)\.crossattention\.attention",
        "encoder": r"qformer\.encoder\.layer\.(\d+)\.attention\.attention",
        "decoder": r"language_model\.(?:model\.)?(?:decoder\.)?layers\.(\d+)\.self_attn",
    }

    @classmethod
    def fits(cls, base: PreTrainedModel) -> bool:
        """Return whether it has a language model: a BLIP-2 that only ranks texts writes no words."""
        return super().fits(base) and hasattr(base, "language_model")

    @classmethod
    def notes_on(cls, base: PreTrainedModel) -> list[str]:
        """Return notes on the pictures, as CrossAttentionReader says."""
        notes = ["Learned queries (Q0, Q1 …) look at the picture: words attend to these, which have no place in it."]
        if not accepts(base, "qformer_input_ids"):
            notes.append("The queries do not read the text: whatever is asked, they look at the same places.")
        if not find_modules(base, cls.modules["decoder"]):
            notes.append("Its language model is an encoder-decoder of its own, which is not shown.")
        return notes

    @property
    def _shows_words(self) -> bool:
        return "decoder" in self.model.survey.layers

    def _write_prompt(self, text: str, n_photos: int) -> tuple[str, list[str]]:
        """Return the prompt; without a template the processor marks the picture itself."""
        has_template = getattr(self._processor, "chat_template", None)
        return super()._write_prompt(text, n_photos) if has_template else (text, [])

    def _process(self, images: Sequence[Any], prompt: str) -> dict[str, Any]:
        if not getattr(self._processor, "num_query_tokens", None):
            hint = "set processor.num_query_tokens as the model's configuration has it, and save it again"
            raise AttnscopeError(f"the processor of {self._name} does not say how many query tokens there are", hint)
        inputs = self._run_processor(prompt, list(images))
        if not self._shows_words:  # the encoder-decoder behind the queries wants a target
            start = self._base.config.get_text_config().decoder_start_token_id or 0
            inputs["decoder_input_ids"] = torch.tensor([[start]])
        return inputs

    def _write(self, inputs: Mapping[str, Tensor], prompt: list[int], n: int) -> list[int]:
        if not self._shows_words:
            message = f"the language model of {self._name} is an encoder-decoder of its own, which is not run to write"
            raise AttnscopeError(message, "leave out --generate")
        return super()._write(inputs, prompt, n)

    def _queries(self, inputs: Mapping[str, Tensor], n_given: int) -> tuple[Tokens, dict[Kind, Tokens], int]:
        ids = inputs[self.ids_name][0].tolist()
        stand_ins = self._stand_ins(ids)
        # The language model reads the queries as tokens of its text, in the places of the stand-ins.
        names = {position: f"Q{number}" for number, position in enumerate(stand_ins)}
        words = self.model.vocabulary.encode_among(ids, names, n_given)
        # InstructBLIP's queries also read the question: they attend to each other and to its tokens.
        question: list[str] = []
        if "qformer_input_ids" in inputs:
            tokenizer = self._processor.qformer_tokenizer
            question = tokenizer.convert_ids_to_tokens(inputs["qformer_input_ids"][0].tolist())
        queries = query_tokens(len(stand_ins))
        both = query_tokens(len(stand_ins), question)
        return words, {"cross": queries, "encoder": both, "decoder": words}, max(stand_ins, default=-1) + 1


class ImageProcessorReader(CrossAttentionReader):
    """An image processor is enough: no token of a text stands for the picture."""

    needs_words_processor = False

    def _write_prompt(self, text: str, n_photos: int) -> tuple[str, list[str]]:
        """Return the text alone."""
        return text, []

    def _stand_ins(self, ids: Sequence[int]) -> list[int]:
        return []

    def _process(self, images: Sequence[Any], prompt: str) -> dict[str, Any]:
        with as_failure(f"the image processor of {self._name}"), silence():
            images_processor: Any = self._images
            features: dict[str, Any] = images_processor(images=list(images), return_tensors="pt")
        return {name: value for name, value in features.items() if name in ("pixel_values", "pixel_mask")}


class CaptionReader(ImageProcessorReader):
    """A decoder writes of a picture: its words attend to the patches."""

    describes = True

    def _process(self, images: Sequence[Any], prompt: str) -> dict[str, Any]:
        pixels = super()._process(images, prompt)["pixel_values"]
        ids = torch.tensor([self._ids_of(prompt)])
        return {"pixel_values": pixels, self.ids_name: ids, "attention_mask": torch.ones_like(ids)}

    def _ids_of(self, text: str) -> list[int]:
        """Return the numbers of a text as the decoder reads it that is to continue it."""
        raise NotImplementedError

    @property
    def _backend(self) -> Any:
        """Return the tokenizer as transformers has it."""
        tokenizer = self.model.vocabulary
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise AttnscopeError(
                f"{self._name} came without its tokenizer",
                "save it beside the model: AutoTokenizer.from_pretrained(…).save_pretrained(…)",
            )
        return tokenizer.backend


class BlipReader(CaptionReader):
    """BLIP's decoder of captions."""

    modules: ClassVar[Patterns] = {
        "cross": r"text_decoder\.bert\.encoder\.layer\.(\d+)\.crossattention\.self",
        "decoder": r"text_decoder\.bert\.encoder\.layer\.(\d+)\.attention\.self",
    }

    def __init__(self, model: "HuggingFaceModel", processor: Any) -> None:
        super().__init__(model, processor)
        # As its own `generate` says.
        self._writer = HuggingFaceWriter(model, ends={self._base.config.text_config.sep_token_id})

    def _ids_of(self, text: str) -> list[int]:
        """Return the prompt that it was trained to continue: a token of its own, then the text, without an end."""
        ids = self._backend(text, add_special_tokens=False, verbose=False)["input_ids"]
        return [int(self._base.config.text_config.bos_token_id), *ids]


class EncoderDecoderReader(CaptionReader):
    """A vision encoder and a text decoder put together (TrOCR, Donut, captioners with GPT-2)."""

    modules: ClassVar[Patterns] = {
        "cross": r"decoder\.(?:.*\.)?(\d+)\.(?:encoder_attn|crossattention(?:\.self)?)",
        "decoder": r"decoder\.(?:.*\.)?(\d+)\.(?:self_attn|attn|attention\.self)",
    }
    ids_name = "decoder_input_ids"

    @classmethod
    def stands_alone(cls, base: PreTrainedModel) -> bool:
        """Return whether its encoder is shown on a picture without words."""
        encoder: Any = base.encoder
        return not merges_patches(encoder)

    @classmethod
    def notes_on(cls, base: PreTrainedModel) -> list[str]:
        """Return notes on the pictures, as CrossAttentionReader says."""
        if cls.stands_alone(base):
            return []
        return ["Its encoder merges patches, and attends within windows: it is not shown, the decoder is."]

    @property
    def _tower(self) -> Any:
        return self._base.encoder

    def _cut(self, output: PhotoPrompt) -> Cut:
        """Return one picture of patches; an encoder that merges them fills up the last ones."""
        if merges_patches(self._tower):
            output = _fill_up(output, patch_size(self._tower, self._name))
        return super()._cut(output)

    def _ids_of(self, text: str) -> list[int]:
        """Return the token that a decoder starts with, then the text, without its end."""
        backend = self._backend
        # Drop the end token that the tokenizer adds: the text is to be continued.
        start = self._writer.start_id()
        ids = [int(number) for number in backend(text, verbose=False)["input_ids"]]
        special = set(backend.all_special_ids)
        while ids and ids[-1] in special:
            ids.pop()
        return ids if ids[:1] == [start] else [start, *ids]


class ObjectReader(ImageProcessorReader):
    """Object queries attend to the feature map of a photo, and to each other (DETR)."""

    modules: ClassVar[Patterns] = {
        "cross": r"decoder\.layers\.(\d+)\.encoder_attn",
        "decoder": r"decoder\.layers\.(\d+)\.self_attn",
    }
    describes = True
    reads_words = False

    def __init__(self, model: "HuggingFaceModel", processor: Any) -> None:
        super().__init__(model, processor)
        self._grids: dict[tuple[int, ...], tuple[int, int]] = {}

    @classmethod
    def notes_on(cls, base: PreTrainedModel) -> list[str]:
        """Return notes on the pictures, as CrossAttentionReader says."""
        return [
            "Object queries (Q0, Q1 …) look at what the encoder makes of the photo; the encoder itself is not shown.",
            "A patch is a place of the feature map: through convolutions and encoder it knows of what lies around it.",
        ]

    def _cut(self, output: PhotoPrompt) -> Cut:
        """Return the photo in the places of the feature map, the last of which may be filled up."""
        shape = tuple(output.pixels.shape)
        if shape not in self._grids:
            self._grids[shape] = self._grid_of(output.inputs)
        # Each stage of a backbone halves height and width, rounded up.
        sides = zip(shape[2:], self._grids[shape], strict=True)
        high, wide = (2 ** math.ceil(math.log2(n_pixels / n_places)) for n_pixels, n_places in sides)
        return one_grid(_fill_up(output, (high, wide)), (high, wide))

    def _grid_of(self, inputs: Mapping[str, Any]) -> tuple[int, int]:
        """Return the rows and columns of the feature map that a picture becomes."""
        grids: list[tuple[int, int]] = []

        def look(module: nn.Module, arguments: Any, output: Tensor) -> None:
            grids.append((output.shape[-2], output.shape[-1]))

        # Run once: the projection behind the backbone gives the feature map, (1, d, row, column).
        moved = {name: value.to(self.model.device) for name, value in inputs.items()}
        moved["pixel_values"] = moved["pixel_values"].to(self._base.dtype)
        with torch.no_grad(), silence(), use_attention(self._base, None), hooks([self._base.input_projection], look):
            self._base(**moved)
        return grids[0]

    def _queries(self, inputs: Mapping[str, Tensor], n_given: int) -> tuple[Tokens, dict[Kind, Tokens], int]:
        queries = query_tokens(self._base.config.num_queries, objects=self._find_objects(inputs))
        return queries, {"cross": queries, "decoder": queries}, 0

    def _find_objects(self, inputs: Mapping[str, Tensor]) -> dict[int, str]:
        """Return the class of each query that is sure of an object; {} where the head for it was not loaded."""
        if self.model.model is self._base:
            return {}
        with torch.no_grad(), silence(), use_attention(self._base, None):
            logits = getattr(self.model.model(**inputs), "logits", None)
        if logits is None:
            return {}
        # (query, class), of which the last class stands for no object
        chances, classes = logits[0].softmax(-1)[:, :-1].max(-1)
        names = self._base.config.id2label
        found = (chances > _SURE).nonzero()[:, 0].tolist()
        return {query: str(names.get(int(classes[query]), int(classes[query]))) for query in found}


_SURE = 0.7
"""The least probability of the class that a query is named by."""


def _fill_up(output: PhotoPrompt, patch: tuple[int, int]) -> PhotoPrompt:
    """Return pictures with as much beside them as makes their patches whole."""
    height, width = output.pixels.shape[2:]
    filled = pad(output.pixels, (0, -width % patch[1], 0, -height % patch[0]))
    return PhotoPrompt(output.base, output.processor, {**output.inputs, "pixel_values": filled}, output.images)


CROSS_READERS: dict[str, type[CrossAttentionReader]] = {
    "blip": BlipReader,
    "blip-2": QFormerReader,
    "conditional_detr": ObjectReader,
    "detr": ObjectReader,
    "instructblip": QFormerReader,
    "mllama": MllamaReader,
    "table-transformer": ObjectReader,
    "vision-encoder-decoder": EncoderDecoderReader,
}
"""The type of a model's configuration -> its reader."""


def cross_reader(base: PreTrainedModel) -> type[CrossAttentionReader] | None:
    """Return the reader for a model with cross-attention to pictures; None = no known family."""
    reader = CROSS_READERS.get(base.config.model_type)
    return reader if reader is not None and reader.fits(base) else None
