"""Pooled maps of long texts as figures: the cells, what keys receive, queries' entropy, positions, far links."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, LINE, colormap
from attnscope.drawing.layout import Paper
from attnscope.drawing.lettering import lettering_for
from attnscope.drawing.page import Page
from attnscope.drawing.style import Style
from attnscope.errors import UsageError, amount
from attnscope.records.maps.pooled import Link, PooledHeatmap, around
from attnscope.report.numbers import weight
from attnscope.report.wording import run_notes
from attnscope.views.maps.pooling import DECADES, log_share, max_pool
from attnscope.views.maps.sheets import Sheet, sheets_of_heads

if TYPE_CHECKING:
    from matplotlib.colors import Colormap

_BAND, _MARK = "#2f6fb0", "#d1495b"
_LEAST_RECEIVED = 0.1
_LONGEST_TEXT = 2000
_HEADER_PX = layout.MARGIN_PX + 62
_SHOWN_LINKS, _LINK_PX = 10, 62
_SMALL_MAP_PX = 110
_LEAST_WIDTH_PX = 1100
_MEANING = {
    "mean": "share of attention that the queries of a row give to the keys of a column (logarithmic)",
    "max": "the largest weight in the cell (logarithmic)",
}
_SCALE = {"fixed": "", "head": ", ÷ the largest of the same head", "figure": ", ÷ the largest of this figure"}


def sheets_of(record: PooledHeatmap, query: str | None = None) -> list[Sheet]:
    """The figures that a record is drawn as: an overview and a figure a layer, or one for each head that was picked."""
    if query is not None:
        raise UsageError("pooled maps have no --query", "leave it out, or draw the exact part with heatmap --rows")
    sheets: list[Sheet] = []
    for number, attention in enumerate(record.maps):
        mark = f"{attention.kind}-" if len(record.maps) > 1 else ""
        if heads := record.chosen(attention):
            picked = record.picked is not None
            sheets += sheets_of_heads(heads, picked=picked, apart=True, number=number, before=mark)
    return sheets


def pages(record: PooledHeatmap, style: Style | None = None, query: str | None = None) -> Iterator[tuple[str, Page]]:
    """The figures one after the other, each with its file name without the ending."""
    return ((sheet.stem, _Page(record, sheet, style or Style())) for sheet in sheets_of(record, query))


@dataclass(frozen=True)
class _Plan:
    """The layout of a figure, in pixels."""

    width: int
    side: tuple[int, int]  # width and height of each map
    corners: Sequence[tuple[float, float]]
    strip: int  # thickness of the marginals above and at the right; 0 = none
    foot: int  # where the colour bar begins


class _Page(Page):
    """One figure."""

    def __init__(self, record: PooledHeatmap, sheet: Sheet, style: Style) -> None:
        self._record, self._sheet, self._style = record, sheet, style
        self._map = record.maps[sheet.map]
        links = self._map.links(*sheet.heads[0])[:_SHOWN_LINKS] if sheet.form == "single" else []
        self._ends = [
            (around(self._map.queries, link.query, 34), around(self._map.keys, link.key, 34)) for link in links
        ]
        title, subtitle = self._titles()
        lettering = lettering_for([title, subtitle, *(end for pair in self._ends for end in pair)], style.paper)
        plan = self._plan(style.paper)
        super().__init__(plan.width, lettering)
        self.head(title, subtitle, bold=1.1)
        cmap = colormap(style.cmap)
        tops = [max(float(self._map.of(*pair).max(initial=0.0)), 1e-30) for pair in sheet.heads]
        limits = style.limits(tops)
        self._draw_maps(plan, cmap, limits)
        if sheet.form == "overview":
            self.name_panels(sheet.names, plan.corners, plan.side, plan.side[0] + 4)
        else:
            self._marginals(plan)
            self._axes(plan)
        if sheet.form == "single":
            self._links(plan, links)
        bar = (layout.MARGIN_PX + 18, plan.foot, min(420, self.paper.room_px - 60), 14)
        top = limits[0] if style.scale == "figure" else 1.0
        powers = {float(step): f"{top * 10.0 ** (step - DECADES):g}" for step in range(DECADES + 1)}
        fits = self.draw_scale(bar, cmap, (0, DECADES), ticks=powers, meaning=self._meaning())
        meaning = [] if fits else [f"colour: {self._meaning()}"]
        self.finish(plan.foot + 62, [*meaning, *self._notes(), *lettering.notes])

    # Titles and notes -----------------------------------------------------------------------------------------------

    def _titles(self) -> tuple[str, str]:
        record, sheet, attention = self._record, self._sheet, self._map
        kind = f"{attention.kind} " if len(record.maps) > 1 else ""
        n = len(attention.keys) if attention.kind != "cross" else f"{len(attention.queries):,} × {len(attention.keys)}"
        tokens = amount(n, "token") if isinstance(n, int) else f"{n} tokens"
        text = " ".join(record.text[:_LONGEST_TEXT].split())
        return f"{record.run.get('model', 'model')} · {kind}{sheet.subject} · {tokens}", f"“{text}”"

    def _notes(self) -> list[str]:
        attention = self._map
        cells = "tokens" if attention.query_cell == attention.key_cell else "queries and keys"
        size = f"{attention.query_cell} × {attention.key_cell}"
        notes = [
            f"rows: queries (attend) · columns: keys (are attended to) · a cell holds {size} {cells}, exactly pooled"
        ]
        if self._sheet.form == "overview":
            if (fewer := -(-max(attention.cells.shape[2:]) // self._overview_room())) > 1:
                notes.append(f"drawn: the largest of {fewer} × {fewer} cells")
        else:
            notes.append(
                "above: mass that a key receives from all queries, the largest of its cell, logarithmic (dashed: 1, "
                "the average); right: entropy of a query's weights, the mean of its cell, 0 to ln(keys) nats"
            )
        if self._sheet.form == "single":
            far = "" if attention.far_tokens is None else f" over more than {attention.far_tokens} tokens"
            notes.append(f"numbered: the strongest links{far}, without special tokens and the first token as key")
        if attention.n_kv_heads < attention.n_heads:
            notes.append(f"{attention.n_heads} query heads share {amount(attention.n_kv_heads, 'key/value head')}")
        return notes + run_notes(self._record.run)

    def _meaning(self) -> str:
        return f"{_MEANING[self._record.pool]}{_SCALE[self._style.scale]}"

    # Where it stands ------------------------------------------------------------------------------------------------

    def _plan(self, paper: Paper) -> _Plan:
        return {"single": self._plan_single, "grid": self._plan_grid}.get(self._sheet.form, self._plan_overview)(paper)

    def _plan_single(self, paper: Paper) -> _Plan:
        """One map; its far links are listed at the right, on narrow paper below."""
        narrow, n_links = paper.is_narrow, len(self._ends)
        strip, left = (48, layout.MARGIN_PX + 56) if narrow else (64, layout.MARGIN_PX + 84)
        room = paper.room_px // 2 - 84 if paper.fixed else 780
        if narrow:
            room = paper.width_px - layout.MARGIN_PX - left - strip - 8
        side = _side_px(self._map.cells.shape[2:], room, fixed=paper.fixed)
        top = _HEADER_PX + strip + 34
        bottom = top + side[1] + 66
        if narrow:
            bottom += 40 + _LINK_PX * n_links if n_links else 0
        else:
            bottom = max(bottom, _HEADER_PX + 40 + _LINK_PX * n_links)
        width = paper.width_for(layout.MIN_WIDTH_PX, left + side[0] + strip + 120)
        return _Plan(width, side, [(left, top)], strip, bottom + 12)

    def _plan_grid(self, paper: Paper) -> _Plan:
        """The maps of a layer."""
        n = len(self._sheet.heads)
        columns, strip, left, gap = layout.columns_for(n), 30, 64, 26
        while (room := (paper.room_px - left) // columns - strip - gap) < _SMALL_MAP_PX and paper.fixed and columns > 1:
            columns -= 1
        room = min(room if paper.fixed else max(room, 200), 780)
        side = _side_px(self._map.cells.shape[2:], room, fixed=paper.fixed)
        pitch = (side[0] + strip + gap, side[1] + strip + 34)
        # A page as wide as its maps, but wide enough for the text.
        width = paper.width_for(_LEAST_WIDTH_PX, 2 * layout.MARGIN_PX + left + columns * pitch[0])
        spare = (width - 2 * layout.MARGIN_PX - left - columns * pitch[0]) // columns
        corner = (layout.MARGIN_PX + left, _HEADER_PX + strip + 26)
        corners = layout.tile(n, columns, corner, (pitch[0] + spare, pitch[1]))
        return _Plan(width, side, corners, strip, _HEADER_PX + -(-n // columns) * pitch[1] + 56)

    def _plan_overview(self, paper: Paper) -> _Plan:
        """Small maps of all heads, a row per layer."""
        n_layers, n_heads, room = len(self._sheet.layers), len(self._sheet.columns), self._overview_room()
        side, gap = _side_px(self._map.cells.shape[2:], room, fixed=paper.fixed), 4 if paper.is_narrow else 8
        pitch = (max(room, side[0]) + gap, side[1] + gap)
        left, top = layout.MARGIN_PX + 52, _HEADER_PX + 30
        corners = [(left + column * pitch[0], top + row * pitch[1]) for row, column in self._sheet.places]
        width = paper.width_for(layout.MIN_WIDTH_PX, layout.MARGIN_PX + left + n_heads * pitch[0])
        return _Plan(width, side, corners, 0, top + n_layers * pitch[1] + 12)

    def _overview_room(self) -> int:
        """Width of a small map of the overview, at most."""
        n_heads, paper = len(self._sheet.columns), self._style.paper
        room = (paper.room_px - 52) // n_heads - (4 if paper.is_narrow else 8)
        return max(min(room, 300), 2 if paper.fixed else 24)

    # What is drawn --------------------------------------------------------------------------------------------------

    def _draw_maps(self, plan: _Plan, cmap: Colormap, limits: Sequence[float]) -> None:
        width, height = plan.side
        for (x, y), pair, top in zip(plan.corners, self._sheet.heads, limits, strict=True):
            cells = self._map.of(*pair)
            rows, columns = cells.shape
            cells = max_pool(max_pool(cells, -(-rows // height), (0,)), -(-columns // width), (1,))
            shares = log_share(cells, top)
            self.set_cells(self.image((x, y, width, height), cmap, animated=False), shares)
        self.frames([(x, y, width, height) for x, y in plan.corners])

    def _marginals(self, plan: _Plan) -> None:
        """Draws mass received above each map, entropy at its right, and the head's name."""
        width, height = plan.side
        boxes: list[NDArray[np.float64]] = []
        averages: list[list[tuple[float, float]]] = []
        most = max(float(len(self._map.queries)), 10.0)
        single = self._sheet.form == "single"
        for (x, y), pair in zip(plan.corners, self._sheet.heads, strict=True):
            at = self._map.place(*pair)
            received = _by_pixel(self._map.received[at], self._map.key_cell, width, np.maximum)
            highs = _received_share(received, most) * (plan.strip - 4)
            wide = width / len(highs)
            xs = x + np.arange(len(highs)) * wide
            boxes.append(np.stack([xs, y - 4 - highs, np.full(len(highs), wide), highs], 1))
            entropy = _by_pixel(self._map.entropy_nats[at], self._map.query_cell, height, None)
            longs = np.clip(entropy / max(math.log(len(self._map.keys)), 1e-9), 0, 1) * (plan.strip - 4)
            tall = height / len(longs)
            ys = y + np.arange(len(longs)) * tall
            boxes.append(np.stack([np.full(len(longs), x + width + 4.0), ys, longs, np.full(len(longs), tall)], 1))
            level = y - 4 - float(_received_share(np.ones(1), most)[0]) * (plan.strip - 4)
            averages.append([(x, level), (x + width, level)])
            layer, head = pair
            name = f"H{head}" if self._sheet.form == "grid" else f"L{layer}H{head}"
            self.entitle(x, y - plan.strip - 13, name)
            if single:
                self._marginal_ticks(x, y, plan, most)
        self.fill([(x, y, wide, tall) for x, y, wide, tall in np.concatenate(boxes).tolist()], [_BAND])
        self.lines(averages, color=FAINT, linestyles="dashed", width_px=0.8)

    def _marginal_ticks(self, x: float, y: float, plan: _Plan, most: float) -> None:
        """Writes numbers at the marginals of a single head."""
        size, (width, height) = layout.CAPTION_PX, plan.side
        reach = plan.strip - 4
        for value in (1.0, 10.0 ** math.floor(math.log10(most))):
            level = y - 4 - float(_received_share(np.array([value]), most)[0]) * reach
            self.write(x - 8, level, f"{value:,.0f}", size, ha="right", color=FAINT)
        self.write(x + width, y - plan.strip - 13, "mass received", size, ha="right", color=FAINT)
        top = math.log(len(self._map.keys))
        for value in (0.0, top) if reach > 40 or not self.paper.fixed else ():
            at = x + width + 4 + reach * value / max(top, 1e-9)
            self.write(at, y + height + 14, f"{value:.1f}" if value else "0", size, ha="center", color=FAINT)
        at, side = (x + width + 4 + reach / 2, "center") if not self.paper.fixed else (x + width + 4 + reach, "right")
        self.write(at, y + height + (32 if reach > 40 else 14), "entropy, nats", size, ha=side, color=FAINT)

    def _axes(self, plan: _Plan) -> None:
        """Draws positions in tokens: at the left of each row of maps, and below the lowest of each column."""
        (width, height), attention, size = plan.side, self._map, layout.CAPTION_PX
        lines: list[list[tuple[float, float]]] = []
        lowest = {x: max(y for x2, y in plan.corners if x2 == x) for x, _ in plan.corners}
        leftmost = min(x for x, _ in plan.corners)
        few = width < 400
        every = self.label_step(f"{len(attention.keys):,}", size, width / 5)
        for x, y in plan.corners:
            if x == leftmost:
                for value in _positions(len(attention.queries), few):
                    at = y + height * value / (attention.cells.shape[2] * attention.query_cell)
                    lines.append([(x - 6, at), (x - 1, at)])
                    self.write(x - 9, at, f"{value:,}", size, ha="right", color=FAINT)
            if y == lowest[x]:
                for value in _positions(len(attention.keys), few)[::every]:
                    at = x + width * value / (attention.cells.shape[3] * attention.key_cell)
                    lines.append([(at, y + height + 1), (at, y + height + 6)])
                    self.write(at, y + height + 15, f"{value:,}", size, ha="center", color=FAINT)
        self.lines(lines, color=LINE)
        if self._sheet.form == "single":
            x, y = plan.corners[0]
            self.write(x + width / 2, y + height + 38, "key: position in tokens", layout.PANEL_TITLE_PX, ha="center")
            left = x - (46 if self.paper.fixed else 70)
            title = "query: position in tokens"
            self.write(left, y + height / 2, title, layout.PANEL_TITLE_PX, ha="center", rotation=90)

    def _links(self, plan: _Plan, links: Sequence[Link]) -> None:
        """Draws the far links: a number on the map, the text at the right."""
        (x, y), (width, height), attention = plan.corners[0], plan.side, self._map
        size, gap = (layout.CAPTION_PX, 40) if self.paper.fixed else (layout.SUBTITLE_PX - 1, 64)
        left, top = x + width + plan.strip + gap, _HEADER_PX + 8
        if self.paper.is_narrow:
            left, top = layout.MARGIN_PX, round(y) + height + 76
        room = plan.width - left - layout.MARGIN_PX
        far = "" if attention.far_tokens is None else f" over more than {attention.far_tokens} tokens"
        heading = self.lettering.fit(f"Strongest links{far}", layout.PANEL_TITLE_PX * 1.12, room)
        self.entitle(left, top, heading)
        if not links:
            self.write(left, top + 28, "there are none", size, ha="left", color=FAINT)
        numbered: dict[tuple[float, float], list[int]] = {}
        rings: list[list[tuple[float, float]]] = []
        for number, (link, ends) in enumerate(zip(links, self._ends, strict=True), 1):
            at = (
                x + width * (link.key + 0.5) / (attention.cells.shape[3] * attention.key_cell),
                y + height * (link.query + 0.5) / (attention.cells.shape[2] * attention.query_cell),
            )
            rings.append(_circle(*at, 6.0))
            near = (other for other in numbered if abs(at[0] - other[0]) + abs(at[1] - other[1]) <= 2 * size)
            numbered.setdefault(next(near, at), []).append(number)
            line = top + 34 + (number - 1) * _LINK_PX
            self.entitle(left, line, f"{number}", size, color=_MARK)
            self.entitle(left + 26, line, weight(link.weight), size)
            for row, (token, end) in enumerate(((link.query, ends[0]), (link.key, ends[1]))):
                words = f"{'→ ' if row else ''}{token:,}  {end}"
                self.write(left + 76, line + row * 21, self.lettering.fit(words, size, room - 76), size, ha="left")
        # Not a halo: with one, letters would no longer be text in PDF and SVG.
        ground = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
        for (across, down), numbers in numbered.items():  # links at one place share a label
            label_x, side = (across + 10, "left") if across < x + width / 2 else (across - 10, "right")
            label = ", ".join(map(str, numbers))
            self.write(label_x, down, label, size, ha=side, color=_MARK, weight="bold", bbox=ground)
        self.lines(rings, color=_MARK, width_px=1.3)


def _side_px(shape: tuple[int, ...], room: int, *, fixed: bool) -> tuple[int, int]:
    """Width and height of a map: whole pixels a cell where there is room, else whole cells a pixel.

    Where the width is fixed, a map takes all of the room.
    """
    longest = max(shape)
    if fixed:
        return max(1, shape[1] * room // longest), max(1, shape[0] * room // longest)
    if longest <= room:
        times = room // longest
        return shape[1] * times, shape[0] * times
    cells = -(-longest // room)
    return -(-shape[1] // cells), -(-shape[0] // cells)


def _by_pixel(values: NDArray[np.float32], cell: int, room: int, largest: np.ufunc | None) -> NDArray[np.float64]:
    """Values by token as values by cell, or by as many cells as share a pixel: the largest, or their mean."""
    n_cells = -(-len(values) // cell)
    step = cell * -(-n_cells // room)
    starts = np.arange(0, len(values), step)
    doubled = values.astype(np.float64)
    if largest is not None:
        return np.asarray(largest.reduceat(doubled, starts))
    return np.asarray(np.add.reduceat(doubled, starts) / np.diff([*starts, len(values)]))


def _received_share(values: NDArray[np.float64], most: float) -> NDArray[np.float64]:
    """How far up values stand on the logarithmic scale from the least mass that is drawn to `most`."""
    low = _LEAST_RECEIVED
    return np.clip(np.log(np.maximum(values, low) / low) / math.log(most / low), 0, 1)


def _positions(n: int, few: bool) -> list[int]:
    """Round numbers of tokens from 0 on, for an axis."""
    ticks = [round(value) for value in layout.nice_ticks(float(n)) if value == round(value)]
    return ticks[:: 2 if few and len(ticks) > 4 else 1]


def _circle(x: float, y: float, radius: float) -> list[tuple[float, float]]:
    turns = np.linspace(0, 2 * math.pi, 25)
    return [(x + radius * math.cos(turn), y + radius * math.sin(turn)) for turn in turns]
