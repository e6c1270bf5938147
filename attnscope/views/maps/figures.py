"""Heatmap records as figures: PNG, SVG and PDF files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK, MARK, Canvas, colormap, matplotlib_defaults
from attnscope.drawing.files import write_pages
from attnscope.drawing.inks import is_dark
from attnscope.drawing.lettering import Lettering, lettering_for
from attnscope.drawing.page import Page
from attnscope.drawing.sheets import Sheet, sheets_of_heads
from attnscope.drawing.style import Scale, Style, meanings
from attnscope.drawing.token_labels import label_color, widest_label, write_token_labels
from attnscope.drawing.vectors import vertices_of
from attnscope.errors import amount
from attnscope.records import AttentionMap, Heatmap, Tokens
from attnscope.report.wording import change_notes, run_notes
from attnscope.views.maps.pooling import max_pool

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.text import Text

_BAR = "#2f6fb0"
_MANY_LAYERS = 15  # more of them make an overview that no screen shows whole
_STRIP_PX = 8  # how far labels may reach beyond their room: no more than the gap between maps has
_LONGEST_TEXT = 2000
_MEANING = meanings(
    "attention weight: the share of a query's attention that a key gets",
    "attention weight ÷ the largest weight of the same head",
)


def sheets_of(record: Heatmap, query: str | None = None) -> list[Sheet]:
    """The figures that a record is drawn as, in the order of their files.

    An overview of all layers and heads, then a figure a layer. Single heads that were picked make one figure. A query
    frames the rows of the tokens that it names, and adds a figure of bars for each. Encoder-decoders have all that for
    each kind of attention.
    """
    sheets: list[Sheet] = []
    for number, attention in enumerate(record.maps):
        mark = f"{attention.kind}-" if len(record.maps) > 1 else ""
        heads = record.chosen(attention)
        if not heads:  # all that were picked are in other maps
            continue
        tokens = attention.queries.find(query) if query is not None else ()
        for sheet in sheets_of_heads(heads, picked=record.picked is not None, number=number, before=mark):
            sheets.append(replace(sheet, marked=() if sheet.form == "overview" else tokens))
        sheets += [Sheet(f"{mark}query-{token:03d}", "bars", heads, number, token) for token in tokens]
    if query is not None and not any(sheet.form == "bars" for sheet in sheets):
        first, *others = (attention.queries for attention in record.maps)
        raise first.refuse(query, *others)
    return sheets


def pages(record: Heatmap, style: Style | None = None, query: str | None = None) -> Iterator[tuple[str, Canvas]]:
    """The figures one after the other, each with its file name without the ending."""
    return Painter(style or Style()).pages(record, sheets_of(record, query))


@dataclass(frozen=True)
class Header:
    """The words around the maps of a figure: the model, the text, and the notes at the foot."""

    model: str
    subtitle: str
    notes: tuple[str, ...]


def _header(record: Heatmap, attention: AttentionMap, form: str) -> Header:
    queries = attention.queries
    if attention.kind != "encoder" and len(record.maps) > 1:
        parts, joint = [record.text, queries.text], "→"
    elif generated := _generated_text(queries):
        parts, joint = [record.text, generated], "…"
    else:
        parts, joint = [record.text, *([] if queries.pair is None else [queries.pair])], "+"
    # Measuring a book for the one line that it gets would take seconds.
    text = f"”  {joint}  “".join(" ".join(part[:_LONGEST_TEXT].split()) for part in parts)
    notes = ["rows: queries (attend) · columns: keys (are attended to)"]
    notes += change_notes(record, attention.kind)
    if attention.n_kv_heads < attention.n_heads:
        notes.append(
            f"{attention.n_heads} query heads share {amount(attention.n_kv_heads, 'key/value head')} (kv); "
            "heads with the same kv read the same keys"
        )
    if 0 <= queries.n_given < len(queries):
        notes += ["green tokens were written by the model itself"] if form != "overview" else []
        notes += ["red lines: from here on the model wrote"] if form != "bars" and queries.n_given else []
    elif form != "bars" and any(len(set(tokens.segments.tolist())) > 1 for tokens in (queries, attention.keys)):
        notes.append("red lines: the second text begins")
    others = [f" {other.kind} layers" for other in record.maps if other.kind != attention.kind]
    notes += [note.removesuffix(".") for note in run_notes(record.run) if not any(other in note for other in others)]
    return Header(str(record.run.get("model", "model")), f"“{text}”", tuple(notes))


def _generated_text(tokens: Tokens) -> str:
    """The text that the model wrote after its input; empty if it wrote none, or its place is not known."""
    if not 0 < tokens.n_given < len(tokens):
        return ""
    start = int(tokens.offsets[tokens.n_given, 0])
    return tokens.text[start:] if start >= 0 else ""


def _head_title(attention: AttentionMap, pair: tuple[int, int], *, short: bool) -> str:
    layer, head = pair
    title = f"H{head}" if short else f"L{layer}H{head}"
    if attention.n_kv_heads < attention.n_heads:
        title += f" · kv {head * attention.n_kv_heads // attention.n_heads}"
    return title


def _sheet_title(record: Heatmap, sheet: Sheet) -> str:
    attention = record.maps[sheet.map]
    model = str(record.run.get("model", "model"))
    if sheet.title:
        return f"{model} · {sheet.title}"
    kind = "cross-attention" if attention.kind == "cross" else attention.kind
    subject = sheet.subject
    if sheet.form == "bars":
        subject = f"what “{attention.queries.labels[sheet.query]}” (token {sheet.query}) attends to"
    return " · ".join([model, *([kind] if len(record.maps) > 1 else []), subject])


class _Page(Page):
    """A page whose title changes from figure to figure."""

    def __init__(self, width: int, height: int, lettering: Lettering, header: Header, zoom: float = 1.0) -> None:
        super().__init__(width, lettering)
        self.end_at(height)
        self.zoom = zoom
        self._title = self.head("", header.subtitle, zoom=zoom, animated=True)

    def set_title(self, record: Heatmap, sheet: Sheet) -> None:
        """Writes the title of a sheet."""
        room = self.width_px - 2 * layout.MARGIN_PX
        self._title.set_text(self.lettering.fit(_sheet_title(record, sheet), self.title_px(self.zoom) * 1.1, room))


class MapCanvas(_Page):
    """Maps of heads: with token labels, or many small ones without."""

    meaning: Mapping[Scale, str] = _MEANING

    layers_across: bool = False
    """Whether small maps have a column a layer and a row a head, not the other way round."""

    @staticmethod
    def name_head(head: int) -> str:
        """The name beside the small maps of a head."""
        return f"H{head}"

    def __init__(self, record: Heatmap, sheet: Sheet, titles: Sequence[str], header: Header, style: Style) -> None:
        attention = record.maps[sheet.map]
        queries, keys = attention.queries, attention.keys
        lettering = lettering_for([header.model, header.subtitle, *queries.labels, *keys.labels], style.paper)
        self.style, self.pool = style, 1
        notes = [*header.notes, *lettering.notes]
        names = [f"L{layer}" for layer in sheet.layers], [self.name_head(head) for head in sheet.columns]
        rows, columns = names[::-1] if self.layers_across else names
        paper = style.paper
        around = layout.Surroundings(notes, lettering.width_px, self.meaning[style.scale], paper)
        if sheet.form == "overview":
            self.pool = layout.pool_factor(max(len(queries), len(keys)), len(columns))
            if self.pool > 1:
                around = around.with_note(layout.pool_note(self.pool))
            shape = (-(-len(queries) // self.pool), -(-len(keys) // self.pool))
            size = paper.letters(layout.PANEL_TITLE_PX * self._zoom_of_names(len(rows), paper))
            left = max(52, *(math.ceil(lettering.width_px(row, size * 1.1)) + 20 for row in rows))
            grid = layout.overview_grid(len(rows), len(columns), shape, around, left)
            places = [place[::-1] if self.layers_across else place for place in sheet.places]
            panels = [row * len(columns) + column for row, column in places]
        else:
            widest = (widest_label(lettering, queries.labels), widest_label(lettering, keys.labels))
            tokens = (len(queries), len(keys))
            self.pool, shape, grid = layout.pooled_grid(len(sheet.heads), tokens, widest, around)
            if len(sheet.heads) == 1 and grid.number_px:
                around = around.with_note("cells without a number: less than 0.005")
                self.pool, shape, grid = layout.pooled_grid(len(sheet.heads), tokens, widest, around)
            panels = list(range(len(sheet.heads)))
        super().__init__(grid.width_px, grid.height_px, lettering, header, grid.zoom)
        self.grid, zoom = grid, grid.zoom
        self._label: Callable[[tuple[float, float]], list[Text]] | None = None
        self._others: list[Text] | None = None
        self.corners = [grid.corners[panel] for panel in panels]
        self.map_px = (shape[1] * grid.cell_px, shape[0] * grid.cell_px)
        cmap = colormap(style.cmap)
        self._dark = [is_dark(*cmap(value)[:3]) for value in np.linspace(0, 1, 256)]
        self.maps = [self.image((x, y, *self.map_px), cmap) for x, y in self.corners]
        self.frames([(x, y, *self.map_px) for x, y in self.corners])
        if sheet.form == "overview":
            self._name_maps(rows, columns)
        else:
            for (x, y), title in zip(self.corners, titles, strict=True):
                self.entitle(x, y - 12 * zoom, title, layout.PANEL_TITLE_PX * zoom)
            self._label = partial(
                write_token_labels, self, grid, self.map_px, (queries, keys), self.pool, marked=(sheet.marked, ())
            )
            self._label(self.corners[0])
            if paper.is_screen:
                left, below = (math.ceil(width(grid.label_px)) + 2 * _STRIP_PX for width in widest)
                self._copy_labels(left, below)
            else:
                self.label_all()
        self._seams(queries, keys)
        marked = [
            (x, y + query // self.pool * grid.cell_px, self.map_px[0], grid.cell_px)
            for x, y in self.corners
            for query in sheet.marked
        ]
        if marked:
            self.outline(marked, MARK, 2.0 * zoom, animated=True)
        self._colour_bar(cmap)
        self.foot(grid.footer_y, grid.footer, zoom)
        single = sheet.form != "overview" and len(sheet.heads) == 1 and grid.number_px
        self._numbers = self._number_cells(shape) if single else None
        self._tops = [
            self.write(
                x + self.map_px[0], y - 12 * zoom, "", layout.CAPTION_PX * zoom, ha="right", color=FAINT, animated=True
            )
            for x, y in self.corners
            if sheet.form != "overview" and style.scale == "head"
        ]

    def vector(self, kind: str) -> bytes:
        """The figure as it stands now as SVG or PDF."""
        self.label_all()
        content = super().vector(kind)
        if self.paper.is_screen:
            for text in self._others or ():
                text.set_visible(False)  # in pixels they are copies
        return content

    def label_all(self) -> None:
        """Shows the labels of all maps, which in pixels are copies of the first one's."""
        if self._label is not None and self._others is None:
            self._others = [text for corner in self.corners[1:] for text in self._label(corner)]
        for text in self._others or ():
            text.set_visible(True)

    def show(self, record: Heatmap, sheet: Sheet) -> MapCanvas:
        """Puts the weights of a sheet on the canvas."""
        attention = record.maps[sheet.map]
        self.set_title(record, sheet)
        values = [max_pool(attention.of(*pair), self.pool) for pair in sheet.heads]
        tops = [float(v[np.isfinite(v)].max(initial=0.0)) for v in values]
        limits = self.style.limits(tops)
        if self.style.scale == "figure":
            self._tick(limits[0])
        for image, value, limit in zip(self.maps, values, limits, strict=True):
            self.set_cells(image, value, (0, limit))
        for text, top in zip(self._tops, tops, strict=False):
            text.set_text(f"max {top:.2f}")
        if self._numbers is not None:
            for text, weight in zip(self._numbers, values[0].ravel(), strict=True):
                share = min(1.0, max(0.0, float(weight) / limits[0]))
                text.set_text(f"{weight:.2f}" if weight >= 0.005 else "")
                text.set_color("white" if self._dark[round(share * 255)] else INK)
        return self

    @staticmethod
    def _zoom_of_names(n_rows: int, paper: layout.Paper) -> float:
        """How much larger names of rows and columns are: a page of many layers is tall, and is seen shrunk."""
        return 1.0 if paper.fixed else min(2.0, max(1.0, n_rows / _MANY_LAYERS))

    def _name_maps(self, rows: Sequence[str], columns: Sequence[str]) -> None:
        size = layout.PANEL_TITLE_PX * max(min(self.zoom, 1.4), self._zoom_of_names(len(rows), self.paper))
        corners, names = self.grid.corners, [(row, column) for row in rows for column in columns]
        pitch = corners[-1][0] - corners[-2][0] if len(columns) > 1 else self.map_px[0]
        self.name_panels(names, corners, self.map_px, pitch, size, 14 * self.zoom)

    def _copy_labels(self, left: int, below: int) -> None:
        """Lets the labels of the first map stand at all others too: text is what takes the time.

        They are in a strip of width `left` at its left, and in one of height `below` under it.
        """
        (width, height), (x, y) = self.map_px, self.corners[0]
        beside = (-left, -_STRIP_PX, left - 2, height + 2 * _STRIP_PX)
        under = (-_STRIP_PX, height + 2, width + 2 * _STRIP_PX, below)
        for dx, dy, wide, tall in (beside, under):
            self.copy((x + dx, y + dy, wide, tall), [(x + dx, y + dy) for x, y in self.corners[1:]])

    def _seams(self, queries: Tokens, keys: Tokens) -> None:
        """Lines where the second text of a pair, or what the model wrote, begins."""
        cell, (width, height) = self.grid.cell_px / self.pool, self.map_px
        lines: list[list[tuple[float, float]]] = []
        for x, y in self.corners:
            lines += [[(x, y + at * cell), (x + width, y + at * cell)] for at in _seams_of(queries)]
            lines += [[(x + at * cell, y), (x + at * cell, y + height)] for at in _seams_of(keys)]
        if lines:
            self.lines(lines, color="#d1495b", animated=True)

    def _number_cells(self, shape: tuple[int, int]) -> list[Text]:
        (x, y), cell, size = self.corners[0], self.grid.cell_px, self.grid.number_px
        return [
            self.write(x + (k + 0.5) * cell, y + (q + 0.5) * cell, "", size, ha="center", animated=True)
            for q in range(shape[0])
            for k in range(shape[1])
        ]

    def _colour_bar(self, cmap: Colormap) -> None:
        x, y, width, height = self.grid.bar
        size, meaning = layout.CAPTION_PX * self.zoom, self.meaning[self.style.scale] if self.grid.says_meaning else ""
        meaning = self.lettering.fit(meaning, size, self.width_px - x - width - 50)
        self.draw_scale(self.grid.bar, cmap, (0.0, 1.0), ticks={}, size_px=size, meaning=meaning)
        below = y + height + 12 * self.zoom
        self._ticks = [self.write(x, below, "", size, ha="center", animated=True) for _ in range(7)]
        self._tick(1.0)

    def _tick(self, top: float) -> None:
        x, _, width, _ = self.grid.bar
        values = layout.nice_ticks(top)
        for number, text in enumerate(self._ticks):
            text.set_text(f"{values[number]:g}" if number < len(values) else "")
            text.set_x(x + width * (values[number] / top if number < len(values) else 0))


class BarCanvas(_Page):
    """The keys that one query attends to: bars, a panel a head."""

    meaning = "bars: the share of the query's attention that each key gets; a full panel is 1"

    def __init__(self, record: Heatmap, sheet: Sheet, titles: Sequence[str], header: Header, style: Style) -> None:
        attention = record.maps[sheet.map]
        keys = attention.keys
        lettering = lettering_for([header.model, header.subtitle, *keys.labels, *attention.queries.labels], style.paper)
        layers = {layer for layer, _ in sheet.heads}
        columns = len(sheet.heads) // len(layers) if len(sheet.heads) % len(layers) == 0 and len(layers) > 1 else 0
        if record.picked is not None or not columns:
            columns = layout.columns_for(len(sheet.heads))
        self.n_bars = min(layout.most_bars(-(-len(sheet.heads) // columns), style.paper), len(keys))
        notes = [self.meaning, *header.notes[1:]]
        if self.n_bars < len(keys):
            notes.append(f"the {self.n_bars} of {len(keys)} keys with the largest weight in any of these heads")
        notes += lettering.notes
        widest = widest_label(lettering, keys.labels)
        around = layout.Surroundings(notes, lettering.width_px, paper=style.paper)
        self.bars = bars = layout.bar_grid(len(sheet.heads), columns, self.n_bars, widest, around)
        super().__init__(bars.width_px, bars.height_px, lettering, header)
        size = self.paper.letters(min(layout.PANEL_TITLE_PX, bars.panel_px / 4))
        pitch = bars.corners[1][0] - bars.corners[0][0] if columns > 1 else math.inf
        step = self.label_step(max(titles, key=len), size, pitch)
        for number, ((x, y), title) in enumerate(zip(bars.corners, titles, strict=True)):
            if number % columns % step == 0:
                self.entitle(x, y - 11, title, size)
        self.bar_axes(bars.corners, bars.panel_px, self.n_bars * bars.bar_px)
        self.foot(bars.footer_y, bars.footer)
        self._bars = self.polygons([], animated=True, facecolors=_BAR, edgecolors="none")
        middles = [(number + 0.5) * bars.bar_px for number in range(self.n_bars)]
        size = bars.label_px
        self._labels = [
            [self.write(x - 6, y + m, "", size, animated=True, ha="right", va="center_baseline") for m in middles]
            for x, y in bars.corners[::columns]
        ]
        self._weights = [
            self.write(x, y + m, "", size * 0.9, animated=True, va="center_baseline")
            for x, y in (bars.corners if bars.numbers_fit else ())
            for m in middles
        ]

    def show(self, record: Heatmap, sheet: Sheet) -> BarCanvas:
        """Puts the weights of a sheet's query on the canvas."""
        attention, bars = record.maps[sheet.map], self.bars
        self.set_title(record, sheet)
        rows = np.stack([attention.of(*pair)[sheet.query] for pair in sheet.heads])
        shown = np.sort(np.argsort(-rows.max(0), kind="stable")[: self.n_bars])
        for texts in self._labels:
            for text, key in zip(texts, shown, strict=True):
                text.set_text(self.lettering.fit(attention.keys.labels[key], bars.label_px, bars.label_room_px + 4))
                text.set_color(label_color(attention.keys, int(key)))
        thick = bars.bar_px * 0.74
        boxes = [
            (x, y + (number + 0.5) * bars.bar_px - thick / 2, bars.panel_px * float(weight), thick)
            for (x, y), row in zip(bars.corners, rows[:, shown], strict=True)
            for number, weight in enumerate(row)
        ]
        self._bars.set_verts(list(vertices_of(np.array(boxes, np.float64))))
        for text, (x, _, width, _), weight in zip(self._weights, boxes, rows[:, shown].ravel(), strict=False):
            inside = weight > 0.85
            text.set_x(x + width + (-6 if inside else 6))
            text.set_horizontalalignment("right" if inside else "left")
            text.set_color("white" if inside else FAINT)
            text.set_text(f"{weight:.2f}" if weight >= 0.005 else "")
        return self


class Painter:
    """Draws records; keeps the canvases of the last one, so that its layers share their labels."""

    map_canvas: type[MapCanvas] = MapCanvas
    bar_canvas: type[BarCanvas] = BarCanvas

    def __init__(self, style: Style, threads: int = 2) -> None:
        """With 0 `threads`, the thread that draws also compresses and writes."""
        self.style, self.threads = style, threads
        self._canvases: dict[tuple[object, ...], MapCanvas | BarCanvas] = {}

    def draw(self, record: Heatmap, sheets: Sequence[Sheet], folder: Path, formats: Sequence[str]) -> list[Path]:
        """Draws sheets into a folder, in the order of the sheets and formats."""
        return write_pages(self.pages(record, sheets), folder, formats, self.threads)

    def pages(self, record: Heatmap, sheets: Sequence[Sheet]) -> Iterator[tuple[str, Canvas]]:
        """The figures one after the other; sheets share canvases, so each is whole until the next one is asked for."""
        used: set[int] = set()
        for sheet in sheets:
            canvas = self.canvas(record, sheet)
            used.add(id(canvas))
            yield sheet.stem, canvas.show(record, sheet)
        # Of many texts, one after the other, only the last one's canvases are of use.
        self._canvases = {name: canvas for name, canvas in self._canvases.items() if id(canvas) in used}

    @matplotlib_defaults()
    def prepare(self, record: Heatmap, sheets: Sequence[Sheet], formats: Sequence[str]) -> None:
        """Draws what does not depend on the weights; the record need not have them yet."""
        for sheet in sheets:
            canvas = self.canvas(record, sheet)
            if "png" in formats:
                canvas.prepare()

    def canvas(self, record: Heatmap, sheet: Sheet) -> MapCanvas | BarCanvas:
        """The canvas for a sheet, with everything on it that does not depend on the weights.

        It may be called before the model has run, to have the labels ready: only the shape of the record counts.
        """
        attention, (header, titles) = record.maps[sheet.map], self.describe(record, sheet)
        name: tuple[object, ...] = (sheet.form, header, titles, sheet.query, sheet.marked, record.picked is None)
        for tokens in (attention.queries, attention.keys):  # labels, their colours, and seams
            name += (tokens.labels, tokens.special.tobytes(), tokens.segments.tobytes(), tokens.n_given)
        if name not in self._canvases:
            kind = self.bar_canvas if sheet.form == "bars" else self.map_canvas
            self._canvases[name] = kind(record, sheet, titles, header, self.style)
        return self._canvases[name]

    def describe(self, record: Heatmap, sheet: Sheet) -> tuple[Header, tuple[str, ...]]:
        """The words around the maps of a sheet, and the title of each map."""
        attention = record.maps[sheet.map]
        short = len(sheet.layers) == 1 and record.picked is None
        titles = tuple(_head_title(attention, pair, short=short) for pair in sheet.heads)
        return _header(record, attention, sheet.form), titles


def _seams_of(tokens: Tokens) -> list[int]:
    """The tokens at which another text begins, or what the model wrote."""
    places = (np.flatnonzero(np.diff(tokens.segments)) + 1).tolist()
    return [*places, *([tokens.n_given] if 0 < tokens.n_given < len(tokens) else [])]
