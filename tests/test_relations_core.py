"""Links between words: the rules of Clark et al. 2019 on weights made by hand, and against plain loops in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnscope.core import relations as core_relations
from attnscope.core.attention.seam import AttentionCall, attend, attention_weights
from attnscope.core.relations import LinkFacts, record_links, score_links
from tests.core_helpers import EXACT

# [CLS] un ##happy cats sleep [SEP]
UNITS = [-1, 0, 0, 1, 2, -1]
UNHAPPY = 0
CATS = 1
SLEEP = 2
WEIGHTS = [
    [1.00, 0.00, 0.00, 0.00, 0.00, 0.00],
    # un alone looks at sleep; with ##happy, (0.20 + 0.50) / 2 on cats wins.
    [0.50, 0.00, 0.00, 0.20, 0.30, 0.00],
    [0.10, 0.10, 0.10, 0.50, 0.10, 0.10],
    # 0.15 + 0.15 on unhappy beats 0.20 on sleep, and special tokens are out.
    [0.35, 0.15, 0.15, 0.05, 0.20, 0.10],
    [0.07, 0.10, 0.08, 0.15, 0.50, 0.10],  # the word itself is out: unhappy has 0.18
    [0.00, 0.00, 0.00, 0.00, 0.00, 1.00],
]


def facts_of(units, links):
    """Facts of links (text, source words, target words, cell)."""
    rows = {}
    for text, source, _, _ in sorted(links):
        rows.setdefault((text, tuple(source)), len(rows))
    numbers = torch.tensor
    return LinkFacts(
        word_of_token=numbers(units),
        row_text=numbers([text for text, _ in rows], dtype=torch.int64),
        pieces=numbers(
            [
                (row, k)
                for (text, own), row in rows.items()
                for k, unit in enumerate(units[text])
                if unit in own
            ],
            dtype=torch.int64,
        ).view(-1, 2),
        link_row=numbers([rows[text, tuple(source)] for text, source, _, _ in links], dtype=torch.int64),
        targets=numbers(
            [(i, unit) for i, (_, _, targets, _) in enumerate(links) for unit in targets],
            dtype=torch.int64,
        ).view(-1, 2),
        link_cell=numbers([cell for *_, cell in links], dtype=torch.int64),
        n_cells=max((cell for *_, cell in links), default=-1) + 1,
    )


def test_the_rules_counted_by_hand():
    links = [
        (0, [UNHAPPY], [CATS], 0),  # right, by the mean over its pieces: 0.35 on cats, 0.20 on sleep
        (0, [CATS], [UNHAPPY], 1),  # right, by the sum over the pieces of unhappy: 0.30
        (0, [CATS], [SLEEP], 2),  # wrong; mass 0.20
        (0, [SLEEP], [CATS], 3),  # wrong; mass 0.15
        (0, [SLEEP], [CATS, UNHAPPY], 4),  # right, as one of the two is; mass 0.15 + 0.18
        (0, [UNHAPPY], [SLEEP], 4),  # wrong; mass 0.20
        # right, as nothing else is left; mass (0.30 + 0.10 + 0.20) / 3.
        (0, [UNHAPPY, CATS], [SLEEP], 5),
    ]
    found = score_links(torch.tensor([[WEIGHTS]]), facts_of([UNITS], links))
    assert found[:, 0, 0].tolist() == [1, 1, 0, 0, 1, 1]
    assert found[:, 0, 1].tolist() == pytest.approx([0.35, 0.30, 0.20, 0.15, 0.53, 0.20])


def test_a_tie_is_shared_and_nothing_is_right_without_weight():
    even = torch.full((1, 1, 4, 4), 0.25)
    units = [[0, 1, 2, 3]]
    found = score_links(even, facts_of(units, [(0, [0], [1], 0), (0, [1], [0, 3], 1)]))
    assert found[:, 0, 0].tolist() == pytest.approx([1 / 3, 2 / 3])
    nothing = torch.zeros(1, 1, 4, 4)
    nothing[..., 0, 0] = 1
    found = score_links(nothing, facts_of(units, [(0, [0], [1], 0)]))
    assert found.tolist() == [[[0, 0]]]


# Plain loops ----------------------------------------------------------------------------------------------------


def by_loops(weights, units, links, n_cells):
    """Hits and mass, (cell, head), one number at a time."""
    n_heads = len(weights[0])
    hits, mass = np.zeros((2, n_cells, n_heads))
    for text, source, targets, cell in links:
        tokens = [k for k, unit in enumerate(units[text]) if unit in source]
        for head in range(n_heads):
            row = [
                sum(float(weights[text][head][q][k]) for q in tokens) / len(tokens)
                for k in range(len(units[text]))
            ]
            words = {}
            for k, unit in enumerate(units[text]):
                if unit >= 0:
                    words[unit] = words.get(unit, 0.0) + row[k]
            mass[cell, head] += sum(words[unit] for unit in targets)
            others = {unit: given for unit, given in words.items() if unit not in source}
            best = max(others.values())
            hits[cell, head] += best > 0 and any(others[unit] == best for unit in targets)
    return hits, mass


def made_up(seed, n_texts, length):
    """Units of texts of up to that length, with gaps and padding, and links between them."""
    chance = np.random.default_rng(seed)
    units = []
    links = []
    for text in range(n_texts):
        n = int(chance.integers(5, length + 1)) if text else length
        mine = [-1]
        unit = 0
        while len(mine) < n - 1:
            mine += [unit] * int(chance.integers(1, 4))
            unit += 1
            if chance.random() < 0.1:
                mine.append(-1)
        mine = [*mine[: n - 1], *[-1] * (length - n + 1)]
        n_units = max(mine) + 1
        if chance.random() < 0.3:  # words need not lie in one piece
            mine[1:n_units] = chance.permutation(mine[1:n_units]).tolist()
        units.append(mine)
        for _ in range(5 if n_units > 2 else 0):
            order = chance.permutation(n_units).tolist()
            n_source = int(chance.integers(1, 3)) if n_units > 3 else 1
            source = sorted(order[:n_source])
            links += [
                (
                    text,
                    source,
                    sorted(order[n_source : n_source + int(chance.integers(1, 3))]),
                    int(cell),
                )
                for cell in chance.integers(0, 4, 2)
            ]
    return units, links


def made_call(seed, units, causal):
    """Grouped queries; padding (what comes after the last word but one) is hidden."""
    generator = torch.Generator().manual_seed(seed)
    n_texts = len(units)
    n = len(units[0])
    query, key, value = (
        torch.randn(n_texts, heads, n, 5, generator=generator, dtype=torch.float64)
        for heads in (4, 2, 2)
    )
    mask = None
    if n_texts > 1:
        mask = torch.ones(n_texts, 1, 1, n, dtype=torch.bool)
        for text, mine in enumerate(units):
            mask[text, ..., max(k for k, unit in enumerate(mine) if unit >= 0) + 2 :] = False
    return AttentionCall(
        0, "decoder" if causal else "encoder", query, key, value, 0.6, mask=mask, is_causal=causal
    )


def require(found, expected):
    np.testing.assert_allclose(found.numpy(), np.stack(expected, -1), atol=1e-12)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    n_texts=st.integers(1, 4),
    length=st.sampled_from([7, 13, 29]),
    causal=st.booleans(),
    elements=st.sampled_from([40, 300, 10**6]),
)
def test_the_probe_is_what_plain_loops_give(seed, n_texts, length, causal, elements):
    units, links = made_up(seed, n_texts, length)
    call = made_call(seed, units, causal)
    facts = facts_of(units, links)
    expected = by_loops(attention_weights(call).double().tolist(), units, links, facts.n_cells)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(core_relations, "MAX_WEIGHTS_IN_MEMORY", elements)
        probe = record_links(facts)
        output = probe(call)
    torch.testing.assert_close(output, attend(call), **EXACT)
    require(probe.maps[call.kind][0], expected)
    require(score_links(attention_weights(call), facts), expected)
