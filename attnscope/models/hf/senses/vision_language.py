"""Turn photos and a text into inputs of a vision-language model, by its own processor.

`VisionLanguageReader` is for models whose text contains tokens that stand for patches of pictures, as LLaVA's does. Its
subclasses in cross_readers.py are for models whose words or learned queries attend to the patches by cross-attention.
The *seam* is our attention function, which transformers calls in place of its own.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad
from transformers.processing_utils import ProcessorMixin

from attnscope.core.attention.seam import AttentionCall, attend
from attnscope.errors import AttnscopeError, as_failure
from attnscope.models.hf.check import check_on_input
from attnscope.models.hf.parts import forward_accepts, mute_transformers, translate_errors
from attnscope.models.hf.senses.media_readers import MediaReader, undo_normalisation
from attnscope.models.hf.senses.patch_places import (
    FAMILIES,
    ImageView,
    PhotoPrompt,
    ViewsAndCount,
    find_covered_area,
    make_colour_ramps,
    make_placement_error,
)
from attnscope.models.hf.senses.text_generator import Arguments, TextGenerator
from attnscope.models.info import require_length
from attnscope.models.model import AttentionAxes, SensoryInput
from attnscope.questions.places import THUMBNAIL_SUFFIX, Picture
from attnscope.results.tokens import Tokens
from attnscope.senses.photos import Photo

if TYPE_CHECKING:
    from attnscope.models.hf.model import HuggingFaceModel


class VisionLanguageReader(MediaReader):
    """Prepare photos and a text for a model that reads both.

    Attributes:
        has_patch_tokens: Whether tokens of the text stand for patches. If not, words or learned queries attend to the
            patches by cross-attention.
        is_text_optional: Whether the model reads a picture without a text.
        reads_words: Whether the model reads a text at all.
        takes_several_photos: Whether a prompt may have more than one photo.
        ids_name: The name of the forward's argument for the token ids of the text.
    """

    has_patch_tokens = True
    is_text_optional = False
    reads_words = True
    takes_several_photos = True
    ids_name = "input_ids"

    def __init__(self, model: "HuggingFaceModel", processor: Any) -> None:
        super().__init__(model, processor)
        self._image_processor: Any = getattr(processor, "image_processor", processor)
        self._text_generator = TextGenerator(model)
        # The id of the token that stands for a picture or a patch; None = the model has no such token.
        self._picture_id: int | None = getattr(self._base.config, "image_token_id", None)
        # The input shapes on which `_compare_output` has passed
        self._compared_shapes: set[tuple[int, ...]] = set()

    def prepare_prompt(
        self, photos: Sequence[Photo], text: str, max_new_tokens: int = 0
    ) -> SensoryInput:
        """Return photos and a text as inputs of the model, followed by at most `max_new_tokens` that it writes.

        The model writes greedily. On the first photos, its output through the seam is compared with its own output.

        Raises:
            AttnscopeError: The prompt is too long, the patches cannot be assigned to tokens, or the two outputs differ.
        """
        self._require_processor("processor")
        if len(photos) > 1 and not self.takes_several_photos:
            raise AttnscopeError(f"{self._name} sees one photo at a time", "give one --image")

        # Process photos and text, and find the token or key of each patch.
        prompt = self._write_prompt(text, len(photos))
        photo_prompt = self._make_prompt([photo.image for photo in photos], prompt)
        ids = self._text_ids(photo_prompt.inputs)
        n_given = len(ids)
        require_length(self.model.info, n_given + max_new_tokens)
        pictures, labels = self._locate_patches(photo_prompt, photos, prompt)
        # Keep the arguments of the forward. Processors also return other tensors, such as sizes of photos.
        inputs = {}
        for name, value in photo_prompt.inputs.items():
            if isinstance(value, Tensor) and forward_accepts(self._base, name):
                dtype = self._base.dtype if value.is_floating_point() else None
                inputs[name] = value.to(self.model.device, dtype)

        # Let the model write, and append the written tokens to the prompt.
        notes: tuple[str, ...] = ()
        if max_new_tokens:
            written_ids = self._generate_ids(inputs, max_new_tokens)
            if len(written_ids) < max_new_tokens:
                notes = (
                    f"the model wrote {len(written_ids)} of {max_new_tokens} tokens: it ended the text",
                )
            inputs = self._extend_inputs(inputs, [*ids, *written_ids])
        tokens, axes = self._name_tokens(inputs, photos, labels, n_given)
        self._compare_output(inputs, axes)
        return SensoryInput(inputs, tokens, pictures=pictures, notes=notes, axes=axes)

    # Prompts ---------------------------------------------------------------------------------------------------------

    def _write_prompt(self, text: str, n_photos: int) -> str:
        """Return the prompt: photos before the text. Use the chat template of the model if it has one."""
        if not getattr(self._processor, "chat_template", None):
            # With cross-attention, either the text needs no token for a picture, or the processor adds that token.
            if not self.has_patch_tokens:
                return text
            image_token = str(getattr(self._processor, "image_token", "<image>"))
            return image_token * n_photos + text
        content = [{"type": "image"}] * n_photos
        content.append({"type": "text", "text": text})
        messages: Any = [{"role": "user", "content": content}]
        # Call the method of the base class: SmolVLM's own needs a video processor, which may be missing.
        template = ProcessorMixin.apply_chat_template
        with as_failure(f"the chat template of {self._name} fails"):
            return str(template(self._processor, messages, tokenize=False, add_generation_prompt=True))

    def _make_prompt(self, images: Sequence[Any], prompt: str) -> PhotoPrompt:
        """Return the processor's output for images and a prompt, with the images, the processor and the model."""
        with as_failure(f"the processor of {self._name} fails"), mute_transformers():
            inputs = self._process(images, prompt)
        return PhotoPrompt(self._base, self._processor, inputs, images)

    def _process(self, images: Sequence[Any], prompt: str) -> dict[str, Any]:
        """Return the processor's tensors for photos and a prompt, by name."""
        # If the chat template has written the start token, the tokenizer must not add a second one.
        start = getattr(self._processor.tokenizer, "bos_token", None)
        options = {}
        if start and prompt.startswith(start):
            options["add_special_tokens"] = False
        return dict(
            self._processor(text=[prompt], images=[list(images)], return_tensors="pt", **options)
        )

    def _text_ids(self, inputs: Mapping[str, Any]) -> list[int]:
        """Return the token ids of the text, which is an argument of the forward; [] for models that read no text."""
        if not self.reads_words:
            return []
        return list(inputs[self.ids_name][0].tolist())

    def _picture_positions(self, inputs: Mapping[str, Any]) -> list[int]:
        """Return the positions of the tokens of the text that stand for pictures."""
        ids = self._text_ids(inputs)
        return [position for position, token_id in enumerate(ids) if token_id == self._picture_id]

    def _generate_ids(self, inputs: Arguments, max_new_tokens: int) -> list[int]:
        """Return the ids of at most `max_new_tokens` that the model writes greedily, without the end token."""
        n_prompt = inputs[self.ids_name].shape[1]
        # The model must not write the token that stands for pictures.
        suppressed = None if self._picture_id is None else [self._picture_id]
        settings = {"suppress_tokens": suppressed, "forced_eos_token_id": None}
        return self._text_generator.generate_ids(inputs, max_new_tokens, n_prompt, **settings)

    def _extend_inputs(self, inputs: Arguments, ids: Sequence[int]) -> dict[str, Tensor]:
        """Return the forward's arguments for a prompt and the tokens written after it."""
        n_more = len(ids) - inputs[self.ids_name].shape[1]
        extended_inputs = dict(inputs)
        extended_inputs[self.ids_name] = torch.tensor([list(ids)], device=self.model.device)
        # A written token is no padding (attention_mask 1), and it is a word (token type 0).
        added_values = {"attention_mask": 1, "token_type_ids": 0, "mm_token_type_ids": 0}
        for name, value in added_values.items():
            if name in inputs:
                extended_inputs[name] = pad(inputs[name], (0, n_more), value=value)
        return extended_inputs

    # Pictures --------------------------------------------------------------------------------------------------------

    def _find_views(self, photo_prompt: PhotoPrompt) -> ViewsAndCount:
        """Return the pictures that the model reads, and the number of tokens or keys that stand for them in total."""
        kind = self._base.config.model_type
        if kind not in FAMILIES:
            raise make_placement_error(
                f"of models of type {kind} it is not known which token stands for which part of a picture"
            )
        return FAMILIES[kind](photo_prompt)

    def _locate_patches(
        self, photo_prompt: PhotoPrompt, photos: Sequence[Photo], prompt: str
    ) -> tuple[tuple[Picture, ...], dict[int, str]]:
        """Return the pictures, and position -> label of each patch: its row and column, such as "3,5".

        A position is the index of the patch's token in the prompt. With cross-attention it is the index of its key.
        """
        views, n_tokens = self._find_views(photo_prompt)
        positions = np.arange(n_tokens)
        if self.has_patch_tokens:
            positions = np.array(self._picture_positions(photo_prompt.inputs))
        # The prompt has `len(positions)` picture tokens, and `n_tokens` stand for all pictures together.
        if len(positions) != n_tokens:
            raise make_placement_error(
                f"{len(positions)} tokens of the prompt stand for pictures that have {n_tokens}"
            )
        # Process test photos of the same sizes, (height, width) each. Their colours show which area of the photo each
        # picture covers.
        ramp_photos = [Image.fromarray(make_colour_ramps(*size)) for size in photo_prompt.sizes]
        ramp_views, _ = self._find_views(self._make_prompt(ramp_photos, prompt))
        names = [photo.source for photo in photos]
        pictures = []
        labels: dict[int, str] = {}
        for number, (view, ramp_view) in enumerate(zip(views, ramp_views, strict=True)):
            # The position of each patch; -1 = no token stands for it: (row, column)
            patch_positions = view.token_indices.numpy()
            patch_positions = np.where(patch_positions >= 0, positions[patch_positions], -1).astype(
                np.int32
            )
            # Two photos may have the same file name. Call the second one "name (2)".
            source = names[view.photo]
            n_before = names[: view.photo].count(source)
            if n_before:
                source += f" ({n_before + 1})"
            if view.is_thumbnail:
                source += THUMBNAIL_SUFFIX
            area = find_covered_area(self._restore_colours(ramp_view), *photo_prompt.sizes[view.photo])
            size = photos[view.photo].image.size
            pictures.append(
                Picture(
                    self._restore_colours(view),
                    patch_positions.shape,
                    source,
                    size,
                    patch_positions,
                    area,
                )
            )
            prefix = f"{number}:" if len(views) > 1 else ""
            for (row, column), position in np.ndenumerate(patch_positions):
                if position >= 0:
                    labels[int(position)] = f"{prefix}{row},{column}"
        return tuple(pictures), labels

    def _restore_colours(self, view: ImageView) -> NDArray[np.uint8]:
        """Return the colours of a picture before the processor normalised them: (height, width, 3), uint8."""
        return np.ascontiguousarray(undo_normalisation(self._image_processor, view.pixels[None]))

    # Tokens ----------------------------------------------------------------------------------------------------------

    def _name_tokens(
        self, inputs: Arguments, photos: Sequence[Photo], labels: Mapping[int, str], n_given: int
    ) -> tuple[Tokens, dict[str, AttentionAxes]]:
        """Return the tokens of the text and, with cross-attention, the queries and keys of each kind of attention.

        Args:
            inputs: The forward's arguments.
            photos: The photos.
            labels: Position of a token or key that stands for a patch -> its label.
            n_given: The number of tokens of the prompt. The model wrote the tokens after them.
        """
        return self._name_words(inputs, labels, n_given), {}

    def _name_words(self, inputs: Arguments, labels: Mapping[int, str], n_given: int) -> Tokens:
        """Return the tokens of the text. Each picture token is named by its label, or "picture" if it has no label."""
        names = dict.fromkeys(self._picture_positions(inputs), "picture")
        names.update(labels)
        return self.model.vocabulary.encode_ids(self._text_ids(inputs), names, n_given)

    def _compare_output(self, inputs: dict[str, Tensor], axes: Mapping[str, AttentionAxes]) -> None:
        """Refuse a model whose output through the seam differs from its own, or whose attention has unexpected sizes.

        The model is compared on the first input. With cross-attention it is compared on the first input of each shape,
        because the check at load does not cover these layers.
        """
        survey = self.model.survey
        # () stands for every shape of a model without cross-attention.
        shape: tuple[int, ...] = ()
        if axes:
            shape = (*inputs["pixel_values"].shape, len(axes["cross"].keys))
        if shape in self._compared_shapes:
            return

        def check_sizes(call: AttentionCall) -> Tensor:
            """Compute the attention, after a check of its numbers of heads, queries and keys."""
            expected = axes.get(call.kind)
            if expected is not None:
                # The expected numbers of heads, queries and keys. Only for these are the patches of the keys known.
                sizes = (survey.n_heads[call.kind], len(expected.queries), len(expected.keys))
                if sizes != (call.n_heads, call.query.shape[2], call.key.shape[2]):
                    raise AttnscopeError(
                        f"{call.kind} layer {call.layer} has other attention than the {sizes[0]} heads of {sizes[1]} "
                        f"queries on {sizes[2]} keys that are known",
                        "it is not known which of them stand for which part of the picture",
                    )
            return attend(call)

        with (
            translate_errors(self._name, "does not run on this picture and these words"),
            mute_transformers(),
        ):
            check_on_input(self._base, survey, inputs, check_sizes)
        self._compared_shapes.add(shape)
