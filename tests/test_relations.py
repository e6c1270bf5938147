"""The study of relations: what it finds, in which memory, and what it refuses."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import attnscope
from attnscope.annotated import AnnotatedCorpus, AnnotatedText, Link, spans
from attnscope.core.attention.seam import attention_weights
from attnscope.errors import AttnscopeError
from attnscope.models.model import Batch
from attnscope.questions.relations import RelationsOptions
from attnscope.studies.relations.evidence import OFFSETS, RULES, HalfSplitter, check_rules
from attnscope.studies.relations.study import relations
from tests.conftest import SAMPLES, write_tiny
from tests.record_helpers import require_lossless
from tests.relation_helpers import Relation, every_relation, text_of
from tests.test_heads import random_model

LETTERS = "bcdefghijklmnopqrstuvw"


def followers(n, seed=0):
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
        links = (
            Link("again→next", (again,), (place + 1,)),
            Link("any→any", (again,), (int(chance.integers(0, again)),)),
        )
        texts.append(text_of(" ".join(letters), *links))
    return texts


def induction_head():
    from attnscope.models.own.glass_box import roles_by_head

    (place,) = [place for place, known in roles_by_head("own").items() if "induction" in known]
    return place


# What is found ---------------------------------------------------------------------------------------------------


def test_a_head_that_is_made_for_a_relation_is_found(own, tmp_path):
    found = relations(own, followers(60))
    again = Relation(found, "again→next")
    induction = induction_head()
    assert again.best == induction
    assert again.best_found
    assert again.accuracy[induction] == 1
    assert again.mass[induction] > 0.99
    assert again.n == 60
    assert again.n_scored == 30
    assert not Relation(found, "any→any").found.any()
    require_lossless(found, tmp_path)
    assert len(found.to_csv().splitlines()) == 1 + 2 * 14


def test_a_simple_rule_takes_its_part(own):
    """Heads that look at the token before, or at the same token, express nothing that a rule does not."""
    texts = []
    for text in followers(40):
        first = text.links[0].targets[0] - 1
        again = text.links[0].source[0]
        texts.append(
            replace(text, links=(Link("back", (again,), (again - 1,)), Link("same", (again,), (first,))))
        )
    found = relations(own, texts)
    for name, rule in (("back", "offset −1"), ("same", "same word before")):
        one = Relation(found, name)
        assert one.rule == rule
        assert one.baseline == 1.0
        assert one.accuracy[one.best] == 1
        assert not one.found.any()


def test_minilm_expresses_dependencies(minilm):
    found = relations(minilm, str(SAMPLES / "dependencies.conllu"))
    expressed = {one.relation for one in every_relation(found) if one.found.any()}
    assert "parent→punct" in expressed
    # The noun follows at once: no head can do better.
    assert Relation(found, "amod→parent").baseline == 1
    assert Relation(found, "compound→parent").no_verdict == "fewer than 20 examples"
    # n't.
    assert Relation(found, "advmod→parent").left_out == {"words that the tokens do not tell apart": 1}


def test_the_pronoun_head(minilm):
    texts = [
        ("The animal didn't cross the street because it was too tired.", [4, 10]),
        ("The animal didn't cross the street because it was too wide.", [28, 34]),
    ]
    lines = [
        json.dumps({"text": t, "links": [{"from": [43, 45], "to": to, "label": "it"}]})
        for t, to in texts
    ]
    one = Relation(relations(minilm, [spans.parse(line, "a", 1) for line in lines]), "it")  # type: ignore[misc]
    # L3H1 looks at the animal, tired or wide.
    assert sorted((one.accuracy[3, 1], one.choice[3, 1])) == [0, 1]
    assert not one.found.any()


def test_all_numbers_by_plain_loops(own):
    """Accuracy, mass and rules of every head from dense weights, text by text."""
    texts = followers(30, seed=1)
    found = relations(own, texts)
    for name in ("again→next", "any→any"):
        one = Relation(found, name)
        by_half = {0: [], 1: []}
        lots = HalfSplitter()
        for text in texts:
            (link,) = [link for link in text.links if link.relation == name]
            by_half[lots.assign(None)[0][0]].append((text, link))
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
            # Ties of own's equal weights are a rounding's.
            np.testing.assert_allclose(values, hits / 15, atol=0.08)
            if half:
                np.testing.assert_allclose(one.mass, mass / 15, atol=1e-5)
        offsets = [link.targets[0] - link.source[0] for _, link in by_half[1]]
        assert one.baseline == pytest.approx(max(offsets.count(offset) for offset in OFFSETS) / 15)


def dense(model, text):
    found = {}

    def probe(call):
        weights = attention_weights(call)
        found[call.layer] = weights[0].double().numpy()
        return weights @ call.value

    with torch.no_grad():
        model.run(Batch(torch.from_numpy(model.tokenizer.encode(text).ids)[None]), probe)
    return found


def test_rules_on_a_text_counted_by_hand():
    links = [
        Link("r", (0,), (2,)),
        Link("r", (4,), (0, 1)),
        Link("r", (1, 2), (4,)),
        Link("r", (1, 3), (2,)),
    ]
    hits = dict(zip(RULES, check_rules(text_of("a b A c b"), links).sum(0).tolist(), strict=True))
    right = {"offset +2": 2, "offset −4": 1, "offset −3": 1, "same word before": 1, "same word after": 1}
    assert {rule: n for rule, n in hits.items() if n} == right


@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 20), marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_random_weights_express_nothing(kind, seeds, tmp_path):
    texts = [
        *followers(60),
        *AnnotatedCorpus([SAMPLES / "dependencies.conllu", SAMPLES / "pronouns.jsonl"]),
    ]
    for seed in seeds:
        found = every_relation(relations(random_model(tmp_path / kind, kind, seed), texts))
        assert sum(not one.no_verdict for one in found) >= 6
        assert not any(one.found.any() for one in found), seed


# How it runs -----------------------------------------------------------------------------------------------------


def test_batches_and_blocks_change_nothing_but_rounding(own, monkeypatch):
    texts = followers(40)
    whole = relations(own, texts)
    monkeypatch.setattr("attnscope.studies.relations.study.BLOCK", 7)
    apart = relations(own, texts)
    np.testing.assert_allclose(whole["mass"], apart["mass"], atol=1e-6)
    np.testing.assert_allclose(whole["accuracy"], apart["accuracy"], atol=0.11)


def test_an_interruption_keeps_what_was_found(own, monkeypatch):
    monkeypatch.setattr("attnscope.studies.relations.study.BLOCK", 10)
    texts = followers(40)

    def interrupted():
        yield from texts[:25]
        raise KeyboardInterrupt

    found = relations(own, interrupted())
    assert (found.corpus["complete"], found.corpus["n_texts"]) == (False, 20)
    assert found.to_csv() == relations(own, texts[:20]).to_csv()


def test_long_texts_are_cut_and_links_beyond_are_counted(tmp_path):
    model = attnscope.load(str(write_tiny(tmp_path / "tiny")))  # takes 29 tokens: letters
    links = (*(Link("near", (i,), (i - 2,)) for i in range(2, 60)), Link("far", (50,), (1,)))
    text = text_of(" ".join(np.random.default_rng(0).choice(list(LETTERS), 60)), *links)
    found = relations(model, [text])
    near = Relation(found, "near")
    assert (near.n, near.n_texts) == (58 - 2 * 2, 3)  # three chunks: two links at each of two cuts
    assert near.left_out == {"source and target in different chunks": 4}
    assert [one.relation for one in every_relation(found)] == ["near"]
    notes = " ".join(found.run["notes"])
    assert "different chunks" in notes
    assert "cut into chunks" in notes
    assert Relation(relations(model, [text], RelationsOptions(stride=20)), "near").n == 58


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_of_decoders_only_what_they_can_see_is_asked(kind, tmp_path):
    found = relations(random_model(tmp_path / kind, kind, 0), str(SAMPLES / "dependencies.conllu"))
    assert found.table("heads")["kind"][0] == "decoder"
    names = {one.relation: one.n for one in every_relation(found)}
    assert "det→parent" not in names  # a determiner stands before its noun
    assert names["parent→det"] > 30
    assert any("causality" in note for note in found.run["notes"])


def test_what_cannot_be_studied_is_refused(own):
    with pytest.raises(AttnscopeError, match="no link in these texts"):
        relations(own, [text_of("a b")])
    with pytest.raises(AttnscopeError, match="no relation obj"):
        relations(own, followers(3), RelationsOptions(only=("obj",)))
    unaligned = AnnotatedText("ab", ((0, 1), (1, 2)), (Link("r", (0,), (1,)),), "x", 1)
    with pytest.raises(AttnscopeError, match="no link can be measured.*do not tell apart"):
        relations(own, [unaligned])
