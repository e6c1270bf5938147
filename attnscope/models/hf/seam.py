"""The seam inside Hugging Face models: each of their attention calls becomes an AttentionCall.

A transformers model looks up its attention function and its mask function by name. The functions here are registered
under two names. Models that support torch's scaled_dot_product_attention use the first: for them no mask means causal
attention, where the module is causal. All others use the second: for them no mask means that every key may be seen.

The run in progress decides what computes attention: a probe, or a rehearsal, which finds out a model's layers. It is a
context variable, so each thread has its own. Outside of a run, attention is computed as usual.

For long texts, masks of (query, key) take gigabytes. Then the mask functions return *light masks*: the padding alone,
(batch, 1, 1, key). The causality or sliding window that such a mask leaves out is kept apart (`LightRule`) until the
same mask arrives at the attention function. Masks with any other rule are written out.
"""

import contextlib
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import (
    AttentionMaskInterface,
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    prepare_padding_mask,
    sdpa_mask,
    sliding_window_bidirectional_overlay,
    sliding_window_overlay,
)

from attnscope.core.attention.probes import LayerKey
from attnscope.core.attention.seam import AttentionCall, Kind, Probe, attend, attend_with_weights
from attnscope.errors import AttnscopeError
from attnscope.models.devices import device_of, fork_rng
from attnscope.models.hf.parts import parts_of_config
from attnscope.models.locks import lock_model

LIKE_SDPA = "attnscope"
LIKE_EAGER = "attnscope_explicit"
"""The two names of our functions among transformers' attention implementations; see above."""

_HARMLESS_NAMES = (
    # Only other kernels read these: packed sequences, and windows that the mask holds already.
    "cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k sliding_window deterministic "
    # Models hand these on to all their modules; no attention function of transformers reads them.
    "position_ids cache_position use_cache output_attentions output_hidden_states return_dict "
    "output_router_logits num_items_in_batch position_embeddings token_type_ids mm_token_type_ids"
)
_HARMLESS = frozenset(_HARMLESS_NAMES.split())
"""Arguments that do not change what attention computes. Any other one is refused unless it is None or False."""

LIGHT_FROM = 1024
"""Tokens from which a text gets light masks, if the model does not change them."""


@dataclass(frozen=True)
class LightRule:
    """Which keys a light mask hides besides padding.

    Attributes:
        is_causal: Whether query i sees keys 0..i only.
        window: Query i sees only keys that are less than so many tokens away; None = no limit.
    """

    is_causal: bool
    window: int | None


Plan = Mapping[nn.Module, Sequence[LayerKey]]
"""Module that computes attention -> the layer key, (kind, layer), of its first, second … call in one forward pass."""


@dataclass(frozen=True, eq=False)
class SeenAttention:
    """One attention as a rehearsal saw it, or only its weights, where the model itself returned them.

    Attributes:
        weights: Attention weights, (batch, head, query, key).
        module: The module that computes it.
        call: What reached the seam. Its kind and layer are placeholders: a rehearsal is run to find them out.
        window: The sliding window that the module passed to its attention function, in tokens; None = none.
    """

    weights: Tensor
    module: nn.Module | None = None
    call: AttentionCall | None = None
    window: int | None = None


@dataclass(eq=False)
class _Run:
    """One forward pass of one model in one thread: with a probe, or a rehearsal without.

    Attributes:
        probe: What computes attention at the seam; None = a rehearsal, which keeps every call in `seen`.
        waiting: Module -> the layer keys, (kind, layer), of the attentions that it has yet to compute in this pass.
        beside: Whether modules that are not in `waiting` may attend too, past the probe.
        light_from: How many keys a mask must have to be a light one; None = none is.
        masks: In a run with light masks, each mask that was returned, and the rule that it leaves out; None for a mask
            that is written out.
        seen: The attentions of a rehearsal, in the order of computation.
    """

    probe: Probe | None = None
    waiting: dict[nn.Module, list[LayerKey]] = field(default_factory=dict)
    beside: bool = False
    light_from: int | None = None
    masks: list[tuple[Tensor, LightRule | None]] = field(default_factory=list)
    seen: list[SeenAttention] = field(default_factory=list)

    def attend(self, module: nn.Module, call: AttentionCall, window: int | None) -> Tensor:
        """Return the output of a call, (batch, head, query, d_value), from the probe; a rehearsal keeps the call."""
        if self.probe is not None:
            return self.probe(call)
        output, weights = attend_with_weights(call)
        self.seen.append(SeenAttention(weights, module, call, window))
        return output

    def next_place(self, module: nn.Module) -> LayerKey:
        """Return the layer key of the attention that a module computes now, and take it off `waiting`.

        A rehearsal does not know layer keys: it counts attentions.
        """
        if self.probe is None:
            return "encoder", len(self.seen)
        if not self.waiting.get(module):
            raise AttnscopeError(
                f"{type(module).__name__} computes more attention on this input than when the model was loaded",
                "its layers cannot be told apart here; give the texts one by one, or a shorter one",
            )
        return self.waiting[module].pop(0)

    def require_complete(self) -> None:
        """Refuse a run in which an attention that the plan names was not computed."""
        for layer_keys in self.waiting.values():
            if layer_keys:
                kind, layer = layer_keys[0]
                raise AttnscopeError(
                    f"{kind} layer {layer} computed no attention on this input, as it did when the model was loaded",
                    "a part would be shown as the whole; give the texts one by one, or one of another length",
                )


_run: ContextVar[_Run | None] = ContextVar("attnscope_run", default=None)


def trace_attention(
    model: PreTrainedModel, inputs: Mapping[str, Any]
) -> tuple[Any, list[SeenAttention]]:
    """Run a model through the seam before its layers are known; return its output, and its attentions in order."""
    run = _Run()
    return _forward(model, model, inputs, run), run.seen


def run_with_probe(
    model: PreTrainedModel,
    inputs: Mapping[str, Any],
    plan: Plan,
    probe: Probe,
    light_from: int | None = None,
    *,
    through: Callable[..., Any] | None = None,
    beside: bool = False,
) -> Any:
    """Run a model with the probe at the seam of every attention; return the output of its forward.

    Args:
        model: The model.
        inputs: The arguments of its forward.
        plan: Which call of which module is which layer.
        probe: What computes attention at the seam.
        light_from: How many keys a mask must have to be a light one (see the top of this module); None = none is.
        through: A function that is called with the inputs and runs the model, in its place: with a head on top, say.
        beside: Whether modules that the plan does not name may attend too, past the probe, such as those of a vision
            tower whose outputs become tokens of the text.

    Raises:
        AttnscopeError: The model computes other attentions than the plan names, or changes a light mask.
    """
    waiting = {module: list(layer_keys) for module, layer_keys in plan.items()}
    return _forward(model, through or model, inputs, _Run(probe, waiting, beside, light_from))


def _forward(
    model: PreTrainedModel, function: Callable[..., Any], inputs: Mapping[str, Any], run: _Run
) -> Any:
    """Return the output of a function that calls the model; what attends meanwhile belongs to the run."""
    with use_attention(model, implementation_for(model)):
        token = _run.set(run)
        try:
            output = function(**inputs)
        finally:
            _run.reset(token)
    run.require_complete()
    return output


# The registered functions ---------------------------------------------------------------------------------------


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute a call of transformers' attention interface at the seam, in the form of `sdpa_attention_forward`.

    Args:
        module: The module whose attention it is.
        query: (batch, n_heads, query, d_head).
        key: (batch, n_kv_heads, key, d_head), not repeated.
        value: (batch, n_kv_heads, key, d_value).
        attention_mask: None, boolean (True = may attend), or floats to add to the scores.
        dropout: Honoured outside of runs only.
        scaling: Factor on the dot products; None = 1 / sqrt(d_head).
        is_causal: Whether query i sees keys 0..i only where no mask is given; None = as the module's attribute says,
            and True if it has none.
        position_bias: Floats to add to the scores.
        softcap: As AttentionCall's.
        s_aux: Sinks, one a head.
        others: Refused where they could change the result. The mask holds `sliding_window` already.

    Returns:
        The output, (batch, query, n_heads, d_value), and no weights.
    """
    # Refuse arguments that could change the result in a way not modelled here.
    for name, argument in others.items():
        if name not in _HARMLESS and argument is not None and argument is not False:
            raise AttnscopeError(
                f"{type(module).__name__} passes its attention an argument {name} that is not known"
            )
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    # A module that may attend past the probe, as in a vision tower, computes as if outside of the run.
    run = _run.get()
    if run is not None and run.beside and module not in run.waiting:
        run = None
    # Find out which layer it is, and what a light mask leaves out.
    kind: Kind = "encoder"
    layer = 0
    rule: LightRule | None = None
    if run is not None:
        kind, layer = run.next_place(module)
        rule = _rule_of_mask(module, attention_mask, run)
    # Split masks and biases into booleans and finite floats: each broadcasts to (batch, head, query, key).
    mask, bias = mask_and_bias(attention_mask, query.dtype)
    bias_mask, more_bias = mask_and_bias(position_bias, query.dtype)
    # Leave out a light mask that hides nothing, for it keeps kernels from their fastest way. One with a window stays:
    # probes reuse what they worked out for a mask, and must not take a windowed layer for one without a window.
    if rule is not None and rule.window is None and mask is not None and mask.all():
        mask = None
    # Causality stands for a mask that is left out. A single query, though, continues a text from cached keys: it sees
    # them all.
    if rule is None:
        rule = LightRule(is_causal and attention_mask is None and query.shape[2] > 1, None)
    # A query, key or value with a batch of 1 is shared by all texts.
    batch = max(query.shape[0], key.shape[0], value.shape[0])
    call = AttentionCall(
        layer=layer,
        kind=kind,
        query=query.expand(batch, -1, -1, -1),
        key=key.expand(batch, -1, -1, -1),
        value=value.expand(batch, -1, -1, -1),
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        mask=_combine(mask, bias_mask, torch.logical_and),
        is_causal=rule.is_causal,
        window=rule.window,
        bias=_combine(bias, more_bias, torch.add),
        softcap=softcap or None,
        sinks=None if s_aux is None else s_aux.reshape(-1),
        dropout_p=dropout if run is None else 0.0,
    )
    # (batch, head, query, d_value) -> (batch, query, head, d_value), as transformers expects it.
    output = attend(call) if run is None else run.attend(module, call, others.get("sliding_window"))
    return output.transpose(1, 2).contiguous(), None


def _combine(
    first: Tensor | None, second: Tensor | None, operation: Callable[[Tensor, Tensor], Tensor]
) -> Tensor | None:
    """Return two masks, or two biases, combined by an operation; the one of them that is there, or None."""
    if first is None:
        return second
    if second is None:
        return first
    return operation(first, second)


def mask_and_bias(added: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Split what a model adds to its scores into a boolean mask (True = may attend) and a finite bias.

    A mask that hides nothing and a bias of zeros become None. A boolean tensor is a mask already.

    Models hide keys by adding the lowest number of a precision. A bias may have been added to it, so all numbers below
    half of it hide. The precision is that of the tensor, or `dtype`, that of the queries, if the tensor was converted.

    Raises:
        AttnscopeError: The tensor holds integers: their 1 could mean either.
    """
    if added is None or added.dtype == torch.bool:
        return added, None
    if not added.is_floating_point():
        raise AttnscopeError(f"an attention mask of {added.dtype} could mean two things")
    lowest = max(torch.finfo(added.dtype).min, torch.finfo(dtype).min)
    mask = added > lowest / 2
    bias = added.where(mask, 0.0)
    return None if mask.all() else mask, bias if bias.any() else None


def attention_function_like_eager(
    module: nn.Module, *tensors: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """Compute as `attention_function` does, for models for which no mask means that every key may be seen."""
    others["is_causal"] = False
    return attention_function(module, *tensors, **others)  # type: ignore[arg-type]


AttentionInterface.register(LIKE_SDPA, attention_function)
AttentionInterface.register(LIKE_EAGER, attention_function_like_eager)
# Without a mask function of that name decoders would get no mask at all, and run non-causal in silence.
AttentionMaskInterface.register(LIKE_SDPA, lambda **request: _mask(sdpa_mask, request))
AttentionMaskInterface.register(LIKE_EAGER, lambda **request: _mask(eager_mask, request))


def implementation_for(model: PreTrainedModel) -> str:
    """Return the name under which a model, with all its parts, is to look up our functions: see above."""
    parts = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    return LIKE_SDPA if all(part._supports_sdpa for part in parts) else LIKE_EAGER


# Light masks -----------------------------------------------------------------------------------------------------


def _mask(write_out: Callable[..., Tensor | None], request: dict[str, Any]) -> Tensor | None:
    """Return a light mask of many keys, in a run that takes them; else call transformers' function to write it out."""
    run = _run.get()
    if run is None or run.light_from is None:
        return write_out(**request)
    n_keys = request["kv_length"]
    rule = _read_rule(request)
    # Padding as bool (batch, key)
    padding = prepare_padding_mask(request.get("attention_mask"), n_keys, request.get("kv_offset", 0))
    if padding is None:
        padding = torch.ones(request["batch_size"], n_keys, device=request.get("device", "cpu"))
    mask: Tensor | None
    if rule is None or padding.ndim != 2 or n_keys < run.light_from:
        rule = None
        mask = write_out(**request)
    else:
        # The padding alone, in memory of its own, by which it is known again: (batch, 1, 1, key)
        mask = padding.bool()[:, None, None, :n_keys].clone()
    if mask is not None:
        run.masks.append((mask, rule))
    return mask


# Functions that transformers makes are known by their code. The values that they were made of are in their closures.
_AND = and_masks().__code__
_WINDOW = sliding_window_overlay(1).__code__
_BIDIRECTIONAL_WINDOW = sliding_window_bidirectional_overlay(1).__code__


def _read_rule(request: Mapping[str, Any]) -> LightRule | None:
    """Return the rule of a mask function that hides keys by causality and windows alone; None for any other."""
    if request.get("q_offset", 0) or request.get("kv_offset", 0):
        return None
    is_causal = False
    windows: list[int] = []
    # Each of these functions must allow a key.
    functions = [request.get("mask_function", causal_mask_function)]
    while functions:
        function = functions.pop()
        code = getattr(function, "__code__", None)
        if code is _AND:
            functions += inspect.getclosurevars(function).nonlocals["mask_functions"]
        elif code is _WINDOW:
            # Keys are less than so many tokens away.
            windows.append(inspect.getclosurevars(function).nonlocals["sliding_window"])
        elif code is _BIDIRECTIONAL_WINDOW:
            # Keys are at most so many tokens away.
            windows.append(inspect.getclosurevars(function).nonlocals["sliding_window"] + 1)
        elif function is causal_mask_function:
            is_causal = True
        elif function is not bidirectional_mask_function:
            return None
    n_keys = request["kv_length"]
    if (is_causal or windows) and request["q_length"] != n_keys:
        return None
    # A window as long as the text hides nothing.
    window = min(windows, default=n_keys)
    return LightRule(is_causal, window if window < n_keys else None)


def _rule_of_mask(module: nn.Module, mask: Tensor | None, run: _Run) -> LightRule | None:
    """Return the rule that a light mask leaves out; None for a mask that is written out.

    Raises:
        AttnscopeError: The run has light masks, and this mask is not one that it returned: the model may have made it
            from a light one.
    """
    if mask is None or all(rule is None for _, rule in run.masks):
        return None
    for issued, rule in run.masks:
        # A view that begins at the same address is the same mask.
        is_same = mask.data_ptr() == issued.data_ptr() and mask.shape[-1] == issued.shape[-1]
        if is_same and mask.dtype == issued.dtype:
            return rule
    raise AttnscopeError(
        f"{type(module).__name__} changes its mask before it attends, which is not known for texts of this length",
        f"give fewer than {LIGHT_FROM} tokens",
    )


# Switching ------------------------------------------------------------------------------------------------------


_names_in_configs: weakref.WeakKeyDictionary[nn.Module, dict[str, list[tuple[Any, str | None]]]] = (
    weakref.WeakKeyDictionary()
)
"""Model -> attention implementation -> each configuration of the model, and the implementation that it must name."""


@contextlib.contextmanager
def use_attention(model: nn.Module, implementation: str | None) -> Iterator[None]:
    """Make a model use an attention implementation, in eval mode and frozen; put everything back when the context ends.

    What forward passes change is put back too (see `restore_state`), so that no text depends on those before it. Other
    threads wait for their turn with the model meanwhile. Gradients flow through tensors that a probe brings, but not
    into the model. The implementation is a name that transformers knows; None = the one that the model has.
    """
    # Composite models (LLaVA) have a configuration per part, and each names its own implementation.
    configs = parts_of_config(
        *(module.config for module in model.modules() if isinstance(module, PreTrainedModel))
    )
    no_autocast = torch.autocast(device_of(model).type, enabled=False)
    with lock_model([model]), no_autocast, restore_state(model, configs):
        # Torch refuses to set requires_grad of tensors made in inference mode, which never learn.
        learning = [
            parameter
            for parameter in model.parameters()
            if parameter.requires_grad and not parameter.is_inference()
        ]
        try:
            # The mode of each module is an attribute, which restore_state puts back.
            for module in model.modules():
                if module.training:
                    module.training = False
            for parameter in learning:
                parameter.requires_grad_(False)
            if implementation is not None and isinstance(model, PreTrainedModel):
                names = _names_in_configs.setdefault(model, {})
                if implementation not in names:
                    names[implementation] = _switch(model, configs, implementation)
                for config, name in names[implementation]:
                    config._attn_implementation_internal = name
            yield
        finally:
            for parameter in learning:
                parameter.requires_grad_(True)


def _switch(
    model: PreTrainedModel, configs: Sequence[Any], implementation: str
) -> list[tuple[Any, str | None]]:
    """Make a model use an attention implementation; return each configuration, and the name that it must hold for it.

    transformers' own switch knows which parts of a model support the implementation, but is slow: keep what it did.
    """
    model.set_attn_implementation(implementation)
    # It leaves out parts whose attention class was chosen when the model was built. "eager" is the only name that these
    # look up again, so every part must have it.
    if implementation == "eager":
        return [(config, implementation) for config in configs]
    return [(config, config._attn_implementation_internal) for config in configs]


# Leaving a model as it is ----------------------------------------------------------------------------------------

_CONTAINERS = frozenset({dict, OrderedDict, list, set})


@contextlib.contextmanager
def restore_state(model: nn.Module, configs: Iterable[Any]) -> Iterator[None]:
    """Put back, when the context ends, all of a model except its parameters that forward passes changed.

    BigBird's block-sparse layers become full ones at the first short text and stay so; rotary tables grow with the
    longest text. Put back are attributes of modules, submodules, buffers, hooks, and settings of configurations. So are
    the global random states of torch (on the CPU and the model's device) and NumPy: BigBird draws the blocks that it
    attends to, and a caller's own draws must not depend on what is looked at.

    Buffers are put back as the tensors that they were; what is written into one stays. Where accelerate spreads a
    model over devices, it moves buffers itself.
    """
    # Copy the containers, not their contents: buffers stay the same tensors.
    before: list[tuple[Any, Any]] = []
    for owner in (*model.modules(), *configs):
        attributes = vars(owner)
        for container in (attributes, *_containers_in(attributes)):
            before.append((container, container.copy()))
    numpy_state = np.random.get_state()  # noqa: NPY002 - the one that models draw from
    try:
        with fork_rng(device_of(model)):
            yield
    finally:
        np.random.set_state(numpy_state)  # noqa: NPY002
        for container, content in before:
            # What is to stay is never taken out, not even for a moment: another thread may be reading it.
            if isinstance(container, list):
                container[:] = content
            elif isinstance(container, set):
                container |= content
                container &= content
            else:
                container.update(content)
                for name in container.keys() - content.keys():
                    container.pop(name)


def _containers_in(attributes: dict[str, Any]) -> list[Any]:
    """Return the dictionaries, lists and sets among a module's attributes, except those of its parameters."""
    # accelerate's hook means that it moves the buffers.
    left_alone = {"_parameters", "_buffers"} if "_hf_hook" in attributes else {"_parameters"}
    return [
        value
        for name, value in attributes.items()
        if type(value) in _CONTAINERS and name not in left_alone
    ]
