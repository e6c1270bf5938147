"""Records of attention weights in the terminal, whatever was read: text, a long text pooled, a picture, a recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.text import Text

from attnscope.drawing.inks import blend
from attnscope.errors import amount
from attnscope.questions.heatmap import AttentionMap, Heatmap, Rollout
from attnscope.questions.maps import M, MapsResult
from attnscope.questions.places import MEAN, Sound
from attnscope.questions.pooled import PooledHeatmap, PooledMap, around
from attnscope.report.numbers import percent, weight
from attnscope.report.plain_text import cut, dim_lines, has_unicode, heading, list_numbers, safe
from attnscope.report.table import TextColumn, TextTable
from attnscope.report.wording import change_notes
from attnscope.results.tokens import Tokens
from attnscope.views.maps.pictures import (
    ASKERS,
    asker_of,
    over_patches,
    query_of,
    row_of,
    share_of,
    weights_of,
    words_of,
)
from attnscope.views.maps.pooling import DECADES, log_share, max_pool

_SHADES, _ASCII_SHADES = " ·░▒▓█", " .:+#@"
_WHITE, _BLUE = "#ffffff", "#08306b"
_MOST_LARGE = 4
_MOST_QUERY_HEADS = 24
_LABEL_CELLS = 14
_LEAST_SHOWN = 0.05
_MOST_ORIGINS = 3
Pairs = Sequence[tuple[int, int]]
_HEAD = TextColumn("head", lambda pair: f"L{pair[0]}H{pair[1]}", style="bold")


def draw_maps(record: Heatmap, console: Console, query: str | None = None) -> RenderableType:
    """A record as the terminal shows it: a map a head, and the strongest links of each.

    Few heads are drawn large with their labels, many as thumbnails. Maps wider than the terminal are pooled: a
    character then shows the largest weight of several tokens, and a line says so. With a query there is a table of what
    it attends to; of many heads that alone.
    """
    if query is not None and sum(len(record.chosen(attention)) for attention in record.maps) > _MOST_QUERY_HEADS:
        return query_tables(record, query)  # hundreds of lines of maps would hide it
    parts = _map_parts(
        record,
        large=lambda attention, pair: _large(attention, pair, console),
        small=lambda attention, heads: side_by_side(
            [(f"H{head}", attention.of(layer, head)) for layer, head in heads], console, "weights"
        ),
        below=lambda attention: [
            _legend(console), *dim_lines(change_notes(record, attention.kind)), Text(), links_table(record, attention)
        ],
    )  # fmt: skip
    return Group(*parts, *([] if query is None else [query_tables(record, query)]))


def _map_parts(
    record: MapsResult[M],
    large: Callable[[M, tuple[int, int]], RenderableType],
    small: Callable[[M, Pairs], RenderableType],
    below: Callable[[M], list[RenderableType]],
) -> list[RenderableType]:
    """The maps of each kind of attention: a few heads large, many small and layer by layer; and what stands below."""
    parts: list[RenderableType] = []
    for attention in record.maps:
        heads = record.chosen(attention)
        if not heads:
            continue
        if len(record.maps) > 1:
            parts.append(heading(f"{attention.kind} attention"))
        if len(heads) <= _MOST_LARGE:
            parts += [large(attention, pair) for pair in heads]
        else:
            for layer in sorted({layer for layer, _ in heads}):
                parts += [heading(f"layer {layer}"), small(attention, [pair for pair in heads if pair[0] == layer])]
        parts += below(attention)
    return parts


def query_tables(record: Heatmap, query: str) -> RenderableType:
    """The keys that a token attends to, per head: a table for each token that `query` names.

    Of many heads it lists those with the largest weight on another token outside sinks.
    """
    tables: list[RenderableType] = []
    for attention in record.maps:
        kind = f"{attention.kind}: " if len(record.maps) > 1 else ""
        sinks, heads = record.sinks(attention)[1], record.chosen(attention)
        for token in attention.queries.find(query):
            title = f"{kind}what “{safe(attention.queries.labels[token])}” (token {token}) attends to"
            listed: Pairs = heads
            notes: list[str] = []
            if len(heads) > _MOST_QUERY_HEADS:
                listed = _most_telling(attention, heads, token, sinks)
                notes.append(
                    f"listed: the {len(listed)} of {len(heads)} heads with the largest weight on another token outside "
                    "sinks; choose others, and draw their maps, by --layers, --heads or --pick"
                )
            if sinks.any() and not attention.keys.special.any():
                notes.append(
                    f"“{safe(attention.keys.labels[int(sinks.argmax())])}” is the first token, which is a sink; to "
                    "study attention to this word, put other words before it"
                )
            tables += [heading(title), _query_table(attention, listed, token), *dim_lines(notes)]
    return Group(*tables)


def _most_telling(attention: AttentionMap, heads: Pairs, token: int, sinks: NDArray[np.bool_]) -> Pairs:
    """The heads whose query has the largest weights on keys other than sinks and itself, in the order of heads."""
    left_out = sinks.copy()
    if attention.kind != "cross" and attention.part is None:
        left_out[token] = True
    largest = [float(attention.of(*pair)[token][~left_out].max(initial=0.0)) for pair in heads]
    order = np.argsort(-np.array(largest), kind="stable")[:_MOST_QUERY_HEADS]
    return [heads[at] for at in sorted(order.tolist())]


def strongest_links(
    record: Heatmap, attention: AttentionMap, pair: tuple[int, int], most: int = 3
) -> list[tuple[int, int, float]]:
    """The largest weights of a head between tokens of the text: (query, key, weight), largest first.

    Links from or to sinks are left out, as most heads have their largest weights there; so are links of a token to
    itself.
    """
    weights = attention.of(*pair).astype(np.float64)
    queries, keys = record.sinks(attention)
    weights[queries] = 0
    weights[:, keys] = 0
    if attention.kind != "cross":
        first_query, first_key = (0, 0) if attention.part is None else attention.part[:2]
        itself = np.arange(weights.shape[0]) + first_query - first_key
        within = (itself >= 0) & (itself < weights.shape[1])
        weights[within.nonzero()[0], itself[within]] = 0
    order = np.argsort(-weights, axis=None, kind="stable")[:most]
    links = [(*divmod(int(cell), weights.shape[1]), float(weights.flat[cell])) for cell in order]
    return [link for link in links if link[2] >= 0.005]


def sink_share(record: Heatmap, attention: AttentionMap, pair: tuple[int, int]) -> float:
    """The share of a head's attention that sinks get, averaged over the queries that attend to anything."""
    weights = attention.of(*pair).astype(np.float64)
    rows = weights.sum(1) > 0
    return float(weights[rows][:, record.sinks(attention)[1]].sum(1).mean()) if rows.any() else 0.0


def links_table(record: Heatmap, attention: AttentionMap) -> TextTable:
    """A row a head: how much of its attention sinks get, and its strongest links between the others."""
    has_sinks = bool(record.sinks(attention)[1].any())

    def links(pair: tuple[int, int]) -> Text:
        return list_numbers(
            (f"{safe(attention.queries.labels[query])} → {safe(attention.keys.labels[key])}", f"{weight:.2f}")
            for query, key, weight in strongest_links(record, attention, pair)
        )

    on = "on first" if has_sinks and not attention.keys.special.any() else "on special"
    columns = [
        _HEAD,
        TextColumn(
            on, lambda pair: percent(sink_share(record, attention, pair)) if has_sinks else "-", right=True, drop=1
        ),
        TextColumn("strongest links between other tokens (query → key weight)", links, wraps=True, least=16),
    ]
    return TextTable(columns, record.chosen(attention))


def _query_table(attention: AttentionMap, heads: Pairs, token: int) -> TextTable:
    """A row a head: the five keys that one query attends to most."""

    def keys(pair: tuple[int, int]) -> Text:
        row = attention.of(*pair)[token]
        strongest = [key for key in np.argsort(-row, kind="stable")[:5] if row[key] >= 0.005]
        return list_numbers((safe(attention.keys.labels[key]), f"{row[key]:.2f}") for key in strongest)

    return TextTable([_HEAD, TextColumn("keys, largest weight first", keys, wraps=True)], heads)


def _large(attention: AttentionMap, pair: tuple[int, int], console: Console) -> RenderableType:
    """One head with a label for each query, its columns numbered."""
    weights, queries = attention.of(*pair), attention.queries
    names = [cut(safe(label), _LABEL_CELLS) for label in queries.labels]
    digits = len(str(max(weights.shape) - 1))
    margin = max(cell_len(name) for name in names) + 1 + digits + 1
    pool = -(-weights.shape[1] // max(1, (console.width - margin) // 2))
    pooled = max_pool(weights, pool, (1,))
    lines = Text()
    lines.append(f"\nL{pair[0]}H{pair[1]}", style="bold")
    lines.append("  rows: queries, columns: keys by number")
    lines.append(f" (a column shows the largest of {pool} keys)\n" if pool > 1 else "\n")
    # Every second column has its number, or fewer where numbers are long.
    step = max(2, (digits + 2) // 2)
    numbered = [(column, str(column * pool)) for column in range(0, pooled.shape[1], step)]
    numbers = "".join(n.ljust(2 * step) for column, n in numbered if 2 * column + len(n) <= 2 * pooled.shape[1])
    lines.append(" " * margin)
    lines.append(numbers.rstrip(), style="dim")
    lines.append("\n")
    for token, name in enumerate(names):
        style = "yellow" if queries.special[token] else ""
        lines.append(" " * (margin - cell_len(name) - 2 - digits) + name, style=style)
        lines.append(f" {token:>{digits}} ", style="dim")
        _paint(lines, pooled[token], 2, console)
        lines.append("\n")
    lines.right_crop(1)  # the last newline; not rstrip, as cells may be coloured blanks
    return lines


def side_by_side(
    titled: Sequence[tuple[str, NDArray[np.float32]]], console: Console, what: str, least_width: int = 24
) -> Text:
    """Maps side by side, as small as the terminal allows, each with its title.

    Maps are (query, key), 0 to 1, all of one shape. `what` names their values in the plural, as a character may show
    the largest of several. A map has at least `least_width` characters, if it has as many columns and there is room.
    """
    n_keys = titled[0][1].shape[1]
    per_line = max(1, min(len(titled), (console.width + 2) // (max(min(n_keys, least_width), 4) + 2)))
    room = max(4, (console.width + 2) // per_line - 2)
    pool = -(-n_keys // room)
    lines = Text()
    for first in range(0, len(titled), per_line):
        row = titled[first : first + per_line]
        maps = [max_pool(weights, pool) for _, weights in row]
        width = maps[0].shape[1]
        if pool > 1 and first == 0:
            lines.append(f"(a character shows the largest of {pool} × {pool} {what})\n", style="dim")
        lines.append("  ".join(title.ljust(width) for title, _ in row).rstrip(), style="bold")
        lines.append("\n")
        coloured = _has_colours(console)
        for line in range(0, maps[0].shape[0], 2 if coloured else 1):
            for number, pooled in enumerate(maps):
                lines.append("  " if number else "")
                if not coloured:
                    _paint(lines, pooled[line], 1, console)
                    continue
                below = pooled[line + 1].tolist() if line + 1 < len(pooled) else [None] * width
                for upper, lower in zip(pooled[line].tolist(), below, strict=True):  # two weights in a character
                    ground = None if lower is None else _colour(lower)
                    lines.append("▀", style=Style(color=_colour(upper), bgcolor=ground))
            lines.append("\n")
    lines.right_crop(1)
    return lines


def _legend(console: Console) -> Text:
    """The meaning of a map's shades: the colours of five weights, or the least weight of each character."""
    lines = Text("\nweight  ", style="dim")
    if _has_colours(console):
        for number, weight in enumerate((0.0, 0.25, 0.5, 0.75, 1.0)):
            lines.append("  " if number else "")
            lines.append("  ", style=Style(bgcolor=_colour(weight)))
            lines.append(f" {weight:g}")
        return lines
    shades = _SHADES if has_unicode(console) else _ASCII_SHADES
    least = (_LEAST_SHOWN, *(step / (len(shades) - 1) for step in range(1, len(shades) - 1)))
    lines.append(f"blank below {least[0]:g}")
    for shade, weight in zip(shades[1:], least, strict=True):
        lines.append(f"  {shade * 2} {weight:g}")
    lines.append(" and more")
    return lines


def _has_colours(console: Console) -> bool:
    return console.color_system is not None and not console.no_color and has_unicode(console)


def _paint(lines: Text, weights: NDArray[np.float32], cells: int, console: Console) -> None:
    """Appends a row of weights, each of a number of cells."""
    if _has_colours(console):
        for weight in weights.tolist():
            lines.append(" " * cells, style=Style(bgcolor=_colour(weight)))
    else:
        shades = _SHADES if has_unicode(console) else _ASCII_SHADES
        lines.append("".join(_shade(weight, shades) * cells for weight in weights.tolist()))


def _colour(weight: float) -> str:
    return blend(min(1.0, max(0.0, weight)), _WHITE, _BLUE)


def _shade(weight: float, shades: str) -> str:
    """A character for a weight; small ones stay empty."""
    if not weight >= _LEAST_SHOWN:
        return shades[0]
    return shades[min(len(shades) - 1, 1 + int(weight * (len(shades) - 1)))]


def draw_picture(record: Heatmap, console: Console, query: str | None = None) -> RenderableType:
    """The attention of a query, as of `query_of`, in a picture: patches of each head side by side, layer by layer.

    Each head is shaded by its own largest weight, which stands beside its name.
    """
    attention, picture = record.maps[0], record.picture
    assert picture is not None
    token, name = query_of(attention, query)
    parts: list[RenderableType] = [Text(safe(f"{picture.facts}; what {name} attends to"))]
    heads = record.chosen(attention)
    for layer in sorted({layer for layer, _ in heads}):
        titled = []
        for pair in (pair for pair in heads if pair[0] == layer):
            patches = over_patches(record, pair, token)
            top = float(patches.max())
            special = float(row_of(attention, pair, token)[attention.keys.special].sum())
            elsewhere = f" +{special:.2f}" if attention.keys.special.any() else ""
            titled.append((f"H{pair[1]} {top:.2g}{elsewhere}", (patches / (top or 1.0)).astype(np.float32)))
        parts += [heading(f"layer {layer}"), side_by_side(titled, console, "weights")]
    parts.append(Text("\nbeside a head: its largest weight on a patch, by which it is shaded", style="dim"))
    if attention.keys.special.any():
        parts.append(Text("+: what goes to tokens that have no place in the picture", style="dim"))
    return Group(*parts)


def draw_words(record: Heatmap, console: Console, query: str | None = None) -> RenderableType:
    """Each picture's patches as words see them, word beside word: those of a query, or those that the model wrote."""
    words, n_words = words_of(record, query)
    heads = record.chosen(record.maps[0])
    parts: list[RenderableType] = []
    for picture in record.pictures:
        titled = []
        for word in words:
            row = weights_of(record, word, heads)
            patches = np.nan_to_num(picture.over(row))
            shares = (patches / (float(patches.max()) or 1.0)).astype(np.float32)
            titled.append((safe(f"{word.name} {share_of(picture, row):.0%}"), shares))
        parts += [Text(safe(picture.facts)), side_by_side(titled, console, "weights", least_width=16), Text()]
    of_heads = "all heads" if record.picked is None else "the heads that were picked"
    asker = asker_of(record)
    note = f"the mean of {of_heads}; beside a {asker}: how much of its attention goes to the picture"
    more = f" (the first {len(words)} of {n_words} {ASKERS[asker]}: --query names others)" * (n_words > len(words))
    return Group(*parts, Text(note + more, style="dim"))


def show(
    record: Heatmap | PooledHeatmap, console: Console, *, drawn: bool = True, query: str | None = None
) -> RenderableType | None:
    """A record's maps, and what one query attends to.

    Args:
        record: Of text, a long text pooled, pictures or sound.
        console: Tells the width, and whether there are colours (NO_COLOR is respected).
        drawn: Whether maps are shown. Without them and without a query nothing is; a query alone has its table, but
            of a picture and of pooled maps it has the maps too.
        query: Whose attention is shown.
    """
    if not drawn and query is None:
        return None
    if not isinstance(record, Heatmap):
        return draw_pooled(record, console)
    if record.picture is not None:
        return draw_picture(record, console, query)
    if record.pictures:
        return draw_words(record, console, query)
    if not drawn:
        return query_tables(record, query or "")
    times = [word_table(record.sound)] if record.sound is not None and record.sound.words else []
    return Group(draw_maps(record, console, query), *times)


def word_table(sound: Sound) -> TextTable:
    """When each word of a recording is spoken, a row a word."""
    columns = [
        TextColumn("start (s)", lambda word: f"{word.start:.2f}", right=True),
        TextColumn("end (s)", lambda word: f"{word.end:.2f}", right=True),
        TextColumn("word", lambda word: word.text, wraps=True, least=8),
    ]
    return TextTable(columns, sound.words)


_LARGE_WIDTH = 64
_LINKS_OF_MANY = 2


def draw_pooled(record: PooledHeatmap, console: Console) -> RenderableType:
    """A record as the terminal shows it: a map a head, then a table of marginals and far links."""

    def maps(attention: PooledMap, heads: Pairs, width: int = 24) -> Text:
        titled = [
            (f"H{head}" if len(heads) > 1 else f"L{layer}H{head}", log_share(attention.of(layer, head), 1.0))
            for layer, head in heads
        ]
        return side_by_side(titled, console, "cells", width)

    parts = _map_parts(
        record,
        large=lambda attention, pair: Group(Text(), maps(attention, [pair], _LARGE_WIDTH)),
        small=maps,
        below=lambda attention: [_pooled_legend(record, attention), Text(), _pooled_table(record, attention)],
    )
    return Group(*parts)


def _pooled_legend(record: PooledHeatmap, attention: PooledMap) -> Text:
    cells = "the share of a query's attention" if record.pool == "mean" else "the largest weight"
    return Text(
        f"\nrows: {amount(len(attention.queries), 'query', 'queries')}, {attention.query_cell} a cell · "
        f"columns: {amount(len(attention.keys), 'key')}, {attention.key_cell} a cell · shades: {cells}, logarithmic "
        f"from 1e-{DECADES} to 1",
        style="dim",
    )


def _pooled_table(record: PooledHeatmap, attention: PooledMap) -> TextTable:
    heads = record.chosen(attention)
    far = "strongest links" if attention.far_tokens is None else f"strongest links over {attention.far_tokens} tokens"

    def entropy(pair: tuple[int, int]) -> str:
        return f"{np.exp(attention.entropy_nats[attention.place(*pair)].mean(dtype=np.float64)):,.0f} keys"

    def received(pair: tuple[int, int]) -> str:
        shares = attention.received[attention.place(*pair)] / len(attention.queries)
        most = int(shares.argmax())
        return f"{percent(shares[most])} {safe(attention.keys.labels[most])} @{most}"

    def links(pair: tuple[int, int]) -> Text:
        return _pooled_links(attention, pair, with_text=len(heads) <= _MOST_LARGE)

    columns = [
        _HEAD,
        TextColumn("e^entropy", entropy, right=True, drop=2),
        TextColumn("most received", received, wraps=True, least=20, drop=1),
        TextColumn(f"{far} (query → key weight)", links, wraps=True, least=16),
    ]
    return TextTable(columns, heads)


def _pooled_links(attention: PooledMap, pair: tuple[int, int], *, with_text: bool) -> Text:
    lines = Text()
    links = attention.links(*pair)
    for number, link in enumerate(links if with_text else links[:_LINKS_OF_MANY]):
        lines.append("\n" if number and with_text else "   " if number else "")
        names = [
            safe(around(tokens, token, 20) if with_text else tokens.labels[token])
            for tokens, token in ((attention.queries, link.query), (attention.keys, link.key))
        ]
        lines.append(f"{names[0]} @{link.query} → {names[1]} @{link.key} ")
        lines.append(weight(link.weight), style="cyan")
    return lines


def show_rollout(rollout: Rollout, console: Console, *, query: str | None = None) -> RenderableType:
    """Show where tokens came from: all after the last layer, or those of a query after every layer."""
    attention = rollout.maps[0]
    labels, layers = attention.queries.labels, attention.layers

    def by_layer(title: str, tokens: Sequence[int]) -> Group:
        rows = [(f"L{layer}", layer, token) for layer in layers for token in tokens]
        return _origins(rollout, title, "layer", rows)

    if rollout.picture is not None and (query is None or query.casefold() == MEAN):
        return by_layer("the patches that CLS came from", attention.queries.find("CLS"))
    if query is None:
        title = f"where each token came from, after layer {layers[-1]}"
        return _origins(rollout, title, "token", [(label, layers[-1], n) for n, label in enumerate(labels)])
    tokens = attention.queries.find(query)
    if not tokens:
        raise attention.queries.refuse(query)
    return Group(*(by_layer(f"where “{labels[token]}” (token {token}) came from", [token]) for token in tokens))


def _origins(rollout: Rollout, title: str, first: str, rows: Sequence[tuple[str, int, int]]) -> Group:
    """Draw a table of tokens after layers, with the largest shares of mean attention and of rollout."""
    attention = rollout.maps[0]
    least = 0.005 if rollout.picture is None else 0.0

    def name_largest(head: int) -> Callable[[tuple[str, int, int]], Text]:
        return lambda row: _name_largest(attention.of(row[1], head)[row[2]], attention.keys, least)

    columns = [TextColumn(first, lambda row: row[0], wraps=True, least=16, style="bold")]
    columns += [
        TextColumn(attention.head_name(head), name_largest(head), wraps=True, least=14) for head in attention.heads
    ]
    return Group(heading(title), TextTable(columns, rows))


def _name_largest(row: NDArray[np.float32], tokens: Tokens, least: float) -> Text:
    if np.isnan(row).any():
        return Text()
    largest = [key for key in np.argsort(-row, kind="stable")[:_MOST_ORIGINS] if row[key] >= least]
    return list_numbers(
        ((tokens.labels[key], f"{row[key]:.2f}" if least else f"{row[key]:.3g}") for key in largest), "  "
    )
