"""Align words with tokens by the characters that both cover, never by counting or by guessing.

A token that reaches into two words ("don" of "do" + "n't") joins them into one: such words can be told apart neither
as sources nor as targets, and their links are left out. They stay one word among those that may be looked at.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from attnscope.annotated.texts import AnnotatedText, Link, Span
from attnscope.corpus import Chunk
from attnscope.results.tokens import Tokens

UNALIGNED = "words that the tokens do not tell apart"
OUTSIDE = "source and target in different chunks"
HIDDEN = "targets that causality hides"
"""The reasons why a link has no place in the tokens."""


@dataclass(frozen=True)
class PlacedLink:
    """Hold a link in the tokens of a chunk.

    Attributes:
        link: The link, with the targets that can be seen.
        tokens: The tokens of its source: the queries.
        targets: The units of its targets: where the queries should look.
    """

    link: Link
    tokens: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PlacedChunk:
    """Hold a chunk of an annotated text in tokens.

    Attributes:
        chunk: The chunk.
        unit_of_token: The unit of each token, (token,), from 0 in a chunk; -1 = part of no word. A unit is a word, or
            words that share tokens.
        links: The links that can be seen.
        target: In a text with a target, the decoder's tokens, which are the queries. None for other texts.
    """

    chunk: Chunk
    unit_of_token: NDArray[np.int64]
    links: tuple[PlacedLink, ...]
    target: Tokens | None = None


def place_links(
    text: AnnotatedText,
    parts: Sequence[Chunk],
    tokens: Tokens,
    *,
    causal: bool = False,
    target: Tokens | None = None,
) -> tuple[list[PlacedChunk], Counter[tuple[str, str]]]:
    """Place a text's words and links in the tokens of its chunks.

    A link stands in the first chunk that has all of it.

    Args:
        text: The text.
        parts: Its chunks; a text with a target is one.
        tokens: The tokens of the whole text.
        causal: Whether a query sees earlier keys alone: targets that it cannot see are left out.
        target: The tokens of its target, as the decoder reads them.

    Returns:
        The chunks that have links, and how many links none has, by relation and reason.
    """
    # The words of the whole text, and of its target, from which links then go.
    whole = WordUnits(text.words, tokens)
    target_units = None if target is None else WordUnits(text.target_words, target)
    # Try every link in each chunk; the first chunk that holds all of it keeps it.
    waiting = dict(enumerate(text.links))
    reasons = dict.fromkeys(waiting, OUTSIDE)
    placed: list[PlacedChunk] = []
    for part in parts:
        units = whole if len(parts) == 1 else WordUnits(text.words, part.tokens, whole.pieces)
        links = []
        for number, link in list(waiting.items()):
            link_or_reason = _place_link(link, target_units or units, units, causal)
            if isinstance(link_or_reason, PlacedLink):
                links.append(link_or_reason)
                del waiting[number]
            # A later chunk may still hold a link that this one cuts, so only whole ones get a reason.
            elif len(parts) == 1 or all(units.pieces[word] for word in (*link.source, *link.targets)):
                reasons[number] = link_or_reason
        if links:
            placed.append(PlacedChunk(part, units.unit_of_token, tuple(links), target))
    left_out = Counter((link.relation, reasons[number]) for number, link in waiting.items())
    return placed, left_out


def pieces_of(words: Sequence[Span], tokens: Tokens) -> list[list[int]]:
    """Return the indices of the tokens that share characters with each word, ascending; special tokens are skipped."""
    ordinary = np.flatnonzero((tokens.offsets[:, 0] >= 0) & ~tokens.special)
    token_starts, token_stops = tokens.offsets[ordinary].T
    starts, stops = np.array(words, np.int64).reshape(-1, 2).T
    # From the first token that ends after the word's start to the last that starts before its end.
    first = np.searchsorted(token_stops, starts, side="right")
    end = np.searchsorted(token_starts, stops)
    return [ordinary[begin:stop].tolist() for begin, stop in zip(first, end, strict=True)]


class WordUnits:
    """Hold words in the tokens of a text or a chunk; words that share tokens are one unit.

    Args:
        words: Where the words are in the text, by their start.
        tokens: The tokens.
        whole: The tokens of each word in the whole text; None = `tokens` are the whole text.

    Attributes:
        pieces: The tokens of each word.
        unit_of_token: The unit of each token, (token,), from 0; -1 = part of no word.
        unit_of_word: The unit of each word that the tokens tell apart.
    """

    def __init__(
        self, words: Sequence[Span], tokens: Tokens, whole: Sequence[Sequence[int]] | None = None
    ) -> None:
        self.pieces = pieces_of(words, tokens)
        self.unit_of_token = np.full(len(tokens), -1, np.int64)
        # A word begins a unit if its first token is after all tokens of the words before it.
        words_of_units: list[list[int]] = []
        last_token = -1
        for word, piece in enumerate(self.pieces):
            if not piece:
                continue
            if piece[0] > last_token:
                words_of_units.append([])
            words_of_units[-1].append(word)
            self.unit_of_token[piece] = len(words_of_units) - 1
            last_token = max(last_token, piece[-1])
        # Words that share tokens, or are cut at the end of a chunk, cannot be told apart.
        self.unit_of_word = {}
        for unit, (word, *others) in enumerate(words_of_units):
            is_whole = whole is None or len(self.pieces[word]) == len(whole[word])
            if is_whole and not others:
                self.unit_of_word[word] = unit


def _place_link(
    link: Link,
    sources: WordUnits,
    targets: WordUnits,
    causal: bool,
) -> PlacedLink | str:
    """Return a link in tokens, or the reason why it has none."""
    # Refuse words that share tokens with others.
    if set(link.source) - sources.unit_of_word.keys():
        return UNALIGNED
    if set(link.targets) - targets.unit_of_word.keys():
        return UNALIGNED
    tokens: list[int] = []
    for word in link.source:
        tokens += sources.pieces[word]
    # Drop the targets that a causal query cannot see, judged by its last token.
    visible = list(link.targets)
    if causal:
        visible = [word for word in visible if targets.pieces[word][0] <= max(tokens)]
    if not visible:
        return HIDDEN
    units = tuple(targets.unit_of_word[word] for word in visible)
    return PlacedLink(replace(link, targets=tuple(visible)), tuple(sorted(tokens)), units)
