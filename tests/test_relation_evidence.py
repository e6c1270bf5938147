"""What counts as evidence for a relation: verdicts, copies, sources, attention that is NaN, little weight."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import binom

import attnscope
from attnscope.annotated import AnnotatedCorpus, Link
from attnscope.annotated.texts import merge_equal_texts
from attnscope.errors import AttnscopeError
from attnscope.questions.relations import describe_verdicts
from attnscope.studies.relations.evidence import HalfSplitter
from attnscope.studies.relations.study import RelationsOptions, relations
from tests.conftest import write_tokenizer
from tests.relation_helpers import Relation, every_relation, judged, part_of, text_of
from tests.test_heads import VOCABULARY
from tests.test_relations import LETTERS, followers, induction_head


@pytest.fixture(scope="module")
def sharp(tmp_path_factory):
    """Random models whose heads put nearly all weight on one token: seed -> model."""
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("sharp")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=24,
        num_attention_heads=4,
        num_hidden_layers=3,
        intermediate_size=32,
        max_position_embeddings=200,
        initializer_range=1.0,
    )
    BertModel(config).save_pretrained(folder)
    write_tokenizer(folder)
    return attnscope.load(str(folder), check=False, engine="hf").untrained  # type: ignore[attr-defined]


def letters(n, seed, n_letters=14, n_links=3):
    """Texts of letters in which a link goes from anywhere to anywhere."""
    chance = np.random.default_rng(seed)
    texts = []
    for _ in range(n):
        text = " ".join(chance.permutation(list(LETTERS))[:n_letters])
        pairs = [chance.permutation(n_letters)[:2].tolist() for _ in range(n_links)]
        texts.append(text_of(text, *(Link("any→any", (source,), (target,)) for source, target in pairs)))
    return texts


# Verdicts --------------------------------------------------------------------------------------------------------


def test_a_verdict_needs_examples_texts_and_ten_points():
    (one,) = every_relation(judged(part_of([([2], 2)] * 40, first_rule=0.5)))
    assert one.n == 80
    assert one.n_scored == 40
    assert one.baseline == 0.5
    assert one.found.all()
    # No spread at all: links, not texts, are what counts.
    assert one.p[0, 0] == pytest.approx(binom.sf(39, 40, 0.5))
    assert one.low[0, 0] < 1 == one.high[0, 0]
    (few,) = every_relation(judged(part_of([([1], 1)] * 19)))
    assert few.no_verdict == "fewer than 20 examples"
    assert np.isnan(few.p[0, 0])
    (texts,) = every_relation(judged(part_of([([5], 5)] * 18)))
    assert texts.no_verdict == "fewer than 10 texts to score on"
    # 75% against 70%: above it at 5%, but not by ten points.
    (near,) = every_relation(judged(part_of([([3], 4)] * 500, first_rule=0.7)))
    assert near.q[0, 0] < 0.01
    assert not near.found.any()
    (nothing,) = every_relation(judged(part_of([([2], 2)] * 40, first_rule=1)))
    assert not nothing.found.any()


def test_the_false_discovery_rate_is_over_heads_and_relations():
    chance = np.random.default_rng(0)
    just = [([float(chance.random() < 0.75)], 1) for _ in range(60)]
    part = part_of(just, first_rule=0.57)
    (alone,) = every_relation(judged(part))
    for number in range(30):
        part = part.merge(part_of([([0], 1)] * 60, first_rule=0.57, name=f"y{number}"))
    among = Relation(judged(part), "x")
    assert among.p[0, 0] == alone.p[0, 0]
    assert among.q[0, 0] == pytest.approx(31 * alone.q[0, 0])


def test_other_heads_and_little_weight_are_told():
    shares = [0.800, 0.795, 0.6, 0.0]
    texts = [([4 * share for share in shares], 4)] * 60
    strong = judged(part_of(texts))
    (one,) = every_relation(strong)
    assert one.best == (0, 0)
    assert describe_verdicts(strong) == ["yes; also L0H1, L0H2"]
    assert strong.verdicts == ["yes"]
    weak = judged(part_of(texts, mass=0.01))
    assert weak.verdicts == ["weakly"]
    assert (one.low >= 0).all()
    assert (one.high <= 1).all()


# Copies ----------------------------------------------------------------------------------------------------------


def test_copies_of_a_text_are_one(sharp):
    """Twenty copies of a few texts gave random heads relations: each head is right or wrong on all copies alike."""
    few = letters(12, 2, 6, 1)
    copies = [
        replace(text, text=text.text.upper() if n % 2 else text.text) for n in range(20) for text in few
    ]
    model = sharp(2)
    once = relations(model, few)
    often = relations(model, copies)
    assert once.to_csv() == often.to_csv()
    assert often.corpus["n_texts"] == 240
    assert often.corpus["n_copies"] == 228
    assert Relation(often, "any→any").left_out == {"texts that were there before": 228}
    assert any("228 texts are copies of others" in note for note in often.run["notes"])


def test_links_of_one_text_may_be_on_several_lines(own):
    texts = followers(30)
    apart = [replace(text, links=(link,)) for text in texts for link in text.links]
    one = relations(own, texts)
    other = relations(own, apart)
    assert other.to_csv() == one.to_csv()
    assert other.corpus["n_copies"] == 30
    (both,) = merge_equal_texts([texts[0], texts[0]])
    assert both == replace(texts[0], n_merged=1)


# Sources ---------------------------------------------------------------------------------------------------------


def test_a_source_is_in_one_half(own):
    texts = [replace(text, document=f"file {n // 5}") for n, text in enumerate(followers(60))]
    found = Relation(relations(own, texts), "again→next")
    assert found.halves == "sources"
    assert found.n_sources == 12
    assert found.n_texts == 60
    assert found.n_texts_scored == 30
    lots = HalfSplitter()
    halves = [lots.assign(text.document) for text in texts]
    for first in range(0, 60, 5):
        assert len({by_source for (by_source, _), _ in halves[first : first + 5]}) == 1
        assert [is_first for _, is_first in halves[first : first + 5]] == [
            True,
            False,
            False,
            False,
            False,
        ]


def test_chunks_of_a_file_are_in_one_half(own, tmp_path):
    for number in range(6):
        names = [f"name_{number}_{place}" for place in range(40)]
        source = "".join(f"{name} = {place}\nprint({name})\n" for place, name in enumerate(names))
        (tmp_path / f"{number}.py").write_text(source, "utf-8")
    options = RelationsOptions(chunk=64)
    found = Relation(
        relations(own, AnnotatedCorpus([str(tmp_path / "*.py")]), options), "closing→opening"
    )
    assert found.halves == "sources"
    assert found.n_sources == 6
    assert found.n_texts > 30
    one = relations(own, str(tmp_path / "0.py"), options)
    assert Relation(one, "closing→opening").halves == "texts"
    assert Relation(one, "closing→opening").n_sources == 1
    is_told = any("Too few sources" in note for note in one.run["notes"])
    assert is_told == any(not relation.no_verdict for relation in every_relation(one))


# NaN -------------------------------------------------------------------------------------------------------------


class Overflowing:
    """A model whose attention is NaN in layer 1 on texts that have a token."""

    def __init__(self, model, token):
        self.info, self.tokenizer, self._model, self._token = model.info, model.tokenizer, model, token
        self.text_generator = model.text_generator

    def run(self, batch, probe):
        bad = (batch.ids == self._token).any(1)

        def overflow(call):
            if call.layer != 1:
                return probe(call)
            return probe(
                replace(call, query=torch.where(bad[:, None, None, None], torch.nan, call.query))
            )

        return self._model.run(batch, overflow)


@pytest.mark.parametrize("dense", [False, True])
def test_a_text_with_nan_is_left_out_and_told(own, dense):
    texts = [replace(text, line=number) for number, text in enumerate(followers(60), 1)]
    bad = [text for text in texts if "v" in text.text.split()]
    model = Overflowing(own, int(own.tokenizer.encode("v").ids[2]))
    if dense:
        model.info = replace(own.info, path="eager")
    found = relations(model, texts)  # type: ignore[arg-type]
    again = Relation(found, "again→next")
    assert again.n == 60 - len(bad) > 10
    assert np.isfinite(again.accuracy).all()
    assert again.accuracy[induction_head()] == 1
    problem = found.corpus["problems"][0]
    assert problem["source"] == "made up"
    assert problem["line"] == bad[0].line
    assert "layer 1 computes NaN or infinity in float32" in problem["reason"]
    assert found.corpus["n_not_finite"] == len(bad)
    with pytest.raises(AttnscopeError, match="layer 1 computes NaN or infinity in float32"):
        relations(model, bad)  # type: ignore[arg-type]


# By simulation ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_planted_head_is_found_in_few_texts():
    """Of 24 texts of two links: a head that is right in 0.9 of them, beside a rule of 0.3 and 71 heads of chance."""
    chance = np.random.default_rng(0)
    n_found = n_false = 0
    for _ in range(100):
        texts = [
            ([*chance.binomial(2, 0.9, 1).astype(float), *chance.binomial(2, 0.2, 71).astype(float)], 2)
            for _ in range(24)
        ]
        (one,) = every_relation(judged(part_of(texts, first_rule=0.3)))
        n_found += bool(one.found[0, 0])
        n_false += int(one.found[0, 1:].sum())
    assert n_found >= 90
    assert n_false <= 1
