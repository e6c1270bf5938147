"""Declare the result of an ablation study, which says what changes without a head: its options, columns and report.

To ablate a head is to replace its output. `studies.ablate` does it, and fills in the columns.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from attnscope.arrays import Floats
from attnscope.choice import Choice
from attnscope.errors import UsageError, amount
from attnscope.options import group, kind_option, option, options, read_names, seed_option, target_option
from attnscope.report.blocks import Block, HeadMap, Ranking, Report, rank_heads
from attnscope.report.numbers import format_digits, format_small, format_with_interval, largest_first
from attnscope.report.wording import corpus_line, list_some, printable, report_on
from attnscope.results.result import Result
from attnscope.results.table import HEADS, Column, number, text

Mode = Literal["zero", "mean", "resample"]
MODES: tuple[Mode, ...] = ("zero", "mean", "resample")
"""What replaces a head's output: zero, its mean over all tokens, or its outputs on other texts (resample)."""

_MEANING_ENDINGS = {
    "zero": "without the head",
    "mean": "with the mean of its outputs in the head's place",
    "resample": "with its outputs on other texts in the head's place",
}
"""The ending of a column's meaning, by the mode of ablation, as in "how much the loss rises without the head"."""

_REPLACEMENT_WORDS = {
    "zero": "nothing in the head's place",
    "mean": "its mean output over all tokens",
    "resample": "its output on 8 other texts, one after the other",
}
"""The words of the report for what replaces a head's output, by the mode of ablation."""

_HIDDEN_GUIDE = (
    "Δ hidden: L2 norm of the change by that of the hidden state, with its interval over texts; late layers are closer "
    "to the last hidden states: compare heads of one layer first"
)

SPREAD_SUFFIX = "_spread"
"""The suffix of columns with the standard deviation over the other texts in resample ablation: resample_loss_spread."""

_MAX_HEADS_WITHOUT_MAP = 3
"""The most heads for which the terminal prints no map, as the ranking already lists them all."""

_MAX_NAMED_HEADS = 15
"""The most heads that the report names if they are all ablated at once."""


def _read_modes(listed: str) -> tuple[Mode, ...]:
    """Return the modes in a list such as "zero,mean", in the order of `MODES`. "none" alone gives no modes."""
    names = read_names(listed, (*MODES, "none"), "ablation")
    return tuple(mode for mode in MODES if mode in names)


@options
class AblateOptions:
    """Choose the heads to ablate, and the quantities to measure."""

    modes: tuple[Mode, ...] = option(
        "What replaces a head's output: zero, mean (of its outputs over all tokens), or resample (its outputs on 8 "
        "other texts, one after the other). none: replace no head.",
        "--ablation",
        default=("zero", "mean"),
        choices=MODES,
        read=_read_modes,
        default_text="zero,mean",
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
        """Refuse options that ask for nothing, and a class for which `--loss none` measures no likelihood."""
        if not (self.modes or self.importance):
            raise UsageError("nothing is to be done", "add --importance, or name an ablation")
        if self.answer is not None and self.loss == "none":
            raise UsageError(
                "--loss none measures no likelihood of the class of --answer", "leave out one of them"
            )


class Ablation(Result):
    """Hold what changes on texts if a head of a model is ablated.

    Each column of `heads` is a quantity, named by the mode of ablation and by the effect: `zero_loss` is how much the
    loss rises if zeros replace the head's output. `whole` has the loss of the unchanged model. `together` has the
    quantities of `heads` if all picked heads are ablated at once.
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
        """Return the names of the columns of effects, `main` first, without the columns of spreads."""
        names = [name for name in self.table("heads").number_columns if not name.endswith(SPREAD_SUFFIX)]
        # False sorts before True, so `main` comes first; sorting is stable, so the other names keep their order.
        return sorted(names, key=lambda name: name != self.main)

    @property
    def main(self) -> str:
        """Return the quantity by which heads are ranked, such as "zero_loss"; "" if nothing was measured.

        It is the first quantity measured of: a change of the loss, a change of hidden states, the importance.
        """
        heads = self.table("heads")
        for effect in ("loss", "l2"):
            for mode in MODES:
                if f"{mode}_{effect}" in heads:
                    return f"{mode}_{effect}"
        return "importance" if "importance" in heads else ""

    def row(self, table: str, quantity: str) -> Floats | None:
        """Return (value, low, high) of a quantity of the table "whole" or "together"; None = the table lacks it."""
        quantities = self.table(table)
        rows = quantities.interval("value")[quantities["quantity"] == quantity]
        return rows[0] if len(rows) else None

    def require_whole(self) -> None:
        """Raise a ValueError for what `Result.require_whole` refuses, and for heads without a quantity."""
        super().require_whole()
        if len(self.table("heads")) and not self.main:
            raise ValueError("its heads have no effect")

    def report(self, **shown: Any) -> Report:
        """Return the report: the heads whose ablation changes most, then every quantity of all heads."""
        source = corpus_line(self)
        predicted = _describe_predictions(self)
        guide = []
        if any(name.endswith("_l2") for name in self.quantities):
            guide.append(_HIDDEN_GUIDE)
        if predicted:
            guide.append(predicted)
        return report_on(
            self,
            [*_make_answer(self), *_describe_modes(self)],
            _make_blocks(self),
            guide,
            subtitle=" · ".join(filter(None, [source, predicted])),
            notes=list(_make_notes(self)),
        )


# Columns


# The meaning, the label and the short label of an effect, by the second half of a quantity's name.
_EFFECT_WORDS = {
    "l2": (
        "relative change of the last hidden states",
        "change of the last layer's hidden states",
        "Δ hidden",
    ),
    "loss": ("how much the loss rises", "rise of the loss", "Δ loss"),
    "kl": ("KL divergence of the predictions", "KL of the predictions", "KL"),
}


def quantity_column(name: str) -> Column:
    """Return the column of a quantity such as "zero_loss", "zero_loss_spread" or "importance"."""
    if name == "importance":
        meaning = "E |dL/dξ|, ξ the factor on a head's output"
        return number(name, meaning, "nats", label="importance E |dL/dξ|", short="|dL/dξ|")
    if name.endswith(SPREAD_SUFFIX):
        meaning = "standard deviation over the texts whose outputs take the head's place"
        return number(name, meaning, short="± over texts")
    # All other names join a mode and an effect, such as "zero" and "loss".
    mode, _, effect = name.partition("_")
    meaning, label, short = _EFFECT_WORDS[effect]
    unit = "relative L2" if effect == "l2" else "nats"
    return number(
        name,
        f"{meaning} {_MEANING_ENDINGS[mode]}",
        unit,
        label=f"{mode} ablation: {label}",
        short=f"{mode}: {short}",
    )


# The answer and the blocks of the report


def _make_answer(ablation: Ablation) -> Iterator[str]:
    """Yield sentences: which head's ablation changes most, and how much changes without all picked heads at once."""
    heads = ablation.table("heads")
    main = ablation.main
    if not main:
        yield "No head was taken out"
        return
    # The head with the largest effect, and a sentence that fits the quantity.
    row = _rank_rows(heads[main])[0]
    column = heads.columns[main]
    name = printable(ablation.head_names[row])
    subject = f"{name} matters most: without it" if len(heads) > 1 else f"without {name}"
    effect = (
        f"{format_with_interval(heads.interval(main)[row], format_small)} {printable(column.unit, 40)}"
    )
    if main.endswith("_loss"):
        loss = ablation.row("whole", "loss")
        whole_loss = "" if loss is None else f"; it is {format_small(loss[0])}"
        yield f"{subject} the loss rises by {effect}{whole_loss}"
    elif main.endswith("_l2"):
        change = format_small(heads[main][row])
        yield f"{subject} the last hidden states change by {change} of their norm"
    else:
        yield f"{name} has the largest {main}: {effect}"
    # Ablating all picked heads at once may change more than the sum of single effects, as a head can replace another.
    together = ablation.row("together", main)
    if together is not None:
        yield (
            f"without all {amount(len(heads), 'head')}: {printable(column.title)} "
            f"{format_with_interval(together, format_small)}"
        )


def _make_blocks(ablation: Ablation) -> Iterator[Block]:
    """Yield a ranking of the heads, the effect of ablating all of them at once, and a map of each quantity."""
    heads = ablation.table("heads")
    quantities = ablation.quantities
    if not quantities:
        return
    # Each quantity is a column of the ranking, followed by its spread over texts if that was measured.
    columns = []
    for name in quantities:
        columns.append(name)
        if f"{name}{SPREAD_SUFFIX}" in heads:
            columns.append(f"{name}{SPREAD_SUFFIX}")
    yield rank_heads(ablation, columns, _rank_rows(heads[ablation.main]))
    # The effect of ablating all picked heads at once, without spreads.
    together = ablation.table("together")
    if len(together):
        shown = together.select(np.isin(together["quantity"], quantities))
        yield Ranking(
            header=f"without {list_some(ablation.head_names, _MAX_NAMED_HEADS)}",
            noun="quantity",
            names=[heads.columns[name].title for name in shown["quantity"].tolist()],
            table=shown,
            columns=["value"],
            n_printed=len(shown),
        )
    # The terminal shows one map, that of the main quantity; every map is a figure.
    for name in quantities:
        is_printed = name == ablation.main and len(heads) > _MAX_HEADS_WITHOUT_MAP
        yield HeadMap(
            heading=f"every head, {heads.columns[name].title}",
            printed="with --all" if is_printed else "never",
            figure=f"effect-{name}",
            heads=heads,
            column=name,
        )


def _rank_rows(values: Floats) -> list[int]:
    """Return the indices of all values, the largest first. NaN comes last: `largest_first` alone would drop it."""
    return largest_first(np.nan_to_num(values, nan=-np.inf))


# Lines of the report


def _describe_predictions(ablation: Ablation) -> str:
    """Return the line "predicted: each next token; loss of the whole model 3.20 nats"; "" if it is unknown."""
    predicted = ablation.options.get("predicted")
    if not predicted:
        return ""
    loss = ablation.row("whole", "loss")
    if loss is None:
        return f"predicted: {printable(predicted)}"
    size = format_with_interval(loss, format_small, "nats")
    return f"predicted: {printable(predicted)}; loss of the whole model {size}"


def _describe_modes(ablation: Ablation) -> Iterator[str]:
    """Yield one line on what replaces a head's output in each mode that was run; yield nothing without a mode."""
    modes = ablation.options.get("modes") or ()
    replacements = [f"{mode}: {words}" for mode, words in _REPLACEMENT_WORDS.items() if mode in modes]
    if replacements:
        yield "; ".join(replacements)


def _make_notes(ablation: Ablation) -> Iterator[str]:
    """Yield how far two modes of ablation agree on the order of heads, and that one text gives no interval."""
    # Rank correlation of the effects of heads, by the names of two modes.
    agreement = ablation.options.get("rank_agreement")
    if isinstance(agreement, Mapping) and agreement:
        correlations = [
            f"{printable(modes)}: {format_digits(rho, 2)}" for modes, rho in agreement.items()
        ]
        yield f"rank correlation of the effects of heads by two ablations: {', '.join(correlations)}"
    if ablation.corpus.get("n_texts") == 1:
        yield "one text gives no interval"
