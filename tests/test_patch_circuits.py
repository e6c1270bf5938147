"""Patching finds circuits that are known: a planted head, and the heads of examples/induction.py with their paths."""

import numpy as np
import pytest
import torch

import attnscope
from attnscope.models.hf.assembling import wrap
from examples import induction
from tests.test_patch import entries, gpt2, shown_by, strong


@pytest.mark.parametrize("seed", range(4))
def test_a_planted_head_alone_has_the_effect(seed):
    """One head's output is all that the model adds to embeddings, so it has all of the effect and others have none."""
    network = strong(gpt2(), seed)
    layer = seed % 2
    head = (3 * seed + 1) % 4
    with torch.no_grad():
        for number, block in enumerate(network.transformer.h):
            block.mlp.c_proj.weight.zero_()
            kept = block.attn.c_proj.weight[head * 5 : (head + 1) * 5].clone()
            block.attn.c_proj.weight.zero_()
            if number == layer:
                block.attn.c_proj.weight[head * 5 : (head + 1) * 5] = kept
    pairs = shown_by(network, entries(1000, seed=seed))
    found = attnscope.patch(wrap(network, name="planted", check=False), pairs)
    heads = found.table("heads")
    is_planted = np.array(found.head_names) == f"L{layer}H{head}"
    assert np.array_equal(heads["effect_low"] > 0, is_planted)
    assert heads["share"][is_planted] == pytest.approx(1, abs=1e-3)
    assert not heads["effect"][~is_planted].any()


def two_places(n, seed):
    """Words of examples/induction.py: A B … C D … A, and the same with A and C exchanged; B is right, D is wrong."""
    chance = np.random.default_rng(seed)
    made = []
    while len(made) < n:
        first, second, *others = chance.permutation(induction.WORDS).tolist()
        words = chance.choice(others, 14)
        one, other = chance.permutation(np.arange(1, 12, 2))[:2].tolist()
        if words[one + 1] != words[other + 1]:
            clean = words.tolist()
            corrupt = words.tolist()
            clean[one], clean[other] = corrupt[other], corrupt[one] = first, second
            texts = {"clean": [*clean, first], "corrupt": [*corrupt, first]}
            answers = {"right": int(words[one + 1]), "wrong": int(words[other + 1])}
            made.append({name: " ".join(map(str, text)) for name, text in texts.items()} | answers)
    return made


def induction_circuit(model, pairs):
    """Heads of layer 0 that attend to the token before, and heads of layer 1 whose last query attends to the answer.

    A fifth of the attention is the least: uniform attention gives less than a tenth to one token.
    """
    circuit = np.zeros((2, 2))
    for pair in pairs:
        before, after = attnscope.heatmap(model, pair["clean"]).maps[0].weights
        words = pair["clean"].split()
        circuit[0] += before.diagonal(-1, 1, 2).mean(1)
        circuit[1] += after[:, -1, words.index(words[-1]) + 1]
    return {f"L{layer}H{head}" for layer, head in np.argwhere(circuit > 0.2 * len(pairs))}


@pytest.mark.slow
def test_patching_finds_the_induction_circuit(tmp_path):
    """The heads of the circuit have effects above 0 and no other has; layer 1 reads layer 0 by its keys alone."""
    held = []
    for seed in range(20):
        folder = induction.Run(2, seed, tmp_path / str(seed), (induction.STEPS,)).train()
        model = attnscope.load(f"{folder}/checkpoint-{induction.STEPS}")
        pairs = two_places(100, seed)
        found = attnscope.patch(model, pairs, attnscope.PatchOptions(paths=4))
        circuit = induction_circuit(model, pairs[:40])
        paths = found.table("paths")
        names = np.array(found.head_names)
        paths = paths.select((paths["receiver"] != "logits") & (paths["share"] > 0.1))
        held.append(
            {*names[found["heads"]["effect_low"] > 0].tolist()} == circuit
            and {*paths["by"].tolist()} == {"key"}
            and {*paths["sender"].tolist(), *paths["receiver"].tolist()} <= circuit
        )
    assert sum(held) >= 19, held
