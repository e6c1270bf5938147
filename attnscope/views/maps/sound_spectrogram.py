"""When each word is spoken, over the spectrogram that a speech model was given: seconds across, kilohertz up."""

from __future__ import annotations

import math

import numpy as np

from attnscope.errors import amount
from attnscope.records import Heatmap
from attnscope.records.maps.sounds import Sound
from attnscope.views.drawing import layout
from attnscope.views.drawing.canvas import FAINT, INK
from attnscope.views.drawing.lettering import lettering_for
from attnscope.views.drawing.page import Page
from attnscope.views.drawing.style import Style
from attnscope.views.maps.pooling import fit_columns

_WORD, _WORD_FILL = "#c2410c", "#fde8d7"
_TOP_PX, _LANE_PX, _HEIGHT_PX, _LEFT_PX, _MOST_LANES = 84, 22, 190, 52, 3
_KILOHERTZ = (0.25, 0.5, 1, 2, 4, 8, 16)


class SpectrogramPage(Page):
    """A figure: words as spans of time, and below them the log-mel spectrogram with where each begins and ends."""

    def __init__(self, record: Heatmap, style: Style) -> None:
        sound = record.sound
        assert sound is not None and sound.spectrogram is not None
        self.sound, self.seen = sound, sound.spectrogram
        title = f"{record.run.get('model', 'model')} · when each word is spoken"
        lettering = lettering_for([title, sound.facts, *(word.text for word in sound.words)], style.paper)
        room = style.paper.room_px - _LEFT_PX
        self.shown = len(sound.envelope) * sound.seconds_per_frame
        width = style.paper.width_for(layout.MIN_WIDTH_PX, 2 * layout.MARGIN_PX + _LEFT_PX + room)
        heads = ", ".join(f"L{layer}H{head}" for layer, head in sound.followed)
        notes = [
            f"words: from dynamic time warping of the cross-attention of {heads}",
            f"below: the log-mel spectrogram that the model was given, {amount(len(self.seen.hertz), 'band')}; dark = "
            f"loud, the {self.seen.decibels:.0f} dB below the loudest",
        ]
        self.size_px = layout.CAPTION_PX
        self.at_px, self.room_px = layout.MARGIN_PX + _LEFT_PX, float(room)
        lanes = self._lanes(lettering.width_px)
        n_lanes = max(lane for lane, *_ in lanes) + 1
        top = _TOP_PX + n_lanes * _LANE_PX + 8
        super().__init__(width, lettering)
        self.head(title, sound.facts)
        levels = fit_columns(self.seen.levels[::-1].astype(np.float32), max(1, room))  # the highest band first
        self.matrix((self.at_px, top, room, _HEIGHT_PX), levels, "Greys", (0, 255))
        self.frames([(self.at_px, top, room, _HEIGHT_PX)])
        self._words(lanes, top)
        self._axes(top)
        self.finish(top + _HEIGHT_PX + 46, notes)

    def _x(self, seconds: float) -> float:
        return self.at_px + self.room_px * min(1.0, seconds / self.shown)

    def _lanes(self, width_of: layout.WidthPx) -> list[tuple[int, str, bool]]:
        """For each word its lane, as much of it as fits there, and whether it is written left of where it begins.

        So are words that begin where the recording ends, which would stand beyond the page.
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
        """Each word in its lane, over the time that it takes, with lines down through the spectrogram."""
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
            shown = text if before else self.lettering.fit(text, self.size_px, self.at_px + self.room_px + 30 - at)
            self.write(
                at + (-4 if before else 4), middle, shown, self.size_px, ha="right" if before else "left", color=INK
            )

    def _axes(self, top: float) -> None:
        """Seconds below, kilohertz at the left: bands are spaced in mel."""
        bottom, small = top + _HEIGHT_PX, layout.CAPTION_PX * 0.9
        draw_seconds(self, self.sound, (self.at_px, bottom, self.room_px))
        hertz = np.array(self.seen.hertz)
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
    """An axis of seconds below frames of sound.

    Args:
        page: Where to.
        sound: The recording.
        edge: Left end of the frames' lower edge, x and y, and its width.
        end: Where numbers must end.
    """
    (x, y, width), size = edge, layout.CAPTION_PX * 0.9
    shown_s = len(sound.envelope) * sound.seconds_per_frame
    ticks = layout.nice_ticks(sound.seconds)[:: 2 if width < 260 else 1]
    ticks = ticks[:: page.label_step(f"{ticks[-1]:g} s", layout.CAPTION_PX, width / len(ticks))]
    at = {f"{tick:g} s": x + width * min(1.0, tick / shown_s) for tick in ticks}
    page.lines([[(tick, y + 1), (tick, y + 5)] for tick in at.values()])
    for text, tick in at.items():
        if tick == x or tick + page.lettering.width_px(text, size) / 2 <= end:
            page.write(tick, y + 14, text, size, ha="right" if tick > x + width - 16 else "center", color=FAINT)
