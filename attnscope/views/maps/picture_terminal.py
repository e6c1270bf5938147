"""Attention over a picture, drawn in the terminal with rich: coarse, but enough to tell where a head looks."""

from __future__ import annotations

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.text import Text

from attnscope.records import Heatmap
from attnscope.views.maps.picture_figures import over_patches, query_of, row_of
from attnscope.views.maps.picture_words import ASKERS, asker_of, share_of, weights_of, words_of
from attnscope.views.maps.terminal import side_by_side
from attnscope.views.tables.plain_text import heading, safe


def picture_drawing(record: Heatmap, console: Console, query: str | None = None) -> RenderableType:
    """What a query attends to in a picture: patches of each head side by side, a layer below the other.

    Each head is shaded by its own largest weight, which stands beside its name.

    Args:
        record: What to draw.
        console: Tells the width, and whether there are colours.
        query: Whose attention; see `picture_figures.query_of`.

    Raises:
        AttnscopeError: No token is what `query` names.
    """
    attention, picture = record.maps[0], record.picture
    assert picture is not None
    place, name = query_of(attention, query)
    parts: list[RenderableType] = [Text(safe(f"{picture.facts}; what {name} attends to"))]
    heads = record.chosen(attention)
    for layer in sorted({layer for layer, _ in heads}):
        titled = []
        for pair in (pair for pair in heads if pair[0] == layer):
            patches = over_patches(record, pair, place)
            top = float(patches.max())
            special = float(row_of(attention, pair, place)[attention.keys.special].sum())
            elsewhere = f" +{special:.2f}" if attention.keys.special.any() else ""
            titled.append((f"H{pair[1]} {top:.2g}{elsewhere}", (patches / (top or 1.0)).astype(np.float32)))
        parts += [heading(f"layer {layer}"), side_by_side(titled, console, "weights")]
    parts.append(Text("\nbeside a head: its largest weight on a patch, by which it is shaded", style="dim"))
    if attention.keys.special.any():
        parts.append(Text("+: what goes to tokens that have no place in the picture", style="dim"))
    return Group(*parts)


def words_drawing(record: Heatmap, console: Console, query: str | None = None) -> RenderableType:
    """Where words look: the share of each picture, then each picture's patches, a word beside the other.

    Args:
        record: What to draw; it has pictures among its words.
        console: Tells the width, and whether there are colours.
        query: Words, such as `cat,dog`; None = those that the model wrote.

    Raises:
        AttnscopeError: No word is what `query` names.
    """
    words, n_words = words_of(record, query)
    heads = record.chosen(record.maps[0])
    parts: list[RenderableType] = []
    for picture in record.pictures:
        titled = []
        for word in words:
            row = weights_of(record, word, heads)
            patches = np.nan_to_num(picture.over(row))
            shaded = (patches / (float(patches.max()) or 1.0)).astype(np.float32)
            titled.append((safe(f"{word.name} {share_of(picture, row):.0%}"), shaded))
        parts += [Text(safe(picture.facts)), side_by_side(titled, console, "weights", least_width=16), Text()]
    of_heads = "all heads" if record.picked is None else "the heads that were picked"
    asker = asker_of(record)
    said = f"the mean of {of_heads}; beside a {asker}: how much of its attention goes to the picture"
    more = f" (the first {len(words)} of {n_words} {ASKERS[asker]}: --query names others)" * (n_words > len(words))
    return Group(*parts, Text(said + more, style="dim"))
