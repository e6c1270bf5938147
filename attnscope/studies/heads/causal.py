"""Do heads that look like something do something? Findings in, the same with effects out."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from attnscope.choice import Choice
from attnscope.corpus import Copies, distinct
from attnscope.models.model import Model
from attnscope.questions.ablate import AblateOptions
from attnscope.records.ablation import Effect
from attnscope.records.heads.findings import Findings
from attnscope.results.completion import settle_corpus
from attnscope.results.table import Table
from attnscope.studies.ablate.study import ablate
from attnscope.studies.inputs.texts import Report, Texts, scale_report

FIRST_TEXTS = 32
"""Texts that heads are taken out of: a forward pass each for every head and text takes its time."""

NOTHING_BELOW = {"kl": 0.001, "l2": 0.01}
"""What counts as no effect: a thousandth of a nat in the predictions, a hundredth of the hidden states."""

_WHAT = {"kl": "KL of the predictions (nats)", "l2": "relative change of the last hidden states"}


def with_effects(findings: Findings, model: Model, texts: Texts, report: Report | None = None) -> Findings:
    """Takes each head that has a role out of the model, on the first texts, by zero and by mean ablation, kind by kind.

    If neither changes anything, the model does not need the head for what it looks like: attention is no evidence of
    use (Jain and Wallace 2019).
    """
    labelled: dict[str, list[tuple[int, int]]] = {}
    for head in findings.heads:
        if head.roles:
            labelled.setdefault(head.kind, []).append((head.layer, head.head))
    if not labelled:
        return findings
    first = list(islice(distinct(texts, Copies()), FIRST_TEXTS))
    # Kind by kind: a layer and a head have a number of their own in each.
    options = [AblateOptions(choice=Choice(pick=tuple(pick)), kind=kind) for kind, pick in labelled.items()]
    ablations = [
        ablate(model, first, of_kind, scale_report(report, n, len(options))) for n, of_kind in enumerate(options)
    ]
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
    effects = {head: values for each in ablations for head, values in _effects_by_head(each.table("heads")).items()}
    columns = ablation.table("heads").columns
    quantities = {name: {"what": columns[name].meaning, "unit": columns[name].unit} for name in ablation.quantities}
    heads = [replace(head, effects=effects.get((head.kind, head.layer, head.head), {})) for head in findings.heads]
    return replace(
        findings,
        heads=tuple(heads),
        options={**findings.options, "causal": how, "quantities": quantities},
        run={**findings.run, "notes": [*findings.run["notes"], *dict.fromkeys(notes)]},
        corpus=settle_corpus(findings.corpus, interrupted=not complete),
    )


def _effects_by_head(heads: Table) -> dict[tuple[str, int, int], dict[str, Effect]]:
    """Return the effects of each head by name."""
    effects: dict[tuple[str, int, int], dict[str, Effect]] = {}
    places = zip(*(heads[name].tolist() for name in ("kind", "layer", "head")), strict=True)
    for row, place in enumerate(places):
        effects[place] = {}
        for name in heads.numbers:
            value, low, high = heads.interval(name)[row].tolist()
            effects[place][name] = Effect(value, low, high, float(heads.part(name, "count")[row]))
    return effects
