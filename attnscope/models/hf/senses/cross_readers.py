"""Read models whose words, or learned queries, attend to the patches of a picture by cross-attention.

Each family lists the names of the modules that compute its attentions. They cannot be found out at load as those of
other models are: these models do not run on text alone, and the maps of their vision towers would be large. Instead,
their output through the seam is compared with their own on the first picture. Modules whose attention does not pass the
seam get another forward, `_attend`, while the model runs.

To add a family, add it to `CROSS_READERS`, with a class of its own where none fits.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnscope.core.attention.probes import LayerKey
from attnscope.core.attention.seam import Kind
from attnscope.errors import AttnscopeError
from attnscope.models.hf.parts import silence
from attnscope.models.hf.seam import attention_function, use_attention
from attnscope.models.hf.senses.media_readers import merges_patches, patch_size, tokens_before
from attnscope.models.hf.senses.patch_places import Cut, ImageView, PhotoPrompt, join_tiles, one_grid
from attnscope.models.hf.senses.text_generator import Arguments
from attnscope.models.hf.senses.vision_language import VisionLanguageReader
from attnscope.models.hf.survey import AttentionSurvey
from attnscope.models.hf.tokenizer import HuggingFaceTokenizer
from attnscope.models.inside.tape import run_instead
from attnscope.models.model import AttentionAxes
from attnscope.results.tokens import Tokens
from attnscope.senses.photos import Photo
from attnscope.senses.tokens import make_key_tokens, make_query_tokens

_MIN_PROBABILITY = 0.7
"""Object queries are named by their class only if it has more than this probability."""


class CrossAttentionReader(VisionLanguageReader):
    """A reader for families whose words or queries attend to the patches of one picture by cross-attention.

    Attributes:
        modules: Pairs of a kind of attention and a regular expression for the names of its modules; the group in it is
            the layer. "cross" attends to the picture, "decoder" among words, "encoder" among learned queries.
        notes: What a user must know of parts that are not shown, one sentence each.
    """

    modules: ClassVar[tuple[tuple[Kind, str], ...]]
    notes: tuple[str, ...] = ()
    among_words = False
    takes_several_photos = False

    @classmethod
    def survey(cls, base: PreTrainedModel) -> AttentionSurvey:
        """Return the attention layers of words and queries; those of the vision tower are left out."""
        plan: dict[nn.Module, list[LayerKey]] = {}
        layers: dict[Kind, tuple[int, ...]] = {}
        n_layers: dict[Kind, int] = {}
        n_heads: dict[Kind, int] = {}
        n_kv_heads: dict[Kind, int] = {}
        for kind, pattern in cls.modules:
            modules, n_layers[kind] = _find_modules(base, pattern)
            for layer, module in modules.items():
                plan[module] = [(kind, layer)]
                # All layers of a kind have as many heads.
                n_heads[kind], n_kv_heads[kind] = _heads_of(module)
            layers[kind] = tuple(modules)
        return AttentionSurvey(
            path="seam",
            plan=plan,
            layers=layers,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            d_model=int(base.config.get_text_config(decoder=True).hidden_size),
            notes=() if stands_alone(base) else cls.notes,
            has_unplanned_modules=True,
            run_forward=_at_seam(base),
        )

    @property
    def _tower(self) -> Any:
        """Return the vision tower, which encodes the picture."""
        return getattr(self._base, "vision_model", None) or self._base.encoder

    def _cut(self, output: PhotoPrompt) -> Cut:
        """Return one grid of patches, which come after tokens such as CLS among the keys.

        A tower that merges patches pads the picture to whole ones.
        """
        patch = patch_size(self._tower, self._name)
        n_before = len(tokens_before(self._tower))
        return one_grid(output, patch, n_before, is_filled=merges_patches(self._tower))

    def _padding(self, inputs: Arguments, labels: Mapping[int, str]) -> NDArray[np.bool_]:
        """Return which keys are padding that no query sees, (key,). `labels` are those of patches, by key."""
        return np.zeros(max(labels) + 1, bool)

    def _queries(self, inputs: Arguments, n_given: int) -> dict[Kind, Tokens]:
        """Return the queries of each kind of attention. Those of "decoder" are words, or object queries (DETR)."""
        words = self._words(inputs, {}, n_given)
        return {"cross": words, "decoder": words}

    def _name_tokens(
        self, inputs: Arguments, photos: Sequence[Photo], labels: Mapping[int, str], n_given: int
    ) -> tuple[Tokens, dict[str, AttentionAxes]]:
        # Keys are patches, which have labels, other tokens of the tower ("CLS"), and padding.
        is_padding = self._padding(inputs, labels)
        names = dict.fromkeys(np.flatnonzero(~is_padding).tolist(), "CLS")
        names.update(labels)
        keys = make_key_tokens(len(is_padding), names, [photo.source for photo in photos])
        queries = self._queries(inputs, n_given)
        words = queries["decoder"]
        # Words before the picture cannot attend to it: they are not shown.
        first_word = max(self._picture_positions(inputs), default=-1) + 1
        axes: dict[str, AttentionAxes] = {}
        for kind, layers in self.model.survey.layers.items():
            tokens = queries[kind]
            first_query = first_word if tokens is words else 0
            kind_keys = keys if kind == "cross" else tokens
            axes[kind] = AttentionAxes(tokens, kind_keys, layers, first_query)
        return words, axes


class MllamaReader(CrossAttentionReader):
    """Some layers of the language model attend to tiles of photos; in the text one token stands for each photo."""

    modules = (
        ("cross", r"language_model\.layers\.(\d+)\.cross_attn"),
        ("decoder", r"language_model\.layers\.(\d+)\.self_attn"),
    )
    takes_several_photos = True

    def _cut(self, output: PhotoPrompt) -> Cut:
        """Return each photo joined from its tiles. The keys of a tile are a CLS token, then its patches, row by row.

        A photo of fewer tiles than the model takes is padded with empty tiles.
        """
        config = self._base.config.vision_config
        side = config.image_size // config.patch_size
        # Number the keys: (photo, tile, key), and without the CLS tokens (photo, tile, row, column)
        n_photos, n_tiles = output.pixels.shape[1:3]
        n_each = self._tower.num_patches
        keys = torch.arange(n_photos * n_tiles * n_each).view(n_photos, n_tiles, n_each)
        cells = keys[..., 1:].reshape(n_photos, n_tiles, side, side)
        # Pixels within whole patches: (photo, tile, 3, height, width)
        covered = output.pixels[0, ..., : side * config.patch_size, : side * config.patch_size]
        panes = []
        for number, ratio_id in enumerate(output.inputs["aspect_ratio_ids"][0].tolist()):
            down, across = config.supported_aspect_ratios[ratio_id - 1]
            pixels = join_tiles(covered[number], down, across)
            panes.append(ImageView(number, pixels, join_tiles(cells[number], down, across)))
        return panes, keys.numel()

    def _padding(self, inputs: Arguments, labels: Mapping[int, str]) -> NDArray[np.bool_]:
        # Which tiles the last token sees, (photo * tile,), repeated for all keys of a tile: (key,)
        sees_tile = inputs["cross_attention_mask"][0, -1].reshape(-1)
        return np.repeat(sees_tile.cpu().numpy() <= 0, self._tower.num_patches)

    def _extend(self, inputs: Arguments, ids: Sequence[int]) -> dict[str, Tensor]:
        """Return arguments in which written tokens see the tiles that the last token of the prompt sees."""
        longer = super()._extend(inputs, ids)
        # (batch, token, photo, tile)
        mask = inputs["cross_attention_mask"]
        n_more = len(ids) - mask.shape[1]
        mask_of_written = mask[:, -1:].expand(-1, n_more, -1, -1)
        longer["cross_attention_mask"] = torch.cat([mask, mask_of_written], 1)
        return longer


class QFormerReader(CrossAttentionReader):
    """Learned queries attend to the patches; a language model reads their outputs as tokens of its text (BLIP-2)."""

    modules = (
        ("cross", r"qformer\.encoder\.layer\.(\d+)\.crossattention\.attention"),
        ("encoder", r"qformer\.encoder\.layer\.(\d+)\.attention\.attention"),
        ("decoder", r"language_model\.(?:model\.)?(?:decoder\.)?layers\.(\d+)\.self_attn"),
    )
    notes = (
        "Learned queries (Q0, Q1 …) look at the picture: words attend to these, which have no place in it.",
        "The queries do not read the text: whatever is asked, they look at the same places.",
    )

    def _queries(self, inputs: Arguments, n_given: int) -> dict[Kind, Tokens]:
        # Tokens of the text that stand for the picture are replaced by the outputs of the queries.
        names = {
            position: f"Q{number}" for number, position in enumerate(self._picture_positions(inputs))
        }
        queries = make_query_tokens(len(names))
        words = self._words(inputs, names, n_given)
        return {"cross": queries, "encoder": queries, "decoder": words}


class CaptionReader(CrossAttentionReader):
    """A decoder writes about a picture; no token of its text stands for it (TrOCR, Donut, GPT-2 after ViT)."""

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
        """Return the id of the token that the decoder's text begins with."""
        return self._writer.start_id()

    def _process(self, images: Sequence[Any], prompt: str) -> dict[str, Any]:
        tokenizer = self.model.vocabulary
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise AttnscopeError(
                f"{self._name} came without its tokenizer",
                "save it beside the model: AutoTokenizer.from_pretrained(…).save_pretrained(…)",
            )
        pixels = self._image_processor(images=list(images), return_tensors="pt")["pixel_values"]
        # The start token of the decoder, then the text that it is to continue, without an end token.
        text_ids = tokenizer.backend(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        start = self._start_id()
        if text_ids[:1] != [start]:
            text_ids = [start, *text_ids]
        ids = torch.tensor([text_ids])
        return {"pixel_values": pixels, self.ids_name: ids, "attention_mask": torch.ones_like(ids)}


class BlipReader(CaptionReader):
    """BLIP's decoder, which begins and ends a text with tokens of its own."""

    notes = ()
    ids_name = "input_ids"

    def _start_id(self) -> int:
        return int(self._base.config.text_config.bos_token_id)

    def _write(self, inputs: Arguments, n: int) -> list[int]:
        # BLIP's own `generate` drops the last token of what it is given, for that ends a text: add such a token.
        end = self._base.config.text_config.sep_token_id
        ids = self._ids_of(inputs)
        ended = self._extend(inputs, [*ids, end])
        written = self._writer.answer(ended, n, len(ids), suppress_tokens=None, forced_eos_token_id=None)
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
        return dict(self._image_processor(images=list(images), return_tensors="pt"))

    def _cut(self, output: PhotoPrompt) -> Cut:
        """Return the photo, padded to whole places of the feature map, which are its patches."""
        # Run the backbone: its last feature map is (1, d, row, column).
        pixels = output.pixels.to(self.model.device, self._base.dtype)
        with torch.no_grad(), silence(), use_attention(self._base, None):
            features = self._base.backbone(pixels, torch.ones_like(pixels[:, 0]))
        feature_map, _ = features[-1]
        # Each stage halves height and width, rounded up: 33 pixels in 2 places are patches of 32.
        ratios = np.array(pixels.shape[2:]) / feature_map.shape[2:]
        height, width = 2 ** np.ceil(np.log2(ratios)).astype(int)
        return one_grid(output, (height, width), is_filled=True)

    def _queries(self, inputs: Arguments, n_given: int) -> dict[Kind, Tokens]:
        queries = make_query_tokens(self._base.config.num_queries, self._find_objects(inputs))
        return {"cross": queries, "decoder": queries}

    def _find_objects(self, inputs: Arguments) -> dict[int, str]:
        """Return query -> name of its object's class, if that is likely enough; {} where the head was not loaded."""
        with torch.no_grad(), silence(), use_attention(self._base, None):
            logits = getattr(self.model.model(**inputs), "logits", None)
        if logits is None:
            return {}
        # (query, class); the last class stands for no object
        probabilities, classes = logits[0].softmax(-1)[:, :-1].max(-1)
        names = self._base.config.id2label
        objects = {}
        for query in (probabilities > _MIN_PROBABILITY).nonzero()[:, 0].tolist():
            class_id = int(classes[query])
            objects[query] = str(names.get(class_id, class_id))
        return objects


CROSS_READERS: dict[str, type[CrossAttentionReader]] = {
    "blip": BlipReader,
    "blip-2": QFormerReader,
    "conditional_detr": ObjectReader,
    "detr": ObjectReader,
    "mllama": MllamaReader,
    "vision-encoder-decoder": CaptionReader,
}
"""`model_type` of a configuration -> reader of such models."""


def cross_reader(base: PreTrainedModel) -> type[CrossAttentionReader] | None:
    """Return the reader for a model with cross-attention to pictures; None if its family is not known."""
    reader = CROSS_READERS.get(base.config.model_type)
    # BLIP for question answering has a text encoder in between, which no reader knows.
    if reader is None or hasattr(base, "text_encoder"):
        return None
    has_all = all(_find_modules(base, pattern)[0] for _, pattern in reader.modules)
    return reader if has_all else None


def stands_alone(base: PreTrainedModel) -> bool:
    """Return whether a model with cross-attention to pictures has a part that is also shown by itself."""
    # The vision tower before a decoder, on pictures alone, unless it merges patches.
    if base.config.model_type == "vision-encoder-decoder":
        encoder: Any = base.encoder
        return not merges_patches(encoder)
    # Mllama's layers without cross-attention, on text alone.
    return base.config.model_type == "mllama"


def _find_modules(base: PreTrainedModel, pattern: str) -> tuple[dict[int, nn.Module], int]:
    """Return layer -> the innermost module whose name matches, and how many layers there are.

    The first group of the pattern is the number of the layer.
    """
    modules: dict[int, nn.Module] = {}
    n_layers = 0
    # A module comes before those in it, such as `crossattention` before `crossattention.self`: the innermost is kept.
    for name, module in base.named_modules():
        match = re.fullmatch(pattern, name)
        if match:
            modules[int(match[1])] = module
            # All layers, with this attention or without: "decoder.layers" of "decoder.layers.3.encoder_attn".
            stack: Any = base.get_submodule(name[: match.start(1) - 1])
            n_layers = len(stack)
    return modules, n_layers


def _heads_of(module: nn.Module) -> tuple[int, int]:
    """Return how many query heads and key/value heads an attention module has."""
    heads_per_group = getattr(module, "num_key_value_groups", 1)
    for owner in (module, getattr(module, "config", None)):
        for name in ("decoder_attention_heads", "num_attention_heads", "num_heads", "n_heads"):
            n_heads = getattr(owner, name, None)
            if isinstance(n_heads, int):
                return n_heads, n_heads // heads_per_group
    raise AttnscopeError(f"{type(module).__name__} does not say how many heads it has")


# Attention that does not look up its function by name -------------------------------------------------------------


def _at_seam(base: PreTrainedModel) -> Callable[..., Any] | None:
    """Return a function that runs a model with attention of its own through the seam; None if it has none."""
    names = ("BlipTextSelfAttention", "TrOCRAttention")
    modules = [module for module in base.modules() if type(module).__name__ in names]

    def run(**inputs: Any) -> Any:
        with run_instead(modules, _attend):
            return base(**inputs)

    return run if modules else None


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
    """Compute BLIP's or TrOCR's attention through the seam, in place of a module's own forward and without a cache."""
    # Queries are made of hidden_states, (batch, query, d), keys and values of key_states, (batch, key, d): the same,
    # unless BLIP or TrOCR names the encoder's.
    key_states = hidden_states
    if encoder_hidden_states is not None:
        key_states = encoder_hidden_states
        attention_mask = encoder_attention_mask
    elif key_value_states is not None:
        key_states = key_value_states
    # Project, and divide into heads: (batch, head, token, d_head)
    is_trocr = hasattr(module, "q_proj")
    names = ("q_proj", "k_proj", "v_proj") if is_trocr else ("query", "key", "value")
    n_heads, _ = _heads_of(module)
    tensors = []
    for name, states in zip(names, (hidden_states, key_states, key_states), strict=True):
        projected = getattr(module, name)(states)
        tensors.append(projected.unflatten(-1, (n_heads, -1)).transpose(1, 2))
    query, key, value = tensors
    # (batch, query, head, d_head) -> (batch, query, d)
    output, _ = attention_function(module, query, key, value, attention_mask, is_causal=False)
    joined = output.flatten(2)
    if is_trocr:
        joined = module.out_proj(joined)
    return joined, None
