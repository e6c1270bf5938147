"""Which texts of a corpus are copies of earlier ones, decided while it is read, in a fixed amount of memory.

A copy is no evidence: twelve copies of a sentence say of a head what one says, and would make chance a certainty. Nor
are sixty sentences of one template: a few words differ, and a head's attention hardly.
"""

import hashlib
import itertools
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from attnscope.corpus.texts import CorpusText

MOST_EDITS = 4
"""How many words may be put in, left out or changed to make one text of a near-copy; and a quarter of them at most."""

FEWEST_WORDS = 8
"""Shorter texts are no near-copies of each other: "I like it" is the end of many sentences. They may share a frame."""

SHORTEST_FRAME = 4
"""Texts of this many words, up to FEWEST_WORDS - 1, share a frame if they differ in a third of their words at most,
each at the same place: "The dog saw the girl again." and "The cat saw the king again." """

FEWEST_BESIDE_NUMBERS = 4
"""Texts with fewer words beside their numbers are copies only where the numbers are the same too."""

SLOTS = 2**19
"""Places for 8 bytes, in each of four tables of 4 MiB: for digests of about 500,000 texts, for where pairs of words of
the last 60,000 or so stand, and for frames of about 25,000 short texts. Beyond that older ones give way."""

WORDS = 2**21
"""Words that are remembered for near-copies, 8 MiB: of the last 100,000 sentences of 20."""

_KEPT_PAIRS = 8
"""Pairs of neighbouring words by which a text is looked up, of all that it has."""

_PROBES = 8

_VARIED = np.uint32(2**31)
"""Beside the number of words of a text that is remembered: another text of its template was kept."""

_END, _WITHIN = "end", "within"

_HASH_BITS, _GOLDEN = np.uint64(32), np.uint64(0x9E3779B97F4A7C15)
"""Bits of a word's hash, and the factor of Fibonacci hashing (Knuth, volume 3, section 6.4)."""

_NUMBER = re.compile(r"(?<!\w)\d+(?:[.,:]\d+)*(?!\w)")

# A bullet, a quotation mark or a label before a text: "- ", "12. ", "User: ", "[3] ", "Example 7: ".
_LABEL = re.compile(r"(?:[^\w\s]+|\(?(?:\d{1,4}|\w)[.)]|\[?\w+(?: \w+)?[]:>|])\s+")


def copy_key(text: str) -> bytes:
    """What copies of a text share: a hash of it with case folded and each run of whitespace as one space, 16 bytes."""
    return hashlib.blake2b(" ".join(text.casefold().split()).encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Copies:
    """Tells copies from texts that were not seen before.

    A text is a copy of an earlier one where both are the same
    - apart from case, white space and a label before them ("12. ", "User: "),
    - but for their numbers, with FEWEST_BESIDE_NUMBERS other words or more, or
    - but for MOST_EDITS more words at one end, at most a quarter of the shorter text's, which has FEWEST_WORDS or more.
    From its third text on, a template is a copy too: texts of FEWEST_WORDS or more that differ by MOST_EDITS words put
    in, left out or changed (Levenshtein's distance over words), and by a quarter of the words at most. So are shorter
    texts of one frame (SHORTEST_FRAME). Two such texts count apart: pairs are made to differ in a word (WinoBias,
    BLiMP).
    Texts of token numbers are copies where all numbers are the same.

    Near-copies are looked for among texts that have two pairs of neighbouring words in common with what is kept of an
    earlier one: _KEPT_PAIRS of its pairs, drawn by hash. Digests have 64 bits: that any text of a million is taken for
    a copy by chance has a probability below 1e-5.

    Attributes:
        n: How many texts were copies.
    """

    def __init__(self) -> None:
        self.n = 0
        self._whole, self._near, self._frames = _Digests(), _NearCopies(), _Frames()

    def holds(self, text: CorpusText) -> bool:
        """Whether a text is a copy of one that was asked for before; from now on it is known itself."""
        near: Sequence[bytes] = ()
        if text.ids is not None:
            whole = text.digested()
        else:
            folded = _fold(text.written)
            near = folded.encode("utf-8", "surrogatepass").split()
            whole = _without_numbers(folded).encode("utf-8", "surrogatepass")
        digest = _digest(whole)
        is_copy = self._whole.holds(digest)
        if not is_copy and len(near) >= FEWEST_WORDS:
            is_copy = self._near.holds_or_add(near)
        elif not is_copy and len(near) >= SHORTEST_FRAME:
            is_copy = self._frames.holds_or_add(near)
        self.n += is_copy
        if not is_copy:
            self._whole.add(digest)
        return is_copy


def essence(text: CorpusText) -> bytes:
    """What copies share that differ in case, white space and a label before them: what lots are drawn by."""
    if text.ids is not None:
        return text.digested()
    return " ".join(_fold(text.written).split()).encode("utf-8", "surrogatepass")


def distinct(texts: Iterable[CorpusText], copies: Copies) -> Iterator[CorpusText]:
    """The texts without copies of earlier ones; they keep their numbers.

    `texts` are the whole corpus; `copies`, which has seen no text yet, counts them.
    """
    return (text for text in texts if not copies.holds(text))


def _fold(text: str) -> str:
    folded = " ".join(text.casefold().split())
    label = _LABEL.match(folded)
    # Not all of a text that is a label and a word or two.
    return folded[label.end() :] if label and folded.count(" ", label.end()) >= 2 else folded


def _without_numbers(folded: str) -> str:
    """The text with 0 for each number, where enough other words are left."""
    bare, n = _NUMBER.subn("0", folded)
    if not n or sum(any(map(str.isalpha, word)) for word in folded.split()) < FEWEST_BESIDE_NUMBERS:
        return folded
    return bare


def _digest(raw: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") or 1


class _Digests:
    """A set of digests in a fixed amount of memory: where it is full, new ones take the place of old ones."""

    def __init__(self) -> None:
        self._slots = np.zeros(SLOTS, np.uint64)  # 0 = free; pages that nothing was written to take no memory

    def holds(self, digest: int) -> bool:
        return int(self._slots[self._find(digest)]) == digest

    def add(self, digest: int) -> None:
        self._slots[self._find(digest)] = digest

    def _find(self, digest: int) -> int:
        """The slot that a digest is in or goes into."""
        first = digest % SLOTS
        probes = ((first + probe) % SLOTS for probe in range(_PROBES))
        return next((slot for slot in probes if int(self._slots[slot]) in (0, digest)), first)


class _Frames:
    """Counts the texts of each frame up to two, in a fixed amount of memory.

    A frame is a text without a third of its words. A text has as many frames as there are choices of these words: 4 to
    21. It is looked up by the digest of each.
    """

    def __init__(self) -> None:
        self._once, self._twice = _Digests(), _Digests()

    def holds_or_add(self, words: Sequence[bytes]) -> bool:
        """Return whether two earlier texts or more share a frame with these words; if not, they are known from now on.

        Words are at most FEWEST_WORDS - 1, and contain no white space.
        """
        # Blank out each choice of words. No word is a space, so a blank is none.
        frames = []
        for blanks in itertools.combinations(range(len(words)), len(words) // 3):
            remaining = [b" " if place in blanks else word for place, word in enumerate(words)]
            frames.append(_digest(b"\n".join(remaining)))
        if any(self._twice.holds(frame) for frame in frames):
            return True
        # The first text of a frame is noted in one table, the second in the other.
        for frame in frames:
            table = self._twice if self._once.holds(frame) else self._once
            table.add(frame)
        return False


class _NearCopies:
    """Texts by pairs of neighbouring words, in a fixed amount of memory: new ones take the place of old ones."""

    def __init__(self) -> None:
        self._words = np.zeros(WORDS, np.uint32)  # each text: how many words it has, and their hashes
        self._pairs = np.zeros(SLOTS, np.int64)  # where a text with such a pair begins, counted from 1 without end
        self._n_slots = np.uint64(SLOTS)
        self._end = 0

    def holds_or_add(self, words: Sequence[bytes]) -> bool:
        """Whether a text is an earlier one with other words at an end, or of a template with two texts or more.

        If not, it is known from now on.
        """
        n = len(words)
        if n >= WORDS // 2:
            return False
        hashes = np.fromiter(map(zlib.crc32, words), np.uint32, n)
        pairs = hashes[:-1].astype(np.uint64) << _HASH_BITS | hashes[1:]
        pairs *= _GOLDEN
        pairs >>= _HASH_BITS
        slots = pairs % self._n_slots
        seen = [start for start in self._pairs[slots].tolist() if start]
        variants: list[int] = []
        for start, n_pairs in Counter(seen).items() if len(set(seen)) < len(seen) else ():
            if n_pairs < 2:
                continue
            at = (start - 1) % WORDS
            near = self._compare(start - 1, hashes)
            if near == _END or (near and self._words[at] & _VARIED):
                return True
            variants += [at] if near else []
        for at in variants:
            self._words[at] |= _VARIED
        start = self._end % WORDS
        if start + n + 1 > WORDS:  # no text lies across the end
            self._end += WORDS - start
            start = 0
        self._words[start] = n | (int(_VARIED) if variants else 0)
        self._words[start + 1 : start + 1 + n] = hashes
        if n - 1 > _KEPT_PAIRS:
            slots = slots[pairs.argpartition(_KEPT_PAIRS)[:_KEPT_PAIRS]]
        self._pairs[slots] = self._end + 1
        self._end += n + 1
        return False

    def _compare(self, start: int, words: NDArray[np.uint32]) -> str:
        """How the text that begins at a place differs from these words: by a few at an end, elsewhere, or by more.

        That is _END, _WITHIN, or nothing, as where the text is no longer there.
        """
        n = int(self._words[start % WORDS] & ~_VARIED)
        shorter = min(n, len(words))
        most = min(MOST_EDITS, shorter // 4)
        if self._end - start > WORDS or abs(n - len(words)) > most:
            return ""
        other = self._words[start % WORDS + 1 : start % WORDS + 1 + n]
        same = other[:shorter] == words[:shorter]
        first = shorter if same.all() else int(same.argmin())
        same = other[n - shorter + first :][::-1] == words[len(words) - shorter + first :][::-1]
        last = shorter - first if same.all() else int(same.argmin())
        if first + last == shorter and not (first and last):
            return _END
        near = _differ_by(other[first : n - last].tolist(), words[first : len(words) - last].tolist(), most)
        return _WITHIN if near else ""


def _differ_by(one: Sequence[int], other: Sequence[int], most: int) -> bool:
    """Whether Levenshtein's distance of two lists is at most so much; only what is near the diagonal is looked at."""
    if max(len(one), len(other)) <= most:
        return True
    row = {column: column for column in range(most + 1)}
    for i, item in enumerate(one, 1):
        above, row = row, {}
        for j in range(max(0, i - most), min(len(other), i + most) + 1):
            left, up = row.get(j - 1, most), above.get(j, most)
            corner = above.get(j - 1, most) if j else most + 1
            row[j] = min(left + 1, up + 1, corner + (j > 0 and other[j - 1] != item))
        if min(row.values()) > most:
            return False
    return row.get(len(other), most + 1) <= most
