"""Why a head attends there: the parts sum to the model's own score, and are those of the formula written out."""

import dataclasses
import json

import numpy as np
import pytest
import torch

import attnscope
from attnscope.core.attention.seam import attend
from attnscope.errors import AttnscopeError
from attnscope.models.model import Batch
from attnscope.questions.why import Why
from tests.conftest import write_tiny
from tests.test_stream import GROUPED, SIZES, random_model

TEXT = "5 9 3 7 11 4 8"
QUERY = 5
KEY = 2
MORE = {
    "t5": {"d_model": 24, "d_kv": 4, "num_heads": 6, "num_layers": 2, "d_ff": 20},
    "albert": {"embedding_size": 12},
    "olmo2": GROUPED,
    "olmo": {},
    "gemma3_text": {**GROUPED, "head_dim": 6},
    "bloom": {"hidden_size": 24, "n_head": 6, "n_layer": 2},
}
LEARNED = ("bert", "gpt2", "opt", "albert")
ROTARY = ("llama", "qwen2", "gemma", "gpt_neox", "phi", "mixtral")
NORMED = ("qwen3", "olmo2", "gemma3_text")
"""Models with norms of queries and keys."""


def loaded(name):
    """A random model, held without a tokenizer: its texts are numbers."""
    if name not in MORE:
        return attnscope.load(random_model(name))
    from transformers import AutoConfig, AutoModel, T5EncoderModel

    config = AutoConfig.for_model(
        name, **(SIZES | MORE[name] if name not in ("t5", "bloom") else MORE[name])
    )
    config.vocab_size = SIZES["vocab_size"]
    torch.manual_seed(0)
    make = T5EncoderModel if name == "t5" else AutoModel.from_config
    source = make(config)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.normal_(std=0.4)
    return attnscope.load(source.eval())


def call_of(model, place):
    """What reaches the seam of a layer as the model reads TEXT."""
    seen = {}

    def probe(call):
        seen[call.kind, call.layer] = call
        return attend(call)

    with torch.no_grad():
        model.run(Batch(torch.tensor([[int(word) for word in TEXT.split()]])), probe)
    return seen[place]


def scores_of(model, place, head):
    """The scores of a query's keys up to itself, before softmax, by the model's own queries and keys."""
    call = call_of(model, place)
    key = call.key[0, head // (call.n_heads // call.n_kv_heads)].double()
    scores = call.scale * key @ call.query[0, head, QUERY].double()
    return (
        scores
        if call.bias is None
        else scores + call.bias.expand(1, call.n_heads, 7, 7)[0, head, QUERY].double()
    )


@pytest.mark.parametrize("name", [*LEARNED, *ROTARY, *NORMED, "t5", "gemma2"])
def test_parts_sum_to_the_model_s_own_score(name):
    model = loaded(name)
    kind = model.info.kinds[0]
    record = attnscope.why(model, TEXT, 1, 4, QUERY, KEY)
    scores = scores_of(model, (kind, 1), 4)
    may = scores if kind == "encoder" else scores[: QUERY + 1]
    total = float(record["pairs"].sum()) + record.bias
    assert total == pytest.approx(float(scores[KEY] - may.mean()), abs=1e-4)
    assert record.discrepancy <= record.score["rounding"] < 1e-3
    assert record["parts"]["query_nats"].sum() == pytest.approx(
        record["parts"]["key_nats"].sum(), abs=1e-9
    )
    assert np.isfinite(record.score["bias"]) == (name == "t5")
    assert np.isfinite(record.score["softcap"]) == (name == "gemma2")
    parts = record["parts"]
    names = {*parts["part"].tolist()}
    assert {"tokens", "L0H0", "L0H5"} <= names
    assert ("positions" in names) is (name in LEARNED)
    assert parts["layer"].max() <= (0 if kind == "decoder" else 1)


class Biased:
    """A model whose scores get ALiBi's bias, which transformers' own models keep from the seam."""

    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        return getattr(self._model, name)

    def run(self, batch, probe):
        def biased(call):
            n = call.query.shape[2]
            slopes = 2.0 ** -torch.arange(1, call.n_heads + 1)
            distance = torch.arange(n)[:, None] - torch.arange(n)
            return probe(dataclasses.replace(call, bias=-slopes[None, :, None, None] * distance))

        return self._model.run(batch, biased)


def test_a_bias_by_distance_is_a_term_of_its_own():
    model = Biased(loaded("llama"))
    record = attnscope.why(model, TEXT, 1, 0, QUERY, KEY)
    assert record.bias == pytest.approx(-0.5 * (QUERY - KEY) + 0.5 * np.arange(QUERY + 1).mean())
    scores = scores_of(model, ("decoder", 1), 0)[: QUERY + 1]
    assert record["pairs"].sum() + record.bias == pytest.approx(
        float(scores[KEY] - scores.mean()), abs=1e-4
    )
    with pytest.raises(AttnscopeError, match="adds a bias after it caps scores"):
        attnscope.why(Biased(loaded("gemma2")), TEXT, 1, 0, QUERY, KEY)


def test_a_head_s_part_is_what_it_wrote_through_norm_projection_and_turn():
    """Of a Llama with grouped queries: R (W_K (gain * W_O z / rms)) less its mean over keys, times the query."""
    source = random_model("llama")
    model = attnscope.load(source)
    seen = {}
    stream = []

    def probe(call):
        seen[call.layer] = call, attend(call)
        return seen[call.layer][1]

    layer = source.model.layers[1]
    n = QUERY + 1
    head = 4
    handle = layer.input_layernorm.register_forward_pre_hook(
        lambda module, given: stream.append(given[0])
    )
    ids = torch.tensor([[int(word) for word in TEXT.split()]])
    with torch.no_grad():
        model.run(Batch(ids), probe)
        cos, sin = source.model.rotary_emb(stream[0], torch.arange(7)[None])
    handle.remove()
    wrote = seen[0][1][0, 3] @ source.model.layers[0].self_attn.o_proj.weight[:, 12:16].T  # by L0H3
    rms = stream[0][0].pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()
    # H4 reads group 1.
    key = (layer.input_layernorm.weight * wrote / rms) @ layer.self_attn.k_proj.weight[4:8].T
    turned = key * cos[0] + torch.cat((-key[:, 2:], key[:, :2]), -1) * sin[0]
    call = seen[1][0]
    by_key = call.scale * (turned[KEY] - turned[:n].mean(0)) @ call.query[0, head, QUERY]
    record = attnscope.why(model, TEXT, 1, head, QUERY, KEY)
    place = record["parts"]["part"].tolist().index("L0H3")
    assert record["parts"]["key_nats"][place] == pytest.approx(float(by_key.detach()), abs=1e-5)


def test_what_cannot_be_taken_apart_is_refused_in_a_line():
    with pytest.raises(AttnscopeError, match="something else adds to the stream of olmo"):
        # Its norm has no weight by which it could be known.
        attnscope.why(loaded("olmo"), TEXT, 1, 0, QUERY, KEY)
    with pytest.raises(AttnscopeError, match="made of: its own modules compute attention"):
        attnscope.why(loaded("bloom"), TEXT, 1, 0, QUERY, KEY)
    llama = loaded("llama")
    with pytest.raises(AttnscopeError, match=r"a mask hides token @6 #8 from token @2 #3 in layer 1"):
        attnscope.why(llama, TEXT, 1, 0, "@2", "@6")
    with pytest.raises(AttnscopeError, match="there is no head 6"):
        attnscope.why(llama, TEXT, 1, 6, QUERY)
    with pytest.raises(AttnscopeError, match=r"'#9' names several tokens: @1 #9 @3 #9"):
        attnscope.why(llama, "5 9 3 9", 1, 0, "@3", "#9")


def test_a_record_whose_parts_do_not_sum_is_none(tmp_path):
    record = attnscope.why(loaded("llama"), TEXT, 1, 4, QUERY)
    assert record.score["key"] == int(np.argmax([0, *(w for w in weights_of(record)[1:])]))
    again = Why.load(record.save(tmp_path / "why.npz"))
    np.testing.assert_array_equal(again["pairs"], record["pairs"])
    assert again["parts"]["part"].tolist() == record["parts"]["part"].tolist()
    assert again.excess == record.excess
    pairs = record["pairs"].copy()
    pairs[0, 0] += 0.01
    path = dataclasses.replace(record, grids={"pairs": pairs}).save(tmp_path / "other.npz")
    with pytest.raises(AttnscopeError, match=r"its parts sum to 0\.01 more or less than its score"):
        Why.load(path)


def weights_of(record):
    """The attention weights of the record's query."""
    return attnscope.heatmap(loaded("llama"), TEXT).maps[0].weights[1, 4, record.score["query"]]


def test_the_command_prints_and_draws_the_parts(run, tmp_path):
    write_tiny(tmp_path / "tiny")
    told = ("why", "the cat", "-m", tmp_path / "tiny", "--pick", "L1H2", "-q")
    status, out, err = run(
        *told, "--query", "cat", "--key", "the", "-o", tmp_path / "out", "-f", "npz,csv,svg"
    )
    assert status == 0, err
    assert "why L1H2 attends from cat (token 2) to the (token 1)" in out
    assert "split by the query's parts, the largest is" in " ".join(out.split())
    record = Why.load(tmp_path / "out" / "why.npz")
    lines = (tmp_path / "out" / "why.csv").read_text().splitlines()
    assert len(lines) == len(record["parts"]) + 1
    assert sum(float(line.split(",")[-1]) for line in lines[1:]) == pytest.approx(
        record.excess, abs=1e-4
    )
    assert (tmp_path / "out" / "why-L1H2.svg").stat().st_size > 1000
    status, out, _ = run(*told, "--query", "cat", "--json")
    assert status == 0
    assert json.loads(out)["schema"] == "attnscope.why/2"
    assert run("why", "the cat", "-m", tmp_path / "tiny", "--query", "cat")[0] == 2
    assert run("why", "the cat", "-m", tmp_path / "tiny", "--pick", "L1H2")[0] == 2
