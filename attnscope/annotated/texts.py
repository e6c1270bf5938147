"""Hold annotated texts: words, and links from a word to its targets. Formats, models and tokens are left to others."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from attnscope.corpus.lines import UnreadableError

Span = tuple[int, int]
"""First and last + 1 character in a text."""


@dataclass(frozen=True)
class Link:
    """Hold a word, or several that stand for one thing, and its targets; looking at any one target is right.

    Attributes:
        relation: The link's label, such as "nsubj→parent".
        source: Numbers of the words that look, ascending.
        targets: Numbers of the words that may be looked at, ascending; none of them is in `source`.
    """

    relation: str
    source: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class AnnotatedText:
    """Hold one text with its links.

    Attributes:
        text: The text.
        words: Its words by their start. Two words share characters only where an annotation says so, as in the two
            syntactic words of French "du".
        links: Its links, in the order of the annotation.
        source: The file's name; "stdin".
        line: The line it begins on, from 1.
        document: What it shares with other texts that are not independent of it, such as a file; None = it stands
            alone, as far as is known.
        target: What a decoder is to write as it reads the text, where links go from words of that to words of the
            text; None = they go from words of the text.
        target_words: The words of the target by their start.
        n_merged: How many further texts are in it that are equal: see `merge_equal`.
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

    def digested(self) -> bytes:
        """Return the bytes that hashes of texts are made of: a digest of text, words and links; no source or line."""
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
    """An annotation is malformed: the reason in one line, and the line from 1; None = not known."""


def merge_equal(texts: Iterable[AnnotatedText]) -> Iterator[AnnotatedText]:
    """Merge equal texts that follow each other into one with the links of all: a file may have a line for each link."""
    for _, group in groupby(texts, key=attrgetter("text", "words", "target")):
        first, *others = group
        if not others:
            yield first
            continue
        # A dict keeps the order of links, and each once.
        links = dict.fromkeys(first.links)
        for other in others:
            links |= dict.fromkeys(other.links)
        yield replace(first, links=tuple(links), n_merged=first.n_merged + len(others))
