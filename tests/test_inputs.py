"""Inputs that only the user can make: refused types and any torch module, each held against the model."""

import copy
import inspect
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attnscope
from attnscope.core.attention.probes import WeightsRecorder
from attnscope.errors import AttnscopeError
from attnscope.studies.inputs.texts import batch_of
from tests.input_cases import CASES

EXAMPLES = Path(__file__).parents[1] / "examples" / "inputs"
FAST = ("time_series_transformer", "blip_2_qformer", "vit_mae")


def load(model, inputs, labels=None):
    return attnscope.load(model, inputs=inputs, labels=labels)


def maps_of(model):
    """The weights of all sequences of the first pass, by layer, (sequence, head, query, key)."""
    probe = WeightsRecorder()
    model.run(batch_of([model.tokenizer.encode(text) for text in model.texts]), probe)
    return list(probe.maps[model.info.kinds[0]].values())  # type: ignore[index]


def own_maps(model, inputs):
    """What a model of transformers built for eager attention gives out itself; empty where it gives out none."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    twin = type(model)(config).eval()
    twin.load_state_dict(model.state_dict())
    torch.manual_seed(0)
    with torch.no_grad():
        output = twin(**inputs, output_attentions=True)
    found = getattr(output, "encoder_attentions", None) or getattr(output, "attentions", None) or ()
    return list(found)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
@torch.random.fork_rng(devices=[])
def test_refused_types_run_with_inputs_and_equal_their_own_eager_attention(name):
    torch.manual_seed(0)
    model, inputs = CASES[name]()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    assert len(inspect.getsource(CASES[name]).splitlines()) <= 30
    with pytest.raises(AttnscopeError):
        attnscope.load(model.eval())  # type: ignore[arg-type]
    loaded = load(model, inputs)
    assert loaded.info.checked
    assert loaded.info.n_layers == (2,)
    ours = maps_of(loaded)
    shape = ours[0].shape
    theirs = [
        weights.reshape(shape) for weights in own_maps(model, inputs) if weights.numel() == shape.numel()
    ]
    for own, other in zip(ours, theirs or ours, strict=True):
        np.testing.assert_allclose(own, other, atol=2e-6)
    assert bool(theirs) or name in ("qwen2_5_vl_vision", "qwen3_vl_vision", "glm4v_vision")


class Attention(nn.Module):
    """Attention of a kind that its subclass computes, on what the whole module is given, (batch, position, 8)."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        query, key, value = (
            part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        return self.out(self.attend(query, key, value).transpose(1, 2).flatten(2))

    def attend(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3)


class ByHand(Attention):
    def attend(self, query, key, value):
        return (query @ key.mT).softmax(-1) @ value


class Dropping(Attention):
    def attend(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)


class Strings(Attention):
    def forward(self, x):
        super().forward(x)
        return {"label": "cat"}


class Draws(Attention):
    def forward(self, x):
        return super().forward(x + torch.randn(8))


class PutsOutNothing(Attention):
    def forward(self, x):
        return super().forward(x)[:0]


X = torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(0))


def test_maps_of_any_module_are_softmax_weights_of_what_it_passes():
    module = Attention()
    loaded = load(module, X, (2, 3))
    query, key, _ = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in module.qkv(X).chunk(3, -1))
    scores = (0.3 * query @ key.mT).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(maps_of(loaded)[0], scores.softmax(-1).detach())
    assert loaded.info.kinds == ("decoder",)
    assert loaded.info.engine == "torch"
    assert loaded.tokenizer.encode("1").labels == ("0,0", "0,1", "0,2", "1,0", "1,1", "1,2")


@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_is_seen_off_its_fast_path_and_left_as_it_was(batch_first):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train()
    x = X if batch_first else X.transpose(0, 1)
    hidden = torch.zeros(5, 6, dtype=torch.bool)
    hidden[:, 5] = True
    loaded = load(module, {"src": x, "src_key_padding_mask": hidden})
    assert module.training
    assert not module.layers[0]._forward_hooks
    assert all(p.requires_grad for p in module.parameters())
    assert "layers.0.self_attn, layers.1.self_attn" in loaded.info.notes[0]
    first = module.eval().layers[0].self_attn
    with torch.no_grad():
        _, expected = first(x, x, x, hidden, average_attn_weights=False)
    torch.testing.assert_close(maps_of(loaded)[0], expected)
    with pytest.raises(AttnscopeError, match="no more is known of it than its attention"):
        attnscope.ablate(loaded, loaded.texts)


@pytest.mark.parametrize("average", [True, False])
def test_a_module_that_asks_for_weights_gets_them(average):
    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            output, weights = self.attention(x, x, x, average_attn_weights=average)
            return output, weights

    assert load(Asking(), X).info.checked  # it compares both outputs


def test_sequences_are_told_apart_and_named_alone():
    loaded = load(Attention(), X, [list("abcdef")] * 4 + [list("uvwxyz")])
    assert [loaded.tokenizer.encode(text).labels[0] for text in loaded.texts] == [
        "a",
        "a",
        "a",
        "a",
        "u",
    ]
    whole = maps_of(loaded)[0]
    probe = WeightsRecorder()
    loaded.run(batch_of([loaded.tokenizer.encode(text) for text in ("4", "1")]), probe)
    torch.testing.assert_close(probe.maps["decoder"][0], whole[[4, 1]])
    assert attnscope.heads(loaded, loaded.texts).corpus["n_texts"] == 5
    named = load(Attention(), X[:1], ["[CLS]", *"bcdef"]).tokenizer.encode("0")
    assert named.special.tolist() == [True, False, False, False, False, False]
    with pytest.raises(AttnscopeError, match="only the inputs that the model came with"):
        loaded.tokenizer.encode("a text")


@pytest.mark.parametrize(
    ("module", "inputs", "labels", "reason"),
    [
        (ByHand(), X, None, "a softmax by hand cannot be seen"),
        (Dropping(), X, None, "another output than softmax weights times values"),
        (Strings(), X, None, "returns no tensor"),
        (Attention(), X[..., :3], None, "does not run on these inputs"),
        (Attention(), X * torch.nan, None, "inputs holds NaN or infinity"),
        (Attention(), {"x": 3}, None, "inputs holds no tensor"),
        (Attention(), "a text", None, "inputs is of type str"),
        (Attention(), X, ["a", "b"], "labels name 2 positions"),
        (Attention(), X, [["a"] * 6] * 3, "labels holds 3 lists"),
        (Attention(), X, [None] * 6, "labels holds None"),
        (Attention(), X, range(10**12), "labels name more than 1,048,576 positions"),
        (Attention(), X.to_sparse(), None, "inputs holds a nested, sparse or meta tensor"),
        (
            nn.Sequential(torch.compile(Attention(), backend="eager")),
            X,
            None,
            "torch.compile hides attention of Sequential",
        ),
        (Draws(), X, None, "must not drop weights or draw random numbers"),
        (PutsOutNothing(), X, None, "returns no tensor of numbers"),
        ("minilm", X, None, "inputs go with a torch module"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_the_reason(module, inputs, labels, reason):
    with pytest.raises(AttnscopeError) as refused:
        load(module, inputs, labels)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["diffusion", "encoder", "patchtst"])
def test_examples_run(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    written = capsys.readouterr().out.split()
    assert written
    assert all(Path(path).stat().st_size > 1000 for path in written)
