"""Make plates of a text or a pooled long text: figures with their values, each with the name of its file.

Plates are drawn one after the other; those that differ in values alone are drawn on the same page again.
`heatmap_figures` and `heatmap_sounds` make plates of pictures and recordings, with the helpers here.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing import layout
from attnscope.drawing.canvas import INK
from attnscope.drawing.cells import N_DECADES, scale_logarithmically
from attnscope.drawing.map_figure import Axis, MapsFigure
from attnscope.drawing.maps import MapsPage
from attnscope.drawing.style import Style, scale_meanings
from attnscope.errors import UsageError, amount
from attnscope.questions.heatmap import AttentionMap, Heatmap, Rollout
from attnscope.questions.maps import ROLLOUT, HeadMaps, MapsResult
from attnscope.questions.pooled import PooledHeatmap, PooledMap
from attnscope.report.wording import change_notes, run_notes
from attnscope.results.tokens import Tokens

Form = Literal["overview", "grid", "single"]
Pair = tuple[int, int]

_SPECIAL = "#9a5b00"
"""The colour of the labels of special tokens."""

_WRITTEN = "#0b6e4f"
"""The colour of the labels of tokens that the model wrote."""

_MAX_QUOTED = 2000
"""How many letters of a text are quoted at most. A quote has one line, and measuring a book would take seconds."""

_STRONGEST_KEYS = 2
"""How many keys of each framed row, those with the largest weights, always have their labels."""

_MEANING = scale_meanings(
    "attention weight: the share of a query's attention that a key gets",
    "attention weight ÷ the largest weight of the same head",
)
_ROLLOUT_MEANING = scale_meanings(
    "share of a row that a column gets",
    "share of a row that a column gets ÷ the largest of the same map",
)
_POOLED_MEANING = (
    "share of attention that the queries of a row give to the keys of a column (logarithmic)"
)
# What follows after _POOLED_MEANING, by the scale.
_POOLED_SCALES = {
    "fixed": "",
    "head": ", ÷ the largest of the same head",
    "figure": ", ÷ the largest of this figure",
}


# Plates -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FigureSpec:
    """Hold the heads that are drawn on one figure, and its name.

    Attributes:
        stem: Its file name without the ending.
        form: "overview" = small maps without labels, "grid" = larger ones, "single" = one head.
        heads: The heads in it, (layer, head), in reading order.
        subject: The heads in words, such as "layer 3".
    """

    stem: str
    form: Form
    heads: tuple[Pair, ...]
    subject: str

    def titles(self, attention: HeadMaps) -> dict[str, Any]:
        """Return the field of `MapsFigure` that names the heads: `titles`, or of an overview `names`, (row, column)."""
        if self.form != "overview":
            return {"titles": tuple(attention.name_of(*pair) for pair in self.heads)}
        names = []
        for layer, head in self.heads:
            layer_name = f"L{layer}"
            head_name = attention.head_name(head)
            # Layers go down and heads across. Rollout has two maps per layer: these go down, and layers across.
            if attention.head_names:
                names.append((head_name, layer_name))
            else:
                names.append((layer_name, head_name))
        return {"names": tuple(names)}


@dataclass(frozen=True, eq=False)
class NamedFigure:
    """Hold a figure of maps with its values.

    Attributes:
        stem: Its file name without the ending.
        title: The title of the page.
        figure: Everything in it but the values.
        values: The values of each map, (row, column).
        is_logarithmic: Whether colours go by the logarithm of values.
        top: The value of the darkest colour; None = that of the style.
    """

    stem: str
    title: str
    figure: MapsFigure
    values: Sequence[NDArray[Any]]
    is_logarithmic: bool = False
    top: float | None = None


def draw_plates(plates: Iterable[NamedFigure], style: Style) -> Iterator[tuple[str, MapsPage]]:
    """Draw plates one after the other; yield the file name of each, without the ending, and its page.

    Plates that differ in values alone are drawn on the same page: keep what it shows before you ask for the next one.
    """
    page: MapsPage | None = None
    for plate in plates:
        if style.colours == "log" and not plate.is_logarithmic:
            figure = replace(plate.figure, meaning=f"{plate.figure.meaning} (logarithmic)")
            plate = replace(plate, figure=figure, is_logarithmic=True)
        if page is None or page.content != plate.figure:
            page = MapsPage(plate.figure, style.paper)
        _show_values(page, plate, style)
        yield plate.stem, page


def _show_values(page: MapsPage, plate: NamedFigure, style: Style) -> None:
    """Put the values of a figure on its page."""
    values = plate.values
    # The value of the darkest colour of each map.
    if plate.top is None:
        largest = [float(cells[np.isfinite(cells)].max(initial=0.0)) for cells in values]
        darkest = style.darkest_values(largest)
    else:
        darkest = [plate.top] * len(values)
    # The value at the end of the colour bar. Where each head has its own scale, values are divided by its largest.
    bar_end = darkest[0] if style.scale == "figure" or plate.top is not None else 1.0
    if not plate.is_logarithmic:
        ticks = {tick: f"{tick:g}" for tick in layout.nice_ticks(bar_end)}
        page.set_values(plate.title, values, [(0.0, top) for top in darkest], (0.0, bar_end), ticks)
        return
    # Each power of ten has an equal share of the bar, and cells show their values as numbers.
    ticks = {float(step): f"{bar_end * 10.0 ** (step - N_DECADES):g}" for step in range(N_DECADES + 1)}
    shares = [scale_logarithmically(cells, top) for cells, top in zip(values, darkest, strict=True)]
    page.set_values(plate.title, shares, [(0.0, 1.0)] * len(values), (0.0, N_DECADES), ticks, values[0])


def sheets_of(
    record: Heatmap | PooledHeatmap,
    attention: Any,
    prefix: str = "",
    suffix: str = "",
    *,
    apart: bool = False,
) -> list[FigureSpec]:
    """Return which heads each figure of a map shows.

    There is an overview if the map has several layers, then a figure per layer. Heads that were picked have one figure
    together.

    Args:
        record: The record.
        attention: One of its maps.
        prefix: How their file names begin.
        suffix: How their file names end.
        apart: Whether each head that was picked has a figure of its own.
    """
    heads = record.chosen(attention)
    is_picked = record.picked is not None
    if isinstance(record, Heatmap) and record.mean_name:
        form: Form = "single" if len(heads) == 1 else "grid"
        return [FigureSpec(f"{prefix}mean{suffix}", form, heads, record.mean_name)]
    sheets = []
    layers = sorted({layer for layer, _ in heads})
    # An overview of one layer would only repeat that layer's figure.
    if len(layers) > 1 and not is_picked:
        n_heads = len({head for _, head in heads})
        subject = f"{amount(len(layers), 'layer')}, {amount(n_heads, 'head')}"
        sheets.append(FigureSpec(f"{prefix}overview{suffix}", "overview", heads, subject))
    # Name of a figure -> its heads.
    groups: dict[str, tuple[Pair, ...]] = {}
    if not is_picked and len(heads) > 1:
        for layer in layers:
            groups[f"L{layer:02d}"] = tuple(pair for pair in heads if pair[0] == layer)
    elif len(heads) > 1 and not apart:
        groups["picked"] = heads
    else:
        for layer, head in heads:
            groups[f"L{layer:02d}H{head:02d}"] = ((layer, head),)
    for stem, group in groups.items():
        layer, head = group[0]
        is_one_layer = len({layer for layer, _ in group}) == 1
        subject = f"layer {layer}" if is_one_layer else amount(len(group), "head")
        form = "grid"
        if len(group) == 1:
            form = "single"
            subject += f", head {head}"
        sheets.append(FigureSpec(f"{prefix}{stem}{suffix}", form, group, subject))
    return sheets


def model_name(record: MapsResult[Any]) -> str:
    """Return the name of the model, with which titles begin."""
    return str(record.run.get("model", "model"))


def quote(*texts: str, separator: str = "") -> str:
    """Return texts on one line, each in quotes, with a sign between them."""
    quoted = [f"“{' '.join(text[:_MAX_QUOTED].split())}”" for text in texts]
    return f"  {separator}  ".join(quoted)


def captions_of(values: Sequence[NDArray[Any]], facts: Sequence[str]) -> tuple[str, ...]:
    """Return what stands beside the title of each map: its largest value, and its fact unless that is empty."""
    captions = []
    for cells, fact in zip(values, facts, strict=True):
        largest = f"max {cells.max():.3g}"
        captions.append(f"{largest} · {fact}" if fact else largest)
    return tuple(captions)


def note_shared(attention: HeadMaps) -> list[str]:
    """Return a note if query heads share key/value heads, else none."""
    if attention.n_kv_heads == attention.n_heads:
        return []
    shared = amount(attention.n_kv_heads, "key/value head")
    return [
        f"{attention.n_heads} query heads share {shared} (kv); heads with the same kv read the same keys"
    ]


def axis_of(tokens: Tokens, marked: Sequence[int] = ()) -> Axis:
    """Return a side of maps: coloured labels, and lines before a second text and before what the model wrote.

    The labels of `marked` tokens are never left out.
    """
    # Tokens before which a line is drawn, here the first one of each further segment.
    boundaries = (np.flatnonzero(np.diff(tokens.segments)) + 1).tolist()
    colors = np.where(tokens.special, _SPECIAL, INK)
    if tokens.n_given >= 0:
        colors[tokens.n_given :] = _WRITTEN
        if 0 < tokens.n_given < len(tokens):
            boundaries.append(tokens.n_given)
    return Axis(tokens.labels, tuple(colors.tolist()), tuple(boundaries), tuple(marked))


# Exact maps ---------------------------------------------------------------------------------------------------------


def text_plates(
    record: Heatmap, style: Style, query: str | None = None, *, prefix: str = ""
) -> Iterator[NamedFigure]:
    """Yield the figures of a text, in the order of their files.

    They are those of `sheets_of`, for each kind of attention. A query frames the rows of the tokens that it names, and
    adds a figure of all heads for each of these tokens.

    Args:
        record: The record.
        style: How it is drawn.
        query: Names the tokens, as `Tokens.find` takes it; None = no query.
        prefix: How the names of files begin.

    Raises:
        AttnscopeError: The query names no token.
    """
    sides = [attention.queries for attention in record.maps]
    if query is not None and not any(tokens.find(query) for tokens in sides):
        raise sides[0].not_found(query, *sides[1:])
    for attention in record.maps:
        # The heads that were picked may all be of other kinds of attention.
        if not record.chosen(attention):
            continue
        stem = f"{prefix}{attention.kind}-" if record.has_several_kinds else prefix
        tokens = () if query is None else attention.queries.find(query)
        for sheet in sheets_of(record, attention, stem):
            yield _map_plate(record, attention, sheet, style, tokens)
        for token in tokens:
            yield _query_plate(record, attention, f"{stem}query-{token:03d}", token, style)


def _map_plate(
    record: Heatmap, attention: AttentionMap, sheet: FigureSpec, style: Style, tokens: tuple[int, ...]
) -> NamedFigure:
    """Return the figure of the maps of some heads, with frames around the rows of some tokens."""
    subject = sheet.subject
    if sheet.form == "overview":
        titles = sheet.titles(attention)
        # Small maps have no frames.
        tokens = ()
        if attention.kind == ROLLOUT:
            subject = f"{attention.head_name(1)} over {amount(len(attention.layers), 'layer')}"
    else:
        # The name of the figure has the layer already, if it is one.
        is_short = record.picked is None and len({layer for layer, _ in sheet.heads}) == 1
        titles = {"titles": _head_titles(attention, sheet.heads, is_short=is_short)}
        if attention.kind == ROLLOUT:
            subject += ": attention, and where it came from"
    # (query, key) of each head.
    values = [attention.of(*pair) for pair in sheet.heads]
    rows = axis_of(attention.queries, tokens)
    columns = axis_of(attention.keys, _strongest_keys(values, tokens))
    captions = []
    if style.scale == "head":
        captions = [f"max {weights.max():.2f}" for weights in values]
    # `--layout` sets rows and columns for single heads that were picked.
    has_layout = style.layout is not None and record.picked is not None and sheet.form == "grid"
    figure = MapsFigure(
        **titles,
        axes=((rows, columns),),
        framed_boxes=tuple((0, row, len(attention.keys), row + 1) for row in tokens),
        has_numbers=sheet.form == "single",
        captions=tuple(captions),
        columns=style.columns if has_layout else 0,
        shares_labels=has_layout,
        font_texts=(model_name(record),),
        **_common_fields(record, attention, sheet.form, style),
    )
    return NamedFigure(sheet.stem, _title(record, attention, subject), figure, values)


def _strongest_keys(values: Sequence[NDArray[np.float32]], rows: Sequence[int]) -> list[int]:
    """Return the keys with the largest weights in some rows of maps, (query, key), the strongest first."""
    if not rows:
        return []
    # (head, chosen row, key)
    weights = np.stack(values)[:, list(rows)]
    order = np.argsort(-weights, axis=-1, kind="stable")
    keys = np.unique(order[..., :_STRONGEST_KEYS])
    # The largest weight of each key, (key,).
    largest = weights.max((0, 1))
    return sorted(keys.tolist(), key=lambda key: -largest[key])


def _query_plate(
    record: Heatmap, attention: AttentionMap, stem: str, query: int, style: Style
) -> NamedFigure:
    """Return the figure of what one query attends to in all heads: a row per head."""
    heads = record.chosen(attention)
    token = f"“{attention.queries.labels[query]}” (token {query})"
    subject = f"where {token} came from" if attention.kind == ROLLOUT else f"what {token} attends to"
    # (head, key)
    weights = np.stack([attention.of(*pair)[query] for pair in heads])
    rows = Axis(_head_titles(attention, heads, is_short=False))
    figure = MapsFigure(
        titles=("a row per head" if style.caption else "",),
        axes=((rows, axis_of(attention.keys)),),
        has_numbers=True,
        font_texts=(model_name(record), token),
        **_common_fields(record, attention, "query", style),
    )
    return NamedFigure(stem, _title(record, attention, subject), figure, [weights])


def _common_fields(record: Heatmap, attention: AttentionMap, form: str, style: Style) -> dict[str, Any]:
    """Return the fields that all figures of a text have; `form` is that of the sheet, or "query"."""
    meaning = _ROLLOUT_MEANING if attention.kind == ROLLOUT else _MEANING
    return {
        "subtitle": _subtitle(record, attention),
        "notes": tuple(_notes(record, attention, form)),
        "meaning": meaning[style.scale],
        "cmap": style.cmap,
    }


def _title(record: Heatmap, attention: AttentionMap, subject: str) -> str:
    """Return the title of a figure: the model, the kind of attention if there are several, and its heads."""
    if record.has_several_kinds:
        kind = "cross-attention" if attention.kind == "cross" else attention.kind
        subject = f"{kind} · {subject}"
    return f"{model_name(record)} · {subject}"


def _head_titles(attention: AttentionMap, heads: Sequence[Pair], *, is_short: bool) -> tuple[str, ...]:
    """Return the name of each head, and of its key/value head if query heads share them; a short name has no layer."""
    titles = []
    for layer, head in heads:
        title = attention.head_name(head) if is_short else attention.name_of(layer, head)
        if attention.n_kv_heads < attention.n_heads:
            kv_head = head * attention.n_kv_heads // attention.n_heads
            title += f" · kv {kv_head}"
        titles.append(title)
    return tuple(titles)


def _subtitle(record: Heatmap, attention: AttentionMap) -> str:
    """Return the text in quotes, followed by the second text or by what the model wrote."""
    queries = attention.queries
    if attention.kind != "encoder" and record.has_several_kinds:
        return quote(record.text, queries.text, separator="→")
    # What the model wrote after its input, if it is known where that begins.
    if 0 < queries.n_given < len(queries):
        start = int(queries.offsets[queries.n_given, 0])
        if start >= 0:
            return quote(record.text, queries.text[start:], separator="…")
    if queries.pair is not None:
        return quote(record.text, queries.pair, separator="+")
    return quote(record.text)


def _notes(record: Heatmap, attention: AttentionMap, form: str) -> list[str]:
    """Return what a reader of a figure must know; `form` is that of the sheet, or "query"."""
    queries = attention.queries
    rows = "heads" if form == "query" else "queries (attend)"
    notes = [f"rows: {rows} · columns: keys (are attended to)"]
    if attention.kind == ROLLOUT:
        notes = [
            "rows: tokens after a layer · columns: of mean attention the layer's keys, else input tokens"
        ]
    if isinstance(record, Rollout):
        notes.append(record.method)
    notes += [*change_notes(record, attention.kind), *note_shared(attention)]
    if 0 <= queries.n_given < len(queries):
        if form != "overview":
            notes.append("green tokens were written by the model itself")
        if form != "query" and queries.n_given:
            notes.append("red lines: from here on the model wrote")
    elif form != "query" and (np.diff(queries.segments).any() or np.diff(attention.keys.segments).any()):
        notes.append("red lines: the second text begins")
    # Notes of the run, but none on the layers of another kind of attention.
    other_layers = [f" {other.kind} layers" for other in record.maps if other.kind != attention.kind]
    for note in run_notes(record.run):
        if not any(words in note for words in other_layers):
            notes.append(note.removesuffix("."))
    return notes


# Pooled maps --------------------------------------------------------------------------------------------------------


def pooled_plates(
    record: PooledHeatmap, style: Style, query: str | None = None
) -> Iterator[NamedFigure]:
    """Yield an overview and a figure per layer, or one for each head that was picked."""
    if query is not None:
        raise UsageError(
            "pooled maps have no --query", "leave it out, or draw the exact part with heatmap --rows"
        )
    for attention in record.maps:
        stem = f"{attention.kind}-" if record.has_several_kinds else ""
        for sheet in sheets_of(record, attention, stem, apart=True):
            yield _pooled_plate(record, attention, sheet, style)


def _pooled_plate(
    record: PooledHeatmap, attention: PooledMap, sheet: FigureSpec, style: Style
) -> NamedFigure:
    """Return the figure of the cells of some heads, with frames around the far links of a single one."""
    size = f"{attention.query_cell} × {attention.key_cell}"
    tokens = "tokens" if attention.query_cell == attention.key_cell else "queries and keys"
    notes = [
        f"rows: queries (attend) · columns: keys (are attended to) · a cell holds {size} {tokens}, exactly pooled"
    ]
    n_rows, n_columns = attention.cells.shape[2:]
    rows = _positions(len(attention.queries), n_rows, attention.query_cell)
    columns = _positions(len(attention.keys), n_columns, attention.key_cell)
    # A frame has a cell more on each side, so that it can be seen.
    boxes = []
    if sheet.form == "single":
        for link in attention.links(*sheet.heads[0]):
            column = link.key // attention.key_cell
            row = link.query // attention.query_cell
            boxes.append((column - 1, row - 1, column + 2, row + 2))
        notes.append(
            f"framed: the strongest links{attention.far_phrase}, without special tokens and the first token as key"
        )
    figure = MapsFigure(
        **sheet.titles(attention),
        subtitle=quote(record.text),
        notes=(*notes, *note_shared(attention), *run_notes(record.run)),
        axes=((rows, columns),),
        meaning=f"{_POOLED_MEANING}{_POOLED_SCALES[style.scale]}",
        cmap=style.cmap,
        max_panel_px=780,
        font_texts=(model_name(record),),
        framed_boxes=tuple(boxes),
    )
    kind = f"{attention.kind} " if record.has_several_kinds else ""
    length = amount(len(attention.keys), "token")
    if attention.kind == "cross":
        length = f"{len(attention.queries):,} × {length}"
    title = f"{model_name(record)} · {kind}{sheet.subject} · {length}"
    # (row, column) of each head.
    values = [attention.of(*pair) for pair in sheet.heads]
    return NamedFigure(sheet.stem, title, figure, values, is_logarithmic=True)


def _positions(n_tokens: int, n_cells: int, cell_tokens: int) -> Axis:
    """Return one side of a pooled map: cells of so many tokens, and ticks at round positions of tokens."""
    ticks = []
    for tick in layout.nice_ticks(float(n_tokens)):
        if tick == round(tick):
            # The last cell may have fewer tokens, so the side is as long as if all cells were full.
            share_of_side = tick / (n_cells * cell_tokens)
            ticks.append((share_of_side, f"{tick:,.0f}"))
    return Axis(n=n_cells, ticks=tuple(ticks))
