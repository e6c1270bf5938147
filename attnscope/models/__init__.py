"""Load models by name, with their tokenizers.

A loaded model computes all attention in one function, the *seam*, where a probe (a hook) can watch or change it.

Three engines run models. "native" runs BERT-family weights on the project's own attention (`models.own`), and so the
models of BUILT_IN, which attnscope makes in memory. "numpy" runs BERT-family weights without torch. "hf" runs any
transformers model. Importing this module imports neither torch nor transformers; loading a model does.
"""

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from attnscope.core.plain_torch import with_default_torch
from attnscope.errors import AttnscopeError, UsageError, require_choice
from attnscope.models.catalog import BUILT_IN, Source, read_config, resolve, verify_sha256, with_adapter
from attnscope.models.files import weight_files
from attnscope.models.info import ModelInfo
from attnscope.models.model import Batch, Model, Tokenizer
from attnscope.models.own.layouts import Checkpoint, EncoderSettings, describe_native, why_unsupported

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


# Inside, the caller's autocast, inference mode and default device are switched off.
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
        spec: One of these:
            - the name of a model: a catalogue name, a folder, a GGUF file or a Hub id. The folder may hold only an
              adapter that names its base model;
            - a Source, which `resolve` makes from a name;
            - a transformers model in memory, which peft may have wrapped;
            - with `inputs`, any torch module in memory.
        tokenizer: The tokenizer of a transformers model in memory. Without one, texts are token ids ("17 4 9").
        inputs: The arguments of a torch module's forward, for a module that reads no text: a tensor, a tuple by
            position, or a mapping by name. Each sequence in the batch becomes a text.
        labels: Names of the positions of a sequence: a list, range(0, 96, 8), a grid such as (4, 6), or one list per
            sequence; None = numbers. Only attention with as many positions as there are labels is shown.
        engine: "native" (BERT-family weights on the project's own attention), "hf" (transformers), "numpy" (BERT-family
            weights without torch, to look at single texts), or "auto": native if it supports the model, else hf.
        device: The device by its torch name; "auto" = the first that is available of cuda, mps and cpu; "all" = as
            `device_map="auto"`.
        dtype: Precision to compute with.
        check: Whether a Hugging Face model is compared with its own eager attention first. True: always. False: never.
            None: unless the model is from files that were compared before.
        allow_pickle: Whether weights may be pickles, which can run any code, if there are no safetensors.
        trust_remote_code: Whether Python code that comes with the model may run.
        device_map: "auto" to let accelerate (extra `[accelerate]`) spread a model over all devices, and over memory and
            disk if it does not fit there; or the device of each module. Only for the engine "hf".
        adapter: The folder of a peft adapter (extra `[peft]`), such as LoRA, that is merged into the weights.

    Raises:
        AttnscopeError: The model cannot be loaded, or attnscope cannot show its true attention; the message says why.
    """
    require_engine_and_dtype(engine, dtype)
    if device == "all":
        device = "cpu"
        device_map = "auto"
    # A model in memory.
    if isinstance(spec, os.PathLike):
        spec = os.fspath(spec)
    if not isinstance(spec, str | Source):
        if engine not in ("auto", "hf") or device != "cpu" or dtype != "float32" or adapter is not None:
            raise UsageError(
                "a model in memory stays as it is",
                "move, cast or adapt (peft) it yourself, and leave out the options",
            )
        # No earlier comparison is stored for a model in memory, so check=None means True here.
        return _load_from_memory(spec, tokenizer, inputs, labels, check is not False)
    # Refuse options that do not apply to a model from files.
    if inputs is not None or labels is not None:
        raise UsageError(
            "inputs go with a torch module in memory", "load the module, and give it instead of a name"
        )
    if tokenizer is not None:
        raise UsageError(
            f"{spec} brings its own tokenizer", "a tokenizer goes with a transformers model in memory"
        )
    _require_device_options(spec, engine, device, dtype, device_map)
    # Find the files, and the engine that runs them.
    if device_map is not None:
        engine = "hf"
    source, engine = _choose_engine(spec, engine, allow_pickle, trust_remote_code, adapter)
    if source.adapter is not None and device_map is not None:
        raise UsageError("an adapter is merged on one device", "leave out --device all")
    # Hash the weights while torch is imported. `file_sha256` stores the hash under a lock; loading asks for it later.
    threading.Thread(target=_hash_ahead, args=(source,), daemon=True).start()
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
    # A model of BUILT_IN has no files.
    if source.folder is None:
        from attnscope.models.own.glass_box import load_own

        return load_own(source.name, device=device, dtype=dtype)
    from attnscope.models.own.native import load_native

    return load_native(source, device=device, dtype=dtype)


def _require_device_options(
    spec: str | Source, engine: str, device: str, dtype: str, device_map: "DeviceMap | None"
) -> None:
    """Refuse a device, a device map or a precision that the engine or the model does not support."""
    is_default_device = device in ("cpu", "auto")
    if device_map is not None:
        if engine in ("native", "numpy") or not is_default_device:
            raise UsageError(
                "a device map goes with --engine hf, and instead of a device",
                "leave out the other option",
            )
        # A built-in model given as a Source is refused later, as a device map asks for the engine "hf".
        if spec in BUILT_IN:
            raise UsageError(f"{spec} is small enough for any device", "leave out --device all")
    if engine == "numpy" and not (is_default_device and dtype == "float32"):
        raise UsageError(
            "the numpy engine computes on the CPU, in float32",
            "leave out --device and --dtype, or take --engine native",
        )


def _load_from_memory(
    module: Any, tokenizer: Any, inputs: Any, labels: "Labels | None", check: bool
) -> Model:
    """Make a Model from a transformers model in memory, or, with `inputs`, from any torch module."""
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
    """Return a model's configuration: config.json, or the configuration that transformers reads from a GGUF file."""
    if source.is_gguf:
        from attnscope.models.hf.loading import read_gguf_config

        return read_gguf_config(source)
    return read_config(source)


def open_tokenizer(source: Source) -> Tokenizer | None:
    """Return the tokenizer of a model that the native engine runs, without loading torch; None for any other model."""
    if source.folder is None or _explain_not_native(source) is not None:
        return None
    from attnscope.models.tokenizer import FastTokenizer

    return FastTokenizer.open(source.folder)


# As for `load`, the caller's settings of torch are switched off inside.
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
    """Return the facts about a model, such as its layers, heads and hash, and its tokenizer.

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
        from attnscope.models.own.glass_box import OwnTokenizer, describe_own

        return describe_own(source.name), OwnTokenizer()
    from attnscope.models.tokenizer import FastTokenizer

    config = read_config(source)
    info = describe_native(source, config, sha256=verify_sha256(source), engine=engine)
    # Read only the headers of the weights. This raises if their names or shapes do not fit the configuration.
    Checkpoint(source.folder, EncoderSettings.from_config(config), "np").match_names()
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
        AttnscopeError: The model cannot be found, or the requested engine does not run it.
    """
    source = spec
    if isinstance(source, str):
        source = resolve(source, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    if adapter is not None:
        source = with_adapter(source, Path(adapter))
    # A model of BUILT_IN, which attnscope makes in memory.
    if source.folder is None:
        if engine in ("hf", "numpy"):
            raise AttnscopeError(f"the {engine} engine has no model {source.name}", "use --engine auto")
        return source, "native"
    # A model from files: "native" or "numpy" if they support it, else "hf".
    if engine == "hf":
        return source, "hf"
    reason = _explain_not_native(source)
    if reason is None:
        return source, "numpy" if engine == "numpy" else "native"
    if engine == "auto":
        return source, "hf"
    raise AttnscopeError(
        f"the {engine} engine does not run {source.name}: {reason}", "use --engine hf or auto"
    )


def _explain_not_native(source: Source) -> str | None:
    """Return why the native engine does not run a model from files, such as "it is a GGUF file"; None if it does."""
    if source.is_gguf:
        return "it is a GGUF file"
    if source.adapter is not None:
        return "it has an adapter"
    reason = why_unsupported(read_config(source))
    if reason is not None:
        return reason
    # Called for the error that it raises if there are no safetensors. `files_folder` is `folder`, without None in its
    # type: a model from files has one.
    try:
        weight_files(source.files_folder)
    except AttnscopeError as error:
        return error.message
    from attnscope.models import tokenizer

    return tokenizer.explain_slow_tokenizer(source.files_folder)


def _hash_ahead(source: Source) -> None:
    """Hash the files of a model ahead of time. Ignore errors: loading asks for the hash again, and raises them."""
    with suppress(AttnscopeError):
        verify_sha256(source)
