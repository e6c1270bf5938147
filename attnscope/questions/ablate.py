"""Declare the result of an ablation, what changes without a head: its columns and its report."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from attnscope.choice import Choice
from attnscope.errors import UsageError, amount
from attnscope.options import group, kind_option, option, options, read_names, seed_option, target_option
from attnscope.report.blocks import Block, HeadMap, Ranking, Report, rank_heads
from attnscope.report.numbers import digits, largest_first, small_number, with_interval
from attnscope.report.wording import corpus_line, list_some, printable, report_on
from attnscope.results.result import Result
from attnscope.results.table import HEADS, Column, Floats, number, text

Mode = Literal["zero", "mean", "resample"]
MODES: tuple[Mode, ...] = ("zero", "mean", "resample")
"""What takes the place of a head's output: nothing, the mean of its outputs over all tokens, or outputs elsewhere."""

_ABLATED = {
    "zero": "without the head",
    "mean": "with the mean of its outputs in the head's place",
    "resample": "with its outputs on other texts in the head's place",
}
"""The model whose change is measured, by mode: how the meaning of a column ends."""

_REPLACEMENTS = {
    "zero": "nothing in the head's place",
    "mean": "its mean output over all tokens",
    "resample": "its output on 8 other texts, one after the other",
}
"""What takes a head's place, by mode, as the report says it."""

_HIDDEN_GUIDE = (
    "Δ hidden: L2 norm of the change by that of the hidden state, with its interval over texts; late layers are closer "
    "to the last hidden states: compare heads of one layer first"
)

SPREAD = "_spread"
"""The ending of columns of standard deviations over the texts whose outputs take a head's place: zero_loss_spread."""

_NEED_NO_MAP = 3
"""Up to so many heads are all in the ranking, and a map would add nothing."""

_MOST_NAMED = 15
"""Heads that are named where all of them are taken out at once."""


def _read_modes(listed: str) -> tuple[Mode, ...]:
    """Return the modes in a list such as "zero,mean", in the order of `MODES`; "none" is no mode."""
    names = read_names(listed, (*MODES, "none"), "ablation")
    if "none" in names and len(names) > 1:
        raise UsageError("an ablation is named beside none", "leave out one of them")
    return tuple(mode for mode in MODES if mode in names)


@options
class AblateOptions:
    """Choose the heads to take out, and the quantities to measure."""

    modes: tuple[Mode, ...] = option(
        "What replaces a head's output: zero, mean (of its outputs over all tokens), or resample (its outputs on 8 "
        "other texts, one after the other). none: replace no head.",
        "--ablation",
        default=("zero", "mean"),
        choices=MODES,
        read=_read_modes,
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
        """Refuse options that ask for nothing, and a class whose likelihood is not measured."""
        if not (self.modes or self.importance):
            raise UsageError("nothing is to be done", "add --importance, or name an ablation")
        if self.answer is not None and self.loss == "none":
            raise UsageError(
                "--loss none measures no likelihood of the class of --answer", "leave out one of them"
            )


class Ablation(Result):
    """Hold the effect of each head of a model on texts, measured by taking it out.

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
        names = [name for name in self.table("heads").number_columns if not name.endswith(SPREAD)]
        # False comes before True, and others keep their order.
        return sorted(names, key=lambda name: name != self.main)

    @property
    def main(self) -> str:
        """Return the quantity that heads are ranked by: a change of loss, else of hidden states, else importance."""
        heads = self.table("heads")
        for measured in ("loss", "l2"):
            for mode in MODES:
                if f"{mode}_{measured}" in heads:
                    return f"{mode}_{measured}"
        return "importance" if "importance" in heads else ""

    def row(self, table: str, quantity: str) -> Floats | None:
        """Return a value of the table "whole" or "together" with its interval, (3,); None = it has no such quantity."""
        quantities = self.table(table)
        rows = quantities.interval("value")[quantities["quantity"] == quantity]
        return rows[0] if len(rows) else None

    def require_whole(self) -> None:
        """Refuse what `Result` does, and heads that cannot be ranked."""
        super().require_whole()
        if len(self.table("heads")) and not self.main:
            raise ValueError("its heads have no effect")

    def report(self, **shown: Any) -> Report:
        """Return the report: the heads without which most changes, then every quantity of all heads."""
        source = corpus_line(self)
        predicted = _predicted_line(self)
        guide = [_HIDDEN_GUIDE] if any(map(_is_of_hidden_states, self.quantities)) else []
        if predicted:
            guide.append(predicted)
        return report_on(
            self,
            [*_answer(self), *_modes_line(self)],
            _blocks(self),
            guide,
            subtitle=" · ".join(filter(None, [source, predicted])),
            notes=list(_notes(self)),
        )


# What is measured


# For each measured quantity its meaning, its label, and the label in a few letters.
_MEASURED = {
    "l2": (
        "relative change of the last hidden states",
        "change of the last layer's hidden states",
        "Δ hidden",
    ),
    "loss": ("how much the loss rises", "rise of the loss", "Δ loss"),
    "kl": ("KL divergence of the predictions", "KL of the predictions", "KL"),
}


def _is_of_hidden_states(quantity: str) -> bool:
    return quantity.endswith("_l2")


def quantity_column(name: str) -> Column:
    """Return the column of a quantity such as "zero_loss", "zero_loss_spread" or "importance"."""
    if name == "importance":
        meaning = "E |dL/dξ|, ξ the factor on a head's output"
        return number(name, meaning, "nats", label="importance E |dL/dξ|", short="|dL/dξ|")
    if name.endswith(SPREAD):
        meaning = "standard deviation over the texts whose outputs take the head's place"
        return number(name, meaning, short="± over texts")
    # All others have a mode and what is measured, such as zero and loss.
    mode, _, measured = name.partition("_")
    meaning, label, short = _MEASURED[measured]
    unit = "relative L2" if measured == "l2" else "nats"
    return number(
        name,
        f"{meaning} {_ABLATED[mode]}",
        unit,
        label=f"{mode} ablation: {label}",
        short=f"{mode}: {short}",
    )


# What is shown


def _answer(ablation: Ablation) -> Iterator[str]:
    """Say without which head most changes, and how much all picked heads matter together."""
    heads = ablation.table("heads")
    main = ablation.main
    if not main:
        yield "No head was taken out"
        return
    # The head with the largest effect, and a sentence that fits the quantity.
    row = _largest_first(heads[main])[0]
    column = heads.columns[main]
    name = printable(ablation.head_names[row])
    subject = f"{name} matters most: without it" if len(heads) > 1 else f"without {name}"
    size = (
        f"{with_interval(heads.interval(main)[row], small_number)} {printable(column.unit, 40)}".rstrip()
    )
    if main.endswith("_loss"):
        loss = ablation.row("whole", "loss")
        of_loss = "" if loss is None else f"; it is {small_number(loss[0])}"
        yield f"{subject} the loss rises by {size}{of_loss}"
    elif _is_of_hidden_states(main):
        size = small_number(heads[main][row])
        yield f"{subject} the last hidden states change by {size} of their norm"
    else:
        yield f"{name} has the largest {main}: {size}"
    # Heads that back each other up do more together than the sum of their single effects.
    together = ablation.row("together", main)
    if together is not None:
        all_heads = amount(len(heads), "head")
        yield f"without all {all_heads}: {printable(column.title)} {with_interval(together, small_number)}"


def _blocks(ablation: Ablation) -> Iterator[Block]:
    """Show a ranking of the heads, the effect of taking all out at once, and a map of each quantity."""
    heads = ablation.table("heads")
    quantities = ablation.quantities
    if not quantities:
        return
    # Each quantity has a column in the ranking; its spread over texts follows where it was measured.
    columns = []
    for name in quantities:
        columns.append(name)
        if f"{name}{SPREAD}" in heads:
            columns.append(f"{name}{SPREAD}")
    yield rank_heads(ablation, columns, _largest_first(heads[ablation.main]))
    # The effect of taking all picked heads out at once, without spreads.
    together = ablation.table("together")
    if len(together):
        shown = together.select(np.isin(together["quantity"], quantities))
        yield Ranking(
            header=f"without {list_some(ablation.head_names, _MOST_NAMED)}",
            noun="quantity",
            names=[heads.columns[name].title for name in shown["quantity"].tolist()],
            table=shown,
            columns=["value"],
            n_printed=len(shown),
        )
    # The terminal shows one map, that of the main quantity; figures show all.
    for name in quantities:
        is_printed = name == ablation.main and len(heads) > _NEED_NO_MAP
        yield HeadMap(
            heading=f"every head, {heads.columns[name].title}",
            printed="with --all" if is_printed else "never",
            figure=f"effect-{name}",
            heads=heads,
            column=name,
        )


def _largest_first(values: Floats) -> list[int]:
    """Return the rows of values, the largest first; undefined ones, which `largest_first` drops, come last."""
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
    size = with_interval(loss, small_number, "nats")
    return f"predicted: {printable(predicted)}; loss of the whole model {size}"


def _modes_line(ablation: Ablation) -> Iterator[str]:
    """Say in one line what takes a head's place, for each mode that was run; nothing if none was."""
    modes = ablation.options.get("modes") or ()
    replacements = [f"{mode}: {words}" for mode, words in _REPLACEMENTS.items() if mode in modes]
    if replacements:
        yield "; ".join(replacements)


def _notes(ablation: Ablation) -> Iterator[str]:
    """Say how far two modes agree on the order of heads, and that one text gives no interval."""
    # Rank correlations by the names of two modes.
    agreement = ablation.options.get("rank_agreement")
    if isinstance(agreement, Mapping) and agreement:
        correlations = [f"{printable(modes)}: {digits(rho, 2)}" for modes, rho in agreement.items()]
        yield f"rank correlation of the effects of heads by two ablations: {', '.join(correlations)}"
    if ablation.corpus.get("n_texts") == 1:
        yield "one text gives no interval"
