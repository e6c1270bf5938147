"""Test whether heads with a role matter to the model: ablate each, and add its effects to the findings.

`studies.ablate` runs the model. This module chooses heads and texts, and joins the tables.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np

from attnscope.choice import Choice
from attnscope.corpus import Copies, distinct
from attnscope.models.model import Model
from attnscope.questions.ablate import AblateOptions
from attnscope.questions.heads import Heads
from attnscope.results.result import settle_corpus
from attnscope.results.table import Table
from attnscope.studies.ablate.study import ablate
from attnscope.studies.inputs.texts import Report, Texts, scale_report

FIRST_TEXTS = 32
"""Texts that heads are taken out of: a forward pass each for every head and text takes its time."""

NOTHING_BELOW = {"kl": 0.001, "l2": 0.01}
"""Effects below this count as none: a thousandth of a nat in the predictions, a hundredth of the hidden states."""

_WHAT = {"kl": "KL of the predictions (nats)", "l2": "relative change of the last hidden states"}


def with_effects(findings: Heads, model: Model, texts: Texts, report: Report | None = None) -> Heads:
    """Ablate each head that has a role, on the first texts, and add the effects to the table of heads.

    Heads are ablated by zero and by their mean, one kind of attention after the other.

    If neither changes anything, the model does not need the head for what it looks like: attention is no evidence of
    use (Jain and Wallace 2019).

    Raises:
        AttnscopeError: The model cannot be ablated.
    """
    # Ablate the heads with a role on the first texts, kind by kind: a head has a number of its own in each.
    heads = findings.table("heads")
    has_role = heads.select(heads["role"] != "")
    first = list(islice(distinct(texts, Copies()), FIRST_TEXTS))
    kinds = list(dict.fromkeys(has_role["kind"].tolist()))
    ablations = []
    for number, kind in enumerate(kinds):
        chosen = has_role.select(has_role["kind"] == kind)
        pick = tuple(zip(chosen["layer"].tolist(), chosen["head"].tolist(), strict=True))
        options = AblateOptions(choice=Choice(pick=pick), kind=kind)
        ablations.append(ablate(model, first, options, scale_report(report, number, len(kinds))))
    if not ablations:
        return findings
    # Say how effects were measured: by the predictions if the model makes any, else by hidden states.
    ablation = ablations[0]
    quantity = "kl" if len(ablation.table("whole")) else "l2"
    complete = all(each.corpus["complete"] for each in ablations)
    how = {
        "quantity": quantity,
        "what": _WHAT[quantity],
        "nothing_below": NOTHING_BELOW[quantity],
        "modes": list(ablation.options["modes"]),
        "predicted": ablation.options["predicted"],
        "n_texts": ablation.corpus["n_texts"],
        "complete": complete,
    }
    # Effects become columns of the table of heads; they are NaN for heads that were not taken out.
    ablated = Table.stack([each.table("heads") for each in ablations])
    row_of = {head: row for row, head in enumerate(ablated.head_names(with_kind=True))}
    rows = np.array([row_of.get(head, -1) for head in heads.head_names(with_kind=True)])
    for name in ablated.numbers:
        parts = {part: np.where(rows < 0, np.nan, ablated.part(name, part)[rows]) for part in ("low", "high", "count")}
        heads = heads.with_column(ablated.columns[name], np.where(rows < 0, np.nan, ablated[name][rows]), **parts)
    notes = [note for each in ablations for note in each.run["notes"]]
    return replace(
        findings,
        tables={**findings.tables, "heads": heads},
        options={**findings.options, "causal": how, "quantities": list(ablation.quantities)},
        run={**findings.run, "notes": list(dict.fromkeys([*findings.run["notes"], *notes]))},
        corpus=settle_corpus(findings.corpus, interrupted=not complete),
    )
