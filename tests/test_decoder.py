"""The decoder of examples/decoder.py is an ordinary torch module to train, and two ways lead from it to attnscope."""

import numpy as np
import pytest
import torch

import attnscope
from attnscope.core.attention.seam import attend
from attnscope.models import Batch
from examples.decoder import decoder, wrap

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and"]


def ids_of(*shape):
    return torch.randint(len(WORDS), shape, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    network = decoder(WORDS, n_layers=2, n_heads=3, d_model=18)
    return network.save(tmp_path_factory.mktemp("run") / "checkpoint-7")


@pytest.mark.parametrize("d_ff", [0, 7])
def test_what_is_saved_is_what_is_loaded(d_ff, tmp_path):
    network = decoder(WORDS, n_layers=2, n_heads=3, d_model=18, d_ff=d_ff, seed=3)
    model = attnscope.load(network.save(tmp_path / "model"))
    ids = ids_of(3, 11)
    with torch.inference_mode():
        expected = network(ids)
    torch.testing.assert_close(model.outputs(Batch(ids), attend).logits, expected, rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(wrap(network).outputs(Batch(ids), attend).logits, expected)
    ours = attnscope.heatmap(wrap(network), "the cat sat on a mat").weights
    theirs = attnscope.heatmap(model, "the cat sat on a mat").weights
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert model.tokenizer.encode("a cat sat").ids.tolist() == [4, 1, 2]


def test_the_sum_of_its_parts_is_what_it_computes():
    """The formula of its documentation in plain tensors, rotary positions as complex numbers."""
    network = decoder(WORDS, n_layers=2, n_heads=3, d_model=18, d_ff=7, seed=1).double()
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(
                torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())) / 4
            )
    ids = ids_of(1, 9)
    n = 9
    width = 6
    speeds = 10_000.0 ** (-torch.arange(3, dtype=torch.float64) / 3)
    turns = torch.polar(
        torch.ones(n, 3, dtype=torch.float64), torch.outer(torch.arange(n).double(), speeds)
    )

    def rotate(rows):
        turned = torch.complex(rows[:, :3], rows[:, 3:]) * turns
        return torch.cat((turned.real, turned.imag), 1)

    with torch.no_grad():
        # (token, d_model), to which each layer adds its heads and its two linear maps.
        stream = network.embed.weight[ids[0]]
        for layer in network.layers:
            given = layer.attention_norm(stream)
            a = layer.attention
            heads = []
            for h in range(3):
                rows = slice(h * width, (h + 1) * width)
                q = given @ a.q_proj.weight[rows].T
                k = given @ a.k_proj.weight[rows].T
                v = given @ a.v_proj.weight[rows].T
                scores = rotate(q) @ rotate(k).T / width**0.5
                heads.append(
                    scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(1) @ v
                )
            stream = stream + torch.cat(heads, 1) @ a.out_proj.weight.T
            inner = torch.nn.functional.gelu(layer.norm(stream) @ layer.up.weight.T + layer.up.bias)
            stream = stream + inner @ layer.down.weight.T + layer.down.bias
        expected = network.norm(stream) @ network.unembed.weight.T
        torch.testing.assert_close(network(ids)[0], expected, rtol=1e-12, atol=1e-12)


def test_it_is_trained_like_any_module_and_a_wrapped_one_is_a_copy():
    network = decoder(WORDS, n_layers=1, n_heads=1, d_model=16)
    model = wrap(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    ids = ids_of(4, 12)
    before = model.outputs(Batch(ids), attend).logits
    losses = []
    for _ in range(60):
        logits = network(ids)[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert torch.equal(model.outputs(Batch(ids), attend).logits, before)
    assert not torch.equal(wrap(network).outputs(Batch(ids), attend).logits, before)


def test_commands_take_its_folder(folder, run, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("the cat sat on a mat\na mat and the cat\nthe mat sat on the cat and the mat sat\n")
    status, out, err = run("heads", "--file", texts, "-m", folder, "-q")
    assert (status, bool(out), err) == (0, True, "")


def test_its_heads_are_taken_out_at_the_seam():
    texts = ["the cat sat on a mat", "a mat and the cat sat on the mat"]
    model = wrap(decoder(WORDS, n_layers=2, n_heads=3, d_model=18))
    found = attnscope.ablate(model, texts, attnscope.AblateOptions(modes=("zero",)))
    network = model.network
    sums = np.zeros(2)
    weight = network.layers[1].attention.out_proj.weight
    for changed in (False, True):
        with torch.no_grad():
            if changed:
                weight[:, 6:12] = 0  # what L1H1 writes
            for text in texts:
                ids = torch.from_numpy(model.tokenizer.encode(text).ids)[None]
                logits = network(ids)[0, :-1]
                sums[int(changed)] += torch.nn.functional.cross_entropy(
                    logits, ids[0, 1:], reduction="sum"
                ).item()
    effect = found["heads"]["zero_loss"][found.head_names.index("L1H1")]
    assert effect == pytest.approx((sums[1] - sums[0]) / 13, abs=1e-6)
