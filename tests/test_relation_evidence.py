"""What counts as evidence for a relation: copies, sources, attention that is NaN, ties, little weight."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnscope
from attnscope.annotated import AnnotatedCorpus, AnnotatedText, Link
from attnscope.annotated.texts import merge_equal
from attnscope.errors import AttnscopeError
from attnscope.questions.relations import Relations, expressed_by
from attnscope.studies.relations.evidence import RULES, Cell, Lots, Tally
from attnscope.studies.relations.study import RelationsOptions, relations
from attnscope.text import word_spans
from tests.conftest import SAMPLES, write_tokenizer
from tests.relation_helpers import Relation, every_relation, judged
from tests.test_heads import VOCABULARY
from tests.test_relations import LETTERS, followers, own_heads


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Random models whose heads put nearly all weight on one token: seed -> model."""
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("sharp")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(VOCABULARY), hidden_size=24, num_attention_heads=4, num_hidden_layers=3, intermediate_size=32,
        max_position_embeddings=200, initializer_range=1.0,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    write_tokenizer(folder)
    return attnscope.load(str(folder), check=False, engine="hf").untrained  # type: ignore[attr-defined]


def letters(n: int, seed: int, n_letters: int = 14, n_links: int = 3) -> list[AnnotatedText]:
    """Texts of letters in which a link goes from anywhere to anywhere."""
    chance = np.random.default_rng(seed)
    texts = []
    for _ in range(n):
        text = " ".join(chance.permutation(list(LETTERS))[:n_letters])
        pairs = [chance.permutation(n_letters)[:2].tolist() for _ in range(n_links)]
        links = tuple(Link("any→any", (source,), (target,)) for source, target in pairs)
        texts.append(AnnotatedText(text, tuple(word_spans(text)), links, "made up", 1))
    return texts


# Copies ----------------------------------------------------------------------------------------------------------


def test_copies_of_a_text_are_one(sharp: Any) -> None:
    """Twenty copies of a few texts gave random heads relations: each head is right or wrong on all copies alike."""
    for seed in (2, 5):
        few = letters(12, seed, 6, 1)
        copies = [replace(text, text=text.text.upper() if n % 2 else text.text) for n in range(20) for text in few]
        model = sharp(seed)
        once, often = relations(model, few), relations(model, copies)
        assert once.to_csv() == often.to_csv()
        assert not any(one.found.any() for one in every_relation(often))
        assert (often.corpus["n_texts"], often.corpus["n_copies"]) == (240, 228)
        assert Relation(often, "any→any").left_out == {"texts that were there before": 228}
        assert any("228 texts are copies of others" in note for note in often.run["notes"])


def test_links_of_one_text_may_be_on_several_lines(own: Any) -> None:
    texts = followers(30)
    apart = [replace(text, links=(link,)) for text in texts for link in text.links]
    one, other = relations(own, texts), relations(own, apart)
    assert other.to_csv() == one.to_csv()
    assert other.corpus["n_copies"] == 30
    (both,) = merge_equal([texts[0], texts[0]])
    assert both == replace(texts[0], n_merged=1)


# Sources ---------------------------------------------------------------------------------------------------------


def test_a_source_is_in_one_half(own: Any) -> None:
    texts = [replace(text, document=f"file {n // 5}") for n, text in enumerate(followers(60))]
    found = Relation(relations(own, texts), "again→next")
    assert (found.halves, found.n_sources, found.n_texts) == ("sources", 12, 60)
    lots = Lots()
    halves = [lots.deal(text.document) for text in texts]
    for first in range(0, 60, 5):
        assert len({by_source for by_source, _, _ in halves[first : first + 5]}) == 1
        assert [is_first for *_, is_first in halves[first : first + 5]] == [True, False, False, False, False]
    assert sum(by_source for by_source, _, _ in halves) == sum(by_text for _, by_text, _ in halves) == 30
    assert found.n_texts_scored == 30
    assert found.best_found


def test_chunks_of_a_file_are_in_one_half(own: Any, tmp_path: Path) -> None:
    for number in range(6):
        names = [f"name_{number}_{place}" for place in range(40)]
        source = "".join(f"{name} = {place}\nprint({name})\n" for place, name in enumerate(names))
        (tmp_path / f"{number}.py").write_text(source, "utf-8")
    options = RelationsOptions(chunk=64)
    found = Relation(relations(own, AnnotatedCorpus([str(tmp_path / "*.py")]), options), "closing→opening")
    assert (found.halves, found.n_sources) == ("sources", 6)
    assert found.n_texts > 30
    one = relations(own, str(tmp_path / "0.py"), options)
    assert (Relation(one, "closing→opening").halves, Relation(one, "closing→opening").n_sources) == ("texts", 1)
    told = [note for note in one.run["notes"] if "Too few sources" in note]
    assert bool(told) == any(not relation.no_verdict for relation in every_relation(one))


def test_sentences_know_their_document(tmp_path: Path) -> None:
    sentence = "1\ta\ta\t_\t_\t_\t0\troot\t_\t_\n\n"
    (tmp_path / "a.conllu").write_text(f"# newdoc id = x\n{sentence}{sentence}# newdoc\n{sentence}", "utf-8")
    (tmp_path / "b.conllu").write_text(sentence, "utf-8")
    texts = list(AnnotatedCorpus([str(tmp_path / "a.conllu"), str(tmp_path / "b.conllu")]))
    first, second, other, alone = (text.document for text in texts)
    assert first == second != other
    assert None not in (first, other)
    assert alone is None
    line = json.dumps({"text": "a b", "document": "d", "links": []})
    (tmp_path / "c.jsonl").write_text(f"{line}\n{line}\n", "utf-8")
    assert len({text.document for text in AnnotatedCorpus(str(tmp_path / "c.jsonl"))} - {None}) == 1


# NaN -------------------------------------------------------------------------------------------------------------


class Overflowing:
    """A model whose attention is NaN in layer 1 on texts that have a token."""

    def __init__(self, model: Any, token: int) -> None:
        self.info, self.tokenizer, self._model, self._token = model.info, model.tokenizer, model, token
        self.writer = model.writer

    def run(self, batch: Any, probe: Any) -> Any:
        bad = (batch.ids == self._token).any(1)

        def overflow(call: Any) -> Any:
            if call.layer != 1:
                return probe(call)
            return probe(replace(call, query=torch.where(bad[:, None, None, None], torch.nan, call.query)))

        return self._model.run(batch, overflow)


@pytest.mark.parametrize("dense", [False, True])
def test_a_text_with_nan_is_left_out_and_told(own: Any, dense: bool) -> None:
    texts = [replace(text, line=number) for number, text in enumerate(followers(60), 1)]
    token = int(own.tokenizer.encode("v").ids[2])
    good = [text for text in texts if "v" not in text.text.split()]
    assert 10 < len(good) < 50
    model = Overflowing(own, token)
    if dense:
        model.info = replace(own.info, path="eager")
    found = relations(model, texts)  # type: ignore[arg-type]
    assert Relation(found, "again→next").n == len(good)
    assert np.isfinite(Relation(found, "again→next").accuracy).all()
    assert Relation(found, "again→next").accuracy[own_place()] == 1
    problem = found.corpus["problems"][0]
    first = next(text for text in texts if text not in good)
    assert (problem["source"], problem["line"]) == ("made up", first.line)
    assert "layer 1 computes NaN or infinity in float32" in problem["reason"]
    assert found.corpus["n_not_finite"] == 60 - len(good)
    with pytest.raises(AttnscopeError, match="layer 1 computes NaN or infinity in float32"):
        relations(model, [text for text in texts if text not in good])  # type: ignore[arg-type]


def own_place() -> tuple[int, int]:
    (place,) = [place for place, known in own_heads().items() if "induction" in known]
    return place


# Ties, little weight, records -----------------------------------------------------------------------------------


def tally_of_heads(shares: list[float], mass: float = 0.5, n: int = 60, links: int = 4) -> Tally:
    """A tally of one layer: each head is right in so many of the links of each text."""
    lots, tally = Lots(), Tally()
    cells = []
    for _ in range(n):
        by_source, by_text, first = lots.deal(None)
        values = np.array([[[share * links, mass * links] for share in shares]])
        cells.append((Cell("x", (by_source, by_text), links, np.zeros(len(RULES), np.int64), first), values))
    tally.add(cells)
    return tally


def test_heads_that_cannot_be_told_apart_are_tied() -> None:
    found = judged({"x": tally_of_heads([0.800, 0.795, 0.6, 0.792])})
    (one,) = every_relation(found)
    assert (one.best, one.ties) == ((0, 0), "L0H1 L0H3")
    assert expressed_by(found) == ["yes; tied with L0H1, L0H3; also L0H2"]
    for shares in ([0.9, 0.6], [0.0, 0.0]):
        (alone,) = every_relation(judged({"x": tally_of_heads(shares)}))
        assert alone.ties == ""


def test_a_relation_with_little_weight_is_told_as_such() -> None:
    weak = judged({"x": tally_of_heads([0.9, 0.0], mass=0.01)})
    assert weak.verdicts == expressed_by(weak) == ["weakly"]
    assert not weak.roles()
    strong = judged({"x": tally_of_heads([0.9, 0.0])})
    assert strong.verdicts == ["yes"] and list(strong.roles()) == [(0, 0)]


def test_intervals_stay_within_0_and_1() -> None:
    (one,) = every_relation(judged({"x": tally_of_heads([1.0, 0.0, 0.97], n=20)}))
    assert (one.low >= 0).all()
    assert (one.high <= 1).all()
    assert one.low[0, 0] < 0.9  # ten texts that are all right do not make it certain
    assert one.high[0, 1] > 0.1


# By simulation ---------------------------------------------------------------------------------------------------


def expressed(found: Relations) -> list[Relation]:
    return [one for one in every_relation(found) if one.found.any()]


@pytest.mark.slow
def test_shuffled_labels_and_copies_give_random_heads_nothing(sharp: Any) -> None:
    """At most 5 in 100 of the relations that have a verdict, whatever is copied."""
    chance = np.random.default_rng(0)
    n_judged = n_found = 0
    trees = list(AnnotatedCorpus(SAMPLES / "dependencies.conllu"))
    for seed in range(12):
        texts = letters(60, seed)
        names = [f"label {number}" for number in range(6)]
        shuffled = [
            replace(text, links=tuple(replace(link, relation=str(chance.choice(names))) for link in text.links))
            for text in [*texts, *trees]
        ]
        for given in (texts, shuffled, [text for text in letters(12, seed, 6, 1) for _ in range(20)], trees * 5):
            found = relations(sharp(seed), given)
            n_judged += sum(not one.no_verdict for one in every_relation(found))
            n_found += len(expressed(found))
    assert n_judged > 100
    assert n_found <= 0.05 * n_judged


@pytest.mark.slow
def test_a_planted_head_is_found_in_few_texts() -> None:
    """Of tallies of 24 texts: heads that are right in 0.9 of links, beside a rule of 0.3 and 71 heads of chance."""
    chance = np.random.default_rng(0)
    n_found = n_false = 0
    for _ in range(100):
        lots, cells = Lots(), []
        for _ in range(24):
            by_source, by_text, first = lots.deal(None)
            hits = np.concatenate([chance.binomial(2, 0.9, 1), chance.binomial(2, 0.2, 71)])
            rules = np.zeros(len(RULES), np.int64)
            rules[0] = chance.binomial(2, 0.3)
            values = np.stack([hits, hits / 2], -1).astype(float)[None]
            cells.append((Cell("x", (by_source, by_text), 2, rules, first), values))
        tally = Tally()
        tally.add(cells)
        (one,) = every_relation(judged({"x": tally}))
        n_found += bool(one.found[0, 0])
        n_false += int(one.found[0, 1:].sum())
    assert n_found >= 90
    assert n_false <= 1
