"""Choose fonts that together have every character, cut labels to their room, and report characters without a font."""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

from attnscope.drawing.layout import SCREEN_PAPER, Paper
from attnscope.errors import AttnscopeError, UsageError

BASE_FAMILY = "DejaVu Sans"  # matplotlib installs it, so it is always there
ELLIPSIS = "…"

# Characters that DejaVu Sans lacks are looked for in families with these prefixes first, in this order.
_PREFERRED_PREFIXES = (
    "Noto Sans",
    "Source Han Sans",
    "WenQuanYi",
    "Arial Unicode MS",
    "Noto",
    "Unifont",
)
_BYTE_ORDER_MARK = "\ufeff"  # it draws nothing; matplotlib 3.11 fails on it with an IndexError
# Drawing aligns letters with pixels (hinting). At small sizes, that makes them up to 6% wider than their outlines.
_HINTING_FACTOR = 1.06

_FONT_SUFFIXES = (".ttf", ".otf", ".ttc", ".otc")
_FIRST_UNSURE_CODE_POINT = 0x300  # DejaVu Sans has all letters with smaller code points
# Prefixes of fonts that do not draw text. Last Resort draws a box for every character. The others, fonts of TeX, have
# other shapes at the code points of letters.
_SYMBOL_FONT_PREFIXES = ("Last Resort", "cmr", "cmm", "cms", "cmt", "cmb", "cme")


@dataclass(frozen=True)
class Lettering:
    """Hold the fonts of one figure, and the paper that the figure is laid out on.

    Attributes:
        families: The names of the fonts. A character is drawn with the first font that has it.
        paths: The file of each font, in the same order.
        missing_characters: Visible characters that no installed font has. Figures write their code points, such as
            `U+4F60`, instead.
        paper: The sizes of the page and of letters.
    """

    families: tuple[str, ...]
    paths: tuple[str, ...]
    missing_characters: frozenset[str]
    paper: Paper

    def replace_undrawable(self, text: str) -> str:
        """Replace every character that cannot be drawn by its code point, and line breaks by spaces."""
        # DejaVu Sans has all printable ASCII.
        if text.isascii() and text.isprintable():
            return text
        return "".join(map(self._replace_character, text))

    def _replace_character(self, char: str) -> str:
        if char == _BYTE_ORDER_MARK:
            return ""
        if char != "\n" and any(ord(char) in font_code_points(path) for path in self.paths):
            return char
        # No font has the character: matplotlib would warn and draw a box. Write its code point instead.
        if char.isspace():
            return " "
        return "" if _is_invisible(char) else f"U+{ord(char):04X}"

    @property
    def has_bold(self) -> bool:
        """Return whether all families have bold letters. Fonts for other scripts than Latin seldom do."""
        return all(map(_has_bold, self.families))

    def width_px(self, text: str, size_px: float) -> float:
        """Return the width in pixels of the text as it would be drawn at a font size in pixels."""
        return _width_at_100(self.paths, self.replace_undrawable(text)) * size_px / 100 * _HINTING_FACTOR

    def fit(self, text: str, size_px: float, room_px: float) -> str:
        """Return the text as it would be drawn, cut with an ellipsis if it is wider than `room_px`."""
        text = self.replace_undrawable(text)
        if self.width_px(text, size_px) <= room_px:
            return text
        # Find the largest number of characters that fits, by bisection.
        low = 0
        high = len(text)
        while low < high:
            middle = (low + high + 1) // 2
            if self.width_px(text[:middle].rstrip() + ELLIPSIS, size_px) <= room_px:
                low = middle
            else:
                high = middle - 1
        # Move the cut left if it would separate a letter from its combining marks, or a zero-width joiner's neighbours.
        while low and (unicodedata.category(text[low])[0] == "M" or "\u200d" in text[low - 1 : low + 1]):
            low -= 1
        return text[:low].rstrip() + ELLIPSIS

    @property
    def notes(self) -> list[str]:
        """Return a figure's notes on missing characters: one sentence, or nothing if every character has a font."""
        if not self.missing_characters:
            return []
        return [
            f"no installed font has {_list_code_points(self.missing_characters)}: written as their code points"
        ]


def choose_lettering(texts: Iterable[str], paper: Paper = SCREEN_PAPER) -> Lettering:
    """Choose installed fonts that together have the characters of all texts, as far as possible."""
    from matplotlib import font_manager

    # Try the font that the user names first, then DejaVu Sans, which has the characters of our own titles and notes.
    fonts = [] if paper.font is None else [find_font(paper.font)]
    base = (BASE_FAMILY, str(font_manager.findfont(BASE_FAMILY)))
    if base not in fonts:
        fonts.append(base)
    missing = {char for char in chain(*texts) if not char.isspace()}
    for _, path in fonts:
        missing -= _select_drawable(missing, path)
    # Add fonts until every character has one. Reading font files takes time: skip it if nothing is missing.
    if missing:
        for font in _list_other_fonts():
            drawable = _select_drawable(missing, font[1])
            if drawable:
                fonts.append(font)
                missing -= drawable
    families, paths = zip(*fonts, strict=True)
    return Lettering(families, paths, frozenset(c for c in missing if not _is_invisible(c)), paper)


def _select_drawable(characters: Iterable[str], path: str) -> set[str]:
    """Return the subset of `characters` that a font file has."""
    return {char for char in characters if ord(char) in font_code_points(path)}


@lru_cache(maxsize=16)
def find_font(font: str) -> tuple[str, str]:
    """Return the family name and the file of a font, given either of them; raise an AttnscopeError if there is none."""
    from matplotlib import font_manager

    # Take a name with the suffix of a font as a file.
    manager = font_manager.fontManager
    if Path(font).suffix.lower() in _FONT_SUFFIXES:
        if not font_code_points(font):
            raise AttnscopeError(
                f"{font!r} is no font that can be read", "give a .ttf, .otf or .ttc file"
            )
        manager.addfont(font)
        return font_manager.get_font(font).family_name, font
    # Otherwise it is the name of an installed family, in any case.
    names = {entry.name.casefold(): entry.name for entry in manager.ttflist}
    name = names.get(font.casefold())
    if name is None:
        raise UsageError(
            f"there is no font {font!r}", "`fc-list : family` names those that are installed"
        )
    return name, str(font_manager.findfont(name))


def describe_missing(texts: Iterable[str], font: str | None) -> str:
    """Return a sentence on characters without a font, and which fonts to install; "" if every character has a font."""
    # Check only characters that DejaVu Sans may lack. Without any, return early, as matplotlib takes long to load.
    wanted = {char for char in chain(*texts) if ord(char) >= _FIRST_UNSURE_CODE_POINT}
    if not wanted:
        return ""
    missing = choose_lettering(wanted, Paper(font=font)).missing_characters
    if not missing:
        return ""
    return (
        f"no installed font has {_list_code_points(missing)}: figures show their code points; install fonts-noto and "
        "fonts-noto-cjk (Debian, Ubuntu), or name a font with --font"
    )


def _list_code_points(missing: Iterable[str]) -> str:
    """Return the number of missing characters and the first four code points."""
    points = [f"U+{ord(char):04X}" for char in sorted(missing)]
    listed_points = points[:4]
    if len(points) > 4:
        listed_points.append("…")
    return f"{len(points)} of the characters ({', '.join(listed_points)})"


def _is_invisible(char: str) -> bool:
    """Return whether a character draws nothing on its own: a joiner (Cf), or a mark on a letter (Mn)."""
    return unicodedata.category(char) in ("Cf", "Mn")


@lru_cache(maxsize=256)
def font_code_points(path: str) -> frozenset[int]:
    """Return the code points that a font file has; none if the file cannot be read."""
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(path).get_charmap())
    except (OSError, RuntimeError):
        # The file is missing, damaged, or has only bitmaps, which we cannot draw.
        return frozenset()


@lru_cache(maxsize=64)
def _has_bold(family: str) -> bool:
    from matplotlib import font_manager

    # matplotlib gives a weight as a name or as a number from 100 to 900: 400 is normal, 600 semibold.
    weights = [entry.weight for entry in font_manager.fontManager.ttflist if entry.name == family]
    return any(weight == "bold" or (isinstance(weight, int) and weight >= 600) for weight in weights)


@lru_cache(maxsize=1)
def _list_other_fonts() -> Sequence[tuple[str, str]]:
    """List the family name and the file of every upright text font except DejaVu Sans, preferred ones first."""
    from matplotlib import font_manager

    def rank(entry: font_manager.FontEntry) -> tuple[int, bool, str]:
        # Sort by the index of the first matching prefix. The final True gives fonts without a match the largest index.
        matches = [entry.name.startswith(prefix) for prefix in _PREFERRED_PREFIXES]
        preference = [*matches, True].index(True)
        return preference, str(entry.weight) not in ("400", "normal"), entry.name

    # Take one file per family. The sort order puts the file of the normal weight first.
    file_by_family: dict[str, str] = {}
    for entry in sorted(font_manager.fontManager.ttflist, key=rank):
        is_text = "Emoji" not in entry.name and not entry.name.startswith(_SYMBOL_FONT_PREFIXES)
        if entry.style == "normal" and is_text and entry.name != BASE_FAMILY:
            file_by_family.setdefault(entry.name, str(entry.fname))
    return list(file_by_family.items())


@lru_cache(maxsize=16384)
def _width_at_100(paths: tuple[str, ...], text: str) -> float:
    """Return the width of a text at a font size of 100 pixels."""
    from matplotlib import font_manager

    font = font_manager.get_font(list(paths))
    # At 72 dpi, a point is a pixel. FreeType gives widths in 1/64 pixel.
    font.set_size(100, 72)
    font.set_text(text, 0.0)
    width: float = font.get_width_height()[0] / 64
    return width
