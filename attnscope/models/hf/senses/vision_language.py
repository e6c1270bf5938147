"""What Hugging Face models read of pictures beside words: photos and a text through the model's own processor."""

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
from attnscope.models.hf.examples import Example, accepts, is_paligemma
from attnscope.models.hf.parts import as_failure, in_one_line, silence
from attnscope.models.hf.senses.patch_places import FAMILIES, Pane, PhotoPrompt, Unplaced, area_of, panes_of, slopes
from attnscope.models.hf.senses.seeing import undo_normalisation
from attnscope.models.hf.senses.writing import HuggingFaceWriter
from attnscope.models.hf.tokenizer import limit_template
from attnscope.models.info import require_length
from attnscope.models.model import AttentionAxes, SensoryInput
from attnscope.questions.places import SMALL, Picture
from attnscope.results.tokens import Tokens
from attnscope.senses.photos import Photo

if TYPE_CHECKING:
    from attnscope.models.hf.model import HuggingFaceModel

Labels = Mapping[int, str]
"""What to show for the tokens or keys that stand for patches, by their places."""


class VisionLanguageReader:
    """What of a model reads pictures and words; see models.model.Viewer.

    Families differ in the methods from `_cut` on. The processor may be None: the model came without one.
    """

    describes = False
    takes_several_photos = True
    takes_image_processor = False  # whether that is enough of a processor
    ids_name = "input_ids"  # what the forward calls the words

    def __init__(self, model: "HuggingFaceModel", processor: Any) -> None:
        self.model = model
        self._base = model.base
        self._name = model.info.name
        self._processor = processor
        self._writer = HuggingFaceWriter(model)
        self._compared: set[tuple[int, ...]] = set()

    def view(self, photos: Sequence[Photo], text: str, n: int = 0) -> SensoryInput:
        """Photos and a text as the model takes them, and at most n tokens that it writes, greedily.

        What the seam gives is compared with what the model computes as it is, the first time at least.
        """
        joint = getattr(self._processor, "image_processor", None)
        if (self._processor if self.takes_image_processor else joint) is None:
            message = f"{self._name} came without its processor"
            raise AttnscopeError(message, "hand it over: attnscope.load(model, processor)")
        if len(photos) > 1 and not self.takes_several_photos:
            raise AttnscopeError(f"{self._name} sees one photo at a time", "give one --image")
        self._require_no_mark(text)
        prompt, notes = self._write_prompt(text, len(photos))
        output = self._make([photo.image for photo in photos], prompt)
        ids = output.inputs[self.ids_name][0].tolist()
        n_given = len(ids)
        require_length(self.model.info, n_given + n)
        pictures, labels = self._place_pictures(output, photos, prompt)
        inputs = {
            name: value.to(self.model.device, self._base.dtype if value.is_floating_point() else None)
            for name, value in output.inputs.items()
            if isinstance(value, Tensor) and accepts(self._base, name)
        }
        if n:
            written = self._write(inputs, ids, n)
            if len(written) < n:
                notes.append(f"the model wrote {len(written)} of {n} tokens: it ended the text")
            ids += written
            inputs = self._extend(inputs, ids)
        tokens, axes = self._name_tokens(output, photos, labels, inputs, n_given)
        self._compare(inputs, axes)
        notes = [*(note for photo in photos for note in photo.notes), *notes]
        return SensoryInput(inputs, tokens, pictures=pictures, notes=tuple(notes), axes=axes)

    def _cut(self, output: PhotoPrompt) -> list[Pane]:
        """Return the pictures that the model is given, each with the tokens or keys that stand for its patches."""
        raise NotImplementedError

    def _write_prompt(self, text: str, n: int) -> tuple[str, list[str]]:
        """Photos, then the text, as the model's template of chats puts them; what else is worth a note."""
        if not getattr(self._processor, "chat_template", None):
            mark = str(getattr(self._processor, "image_token", "<image>"))
            plain = "the processor has no chat template: the model reads the pictures, then the text"
            return mark * n + text, [] if is_paligemma(self._base) else [plain]
        content: list[dict[str, str]] = [*({"type": "image"} for _ in range(n)), {"type": "text", "text": text}]
        messages: list[Any] = [{"role": "user", "content": content}]
        template = ProcessorMixin.apply_chat_template  # SmolVLM's own needs what is for videos
        with as_failure(f"the chat template of {self._name}"), limit_template():
            prompt = template(self._processor, messages, tokenize=False, add_generation_prompt=True)
        return str(prompt), []

    def _process(self, images: Sequence[Any], prompt: str) -> dict[str, Any]:
        """Return what the processor makes of photos and a prompt."""
        return self._run_processor(prompt, [list(images)])

    def _n_places(self, inputs: Mapping[str, Any]) -> int:
        """Return how many picture tokens the prompt has, or keys that cross-attention goes to."""
        return int((inputs["input_ids"] == self._picture_id).sum())

    def _places(self, output: PhotoPrompt) -> NDArray[np.int64]:
        """Where each picture token stands in the prompt, or each key, (token,)."""
        raise NotImplementedError

    def _write(self, inputs: Mapping[str, Tensor], prompt: list[int], n: int) -> list[int]:
        """Return the numbers of what the model writes, greedily, without a token that ends a text."""
        return self._writer.answer(inputs, n, [self._picture_id])

    def _extend(self, inputs: Mapping[str, Tensor], ids: Sequence[int]) -> dict[str, Tensor]:
        """Return what the forward gets of a prompt, and of what was written after it."""
        more = len(ids) - inputs[self.ids_name].shape[1]
        longer = {**inputs, self.ids_name: torch.tensor([list(ids)], device=self.model.device)}
        # All of PaliGemma's prompt sees all of it; what is written after it sees what comes before, and is told so.
        suffix = int(is_paligemma(self._base))
        for name, value in (("attention_mask", 1), ("token_type_ids", suffix), ("mm_token_type_ids", 0)):
            if name in inputs:
                longer[name] = pad(inputs[name], (0, more), value=value)
        return longer

    def _name_tokens(
        self, output: PhotoPrompt, photos: Sequence[Photo], labels: Labels, inputs: Mapping[str, Tensor], n_given: int
    ) -> tuple[Tokens, dict[str, AttentionAxes]]:
        """Return the words; and, where pictures are not among them, the queries and keys of each kind of attention."""
        raise NotImplementedError

    def _compare(self, inputs: dict[str, Tensor], axes: Mapping[str, AttentionAxes]) -> None:
        """Refuse a model whose attention at the seam is not what it computes as it is."""
        raise NotImplementedError

    @property
    def _picture_id(self) -> int:
        """Return the number of the token that stands for pictures."""
        config = self._base.config
        number = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
        if not isinstance(number, int):
            raise AttnscopeError(f"{self._name} does not say which of its tokens stand for pictures")
        return number

    def _run_processor(self, prompt: str, images: Sequence[Any]) -> dict[str, Any]:
        """Return what the whole processor makes of photos and a prompt."""
        # Templates write the token that begins a text themselves.
        start = getattr(self._processor.tokenizer, "bos_token", None)
        options = {"add_special_tokens": False} if start and prompt.startswith(start) else {}
        with as_failure(f"the processor of {self._name}"), silence():
            inputs: dict[str, Any] = self._processor(text=[prompt], images=images, return_tensors="pt", **options)
        return inputs

    def _make(self, images: Sequence[Any], prompt: str) -> PhotoPrompt:
        inputs = self._process(images, prompt)
        return PhotoPrompt(self._base, self._processor, inputs, images, self._n_places(inputs))

    def _require_no_mark(self, text: str) -> None:
        """Refuse a text that holds what stands for a picture in a prompt: it would stand for one that is not there."""
        marks = {str(getattr(self._processor, which, None) or "") for which in ("image_token", "boi_token")} - {""}
        mark = next((each for each in sorted(marks) if each in text), None)
        if mark is not None:
            raise AttnscopeError(
                f"the text holds {mark!r}, which stands for a picture in what {self._name} reads", "leave it out"
            )

    def _place_pictures(
        self, output: PhotoPrompt, photos: Sequence[Photo], prompt: str
    ) -> tuple[tuple[Picture, ...], dict[int, str]]:
        """Return the pictures with the places of what stands for their patches; and what to show for each of these."""
        at = self._places(output)
        try:
            panes = panes_of(output, self._cut)
            of_slopes = self._make([Image.fromarray(slopes(*size)) for size in output.sizes], prompt)
            guides = panes_of(of_slopes, self._cut)
        except Unplaced as error:
            message = f"{self._name} cannot be shown on pictures: {error}"
            raise AttnscopeError(message, "its text alone can be: leave out --image") from error
        processor = getattr(output.processor, "image_processor", output.processor)

        def colours(pane: Pane) -> NDArray[np.uint8]:
            return np.ascontiguousarray(undo_normalisation(processor, pane.pixels[None]))

        names = [photo.source for photo in photos]
        pictures = []
        labels = dict[int, str]()
        for number, (pane, guide) in enumerate(zip(panes, guides, strict=True)):
            photo = photos[pane.photo]
            cells = np.where(pane.places >= 0, at[pane.places], -1).astype(np.int32)
            again = names[: pane.photo].count(photo.source) + 1
            source = photo.source + f" ({again})" * (again > 1) + SMALL * pane.is_small
            area = area_of(colours(guide), *output.sizes[pane.photo])
            grid = (cells.shape[0], cells.shape[1])
            pictures.append(Picture(colours(pane), grid, source, photo.image.size, cells, area))
            before = f"{number}:" if len(panes) > 1 else ""
            for (row, column), place in np.ndenumerate(cells):
                if place >= 0:
                    labels[int(place)] = f"{before}{row},{column}"
        return tuple(pictures), labels


class InterleavedReader(VisionLanguageReader):
    """Reads pictures as tokens among those of its text, as LLaVA does."""

    def _cut(self, output: PhotoPrompt) -> list[Pane]:
        kind = self._base.config.model_type
        if kind not in FAMILIES:
            raise Unplaced(f"of models of type {kind} it is not known which token stands for which part of a picture")
        return FAMILIES[kind](output)

    def _places(self, output: PhotoPrompt) -> NDArray[np.int64]:
        return np.flatnonzero(output.inputs["input_ids"][0].cpu().numpy() == self._picture_id)

    def _name_tokens(
        self, output: PhotoPrompt, photos: Sequence[Photo], labels: Labels, inputs: Mapping[str, Tensor], n_given: int
    ) -> tuple[Tokens, dict[str, AttentionAxes]]:
        marks = dict.fromkeys(self._places(output).tolist(), "picture")
        ids = inputs[self.ids_name][0].tolist()
        return self.model.vocabulary.encode_among(ids, {**marks, **labels}, n_given), {}

    def _compare(self, inputs: dict[str, Tensor], axes: Mapping[str, AttentionAxes]) -> None:
        """Once, whatever the photo's size."""
        if not self._compared:
            with torch.no_grad(), in_one_line(self._name, "does not run on pictures and words"):
                compare_on(self._base, self.model.survey, Example({**inputs}))
            self._compared.add(())
