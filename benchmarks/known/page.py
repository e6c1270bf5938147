"""The page of the last run: docs/known-answers.json, and docs/known-answers.md made of it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PARTS = {
    "planted": "rules planted in BERT, GPT-2 and Llama",
    "grown": "decoders trained here",
    "real": "real weights",
}
MOST_WRONG = 25

Result = Mapping[str, Any]


def summarize_run(results: Sequence[Result], seed: int) -> dict[str, Any]:
    """Return what a run comes to: scores by part, and what attnscope gets wrong."""
    from benchmarks.known.causes import SOURCES
    from benchmarks.known.scores import SCORES, HeadScore, summarize

    heads = [
        HeadScore(**{**one, "place": tuple(one["place"])})
        for result in results
        for one in result["heads"]
    ]
    return {
        "schema": "attnscope.known-answers/1",
        "seed": seed,
        "n_models": {part: len([r for r in results if r["job"][0] == part]) for part in PARTS},
        "n_heads": {part: sum(one.part == part for one in heads) for part in PARTS},
        "scores": SCORES,
        "parts": {part: summarize([one for one in heads if one.part == part], seed) for part in PARTS},
        "wrong": _wrong(heads),
        "causes": _causes(results, SOURCES),
    }


def _wrong(scores: Sequence[Any]) -> dict[str, Any]:
    """Heads whose line is wrong: it names something that the head does not do, or not what it does."""
    misses = [one for one in scores if one.values["first"] == 0]
    false = [one for one in scores if one.values["right_or_silent"] == 0]
    shown = [*_spread(misses, MOST_WRONG // 2), *_spread(false, MOST_WRONG // 2)]
    lines = [
        {"model": one.model, "head": "L{}H{}".format(*one.place), "rule": one.rule, "line": one.line}
        for one in shown
    ]
    return {"n_missed": len(misses), "n_false": len(false), "examples": lines}


def _spread(scores: Sequence[Any], most: int) -> list[Any]:
    """Some of many, one of a rule before a second of any."""
    seen: dict[str, int] = {}
    order = []
    for one in scores:
        seen[one.rule] = seen.get(one.rule, 0) + 1
        order.append((seen[one.rule], len(order), one))
    return [one for *_, one in sorted(order, key=lambda item: item[:2])[:most]]


def _causes(results: Sequence[Result], sources: Mapping[str, str]) -> dict[str, Any]:
    made = {}
    for name, source in sources.items():
        areas = [
            (r["model"], r["causes"][name])
            for r in results
            if r["causes"].get(name, {}).get("auc") is not None
        ]
        values = np.array([area["auc"] for _, area in areas])
        made[name] = {
            "source": source,
            "n_models": len(areas),
            "auc": round(float(values.mean()), 3) if len(values) else None,
            "least": round(float(values.min()), 3) if len(values) else None,
            "by_model": dict(areas) if len(areas) <= 8 else {},
        }
    return made


def write(summary: Mapping[str, Any], folder: Path) -> None:
    """Write known-answers.json and the page."""
    (folder / "known-answers.json").write_text(
        json.dumps(summary, indent=1, ensure_ascii=False) + "\n", "utf-8"
    )
    (folder / "known-answers.md").write_text(render(summary), "utf-8")


# The page ----------------------------------------------------------------------------------------------------------


def render(summary: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    counts = "\n".join(
        f"- {words}: {summary['n_heads'][part]} heads of {summary['n_models'][part]} models"
        for part, words in PARTS.items()
    )
    sections = [
        "<!-- Made by `python -m docs.generate` of docs/known-answers.json; do not edit. -->\n\n# Known answers",
        INTRODUCTION.format(
            counts=counts, total=sum(summary["n_heads"].values()), verdict=_verdict(summary["parts"])
        ),
        "## The scores",
        SCORING,
        "\n".join(f"- *{name}*: {words}." for name, words in summary["scores"].items()),
        "## The table",
        "Each cell is a mean, its 95% interval from a bootstrap over models, and how many heads it is about.",
        _table(summary["parts"], summary["scores"]),
        "## Do rankings of heads find the circuit?",
        _render_causes(summary["causes"]),
        "## What attnscope gets wrong",
        _render_wrong(summary["wrong"]),
        HOW,
    ]
    return "\n\n".join(sections) + "\n"


INTRODUCTION = """\
What does a head do, and does attnscope say so? On most models nobody knows. Here everybody does: each of the {total}
heads below was planted, trained on a known task, or published. The truth is written in the source of each model, and
compared with the model's own weights before attnscope sees it.

{verdict} The heads come from three sources:

{counts}"""

SCORING = """\
A *rule* says which keys each query attends to. A tool *names* a rule if its keys are the rule's keys. Both are compared
on the queries that the rule is about. There the keys that both name must be 0.8 or more of those that either names. So
the wording does not matter."""

HOW = """\
## How to run it

<!-- not run by the tests: it takes minutes, and needs benchmarks/ -->
```bash
python -m benchmarks.known --small                     # a few models of each part
python -m benchmarks.known --smollm2 path/to/smollm2   # everything; writes this page
```

The trained decoders are kept as arrays beside the code. `python -m benchmarks.known.grown` trains them anew. Equal
seeds give equal results."""


def _verdict(parts: Mapping[str, Any]) -> str:
    """Return what the run says of attnscope on planted rules, the largest part, in two sentences."""
    first, silent = parts["planted"]["first"], parts["planted"]["silent"]
    return (
        f"attnscope names the right rule first for {first['value']:.0%} of the {first['n']} planted heads whose rule "
        f"it can name. The other {silent['n']} planted heads follow rules that it has no name for. There it should "
        f"stay silent, and does so for {silent['value']:.0%}."
    )


def _cell(score: Mapping[str, Any] | None) -> str:
    if score is None:
        return "–"
    return f"{score['value']:.2f} ({score['low']:.2f}–{score['high']:.2f}; {score['n']})"


def _table(parts: Mapping[str, Any], names: Iterable[str]) -> str:
    shown = [name for name in names if any(name in scores for scores in parts.values())]
    rows = ["| heads | " + " | ".join(shown) + " |", "|---" * (len(shown) + 1) + "|"]
    for part, scores in parts.items():
        rows.append(f"| {PARTS[part]} | " + " | ".join(_cell(scores.get(name)) for name in shown) + " |")
    return "\n".join(rows)


def _render_causes(causes: Mapping[str, Any]) -> str:
    rows = ["| command | what must rank first | mean area | least | models |", "|---|---|---|---|---|"]
    for name, facts in causes.items():
        if facts["n_models"]:
            rows.append(
                f"| `{name}` | {facts['source']} | {facts['auc']:.3f} | {facts['least']:.3f} | {facts['n_models']} |"
            )
    return (
        "\n".join(rows)
        + "\n\nThe area under the ROC curve is 1 if every head that matters ranks above all others, and 0.5 by chance."
    )


MOST_WRONG = 5
"""Wrong lines that the page quotes."""


def _render_wrong(wrong: Mapping[str, Any]) -> str:
    said = (
        f"The lines of {wrong['n_missed']} heads begin with a wrong rule, although attnscope has a name for the right "
        f"one. The lines of {wrong['n_false']} other heads, whose rules it has no name for, neither say so nor predict "
        f"their attention. The table lists {MOST_WRONG} of the {wrong['n_missed'] + wrong['n_false']}. "
        "In its first column, *grown* means trained here. In its last column, *! other half:* introduces the first "
        "term of the description that is fitted on the other half of the texts."
    )
    rows = ["| model | head | what it does | what attnscope says |", "|---|---|---|---|"]
    rows += [
        f"| {one['model']} | {one['head']} | {one['rule']} | {one['line'].replace('|', '¦')} |"
        for one in wrong["examples"][:MOST_WRONG]
    ]
    return said + "\n\n" + "\n".join(rows)
