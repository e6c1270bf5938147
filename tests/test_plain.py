"""The NumPy engine: what the native engine shows of a short text, before torch would be loaded."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import attnscope
from attnscope import models
from attnscope.core.attention.calls import WeightsBesideFullWidth
from attnscope.errors import AttnscopeError
from attnscope.models import Batch
from attnscope.studies.inputs.options import MAX_NUMPY_TOKENS, LoadOptions
from attnscope.studies.inputs.reading import Prompt
from tests.conftest import write_tiny
from tests.processes import python
from tests.test_native import FAMILIES, TIRED

CLOSE = {"rtol": 0, "atol": 1e-5}


def native_maps(model, tokens):
    probe = WeightsBesideFullWidth()
    ids, segments = (torch.as_tensor(np.asarray(row))[None] for row in (tokens.ids, tokens.segments))
    with torch.inference_mode():
        model.run(Batch(ids.long(), None, segments.long()), probe)
    return probe


@pytest.mark.parametrize(("family", "overrides"), FAMILIES)
def test_every_family_equals_the_native_engine(family, overrides, tmp_path):
    folder = str(write_tiny(tmp_path / family, family, **overrides))
    plain = models.load(folder, engine="numpy")
    native = models.load(folder, engine="native")
    assert plain.compute_maps is not None
    assert replace(plain.info, engine="native") == native.info
    padding = overrides.get("pad_token_id", 0)
    for texts in (("the cat", "a, b"), ("it's the cat",), ("a",)):
        tokens = plain.tokenizer.encode(*texts)
        for given in (tokens, replace(tokens, ids=np.where(tokens.ids == 10, padding, tokens.ids))):
            found = plain.compute_maps(given, (0, 1))
            expected = native_maps(native, given)
            for layer in (0, 1):
                weights = found.weights[layer]
                assert weights.dtype == np.float32
                np.testing.assert_allclose(weights, expected.maps["encoder"][layer][0].numpy(), **CLOSE)
                np.testing.assert_allclose(
                    found.full[layer], expected.full["encoder"][layer].numpy(), **CLOSE
                )
        assert list(plain.compute_maps(tokens, (1,)).weights) == [1]


def test_minilm_up_to_the_length_that_is_left_to_numpy():
    plain = models.load(engine="numpy")
    native = models.load(engine="native")
    tokens = plain.tokenizer.encode(TIRED * 15)
    assert 0.8 * MAX_NUMPY_TOKENS < len(tokens) < 1.2 * MAX_NUMPY_TOKENS
    assert plain.compute_maps is not None
    found = plain.compute_maps(tokens, range(6))
    expected = native_maps(native, tokens)
    for layer in range(6):
        np.testing.assert_allclose(
            found.weights[layer], expected.maps["encoder"][layer][0].numpy(), **CLOSE
        )


@pytest.mark.parametrize(
    "command",
    [
        ["heatmap", TIRED, "-f", "npz,json,text", "-o", "out"],
        ["heatmap", TIRED, "--pick", "L3H1", "--words", "--query", "it", "-f", "npz", "-o", "out"],
        ["page", TIRED, "-o", "page.html"],
        ["heatmap", "--rollout", TIRED, "-f", "npz", "-o", "out"],
    ],
    ids=["heatmap", "changed", "page", "rollout"],
)
def test_on_the_command_line_a_short_text_needs_no_torch(command, tmp_path):
    code = (
        f"import os, sys; os.chdir({str(tmp_path)!r}); sys.argv = ['attnscope', *{command!r}]\n"
        "from attnscope.__main__ import main\n"
        "try: main()\n"
        "finally: print(*sys.modules)"
    )
    loaded = set(python("-c", code, check=True).stdout.split())
    assert not {"torch", "transformers"} & loaded


def test_records_of_both_engines_are_equal_but_for_rounding(run, tmp_path):
    for engine in ("auto", "native"):
        status, _, err = run("heatmap", TIRED, "-f", "npz", "-o", tmp_path / engine, "--engine", engine)
        assert status == 0, err
    auto, native = (
        attnscope.load_record(tmp_path / engine / "heatmap.npz") for engine in ("auto", "native")
    )
    assert auto.run["engine"] == "numpy"
    assert native.run["engine"] == "native"
    np.testing.assert_allclose(auto.maps[0].weights, native.maps[0].weights, **CLOSE)
    assert not {"torch", "transformers"} & set(auto.run["versions"])
    assert {**auto.run, "engine": "native", "versions": native.run["versions"]} == native.run


def chosen(text="the cat", spec="minilm", **options):
    prompt = Prompt(text, generate=options.pop("generate", 0))
    return LoadOptions(**options).load_for_maps(spec, [prompt]).info.engine


def test_it_is_chosen_for_what_is_short_and_on_the_processor_in_single_precision(tiny_bert):
    assert chosen() == chosen(spec=str(tiny_bert)) == "numpy"
    assert chosen(spec="own") == chosen(dtype="float64") == chosen(engine="native") == "native"
    assert chosen("the cat " * MAX_NUMPY_TOKENS) == "native"
    assert chosen("the cat " * MAX_NUMPY_TOKENS, engine="numpy") == "numpy"
    config = tiny_bert / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | {"is_decoder": True}), "utf-8")
    assert chosen(spec=str(tiny_bert)) == "hf"


def test_what_it_does_not_do_it_refuses(tiny_bert, run):
    model = models.load(str(tiny_bert), engine="numpy")
    with pytest.raises(AttnscopeError, match="shows exact maps of a text, and does nothing else"):
        attnscope.heads(model, ["the cat"])
    with pytest.raises(AttnscopeError, match="the numpy engine has no model own"):
        models.load("own", engine="numpy")
    for command in (
        ["heads"],
        ["compare"],
        ["ablate", "-L", "0"],
        ["learn", "trace", "-L", "0", "-H", "0"],
    ):
        status, _, err = run(*command, "the cat", "-m", tiny_bert, "--engine", "numpy")
        assert status == 1, err
        assert "numpy engine" in err or "engine numpy" in err
