"""Leave out copies of earlier texts while a corpus is read, in bounded memory.

A copy is no new evidence: with twelve copies of a sentence, anything that a head does there by chance would seem
certain. The same holds for sixty texts of one *template*, which differ in a few words: a head attends almost equally in
all of them. Texts of one template are called *variants* here. Two variants are kept, because data sets such as WinoBias
and BLiMP have pairs of texts that differ in a word. A third variant is left out, like a copy.
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
"""The most words inserted, deleted or replaced between two variants. A quarter of the words is also a limit."""

MIN_WORDS = 8
"""The fewest words of a text that is compared by MAX_EDITS. Shorter texts are variants only if they have a frame in
common, because few edits turn one short text into another."""

MIN_FRAME_WORDS = 4
"""The fewest words of a text with frames. A *frame* is a text of fewer than MIN_WORDS words with a third of its words
left blank. "The dog saw the girl again." and "The cat saw the king again." have the frame "The _ saw the _ again." """

MAX_DIGESTS = 2**20
"""The most digests (of texts, pairs of words, and frames) that are kept in memory; the oldest are dropped first."""

_MAX_PAIRS = 16
"""The most pairs of neighbouring words by which a text of MIN_WORDS or more is looked up."""

# What may stand before a text, and the white space after it. The alternatives are, in this order:
# - characters that are neither letters, digits nor white space: "- ", "** ";
# - a number or a single letter, before "." or ")": "12. ", "(3) ", "a) ";
# - one or two words, before "]", ":", ">" or "|": "User: ", "[3] ", "Example 7: ".
_LABEL = re.compile(r"(?:[^\w\s]+|\(?(?:\d{1,4}|\w)[.)]|\[?\w+(?: \w+)?[]:>|])\s+")

_NUMBER = re.compile(r"(?<!\w)\d+(?!\w)")


@dataclass(eq=False)
class _KeptText:
    """Hold the words of a text that was kept, and its features, by which later texts find it.

    Attributes:
        words: The normalised words.
        features: Digests of pairs of neighbouring words, or of frames.
        shared_features: The features that a kept variant of this text also has.
    """

    words: Sequence[str]
    features: set[bytes]
    shared_features: set[bytes] = field(default_factory=set)


class CopyFilter:
    """Decide which texts of a corpus to keep: no copies, and no third variants.

    A text is a copy of an earlier text if they differ only in case, white space or a label at the start, such as "12. "
    or "User: ". Two texts of MIN_WORDS or more words are variants if they differ in at most MAX_EDITS words, and at
    most a quarter of the words. Shorter texts are variants if they have a frame in common. Texts that are given as
    token ids are copies if all ids are equal, and never variants.

    To save time, two texts of MIN_WORDS or more are compared only if they have two features in common.

    Attributes:
        n_dropped: How many texts were not kept.
    """

    def __init__(self) -> None:
        self.n_dropped = 0
        # The latest kept text by digest, both of whole texts and of features. The oldest digest comes first.
        self._kept: OrderedDict[bytes, _KeptText] = OrderedDict()

    def register(self, text: CorpusText) -> bool:
        """Return whether to keep a text. A text that is kept is remembered; else `n_dropped` goes up by one."""
        # A copy has the digest of a kept text.
        digest = hashlib.blake2b(copy_key(text), digest_size=16).digest()
        if digest in self._kept:
            self.n_dropped += 1
            return False
        # Find the kept variants of the text. A text given as token ids has none: its `full_text` is empty, so it has no
        # features. If two kept variants share a feature that the text has too, the text is a third variant.
        new = _with_digests(normalise_text(text.full_text).split())
        candidates = {self._kept[feature] for feature in new.features if feature in self._kept}
        variants = [kept for kept in candidates if _are_variants(kept, new)]
        if any(variant.shared_features & new.features for variant in variants):
            self.n_dropped += 1
            return False
        # Remember the text, and the features that it shares with each variant.
        for variant in variants:
            common = variant.features & new.features
            variant.shared_features |= common
            new.shared_features |= common
        for key in (digest, *new.features):
            self._kept[key] = new
            self._kept.move_to_end(key)
        while len(self._kept) > MAX_DIGESTS:
            self._kept.popitem(last=False)
        return True


def _with_digests(words: Sequence[str]) -> _KeptText:
    """Return a text of these words with the digests by which variants are found; a very short text has none."""
    if len(words) < MIN_FRAME_WORDS:
        return _KeptText(words, set())
    # Lines of a log differ in many numbers and are variants. So replace numbers by 0, unless the text is mostly
    # numbers.
    words_with_letters = [word for word in words if any(map(str.isalpha, word))]
    if len(words_with_letters) >= MIN_FRAME_WORDS:
        words = [_NUMBER.sub("0", word) for word in words]
    # A long text has the smallest digests of its pairs of words. Variants have most pairs in common, so most of these
    # too.
    if len(words) >= MIN_WORDS:
        pairs = {_digest(f"{first} {second}") for first, second in itertools.pairwise(words)}
        return _KeptText(words, set(sorted(pairs)[:_MAX_PAIRS]))
    # A short text has the digests of all its frames. A space marks a blank, because no word is a space.
    frames = set()
    for blanks in itertools.combinations(range(len(words)), len(words) // 3):
        frame = list(words)
        for blank in blanks:
            frame[blank] = " "
        frames.add(_digest(" ".join(frame)))
    return _KeptText(words, frames)


def _digest(words: str) -> bytes:
    """Return the digest of a string of words, 8 bytes."""
    return hashlib.blake2b(words.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _are_variants(kept: _KeptText, new: _KeptText) -> bool:
    """Return whether two texts are variants; they must have a feature in common."""
    n_words = len(new.words)
    # Short texts are variants if they have a frame in common, and callers pass only texts with a feature in common.
    if n_words < MIN_WORDS:
        return True
    max_edits = min(MAX_EDITS, n_words // 4)
    if len(kept.features & new.features) < 2 or abs(len(kept.words) - n_words) > max_edits:
        return False
    # Count the words that are replaced, inserted or deleted.
    steps = SequenceMatcher(None, kept.words, new.words, autojunk=False).get_opcodes()
    n_edits = 0
    for operation, kept_start, kept_end, new_start, new_end in steps:
        if operation != "equal":
            n_edits += max(kept_end - kept_start, new_end - new_start)
    return n_edits <= max_edits


def copy_key(text: CorpusText) -> bytes:
    """Return bytes that are equal for a text and for its copies, which differ in case, white space or a label."""
    if text.ids is not None:
        return text.bytes_to_hash()
    return normalise_text(text.full_text).encode("utf-8", "surrogatepass")


def distinct(texts: Iterable[CorpusText], copies: CopyFilter) -> Iterator[CorpusText]:
    """Yield the texts of a corpus that are kept; `copies`, a new filter, counts the texts that are dropped."""
    return filter(copies.register, texts)


def normalise_text(text: str) -> str:
    """Return a text in lower case, with single spaces, and without a label such as "User: " at its start."""
    folded = " ".join(text.casefold().split())
    label = _LABEL.match(folded)
    if label is None:
        return folded
    # Before fewer than three words a label may be a part of the text, as in "1: 2".
    unlabelled = folded[label.end() :]
    return unlabelled if unlabelled.count(" ") >= 2 else folded
