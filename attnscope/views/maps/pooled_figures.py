"""Pooled maps of long texts as figures: the cells, what keys receive, queries' entropy, positions, far links."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import UsageError, amount
from attnscope.records.maps.pooled import Link, PooledHeatmap, around
from attnscope.views.drawing import layout
from attnscope.views.drawing.canvas import FAINT, INK, LINE, Page, colormap
from attnscope.views.drawing.lettering import Lettering, lettering_for
from attnscope.views.drawing.sheets import Sheet, sheets_of_heads
from attnscope.views.drawing.style import Style
from attnscope.views.maps.pooling import DECADES, log_share, max_pool
from attnscope.views.tables.numbers import weight

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
    """The figures that a record is drawn as: an overview and a figure a layer, or one for each head that was picked.

    Raises:
        UsageError: There is a query.
    """
    if query is not None:
        raise UsageError("pooled maps have no --query", "leave it out, or draw the exact part with heatmap --rows")
    sheets: list[Sheet] = []
    for number, attention in enumerate(record.maps):
        mark = f"{attention.kind}-" if len(record.maps) > 1 else ""
        heads = record.chosen(attention)
        if heads:
            picked = record.picked is not None
            sheets += sheets_of_heads(heads, picked=picked, apart=True, number=number, before=mark)
    return sheets


def pages(record: PooledHeatmap, style: Style | None = None, query: str | None = None) -> Iterator[tuple[str, Page]]:
    """The figures one after the other, each with its file name without the ending.

    Args:
        record: What to draw.
        style: How to colour it.
        query: Refused: a cell stands for many tokens.
    """
    made = partial(_Page, record, style=style or Style())
    return ((sheet.stem, made(sheet)) for sheet in sheets_of(record, query))


@dataclass(frozen=True)
class _Plan:
    """Where things stand on a figure, in pixels.

    Attributes:
        width: Of the figure.
        height: Of the figure.
        side: Width and height of each map.
        corners: Upper left corner of each map.
        strip: Thickness of the marginals above and at the right; 0 = none.
        footer: The notes, broken into lines.
        foot: Where the colour bar begins.
    """

    width: int
    height: int
    side: tuple[int, int]
    corners: tuple[tuple[int, int], ...]
    strip: int
    footer: tuple[str, ...]
    foot: int


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
        plan = self._plan(lettering)
        super().__init__(plan.width, plan.height, lettering)
        self.head(title, subtitle, bold=1.1)
        cmap = colormap(style.cmap)
        tops = [max(float(self._map.of(*pair).max(initial=0.0)), 1e-30) for pair in sheet.heads]
        limits = {"fixed": [1.0] * len(tops), "figure": [max(tops)] * len(tops), "head": tops}[style.scale]
        self._draw_maps(plan, cmap, limits)
        if sheet.form == "overview":
            self._margins(plan)
        else:
            self._marginals(plan)
            self._axes(plan)
        if sheet.form == "single":
            self._links(plan, links)
        self._colour_bar(plan, cmap, limits)
        self.foot(plan.foot + 62, plan.footer)

    # What is said ---------------------------------------------------------------------------------------------------

    def _titles(self) -> tuple[str, str]:
        record, sheet, attention = self._record, self._sheet, self._map
        kind = f"{attention.kind} " if len(record.maps) > 1 else ""
        n = len(attention.keys) if attention.kind != "cross" else f"{len(attention.queries):,} × {len(attention.keys)}"
        tokens = amount(n, "token") if isinstance(n, int) else f"{n} tokens"
        text = " ".join(record.text[:_LONGEST_TEXT].split())
        return f"{record.run.get('model', 'model')} · {kind}{sheet.subject} · {tokens}", f"“{text}”"

    def _notes(self) -> list[str]:
        attention, record = self._map, self._record
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
        return notes + [" ".join(str(note).split()) for note in record.run.get("notes", ())]

    def _meaning(self) -> str:
        """What the colours mean."""
        return f"{_MEANING[self._record.pool]}{_SCALE[self._style.scale]}"

    # Where it stands ------------------------------------------------------------------------------------------------

    def _plan(self, lettering: Lettering) -> _Plan:
        form, heads = self._sheet.form, self._sheet.heads
        shape = self._map.cells.shape[2:]
        paper = lettering.paper
        if form == "single" and paper.is_narrow:
            strip, left = 48, layout.MARGIN_PX + 56
            side = _side_px(shape, paper.width_px - layout.MARGIN_PX - left - strip - 8, fixed=True)
            corner = (left, _HEADER_PX + strip + 34)
            bottom = corner[1] + side[1] + 66
            bottom += 40 + _LINK_PX * len(self._ends) if self._ends else 0  # far links are listed below
            return self._add_footer(paper.width_px, bottom, side, (corner,), strip, lettering)
        if form == "single":
            side = _side_px(shape, 780 if not paper.fixed else paper.room_px // 2 - 84, fixed=paper.fixed)
            strip, left = 64, layout.MARGIN_PX + 84
            width = paper.width_for(layout.MIN_WIDTH_PX, left + side[0] + strip + 120)
            corners: tuple[tuple[int, int], ...] = ((left, _HEADER_PX + strip + 34),)
            bottom = corners[0][1] + side[1] + 66
            # All far links are listed at the right, two lines each.
            bottom = max(bottom, _HEADER_PX + 40 + _LINK_PX * len(self._ends))
            return self._add_footer(width, bottom, side, corners, strip, lettering)
        if form == "grid":
            columns = layout.columns_for(len(heads))
            strip, left, gap = 30, 64, 26
            room = (paper.room_px - left) // columns - strip - gap
            while paper.fixed and room < _SMALL_MAP_PX and columns > 1:
                columns -= 1
                room = (paper.room_px - left) // columns - strip - gap
            side = _side_px(shape, min(room if paper.fixed else max(room, 200), 780), fixed=paper.fixed)
            rows = -(-len(heads) // columns)
            pitch = (side[0] + strip + gap, side[1] + strip + 34)
            # A page as wide as its maps, but wide enough for the text.
            width = paper.width_for(_LEAST_WIDTH_PX, 2 * layout.MARGIN_PX + left + columns * pitch[0])
            spare = (width - 2 * layout.MARGIN_PX - left - columns * pitch[0]) // columns
            corners = tuple(
                (
                    layout.MARGIN_PX + left + (i % columns) * (pitch[0] + spare),
                    _HEADER_PX + strip + 26 + (i // columns) * pitch[1],
                )
                for i in range(len(heads))
            )
            bottom = _HEADER_PX + rows * pitch[1] + 44
            return self._add_footer(width, bottom, side, corners, strip, lettering)
        layers, numbers = self._sheet.layers, self._sheet.columns
        room = self._overview_room()
        side = _side_px(shape, room, fixed=paper.fixed)
        gap = 4 if paper.is_narrow else 8
        pitch = (max(room, side[0]) + gap, side[1] + gap)
        corners = tuple(
            (
                layout.MARGIN_PX + 52 + numbers.index(head) * pitch[0],
                _HEADER_PX + 30 + layers.index(layer) * pitch[1],
            )
            for layer, head in heads
        )
        width = paper.width_for(layout.MIN_WIDTH_PX, 2 * layout.MARGIN_PX + 52 + len(numbers) * pitch[0])
        return self._add_footer(width, _HEADER_PX + 30 + len(layers) * pitch[1], side, corners, 0, lettering)

    def _overview_room(self) -> int:
        """Width of a small map of the overview, at most."""
        n_heads, paper = len(self._sheet.columns), self._style.paper
        room = (paper.room_px - 52) // n_heads - (4 if paper.is_narrow else 8)
        return max(min(room, 300), 2 if paper.fixed else 24)

    def _add_footer(
        self,
        width: int,
        bottom: int,
        side: tuple[int, int],
        corners: tuple[tuple[int, int], ...],
        strip: int,
        lettering: Lettering,
    ) -> _Plan:
        notes = [*self._notes(), *([lettering.note] if lettering.note else [])]
        if lettering.paper.is_narrow:
            notes = [f"colour: {self._meaning()}", *notes]
        lines = layout.wrap(" · ".join(notes), width - 2 * layout.MARGIN_PX, lettering.width_px)
        height = bottom + 12 + 62 + len(lines) * layout.LINE_PX + layout.MARGIN_PX // 2
        return _Plan(width, height, side, corners, strip, lines, bottom + 12)

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

    def _margins(self, plan: _Plan) -> None:
        """Numbers of layers and heads around an overview."""
        width, height = plan.side
        size = layout.PANEL_TITLE_PX
        first: dict[str, tuple[float, float]] = {}
        for (x, y), (layer, head) in zip(plan.corners, self._sheet.heads, strict=True):
            first.setdefault(f"L{layer}", (layout.MARGIN_PX + 42.0, y + height / 2))
            if f"H{head}" not in first:
                first[f"H{head}"] = (x + width / 2, _HEADER_PX + 16)
        for name, (at_x, at_y) in first.items():
            fitting = size if name[0] == "L" else min(size, width / 2.2)
            step = self.label_step(f"H{self._sheet.columns[-1]}", self.paper.letters(fitting), width + 4)
            if name[0] == "H" and self._sheet.columns.index(int(name[1:])) % step:
                continue
            self.write(at_x, at_y, name, fitting, ha="right" if name[0] == "L" else "center", weight="bold")

    def _marginals(self, plan: _Plan) -> None:
        """Mass received above each map, entropy at its right, each with its head's name."""
        width, height = plan.side
        bands = self.boxes(color=_BAND)
        bands.set_animated(False)
        boxes: list[NDArray[np.float64]] = []
        averages: list[list[tuple[float, float]]] = []
        most = max(float(len(self._map.queries)), 10.0)
        single = self._sheet.form == "single"
        for (x, y), pair in zip(plan.corners, self._sheet.heads, strict=True):
            place = self._map.place(*pair)
            received = _by_pixel(self._map.received[place], self._map.key_cell, width, np.maximum)
            highs = _received_share(received, most) * (plan.strip - 4)
            wide = width / len(highs)
            xs = x + np.arange(len(highs)) * wide
            boxes.append(np.stack([xs, y - 4 - highs, np.full(len(highs), wide), highs], 1))
            entropy = _by_pixel(self._map.entropy_nats[place], self._map.query_cell, height, None)
            longs = np.clip(entropy / max(math.log(len(self._map.keys)), 1e-9), 0, 1) * (plan.strip - 4)
            tall = height / len(longs)
            ys = y + np.arange(len(longs)) * tall
            boxes.append(np.stack([np.full(len(longs), x + width + 4.0), ys, longs, np.full(len(longs), tall)], 1))
            level = y - 4 - float(_received_share(np.ones(1), most)[0]) * (plan.strip - 4)
            averages.append([(x, level), (x + width, level)])
            layer, head = pair
            name = f"H{head}" if self._sheet.form == "grid" else f"L{layer}H{head}"
            size = layout.PANEL_TITLE_PX
            self.write(x, y - plan.strip - 13, name, size, ha="left", weight="bold")
            if single:
                self._marginal_ticks(x, y, plan, most)
        self.place_boxes(bands, np.concatenate(boxes))
        self.lines(averages, color=FAINT, linestyles="dashed", width_px=0.8)

    def _marginal_ticks(self, x: float, y: float, plan: _Plan, most: float) -> None:
        """Numbers at the marginals of a single head."""
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
        """Positions in tokens: at the left of each row of maps, and below the lowest of each column."""
        (width, height), attention = plan.side, self._map
        size = layout.CAPTION_PX
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
            self.write(
                x - (46 if self.paper.fixed else 70),
                y + height / 2,
                "query: position in tokens",
                layout.PANEL_TITLE_PX,
                ha="center",
                rotation=90,
            )

    def _links(self, plan: _Plan, links: Sequence[Link]) -> None:
        """The far links: a number on the map, the text at the right."""
        (x, y), (width, height), attention = plan.corners[0], plan.side, self._map
        left = x + width + plan.strip + (64 if not self.paper.fixed else 40)
        size, top = layout.SUBTITLE_PX - 1, _HEADER_PX + 8
        if self.paper.is_narrow:
            left, top = layout.MARGIN_PX, plan.corners[0][1] + height + 76
        if self.paper.fixed:
            size = layout.CAPTION_PX
        room = plan.width - left - layout.MARGIN_PX
        far = "" if attention.far_tokens is None else f" over more than {attention.far_tokens} tokens"
        heading = self.lettering.fit(f"Strongest links{far}", layout.PANEL_TITLE_PX * 1.12, room)
        self.write(left, top, heading, layout.PANEL_TITLE_PX, ha="left", weight="bold")
        if not links:
            self.write(left, top + 28, "there are none", size, ha="left", color=FAINT)
        placed: list[tuple[float, float]] = []
        rings: list[list[tuple[float, float]]] = []
        for number, (link, ends) in enumerate(zip(links, self._ends, strict=True), 1):
            at = (
                x + width * (link.key + 0.5) / (attention.cells.shape[3] * attention.key_cell),
                y + height * (link.query + 0.5) / (attention.cells.shape[2] * attention.query_cell),
            )
            rings.append(_circle(*at, 6.0))
            # Of links at one place only the first has its number beside it.
            if all(abs(at[0] - a) + abs(at[1] - b) > 16 for a, b in placed):
                placed.append(at)
                beside = (at[0] + 10, "left") if at[0] < x + width - 30 else (at[0] - 10, "right")
                # Not a halo: with one, letters would no longer be text in PDF and SVG.
                ground = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
                self.write(beside[0], at[1], str(number), size, ha=beside[1], color=_MARK, weight="bold", bbox=ground)
            line = top + 34 + (number - 1) * _LINK_PX
            self.write(left, line, f"{number}", size, ha="left", color=_MARK, weight="bold")
            self.write(left + 26, line, weight(link.weight), size, ha="left", weight="bold")
            for row, (place, end) in enumerate(((link.query, ends[0]), (link.key, ends[1]))):
                words = f"{'→ ' if row else ''}{place:,}  {end}"
                fitted = self.lettering.fit(words, size, room - 76)
                self.write(left + 76, line + row * 21, fitted, size, ha="left", color=INK)
        self.lines(rings, color=_MARK, width_px=1.3)

    def _colour_bar(self, plan: _Plan, cmap: Colormap, limits: Sequence[float]) -> None:
        x, y, height = layout.MARGIN_PX + 18, plan.foot, 14
        width = min(420, self.paper.room_px - 60)
        self.colour_bar((x, y, width, height), cmap)
        size = layout.CAPTION_PX
        top = limits[0] if self._style.scale == "figure" else 1.0
        if not self.paper.is_narrow:
            fitted = self.lettering.fit(self._meaning(), size, plan.width - x - width - 60)
            self.write(x + width + 24, y + height / 2, fitted, size, ha="left")
        for step in range(DECADES + 1):
            value = top * 10.0 ** (step - DECADES)
            self.write(x + width * step / DECADES, y + height + 12, f"{value:g}", size, ha="center")


def _side_px(shape: tuple[int, ...], room: int, *, fixed: bool) -> tuple[int, int]:
    """Width and height of a map in pixels: whole pixels a cell where there is room, else whole cells a pixel.

    Where the width is fixed a map takes all of the room.
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
        found: NDArray[np.float64] = largest.reduceat(doubled, starts)
        return found
    return np.asarray(np.add.reduceat(doubled, starts) / np.diff([*starts, len(values)]))


def _received_share(values: NDArray[np.float64], most: float) -> NDArray[np.float64]:
    """How far up values stand on the logarithmic scale from the least mass received that is told apart to `most`."""
    low = _LEAST_RECEIVED
    return np.clip(np.log(np.maximum(values, low) / low) / math.log(most / low), 0, 1)


def _positions(n: int, few: bool) -> list[int]:
    """Round numbers of tokens from 0 on, for an axis."""
    ticks = [round(value) for value in layout.nice_ticks(float(n)) if value == round(value)]
    return ticks[:: 2 if few and len(ticks) > 4 else 1]


def _circle(x: float, y: float, radius: float) -> list[tuple[float, float]]:
    turns = np.linspace(0, 2 * math.pi, 25)
    return [(x + radius * math.cos(turn), y + radius * math.sin(turn)) for turn in turns]
