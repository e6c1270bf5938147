"""The compiled half of `numba_pass`: softmax and every sum over rows of scores, in place. Ours.

Compiled by its signature as it is imported, and kept on disk: beside this file, or in the user's cache folder where
that may not be written, else not at all. Loops over vectors (`numba_vectors`), in tasks that torch's own threads share
(`numba_compiler`).

A row's largest score, its denominator and its sums wait for each other, and a short row for little else: several rows
take each step together.

Arrays are flat, and no part of one is cut out for a row: that counts its users up and down, which takes as long as a
short row. What is needed of a row when its end is known, logarithms above all, waits for the end of its task, where it
is worked out for sixteen rows at once. Exponentials are within 1e-7.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from attnscope.core.measures.backends.numba_arithmetic import (
    LOW,
    exponential,
    lay_by_number,
    logarithm,
    multiply,
    single,
)
from attnscope.core.measures.backends.numba_compiler import compile_for, share
from attnscope.core.measures.backends.numba_vectors import (
    LANES,
    call_for,
    choose,
    fused,
    highest,
    larger,
    load,
    positive,
    ramp,
    spread,
    store,
    total,
    widen,
)

_f4, _i4, _i8, _f8 = types.float32, types.int32, types.int64, types.float64
_F4, _F8, _I4, _I8 = (types.Array(dtype, 1, "C") for dtype in (_f4, _f8, _i4, _i8))

BUILT_WITH = "288727c7df1ecea3"
"""The hash of numba_arithmetic.py, numba_compiler.py and numba_vectors.py: numba compiles this file again only where it
changes."""


_TOGETHER = 4096
"""Weights of rows that go from step to step together: 16 kB."""

_MARGIN = 2 * LANES
"""Numbers before and behind a row of weights, into which the window around a query at its ends reaches."""


class Given(NamedTuple):
    """What is known of a block, whatever the layer; keys are those of the text. Arrays are flat.

    Attributes:
        edges: First and last + 1 key of the block of each query, (text, mask head, query, 2), int32.
        worth: As `board.QUERY`, (text, mask head, query, column), float32.
        off_rest: 1 for keys outside the sinks, (text, key), float32.
        rest_from: Where in `rest` each text begins, and where the last one ends, (text + 1,), int64.
        rest: Keys on which heads rest, (n,), int64.
        final: Where each text ends in a special token, or -1, (text,), int64.
        rare_from: As rest_from.
        rare: The rarest keys, (n,), int64.
        cosine: (text, query, padded key of the block), float32, or (1, 1, padded key) of zeros.
        group_of: Which group of like tokens each query's is, (text, query), int64, -1 for none.
        group_from: Where in `members` each group begins, and where the last one ends, (group + 1,), int64.
        members: Keys of the groups, (n,), int64.
        shape: Mask heads of edges and of worth, columns of worth and of the board, keys of a text, and how far apart
            texts and queries lie in `cosine`, 0 where there is one row for all.
    """

    edges: NDArray[np.int32]
    worth: NDArray[np.float32]
    off_rest: NDArray[np.float32]
    rest_from: NDArray[np.int64]
    rest: NDArray[np.int64]
    final: NDArray[np.int64]
    rare_from: NDArray[np.int64]
    rare: NDArray[np.int64]
    cosine: NDArray[np.float32]
    group_of: NDArray[np.int64]
    group_from: NDArray[np.int64]
    members: NDArray[np.int64]
    shape: tuple[int, ...]


class Factors(NamedTuple):
    """What the scores are products of, and where the output goes, if the pass multiplies itself. Arrays are flat.

    Attributes:
        query: (text, head, query, width), float32, in steps as `shape` has them; empty where scores are given.
        key: (text, kv_head, key, width).
        value: (text, kv_head, key, width of values), which is a multiple of LANES.
        output: (text, head, query, width of values); overwritten.
        scale: Of the scores.
        shape: How far apart texts, heads and tokens lie in query, key, value and output, then the keys, the width, that
            of values, and how many heads share keys.
    """

    query: NDArray[np.float32]
    key: NDArray[np.float32]
    value: NDArray[np.float32]
    output: NDArray[np.float32]
    scale: np.float32
    shape: tuple[int, ...]


_FACTORS = types.NamedTuple((_F4, _F4, _F4, _F4, _f4, types.UniTuple(_i8, 16)), Factors)
_GIVEN = types.NamedTuple((_I4, _F4, _F4, _I8, _I8, _I8, _I8, _I8, _F4, _I8, _I8, _I8, types.UniTuple(_i8, 7)), Given)


@njit
def _read_tasks(first_task, last_task, scores, sizes, slots, sinks, given, factors, board, received, active):
    """As `read_rows`, which says what it is given, by one thread: from the first task up to the one before the last."""
    (
        edges, worth, off_rest, rest_from, rest, final, rare_from, rare, cosine, group_of, group_from, members, shape,
    ) = given  # fmt: skip
    n_heads, n_queries, n_padded, chunk, first_query, first_key, own_text, first_head = sizes
    edge_heads, worth_heads, n_worth, n_board, n_tokens, cosine_text, cosine_query = shape
    (
        n_offsets, c_entropy, c_relative, c_off_rest, c_max, c_rare, c_rms, c_near, c_ahead, c_cosine, c_same,
        c_induced, c_apart, c_even, c_hits, c_places, c_places_off,
        q_relative, q_off_rest, q_max, q_rare, q_even, q_places,
    ) = (
        slots[0], slots[1], slots[2], slots[3], slots[4], slots[5], slots[6], slots[7], slots[8], slots[9], slots[10],
        slots[11], slots[12], slots[13], slots[14], slots[15], slots[16],
        slots[17], slots[18], slots[19], slots[20], slots[21], slots[22],
    )  # fmt: skip
    (
        query_text, query_head, query_step, key_text, key_head, key_step, value_text, value_head, value_step,
        output_text, output_head, output_step, n_keys, width, value_width, group_size,
    ) = factors.shape  # fmt: skip
    multiplies = factors.query.shape[0] > 0
    if multiplies:
        scores = np.empty(min(chunk, n_queries) * n_padded + LANES, np.float32)
        scores = scores[-scores.ctypes.data // 4 % LANES :]
    keys_of_head = np.empty(n_padded * width * multiplies + LANES, np.float32)
    keys_of_head = keys_of_head[-keys_of_head.ctypes.data // 4 % LANES :]
    head_before = -1
    n_chunks = (n_queries + chunk - 1) // chunk
    reach, before = n_offsets // 2, first_query - first_key
    # Rows go from step to step together: the next row's numbers are there while the last one's are still summed up.
    together = max(min(LANES, _TOGETHER // n_padded), 1)
    stride = n_padded + 2 * _MARGIN
    # Vectors that lie across two lines of the cache take twice as long.
    weights = np.empty(together * stride + LANES, np.float32)
    weights = weights[-weights.ctypes.data // 4 % LANES :]
    lefts, rights = np.empty(together, np.int64), np.empty(together, np.int64)
    largest_of, but_end_of = np.empty(together, np.float32), np.empty(together, np.float32)
    offs, times_offs = np.empty(together), np.empty(together)
    bys, shares = np.empty(together, np.float32), np.empty(together, np.float32)
    # Keys on which heads rest are set aside: sums of the others are then no small differences of large ones.
    most = 1
    for t in range(rest_from.shape[0] - 1):
        most = max(most, rest_from[t + 1] - rest_from[t])
    room = (most * together + LANES - 1) // LANES * LANES
    aside_from = np.zeros(together + 1, np.int64)
    aside_of, aside_at, aside_received = np.empty(room, np.int64), np.empty(room, np.int64), np.zeros(most)
    aside, aside_below = np.zeros(room, np.float32), np.zeros(room, np.float32)
    # Of one text: what is added to scores, -infinity for keys set aside; and 1 for the rarest tokens.
    apart, rarest = np.empty(n_padded, np.float32), np.empty(n_padded, np.float32)
    # Of rows that count, one task's: what their ends say.
    room = (chunk + LANES - 1) // LANES * LANES
    row_of = np.empty(room, np.int64)
    seen_of, sum_of, off_of, log_off_of = np.empty(room), np.ones(room), np.ones(room), np.empty(room)
    inverse_of, times_of, times_off_of, spread_of = np.empty(room), np.empty(room), np.empty(room), np.empty(room)
    fallen_of = np.zeros(room, np.float32)
    sums_of_hits, sums_of_places = np.empty(LANES), np.empty(LANES)
    zeros, ones, lanes = single(0.0), single(1.0), ramp()
    low, nothing, one_vector = single(LOW), single(-np.inf), single(np.float32(LANES))
    text_before = -1
    for task in range(first_task, last_task):
        text_head, part = task // n_chunks, task % n_chunks
        text, head = text_head // n_heads, text_head % n_heads
        sums, taken = task * n_board, task * n_padded
        if text != text_before:
            text_before = text
            apart[:] = 0
            rarest[:] = 0
            for at in range(rest_from[text], rest_from[text + 1]):
                if 0 <= rest[at] - first_key < n_padded:
                    apart[rest[at] - first_key] = -np.inf
            for at in range(rare_from[text], rare_from[text + 1]):
                if 0 <= rare[at] - first_key < n_padded:
                    rarest[rare[at] - first_key] = 1
        n_rows = 0
        near_off, ahead_off, alike_off = spread(0.0), spread(0.0), spread(0.0)
        store(sums_of_hits, 0, spread(0.0))
        store(sums_of_places, 0, spread(0.0))
        near, ahead, alike = 0.0, 0.0, 0.0
        same, same_off, induced, induced_off, rare_hits = 0.0, 0.0, 0.0, 0.0, 0.0
        mask_row = (text * edge_heads + (head if edge_heads > 1 else 0)) * n_queries
        worth_row = (text * worth_heads + (head if worth_heads > 1 else 0)) * n_queries
        last_query = min(part * chunk + chunk, n_queries)
        score_row = (text_head - first_head) * n_queries
        if multiplies:
            score_row = -part * chunk
            kv_head = head // group_size
            if text_head // group_size != head_before:
                head_before = text_head // group_size
                first = text * key_text + kv_head * key_head
                lay_by_number(factors.key, first, key_step, n_keys, width, factors.scale, n_padded, keys_of_head)
            for r in range(n_queries):
                for i in range(0, width, LANES):
                    call_for(factors.query, (text + 1) * query_text + head * query_head + r * query_step + i)
            for r in range(n_keys):
                for i in range(0, width, LANES):
                    call_for(factors.key, (text + 1) * key_text + kv_head * key_head + r * key_step + i)
                    call_for(factors.value, (text + 1) * value_text + kv_head * value_head + r * value_step + i)
            multiply(
                factors.query, text * query_text + head * query_head + part * chunk * query_step, query_step,
                last_query - part * chunk, width, keys_of_head, 0, n_padded, n_padded, scores, 0, n_padded,
            )  # fmt: skip
        for first_row in range(part * chunk, last_query, together):
            n_here = min(together, last_query - first_row)
            n_aside = 0
            # The largest score of each, while the row moves to where it is worked on. Vectors at its edges are cut.
            for i in range(n_here):
                q = first_row + i
                row, base = (score_row + q) * n_padded, i * stride + _MARGIN
                start, stop = np.int64(edges[(mask_row + q) * 2]), np.int64(edges[(mask_row + q) * 2 + 1])
                active[text_head * n_queries + q] = 0
                aside_from[i] = n_aside
                if stop <= start:
                    lefts[i], rights[i] = 0, 0
                    for k in range(0, n_padded, LANES):
                        store(scores, row + k, zeros)
                    continue
                left, right = start // LANES * LANES, (stop + LANES - 1) // LANES * LANES
                lefts[i], rights[i] = left, right
                for k in range(0, left, LANES):
                    store(scores, row + k, zeros)
                for k in range(right, n_padded, LANES):
                    store(scores, row + k, zeros)
                last = right - LANES
                x = load(scores, row + last) + load(apart, last)
                x = choose(lanes, single(np.float32(stop - last)), nothing, x)
                x = choose(lanes, single(np.float32(start - last)), x, nothing)
                store(weights, base + last, x)
                best = larger(x, nothing)
                if left < last:
                    x = load(scores, row + left) + load(apart, left)
                    x = choose(lanes, single(np.float32(start - left)), x, nothing)
                    store(weights, base + left, x)
                    best = larger(x, best)
                    for k in range(left + LANES, last, LANES):
                        x = load(scores, row + k) + load(apart, k)
                        store(weights, base + k, x)
                        best = larger(x, best)
                largest = highest(best)
                but_end = largest
                for at in range(rest_from[text], rest_from[text + 1]):
                    k = rest[at] - first_key
                    if start <= k < stop:
                        score = scores[row + k]
                        aside_of[n_aside], aside_at[n_aside], aside[n_aside] = at - rest_from[text], k, score
                        n_aside += 1
                        if not score <= largest:
                            largest = score
                        if rest[at] != final[text] and not score <= but_end:
                            but_end = score
                for j in range(aside_from[i], n_aside):
                    aside[j] -= largest
                largest_of[i], but_end_of[i] = largest, but_end
            aside_from[n_here] = n_aside
            for j in range(0, n_aside, LANES):
                x = larger(low, load(aside, j))
                store(aside_below, j, x)
                store(aside, j, exponential(x))
            for i in range(n_here):
                base = i * stride + _MARGIN
                above, sum_off, sum_times = single(largest_of[i]), zeros, zeros
                for k in range(base + lefts[i], base + rights[i], LANES):
                    x = larger(low, load(weights, k) - above)
                    p = exponential(x)
                    store(weights, k, p)
                    sum_off = sum_off + p
                    sum_times = fused(p, x, sum_times)
                offs[i], times_offs[i] = np.float64(total(sum_off)), np.float64(total(sum_times))
            for i in range(n_here):
                left, right = lefts[i], rights[i]
                if left == right:
                    continue
                q = first_row + i
                row, base = (score_row + q) * n_padded, i * stride + _MARGIN
                total_off, times_off = offs[i], times_offs[i]
                seen, times = total_off, times_off
                for j in range(aside_from[i], aside_from[i + 1]):
                    seen += aside[j]
                    times += np.float64(aside[j]) * aside_below[j]
                all_of_it = seen
                if sinks.shape[0]:
                    all_of_it += math.exp(min(np.float64(sinks[head]) - largest_of[i], 700.0))
                inverse = 1.0 / all_of_it
                by = np.float32(inverse)
                bys[i] = by
                most_weight = single(by)
                for j in range(aside_from[i], aside_from[i + 1]):
                    aside[j] *= by
                worths = (worth_row + q) * n_worth
                if worth[worths] == 0:
                    for k in range(left, right, LANES):
                        store(scores, row + k, load(weights, base + k) * most_weight)
                    for j in range(aside_from[i], aside_from[i + 1]):
                        scores[row + aside_at[j]] = aside[j]
                    continue
                cosines = text * cosine_text + q * cosine_query
                here = q + before
                away = lanes + single(np.float32(left - here))
                row_near, row_ahead, squares, row_alike, ties, rare_ties = zeros, zeros, zeros, zeros, zeros, zeros
                for k in range(left, right, LANES):
                    weight = load(weights, base + k) * most_weight
                    store(weights, base + k, weight)
                    store(scores, row + k, weight)
                    store(received, taken + k, load(received, taken + k) + weight)
                    moved = weight * away
                    row_ahead = row_ahead + moved
                    row_near = row_near + positive(moved)
                    squares = fused(moved, away, squares)
                    row_alike = fused(weight, load(cosine, cosines + k), row_alike)
                    ties = ties + choose(weight, most_weight, ones, zeros)
                    rare_ties = rare_ties + choose(weight, most_weight, load(rarest, k), zeros)
                    away = away + one_vector
                near_off = near_off + widen(row_near)
                ahead_off = ahead_off + widen(row_ahead)
                alike_off = alike_off + widen(row_alike)
                squared, shared, rare_shared = np.float64(total(squares)), total(ties), total(rare_ties)
                for j in range(aside_from[i], aside_from[i + 1]):
                    k, weight_aside = aside_at[j], aside[j]
                    scores[row + k] = weight_aside
                    aside_received[aside_of[j]] += weight_aside
                    apart_by = np.float64(k - here)
                    near += weight_aside * abs(apart_by)
                    ahead += weight_aside * apart_by
                    squared += weight_aside * apart_by * apart_by
                    alike += weight_aside * np.float64(cosine[cosines + k])
                    if weight_aside >= by:
                        shared += np.float32(1)
                        rare_shared += rarest[k]
                active[text_head * n_queries + q] = total_off * inverse
                row_of[n_rows], inverse_of[n_rows], seen_of[n_rows], sum_of[n_rows] = worths, inverse, seen, all_of_it
                off_of[n_rows], times_of[n_rows], times_off_of[n_rows] = total_off, times, times_off
                spread_of[n_rows], fallen_of[n_rows] = squared, but_end_of[i] - largest_of[i]
                n_rows += 1
                shares[i] = np.float32(1.0) / max(shared, np.float32(1.0))
                rare_hits += shares[i] * rare_shared * worth[worths + q_rare]
            if not own_text:
                continue
            for i in range(n_here):
                q = first_row + i
                left, right, worths, here = lefts[i], rights[i], (worth_row + q) * n_worth, q + before
                if left == right or worth[worths] == 0:
                    continue
                row, base = (score_row + q) * n_padded, i * stride + _MARGIN
                by, share = bys[i], shares[i]
                if left - reach <= here < right + reach:
                    store(weights, base + left - LANES, zeros)
                    store(weights, base + right, zeros)
                    at, there = base + here - reach, worths + q_places
                    weight, counted = load(weights, at), load(worth, there)
                    store(sums_of_places, 0, load(sums_of_places, 0) + widen(weight * counted))
                    hits = choose(weight, single(by), counted * single(share), zeros)
                    store(sums_of_hits, 0, load(sums_of_hits, 0) + widen(hits))
                    for o in range(LANES, n_offsets):
                        part_of = weights[at + o] * worth[there + o]
                        board[sums + c_places + o] += part_of
                        board[sums + c_places_off + o] += part_of
                        if weights[at + o] >= by:
                            board[sums + c_hits + o] += share * worth[there + o]
                    for j in range(aside_from[i], aside_from[i + 1]):
                        o = aside_at[j] - here + reach
                        if 0 <= o < n_offsets:
                            board[sums + c_places + o] += aside[j] * worth[there + o]
                            if aside[j] >= by:
                                board[sums + c_hits + o] += share * worth[there + o]
                group = group_of[text * n_queries + q]
                if group >= 0:
                    for at in range(group_from[group], group_from[group + 1]):
                        token = members[at]
                        other = token - first_key
                        if other != here and 0 <= other < n_padded:
                            weight_there = np.float64(scores[row + other])
                            same += weight_there
                            same_off += weight_there * off_rest[text * n_tokens + token]
                        if other < here - 1 and other + 1 >= 0 and other + 1 < n_padded:
                            weight_there = np.float64(scores[row + other + 1])
                            induced += weight_there
                            induced_off += weight_there * off_rest[text * n_tokens + token + 1]
        if multiplies:
            multiply(
                scores, 0, n_padded, last_query - part * chunk, n_keys,
                factors.value, text * value_text + head // group_size * value_head, value_step, value_width,
                factors.output, text * output_text + head * output_head + part * chunk * output_step, output_step,
            )  # fmt: skip
        for i in range(rest_from[text + 1] - rest_from[text]):
            if aside_received[i] != 0:
                received[taken + rest[rest_from[text] + i] - first_key] += np.float32(aside_received[i])
                aside_received[i] = 0
        for i in range(0, n_rows, LANES):
            store(log_off_of, i, logarithm(load(off_of, i)))
            store(sum_of, i, logarithm(load(sum_of, i)))
            store(fallen_of, i, exponential(larger(low, load(fallen_of, i))))
        entropy, relative, entropy_off, largest_weight, away_rms = 0.0, 0.0, 0.0, 0.0, 0.0
        evenly, evenly_off = 0.0, 0.0
        for i in range(n_rows):
            worths, inverse, off = row_of[i], inverse_of[i], off_of[i]
            mass = seen_of[i] * inverse
            of_row = sum_of[i] * mass - times_of[i] * inverse
            entropy += of_row
            relative += of_row * worth[worths + q_relative]
            if off > 0:
                entropy_off += (log_off_of[i] - times_off_of[i] / off) * worth[worths + q_off_rest]
            elif off != 0:  # NaN
                entropy_off += off
            if worth[worths + q_max] > 0:
                largest_weight += fallen_of[i] * inverse
            away_rms += math.sqrt(spread_of[i])
            evenly += mass * worth[worths + q_even]
            evenly_off += off * inverse * worth[worths + q_even + 1]
        board[sums + c_entropy] += entropy
        board[sums + c_relative] += relative
        board[sums + c_off_rest] += entropy_off
        board[sums + c_max] += largest_weight
        board[sums + c_rare] += rare_hits
        if own_text:
            board[sums + c_rms] += away_rms
            board[sums + c_near] += total(near_off) + near
            board[sums + c_near + c_apart] += total(near_off)
            board[sums + c_ahead] += total(ahead_off) + ahead
            board[sums + c_ahead + c_apart] += total(ahead_off)
            board[sums + c_cosine] += total(alike_off) + alike
            board[sums + c_cosine + c_apart] += total(alike_off)
            board[sums + c_even] += evenly
            board[sums + c_even + 1] += evenly_off
            board[sums + c_same] += same
            board[sums + c_same + c_apart] += same_off
            board[sums + c_induced] += induced
            board[sums + c_induced + c_apart] += induced_off
            for o in range(LANES):
                board[sums + c_places + o] += sums_of_places[o]
                board[sums + c_places_off + o] += sums_of_places[o]
                board[sums + c_hits + o] += sums_of_hits[o]


_READ_ROWS = types.int64(types.UniTuple(_i8, 4), _F4, types.UniTuple(_i8, 8), _I8, _F4, _GIVEN, _FACTORS, _F8, _F4, _F4)


@compile_for(_READ_ROWS)
def read_rows(which, scores, sizes, slots, sinks, given, factors, board, received, active):
    """Turns scores into weights, and adds up what is read off their rows. All arrays are flat.

    Args:
        which: `parallel_address`, or 0 to make all shares here; how many shares; the first task and the one after the
            last (task = text * head * chunk of queries, in that order).
        scores: (text * head, query, padded key) of the tasks' heads; becomes weights, 0 beyond the edges. Empty where
            `factors` are given.
        sizes: Heads, queries, padded keys, queries of a chunk, the block's first query and first key in its text, 1 if
            queries and keys are of one text, and which text * head the scores begin with.
        slots: Where in the board and in `worth` each part begins; see `numba_pass.SLOTS`.
        sinks: One score a head, or empty.
        given: What is known of the block.
        factors: What to multiply, task by task, while a task's scores lie in the cache; or none.
        board: (task, column); added to.
        received: (task, padded key); added to.
        active: (text * head, query); what each query gives to keys outside the sinks.

    Returns:
        How many shares failed, for want of memory.
    """
    parallel, n_shares, first_task, last_task = which
    return share(
        _read_tasks, parallel, n_shares, first_task, last_task,
        (scores, sizes, slots, sinks, given, factors, board, received, active),
    )  # fmt: skip
