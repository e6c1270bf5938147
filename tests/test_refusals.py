"""What cannot be shown is refused in one line that is true and helps; what only seemed so is shown."""

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel

import attnscope
from attnscope.errors import AttnscopeError
from attnscope.models.hf.assembling import wrap
from attnscope.models.hf.parts import translate_errors
from attnscope.models.hf.tokenizer import NumbersTokenizer
from tests.conftest import edited, write_tiny
from tests.hf_tally import boost, build, difference_from_eager, tiny_settings
from tests.senses_helpers import speech

SMALL = {
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "intermediate_size": 8,
    "vocab_size": 50,
}


def refusal(given, *more):
    with pytest.raises(AttnscopeError) as caught:
        attnscope.load(given, *more)
    assert "\n" not in str(caught.value)
    return caught.value


def tiny(model_type, **changes):
    config = AutoConfig.for_model(model_type)
    model = AutoModel.from_config(type(config)(**(tiny_settings(config) | changes)))
    boost(model)
    return model.eval()


# From files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_the_kernel_that_a_configuration_asks_for_does_not_matter(tmp_path, name):
    folder = edited(write_tiny(tmp_path / "llama", "llama", **SMALL), **{name: "flash_attention_2"})
    assert attnscope.load(folder).info.checked


def test_quantised_checkpoints_are_said_to_be(tmp_path):
    folder = write_tiny(tmp_path / "llama", "llama", **SMALL)
    error = refusal(edited(folder, quantization_config={"quant_method": "gptq", "bits": 4}))
    assert error.message.startswith("llama is quantised (gptq), and cannot be loaded here: ")
    error = refusal(
        edited(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    )
    assert "quantised (bitsandbytes)" in error.message
    model = attnscope.load(edited(folder, quantization_config={"quant_method": "fp8"}))
    assert any(
        "Its configuration says that its weights are quantised (fp8)" in note
        for note in model.info.notes
    )


def test_models_that_read_no_text_need_no_tokenizer(tmp_path):
    config = transformers.Wav2Vec2Config(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        conv_dim=(8, 8),
        conv_kernel=(10, 8),
        conv_stride=(10, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embedding_groups=2,
        num_conv_pos_embeddings=4,
    )
    AutoModel.from_config(config).save_pretrained(tmp_path / "sound")
    model = attnscope.load(tmp_path / "sound")
    with pytest.raises(AttnscopeError, match="hears recordings, and reads no text"):
        attnscope.heatmap(model, "the cat")
    with pytest.raises(AttnscopeError, match="came without its feature extractor"):
        attnscope.sound_heatmap(model, (speech(0.3), 16000))
    (write_tiny(tmp_path / "gpt2", "gpt2", n_embd=15, n_head=3, n_layer=2) / "tokenizer.json").unlink()
    (tmp_path / "gpt2" / "tokenizer_config.json").unlink()
    assert "holds no tokenizer" in refusal(tmp_path / "gpt2").message


# Numbers beyond the embedding -------------------------------------------------------------------------------------


def test_a_tokenizer_of_another_model_is_one_line_in_every_study(tmp_path):
    model = attnscope.load(write_tiny(tmp_path / "small", "llama", **(SMALL | {"vocab_size": 20})))
    for study in (
        lambda: attnscope.heatmap(model, "the cat"),
        lambda: attnscope.heads(model, ["the cat", "the"]),
        lambda: attnscope.page(model, ["the cat"]),
    ):
        with pytest.raises(
            AttnscopeError, match="token number [0-9]+ is beyond the 20 that small has"
        ) as caught:
            study()
        assert "belongs to another model" in caught.value.hint


# In memory --------------------------------------------------------------------------------------------------------


def test_paligemma_reads_a_text_as_what_it_writes():
    """Without types of tokens its sdpa attention sees later tokens, and its eager attention does not."""
    model = wrap(tiny("paligemma"))
    assert (model.info.path, model.info.kinds, model.info.checked) == ("seam", ("decoder",), True)
    shown = attnscope.heatmap(model, "5 6 7 8 9")
    assert not np.triu(shown.weights, 1).any()
    assert np.ptp(shown.weights) > 0


def test_a_configuration_of_each_layer_is_read():
    model = tiny("dots3_note_text")
    shown = wrap(model)
    assert difference_from_eager(shown, model) < 2e-5


@pytest.mark.parametrize("model_type", ["zamba", "zamba2"])
def test_layers_called_hybrid_have_attention(model_type):
    sizes = {
        "zamba": {
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
            "n_mamba_heads": 2,
            "mamba_dt_rank": 8,
        },
        "zamba2": {"n_mamba_heads": 8, "mamba_headdim": 8, "chunk_size": 16, "adapter_rank": 4},
    }[model_type]
    config = AutoConfig.for_model(
        model_type,
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=4,
        mamba_d_state=8,
        use_mamba_kernels=False,
        layers_block_type=[
            "linear_attention",
            "hybrid",
            "linear_attention",
            "hybrid",
            "linear_attention",
        ],
        **sizes,
    )
    model = AutoModel.from_config(config).eval()
    boost(model)
    shown = wrap(model)
    assert shown.info.path == "seam"
    assert shown.survey.layers == {"decoder": (1, 3)}
    assert difference_from_eager(shown, model) < 2e-5


def test_layers_that_attend_to_pictures_are_not_said_to_have_no_attention():
    config = AutoConfig.for_model("mllama")
    settings = tiny_settings(config)
    settings["text_config"]["cross_attention_layers"] = [1]
    notes = wrap(AutoModel.from_config(type(config)(**settings))).info.notes
    assert any("Layers 1 attend to pictures alone" in note for note in notes), notes
    assert not any(note.startswith("Only layers") for note in notes)


def test_what_a_models_own_code_raises_is_one_line_and_what_ours_raises_is_not():
    model = tiny("llama")
    shown = wrap(model)
    with pytest.raises(
        AttnscopeError, match=r"does not run on this input: its own code says \w+Error"
    ) as caught:
        shown.run_inputs(
            {"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": "no mask"},
            lambda call: call.query,
        )
    assert "\n" not in str(caught.value)
    with pytest.raises(IndexError), translate_errors("x"):
        exec("raise IndexError('ours')", {"__name__": "attnscope.somewhere"})
    with (
        pytest.raises(AttnscopeError, match="x does not run: its own code says IndexError: theirs"),
        translate_errors("x"),
    ):
        exec("raise IndexError('theirs')", {"__name__": "transformers.models"})
    with pytest.raises(torch.OutOfMemoryError), translate_errors("x"):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_model_that_padding_makes_causal_is_refused():
    """AIMv2's text tower, of which transformers' sdpa forgets the causal mask where no text is padded."""
    assert "and not where one is padded" in refusal(build("aimv2")).message


def test_the_studies_take_embeddings_that_come_with_a_scale():
    model = tiny("ibert")
    found = attnscope.heads(attnscope.load(model), ["17 5 9 17", "8 8 5 30 22"])
    assert np.isfinite(found["heads"].grid("similar_token", "encoder")).all()


# Reasons that are true --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "sizes", "why"),
    [
        (
            "swin",
            {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 4},
            "attend within windows of a picture, or merge patches: 4 of 16 queries on 16 keys",
        ),
        (
            "segformer",
            {
                "hidden_sizes": [8, 16, 24, 32],
                "num_attention_heads": [1, 2, 2, 4],
                "depths": [1, 1, 1, 1],
            },
            "or merge patches: 1 of 64 queries on 1 keys",
        ),
        (
            "hiera",
            {"embed_dim": 8, "image_size": [64, 64], "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 8]},
            r"has the shape \(1, 1, 4, 64, 64\), not",
        ),
    ],
)
def test_a_model_that_cannot_show_a_picture_is_refused_when_it_is_loaded(model_type, sizes, why):
    with pytest.raises(AttnscopeError, match=why):
        wrap(
            AutoModel.from_config(
                AutoConfig.for_model(model_type, **({"image_size": 32} | sizes))
            ).eval()
        )


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("parakeet_tdt", "its output holds no hidden states of the encoder"),
        ("pegasus_x", r"its own encoder layer 0 has the shape \(\), not"),
        ("oneformer", "its own code says TypeError: .*'task_inputs'"),
        ("nemotron_asr_streaming_encoder", "hidden states are not finite"),
    ],
)
def test_a_reason_is_what_the_models_code_does(model_type, why):
    model = build(model_type)
    assert not isinstance(model, str), model
    with pytest.raises(AttnscopeError, match=why):
        wrap(model)


def test_states_of_linear_layers_are_not_taken_for_weights():
    """MiniMax gives them out beside the weights of its other layers."""
    model = build("minimax")
    shown = wrap(model)
    assert any("Only layers 0,2 of 3 have attention" in note for note in shown.info.notes), (
        shown.info.notes
    )
    assert difference_from_eager(shown, model) < 2e-5


def test_the_setting_that_a_hint_names_works():
    model = tiny("vit_mae")
    assert "model.config.mask_ratio = 0.0" in refusal(model).hint
    model.config.mask_ratio = 0.0
    assert wrap(model).info.path == "seam"


def test_tokens_that_a_model_adds_are_not_called_windows():
    model = tiny("yolos", num_detection_tokens=5, image_size=[32, 32])
    seen = transformers.ViTImageProcessorPil(size={"height": 32, "width": 32})
    with pytest.raises(
        AttnscopeError, match="22 queries on 22 keys where it is given 17 tokens"
    ) as caught:
        attnscope.picture_heatmap(attnscope.load(model, seen), np.zeros((32, 32, 3), np.uint8))
    assert "it adds or merges tokens" in caught.value.message


@pytest.mark.parametrize(
    "model_type",
    [
        "siglip2_vision_model",
        "parakeet_encoder",
        "speech_to_text",
        "vivit",
        "patchtst",
    ],
)
def test_what_reads_neither_text_nor_one_picture_passes_the_seam(model_type):
    assert wrap(tiny(model_type)).info.path == "seam"


def test_a_decoder_alone_of_an_encoder_decoder_writes():
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 2) | {"d_model": 24, "vocab_size": 60}
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    model = transformers.BartForCausalLM(transformers.BartConfig(**sizes, **heads)).eval()
    written = wrap(model).text_generator.generate(NumbersTokenizer().encode("5 7 9"), 3)
    assert len(written) > written.n_given == 3


def test_what_is_no_model_of_transformers_is_refused():
    assert refusal(3).hint.startswith("give a PreTrainedModel")


def test_a_model_of_sentence_transformers_is_taken_as_it_is(minilm_folder):
    """It is a list of modules, of which the first holds the transformer, and it brings the tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    class SentenceTransformer(torch.nn.Sequential):
        tokenizer = AutoTokenizer.from_pretrained(minilm_folder)

    SentenceTransformer.__module__ = "sentence_transformers.sentence_transformer.model"
    whole = SentenceTransformer(
        torch.nn.Sequential(AutoModel.from_pretrained(minilm_folder)), torch.nn.Identity()
    )
    shown = attnscope.heatmap(attnscope.load(whole), "The cat sat.")
    np.testing.assert_allclose(
        shown.weights, attnscope.heatmap(attnscope.load(), "The cat sat.").weights, atol=1e-5
    )


def test_info_names_the_questions_that_a_model_without_the_seam_is_refused():
    """The weights of BLOOM are shown exactly, but `why` refused it without a word of that in `info`."""
    config = AutoConfig.for_model("bloom", vocab_size=40, hidden_size=12, n_head=3, n_layer=2)
    model = wrap(AutoModel.from_config(config))
    assert model.info.path == "eager"
    assert dict(model.info.listing("none"))["not for"].startswith(
        "why, ablate, patch, prune and weights: "
    )
    with pytest.raises(
        AttnscopeError, match="its own modules compute attention, and give its weights alone"
    ):
        attnscope.why(model, "7 5 9", 1, 1, 2)
    assert "not for" not in dict(wrap(tiny("llama")).info.listing("none"))
