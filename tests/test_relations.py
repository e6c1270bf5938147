"""The study of relations: what it finds, on what evidence, in which memory, and what it refuses."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom

import attnscope
from attnscope.annotated import AnnotatedCorpus, AnnotatedText, Link
from attnscope.core.attention.seam import attention_weights
from attnscope.errors import AttnscopeError
from attnscope.models.model import Batch
from attnscope.questions.relations import Relations, RelationsOptions
from attnscope.studies.relations.evidence import OFFSETS, RULES, Cell, Lots, Tally, like_words, rule_hits
from attnscope.studies.relations.study import relations
from attnscope.text import word_spans
from tests.conftest import SAMPLES, write_tiny
from tests.record_helpers import require_lossless
from tests.relation_helpers import Relation, every_relation, judged
from tests.test_heads import random_model

LETTERS = "bcdefghijklmnopqrstuvw"


def followers(n: int, seed: int = 0) -> list[AnnotatedText]:
    """Texts in which a pair of letters comes again, here and there: from the first letter of the second pair to the
    second one of the first pair, which is what an induction head looks at; and to a word drawn at random."""
    chance = np.random.default_rng(seed)
    texts = []
    for _ in range(n):
        letters = chance.permutation(list(LETTERS)).tolist()
        place = int(chance.integers(0, 6))
        pair = letters[place : place + 2]
        letters = letters[:12]
        again = int(chance.integers(place + 3, 12))
        letters[again:again] = pair
        text = " ".join(letters)
        links = (
            Link("again→next", (again,), (place + 1,)),
            Link("any→any", (again,), (int(chance.integers(0, again)),)),
        )
        texts.append(AnnotatedText(text, tuple(word_spans(text)), links, "made up", 1))
    return texts


# What is found ---------------------------------------------------------------------------------------------------


def test_a_head_that_is_made_for_a_relation_is_found(own: Any) -> None:
    found = relations(own, followers(60))
    again = Relation(found, "again→next")
    (induction,) = [place for place, known in own_heads().items() if "induction" in known]
    assert again.best == induction
    assert again.best_found
    assert again.accuracy[induction] == 1
    assert again.mass[induction] > 0.99
    assert again.n == 60
    assert again.n_scored == 30
    assert not Relation(found, "any→any").found.any()
    assert [role.name for role in found.roles()[induction]] == ["again→next"]


def own_heads() -> dict[tuple[int, int], tuple[str, ...]]:
    from attnscope.models.own.glass_box import roles

    return roles("own")


def test_a_simple_rule_takes_its_part(own: Any) -> None:
    """Heads that look at the token before, or at the same token, express nothing that a rule does not."""
    texts = []
    for text in followers(40):
        first, again = text.links[0].targets[0] - 1, text.links[0].source[0]
        links = (Link("back", (again,), (again - 1,)), Link("same", (again,), (first,)))
        texts.append(AnnotatedText(text.text, text.words, links, "made up", 1))
    found = relations(own, texts)
    for name, rule in (("back", "offset −1"), ("same", "same word before")):
        one = Relation(found, name)
        assert (one.rule, one.baseline) == (rule, 1.0)
        assert one.accuracy[one.best] == 1
        assert not one.found.any()


def test_minilm_expresses_dependencies(minilm: Any) -> None:
    found = relations(minilm, str(SAMPLES / "dependencies.conllu"), RelationsOptions(n_examples=2))
    expressed = {one.relation for one in every_relation(found) if one.found.any()}
    assert "parent→punct" in expressed
    assert Relation(found, "amod→parent").baseline == 1  # the noun follows at once: no head can do better
    assert not Relation(found, "compound→parent").found.any()
    assert Relation(found, "compound→parent").no_verdict == "fewer than 20 examples"
    (left_out,) = Relation(found, "advmod→parent").left_out.items()
    assert left_out == ("words that the tokens do not tell apart", 1)  # n't
    assert len(found["examples"]) and found["links"]["right"].any()


def test_the_pronoun_head(minilm: Any) -> None:
    texts = [
        ("The animal didn't cross the street because it was too tired.", [4, 10]),
        ("The animal didn't cross the street because it was too wide.", [28, 34]),
    ]
    lines = [json.dumps({"text": t, "links": [{"from": [43, 45], "to": to, "label": "it"}]}) for t, to in texts]
    from attnscope.annotated import spans

    found = relations(minilm, [spans.parse(line, "a", 1) for line in lines])  # type: ignore[misc]
    one = Relation(found, "it")
    masses = sorted((one.accuracy[3, 1], one.choice[3, 1]))
    assert masses == [0, 1]  # L3H1 looks at the animal, tired or wide
    assert not one.found.any()


# Evidence --------------------------------------------------------------------------------------------------------


def test_all_numbers_by_plain_loops(own: Any) -> None:
    """Accuracy, mass and rules of every head from dense weights, text by text."""
    texts = followers(30, seed=1)
    found = relations(own, texts)
    for name in ("again→next", "any→any"):
        one = Relation(found, name)
        by_half: dict[int, list[Any]] = {0: [], 1: []}
        lots = Lots()
        for text in texts:
            (link,) = [link for link in text.links if link.relation == name]
            half, as_texts, first = lots.deal(None)
            assert first and half == as_texts  # each text is a source of its own
            by_half[half].append((text, link))
        assert len(by_half[0]) == len(by_half[1]) == 15
        for half, values in ((0, one.choice), (1, one.accuracy)):
            hits, mass = np.zeros((2, *values.shape))
            for text, link in by_half[half]:
                for layer, weights in dense(own, text.text).items():
                    for head, matrix in enumerate(weights):
                        row = matrix[link.source[0] + 2][2:-1].copy()  # [BOS] [REST] ... [EOS]
                        mass[layer, head] += row[link.targets[0]]
                        row[link.source[0]] = -1
                        ties = np.flatnonzero(row == row.max())
                        hits[layer, head] += (link.targets[0] in ties) / len(ties)
            np.testing.assert_allclose(values, hits / 15, atol=0.08)  # ties of own's equal weights are a rounding's
            if half:
                np.testing.assert_allclose(one.mass, mass / 15, atol=1e-5)
        offsets = [link.targets[0] - link.source[0] for _, link in by_half[1]]
        best = max(offsets.count(offset) for offset in OFFSETS) / 15
        assert one.baseline == pytest.approx(best)


def dense(model: Any, text: str) -> dict[int, Any]:
    found = {}

    def probe(call: Any) -> Any:
        weights = attention_weights(call)
        found[call.layer] = weights[0].double().numpy()
        return weights @ call.value

    with torch.no_grad():
        model.run(Batch(torch.from_numpy(model.tokenizer.encode(text).ids)[None]), probe)
    return found


def test_rules_on_a_text_counted_by_hand() -> None:
    text = AnnotatedText("a b A c b", ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9)), (), "x", 1)
    alike = like_words(text)
    assert alike == [(-1, 2), (-1, 4), (0, -1), (-1, -1), (1, -1)]
    links = [Link("r", (0,), (2,)), Link("r", (4,), (0, 1)), Link("r", (1, 2), (4,)), Link("r", (1, 3), (2,))]
    hits = dict(zip(RULES, rule_hits(links, alike).tolist(), strict=True))
    right = {"offset +2": 2, "offset −4": 1, "offset −3": 1, "same word before": 1, "same word after": 1}
    assert {rule: n for rule, n in hits.items() if n} == right


def tally_of(
    hits: list[tuple[float, int]], rules: int = 0, sources: list[str | None] | None = None, mass: float = 0.5
) -> Tally:
    """A tally of one head: (right, of how many) of each text; the first rule right in so many of the scored half."""
    lots, cells = Lots(), []
    for (right, n), source in zip(hits, sources or [None] * len(hits), strict=True):
        by_source, by_text, first = lots.deal(source)
        values = np.array([[[right, mass * n]]], float)
        cells.append((Cell("x", (by_source, by_text), n, np.zeros(len(RULES), np.int64), first), values))
    tally = Tally()
    tally.add(cells)
    for halves, part in tally.parts.items():
        if halves[1] == 1:
            part.rules[0] = rules
            break
    return tally


def test_a_verdict_needs_examples_texts_and_ten_points() -> None:
    good = [(2, 2)] * 40
    (one,) = every_relation(judged({"x": tally_of(good, rules=20)}))
    assert (one.n, one.n_scored, one.baseline) == (80, 40, 0.5)
    assert one.found.all()
    assert one.p[0, 0] == pytest.approx(binom.sf(39, 40, 0.5))  # no spread at all: links, not texts, are what counts
    assert one.low[0, 0] < 1 == one.high[0, 0]
    (few,) = every_relation(judged({"x": tally_of([(1, 1)] * 19)}))
    assert few.no_verdict == "fewer than 20 examples"
    assert math.isnan(few.p[0, 0])
    (texts,) = every_relation(judged({"x": tally_of([(5, 5)] * 18)}))
    assert texts.no_verdict == "fewer than 10 texts to score on"
    # 75% of 200 against 70%: above it at 5%, but not by ten points.
    (near,) = every_relation(judged({"x": tally_of([(3, 4)] * 500, rules=700)}))
    assert near.q[0, 0] < 0.01
    assert not near.found.any()
    (nothing,) = every_relation(judged({"x": tally_of(good, rules=80)}))
    assert not nothing.found.any()


def test_the_false_discovery_rate_is_over_heads_and_relations() -> None:
    chance = np.random.default_rng(0)
    just = [(int(chance.random() < 0.75), 1) for _ in range(60)]
    alone = every_relation(judged({"x": tally_of(just, rules=17)}))[0]
    beside = {f"y{i}": tally_of([(0, 1)] * 60, rules=17) for i in range(30)}
    among = Relation(judged({"x": tally_of(just, rules=17)} | beside), "x")
    assert among.p[0, 0] == alone.p[0, 0]
    assert among.q[0, 0] == pytest.approx(31 * alone.q[0, 0])


def test_pairs_of_opposites_are_in_both_halves() -> None:
    lots = Lots()
    halves = [lots.deal(None)[0] for _ in range(400)]
    assert sum(halves) == 200
    assert all(first != second for first, second in zip(halves[::2], halves[1::2], strict=True))
    assert 70 < sum(halves[::2]) < 130


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 20), marks=pytest.mark.slow)], ids=["few", "many"])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_random_weights_express_nothing(kind: str, seeds: range, tmp_path: Path) -> None:
    texts = [
        *followers(60),
        *AnnotatedCorpus(SAMPLES / "dependencies.conllu"),
        *AnnotatedCorpus(SAMPLES / "pronouns.jsonl"),
    ]
    for seed in seeds:
        found = relations(random_model(tmp_path / kind, kind, seed), texts)
        assert sum(not one.no_verdict for one in every_relation(found)) >= 6
        assert not any(one.found.any() for one in every_relation(found)), seed


# How it runs -----------------------------------------------------------------------------------------------------


def same(one: Relations, other: Relations) -> bool:
    return one.to_csv() == other.to_csv()


def test_batches_and_blocks_change_nothing_but_rounding(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = followers(40)
    whole = relations(own, texts)
    monkeypatch.setattr("attnscope.studies.relations.study.BLOCK", 7)
    apart = relations(own, texts)
    for name in ("again→next", "any→any"):
        assert Relation(whole, name).baseline == Relation(apart, name).baseline
        np.testing.assert_allclose(Relation(whole, name).mass, Relation(apart, name).mass, atol=1e-6)
        np.testing.assert_allclose(Relation(whole, name).accuracy, Relation(apart, name).accuracy, atol=0.11)


def test_an_interruption_keeps_what_was_found(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnscope.studies.relations.study.BLOCK", 10)
    texts = followers(40)

    def interrupted() -> Any:
        yield from texts[:25]
        raise KeyboardInterrupt

    found = relations(own, interrupted())
    assert found.corpus["complete"] is False
    assert found.corpus["n_texts"] == 20
    assert same(found, relations(own, texts[:20]))


def test_long_texts_are_cut_and_links_beyond_are_counted(tmp_path: Path) -> None:
    model = attnscope.load(str(write_tiny(tmp_path / "tiny")))  # takes 29 tokens: letters
    words = [(i * 2, i * 2 + 1) for i in range(60)]
    links = (*(Link("near", (i,), (i - 2,)) for i in range(2, 60)), Link("far", (50,), (1,)))
    letters = np.random.default_rng(0).choice(list(LETTERS), 60)
    text = AnnotatedText(" ".join(letters), tuple(words), links, "x", 1)
    found = relations(model, [text])
    assert found.corpus["n_chunked"] == 1
    assert Relation(found, "near").n == 58 - 2 * 2  # three chunks: two links at each of two cuts
    assert Relation(found, "near").left_out == {"source and target in different chunks": 4}
    assert Relation(found, "near").n_texts == 3
    assert "far" not in {one.relation for one in every_relation(found)}
    assert any("different chunks" in note for note in found.run["notes"])
    assert any("cut into chunks" in note for note in found.run["notes"])
    overlapping = relations(model, [text], RelationsOptions(stride=20))
    assert Relation(overlapping, "near").n == 58


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_of_decoders_only_what_they_can_see_is_asked(kind: str, tmp_path: Path) -> None:
    model = random_model(tmp_path / kind, kind, 0)
    found = relations(model, SAMPLES.joinpath("dependencies.conllu").as_posix())
    assert found.table("heads")["kind"][0] == "decoder"
    det = {one.relation: one for one in every_relation(found)}
    assert "det→parent" not in det  # a determiner stands before its noun
    assert det["parent→det"].n > 30
    note = next(note for note in found.run["notes"] if "causality" in note)
    assert "det→parent" in note or "…" in note


def test_the_dense_road_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    model = attnscope.load(str(write_tiny(tmp_path / "tiny", max_position_embeddings=120)))
    texts = list(AnnotatedCorpus(SAMPLES / "dependencies.conllu"))
    one = relations(model, texts)

    class Eager:
        info = replace(model.info, path="eager")
        tokenizer, run = model.tokenizer, model.run

    other = relations(Eager(), texts)  # type: ignore[arg-type]
    for a, b in zip(every_relation(one), every_relation(other), strict=True):
        np.testing.assert_allclose(a.mass, b.mass, atol=1e-6)
        np.testing.assert_allclose(a.accuracy, b.accuracy, atol=1e-12)


def test_what_cannot_be_studied_is_refused(own: Any) -> None:
    with pytest.raises(AttnscopeError, match="no link in these texts"):
        relations(own, [AnnotatedText("a b", ((0, 1), (2, 3)), (), "x", 1)])
    with pytest.raises(AttnscopeError, match="no relation obj"):
        relations(own, followers(3), RelationsOptions(only=("obj",)))
    unaligned = AnnotatedText("ab", ((0, 1), (1, 2)), (Link("r", (0,), (1,)),), "x", 1)
    with pytest.raises(AttnscopeError, match="no link can be measured.*do not tell apart"):
        relations(own, [unaligned])


def test_only_some_relations(own: Any) -> None:
    for only in ("again", "again→next"):
        found = relations(own, followers(4), RelationsOptions(only=(only,)))
        assert [one.relation for one in every_relation(found)] == ["again→next"]


# Records ---------------------------------------------------------------------------------------------------------


def test_a_record_comes_back_as_it_was(own: Any, tmp_path: Path) -> None:
    found = relations(own, followers(40), RelationsOptions(n_examples=2))
    require_lossless(found, tmp_path)
    assert len(found["examples"])
    assert len(found.to_csv().splitlines()) == 1 + 2 * 14
