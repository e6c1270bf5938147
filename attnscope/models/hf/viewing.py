"""What Hugging Face models read of pictures among words: photos and a question through the model's own processor."""

from collections.abc import Sequence
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
from attnscope.models.model import SensoryInput, require_length
from attnscope.records.pictures import SMALL, Picture
from attnscope.senses.photos import Photo


class HuggingFaceViewer:
    """What of a model reads pictures among words; see models.model.Viewer.

    Args:
        network: The model.
        processor: What makes its inputs of photos and a question; None = it came without one.
        writer: What continues a prompt.
    """

    def __init__(self, network: Network, processor: Any, writer: HuggingFaceWriter) -> None:
        self._network, self._base, self._name = network, network.base, network.info.name
        self._processor, self._writer = processor, writer
        self._compared = False

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
        notes = [note for photo in photos for note in photo.notes]
        prompt, more = self._prompt(text, len(photos))
        made = self._process([photo.image for photo in photos], prompt)
        ids = made.inputs["input_ids"][0].cpu()
        at = np.flatnonzero(ids.numpy() == self._picture_id())
        require_length(self._network.info, len(ids) + n)
        pictures, labels = self._place(made, photos, prompt, at)
        inputs = {
            name: value.to(self._network.device, self._base.dtype if value.is_floating_point() else None)
            for name, value in made.inputs.items()
            if isinstance(value, Tensor) and accepts(self._base, name)
        }
        if n:
            written = self._writer.answer(inputs, n, [self._picture_id()])
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

    def _prompt(self, text: str, n: int) -> tuple[str, list[str]]:
        """Photos, then the question, as the model's template of chats puts them; what else is worth a note."""
        if not getattr(self._processor, "chat_template", None):
            mark = str(getattr(self._processor, "image_token", "<image>"))
            plain = "the processor has no chat template: the model reads the pictures, then the text"
            # PaliGemma was trained so.
            return mark * n + text, [] if self._base.config.model_type == "paligemma" else [plain]
        content: list[dict[str, str]] = [*({"type": "image"} for _ in range(n)), {"type": "text", "text": text}]
        messages: list[Any] = [{"role": "user", "content": content}]
        try:
            with limit_template():
                # SmolVLM's own needs what is for videos.
                prompt = ProcessorMixin.apply_chat_template(
                    self._processor, messages, tokenize=False, add_generation_prompt=True
                )
        except Exception as error:  # templates are programs, and raise what they like
            raise AttnscopeError(f"the chat template of {self._name} fails: {first_line(error)}") from error
        return str(prompt), []

    def _process(self, images: Sequence[Any], prompt: str) -> Made:
        # Templates write the token that begins a text themselves.
        start = getattr(self._processor.tokenizer, "bos_token", None)
        options = {"add_special_tokens": False} if start and prompt.startswith(start) else {}
        try:
            with silence():
                inputs = self._processor(text=[prompt], images=[list(images)], return_tensors="pt", **options)
        except Exception as error:
            raise AttnscopeError(f"the processor of {self._name} fails: {first_line(error)}") from error
        inputs["photos"] = list(images)
        n_tokens = int((inputs["input_ids"] == self._picture_id()).sum())
        return Made(self._base, self._processor, inputs, [image.size[::-1] for image in images], n_tokens)

    def _picture_id(self) -> int:
        found = getattr(self._base.config, "image_token_id", getattr(self._base.config, "image_token_index", None))
        if not isinstance(found, int):
            raise AttnscopeError(f"{self._name} does not say which of its tokens stand for pictures")
        return found

    def _place(
        self, made: Made, photos: Sequence[Photo], prompt: str, at: NDArray[np.int64]
    ) -> tuple[tuple[Picture, ...], dict[int, str]]:
        """The pictures with the places of their tokens; and what to show for each token that is no text."""
        try:
            panes = panes_of(made)
            guides = panes_of(self._process([Image.fromarray(slopes(*size)) for size in made.sizes], prompt))
        except Unplaced as error:
            raise AttnscopeError(
                f"{self._name} cannot be shown on pictures: {error}", "its text alone can be: leave out --image"
            ) from error
        names = [photo.source for photo in photos]
        pictures, labels = [], {int(place): "picture" for place in at}
        for number, (pane, guide) in enumerate(zip(panes, guides, strict=True)):
            photo = photos[pane.photo]
            cells = np.where(pane.places >= 0, at[pane.places], -1).astype(np.int32)
            again = names[: pane.photo].count(photo.source) + 1
            source = photo.source + f" ({again})" * (again > 1) + SMALL * pane.is_small
            area = area_of(self._colours(guide), *made.sizes[pane.photo])
            grid = (cells.shape[0], cells.shape[1])
            pictures.append(Picture(self._colours(pane), grid, source, photo.image.size, cells, area))
            before = f"{number}:" if len(panes) > 1 else ""
            placed = ((at, place) for at, place in np.ndenumerate(cells) if place >= 0)
            labels |= {int(place): f"{before}{row},{column}" for (row, column), place in placed}
        return tuple(pictures), labels

    def _colours(self, pane: Pane) -> NDArray[np.uint8]:
        return np.ascontiguousarray(undo_normalisation(self._processor.image_processor, pane.pixels[None]))

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
