"""Find out the kind (encoder, decoder, cross) and the layer of each attention of a model, and store the result.

`hf.check` runs the model on a small input, and hands its attentions to `read_survey`. The kinds of an encoder-decoder
differ in their numbers of queries and keys. Any other model is a decoder if no query attends to a later key. The layer
is the number that a module carries; if modules carry none, it is the position in the order of computation.

The *seam* is our attention function, which transformers calls in place of its own. A model that never calls it takes
the "eager" path: it returns its attention weights itself. `hf.check` compares the attention with the model's own. The
*verdict* is the survey of a model that passed; `SurveyCache` stores it for later loads.
"""

import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnscope.core.attention.probes import LayerKey
from attnscope.core.attention.seam import Kind
from attnscope.errors import AttnscopeError, amount, parse_json
from attnscope.models.files import file_sha256
from attnscope.models.hf.parts import first_setting, hidden_states
from attnscope.models.hf.seam import Plan, TracedAttention, choose_implementation
from attnscope.questions.maps import format_ranges
from attnscope.results.storage import write_whole

KINDS: tuple[Kind, ...] = get_args(Kind)


class UnclearError(Exception):  # noqa: N818 - no error: `hf.check` then tries the eager path
    """Report that some attention of a model does not pass the seam, or that its layers cannot be told apart."""


@dataclass(frozen=True, eq=False)
class AttentionSurvey:
    """Describe a model's attention layers: kinds, sizes, the modules that compute them, and how they were checked.

    Attributes:
        path: "seam", or "eager" if only the attention weights that the model itself returns can be shown.
        layers: Kind -> numbers of the layers that have attention, in the order of computation.
        n_layers: Kind -> number of layers, with and without attention.
        n_heads: Kind -> number of query heads of a layer; the largest, where layers differ.
        n_kv_heads: Kind -> number of key/value heads of a layer; equal to `n_heads`, where layers differ.
        d_model: Width of the hidden states.
        plan: Attention module -> the layer key of each of its calls in one forward pass. Empty on the eager path.
        order: The layer keys, such as ("cross", 3), in the order of computation; empty in a survey from the cache.
        extras: Arguments that every later forward gets besides its inputs: a request for hidden states, or none.
        checked: Whether the attention was compared with the model's own.
        notes: What a user must know about the attention, one sentence each.
        reaches: Lengths of sliding windows and chunks, in tokens, ascending, beyond which no text was compared yet. The
            first text that is longer than such a length is compared too, and then the length leaves this list.
        has_unplanned_modules: Whether modules outside of the plan compute attention too, as those of a vision tower do.
        remembered: Date and torch version of the comparison, if an earlier load made it; "" = this load made it.
        run_forward: Called with the inputs instead of the model, see `seam.run_with_probe`; None = call the model.
    """

    path: str
    layers: Mapping[Kind, tuple[int, ...]]
    n_layers: Mapping[Kind, int]
    n_heads: Mapping[Kind, int]
    n_kv_heads: Mapping[Kind, int]
    d_model: int
    plan: Plan = field(default_factory=dict)
    order: tuple[LayerKey, ...] = ()
    extras: Mapping[str, Any] = field(default_factory=dict)
    checked: bool = True
    notes: tuple[str, ...] = ()
    reaches: list[int] = field(default_factory=list)
    has_unplanned_modules: bool = False
    remembered: str = ""
    run_forward: Callable[..., Any] | None = None

    @property
    def n_calls(self) -> int:
        """Return the number of attentions that one forward pass computes."""
        return sum(map(len, self.layers.values()))


def read_survey(
    config: Any, inputs: Mapping[str, Any], output: Any, attentions: Sequence[TracedAttention]
) -> AttentionSurvey:
    """Return the survey of a model, by the attentions of one forward pass.

    Args:
        config: The model's configuration.
        inputs: The arguments of the forward, without padding.
        output: The output of the forward.
        attentions: The attentions of the pass, in the order of computation.

    Raises:
        UnclearError: The attentions cannot be told apart, some are missing, or the output holds no hidden states.
    """
    states = hidden_states(output)
    if states is None:
        raise UnclearError("it returns no hidden states")
    if not attentions:
        raise UnclearError("its attention does not pass transformers' attention interface")
    # Group the attentions by kind. An encoder-decoder must have all three kinds.
    kinds = kinds_of(config, inputs, output, [attention.weights for attention in attentions])
    by_kind: dict[Kind, list[TracedAttention]] = {}
    for kind, attention in zip(kinds, attentions, strict=True):
        by_kind.setdefault(kind, []).append(attention)
    for kind in KINDS:
        if config.is_encoder_decoder and kind not in by_kind:
            raise UnclearError(f"its {kind} attention does not pass transformers' attention interface")

    layers: dict[Kind, tuple[int, ...]] = {}
    n_layers: dict[Kind, int] = {}
    n_heads: dict[Kind, int] = {}
    n_kv_heads: dict[Kind, int] = {}
    notes: list[str] = []
    for kind, kind_attentions in by_kind.items():
        layers[kind], n_layers[kind] = _number_layers(config, kind, kind_attentions)
        n_heads[kind], n_kv_heads[kind] = _count_heads(config, kind_attentions)
        notes += _notes_on_kind(kind, layers[kind], kind_attentions)

    # The first attention of a kind belongs to the first layer of that kind, the second to the second, and so on.
    remaining_layers = {kind: iter(numbers) for kind, numbers in layers.items()}
    order = [(kind, next(remaining_layers[kind])) for kind in kinds]
    plan: dict[nn.Module, list[LayerKey]] = {}
    for attention, layer_key in zip(attentions, order, strict=True):
        if attention.module is not None:
            plan.setdefault(attention.module, []).append(layer_key)

    return AttentionSurvey(
        path="seam" if plan else "eager",
        layers=layers,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_model=states.shape[-1],
        plan=plan,
        order=tuple(order),
        # `hf.check` adds this input if the model returns no hidden states by default.
        extras={"output_hidden_states": True} if "output_hidden_states" in inputs else {},
        notes=(*_notes_on_gaps(config, layers, n_layers), *notes),
    )


# Kinds ----------------------------------------------------------------------------------------------------------


def kinds_of(
    config: Any, inputs: Mapping[str, Any], output: Any, weights: Sequence[Tensor]
) -> list[Kind]:
    """Return the kind of each attention of an unpadded input, by the shape of its weights, (batch, head, query, key).

    Raises:
        UnclearError: The numbers of queries and keys of an attention fit no kind of the model.
    """
    # The length of the text; None if the model reads a picture or a recording.
    n_tokens = None
    if "input_ids" in inputs:
        n_tokens = inputs["input_ids"].shape[1]
    # (number of queries, number of keys) -> kind
    kind_of_lengths: dict[tuple[int, int], Kind] = {}
    if config.is_encoder_decoder:
        encoded = getattr(output, "encoder_last_hidden_state", None)
        n_source = n_tokens if encoded is None else encoded.shape[1]
        if n_source is None:
            raise UnclearError(
                "its output holds no hidden states of the encoder, whose length tells its attentions apart"
            )
        n_target = inputs["decoder_input_ids"].shape[1]
        # Equal lengths of encoder and decoder would not tell kinds apart. And if the encoder puts out another length
        # than that of its text, it shortens the text on the way, so its layers differ in length.
        if n_source == n_target or n_tokens not in (None, n_source):
            raise UnclearError(
                f"its encoder puts out {n_source} tokens and its decoder reads {n_target}"
            )
        kind_of_lengths[n_source, n_source] = "encoder"
        kind_of_lengths[n_target, n_target] = "decoder"
        kind_of_lengths[n_target, n_source] = "cross"
    else:
        kind: Kind = "decoder" if has_causal_weights(weights) else "encoder"
        if n_tokens is None:
            _require_whole_pictures(inputs, weights)
            return [kind] * len(weights)
        kind_of_lengths[n_tokens, n_tokens] = kind
    kinds = []
    for maps in weights:
        n_queries, n_keys = maps.shape[2:]
        if (n_queries, n_keys) not in kind_of_lengths:
            known = ", ".join(f"{queries} on {keys}" for queries, keys in kind_of_lengths)
            raise UnclearError(
                f"it has attention of {n_queries} queries on {n_keys} keys where {known} are expected"
            )
        kinds.append(kind_of_lengths[n_queries, n_keys])
    return kinds


def _require_whole_pictures(inputs: Mapping[str, Any], weights: Sequence[Tensor]) -> None:
    """Raise UnclearError if a layer attends to only some patches of a picture, as in Swin and SegFormer."""
    pixels = inputs.get("pixel_values")
    if pixels is None or pixels.ndim != 4:
        return
    for maps in weights:
        # A layer with windows has the windows of all pictures in place of the pictures: (window, head, query, key).
        n_windows, _, n_queries, n_keys = maps.shape
        if n_windows != len(pixels) or n_queries != n_keys or n_queries != weights[0].shape[2]:
            raise UnclearError(
                "its layers attend within windows of a picture, or merge patches: "
                f"{n_windows // len(pixels)} of {n_queries} queries on {n_keys} keys"
            )


def has_causal_weights(weights: Sequence[Tensor]) -> bool:
    """Return whether no query attends to a later key. Rows with NaN or infinity are left out.

    Args:
        weights: The weights of each attention, (batch, head, query, key).

    Raises:
        AttnscopeError: All rows that could show it hold NaN or infinity.
    """
    is_known = False
    for maps in weights:
        is_finite = maps.isfinite().all(-1, keepdim=True)  # (batch, head, query, 1)
        # Weights above the diagonal are those of later keys.
        later_weights = maps.triu(1).nan_to_num(0.0) * is_finite
        if maps.shape[2] != maps.shape[3] or later_weights.any():
            return False
        # The last query has no later key, so only the rows before it count, unless there is a single query.
        is_known = is_known or maps.shape[2] == 1 or bool(is_finite[:, :, :-1].any())
    if not is_known:
        raise AttnscopeError(
            "all its attention is NaN or infinite on a short random input, so that nothing can be said of it",
            "try --dtype float32 or bfloat16; if that changes nothing, the weights are damaged",
        )
    return True


# Layers ---------------------------------------------------------------------------------------------------------

_N_LAYERS_SETTINGS: Sequence[str] = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Names of the setting that holds the number of layers, in the configurations of various models."""

_SIDE_NAMES = ("{}_layers", "num_{}_layers", "{}_num_hidden_layers", "num_layers", "num_hidden_layers")
"""The same names for one side of an encoder-decoder. {} is the side, "encoder" or "decoder"."""


def _number_layers(
    config: Any, kind: Kind, attentions: Sequence[TracedAttention]
) -> tuple[tuple[int, ...], int]:
    """Return the layer of each attention of a kind, and the number of layers of this kind that the model has.

    It tries three sources: layer numbers of modules; one attention per layer; the configuration's list of layer types.
    """
    n_layers = _read_n_layers(config, kind)
    n_attentions = len(attentions)
    layers: tuple[Any, ...] = tuple(
        getattr(attention.module, "layer_idx", None) for attention in attentions
    )
    # The numbers that modules carry are used if all modules carry one, they ascend, and they are below n_layers.
    has_layer_numbers = (
        all(isinstance(layer, int) for layer in layers)
        and list(layers) == sorted({*layers})
        and layers[0] >= 0
        and layers[-1] < (n_layers or n_attentions)
    )
    if not has_layer_numbers and n_layers in (None, n_attentions):
        layers = tuple(range(n_attentions))
    elif not has_layer_numbers:
        layers = list_attention_layers(config, n_layers)
    if len(layers) != n_attentions:
        raise UnclearError(f"only {n_attentions} {kind} attentions of {n_layers} layers are to be seen")
    return layers, max(n_layers or 0, layers[-1] + 1)


def _read_n_layers(config: Any, kind: Kind) -> int | None:
    """Return the number of layers that a configuration sets; None if it sets none under a usual name."""
    names = _N_LAYERS_SETTINGS
    if config.is_encoder_decoder:
        # Either `config.encoder` is a configuration of its own, or settings are named by side: `encoder_layers`.
        side = "encoder" if kind == "encoder" else "decoder"
        inner = getattr(config, side, None)
        if hasattr(inner, "to_dict"):
            config = inner
            names = _N_LAYERS_SETTINGS[:1]
        else:
            names = [name.format(side) for name in _SIDE_NAMES]
    else:
        config = config.get_text_config()
    n_layers = first_setting(config, *names)
    return n_layers if isinstance(n_layers, int) else None


def list_attention_layers(config: Any, n_layers: int | None) -> tuple[int, ...]:
    """Return the numbers of the layers that have attention, by the configuration's list of layer types.

    Zamba calls a layer with attention "hybrid". The result is empty if the list does not have `n_layers` entries.
    """
    config = config.get_text_config()
    types = first_setting(config, "layers_block_type", "layer_types") or ()
    layers = []
    for layer, name in enumerate(map(str, types)):
        if name == "hybrid" or ("attention" in name and "linear" not in name):
            layers.append(layer)
    return tuple(layers) if len(types) == n_layers else ()


def _count_heads(config: Any, attentions: Sequence[TracedAttention]) -> tuple[int, int]:
    """Return how many query heads and key/value heads a layer has; if layers differ, the most query heads for both."""
    calls = [attention.call for attention in attentions if attention.call]
    if calls:
        sizes = {(call.n_heads, call.n_kv_heads) for call in calls}
        n_heads, n_kv_heads = max(sizes)
        return n_heads, n_kv_heads if len(sizes) == 1 else n_heads
    # On the eager path, weights have one map per query head. Only the configuration has the number of key/value heads.
    n_heads = max(attention.weights.shape[1] for attention in attentions)
    inner = config if config.is_encoder_decoder else config.get_text_config()
    n_kv_heads = first_setting(inner, "num_key_value_heads", "num_kv_heads")
    if getattr(inner, "multi_query", False) and not getattr(inner, "new_decoder_architecture", False):
        n_kv_heads = 1  # Falcon
    is_possible = isinstance(n_kv_heads, int) and n_heads % n_kv_heads == 0
    return n_heads, n_kv_heads if is_possible else n_heads


# Notes ----------------------------------------------------------------------------------------------------------


def _notes_on_kind(
    kind: Kind, layers: Sequence[int], attentions: Sequence[TracedAttention]
) -> list[str]:
    """Return notes on soft caps, sinks, windows and shared weights. `layers` are the layers of the attentions."""
    layers_by_note: dict[str, list[int]] = {}
    for layer, attention in zip(layers, attentions, strict=True):
        call = attention.call
        layer_notes = []
        if call and call.softcap is not None:
            layer_notes.append(f"Scores are capped at +-{call.softcap:g} before the softmax")
        if call and call.sinks is not None:
            layer_notes.append("Sinks take part of the weight (rows sum to less than 1)")
        if attention.window and kind == "decoder":
            layer_notes.append(f"A sliding window of {attention.window} tokens")
        elif attention.window:
            layer_notes.append(f"A sliding window of {attention.window - 1} tokens to either side")
        for note in layer_notes:
            layers_by_note.setdefault(note, []).append(layer)
    notes = [
        f"{note} in {kind} layers {format_ranges(numbers)}." for note, numbers in layers_by_note.items()
    ]
    modules = {attention.module for attention in attentions}
    if len(modules) < len(layers) and None not in modules:
        notes.append(f"{len(layers)} {kind} layers share {amount(len(modules), 'set')} of weights.")
    return notes


def _notes_on_gaps(
    config: Any, layers: Mapping[Kind, tuple[int, ...]], n_layers: Mapping[Kind, int]
) -> list[str]:
    """Return notes on layers without attention, and on layers that attend to pictures only (Mllama)."""
    cross_layers = set(first_setting(config.get_text_config(), "cross_attention_layers") or ())
    notes = []
    for kind, attention_layers in layers.items():
        missing_layers = set(range(n_layers[kind])) - set(attention_layers)
        picture_layers = missing_layers & cross_layers
        if picture_layers:
            notes.append(
                f"Layers {format_ranges(sorted(picture_layers))} attend to pictures alone: "
                "without one they compute nothing."
            )
        if missing_layers - picture_layers:
            attending = sorted({*attention_layers, *picture_layers})
            notes.append(
                f"Only layers {format_ranges(attending)} of {n_layers[kind]} have attention ({kind})."
            )
    return notes


# Stored verdicts ------------------------------------------------------------------------------------------------

PACKAGE = Path(__file__).parents[2]
"""The folder of attnscope's own code."""

_CODE_FOLDERS = ("core/attention", "models/hf")
"""The folders of attnscope whose code computes and checks attention. If their code changes, no verdict is valid."""

_PACKAGE_NAMES = (
    "torch",
    "transformers",
    "numpy",
    "safetensors",
    "peft",
    "timm",
    "kernels",
    "flash-attn",
    "flash-linear-attention",
    "mamba-ssm",
    "causal-conv1d",
)
"""Packages that compute parts of some models. Their versions, if installed, are part of what a verdict depends on."""

_STORED_FIELDS = (
    "path",
    "layers",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "d_model",
    "extras",
    "notes",
    "reaches",
)
"""The fields of a survey that are stored unchanged. Its plan is stored with the names of modules.

Only surveys of `cross_readers` set `has_unplanned_modules` and `run_forward`, and those surveys are never stored.
"""


class SurveyCache:
    """Store the verdict on one model from files, or on one part of it, so that later loads need no comparison.

    The verdict is a survey that passed the comparison. It is a small JSON file in the user's cache folder. The file's
    name is a hash of everything that the verdict depends on. The file holds a checksum: a damaged file counts as
    missing, so the attention is compared again. Verdicts on models in memory, and on models that bring their own code,
    are never stored. Neither are failures.

    Args:
        model: The model, with its head if it has one.
        base: The part of the model that is compared.
        hashes: Hashes of the model's files, by name.
        recheck: Whether to compare even if a verdict is stored.
    """

    def __init__(
        self, model: PreTrainedModel, base: PreTrainedModel, hashes: Mapping[str, str], *, recheck: bool
    ) -> None:
        self._base = base
        self._path = _cache_folder() / f"{_hash_dependencies(model, base, hashes)}.json"
        self._verdict: dict[str, Any] = {} if recheck else self._read()

    def survey(self, compute: Callable[[], AttentionSurvey]) -> AttentionSurvey:
        """Return the stored survey. If none is stored, return the survey that `compute` returns, and store it."""
        modules = dict(self._base.named_modules())
        if self._verdict:
            facts = {name: self._verdict[name] for name in _STORED_FIELDS}
            facts["layers"] = {kind: tuple(numbers) for kind, numbers in facts["layers"].items()}
            facts["notes"] = tuple(facts["notes"])
            plan = {}
            for name, layer_keys in self._verdict["plan"]:
                plan[modules[name]] = [(kind, layer) for kind, layer in layer_keys]
            return AttentionSurvey(**facts, plan=plan, remembered=self._verdict["when"])
        survey = compute()
        if survey.checked:
            names = {module: name for name, module in modules.items()}
            today = datetime.datetime.now(datetime.UTC).date().isoformat()
            self._verdict = {name: getattr(survey, name) for name in _STORED_FIELDS}
            self._verdict["plan"] = [
                (names[module], layer_keys) for module, layer_keys in survey.plan.items()
            ]
            self._verdict["when"] = f"{today} with torch {torch.__version__}"
            self._write()
        return survey

    @property
    def model_resumes(self) -> bool:
        """Return whether the verdict says that a forward pass may start at a later layer; False = not known."""
        return bool(self._verdict.get("resumes"))

    def remember_resumes(self) -> None:
        """Store that a forward pass may start at a later layer, if there is a verdict to store it in."""
        if self._verdict:
            self._verdict["resumes"] = True
            self._write()

    def _read(self) -> dict[str, Any]:
        """Return the verdict that the file holds; {} if the file is missing or damaged."""
        try:
            document = parse_json(self._path.read_bytes())
            verdict: dict[str, Any] = document["verdict"]
            return verdict if document["sha256"] == self._checksum(verdict) else {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return {}

    def _write(self) -> None:
        """Write the verdict. A folder that cannot be written is no error: later loads then compare again."""
        content = json.dumps({"sha256": self._checksum(self._verdict), "verdict": self._verdict})
        with contextlib.suppress(AttnscopeError, OSError):
            write_whole(self._path, content.encode())

    def _checksum(self, verdict: Any) -> str:
        # Hash the file's name too, so that a file copied to another name counts as damaged.
        return _hash([self._path.name, verdict])


def _cache_folder() -> Path:
    """Return the folder of verdicts. Without a home folder, return one in which no file can be read or written."""
    # The XDG specification says to ignore a relative path.
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        try:
            cache = Path.home() / ".cache"
        except RuntimeError:
            cache = Path(os.devnull)
    return cache / "attnscope" / "checks"


def _hash_dependencies(model: PreTrainedModel, base: PreTrainedModel, hashes: Mapping[str, str]) -> str:
    """Return a hash of everything that a verdict depends on: files, code, versions, precision and machine."""
    code = {}
    for folder in _CODE_FOLDERS:
        for path in (PACKAGE / folder).rglob("*.py"):
            code[str(path.relative_to(PACKAGE))] = file_sha256(path)
    chip = torch.backends.cpu.get_cpu_capability()
    if base.device.type == "cuda":
        chip = torch.cuda.get_device_name(base.device)
    return _hash(
        {
            "files": dict(hashes),
            "attnscope": code,
            "packages": versions(),
            "model": [f"{cls.__module__}.{cls.__qualname__}" for cls in (type(model), type(base))],
            "attention": [choose_implementation(base), str(base.config._attn_implementation)],
            "dtypes": sorted({str(parameter.dtype) for parameter in base.parameters()}),
            "device": [base.device.type, platform.system(), platform.machine(), chip],
            "precision": torch.get_float32_matmul_precision(),
        }
    )


def _hash(facts: Any) -> str:
    """Return the SHA-256 of JSON values, in hex. It does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages of `_PACKAGE_NAMES`, by name."""
    known = {"python": platform.python_version()}
    for name in _PACKAGE_NAMES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            known[name] = importlib.metadata.version(name)
    return known
