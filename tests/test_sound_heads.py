"""What heads of speech models do across: monotonicity and its kin, on made maps, and over recordings."""

import math

import numpy as np
import pytest
import torch
from scipy.io import wavfile
from scipy.stats import kendalltau

import attnscope
from attnscope.core.attention import tiles
from attnscope.core.attention.probes import HeadRecorder, sum_over_keys
from attnscope.core.attention.seam import AttentionCall, attend, attention_weights
from attnscope.core.catalogue import SOUND_MEASURES
from attnscope.errors import AttnscopeError
from attnscope.studies.senses.study import sum_sound_measures
from tests.heads_helpers import heads_in
from tests.senses_helpers import speech

pytestmark = pytest.mark.filterwarnings("ignore:no transcript was given")
NAMES = list(SOUND_MEASURES)


def values_of(weights, n_sound):
    """The measures of one head with weights (token, frame)."""
    heard = np.asarray(weights, float)[:, :n_sound]
    rows = np.stack([heard.sum(1), heard @ np.arange(n_sound)], 1)[None]
    sums, counts = sum_sound_measures(rows)
    return {
        name: sums[0, row] / counts[0, row] if counts[0, row] else math.nan
        for row, name in enumerate(NAMES)
    }


def test_a_head_that_moves_on_a_head_that_goes_back_and_one_that_stays():
    assert values_of(np.eye(5), 5) == pytest.approx({"monotonicity": 1, "sound": 1})
    assert values_of(np.eye(5)[::-1], 5)["monotonicity"] == -1
    assert values_of(np.tile(np.eye(5)[2], (5, 1)), 5)["monotonicity"] == 0
    assert values_of(np.full((5, 10), 0.1), 5)["sound"] == pytest.approx(0.5)
    # One step back of four: nine of ten pairs are in order.
    assert values_of(np.eye(5)[[0, 1, 3, 2, 4]], 5)["monotonicity"] == pytest.approx(0.8)
    # Silence has no time, and what gives nothing to sound has none either.
    assert values_of(np.eye(6)[[0, 5, 1]], 4) == pytest.approx({"monotonicity": 1, "sound": 2 / 3})
    assert math.isnan(values_of(np.eye(6)[:1], 4)["monotonicity"])


def test_the_probe_is_what_dense_weights_give(monkeypatch):
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 1)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 3, n, 5, generator=generator) for n in (37, 31, 31))
    call = AttentionCall(0, "cross", 4 * query, key, value, 0.6)
    functions = np.random.default_rng(0).random((23, 2))
    probe = HeadRecorder(lambda call: sum_over_keys(call, functions), kinds=["cross"])
    torch.testing.assert_close(probe(call), attend(call), atol=2e-6, rtol=1e-5)
    weights = attention_weights(call).double().numpy()
    np.testing.assert_allclose(probe.maps["cross"][0].numpy(), weights[..., :23] @ functions, atol=1e-5)
    mean = weights[0, 1, 2:, :23] @ np.arange(23) / weights[0, 1, 2:, :23].sum(1)
    expected = kendalltau(np.arange(35), mean).statistic
    assert values_of(weights[0, 1, 2:], 23)["monotonicity"] == pytest.approx(expected)


def test_over_recordings(whisper, tmp_path):
    for number, seconds in enumerate((0.4, 0.61, 0.8)):
        wavfile.write(tmp_path / f"{number}.wav", 16000, speech(seconds))
    (tmp_path / "3.wav").write_bytes(b"no sound")
    texts = ["the cat sat .", "a cat", "the mat sat on a cat .", "the"]
    found = attnscope.sound_heads(whisper, str(tmp_path / "*.wav"), texts)
    assert found.corpus["of"] == "recordings"
    assert found.corpus["n_texts"] == 3
    (problem,) = found.corpus["problems"]
    assert problem["source"].endswith("3.wav")
    assert found.kinds == ("cross",)
    assert len(heads_in(found)) == 2 * 3
    for head in heads_in(found):
        assert set(head.measures) <= set(NAMES)
        assert 0 < head.measures["sound"].value < 1
        assert head.resting_share == pytest.approx(1 - head.measures["sound"].value)
    one = attnscope.sound_heads(whisper, (speech(0.61), 16000), "the cat sat on a mat .")
    record = attnscope.sound_heatmap(whisper, (speech(0.61), 16000), "the cat sat on a mat .")
    weights = record.maps[0].weights[1, 2].astype(float)
    asks = ~record.maps[0].queries.special
    assert one.corpus["n_tokens"] == asks.sum() == 7
    expected = values_of(weights[asks], weights.shape[1])
    found_one = {name: heads_in(one)[5].measures[name].value for name in NAMES}
    assert found_one == pytest.approx(expected, abs=1e-5)
    with pytest.raises(AttnscopeError, match="takes texts, not recordings"):
        attnscope.sound_heads(attnscope.load("own"), (speech(0.3), 16000))
    with pytest.raises(AttnscopeError, match="2 recordings and 1 transcript"):
        attnscope.sound_heads(whisper, [(speech(0.3), 16000)] * 2, "the cat")
