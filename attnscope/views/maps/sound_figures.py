"""What a speech model listens to as it writes each token: token by time, with seconds on the axis.

And when each word is spoken, over the spectrogram that the model was given: seconds across, kilohertz up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK, colormap
from attnscope.drawing.lettering import lettering_for
from attnscope.drawing.page import Page
from attnscope.drawing.style import Style, meanings
from attnscope.errors import UsageError, amount
from attnscope.records import Heatmap
from attnscope.records.maps.sounds import Sound
from attnscope.report.wording import run_notes
from attnscope.views.maps.figures import label_color
from attnscope.views.maps.pooling import fit_columns
from attnscope.views.maps.sheets import Sheet, sheets_of_heads

_TIMES = "word-times"
_WAVE, _WORD = "#7b8794", "#c2410c"
_WAVE_PX, _HEADER_PX, _PANEL_TITLE_PX, _AXIS_PX, _GAP_PX, _NAMES_PX = 44, 92, 26, 34, 26, 52
_MEANING = meanings(
    "attention weight: the share of a token's attention that a frame gets",
    "attention weight ÷ the largest weight of the same head on a frame with sound",
)


def sheets_of(record: Heatmap, query: str | None = None) -> list[Sheet]:
    """The figures that a record is drawn as: an overview and a figure a layer, or one of the heads that were picked.

    Before these, where words are timed, `word-times`: the words over the spectrogram.
    """
    if query is not None:
        raise UsageError("over time every token has its row: there is no --query", "leave it out")
    sheets = sheets_of_heads(record.chosen(record.maps[0]), picked=record.picked is not None)
    if record.sound is not None and record.sound.words and record.sound.spectrogram is not None:
        sheets.insert(0, Sheet(_TIMES, "overview", record.sound.followed, title="when each word is spoken"))
    return sheets


def share_after_sound(record: Heatmap, pair: tuple[int, int]) -> float:
    """The share of a head's attention, averaged over tokens, that goes to the silence after the sound."""
    rows = record.maps[0].of(*pair).astype(np.float64).sum(-1)
    return float(np.clip(1 - rows, 0, 1).mean())


def pages(record: Heatmap, style: Style | None = None, query: str | None = None) -> Iterator[tuple[str, Page]]:
    """The figures one after the other, each with its file name without the ending."""
    style = style or Style("head")
    return (
        (sheet.stem, SpectrogramPage(record, style) if sheet.stem == _TIMES else SoundPage(record, sheet, style))
        for sheet in sheets_of(record, query)
    )


class SoundPage(Page):
    """A figure: the recording's loudness, and below it token by time of each head; everything on one Axes."""

    def __init__(self, record: Heatmap, sheet: Sheet, style: Style) -> None:
        assert record.sound is not None
        self.record, self.sheet, self.style, self.sound = record, sheet, style, record.sound
        self.shown_s = _seconds_shown(self.sound)
        self.small = sheet.form == "overview"
        self.queries = record.maps[0].queries
        self.over_time = record.maps[0].kind != "cross"
        title = f"{record.run.get('model', 'model')} · {_title(sheet, self.over_time)}"
        names = () if self.over_time else self.queries.labels
        lettering = lettering_for([title, self.sound.facts, *names, record.text], style.paper)
        self.columns, left, room, self.row_px = self._sizes(lettering.width_px)
        paper = style.paper
        self.left_px = left - 8 if paper.fixed else 400
        maps = [fit_columns(record.maps[0].of(*pair), room) for pair in sheet.heads]
        if self.over_time:
            maps = [np.ascontiguousarray(fit_columns(np.ascontiguousarray(weights.T), room).T) for weights in maps]
        n_rows, self.n_columns = maps[0].shape
        cell = paper.whole(room / self.n_columns)
        self.step = -(-len(self.sound.envelope) // room)
        self.panel = (self.n_columns * cell, n_rows * (cell if self.over_time else self.row_px))
        upper = _HEADER_PX + _WAVE_PX + (14 if self.small else _PANEL_TITLE_PX)
        across = left + self.panel[0] + (8 if self.small else _GAP_PX)
        down = self.panel[1] + (8 if self.small else _PANEL_TITLE_PX + _AXIS_PX)
        beside = _NAMES_PX if self.small else 0
        width = paper.width_for(layout.MIN_WIDTH_PX, 2 * layout.MARGIN_PX + beside + self.columns * across)
        super().__init__(width, lettering)
        self.head(title, self.sound.facts)
        start = layout.MARGIN_PX + left + beside
        self.corners = layout.tile(len(sheet.heads), self.columns, (start, upper), (across, down))
        tops = [float(values.max()) for values in maps]
        limits = style.limits(tops)
        for (x, y), values, limit in zip(self.corners, maps, limits, strict=True):
            self.set_cells(self.image((x, y, *self.panel), colormap(style.cmap)), values, (0, limit))
        self.frames([(x, y, *self.panel) for x, y in self.corners])
        self._draw_words()
        for x, _ in self.corners[: self.columns]:
            self._draw_wave(x)
        self._draw_axes()
        if self.small:
            self.name_panels(sheet.names, self.corners, self.panel, self.panel[0] + 8, above_px=_WAVE_PX + 16)
        else:
            self._write_names(tops)
        below = upper + math.ceil(len(sheet.heads) / self.columns) * down + (_AXIS_PX if self.small else 0)
        bar = (layout.MARGIN_PX + (8 if paper.fixed else 0), below + 14, min(420, paper.room_px - 20), 14)
        meaning = self._meaning()
        top = limits[0] if style.scale == "figure" else 1.0
        fits = self.draw_scale(bar, style.cmap, (0.0, top), meaning=meaning)
        self.finish(below + 62, [*[meaning] * (not fits), *self._notes()])

    def _sizes(self, width_of: layout.WidthPx) -> tuple[int, int, int, int]:
        """Panels side by side, pixels for names at the left of each, for time, and of a token's row."""
        paper, room = self.style.paper, self.style.paper.room_px
        if self.small:
            columns, least = len(self.sheet.columns), 2 if paper.fixed else 24
            return columns, 0, max(least, (room - 52) // columns - 8), max(1, min(8, 160 // len(self.queries)))
        columns = 1 if len(self.sheet.heads) == 1 or paper.is_narrow else 2
        if self.over_time:
            return columns, 52, room // columns - 52 - _GAP_PX, 1
        labels = max(width_of(label[:24], layout.CAPTION_PX) for label in self.queries.labels)
        left = math.ceil(labels) + 12
        left = min(left, room // columns // 3) if paper.fixed else left
        return columns, left, room // columns - left - _GAP_PX, 22 if columns == 1 else 17

    def _draw_wave(self, x: float) -> None:
        """Draws how loud the recording is, frame by frame."""
        loud = fit_columns(self.sound.envelope[None], self.n_columns)[0]
        cell = self.panel[0] / len(loud)
        loud = loud / (float(loud.max()) or 1.0) * (_WAVE_PX / 2 - 6)
        middle = _HEADER_PX + _WAVE_PX / 2 + (6 if self.small else -8)
        boxes = [(x + n * cell, middle - h, cell, max(2 * h, 0.6)) for n, h in enumerate(loud.tolist())]
        self.fill(boxes, [_WAVE])

    def _draw_words(self) -> None:
        """Draws when each word is spoken, if that is known: from its row, between the two times, up to the wave."""
        if self.small or not self.sound.words:
            return
        width, height = self.panel
        for x, y in self.corners:
            for word in self.sound.words:
                left, right = (x + width * at / self.shown_s for at in (word.start, word.end))
                # What is listened to as a token is written stands in the row before its own.
                top, low = (y + height * (row - 1) / len(self.queries) for row in word.tokens)
                corners = [(left, top), (right, top), (right, low), (left, low), (left, top)]
                self.lines([corners], color=_WORD, animated=True)
        x, _ = self.corners[0]
        size, last = layout.CAPTION_PX * 0.9, -math.inf
        for word in self.sound.words:
            at = x + width * word.start / self.shown_s
            self.lines([[(at, _HEADER_PX - 18), (at, _HEADER_PX - 8 + _WAVE_PX)]], color=_WORD)
            text = self.lettering.fit(word.text, size, 160)
            if at >= last:
                self.write(at + 4, _HEADER_PX - 14, text, size, ha="left", color=INK)
                last = at + 8 + self.lettering.width_px(text, size)

    def _draw_axes(self) -> None:
        """Draws seconds below the panels that have nothing else below them."""
        (width, height), n = self.panel, len(self.corners)
        for number, (x, y) in enumerate(self.corners):
            if self.small and number + self.columns < n:
                continue
            # The first number of the next panel is centred on its edge, and so may reach into this one.
            beside = self.small and (number + 1) % self.columns and number + 1 < n
            half = self.lettering.width_px("0 s", layout.CAPTION_PX * 0.9) / 2
            end = self.corners[number + 1][0] - half - 6 if beside else math.inf
            draw_seconds(self, self.sound, (x, y + height, width), end)

    def _write_names(self, tops: Sequence[float]) -> None:
        width, height = self.panel
        for pair, (x, y), top in zip(self.sheet.heads, self.corners, tops, strict=True):
            self.entitle(x, y - 12, f"L{pair[0]}H{pair[1]}")
            caption = f"max {top:.3g}"
            if not self.over_time:
                longer = f"{caption} · {share_after_sound(self.record, pair):.2f} after the sound"
                room = width - self.lettering.width_px("L00H00", layout.PANEL_TITLE_PX) * 1.2
                caption = longer if self.lettering.width_px(longer, layout.CAPTION_PX) < room else caption
            self.write(x + width, y - 12, caption, layout.CAPTION_PX, ha="right", color=FAINT)
            if self.over_time:
                ticks = {tick: y + height * tick / self.shown_s for tick in layout.nice_ticks(self.sound.seconds)}
                self.lines([[(x - 5, at), (x - 1, at)] for at in ticks.values()])
                for tick, at in ticks.items():
                    self.write(x - 8, at, f"{tick:g} s", layout.CAPTION_PX * 0.9, ha="right", color=FAINT)
                continue
            later = int(bool(self.sound.words))  # timed: a row is named by the token that it writes, the next one
            for row in range(len(self.queries) - later):
                label = self.lettering.fit(self.queries.labels[row + later][:24], layout.CAPTION_PX, self.left_px)
                at = y + (row + 0.5) * self.row_px
                color = label_color(self.queries, row + later)
                self.write(x - 6, at, label, layout.CAPTION_PX, ha="right", va="center_baseline", color=color)

    def _meaning(self) -> str:
        meaning = _MEANING[self.style.scale]
        if self.over_time:
            meaning = meaning.replace("a token's attention that a frame", "a frame's attention that another")
        return meaning

    def _notes(self) -> list[str]:
        if self.over_time:
            notes = ["rows: frames of the recording (queries) · columns: the same frames (keys), their loudness above"]
            if self.step > 1:
                notes.append(f"a cell shows the largest weight of up to {self.step} x {self.step} frames")
            return notes + run_notes(self.record.run)
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
        if self.step > 1:
            notes.append(f"a column shows the largest weight of up to {self.step} frames")
        return notes + run_notes(self.record.run)


def _title(sheet: Sheet, over_time: bool) -> str:
    return f"{sheet.subject}: " + (
        "what each moment attends to" if over_time else "when each token listens (cross-attention)"
    )


_WORD_FILL = "#fde8d7"
_TOP_PX, _LANE_PX, _HEIGHT_PX, _LEFT_PX, _MOST_LANES = 84, 22, 190, 52, 3
_KILOHERTZ = (0.25, 0.5, 1, 2, 4, 8, 16)


class SpectrogramPage(Page):
    """A figure: words as spans of time, and below them the log-mel spectrogram with where each begins and ends."""

    def __init__(self, record: Heatmap, style: Style) -> None:
        sound = record.sound
        assert sound is not None and sound.spectrogram is not None
        self.sound, self.spectrogram = sound, sound.spectrogram
        title = f"{record.run.get('model', 'model')} · when each word is spoken"
        lettering = lettering_for([title, sound.facts, *(word.text for word in sound.words)], style.paper)
        room = style.paper.room_px - _LEFT_PX
        self.shown_s = _seconds_shown(sound)
        width = style.paper.width_for(layout.MIN_WIDTH_PX, 2 * layout.MARGIN_PX + _LEFT_PX + room)
        heads = ", ".join(f"L{layer}H{head}" for layer, head in sound.followed)
        notes = [
            f"words: from dynamic time warping of the cross-attention of {heads}",
            f"below: the log-mel spectrogram that the model was given, "
            f"{amount(len(self.spectrogram.hertz), 'band')}; dark = "
            f"loud, the {self.spectrogram.decibels:.0f} dB below the loudest",
        ]
        self.size_px = layout.CAPTION_PX
        self.at_px, self.room_px = layout.MARGIN_PX + _LEFT_PX, float(room)
        lanes = self._lanes(lettering.width_px)
        n_lanes = max(lane for lane, *_ in lanes) + 1
        top = _TOP_PX + n_lanes * _LANE_PX + 8
        super().__init__(width, lettering)
        self.head(title, sound.facts)
        levels = fit_columns(self.spectrogram.levels[::-1].astype(np.float32), max(1, room))  # the highest band first
        self.matrix((self.at_px, top, room, _HEIGHT_PX), levels, "Greys", (0, 255))
        self.frames([(self.at_px, top, room, _HEIGHT_PX)])
        self._words(lanes, top)
        self._axes(top)
        self.finish(top + _HEIGHT_PX + 46, notes)

    def _x(self, seconds: float) -> float:
        return self.at_px + self.room_px * min(1.0, seconds / self.shown_s)

    def _lanes(self, width_of: layout.WidthPx) -> list[tuple[int, str, bool]]:
        """The lane of each word, as much of it as fits there, and whether it is written left of where it begins.

        That is so of words that begin where the recording ends: they would stand beyond the page.
        """
        ends, lanes = [0.0] * _MOST_LANES, []
        for word in self.sound.words:
            begin, need = self._x(word.start), width_of(word.text, self.size_px) + 12
            before = begin + need > self.at_px + self.room_px + 30 and begin - need > self.at_px
            start = begin - need if before else begin
            lane = next((lane for lane in range(_MOST_LANES) if ends[lane] <= start), int(np.argmin(ends)))
            fits = ends[lane] <= start
            if fits:
                ends[lane] = max(start + need, self._x(word.end))
            lanes.append((lane, word.text if fits else "", before))
        return lanes

    def _words(self, lanes: list[tuple[int, str, bool]], top: float) -> None:
        """Draws each word in its lane, over the time that it takes, with lines down through the spectrogram."""
        spans, ends = [], []
        for word, (lane, *_) in zip(self.sound.words, lanes, strict=True):
            left, right = self._x(word.start), self._x(word.end)
            y = _TOP_PX + lane * _LANE_PX
            spans.append((left, y, max(right - left, 1.0), _LANE_PX - 4))
            ends += [[(left, y), (left, top + _HEIGHT_PX)]]
        ends.append([(self._x(self.sound.words[-1].end), top), (self._x(self.sound.words[-1].end), top + _HEIGHT_PX)])
        self.fill(spans, [_WORD_FILL] * len(spans))
        self.lines(ends, color=_WORD, width_px=0.9)
        for word, (lane, text, before) in zip(self.sound.words, lanes, strict=True):
            middle = _TOP_PX + lane * _LANE_PX + (_LANE_PX - 4) / 2
            at = self._x(word.start)
            if not before:
                text = self.lettering.fit(text, self.size_px, self.at_px + self.room_px + 30 - at)
            at, side = (at - 4, "right") if before else (at + 4, "left")
            self.write(at, middle, text, self.size_px, ha=side, color=INK)

    def _axes(self, top: float) -> None:
        """Draws seconds below, and kilohertz at the left; bands are spaced in mel."""
        bottom, small = top + _HEIGHT_PX, layout.CAPTION_PX * 0.9
        draw_seconds(self, self.sound, (self.at_px, bottom, self.room_px))
        hertz = np.array(self.spectrogram.hertz)
        n, last, unit = len(hertz), -np.inf, " kHz"
        for tick in reversed(_KILOHERTZ):
            if hertz[0] <= 1000 * tick <= hertz[-1]:
                band = float(np.interp(1000 * tick, hertz, np.arange(n)))
                y = bottom - (band + 0.5) / n * _HEIGHT_PX
                if y - last >= 18:
                    self.lines([[(self.at_px - 5, y), (self.at_px - 1, y)]])
                    self.write(self.at_px - 8, y, f"{tick:g}{unit}", small, ha="right", color=FAINT)
                    last, unit = y, ""


def draw_seconds(page: Page, sound: Sound, edge: tuple[float, float, float], end: float = math.inf) -> None:
    """Draws an axis of seconds below frames of sound, whose lower edge is (x, y, width); numbers stop at `end`."""
    (x, y, width), size = edge, layout.CAPTION_PX * 0.9
    ticks = layout.nice_ticks(sound.seconds)[:: 2 if width < 260 else 1]
    ticks = ticks[:: page.label_step(f"{ticks[-1]:g} s", layout.CAPTION_PX, width / len(ticks))]
    at = {f"{tick:g} s": x + width * min(1.0, tick / _seconds_shown(sound)) for tick in ticks}
    page.lines([[(tick, y + 1), (tick, y + 5)] for tick in at.values()])
    for text, tick in at.items():
        if tick == x or tick + page.lettering.width_px(text, size) / 2 <= end:
            page.write(tick, y + 14, text, size, ha="right" if tick > x + width - 16 else "center", color=FAINT)


def _seconds_shown(sound: Sound) -> float:
    return len(sound.envelope) * sound.seconds_per_frame
