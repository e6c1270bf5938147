"""Counts of tokens, and the probe of random tokens that come twice."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from attnscope.corpus import CorpusText, count_tokens, generate_repeats
from attnscope.studies.heads.measuring import log_frequency
from tests.corpus_helpers import CLS, SEP, encode

# The probe


@given(
    st.sets(st.integers(0, 500), min_size=1),
    st.integers(1, 5),
    st.integers(1, 20),
    st.integers(0, 2**70),
)
def test_the_probe_repeats_what_it_says_first(vocabulary, n, length, seed):
    made = list(
        generate_repeats(list(vocabulary), n, length, seed, prefix_ids=[CLS], suffix_ids=[SEP, SEP])
    )
    assert [text.index for text in made] == list(range(n))
    for text in made:
        assert text.ids[0] == CLS
        assert text.ids[-2:] == (SEP, SEP)
        half = (len(text.ids) - 3) // 2
        assert length <= 2 * half <= 2 * length
        assert text.ids[1 : 1 + half] == text.ids[1 + half : -2]
        assert set(text.ids[1:-2]) <= vocabulary
    more = generate_repeats(
        sorted(vocabulary, reverse=True), n + 1, length, seed, prefix_ids=[CLS], suffix_ids=[SEP, SEP]
    )
    assert list(more)[:n] == made


def test_the_probe_is_the_same_for_ever():
    made = [text.ids for text in generate_repeats(range(100, 1100), 2, 4, seed=0)]
    assert made == [(371, 717, 124, 633, 371, 717, 124, 633), (649, 880, 986, 649, 880, 986)]
    assert made != [text.ids for text in generate_repeats(range(100, 1100), 2, 4, seed=1)]
    drawn = np.concatenate([text.ids for text in generate_repeats(range(10), 50, 200, seed=3)])
    assert np.bincount(drawn).min() > 0.085 * len(drawn)  # a tenth is expected


# Frequencies


def test_the_tokens_of_a_corpus_are_counted_without_special_ones():
    texts = [
        CorpusText(0, "a", 1, "ab"),
        CorpusText(1, "a", 2, ids=(1, 100, 2)),
        CorpusText(2, "a", 3, "b"),
    ]
    counts = count_tokens(texts, encode, special_ids=[CLS, SEP])
    assert {i: int(n) for i, n in enumerate(counts) if n} == {100: 2, 101: 2}
    assert count_tokens([], encode).tolist() == [0]


def test_tokens_that_were_never_seen_have_a_frequency_too():
    counts = np.array([0, 3, 1])
    np.testing.assert_allclose(log_frequency(counts, np.array([1, 9])), np.log([4 / 7, 1 / 7]))
