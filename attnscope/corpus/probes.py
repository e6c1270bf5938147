"""Make texts that test heads: long texts that hide words and ask for them at the end, and tokens that come twice."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnscope.corpus.texts import CorpusText
from attnscope.errors import AttnscopeError

Numbers = NDArray[np.int64]
"""Token ids, or positions of tokens."""

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
"""The cue is what stands before the answer. Without a text it is as many random tokens, which are the question, too."""

DEPTH_SHARE = 0.1
"""The share of a haystack in which needles of one depth begin."""

DEPTH_TOKENS = 32
"""The least number of tokens of a haystack in which needles of one depth begin."""

_SHORTEST_HAYSTACK = 16
"""The fewest tokens of a haystack. In a shorter one too many needles would begin at the same position."""

_WORD = re.compile(" [a-z]{3,}")
_MIN_WORDS = 200
"""With fewer words in a vocabulary, needles are made of any tokens."""


@dataclass(frozen=True, eq=False)
class Needle:
    """Hold a text that hides an answer, asks for it, and gives it at the end.

    Attributes:
        ids: The token ids of the whole text, (token,).
        places: The positions at which the answer is hidden, (answer token,).
        decoys: The positions of another answer, which no question asks for, (answer token,).
        depth: The share of the haystack that stands before the needle, about; 0 to 1.
    """

    ids: Numbers
    places: Numbers
    decoys: Numbers
    depth: float

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def answer(self) -> Numbers:
        """Return the ids of the answer, with which the text ends, (answer token,)."""
        return self.ids[-len(self.places) :]


@dataclass(frozen=True, eq=False)
class NeedleSource:
    """Hold what needles and haystacks are made of.

    Attributes:
        vocab_ids: The ids of ordinary tokens; answers are made of them, and without a text all else.
        text_ids: The token ids of a text of which haystacks are parts; None = they are random tokens.
        encode: Makes token ids of cues and questions, without special tokens; None exactly where there is no text.
        sentence_end_ids: The ids of the tokens that end a sentence of the text.
        before: The ids of the tokens that every text begins with, such as [CLS].
    """

    vocab_ids: Numbers
    text_ids: Numbers | None = None
    encode: Callable[[str], Sequence[int]] | None = None
    sentence_end_ids: frozenset[int] = frozenset()
    before: tuple[int, ...] = ()


def needle_probe(
    hay: NeedleSource, n: int, depths: Sequence[float], length: int, seed: int, *, answer: int = 8
) -> Iterator[Needle]:
    """Yield needles in haystacks, the standard test of retrieval from long texts.

    The needle is a sentence, "The secret words of the tower are …", that ends in the answer, some random words. A text,
    the haystack, stands around it, and a question at the end asks for the words. Where `hay` has no text, all these are
    random tokens: two of them, the cue, stand before the answer, and come again at the end of the text. No token of an
    answer comes anywhere else. A second needle, the decoy, has the same form, and other words.

    Needle and decoy begin at positions that are drawn from the same ones, after the end of a sentence where there is a
    text: a tenth of the haystack around the depth, and at least 32 tokens. So a head that always looks at one position,
    or a fixed number of tokens back, finds a needle rarely, and a decoy as often.

    Args:
        hay: What needles and haystacks are made of.
        n: How many needles to yield.
        depths: The depths, 0 to 1, which needles take in turn.
        length: The number of tokens of each text, with question and answer.
        seed: The seed. Needle number i depends on the seed, i and the length alone.
        answer: The number of tokens of an answer; they are fewer if the vocabulary is too small.

    Source:
        Mohtashami and Jaggi 2023, Landmark Attention, section 4.2 (pass keys); Kamradt 2023, Needle in a Haystack.

    Raises:
        AttnscopeError: The length leaves no room for a haystack, or the text or the vocabulary is too small.
    """
    # Sorted, so that the order in which ids were given does not matter.
    vocabulary = np.unique(hay.vocab_ids)
    # Random tokens make two cues and two answers, and must leave some for the haystack.
    n_answer = min(answer, (len(vocabulary) - 2 * _CUE_TOKENS) // 3)
    if n_answer < 1:
        raise AttnscopeError(
            f"a vocabulary of {len(vocabulary)} tokens is too small for needles", "7 are the least"
        )
    for number in range(n):
        yield _make(hay, vocabulary, number, depths[number % len(depths)], length, seed, n_answer)


def _make(
    hay: NeedleSource,
    vocabulary: Numbers,
    number: int,
    depth: float,
    length: int,
    seed: int,
    n_answer: int,
) -> Needle:
    """Make needle number `number`: a haystack with the needle and the decoy in it, the question, and the answer."""
    # Raw numbers of PCG64: NumPy promises that they stay the same, which it does not of Generator's methods.
    random = np.random.PCG64(np.random.SeedSequence([seed, number, length]))
    # Draw the cue, the decoy's cue and the question; without a text the answers too.
    if hay.encode is None:
        drawn = _draw(random, vocabulary, 2 * (_CUE_TOKENS + n_answer))
        cue, decoy_cue = np.split(drawn[: 2 * _CUE_TOKENS], 2)
        answer, decoy = np.split(drawn[2 * _CUE_TOKENS :], 2)
        question = cue
        full_stop = np.array([], np.int64)
        vocabulary = np.setdiff1d(vocabulary, drawn)
    else:
        thing, other = _draw(random, np.arange(len(THINGS)), 2)
        texts = [
            _CUE.format(THINGS[thing]),
            _CUE.format(THINGS[other]),
            _QUESTION.format(THINGS[thing]),
            ".",
        ]
        cue, decoy_cue, question, full_stop = [np.array(hay.encode(text), np.int64) for text in texts]
    # The haystack has the tokens that needle, decoy, question and final answer leave of the length.
    parts = (hay.before, cue, decoy_cue, question, full_stop, full_stop)
    n_other = sum(map(len, parts)) + 3 * n_answer
    n_haystack = length - n_other
    if n_haystack < _SHORTEST_HAYSTACK:
        raise AttnscopeError(
            f"{length} tokens are too few for a needle",
            f"give a length of at least {n_other + _SHORTEST_HAYSTACK}",
        )
    haystack = _haystack(random, hay.text_ids, vocabulary, n_haystack, length)
    # With a text, draw the answers from the words that do not occur in it, or a head could find them there.
    if hay.encode is not None:
        unused = np.setdiff1d(
            vocabulary, np.concatenate([haystack, cue, decoy_cue, question, full_stop])
        )
        if len(unused) < 2 * n_answer:
            raise AttnscopeError(
                "the text has nearly every word of the vocabulary", "give a smaller --lengths"
            )
        answer, decoy = np.split(_draw(random, unused, 2 * n_answer), 2)
    # Draw both starts from the same positions: a head that does not read finds the decoy as often as the needle.
    starts = _starts(haystack, depth, hay.sentence_end_ids)
    decoy_draw, needle_draw, order_draw = random.random_raw(3).tolist()
    needle_start = starts[needle_draw % len(starts)]
    decoy_start = starts[decoy_draw % len(starts)]
    # Cut the haystack at both starts; if they are the same, chance decides about the order.
    needle_sentence = np.concatenate([cue, answer, full_stop])
    decoy_sentence = np.concatenate([decoy_cue, decoy, full_stop])
    before = np.array(hay.before, np.int64)
    needle_is_first = needle_start < decoy_start or (needle_start == decoy_start and order_draw % 2 == 0)
    if needle_is_first:
        sentences = [needle_sentence, haystack[needle_start:decoy_start], decoy_sentence]
    else:
        sentences = [decoy_sentence, haystack[decoy_start:needle_start], needle_sentence]
    first, last = sorted([needle_start, decoy_start])
    ids = np.concatenate([before, haystack[:first], *sentences, haystack[last:], question, answer])
    # An answer begins after its cue; the later of both sentences is moved by the length of the other one.
    answer_start = len(before) + needle_start + len(cue)
    decoy_answer_start = len(before) + decoy_start + len(decoy_cue)
    if needle_is_first:
        decoy_answer_start += len(needle_sentence)
    else:
        answer_start += len(decoy_sentence)
    places = answer_start + np.arange(n_answer)
    decoys = decoy_answer_start + np.arange(n_answer)
    return Needle(ids, places, decoys, depth)


def _haystack(
    random: np.random.PCG64,
    text_ids: Numbers | None,
    vocabulary: Numbers,
    n_haystack: int,
    length: int,
) -> Numbers:
    """Return a part of the text from a random position on, or random tokens if there is no text, (n_haystack,)."""
    if text_ids is None:
        indices = random.random_raw(n_haystack) % np.uint64(len(vocabulary))
        return vocabulary[indices.astype(np.int64)]
    if len(text_ids) < n_haystack:
        raise AttnscopeError(
            f"the text has {len(text_ids):,} tokens, and a haystack of {length:,} needs {n_haystack:,}",
            "give a longer text, or a smaller --lengths",
        )
    start = int(random.random_raw() % (len(text_ids) - n_haystack + 1))
    return text_ids[start : start + n_haystack]


def _draw(random: np.random.PCG64, pool: Numbers, n: int) -> Numbers:
    """Draw n different numbers from a pool, (n,)."""
    return pool[random.random_raw(len(pool)).argsort(kind="stable")[:n]]


def _starts(haystack: Numbers, depth: float, sentence_end_ids: frozenset[int]) -> list[int]:
    """Return where needles of a depth may begin: after the end of a sentence, or anywhere if no sentence ends there."""
    first, last = depth_range(depth, len(haystack))
    starts = range(first, last + 1)
    # A start at 0 has no token before it.
    after_sentences = [
        start for start in starts if start and int(haystack[start - 1]) in sentence_end_ids
    ]
    return after_sentences or list(starts)


def depth_range(depth: float, n_haystack: int) -> tuple[int, int]:
    """Return the first and the last position of a haystack at which needles of a depth, 0 to 1, may begin."""
    # The range is around the depth, and moved inwards at the ends of the haystack, where it is as wide.
    width = min(n_haystack, max(DEPTH_TOKENS, round(DEPTH_SHARE * n_haystack)))
    first = round(depth * n_haystack) - width // 2
    first = min(max(0, first), n_haystack - width)
    return first, first + width


def word_ids(ids: Numbers, spell: Callable[[int], str]) -> Numbers:
    """Return the tokens that are spelled as a space and a lower-case word; all tokens if those are fewer than 200."""
    is_word = [_WORD.fullmatch(spell(token_id)) is not None for token_id in ids.tolist()]
    words = ids[np.array(is_word, bool)]
    return words if len(words) >= _MIN_WORDS else ids


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

    Only induction helps a model to predict the second half (Olsson et al. 2022, In-context Learning and Induction
    Heads). m is drawn anew for each text, from half of `length`, rounded up, to `length`: if it were the same, a head
    that looks back by a fixed number of tokens would pass as induction. Tokens are drawn uniformly, with replacement.
    Text number i depends only on the seed, i and the set of `vocab_ids`, so that a longer probe begins with the texts
    of a shorter one.

    Args:
        vocab_ids: The ids of ordinary tokens, in any order.
        n_texts: How many texts to yield.
        length: The largest m.
        seed: The seed.
        before: The ids of the tokens that every text begins with, such as [CLS].
        after: The ids of the tokens that every text ends with.
    """
    vocabulary = np.unique(np.asarray(vocab_ids, np.int64))
    for index in range(n_texts):
        # Raw numbers of PCG64: NumPy promises that they stay the same, which it does not of Generator's methods.
        random = np.random.PCG64(np.random.SeedSequence([seed, index]))
        raw = random.random_raw(length + 1)
        # Remainders prefer no token by more than 1 in 2^64 / len(vocabulary).
        indices = raw[:length] % np.uint64(len(vocabulary))
        m = length - int(raw[length]) % (length // 2 + 1)
        half = vocabulary[indices[:m].astype(np.int64)].tolist()
        ids = (*before, *half, *half, *after)
        yield CorpusText(index, f"repeat probe, seed {seed}", index + 1, ids=ids)
