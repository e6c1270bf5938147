"""Show attention weights in the terminal: of a text, a pooled long text, a picture, a recording, or a rollout.

A record holds the maps of a model on one input. A link is one weight, from a query to a key. Sinks are the tokens on
which most heads rest, such as special tokens; links from and to sinks are left out. The maps of a long text are pooled:
a cell stands for several tokens, and single weights are known only between distant tokens (far links).
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.text import Text

from attnscope.drawing.cells import max_pool
from attnscope.drawing.inks import blend_colors
from attnscope.errors import amount, safe
from attnscope.questions.heatmap import AttentionMap, Heatmap, Rollout
from attnscope.questions.heatmap_figures import (
    choose_words,
    compute_picture_share,
    find_query,
    weigh_keys,
    weigh_keys_of_word,
    weigh_patches,
)
from attnscope.questions.heatmap_plates import LayerHead
from attnscope.questions.links import (
    FAINT_WEIGHT,
    MIN_LINK_WEIGHT,
    compute_sink_share,
    find_links,
    find_strongest_links,
)
from attnscope.questions.maps import HeadMaps, MapsResult
from attnscope.questions.places import MEAN_QUERY, Sound
from attnscope.questions.pooled import PooledHeatmap, PooledMap, quote_token
from attnscope.report.numbers import format_percent, largest_first, weight
from attnscope.report.plain_text import cut, dim_lines, has_unicode, heading, list_numbers
from attnscope.report.table import TextColumn, TextTable
from attnscope.report.wording import change_notes, hidden_tokens
from attnscope.results.tokens import Tokens

_SHADES = " ·░▒▓█"
_ASCII_SHADES = " .:+#@"
_WHITE = "#ffffff"
_BLUE = "#08306b"

# Up to so many heads have their maps drawn, or of a pooled text all their far links listed.
_MAX_DRAWN_HEADS = 4
# How many far links each of more heads has, without the text around them.
_MAX_SHORT_LINKS = 2
# How many heads the table of a query has at most: those with the largest weights.
_MAX_QUERY_HEADS = 24
# The widest label beside a map, in characters of the terminal.
_MAX_LABEL_WIDTH = 14
# The width of the column between labels and map: a token's number, with a space on both sides.
_NUMBER_WIDTH = 6
# Smaller weights are blank.
_MIN_SHADED_WEIGHT = 0.05
# How many input tokens a row of a rollout's table names.
_MAX_ORIGINS = 3


def show(
    record: Heatmap | PooledHeatmap,
    console: Console,
    *,
    draws_maps: bool = True,
    query: str | None = None,
    prints_summary: bool = False,
    scale: str | None = None,
) -> RenderableType | None:
    """Return a record's maps, and what a query attends to; None = there is nothing to show.

    If a text has few heads, their maps are drawn. A table lists all heads with their strongest links. If a map is wider
    than the terminal, each column shows the largest weight of several keys, and a line says so. With a query there is a
    table of what it attends to. If there are many heads, that table is shown alone.

    Args:
        record: The maps of a text, a pooled long text, pictures or a recording.
        console: Its width and colours are respected (and NO_COLOR).
        draws_maps: Whether to show maps and tables of heads. If not, only the table of the query is shown.
        query: Names the tokens whose attention is shown. A pooled record, which has no rows of tokens, ignores it.
        prints_summary: Whether to list only the strongest links, one per line; ignored if `draws_maps`.
        scale: The option --scale of the figures; None = the usual scale of the record.
    """
    if prints_summary and not draws_maps:
        return _list_strongest_links(record, console, query, scale or record.usual_scale)
    if not draws_maps and query is None:
        return None
    if isinstance(record, PooledHeatmap):
        return Group(*_show_pooled_maps(record))
    if record.picture is not None:
        return Group(*_show_picture(record, query))
    if record.pictures:
        return Group(*_show_words(record, query))
    # Text: maps, then what the query attends to.
    tables = [] if query is None else make_query_tables(record, query)
    n_heads = sum(len(record.chosen(attention)) for attention in record.maps)
    # Hundreds of lines of maps would hide the tables.
    if not draws_maps or (tables and n_heads > _MAX_QUERY_HEADS):
        return Group(*tables)
    return Group(*_show_text_maps(record, console), *tables, *_show_word_times(record.sound))


def _list_strongest_links(
    record: Heatmap | PooledHeatmap, console: Console, query: str | None, scale: str
) -> Text:
    """Return the strongest links of different heads, one per line, and the option that helps if figures are pale."""
    # The positions of the tokens that the query names, in any map.
    tokens: list[int] = []
    if query is not None:
        for attention in record.maps:
            tokens += [token for token in attention.queries.find(query) if token not in tokens]
    if len(tokens) > 1:
        # One line per token: its strongest link in any head. The strongest of these links come first.
        title = f"where each of “{query}” attends most (query → key, weight from 0 to 1)"
        links = []
        for token in tokens:
            links += find_links(record, f"@{token}", max_links=1)
        links.sort(key=lambda link: -link.weight)
    else:
        links = find_links(record, query)
        title = "the strongest links, one a head (query → key, weight from 0 to 1)"
        if tokens:
            title = f"where “{query}” (token {tokens[0]}) attends most (query → key, weight from 0 to 1)"
    # If colours run from 0 to 1, weak links are invisible in the figure.
    is_faint = scale == "fixed" and (not links or links[0].weight < FAINT_WEIGHT)
    # Print five links, or one per token; one less if the last line names an option.
    n_shown = max(5, len(tokens))
    if is_faint:
        n_shown -= 1
    lines = []
    for link in links[:n_shown]:
        # Cut long words, but never the number.
        weight_text = f"  {weight(link.weight)}"
        link_text = safe(f"{link.head}  “{link.query}” → “{link.key}”")
        max_cells = min(console.width, 80) - len(weight_text)
        lines.append(cut(link_text, max(8, max_cells)) + weight_text)
    # Words for the sinks, such as "special tokens".
    left_out_phrase = hidden_tokens(record.maps[0].kind)
    if len(tokens) > len(links):
        lines.append(
            f"{len(tokens) - len(links)} of {len(tokens)} tokens attend to {left_out_phrase} or themselves alone"
        )
    lines.append(f"links to or from {left_out_phrase} are skipped; weights are as the model has them")
    if is_faint:
        lines.append(
            f"none is above {FAINT_WEIGHT:g}: --scale head shades each head by its own largest weight"
        )
    text = Text(cut(safe(title), 80), style="bold")
    for line in lines:
        text.append(f"\n{line}", style="not bold")
    return text


# Maps of text -------------------------------------------------------------------------------------------------------


def _show_text_maps(record: Heatmap, console: Console) -> Iterable[RenderableType]:
    """Yield for each kind of attention the maps, if they are few, then a table of all heads."""
    for attention in record.maps:
        heads = record.chosen(attention)
        if not heads:
            continue
        yield from _make_kind_heading(record, attention)
        if len(heads) <= _MAX_DRAWN_HEADS:
            for layer_head in heads:
                yield _draw_head(attention, layer_head, console)
            yield _make_legend(console)
        yield from dim_lines(change_notes(record, attention.kind))
        yield Text()
        yield make_links_table(record, attention)


def _make_head_column(attention: HeadMaps) -> TextColumn:
    """Return a column of names of heads, for a table whose rows are (layer, head)."""
    return TextColumn("head", lambda layer_head: attention.name_of(*layer_head), style="bold")


def _make_kind_heading(record: MapsResult[Any], attention: HeadMaps) -> list[RenderableType]:
    """Return a list of one heading, the kind of attention, if the record has several kinds; else an empty list."""
    return [heading(f"{attention.kind} attention")] if record.has_several_kinds else []


def make_query_tables(record: Heatmap, query: str) -> list[RenderableType]:
    """Return a table, with its heading, for each token that `query` names: the keys that it attends to, per head.

    If there are many heads, the table has only the heads with the largest weight on another token outside sinks.
    """
    tables: list[RenderableType] = []
    for attention in record.maps:
        prefix = f"{attention.kind}: " if record.has_several_kinds else ""
        heads = record.chosen(attention)
        for token in attention.queries.find(query):
            listed_heads: Sequence[LayerHead] = heads
            notes = []
            if len(heads) > _MAX_QUERY_HEADS:
                listed_heads = _choose_heads(record, attention, token)
                notes.append(
                    f"listed: the {len(listed_heads)} of {len(heads)} heads with the largest weight on another token "
                    "outside sinks; choose others, and draw their maps, by --layers, --heads or --pick"
                )
            title = f"{prefix}what “{safe(attention.queries.labels[token])}” (token {token}) attends to"
            table = _make_query_table(attention, listed_heads, token)
            tables += [heading(title), table, *dim_lines(notes)]
    return tables


def _choose_heads(record: Heatmap, attention: AttentionMap, token: int) -> Sequence[LayerHead]:
    """Return the heads in which a query has its largest weights on keys other than sinks and itself, in model order."""
    heads = record.chosen(attention)
    _, is_excluded = record.sinks(attention)
    # In self-attention that is not cropped, the query is the key of the same index.
    if attention.kind != "cross" and attention.part is None:
        is_excluded[token] = True
    largest_weights = [
        attention.of(*layer_head)[token][~is_excluded].max(initial=0.0) for layer_head in heads
    ]
    head_indices = largest_first(largest_weights, _MAX_QUERY_HEADS)
    return [heads[index] for index in sorted(head_indices)]


def make_links_table(record: Heatmap, attention: AttentionMap) -> TextTable:
    """Return a table with a row per head: the share of attention on sinks, and the strongest links of other tokens."""
    _, key_sinks = record.sinks(attention)
    has_sinks = bool(key_sinks.any())

    # The table calls these functions for each head that it shows.
    def name_links(layer_head: LayerHead) -> Text:
        queries = attention.queries.labels
        keys = attention.keys.labels
        return list_numbers(
            (f"{safe(queries[query])} → {safe(keys[key])}", f"{weight_value:.2f}")
            for query, key, weight_value in find_strongest_links(record, attention, layer_head)
        )

    def name_share(layer_head: LayerHead) -> str:
        return format_percent(compute_sink_share(record, attention, layer_head)) if has_sinks else "-"

    share_title = "on first" if has_sinks and not attention.keys.special.any() else "on special"
    links_title = "strongest links between other tokens (query → key weight)"
    columns = [
        _make_head_column(attention),
        TextColumn(share_title, name_share, is_right_aligned=True, drop_priority=1),
        TextColumn(links_title, name_links, wraps=True, min_width=16),
    ]
    return TextTable(columns, record.chosen(attention))


def _make_query_table(attention: AttentionMap, heads: Sequence[LayerHead], token: int) -> TextTable:
    """Return a table with a row per head: the five keys that one query, `token`, attends to most."""

    def name_keys(layer_head: LayerHead) -> Text:
        row = attention.of(*layer_head)[token]
        return _list_largest(row, attention.keys, max_tokens=5, min_share=MIN_LINK_WEIGHT, gap="   ")

    key_column = TextColumn("keys, largest weight first", name_keys, wraps=True)
    return TextTable([_make_head_column(attention), key_column], heads)


def _list_largest(
    shares: NDArray[np.float32], tokens: Tokens, max_tokens: int, min_share: float, gap: str
) -> Text:
    """Return the labels of the tokens with the largest `shares`, (token,), each with its share, largest first.

    At most `max_tokens` are listed, and only those whose shares are at least `min_share`.
    """
    # Without a limit, shares may be too small for two decimals.
    digits = ".2f" if min_share else ".3g"
    listed = [token for token in largest_first(shares, max_tokens) if shares[token] >= min_share]
    entries = ((safe(tokens.labels[token]), f"{shares[token]:{digits}}") for token in listed)
    return list_numbers(entries, gap)


# Cells --------------------------------------------------------------------------------------------------------------


def _draw_head(attention: AttentionMap, layer_head: LayerHead, console: Console) -> RenderableType:
    """Draw the map of a head as text: a label beside each row, the number of a key above every fifth column."""
    weights = attention.of(*layer_head)
    queries = attention.queries
    label_width = min(_MAX_LABEL_WIDTH, max(cell_len(safe(label)) for label in queries.labels))
    # A column is two characters wide. If not all keys fit, several keys share a column.
    n_columns = max(1, (console.width - label_width - _NUMBER_WIDTH) // 2)
    keys_per_column = math.ceil(weights.shape[1] / n_columns)
    # (query, key) pooled to (query, column).
    column_weights = max_pool(weights, keys_per_column, (1,))
    pooling_note = (
        f" (a column shows the largest of {keys_per_column} keys)" if keys_per_column > 1 else ""
    )
    lines = Text().append(f"\n{attention.name_of(*layer_head)}", style="bold")
    lines.append(f"  rows: queries, columns: keys by number{pooling_note}\n")
    # Five columns are ten characters wide.
    first_keys = range(0, keys_per_column * column_weights.shape[1], keys_per_column * 5)
    key_numbers = "".join(f"{key:<10}" for key in first_keys)
    lines.append(f"{'':{label_width + _NUMBER_WIDTH}}{key_numbers.rstrip()}", style="dim")
    for token, label in enumerate(queries.labels):
        row_label = set_cell_size(cut(safe(label), label_width), label_width)
        lines.append(f"\n{row_label}", style="yellow" if queries.special[token] else "")
        lines.append(f" {token:>4} ", style="dim")
        _append_shades(lines, column_weights[token], console)
    return lines


def _append_shades(lines: Text, weights: NDArray[np.float32], console: Console) -> None:
    """Append weights, (column,), as shades, two characters each."""
    if _has_colours(console):
        for weight_value in weights.tolist():
            shade = blend_colors(min(1.0, max(0.0, weight_value)), _WHITE, _BLUE)
            lines.append("  ", style=Style(bgcolor=shade))
        return
    shades = _SHADES if has_unicode(console) else _ASCII_SHADES
    # Index 0 is the blank, for small weights and NaN. The other shades share the range from 0 to 1 in equal steps.
    darkest_index = len(shades) - 1
    shade_indices = np.clip(1 + (weights * darkest_index).astype(int), 1, darkest_index)
    shade_indices[~(weights >= _MIN_SHADED_WEIGHT)] = 0
    lines.append("".join(shades[index] * 2 for index in shade_indices))


def _make_legend(console: Console) -> Text:
    """Return a line with the shades of some weights."""
    lines = Text("\nweight  ", style="dim")
    # A character stands for weights from this one up to the next. Colours are continuous.
    legend_weights = (_MIN_SHADED_WEIGHT, 0.2, 0.4, 0.6, 0.8)
    if _has_colours(console):
        legend_weights = (0.0, 0.25, 0.5, 0.75, 1.0)
    for legend_weight in legend_weights:
        _append_shades(lines, np.array([legend_weight], np.float32), console)
        lines.append(f" {legend_weight:g}  ")
    lines.rstrip()
    return lines


def _has_colours(console: Console) -> bool:
    """Return whether shades are background colours; else they are characters."""
    return console.color_system is not None and not console.no_color and has_unicode(console)


# Pictures and sound -------------------------------------------------------------------------------------------------


def _show_picture(record: Heatmap, query: str | None) -> Iterable[RenderableType]:
    """Yield a table with a row per head: what a query attends to in a picture."""
    attention = record.maps[0]
    picture = record.picture
    assert picture is not None
    query_index, query_label = find_query(attention, query)

    def name_strongest(layer_head: LayerHead) -> str:
        return _name_patch(weigh_patches(record, layer_head, query_index))

    def name_off_picture(layer_head: LayerHead) -> str:
        return f"{weigh_keys(attention, layer_head, query_index)[attention.keys.special].sum():.2f}"

    columns = [_make_head_column(attention), TextColumn("strongest patch", name_strongest)]
    if attention.keys.special.any():
        columns.append(TextColumn("off the picture", name_off_picture, is_right_aligned=True))
    yield Text(safe(f"{picture.facts}; what {query_label} attends to"))
    yield TextTable(columns, record.chosen(attention))


def _show_words(record: Heatmap, query: str | None) -> Iterable[RenderableType]:
    """Yield a table for each picture, with a row per word of `choose_words`: its attention to the picture."""
    words, others_note = choose_words(record, query)
    heads = record.chosen(record.maps[0])
    # A row is a tuple (word, share of attention on the picture, strongest patch).
    columns = [
        TextColumn("word", lambda row: row[0], style="bold"),
        TextColumn("on the picture", lambda row: row[1], is_right_aligned=True),
        TextColumn("strongest patch", lambda row: row[2]),
    ]
    for picture in record.pictures:
        rows = []
        for word in words:
            weights = weigh_keys_of_word(record, word, heads)
            patches = np.nan_to_num(picture.over(weights))
            share = format_percent(compute_picture_share(picture, weights))
            rows.append((word.name, share, _name_patch(patches)))
        yield Text(safe(picture.facts))
        yield TextTable(columns, rows)
        yield Text()
    heads_note = "all heads" if record.picked is None else "the heads that were picked"
    note = f"the mean of {heads_note}"
    yield Text(f"{note} ({others_note})" if others_note else note, style="dim")


def _name_patch(patches: NDArray[np.float64]) -> str:
    """Return the patch with the largest weight, such as "3,5 0.21"; `patches` are weights, (row, column)."""
    row, column = divmod(int(patches.argmax()), patches.shape[1])
    return f"{row},{column} {patches.max():.2g}"


def _show_word_times(sound: Sound | None) -> list[RenderableType]:
    """Return a list of one table, when each word of a recording is spoken; empty if that is not known."""
    if sound is None or not sound.words:
        return []
    columns = [
        TextColumn("start (s)", lambda word: f"{word.start:.2f}", is_right_aligned=True),
        TextColumn("end (s)", lambda word: f"{word.end:.2f}", is_right_aligned=True),
        TextColumn("word", lambda word: word.text, wraps=True, min_width=8),
    ]
    return [TextTable(columns, sound.words)]


# Pooled maps --------------------------------------------------------------------------------------------------------


def _show_pooled_maps(record: PooledHeatmap) -> Iterable[RenderableType]:
    """Yield a table for each kind of attention; see `_make_pooled_table`."""
    for attention in record.maps:
        if record.chosen(attention):
            yield from _make_kind_heading(record, attention)
            queries_phrase = amount(len(attention.queries), "query", "queries")
            keys_phrase = amount(len(attention.keys), "key")
            yield Text(
                f"{queries_phrase} and {keys_phrase}; figures show {attention.query_cell} × {attention.key_cell} in a "
                "cell\n",
                style="dim",
            )
            yield _make_pooled_table(record, attention)


def _make_pooled_table(record: PooledHeatmap, attention: PooledMap) -> TextTable:
    """Return a table with a row per head: its effective number of keys, the key with most attention, its far links."""
    heads = record.chosen(attention)

    def name_entropy(layer_head: LayerHead) -> str:
        entropy_nats = attention.entropy_nats[attention.place(*layer_head)]
        # The effective number of keys: attention spread equally over so many keys has this entropy, in nats.
        n_keys = np.exp(entropy_nats.mean(dtype=np.float64))
        return f"{n_keys:,.0f} keys"

    def name_most_received(layer_head: LayerHead) -> str:
        # The share of all attention that each key receives, (key,).
        shares = attention.received[attention.place(*layer_head)] / len(attention.queries)
        key = int(shares.argmax())
        return f"{format_percent(shares[key])} {safe(attention.keys.labels[key])} @{key}"

    def name_links(layer_head: LayerHead) -> Text:
        return _list_pooled_links(attention, layer_head, with_text=len(heads) <= _MAX_DRAWN_HEADS)

    columns = [
        _make_head_column(attention),
        TextColumn("e^entropy", name_entropy, is_right_aligned=True, drop_priority=2),
        TextColumn("most received", name_most_received, wraps=True, min_width=20, drop_priority=1),
        TextColumn(
            f"strongest links{attention.far_phrase} (query → key weight)",
            name_links,
            wraps=True,
            min_width=16,
        ),
    ]
    return TextTable(columns, heads)


def _list_pooled_links(attention: PooledMap, layer_head: LayerHead, *, with_text: bool) -> Text:
    """Return all far links of a head, one per line with the text around them; or without text, the two strongest."""
    links = attention.links(*layer_head)
    if not with_text:
        links = links[:_MAX_SHORT_LINKS]
    entries = []
    for link in links:
        labels = []
        for tokens, position in ((attention.queries, link.query), (attention.keys, link.key)):
            token_label = quote_token(tokens, position, 20) if with_text else tokens.labels[position]
            labels.append(f"{safe(token_label)} @{position}")
        entries.append((" → ".join(labels), weight(link.weight)))
    return list_numbers(entries, "\n" if with_text else "   ")


# Rollout ------------------------------------------------------------------------------------------------------------


def show_rollout(rollout: Rollout, console: Console, *, query: str | None = None) -> RenderableType:
    """Return tables of where tokens came from: all tokens after the last layer, or one token after every layer."""
    attention = rollout.maps[0]
    labels = attention.queries.labels
    layers = attention.layers
    if rollout.picture is not None and (query is None or query.casefold() == MEAN_QUERY):
        # Tables are about single tokens, not about the mean over patches: take CLS.
        query = "CLS"
    elif query is None and rollout.target:
        # A rollout with a target is relevance. It explains the token that predicts the target.
        query = f"@{rollout.answer_token}"
    if query is None:
        title = f"where each token came from, after layer {layers[-1]}"
        rows = [(label, layers[-1], token) for token, label in enumerate(labels)]
        return _make_origins_table(rollout, title, "token", rows)
    tokens = attention.queries.find(query)
    if not tokens:
        raise attention.queries.not_found(query)
    # One table per token, with a row per layer.
    tables = []
    for token in tokens:
        title = f"where “{safe(labels[token])}” (token {token}) came from"
        if rollout.target:
            title = f"what matters for “{safe(rollout.target)}”, as of “{safe(labels[token])}” (token {token})"
        rows = [(f"L{layer}", layer, token) for layer in layers]
        tables.append(_make_origins_table(rollout, title, "layer", rows))
    return Group(*tables)


def _make_origins_table(
    rollout: Rollout, title: str, row_title: str, rows: Sequence[tuple[str, int, int]]
) -> Group:
    """Return a table of the input tokens with the largest shares, by mean attention and by rollout.

    A row is (name, layer, token): the token in its position after the layer. `row_title` is the header of names.
    """
    attention = rollout.maps[0]
    # A picture has many patches with small shares each, so no share is too small to be listed.
    min_share = MIN_LINK_WEIGHT if rollout.picture is None else 0.0

    def name_origins(head: int, row: tuple[str, int, int]) -> Text:
        _, layer, token = row
        shares = attention.of(layer, head)[token]
        return _list_largest(
            shares, attention.keys, max_tokens=_MAX_ORIGINS, min_share=min_share, gap="  "
        )

    columns = [TextColumn(row_title, lambda row: row[0], wraps=True, min_width=16, style="bold")]
    # A rollout has two maps per layer, numbered as heads: 0 is mean attention, 1 is rollout (or relevance).
    for head in attention.heads:
        name = partial(name_origins, head)
        columns.append(TextColumn(attention.head_name(head), name, wraps=True, min_width=14))
    return Group(heading(title), TextTable(columns, rows))
