"""Align annotated words with a model's tokens, by the characters that both cover, and translate links into tokens.

A link says to which words (its targets) a word (its source) should attend. Tokens may be longer than words: if one
token covers characters of two words, as "don" does of "do" and "n't", attention cannot tell the two words apart. Words
that share a token form one *unit*; every other word is a unit by itself. Links from or to a word that shares a token
are left out. Its unit still counts as one of the candidates that a head could attend to.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from attnscope.annotated.texts import AnnotatedText, Link, Span
from attnscope.corpus import Chunk
from attnscope.results.tokens import Tokens

# The reasons why a link is left out.
UNALIGNED = "words that the tokens do not tell apart"
OUTSIDE = "source and target in different chunks"
HIDDEN = "targets that causality hides"


@dataclass(frozen=True)
class AlignedLink:
    """Hold a link between words as a link between tokens of one chunk.

    Attributes:
        link: The link between words, with the targets that a causal mask leaves visible.
        tokens: The queries: the indices of the source's tokens in the chunk, ascending.
        targets: The units of the targets (see `AlignedChunk.unit_of_token`): the queries should attend to their tokens.
    """

    link: Link
    tokens: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class AlignedChunk:
    """Hold a chunk of an annotated text, and the links whose words all lie in the chunk.

    Attributes:
        chunk: The chunk: some of the text's tokens.
        unit_of_token: The number of each token's unit, (token,); the chunk's first unit is 0. -1 = part of no word.
        links: The links between tokens of the chunk.
        target: For cross-attention, the tokens that the decoder reads; they are then the queries. None = the queries
            are tokens of the chunk.
    """

    chunk: Chunk
    unit_of_token: NDArray[np.int64]
    links: tuple[AlignedLink, ...]
    target: Tokens | None = None


def align_links(
    text: AnnotatedText,
    chunks: Sequence[Chunk],
    tokens: Tokens,
    *,
    causal: bool = False,
    target: Tokens | None = None,
) -> tuple[list[AlignedChunk], Counter[tuple[str, str]]]:
    """Translate the links of a text into links between tokens, each in the first chunk that holds all of its words.

    Args:
        text: The text.
        chunks: Its chunks; a text with a target has one.
        tokens: The tokens of the whole text.
        causal: Whether the mask is causal: targets after the source are then left out.
        target: The tokens of `text.target` (such as a translation), as the decoder reads them. Links then go from words
            of `text.target` to words of the text. None = both ends of a link are in the text.

    Returns:
        The chunks that hold links, and how many links are left out: {(relation, reason): count}.
    """
    text_units = WordUnits(text.words, tokens)
    # The queries of cross-attention are tokens of the text's target.
    decoder_units = None if target is None else WordUnits(text.target_words, target)
    # The links that no chunk holds yet, by index in `text.links`, and why the chunks so far do not hold them.
    unaligned_links = dict(enumerate(text.links))
    reason_by_index = dict.fromkeys(unaligned_links, OUTSIDE)
    aligned_chunks: list[AlignedChunk] = []
    for chunk in chunks:
        units = WordUnits(text.words, chunk.tokens, text_units.tokens_of_word)
        links = []
        # A list, because the loop deletes from the dict.
        for index, link in list(unaligned_links.items()):
            link_or_reason = _align_link(link, decoder_units or units, units, causal)
            if isinstance(link_or_reason, AlignedLink):
                links.append(link_or_reason)
                del unaligned_links[index]
                continue
            # If the chunk lacks a word of the link, the reason stays OUTSIDE: another chunk may hold that word. With a
            # target there is one chunk, and the link's source is not in it.
            has_tokens = [len(units.tokens_of_word[word]) > 0 for word in (*link.source, *link.targets)]
            if len(chunks) == 1 or all(has_tokens):
                reason_by_index[index] = link_or_reason
        if links:
            aligned_chunks.append(AlignedChunk(chunk, units.unit_of_token, tuple(links), target))
    n_left_out = Counter(
        (link.relation, reason_by_index[index]) for index, link in unaligned_links.items()
    )
    return aligned_chunks, n_left_out


class WordUnits:
    """Find the tokens of each word of a text or chunk, and the units: words that share a token are one unit.

    Args:
        words: The (start, stop) of each word in the characters of the text, ordered by start.
        tokens: The tokens of the text or chunk.
        tokens_of_word_in_text: For a chunk, `tokens_of_word` of the whole text. It shows which words the chunk cuts.

    Attributes:
        tokens_of_word: For each word, the indices of the tokens that share characters with it, ascending, without
            special tokens; empty = the word is not in the chunk.
        unit_of_token: The number of each token's unit, (token,), from 0; -1 = part of no word.
        unit_of_word: Word -> unit, only for words that share no token with another word and that the chunk does not
            cut.
    """

    def __init__(
        self,
        words: Sequence[Span],
        tokens: Tokens,
        tokens_of_word_in_text: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.tokens_of_word = _tokens_of_words(words, tokens)
        self.unit_of_token = np.full(len(tokens), -1, np.int64)
        # A word begins a unit if its first token comes after all tokens of the earlier words.
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
        # Leave out words that share a token, and words with fewer tokens here than in the text: the chunk cuts them.
        all_tokens_of_word = tokens_of_word_in_text or self.tokens_of_word
        self.unit_of_word = {}
        for unit, (word, *other_words) in enumerate(words_of_units):
            if not other_words and len(self.tokens_of_word[word]) == len(all_tokens_of_word[word]):
                self.unit_of_word[word] = unit


def _tokens_of_words(words: Sequence[Span], tokens: Tokens) -> list[list[int]]:
    """Return, for each word, the ascending indices of the tokens that share characters with it; no special tokens."""
    # Tokens that stand for no characters have the offsets (-1, -1).
    text_tokens = np.flatnonzero((tokens.offsets[:, 0] >= 0) & ~tokens.special)
    # The (start, stop) characters of tokens and words, as two arrays each: (token,) and (word,).
    token_starts, token_stops = tokens.offsets[text_tokens].T
    word_starts, word_stops = np.array(words, np.int64).reshape(-1, 2).T
    # A word has the tokens from the first that ends after the word's start to the last that starts before its stop.
    first_indices = np.searchsorted(token_stops, word_starts, side="right")
    stop_indices = np.searchsorted(token_starts, word_stops)
    return [
        text_tokens[first:stop].tolist() for first, stop in zip(first_indices, stop_indices, strict=True)
    ]


def _align_link(
    link: Link,
    source_units: WordUnits,
    target_units: WordUnits,
    causal: bool,
) -> AlignedLink | str:
    """Return a link between words as a link between tokens of a chunk, or the reason why the chunk cannot hold it."""
    # `unit_of_word` has only the words that can be aligned.
    if (
        set(link.source) - source_units.unit_of_word.keys()
        or set(link.targets) - target_units.unit_of_word.keys()
    ):
        return UNALIGNED
    source_tokens: list[int] = []
    for word in link.source:
        source_tokens += source_units.tokens_of_word[word]
    # A causal mask hides a target that begins after the last token of the source.
    visible_words = list(link.targets)
    if causal:
        last_token = max(source_tokens)
        visible_words = [
            word for word in visible_words if target_units.tokens_of_word[word][0] <= last_token
        ]
    if not visible_words:
        return HIDDEN
    visible_units = tuple(target_units.unit_of_word[word] for word in visible_words)
    return AlignedLink(
        replace(link, targets=tuple(visible_words)), tuple(sorted(source_tokens)), visible_units
    )
