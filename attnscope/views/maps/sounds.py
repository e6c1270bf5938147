"""What a speech model listens to as it writes each token: token by time, with seconds on the axis.

And when each word is spoken, over the spectrogram that the model was given: seconds across, kilohertz up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK, Box, colormap
from attnscope.drawing.lettering import Lettering, lettering_for
from attnscope.drawing.page import Page
from attnscope.drawing.style import Style, meanings
from attnscope.errors import UsageError, amount
from attnscope.questions.heatmap import Heatmap
from attnscope.questions.places import Sound, Spectrogram
from attnscope.report.wording import run_notes
from attnscope.views.maps.figures import label_color
from attnscope.views.maps.pooling import fit
from attnscope.views.maps.sheets import Sheet, sheets_of_heads

_TIMES = "word-times"
_WAVE, _WORD, _WORD_FILL = "#7b8794", "#c2410c", "#fde8d7"
_WAVE_PX, _AXIS_PX, _NAMES_PX = 44, 34, 52
_SMALL_PX = layout.CAPTION_PX * 0.9
_MOST_LETTERS = 24
_MEANING = meanings(
    "attention weight: the share of a token's attention that a frame gets",
    "attention weight ÷ the largest weight of the same head on a frame with sound",
)


def sheets_of(record: Heatmap, query: str | None = None) -> list[Sheet]:
    """List an overview and a figure per layer, or one of the heads that were picked.

    Before these, where words are timed, `word-times`: the words over the spectrogram.
    """
    if query is not None:
        raise UsageError("over time every token has its row: there is no --query", "leave it out")
    sheets = sheets_of_heads(record.chosen(record.maps[0]), picked=record.picked is not None)
    if record.sound is not None and record.sound.words and record.sound.spectrogram is not None:
        sheets.insert(0, Sheet(_TIMES, "overview", record.sound.followed, title="when each word is spoken"))
    return sheets


def share_after_sound(record: Heatmap, pair: tuple[int, int]) -> float:
    """Return the share of a head's attention, averaged over tokens, that goes to the silence after the sound."""
    rows = record.maps[0].of(*pair).astype(np.float64).sum(-1)
    return float(np.clip(1 - rows, 0, 1).mean())


def pages(record: Heatmap, style: Style | None = None, query: str | None = None) -> Iterator[tuple[str, Page]]:
    """Draw the figures one after the other, each with its file name without the ending."""
    style = style or Style("head")
    for sheet in sheets_of(record, query):
        page = SpectrogramPage(record, style) if sheet.stem == _TIMES else SoundPage(record, sheet, style)
        yield sheet.stem, page


class SoundPage(Page):
    """The recording's loudness, and below it token by time of each head, or time by time."""

    def __init__(self, record: Heatmap, sheet: Sheet, style: Style) -> None:
        assert record.sound is not None
        self.record, self.sheet, self.sound = record, sheet, record.sound
        self.is_small = sheet.form == "overview"
        self.queries = record.maps[0].queries
        self.is_over_time = record.maps[0].kind != "cross"
        subject = "what each moment attends to" if self.is_over_time else "when each token listens (cross-attention)"
        title = f"{record.run.get('model', 'model')} · {sheet.subject}: {subject}"
        labels = () if self.is_over_time else self.queries.labels
        lettering = lettering_for([title, self.sound.facts, *labels, record.text], style.paper)
        self.places = layout.arrange(self._wanted(lettering), style.paper)
        super().__init__(self.places.width_px, lettering)
        self.head(title, self.sound.facts)
        # The maps.
        self.corners = self.places.corners
        panel = self.places.panel
        maps = [fit(record.maps[0].of(*pair), (panel[0], 1e9)) for pair in sheet.heads]
        if self.is_over_time:
            maps = [fit(weights, panel) for weights in maps]
        tops = [float(values.max()) for values in maps]
        limits = style.limits(tops)
        for corner, values, limit in zip(self.corners, maps, limits, strict=True):
            self.set_cells(self.image((*corner, *panel), colormap(style.cmap)), values, (0, limit))
        self.frames([(*corner, *panel) for corner in self.corners])
        # What stands around them.
        self._draw_words()
        for x, _ in self.corners[: self.places.columns]:
            self._draw_wave(x)
        self._draw_axes()
        if self.is_small:
            names = sheet.names(record.maps[0])
            self.name_panels(names, self.corners, panel, self.places.pitch_px, above_px=_WAVE_PX + 16)
        else:
            self._write_names(tops)
        end = limits[0] if style.scale == "figure" else 1.0
        ticks = {tick: f"{tick:g}" for tick in layout.nice_ticks(end)}
        bottom = self.places.bottom + (_AXIS_PX if self.is_small else 0)
        notes = [*self._notes(), *run_notes(record.run)]
        self.end_with_bar(bottom, style.cmap, self._meaning(style), notes, limits=(0.0, end), ticks=ticks)

    def _wanted(self, lettering: Lettering) -> layout.Wanted:
        """Say how panels stand; a token's row has a height of its own."""
        paper = lettering.paper
        shape = (len(self.queries), len(self.sound.envelope))
        n = len(self.sheet.heads)
        if self.is_small:
            return layout.Wanted(
                n=n,
                columns=len(self.sheet.columns),
                shape=shape,
                around=lambda cell: layout.Around(below=8),
                names_px=_NAMES_PX,
                gap_px=8,
                top_px=layout.HEADER_PX + _WAVE_PX + 22,
                row_px=0 if self.is_over_time else max(1, min(8, 160 // shape[0])),
                least_cell_px=24 / shape[1],
            )
        columns = 1 if n == 1 or paper.is_narrow else 2
        left = 52.0
        if not self.is_over_time:
            labels = [label[:_MOST_LETTERS] for label in self.queries.labels]
            left = 12 + max(lettering.width_px(label, layout.CAPTION_PX) for label in labels)
        room = layout.Around(left=math.ceil(left), above=layout.PANEL_HEADER_PX, below=_AXIS_PX)
        return layout.Wanted(
            n=n,
            columns=columns,
            shape=shape,
            around=lambda cell: room,
            top_px=layout.HEADER_PX + _WAVE_PX + 8,
            row_px=0 if self.is_over_time else (22 if columns == 1 else 17),
            largest_cell_px=1000,
            least_cell_px=0.01,
            least_width_px=layout.MIN_WIDTH_PX,
        )

    def _draw_wave(self, x: float) -> None:
        """Draw how loud the recording is, frame by frame."""
        width = self.places.panel[0]
        loud = fit(self.sound.envelope[None], (width, 1))[0]
        cell = width / len(loud)
        loud = loud / (float(loud.max()) or 1.0) * (_WAVE_PX / 2 - 6)
        middle = self.corners[0][1] - _WAVE_PX / 2 - (8 if self.is_small else layout.PANEL_HEADER_PX)
        boxes = [(x + n * cell, middle - h, cell, max(2 * h, 0.6)) for n, h in enumerate(loud.tolist())]
        self.fill(boxes, [_WAVE])

    def _draw_words(self) -> None:
        """Draw when each word is spoken, if that is known: from its row, between the two times, up to the wave."""
        if self.is_small or not self.sound.words:
            return
        width, height = self.places.panel
        per_second = width / _seconds_shown(self.sound)
        per_row = height / len(self.queries)
        for x, y in self.corners:
            for word in self.sound.words:
                left, right = x + word.start * per_second, x + word.end * per_second
                # What is listened to as a token is written stands in the row before its own.
                top, low = (y + (row - 1) * per_row for row in word.tokens)
                corners = [(left, top), (right, top), (right, low), (left, low), (left, top)]
                self.lines([corners], color=_WORD, animated=True)
        x, y = self.corners[0]
        top = y - layout.PANEL_HEADER_PX - _WAVE_PX
        last = -math.inf
        for word in self.sound.words:
            left = x + word.start * per_second
            self.lines([[(left, top - 10), (left, top + _WAVE_PX)]], color=_WORD)
            if left >= last:
                text = self.lettering.fit(word.text, _SMALL_PX, 160)
                self.write(left + 4, top - 6, text, _SMALL_PX, ha="left", color=INK)
                last = left + 8 + self.lettering.width_px(text, _SMALL_PX)

    def _draw_axes(self) -> None:
        """Draw seconds below the panels that have nothing else below them."""
        width, height = self.places.panel
        n, columns = len(self.corners), self.places.columns
        half = self.lettering.width_px("0 s", _SMALL_PX) / 2
        for number, (x, y) in enumerate(self.corners):
            if self.is_small and number + columns < n:
                continue
            # The first number of the next panel is centred on its edge, and so may reach into this one.
            is_followed = self.is_small and (number + 1) % columns and number + 1 < n
            end = self.corners[number + 1][0] - half - 6 if is_followed else math.inf
            draw_seconds(self, self.sound, (x, y + height, width), end)

    def _write_names(self, tops: Sequence[float]) -> None:
        """Write above each panel which head it is, and at its left the tokens, or seconds."""
        width, height = self.places.panel
        for pair, (x, y), top in zip(self.sheet.heads, self.corners, tops, strict=True):
            self.entitle(x, y - 12, self.record.maps[0].name_of(*pair))
            caption = f"max {top:.3g}"
            if not self.is_over_time:
                longer = f"{caption} · {share_after_sound(self.record, pair):.2f} after the sound"
                room = width - self.lettering.width_px("L00H00", layout.PANEL_TITLE_PX) * 1.2
                caption = longer if self.lettering.width_px(longer, layout.CAPTION_PX) < room else caption
            self.write(x + width, y - 12, caption, layout.CAPTION_PX, ha="right", color=FAINT)
            if self.is_over_time:
                self._write_seconds(x, y, height)
            else:
                self._write_tokens(x, y)

    def _write_seconds(self, x: float, y: float, height: float) -> None:
        per_second = height / _seconds_shown(self.sound)
        for tick in layout.nice_ticks(self.sound.seconds):
            down = y + tick * per_second
            self.lines([[(x - 5, down), (x - 1, down)]])
            self.write(x - 8, down, f"{tick:g} s", _SMALL_PX, ha="right", color=FAINT)

    def _write_tokens(self, x: float, y: float) -> None:
        """Write the token of each row; if words are timed, a row is named by the token that it writes, the next one."""
        later = 1 if self.sound.words else 0
        room = self.places.around.left - 10
        for row in range(len(self.queries) - later):
            label = self.lettering.fit(self.queries.labels[row + later][:_MOST_LETTERS], layout.CAPTION_PX, room)
            down = y + (row + 0.5) * self.places.cell[1]
            color = label_color(self.queries, row + later)
            self.write(x - 6, down, label, layout.CAPTION_PX, ha="right", va="center_baseline", color=color)

    def _meaning(self, style: Style) -> str:
        meaning = _MEANING[style.scale]
        if self.is_over_time:
            meaning = meaning.replace("a token's attention that a frame", "a frame's attention that another")
        return meaning

    def _notes(self) -> list[str]:
        shared = math.ceil(len(self.sound.envelope) / self.places.panel[0])
        if self.is_over_time:
            notes = ["rows: frames of the recording (queries) · columns: the same frames (keys), their loudness above"]
            if shared > 1:
                notes.append(f"a cell shows the largest weight of up to {shared} x {shared} frames")
            return notes
        shares = [share_after_sound(self.record, pair) for pair in self.sheet.heads]
        range_of_shares = f"{min(shares):.2f} to {max(shares):.2f}" if len(shares) > 1 else f"{shares[0]:.2f}"
        rows = "the token that is written; the query is the one before it" if self.sound.words else "tokens (queries)"
        notes = [
            f"rows: {rows} · columns: frames of the recording (keys), its loudness above",
            f"only frames with sound are drawn; {range_of_shares} of a head's attention goes to the silence after them",
        ]
        if self.sound.words:
            heads = ", ".join(f"L{layer}H{head}" for layer, head in self.sound.followed)
            notes.append(f"orange: when each word is spoken, by dynamic time warping of {heads}")
        if 0 <= self.queries.n_given < len(self.queries):
            notes.append("green tokens were written by the model itself")
        if shared > 1:
            notes.append(f"a column shows the largest weight of up to {shared} frames")
        return notes


_LANE_PX, _HEIGHT_PX, _LEFT_PX, _MOST_LANES = 22, 190, 52, 3
_KILOHERTZ = (0.25, 0.5, 1, 2, 4, 8, 16)


class SpectrogramPage(Page):
    """Words as spans of time, and below them the log-mel spectrogram with where each begins and ends."""

    def __init__(self, record: Heatmap, style: Style) -> None:
        sound = record.sound
        assert sound is not None and sound.spectrogram is not None
        self.sound = sound
        spectrogram = sound.spectrogram
        title = f"{record.run.get('model', 'model')} · when each word is spoken"
        lettering = lettering_for([title, sound.facts, *(word.text for word in sound.words)], style.paper)
        super().__init__(style.paper.width_px, lettering)
        self.head(title, sound.facts)
        left, room = layout.MARGIN_PX + _LEFT_PX, self.paper.room_px - _LEFT_PX
        self.right = float(left + room)
        self.left = float(left)
        lanes = self._lanes()
        top = layout.HEADER_PX + (max(lane for lane, *_ in lanes) + 1) * _LANE_PX + 8
        box = (left, top, room, _HEIGHT_PX)
        levels = fit(spectrogram.levels[::-1].astype(np.float32), (room, 1e9))  # the highest band first
        self.matrix(box, levels, "Greys", (0, 255))
        self.frames([box])
        self._draw_words(lanes, top)
        draw_seconds(self, sound, (left, top + _HEIGHT_PX, room))
        self._draw_kilohertz(spectrogram, top + _HEIGHT_PX)
        heads = ", ".join(f"L{layer}H{head}" for layer, head in sound.followed)
        bands = amount(len(spectrogram.hertz), "band")
        notes = [
            f"words: from dynamic time warping of the cross-attention of {heads}",
            f"below: the log-mel spectrogram that the model was given, {bands}; dark = loud, the "
            f"{spectrogram.decibels:.0f} dB below the loudest",
        ]
        self.finish(top + _HEIGHT_PX + 46, notes)

    def _x(self, seconds: float) -> float:
        share = min(1.0, seconds / _seconds_shown(self.sound))
        return self.left + (self.right - self.left) * share

    def _lanes(self) -> list[tuple[int, str, bool]]:
        """Return the lane of each word, as much of it as fits there, and whether it is written left of its beginning.

        That is so of words that begin where the recording ends: they would stand beyond the page.
        """
        ends = [0.0] * _MOST_LANES
        lanes = []
        for word in self.sound.words:
            begin = self._x(word.start)
            need = self.lettering.width_px(word.text, layout.CAPTION_PX) + 12
            is_before = begin + need > self.right + 30 and begin - need > self.left
            start = begin - need if is_before else begin
            free = [lane for lane in range(_MOST_LANES) if ends[lane] <= start]
            if free:
                ends[free[0]] = max(start + need, self._x(word.end))
                lanes.append((free[0], word.text, is_before))
            else:
                lanes.append((int(np.argmin(ends)), "", is_before))
        return lanes

    def _draw_words(self, lanes: Sequence[tuple[int, str, bool]], top: float) -> None:
        """Draw each word in its lane, over the time that it takes, with lines down through the spectrogram."""
        spans: list[Box] = []
        bottom = top + _HEIGHT_PX
        last = self._x(self.sound.words[-1].end)
        ends = [[(last, top), (last, bottom)]]
        for word, (lane, text, is_before) in zip(self.sound.words, lanes, strict=True):
            left, right = self._x(word.start), self._x(word.end)
            y = layout.HEADER_PX + lane * _LANE_PX
            spans.append((left, y, max(right - left, 1.0), _LANE_PX - 4))
            ends.append([(left, y), (left, bottom)])
            middle = y + (_LANE_PX - 4) / 2
            if is_before:
                self.write(left - 4, middle, text, layout.CAPTION_PX, ha="right", color=INK)
            else:
                text = self.lettering.fit(text, layout.CAPTION_PX, self.right + 30 - left)
                self.write(left + 4, middle, text, layout.CAPTION_PX, ha="left", color=INK)
        self.fill(spans, [_WORD_FILL] * len(spans))
        self.lines(ends, color=_WORD, width_px=0.9)

    def _draw_kilohertz(self, spectrogram: Spectrogram, bottom: float) -> None:
        """Draw kilohertz at the left; bands are spaced in mel."""
        hertz = np.array(spectrogram.hertz)
        last, unit = -math.inf, " kHz"
        for tick in reversed(_KILOHERTZ):
            if not hertz[0] <= 1000 * tick <= hertz[-1]:
                continue
            band = float(np.interp(1000 * tick, hertz, np.arange(len(hertz))))
            y = bottom - (band + 0.5) / len(hertz) * _HEIGHT_PX
            if y - last >= 18:
                self.lines([[(self.left - 5, y), (self.left - 1, y)]])
                self.write(self.left - 8, y, f"{tick:g}{unit}", _SMALL_PX, ha="right", color=FAINT)
                last, unit = y, ""


def draw_seconds(page: Page, sound: Sound, edge: tuple[float, float, float], end: float = math.inf) -> None:
    """Draw an axis of seconds below frames of sound, whose lower edge is (x, y, width); numbers stop at `end`."""
    x, y, width = edge
    ticks = layout.nice_ticks(sound.seconds)[:: 2 if width < 260 else 1]
    ticks = ticks[:: page.label_step(f"{ticks[-1]:g} s", layout.CAPTION_PX, width / len(ticks))]
    for tick in ticks:
        at = x + width * min(1.0, tick / _seconds_shown(sound))
        text = f"{tick:g} s"
        page.lines([[(at, y + 1), (at, y + 5)]])
        if at == x or at + page.lettering.width_px(text, _SMALL_PX) / 2 <= end:
            side = "right" if at > x + width - 16 else "center"
            page.write(at, y + 14, text, _SMALL_PX, ha=side, color=FAINT)


def _seconds_shown(sound: Sound) -> float:
    return len(sound.envelope) * sound.seconds_per_frame
