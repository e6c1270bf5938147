"""attnscope's own decoder is an ordinary torch module to train, and an ordinary model once it is saved."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import attnscope
from attnscope.core.attention.seam import attend
from attnscope.errors import AttnscopeError
from attnscope.models import Batch, describe, load
from tests.conftest import Run

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and"]
SHAPES = {
    "rotary": {"n_layers": 2, "n_heads": 3, "d_model": 18},
    "learned": {"n_layers": 1, "n_heads": 2, "d_model": 10, "positions": "learned", "max_tokens": 11},
    "mlp": {"n_layers": 2, "n_heads": 1, "d_model": 6, "d_ff": 13, "norm": False, "positions": "none"},
}


def ids_of(*shape: int) -> torch.Tensor:
    return torch.randint(len(WORDS), shape, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return attnscope.own_decoder(WORDS, **SHAPES["rotary"]).save(tmp_path / "run" / "checkpoint-7")


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_saved_is_what_is_loaded(name: str, dtype: str, tmp_path: Path) -> None:
    network = attnscope.own_decoder(WORDS, **SHAPES[name], seed=3)
    model = load(network.save(tmp_path / "model"), dtype=dtype)
    ids = ids_of(3, 11)
    with torch.inference_mode():
        expected = network.to(getattr(torch, dtype))(ids)
        found = model.outputs(Batch(ids), attend)
    assert torch.equal(found.logits, expected)
    assert model.info.n_parameters == sum(weight.numel() for weight in network.parameters())
    assert (model.info.architecture, model.info.kinds, model.loss) == ("attnscope-decoder", ("decoder",), "causal")
    known, tokenizer = describe(str(tmp_path / "model"))
    assert (known.sha256, known.n_parameters) == (model.info.sha256, model.info.n_parameters)
    assert tokenizer.encode("a cat sat").ids.tolist() == [4, 1, 2]


def test_the_sum_of_its_parts_is_what_it_computes() -> None:
    """The formula of its documentation in plain tensors, rotary positions as complex numbers."""
    network = attnscope.own_decoder(WORDS, n_layers=2, n_heads=3, d_model=18, d_ff=7, seed=1).double()
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())) / 4)
    ids, n, width = ids_of(1, 9), 9, 6
    speeds = 10_000.0 ** (-torch.arange(3, dtype=torch.float64) / 3)
    turns = torch.polar(torch.ones(n, 3, dtype=torch.float64), torch.outer(torch.arange(n).double(), speeds))

    def rotate(rows: torch.Tensor) -> torch.Tensor:
        turned = torch.complex(rows[:, :3], rows[:, 3:]) * turns
        return torch.cat((turned.real, turned.imag), 1)

    with torch.no_grad():
        stream = network.embed.weight[ids[0]]
        for layer in network.layers:
            given, a = layer.attention_norm(stream), layer.attention
            heads = []
            for h in range(3):
                rows = slice(h * width, (h + 1) * width)
                q, k, v = (given @ part.weight[rows].T for part in (a.q_proj, a.k_proj, a.v_proj))
                scores = rotate(q) @ rotate(k).T / width**0.5
                heads.append(scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(1) @ v)
            stream = stream + torch.cat(heads, 1) @ a.out_proj.weight.T
            inner = torch.nn.functional.gelu(layer.norm(stream) @ layer.up.weight.T + layer.up.bias)
            stream = stream + inner @ layer.down.weight.T + layer.down.bias
        expected = network.norm(stream) @ network.unembed.weight.T
        torch.testing.assert_close(network(ids)[0], expected, rtol=1e-12, atol=1e-12)


def test_padding_changes_nothing_before_it() -> None:
    network = attnscope.own_decoder(WORDS, **SHAPES["learned"])
    ids, mask = ids_of(2, 8), torch.ones(2, 8, dtype=torch.bool)
    mask[1, 5:] = False
    with torch.no_grad():
        torch.testing.assert_close(network(ids, mask)[1, :5], network(ids[1:, :5])[0], rtol=1e-5, atol=1e-5)


def test_it_is_trained_like_any_module_and_the_model_in_memory_is_a_copy() -> None:
    network = attnscope.own_decoder(WORDS, n_layers=1, n_heads=1, d_model=16)
    model = attnscope.load(network)
    optimizer, ids = torch.optim.Adam(network.parameters(), lr=0.02), ids_of(4, 12)
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
    assert not torch.equal(attnscope.load(network).outputs(Batch(ids), attend).logits, before)


def test_weights_come_of_the_seed_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    first, second, other = (attnscope.own_decoder(5, d_model=8, n_heads=2, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first.embed.weight, second.embed.weight)
    assert not torch.equal(first.embed.weight, other.embed.weight)
    model = attnscope.load(first)
    assert torch.equal(model.untrained(2).network.embed.weight, other.embed.weight)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"n_heads": 5}, "d_model 64 is no multiple of the 5 heads"),
        ({"n_layers": 0}, "n_layers is 0, but must be at least 1"),
        ({"positions": "alibi"}, "there are no positions 'alibi'"),
        ({"positions": "learned"}, "learned positions need max_tokens"),
        ({"d_model": 12, "n_heads": 4}, "rotary positions turn pairs of columns, and a head has 3"),
        ({"vocabulary": ["a", "b", "a"]}, "'a' is twice in the vocabulary"),
        ({"vocabulary": ["a b"]}, "'a b' is no word"),
        ({"vocabulary": []}, "the vocabulary is empty"),
        ({"d_ff": -1}, "d_ff is -1"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict, told: str) -> None:
    with pytest.raises(AttnscopeError, match=told):
        attnscope.own_decoder(**{"vocabulary": 5} | changes)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda f: (f / "model.safetensors").write_bytes(b"{}"), "damaged or cut short"),
        (lambda f: edit(f, n_layers=3), "lacks 6 of 22 tensors, such as layers.2.attention_norm.weight"),
        (lambda f: edit(f, d_model=24), "has shape"),
        (lambda f: edit(f, n_heads="3"), "n_heads is '3'"),
        (lambda f: edit(f, n_heads=None), "does not say n_heads"),
        (lambda f: (f / "tokenizer.json").unlink(), "holds no tokenizer.json"),
    ],
)
def test_damaged_folders_are_refused_in_one_line(damage, told: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(AttnscopeError, match=told):
        load(folder)


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    dropped = {name for name, value in changes.items() if value is None}
    path.write_text(json.dumps({name: value for name, value in config.items() if name not in dropped}))


@pytest.mark.parametrize("engine", ["hf", "numpy"])
def test_other_engines_do_not_run_it(engine: str, folder: Path) -> None:
    with pytest.raises(AttnscopeError, match=f"the {engine} engine does not run checkpoint-7: it is attnscope's own"):
        load(folder, engine=engine)


def test_every_command_takes_its_folder(folder: Path, run: Run, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("the cat sat on a mat\na mat and the cat\nthe mat sat on the cat and the mat sat\n")
    beside = ("-m", folder, "-q")
    commands = (
        ("info", folder),
        ("heatmap", "the cat sat on the cat", *beside, "-o", "maps"),
        ("heads", "--file", texts, "--split", "line", *beside, "--control", "untrained", "-o", "heads"),
        ("heads", "--probe", "repeat", *beside),
        ("ablate", "--file", texts, *beside, "--importance"),
        ("compare", "--file", texts, *beside),
        ("rollout", "the cat sat", *beside),
        ("trace", "the cat sat", *beside, "-L", 1, "-H", 2),
        ("page", "the cat sat", *beside, "-o", "page.html"),
    )
    for command in commands:
        status, out, err = run(*command)
        assert (status, bool(out), err) == (0, True, ""), (command, err)
    found = attnscope.load_record("heads/heads.npz")
    assert len(found.heads) == 6
    status, _, err = run("heatmap", "the dog sat", *beside)
    assert status == 1
    assert err.startswith("error: 'dog' is none of the 7 words that this model knows\nhint: its words, with blanks")


def test_its_heads_are_taken_out_at_the_seam(folder: Path) -> None:
    texts = ["the cat sat on a mat", "a mat and the cat sat on the mat"]
    model = load(folder)
    found = attnscope.ablate(model, texts, attnscope.AblateOptions(modes=("zero",)))
    network, sums = model.network, np.zeros(2)
    weight = network.layers[1].attention.out_proj.weight
    for changed in (False, True):
        with torch.no_grad():
            if changed:
                weight[:, 6:12] = 0  # what L1H1 writes
            for text in texts:
                ids = torch.from_numpy(model.tokenizer.encode(text).ids)[None]
                logits = network(ids)[0, :-1]
                sums[int(changed)] += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
    effect = next(head for head in found.heads if head.name == "L1H1").effects["zero_loss"]
    assert effect.value == pytest.approx((sums[1] - sums[0]) / 13, abs=1e-6)


def test_rotary_positions_are_followed_step_by_step(folder: Path) -> None:
    record = attnscope.trace(load(folder), "the cat sat on a mat", 1, 2)
    assert any("otary" in step.title for step in record.steps)
