"""Do heads that look like something do something, and do their lines? Findings in, the same with effects out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from attnscope.records.ablation import Ablation, TokenChange
from attnscope.records.atlas.record import Atlas
from attnscope.records.frame.completion import settle_corpus
from attnscope.records.heads.findings import Findings
from attnscope.studies.ablation.options import AblateOptions
from attnscope.studies.ablation.study import ablate
from attnscope.studies.describe.study import FAILURES
from attnscope.studies.inputs.choice import Choice
from attnscope.studies.inputs.texts import Report, scale_report
from attnscope.studies.running.passes import Reading

R = TypeVar("R", Findings, Atlas)

FIRST_TEXTS = 32
"""Texts that heads are taken out of: a forward pass each for every head and text takes its time."""

NOTHING_BELOW = {"kl": 0.001, "l2": 0.01}
"""What counts as no effect: a thousandth of a nat in the predictions, a hundredth of the hidden states."""

_WHAT = {"kl": "KL of the predictions (nats)", "l2": "relative change of the last hidden states"}


def with_effects(findings: R, reading: Reading, report: Report | None = None) -> R:
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
    model, first = reading.model, reading.first(FIRST_TEXTS)
    # Kind by kind: a layer and a head have a number of their own in each.
    options = [AblateOptions(choice=Choice(pick=tuple(pick)), kind=kind) for kind, pick in labelled.items()]
    ablations = [
        ablate(model, first, of_kind, scale_report(report, n, len(options))) for n, of_kind in enumerate(options)
    ]
    quantity = "kl" if ablations[0].whole else "l2"
    what = {"quantity": quantity, "what": _WHAT[quantity], "nothing_below": NOTHING_BELOW[quantity]}
    return _add(findings, ablations, "causal", what)


def with_lines(findings: R, reading: Reading, report: Report | None = None) -> R:
    """Replaces each head's weights by its line, its mean pattern and uniform attention: what changes, the causal share.

    Lines are fitted on half of the first texts, and used on the other half.
    """
    ablation = ablate(
        reading.model, reading.first(2 * FIRST_TEXTS), AblateOptions(modes=("line", "pattern", "uniform")), report
    )
    worst: dict[tuple[str, int, int], tuple[TokenChange, ...]] = {}
    for head in ablation.heads:
        tokens = [token for token in ablation.worst_tokens if token.heads == head.name]
        worst[head.kind, head.layer, head.head] = tuple(tokens[:FAILURES])
    added = _add(findings, [ablation], "replaced", {})
    heads = [replace(head, worst_tokens=worst.get((head.kind, head.layer, head.head), ())) for head in added.heads]
    return replace(added, heads=tuple(heads))


def _add(findings: R, ablations: Sequence[Ablation], name: str, facts: Mapping[str, Any]) -> R:
    """Findings with the effects of ablations; `name` is the option by which the record says how these were made."""
    ablation = ablations[0]
    effects = {(head.kind, head.layer, head.head): head.effects for each in ablations for head in each.heads}
    notes: list[str] = [note for each in ablations for note in each.run["notes"] if note not in findings.run["notes"]]
    complete = all(each.corpus["complete"] for each in ablations)
    how = {
        **facts,
        "modes": list(ablation.options["modes"]),
        "predicted": ablation.options["predicted"],
        "n_texts": ablation.corpus["n_texts"],
        "complete": complete,
    }
    quantities = {**findings.options.get("quantities", {}), **ablation.options["quantities"]}
    return replace(
        findings,
        heads=tuple(
            replace(head, effects={**head.effects, **effects.get((head.kind, head.layer, head.head), {})})
            for head in findings.heads
        ),
        options={**findings.options, name: how, "quantities": quantities},
        run={**findings.run, "notes": [*findings.run["notes"], *dict.fromkeys(notes)]},
        corpus=settle_corpus(findings.corpus, interrupted=not complete),
    )
