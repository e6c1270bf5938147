"""Other ways to say what a head does, each by its own published definition.

None of them predicts attention. So that they can be scored beside a tool that does, a rival's keys share what they get
on average on the texts that it saw, and all keys share the rest: the best prediction that its answer allows.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from benchmarks.known.tools import Answer, Attnscope, Floats, Pattern, Tool, allowed
from benchmarks.known.truth import Flags, KnownModel, Place, Text

LARGEST_OFFSET = 12


def offset_keys(by: int) -> Callable[[Text], Flags]:
    """The token at an offset."""
    return lambda text: np.eye(text.n, k=by, dtype=np.bool_)


def first_keys(text: Text) -> Flags:
    """The first token, of all queries."""
    keys = np.zeros((text.n, text.n), np.bool_)
    keys[:, 0] = True
    return keys


def last_special_keys(text: Text) -> Flags:
    """Special tokens at the end, [SEP]."""
    keys = np.zeros((text.n, text.n), np.bool_)
    keys[:, text.n - text.n_last :] = True
    return keys


def word_keys(*words: str) -> Callable[[Text], Flags]:
    """All tokens that are one of some words."""
    return lambda text: np.broadcast_to(np.array([token in words for token in text.tokens]), (text.n, text.n))


def duplicate_keys(text: Text) -> Flags:
    """The same token before."""
    tokens = np.array(text.tokens)
    return (tokens[:, None] == tokens) & np.tri(text.n, k=-1, dtype=np.bool_)


def induction_keys(text: Text) -> Flags:
    """What stands after the same token before: TransformerLens shifts duplicates by one key."""
    keys = np.zeros((text.n, text.n), np.bool_)
    keys[:, 1:] = duplicate_keys(text)[:, :-1]
    return keys & np.tri(text.n, dtype=np.bool_)


def share_of(place: Place, keys: Pattern, known: KnownModel, attention: Sequence[Floats]) -> float:
    """The mean mass on some keys, over queries that may see any."""
    masses = []
    for text, weights in zip(known.texts, attention, strict=True):
        named = np.asarray(keys(text), np.bool_) & allowed(text, known.causal)
        masses.append((weights[place] * named).sum(1)[named.any(1)])
    together = np.concatenate(masses)
    return float(together.mean()) if len(together) else 0.0


def predict_with(keys: Pattern, share: float, causal: bool) -> Callable[[Text], Floats]:
    """Even attention, but for a share of it that lies on some keys."""

    def predict(text: Text) -> Floats:
        seen = allowed(text, causal)
        named = np.asarray(keys(text), np.bool_) & seen
        even, n_named = seen / seen.sum(1, keepdims=True), named.sum(1, keepdims=True)
        on_named = named / np.maximum(n_named, 1)
        kept = min(share, 0.999) * (n_named > 0)
        rows: Floats = kept * on_named + (1 - kept) * even
        return rows

    return predict


class Named:
    """A tool that gives a head one of a few names, by a threshold on its attention."""

    def __init__(self, name: str, source: str, patterns: Mapping[str, Pattern], roles: Mapping[str, str]) -> None:
        self.name, self.source, self._patterns, self._roles = name, source, patterns, roles
        self.roles = frozenset(roles.values())

    def answer(self, known: KnownModel, attention: Sequence[Floats]) -> Mapping[Place, Answer]:
        """Names each head, or says nothing."""
        return {place: self._answer(place, known, attention) for place in known.heads}

    def vocabulary(self, known: KnownModel) -> Sequence[Pattern]:
        """The patterns that have a name, sinks left out."""
        return [pattern for name, pattern in self._patterns.items() if name not in _SINKS]

    def _answer(self, place: Place, known: KnownModel, attention: Sequence[Floats]) -> Answer:
        names = self.choose(place, known, attention)
        if not names:
            return Answer("", undescribed=True)
        share = share_of(place, self._patterns[names[0]], known, attention)
        return Answer(
            ", ".join(names),
            tuple(self._patterns[name] for name in names if name not in _SINKS),
            bool(set(names) & set(_SINKS)),
            predict=predict_with(self._patterns[names[0]], share, known.causal),
            roles=frozenset(self._roles[name] for name in names if name in self._roles),
        )

    def choose(self, place: Place, known: KnownModel, attention: Sequence[Floats]) -> list[str]:
        """The names that the head gets, the best first."""
        raise NotImplementedError


_SINKS = ("first", "last special")
_OFFSETS: dict[str, Pattern] = {
    str(by): offset_keys(by) for by in sorted(range(-LARGEST_OFFSET, LARGEST_OFFSET + 1), key=abs)
}
_OFFSET_ROLES = {"-1": "previous_token", "0": "self_token", "1": "next_token"}


class MostAttendedOffset(Named):
    """The offset that gets most attention; every head has one."""

    def __init__(self) -> None:
        super().__init__("most-attended offset", "Kovaleva et al. 2019, section 4.1 (diagonals)", _OFFSETS, {})

    def choose(self, place: Place, known: KnownModel, attention: Sequence[Floats]) -> list[str]:
        """The largest mean weight on a diagonal."""
        return [max(_OFFSETS, key=lambda name: share_of(place, _OFFSETS[name], known, attention))]


class Voita(Named):
    """Positional heads: the largest weight is at one offset in 90% of the queries."""

    def __init__(self) -> None:
        super().__init__("Voita: positional", "Voita et al. 2019, section 5.1", _OFFSETS, _OFFSET_ROLES)

    def choose(self, place: Place, known: KnownModel, attention: Sequence[Floats]) -> list[str]:
        """The offset of the maxima; the last special token's queries are left out, as there."""
        offsets = []
        for text, weights in zip(known.texts, attention, strict=True):
            queries = np.arange(1, text.n - text.n_last)
            offsets.append(weights[place][queries].argmax(1) - queries)
        numbers, counts = np.unique(np.concatenate(offsets), return_counts=True)
        best = int(counts.argmax())
        name = str(int(numbers[best]))
        return [name] if counts[best] >= 0.9 * counts.sum() and name in _OFFSETS else []


class Clark(Named):
    """More than half of the attention on one kind of token, on average."""

    def __init__(self) -> None:
        patterns: dict[str, Pattern] = {
            "-1": offset_keys(-1), "1": offset_keys(1), "0": offset_keys(0), "first": first_keys,
            "last special": last_special_keys, "period or comma": word_keys(".", ","),
        }  # fmt: skip
        roles = {**_OFFSET_ROLES, "first": "first_token", "period or comma": "delimiter"}
        super().__init__("Clark: mean maps over 50%", "Clark et al. 2019, sections 3.1 and 3.2", patterns, roles)

    def choose(self, place: Place, known: KnownModel, attention: Sequence[Floats]) -> list[str]:
        """All kinds that get more than half, the one with most first."""
        shares = {name: share_of(place, keys, known, attention) for name, keys in self._patterns.items()}
        return sorted((name for name in shares if shares[name] > 0.5), key=lambda name: -shares[name])


class TransformerLens(Named):
    """`detect_head` with its default error measure, the beginning left out; 0.4 or more is a head of that name."""

    def __init__(self) -> None:
        patterns: dict[str, Pattern] = {
            "previous token": offset_keys(-1), "duplicate token": duplicate_keys, "induction": induction_keys,
        }  # fmt: skip
        roles = {"previous token": "previous_token", "duplicate token": "same_token", "induction": "induction"}
        source = "TransformerLens head_detector.py, error_measure='mul', exclude_bos; it sets no threshold, 0.4 is ours"
        super().__init__("TransformerLens: detect_head", source, patterns, roles)

    def choose(self, place: Place, known: KnownModel, attention: Sequence[Floats]) -> list[str]:
        """The share of all attention, the first token's left out, on a pattern: the mean over texts."""
        scores = {}
        for name, keys in self._patterns.items():
            of_texts = []
            for text, weights in zip(known.texts, attention, strict=True):
                rows = weights[place].copy()
                rows[:, 0] = 0
                of_texts.append(float((rows * keys(text)).sum() / max(rows.sum(), 1e-9)))
            scores[name] = float(np.mean(of_texts))
        return sorted((name for name in scores if scores[name] >= 0.4), key=lambda name: -scores[name])


TOOLS: tuple[Tool, ...] = (Attnscope(), MostAttendedOffset(), Voita(), Clark(), TransformerLens())
