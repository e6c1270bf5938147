"""Define annotated texts: their words, and links from a word to the words that it should attend to.

File formats, models and tokens are left to others.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from attnscope.corpus.lines import UnreadableError

Span = tuple[int, int]
"""(start, stop) of some characters of a text, as in text[start:stop]."""


@dataclass(frozen=True)
class Link:
    """Relate a word, or several that stand for one thing, to its targets.

    A head follows the link if the source attends most to any one of the targets.

    Attributes:
        relation: The link's label, such as "nsubj→parent".
        source: The words that attend, as indices into the text's (or its target's) words, ascending.
        targets: The words to attend to, as indices into the text's words, ascending; none of them is in `source`.
    """

    relation: str
    source: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class AnnotatedText:
    """Hold one text with its links.

    Attributes:
        text: The text.
        words: Where its words are, ordered by start. Two words share characters only where an annotation says so, as
            for the two syntactic words of French "du".
        links: Its links, in the order of the annotation.
        source: The file's name; "stdin".
        line: The line it begins on, from 1.
        document: The name of the document that it is part of. Texts of one document are not independent. None = as far
            as is known, it is independent of all others.
        target: The text that a decoder writes while it reads `text`, such as a translation. Links then go from words
            of the target to words of the text. None = both ends are in the text.
        target_words: Where the target's words are, ordered by start.
        n_merged: How many other texts, equal to this one, `merge_equal` has merged into it.
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
        """Return a digest of text, words and links, without source and line, for hashes and to find copies."""
        links = [(link.relation, link.source, link.targets) for link in self.links]
        content: tuple[object, ...] = (self.text, self.words, links)
        if self.target is not None:
            content += (self.target, self.target_words)
        return hashlib.sha256(repr(content).encode("utf-8", "surrogatepass")).digest()

    def word(self, number: int) -> str:
        """Return the characters of a word."""
        start, stop = self.words[number]
        return self.text[start:stop]


class AnnotationError(UnreadableError):
    """Say why an annotation is malformed, in one line, and in which line, from 1; None = not known."""


def merge_equal(texts: Iterable[AnnotatedText]) -> Iterator[AnnotatedText]:
    """Merge equal texts that follow each other into one with the links of all: a file may have a line for each link."""
    for _, group in groupby(texts, key=attrgetter("text", "words", "target", "target_words")):
        first, *others = group
        if not others:
            yield first
            continue
        # A dict keeps each link once, in order.
        links = dict.fromkeys(first.links)
        for other in others:
            links |= dict.fromkeys(other.links)
        yield replace(first, links=tuple(links), n_merged=first.n_merged + len(others))
