"""What a Hugging Face model writes: a text continued, a target answered, both greedily, without the seam."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnscope.errors import AttnscopeError
from attnscope.models.hf.examples import standing_arguments
from attnscope.models.hf.parts import quiet
from attnscope.models.hf.seam import switched
from attnscope.models.model import ModelInfo


def require_writing(model: Any, base: PreTrainedModel, info: ModelInfo, *, is_encoder_decoder: bool) -> None:
    """Refuses models that cannot write, or not in this way.

    Raises:
        AttnscopeError: It has an encoder and should have none, or the other way round; it is an encoder; or it has no
            language-model head.
    """
    if bool(base.config.is_encoder_decoder) != is_encoder_decoder:
        what = "has a decoder that answers" if base.config.is_encoder_decoder else "has no encoder"
        raise AttnscopeError(
            f"{info.name} {what}", "use a target" if not is_encoder_decoder else "leave out the target"
        )
    if "decoder" not in info.kinds:
        raise AttnscopeError(f"{info.name} is an encoder and cannot continue a text", "use a decoder, such as GPT-2")
    if not model.can_generate() or model is base and not is_encoder_decoder:
        raise AttnscopeError(
            f"{info.name} was loaded without a language-model head and cannot write",
            "its files or the wrapped object hold only the base model",
        )


def end_ids(model: Any, base: PreTrainedModel) -> set[int]:
    """The numbers of the tokens that end a text."""
    ends: set[int] = set()
    for config in (getattr(model, "generation_config", None), base.config.get_text_config()):
        found = getattr(config, "eos_token_id", None)
        ends |= set(found if isinstance(found, (list, tuple)) else [] if found is None else [found])
    return ends


def start_id(model: Any, base: PreTrainedModel, name: str) -> int:
    """The number of the token that the decoder of an encoder-decoder starts with.

    Raises:
        AttnscopeError: It is no encoder-decoder, or does not say.
    """
    if not base.config.is_encoder_decoder:
        raise AttnscopeError(f"{name} is no encoder-decoder, so it has no target", "leave out --target")
    for config in (getattr(model, "generation_config", None), base.config):
        for setting in ("decoder_start_token_id", "bos_token_id"):
            found = getattr(config, setting, None)
            if isinstance(found, int):
                return found
    raise AttnscopeError(f"{name} does not say which token its decoder starts with")


def continue_text(model: Any, base: PreTrainedModel, ids: Sequence[int], room: int, device: torch.device) -> list[int]:
    """The numbers given and up to `room` that the model writes after them, without the one that ends a text."""
    ends = end_ids(model, base)
    written = [int(number) for number in ids]
    can_cache = "use_cache" in standing_arguments(model)
    step, past = torch.tensor([written], device=device), None
    with torch.no_grad(), switched(base, None):
        for _ in range(room):
            caching = {"past_key_values": past, "use_cache": True} if can_cache else {}
            output = model(input_ids=step, **caching)
            token = int(output.logits[0, -1].argmax())
            if token in ends:
                break
            written.append(token)
            past = getattr(output, "past_key_values", None)
            step = torch.tensor([written if past is None else [token]], device=device)
    return written


def answer(model: Any, base: PreTrainedModel, inputs: Mapping[str, Tensor], start: int, n: int) -> list[int]:
    """The start token and what an encoder-decoder writes after it, up to n tokens, without the one that ends a text."""
    # In this order, as a load takes them: else two threads could wait for each other.
    with quiet(), torch.no_grad(), switched(base, None):
        result = model.generate(**inputs, decoder_start_token_id=start, do_sample=False, num_beams=1, max_new_tokens=n)
    written = [int(number) for number in result[0]]
    ends = end_ids(model, base)
    while len(written) > 1 and written[-1] in ends:
        written.pop()
    return written
