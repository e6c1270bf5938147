"""Whether a checkpoint and the model made of it are one: what is missing, what is too much, what is never saved.

A weight that is not in the files is random, and one that the configuration has no place for is left out, both in
silence. What attention depends on must be neither.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from attnscope.errors import AttnscopeError

_Shapes = Mapping[str, Sequence[int]]

# Old files hold what is computed today, or what was only ever a mark.
_COMPUTED = re.compile(r"(^|\.)(position_ids|inv_freq|masked_bias|causal_mask|version|num_batches_tracked)$|_scale$")


def shapes_of(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors in safetensors files, without reading them."""
    found: dict[str, tuple[int, ...]] = {}
    for path in files:
        with suppress(SafetensorError, OSError), safe_open(path, framework="pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return found


def head_of(key: str, model: PreTrainedModel) -> str:
    """The part on top of the base model that a weight belongs to; "" for one of the base model's own.

    A part is on top by its place in the model, never by its name: routers have classifiers too. The pooler alone lies
    within base models, beside the layers.
    """
    first, _, rest = _name_in_base(key, model).partition(".")
    if first == "pooler":
        return first
    if model.base_model is not model:
        return "" if key.startswith(f"{model.base_model_prefix}.") else first
    top: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return first if rest and top is not None and model._modules.get(first) is top else ""


def notes_on_extras(model: PreTrainedModel, unexpected: Collection[str], held: _Shapes, name: str) -> list[str]:
    """What the files hold beyond the model.

    Raises:
        AttnscopeError: A part of the base model that is there would use them, were it as the files have it.
    """
    buffers = {key for key, _ in model.named_buffers()}
    extras = [key for key in sorted(unexpected) if key not in buffers and not _COMPUTED.search(key)]
    extras = [key for key in extras if not _is_mask(held.get(key))]
    used = [key for key in extras if _belongs_inside(_name_in_base(key, model), model)]
    if used:
        raise AttnscopeError(
            f"{name} holds {len(used)} weights that its config.json has no place for, such as {used[0]}: attention "
            "would be computed without them",
            "give the config.json that belongs to the weights",
        )
    parts = sorted({_name_in_base(key, model).partition(".")[0] for key in extras})
    return [f"The files also hold {', '.join(parts)}, which is not part of what is shown."] if parts else []


def notes_on_unsaved(model: PreTrainedModel, held: _Shapes) -> list[str]:
    """Which parameters of the base model are not in the files, nor expected there: they are made anew at each load."""
    patterns = [*(model._keys_to_ignore_on_load_missing or ()), *(model._keys_to_ignore_on_save or ())]
    if not held or not patterns:
        return []
    known = set(held) | {_name_in_base(key, model) for key in held}
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    base = _base(model)
    inside = {id(parameter) for parameter in base.parameters()}
    unsaved = [
        key
        for key, parameter in model.named_parameters()
        if id(parameter) in inside
        and key not in tied
        and key not in known
        and _name_in_base(key, model) not in known
        and any(re.search(pattern, key) for pattern in patterns)
    ]
    if not unsaved:
        return []
    return [
        f"transformers does not save {', '.join(unsaved)}, but computes it: had it been changed in training, what is "
        "shown would not be that model."
    ]


def _base(model: PreTrainedModel) -> nn.Module:
    found: nn.Module = model.base_model
    return found


def _name_in_base(key: str, model: PreTrainedModel) -> str:
    """A weight's name as the base model has it."""
    return key.removeprefix(f"{model.base_model_prefix}.") if model.base_model is not model else key


def _belongs_inside(name: str, model: PreTrainedModel) -> bool:
    """Whether a weight's name leads into a part that the base model has, but for layers that only predict ahead."""
    part: Any = _base(model)._modules.get(name.partition(".")[0])
    if part is None or name.startswith("pooler."):
        return False
    config = model.config.get_text_config()
    ahead = getattr(config, "num_nextn_predict_layers", None) or 0
    number = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    n_layers = getattr(config, "num_hidden_layers", None)
    return not (ahead and number and isinstance(n_layers, int) and n_layers <= int(number[1]) < n_layers + ahead)


def _is_mask(shape: Sequence[int] | None) -> bool:
    """Whether a tensor is a causal mask of all positions, or a single number, as GPT-2's old files hold them."""
    return shape is not None and (len(shape) == 0 or (len(shape) == 4 and tuple(shape[:2]) == (1, 1)))
