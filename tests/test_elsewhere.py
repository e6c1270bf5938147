"""Attention that was computed elsewhere draws, saves and opens as attnscope's own; what is none is refused."""

import numpy as np
import pytest

import attnscope
from attnscope.errors import AttnscopeError

TOKENS = ["<s>", "Ġthe", "▁cat", "##s", "sat"]


def softmax(*shape, causal=False):
    scores = np.random.default_rng(5).normal(size=shape)
    if causal:
        scores[..., *np.triu_indices(shape[-1], 1)] = -np.inf
    powers = np.exp(scores)
    return powers / powers.sum(-1, keepdims=True)


def test_what_is_given_is_what_is_there(tmp_path):
    weights = softmax(2, 3, 5, 5)
    record = attnscope.record_from_arrays(
        weights, TOKENS, layers=[4, 7], special=[0], text="the cats sat", model="mine"
    )
    assert record.tokens == ("<s>", "·the", "·cat", "##s", "sat")
    assert record.maps[0].keys.offsets.tolist() == [[-1, -1], [0, 3], [4, 7], [7, 8], [9, 12]]
    np.testing.assert_array_equal(record.of(7, 2), weights[1, 2].astype(np.float32))
    assert record.maps[0].kind == "encoder"
    assert record.run["model"] == "mine"
    assert record.run["dtype"] == "float64"
    assert len(record.hide_special().tokens) == 4
    again = attnscope.load_record(record.save(tmp_path / "mine.npz"))
    np.testing.assert_array_equal(again.maps[0].weights, record.weights)
    assert [path.name for path in record.only([(4, 1)]).draw(tmp_path / "out", ["png"])]


@pytest.mark.parametrize(
    ("weights", "more", "kind"),
    [
        (softmax(1, 2, 5, 5), {}, "encoder"),
        (softmax(1, 2, 5, 5, causal=True), {}, "decoder"),
        (softmax(1, 2, 5, 5, causal=True), {"kind": "encoder"}, "encoder"),
        (softmax(1, 2, 5, 3), {"keys": ["a", "b", "c"]}, "cross"),
    ],
    ids=["both ways", "looks back", "said", "cross"],
)
def test_its_kind_is_told_by_what_it_is(weights, more, kind):
    assert attnscope.record_from_arrays(weights, TOKENS, **more).maps[0].kind == kind


def test_a_head_that_a_layer_lacks_is_nan():
    weights = softmax(2, 2, 5, 5)
    weights[1, 1] = np.nan
    record = attnscope.record_from_arrays(weights, TOKENS)
    assert [record.maps[0].exists(1, head) for head in (0, 1)] == [True, False]


GOOD = softmax(1, 1, 5, 5)


@pytest.mark.parametrize(
    ("weights", "tokens", "more", "message"),
    [
        (GOOD[0], TOKENS, {}, r"shape \(1, 5, 5\)"),
        (GOOD, TOKENS[:4], {}, r"not \(layer, head, 4, 4\)"),
        (GOOD * 3, TOKENS, {}, "more than 1|not between 0 and 1"),
        (-GOOD, TOKENS, {}, "not between 0 and 1"),
        (np.log(GOOD), TOKENS, {}, "not between 0 and 1"),
        (GOOD, "the c", {}, "no list of texts"),
        (GOOD, [1, 2, 3, 4, 5], {}, "no list of texts"),
        (GOOD, TOKENS, {"layers": [0, 1]}, "2 layers are named, and the weights have 1"),
        (GOOD, TOKENS, {"layers": [-1]}, "a number of maps.n_layers is not between 1"),
        (GOOD, TOKENS, {"special": [9]}, "no token 9"),
        (GOOD, TOKENS, {"kind": "both"}, "no kind of attention 'both'"),
        (GOOD, ["\udcff"] * 5, {}, "surrogates"),
        ("text", TOKENS, {}, "no array of numbers"),
        (np.zeros((0, 0, 5, 5)), TOKENS, {}, "shape"),
    ],
)
def test_what_is_no_attention_is_refused(weights, tokens, more, message):
    with pytest.raises(AttnscopeError, match=message):
        attnscope.record_from_arrays(weights, tokens, **more)


def test_weights_that_are_not_there_in_part_are_refused():
    holed = np.where(GOOD > 0.2, np.nan, GOOD)
    with pytest.raises(AttnscopeError, match="NaN in part"):
        attnscope.record_from_arrays(holed, TOKENS)
