"""Make texts that test heads: words hidden in a long text that asks for them at its end; tokens that come twice."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnscope.corpus.texts import CorpusText
from attnscope.errors import AttnscopeError

Numbers = NDArray[np.int64]

THINGS = (
    "door",
    "tower",
    "garden",
    "ship",
    "library",
    "bridge",
    "cellar",
    "mill",
    "museum",
    "station",
    "castle",
    "school",
    "market",
    "theatre",
    "harbour",
    "farm",
)
_CUE = " The secret words of the {} are"
_QUESTION = "\nQuestion: What are the secret words of the {0}?\nAnswer: The secret words of the {0} are"
_CUE_TOKENS = 2
"""Random tokens before an answer of random tokens; the question repeats them."""

DEPTH_SHARE = 0.1
"""How much of a haystack are the places of needles of one depth."""

DEPTH_TOKENS = 32
"""How many tokens of a haystack are the places of needles of one depth, at least."""

_LEAST_ROOM = 16
"""The fewest tokens of a haystack: in a shorter one too many needles would share a place, or an offset."""

_WORD = re.compile(" [a-z]{3,}")
_FEWEST_WORDS = 200
"""With fewer words in a vocabulary, needles are made of all its tokens."""


@dataclass(frozen=True, eq=False)
class Needle:
    """Hold a text that hides an answer, ends in a question, and then gives the answer.

    Attributes:
        ids: Its token numbers.
        places: The places at which the tokens of the answer are hidden.
        decoys: The places of the answer of another needle, which answers another question.
        depth: The share of the haystack around which the needle was to stand, 0 to 1.
        room: Tokens of the haystack.
    """

    ids: Numbers
    places: Numbers
    decoys: Numbers
    depth: float
    room: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def answer(self) -> Numbers:
        """Return the tokens that are right at the end of the text."""
        return self.ids[-len(self.places) :]


@dataclass(frozen=True, eq=False)
class Hay:
    """Hold the material of needles and haystacks.

    Attributes:
        vocab_ids: Ordinary tokens, of which needles are made, and haystacks without a text.
        text_ids: Token numbers of a text; None = random tokens.
        encode: Makes the token numbers of a text, without special ones; None = the question is of random tokens too.
        sentence_end_ids: Numbers of tokens that end a sentence of the text.
        before: The tokens that every text begins with, such as [CLS].
    """

    vocab_ids: Numbers
    text_ids: Numbers | None = None
    encode: Callable[[str], Sequence[int]] | None = None
    sentence_end_ids: frozenset[int] = frozenset()
    before: tuple[int, ...] = ()


def needle_probe(
    hay: Hay, n: int, depths: Sequence[float], length: int, seed: int, *, answer: int = 8
) -> Iterator[Needle]:
    """Yield needles in haystacks, the standard test of retrieval from long texts.

    With a text the needle is a sentence, "The secret words of the tower are …", that ends in random words, and the
    question asks for them. Without one all are random tokens: two tokens before the needle's answer come again at the
    end of the text. No token of an answer comes anywhere else. A second needle, the decoy, is of the same form with
    other words. Needle number i is at the i-th of the depths, which take turns; it depends on the seed, i and the
    length alone.

    Needle and decoy are drawn by chance from the same places, a tenth of the haystack around the depth and at least 32
    tokens, with a text those between two sentences. So a head that looks at one place, or so many tokens back, finds a
    needle rarely, and a decoy as often.

    `length` is that of each text in tokens, question and answer included. The answer has fewer tokens if the vocabulary
    is too small.

    Source:
        Mohtashami and Jaggi 2023, Landmark Attention, section 4.2 (pass keys); Kamradt 2023, Needle in a Haystack.

    Raises:
        AttnscopeError: The length has no room, the text or vocabulary is too small, or a number makes no sense.
    """
    # In one order, whatever order they were given in.
    vocabulary = np.unique(hay.vocab_ids)
    if n < 1 or seed < 0 or answer < 1 or not depths or not all(0 <= depth <= 1 for depth in depths):
        raise AttnscopeError(
            f"no probe of {n} needles of {answer} tokens at depths {list(depths)} with seed {seed}",
            "needles and tokens are at least 1, depths from 0 to 1, the seed at least 0",
        )
    n_answer = min(answer, (len(vocabulary) - 2 * _CUE_TOKENS) // 3)
    if n_answer < 1:
        raise AttnscopeError(
            f"a vocabulary of {len(vocabulary)} tokens is too small for needles", "7 are the least"
        )
    return (
        _make(hay, vocabulary, number, depths[number % len(depths)], length, seed, n_answer)
        for number in range(n)
    )


def _make(
    hay: Hay, vocabulary: Numbers, number: int, depth: float, length: int, seed: int, n_answer: int
) -> Needle:
    """Make needle `number`: its sentence and the decoy's in a haystack, the question, and the answer."""
    # Raw numbers of PCG64: NumPy promises that they stay the same, which it does not of Generator's methods.
    chance = np.random.PCG64(np.random.SeedSequence([seed, number, length]))
    # Draw the cue, the decoy's cue and the question; without a text the answers too.
    if hay.encode is None:
        drawn = _draw(chance, vocabulary, 2 * (n_answer + _CUE_TOKENS))
        cue, decoy_cue, answer, decoy = np.split(drawn, np.cumsum([_CUE_TOKENS, _CUE_TOKENS, n_answer]))
        question = cue
        full_stop = drawn[:0]
    else:
        thing, other = _draw(chance, np.arange(len(THINGS)), 2)
        texts = _CUE.format(THINGS[thing]), _CUE.format(THINGS[other]), _QUESTION.format(THINGS[thing])
        cue, decoy_cue, question, full_stop = (
            np.array(hay.encode(text), np.int64) for text in (*texts, ".")
        )
        drawn = vocabulary[:0]
    # The haystack is the length left by the needle, the decoy, the question and the answer after it.
    n_beside = len(hay.before) + len(cue) + len(decoy_cue) + len(question)
    n_beside += 2 * len(full_stop) + 3 * n_answer
    room = length - n_beside
    if room < _LEAST_ROOM:
        raise AttnscopeError(
            f"{length} tokens are too few for a needle",
            f"give a length of at least {n_beside + _LEAST_ROOM}",
        )
    stack = _haystack(chance, hay.text_ids, np.setdiff1d(vocabulary, drawn), room, length)
    # Words of answers must not occur elsewhere, or a head could find them there.
    if hay.encode is not None:
        unused = np.setdiff1d(vocabulary, np.concatenate([stack, cue, decoy_cue, question, full_stop]))
        if len(unused) < 2 * n_answer:
            raise AttnscopeError(
                "the text has nearly every word of the vocabulary", "give a smaller --lengths"
            )
        answer, decoy = np.split(_draw(chance, unused, 2 * n_answer), 2)
    # Draw both places near the depth by one law: a head that does not read finds one as often as the other.
    around = _places(stack, depth, hay.sentence_end_ids)
    raw_decoy, raw_needle, raw_order = chance.random_raw(3).tolist()
    start = around[raw_needle % len(around)]
    decoy_start = around[raw_decoy % len(around)]
    needle_sentence = np.concatenate([cue, answer, full_stop])
    decoy_sentence = np.concatenate([decoy_cue, decoy, full_stop])
    # Put both into the haystack; where they are at the same place, chance says which is first.
    before = np.array(hay.before, np.int64)
    needle_is_first = start < decoy_start or (start == decoy_start and raw_order % 2 == 0)
    if needle_is_first:
        sentences = [needle_sentence, stack[start:decoy_start], decoy_sentence]
    else:
        sentences = [decoy_sentence, stack[decoy_start:start], needle_sentence]
    low, high = sorted([start, decoy_start])
    ids = np.concatenate([before, stack[:low], *sentences, stack[high:], question, answer])
    # An answer stands after its cue, and behind the other sentence if that is first.
    answer_start = len(before) + start + len(cue)
    decoy_answer_start = len(before) + decoy_start + len(decoy_cue)
    if needle_is_first:
        decoy_answer_start += len(needle_sentence)
    else:
        answer_start += len(decoy_sentence)
    places = answer_start + np.arange(n_answer)
    decoys = decoy_answer_start + np.arange(n_answer)
    return Needle(ids, places, decoys, depth, room)


def _haystack(
    chance: np.random.PCG64,
    text: Numbers | None,
    vocabulary: Numbers,
    room: int,
    length: int,
) -> Numbers:
    """Return a random stretch of a text, or random tokens of the vocabulary if there is none, (room,)."""
    if text is None:
        numbers = chance.random_raw(room) % np.uint64(len(vocabulary))
        return vocabulary[numbers.astype(np.int64)]
    if len(text) < room:
        raise AttnscopeError(
            f"the text has {len(text):,} tokens, and a haystack of {length:,} needs {room:,}",
            "give a longer text, or a smaller --lengths",
        )
    start = int(chance.random_raw() % (len(text) - room + 1))
    return text[start : start + room]


def _draw(chance: np.random.PCG64, pool: Numbers, n: int) -> Numbers:
    """Draw n different numbers from a pool, (n,)."""
    return pool[chance.random_raw(len(pool)).argsort(kind="stable")[:n]]


def _places(stack: Numbers, depth: float, ends: frozenset[int]) -> list[int]:
    """Return the places around a depth: those between two sentences, or all where no sentence ends."""
    first, last = depth_range(depth, len(stack))
    places = range(first, last + 1)
    between = [place for place in places if place and int(stack[place - 1]) in ends]
    return between or list(places)


def depth_range(depth: float, room: int) -> tuple[int, int]:
    """Return how many of the `room` tokens of a haystack stand before a needle of a depth, at least and at most."""
    # As wide at the ends of the haystack as in its midst.
    width = min(room, max(DEPTH_TOKENS, round(DEPTH_SHARE * room)))
    first = min(max(0, round(depth * room) - width // 2), room - width)
    return first, first + width


def word_ids(numbers: Numbers, spell: Callable[[int], str]) -> Numbers:
    """Return the tokens spelled as lower-case words after a blank; all tokens where fewer than 200 are."""
    is_word = [_WORD.fullmatch(spell(number)) is not None for number in numbers.tolist()]
    words = numbers[np.array(is_word, bool)]
    return words if len(words) >= _FEWEST_WORDS else numbers


def repeat_probe(
    vocab_ids: ArrayLike,
    n_texts: int,
    length: int,
    seed: int,
    *,
    before: Sequence[int] = (),
    after: Sequence[int] = (),
) -> Iterator[CorpusText]:
    """Yield random token sequences that come twice, x1 … xm x1 … xm: the standard test for induction heads.

    Nothing but induction helps a model in the second half (Olsson et al. 2022, In-context Learning and Induction
    Heads). m is drawn anew for each text, from half of `length`, rounded up, to `length`: if it were the same, a head
    that looks back by a fixed number of tokens would pass as induction. Tokens are drawn uniformly, with replacement.
    Text number i depends on the seed, i and the set of `vocab_ids` alone: the first texts of a longer probe are those
    of a shorter one.

    `vocab_ids` are ordinary tokens in any order. Each text begins with the tokens `before`, such as [CLS], and ends
    with those `after`.

    Raises:
        AttnscopeError: There is nothing to draw from, or a number is too small.
    """
    vocabulary = np.unique(np.asarray(vocab_ids, np.int64))
    if not len(vocabulary) or n_texts < 1 or length < 1 or seed < 0:
        raise AttnscopeError(
            f"no probe of {n_texts} texts of {length} tokens from {len(vocabulary)} with seed {seed}",
            "texts, tokens and vocabulary are at least 1, the seed at least 0",
        )

    for index in range(n_texts):
        # Raw numbers of PCG64: NumPy promises that they stay the same, which it does not of Generator's methods.
        # The remainder prefers no token by more than 1 in 2^64 / len(vocabulary).
        *raw, raw_half = np.random.PCG64(np.random.SeedSequence([seed, index])).random_raw(length + 1)
        drawn = np.array(raw) % np.uint64(len(vocabulary))
        n_half = length - int(raw_half) % (length // 2 + 1)
        half = vocabulary[drawn[:n_half].astype(np.int64)].tolist()
        ids = (*before, *half, *half, *after)
        yield CorpusText(index, f"repeat probe, seed {seed}", index + 1, ids=ids)
