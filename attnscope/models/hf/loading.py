"""A Hugging Face model from its files.

What is loaded is what the files hold, or nothing: no pickles and no code of strangers unless asked for, no layer that
was never trained.
"""

import contextlib
import hashlib
import importlib.util
import io
import itertools
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto import processing_auto

from attnscope.errors import AttnscopeError, first_line, parse_json
from attnscope.models.catalog import ADAPTER, Source, verify
from attnscope.models.devices import DeviceMap, choose_device, describe_spread, spreading_options
from attnscope.models.files import file_sha256, holds_gguf, weight_files
from attnscope.models.hf.assembling import assemble, processor_kind
from attnscope.models.hf.heads import class_to_load, output_embeddings
from attnscope.models.hf.model import HuggingFaceModel, RawModel
from attnscope.models.hf.parts import (
    Adapter,
    base_of,
    load_errors,
    merge,
    notes_on_quantisation,
    picture_tower,
    quantisation,
    reads_or_writes_text,
    require_peft,
    silence,
    text_tower,
    wordless,
)
from attnscope.models.hf.seam import parts_of_config
from attnscope.models.hf.senses.cross_readers import cross_reader
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
    # Check names, files and hashes before transformers is asked for anything.
    where, precision = choose_device(device, dtype)
    folder = source.folder
    if folder is None:
        raise AttnscopeError(f"{source.name} has no files", "wrap a model in memory instead")
    if source.adapter is not None:
        require_peft(source.adapter)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    weight_options: dict[str, Any] = {} if device_map is None else spreading_options(device_map)
    weight_options["dtype"] = precision
    gguf = _gguf_file(source, folder)
    if gguf is None:
        files = weight_files(folder, allow_pickle=allow_pickle)
        weight_options["use_safetensors"] = any(path.suffix == ".safetensors" for path in files)
        sha256 = verify(source)
    else:
        options["gguf_file"] = gguf
        sha256 = file_sha256(folder / gguf)
    with silence():
        # Read tokenizer, weights, adapter and processor.
        own_tokenizer = _open_tokenizer(folder, options)
        model, notes = _read_model(source, folder, options, weight_options)
        adapter = Adapter()
        if source.adapter is not None:
            adapter = merge(model, source.adapter)
            # By its hash a model is known again, everywhere: with an adapter it is another one.
            sha256 = hashlib.sha256(f"{sha256}\n{adapter.sha256}\n".encode()).hexdigest()
        tokenizer, processor = _readers(source, folder, base_of(model), own_tokenizer, options)
        # Move the model to its device, unless accelerate has spread it, and check its numbers.
        if device_map is None:
            _move(model, where, source.name)
        else:
            notes.append(describe_spread(getattr(model, "hf_device_map", {"": "cpu"})))
        model.train(False).requires_grad_(False)
        _require_finite(model, source.name)
        # The verdict of the check is remembered by hashes, but only of plain weights on one device: of others it
        # depends on more.
        is_plain = gguf is None and device_map is None and not quantisation(model.config)
        hashes = None
        if check is not False and is_plain and not trust_remote_code:
            hashes = {"weights": sha256, "config": file_sha256(folder / "config.json")}
            # The adapter's own hash is of its weights; its configuration scales them.
            if source.adapter is not None:
                hashes["adapter"] = file_sha256(source.adapter / ADAPTER)
        raw = RawModel(
            model,
            tokenizer,
            source.name,
            source.origin,
            sha256,
            tuple(notes),
            processor,
            adapter,
            hashes,
            again=check is True,
        )
        return assemble(raw, check=check is not False)


def _move(model: nn.Module, device: torch.device, name: str) -> None:
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
    """Refuse weights of which some are NaN or infinite."""
    for key, parameter in model.named_parameters():
        if parameter.is_meta:  # it lies on disk, and is read when its layer runs
            continue
        # A finite sum clears all weights at once; one that is not may have overflowed: look at each weight.
        total = parameter.sum(dtype=torch.promote_types(parameter.dtype, torch.float32))
        if not bool(total.isfinite()) and not bool(parameter.isfinite().all()):
            raise AttnscopeError(
                f"{name} has weights that are no numbers (NaN or infinite), in {key}",
                "get the file again",
            )


# What makes its input ---------------------------------------------------------------------------------------------

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "merges.txt", "tekken.json"),
    *("*.model", "source.spm", "*.tiktoken", "*.gguf"),
)
"""Patterns of the files of which a folder with a tokenizer has at least one."""


def _open_tokenizer(folder: Path, options: dict[str, Any]) -> HuggingFaceTokenizer | None:
    """Return the tokenizer of a folder; None where it holds none, as with models that read no text."""
    files = itertools.chain.from_iterable(map(folder.glob, _TOKENIZER_FILES))
    if next(files, None) is None:
        return None
    with load_errors("tokenizer", folder):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
            # Where a class does not find the files it wants, transformers makes a tokenizer that knows no word.
            raise AttnscopeError(
                f"{type(tokenizer).__name__} finds no vocabulary in {folder}",
                "save the model's tokenizer there, as tokenizer.json, or hand it over in Python: "
                "attnscope.load(model, tokenizer)",
            )
        return HuggingFaceTokenizer(tokenizer)


def _readers(
    source: Source,
    folder: Path,
    base: PreTrainedModel,
    tokenizer: HuggingFaceTokenizer | None,
    options: dict[str, Any],
) -> tuple[HuggingFaceTokenizer | WordlessTokenizer, Any]:
    """Return a model's tokenizer, and its processor of pictures or sound; None = it needs or has none.

    Args:
        source: Where the model is from.
        folder: Its files.
        base: The model without its head.
        tokenizer: What the files hold; None = no tokenizer.
        options: Of transformers' `from_pretrained`.
    """
    # Beside a tower for pictures (CLIP), or behind one (TrOCR), texts are read without a processor too.
    kind = processor_kind(base)
    tower = picture_tower(base)
    processor = None
    if kind == "image_processor" and (tower is None or holds_processor(folder)):
        processor = open_image_processor(folder, options)
    elif kind == "feature_extractor" and holds_processor(folder):
        hearing: Any = transformers.AutoFeatureExtractor
        with load_errors("feature extractor", folder):
            processor = hearing.from_pretrained(folder, **options)
    elif kind == "processor" and tokenizer is not None and holds_processor(folder):
        model_type = base.config.model_type
        if cross_reader(base) is not None or model_type in FAMILIES:
            processor = open_processor(folder, tokenizer.backend, model_type, options)
    # Behind a tower a tokenizer is optional: the tower is shown without.
    is_wordless = not reads_or_writes_text(base) or (kind == "image_processor" and tower is None)
    is_optional = tower is not None and text_tower(base) is None
    if is_wordless or (is_optional and tokenizer is None):
        return wordless(source.name, base), processor
    if tokenizer is None:
        raise AttnscopeError(
            f"{folder} holds no tokenizer",
            "save it there: AutoTokenizer.from_pretrained(…).save_pretrained(…), or wrap the model in Python",
        )
    return tokenizer, processor


# Processors -------------------------------------------------------------------------------------------------------

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files that say how photos, or recordings, are made into what a model reads."""


def holds_processor(folder: Path) -> bool:
    """Return whether a folder holds a processor."""
    return any((folder / name).is_file() for name in PROCESSOR_FILES)


def open_image_processor(folder: Path, options: Mapping[str, Any]) -> Any:
    """Return the image processor of a folder, by Pillow, so that nothing depends on what is installed."""
    if not holds_processor(folder):
        raise AttnscopeError(
            f"{folder} holds no image processor",
            "save it there as preprocessor_config.json: AutoImageProcessor.from_pretrained(…).save_pretrained(…)",
        )
    class_name = _read_settings(folder / PROCESSOR_FILES[0]).get("image_processor_type")
    auto: Any = transformers.AutoImageProcessor
    with load_errors("image processor", folder):
        if class_name in ("DINOv3ViTImageProcessor", "DINOv3ViTImageProcessorFast"):
            # It is there for torchvision alone, and does what ViT's does, but that it resizes before it rounds.
            return transformers.ViTImageProcessorPil.from_pretrained(folder, **options)
        return auto.from_pretrained(folder, backend="pil", **options)


def open_processor(folder: Path, tokenizer: Any, model_type: str, options: Mapping[str, Any]) -> Any:
    """Return the processor of a folder for pictures and words, with an image processor that needs Pillow alone.

    Where no file names its class, it is the one of the model's type.
    """
    parts = {"image_processor": open_image_processor(folder, options), "tokenizer": tokenizer}
    # Find the class of the processor: its own file says it first.
    files = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
    names = [_read_settings(folder / name).get("processor_class") for name in files]
    names.append(getattr(processing_auto, "PROCESSOR_MAPPING_NAMES", {}).get(model_type))
    class_name = next((name for name in names if isinstance(name, str)), "")
    named_class = getattr(transformers, class_name, None)
    if not isinstance(named_class, type):
        raise AttnscopeError(
            f"{folder} names no processor for pictures and words that transformers has",
            "save it there: AutoProcessor.from_pretrained(…).save_pretrained(…)",
        )
    processor_class: Any = without_videos(named_class)
    lacking = set(processor_class.get_attributes()) - set(parts)
    if lacking:
        raise AttnscopeError(
            f"{processor_class.__name__} takes more than pictures and words: {min(lacking)}"
        )
    with load_errors("processor", folder):
        # The parts are handed over, so that transformers loads none that needs torchvision.
        settings, _ = processor_class.get_processor_dict(folder, local_files_only=True)
        arguments = [parts.get(name) for name in named_class.get_attributes()]  # type: ignore[attr-defined]
        return processor_class.from_args_and_dict(arguments, settings)


def without_videos(kind: type) -> type:
    """Return a class of processors that takes pictures and words, and is made without what is for videos."""
    attributes = [name for name in kind.get_attributes() if "video" not in name]  # type: ignore[attr-defined]
    return type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda cls: list(attributes))})


def _read_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a JSON file; {} where it cannot be read."""
    try:
        settings = parse_json(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


# Weights ----------------------------------------------------------------------------------------------------------


def _read_model(
    source: Source,
    folder: Path,
    options: dict[str, Any],
    weight_options: dict[str, Any],
    auto: Any = None,
) -> tuple[PreTrainedModel, list[str]]:
    """Return the model as its files hold it, and notes on what they lack or hold beyond it.

    Args:
        source: Where the model is from.
        folder: Its files.
        options: Of transformers' `from_pretrained`.
        weight_options: More of these, that only the weights need.
        auto: The class of transformers that loads it; None = the one that fits.
    """
    config: Any = None
    is_gguf = "gguf_file" in options
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **options)
        # Drop a kernel that the files ask for, such as flash_attention_2: the seam takes its place.
        for part in parts_of_config(config):
            part._attn_implementation_internal = None
        auto = auto or class_to_load(config, is_gguf=is_gguf)
        # No switch turns off the progress bar of the reader of GGUF files.
        with contextlib.redirect_stderr(io.StringIO()) if is_gguf else contextlib.nullcontext():
            model, report = auto.from_pretrained(
                folder,
                config=config,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                # peft would else put an adapter that lies beside the model into it, and report on that alone.
                adapter_kwargs={"subfolder": "none"},
                **options,
                **weight_options,
            )
    except Exception as error:
        # Transformers, safetensors and torch raise what they like on damaged files.
        raise _explain(error, source, config) from error
    # Weights of another shape, or missing ones, would be random: only what is on top, as a classifier, may lack them.
    wrong = sorted(report["mismatched_keys"])
    if wrong:
        key, own_shape, expected = wrong[0]
        raise AttnscopeError(
            f"{source.name} holds {len(wrong)} weights that do not fit config.json, such as {key} of shape "
            f"{tuple(own_shape)} instead of {tuple(expected)}",
            "config.json and the weights belong to different models",
        )
    top_parts = {key: top_part_of(key, model) for key in sorted(report["missing_keys"])}
    needed = [key for key, part in top_parts.items() if not part]
    if needed:
        raise AttnscopeError(
            f"{source.name} lacks {len(needed)} weights, such as {needed[0]}, and random ones would take their place",
            "the files are incomplete, or of another model than config.json describes",
        )
    # Notes on what the files lack and what they hold beyond the model.
    missing = sorted(set(top_parts.values()))
    notes = [*notes_on_quantisation(config)]
    if missing:
        notes.append(f"The files hold no {' and no '.join(missing)}; attention does not depend on it.")
    if not quantisation(config):
        notes += notes_on_extras(model, report["unexpected_keys"], source.name)
    # A part on top without weights would write noise: go on with the base model alone.
    if any(part != "pooler" for part in missing):
        if model.base_model is model:
            model = _read_model(source, folder, options, weight_options, transformers.AutoModel)[0]
        model = model.base_model
    return model, notes


def _explain(error: Exception, source: Source, config: Any) -> AttnscopeError:
    """Return the error that says why a model does not load; `config` is None where not even that could be read."""
    line = first_line(error)
    quantised = quantisation(config)
    if isinstance(error, AttnscopeError):
        return error
    if "trust_remote_code" in str(error) or "custom code" in str(error):
        message = f"{source.name} brings its own Python code, which could do anything"
        return AttnscopeError(message, "--trust-remote-code if you have read it and trust it")
    if quantised:
        message = f"{source.name} is {quantised}, and cannot be loaded here: {line}"
        return AttnscopeError(
            message, "name the checkpoint with unquantised weights, or install what it needs"
        )
    return AttnscopeError(
        f"cannot load {source.name} with transformers {transformers.__version__}: {line}",
        "a package is missing, the files are damaged, or of a model that it does not know",
    )


def top_part_of(key: str, model: PreTrainedModel) -> str:
    """Return the part on top of the base model that a weight belongs to; "" for one of the base model's own.

    A part is on top by its place in the model, never by its name: routers have classifiers too. The pooler alone lies
    within base models, beside the layers.
    """
    first, _, rest = _name_in_base(key, model).partition(".")
    if first == "pooler":
        return first
    # On top is all that is outside the base model.
    if model.base_model is not model:
        return "" if key.startswith(f"{model.base_model_prefix}.") else first
    # A model that is its own base has at most the output embeddings on top.
    top = output_embeddings(model)
    return first if rest and top is not None and model._modules.get(first) is top else ""


# Old files hold numbers that are computed today, as masks of all positions, or that only marked something.
_COMPUTED = re.compile(
    r"(^|\.)(position_ids|inv_freq|masked_bias|causal_mask|version|num_batches_tracked)$"
    r"|(attn|attention)\.bias$|_scale$"
)


def notes_on_extras(model: PreTrainedModel, unexpected: Collection[str], name: str) -> list[str]:
    """Return a note on the weights that the files hold beyond the model.

    Raises:
        AttnscopeError: A part of the base model that is there would use these weights.
    """
    buffers = {key for key, _ in model.named_buffers()}
    extras = [key for key in sorted(unexpected) if key not in buffers and not _COMPUTED.search(key)]
    parts = {key: _name_in_base(key, model).partition(".")[0] for key in extras}
    modules = model.base_model._modules
    used = [key for key, part in parts.items() if part != "pooler" and modules.get(part) is not None]
    if used:
        raise AttnscopeError(
            f"{name} holds {len(used)} weights that its config.json has no place for, such as {used[0]}: attention "
            "would be computed without them",
            "give the config.json that belongs to the weights",
        )
    names = ", ".join(sorted(set(parts.values())))
    return [f"The files also hold {names}, which is not part of what is shown."] if parts else []


def _name_in_base(key: str, model: PreTrainedModel) -> str:
    """Return a weight's name as the base model has it; files may put the family's prefix before a base model's own."""
    prefix = model.base_model_prefix
    # In some base models a part has the prefix's name: it belongs to the name of the weight.
    if model.base_model is model and prefix in model._modules:
        return key
    return key.removeprefix(f"{prefix}.")


# GGUF -------------------------------------------------------------------------------------------------------------


def read_gguf_config(source: Source) -> dict[str, Any]:
    """Return the configuration in a GGUF file, as transformers reads it."""
    folder = source.folder
    assert folder is not None
    gguf = _gguf_file(source, folder)
    with silence(), load_errors("configuration", folder):
        config = transformers.AutoConfig.from_pretrained(folder, gguf_file=gguf, local_files_only=True)
        settings: dict[str, Any] = config.to_dict()
        return settings


def _gguf_file(source: Source, folder: Path) -> str | None:
    """Return the GGUF file that is meant: the one that was named, or that of a folder that holds no other weights."""
    if not source.file and not holds_gguf(folder):
        return None
    files = [source.file] if source.file else sorted(path.name for path in folder.glob("*.gguf"))
    if len(files) > 1:
        hint = f"name one of them: {folder / files[0]}"
        raise AttnscopeError(f"{folder} holds {len(files)} GGUF files, such as {files[0]}", hint)
    if not all(importlib.util.find_spec(package) for package in ("gguf", "accelerate")):
        raise AttnscopeError(
            f"{files[0]} needs the packages gguf and accelerate", "pip install gguf accelerate"
        )
    return files[0]
