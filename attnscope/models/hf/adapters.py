"""Adapters of peft (LoRA and its kin): found in files, fitted to a model, and merged into its weights.

Merged, since then nothing of what is shown depends on how peft computes them; that the maps are those of peft's own
model, the tests hold. Prompt and prefix tuning add tokens that are no text, and are refused.
"""

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnscope.errors import AttnscopeError, first_line
from attnscope.models.files import file_sha256

_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Adapter:
    """An adapter that is part of a model."""

    name: str
    sha256: str
    note: str


NONE = Adapter("", "", "")


def merge(model: PreTrainedModel, folder: Path, *, allow_pickle: bool) -> Adapter:
    """Merge the adapter in a folder into a model with its head, if it has one."""
    require_peft(folder)
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict

    path, weights = _read(folder, allow_pickle=allow_pickle)
    try:
        config: Any = PeftConfig.from_pretrained(str(folder))
        kind = _require_merging(config, folder.name)
        target, fitted, left = _fit(model, weights, folder)
        # Heads of its task are not loaded, so that nothing is to be saved beside them.
        config.task_type = None
        config.inference_mode = True
        parts = {name.rpartition(".")[2] for name, _ in target.named_modules()}
        config.modules_to_save = [name for name in config.modules_to_save or () if name in parts] or None
        adapted = PeftModel(target, config, autocast_adapter_dtype=False)
        expected = set(get_peft_model_state_dict(adapted))
        if expected != set(fitted):
            odd = sorted(expected ^ set(fitted))
            raise _does_not_fit(folder, f"{len(odd)} of its weights have no counterpart, such as {odd[0]}")
        set_peft_model_state_dict(adapted, fitted)
        adapted.merge_and_unload(safe_merge=True)
    except AttnscopeError:
        raise
    except Exception as error:  # peft and torch raise what they like on adapters of other models
        raise _does_not_fit(folder, first_line(error)) from error
    sha256 = file_sha256(path)
    left_out = f"; its {', '.join(left)} is left out, for attention does not depend on it" if left else ""
    return Adapter(folder.name, sha256, f"Adapter {folder.name} ({kind}, sha256 {sha256[:12]}) is merged in{left_out}.")


def require_peft(folder: Path) -> None:
    """Refuse an adapter that cannot be applied: without it, another model would be shown."""
    if not importlib.util.find_spec("peft"):
        raise AttnscopeError(
            f"{folder} holds an adapter, which needs the package peft",
            'install the extra: pip install "attnscope[peft]", or move adapter_config.json away to see the base alone',
        )


def unwrap(model: Any) -> tuple[Any, Adapter]:
    """Return a model in memory without peft's wrapping, and what is active in it; any other model as it is."""
    if any(base.__module__.partition(".")[0] == "peft" for base in type(model).__mro__):
        for name in getattr(model, "active_adapters", ()):
            _require_merging(model.peft_config[name], name)
        model = model.get_base_model()
    if not isinstance(model, nn.Module):
        return model, NONE
    parts: list[Any] = [
        part for part in model.modules() if hasattr(part, "merged_adapters") and hasattr(part, "active_adapters")
    ]
    if not parts:
        return model, NONE
    active = {name for part in parts if not part.disable_adapters for name in part.active_adapters}
    names = sorted(active | {name for part in parts for name in part.merged_adapters})
    if not names:
        return model, Adapter("", "", "The model's adapters are switched off: this is the base.")
    sha256 = _sha256(model, names)
    name = "+".join(names)
    return model, Adapter(name, sha256, f"Adapter {name} (sha256 {sha256[:12]}) is active.")


def _require_merging(config: Any, name: str) -> str:
    """Return the kind of an adapter; refused where it adds tokens that are no text."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if config.is_prompt_learning or getattr(config, "is_adaption_prompt", False):
        raise AttnscopeError(
            f"adapter {name} ({kind}) adds tokens that are no text, so that no map of a text holds all its attention",
            "adapters that change weights, such as LoRA, can be shown",
        )
    return kind


def _read(folder: Path, *, allow_pickle: bool) -> tuple[Path, dict[str, Tensor]]:
    path = folder / "adapter_model.safetensors"
    pickled = folder / "adapter_model.bin"
    try:
        if path.is_file():
            return path, load_file(path)
        if pickled.is_file() and allow_pickle:
            return pickled, torch.load(pickled, map_location="cpu", weights_only=True)
    except Exception as error:
        raise AttnscopeError(f"cannot read the adapter in {folder}: {first_line(error)}", "get it again") from error
    if pickled.is_file():
        raise AttnscopeError(
            f"{folder} holds its adapter only as a pickle, and loading one can run any code",
            "--allow-pickle if you trust where it came from",
        )
    raise AttnscopeError(f"{folder} holds no adapter_model.safetensors", "an adapter's folder holds one")


def _fit(
    model: PreTrainedModel, weights: dict[str, Tensor], folder: Path
) -> tuple[PreTrainedModel, dict[str, Tensor], list[str]]:
    """Return the part that an adapter is of, its weights by that part's names, and heads that are not loaded."""
    base: PreTrainedModel = model.base_model if isinstance(model.base_model, PreTrainedModel) else model
    names = [name.removeprefix(_PREFIX) for name in weights]
    for target in (model, base):
        if all(name.partition(".")[0] in target._modules for name in names):
            return target, weights, []
    # An adapter of a model with a head, fitted to the base alone.
    within = f"{base.base_model_prefix}."
    inside = {
        _PREFIX + name.removeprefix(within): weight
        for name, weight in zip(names, weights.values(), strict=True)
        if name.startswith(within)
    }
    if not inside:
        raise _does_not_fit(folder, f"{model.config.model_type} has no {names[0] if names else 'such weights'}")
    return base, inside, sorted({name.partition(".")[0] for name in names if not name.startswith(within)})


def _does_not_fit(folder: Path, why: str) -> AttnscopeError:
    return AttnscopeError(f"the adapter in {folder} does not fit the model: {why}", "name the model it was made for")


def _sha256(model: nn.Module, adapters: list[str]) -> str:
    """Hash of what adapters in memory hold, by name."""
    digest = hashlib.sha256()
    for key, parameter in sorted(model.named_parameters()):
        if any(f".{name}." in f"{key}." for name in adapters):
            digest.update(key.encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
