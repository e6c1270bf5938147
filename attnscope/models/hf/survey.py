"""Find out the kind (encoder, decoder, cross) and the layer of each attention of a model, and store what was found.

On a small input, an encoder-decoder's attentions differ in their numbers of queries and keys; else a decoder hides
later keys. The layer is the number that a module carries, or attentions are counted. Caps, sinks, windows and the like
become notes. Nothing here runs a model: `hf.check` does, and compares.
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
from attnscope.models.hf.parts import hidden_states, setting
from attnscope.models.hf.seam import Plan, SeenAttention, implementation_for
from attnscope.questions.maps import format_ranges
from attnscope.results.storage import write_whole

KINDS: tuple[Kind, ...] = get_args(Kind)


class UnclearError(Exception):  # noqa: N818 - no error: `hf.check` then tries the eager path
    """Not all of a model's attention is seen, or its layers cannot be told apart."""


@dataclass(frozen=True, eq=False)
class AttentionSurvey:
    """A model's attention layers: kinds, sizes, which modules compute them, and how far they were checked.

    Attributes:
        path: "seam", or "eager" where only the weights that the model itself returns can be shown.
        layers: Kind -> numbers of the layers that have attention, in the order of computation.
        n_layers: Kind -> how many layers there are, with and without attention.
        n_heads: Kind -> the most query heads of a layer.
        n_kv_heads: Kind -> key/value heads of that layer.
        d_model: Width of the hidden states.
        plan: Module that computes attention -> the layer key of each of its calls in a pass. Empty on the eager path.
        order: The layer keys of all attentions in the order of computation; empty in a survey that was stored.
        extras: Arguments of the forward besides the inputs, by name.
        checked: Whether attention was compared with the model's own.
        notes: What a user must know of it, one sentence each.
        reaches: The lengths of windows, chunks and the like, in tokens, ascending, that are longer than any text of the
            comparison. The first longer text is compared when it comes.
        beside: Whether modules that the plan does not name attend too, as those of a vision tower do.
        remembered: When an earlier load compared it, and with which torch; "" = this load did.
        through: A function that runs the model, called with the inputs in its place; see `seam.perform`.
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
    beside: bool = False
    remembered: str = ""
    through: Callable[..., Any] | None = None

    @property
    def n_calls(self) -> int:
        """Return how many attentions a forward pass computes."""
        return sum(map(len, self.layers.values()))


def read_survey(
    config: Any, inputs: Mapping[str, Any], output: Any, seen: Sequence[SeenAttention]
) -> AttentionSurvey:
    """Return the survey of the attentions of one pass: calls at the seam, or weights that the model returned.

    Args:
        config: The model's configuration.
        inputs: The arguments of the pass, without padding.
        output: What the model returned.
        seen: Its attentions, in the order of computation.

    Raises:
        Unclear: The attentions cannot be told apart, some are missing, or the output holds no hidden states.
    """
    states = hidden_states(output)
    if states is None:
        raise UnclearError("it returns no hidden states")
    if not seen:
        raise UnclearError("its attention does not pass transformers' attention interface")
    # Sort the attentions by kind; each kind that the architecture has must be there.
    kinds = kinds_of(config, inputs, output, [attention.weights for attention in seen])
    by_kind: dict[Kind, list[SeenAttention]] = {}
    for kind, attention in zip(kinds, seen, strict=True):
        by_kind.setdefault(kind, []).append(attention)
    for kind in KINDS:
        if config.is_encoder_decoder and kind not in by_kind:
            raise UnclearError(f"its {kind} attention does not pass transformers' attention interface")

    layers: dict[Kind, tuple[int, ...]] = {}
    n_layers: dict[Kind, int] = {}
    n_heads: dict[Kind, int] = {}
    n_kv_heads: dict[Kind, int] = {}
    notes: list[str] = []
    for kind, attentions in by_kind.items():
        layers[kind], n_layers[kind] = _number_layers(config, kind, attentions)
        n_heads[kind], n_kv_heads[kind] = _count_heads(config, attentions)
        notes += _notes_on_kind(kind, layers[kind], attentions)

    # The first attention of a kind belongs to the first layer of that kind, and so on.
    layers_left = {kind: iter(numbers) for kind, numbers in layers.items()}
    order = [(kind, next(layers_left[kind])) for kind in kinds]
    plan: dict[nn.Module, list[LayerKey]] = {}
    for attention, layer_key in zip(seen, order, strict=True):
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
        extras={"output_hidden_states": True} if "output_hidden_states" in inputs else {},
        notes=(*_notes_on_gaps(config, layers, n_layers), *notes),
    )


# Kinds ----------------------------------------------------------------------------------------------------------


def kinds_of(
    config: Any, inputs: Mapping[str, Any], output: Any, weights: Sequence[Tensor]
) -> list[Kind]:
    """Return the kind of each attention, by the shape of its weights, (batch, head, query, key).

    `inputs` are without padding.

    Raises:
        Unclear: An attention has other numbers of queries and keys than any kind of the model.
    """
    # The length of the text; None where the model reads a picture or a recording.
    n_tokens = None
    if "input_ids" in inputs:
        n_tokens = inputs["input_ids"].shape[1]
    # (number of queries, number of keys) -> kind
    kind_of_lengths: dict[tuple[int, int], Kind] = {}
    if config.is_encoder_decoder:
        encoded = getattr(output, "encoder_last_hidden_state", None)
        source = n_tokens if encoded is None else encoded.shape[1]
        if source is None:
            raise UnclearError(
                "its output holds no hidden states of the encoder, whose length tells its attentions apart"
            )
        target = inputs["decoder_input_ids"].shape[1]
        # Equal lengths would not tell kinds apart, and an encoder that shortens its text has several lengths.
        if source == target or n_tokens not in (None, source):
            raise UnclearError(f"its encoder puts out {source} tokens and its decoder reads {target}")
        kind_of_lengths[source, source] = "encoder"
        kind_of_lengths[target, target] = "decoder"
        kind_of_lengths[target, source] = "cross"
    else:
        kind: Kind = "decoder" if hides_later(weights) else "encoder"
        if n_tokens is None:
            _require_whole_pictures(inputs, weights)
            return [kind] * len(weights)
        kind_of_lengths[n_tokens, n_tokens] = kind
    kinds = []
    for maps in weights:
        queries, keys = maps.shape[2:]
        if (queries, keys) not in kind_of_lengths:
            known = ", ".join(f"{n_queries} on {n_keys}" for n_queries, n_keys in kind_of_lengths)
            raise UnclearError(
                f"it has attention of {queries} queries on {keys} keys where {known} are expected"
            )
        kinds.append(kind_of_lengths[queries, keys])
    return kinds


def _require_whole_pictures(inputs: Mapping[str, Any], weights: Sequence[Tensor]) -> None:
    """Raise UnclearError if a layer attends to only some patches of a picture, as in Swin and SegFormer."""
    pixels = inputs.get("pixel_values")
    if pixels is None or pixels.ndim != 4:
        return
    for maps in weights:
        n_maps, _, queries, keys = maps.shape
        if n_maps != len(pixels) or queries != keys or queries != weights[0].shape[2]:
            raise UnclearError(
                "its layers attend within windows of a picture, or merge patches: "
                f"{n_maps // len(pixels)} of {queries} queries on {keys} keys"
            )


def hides_later(weights: Sequence[Tensor]) -> bool:
    """Return whether no query sees a later key. Rows with NaN or infinity are left out.

    Args:
        weights: Of each attention, (batch, head, query, key).

    Raises:
        AttnscopeError: No row is left.
    """
    is_known = False
    for maps in weights:
        is_finite = maps.isfinite().all(-1, keepdim=True)  # (batch, head, query, 1)
        # Weights above the diagonal are those of later keys.
        later = maps.triu(1).nan_to_num(0.0) * is_finite
        if maps.shape[2] != maps.shape[3] or later.any():
            return False
        # The last query has no later key, so its row tells nothing, unless it is the only one.
        is_known = is_known or maps.shape[2] == 1 or bool(is_finite[:, :, :-1].any())
    if not is_known:
        raise AttnscopeError(
            "all its attention is NaN or infinite on a short random input, so that nothing can be said of it",
            "try --dtype float32 or bfloat16; if that changes nothing, the weights are damaged",
        )
    return True


# Layers ---------------------------------------------------------------------------------------------------------

_ALL_LAYERS: Sequence[str] = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Names of the setting that says how many layers a model has, in various configurations."""

_SIDE_LAYERS = ("{}_layers", "num_{}_layers", "{}_num_hidden_layers", "num_layers", "num_hidden_layers")
"""The same for one side of an encoder-decoder, "encoder" or "decoder"."""


def _number_layers(
    config: Any, kind: Kind, attentions: Sequence[SeenAttention]
) -> tuple[tuple[int, ...], int]:
    """Return the layer of each attention of a kind, and how many layers of this kind the model has.

    A module carries the number of its layer, or there is one attention per layer, or the configuration lists the layers
    that have attention: the first that fits.
    """
    n_layers = _configured_layers(config, kind)
    n_attentions = len(attentions)
    layers: tuple[Any, ...] = tuple(
        getattr(attention.module, "layer_idx", None) for attention in attentions
    )
    # Numbers that modules carry are believed if they ascend, and are numbers of layers.
    is_believed = (
        all(isinstance(layer, int) for layer in layers)
        and list(layers) == sorted({*layers})
        and layers[0] >= 0
        and layers[-1] < (n_layers or n_attentions)
    )
    if not is_believed and n_layers in (None, n_attentions):
        layers = tuple(range(n_attentions))
    elif not is_believed:
        layers = listed_layers(config, n_layers)
    if len(layers) != n_attentions:
        raise UnclearError(f"only {n_attentions} {kind} attentions of {n_layers} layers are to be seen")
    return layers, max(n_layers or 0, layers[-1] + 1)


def _configured_layers(config: Any, kind: Kind) -> int | None:
    """Return how many layers a configuration asks for; None where it does not say in a usual way."""
    names = _ALL_LAYERS
    if config.is_encoder_decoder:
        # Either the side has a configuration of its own, or the names of its sizes begin with the side.
        side = "encoder" if kind == "encoder" else "decoder"
        inner = getattr(config, side, None)
        if hasattr(inner, "to_dict"):
            config = inner
            names = _ALL_LAYERS[:1]
        else:
            names = [name.format(side) for name in _SIDE_LAYERS]
    else:
        config = config.get_text_config()
    n_layers = setting(config, *names)
    return n_layers if isinstance(n_layers, int) else None


def listed_layers(config: Any, n_layers: int | None) -> tuple[int, ...]:
    """Return the numbers of the layers that have attention, by the configuration's list of the types of its layers.

    Zamba calls layers with attention hybrid. The result is empty if the list has not `n_layers` entries.
    """
    config = config.get_text_config()
    types = setting(config, "layers_block_type", "layer_types") or ()
    layers = []
    for layer, name in enumerate(map(str, types)):
        if name == "hybrid" or ("attention" in name and "linear" not in name):
            layers.append(layer)
    return tuple(layers) if len(types) == n_layers else ()


def _count_heads(config: Any, attentions: Sequence[SeenAttention]) -> tuple[int, int]:
    """Return the most query heads of a layer, and its key/value heads; where layers differ, twice the query heads."""
    calls = [attention.call for attention in attentions if attention.call]
    if calls:
        sizes = {(call.n_heads, call.n_kv_heads) for call in calls}
        n_heads, n_kv_heads = max(sizes)
        return n_heads, n_kv_heads if len(sizes) == 1 else n_heads
    # Weights that a model returns are of query heads; only its configuration knows how many key/value heads there are.
    n_heads = max(attention.weights.shape[1] for attention in attentions)
    inner = config if config.is_encoder_decoder else config.get_text_config()
    n_kv_heads = setting(inner, "num_key_value_heads", "num_kv_heads")
    if getattr(inner, "multi_query", False) and not getattr(inner, "new_decoder_architecture", False):
        n_kv_heads = 1  # Falcon
    is_possible = isinstance(n_kv_heads, int) and n_heads % n_kv_heads == 0
    return n_heads, n_kv_heads if is_possible else n_heads


# Notes ----------------------------------------------------------------------------------------------------------


def _notes_on_kind(kind: Kind, layers: Sequence[int], attentions: Sequence[SeenAttention]) -> list[str]:
    """Return notes on caps, sinks, windows and shared weights of the attentions of a kind, one in each of `layers`."""
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
        f"{note} in {kind} layers {format_ranges(noted)}." for note, noted in layers_by_note.items()
    ]
    modules = {attention.module for attention in attentions}
    if len(modules) < len(layers) and None not in modules:
        notes.append(f"{len(layers)} {kind} layers share {amount(len(modules), 'set')} of weights.")
    return notes


def _notes_on_gaps(
    config: Any, layers: Mapping[Kind, tuple[int, ...]], n_layers: Mapping[Kind, int]
) -> list[str]:
    """Return notes on layers that have no attention, or none without a picture (Mllama)."""
    cross_layers = set(setting(config.get_text_config(), "cross_attention_layers") or ())
    notes = []
    for kind, present in layers.items():
        absent = set(range(n_layers[kind])) - set(present)
        to_pictures = absent & cross_layers
        if to_pictures:
            notes.append(
                f"Layers {format_ranges(sorted(to_pictures))} attend to pictures alone: "
                "without one they compute nothing."
            )
        if absent - to_pictures:
            attending = sorted({*present, *to_pictures})
            notes.append(
                f"Only layers {format_ranges(attending)} of {n_layers[kind]} have attention ({kind})."
            )
    return notes


# Stored verdicts ------------------------------------------------------------------------------------------------

PACKAGE = Path(__file__).parents[2]
"""The folder of attnscope's own code."""

_OWN_CODE = ("core/attention", "models/hf")
"""The folders of attnscope whose code decides what passes the seam: if it changes, models are compared again."""

_PACKAGES = (
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
"""Packages that may compute part of a model, if they are installed."""

_FIELDS = (
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
"""The fields of a survey that are stored as they are; its plan is stored with names in the place of modules."""


class SurveyCache:
    """The stored verdict on one model from files, or on one part of it, so that not every load compares attention.

    The verdict is a survey that passed the comparison. It is a small JSON file in the user's cache folder. Its name is
    a hash of all that a verdict depends on, and it holds a checksum: a file that is damaged in any way is no verdict,
    and attention is compared. Verdicts on models in memory, and on those that bring their own code, are never stored;
    nor are failures.

    Args:
        model: The model, with its head if it has one.
        base: The part of it that is compared.
        hashes: What tells its files from those of any other model, by name.
        again: Whether to compare even if a verdict is stored.
    """

    def __init__(
        self, model: PreTrainedModel, base: PreTrainedModel, hashes: Mapping[str, str], *, again: bool
    ) -> None:
        self._base = base
        self._path = _cache_folder() / f"{_key_of(model, base, hashes)}.json"
        self._verdict: dict[str, Any] = {} if again else self._read()

    def survey(self, compute: Callable[[], AttentionSurvey]) -> AttentionSurvey:
        """Return the stored survey of the model's attention; else the one that `compute` returns, which is stored."""
        modules = dict(self._base.named_modules())
        if self._verdict:
            facts = {name: self._verdict[name] for name in _FIELDS}
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
            self._verdict = {name: getattr(survey, name) for name in _FIELDS}
            self._verdict["plan"] = [
                (names[module], layer_keys) for module, layer_keys in survey.plan.items()
            ]
            self._verdict["when"] = f"{today} with torch {torch.__version__}"
            self._write()
        return survey

    @property
    def resumes(self) -> bool:
        """Return whether the verdict says that a run may be resumed at a layer; False = it does not say."""
        return bool(self._verdict.get("resumes"))

    def remember_resumes(self) -> None:
        """Store that a run may be resumed at a layer; nothing is stored without a verdict."""
        if self._verdict:
            self._verdict["resumes"] = True
            self._write()

    def _read(self) -> dict[str, Any]:
        """Return the verdict that the file holds; {} if there is none, or it is damaged."""
        try:
            document = parse_json(self._path.read_bytes())
            verdict: dict[str, Any] = document["verdict"]
            return verdict if document["sha256"] == self._checksum(verdict) else {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return {}

    def _write(self) -> None:
        """Write the verdict; where that fails, nothing is stored."""
        content = json.dumps({"sha256": self._checksum(self._verdict), "verdict": self._verdict})
        with contextlib.suppress(AttnscopeError, OSError):
            write_whole(self._path, content.encode())

    def _checksum(self, verdict: Any) -> str:
        # A hash of the file's name too: a verdict that was copied to another name is none.
        return _hash([self._path.name, verdict])


def _cache_folder() -> Path:
    """Return the folder of verdicts; without a home, one in which no file can be written or read."""
    # The XDG specification says that a relative path is to be ignored.
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        try:
            cache = Path.home() / ".cache"
        except RuntimeError:
            cache = Path(os.devnull)
    return cache / "attnscope" / "checks"


def _key_of(model: PreTrainedModel, base: PreTrainedModel, hashes: Mapping[str, str]) -> str:
    """Return a hash of all that a verdict depends on: files, code, versions, precision and machine."""
    code = {}
    for folder in _OWN_CODE:
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
            "attention": [implementation_for(base), str(base.config._attn_implementation)],
            "dtypes": sorted({str(parameter.dtype) for parameter in base.parameters()}),
            "device": [base.device.type, platform.system(), platform.machine(), chip],
            "precision": torch.get_float32_matmul_precision(),
        }
    )


def _hash(facts: Any) -> str:
    """Return the SHA-256 of JSON values, in hex; the order of keys does not count."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python, and of the packages that may compute part of a model."""
    known = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            known[name] = importlib.metadata.version(name)
    return known
