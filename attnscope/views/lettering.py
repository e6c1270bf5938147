"""Text on figures: fonts that hold every character, labels that fit, and a note where they cannot."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

BASE_FAMILY = "DejaVu Sans"
ELLIPSIS = "…"

# Families that are tried first for what DejaVu Sans lacks; any other installed font comes after them.
_PREFERRED = ("Noto Sans", "Noto Sans CJK", "Source Han Sans", "WenQuanYi", "Arial Unicode MS", "Noto", "Unifont")
_BREAKS_PDF = {"\ufeff"}  # a byte order mark has no ink; matplotlib 3.11 fails on it with an IndexError
# Letters are fitted to pixels when drawn; at the smallest sizes that makes them up to 6% wider than their outlines.
_HINTING = 1.06

_NO_TEXT = ("Last Resort", "cmr", "cmm", "cms", "cmt", "cmb", "cme")


@dataclass(frozen=True)
class Lettering:
    """The fonts for one figure.

    Attributes:
        families: Font families, in the order in which they are asked for a character.
        paths: Their files, in the same order.
        missing: Characters that no installed font holds; they are written as `U+4F60`.
        invisible: Missing ones that draw nothing by themselves (joiners, variation selectors); they are left out.
    """

    families: tuple[str, ...]
    paths: tuple[str, ...]
    missing: frozenset[str]
    invisible: frozenset[str] = frozenset()

    def spell(self, text: str) -> str:
        """The text with every character that cannot be drawn replaced by its code point."""
        if self.missing.isdisjoint(text) and self.invisible.isdisjoint(text):
            return text
        return "".join(f"U+{ord(c):04X}" if c in self.missing else c for c in text if c not in self.invisible)

    def width_px(self, text: str, size_px: float) -> float:
        """How wide the text is when drawn at a font size, both in pixels."""
        return _width_at_100(self.paths, text) * size_px / 100 * _HINTING

    def fit(self, text: str, size_px: float, room_px: float) -> str:
        """The text spelled, and cut with an ellipsis where it is wider than the room."""
        text = self.spell(text)
        if self.width_px(text, size_px) <= room_px:
            return text
        low, high = 0, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            if self.width_px(text[:middle].rstrip() + ELLIPSIS, size_px) <= room_px:
                low = middle
            else:
                high = middle - 1
        # A letter goes with its marks, and what is joined goes together.
        while low and (unicodedata.category(text[low])[0] == "M" or "\u200d" in text[low - 1 : low + 1]):
            low -= 1
        return text[:low].rstrip() + ELLIPSIS

    @property
    def note(self) -> str:
        """One sentence on what is missing; empty if nothing is."""
        if not self.missing:
            return ""
        n, some = len(self.missing), ", ".join(f"U+{ord(c):04X}" for c in sorted(self.missing)[:4])
        more = ", …" if n > 4 else ""
        return f"no installed font has {n} of the characters ({some}{more}): written as their code points"


def lettering_for(texts: Iterable[str]) -> Lettering:
    """Fonts that together hold the characters of all texts, as far as fonts for them are installed."""
    from matplotlib import font_manager

    base = str(font_manager.findfont(BASE_FAMILY))
    wanted = {c for text in texts for c in text if not c.isspace()}
    missing = {c for c in wanted if ord(c) not in _charmap(base)}
    families, paths = [BASE_FAMILY], [base]
    # Only texts beyond DejaVu's reach pay for reading the other fonts.
    for family, path in _other_fonts() if missing else ():
        found = {c for c in missing if ord(c) in _charmap(path)}
        if found:
            families.append(family)
            paths.append(path)
            missing -= found
        if not missing:
            break
    invisible = {c for c in missing if unicodedata.category(c) in ("Cf", "Mn")} | (wanted & _BREAKS_PDF)
    return Lettering(tuple(families), tuple(paths), frozenset(missing - invisible), frozenset(invisible))


@lru_cache(maxsize=256)
def _charmap(path: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(path).get_charmap())
    except (OSError, RuntimeError):
        # Damaged or bitmap-only: such a font cannot draw anything here.
        return frozenset()


@lru_cache(maxsize=1)
def _other_fonts() -> Sequence[tuple[str, str]]:
    from matplotlib import font_manager

    def rank(entry: font_manager.FontEntry) -> tuple[int, bool, str]:
        preferred = next((i for i, name in enumerate(_PREFERRED) if entry.name.startswith(name)), len(_PREFERRED))
        return preferred, entry.style != "normal" or str(entry.weight) not in ("400", "normal"), entry.name

    upright = [e for e in font_manager.fontManager.ttflist if e.style == "normal" and "Emoji" not in e.name]
    seen: dict[str, str] = {}
    for entry in sorted(upright, key=rank):
        seen.setdefault(entry.name, str(entry.fname))
    seen.pop(BASE_FAMILY, None)
    # "Last Resort" has a box for every character, and TeX's symbol fonts map letters to other shapes.
    return [(name, path) for name, path in seen.items() if not name.startswith(_NO_TEXT)]


@lru_cache(maxsize=16384)
def _width_at_100(paths: tuple[str, ...], text: str) -> float:
    from matplotlib import font_manager

    font = font_manager.get_font(list(paths))
    font.set_size(100, 72)
    font.set_text(text, 0.0)
    width: float = font.get_width_height()[0] / 64
    return width
