"""Steps of a computation in the terminal: title and shape, formula, line of NumPy, numbers. It knows no question."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from attnscope.report.matrix import matrix
from attnscope.report.plain_text import safe
from attnscope.report.table import TextColumn, TextTable
from attnscope.results.table import Table

_ONE = {"query": "query", "key": "key", "pair": "pair", "sink": "sink"}
_SEVERAL = {"query": "queries", "key": "keys", "pair": "pairs", "sink": "sinks"}
"""What an axis has; other axes have columns."""

Bands = Callable[[], tuple[Table, NDArray[np.float64]]]
"""Returns bands of wavelengths, and what each adds to the score of each key."""


def draw_section(title: str) -> Text:
    """Return the heading above steps that belong together."""
    return Text(f"\n{title}", style="bold underline")


def draw_title(step: Mapping[str, Any], number: int) -> list[Text]:
    """Return the lines above the numbers of a step: its title and shape, its formula, and its line of NumPy."""
    sizes = []
    for axis, size in zip(step["axes"], step["value"].shape, strict=True):
        sizes.append(f"{size} {_ONE.get(axis, 'column') if size == 1 else _SEVERAL.get(axis, 'columns')}")
    return [
        Text.assemble((f"\n{number:>2}  {safe(step['title'])}", "bold"), (f"  ({', '.join(sizes)})", "dim")),
        Text(f"    {safe(step['formula'])}"),
        Text(f"    {safe(step['code'])}", style="cyan"),
    ]


def draw_numbers(
    step: Mapping[str, Any], tokens: Mapping[str, Sequence[str]], bands: Bands, console: Console
) -> list[RenderableType]:
    """Return the numbers of a step.

    They have four decimals. What is too wide for the terminal goes on below (keys), or is left out in the middle
    (columns), where a mark says so.
    """
    if step["name"] == "scores_by_pair":
        return _draw_bands(*bands(), tokens["key"], console)
    value, axes = step["value"], step["axes"]
    names = tokens.get(axes[0]) if value.ndim == 2 else None
    is_bold = step["name"] == "weights"
    return [matrix(np.atleast_2d(value), names, tokens.get(axes[-1]), console, bold=is_bold)]


def _draw_bands(
    bands: Table, scores: NDArray[np.float64], keys: Sequence[str], console: Console
) -> list[RenderableType]:
    """Return rotary positions by wavelength: what each band adds to the score of each key, and near against far."""
    names = [
        f"{name_range(low, high)} ({n_pairs})"
        for low, high, n_pairs in zip(bands["low"], bands["high"], bands["n_pairs"], strict=True)
    ]
    columns = [
        TextColumn("", lambda row: names[row], style="dim"),
        TextColumn("", lambda row: f"near {_with_sign(bands['near'][row]):>8}"),
        TextColumn("", lambda row: f"far {_with_sign(bands['far'][row]):>8}"),
    ]
    near_and_far = TextTable(columns, range(len(bands)), header=False)
    return [
        Text("    by wavelength in tokens (how many pairs):", style="dim"),
        matrix(scores, names, keys, console, label_cells=max(map(len, names), default=0)),
        Text("    near (at most 3 tokens away) and far, against the mean over all keys:", style="dim"),
        Padding(near_and_far, (0, 0, 0, 4), expand=False),
    ]


def name_range(low: float, high: float) -> str:
    """Return what a band of wavelengths is called, such as "10 to 100"."""
    if low == 0:
        return f"below {high:g}"
    return f"{low:g} and more" if math.isinf(high) else f"{low:g} to {high:g}"


def _with_sign(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:+.4f}"
