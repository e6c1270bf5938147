"""What was found out of a model's attention, and its comparison with eager attention on longer texts.

A self-check on a few tokens sees none of what begins behind them: windows, chunks and blocks. A second one, on a text
longer than all that are configured, costs what such a text costs; so at load it is as long as is cheap, and where that
leaves a window unreached, it is done when the first text comes that reaches it.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnscope.core.attention.seam import Kind, attend
from attnscope.errors import AttnscopeError, first_line, is_out_of_memory
from attnscope.models.hf.check.compare import (
    Outcome,
    compare,
    compare_hidden,
    explain_no_weights,
    run_eager,
    run_eager_or_own,
    tolerance,
)
from attnscope.models.hf.check.examples import LENGTHS, Example, long_example, max_tokens, standing_arguments
from attnscope.models.hf.seam import Plan, Seen, perform, rehearse, use_attention

SHORTEST = 37
"""Tokens of the second text of a self-check, at the least."""

_WORK_AT_LOAD = 1e10
"""Parameters x tokens up to which a longer text is tried at load: twice 74 tokens through 135 million parameters."""

_MAPS_AT_LOAD = 64 * 2**20
"""Bytes of weights that may be held to compare them with eager ones."""

_SCORES = 2 * 2**30
"""Bytes that eager attention of one layer may take: 12 per weight, three times its scores in float32."""

_REACH = re.compile(
    r"(window|window_size|chunk_size|chunk_length|block_size|local_attention|local_radius|index_top_?k"
    r"|original_max_position_embeddings)$"
)
_ELSEWHERE = re.compile(r"mamba|ssm|linear|feed_forward|vision|image|video|audio|speech|conv|n_window")


def reaches(config: Any) -> tuple[int, ...]:
    """The windows, chunks and blocks that a configuration names, in tokens, sorted."""
    numbers = {*_numbers(vars(config.get_text_config())), *_numbers(vars(config))}
    limit = full_up_to(config)
    return tuple(sorted(numbers if limit is None else numbers | {limit}))


def full_up_to(config: Any) -> int | None:
    """Tokens up to which BigBird attends in full, and sparsely beyond; None for other models."""
    blocks, chance = getattr(config, "block_size", None), getattr(config, "num_random_blocks", None)
    return (5 + 2 * chance) * blocks if isinstance(blocks, int) and isinstance(chance, int) else None


def mixes_lengths(config: Any, mask: Tensor | None) -> bool:
    """Whether padding changes what a model computes for a text of a batch.

    BigBird attends in full up to a length and sparsely beyond. Rotary positions by longrope have long and short
    factors, chosen by the longest text of a batch; dynamic ones are scaled by its length beyond a limit. The mask is
    (text, token), 1 or True at real tokens.
    """
    if mask is None or _kind_of(config, mask.shape[1]) == _kind_of(config, 0):
        return False
    return len({_kind_of(config, n_tokens) for n_tokens in (mask.shape[1], *mask.sum(1).tolist())}) > 1


def _kind_of(config: Any, n_tokens: int) -> tuple[int, ...]:
    """Texts whose lengths are of different kinds are not computed alike."""
    limit, text = full_up_to(config), config.get_text_config()
    kinds: list[int] = [] if limit is None else [n_tokens > limit]
    for rope in _rotary(getattr(text, "rope_parameters", None) or {}):
        longest = getattr(text, "max_position_embeddings", 0)
        if rope["rope_type"] == "longrope":
            kinds.append(n_tokens > rope.get("original_max_position_embeddings", longest))
        elif "dynamic" in rope["rope_type"]:
            kinds.append(max(n_tokens, longest))
    return tuple(kinds)


def _rotary(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The settings of rotary positions; some models have several, by kind of layer."""
    if "rope_type" in settings:
        yield settings
    else:
        for value in settings.values():
            if isinstance(value, dict):
                yield from _rotary(value)


def _numbers(settings: Mapping[str, Any]) -> Iterator[int]:
    for name, value in settings.items():
        if isinstance(value, dict) and "rope" in name:
            yield from _numbers(value)
        elif isinstance(name, str) and _REACH.search(name) and not _ELSEWHERE.search(name):
            for number in value if isinstance(value, list | tuple) else [value]:
                if isinstance(number, int) and number > 1:
                    yield number


def length_at_load(model: PreTrainedModel, n_heads: int) -> int:
    """Tokens of the second text at load; beyond as many reaches as is cheap, and no longer than the model takes."""
    work = _WORK_AT_LOAD / max(1, sum(parameter.numel() for parameter in model.parameters()))
    most = max(SHORTEST, int(min(work, math.sqrt(_MAPS_AT_LOAD / (8 * max(1, n_heads))))))
    lengths = [length_beyond(reach) for reach in reaches(model.config)]
    length = max([SHORTEST, *(tokens for tokens in lengths if tokens <= most)])
    limit = max_tokens(model)
    return length if limit is None else min(length, limit)


def length_beyond(reach: int) -> int:
    """A length at which some queries see past a window, and that is no multiple of a block."""
    return reach + 1 + min(reach // 2, 32)


def longest_compared(heads_of_layer: int) -> int:
    """Tokens up to which eager attention is run at all to compare with it."""
    return int(math.sqrt(_SCORES / (12 * max(1, heads_of_layer))))


@dataclass(frozen=True, eq=False)
class Survey:
    """What was found out of a model's attention."""

    path: str  # "seam" or "eager"
    plan: Plan  # on the seam: which call is which
    # kind -> numbers of the layers that have attention, in the order of computation
    layers: Mapping[Kind, tuple[int, ...]]
    n_layers: Mapping[Kind, int]  # kind -> how many layers there are, with and without attention
    n_heads: Mapping[Kind, int]  # kind -> the most query heads of a layer; likewise n_kv_heads
    n_kv_heads: Mapping[Kind, int]
    extras: Mapping[str, Any]  # what the forward must be given besides the inputs
    d_model: int
    checked: bool  # whether it was compared with eager
    notes: tuple[str, ...]
    # windows and the like that the texts of the comparison did not reach past yet, in tokens, sorted
    reaches: list[int] = field(default_factory=list)
    # of these, those beyond which what would be shown differs from eager, and what was said of it
    refusals: dict[int, AttnscopeError] = field(default_factory=dict)
    beside: bool = False  # whether modules that the plan does not name attend too, as those of a tower for pictures do
    remembered: str = ""  # when, and with what, it was compared; "" = at this load
    through: Callable[..., Any] | None = None  # what is called instead of the model, to run it; see `seam.perform`


def order_outcome(survey: Survey, output: Any, seen: Sequence[Seen]) -> Outcome:
    """What passed the seam, by kind of attention and in the order of layers."""
    counters = dict.fromkeys(survey.plan, 0)
    calls: dict[Kind, list[Seen]] = {}
    for call in seen:
        number, places = counters.get(call.module, 0), survey.plan.get(call.module, ())
        if number >= len(places):
            raise AttnscopeError("self-check: a padded batch computes more attentions than a single text")
        calls.setdefault(places[number][0], []).append(call)
        counters[call.module] = number + 1
    maps = {kind: [call.weights for call in of_kind] for kind, of_kind in calls.items()}
    sinks = {kind: [call.call.sinks is not None for call in of_kind] for kind, of_kind in calls.items()}
    return Outcome.of(output, maps, sinks)


def check_long(model: PreTrainedModel, survey: Survey) -> str:
    """The second self-check at load: on a text beyond what the configuration names, as far as that is cheap.

    Returns:
        On the seam: why it does not see the whole; of the eager path: what a user must know. "" if all is well.
    """
    n_heads = sum(survey.n_heads[kind] * len(layers) for kind, layers in survey.layers.items())
    length = length_at_load(model, n_heads)
    survey.reaches[:] = [reach for reach in reaches(model.config) if length_beyond(reach) > length]
    return _check_at(model, survey, length, with_maps=True)


def check_beyond(model: PreTrainedModel, survey: Survey, inputs: Mapping[str, Any]) -> None:
    """Compares with eager once more where a text comes that reaches past a window that no comparison reached yet.

    The survey remembers how each comparison ended: windows that were shown truly are compared once, and texts
    beyond one that was not are always refused. A comparison that was cut short, by an interruption or for want of
    memory, is made anew.
    """
    n_tokens = max((inputs[name].shape[1] for name in ("input_ids", "decoder_input_ids") if name in inputs), default=0)
    now = [reach for reach in survey.reaches if reach < n_tokens]
    if not now or not survey.checked:
        return
    for refused in (survey.refusals[reach] for reach in now if reach in survey.refusals):
        raise AttnscopeError(refused.message, refused.hint)
    most = longest_compared(max(survey.n_heads.values()))
    lengths = [length_beyond(reach) for reach in now if length_beyond(reach) <= most]
    if lengths:
        limit = max_tokens(model)
        try:
            with torch.no_grad():
                _check_at(model, survey, lengths[-1] if limit is None else min(lengths[-1], limit), with_maps=False)
        except AttnscopeError as error:
            survey.refusals[now[len(lengths) - 1]] = error
            raise
    survey.reaches[:] = [reach for reach in survey.reaches if reach >= n_tokens]


def _check_at(model: PreTrainedModel, survey: Survey, n_tokens: int, *, with_maps: bool) -> str:
    """Compares hidden states, and weights if they are few enough to hold, with eager on a text of so many tokens."""
    example = long_example(model, n_tokens)
    if example is None or n_tokens <= LENGTHS[1]:
        return ""
    example.inputs.update(survey.extras)
    if survey.path == "eager":
        own = _own_outcome(model, example)
        return "" if own is None else _check_eager_at(model, survey, example, own)
    try:
        if with_maps:
            ours = order_outcome(survey, *rehearse(model, example.inputs))
        else:
            ours = Outcome.of(perform(model, example.inputs, survey.plan, attend), {})
    except Exception:
        if _own_outcome(model, example) is None:
            return ""
        raise
    theirs = run_eager_or_own(model, example, with_maps=with_maps)
    if not with_maps:
        compare_hidden(model, example, ours, theirs, _tolerance_of(model, survey))
        return ""
    reason = compare(model, example, ours, theirs, survey.layers, survey.n_layers)
    return f"on a text of {n_tokens} tokens {reason}" if reason else ""


def compare_on(model: PreTrainedModel, survey: Survey, example: Example) -> None:
    """Compares hidden states on an input with what the model computes as it is, in no more memory than that.

    What is beside the model's own attention may attend too (see `seam.perform`).
    """
    if survey.path != "seam" or not survey.checked:
        return
    example.inputs.update({**standing_arguments(model), **survey.extras})
    with use_attention(model, None):
        own = Outcome.of(model(**example.inputs), {})
    ours = Outcome.of(perform(model, example.inputs, survey.plan, attend, beside=True), {})
    compare_hidden(model, example, ours, own, _tolerance_of(model, survey))


def _own_outcome(model: PreTrainedModel, example: Example) -> Outcome | None:
    """What a model computes as it is; None where it takes no text of this length, whatever its configuration says."""
    try:
        with use_attention(model, None):
            return Outcome.of(model(**example.inputs), {})
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None


def _check_eager_at(model: PreTrainedModel, survey: Survey, example: Example, own: Outcome) -> str:
    try:
        output, maps = run_eager(model, example.inputs)
        wrong = explain_no_weights(model, output, [(example, maps)])
    except Exception as error:
        wrong = f"with eager attention it fails: {shorten(error)}"
    else:
        compare_hidden(model, example, Outcome.of(output, {}), own, _tolerance_of(model, survey))
    n_tokens = next(iter(example.inputs.values())).shape[1]
    return f"Of a text of {n_tokens} tokens {wrong}: such texts are refused." if wrong else ""


def _tolerance_of(model: PreTrainedModel, survey: Survey) -> float:
    return tolerance(model, sum(map(len, survey.layers.values())))


def shorten(error: BaseException) -> str:
    """What an error says, in one line without its full stop."""
    return (error.message if isinstance(error, AttnscopeError) else first_line(error)).rstrip(".")
