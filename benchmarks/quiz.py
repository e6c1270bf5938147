"""Can people use a line? A quiz: from a head's line alone, to which of eight tokens does it attend most?

    python -m benchmarks.quiz make --texts FILE --fit FILE --out FOLDER    # questions.md for readers, answers.json
    python -m benchmarks.quiz grade FOLDER ANSWERS                       # the reader's letters, one per line: "7 C"

Heads are drawn from all of a model's, texts from a file on which no line was fitted. Each question shows a head's
line, a text, one of its tokens (the query) and eight other tokens: the one with most of the head's attention outside
sinks, and seven others, near ones more often (by 1 / distance), so that nearness alone does not give it away. Queries
are drawn where the head attends: in proportion to the attention outside sinks.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

N_CANDIDATES = 8
SHORTEST, LONGEST = 12, 48
LETTERS = "ABCDEFGH"
CLEAR = 1.5
"""How much more attention than any other candidate the right one gets, so that there is a right one."""


@dataclass(frozen=True)
class Question:
    """One question, and what is right.

    Attributes:
        number: From 1.
        head: Such as "L3H1".
        line: What is said of the head.
        tokens: The text.
        query: The place of the token that attends.
        candidates: Places of eight tokens, in the order of the text.
        right: Which of them gets most attention, 0 to 7.
        nearest: Which is nearest to the query; the earlier of two.
        by_terms: To which the head's fitted terms give most attention; -1 = not computed. A line sums these terms up,
            so that readers of lines can hardly choose better.
    """

    number: int
    head: str
    line: str
    tokens: tuple[str, ...]
    query: int
    candidates: tuple[int, ...]
    right: int
    nearest: int
    by_terms: int = -1

    @property
    def text(self) -> str:
        """It as readers see it."""
        shown = [f"**>>{token}<<**" if place == self.query else token for place, token in enumerate(self.tokens)]
        choices = [
            f"{letter}) `{self.tokens[place]}` ({self.tokens[place - 1] if place else ''} _ "
            f"{self.tokens[place + 1] if place + 1 < len(self.tokens) else ''})"
            for letter, place in zip(LETTERS, self.candidates, strict=True)
        ]
        return f"### {self.number}\n\nHead: {self.line}\n\nText: {' '.join(shown)}\n\n" + "  \n".join(choices)


def draw_questions(
    model: Any, lines: Mapping[tuple[int, int], str], texts: Sequence[str], n_heads: int, each: int, seed: int
) -> list[Question]:
    """Questions about heads drawn at random, by head.

    Args:
        model: As of `attnscope.load`.
        lines: By (layer, head), what is said of it.
        texts: Texts on which no line was fitted.
        n_heads: How many heads.
        each: How many questions a head.
        seed: Of all lots.
    """
    import attnscope

    chance = np.random.default_rng(seed)
    heads = [sorted(lines)[number] for number in chance.permutation(len(lines))[:n_heads]]
    read = []
    for number in chance.permutation(len(texts)):
        encoded = model.tokenizer.encode(texts[number])
        if SHORTEST <= len(encoded.labels) <= LONGEST:
            (block, *_) = attnscope.heatmap(model, texts[number]).maps
            read.append((tuple(encoded.labels), _sinks(encoded), np.asarray(block.weights, np.float64)))
        if len(read) == 6 * each:
            break
    made: list[Question] = []
    for layer, head in sorted(heads):
        drawn = 0
        for tokens, sinks, weights in (read[number] for number in chance.permutation(len(read))):
            outside = np.where(sinks, 0.0, weights[layer, head])
            np.fill_diagonal(outside, 0.0)
            question = _draw_question(chance, outside, sinks)
            if question is not None and drawn < each:
                query, candidates, right = question
                nearest = int(np.argmin(np.abs(np.array(candidates) - query)))
                made.append(
                    Question(len(made) + 1, f"L{layer}H{head}", lines[layer, head], tokens, query, candidates, right,
                             nearest)
                )  # fmt: skip
                drawn += 1
    return made


def choose_by_terms(
    expectations: Any, model: Any, questions: Sequence[Question], texts: Sequence[str]
) -> list[Question]:
    """The questions with the answers of the fitted terms themselves.

    Args:
        expectations: The heads' descriptions, as of `describe_to_expect`.
        model: The model.
        questions: The questions.
        texts: The texts that they ask about.
    """
    encoded = {tuple(tokens.labels): tokens for tokens in map(model.tokenizer.encode, texts)}
    answered = []
    for question in questions:
        tokens, (layer, head) = encoded[question.tokens], map(int, question.head[1:].split("H"))
        allowed = np.ones((len(tokens.labels),) * 2, bool)
        scores = expectations.scores(tokens, (model.info.kinds[0], layer), head, allowed)[question.query]
        answered.append(replace(question, by_terms=int(scores[list(question.candidates)].argmax())))
    return answered


def _sinks(encoded: Any) -> np.ndarray:
    sinks = np.array(encoded.special, bool)
    sinks[0] = True
    return sinks


def _draw_question(
    chance: np.random.Generator, outside: np.ndarray, sinks: np.ndarray
) -> tuple[int, tuple[int, ...], int] | None:
    mass = np.where(sinks, 0.0, outside.sum(1))
    mass[(outside > 0).sum(1) < N_CANDIDATES] = 0.0
    if not mass.sum():
        return None
    query = int(chance.choice(len(mass), p=mass / mass.sum()))
    right = int(outside[query].argmax())
    others = np.flatnonzero((outside[query] > 0) & (outside[query] * CLEAR < outside[query, right]))
    if len(others) < N_CANDIDATES - 1:
        return None
    near = 1 / np.abs(others - query)
    drawn = chance.choice(others, N_CANDIDATES - 1, replace=False, p=near / near.sum())
    candidates = sorted([right, *drawn.tolist()])
    return query, tuple(candidates), candidates.index(right)


RULES = """# What does the head attend to?

Each question describes one attention head of a language model in a line, and shows a text. One token is marked
**>>so<<**: the query. Of the eight tokens below, to which does the head attend most from there? Go by the line. Beside
each token stand its neighbours. Answer every question with its number and a letter, one per line, such as `7 C`.

A line reads like this. *nouns 2.1× (place, service)*: nouns get 2.1 times the attention that the rest of the line would
give them; in brackets stand examples. *least punctuation*: punctuation gets least. *up to 4 after (46%; uniform 33%),
nearest first*: the four tokens after the query get 46% of the attention, 33% if attention were uniform, and the nearer
ones get more. *evenly*: near or far within the four does not matter. *avoids the same token*: it gets less than uniform
attention would give it. Parts after *then* count less than the parts before, parts after *equally* as much. If no
distance is named, distance does not decide. *from punctuation: …* holds if the query is punctuation. *such as take →
care*: pairs of a query and a key with more attention than the rest of the line gives them.
"""


def grade(questions: Sequence[Question], answers: Mapping[int, str]) -> dict[str, Any]:
    """How many are right: of the reader, by the fitted terms, of the nearest token, and by chance."""
    right = np.array([answers.get(one.number, "").upper() == LETTERS[one.right] for one in questions])
    share, n = float(right.mean()), len(right)
    spread = 1.96 * np.sqrt(share * (1 - share) / n + 1.96**2 / (4 * n * n))  # Wilson 1927
    middle = share + 1.96**2 / (2 * n)
    return {
        "n": n,
        "answered": sum(one.number in answers for one in questions),
        "right": round(share, 3),
        "low": round((middle - spread) / (1 + 1.96**2 / n), 3),
        "high": round((middle + spread) / (1 + 1.96**2 / n), 3),
        "terms": round(float(np.mean([one.by_terms == one.right for one in questions])), 3),
        "nearest": round(float(np.mean([one.right == one.nearest for one in questions])), 3),
        "chance": 1 / N_CANDIDATES,
        "by_head": {
            head: f"{sum(right[i] for i in mine)} of {len(mine)}"
            for head in dict.fromkeys(one.head for one in questions)
            for mine in [[i for i, one in enumerate(questions) if one.head == head]]
        },
    }


def read_answers(text: str) -> dict[int, str]:
    """Letters by question."""
    split = [line.replace(")", " ").replace(":", " ").replace(".", " ").split() for line in text.splitlines()]
    return {int(words[0]): words[1] for words in split if len(words) >= 2 and words[0].isdigit()}


def main() -> None:
    """Makes a quiz, or grades one."""
    parser = argparse.ArgumentParser(description="Can people use a head's line?")
    commands = parser.add_subparsers(required=True, dest="command")
    make = commands.add_parser("make")
    make.add_argument("--model", default="minilm")
    make.add_argument("--texts", required=True, help="what is asked about: one text a line")
    make.add_argument("--fit", required=True, help="what lines are fitted on: one text a line, others than --texts")
    make.add_argument("--out", type=Path, required=True)
    make.add_argument("--heads", type=int, default=24)
    make.add_argument("--each", type=int, default=5)
    make.add_argument("--seed", type=int, default=0)
    graded = commands.add_parser("grade")
    graded.add_argument("folder", type=Path)
    graded.add_argument("answers", type=Path)
    options = parser.parse_args()
    if options.command == "grade":
        held = json.loads((options.folder / "answers.json").read_text("utf-8"))
        questions = [Question(**{**one, "candidates": tuple(one["candidates"])}) for one in held]
        print(json.dumps(grade(questions, read_answers(options.answers.read_text("utf-8")))))
        return
    import attnscope
    from attnscope.studies.describe.expected import describe_to_expect
    from attnscope.studies.inputs.texts import texts_of

    model = attnscope.load(options.model)
    texts = [text for text in Path(options.texts).read_text("utf-8").splitlines() if text.strip()]
    expectations = describe_to_expect(model, attnscope.Corpus([options.fit]), texts_of(texts))
    lines = {(head.layer, head.head): head.line for head in expectations.heads}
    questions = draw_questions(model, lines, texts, options.heads, options.each, options.seed)
    questions = choose_by_terms(expectations, model, questions, texts)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "questions.md").write_text(
        RULES + "\n" + "\n\n".join(question.text for question in questions) + "\n", "utf-8"
    )
    (options.out / "answers.json").write_text(json.dumps([asdict(question) for question in questions]), "utf-8")
    by_terms = np.mean([question.by_terms == question.right for question in questions])
    print(f"{len(questions)} questions in {options.out / 'questions.md'}; the terms choose right in {by_terms:.1%}")


if __name__ == "__main__":
    main()
