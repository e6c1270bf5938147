"""Tallies against plain loops: what a fixed offset hits, and sums in any order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from attnscope.studies.heads.measuring import OFFSETS, PAIR_MEASURES, Tally, pair_hits


def plain_hits(ids, causal, context):
    """The definition: which queries have a key of a pair measure on the side of an offset, and which at the offset."""
    n = len(ids)
    hits, counts = np.zeros((2, len(PAIR_MEASURES), len(OFFSETS)))
    for q in (q for q in range(n) if not context[q]):
        allowed = range(q + 1) if causal else range(n)
        same = {k for k in allowed if k != q and ids[k] == ids[q]}
        followed = {j + 1 for j in range(q) if ids[j] == ids[q] and j + 1 != q}
        for row, keys in enumerate((same, followed)):
            for column, offset in enumerate(OFFSETS):
                counts[row, column] += any((k - q) * offset > 0 for k in keys)
                hits[row, column] += q + offset in keys
    return hits, counts


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=24), st.booleans())
def test_hits_of_fixed_offsets_are_those_of_the_definition(tokens, causal):
    ids, context = [number for number, _ in tokens], [before for _, before in tokens]
    hits, counts = pair_hits(np.array(ids), causal=causal, context=np.array(context))
    expected = plain_hits(ids, causal, context)
    np.testing.assert_array_equal(hits, expected[0])
    np.testing.assert_array_equal(counts, expected[1])


def filled(seed, n=7):
    """A tally of random texts."""
    chance = np.random.default_rng(seed)
    tally = Tally.empty("encoder", (0, 2), 3, ("a", "b_active"))
    for part in (tally.measures, tally.uniform, tally.pairs):
        part.add(chance.normal(size=(n, *part.shape)), chance.random((n, *part.shape)))
    return tally


def test_merging_is_adding_in_any_order():
    a, b, c = (filled(seed, n) for seed, n in ((1, 1), (2, 5), (3, 2)))
    one, other = a.merge(b).merge(c), c.merge(a.merge(b))
    for part in ("measures", "uniform", "pairs", "lengths"):
        ours, theirs = getattr(one, part), getattr(other, part)
        np.testing.assert_allclose(ours.moments, theirs.moments, rtol=1e-12, atol=1e-14)
        assert ours.n_texts == theirs.n_texts
    assert one.n_texts == 8
