"""The pages that the program itself is the source of: `python -m docs.generate` writes them anew.

`tables.md` has the tables of each result. `measures.md` is the catalogue of measures, the rules of roles and the
glossary. `architectures.md` is what `python -m tests.hf_tally --json docs/architectures.json` found, and
`known-answers.md` what `python -m benchmarks.known` found. A test fails if a page is not what this would write.
"""

import importlib
import inspect
import json
import math
import os
import pkgutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope import questions
from attnscope.results.result import Result

if TYPE_CHECKING:
    from attnscope.core.catalogue import Measure

FOLDER = Path(__file__).resolve().parent
_MADE = "<!-- Made by `python -m docs.generate`; do not edit. -->"

_ABOUT_MEASURES = """
This page defines what `attnscope heads` measures and how a measure becomes a role. The definitions come first, then
[how a value and its interval are computed](#how-a-value-comes-about), then [the roles](#the-N_ROLES-roles).

In the formulas, `A_qk` is the weight that query q gives to key k. A row of A sums to 1. It sums to less if the
model has a *learned sink*: a logit in the softmax that belongs to no key, as in gpt-oss. `x_k` is the token at k,
`n_q` the number of keys that the mask lets q attend to, `e_k` the static embedding of the token, normalised to length
1. Logarithms are natural.
"""

_ABOUT_VALUES = """
## How a value comes about

Every measure is a sum and a count. A value over a corpus is

```text
value = (sum over texts and queries q of the formula) / (queries that count)
```

The sum and the count of a text are divided by its number of queries ([why texts](heads.md#why-texts-weigh-the-same)).
So all texts weigh the same in a measure that counts every query. In a measure that counts some queries, a text weighs
by its share of them. `same_token` and `induction` count about an eighth of the queries of web text, but all queries of
a text such as "______". One such text weighs as much as eight others. A note says if one text carries more than a third
of the sum that a role rests on.

The same command gives the same numbers. The same texts in other files or another order may differ in the 15th digit.

A query does not count if it is padding, if it may attend to nothing, or if the measure makes no sense for it. The
first token has no previous token, and the mass on punctuation is undefined for a query that may attend to none. Under
a sliding window, `first_token` and `previous_token` count only the queries that may see that key.

`NAME_active` is the measure excluding sinks, which are special tokens and the first one. It is the sum over the other
keys, divided by all the mass that is on them. What a learned sink takes counts as neither.

## Intervals

Each measure has a 95% interval. It is Student's t over texts, with the linearised variance of a ratio. It has m - 1
degrees of freedom. m is the *effective number of texts*, (sum of counts)² / (sum of counts²) over texts. Texts are
taken as independent, and tokens of a text are not. Each chunk of a long text, and each block of 512 queries of one
that is not cut, is a text here.

Measures from 0 to 1 have Wilson's interval for a share r, with continuity correction (Newcombe 1998) and Student's
quantile. Its sample size is the number of independent queries that would have the same variance (Korn & Graubard 1998).
With few texts, it has a minimum width:

```text
low end    at most   r · 0.025^(1/N)
high end   at least  1 - (1 - r) · 0.025^(1/N)
N = 1 / (ρ/m + (1 - ρ) / (sum of counts)),   ρ = RHO
```

ρ is the assumed intraclass correlation of queries within a text. The rule for the high end applies to all shares except
means such as `relative_entropy`. For these, and for measures that are not shares, intervals allow for texts that the
sample lacks. They assume that a share 1 - 0.025^(1/N) of all texts may have the value 0, or the value of uniform
attention ([heads](heads.md#what-counts-as-evidence)); for `similar_token`, SIMILAR or -SIMILAR.

The high ends of `same_token` and `induction` assume that a share u = 1 - 0.1^(1/n) of all texts, n the number of texts,
repeats one token again and again. All queries count there, and all of their attention may go to the same token:

```text
high end   at least  1 - (1 - r) (1 - w),   w = u / (u + (1 - u) f)
```

## The baseline

Each value stands beside that of *uniform attention*: the same weight on each key that the mask allows. For
`NAME_active`, uniform attention is over the keys that are not sinks. Their total weight is the one that they have in
the head. So a head that spreads this weight evenly has exactly that value.
"""

_ABOUT_ROLES = """
A head gets a role if its measure, or its `_active` measure, is above a limit. The `_active` measure counts only if
its queries give at least {min_active:.0%} of their attention to keys other than special tokens and the first. So
an induction head may rest nearly always, but not where there is something to repeat.

```text
limit = max(threshold, baseline + max({margin} (1 - baseline), {least_margin}))
```

The *baseline* is the value under uniform attention. For `same_token` and `induction`, it is the larger of this value
and what the best fixed offset reaches (up to {reach} tokens either way). For `similar_token`, it is the larger of this
value and the mass on the same token.

A one-sided test over texts must reject that the value is at most the limit. The interval is made from the same test.
A role's tests (of its measures, whole and active) are combined by Simes's method (1986). The false discovery rate
over all heads x roles is held at {level:.0%} (Benjamini & Hochberg 1995).

If the [effective number of texts](#intervals) is below {least}, there is no role. If it is below {fewest}, the role is
*tentative*. A head without a role is unclassified.

The thresholds are conventions: `--threshold induction=0.3` sets another. {uniform}"""

_REFERENCES = """
## References

- Benjamini & Hochberg 1995, Controlling the False Discovery Rate, *JRSS B* 57.
- Clark, Khandelwal, Levy & Manning 2019, What Does BERT Look At? An Analysis of BERT's Attention, *BlackboxNLP*.
- Elhage et al. 2021, A Mathematical Framework for Transformer Circuits, *Transformer Circuits Thread*.
- Gu et al. 2024, When Attention Sink Emerges in Language Models: An Empirical View, arXiv 2410.10781 (*ICLR* 2025).
- Kobayashi, Kuribayashi, Yokoi & Inui 2020, Attention is Not Only a Weight: Analyzing Transformers with Vector Norms,
  *EMNLP*.
- Korn & Graubard 1998, Confidence Intervals for Proportions With Small Expected Number of Positive Counts, *Survey
  Methodology* 24.
- Kovaleva, Romanov, Rogers & Rumshisky 2019, Revealing the Dark Secrets of BERT, *EMNLP*.
- Newcombe 1998, Two-sided Confidence Intervals for the Single Proportion, *Statistics in Medicine* 17.
- Olsson et al. 2022, In-context Learning and Induction Heads, *Transformer Circuits Thread*.
- Simes 1986, An Improved Bonferroni Procedure for Multiple Tests of Significance, *Biometrika* 73.
- Vig & Belinkov 2019, Analyzing the Structure of Attention in a Transformer Language Model, *BlackboxNLP*.
- Sun, Chen, Kolter & Liu 2024, Massive Activations in Large Language Models, *COLM*.
- Voita, Talbot, Moiseev, Sennrich & Titov 2019, Analyzing Multi-Head Self-Attention: Specialized Heads Do the Heavy
  Lifting, the Rest Can Be Pruned, *ACL*.
- Xiao, Tian, Chen, Han & Lewis 2024, Efficient Streaming Language Models with Attention Sinks, *ICLR*.

"Ours" is a definition for which we know no earlier publication in this form.
"""


def _range(low: float, high: float) -> str:
    if math.isinf(low):
        return "any number"
    return f"{low:g} or more" if math.isinf(high) else f"{low:g} to {high:g}"


def _about_others() -> list[str]:
    """Return the measures of pictures and recordings, as a table."""
    from attnscope.core.catalogue import PICTURE_MEASURES, SOUND_MEASURES

    about = (
        "`heads --image` and `heads --audio` have measures of their own. In pictures q runs over the patches, and a_q "
        "is the sum of A_qk over patches k. In recordings a_q is the sum over frames k with sound, and t_q the mean "
        "time of these frames, weighted by A_qk. There are no roles."
    )
    rows = [
        "| of | measure | a large value says: the head | definition | unit |",
        "|---|---|---|---|---|",
    ]
    for name, catalogue in (("pictures", PICTURE_MEASURES), ("recordings", SOUND_MEASURES)):
        for one in catalogue.values():
            rows.append(
                f"| {name} | `{one.name}` | {one.what} | {one.formula} ({one.source}) | {one.unit} |"
            )
    return ["## Pictures and recordings", about, "\n".join(rows)]


def _about(measure: "Measure") -> list[str]:
    """A measure of a catalogue, as paragraphs."""
    from attnscope.core.catalogue import PairMeasure

    facts = [f"unit: {measure.unit}", f"range: {_range(measure.low, measure.high)}"]
    facts += [f"source: {measure.source}"]
    facts += [f"also `{measure.name}_active`"] if measure.has_active else []
    facts += ["undefined in cross attention"] if isinstance(measure.family, PairMeasure) else []
    return [
        f"### {measure.name}",
        f"A large value says: the head {measure.what}.",
        f"```text\n{measure.formula}\n```",
        "; ".join(facts) + ".",
    ]


def measures_page() -> str:
    """The catalogue of measures and the rules of roles, as a page."""
    from attnscope.core.catalogue import MEASURES
    from attnscope.core.intervals import DEPENDENCE
    from attnscope.studies.heads import measure_intervals, measuring, roles

    parts = [
        "# Measures and roles",
        _MADE,
        _ABOUT_MEASURES.strip().replace("N_ROLES", str(len(roles.RULES))),
        f"## The {len(MEASURES)} measures",
        f"{sum(one.has_active for one in MEASURES.values())} of them are measured excluding sinks too (`NAME_active`).",
    ]
    for measure in MEASURES.values():
        parts += _about(measure)
    parts.append(
        "Notes:\n\n"
        "- `relative_entropy` is an entropy divided by its maximum, not a Kullback-Leibler divergence.\n"
        "- `similar_token` is compared with attention that is uniform over the same keys and has the same mass. So a "
        "learned sink makes it neither larger nor smaller.\n"
        "- Tokens that are equally rare share what `rarest_token` counts.\n"
        "- The tokens of `outlier_token` are found anew in each text and layer. The measure is undefined in cross "
        "attention, in texts without such a token, and if the hidden states that a layer reads cannot be seen."
    )
    about_values = _ABOUT_VALUES.strip().replace("RHO", f"{DEPENDENCE:g}")
    parts.append(about_values.replace("SIMILAR", f"{measure_intervals.MAX_UNSEEN_SIMILARITY:g}"))
    without = [name for name, rule in roles.RULES.items() if not rule.must_beat_uniform]
    about = _ABOUT_ROLES.format(
        min_active=measure_intervals.MIN_ACTIVE_SHARE,
        margin=roles.MARGIN,
        least_margin=roles.MIN_MARGIN,
        reach=measuring.OFFSETS[-1],
        fewest=roles.MIN_FIRM_TEXTS,
        least=roles.MIN_TESTED_TEXTS,
        level=roles.LEVEL,
        uniform=" and ".join(f"`{name}`" for name in without)
        + " has no baseline: uniform attention is what it names.",
    )
    rows = [
        "| role | what the head does | measure | threshold | also required |",
        "|---|---|---|---:|---|",
    ]
    for name, rule in roles.RULES.items():
        besides = []
        if rule.min_defined:
            besides.append(f"the measure is defined for {rule.min_defined:.0%} of the queries")
        if rule.excludes_diffuse:
            besides.append("`relative_entropy` is at most the limit of `diffuse`")
        if rule.rescales_threshold:
            besides.append(
                f"the threshold is that of a text of {roles.REFERENCE_KEYS:,} keys; with n keys it is "
                f"1 - {(1 - rule.threshold) * math.log(roles.REFERENCE_KEYS):.2f} / ln n, from "
                f"{roles.MIN_RESCALED_KEYS} keys on"
            )
        measures = " or ".join(f"`{measure}`" for measure in rule.measures)
        rows.append(
            f"| `{name}` | {rule.what} | {measures} | {rule.threshold:g} | {'; '.join(besides)} |"
        )
    parts += [f"## The {len(roles.RULES)} roles", about.strip(), "\n".join(rows)]
    parts += [
        *_about_others(),
        (FOLDER / "glossary.txt").read_text("utf-8").strip(),
        _REFERENCES.strip(),
    ]
    return "\n\n".join(parts) + "\n"


_ABOUT_TYPES = """
Can attnscope show your type of model? We tried {n} of the {known} model types that AutoModel of transformers
{version} knows. {exact} are shown exactly, and none wrongly. Search this page for the `model_type` in your
`config.json`.

`python -m tests.hf_tally --json docs/architectures.json` found this. It built each type with strong random weights,
from a configuration shrunk to two or three layers, four heads and windows of four tokens. It compared each model with
a copy that uses transformers' own eager attention, on texts of 7, 37 and {long:,} tokens, alone and padded together.
Models that read no text got random pictures or sound.

*Exact* means that the hidden states (relative to the largest) and every weight are within {allowed:g}. With these
weights scores reach a hundred, so that is rounding. If a model gives out no eager weights, only its hidden states are
compared.

A type in the list does not vouch for each of its checkpoints. When you load a model, attnscope compares that very model
([models](models.md)).
"""

_REASONS = (
    ("beside a picture", "read words beside a picture alone: pass one with `--image`"),
    ("does not run on", "refused: its own code does not run on the inputs that attnscope makes up"),
    ("cannot make up", "refused: attnscope cannot make up its inputs"),
    ("decoder that reads no text", "refused: its decoder reads no text"),
    ("returns no hidden states", "refused: it gives out no hidden states"),
    ("holds no hidden states", "refused: it gives out no hidden states"),
    (
        "attention interface",
        "refused: its attention bypasses transformers' interface, and its output does not show it",
    ),
    ("cannot be shown truly", "refused: an attention of another kind"),
    ("ImportError", "not built: it needs a library that was not installed"),
    ("not tiny", "not built: it cannot be shrunk"),
    ("takes more than", "not built: it takes more than two minutes or too much memory"),
    ("ends its process", "not built: it takes more than two minutes or too much memory"),
    ("does not build", "not built from its default configuration, shrunk"),
)
"""What the reason of a refusal contains, and how the page sums it up; the first that fits counts."""


def _group_of(verdict: dict[str, Any]) -> str:
    """Return the row of the table that a verdict of tests.hf_tally is listed in."""
    if verdict["verdict"] == "exact":
        if "text" not in verdict["reads"]:
            return f"exact on {verdict['reads']}"
        if verdict["why"]:
            return "exact on shorter texts, longer ones refused"
        road = "through the seam" if verdict["road"] == "seam" else "by its own eager attention"
        return f"exact on text, {road}"
    if verdict["verdict"] == "no attention":
        return "no attention"
    if verdict["verdict"] == "wrong":
        return "shown wrongly"
    return next(
        (reason for sign, reason in _REASONS if sign in verdict["why"]), "refused: other reasons"
    )


_OWN_INPUTS = """attnscope cannot make up what these types read, or tell their attentions apart. They run when you
[make their inputs](models.md#your-own-inputs): {types}. Each has a tiny random model among the tests."""


def architectures_page() -> str:
    """Return what became of every model type of transformers, as a page."""
    from attnscope.models.hf.senses.cross_readers import CROSS_READERS
    from attnscope.models.hf.senses.patch_places import FAMILIES
    from tests.input_cases import CASES

    tally = json.loads((FOLDER / "architectures.json").read_text("utf-8"))
    groups: dict[str, list[str]] = {}
    for name in sorted(tally["types"]):
        groups.setdefault(_group_of(tally["types"][name]), []).append(name)
    exact = sum(len(names) for group, names in groups.items() if group.startswith("exact"))
    numbers = {key: tally[key] for key in ("known", "long", "allowed")}
    about = _ABOUT_TYPES.format(
        n=len(tally["types"]), version=tally["transformers"], exact=exact, **numbers
    )
    rows = ["| result | number | model types |", "|---|---:|---|"]
    rows += [
        f"| {group} | {len(groups[group])} | {', '.join(groups[group])} |" for group in sorted(groups)
    ]
    parts = [
        "# Model types of transformers",
        _MADE,
        about.strip(),
        "\n".join(rows),
        "## With pictures",
        "`--image` with a text shows where words look in a picture ([pictures and sound](pictures-and-sound.md)). "
        f"Words attend to patches among the tokens in {', '.join(sorted(FAMILIES))}. Words or learned queries attend "
        f"to a picture by cross-attention in {', '.join(sorted(CROSS_READERS))}.",
        "## With your own inputs",
        _OWN_INPUTS.format(types=", ".join(sorted(CASES))),
    ]
    return "\n\n".join(parts) + "\n"


def known_answers_page() -> str:
    """What tools say of heads that are known."""
    from benchmarks.known.page import render

    return render(json.loads((FOLDER / "known-answers.json").read_text("utf-8")))


_ABOUT_TABLES = """
Each question declares the tables and arrays of its result. Files, the terminal, figures and pages read them ([file
formats](formats.md)). A number may come with its 95% interval in `NAME_low` and `NAME_high`, its value under uniform
attention in `NAME_baseline`, and its number of queries or texts in `NAME_count`. Tables and arrays of one kind of
attention, one text or one measure have it after a colon. Each table `heads` begins with `kind`, `layer` and `head`.
Below, units stand in brackets, and the axes of an array before its meaning.
"""


def tables_page() -> str:
    """Return the tables and arrays of each question's result, by their declarations."""
    sections = ["# What results hold", _MADE, _ABOUT_TABLES.strip()]
    first: dict[tuple[str, str], str] = {}
    for module in pkgutil.iter_modules(questions.__path__, "attnscope.questions."):
        for result in vars(importlib.import_module(module.name)).values():
            is_own = (
                isinstance(result, type)
                and issubclass(result, Result)
                and result.__module__ == module.name
            )
            is_own = is_own and hasattr(result, "SCHEMA")
            if is_own:
                sections += _describe_result(result, first)
    return "\n\n".join(sections) + "\n"


def _describe_result(result: "type[Result]", first: dict[tuple[str, str], str]) -> list[str]:
    """Return the section of a result; `first` has the table in which each column was described, and grows."""
    name = result.SCHEMA.partition("/")[0].removeprefix("attnscope.")
    lines: list[str] = []
    for table, columns in result.TABLES.items():
        lines.append(table)
        again: dict[str, list[str]] = {}
        for column in columns:
            meaning = column.meaning or column.title
            origin = first.setdefault((column.name, meaning), f"{name} {table}")
            if origin == f"{name} {table}":
                lines += _entry(column.name, meaning, column.unit)
            elif origin != "ablate heads":
                again.setdefault(origin, []).append(column.name)
        for origin, names in again.items():
            lines += _entry(", ".join(names), f"see {origin}", "")
    if result.ARRAYS:
        lines.append("arrays")
    for array in result.ARRAYS:
        axes = "×".join(array.axes)
        lines += _entry(
            array.name, ": ".join(filter(None, (axes, array.meaning or array.title))), array.unit
        )
    # A class says "Hold the effect of …", the page what is in the file: "The effect of …".
    about = inspect.cleandoc(result.__doc__ or "").partition("\n\n")[0].removeprefix("Hold ")
    about = about[:1].upper() + about[1:]
    body = "\n".join(lines)
    return [f"## {name}", f"`{result.SCHEMA}`: {about}"] + ([f"```text\n{body}\n```"] if lines else [])


def _entry(name: str, meaning: str, unit: str) -> list[str]:
    """Return the lines of a column or an array: its name, then its meaning, wrapped."""
    told = f"  {name:20} {meaning}" + (f" [{unit}]" if unit else "")
    return textwrap.wrap(
        told, 110, subsequent_indent=" " * 23, break_long_words=False, drop_whitespace=True
    )


PAGES: dict[str, Callable[[], str]] = {
    "tables.md": tables_page,
    "measures.md": measures_page,
    "architectures.md": architectures_page,
    "known-answers.md": known_answers_page,
}
"""The pages, and what makes each."""


def main() -> None:
    """Writes the pages, and prints their paths."""
    for name, made in PAGES.items():
        path = FOLDER / name
        path.write_text(made(), "utf-8")
        print(os.path.relpath(path))


if __name__ == "__main__":
    main()
