"""Load models by name, with their tokenizers.

A loaded model computes all attention in one function, the seam, where a probe can watch or change it. Importing this
module loads neither torch nor transformers; loading a model does.
"""

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from attnscope.core.plain_torch import with_default_torch
from attnscope.errors import AttnscopeError, UsageError, require_choice
from attnscope.models.catalog import BUILT_IN, Source, read_config, resolve, verify, with_adapter
from attnscope.models.files import weight_files
from attnscope.models.info import ModelInfo
from attnscope.models.model import Batch, Model, Tokenizer
from attnscope.models.own.layouts import Checkpoint, EncoderSettings, native_info, why_unsupported

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from attnscope.models.devices import DeviceMap
    from attnscope.models.inputs.model import Labels

__all__ = [
    "Batch",
    "Model",
    "Source",
    "describe",
    "load",
    "open_tokenizer",
    "resolve",
]

ENGINES = ("auto", "native", "hf", "numpy")
DTYPES = ("float32", "float64", "bfloat16", "float16")


@with_default_torch
def load(
    spec: "str | os.PathLike[str] | Source | PreTrainedModel | nn.Module" = "minilm",
    tokenizer: Any = None,
    *,
    inputs: Any = None,
    labels: "Labels | None" = None,
    engine: str = "auto",
    device: str = "cpu",
    dtype: str = "float32",
    check: bool | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    device_map: "DeviceMap | None" = None,
    adapter: "str | os.PathLike[str] | None" = None,
) -> Model:
    """Load a model by name, or take one that is in memory already.

    Args:
        spec: A catalogue name, a folder (also of an adapter that names its model), a GGUF file, a Hub id, or what
            `resolve` made of one.
            A transformers model in memory, also one that peft has wrapped; or with `inputs` any torch module.
        tokenizer: The tokenizer of a transformers model in memory; without one, texts are token numbers ("17 4 9").
        inputs: What the forward of a torch module in memory receives, where only you can make it: a tensor, a tuple by
            position, or a mapping by name. Each sequence in it becomes a text.
        labels: Names of the positions of a sequence: a list, range(0, 96, 8), a grid such as (4, 6), or one list per
            sequence; None = numbers. They also choose which attention is shown, by how many positions it has.
        engine: "native" (BERT-family weights on the project's own attention), "hf" (transformers), "numpy" (BERT-family
            weights without torch, to look at single texts), or "auto": native where it computes the model as it is.
        device: Where it is to run, as torch names it; "auto" = the first there is of cuda, mps and cpu; "all" = as
            `device_map="auto"`.
        dtype: Precision to compute with.
        check: Whether a Hugging Face model is compared with its own eager attention first. True: always. False: never.
            None: unless the model is from files that were compared before.
        allow_pickle: Whether weights may be pickles, which can run any code, where there are no safetensors.
        trust_remote_code: Whether Python code that comes with the model may run.
        device_map: "auto" to spread a model over all devices, and over memory and disk where it does not fit, by
            accelerate (extra `[accelerate]`); or the device of each module. With transformers' engine alone.
        adapter: The folder of an adapter of peft (extra `[peft]`), such as LoRA, that is merged into the weights.

    Raises:
        AttnscopeError: The model cannot be had, or not be shown truly; the message says why.
    """
    require_engine_and_dtype(engine, dtype)
    if device == "all":
        device = "cpu"
        device_map = "auto"
    # A model in memory.
    if isinstance(spec, os.PathLike):
        spec = os.fspath(spec)
    if not isinstance(spec, str | Source):
        has_options = device != "cpu" or dtype != "float32" or adapter is not None
        if engine not in ("auto", "hf") or has_options:
            hint = "move, cast or adapt (peft) it yourself, and leave out the options"
            raise UsageError("a model in memory stays as it is", hint)
        return _load_from_memory(spec, tokenizer, inputs, labels, check is not False)
    # Refuse options that mean nothing for a model from files.
    if inputs is not None or labels is not None:
        raise UsageError(
            "inputs go with a torch module in memory", "load the module, and give it instead of a name"
        )
    if tokenizer is not None:
        raise UsageError(
            f"{spec} brings its own tokenizer", "a tokenizer goes with a transformers model in memory"
        )
    if device_map is not None:
        if engine in ("native", "numpy") or device not in ("cpu", "auto"):
            hint = "leave out the other option"
            raise UsageError("a device map goes with --engine hf, and instead of a device", hint)
        if spec in BUILT_IN:
            raise UsageError(f"{spec} is small enough for any device", "leave out --device all")
        engine = "hf"
    if engine == "numpy" and (device not in ("cpu", "auto") or dtype != "float32"):
        raise UsageError(
            "the numpy engine computes on the CPU, in float32",
            "leave out --device and --dtype, or take --engine native",
        )
    # Find the files, and the engine that runs them.
    source, engine = _choose_engine(spec, engine, allow_pickle, trust_remote_code, adapter)
    if source.adapter is not None and device_map is not None:
        raise UsageError("an adapter is merged on one device", "leave out --device all")
    # Hash the weights while torch loads.
    threading.Thread(target=_hash_quietly, args=(source,), daemon=True).start()
    if engine == "hf":
        from attnscope.models.hf.loading import load_huggingface

        return load_huggingface(
            source,
            device=device,
            dtype=dtype,
            check=check,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
            device_map=device_map,
        )
    if engine == "numpy":
        from attnscope.models.own.plain import load_plain

        return load_plain(source)
    if source.folder is None:
        from attnscope.models.own.glass_box import load_own

        return load_own(source.name, device=device, dtype=dtype)
    from attnscope.models.own.native import load_native

    return load_native(source, device=device, dtype=dtype)


def _load_from_memory(
    module: Any, tokenizer: Any, inputs: Any, labels: "Labels | None", check: bool
) -> Model:
    """Return a model in memory as a Model: a transformers model, or with `inputs` any torch module."""
    if inputs is None:
        if labels is not None:
            raise UsageError("labels name the positions of inputs", "give inputs=… too")
        from attnscope.models.hf.assembling import wrap

        return wrap(cast("PreTrainedModel", module), tokenizer, check=check)
    from attnscope.models.inputs.model import load_inputs

    if tokenizer is not None:
        raise UsageError("inputs are no texts", "leave out the tokenizer, or the inputs")
    return load_inputs(module, inputs, labels, check=check)


def require_engine_and_dtype(engine: str, dtype: str) -> None:
    """Refuse an engine or a precision that does not exist."""
    require_choice("engine", engine, ENGINES)
    require_choice("precision", dtype, DTYPES)


def read_configuration(source: Source) -> dict[str, Any]:
    """Return a model's configuration: config.json, or what transformers reads from a GGUF file in its place."""
    if source.is_gguf:
        from attnscope.models.hf.loading import read_gguf_config

        return read_gguf_config(source)
    return read_config(source)


def open_tokenizer(source: Source) -> Tokenizer | None:
    """Return the tokenizer of a model that the native engine runs, without loading torch; None for any other model."""
    if source.folder is None or _why_not_native(source) is not None:
        return None
    from attnscope.models.tokenizer import FastTokenizer

    return FastTokenizer.open(source.folder)


@with_default_torch
def describe(
    spec: str | Source = "minilm",
    *,
    engine: str = "auto",
    check: bool | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    adapter: "str | os.PathLike[str] | None" = None,
) -> tuple[ModelInfo, Tokenizer]:
    """Return the facts of a model, and its tokenizer.

    A model for the native engine is not loaded: its weights are hashed, and their names, shapes and file lengths are
    compared with its configuration. Any other model is loaded, with `check` as in `load`.
    """
    source, engine = _choose_engine(spec, engine, allow_pickle, trust_remote_code, adapter)
    if engine == "hf":
        model = load(
            source,
            engine=engine,
            check=check,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
        )
        return model.info, model.tokenizer
    if source.folder is None:
        from attnscope.models.own.glass_box import OwnTokenizer, own_info

        return own_info(source.name), OwnTokenizer()
    from attnscope.models.tokenizer import FastTokenizer

    config = read_config(source)
    info = native_info(source, config, sha256=verify(source), engine=engine)
    # Read the headers of the weights alone: names and shapes must be those of the configuration.
    Checkpoint(source.folder, EncoderSettings.from_config(config), "np").names()
    return info, FastTokenizer.open(source.folder)


def _choose_engine(
    spec: str | Source,
    engine: str,
    allow_pickle: bool,
    trust_remote_code: bool,
    adapter: "str | os.PathLike[str] | None",
) -> tuple[Source, str]:
    """Return the files of a model, and the engine that runs it: "native", "numpy" or "hf".

    Raises:
        AttnscopeError: The model cannot be found, or the engine that is asked for does not run it.
    """
    source = spec
    if isinstance(source, str):
        source = resolve(source, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    if adapter is not None:
        source = with_adapter(source, Path(adapter))
    # A model that attnscope makes in memory.
    if source.folder is None:
        if engine in ("hf", "numpy"):
            raise AttnscopeError(f"the {engine} engine has no model {source.name}", "use --engine auto")
        return source, "native"
    # A model from files: native or numpy if that computes it as it is, else hf.
    if engine == "hf":
        return source, "hf"
    reason = _why_not_native(source)
    if reason is None:
        return source, "numpy" if engine == "numpy" else "native"
    if engine == "auto":
        return source, "hf"
    raise AttnscopeError(
        f"the {engine} engine does not run {source.name}: {reason}", "use --engine hf or auto"
    )


def _why_not_native(source: Source) -> str | None:
    """Return why the native engine does not run a model from files, as the end of a sentence; None if it does."""
    if source.is_gguf:
        return "it is a GGUF file"
    if source.adapter is not None:
        return "it has an adapter"
    reason = why_unsupported(read_config(source))
    if reason is not None:
        return reason
    try:
        weight_files(source.files_folder)
    except AttnscopeError as error:
        return error.message
    from attnscope.models import tokenizer

    return tokenizer.explain_slow_tokenizer(source.files_folder)


def _hash_quietly(source: Source) -> None:
    """Hash the files of a model ahead of time; an error comes again where the hash is asked for."""
    with suppress(AttnscopeError):
        verify(source)
