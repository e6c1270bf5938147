"""Attention on pictures and recordings: what patches, words and written tokens attend to, and its figures.

Of a vision model it is the attention of patches; of one that reads pictures among words, where in them each word looks;
of a speech model, which moments each written token listens to, and when each word is spoken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing.layout import nice_ticks
from attnscope.drawing.map_figure import Axis, MapsFigure
from attnscope.drawing.style import Style, meanings
from attnscope.errors import AttnscopeError, UsageError, amount
from attnscope.questions.heatmap import AttentionMap, Heatmap, Rollout
from attnscope.questions.heatmap_sheets import (
    Pair,
    Plate,
    Sheet,
    axis_of,
    model_name,
    sheets_of_heads,
)
from attnscope.questions.heatmap_texts import text_plates
from attnscope.questions.maps import ROLLOUT
from attnscope.questions.places import MEAN, SMALL, Picture, Sound
from attnscope.report.wording import run_notes
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


def picture_plates(record: Heatmap, style: Style, query: str | None = None) -> Iterator[Plate]:
    """Yield an overview and a figure per layer, or one of the heads that were picked, of what a query attends to."""
    attention, picture = record.maps[0], record.picture
    assert picture is not None
    token, name = query_of(attention, query)
    notes = [_SMOOTHED if style.smooth else _OVER_PHOTO, _BAR]
    boxes: tuple[Any, ...] = ()
    if token >= 0 and not attention.queries.special[token]:
        # Tokens that are no patches come first, or between.
        row, column = divmod(int((~attention.queries.special[:token]).sum()), picture.grid[1])
        boxes = ((column, row, column + 1, row + 1),)
        notes.append("framed: the query")
    special = [attention.keys.labels[key] for key in np.flatnonzero(attention.keys.special)]
    if "without_sinks" in record.changes:
        notes.append(f"{', '.join(special)} get nothing: each row is divided by what patches get")
        special = []
    if special:
        notes.append(f"what goes to {', '.join(special)} has no place in the picture")
    if "hide_special" in record.changes:
        notes.append("tokens that are no patches are hidden; each row is divided by what is left of it")
    if isinstance(record, Rollout):
        notes.append(record.method)
    mark = MEAN if token < 0 else attention.queries.labels[token].replace(",", "-")
    for sheet in sheets_of_heads(
        record.chosen(attention), picked=record.picked is not None, after=f"-{mark}", mean=record.averaged
    ):
        values = [over_patches(record, pair, token) for pair in sheet.heads]
        elsewhere = [row_of(attention, pair, token)[attention.keys.special].sum() for pair in sheet.heads]
        facts = [[f"{share:.2f} off the picture"] if special else [] for share in elsewhere]
        subject = f"{sheet.subject}: what {name} attends to"
        if attention.kind == ROLLOUT:
            part = f"over {amount(len(attention.layers), 'layer')}"
            part = part if sheet.form == "overview" else f"up to layer {sheet.heads[0][0]}"
            subject = f"{attention.head_name(1)} {part}: where {name} came from"
        title = f"{model_name(record)} · {subject}"
        figure = _picture_figure(
            record,
            style,
            picture,
            values,
            facts,
            **sheet.titles(attention),
            notes=notes,
            boxes=boxes,
            lettered=(title,),
        )
        yield Plate(sheet.stem, title, figure, values)


def _picture_figure(
    record: Heatmap,
    style: Style,
    picture: Picture,
    values: Sequence[Floats],
    facts: Sequence[Sequence[str]],
    **fields: Any,
) -> MapsFigure:
    """Return a figure of numbers laid over a picture, with the largest of each beside its facts.

    `fields` are further fields of the figure.
    """
    # One cell per patch: (row, column).
    rows, columns = picture.grid
    n = len(values)
    captions = [(f"max {patches.max():.3g}", *more) for patches, more in zip(values, facts, strict=True)]
    return MapsFigure(
        subtitle=picture.facts,
        axes=((Axis(n=rows), Axis(n=columns)),),
        meaning=_PICTURE_MEANING[style.scale],
        cmap=style.cmap,
        is_smooth=style.smooth,
        captions=tuple(captions),
        picture=picture,
        largest_px=_SINGLE_PX if n == 1 else _PANEL_PX,
        columns=n + 1 if n <= _MOST_IN_A_ROW else 0,
        **{**fields, "notes": (*fields["notes"], *run_notes(record.run))},
    )


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
    note = f"the first {MOST_WORDS} of {len(words)} words: --query names others" if len(words) > MOST_WORDS else ""
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
        f"no word that looks at the pictures is {query!r}", f"there are {names}; or name places, such as @{first}"
    )


def _name(tokens: Tokens, group: Sequence[int]) -> str:
    return tokens.merge([group]).labels[0] if len(group) > 1 else tokens.labels[group[0]].removeprefix("·")


def weights_of(record: Heatmap, word: Word, heads: Iterable[Pair]) -> Floats:
    """Return the attention of a word to each token, (key,): the mean over heads and over its tokens."""
    rows = np.array([record.maps[0].of(*pair)[list(word.tokens)].astype(np.float64).mean(0) for pair in heads])
    n_known = (~np.isnan(rows)).sum(0)  # 0 in damaged records alone
    mean: Floats = np.nansum(rows, axis=0) / np.maximum(n_known, 1)
    return mean


def share_of(picture: Picture, row: Floats) -> float:
    """Return how much of what tokens get goes to a picture."""
    return float(np.nansum(picture.over(row)))


def word_plates(record: Heatmap, style: Style, query: str | None = None) -> Iterator[Plate]:
    """Yield the words side by side over each picture, then each word layer by layer or head by head, then the text."""
    attention = record.maps[0]
    words, note = words_of(record, query)
    heads = record.chosen(attention)
    is_picked = record.picked is not None
    # Queries that a model has learned are no words.
    is_learned = attention.kind == "cross" and not attention.queries.text
    one = "query" if is_learned else "word"
    several = "queries" if is_learned else "words"
    notes = ["the mean of the heads that were picked" if is_picked else "the mean of all heads"]
    notes += [note] if note else []
    # All words over each picture.
    for number, picture in enumerate(record.pictures):
        titles = {"titles": tuple(word.name for word in words)}
        rows = [weights_of(record, word, heads) for word in words]
        stem = f"{several}{_mark(record, number)}"
        yield _word_plate(record, picture, stem, f"{several} look", titles, rows, notes, style)
    # Each word by itself, over all pictures that are not made small.
    for (place, word), (number, picture) in product(enumerate(words), enumerate(record.pictures)):
        if picture.source.endswith(SMALL):
            continue
        looks = f"“{word.name}” looks"
        stem = f"{one}-{place:02d}-{_slug(word.name)}{_mark(record, number)}"
        sheets = [Sheet(stem, "grid", heads, "")]
        if not is_picked and len(heads) > 1:
            layers = sorted({layer for layer, _ in heads})
            groups = [heads, *([pair for pair in heads if pair[0] == layer] for layer in layers)]
            titles = {"titles": ("all layers", *(f"layer {layer}" for layer in layers))}
            rows = [weights_of(record, word, group) for group in groups]
            mean = ["the mean of each layer's heads"]
            yield _word_plate(record, picture, stem, looks, titles, rows, mean, style)
            sheets = [] if query is None else sheets_of_heads(heads, picked=False, before=f"{stem}-")
        for sheet in sheets:
            rows = [weights_of(record, word, [pair]) for pair in sheet.heads]
            titles = sheet.titles(attention)
            yield _word_plate(record, picture, sheet.stem, looks, titles, rows, ["head by head"], style)
    # The maps of words, with each photo as one key; with cross-attention, those of words to each other.
    flat = record.with_pictures_as_one()
    if flat.maps[0].kind == "cross" and len(flat.maps) > 1:
        flat = replace(flat, maps=flat.maps[1:])
    yield from text_plates(flat, style, before="text-")


def _word_plate(
    record: Heatmap,
    picture: Picture,
    stem: str,
    looks: str,
    titles: dict[str, Any],
    rows: Sequence[Floats],
    notes: Sequence[str],
    style: Style,
) -> Plate:
    """Lay rows of attention, (key,), over a picture, each by its title."""
    values = [np.nan_to_num(picture.over(row)) for row in rows]
    facts = [[f"{share_of(picture, row):.0%} on the picture"] for row in rows]
    share = "percentages: how much of the attention goes to this picture, all patches together"
    title = f"{model_name(record)} · where {looks} · {record.text}"
    lettered = (title, *titles.get("titles", ()))
    notes = [*notes, share, _SMOOTHED if style.smooth else _OVER_PHOTO, _BAR]
    figure = _picture_figure(record, style, picture, values, facts, **titles, notes=notes, lettered=lettered)
    return Plate(stem, title, figure, values)


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


def sound_plates(record: Heatmap, style: Style, query: str | None = None) -> Iterator[Plate]:
    """Yield an overview and a figure per layer, or one of the heads that were picked: token by time, or time by time.

    Before these, where words are timed, `word-times`: the words over the spectrogram.
    """
    if query is not None:
        raise UsageError("over time every token has its row: there is no --query", "leave it out")
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
    boxes = [(_frame(sound, w.start), w.tokens[0] - 1, _frame(sound, w.end), w.tokens[1] - 1) for w in sound.words]
    for sheet in sheets_of_heads(record.chosen(attention), picked=record.picked is not None, mean=record.averaged):
        subject = "when each token listens (cross-attention)" if is_across else "what each moment attends to"
        shares = [share_after_sound(record, pair) for pair in sheet.heads]
        values = [attention.of(*pair)[:n_rows] for pair in sheet.heads]
        largest = [f"max {weights.max():.3g}" for weights in values]
        after = [f"{share:.2f} after the sound" for share in shares]
        is_overview = sheet.form == "overview"
        row_px = 22.0 if sheet.form == "single" else 17.0
        if is_overview:
            row_px = max(1, min(8, 160 // len(tokens)))
        title = f"{model_name(record)} · {sheet.subject}: {subject}"
        figure = MapsFigure(
            **sheet.titles(attention),
            subtitle=sound.facts,
            notes=(*_sound_notes(record, shares), *run_notes(record.run)),
            axes=((tokens if is_across and not is_overview else replace(frames, n=len(tokens)), frames),),
            meaning=_SOUND_MEANING[style.scale],
            cmap=style.cmap,
            captions=tuple(zip(largest, after, strict=True)) if is_across else tuple((text,) for text in largest),
            lettered=(title,),
            row_px=row_px if is_across else 0,
            columns=0 if is_overview else min(2, len(sheet.heads)),
            above=(tuple(loud.tolist()),),
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
    return Axis(n=n, ticks=tuple((min(1.0, tick / shown), f"{tick:g} s") for tick in nice_ticks(sound.seconds)))


def _frame(sound: Sound, seconds: float) -> float:
    return min(float(len(sound.envelope)), seconds / sound.seconds_per_frame)


def _sound_notes(record: Heatmap, shares: Sequence[float]) -> list[str]:
    """Return what a reader of a figure must know; `shares` go to the silence after the sound."""
    attention, sound = record.maps[0], record.sound
    assert sound is not None
    # A frame of self-attention is a query and a key alike.
    if attention.kind != "cross":
        return ["rows: frames of the recording (queries) · columns: the same frames (keys), their loudness above"]
    # Cross-attention: the recording is padded with silence, which gets attention too.
    after = f"{min(shares):.2f} to {max(shares):.2f}" if len(shares) > 1 else f"{shares[0]:.2f}"
    rows = "the token that is written; the query is the one before it" if sound.words else "tokens (queries)"
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
    rows = Axis(n=n_bands, ticks=tuple((high, f"{tick:g} kHz") for high, tick in zip(heights, ticks, strict=True)))
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
