"""Speech models on recordings: when each token listens, in seconds."""

import json
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image
from scipy.io import wavfile

import attnscope
from attnscope.drawing.cells import pool_to_pixels
from attnscope.errors import AttnscopeError
from attnscope.questions.heatmap_sounds import compute_share_after_sound
from attnscope.senses.recordings import read_recording
from tests.record_helpers import require_lossless, stems
from tests.senses_helpers import speech, write_vision

pytestmark = pytest.mark.filterwarnings("ignore:no transcript was given")
Run = Callable[..., tuple[int, str, str]]
TEXT = "the cat sat on a mat ."


@pytest.fixture(scope="module")
def record(whisper):
    return attnscope.sound_heatmap(whisper, (speech(0.61), 16000), TEXT)


@pytest.fixture
def run(run):
    """Runs the command in this process, standing in a folder of its own that holds a recording."""
    wavfile.write("speech.wav", 16000, speech(0.61))
    return run


def test_cross_attention_is_that_of_eager_attention_in_float64(record, whisper_folder):
    import torch
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration.from_pretrained(
        whisper_folder, attn_implementation="eager", dtype=torch.float64
    )
    extractor = WhisperFeatureExtractor.from_pretrained(whisper_folder)
    features = extractor(speech(0.61), sampling_rate=16000, return_tensors="pt")[
        "input_features"
    ].double()
    ids = [0, 3, 4, 5, 6, 7, 8, 9]
    with torch.no_grad():
        output = model.eval()(features, decoder_input_ids=torch.tensor([ids]), output_attentions=True)
    true = np.stack([weights[0].numpy() for weights in output.cross_attentions])
    (attention,) = record.maps
    assert attention.kind == "cross"
    assert attention.queries.ids.tolist() == ids
    assert true.shape == (2, 3, 8, 50)
    assert record.weights.shape == (2, 3, 8, 31)
    assert float(np.ptp(true)) > 0.1
    np.testing.assert_allclose(record.weights, true[..., :31], atol=2e-5)
    assert compute_share_after_sound(record, (1, 2)) == pytest.approx(
        true[1, 2, :, 31:].sum(-1).mean(), abs=1e-5
    )


def test_frames_are_named_by_their_seconds(record):
    assert record.sound is not None
    # A hop of 160 samples at 16 kHz, halved by one convolution.
    assert record.sound.seconds_per_frame == 0.02
    assert record.sound.seconds == 0.61
    assert record.sound.window_seconds == 1.0
    assert record.tokens[:3] == ("0.00s", "0.02s", "0.04s")
    assert record.tokens[-1] == "0.60s"
    loud = np.abs(speech(0.61))
    expected = [loud[n * 320 : (n + 1) * 320].max() for n in range(31)]
    np.testing.assert_array_equal(record.sound.envelope, np.array(expected, np.float32))


def test_without_a_transcript_the_model_writes(whisper, whisper_folder):
    import torch
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    made = attnscope.sound_heatmap(whisper, (speech(0.5), 16000))
    ids = made.maps[0].queries.ids.tolist()
    assert made.maps[0].queries.n_given == 1
    assert ids[0] == 0
    assert any("the model itself writes" in note for note in made.run["notes"])
    model = WhisperForConditionalGeneration.from_pretrained(whisper_folder).eval()
    extractor = WhisperFeatureExtractor.from_pretrained(whisper_folder)
    features = extractor(speech(0.5), sampling_rate=16000, return_tensors="pt")["input_features"]
    written = [0]
    with torch.no_grad():
        while len(written) < 16:
            token = int(
                model(features, decoder_input_ids=torch.tensor([written])).logits[0, -1].argmax()
            )
            if token == 1:
                break
            written.append(token)
    assert ids == written


def test_records_are_read_back_and_drawn(record, tmp_path):
    require_lossless(record, tmp_path)
    assert stems(record) == ["overview", "L00", "L01"]
    paths = record.only([(1, 2)]).draw(tmp_path, ["png", "svg"], scale="head")
    assert [path.name for path in paths] == ["L01H02.png", "L01H02.svg"]
    with Image.open(paths[0]) as image:
        assert image.width > 900
    assert record._repr_png_().startswith(b"\x89PNG")
    np.testing.assert_array_equal(
        pool_to_pixels(np.array([[1, 5, 2, 0, 7]], np.float32), (2, 1)), [[5, 7]]
    )


def test_recordings_of_many_kinds(tmp_path, whisper):
    tone = speech(0.5, 44100)
    for name, samples in (
        ("float", tone),
        ("int16", np.rint(tone * 32767).astype(np.int16)),
        ("int32", np.rint(tone.astype(np.float64) * 2147483647).astype(np.int32)),
        ("uint8", np.rint(tone * 127 + 128).astype(np.uint8)),
    ):
        wavfile.write(tmp_path / f"{name}.wav", 44100, samples)
        read = read_recording(tmp_path / f"{name}.wav")
        assert read.rate == 44100
        assert read.samples.dtype == np.float32
        np.testing.assert_allclose(read.samples, tone, atol=1 / 100 if name == "uint8" else 1e-4)
    wavfile.write(tmp_path / "two.wav", 44100, np.stack([tone, -tone / 2], 1))
    two = read_recording(tmp_path / "two.wav")
    np.testing.assert_allclose(two.samples, tone / 4, atol=1e-6)
    slow = two.resampled(16000)
    assert len(slow.samples) == 8000
    np.testing.assert_allclose(slow.samples[200:-200], speech(0.5)[200:-200] / 4, atol=0.005)
    with pytest.warns(UserWarning, match="listens for 1 s: the rest is left out") as said:
        made = attnscope.sound_heatmap(whisper, (speech(1.5), 16000), TEXT)
    assert len(said) == 1
    assert made.weights.shape[3] == 50
    assert made.sound is not None
    assert made.sound.seconds == 1.0
    assert compute_share_after_sound(made, (0, 0)) < 1e-5


def test_what_is_no_recording_is_one_line(tmp_path):
    (tmp_path / "empty.wav").touch()
    (tmp_path / "speech.mp3").write_bytes(b"ID3\x04" + bytes(500))
    wavfile.write(tmp_path / "none.wav", 16000, np.zeros(0, np.int16))
    wavfile.write(tmp_path / "whole.wav", 16000, speech(0.5))
    (tmp_path / "half.wav").write_bytes((tmp_path / "whole.wav").read_bytes()[:30])
    for given, said in (
        (tmp_path / "empty.wav", "is empty"),
        (tmp_path / "speech.mp3", "cannot be read as a recording"),
        (tmp_path / "none.wav", "holds no sound"),
        (tmp_path / "half.wav", "half.wav"),
        (tmp_path / "missing.wav", "there is no file"),
        (tmp_path, "is a folder"),
        ((np.array([0.1, np.nan]), 16000), "no numbers"),
        (17, "int is no recording"),
    ):
        with pytest.raises(AttnscopeError, match=said) as error:
            read_recording(given)
        assert "\n" not in str(error.value)


def test_from_the_command_line(run, whisper_folder, tmp_path):
    name = str(whisper_folder)
    status, out, err = run(
        "heatmap", "--audio", "speech.wav", "-m", name, TEXT, "-f", "png,npz", "-o", "a"
    )
    assert status == 0, err
    assert out.split()[-4:] == ["a/overview.png", "a/L00.png", "a/L01.png", "a/heatmap.npz"]
    status, out, _ = run("show", "a", "-o", "b", "--pick", "L1H0,L0H2")
    assert status == 0
    assert out.split() == ["b/picked.png"]
    status, out, err = run(
        "heatmap", "--audio", "speech.wav", "-m", name, "--json", "-f", "npz", "--pick", "L1H1"
    )
    assert status == 0
    assert "the model itself writes" in err
    document = json.loads(out)
    assert document["options"]["sound"]["seconds"] == 0.61
    assert len(document["envelope"]) == 31
    eyes = str(write_vision(tmp_path / "vit"))
    for arguments, ended, said in (
        (("--audio", "speech.wav"), 1, "minilm takes texts, not recordings"),
        (("--audio", "speech.wav", "-m", eyes), 1, "vit takes pictures, not recordings"),
        (("--audio", "speech.wav", "--image", "x.png", "-m", name), 2, "beside --image"),
        (("--audio", "speech.wav", "-m", name, "--query", "cat"), 2, "--query cannot be given"),
        (("--audio", "none.wav", "-m", name), 1, "there is no file"),
        (("the cat", "-m", name), 1, "hears recordings, and reads no text"),
    ):
        status, out, err = run("heatmap", *arguments, "-o", "x")
        assert status == ended, err
        assert out == ""
        assert said in err
        assert len(err.splitlines()) <= 2
