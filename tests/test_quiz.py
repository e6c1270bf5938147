"""The quiz on lines: what is right is what the model attends to, and marks are counted."""

from typing import Any

import numpy as np
import pytest

import attnscope
from benchmarks import quiz
from benchmarks.known.planted import plant


@pytest.fixture(scope="module")
def questions() -> list[quiz.Question]:
    known = plant("gpt2", 0)
    lines = {place: f"line of {place}" for place in known.heads}
    return quiz.draw_questions(known.model, lines, [text.written for text in known.held_out], 4, 3, seed=1)


def test_the_right_token_has_most_attention_outside_sinks(questions: list[quiz.Question]) -> None:
    known = plant("gpt2", 0)
    written = {tuple(known.model.tokenizer.encode(text.written).labels): text.written for text in known.held_out}
    assert 6 <= len(questions) <= 12 and len({one.head for one in questions}) >= 2
    for question in questions:
        (block,) = attnscope.heatmap(known.model, written[question.tokens]).maps
        layer, head = map(int, question.head[1:].split("H"))
        weights = np.asarray(block.weights[layer, head, question.query])
        assert question.candidates[question.right] == max(question.candidates, key=lambda place: weights[place])
        assert weights[question.candidates[question.right]] == np.delete(weights, [0, question.query]).max()
        assert 0 not in question.candidates and question.query not in question.candidates


def test_equal_seeds_ask_the_same(questions: list[quiz.Question]) -> None:
    known = plant("gpt2", 0)
    lines = {place: f"line of {place}" for place in known.heads}
    texts = [text.written for text in known.held_out]
    assert quiz.draw_questions(known.model, lines, texts, 4, 3, seed=1) == questions
    assert quiz.draw_questions(known.model, lines, texts, 4, 3, seed=2) != questions


class Mirror:
    """Expectations that are the heads' own weights, or their opposite."""

    def __init__(self, sign: int, texts: list[str]) -> None:
        model = plant("gpt2", 0).model
        self._weights = {
            tuple(model.tokenizer.encode(text).labels): sign
            * np.asarray(attnscope.heatmap(model, text).maps[0].weights)
            for text in texts
        }

    def scores(self, tokens: Any, place: tuple[str, int], head: int, allowed: np.ndarray) -> np.ndarray:
        weights: np.ndarray = self._weights[tuple(tokens.labels)][place[1], head]
        return weights


def test_terms_that_are_the_weights_choose_right(questions: list[quiz.Question]) -> None:
    known = plant("gpt2", 0)
    asked = [text.written for text in known.held_out]
    asked = [
        text for text in asked if tuple(known.model.tokenizer.encode(text).labels) in {q.tokens for q in questions}
    ]
    for sign, share in ((1, 1.0), (-1, 0.0)):
        answered = quiz.choose_by_terms(Mirror(sign, asked), known.model, questions, asked)
        assert quiz.grade(answered, {})["terms"] == share


def test_marks_count_what_is_right(questions: list[quiz.Question]) -> None:
    letters = {one.number: quiz.LETTERS[one.right] for one in questions}
    assert quiz.grade(questions, letters)["right"] == 1
    letters[questions[0].number] = quiz.LETTERS[(questions[0].right + 1) % 8]
    graded = quiz.grade(questions, letters)
    assert graded["right"] == round(1 - 1 / len(questions), 3) and graded["low"] < graded["right"] < graded["high"]
    assert quiz.read_answers("1 C\n2) d\nwords\n3: E because\n") == {1: "C", 2: "d", 3: "E"}


def test_the_query_is_marked_and_each_candidate_has_its_neighbours(questions: list[quiz.Question]) -> None:
    text = questions[0].text
    assert f"**>>{questions[0].tokens[questions[0].query]}<<**" in text and text.count(" _ ") == 8
