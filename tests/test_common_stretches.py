"""Two tokenizations of one text, their common stretches, and models that are compared between them."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

import attnscope
from attnscope.models.model import Model
from attnscope.records.maps.tokens import Tokens
from attnscope.studies.compare.study import compare_models
from attnscope.studies.measuring.common_stretches import common_stretches
from attnscope.text import build_tokens
from tests.conftest import write_tiny

TEXTS = ["the cat  sat, incomprehensibly.", "a mat", " Cats sat — naïvely"]


def cut(text: str, pieces: Sequence[str], opening: int = 0) -> Tokens:
    """Tokens of these pieces, found one after the other, after some special ones."""
    offsets, end = [(0, 0)] * opening, 0
    for piece in pieces:
        start = text.index(piece, end)
        end = start + len(piece)
        offsets.append((start, end))
    names = ["[CLS]"] * opening + list(pieces)
    return build_tokens(
        text, ids=range(len(names)), pieces=names, offsets=offsets, special=[n < opening for n in range(len(names))]
    )


@pytest.mark.parametrize(
    ("text", "one", "other", "expected"),
    [
        ("the cat", ["the", "cat"], ["the", " cat"], ([0, 1], [0, 1])),
        ("the cat", ["th", "e", "cat"], ["the", " c", "at"], ([0, 0, 1], [0, 1, 1])),
        ("abc", ["ab", "c"], ["a", "bc"], ([0, 0], [0, 0])),
        ("abc  d", ["abc", "  ", "d"], ["ab", "c", "d"], ([0, 0, 1], [0, 0, 1])),
        ("  ab", ["  ", "ab"], ["a", "b"], ([0, 0], [0, 0])),
        ("a—b", ["a", "b"], ["a", "—", "b"], ([0, 1], [0, 0, 1])),
    ],
)
def test_cuts_that_both_have_remain(
    text: str, one: list[str], other: list[str], expected: tuple[list[int], list[int]]
) -> None:
    found = common_stretches(cut(text, one), cut(text, other, opening=1))
    assert found is not None
    n = max(expected[0]) + 1
    assert (found[0].of_token.tolist(), found[1].of_token.tolist()) == (expected[0], [n, *expected[1]])
    assert found[0].n == found[1].n == n


def test_bytes_of_one_character_are_one_stretch() -> None:
    offsets = [(0, 1), (1, 2), (1, 2), (2, 3)]
    in_bytes = build_tokens("aéb", ids=range(4), pieces=["a", "x", "y", "b"], offsets=offsets, special=[False] * 4)
    found = common_stretches(in_bytes, cut("aéb", ["a", "éb"]))
    assert found is not None
    assert [one.of_token.tolist() for one in found] == [[0, 1, 1, 1], [0, 1]]


def test_where_places_are_unknown_there_are_none() -> None:
    unknown = build_tokens("a b", ids=[0, 1], pieces=["a", "b"], offsets=None, special=[False] * 2)
    assert common_stretches(unknown, cut("a b", ["a", "b"])) is None
    assert common_stretches(cut("a b", ["a", "b"]), cut("a c", ["a", "c"])) is None


def pooled_by_hand(model: Model, text: str, stretches: Sequence[range], head: tuple[int, int]) -> np.ndarray:
    """Rows of stretches, and a last key for special tokens; token by token."""
    record = attnscope.heatmap(model, text)
    tokens = record.maps[0].queries
    weights = record.of(*head).astype(float)

    def place(token: int) -> int:
        start, end = tokens.offsets[token].tolist()
        while start < end and text[start].isspace():
            start += 1
        return next(n for n, stretch in enumerate(stretches) if start in stretch)

    places = [len(stretches) if special else place(n) for n, special in enumerate(tokens.special)]
    rows = np.zeros((len(stretches), len(stretches) + 1))
    for query, of_query in enumerate(places):
        for key, of_key in enumerate(places):
            if of_query < len(stretches):
                rows[of_query, of_key] += weights[query, key] / places.count(of_query)
    return rows


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return attnscope.load(str(write_tiny(tmp_path_factory.mktemp("tiny"))), engine="native")


@pytest.mark.parametrize("rows_at_once", [1, 2**20])
def test_distances_are_those_of_rows_pooled_by_hand(
    tiny: Model, minilm: Model, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnscope.studies.measuring.pair_blocks.WEIGHTS_AT_ONCE", rows_at_once)
    texts = ["the cat sat, incomprehensibly.", "a mat"]
    found = compare_models(tiny, minilm, texts)
    total, n = {True: 0.0, False: 0.0}, 0
    for text in texts:
        # The one has letters where it knows no word: what both cut are the pieces of the other.
        tokens = minilm.tokenizer.encode(text)
        stretches = [range(start, end) for start, end in tokens.offsets[~tokens.special].tolist()]
        p, q = (pooled_by_hand(model, text, stretches, (1, 2)) for model in (tiny, minilm))
        n += len(stretches)
        total[True] += ((np.sqrt(p) - np.sqrt(q)) ** 2).sum() / 2
        p, q = (one[:, :-1] / one[:, :-1].sum(1, keepdims=True) for one in (p, q))
        total[False] += ((np.sqrt(p) - np.sqrt(q)) ** 2).sum() / 2
    place = found.heads.index((1, 2)), found.other_heads.index((1, 2))
    for table in found.tables:
        if table.measure == "hellinger":
            assert table.distances[place] == pytest.approx(math.sqrt(total[table.special] / n), abs=2e-6)
            assert table.count[place] == n
    assert any("2 texts into different tokens" in note for note in found.run["notes"])


def test_a_text_without_tokens_is_left_out(tiny: Model, minilm: Model) -> None:
    assert minilm.tokenizer.encode("\u200b").special.all()
    found = compare_models(tiny, minilm, [*TEXTS[:2], "\u200b"])
    assert found.corpus["n_texts"] == 2


def test_workers_and_batches_change_nothing(tiny: Model, minilm: Model) -> None:
    together = compare_models(tiny, minilm, TEXTS)
    turned = compare_models(minilm, tiny, TEXTS[::-1])
    np.testing.assert_allclose(together.tables[0].distances, turned.tables[0].distances.T, atol=2e-6)
