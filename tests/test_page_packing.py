"""What a page stores of the weights: every way in which it shows them stays within 0.0005."""

import base64
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnscope.pages.texts import FINE_STEP, ROW_SUM_STEP, STEP, count_pieces, max_pieces, pack_heads
from attnscope.questions.heatmap import AttentionMap
from tests.record_helpers import map_of, tokens_of

SHOWN = 0.0005 - 0.00005  # the page writes four decimals, which takes the rest


def unpacked(attention, step):
    """Codes, (query, key), and row scales of each head, read in plain loops as the format says."""
    n_queries = len(attention.queries)
    n_keys = len(attention.keys)
    held = [attention.of(layer, head) for layer in attention.layers for head in attention.heads]
    heads = []
    for members, data in pack_heads(held, attention.keys, attention.keys.special, step):
        raw = zlib.decompress(base64.b64decode(data))
        n = len(members)

        def numbers(at, count, raw=raw):
            return [raw[at + i] + 256 * raw[at + count + i] for i in range(count)]

        codes = numbers(0, n * n_keys * n_queries)
        order = numbers(2 * len(codes), n * n_keys)
        scales = (
            numbers(2 * len(codes) + 2 * len(order), n * n_queries)
            if attention.keys.special.any()
            else None
        )
        assert len(raw) == 2 * (len(codes) + len(order) + len(scales or ()))
        for number, head in enumerate(members):
            assert head == len(heads)
            table = np.zeros((n_queries, n_keys))
            for column in range(n_keys):
                key = order[number * n_keys + column]
                for query in range(n_queries):
                    table[query, key] = codes[(number * n_keys + column) * n_queries + query]
            heads.append(
                (table, None if scales is None else np.array(scales[number * n_queries :][:n_queries]))
            )
    return heads


def decoded(attention, hidden, step=STEP):
    """The weights of each head; with special keys hidden the shares of what is left, in the columns that stay."""
    worth = step / count_pieces(attention.keys, max_pieces(step))
    special = attention.keys.special
    result = []
    for codes, scales in unpacked(attention, step):
        values = codes * worth
        if scales is not None and not hidden:
            values[:, ~special] *= np.where(scales > 0, scales * ROW_SUM_STEP, 0.01)[:, None]
        if scales is not None and hidden:
            values[scales == 0] = 0
        result.append(values[:, ~special] if hidden else values)
    return result


def pieced(n, sizes, special):
    """Tokens of words of so many pieces each; special tokens are part of none."""
    words = np.repeat(np.arange(len(sizes)), sizes)[:n].astype(np.int32)
    words[list(special)] = -1
    return tokens_of([f"t{i}" for i in range(n)], special, words=words)


@st.composite
def maps(draw):
    sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=6))
    n = sum(sizes) + 2
    special = draw(st.sampled_from([(), (0,), (0, n - 1)]))
    keys = pieced(n, [1, *sizes, 1], special)
    queries = draw(st.sampled_from([keys, tokens_of(["a", "b", "c"])]))
    made = map_of(
        queries, keys, kind="encoder" if queries is keys else "cross", seed=draw(st.integers(0, 99))
    )
    # Rows that rest: nearly all of their attention is on one token, as it is in real models.
    rest = draw(st.floats(0, 0.9999))
    weights = made.weights * np.float32(1 - rest)
    weights[..., 0] += np.float32(rest)
    return AttentionMap(**{**vars(made), "weights": weights})


@given(maps())
def test_every_weight_is_within_what_the_page_promises(attention):
    for head, values in enumerate(decoded(attention, hidden=False)):
        true = attention.weights[head // 3, head % 3]
        assert np.abs(values - true).max() <= SHOWN + 1e-5 * (true.max() > 0)


@given(maps())
def test_weights_without_special_tokens_are_as_near(attention):
    special = attention.keys.special
    for head, values in enumerate(decoded(attention, hidden=True)):
        kept = attention.weights[head // 3, head % 3].astype(np.float64)[:, ~special]
        left = kept.sum(-1, keepdims=True)
        # On the very edge of 1% either is right; there the record rounds one way and the page another.
        sure = (np.abs(left[:, 0] - 0.01) > 1e-4) if special.any() else np.ones(len(left), bool)
        true = np.where(left >= 0.01, kept / left, 0) if special.any() else kept
        assert np.abs(values - true)[sure].max(initial=0) <= SHOWN + 1e-4


@pytest.mark.parametrize("step", [STEP, FINE_STEP])
def test_the_largest_weight_and_the_longest_word_fit(step):
    long = max_pieces(step) + 20
    keys = pieced(long, [long], ())
    weights = np.zeros((1, 1, 1, len(keys)), np.float32)
    weights[..., 7] = 1.09
    attention = AttentionMap(
        kind="cross",
        layers=(0,),
        heads=(0,),
        weights=weights,
        queries=tokens_of(["a"]),
        keys=keys,
        n_layers=1,
        n_heads=1,
        n_kv_heads=1,
    )
    (values,) = decoded(attention, hidden=False, step=step)
    np.testing.assert_allclose(values, weights[0, 0], atol=SHOWN)
