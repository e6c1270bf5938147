import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnscope.core import catalogue, masked_texts
from attnscope.core.attention import tiles
from attnscope.core.attention.seam import AttentionCall, allowed, attend, attention_weights
from attnscope.core.facts import TextFacts, find_outlier_tokens
from attnscope.core.measures import HeadMeasures, measures_of_weights
from tests import rounding
from tests.core_helpers import few_examples, make_call
from tests.measure_helpers import expected, make_facts, uniform_weights

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_sums(got, wanted, n, *, tolerance, uniform=None):
    """Each measure within the tolerance for each query, distances for each query and token."""
    kinds = [("sum", wanted.sum), ("count", wanted.count)]
    if uniform is not None:
        kinds += [("uniform_sum", uniform.sum)]
    for kind, right in kinds:
        ours = getattr(got, kind)
        assert ours.shape == right.shape
        for i, name in enumerate(got.names):
            slack = tolerance * max(1, n) * (n if "distance" in name else 1)
            off = np.abs(ours[i] - right[i]).max(initial=0.0)
            assert off <= slack, f"{kind} of {name}: {ours[i]} is not {right[i]}"


def made_up_norms(keys):
    """Lengths of hidden states: about 1, and now and then 9."""
    chance = torch.Generator().manual_seed(keys.real.numel())
    length = 1 + 0.1 * torch.rand(keys.real.shape, generator=chance)
    return torch.where(torch.rand(keys.real.shape, generator=chance) < 0.25, 9 * length, length)


def check(call, keys, queries=None, *, tolerance=1e-11):
    """Both roads against plain loops on the dense float64 weights of the call, and uniform attention likewise."""
    weights = attention_weights(rounding.in_float64(call))
    may = allowed(call)
    norms = made_up_norms(keys)
    which = None if call.kind == "cross" else find_outlier_tokens(norms, keys)
    wanted = expected(weights, may, keys, queries, which)
    even = expected(uniform_weights(call), may, keys, queries, which)
    for i, name in enumerate(even.names):
        if name.endswith("_active"):
            even.sum[i] = wanted.even[i]
        if name.startswith("similar_token"):  # likeness is told less what uniform attention has
            even.sum[i] = 0.0
    n = call.key.shape[2]
    probe = HeadMeasures(keys, queries, norms=lambda kind, layer: norms)
    output = probe(call)
    rounding.require_output(output, call)
    assert output.dtype == call.value.dtype
    assert_sums(probe.sums[call.kind][call.layer], wanted, n, tolerance=tolerance, uniform=even)
    dense = measures_of_weights(weights, keys, queries, allowed=may, outlying=which)
    assert_sums(
        dense,
        wanted,
        n,
        tolerance=max(tolerance, 1e-11) if call.query.dtype == torch.float64 else 1e-6,
        uniform=even,
    )


@st.composite
def situations(draw):
    cross = draw(st.booleans())
    n_queries, n_keys = draw(st.permutations((1, 3, 5, 7, 11, 13)))[:2]
    n_queries = n_queries if cross else n_keys
    batch = draw(st.integers(1, 3))
    seed = draw(st.integers(0, 2**16))
    lengths = draw(st.lists(st.integers(0, n_keys), min_size=batch, max_size=batch))
    options = {
        "special_ends": draw(st.booleans()),
        "left": draw(st.booleans()),
        "seed": seed,
        "context": draw(st.booleans()),
    }
    keys = make_facts(lengths, n_keys, **options, vocabulary=draw(st.integers(1, 6)))
    queries = None
    if cross:
        of_queries = draw(st.lists(st.integers(0, n_queries), min_size=batch, max_size=batch))
        queries = make_facts(of_queries, n_queries, **options)
    group = draw(st.sampled_from([1, 2, 3, 6]))
    mask_heads = draw(st.sampled_from([1, 1, 6]))
    masked = draw(st.sampled_from(["none", "padding", "any"]))
    mask = None
    generator = torch.Generator().manual_seed(seed)
    if masked == "padding":
        mask = keys.real[:, None, None]
    elif masked == "any":
        mask = torch.rand(batch, mask_heads, n_queries, n_keys, generator=generator) > 0.3
        # Padding is hidden in any sane call; a model's values there could be anything.
        mask = mask & keys.real[:, None, None]
    else:
        keys = dataclasses.replace(keys, real=torch.ones_like(keys.real), rarest=None)
    call = make_call(
        seed=seed,
        batch=batch,
        n_kv_heads=6 // group,
        group=group,
        n_queries=n_queries,
        n_keys=n_keys,
        d_value=draw(st.sampled_from([5, 16])),
        mask=mask,
        is_causal=draw(st.booleans()),
        with_sinks=draw(st.booleans()),
        softcap=draw(st.none() | st.just(2.0)),
        bias_shape=draw(st.none() | st.just((1, 6, n_queries, n_keys))),
    )
    return dataclasses.replace(call, kind="cross" if cross else "decoder"), keys, queries


@given(
    situation=situations(), elements=st.sampled_from([1, 300, 10**6]), kept=st.sampled_from([0, 10**6])
)
@few_examples
def test_every_measure_is_its_definition(situation, elements, kept):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE_ELEMENTS", elements)
        patch.setattr(tiles, "MIN_QUERIES_PER_TILE", 2)
        patch.setattr(masked_texts, "MAX_CACHED_PAIRS", kept)
        check(*situation)


@given(
    situation=situations(),
    elements=st.sampled_from([1, 300, 10**6]),
    size=st.integers(1, 6),
)
@few_examples
def test_each_unit_is_what_its_queries_say(situation, elements, size):
    """A unit's sums are those of a text of which no other query counts."""
    call, keys, queries = situation
    asking = queries or keys
    norms = made_up_norms(keys)
    which = None if call.kind == "cross" else find_outlier_tokens(norms, keys)
    weights = attention_weights(call)
    may = allowed(call)
    n = call.query.shape[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE_ELEMENTS", elements)
        patch.setattr(tiles, "MIN_QUERIES_PER_TILE", 2)
        patch.setattr(catalogue, "QUERIES_PER_UNIT", size)
        patch.setattr(catalogue, "MAX_UNITS", 20)
        size = catalogue.queries_per_unit(n)
        n_units = -(-n // size)
        probe = HeadMeasures(keys, queries, norms=lambda kind, layer: norms)
        rounding.require_output(probe(call), call)
        dense = measures_of_weights(weights, keys, queries, allowed=may, outlying=which)
    for found in (probe.sums[call.kind][0], dense):
        assert found.sum.shape[1] == len(weights) * n_units
        for unit in range(n_units):
            here = torch.zeros_like(asking.real)
            here[:, unit * size : (unit + 1) * size] = True
            alone = dataclasses.replace(
                asking, context=~here if asking.context is None else asking.context | ~here
            )
            texts = (alone, None) if queries is None else (keys, alone)
            wanted = expected(weights, may, *texts, which)
            np.testing.assert_allclose(found.sum[:, unit::n_units], wanted.sum, atol=1e-11)
            np.testing.assert_allclose(found.count[:, unit::n_units], wanted.count, atol=1e-11)


def test_units_are_of_about_512_queries_equally_long_and_at_most_64():
    sizes = {
        0: 512,
        1: 512,
        512: 512,
        600: 600,
        769: 385,
        1600: 534,
        32_768: 512,
        32_769: 513,
        64_000: 1000,
    }
    assert {n: catalogue.queries_per_unit(n) for n in sizes} == sizes


def long_call(n=97, **fields):
    """Two texts of odd size in float32; the second is padded."""
    keys = make_facts([n, n - 36], n, seed=5, vocabulary=40, d=7)
    sizes = {"n_queries": n, "n_keys": n, "d_head": 31, "d_value": 5, "dtype": torch.float32}
    call = make_call(
        **(sizes | {"n_kv_heads": 2, "group": 3, "mask": keys.real[:, None, None]} | fields)
    )
    return call, keys


@pytest.mark.parametrize(
    ("elements", "fields"),
    [
        (10_000, {}),
        (10**7, {"is_causal": True}),
        (10**7, {"n_kv_heads": 6, "group": 1}),
        (10_000, {"n_kv_heads": 1, "group": 6, "is_causal": True}),
        (10_000, {"bias_shape": (6, 97, 97)}),
        (10**7, {"bias_shape": (97,), "mask": None, "is_causal": True}),
        (10_000, {"softcap": 2.0, "with_sinks": True, "is_causal": True}),
        (10**7, {"softcap": 2.0, "with_sinks": True, "is_causal": True}),
        (10_000, {"scale": 4.0}),
    ],
)
def test_float32_is_exact_to_1e5(monkeypatch, elements, fields):
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", elements)
    call, keys = long_call(**fields)
    check(call, keys, tolerance=1e-5)


def minilm_batch(folder):
    from attnscope.models import load

    model = load("minilm", engine="native")
    texts = [
        "The animal didn't cross the street because it was too tired; the street, the animal, and it.",
        "No.",
        "A cat saw a cat. " * 4,
    ]
    tokens = [model.tokenizer.encode(text) for text in texts]
    n = max(len(text) for text in tokens)
    batch = len(texts)
    ids = torch.zeros(batch, n, dtype=torch.int64)
    special = torch.zeros(batch, n, dtype=torch.bool)
    real = torch.zeros_like(special)
    marks = torch.zeros_like(special)
    for row, text in enumerate(tokens):
        ids[row, : len(text)] = torch.from_numpy(text.ids)
        special[row, : len(text)] = torch.from_numpy(text.special)
        real[row, : len(text)] = True
        marks[row, : len(text)] = torch.tensor(
            [not any(map(str.isalnum, label)) for label in text.labels]
        )
    table = torch.nn.functional.normalize(model._network.word.weight, dim=-1)
    facts = TextFacts(
        real=real,
        special=special,
        ids=ids,
        cls=ids == 101,
        sep=ids == 102,
        punctuation=marks & ~special,
        log_frequency=-torch.rand(batch, n) * 9,
        embeddings=table[ids],
        rarest=torch.arange(n) == torch.tensor([2, 1, 3])[:, None],
    )
    return model, facts


class Recorder:
    """Lets every call pass, and keeps it."""

    def __init__(self, inner):
        self.inner, self.calls = inner, []

    def __call__(self, call):
        self.calls.append(call)
        return self.inner(call)


def test_minilm_measures_are_their_definitions(minilm_folder):
    from attnscope.models.model import Batch

    model, facts = minilm_batch(minilm_folder)
    probe = HeadMeasures(facts)
    recorder = Recorder(probe)
    hidden = model.run(Batch(facts.ids, facts.real), recorder)
    plain = model.run(Batch(facts.ids, facts.real), attend)
    torch.testing.assert_close(hidden[facts.real], plain[facts.real], rtol=1e-4, atol=1e-5)
    n = facts.real.shape[1]
    for call in recorder.calls:
        exact = dataclasses.replace(call, query=call.query.double(), key=call.key.double())
        weights = attention_weights(exact)
        got = probe.sums["encoder"][call.layer]
        if call.layer in (0, 4):
            wanted = expected(weights, allowed(call), facts)
        else:
            wanted = measures_of_weights(weights, facts, allowed=allowed(call))
        assert_sums(got, wanted, n, tolerance=1e-5)
    assert probe.sums["encoder"][0].value("previous_token")[2] > 0.99
    assert probe.sums["encoder"][1].value("next_token")[8] > 0.4


def test_layers_that_differ_in_their_window_alone_are_planned_apart():
    call, keys = long_call(33, mask=None, is_causal=True)
    together = HeadMeasures(keys)
    for layer, window in enumerate((None, 2, 9)):
        one = dataclasses.replace(call, layer=layer, window=window)
        together(one)
        alone = HeadMeasures(keys)
        alone(one)
        for part in ("sum", "count", "uniform_sum"):
            ours, theirs = (getattr(probe.sums["encoder"][layer], part) for probe in (together, alone))
            np.testing.assert_array_equal(ours, theirs)


def test_an_encoder_decoder_has_texts_of_two_kinds():
    read = make_facts([7, 5], 7)
    written = make_facts([5, 3], 5, seed=1)
    probe = HeadMeasures(read, query_facts=written)
    for kind, queries, keys in (("encoder", 7, 7), ("decoder", 5, 5), ("cross", 5, 7)):
        probe(dataclasses.replace(make_call(n_queries=queries, n_keys=keys), kind=kind))
    assert list(probe.sums) == ["encoder", "decoder", "cross"]
    cross = probe.sums["cross"][0]
    for name in ("previous_token", "distance_tokens", "induction", "similar_token"):
        assert (cross.count[cross.names.index(name)] == 0).all()
    assert np.isnan(cross.value("previous_token")).all()
    assert cross.value("entropy_nats").shape == (3,)
    with pytest.raises(ValueError, match="cross layer 1 has 2 texts of 7 queries and 7 keys"):
        probe(dataclasses.replace(make_call(n_queries=7, n_keys=7), kind="cross", layer=1))


def test_facts_that_are_missing_leave_their_measures_undefined():
    call, keys = long_call(33)
    bare = TextFacts(real=keys.real, special=keys.special, ids=keys.ids)
    probe = HeadMeasures(bare)
    probe(call)
    got = probe.sums["encoder"][0]
    for name in ("cls", "sep", "punctuation", "rarity", "rarest_token", "similar_token"):
        assert np.isnan(got.value(name)).all(), name
    assert np.isfinite(got.value("entropy_nats")).all()


@pytest.mark.parametrize("is_causal", [True, False])
def test_where_a_head_looks_is_as_exact_in_a_long_text(is_causal):
    """Distances count from the query: counted from the text's start they would be off by its rounding."""
    n = 1024
    generator = torch.Generator().manual_seed(0)
    key = torch.nn.functional.normalize(torch.randn(1, 2, n, 32, generator=generator), dim=-1)
    # One token back.
    call = AttentionCall(0, "encoder", 18 * key.roll(1, 2), key, key, 1.0, is_causal=is_causal)
    facts = TextFacts(
        real=torch.ones(1, n, dtype=torch.bool),
        special=torch.zeros(1, n, dtype=torch.bool),
        ids=torch.arange(n)[None],
    )
    probe = HeadMeasures(facts)
    probe(call)
    exact = measures_of_weights(
        attention_weights(rounding.in_float64(call)), facts, allowed=allowed(call)
    )
    for name in ("signed_distance_tokens", "signed_distance_tokens_active", "distance_tokens"):
        off = np.abs(probe.sums["encoder"][0].value(name) - exact.value(name))
        assert off.max() <= 2e-6, name
