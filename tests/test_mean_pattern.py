"""The mean attention pattern: what its cells are, equal to plain loops, and the heads that it is exact for."""

from collections import defaultdict

import numpy as np
import pytest
import torch

import attnscope
from attnscope.core.attention.seam import AttentionCall, attention_weights
from attnscope.core.interventions.mean_pattern import (
    AHEAD,
    BACK,
    FIRST,
    LAST,
    N_CLASSES,
    MeanPattern,
    key_cells,
    pattern_scores,
)
from attnscope.studies.ablation.options import AblateOptions
from attnscope.studies.inputs.choice import Choice
from tests.ablation_helpers import wrapped

MASK = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]]).bool()
PLACE = ("encoder", 0)


def call_of(*, causal: bool) -> AttentionCall:
    chance = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 3, 7, 5, generator=chance).unbind()
    return AttentionCall(0, "encoder", query, key, value, scale=0.7, mask=MASK[:, None, None], is_causal=causal)


def test_keys_are_the_first_the_last_or_by_offset() -> None:
    seen = MASK[:1, None, None].expand(1, 1, 7, 7)
    cells = key_cells(seen)[0, 0]
    assert cells[2, :5].tolist() == [5 * N_CLASSES + at for at in (FIRST, BACK + 1, BACK, AHEAD + 1, LAST)]
    assert cells[4, 4] == 5 * N_CLASSES + BACK  # itself, as in a decoder
    assert key_cells(seen.tril())[0, 0, 2, :3].tolist() == [3 * N_CLASSES + at for at in (FIRST, BACK + 1, BACK)]
    left = key_cells(seen.flip(-1))[0, 0]
    assert left[5, 2:].tolist() == [5 * N_CLASSES + at for at in (FIRST, BACK + 2, BACK + 1, BACK, LAST)]


def test_far_offsets_and_many_keys_share_cells() -> None:
    cells = key_cells(torch.ones(1, 1, 300, 300, dtype=torch.bool).tril())[0, 0]
    assert cells[299, 1] == cells[299, 10] != cells[299, 200] and cells[299, 299] != cells[299, 298]
    assert cells[299, 0] == cells[290, 0] != cells[100, 0]


@pytest.mark.parametrize("causal", [False, True])
def test_scores_are_the_mean_weights_of_cells_by_plain_loops(causal: bool) -> None:
    call = call_of(causal=causal)
    probe = MeanPattern({"encoder": MASK})
    probe(call)
    weights, n_real = attention_weights(call), MASK.sum(1).tolist()
    seen = MASK[:, None, None].expand(2, 1, 7, 7)
    seen = seen.tril() if causal else seen
    for head in range(3):
        cells = defaultdict(list)

        def cell(text: int, q: int, k: int) -> tuple[int, object]:
            last = k == n_real[text] - 1 and k > q
            return int(seen[text, 0, q].sum()), "first" if k == 0 else "last" if last else k - q

        places = [(t, q, k) for t in range(2) for q in range(n_real[t]) for k in range(7) if seen[t, 0, q, k]]
        for text, q, k in places:
            cells[cell(text, q, k)].append(float(weights[text, head, q, k]))
        means = pattern_scores(probe.sums[PLACE][head], seen).exp()
        for text, q, k in places:
            assert float(means[text, 0, q, k]) == pytest.approx(np.mean(cells[cell(text, q, k)]), rel=1e-5)


def test_longer_texts_than_were_added_up_have_the_means_of_the_nearest() -> None:
    probe = MeanPattern()
    probe(call_of(causal=True))
    long = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    means = pattern_scores(probe.sums[PLACE][0], long).exp()[0, 0]
    assert means[39, 20] == means[30, 3] == means[6, 1] > 0
    assert means[39, 0] == means[6, 0] and means[39, 39] == means[6, 6]


def test_a_head_that_attends_by_place_alone_loses_nothing_by_its_mean_pattern() -> None:
    texts = [" ".join(["the cat sat on a mat"] * n) for n in range(1, 9)]
    picked = (0, 0), (0, 3), (0, 4)  # the previous token, the first token, the same token earlier
    options = AblateOptions(modes=("pattern",), choice=Choice(pick=picked))
    found = attnscope.ablate(attnscope.load("own-causal"), texts, options)
    previous, first, same = (head.effects["pattern_l2"].value for head in found.heads)
    assert max(previous, first) < 1e-6 < 0.01 < same
    assert "Mean patterns were fitted on 4 texts" in " ".join(found.run["notes"]) and found.corpus["n_texts"] == 4


def test_a_model_with_several_kinds_of_attention_gets_mean_patterns() -> None:
    texts = [" ".join(map(str, range(3 + n, 12 + n))) for n in range(6)]
    found = attnscope.ablate(wrapped("t5"), texts, AblateOptions(modes=("pattern",), loss="none", target="7 5"))
    assert all(0 <= head.effects["pattern_l2"].value < 2 for head in found.heads)
    assert {head.kind for head in found.heads} == {"encoder", "decoder", "cross"}
