"""Leave out copies of earlier texts while a corpus is read, in bounded memory.

A copy is no new evidence: with twelve copies of a sentence, whatever a head does there by chance would seem certain.
The same holds for sixty texts of one *template*, which differ in a few words: a head attends almost alike in all. Texts
of one template are called *variants* here. Two of them count, for pairs are made to differ in a word (WinoBias, BLiMP).
From the third on a variant is left out like a copy.
"""

import hashlib
import itertools
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from attnscope.corpus.texts import CorpusText

MAX_EDITS = 4
"""The most words put in, left out or changed between two variants; at most a quarter of the words, too."""

MIN_WORDS = 8
"""The fewest words of variants that MAX_EDITS decides about. Shorter texts need the same frame, as "I like it" is the
end of many sentences."""

SHORTEST_FRAME = 4
"""The fewest words of a text with frames. A *frame* is a text of fewer than MIN_WORDS in which a third of the words
are left blank. Variants have one in common: "The dog saw the girl again." and "The cat saw the king again." """

REMEMBERED = 2**20
"""The most digests (of texts, pairs of words, and frames) that are remembered; the oldest are forgotten first."""

_MAX_PAIRS = 16
"""The most pairs of neighbouring words by which a long text is looked up."""

# What may stand before a text, such as "- ", "12. ", "User: ", "[3] ", "Example 7: ".
_LABEL = re.compile(r"(?:[^\w\s]+|\(?(?:\d{1,4}|\w)[.)]|\[?\w+(?: \w+)?[]:>|])\s+")

_NUMBER = re.compile(r"(?<!\w)\d+(?!\w)")


@dataclass(eq=False)
class _Kept:
    """Hold a text that was kept.

    Attributes:
        words: Its words.
        features: The digests by which it is looked up: of pairs of neighbouring words, or of frames.
        shared: Those of them that a kept variant of it has, too.
    """

    words: Sequence[str]
    features: set[bytes]
    shared: set[bytes] = field(default_factory=set)


class CopyFilter:
    """Tell copies, and variants from the third on, from texts that are to be kept.

    A text is a copy of an earlier one if they differ only in case, white space or a label before them ("12. ",
    "User: "). Two texts of MIN_WORDS or more are variants if they differ in at most MAX_EDITS words, and at most a
    quarter of them; shorter ones if they have a frame in common. Texts that came as token ids are copies if all ids are
    equal, and never variants.

    Two long texts are compared only if they have two features in common.

    Attributes:
        n: How many texts were not kept.
    """

    def __init__(self) -> None:
        self.n = 0
        # The latest kept text of each digest: of a whole text, or of a feature. The oldest digest comes first.
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()

    def register(self, text: CorpusText) -> bool:
        """Return whether a text is to be kept; then remember it. Otherwise count it in `n`."""
        # An exact copy has the digest of a kept text.
        digest = hashlib.blake2b(copy_key(text), digest_size=16).digest()
        if digest in self._kept:
            self.n += 1
            return False
        # A third variant has a feature that two kept variants share.
        new = _with_features(fold(text.full_text).split())
        candidates = {self._kept[feature] for feature in new.features if feature in self._kept}
        variants = [kept for kept in candidates if _are_variants(kept, new)]
        if any(variant.shared & new.features for variant in variants):
            self.n += 1
            return False
        # Remember the text, and what it shares with each variant.
        for variant in variants:
            common = variant.features & new.features
            variant.shared |= common
            new.shared |= common
        for key in (digest, *new.features):
            self._kept[key] = new
            self._kept.move_to_end(key)
        while len(self._kept) > REMEMBERED:
            self._kept.popitem(last=False)
        return True


def _with_features(words: Sequence[str]) -> _Kept:
    """Return a text of these words with the digests by which its variants are found."""
    if len(words) < SHORTEST_FRAME:
        return _Kept(words, set())
    # Lines of a log differ in many numbers and are variants, so write 0 for each, unless a text has little else.
    lettered = [word for word in words if any(map(str.isalpha, word))]
    if len(lettered) >= SHORTEST_FRAME:
        words = [_NUMBER.sub("0", word) for word in words]
    # A long text has the smallest digests of its pairs: variants then mostly have the same ones.
    if len(words) >= MIN_WORDS:
        pairs = {_digest(f"{first} {second}") for first, second in itertools.pairwise(words)}
        return _Kept(words, set(sorted(pairs)[:_MAX_PAIRS]))
    # A short text has all its frames; a space marks a blank, as no word is a space.
    frames = set()
    for blanks in itertools.combinations(range(len(words)), len(words) // 3):
        frame = list(words)
        for blank in blanks:
            frame[blank] = " "
        frames.add(_digest(" ".join(frame)))
    return _Kept(words, frames)


def _digest(words: str) -> bytes:
    """Return a digest of 8 bytes of some words."""
    return hashlib.blake2b(words.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _are_variants(first: _Kept, second: _Kept) -> bool:
    """Return whether two texts with a feature in common are variants."""
    n_words = len(second.words)
    # Short texts have a frame in common, which is enough.
    if n_words < MIN_WORDS:
        return True
    max_edits = min(MAX_EDITS, n_words // 4)
    if len(first.features & second.features) < 2 or abs(len(first.words) - n_words) > max_edits:
        return False
    # Count the words that are replaced, inserted or deleted.
    steps = SequenceMatcher(None, first.words, second.words, autojunk=False).get_opcodes()
    n_edits = 0
    for step, first_start, first_end, second_start, second_end in steps:
        if step != "equal":
            n_edits += max(first_end - first_start, second_end - second_start)
    return n_edits <= max_edits


def copy_key(text: CorpusText) -> bytes:
    """Return bytes that are equal for a text and its copies in other case, white space or with a label before them."""
    if text.ids is not None:
        return text.bytes_to_hash()
    return fold(text.full_text).encode("utf-8", "surrogatepass")


def distinct(texts: Iterable[CorpusText], copies: CopyFilter) -> Iterator[CorpusText]:
    """Return the texts of a corpus that are to be kept; `copies`, which must be new, counts the others."""
    return filter(copies.register, texts)


def fold(text: str) -> str:
    """Return a text in lower case, with single spaces, and without a label before it."""
    folded = " ".join(text.casefold().split())
    label = _LABEL.match(folded)
    if label is None:
        return folded
    # Before fewer than three words it may be part of the text, as in "1: 2".
    unlabelled = folded[label.end() :]
    return unlabelled if unlabelled.count(" ") >= 2 else folded
