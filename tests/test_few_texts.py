"""Intervals of ratios that few texts carry: their closed forms, planted heads that fire rarely, and real heads (slow).

The slow test takes what descriptions leave of real heads' attention, text by text. It draws few of these texts again
and again, and counts how often the interval has the share over all texts.
"""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chi2

import attnscope
from attnscope.core.exact.few_texts import interval_of_few_texts, unseen_share
from attnscope.core.questions.descriptions import describe, row_losses, score_of_texts
from attnscope.corpus import CorpusText, count_tokens
from attnscope.models.model import Model
from attnscope.studies.describe import study
from attnscope.studies.describe.rows import measure
from attnscope.studies.inputs.texts import special_ids
from attnscope.studies.measuring.head_blocks import Frequencies

Floats = NDArray[np.float64]

FOLDER = "ATTNSCOPE_TEST_MODEL"
"""Environment variable: the folder of a further model whose heads the slow tests take, such as SmolLM2's."""

SAMPLES = Path(__file__).resolve().parents[1] / "sample_texts"


def test_of_many_texts_the_ends_are_half_away() -> None:
    low, high = interval_of_few_texts(2.0, 0.01, 1e9, 9.0)
    assert (low, high) == pytest.approx((1.99, 2.01), abs=1e-4)


@pytest.mark.parametrize("events", [1, 2, 5, 30])
def test_of_few_equal_events_the_ends_are_those_of_a_poisson_mean(events: int) -> None:
    low, high = interval_of_few_texts(1.0, 1.959964 / events**0.5, 1e12, 0.0)
    exact = chi2.ppf(0.025, 2 * events) / 2 / events, chi2.ppf(0.975, 2 * events + 2) / 2 / events
    assert (low, high) == pytest.approx(exact, rel=0.08, abs=0.02)


def test_texts_that_are_all_alike_leave_what_was_not_seen() -> None:
    assert unseen_share(40) == pytest.approx(0.0881, abs=1e-4)
    low, high = interval_of_few_texts(0.2, 0.0, 40, 1.0)
    assert (low, high) == pytest.approx((0.2 * (1 - 0.0881), 0.2 + 0.8 * 0.0881), abs=1e-4)
    assert interval_of_few_texts(0.0, 0.0, 40, 1.0) == pytest.approx((0.0, 0.0881), abs=1e-4)
    assert interval_of_few_texts(3.0, 0.0, 1e12, 1.0)[1] == pytest.approx(3.0, rel=1e-5)  # above what others could have


def test_without_a_spread_there_is_no_interval() -> None:
    assert np.isnan(interval_of_few_texts(0.2, np.nan, 1.0, 1.0)).all()


@pytest.mark.parametrize("n_texts", [10, 20, 40, 80])
@pytest.mark.parametrize("firing", [0.01, 0.03, 0.1])
def test_planted_heads_that_fire_rarely_are_held(firing: float, n_texts: int) -> None:
    """r ± t·se holds the truth in 0.10 to 0.90 of these draws, the score interval of a Poisson mean in 0.03 to 0.93."""
    drawn = np.random.default_rng(0)
    true, n_held, n_draws = 1 - (0.004 + 2.1 * firing) / 2.0, 0, 400
    for _ in range(n_draws):
        fires = drawn.random(n_texts) < firing
        left = 0.004 * drawn.lognormal(-0.125, 0.5, n_texts) + 2.1 * fires * drawn.gamma(4.0, 0.25, n_texts)
        how = score_of_texts(np.arange(n_texts), left, 2.0 * drawn.gamma(50.0, 0.02, n_texts))
        n_held += how.low <= true <= how.high
    assert n_held >= 0.93 * n_draws


# Real heads -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["minilm", FOLDER])
def model(request: pytest.FixtureRequest) -> Model:
    spec = os.environ.get(FOLDER) if request.param == FOLDER else request.param
    if not spec:
        pytest.skip(f"{FOLDER} names no folder")
    return attnscope.load(spec)


@pytest.fixture(scope="module")
def sentences() -> list[CorpusText]:
    """About 400 sentences, of a novel and of other prose."""
    prose = " ".join((SAMPLES / "alice.txt").read_text("utf-8").split())
    parts = [part for part in re.split(r"(?<=[.!?;])['’\"”]* ", prose) if len(part.split()) > 3]
    parts += [text.text for text in attnscope.AnnotatedCorpus([SAMPLES / "dependencies.conllu"])]
    parts += (SAMPLES / "sentences.txt").read_text("utf-8").splitlines()
    return [CorpusText(number, "", number, text=part) for number, part in enumerate(dict.fromkeys(parts))]


def coverage(held: NDArray[np.bool_]) -> str:
    return f"{held.mean(-1).min():.3f} at worst, {np.median(held.mean(-1)):.3f} median"


@pytest.mark.slow
def test_intervals_of_explained_shares_hold_for_every_head(
    model: Model, sentences: list[CorpusText], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "MOST_BYTES", 2**40)
    sample = study.draw(model, sentences, study.DescribeOptions(queries=8000))
    counts = count_tokens(sentences, model.tokenizer.encode, special_ids(model))
    (group,) = measure(model, sample, Frequencies.of_counts(counts))
    fitted, scored = (
        group.rows.of_texts([number for number, unit in enumerate(sample) if unit.fits == fits])
        for fits in (True, False)
    )
    found = describe(
        fitted, [feature.rank for feature in group.features], candidates=study._distinct(group),
        needs=study._bases(group.features),
    )  # fmt: skip
    _, which, n_rows = np.unique(scored.texts, return_inverse=True, return_counts=True)
    drawn, n_draws = np.random.default_rng(0), 200
    for n_texts in (10, 20, 40, 80):
        held = np.zeros((len(group.heads), n_draws), np.bool_)
        for head, description in enumerate(found):
            left, nats = (
                np.bincount(which, of_rows) / n_rows
                for of_rows in (row_losses(scored, head, description), group.rows.uniform_nats[scored.index, head])
            )
            for draw in range(n_draws):
                some = drawn.integers(0, len(nats), n_texts)
                how = score_of_texts(np.arange(n_texts), left[some], nats[some])
                held[head, draw] = how.low <= 1 - left.sum() / nats.sum() <= how.high
            held[head] |= nats.mean() < 0.1  # it is said to spread evenly, without a share
        print(model.info.name, n_texts, "of", len(n_rows), "explained:", coverage(held))
        assert held.mean(1).min() >= 0.9
