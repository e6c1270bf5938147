"""Models spread over devices by accelerate: layers on the processor and on disk."""

import numpy as np
import pytest

import attnscope
from attnscope import models
from attnscope.errors import AttnscopeError, UsageError
from tests.ablation_helpers import save_tiny
from tests.test_devices import STUDIES, numbers_of

pytest.importorskip("accelerate", reason="the extra [accelerate] is not installed")

FIRST_ON_DISK = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "disk",
    "model.layers.1": "cpu",
    "model.layers.2": "cpu",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}


@pytest.fixture
def folder(tmp_path):
    return str(save_tiny(tmp_path / "llama", "llama"))


@pytest.mark.parametrize(
    "name",
    ["heatmap", "pooled", "heads", "compare", "trace", pytest.param("ablate", marks=pytest.mark.slow)],
)
def test_a_layer_on_disk_changes_nothing(name, folder):
    whole = models.load(folder, engine="hf")
    spread = models.load(folder, device_map=FIRST_ON_DISK)
    assert any(parameter.is_meta for parameter in spread.modules()[0].parameters()), (
        "something lies on disk"
    )
    ours = numbers_of(STUDIES[name](whole))
    theirs = numbers_of(STUDIES[name](spread))
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


def test_the_record_says_where_the_layers_lie(folder):
    record = attnscope.heatmap(models.load(folder, device_map=FIRST_ON_DISK), "the cat")
    assert record.run["device"] == "cpu"
    assert record.run["dtype"] == "float32"
    assert any("disk (1 part)" in note for note in record.run["notes"])


def test_auto_from_the_command_line(folder, run):
    status, out, err = run("heatmap", "the cat", "-m", folder, "--device", "all", "-o", "o", "-f", "npz")
    assert status == 0, err
    assert "Spread over" in err
    assert out.endswith(".npz\n")


def test_without_accelerate_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    with pytest.raises(AttnscopeError, match="needs accelerate") as raised:
        models.load(folder, device_map="auto")
    assert "attnscope[accelerate]" in raised.value.hint


@pytest.mark.parametrize("more", [{"engine": "native"}, {"device": "cuda"}])
def test_what_does_not_go_together_is_refused(more, folder):
    with pytest.raises(UsageError, match="device map"):
        models.load(folder, device_map="auto", **more)


def test_a_glass_box_is_not_spread():
    with pytest.raises(UsageError, match="small enough"):
        models.load("own", device_map="auto")


def test_an_unknown_map_is_refused(folder):
    with pytest.raises(AttnscopeError, match="no device map 'everywhere'"):
        models.load(folder, device_map="everywhere")


def test_spread_weights_cannot_be_pruned(folder):
    with pytest.raises(AttnscopeError, match="spread over devices"):
        models.load(folder, device_map=FIRST_ON_DISK).head_slices({("decoder", 0): [0]})
