"""Load a Hugging Face model from its files, with its tokenizer and processor.

A model is refused unless its files hold all weights that its attention depends on. Pickles, and Python code that comes
with a model, are loaded only if the user allows it. The *base* of a model is the model without the head for its task.
"""

import contextlib
import hashlib
import importlib.util
import io
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto import processing_auto

from attnscope.errors import AttnscopeError, as_failure, first_line, parse_json
from attnscope.models.catalog import ADAPTER_FILE, Source, verify_sha256
from attnscope.models.devices import DeviceMap, choose_device, describe_device_map, make_spread_options
from attnscope.models.files import file_sha256, weight_files
from attnscope.models.hf.assembling import assemble, processor_kind
from attnscope.models.hf.heads import class_to_load, output_embeddings
from attnscope.models.hf.model import HuggingFaceModel, RawModel
from attnscope.models.hf.parts import (
    Adapter,
    base_of,
    collect_configs,
    describe_quantisation,
    make_wordless_tokenizer,
    merge_adapter,
    mute_transformers,
    notes_on_quantisation,
    picture_tower,
    reads_or_writes_text,
    require_loadable_adapter,
    text_tower,
)
from attnscope.models.hf.senses.cross_readers import choose_cross_reader
from attnscope.models.hf.senses.patch_places import FAMILIES
from attnscope.models.hf.tokenizer import HuggingFaceTokenizer, WordlessTokenizer


def load_huggingface(
    source: Source,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    check: bool | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    device_map: DeviceMap | None = None,
) -> HuggingFaceModel:
    """Load a model and its tokenizer from a folder; `models.load` explains the options and errors."""
    # Check names, files and hashes before transformers loads anything.
    torch_device, torch_dtype = choose_device(device, dtype)
    folder = source.files_folder
    if source.adapter is not None:
        require_loadable_adapter(source.adapter)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    weight_options: dict[str, Any] = {"dtype": torch_dtype}
    if device_map is not None:
        weight_options |= make_spread_options(device_map)
    gguf_name = _gguf_file(source)
    if gguf_name is None:
        files = weight_files(folder, allow_pickle=allow_pickle)
        weight_options["use_safetensors"] = any(path.suffix == ".safetensors" for path in files)
        sha256 = verify_sha256(source)
    else:
        options["gguf_file"] = gguf_name
        sha256 = file_sha256(folder / gguf_name)
    with mute_transformers():
        # Load tokenizer, weights, adapter and processor.
        own_tokenizer = _open_tokenizer(folder, options)
        model, notes = _read_model(source, folder, options, weight_options)
        adapter = Adapter()
        if source.adapter is not None:
            adapter = merge_adapter(model, source.adapter)
            # The hash identifies the model in all results. With an adapter, the model is another one.
            sha256 = hashlib.sha256(f"{sha256}\n{adapter.sha256}\n".encode()).hexdigest()
        base = base_of(model)
        tokenizer, processor = _choose_tokenizer_and_processor(
            source.name, folder, base, own_tokenizer, options
        )
        # Move the model to its device, unless accelerate has spread it over several. Refuse NaN and infinite weights.
        if device_map is None:
            _move_to_device(model, torch_device, source.name)
        else:
            # accelerate sets hf_device_map, module path -> device, if the model is spread; "" is the whole model.
            notes.append(describe_device_map(getattr(model, "hf_device_map", {"": "cpu"})))
        model.train(False).requires_grad_(False)
        _require_finite(model, source.name)
        # The result of the self-check is stored under these hashes. For GGUF, quantised weights, several devices and
        # remote code it depends on more than these files, so the check runs at every load.
        is_plain = gguf_name is None and device_map is None and not describe_quantisation(model.config)
        hashes = None
        if check is not False and is_plain and not trust_remote_code:
            hashes = {"weights": sha256, "config": file_sha256(folder / "config.json")}
            # The adapter's weights are part of sha256 already. Its configuration holds their scale.
            if source.adapter is not None:
                hashes["adapter"] = file_sha256(source.adapter / ADAPTER_FILE)
        raw = RawModel(
            model=model,
            tokenizer=tokenizer,
            name=source.name,
            source=source.origin,
            sha256=sha256,
            notes=tuple(notes),
            processor=processor,
            adapter=adapter,
            hashes=hashes,
            recheck=check is True,
        )
        return assemble(raw, check=check is not False)


def _move_to_device(model: nn.Module, device: torch.device, name: str) -> None:
    """Move a model to a device; refuse one that does not fit there."""
    try:
        # PreTrainedModel's own `to` refuses quantised weights.
        nn.Module.to(model, device)
    except RuntimeError as error:
        raise AttnscopeError(
            f"{name} does not fit on {device}: {first_line(error)}",
            "--device all spreads it over all devices; --dtype bfloat16 takes half the memory",
        ) from error


def _require_finite(model: nn.Module, name: str) -> None:
    """Refuse a model in which a weight is NaN or infinite."""
    for key, parameter in model.named_parameters():
        # A parameter that accelerate left on disk has no values before its layer runs.
        if parameter.is_meta:
            continue
        # The sum is fast. If it is finite, each weight is. If it is not, the sum may have overflowed: test each weight.
        total = parameter.sum(dtype=torch.promote_types(parameter.dtype, torch.float32))
        if not total.isfinite() and not parameter.isfinite().all():
            raise AttnscopeError(
                f"{name} has weights that are no numbers (NaN or infinite), in {key}",
                "get the file again",
            )


# Tokenizer and processor ------------------------------------------------------------------------------------------

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "tekken.json",
    "*.model",
    "source.spm",
    "*.tiktoken",
    "*.gguf",
)
"""Patterns of file names. A folder that holds a tokenizer has a file that matches one of them."""


def _open_tokenizer(folder: Path, options: dict[str, Any]) -> HuggingFaceTokenizer | None:
    """Return the tokenizer in a folder; None if the folder holds no tokenizer, as for models that read no text."""
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        return None
    with _translate_load_errors("tokenizer", folder):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        # If files are missing, transformers makes a tokenizer that has only special tokens.
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
            raise AttnscopeError(
                f"{type(tokenizer).__name__} finds no vocabulary in {folder}",
                "save the model's tokenizer there, as tokenizer.json, or hand it over in Python: "
                "attnscope.load(model, tokenizer)",
            )
        return HuggingFaceTokenizer(tokenizer)


def _choose_tokenizer_and_processor(
    name: str,
    folder: Path,
    base: PreTrainedModel,
    tokenizer: HuggingFaceTokenizer | None,
    options: dict[str, Any],
) -> tuple[HuggingFaceTokenizer | WordlessTokenizer, Any]:
    """Return a model's tokenizer and its processor, which turns pictures or sound into inputs (None = no processor).

    A model that reads no text gets a placeholder for a tokenizer, which refuses texts.

    Args:
        name: The model's name in messages.
        folder: The folder of its files.
        base: The model without its task head.
        tokenizer: The tokenizer in the folder; None = the folder holds no tokenizer.
        options: Options of transformers' `from_pretrained`.
    """
    kind = processor_kind(base)
    tower = picture_tower(base)
    has_processor = holds_processor(folder)
    processor = None
    # A model with a vision tower (CLIP, TrOCR) can also be shown on texts, so its image processor may be missing.
    if kind == "image_processor" and (tower is None or has_processor):
        processor = open_image_processor(folder, options)
    elif kind == "feature_extractor" and has_processor:
        auto: Any = transformers.AutoFeatureExtractor
        with _translate_load_errors("feature extractor", folder):
            processor = auto.from_pretrained(folder, **options)
    elif kind == "processor" and tokenizer is not None and has_processor:
        # For other families, attnscope does not know which token is which part of a picture: they get only texts.
        model_type = base.config.model_type
        if choose_cross_reader(base) is not None or model_type in FAMILIES:
            processor = open_processor(folder, tokenizer.backend, model_type, options)
    # The vision tower of a model with a decoder (TrOCR) can be shown without a tokenizer.
    is_tokenizer_optional = tower is not None and text_tower(base) is None
    if not reads_or_writes_text(base) or (is_tokenizer_optional and tokenizer is None):
        return make_wordless_tokenizer(name, base), processor
    if tokenizer is None:
        raise AttnscopeError(
            f"{folder} holds no tokenizer",
            "save it there: AutoTokenizer.from_pretrained(…).save_pretrained(…), or wrap the model in Python",
        )
    return tokenizer, processor


# Processors -------------------------------------------------------------------------------------------------------

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files that hold the settings of an image processor, a feature extractor, or a processor of both kinds of input."""


def holds_processor(folder: Path) -> bool:
    """Return whether a folder holds a processor."""
    return any((folder / name).is_file() for name in PROCESSOR_FILES)


def open_image_processor(folder: Path, options: Mapping[str, Any]) -> Any:
    """Return the image processor in a folder. It uses Pillow even if torchvision is installed."""
    if not holds_processor(folder):
        raise AttnscopeError(
            f"{folder} holds no image processor",
            "save it there as preprocessor_config.json: AutoImageProcessor.from_pretrained(…).save_pretrained(…)",
        )
    class_name = _read_settings(folder / PROCESSOR_FILES[0]).get("image_processor_type")
    auto: Any = transformers.AutoImageProcessor
    with _translate_load_errors("image processor", folder):
        # DINOv3's image processor needs torchvision. ViT's does the same, but rounds the colours after resizing.
        if class_name in ("DINOv3ViTImageProcessor", "DINOv3ViTImageProcessorFast"):
            return transformers.ViTImageProcessorPil.from_pretrained(folder, **options)
        return auto.from_pretrained(folder, backend="pil", **options)


def open_processor(folder: Path, tokenizer: Any, model_type: str, options: Mapping[str, Any]) -> Any:
    """Return the processor of pictures with words in a folder. Its image processor needs only Pillow.

    Its class is the first one that a file names, otherwise the class that transformers has for the model type.
    """
    parts = {"image_processor": open_image_processor(folder, options), "tokenizer": tokenizer}
    files = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
    names = [_read_settings(folder / name).get("processor_class") for name in files]
    names.append(processing_auto.PROCESSOR_MAPPING_NAMES.get(model_type))  # type: ignore[attr-defined]
    class_name = next(filter(None, names), "")
    named_class: Any = getattr(transformers, str(class_name), None)
    if named_class is None:
        raise AttnscopeError(
            f"{folder} names no processor for pictures and words that transformers has",
            "save it there: AutoProcessor.from_pretrained(…).save_pretrained(…)",
        )
    with _translate_load_errors("processor", folder):
        # Make the processor from these parts. transformers would load other parts, which need torchvision.
        processor_class = drop_video_processor(named_class)
        settings, _ = processor_class.get_processor_dict(folder, local_files_only=True)
        arguments = [parts.get(name) for name in named_class.get_attributes()]
        return processor_class.from_args_and_dict(arguments, settings)


def drop_video_processor(processor_class: Any) -> Any:
    """Return a subclass of a processor class, with the same name, that needs no video processor."""
    attributes = [name for name in processor_class.get_attributes() if "video" not in name]
    methods = {"get_attributes": classmethod(lambda cls: attributes)}
    return type(processor_class.__name__, (processor_class,), methods)


def _read_settings(path: Path) -> dict[str, Any]:
    """Return the settings in a JSON file; {} if the file cannot be read."""
    try:
        return dict(parse_json(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _translate_load_errors(part: str, folder: Path) -> contextlib.AbstractContextManager[None]:
    """Return a context that turns any error into one line about the files of a part, such as "tokenizer"."""
    return as_failure(
        f"cannot load the {part} in {folder}", "get its files again, or install what it needs"
    )


# Weights ----------------------------------------------------------------------------------------------------------


def _read_model(
    source: Source,
    folder: Path,
    options: dict[str, Any],
    weight_options: dict[str, Any],
    auto: Any = None,
) -> tuple[PreTrainedModel, list[str]]:
    """Return the model in a folder, and notes on weights that the files lack or hold in addition.

    Args:
        source: The origin of the model.
        folder: The folder of its files.
        options: Options of transformers' `from_pretrained`, for the configuration and the weights.
        weight_options: More options, for the weights only.
        auto: The class of transformers that loads it; None = choose it by `class_to_load`.

    Raises:
        AttnscopeError: It does not load, or weights that attention depends on are missing or have another shape.
    """
    config: Any = None
    is_gguf = "gguf_file" in options
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **options)
        # Drop the attention kernel that the files ask for, such as flash_attention_2: attnscope replaces it.
        for part in collect_configs(config):
            part._attn_implementation_internal = None
        auto = auto or class_to_load(config, is_gguf=is_gguf)
        # transformers shows a progress bar for GGUF files that cannot be switched off.
        with contextlib.redirect_stderr(io.StringIO()) if is_gguf else contextlib.nullcontext():
            model, report = auto.from_pretrained(
                folder,
                config=config,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                # No such subfolder exists. Otherwise transformers would load an adapter in the folder, and `report`
                # would be about the adapter.
                adapter_kwargs={"subfolder": "none"},
                **options,
                **weight_options,
            )
    except Exception as error:
        # Transformers, safetensors and torch raise exceptions of any class on damaged files.
        raise _explain_load_error(error, source, config) from error
    # transformers initialises weights at random if they are missing or have another shape.
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        key, own_shape, expected = mismatched[0]
        raise AttnscopeError(
            f"{source.name} holds {len(mismatched)} weights that do not fit config.json, such as {key} of shape "
            f"{tuple(own_shape)} instead of {tuple(expected)}",
            "config.json and the weights belong to different models",
        )
    # Only parts on top of the base model, such as a classifier, may be missing.
    top_parts = {key: top_part_of(key, model) for key in sorted(report["missing_keys"])}
    needed = [key for key, part in top_parts.items() if not part]
    if needed:
        raise AttnscopeError(
            f"{source.name} lacks {len(needed)} weights, such as {needed[0]}, and random ones would take their place",
            "the files are incomplete, or of another model than config.json describes",
        )
    # Note parts that the files lack, and parts that they hold in addition.
    missing_parts = sorted(set(top_parts.values()))
    notes = list(notes_on_quantisation(config))
    if missing_parts:
        notes.append(
            f"The files hold no {' and no '.join(missing_parts)}; attention does not depend on it."
        )
    if not describe_quantisation(config):
        notes += notes_on_extras(model, report["unexpected_keys"], source.name)
    # A head with random weights would predict noise, so return only the base model. A class that is its own base model,
    # head included (T5), is loaded again, as a model without the head.
    if any(part != "pooler" for part in missing_parts):
        if model.base_model is model:
            model = _read_model(source, folder, options, weight_options, transformers.AutoModel)[0]
        model = model.base_model
    return model, notes


def _explain_load_error(error: Exception, source: Source, config: Any) -> AttnscopeError:
    """Return the error that says why a model does not load; `config` is None if that could not be read either."""
    line = first_line(error)
    quantised = describe_quantisation(config)
    if "trust_remote_code" in str(error) or "custom code" in str(error):
        return AttnscopeError(
            f"{source.name} brings its own Python code, which could do anything",
            "--trust-remote-code if you have read it and trust it",
        )
    if quantised:
        return AttnscopeError(
            f"{source.name} is {quantised}, and cannot be loaded here: {line}",
            "name the checkpoint with unquantised weights, or install what it needs",
        )
    return AttnscopeError(
        f"cannot load {source.name} with transformers {transformers.__version__}: {line}",
        "a package is missing, the files are damaged, or of a model that it does not know",
    )


def top_part_of(key: str, model: PreTrainedModel) -> str:
    """Return the part on top of the base model that a weight belongs to, such as "lm_head"; "" if it is in the base.

    The position of the part in the model decides, not its name: "classifier" may be in a router. Only the pooler counts
    as on top although it is in the base model, because attention does not depend on it.
    """
    part = _first_module(key, model)
    if part == "pooler":
        return part
    # Every weight outside of the base model is on top of it.
    if model.base_model is not model:
        return "" if key.startswith(f"{model.base_model_prefix}.") else part
    # A model that is its own base has at most the output embeddings on top.
    head = output_embeddings(model)
    if head is not None and model._modules.get(part) is head:
        return part
    return ""


# Weights in old files that current models compute (masks, positions) or do not use (version marks)
_UNUSED_WEIGHT = re.compile(
    r"(^|\.)(position_ids|inv_freq|masked_bias|causal_mask|version|num_batches_tracked)$"
    r"|(attn|attention)\.bias$|_scale$"
)


def notes_on_extras(model: PreTrainedModel, unexpected: Collection[str], name: str) -> list[str]:
    """Return a note on weights in the files that the model does not have.

    Args:
        model: The loaded model.
        unexpected: Names of the weights that transformers could not assign to a parameter.
        name: The model's name in messages.

    Raises:
        AttnscopeError: A weight belongs to a part that the base model has, so that part would be computed without it.
    """
    buffers = dict(model.named_buffers())
    extras = [key for key in sorted(unexpected) if key not in buffers and not _UNUSED_WEIGHT.search(key)]
    parts = {key: _first_module(key, model) for key in extras}
    modules = model.base_model._modules
    needed = [key for key, part in parts.items() if part != "pooler" and modules.get(part) is not None]
    if needed:
        raise AttnscopeError(
            f"{name} holds {len(needed)} weights that its config.json has no place for, such as {needed[0]}: attention "
            "would be computed without them",
            "give the config.json that belongs to the weights",
        )
    names = ", ".join(sorted(set(parts.values())))
    return [f"The files also hold {names}, which is not part of what is shown."] if parts else []


def _first_module(key: str, model: PreTrainedModel) -> str:
    """Return the top module of the base model that a weight belongs to: "bert.encoder.layer.0.…" -> "encoder".

    The prefix "bert" is the base model's name within a model with a head. Files of the base model may have it too.
    """
    prefix = model.base_model_prefix
    # If a base model has a module of that name, the name is no prefix.
    if model.base_model is not model or prefix not in model._modules:
        key = key.removeprefix(f"{prefix}.")
    return key.partition(".")[0]


# GGUF -------------------------------------------------------------------------------------------------------------


def read_gguf_config(source: Source) -> dict[str, Any]:
    """Return the configuration in a GGUF file, as transformers reads it."""
    folder = source.files_folder
    with mute_transformers(), _translate_load_errors("configuration", folder):
        config = transformers.AutoConfig.from_pretrained(
            folder, gguf_file=_gguf_file(source), local_files_only=True
        )
        return dict(config.to_dict())


def _gguf_file(source: Source) -> str | None:
    """Return the name of a model's GGUF file: `source.file`, or the only one in its folder; None if it is not GGUF."""
    if not source.is_gguf:
        return None
    folder = source.files_folder
    files = [source.file] if source.file else sorted(path.name for path in folder.glob("*.gguf"))
    if len(files) > 1:
        raise AttnscopeError(
            f"{folder} holds {len(files)} GGUF files, such as {files[0]}",
            f"name one of them: {folder / files[0]}",
        )
    if not all(importlib.util.find_spec(package) for package in ("gguf", "accelerate")):
        raise AttnscopeError(
            f"{files[0]} needs the packages gguf and accelerate", "pip install gguf accelerate"
        )
    return files[0]
