"""Replace the attention function of Hugging Face models, so that a probe computes each of their attentions.

The *seam* is the one function through which every attention passes: here `attention_function`. It packs queries, keys,
values and mask into an `AttentionCall`. A *probe* is a function from an AttentionCall to the attention's output.

transformers looks up attention and mask functions by name. This module registers its functions under two names:
`LIKE_SDPA` for models that support torch's scaled_dot_product_attention, `LIKE_EAGER` for all others. Without a mask,
attention under the first name is causal where the module is; under the second, every query may attend to every key.

A context variable holds the forward pass in progress (`_Run`), so each thread has its own. A run hands every attention
to its probe. A run without a probe is a *tracing run*: it records every attention, to find out the model's layers.
Outside of a run, attention is computed as usual.

For a long text, a full mask of (query, key) takes gigabytes. So the mask functions return a *light mask* instead: the
padding alone, (batch, 1, 1, key). A `LightRule` keeps the causality or sliding window that the light mask leaves out,
until the model passes that mask to the attention function. A mask with any other rule stays a full mask.
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
from attnscope.models.hf.parts import collect_configs
from attnscope.models.locks import lock_model

LIKE_SDPA = "attnscope"
LIKE_EAGER = "attnscope_explicit"
"""The two names under which transformers finds our functions; the module docstring says which models use which."""

_IGNORED_NAMES = (
    # Only kernels that we replace read these: packed sequences, and windows, which the mask contains already.
    "cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k sliding_window deterministic "
    # Models pass these to all their modules. No attention function of transformers reads them.
    "position_ids cache_position use_cache output_attentions output_hidden_states return_dict "
    "output_router_logits num_items_in_batch position_embeddings token_type_ids mm_token_type_ids"
)
_IGNORED_ARGUMENTS = frozenset(_IGNORED_NAMES.split())
"""Arguments that do not change the attention. Any other argument is refused unless its value is None or False."""

LIGHT_FROM = 1024
"""The number of tokens from which a text gets light masks. Models that change their masks never get light masks."""


@dataclass(frozen=True)
class LightRule:
    """Say which keys the full mask hides besides padding. A light mask holds the padding alone.

    Attributes:
        is_causal: Whether query i may attend to keys 0..i only.
        window: Query i may attend only to keys less than `window` tokens away; None = at any distance.
    """

    is_causal: bool
    window: int | None


Plan = Mapping[nn.Module, Sequence[LayerKey]]
"""Attention module -> the layer key, (kind, layer), of its first, second … call in one forward pass."""


@dataclass(frozen=True, eq=False)
class TracedAttention:
    """Record one attention of a tracing run; only `weights` is set if the model itself returned them.

    Attributes:
        weights: Attention weights, (batch, head, query, key).
        module: The module that computed the attention.
        call: The AttentionCall. Its kind and layer are placeholders: the tracing run serves to find them out.
        window: The sliding window that the module passed to its attention function, in tokens; None = no window.
    """

    weights: Tensor
    module: nn.Module | None = None
    call: AttentionCall | None = None
    window: int | None = None


@dataclass(eq=False)
class _Run:
    """Hold the state of one forward pass of one model in one thread.

    Attributes:
        probe: Computes each attention; None = a tracing run, which records each attention in `traced_attentions`.
        pending_by_module: Module -> the layer keys, (kind, layer), of the attentions that it has yet to compute.
        has_unplanned_modules: Whether modules outside of `pending_by_module` compute attention too, without the probe.
        min_light_keys: A mask with at least this many keys is a light mask; None = all masks are full masks.
        masks: In a run with light masks, each mask that we returned, with its rule; None = it is a full mask.
        traced_attentions: The attentions of a tracing run, in the order of computation.
    """

    probe: Probe | None = None
    pending_by_module: dict[nn.Module, list[LayerKey]] = field(default_factory=dict)
    has_unplanned_modules: bool = False
    min_light_keys: int | None = None
    masks: list[tuple[Tensor, LightRule | None]] = field(default_factory=list)
    traced_attentions: list[TracedAttention] = field(default_factory=list)

    def attend(self, module: nn.Module, call: AttentionCall, window: int | None) -> Tensor:
        """Return the output of a call, (batch, head, query, d_value); a tracing run also records the call."""
        if self.probe is not None:
            return self.probe(call)
        output, weights = attend_with_weights(call)
        self.traced_attentions.append(TracedAttention(weights, module, call, window))
        return output

    def pop_layer_key(self, module: nn.Module) -> LayerKey:
        """Return the layer key of the attention that a module computes now, and remove it from `pending_by_module`.

        A tracing run does not know layer keys yet, so it returns a placeholder: ("encoder", number of the attention).
        """
        if self.probe is None:
            return "encoder", len(self.traced_attentions)
        if not self.pending_by_module.get(module):
            raise AttnscopeError(
                f"{type(module).__name__} computes more attention on this input than when the model was loaded",
                "its layers cannot be told apart here; give the texts one by one, or a shorter one",
            )
        return self.pending_by_module[module].pop(0)

    def require_complete(self) -> None:
        """Raise AttnscopeError if the model has not computed every attention of the plan."""
        for layer_keys in self.pending_by_module.values():
            if layer_keys:
                kind, layer = layer_keys[0]
                raise AttnscopeError(
                    f"{kind} layer {layer} computed no attention on this input, as it did when the model was loaded",
                    "a part would be shown as the whole; give the texts one by one, or one of another length",
                )


_run: ContextVar[_Run | None] = ContextVar("attnscope_run", default=None)


def trace_attention(
    model: PreTrainedModel, inputs: Mapping[str, Any]
) -> tuple[Any, list[TracedAttention]]:
    """Run a model whose layers are not known yet; return its output, and its attentions in order of computation."""
    run = _Run()
    return _forward(model, model, inputs, run), run.traced_attentions


def run_with_probe(
    model: PreTrainedModel,
    inputs: Mapping[str, Any],
    plan: Plan,
    probe: Probe,
    min_light_keys: int | None = None,
    *,
    run_forward: Callable[..., Any] | None = None,
    has_unplanned_modules: bool = False,
) -> Any:
    """Run a model whose attentions the probe computes; return the output of its forward.

    Args:
        model: The model.
        inputs: The arguments of its forward.
        plan: The layer key of each attention call of each module.
        probe: Computes each attention.
        min_light_keys: A mask with at least this many keys is a light mask; None = all masks are full masks.
        run_forward: Called with the inputs instead of the model. It runs the model, for example with a head on top.
        has_unplanned_modules: Whether modules outside of the plan, as in a vision tower, attend too, without the probe.

    Raises:
        AttnscopeError: The model computes other attentions than those of the plan, or changes a light mask.
    """
    pending_by_module = {module: list(layer_keys) for module, layer_keys in plan.items()}
    run = _Run(probe, pending_by_module, has_unplanned_modules, min_light_keys)
    return _forward(model, run_forward or model, inputs, run)


def _forward(
    model: PreTrainedModel, function: Callable[..., Any], inputs: Mapping[str, Any], run: _Run
) -> Any:
    """Return the output of a function that calls the model. All attention computed meanwhile belongs to the run."""
    with use_attention(model, choose_implementation(model)):
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
    """Compute one attention for transformers, which calls it as it calls its own `sdpa_attention_forward`.

    Args:
        module: The module that asks for the attention.
        query: (batch, n_heads, query, d_head).
        key: (batch, n_kv_heads, key, d_head), not repeated.
        value: (batch, n_kv_heads, key, d_value).
        attention_mask: None, boolean (True = may attend), or floats to add to the scores.
        dropout: Probability with which weights are dropped. A run ignores it.
        scaling: Factor on the dot products; None = 1 / sqrt(d_head).
        is_causal: Whether query i may attend to keys 0..i only, if attention_mask is None; None = as the module's
            attribute `is_causal` says, or True if it has no such attribute.
        position_bias: Floats to add to the scores.
        softcap: Soft cap of the scores, as in AttentionCall.
        s_aux: One more score per head that enters the softmax and has no value: AttentionCall's `sinks`.
        others: Refused if they could change the result. `sliding_window` could not: the mask contains it already.

    Returns:
        The output, (batch, query, n_heads, d_value), and no weights.
    """
    # Refuse arguments that could change the result in a way that AttentionCall does not express.
    for name, argument in others.items():
        if name not in _IGNORED_ARGUMENTS and argument is not None and argument is not False:
            raise AttnscopeError(
                f"{type(module).__name__} passes its attention an argument {name} that is not known"
            )
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    # A module outside of the plan, as in a vision tower, computes its attention as if there were no run.
    run = _run.get()
    if run is not None and run.has_unplanned_modules and module not in run.pending_by_module:
        run = None
    # Find out the layer, and the rule that a light mask leaves out.
    kind: Kind = "encoder"
    layer = 0
    rule: LightRule | None = None
    if run is not None:
        kind, layer = run.pop_layer_key(module)
        rule = _find_light_rule(module, attention_mask, run)
    # Split masks and biases into booleans and finite floats. Each broadcasts to (batch, head, query, key).
    mask, bias = split_mask_and_bias(attention_mask, query.dtype)
    bias_mask, more_bias = split_mask_and_bias(position_bias, query.dtype)
    # Drop a light mask that hides no padding, because kernels are fastest without a mask. Keep it if its rule has a
    # window: probes cache results by mask, and must not mistake a layer with a window for a layer without one.
    if rule is not None and rule.window is None and mask is not None and mask.all():
        mask = None
    # Without a mask, attention may be causal. The exception is a single query: it is the newest token, with the keys
    # of all earlier tokens in the cache, so it may attend to all of them.
    if rule is None:
        rule = LightRule(is_causal and attention_mask is None and query.shape[2] > 1, None)
    # All texts share a tensor whose batch axis has size 1.
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
    # (batch, head, query, d_value) -> (batch, query, head, d_value), the order that transformers expects.
    output = attend(call) if run is None else run.attend(module, call, others.get("sliding_window"))
    return output.transpose(1, 2).contiguous(), None


def _combine(
    tensor_a: Tensor | None, tensor_b: Tensor | None, operation: Callable[[Tensor, Tensor], Tensor]
) -> Tensor | None:
    """Return two masks, or two biases, combined by an operation. If one of them is None, return the other."""
    if tensor_a is None:
        return tensor_b
    if tensor_b is None:
        return tensor_a
    return operation(tensor_a, tensor_b)


def split_mask_and_bias(
    tensor: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Split the tensor that a model adds to its scores into a boolean mask (True = may attend) and a finite bias.

    A mask that hides no key becomes None, and so does a bias of zeros. A boolean tensor is a mask without a bias.

    Models hide keys by adding the lowest number of a dtype, finfo.min. A bias may have been added to that number, so
    every number below finfo.min / 2 hides its key. The dtype is the tensor's or, if it was converted, the queries'.

    Raises:
        AttnscopeError: The tensor holds integers: a 1 could mean a key that is kept or a key that is hidden.
    """
    if tensor is None or tensor.dtype == torch.bool:
        return tensor, None
    if not tensor.is_floating_point():
        raise AttnscopeError(f"an attention mask of {tensor.dtype} could mean two things")
    lowest = max(torch.finfo(tensor.dtype).min, torch.finfo(dtype).min)
    mask = tensor > lowest / 2
    bias = tensor.where(mask, 0.0)
    return None if mask.all() else mask, bias if bias.any() else None


def attention_function_like_eager(
    module: nn.Module, *tensors: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """Compute as `attention_function` does, for models in which a query may attend to every key if there is no mask."""
    others["is_causal"] = False
    return attention_function(module, *tensors, **others)  # type: ignore[arg-type]


AttentionInterface.register(LIKE_SDPA, attention_function)
AttentionInterface.register(LIKE_EAGER, attention_function_like_eager)
# Without a mask function of the same name, decoders would get no mask at all, and silently run non-causal.
AttentionMaskInterface.register(LIKE_SDPA, lambda **request: _make_mask(sdpa_mask, request))
AttentionMaskInterface.register(LIKE_EAGER, lambda **request: _make_mask(eager_mask, request))


def choose_implementation(model: PreTrainedModel) -> str:
    """Return the name by which a model looks up our functions: LIKE_SDPA if all its submodels support sdpa."""
    parts = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    return LIKE_SDPA if all(part._supports_sdpa for part in parts) else LIKE_EAGER


# Light masks -----------------------------------------------------------------------------------------------------


def _make_mask(make_full_mask: Callable[..., Tensor | None], request: dict[str, Any]) -> Tensor | None:
    """Return a light mask if the run takes one for a text of this length; else transformers' own full mask."""
    run = _run.get()
    if run is None or run.min_light_keys is None:
        return make_full_mask(**request)
    n_keys = request["kv_length"]
    rule = _read_light_rule(request)
    # 1 or True = a token, 0 or False = padding: (batch, key)
    padding = prepare_padding_mask(request.get("attention_mask"), n_keys, request.get("kv_offset", 0))
    if padding is None:
        padding = torch.ones(request["batch_size"], n_keys, device=request.get("device", "cpu"))
    mask: Tensor | None
    if rule is None or padding.ndim != 2 or n_keys < run.min_light_keys:
        rule = None
        mask = make_full_mask(**request)
    else:
        # Clone the padding: `_find_light_rule` recognises the mask by its memory address. (batch, 1, 1, key)
        mask = padding.bool()[:, None, None, :n_keys].clone()
    if mask is not None:
        run.masks.append((mask, rule))
    return mask


# transformers returns new function objects on each call, all with the same code object. So we compare code objects, and
# read the values that a function was made with, such as the window, from its closure.
_AND_CODE = and_masks().__code__
_WINDOW_CODE = sliding_window_overlay(1).__code__
_BIDIRECTIONAL_WINDOW_CODE = sliding_window_bidirectional_overlay(1).__code__


def _read_light_rule(request: Mapping[str, Any]) -> LightRule | None:
    """Return the rule of a mask function that hides keys by causality and windows alone; else None."""
    if request.get("q_offset", 0) or request.get("kv_offset", 0):
        return None
    is_causal = False
    windows: list[int] = []
    # A key is visible if all of these functions allow it. `and_masks` makes one function of several: unpack it.
    functions = [request.get("mask_function", causal_mask_function)]
    while functions:
        function = functions.pop()
        code = getattr(function, "__code__", None)
        if code is _AND_CODE:
            functions += inspect.getclosurevars(function).nonlocals["mask_functions"]
        elif code is _WINDOW_CODE:
            # It allows keys less than `sliding_window` tokens away.
            windows.append(inspect.getclosurevars(function).nonlocals["sliding_window"])
        elif code is _BIDIRECTIONAL_WINDOW_CODE:
            # It allows keys at most `sliding_window` tokens away.
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


def _find_light_rule(module: nn.Module, mask: Tensor | None, run: _Run) -> LightRule | None:
    """Return the rule that a light mask leaves out; None for a full mask.

    Raises:
        AttnscopeError: The run has light masks, and this mask is none of ours: the model may have changed a light mask.
    """
    if mask is None or all(rule is None for _, rule in run.masks):
        return None
    for known_mask, rule in run.masks:
        # A model may pass a view of the mask. A view that starts at the same address is the same mask.
        is_same = mask.data_ptr() == known_mask.data_ptr() and mask.shape[-1] == known_mask.shape[-1]
        if is_same and mask.dtype == known_mask.dtype:
            return rule
    raise AttnscopeError(
        f"{type(module).__name__} changes its mask before it attends, which is not known for texts of this length",
        f"give fewer than {LIGHT_FROM} tokens",
    )


_config_names_by_model: weakref.WeakKeyDictionary[nn.Module, dict[str, list[tuple[Any, str | None]]]] = (
    weakref.WeakKeyDictionary()
)
"""Model -> implementation -> (configuration, implementation that it must name) for each part of the model."""


@contextlib.contextmanager
def use_attention(model: nn.Module, implementation: str | None) -> Iterator[None]:
    """Make a model use an attention implementation, in eval mode and frozen; restore the model when the context ends.

    `restore_state` undoes what forward passes change, so that no text depends on earlier texts. The context holds the
    model's lock, so other threads wait. Gradients flow through tensors that a probe supplies, but not into the model.
    The implementation is a name such as "eager" or `LIKE_SDPA`; None = keep the model's own.
    """
    # Composite models (LLaVA) have one configuration per part. Each configuration names its own implementation.
    configs = collect_configs(
        *(module.config for module in model.modules() if isinstance(module, PreTrainedModel))
    )
    no_autocast = torch.autocast(device_of(model).type, enabled=False)
    with lock_model([model]), no_autocast, restore_state(model, configs):
        # Torch refuses to set requires_grad of tensors made in inference mode. They never get gradients anyway.
        trainable_parameters = [
            parameter
            for parameter in model.parameters()
            if parameter.requires_grad and not parameter.is_inference()
        ]
        try:
            # Set the attribute `training`, as eval() does; restore_state restores it.
            for module in model.modules():
                if module.training:
                    module.training = False
            for parameter in trainable_parameters:
                parameter.requires_grad_(False)
            if implementation is not None and isinstance(model, PreTrainedModel):
                names = _config_names_by_model.setdefault(model, {})
                if implementation not in names:
                    names[implementation] = _switch_implementation(model, configs, implementation)
                for config, name in names[implementation]:
                    config._attn_implementation_internal = name
            yield
        finally:
            for parameter in trainable_parameters:
                parameter.requires_grad_(True)


def _switch_implementation(
    model: PreTrainedModel, configs: Sequence[Any], implementation: str
) -> list[tuple[Any, str | None]]:
    """Make a model use an attention implementation; return (configuration, implementation that it names then) of each.

    transformers' own function knows which parts support the implementation, but is slow: the caller stores the result.
    """
    model.set_attn_implementation(implementation)
    # set_attn_implementation skips parts that chose their attention class when the model was built. The only name that
    # such parts look up again later is "eager", so every part must have it.
    if implementation == "eager":
        return [(config, implementation) for config in configs]
    return [(config, config._attn_implementation_internal) for config in configs]


_CONTAINER_TYPES = frozenset({dict, OrderedDict, list, set})


@contextlib.contextmanager
def restore_state(model: nn.Module, configs: Iterable[Any]) -> Iterator[None]:
    """Restore a model's state, except its parameters, when the context ends.

    Forward passes change a model: BigBird's block-sparse layers become full layers at the first short text and stay
    full, and rotary tables grow with the longest text. The context restores attributes of modules, submodules, buffers,
    hooks, and settings of configurations. It also restores the global random states of torch (on the CPU and the
    model's device) and NumPy: BigBird attends to random blocks, and the caller's own draws must not depend on that.

    Buffers become the same tensor objects again; numbers written into a buffer stay. If accelerate spreads the model
    over devices, it moves buffers itself, so they are skipped.
    """
    # Copy the containers, not their contents: buffers stay the same tensors.
    saved_contents: list[tuple[Any, Any]] = []
    for owner in (*model.modules(), *configs):
        attributes = vars(owner)
        for container in (attributes, *_containers_in(attributes)):
            saved_contents.append((container, container.copy()))
    numpy_state = np.random.get_state()  # noqa: NPY002 - the one that models draw from
    try:
        with fork_rng(device_of(model)):
            yield
    finally:
        np.random.set_state(numpy_state)  # noqa: NPY002
        for container, content in saved_contents:
            # Never remove an entry that stays, not even for a moment: another thread may be reading it.
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
    """Return the dictionaries, lists and sets among a module's attributes, except the dictionary of its parameters."""
    # A module with accelerate's hook has its buffers moved between devices by accelerate.
    skipped_names = {"_parameters", "_buffers"} if "_hf_hook" in attributes else {"_parameters"}
    return [
        value
        for name, value in attributes.items()
        if type(value) in _CONTAINER_TYPES and name not in skipped_names
    ]
