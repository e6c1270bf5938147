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
class Placed:
    """Hold a chunk of an annotated text in tokens.

    Attributes:
        chunk: The chunk.
        unit_of_token: From 0 in a chunk; -1 = part of no word. A unit is a word, or words that share tokens. (token,)
        word_of_unit: The number of the word in the text; -1 = several words, or a part of one. (unit,)
        links: The links that can be seen.
        target: The decoder's tokens, of a text with a target: they are the ones that look. None for other texts.
    """

    chunk: Chunk
    unit_of_token: NDArray[np.int64]
    word_of_unit: NDArray[np.int64]
    links: tuple[PlacedLink, ...]
    target: Tokens | None = None


def place_links(
    text: AnnotatedText,
    parts: Sequence[Chunk],
    tokens: Tokens,
    *,
    causal: bool = False,
    target: Tokens | None = None,
) -> tuple[list[Placed], Counter[tuple[str, str]]]:
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
    # Map words to the tokens of the whole text; a target looks with its own words.
    whole = pieces_of(text.words, tokens)
    looking = None
    if target is not None:
        target_pieces = pieces_of(text.target_words, target)
        looking = _Words(target_pieces, target_pieces, len(target))
    # Try every waiting link in each chunk; the first chunk that holds all of it keeps it.
    waiting = dict(enumerate(text.links))
    reasons: dict[int, str] = {}
    placed: list[Placed] = []
    for part in parts:
        pieces = whole if len(parts) == 1 else pieces_of(text.words, part.tokens)
        words = _Words(pieces, whole, len(part.tokens))
        links = []
        for number, link in list(waiting.items()):
            link_or_reason = _place_link(link, looking or words, words, causal)
            if isinstance(link_or_reason, PlacedLink):
                links.append(link_or_reason)
                del waiting[number]
            # A later chunk may still hold a link that this one cuts, so only whole ones get a reason.
            elif len(parts) == 1 or all(pieces[word] for word in (*link.source, *link.targets)):
                reasons[number] = link_or_reason
        if links:
            placed.append(Placed(part, words.unit_of_token, words.word_of_unit, tuple(links), target))
    left_out = Counter((link.relation, reasons.get(number, OUTSIDE)) for number, link in waiting.items())
    return placed, left_out


def pieces_of(words: Sequence[Span], tokens: Tokens) -> list[list[int]]:
    """Return the indices of the tokens that share characters with each word, ascending; special tokens are skipped."""
    pieces: list[list[int]] = [[] for _ in words]
    starts, stops = np.array(words, np.int64).reshape(-1, 2).T
    token_starts, token_stops = tokens.offsets.T
    # Words come by their start, but may share characters, so their ends need not ascend. A token meets no word before
    # the first with an end after the token's start, and none from the first on that starts at the token's end or later.
    first_words = np.searchsorted(np.maximum.accumulate(stops), token_starts, side="right")
    word_ends = np.searchsorted(starts, token_stops)
    for token in np.flatnonzero((token_starts >= 0) & ~tokens.special).tolist():
        for word in range(first_words[token], word_ends[token]):
            if stops[word] > token_starts[token]:
                pieces[word].append(token)
    return pieces


class _Words:
    """Hold the words of a text in the tokens of a chunk; words that share tokens are one unit.

    Args:
        pieces: The tokens of each word in the chunk.
        whole: The same in the whole text.
        n_tokens: How many tokens the chunk has.

    Attributes:
        unit_of_token: From 0; -1 = none. (token,)
        word_of_unit: The number of the word in the text; -1 = several words, or a part of one. (unit,)
        unit_of_word: The unit of each word that the tokens tell apart.
    """

    def __init__(self, pieces: list[list[int]], whole: list[list[int]], n_tokens: int) -> None:
        self.pieces = pieces
        # A word begins a unit if its first token is after all tokens of the words before it.
        present = [word for word, tokens in enumerate(pieces) if tokens]
        first = np.array([pieces[word][0] for word in present], np.int64)
        last = np.array([pieces[word][-1] for word in present], np.int64)
        last_before = np.concatenate([[-1], np.maximum.accumulate(last)[:-1]])
        units = np.cumsum(first > last_before) - 1
        # Number the tokens' units and name the word of each. (token,), (unit,)
        self.unit_of_token = np.full(n_tokens, -1, np.int64)
        words: list[int] = []
        for word, unit in zip(present, units.tolist(), strict=True):
            self.unit_of_token[pieces[word]] = unit
            is_cut = len(pieces[word]) < len(whole[word])
            if unit == len(words):  # the first word of its unit
                words.append(-1 if is_cut else word)
            else:
                words[unit] = -1
        self.word_of_unit = np.array(words, np.int64)
        self.unit_of_word = {word: unit for unit, word in enumerate(words) if word >= 0}


def _place_link(link: Link, looking: _Words, looked_at: _Words, causal: bool) -> PlacedLink | str:
    """Return a link in tokens, or the reason why it has none."""
    # Refuse words that share tokens with others.
    if any(word not in looking.unit_of_word for word in link.source):
        return UNALIGNED
    if any(word not in looked_at.unit_of_word for word in link.targets):
        return UNALIGNED
    # Drop the targets that a causal query cannot see, judged by its last token.
    tokens = sorted(token for word in link.source for token in looking.pieces[word])
    visible = tuple(word for word in link.targets if not causal or looked_at.pieces[word][0] <= tokens[-1])
    if not visible:
        return HIDDEN
    targets = tuple(looked_at.unit_of_word[word] for word in visible)
    return PlacedLink(replace(link, targets=visible), tuple(tokens), targets)
