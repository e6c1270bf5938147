"""Declare the result of an ablation, what changes without a head: its columns and its report."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from attnscope.choice import Choice
from attnscope.errors import UsageError, amount
from attnscope.options import group, kind_option, option, options, read_names, seed_option, target_option
from attnscope.report.blocks import Block, HeadMap, Ranking, Report, rank_heads
from attnscope.report.numbers import UNDEFINED, digits, interval, largest_first, small_number
from attnscope.report.wording import corpus_line, printable, report_on
from attnscope.results.result import Result
from attnscope.results.table import HEADS, Column, Floats, number, text

_INSTEAD = {
    "zero": "without the head",
    "mean": "with the mean of its outputs in the head's place",
    "resample": "with its outputs on other texts in the head's place",
}
"""What is put in the place of a head, by the mode of ablation."""

_LATE = (
    "Δ hidden: L2 norm of the change by that of the hidden state, with its interval over texts; late layers are closer "
    "to the last hidden states: compare heads of one layer first"
)

SPREAD = "_spread"
"""What the column ends with that has the standard deviation over the texts whose outputs take a head's place."""

FEW = 3
"""Heads that are listed, and need no map."""


Mode = Literal["zero", "mean", "resample"]
MODES: tuple[Mode, ...] = ("zero", "mean", "resample")
"""What takes the place of a head's output: nothing, the mean of its outputs over all tokens, or outputs elsewhere."""


def _modes(listed: str) -> tuple[Mode, ...]:
    names = read_names(listed, (*MODES, "none"), "ablation")
    if "none" in names and len(names) > 1:
        raise UsageError("an ablation is named beside none", "leave out one of them")
    return tuple(mode for mode in MODES if mode in names)


@options
class AblateOptions:
    """The heads to take out, and the quantities to measure."""

    modes: tuple[Mode, ...] = option(
        "What replaces a head's output: zero, mean (of its outputs over all tokens), or resample (its outputs on 8 "
        "other texts, one after the other). none: replace no head.",
        "--ablation",
        default=("zero", "mean"),
        choices=MODES,
        read=_modes,
        written="zero,mean",
    )
    importance: bool = option(
        "Also estimate each head's importance by one backward pass: E |dL/dξ| (Michel 2019).",
        default=False,
    )
    choice: Choice = group(Choice)
    kind: str | None = kind_option()
    loss: str = option(
        "auto (also the loss of what the model's head predicts) or none (hidden states alone).",
        default="auto",
        choices=("auto", "none"),
    )
    answer: str | None = option(
        "The class of a classifier whose likelihood is measured, such as POSITIVE.  "
        "[default: the one that the whole model gives]",
        default=None,
    )
    target: str | None = target_option()
    save: Path | None = option(
        "Write the model without the heads of --pick into this new folder.", default=None, panel="Output"
    )
    seed: int = seed_option("masked tokens")

    def require(self) -> None:
        """Refuse an order to do nothing, and a class whose likelihood is not measured."""
        if not (self.modes or self.importance):
            raise UsageError("nothing is to be done", "add --importance, or name an ablation")
        if self.answer is not None and self.loss == "none":
            raise UsageError(
                "--loss none measures no likelihood of the class of --answer", "leave out one of them"
            )


class Ablation(Result):
    """The effect of each head of a model on texts, measured by taking it out.

    A column of `heads` is a quantity such as `zero_loss`: the mode of ablation, and what is measured. `whole` has the
    loss of the unchanged model, and `together` the same quantities without all heads at once, if some were picked.
    """

    SCHEMA: ClassVar[str] = "attnscope.ablate/2"
    TABLES: ClassVar[Mapping[str, Sequence[Column]]] = {
        "heads": HEADS,
        "whole": (text("quantity", "loss"), number("value", "of the unchanged model", "nats")),
        "together": (
            text("quantity", "a column of heads"),
            number("value", "without all heads of this result"),
        ),
    }

    @property
    def quantities(self) -> list[str]:
        """Return the columns of effects, the one that heads are ranked by first."""
        names = [name for name in self.table("heads").numbers if not name.endswith(SPREAD)]
        return sorted(names, key=lambda name: name != self.main)

    @property
    def main(self) -> str:
        """Return the quantity that heads are ranked by: a change of loss, else of hidden states, else importance."""
        ranked = [f"{mode}_{measured}" for measured in ("loss", "l2") for mode in _INSTEAD]
        return next((name for name in [*ranked, "importance"] if name in self.table("heads")), "")

    def row(self, table: str, quantity: str) -> Floats | None:
        """Return a value of `whole` or `together` with its interval, (3,); None = there is no such quantity."""
        values = self.table(table)
        rows = values.interval("value")[values["quantity"] == quantity]
        return rows[0] if len(rows) else None

    def require_whole(self) -> None:
        """Refuse what `Result` does, and heads that cannot be ranked."""
        super().require_whole()
        if len(self.table("heads")) and not self.main:
            raise ValueError("its heads have no effect")

    def report(self, **shown: Any) -> Report:
        """Return the heads without which most changes, then what is known of them all."""
        source = corpus_line(self, predictions=True)
        predicted = _predicted_line(self)
        return report_on(
            self,
            [*_answer(self), *_modes_line(self)],
            _blocks(self),
            _guide(self),
            source=source,
            subtitle=" · ".join(filter(None, [source, predicted])),
            notes=list(_notes(self)),
        )


# What is measured


_MEASURED = {
    "l2": (
        "relative change of the last hidden states",
        "change of the last layer's hidden states",
        "Δ hidden",
    ),
    "loss": ("how much the loss rises", "rise of the loss", "Δ loss"),
    "kl": ("KL divergence of the predictions", "KL of the predictions", "KL"),
}
"""What is measured: its meaning, its label, and the same in a few letters."""


def quantity_column(name: str) -> Column:
    """Return the column of a quantity such as "zero_loss": a mode of ablation, and what is measured."""
    # Importance and spreads have no mode.
    if name == "importance":
        meaning = "E |dL/dξ|, ξ the factor on a head's output"
        return number(name, meaning, "nats", label="importance E |dL/dξ|", short="|dL/dξ|")
    if name.endswith(SPREAD):
        meaning = "standard deviation over the texts whose outputs take the head's place"
        return number(name, meaning, short="± over texts")
    # A mode and what is measured, such as zero and loss.
    mode, _, measured = name.partition("_")
    meaning, label, short = _MEASURED[measured]
    unit = "relative L2" if measured == "l2" else "nats"
    return number(
        name,
        f"{meaning} {_INSTEAD[mode]}",
        unit,
        label=f"{mode} ablation: {label}",
        short=f"{mode}: {short}",
    )


# What is shown


def _answer(ablation: Ablation) -> Iterator[str]:
    """Say without which head most changes, and what all picked heads do together."""
    heads, main = ablation.table("heads"), ablation.main
    if not main:
        yield "No head was taken out"
        return
    # The head with the largest effect, and a sentence that fits the quantity.
    first = _largest_first(heads[main])[0]
    value, low, high = heads.interval(main)[first]
    column = heads.columns[main]
    name = printable(ablation.head_names[first])
    size = " ".join(filter(None, [small_number(value), _ends(low, high), printable(column.unit, 40)]))
    if main.endswith("_loss"):
        loss = ablation.row("whole", "loss")
        of_loss = "" if loss is None else f"; it is {small_number(loss[0])}"
        yield f"{name} matters most: without it the loss rises by {size}{of_loss}"
    elif main.endswith("_l2"):
        size = small_number(value)
        yield f"{name} matters most: without it the last hidden states change by {size} of their norm"
    else:
        yield f"{name} has the largest {main}: {size}"
    # Heads that back each other up do more together than the sum of their single effects.
    together = ablation.row("together", main)
    if together is not None:
        size = " ".join(filter(None, [small_number(together[0]), _ends(*together[1:])]))
        yield f"without all {amount(len(heads), 'head')}: {printable(column.title)} {size}"


def _ends(low: float, high: float) -> str:
    """Return an interval, or nothing where there is none, as of a single text."""
    ends = interval(low, high, small_number)
    return "" if ends == UNDEFINED else ends


def _blocks(ablation: Ablation) -> Iterator[Block]:
    heads, names, quantities = ablation.table("heads"), ablation.head_names, ablation.quantities
    if not quantities:
        return
    # Each quantity has a column; its spread over texts follows where it was measured.
    columns = [
        name for quantity in quantities for name in (quantity, f"{quantity}{SPREAD}") if name in heads
    ]
    yield rank_heads(ablation, columns, _largest_first(heads[ablation.main]))
    # The effect of taking all picked heads out at once.
    together = ablation.table("together")
    if len(together):
        listed = ", ".join(names[:15]) + (f" and {len(names) - 15} more" if len(names) > 15 else "")
        labels = [heads.columns[name].title for name in together["quantity"].tolist()]
        shown = [row for row, name in enumerate(together["quantity"].tolist()) if name in quantities]
        yield Ranking(
            what=f"without {listed}",
            noun="quantity",
            names=labels,
            table=together,
            columns=["value"],
            order=shown,
            most=len(shown),
        )
    # Maps only add to the table where there are more heads than it lists.
    for name in quantities:
        is_printed = name == ablation.main and len(heads) > FEW
        yield HeadMap(
            heading=f"every head, {heads.columns[name].title}",
            printed="with --all" if is_printed else "never",
            figure=f"effect-{name}",
            heads=heads,
            column=name,
        )


def _largest_first(values: Floats) -> list[int]:
    """Return rows by their values, the largest first; what is undefined comes last."""
    return largest_first(np.nan_to_num(values, nan=-np.inf))


# What is said


def _predicted_line(ablation: Ablation) -> str:
    """Return what is predicted and how well: "predicted: each next token; loss of the whole model 3.20 nats"."""
    predicted = ablation.options.get("predicted")
    if not predicted:
        return ""
    loss = ablation.row("whole", "loss")
    if loss is None:
        return f"predicted: {printable(predicted)}"
    size = " ".join(filter(None, [small_number(loss[0]), "nats", _ends(*loss[1:])]))
    return f"predicted: {printable(predicted)}; loss of the whole model {size}"


def _modes_line(ablation: Ablation) -> Iterator[str]:
    """Say what takes a head's place by the modes that were run, and over what intervals are."""
    meant = {
        "zero": "nothing in the head's place",
        "mean": "its mean output over all tokens",
        "resample": "its output on 8 other texts, one after the other",
    }
    # The modes that were run.
    modes = [
        f"{mode}: {what}"
        for mode, what in meant.items()
        if mode in (ablation.options.get("modes") or ())
    ]
    if modes:
        yield "; ".join(modes)


def _guide(ablation: Ablation) -> Iterator[str]:
    """Say how to read it."""
    if any(name.endswith("_l2") for name in ablation.quantities):
        yield _LATE
    if predicted := _predicted_line(ablation):
        yield predicted


def _notes(ablation: Ablation) -> Iterator[str]:
    """Say what few need to know."""
    agreement = ablation.options.get("rank_agreement")
    if isinstance(agreement, Mapping) and agreement:
        listed = ", ".join(
            f"{printable(modes)}: {digits(value, 2)}" for modes, value in agreement.items()
        )
        yield f"rank correlation of the effects of heads by two ablations: {listed}"
    if ablation.corpus.get("n_texts") == 1:
        yield "one text gives no interval"
