"""Rollout from a text to figures and back: the numbers, the record, what is drawn, what is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from attnscope import heatmap, load, rollout
from attnscope.questions.heatmap import Rollout
from tests.cli_helpers import TIRED, elsewhere, loaded_once, require_one_line
from tests.conftest import write_tiny_t5
from tests.record_helpers import RUN, map_of, page_of, record_of, shares, stems, tokens_of

__all__ = ["elsewhere", "loaded_once"]


@pytest.fixture(scope="module")
def tired(minilm):
    return rollout(minilm, TIRED, query="it")


def made(n=5, n_layers=2):
    labels = ["[CLS]", *(f"t{i}" for i in range(1, n - 1)), "[SEP]"]
    record = record_of(
        map_of(tokens_of(labels, (0, n - 1)), layers=n_layers), run={**RUN, "notes": ["ä"]}
    )
    mean, rolled = (shares(n_layers, n, n, seed=seed) for seed in (0, 1))
    return Rollout.of_layers(record, mean, rolled, 0.5)


def test_the_numbers_are_those_of_the_weights(minilm, tired):
    weights = heatmap(minilm, TIRED).weights.astype(np.float64)
    np.testing.assert_allclose(tired.mean, weights.mean(1), atol=1e-7)
    product = np.eye(16)
    for layer in range(6):
        product = (weights[layer].mean(0) + np.eye(16)) / 2 @ product
        # Rows of float32 sum to 1 nearly.
        np.testing.assert_allclose(tired.rollout[layer], product, atol=1e-6)


def test_a_decoder_sees_nothing_of_what_comes_later():
    found = rollout(load("own-causal"), "1, 2, 1, 2", residual=0.25)
    for shares_of in (found.mean, found.rollout):
        assert not np.triu(shares_of, 1).any()
        assert np.tril(shares_of).any()
    assert found.residual == 0.25


def test_of_an_encoder_decoder_it_is_the_encoder(tmp_path):
    write_tiny_t5(tmp_path / "t5")
    model = load(str(tmp_path / "t5"))
    found = rollout(model, "the cat")
    assert found.tokens == ("[CLS]", "the", "cat", "[SEP]")
    whole = heatmap(model, "the cat", target="a")
    np.testing.assert_allclose(found.mean, whole.maps[0].weights.mean(1, dtype=np.float64), atol=1e-7)
    assert any(note.startswith("rollout is the encoder's") for note in found.run["notes"])


def test_figures_hold_the_shares_beside_the_mean_attention():
    record = made()
    assert stems(record, "t2") == ["overview", "L00", "L01", "query-002"]
    shown = page_of(record, "L01")
    for picture, layers in zip(shown.maps, (record.mean, record.rollout), strict=True):
        np.testing.assert_array_equal(picture.get_array(), layers[1])
    assert {"toy · layer 1: attention, and where it came from", "mean attention", "rollout"} <= {
        text.get_text() for text in shown.axes.texts
    }
    written = {text.get_text(): text.get_position() for text in page_of(record, "overview").axes.texts}
    # Layers side by side, over the maps.
    assert written["L0"][1] == written["L1"][1] < written["mean attention"][1]
    assert written["mean attention"][1] < written["rollout"][1]
    assert written["rollout"][0] < written["L0"][0] < written["L1"][0]


def test_on_the_command_line(run, tmp_path):
    out = run("heatmap", "--rollout", TIRED, "--query", "it", "-o", "out", "-f", "npz,png").out
    assert re.search(r"L0 +because 0\.19 .*it 0\.53", out)
    names = ["rollout.npz", "overview.png", *(f"L{i:02d}.png" for i in range(6)), "query-010.png"]
    assert out.splitlines()[-9:] == [f"out/{name}" for name in names]
    shown = run("show", "out", "--query", "it", "-o", "again").out
    assert shown.splitlines()[-8:] == [f"again/{name}" for name in names[1:]]
    assert all(Path("again", name).read_bytes() == Path("out", name).read_bytes() for name in names[1:])
    assert run("show", "out", "--query", "it").out == out.split("out/")[0]
    told = json.loads(run("heatmap", "--rollout", "a b", "-m", "own", "--json").out)
    assert told["schema"] == Rollout.SCHEMA
    assert told["run"]["model"] == "own"
    assert told["options"]["residual"] == 0.5
    assert np.array(told["weights"]).shape[0] == len(told["heads"])


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["heatmap", "--rollout", TIRED, "--query", "cat"], 1, "no token is 'cat'"),
        (["heatmap", "--rollout", TIRED, "-f", "png"], 2, "no folder to write files to"),
        (["heatmap", "--rollout", TIRED, "-o", "out", "-f", "html"], 2, "no format 'html'"),
        (["heatmap", "--rollout"], 2, "no text is given"),
    ],
)
def test_what_is_refused(run, arguments, status, said):
    result = run(*arguments)
    require_one_line(result, said, status)
