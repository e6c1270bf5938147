"""Tallies against plain loops: what a fixed offset hits, and sums in any order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from attnscope.studies.heads.measuring import OFFSETS, PAIR_MEASURES, count_offset_hits


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
    ids = [number for number, _ in tokens]
    context = [before for _, before in tokens]
    hits, counts = count_offset_hits(np.array(ids), causal=causal, context=np.array(context))
    expected = plain_hits(ids, causal, context)
    np.testing.assert_array_equal(hits, expected[0])
    np.testing.assert_array_equal(counts, expected[1])
