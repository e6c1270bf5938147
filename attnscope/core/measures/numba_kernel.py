"""The compiled half of `numba_pass`: softmax and every sum over rows of scores, in place. Ours.

Compiled by its signature as it is imported, and kept on disk: beside this file, or in the user's cache folder where
that may not be written. Plain loops and no threads of numba's own: its layers bring a second pool beside torch's, abort
when two Python threads call at once, or die after a fork; `numba_pass` has threads of Python's, which let each other
run.

Arrays are flat, and no part of one is cut out for a row: that counts its users up and down, which takes as long as a
short row. A row is worked on in multiples of LANES keys, which the buffers are padded to: the scalar remainder would
take as long as the vectors. Exponentials are those of Cephes (Moshier 1989), within 1e-7; the order of additions is
that of the compiler, so that numbers are the same bit for bit on processors of one kind.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

LANES = 32
"""Keys are padded to a multiple of so many."""

_SUMS = {"reassoc", "nsz", "arcp", "contract"}
"""What makes sums vectors. Not that there be no NaN: what a model computes as NaN must come out as such."""

_f4, _i4, _i8, _f8 = types.float32, types.int32, types.int64, types.float64
_F4, _F8, _I4, _I8 = (types.Array(dtype, 1, "C") for dtype in (_f4, _f8, _i4, _i8))

_U = np.uint64
"""Of indices in loops: numba takes what may be below 0 for an index from the end, and then the loop is no vector."""


@njit(fastmath={"contract"}, forceinline=True)
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
        places: 0, 1, 2, ... by padded key, (padded key,), float32.
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
    places: NDArray[np.float32]
    shape: tuple[int, ...]


_GIVEN = types.NamedTuple(
    (_I4, _F4, _F4, _I8, _I8, _I8, _I8, _I8, _F4, _I8, _I8, _I8, _F4, types.UniTuple(_i8, 7)), Given
)

_READ_ROWS = types.void(_F4, _I4, types.UniTuple(_i8, 9), _I8, _F4, _GIVEN, _F8, _F4, _F4)


@njit(_READ_ROWS, nogil=True, cache=True, error_model="numpy", fastmath=_SUMS)
def read_rows(scores, bits, sizes, slots, sinks, given, board, received, active):
    """Turns scores into weights, and adds up what is read off their rows. All arrays are flat.

    Args:
        scores: (text * head, query, padded key); becomes weights, 0 beyond the edges.
        bits: The same memory as whole numbers.
        sizes: The first and last + 1 task (task = text * head * chunk of queries, in that order), heads, queries,
            padded keys, queries of a chunk, the block's first query and first key in its text, and 1 if queries and
            keys are of one text.
        slots: Where in the board and in `worth` each part begins; see `numba_pass.SLOTS`.
        sinks: One score a head, or empty.
        given: What is known of the block.
        board: (task, column); added to.
        received: (task, padded key); added to.
        active: (text * head, query); what each query gives to keys outside the sinks.
    """
    (
        edges, worth, off_rest, rest_from, rest, final, rare_from, rare, cosine, group_of, group_from, members, places,
        shape,
    ) = given  # fmt: skip
    first_task, last_task, n_heads, n_queries, n_padded, chunk, first_query, first_key, own_text = sizes
    edge_heads, worth_heads, n_worth, n_board, n_tokens, cosine_text, cosine_query = shape
    (
        n_offsets, c_entropy, c_relative, c_off_rest, c_max, c_rare, c_rms, c_near, c_ahead, c_cosine, c_same,
        c_induced, c_apart, c_even, c_hits, c_places, c_places_off,
        q_relative, q_off_rest, q_max, q_rare, q_even, q_places, q_places_off,
    ) = (
        slots[0], slots[1], slots[2], slots[3], slots[4], slots[5], slots[6], slots[7], slots[8], slots[9], slots[10],
        slots[11], slots[12], slots[13], slots[14], slots[15], slots[16],
        slots[17], slots[18], slots[19], slots[20], slots[21], slots[22], slots[23],
    )  # fmt: skip
    n_chunks = (n_queries + chunk - 1) // chunk
    reach = n_offsets // 2
    before = first_query - first_key
    most = 1
    for t in range(rest_from.shape[0] - 1):
        most = max(most, rest_from[t + 1] - rest_from[t])
    aside, aside_at = np.empty(most, np.float64), np.empty(most, np.int64)
    aside_weight = np.empty(most, np.float32)
    nothing, low = np.float32(-np.inf), np.float32(-87)
    for task in range(first_task, last_task):
        text_head, part = task // n_chunks, task % n_chunks
        text, head = text_head // n_heads, text_head % n_heads
        sums, taken = task * n_board, task * n_padded
        for q in range(part * chunk, min(part * chunk + chunk, n_queries)):
            row = (text_head * n_queries + q) * n_padded
            edge = ((text * edge_heads + (head if edge_heads > 1 else 0)) * n_queries + q) * 2
            start, stop = np.int64(edges[edge]), np.int64(edges[edge + 1])
            active[text_head * n_queries + q] = 0
            if stop <= start:
                for k in range(_U(n_padded)):
                    scores[_U(row) + k] = 0
                continue
            left, right = start // LANES * LANES, min((stop + LANES - 1) // LANES * LANES, n_padded)
            for k in range(_U(left)):
                scores[_U(row) + k] = 0
            for k in range(_U(row + right), _U(row + n_padded)):
                scores[k] = 0
            for k in range(_U(row + left), _U(row + start)):
                scores[k] = nothing
            for k in range(_U(row + stop), _U(row + right)):
                scores[k] = nothing
            # Keys on which heads rest are set aside: sums of the others are then no small differences of large ones.
            n_aside = 0
            for at in range(rest_from[text], rest_from[text + 1]):
                k = rest[at] - first_key
                if start <= k < stop:
                    aside[n_aside], aside_at[n_aside] = scores[row + k], k
                    scores[row + k] = nothing
                    n_aside += 1
            n, here = _U(right - left), _U(row + left)
            # The largest, told by bits, whose order is that of numbers once signs are turned: that is a vector, and
            # NaN is the largest of all.
            bit = np.int32(-2147483648)
            for k in range(n):
                turned = bits[here + k]
                turned = turned ^ ((turned >> np.int32(31)) & np.int32(0x7FFFFFFF))
                bit = turned if turned > bit else bit
            bit = bit ^ ((bit >> np.int32(31)) & np.int32(0x7FFFFFFF))
            largest = np.float64(np.int32(bit).view(np.float32))
            largest_but_end = largest
            for i in range(n_aside):
                if not aside[i] <= largest:
                    largest = aside[i]
                if aside_at[i] + first_key != final[text] and not aside[i] <= largest_but_end:
                    largest_but_end = aside[i]
            total_off, times_off, above = np.float32(0), np.float32(0), np.float32(largest)
            for k in range(n):
                x = scores[here + k] - above
                x = low if x < low else x
                p = _exp(x)
                p = np.float32(0) if x <= low else p
                scores[here + k] = p
                total_off += p
                times_off += p * x
            total_aside, times_aside = np.float64(0), np.float64(0)
            for i in range(n_aside):
                x = np.float32(aside[i] - largest)
                x = low if x < low else x
                p = _exp(x)
                p = np.float32(0) if x <= low else p
                aside[i] = p
                total_aside += p
                times_aside += p * x
            seen = np.float64(total_off) + total_aside
            total = seen
            if sinks.shape[0]:
                total += math.exp(min(np.float64(sinks[head]) - largest, 700.0))
            inverse = 1.0 / total
            by = np.float32(inverse)
            for i in range(n_aside):
                aside_weight[i] = np.float32(aside[i]) * by
            worths = ((text * worth_heads + (head if worth_heads > 1 else 0)) * n_queries + q) * n_worth
            if worth[worths] == 0:
                for k in range(n):
                    scores[here + k] *= by
                for i in range(n_aside):
                    scores[row + aside_at[i]] = aside_weight[i]
                continue
            cosines = text * cosine_text + q * cosine_query
            place, like, taken_here = np.float32(q + before), _U(cosines + left), _U(taken + left)
            near_off, ahead_off, squares = np.float32(0), np.float32(0), np.float32(0)
            alike_off, ties = np.float32(0), np.float32(0)
            for k in range(n):
                weight = scores[here + k] * by
                scores[here + k] = weight
                received[taken_here + k] += weight
                away = places[_U(left) + k] - place
                moved = weight * away
                ahead_off += moved
                near_off += abs(moved)
                squares += moved * away
                alike_off += weight * cosine[like + k]
                ties += np.float32(1) if weight >= by else np.float32(0)
            near, ahead, alike = np.float64(near_off), np.float64(ahead_off), np.float64(alike_off)
            spread, shared = np.float64(squares), np.float64(ties)
            for i in range(n_aside):
                k, weight = aside_at[i], aside_weight[i]
                scores[row + k] = weight
                received[taken + k] += weight
                apart = np.float64(k - q - before)
                near += weight * abs(apart)
                ahead += weight * apart
                spread += weight * apart * apart
                alike += weight * np.float64(cosine[cosines + k])
                shared += 1.0 if weight >= by else 0.0
            off = np.float64(total_off) * inverse
            active[text_head * n_queries + q] = off
            entropy = math.log(total) * (seen * inverse) - (np.float64(times_off) + times_aside) * inverse
            board[sums + c_entropy] += entropy
            board[sums + c_relative] += entropy * worth[worths + q_relative]
            if total_off > 0:
                inner = math.log(np.float64(total_off)) - np.float64(times_off) / np.float64(total_off)
                board[sums + c_off_rest] += inner * worth[worths + q_off_rest]
            elif total_off != 0:  # NaN
                board[sums + c_off_rest] += total_off
            if worth[worths + q_max] > 0:
                fallen = largest_but_end - largest
                board[sums + c_max] += inverse if fallen == 0 else math.exp(fallen) * inverse
            share = np.float32(1.0 / max(shared, 1.0))
            for at in range(rare_from[text], rare_from[text + 1]):
                k = rare[at] - first_key
                if start <= k < stop and scores[row + k] >= by:
                    board[sums + c_rare] += share * worth[worths + q_rare]
            if not own_text:
                continue
            board[sums + c_rms] += math.sqrt(spread)
            board[sums + c_near] += near
            board[sums + c_near + c_apart] += near_off
            board[sums + c_ahead] += ahead
            board[sums + c_ahead + c_apart] += ahead_off
            board[sums + c_cosine] += alike
            board[sums + c_cosine + c_apart] += alike_off
            board[sums + c_even] += seen * inverse * worth[worths + q_even]
            board[sums + c_even + 1] += off * worth[worths + q_even + 1]
            lowest, highest = max(0, reach - q - before), min(n_offsets, n_padded - q - before + reach)
            if lowest < highest:
                at, there, there_off = row + q + before - reach, worths + q_places, worths + q_places_off
                to, to_off, to_hits = sums + c_places, sums + c_places_off, sums + c_hits
                for o in range(_U(lowest), _U(highest)):
                    weight = scores[_U(at) + o]
                    board[_U(to) + o] += weight * worth[_U(there) + o]
                    board[_U(to_off) + o] += weight * worth[_U(there_off) + o]
                    if weight >= by:
                        board[_U(to_hits) + o] += share * worth[_U(there) + o]
            group = group_of[text * n_queries + q]
            if group >= 0:
                for at in range(group_from[group], group_from[group + 1]):
                    token = members[at]
                    other = token - first_key
                    if other != q + before and 0 <= other < n_padded:
                        weight = np.float64(scores[row + other])
                        board[sums + c_same] += weight
                        board[sums + c_same + c_apart] += weight * off_rest[text * n_tokens + token]
                    if other < q + before - 1 and other + 1 >= 0 and other + 1 < n_padded:
                        weight = np.float64(scores[row + other + 1])
                        board[sums + c_induced] += weight
                        board[sums + c_induced + c_apart] += weight * off_rest[text * n_tokens + token + 1]
