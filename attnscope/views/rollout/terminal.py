"""Attention rollout as tables in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, Group, RenderableType
from rich.text import Text

from attnscope.records import Tokens
from attnscope.records.maps.pictures import MEAN
from attnscope.records.maps.rollouts import METHODS, Rollout
from attnscope.report.plain_text import heading, list_numbers
from attnscope.report.table import TextColumn, TextTable

_NAMES = {"mean": "mean attention", "rollout": "rollout"}
_MOST = 3


def show(rollout: Rollout, console: Console, *, query: str | None = None) -> RenderableType:
    """The origin of tokens: of all after the last layer, or of those of a query after every layer."""
    labels, n_layers = rollout.tokens.labels, len(rollout.mean)

    def by_layer(title: str, tokens: Sequence[int]) -> Group:
        rows = [(f"L{layer}", layer, token) for layer in range(n_layers) for token in tokens]
        return _table(rollout, title, "layer", rows)

    if rollout.picture is not None and (query is None or query.casefold() == MEAN):
        return by_layer("the patches that CLS came from", rollout.tokens.find("CLS"))
    if query is None:
        title = f"where each token came from, after layer {n_layers - 1}"
        return _table(rollout, title, "token", [(label, n_layers - 1, token) for token, label in enumerate(labels)])
    return Group(
        *(by_layer(f"where “{labels[token]}” (token {token}) came from", [token]) for token in rollout.require(query))
    )


def _table(rollout: Rollout, title: str, first: str, rows: Sequence[tuple[str, int, int]]) -> Group:
    least = 0.005 if rollout.picture is None else 0.0

    def name_largest(method: str) -> Callable[[tuple[str, int, int]], Text]:
        shares = rollout.of(method)
        return lambda row: _name_largest(shares[row[1], row[2]], rollout.tokens, least)

    columns = [TextColumn(first, lambda row: row[0], wraps=True, least=16, style="bold")]
    columns += [TextColumn(_NAMES[method], name_largest(method), wraps=True, least=14) for method in METHODS]
    return Group(heading(title), TextTable(columns, rows))


def _name_largest(row: NDArray[np.float64], tokens: Tokens, least: float) -> Text:
    if np.isnan(row).any():
        return Text()
    largest = [key for key in np.argsort(-row, kind="stable")[:_MOST] if row[key] >= least]
    return list_numbers(
        ((tokens.labels[key], f"{row[key]:.2f}" if least else f"{row[key]:.3g}") for key in largest), "  "
    )
