"""Make the figures of attention maps of a text, or of a pooled long text, and draw figures one after the other.

A `FigureSpec` is the plan of one figure: its heads and the stem of its file name. A `NamedFigure` is the figure itself,
with its values. A record holds the maps of a model on one input: exact maps (`Heatmap`), or, for long texts, maps whose
cells pool several tokens (`PooledHeatmap`). `heatmap_figures` and `heatmap_sounds` make the figures of pictures and
recordings with the helpers here.
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
LayerHead = tuple[int, int]
"""A head: (the number of its layer, the number of the head in this layer), both from 0."""

_SPECIAL_COLOR = "#9a5b00"
"""The colour of the labels of special tokens."""

_GENERATED_COLOR = "#0b6e4f"
"""The colour of the labels of tokens that the model generated."""

_MAX_QUOTED_LETTERS = 2000
"""At most so many letters of a text are quoted. A quote has one line, and to measure a whole book takes seconds."""

_N_LABELLED_KEYS = 2
"""How many keys of each framed row have labels even if labels are sparse: those with the largest weights."""

_WEIGHT_MEANING = scale_meanings(
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
# The end of the sentence `_POOLED_MEANING`, by `Style.scale`.
_POOLED_MEANING_ENDS = {
    "fixed": "",
    "head": ", ÷ the largest of the same head",
    "figure": ", ÷ the largest of this figure",
}


# Figures -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FigureSpec:
    """Plan one figure: its heads and its names.

    Attributes:
        stem: The file name without its suffix.
        form: "overview" = small maps without token labels, "grid" = larger maps with labels, "single" = one map.
        heads: The heads of its maps, in reading order.
        subject: The heads in words, such as "layer 3", for the title.
    """

    stem: str
    form: Form
    heads: tuple[LayerHead, ...]
    subject: str

    def titles(self, attention: HeadMaps) -> dict[str, Any]:
        """Return a keyword argument of `MapsFigure` that names the heads.

        It is `names`, (row name, column name) of each map, for an overview; else `titles`, one per map.
        """
        if self.form != "overview":
            return {"titles": tuple(attention.name_of(*layer_head) for layer_head in self.heads)}
        names = []
        for layer, head in self.heads:
            layer_name = f"L{layer}"
            head_name = attention.head_name(head)
            # Rows are layers, columns are heads. A rollout, whose two maps per layer have names instead of head
            # numbers, is turned: rows are the two maps, columns are layers.
            if attention.head_names:
                names.append((head_name, layer_name))
            else:
                names.append((layer_name, head_name))
        return {"names": tuple(names)}


@dataclass(frozen=True, eq=False)
class NamedFigure:
    """Hold a figure of maps with its values.

    Attributes:
        stem: The file name without its suffix.
        title: The title of the page.
        figure: Everything else of the figure: labels, notes, marks.
        values: The values of each map, (row, column).
        is_logarithmic: Whether colours show the logarithm of values.
        max_value: The value of the darkest colour; None = as `Style.scale` says.
    """

    stem: str
    title: str
    figure: MapsFigure
    values: Sequence[NDArray[Any]]
    is_logarithmic: bool = False
    max_value: float | None = None


def draw_figures(named_figures: Iterable[NamedFigure], style: Style) -> Iterator[tuple[str, MapsPage]]:
    """Draw figures one after the other; yield the stem of each file name, and its page.

    Consecutive figures that differ only in title and values share one page object, which is changed in place. So save
    a page before you ask for the next one.
    """
    page: MapsPage | None = None
    for named_figure in named_figures:
        if style.colours == "log" and not named_figure.is_logarithmic:
            figure = replace(named_figure.figure, meaning=f"{named_figure.figure.meaning} (logarithmic)")
            named_figure = replace(named_figure, figure=figure, is_logarithmic=True)
        if page is None or page.content != named_figure.figure:
            page = MapsPage(named_figure.figure, style.paper)
        _set_page_values(page, named_figure, style)
        yield named_figure.stem, page


def _set_page_values(page: MapsPage, named_figure: NamedFigure, style: Style) -> None:
    """Put the title and the values of a figure on its page, and set its colour scale."""
    values = named_figure.values
    # The value of the darkest colour, for each map.
    if named_figure.max_value is None:
        largest_values = [
            float(map_values[np.isfinite(map_values)].max(initial=0.0)) for map_values in values
        ]
        max_values = style.darkest_values(largest_values)
    else:
        max_values = [named_figure.max_value] * len(values)
    # The number at the end of the colour bar. If all maps share a largest value (the scale "figure", or a `max_value`),
    # the bar ends there. Else the bar ends at 1: with the scale "fixed", 1 has the darkest colour in all maps; with the
    # scale "head", the bar shows values divided by the largest of their own head.
    bar_end = max_values[0] if style.scale == "figure" or named_figure.max_value is not None else 1.0
    if not named_figure.is_logarithmic:
        ticks = {tick: f"{tick:g}" for tick in layout.nice_ticks(bar_end)}
        page.set_values(
            named_figure.title,
            values,
            [(0.0, max_value) for max_value in max_values],
            (0.0, bar_end),
            ticks,
        )
        return
    # On a logarithmic bar each power of ten, a decade, has the same length. The page writes numbers in the cells of the
    # first map alone. They are values, not logarithms, so the values of the first map are passed too.
    ticks = {
        float(decade): f"{bar_end * 10.0 ** (decade - N_DECADES):g}" for decade in range(N_DECADES + 1)
    }
    log_shares = [
        scale_logarithmically(map_values, max_value)
        for map_values, max_value in zip(values, max_values, strict=True)
    ]
    page.set_values(
        named_figure.title, log_shares, [(0.0, 1.0)] * len(values), (0.0, N_DECADES), ticks, values[0]
    )


def plan_figures(
    record: Heatmap | PooledHeatmap,
    attention: Any,
    prefix: str = "",
    suffix: str = "",
    *,
    is_one_figure_per_head: bool = False,
) -> list[FigureSpec]:
    """Plan the figures of one kind of attention.

    There is an overview if it has several layers, then a figure per layer. Heads that the user picked share one figure.

    Args:
        record: The record.
        attention: One of `record.maps`: the maps of all heads of one kind of attention.
        prefix: The beginning of each stem.
        suffix: The end of each stem.
        is_one_figure_per_head: Whether each picked head has a figure of its own instead.
    """
    heads = record.chosen(attention)
    is_picked = record.picked is not None
    if isinstance(record, Heatmap) and record.mean_name:
        form: Form = "single" if len(heads) == 1 else "grid"
        return [FigureSpec(f"{prefix}mean{suffix}", form, heads, record.mean_name)]
    figure_specs = []
    layers = sorted({layer for layer, _ in heads})
    # An overview of one layer would only repeat that layer's figure.
    if len(layers) > 1 and not is_picked:
        n_heads = len({head for _, head in heads})
        subject = f"{amount(len(layers), 'layer')}, {amount(n_heads, 'head')}"
        figure_specs.append(FigureSpec(f"{prefix}overview{suffix}", "overview", heads, subject))
    # The heads of each figure, by its stem without prefix and suffix.
    heads_by_stem: dict[str, tuple[LayerHead, ...]] = {}
    if not is_picked and len(heads) > 1:
        for layer in layers:
            heads_by_stem[f"L{layer:02d}"] = tuple(
                layer_head for layer_head in heads if layer_head[0] == layer
            )
    elif len(heads) > 1 and not is_one_figure_per_head:
        heads_by_stem["picked"] = heads
    else:
        for layer, head in heads:
            heads_by_stem[f"L{layer:02d}H{head:02d}"] = ((layer, head),)
    for stem, figure_heads in heads_by_stem.items():
        layer, head = figure_heads[0]
        is_one_layer = len({layer for layer, _ in figure_heads}) == 1
        subject = f"layer {layer}" if is_one_layer else amount(len(figure_heads), "head")
        form = "grid"
        if len(figure_heads) == 1:
            form = "single"
            subject += f", head {head}"
        figure_specs.append(FigureSpec(f"{prefix}{stem}{suffix}", form, figure_heads, subject))
    return figure_specs


def name_model(record: MapsResult[Any]) -> str:
    """Return the name of the model, the beginning of titles."""
    return str(record.run.get("model", "model"))


def quote_texts(*texts: str, separator: str = "") -> str:
    """Return texts on one line, each in quotes, with a separator such as "→" between them."""
    quotes = [f"“{' '.join(text[:_MAX_QUOTED_LETTERS].split())}”" for text in texts]
    return f"  {separator}  ".join(quotes)


def make_captions(values: Sequence[NDArray[Any]], facts: Sequence[str]) -> tuple[str, ...]:
    """Return the caption beside each map's title: its largest value, then its fact; "" = no fact."""
    captions = []
    for map_values, fact in zip(values, facts, strict=True):
        caption = f"max {map_values.max():.3g}"
        captions.append(f"{caption} · {fact}" if fact else caption)
    return tuple(captions)


def note_shared_kv_heads(attention: HeadMaps) -> list[str]:
    """Return a note if query heads share key/value heads (grouped-query attention), else an empty list."""
    if attention.n_kv_heads == attention.n_heads:
        return []
    kv_heads_phrase = amount(attention.n_kv_heads, "key/value head")
    return [
        f"{attention.n_heads} query heads share {kv_heads_phrase} (kv); heads with the same kv read the same keys"
    ]


def make_axis(tokens: Tokens, marked: Sequence[int] = ()) -> Axis:
    """Return one side of a map: labels with colours, and lines before a second text and before generated tokens.

    Sparse labels leave out some tokens, but never the `marked` tokens.
    """
    # A line is drawn before each of these tokens. A segment is one text of a pair.
    boundaries = (np.flatnonzero(np.diff(tokens.segments)) + 1).tolist()
    colors = np.where(tokens.special, _SPECIAL_COLOR, INK)
    # `n_given` counts the tokens of the prompt, before the generated ones; -1 = nothing was generated.
    if tokens.n_given >= 0:
        colors[tokens.n_given :] = _GENERATED_COLOR
        if 0 < tokens.n_given < len(tokens):
            boundaries.append(tokens.n_given)
    return Axis(tokens.labels, tuple(colors.tolist()), tuple(boundaries), tuple(marked))


# Exact maps ---------------------------------------------------------------------------------------------------------


def yield_text_figures(
    record: Heatmap, style: Style, query: str | None = None, *, prefix: str = ""
) -> Iterator[NamedFigure]:
    """Yield the figures of a text: for each kind of attention those of `plan_figures`.

    A query frames the rows of the tokens that it names. It also adds a figure of all heads for each of these tokens.

    Args:
        record: The record.
        style: Colours and sizes.
        query: Names tokens, as `Tokens.find` takes it; None = no query.
        prefix: The beginning of file names.

    Raises:
        AttnscopeError: The query names no token.
    """
    queries_by_map = [attention.queries for attention in record.maps]
    if query is not None and not any(query_tokens.find(query) for query_tokens in queries_by_map):
        raise queries_by_map[0].not_found(query, *queries_by_map[1:])
    for attention in record.maps:
        # All picked heads may be of another kind of attention.
        if not record.chosen(attention):
            continue
        stem_prefix = f"{prefix}{attention.kind}-" if record.has_several_kinds else prefix
        query_tokens = () if query is None else attention.queries.find(query)
        for figure_spec in plan_figures(record, attention, stem_prefix):
            yield _make_map_figure(record, attention, figure_spec, style, query_tokens)
        for token in query_tokens:
            yield _make_query_figure(record, attention, f"{stem_prefix}query-{token:03d}", token, style)


def _make_map_figure(
    record: Heatmap,
    attention: AttentionMap,
    figure_spec: FigureSpec,
    style: Style,
    framed_queries: tuple[int, ...],
) -> NamedFigure:
    """Return a figure of the maps of some heads, with a frame around the row of each framed query."""
    subject = figure_spec.subject
    if figure_spec.form == "overview":
        titles = figure_spec.titles(attention)
        # The small maps of an overview have no frames.
        framed_queries = ()
        if attention.kind == ROLLOUT:  # map 1 is the rollout (or relevance), map 0 the mean attention
            subject = f"{attention.head_name(1)} over {amount(len(attention.layers), 'layer')}"
    else:
        # If all heads are of one layer, the title of the figure names it, so titles of maps need not.
        is_short = record.picked is None and len({layer for layer, _ in figure_spec.heads}) == 1
        titles = {"titles": _make_head_titles(attention, figure_spec.heads, is_short=is_short)}
        if attention.kind == ROLLOUT:
            subject += ": attention, and where it came from"
    # One map, (query, key), per head.
    maps = [attention.of(*layer_head) for layer_head in figure_spec.heads]
    query_axis = make_axis(attention.queries, framed_queries)
    key_axis = make_axis(attention.keys, _find_strongest_keys(maps, framed_queries))
    captions = []
    if style.scale == "head":
        captions = [f"max {weights.max():.2f}" for weights in maps]
    # `--layout` sets how many picked heads are in a row.
    has_layout = style.layout is not None and record.picked is not None and figure_spec.form == "grid"
    figure = MapsFigure(
        **titles,
        axes=((query_axis, key_axis),),
        framed_boxes=tuple((0, row, len(attention.keys), row + 1) for row in framed_queries),
        has_numbers=figure_spec.form == "single",
        captions=tuple(captions),
        columns=style.columns if has_layout else 0,
        shares_labels=has_layout,
        font_texts=(name_model(record),),
        **_make_common_fields(record, attention, figure_spec.form, style),
    )
    return NamedFigure(figure_spec.stem, _make_title(record, attention, subject), figure, maps)


def _find_strongest_keys(maps: Sequence[NDArray[np.float32]], queries: Sequence[int]) -> list[int]:
    """Return the keys with the largest weights in some rows of maps, (query, key) each; the largest weight first."""
    if not queries:
        return []
    # (head, chosen query, key)
    weights = np.stack(maps)[:, list(queries)]
    keys_by_weight = np.argsort(-weights, axis=-1, kind="stable")
    strongest_keys = np.unique(keys_by_weight[..., :_N_LABELLED_KEYS])
    # Each key's largest weight over heads and queries, (key,).
    max_weights = weights.max((0, 1))
    return sorted(strongest_keys.tolist(), key=lambda key: -max_weights[key])


def _make_query_figure(
    record: Heatmap, attention: AttentionMap, stem: str, query: int, style: Style
) -> NamedFigure:
    """Return a figure of what one query attends to in all heads: one map, with a row per head."""
    heads = record.chosen(attention)
    token_phrase = f"“{attention.queries.labels[query]}” (token {query})"
    subject = (
        f"where {token_phrase} came from"
        if attention.kind == ROLLOUT
        else f"what {token_phrase} attends to"
    )
    # (head, key)
    weights = np.stack([attention.of(*layer_head)[query] for layer_head in heads])
    head_axis = Axis(_make_head_titles(attention, heads, is_short=False))
    figure = MapsFigure(
        titles=("a row per head" if style.caption else "",),
        axes=((head_axis, make_axis(attention.keys)),),
        has_numbers=True,
        font_texts=(name_model(record), token_phrase),
        **_make_common_fields(record, attention, "query", style),
    )
    return NamedFigure(stem, _make_title(record, attention, subject), figure, [weights])


def _make_common_fields(
    record: Heatmap, attention: AttentionMap, form: str, style: Style
) -> dict[str, Any]:
    """Return the fields of `MapsFigure` that all figures of a text share; `form` as in `_make_notes`."""
    meaning = _ROLLOUT_MEANING if attention.kind == ROLLOUT else _WEIGHT_MEANING
    return {
        "subtitle": _make_subtitle(record, attention),
        "notes": tuple(_make_notes(record, attention, form)),
        "meaning": meaning[style.scale],
        "cmap": style.cmap,
    }


def _make_title(record: Heatmap, attention: AttentionMap, subject: str) -> str:
    """Return the title of a figure: the model, the kind of attention if there are several, and the subject."""
    if record.has_several_kinds:
        kind = "cross-attention" if attention.kind == "cross" else attention.kind
        subject = f"{kind} · {subject}"
    return f"{name_model(record)} · {subject}"


def _make_head_titles(
    attention: AttentionMap, heads: Sequence[LayerHead], *, is_short: bool
) -> tuple[str, ...]:
    """Return the name of each head, without its layer if short, and of its key/value head if query heads share it."""
    titles = []
    for layer, head in heads:
        title = attention.head_name(head) if is_short else attention.name_of(layer, head)
        if attention.n_kv_heads < attention.n_heads:
            kv_head = head * attention.n_kv_heads // attention.n_heads
            title += f" · kv {kv_head}"
        titles.append(title)
    return tuple(titles)


def _make_subtitle(record: Heatmap, attention: AttentionMap) -> str:
    """Return the text in quotes, followed by the second text or by the text that the model generated."""
    queries = attention.queries
    if attention.kind != "encoder" and record.has_several_kinds:
        return quote_texts(record.text, queries.text, separator="→")
    # The generated text begins at the character offset of its first token; -1 = the tokenizer has no offsets.
    if 0 < queries.n_given < len(queries):
        start = int(queries.offsets[queries.n_given, 0])
        if start >= 0:
            return quote_texts(record.text, queries.text[start:], separator="…")
    if queries.pair is not None:
        return quote_texts(record.text, queries.pair, separator="+")
    return quote_texts(record.text)


def _make_notes(record: Heatmap, attention: AttentionMap, form: str) -> list[str]:
    """Return the notes at the foot of a figure; `form` is that of its `FigureSpec`, or "query" for a row per head."""
    queries = attention.queries
    rows_noun = "heads" if form == "query" else "queries (attend)"
    notes = [f"rows: {rows_noun} · columns: keys (are attended to)"]
    if attention.kind == ROLLOUT:  # columns of mean attention are keys, others are input tokens
        notes = [
            "rows: tokens after a layer · columns: of mean attention the layer's keys, else input tokens"
        ]
    if isinstance(record, Rollout):
        notes.append(record.method)
    notes += [*change_notes(record, attention.kind), *note_shared_kv_heads(attention)]
    if 0 <= queries.n_given < len(queries):
        if form != "overview":
            notes.append("green tokens were written by the model itself")
        if form != "query" and queries.n_given:
            notes.append("red lines: from here on the model wrote")
    elif form != "query" and (np.diff(queries.segments).any() or np.diff(attention.keys.segments).any()):
        notes.append("red lines: the second text begins")
    # Add notes of the run, but not on other kinds of layers: `models.hf.survey` writes notes "… in encoder layers 0-3".
    other_layers = [f" {other.kind} layers" for other in record.maps if other.kind != attention.kind]
    for note in run_notes(record.run):
        if not any(words in note for words in other_layers):
            notes.append(note.removesuffix("."))
    return notes


# Pooled maps --------------------------------------------------------------------------------------------------------


def yield_pooled_figures(
    record: PooledHeatmap, style: Style, query: str | None = None
) -> Iterator[NamedFigure]:
    """Yield an overview and a figure per layer, or a figure of each picked head."""
    if query is not None:
        raise UsageError(
            "pooled maps have no --query", "leave it out, or draw the exact part with heatmap --rows"
        )
    for attention in record.maps:
        stem_prefix = f"{attention.kind}-" if record.has_several_kinds else ""
        for figure_spec in plan_figures(record, attention, stem_prefix, is_one_figure_per_head=True):
            yield _make_pooled_figure(record, attention, figure_spec, style)


def _make_pooled_figure(
    record: PooledHeatmap, attention: PooledMap, figure_spec: FigureSpec, style: Style
) -> NamedFigure:
    """Return a figure of the pooled maps of some heads.

    The map of a single head has frames around its strongest links (single weights between distant tokens).
    """
    tokens_noun = "tokens" if attention.query_cell == attention.key_cell else "queries and keys"
    notes = [
        "rows: queries (attend) · columns: keys (are attended to) · "
        f"a cell holds {attention.query_cell} × {attention.key_cell} {tokens_noun}, exactly pooled"
    ]
    n_cell_rows, n_cell_columns = attention.cells.shape[2:]
    query_axis = _make_pooled_axis(len(attention.queries), n_cell_rows, attention.query_cell)
    key_axis = _make_pooled_axis(len(attention.keys), n_cell_columns, attention.key_cell)
    # A frame leaves one cell free around the link's cell, so that the cell can be seen.
    framed_boxes = []
    if figure_spec.form == "single":
        for link in attention.links(*figure_spec.heads[0]):
            column = link.key // attention.key_cell
            row = link.query // attention.query_cell
            framed_boxes.append((column - 1, row - 1, column + 2, row + 2))
        notes.append(
            f"framed: the strongest links{attention.far_phrase}, without special tokens and the first token as key"
        )
    figure = MapsFigure(
        **figure_spec.titles(attention),
        subtitle=quote_texts(record.text),
        notes=(*notes, *note_shared_kv_heads(attention), *run_notes(record.run)),
        axes=((query_axis, key_axis),),
        meaning=f"{_POOLED_MEANING}{_POOLED_MEANING_ENDS[style.scale]}",
        cmap=style.cmap,
        max_panel_px=780,
        font_texts=(name_model(record),),
        framed_boxes=tuple(framed_boxes),
    )
    kind_prefix = f"{attention.kind} " if record.has_several_kinds else ""
    length_phrase = amount(len(attention.keys), "token")
    if attention.kind == "cross":
        length_phrase = f"{len(attention.queries):,} × {length_phrase}"
    title = f"{name_model(record)} · {kind_prefix}{figure_spec.subject} · {length_phrase}"
    # One map of cells, (row, column), per head.
    maps = [attention.of(*layer_head) for layer_head in figure_spec.heads]
    return NamedFigure(figure_spec.stem, title, figure, maps, is_logarithmic=True)


def _make_pooled_axis(n_tokens: int, n_cells: int, cell_tokens: int) -> Axis:
    """Return one side of a pooled map: cells of `cell_tokens` tokens each, and ticks at round positions of tokens."""
    ticks = []
    for tick in layout.nice_ticks(float(n_tokens)):
        if tick == round(tick):
            # The last cell may have fewer tokens, but is as long as the others. So the side has the length of
            # `n_cells * cell_tokens` tokens.
            share_of_side = tick / (n_cells * cell_tokens)
            ticks.append((share_of_side, f"{tick:,.0f}"))
    return Axis(n=n_cells, ticks=tuple(ticks))
