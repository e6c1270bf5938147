"""The study of heads: what it finds on models that are known, and what it refuses."""

import numpy as np
import pytest
import torch

import attnscope
from attnscope.core import catalogue
from attnscope.errors import AttnscopeError
from attnscope.models.own.glass_box import roles_by_head as own_roles
from attnscope.questions.head_roles import explain_roles
from attnscope.studies.heads.options import HeadsOptions
from attnscope.studies.heads.roles import MIN_FIRM_TEXTS
from attnscope.studies.heads.study import heads
from tests import rounding
from tests.conftest import SAMPLES, SENTENCES, VOCABULARY, write_tokenizer
from tests.heads_helpers import head_of, heads_in, names_of, require_same, study_tallies, words

# Few of these texts repeat a token, and few sentences have a punctuation mark before their last one: what such a
# measure counts is the evidence of so many texts.
TENTATIVE = {
    ("own", "multilingual"): {"L0H4 same_token": 9.4, "L1H1 induction": 9.0, "L1H4 same_token": 9.4},
    ("own-causal", "multilingual"): {
        "L0H4 same_token": 9.4,
        "L1H1 induction": 9.0,
        "L1H4 same_token": 9.4,
    },
}


@pytest.mark.parametrize("name", ["own", "own-causal"])
@pytest.mark.parametrize(
    ("file", "split"), [("sentences", "line"), ("multilingual", "line"), ("alice", "paragraph")]
)
def test_every_head_of_the_glass_box_is_named_right(name, file, split):
    corpus = attnscope.Corpus([SAMPLES / f"{file}.txt"], split=split)
    found = heads(attnscope.load(name), corpus)
    assert found.corpus["n_texts"] >= 20
    assert len(heads_in(found)) == len(own_roles(name))
    for head in heads_in(found):
        planted = own_roles(name)[head.layer, head.head]
        assert names_of(head) == set(planted)
        assert head.roles[0].name == planted[0]
    roles = [(f"L{head.layer}H{head.head}", role) for head in heads_in(found) for role in head.roles]
    for _, role in roles:
        assert role.tentative == (role.effective_texts < MIN_FIRM_TEXTS)
    few = {
        f"{place} {role.name}": round(role.effective_texts or 0, 1)
        for place, role in roles
        if role.tentative
    }
    assert few == TENTATIVE.get((name, file), {})


def test_minilm_on_prose(minilm):
    found = heads(minilm, attnscope.Corpus(SAMPLES / "alice.txt", split="paragraph"))
    assert head_of(found, "L0H2").roles[0].name == "previous_token"
    assert "next_token" in names_of(head_of(found, "L1H8"))
    middle = [head for head in heads_in(found) if 2 <= head.layer <= 4]
    on_cls = [head for head in middle if head.measures["cls"].value > 0.5 * head.resting_share > 0.1]
    assert len(on_cls) > 0.8 * len(middle)
    assert found.corpus["n_texts"] == 54
    assert found.run["model"] == "minilm"


def random_model(folder, kind, seed):
    """A model as transformers draws it before training."""
    import torch
    from transformers import AutoConfig, AutoModel

    sizes = {
        "bert": {
            "hidden_size": 24,
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "intermediate_size": 32,
        },
        "gpt2": {"n_embd": 24, "n_head": 4, "n_layer": 3, "bos_token_id": 3, "eos_token_id": 4},
        "llama": {
            "hidden_size": 24,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "intermediate_size": 32,
        },
    }[kind]
    if not folder.exists():
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            kind, vocab_size=len(VOCABULARY), max_position_embeddings=200, **sizes
        )
        AutoModel.from_config(config).save_pretrained(folder)
        write_tokenizer(folder)
    return attnscope.load(str(folder), check=False, engine="hf").untrained(seed)


def random_corpora():
    """Texts of one length, on which random heads differ from uniform attention all alike; short ones; long ones."""
    chance = np.random.default_rng(0)
    several = ["the", "cat", "a", "b", "dog.", "it", "is,", "who"]
    return {
        "tiny": [words(3, chance, ["the", "cat", "a", "b"]) for _ in range(60)],
        "short": [words(int(chance.integers(1, 7)), chance, several) for _ in range(60)],
        "long": [words(60, chance, several) for _ in range(20)],
    }


def share_with_roles(models):
    """Of all heads on all corpora, how many have a role but diffuse."""
    found = [heads(model, texts) for model in models for texts in random_corpora().values()]
    all_heads = [head for one in found for head in heads_in(one)]
    return sum(bool(names_of(head) - {"diffuse"}) for head in all_heads) / len(all_heads)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_random_weights_have_no_roles(kind, tmp_path):
    assert share_with_roles([random_model(tmp_path / kind, kind, seed) for seed in range(2)]) == 0


def test_thresholds_are_options(own):
    high = heads(own, SENTENCES[:12], HeadsOptions(thresholds={"local": 1.0}))
    assert not any("local" in names_of(head) for head in heads_in(high))
    assert high.options["roles"]["local"]["threshold"] == 1.0
    assert high.options["roles"]["induction"]["threshold"] == 0.4


def test_a_text_that_a_model_takes_in_one_piece_is_several_units_of_evidence(own):
    """Of about 1,500 tokens without a cut: three units share the weight of one text."""
    long = " ".join((SAMPLES / "alice.txt").read_text("utf-8").split()[:1150])
    n_units = round(len(own.tokenizer.encode(long)) / 512)
    found, tallies = study_tallies(own, [*SENTENCES, long])
    assert found.corpus["n_texts"] == 27
    assert found.corpus["n_chunked"] == 0
    assert n_units == 3
    assert 27 < found.corpus["effective_texts"] < 28
    (tally,) = tallies.values()
    assert tally.n_texts == 26 + n_units
    assert len(heads_in(found)) == len(own_roles("own"))
    for head in heads_in(found):
        assert names_of(head) == set(own_roles("own")[head.layer, head.head])


def test_units_change_no_value(own, monkeypatch):
    text = " ".join((SAMPLES / "alice.txt").read_text("utf-8").split()[:300])
    whole, wanted = study_tallies(own, [text])
    assert whole.corpus["effective_texts"] == 1
    assert "cut long ones into chunks (--chunk 512)" in explain_roles(whole)[0]
    monkeypatch.setattr(catalogue, "QUERIES_PER_UNIT", 64)
    found, tallies = study_tallies(own, [text])
    assert 4 < found.corpus["effective_texts"] <= -(-found.corpus["n_tokens"] // 64)
    ours = tallies["encoder"]
    theirs = wanted["encoder"]
    # float32 adds n numbers within n roundings of their sum: of at most 1 a query, of distances at most n.
    n = found.corpus["n_tokens"]
    slack = np.full(len(ours.names), n * n * rounding.unit(torch.float32))
    slack[["distance" in name for name in ours.names]] *= n
    for part in ("measures", "uniform"):
        for name in ("s", "c"):
            total = getattr(theirs, part).total(name)
            size = np.maximum(1, np.abs(total) / n)  # what a query has of norms of values and the like
            over = np.abs(getattr(ours, part).total(name) - total) / (slack * size)
            assert over.max() <= 1, (part, name, ours.names[over.max((0, 1)).argmax()])


def test_a_control_has_random_weights_on_the_same_texts(own):
    found = heads(own, SENTENCES[:12], HeadsOptions(control=True, seed=3))
    assert found.run["seed"] == 3
    assert len(heads_in(found, "control")) == len(heads_in(found))
    assert not any(names_of(head) - {"diffuse"} for head in heads_in(found, "control"))
    assert any(names_of(head) - {"diffuse"} for head in heads_in(found))
    again = heads(own, SENTENCES[:12], HeadsOptions(control=True, seed=3))
    require_same(found, again)


# What cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("texts", [[], [""], ["  ", "\n"], ""])
def test_without_text_there_is_nothing_to_study(own, texts):
    with pytest.raises(AttnscopeError, match="no text"):
        heads(own, texts)


@pytest.mark.parametrize(
    "options", [{"chunk": 3}, {"chunk": 1000}, {"chunk": 20, "stride": 19}, {"stride": 0}], ids=str
)
def test_chunks_that_cannot_be_are_refused_before_anything_is_read(tiny_bert, options):
    def texts():
        raise AssertionError("the corpus was read")
        yield ""

    class Unread(attnscope.Corpus):
        __iter__ = texts

    if options == {"chunk": 3}:
        options = {"chunk": 2}  # [CLS] and [SEP] leave no room
    with pytest.raises(AttnscopeError):
        heads(attnscope.load(str(tiny_bert)), Unread(SAMPLES / "alice.txt"), HeadsOptions(**options))
