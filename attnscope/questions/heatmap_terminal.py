"""Show records of attention weights in the terminal: of a text, a pooled long text, a picture or a recording."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.text import Text

from attnscope.drawing.cells import max_pool
from attnscope.drawing.inks import blend
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
from attnscope.questions.links import FAINT, LEAST_LINK, find_links, sink_share, strongest_links
from attnscope.questions.maps import HeadMaps, MapsResult
from attnscope.questions.places import MEAN, Sound
from attnscope.questions.pooled import PooledHeatmap, PooledMap, text_around
from attnscope.report.numbers import largest_first, percent, weight
from attnscope.report.plain_text import cut, dim_lines, has_unicode, heading, list_numbers
from attnscope.report.table import TextColumn, TextTable
from attnscope.report.wording import change_notes, hidden_tokens
from attnscope.results.tokens import Tokens

_SHADES = " ·░▒▓█"
_ASCII_SHADES = " .:+#@"
_WHITE = "#ffffff"
_BLUE = "#08306b"

# Up to so many heads are drawn large, or listed with all their far links.
_MOST_LARGE = 4
# Of more heads there are fewer far links, by their tokens alone.
_LINKS_OF_MANY = 2
# Of more heads those that tell most of a query are listed.
_MOST_QUERY_HEADS = 24
# The widest label beside a map, in characters of the terminal.
_LABEL_CELLS = 14
# Between a label and its map: the token's number, with a space on both sides.
_NUMBER_CELLS = 6
# Smaller weights have no shade.
_LEAST_SHOWN = 0.05
# Input tokens that a row of a rollout names.
_MOST_ORIGINS = 3


def show(
    record: Heatmap | PooledHeatmap,
    console: Console,
    *,
    drawn: bool = True,
    query: str | None = None,
    answered: bool = False,
    scale: str | None = None,
) -> RenderableType | None:
    """Return a record's maps, and what one query attends to.

    A few heads of a text are drawn with their labels; all heads are in a table with their strongest links. Maps wider
    than the terminal are pooled: a column then shows the largest weight of several keys, and a line says so. With a
    query there is a table of what it attends to; of many heads that alone.

    Args:
        record: Of text, a long text pooled, pictures or sound.
        console: Tells the width, and whether there are colours (NO_COLOR is respected).
        drawn: Whether maps are shown. Without them and without a query nothing is; a query alone has its table.
        query: Whose attention is shown.
        answered: Whether, if no maps are shown, the strongest links are, in at most six lines, and no tables.
        scale: Of the figures: what their darkest colour means.
    """
    # A short answer in place of maps.
    if answered and not drawn:
        return _answer(record, console, query, scale or record.usual_scale)
    if not drawn and query is None:
        return None
    # Each kind of record has its own view.
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
    if not drawn or (tables and n_heads > _MOST_QUERY_HEADS):
        return Group(*tables)
    return Group(*_maps(record, console), *tables, *_word_times(record.sound))


def _answer(record: Heatmap | PooledHeatmap, console: Console, query: str | None, scale: str) -> Text:
    """Return the strongest links of different heads, one line each; if they are faint, the option that helps."""
    # Links from the query, or from anywhere.
    places: list[int] = []
    if query is not None:
        for attention in record.maps:
            places += [place for place in attention.queries.find(query) if place not in places]
    title = "the strongest links, one a head (query → key, weight from 0 to 1)"
    links = find_links(record, query)
    if len(places) == 1:
        title = f"where “{query}” (token {places[0]}) attends most (query → key, weight from 0 to 1)"
    elif places:
        # Each of several tokens has a line, those with the strongest links first.
        title = f"where each of “{query}” attends most (query → key, weight from 0 to 1)"
        links = [link for place in places for link in find_links(record, f"@{place}", 1)]
        links.sort(key=lambda link: -link.weight)
    # Fixed colours run to 1, so weak links would be invisible in the figure.
    is_faint = scale == "fixed" and (not links or links[0].weight < FAINT)
    # One line per link: the number stays, long words are cut.
    lines = []
    most = max(5, len(places))
    if is_faint:
        most -= 1
    for link in links[:most]:
        number = f"  {weight(link.weight)}"
        words = safe(f"{link.head}  “{link.query}” → “{link.key}”")
        room = min(console.width, 80) - len(number)
        lines.append(cut(words, max(8, room)) + number)
    # Which links were not looked at.
    left_out = hidden_tokens(record.maps[0].kind)
    if len(places) > len(links):
        lines.append(
            f"{len(places) - len(links)} of {len(places)} tokens attend to {left_out} or themselves alone"
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
    for attention in record.maps:
        heads = record.chosen(attention)
        if not heads:
            continue
        yield from _kind_heading(record, attention)
        if len(heads) <= _MOST_LARGE:
            yield from (_large(attention, pair, console) for pair in heads)
            yield _legend(console)
        yield from dim_lines(change_notes(record, attention.kind))
        yield Text()
        yield links_table(record, attention)


def _head_column(attention: HeadMaps) -> TextColumn:
    return TextColumn("head", lambda pair: attention.name_of(*pair), style="bold")


def _kind_heading(record: MapsResult[Any], attention: HeadMaps) -> list[RenderableType]:
    return [heading(f"{attention.kind} attention")] if len(record.maps) > 1 else []


def query_tables(record: Heatmap, query: str) -> list[RenderableType]:
    """Return the keys that a token attends to, per head: a table for each token that `query` names.

    Of many heads it lists those with the largest weight on another token outside sinks.
    """
    tables: list[RenderableType] = []
    for attention in record.maps:
        kind = f"{attention.kind}: " if len(record.maps) > 1 else ""
        heads = record.chosen(attention)
        for token in attention.queries.find(query):
            listed = _most_telling(record, attention, token) if len(heads) > _MOST_QUERY_HEADS else heads
            title = f"{kind}what “{safe(attention.queries.labels[token])}” (token {token}) attends to"
            tables += [heading(title), _query_table(attention, listed, token)]
            if len(listed) < len(heads):
                note = (
                    f"listed: the {len(listed)} of {len(heads)} heads with the largest weight on another token outside "
                    "sinks; choose others, and draw their maps, by --layers, --heads or --pick"
                )
                tables += dim_lines([note])
    return tables


def _most_telling(record: Heatmap, attention: AttentionMap, token: int) -> Sequence[Pair]:
    """Return the heads whose query has the largest weights on keys other than sinks and itself, in their order."""
    heads = record.chosen(attention)
    _, key_sinks = record.sinks(attention)
    left_out = key_sinks.copy()
    # In a whole map of a text on itself the query is a key too, at the same place.
    if attention.kind != "cross" and attention.part is None:
        left_out[token] = True
    largest = [attention.of(*pair)[token][~left_out].max(initial=0.0) for pair in heads]
    return [heads[place] for place in sorted(largest_first(largest, _MOST_QUERY_HEADS))]


def links_table(record: Heatmap, attention: AttentionMap) -> TextTable:
    """Return a row a head: how much of its attention sinks get, and its strongest links between the others."""
    _, key_sinks = record.sinks(attention)
    has_sinks = bool(key_sinks.any())

    # Columns as functions of a head: the table calls them only for rows that it shows.
    def links(pair: Pair) -> Text:
        queries = attention.queries.labels
        keys = attention.keys.labels
        return list_numbers(
            (f"{safe(queries[query])} → {safe(keys[key])}", f"{value:.2f}")
            for query, key, value in strongest_links(record, attention, pair)
        )

    def share(pair: Pair) -> str:
        return percent(sink_share(record, attention, pair)) if has_sinks else "-"

    name = "on first" if has_sinks and not attention.keys.special.any() else "on special"
    columns = [
        _head_column(attention),
        TextColumn(name, share, right=True, drop=1),
        TextColumn(
            "strongest links between other tokens (query → key weight)", links, wraps=True, least=16
        ),
    ]
    return TextTable(columns, record.chosen(attention))


def _query_table(attention: AttentionMap, heads: Sequence[Pair], token: int) -> TextTable:
    """Return a row a head: the five keys that one query attends to most."""

    def keys(pair: Pair) -> Text:
        return _name_largest(attention.of(*pair)[token], attention.keys, 5, LEAST_LINK, "   ")

    return TextTable(
        [_head_column(attention), TextColumn("keys, largest weight first", keys, wraps=True)], heads
    )


def _name_largest(row: NDArray[np.float32], tokens: Tokens, most: int, least: float, gap: str) -> Text:
    """Return the tokens with the largest numbers, each with its number."""
    # Where even the smallest numbers are listed, two decimals would be 0.00.
    digits = ".2f" if least else ".3g"
    largest = [key for key in largest_first(row, most) if row[key] >= least]
    return list_numbers(((safe(tokens.labels[key]), f"{row[key]:{digits}}") for key in largest), gap)


# Cells --------------------------------------------------------------------------------------------------------------


def _large(attention: AttentionMap, pair: Pair, console: Console) -> RenderableType:
    """Draw one head with a label for each query, and the number of every fifth column."""
    weights = attention.of(*pair)
    queries = attention.queries
    width = min(_LABEL_CELLS, max(cell_len(safe(label)) for label in queries.labels))
    # A column is two characters wide, and shows as many keys as it must for all to fit.
    n_columns = max(1, (console.width - width - _NUMBER_CELLS) // 2)
    pool = math.ceil(weights.shape[1] / n_columns)
    pooled = max_pool(weights, pool, (1,))
    more = f" (a column shows the largest of {pool} keys)" if pool > 1 else ""
    lines = Text().append(f"\n{attention.name_of(*pair)}", style="bold")
    lines.append(f"  rows: queries, columns: keys by number{more}\n")
    # The first key of every fifth column.
    numbers = "".join(f"{column * pool:<10}" for column in range(0, pooled.shape[1], 5))
    lines.append(f"{'':{width + _NUMBER_CELLS}}{numbers.rstrip()}", style="dim")
    for token, label in enumerate(queries.labels):
        name = set_cell_size(cut(safe(label), width), width)
        lines.append(f"\n{name}", style="yellow" if queries.special[token] else "")
        lines.append(f" {token:>4} ", style="dim")
        _paint(lines, pooled[token], 2, console)
    return lines


def _paint(lines: Text, weights: NDArray[np.float32], cells: int, console: Console) -> None:
    """Append a row of weights, each of a number of cells."""
    if _has_colours(console):
        for value in weights.tolist():
            shade = blend(min(1.0, max(0.0, value)), _WHITE, _BLUE)
            lines.append(" " * cells, style=Style(bgcolor=shade))
        return
    shades = _SHADES if has_unicode(console) else _ASCII_SHADES
    # From the first shade that is not empty to the last; small weights, and NaN, stay empty.
    darkest = len(shades) - 1
    steps = np.clip(1 + (weights * darkest).astype(int), 1, darkest)
    steps[~(weights >= _LEAST_SHOWN)] = 0
    lines.append("".join(shades[step] * cells for step in steps))


def _legend(console: Console) -> Text:
    """Return the meaning of a map's shades."""
    lines = Text("\nweight  ", style="dim")
    marks = (_LEAST_SHOWN, 0.2, 0.4, 0.6, 0.8)
    if _has_colours(console):
        marks = (0.0, 0.25, 0.5, 0.75, 1.0)
    for mark in marks:
        _paint(lines, np.array([mark], np.float32), 2, console)
        lines.append(f" {mark:g}  ")
    lines.rstrip()
    return lines


def _has_colours(console: Console) -> bool:
    return console.color_system is not None and not console.no_color and has_unicode(console)


# Pictures and sound -------------------------------------------------------------------------------------------------


def _picture(record: Heatmap, query: str | None) -> Iterable[RenderableType]:
    """Yield what a query attends to in a picture, a row a head."""
    attention = record.maps[0]
    picture = record.picture
    assert picture is not None
    token, name = query_of(attention, query)

    def strongest(pair: Pair) -> str:
        return _name_patch(query_patches(record, pair, token))

    def elsewhere(pair: Pair) -> str:
        return f"{query_weights(attention, pair, token)[attention.keys.special].sum():.2f}"

    columns = [_head_column(attention), TextColumn("strongest patch", strongest)]
    if attention.keys.special.any():
        columns.append(TextColumn("off the picture", elsewhere, right=True))
    yield Text(safe(f"{picture.facts}; what {name} attends to"))
    yield TextTable(columns, record.chosen(attention))


def _words(record: Heatmap, query: str | None) -> Iterable[RenderableType]:
    """Yield how much of its attention each word gives to a picture: words of a query, or those that the model wrote."""
    words, others_note = words_of(record, query)
    heads = record.chosen(record.maps[0])
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
    """Return the patch, (row, column), with the largest number, and the number."""
    row, column = divmod(int(patches.argmax()), patches.shape[1])
    return f"{row},{column} {patches.max():.2g}"


def _word_times(sound: Sound | None) -> list[RenderableType]:
    """Return when each word of a recording is spoken, a row a word."""
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
    """Yield a table of marginals and far links."""
    for attention in record.maps:
        if record.chosen(attention):
            yield from _kind_heading(record, attention)
            queries = amount(len(attention.queries), "query", "queries")
            keys = amount(len(attention.keys), "key")
            cell = f"{attention.query_cell} × {attention.key_cell}"
            yield Text(f"{queries} and {keys}; figures show {cell} in a cell\n", style="dim")
            yield _pooled_table(record, attention)


def _pooled_table(record: PooledHeatmap, attention: PooledMap) -> TextTable:
    """Return a row a head: how many keys its queries spread over, the key that receives most, its far links."""
    heads = record.chosen(attention)

    # e to the mean entropy of all queries: an effective number of keys.
    def entropy(pair: Pair) -> str:
        entropy_nats = attention.entropy_nats[attention.place(*pair)]
        n_keys = np.exp(entropy_nats.mean(dtype=np.float64))
        return f"{n_keys:,.0f} keys"

    # The key that receives most, as the mean over all queries.
    def received(pair: Pair) -> str:
        shares = attention.received[attention.place(*pair)] / len(attention.queries)
        most = int(shares.argmax())
        return f"{percent(shares[most])} {safe(attention.keys.labels[most])} @{most}"

    def links(pair: Pair) -> Text:
        return _pooled_links(attention, pair, with_text=len(heads) <= _MOST_LARGE)

    columns = [
        _head_column(attention),
        TextColumn("e^entropy", entropy, right=True, drop=2),
        TextColumn("most received", received, wraps=True, least=20, drop=1),
        TextColumn(
            f"strongest links{attention.far_phrase} (query → key weight)", links, wraps=True, least=16
        ),
    ]
    return TextTable(columns, heads)


def _pooled_links(attention: PooledMap, pair: Pair, *, with_text: bool) -> Text:
    """Return the far links of a head: all of them, a line each, with the text around; or two, by tokens alone."""
    shown = attention.links(*pair)
    if not with_text:
        shown = shown[:_LINKS_OF_MANY]
    links = []
    for link in shown:
        names = []
        for tokens, place in ((attention.queries, link.query), (attention.keys, link.key)):
            name = text_around(tokens, place, 20) if with_text else tokens.labels[place]
            names.append(f"{safe(name)} @{place}")
        links.append((" → ".join(names), weight(link.weight)))
    return list_numbers(links, "\n" if with_text else "   ")


# Rollout ------------------------------------------------------------------------------------------------------------


def show_rollout(rollout: Rollout, console: Console, *, query: str | None = None) -> RenderableType:
    """Show where tokens came from: all after the last layer, or those of a query after every layer."""
    attention = rollout.maps[0]
    labels = attention.queries.labels
    layers = attention.layers
    is_mean = rollout.picture is not None and (query is None or query.casefold() == MEAN)
    # A rollout with a target is read at the token of its answer.
    if query is None and rollout.target:
        query = f"@{rollout.answer_token}"
    # All tokens after the last layer.
    if query is None and not is_mean:
        title = f"where each token came from, after layer {layers[-1]}"
        rows = [(label, layers[-1], token) for token, label in enumerate(labels)]
        return _origins(rollout, title, "token", rows)
    # One token, after every layer: over a picture CLS, in place of the mean over patches.
    wanted = "CLS" if is_mean or query is None else query
    tokens = attention.queries.find(wanted)
    if not tokens:
        raise attention.queries.not_found(wanted)
    groups = []
    for token in tokens:
        title = f"where “{safe(labels[token])}” (token {token}) came from"
        if rollout.target:
            title = f"what matters for “{safe(rollout.target)}”, as of “{safe(labels[token])}” (token {token})"
        rows = [(f"L{layer}", layer, token) for layer in layers]
        groups.append(_origins(rollout, title, "layer", rows))
    return Group(*groups)


def _origins(
    rollout: Rollout, title: str, row_title: str, rows: Sequence[tuple[str, int, int]]
) -> Group:
    """Draw a table of tokens after layers, with the largest shares of mean attention and of rollout.

    A row is (name, layer, token); `row_title` stands over the names.
    """
    attention = rollout.maps[0]
    least = LEAST_LINK if rollout.picture is None else 0.0

    def name_origins(head: int) -> Callable[[tuple[str, int, int]], Text]:
        def origins(row: tuple[str, int, int]) -> Text:
            _, layer, token = row
            shares = attention.of(layer, head)[token]
            return _name_largest(shares, attention.keys, _MOST_ORIGINS, least, "  ")

        return origins

    columns = [TextColumn(row_title, lambda row: row[0], wraps=True, least=16, style="bold")]
    columns += [
        TextColumn(attention.head_name(head), name_origins(head), wraps=True, least=14)
        for head in attention.heads
    ]
    return Group(heading(title), TextTable(columns, rows))
