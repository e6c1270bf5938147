"""Choose fonts that hold every character, fit labels to their room, and note what no font has."""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

from attnscope.drawing.layout import SCREEN, Paper
from attnscope.errors import AttnscopeError, UsageError

BASE_FAMILY = "DejaVu Sans"
ELLIPSIS = "…"

# Prefixes of the families that are tried first, in this order, for characters that DejaVu Sans lacks.
_PREFERRED = (
    "Noto Sans",
    "Source Han Sans",
    "WenQuanYi",
    "Arial Unicode MS",
    "Noto",
    "Unifont",
)
_BYTE_ORDER_MARK = "\ufeff"  # it draws nothing; matplotlib 3.11 fails on it with an IndexError
# Letters are fitted to pixels when drawn; at the smallest sizes that makes them up to 6% wider than their outlines.
_HINTING_FACTOR = 1.06

_FONT_FILES = (".ttf", ".otf", ".ttc", ".otc")
_MAYBE_MISSING_FROM = 0x300  # DejaVu Sans has all letters with smaller code points
# Fonts that do not draw text: Last Resort has a box for every character, TeX's symbol fonts other shapes for letters.
_NOT_FOR_TEXT = ("Last Resort", "cmr", "cmm", "cms", "cmt", "cmb", "cme")


@dataclass(frozen=True)
class Lettering:
    """Hold the fonts of one figure, and the paper that it is laid out on.

    Attributes:
        families: The names of the fonts, in the order in which a character is looked for.
        paths: Their files.
        missing: Visible characters that no installed font holds; they are written as code points, such as `U+4F60`.
        paper: The size of the page and of letters.
    """

    families: tuple[str, ...]
    paths: tuple[str, ...]
    missing: frozenset[str]
    paper: Paper

    def spell(self, text: str) -> str:
        """Return the text with every character that cannot be drawn replaced by its code point, on one line."""
        if text.isascii() and text.isprintable():
            return text
        return "".join(map(self._spell_character, text))

    def _spell_character(self, char: str) -> str:
        if char == _BYTE_ORDER_MARK:
            return ""
        if char != "\n" and any(ord(char) in charmap(path) for path in self.paths):
            return char
        # No font has it. Write its code point, as matplotlib would warn of the character and draw a box.
        if char.isspace():
            return " "
        return "" if _is_invisible(char) else f"U+{ord(char):04X}"

    @property
    def has_bold(self) -> bool:
        """Return whether all its families have bold letters; fonts for other scripts seldom do."""
        return all(map(_has_bold, self.families))

    def width_px(self, text: str, size_px: float) -> float:
        """Return how wide the text is when spelled and drawn at a font size, both in pixels."""
        return _width_at_100(self.paths, self.spell(text)) * size_px / 100 * _HINTING_FACTOR

    def fit(self, text: str, size_px: float, room_px: float) -> str:
        """Return the text spelled, and cut with an ellipsis where it is wider than the room."""
        text = self.spell(text)
        if self.width_px(text, size_px) <= room_px:
            return text
        # Bisect the number of characters that fit.
        low = 0
        high = len(text)
        while low < high:
            middle = (low + high + 1) // 2
            if self.width_px(text[:middle].rstrip() + ELLIPSIS, size_px) <= room_px:
                low = middle
            else:
                high = middle - 1
        # Cut neither between a letter and its marks, nor at a zero-width joiner.
        while low and (unicodedata.category(text[low])[0] == "M" or "\u200d" in text[low - 1 : low + 1]):
            low -= 1
        return text[:low].rstrip() + ELLIPSIS

    @property
    def notes(self) -> list[str]:
        """Return a sentence on missing characters, if there are any."""
        if not self.missing:
            return []
        return [f"no installed font has {_sum_up(self.missing)}: written as their code points"]


def lettering_for(texts: Iterable[str], paper: Paper = SCREEN) -> Lettering:
    """Return fonts that together hold the characters of all texts, as far as such fonts are installed."""
    from matplotlib import font_manager

    # The font that the user names, then DejaVu Sans, which has what figures themselves say.
    fonts = [] if paper.font is None else [find_font(paper.font)]
    base = (BASE_FAMILY, str(font_manager.findfont(BASE_FAMILY)))
    if base not in fonts:
        fonts.append(base)
    missing = {char for char in chain(*texts) if not char.isspace()}
    for _, path in fonts:
        missing -= _drawable(missing, path)
    # Add further fonts until every character has one. Reading them takes time.
    if missing:
        for font in _other_fonts():
            drawable = _drawable(missing, font[1])
            if drawable:
                fonts.append(font)
                missing -= drawable
    families, paths = zip(*fonts, strict=True)
    return Lettering(families, paths, frozenset(c for c in missing if not _is_invisible(c)), paper)


def _drawable(characters: Iterable[str], path: str) -> set[str]:
    """Return those of some characters that a font file holds."""
    return {char for char in characters if ord(char) in charmap(path)}


@lru_cache(maxsize=16)
def find_font(font: str) -> tuple[str, str]:
    """Return the family and the file of a font, from either of the two; refuse a name that is neither."""
    from matplotlib import font_manager

    # A file.
    manager = font_manager.fontManager
    if Path(font).suffix.lower() in _FONT_FILES:
        if not charmap(font):
            raise AttnscopeError(
                f"{font!r} is no font that can be read", "give a .ttf, .otf or .ttc file"
            )
        manager.addfont(font)
        return font_manager.get_font(font).family_name, font
    # The name of an installed family.
    names = {entry.name.casefold(): entry.name for entry in manager.ttflist}
    name = names.get(font.casefold())
    if name is None:
        raise UsageError(
            f"there is no font {font!r}", "`fc-list : family` names those that are installed"
        )
    return name, str(font_manager.findfont(name))


def note_missing(texts: Iterable[str], font: str | None) -> str:
    """Return a sentence on the fonts to install where figures show code points; empty if every character has one."""
    # Look at characters that DejaVu Sans may lack; without any, matplotlib need not be loaded.
    wanted = {char for char in chain(*texts) if ord(char) >= _MAYBE_MISSING_FROM}
    if not wanted:
        return ""
    missing = lettering_for(wanted, Paper(font=font)).missing
    if not missing:
        return ""
    return (
        f"no installed font has {_sum_up(missing)}: figures show their code points; install fonts-noto and "
        "fonts-noto-cjk (Debian, Ubuntu), or name a font with --font"
    )


def _sum_up(missing: Iterable[str]) -> str:
    """Return how many characters are missing, and the code points of the first four."""
    points = [f"U+{ord(char):04X}" for char in sorted(missing)]
    shown = points[:4]
    if len(points) > 4:
        shown.append("…")
    return f"{len(points)} of the characters ({', '.join(shown)})"


def _is_invisible(char: str) -> bool:
    """Return whether a character draws nothing by itself: a joiner, or a mark over a letter."""
    return unicodedata.category(char) in ("Cf", "Mn")


@lru_cache(maxsize=256)
def charmap(path: str) -> frozenset[int]:
    """Return the code points that a font file holds."""
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(path).get_charmap())
    except (OSError, RuntimeError):
        # Damaged or bitmap-only: such a font cannot draw anything here.
        return frozenset()


@lru_cache(maxsize=64)
def _has_bold(family: str) -> bool:
    from matplotlib import font_manager

    # A weight is a name, or a number: 400 is normal.
    weights = [entry.weight for entry in font_manager.fontManager.ttflist if entry.name == family]
    return any(weight == "bold" or (isinstance(weight, int) and weight >= 600) for weight in weights)


@lru_cache(maxsize=1)
def _other_fonts() -> Sequence[tuple[str, str]]:
    """Return the family and the file of every upright font but DejaVu Sans, preferred ones first."""
    from matplotlib import font_manager

    def rank(entry: font_manager.FontEntry) -> tuple[int, bool, str]:
        # The position of the first prefix that fits; fonts that no prefix fits come last.
        fits = [entry.name.startswith(prefix) for prefix in _PREFERRED]
        preference = [*fits, True].index(True)
        return preference, str(entry.weight) not in ("400", "normal"), entry.name

    # Of a family, take the file of the normal weight.
    files: dict[str, str] = {}
    for entry in sorted(font_manager.fontManager.ttflist, key=rank):
        is_text = "Emoji" not in entry.name and not entry.name.startswith(_NOT_FOR_TEXT)
        if entry.style == "normal" and is_text and entry.name != BASE_FAMILY:
            files.setdefault(entry.name, str(entry.fname))
    return list(files.items())


@lru_cache(maxsize=16384)
def _width_at_100(paths: tuple[str, ...], text: str) -> float:
    """Return the width of a text at a font size of 100 pixels."""
    from matplotlib import font_manager

    font = font_manager.get_font(list(paths))
    # At 72 dpi a point is a pixel; widths come in 64ths of a pixel.
    font.set_size(100, 72)
    font.set_text(text, 0.0)
    width: float = font.get_width_height()[0] / 64
    return width
