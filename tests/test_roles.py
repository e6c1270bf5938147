"""Which roles are given, on tallies made by hand: thresholds, baselines, margins, how sure, and how many tests."""

import math

import numpy as np
import pytest

from attnscope.core.catalogue import MEASURES
from attnscope.core.intervals import benjamini_hochberg
from attnscope.studies.heads.measure_intervals import NON_SHARE_MEASURES
from attnscope.studies.heads.measuring import OFFSETS, PAIR_MEASURES, KindSums
from attnscope.studies.heads.roles import (
    LEVEL,
    MIN_FIRM_TEXTS,
    MIN_TESTED_TEXTS,
    RULES,
    complete_thresholds,
    judge,
)
from tests.heads_helpers import heads_in, names_of

NAMES = (
    "resting",
    "relative_entropy",
    "previous_token",
    "previous_token_active",
    "self_token",
    "self_token_active",
    "next_token",
    "window",
    "first_token",
    "sep",
    "punctuation",
    "same_token",
    "same_token_active",
    "induction",
    "similar_token",
    "similar_token_active",
    "rarest_token",
)
N_QUERIES = 20


def tally_of(
    *heads,
    uniform=None,
    pairs=None,
    counts=None,
    n_texts=40,
    noise=0.05,
    names=NAMES,
):
    """A layer of heads whose measures have these values over texts of 20 queries, give or take some noise.

    Args:
        heads: The values of each head; other measures are 0, relative_entropy 0.5.
        uniform: Values under uniform attention; 0 where not given.
        pairs: What the best fixed offset reaches on the pair measures.
        counts: For how many queries a measure is defined, or the mass that is off resting keys; else all.
        n_texts: How many texts.
        noise: Standard deviation over texts.
        names: The measures.
    """
    tally = KindSums.empty("encoder", (0,), len(heads), names)
    chance = np.random.default_rng(0)
    values, even, count = (np.zeros((1, len(heads), len(names))) for _ in range(3))
    count += N_QUERIES
    for column, name in enumerate(names):
        default = 0.5 if name == "relative_entropy" else 0.0
        values[0, :, column] = [head.get(name, default) for head in heads]
        even[0, :, column] = (uniform or {}).get(name, 0.0)
        count[0, :, column] = (counts or {}).get(name, N_QUERIES)
    many = np.broadcast_to(count, (n_texts, *count.shape))
    tally.measures.add((values + noise * chance.standard_normal((n_texts, *values.shape))) * many, many)
    tally.uniform.add(even * many, many)
    hits = np.zeros((n_texts, len(PAIR_MEASURES), len(OFFSETS)))
    for row, name in enumerate(PAIR_MEASURES):
        hits[:, row, 3] = (pairs or {}).get(name, 0.0)
    tally.pairs.add(hits, np.ones_like(hits))
    return tally


def only_head(tally, **thresholds):
    """The one head of a tally, judged."""
    (head,) = heads_in(judge([tally], complete_thresholds({}) | thresholds, tally.n_texts))
    return head


def test_a_role_is_given_with_its_evidence():
    head = only_head(tally_of({"previous_token": 0.7, "window": 0.3}, uniform={"previous_token": 0.1}))
    (role,) = head.roles
    assert role.name == role.measure == "previous_token"
    assert role.value == pytest.approx(0.7, abs=0.03)
    assert role.low < role.value < role.high
    assert role.high - role.low == pytest.approx(2 * 2.02 * 0.05 / math.sqrt(40), rel=0.3)
    assert role.baseline == pytest.approx(0.1)
    assert role.threshold == 0.4
    assert 0 <= role.p <= role.q <= LEVEL
    assert not role.tentative
    assert math.isnan(role.active_share)


@pytest.mark.parametrize("name", ["previous_token", "first_token", "window"])
def test_a_baseline_above_the_threshold_must_be_beaten(name):
    role = next(role for role, rule in RULES.items() if rule.measures[0] == name)
    uniform = {name: 0.75}
    assert not only_head(tally_of({name: 0.7}, uniform=uniform)).roles
    assert names_of(only_head(tally_of({name: 0.95}, uniform=uniform))) == {role}


def test_above_a_baseline_of_nearly_all_there_is_nothing_to_find():
    assert not only_head(tally_of({"window": 1.0}, uniform={"window": 1.0}, noise=0)).roles
    assert not only_head(tally_of({"window": 1.0}, uniform={"window": 0.995}, noise=0)).roles


@pytest.mark.parametrize("name", PAIR_MEASURES)
def test_pair_measures_must_beat_the_best_fixed_offset(name):
    assert not only_head(tally_of({name: 0.9}, pairs={name: 1.0})).roles
    assert not only_head(tally_of({name: 0.9}, pairs={name: 0.92})).roles
    assert names_of(only_head(tally_of({name: 0.9}, pairs={name: 0.5}))) == {name}


def test_similar_tokens_are_others_than_the_same():
    assert names_of(only_head(tally_of({"similar_token": 0.9, "self_token": 1.0}))) == {"self_token"}
    assert names_of(only_head(tally_of({"similar_token": 0.5, "same_token": 0.6}))) == {"same_token"}
    assert names_of(only_head(tally_of({"similar_token": 0.5, "self_token": 0.2}))) == {"similar_token"}


def test_the_active_part_counts_where_there_is_enough_of_it():
    values = {"previous_token": 0.1, "previous_token_active": 0.9}
    little = {"previous_token_active": 0.05 * N_QUERIES}
    enough = {"previous_token_active": 0.15 * N_QUERIES}
    assert not only_head(tally_of(values | {"resting": 0.95}, counts=little, noise=0.001)).roles
    (role,) = only_head(tally_of(values | {"resting": 0.85}, counts=enough, noise=0.001)).roles
    assert role.name == "previous_token"
    assert role.measure == "previous_token_active"
    assert role.active_share == pytest.approx(0.15, abs=0.01)


def test_where_all_weights_are_alike_the_largest_is_no_choice():
    assert names_of(only_head(tally_of({"rarest_token": 0.8, "relative_entropy": 0.97}))) == {"diffuse"}
    assert names_of(only_head(tally_of({"rarest_token": 0.8, "relative_entropy": 0.7}))) == {"rare"}


@pytest.mark.parametrize("n_keys", [9, 20, 100, 1000, 30_000])
@pytest.mark.parametrize(("share", "roles"), [(0.7, {"diffuse"}), (0.4, set())])
def test_diffuse_asks_the_same_of_texts_of_any_length(n_keys, share, roles):
    """Heads that spread evenly over 0.7 and 0.4 of their keys: relative entropies of 0.84 and 0.58 with 9 keys.

    With 30,000 keys they are 0.97 and 0.91: a fixed threshold takes both or neither.
    """
    entropies = {
        "entropy_nats": math.log(share * n_keys),
        "relative_entropy": math.log(share * n_keys, n_keys),
    }
    uniform = {"entropy_nats": math.log(n_keys), "relative_entropy": 1.0}
    tally = tally_of(entropies, uniform=uniform, noise=0.01, names=(*NAMES, "entropy_nats"))
    assert names_of(only_head(tally)) == roles
    largest = tally_of(
        {**entropies, "rarest_token": 0.8}, uniform=uniform, noise=0.01, names=(*NAMES, "entropy_nats")
    )
    assert names_of(only_head(largest)) == (roles or {"rare"})


@pytest.mark.parametrize("n_texts", [MIN_TESTED_TEXTS, MIN_FIRM_TEXTS - 1])
def test_with_few_texts_roles_are_tentative(n_texts):
    (role,) = only_head(
        tally_of({"previous_token": 0.8, "next_token": 0.2}, n_texts=n_texts, noise=0.03)
    ).roles
    assert role.tentative
    assert role.effective_texts == n_texts
    assert role.threshold < role.low < role.value < role.high
    assert 0 < role.p <= role.q <= LEVEL
    assert not only_head(tally_of({"previous_token": 0.7}, n_texts=MIN_FIRM_TEXTS)).roles[0].tentative


@pytest.mark.parametrize("n_texts", [1, 2])
def test_one_or_two_texts_give_no_role(n_texts):
    assert not only_head(tally_of({"previous_token": 1.0}, n_texts=n_texts, noise=0)).roles


def test_tests_of_one_role_are_one_claim():
    """The measure of a head as a whole, and of its active part: together no surer than the surer one alone."""
    values = {"previous_token": 0.41, "previous_token_active": 0.46, "resting": 0.3}
    (role,) = only_head(tally_of(values)).roles
    assert role.measure == "previous_token_active"
    tally = tally_of(values)
    column = NAMES.index("previous_token_active")
    (whole, active) = (tally.measures.share_p_above(0.4)[0, 0, i] for i in (column - 1, column))
    assert 2 * active < whole
    assert role.p == pytest.approx(2 * active, rel=1e-6)


def test_measures_from_0_to_1_have_intervals_from_0_to_1():
    for name, measure in MEASURES.items():
        assert (name not in NON_SHARE_MEASURES) == ((measure.low, measure.high) == (0, 1)), name
    head = only_head(
        tally_of({"previous_token": 1.0, "window": 0.001, "relative_entropy": 0.99}, noise=0)
    )
    for name in ("previous_token", "window", "relative_entropy"):
        estimate = head.measures[name]
        assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1, name
    assert head.measures["previous_token"].low < 0.98
    assert head.measures["window"].high > 0.02
    assert 0.95 < head.measures["relative_entropy"].low < 0.98  # unseen texts may have none


def test_false_discoveries_are_held_over_all_heads_and_roles():
    """A hundred heads exactly at the threshold: each test alone would give five of them the role."""
    tally = tally_of(*({"previous_token": 0.4},) * 100, noise=0.1)
    column = NAMES.index("previous_token")
    p = tally.measures.p_above(0.4)[0, :, column]
    assert (p < LEVEL).sum() >= 2
    assert not any(
        head.roles for head in heads_in(judge([tally], complete_thresholds({}), tally.n_texts))
    )
    assert (benjamini_hochberg(p) > LEVEL).all()


@pytest.mark.parametrize(
    ("values", "roles"),
    [
        ({"previous_token": 0.9, "window": 0.95}, ["previous_token", "local"]),
        ({"first_token": 0.95, "previous_token": 0.5}, ["previous_token", "first_token"]),
    ],
)
def test_the_strongest_role_comes_first_and_a_sink_last(values, roles):
    assert [role.name for role in only_head(tally_of(values)).roles] == roles
