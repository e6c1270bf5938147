"""A trace in the terminal: each step with its shape, its formula, the line of NumPy, and its numbers."""

from __future__ import annotations

import math

import numpy as np
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.teaching.trace import Step, Trace, name_range
from attnscope.report.matrix import matrix
from attnscope.report.plain_text import safe, spell_out_parts
from attnscope.report.table import TextColumn, TextTable

_PLURAL = {
    "query": ("query", "queries"),
    "key": ("key", "keys"),
    "column": ("column", "columns"),
    "joined": ("column", "columns"),
    "output": ("column", "columns"),
    "pair": ("pair", "pairs"),
    "sink": ("sink", "sinks"),
}


def show(trace: Trace, console: Console) -> RenderableType:
    """The whole trace, step by step.

    Numbers have four decimals. What is too wide for the terminal goes on below (keys) or is left out in the middle
    (columns), where a mark says so; `--json` has all of it.
    """
    parts: list[RenderableType] = [draw_heading(trace)]
    head: int | None = -1
    for number, step in enumerate(trace.steps, start=1):
        if step.head != head:
            head = step.head
            parts.append(Text(f"\n{name_section(trace, head)}", style="bold underline"))
        parts += [*draw_title(step, number), *draw_numbers(trace, step, console)]
    parts.append(_check_line(trace))
    return spell_out_parts(parts, console)


def draw_heading(trace: Trace) -> Text:
    """Which heads are traced, and for which query."""
    by_hand = trace.run.get("model", "") == "worked example"
    where = "worked example" if by_hand else f"{trace.kind} layer {trace.layer}"
    grouped = "" if trace.n_kv_heads == trace.n_heads else f" on {trace.n_kv_heads} key/value heads"
    query = "all queries" if trace.query is None else f"query {trace.queries[trace.query]!r} (token {trace.query})"
    model = "" if by_hand or "model" not in trace.run else f"{trace.run['model']}, "
    return Text(safe(f"{model}{where}: {amount(trace.n_heads, 'head')}{grouped}; {query}"), style="bold")


def name_section(trace: Trace, head: int | None) -> str:
    """The heading above the steps of a head, or above those of all heads."""
    return "All heads together" if head is None else f"Head {head} (of heads 0 to {trace.n_heads - 1})"


def draw_title(step: Step, number: int) -> list[Text]:
    """The lines above the numbers of a step: its title and shape, its formula, and its line of NumPy."""
    shape = ", ".join(
        f"{size} {_PLURAL[axis][size != 1]}" for axis, size in zip(step.axes, step.value.shape, strict=True)
    )
    return [
        Text.assemble((f"\n{number:>2}  {safe(step.title)}", "bold"), (f"  ({shape})", "dim")),
        Text(f"    {safe(step.formula)}"),
        Text(f"    {safe(step.code)}", style="cyan"),
    ]


def draw_numbers(trace: Trace, step: Step, console: Console) -> list[RenderableType]:
    """The numbers of a step."""
    if step.name == "scores_by_pair":
        return _bands(trace, step, console)
    labels = {"query": trace.queries, "key": trace.keys}
    names = labels.get(step.axes[0]) if step.value.ndim == 2 else None
    bold = step.name == "weights"
    return [matrix(np.atleast_2d(step.value), names, labels.get(step.axes[-1]), console, bold=bold)]


def _bands(trace: Trace, step: Step, console: Console) -> list[RenderableType]:
    """Rotary positions by wavelength: what each band adds to the score of each key, and near against far."""
    bands = [band for band in trace.bands if band.head == step.head]
    names = [f"{name_range(band.low, band.high)} ({band.n_pairs})" for band in bands]
    scores = np.array([band.scores for band in bands]).reshape(len(bands), -1)
    columns = [
        TextColumn("", lambda row: row[0], style="dim"),
        TextColumn("", lambda row: f"near {_with_sign(row[1].near):>8}"),
        TextColumn("", lambda row: f"far {_with_sign(row[1].far):>8}"),
    ]
    return [
        Text("    by wavelength in tokens (how many pairs):", style="dim"),
        matrix(scores, names, trace.keys, console, label_cells=max(map(len, names), default=0)),
        Text("    near (at most 3 tokens away) and far, against the mean over all keys:", style="dim"),
        Padding(TextTable(columns, zip(names, bands, strict=True), header=False), (0, 0, 0, 4), expand=False),
    ]


def _check_line(trace: Trace) -> Text:
    check = trace.check
    parts = [f"outputs differ by at most {check.outputs:.1e}"]
    if not math.isnan(check.weights):
        parts.insert(0, f"weights differ by at most {check.weights:.1e}")
    if not math.isnan(check.projected) and any(step.name == "output" for step in trace.steps):
        parts.append(f"after W_O by {check.projected:.1e}")
    return Text(f"\nagainst {safe(check.kernel)}: {', '.join(parts)}", style="dim")


def _with_sign(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:+.4f}"
