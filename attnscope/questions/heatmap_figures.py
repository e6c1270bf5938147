"""Draw records of attention weights: of texts by `heatmap_plates`, of pictures and recordings here.

Of a vision model it is the attention of patches; of one that reads pictures among words, where in them each word looks;
of a speech model, which moments each written token listens to, and when each word is spoken.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing.canvas import Drawing
from attnscope.drawing.files import first_png
from attnscope.drawing.layout import nice_ticks
from attnscope.drawing.map_figure import Axis, MapsFigure
from attnscope.drawing.style import Style, meanings
from attnscope.errors import AttnscopeError, UsageError, amount
from attnscope.questions.heatmap import AttentionMap, Heatmap, Rollout
from attnscope.questions.heatmap_plates import (
    Pair,
    Plate,
    Sheet,
    axis_of,
    draw_plates,
    model_name,
    pooled_plates,
    sheets_of,
    text_plates,
)
from attnscope.questions.maps import ROLLOUT
from attnscope.questions.places import MEAN, SMALL, Picture, Sound
from attnscope.questions.pooled import PooledHeatmap
from attnscope.report.wording import change_notes, run_notes
from attnscope.results.tokens import Tokens

Floats = NDArray[np.float64]

MOST_WORDS = 24
"""Words on one figure, and figures of one word each, where none is named."""

_SINGLE_PX, _PANEL_PX = 760, 420
_MOST_IN_A_ROW = 3  # maps that stand in one row with the photo
_KILOHERTZ = (0.25, 0.5, 1, 2, 4, 8, 16)
_SPECTROGRAM_PX = 190
_OVER_PHOTO = "a square is a patch, nothing is smoothed"
_SMOOTHED = "weights are interpolated between the middles of patches (--smooth)"
_BAR = "upper half of the bar: over white, lower half: over black"
_PICTURE_MEANING = meanings(
    "attention weight: the share of the query's attention that a patch gets",
    "attention weight ÷ the largest weight of the same panel on a patch",
)
_SOUND_MEANING = meanings(
    "attention weight: the share of a row's attention that a frame gets",
    "attention weight ÷ the largest weight of the same head on a frame with sound",
)


def plates_of(
    record: Heatmap | PooledHeatmap, style: Style | None = None, query: str | None = None
) -> Iterator[Plate]:
    """Yield what is in each figure of a record, the overview first.

    Args:
        record: What to draw.
        style: By default on a fixed scale, pictures and recordings each head by its own.
        query: Of text: also draws what this token attends to in all heads. Of pictures: whose attention is drawn.

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
    return _sound_plates(record, style)


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
        next(plates_of(record, query=query), None)


# Vision models ------------------------------------------------------------------------------------------------------


def query_of(attention: AttentionMap, query: str | None) -> tuple[int, str]:
    """Return the token whose attention is drawn, -1 for the mean over all patches; and its name.

    A query is "CLS", "REG0", a patch as "row,column", a place such as `@3`, or "mean"; None = CLS, or where there is
    none, "mean".
    """
    # The class token stands for the whole picture, where there is one.
    tokens = attention.queries
    if query is None:
        query = "CLS" if "CLS" in tokens.labels else MEAN
    if query.casefold() == MEAN:
        return -1, "the mean over all patches"
    # A row and a column, or a place.
    places = tokens.find_one(query.replace(" ", ""))
    if not places:
        special = "".join(f"{tokens.labels[token]}, " for token in np.flatnonzero(tokens.special))
        raise AttnscopeError(
            f"no patch is {query!r}",
            f"there are {special}mean, and patches from 0,0 to {tokens.labels[-1]} (row,column)",
        )
    name = tokens.labels[places[0]]
    return places[0], name if tokens.special[places[0]] else f"patch {name}"


def row_of(attention: AttentionMap, pair: Pair, query: int) -> Floats:
    """Return the attention of a query to each token, (key,); for -1 the mean over all patches."""
    weights = attention.of(*pair).astype(np.float64)
    row: Floats = weights[~attention.queries.special].mean(0) if query < 0 else weights[query]
    return row


def over_patches(record: Heatmap, pair: Pair, query: int) -> Floats:
    """Return the attention of a query to each patch, (row, column)."""
    attention, picture = record.maps[0], record.picture
    assert picture is not None
    return row_of(attention, pair, query)[~attention.keys.special].reshape(picture.grid)


def _picture_plates(record: Heatmap, style: Style, query: str | None) -> Iterator[Plate]:
    """Yield an overview and a figure per layer, or one of the heads that were picked, of what a query attends to."""
    attention, picture = record.maps[0], record.picture
    assert picture is not None
    token, name = query_of(attention, query)
    notes = []
    # The query in a frame: tokens that are no patches come first, or between.
    boxes: tuple[Any, ...] = ()
    if token >= 0 and not attention.queries.special[token]:
        row, column = divmod(int((~attention.queries.special[:token]).sum()), picture.grid[1])
        boxes = ((column, row, column + 1, row + 1),)
        notes.append("framed: the query")
    # Tokens that are no patches.
    special = ", ".join(attention.keys.labels[key] for key in np.flatnonzero(attention.keys.special))
    is_off = bool(special) and "without_sinks" not in record.changes
    if is_off:
        notes.append(f"what goes to {special} has no place in the picture")
    notes += change_notes(record, attention.kind)
    if isinstance(record, Rollout):
        notes.append(record.method)
    mark = MEAN if token < 0 else attention.queries.labels[token].replace(",", "-")
    for sheet in sheets_of(record, attention, after=f"-{mark}"):
        values = [over_patches(record, pair, token) for pair in sheet.heads]
        elsewhere = [
            row_of(attention, pair, token)[attention.keys.special].sum() for pair in sheet.heads
        ]
        facts = [f"{share:.2f} off the picture" if is_off else "" for share in elsewhere]
        subject = f"{sheet.subject}: what {name} attends to"
        if attention.kind == ROLLOUT:
            part = f"over {amount(len(attention.layers), 'layer')}"
            part = part if sheet.form == "overview" else f"up to layer {sheet.heads[0][0]}"
            subject = f"{attention.head_name(1)} {part}: where {name} came from"
        yield _over_picture(record, picture, sheet, subject, values, facts, notes, style, boxes=boxes)


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
    """Lay numbers, (row, column) of patches, over a picture, with the largest of each beside its facts.

    `fields` are further fields of the figure.
    """
    n = len(values)
    rows, columns = picture.grid
    captions = [
        f"max {patches.max():.3g}" + f" · {fact}" * bool(fact)
        for patches, fact in zip(values, facts, strict=True)
    ]
    title = f"{model_name(record)} · {subject}"
    figure = MapsFigure(
        **{**sheet.titles(record.maps[0]), **fields},
        subtitle=picture.facts,
        notes=(*notes, _SMOOTHED if style.smooth else _OVER_PHOTO, _BAR, *run_notes(record.run)),
        axes=((Axis(n=rows), Axis(n=columns)),),
        meaning=_PICTURE_MEANING[style.scale],
        cmap=style.cmap,
        is_smooth=style.smooth,
        captions=tuple(captions),
        picture=picture,
        largest_px=_SINGLE_PX if n == 1 else _PANEL_PX,
        columns=n + 1 if n <= _MOST_IN_A_ROW else 0,
        lettered=(title, *fields.get("titles", ())),
    )
    return Plate(sheet.stem, title, figure, values)


# Pictures among words -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Word:
    """A word of a record, or a token that is part of none; `tokens` are its places among the queries."""

    name: str
    tokens: tuple[int, ...]


def words_of(record: Heatmap, query: str | None = None) -> tuple[list[Word], str]:
    """Return the words whose attention is drawn, and a note if these are not all.

    They are those that are named, else those that the model wrote; where it wrote none, the words after the pictures.
    """
    # Whole words, not pieces.
    tokens = record.maps[0].queries
    groups = [tuple(group) for group in tokens.word_groups()]
    words = [Word(_name(tokens, group), group) for group in groups]
    # The words that are named.
    if query is not None:
        named = _find_words(record, query, words)
        return [word for word in words if named & {*word.tokens}], ""
    # The words that the model wrote, or all without special tokens.
    written = [word for word in words if 0 <= tokens.n_given <= word.tokens[0]]
    words = [word for word in written or words if not tokens.special[word.tokens[0]]] or words
    note = (
        f"the first {MOST_WORDS} of {len(words)} words: --query names others"
        if len(words) > MOST_WORDS
        else ""
    )
    return words[:MOST_WORDS], note


def _find_words(record: Heatmap, query: str, words: Sequence[Word]) -> set[int]:
    """Return the places among the queries that a user names; places such as @70 count all tokens."""
    tokens, first = record.maps[0].queries, record.maps[0].first[0]
    shifted = re.sub(r"@(\d+)", lambda place: f"@{max(int(place[1]) - first, -1)}", query)
    named = set(tokens.find(shifted))
    if named:
        return named
    names = ", ".join(dict.fromkeys(word.name for word in words if not tokens.special[word.tokens[0]]))
    raise AttnscopeError(
        f"no word that looks at the pictures is {query!r}",
        f"there are {names}; or name places, such as @{first}",
    )


def _name(tokens: Tokens, group: Sequence[int]) -> str:
    return (
        tokens.merge([group]).labels[0] if len(group) > 1 else tokens.labels[group[0]].removeprefix("·")
    )


def weights_of(record: Heatmap, word: Word, heads: Iterable[Pair]) -> Floats:
    """Return the attention of a word to each token, (key,): the mean over heads and over its tokens."""
    rows = np.array(
        [record.maps[0].of(*pair)[list(word.tokens)].astype(np.float64).mean(0) for pair in heads]
    )
    n_known = (~np.isnan(rows)).sum(0)  # 0 in damaged records alone
    mean: Floats = np.nansum(rows, axis=0) / np.maximum(n_known, 1)
    return mean


def share_of(picture: Picture, row: Floats) -> float:
    """Return how much of what tokens get goes to a picture."""
    return float(np.nansum(picture.over(row)))


def _word_plates(record: Heatmap, style: Style, query: str | None) -> Iterator[Plate]:
    """Yield the words side by side over each picture, then each word layer by layer or head by head, then the text."""
    attention = record.maps[0]
    words, note = words_of(record, query)
    heads = record.chosen(attention)
    # Queries that a model has learned are no words.
    is_learned = attention.kind == "cross" and not attention.queries.text
    one, several = ("query", "queries") if is_learned else ("word", "words")
    notes = [
        "the mean of all heads" if record.picked is None else "the mean of the heads that were picked"
    ]
    notes += [note] if note else []
    # All words over each picture.
    for number, picture in enumerate(record.pictures):
        sheet = Sheet(f"{several}{_mark(record, number)}", "grid", heads, f"{several} look")
        rows = [(word.name, weights_of(record, word, heads)) for word in words]
        yield _word_plate(record, picture, sheet, rows, notes, style)
    # Each word by itself, over all pictures that are not made small.
    for (place, word), (number, picture) in product(enumerate(words), enumerate(record.pictures)):
        if picture.source.endswith(SMALL):
            continue
        stem = f"{one}-{place:02d}-{_slug(word.name)}{_mark(record, number)}"
        sheet = Sheet(stem, "grid", heads, f"“{word.name}” looks")
        if record.picked is not None or len(heads) == 1:
            rows = [(attention.name_of(*pair), weights_of(record, word, [pair])) for pair in heads]
            yield _word_plate(record, picture, sheet, rows, ["head by head"], style)
            continue
        rows = [("all layers", weights_of(record, word, heads))]
        for layer in sorted({layer for layer, _ in heads}):
            of_layer = [pair for pair in heads if pair[0] == layer]
            rows.append((f"layer {layer}", weights_of(record, word, of_layer)))
        yield _word_plate(record, picture, sheet, rows, ["the mean of each layer's heads"], style)
    # The maps of words, with each photo as one key; with cross-attention, those of words to each other.
    flat = record.with_pictures_as_one()
    if flat.maps[0].kind == "cross" and len(flat.maps) > 1:
        flat = replace(flat, maps=flat.maps[1:])
    yield from text_plates(flat, style, before="text-")


def _word_plate(
    record: Heatmap,
    picture: Picture,
    sheet: Sheet,
    rows: Sequence[tuple[str, Floats]],
    notes: Sequence[str],
    style: Style,
) -> Plate:
    """Lay rows of attention, (key,), over a picture, each by its title."""
    values = [np.nan_to_num(picture.over(row)) for _, row in rows]
    facts = [f"{share_of(picture, row):.0%} on the picture" for _, row in rows]
    notes = [*notes, "percentages: how much of the attention goes to this picture, all patches together"]
    subject = f"where {sheet.subject} · {record.text}"
    titles = tuple(title for title, _ in rows)
    return _over_picture(record, picture, sheet, subject, values, facts, notes, style, titles=titles)


def _mark(record: Heatmap, number: int) -> str:
    """Return what tells the files of one picture from those of the others."""
    picture = record.pictures[number]
    photos = list(dict.fromkeys(picture.photo for picture in record.pictures))
    photo = photos.index(picture.photo)
    mark = f"-{photo + 1}" if photo else ""
    return f"{mark}-small" if picture.source.endswith(SMALL) else mark


def _slug(name: str) -> str:
    return re.sub(r"[^\w]+", "-", name.casefold()).strip("-")[:24] or "mark"


# Sound --------------------------------------------------------------------------------------------------------------


def _sound_plates(record: Heatmap, style: Style) -> Iterator[Plate]:
    """Yield an overview and a figure per layer, or one of the heads that were picked: token by time, or time by time.

    Before these, where words are timed, `word-times`: the words over the spectrogram.
    """
    attention, sound = record.maps[0], record.sound
    assert sound is not None
    if sound.words and sound.spectrogram is not None:
        yield _word_times(record, sound)
    # The sides of all maps.
    frames = _seconds(sound)
    is_across = attention.kind == "cross"
    queries, n_rows = attention.queries, len(attention.queries)
    if sound.words:  # a row is named by the token that it writes, the next one
        n_rows -= 1
        queries = queries.take(np.arange(1, n_rows + 1))
    tokens = replace(axis_of(queries), seams=())
    loud = sound.envelope / (float(sound.envelope.max()) or 1.0)
    boxes = [
        (_frame(sound, w.start), w.tokens[0] - 1, _frame(sound, w.end), w.tokens[1] - 1)
        for w in sound.words
    ]
    subject = "when each token listens (cross-attention)" if is_across else "what each moment attends to"
    for sheet in sheets_of(record, attention):
        is_overview = sheet.form == "overview"
        values = [attention.of(*pair)[:n_rows] for pair in sheet.heads]
        after = [share_after_sound(record, pair) for pair in sheet.heads]
        captions = [f"max {weights.max():.3g}" for weights in values]
        # Heights of rows, where they are tokens.
        row_px = 0.0
        if is_across:
            captions = [
                f"{text} · {share:.2f} after the sound"
                for text, share in zip(captions, after, strict=True)
            ]
            row_px = 22.0 if sheet.form == "single" else 17.0
            if is_overview:
                row_px = max(1, min(8, 160 // len(tokens)))
        title = f"{model_name(record)} · {sheet.subject}: {subject}"
        figure = MapsFigure(
            **sheet.titles(attention),
            subtitle=sound.facts,
            notes=(*_sound_notes(record, after), *run_notes(record.run)),
            axes=(
                (tokens if is_across and not is_overview else replace(frames, n=len(tokens)), frames),
            ),
            meaning=_SOUND_MEANING[style.scale],
            cmap=style.cmap,
            captions=tuple(captions),
            lettered=(title,),
            row_px=row_px,
            columns=0 if is_overview else min(2, len(sheet.heads)),
            above=tuple(loud.tolist()),
            boxes=() if is_overview else tuple(boxes),
        )
        yield Plate(sheet.stem, title, figure, values)


def share_after_sound(record: Heatmap, pair: Pair) -> float:
    """Return the share of a head's attention, averaged over tokens, that goes to the silence after the sound."""
    rows = record.maps[0].of(*pair).astype(np.float64).sum(-1)
    return float(np.clip(1 - rows, 0, 1).mean())


def _seconds(sound: Sound) -> Axis:
    """Return the side of a map that is time."""
    n = len(sound.envelope)
    shown = n * sound.seconds_per_frame
    return Axis(
        n=n, ticks=tuple((min(1.0, tick / shown), f"{tick:g} s") for tick in nice_ticks(sound.seconds))
    )


def _frame(sound: Sound, seconds: float) -> float:
    return min(float(len(sound.envelope)), seconds / sound.seconds_per_frame)


def _sound_notes(record: Heatmap, shares: Sequence[float]) -> list[str]:
    """Return what a reader of a figure must know; `shares` go to the silence after the sound."""
    attention, sound = record.maps[0], record.sound
    assert sound is not None
    # A frame of self-attention is a query and a key alike.
    if attention.kind != "cross":
        return [
            "rows: frames of the recording (queries) · columns: the same frames (keys), their loudness above"
        ]
    # Cross-attention: the recording is padded with silence, which gets attention too.
    after = f"{min(shares):.2f} to {max(shares):.2f}" if len(shares) > 1 else f"{shares[0]:.2f}"
    rows = (
        "the token that is written; the query is the one before it"
        if sound.words
        else "tokens (queries)"
    )
    notes = [
        f"rows: {rows} · columns: frames of the recording (keys), its loudness above",
        f"only frames with sound are drawn; {after} of a head's attention goes to the silence after them",
    ]
    if sound.words:
        notes.append(f"framed: when each word is spoken, by dynamic time warping of {_followed(sound)}")
    # Tokens beyond the prompt.
    if 0 <= attention.queries.n_given < len(attention.queries):
        notes.append("green tokens were written by the model itself")
    return notes


def _followed(sound: Sound) -> str:
    return ", ".join(f"L{layer}H{head}" for layer, head in sound.followed)


def _word_times(record: Heatmap, sound: Sound) -> Plate:
    """Return the words of a recording over the spectrogram that the model was given: seconds across, kilohertz up."""
    assert sound.spectrogram is not None
    # (band, step), the highest band first.
    levels = sound.spectrogram.levels[::-1].astype(np.float32) / 255
    hertz = np.array(sound.spectrogram.hertz)
    n_bands, n_steps = levels.shape
    # Bands are spaced in mel.
    ticks = [tick for tick in _KILOHERTZ if hertz[0] <= 1000 * tick <= hertz[-1]]
    bands = np.interp([1000 * tick for tick in ticks], hertz, np.arange(n_bands))
    heights = (1 - (bands + 0.5) / n_bands).tolist()
    steps = n_steps / len(sound.envelope)
    spans = [(_frame(sound, w.start) * steps, _frame(sound, w.end) * steps, w.text) for w in sound.words]
    rows = Axis(
        n=n_bands,
        ticks=tuple((high, f"{tick:g} kHz") for high, tick in zip(heights, ticks, strict=True)),
    )
    title = f"{model_name(record)} · when each word is spoken"
    figure = MapsFigure(
        titles=("log-mel spectrogram",),
        subtitle=sound.facts,
        notes=(f"words: from dynamic time warping of the cross-attention of {_followed(sound)}",),
        axes=((rows, replace(_seconds(sound), n=n_steps)),),
        meaning=f"loudness: from {sound.spectrogram.decibels:.0f} dB below the loudest (0) to the loudest (1)",
        cmap="Greys",
        lettered=(title,),
        row_px=_SPECTROGRAM_PX / n_bands,
        spans=tuple(spans),
        boxes=tuple((left, 0, right, n_bands) for left, right, _ in spans),
    )
    return Plate("word-times", title, figure, [levels], top=1.0)
