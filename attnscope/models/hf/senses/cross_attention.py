"""Models with cross-attention from words, or learned queries, to the patches of a picture: what their attention is.

Which of their modules is which attention is known by name, family by family: they do not run on text alone, and maps of
their towers would be too large to try them on a picture at load. What is said of them is compared with what they
compute by themselves on the first picture that they are given. Two have attention of their own code, which is not
looked up by name: as they run, what takes its place computes the same at the seam.
"""

import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import AttentionCall, Kind, attend
from attnscope.errors import AttnscopeError
from attnscope.models.hf.examples import Example, standing_arguments
from attnscope.models.hf.layers import Survey
from attnscope.models.hf.parts import silence
from attnscope.models.hf.rounding import compare, hidden_states, tolerance
from attnscope.models.hf.seam import attention_function, perform, use_attention
from attnscope.models.inside.tape import replace_forwards


def survey_cross_attention(
    base: PreTrainedModel,
    patterns: Mapping[Kind, str],
    notes_on: Callable[[PreTrainedModel, Sequence[Kind]], tuple[str, ...]],
) -> Survey:
    """Return what the attention of such a model is, of its words and of its queries; that of its tower is left out.

    Modules of each kind of attention are known by patterns of their names, with the layer's number.
    """
    plan: dict[nn.Module, list[Place]] = {}
    layers: dict[Kind, tuple[int, ...]] = {}
    modules: dict[Kind, list[nn.Module]] = {}
    for kind, pattern in patterns.items():
        named = {name: module for name, module in base.named_modules() if re.fullmatch(pattern, name)}
        # BERT's `crossattention` holds the `crossattention.self` that attends.
        named = {
            name: module for name, module in named.items() if not any(other.startswith(f"{name}.") for other in named)
        }
        numbers = tuple(int(re.fullmatch(pattern, name)[1]) for name in named)  # type: ignore[index]
        if numbers:
            layers[kind] = numbers
            modules[kind] = list(named.values())
            plan |= {module: [(kind, layer)] for layer, module in zip(numbers, named.values(), strict=True)}
    stacks = {kind: patterns[kind].partition(r"(\d+)")[0] for kind in layers}
    heads = {kind: [_heads_of(base, module) for module in of_kind] for kind, of_kind in modules.items()}
    return Survey(
        path="seam",
        plan=plan,
        layers=layers,
        n_layers={
            kind: 1 + max(max(layers[other]) for other, stack in stacks.items() if stack == stacks[kind])
            for kind in layers
        },
        n_heads={kind: max(n for n, _ in of_kind) for kind, of_kind in heads.items()},
        n_kv_heads={kind: max(n for _, n in of_kind) for kind, of_kind in heads.items()},
        d_model=int(base.config.get_text_config(decoder=True).hidden_size),
        notes=notes_on(base, tuple(layers)),
        beside=True,
        through=_at_seam(base),
    )


def _heads_of(base: PreTrainedModel, module: nn.Module) -> tuple[int, int]:
    """Query heads and key/value heads of a module."""
    for holder in (module, getattr(module, "config", None)):
        for name in ("num_attention_heads", "num_heads", "n_heads"):
            if isinstance(n_heads := getattr(holder, name, None), int):
                groups = getattr(module, "num_key_value_groups", 1)
                return n_heads, n_heads // (groups if isinstance(groups, int) and groups else 1)
    raise AttnscopeError(f"{type(module).__name__} of {base.config.model_type} does not say how many heads it has")


def compare_cross_attention(
    base: PreTrainedModel, survey: Survey, inputs: Mapping[str, Any], sizes: Mapping[str, tuple[int, int]]
) -> None:
    """Compare what passes the seam on photos and words with what the model computes as it is.

    Refuses also attention whose queries and keys are not of the sizes of its kind.
    """
    arguments = {**standing_arguments(base), **inputs}

    def observe(call: AttentionCall) -> Tensor:
        seen = (call.n_heads, call.query.shape[2], call.key.shape[2])
        if seen != (survey.n_heads[call.kind], *sizes[call.kind]):
            n_heads, queries, keys = seen
            raise AttnscopeError(
                f"{call.kind} layer {call.layer} has {n_heads} heads of {queries} queries on {keys} keys, where "
                f"{survey.n_heads[call.kind]} of {sizes[call.kind][0]} on {sizes[call.kind][1]} are known",
                "it is not known which of them stand for which part of the picture",
            )
        return attend(call)

    with torch.no_grad(), silence():
        ours = perform(base, arguments, survey.plan, observe, through=survey.through, beside=True)
        with use_attention(base, None):
            own = base(**arguments)
    allowed = tolerance(base, len(survey.plan))
    compare(base, Example({}), {"hidden": result_of(ours)}, {"hidden": result_of(own)}, allowed=allowed)


def result_of(output: Any) -> Tensor:
    """Return what a model computes of words and a picture.

    Scores of the vocabulary, or hidden states without a head.
    """
    result = getattr(output, "logits", None)
    result = hidden_states(output) if result is None else result
    assert isinstance(result, Tensor)
    return result


# Attention that does not look itself up by name -------------------------------------------------------------------


def _at_seam(base: PreTrainedModel) -> Callable[..., Any] | None:
    """Run a model with such attention at the seam; None where it has none."""
    own = [module for module in base.modules() if type(module).__name__ in _OWN_CODE]

    def attend_at_seam(module: nn.Module) -> Callable[..., Any]:
        return types.MethodType(_OWN_CODE[type(module).__name__], module)

    def run(**inputs: Any) -> Any:
        with replace_forwards(own, attend_at_seam):
            return base(**inputs)

    return run if own else None


def _attend_as_blip(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return what BlipTextSelfAttention.forward computes where nothing is cached."""
    states = hidden_states if encoder_hidden_states is None else encoder_hidden_states
    mask = attention_mask if encoder_hidden_states is None else encoder_attention_mask
    projected = module.query(hidden_states), module.key(states), module.value(states)
    return _attend(module, projected, module.attention_head_size, mask), None


def _attend_as_trocr(
    module: Any,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return what TrOCRAttention.forward computes where nothing is cached."""
    states = hidden_states if key_value_states is None else key_value_states
    projected = module.q_proj(hidden_states), module.k_proj(states), module.v_proj(states)
    return module.out_proj(_attend(module, projected, module.head_dim, attention_mask)), None


def _attend(module: nn.Module, projected: Sequence[Tensor], d_head: int, mask: Tensor | None) -> Tensor:
    query, key, value = (x.view(*x.shape[:-1], -1, d_head).transpose(1, 2) for x in projected)
    return attention_function(module, query, key, value, mask, is_causal=False)[0].flatten(2)


_OWN_CODE: Mapping[str, Callable[..., Any]] = {
    "BlipTextSelfAttention": _attend_as_blip,
    "TrOCRAttention": _attend_as_trocr,
}
