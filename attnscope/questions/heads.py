"""Declare the result of a study of heads, which says what each head of a model does: its columns and its report.

`head_steps` says it in one line per head, `head_roles` shows roles. Loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from attnscope.errors import AttnscopeError, amount, require_choice
from attnscope.questions.head_lines import (
    description_notes,
    is_described,
    line_blocks,
    require_sort,
    sort_heads,
)
from attnscope.questions.head_roles import count_first_roles, evidence_line, first_role_rows, role_notes
from attnscope.report.blocks import Block, HeadMap, Ranking, Report, WordsColumn, rank_heads
from attnscope.report.numbers import UNDEFINED, number
from attnscope.report.wording import (
    corpus_line,
    is_of_pictures_or_sound,
    model_of,
    printable,
    report_on,
    title_of,
)
from attnscope.results.result import Result
from attnscope.results.table import HEADS, Column, Floats, Table, count, flag, share, text
from attnscope.results.table import number as number_column

_LEADING_MEASURES = ("distance_patches", "monotonicity")
"""The measures that are shown as a map: the first is of pictures, the second of recordings."""

_USUAL_COLUMNS = (
    "kind",
    "layer",
    "head",
    "role",
    "role_value",
    "role_value_low",
    "role_value_high",
    "role_value_baseline",
    "description",
    "kl_explained",
    "kl_explained_low",
    "kl_explained_high",
    "nats",
    "resting_share",
    "entropy_nats",
    "previous_token",
    "next_token",
    "same_token",
    "induction",
    "first_token",
)
"""The columns of a CSV without --all: those that people use first."""

ALL_LENGTHS = 0
"""Stands in the column `length` of `written` for needles in texts of all lengths, at all depths."""

ROLE = text(
    "role", "its roles, the strongest first but sinks last, with + between them; empty = it has none"
)

RESTING = share(
    "resting_share", "share of its attention on sinks: special tokens and the first", label="sink share"
)

ROLES = (
    count("head", "the head that has it", refers_to="heads"),
    text("role", "such as previous_token"),
    text("measure", "the measure that it rests on; `_active` ones count attention outside sinks"),
    number_column(
        "value", "value of that measure; its baseline is what it had to beat beside the threshold"
    ),
    number_column("threshold", "what it had to reach"),
    number_column(
        "p", "one-sided p-value of all measures that the role may rest on (Simes)", range=(0, 1)
    ),
    number_column("q", "false discovery rate over heads and roles", range=(0, 1)),
    flag("tentative", "whether it rests on few texts"),
    share("active_share", "how much of the head's attention an `_active` measure counts; NaN = all"),
    number_column("effective_texts", "how many texts of one length the evidence amounts to"),
)
"""The evidence for the roles of heads. A head's rows stand together, the strongest role first but sinks last."""

DESCRIPTION = (
    text("description", "what it does, in a line; empty = it was not described"),
    text(
        "summary", "the same of its attention outside sinks, in fewer words; empty = no fewer are known"
    ),
    number_column(
        "kl_explained",
        "share of its KL from uniform attention that its line predicts on texts it was not fitted on",
        "share",
        range=(None, 1),
        label="KL explained",
    ),
    number_column(
        "nats",
        "KL from uniform attention, outside sinks unless it only rests",
        "nats",
        label="nats from uniform",
    ),
    share(
        "active_share", "share of its attention on keys that are neither special tokens nor the first"
    ),
    number_column(
        "whole_explained", "as KL explained, of all its attention: sinks too", "share", range=(None, 1)
    ),
    number_column("whole_nats", "KL of all its attention from uniform attention", "nats"),
    text("first_term", "the feature that explains most of its attention outside sinks"),
    text("other_half", "what the other half of the texts says first, if it differs"),
)
"""The columns that heads get when they are described."""


class Heads(Result):
    """Hold the measures, roles and descriptions of every head of a model on a corpus.

    - `heads` has the roles of each head and every measure under its name, with its interval, its baseline (the value
      under uniform attention) and its count (the effective number of queries). It has the effect of ablating the head
      (`--causal`) and a line that describes the head, if these were asked for.
    - `roles` is the evidence for roles.
    - `terms` are what the lines consist of; `failures` and `expected` show the tokens that the lines explain worst.
    - `control` has the heads of the same architecture with random weights.
    - `written` says how much of the needles the model writes, if texts are haystacks with needles (`--probe needle`).
    """

    SCHEMA: ClassVar[str] = "attnscope.heads/2"
    TABLES: ClassVar[Mapping[str, Sequence[Column]]] = {
        "heads": (*HEADS, ROLE, RESTING),
        "roles": ROLES,
        "control": (*HEADS, ROLE),
        "terms": (
            count("head", "the head", refers_to="heads"),
            text("part", "attends: outside sinks; rests: on which sinks it rests"),
            text("feature", "the feature's name"),
            text("words", "what it is called"),
            number_column(
                "weight", "log odds of a key that has it, all else alike; below 0 it is avoided"
            ),
            share(
                "share",
                "how much of the head's attention lies on such keys; its baseline: spread evenly",
            ),
            flag("own", "whether it was fitted to this head, rather than taken from the catalogue"),
            number_column(
                "gain",
                "nats that it explained of the texts that it was chosen on, when it was chosen",
                "nats",
            ),
        ),
        "failures": (
            count(
                "head", "a head whose line explains the attention of a token badly", refers_to="heads"
            ),
            count("text", "the text's number in the corpus"),
            text("before", "what stands before the token"),
            text("token", "its label"),
            count("place", "its place in the text, or in the chunk of a long one"),
            number_column("nats", "KL of its attention to what is described", "nats"),
        ),
        "expected": (
            count("failure", "the failure", refers_to="failures"),
            count(
                "place", "a key that the line expects the token to attend to, by its place in the text"
            ),
            text("token", "its label"),
            share("weight", "the weight that the line expects"),
        ),
        "written": (
            count("length", "length of the texts in tokens; 0 = of all lengths and depths"),
            share("depth", "around which share of the haystack the needle stands"),
            share("copied", "share of the needles' tokens that the model writes"),
        ),
    }

    @property
    def measure_names(self) -> list[str]:
        """Return the names of the measures, in the order of the study."""
        heads = self.table("heads")
        return [name for name in self.options.get("measures", ()) if name in heads]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of attention, in the order of the heads: "encoder", "decoder" or "cross"."""
        return tuple(dict.fromkeys(self.table("heads")["kind"].tolist()))

    @property
    def is_described(self) -> bool:
        """Return whether each head has a line that describes it."""
        return is_described(self)

    def row(self, layer: int, head: int, kind: str | None = None) -> int:
        """Return the row of a head in its table.

        Args:
            layer: Its layer.
            head: Its number.
            kind: Its kind of attention; None = the first kind with such a head.

        Raises:
            AttnscopeError: There is no such head.
        """
        heads = self.table("heads")
        for row, place in enumerate(heads.layer_heads):
            if place == (layer, head) and kind in (None, heads["kind"][row]):
                return row
        raise AttnscopeError(f"there is no head L{layer}H{head} here", "layers and heads count from 0")

    def roles_of(self, row: int) -> Table:
        """Return the evidence for the roles of a head, by its row: the strongest first, but sinks last."""
        roles = self.table("roles")
        return roles.select(roles["head"] == row)

    @property
    def usual_columns(self) -> Sequence[str]:
        """Return the columns that people use first; without descriptions files have all."""
        return _USUAL_COLUMNS if is_described(self) else ()

    def rows(self) -> Iterable[Sequence[Any]]:
        """Yield the table of heads with the value of each head's first role, the names of columns first."""
        heads = self.table("heads")
        roles = self.table("roles")
        if not len(roles):
            return heads.rows()
        # The first role's value, interval and baseline are (head,) each; NaN = the head has no role.
        role_rows = first_role_rows(self)
        has_role = role_rows >= 0
        values = np.where(has_role, roles["value"][role_rows], np.nan)
        beside_values = {}
        for part in ("low", "high", "baseline"):
            beside_values[part] = np.where(has_role, roles.companion("value", part)[role_rows], np.nan)
        column = number_column("role_value", "value of the measure that its first role rests on")
        return heads.with_column(column, values, **beside_values).rows()

    def report(
        self, *, measures: str | None = None, sort: str | None = None, full_result: Heads | None = None
    ) -> Report:
        """Return the report: what heads do, those with most to say first, then numbers and figures.

        Args:
            measures: Measures to list for every head, each with a figure of its own: their names with commas between,
                or "all".
            sort: List all heads in this order, "layer", "explained" or "entropy"; None = those with most to say first.
            full_result: The result that the heads of this one were picked from. A head that was picked alone is ranked
                among its heads. None = no heads were picked.

        Raises:
            AttnscopeError: There is no such measure or order.
        """
        require_sort(sort)
        heads = self.table("heads")
        is_chosen = full_result is not None and len(heads) < len(full_result.table("heads"))
        listed = parse_measures(measures, self.measure_names)
        blocks: list[Block] = []
        # What heads do. In pictures and recordings measures say it, in texts roles and descriptions.
        if is_of_pictures_or_sound(self):
            blocks += _senses_blocks(self)
        elif len(self.table("roles")) or is_described(self):
            blocks += line_blocks(self, sort, is_chosen=is_chosen)
        blocks += _needle_blocks(self)
        # Numbers: all measures of one head with its rank among the others, or some measures of all heads. An
        # encoder-decoder may have a head of the same layer and number in each kind of attention.
        if is_chosen and len({*heads.layer_heads}) == 1:
            for row in range(len(heads)):
                blocks.append(_measures_of_one(self, row, full_result or self))
        elif listed:
            blocks.append(_measures_of_all(self, listed, sort))
        blocks += _figures(self, listed)
        notes = description_notes(self)
        return report_on(
            self, _answer(self), blocks, _guide(self), subtitle=corpus_line(self), notes=notes
        )


def heads_table(
    places: Sequence[Any],
    columns: Sequence[Column],
    *,
    roles: Sequence[str],
    resting: Floats,
    **estimates: Floats,
) -> Table:
    """Return the table of heads with some measures.

    Args:
        places: The kinds of attention, the layers and the numbers of the heads, (3, head).
        columns: The columns of the measures.
        roles: The values of the column `ROLE`, (head,).
        resting: The values of the column `RESTING`, (head,).
        estimates: "value", "low", "high", "baseline" and "count" of the measures, (head, measure) each.
    """
    kinds, layers, head_numbers = places
    values: dict[str, Any] = {
        "kind": kinds,
        "layer": layers,
        "head": head_numbers,
        "role": roles,
        "resting_share": resting,
    }
    # "entropy_nats" has the value, "entropy_nats_low" the lower end of its interval.
    for measure, column in enumerate(columns):
        for part, of_measures in estimates.items():
            ending = "" if part == "value" else f"_{part}"
            values[f"{column.name}{ending}"] = of_measures[:, measure]
    return Table.of_arrays([*Heads.TABLES["heads"], *columns], **values)


# The answer


def _answer(result: Heads) -> list[str]:
    """Say how many heads do what, how to read the list of heads, and what a reader must know about roles."""
    all_heads = amount(len(result.table("heads")), "head")
    model = model_of(result.run)
    # Measures of pictures and sounds have no roles.
    if is_of_pictures_or_sound(result):
        return [f"{model}: what its {all_heads} measure on {corpus_line(result)}"]
    # If no head has a role for lack of texts, `role_notes` says so below.
    answer = []
    if counted := count_first_roles(result):
        answer.append(f"{model}: {counted}")
    elif not evidence_line(result):
        answer.append(f"{model}: none of its {all_heads} has a role")
    if len(result.table("roles")):
        answer.append(
            "value: the role's measure, such as weight on the previous token [95% interval]; *: of attention outside "
            "sinks; KL explained: how well the words predict that"
        )
    return [*answer, *role_notes(result)]


def _guide(result: Heads) -> list[str]:
    """Explain the column KL explained, or uniform for pictures and recordings, or why heads are not described."""
    if is_of_pictures_or_sound(result):
        return ["uniform: the value of a head that attends to all keys alike"]
    guide = []
    if is_described(result):
        guide.append(
            "KL explained: the share of what sets attention outside sinks apart from uniform that the line predicts on "
            "held-out texts; a line says where a head looks, not why"
        )
    elif "described" in result.options:
        guide.append(
            "Heads are not described: that takes at least two texts (or chunks of a long one), as what is found on one "
            "is tried on another"
        )
    return guide


# Measures


def parse_measures(listed: str | None, known: Sequence[str]) -> list[str]:
    """Return the measures in a list such as "induction,local"; "all" is every one, None = none.

    Raises:
        UsageError: There is no such measure.
    """
    if listed is None:
        return []
    names = list(known) if listed == "all" else [name.strip() for name in listed.split(",")]
    for name in names:
        require_choice("measure", name, known)
    return names


def _measures_of_all(result: Heads, names: Sequence[str], sort: str | None) -> Ranking:
    """Show measures of every head, with their intervals."""
    heads = result.table("heads")
    notes = [printable(f"{name}: {heads.columns[name].meaning}") for name in names]
    return rank_heads(
        result, names, sort_heads(result, sort), heading="measures", n_printed=len(heads), notes=notes
    )


def _measures_of_one(result: Heads, row: int, full_result: Heads) -> Ranking:
    """Show all measures of one head with its rank among the heads of its kind, 1 = the largest value."""
    heads = result.table("heads")
    others = full_result.table("heads")
    others = others.select(others["kind"] == heads["kind"][row])
    names = result.measure_names

    # A measure that is undefined for this head has no rank.
    ranks = [UNDEFINED] * len(names)
    for measure, name in enumerate(names):
        value = heads[name][row]
        if math.isfinite(value):
            ranks[measure] = str(1 + int((others[name] > value).sum()))
    return Ranking(
        header=result.head_names[row],
        names=[title_of(heads.columns[name]) for name in names],
        table=_estimates(heads, names, [row] * len(names), "value"),
        columns=["value", "uniform", WordsColumn(f"rank of {len(others)}", ranks)],
        noun="measure",
        notes=[
            "rank: 1 = the largest value; uniform: the value under uniform attention over the same keys"
        ],
    )


def _estimates(heads: Table, names: Sequence[str], rows: Sequence[int], column: str) -> Table:
    """Return a table with a row per measure: the measure of one head with its interval, and its baseline.

    Args:
        heads: The table of heads.
        names: The names of the measures.
        rows: The head of each measure, as a row of `heads`.
        column: The name of the column of values; that of the baselines is "uniform".
    """
    # Value and both ends of its interval, (measure, 3).
    estimates = []
    uniform = []
    for name, row in zip(names, rows, strict=True):
        estimates.append(heads.interval(name)[row])
        uniform.append(heads.companion(name, "baseline")[row])
    values, low, high = np.array(estimates).T
    table = Table({}, {}).with_column(number_column(column), values, low=low, high=high)
    return table.with_column(number_column("uniform"), uniform)


def _senses_blocks(result: Heads) -> Iterator[Block]:
    """Show a map of the leading measure of pictures or recordings, and the head with the largest value of each."""
    heads = result.table("heads")
    names = _defined_measures(result)
    if not names:
        return
    leading = next((name for name in _LEADING_MEASURES if name in names), names[0])
    meaning = printable(heads.columns[leading].meaning)
    yield HeadMap(heading=f"{title_of(heads.columns[leading])}: {meaning}", heads=heads, column=leading)
    # The head with the largest value of each measure, (measure,).
    rows = [int(np.nanargmax(heads[name])) for name in names]
    yield Ranking(
        header="measure",
        names=list(map(printable, names)),
        table=_estimates(heads, names, rows, "largest"),
        columns=["largest", WordsColumn("head", np.array(result.head_names)[rows].tolist()), "uniform"],
    )


def _needle_blocks(result: Heads) -> Iterator[Block]:
    """Show the share of needle tokens that the model writes: a row per length, a column per depth of the needle."""
    written = result.table("written")
    if not len(written):
        return
    cells = written.select(written["length"] != ALL_LENGTHS)
    # Lengths and depths in ascending order, and the place of each cell in them.
    lengths, length_of_cell = np.unique(cells["length"], return_inverse=True)
    depths, depth_of_cell = np.unique(cells["depth"], return_inverse=True)
    # (length, depth)
    shares = np.full((len(lengths), len(depths)), np.nan)
    shares[length_of_cell, depth_of_cell] = cells["copied"]
    yield Ranking(
        heading="needle tokens that the model writes, by depth of the needle",
        header="tokens",
        names=[f"{length:,}" for length in lengths],
        table=Table({}, {}),
        columns=[
            WordsColumn(f"{100 * depth:g}%", list(map(number, copied)))
            for depth, copied in zip(depths.tolist(), shares.T.tolist(), strict=True)
        ],
        notes=[
            "a token counts as written where it is the model's first choice after the right ones before it"
        ],
    )


# Figures


def _defined_measures(result: Heads) -> list[str]:
    """Return the measures that are defined for some head: those of patches are undefined for a recording."""
    heads = result.table("heads")
    return [name for name in result.measure_names if np.isfinite(heads[name]).any()]


def _figures(result: Heads, listed: Sequence[str]) -> Iterator[Block]:
    """Draw maps of heads: how well lines explain, all measures side by side, and each listed measure by itself."""
    heads = result.table("heads")
    if is_described(result):
        yield HeadMap(printed="never", figure="explained", heads=heads, column="kl_explained")
    # Maps with the same `figure` share one.
    defined = _defined_measures(result)
    title = f"{amount(len(defined), 'measure')} of its heads" if len(defined) > 1 else ""
    for name in defined:
        yield HeadMap(printed="never", figure="measures", title=title, heads=heads, column=name)
    for name in listed:
        if name in defined:
            yield HeadMap(printed="never", figure=f"measure-{name}", heads=heads, column=name)
