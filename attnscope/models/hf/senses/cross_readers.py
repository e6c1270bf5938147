"""Models with cross-attention from words, or learned queries, to the patches of a picture.

Which of their modules is which attention is known by name, family by family: they do not run on text alone, and maps of
their towers would be too large to try them on a picture at load. What is said of them is compared with what they
compute by themselves on the first picture that they are given. Some have attention of their own code, which is not
looked up by name: as they run, what takes its place computes the same at the seam.

To add a family, add it to `CROSS_READERS`, with a class of its own where none fits.
"""

import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import AttentionCall, Kind, attend
from attnscope.errors import AttnscopeError
from attnscope.models.hf.check import compare_on
from attnscope.models.hf.parts import in_one_line, silence
from attnscope.models.hf.seam import attention_function, use_attention
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

_SURE = 0.7
"""The least probability of the class that a query is named by."""


class CrossAttentionReader(VisionLanguageReader):
    """A reader for families whose words or queries attend across to the patches of one picture.

    Attributes:
        modules: The name of the modules of each kind of attention, a regular expression with the layer's number. The
            first kind goes to the picture; the queries of the second are those of the first, with or without more.
    """

    modules: ClassVar[Mapping[Kind, str]]
    takes_several_photos = False

    @classmethod
    def fits(cls, base: PreTrainedModel) -> bool:
        """Return whether a model has such attention; BLIP that answers questions has another kind."""
        has_all = all(_find_modules(base, pattern) for pattern in cls.modules.values())
        return has_all and not hasattr(base, "text_encoder")

    @classmethod
    def stands_alone(cls, base: PreTrainedModel) -> bool:
        """Return whether a part of the model is shown without a picture, or without words."""
        return False

    @classmethod
    def notes_on(cls, base: PreTrainedModel) -> list[str]:
        """Return notes, one sentence each, that a user must know to read the pictures correctly."""
        return []

    @classmethod
    def survey(cls, base: PreTrainedModel) -> Survey:
        """Return the survey of the attention of words and queries; that of the vision tower is left out."""
        modules = {kind: _find_modules(base, pattern) for kind, pattern in cls.modules.items()}
        plan: dict[nn.Module, list[Place]] = {}
        depths: dict[str, int] = {}
        for kind, by_layer in modules.items():
            plan |= {module: [(kind, layer)] for layer, module in by_layer.items()}
            # Two kinds that take turns in one stack of layers share its depth.
            stack = cls.modules[kind].partition(r"(\d+)")[0]
            depths[stack] = max(depths.get(stack, 0), 1 + max(by_layer))
        heads = {kind: _heads_of(next(iter(by_layer.values()))) for kind, by_layer in modules.items()}
        return Survey(
            path="seam",
            plan=plan,
            layers={kind: tuple(by_layer) for kind, by_layer in modules.items()},
            n_layers={kind: depths[pattern.partition(r"(\d+)")[0]] for kind, pattern in cls.modules.items()},
            n_heads={kind: n_heads for kind, (n_heads, _) in heads.items()},
            n_kv_heads={kind: n_kv_heads for kind, (_, n_kv_heads) in heads.items()},
            d_model=int(base.config.get_text_config(decoder=True).hidden_size),
            notes=tuple(cls.notes_on(base)),
            beside=True,
            through=_at_seam(base),
        )

    @property
    def _tower(self) -> Any:
        """Return the module that sees the picture."""
        return self._base.vision_model

    def _write_prompt(self, text: str, n_photos: int) -> tuple[str, list[str]]:
        """Return the text alone where the model wants no mark of a picture, or its processor writes it."""
        has_template = getattr(self._processor, "chat_template", None)
        return super()._write_prompt(text, n_photos) if has_template else (text, [])

    def _cut(self, output: PhotoPrompt) -> Cut:
        """Return one picture of patches, after the tokens that stand for no place."""
        return one_grid(output, patch_size(self._tower, self._name), len(tokens_before(self._tower)))

    def _filling(self, inputs: Mapping[str, Tensor]) -> NDArray[np.bool_] | None:
        """Return a mask of the keys that fill up a batch and that no query sees, (key,); None = there are none."""
        return None

    def _name_tokens(
        self, inputs: Mapping[str, Tensor], photos: Sequence[Photo], labels: Mapping[int, str], n_given: int
    ) -> Named:
        words, queries = self._queries(inputs, n_given)
        filling = self._filling(inputs)
        # Keys are patches by their labels, tokens of the tower that stand for no place, and what fills up the batch.
        n_keys = max(labels) + 1 if filling is None else len(filling)
        is_real = np.ones(n_keys, bool) if filling is None else ~filling
        beside = dict.fromkeys(np.flatnonzero(is_real).tolist(), "CLS")
        keys = key_tokens(n_keys, {**beside, **labels}, [photo.source for photo in photos])
        # Words before the picture are not kept: they do not know of it.
        stand_ins = self._stand_ins(inputs)
        axes: dict[str, AttentionAxes] = {}
        for kind, layers in self.model.survey.layers.items():
            tokens = queries[kind]
            first = max(stand_ins, default=-1) + 1 if tokens is words else 0
            if kind == "cross":
                axes[kind] = AttentionAxes(tokens, keys, layers, first, filling)
            else:
                axes[kind] = AttentionAxes(tokens, tokens, layers, first)
        return words, axes

    def _stand_ins(self, inputs: Mapping[str, Tensor]) -> list[int]:
        """Return where tokens of the text stand for pictures."""
        if self._picture_id is None or self.ids_name not in inputs:
            return []
        ids = inputs[self.ids_name][0].tolist()
        return [position for position, number in enumerate(ids) if number == self._picture_id]

    def _queries(self, inputs: Mapping[str, Tensor], n_given: int) -> tuple[Tokens, dict[Kind, Tokens]]:
        """Return the words, and what attends in each kind of attention."""
        ids = inputs[self.ids_name][0].tolist()
        marks = dict.fromkeys(self._stand_ins(inputs), "picture")
        words = self.model.vocabulary.encode_among(ids, marks, n_given)
        return words, {"cross": words, "decoder": words}

    def _compare(self, inputs: dict[str, Tensor], axes: Mapping[str, AttentionAxes]) -> None:
        """Compare the seam with the model's own output, once for each new shape of a picture.

        Refuse also attention whose queries and keys are not of the sizes of its kind.
        """
        survey = self.model.survey
        shape = (*inputs["pixel_values"].shape, len(axes["cross"].keys))
        if shape in self._compared:
            return

        def observe(call: AttentionCall) -> Tensor:
            known = axes[call.kind]
            sizes = (survey.n_heads[call.kind], len(known.queries), len(known.keys))
            if sizes != (call.n_heads, call.query.shape[2], call.key.shape[2]):
                raise AttnscopeError(
                    f"{call.kind} layer {call.layer} has other attention than the {sizes[0]} heads of {sizes[1]} "
                    f"queries on {sizes[2]} keys that are known",
                    "it is not known which of them stand for which part of the picture",
                )
            return attend(call)

        with in_one_line(self._name, "does not run on this picture and these words"), silence():
            compare_on(self._base, survey, inputs, observe)
        self._compared.add(shape)


class MllamaReader(CrossAttentionReader):
    """Some layers of the language model attend to tiles of photos, which a token of the text stands for."""

    modules: ClassVar[Mapping[Kind, str]] = {
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

    def _extend(self, inputs: Mapping[str, Tensor], ids: Sequence[int]) -> dict[str, Tensor]:
        """Have what is written see what the last token of the prompt does."""
        seen = inputs["cross_attention_mask"]
        last = seen[:, -1:].expand(-1, len(ids) - seen.shape[1], -1, -1)
        return {**super()._extend(inputs, ids), "cross_attention_mask": torch.cat([seen, last], 1)}


class QFormerReader(CrossAttentionReader):
    """Learned queries attend to the patches; a language model reads what comes of them before its text (BLIP-2)."""

    modules: ClassVar[Mapping[Kind, str]] = {
        "cross": r"qformer\.encoder\.layer\.(\d+)\.crossattention\.attention",
        "encoder": r"qformer\.encoder\.layer\.(\d+)\.attention\.attention",
        "decoder": r"language_model\.(?:model\.)?(?:decoder\.)?layers\.(\d+)\.self_attn",
    }

    @classmethod
    def notes_on(cls, base: PreTrainedModel) -> list[str]:
        """Return notes on the pictures, as CrossAttentionReader says."""
        return [
            "Learned queries (Q0, Q1 …) look at the picture: words attend to these, which have no place in it.",
            "The queries do not read the text: whatever is asked, they look at the same places.",
        ]

    def _process(self, images: Sequence[Any], prompt: str) -> dict[str, Any]:
        if not getattr(self._processor, "num_query_tokens", None):
            hint = "set processor.num_query_tokens as the model's configuration has it, and save it again"
            raise AttnscopeError(f"the processor of {self._name} does not say how many query tokens there are", hint)
        return super()._process(images, prompt)

    def _queries(self, inputs: Mapping[str, Tensor], n_given: int) -> tuple[Tokens, dict[Kind, Tokens]]:
        # The language model reads the queries as tokens of its text, in the places of the stand-ins.
        stand_ins = self._stand_ins(inputs)
        names = {position: f"Q{number}" for number, position in enumerate(stand_ins)}
        words = self.model.vocabulary.encode_among(inputs[self.ids_name][0].tolist(), names, n_given)
        queries = query_tokens(len(stand_ins))
        return words, {"cross": queries, "encoder": queries, "decoder": words}


class CaptionReader(CrossAttentionReader):
    """A decoder writes of a picture, which no token of its text stands for: BLIP, TrOCR, Donut, GPT-2 behind ViT."""

    modules: ClassVar[Mapping[Kind, str]] = {
        "cross": r"(?:text_)?decoder\.(?:.*\.)?(\d+)\.(?:encoder_attn|crossattention(?:\.self)?)",
        "decoder": r"(?:text_)?decoder\.(?:.*\.)?(\d+)\.(?:self_attn|attn|attention\.self)",
    }
    describes = True
    needs_words_processor = False

    def __init__(self, model: "HuggingFaceModel", processor: Any) -> None:
        super().__init__(model, processor)
        self._is_blip = not hasattr(self._base, "encoder")
        self.ids_name = "input_ids" if self._is_blip else "decoder_input_ids"
        if self._is_blip:  # as its own `generate` says
            self._writer = HuggingFaceWriter(model, ends={self._base.config.text_config.sep_token_id})

    @classmethod
    def stands_alone(cls, base: PreTrainedModel) -> bool:
        """Return whether its encoder is shown on a picture without words."""
        encoder: Any = getattr(base, "encoder", None)
        return encoder is not None and not merges_patches(encoder)

    @classmethod
    def notes_on(cls, base: PreTrainedModel) -> list[str]:
        """Return notes on the pictures, as CrossAttentionReader says."""
        if cls.stands_alone(base) or not hasattr(base, "encoder"):
            return []
        return ["Its encoder merges patches, and attends within windows: it is not shown, the decoder is."]

    @property
    def _tower(self) -> Any:
        return self._base.vision_model if self._is_blip else self._base.encoder

    @property
    def _picture_id(self) -> None:
        return None

    def _process(self, images: Sequence[Any], prompt: str) -> dict[str, Any]:
        tokenizer = self.model.vocabulary
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise AttnscopeError(
                f"{self._name} came without its tokenizer",
                "save it beside the model: AutoTokenizer.from_pretrained(…).save_pretrained(…)",
            )
        pixels = self._images(images=list(images), return_tensors="pt")["pixel_values"]
        # The token that the decoder starts with, then the text that it is to continue, without an end.
        start = int(self._base.config.text_config.bos_token_id) if self._is_blip else self._writer.start_id()
        numbers = tokenizer.backend(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        if numbers[:1] != [start]:
            numbers = [start, *numbers]
        ids = torch.tensor([numbers])
        return {"pixel_values": pixels, self.ids_name: ids, "attention_mask": torch.ones_like(ids)}

    def _cut(self, output: PhotoPrompt) -> Cut:
        """Return one picture of patches; an encoder that merges them fills up the last ones."""
        if merges_patches(self._tower):
            output = _fill_up(output, patch_size(self._tower, self._name))
        return super()._cut(output)

    def _write(self, inputs: Mapping[str, Tensor], n: int) -> list[int]:
        if not self._is_blip:
            return super()._write(inputs, n)
        # Its own `generate` drops the last token, that ends a text.
        ids = inputs[self.ids_name][0].tolist()
        ended = self._extend(inputs, [*ids, self._base.config.text_config.sep_token_id])
        return self._writer.answer(ended, n, len(ids), None)


class ObjectReader(CrossAttentionReader):
    """Object queries attend to the feature map of a photo, and to each other (DETR)."""

    modules: ClassVar[Mapping[Kind, str]] = {
        "cross": r"decoder\.layers\.(\d+)\.encoder_attn",
        "decoder": r"decoder\.layers\.(\d+)\.self_attn",
    }
    describes = True
    reads_words = False
    needs_words_processor = False

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

    def _process(self, images: Sequence[Any], prompt: str) -> dict[str, Any]:
        features = self._images(images=list(images), return_tensors="pt")
        return {name: features[name] for name in ("pixel_values", "pixel_mask") if name in features}

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
        """Return the rows and columns of the feature map that a picture becomes, by running the model once."""
        grids: list[tuple[int, int]] = []

        def look(module: nn.Module, arguments: Any, output: Tensor) -> None:
            grids.append((output.shape[-2], output.shape[-1]))

        # The projection behind the backbone gives the feature map, (1, d, row, column).
        moved = {name: value.to(self.model.device) for name, value in inputs.items()}
        moved["pixel_values"] = moved["pixel_values"].to(self._base.dtype)
        with torch.no_grad(), silence(), use_attention(self._base, None), hooks([self._base.input_projection], look):
            self._base(**moved)
        return grids[0]

    def _queries(self, inputs: Mapping[str, Tensor], n_given: int) -> tuple[Tokens, dict[Kind, Tokens]]:
        queries = query_tokens(self._base.config.num_queries, objects=self._find_objects(inputs))
        return queries, {"cross": queries, "decoder": queries}

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
        sure = (chances > _SURE).nonzero()[:, 0].tolist()
        return {query: str(names.get(int(classes[query]), int(classes[query]))) for query in sure}


CROSS_READERS: dict[str, type[CrossAttentionReader]] = {
    "blip": CaptionReader,
    "blip-2": QFormerReader,
    "conditional_detr": ObjectReader,
    "detr": ObjectReader,
    "mllama": MllamaReader,
    "vision-encoder-decoder": CaptionReader,
}
"""The type of a model's configuration -> its reader."""


def cross_reader(base: PreTrainedModel) -> type[CrossAttentionReader] | None:
    """Return the reader for a model with cross-attention to pictures; None = no known family."""
    reader = CROSS_READERS.get(base.config.model_type)
    return reader if reader is not None and reader.fits(base) else None


def _fill_up(output: PhotoPrompt, patch: tuple[int, int]) -> PhotoPrompt:
    """Return pictures with as much beside them as makes their patches whole."""
    height, width = output.pixels.shape[2:]
    filled = pad(output.pixels, (0, -width % patch[1], 0, -height % patch[0]))
    return PhotoPrompt(output.base, output.processor, {**output.inputs, "pixel_values": filled}, output.images)


def _find_modules(base: PreTrainedModel, pattern: str) -> dict[int, nn.Module]:
    """Return the innermost modules of a name, by layer."""
    modules: dict[int, nn.Module] = {}
    for name, module in base.named_modules():  # a module comes before what it holds, as BERT's `crossattention.self`
        match = re.fullmatch(pattern, name)
        if match:
            modules[int(match[1])] = module
    return modules


def _heads_of(module: nn.Module) -> tuple[int, int]:
    """Return the query heads and key/value heads of a module."""
    groups = getattr(module, "num_key_value_groups", 1) or 1
    for holder in (module, getattr(module, "config", None)):
        for name in ("decoder_attention_heads", "num_attention_heads", "num_heads", "n_heads"):
            n_heads = getattr(holder, name, None)
            if isinstance(n_heads, int):
                return n_heads, n_heads // groups
    raise AttnscopeError(f"{type(module).__name__} does not say how many heads it has")


# Attention that does not look itself up by name -------------------------------------------------------------------


def _at_seam(base: PreTrainedModel) -> Callable[..., Any] | None:
    """Return a function that runs a model with such attention through the seam; None where it has none."""
    own = [module for module in base.modules() if type(module).__name__ in ("BlipTextSelfAttention", "TrOCRAttention")]

    def run(**inputs: Any) -> Any:
        with replace_forwards(own, lambda module: types.MethodType(_attend_as_itself, module)):
            return base(**inputs)

    return run if own else None


def _attend_as_itself(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    key_value_states: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute the forward of such a module through the seam, without a cache."""
    # What attends, (batch, query, d), and what to, (batch, key, d).
    states = encoder_hidden_states if key_value_states is None else key_value_states
    states = hidden_states if states is None else states
    mask = attention_mask if encoder_hidden_states is None else encoder_attention_mask
    # Heads apart, (batch, head, token, d_head), and together again.
    is_trocr = hasattr(module, "q_proj")
    names = ("q_proj", "k_proj", "v_proj") if is_trocr else ("query", "key", "value")
    d_head = module.head_dim if is_trocr else module.attention_head_size
    projected = [getattr(module, name)(x) for name, x in zip(names, (hidden_states, states, states), strict=True)]
    query, key, value = (x.reshape(*x.shape[:-1], -1, d_head).transpose(1, 2) for x in projected)
    output = attention_function(module, query, key, value, mask, is_causal=False)[0].flatten(2)
    return module.out_proj(output) if is_trocr else output, None
