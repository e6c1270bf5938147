"""What a model can do beyond being run on texts is an object, and None where it cannot."""

import pytest

import attnscope
from attnscope.models.hf.assembling import wrap
from attnscope.models.model import image_model_of
from tests.hf_tally import build

EXTRAS = ("text_generator", "image_reader", "audio_reader", "run_inputs", "head_slices")


@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("own", set()),
        ("own-causal", set()),
        ("minilm", set()),
        ("bert", {"run_inputs", "head_slices"}),
        ("gpt2", {"run_inputs", "head_slices", "text_generator"}),
        ("t5", {"run_inputs", "head_slices", "text_generator"}),
        ("vit", {"run_inputs", "head_slices", "image_reader"}),
        ("wav2vec2", {"run_inputs", "head_slices", "audio_reader"}),
        ("whisper", {"run_inputs", "head_slices", "audio_reader", "text_generator"}),
        (
            "clip",
            {"run_inputs", "head_slices", "image_reader", "text_generator"},
        ),  # CLIP's text tower looks back only
    ],
)
def test_what_a_model_cannot_do_is_none(name, extras):
    ours = name in ("own", "own-causal", "minilm")
    model = attnscope.load(name) if ours else wrap(build(name))
    assert {extra for extra in EXTRAS if getattr(model, extra) is not None} == extras
    assert (image_model_of(model) is model) == (name != "clip")
    tokenizer = model.tokenizer
    assert tokenizer.mask_id is None
    assert tokenizer.encode_chat is None
    assert bool(tokenizer.ordinary_ids()) == ours
    if ours:
        assert model.resumes
        assert model.loss is None
