"""Show the steps of a computation in the terminal: title and shape, formula, line of NumPy, numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console, RenderableType
from rich.text import Text

from attnscope.report.matrix import matrix
from attnscope.report.plain_text import safe

_ONE = {"query": "query", "key": "key", "sink": "sink"}
_SEVERAL = {"query": "queries", "key": "keys", "sink": "sinks"}
"""What an axis has; other axes have columns."""


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
    step: Mapping[str, Any], tokens: Mapping[str, Sequence[str]], console: Console
) -> list[RenderableType]:
    """Return the numbers of a step.

    They have four decimals. What is too wide for the terminal goes on below (keys), or is left out in the middle
    (columns), where a mark says so.
    """
    value, axes = step["value"], step["axes"]
    names = tokens.get(axes[0]) if value.ndim == 2 else None
    is_bold = step["name"] == "weights"
    return [matrix(np.atleast_2d(value), names, tokens.get(axes[-1]), console, bold=is_bold)]
