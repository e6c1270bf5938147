"""The compiled half of `numba_pass`: softmax and every sum over rows of scores, in place. Ours.

Compiled by its signature as it is imported, and kept on disk: beside this file, or in the user's cache folder where
that may not be written. Plain loops and no threads of numba's own: its layers bring a second pool beside torch's, abort
when two Python threads call at once, or die after a fork; `numba_pass` has threads of Python's, which let each other
run.

Loops count from 0, so that no index is taken for one from the end, which would keep them from being vectors.
A row is worked on in multiples of LANES keys, which the buffers are padded to: the scalar remainder would take
as long as the vectors. Exponentials are those of Cephes (Moshier 1989), within 1e-7; the order of additions is that of
the compiler, so that numbers are the same bit for bit on processors of one kind.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

LANES = 32
"""Keys are padded to a multiple of so many."""

_SUMS = {"reassoc", "nsz", "arcp", "contract"}
"""What makes sums vectors. Not that there be no NaN: what a model computes as NaN must come out as such."""

_f4, _i4, _i8, _f8 = types.float32, types.int32, types.int64, types.float64


def _array(dtype: Any, ndim: int) -> Any:
    return types.Array(dtype, ndim, "C")


@njit
def _largest(bits):
    """The largest of a row of numbers, told by their bits, whose order is that of numbers once signs are turned."""
    found = np.int32(-2147483648)
    for k in range(bits.shape[0]):
        bit = bits[k]
        bit = bit ^ ((bit >> np.int32(31)) & np.int32(0x7FFFFFFF))
        found = bit if bit > found else found
    found = found ^ ((found >> np.int32(31)) & np.int32(0x7FFFFFFF))
    return np.int32(found).view(np.float32)


@njit(fastmath={"contract"})
def _exp(x):
    """E to the power of -87 to 0: 2 to the power of a whole number, put in by its bits, times a polynomial."""
    shifted = x * np.float32(1.44269504) + np.float32(12582912.0)
    whole = shifted - np.float32(12582912.0)
    rest = x - whole * np.float32(0.693359375)
    rest = rest + whole * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * rest + np.float32(1.3981999507e-3)
    p = p * rest + np.float32(8.3334519073e-3)
    p = p * rest + np.float32(4.1665795894e-2)
    p = p * rest + np.float32(1.6666665459e-1)
    p = p * rest + np.float32(5.0000001201e-1)
    p = p * rest * rest + rest + np.float32(1)
    bits = np.float32(p).view(np.int32) + np.int32(np.float32(shifted).view(np.int32) << np.int32(23))
    return np.int32(bits).view(np.float32)


@njit(fastmath=_SUMS)
def _exponentials(row, largest):
    """Puts exp(s - largest) in the place of scores; its sum, and that of it times s - largest."""
    total, times = np.float32(0), np.float32(0)
    low = np.float32(-87)
    for k in range(row.shape[0]):
        x = row[k] - largest
        x = low if x < low else x
        p = _exp(x)
        p = np.float32(0) if x <= low else p
        row[k] = p
        total += p
        times += p * x
    return total, times


@njit(fastmath=_SUMS)
def _scale(row, by):
    for k in range(row.shape[0]):
        row[k] = row[k] * by


@njit(fastmath=_SUMS)
def _weigh(row, by, received, cosine, places, query):
    """Weights from exponentials; adds them to what keys received; sums of distances, cosines, and largest weights."""
    near, ahead, squares, alike, ties = np.float32(0), np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    for k in range(row.shape[0]):
        weight = row[k] * by
        row[k] = weight
        received[k] += weight
        away = places[k] - query
        moved = weight * away
        ahead += moved
        near += abs(moved)
        squares += moved * away
        alike += weight * cosine[k]
        ties += np.float32(1) if weight >= by else np.float32(0)
    return near, ahead, squares, alike, ties


@njit(fastmath={"contract"})
def _add_places(row, by, share, there, there_off, places, places_off, hits):
    """Adds the weights at offsets, all and off resting keys, and which of them are the largest."""
    for o in range(row.shape[0]):
        weight = row[o]
        places[o] += weight * there[o]
        places_off[o] += weight * there_off[o]
        hits[o] += np.float64(share * there[o]) if weight >= by else 0.0


class Given(NamedTuple):
    """What is known of a block, whatever the layer; keys are those of the text.

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
        places: 0, 1, 2, ... by padded key, (padded key,), float32.
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
    places: NDArray[np.float32]


_GIVEN = types.NamedTuple(
    (
        _array(_i4, 4), _array(_f4, 4), _array(_f4, 2), _array(_i8, 1), _array(_i8, 1), _array(_i8, 1),
        _array(_i8, 1), _array(_i8, 1), _array(_f4, 3), _array(_i8, 2), _array(_i8, 1), _array(_i8, 1),
        _array(_f4, 1),
    ),
    Given,
)  # fmt: skip

_READ_ROWS = types.void(
    _array(_f4, 3), _array(_i4, 3), types.UniTuple(_i8, 7), _array(_i8, 1), _array(_f4, 1), _GIVEN,
    _array(_f8, 2), _array(_f4, 2), _array(_f4, 2),
)  # fmt: skip


@njit(_READ_ROWS, nogil=True, cache=True, error_model="numpy")
def read_rows(scores, bits, sizes, slots, sinks, given, board, received, active):
    """Turns scores into weights, and adds up what is read off their rows.

    Args:
        scores: (text * head, query, padded key); becomes weights, 0 beyond the edges.
        bits: The same memory as whole numbers.
        sizes: The first and last + 1 task (task = text * head * chunk of queries, in that order), heads, queries of a
            chunk, the block's first query and first key in its text, and 1 if queries and keys are of one text.
        slots: Where in the board and in `worth` each part begins; see `numba_pass.SLOTS`.
        sinks: One score a head, or empty.
        given: What is known of the block.
        board: (task, column); added to.
        received: (task, padded key); added to.
        active: (text * head, query); what each query gives to keys outside the sinks.
    """
    edges, worth, off_rest, rest_from, rest, final, rare_from, rare, cosine, group_of, group_from, members, places = (
        given
    )
    first_task, last_task, n_heads, chunk, first_query, first_key, own_text = sizes
    (
        n_offsets, c_entropy, c_relative, c_off_rest, c_max, c_rare, c_rms, c_near, c_ahead, c_cosine, c_same,
        c_induced, c_apart, c_even, c_hits, c_places, c_places_off,
        q_relative, q_off_rest, q_max, q_rare, q_even, q_places, q_places_off,
    ) = (
        slots[0], slots[1], slots[2], slots[3], slots[4], slots[5], slots[6], slots[7], slots[8], slots[9], slots[10],
        slots[11], slots[12], slots[13], slots[14], slots[15], slots[16],
        slots[17], slots[18], slots[19], slots[20], slots[21], slots[22], slots[23],
    )  # fmt: skip
    n_queries, n_padded = scores.shape[1], scores.shape[2]
    n_chunks = (n_queries + chunk - 1) // chunk
    reach = n_offsets // 2
    before = first_query - first_key
    most = 1
    for t in range(rest_from.shape[0] - 1):
        most = max(most, rest_from[t + 1] - rest_from[t])
    aside, aside_at = np.empty(most, np.float64), np.empty(most, np.int64)
    aside_weight = np.empty(most, np.float32)
    nothing = np.float32(-np.inf)
    for task in range(first_task, last_task):
        text_head, part = task // n_chunks, task % n_chunks
        text, head = text_head // n_heads, text_head % n_heads
        mask_head = head if worth.shape[1] > 1 else 0
        sums, taken = board[task], received[task]
        for q in range(part * chunk, min(part * chunk + chunk, n_queries)):
            row, row_bits = scores[text_head, q], bits[text_head, q]
            edge_head = mask_head if edges.shape[1] > 1 else 0
            start, stop = np.int64(edges[text, edge_head, q, 0]), np.int64(edges[text, edge_head, q, 1])
            active[text_head, q] = 0
            if stop <= start:
                for k in range(n_padded):
                    row[k] = 0
                continue
            left, right = start // LANES * LANES, min((stop + LANES - 1) // LANES * LANES, n_padded)
            for k in range(left):
                row[k] = 0
            for k in range(right, n_padded):
                row[k] = 0
            for k in range(left, start):
                row[k] = nothing
            for k in range(stop, right):
                row[k] = nothing
            # Keys on which heads rest are set aside: sums of the others are then no small differences of large ones.
            n_aside = 0
            for at in range(rest_from[text], rest_from[text + 1]):
                k = rest[at] - first_key
                if start <= k < stop:
                    aside[n_aside], aside_at[n_aside] = row[k], k
                    row[k] = nothing
                    n_aside += 1
            largest = np.float64(_largest(row_bits[left:right]))
            largest_but_end = largest
            for i in range(n_aside):
                if not aside[i] <= largest:
                    largest = aside[i]
                if aside_at[i] + first_key != final[text] and not aside[i] <= largest_but_end:
                    largest_but_end = aside[i]
            total_off, times_off = _exponentials(row[left:right], np.float32(largest))
            total_aside, times_aside = 0.0, 0.0
            for i in range(n_aside):
                x = aside[i] - largest
                p = math.exp(x)
                aside[i] = p
                total_aside += p
                times_aside += p * max(x, -1e4) if p > 0 else p
            seen = np.float64(total_off) + total_aside
            total = seen
            if sinks.shape[0]:
                total += math.exp(min(np.float64(sinks[head]) - largest, 700.0))
            by = np.float32(1.0 / total)
            for i in range(n_aside):
                aside_weight[i] = np.float32(aside[i]) * by
            worths = worth[text, mask_head, q]
            if worths[0] == 0:
                _scale(row[left:right], by)
                for i in range(n_aside):
                    row[aside_at[i]] = aside_weight[i]
                continue
            of_text = text if cosine.shape[0] > 1 or cosine.shape[1] > 1 else 0
            cosines = cosine[of_text, q if cosine.shape[1] > 1 else 0]
            place = np.float32(q + before)
            near_off, ahead_off, squares, alike_off, ties = _weigh(
                row[left:right], by, taken[left:right], cosines[left:right], places[left:right], place
            )
            near, ahead, alike = np.float64(near_off), np.float64(ahead_off), np.float64(alike_off)
            spread, shared = np.float64(squares), np.float64(ties)
            for i in range(n_aside):
                k, weight = aside_at[i], aside_weight[i]
                row[k] = weight
                taken[k] += weight
                away = np.float64(k - q - before)
                near += weight * abs(away)
                ahead += weight * away
                spread += weight * away * away
                alike += weight * np.float64(cosines[k])
                shared += 1.0 if weight >= by else 0.0
            off = np.float64(total_off) / total
            active[text_head, q] = off
            entropy = math.log(total) * (seen / total) - (np.float64(times_off) + times_aside) / total
            sums[c_entropy] += entropy
            sums[c_relative] += entropy * worths[q_relative]
            if total_off > 0:
                inner = math.log(np.float64(total_off)) - np.float64(times_off) / np.float64(total_off)
                sums[c_off_rest] += inner * worths[q_off_rest]
            elif total_off != 0:  # NaN
                sums[c_off_rest] += total_off
            worth_max = worths[q_max]
            if worth_max > 0:
                sums[c_max] += math.exp(largest_but_end - largest) / total
            share = np.float32(1.0 / max(shared, 1.0))
            for at in range(rare_from[text], rare_from[text + 1]):
                k = rare[at] - first_key
                if start <= k < stop and row[k] >= by:
                    sums[c_rare] += share * worths[q_rare]
            if not own_text:
                continue
            sums[c_rms] += math.sqrt(spread)
            sums[c_near] += near
            sums[c_near + c_apart] += near_off
            sums[c_ahead] += ahead
            sums[c_ahead + c_apart] += ahead_off
            sums[c_cosine] += alike
            sums[c_cosine + c_apart] += alike_off
            sums[c_even] += seen / total * worths[q_even]
            sums[c_even + 1] += off * worths[q_even + 1]
            low, high = max(0, reach - q - before), min(n_offsets, n_padded - q - before + reach)
            if low < high:
                at = q + before - reach + low
                _add_places(
                    row[at : at + high - low], by, share, worths[q_places + low : q_places + high],
                    worths[q_places_off + low : q_places_off + high], sums[c_places + low : c_places + high],
                    sums[c_places_off + low : c_places_off + high], sums[c_hits + low : c_hits + high],
                )  # fmt: skip
            group = group_of[text, q]
            if group >= 0:
                for at in range(group_from[group], group_from[group + 1]):
                    other = members[at] - first_key
                    if other != q + before and 0 <= other < n_padded:
                        weight = np.float64(row[other])
                        sums[c_same] += weight
                        sums[c_same + c_apart] += weight * off_rest[text, members[at]]
                    if other < q + before - 1 and other + 1 >= 0 and other + 1 < n_padded:
                        weight = np.float64(row[other + 1])
                        sums[c_induced] += weight
                        sums[c_induced + c_apart] += weight * off_rest[text, members[at] + 1]
