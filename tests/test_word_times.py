"""When words are spoken: alignment against transformers' own, planted attention, and the command line."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.io import wavfile

import attnscope
from attnscope.core.alignment import align_tokens
from attnscope.errors import AttnscopeError
from attnscope.questions.heatmap import Heatmap
from attnscope.studies.maps.derived import time_words
from tests.record_helpers import require_read
from tests.senses_helpers import speech, write_whisper

TEXT = "the cat sat on a mat ."
STARTS_S = [0.0, 0.24, 0.62, 0.78, 1.2, 1.34, 1.9]
"""When each token is planted to begin; the last is the full stop's. The first word begins with the recording."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_whisper(tmp_path_factory.mktemp("speech") / "whisper", seconds=3)


@pytest.fixture(scope="module")
def whisper(folder):
    return attnscope.load(folder)


@pytest.fixture(scope="module")
def planted(whisper):
    """A recording of 2.2 s, of which head L1H2 listens to each word while it writes it; the other heads are random."""
    record = attnscope.sound_heatmap(whisper, (speech(2.2), 16000), TEXT)
    (cross,) = record.maps
    weights = cross.weights.copy()
    # The row of a token listens to what is written after it; the last one, to the end.
    begins = [round(start / 0.02) for start in (*STARTS_S, 2.1, 2.2)]
    for row, (first, last) in enumerate(zip(begins, begins[1:], strict=False)):
        weights[1, 2, row] = 0.1 / weights.shape[-1]
        weights[1, 2, row, first:last] += 0.9 / (last - first)
    return replace(record, maps=(replace(cross, weights=weights),))


def test_the_path_is_that_of_whispers_own_code():
    import torch
    from transformers.models.whisper import generation_whisper as theirs

    drawn = np.random.default_rng(0)
    for _ in range(60):
        n_heads = drawn.integers(1, 4)
        n_tokens = drawn.integers(1, 12)
        n_frames = drawn.integers(1, 60)
        weights = drawn.dirichlet(np.full(n_frames, 0.3), (n_heads, n_tokens))
        held = torch.tensor(weights)
        level = torch.nan_to_num(
            (held - held.mean(-2, keepdim=True)) / held.std(-2, keepdim=True, unbiased=False)
        )
        costs = -theirs._median_filter(level, 7).mean(0).numpy()
        tokens, frames = theirs._dynamic_time_warping(costs)
        expected = frames[np.append(True, np.diff(tokens) > 0)]
        np.testing.assert_array_equal(align_tokens(weights), expected)


def test_words_are_timed_to_a_frame(planted):
    sound = time_words(planted, [(1, 2)]).sound
    assert sound is not None
    assert sound.followed == ((1, 2),)
    assert [word.text for word in sound.words] == ["the", "cat", "sat", "on", "a", "mat ."]
    for word, start, end in zip(sound.words, STARTS_S, STARTS_S[1:], strict=False):
        assert abs(word.start - start) <= 0.02 + 1e-9, word
        if word.text != "mat .":
            assert abs(word.end - end) <= 0.02 + 1e-9, word
    assert all(a.end == b.start for a, b in zip(sound.words, sound.words[1:], strict=False))
    # A head that listens anywhere tells other times: it is the planted one that these come from.
    other = time_words(planted, [(0, 0)]).sound
    assert other is not None
    assert max(abs(a.start - b.start) for a, b in zip(other.words, sound.words, strict=True)) > 0.1


def test_words_are_drawn_over_the_spectrogram(whisper, tmp_path):
    t = np.arange(round(1.5 * 16000)) / 16000
    tone = (0.5 * np.sin(2 * np.pi * 2000 * t) * (t > 0.75)).astype(np.float32)
    timed = attnscope.sound_heatmap(whisper, (tone, 16000), TEXT, times=True, pick=[(1, 2)])
    sound = attnscope.load_record(timed.save(tmp_path / "heatmap.npz")).sound
    assert sound is not None
    assert sound.spectrogram is not None
    seen = sound.spectrogram
    assert seen.levels.shape == (8, 150) and len(sound.envelope) == 75  # two steps a frame, in 8 bands
    assert seen.hertz == tuple(sorted(seen.hertz))
    assert 5000 < seen.hertz[-1] < 8000
    assert 30 < seen.decibels < 100
    loud = seen.levels.astype(float)
    assert loud[:, 80:].mean(1).argmax() == np.abs(np.array(seen.hertz) - 2000).argmin()
    assert loud[:, :70].max() < 30 < 200 < loud[:, 80:].max()  # a hundredth of a second a step
    files = timed.draw(tmp_path / "drawn", ["png", "svg", "pdf"], width="column")
    assert [file.name for file in files[:3]] == ["word-times.png", "word-times.svg", "word-times.pdf"]
    drawn = (tmp_path / "drawn/word-times.svg").read_text()
    for said in ("the", "mat .", "4 kHz", "1.5 s"):
        assert f">{said}<" in drawn or said in drawn
    # Without times nothing of it is kept, and nothing else is drawn.
    plain = attnscope.sound_heatmap(whisper, (tone, 16000), TEXT, pick=[(1, 2)])
    assert plain.sound is not None
    assert plain.sound.spectrogram is None
    assert "spectrogram" not in plain.arrays()
    wrong = timed.describe()
    sound_told = {**wrong["options"]["sound"], "hertz": [1.0]}
    wrong = {**wrong, "options": {**wrong["options"], "sound": sound_told}}
    with pytest.raises(ValueError, match="its spectrogram makes no sense"):
        require_read(Heatmap, wrong, timed.arrays())


def test_what_has_no_times_is_refused(whisper, planted):
    with pytest.raises(AttnscopeError, match="names no heads that follow speech"):
        attnscope.sound_heatmap(whisper, (speech(0.5), 16000), TEXT, times=True)
    with pytest.raises(AttnscopeError, match="takes texts, not recordings"):
        attnscope.sound_heatmap(attnscope.load("own"), (speech(0.5), 16000), TEXT, times=True)
    with pytest.raises(AttnscopeError, match="the record holds no L7H0"):
        time_words(planted, [(7, 0)])
    with pytest.raises(AttnscopeError, match="word times need a recording"):
        time_words(attnscope.heatmap(attnscope.load("own"), "a b"), [(0, 0)])


def test_the_command_times_words(folder, run):
    wavfile.write("speech.wav", 16000, speech(0.61))
    asked = ("heatmap", "--audio", "speech.wav", "-m", folder, TEXT, "--words", "--no-check")
    status, out, err = run(*asked, "--pick", "L1H2", "--json")
    assert status == 0, err
    told = json.loads(out)
    assert told["words"][-1]["word"] == "mat ."
    assert told["options"]["sound"]["followed"] == [[1, 2]]
    _, out, _ = run(*asked, "--pick", "L1H2", "-f", "text")
    assert "start (s)" in out
    assert "mat ." in out

    # The heads that the model's own files name.
    config = folder / "generation_config.json"
    before = config.read_text()
    named = {"alignment_heads": [[0, 1], [1, 0]], "_from_model_config": False}
    config.write_text(json.dumps({**json.loads(before), **named}))
    try:
        status, out, err = run(*asked, "--json")
        assert status == 0, err
        assert json.loads(out)["options"]["sound"]["followed"] == [[0, 1], [1, 0]]
    finally:
        config.write_text(before)
