"""What is loaded is what the files hold: nothing random, nothing left out that attention would use."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from attnscope.core.attention.probes import WeightsRecorder
from attnscope.errors import AttnscopeError
from attnscope.models.catalog import Source, resolve
from attnscope.models.hf.loading import load_huggingface
from attnscope.models.model import Batch
from tests.hf_tally import boost, build

SIZES = {"vocab_size": 60, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
T5 = {
    "vocab_size": 60,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 16,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}


def saved(model, folder):
    boost(model)
    model.save_pretrained(folder)
    words = Tokenizer(
        WordLevel({name: number for number, name in enumerate(["[UNK]", "[PAD]", *"abcdefgh"])}, "[UNK]")
    )
    words.pre_tokenizer = Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]"
    )
    tokenizer.save_pretrained(folder)
    return folder


def opened(folder):
    return load_huggingface(Source(str(folder), folder.name, folder))


def configure(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def change(folder, function):
    weights = load_file(folder / "model.safetensors")
    save_file(function(weights), folder / "model.safetensors", metadata={"format": "pt"})


def without(part):
    return lambda weights: {name: tensor for name, tensor in weights.items() if part not in name}


def llama(**more):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, **{"num_hidden_layers": 3, **more})
    )


def switch():
    return transformers.SwitchTransformersForConditionalGeneration(
        transformers.SwitchTransformersConfig(**T5, num_experts=2, pad_token_id=0)
    )


def nllb_moe():
    heads = dict.fromkeys(
        ("encoder_attention_heads", "decoder_attention_heads", "encoder_layers", "decoder_layers"), 2
    )
    widths = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_model"), 16)
    sparse = dict.fromkeys(("encoder_sparse_step", "decoder_sparse_step"), 1)
    config = transformers.NllbMoeConfig(vocab_size=60, num_experts=2, **heads, **widths, **sparse)
    return transformers.NllbMoeForConditionalGeneration(config)


def longcat():
    model = build("longcat_flash")
    return transformers.AutoModelForCausalLM.from_config(model.config)


@pytest.mark.parametrize("make", [switch, nllb_moe, longcat])
def test_a_router_is_no_head_though_it_has_a_classifier(make, tmp_path):
    folder = saved(make(), tmp_path)
    change(folder, without("router.classifier"))
    with pytest.raises(AttnscopeError, match=r"lacks \d+ weights, such as .*router\.classifier.*random"):
        opened(folder)


def test_a_head_that_is_missing_is_told_by_its_place(tmp_path):
    folder = saved(llama(tie_word_embeddings=False), tmp_path)
    change(folder, without("lm_head"))
    shown = opened(folder)
    assert "The files hold no lm_head; attention does not depend on it." in shown.info.notes
    with pytest.raises(AttnscopeError, match="without a language-model head"):
        shown.text_generator.generate(shown.tokenizer.encode_ids([5, 6]), 2)


def _with_norms(weights):
    layers = {name.partition(".self_attn")[0] for name in weights if "self_attn" in name}
    return weights | {
        f"{layer}.self_attn.{n}_norm.weight": torch.ones(8) for layer in layers for n in "qk"
    }


@pytest.mark.parametrize(
    ("saved_with", "settings", "more", "named"),
    [
        (
            {"attention_bias": True},
            {"attention_bias": False},
            dict,
            r"12 weights .*layers\.0\.self_attn\.k_proj\.bias",
        ),
        ({}, {}, _with_norms, r"6 weights .*layers\.0\.self_attn\.k_norm\.weight"),
        ({}, {"num_hidden_layers": 2}, dict, r"9 weights .*layers\.2\.input_layernorm\.weight"),
    ],
)
def test_weights_that_the_configuration_has_no_place_for_are_refused(
    saved_with, settings, more, named, tmp_path
):
    folder = saved(llama(**saved_with), tmp_path)
    opened(folder)
    configure(folder, **settings)
    change(folder, more)
    with pytest.raises(AttnscopeError, match=named) as caught:
        opened(folder)
    assert "config.json" in caught.value.hint


def test_what_is_computed_today_or_lies_beside_the_model_is_no_reason_to_refuse(tmp_path):
    folder = saved(llama(), tmp_path)
    clean = opened(folder).info.notes

    def old(weights):
        name = "model.layers.0.self_attn"
        return weights | {
            f"{name}.rotary_emb.inv_freq": torch.ones(4),
            f"{name}.bias": torch.ones(1, 1, 9, 9).tril(),
            f"{name}.masked_bias": torch.tensor(-1e4),
            "model.position_ids": torch.arange(9)[None],
        }

    change(folder, old)
    assert opened(folder).info.notes == clean
    change(
        folder,
        lambda weights: (
            weights | {"value_head.weight": torch.ones(1, 32), "mtp.norm.weight": torch.ones(32)}
        ),
    )
    assert (
        "The files also hold mtp, value_head, which is not part of what is shown."
        in opened(folder).info.notes
    )


@pytest.mark.parametrize("name", ["T5EncoderModel", "UMT5EncoderModel"])
def test_the_class_that_the_configuration_names_is_loaded_where_it_is_an_encoder(name, tmp_path):
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**T5)).eval()
    folder = saved(model, tmp_path)
    shown = opened(folder)
    assert shown.info.kinds == ("encoder",)
    assert shown.info.n_layers == (2,)
    ids = torch.randint(5, 55, (1, 11))
    probe = WeightsRecorder()
    hidden = shown.run(Batch(ids), probe)
    with torch.no_grad():
        twin = cls.from_pretrained(folder, attn_implementation="eager")(ids, output_attentions=True)
    torch.testing.assert_close(hidden, twin.last_hidden_state, rtol=1e-4, atol=1e-5)
    for own, other in zip(probe.maps["encoder"].values(), twin.attentions, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)


def test_a_gguf_file_is_meant_by_its_path(tmp_path):
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    source = resolve(str(tmp_path / "two.gguf"))
    assert source.name == "two"
    assert source.folder == tmp_path
    assert source.file == "two.gguf"
    with pytest.raises(AttnscopeError, match="holds 2 GGUF files") as caught:
        load_huggingface(resolve(str(tmp_path)))
    assert str(tmp_path / "one.gguf") in caught.value.hint
