"""What heads of speech models do across: monotonicity and its kin, on made maps, and over recordings."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import wavfile
from scipy.stats import kendalltau

import attnscope
from attnscope.core.attention.seam import AttentionCall, attend, attention_weights
from attnscope.core.senses.sound_measures import SOUND_MEASURES, SoundFacts, SoundSums, sound_columns, sound_sums
from attnscope.errors import AttnscopeError
from tests.conftest import Run
from tests.heads_helpers import heads_in
from tests.senses_helpers import speech

pytestmark = pytest.mark.filterwarnings("ignore:no transcript was given")
NAMES = list(SOUND_MEASURES)


def values_of(weights: Any, facts: SoundFacts) -> dict[str, float]:
    """The measures of one head with weights (token, frame)."""
    found = np.asarray(weights, float)[None] @ sound_columns(np.shape(weights)[1], facts)
    sums, counts = sound_sums(found, facts)
    return {name: sums[row, 0] / counts[row, 0] if counts[row, 0] else math.nan for row, name in enumerate(NAMES)}


def test_a_head_that_moves_on_a_head_that_goes_back_and_one_that_stays() -> None:
    facts = SoundFacts(np.ones(5, np.bool_), 5, 0.02)
    forward = values_of(np.eye(5), facts)
    assert forward == pytest.approx({"monotonicity": 1, "steps_forward": 1, "sound": 1, "spread_seconds": 0})
    back = values_of(np.eye(5)[::-1], facts)
    assert (back["monotonicity"], back["steps_forward"]) == (-1, 0)
    stays = values_of(np.tile(np.eye(5)[2], (5, 1)), facts)
    assert (stays["monotonicity"], stays["steps_forward"]) == (0, 0.5)
    even = values_of(np.full((5, 10), 0.1), facts)
    assert even["sound"] == pytest.approx(0.5)
    assert even["spread_seconds"] == pytest.approx(0.02 * math.sqrt(2))  # 0, 1, 2, 3, 4 frames
    # One step back of four: nine of ten pairs are in order.
    swapped = values_of(np.eye(5)[[0, 1, 3, 2, 4]], facts)
    assert (swapped["monotonicity"], swapped["steps_forward"]) == (pytest.approx(0.8), 0.75)


def test_what_counts() -> None:
    """Special tokens ask nothing, silence has no time, and what gives nothing to sound has none either."""
    weights = np.zeros((4, 6))
    weights[0, 3] = weights[1, 0] = weights[2, 5] = weights[3, 1] = 1  # frames 4 and 5 are silence
    facts = SoundFacts(np.array([False, True, True, True]), 4, 0.5)
    assert values_of(weights, facts) == pytest.approx(
        {"monotonicity": 1, "steps_forward": 1, "sound": 2 / 3, "spread_seconds": 0}
    )
    one = values_of(weights, SoundFacts(np.array([False, True, False, False]), 4, 0.5))
    assert math.isnan(one["monotonicity"]) and math.isnan(one["steps_forward"])
    assert one["sound"] == 1


def test_the_probe_is_what_dense_weights_give() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 3, n, 5, generator=generator) for n in (9, 31, 31))
    call = AttentionCall(0, "cross", 4 * query, key, value, 0.6)
    facts = SoundFacts(np.arange(9) > 1, 23, 0.02)
    probe = SoundSums(facts)
    torch.testing.assert_close(probe(call), attend(call), atol=2e-6, rtol=1e-5)
    times = (np.arange(23) + 0.5) * 0.02
    for head, weights in enumerate(attention_weights(call)[0].double().numpy()):
        heard = weights[2:, :23]
        mean = heard @ times / heard.sum(1)
        spread = np.sqrt(((times - mean[:, None]) ** 2 * heard).sum(1) / heard.sum(1))
        sums, counts = (part[:, head] for part in probe.sums["cross"][0])
        assert sums / counts == pytest.approx(
            [kendalltau(np.arange(7), mean).statistic, (np.diff(mean) > 0).mean(), heard.sum(1).mean(), spread.mean()],
            abs=1e-5,
        )
    assert probe.uniform is not None
    assert probe.uniform.sums[2, 0] / probe.uniform.counts[2, 0] == pytest.approx(23 / 31)
    with pytest.raises(RuntimeError, match="twice"):
        probe(call)
    with pytest.raises(ValueError, match="the facts are of"):
        SoundSums(SoundFacts(np.ones(8, np.bool_), 23, 0.02))(call)


def test_over_recordings(whisper: Any, tmp_path: Path) -> None:
    for number, seconds in enumerate((0.4, 0.61, 0.8)):
        wavfile.write(tmp_path / f"{number}.wav", 16000, speech(seconds))
    (tmp_path / "3.wav").write_bytes(b"no sound")
    texts = ["the cat sat .", "a cat", "the mat sat on a cat .", "the"]
    found = attnscope.sound_heads(whisper, str(tmp_path / "*.wav"), texts)
    assert (found.corpus["of"], found.corpus["n_texts"]) == ("recordings", 3)
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
    expected = values_of(weights, SoundFacts(asks, weights.shape[1], record.sound.seconds_per_frame))
    found_one = {name: heads_in(one)[5].measures[name].value for name in NAMES}
    assert found_one == pytest.approx(expected, abs=1e-5)
    with pytest.raises(AttnscopeError, match="takes texts, not recordings"):
        attnscope.sound_heads(attnscope.load("own"), (speech(0.3), 16000))
    with pytest.raises(AttnscopeError, match="2 recordings and 1 transcript"):
        attnscope.sound_heads(whisper, [(speech(0.3), 16000)] * 2, "the cat")


def test_on_the_command_line(whisper_folder: Path, run: Run, tmp_path: Path) -> None:
    wavfile.write(tmp_path / "speech.wav", 16000, speech(0.61))
    status, out, err = run("heads", "the cat sat .", "--audio", "speech.wav", "-m", str(whisper_folder), "-o", "out")
    assert status == 0, err
    assert "monotonicity" in out and "1 recording" in out
    assert (tmp_path / "out/measures.png").is_file()
    assert "monotonicity" in run("show", "out")[1]
    status, out, err = run(
        "heads", "a cat", "--audio", "speech.wav", "-m", str(whisper_folder), "--json", "--measures", "sound"
    )
    assert status == 0, err
    assert json.loads(out)["corpus"]["of"] == "recordings"
    status, out, err = run("heads", "--audio", "speech.wav", "-m", str(whisper_folder))
    assert (status, out) == (1, "")
    assert "no token in what is written" in err
    assert run("heads", "--audio", "speech.wav", "--file", "a.txt", "-m", str(whisper_folder))[0] == 2
