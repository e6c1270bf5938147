"""Models that compute NaN or infinity: on one text that text is left out and said so; on all of them it is an error."""

import numpy as np
import pytest
import torch

import attnscope
from attnscope import AblateOptions, ablate, heads
from attnscope.errors import AttnscopeError
from attnscope.studies.failures import MAX_NAMED_TEXTS, BrokenTexts
from tests.conftest import VOCABULARY, write_tiny
from tests.heads_helpers import heads_in

TEXTS = ["the cat", "a cat, the cat", "the cat q the", "b c d. b c d.", "cat cat the"]
"""Only the third one has the letter that overflows."""


def write_overflowing(folder):
    """A tiny Llama whose second layer has queries beyond float16 where the letter q is read, and nowhere else."""
    from transformers import AutoModel

    write_tiny(folder, "llama", num_key_value_heads=3, head_dim=6)
    model = AutoModel.from_pretrained(folder)
    letter = VOCABULARY.index("q")
    with torch.no_grad():
        # The first number of a hidden state is 0 but for that letter.
        embeddings, first, second = model.embed_tokens.weight, *model.layers
        embeddings[:, 0] = 0
        embeddings[letter] = 0
        embeddings[letter, 0] = 200
        first.self_attn.o_proj.weight[0] = 0
        first.mlp.down_proj.weight[0] = 0
        second.input_layernorm.weight[:] = 1
        second.self_attn.q_proj.weight[:, 0] = 3e4
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory):
    return write_overflowing(tmp_path_factory.mktemp("overflow") / "big")


def write_texts(folder, texts):
    path = folder / "texts.txt"
    path.write_text("\n".join(texts) + "\n", "utf-8")
    return path


def test_of_many_texts_the_first_are_named_and_all_are_counted():
    parts = [BrokenTexts(1, ((i, "texts", i + 1, ("encoder", 0)),)) for i in range(MAX_NAMED_TEXTS + 7)]
    whole = BrokenTexts()
    for part in parts[::-1]:
        whole = whole.merge(part)
    model = attnscope.load("own")
    problems = whole.list_problems(model.info)
    assert [one["line"] for one in problems[:-1]] == list(range(1, MAX_NAMED_TEXTS + 1))
    assert problems[-1]["reason"].startswith("7 more texts")


def test_heads_leave_out_the_text_that_overflows(overflowing):
    model = attnscope.load(str(overflowing), dtype="float16", check=False)
    found = heads(model, TEXTS)
    (problem,) = found.corpus["problems"]
    assert problem["source"] == "texts"
    assert problem["line"] == 3
    assert "layer 1" in problem["reason"]
    assert "float16" in problem["reason"]
    assert "--dtype" in problem["reason"]
    without = heads(model, [text for text in TEXTS if "q" not in text])
    assert found.corpus["n_texts"] == 4
    assert found.corpus["n_tokens"] == without.corpus["n_tokens"]
    # Log frequencies are those of all texts, so that what they enter differs.
    for mine, other in zip(heads_in(found), heads_in(without), strict=True):
        for name in ("entropy_nats", "previous_token", "same_token"):
            assert mine.measures[name].value == pytest.approx(other.measures[name].value, rel=1e-3)
    assert not heads(attnscope.load(str(overflowing), check=False), TEXTS).corpus["problems"]


def test_no_text_that_is_left_is_an_error(overflowing, run, tmp_path):
    path = write_texts(tmp_path, ["the q", "q", "a q b"])
    status, out, err = run(
        "heads", "--file", path, "-m", overflowing, "--dtype", "float16", "--no-check", "-o", "out"
    )
    assert status == 1
    assert out == ""
    assert err.startswith(
        "error: no text is left: on all 3, big's layer 1 computes NaN or infinity in float16\n"
    )
    assert "hint: try --dtype float32 or bfloat16" in err


@pytest.mark.parametrize("mode", ["zero", "mean"])
def test_ablation_leaves_out_the_text_that_overflows(overflowing, mode):
    model = attnscope.load(str(overflowing), dtype="float16", check=False)
    options = AblateOptions(modes=(mode,))  # type: ignore[arg-type]
    found = ablate(model, TEXTS, options)
    without = ablate(model, [text for text in TEXTS if "q" not in text], options)
    assert [problem["line"] for problem in found.corpus["problems"]] == [3]
    assert "layer 1 computes NaN or infinity in float16" in found.corpus["problems"][0]["reason"]
    assert found.corpus["n_texts"] == 4
    for name in found.table("heads").number_columns:
        np.testing.assert_allclose(found["heads"][name], without["heads"][name], rtol=2e-2, atol=1e-3)
    with pytest.raises(AttnscopeError, match="no text is left: on all 2"):
        ablate(model, ["q", "the q"], options)


@pytest.mark.parametrize(
    "command",
    [
        ("heatmap", "the q"),
        ("heatmap", "the q", "--pool", "8"),
        ("page", "the q"),
        ("heatmap", "--rollout", "the q"),
        ("learn", "trace", "the q", "-L", "1", "-H", "0"),
        ("learn", "split", "the q", "-L", "1"),
        ("compare", "the q", "--with", "the cat"),
        ("compare", "the q", "--pick", "L1H0,L1H1"),
    ],
)
def test_no_picture_is_drawn_of_what_is_no_number(overflowing, run, tmp_path, command):
    status, out, err = run(*command, "-m", overflowing, "--dtype", "float16", "--no-check", "-o", "out")
    assert status == 1
    assert out == ""
    said = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert said[0] == "error: big's layer 1 computes NaN or infinity in float16 on this text"
    assert said[1].startswith("hint: try --dtype float32 or bfloat16")
    assert not list((tmp_path / "out").glob("**/*.*")) if (tmp_path / "out").is_dir() else True


def test_a_decoder_that_overflows_at_once_is_no_encoder(tmp_path):
    """Without a self-check: what a query sees is told by the rows that hold numbers."""
    from transformers import AutoModel

    write_tiny(tmp_path / "llama", "llama", num_key_value_heads=3, head_dim=6)
    model = AutoModel.from_pretrained(tmp_path / "llama")
    with torch.no_grad():
        model.layers[1].self_attn.q_proj.weight *= 1e4
        model.layers[1].input_layernorm.weight *= 1e3
    model.save_pretrained(tmp_path / "llama")
    loaded = attnscope.load(str(tmp_path / "llama"), engine="hf", dtype="float16", check=False)
    assert loaded.info.kinds == ("decoder",)
    with torch.no_grad():
        model.layers[0].self_attn.q_proj.weight *= 1e4
        model.layers[0].input_layernorm.weight *= 1e3
    model.save_pretrained(tmp_path / "llama")
    with pytest.raises(AttnscopeError, match="NaN or infinite on a short random input") as raised:
        attnscope.load(str(tmp_path / "llama"), engine="hf", dtype="float16", check=False)
    assert "--dtype" in raised.value.hint
