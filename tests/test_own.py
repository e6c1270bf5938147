"""The glass box does what it says: every head looks where its role says, on every text, and rests elsewhere."""

import math
import os
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnscope.models as models
from attnscope.core.attention.probes import WeightsRecorder
from attnscope.core.attention.seam import attention_weights
from attnscope.errors import AttnscopeError
from attnscope.models import Batch
from attnscope.models.own import glass_box as own
from attnscope.models.own.glass_box import (
    BOS,
    EOS,
    FIRST_WORD,
    MAX_TOKENS,
    REST,
    VOCAB_SIZE,
    OwnTokenizer,
    describe_own,
    load_own,
    token_codes,
    written_slot,
)
from attnscope.text import word_spans
from tests.conftest import SAMPLES
from tests.processes import python

SHA256 = {
    "own": "66faa1315d316dd9abe51dca67776681a493489f67f06b86e9bd7831c463e1c4",
    "own-causal": "a9beb3d8b6a7ff05a028333c078042b55b62773b51b2d9d3979868d6c8a3da10",
}
LOOKS_BACK = {"own": (False, True), "own-causal": (True, True)}
LAYER_1 = ("previous", "induction", "self", "first", "same", "two back", "uniform")
HEADS = {
    "own": (("previous", "next", "self", "first", "same", "punctuation", "uniform"), LAYER_1),
    "own-causal": (("previous", "two back", "self", "first", "same", "punctuation", "uniform"), LAYER_1),
}
NAMES = tuple(HEADS)


@cache
def model(name="own", dtype="float32"):
    return load_own(name, dtype=dtype)


@cache
def sample_texts():
    lines = [
        (SAMPLES / name).read_text("utf-8").splitlines()
        for name in ("sentences.txt", "multilingual.txt")
    ]
    paragraphs = (SAMPLES / "alice.txt").read_text("utf-8").split("\n\n")
    return [text.strip() for text in (*lines[0], *lines[1], *paragraphs) if text.strip()]


def weights_of(glass_box, batch):
    """(layer, batch, head, query, key) and the residual stream at the end."""
    probe = WeightsRecorder()
    with torch.inference_mode():
        hidden = glass_box.run(batch, probe)
    (layers,) = probe.maps.values()
    return np.stack([layers[0].double().numpy(), layers[1].double().numpy()]), hidden


def batch_of(ids):
    return Batch(torch.as_tensor(np.asarray(ids))[None])


@cache
def right_keys(head, ids):
    """Where a head is to look from each place of a text, whichever way it may look: (query, key), True = there."""
    n = len(ids)
    looks = {
        "previous": lambda i, j: j == i - 1,
        "next": lambda i, j: j == i + 1,
        "two back": lambda i, j: j == i - 2,
        "self": lambda i, j: j == i,
        "first": lambda i, j: j == 0,
        "same": lambda i, j: j != i and ids[j] == ids[i],
        "induction": lambda i, j: 0 < j < i and ids[j - 1] == ids[i],
        "punctuation": lambda i, j: 8 <= ids[j] < FIRST_WORD,
    }[head]
    return np.array([[looks(i, j) for j in range(n)] for i in range(n)])


def assert_every_head_looks_right(name, ids, attention):
    """The mass on the right keys, or at rest, is at least what the margins of the scores promise."""
    n = len(ids)
    on_right = 1 / (1 + math.exp(-16) + n * math.exp(-32)) - 1e-5
    at_rest = 1 / (1 + n * math.exp(-16)) - 1e-5
    ids = tuple(int(number) for number in ids)
    right_of = {head: right_keys(head, ids) for head in {*HEADS[name][0], *HEADS[name][1]} - {"uniform"}}
    for layer, heads in enumerate(HEADS[name]):
        may = np.tri(n, dtype=bool) if LOOKS_BACK[name][layer] else np.ones((n, n), bool)
        for number, head in enumerate(heads):
            where = f"{name} L{layer}H{number} ({head})"
            rows = attention[layer, number]
            if head == "uniform":
                np.testing.assert_allclose(
                    rows, may / may.sum(1, keepdims=True), rtol=1e-5, err_msg=where
                )
            else:
                right = right_of[head] & may
                has_right = right.any(1)
                # A first token that sees itself alone cannot rest elsewhere.
                rest = np.where(may[:, 1], 1, 0)
                assert ((rows * right).sum(1)[has_right] >= on_right).all(), where
                assert (rows[np.arange(n), rest][~has_right] >= at_rest).all(), where


# What the heads do


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2))])
def test_every_head_looks_where_its_role_says_on_every_sample_text(name, part):
    for text in sample_texts()[part::3]:
        ids = OwnTokenizer().encode(text).ids
        attention, _ = weights_of(model(name), batch_of(ids))
        assert_every_head_looks_right(name, ids, attention[:, 0])


@pytest.mark.parametrize("name", NAMES)
def test_induction_on_repeated_random_tokens(name):
    half = np.random.default_rng(0).integers(FIRST_WORD, VOCAB_SIZE, 97)
    ids = [BOS, REST, *half, *half, EOS]
    attention, hidden = weights_of(model(name), batch_of(ids))
    for i in range(2 + 97, 2 + 2 * 97 - 1):
        assert attention[1, 0, 1, i, i - 96] >= 0.98
    # The circuit copies: what it writes is the code of the token that comes next.
    predicted = hidden[0, 2 + 97 : 2 + 2 * 97 - 1, written_slot(1, 1)].numpy()
    np.testing.assert_allclose(predicted, token_codes(half[1:]), atol=1e-3)
    assert_every_head_looks_right(name, ids, attention[:, 0])


@pytest.mark.parametrize("name", NAMES)
def test_every_head_writes_what_it_attends_to_into_a_slot_of_its_own(name):
    ids = OwnTokenizer().encode("A rose is a rose is a rose.").ids
    attention, hidden = weights_of(model(name), batch_of(ids))
    codes = token_codes(ids)
    taken = []
    for layer in range(2):
        for head in range(7):
            slot = written_slot(layer, head)
            np.testing.assert_allclose(
                hidden[0, :, slot].numpy(), attention[layer, 0, head] @ codes, atol=1e-4
            )
            taken += range(slot.start, slot.stop)
    assert len(set(taken)) == len(taken) == 2 * 7 * 64
    assert min(taken) > own.EOS_FLAG
    assert max(taken) < own.D_MODEL
    np.testing.assert_array_equal(hidden[0, :, own.TOKEN_SLOT].numpy(), codes)


# Places and codes


def test_different_tokens_have_codes_that_agree_little():
    # The code is linear: the product of two codewords is the codeword of the exclusive or of their numbers. So the
    # sums of single codewords are the dot products of pairs.
    one, other = np.random.default_rng(0).integers(FIRST_WORD, VOCAB_SIZE, (2, 1000))
    both = one ^ other
    kept = both >= 8
    np.testing.assert_array_equal((token_codes(one) * token_codes(other))[kept], token_codes(both[kept]))
    # Numbers are 15 quadratic bits, 6 linear ones and a sign: every quadratic codeword times every linear one.
    points = np.array([[point >> variable & 1 for variable in range(6)] for point in range(64)])
    linear = (-1.0) ** (points @ points.T)
    assert np.abs(token_codes(np.arange(1, 2**15) << 7) @ linear).max() == 32
    np.testing.assert_array_equal(token_codes(np.arange(4, 64) << 1), linear[4:])
    np.testing.assert_array_equal(token_codes(np.arange(4, 64) << 1 | 1), -linear[4:])
    assert not token_codes(np.arange(8)).any()


class _FewRowsOfLayer0(Exception):
    """Carries weights out of a forward pass whose whole maps would not fit."""


def test_places_are_exact_up_to_the_limit():
    n = MAX_TOKENS
    ids = np.random.default_rng(1).integers(FIRST_WORD, VOCAB_SIZE, n)
    ids[[0, 1, -1]] = BOS, REST, EOS
    ids[[7, 20_000]] = ids[30_000]
    rows = [0, 1, 2, 3, 31, 33, 34, 31 * 33, 31 * 34, 33 * 34, 20_000, 30_000, n - 2, n - 1]

    def few_rows(call):
        raise _FewRowsOfLayer0(attention_weights(replace(call, query=call.query[:, :, rows])))

    with pytest.raises(_FewRowsOfLayer0) as caught, torch.inference_mode():
        model("own").run(batch_of(ids), few_rows)
    attention = caught.value.args[0][0].numpy()
    for row, i in enumerate(rows):
        assert attention[0, row, i - 1 if i else 1] > 0.999
        assert attention[1, row, i + 1 if i < n - 1 else 1] > 0.999
        assert attention[2, row, i] > 0.999
        assert attention[3, row, 0] > 0.999
        same = [7, 30_000] if i == 20_000 else [7, 20_000] if i == 30_000 else [1]
        assert attention[4, row, same].sum() > 0.995
        assert attention[5, row, 1] > 0.995
    with pytest.raises(AttnscopeError, match="longer than the 34782"):
        model("own").run(batch_of(np.append(ids, EOS)), WeightsRecorder())


# Masks and precision


@pytest.mark.parametrize("name", NAMES)
def test_padding_on_either_side_does_not_matter(name):
    texts = ["Well, well, well.", "x", "no stops at all and no stops at all"]
    encoded = [OwnTokenizer().encode(text).ids for text in texts]
    longest = max(len(ids) for ids in encoded)
    for left in (False, True):
        ids = np.full((3, longest), 0)
        mask = np.zeros((3, longest), bool)
        places = []
        for row, one in enumerate(encoded):
            places.append(slice(longest - len(one), longest) if left else slice(0, len(one)))
            ids[row, places[-1]], mask[row, places[-1]] = one, True
        # Where nothing but rounding moves, there is next to none of it.
        exact = model(name, dtype="float64")
        attention, hidden = weights_of(exact, Batch(torch.as_tensor(ids), torch.as_tensor(mask)))
        for row, (one, place) in enumerate(zip(encoded, places, strict=True)):
            alone, hidden_alone = weights_of(exact, batch_of(one))
            # As float32.
            np.testing.assert_allclose(attention[:, row, :, place, place], alone[:, 0], atol=1.2e-7)
            assert not attention[:, row, :, place][..., ~mask[row]].any()
            torch.testing.assert_close(hidden[row, place], hidden_alone[0], atol=1e-10, rtol=0)


# Text


@settings(max_examples=60)
@given(st.text(max_size=40), st.none() | st.text(max_size=20))
def test_any_text_runs_and_every_token_knows_its_place(text, pair):
    tokens = OwnTokenizer().encode(text, pair)
    n_added = 3 if pair is None else 4
    assert int(tokens.special.sum()) == n_added
    for segment, whole in ((0, text), (1, pair or "")):
        own_tokens = ~tokens.special & (tokens.segments == segment)
        assert [tuple(span) for span in tokens.offsets[own_tokens].tolist()] == word_spans(whole)
        assert tokens.words[own_tokens].tolist() == list(range(len(word_spans(whole))))
    assert all(tokens.labels)
    attention, _ = weights_of(model(), batch_of(tokens.ids))
    assert_every_head_looks_right("own", tokens.ids, attention[:, 0])


def test_case_and_composition_make_no_difference_but_punctuation_does():
    def ids(text):
        return OwnTokenizer().encode(text).ids.tolist()[2:-1]

    assert ids("The") == ids("the") == ids("THE")
    assert ids("Straße") == ids("STRASSE")
    assert ids("Café") == ids("cafe\u0301")
    assert len(set(ids("' \" , ; . ! ? ( ) [ ] ¿ 。 「"))) == 14
    assert ids("\ud800") != ids("\ud801")


# As a model among others


def test_the_catalogue_knows_it_and_models_load_it():
    source = models.resolve("own")
    assert source.name == "own"
    assert source.folder is None
    assert models.open_tokenizer(source) is None
    loaded = models.load("own")
    assert isinstance(loaded, own.OwnModel)
    info, tokenizer = models.describe("own")
    assert info == loaded.info == describe_own()
    assert tokenizer.name == loaded.tokenizer.name
    assert models.load("own-causal", engine="native", dtype="float64").info.dtype == "float64"
    with pytest.raises(AttnscopeError, match="the hf engine has no model own"):
        models.load("own", engine="hf")


def test_an_untrained_twin():
    name = "own-causal"
    ids = OwnTokenizer().encode("the cat sat on the mat").ids
    before = weights_of(model(name), batch_of(ids))[0]
    twin, again, other = (
        weights_of(model(name).untrained(seed), batch_of(ids))[0] for seed in (3, 3, 4)
    )
    np.testing.assert_array_equal(twin, again)
    assert np.abs(twin - other).max() > 1e-3
    np.testing.assert_array_equal(weights_of(model(name), batch_of(ids))[0], before)
    assert model(name).untrained(3).info.sha256 == ""
    assert model(name).info.heads


def test_everywhere_the_same_weights_and_numbers_without_torch():
    program = (
        "import sys, attnscope.models as m; from attnscope.models.own.glass_box import describe_own;"
        "print(*(describe_own(n).sha256 for n in ('own', 'own-causal')));"
        "print(*m.describe('own')[1].encode('Ein Wort!').ids);"
        "assert 'torch' not in sys.modules"
    )
    for seed in ("1", "2"):
        printed = python(
            "-c", program, env=os.environ | {"PYTHONHASHSEED": seed}, check=True
        ).stdout.split()
        assert printed == [*SHA256.values(), "0", "1", "1464620", "1202105", "41", "3"]
