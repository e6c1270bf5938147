"""Queries and keys of heads as figures: points in the directions that make the scores, with the tokens furthest out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.records.atlas.planes import Points
from attnscope.records.atlas.record import Atlas
from attnscope.views.drawing.canvas import FAINT, LINE, Drawing, matplotlib_defaults
from attnscope.views.drawing.layout import Paper
from attnscope.views.drawing.lettering import lettering_for
from attnscope.views.drawing.plots import COLORS, Sheet, write_foot
from attnscope.views.drawing.style import USUAL, Style
from attnscope.views.tables.plain_text import cut
from attnscope.views.tables.wording import corpus_line, full_name, model_of, printable

_MOST = 12
"""Heads on one page; of more there is a page a layer."""

_LARGE = 4
"""Heads up to which tokens are named."""

_NAMED = 14  # tokens of a side that are named where there is room
_TURNED = {
    "before": "queries and keys as they are before rotary positions: scores of two tokens at the same position",
    "after": "queries and keys as rotary positions turned them",
}


def pages(atlas: Atlas, style: Style = USUAL) -> Iterator[tuple[str, Drawing]]:
    """The figures one after the other: `planes`, or of many heads `planes-L0`, a page a layer."""
    if not atlas.planes:
        raise AttnscopeError(
            "this atlas does not know queries and keys",
            "it is of an earlier version, of a part, or of a model whose attention does not pass the seam",
        )
    heads, paper = list(range(len(atlas.heads))), style.paper
    if len(heads) <= _MOST:
        yield "planes", planes_drawing(atlas, heads, paper)
        return
    layers = [(head.kind, head.layer) for head in atlas.heads]
    several = len({kind for kind, _ in layers}) > 1
    for kind, layer in dict.fromkeys(layers):
        heads_of_layer = [head for head in heads if layers[head] == (kind, layer)]
        yield f"planes-{f'{kind}-' * several}L{layer}", planes_drawing(atlas, heads_of_layer, paper)


@matplotlib_defaults()
def planes_drawing(atlas: Atlas, heads: Sequence[int], paper: Paper) -> Drawing:
    """The figure of some heads, by their places in the atlas: a panel each."""
    points = [points for head in heads if (points := atlas.points_of(head)) is not None]
    notes = [
        "blue dots: queries; orange squares: keys; a query looks for keys that lie in its own direction from 0",
        "percentages: shares of the variance of the scores of all sampled queries with all sampled keys; "
        f"were all directions alike: {100 / points[0].plane.d_head:.0f}% each",
        "by position: how much of the keys' spread their position in the text accounts for",
        *(_TURNED[turned] for turned in dict.fromkeys(of_head.plane.turned for of_head in points) if turned in _TURNED),
        corpus_line(atlas.findings),
    ]
    labels = sorted({printable(token.label) for of_head in points for token in of_head.tokens})
    lettering = lettering_for([model_of(atlas.run), *notes, *labels], paper)
    sheet = Sheet.on(paper, lettering)
    across = min(len(heads), 1 if sheet.stacked else 2 if len(heads) in (2, 4) else 3 if len(heads) < 7 else 4)
    rows, size, foot = math.ceil(len(heads) / across), sheet.size, write_foot(notes, sheet)
    gap = 0.62 * size
    wide = min((sheet.width - 0.3 * size) / across - gap, 7.2 * size)
    above, pitch = sheet.above, wide + 0.95 * size
    height = above + rows * pitch + foot.height
    subtitle = f"queries and keys of {len(points[0].tokens)} tokens"
    figure = sheet.open_figure(height, model_of(atlas.run), subtitle)
    for number, (head, of_head) in enumerate(zip(heads, points, strict=True)):
        left = 0.3 * size + gap * 0.6 + (number % across) * (wide + gap)
        top = above + 0.35 * size + number // across * pitch
        box = (left / sheet.width, 1 - (top + wide) / height, wide / sheet.width, wide / height)
        axes = figure.add_axes(box)
        _draw_head(axes, of_head, full_name(atlas.heads[head], atlas.findings), wide, sheet, named=len(heads) <= _LARGE)
    foot.write(figure)
    return Drawing(figure, lettering.families)


def _draw_head(axes: Any, points: Points, name: str, wide: float, sheet: Sheet, *, named: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    size, explained = sheet.size, [100 * share for share in points.plane.explained]
    axes.axhline(0, color=LINE, linewidth=0.7 * size, zorder=0)
    axes.axvline(0, color=LINE, linewidth=0.7 * size, zorder=0)
    look: Any = {"s": (14 if named else 5) * size**2, "linewidths": 0, "alpha": 0.6}
    axes.scatter(*points.queries[:, :2].T, marker="o", color=COLORS[0], **look)
    axes.scatter(*points.keys[:, :2].T, marker="s", color=COLORS[1], **look)
    middle, most = _window(points)
    for centre, set_ticks, set_limits in (
        (middle[0], axes.set_xticks, axes.set_xlim),
        (middle[1], axes.set_yticks, axes.set_ylim),
    ):
        ticks = MaxNLocator(5).tick_values(centre - most, centre + most)
        set_ticks([tick for tick in ticks if abs(tick - centre) < 0.97 * most])
        set_limits(centre - most, centre + most)
    label: Any = {"fontsize": 9 * size, "family": sheet.families, "parse_math": False}
    axes.set_title(name, fontsize=10.5 * size, family=sheet.families, parse_math=False, loc="left", pad=4 * size)
    by_place = [f", {100 * share:.0f}% by position" if share > 0.5 and named else "" for share in points.plane.by_place]
    axes.set_xlabel(f"direction 1: {explained[0]:.0f}%{by_place[0]}", labelpad=2 * size, **label)
    axes.set_ylabel(f"direction 2: {explained[1]:.0f}%{by_place[1]}", labelpad=0, **label)
    axes.tick_params(labelsize=9 * size, length=2 * size, colors=FAINT)
    for text in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        text.set_family(sheet.families)
    for side in axes.spines.values():
        side.set_color(LINE)
    if not named:
        return
    taken: list[tuple[float, float, float]] = []
    for places, color in ((points.queries, COLORS[0]), (points.keys, COLORS[1])):
        _name_furthest(axes, places[:, :2], points, color, taken, (middle, most), wide, sheet)


def _window(points: Points) -> tuple[NDArray[np.float64], float]:
    """Middle and half the side of the smallest square with all points and 0, and room around them."""
    positions = np.concatenate([points.queries[:, :2], points.keys[:, :2], np.zeros((1, 2))]).astype(np.float64)
    low, high = positions.min(0), positions.max(0)
    return (low + high) / 2, 0.55 * float((high - low).max()) or 1.0


def _name_furthest(
    axes: Any,
    places: NDArray[np.float32],
    points: Points,
    color: str,
    taken: list[tuple[float, float, float]],
    window: tuple[NDArray[np.float64], float],
    wide: float,
    sheet: Sheet,
) -> None:
    """Names the tokens that are furthest out, once each, where no other name stands."""
    from matplotlib.patheffects import withStroke

    middle, most = window
    letter = 9 * sheet.size / 72 / wide * 2 * most  # its height, in the plot's own unit
    step, seen, count = 1.3 * letter, set(), 0
    for token in np.argsort(-np.abs(places).max(1), kind="stable"):
        label = cut(printable(points.tokens[token].label), 12)
        x, y = (float(part) for part in places[token])
        half = 0.33 * letter * len(label)
        if label in seen or any(abs(y - v) < step and abs(x - u) < half + w for u, v, w in taken):
            continue
        if abs(x - middle[0]) + half > most or y - middle[1] + 1.6 * letter > most:
            continue
        seen.add(label)
        taken.append((x, y, half))
        name = axes.annotate(
            label, (x, y), (0, 3 * sheet.size), textcoords="offset points", ha="center", va="bottom", color=color,
            fontsize=9 * sheet.size, family=sheet.families, parse_math=False,
        )  # fmt: skip
        name.set_path_effects([withStroke(linewidth=2.2 * sheet.size, foreground="white")])
        count += 1
        if count == _NAMED:
            return
