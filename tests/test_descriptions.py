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
from attnscope.core.attention.probes import Weights
from attnscope.core.descriptions import Score
from attnscope.corpus import Corpus, CorpusText, count_tokens
from attnscope.corpus.copies import _LABEL
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model
from attnscope.questions.heads import Heads
from attnscope.studies.describe import rows as sampling
from attnscope.studies.describe.lines import Descriptions, HeadDescription, Term
from attnscope.studies.describe.rows import measure
from attnscope.studies.describe.study import describe
from attnscope.studies.heads.measuring import Frequencies, decoder_start, target_of
from attnscope.studies.heads.options import DescribeOptions, HeadsOptions
from attnscope.studies.heads.study import heads
from attnscope.studies.inputs.texts import batch_of
from tests.conftest import write_tiny

ALICE = Path(__file__).resolve().parents[1] / "sample_texts" / "alice.txt"
FEW = DescribeOptions(queries=240)


@pytest.fixture(scope="module")
def paragraphs() -> list[str]:
    return [text.text or "" for text in Corpus([ALICE], split="paragraph")]


@pytest.fixture(scope="module")
def study_of_own(own: Model, paragraphs: list[str]) -> Heads:
    return heads(own, paragraphs, HeadsOptions(describe=FEW))


@pytest.fixture(scope="module")
def of_own(own: Model, paragraphs: list[str]) -> Descriptions:
    return describe(own, paragraphs, options=FEW)


def line_of(found: Descriptions, layer: int, head: int) -> HeadDescription:
    """The description of a head."""
    return next(line for line in found.heads if (line.layer, line.head) == (layer, head))


def test_heads_that_were_built_are_described_as_they_were_built(of_own: Descriptions) -> None:
    built = {
        (0, 0): "offset-1",
        (0, 1): "offset+1",
        (0, 2): "self",
        (0, 3): "special:[BOS]",
        (0, 5): "punctuation",
        (1, 0): "offset-1",
        (1, 2): "self",
        (1, 3): "special:[BOS]",
        (1, 5): "offset-2",
    }
    for place, feature in built.items():
        one = line_of(of_own, *place)
        terms = one.rests if feature.startswith("special:") else one.attends
        assert terms[0].feature == feature, one.words
        assert one.main.explained > 0.95 and one.whole.low <= one.whole.explained <= one.whole.high
        assert not one.other_half
        for term in (*one.attends, *one.rests):
            assert math.isnan(term.share) or -1e-3 <= term.share <= 1.001
    for place, feature in {(0, 4): "same_elsewhere", (1, 1): "induction", (1, 4): "same_elsewhere"}.items():
        one = line_of(of_own, *place)
        assert (one.attends[0].feature, one.content, one.rests[0].feature) == (feature, feature, "special:[REST]")
    even = line_of(of_own, 0, 6)
    assert not even.rests and math.isnan(even.whole.explained) and even.whole.nats < 0.005
    assert even.words == "spreads evenly"


def test_minilm_heads_are_said_to_find_what_they_find(minilm: Model) -> None:
    """Nothing about these heads is coded: their pairs and tokens are found in the texts."""
    places = ((3, 1), (1, 3), (5, 3))
    found = describe(minilm, Corpus([ALICE], split="paragraph"), options=DescribeOptions(heads=places))
    referents, brackets, names = (line_of(found, *place) for place in places)
    assert ("she", "alice") in [(pair.query, pair.key) for pair in referents.pairs]
    assert {(")", "("), ("she", "alice")} <= {(pair.query, pair.key) for pair in brackets.pairs}
    assert brackets.summary.startswith("up to 8 before (37%; uniform 11%)")
    assert names.attends[0].own and names.attends[0].words.startswith("tokens like alice, rabbit")
    assert names.summary.startswith("names ") and "alice" in names.summary
    assert "names " in referents.summary and "least commas" in referents.summary


# The sample -----------------------------------------------------------------------------------------------------


def sampled(model: Model, texts: list[str], options: DescribeOptions = FEW) -> list[tuple[str, tuple[int, ...], bool]]:
    listed = [CorpusText(i, "texts", i + 1, text=text) for i, text in enumerate(texts)]
    return [
        (unit.text.text or "", tuple(unit.queries.tolist()), unit.fits)
        for unit in sampling.draw(model, listed, options)
    ]


def test_the_sample_depends_on_what_texts_say_alone(own: Model, paragraphs: list[str]) -> None:
    once = sampled(own, paragraphs)
    assert sampled(own, paragraphs[::-1]) == once
    assert sampled(own, paragraphs, replace(FEW, seed=1)) != once
    # Copies are no further texts.
    assert sampled(own, [*paragraphs, *paragraphs]) == once


def test_which_of_two_copies_is_kept_changes_no_lot(own: Model, paragraphs: list[str]) -> None:
    others = [f"{number}. {text.upper()}" for number, text in enumerate(paragraphs[:12])]
    both = (sampled(own, given) for given in (paragraphs[:12] + others, others + paragraphs[:12]))
    first, second = ([(_LABEL.sub("", text).casefold(), fits) for text, _, fits in drawn] for drawn in both)
    assert first == second
    assert {fits for _, fits in first} == {True, False}


def test_the_sample_is_bounded_and_its_halves_share_no_text(own: Model, paragraphs: list[str]) -> None:
    many = [f"{text} {n}" for n, text in enumerate(paragraphs * 8)]
    found = sampled(own, many)
    assert 200 < sum(len(queries) for _, queries, _ in found) <= 240
    halves = [{text for text, _, fits in found if fits is half} for half in (True, False)]
    assert not halves[0] & halves[1]
    assert abs(len(halves[0]) - len(halves[1])) <= 1


def test_both_parts_of_the_rows_are_those_of_the_whole_map(own: Model, paragraphs: list[str]) -> None:
    """Attention off the sinks and on them, with the keys that are no sinks as one entry, for each sampled row."""
    listed = [CorpusText(i, "texts", i + 1, text=text) for i, text in enumerate(paragraphs[:6])]
    units = sampling.draw(own, listed, DescribeOptions(queries=60))
    counts = count_tokens(listed, own.tokenizer.encode)
    for group in measure(own, units, Frequencies.of_counts(counts)):
        sink_mass = group.sinks.mass
        np.testing.assert_allclose(sink_mass, 1, atol=2e-3)
        free = group.sinks.attention[:, group.sinks.starts[:-1]].T[group.sink_rows]
        np.testing.assert_allclose(free, group.active.mass, atol=2e-3)
        # The chain rule: nats from uniform of the whole row are those of both parts.
        assert (group.sinks.counts[group.sinks.starts[:-1]][group.sink_rows] == np.diff(group.active.starts)).all()


def test_a_model_in_memory_is_described(tmp_path: Path, paragraphs: list[str]) -> None:
    """Its parameters want gradients, of which no array can be made."""
    write_tiny(tmp_path / "bert", "bert")
    network = AutoModel.from_pretrained(tmp_path / "bert")
    assert all(one.requires_grad for one in network.parameters())
    model = attnscope.load(network, AutoTokenizer.from_pretrained(tmp_path / "bert"))
    assert not model.static_embeddings(torch.tensor([[1, 2]])).requires_grad
    found = heads(model, paragraphs[:12], HeadsOptions(describe=FEW))
    assert not found.run.get("failures") and found.is_described
    alone = describe(model, paragraphs[:12], options=FEW)
    assert found["heads"]["description"].tolist() == [one.words for one in alone.heads]


def test_of_a_growing_corpus_a_text_stays_drawn_while_its_lot_is_small(own: Model, paragraphs: list[str]) -> None:
    small = {text for text, *_ in sampled(own, paragraphs[:30], DescribeOptions(queries=60))}
    large = {text for text, *_ in sampled(own, paragraphs, DescribeOptions(queries=60))}
    assert large & set(paragraphs[:30]) <= small


# In a study of heads --------------------------------------------------------------------------------------------


def test_findings_say_what_a_head_does_and_keep_it(study_of_own: Heads, of_own: Descriptions, tmp_path: Path) -> None:
    kept = Heads.load(study_of_own.save(tmp_path / "heads.npz"))
    heads, line = kept["heads"], line_of(of_own, 0, 2)
    assert line.words.startswith("the token itself (") and heads["description"][2] == line.words
    np.testing.assert_array_equal(
        heads.interval("whole_explained")[2], [line.whole.explained, line.whole.low, line.whole.high]
    )
    assert line.active is not None
    np.testing.assert_array_equal(heads.interval("kl_explained")[2][0], line.active.explained)
    terms = kept["terms"].select((kept["terms"]["head"] == 2) & (kept["terms"]["part"] == "attends"))
    assert terms["feature"][0] == "self" and terms["share"][0] == line.attends[0].share
    assert terms.part("share", "baseline")[0] == line.attends[0].even
    # What fails most, with the keys that were expected.
    failures, expected = kept["failures"], kept["expected"]
    assert failures["nats"][failures["head"] == 2].tolist() == [failure.nats for failure in line.failures]
    row = int((failures["head"] == 2).argmax())
    assert expected["token"][expected["failure"] == row].tolist() == [key.token for key in line.failures[0].expected]


def test_without_descriptions_there_are_no_columns_of_them(own: Model, paragraphs: list[str]) -> None:
    found = heads(own, paragraphs[:3], HeadsOptions(describe=None))
    assert "description" not in found["heads"] and not found.is_described


def test_one_text_is_not_described(own: Model) -> None:
    found = heads(own, ["A single text, which says nothing of others."], HeadsOptions(describe=FEW))
    assert not found.is_described and "takes at least two texts" in " ".join(found.report().guide)


def test_a_failure_costs_the_descriptions_alone(
    own: Model, paragraphs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AttnscopeError("no luck", "try again")

    monkeypatch.setattr("attnscope.studies.heads.study.describe_sample", fail)
    found = heads(own, paragraphs[:4], HeadsOptions(describe=FEW))
    assert len(found["heads"]) and not found.is_described
    assert found.run["failures"] == [{"step": "describing the heads", "error": "no luck", "hint": "try again"}]


# Words ----------------------------------------------------------------------------------------------------------

CLS = Term("special:[CLS]", "[CLS]", 3.0, 0.27, 0.02, 0.9)
SCORE = Score(0.66, 0.6, 0.7, 2.32)


def test_a_line_says_first_what_a_head_attends_to_and_then_where_it_rests() -> None:
    near = Term("near", "near tokens", 2.0, 0.46, 0.1, 0.3)
    line = HeadDescription("encoder", 3, 8, SCORE, SCORE, 0.31, (near,), (CLS,), summary="near tokens")
    assert line.words == "near tokens; rests 69% on [CLS]"
    sep = replace(CLS, feature="special:[SEP]", words="[SEP]", share=0.3)
    assert replace(line, rests=(CLS, sep)).resting == "rests 69% on [SEP] and [CLS]"
    assert replace(line, rests=(CLS, replace(sep, weight=-1.0, share=0.02, even=0.1))).resting == "rests 69% on [CLS]"
    assert replace(line, share=0.01).words == "rests 99% on [CLS]" and replace(line, share=0.99).resting == ""
    assert replace(line, active=replace(SCORE, nats=0.04)).attending == "all other tokens evenly"
    assert replace(line, active=replace(SCORE, explained=0.2)).attending == "near tokens; mostly undescribed"
    assert replace(line, attends=()).attending == "undescribed"


def encoder_decoder(folder: Path) -> Model:
    """A T5 whose decoder's L0H1 and L1H1 look at the token before, by their position bias."""
    sizes = {"d_model": 15, "d_kv": 5, "num_heads": 3, "num_layers": 2, "d_ff": 11}
    write_tiny(folder, "t5", **sizes, pad_token_id=0, decoder_start_token_id=0)
    weights = load_file(folder / "model.safetensors")
    bias = next(name for name in weights if name.startswith("decoder") and "relative_attention_bias" in name)
    weights[bias][:, 1] = 0.0
    weights[bias][1, 1] = 25.0  # the bucket of distance 1
    for layer in range(2):
        weights[f"decoder.block.{layer}.layer.0.SelfAttention.q.weight"][5:10] = 0.0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return attnscope.load(str(folder))


@pytest.mark.parametrize("road", ["seam", "eager"])
def test_decoder_and_cross_attention_are_described(road: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What rows have of features is what dense weights say; across, a row is told of by the token that it writes."""
    model = encoder_decoder(tmp_path / "t5")
    if road == "eager":
        monkeypatch.setattr(model, "info", replace(model.info, path="eager"))
    chance = random.Random(1)
    texts = [CorpusText(n, "", 1, text=" ".join(chance.choices("abcdefg", k=12))) for n in range(8)]
    found = describe(model, texts, options=FEW)
    assert [(one.kind, one.layer, one.head) for one in found.heads] == [
        (kind, layer, head) for kind in ("encoder", "decoder", "cross") for layer in range(2) for head in range(3)
    ]
    for one in found.heads:
        if one.kind == "decoder" and one.head == 1:
            assert one.attends[0].feature == "offset-1" and one.main.explained > 0.9, one.words
    counts = count_tokens(texts, model.tokenizer.encode)
    sample = sampling.draw(model, texts, FEW)
    groups = {group.kind: group for group in measure(model, sample, Frequencies.of_counts(counts))}
    start = decoder_start(model)
    assert start is not None
    for number, unit in enumerate(sample[:2]):
        tokens, kept = unit.chunk.tokens, Weights()
        with torch.no_grad():
            model.run(batch_of([tokens], [target_of(start, tokens)]), kept)
        for kind in ("decoder", "cross"):
            active, queries, offsets = groups[kind].active, groups[kind].queries, groups[kind].offsets
            rows = np.flatnonzero(active.texts == number)
            assert len(rows)
            for head, (layer, at) in enumerate(groups[kind].heads):
                dense = kept.maps[kind][layer][0, at].numpy()  # type: ignore[index]
                for row in rows:
                    entries = slice(*active.starts[row : row + 2])
                    expected = dense[queries[row], queries[row] + offsets[entries]]
                    np.testing.assert_allclose(active.attention[head, entries], expected, atol=2e-3)


def test_heads_that_there_are_not_are_refused_before_any_text_is_read(own: Model) -> None:
    def report(_: object) -> None:
        raise AssertionError("a text was read")

    with pytest.raises(UsageError, match="there is no head L9H99 to describe"):
        heads(own, ["a b", "c d"], HeadsOptions(describe=DescribeOptions(heads=((9, 99),))), report)


def test_chosen_heads_are_described_as_among_all(own: Model) -> None:
    sentences = (ALICE.parent / "sentences.txt").read_text("utf-8").splitlines()
    whole = describe(own, sentences, options=FEW)
    some = describe(own, sentences, options=replace(FEW, heads=((1, 3), (0, 2))))
    assert [(one.layer, one.head) for one in some.heads] == [(0, 2), (1, 3)]
    for one in some.heads:
        other = line_of(whole, one.layer, one.head)
        assert one.words == other.words and one.whole.explained == pytest.approx(other.whole.explained, nan_ok=True)
    with pytest.raises(UsageError, match="no head L0H99 to describe"):
        describe(own, sentences, options=replace(FEW, heads=((0, 99),)))
