"""The seam inside Hugging Face models: their attention calls become AttentionCalls, whoever makes them.

transformers lets a model look up its attention function and its mask function by name. Both are registered here, once
a process, under two names, for two dialects: models that know torch's scaled_dot_product_attention leave out masks that
plain causality can stand for; the others hand over every mask whole, and none means that every key may be seen.

What happens at the seam is decided by the run in progress (a context variable, so that threads do not see each
other's). Outside of a run, the function is plain attention.

For long texts the mask functions do not write out which query may attend to which key, which takes gigabytes at 32,000
tokens: they hand over the padding alone, (batch, 1, 1, key), and remember what else the model asked for, causality or a
sliding window, until that same mask arrives at the attention function (`Light`). What asks for more is written out.

Knows no files, no tokenizers and no text.
"""

import contextlib
import inspect
import itertools
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

from attnscope.core.attention.precision import without_autocast
from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import AttentionCall, Kind, Probe, attend, attend_with_weights
from attnscope.errors import AttnscopeError
from attnscope.models.devices import device_of, fork_rng
from attnscope.models.turns import take_turn

LIKE_SDPA = "attnscope"
LIKE_EAGER = "attnscope_explicit"
"""The names of our attention and mask functions among transformers' implementations."""

# What only other kernels read: packed sequences, and windows that the mask holds already.
_OF_KERNELS = "cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k sliding_window deterministic"
# What a model hands on to everything below it, and that no attention function of transformers reads.
_PASSED_DOWN = (
    "position_ids cache_position use_cache output_attentions output_hidden_states return_dict "
    "output_router_logits num_items_in_batch position_embeddings token_type_ids mm_token_type_ids"
)
_HARMLESS = frozenset([*_OF_KERNELS.split(), *_PASSED_DOWN.split()])
"""Arguments that do not change what attention computes. Any other one is refused unless it is None or False."""

LIGHT_FROM = 1024
"""Tokens from which masks are handed over by key alone, where the model understands that."""


@dataclass(frozen=True)
class Light:
    """The rule that a mask by key alone leaves out.

    Attributes:
        is_causal: Whether query i sees keys 0..i only.
        window: Query i sees only keys that are less than so many tokens away; None = all.
    """

    is_causal: bool
    window: int | None


Plan = Mapping[nn.Module, Sequence[Place]]
"""For each module that computes attention: what its first, second … call in one forward pass is."""


@dataclass(frozen=True, eq=False)
class Seen:
    """One attention as a rehearsal saw it; of one that a model gives out itself, the weights alone are known.

    Attributes:
        weights: (batch, head, query, key)
        module: The module that computes it.
        call: What reached the seam; its layer and kind mean nothing yet.
        window: The sliding window that the module named, in tokens; None where it named none.
    """

    weights: Tensor
    module: nn.Module | None = None
    call: AttentionCall | None = None
    window: int | None = None


@dataclass(eq=False)
class _Run:
    """One forward pass of one model in one thread: a rehearsal, or with a probe.

    Attributes:
        probe: What happens at the seam; None = a rehearsal, which keeps what it sees.
        waiting: Module -> which attentions it has yet to compute, in their order.
        beside: Whether modules that `waiting` does not name may attend too, unseen by the probe.
        light_from: Keys from which masks are handed over by key alone; None = never.
        masks: In a run with light masks, the masks that were handed over, each with the rule that it leaves out; None
            of one that is written out.
        seen: What a rehearsal saw.
    """

    probe: Probe | None = None
    waiting: dict[nn.Module, list[Place]] = field(default_factory=dict)
    beside: bool = False
    light_from: int | None = None
    masks: list[tuple[Tensor, Light | None]] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)

    def attend(self, module: nn.Module, call: AttentionCall, window: int | None) -> Tensor:
        """Return what a module's attention puts out, (batch, head, query, d_value), by the probe if there is one."""
        if self.probe is not None:
            return self.probe(call)
        output, weights = attend_with_weights(call)
        self.seen.append(Seen(weights, module, call, window))
        return output

    def next_place(self, module: nn.Module) -> Place:
        """Return which attention a module computes now, and wait for it no longer.

        In a rehearsal that is not known yet: attentions are counted.
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
        missing = next(itertools.chain(*self.waiting.values()), None)
        if missing is not None:
            kind, layer = missing
            raise AttnscopeError(
                f"{kind} layer {layer} computed no attention on this input, as it did when the model was loaded",
                "a part would be shown as the whole; give the texts one by one, or one of another length",
            )


_run: ContextVar[_Run | None] = ContextVar("attnscope_run", default=None)


def rehearse(model: PreTrainedModel, inputs: Mapping[str, Any]) -> tuple[Any, list[Seen]]:
    """Run a model through the seam without a plan; return its output, and its attention calls in order."""
    run = _Run()
    return _forward(model, model, inputs, run), run.seen


def perform(
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
        plan: Which call is which layer, of the calls that the forward makes.
        probe: What happens at the seam.
        light_from: Keys from which masks are handed over by key alone; None = never (see `Light`).
        through: What is called instead of the model, to run it: with a head on top, say, or only in part.
        beside: Whether modules that the plan does not name may attend too, unseen by the probe: a tower that makes
            tokens of pictures.

    Raises:
        AttnscopeError: The model computes other attentions than the plan names, or changes a light mask.
    """
    waiting = {module: list(places) for module, places in plan.items()}
    return _forward(model, through or model, inputs, _Run(probe, waiting, beside, light_from))


def _forward(
    model: PreTrainedModel, function: Callable[..., Any], inputs: Mapping[str, Any], run: _Run
) -> Any:
    """Return the output of a function that calls the model, as part of a run."""
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
    # Find which layer this is. Attention beside the plan, as in a tower that makes tokens of pictures, is no part of
    # the run.
    run = _run.get()
    if run is not None and run.beside and module not in run.waiting:
        run = None
    kind: Kind = "encoder"
    layer = 0
    if run is not None:
        kind, layer = run.next_place(module)
    # Split masks and biases into booleans and finite floats: each broadcasts to (batch, head, query, key).
    light = None if run is None else _light_of(module, attention_mask, run)
    mask, bias = mask_and_bias(attention_mask, query.dtype)
    if light is not None and light.window is None and mask is not None and bool(mask.all()):
        # Leave out a mask that hides nothing: it keeps kernels from their fastest way. One beside a window stays, for
        # probes reuse what they worked out for a mask, and must not take a windowed layer for one without.
        mask = None
    more_mask, more_bias = mask_and_bias(position_bias, query.dtype)
    # A query, key or value with a batch of 1 is shared by all texts.
    batch = max(query.shape[0], key.shape[0], value.shape[0])
    if light is None:
        # A single query is a decoder that goes on from cached keys: it sees them all.
        light = Light(is_causal and attention_mask is None and query.shape[2] > 1, None)
    call = AttentionCall(
        layer=layer,
        kind=kind,
        query=query.expand(batch, -1, -1, -1),
        key=key.expand(batch, -1, -1, -1),
        value=value.expand(batch, -1, -1, -1),
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        mask=_join(mask, more_mask, torch.logical_and),
        is_causal=light.is_causal,
        window=light.window,
        bias=_join(bias, more_bias, torch.add),
        softcap=softcap or None,
        sinks=None if s_aux is None else s_aux.reshape(-1),
        dropout_p=dropout if run is None else 0.0,
    )
    # (batch, head, query, d_value) -> (batch, query, head, d_value), as transformers expects it.
    output = attend(call) if run is None else run.attend(module, call, others.get("sliding_window"))
    return output.transpose(1, 2).contiguous(), None


def _join(
    one: Tensor | None, other: Tensor | None, join: Callable[[Tensor, Tensor], Tensor]
) -> Tensor | None:
    """Return what two masks, or two biases, are together; None where there are none."""
    if one is None or other is None:
        return other if one is None else one
    return join(one, other)


def mask_and_bias(added: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Take apart what a model adds to its scores: where it may attend, a boolean mask, and a finite bias, if any.

    Of floats, the lowest number of a precision, its half, and less mean "never": sums of such a number and a bias are a
    little off it. They may have been made for the precision of the queries, `dtype`, and then converted. Integers are
    refused: their 1 could mean either.
    """
    if added is None or added.dtype == torch.bool:
        return added, None
    if not added.is_floating_point():
        raise AttnscopeError(f"an attention mask of {added.dtype} could mean two things")
    least = max(torch.finfo(added.dtype).min, torch.finfo(dtype).min) / 2
    may = added > least
    bias = added.masked_fill(~may, 0.0)
    return (None if bool(may.all()) else may), (bias if bool(bias.any()) else None)


def attention_function_like_eager(
    module: nn.Module, *tensors: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """Compute as `attention_function` does, for models whose masks say everything: no mask means all keys."""
    return attention_function(module, *tensors, **{**others, "is_causal": False})  # type: ignore[arg-type]


AttentionInterface.register(LIKE_SDPA, attention_function)
AttentionInterface.register(LIKE_EAGER, attention_function_like_eager)
# Without a mask function of that name decoders would get no mask at all, and run non-causal in silence.
AttentionMaskInterface.register(LIKE_SDPA, lambda **request: _mask(sdpa_mask, request))
AttentionMaskInterface.register(LIKE_EAGER, lambda **request: _mask(eager_mask, request))


def implementation_for(model: PreTrainedModel) -> str:
    """Return the dialect that a model and all its parts understand."""
    parts = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    return LIKE_SDPA if all(part._supports_sdpa for part in parts) else LIKE_EAGER


# Light masks -----------------------------------------------------------------------------------------------------


def _mask(written_out: Callable[..., Tensor | None], request: dict[str, Any]) -> Tensor | None:
    """Return a mask as transformers' own function makes it, or a light one of many keys in a run that takes them."""
    run = _run.get()
    if run is None or run.light_from is None:
        return written_out(**request)
    # A light mask needs a rule of causality and windows alone, and padding by key.
    n_keys = int(request["kv_length"])
    rule = _rule(request) if n_keys >= run.light_from else None
    padding = prepare_padding_mask(request.get("attention_mask"), n_keys, request.get("kv_offset", 0))
    if padding is None:
        padding = torch.ones(int(request["batch_size"]), n_keys, device=request.get("device", "cpu"))
    mask: Tensor | None
    if rule is None or padding.ndim != 2:
        rule = None
        mask = written_out(**request)
    else:
        # The padding alone: (batch, 1, 1, key)
        mask = padding.bool()[:, None, None, :n_keys].clone()
    if mask is not None:
        run.masks.append((mask, rule))
    return mask


_AND = and_masks().__code__
_WINDOW = sliding_window_overlay(1).__code__
_BIDIRECTIONAL_WINDOW = sliding_window_bidirectional_overlay(1).__code__


def _rule(request: Mapping[str, Any]) -> Light | None:
    """Return the rule of a mask function; None if it is more than causality, windows, or several of them."""
    if request.get("q_offset", 0) or request.get("kv_offset", 0):
        return None
    is_causal = False
    windows: list[int] = []
    # A conjunction of functions, each of which must allow a key. The list grows by the parts of conjunctions.
    functions = [request.get("mask_function", causal_mask_function)]
    for function in functions:
        code = getattr(function, "__code__", None)
        # The values that a function was made of stand in its closure.
        if code is _AND:
            functions += inspect.getclosurevars(function).nonlocals["mask_functions"]
        elif code is _WINDOW:  # less than so many tokens away
            windows.append(inspect.getclosurevars(function).nonlocals["sliding_window"])
        elif code is _BIDIRECTIONAL_WINDOW:  # at most so many
            windows.append(inspect.getclosurevars(function).nonlocals["sliding_window"] + 1)
        elif function is causal_mask_function:
            is_causal = True
        elif function is not bidirectional_mask_function:
            return None
    n_keys = request["kv_length"]
    if (is_causal or windows) and request["q_length"] != n_keys:
        return None
    window = min(windows, default=n_keys)
    return Light(is_causal, window if window < n_keys else None)


def _light_of(module: nn.Module, mask: Tensor | None, run: _Run) -> Light | None:
    """Return the rule behind a light mask; None for masks that say it all.

    Where light masks were handed over, one that was not is refused: it may be what the model made of a light one.
    """
    if mask is None or all(rule is None for _, rule in run.masks):
        return None
    for issued, rule in run.masks:
        # It is the same mask, or a view of it, where it begins in the same place of memory.
        is_same = mask.data_ptr() == issued.data_ptr() and mask.shape[-1] == issued.shape[-1]
        if is_same and mask.dtype == issued.dtype:
            return rule
    raise AttnscopeError(
        f"{type(module).__name__} changes its mask before it attends, which is not known for texts of this length",
        f"give fewer than {LIGHT_FROM} tokens",
    )


# Switching ------------------------------------------------------------------------------------------------------


_settings: "weakref.WeakKeyDictionary[nn.Module, dict[str, list[tuple[Any, str | None]]]]"
_settings = weakref.WeakKeyDictionary()
"""Model -> attention implementation -> each of its configurations, and the name that it must hold for it."""


@contextlib.contextmanager
def use_attention(model: nn.Module, implementation: str | None) -> Iterator[None]:
    """Make a model use an attention implementation, in eval mode and frozen, and put everything back afterwards.

    What a forward pass itself changes is put back too (see `restore_state`), so that no text depends on those before
    it. It is this thread's turn with the model meanwhile.

    Gradients still flow through whatever a probe brings along. None stands for the implementation that the model has,
    which is all there is of modules that are no model of transformers.
    """
    # Composite models (LLaVA) have a configuration per part, and each names its own implementation.
    configs = parts_of_config(
        *(module.config for module in model.modules() if isinstance(module, PreTrainedModel))
    )
    with take_turn([model]), without_autocast(device_of(model)), restore_state(model, configs):
        settings = _settings.setdefault(model, {})
        # Tensors made in inference mode never learn, and torch refuses to set their requires_grad.
        learning = [
            parameter
            for parameter in model.parameters()
            if parameter.requires_grad and not parameter.is_inference()
        ]
        try:
            for module in model.modules():
                if module.training:
                    module.training = False
            for parameter in learning:
                parameter.requires_grad_(False)
            if implementation is not None and isinstance(model, PreTrainedModel):
                if implementation not in settings:
                    settings[implementation] = _switch(model, configs, implementation)
                for config, name in settings[implementation]:
                    config._attn_implementation_internal = name
            yield
        finally:
            for parameter in learning:
                parameter.requires_grad_(True)


def _switch(
    model: PreTrainedModel, configs: Sequence[Any], implementation: str
) -> list[tuple[Any, str | None]]:
    """Make a model use an attention implementation; return the name that each of its configurations then holds.

    transformers' own switch is slow, but knows which parts can change: its result is kept.
    """
    model.set_attn_implementation(implementation)
    # Classes chosen when the model was built look up "eager" alone anew, so every part must name it.
    if implementation == "eager":
        return [(config, implementation) for config in configs]
    return [(config, config._attn_implementation_internal) for config in configs]


def parts_of_config(*configs: Any) -> list[Any]:
    """Return configurations and those of their parts that name an attention implementation, each once."""
    parts: dict[int, Any] = {}
    waiting = list(configs)
    while waiting:
        config = waiting.pop()
        if config is None or id(config) in parts or not hasattr(config, "_attn_implementation_internal"):
            continue
        parts[id(config)] = config
        waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(parts.values())


# Leaving a model as it is ----------------------------------------------------------------------------------------

_HOLDERS = frozenset({dict, OrderedDict, list, set})


@contextlib.contextmanager
def restore_state(model: nn.Module, configs: Iterable[Any]) -> Iterator[None]:
    """Put back all that is no parameter after a forward pass that changed it.

    BigBird's block-sparse layers become full ones at the first short text and stay so; rotary tables grow with the
    longest text. Put back are attributes of modules, submodules, buffers, hooks, and settings of configs. So are the
    global random states of torch (on the CPU and the model's device) and NumPy: BigBird draws the blocks that it
    attends to, and a caller's own draws must not depend on what is looked at.

    Buffers are put back as the tensors that they were; what is written into one stays. Those of a model that
    accelerate spreads over devices are left to it, which moves them.
    """
    # Copies of the containers, not of their contents: buffers stay the same tensors.
    owners = [vars(module) for module in model.modules()] + [vars(config) for config in configs]
    before = [
        (holder, holder.copy())
        for attributes in owners
        for holder in (attributes, *_holders_in(attributes))
    ]
    of_numpy = np.random.get_state()  # noqa: NPY002 - the one that models draw from
    try:
        with fork_rng(device_of(model)):
            yield
    finally:
        np.random.set_state(of_numpy)  # noqa: NPY002
        for holder, content in before:
            # What is to stay is never taken out, not even for a moment: another thread may be reading it.
            if isinstance(holder, list):
                holder[:] = content
                continue
            holder.update(content)
            for extra in [key for key in holder if key not in content]:
                if isinstance(holder, set):
                    holder.discard(extra)
                else:
                    holder.pop(extra)


def _holders_in(attributes: dict[str, Any]) -> list[Any]:
    """Return the dictionaries, lists and sets among a module's attributes."""
    left_alone = {"_parameters", "_buffers"} if "_hf_hook" in attributes else {"_parameters"}
    return [
        value for name, value in attributes.items() if type(value) in _HOLDERS and name not in left_alone
    ]
