"""Relevance with gradients: equal to plain autograd on eager attention, on the command line, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import attnscope
from attnscope.errors import AttnscopeError
from attnscope.questions.heatmap import Rollout
from tests.conftest import VOCABULARY, write_tokenizer
from tests.record_helpers import require_lossless
from tests.senses_helpers import photo, write_vision

SIZES = {"hidden_size": 15, "num_attention_heads": 3, "num_hidden_layers": 3, "intermediate_size": 11}
TEXT = "the cat a"


def save(folder, kind, config):
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("relevance")
    words = {**SIZES, "vocab_size": len(VOCABULARY), "max_position_embeddings": 29}
    for name in ("bert", "masked", "llama"):
        write_tokenizer(home / name)
    vision = write_vision(home / "vit", layers=3)
    labels = {"id2label": {0: "cat", 1: "dog", 2: "7"}, "label2id": {"cat": 0, "dog": 1, "7": 2}}
    return {
        "bert": save(
            home / "bert",
            transformers.BertForSequenceClassification,
            transformers.BertConfig(**words, **labels),
        ),
        "masked": save(home / "masked", transformers.BertForMaskedLM, transformers.BertConfig(**words)),
        "llama": save(
            home / "llama",
            transformers.LlamaForCausalLM,
            transformers.LlamaConfig(
                **{
                    **words,
                    "hidden_size": 12,
                    "num_attention_heads": 6,
                    "max_position_embeddings": 1200,
                },
                num_key_value_heads=2,
            ),
        ),
        "vit": save(
            vision,
            transformers.ViTForImageClassification,
            transformers.ViTConfig.from_pretrained(vision, **labels),
        ),
    }


def plain(folder, kind, position, number, **inputs):
    """Compute the rows of R - I in shares, (layer, query, key), from eager attentions that retain their gradients."""
    model = kind.from_pretrained(folder, attn_implementation="eager").eval()
    output = model(**inputs, output_attentions=True)
    for weights in output.attentions:
        weights.retain_grad()
    logits = output.logits[0] if output.logits.ndim == 3 else output.logits
    logits[position, number].backward()
    relevance = torch.eye(output.attentions[0].shape[-1], dtype=torch.float64)
    by_layer = []
    for weights in output.attentions:
        cam = (weights.grad[0].double() * weights[0].detach().double()).clamp(min=0).mean(0)
        relevance = relevance + cam @ relevance
        added = (relevance - torch.eye(len(relevance))).numpy()
        total = added.sum(-1, keepdims=True)
        by_layer.append(np.where(total > 0, added / np.where(total > 0, total, 1), 0))
    return np.stack(by_layer)


@pytest.mark.parametrize(
    ("name", "kind", "text", "target", "answer_token"),
    [
        ("bert", transformers.BertForSequenceClassification, TEXT, "dog", 0),
        ("masked", transformers.BertForMaskedLM, "the [MASK] a", "cat", 2),
        ("llama", transformers.LlamaForCausalLM, TEXT, "b", 3),
    ],
)
def test_which_words_matter_for_a_class_a_masked_word_and_the_next_word_is_plain_autograd_on_eager_attention(
    folders, name, kind, text, target, answer_token, tmp_path
):
    record = attnscope.relevance(attnscope.load(folders[name], engine="hf"), target, text)
    number = 1 if name == "bert" else VOCABULARY.index(target)
    ids = torch.tensor(record.maps[0].queries.ids.astype("int64"))[None]
    expected = plain(folders[name], kind, 0 if name == "bert" else answer_token, number, input_ids=ids)
    np.testing.assert_allclose(record.rollout, expected, atol=1e-5)
    assert record.target == target
    assert record.answer_token == answer_token
    assert record.rollout[-1, answer_token].sum() > 0.99
    require_lossless(record, tmp_path)


def test_which_patches_matter_for_the_class_of_a_photo_is_plain_autograd_on_eager_attention(
    folders,
):
    model = attnscope.load(folders["vit"])
    record = attnscope.relevance(model, "dog", image=photo())
    processor = transformers.AutoImageProcessor.from_pretrained(folders["vit"], use_fast=False)
    pixels = processor(Image.fromarray(photo()), return_tensors="pt")["pixel_values"]
    expected = plain(folders["vit"], transformers.ViTForImageClassification, 0, 1, pixel_values=pixels)
    np.testing.assert_allclose(record.rollout, expected, atol=1e-5)
    assert np.array_equal(record.rollout, attnscope.relevance(model, "1", image=photo()).rollout)
    assert not np.allclose(
        record.rollout, attnscope.relevance(model, "7", image=photo()).rollout, atol=1e-3
    )


def test_relevance_on_the_command_line_answers_with_the_row_that_the_prediction_is_read_from(
    run, folders
):
    done = run(
        "heatmap",
        TEXT,
        "--relevance",
        "b",
        "-m",
        str(folders["llama"]),
        "-o",
        "out",
        "-f",
        "npz,png,json",
    )
    assert done.status == 0
    assert "what matters for “b”, as of “a” (token 3)" in done.out
    assert Rollout.load("out/rollout.npz").target == "b"
    assert json.loads(Path("out/rollout.json").read_text())["options"]["target"] == "b"
    Image.fromarray(photo()).save("photo.png")
    done = run(
        "heatmap", "--image", "photo.png", "--relevance", "cat", "-m", str(folders["vit"]), "-o", "seen"
    )
    assert done.status == 0
    assert "what matters for “cat”" in done.out
    assert Path("seen/overview-CLS.png").exists()


@pytest.mark.parametrize(
    ("name", "text", "target", "said"),
    [
        ("bert", TEXT, "bird", "no class 'bird'"),
        ("masked", TEXT, "cat", "0 mask tokens"),
        ("llama", TEXT, "dog", "not a single token"),
        ("llama", "a " * 1100, "b", "too many for gradients"),
    ],
)
def test_relevance_of_what_is_not_predicted_is_refused(folders, name, text, target, said):
    with pytest.raises(AttnscopeError, match=said):
        attnscope.relevance(attnscope.load(folders[name], engine="hf"), target, text)


def test_relevance_of_a_model_without_a_head_is_refused(minilm):
    with pytest.raises(AttnscopeError, match="it has no answers"):
        attnscope.relevance(minilm, "cat", TEXT)
