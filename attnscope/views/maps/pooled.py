"""Pooled maps of long texts as figures: the cells, what keys receive, queries' entropy, positions, far links."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, LINE, Box, colormap
from attnscope.drawing.lettering import lettering_for
from attnscope.drawing.maps import SEAM
from attnscope.drawing.page import Page
from attnscope.drawing.style import Style
from attnscope.errors import UsageError, amount
from attnscope.questions.pooled import PooledHeatmap, PooledMap, around
from attnscope.report.numbers import weight
from attnscope.report.wording import run_notes
from attnscope.views.maps.pooling import DECADES, fit, log_share
from attnscope.views.maps.sheets import Sheet, sheets_of_heads

_BAND = "#2f6fb0"
_LEAST_RECEIVED = 0.1
_LONGEST_TEXT = 2000
_SHOWN_LINKS, _LINK_PX = 10, 62
_LARGEST_PX, _LARGEST_SMALL_PX = 780, 300
_MEANING = {
    "mean": "share of attention that the queries of a row give to the keys of a column (logarithmic)",
    "max": "the largest weight in the cell (logarithmic)",
}
_SCALE = {"fixed": "", "head": ", ÷ the largest of the same head", "figure": ", ÷ the largest of this figure"}
_MARGINALS = (
    "above: mass that a key receives from all queries, the largest of its cell, logarithmic (dashed: 1, the average); "
    "right: entropy of a query's weights, the mean of its cell, 0 to ln(keys) nats"
)


def sheets_of(record: PooledHeatmap, query: str | None = None) -> list[Sheet]:
    """List an overview and a figure per layer, or one for each head that was picked."""
    if query is not None:
        raise UsageError("pooled maps have no --query", "leave it out, or draw the exact part with heatmap --rows")
    sheets: list[Sheet] = []
    is_picked = record.picked is not None
    for number, attention in enumerate(record.maps):
        mark = f"{attention.kind}-" if len(record.maps) > 1 else ""
        if heads := record.chosen(attention):
            sheets += sheets_of_heads(heads, picked=is_picked, apart=True, number=number, before=mark)
    return sheets


def pages(record: PooledHeatmap, style: Style | None = None, query: str | None = None) -> Iterator[tuple[str, Page]]:
    """Draw the figures one after the other, each with its file name without the ending."""
    for sheet in sheets_of(record, query):
        yield sheet.stem, PooledPage(record, sheet, style or Style())


class PooledPage(Page):
    """One figure."""

    def __init__(self, record: PooledHeatmap, sheet: Sheet, style: Style) -> None:
        self._map = attention = record.maps[sheet.map]
        self._sheet = sheet
        self._links = attention.links(*sheet.heads[0])[:_SHOWN_LINKS] if sheet.form == "single" else []
        self._ends = [
            (around(attention.queries, link.query, 34), around(attention.keys, link.key, 34)) for link in self._links
        ]
        title, subtitle = _titles(record, sheet)
        lettering = lettering_for([title, subtitle, *(end for pair in self._ends for end in pair)], style.paper)
        self._strip = self._strip_px(style.paper)
        self.places = layout.arrange(self._wanted(style.paper), style.paper)
        super().__init__(self.places.width_px, lettering)
        self.head(title, subtitle, bold=1.1)
        # The maps.
        cmap = colormap(style.cmap)
        limits = style.limits([max(float(attention.of(*pair).max(initial=0.0)), 1e-30) for pair in sheet.heads])
        self._corners = self._find_corners()
        panel = self.places.panel
        for corner, pair, top in zip(self._corners, sheet.heads, limits, strict=True):
            image = self.image((*corner, *panel), cmap, animated=False)
            self.set_cells(image, log_share(fit(attention.of(*pair), panel), top))
        self.frames([(*corner, *panel) for corner in self._corners])
        # What stands around them.
        bottom: float = self.places.bottom
        if sheet.form == "overview":
            self.name_panels(sheet.names(attention), self._corners, panel, self.places.pitch_px)
        else:
            self._draw_marginals()
            self._draw_positions()
            bottom += 30
        if sheet.form == "single":
            bottom = max(bottom + 20, self._draw_links())
        end = limits[0] if style.scale == "figure" else 1.0
        powers = {float(step): f"{end * 10.0 ** (step - DECADES):g}" for step in range(DECADES + 1)}
        meaning = f"{_MEANING[record.pool]}{_SCALE[style.scale]}"
        notes = [*self._notes(), *run_notes(record.run), *lettering.notes]
        self.end_with_bar(bottom, cmap, meaning, notes, limits=(0, DECADES), ticks=powers)

    # Layout ---------------------------------------------------------------------------------------------------------

    def _strip_px(self, paper: layout.Paper) -> int:
        """Return the thickness of the marginals above a map and at its right."""
        if self._sheet.form == "overview":
            return 0
        if self._sheet.form == "grid":
            return 30
        return 48 if paper.is_narrow else 64

    def _wanted(self, paper: layout.Paper) -> layout.Wanted:
        shape = self._map.cells.shape[2:]
        strip = self._strip
        if self._sheet.form == "overview":
            gap = 4 if paper.is_narrow else 8
            return layout.Wanted(
                n=len(self._sheet.layers) * len(self._sheet.columns),
                columns=len(self._sheet.columns),
                shape=(shape[0], shape[1]),
                around=lambda cell: layout.Around(below=gap),
                names_px=52,
                gap_px=gap,
                top_px=layout.HEADER_PX + 36,
                largest_px=_LARGEST_SMALL_PX,
                least_cell_px=24 / max(shape),
                least_width_px=layout.NARROWEST_PX,
            )
        room = layout.Around(above=strip + 32, right=strip, below=8)
        is_single = self._sheet.form == "single"
        return layout.Wanted(
            n=len(self._sheet.heads),
            shape=(shape[0], shape[1]),
            around=lambda cell: room,
            names_px=84 if is_single and not paper.is_narrow else 64,
            beside_px=round(paper.room_px * 0.38) if is_single and not paper.is_narrow else 0,
            largest_px=_LARGEST_PX,
            least_cell_px=200 / max(shape),
            least_width_px=layout.MIN_WIDTH_PX if is_single else 1100,
        )

    def _find_corners(self) -> list[tuple[float, float]]:
        corners = list(self.places.corners)
        if self._sheet.form != "overview":
            return corners
        layers, columns = self._sheet.layers, self._sheet.columns
        return [corners[layers.index(layer) * len(columns) + columns.index(head)] for layer, head in self._sheet.heads]

    def _notes(self) -> list[str]:
        attention = self._map
        cells = "tokens" if attention.query_cell == attention.key_cell else "queries and keys"
        size = f"{attention.query_cell} × {attention.key_cell}"
        notes = [
            f"rows: queries (attend) · columns: keys (are attended to) · a cell holds {size} {cells}, exactly pooled"
        ]
        shared = math.ceil(max(attention.cells.shape[2:]) / max(self.places.panel))
        if shared > 1:
            notes.append(f"drawn: the largest of up to {shared} × {shared} cells")
        if self._sheet.form != "overview":
            notes.append(_MARGINALS)
        if self._sheet.form == "single":
            notes.append(
                f"numbered: the strongest links{_far(attention)}, without special tokens and the first token as key"
            )
        if attention.n_kv_heads < attention.n_heads:
            notes.append(f"{attention.n_heads} query heads share {amount(attention.n_kv_heads, 'key/value head')}")
        return notes

    # Around the maps ------------------------------------------------------------------------------------------------

    def _draw_marginals(self) -> None:
        """Draw mass received above each map, entropy at its right, and the head's name."""
        width, height = self.places.panel
        reach = self._strip - 4
        most = max(float(len(self._map.queries)), 10.0)
        average = float(_received_share(np.ones(1), most)[0]) * reach
        boxes: list[Box] = []
        averages: list[list[tuple[float, float]]] = []
        for (x, y), pair in zip(self._corners, self._sheet.heads, strict=True):
            place = self._map.place(*pair)
            received = _by_pixel(self._map.received[place], self._map.key_cell, width, "largest")
            wide = width / len(received)
            for number, tall in enumerate((_received_share(received, most) * reach).tolist()):
                boxes.append((x + number * wide, y - 4 - tall, wide, tall))
            entropy = _by_pixel(self._map.entropy_nats[place], self._map.query_cell, height, "mean")
            shares = np.clip(entropy / max(math.log(len(self._map.keys)), 1e-9), 0, 1)
            tall = height / len(entropy)
            for number, length in enumerate((shares * reach).tolist()):
                boxes.append((x + width + 4.0, y + number * tall, length, tall))
            averages.append([(x, y - 4 - average), (x + width, y - 4 - average)])
            layer, head = pair
            name = f"H{head}" if self._sheet.form == "grid" else f"L{layer}H{head}"
            self.entitle(x, y - self._strip - 13, name)
        self.fill(boxes, [_BAND])
        self.lines(averages, color=FAINT, linestyles="dashed", width_px=0.8)
        if self._sheet.form == "single":
            self._draw_marginal_ticks(most)

    def _draw_marginal_ticks(self, most: float) -> None:
        """Write numbers at the marginals of a single head."""
        (x, y), (width, height) = self._corners[0], self.places.panel
        size = layout.CAPTION_PX
        reach = self._strip - 4
        for value in (1.0, 10.0 ** math.floor(math.log10(most))):
            level = y - 4 - float(_received_share(np.array([value]), most)[0]) * reach
            self.write(x - 8, level, f"{value:,.0f}", size, ha="right", color=FAINT)
        self.write(x + width, y - self._strip - 13, "mass received", size, ha="right", color=FAINT)
        right = x + width + 4 + reach
        self.write(right - reach, y + height + 14, "0", size, ha="center", color=FAINT)
        self.write(right, y + height + 14, f"{math.log(len(self._map.keys)):.1f}", size, ha="right", color=FAINT)
        self.write(right, y + height + 32, "entropy, nats", size, ha="right", color=FAINT)

    def _draw_positions(self) -> None:
        """Draw positions in tokens: at the left of each row of maps, and below the lowest of each column."""
        (width, height), attention, size = self.places.panel, self._map, layout.CAPTION_PX
        per_row = height / (attention.cells.shape[2] * attention.query_cell)
        per_column = width / (attention.cells.shape[3] * attention.key_cell)
        every = self.label_step(f"{len(attention.keys):,}", size, width / 5)
        leftmost = min(x for x, _ in self._corners)
        lowest = dict(self._corners)
        lines: list[list[tuple[float, float]]] = []
        for x, y in self._corners:
            if x == leftmost:
                for value in _positions(len(attention.queries), height):
                    down = y + value * per_row
                    lines.append([(x - 6, down), (x - 1, down)])
                    self.write(x - 9, down, f"{value:,}", size, ha="right", color=FAINT)
            if y == lowest[x]:
                for value in _positions(len(attention.keys), width)[::every]:
                    across = x + value * per_column
                    lines.append([(across, y + height + 1), (across, y + height + 6)])
                    self.write(across, y + height + 15, f"{value:,}", size, ha="center", color=FAINT)
        self.lines(lines, color=LINE)
        if self._sheet.form == "single":
            x, y = self._corners[0]
            title_px = layout.PANEL_TITLE_PX
            self.write(x + width / 2, y + height + 38, "key: position in tokens", title_px, ha="center")
            left = layout.MARGIN_PX + 8
            self.write(left, y + height / 2, "query: position in tokens", title_px, ha="center", rotation=90)

    def _draw_links(self) -> float:
        """Draw the far links: a number on the map, the text at the right, on narrow paper below; return its end."""
        (x, y), (width, height) = self._corners[0], self.places.panel
        size = min(layout.SUBTITLE_PX - 1, max(layout.CAPTION_PX, self.width_px / 115))
        left = x + width + self._strip + min(64, self.width_px / 25)
        top: float = layout.HEADER_PX + 14
        if self.paper.is_narrow:
            left, top = layout.MARGIN_PX, round(y) + height + 76
        room = self.width_px - left - layout.MARGIN_PX
        heading = f"Strongest links{_far(self._map)}"
        self.entitle(left, top, self.lettering.fit(heading, layout.PANEL_TITLE_PX * 1.12, room))
        if not self._links:
            self.write(left, top + 28, "there are none", size, ha="left", color=FAINT)
        for number, (link, ends) in enumerate(zip(self._links, self._ends, strict=True), 1):
            line = top + 34 + (number - 1) * _LINK_PX
            self.entitle(left, line, f"{number}", size, color=SEAM)
            self.entitle(left + 26, line, weight(link.weight), size)
            for row, words in enumerate((f"{link.query:,}  {ends[0]}", f"→ {link.key:,}  {ends[1]}")):
                fitted = self.lettering.fit(words, size, room - 76)
                self.write(left + 76, line + row * 21, fitted, size, ha="left")
        self._number_links(size)
        return top + 34 + max(1, len(self._links)) * _LINK_PX

    def _number_links(self, size: float) -> None:
        """Draw a ring around each link on the map, with its number; links at one place share a label."""
        (x, y), (width, height), attention = self._corners[0], self.places.panel, self._map
        numbered: dict[tuple[float, float], list[int]] = {}
        rings: list[list[tuple[float, float]]] = []
        for number, link in enumerate(self._links, 1):
            across = x + width * (link.key + 0.5) / (attention.cells.shape[3] * attention.key_cell)
            down = y + height * (link.query + 0.5) / (attention.cells.shape[2] * attention.query_cell)
            rings.append(_circle(across, down, 6.0))
            near = [at for at in numbered if abs(across - at[0]) + abs(down - at[1]) <= 2 * size]
            numbered.setdefault(near[0] if near else (across, down), []).append(number)
        # Not a halo: with one, letters would no longer be text in PDF and SVG.
        ground = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
        for (across, down), numbers in numbered.items():
            is_left = across < x + width / 2
            label = ", ".join(map(str, numbers))
            label_x = across + 10 if is_left else across - 10
            side = "left" if is_left else "right"
            self.write(label_x, down, label, size, ha=side, color=SEAM, weight="bold", bbox=ground)
        self.lines(rings, color=SEAM, width_px=1.3)


def _titles(record: PooledHeatmap, sheet: Sheet) -> tuple[str, str]:
    """Return the title and the subtitle of a figure."""
    attention = record.maps[sheet.map]
    kind = f"{attention.kind} " if len(record.maps) > 1 else ""
    tokens = amount(len(attention.keys), "token")
    if attention.kind == "cross":
        tokens = f"{len(attention.queries):,} × {amount(len(attention.keys), 'token')}"
    text = " ".join(record.text[:_LONGEST_TEXT].split())
    return f"{record.run.get('model', 'model')} · {kind}{sheet.subject} · {tokens}", f"“{text}”"


def _far(attention: PooledMap) -> str:
    return "" if attention.far_tokens is None else f" over more than {attention.far_tokens} tokens"


def _by_pixel(values: NDArray[np.float32], cell: int, room: float, how: str) -> NDArray[np.float64]:
    """Return values by token as values by cell, or by as many cells as share a pixel: the largest, or their mean."""
    n_cells = -(-len(values) // cell)
    step = cell * -(-n_cells // int(room))
    starts = np.arange(0, len(values), step)
    exact = values.astype(np.float64)
    if how == "largest":
        return np.asarray(np.maximum.reduceat(exact, starts))
    return np.asarray(np.add.reduceat(exact, starts) / np.diff([*starts, len(values)]))


def _received_share(values: NDArray[np.float64], most: float) -> NDArray[np.float64]:
    """Return how far up values stand on the logarithmic scale from the least mass that is drawn to `most`."""
    low = _LEAST_RECEIVED
    return np.clip(np.log(np.maximum(values, low) / low) / math.log(most / low), 0, 1)


def _positions(n: int, room: float) -> list[int]:
    """Return round numbers of tokens from 0 on, for an axis."""
    ticks = [round(value) for value in layout.nice_ticks(float(n)) if value == round(value)]
    return ticks[:: 2 if room < 400 and len(ticks) > 4 else 1]


def _circle(x: float, y: float, radius: float) -> list[tuple[float, float]]:
    turns = np.linspace(0, 2 * math.pi, 25)
    return [(x + radius * math.cos(turn), y + radius * math.sin(turn)) for turn in turns]
