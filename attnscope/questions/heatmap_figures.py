"""Make the figures of attention maps: of pictures here, of texts in `heatmap_plates`, of sound in `heatmap_sounds`.

A vision model's show where a query looks in the picture; those of a model that reads pictures among words, where each
word looks.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing.canvas import Drawing
from attnscope.drawing.files import first_png
from attnscope.drawing.map_figure import Axis, MapsFigure
from attnscope.drawing.style import Style, meanings
from attnscope.errors import AttnscopeError, UsageError, amount
from attnscope.questions.heatmap import AttentionMap, Heatmap, Rollout
from attnscope.questions.heatmap_plates import (
    Pair,
    Plate,
    Sheet,
    captions_of,
    draw_plates,
    model_name,
    pooled_plates,
    sheets_of,
    text_plates,
)
from attnscope.questions.heatmap_sounds import sound_plates
from attnscope.questions.maps import ROLLOUT
from attnscope.questions.places import MEAN, SMALL, Picture
from attnscope.questions.pooled import PooledHeatmap
from attnscope.report.wording import change_notes, run_notes
from attnscope.results.tokens import Tokens

Floats = NDArray[np.float64]

MOST_WORDS = 24
"""Words on one figure, and figures of one word each, where none is named."""

_SINGLE_PX = 760
_PANEL_PX = 420
"""Width of one map over a picture at most, and of each of several."""

_MOST_IN_A_ROW = 3
"""Maps that stand in one row with the photo; more of them make a page near 4:3."""

_OVER_PHOTO = "a square is a patch, nothing is smoothed"
_SMOOTHED = "weights are interpolated between the middles of patches (--smooth)"
_BAR = "upper half of the bar: over white, lower half: over black"
_PICTURE_MEANING = meanings(
    "attention weight: the share of the query's attention that a patch gets",
    "attention weight ÷ the largest weight of the same panel on a patch",
)


def plates_of(
    record: Heatmap | PooledHeatmap, style: Style | None = None, query: str | None = None
) -> Iterator[Plate]:
    """Return what is in each figure of a record, the overview first.

    Args:
        record: What to draw.
        style: How it is drawn; None = on a fixed scale, pictures and recordings each head by its own.
        query: Of text: a token whose attention in all heads is drawn too. Of pictures: whose attention is drawn.

    Raises:
        AttnscopeError: The query names nothing.
    """
    style = style or record.style()
    if isinstance(record, PooledHeatmap):
        return pooled_plates(record, style, query)
    if record.is_of_text:
        return text_plates(record, style, query)
    if record.picture is not None:
        return _picture_plates(record, style, query)
    if record.pictures:
        return _word_plates(record, style, query)
    if query is not None:
        raise UsageError("over time every token has its row: there is no --query", "leave it out")
    return sound_plates(record, style)


def pages(
    record: Heatmap | PooledHeatmap, style: Style, query: str | None = None
) -> Iterator[tuple[str, Drawing]]:
    """Yield the figures of a record one after the other, each with its file name without the ending."""
    return draw_plates(plates_of(record, style, query), style)


def glance(record: Heatmap | PooledHeatmap) -> bytes:
    """Return the first figure of a record as a PNG, for notebooks."""
    return first_png(pages(record, record.style()))


def require_query(record: Heatmap | PooledHeatmap, query: str | None) -> None:
    """Refuse a query that names nothing."""
    if query is not None:
        # The query is read before the first figure is made.
        next(plates_of(record, query=query), None)


# Vision models ------------------------------------------------------------------------------------------------------


def query_of(attention: AttentionMap, query: str | None) -> tuple[int, str]:
    """Return the token whose attention is drawn, -1 for the mean over all patches; and its name.

    A query is "CLS", "REG0", a patch as "row,column", a place such as `@3`, or "mean"; None = CLS, or where there is
    none, "mean".
    """
    tokens = attention.queries
    if query is None:
        query = "CLS" if "CLS" in tokens.labels else MEAN
    if query.casefold() == MEAN:
        return -1, "the mean over all patches"
    places = tokens.find_one(query.replace(" ", ""))
    if not places:
        others = ", ".join([*compress(tokens.labels, tokens.special), MEAN])
        raise AttnscopeError(
            f"no patch is {query!r}",
            f"there are {others}, and patches from 0,0 to {tokens.labels[-1]} (row,column)",
        )
    token = places[0]
    name = tokens.labels[token]
    return token, name if tokens.special[token] else f"patch {name}"


def query_weights(attention: AttentionMap, pair: Pair, query: int) -> Floats:
    """Return the attention of a query to each token, (key,); for -1 the mean over all patches."""
    weights = attention.of(*pair).astype(np.float64)
    row: Floats = weights[~attention.queries.special].mean(0) if query < 0 else weights[query]
    return row


def query_patches(record: Heatmap, pair: Pair, query: int) -> Floats:
    """Return the attention of a query to each patch, (row, column)."""
    attention = record.maps[0]
    picture = record.picture
    assert picture is not None
    return query_weights(attention, pair, query)[~attention.keys.special].reshape(picture.grid)


def _picture_plates(record: Heatmap, style: Style, query: str | None) -> Iterator[Plate]:
    """Yield an overview and a figure per layer, or one of the heads that were picked, of what a query attends to."""
    attention = record.maps[0]
    picture = record.picture
    assert picture is not None
    token, name = query_of(attention, query)
    is_special = attention.queries.special
    notes = []
    boxes: tuple[Any, ...] = ()
    if token >= 0 and not is_special[token]:
        # The patch by its number: other tokens come before the patches, or between them.
        row, column = divmod(int((~is_special[:token]).sum()), picture.grid[1])
        boxes = ((column, row, column + 1, row + 1),)
        notes.append("framed: the query")
    # Keys that are no patches, and have no place in the picture.
    others = ", ".join(compress(attention.keys.labels, attention.keys.special))
    has_others = bool(others) and "without_sinks" not in record.changes
    if has_others:
        notes.append(f"what goes to {others} has no place in the picture")
    notes += change_notes(record, attention.kind)
    if isinstance(record, Rollout):
        notes.append(record.method)
    # Files are named by the query; a patch such as 3,5 is 3-5 there.
    stem_end = MEAN if token < 0 else attention.queries.labels[token].replace(",", "-")
    for sheet in sheets_of(record, attention, after=f"-{stem_end}"):
        values = [query_patches(record, pair, token) for pair in sheet.heads]
        facts = [""] * len(values)
        if has_others:
            for map_index, pair in enumerate(sheet.heads):
                off = query_weights(attention, pair, token)[attention.keys.special].sum()
                facts[map_index] = f"{off:.2f} off the picture"
        subject = f"{sheet.subject}: what {name} attends to"
        if attention.kind == ROLLOUT:
            # In place of heads there are mean attention, 0, and rollout or relevance, 1.
            part = f"up to layer {sheet.heads[0][0]}"
            if sheet.form == "overview":
                part = f"over {amount(len(attention.layers), 'layer')}"
            subject = f"{attention.head_name(1)} {part}: where {name} came from"
        yield _over_picture(
            record, picture, sheet, subject, values, facts, notes, style, framed_boxes=boxes
        )


def _over_picture(
    record: Heatmap,
    picture: Picture,
    sheet: Sheet,
    subject: str,
    values: Sequence[Floats],
    facts: Sequence[str],
    notes: Sequence[str],
    style: Style,
    **fields: Any,
) -> Plate:
    """Lay maps of numbers, (row, column) of patches, over a picture.

    Args:
        record: The record that they are from.
        picture: The picture.
        sheet: The name of the file, and the heads whose names are the titles of maps.
        subject: What they show, for the title.
        values: The numbers of each map.
        facts: A fact on each map, which stands beside its largest number; may be empty.
        notes: What a reader must know.
        style: How it is drawn.
        fields: Further fields of the figure.
    """
    n = len(values)
    rows, columns = picture.grid
    title = f"{model_name(record)} · {subject}"
    figure = MapsFigure(
        **{**sheet.titles(record.maps[0]), **fields},
        subtitle=picture.facts,
        notes=(*notes, _SMOOTHED if style.smooth else _OVER_PHOTO, _BAR, *run_notes(record.run)),
        axes=((Axis(n=rows), Axis(n=columns)),),
        meaning=_PICTURE_MEANING[style.scale],
        cmap=style.cmap,
        is_smooth=style.smooth,
        captions=captions_of(values, facts),
        picture=picture,
        largest_px=_SINGLE_PX if n == 1 else _PANEL_PX,
        # The photo stands beside the maps; 0 = as many in a row as fit.
        columns=n + 1 if n <= _MOST_IN_A_ROW else 0,
        lettered=(title, *fields.get("titles", ())),
    )
    return Plate(sheet.stem, title, figure, values)


# Pictures among words -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Word:
    """Hold a word of a record, or a token that is part of none; `tokens` are its places among the queries."""

    name: str
    tokens: tuple[int, ...]


def words_of(record: Heatmap, query: str | None = None) -> tuple[list[Word], str]:
    """Return the words whose attention is drawn, and a note if these are not all.

    They are those that are named, else those that the model wrote; where it wrote none, the words after the pictures.
    """
    tokens = record.maps[0].queries
    words = [Word(_name(tokens, group), tuple(group)) for group in tokens.word_groups()]
    if query is not None:
        named = _find_words(record, query, words)
        return [word for word in words if not named.isdisjoint(word.tokens)], ""
    # The words that the model wrote, else all; without special tokens, unless there are no others.
    written = [word for word in words if 0 <= tokens.n_given <= word.tokens[0]]
    ordinary = [word for word in written or words if not tokens.special[word.tokens[0]]]
    words = ordinary or words
    if len(words) <= MOST_WORDS:
        return words, ""
    note = f"the first {MOST_WORDS} of {len(words)} words: --query names others"
    return words[:MOST_WORDS], note


def _find_words(record: Heatmap, query: str, words: Sequence[Word]) -> set[int]:
    """Return the places among the queries that a user names; places such as @70 count all tokens."""
    attention = record.maps[0]
    tokens = attention.queries
    first_query, _ = attention.origin
    # Where a place comes before the queries, @-1 names nothing.
    shifted = re.sub(r"@(\d+)", lambda place: f"@{max(int(place[1]) - first_query, -1)}", query)
    named = set(tokens.find(shifted))
    if named:
        return named
    names = [word.name for word in words if not tokens.special[word.tokens[0]]]
    raise AttnscopeError(
        f"no word that looks at the pictures is {query!r}",
        f"there are {', '.join(dict.fromkeys(names))}; or name places, such as @{first_query}",
    )


def _name(tokens: Tokens, group: Sequence[int]) -> str:
    """Return the text of the tokens of a word, or the label of a single one without its leading space."""
    if len(group) > 1:
        return tokens.merge([group]).labels[0]
    return tokens.labels[group[0]].removeprefix("·")


def word_weights(record: Heatmap, word: Word, heads: Iterable[Pair]) -> Floats:
    """Return the attention of a word to each token, (key,): the mean over heads and over its tokens."""
    tokens = list(word.tokens)
    rows = []
    for pair in heads:
        weights = record.maps[0].of(*pair)[tokens].astype(np.float64)
        rows.append(weights.mean(0))
    # (head, key); only damaged records have keys without any number.
    n_known = (~np.isnan(rows)).sum(0)
    mean: Floats = np.nansum(rows, axis=0) / np.maximum(n_known, 1)
    return mean


def picture_share(picture: Picture, row: Floats) -> float:
    """Return how much of a row of attention, (key,), goes to a picture."""
    return float(np.nansum(picture.over(row)))


def _word_plates(record: Heatmap, style: Style, query: str | None) -> Iterator[Plate]:
    """Yield the words side by side over each picture, then each word layer by layer or head by head, then the text."""
    attention = record.maps[0]
    words, words_note = words_of(record, query)
    heads = record.chosen(attention)
    # Queries that a model has learned are no words.
    is_learned = attention.kind == "cross" and not attention.queries.text
    one, several = ("query", "queries") if is_learned else ("word", "words")
    which = "all heads" if record.picked is None else "the heads that were picked"
    notes = [f"the mean of {which}"]
    if words_note:
        notes.append(words_note)
    # All words over each picture.
    rows = [(word.name, word_weights(record, word, heads)) for word in words]
    for number, picture in enumerate(record.pictures):
        sheet = Sheet(f"{several}{_mark(record, number)}", "grid", heads, f"{several} look")
        yield _word_plate(record, picture, sheet, rows, notes, style)
    # Each word by itself, over all pictures that are not made small.
    for place, word in enumerate(words):
        rows, note = _rows_of_word(record, word, heads)
        for number, picture in enumerate(record.pictures):
            if picture.source.endswith(SMALL):
                continue
            stem = f"{one}-{place:02d}-{_slug(word.name)}{_mark(record, number)}"
            sheet = Sheet(stem, "grid", heads, f"“{word.name}” looks")
            yield _word_plate(record, picture, sheet, rows, [note], style)
    # The maps of words, with each photo as one key; with cross-attention, those of words to each other.
    flat = record.with_pictures_as_one()
    if flat.maps[0].kind == "cross" and len(flat.maps) > 1:
        flat = replace(flat, maps=flat.maps[1:])
    yield from text_plates(flat, style, before="text-")


def _rows_of_word(
    record: Heatmap, word: Word, heads: Sequence[Pair]
) -> tuple[list[tuple[str, Floats]], str]:
    """Return a word's attention, (key,), by head where heads were picked, else by layer: with titles, and a note."""
    if record.picked is not None or len(heads) == 1:
        name_of = record.maps[0].name_of
        return [(name_of(*pair), word_weights(record, word, [pair])) for pair in heads], "head by head"
    rows = [("all layers", word_weights(record, word, heads))]
    for layer in sorted({layer for layer, _ in heads}):
        of_layer = [pair for pair in heads if pair[0] == layer]
        rows.append((f"layer {layer}", word_weights(record, word, of_layer)))
    return rows, "the mean of each layer's heads"


def _word_plate(
    record: Heatmap,
    picture: Picture,
    sheet: Sheet,
    rows: Sequence[tuple[str, Floats]],
    notes: Sequence[str],
    style: Style,
) -> Plate:
    """Lay rows of attention, (key,), over a picture, each with its title."""
    values = []
    facts = []
    titles = []
    for title, row in rows:
        values.append(np.nan_to_num(picture.over(row)))
        facts.append(f"{picture_share(picture, row):.0%} on the picture")
        titles.append(title)
    notes = [*notes, "percentages: how much of the attention goes to this picture, all patches together"]
    subject = f"where {sheet.subject} · {record.text}"
    return _over_picture(
        record, picture, sheet, subject, values, facts, notes, style, titles=tuple(titles)
    )


def _mark(record: Heatmap, number: int) -> str:
    """Return how the names of files of one picture end: nothing of the first photo, "-2" of the second, "-2-small"."""
    picture = record.pictures[number]
    photos = list(dict.fromkeys(each.photo for each in record.pictures))
    photo = photos.index(picture.photo)
    mark = f"-{photo + 1}" if photo else ""
    return f"{mark}-small" if picture.source.endswith(SMALL) else mark


def _slug(name: str) -> str:
    """Return a word as a part of the name of a file; of signs alone it is "mark"."""
    return re.sub(r"[^\w]+", "-", name.casefold()).strip("-")[:24] or "mark"
