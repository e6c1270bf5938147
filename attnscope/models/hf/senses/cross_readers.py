"""Read models whose words, or learned queries, attend to the patches of a picture by cross-attention.

The *seam* is our attention function, which transformers calls in place of its own. Each family lists the names of the
modules that compute its attentions. Other models are traced at load to find these modules. That is not possible here:
these models do not run on text alone, and the attention maps of their vision towers would be large. Instead, the output
through the seam is compared with the model's own output on the first picture. While the model runs, modules that do not
call the seam get another forward, `_attend`.

To add a family, add it to `CROSS_READERS`, with a class of its own if no class fits.
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
from attnscope.models.hf.parts import mute_transformers
from attnscope.models.hf.seam import attention_function, use_attention
from attnscope.models.hf.senses.media_readers import list_prefix_tokens, merges_patches, read_patch_size
from attnscope.models.hf.senses.patch_places import (
    ImageView,
    PhotoPrompt,
    ViewsAndCount,
    join_tiles,
    make_grid_views,
)
from attnscope.models.hf.senses.text_generator import Arguments
from attnscope.models.hf.senses.vision_language import VisionLanguageReader
from attnscope.models.hf.survey import AttentionSurvey
from attnscope.models.hf.tokenizer import HuggingFaceTokenizer
from attnscope.models.inside.tape import replace_forwards
from attnscope.models.model import AttentionAxes
from attnscope.results.tokens import Tokens
from attnscope.senses.photos import Photo
from attnscope.senses.tokens import make_key_tokens, make_query_tokens

_MIN_PROBABILITY = 0.7
"""Object queries are named by their class only if it has more than this probability."""


class CrossAttentionReader(VisionLanguageReader):
    """A reader for families whose words or queries attend to the patches of one picture by cross-attention.

    Attributes:
        module_patterns: (kind of attention, regular expression for the names of its modules). The first group of the
            expression is the layer. Words or queries attend to the picture in "cross" attention, words to words in
            "decoder" attention, and learned queries to each other in "encoder" attention.
        notes: What a user must know about parts that are not shown, one sentence each.
    """

    module_patterns: ClassVar[tuple[tuple[Kind, str], ...]]
    notes: tuple[str, ...] = ()
    has_patch_tokens = False
    takes_several_photos = False

    @classmethod
    def survey(cls, base: PreTrainedModel) -> AttentionSurvey:
        """Return the attention layers of words and queries, without those of the vision tower.

        A layer key is (kind, layer), such as ("cross", 3).
        """
        plan: dict[nn.Module, list[LayerKey]] = {}
        layers: dict[Kind, tuple[int, ...]] = {}
        n_layers: dict[Kind, int] = {}
        n_heads: dict[Kind, int] = {}
        n_kv_heads: dict[Kind, int] = {}
        for kind, pattern in cls.module_patterns:
            modules, n_layers[kind] = _find_modules(base, pattern)
            for layer, module in modules.items():
                plan[module] = [(kind, layer)]
                # All layers of a kind have the same numbers of heads.
                n_heads[kind], n_kv_heads[kind] = _read_n_heads(module)
            layers[kind] = tuple(modules)
        return AttentionSurvey(
            path="seam",
            plan=plan,
            layers=layers,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            d_model=int(base.config.get_text_config(decoder=True).hidden_size),
            notes=() if has_standalone_part(base) else cls.notes,
            has_unplanned_modules=True,
            run_forward=_make_seam_forward(base),
        )

    @property
    def _vision_tower(self) -> Any:
        """Return the vision tower, which encodes the picture."""
        return getattr(self._base, "vision_model", None) or self._base.encoder

    def _find_views(self, photo_prompt: PhotoPrompt) -> ViewsAndCount:
        """Return one grid of patches. Among the keys, the patches come after tokens such as CLS.

        A tower that merges patches pads the picture to whole patches.
        """
        patch = read_patch_size(self._vision_tower, self._name)
        n_before = len(list_prefix_tokens(self._vision_tower))
        return make_grid_views(
            photo_prompt, patch, n_before, is_filled=merges_patches(self._vision_tower)
        )

    def _find_padding(self, inputs: Arguments, labels: Mapping[int, str]) -> NDArray[np.bool_]:
        """Return whether each key is padding, (key,). `labels` are key -> label of its patch."""
        return np.zeros(max(labels) + 1, bool)

    def _name_queries(self, inputs: Arguments, n_given: int) -> dict[Kind, Tokens]:
        """Return the queries of each kind of attention. Those of "decoder" are words, or object queries (DETR).

        `n_given` is the number of tokens of the prompt; the model wrote the tokens after them.
        """
        words = self._name_words(inputs, {}, n_given)
        return {"cross": words, "decoder": words}

    def _name_tokens(
        self, inputs: Arguments, photos: Sequence[Photo], labels: Mapping[int, str], n_given: int
    ) -> tuple[Tokens, dict[str, AttentionAxes]]:
        # A key is a patch, which has a label, another token of the tower ("CLS"), or padding.
        is_padding = self._find_padding(inputs, labels)
        names = dict.fromkeys(np.flatnonzero(~is_padding).tolist(), "CLS")
        names.update(labels)
        keys = make_key_tokens(len(is_padding), names, [photo.source for photo in photos])
        queries = self._name_queries(inputs, n_given)
        words = queries["decoder"]
        # Words before the picture cannot attend to it, so they are not shown.
        first_word = max(self._picture_positions(inputs), default=-1) + 1
        axes: dict[str, AttentionAxes] = {}
        for kind, layers in self.model.survey.layers.items():
            tokens = queries[kind]
            first_query = first_word if tokens is words else 0
            kind_keys = keys if kind == "cross" else tokens
            axes[kind] = AttentionAxes(tokens, kind_keys, layers, first_query)
        return words, axes


class MllamaReader(CrossAttentionReader):
    """Read models in which some layers of the language model attend to tiles of photos (Mllama).

    In the text one token stands for each photo.
    """

    module_patterns = (
        ("cross", r"language_model\.layers\.(\d+)\.cross_attn"),
        ("decoder", r"language_model\.layers\.(\d+)\.self_attn"),
    )
    takes_several_photos = True

    def _find_views(self, photo_prompt: PhotoPrompt) -> ViewsAndCount:
        """Return one view per photo, joined from its tiles.

        The keys of a tile are a CLS token, then its patches, row by row. The processor adds empty tiles to a photo that
        has fewer tiles than the model reads.
        """
        config = self._base.config.vision_config
        patches_per_side = config.image_size // config.patch_size
        # Number the keys, (photo, tile, key). Then drop the CLS tokens: (photo, tile, row, column).
        n_photos, n_tiles = photo_prompt.pixels.shape[1:3]
        n_keys_per_tile = self._vision_tower.num_patches
        keys = torch.arange(n_photos * n_tiles * n_keys_per_tile).view(
            n_photos, n_tiles, n_keys_per_tile
        )
        token_indices = keys[..., 1:].reshape(n_photos, n_tiles, patches_per_side, patches_per_side)
        # Pixels within whole patches: (photo, tile, 3, height, width)
        covered_pixels = photo_prompt.pixels[
            0, ..., : patches_per_side * config.patch_size, : patches_per_side * config.patch_size
        ]
        views = []
        for number, ratio_id in enumerate(photo_prompt.inputs["aspect_ratio_ids"][0].tolist()):
            tile_rows, tile_columns = config.supported_aspect_ratios[ratio_id - 1]
            pixels = join_tiles(covered_pixels[number], tile_rows, tile_columns)
            views.append(
                ImageView(number, pixels, join_tiles(token_indices[number], tile_rows, tile_columns))
            )
        return views, keys.numel()

    def _find_padding(self, inputs: Arguments, labels: Mapping[int, str]) -> NDArray[np.bool_]:
        # Whether the last token attends to each tile, (photo * tile,), repeated for all keys of a tile: (key,)
        sees_tile = inputs["cross_attention_mask"][0, -1].reshape(-1)
        return np.repeat(sees_tile.cpu().numpy() <= 0, self._vision_tower.num_patches)

    def _extend_inputs(self, inputs: Arguments, ids: Sequence[int]) -> dict[str, Tensor]:
        """Return arguments in which written tokens attend to the same tiles as the last token of the prompt."""
        extended_inputs = super()._extend_inputs(inputs, ids)
        # (batch, token, photo, tile)
        mask = inputs["cross_attention_mask"]
        n_more = len(ids) - mask.shape[1]
        mask_of_written = mask[:, -1:].expand(-1, n_more, -1, -1)
        extended_inputs["cross_attention_mask"] = torch.cat([mask, mask_of_written], 1)
        return extended_inputs


class QFormerReader(CrossAttentionReader):
    """Read models in which learned queries attend to the patches (BLIP-2).

    The language model reads the outputs of the queries as tokens of its text.
    """

    module_patterns = (
        ("cross", r"qformer\.encoder\.layer\.(\d+)\.crossattention\.attention"),
        ("encoder", r"qformer\.encoder\.layer\.(\d+)\.attention\.attention"),
        ("decoder", r"language_model\.(?:model\.)?(?:decoder\.)?layers\.(\d+)\.self_attn"),
    )
    notes = (
        "Learned queries (Q0, Q1 …) look at the picture: words attend to these, which have no place in it.",
        "The queries do not read the text: whatever is asked, they look at the same places.",
    )

    def _name_queries(self, inputs: Arguments, n_given: int) -> dict[Kind, Tokens]:
        # The model replaces the picture tokens of the text by the outputs of the queries.
        names = {
            position: f"Q{number}" for number, position in enumerate(self._picture_positions(inputs))
        }
        queries = make_query_tokens(len(names))
        words = self._name_words(inputs, names, n_given)
        return {"cross": queries, "encoder": queries, "decoder": words}


class CaptionReader(CrossAttentionReader):
    """Read models in which a decoder writes about a picture (TrOCR, Donut, GPT-2 after ViT).

    No token of the text stands for the picture.
    """

    module_patterns = (
        ("cross", r"(?:text_)?decoder\.(?:.*\.)?(\d+)\.(?:encoder_attn|crossattention(?:\.self)?)"),
        ("decoder", r"(?:text_)?decoder\.(?:.*\.)?(\d+)\.(?:self_attn|attn|attention\.self)"),
    )
    notes: tuple[str, ...] = (
        "Its encoder merges patches, and attends within windows: it is not shown, the decoder is.",
    )
    is_text_optional = True
    ids_name = "decoder_input_ids"

    def _find_start_id(self) -> int:
        """Return the id of the token that the decoder's text begins with."""
        return self._text_generator.find_start_id()

    def _process(self, images: Sequence[Any], prompt: str) -> dict[str, Any]:
        tokenizer = self.model.vocabulary
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise AttnscopeError(
                f"{self._name} came without its tokenizer",
                "save it beside the model: AutoTokenizer.from_pretrained(…).save_pretrained(…)",
            )
        pixels = self._image_processor(images=list(images), return_tensors="pt")["pixel_values"]
        # The ids are the start token of the decoder, then the text to continue, without an end token.
        text_ids = tokenizer.backend(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        start = self._find_start_id()
        if text_ids[:1] != [start]:
            text_ids = [start, *text_ids]
        ids = torch.tensor([text_ids])
        return {"pixel_values": pixels, self.ids_name: ids, "attention_mask": torch.ones_like(ids)}


class BlipReader(CaptionReader):
    """Read BLIP, whose decoder begins and ends a text with tokens of its own."""

    notes = ()
    ids_name = "input_ids"

    def _find_start_id(self) -> int:
        return int(self._base.config.text_config.bos_token_id)

    def _generate_ids(self, inputs: Arguments, max_new_tokens: int) -> list[int]:
        # BLIP's own `generate` drops the last token of its input, which is meant to be an end token: add an end token.
        end = self._base.config.text_config.sep_token_id
        ids = self._text_ids(inputs)
        inputs_with_end = self._extend_inputs(inputs, [*ids, end])
        written_ids = self._text_generator.generate_ids(
            inputs_with_end, max_new_tokens, len(ids), suppress_tokens=None, forced_eos_token_id=None
        )
        return written_ids[:-1] if written_ids[-1:] == [end] else written_ids


class ObjectReader(CrossAttentionReader):
    """Read models in which object queries attend to the feature map of a photo, and to each other (DETR)."""

    module_patterns = (
        ("cross", r"decoder\.layers\.(\d+)\.encoder_attn"),
        ("decoder", r"decoder\.layers\.(\d+)\.self_attn"),
    )
    notes = (
        "Object queries (Q0, Q1 …) look at what the encoder makes of the photo; the encoder itself is not shown.",
        "A patch is a place of the feature map: through convolutions and encoder it knows of what lies around it.",
    )
    is_text_optional = True
    reads_words = False

    def _process(self, images: Sequence[Any], prompt: str) -> dict[str, Any]:
        return dict(self._image_processor(images=list(images), return_tensors="pt"))

    def _find_views(self, photo_prompt: PhotoPrompt) -> ViewsAndCount:
        """Return the photo, padded to whole patches, as one grid. Its patches are the positions of the feature map."""
        # Run the backbone. Its last feature map is (1, d, row, column).
        pixels = photo_prompt.pixels.to(self.model.device, self._base.dtype)
        with torch.no_grad(), mute_transformers(), use_attention(self._base, None):
            features = self._base.backbone(pixels, torch.ones_like(pixels[:, 0]))
        feature_map, _ = features[-1]
        # Each stage halves height and width, rounded up. So 33 pixels that became 2 positions are patches of 32 pixels.
        ratios = np.array(pixels.shape[2:]) / feature_map.shape[2:]
        height, width = 2 ** np.ceil(np.log2(ratios)).astype(int)
        return make_grid_views(photo_prompt, (height, width), is_filled=True)

    def _name_queries(self, inputs: Arguments, n_given: int) -> dict[Kind, Tokens]:
        queries = make_query_tokens(self._base.config.num_queries, self._find_objects(inputs))
        return {"cross": queries, "decoder": queries}

    def _find_objects(self, inputs: Arguments) -> dict[int, str]:
        """Return query -> name of its object's class, for classes that are probable enough; {} without a head."""
        with torch.no_grad(), mute_transformers(), use_attention(self._base, None):
            logits = getattr(self.model.model(**inputs), "logits", None)
        if logits is None:
            return {}
        # The logits are (query, class). The last class means "no object", so it is left out.
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
"""`model_type` of a configuration -> reader for models of this type."""


def choose_cross_reader(base: PreTrainedModel) -> type[CrossAttentionReader] | None:
    """Return the reader for a model with cross-attention to pictures; None if its family is not known."""
    reader = CROSS_READERS.get(base.config.model_type)
    # BLIP for question answering has a text encoder between picture and decoder, which no reader supports.
    if reader is None or hasattr(base, "text_encoder"):
        return None
    has_all = all(_find_modules(base, pattern)[0] for _, pattern in reader.module_patterns)
    return reader if has_all else None


def has_standalone_part(base: PreTrainedModel) -> bool:
    """Return whether a part of a model with cross-attention to pictures can also be shown by itself."""
    # The vision tower before a decoder can be shown on pictures alone, unless it merges patches.
    if base.config.model_type == "vision-encoder-decoder":
        encoder: Any = base.encoder
        return not merges_patches(encoder)
    # Mllama's layers without cross-attention can be shown on text alone.
    return base.config.model_type == "mllama"


def _find_modules(base: PreTrainedModel, pattern: str) -> tuple[dict[int, nn.Module], int]:
    """Return layer -> the innermost module whose name matches, and the number of layers.

    The first group of the pattern is the number of the layer. Layers without a match count as layers too.
    """
    modules: dict[int, nn.Module] = {}
    n_layers = 0
    # named_modules() returns a module before its submodules, such as `crossattention` before `crossattention.self`. So
    # the innermost match overwrites the outer ones.
    for name, module in base.named_modules():
        match = re.fullmatch(pattern, name)
        if match:
            modules[int(match[1])] = module
            # The list of all layers: "decoder.layers", if the name is "decoder.layers.3.encoder_attn".
            stack: Any = base.get_submodule(name[: match.start(1) - 1])
            n_layers = len(stack)
    return modules, n_layers


def _read_n_heads(module: nn.Module) -> tuple[int, int]:
    """Return the numbers of query heads and key/value heads of an attention module."""
    heads_per_group = getattr(module, "num_key_value_groups", 1)
    for owner in (module, getattr(module, "config", None)):
        for name in ("decoder_attention_heads", "num_attention_heads", "num_heads", "n_heads"):
            n_heads = getattr(owner, name, None)
            if isinstance(n_heads, int):
                return n_heads, n_heads // heads_per_group
    raise AttnscopeError(f"{type(module).__name__} does not say how many heads it has")


# Attention that does not look up its function by name -------------------------------------------------------------


def _make_seam_forward(base: PreTrainedModel) -> Callable[..., Any] | None:
    """Return a function that runs a model with `_attend` as the forward of its own attention classes.

    Return None for a model without such classes: its attention passes the seam anyway.
    """
    names = ("BlipTextSelfAttention", "TrOCRAttention")
    modules = [module for module in base.modules() if type(module).__name__ in names]

    def run(**inputs: Any) -> Any:
        with replace_forwards(modules, _attend):
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
    """Compute BLIP's or TrOCR's attention by `attention_function`, in place of the module's own forward.

    `forward` is the module's own forward, which is not called. There is no key/value cache.
    """
    # Queries are projected from hidden_states, (batch, query, d); keys and values from key_states, (batch, key, d). In
    # self-attention both are the same. In cross-attention key_states are the encoder's: BLIP passes them as
    # encoder_hidden_states, TrOCR as key_value_states.
    key_states = hidden_states
    if encoder_hidden_states is not None:
        key_states = encoder_hidden_states
        attention_mask = encoder_attention_mask
    elif key_value_states is not None:
        key_states = key_value_states
    # Project, and split into heads: (batch, head, token, d_head)
    is_trocr = hasattr(module, "q_proj")
    names = ("q_proj", "k_proj", "v_proj") if is_trocr else ("query", "key", "value")
    n_heads, _ = _read_n_heads(module)
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
