"""Which tokens are a word: by the characters that both cover, never by counting or by guessing.

A token that reaches into two words ("don" of "do" + "n't") joins them into one: such words can be told apart neither
as sources nor as targets, and their links are left out. They stay one word among those that may be looked at.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from attnscope.annotated.texts import AnnotatedText, Link, Span
from attnscope.corpus import Chunk
from attnscope.results.tokens import Tokens

UNALIGNED = "words that the tokens do not tell apart"
OUTSIDE = "source and target in different chunks"
HIDDEN = "targets that causality hides"


@dataclass(frozen=True, eq=False)
class Placed:
    """A chunk of an annotated text in tokens.

    Attributes:
        chunk: The chunk.
        unit: For each token the number of its word in the chunk, from 0; -1 = special, or part of no word. (token,)
        n_units: How many words there are.
        word: For each unit the number of the word in the text; -1 = several that the tokens do not tell apart. (unit,)
        links: The links that can be seen.
        target: The decoder's tokens, of a text with a target: they are the ones that look. None for other texts.
    """

    chunk: Chunk
    unit: NDArray[np.int64]
    n_units: int
    word: NDArray[np.int64]
    links: "tuple[PlacedLink, ...]"
    target: Tokens | None = None

    @property
    def size(self) -> int:
        """How many tokens the longer side has."""
        return max(len(self.chunk), 0 if self.target is None else len(self.target))


@dataclass(frozen=True)
class PlacedLink:
    """A link in tokens: with its visible targets alone, the tokens that look, their units, and the right units."""

    link: Link
    tokens: tuple[int, ...]
    own: tuple[int, ...]
    targets: tuple[int, ...]


def place_links(
    text: AnnotatedText, parts: Sequence[Chunk], tokens: Tokens, *, causal: bool
) -> tuple[list[Placed], dict[str, Counter[str]]]:
    """Places a text's words and links in the tokens of its chunks.

    A link stands in the first chunk that has all of it. `tokens` are those of the whole text. If `causal`, a query sees
    earlier keys alone, and targets that it cannot see are left out.

    Returns:
        The chunks that have links, and the links that none has: relation -> reason -> how many.
    """
    left_out: dict[str, Counter[str]] = {}
    whole = pieces_of(text.words, tokens)
    waiting = list(enumerate(text.links))
    chunks: list[Placed] = []
    reasons: dict[int, str] = {}
    for part in parts:
        pieces = whole if len(parts) == 1 else pieces_of(text.words, part.tokens)
        unit, word, tokens_of = _units(pieces, whole, len(part.tokens))
        unit_of = {int(w): u for u, w in enumerate(word) if w >= 0}
        links, rest = [], []
        for number, link in waiting:
            placed = _place_link(link, unit_of, tokens_of, causal)
            if isinstance(placed, PlacedLink):
                links.append(placed)
                continue
            rest.append((number, link))
            present = all(pieces[w] for w in (*link.source, *link.targets))
            reasons[number] = placed if present or len(parts) == 1 else reasons.get(number, OUTSIDE)
        waiting = rest
        if links:
            chunks.append(Placed(part, unit, len(word), word, tuple(links)))
    for number, link in waiting:
        left_out.setdefault(link.relation, Counter())[reasons.get(number, UNALIGNED)] += 1
    return chunks, left_out


def place_target_links(
    text: AnnotatedText, whole: Chunk, target: Tokens
) -> tuple[list[Placed], dict[str, Counter[str]]]:
    """Places the links of a target to its text in the tokens of both, as the decoder reads them; see `place_links`."""
    pieces, looking = pieces_of(text.words, whole.tokens), pieces_of(text.target_words, target)
    unit, word, _ = _units(pieces, pieces, len(whole))
    _, own_word, tokens_of = _units(looking, looking, len(target))
    unit_of = {int(w): u for u, w in enumerate(word) if w >= 0}
    own_of = {int(w): u for u, w in enumerate(own_word) if w >= 0}
    left_out: dict[str, Counter[str]] = {}
    links = []
    for link in text.links:
        if any(w not in own_of for w in link.source) or any(w not in unit_of for w in link.targets):
            left_out.setdefault(link.relation, Counter())[UNALIGNED] += 1
            continue
        tokens = sorted(token for w in link.source for token in tokens_of[own_of[w]])
        links.append(PlacedLink(link, tuple(tokens), (), tuple(unit_of[w] for w in link.targets)))
    return ([Placed(whole, unit, len(word), word, tuple(links), target)] if links else []), left_out


def _place_link(link: Link, unit_of: dict[int, int], tokens_of: list[list[int]], causal: bool) -> PlacedLink | str:
    """A link in tokens, or the reason why it has none."""
    if any(word not in unit_of for word in (*link.source, *link.targets)):
        return UNALIGNED
    own = tuple(unit_of[word] for word in link.source)
    looking = tuple(sorted(token for unit in own for token in tokens_of[unit]))
    visible = tuple(word for word in link.targets if not causal or tokens_of[unit_of[word]][0] <= looking[-1])
    if not visible:
        return HIDDEN
    return PlacedLink(replace(link, targets=visible), looking, own, tuple(unit_of[word] for word in visible))


def pieces_of(words: Sequence[Span], tokens: Tokens) -> list[list[int]]:
    """For each word the tokens that share characters with it, ascending."""
    pieces: list[list[int]] = [[] for _ in words]
    starts = [start for start, _ in words]
    # How far any word up to here goes: words may share characters.
    reach = list(accumulate((stop for _, stop in words), max))
    for token, (start, stop) in enumerate(tokens.offsets.tolist()):
        if start < 0 or tokens.special[token]:
            continue
        word = bisect_left(starts, stop) - 1
        while word >= 0 and reach[word] > start:
            if words[word][1] > start:
                pieces[word].append(token)
            word -= 1
    return pieces


def _units(
    pieces: list[list[int]], whole: list[list[int]], n_tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[list[int]]]:
    """Words that share tokens as one: each token's unit, each unit's word (-1 = several, or cut off), its tokens."""
    unit = np.full(n_tokens, -1, np.int64)
    members: list[list[int]] = []
    tokens_of: list[list[int]] = []
    for word, mine in enumerate(pieces):
        if not mine:
            continue
        known = sorted({int(unit[token]) for token in mine} - {-1})
        if not known:
            members.append([word])
            tokens_of.append(list(mine))
            unit[mine] = len(members) - 1
            continue
        first, *others = known
        members[first].append(word)
        tokens_of[first] = sorted({*tokens_of[first], *mine})
        for other in others:
            members[first] += members[other]
            tokens_of[first] = sorted({*tokens_of[first], *tokens_of[other]})
            members[other], tokens_of[other] = [], []
        unit[tokens_of[first]] = first
    units = [number for number, words in enumerate(members) if words]
    renumbered = np.full(len(members) + 1, -1, np.int64)
    renumbered[units] = np.arange(len(units))
    firsts = [members[n][0] for n in units]
    is_whole = [len(members[n]) == 1 and len(pieces[w]) == len(whole[w]) for n, w in zip(units, firsts, strict=True)]
    words = np.where(is_whole, np.array(firsts, np.int64), -1)
    return renumbered[unit], words, [tokens_of[n] for n in units]
