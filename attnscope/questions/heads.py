"""Declare the result of `attnscope heads`, which says what each head of a model does: its columns and its report.

Measures are numbers per head, such as the weight on the previous token. A role, such as "previous_token", is a measure
that passed a statistical test. A description is a line in words, fitted to the head's attention. Sinks are keys to
which heads attend when they have nothing to do: special tokens and the first token.

`head_lines` writes the line of each head, `head_roles` shows roles. Loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from attnscope.arrays import Floats
from attnscope.errors import AttnscopeError, amount, require_choice
from attnscope.questions.head_lines import (
    explain_descriptions,
    is_described,
    order_heads,
    require_sort,
    yield_line_blocks,
)
from attnscope.questions.head_roles import (
    count_first_roles,
    explain_few_texts,
    explain_roles,
    find_first_role_rows,
)
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
from attnscope.results.table import HEADS, Column, Table, count, flag, share, text
from attnscope.results.table import number as number_column

_MAPPED_MEASURES = ("distance_patches", "monotonicity")
"""The measures that a map of heads shows: the first for pictures, the second for recordings."""

_USUAL_CSV_COLUMNS = (
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
"""The columns of a CSV file without --all."""

ALL_LENGTHS = 0
"""The value of the column `length` of the table `written` in its row over all lengths and depths."""

ROLE_COLUMN = text(
    "role", "its roles, the strongest first but sinks last, with + between them; empty = it has none"
)

SINK_SHARE_COLUMN = share(
    "resting_share", "share of its attention on sinks: special tokens and the first", label="sink share"
)

ROLE_EVIDENCE_COLUMNS = (
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
"""The columns of the table `roles`. The rows of a head stand together: the strongest role first, sink roles last."""

DESCRIPTION_COLUMNS = (
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
"""The columns that the table `heads` has if heads were described."""


class Heads(Result):
    """Hold the measures, roles and descriptions of every head of a model on a corpus.

    - `heads` has the roles of each head and every measure under its name, with its interval, its baseline (the value
      under uniform attention) and its count (the effective number of queries). It also has the effect of ablating the
      head, if the user asked for it (`--causal`), and the columns of descriptions, if heads were described.
    - `roles` is the evidence for roles.
    - `terms` holds the terms of each description. `failures` and `expected` show the tokens whose attention the
      descriptions predict worst.
    - `control` has the heads of the same architecture with random weights.
    - `written` is there if texts are haystacks with needles (`--probe needle`): long texts with sentences to find. It
      says which share of the needles the model writes.
    """

    SCHEMA: ClassVar[str] = "attnscope.heads/2"
    TABLES: ClassVar[Mapping[str, Sequence[Column]]] = {
        "heads": (*HEADS, ROLE_COLUMN, SINK_SHARE_COLUMN),
        "roles": ROLE_EVIDENCE_COLUMNS,
        "control": (*HEADS, ROLE_COLUMN),
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
        """Return the names of the measures that the table `heads` has, in the order of the study."""
        heads = self.table("heads")
        return [name for name in self.options.get("measures", ()) if name in heads]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of attention, in the order of the heads: "encoder", "decoder" or "cross"."""
        return tuple(dict.fromkeys(self.table("heads")["kind"].tolist()))

    @property
    def is_described(self) -> bool:
        """Return whether heads have descriptions."""
        return is_described(self)

    def row(self, layer: int, head: int, kind: str | None = None) -> int:
        """Return the row of a head in the table `heads`.

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
        """Return the rows of the table `roles` of one head, given by its row in the table `heads`."""
        roles = self.table("roles")
        return roles.select(roles["head"] == row)

    @property
    def usual_columns(self) -> Sequence[str]:
        """Return the columns of a CSV file without --all; empty = all columns, if heads were not described."""
        return _USUAL_CSV_COLUMNS if is_described(self) else ()

    def rows(self) -> Iterable[Sequence[Any]]:
        """Return the rows of a CSV file: names of columns, then the heads, with the value of each head's first role."""
        heads = self.table("heads")
        roles = self.table("roles")
        if not len(roles):
            return heads.rows()
        # Value, interval and baseline of the first role, (head,) each. The row of a head without a role is -1, which
        # reads some value, and `np.where` replaces it by NaN.
        role_rows = find_first_role_rows(self)
        has_role = role_rows >= 0
        values = np.where(has_role, roles["value"][role_rows], np.nan)
        estimates = {}
        for estimate in ("low", "high", "baseline"):
            estimates[estimate] = np.where(
                has_role, roles.companion("value", estimate)[role_rows], np.nan
            )
        column = number_column("role_value", "value of the measure that its first role rests on")
        return heads.with_column(column, values, **estimates).rows()

    def report(
        self, *, measures: str | None = None, sort: str | None = None, full_result: Heads | None = None
    ) -> Report:
        """Return the report: what heads do, then numbers and figures.

        Args:
            measures: The names of measures to list for every head, joined by commas, or "all". Each of them gets a
                figure of its own. None = none.
            sort: The order of the list of heads: "layer", "explained" or "entropy". None = a short list of the heads
                with most to say.
            full_result: If the user picked heads, the result before, which has all heads. A head that was picked alone
                is ranked among them. None = no heads were picked.

        Raises:
            AttnscopeError: There is no such measure or order.
        """
        require_sort(sort)
        heads = self.table("heads")
        is_chosen = full_result is not None and len(heads) < len(full_result.table("heads"))
        listed_measures = parse_measures(measures, self.measure_names)
        blocks: list[Block] = []
        # What heads do: of pictures and recordings by measures, of texts by roles and descriptions.
        if is_of_pictures_or_sound(self):
            blocks += _yield_senses_blocks(self)
        elif len(self.table("roles")) or is_described(self):
            blocks += yield_line_blocks(self, sort, is_chosen=is_chosen)
        blocks += _yield_needle_blocks(self)
        # Numbers: all measures of one picked head, or the listed measures of all heads. One pick, such as L3H1, may be
        # several rows: an encoder-decoder has an L3H1 in each kind of attention.
        if is_chosen and len({*heads.layer_heads}) == 1:
            for row in range(len(heads)):
                blocks.append(_rank_one_head(self, row, full_result or self))
        elif listed_measures:
            blocks.append(_rank_all_heads(self, listed_measures, sort))
        blocks += _yield_figure_blocks(self, listed_measures)
        notes = explain_descriptions(self)
        return report_on(
            self,
            _summarize(self),
            blocks,
            _explain_columns(self),
            subtitle=corpus_line(self),
            notes=notes,
        )


def make_heads_table(
    kinds_layers_heads: Sequence[Any],
    columns: Sequence[Column],
    *,
    roles: Sequence[str],
    sink_shares: Floats,
    **estimates: Floats,
) -> Table:
    """Return the table `heads` with the columns of some measures.

    Args:
        kinds_layers_heads: The kind of attention, the layer and the number of each head: three sequences, (head,) each.
        columns: The columns of the measures, (measure,).
        roles: The values of the column "role", (head,).
        sink_shares: The values of the column "resting_share", (head,).
        estimates: Arrays named value, low, high, baseline and count, (head, measure) each.
    """
    kinds, layers, head_numbers = kinds_layers_heads
    values: dict[str, Any] = {
        "kind": kinds,
        "layer": layers,
        "head": head_numbers,
        "role": roles,
        "resting_share": sink_shares,
    }
    # The column "entropy_nats" holds the value, "entropy_nats_low" the lower end of its interval.
    for measure, column in enumerate(columns):
        for estimate, by_measure in estimates.items():
            ending = "" if estimate == "value" else f"_{estimate}"
            values[f"{column.name}{ending}"] = by_measure[:, measure]
    return Table.of_arrays([*Heads.TABLES["heads"], *columns], **values)


# Sentences


def _summarize(result: Heads) -> list[str]:
    """Say how many heads do what, how to read the columns of the list, and how sure roles are."""
    all_heads = amount(len(result.table("heads")), "head")
    model = model_of(result.run)
    # Pictures and recordings have measures, but no roles.
    if is_of_pictures_or_sound(result):
        return [f"{model}: what its {all_heads} measure on {corpus_line(result)}"]
    # If the texts are too few for roles, `explain_roles` says so at the end.
    answer = []
    if counts_phrase := count_first_roles(result):
        answer.append(f"{model}: {counts_phrase}")
    elif not explain_few_texts(result):
        answer.append(f"{model}: none of its {all_heads} has a role")
    if len(result.table("roles")):
        answer.append(
            "value: the role's measure, such as weight on the previous token [95% interval]; *: of attention outside "
            "sinks; KL explained: how well the words predict that"
        )
    return [*answer, *explain_roles(result)]


def _explain_columns(result: Heads) -> list[str]:
    """Explain the column "KL explained", or why heads are not described; for pictures and recordings "uniform"."""
    if is_of_pictures_or_sound(result):
        return ["uniform: the value of a head that attends to all keys alike"]
    guide = []
    if is_described(result):
        guide.append(
            "KL explained: the share of what sets attention outside sinks apart from uniform that the line predicts on "
            "held-out texts; a line says where a head looks, not why"
        )
    # The option is there although no head has a description: descriptions were wanted, but there was one text.
    elif "described" in result.options:
        guide.append(
            "Heads are not described: that takes at least two texts (or chunks of a long one), as what is found on one "
            "is tried on another"
        )
    return guide


# Measures


def parse_measures(measures: str | None, known_names: Sequence[str]) -> list[str]:
    """Return the measures in a list such as "induction,local"; "all" = every known measure, None = no measure.

    Raises:
        UsageError: There is no such measure.
    """
    if measures is None:
        return []
    names = list(known_names) if measures == "all" else [name.strip() for name in measures.split(",")]
    for name in names:
        require_choice("measure", name, known_names)
    return names


def _rank_all_heads(result: Heads, names: Sequence[str], sort: str | None) -> Ranking:
    """List some measures of every head, with their intervals."""
    heads = result.table("heads")
    notes = [printable(f"{name}: {heads.columns[name].meaning}") for name in names]
    return rank_heads(
        result, names, order_heads(result, sort), heading="measures", n_printed=len(heads), notes=notes
    )


def _rank_one_head(result: Heads, row: int, full_result: Heads) -> Ranking:
    """List all measures of one head, with its rank among the heads of its kind of attention."""
    heads = result.table("heads")
    kind_heads = full_result.table("heads")
    kind_heads = kind_heads.select(kind_heads["kind"] == heads["kind"][row])
    names = result.measure_names

    # If a measure is undefined for this head, its rank is, too.
    ranks = [UNDEFINED] * len(names)
    for measure, name in enumerate(names):
        value = heads[name][row]
        if math.isfinite(value):
            ranks[measure] = str(1 + int((kind_heads[name] > value).sum()))
    return Ranking(
        header=result.head_names[row],
        names=[title_of(heads.columns[name]) for name in names],
        table=_tabulate_measures(heads, names, [row] * len(names), "value"),
        columns=["value", "uniform", WordsColumn(f"rank of {len(kind_heads)}", ranks)],
        noun="measure",
        notes=[
            "rank: 1 = the largest value; uniform: the value under uniform attention over the same keys"
        ],
    )


def _tabulate_measures(
    heads: Table, names: Sequence[str], rows: Sequence[int], value_column: str
) -> Table:
    """Return a table with a row per measure: the value of one head, its interval and its baseline.

    Args:
        heads: The table of heads.
        names: The names of the measures, (measure,).
        rows: For each measure the row of the head in `heads`, (measure,).
        value_column: The name of the column of values. The column of baselines is "uniform".
    """
    # (value, low, high) of each measure, (measure, 3).
    estimates = []
    baselines = []
    for name, row in zip(names, rows, strict=True):
        estimates.append(heads.interval(name)[row])
        baselines.append(heads.companion(name, "baseline")[row])
    values, low, high = np.array(estimates).T
    table = Table({}, {}).with_column(number_column(value_column), values, low=low, high=high)
    return table.with_column(number_column("uniform"), baselines)


def _yield_senses_blocks(result: Heads) -> Iterator[Block]:
    """Yield a map of one measure of pictures or recordings, then the head with the largest value of each measure."""
    heads = result.table("heads")
    names = _list_defined_measures(result)
    if not names:
        return
    mapped_name = next((name for name in _MAPPED_MEASURES if name in names), names[0])
    column = heads.columns[mapped_name]
    yield HeadMap(
        heading=f"{title_of(column)}: {printable(column.meaning)}", heads=heads, column=mapped_name
    )
    # The row of the head with the largest value of each measure, (measure,).
    top_heads = [int(np.nanargmax(heads[name])) for name in names]
    yield Ranking(
        header="measure",
        names=list(map(printable, names)),
        table=_tabulate_measures(heads, names, top_heads, "largest"),
        columns=[
            "largest",
            WordsColumn("head", np.array(result.head_names)[top_heads].tolist()),
            "uniform",
        ],
    )


def _yield_needle_blocks(result: Heads) -> Iterator[Block]:
    """Yield a table of the share of needle tokens that the model writes, if texts are haystacks with needles.

    It has a row per length of the haystack and a column per depth of the needle.
    """
    shares_table = result.table("written")
    if not len(shares_table):
        return
    cells_table = shares_table.select(shares_table["length"] != ALL_LENGTHS)
    # Lengths and depths in ascending order, and the row and column of each cell, (cell,).
    lengths, length_of_cell = np.unique(cells_table["length"], return_inverse=True)
    depths, depth_of_cell = np.unique(cells_table["depth"], return_inverse=True)
    # (length, depth)
    shares = np.full((len(lengths), len(depths)), np.nan)
    shares[length_of_cell, depth_of_cell] = cells_table["copied"]
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


def _list_defined_measures(result: Heads) -> list[str]:
    """Return the measures with a number for at least one head. Those of patches are NaN for recordings."""
    heads = result.table("heads")
    return [name for name in result.measure_names if np.isfinite(heads[name]).any()]


def _yield_figure_blocks(result: Heads, listed_measures: Sequence[str]) -> Iterator[Block]:
    """Yield maps of heads that figures show: KL explained, all measures side by side, then each listed measure."""
    heads = result.table("heads")
    if is_described(result):
        yield HeadMap(printed="never", figure="explained", heads=heads, column="kl_explained")
    # Blocks with the same `figure` are drawn side by side on one figure.
    defined_measures = _list_defined_measures(result)
    title = (
        f"{amount(len(defined_measures), 'measure')} of its heads" if len(defined_measures) > 1 else ""
    )
    for name in defined_measures:
        yield HeadMap(printed="never", figure="measures", title=title, heads=heads, column=name)
    for name in listed_measures:
        if name in defined_measures:
            yield HeadMap(printed="never", figure=f"measure-{name}", heads=heads, column=name)
