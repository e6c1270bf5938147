"""Models with cross-attention from words, or learned queries, to the patches of a picture: what their attention is.

Which of their modules is which attention is known by name, family by family: they do not run on text alone, and maps of
their towers would be too large to try them on a picture at load. What is said of them is compared with what they
compute by themselves on the first picture that they are given. Some have attention of their own code, which is not
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
from attnscope.models.hf.examples import Example
from attnscope.models.hf.parts import hidden_states, silence, standing_arguments
from attnscope.models.hf.rounding import compare, tolerance
from attnscope.models.hf.seam import attention_function, perform, use_attention
from attnscope.models.hf.survey import Survey
from attnscope.models.inside.tape import replace_forwards

Patterns = Mapping[Kind, str]
"""The names of the modules of each kind of attention, as regular expressions with the layer's number."""


def find_modules(base: PreTrainedModel, pattern: str) -> dict[int, nn.Module]:
    """Return the innermost modules of a name, by layer."""
    modules: dict[int, nn.Module] = {}
    for name, module in base.named_modules():  # a module comes before what it holds, as BERT's `crossattention.self`
        match = re.fullmatch(pattern, name)
        if match:
            modules[int(match[1])] = module
    return modules


def survey_cross_attention(base: PreTrainedModel, patterns: Patterns, notes: Sequence[str]) -> Survey:
    """Return the survey of the attention of words and queries; that of the vision tower is left out."""
    # Find the modules of each kind by name; a kind may be missing (BLIP-2 with an encoder-decoder).
    modules: dict[Kind, dict[int, nn.Module]] = {}
    for kind, pattern in patterns.items():
        by_layer = find_modules(base, pattern)
        if by_layer:
            modules[kind] = by_layer
    # Two kinds in one stack of layers share its depth.
    plan: dict[nn.Module, list[Place]] = {}
    depths: dict[str, int] = {}
    for kind, by_layer in modules.items():
        plan |= {module: [(kind, layer)] for layer, module in by_layer.items()}
        stack = _stack_of(patterns[kind])
        depths[stack] = max(depths.get(stack, 0), 1 + max(by_layer))
    heads = {kind: [_heads_of(module) for module in by_layer.values()] for kind, by_layer in modules.items()}
    return Survey(
        path="seam",
        plan=plan,
        layers={kind: tuple(by_layer) for kind, by_layer in modules.items()},
        n_layers={kind: depths[_stack_of(patterns[kind])] for kind in modules},
        n_heads={kind: max(n for n, _ in of_kind) for kind, of_kind in heads.items()},
        n_kv_heads={kind: max(n for _, n in of_kind) for kind, of_kind in heads.items()},
        d_model=int(base.config.get_text_config(decoder=True).hidden_size),
        notes=tuple(notes),
        beside=True,
        through=_at_seam(base),
    )


def _stack_of(pattern: str) -> str:
    """Return where the layers of a kind of attention lie: two kinds may take turns in them."""
    return pattern.partition(r"(\d+)")[0]


def _heads_of(module: nn.Module) -> tuple[int, int]:
    """Return the query heads and key/value heads of a module."""
    groups = getattr(module, "num_key_value_groups", 1) or 1
    for holder in (module, getattr(module, "config", None)):
        for name in ("decoder_attention_heads", "num_attention_heads", "num_heads", "n_heads"):
            n_heads = getattr(holder, name, None)
            if isinstance(n_heads, int):
                return n_heads, n_heads // groups
    raise AttnscopeError(f"{type(module).__name__} does not say how many heads it has")


def compare_cross_attention(
    base: PreTrainedModel, survey: Survey, inputs: Mapping[str, Any], sizes: Mapping[str, tuple[int, int]]
) -> None:
    """Compare what passes the seam on photos and words with what the model computes as it is.

    Refuse also attention whose queries and keys are not of the sizes of its kind.
    """
    arguments = {**standing_arguments(base), **inputs}

    def observe(call: AttentionCall) -> Tensor:
        seen = (call.n_heads, call.query.shape[2], call.key.shape[2])
        known = (survey.n_heads[call.kind], *sizes[call.kind])
        if seen != known:
            raise AttnscopeError(
                f"{call.kind} layer {call.layer} has {seen[0]} heads of {seen[1]} queries on {seen[2]} keys, where "
                f"{known[0]} of {known[1]} on {known[2]} are known",
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
    """Return a model's result: scores of the vocabulary, or hidden states without a head, (batch, token, …)."""
    result = getattr(output, "logits", None)
    result = hidden_states(output) if result is None else result
    assert isinstance(result, Tensor)
    return result


# Attention that does not look itself up by name -------------------------------------------------------------------

_OWN_CODE = {"BlipTextSelfAttention", "TableTransformerAttention", "TrOCRAttention"}


def _at_seam(base: PreTrainedModel) -> Callable[..., Any] | None:
    """Return a function that runs a model with such attention through the seam; None where it has none."""
    own = [module for module in base.modules() if type(module).__name__ in _OWN_CODE]

    def run(**inputs: Any) -> Any:
        with replace_forwards(own, lambda module: types.MethodType(_attend_as_itself, module)):
            return base(**inputs)

    return run if own else None


def _attend_as_itself(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    key_value_states: Tensor | None = None,
    object_queries: Tensor | None = None,
    spatial_position_embeddings: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute the forward of such a module through the seam, without a cache.

    Positions that are given are in queries and keys, not in values.
    """
    # What attends, (batch, query, d), and what to, (batch, key, d).
    states = encoder_hidden_states if key_value_states is None else key_value_states
    queries = hidden_states if object_queries is None else hidden_states + object_queries
    values = hidden_states if states is None else states
    keys = queries if states is None else states
    keys = keys if spatial_position_embeddings is None else keys + spatial_position_embeddings
    mask = attention_mask if encoder_hidden_states is None else encoder_attention_mask
    if mask is not None and mask.dtype == torch.bool and type(module).__name__ == "TableTransformerAttention":
        mask = ~mask  # its booleans say which keys are hidden

    # Heads apart, (batch, head, token, d_head), and together again.
    has_short_names = hasattr(module, "q_proj")
    names = ("q_proj", "k_proj", "v_proj") if has_short_names else ("query", "key", "value")
    d_head = module.head_dim if has_short_names else module.attention_head_size
    projected = [getattr(module, name)(x) for name, x in zip(names, (queries, keys, values), strict=True)]
    query, key, value = (x.reshape(*x.shape[:-1], -1, d_head).transpose(1, 2) for x in projected)
    output = attention_function(module, query, key, value, mask, is_causal=False)[0].flatten(2)
    return module.out_proj(output) if has_short_names else output, None
