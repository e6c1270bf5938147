"""Find the tokens of each annotated word by the characters that both cover, and place links in them.

A link says to which words a word should attend. Tokens may be longer than words: if one token covers characters of two
words, as "don" does of "do" and "n't", attention cannot tell the two apart. Such words form one *unit*. They are
neither sources nor targets, so their links are left out; but a unit still counts as one of the candidates that a head
could attend to. All other words are units of their own.
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
"""The reasons why a link is left out."""


@dataclass(frozen=True)
class PlacedLink:
    """Hold a link in the tokens of a chunk.

    Attributes:
        link: The link, with the targets that a causal mask leaves visible.
        tokens: The tokens of its source, by index, ascending: the queries.
        targets: The units of its targets: those that the queries should attend to.
    """

    link: Link
    tokens: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PlacedChunk:
    """Hold a chunk of an annotated text, and the links of which it has all words.

    Attributes:
        chunk: The chunk: some of the text's tokens.
        unit_of_token: The unit of each token, (token,), from 0 in a chunk; -1 = part of no word.
        links: The links, in tokens and units of the chunk.
        target: For an encoder-decoder, the tokens that the decoder reads: then they are the queries. Else None.
    """

    chunk: Chunk
    unit_of_token: NDArray[np.int64]
    links: tuple[PlacedLink, ...]
    target: Tokens | None = None


def place_links(
    text: AnnotatedText,
    chunks: Sequence[Chunk],
    tokens: Tokens,
    *,
    causal: bool = False,
    target: Tokens | None = None,
) -> tuple[list[PlacedChunk], Counter[tuple[str, str]]]:
    """Place the links of a text in the tokens of its chunks: each in the first chunk that holds all of its words.

    Args:
        text: The text.
        chunks: Its chunks; a text with a target has one.
        tokens: The tokens of the whole text.
        causal: Whether the mask is causal: targets after the source are then left out.
        target: The tokens of the text's target, as the decoder reads them; links then go from its words.

    Returns:
        The chunks that hold links, and how many links are left out, by relation and reason.
    """
    whole_text = WordUnits(text.words, tokens)
    target_units = None if target is None else WordUnits(text.target_words, target)
    # The links that no chunk holds yet, by index.
    waiting = dict(enumerate(text.links))
    reasons = dict.fromkeys(waiting, OUTSIDE)
    placed_chunks: list[PlacedChunk] = []
    for chunk in chunks:
        units = WordUnits(text.words, chunk.tokens, whole_text.tokens_of_word)
        links = []
        for index, link in list(waiting.items()):
            link_or_reason = _place_link(link, target_units or units, units, causal)
            if isinstance(link_or_reason, PlacedLink):
                links.append(link_or_reason)
                del waiting[index]
                continue
            # While a chunk lacks words of the link, the reason is that they are in different chunks.
            has_words = [len(units.tokens_of_word[word]) > 0 for word in (*link.source, *link.targets)]
            if len(chunks) == 1 or all(has_words):
                reasons[index] = link_or_reason
        if links:
            placed_chunks.append(PlacedChunk(chunk, units.unit_of_token, tuple(links), target))
    left_out = Counter((link.relation, reasons[index]) for index, link in waiting.items())
    return placed_chunks, left_out


class WordUnits:
    """Find the tokens of each word of a text or chunk, and the units: words that share tokens are one.

    Args:
        words: Where the words are in the text, ordered by start.
        tokens: The tokens of the text or chunk.
        tokens_of_word_in_text: `tokens_of_word` of the whole text, if `tokens` are those of a chunk.

    Attributes:
        tokens_of_word: The tokens that share characters with each word, by index, ascending; no special tokens.
        unit_of_token: The unit of each token, (token,), from 0; -1 = part of no word.
        unit_of_word: Word -> unit, of each word that is whole and shares no token with another.
    """

    def __init__(
        self,
        words: Sequence[Span],
        tokens: Tokens,
        tokens_of_word_in_text: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.tokens_of_word = _tokens_of_words(words, tokens)
        self.unit_of_token = np.full(len(tokens), -1, np.int64)
        # A word begins a unit if its first token is after all tokens of the words before it.
        words_of_units: list[list[int]] = []
        last_token = -1
        for word, word_tokens in enumerate(self.tokens_of_word):
            if not word_tokens:
                continue
            if word_tokens[0] > last_token:
                words_of_units.append([])
            words_of_units[-1].append(word)
            self.unit_of_token[word_tokens] = len(words_of_units) - 1
            last_token = max(last_token, word_tokens[-1])
        # Leave out words that share tokens, and those that the end of a chunk cuts.
        whole_words = tokens_of_word_in_text or self.tokens_of_word
        self.unit_of_word = {}
        for unit, (word, *others) in enumerate(words_of_units):
            if not others and len(self.tokens_of_word[word]) == len(whole_words[word]):
                self.unit_of_word[word] = unit


def _tokens_of_words(words: Sequence[Span], tokens: Tokens) -> list[list[int]]:
    """Return the indices of the tokens that share characters with each word, ascending; special tokens are skipped."""
    ordinary = np.flatnonzero((tokens.offsets[:, 0] >= 0) & ~tokens.special)
    token_starts, token_stops = tokens.offsets[ordinary].T
    word_starts, word_stops = np.array(words, np.int64).reshape(-1, 2).T
    # From the first token that ends after the word's start to the last that starts before its end.
    firsts = np.searchsorted(token_stops, word_starts, side="right")
    stops = np.searchsorted(token_starts, word_stops)
    return [ordinary[first:stop].tolist() for first, stop in zip(firsts, stops, strict=True)]


def _place_link(
    link: Link,
    sources: WordUnits,
    targets: WordUnits,
    causal: bool,
) -> PlacedLink | str:
    """Return a link in the tokens of a chunk, or the reason why it cannot be there."""
    if set(link.source) - sources.unit_of_word.keys() or set(link.targets) - targets.unit_of_word.keys():
        return UNALIGNED
    tokens: list[int] = []
    for word in link.source:
        tokens += sources.tokens_of_word[word]
    # Drop targets that a causal mask hides even from the last token of the source.
    visible = list(link.targets)
    if causal:
        visible = [word for word in visible if targets.tokens_of_word[word][0] <= max(tokens)]
    if not visible:
        return HIDDEN
    units = tuple(targets.unit_of_word[word] for word in visible)
    return PlacedLink(replace(link, targets=tuple(visible)), tuple(sorted(tokens)), units)
