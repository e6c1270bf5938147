"""The study: what a model attends to on a text, from the real weights and from Python."""

import os
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnscope
from attnscope.drawing.style import Style
from attnscope.errors import AttnscopeError, UsageError
from attnscope.studies.inputs.reading import truncate
from attnscope.studies.maps import running
from attnscope.studies.maps.study import name_figure_folder
from tests import rounding
from tests.record_helpers import simple, tokens_of

TIRED = "The animal didn't cross the street because it was too tired."
WIDE = "The animal didn't cross the street because it was too wide."


@pytest.fixture(scope="module")
def exact(minilm):
    """What float64 makes of TIRED."""
    del minilm
    return attnscope.heatmap(attnscope.load("minilm", dtype="float64"), TIRED)


def weight(record, layer, head, query, key):
    (row,) = record.maps[0].queries.find(query)
    (column,) = record.maps[0].keys.find(key)
    return float(record.maps[0].of(layer, head)[row, column])


def test_it_looks_at_the_animal_that_is_tired_and_less_at_the_one_beside_something_wide(minilm):
    tired = attnscope.heatmap(minilm, TIRED)
    wide = attnscope.heatmap(minilm, WIDE)
    assert weight(tired, 3, 1, "it", "animal") == pytest.approx(0.68, abs=0.005)
    assert weight(tired, 3, 1, "it", "street") == pytest.approx(0.05, abs=0.005)
    assert weight(wide, 3, 1, "it", "animal") == pytest.approx(0.28, abs=0.005)
    assert weight(wide, 3, 1, "it", "street") == pytest.approx(0.12, abs=0.005)
    previous = tired.maps[0].of(0, 2)
    assert np.mean(np.diagonal(previous, -1)) == pytest.approx(0.9999, abs=1e-3)


def test_a_record_says_what_made_it(minilm):
    record = attnscope.heatmap(minilm, TIRED)
    assert record.weights.shape == (6, 12, 16, 16)
    assert record.weights.dtype == np.float32
    np.testing.assert_allclose(record.weights.sum(-1), 1, atol=1e-5)
    assert record.text == TIRED
    assert record.run["model"] == "minilm"
    assert record.run["sha256"] == "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    assert record.run["engine"] == "native"
    assert record.run["dtype"] == "float32"
    assert record.run["device"] == "cpu"
    assert {"attnscope", "python", "torch", "numpy"} <= set(record.run["versions"])
    assert record.tokens[:6] == ("[CLS]", "the", "animal", "didn", "'", "t")
    assert "".join(TIRED[a:b] for a, b in record.maps[0].keys.offsets[1:-1]) == TIRED.replace(" ", "")


def test_chosen_heads_are_those_of_the_whole(minilm, exact):
    whole = attnscope.heatmap(minilm, TIRED)
    some = attnscope.heatmap(minilm, TIRED, layers=[4, 1], heads=[11, 0, 3])
    assert some.layers == (1, 4)
    assert some.heads == (0, 3, 11)
    place = np.ix_([1, 4], [0, 3, 11])
    rounding.require_no_worse(some.weights, whole.weights[place], exact.weights[place])
    picked = attnscope.heatmap(minilm, TIRED, pick=[(5, 2), (0, 7)])
    assert picked.chosen(picked.maps[0]) == ((5, 2), (0, 7))
    rounding.require_no_worse(picked.maps[0].of(5, 2), whole.weights[5, 2], exact.weights[5, 2])


def test_changes_are_those_of_the_record(minilm, exact):
    changed = attnscope.heatmap(minilm, TIRED, hide_special=True, words=True)
    assert changed.tokens[:3] == ("The", "animal", "didn't")
    assert changed.changes == ("hide_special", "words")
    record = attnscope.heatmap(minilm, TIRED).hide_special().merge_words().weights
    true = exact.hide_special().merge_words().weights
    rounding.require_no_worse(changed.weights, record, true)


def test_pairs_are_read_as_two_texts(minilm):
    record = attnscope.heatmap(minilm, "Who is tired?", pair="The animal.")
    tokens = record.maps[0].queries
    assert tokens.labels == ("[CLS]", "who", "is", "tired", "?", "[SEP]", "the", "animal", ".", "[SEP]")
    assert tokens.segments.tolist() == [0] * 6 + [1] * 4
    assert tokens.pair == "The animal."
    alone = attnscope.heatmap(minilm, "Who is tired? The animal.")
    assert name_figure_folder(record, None, Style()) != name_figure_folder(alone, None, Style())


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"layers": [6]}, "there is no layer 6: minilm has 6 layers (they are numbered 0 to 5)"),
        ({"heads": [1, 12]}, "there is no head 12: minilm has 12 heads (they are numbered 0 to 11)"),
        (
            {"pick": [(0, 0), (9, 1)]},
            "there is no layer 9: minilm has 6 layers (they are numbered 0 to 5)",
        ),
        ({"layers": [-1]}, "there is no layer -1: minilm has 6 layers (they are numbered 0 to 5)"),
    ],
)
def test_heads_that_are_not_there_are_refused_with_how_many_there_are(minilm, choice, said):
    with pytest.raises(AttnscopeError) as caught:
        attnscope.heatmap(minilm, "x", **choice)
    assert str(caught.value) == said
    assert not isinstance(caught.value, UsageError)


@pytest.mark.parametrize("text", ["", " \n\t ", "\u200b", "a\0b", "a\ud800"])
@pytest.mark.parametrize("where", ["text", "pair"])
def test_what_is_no_text_is_refused(minilm, text, where):
    texts = {"text": "a", "pair": "b"} | {where: text}
    with pytest.raises(AttnscopeError, match="the text" if where == "text" else "the second text"):
        attnscope.heatmap(minilm, **texts)


def test_a_text_over_the_limit_is_cut_and_that_is_said(minilm):
    text = "word " * 600
    with pytest.warns(
        UserWarning, match=r"the text has 602 tokens, the model takes 512: the first 510 of the"
    ) as told:
        record = attnscope.heatmap(minilm, text, layers=[0], heads=[0])
    assert len(told) == 1
    assert told[0].filename == __file__  # it points at the caller
    assert record.weights.shape == (1, 1, 512, 512)
    assert [str(told[0].message)] == record.run["notes"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attnscope.heatmap(minilm, "word " * 510, layers=[0], heads=[0])


@given(st.integers(1, 30), st.integers(0, 30), st.integers(4, 40))
def test_cutting_keeps_what_it_says(first, second, limit):
    n = first + second + (3 if second else 2)
    special = (0, first + 1, n - 1) if second else (0, n - 1)
    tokens = tokens_of([f"t{i}" for i in range(n)], special)
    tokens = replace(tokens, segments=(np.arange(n) > first + 1).astype(np.int32))
    cut, said = truncate(tokens, limit)
    assert len(cut) == min(n, limit)
    assert bool(said) == (n > limit)
    assert cut.special.sum() == len(special)
    places = [int(label[1:]) for label in cut.labels]
    assert places == sorted(places)
    kept = [[p for p in places if p not in special and tokens.segments[p] == s] for s in (0, 1)]
    # The first tokens of each text stay; a text is cut only where it is the longer, or takes more than half.
    assert kept[0] == list(range(1, 1 + len(kept[0])))
    assert kept[1] == list(range(first + 2, first + 2 + len(kept[1])))
    if said:
        room = limit - len(special)
        assert f"takes {limit}:" in said
        told = f"the first {room} of the text"
        if second:
            told = f"the first {len(kept[0])} of the first text and {len(kept[1])} of the second"
        assert told in said
        if second:
            assert len(kept[0]) == first or len(kept[0]) >= room // 2
            assert len(kept[1]) == second or len(kept[1]) >= room // 2


def test_a_text_of_special_tokens_only_is_no_text():
    with pytest.raises(AttnscopeError, match="all special"):
        truncate(tokens_of(["[CLS]", "[SEP]"], (0, 1)), None)


def test_maps_that_no_machine_could_hold_are_refused_before_the_model_runs(monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2}[name])
    with pytest.raises(
        AttnscopeError, match="of 60 tokens need 0 GiB, this machine has 0 GiB"
    ) as caught:
        running._require_memory(simple(60))
    assert "--pick" in caught.value.hint
    monkeypatch.setattr(os, "sysconf", lambda name: 2**20)
    running._require_memory(simple(60))


def test_words_that_the_tokenizer_does_not_know_are_named(minilm):
    """Emoji in MiniLM, or DNA in a model of k-mers, became `[UNK]` without a word."""
    with pytest.warns(UserWarning, match=r"2 words are unknown .* reads \[UNK\] instead: 🦜, 🐙🐙$"):
        attnscope.heatmap(minilm, "I love 🦜 and 🐙🐙")
    with pytest.warns(UserWarning, match="1 word is unknown .*: ACGTACGTACGTACGTACGT…$"):
        attnscope.heatmap(minilm, "ACGT" * 50)
    attnscope.heatmap(minilm, "[UNK] love")  # warnings are errors: this name of a token is known
