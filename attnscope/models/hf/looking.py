"""What Hugging Face models see of pictures beside their words: across to the patches, from words or learned queries."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from transformers.modeling_outputs import BaseModelOutput

from attnscope.errors import AttnscopeError, first_line
from attnscope.models.hf.crossing import compare_crossing, result_of
from attnscope.models.hf.examples import accepts
from attnscope.models.hf.network import Network
from attnscope.models.hf.parts import in_one_line, silence
from attnscope.models.hf.patch_places import Made, tower_of
from attnscope.models.hf.seam import use_attention
from attnscope.models.hf.seeing import tokens_before
from attnscope.models.hf.tokenizer import HuggingFaceTokenizer
from attnscope.models.hf.viewing import picture_id, place_pictures, require_no_mark, run_processor, write_prompt
from attnscope.models.hf.writing import HuggingFaceWriter
from attnscope.models.model import Model, SensoryInput, Side, require_length
from attnscope.records import Tokens
from attnscope.senses.photos import Photo
from attnscope.senses.tokens import key_tokens, query_tokens


class HuggingFaceLooker:
    """What of a model looks at pictures from beside its text; see models.model.Viewer.

    Args:
        model: The model that is run.
        network: What is known of it.
        processor: What makes its inputs of photos and words, or of photos alone; None = it came without one.
    """

    def __init__(self, model: Model, network: Network, processor: Any) -> None:
        self.model = model
        self._network, self._base, self._name = network, network.base, network.info.name
        self._kind = str(self._base.config.model_type)
        self._processor, self._writer = processor, HuggingFaceWriter(network)
        self._compared: set[tuple[int, ...]] = set()
        # Their decoders begin with a token of their own; a chat, or queries before it, want a text.
        self.describes = self._kind in ("blip", "vision-encoder-decoder")

    def view(self, photos: Sequence[Photo], text: str, n: int = 0) -> SensoryInput:
        """Photos and words as the model takes them, and at most n tokens that it writes, greedily.

        What the seam gives is compared with what the model computes as it is, for each new shape of a picture.

        Raises:
            AttnscopeError: It has no processor or tokenizer, or one that fails; it takes one photo; it is not known
                which key stands for which part of a picture; what would be shown differs from what it computes.
        """
        if self._processor is None:
            told = f"{self._name} came without its processor"
            raise AttnscopeError(told, "hand it over: attnscope.load(model, processor)")
        if len(photos) > 1 and self._kind != "mllama":
            raise AttnscopeError(f"{self._name} sees one photo at a time", "give one --image")
        require_no_mark(self._name, self._processor, text)
        notes = [note for photo in photos for note in photo.notes]
        prompt, more = write_prompt(self._network, self._processor, text, len(photos)) if self._chats else (text, [])
        made = self._process([photo.image for photo in photos], prompt)
        given = made.inputs["decoder_input_ids" if self._kind == "vision-encoder-decoder" else "input_ids"][0]
        require_length(self._network.info, len(given) + n)

        def process_again(images: Sequence[Any]) -> Made:
            return self._process(images, prompt)

        places = np.arange(made.n_tokens)
        pictures, labels = place_pictures(self._name, made, process_again, photos, places)
        inputs = {
            name: value.to(self._network.device, self._base.dtype if value.is_floating_point() else None)
            for name, value in made.inputs.items()
            if isinstance(value, Tensor) and accepts(self._base, name)
        }
        ids = given.tolist()
        if n:
            written = self._write(inputs, ids, n)
            if len(written) < n:
                more.append(f"the model wrote {len(written)} of {n} tokens: it ended the text")
            ids += written
            inputs = self._longer(inputs, ids)
        hidden = self._filling(made)
        for place in np.flatnonzero(~hidden):
            labels.setdefault(int(place), "CLS")
        keys = key_tokens(made.n_tokens, labels, [photo.source for photo in photos])
        words, across = self._sides(inputs, ids, len(given), keys, hidden)
        self._compare(inputs, across)
        return SensoryInput(inputs, words, pictures=pictures, notes=(*notes, *more), across=across)

    @property
    def _chats(self) -> bool:
        return self._kind == "mllama" or bool(getattr(self._processor, "chat_template", None))

    @property
    def _backend(self) -> Any:
        """The tokenizer as transformers has it."""
        tokenizer = self._network.tokenizer
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise AttnscopeError(
                f"{self._name} came without its tokenizer",
                "save it beside the model: AutoTokenizer.from_pretrained(…).save_pretrained(…)",
            )
        return tokenizer.backend

    def _process(self, images: Sequence[Any], prompt: str) -> Made:
        """What the processor makes of photos and words; of its picture tokens there are as many as keys."""
        if self._kind == "mllama":
            inputs = run_processor(self._name, self._processor, prompt, [list(images)])
        elif self._kind in ("blip-2", "instructblip"):
            if not getattr(self._processor, "num_query_tokens", None):
                hint = "set processor.num_query_tokens as the model's configuration has it, and save it again"
                raise AttnscopeError(
                    f"the processor of {self._name} does not say how many query tokens there are", hint
                )
            inputs = run_processor(self._name, self._processor, prompt, list(images))
        else:
            inputs = self._process_apart(images, prompt)
        pixels = inputs["pixel_values"]
        if self._kind == "mllama":
            n_keys = pixels.shape[1] * pixels.shape[2] * int(self._base.vision_model.num_patches)
        else:
            tower, high, wide = tower_of(self._base)
            n_keys = len(pixels) * (len(tokens_before(tower)) + (pixels.shape[2] // high) * (pixels.shape[3] // wide))
        return Made(self._base, self._processor, inputs, [image.size[::-1] for image in images], n_keys)

    def _process_apart(self, images: Sequence[Any], prompt: str) -> dict[str, Any]:
        """What models take whose decoder reads words as they are: BLIP's, or the one behind a vision encoder."""
        processor = getattr(self._processor, "image_processor", self._processor)
        try:
            with silence():
                pixels = processor(images=list(images), return_tensors="pt")["pixel_values"]
        except Exception as error:
            raise AttnscopeError(f"the image processor of {self._name} fails: {first_line(error)}") from error
        if self._kind == "vision-encoder-decoder":
            return {"pixel_values": pixels, "decoder_input_ids": torch.tensor([self._decoder_ids(prompt)])}
        ids = self._backend(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        # What it is trained to continue begins with a token of its own, and does not end.
        ids = torch.tensor([[int(self._base.config.text_config.bos_token_id), *ids]])
        return {"pixel_values": pixels, "input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def _decoder_ids(self, text: str) -> list[int]:
        """The token that a decoder starts with, then the text as it is trained to write it, without its end."""
        backend, start = self._backend, self._writer.start_id()
        ids = [int(number) for number in backend(text, verbose=False)["input_ids"]]
        special = set(backend.all_special_ids)
        while ids and ids[-1] in special:
            ids.pop()
        return ids if ids[:1] == [start] else [start, *ids]

    def _write(self, inputs: Mapping[str, Tensor], given: list[int], n: int) -> list[int]:
        """The numbers of what the model writes, greedily, without a token that ends a text."""
        model = self._network.model
        if not model.can_generate():
            raise AttnscopeError(
                f"{self._name} was loaded without a language-model head and cannot write", "leave out --generate"
            )
        if self._kind == "mllama":
            return self._writer.answer(inputs, n, [picture_id(self._network)])
        if "decoder" not in self._network.found.layers:
            raise AttnscopeError(
                f"the language model of {self._name} is an encoder-decoder of its own, which is not run to write",
                "leave out --generate",
            )
        given_once: dict[str, Any] = {}
        if self._kind == "vision-encoder-decoder":
            with torch.no_grad(), use_attention(self._base, None):
                seen = self._base.encoder(inputs["pixel_values"])[0]
            given_once = {"encoder_outputs": BaseModelOutput(seen), "pixel_values": None}
        never = getattr(self._base.config, "image_token_id", None)

        def predict(ids: list[int]) -> Tensor:
            scores = result_of(model(**{**self._longer(inputs, ids), **given_once}))
            if never is not None:
                scores[..., never] = -torch.inf
            return scores

        with silence(), torch.no_grad(), use_attention(self._base, None):
            return self._writer.extend_greedily(predict, given, n)

    def _longer(self, inputs: Mapping[str, Tensor], ids: Sequence[int]) -> dict[str, Tensor]:
        """What the forward gets of a prompt, and of what was written after it."""
        name = "decoder_input_ids" if self._kind == "vision-encoder-decoder" else "input_ids"
        more = len(ids) - inputs[name].shape[1]
        longer = {**inputs, name: torch.tensor([list(ids)], device=self._network.device)}
        if "attention_mask" in inputs:
            longer["attention_mask"] = pad(inputs["attention_mask"], (0, more), value=1)
        if "cross_attention_mask" in inputs:  # what is written sees what the last token of the prompt does
            seen = inputs["cross_attention_mask"]
            longer["cross_attention_mask"] = torch.cat([seen, seen[:, -1:].expand(-1, more, -1, -1)], 1)
        return longer

    def _filling(self, made: Made) -> NDArray[np.bool_]:
        """Which keys are of tiles that are there to fill up a batch, (key,): no query sees them."""
        if self._kind != "mllama":
            return np.zeros(made.n_tokens, np.bool_)
        real = made.inputs["cross_attention_mask"][0, -1].reshape(-1).cpu().numpy() > 0
        return np.repeat(~real, int(self._base.vision_model.num_patches))

    def _sides(
        self, inputs: Mapping[str, Tensor], ids: Sequence[int], n_given: int, keys: Tokens, hidden: NDArray[np.bool_]
    ) -> tuple[Tokens, dict[str, Side]]:
        """The words; and what attends to what, the attention to pictures first."""
        layers = self._network.found.layers
        tokenizer = self._network.tokenizer
        if self._kind not in ("blip-2", "instructblip"):
            stand_ins = [i for i, one in enumerate(ids) if self._kind == "mllama" and one == picture_id(self._network)]
            words = tokenizer.encode_among(ids, dict.fromkeys(stand_ins, "picture"), n_given)
            first = max(stand_ins, default=-1) + 1
            return words, {
                "cross": Side(words, keys, layers["cross"], first, hidden if hidden.any() else None),
                "decoder": Side(words, words, layers["decoder"], first),
            }
        at = [i for i, one in enumerate(ids) if one == picture_id(self._network)]
        words = tokenizer.encode_among(ids, {place: f"Q{number}" for number, place in enumerate(at)}, n_given)
        asking: list[str] = []
        if "qformer_input_ids" in inputs:
            read = self._processor.qformer_tokenizer.convert_ids_to_tokens(inputs["qformer_input_ids"][0].tolist())
            asking = [str(token) for token in read]
        queries = query_tokens(len(at))
        both = query_tokens(len(at), asking)
        sides = {
            "cross": Side(queries, keys, layers["cross"]),
            "encoder": Side(both, both, layers["encoder"]),
        }
        if "decoder" in layers:
            sides["decoder"] = Side(words, words, layers["decoder"], max(at, default=-1) + 1)
        return words, sides

    def _compare(self, inputs: dict[str, Tensor], across: Mapping[str, Side]) -> None:
        shape = (*inputs["pixel_values"].shape, len(next(iter(across.values())).keys))
        if shape in self._compared:
            return
        if self._network.info.checked and "decoder" not in across:
            start = self._base.config.get_text_config().decoder_start_token_id or 0
            inputs["decoder_input_ids"] = torch.tensor([[start]], device=self._network.device)
        sizes = {kind: (len(side.queries), len(side.keys)) for kind, side in across.items()}
        with in_one_line(self._name, "does not run on this picture and these words"):
            compare_crossing(self._base, self._network.found, inputs, sizes)
        self._compared.add(shape)
