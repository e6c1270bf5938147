"""Descriptions of heads against their definitions in plain loops, against planted rules, and by simulation."""

import math

import numpy as np
import pytest
import torch

from attnscope.core.attention.row_samples import RowRecorder
from attnscope.core.attention.seam import AttentionCall, attention_weights
from attnscope.core.descriptions import (
    Description,
    compute_row_losses,
    find_terms,
    fit_weights,
    score_description,
    score_texts,
)
from attnscope.core.sampled_rows import RowSample

N_LEVELS = np.array([2, 2, 2, 2, 2, 2, 9, 2])
SIMPLICITY = list(range(8))
TWIN, OF_TWIN = 7, 1


def sample(n_texts=12, n_rows=9, seed=0, *, ragged=True):
    """Features of rows of different lengths; feature 7 is feature 1 again, and feature 6 goes up in steps."""
    drawn = np.random.default_rng(seed)
    lengths = drawn.integers(5, 31, n_texts * n_rows) if ragged else np.full(n_texts * n_rows, 20)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    share = np.array([0.05, 0.1, 0.2, 0.3, 0.5, 0.7])
    features = np.concatenate(
        [
            (drawn.random((6, starts[-1])) < share[:, None]).astype(np.uint8),
            drawn.integers(0, 9, (1, starts[-1])).astype(np.uint8),
            np.zeros((1, starts[-1]), np.uint8),
        ]
    )
    features[TWIN] = features[OF_TWIN]
    return features, starts, np.repeat(np.arange(n_texts), n_rows)


def rows_with(weights, features, starts, texts):
    """Rows of heads with these attention weights, (entry,) each."""
    return RowSample(features, N_LEVELS, starts, texts, np.stack(weights))


def attention_of(rule, features, starts, noise=0.0, seed=1):
    """The attention of a head that follows a rule, (entry,)."""
    drawn = np.random.default_rng(seed).normal(size=features.shape[1]) * noise
    scores = drawn + sum(w * features[f] / (N_LEVELS[f] - 1) for f, w in rule.items())
    weights = np.empty(features.shape[1])
    for start, stop in zip(starts[:-1], starts[1:], strict=True):
        shares = np.exp(scores[start:stop] - scores[start:stop].max())
        weights[start:stop] = shares / shares.sum()
    return weights


def kl_by_definition(weights, terms, rows, row):
    """KL of a row of attention to what terms say of it, key by key."""
    entries = range(rows.starts[row], rows.starts[row + 1])
    scores = np.zeros(len(entries))
    for f, w in terms.items():
        scores += [w * rows.features[f, e] / (rows.levels[f] - 1) for e in entries]
    z = sum(math.exp(s) for s in scores)
    total = 0.0
    for e, s in zip(entries, scores, strict=True):
        if weights[e] > 0:
            total += weights[e] * math.log(weights[e] / (math.exp(s) / z))
    return total


def test_the_loss_of_each_row_is_the_one_of_its_definition():
    features, starts, texts = sample()
    heads = [
        attention_of({0: 2.0, 6: 1.5}, features, starts, 0.7),
        attention_of({3: 1.0}, features, starts, 2.0),
    ]
    rows = rows_with(heads, features, starts, texts)
    terms = {2: 0.8, 6: -1.1, 0: 2.5}
    found = Description(tuple(terms), np.array(list(terms.values())), (), 1.0)
    part = rows.select_texts(range(3, 8))
    for head, weights in enumerate(heads):
        expected = [kl_by_definition(weights, terms, rows, row) for row in part.index]
        np.testing.assert_allclose(
            compute_row_losses(part, head, found), expected, rtol=1e-10, atol=1e-12
        )
        uniform = [kl_by_definition(weights, {}, rows, row) for row in part.index]
        np.testing.assert_allclose(part.uniform_nats[:, head], uniform, rtol=1e-10, atol=1e-12)


def test_the_share_of_a_feature_under_a_description_is_the_one_of_its_definition():
    features, starts, texts = sample(n_texts=3, n_rows=4)
    rows = rows_with([attention_of({0: 1.0}, features, starts)], features, starts, texts)
    part = rows.select_texts([0, 2])
    p = part.unnormalised_probabilities((3, 6), np.array([1.2, -0.4]), 0)
    mean = 0.0
    for row in part.index:
        by_key = [
            math.exp(1.2 * features[3, e] - 0.4 * features[6, e] / 8)
            for e in range(starts[row], starts[row + 1])
        ]
        on = sum(
            a * features[6, e] / 8
            for a, e in zip(by_key, range(starts[row], starts[row + 1]), strict=True)
        )
        mean += on / sum(by_key) / len(part.index)
    assert part.by_entry(6, 0) @ part.weight_rows(p, 0) == pytest.approx(mean, rel=1e-6)
    assert part.means(p[None], part.weights)[0, 6] == pytest.approx(mean, rel=1e-6)


def refit(rows, head, terms):
    attention = rows.weight_rows(rows.normalise_rows(head), head)
    expected = np.array([rows.by_entry(term, head) @ attention for term in terms])
    return fit_weights(rows.table(terms, head), expected, rows, head, np.zeros(len(terms)), 1e-7)


def test_a_refit_is_at_the_minimum():
    features, starts, texts = sample()
    heads = [attention_of({0: 2.0, 3: 1.5}, features, starts, 1.5)]
    rows = rows_with(heads, features, starts, texts)
    part = rows.select_texts(range(12))

    def mean_kl(weights):
        terms = dict(zip((0, 3), weights, strict=True))
        return float(
            part.weights[0] @ [kl_by_definition(heads[0], terms, rows, row) for row in part.index]
        )

    weights, left = refit(part, 0, (0, 3))
    assert left == pytest.approx(mean_kl(weights), rel=1e-8)
    for step in ([0.05, 0], [-0.05, 0], [0, 0.05], [0, -0.05]):
        assert mean_kl(weights + step) > left


@pytest.mark.parametrize("seed", range(4))
def test_planted_rules_are_found(seed):
    features, starts, texts = sample(n_texts=16, seed=seed)
    drawn = np.random.default_rng(seed)
    rules = [{int(f): 4.0} for f in drawn.permutation(6)[:3]]
    mixtures = []
    for _ in range(3):
        first, second = drawn.permutation(6)[:2]
        mixtures.append({int(first): 3.5, int(second): 2.5})
    heads = [attention_of(rule, features, starts, 0.4, seed) for rule in (*rules, *mixtures)]
    rows = rows_with(heads, features, starts, texts)
    found = find_terms(rows.select_texts(range(8)), SIMPLICITY)
    for head, rule in enumerate(rules):
        assert found[head].terms[0] in rule
    for head, rule in enumerate(mixtures, len(rules)):
        assert set(rule) <= set(found[head].terms)
    for head, one in enumerate(found):
        how, _ = score_description(rows.select_texts(range(8, 16)), head, one)
        assert how.low <= how.explained <= how.high
        assert how.explained > 0.6


def test_of_noise_nothing_is_explained_on_other_texts():
    features, starts, texts = sample(n_texts=30, seed=3)
    heads = [attention_of({}, features, starts, 2.0, seed) for seed in range(6)]
    rows = rows_with(heads, features, starts, texts)
    assert rows.select_texts(range(15)).mean_nats.min() > 0.8
    found = find_terms(rows.select_texts(range(15)), SIMPLICITY)
    for head, one in enumerate(found):
        assert abs(score_description(rows.select_texts(range(15, 30)), head, one)[0].explained) < 0.12


def test_texts_weigh_the_same_however_many_rows_they_have():
    features, starts, texts = sample(n_texts=6, n_rows=5)
    weights = attention_of({0: 2.0}, features, starts, 1.0)
    rows = rows_with([weights], features, starts, texts)
    # The rows of the last text come twice.
    again = np.concatenate([np.arange(30), np.arange(25, 30)])
    entries = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in again])
    more = RowSample(
        features[:, entries],
        N_LEVELS,
        np.concatenate([[0], np.cumsum(np.diff(starts)[again])]),
        texts[again],
        weights[None, entries],
    )
    one = rows.select_texts(range(6))
    other = more.select_texts(range(6))
    np.testing.assert_allclose(one.expected[0], other.expected[0], rtol=1e-12)
    even = [rows.by_entry(6, 0) @ rows.weight_rows(rows.counts, 0) for rows in (one, other)]
    assert even[0] == pytest.approx(even[1], rel=1e-6)
    np.testing.assert_allclose(refit(one, 0, (0, 2))[0], refit(other, 0, (0, 2))[0], rtol=1e-6)
    assert one.weights.sum() == pytest.approx(1)


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Texts differ in how sharp a head is on them, and in how well it is described.

    None is of a kind that the others do not show. The interval allows for such texts, so it holds the truth more often.
    """
    drawn = np.random.default_rng(7)
    n_held = 0
    n_samples = 1500
    true = 0.6
    widths = []
    for _ in range(n_samples):
        nats = drawn.gamma(6.0, 0.4, 27)
        left = nats * (1 - true) * drawn.gamma(8.0, 1 / 8, 27)
        how = score_texts(np.repeat(np.arange(27), 2), np.repeat(left, 2), np.repeat(nats, 2))
        n_held += how.low <= true <= how.high
        widths.append(how.high - how.low)
    assert n_held / n_samples >= 0.95
    assert np.median(widths) < 0.23  # r ± t·se: 0.11


def test_one_text_has_no_interval():
    how = score_texts(np.zeros(3, np.int64), np.full(3, 0.5), np.full(3, 2.0))
    assert how.explained == pytest.approx(0.75)
    assert math.isnan(how.low)


# The probe ------------------------------------------------------------------------------------------------------

BATCH, HEADS, KV, TOKENS, WIDTH = 2, 6, 3, 11, 5


def call_with(**more):
    torch.manual_seed(0)
    query = torch.randn(BATCH, HEADS, TOKENS, WIDTH)
    key, value = torch.randn(2, BATCH, KV, TOKENS, WIDTH)
    return AttentionCall(0, "decoder", query, key, value, 0.9, **more)


CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 4},
    "padded": {"mask": (torch.arange(TOKENS) < torch.tensor([[TOKENS], [7]]))[:, None, None]},
    "bias": {"bias": torch.randn(1, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(2))},
    "mask": {"mask": torch.rand(TOKENS, TOKENS, generator=torch.Generator().manual_seed(3)) > 0.3},
    "sinks": {"sinks": torch.linspace(-1, 2, HEADS)},
}


@pytest.mark.parametrize("name", CALLS)
def test_rows_are_those_of_the_whole_map(name):
    call = call_with(**CALLS[name])
    whole = attention_weights(call).double()
    lengths = (TOKENS, 7)
    queries = [np.array([1, 4, 10]), np.array([0, 6])]
    probe = RowRecorder([(queries[b], n) for b, n in enumerate(lengths)])
    output = probe(call)
    values = call.value.repeat_interleave(HEADS // KV, 1).double()
    torch.testing.assert_close(output.double(), whole @ values, rtol=1e-4, atol=1e-5)
    for b, n in enumerate(lengths):
        found = probe.rows[b]["decoder"]
        for row, q in enumerate(queries[b]):
            for head in range(HEADS):
                weights = whole[b, head, q, :n].numpy()
                if not weights.sum():
                    continue
                weights = weights / weights.sum()
                assert not weights[~found.allowed[0][row]].any()
                np.testing.assert_allclose(found.weights[0][row, head], weights, atol=1e-3)
