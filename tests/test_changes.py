"""What a record's weights become when tokens are hidden or merged into words."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.record_helpers import map_of, record_of, tokens_of


@st.composite
def words_of(draw, n):
    """n tokens in words of one to three, special ones between them, of one or two segments."""
    special = draw(st.lists(st.booleans(), min_size=n, max_size=n).filter(lambda s: not all(s)))
    starts = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    words = np.cumsum([True, *starts[1:]]).astype(np.int32) - 1
    words[special] = -1
    segments = np.array(
        [0] * (n // 2) + [1] * (n - n // 2) if draw(st.booleans()) else [0] * n, np.int32
    )
    return replace(
        tokens_of([f"x{i}" for i in range(n)]), special=np.array(special), words=words, segments=segments
    )


def groups_of(tokens):
    """By the definition: neighbours of the same word of the same segment."""
    groups = []
    for i in range(len(tokens)):
        joined = (
            i > 0
            and tokens.words[i] >= 0
            and tokens.words[i] == tokens.words[i - 1]
            and tokens.segments[i] == tokens.segments[i - 1]
        )
        if joined:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


@given(st.integers(1, 9).flatmap(words_of), st.integers(1, 7).flatmap(words_of), st.integers(0, 99))
def test_merging_words_sums_over_keys_and_averages_over_queries(queries, keys, seed):
    before = map_of(queries, keys, kind="cross", seed=seed)
    after = record_of(before).merge_words().maps[0]
    rows = groups_of(queries)
    columns = groups_of(keys)
    assert after.weights.shape == (2, 3, len(rows), len(columns))
    for layer, head in np.ndindex(2, 3):
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                each = [sum(float(before.weights[layer, head, q, k]) for k in column) for q in row]
                assert after.weights[layer, head, i, j] == pytest.approx(sum(each) / len(each), abs=1e-6)
    np.testing.assert_allclose(after.weights.sum(-1), 1, atol=1e-6)  # rows keep their sums
    for merged, group in zip(after.keys.labels, columns, strict=True):
        assert merged == (" ".join(keys.labels[i] for i in group))
    assert after.keys.special.tolist() == [bool(keys.special[g[0]]) for g in columns]


def test_merged_words_are_labelled_with_their_text():
    text = "embeddings, didn't"
    tokens = replace(
        tokens_of(["[CLS]", "em", "##bed", "##dings", ",", "didn", "'", "t", "[SEP]"], (0, 8)),
        text=text,
        offsets=np.array(
            [(-1, -1), (0, 2), (2, 5), (5, 10), (10, 11), (12, 16), (16, 17), (17, 18), (-1, -1)],
            np.int32,
        ),
        words=np.array([-1, 0, 0, 0, 1, 2, 2, 2, -1], np.int32),
    )
    merged = record_of(map_of(tokens)).merge_words().maps[0].keys
    assert merged.labels == ("[CLS]", "embeddings", ",", "didn't", "[SEP]")
    assert merged.offsets.tolist() == [[-1, -1], [0, 10], [10, 11], [12, 18], [-1, -1]]
    assert merged.ids.tolist() == [0, -1, 4, -1, 8]


@given(st.integers(2, 9).flatmap(words_of), st.integers(0, 99))
def test_hiding_special_tokens_divides_rows_by_what_is_left(tokens, seed):
    before = map_of(tokens, seed=seed)
    kept = [i for i in range(len(tokens)) if not tokens.special[i]]
    # A row wholly on special tokens.
    before.weights[0, 0, kept[0]] = tokens.special / max(1, tokens.special.sum())
    untouched = before.weights.copy()
    record = record_of(before).hide_special()
    after = record.maps[0]
    for layer, head in np.ndindex(2, 3):
        for i, q in enumerate(kept):
            left = sum(float(before.weights[layer, head, q, k]) for k in kept)
            for j, k in enumerate(kept):
                expected = float(before.weights[layer, head, q, k]) / left if left >= 0.01 else 0.0
                assert after.weights[layer, head, i, j] == pytest.approx(expected, rel=1e-5, abs=1e-7)
    if tokens.special.any():
        assert not after.weights[0, 0, 0].any()
    assert after.queries.labels == tuple(tokens.labels[i] for i in kept)
    assert not after.keys.special.any()
    assert record.changes == (("hide_special",) if tokens.special.any() else ())
    assert record.hide_special().changes == record.changes
    np.testing.assert_array_equal(before.weights, untouched)


@pytest.mark.parametrize("special", [(), (0,), (2,)])
def test_hiding_special_tokens_hides_the_first_token_of_a_decoder(special):
    before = map_of(tokens_of(["The", "cat", "sat", "down"], special), kind="decoder")
    before.weights[:, :, 3] = [1, 0, 0, 0]  # rests on the first token wholly
    record = record_of(before).hide_special()
    kept = [i for i in range(1, 4) if i not in special]
    assert record.tokens == tuple(before.keys.labels[i] for i in kept)
    assert not record.weights[:, :, -1].any()
    rest = before.weights[:, :, kept[:-1]][:, :, :, kept]
    np.testing.assert_allclose(record.weights[:, :, :-1], rest / rest.sum(-1, keepdims=True), rtol=1e-6)
    assert record.changes == ("hide_special",)
    assert record.hide_special() is record  # the next token is none that heads rest on


def test_the_first_token_of_other_attention_and_of_a_part_is_no_sink():
    tokens = tokens_of(["The", "cat", "sat"])
    later = replace(map_of(tokens, kind="decoder"), part=(4, 4, 9, 9))
    for attention in (map_of(tokens, kind="encoder"), map_of(tokens, tokens, kind="cross"), later):
        assert not any(side.any() for side in record_of(attention).sinks(attention))
