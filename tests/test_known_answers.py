"""The benchmark of known heads: its truth is the source's, it notices a false one, and it gives the same twice."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.known import grown, page, real, scores
from benchmarks.known.families import Scores
from benchmarks.known.planted import plant
from benchmarks.known.running import PARTS, jobs, run_job
from benchmarks.known.tools import Answer
from benchmarks.known.truth import Rule, Truth, WrongTruth, attention_of, offset, verify

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture(scope="module")
def gpt2():
    return plant("gpt2", 0)


@pytest.fixture(scope="module")
def held_out(gpt2):
    return attention_of(gpt2, gpt2.held_out)


# Planted ----------------------------------------------------------------------------------------------------------


def test_planted_heads_do_what_was_planted(gpt2, held_out):
    masses = verify(gpt2, held_out)
    assert set(masses) == set(gpt2.heads)
    assert min(masses.values()) >= 0.5
    assert len(gpt2.heads) == 16


def test_a_mutated_truth_is_caught(gpt2, held_out):
    """Every head with the rule of another kind of head, one at a time."""
    for place, truth in gpt2.heads.items():
        false = (
            offset(-11)
            if truth.rules[0].name != "offset"
            else Rule("", "another token", offset(-12).keys)
        )
        with pytest.raises(WrongTruth):
            verify(
                replace(gpt2, heads={**gpt2.heads, place: replace(truth, rules=(false,), rests=False)}),
                held_out,
            )


def test_equal_seeds_plant_equal_models_and_others_do_not(gpt2):
    again = plant("gpt2", 0)
    other = plant("gpt2", 1)
    assert again.texts == gpt2.texts != other.texts
    assert [truth.rules for truth in again.heads.values()] != [
        truth.rules for truth in other.heads.values()
    ]
    words = [[rule.words for rule in truth.rules] for truth in gpt2.heads.values()]
    assert [[rule.words for rule in truth.rules] for truth in again.heads.values()] == words
    ((one,), (two,)) = (attention_of(known, known.held_out[:1]) for known in (gpt2, again))
    np.testing.assert_array_equal(one, two)


def test_planted_scores_are_softmax_of_their_tables():
    tokens = np.zeros((3, 3))
    places = np.zeros(7)
    tokens[1, 2], places[2] = 1.0, 2.0  # the token before
    weights = Scores(tokens, np.zeros((3, 3)), places).of([1, 2, 1], causal=True)
    np.testing.assert_allclose(weights[2], np.exp([0, 3, 0]) / (np.exp([0, 3, 0]).sum()))
    assert weights[0].tolist() == [1, 0, 0]


# Grown ------------------------------------------------------------------------------------------------------------


def test_a_false_circuit_is_noticed():
    task, weights, told = next(one for one in grown.load() if one[0].name == "copier")
    assert grown.known_model(task, weights, told).circuit == told.circuit != ()
    with pytest.raises(WrongTruth, match="was saved"):
        grown.known_model(
            task,
            weights,
            replace(told, circuit=((0, 3), (0, 2), (0, 1), (0, 0))[: len(told.circuit) + 1]),
        )


# Scores -----------------------------------------------------------------------------------------------------------


def offset_keys(by):
    return lambda text: np.eye(text.n, k=by, dtype=np.bool_)


class _Fixed:
    """A tool that always says the same."""

    roles = frozenset({"previous_token"})

    def __init__(self, answer):
        self._answer = answer

    def answer(self, known, attention):
        return dict.fromkeys(known.heads, self._answer)

    def vocabulary(self, known):
        return [offset_keys(-1)]


def test_right_and_wrong_answers_get_full_and_no_marks(gpt2, held_out):
    known = replace(gpt2, heads={(0, 0): Truth((offset(-1),), True, "planted", "")})
    right = Answer("previous", (offset_keys(-1),), roles=frozenset({"previous_token"}))
    wrong = Answer("two before", (offset_keys(-2),), roles=frozenset({"rare", "previous_token"}))
    (good,) = scores.score_tool(_Fixed(right), known, [], held_out, 0)
    assert [
        good.values[name] for name in ("first", "named", "precise", "role_recall", "role_precision")
    ] == [1] * 5
    assert good.values["explained"] == pytest.approx(0, abs=1e-6)
    assert np.isnan(good.values["silent"])
    (bad,) = scores.score_tool(_Fixed(wrong), known, [], held_out, 0)
    assert [bad.values[name] for name in ("first", "named", "precise")] == [0] * 3
    far = replace(gpt2, heads={(0, 0): Truth((offset(-9),), True, "planted", "")})
    (said,) = scores.score_tool(_Fixed(wrong), far, [], held_out, 0)
    assert said.values["silent"] == 0
    assert np.isnan(said.values["first"])
    (silent,) = scores.score_tool(_Fixed(Answer("", undescribed=True)), far, [], held_out, 0)
    assert silent.values["silent"] == 1


def test_a_perfect_prediction_explains_all(gpt2, held_out):
    maps = {text: weights[0, 0] for text, weights in zip(gpt2.held_out, held_out, strict=True)}
    known = replace(gpt2, heads={(0, 0): gpt2.heads[0, 0]})
    (one,) = scores.score_tool(
        _Fixed(Answer("", predict=lambda text: maps[text])), known, [], held_out, 0
    )
    assert one.values["explained"] == pytest.approx(1, abs=1e-6)
    assert one.values["iou"] == 1
    assert one.values["auc"] == 1


# The run ----------------------------------------------------------------------------------------------------------


SMALL = jobs(PARTS, small=True, seed=0, smollm2=None)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(job, id=str(job), marks=() if job[0] == "grown" else pytest.mark.slow)
        for job in SMALL
    ],
)
def test_each_part_runs_and_attnscope_finds_most(job):
    result = run_job(job)
    summary = page.summarize_run([result], 0)
    ours = summary["parts"][job[0]]
    assert sum(summary["n_heads"].values()) == len(result["heads"])
    if job[0] != "grown":
        assert ours.get("named", {"value": 1})["value"] >= 0.5


def test_heads_of_the_real_model_do_what_is_known_of_them():
    known = real.known_model("minilm")
    masses = verify(known, attention_of(known, known.held_out))
    assert {*masses} == {*known.heads} != set()


def test_the_page_is_of_a_run_with_enough_heads():
    summary = json.loads((DOCS / "known-answers.json").read_text("utf-8"))
    assert summary["n_heads"]["planted"] >= 500
    assert summary["n_models"]["grown"] >= 4
    assert page.render(summary) == (DOCS / "known-answers.md").read_text("utf-8")
