"""Say at which distances from the query a head attends, such as "up to 4 before (62%; uniform 20%), nearest first".

Distances are sorted into *buckets*: 1, 2, 3 to 4, 5 to 8, and more than 8 tokens, on each side of the query. Buckets
of keys before the query have negative numbers. The *share* of a bucket is the part of all attention that it gets. Its
*lift* is its share divided by the share that the other terms of the head's description give it. An *entry* is a key of
a row of attention.
"""

import numpy as np
from numpy.typing import NDArray

from attnscope.arrays import Flags, Floats

MIN_SHARE = 0.02
"""A kind of key is named if it gets at least this share of attention, or would get it by the other terms."""

MIN_DISTANCE_LIFT = 1.2
"""Buckets are named outwards from the query as long as their lift is at least this. If the lift of the nearer or the
farther half of the named distances is this many times the lift of the other half, that half is said to come first."""

MIN_PEAK_LIFT = 1.5
"""A named bucket is called the peak if its lift is this many times the lift of every other named bucket. The query
itself is named if its lift is at least this."""

MAX_AVOIDED_LIFT = 0.5
"""A kind of key, or a side of the query, is named as avoided if its lift is at most this."""

MAX_ATTENTION = 0.7
"""If the named distances get at least this share of attention, no side of the query is named as avoided."""

_BUCKET_ENDS = (0, 1, 2, 4, 8)
"""Bucket number -> its largest distance, in tokens. Bucket 0 is the query itself."""

_LAST_BUCKET = len(_BUCKET_ENDS)
"""The number of the last bucket, which has all larger distances."""

_SIDES = {-1: "before", 1: "after"}
_NEAREST_WORDS = {
    "before": "the previous token",
    "after": "the next token",
    "away": "the tokens beside it",
}
_ALL_WORDS = {"before": "tokens before it", "after": "tokens after it", "away": "other tokens"}


def phrase_distances(
    offsets: NDArray[np.int32], attention: Floats, expected: Floats, uniform: Floats
) -> str:
    """Name the distances with a large lift; return "" if there are none. All arrays are (entry,).

    Args:
        offsets: The position of each key minus the position of its query, in tokens.
        attention: The head's attention; all entries sum to 1.
        expected: The attention that the other terms of the description give, in the same units.
        uniform: Uniform attention, in the same units.
    """
    # The numbers of all buckets, (bucket,), and the bucket of each entry, (entry,).
    buckets = np.arange(-_LAST_BUCKET, _LAST_BUCKET + 1)
    distances = np.abs(offsets)
    entry_buckets = np.sign(offsets) * np.searchsorted(_BUCKET_ENDS, distances)

    def sum_by_bucket(values: Floats) -> Floats:
        return np.bincount(entry_buckets + _LAST_BUCKET, values, len(buckets)).astype(np.float64)

    # (bucket,); the query itself stands at index _LAST_BUCKET.
    shares = sum_by_bucket(attention)
    expected_shares = sum_by_bucket(expected)
    uniform_shares = sum_by_bucket(uniform)
    lifts = _compute_distance_lift(shares, expected_shares)
    # The query itself has a phrase of its own.
    own_lift = lifts[_LAST_BUCKET]
    lifts[_LAST_BUCKET] = 0.0

    # Name the buckets with a large lift. If there are none, only the query itself may be named.
    words, is_named = _name_large_lifts(lifts, buckets)
    if not words:
        if own_lift < MIN_PEAK_LIFT:
            return ""
        return f"the token itself {format_shares(shares[_LAST_BUCKET], uniform_shares[_LAST_BUCKET])}"
    phrases = [f"{words} {format_shares(shares[is_named].sum(), uniform_shares[is_named].sum())}"]

    # Say where the lift is largest: in one bucket, or in the nearer or the farther half of the distances.
    best, *next_best = sorted(
        buckets[is_named].tolist(), key=lambda bucket: -lifts[bucket + _LAST_BUCKET]
    )
    is_named_entry = is_named[entry_buckets + _LAST_BUCKET]
    nearest = distances[is_named_entry].min()
    farthest = distances[is_named_entry].max()
    if next_best and lifts[best + _LAST_BUCKET] >= MIN_PEAK_LIFT * lifts[next_best[0] + _LAST_BUCKET]:
        phrases.append(f"most {_name_bucket(best)} ({100 * shares[best + _LAST_BUCKET]:.0f}%)")
    elif nearest < farthest:
        is_near = distances <= (nearest + farthest) / 2
        phrases.append(
            _compare_halves(attention, expected, is_named_entry & is_near, is_named_entry & ~is_near)
        )
    if own_lift >= MIN_PEAK_LIFT:
        phrases.append(f"itself ({100 * shares[_LAST_BUCKET]:.0f}%)")
    # Name a side that is avoided.
    if shares[is_named].sum() < MAX_ATTENTION:
        for side, side_words in _SIDES.items():
            is_on_side = buckets * side > 0
            side_lift = _compute_distance_lift(
                shares[is_on_side].sum(), expected_shares[is_on_side].sum()
            )
            if side_lift <= MAX_AVOIDED_LIFT:
                phrases.append(f"little {side_words} it")
    return ", ".join(phrases)


def _name_large_lifts(lifts: Floats, buckets: NDArray[np.int64]) -> tuple[str, Flags]:
    """Name the buckets next to the query with a large lift; if there are none, the one bucket with the largest lift.

    Args:
        lifts: The lift of each bucket, (bucket,); 0 for the query itself.
        buckets: The number of each bucket, (bucket,).

    Returns:
        The words, and which buckets they name, (bucket,). The words are "" if no lift is large.
    """
    # Side -> the number of adjacent buckets with a large lift. The 0 that is appended ends the search.
    reach = {}
    for side in _SIDES:
        outward_lifts = np.append(lifts[_LAST_BUCKET + side :: side], 0.0)
        reach[side] = int((outward_lifts < MIN_DISTANCE_LIFT).argmax())
    is_named = (buckets != 0) & (buckets >= -reach[-1]) & (buckets <= reach[1])
    words = ""
    if reach[-1] and reach[-1] == reach[1]:
        words = _name_buckets(1, reach[1], "away")
    elif is_named.any():
        sides = [side for side in _SIDES if reach[side]]
        words = " and ".join(_name_buckets(1, reach[side], _SIDES[side]) for side in sides)
    elif lifts.max() >= MIN_DISTANCE_LIFT:
        best = int(buckets[lifts.argmax()])
        is_named = buckets == best
        words = _name_bucket(best)
    return words, is_named


def _compare_halves(attention: Floats, expected: Floats, is_nearer: Flags, is_farther: Flags) -> str:
    """Say which of two halves of the entries has the larger lift. All arrays are (entry,)."""
    nearer_lift = _compute_distance_lift(attention[is_nearer].sum(), expected[is_nearer].sum())
    farther_lift = _compute_distance_lift(attention[is_farther].sum(), expected[is_farther].sum())
    if farther_lift >= MIN_DISTANCE_LIFT * nearer_lift:
        return "farthest first"
    return "nearest first" if nearer_lift >= MIN_DISTANCE_LIFT * farther_lift else "evenly"


def compute_lift(share: Floats, expected_share: Floats, added: float = MIN_SHARE / 2) -> Floats:
    """Return share / expected share. `added` is added to both, so that the lift of small shares is near 1."""
    return (share + added) / (expected_share + added)


def _compute_distance_lift(share: Floats, expected_share: Floats) -> Floats:
    """Return the lift of a bucket. Less is added than for kinds of keys, since buckets have smaller shares."""
    return compute_lift(share, expected_share, MIN_SHARE / 4)


def format_shares(share: float, uniform_share: float) -> str:
    """Return a share with that of uniform attention, such as "(62%; uniform 20%)"."""
    return f"({100 * share:.0f}%; uniform {100 * uniform_share:.0f}%)"


def _name_bucket(bucket: int) -> str:
    """Name the keys of a bucket, such as "2 before"."""
    return _name_buckets(abs(bucket), abs(bucket), _SIDES[1 if bucket > 0 else -1])


def _name_buckets(first: int, last: int, side: str) -> str:
    """Name the keys of the buckets `first` to `last` on a side, such as "5 to 8 before".

    The side is "before", "after" or "away", which is both.
    """
    low = _BUCKET_ENDS[first - 1] + 1
    # The last bucket has no largest distance.
    if last >= len(_BUCKET_ENDS):
        return f"{low} or more {side}" if first > 1 else _ALL_WORDS[side]
    high = _BUCKET_ENDS[last]
    if high == 1:
        return _NEAREST_WORDS[side]
    if first == 1:
        return f"up to {high} {side}"
    return f"{low} {side}" if low == high else f"{low} to {high} {side}"
