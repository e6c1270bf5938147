"""Which texts of a corpus are copies of earlier ones, decided while it is read, in a fixed amount of memory.

A copy is no evidence: twelve copies of a sentence say of a head what one says, and would make chance a certainty. Every
shard and worker reads the corpus from its start, so that all leave out the same copies.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator

import numpy as np

from attnscope.corpus.texts import CorpusText

MORE_WORDS = 4
"""How many words a text may have more than its copy, at its start or at its end, and at most a fifth of the copy's."""

FEWEST_WORDS = 8
"""Shorter texts are copies only where all their words are the same: "I like it" is the end of many sentences."""

SLOTS = 2**19
"""Places for digests of 8 bytes, in each of two tables of 4 MiB: of about 500,000 texts, and of what is left of the
last 50,000 or so without their first or last words. Beyond that older digests give way."""

_PROBES = 8

# A bullet, a quotation mark or a label before a text: "- ", "12. ", "User: ", "[3] ", "Example 7: ".
_LABEL = re.compile(r"(?:[^\w\s]+|\(?(?:\d{1,4}|\w)[.)]|\[?\w+(?: \w+)?[]:>|])\s+")


def copy_key(text: str) -> bytes:
    """What copies of a text share: a hash of it with case folded and each run of whitespace as one space, 16 bytes."""
    return hashlib.blake2b(" ".join(text.casefold().split()).encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Copies:
    """Tells copies from texts that were not seen before.

    A text is a copy of an earlier one where both are the same
    - apart from case, white space and a label before them ("12. ", "User: "), or
    - beside that but for at most MORE_WORDS more words at the start or at the end of one of them (a fifth of the
      other's words at most, and the other has at least FEWEST_WORDS).
    Texts of token numbers are copies where all numbers are the same. Texts that differ anywhere else are not: pairs
    that were made to differ in a word (WinoBias, BLiMP) and prompts of one template count apart.

    Digests have 64 bits: that any text of a million is taken for a copy by chance has a probability below 1e-5.

    Attributes:
        n: How many texts were copies.
    """

    def __init__(self) -> None:
        self.n = 0
        self._whole, self._cut = _Digests(), _Digests()

    def holds(self, text: CorpusText) -> bool:
        """Whether a text is a copy of one that was asked for before; from now on it is known itself."""
        cut: list[int] = []
        if text.ids is not None:
            whole = _digest(text.digested())
        else:
            words = _folded(text.text or "").split()
            whole, *cut = (_digest(" ".join(part).encode("utf-8", "surrogatepass")) for part in (words, *_cuts(words)))
        is_copy = self._whole.holds(whole) or self._cut.holds(whole) or any(map(self._whole.holds, cut))
        self.n += is_copy
        if not is_copy:
            self._whole.add(whole)
            for digest in cut:
                self._cut.add(digest)
        return is_copy


def essence(text: CorpusText) -> bytes:
    """What copies share that differ in case, white space and a label before them: what lots are drawn by."""
    if text.ids is not None:
        return text.digested()
    return " ".join(_folded(text.text or "").split()).encode("utf-8", "surrogatepass")


def distinct(texts: Iterable[CorpusText], copies: Copies) -> Iterator[CorpusText]:
    """The texts without copies of earlier ones; they keep their numbers.

    Args:
        texts: The whole corpus, whatever the shard.
        copies: What has seen no text yet; counts them.
    """
    return (text for text in texts if not copies.holds(text))


def _folded(text: str) -> str:
    folded = " ".join(text.casefold().split())
    label = _LABEL.match(folded)
    # Not all of a text that is a label and a word or two.
    return folded[label.end() :] if label and folded.count(" ", label.end()) >= 2 else folded


def _cuts(words: list[str]) -> list[list[str]]:
    """What is left of a text without its first, or its last words."""
    n = len(words)
    most = [k for k in range(1, MORE_WORDS + 1) if n - k >= max(FEWEST_WORDS, 5 * k)]
    return [words[k:] for k in most] + [words[: n - k] for k in most]


def _digest(raw: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") or 1


class _Digests:
    """A set of digests in a fixed amount of memory: where it is full, new ones take the place of old ones."""

    def __init__(self) -> None:
        self._held = np.zeros(SLOTS, np.uint64)  # 0 = free; pages that nothing was written to take no memory

    def holds(self, digest: int) -> bool:
        return self._place(digest)[1]

    def add(self, digest: int) -> None:
        self._held[self._place(digest)[0]] = digest

    def _place(self, digest: int) -> tuple[int, bool]:
        """Where a digest is or goes, and whether it is there."""
        first = digest % SLOTS
        for probe in range(_PROBES):
            place = (first + probe) % SLOTS
            held = int(self._held[place])
            if held in (0, digest):
                return place, held == digest
        return first, False
