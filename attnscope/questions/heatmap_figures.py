"""Make the figures of attention maps: of pictures here, of texts in `heatmap_plates`, of sound in `heatmap_sounds`.

Figures of a vision model show what one query attends to in the picture. Figures of a model that reads pictures among
words show what each word attends to in each picture.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing.canvas import FigureRenderer
from attnscope.drawing.files import render_first_png
from attnscope.drawing.map_figure import Axis, MapsFigure
from attnscope.drawing.style import Style, scale_meanings
from attnscope.errors import AttnscopeError, UsageError, amount
from attnscope.questions.heatmap import AttentionMap, Heatmap, Rollout
from attnscope.questions.heatmap_plates import (
    FigureSpec,
    NamedFigure,
    Pair,
    captions_of,
    draw_plates,
    model_name,
    pooled_plates,
    sheets_of,
    text_plates,
)
from attnscope.questions.heatmap_sounds import sound_plates
from attnscope.questions.maps import ROLLOUT
from attnscope.questions.places import MEAN_QUERY, THUMBNAIL_SUFFIX, Picture
from attnscope.questions.pooled import PooledHeatmap
from attnscope.report.wording import change_notes, run_notes
from attnscope.results.tokens import Tokens

Floats = NDArray[np.float64]

MAX_WORDS = 24
"""How many words are drawn at most if no query names words: side by side, then on a figure each."""

_SINGLE_PX = 760
"""The largest width of a map over a picture that is alone in its figure."""

_PANEL_PX = 420
"""The largest width of each of several maps over a picture."""

_MAX_IN_A_ROW = 3
"""Up to so many maps stand in one row with the photo; more are laid out to a page near 4:3."""

# Notes at the foot of figures over a photo.
_OVER_PHOTO = "a square is a patch, nothing is smoothed"
_SMOOTHED = "weights are interpolated between the middles of patches (--smooth)"
_BAR = "upper half of the bar: over white, lower half: over black"
_PICTURE_MEANING = scale_meanings(
    "attention weight: the share of the query's attention that a patch gets",
    "attention weight ÷ the largest weight of the same panel on a patch",
)


def plates_of(
    record: Heatmap | PooledHeatmap, style: Style | None = None, query: str | None = None
) -> Iterator[NamedFigure]:
    """Return the figures of a record with their values, the overview first.

    Args:
        record: What to draw.
        style: How it is drawn; None = as is usual for such a record.
        query: Of text: names tokens that get a figure of all heads each. Of a picture: names the token whose attention
            is drawn, or "mean". Of pictures among words: names the words whose attention is drawn.

    Raises:
        AttnscopeError: The query names no token.
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
) -> Iterator[tuple[str, FigureRenderer]]:
    """Yield the figures of a record one after the other, each with its file name without the ending."""
    return draw_plates(plates_of(record, style, query), style)


def glance(record: Heatmap | PooledHeatmap) -> bytes:
    """Return the first figure of a record as a PNG, for notebooks."""
    return render_first_png(pages(record, record.style()))


def require_query(record: Heatmap | PooledHeatmap, query: str | None) -> None:
    """Refuse a query that names no token of the record."""
    if query is not None:
        # Making the first figure reads the query.
        next(plates_of(record, query=query), None)


# Vision models ------------------------------------------------------------------------------------------------------


def query_of(attention: AttentionMap, query: str | None) -> tuple[int, str]:
    """Return the index of the query whose attention is drawn, and its name; -1 = the mean over all patches.

    A query is "CLS", "REG0", a patch as "row,column", a position such as `@3`, or "mean"; None = "CLS", or "mean" if
    there is no CLS token.
    """
    tokens = attention.queries
    if query is None:
        query = "CLS" if "CLS" in tokens.labels else MEAN_QUERY
    if query.casefold() == MEAN_QUERY:
        return -1, "the mean over all patches"
    places = tokens.find_one(query.replace(" ", ""))
    if not places:
        others = ", ".join([*compress(tokens.labels, tokens.special), MEAN_QUERY])
        raise AttnscopeError(
            f"no patch is {query!r}",
            f"there are {others}, and patches from 0,0 to {tokens.labels[-1]} (row,column)",
        )
    token = places[0]
    name = tokens.labels[token]
    return token, name if tokens.special[token] else f"patch {name}"


def query_weights(attention: AttentionMap, pair: Pair, query: int) -> Floats:
    """Return the attention of a query of `query_of` to each token, (key,)."""
    weights = attention.of(*pair).astype(np.float64)
    if query >= 0:
        return np.asarray(weights[query])
    is_patch = ~attention.queries.special
    return np.asarray(weights[is_patch].mean(0))


def query_patches(record: Heatmap, pair: Pair, query: int) -> Floats:
    """Return the attention of a query of `query_of` to each patch of the picture, (row, column)."""
    attention = record.maps[0]
    picture = record.picture
    assert picture is not None
    return query_weights(attention, pair, query)[~attention.keys.special].reshape(picture.grid)


def _picture_plates(record: Heatmap, style: Style, query: str | None) -> Iterator[NamedFigure]:
    """Yield figures of what a query attends to: an overview and one per layer, or one of the heads that were picked."""
    attention = record.maps[0]
    picture = record.picture
    assert picture is not None
    token, name = query_of(attention, query)
    is_patch = ~attention.queries.special
    notes = []
    boxes: tuple[Any, ...] = ()
    if token >= 0 and is_patch[token]:
        # Special tokens may stand before the patches and between them, so only patches are counted.
        patch_number = int(is_patch[:token].sum())
        row, column = divmod(patch_number, picture.grid[1])
        boxes = ((column, row, column + 1, row + 1),)
        notes.append("framed: the query")
    # Special tokens have weights too, but no place in the picture.
    special_names = ", ".join(compress(attention.keys.labels, attention.keys.special))
    has_special = bool(special_names) and "without_sinks" not in record.changes
    if has_special:
        notes.append(f"what goes to {special_names} has no place in the picture")
    notes += change_notes(record, attention.kind)
    if isinstance(record, Rollout):
        notes.append(record.method)
    # The query in names of files; a patch such as 3,5 is 3-5 there.
    query_name = MEAN_QUERY if token < 0 else attention.queries.labels[token].replace(",", "-")
    for sheet in sheets_of(record, attention, suffix=f"-{query_name}"):
        values = []
        facts = []
        for pair in sheet.heads:
            values.append(query_patches(record, pair, token))
            on_special = query_weights(attention, pair, token)[attention.keys.special].sum()
            facts.append(f"{on_special:.2f} off the picture" if has_special else "")
        subject = f"{sheet.subject}: what {name} attends to"
        if attention.kind == ROLLOUT:
            if sheet.form == "overview":
                depth = f"over {amount(len(attention.layers), 'layer')}"
            else:
                depth = f"up to layer {sheet.heads[0][0]}"
            # Of the two maps of a layer, number 1 is rollout or relevance.
            subject = f"{attention.head_name(1)} {depth}: where {name} came from"
        yield _over_picture(
            record, picture, sheet, subject, values, facts, notes, style, framed_boxes=boxes
        )


def _over_picture(
    record: Heatmap,
    picture: Picture,
    sheet: FigureSpec,
    subject: str,
    values: Sequence[Floats],
    facts: Sequence[str],
    notes: Sequence[str],
    style: Style,
    **fields: Any,
) -> NamedFigure:
    """Return the figure of maps, (row, column) of patches, laid over a picture.

    Args:
        record: The record that they are from.
        picture: The picture.
        sheet: The name of the file, and the heads.
        subject: What the maps show, for the title of the figure.
        values: The values of each map.
        facts: A fact on each map, which stands beside its largest value; may be empty.
        notes: What a reader must know.
        style: How it is drawn.
        fields: May hold `framed_boxes`, frames on all maps, and `titles` of maps in place of the names of heads; see
            `MapsFigure`.
    """
    n_maps = len(values)
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
        max_panel_px=_SINGLE_PX if n_maps == 1 else _PANEL_PX,
        # One column more, for the photo itself; 0 = as many as make the page near 4:3.
        columns=n_maps + 1 if n_maps <= _MAX_IN_A_ROW else 0,
        font_texts=(title, *fields.get("titles", ())),
    )
    return NamedFigure(sheet.stem, title, figure, values)


# Pictures among words -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Word:
    """Hold a word, or a token that is no part of a word; `tokens` are the indices of its pieces among the queries."""

    name: str
    tokens: tuple[int, ...]


def words_of(record: Heatmap, query: str | None = None) -> tuple[list[Word], str]:
    """Return the words whose attention is drawn, and a note if only the first of them are.

    They are the words that a query names; without a query those that the model wrote, or if it wrote none, all words.
    """
    tokens = record.maps[0].queries
    words = [Word(_word_name(tokens, pieces), tuple(pieces)) for pieces in tokens.word_groups()]
    if query is not None:
        named = _find_words(record, query, words)
        return [word for word in words if not named.isdisjoint(word.tokens)], ""
    written = [word for word in words if 0 <= tokens.n_given <= word.tokens[0]]
    wanted = written or words
    # Special tokens are drawn only if there are no other words.
    ordinary = [word for word in wanted if not tokens.special[word.tokens[0]]]
    drawn = ordinary or words
    if len(drawn) <= MAX_WORDS:
        return drawn, ""
    note = f"the first {MAX_WORDS} of {len(drawn)} words: --query names others"
    return drawn[:MAX_WORDS], note


def _find_words(record: Heatmap, query: str, words: Sequence[Word]) -> set[int]:
    """Return the indices of the queries that a user names; a position such as @70 counts all tokens of the input."""
    attention = record.maps[0]
    tokens = attention.queries
    first_query, _ = attention.origin

    # Count positions from the first query; those before it become @-1, which names nothing.
    def count_from_first_query(position: re.Match[str]) -> str:
        return f"@{max(int(position[1]) - first_query, -1)}"

    named = set(tokens.find(re.sub(r"@(\d+)", count_from_first_query, query)))
    if named:
        return named
    names = [word.name for word in words if not tokens.special[word.tokens[0]]]
    raise AttnscopeError(
        f"no word that looks at the pictures is {query!r}",
        f"there are {', '.join(dict.fromkeys(names))}; or name places, such as @{first_query}",
    )


def _word_name(tokens: Tokens, pieces: Sequence[int]) -> str:
    """Return the text of a word of several pieces, or the label of its one token without "·", the mark of a space."""
    if len(pieces) > 1:
        return tokens.merge([pieces]).labels[0]
    return tokens.labels[pieces[0]].removeprefix("·")


def word_weights(record: Heatmap, word: Word, heads: Iterable[Pair]) -> Floats:
    """Return the attention of a word to each token, (key,): the mean over heads and over its tokens."""
    pieces = list(word.tokens)
    # (head, key)
    rows = []
    for pair in heads:
        weights = record.maps[0].of(*pair)[pieces].astype(np.float64)
        rows.append(weights.mean(0))
    # How many numbers a key has that are not NaN, (key,); it may be 0 in a damaged record.
    n_known = (~np.isnan(rows)).sum(0)
    return np.asarray(np.nansum(rows, axis=0) / np.maximum(n_known, 1))


def picture_share(picture: Picture, row: Floats) -> float:
    """Return the share of a row of attention, (key,), that goes to the patches of a picture."""
    return float(np.nansum(picture.over(row)))


def _word_plates(record: Heatmap, style: Style, query: str | None) -> Iterator[NamedFigure]:
    """Yield all words side by side over each picture, then each word by layer or by head, then the maps of the text."""
    attention = record.maps[0]
    words, words_note = words_of(record, query)
    heads = record.chosen(attention)
    # How files are named: queries that a model has learned have no text, and are no words.
    singular, plural = "word", "words"
    if attention.kind == "cross" and not attention.queries.text:
        singular, plural = "query", "queries"
    averaged = "all heads" if record.picked is None else "the heads that were picked"
    notes = [f"the mean of {averaged}"]
    if words_note:
        notes.append(words_note)
    # All words over each picture.
    rows = [(word.name, word_weights(record, word, heads)) for word in words]
    for picture in record.pictures:
        sheet = FigureSpec(
            f"{plural}{_picture_suffix(record, picture)}", "grid", heads, f"{plural} look"
        )
        yield _word_plate(record, picture, sheet, rows, notes, style)
    # Each word alone, over the detailed pictures.
    detailed = [picture for picture in record.pictures if not picture.source.endswith(THUMBNAIL_SUFFIX)]
    for word_index, word in enumerate(words):
        rows, note = _rows_of_word(record, word, heads)
        for picture in detailed:
            suffix = _picture_suffix(record, picture)
            stem = f"{singular}-{word_index:02d}-{_slug(word.name)}{suffix}"
            sheet = FigureSpec(stem, "grid", heads, f"“{word.name}” looks")
            yield _word_plate(record, picture, sheet, rows, [note], style)
    # The maps of words, each photo as one key. Beside cross-attention to pictures, that is attention among words.
    flat = record.with_pictures_as_one()
    if flat.maps[0].kind == "cross" and flat.has_several_kinds:
        flat = replace(flat, maps=flat.maps[1:])
    yield from text_plates(flat, style, prefix="text-")


def _rows_of_word(
    record: Heatmap, word: Word, heads: Sequence[Pair]
) -> tuple[list[tuple[str, Floats]], str]:
    """Return (title, attention to each key) of a word for each picked head, else for each layer; and a note on them."""
    if record.picked is not None or len(heads) == 1:
        name_of = record.maps[0].name_of
        return [(name_of(*pair), word_weights(record, word, [pair])) for pair in heads], "head by head"
    rows = [("all layers", word_weights(record, word, heads))]
    for layer in sorted({layer for layer, _ in heads}):
        layer_heads = [pair for pair in heads if pair[0] == layer]
        rows.append((f"layer {layer}", word_weights(record, word, layer_heads)))
    return rows, "the mean of each layer's heads"


def _word_plate(
    record: Heatmap,
    picture: Picture,
    sheet: FigureSpec,
    rows: Sequence[tuple[str, Floats]],
    notes: Sequence[str],
    style: Style,
) -> NamedFigure:
    """Return the figure of rows, each a title and attention to each key, (key,), as maps over a picture."""
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


def _picture_suffix(record: Heatmap, picture: Picture) -> str:
    """Return the end of the file names of a picture: "" of the first photo, "-2" of the second, "-2-small" if small."""
    photos = list(dict.fromkeys(other.photo for other in record.pictures))
    photo_index = photos.index(picture.photo)
    suffix = f"-{photo_index + 1}" if photo_index else ""
    return f"{suffix}-small" if picture.source.endswith(THUMBNAIL_SUFFIX) else suffix


def _slug(name: str) -> str:
    """Return a word as a file name may have it; "mark" if it has no letter and no digit."""
    return re.sub(r"[^\w]+", "-", name.casefold()).strip("-")[:24] or "mark"
