"""The page of the last run: docs/known-answers.json, and docs/known-answers.md made of it."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PARTS = {
    "compiled": "RASP programs compiled by Tracr",
    "planted": "rules planted in BERT, GPT-2 and Llama",
    "grown": "decoders trained here",
    "real": "real weights",
}
MOST_WRONG = 25

Result = Mapping[str, Any]


def summarize_run(results: Sequence[Result], seed: int) -> dict[str, Any]:
    """What a run comes to: each tool's scores over all heads and by part, and what attnscope gets wrong."""
    from benchmarks.known.causes import SOURCES
    from benchmarks.known.rivals import TOOLS
    from benchmarks.known.scores import SCORES, HeadScore, summarize

    heads = [HeadScore(**{**one, "place": tuple(one["place"])}) for result in results for one in result["heads"]]
    ours = [one for one in heads if one.tool == TOOLS[0].name]
    tools = {}
    for tool in TOOLS:
        mine = [one for one in heads if one.tool == tool.name]
        parts = {part: summarize([one for one in mine if one.part == part], seed) for part in PARTS}
        tools[tool.name] = {"source": tool.source, "all": summarize(mine, seed), **parts}
    return {
        "schema": "attnscope.known-answers/1",
        "seed": seed,
        "n_models": {part: len([r for r in results if r["job"][0] == part]) for part in PARTS},
        "n_heads": {part: sum(one.part == part for one in ours) for part in PARTS},
        "cpu_s": round(sum(result["cpu_s"] for result in results)),
        "scores": SCORES,
        "tools": tools,
        "rules": _by_rule(ours),
        "wrong": _wrong(ours),
        "causes": _causes(results, SOURCES),
    }


def _by_rule(scores: Sequence[Any]) -> list[dict[str, Any]]:
    """attnscope's scores by the rule, of rules that three heads or more have alone."""
    made = []
    for rule in dict.fromkeys(one.rule for one in scores):
        mine = [one for one in scores if one.rule == rule]
        if len(mine) < 3:
            continue
        row: dict[str, Any] = {"rule": rule, "n": len(mine)}
        for name in ("first", "named", "precise", "silent", "right_or_silent", "explained", "iou"):
            values = [one.values[name] for one in mine if not math.isnan(one.values[name])]
            row[name] = round(float(np.mean(values)), 3) if values else None
        made.append(row)
    return sorted(made, key=lambda row: (-(row["first"] if row["first"] is not None else -1), -row["n"]))


def _wrong(scores: Sequence[Any]) -> dict[str, Any]:
    """Heads whose line is wrong: it names something that the head does not do, or not what it does."""
    misses = [one for one in scores if one.values["first"] == 0]
    false = [one for one in scores if one.values["right_or_silent"] == 0]
    shown = [*_spread(misses, MOST_WRONG // 2), *_spread(false, MOST_WRONG // 2)]
    lines = [
        {"model": one.model, "head": "L{}H{}".format(*one.place), "rule": one.rule, "line": one.line} for one in shown
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
        areas = [(r["model"], r["causes"][name]) for r in results if r["causes"].get(name, {}).get("auc") is not None]
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
    """Writes known-answers.json and the page."""
    (folder / "known-answers.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n", "utf-8")
    (folder / "known-answers.md").write_text(render(summary), "utf-8")


# The page ----------------------------------------------------------------------------------------------------------


def render(summary: Mapping[str, Any]) -> str:
    """The page as Markdown."""
    counts = "\n".join(
        f"- {words}: {summary['n_heads'][part]} heads of {summary['n_models'][part]} models"
        for part, words in PARTS.items()
        if summary["n_heads"][part]
    )
    tools = summary["tools"]
    sections = [
        "<!-- Made by `python -m docs.generate` of docs/known-answers.json; do not edit. -->\n\n# Known answers",
        INTRODUCTION.format(counts=counts, total=sum(summary["n_heads"].values()), verdict=_verdict(tools)),
        "## The scores",
        SCORING,
        "\n".join(f"- *{name}*: {words}." for name, words in summary["scores"].items()),
        "## The table",
        "Each cell is a mean, its 95% interval from a bootstrap over models, and how many heads it is about.",
        _table(tools, "all", list(summary["scores"])),
        NOTES.format(tools="\n".join(f"- *{name}*: {facts['source']}." for name, facts in tools.items())),
        "## By part",
        *(
            f"### {words[0].upper()}{words[1:]}\n\n{_table(tools, part, list(summary['scores']))}"
            for part, words in PARTS.items()
            if summary["n_heads"][part]
        ),
        "## Do rankings of heads find the circuit?",
        _render_causes(summary["causes"]),
        "## attnscope by rule",
        _render_rules(summary["rules"]),
        "## What attnscope gets wrong",
        _render_wrong(summary),
        HOW.format(minutes=summary["cpu_s"] / 60),
    ]
    return "\n\n".join(sections) + "\n"


INTRODUCTION = """\
What does a head do, and does the tool say so? On most models nobody knows. Here everybody does: each of the {total}
heads below was compiled, planted, trained on a known task, or published. The truth is written in the source of each
model, and compared with the model's own weights before any tool sees it.

{verdict} The heads come from four sources:

{counts}"""

SCORING = """\
A *rule* says which keys each query attends to. A tool *names* a rule if its keys are the rule's keys: on the queries
that the rule is about, the keys that both name must be 0.8 or more of those that either names. So the wording does not
matter."""

NOTES = """\
Each tool is asked only for rules that it has a name for. So the scores *first* and *named* of a tool with three names
are about few heads: compare the numbers of heads, too. The score *precise* is about every head that a tool describes.

Only attnscope predicts attention. For each other tool, we build the best prediction that its answer allows. The keys
that it names get the share of attention that they have on the texts it saw. All other keys divide the rest evenly. A
tool that says nothing predicts even attention.

{tools}

HeadVis (Transformer Circuits 2026) is not in the table. It is a tool to look at heads. Its metrics name no rule, and
we found no definition of them that could be computed here."""

HOW = """\
## How to run it

<!-- not run by the tests: it takes minutes, and needs benchmarks/ -->
```bash
python -m benchmarks.known --small                     # a few models of each part
python -m benchmarks.known --smollm2 path/to/smollm2   # everything; writes this page
```

The last run took {minutes:.0f} minutes of processor time.

The compiled programs and the trained decoders are kept as arrays beside the code.
`python -m benchmarks.known.compiled` compiles the programs anew (`pip install -e ".[known]"`), and asserts that the
arrays compute what Tracr's models do. `python -m benchmarks.known.grown` trains the decoders anew. Equal seeds give
equal results.

## How to enter another tool

A tool is a class with a name, a source and two methods (`benchmarks/known/tools.py`):

- `answer(known, attention)` gets a model, its texts and their attention. It returns an `Answer` per head. This holds
  what the tool names, as functions from a text to the keys. It also holds whether the tool says that it cannot
  describe the head, and the attention that it expects.
- `vocabulary(known)` lists everything that it has a name for.

Add it to `TOOLS` in `benchmarks/known/rivals.py` and run the benchmark. Rules, texts and scores stay the same."""


def _verdict(tools: Mapping[str, Any]) -> str:
    """What the run says of attnscope, in two sentences."""
    (name, facts), *_ = tools.items()
    first, silent = facts["all"]["first"], facts["all"]["silent"]
    return (
        f"{name} names the right rule first for {first['value']:.0%} of the {first['n']} heads whose rule it can name. "
        f"The other {silent['n']} heads follow rules that it has no name for. There it should stay silent, and does so "
        f"for only {silent['value']:.0%}."
    )


def _cell(score: Mapping[str, Any] | None) -> str:
    if score is None:
        return "–"
    return f"{score['value']:.2f} ({score['low']:.2f}–{score['high']:.2f}; {score['n']})"


def _table(tools: Mapping[str, Any], part: str, names: Sequence[str]) -> str:
    shown = [name for name in names if any(name in facts[part] for facts in tools.values())]
    rows = ["| tool | " + " | ".join(shown) + " |", "|---" * (len(shown) + 1) + "|"]
    for tool, facts in tools.items():
        rows.append(f"| {tool} | " + " | ".join(_cell(facts[part].get(name)) for name in shown) + " |")
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


def _render_rules(rules: Sequence[Mapping[str, Any]]) -> str:
    names = ("first", "named", "precise", "silent", "right_or_silent", "explained", "iou")
    rows = ["| rule | heads | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for row in rules:
        cells = ["–" if row.get(name) is None else f"{row[name]:.2f}" for name in names]
        rows.append(f"| {row['rule']} | {row['n']} | " + " | ".join(cells) + " |")
    dash = "A dash means that no head of the row counts for this score. Rows are sorted by *first*, then by heads."
    return "\n".join([*rows, "", dash])


def _render_wrong(summary: Mapping[str, Any]) -> str:
    wrong, ours = summary["wrong"], next(iter(summary["tools"].values()))["all"]
    said = [
        f"The lines of {wrong['n_missed']} heads begin with a wrong rule, although attnscope has a name for the right "
        f"one. The lines of {wrong['n_false']} other heads, whose rules it has no name for, neither say so nor predict "
        f"their attention. The table lists {len(wrong['examples'])} of the {wrong['n_missed'] + wrong['n_false']}. "
        "In its first column, *grown* means trained here. In its last column, `compiler_bos` is the first token of a "
        "compiled program. *! other half:* introduces the first term of the description that is fitted on the other "
        "half of the texts."
    ]
    leads = _behind(summary["tools"])
    if leads:
        said.append("attnscope does not lead on these scores:\n\n" + "\n".join(f"- {lead}" for lead in leads))
    bars = {"first": 0.95, "named": 0.95, "precise": 0.95, "silent": 0.9, "right_or_silent": 0.9}
    missed = [f"{name} {ours[name]['value']:.2f} (goal {bar:.2f})" for name, bar in bars.items()
              if name in ours and ours[name]["value"] < bar]  # fmt: skip
    if missed:
        said.append(f"It misses some of our goals: {', '.join(missed)}.")
    rows = ["| model | head | what it does | what attnscope says |", "|---|---|---|---|"]
    rows += [
        f"| {one['model']} | {one['head']} | {one['rule']} | {one['line'].replace('|', '¦')} |"
        for one in wrong["examples"]
    ]
    return "\n\n".join([*said, "\n".join(rows)])


def _behind(tools: Mapping[str, Any]) -> list[str]:
    """Scores on which a rival's mean is above attnscope's."""
    (ours, mine), *others = tools.items()
    made = []
    for name, score in mine["all"].items():
        ahead = [
            f"{tool} {facts['all'][name]['value']:.2f} (of {facts['all'][name]['n']} heads)"
            for tool, facts in others
            if name in facts["all"] and facts["all"][name]["value"] > score["value"]
        ]
        if ahead:
            made.append(f"*{name}*: {ours} {score['value']:.2f} (of {score['n']} heads); {', '.join(ahead)}")
    return made
