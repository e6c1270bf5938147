"""What Hugging Face models read of pictures among words: photos and a question through the model's own processor."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad
from transformers.processing_utils import ProcessorMixin

from attnscope.errors import AttnscopeError, first_line
from attnscope.models.hf.examples import Example, accepts
from attnscope.models.hf.network import Network
from attnscope.models.hf.parts import in_one_line, silence
from attnscope.models.hf.patch_places import Made, Pane, Unplaced, area_of, panes_of, slopes
from attnscope.models.hf.seeing import undo_normalisation
from attnscope.models.hf.survey import compare_on
from attnscope.models.hf.tokenizer import limit_template
from attnscope.models.hf.writing import HuggingFaceWriter
from attnscope.models.model import Model, SensoryInput, require_length
from attnscope.records.pictures import SMALL, Picture
from attnscope.senses.photos import Photo


class HuggingFaceViewer:
    """What of a model reads pictures among words; see models.model.Viewer.

    Args:
        model: The model that is run.
        network: What is known of it.
        processor: What makes its inputs of photos and a question; None = it came without one.
        writer: What continues a prompt.
    """

    def __init__(self, model: Model, network: Network, processor: Any, writer: HuggingFaceWriter) -> None:
        self.model = model
        self._network, self._base, self._name = network, network.base, network.info.name
        self._processor, self._writer = processor, writer
        self._compared = False
        self.describes = False

    def view(self, photos: Sequence[Photo], text: str, n: int = 0) -> SensoryInput:
        """Photos and a question in the model's own form of chat, and at most n tokens of its answer, greedily.

        The first time what the seam gives is compared with what the model computes as it is.

        Raises:
            AttnscopeError: It has no processor, or one that fails; it is not known which tokens stand for which part
                of a picture; what would be shown differs from what the model computes.
        """
        if getattr(self._processor, "image_processor", None) is None:
            raise AttnscopeError(
                f"{self._name} came without its processor", "hand it over: attnscope.load(model, processor)"
            )
        require_no_mark(self._name, self._processor, text)
        notes = [note for photo in photos for note in photo.notes]
        prompt, more = write_prompt(self._network, self._processor, text, len(photos))
        made = self._process([photo.image for photo in photos], prompt)
        ids = made.inputs["input_ids"][0].cpu()
        picture = picture_id(self._network)
        at = np.flatnonzero(ids.numpy() == picture)
        require_length(self._network.info, len(ids) + n)

        def process_again(images: Sequence[Any]) -> Made:
            return self._process(images, prompt)

        pictures, labels = place_pictures(self._name, made, process_again, photos, at)
        labels = dict.fromkeys(at.tolist(), "picture") | labels
        inputs = {
            name: value.to(self._network.device, self._base.dtype if value.is_floating_point() else None)
            for name, value in made.inputs.items()
            if isinstance(value, Tensor) and accepts(self._base, name)
        }
        if n:
            written = self._writer.answer(inputs, n, [picture])
            ids = torch.cat([ids, torch.tensor(written, dtype=ids.dtype)])
            if len(written) < n:
                more.append(f"the model wrote {len(written)} of {n} tokens: it ended the text")
            inputs |= self._longer(inputs, ids)
        if not self._compared:
            with torch.no_grad(), in_one_line(self._name, "does not run on pictures and words"):
                compare_on(self._base, self._network.found, Example({**inputs}), beside=True)
            self._compared = True
        tokens = self._network.tokenizer.encode_among(ids.tolist(), labels, made.inputs["input_ids"].shape[1])
        return SensoryInput(inputs, tokens, pictures=pictures, notes=(*notes, *more))

    def _process(self, images: Sequence[Any], prompt: str) -> Made:
        inputs = run_processor(self._name, self._processor, prompt, [list(images)])
        inputs["photos"] = list(images)
        n_tokens = int((inputs["input_ids"] == picture_id(self._network)).sum())
        return Made(self._base, self._processor, inputs, [image.size[::-1] for image in images], n_tokens)

    def _longer(self, inputs: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
        """What the forward gets of a prompt and the answer after it, where that is as long as the prompt."""
        more = len(ids) - inputs["input_ids"].shape[1]
        # All of PaliGemma's prompt sees all of it; what is written after it sees what comes before, and is told so.
        kinds: dict[str, int] = {
            "attention_mask": 1,
            "token_type_ids": int(self._base.config.model_type == "paligemma"),
        }
        longer = {"input_ids": ids[None].to(self._network.device)}
        for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
            if name in inputs:
                longer[name] = pad(inputs[name], (0, more), value=kinds.get(name, 0))
        return longer


# What reads pictures among words and what looks at them from beside both need -----------------------------------------


def require_no_mark(name: str, processor: Any, text: str) -> None:
    """Refuses a text that holds what stands for a picture in a prompt: it would stand for one that is not there.

    Raises:
        AttnscopeError: It does.
    """
    marks = {str(getattr(processor, which, None) or "") for which in ("image_token", "boi_token")} - {""}
    found = next((mark for mark in sorted(marks) if mark in text), None)
    if found is not None:
        raise AttnscopeError(
            f"the text holds {found!r}, which stands for a picture in what {name} reads", "leave it out"
        )


def write_prompt(network: Network, processor: Any, text: str, n: int) -> tuple[str, list[str]]:
    """Photos, then the question, as the model's template of chats puts them; what else is worth a note.

    Raises:
        AttnscopeError: The template fails.
    """
    if not getattr(processor, "chat_template", None):
        mark = str(getattr(processor, "image_token", "<image>"))
        plain = "the processor has no chat template: the model reads the pictures, then the text"
        # PaliGemma was trained so.
        return mark * n + text, [] if network.base.config.model_type == "paligemma" else [plain]
    content: list[dict[str, str]] = [*({"type": "image"} for _ in range(n)), {"type": "text", "text": text}]
    messages: list[Any] = [{"role": "user", "content": content}]
    try:
        with limit_template():
            # SmolVLM's own needs what is for videos.
            prompt = ProcessorMixin.apply_chat_template(processor, messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs, and raise what they like
        raise AttnscopeError(f"the chat template of {network.info.name} fails: {first_line(error)}") from error
    return str(prompt), []


def run_processor(name: str, processor: Any, prompt: str, images: Sequence[Any]) -> Any:
    """What a processor makes of photos and a prompt.

    Raises:
        AttnscopeError: It fails.
    """
    # Templates write the token that begins a text themselves.
    start = getattr(processor.tokenizer, "bos_token", None)
    options = {"add_special_tokens": False} if start and prompt.startswith(start) else {}
    try:
        with silence():
            return processor(text=[prompt], images=images, return_tensors="pt", **options)
    except Exception as error:
        raise AttnscopeError(f"the processor of {name} fails: {first_line(error)}") from error


def picture_id(network: Network) -> int:
    """The number of the token that stands for pictures.

    Raises:
        AttnscopeError: The configuration does not name it.
    """
    config = network.base.config
    found = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    if not isinstance(found, int):
        raise AttnscopeError(f"{network.info.name} does not say which of its tokens stand for pictures")
    return found


def place_pictures(
    name: str,
    made: Made,
    process_again: Callable[[Sequence[Any]], Made],
    photos: Sequence[Photo],
    at: NDArray[np.int64],
) -> tuple[tuple[Picture, ...], dict[int, str]]:
    """The pictures with the places of what stands for their patches; and what to show for each of these.

    Args:
        name: What the model is called.
        made: What the processor made of the photos.
        process_again: What it makes of other photos of the same sizes: of slopes.
        photos: The photos.
        at: Where each picture token stands in the prompt, or each key, (token,).

    Raises:
        AttnscopeError: It is not known where they stand.
    """
    try:
        panes = panes_of(made)
        guides = panes_of(process_again([Image.fromarray(slopes(*size)) for size in made.sizes]))
    except Unplaced as error:
        raise AttnscopeError(
            f"{name} cannot be shown on pictures: {error}", "its text alone can be: leave out --image"
        ) from error
    processor = getattr(made.processor, "image_processor", made.processor)

    def colours(pane: Pane) -> NDArray[np.uint8]:
        return np.ascontiguousarray(undo_normalisation(processor, pane.pixels[None]))

    names = [photo.source for photo in photos]
    pictures, labels = [], dict[int, str]()
    for number, (pane, guide) in enumerate(zip(panes, guides, strict=True)):
        photo = photos[pane.photo]
        cells = np.where(pane.places >= 0, at[pane.places], -1).astype(np.int32)
        again = names[: pane.photo].count(photo.source) + 1
        source = photo.source + f" ({again})" * (again > 1) + SMALL * pane.is_small
        area = area_of(colours(guide), *made.sizes[pane.photo])
        grid = (cells.shape[0], cells.shape[1])
        pictures.append(Picture(colours(pane), grid, source, photo.image.size, cells, area))
        before = f"{number}:" if len(panes) > 1 else ""
        placed = ((at, place) for at, place in np.ndenumerate(cells) if place >= 0)
        labels |= {int(place): f"{before}{row},{column}" for (row, column), place in placed}
    return tuple(pictures), labels
