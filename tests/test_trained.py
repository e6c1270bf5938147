"""Trained weights of speech and vision: Whisper tiny.en and DINOv2 small, where folders with them are named.

`ATTNSCOPE_WHISPER` and `ATTNSCOPE_DINOV2` name the folders, as `save_pretrained` writes them.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import wavfile

import attnscope
from tests.conftest import SAMPLES

pytestmark = pytest.mark.slow

SPOKEN = "The animal did not cross the street because it was too tired."
OPENAI_HEADS = [(1, 0), (2, 0), (2, 5), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4)]
"""What openai-whisper times words by in tiny.en; the model's own generation_config.json names them."""

EYES_AND_NOSE = {"left eye": (4, 2, 8, 7), "right eye": (5, 12, 9, 15), "nose": (11, 7, 15, 12)}
"""Where they are in the cat's photo as the model sees it, in patches of 16 × 16: top, left, bottom, right."""


def folder_named_by(variable):
    folder = os.environ.get(variable, "")
    if not folder or not Path(folder).is_dir():
        pytest.skip(f"{variable} names no folder of a trained model")
    return folder


@pytest.fixture(scope="module")
def whisper():
    return folder_named_by("ATTNSCOPE_WHISPER")


@pytest.fixture(scope="module")
def dinov2():
    return folder_named_by("ATTNSCOPE_DINOV2")


def true_words():
    return json.loads((SAMPLES / "animal.jsonl").read_text("utf-8"))["words"]


def test_whispers_weights_are_those_of_eager_attention(whisper):
    import torch
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    processor = WhisperProcessor.from_pretrained(whisper)
    eager = WhisperForConditionalGeneration.from_pretrained(whisper, attn_implementation="eager").eval()
    rate, samples = wavfile.read(SAMPLES / "animal.wav")
    heard = processor(samples / 32768, sampling_rate=rate, return_tensors="pt")
    ids = processor.tokenizer(SPOKEN, return_tensors="pt").input_ids
    with torch.no_grad():
        outputs = eager(heard.input_features, decoder_input_ids=ids, output_attentions=True)
    expected = torch.cat(outputs.cross_attentions).numpy()

    record = attnscope.sound_heatmap(attnscope.load(whisper), SAMPLES / "animal.wav", SPOKEN)

    shown = record.maps[0].weights
    rows, frames = shown.shape[-2:]
    assert rows in (ids.shape[1], ids.shape[1] - 1)
    np.testing.assert_allclose(shown, expected[:, :, :rows, :frames], atol=2e-5)


def test_whisper_writes_what_is_said_with_attnscope_in_the_way(whisper, run):
    result = run("heatmap", "--audio", SAMPLES / "animal.wav", "-m", whisper, "--json")

    assert result.status == 0
    tokens = [row["token"] for row in json.loads(result.out)["queries"] if not row["special"]]
    assert "".join(tokens).replace("·", " ").strip() == SPOKEN


def test_l2h1_listens_to_each_word_as_it_is_written(whisper):
    record = attnscope.sound_heatmap(attnscope.load(whisper), SAMPLES / "animal.wav", SPOKEN)
    weights = record.maps[0].weights
    times_s = (np.arange(weights.shape[-1]) + 0.5) * record.sound.seconds_per_frame

    # The row of the token before a word writes it; each word of this sentence is one token.
    words = true_words()
    rows = weights[:, :, 1 : len(words) + 1]
    heard_s = times_s[rows.argmax(-1)]
    starts = np.array([word["start"] for word in words])
    ends = np.array([word["end"] for word in words])
    is_right = (starts <= heard_s) & (heard_s <= ends)

    share = is_right.mean(-1)
    assert share[2, 1] == share.max()
    assert share[2, 1] >= 0.9


@pytest.mark.parametrize(
    "heads", ["L1H5,L2H1,L2H5,L3H2,L3H3,L3H4,L3H5", ""], ids=["chosen by relations", "OpenAI's"]
)
def test_words_are_timed_to_a_tenth_of_a_second(whisper, run, heads):
    picked = ["--pick", heads] if heads else []
    result = run(
        "heatmap", "--audio", SAMPLES / "animal.wav", SPOKEN, "-m", whisper, "--words", *picked, "--json"
    )

    assert result.status == 0
    starts = np.array([word["start_s"] for word in json.loads(result.out)["words"]])
    # The first word begins with the recording in every alignment.
    errors = np.abs(starts - [word["start"] for word in true_words()])[1:]
    assert errors.mean() <= (0.09 if heads else 0.15)


def test_dinov2s_weights_are_those_of_eager_attention(dinov2):
    import torch
    from transformers import AutoImageProcessor, AutoModel

    photo = Image.open(SAMPLES / "cat.jpg").convert("RGB")
    eager = AutoModel.from_pretrained(dinov2, attn_implementation="eager").eval()
    pixels = AutoImageProcessor.from_pretrained(dinov2)(images=photo, return_tensors="pt")
    with torch.no_grad():
        expected = torch.cat(eager(**pixels, output_attentions=True).attentions).numpy()

    record = attnscope.picture_heatmap(attnscope.load(dinov2), SAMPLES / "cat.jpg")

    np.testing.assert_allclose(record.maps[0].weights, expected, atol=2e-5)


def test_three_heads_of_layer_8_find_the_cats_eyes_or_nose(dinov2):
    record = attnscope.picture_heatmap(attnscope.load(dinov2), SAMPLES / "cat.jpg")
    from_cls = record.maps[0].weights[8, :, 0, 1:].reshape(6, 16, 16)

    n_heads = 0
    for weights in from_cls:
        row, column = np.unravel_index(weights.argmax(), weights.shape)
        n_heads += any(
            top <= row <= bottom and left <= column <= right
            for top, left, bottom, right in EYES_AND_NOSE.values()
        )

    assert n_heads >= 3


def test_heads_of_dinov2_look_further_with_depth(dinov2):
    """Dosovitskiy et al. 2021 and Raghu et al. 2021: early layers mix near and far heads, late ones look far."""
    found = attnscope.picture_heads(attnscope.load(dinov2), SAMPLES / "cat.jpg")
    distance = found["heads"].grid("distance_patches", "encoder")

    assert distance[6:].mean() > distance[:6].mean() + 0.5
    assert np.ptp(distance[:6], axis=1).mean() > np.ptp(distance[6:], axis=1).mean() + 1
