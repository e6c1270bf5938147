"""Hugging Face models that come from files, and what they write: what loads, and what is refused."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModel

import attnscope
from attnscope.core.attention.probes import WeightsRecorder
from attnscope.errors import AttnscopeError
from attnscope.models import load
from attnscope.models.catalog import Source
from attnscope.models.hf import loading
from attnscope.models.hf.assembling import wrap
from attnscope.models.hf.loading import load_huggingface
from attnscope.models.hf.tokenizer import NumbersTokenizer
from attnscope.models.model import Batch
from tests.conftest import write_tokenizer
from tests.hf_tally import boost
from tests.test_huggingface import tiny


def folder_source(folder):
    return Source(str(folder), folder.name, folder, origin=f"folder {folder}")


# Files ----------------------------------------------------------------------------------------------------------


def test_loading_from_a_folder_equals_transformers(tiny_bert, capfd):
    shown = load_huggingface(folder_source(tiny_bert))
    assert capfd.readouterr() == ("", "")
    tokens = shown.tokenizer.encode("the cat, abc.", "cat")
    batch = Batch(
        torch.from_numpy(tokens.ids)[None], segments=torch.from_numpy(tokens.segments)[None].long()
    )
    probe = WeightsRecorder()
    hidden = shown.run(batch, probe)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_bert)
    model = AutoModel.from_pretrained(tiny_bert, attn_implementation="eager")
    with torch.no_grad():
        output = model(**tokenizer("the cat, abc.", "cat", return_tensors="pt"), output_attentions=True)
    torch.testing.assert_close(hidden, output.last_hidden_state, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.stack(list(probe.maps["encoder"].values())), torch.stack(output.attentions)
    )
    assert len(shown.info.sha256) == 64
    assert shown.info.n_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_the_log_level_and_the_bars_are_put_back(tiny_bert):
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_huggingface(folder_source(tiny_bert))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_pickles_are_loaded_only_when_asked_for(tiny_bert):
    torch.save(load_file(tiny_bert / "model.safetensors"), tiny_bert / "pytorch_model.bin")
    (tiny_bert / "model.safetensors").unlink()
    with pytest.raises(AttnscopeError, match="can run any code") as caught:
        load_huggingface(folder_source(tiny_bert))
    assert "--allow-pickle" in caught.value.hint
    assert load_huggingface(folder_source(tiny_bert), allow_pickle=True).info.n_layers == (2,)


def _change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_weights_that_would_be_random_are_refused(tiny_bert):
    _change_weights(
        tiny_bert, lambda weights: weights.pop("encoder.layer.1.attention.self.query.weight")
    )
    with pytest.raises(AttnscopeError, match=r"lacks 1 weights.*query\.weight.*random"):
        load_huggingface(folder_source(tiny_bert))


def test_a_missing_pooler_is_noted(tiny_bert):
    def drop_pooler(weights):
        for name in [name for name in weights if "pooler" in name]:
            weights.pop(name)

    _change_weights(tiny_bert, drop_pooler)
    notes = load_huggingface(folder_source(tiny_bert)).info.notes
    assert "The files hold no pooler; attention does not depend on it." in notes


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_refused(tiny_bert, value):
    _change_weights(
        tiny_bert,
        lambda weights: weights["encoder.layer.0.output.dense.weight"].view(-1)[3].fill_(value),
    )
    with pytest.raises(AttnscopeError, match=r"no numbers.*output\.dense\.weight"):
        load_huggingface(folder_source(tiny_bert))


@pytest.mark.parametrize("damage", ["cut", "text", "empty"])
def test_damaged_weights_are_refused(tiny_bert, damage):
    path = tiny_bert / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(
        {"cut": whole[: len(whole) // 2], "text": b"<html>not found</html>", "empty": b""}[damage]
    )
    with pytest.raises(AttnscopeError, match="cannot load tiny-bert") as caught:
        load_huggingface(folder_source(tiny_bert))
    assert "\n" not in str(caught.value)


def test_weights_that_do_not_fit_the_configuration_are_refused(edit_config):
    with pytest.raises(AttnscopeError) as caught:
        load_huggingface(folder_source(edit_config(intermediate_size=13)))
    assert "\n" not in str(caught.value)


def test_code_of_strangers_does_not_run(tiny_bert, edit_config, tmp_path):
    (tiny_bert / "evil.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
    )
    edit_config(model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"})
    with pytest.raises(AttnscopeError) as caught:
        load_huggingface(folder_source(tiny_bert))
    assert "--trust-remote-code" in caught.value.hint
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_a_tokenizer_is_refused_and_its_model_can_be_wrapped(tiny_bert):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tiny_bert / name).unlink()
    with pytest.raises(AttnscopeError, match="holds no tokenizer"):
        load_huggingface(folder_source(tiny_bert))
    shown = wrap(AutoModel.from_pretrained(tiny_bert))
    tokens = shown.tokenizer.encode_ids([17, 5])
    assert tokens.labels == ("#17", "#5")
    with pytest.raises(AttnscopeError, match="has no tokenizer"):
        shown.tokenizer.encode("the cat")


def test_a_tokenizer_without_a_vocabulary_is_refused(tiny_bert):
    (tiny_bert / "tokenizer.json").unlink()
    (tiny_bert / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "AlbertTokenizer"}))
    with pytest.raises(AttnscopeError, match="AlbertTokenizer finds no vocabulary"):
        load_huggingface(folder_source(tiny_bert))


def test_gguf_without_its_packages(tiny_bert, monkeypatch):
    (tiny_bert / "model.safetensors").unlink()
    (tiny_bert / "model.gguf").write_bytes(b"GGUF")
    find = loading.importlib.util.find_spec
    absent = {"gguf", "accelerate"}
    monkeypatch.setattr(
        loading.importlib.util, "find_spec", lambda name: None if name in absent else find(name)
    )
    for spec in (tiny_bert, tiny_bert / "model.gguf"):
        with pytest.raises(AttnscopeError, match="gguf and accelerate") as caught:
            load(str(spec))
        assert caught.value.hint == "pip install gguf accelerate"


def test_only_transformers_models_are_wrapped():
    with pytest.raises(AttnscopeError, match="Linear is no transformers model"):
        wrap(torch.nn.Linear(2, 2))


# Writing --------------------------------------------------------------------------------------------------------


def causal_lm(**more):
    config = transformers.LlamaConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=16,
        vocab_size=60,
        max_position_embeddings=32,
        **more,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    boost(model)
    return model


def test_generate_takes_the_most_probable_token_each_time():
    model = causal_lm(eos_token_id=None)
    shown = wrap(model)
    ids = [7, 30, 11]
    expected = list(ids)
    with torch.no_grad():
        for _ in range(9):
            expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
    given = shown.tokenizer.encode_ids(ids)
    assert shown.text_generator.generate(given, 9).ids.tolist() == expected
    assert len(shown.text_generator.generate(given, 99)) == 32

    tokens = shown.text_generator.generate(given, 4)
    assert tokens.ids.tolist() == expected[:7]
    assert tokens.n_given == 3

    model.generation_config.eos_token_id = [expected[5]]
    assert shown.text_generator.generate(given, 9).ids.tolist() == expected[:5]


def test_who_cannot_write_says_so():
    assert wrap(tiny("bert")).text_generator is None
    with pytest.raises(AttnscopeError, match="bert cannot continue a text"):
        attnscope.heatmap(wrap(tiny("bert")), "5", generate=3)
    headless = wrap(tiny("llama")).text_generator
    text_generator = wrap(causal_lm()).text_generator
    tokens = NumbersTokenizer().encode("5")
    with pytest.raises(AttnscopeError, match="without a language-model head"):
        headless.generate(tokens, 3)
    with pytest.raises(AttnscopeError, match="nothing to continue"):
        text_generator.generate(tokens.take(np.arange(0)), 3)
    with pytest.raises(AttnscopeError, match="no encoder-decoder"):
        text_generator.encode_target("the cat")
    with pytest.raises(AttnscopeError, match="has a decoder that answers"):
        wrap(tiny("t5")).text_generator.generate(tokens, 3)


def test_a_model_saved_with_its_head_writes_after_loading(tmp_path):
    folder = tmp_path / "writer"
    model = causal_lm(eos_token_id=None)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    shown = load_huggingface(folder_source(folder))
    written = [
        one.text_generator.generate(NumbersTokenizer().encode("7 30"), 5).ids.tolist()
        for one in (shown, wrap(model))
    ]
    assert written[0] == written[1]
    assert shown.info.kinds == ("decoder",)


@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_the_greedy_target_of_an_encoder_decoder(model_type):
    base = tiny(model_type)
    base.config.decoder_start_token_id = 2
    base.config.forced_bos_token_id = None
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(base.config).eval()
    boost(model)
    model.generation_config.eos_token_id = 98
    model.generation_config.forced_eos_token_id = None
    shown = wrap(model)
    tokens = shown.tokenizer.encode_ids([11, 12, 13, 14])
    target = shown.text_generator.greedy_target(tokens, 5)
    expected = [2]
    with torch.no_grad():
        for _ in range(5):
            logits = model(
                torch.tensor([[11, 12, 13, 14]]), decoder_input_ids=torch.tensor([expected])
            ).logits
            expected.append(int(logits[0, -1].argmax()))
    expected = expected[: expected.index(98)] if 98 in expected else expected
    assert target.ids.tolist() == expected
    assert target.n_given == 1
    probe = WeightsRecorder()
    batch = Batch(torch.from_numpy(tokens.ids)[None], target_ids=torch.from_numpy(target.ids)[None])
    assert shown.run(batch, probe).shape[1] == len(expected)
    assert set(probe.maps) == {"encoder", "decoder", "cross"}
