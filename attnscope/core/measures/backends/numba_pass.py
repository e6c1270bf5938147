"""The pass over the weights in one go: scores, one fused pass in place, then the product with the values. Ours.

BLAS makes both products of long texts, tile by tile. The pass itself makes those of short texts, head by head, from
where queries, keys and values lie: to lay them out for BLAS takes as long as its product.

For float32 on the CPU. Chunks of queries are tasks that torch's threads share. Their results are added up in their
order, so numbers do not depend on the number of threads.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscope.core.attention.precision import without_autocast
from attnscope.core.attention.seam import AttentionCall
from attnscope.core.attention.tiles import Block, Buffers, times_values
from attnscope.core.measures.backends.board import BOARD, N_COLUMNS, QUERY
from attnscope.core.measures.backends.numba_compiler import parallel_address
from attnscope.core.measures.backends.numba_kernel import Factors, Given, read_rows
from attnscope.core.measures.backends.numba_vectors import LANES
from attnscope.core.measures.backends.torch_pass import Read, Reader
from attnscope.core.measures.catalogue import OFFSETS, PAIR_FACTS
from attnscope.core.measures.plan import Plan

CHUNK = 128
"""Queries of one task, whose mass on keys is added up in float32."""

CHUNK_OF_LONG = 32
"""Queries of one task of a long text: a tile holds few of them, and threads share them."""

TILE = 300_000
"""Weights that are worked on together: 1.2 MB, so that products and the pass find each other's results in the cache."""

LEAST_SHARED = 200_000
"""Weights from which on a tile is shared by threads: fewer take less time than waking them."""

SMALL = 512
"""Keys up to which the pass multiplies itself; of more, BLAS takes less time on one thread."""

_NOTHING = np.zeros(0, np.float32)
_NO_FACTORS = Factors(_NOTHING, _NOTHING, _NOTHING, _NOTHING, np.float32(1), (1,) * 16)

SLOTS = np.array(
    [len(OFFSETS)]
    + [BOARD[name].start for name in ("entropy", "relative_entropy", "entropy_off_rest", "max_weight", "rarest",
                                      "rms_distance", "distance", "signed_distance", "cosine", "same_token",
                                      "induction")]
    + [len(PAIR_FACTS), BOARD["uniform cosine"].start]
    + [BOARD[name].start for name in ("hits", "places", "places off rest")]
    + [QUERY[name].start for name in ("relative_entropy", "entropy_off_rest", "max_weight", "rarest", "uniform cosine",
                                      "places")]
)  # fmt: skip
"""Where the kernel finds things: the number of offsets (at least that of a vector's lanes), columns of BOARD, how far
behind the others the columns off resting keys stand, columns of QUERY."""


@torch.no_grad()
def run(call: AttentionCall, plan: Plan, names: tuple[str, ...], read: Reader, buffers: Buffers) -> Tensor:
    """Attention in tiles, by all sums that there are, whatever `names` wants; else the same as `torch_pass.run`.

    The call's queries are of float32 or less, on the processor.
    """
    batch, n_heads, n_queries, _ = call.query.shape
    rows = torch.zeros(batch, n_queries, n_heads, call.value.shape[3])
    output = rows.transpose(1, 2)
    sinks = np.zeros(0, np.float32) if call.sinks is None else call.sinks.detach().float().numpy()
    by_blas: _ByBlas | None = None
    with without_autocast("cpu"):
        for block in plan.blocks:
            if not block.shape[2]:
                continue
            fused = _Fused(plan, block, n_heads, sinks)
            if _is_small(call, plan, block):
                fused.attend(_factors(call, output, block))
            else:
                by_blas = by_blas or _ByBlas(call, plan, buffers)
                by_blas.attend(block, fused, output)
            read(block, fused.result())
    return output.to(call.value.dtype)


def _is_small(call: AttentionCall, plan: Plan, block: Block) -> bool:
    """Whether the pass multiplies itself: BLAS takes longer for so few keys, which must be laid out for it first."""
    return (
        block.shape[2] <= SMALL
        and call.value.shape[3] % LANES == 0
        and call.bias is None
        and call.softcap is None
        and not plan.hides[block]
    )


def _factors(call: AttentionCall, output: Tensor, block: Block) -> Factors:
    """The factors of a block's scores and output, where they lie in memory."""
    cut = [
        call.query[block.texts, :, block.queries],
        call.key[block.texts, :, block.keys],
        call.value[block.texts, :, block.keys],
    ]
    parts = [part.float() if part.stride(3) == 1 else part.float().contiguous() for part in cut]
    parts.append(output[block.texts, :, block.queries])
    query, key, value, written = (_flat(part) for part in parts)
    steps = [step for part in parts for step in part.stride()[:3]]
    group = call.n_heads // call.n_kv_heads
    shape = (*steps, block.shape[2], call.query.shape[3], call.value.shape[3], group)
    return Factors(query, key, value, written, np.float32(call.scale), shape)


def _flat(part: Tensor) -> NDArray[np.float32]:
    """The memory from a tensor's first number on."""
    room = part.untyped_storage().nbytes() // part.element_size() - part.storage_offset()
    return part.as_strided((room,), (1,)).numpy()


class _ByBlas:
    """Products by BLAS around the pass, for blocks that make a tile."""

    def __init__(self, call: AttentionCall, plan: Plan, buffers: Buffers) -> None:
        self._call, self._plan = call, plan
        largest = (
            max((math.prod(block.shape[:2]) * _row_length(block) for block in plan.blocks), default=0) * call.n_heads
        )
        most_a_head = max((block.shape[1] * _row_length(block) for block in plan.blocks), default=0)
        size = min(largest, max(TILE, most_a_head))
        self._flat, spare = buffers.pair(size, torch.float32, call.query.device)
        # Keys of zeros behind each text, for the last vectors of tiles to reach into.
        n_padded = max([call.key.shape[2], *(block.keys.start + _row_length(block) for block in plan.blocks)])
        self._keys, self._values = _pad_keys(call, n_padded, spare)

    def attend(self, block: Block, fused: "_Fused", output: Tensor) -> None:
        """Gives the pass a block's tiles, and puts the output where it belongs."""
        call, (n_texts, n_rows, n_keys) = self._call, block.shape
        n_heads, d_head = call.n_heads, call.query.shape[3]
        group, n_padded = n_heads // call.n_kv_heads, _row_length(block)
        of_keys = slice(block.keys.start, block.keys.start + n_padded)
        queries = torch.empty(n_texts, n_heads, n_rows, d_head)
        torch.mul(call.query[block.texts, :, block.queries].float(), call.scale, out=queries)
        some_keys, some_values = self._keys[block.texts, ..., of_keys], self._values[block.texts, :, of_keys]
        added = _score_terms(call, self._plan, block)
        for texts, heads in _parts(n_texts, n_heads, group, n_rows * n_padded):
            kv_heads = slice(heads.start // group, (heads.stop - 1) // group + 1)
            some_rows, columns = queries[texts, heads], some_keys[texts, kv_heads].flatten(0, 1)
            shape = (*some_rows.shape[:3], n_padded)
            scores = self._flat[: math.prod(shape)].view(len(columns), -1, n_padded)
            torch.bmm(some_rows.view(len(columns), -1, d_head), columns, out=scores)
            scores = scores.view(shape)
            if call.softcap is not None:
                scores.div_(call.softcap).tanh_().mul_(call.softcap)
            for part in added:
                scores[..., :n_keys] += part[texts, heads if part.shape[1] > 1 else slice(None)]
            fused.read(scores, texts.start * n_heads + heads.start)
            there = slice(block.texts.start + texts.start, block.texts.start + texts.stop)
            output[there, heads, block.queries] = times_values(scores, some_values[texts, kv_heads])


def _parts(n_texts: int, n_heads: int, group: int, a_head: int) -> Iterator[tuple[slice, slice]]:
    """Texts and heads whose weights make a tile: several whole texts, some groups of heads of one, or one head."""
    together = TILE // max(a_head * n_heads, 1)
    if together:
        for t in range(0, n_texts, together):
            yield slice(t, min(t + together, n_texts)), slice(0, n_heads)
        return
    heads = max(TILE // max(a_head * group, 1) * group, 1)
    for t in range(n_texts):
        for h in range(0, n_heads, heads):
            yield slice(t, t + 1), slice(h, min(h + heads, n_heads))


def _score_terms(call: AttentionCall, plan: Plan, block: Block) -> list[Tensor]:
    """What is added to a block's scores, each (text, 1 or head, ...): the bias, and -infinity on hidden keys."""
    parts = []
    if call.bias is not None:
        bias = call.bias.expand(len(call.query), -1, call.query.shape[2], -1)
        of_keys = block.keys if bias.shape[3] > 1 else slice(None)
        parts.append(bias[block.texts, :, block.queries, of_keys].float())
    if plan.hides[block]:
        allowed = block.allowed(call.query.device)
        assert allowed is not None
        hidden = torch.zeros(allowed.shape).masked_fill_(~allowed, -math.inf)
        parts.append(hidden.expand(block.shape[0], *hidden.shape[1:]))
    return parts


def _pad_keys(call: AttentionCall, n: int, spare: Tensor) -> tuple[Tensor, Tensor]:
    """Keys, (batch, n_kv_heads, width, n), and values, (batch, n_kv_heads, n, width), in float32, with zeros behind.

    Both as products want them; in spare memory where they fit.
    """
    batch, n_kv_heads, n_keys, d_head = call.key.shape
    shapes = (batch, n_kv_heads, d_head, n), (batch, n_kv_heads, n, call.value.shape[3])
    padded = []
    for shape in shapes:
        room = -(-math.prod(shape) // LANES) * LANES  # the next one begins at a line of the cache, too
        if room > len(spare):
            spare = torch.empty(room)
        padded.append(spare[: math.prod(shape)].view(shape))
        spare = spare[room:]
    keys, values = padded
    keys[..., :n_keys] = call.key.mT
    keys[..., n_keys:] = 0
    values[:, :, :n_keys] = call.value
    values[:, :, n_keys:] = 0
    return keys, values


def _row_length(block: Block) -> int:
    """How many keys a block's rows hold: a multiple of LANES."""
    return -(-block.shape[2] // LANES) * LANES


class _Fused:
    """What is read off a block's weights, tile by tile."""

    def __init__(self, plan: Plan, block: Block, n_heads: int, sinks: NDArray[np.float32]) -> None:
        n_texts, n_queries, n_keys = block.shape
        self._n_padded, self._n_keys, self._sinks = _row_length(block), n_keys, sinks
        self._chunk = CHUNK if 2 * CHUNK * self._n_padded <= TILE else CHUNK_OF_LONG
        self._by_task = (n_texts, n_heads, -(-n_queries // self._chunk))
        self._begin = (block.queries.start, block.keys.start, int(plan.own_text))
        self._given = _describe(plan, block)
        # Memory of torch's: NumPy's lies now at one place of a line of the cache and now at another, and by that
        # products of matrices are rounded otherwise.
        n_tasks = math.prod(self._by_task)
        self._board = torch.zeros(n_tasks, N_COLUMNS, dtype=torch.float64)
        self._received = torch.zeros(n_tasks, self._n_padded)
        self._active = torch.empty(n_texts, n_heads, n_queries)

    def read(self, scores: Tensor, first_head: int) -> None:
        """Turns scores of some heads, (text, head, query, padded key), into weights, and adds up what is read off them.

        Args:
            scores: Of whole texts, or of some heads of one.
            first_head: Which head they begin with, counted over all texts of the block.
        """
        n_tiles = scores.shape[0] * scores.shape[1] * self._by_task[2]
        start = first_head * self._by_task[2]
        array = scores.view(-1).numpy()
        self._share(start, start + n_tiles, array, _NO_FACTORS, first_head)

    def attend(self, factors: Factors) -> None:
        """Makes a whole block's output, and adds up what is read off its weights, which never exist all at once."""
        self._share(0, math.prod(self._by_task), _NOTHING, factors, 0)

    def _share(self, start: int, stop: int, scores: NDArray[np.float32], factors: Factors, first_head: int) -> None:
        """Lets threads share tasks."""
        outputs = tuple(numbers.view(-1).numpy() for numbers in (self._board, self._received, self._active))
        n_queries = self._active.shape[2]
        sizes = (self._by_task[1], n_queries, self._n_padded, self._chunk, *self._begin, first_head)

        def do(parallel: int, n_shares: int, first: int, last: int) -> None:
            which = parallel, n_shares, first, last
            if read_rows(which, scores, sizes, SLOTS, self._sinks, self._given, factors, *outputs):
                raise MemoryError("there is no memory for a pass over attention weights")

        n_weights = (stop - start) * min(self._chunk, n_queries) * self._n_padded
        n_threads = min(count_threads(), stop - start) if n_weights >= LEAST_SHARED else 1
        parallel = parallel_address()
        if n_threads == 1 or parallel:
            do(parallel if n_threads > 1 else 0, n_threads, start, stop)
            return
        edges = [start + (stop - start) * i // n_threads for i in range(n_threads + 1)]
        others = [_pool(n_threads - 1).submit(do, 0, 1, *edges[i : i + 2]) for i in range(1, n_threads)]
        do(0, 1, *edges[:2])
        for other in others:
            other.result()

    def result(self) -> Read:
        """The sums of the block, once every tile was read."""
        received = self._received.view(*self._by_task, -1)[..., : self._n_keys]
        return Read(
            self._board.view(*self._by_task, -1).sum(2),
            received.sum(2, dtype=torch.float64),
            self._active,
        )


def count_threads() -> int:
    """How many threads share a tile: as many as torch computes with."""
    return torch.get_num_threads()


@cache
def _pool(n: int) -> ThreadPoolExecutor:
    """Python's threads, if those of torch cannot be used."""
    return ThreadPoolExecutor(n, "attnscope")


def _describe(plan: Plan, block: Block) -> Given:
    """What the kernel must know of a block; what is of size queries times keys is kept if there is room."""
    texts = plan.texts_of(block)
    n_texts, n_queries, n_padded = *block.shape[:2], _row_length(block)

    def list_tokens() -> tuple[NDArray[np.int64], ...]:
        # Padding that can be seen is like keys on which heads rest: in all sums, but not in those of the others.
        resting = _lists((texts.resting | ~texts.real if sees_padding else texts.resting).numpy())
        rare = _lists(np.zeros_like(texts.real.numpy()) if texts.rarest is None else texts.rarest.numpy())
        return *resting, *rare, *_groups(texts.ids.numpy(), texts.real.numpy()), np.asarray(texts.final_special.numpy())

    sees_padding = plan.shows_padding[block]
    of_texts = plan.keep_texts(block, f"lists {sees_padding}", list_tokens)
    rest_from, rest, rare_from, rare, groups, group_from, members, final = of_texts

    def rows() -> Given:
        edges, worth = (plan.row(block, name).contiguous().numpy() for name in ("edges", "worth"))
        of_queries = groups[:, block.queries] if plan.own_text else np.full((n_texts, n_queries), -1)
        likeness = plan.cosines(block, n_padded) if plan.own_text else None
        cosines = np.zeros((1, 1, n_padded), np.float32) if likeness is None else likeness.numpy()
        n_cosines, n_rows, _ = cosines.shape
        steps = n_rows * n_padded * (n_cosines > 1), n_padded * (n_rows > 1)
        shape = (edges.shape[1], worth.shape[1], worth.shape[3], N_COLUMNS, texts.real.shape[1], *steps)
        off_rest = plan.off_rest[block.texts].numpy()
        return Given(
            edges.ravel(), worth.ravel(), off_rest.ravel(), rest_from, rest, final, rare_from, rare, cosines.ravel(),
            of_queries.ravel(), group_from, members, shape,
        )  # fmt: skip

    return plan.keep(block, "given", rows)


def _lists(marked: NDArray[np.bool_]) -> Iterator[NDArray[np.int64]]:
    """Where each text's list of marked tokens begins and the last one ends; and the lists, one after the other."""
    yield np.concatenate([[0], marked.sum(1).cumsum()]).astype(np.int64)
    yield marked.nonzero()[1].astype(np.int64)


def _groups(ids: NDArray[np.int64], real: NDArray[np.bool_]) -> Iterator[NDArray[np.int64]]:
    """Groups of like tokens: each token's group, -1 for padding; where groups begin and the last ends; the tokens."""
    texts, positions = real.nonzero()
    order = np.lexsort((positions, ids[texts, positions], texts))
    texts, positions = texts[order], positions[order]
    begins = np.ones(len(texts), np.bool_)
    begins[1:] = (np.diff(texts) != 0) | (np.diff(ids[texts, positions]) != 0)
    groups = np.full(ids.shape, -1, np.int64)
    groups[texts, positions] = begins.cumsum() - 1
    yield groups
    yield np.append(begins.nonzero()[0], len(texts)).astype(np.int64)
    yield positions.astype(np.int64)
