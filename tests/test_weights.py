"""What weights say: against dense matrices by NumPy, against planted heads, against random matrices."""

import math
from itertools import product

import numpy as np
import pytest
import torch

import attnscope
from attnscope.core import weights as core
from attnscope.questions.weights import (
    INPUT_LETTERS,
    WeightsOptions,
    composition_variance,
    expected_composition,
)
from tests.conftest import write_tiny
from tests.test_stream import random_model


def found(source, seed=0):
    return attnscope.weights(attnscope.load(source), WeightsOptions(seed=seed))


# Against dense matrices -------------------------------------------------------------------------------------------


def dense(source, layer, head, n_heads, n_kv_heads):
    """W_Q, W_K, W_V, W_O of a Llama by the names of its parts, RMSNorm folded, float64."""
    part = source.model.layers[layer]
    gain = part.input_layernorm.weight.detach().double().numpy()
    d_head = 4
    group = n_heads // n_kv_heads

    def rows(name, number):
        weight = getattr(part.self_attn, f"{name}_proj").weight.detach().double().numpy()
        return weight[number * d_head : (number + 1) * d_head] * gain

    out = part.self_attn.o_proj.weight.detach().double().numpy()[:, head * d_head : (head + 1) * d_head]
    return {"Q": rows("q", head), "K": rows("k", head // group), "V": rows("v", head // group), "O": out}


def test_scores_and_composition_are_those_of_whole_matrices_with_grouped_queries():
    source = random_model("llama", tie_word_embeddings=False)
    got = found(source)
    embeddings = source.model.embed_tokens.weight.detach().double().numpy()
    unembedding = (
        source.lm_head.weight.detach().double().numpy()
        * source.model.norm.weight.detach().double().numpy()
    )
    unembedding = unembedding - unembedding.mean(0)
    heads = [dense(source, layer, head, 6, 2) for layer, head in product(range(2), range(6))]

    def score(matrix):
        values = np.linalg.eigvals(matrix)
        return float(values.sum().real / np.abs(values).sum())

    for place, parts in enumerate(heads):
        copying = unembedding @ parts["O"] @ parts["V"] @ embeddings.T  # (vocabulary, vocabulary)
        matching = embeddings @ parts["Q"].T @ parts["K"] @ embeddings.T
        matching = matching - matching.mean(1, keepdims=True)
        assert got["heads"]["copying"][place] == pytest.approx(score(copying), abs=1e-5)
        assert got["heads"]["matching"][place] == pytest.approx(score(matching), abs=1e-5)
    for sender, receiver in product(range(6), range(6, 12)):
        wrote = heads[sender]["O"] @ heads[sender]["V"]
        reads = heads[receiver]
        scores = reads["Q"].T @ reads["K"]
        pairs = {"Q": (scores.T, wrote), "K": (scores, wrote), "V": (reads["O"] @ reads["V"], wrote)}
        for by, (x, y) in pairs.items():
            share = np.linalg.norm(x @ y) / np.linalg.norm(x) / np.linalg.norm(y)
            assert got["composition"][INPUT_LETTERS.index(by), sender, receiver] == pytest.approx(
                share, abs=1e-6
            )
    assert np.isnan(got["composition"][:, 6:, 6:]).all()
    assert np.isnan(got["composition"][:, :6, :6]).all()


def test_layer_norms_are_folded_and_what_they_take_away_is_left_out():
    """Of GPT-2, whose norms centre: what a head writes along the mean is read by none."""
    source = random_model("gpt2")
    got = found(source)
    assert got.options["dimension"] == 23
    parts = source.transformer.h
    centre = np.eye(24) - 1 / 24

    def matrices(layer, head):
        gain = parts[layer].ln_1.weight.detach().double().numpy()
        fused = parts[layer].attn.c_attn.weight.detach().double().numpy().T
        own = [fused[i * 24 + head * 4 : i * 24 + head * 4 + 4] * gain @ centre for i in range(3)]
        return own, centre @ parts[layer].attn.c_proj.weight.detach().double().numpy().T[
            :, head * 4 : head * 4 + 4
        ]

    (_, _, value), out = matrices(0, 1)
    (query, key, _), _ = matrices(1, 2)
    x = query.T @ key
    y = out @ value
    share = np.linalg.norm(x @ y) / np.linalg.norm(x) / np.linalg.norm(y)
    assert got["composition"][1, 1, 8] == pytest.approx(share, abs=1e-6)
    embeddings = source.transformer.wte.weight.detach().double().numpy()
    gain = source.transformer.ln_f.weight.detach().double().numpy()
    logits = embeddings * gain @ centre
    values = np.linalg.eigvals((logits - logits.mean(0)) @ out @ value @ embeddings.T)
    assert got["heads"]["copying"][1] == pytest.approx(
        float(values.sum().real / np.abs(values).sum()), abs=1e-5
    )


# Planted ----------------------------------------------------------------------------------------------------------


def planted():
    """A Llama whose L0H0 copies, whose L0H1 takes away, and whose L1H2 reads by its keys what L0H3 writes."""
    source = random_model("llama", num_key_value_heads=6, tie_word_embeddings=True, attention_bias=False)
    first, second = (layer.self_attn for layer in source.model.layers)
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in source.model.layers:
            layer.input_layernorm.weight.fill_(1)
        source.model.norm.weight.fill_(1)
        for head, sign in ((0, 1.0), (1, -1.0)):
            rows = slice(head * 4, head * 4 + 4)
            first.o_proj.weight[:, rows] = sign * first.v_proj.weight[rows].T
        slot = torch.linalg.qr(torch.randn(24, 4, generator=chance)).Q
        first.o_proj.weight[:, 12:16] = slot
        second.k_proj.weight[8:12] = slot.T
    return source


def test_planted_heads_are_found():
    got = found(planted())
    assert got["heads"]["copying"][:2] == pytest.approx([1, -1], abs=1e-6)
    assert got.is_outside("copying")[:2].all()
    best, next_best = got.strongest("K", 2)
    assert [got.head_names[row] for row in best] == ["L0H3", "L1H2"]
    assert got.excess[1][best] > 2 * got.excess[1][next_best]
    assert (3, 8) not in [*got.strongest("Q", 2), *got.strongest("V", 2)]


def test_a_head_that_copies_writes_what_it_reads():
    directions = found(planted()).table("directions")
    copies, takes_away = (
        directions.select((directions["head"] == head) & (directions["of"] == "writes"))
        for head in (0, 1)
    )
    for source, target in zip(copies["source"], copies["target"], strict=True):
        assert source.split()[0] in target.split()
    assert ((copies["share"][::2] > 0) & (copies["share"][::2] <= 1)).all()
    assert np.isnan(copies["share"][1::2]).all()
    assert takes_away["source"][0].split()[0] in takes_away["target"][1].split()


def test_the_glass_box_s_induction_head_reads_what_its_previous_token_head_writes():
    got = found("own")
    best, second = got.strongest("K", 2)
    assert [got.head_names[row] for row in best] == ["L0H0", "L1H1"]
    assert got["composition"][1][best] > 0
    assert got["composition"][1][second] == 0
    heads = got.table("heads")
    names = np.array(got.head_names)
    assert names[heads["previous"] > 0.99].tolist() == ["L0H0", "L1H0"]
    assert heads["next"][1] > 0.99
    assert heads["same"][2] > 0.99
    assert heads["first"][3] > 0.99
    assert math.isnan(heads["copying"][0])
    assert not got.is_outside("copying")[0]


def test_minilm_s_previous_token_head_is_one_by_places_alone(minilm_folder):
    got = found(str(minilm_folder))
    assert got.options["places"] == "in the stream"
    assert got.options["ends"] == "static embeddings"
    previous = got["heads"]["previous"]
    assert got.head_names[previous.argmax()] == "L0H2"
    assert previous.max() > 0.99
    assert any("post-norm" in note for note in got.run["notes"])


# Random matrices --------------------------------------------------------------------------------------------------


def test_what_random_directions_have_is_what_they_have_drawn():
    d = 13
    k = 3
    n = 4000
    chance = torch.Generator().manual_seed(0)
    left = (
        torch.randn(1, k, d, generator=chance, dtype=torch.float64)
        * torch.tensor([3.0, 1, 0.2])[:, None]
    )
    right = torch.randn(1, d, k, generator=chance, dtype=torch.float64) * torch.tensor([2.0, 1, 1])
    received = core.concentration(left).expand(3).reshape(3, 1).numpy()
    spreads = core.concentration(right).numpy(), received, d
    turned = core.random_rows(n, d, d, 5)
    drawn = (
        torch.linalg.matrix_norm(left @ turned @ right).squeeze()
        / torch.linalg.matrix_norm(left)
        / torch.linalg.matrix_norm(right)
    ).numpy()
    squared = drawn**2
    assert squared.mean() == pytest.approx(1 / d, abs=4 * squared.std() / math.sqrt(n))
    assert squared.var() * d**2 == pytest.approx(
        float(composition_variance(*spreads)[0, 0, 0]), rel=0.15
    )
    assert drawn.mean() == pytest.approx(float(expected_composition(*spreads)[0, 0, 0]), rel=0.02)


def test_singular_directions_are_those_of_the_whole_matrix():
    chance = torch.Generator().manual_seed(3)
    left = torch.randn(2, 11, 3, generator=chance)
    right = torch.randn(2, 3, 11, generator=chance)
    whole = left.double() @ right.double()
    given, read, share = core.singular_directions(left[0], right[0], 2)
    u, s, vh = torch.linalg.svd(whole[0])
    torch.testing.assert_close(
        (given @ u[:, :2]).abs(), torch.eye(2, dtype=torch.float64), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(
        (read @ vh[:2].T).abs(), torch.eye(2, dtype=torch.float64), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(share, s[:2] ** 2 / (s**2).sum())
    assert math.isnan(float(core.eigenvalue_score(torch.zeros(3, 3))))


# What a user sees -------------------------------------------------------------------------------------------------


def test_the_command_tells_of_all_heads_or_of_picked_ones(run, tmp_path):
    folder = write_tiny(tmp_path / "bert")
    told = ("weights", "-m", folder, "-q")
    status, out, err = run(*told, "-o", tmp_path / "out", "-f", "npz,csv,png,svg")
    assert status == 0, err
    names = {path.name for path in (tmp_path / "out").iterdir()}
    stems = ("weights-heads", "weights-graph")
    assert names == {
        "weights.npz",
        "weights.csv",
        *(f"{stem}.{end}" for stem in stems for end in ("png", "svg")),
    }
    assert "only a proxy" in " ".join(out.split()), "an encoder"
    assert "heads that copy" not in out
    assert len((tmp_path / "out" / "weights.csv").read_text("utf-8").splitlines()) == 1 + 6
    status, out, err = run("show", tmp_path / "out" / "weights.npz", "--pick", "L1H2", "-q")
    assert status == 0
    assert "L1H2" in out
    assert "reads from" in out
    assert run(*told, "--pick", "L7H0")[0] == 2
    status, out, _ = run(*told, "--json")
    assert status == 0
    assert '"schema": "attnscope.weights/2"' in out
