"""Turn photos and a text into inputs of a vision-language model, by its own processor.

`VisionLanguageReader` is for models that read pictures as tokens among those of the text, as LLaVA does. Its subclasses
in cross_readers.py are for models whose words or learned queries attend to the patches by cross-attention.
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
from attnscope.models.hf.check import compare_on
from attnscope.models.hf.parts import accepts, in_one_line, silence
from attnscope.models.hf.senses.media_readers import MediaReader, undo_normalisation
from attnscope.models.hf.senses.patch_places import (
    FAMILIES,
    Cut,
    ImageView,
    PhotoPrompt,
    area_of,
    slopes,
    unplaced,
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
    """The part of a model that reads pictures and words.

    Attributes:
        among_words: Whether tokens of the text stand for patches; else words or queries attend to the patches by
            cross-attention.
        describes: Whether it can be given a picture without words.
        reads_words: Whether it takes words.
        takes_several_photos: Whether a prompt may have more than one photo.
        ids_name: The forward's argument for the ids of the words.
    """

    among_words = True
    describes = False
    reads_words = True
    takes_several_photos = True
    ids_name = "input_ids"

    def __init__(self, model: "HuggingFaceModel", processor: Any) -> None:
        super().__init__(model, processor)
        self._image_processor: Any = getattr(processor, "image_processor", processor)
        self._writer = TextGenerator(model)
        # The id of the token that stands for pictures, if there is one.
        self._picture_id: int | None = getattr(self._base.config, "image_token_id", None)
        # Shapes of inputs on which the seam was compared with the model's own output
        self._compared_shapes: set[tuple[int, ...]] = set()

    def view(self, photos: Sequence[Photo], text: str, n: int = 0) -> SensoryInput:
        """Return photos and a text as the model takes them, and at most n tokens that it writes, greedily.

        On the first photos, the output through the seam is compared with that of the unchanged model.

        Raises:
            AttnscopeError: The prompt is too long, it is not known which token stands for which part of a picture, or
                the two outputs differ.
        """
        self._require_processor("processor")
        if len(photos) > 1 and not self.takes_several_photos:
            raise AttnscopeError(f"{self._name} sees one photo at a time", "give one --image")

        # Process photos and text, and find the tokens or keys of patches.
        prompt = self._write_prompt(text, len(photos))
        output = self._make_prompt([photo.image for photo in photos], prompt)
        ids = self._ids_of(output.inputs)
        n_given = len(ids)
        require_length(self.model.info, n_given + n)
        pictures, labels = self._place_pictures(output, photos, prompt)
        # Keep what the forward takes; processors return more.
        inputs = {}
        for name, value in output.inputs.items():
            if isinstance(value, Tensor) and accepts(self._base, name):
                dtype = self._base.dtype if value.is_floating_point() else None
                inputs[name] = value.to(self.model.device, dtype)

        # Let the model write, and read what it wrote after the prompt.
        notes: tuple[str, ...] = ()
        if n:
            written = self._write(inputs, n)
            if len(written) < n:
                notes = (f"the model wrote {len(written)} of {n} tokens: it ended the text",)
            inputs = self._extend(inputs, [*ids, *written])
        tokens, axes = self._name_tokens(inputs, photos, labels, n_given)
        self._compare(inputs, axes)
        return SensoryInput(inputs, tokens, pictures=pictures, notes=notes, axes=axes)

    # Prompts ---------------------------------------------------------------------------------------------------------

    def _write_prompt(self, text: str, n_photos: int) -> str:
        """Return the prompt: photos before the text, by the model's chat template if it has one."""
        if not getattr(self._processor, "chat_template", None):
            # With cross-attention, the text needs no token for a picture, or the processor adds it.
            if not self.among_words:
                return text
            image_token = str(getattr(self._processor, "image_token", "<image>"))
            return image_token * n_photos + text
        content = [{"type": "image"}] * n_photos
        content.append({"type": "text", "text": text})
        messages: Any = [{"role": "user", "content": content}]
        # SmolVLM overrides this method and needs a video processor there, which may be missing.
        template = ProcessorMixin.apply_chat_template
        with as_failure(f"the chat template of {self._name} fails"):
            prompt = template(self._processor, messages, tokenize=False, add_generation_prompt=True)
        return str(prompt)

    def _make_prompt(self, images: Sequence[Any], prompt: str) -> PhotoPrompt:
        """Return what the processor makes of images and a prompt, with the images, the processor and the model."""
        with as_failure(f"the processor of {self._name} fails"), silence():
            inputs = self._process(images, prompt)
        return PhotoPrompt(self._base, self._processor, inputs, images)

    def _process(self, images: Sequence[Any], prompt: str) -> dict[str, Any]:
        """Return the processor's tensors for photos and a prompt, by argument of the forward."""
        # If the chat template has written the token that begins a text, the tokenizer must not add another.
        start = getattr(self._processor.tokenizer, "bos_token", None)
        options = {}
        if start and prompt.startswith(start):
            options["add_special_tokens"] = False
        inputs = self._processor(text=[prompt], images=[list(images)], return_tensors="pt", **options)
        return dict(inputs)

    def _ids_of(self, inputs: Mapping[str, Any]) -> list[int]:
        """Return the token ids of the text among a forward's arguments; [] for models that take none."""
        if not self.reads_words:
            return []
        return list(inputs[self.ids_name][0].tolist())

    def _picture_positions(self, inputs: Mapping[str, Any]) -> list[int]:
        """Return the positions of the tokens of the text that stand for pictures."""
        ids = self._ids_of(inputs)
        return [position for position, token_id in enumerate(ids) if token_id == self._picture_id]

    def _write(self, inputs: Arguments, n: int) -> list[int]:
        """Return the ids of at most n tokens that the model writes, greedily, without one that ends a text."""
        n_prompt = inputs[self.ids_name].shape[1]
        # The model may not write the token that stands for pictures.
        suppressed = None if self._picture_id is None else [self._picture_id]
        settings = {"suppress_tokens": suppressed, "forced_eos_token_id": None}
        return self._writer.answer(inputs, n, n_prompt, **settings)

    def _extend(self, inputs: Arguments, ids: Sequence[int]) -> dict[str, Tensor]:
        """Return the forward's arguments for a prompt and the tokens written after it."""
        n_more = len(ids) - inputs[self.ids_name].shape[1]
        longer = dict(inputs)
        longer[self.ids_name] = torch.tensor([list(ids)], device=self.model.device)
        # Written tokens are no padding (1), and of the type of words (0).
        added_values = {"attention_mask": 1, "token_type_ids": 0, "mm_token_type_ids": 0}
        for name, value in added_values.items():
            if name in inputs:
                longer[name] = pad(inputs[name], (0, n_more), value=value)
        return longer

    # Pictures --------------------------------------------------------------------------------------------------------

    def _cut(self, output: PhotoPrompt) -> Cut:
        """Return the pictures that the model is given, and how many tokens or keys stand for them in all."""
        kind = self._base.config.model_type
        if kind not in FAMILIES:
            raise unplaced(
                f"of models of type {kind} it is not known which token stands for which part of a picture"
            )
        return FAMILIES[kind](output)

    def _place_pictures(
        self, output: PhotoPrompt, photos: Sequence[Photo], prompt: str
    ) -> tuple[tuple[Picture, ...], dict[int, str]]:
        """Return the pictures, and position -> label, such as "3,5", of each token or key that stands for a patch.

        A position is that of a token in the prompt or, with cross-attention, of a key.
        """
        panes, n_tokens = self._cut(output)
        positions = np.arange(n_tokens)
        if self.among_words:
            positions = np.array(self._picture_positions(output.inputs))
        if len(positions) != n_tokens:
            raise unplaced(
                f"{len(positions)} tokens of the prompt stand for pictures that have {n_tokens}"
            )
        # Process photos of the same sizes whose colours tell where each pixel was: they show what each picture covers.
        slope_photos = [Image.fromarray(slopes(*size)) for size in output.sizes]
        slope_panes, _ = self._cut(self._make_prompt(slope_photos, prompt))
        names = [photo.source for photo in photos]
        pictures = []
        labels: dict[int, str] = {}
        for number, (pane, slope_pane) in enumerate(zip(panes, slope_panes, strict=True)):
            # The position that stands for each patch, -1 = none: (row, column)
            cells = pane.cells.numpy()
            cells = np.where(cells >= 0, positions[cells], -1).astype(np.int32)
            # The second photo of a name is called "name (2)".
            source = names[pane.photo]
            n_before = names[: pane.photo].count(source)
            if n_before:
                source += f" ({n_before + 1})"
            if pane.is_small:
                source += THUMBNAIL_SUFFIX
            area = area_of(self._colours(slope_pane), *output.sizes[pane.photo])
            size = photos[pane.photo].image.size
            pictures.append(Picture(self._colours(pane), cells.shape, source, size, cells, area))
            prefix = f"{number}:" if len(panes) > 1 else ""
            for (row, column), position in np.ndenumerate(cells):
                if position >= 0:
                    labels[int(position)] = f"{prefix}{row},{column}"
        return tuple(pictures), labels

    def _colours(self, pane: ImageView) -> NDArray[np.uint8]:
        """Return the colours of a picture before its normalisation: (height, width, 3)."""
        return np.ascontiguousarray(undo_normalisation(self._image_processor, pane.pixels[None]))

    # Tokens ----------------------------------------------------------------------------------------------------------

    def _name_tokens(
        self, inputs: Arguments, photos: Sequence[Photo], labels: Mapping[int, str], n_given: int
    ) -> tuple[Tokens, dict[str, AttentionAxes]]:
        """Return the words; with cross-attention also kind of attention -> its queries and keys.

        Args:
            inputs: The forward's arguments.
            photos: The photos.
            labels: Position of a token or key that stands for a patch -> its label.
            n_given: How many tokens of the text were given; the model wrote those after them.
        """
        return self._words(inputs, labels, n_given), {}

    def _words(self, inputs: Arguments, labels: Mapping[int, str], n_given: int) -> Tokens:
        """Return the tokens of the text. Those that stand for pictures are named by their label, else "picture"."""
        names = dict.fromkeys(self._picture_positions(inputs), "picture")
        names.update(labels)
        return self.model.vocabulary.encode_ids(self._ids_of(inputs), names, n_given)

    def _compare(self, inputs: dict[str, Tensor], axes: Mapping[str, AttentionAxes]) -> None:
        """Refuse a model whose output through the seam differs from its own, or whose attention has unexpected sizes.

        The model is compared on the first input. With cross-attention, whose layers no check at load has seen, it is
        compared on the first input of each shape.
        """
        survey = self.model.survey
        shape: tuple[int, ...] = ()
        if axes:
            shape = (*inputs["pixel_values"].shape, len(axes["cross"].keys))
        if shape in self._compared_shapes:
            return

        def observe(call: AttentionCall) -> Tensor:
            expected = axes.get(call.kind)
            if expected is not None:
                sizes = (survey.n_heads[call.kind], len(expected.queries), len(expected.keys))
                if sizes != (call.n_heads, call.query.shape[2], call.key.shape[2]):
                    raise AttnscopeError(
                        f"{call.kind} layer {call.layer} has other attention than the {sizes[0]} heads of {sizes[1]} "
                        f"queries on {sizes[2]} keys that are known",
                        "it is not known which of them stand for which part of the picture",
                    )
            return attend(call)

        with in_one_line(self._name, "does not run on this picture and these words"), silence():
            compare_on(self._base, survey, inputs, observe)
        self._compared_shapes.add(shape)
