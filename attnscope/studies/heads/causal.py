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

_PARTS = ("low", "high", "count")

_WHAT = {"kl": "KL of the predictions (nats)", "l2": "relative change of the last hidden states"}


def with_effects(findings: Heads, model: Model, texts: Texts, report: Report | None = None) -> Heads:
    """Ablate each head that has a role, on the first texts, and add the effects to the table of heads.

    Heads are ablated by zero and by their mean, one kind of attention after the other.

    If neither changes anything, the model does not need the head for what it looks like: attention is no evidence of
    use (Jain and Wallace 2019).

    Raises:
        AttnscopeError: The model cannot be ablated.
    """
    # Heads with a role, by kind of attention.
    heads = findings.table("heads")
    labelled: dict[str, list[tuple[int, int]]] = {}
    has_role = heads.select(heads["role"] != "")
    for kind, layer, head in zip(*(has_role[name].tolist() for name in ("kind", "layer", "head")), strict=True):
        labelled.setdefault(kind, []).append((layer, head))
    if not labelled:
        return findings
    # Ablate them on the first texts.
    first = list(islice(distinct(texts, Copies()), FIRST_TEXTS))
    # Kind by kind: a layer and a head have a number of their own in each.
    options = [AblateOptions(choice=Choice(pick=tuple(pick)), kind=kind) for kind, pick in labelled.items()]
    ablations = [
        ablate(model, first, of_kind, scale_report(report, n, len(options))) for n, of_kind in enumerate(options)
    ]
    # Say how effects were measured: by the predictions if the model makes any, else by hidden states.
    ablation = ablations[0]
    quantity = "kl" if len(ablation.table("whole")) else "l2"
    notes: list[str] = [note for each in ablations for note in each.run["notes"] if note not in findings.run["notes"]]
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
    # Effects become columns of the table of heads.
    ablated = Table.stack([each.table("heads") for each in ablations])
    for name in ablated.numbers:
        heads = _with_effect(heads, ablated, name)
    return replace(
        findings,
        tables={**findings.tables, "heads": heads},
        options={**findings.options, "causal": how, "quantities": list(ablation.quantities)},
        run={**findings.run, "notes": [*findings.run["notes"], *dict.fromkeys(notes)]},
        corpus=settle_corpus(findings.corpus, interrupted=not complete),
    )


def _with_effect(heads: Table, ablated: Table, name: str) -> Table:
    """Return a table of heads with an effect, which is NaN for those that were not taken out."""
    # The row of each head in the ablations; -1 = it was not taken out.
    names = ablated.head_names(with_kind=True)
    row_of = {head: row for row, head in enumerate(names)}
    rows = np.array([row_of.get(head, -1) for head in heads.head_names(with_kind=True)])
    values = {
        part: np.where(rows < 0, np.nan, numbers[rows])
        for part, numbers in (("", ablated[name]), *((part, ablated.part(name, part)) for part in _PARTS))
    }
    return heads.with_column(ablated.columns[name], values.pop(""), **values)
