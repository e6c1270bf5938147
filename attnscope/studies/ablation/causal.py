"""Do heads that look like something do something, and do their lines? Findings in, the same with effects out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from attnscope.records.ablation import Ablation, TokenChange
from attnscope.records.atlas.record import Atlas
from attnscope.records.frame.shards import settle_corpus
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


def with_effects(found: R, reading: Reading, report: Report | None = None) -> R:
    """Takes each head that has a role out of the model, on the first texts, by zero and by mean ablation, kind by kind.

    A head that does nothing by either is not needed for what it looks like: attention is not evidence of use (Jain and
    Wallace 2019).

    Args:
        found: What heads attend to.
        reading: Their model, and the texts they were studied on.
        report: Called after each batch.
    """
    labelled: dict[str, list[tuple[int, int]]] = {}
    for head in found.heads:
        if head.roles:
            labelled.setdefault(head.kind, []).append((head.layer, head.head))
    if not labelled:
        return found
    model, first = reading.model, reading.first(FIRST_TEXTS)
    # Kind by kind: a layer and a head have a number of their own in each.
    options = [AblateOptions(choice=Choice(pick=tuple(pick)), kind=kind) for kind, pick in labelled.items()]
    ablations = [ablate(model, first, of, scale_report(report, n, len(options))) for n, of in enumerate(options)]
    quantity = "kl" if ablations[0].whole else "l2"
    what = {"quantity": quantity, "what": _WHAT[quantity], "nothing_below": NOTHING_BELOW[quantity]}
    return _add(found, ablations, "causal", what)


def with_lines(found: R, reading: Reading, report: Report | None = None) -> R:
    """Puts the line of each head in its place, its mean pattern, and uniform attention: what changes, the causal share.

    Lines are fitted on half of the first texts, and take the place of weights on the other half.

    Args:
        found: What heads attend to.
        reading: Their model, and the texts they were studied on.
        report: Called after each batch.

    Raises:
        AttnscopeError: The model has several kinds of attention, or there are too few texts.
    """
    ablation = ablate(
        reading.model, reading.first(2 * FIRST_TEXTS), AblateOptions(modes=("line", "pattern", "uniform")), report
    )
    worst: dict[tuple[str, int, int], tuple[TokenChange, ...]] = {}
    for head in ablation.heads:
        mine = [token for token in ablation.worst_tokens if token.heads == head.name]
        worst[head.kind, head.layer, head.head] = tuple(mine[:FAILURES])
    made = _add(found, [ablation], "replaced", {})
    heads = [replace(head, worst_tokens=worst.get((head.kind, head.layer, head.head), ())) for head in made.heads]
    return replace(made, heads=tuple(heads))


def _add(found: R, ablations: Sequence[Ablation], name: str, facts: Mapping[str, Any]) -> R:
    """Findings with the effects of ablations, and how these were made by the name of an option."""
    ablation = ablations[0]
    effects = {(head.kind, head.layer, head.head): head.effects for one in ablations for head in one.heads}
    notes: list[str] = [note for one in ablations for note in one.run["notes"] if note not in found.run["notes"]]
    complete = all(one.corpus["complete"] for one in ablations)
    made = {
        **facts,
        "modes": list(ablation.options["modes"]),
        "predicted": ablation.options["predicted"],
        "n_texts": ablation.corpus["n_texts"],
        "complete": complete,
    }
    quantities = {**found.options.get("quantities", {}), **ablation.options["quantities"]}
    return replace(
        found,
        heads=tuple(
            replace(head, effects={**head.effects, **effects.get((head.kind, head.layer, head.head), {})})
            for head in found.heads
        ),
        options={**found.options, name: made, "quantities": quantities},
        run={**found.run, "notes": [*found.run["notes"], *dict.fromkeys(notes)]},
        corpus=settle_corpus(found.corpus, interrupted=not complete),
    )
