"""Report the roles of heads and their evidence: marks, counts, and heads whose removal changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import amount
from attnscope.report.numbers import number
from attnscope.report.role_marks import Mark, marks_for
from attnscope.report.wording import label, printable
from attnscope.results.result import Result

_MOST_NAMED = 12
"""Heads that a sentence names; of more it says how many."""


def marks_of(result: Result) -> dict[str, Mark]:
    """Return a mark for each role that occurs in a result or its control, in a fixed order."""
    names = [*result.table("heads")["role"].tolist(), *result.table("control")["role"].tolist()]
    return marks_for({name for joined in names for name in joined.split("+")} - {""})


def first_role(result: Result) -> NDArray[np.int64]:
    """Return for each head the row of its first role, (head,); -1 = it has none."""
    owners = result.table("roles")["head"]
    first = np.full(len(result.table("heads")), -1)
    first[owners[::-1]] = np.arange(len(owners))[::-1]
    return first


def threshold_text(result: Result, role: str) -> str:
    """Return what a role's measure had to exceed, from the lowest to the highest: of `diffuse` it depends on texts."""
    roles = result.table("roles")
    thresholds = roles["threshold"][roles["role"] == role]
    if not thresholds.size:
        return ""
    return " to ".join(dict.fromkeys(number(end) for end in (thresholds.min(), thresholds.max())))


def role_notes(result: Result) -> list[str]:
    """Return what a reader of roles must know beside them: one sentence each."""
    return [line for line in (idle_line(result), evidence_line(result), control_line(result)) if line]


def control_line(result: Result) -> str:
    """Say how many heads of a model with random weights have roles; empty = none was studied."""
    roles = result.table("control")["role"].tolist()
    if not roles:
        return ""
    counts = Counter(name for joined in roles for name in joined.split("+"))
    n_none = counts.pop("", 0)
    said = [f"{n} {label(name)}" for name, n in counts.most_common()]
    said += [f"{n_none} unclassified"] if n_none else []
    return f"untrained control (random weights, same texts), {amount(len(roles), 'head')}: {', '.join(said)}"


def evidence_line(result: Result) -> str:
    """Say what few texts mean for roles; empty where there are enough, or the result does not say how many."""
    fewest, least = (result.options.get(name) for name in ("fewest_texts", "least_texts"))
    effective = result.corpus.get("effective_texts")
    # The effective number of texts, by Kish: unequal lengths count for less.
    weight = ""
    if isinstance(effective, int | float) and len(result.table("heads")):
        if result.corpus.get("n_texts") != 1:
            weight = f"; all together weigh as much as {effective:.1f} texts of one length"
        # Too few texts for any role.
        if isinstance(least, int) and effective < least:
            return (
                f"no role can be given below {least} texts{weight}: give more texts, or cut long ones into chunks that "
                "count apart (--chunk 512)"
            )
    # Enough texts for tentative roles only.
    if not result.table("roles")["tentative"].any():
        return ""
    return f"tentative (small letter): a role on the evidence of {least} to {fewest} texts of one length{weight}"


def idle_rows(result: Result) -> NDArray[np.bool_]:
    """Return which heads were taken out (`heads --causal`) and make no difference by any ablation, (head,).

    That is so where the upper end of each effect's interval (its value, where a text alone gives none) is below what
    `options["causal"]` calls nothing.
    """
    heads = result.table("heads")
    causal = result.options["causal"]
    tops = []
    for mode in causal["modes"]:
        effect = f"{mode}_{causal['quantity']}"
        high = heads.part(effect, "high")
        tops.append(np.where(np.isfinite(high), high, heads[effect]))
    is_idle: NDArray[np.bool_] = np.max(tops, 0) < causal["nothing_below"]
    return is_idle


def idle_line(result: Result) -> str:
    """Say which heads look like something and do nothing; empty where none was taken out (`heads --causal`)."""
    causal = result.options.get("causal")
    heads = result.table("heads")
    if not isinstance(causal, Mapping) or not len(heads):
        return ""
    # Heads with a role whose effect was measured.
    effect = heads[f"{causal['modes'][0]}_{causal['quantity']}"]
    is_tried = (heads["role"] != "") & np.isfinite(effect)
    if not is_tried.any():
        return ""
    what = f"{printable(causal.get('what', 'effect'))} below {causal['nothing_below']:g}"
    # Those whose effect is too small to matter.
    idle = np.flatnonzero(is_tried & idle_rows(result)).tolist()
    if not idle:
        return f"{amount(int(is_tried.sum()), 'head')} with a role, and each does something: none has {what}"
    firsts = [label(role.partition("+")[0]) for role in heads["role"].tolist()]
    named = ", ".join(f"{result.head_names[row]} ({firsts[row]})" for row in idle[:_MOST_NAMED])
    more = f" and {len(idle) - _MOST_NAMED} more" if len(idle) > _MOST_NAMED else ""
    return f"look like something and do nothing ({what}): {named}{more}"
