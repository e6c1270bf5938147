"""How long a text must be to show all that a model does: longer than any window, chunk or block that is configured.

A self-check on a few tokens sees none of what begins behind them. A second one, on a text longer than all these, costs
what such a text costs; so at load it is as long as is cheap, and where that leaves a window unreached, it is done when
the first text comes that reaches it.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from attnscope.models.hf.check.examples import max_tokens

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
