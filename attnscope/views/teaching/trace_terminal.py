"""A trace in the terminal: each step with its shape, its formula, the line of NumPy, and its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.teaching.trace import Step, Trace
from attnscope.views.tables.matrix import chunks, matrix
from attnscope.views.tables.numbers import four_decimals
from attnscope.views.tables.plain_text import cut, safe, spell_out_text

_PLURAL = {
    "query": ("query", "queries"),
    "key": ("key", "keys"),
    "column": ("column", "columns"),
    "joined": ("column", "columns"),
    "output": ("column", "columns"),
    "pair": ("pair", "pairs"),
    "sink": ("sink", "sinks"),
}


def show(trace: Trace, console: Console) -> None:
    """Prints a trace step by step."""
    console.print(walk(trace, console), highlight=False)


def walk(trace: Trace, console: Console) -> RenderableType:
    """The whole trace, step by step.

    Numbers have four decimals. What is too wide for the terminal goes on below (keys) or is left out in the middle
    (columns), where a mark says so; `--json` has all of it.
    """
    parts: list[RenderableType] = [_heading(trace)]
    head: int | None = -1
    for number, step in enumerate(trace.steps, start=1):
        if step.head != head:
            head = step.head
            parts.append(Text(f"\n{_section(trace, head)}", style="bold underline"))
        parts.append(_step(trace, step, number, console))
    parts.append(_check_line(trace))
    return Group(*(spell_out_text(part, console) if isinstance(part, Text) else part for part in parts))


def _heading(trace: Trace) -> Text:
    by_hand = trace.run.get("model", "") == "worked example"
    where = "worked example" if by_hand else f"{trace.kind} layer {trace.layer}"
    grouped = "" if trace.n_kv_heads == trace.n_heads else f" on {trace.n_kv_heads} key/value heads"
    query = "all queries" if trace.query is None else f"query {trace.queries[trace.query]!r} (token {trace.query})"
    model = "" if by_hand or "model" not in trace.run else f"{trace.run['model']}, "
    return Text(safe(f"{model}{where}: {amount(trace.n_heads, 'head')}{grouped}; {query}"), style="bold")


def _section(trace: Trace, head: int | None) -> str:
    return "All heads together" if head is None else f"Head {head} of 0 to {trace.n_heads - 1}"


def _step(trace: Trace, step: Step, number: int, console: Console) -> Text:
    shape = ", ".join(
        f"{size} {_PLURAL[axis][size != 1]}" for axis, size in zip(step.axes, step.value.shape, strict=True)
    )
    lines = Text()
    lines.append(f"\n{number:>2}  {safe(step.title)}", style="bold")
    lines.append(f"  ({shape})\n", style="dim")
    lines.append(f"    {safe(step.formula)}\n")
    lines.append(f"    {safe(step.code)}\n", style="cyan")
    if step.name == "scores_by_pair":
        _bands(lines, trace, step, console)
    else:
        _numbers(lines, trace, step, console)
    lines.right_crop(1)
    return lines


def _numbers(lines: Text, trace: Trace, step: Step, console: Console) -> None:
    rows = step.value if step.value.ndim == 2 else step.value[None]
    names = _labels(trace, step.axes[0]) if step.value.ndim == 2 else None
    columns = _labels(trace, step.axes[-1])
    matrix(lines, rows, names, columns, console, bold=step.name == "weights")


def _labels(trace: Trace, axis: str) -> Sequence[str] | None:
    return {"query": trace.queries, "key": trace.keys}.get(axis)


def _bands(lines: Text, trace: Trace, step: Step, console: Console) -> None:
    """Rotary positions by wavelength: what each band adds to the score of each key, and near against far."""
    bands = [band for band in trace.bands if band.head == step.head]
    names = [f"{_range(band.low, band.high)} ({band.n_pairs})" for band in bands]
    lines.append("    by wavelength in tokens (how many pairs):\n", style="dim")
    width = max((len(name) for name in names), default=0)
    heads = [cut(safe(label), 10) for label in trace.keys]
    cell = max(7, *(cell_len(head) for head in heads))
    room = max(1, (console.width - width - 4) // (cell + 2))
    for chunk in chunks(len(heads), room, goes_on=True):
        labels = ["…" if at is None else heads[at] for at in chunk]
        lines.append(" " * (4 + width))
        lines.append("".join("  " + " " * (cell - cell_len(h)) + h for h in labels) + "\n", style="dim")
        for name, band in zip(names, bands, strict=True):
            lines.append(f"    {name:<{width}}", style="dim")
            cells = ("…" if at is None else four_decimals(band.scores[at]) for at in chunk)
            lines.append("".join(f"  {text:>{cell}}" for text in cells) + "\n")
    lines.append("    near (at most 3 tokens away) and far, against the mean over all keys:\n", style="dim")
    for name, band in zip(names, bands, strict=True):
        lines.append(f"    {name:<{width}}", style="dim")
        lines.append(f"  near {_with_sign(band.near):>8}  far {_with_sign(band.far):>8}\n")


def _range(low: float, high: float) -> str:
    if low == 0:
        return f"below {high:g}"
    return f"{low:g} and more" if math.isinf(high) else f"{low:g} to {high:g}"


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
