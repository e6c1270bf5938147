"""Make the figures of a speech model's attention: when each token listens, and when each word is spoken.

The keys of these maps are frames: steps in time of the encoder's output. In cross-attention queries are the tokens of
the transcript. A speech model pads a recording with silence; maps hold only the frames of the recording itself.
`heatmap_figures` calls this module for records of recordings.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from attnscope.drawing.layout import nice_ticks
from attnscope.drawing.map_figure import Axis, MapsFigure
from attnscope.drawing.style import Style, scale_meanings
from attnscope.questions.heatmap import AttentionMap, Heatmap
from attnscope.questions.heatmap_plates import (
    LayerHead,
    NamedFigure,
    make_axis,
    make_captions,
    name_model,
    plan_figures,
)
from attnscope.questions.places import Sound
from attnscope.report.wording import run_notes

_SINGLE_MAP_ROW_PX = 22.0
"""The height of a token's row, if the figure has one map."""

_ROW_PX = 17.0
"""The height of a token's row, if the figure has several maps."""

_SPECTROGRAM_PX = 190
"""The height of a spectrogram."""

_TICKS_KHZ = (0.25, 0.5, 1, 2, 4, 8, 16)
"""The frequencies, in kilohertz, that have a tick beside a spectrogram."""

_SOUND_MEANING = scale_meanings(
    "attention weight: the share of a row's attention that a frame gets",
    "attention weight ÷ the largest weight of the same head on a frame with sound",
)


def yield_sound_figures(record: Heatmap, style: Style) -> Iterator[NamedFigure]:
    """Yield an overview and a figure per layer, or one figure of picked heads.

    Columns are frames. Rows are tokens in cross-attention, and the same frames in self-attention. If it is known when
    words are spoken, a figure of the words over the spectrogram, `word-times`, comes first.
    """
    attention = record.maps[0]
    sound = record.sound
    assert sound is not None
    if sound.words and sound.spectrogram is not None:
        yield _make_word_times_figure(record, sound)
    is_cross = attention.kind == "cross"
    queries = attention.queries
    if sound.words:
        # Name each row by the token that its query predicts, the next one. The last query predicts none: it has no row.
        queries = queries.take(np.arange(1, len(queries)))
    n_rows = len(queries)
    token_axis = replace(make_axis(queries), boundary_cells=())
    time_axis = _make_time_axis(sound)
    # Loudness of each frame ÷ the loudest, (frame,). A silent recording is divided by 1.
    loudness = sound.envelope / (float(sound.envelope.max()) or 1.0)
    # A box around the rows and the time of each word. Row i has the name of token i + 1, so a token has the row above
    # its index.
    framed_boxes = []
    for word in sound.words:
        first_token, stop_token = word.tokens
        left = _count_frames_before(sound, word.start)
        right = _count_frames_before(sound, word.end)
        framed_boxes.append((left, first_token - 1, right, stop_token - 1))
    question_phrase = (
        "when each token listens (cross-attention)" if is_cross else "what each moment attends to"
    )
    for figure_spec in plan_figures(record, attention):
        is_overview = figure_spec.form == "overview"
        maps = [attention.of(*layer_head)[:n_rows] for layer_head in figure_spec.heads]
        silence_shares = [
            compute_share_after_sound(record, layer_head) for layer_head in figure_spec.heads
        ]
        map_facts = [""] * len(maps)
        if is_cross:
            map_facts = [f"{share:.2f} after the sound" for share in silence_shares]
        # Rows of an overview are 1 to 8 pixels high, so that a map has about 160. They are too low for labels.
        row_axis = replace(time_axis, n=n_rows)
        if not is_cross:
            # 0 = cells are squares.
            row_px = 0.0
        elif is_overview:
            row_px = max(1, min(8, 160 // n_rows))
        else:
            row_axis = token_axis
            row_px = _SINGLE_MAP_ROW_PX if figure_spec.form == "single" else _ROW_PX
        title = f"{name_model(record)} · {figure_spec.subject}: {question_phrase}"
        figure = MapsFigure(
            **figure_spec.titles(attention),
            subtitle=sound.facts,
            notes=(*_make_sound_notes(attention, sound, silence_shares), *run_notes(record.run)),
            axes=((row_axis, time_axis),),
            meaning=_SOUND_MEANING[style.scale],
            cmap=style.cmap,
            captions=make_captions(maps, map_facts),
            font_texts=(title,),
            row_px=row_px,
            columns=0 if is_overview else min(2, len(figure_spec.heads)),
            bars=tuple(loudness.tolist()),
            framed_boxes=() if is_overview else tuple(framed_boxes),
        )
        yield NamedFigure(figure_spec.stem, title, figure, maps)


def compute_share_after_sound(record: Heatmap, layer_head: LayerHead) -> float:
    """Return the share of a head's attention that goes to the silence after the sound: the mean over tokens."""
    # The map lacks the frames of the silence, so each row sums to 1 minus the weight on the silence, (query,).
    on_sound = record.maps[0].of(*layer_head).astype(np.float64).sum(-1)
    return float(np.clip(1 - on_sound, 0, 1).mean())


def _make_time_axis(sound: Sound) -> Axis:
    """Return the side of a map that is time: a cell per frame, and ticks in seconds."""
    n_frames = len(sound.envelope)
    axis_seconds = n_frames * sound.seconds_per_frame
    ticks = []
    for tick in nice_ticks(sound.seconds):
        ticks.append((min(1.0, tick / axis_seconds), f"{tick:g} s"))
    return Axis(n=n_frames, ticks=tuple(ticks))


def _count_frames_before(sound: Sound, seconds: float) -> float:
    """Return how many frames lie before a time, as a fraction; at most all frames."""
    return min(float(len(sound.envelope)), seconds / sound.seconds_per_frame)


def _make_sound_notes(
    attention: AttentionMap, sound: Sound, silence_shares: Sequence[float]
) -> list[str]:
    """Return the notes at the foot of a figure; `silence_shares` are of `compute_share_after_sound`, one per head."""
    if attention.kind != "cross":
        return [
            "rows: frames of the recording (queries) · columns: the same frames (keys), their loudness above"
        ]
    # Cross-attention to the padding, which the figure does not show.
    silence_phrase = f"{min(silence_shares):.2f}"
    if len(silence_shares) > 1:
        silence_phrase += f" to {max(silence_shares):.2f}"
    rows_phrase = "tokens (queries)"
    if sound.words:
        rows_phrase = "the token that is written; the query is the one before it"
    notes = [
        f"rows: {rows_phrase} · columns: frames of the recording (keys), its loudness above",
        f"only frames with sound are drawn; {silence_phrase} of a head's attention goes to the silence after them",
    ]
    if sound.words:
        notes.append(
            f"framed: when each word is spoken, by dynamic time warping of {_name_timing_heads(sound)}"
        )
    # `n_given` counts the tokens of the prompt, before the generated ones; -1 = nothing was generated.
    if 0 <= attention.queries.n_given < len(attention.queries):
        notes.append("green tokens were written by the model itself")
    return notes


def _name_timing_heads(sound: Sound) -> str:
    """Return the names of the heads whose cross-attention tells when words are spoken (see `Sound.followed`)."""
    return ", ".join(f"L{layer}H{head}" for layer, head in sound.followed)


def _make_word_times_figure(record: Heatmap, sound: Sound) -> NamedFigure:
    """Return the figure of words over the spectrogram that the model was given: seconds across, kilohertz up."""
    assert sound.spectrogram is not None
    # (band, step), the highest band first; from levels 0 to 255 to 0 to 1.
    levels = sound.spectrogram.levels[::-1].astype(np.float32) / 255
    n_bands, n_steps = levels.shape
    # A tick is at the middle of its band. Bands have equal widths in mel, not in hertz, so interpolate between their
    # centre frequencies. Position 0 is the top of the map.
    band_hertz = np.array(sound.spectrogram.hertz)
    ticks = []
    for kilohertz in _TICKS_KHZ:
        if band_hertz[0] <= 1000 * kilohertz <= band_hertz[-1]:
            band = float(np.interp(1000 * kilohertz, band_hertz, np.arange(n_bands)))
            ticks.append((1 - (band + 0.5) / n_bands, f"{kilohertz:g} kHz"))
    # The name of each word and a box around its time, in steps of the spectrogram. The encoder merges several steps
    # into one frame of the maps.
    steps_per_frame = n_steps / len(sound.envelope)
    spans = []
    framed_boxes = []
    for word in sound.words:
        left = _count_frames_before(sound, word.start) * steps_per_frame
        right = _count_frames_before(sound, word.end) * steps_per_frame
        spans.append((left, right, word.text))
        framed_boxes.append((left, 0, right, n_bands))
    title = f"{name_model(record)} · when each word is spoken"
    figure = MapsFigure(
        titles=("log-mel spectrogram",),
        subtitle=sound.facts,
        notes=(
            f"words: from dynamic time warping of the cross-attention of {_name_timing_heads(sound)}",
        ),
        axes=((Axis(n=n_bands, ticks=tuple(ticks)), replace(_make_time_axis(sound), n=n_steps)),),
        meaning=f"loudness: from {sound.spectrogram.decibels:.0f} dB below the loudest (0) to the loudest (1)",
        cmap="Greys",
        font_texts=(title,),
        row_px=_SPECTROGRAM_PX / n_bands,
        spans=tuple(spans),
        framed_boxes=tuple(framed_boxes),
    )
    return NamedFigure("word-times", title, figure, [levels], max_value=1.0)
