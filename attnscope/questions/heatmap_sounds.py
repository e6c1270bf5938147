"""Make the figures of a speech model's attention: when each token listens, and when each word is spoken.

`heatmap_figures` chooses them for records of recordings.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from attnscope.drawing.layout import nice_ticks
from attnscope.drawing.map_figure import Axis, MapsFigure
from attnscope.drawing.style import Style, scale_meanings
from attnscope.questions.heatmap import AttentionMap, Heatmap
from attnscope.questions.heatmap_plates import (
    NamedFigure,
    Pair,
    axis_of,
    captions_of,
    model_name,
    sheets_of,
)
from attnscope.questions.places import Sound
from attnscope.report.wording import run_notes

_SINGLE_ROW_PX = 22.0
"""The height of the row of a token in a map that is alone in its figure."""

_ROW_PX = 17.0
"""The height of the row of a token in each of several maps."""

_SPECTROGRAM_PX = 190
"""The height of a spectrogram."""

_KILOHERTZ = (0.25, 0.5, 1, 2, 4, 8, 16)
"""The frequencies that have a tick beside a spectrogram."""

_SOUND_MEANING = scale_meanings(
    "attention weight: the share of a row's attention that a frame gets",
    "attention weight ÷ the largest weight of the same head on a frame with sound",
)


def sound_plates(record: Heatmap, style: Style) -> Iterator[NamedFigure]:
    """Yield an overview and a figure per layer, or one of the heads that were picked.

    Columns are frames in time. Rows are tokens in cross-attention, and the same frames in self-attention. Where words
    are timed, a figure of the words over the spectrogram, `word-times`, comes first.
    """
    attention = record.maps[0]
    sound = record.sound
    assert sound is not None
    if sound.words and sound.spectrogram is not None:
        yield _word_times(record, sound)
    is_across = attention.kind == "cross"
    queries = attention.queries
    if sound.words:
        # A query predicts the next token, by which its row is named here; the last query has no next one.
        queries = queries.take(np.arange(1, len(queries)))
    n_rows = len(queries)
    tokens = replace(axis_of(queries), boundary_cells=())
    frames = _time_axis(sound)
    # A silent recording has no loudest frame to be divided by.
    loudness = sound.envelope / (float(sound.envelope.max()) or 1.0)
    # The frame of each word. Its rows are one above its tokens, as each is named by the next token.
    boxes = []
    for word in sound.words:
        first, stop = word.tokens
        left = _frames_before(sound, word.start)
        right = _frames_before(sound, word.end)
        boxes.append((left, first - 1, right, stop - 1))
    subject = "when each token listens (cross-attention)" if is_across else "what each moment attends to"
    for sheet in sheets_of(record, attention):
        is_overview = sheet.form == "overview"
        values = [attention.of(*pair)[:n_rows] for pair in sheet.heads]
        shares_after = [share_after_sound(record, pair) for pair in sheet.heads]
        facts = [""] * len(values)
        if is_across:
            facts = [f"{share:.2f} after the sound" for share in shares_after]
        # An overview has no room to name tokens: its rows are 1 to 8 pixels high, and make a map of about 160.
        rows = replace(frames, n=n_rows)
        if not is_across:
            # Cells of frames are squares.
            row_px = 0.0
        elif is_overview:
            row_px = max(1, min(8, 160 // n_rows))
        else:
            rows = tokens
            row_px = _SINGLE_ROW_PX if sheet.form == "single" else _ROW_PX
        title = f"{model_name(record)} · {sheet.subject}: {subject}"
        figure = MapsFigure(
            **sheet.titles(attention),
            subtitle=sound.facts,
            notes=(*_sound_notes(attention, sound, shares_after), *run_notes(record.run)),
            axes=((rows, frames),),
            meaning=_SOUND_MEANING[style.scale],
            cmap=style.cmap,
            captions=captions_of(values, facts),
            font_texts=(title,),
            row_px=row_px,
            columns=0 if is_overview else min(2, len(sheet.heads)),
            bars=tuple(loudness.tolist()),
            framed_boxes=() if is_overview else tuple(boxes),
        )
        yield NamedFigure(sheet.stem, title, figure, values)


def share_after_sound(record: Heatmap, pair: Pair) -> float:
    """Return the share of a head's attention, averaged over tokens, that goes to the silence after the sound."""
    # The map has frames with sound alone, so the rest of each row went to the silence: (query,).
    on_sound = record.maps[0].of(*pair).astype(np.float64).sum(-1)
    return float(np.clip(1 - on_sound, 0, 1).mean())


def _time_axis(sound: Sound) -> Axis:
    """Return the side of a map that is time: a cell per frame, ticks in seconds."""
    n_frames = len(sound.envelope)
    frames_seconds = n_frames * sound.seconds_per_frame
    ticks = []
    for tick in nice_ticks(sound.seconds):
        ticks.append((min(1.0, tick / frames_seconds), f"{tick:g} s"))
    return Axis(n=n_frames, ticks=tuple(ticks))


def _frames_before(sound: Sound, seconds: float) -> float:
    """Return how many frames, and which fraction of one, lie before a time."""
    return min(float(len(sound.envelope)), seconds / sound.seconds_per_frame)


def _sound_notes(attention: AttentionMap, sound: Sound, shares_after: Sequence[float]) -> list[str]:
    """Return what a reader of a figure must know; `shares_after` are those of `share_after_sound`, by head."""
    if attention.kind != "cross":
        return [
            "rows: frames of the recording (queries) · columns: the same frames (keys), their loudness above"
        ]
    # The recording is padded with silence, which gets cross-attention too.
    after = f"{min(shares_after):.2f}"
    if len(shares_after) > 1:
        after += f" to {max(shares_after):.2f}"
    rows = "tokens (queries)"
    if sound.words:
        rows = "the token that is written; the query is the one before it"
    notes = [
        f"rows: {rows} · columns: frames of the recording (keys), its loudness above",
        f"only frames with sound are drawn; {after} of a head's attention goes to the silence after them",
    ]
    if sound.words:
        notes.append(
            f"framed: when each word is spoken, by dynamic time warping of {_timing_heads(sound)}"
        )
    if 0 <= attention.queries.n_given < len(attention.queries):
        notes.append("green tokens were written by the model itself")
    return notes


def _timing_heads(sound: Sound) -> str:
    """Return the names of the heads whose cross-attention gave the times of words."""
    return ", ".join(f"L{layer}H{head}" for layer, head in sound.followed)


def _word_times(record: Heatmap, sound: Sound) -> NamedFigure:
    """Return the words of a recording over the spectrogram that the model was given: seconds across, kilohertz up."""
    assert sound.spectrogram is not None
    # (band, step), the highest band first.
    levels = sound.spectrogram.levels[::-1].astype(np.float32) / 255
    n_bands, n_steps = levels.shape
    # A tick stands in the middle of the band of its frequency. Bands are even in mel, not in hertz.
    hertz = np.array(sound.spectrogram.hertz)
    ticks = []
    for kilohertz in _KILOHERTZ:
        if hertz[0] <= 1000 * kilohertz <= hertz[-1]:
            band = float(np.interp(1000 * kilohertz, hertz, np.arange(n_bands)))
            ticks.append((1 - (band + 0.5) / n_bands, f"{kilohertz:g} kHz"))
    # The name and the frame of each word, in steps of the spectrogram, of which a frame has several.
    steps_per_frame = n_steps / len(sound.envelope)
    spans = []
    boxes = []
    for word in sound.words:
        left = _frames_before(sound, word.start) * steps_per_frame
        right = _frames_before(sound, word.end) * steps_per_frame
        spans.append((left, right, word.text))
        boxes.append((left, 0, right, n_bands))
    title = f"{model_name(record)} · when each word is spoken"
    figure = MapsFigure(
        titles=("log-mel spectrogram",),
        subtitle=sound.facts,
        notes=(f"words: from dynamic time warping of the cross-attention of {_timing_heads(sound)}",),
        axes=((Axis(n=n_bands, ticks=tuple(ticks)), replace(_time_axis(sound), n=n_steps)),),
        meaning=f"loudness: from {sound.spectrogram.decibels:.0f} dB below the loudest (0) to the loudest (1)",
        cmap="Greys",
        font_texts=(title,),
        row_px=_SPECTROGRAM_PX / n_bands,
        spans=tuple(spans),
        framed_boxes=tuple(boxes),
    )
    return NamedFigure("word-times", title, figure, [levels], top=1.0)
