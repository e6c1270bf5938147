"""Relations from a target to its text: which head of a decoder aligns the words of the two."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import attnscope
from attnscope.annotated import AnnotatedText, Link, spans
from attnscope.annotated.texts import AnnotationError
from attnscope.core.attention.seam import AttentionCall, attention_weights
from attnscope.core.relations import record_links, score_links
from attnscope.errors import AttnscopeError
from attnscope.models.model import Batch
from attnscope.studies.relations.evidence import RULES, HalfSplitter, check_rules
from attnscope.studies.relations.study import RelationsOptions, relations
from attnscope.text import word_spans
from tests.relation_helpers import Relation, text_of
from tests.test_relations_core import by_loops, facts_of, require

ENGLISH = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "red",
    "green",
    "blue",
    "black",
    "white",
]
FRENCH = [
    "un",
    "deux",
    "trois",
    "quatre",
    "cinq",
    "sixe",
    "sept",
    "huit",
    "neuf",
    "dix",
    "rouge",
    "vert",
    "bleu",
    "noir",
    "blanc",
]
SPECIAL = ["<pad>", "</s>", "<unk>"]
VOCABULARY = [*SPECIAL, *ENGLISH, *FRENCH]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Marian whose head L0H1 across looks from each French word at the English one that it means."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import MarianConfig, MarianMTModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("marian")
    torch.manual_seed(0)
    d = 64
    config = MarianConfig(
        vocab_size=len(VOCABULARY),
        d_model=d,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
        scale_embedding=False,
        init_std=0.3,
    )
    model = MarianMTModel(config)
    with torch.no_grad():
        table = model.model.shared.weight
        table.normal_(std=8)
        table[3 + len(ENGLISH) :] = table[3 : 3 + len(ENGLISH)]  # a French word is its English one
        for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
            layer.self_attn.out_proj.weight.zero_()
            layer.fc2.weight.zero_()
        across = model.model.decoder.layers[0].encoder_attn
        for part in (across.q_proj, across.k_proj):
            part.weight[d // 2 :] = 3 * torch.eye(d)[d // 2 :]
            part.bias.zero_()
    model.save_pretrained(folder)
    backend = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(VOCABULARY)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=64,
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def marian(folder):
    return attnscope.load(str(folder))


def pairs(n, seed=0):
    """English and French words in other orders, each French one linked to what it means, and to one at random."""
    chance = np.random.default_rng(seed)
    texts = []
    for number in range(n):
        size = int(chance.integers(5, 11))
        meant = chance.permutation(len(ENGLISH))[:size]
        order = chance.permutation(size)
        text = " ".join(ENGLISH[w] for w in meant)
        target = " ".join(FRENCH[meant[place]] for place in order)
        links = [Link("aligned", (own,), (int(place),)) for own, place in enumerate(order)]
        links += [Link("random", (own,), (int(chance.integers(size)),)) for own in range(size)]
        texts.append(
            AnnotatedText(
                text,
                tuple(word_spans(text)),
                tuple(links),
                "made up",
                number + 1,
                target=target,
                target_words=tuple(word_spans(target)),
            )
        )
    return texts


def test_the_aligning_head_is_found(marian):
    found = relations(marian, pairs(40))
    assert found.table("heads")["kind"][0] == "cross"
    aligned = Relation(found, "aligned")
    assert aligned.best == (0, 1)
    assert aligned.best_found
    assert aligned.accuracy[0, 1] > 0.95
    assert aligned.mass[0, 1] > 0.8
    assert aligned.accuracy.shape == (2, 2)
    assert aligned.found.sum() == 1
    assert not Relation(found, "random").found.any()
    assert "diagonal" in " ".join(found.report().guide)


def test_numbers_are_those_of_dense_weights(marian):
    """Mass of each head on the targets, pair by pair: rows of decoder tokens, columns of the text's."""
    texts = pairs(12)
    found = relations(marian, texts)
    np.testing.assert_allclose(relations(Eager(marian), texts)["mass"], found["mass"], atol=1e-6)  # type: ignore[arg-type]
    lots = HalfSplitter()
    mass = np.zeros((2, 2))
    n_links = 0
    for text in texts:
        maps = {}

        def probe(call, maps=maps):
            weights = attention_weights(call)
            if call.kind == "cross":
                maps[call.layer] = weights[0].double().numpy()
            return weights @ call.value

        ids = torch.from_numpy(marian.tokenizer.encode(text.text).ids)[None]
        target = torch.from_numpy(marian.text_generator.encode_target(text.target).ids)[None]
        with torch.no_grad():
            marian.run(Batch(ids, target_ids=target), probe)
        if lots.assign(None)[0][0] == 0:
            continue
        for link in text.links:
            # A start token stands before the target, and none before the text.
            if link.relation == "aligned":
                n_links += 1
                mass += [
                    weights[:, link.source[0] + 1, link.targets[0]]
                    for _, weights in sorted(maps.items())
                ]
    np.testing.assert_allclose(Relation(found, "aligned").mass, mass / n_links, atol=1e-6)


class Eager:
    """A model of which the weights are read as a whole."""

    def __init__(self, model):
        self.info, self.tokenizer = replace(model.info, path="eager"), model.tokenizer
        self.run, self.text_generator = model.run, model.text_generator


def test_the_probe_across_is_what_plain_loops_give():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, n, 5, generator=generator) for heads, n in ((4, 11), (2, 7), (2, 7))
    )
    call = AttentionCall(0, "cross", query, key, value, 0.6)
    units = [[0, 0, 1, 2, 2, 3, -1], [0, 1, 2, 3, 4, -1, -1]]
    queries = [[-1, 0, 0, 1, 2, 3, 4, 4, 5, 6, 7], [-1, *range(10)]]
    links = [(0, [4], [1], 0), (0, [6, 7], [0, 3], 1), (1, [9], [4], 0), (1, [0], [2], 1)]
    facts = facts_of(queries, links)  # rows and their pieces are the target's
    facts = replace(facts, word_of_token=torch.tensor(units), is_across=True)
    probe = record_links(facts)
    probe(call)
    weights = attention_weights(call)
    # As one text of both: the target's words come after the text's, and no weight is on them.
    whole = torch.zeros(2, 4, 18, 18, dtype=torch.float64)
    whole[:, :, 7:, :7] = weights.double()
    joined = [
        [*mine, *[-1 if u < 0 else u + 10 for u in other]]
        for mine, other in zip(units, queries, strict=True)
    ]
    expected = by_loops(
        whole.tolist(), joined, [(t, [s + 10 for s in own], to, c) for t, own, to, c in links], 2
    )
    require(probe.maps["cross"][0], expected)
    require(score_links(weights, facts), expected)
    with pytest.raises(ValueError, match="the links are of"):
        record_links(facts)(AttentionCall(0, "cross", query[:, :, :5], key, value, 0.6))


def test_rules_counted_by_hand():
    text = "a b c d e f"
    target = "x C y"
    links = [
        Link("r", (0,), (1,)),
        Link("r", (1,), (2,)),
        Link("r", (2,), (0,)),
        Link("r", (0, 1), (1, 5)),
    ]
    given = replace(text_of(text), target=target, target_words=tuple(word_spans(target)))
    hits = dict(zip(RULES, check_rules(given, links).sum(0).tolist(), strict=True))
    # The middles of x, C, y stand at 1/6, 1/2, 5/6 of the target: before b, d and f of the text; of x C at 1/3.
    assert {rule: n for rule, n in hits.items() if n} == {
        "offset +1": 2,
        "offset −2": 1,
        "same place": 1,
        "offset +4": 1,
        "diagonal": 1,
        "diagonal −1": 2,
        "diagonal +3": 1,
        "same word": 1,
    }


def test_the_format():
    entry = {
        "text": "The cat slept.",
        "target": "Le chat dormait.",
        "links": [
            {"from": [3, 7], "to": [4, 7], "label": "aligned"},
            {"from": [8, 15], "to": [[8, 13], [4, 7]]},
        ],
    }
    text = spans.parse(json.dumps(entry), "a", 1)
    assert text is not None
    assert text.target == "Le chat dormait."
    assert [text.target[a:b] for a, b in text.target_words] == ["Le", "chat", "dormait", "."]
    assert text.links == (Link("aligned", (1,), (1,)), Link("link", (2,), (1, 2)))
    for wrong in ({"target": 3}, {"target": " "}, {"links": [{"from": [3, 17], "to": [4, 7]}]}):
        with pytest.raises(AnnotationError):
            spans.parse(json.dumps(entry | wrong), "a", 1)


def test_what_cannot_be_is_refused_or_left_out(marian):
    with pytest.raises(AttnscopeError, match="minilm has no cross-attention"):
        relations(attnscope.load("minilm"), pairs(3))
    with pytest.raises(AttnscopeError, match="not cut into chunks"):
        relations(marian, pairs(3), RelationsOptions(chunk=20))
    alone = text_of("one two", Link("r", (0,), (1,)))
    long = replace(
        pairs(1, seed=5)[0], text=" ".join(ENGLISH * 6), words=tuple(word_spans(" ".join(ENGLISH * 6)))
    )
    found = relations(marian, [*pairs(30), alone, long])
    notes = " ".join(found.run["notes"])
    assert "texts with a target among others without" in notes
    assert "longer than the model takes" in notes
    assert Relation(found, "aligned").n_texts == 30
