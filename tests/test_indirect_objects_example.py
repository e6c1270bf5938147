"""What is known of minimal decoders for indirect objects holds of those that examples/indirect_objects.py trains.

One layer: a contrastive head beside an additive one. Two layers: layer 0 acts through the queries of layer 1 (Adhikari
2025). Not all seeds learn the task, nor all those that do by these heads: the counts are in docs/evidence/patching.md.
"""

from collections import Counter

import pytest
import torch

import attnscope
from attnscope.records.patch import Patching
from examples import indirect_objects

SEEDS = range(8)


def test_the_name_that_comes_once_is_right() -> None:
    every = indirect_objects.sentences().tolist()
    assert len(every) == 2 * 20 * 19 == len(set(map(tuple, every)))
    for *words, answer in every[::37]:
        assert Counter(words)[answer] == 1 and max(Counter(words).values()) == 2
    for question in ("again", "names"):
        for pair in indirect_objects.pairs(question, 5):
            clean, corrupt = pair["clean"].split(), pair["corrupt"].split()
            differ = [at for at in range(5) if clean[at] != corrupt[at]]
            counts, others = Counter(clean), Counter(corrupt)
            assert (counts[pair["right"]], others[pair["wrong"]]) == (1, 1)
            assert differ == [3] if question == "again" else len(differ) == 1 and counts[pair["wrong"]] == 0


def study(shape: tuple[int, int], seed: int) -> dict[str, Patching] | None:
    """What patching says of a seed, by question; None where it has not learned the task."""
    model, right = indirect_objects.Run(*shape, seed).train()
    options = attnscope.PatchOptions(paths=2)
    found = {
        question: attnscope.patch(model, list(indirect_objects.pairs(question)), options)
        for question in ("again", "names")
    }
    return found if right > 0.7 else None


@pytest.mark.slow
def test_one_layer_has_a_contrastive_head() -> None:
    """Effects add up. In half of the seeds that learn it or more, one head alone knows which name comes again."""
    torch.set_num_threads(1)
    learned = [found for seed in SEEDS if (found := study((1, 2), seed))]
    contrastive = 0
    for found in learned:
        shares = [head.effects["share"] for head in found["again"].heads]
        assert sum(share.value for share in shares) == pytest.approx(1, abs=1e-3)
        assert all(head.effects["effect"].low > 0 for head in found["names"].heads if head.effects["share"].value > 0.1)
        first, second = sorted(shares, key=lambda share: share.value)
        contrastive += first.high < 0.05 and first.low > -0.05 and second.low > 0.95
    assert len(learned) >= 4 and contrastive >= len(learned) / 2


@pytest.mark.slow
def test_two_layers_act_through_queries() -> None:
    """In most seeds layer 0 tells the queries of layer 1 which name comes again; layer 1 writes the answer in all."""
    torch.set_num_threads(1)
    learned = [found for seed in SEEDS if (found := study((2, 1), seed))]
    by_queries = 0
    for found in learned:
        edges = {(edge.receiver, edge.by): edge.share for edge in found["again"].edges if edge.sender == "L0H0"}
        writes = next(edge.share for edge in found["again"].edges if edge.sender == "L1H0")
        assert writes.low > 0.7
        by_queries += edges["L1H0", "query"].low > 0.7 and max(edges["L1H0", by].high for by in ("key", "value")) < 0.35
        names = {edge.by: edge.share for edge in found["names"].edges if edge.receiver == "L1H0"}
        assert names["value"].low > 0.5, "names go through values"
    assert len(learned) >= 6 and by_queries >= len(learned) / 2
