"""Parts of models: of two towers the one that reads what is given, picture encoders, encoders of sound over time."""

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

import attnscope
from attnscope.errors import AttnscopeError
from attnscope.studies.maps.derived import rollout
from tests.conftest import VOCABULARY
from tests.senses_helpers import photo, speech

Run = Callable[..., tuple[int, str, str]]

TEXT = {
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "vocab_size": len(VOCABULARY),
    "max_position_embeddings": 32,
}
VISION = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 32,
    "patch_size": 8,
}
SOUND = {
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "vocab_size": 9,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 4),
    "conv_stride": (10, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}


def strong(model):
    """Weights with which heads differ and look somewhere."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    return model.eval()


def two_towers(model_type):
    size = {"image_size": 32}
    more = {"projection_dim": 8} if model_type == "clip" else {}
    special = {"bos_token_id": 3, "eos_token_id": 4, "pad_token_id": 0}
    config = AutoConfig.for_model(
        model_type, text_config=TEXT | special, vision_config=VISION | size, **more
    )
    return strong(AutoModel.from_config(config))


def write_processor(folder, processor="CLIPImageProcessor", size=32, **more):
    described = {
        "image_processor_type": processor,
        "do_resize": True,
        "size": {"height": size, "width": size},
        "do_center_crop": False,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.4, 0.6],
        "image_std": [0.5, 0.25, 0.2],
        "do_convert_rgb": True,
        **more,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(described), "utf-8")


def write_words(folder):
    """A tokenizer of words in tokenizer.json alone, as all classes of transformers read it."""
    backend = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(VOCABULARY)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]"
    ).save_pretrained(folder)


def eager(model, **inputs):
    """(layer, head, query, key) by the model's own eager attention."""
    twin = type(model)(model.config)
    twin.load_state_dict(model.state_dict(), strict=False)  # a fresh one may have a pooler
    twin.set_attn_implementation("eager")
    with torch.no_grad():
        output = twin.eval()(**inputs, output_attentions=True)
    return np.stack([weights[0].numpy() for weights in output.attentions])


@pytest.mark.parametrize("model_type", ["clip", "siglip"])
def test_a_whole_checkpoint_shows_its_text_and_its_pictures(model_type, tmp_path, run):
    made = two_towers(model_type)
    folder = tmp_path / model_type
    made.save_pretrained(folder)
    write_words(folder)
    write_processor(folder)
    model = attnscope.load(folder)
    kind = "decoder" if model_type == "clip" else "encoder"
    assert model.info.kinds == (kind,)
    assert model.info.n_layers == (2,)
    assert model.info.n_heads == (3,)
    assert any("--image" in note for note in model.info.notes)
    read = attnscope.heatmap(model, "the cat")
    ids = torch.from_numpy(read.maps[0].queries.ids)[None]
    expected = eager(made.text_model, input_ids=ids)
    assert float(np.ptp(expected)) > 0.1
    np.testing.assert_allclose(read.weights, expected, atol=2e-5)
    assert len(attnscope.heads(model, ["the cat sat", "a cat"])["heads"]) == 6

    seen = attnscope.picture_heatmap(model, photo())
    assert model.image_reader.model.info.n_layers == (3,)
    assert model.image_reader.model.info.n_heads == (2,)
    inputs = {
        name: x
        for name, x in model.image_reader.model._forward_inputs(
            model.image_reader.prepare_photo(_photo()).inputs
        ).items()
        if torch.is_tensor(x)
    }
    np.testing.assert_allclose(seen.weights, eager(made.vision_model, **inputs), atol=2e-5)
    assert seen.picture is not None
    rows, columns = seen.picture.grid
    assert len(seen.tokens) == rows * columns + (model_type == "clip")
    # What is shown is the photo, as it is after resizing.
    small = np.asarray(
        Image.fromarray(photo()).resize((columns * 8, rows * 8), Image.Resampling.BILINEAR)
    )
    assert np.abs(seen.picture.pixels.astype(int) - small).mean() < 16
    assert rollout(model, image=photo()).rollout.shape[0] == 3

    Image.fromarray(photo()).save(tmp_path / "photo.png")
    for arguments in (("the cat",), ("--image", tmp_path / "photo.png")):
        status, out, err = run("heatmap", *arguments, "-m", folder, "-f", "npz", "-o", tmp_path / "out")
        assert status == 0, err
        assert (tmp_path / "out" / "heatmap.npz").is_file()
        (tmp_path / "out" / "heatmap.npz").unlink()


def _photo():
    from attnscope.senses.photos import read_photo

    return read_photo(photo())


def test_dinov3_sees_its_registers_and_patches(tmp_path):
    config = AutoConfig.for_model("dinov3_vit", **VISION, image_size=32, num_register_tokens=2)
    made = strong(AutoModel.from_config(config))
    made.save_pretrained(tmp_path)
    write_processor(tmp_path, "DINOv3ViTImageProcessor")
    model = attnscope.load(tmp_path)
    record = attnscope.picture_heatmap(model, photo())
    assert record.tokens[:4] == ("CLS", "REG0", "REG1", "0,0")
    assert len(record.tokens) == 3 + 16
    pixels = model.image_reader.prepare_photo(_photo()).inputs["pixel_values"]
    np.testing.assert_allclose(record.weights, eager(made, pixel_values=pixels), atol=2e-5)


def test_the_picture_encoder_of_a_model_that_writes_of_pictures():
    vision = transformers.ViTConfig(**VISION, image_size=32)
    text = transformers.TrOCRConfig(
        vocab_size=40, d_model=16, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=16
    )
    made = strong(
        transformers.VisionEncoderDecoderModel(
            transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
        )
    )
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    model = attnscope.load(made, processor)
    assert any("with a text beside --image its decoder is shown" in note for note in model.info.notes)
    record = attnscope.picture_heatmap(model, photo())
    pixels = model.image_reader.prepare_photo(_photo()).inputs["pixel_values"]
    np.testing.assert_allclose(record.weights, eager(made.encoder, pixel_values=pixels), atol=2e-5)
    with pytest.raises(AttnscopeError, match="sees pictures, and reads no text"):
        attnscope.heatmap(model, "the cat")


# Sound ------------------------------------------------------------------------------------------------------------


def sound_encoder(model_type, folder):
    """A random encoder of sound with its extractor: a frame each 80 samples."""
    made = strong(AutoModel.from_config(AutoConfig.for_model(model_type, **SOUND)))
    made.save_pretrained(folder)
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(folder)
    return made


@pytest.mark.parametrize("model_type", ["wav2vec2", "hubert", "wavlm"])
def test_encoders_of_sound_over_time(model_type, tmp_path):
    folder = tmp_path / model_type
    made = sound_encoder(model_type, folder)
    model = attnscope.load(folder)
    record = attnscope.sound_heatmap(model, (speech(0.3), 16000))
    heard = model.audio_reader.prepare_recording(
        attnscope.senses.recordings.read_recording((speech(0.3), 16000))
    )
    expected = eager(made, **{name: torch.as_tensor(x) for name, x in heard.inputs.items()})
    assert record.weights.shape == expected.shape
    assert record.maps[0].kind == "encoder"
    assert float(np.ptp(expected)) > 0.05
    np.testing.assert_allclose(record.weights, expected, atol=2e-5)
    assert record.sound is not None
    assert record.sound.seconds_per_frame == 80 / 16000
    assert record.tokens[:2] == ("0.000s", "0.005s")
    assert len(record.tokens) == 60
    assert [path.name for path in record.draw(tmp_path / "figures")] == [
        "overview.png",
        "L00.png",
        "L01.png",
    ]
    back = attnscope.load_record(record.save(tmp_path / "heatmap.npz"))
    np.testing.assert_array_equal(back.weights, record.weights)
    with pytest.raises(AttnscopeError, match="reads no transcript"):
        attnscope.sound_heatmap(model, (speech(0.3), 16000), "the cat")
    with pytest.raises(AttnscopeError, match="hears recordings, and reads no text"):
        attnscope.heatmap(model, "the cat")
    with pytest.raises(AttnscopeError, match="too short|fails"):
        attnscope.sound_heatmap(model, (speech(0.0003), 16000))
