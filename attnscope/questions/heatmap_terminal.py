"""Show records of attention weights in the terminal: of a text, a pooled long text, a picture or a recording."""

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
    picture_share,
    query_of,
    query_patches,
    query_weights,
    word_weights,
    words_of,
)
from attnscope.questions.heatmap_plates import Pair
from attnscope.questions.links import FAINT, MIN_LINK, find_links, sink_share, strongest_links
from attnscope.questions.maps import HeadMaps, MapsResult
from attnscope.questions.places import MEAN_QUERY, Sound
from attnscope.questions.pooled import PooledHeatmap, PooledMap, quote_token
from attnscope.report.numbers import largest_first, percent, weight
from attnscope.report.plain_text import cut, dim_lines, has_unicode, heading, list_numbers
from attnscope.report.table import TextColumn, TextTable
from attnscope.report.wording import change_notes, hidden_tokens
from attnscope.results.tokens import Tokens

_SHADES = " ·░▒▓█"
_ASCII_SHADES = " .:+#@"
_WHITE = "#ffffff"
_BLUE = "#08306b"

# Up to so many heads have their maps drawn, or all their far links listed.
_MAX_LARGE = 4
# If there are more heads, each has so many far links, without the text around them.
_LINKS_OF_MANY = 2
# A query's table has at most so many heads, those with the largest weights.
_MAX_QUERY_HEADS = 24
# The widest label beside a map, in characters of the terminal.
_LABEL_CELLS = 14
# Between a label and its map: the token's number, with a space on both sides.
_NUMBER_CELLS = 6
# The smallest weight that has a shade.
_MIN_SHOWN = 0.05
# How many input tokens a row of a rollout names.
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
    """Return a record's maps, and what one query attends to.

    A few heads of a text are drawn with their labels; all heads are in a table with their strongest links. Maps wider
    than the terminal are pooled: a column then shows the largest weight of several keys, and a line says so. With a
    query there is a table of what it attends to; of many heads that alone.

    Args:
        record: Of text, a long text pooled, pictures or sound.
        console: Tells the width, and whether there are colours (NO_COLOR is respected).
        draws_maps: Whether maps and tables are shown. Else only the table of the query is, and without a query nothing.
        query: Names the tokens whose attention is shown. A pooled record has no rows of tokens, and is shown whole.
        prints_summary: Whether the strongest links are listed, one a line, in place of all else; not if `draws_maps`.
        scale: The scale of the figures, as `--scale` names it; None = as is usual for the record.
    """
    if prints_summary and not draws_maps:
        return _answer(record, console, query, scale or record.usual_scale)
    if not draws_maps and query is None:
        return None
    if isinstance(record, PooledHeatmap):
        return Group(*_pooled(record))
    if record.picture is not None:
        return Group(*_picture(record, query))
    if record.pictures:
        return Group(*_words(record, query))
    # Text: maps, then what the query attends to.
    tables = [] if query is None else query_tables(record, query)
    n_heads = sum(len(record.chosen(attention)) for attention in record.maps)
    # Hundreds of lines of maps would hide the tables.
    if not draws_maps or (tables and n_heads > _MAX_QUERY_HEADS):
        return Group(*tables)
    return Group(*_maps(record, console), *tables, *_word_times(record.sound))


def _answer(record: Heatmap | PooledHeatmap, console: Console, query: str | None, scale: str) -> Text:
    """Return the strongest links of different heads, one line each; if they are faint, the option that helps."""
    # The tokens that the query names in any map.
    tokens: list[int] = []
    if query is not None:
        for attention in record.maps:
            tokens += [token for token in attention.queries.find(query) if token not in tokens]
    if len(tokens) > 1:
        # Each token has one line, those with the strongest links first.
        title = f"where each of “{query}” attends most (query → key, weight from 0 to 1)"
        links = []
        for token in tokens:
            links += find_links(record, f"@{token}", most=1)
        links.sort(key=lambda link: -link.weight)
    else:
        links = find_links(record, query)
        title = "the strongest links, one a head (query → key, weight from 0 to 1)"
        if tokens:
            title = f"where “{query}” (token {tokens[0]}) attends most (query → key, weight from 0 to 1)"
    # Fixed colours run to 1, so weak links would be invisible in the figure.
    is_faint = scale == "fixed" and (not links or links[0].weight < FAINT)
    # Five links or one for each token, but one less where the last line names an option.
    n_shown = max(5, len(tokens))
    if is_faint:
        n_shown -= 1
    lines = []
    for link in links[:n_shown]:
        # Long words are cut, the number is not.
        number = f"  {weight(link.weight)}"
        words = safe(f"{link.head}  “{link.query}” → “{link.key}”")
        room = min(console.width, 80) - len(number)
        lines.append(cut(words, max(8, room)) + number)
    # The sinks in words, whose links were left out.
    left_out = hidden_tokens(record.maps[0].kind)
    if len(tokens) > len(links):
        lines.append(
            f"{len(tokens) - len(links)} of {len(tokens)} tokens attend to {left_out} or themselves alone"
        )
    lines.append(f"links to or from {left_out} are skipped; weights are as the model has them")
    if is_faint:
        lines.append(f"none is above {FAINT:g}: --scale head shades each head by its own largest weight")
    text = Text(cut(safe(title), 80), style="bold")
    for line in lines:
        text.append(f"\n{line}", style="not bold")
    return text


# Maps of text -------------------------------------------------------------------------------------------------------


def _maps(record: Heatmap, console: Console) -> Iterable[RenderableType]:
    """Yield the maps of each kind of attention if they are few, then a table of all heads."""
    for attention in record.maps:
        heads = record.chosen(attention)
        if not heads:
            continue
        yield from _kind_heading(record, attention)
        if len(heads) <= _MAX_LARGE:
            for pair in heads:
                yield _draw_head(attention, pair, console)
            yield _legend(console)
        yield from dim_lines(change_notes(record, attention.kind))
        yield Text()
        yield links_table(record, attention)


def _head_column(attention: HeadMaps) -> TextColumn:
    """Return the column of the names of heads, for a table whose rows are (layer, head)."""
    return TextColumn("head", lambda pair: attention.name_of(*pair), style="bold")


def _kind_heading(record: MapsResult[Any], attention: HeadMaps) -> list[RenderableType]:
    """Return the kind of attention as a heading, if the record has several kinds."""
    return [heading(f"{attention.kind} attention")] if record.has_several_kinds else []


def query_tables(record: Heatmap, query: str) -> list[RenderableType]:
    """Return a table for each token that `query` names: the keys that it attends to, a row per head.

    If there are many heads, only those with the largest weight on another token outside sinks have a row.
    """
    tables: list[RenderableType] = []
    for attention in record.maps:
        kind = f"{attention.kind}: " if record.has_several_kinds else ""
        heads = record.chosen(attention)
        for token in attention.queries.find(query):
            listed: Sequence[Pair] = heads
            notes = []
            if len(heads) > _MAX_QUERY_HEADS:
                listed = _heads_with_links(record, attention, token)
                notes.append(
                    f"listed: the {len(listed)} of {len(heads)} heads with the largest weight on another token outside "
                    "sinks; choose others, and draw their maps, by --layers, --heads or --pick"
                )
            title = f"{kind}what “{safe(attention.queries.labels[token])}” (token {token}) attends to"
            tables += [heading(title), _query_table(attention, listed, token), *dim_lines(notes)]
    return tables


def _heads_with_links(record: Heatmap, attention: AttentionMap, token: int) -> Sequence[Pair]:
    """Return the heads with a query's largest weights on keys other than sinks and itself, in the order of heads."""
    heads = record.chosen(attention)
    _, is_left_out = record.sinks(attention)
    # In whole self-attention, the query is the key of the same index.
    if attention.kind != "cross" and attention.part is None:
        is_left_out[token] = True
    largest = [attention.of(*pair)[token][~is_left_out].max(initial=0.0) for pair in heads]
    strongest = largest_first(largest, _MAX_QUERY_HEADS)
    return [heads[index] for index in sorted(strongest)]


def links_table(record: Heatmap, attention: AttentionMap) -> TextTable:
    """Return a table with a row per head: the share that sinks get, and the strongest links between other tokens."""
    _, key_sinks = record.sinks(attention)
    has_sinks = bool(key_sinks.any())

    # The table makes cells by these functions, and only for the rows that it shows.
    def name_links(pair: Pair) -> Text:
        queries = attention.queries.labels
        keys = attention.keys.labels
        return list_numbers(
            (f"{safe(queries[query])} → {safe(keys[key])}", f"{value:.2f}")
            for query, key, value in strongest_links(record, attention, pair)
        )

    def name_share(pair: Pair) -> str:
        return percent(sink_share(record, attention, pair)) if has_sinks else "-"

    share_title = "on first" if has_sinks and not attention.keys.special.any() else "on special"
    links_title = "strongest links between other tokens (query → key weight)"
    columns = [
        _head_column(attention),
        TextColumn(share_title, name_share, right=True, drop=1),
        TextColumn(links_title, name_links, wraps=True, least=16),
    ]
    return TextTable(columns, record.chosen(attention))


def _query_table(attention: AttentionMap, heads: Sequence[Pair], token: int) -> TextTable:
    """Return a table with a row per head: the five keys that one query attends to most."""

    def name_keys(pair: Pair) -> Text:
        row = attention.of(*pair)[token]
        return _name_largest(row, attention.keys, most=5, least=MIN_LINK, gap="   ")

    columns = [_head_column(attention), TextColumn("keys, largest weight first", name_keys, wraps=True)]
    return TextTable(columns, heads)


def _name_largest(row: NDArray[np.float32], tokens: Tokens, most: int, least: float, gap: str) -> Text:
    """Return the labels of the tokens with the largest numbers of a row, (token,), each with its number.

    They are at most `most`, whose numbers are at least `least`, with `gap` between them.
    """
    # Without a least, numbers may be too small for two decimals.
    digits = ".2f" if least else ".3g"
    largest = [key for key in largest_first(row, most) if row[key] >= least]
    return list_numbers(((safe(tokens.labels[key]), f"{row[key]:{digits}}") for key in largest), gap)


# Cells --------------------------------------------------------------------------------------------------------------


def _draw_head(attention: AttentionMap, pair: Pair, console: Console) -> RenderableType:
    """Draw the map of a head, with a label for each row and the number of a key above every fifth column."""
    weights = attention.of(*pair)
    queries = attention.queries
    label_width = min(_LABEL_CELLS, max(cell_len(safe(label)) for label in queries.labels))
    # A column is two characters wide. Several keys share one where not all would fit.
    n_columns = max(1, (console.width - label_width - _NUMBER_CELLS) // 2)
    keys_per_column = math.ceil(weights.shape[1] / n_columns)
    # (query, column)
    columns = max_pool(weights, keys_per_column, (1,))
    note = f" (a column shows the largest of {keys_per_column} keys)" if keys_per_column > 1 else ""
    lines = Text().append(f"\n{attention.name_of(*pair)}", style="bold")
    lines.append(f"  rows: queries, columns: keys by number{note}\n")
    # Five columns are ten characters wide.
    first_keys = range(0, keys_per_column * columns.shape[1], keys_per_column * 5)
    numbers = "".join(f"{key:<10}" for key in first_keys)
    lines.append(f"{'':{label_width + _NUMBER_CELLS}}{numbers.rstrip()}", style="dim")
    for token, label in enumerate(queries.labels):
        name = set_cell_size(cut(safe(label), label_width), label_width)
        lines.append(f"\n{name}", style="yellow" if queries.special[token] else "")
        lines.append(f" {token:>4} ", style="dim")
        _paint(lines, columns[token], console)
    return lines


def _paint(lines: Text, weights: NDArray[np.float32], console: Console) -> None:
    """Append weights as shades, each of them two characters wide."""
    if _has_colours(console):
        for value in weights.tolist():
            shade = blend_colors(min(1.0, max(0.0, value)), _WHITE, _BLUE)
            lines.append("  ", style=Style(bgcolor=shade))
        return
    shades = _SHADES if has_unicode(console) else _ASCII_SHADES
    # The first shade is a blank, for small weights and NaN; the others share the range from 0 to 1.
    darkest = len(shades) - 1
    steps = np.clip(1 + (weights * darkest).astype(int), 1, darkest)
    steps[~(weights >= _MIN_SHOWN)] = 0
    lines.append("".join(shades[step] * 2 for step in steps))


def _legend(console: Console) -> Text:
    """Return a line with the shades of some weights."""
    lines = Text("\nweight  ", style="dim")
    # Colours are continuous; a character stands for all weights from one of these on.
    values = (_MIN_SHOWN, 0.2, 0.4, 0.6, 0.8)
    if _has_colours(console):
        values = (0.0, 0.25, 0.5, 0.75, 1.0)
    for value in values:
        _paint(lines, np.array([value], np.float32), console)
        lines.append(f" {value:g}  ")
    lines.rstrip()
    return lines


def _has_colours(console: Console) -> bool:
    """Return whether maps are drawn in colours rather than in characters."""
    return console.color_system is not None and not console.no_color and has_unicode(console)


# Pictures and sound -------------------------------------------------------------------------------------------------


def _picture(record: Heatmap, query: str | None) -> Iterable[RenderableType]:
    """Yield a table of what a query attends to in a picture, a row per head."""
    attention = record.maps[0]
    picture = record.picture
    assert picture is not None
    token, name = query_of(attention, query)

    def name_strongest(pair: Pair) -> str:
        return _name_patch(query_patches(record, pair, token))

    def name_off_picture(pair: Pair) -> str:
        return f"{query_weights(attention, pair, token)[attention.keys.special].sum():.2f}"

    columns = [_head_column(attention), TextColumn("strongest patch", name_strongest)]
    if attention.keys.special.any():
        columns.append(TextColumn("off the picture", name_off_picture, right=True))
    yield Text(safe(f"{picture.facts}; what {name} attends to"))
    yield TextTable(columns, record.chosen(attention))


def _words(record: Heatmap, query: str | None) -> Iterable[RenderableType]:
    """Yield a table for each picture: how much of its attention each word of `words_of` gives to the picture."""
    words, others_note = words_of(record, query)
    heads = record.chosen(record.maps[0])
    # A row is (word, share, strongest patch).
    columns = [
        TextColumn("word", lambda row: row[0], style="bold"),
        TextColumn("on the picture", lambda row: row[1], right=True),
        TextColumn("strongest patch", lambda row: row[2]),
    ]
    for picture in record.pictures:
        rows = []
        for word in words:
            weights = word_weights(record, word, heads)
            patches = np.nan_to_num(picture.over(weights))
            rows.append((word.name, percent(picture_share(picture, weights)), _name_patch(patches)))
        yield Text(safe(picture.facts))
        yield TextTable(columns, rows)
        yield Text()
    note = "the mean of all heads" if record.picked is None else "the mean of the heads that were picked"
    yield Text(f"{note} ({others_note})" if others_note else note, style="dim")


def _name_patch(patches: NDArray[np.float64]) -> str:
    """Return the row, the column and the weight of the patch with the largest weight; `patches` are (row, column)."""
    row, column = divmod(int(patches.argmax()), patches.shape[1])
    return f"{row},{column} {patches.max():.2g}"


def _word_times(sound: Sound | None) -> list[RenderableType]:
    """Return a table of when each word of a recording is spoken, if that is known."""
    if sound is None or not sound.words:
        return []
    columns = [
        TextColumn("start (s)", lambda word: f"{word.start:.2f}", right=True),
        TextColumn("end (s)", lambda word: f"{word.end:.2f}", right=True),
        TextColumn("word", lambda word: word.text, wraps=True, least=8),
    ]
    return [TextTable(columns, sound.words)]


# Pooled maps --------------------------------------------------------------------------------------------------------


def _pooled(record: PooledHeatmap) -> Iterable[RenderableType]:
    """Yield a table for each kind of attention: see `_pooled_table`."""
    for attention in record.maps:
        if record.chosen(attention):
            yield from _kind_heading(record, attention)
            queries = amount(len(attention.queries), "query", "queries")
            keys = amount(len(attention.keys), "key")
            cell = f"{attention.query_cell} × {attention.key_cell}"
            yield Text(f"{queries} and {keys}; figures show {cell} in a cell\n", style="dim")
            yield _pooled_table(record, attention)


def _pooled_table(record: PooledHeatmap, attention: PooledMap) -> TextTable:
    """Return a table with a row per head: its effective number of keys, the key that receives most, its far links."""
    heads = record.chosen(attention)

    def name_entropy(pair: Pair) -> str:
        entropy_nats = attention.entropy_nats[attention.place(*pair)]
        # An effective number of keys: so many, with equal weights, have the mean entropy of all queries.
        n_keys = np.exp(entropy_nats.mean(dtype=np.float64))
        return f"{n_keys:,.0f} keys"

    def name_most_received(pair: Pair) -> str:
        # What each key receives of the average query, (key,).
        shares = attention.received[attention.place(*pair)] / len(attention.queries)
        key = int(shares.argmax())
        return f"{percent(shares[key])} {safe(attention.keys.labels[key])} @{key}"

    def name_links(pair: Pair) -> Text:
        return _pooled_links(attention, pair, with_text=len(heads) <= _MAX_LARGE)

    columns = [
        _head_column(attention),
        TextColumn("e^entropy", name_entropy, right=True, drop=2),
        TextColumn("most received", name_most_received, wraps=True, least=20, drop=1),
        TextColumn(
            f"strongest links{attention.far_phrase} (query → key weight)",
            name_links,
            wraps=True,
            least=16,
        ),
    ]
    return TextTable(columns, heads)


def _pooled_links(attention: PooledMap, pair: Pair, *, with_text: bool) -> Text:
    """Return all far links of a head, a line each with the text around; or without text the first two of them."""
    links = attention.links(*pair)
    if not with_text:
        links = links[:_LINKS_OF_MANY]
    entries = []
    for link in links:
        names = []
        for tokens, place in ((attention.queries, link.query), (attention.keys, link.key)):
            name = quote_token(tokens, place, 20) if with_text else tokens.labels[place]
            names.append(f"{safe(name)} @{place}")
        entries.append((" → ".join(names), weight(link.weight)))
    return list_numbers(entries, "\n" if with_text else "   ")


# Rollout ------------------------------------------------------------------------------------------------------------


def show_rollout(rollout: Rollout, console: Console, *, query: str | None = None) -> RenderableType:
    """Show where tokens came from: all tokens after the last layer, or those of a query after every layer."""
    attention = rollout.maps[0]
    labels = attention.queries.labels
    layers = attention.layers
    if rollout.picture is not None and (query is None or query.casefold() == MEAN_QUERY):
        # A table is of one token, so CLS is shown in place of the mean over patches.
        query = "CLS"
    elif query is None and rollout.target:
        # Relevance explains the token that predicts the target.
        query = f"@{rollout.answer_token}"
    if query is None:
        title = f"where each token came from, after layer {layers[-1]}"
        rows = [(label, layers[-1], token) for token, label in enumerate(labels)]
        return _origins(rollout, title, "token", rows)
    tokens = attention.queries.find(query)
    if not tokens:
        raise attention.queries.not_found(query)
    # A table for each token, with a row per layer.
    tables = []
    for token in tokens:
        title = f"where “{safe(labels[token])}” (token {token}) came from"
        if rollout.target:
            title = f"what matters for “{safe(rollout.target)}”, as of “{safe(labels[token])}” (token {token})"
        rows = [(f"L{layer}", layer, token) for layer in layers]
        tables.append(_origins(rollout, title, "layer", rows))
    return Group(*tables)


def _origins(
    rollout: Rollout, title: str, row_title: str, rows: Sequence[tuple[str, int, int]]
) -> Group:
    """Draw a table of tokens after layers, with the largest shares of mean attention and of rollout.

    A row is (name, layer, token); `row_title` stands over the names.
    """
    attention = rollout.maps[0]
    # Shares of many patches are small, so over a picture none is too small to be named.
    least = MIN_LINK if rollout.picture is None else 0.0

    def name_origins(head: int, row: tuple[str, int, int]) -> Text:
        _, layer, token = row
        shares = attention.of(layer, head)[token]
        return _name_largest(shares, attention.keys, most=_MAX_ORIGINS, least=least, gap="  ")

    columns = [TextColumn(row_title, lambda row: row[0], wraps=True, least=16, style="bold")]
    # The two maps of a layer have the numbers of heads.
    for head in attention.heads:
        title_of_map = attention.head_name(head)
        columns.append(TextColumn(title_of_map, partial(name_origins, head), wraps=True, least=14))
    return Group(heading(title), TextTable(columns, rows))
