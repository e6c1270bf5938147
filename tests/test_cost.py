"""Costs: equal to what transformers' own models hold, and to arithmetic by hand."""

import io
import json

import numpy as np
import pytest
import torch

from attnscope.errors import AttnscopeError
from attnscope.models import files
from attnscope.models.sizes import PRESETS, sizes_of
from attnscope.report.plain_text import open_console
from attnscope.report.terminal import show
from attnscope.studies.cost import cost, find_sizes


def on_meta(family, auto="AutoModel", **settings):
    """A model of transformers without weights."""
    import transformers

    with torch.device("meta"):
        return getattr(transformers, auto).from_config(
            transformers.AutoConfig.for_model(family, **settings)
        )


def true_counts(model):
    """Attention's matrices and vectors, and all parameters, by the names that the model gives them."""
    matrices = vectors = 0
    wanted = ("attn", "self_attn", "attention", "SelfAttention", "EncDecAttention")
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        inside = any(part in wanted for part in parts)
        if not inside or any(
            "norm" in part.lower() or part == "relative_attention_bias" for part in parts
        ):
            continue
        if parameter.ndim == 2:
            matrices += parameter.numel()
        else:
            vectors += parameter.numel()
    return matrices, vectors, sum(parameter.numel() for parameter in model.parameters())


LLAMA = {
    "hidden_size": 96,
    "intermediate_size": 130,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 77,
    "head_dim": 20,
}
BERT = {
    "hidden_size": 60,
    "intermediate_size": 33,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 77,
    "max_position_embeddings": 29,
}
GPT2 = {"n_embd": 60, "n_head": 4, "n_layer": 3, "vocab_size": 77, "n_inner": 31, "n_positions": 29}
MODELS = [
    ("bert", "AutoModel", {}),
    ("bert", "AutoModel", BERT),
    ("roberta", "AutoModel", BERT | {"type_vocab_size": 1}),
    ("gpt2", "AutoModelForCausalLM", GPT2),
    ("llama", "AutoModelForCausalLM", LLAMA),
    (
        "llama",
        "AutoModelForCausalLM",
        LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    ("mistral", "AutoModelForCausalLM", LLAMA),
    ("qwen2", "AutoModelForCausalLM", LLAMA | {"head_dim": 16}),
]


@pytest.mark.parametrize(("family", "auto", "settings"), MODELS)
def test_counts_are_those_of_the_model(family, auto, settings):
    matrices, vectors, everything = true_counts(on_meta(family, auto, **settings))
    found = (
        cost(sizes_of(settings | {"model_type": family}, family, ""), 10)
        if settings or family != "llama"
        else None
    )
    assert found.value("projections") == matrices
    assert ("projection_biases" in found["quantities"]["name"]) == (vectors > 0)
    if vectors:
        assert found.value("projection_biases") == vectors
    assert found.value("parameters") == everything
    np.testing.assert_allclose(found.value("attention_share"), (matrices + vectors) / everything)


@pytest.mark.parametrize(
    ("name", "auto"),
    [
        ("bert-base", "AutoModel"),
        ("gpt2", "AutoModelForCausalLM"),
        ("llama-2-7b", "AutoModelForCausalLM"),
        ("llama-2-70b", "AutoModelForCausalLM"),
    ],
)
def test_presets_are_the_published_models(name, auto):
    s = PRESETS[name]
    settings = {}
    if name.startswith("llama"):
        settings = {
            "hidden_size": s.d_model,
            "intermediate_size": s.d_ff,
            "num_hidden_layers": s.n_layers,
            "num_attention_heads": s.n_heads,
            "num_key_value_heads": s.n_kv_heads,
            "vocab_size": s.vocab_size,
        }
    family = {"bert-base": "bert", "gpt2": "gpt2"}.get(name, "llama")
    matrices, _, everything = true_counts(on_meta(family, auto, **settings))
    found = cost(name)
    assert found.value("projections") == matrices
    assert found.value("parameters") == everything


def test_grouped_queries_cost_less_and_cache_less():
    mha = cost("llama-2-7b", 4096, n_kv_heads=32)
    gqa = cost("llama-2-7b", 4096, n_kv_heads=8)
    mqa = cost("llama-2-7b", 4096, n_kv_heads=1)
    assert mha.value("kv_cache_bytes") == 4 * gqa.value("kv_cache_bytes")
    assert mqa.value("kv_cache_bytes") == 2 * 32 * 128 * 4096 * 2
    assert (
        cost("llama-2-7b", 4096, dtype="int8").value("kv_cache_bytes") == mha.value("kv_cache_bytes") / 2
    )
    assert gqa.value("projections_per_layer") == 2 * 4096**2 + 2 * 4096 * 8 * 128
    assert mqa.value("parameters") < gqa.value("parameters") < mha.value("parameters")
    assert any("with n_kv_heads 8" in note for note in gqa.options["notes"])


def test_multiply_adds_are_those_of_the_matrix_products():
    """Counted by torch's own counter, which counts two operations a multiply-add."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {**LLAMA, "head_dim": 16, "num_key_value_heads": 6}
    model = LlamaForCausalLM(LlamaConfig(**settings, attn_implementation="eager")).eval()
    n = 13
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, n, dtype=torch.long), use_cache=False)
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    found = cost(sizes_of(settings | {"model_type": "llama"}, "llama", ""), n)
    assert sum(counts.values()) == 2 * n * found.value("per_token")


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_formula_with_its_numbers_gives_its_value(preset):
    """The numbers that are put in are those that were computed with."""
    found = cost(preset, 640)
    checked = 0
    table = found["quantities"]
    for name, numbers, value in zip(
        table["name"], table["numbers"].tolist(), table["value"], strict=True
    ):
        if numbers:
            expression = numbers.replace(",", "").replace("·", "*").replace("²", "**2")
            np.testing.assert_allclose(eval(expression, {"__builtins__": {}}), value, err_msg=name)
            checked += 1
    assert checked > 12
    total = table["value"][(table["group"] == "parameters") & (table["unit"] == "parameters")].sum()
    layer = found.value("projections_per_layer")
    whole = found.value("parameters")
    assert total == layer + 2 * whole, "the parts sum to the whole"


# Where sizes come from


def test_a_model_is_read_without_its_weights(tmp_path):
    config = {"model_type": "llama", **LLAMA}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    for spec in (tmp_path, tmp_path / "config.json"):
        assert cost(str(spec), 7).sizes["n_kv_heads"] == 2
    assert cost("minilm").value("parameters") == 22_713_216


def test_families_not_known_in_closed_form_are_built_and_counted():
    for family, kind in (("modernbert", "encoder"), ("phi", "decoder"), ("t5", "encoder-decoder")):
        settings = {
            "hidden_size": 48,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "intermediate_size": 40,
            "vocab_size": 60,
            "d_model": 48,
            "d_kv": 12,
            "num_layers": 2,
            "num_heads": 4,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        found = cost(sizes_of(settings | {"model_type": family}, family, ""), 9)
        assert found.value("parameters") == sum(
            p.numel() for p in on_meta(family, **settings).parameters()
        )
        assert found.sizes["kind"] == kind
        assert found.value("projections_per_layer") == 4 * 48**2
        assert ("kv_cache_bytes" in found["quantities"]["name"]) == (kind != "encoder")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "nonsense"}, "cannot build"),
        ({}, "cannot build"),
        ({"model_type": "llama", "hidden_size": 8}, "does not say n_heads"),
        ({"model_type": "llama"} | LLAMA | {"num_attention_heads": "six"}, "make no sense"),
        (
            {"model_type": "llama"} | LLAMA | {"num_key_value_heads": 4},
            "6 query heads are not a multiple of 4",
        ),
        ({"model_type": "gpt2"} | GPT2 | {"n_head": 0}, "make no sense"),
        ({"model_type": "gpt2"} | GPT2 | {"n_layer": -1}, "n_layers is -1"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(config, says):
    with pytest.raises(AttnscopeError, match=says):
        sizes_of(config, "it", "")


def test_a_hub_models_config_alone_comes_from_the_cache(tmp_path, monkeypatch):
    home = tmp_path / "models--some--llama"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("abc", "ascii")
    (home / "snapshots" / "abc").mkdir(parents=True)
    (home / "snapshots" / "abc" / "config.json").write_text(
        json.dumps({"model_type": "llama", **LLAMA}), "utf-8"
    )
    monkeypatch.setattr(files, "_cache_folder", lambda: tmp_path)
    assert find_sizes("some/llama").source == "Hugging Face Hub, some/llama@abc"


# Records and figures


@pytest.mark.parametrize("name", ["bert-base", "llama-2-70b", "minilm"])
def test_the_answer_stands_in_the_first_lines_and_formulas_come_with_all(name):
    lines = {}
    for every in (False, True):
        file = io.StringIO()
        console = open_console(file=file, width=80)
        console.print(show(cost(find_sizes(name)), console, every=every))
        lines[every] = file.getvalue().splitlines()
        assert max(map(len, lines[every])) <= 80
    first = " ".join(lines[False][:4])
    assert "attention is" in first
    assert "parameters" in first
    assert "d_model" in first
    assert len(lines[False]) < 40
    assert not any("· d_head" in line for line in lines[False])
    assert any("2 · d_model · d_head" in line for line in lines[True])
