"""The pass over the weights on a CUDA device: flash attention that reads its rows on the way. Ours.

One kernel gives the output and every statistic of a row, a second one what keys receive. No weights lie in memory
except those at a few offsets. The rest, of size queries times heads, is torch's.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from attnscope.core.attention.seam import AttentionCall
from attnscope.core.attention.tiles import Block, Buffers
from attnscope.core.measures.backends.board import BOARD, N_COLUMNS, QUERY
from attnscope.core.measures.backends.torch_pass import Read, Reader
from attnscope.core.measures.backends.triton_kernel import read_rows, receive
from attnscope.core.measures.catalogue import OFFSETS, PAIR_FACTS, REACH
from attnscope.core.measures.plan import Plan

TILE = 64, 32
"""Queries of one program, and keys that it reads at a time: registers hold so many with all sums of a row."""

OPTIONS = {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": True}
"""How triton compiles: with 4 warps, 64 keys, or 3 stages rows are spilled to memory (sm_90, as ptxas tells)."""

_ROWS = ("entropy", "entropy_off_rest", "max_weight", "rarest", "seen", "off rest", "rms_distance") + tuple(
    fact + of for fact in PAIR_FACTS for of in ("", " off rest")
)
"""The statistics of each row, in the kernel's order."""

_COLUMNS: dict[str, tuple[str, str]] = (
    {"entropy": ("entropy", "counted"), "relative_entropy": ("entropy", "relative_entropy")}
    | {name: (name, name) for name in ("entropy_off_rest", "max_weight", "rarest")}
    | {"uniform cosine": ("seen", "uniform cosine"), "uniform cosine off rest": ("off rest", "uniform cosine off rest")}
    | {name: (name, "counted") for name in _ROWS[6:]}
)
"""Column of BOARD -> which of _ROWS is added up, and times which column of QUERY."""


class Call(NamedTuple):
    """One block of an attention; what it does not have is None.

    Attributes:
        query: (text, n_heads, query, d_head); its last axis is contiguous, as those of key and value.
        key: (text, n_kv_heads, key, d_head).
        value: (text, n_kv_heads, key, d_value).
        mask: (text, n_heads, query, key), uint8, not 0 = may attend.
        bias: (text, n_heads, query, key).
        sinks: (n_heads,).
        scale: See `AttentionCall`.
        softcap: See `AttentionCall`.
        window: See `AttentionCall`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None
    scale: float
    softcap: float | None
    window: int | None


class Strides(NamedTuple):
    """How far apart numbers lie along the axes of each array, but for the last one of the first four."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    output: tuple[int, ...]
    mask: tuple[int, ...]
    bias: tuple[int, ...]


class Sizes(NamedTuple):
    """How many there are of each; heads to a head of keys; and where the first query stands among the keys."""

    queries: int
    keys: int
    d_head: int
    d_value: int
    group: int
    before: int


class Facts(NamedTuple):
    """What is known of a block, whatever the layer.

    Attributes:
        off_rest: 1 for keys outside the sinks, (text, key), float32.
        final: Where among the keys each text ends in a special token, (text,), int64; if it does not, no key's place.
        rare: 1 for the rarest keys, (text, key), float32.
        cosine: (text, query, key), float32; None if it is not known.
        of_query: Tokens of the queries, -1 for none, (text, query), int64.
        of_key: Tokens of the keys, -2 for none, (text, key), int64.
        before_key: The tokens before these, -2 for none, likewise.
        real: 1 for queries that are tokens and no context, (text, query), float32.
    """

    off_rest: Tensor
    final: Tensor
    rare: Tensor
    cosine: Tensor | None
    of_query: Tensor
    of_key: Tensor
    before_key: Tensor
    real: Tensor


class Out(NamedTuple):
    """What the kernel writes.

    Attributes:
        output: (text, n_heads, query, d_value).
        rows: (text, n_heads, len(_ROWS), query), float32.
        band: Scores at the offsets, (text, n_heads, query, offset), float32; -inf where there are none.
        largest: The largest score, (text, n_heads, query), float32; 0 if there is none.
        scale: 1 / the sum of exponentials of scores less the largest, sinks included, likewise; 0 if there is none.
        shared: 1 / how many keys have the largest score, likewise.
    """

    output: Tensor
    rows: Tensor
    band: Tensor
    largest: Tensor
    scale: Tensor
    shared: Tensor


@torch.no_grad()
def run(call: AttentionCall, plan: Plan, names: tuple[str, ...], read: Reader, buffers: Buffers) -> Tensor:
    """Attention by all sums that there are, whatever `names` wants; else the same as `torch_pass.run`.

    The call is one that `choose.makes` accepts. `buffers` is not used: no tile leaves the kernel.
    """
    batch, n_heads, n_queries, _ = call.query.shape
    rows = call.value.new_zeros(batch, n_queries, n_heads, call.value.shape[3])
    output = rows.transpose(1, 2)
    for block in plan.blocks:
        if block.shape[2]:
            read(block, _read(call, plan, block, output[block.texts, :, block.queries]))
    return output


def _read(call: AttentionCall, plan: Plan, block: Block, output: Tensor) -> Read:
    """Writes the output of a block, and gives its sums."""
    n_texts, n_queries, n_keys = block.shape
    n_heads, before = call.n_heads, block.queries.start - block.keys.start
    cut = _cut(call, block)
    facts = plan.keep(block, "triton", lambda: _facts(plan, block))
    of_rows = call.query.new_empty(3, n_texts, n_heads, n_queries, dtype=torch.float32)
    out = Out(
        output,
        of_rows.new_zeros(n_texts, n_heads, len(_ROWS), n_queries),
        of_rows.new_full((n_texts, n_heads, n_queries, len(OFFSETS)), -torch.inf),
        *of_rows,
    )
    arrays = (cut.query, cut.key, cut.value, output)
    none = (0, 0, 0, 0)
    strides = Strides(
        *(array.stride()[:3] for array in arrays),
        *(none if array is None else array.stride() for array in (cut.mask, cut.bias)),
    )
    sizes = Sizes(n_queries, n_keys, call.query.shape[3], call.value.shape[3], n_heads // call.n_kv_heads, before)
    d, v = (max(16, triton.next_power_of_2(size)) for size in (sizes.d_head, sizes.d_value))
    received = torch.empty(n_texts, n_heads, n_keys, dtype=plan.summed, device=plan.device)
    how = {"IS_CAUSAL": call.is_causal, "M": TILE[0], "N": TILE[1], "D": d, **OPTIONS}
    read_rows[n_heads, triton.cdiv(n_queries, TILE[0]), n_texts](
        cut, strides, sizes, facts, out, OWN_TEXT=plan.own_text, REACH=REACH, V=v, **how
    )
    receive[n_heads, triton.cdiv(n_keys, TILE[1]), n_texts](cut, strides, sizes, facts.real, out, received, **how)
    return Read(_board(plan, block, out), received, out.rows[:, :, _ROWS.index("off rest")])


def _cut(call: AttentionCall, block: Block) -> Call:
    """The block's part of a call."""
    texts, n_texts = block.texts, block.shape[0]
    parts = call.query[texts, :, block.queries], call.key[texts, :, block.keys], call.value[texts, :, block.keys]
    query, key, value = (part if part.stride(3) == 1 else part.contiguous() for part in parts)
    shape = (n_texts, call.n_heads, *block.shape[1:])
    bias = None
    if call.bias is not None:
        bias = call.bias.expand(len(call.query), call.n_heads, call.query.shape[2], call.key.shape[2])
        bias = bias[texts, :, block.queries, block.keys]
    mask = None if block.may is None else block.may.view(torch.uint8).expand(shape)
    return Call(query, key, value, mask, bias, call.sinks, call.scale, call.softcap, call.window)


def _facts(plan: Plan, block: Block) -> Facts:
    texts, of_keys = plan.texts_of(block), block.keys
    like = torch.where(texts.real, texts.ids, -2)
    before = torch.cat([torch.full_like(like[:, :1], -2), like[:, :-1]], 1).masked_fill(~texts.real, -2)
    of_query = torch.where(texts.real, texts.ids, -1)[:, block.queries] if plan.own_text else like[:, :0]
    rare = torch.zeros_like(plan.off_rest) if plan.rarest is None else plan.rarest
    cosines = plan.cosines(block) if plan.own_text else None
    final = texts.final_special
    return Facts(
        plan.off_rest[block.texts, of_keys].float().contiguous(),
        torch.where(final < 0, -1, final - of_keys.start),
        rare[block.texts, of_keys].float().contiguous(),
        None if cosines is None else cosines.float().contiguous(),
        of_query.contiguous(),
        like[:, of_keys].contiguous(),
        before[:, of_keys].contiguous(),
        plan.row(block, "real")[:, 0].float().contiguous(),
    )


def _board(plan: Plan, block: Block, out: Out) -> Tensor:
    """The sums over queries, (text, head, N_COLUMNS)."""
    worth = plan.row(block, "worth")
    board = torch.zeros(*out.largest.shape[:2], N_COLUMNS, dtype=plan.summed, device=plan.device)
    slots = [BOARD[name].start for name in _COLUMNS]
    of_rows = out.rows[:, :, [_ROWS.index(row) for row, _ in _COLUMNS.values()]]
    of_queries = worth[..., [QUERY[name].start for _, name in _COLUMNS.values()]]
    board[..., slots] = (of_rows * of_queries.transpose(2, 3)).sum(-1, dtype=plan.summed)
    if plan.own_text:
        weights = (out.band - out.largest.unsqueeze(-1)).exp_() * out.scale.unsqueeze(-1)
        hits = (out.band == out.largest.unsqueeze(-1)) * out.shared.unsqueeze(-1)
        for name, numbers, by in (("places", weights, "places"), ("places off rest", weights, "places off rest"),
                                  ("hits", hits, "places")):  # fmt: skip
            board[..., BOARD[name]] = (numbers * worth[..., QUERY[by]]).sum(2, dtype=plan.summed)
    return board
