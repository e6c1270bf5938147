"""A trace: what is shown is what the model computed, and its lines compute it again."""

import numpy as np
import pytest
import torch

import attnscope
from attnscope.core.attention.seam import attend
from attnscope.errors import AttnscopeError
from attnscope.studies.inputs.reading import Prompt
from attnscope.studies.trace import trace
from tests.core_helpers import WORKED
from tests.processes import python

TEXT = "The cat sat on the mat."
FOUR = {"atol": 5.1e-5, "rtol": 0}

TINY = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40}
LLAMA = TINY | {
    "intermediate_size": 20,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 6,
}
SETTINGS = {
    "llama": LLAMA,
    "cohere": LLAMA,
    "gpt_neox": TINY
    | {"intermediate_size": 20, "max_position_embeddings": 64, "rotary_pct": 0.5, "hidden_size": 32},
    "gpt2": {"n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": 40, "n_positions": 64},
    "bert": TINY | {"intermediate_size": 20, "max_position_embeddings": 64},
    "t5": {
        "d_model": 24,
        "d_kv": 5,
        "num_heads": 3,
        "num_layers": 2,
        "d_ff": 20,
        "vocab_size": 40,
        "decoder_start_token_id": 0,
    },
    "gemma2": LLAMA | {"attn_logit_softcapping": 2.0, "sliding_window": 4, "query_pre_attn_scalar": 5},
    "gpt_oss": LLAMA | {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4},
}


def tiny(family, dtype=torch.float32):
    """A tiny random model of a family in memory, whose texts are token numbers."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(1)
    model = AutoModel.from_config(AutoConfig.for_model(family, **SETTINGS[family]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.5 if "embed" in name else 0.3)
    return attnscope.load(model.to(dtype).eval())


def prompt(family):
    return Prompt("5 3 9 17 3 9 2 11", target="4 7 8" if family == "t5" else None)


def run_lines(record):
    """Runs the lines that a trace shows, on its inputs, and compares each value with what it shows."""
    names = {"np": np}
    for name, value in record.grids.items():
        if name.startswith("input_"):
            names[name.removeprefix("input_")] = np.copy(value)
    for step in record.steps:
        code = step["code"]
        value = step["value"]
        exec(code, names)
        np.testing.assert_allclose(
            eval(step["variable"], names), value, rtol=1e-9, atol=1e-12, err_msg=code
        )
        assert len(step["axes"]) == value.ndim


# The worked example


@pytest.mark.parametrize("token", [None, "cat", "@4"])
def test_every_number_of_the_worked_example(token):
    record = trace(query=token)
    rows = slice(None) if token is None else {"cat": 1, "@4": 4}[token]
    for head, name in enumerate(("weights_head_1", "weights_head_2")):
        np.testing.assert_allclose(record.of("weights", head), np.array(WORKED[name])[rows], **FOUR)
    np.testing.assert_allclose(record.of("joined"), np.array(WORKED["output"])[rows], **FOUR)
    run_lines(record)


def test_the_steps_of_one_query_by_hand():
    record = trace(heads=[0], query="cat")
    assert record["heads"]["head"].tolist() == [0]
    expected = {
        "query": [0, 2],
        "keys": [[0, 1], [1, 0], [1, 1], [0, 0], [1, 0]],
        "dot_products": [2, 0, 2, 0, 0],
        "scores": [2**0.5, 0, 2**0.5, 0, 0],
        "exponentials": [1, 0.2431, 1, 0.2431, 0.2431],
        "weights": [0.3664, 0.0891, 0.3664, 0.0891, 0.0891],
        "weighted_values": [[0.3664, 0], [0, 0.0891], [0, 0], [0, 0], [0.0445, 0.0445]],
        "head_output": [0.4109, 0.1336],
        "joined": [0.4109, 0.1336, 0.2289, 0.3663],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(record.of(name), values, **FOUR, err_msg=name)
    assert [step["value"].shape for step in record.steps][:3] == [(2,), (5, 2), (5, 2)]


def test_the_example_is_held_against_the_kernel():
    check = trace().options["check"]
    assert "scaled_dot_product_attention, float32" in check["kernel"]
    assert 0 < check["outputs"] < 1e-6  # float32 against float64: rounding, but not nothing
    assert check["outputs"] <= check["rounding"]


# Models


@pytest.mark.parametrize("family", sorted(SETTINGS))
@pytest.mark.parametrize("token", [None, "@3"])
def test_a_trace_is_what_the_model_computed(family, token):
    model = tiny(family)
    for number, kind in enumerate(model.info.kinds):
        layer = model.info.n_layers[number] - 1
        if kind != "encoder" and family == "t5":
            token = None if token is None else "@2"
        record = trace(model, prompt(family), layer, query=token, kind=kind)
        run_lines(record)
        check = record.options["check"]
        assert check["outputs"] <= check["rounding"] < 1e-3
        assert check["weights"] < 1e-5
        assert check["projected"] < 1e-4, "the model's own output after W_O"
        names = {*record["steps"]["name"].tolist()}
        assert "output" in names
        assert ("biased_scores" in names) == (family == "t5" and kind != "cross")
        assert ("capped_scores" in names) == (family == "gemma2")
        assert ("sink" in names) == (family == "gpt_oss")


def test_what_the_model_projects_is_what_is_shown(minilm_folder):
    del minilm_folder
    model = attnscope.load("minilm")
    record = trace(model, TEXT, 3, [1, 4], query="cat")
    heat = attnscope.heatmap(model, TEXT, layers=3, heads=[1, 4])
    for head in (1, 4):
        np.testing.assert_allclose(record.of("weights", head), heat.of(3, head)[2], atol=1e-6)
    run_lines(record)
    assert record.tokens["query"][record.query or 0] == "cat"


def test_a_wrong_number_is_not_shown(monkeypatch):
    from attnscope.models.inside import projections

    def off(call):
        return attend(call) * 1.01

    monkeypatch.setattr(projections, "attend", off)
    with pytest.raises(AttnscopeError, match="do not reproduce what the model computed"):
        trace(tiny("llama"), prompt("llama"), 1, 0)


# Records


def test_the_script_prints_the_numbers(tmp_path):
    record = trace(query="cat")
    for name in ("trace.npz", "trace.py"):
        record.save(tmp_path / name)
    done = python(tmp_path / "trace.py")
    assert done.returncode == 0, done.stderr
    assert "[0.4109 0.1336 0.2289 0.3663]" in done.stdout
