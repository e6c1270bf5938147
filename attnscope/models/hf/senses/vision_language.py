"""Turn photos and a text into inputs of vision-language models, by the model's own processor.

`VisionLanguageReader` does what all families share. Here are those that read pictures among their words, as LLaVA does;
those whose words or queries attend to patches by cross-attention are in cross_readers.py.
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

from attnscope.errors import AttnscopeError
from attnscope.models.hf.check import compare_on
from attnscope.models.hf.parts import accepts, as_failure, in_one_line, silence
from attnscope.models.hf.senses.patch_places import FAMILIES, Cut, Pane, PhotoPrompt, area_of, slopes, unplaced
from attnscope.models.hf.senses.seeing import undo_normalisation
from attnscope.models.hf.senses.writing import HuggingFaceWriter
from attnscope.models.info import require_length
from attnscope.models.model import AttentionAxes, SensoryInput
from attnscope.questions.places import SMALL, Picture
from attnscope.results.tokens import Tokens
from attnscope.senses.photos import Photo

if TYPE_CHECKING:
    from attnscope.models.hf.model import HuggingFaceModel

Named = tuple[Tokens, dict[str, AttentionAxes]]
"""The words; and, where pictures are not among them, the queries and keys of each kind of attention."""


class VisionLanguageReader:
    """The part of a model that reads pictures and words, a Viewer. It may have come without a processor.

    Attributes:
        describes: Whether it writes of a picture without being given words.
        reads_words: Whether it takes any.
        takes_several_photos: Whether a prompt may have more than one.
        needs_words_processor: Whether a processor of pictures alone is not enough.
        ids_name: What the forward calls the words.
    """

    describes = False
    reads_words = True
    takes_several_photos = True
    needs_words_processor = True
    ids_name = "input_ids"

    def __init__(self, model: "HuggingFaceModel", processor: Any) -> None:
        self.model = model
        self._base = model.base
        self._name = model.info.name
        self._processor = processor
        self._images: Any = getattr(processor, "image_processor", None if self.needs_words_processor else processor)
        self._writer = HuggingFaceWriter(model)
        self._compared: set[tuple[int, ...]] = set()

    def view(self, photos: Sequence[Photo], text: str, n: int = 0) -> SensoryInput:
        """Return photos and a text as the model takes them, and at most n tokens that it writes, greedily.

        What the seam gives is compared with what the model computes as it is, the first time at least.
        """
        if self._images is None:
            message = f"{self._name} came without its processor"
            raise AttnscopeError(message, "hand it over: attnscope.load(model, processor)")
        if len(photos) > 1 and not self.takes_several_photos:
            raise AttnscopeError(f"{self._name} sees one photo at a time", "give one --image")

        # What the processor makes of photos and text, and where in it the patches are.
        prompt, notes = self._write_prompt(text, len(photos))
        output = self._make([photo.image for photo in photos], prompt)
        ids = output.inputs[self.ids_name][0].tolist() if self.reads_words else []
        n_given = len(ids)
        require_length(self.model.info, n_given + n)
        pictures, labels = self._place_pictures(output, photos, prompt)
        inputs = {}
        for name, value in output.inputs.items():
            if isinstance(value, Tensor) and accepts(self._base, name):
                dtype = self._base.dtype if value.is_floating_point() else None
                inputs[name] = value.to(self.model.device, dtype)

        # What the model writes after it.
        if n:
            written = self._write(inputs, n)
            if len(written) < n:
                notes.append(f"the model wrote {len(written)} of {n} tokens: it ended the text")
            inputs = self._extend(inputs, [*ids, *written])
        tokens, axes = self._name_tokens(inputs, photos, labels, n_given)
        self._compare(inputs, axes)
        return SensoryInput(inputs, tokens, pictures=pictures, notes=tuple(notes), axes=axes)

    # What families differ in -----------------------------------------------------------------------------------------

    def _cut(self, output: PhotoPrompt) -> Cut:
        """Return the pictures that the model is given, and how many tokens or keys stand for them."""
        raise NotImplementedError

    def _positions(self, output: PhotoPrompt, n_tokens: int) -> NDArray[np.int64]:
        """Return where each picture token stands in the prompt, or each key, (token,)."""
        return np.arange(n_tokens)

    def _name_tokens(
        self, inputs: Mapping[str, Tensor], photos: Sequence[Photo], labels: Mapping[int, str], n_given: int
    ) -> Named:
        """Return the words and axes; `labels` has those of the tokens or keys that stand for patches, by position."""
        raise NotImplementedError

    def _compare(self, inputs: dict[str, Tensor], axes: Mapping[str, AttentionAxes]) -> None:
        """Refuse a model whose output through the seam differs from its own."""
        raise NotImplementedError

    # Prompts ---------------------------------------------------------------------------------------------------------

    def _write_prompt(self, text: str, n_photos: int) -> tuple[str, list[str]]:
        """Return the prompt, photos before the text, by the model's chat template; and notes."""
        if not getattr(self._processor, "chat_template", None):
            mark = str(getattr(self._processor, "image_token", "<image>"))
            return mark * n_photos + text, ["the processor has no chat template: the model reads pictures, then text"]
        content: list[dict[str, str]] = [{"type": "image"}] * n_photos
        messages: list[Any] = [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]
        template = ProcessorMixin.apply_chat_template  # SmolVLM's own needs what is for videos
        with as_failure(f"the chat template of {self._name} fails"):
            prompt = template(self._processor, messages, tokenize=False, add_generation_prompt=True)
        return str(prompt), []

    def _make(self, images: Sequence[Any], prompt: str) -> PhotoPrompt:
        with as_failure(f"the processor of {self._name} fails"), silence():
            inputs = self._process(images, prompt)
        return PhotoPrompt(self._base, self._processor, inputs, images)

    def _process(self, images: Sequence[Any], prompt: str) -> dict[str, Any]:
        """Return the processor's tensors for photos and a prompt, by argument of the forward."""
        # Templates write the token that begins a text themselves.
        start = getattr(self._processor.tokenizer, "bos_token", None)
        options = {"add_special_tokens": False} if start and prompt.startswith(start) else {}
        processor = self._processor
        inputs: dict[str, Any] = processor(text=[prompt], images=[list(images)], return_tensors="pt", **options)
        return inputs

    @property
    def _picture_id(self) -> int | None:
        """Return the number of the token that stands for pictures; None where there is none."""
        config = self._base.config
        number: int | None = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
        return number

    def _write(self, inputs: Mapping[str, Tensor], n: int) -> list[int]:
        """Return the numbers of what the model writes, greedily, without a token that ends a text."""
        return self._writer.answer(inputs, n, inputs[self.ids_name].shape[1], self._picture_id)

    def _extend(self, inputs: Mapping[str, Tensor], ids: Sequence[int]) -> dict[str, Tensor]:
        """Return the forward's arguments for a prompt and the tokens written after it."""
        more = len(ids) - inputs[self.ids_name].shape[1]
        longer = {**inputs, self.ids_name: torch.tensor([list(ids)], device=self.model.device)}
        for name, value in (("attention_mask", 1), ("token_type_ids", 0), ("mm_token_type_ids", 0)):
            if name in inputs:
                longer[name] = pad(inputs[name], (0, more), value=value)
        return longer

    # Pictures --------------------------------------------------------------------------------------------------------

    def _place_pictures(
        self, output: PhotoPrompt, photos: Sequence[Photo], prompt: str
    ) -> tuple[tuple[Picture, ...], dict[int, str]]:
        """Return the pictures, with the position that stands for each patch, and the labels of these positions."""
        # A photo of slopes goes the same way, and tells which part of the photo each picture covers.
        panes, n_tokens = self._cut(output)
        positions = self._positions(output, n_tokens)
        guides, _ = self._cut(self._make([Image.fromarray(slopes(*size)) for size in output.sizes], prompt))
        names = [photo.source for photo in photos]
        pictures = []
        labels: dict[int, str] = {}
        for number, (pane, guide) in enumerate(zip(panes, guides, strict=True)):
            # Which token of the prompt, or which key, stands for each patch: (row, column)
            cells = pane.cells.numpy()
            cells = np.where(cells >= 0, positions[cells], -1).astype(np.int32)
            # A photo that comes twice is told apart by its number.
            name = names[pane.photo]
            again = names[: pane.photo].count(name) + 1
            source = name + f" ({again})" * (again > 1) + SMALL * pane.is_small
            area = area_of(self._colours(guide), *output.sizes[pane.photo])
            rows, columns = cells.shape
            size = photos[pane.photo].image.size
            pictures.append(Picture(self._colours(pane), (rows, columns), source, size, cells, area))
            before = f"{number}:" if len(panes) > 1 else ""
            for (row, column), cell in np.ndenumerate(cells):
                if cell >= 0:
                    labels[int(cell)] = f"{before}{row},{column}"
        return tuple(pictures), labels

    def _colours(self, pane: Pane) -> NDArray[np.uint8]:
        return np.ascontiguousarray(undo_normalisation(self._images, pane.pixels[None]))


class InterleavedReader(VisionLanguageReader):
    """Reads pictures as tokens among those of its text, as LLaVA does."""

    def _cut(self, output: PhotoPrompt) -> Cut:
        kind = self._base.config.model_type
        if kind not in FAMILIES:
            raise unplaced(f"of models of type {kind} it is not known which token stands for which part of a picture")
        return FAMILIES[kind](output)

    def _positions(self, output: PhotoPrompt, n_tokens: int) -> NDArray[np.int64]:
        positions = self._find_tokens(output.inputs)
        if len(positions) != n_tokens:
            raise unplaced(f"{len(positions)} tokens of the prompt stand for pictures that have {n_tokens}")
        return positions

    def _find_tokens(self, inputs: Mapping[str, Tensor]) -> NDArray[np.int64]:
        return np.flatnonzero(inputs[self.ids_name][0].cpu().numpy() == self._picture_id)

    def _name_tokens(
        self, inputs: Mapping[str, Tensor], photos: Sequence[Photo], labels: Mapping[int, str], n_given: int
    ) -> Named:
        marks = dict.fromkeys(self._find_tokens(inputs).tolist(), "picture")
        ids = inputs[self.ids_name][0].tolist()
        return self.model.vocabulary.encode_among(ids, {**marks, **labels}, n_given), {}

    def _compare(self, inputs: dict[str, Tensor], axes: Mapping[str, AttentionAxes]) -> None:
        """Compare the seam with the model's own output once, whatever the photo's size."""
        if not self._compared:
            with in_one_line(self._name, "does not run on pictures and words"):
                compare_on(self._base, self.model.survey, inputs)
            self._compared.add(())
