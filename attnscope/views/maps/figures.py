"""Attention on texts as figures: maps of heads with their tokens, overviews of layers, bars of one query.

Figures of pictures, sound and pooled maps are in the modules beside this one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK, Canvas, matplotlib_defaults
from attnscope.drawing.files import write_pages
from attnscope.drawing.lettering import lettering_for
from attnscope.drawing.maps import LABEL_ROOM_EM, Axis, MapsFigure, MapsPage
from attnscope.drawing.page import Page
from attnscope.drawing.style import Style, meanings
from attnscope.errors import amount
from attnscope.questions.heatmap import AttentionMap, Heatmap, Rollout
from attnscope.questions.maps import ROLLOUT
from attnscope.report.wording import change_notes, run_notes
from attnscope.results.tokens import Tokens
from attnscope.views.maps.pooling import max_pool
from attnscope.views.maps.sheets import Sheet, sheets_of_heads

_BAR, _SPECIAL, _WRITTEN = "#2f6fb0", "#9a5b00", "#0b6e4f"
_MOST_BARS = 24
_LONGEST_TEXT = 2000
_LEAST_NUMBER = 0.005
_MEANING = meanings(
    "attention weight: the share of a query's attention that a key gets",
    "attention weight ÷ the largest weight of the same head",
)
_ROLLOUT_MEANING = meanings(
    "share of a row that a column gets", "share of a row that a column gets ÷ the largest of the same map"
)
_BARS = "bars: the share of the query's attention that each key gets; a full panel is 1"


def sheets_of(record: Heatmap, query: str | None = None) -> list[Sheet]:
    """List the figures that a record is drawn as, in the order of their files.

    An overview of all layers and heads, then a figure per layer. Single heads that were picked make one figure. A query
    frames the rows of the tokens that it names, and adds a figure of bars for each. Encoder-decoders have all that for
    each kind of attention.
    """
    sheets: list[Sheet] = []
    for number, attention in enumerate(record.maps):
        heads = record.chosen(attention)
        if not heads:  # all that were picked are in other maps
            continue
        mark = f"{attention.kind}-" if len(record.maps) > 1 else ""
        tokens = () if query is None else attention.queries.find(query)
        for sheet in sheets_of_heads(heads, picked=record.picked is not None, number=number, before=mark):
            marked = () if sheet.form == "overview" else tokens
            sheets.append(replace(sheet, marked=marked))
        sheets += [Sheet(f"{mark}query-{token:03d}", "bars", heads, number, token) for token in tokens]
    if query is not None and not any(sheet.form == "bars" for sheet in sheets):
        first, *others = (attention.queries for attention in record.maps)
        raise first.refuse(query, *others)
    return sheets


def pages(record: Heatmap, style: Style | None = None, query: str | None = None) -> Iterator[tuple[str, Canvas]]:
    """Draw the figures one after the other, each with its file name without the ending."""
    return Painter(style or Style(record.usual_scale)).pages(record, sheets_of(record, query))


class Painter:
    """Draws records; keeps the pages of the last one, so that its layers share their labels."""

    def __init__(self, style: Style, threads: int = 2) -> None:
        """With 0 `threads`, the thread that draws also compresses and writes."""
        self.style = style
        self.threads = threads
        self._pages: dict[MapsFigure, MapsPage] = {}

    def draw(self, record: Heatmap, sheets: Sequence[Sheet], folder: Path, formats: Sequence[str]) -> list[Path]:
        """Draw sheets into a folder, in the order of the sheets and formats."""
        return write_pages(self.pages(record, sheets), folder, formats, self.threads)

    def pages(self, record: Heatmap, sheets: Sequence[Sheet]) -> Iterator[tuple[str, Canvas]]:
        """Draw the figures; sheets share pages, so each is whole until the next one is asked for."""
        used: set[int] = set()
        for sheet in sheets:
            page = self.page(record, sheet)
            used.add(id(page))
            yield sheet.stem, page
        # Only the pages of the last of many texts are of use.
        self._pages = {figure: page for figure, page in self._pages.items() if id(page) in used}

    def page(self, record: Heatmap, sheet: Sheet) -> MapsPage | BarsPage:
        """Draw one figure; the next one may change it."""
        if sheet.form == "bars":
            return BarsPage(record, sheet, self.style)
        page = self._empty_page(figure_of(record, sheet, self.style))
        self._show(page, record, sheet)
        return page

    @matplotlib_defaults()
    def prepare(self, record: Heatmap, sheets: Sequence[Sheet], formats: Sequence[str]) -> None:
        """Draw what does not depend on the weights; the record need not have them yet."""
        for sheet in sheets:
            if sheet.form != "bars":
                page = self._empty_page(figure_of(record, sheet, self.style))
                if "png" in formats:
                    page.prepare()

    def _empty_page(self, figure: MapsFigure) -> MapsPage:
        if figure not in self._pages:
            self._pages[figure] = MapsPage(figure, self.style.paper)
        return self._pages[figure]

    def _show(self, page: MapsPage, record: Heatmap, sheet: Sheet) -> None:
        """Put the weights of a sheet on its page."""
        attention = record.maps[sheet.map]
        values = [max_pool(attention.of(*pair), page.pool) for pair in sheet.heads]
        tops = self.style.limits([float(cells[np.isfinite(cells)].max(initial=0.0)) for cells in values])
        end = tops[0] if self.style.scale == "figure" else 1.0
        ticks = {tick: f"{tick:g}" for tick in layout.nice_ticks(end)}
        limits = [(0.0, top) for top in tops]
        page.show(title_of(record, sheet), values, limits, (0.0, end), ticks)


def figure_of(record: Heatmap, sheet: Sheet, style: Style) -> MapsFigure:
    """Say what is in a figure of maps, without its values and its title."""
    attention = record.maps[sheet.map]
    is_overview = sheet.form == "overview"
    return MapsFigure(
        subtitle=_subtitle(record, attention),
        notes=tuple(_notes(record, attention, sheet.form)),
        axes=((axis_of(attention.queries, () if is_overview else sheet.marked), axis_of(attention.keys)),),
        titles=() if is_overview else tuple(_head_titles(record, sheet)),
        names=tuple(sheet.names(attention)) if is_overview else (),
        framed=sheet.marked,
        meaning=(_ROLLOUT_MEANING if attention.kind == ROLLOUT else _MEANING)[style.scale],
        cmap=style.cmap,
        has_numbers=len(sheet.heads) == 1 and not is_overview,
        has_maxima=style.scale == "head",
        lettered=(str(record.run.get("model", "model")),),
    )


def axis_of(tokens: Tokens, marked: Sequence[int] = ()) -> Axis:
    """Return the labels of tokens, and lines where the second text or what the model wrote begins."""
    seams = (np.flatnonzero(np.diff(tokens.segments)) + 1).tolist()
    if 0 < tokens.n_given < len(tokens):
        seams.append(tokens.n_given)
    colors = tuple(label_color(tokens, place) for place in range(len(tokens)))
    return Axis(tokens.labels, colors, tuple(seams), tuple(marked))


def label_color(tokens: Tokens, place: int) -> str:
    """Return the colour of a token's label: special tokens and those that the model wrote have their own."""
    if 0 <= tokens.n_given <= place:
        return _WRITTEN
    return _SPECIAL if tokens.special[place] else INK


# Words --------------------------------------------------------------------------------------------------------------


def title_of(record: Heatmap, sheet: Sheet) -> str:
    """Return the title of a figure: the model, the kind of attention if there are several, and its heads."""
    attention = record.maps[sheet.map]
    is_rollout = attention.kind == ROLLOUT
    subject = sheet.subject
    if sheet.form == "bars":
        token = f"“{attention.queries.labels[sheet.query]}” (token {sheet.query})"
        subject = f"where {token} came from" if is_rollout else f"what {token} attends to"
    elif is_rollout:
        n_layers = amount(len(attention.layers), "layer")
        over_all = f"rollout over {n_layers}"
        subject = over_all if sheet.form == "overview" else f"{subject}: attention, and where it came from"
    parts = [str(record.run.get("model", "model")), sheet.title or subject]
    if len(record.maps) > 1 and not sheet.title:
        parts.insert(1, "cross-attention" if attention.kind == "cross" else attention.kind)
    return " · ".join(parts)


def _head_titles(record: Heatmap, sheet: Sheet) -> list[str]:
    """Return the title of each map of a figure, with the key/value head that it reads if several share it."""
    attention = record.maps[sheet.map]
    is_short = len(sheet.layers) == 1 and record.picked is None
    titles = []
    for layer, head in sheet.heads:
        title = attention.head_name(head) if is_short else attention.name_of(layer, head)
        if attention.n_kv_heads < attention.n_heads:
            title += f" · kv {head * attention.n_kv_heads // attention.n_heads}"
        titles.append(title)
    return titles


def _subtitle(record: Heatmap, attention: AttentionMap) -> str:
    """Return the text in quotes, with its second part or what the model wrote."""
    queries = attention.queries
    parts = [record.text]
    joint = "+"
    if attention.kind != "encoder" and len(record.maps) > 1:
        parts.append(queries.text)
        joint = "→"
    elif generated := _generated_text(queries):
        parts.append(generated)
        joint = "…"
    elif queries.pair is not None:
        parts.append(queries.pair)
    # Measuring a book for the one line that it gets would take seconds.
    text = f"”  {joint}  “".join(" ".join(part[:_LONGEST_TEXT].split()) for part in parts)
    return f"“{text}”"


def _generated_text(tokens: Tokens) -> str:
    """Return the text that the model wrote after its input; empty if it wrote none, or its place is not known."""
    if not 0 < tokens.n_given < len(tokens):
        return ""
    start = int(tokens.offsets[tokens.n_given, 0])
    return tokens.text[start:] if start >= 0 else ""


def _notes(record: Heatmap, attention: AttentionMap, form: str) -> list[str]:
    """Return what a reader of a figure must know."""
    queries = attention.queries
    axes, bars = "rows: queries (attend) · columns: keys (are attended to)", _BARS
    if attention.kind == ROLLOUT:
        axes = "rows: tokens after a layer · columns: of mean attention the layer's keys, else input tokens"
        bars = "bars: the share of the token's row that each input token gets; a full panel is 1"
    notes = [bars if form == "bars" else axes]
    if isinstance(record, Rollout):
        notes.append(record.method)
    notes += change_notes(record, attention.kind)
    if attention.n_kv_heads < attention.n_heads:
        shared = amount(attention.n_kv_heads, "key/value head")
        notes.append(f"{attention.n_heads} query heads share {shared} (kv); heads with the same kv read the same keys")
    if 0 <= queries.n_given < len(queries):
        if form != "overview":
            notes.append("green tokens were written by the model itself")
        if form != "bars" and queries.n_given:
            notes.append("red lines: from here on the model wrote")
    elif form != "bars" and any(len(np.unique(tokens.segments)) > 1 for tokens in (queries, attention.keys)):
        notes.append("red lines: the second text begins")
    others = [f" {other.kind} layers" for other in record.maps if other.kind != attention.kind]
    for note in run_notes(record.run):
        if not any(other in note for other in others):
            notes.append(note.removesuffix("."))
    return notes


# Bars ---------------------------------------------------------------------------------------------------------------


class BarsPage(Page):
    """The keys that one query attends to: bars, a panel per head, the keys at the left of each row of panels."""

    def __init__(self, record: Heatmap, sheet: Sheet, style: Style) -> None:
        attention = record.maps[sheet.map]
        keys, paper = attention.keys, style.paper
        title, subtitle = title_of(record, sheet), _subtitle(record, attention)
        lettering = lettering_for([title, subtitle, *keys.labels, *attention.queries.labels], paper)
        columns = self._columns(record, sheet)
        rows = math.ceil(len(sheet.heads) / columns)
        bar = max(12, math.ceil(paper.least_px / 0.82))
        n_bars = min(_most_bars(rows, bar, paper), len(keys))
        bar = max(bar, min(30, 1000 // (rows * n_bars)))
        size = paper.least_px or min(layout.MAX_LABEL_PX, bar * 0.82)
        widest = max(lettering.width_px(label, size) for label in set(keys.labels))
        left = math.ceil(min(widest, LABEL_ROOM_EM * size)) + 10
        wanted = layout.Wanted(
            n=len(sheet.heads),
            columns=columns,
            shape=(n_bars, 1),
            row_px=bar,
            around=lambda cell: layout.Around(above=layout.PANEL_HEADER_PX, below=20),
            names_px=min(left, paper.room_px // 3),
            gap_px=min(60, max(8, paper.room_px // (10 * columns))),
            largest_px=900,
            largest_cell_px=900,
            least_cell_px=40,
        )
        self.places = places = layout.arrange(wanted, paper)
        super().__init__(places.width_px, lettering)
        self.head(title, subtitle)
        self._draw_axes(_head_titles(record, sheet))
        # The keys with the largest weight in any head, in the order of the text.
        weights = np.stack([attention.of(*pair)[sheet.query] for pair in sheet.heads])
        shown = np.sort(np.argsort(-weights.max(0), kind="stable")[:n_bars])
        for x, y in places.corners[::columns]:
            for number, key in enumerate(shown.tolist()):
                label = lettering.fit(keys.labels[key], size, wanted.names_px - 6)
                color = label_color(keys, key)
                middle = y + (number + 0.5) * bar
                self.write(x - 6, middle, label, size, ha="right", va="center_baseline", color=color)
        for corner, row in zip(places.corners, weights[:, shown], strict=True):
            self._draw_bars(corner, row.tolist(), size * 0.9)
        notes = _notes(record, attention, "bars")
        if n_bars < len(keys):
            notes.append(f"the {n_bars} of {len(keys)} keys with the largest weight in any of these heads")
        self.finish(places.bottom + 16, [*notes, *lettering.notes])

    @staticmethod
    def _columns(record: Heatmap, sheet: Sheet) -> int:
        """Return how many panels stand side by side: the heads of a layer if there are several layers."""
        n_layers = len(sheet.layers)
        if record.picked is None and n_layers > 1 and len(sheet.heads) % n_layers == 0:
            return len(sheet.heads) // n_layers
        return layout.columns_for(len(sheet.heads))

    def _draw_axes(self, titles: Sequence[str]) -> None:
        """Draw the axes of the panels, dotted lines where bars of weight 1 end, and as many titles as have room."""
        places = self.places
        width, height = places.panel
        size = self.paper.letters(min(layout.PANEL_TITLE_PX, width / 4))
        step = self.label_step(max(titles, key=len), size, places.pitch_px if places.columns > 1 else math.inf)
        for number, ((x, y), title) in enumerate(zip(places.corners, titles, strict=True)):
            if number % places.columns % step == 0:
                self.entitle(x, y - 11, title, size)
        self.bar_axes(places.corners, width, height)

    def _draw_bars(self, corner: tuple[float, float], weights: Sequence[float], size: float) -> None:
        """Draw the bars of one head, and their weights if they have room."""
        width = self.places.panel[0]
        pitch = self.places.cell[1]
        has_numbers = width >= 160 and pitch >= 14
        x, y = corner
        boxes = []
        for number, weight in enumerate(weights):
            middle = y + (number + 0.5) * pitch
            length = width * weight
            boxes.append((x, middle - pitch * 0.37, length, pitch * 0.74))
            if has_numbers and weight >= _LEAST_NUMBER:
                inside = weight > 0.85
                self.write(
                    x + length + (-6 if inside else 6),
                    middle,
                    f"{weight:.2f}",
                    size,
                    ha="right" if inside else "left",
                    va="center_baseline",
                    color="white" if inside else FAINT,
                )
        self.fill(boxes, [_BAR])


def _most_bars(rows: int, bar: float, paper: layout.Paper) -> int:
    """Return how many keys bars are drawn of, in some rows of heads; on paper as many as fit the page."""
    if not paper.fixed:
        return _MOST_BARS
    tall = (layout.TALLEST_INCHES * paper.inch_px - layout.HEADER_PX - 80) / rows - layout.PANEL_HEADER_PX - 20
    return max(3, min(_MOST_BARS, math.floor(tall / bar)))
