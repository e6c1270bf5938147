"""Tell which texts of a corpus are copies of earlier ones while it is read, in bounded memory.

A copy is no evidence: twelve copies of a sentence say of a head what one says, and would make chance a certainty. Nor
are sixty sentences of one template: a few words differ, and a head's attention hardly.
"""

import hashlib
import itertools
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from attnscope.corpus.texts import CorpusText

MOST_EDITS = 4
"""How many words may be put in, left out or changed to make one text of a near-copy; and a quarter of them at most."""

FEWEST_WORDS = 8
"""Shorter texts are no near-copies of each other: "I like it" is the end of many sentences. They may share a frame."""

SHORTEST_FRAME = 4
"""Texts of this many words, up to FEWEST_WORDS - 1, share a frame if they differ in a third of their words at most,
each at the same place: "The dog saw the girl again." and "The cat saw the king again." """

REMEMBERED = 2**18
"""Digests of texts, pairs of words, and frames that are remembered, of each at least so many; older ones give way."""

_KEPT_PAIRS = 8
"""Pairs of neighbouring words by which a text is looked up, of all that it has."""

# A bullet, a quotation mark or a label before a text: "- ", "12. ", "User: ", "[3] ", "Example 7: ".
_LABEL = re.compile(r"(?:[^\w\s]+|\(?(?:\d{1,4}|\w)[.)]|\[?\w+(?: \w+)?[]:>|])\s+")

_NUMBER = re.compile(r"(?<!\w)\d+(?!\w)")

V = TypeVar("V")


class Copies:
    """Tell copies from texts that were not seen before.

    A text is a copy of an earlier one where both are the same apart from case, white space and a label before them
    ("12. ", "User: "). From its third text on, a template is a copy too: texts of FEWEST_WORDS or more that differ by
    MOST_EDITS words put in, left out or changed (Levenshtein's distance over words), and by a quarter of the words at
    most. So are shorter texts of one frame (SHORTEST_FRAME). Two such texts count apart: pairs are made to differ in a
    word (WinoBias, BLiMP). Texts of token numbers are copies where all numbers are the same.

    Near-copies are looked for among texts that have two pairs of neighbouring words in common with what is kept of an
    earlier one: _KEPT_PAIRS of its pairs, drawn by hash.

    Attributes:
        n: How many texts were copies.
    """

    def __init__(self) -> None:
        self.n = 0
        self._seen = _Recent[bool]()
        self._texts = _Recent["_Known"]()
        self._frames = _Recent[int]()

    def holds(self, text: CorpusText) -> bool:
        """Return whether a text is a copy of one that was asked for before; from now on it is known itself."""
        # Exact copies, then near-copies of long texts and shared frames of short ones.
        key = essence(text)
        digest = hashlib.blake2b(key, digest_size=16).digest()
        words = [] if text.ids is not None else key.decode("utf-8", "surrogatepass").split()
        # Lines of a log differ in many numbers, and are one template: all numbers are alike.
        if sum(any(map(str.isalpha, word)) for word in words) >= SHORTEST_FRAME:
            words = [_NUMBER.sub("0", word) for word in words]
        is_copy = self._seen.get(digest) is not None
        if not is_copy and len(words) >= FEWEST_WORDS:
            is_copy = self._is_near(words)
        elif not is_copy and len(words) >= SHORTEST_FRAME:
            is_copy = self._is_framed(words)
        if not is_copy:
            self._seen.put(digest, True)
        self.n += is_copy
        return is_copy

    def _is_framed(self, words: Sequence[str]) -> bool:
        """Return whether two earlier texts share a frame (a text without a third of its words); if not, note it."""
        frames = []
        # Blank out each choice of words. No word is a space, so a blank is none.
        for blanks in itertools.combinations(range(len(words)), len(words) // 3):
            remaining = [" " if place in blanks else word for place, word in enumerate(words)]
            frames.append(hash(tuple(remaining)))
        counts = [self._frames.get(frame) or 0 for frame in frames]
        if max(counts) >= 2:
            return True
        for frame, count in zip(frames, counts, strict=True):
            self._frames.put(frame, count + 1)
        return False

    def _is_near(self, words: list[str]) -> bool:
        """Return whether it is the third text of a template; if not, note it."""
        # Hash the pairs of neighbouring words, and look up the texts that have them.
        pairs = {
            zlib.crc32(f"{first} {second}".encode("utf-8", "surrogatepass"))
            for first, second in itertools.pairwise(words)
        }
        earlier = [known for pair in pairs if (known := self._texts.get(pair)) is not None]
        # Compare with the texts that share two pairs or more.
        variants = []
        for known, n_pairs in Counter(earlier).items():
            if n_pairs < 2:
                continue
            is_near = _differ_by(known.words, words, min(MOST_EDITS, min(len(known.words), len(words)) // 4))
            if is_near and known.has_variant:
                return True
            if is_near:
                variants.append(known)
        for known in variants:
            known.has_variant = True
        # Keep the smallest hashes: similar texts then keep the same pairs.
        new = _Known(words, bool(variants))
        for pair in sorted(pairs)[:_KEPT_PAIRS]:
            self._texts.put(pair, new)
        return False


def essence(text: CorpusText) -> bytes:
    """Return what copies share that differ in case, white space and a label before them: what lots are drawn by."""
    return text.digested() if text.ids is not None else fold(text.written).encode("utf-8", "surrogatepass")


def distinct(texts: Iterable[CorpusText], copies: Copies) -> Iterator[CorpusText]:
    """Return the texts without copies of earlier ones; they keep their numbers.

    `texts` are the whole corpus; `copies`, which has seen no text yet, counts them.
    """
    return (text for text in texts if not copies.holds(text))


def fold(text: str) -> str:
    """Return a text in lower case, with single spaces, and without a label before it."""
    folded = " ".join(text.casefold().split())
    label = _LABEL.match(folded)
    # Not all of a text that is a label and a word or two.
    return folded[label.end() :] if label and folded.count(" ", label.end()) >= 2 else folded


class _Recent(Generic[V]):
    """Values by their keys, of at least the last REMEMBERED keys and of at most twice as many."""

    def __init__(self) -> None:
        self._new: dict[bytes | int, V] = {}
        self._old: dict[bytes | int, V] = {}

    def get(self, key: bytes | int) -> V | None:
        """Return the value of a key; None if it is not known, or not any more."""
        return self._new.get(key, self._old.get(key))

    def put(self, key: bytes | int, value: V) -> None:
        """Remember a value."""
        self._new[key] = value
        if len(self._new) >= REMEMBERED:
            self._old = self._new
            self._new = {}


class _Known:
    """Hold a text that was kept, and whether another text of its template was."""

    def __init__(self, words: list[str], has_variant: bool) -> None:
        self.words = words
        self.has_variant = has_variant


def _differ_by(first: Sequence[str], second: Sequence[str], most: int) -> bool:
    """Return whether Levenshtein's distance is at most so much; only what is near the diagonal is looked at."""
    if abs(len(first) - len(second)) > most:
        return False
    # Fill the band of the table of distances row by row, and stop when a row exceeds the limit.
    row = {column: column for column in range(most + 1)}
    for i, item in enumerate(first, 1):
        above = row
        row = {}
        for j in range(max(0, i - most), min(len(second), i + most) + 1):
            left = row.get(j - 1, most)
            up = above.get(j, most)
            corner = above.get(j - 1, most) if j else most + 1
            row[j] = min(left + 1, up + 1, corner + (j > 0 and second[j - 1] != item))
        if min(row.values()) > most:
            return False
    return row.get(len(second), most + 1) <= most
