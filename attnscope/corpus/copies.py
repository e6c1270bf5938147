"""Tell which texts of a corpus are copies of earlier ones while it is read, in bounded memory.

A copy is no evidence: twelve copies of a sentence say of a head what one says, and would make chance a certainty. Nor
are sixty sentences of one template: a few words differ, and a head's attention hardly.
"""

import hashlib
import itertools
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from attnscope.corpus.texts import CorpusText

MOST_EDITS = 4
"""How many words may be put in, left out or changed to make one text of a near-copy; and a quarter of them at most."""

FEWEST_WORDS = 8
"""Shorter texts are no near-copies of each other: "I like it" is the end of many sentences. They may share a frame."""

SHORTEST_FRAME = 4
"""Texts of this many words, up to FEWEST_WORDS - 1, share a frame if they differ in a third of their words at most,
each at the same place: "The dog saw the girl again." and "The cat saw the king again." """

REMEMBERED = 2**20
"""Digests of texts, pairs of words, and frames that are remembered; older ones give way."""

_MOST_PAIRS = 16
"""Pairs of neighbouring words by which a text is looked up, of all that it has."""

# A bullet, a quotation mark or a label before a text: "- ", "12. ", "User: ", "[3] ", "Example 7: ".
_LABEL = re.compile(r"(?:[^\w\s]+|\(?(?:\d{1,4}|\w)[.)]|\[?\w+(?: \w+)?[]:>|])\s+")

_NUMBER = re.compile(r"(?<!\w)\d+(?!\w)")


@dataclass(eq=False)
class _Kept:
    """Hold the words of a kept text, the digests it is looked up by, and those that it shares with a kept variant."""

    words: Sequence[str]
    features: set[bytes]
    shared: set[bytes] = field(default_factory=set)


class Copies:
    """Tell copies from texts that were not seen before.

    A text is a copy of an earlier one where both are the same apart from case, white space and a label before them
    ("12. ", "User: "). From its third text on, a template is a copy too: texts of FEWEST_WORDS or more that differ by
    MOST_EDITS words put in, left out or changed, and by a quarter of the words at most. So are shorter texts of one
    frame (SHORTEST_FRAME). Two such texts count apart: pairs are made to differ in a word (WinoBias, BLiMP). Texts of
    token numbers are copies where all numbers are the same.

    Long texts are compared where they have two pairs of neighbouring words in common, of those that are drawn by hash.

    Attributes:
        n: How many texts were copies.
    """

    def __init__(self) -> None:
        self.n = 0
        # Each remembered digest, of a text, a pair of words or a frame, with the latest text that has it.
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()

    def holds(self, text: CorpusText) -> bool:
        """Return whether a text is a copy of one that was asked for before; from now on it is known itself."""
        # Exact copies have the same digest.
        key = copy_key(text)
        digest = hashlib.blake2b(key, digest_size=16).digest()
        if digest in self._kept:
            self.n += 1
            return True
        # Others are the third text, at least, of a template: they have a digest that two variants share.
        words = key.decode("utf-8", "surrogatepass").split() if text.ids is None else []
        new = _describe(words)
        variants = []
        for earlier in {self._kept[feature] for feature in new.features & self._kept.keys()}:
            if not _are_variants(earlier, new):
                continue
            if earlier.shared & new.features:
                self.n += 1
                return True
            variants.append(earlier)
        # Remember it.
        for variant in variants:
            common = variant.features & new.features
            variant.shared |= common
            new.shared |= common
        for feature in (digest, *new.features):
            self._kept[feature] = new
            self._kept.move_to_end(feature)
        while len(self._kept) > REMEMBERED:
            self._kept.popitem(last=False)
        return False


def _describe(words: Sequence[str]) -> _Kept:
    """Return a text with the digests by which others of its template are found."""
    if len(words) < SHORTEST_FRAME:
        return _Kept(words, set())
    # Lines of a log differ in many numbers, and are one template: all numbers are alike, if enough words are none.
    n_with_letters = sum(any(map(str.isalpha, word)) for word in words)
    if n_with_letters >= SHORTEST_FRAME:
        words = [_NUMBER.sub("0", word) for word in words]
    # Of a long text keep the smallest digests: similar texts then keep the same pairs.
    if len(words) >= FEWEST_WORDS:
        pairs = {_digest(f"{first} {second}") for first, second in itertools.pairwise(words)}
        return _Kept(words, set(sorted(pairs)[:_MOST_PAIRS]))
    # A frame is a short text with spaces in the place of a third of its words; no word is a space.
    frames = set()
    for blanks in itertools.combinations(range(len(words)), len(words) // 3):
        frame = list(words)
        for blank in blanks:
            frame[blank] = " "
        frames.add(_digest(" ".join(frame)))
    return _Kept(words, frames)


def _digest(words: str) -> bytes:
    """Return a short digest of words, by which a text is looked up."""
    return hashlib.blake2b(words.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _are_variants(first: _Kept, second: _Kept) -> bool:
    """Return whether two texts that have a digest in common are of one template."""
    n_words = len(second.words)
    if n_words < FEWEST_WORDS:
        return True
    most = min(MOST_EDITS, n_words // 4)
    if len(first.features & second.features) < 2 or abs(len(first.words) - n_words) > most:
        return False
    # Replaced, inserted and deleted words, from one text to the other.
    steps = SequenceMatcher(None, first.words, second.words, autojunk=False).get_opcodes()
    n_edits = 0
    for kind, first_start, first_end, second_start, second_end in steps:
        if kind != "equal":
            n_edits += max(first_end - first_start, second_end - second_start)
    return n_edits <= most


def copy_key(text: CorpusText) -> bytes:
    """Return bytes that are the same for copies that differ in case, white space or a label before them."""
    if text.ids is not None:
        return text.digested()
    return fold(text.written).encode("utf-8", "surrogatepass")


def distinct(texts: Iterable[CorpusText], copies: Copies) -> Iterator[CorpusText]:
    """Return the texts without copies of earlier ones; they keep their numbers.

    `texts` are the whole corpus; `copies`, which has seen no text yet, counts them.
    """
    return (text for text in texts if not copies.holds(text))


def fold(text: str) -> str:
    """Return a text in lower case, with single spaces, and without a label before it."""
    folded = " ".join(text.casefold().split())
    label = _LABEL.match(folded)
    if label is None:
        return folded
    # Before a word or two it may be a part of the text.
    unlabelled = folded[label.end() :]
    return unlabelled if unlabelled.count(" ") >= 2 else folded
