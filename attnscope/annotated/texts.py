"""Define annotated texts: their words, and links from a word to the words that it should attend to.

This module knows neither file formats, nor models, nor tokens: a text is a string, and a word a span of characters.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from attnscope.corpus.lines import UnreadableError

Span = tuple[int, int]
"""The characters text[start:stop] of a text, as (start, stop)."""


@dataclass(frozen=True)
class Link:
    """Relate a word, or several words that stand for one thing, to its targets.

    A head follows the link if the source attends most to any one of the targets.

    Attributes:
        relation: The link's label, such as "nsubj→parent".
        source: The words that attend: ascending indices into `AnnotatedText.words`; in a text with a target, into
            `AnnotatedText.target_words`.
        targets: The words to attend to: ascending indices into `AnnotatedText.words`. No word is both a source and a
            target of one link.
    """

    relation: str
    source: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class AnnotatedText:
    """Hold one text with its links.

    Attributes:
        text: The text.
        words: The span of each word, ordered by start. Two words share characters only where an annotation says so, as
            for the two syntactic words of French "du".
        links: Its links, in the order of the annotation.
        source: The name of the file; "stdin" for standard input.
        line: The number of the line that it begins on, from 1.
        document: The name of the document that it is part of. Texts of one document are not independent of each other.
            None = as far as is known, the text is independent of all others.
        target: The text that a decoder writes while its encoder reads `text`, such as a translation. Links then go from
            words of the target to words of the text. None = both ends of a link are in the text.
        target_words: The span of each word in the target, ordered by start.
        n_merged: How many later texts with the same words `merge_equal_texts` has merged into this text.
    """

    text: str
    words: tuple[Span, ...]
    links: tuple[Link, ...]
    source: str
    line: int
    document: str | None = None
    target: str | None = None
    target_words: tuple[Span, ...] = ()
    n_merged: int = 0

    def bytes_to_hash(self) -> bytes:
        """Return a digest of text, words and links. Texts that differ only in source, line or document share it."""
        links = [(link.relation, link.source, link.targets) for link in self.links]
        content: tuple[object, ...] = (self.text, self.words, links)
        if self.target is not None:
            content += (self.target, self.target_words)
        return hashlib.sha256(repr(content).encode("utf-8", "surrogatepass")).digest()

    def word(self, index: int) -> str:
        """Return the characters of the word with this index in `words`."""
        start, stop = self.words[index]
        return self.text[start:stop]


class AnnotationError(UnreadableError):
    """Say in one line why an annotation is malformed, and on which line of the file, if known: see the base class."""


def merge_equal_texts(texts: Iterable[AnnotatedText]) -> Iterator[AnnotatedText]:
    """Merge equal texts that follow each other into one text with all their links.

    Some files repeat a text in several lines, one for each link.
    """
    for _, group in groupby(texts, key=attrgetter("text", "words", "target", "target_words")):
        first_text, *other_texts = group
        if not other_texts:
            yield first_text
            continue
        # A dict keeps each link once, in order.
        links = dict.fromkeys(first_text.links)
        for text in other_texts:
            links |= dict.fromkeys(text.links)
        yield replace(first_text, links=tuple(links), n_merged=first_text.n_merged + len(other_texts))
