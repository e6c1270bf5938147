"""Read models whose words, or learned queries, attend to the patches of a picture.

Which of their modules is which attention is known by name, family by family: they do not run on text alone, and maps of
their towers would be too large to try them on a picture at load. What is said of them is compared with what they
compute by themselves on the first picture that they are given. Some have attention code of their own: `_attend`
replaces its forward while the model runs.

To add a family, add it to `CROSS_READERS`, with a class of its own where none fits.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import Kind
from attnscope.errors import AttnscopeError
from attnscope.models.hf.parts import silence
from attnscope.models.hf.seam import attention_function, use_attention
from attnscope.models.hf.senses.eyes_and_ears import merges_patches, patch_size, tokens_before
from attnscope.models.hf.senses.patch_places import Cut, Pane, PhotoPrompt, join_tiles, one_grid
from attnscope.models.hf.senses.vision_language import VisionLanguageReader
from attnscope.models.hf.senses.writing import Inputs
from attnscope.models.hf.survey import Survey
from attnscope.models.hf.tokenizer import HuggingFaceTokenizer
from attnscope.models.inside.tape import run_instead
from attnscope.models.model import AttentionAxes
from attnscope.results.tokens import Tokens
from attnscope.senses.photos import Photo
from attnscope.senses.tokens import key_tokens, query_tokens

_SURE = 0.7
"""The least probability of the class that a query is named by."""


class CrossAttentionReader(VisionLanguageReader):
    """A reader for families whose words or queries attend across to the patches of one picture.

    Attributes:
        modules: The kinds of attention, each with a regular expression for the names of its modules, whose group is the
            layer's number. "cross" goes to the picture; "decoder" is the kind of what writes.
        notes: What a user must know of parts that are not shown, or not read, one sentence each.
    """

    modules: ClassVar[tuple[tuple[Kind, str], ...]]
    notes: tuple[str, ...] = ()
    among_words = False
    takes_several_photos = False

    @classmethod
    def survey(cls, base: PreTrainedModel) -> Survey:
        """Return the survey of the attention of words and queries; that of the vision tower is left out."""
        plan: dict[nn.Module, list[Place]] = {}
        layers: dict[Kind, tuple[int, ...]] = {}
        n_layers: dict[Kind, int] = {}
        n_heads: dict[Kind, int] = {}
        n_kv_heads: dict[Kind, int] = {}
        for kind, pattern in cls.modules:
            modules, n_layers[kind] = _find_modules(base, pattern)
            for layer, module in modules.items():
                plan[module] = [(kind, layer)]
                # All layers of a kind have the same heads.
                n_heads[kind], n_kv_heads[kind] = _heads_of(module)
            layers[kind] = tuple(modules)
        return Survey(
            path="seam",
            plan=plan,
            layers=layers,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            d_model=int(base.config.get_text_config(decoder=True).hidden_size),
            notes=() if stands_alone(base) else cls.notes,
            beside=True,
            through=_at_seam(base),
        )

    @property
    def _tower(self) -> Any:
        """Return the module that sees the picture."""
        return getattr(self._base, "vision_model", None) or self._base.encoder

    def _cut(self, output: PhotoPrompt) -> Cut:
        """Return one grid of patches, after the tokens that stand for no place.

        A tower that merges patches fills up those at the edges.
        """
        patch = patch_size(self._tower, self._name)
        n_before = len(tokens_before(self._tower))
        return one_grid(output, patch, n_before, is_filled=merges_patches(self._tower))

    def _filling(self, inputs: Inputs) -> NDArray[np.bool_] | None:
        """Return a mask of the keys that fill up a batch and that no query sees, (key,); None = there are none."""
        return None

    def _queries(self, inputs: Inputs, n_given: int) -> dict[Kind, Tokens]:
        """Return the queries of each kind of attention: of "decoder" the words, if there are any."""
        words = self._words(inputs, {}, n_given)
        return {"cross": words, "decoder": words}

    def _name_tokens(
        self, inputs: Inputs, photos: Sequence[Photo], labels: Mapping[int, str], n_given: int
    ) -> tuple[Tokens, dict[str, AttentionAxes]]:
        # Keys are patches by their labels, tokens of the tower that stand for no place, and what fills up the batch.
        filling = self._filling(inputs)
        is_real = np.ones(max(labels) + 1, bool) if filling is None else ~filling
        names = {**dict.fromkeys(np.flatnonzero(is_real).tolist(), "CLS"), **labels}
        keys = key_tokens(len(is_real), names, [photo.source for photo in photos])
        queries = self._queries(inputs, n_given)
        words = queries["decoder"]
        # Words before the picture are not shown: they do not know of it.
        first_word = max(self._stand_ins(inputs), default=-1) + 1
        axes: dict[str, AttentionAxes] = {}
        for kind, layers in self.model.survey.layers.items():
            tokens = queries[kind]
            first_query = 0
            if tokens is words:
                first_query = first_word
            if kind == "cross":
                axes[kind] = AttentionAxes(tokens, keys, layers, first_query, filling)
            else:
                axes[kind] = AttentionAxes(tokens, tokens, layers, first_query)
        return words, axes


class MllamaReader(CrossAttentionReader):
    """Some layers of the language model attend to tiles of photos, which a token of the text stands for."""

    modules = (
        ("cross", r"language_model\.layers\.(\d+)\.cross_attn"),
        ("decoder", r"language_model\.layers\.(\d+)\.self_attn"),
    )
    takes_several_photos = True

    def _cut(self, output: PhotoPrompt) -> Cut:
        """Return photos of tiles, row by row; each tile comes after a CLS token.

        A photo of fewer tiles than the model takes is filled up with empty ones.
        """
        config = self._base.config.vision_config
        side = config.image_size // config.patch_size
        n_photos, n_tiles = output.pixels.shape[1:3]
        n_each = self._tower.num_patches
        # (photo, tile, row, column), without the CLS token of each tile
        keys = torch.arange(n_photos * n_tiles * n_each).view(n_photos, n_tiles, n_each)
        cells = keys[..., 1:].reshape(n_photos, n_tiles, side, side)
        covered = output.pixels[0, ..., : side * config.patch_size, : side * config.patch_size]
        panes = []
        for number, shape in enumerate(output.inputs["aspect_ratio_ids"][0].tolist()):
            down, across = config.supported_aspect_ratios[shape - 1]
            pixels = join_tiles(covered[number], down, across)
            panes.append(Pane(number, pixels, join_tiles(cells[number], down, across)))
        return panes, n_photos * n_tiles * n_each

    def _filling(self, inputs: Inputs) -> NDArray[np.bool_] | None:
        # (photo, tile) of the last token, repeated to one per key: (key,)
        seen = inputs["cross_attention_mask"][0, -1].reshape(-1)
        return np.repeat(seen.cpu().numpy() <= 0, int(self._tower.num_patches))

    def _extend(self, inputs: Inputs, ids: Sequence[int]) -> dict[str, Tensor]:
        """Return arguments in which written tokens see the tiles that the last token of the prompt sees."""
        longer = super()._extend(inputs, ids)
        seen = inputs["cross_attention_mask"]
        n_more = len(ids) - seen.shape[1]
        last = seen[:, -1:].expand(-1, n_more, -1, -1)
        longer["cross_attention_mask"] = torch.cat([seen, last], 1)
        return longer


class QFormerReader(CrossAttentionReader):
    """Learned queries attend to the patches; a language model reads what comes of them before its text (BLIP-2)."""

    modules = (
        ("cross", r"qformer\.encoder\.layer\.(\d+)\.crossattention\.attention"),
        ("encoder", r"qformer\.encoder\.layer\.(\d+)\.attention\.attention"),
        ("decoder", r"language_model\.(?:model\.)?(?:decoder\.)?layers\.(\d+)\.self_attn"),
    )
    notes = (
        "Learned queries (Q0, Q1 …) look at the picture: words attend to these, which have no place in it.",
        "The queries do not read the text: whatever is asked, they look at the same places.",
    )

    def _queries(self, inputs: Inputs, n_given: int) -> dict[Kind, Tokens]:
        # The language model reads the queries as tokens of its text, in the places of the stand-ins.
        names = {position: f"Q{number}" for number, position in enumerate(self._stand_ins(inputs))}
        queries = query_tokens(len(names))
        words = self._words(inputs, names, n_given)
        return {"cross": queries, "encoder": queries, "decoder": words}


class CaptionReader(CrossAttentionReader):
    """A decoder writes of a picture, which no token of its text stands for: TrOCR, Donut, GPT-2 behind ViT."""

    modules = (
        ("cross", r"(?:text_)?decoder\.(?:.*\.)?(\d+)\.(?:encoder_attn|crossattention(?:\.self)?)"),
        ("decoder", r"(?:text_)?decoder\.(?:.*\.)?(\d+)\.(?:self_attn|attn|attention\.self)"),
    )
    notes: tuple[str, ...] = (
        "Its encoder merges patches, and attends within windows: it is not shown, the decoder is.",
    )
    describes = True
    ids_name = "decoder_input_ids"

    def _start_id(self) -> int:
        """Return the number of the token that what it writes begins with."""
        return self._writer.start_id()

    def _process(self, images: Sequence[Any], prompt: str) -> dict[str, Any]:
        tokenizer = self.model.vocabulary
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise AttnscopeError(
                f"{self._name} came without its tokenizer",
                "save it beside the model: AutoTokenizer.from_pretrained(…).save_pretrained(…)",
            )
        pixels = self._images(images=list(images), return_tensors="pt")["pixel_values"]
        # The token that the decoder starts with, then the text that it is to continue, without an end.
        numbers = tokenizer.backend(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        start = self._start_id()
        if numbers[:1] != [start]:
            numbers = [start, *numbers]
        ids = torch.tensor([numbers])
        return {"pixel_values": pixels, self.ids_name: ids, "attention_mask": torch.ones_like(ids)}


class BlipReader(CaptionReader):
    """BLIP's decoder, which begins and ends a text with tokens of its own."""

    notes = ()
    ids_name = "input_ids"

    def _start_id(self) -> int:
        return int(self._base.config.text_config.bos_token_id)

    def _write(self, inputs: Inputs, n: int) -> list[int]:
        # Its own `generate` drops the last token, that ends a text.
        end = self._base.config.text_config.sep_token_id
        ids = self._ids_of(inputs)
        ended = self._extend(inputs, [*ids, end])
        written = self._writer.answer(ended, n, len(ids), None)
        return written[:-1] if written[-1:] == [end] else written


class ObjectReader(CrossAttentionReader):
    """Object queries attend to the feature map of a photo, and to each other (DETR)."""

    modules = (
        ("cross", r"decoder\.layers\.(\d+)\.encoder_attn"),
        ("decoder", r"decoder\.layers\.(\d+)\.self_attn"),
    )
    notes = (
        "Object queries (Q0, Q1 …) look at what the encoder makes of the photo; the encoder itself is not shown.",
        "A patch is a place of the feature map: through convolutions and encoder it knows of what lies around it.",
    )
    describes = True
    reads_words = False

    def _process(self, images: Sequence[Any], prompt: str) -> dict[str, Any]:
        return dict(self._images(images=list(images), return_tensors="pt"))

    def _cut(self, output: PhotoPrompt) -> Cut:
        """Return the photo in the places of the feature map, the last of which may be filled up."""
        # Run the backbone: its last feature map is (1, d, row, column).
        pixels = output.pixels.to(self.model.device, self._base.dtype)
        with torch.no_grad(), silence(), use_attention(self._base, None):
            features = self._base.backbone(pixels, torch.ones_like(pixels[:, 0]))
        feature_map, _ = features[-1]
        # Each stage of a backbone halves height and width, rounded up.
        patch = [
            2 ** math.ceil(math.log2(n_pixels / n_places))
            for n_pixels, n_places in zip(pixels.shape[2:], feature_map.shape[2:], strict=True)
        ]
        return one_grid(output, (patch[0], patch[1]), is_filled=True)

    def _queries(self, inputs: Inputs, n_given: int) -> dict[Kind, Tokens]:
        queries = query_tokens(self._base.config.num_queries, self._find_objects(inputs))
        return {"cross": queries, "decoder": queries}

    def _find_objects(self, inputs: Inputs) -> dict[int, str]:
        """Return the class of each query that is sure of an object; {} where the head for it was not loaded."""
        with torch.no_grad(), silence(), use_attention(self._base, None):
            logits = getattr(self.model.model(**inputs), "logits", None)
        if logits is None:
            return {}
        # (query, class), of which the last class stands for no object
        chances, classes = logits[0].softmax(-1)[:, :-1].max(-1)
        names = self._base.config.id2label
        objects = {}
        for query in (chances > _SURE).nonzero()[:, 0].tolist():
            number = int(classes[query])
            objects[query] = str(names.get(number, number))
        return objects


CROSS_READERS: dict[str, type[CrossAttentionReader]] = {
    "blip": BlipReader,
    "blip-2": QFormerReader,
    "conditional_detr": ObjectReader,
    "detr": ObjectReader,
    "mllama": MllamaReader,
    "vision-encoder-decoder": CaptionReader,
}
"""Type of a model's configuration -> its reader."""


def cross_reader(base: PreTrainedModel) -> type[CrossAttentionReader] | None:
    """Return the reader for a model with cross-attention to pictures; None = no known family."""
    reader = CROSS_READERS.get(base.config.model_type)
    # BLIP for question answering has a text encoder in between, which no reader knows.
    if reader is None or hasattr(base, "text_encoder"):
        return None
    has_all = all(_find_modules(base, pattern)[0] for _, pattern in reader.modules)
    return reader if has_all else None


def stands_alone(base: PreTrainedModel) -> bool:
    """Return whether a part of a model with cross-attention is shown without a picture, or without words."""
    if base.config.model_type == "vision-encoder-decoder":
        encoder: Any = base.encoder
        return not merges_patches(encoder)
    # Mllama's layers without cross-attention are shown on text alone.
    return base.config.model_type == "mllama"


def _find_modules(base: PreTrainedModel, pattern: str) -> tuple[dict[int, nn.Module], int]:
    """Return layer -> the innermost module whose name matches, and how many layers there are."""
    modules: dict[int, nn.Module] = {}
    n_layers = 0
    # A module comes before what it holds (BERT's `crossattention.self`): the innermost is kept.
    for name, module in base.named_modules():
        match = re.fullmatch(pattern, name)
        if match:
            modules[int(match[1])] = module
            stack: Any = base.get_submodule(name[: match.start(1) - 1])
            n_layers = len(stack)
    return modules, n_layers


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
    names = ("BlipTextSelfAttention", "TrOCRAttention")
    own = [module for module in base.modules() if type(module).__name__ in names]

    def run(**inputs: Any) -> Any:
        with run_instead(own, _attend):
            return base(**inputs)

    return run if own else None


def _attend(
    module: Any,
    forward: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    key_value_states: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the forward of such a module through the seam, without a cache."""
    # Queries are made of the hidden states, (batch, query, d), keys and values of these: (batch, key, d)
    key_states = hidden_states
    if encoder_hidden_states is not None:  # BLIP
        key_states = encoder_hidden_states
        attention_mask = encoder_attention_mask
    elif key_value_states is not None:  # TrOCR
        key_states = key_value_states
    # Heads apart, (batch, head, token, d_head), and together again.
    is_trocr = hasattr(module, "q_proj")
    names = ("q_proj", "k_proj", "v_proj") if is_trocr else ("query", "key", "value")
    n_heads, _ = _heads_of(module)
    parts = []
    for name, x in zip(names, (hidden_states, key_states, key_states), strict=True):
        projected = getattr(module, name)(x)
        parts.append(projected.unflatten(-1, (n_heads, -1)).transpose(1, 2))
    query, key, value = parts
    output, _ = attention_function(module, query, key, value, attention_mask, is_causal=False)
    joined = output.flatten(2)
    if is_trocr:
        joined = module.out_proj(joined)
    return joined, None
