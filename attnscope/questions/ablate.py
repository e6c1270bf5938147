"""Ablation: what changes without a head. Its columns, and what is said of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from attnscope.choice import Choice
from attnscope.errors import UsageError, amount
from attnscope.options import group, kind_option, option, options, read_names, seed_option, target_option
from attnscope.report.blocks import Block, HeadMap, Ranking, Report
from attnscope.report.numbers import UNDEFINED, digits, interval, small_number
from attnscope.report.wording import corpus_line, corpus_notes, model_of, printable
from attnscope.results.result import Result
from attnscope.results.table import HEADS, Column, Floats, number, text

PLACES = {
    "first": ("first occurrences", "of tokens that come for the first time in what is read"),
    "repeated": ("repeated tokens", "of tokens that came before (of hidden ones: that stand elsewhere too)"),
    "first_half": ("first half", "in the first half of each text"),
    "second_half": ("second half", "in the second half of each text"),
}
"""Which predictions the loss is given for apart: by name, what people read and what the loss is of."""

_INSTEAD = {
    "zero": "without the head",
    "mean": "with the mean of its outputs in the head's place",
    "resample": "with its outputs on other texts in the head's place",
}
"""What is put in the place of a head, by the mode of ablation."""

_LATE = "late layers are closer to the last hidden states: compare heads of one layer first"

SPREAD = "_spread"
"""What the column ends with that has the standard deviation over the texts whose outputs take a head's place."""

FEW = 3
"""Heads that are listed, and need no map."""


Mode = Literal["zero", "mean", "resample"]
MODES: tuple[Mode, ...] = ("zero", "mean", "resample")
"""What takes the place of a head's output: nothing, the mean of its outputs over all tokens, or outputs elsewhere."""

EACH: Literal["each"] = "each"


def _modes(listed: str) -> tuple[Mode, ...]:
    names = read_names(listed, (*MODES, "none"), "ablation")
    if "none" in names and len(names) > 1:
        raise UsageError("an ablation is named beside none", "leave out one of them")
    return tuple(mode for mode in MODES if mode in names)


def _share(written: str) -> float | Literal["each"]:
    share = written.strip().lower()
    if share == EACH:
        return EACH
    try:
        return float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
    except ValueError:
        raise UsageError(
            f"--masked is {written!r}", "give a share of the tokens, such as 0.15 or 15%, or: each"
        ) from None


@options
class AblateOptions:
    """What is taken out, and what is looked at."""

    modes: tuple[Mode, ...] = option(
        "What replaces a head's output: zero, mean (of its outputs over all tokens), or resample (its outputs on 8 "
        "other texts, one after the other). none: replace no head.",
        "--ablation", default=("zero", "mean"), choices=MODES, read=_modes, written="zero,mean",
    )  # fmt: skip
    importance: bool = option(
        "Also estimate each head's importance by one backward pass: E |dL/dξ| (Michel et al. 2019).", default=False
    )
    by_layer: bool = option(
        "Divide each importance by the norm of its layer's importances.", default=False, python_only=True
    )
    choice: Choice = group(Choice)
    kind: str | None = kind_option()
    loss: str = option(
        "What the loss is computed on: causal, masked, target, none; auto: what the model's head predicts.",
        default="auto", choices=("auto", "causal", "masked", "target", "none"),
    )  # fmt: skip
    masked: float | Literal["each"] = option(
        "Share of tokens that a masked model has to fill in; each: every token in turn.",
        default=0.15, read=_share, written="15%", rare=True,
    )  # fmt: skip
    target: str | None = target_option()
    save: Path | None = option(
        "Write the model without the heads of --pick into this new folder.", default=None, panel="Output"
    )
    seed: int = seed_option("masked tokens and random directions")

    def require(self) -> None:
        """Refuses a share that is not one, and an order to do nothing."""
        if self.masked != EACH and not 0 < float(self.masked) < 1:
            raise UsageError(f"--masked is {self.masked}", "it is a share of the tokens between 0 and 1, or: each")
        if not (self.modes or self.importance):
            raise UsageError("nothing is to be done", "add --importance, or name an ablation")


class Ablation(Result):
    """What heads do for a model on texts, found by taking them out.

    A column of `heads` is a quantity such as `zero_loss`: the mode of ablation, and what is measured. `whole` has the
    loss of the unchanged model, and `together` the same quantities without all heads at once, if some were picked.
    """

    SCHEMA: ClassVar[str] = "attnscope.ablate/2"
    TABLES: ClassVar[Mapping[str, Sequence[Column]]] = {
        "heads": HEADS,
        "whole": (text("quantity", "loss, or that by position"), number("value", "of the unchanged model", "nats")),
        "together": (text("quantity", "a column of heads"), number("value", "without all heads of this result")),
    }

    @property
    def quantities(self) -> list[str]:
        """The columns that any head has, the one that heads are ranked by first; without losses by position."""
        others = (SPREAD, *(f"_loss_{place}" for place in PLACES))
        names = [name for name in self.table("heads").numbers if not name.endswith(others)]
        return sorted(names, key=lambda name: name != self.main)

    @property
    def main(self) -> str:
        """The quantity that heads are ranked by: a change of loss, else of hidden states, else importance."""
        ranked = [f"{mode}_{measured}" for measured in ("loss", "l2") for mode in _INSTEAD]
        ranked += ["importance", "sensitivity"]
        return next((name for name in ranked if name in self.table("heads")), "")

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
        return Report(
            model=model_of(self.run),
            answer=list(_answer(self)),
            blocks=list(_blocks(self)),
            guide=list(_guide(self)),
            source=source,
            subtitle=" · ".join(filter(None, [source, predicted])),
            problems=corpus_notes(self),
            notes=list(_notes(self)),
        )


# What is measured


def quantity_column(name: str, *, by_layer: bool = False, n_directions: int = 0) -> Column:
    """Return the column of a quantity such as "zero_loss": a mode of ablation, and what is measured.

    Args:
        name: Its name.
        by_layer: Whether importances are divided by the norm of those of their layer.
        n_directions: Over how many directions a sensitivity is the mean.
    """
    mode, _, measured = name.removesuffix(SPREAD).partition("_")
    if name.endswith(SPREAD):
        return number(
            name, "standard deviation over the texts whose outputs take the head's place", short="± over texts"
        )
    divided = ", divided by the norm of its layer's" if by_layer else ""
    if name == "importance":
        meaning = f"E |dL/dξ|, ξ the factor on a head's output{divided}"
        return number(name, meaning, "" if by_layer else "nats", label="importance E |dL/dξ|", short="|dL/dξ|")
    if name == "sensitivity":
        directions = amount(n_directions, "direction")
        return number(name, f"mean |d⟨u, h⟩/dξ| over {directions} u of the last hidden states{divided}")
    instead = _INSTEAD[mode]
    if measured == "l2":
        meaning = f"relative change of the last hidden states {instead}"
        label = f"{mode} ablation: change of the last layer's hidden states"
        return number(name, meaning, "relative L2", label=label, short=f"{mode} Δ hidden")
    if measured == "kl":
        meaning = f"KL divergence of the predictions {instead}"
        return number(name, meaning, "nats", label=f"{mode} ablation: KL of the predictions", short=f"{mode} KL")
    if measured == "loss":
        meaning = f"how much the loss rises {instead}"
        return number(name, meaning, "nats", label=f"{mode} ablation: rise of the loss", short=f"{mode} Δ loss")
    title, which = PLACES[measured.removeprefix("loss_")]
    return number(
        name, f"how much the loss {which} rises {instead}", "nats", label=f"{mode} Δ loss, {title}", short=title
    )


# What is shown


def _answer(ablation: Ablation) -> Iterator[str]:
    """Say without which head most changes, and what all picked heads do together."""
    heads, main = ablation.table("heads"), ablation.main
    if not main:
        yield "No head was taken out"
        return
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
        yield f"{name} matters most: without it hidden states change by {small_number(value)} of their norm"
    else:
        yield f"{name} has the largest {main}: {size}"
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
    columns = [name for quantity in quantities for name in (quantity, f"{quantity}{SPREAD}") if name in heads]
    yield Ranking(what="head", names=names, table=heads, columns=columns, order=_largest_first(heads[ablation.main]))
    together = ablation.table("together")
    if len(together):
        listed = ", ".join(names[:15]) + (f" and {len(names) - 15} more" if len(names) > 15 else "")
        labels = [heads.columns[name].title for name in together["quantity"].tolist()]
        shown = [row for row, name in enumerate(together["quantity"].tolist()) if name in quantities]
        yield Ranking(
            what=f"without {listed}", noun="quantity", names=labels, table=together, columns=["value"], order=shown,
            most=len(shown),
        )  # fmt: skip
    yield from _by_position(ablation)
    for name in quantities:
        is_printed = name == ablation.main and len(heads) > FEW
        yield HeadMap(
            heading=f"every head, {heads.columns[name].title}",
            printed="with --all" if is_printed else "never",
            figure=f"effect-{name}",
            heads=heads,
            column=name,
        )


def _by_position(ablation: Ablation) -> Iterator[Block]:
    """Show at which places of a text the loss rises."""
    heads = ablation.table("heads")
    mode = next((mode for mode in _INSTEAD if f"{mode}_loss_first" in heads), "")
    if not mode:
        return
    columns = [f"{mode}_loss_{place}" for place in PLACES]
    sizes = np.max([np.abs(heads[name]) for name in columns], 0)
    losses = {title: ablation.row("whole", f"loss_{place}") for place, (title, _) in PLACES.items()}
    known = [f"{title} {small_number(loss[0])}" for title, loss in losses.items() if loss is not None]
    yield Ranking(
        heading=f"{mode} Δ loss by position",
        printed="with --all",
        what="head",
        names=ablation.head_names,
        table=heads,
        columns=columns,
        order=_largest_first(sizes),
        notes=[f"loss of the whole model, nats: {', '.join(known)}"] if known else [],
    )


def _largest_first(values: Floats) -> list[int]:
    """Return rows by their values, the largest first; what is undefined comes last."""
    order: list[int] = np.argsort(-np.where(np.isfinite(values), values, -np.inf), kind="stable").tolist()
    return order


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


def _guide(ablation: Ablation) -> Iterator[str]:
    """Say how to read it."""
    meant = {
        "zero": "nothing in the head's place",
        "mean": "its mean output over all tokens",
        "resample": "its output on 8 other texts, one after the other",
    }
    modes = [f"{mode}: {what}" for mode, what in meant.items() if mode in (ablation.options.get("modes") or ())]
    if modes:
        yield "; ".join(modes)
    if any(name.endswith("_l2") for name in ablation.quantities):
        yield _LATE
    if predicted := _predicted_line(ablation):
        yield predicted


def _notes(ablation: Ablation) -> Iterator[str]:
    """Say what few need to know."""
    if "sensitivity" in ablation.table("heads"):
        yield (
            "sensitivity: there is no loss, so it is mean |d⟨u, h⟩/dξ| over random directions u of the hidden states: "
            "how far they move, not whether it matters"
        )
    agreement = ablation.options.get("rank_agreement")
    if isinstance(agreement, Mapping) and agreement:
        listed = ", ".join(f"{printable(modes)}: {digits(value, 2)}" for modes, value in agreement.items())
        yield f"rank correlation of the effects of heads by two ablations: {listed}"
    if ablation.options.get("normalized") == "layer":
        yield "importances are divided by the Euclidean norm of those of their layer"
    if ablation.corpus.get("n_texts") == 1:
        yield "one text gives no interval"
