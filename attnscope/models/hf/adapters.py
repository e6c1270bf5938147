"""Adapters of peft (LoRA and its kin): fitted to a model and merged into its weights, or active in one in memory.

Merged, since then nothing of what is shown depends on how peft computes them; that the maps are those of peft's own
model, the tests hold. Prompt and prefix tuning add tokens that are no text, and are refused.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from attnscope.errors import AttnscopeError, first_line
from attnscope.models.files import file_sha256

_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Adapter:
    """An adapter that is part of a model."""

    name: str = ""
    sha256: str = ""
    note: str = ""


def require_peft(folder: Path) -> None:
    """Refuse an adapter that cannot be applied: without it, another model would be shown."""
    if not importlib.util.find_spec("peft"):
        raise AttnscopeError(
            f"{folder} holds an adapter, which needs the package peft",
            'install the extra: pip install "attnscope[peft]", or move adapter_config.json away to see the base alone',
        )
    if not (folder / _WEIGHTS).is_file():
        raise AttnscopeError(f"{folder} holds no {_WEIGHTS}", "save the adapter there with peft, as safetensors")


def merge(model: PreTrainedModel, folder: Path) -> Adapter:
    """Merge the adapter in a folder into a model with its head, if it has one."""
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict

    path = folder / _WEIGHTS
    try:
        weights = load_file(path)
        config: Any = PeftConfig.from_pretrained(str(folder))
        _require_merging(config, folder.name)

        # An adapter of a model with a head is fitted to the base alone where the head is not loaded.
        target: PreTrainedModel = model
        heads: set[str] = set()
        if not {name.removeprefix(_PREFIX).partition(".")[0] for name in weights} <= {*model._modules}:
            target = model.base_model  # type: ignore[assignment]
            within = f"{_PREFIX}{target.base_model_prefix}."
            inside = {_PREFIX + name.removeprefix(within): w for name, w in weights.items() if name.startswith(within)}
            if inside:
                heads = {name.split(".")[2] for name in weights if not name.startswith(within)}
                weights = inside

        # peft is to leave no weights beside those of the target.
        config.task_type = None
        config.inference_mode = True
        parts = {name.rpartition(".")[2] for name, _ in target.named_modules()}
        config.modules_to_save = [name for name in config.modules_to_save or () if name in parts] or None
        adapted = PeftModel(target, config, autocast_adapter_dtype=False)
        # Every weight of the adapter must have its place, and every place its weight.
        odd = sorted(set(get_peft_model_state_dict(adapted)) ^ set(weights))
        if odd:
            raise ValueError(f"{len(odd)} of its weights have no counterpart, such as {odd[0]}")
        set_peft_model_state_dict(adapted, weights)
        adapted.merge_and_unload(safe_merge=True)
    except AttnscopeError:
        raise
    except Exception as error:  # peft and torch raise what they like on adapters of other models
        raise AttnscopeError(
            f"the adapter in {folder} does not fit the model: {first_line(error)}", "name the model it was made for"
        ) from error
    sha256 = file_sha256(path)
    left_out = f"; its {', '.join(sorted(heads))} is left out, for attention does not depend on it" if heads else ""
    return Adapter(folder.name, sha256, f"Adapter {folder.name} (sha256 {sha256[:12]}) is merged in{left_out}.")


def unwrap(model: Any) -> tuple[Any, Adapter]:
    """Return a model in memory without peft's wrapping, and what is active in it; any other model as it is."""
    if any(base.__module__.partition(".")[0] == "peft" for base in type(model).__mro__):
        for name in model.active_adapters:
            _require_merging(model.peft_config[name], name)
        model = model.get_base_model()
    modules = model.modules() if isinstance(model, nn.Module) else ()
    parts: list[Any] = [part for part in modules if hasattr(part, "merged_adapters")]
    if not parts:
        return model, Adapter()
    # Merged adapters stay part of the weights; others count only while they are switched on.
    names = {name for part in parts for name in part.merged_adapters}
    names |= {name for part in parts if not part.disable_adapters for name in part.active_adapters}
    name = "+".join(sorted(names))
    note = f"Adapter {name} is active." if name else "The model's adapters are switched off: this is the base."
    return model, Adapter(name, note=note)


def _require_merging(config: Any, name: str) -> None:
    """Refuse an adapter that adds tokens that are no text."""
    if config.is_prompt_learning or getattr(config, "is_adaption_prompt", False):
        raise AttnscopeError(
            f"adapter {name} adds tokens that are no text, so that no map of a text holds all its attention",
            "adapters that change weights, such as LoRA, can be shown",
        )
