"""Models with cross-attention from words, or learned queries, to the patches of a picture: a class a family.

To add a family, add its class here and to `CROSS_READERS`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from attnscope.core.attention.seam import Kind
from attnscope.errors import AttnscopeError
from attnscope.models.hf.examples import accepts
from attnscope.models.hf.layers import Survey
from attnscope.models.hf.parts import as_failure, in_one_line, silence
from attnscope.models.hf.seam import use_attention
from attnscope.models.hf.senses.cross_attention import compare_cross_attention, result_of, survey_cross_attention
from attnscope.models.hf.senses.patch_places import Pane, PhotoPrompt, join_tiles, one_grid
from attnscope.models.hf.senses.seeing import patch_size, tokens_before
from attnscope.models.hf.senses.vision_language import Labels, VisionLanguageReader
from attnscope.models.hf.senses.writing import HuggingFaceWriter
from attnscope.models.hf.tokenizer import HuggingFaceTokenizer
from attnscope.models.model import AttentionAxes
from attnscope.results.tokens import Tokens
from attnscope.senses.photos import Photo
from attnscope.senses.tokens import key_tokens, query_tokens

if TYPE_CHECKING:
    from attnscope.models.hf.model import HuggingFaceModel


class CrossAttentionReader(VisionLanguageReader):
    """What families share whose words attend across to the patches of one picture.

    Attributes:
        modules: The modules of each kind of attention by name, with the layer's number. The first kind goes to the
            picture; the queries of the second are those of the first, with or without more.
        stands_alone: Whether a part of the model is shown without a picture, or without words.
    """

    modules: ClassVar[Mapping[Kind, str]]
    stands_alone: ClassVar[bool] = False
    takes_several_photos = False

    @classmethod
    def fits(cls, base: PreTrainedModel) -> bool:
        """Return whether a model of this type has such attention.

        Of BLIP that answers questions the decoder reads those.
        """
        names = (name for name, _ in base.named_modules())
        return any(re.fullmatch(cls.modules["cross"], name) for name in names) and not hasattr(base, "text_encoder")

    @classmethod
    def survey(cls, base: PreTrainedModel) -> Survey:
        """Return what its attention is; see survey_cross_attention."""
        return survey_cross_attention(base, cls.modules, cls.notes_on)

    @classmethod
    def notes_on(cls, base: PreTrainedModel, kinds: Sequence[Kind]) -> tuple[str, ...]:
        """Return what a user must know to read the pictures truly."""
        return ()

    @property
    def _tower(self) -> Any:
        """Return what sees the picture."""
        return self._base.vision_model

    def _cut(self, output: PhotoPrompt) -> list[Pane]:
        """One picture of patches, after what stands for no place."""
        return one_grid(output, *patch_size(self._tower, self._name), len(tokens_before(self._tower)))

    def _n_places(self, inputs: Mapping[str, Any]) -> int:
        high, wide = patch_size(self._tower, self._name)
        n, _, height, width = inputs["pixel_values"].shape
        return int(n * (len(tokens_before(self._tower)) + (height // high) * (width // wide)))

    def _places(self, output: PhotoPrompt) -> NDArray[np.int64]:
        return np.arange(output.n_tokens)

    def _stand_ins(self, ids: Sequence[int]) -> list[int]:
        """Where tokens of the text stand for pictures."""
        return [place for place, number in enumerate(ids) if number == self._picture_id]

    def _filling(self, output: PhotoPrompt) -> NDArray[np.bool_]:
        """Return which keys are of tiles that are there to fill up a batch, (key,): no query sees them."""
        return np.zeros(output.n_tokens, np.bool_)

    def _write(self, inputs: Mapping[str, Tensor], prompt: list[int], n: int) -> list[int]:
        model = self.model.model
        if not model.can_generate():
            message = f"{self._name} was loaded without a language-model head and cannot write"
            raise AttnscopeError(message, "leave out --generate")
        never = getattr(self._base.config, "image_token_id", None)

        def predict(ids: list[int]) -> Tensor:
            scores = result_of(model(**{**self._extend(inputs, ids), **once}))
            if never is not None:
                scores[..., never] = -torch.inf
            return scores

        with silence(), torch.no_grad(), use_attention(self._base, None):
            once = self._encode_once(inputs)
            return self._writer.extend_greedily(predict, prompt, n)

    def _encode_once(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return what need not be computed again for each token that is written, as the forward gets it."""
        return {}

    def _name_tokens(
        self, output: PhotoPrompt, photos: Sequence[Photo], labels: Labels, inputs: Mapping[str, Tensor], n_given: int
    ) -> tuple[Tokens, dict[str, AttentionAxes]]:
        ids = inputs[self.ids_name][0].tolist()
        hidden = self._filling(output)
        stand_ins = self._stand_ins(ids)
        words = self.model.vocabulary.encode_among(ids, dict.fromkeys(stand_ins, "picture"), n_given)
        keys = self._keys(output, photos, labels)
        first = max(stand_ins, default=-1) + 1
        layers = self.model.survey.layers
        return words, {
            "cross": AttentionAxes(words, keys, layers["cross"], first, hidden if hidden.any() else None),
            "decoder": AttentionAxes(words, words, layers["decoder"], first),
        }

    def _compare(self, inputs: dict[str, Tensor], axes: Mapping[str, AttentionAxes]) -> None:
        """For each new shape of a picture."""
        shape = (*inputs["pixel_values"].shape, len(next(iter(axes.values())).keys))
        if shape not in self._compared:
            sizes = {kind: (len(sides.queries), len(sides.keys)) for kind, sides in axes.items()}
            with in_one_line(self._name, "does not run on this picture and these words"):
                compare_cross_attention(self._base, self.model.survey, inputs, sizes)
            self._compared.add(shape)

    def _keys(self, output: PhotoPrompt, photos: Sequence[Photo], labels: Labels) -> Tokens:
        beside = dict.fromkeys(np.flatnonzero(~self._filling(output)).tolist(), "CLS")
        return key_tokens(output.n_tokens, {**beside, **labels}, [photo.source for photo in photos])


class MllamaReader(CrossAttentionReader):
    """Some layers of the language model attend to tiles of photos, which a token of the text stands for."""

    modules: ClassVar[Mapping[Kind, str]] = {
        "cross": r"language_model\.layers\.(\d+)\.cross_attn",
        "decoder": r"language_model\.layers\.(\d+)\.self_attn",
    }
    stands_alone = True
    takes_several_photos = True

    def _cut(self, output: PhotoPrompt) -> list[Pane]:
        """Tiles row by row, each behind a CLS token; a photo that has fewer is filled up with empty ones."""
        config = self._base.config.vision_config
        side = config.image_size // config.patch_size
        each = side * side + 1
        n_tiles = output.pixels.shape[2]
        panes = []
        for number, which in enumerate(output.inputs["aspect_ratio_ids"][0].tolist()):
            down, across = config.supported_aspect_ratios[which - 1]
            tiles = output.pixels[0, number, : down * across]
            at = np.arange(side * side).reshape(1, side, side) + 1
            at = at + each * (np.arange(down * across) + number * n_tiles)[:, None, None]
            cropped = tiles[:, :, : side * config.patch_size, : side * config.patch_size]
            panes.append(Pane(number, False, join_tiles(cropped, down, across), join_tiles(at, down, across)))
        return panes

    def _n_places(self, inputs: Mapping[str, Any]) -> int:
        _, n_photos, n_tiles = inputs["pixel_values"].shape[:3]
        return int(n_photos * n_tiles * self._tower.num_patches)

    def _filling(self, output: PhotoPrompt) -> NDArray[np.bool_]:
        real = output.inputs["cross_attention_mask"][0, -1].reshape(-1).cpu().numpy() > 0
        return np.repeat(~real, int(self._tower.num_patches))

    def _write(self, inputs: Mapping[str, Tensor], prompt: list[int], n: int) -> list[int]:
        return self._writer.answer(inputs, n, [self._picture_id])

    def _extend(self, inputs: Mapping[str, Tensor], ids: Sequence[int]) -> dict[str, Tensor]:
        """Return what is written sees what the last token of the prompt does."""
        longer = super()._extend(inputs, ids)
        seen = inputs["cross_attention_mask"]
        more = len(ids) - seen.shape[1]
        longer["cross_attention_mask"] = torch.cat([seen, seen[:, -1:].expand(-1, more, -1, -1)], 1)
        return longer


class QFormerReader(CrossAttentionReader):
    """Learned queries attend to the patches; a language model reads what comes of them before its text (BLIP-2)."""

    modules: ClassVar[Mapping[Kind, str]] = {
        "cross": r"qformer\.encoder\.layer\.(\d+)\.crossattention\.attention",
        "encoder": r"qformer\.encoder\.layer\.(\d+)\.attention\.attention",
        "decoder": r"language_model\.(?:model\.)?(?:decoder\.)?layers\.(\d+)\.self_attn",
    }

    @classmethod
    def fits(cls, base: PreTrainedModel) -> bool:
        """Of BLIP-2 that ranks texts no words are written."""
        return super().fits(base) and hasattr(base, "language_model")

    @classmethod
    def notes_on(cls, base: PreTrainedModel, kinds: Sequence[Kind]) -> tuple[str, ...]:
        """See CrossAttentionReader."""
        notes = ["Learned queries (Q0, Q1 …) look at the picture: words attend to these, which have no place in it."]
        if not accepts(base, "qformer_input_ids"):
            notes.append("The queries do not read the text: whatever is asked, they look at the same places.")
        if "decoder" not in kinds:
            notes.append("Its language model is an encoder-decoder of its own, which is not shown.")
        return tuple(notes)

    def _write_prompt(self, text: str, n: int) -> tuple[str, list[str]]:
        """Without a template its processor marks the picture itself."""
        return super()._write_prompt(text, n) if getattr(self._processor, "chat_template", None) else (text, [])

    def _process(self, images: Sequence[Any], prompt: str) -> dict[str, Any]:
        if not getattr(self._processor, "num_query_tokens", None):
            hint = "set processor.num_query_tokens as the model's configuration has it, and save it again"
            raise AttnscopeError(f"the processor of {self._name} does not say how many query tokens there are", hint)
        inputs: dict[str, Any] = self._run_processor(prompt, list(images))
        if "decoder" not in self.model.survey.layers:  # the encoder-decoder behind the queries wants a target
            start = self._base.config.get_text_config().decoder_start_token_id or 0
            inputs["decoder_input_ids"] = torch.tensor([[start]])
        return inputs

    def _write(self, inputs: Mapping[str, Tensor], prompt: list[int], n: int) -> list[int]:
        if "decoder" not in self.model.survey.layers:
            message = f"the language model of {self._name} is an encoder-decoder of its own, which is not run to write"
            raise AttnscopeError(message, "leave out --generate")
        return super()._write(inputs, prompt, n)

    def _name_tokens(
        self, output: PhotoPrompt, photos: Sequence[Photo], labels: Labels, inputs: Mapping[str, Tensor], n_given: int
    ) -> tuple[Tokens, dict[str, AttentionAxes]]:
        ids = inputs[self.ids_name][0].tolist()
        layers = self.model.survey.layers
        at = self._stand_ins(ids)
        keys = self._keys(output, photos, labels)
        named = {place: f"Q{number}" for number, place in enumerate(at)}
        words = self.model.vocabulary.encode_among(ids, named, n_given)
        read: list[str] = []
        if "qformer_input_ids" in inputs:
            tokenizer = self._processor.qformer_tokenizer
            read = [str(piece) for piece in tokenizer.convert_ids_to_tokens(inputs["qformer_input_ids"][0].tolist())]
        both = query_tokens(len(at), read)
        axes = {
            "cross": AttentionAxes(query_tokens(len(at)), keys, layers["cross"]),
            "encoder": AttentionAxes(both, both, layers["encoder"]),
        }
        if "decoder" in layers:
            axes["decoder"] = AttentionAxes(words, words, layers["decoder"], max(at, default=-1) + 1)
        return words, axes


class CaptionReader(CrossAttentionReader):
    """A decoder writes of a picture: its words attend to the patches, and no token stands for the picture."""

    describes = True
    takes_image_processor = True

    def _write_prompt(self, text: str, n: int) -> tuple[str, list[str]]:
        """Return the text alone."""
        return text, []

    def _stand_ins(self, ids: Sequence[int]) -> list[int]:
        return []

    def _process(self, images: Sequence[Any], prompt: str) -> dict[str, Any]:
        processor = getattr(self._processor, "image_processor", self._processor)
        with as_failure(f"the image processor of {self._name}"), silence():
            pixels = processor(images=list(images), return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels, self.ids_name: torch.tensor([self._ids_of(prompt)])}

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

    modules: ClassVar[Mapping[Kind, str]] = {
        "cross": r"text_decoder\.bert\.encoder\.layer\.(\d+)\.crossattention\.self",
        "decoder": r"text_decoder\.bert\.encoder\.layer\.(\d+)\.attention\.self",
    }

    def __init__(self, model: "HuggingFaceModel", processor: Any) -> None:
        super().__init__(model, processor)
        # As its own `generate` says.
        self._writer = HuggingFaceWriter(model, ends={self._base.config.text_config.sep_token_id})

    def _process(self, images: Sequence[Any], prompt: str) -> dict[str, Any]:
        inputs = super()._process(images, prompt)
        return {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}

    def _ids_of(self, text: str) -> list[int]:
        """Return what it is trained to continue begins with a token of its own, and does not end."""
        ids = self._backend(text, add_special_tokens=False, verbose=False)["input_ids"]
        return [int(self._base.config.text_config.bos_token_id), *ids]


class EncoderDecoderReader(CaptionReader):
    """A vision encoder and a text decoder put together (TrOCR, Donut, captioners with GPT-2)."""

    modules: ClassVar[Mapping[Kind, str]] = {
        "cross": r"decoder\.(?:.*\.)?(\d+)\.(?:encoder_attn|crossattention(?:\.self)?)",
        "decoder": r"decoder\.(?:.*\.)?(\d+)\.(?:self_attn|attn|attention\.self)",
    }
    stands_alone = True
    ids_name = "decoder_input_ids"

    @property
    def _tower(self) -> Any:
        return self._base.encoder

    def _ids_of(self, text: str) -> list[int]:
        """Return the token that a decoder starts with, then the text, without its end."""
        backend = self._backend
        start = self._writer.start_id()
        ids = [int(number) for number in backend(text, verbose=False)["input_ids"]]
        special = set(backend.all_special_ids)
        while ids and ids[-1] in special:
            ids.pop()
        return ids if ids[:1] == [start] else [start, *ids]

    def _encode_once(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"encoder_outputs": BaseModelOutput(self._tower(inputs["pixel_values"])[0]), "pixel_values": None}


CROSS_READERS: dict[str, type[CrossAttentionReader]] = {
    "blip": BlipReader,
    "blip-2": QFormerReader,
    "instructblip": QFormerReader,
    "mllama": MllamaReader,
    "vision-encoder-decoder": EncoderDecoderReader,
}
"""By the type of a model's configuration."""


def cross_reader(base: PreTrainedModel) -> type[CrossAttentionReader] | None:
    """Return what reads pictures and words in a model with cross-attention to pictures.

    None = it has none that is known.
    """
    reader = CROSS_READERS.get(base.config.model_type)
    return reader if reader is not None and reader.fits(base) else None
