"""What a head looks for, found in its attention: planted tokens and pairs come first, and of noise nothing is found."""

from dataclasses import replace

import numpy as np
import pytest

import attnscope
from attnscope import DescribeOptions, HeadsOptions
from attnscope.core.descriptions import find_terms, score_description
from attnscope.core.directions import KEY_QUANTILES, describe_types, fit_features, quantise
from attnscope.core.sampled_rows import RowSample

N_TYPES, N_TEXTS, N_ROWS, N_KEYS, WIDTH = 61, 40, 11, 23, 7


def sample(seed):
    """Rows of random tokens without a shared feature that says anything, their offsets, and X."""
    drawn = np.random.default_rng(seed)
    n = N_TEXTS * N_ROWS
    rows = RowSample(
        (drawn.random((1, n * N_KEYS)) < 0.3).astype(np.uint8),
        np.array([2]),
        np.arange(n + 1) * N_KEYS,
        np.repeat(np.arange(N_TEXTS), N_ROWS),
        np.full((1, n * N_KEYS), 1 / N_KEYS),
        key_types=drawn.integers(0, N_TYPES, n * N_KEYS).astype(np.int32),
        query_types=drawn.integers(0, N_TYPES, n).astype(np.int32),
    )
    offsets = np.tile(np.arange(N_KEYS) - N_KEYS // 2, n).astype(np.int32)
    embeddings = drawn.normal(size=(N_TYPES, WIDTH)).astype(np.float32)
    occurrences = np.bincount(rows.key_types, minlength=N_TYPES)
    return rows, offsets, describe_types(embeddings, occurrences, np.zeros((N_TYPES, 0), np.float32))


def attending(rows, scores, noise, seed):
    """The attention of a head with some scores, (head 1, entry)."""
    raised = np.exp(scores + noise * np.random.default_rng(seed).normal(size=scores.shape))
    return (raised / np.repeat(np.add.reduceat(raised, rows.starts[:-1]), N_KEYS))[None]


def first_term(rows, offsets, x):
    """The values of the first term over (query, key) of the scored half, and the share that the terms explain there."""
    half = range(N_TEXTS // 2)
    rows = replace(rows, columns=fit_features(rows.select_texts(half), offsets, x))
    (found,) = find_terms(rows.select_texts(half), [5], max_terms=3)
    scored = rows.select_texts(range(N_TEXTS // 2, N_TEXTS))
    if not found.terms:
        return np.zeros(scored.size), score_description(scored, 0, found)[0].explained
    first = found.terms[0]
    return scored.by_entry(first, 0), score_description(scored, 0, found)[0].explained


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("is_pair", "correlation", "share"), [(False, 0.7, 0.4), (True, 0.6, 0.3)])
def test_tokens_and_pairs_of_classes_that_a_head_attends_to_are_found(is_pair, correlation, share, seed):
    rows, offsets, x = sample(seed)
    if is_pair:
        queries = x[:, 0] > 0.2  # classes that embeddings tell apart
        keys = x[:, 1] > 0.2
        planted = keys[rows.key_types] & np.repeat(queries[rows.query_types], N_KEYS)
    else:
        planted = np.isin(rows.key_types, np.random.default_rng(seed).choice(N_TYPES, 6, replace=False))
    rows = replace(rows, attention=attending(rows, 3.0 * planted, 0.5, seed))
    values, explained = first_term(rows, offsets, x)
    on = planted[rows.select_texts(range(N_TEXTS // 2, N_TEXTS)).entries]
    assert np.corrcoef(on, values)[0, 1] > correlation
    assert explained > share


@pytest.mark.parametrize("seed", range(4))
def test_of_noise_nothing_is_found(seed):
    rows, offsets, x = sample(seed)
    rows = replace(rows, attention=attending(rows, np.zeros(len(rows.key_types)), 2.0, seed))
    assert abs(first_term(rows, offsets, x)[1]) < 0.05


def test_directions_do_not_depend_on_which_heads_are_fitted_together():
    rows, offsets, x = sample(0)
    weights = [attending(rows, np.zeros(len(rows.key_types)), 1.0, seed)[0] for seed in range(3)]
    together = fit_features(
        replace(rows, attention=np.stack(weights)).select_texts(range(9)), offsets, x
    )[1]
    alone = fit_features(replace(rows, attention=weights[1][None]).select_texts(range(9)), offsets, x)[0]
    np.testing.assert_array_equal(alone[0].key_levels, together[0].key_levels)


@pytest.mark.parametrize(
    "texts",
    [["a", "b"], ["the the the", "the the"], ["the cat", "a dog"], ["the cat. the cat"], [". .", ", ,"]],
)
def test_texts_of_one_token_or_one_type_are_described_all_the_same(texts):
    found = attnscope.heads(attnscope.load("own"), texts, HeadsOptions(describe=DescribeOptions()))
    assert "failures" not in found.run


def test_levels_begin_at_the_quantiles_of_all_occurrences():
    drawn = np.random.default_rng(0)
    for n in (1, 2, 7, 40):
        scores = drawn.normal(size=n).astype(np.float32)
        occurrences = drawn.integers(0, 9, n)
        occurrences[0] += 1
        edges = np.unique(np.quantile(np.repeat(scores, occurrences), KEY_QUANTILES))
        levels, _ = quantise(scores, occurrences, KEY_QUANTILES)
        np.testing.assert_array_equal(levels, np.searchsorted(edges, scores, "right"))


def test_levels_are_the_same_whatever_rounding_does_to_equal_scores():
    scores = np.repeat(np.linspace(-2, 3, 13), 7).astype(np.float32)
    occurrences = np.arange(1, len(scores) + 1)
    cuts = (0.2, 0.5, 0.8)
    levels, values = quantise(scores, occurrences, cuts)
    assert len(values) == 4
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(scale=3e-7, size=len(scores)).astype(np.float32)
        again, values_again = quantise(scores + noise, occurrences, cuts)
        np.testing.assert_array_equal(again, levels)
        np.testing.assert_allclose(values_again, values, atol=1e-6)
