"""Which tokens of a text a head might copy or suppress at each prediction, and which others to compare them with.

Where tokens stand, the first one is left out: heads rest on it, whatever it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NOTHING = -1
"""In place of a token number: there is none. As `core.moved` has it."""

N_CANDIDATES = 3
"""Of the tokens that are read, so many with the largest logits are tried as what the rest of a model would copy."""

AMONG = 10
"""Among so many likeliest tokens of the vocabulary one must be to be what a model would say."""

RAISED = 1.0
"""By how many nats what the rest of a model would copy must be above its own logit at another place: a convention."""

Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Standing:
    """What stands in what is read at each prediction of a row: which tokens, how often, and how near.

    Attributes:
        ids: The row's token numbers.
        places: Where each prediction is made.
        types: The different tokens of the row, ascending.
        counts: How often each type stands there, (prediction, type); a decoder reads up to the place itself.
        distance: How far the nearest of them is, in tokens, (prediction, type).
        is_rival: Which types may be compared with: they stand there, are no special tokens, nor the answer, nor the
            token at the place itself.
        answers: The right tokens.
    """

    ids: Numbers
    places: Numbers
    types: Numbers
    counts: NDArray[np.int32]
    distance: NDArray[np.int32]
    is_rival: NDArray[np.bool_]
    answers: Numbers

    @classmethod
    def of(
        cls, ids: Numbers, special: frozenset[int], places: Numbers, answers: Numbers, *, looks_back: bool
    ) -> Standing:
        """Counts the tokens of a row, masks included; `looks_back` if each place reads only those before it."""
        types, inverse = np.unique(ids, return_inverse=True)
        at = np.arange(len(ids), dtype=np.int32)[:, None]
        there = inverse[:, None] == np.arange(len(types))
        there[:1] = False
        far = np.int32(2 * len(ids))
        distance = (at - np.maximum.accumulate(np.where(there, at, -far)))[places]
        if looks_back:
            counts = there.cumsum(0, dtype=np.int32)[places]
        else:
            counts = np.broadcast_to(there.sum(0, dtype=np.int32), (len(places), len(types)))
            after = np.minimum.accumulate(np.where(there, at, far)[::-1])[::-1] - at
            distance = np.minimum(distance, after[places])
        is_rival = (counts > 0) & ~np.isin(types, sorted(special))
        is_rival &= (types != ids[places][:, None]) & (types != answers[:, None])
        return cls(ids, places, types, counts, distance, is_rival, answers)

    def type_of(self, tokens: Numbers) -> Numbers:
        """The number of each token among the types; NOTHING if it does not stand there."""
        numbers = np.minimum(np.searchsorted(self.types, tokens), len(self.types) - 1)
        there = (self.types[numbers] == tokens) & (self.counts[np.arange(len(tokens)), numbers] > 0)
        return np.where(there, numbers, NOTHING)

    def others(self, tokens: Numbers, n: Numbers | None = None, distance: Numbers | None = None) -> Numbers:
        """Another token for each prediction's (or NOTHING): one that stands there as often, and about as near.

        It is the rival with the closest count, and of several the one whose nearest occurrence is as near as the
        token's; of two alike the smaller number. So a head of a fixed reach sees both alike. `n` and `distance` say how
        often the token stands there and how near; None = as counted.
        """
        chosen = self.type_of(tokens)
        row = np.arange(len(tokens))
        n_there = self.counts[row, chosen].astype(np.int64) if n is None else n
        far = self.distance[row, chosen].astype(np.int64) if distance is None else distance
        off = np.abs(self.counts - n_there[:, None]) * (4 * len(self.ids)) + np.abs(self.distance - far[:, None])
        rivals = self.is_rival & (np.arange(len(self.types)) != chosen[:, None])
        best = np.where(rivals, off, np.iinfo(np.int64).max).argmin(1)
        return np.where(rivals.any(1) & (chosen >= 0), self.types[best], NOTHING)

    def controls(self, tokens: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """For each prediction's token (or NOTHING) another place of the row, where it stands too and is not what comes.

        Of the places where it may be compared with others (`is_rival`), it is the one where the token stands as often,
        and as near. Each place is taken once, so that one token is asked about there; predictions choose in their
        order.

        Returns:
            The number of the other prediction, NOTHING if none is left; and laid out by that prediction, the token to
            ask about there, and another to compare it with.
        """
        index, laid = np.full((2, len(tokens)), NOTHING)
        chosen = self.type_of(tokens)
        free = np.ones(len(tokens), np.bool_)
        for number in np.flatnonzero(chosen >= 0).tolist():
            kind = chosen[number]
            may = free & self.is_rival[:, kind]
            may[number] = False
            if not may.any():
                continue
            off = np.abs(self.counts[:, kind] - self.counts[number, kind]).astype(np.int64) * (4 * len(self.ids))
            off += np.abs(self.distance[:, kind] - self.distance[number, kind])
            best = int(np.where(may, off, np.iinfo(np.int64).max).argmin())
            free[best], index[number], laid[best] = False, best, self.types[kind]
        laid, others = _together(laid, self.others(laid))
        return np.where((index >= 0) & (laid[index] >= 0), index, NOTHING), laid, others

    def hits(self, tokens: Numbers, others: Numbers, offset: int) -> NDArray[np.int8]:
        """What a head that looks at one offset alone has on each prediction's token, less that on the other."""
        keys = self.places + offset
        seen = (keys > 0) & (keys < len(self.ids))
        there = self.ids[keys.clip(0, len(self.ids) - 1)]
        return np.where(seen, (there == tokens).astype(np.int8) - (there == others), 0).astype(np.int8)

    def copied(self) -> tuple[Numbers, Numbers]:
        """The answers that stand there, and others; NOTHING for the other predictions."""
        return _together(self.answers, self.others(self.answers))

    def repeated(self, special: frozenset[int]) -> tuple[Numbers, Numbers, Numbers]:
        """What came after the nearest earlier occurrence of the token at each place, others, and that token."""
        followed: dict[int, int] = {}
        pairs: dict[tuple[int, int], int] = {}
        by_place: dict[int, tuple[int, int, int]] = {}
        ids = self.ids.tolist()
        for place, token in enumerate(ids):  # `followed` and `pairs` know keys before this place alone
            if token in followed and token not in special:
                key = followed[token]
                if ids[key] not in special:
                    by_place[place] = ids[key], pairs[token, ids[key]], place - key
            if place:
                followed[ids[place - 1]] = place
                pairs[ids[place - 1], token] = pairs.get((ids[place - 1], token), 0) + 1
        nothing = (NOTHING, 0, 0)
        tokens, n, distance = (
            np.array([by_place.get(place, nothing) for place in self.places.tolist()]).reshape(-1, 3).T
        )
        tokens, others = _together(tokens, self.others(tokens, n, distance))
        return tokens, others, np.where(tokens >= 0, self.ids[self.places], NOTHING)

    def likeliest(self, logits: NDArray[np.floating], special: frozenset[int]) -> list[tuple[Numbers, Numbers]]:
        """The tokens of what is read that have the largest logits, (prediction, type), and others: N_CANDIDATES times.

        The token at the place itself is none of them: a model that does not say it again is no news.
        """
        there = (self.counts > 0) & ~np.isin(self.types, sorted(special))
        there &= self.types != self.ids[self.places][:, None]
        masked = np.where(there, logits, -np.inf)
        order = np.argsort(-masked, 1, kind="stable")
        candidates = []
        for number in range(N_CANDIDATES):
            best = order[:, min(number, order.shape[1] - 1)]
            is_there = there[np.arange(len(best)), best] & (number < order.shape[1])
            tokens = np.where(is_there, self.types[best], NOTHING)
            candidates.append(_together(tokens, self.others(tokens)))
        return candidates


def _together(tokens: Numbers, others: Numbers) -> tuple[Numbers, Numbers]:
    """Both, or neither."""
    both = (tokens >= 0) & (others >= 0)
    return np.where(both, tokens, NOTHING), np.where(both, others, NOTHING)
