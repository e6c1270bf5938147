"""Generate the synthetic texts that `attnscope heads --probe` runs a model on.

Needle texts hide words in a long text and ask for them at the end. They test retrieval heads. Repeat texts are random
tokens that come twice. They test induction heads. This module computes token ids only. It runs no model.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from attnscope.arrays import Integers
from attnscope.corpus.texts import CorpusText
from attnscope.errors import AttnscopeError

NEEDLE_NOUNS = (
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
# A needle sentence and its question name one of these things, such as "The secret words of the tower are".
# The cue is the part of a needle sentence before its answer.
_CUE_TEMPLATE = " The secret words of the {} are"
_QUESTION_TEMPLATE = (
    "\nQuestion: What are the secret words of the {0}?\nAnswer: The secret words of the {0} are"
)
_N_RANDOM_CUE_TOKENS = 2
"""Without a haystack text, the cue is this many random tokens, and the question is a copy of the cue."""

DEPTH_RANGE_SHARE = 0.1
"""The needles of one depth start in a range of positions. This is the width of the range / the haystack's tokens."""

MIN_DEPTH_RANGE_TOKENS = 32
"""The smallest width of that range, in tokens."""

_MIN_HAYSTACK_TOKENS = 16
"""A shorter haystack has so few possible starts that many needles would start at the same position."""

_WORD_PATTERN = re.compile(" [a-z]{3,}")
_MIN_WORDS = 200
"""If a vocabulary has fewer words, needles are made of any tokens."""


@dataclass(frozen=True, eq=False)
class Needle:
    """Hold a text that hides an answer, asks for the answer, and ends with it.

    Attributes:
        ids: The token ids of the whole text, (token,).
        answer_positions: The positions of the hidden answer, (answer token,).
        decoy_positions: The positions of the decoy's answer, which no question asks for, (answer token,).
        depth: About which share of the haystack stands before the needle, 0 to 1.
    """

    ids: Integers
    answer_positions: Integers
    decoy_positions: Integers
    depth: float

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def answer(self) -> Integers:
        """Return the ids of the answer, (answer token,). The text ends with a copy of it."""
        return self.ids[-len(self.answer_positions) :]


@dataclass(frozen=True, eq=False)
class NeedleSource:
    """Hold the tokens that needles and haystacks are made of.

    A source has either both `text_ids` and `encode`, or neither.

    Attributes:
        vocab_ids: The ids of ordinary tokens. Answers are drawn from them; without `text_ids`, everything else too.
        text_ids: The token ids of a text. A haystack is a contiguous part of it. None = haystacks are random tokens.
        encode: Turns cues and questions into token ids, without special tokens. None if `text_ids` is None.
        sentence_end_ids: The ids of the tokens that end a sentence of the text.
        prefix_ids: The ids of the tokens that every text begins with, such as [CLS].
    """

    vocab_ids: Integers
    text_ids: Integers | None = None
    encode: Callable[[str], Sequence[int]] | None = None
    sentence_end_ids: frozenset[int] = frozenset()
    prefix_ids: tuple[int, ...] = ()


def generate_needles(
    source: NeedleSource,
    n_texts: int,
    depths: Sequence[float],
    length: int,
    seed: int,
    *,
    n_answer_tokens: int = 8,
) -> Iterator[Needle]:
    """Yield texts with a needle in a haystack, the standard test of retrieval from long texts.

    The needle is the sentence "The secret words of the tower are …". It ends with the answer, a few random words. The
    needle stands inside a longer text, the haystack. A question at the end of the haystack asks for the words. A second
    sentence, the decoy, has the same form but names another thing and other words. The tokens of an answer occur
    nowhere else, except at the end of the text.

    If `source` has no text, everything is random tokens. Two tokens, the cue, stand before the hidden answer and come
    again before the answer at the end.

    The starts of needle and decoy are drawn from one range of positions around the depth. The range is a tenth of the
    haystack wide, and at least 32 tokens. With a text, only positions after the end of a sentence count. A head that
    always looks at one position, or a fixed number of tokens back, therefore finds the needle rarely, and no more often
    than the decoy.

    Args:
        source: The tokens that needles and haystacks are made of.
        n_texts: How many texts to yield.
        depths: The depths, 0 to 1. Text number i has the depth i modulo their number.
        length: The number of tokens of each text, including question and answer.
        seed: The random seed. Text number i depends only on the seed, i and the length.
        n_answer_tokens: The number of tokens of an answer. A small vocabulary makes answers shorter.

    Source:
        Mohtashami and Jaggi 2023, Landmark Attention, section 4.2 (pass keys); Kamradt 2023, Needle in a Haystack.

    Raises:
        AttnscopeError: The length is too short for a haystack, or the text or the vocabulary is too small.
    """
    # Sort the ids, so that texts do not depend on the order of `vocab_ids`.
    vocabulary = np.unique(source.vocab_ids)
    # Two cues and two answers take different tokens. After the cues, each answer gets at most a third of the tokens,
    # so that a third is left for the haystack.
    n_answer = min(n_answer_tokens, (len(vocabulary) - 2 * _N_RANDOM_CUE_TOKENS) // 3)
    if n_answer < 1:
        raise AttnscopeError(
            f"a vocabulary of {len(vocabulary)} tokens is too small for needles", "7 are the least"
        )
    for number in range(n_texts):
        yield _make_needle(
            source, vocabulary, number, depths[number % len(depths)], length, seed, n_answer
        )


def _make_needle(
    source: NeedleSource,
    vocabulary: Integers,
    number: int,
    depth: float,
    length: int,
    seed: int,
    n_answer: int,
) -> Needle:
    """Make text number `number`: a haystack that holds the needle and the decoy, the question, and the answer.

    Every call on `random` advances it, so the order of the draws is part of the definition of the texts.
    """
    # Use raw integers of PCG64. NumPy guarantees that they never change between versions; Generator's methods may.
    random = np.random.PCG64(np.random.SeedSequence([seed, number, length]))
    # Draw the cue, the decoy's cue and the question. Without a text, draw the answers too.
    if source.encode is None:
        drawn = _draw_distinct(random, vocabulary, 2 * (_N_RANDOM_CUE_TOKENS + n_answer))
        cue, decoy_cue = np.split(drawn[: 2 * _N_RANDOM_CUE_TOKENS], 2)
        answer, decoy = np.split(drawn[2 * _N_RANDOM_CUE_TOKENS :], 2)
        question = cue
        full_stop = np.array([], np.int64)
        vocabulary = np.setdiff1d(vocabulary, drawn)
    else:
        thing, other = _draw_distinct(random, np.arange(len(NEEDLE_NOUNS)), 2)
        texts = [
            _CUE_TEMPLATE.format(NEEDLE_NOUNS[thing]),
            _CUE_TEMPLATE.format(NEEDLE_NOUNS[other]),
            _QUESTION_TEMPLATE.format(NEEDLE_NOUNS[thing]),
            ".",
        ]
        cue, decoy_cue, question, full_stop = [np.array(source.encode(text), np.int64) for text in texts]
    # The haystack gets the rest of the length. `parts` has two full stops, as needle and decoy end with one each; the
    # three answers are the needle's, the decoy's and the one at the end.
    parts = (source.prefix_ids, cue, decoy_cue, question, full_stop, full_stop)
    n_other_tokens = sum(map(len, parts)) + 3 * n_answer
    n_haystack = length - n_other_tokens
    if n_haystack < _MIN_HAYSTACK_TOKENS:
        raise AttnscopeError(
            f"{length} tokens are too few for a needle",
            f"give a length of at least {n_other_tokens + _MIN_HAYSTACK_TOKENS}",
        )
    haystack = _cut_haystack(random, source.text_ids, vocabulary, n_haystack, length)
    # With a text, draw the answers from words that the haystack lacks. Otherwise a head could find them there.
    if source.encode is not None:
        unused = np.setdiff1d(
            vocabulary, np.concatenate([haystack, cue, decoy_cue, question, full_stop])
        )
        if len(unused) < 2 * n_answer:
            raise AttnscopeError(
                "the text has nearly every word of the vocabulary", "give a smaller --lengths"
            )
        answer, decoy = np.split(_draw_distinct(random, unused, 2 * n_answer), 2)
    # Draw both starts from the same positions: a head that ignores the words finds the decoy as often as the needle.
    starts = _list_starts(haystack, depth, source.sentence_end_ids)
    decoy_draw, needle_draw, order_draw = random.random_raw(3).tolist()
    needle_start = starts[needle_draw % len(starts)]
    decoy_start = starts[decoy_draw % len(starts)]
    # Cut the haystack at both starts. If the starts are equal, a random bit decides which sentence comes first.
    needle_sentence = np.concatenate([cue, answer, full_stop])
    decoy_sentence = np.concatenate([decoy_cue, decoy, full_stop])
    prefix = np.array(source.prefix_ids, np.int64)
    needle_is_first = needle_start < decoy_start or (needle_start == decoy_start and order_draw % 2 == 0)
    if needle_is_first:
        sentences = [needle_sentence, haystack[needle_start:decoy_start], decoy_sentence]
    else:
        sentences = [decoy_sentence, haystack[decoy_start:needle_start], needle_sentence]
    first_start, last_start = sorted([needle_start, decoy_start])
    ids = np.concatenate(
        [prefix, haystack[:first_start], *sentences, haystack[last_start:], question, answer]
    )
    # An answer begins after its cue. The earlier sentence shifts the later one by the earlier sentence's length.
    answer_start = len(prefix) + needle_start + len(cue)
    decoy_answer_start = len(prefix) + decoy_start + len(decoy_cue)
    if needle_is_first:
        decoy_answer_start += len(needle_sentence)
    else:
        answer_start += len(decoy_sentence)
    places = answer_start + np.arange(n_answer)
    decoys = decoy_answer_start + np.arange(n_answer)
    return Needle(ids, places, decoys, depth)


def _cut_haystack(
    random: np.random.PCG64,
    text_ids: Integers | None,
    vocabulary: Integers,
    n_haystack: int,
    length: int,
) -> Integers:
    """Cut a part of the text that starts at a random position, (n_haystack,); without a text, return random tokens."""
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


def _draw_distinct(random: np.random.PCG64, pool: Integers, n: int) -> Integers:
    """Draw n elements of a pool without replacement, (n,)."""
    # Sort the pool by one random key per element, and take the first n.
    return pool[random.random_raw(len(pool)).argsort(kind="stable")[:n]]


def _list_starts(haystack: Integers, depth: float, sentence_end_ids: frozenset[int]) -> list[int]:
    """Return the positions of the haystack at which a needle of a depth may start.

    These are the positions of `start_range` that follow the end of a sentence. If no sentence ends there, all count.
    """
    first, last = start_range(depth, len(haystack))
    starts = range(first, last + 1)
    # Skip position 0: no token stands before it, and haystack[-1] would be the last token.
    after_sentences = [
        start for start in starts if start and int(haystack[start - 1]) in sentence_end_ids
    ]
    return after_sentences or list(starts)


def start_range(depth: float, n_haystack: int) -> tuple[int, int]:
    """Return the first and the last position, both inclusive, at which a needle of a depth, 0 to 1, may start.

    The last position may be `n_haystack`: the needle then follows the whole haystack.
    """
    # Centre the range on the depth. Near the ends of the haystack shift it inwards, so that its width stays the same.
    width = min(n_haystack, max(MIN_DEPTH_RANGE_TOKENS, round(DEPTH_RANGE_SHARE * n_haystack)))
    first = round(depth * n_haystack) - width // 2
    first = min(max(0, first), n_haystack - width)
    return first, first + width


def select_word_ids(ids: Integers, spell: Callable[[int], str]) -> Integers:
    """Return the ids of tokens that are a space and a lower-case word, such as " door".

    If fewer than 200 tokens are such words, return all ids. `spell` returns the characters of a token id.
    """
    is_word = [_WORD_PATTERN.fullmatch(spell(token_id)) is not None for token_id in ids.tolist()]
    words = ids[np.array(is_word, bool)]
    return words if len(words) >= _MIN_WORDS else ids


def generate_repeats(
    vocab_ids: ArrayLike,
    n_texts: int,
    length: int,
    seed: int,
    *,
    prefix_ids: Sequence[int] = (),
    suffix_ids: Sequence[int] = (),
) -> Iterator[CorpusText]:
    """Yield texts of m random tokens that come twice, x1 … xm x1 … xm: the standard test for induction heads.

    Only induction helps a model to predict the second half (Olsson et al. 2022, In-context Learning and Induction
    Heads). Each text has its own m, uniform from ceil(length / 2) to `length`. If all texts had one m, a head that
    looks back by a fixed number of tokens would look like an induction head. Tokens are drawn uniformly, with
    replacement. Text number i depends only on the seed, i, `length` and the set of `vocab_ids`, so the first texts do
    not depend on `n_texts`.

    Args:
        vocab_ids: The ids of ordinary tokens, in any order.
        n_texts: How many texts to yield.
        length: The largest m.
        seed: The seed.
        prefix_ids: The ids of the tokens that every text begins with, such as [CLS].
        suffix_ids: The ids of the tokens that every text ends with.
    """
    vocabulary = np.unique(np.asarray(vocab_ids, np.int64))
    for index in range(n_texts):
        # Use raw integers of PCG64. NumPy guarantees that they never change between versions; Generator's methods may.
        random = np.random.PCG64(np.random.SeedSequence([seed, index]))
        # One integer per token, and a last one for m, (length + 1,).
        raw = random.random_raw(length + 1)
        # The bias of the remainder is negligible: the integers have 64 bits.
        indices = raw[:length] % np.uint64(len(vocabulary))
        m = length - int(raw[length]) % (length // 2 + 1)
        half = vocabulary[indices[:m].astype(np.int64)].tolist()
        ids = (*prefix_ids, *half, *half, *suffix_ids)
        # The source and the line of the text, where a file would have a name and a line number.
        yield CorpusText(index, f"repeat probe, seed {seed}", index + 1, ids=ids)
