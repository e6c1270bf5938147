"""Atlases: planted heads, fair samples, values as the model has them, and the same bytes for every cut of a corpus."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import chi2

import attnscope
from attnscope.core.attention.probes import WeightsRecorder
from attnscope.corpus import Corpus, CorpusText
from attnscope.questions.atlas import KEPT_MASS, MAX_KEYS, Atlas
from attnscope.studies.atlas import study
from attnscope.studies.atlas.options import AtlasOptions
from attnscope.studies.atlas.rows import MAX_SHOWN_TOKENS
from attnscope.studies.atlas.scores import ScoredText, Scores
from attnscope.studies.atlas.study import atlas
from attnscope.studies.heads.options import HeadsOptions
from attnscope.studies.inputs.texts import batch_of
from attnscope.studies.workers import Workers
from tests.atlas_helpers import examples_of, pieces_of, places_of, rows_of, weights_of
from tests.conftest import SAMPLES, SENTENCES, names_in, write_tiny, write_tiny_t5
from tests.heads_helpers import after

FEW = AtlasOptions(examples=3, sample=9)


@pytest.fixture(scope="module")
def of_own(own):
    return atlas(own, SENTENCES, FEW)


# Planted --------------------------------------------------------------------------------------------------------


def letters(n, rare, seed=0):
    """Texts of letters; those of some numbers have one z."""
    chance = random.Random(seed)
    texts = []
    for number in range(n):
        text = [chance.choice("abcdefghij") for _ in range(chance.randint(8, 20))]
        if number in rare:
            text[chance.randrange(1, len(text))] = "z"
        texts.append(" ".join(text))
    return texts


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A BERT whose L0H0 attends to z wherever it stands, and evenly where there is none."""
    folder = write_tiny(tmp_path_factory.mktemp("planted") / "bert")
    weights = load_file(folder / "model.safetensors")
    name = "embeddings.word_embeddings.weight"
    z = attnscope.load(str(folder)).tokenizer.encode("z").ids[1]
    for part in ("word", "position", "token_type"):
        weights[f"embeddings.{part}_embeddings.weight"][:, 0] = 0.0
    weights[name][z, 0] = 40.0
    weights["embeddings.LayerNorm.weight"][:] = 1.0
    weights["embeddings.LayerNorm.bias"][:] = 0.0
    query = "encoder.layer.0.attention.self.query"
    key = "encoder.layer.0.attention.self.key"
    weights[f"{query}.weight"][:5] = 0.0
    weights[f"{query}.bias"][:5] = torch.tensor([9.0, 0, 0, 0, 0])
    weights[f"{key}.weight"][:5] = 0.0
    weights[f"{key}.weight"][0, 0] = 1.0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return attnscope.load(str(folder))


def test_the_best_examples_of_a_head_contain_what_it_reacts_to(planted):
    rare = {3, 17, 31, 32, 55, 70}
    found = atlas(planted, letters(80, rare), AtlasOptions(examples=6))
    mine = [one for one in examples_of(found) if one.wanted.head == 0]
    top = [one for one in mine if one.wanted.why == "top"]
    assert {one.text for one in top} == rare
    assert all("z" in one.labels for one in top)
    scores = [one.wanted.score for one in top]
    assert scores == sorted(scores, reverse=True)
    assert all(one.wanted.score < scores[-1] / 1.5 for one in mine if one.text not in rare)
    for one in top:
        assert weights_of(one)[one.focus].argmax() == one.labels.index("z")
    gets = [row for row in rows_of(found, 0) if row.side == "gets"]
    assert gets[0].tokens == ("z",)
    assert gets[0].n_texts == 6
    assert 5 < gets[0].low <= gets[0].lift <= gets[0].high
    assert all(row.tokens[1] == "z" for row in rows_of(found, 0) if row.side == "pairs")


def test_what_the_decile_of_a_head_shows_is_a_fair_draw():
    """Of 200 texts in rising order of score, which one of its 20 stands for a decile: any of them, as often."""
    n_texts, n_seeds = 200, 20
    counts = np.zeros(20)
    for seed in range(n_seeds):
        chance = np.random.default_rng(seed)
        lots = chance.integers(0, 2**63, n_texts)
        values = np.arange(n_texts, dtype=np.float32)[:, None] * np.ones((1, 7), np.float32)
        texts = []
        for i, lot in enumerate(lots):
            text = CorpusText(i, "t", i, text=str(i))
            texts.append(ScoredText(int(lot), i, 0, text, 9))
        scores = Scores(texts, values, 2, n_texts).choose()
        drawn = scores.deciles()[1]
        assert (drawn == drawn[0]).all()
        places = np.array([scores.texts[number].text.index for number in drawn[0]])
        assert (places // 20 == np.arange(10)).all()
        counts += np.bincount(places % 20, minlength=20)
    expected = n_seeds * 10 / 20
    assert ((counts - expected) ** 2 / expected).sum() < chi2.ppf(0.999, 19)


# The same for every cut -----------------------------------------------------------------------------------------


def test_one_process_and_workers_write_the_same_bytes(tmp_path, monkeypatch, worker_here):
    monkeypatch.setattr("attnscope.studies.heads.study.BLOCK", 5)
    model = attnscope.load("own")
    corpus = Corpus([SAMPLES / "sentences.txt"])
    alone = atlas(model, corpus, FEW).save(tmp_path / "alone.npz")
    shared = atlas(model, corpus, FEW, workers=Workers("own", 2)).save(tmp_path / "shared.npz")
    assert alone.read_bytes() == shared.read_bytes()


# What it shows --------------------------------------------------------------------------------------------------


def dense(model, text):
    kept = WeightsRecorder()
    with torch.no_grad():
        model.run(batch_of([model.tokenizer.encode(text)]), kept)
    return {str(kind): by_layer for kind, by_layer in kept.maps.items()}


def test_shown_weights_are_those_of_the_model_within_the_error_that_is_said(own, of_own):
    assert {one.wanted.why for one in examples_of(of_own)} >= {"top", "decile"}
    for one in examples_of(of_own)[::7]:
        head = places_of(of_own)[one.wanted.head]
        weights = dense(own, SENTENCES[one.text])[head.kind][head.layer][0, head.head].numpy()
        shown = weights_of(one)
        assert len(weights) == one.n_tokens == len(one.positions)
        tokens = own.tokenizer.encode(SENTENCES[one.text])
        assert tokens.labels == one.labels
        assert (tokens.special == one.special).all()
        assert one.excerpt == SENTENCES[one.text]
        assert np.abs(shown - weights)[shown > 0].max() <= 1 / 510 + 1e-6
        for row, (first, last) in zip(
            weights, zip(one.starts, one.starts[1:], strict=False), strict=True
        ):
            kept = one.keys[first:last]
            assert len(kept) <= MAX_KEYS
            assert (np.diff(one.codes[first:last].astype(int)) <= 0).all()
            if len(kept) < MAX_KEYS:
                assert row[kept].sum() > KEPT_MASS - 0.01


def test_profiles_tables_and_distances_are_what_the_rows_say(own):
    texts = SENTENCES[:2]
    found = atlas(own, texts, AtlasOptions(examples=1))
    assert found.corpus["n_sampled"] == 2
    maps = [dense(own, text)["encoder"] for text in texts]
    n_queries = sum(of[0].shape[-1] for of in maps)
    # Profiles: the mass at each distance, the farthest in one, per query.
    for number, head in enumerate(places_of(found)):
        mine = [of[head.layer][0, head.head] for of in maps]
        profile = np.zeros(found["profile"].shape[1])
        for weights in mine:
            n = len(weights)
            for offset in range(-n + 1, n):
                profile[np.clip(offset, -65, 65) + 65] += float(weights.diagonal(offset).sum())
        np.testing.assert_allclose(found["profile"][number], profile / n_queries, atol=1e-5)
    # 1 / n of each of n queries.
    assert found["even_profile"][0, 65] == pytest.approx(len(texts) / n_queries, abs=1e-5)
    tokens = [own.tokenizer.encode(text) for text in texts]
    # Token tables: each row again from the dense weights, as a mean over texts.
    n_rows = 0
    for head, table in zip(places_of(found), [rows_of(found, at) for at in range(14)], strict=True):
        for row in table if head.layer == 0 else ():  # the second layer looks back alone
            masses = []
            lifts = []
            count = 0
            for of, text in zip(maps, tokens, strict=True):
                off = ~text.special & (np.arange(len(text)) > 0)
                asks = [label.lower() == row.tokens[0].lower() for label in text.labels]
                gets = [label.lower() == row.tokens[-1].lower() for label in text.labels]
                keys = off if row.side == "asks" else off & gets
                queries = np.ones(len(text), np.bool_) if row.side == "gets" else np.array(asks)
                weights = of[head.layer][0, head.head].numpy()[queries]
                part = weights[:, keys]
                # Queries are compared with uniform attention, keys with what their queries give outside sinks.
                even = part.size / len(text)
                if row.side != "asks":
                    even = weights[:, off].sum() * keys.sum() / off.sum()
                masses.append(part.sum() / len(part))
                lifts.append(part.sum() / even)
                count += len(part)
            assert row.n_texts == 2
            assert row.count == count
            assert row.mass == pytest.approx(np.mean(masses), abs=1e-4, rel=1e-5)
            assert row.lift == pytest.approx(np.mean(lifts), abs=1e-4, rel=1e-5)
            assert row.low <= row.lift <= row.high
            n_rows += 1
    assert n_rows > 50
    # Distances between heads.
    assert found["distance"].shape == (14, 14)
    assert (np.diag(found["distance"]) == 0).all()
    assert np.nanmin(found["distance"]) >= 0
    assert np.nanmax(found["distance"]) <= 1
    assert found["distance"][0, 2] > found["distance"][3, 10]  # previous and self; both on the start


def test_a_text_that_is_read_in_parts_says_what_it_says_as_a_whole(own, monkeypatch):
    long = [" ".join(SENTENCES[:9]), " ".join(SENTENCES[9:])]
    whole = atlas(own, long, FEW)
    monkeypatch.setattr("attnscope.studies.atlas.rows._MAX_TILE_WEIGHTS", 1)  # 16 queries at once
    parts = atlas(own, long, FEW)
    for name in ("profile", "even_profile", "distance"):
        np.testing.assert_allclose(parts[name], whole[name], atol=2e-4)
    np.testing.assert_array_equal(parts["kept_code"], whole["kept_code"])
    for name in ("text", "focus"):
        np.testing.assert_array_equal(parts["examples"][name], whole["examples"][name])
    for head in range(14):
        mine = rows_of(parts, head)
        others = rows_of(whole, head)
        assert [(row.side, row.tokens, row.count) for row in mine] == [
            (row.side, row.tokens, row.count) for row in others
        ]
        np.testing.assert_allclose([row.lift for row in mine], [row.lift for row in others], rtol=1e-4)


def test_long_texts_are_shown_by_their_chunks(own):
    text = " ".join(SENTENCES)
    found = atlas(
        own, [text, SENTENCES[0]], AtlasOptions(heads=HeadsOptions(chunk=100, stride=80), examples=2)
    )
    cut = [one for one in examples_of(found) if one.n_tokens == 100]
    assert cut
    assert all(len(one.positions) == MAX_SHOWN_TOKENS and one.positions[0] == 0 for one in cut)
    assert found.corpus["n_chunked"] == 1


@pytest.mark.parametrize("road", ["seam", "eager"])
def test_an_encoder_decoder_has_all_its_kinds(road, tmp_path, monkeypatch):
    write_tiny_t5(tmp_path / "t5")
    model = attnscope.load(str(tmp_path / "t5"))
    if road == "eager":
        monkeypatch.setattr(model, "info", replace(model.info, path="eager"))
    texts = ["the cat", "a b c d e", "the the cat.", "d e f g the cat"]
    found = atlas(model, texts, AtlasOptions(examples=1))
    found.require_whole()
    assert {head.kind for head in places_of(found)} == {"encoder", "decoder", "cross"}
    kinds = np.array([head.kind for head in places_of(found)])
    assert np.isnan(found["distance"][kinds == "encoder"][:, kinds == "cross"]).all()
    assert np.isfinite(found["distance"][kinds == "cross"][:, kinds == "cross"]).all()
    assert np.isfinite(found["profile"]).all()
    back = found["profile"][kinds == "decoder"][:, 66:].sum()
    assert back == pytest.approx(0, abs=1e-6)
    # Of the start token, which the decoder reads first.
    shown = next(
        one for one in examples_of(found) if places_of(found)[one.wanted.head].kind == "decoder"
    )
    assert len(shown.labels) == shown.n_tokens
    pairs = zip(shown.labels, pieces_of(shown), strict=True)
    written = [(label.strip("\u2581\u00b7"), own.strip()) for label, (_, own) in pairs]
    assert shown.excerpt in texts[shown.text]
    assert all(label == own for label, own in written[1:])


# Small, hostile, interrupted ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "texts", [["the cat sat"], SENTENCES[:3], ["a", "b", "c"], ["", "the cat", "  "]]
)
def test_a_corpus_may_be_small(own, texts, tmp_path):
    found = atlas(own, texts)
    again = Atlas.load(found.save(tmp_path / "atlas.npz"))
    assert len(places_of(again)) == 14
    assert len(again.table("examples"))
    assert again.corpus["complete"]


def test_an_interruption_keeps_what_was_done(own, monkeypatch):
    monkeypatch.setattr("attnscope.studies.heads.measuring.TOKEN_BUDGET", 30)
    monkeypatch.setattr("attnscope.studies.atlas.rows.TOKEN_BUDGET", 30)
    first = atlas(own, SENTENCES, FEW, after(3, ""))
    assert not first.corpus["complete"]
    assert 0 < first.corpus["n_texts"] < len(SENTENCES)
    assert {one.text for one in examples_of(first)} < set(range(len(SENTENCES)))
    n_batches = len({*reports(own)})
    assert n_batches > 5
    second = atlas(own, SENTENCES, FEW, after(3, "reading examples"))
    assert not second.corpus["complete"]
    assert second.corpus["n_texts"] == len(SENTENCES)
    assert 0 < second.corpus["n_sampled"] < 9
    assert examples_of(second)
    second.require_whole()


def reports(model):
    told = []
    atlas(
        model,
        SENTENCES,
        FEW,
        lambda done: told.append(done.n_tokens) if done.step == "reading examples" else None,
    )
    return told


def test_a_failure_in_the_second_pass_keeps_the_first(own, monkeypatch):
    def fail(*given):
        raise RuntimeError("no")

    monkeypatch.setattr(study, "run_second_pass", fail)
    found = atlas(own, SENTENCES, FEW)
    assert len(places_of(found)) == 14
    assert not len(found.table("examples"))
    assert found.run["failures"][0]["step"] == "reading the examples"


def test_the_command_writes_the_file_that_is_named(run, tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(SENTENCES[:6]), "utf-8")
    status, out, err = run(
        "atlas", "--file", "texts.txt", "-m", "own", "-o", "deep/all.html", "-f", "npz,csv"
    )
    assert status == 0, err
    assert names_in(tmp_path / "deep") == ["all.csv", "all.html", "all.npz"]
    assert out.splitlines()[-3:] == ["deep/all.npz", "deep/all.csv", "deep/all.html"]
    assert run("show", "deep/all.npz", "-o", "again.html")[0] == 0
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "deep" / "all.html").read_bytes()
    assert run("atlas", "the cat", "-m", "own", "--examples-by", "entropy")[0] == 2
    status, out, _ = run("show", "deep/all.npz", "--pick", "L1H0")
    assert status == 0
    assert "L1H0" in out
    assert "L0H0" not in out
