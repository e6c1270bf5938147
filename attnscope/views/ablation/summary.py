"""What every view of an ablation says: labels of quantities, numbers, lines on what was done. Plain values."""

from __future__ import annotations

from attnscope.records.ablation import Ablation, Effect, label_of_quantity
from attnscope.report.numbers import UNDEFINED, interval_of, small_number
from attnscope.report.wording import corpus_notes, printable

_SHORT = {"l2": "Δ hidden", "loss": "Δ loss", "kl": "KL", "importance": "|dL/dξ|", "sensitivity": "sensitivity",
          "effect": "effect", "share": "share of total",
          "attribution": "by attribution", "faithfulness": "faithfulness"}  # fmt: skip


def label(name: str) -> str:
    """A quantity's name as people read it, such as "zero ablation: rise of the loss"."""
    return printable(label_of_quantity(name))


def short_label(name: str) -> str:
    """The same in a few letters, such as "zero Δ loss"."""
    mode, _, rest = name.partition("_")
    if name in _SHORT or not rest:
        return _SHORT.get(name, printable(name))
    return f"{printable(mode)} {_SHORT.get(rest, printable(rest))}"


PLACE_LABELS = {
    "first": "first occurrences",
    "repeated": "repeated tokens",
    "first_half": "first half",
    "second_half": "second half",
}
"""Where in a text a loss is told apart, as people read it."""


def interval(effect: Effect) -> str:
    """Such as [0.012, 0.034]; `–` where it is undefined."""
    return interval_of(effect, small_number)


def predicted_line(ablation: Ablation) -> str:
    """What is predicted and how well, such as "predicted: each next token; loss of the whole model 3.20 nats"."""
    predicted = ablation.options.get("predicted")
    if not predicted:
        return ""
    loss = ablation.whole.get("loss")
    if loss is None:
        return f"predicted: {printable(predicted)}"
    ends = f" {interval(loss)}" if interval(loss) != UNDEFINED else ""  # a single text has none
    return f"predicted: {printable(predicted)}; loss of the whole model {small_number(loss.value)} nats{ends}"


def notes(ablation: Ablation) -> list[str]:
    """What a reader must know: one sentence each."""
    conditions = {
        "late layers are closer to the last hidden states: compare heads of one layer first": any(
            name.endswith("_l2") for name in ablation.names
        ),
        "mean ablation: the mean of a head's outputs over all real tokens of all texts takes their place": "mean"
        in (ablation.options.get("modes") or ()),
        "sensitivity: there is no loss, so it is mean |d⟨u, h⟩/dξ| over random directions u of the hidden states: "
        "how far they move, not whether it matters": "sensitivity" in ablation.names,
        "importances are divided by the Euclidean norm of those of their layer": ablation.options.get("normalized")
        == "layer",
        "one text gives no interval": ablation.corpus.get("n_texts") == 1,
    }
    return [note for note, holds in conditions.items() if holds] + corpus_notes(ablation)
