"""What heads do in a line each: of models whose heads are known, for every cut of a corpus, saved and read again."""

import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

import attnscope
from attnscope.core.attention.probes import WeightsRecorder
from attnscope.corpus import Corpus
from attnscope.errors import AttnscopeError
from attnscope.questions.heads import Heads
from attnscope.studies.describe.rows import join_rows
from attnscope.studies.heads.measuring import shift_right
from attnscope.studies.heads.options import DescribeOptions, HeadsOptions
from attnscope.studies.heads.study import heads
from attnscope.studies.inputs.texts import batch_of
from tests.conftest import write_tiny, write_tiny_t5
from tests.heads_helpers import read_sample

ALICE = Path(__file__).resolve().parents[1] / "sample_texts" / "alice.txt"
FEW = DescribeOptions(queries=240)


@pytest.fixture(scope="module")
def paragraphs():
    return [text.text or "" for text in Corpus([ALICE], split="paragraph")]


@pytest.fixture(scope="module")
def of_own(own, paragraphs):
    return heads(own, paragraphs, HeadsOptions(describe=FEW))


def terms_of(found, row, part="attends"):
    """The terms of a head's line."""
    terms = found["terms"]
    return terms.select((terms["head"] == row) & (terms["part"] == part))


def test_heads_that_were_built_are_described_as_they_were_built(of_own):
    table = of_own["heads"]
    built = {
        (0, 0): "offset-1",
        (0, 1): "offset+1",
        (0, 2): "self",
        (0, 3): "special:[BOS]",
        (0, 4): "same_elsewhere",
        (0, 5): "punctuation",
        (1, 0): "offset-1",
        (1, 1): "induction",
        (1, 2): "self",
        (1, 4): "same_elsewhere",
        (1, 5): "offset-2",
    }
    for place, feature in built.items():
        row = of_own.row(*place)
        terms = terms_of(of_own, row, "rests" if feature.startswith("special:") else "attends")
        assert terms["feature"][0] == feature, table["description"][row]
        assert table["kl_explained"][row] > 0.95
        assert not table["other_half"][row]
        assert table.companion("whole_explained", "low")[row] <= table["whole_explained"][row]
        shares = terms["share"]
        assert (np.isnan(shares) | ((shares >= -1e-3) & (shares <= 1.001))).all()
    even = of_own.row(0, 6)
    assert table["description"][even] == "spreads evenly"
    assert table["whole_nats"][even] < 0.005
    assert math.isnan(table["whole_explained"][even])


def test_minilm_heads_are_said_to_find_what_they_find(minilm):
    """Nothing about these heads is coded: their pairs and tokens are found in the texts."""
    options = HeadsOptions(describe=DescribeOptions(heads=((3, 1), (1, 3), (5, 3))))
    found = heads(minilm, Corpus([ALICE], split="paragraph"), options)
    referents = str(found["heads"]["summary"][found.row(3, 1)])
    names = str(found["heads"]["summary"][found.row(5, 3)])
    first = terms_of(found, found.row(5, 3))
    assert first["own"][0]
    assert first["words"][0].startswith("tokens like alice, rabbit")
    assert names.startswith("names ")
    assert "alice" in names
    assert " → " in names
    assert "names " in referents
    assert "least commas" in referents
    # Heads that were not chosen have no line.
    assert (found["heads"]["description"] != "").sum() == 3


# The sample -----------------------------------------------------------------------------------------------------


def sampled(model, texts, options=FEW):
    units, _ = read_sample(model, texts, options, with_rows=False)
    return [(unit.text.text or "", tuple(unit.queries.tolist()), unit.is_for_fitting) for unit in units]


def test_the_sample_depends_on_what_texts_say_alone(own, paragraphs):
    once = sampled(own, paragraphs)
    assert sampled(own, paragraphs[::-1]) == once
    assert sampled(own, paragraphs, replace(FEW, seed=1)) != once
    # Copies are no further texts.
    assert sampled(own, [*paragraphs, *paragraphs]) == once
    # A text stays drawn in a growing corpus while its lot is small.
    few = DescribeOptions(queries=60)
    small = {text for text, *_ in sampled(own, paragraphs[:30], few)}
    large = {text for text, *_ in sampled(own, paragraphs, few)}
    assert large & set(paragraphs[:30]) <= small


def test_the_sample_is_bounded_and_its_halves_share_no_text(own, paragraphs):
    found = sampled(own, [f"{text} {n}" for n, text in enumerate(paragraphs * 8)])
    assert 200 < sum(len(queries) for _, queries, _ in found) <= 240
    halves = [{text for text, _, fits in found if fits is half} for half in (True, False)]
    assert not halves[0] & halves[1]
    assert abs(len(halves[0]) - len(halves[1])) <= 1


def test_both_parts_of_the_rows_are_those_of_the_whole_map(own, paragraphs):
    """Attention off the sinks and on them, with the keys that are no sinks as one entry, for each sampled row."""
    units, counts = read_sample(own, paragraphs[:6], DescribeOptions(queries=60))
    for group in join_rows(own, units, counts):
        np.testing.assert_allclose(group.sink_rows.mass, 1, atol=2e-3)
        first = group.sink_rows.starts[:-1]
        np.testing.assert_allclose(
            group.sink_rows.attention[:, first].T[group.sink_row_of_active],
            group.active_rows.mass,
            atol=2e-3,
        )
        assert (
            group.sink_rows.counts[first][group.sink_row_of_active] == np.diff(group.active_rows.starts)
        ).all()


# In a study of heads --------------------------------------------------------------------------------------------


def test_a_model_in_memory_is_described(tmp_path, paragraphs):
    """Its parameters want gradients, of which no array can be made."""
    write_tiny(tmp_path / "bert", "bert")
    network = AutoModel.from_pretrained(tmp_path / "bert")
    model = attnscope.load(network, AutoTokenizer.from_pretrained(tmp_path / "bert"))
    found = heads(model, paragraphs[:12], HeadsOptions(describe=FEW))
    assert not found.run.get("failures")
    assert found.is_described


def test_findings_keep_what_a_head_does(of_own, tmp_path):
    kept = Heads.load(of_own.save(tmp_path / "heads.npz"))
    row = kept.row(0, 2)
    assert kept["heads"]["description"][row].startswith("the token itself (")
    assert kept["heads"]["first_term"][row] == "self"
    term = terms_of(kept, row)
    assert term["share"][0] > term.companion("share", "baseline")[0]
    # What fails most, with the keys that were expected.
    failures = kept["failures"].select(kept["failures"]["head"] == row)
    assert 0 < len(failures) <= 3
    assert (np.diff(failures["nats"]) <= 0).all()
    number = int((kept["failures"]["head"] == row).argmax())
    expected = kept["expected"].select(kept["expected"]["failure"] == number)
    assert expected["place"][0] == failures["place"][0]
    assert expected["token"][0] == failures["token"][0]


def test_without_descriptions_there_are_no_columns_of_them(own, paragraphs):
    found = heads(own, paragraphs[:3], HeadsOptions(describe=None))
    assert "description" not in found["heads"]
    assert not found.is_described
    one = heads(own, ["A single text, which says nothing of others."], HeadsOptions(describe=FEW))
    assert not one.is_described
    assert "takes at least two texts" in " ".join(one.report().guide)


def test_a_failure_costs_the_descriptions_alone(own, paragraphs, monkeypatch):
    def fail(*_, **__):
        raise AttnscopeError("no luck", "try again")

    monkeypatch.setattr("attnscope.studies.heads.study.add_descriptions", fail)
    found = heads(own, paragraphs[:4], HeadsOptions(describe=FEW))
    assert len(found["heads"])
    assert not found.is_described
    assert found.run["failures"] == [
        {"step": "describing the heads", "error": "no luck", "hint": "try again"}
    ]


def encoder_decoder(folder):
    """A T5 whose decoder's L0H1 and L1H1 look at the token before, by their position bias."""
    write_tiny_t5(folder)
    weights = load_file(folder / "model.safetensors")
    bias = next(
        name for name in weights if name.startswith("decoder") and "relative_attention_bias" in name
    )
    weights[bias][:, 1] = 0.0
    weights[bias][1, 1] = 25.0  # the bucket of distance 1
    for layer in range(2):
        weights[f"decoder.block.{layer}.layer.0.SelfAttention.q.weight"][5:10] = 0.0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return attnscope.load(str(folder))


@pytest.mark.parametrize("road", ["seam", "eager"])
def test_decoder_and_cross_attention_are_described(road, tmp_path, monkeypatch):
    """What rows have of features is what dense weights say; across, a row is told of by the token that it writes."""
    model = encoder_decoder(tmp_path / "t5")
    if road == "eager":
        monkeypatch.setattr(model, "info", replace(model.info, path="eager"))
    chance = random.Random(1)
    texts = [" ".join(chance.choices("abcdefg", k=12)) for _ in range(8)]
    found = heads(model, texts, HeadsOptions(describe=FEW))
    assert (found["heads"]["description"] != "").all()
    assert len(found["heads"]) == 18
    for layer in range(2):
        row = found.row(layer, 1, "decoder")
        assert found["heads"]["first_term"][row] == "offset-1"
        assert found["heads"]["kl_explained"][row] > 0.9
    # Sampled rows against dense weights, head by head.
    units, counts = read_sample(model, texts, FEW)
    groups = {group.kind: group for group in join_rows(model, units, counts)}
    for number, unit in enumerate(units[:2]):
        tokens = unit.chunk.tokens
        kept = WeightsRecorder()
        with torch.no_grad():
            model.run(batch_of([tokens], [shift_right(unit.target, tokens)]), kept)
        for kind in ("decoder", "cross"):
            active = groups[kind].active_rows
            queries = groups[kind].queries
            offsets = groups[kind].offsets
            rows = np.flatnonzero(active.texts == number)
            assert len(rows)
            for head, (layer, at) in enumerate(groups[kind].heads):
                dense = kept.maps[kind][layer][0, at].numpy()
                for row in rows:
                    entries = slice(*active.starts[row : row + 2])
                    expected = dense[queries[row], queries[row] + offsets[entries]]
                    np.testing.assert_allclose(active.attention[head, entries], expected, atol=2e-3)


def test_chosen_heads_are_described_as_among_all(own):
    sentences = (ALICE.parent / "sentences.txt").read_text("utf-8").splitlines()
    whole = heads(own, sentences, HeadsOptions(describe=FEW))
    some = heads(own, sentences, HeadsOptions(describe=replace(FEW, heads=((1, 3), (0, 2)))))
    rows = np.flatnonzero(some["heads"]["description"] != "")
    assert rows.tolist() == [some.row(0, 2), some.row(1, 3)]
    assert some["heads"]["description"][rows].tolist() == whole["heads"]["description"][rows].tolist()
    np.testing.assert_allclose(
        some["heads"]["whole_explained"][rows], whole["heads"]["whole_explained"][rows]
    )


def test_heads_that_there_are_not_are_refused_before_any_text_is_read(own):
    def report(_):
        raise AssertionError("a text was read")

    with pytest.raises(AttnscopeError, match="there is no layer 9"):
        heads(own, ["a b", "c d"], HeadsOptions(describe=DescribeOptions(heads=((9, 99),))), report)
