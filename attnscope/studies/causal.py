"""Do heads that look like something do something? Findings in, the same with what changes without each head out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from attnscope.corpus import Corpus, CorpusText
from attnscope.models.model import Model
from attnscope.records.findings import Findings
from attnscope.studies.ablation import AblateOptions, ablate
from attnscope.studies.heatmap import Choice
from attnscope.studies.texts import Report, texts_of

FIRST_TEXTS = 32
"""Texts that heads are taken out of: a forward pass each for every head and text takes its time."""

NOTHING_BELOW = {"kl": 0.001, "l2": 0.01}
"""What counts as no effect: a thousandth of a nat in the predictions, a hundredth of the hidden states."""

_WHAT = {"kl": "KL of the predictions (nats)", "l2": "relative change of the last hidden states"}


def with_effects(
    found: Findings,
    model: Model,
    texts: Corpus | Sequence[str] | Sequence[CorpusText],
    report: Report | None = None,
) -> Findings:
    """Takes each head that has a role out of the model, on the first texts, by zero and by mean ablation.

    A head that does nothing by either is not needed for what it looks like: attention is not evidence of use (Jain and
    Wallace 2019).

    Args:
        found: What heads attend to.
        model: Their model.
        texts: The texts they were studied on.
        report: Called after each batch.
    """
    labelled = tuple((head.layer, head.head) for head in found.heads if head.roles)
    if not labelled:
        return found
    first = list(islice(texts_of(texts), FIRST_TEXTS))
    ablation = ablate(model, first, AblateOptions(choice=Choice(pick=labelled)), report)
    effects = {(head.kind, head.layer, head.head): head.effects for head in ablation.heads}
    quantity = "kl" if ablation.whole else "l2"
    causal = {
        "quantity": quantity,
        "what": _WHAT[quantity],
        "nothing_below": NOTHING_BELOW[quantity],
        "modes": list(ablation.options["modes"]),
        "predicted": ablation.options["predicted"],
        "n_texts": ablation.corpus["n_texts"],
        "complete": ablation.corpus["complete"],
    }
    return replace(
        found,
        heads=tuple(replace(head, effects=effects.get((head.kind, head.layer, head.head), {})) for head in found.heads),
        options={**found.options, "causal": causal},
        corpus={**found.corpus, "complete": found.corpus["complete"] and ablation.corpus["complete"]},
    )
