"""Queries and keys of heads in a plane: what it is made of, planted pairs, rotary positions, fair draws of tokens."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import chi2

import attnscope
from attnscope.core.attention.projections import output_directions, score_directions
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.inside.around import surroundings
from attnscope.models.model import Batch
from attnscope.records.atlas.planes import STEPS, Points, share_by_place
from attnscope.studies.atlas.options import AtlasOptions
from attnscope.studies.atlas.planes import N_TOKENS, draw_tokens, kind_of_token
from attnscope.studies.atlas.study import atlas
from attnscope.studies.atlas.tables import ReadText
from tests.atlas_helpers import small_atlas
from tests.conftest import write_tiny
from tests.test_atlas import letters

FEW = AtlasOptions(examples=2, sample=40)


def vectors(n_heads: int, n: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(n_heads, n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.3


# What it is made of -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_queries", "n_keys"), [(31, 23), (3, 40), (40, 2)])
def test_directions_are_those_of_the_scores(n_queries: int, n_keys: int) -> None:
    """Against the whole matrix of scores in plain loops: shares, and products of all directions as scores."""
    queries, keys = vectors(2, n_queries, 7, 0), vectors(2, n_keys, 7, 1)
    found = score_directions(queries, keys, 7)
    for head in range(2):
        scores = np.zeros((n_queries, n_keys))
        for i in range(n_queries):
            for j in range(n_keys):
                scores[i, j] = sum(float(queries[head, i, d] * keys[head, j, d]) for d in range(7))
            scores[i] -= scores[i].mean()  # a softmax does not see it
        np.testing.assert_allclose((found.queries @ found.keys.mT)[head], scores, atol=1e-9)
        for axis in range(3):
            u, v = found.queries[head, :, axis].numpy(), found.keys[head, :, axis].numpy()
            part = (np.outer(u, v) ** 2).sum() / (scores**2).sum()
            assert float(found.explained[head, axis]) == pytest.approx(part, abs=1e-12)
            assert v[np.abs(v).argmax()] >= 0
        # No plane holds more of the scores.
        best = (np.linalg.svd(scores, compute_uv=False)[:2] ** 2).sum() / (scores**2).sum()
        assert float(found.explained[head, :2].sum()) == pytest.approx(best)


def test_what_all_queries_have_in_common_is_told() -> None:
    queries = torch.zeros(1, 20, 5, dtype=torch.float64)
    queries[0, :, 0] = 3.0  # every query asks for the same
    queries[0, :, 1] = torch.tensor([1.0, -1.0] * 10)  # half of them for one thing, half for its opposite
    found = score_directions(queries, vectors(1, 30, 5, 2), 3)
    assert sorted(found.common[0, :2].round(decimals=6).tolist()) == pytest.approx([0, 1], abs=0.2)
    assert float(found.explained[0, 2]) == pytest.approx(0, abs=1e-20)


def test_scores_that_do_not_vary_have_no_directions() -> None:
    found = score_directions(torch.zeros(1, 4, 3), vectors(1, 4, 3, 0), 3)
    assert found.explained.isnan().all() and not found.queries.any()


def test_components_of_outputs() -> None:
    outputs = vectors(2, 25, 6, 4)
    points, explained = output_directions(outputs, 3)
    for head in range(2):
        x = outputs[head].numpy() - outputs[head].numpy().mean(0)
        values = np.linalg.eigvalsh(x.T @ x)[::-1]
        np.testing.assert_allclose((points[head] ** 2).sum(0), values[:3])
        np.testing.assert_allclose(explained[head], values[:3] / values.sum())


def test_what_goes_by_place_is_told() -> None:
    chance = np.random.default_rng(0)
    places = chance.integers(1, 200, 512)
    spread = np.stack([np.sin(places / 20), chance.normal(size=512), np.zeros(512)], 1)
    found = share_by_place(spread, places)
    assert found[0] > 0.95 and found[1] < 0.08 and np.isnan(found[2])
    assert np.isnan(share_by_place(spread[:100], places[:100])).all()


# Planted ----------------------------------------------------------------------------------------------------------


def points_of(found: attnscope.Atlas, number: int) -> Points:
    points = found.points_of(number)
    assert points is not None
    return points


def test_a_query_lies_with_the_key_that_it_looks_for(tmp_path: Path) -> None:
    """In L0H0 `a` looks for `b`; `c` has the longest keys, which no query meets: it is nowhere in the plane."""
    folder = write_tiny(tmp_path / "bert")
    weights = load_file(folder / "model.safetensors")
    ids = attnscope.load(str(folder)).tokenizer.encode("a b c").ids[1:4]
    for part in ("word", "position", "token_type"):
        weights[f"embeddings.{part}_embeddings.weight"][:, :3] = 0.0
    for axis, number in enumerate(ids):
        weights["embeddings.word_embeddings.weight"][number, axis] = 40.0
    weights["embeddings.LayerNorm.weight"][:] = 1.0
    weights["embeddings.LayerNorm.bias"][:] = 0.0
    for which, axes in (("query", [0, 3, 3]), ("key", [1, 3, 2])):
        name = f"encoder.layer.0.attention.self.{which}"
        weights[f"{name}.bias"][:5] = 0.0
        weights[f"{name}.weight"][:5] = 0.0
        for row, axis in enumerate(axes):
            weights[f"{name}.weight"][row, axis] = 0.0 if axis == 3 else 4.0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    found = atlas(attnscope.load(str(folder)), letters(40, set()), FEW)
    points = points_of(found, 0)
    assert points.plane.explained[0] > 0.99 and points.plane.turned == "never"
    labels = np.array([token.label for token in points.tokens])
    query, key = points.queries[:, 0], points.keys[:, 0]
    assert query[labels == "a"].min() > 5 * np.abs(query[labels != "a"]).max()
    assert key[labels == "b"].min() > 3 * np.abs(key[labels != "b"]).max()
    assert np.abs(points.queries[:, 1:]).max() < 0.1 * query.max()


# Positions, and who is drawn --------------------------------------------------------------------------------------


def test_rotary_heads_are_shown_before_they_are_turned(tmp_path: Path) -> None:
    """Products of the points are the scores that the model would give at one place, less each query's mean."""
    words = "abcdefghij"
    attnscope.own_decoder(list(words), n_layers=1, n_heads=4, d_model=8, seed=1).save(tmp_path / "own")
    model = attnscope.load(str(tmp_path / "own"))
    text = " ".join(words[(3 * n * n + n) % 10] for n in range(30))
    found = atlas(model, [text], FEW)
    points = points_of(found, 2)
    assert points.plane.turned == "before" and len(points.tokens) == 29  # the first one is left out
    ids = torch.from_numpy(model.tokenizer.encode(text).ids.astype("int64"))[None]
    seen = surroundings(model, Batch(ids), "decoder", 0)
    assert seen.unrotated is not None
    queries, keys = (part[2, 1:].double().numpy() for part in seen.unrotated)
    scores = seen.call.scale * queries @ keys.T
    scores -= scores.mean(1, keepdims=True)
    step = points.plane.largest / STEPS
    np.testing.assert_allclose(points.queries @ points.keys.T, scores, atol=2 * 3 * step * points.plane.largest)
    turned = seen.call.scale * (seen.call.query[0, 2, 1:] @ seen.call.key[0, 2, 1:].T).double().numpy()
    assert np.abs(turned - turned.mean(1, keepdims=True) - scores).max() > 10 * step * points.plane.largest


def test_each_token_is_as_likely_to_be_drawn() -> None:
    model = attnscope.load("own")
    encoded = [model.tokenizer.encode(" ".join("x" * n)) for n in (400, 1000, 3000)]
    texts = [ReadText(tokens, np.ones(len(tokens), np.bool_)) for tokens in encoded]
    sizes = np.array([text.outside_sinks.sum() for text in texts])
    counts = np.zeros(3)
    for seed in range(20):
        drawn = draw_tokens(texts, np.random.default_rng(seed).integers(0, 2**63, 3).tolist(), model)
        assert sum(map(len, drawn)) == N_TOKENS and all(0 not in places for places in drawn)
        counts += [len(places) for places in drawn]
    expected = 20 * N_TOKENS * sizes / sizes.sum()
    assert ((counts - expected) ** 2 / expected).sum() < chi2.ppf(0.999, 2)


def test_what_a_token_is_by_its_letters() -> None:
    said = [("cat", "the cat", 4, 7), ("##ed", "walked on", 4, 6), ("Ed", " Ed", 1, 3), ("ed", "walked", 4, 6)]
    said += [("19", "in 19", 3, 5), (",", "in, on", 2, 3), ("·he", "", 0, 0), ("the", "\u201cthe", 1, 4)]
    kinds = [kind_of_token(*one) for one in said]
    assert kinds == ["word", "piece", "capitalised", "piece", "number", "punctuation", "word", "word"]


def test_an_atlas_of_some_heads_says_of_them_what_the_whole_says() -> None:
    model = attnscope.load("own")
    whole = atlas(model, letters(12, set()), FEW)
    some = whole.only([(1, 3), (0, 2)])
    some.require_whole()
    for number, at in enumerate((2, 10)):
        assert some.heads[number] == whole.heads[at] and some.tables[number] == whole.tables[at]
        mine, theirs = points_of(some, number), points_of(whole, at)
        assert np.array_equal(mine.keys, theirs.keys) and np.array_equal(mine.outputs, theirs.outputs)
        assert mine.tokens == theirs.tokens
        examples = [one for one in whole.examples() if one.facts.head == at]
        for one, other in zip([e for e in some.examples() if e.facts.head == number], examples, strict=True):
            assert one.facts.labels == other.facts.labels and np.array_equal(one.weights(), other.weights())
    assert Counter(one.head for one in some.facts) == {0: 12, 1: 12}
    with pytest.raises(UsageError, match="no head L5H0"):
        whole.only([(5, 0)])


def test_planes_are_drawn_for_some_heads_or_a_page_a_layer(tmp_path: Path) -> None:
    whole = small_atlas(2, 7)
    drawn = whole.draw(tmp_path / "whole", ["svg"])
    assert [path.name for path in drawn] == ["planes-L0.svg", "planes-L1.svg"]
    (path,) = whole.only([(0, 3), (1, 6)]).draw(tmp_path / "some", ["svg"], width="page")
    said = path.read_text("utf-8")
    assert all(name in said for name in ("L0H3", "L1H6", "direction 1: 50%", "direction 2: 30%, 70% by position"))
    with pytest.raises(UsageError, match="an atlas has no --measures"):
        whole.draw(tmp_path / "none", ["svg"], measures="previous")
    with pytest.raises(AttnscopeError, match="does not know queries and keys"):
        replace(whole, planes=(), plane_tokens=(), points={}).draw(tmp_path / "none")
