"""Choose fonts that hold every character, fit labels to their room, and note what no font has."""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

from attnscope.drawing.layout import SCREEN, Paper
from attnscope.errors import AttnscopeError, UsageError

BASE_FAMILY = "DejaVu Sans"
ELLIPSIS = "…"

# Families that are tried first for what DejaVu Sans lacks; any other installed font comes after them.
_PREFERRED = (
    "Noto Sans",
    "Noto Sans CJK",
    "Source Han Sans",
    "WenQuanYi",
    "Arial Unicode MS",
    "Noto",
    "Unifont",
)
_BREAKS_PDF = {"\ufeff"}  # a byte order mark has no ink; matplotlib 3.11 fails on it with an IndexError
# Letters are fitted to pixels when drawn; at the smallest sizes that makes them up to 6% wider than their outlines.
_HINTING = 1.06

_FONT_FILES = (".ttf", ".otf", ".ttc", ".otc")
_FIRST_OF_OTHERS = 0x300  # DejaVu Sans has all letters before
_NO_TEXT = ("Last Resort", "cmr", "cmm", "cms", "cmt", "cmb", "cme")


@dataclass(frozen=True)
class Lettering:
    """The fonts for one figure, and the paper that it is set on."""

    families: tuple[str, ...]  # in the order in which they are asked for a character
    paths: tuple[str, ...]  # their files
    missing: frozenset[str]  # characters that no installed font holds; they are written as `U+4F60`
    # Missing ones that draw nothing, such as joiners; they are left out.
    invisible: frozenset[str] = frozenset()
    paper: Paper = SCREEN

    def spell(self, text: str) -> str:
        """Return the text with every character that cannot be drawn replaced by its code point, on one line."""
        if text.isascii() and text.isprintable():
            return text
        return "".join(map(self._spell_character, text))

    def _spell_character(self, char: str) -> str:
        if char in self.invisible:
            return ""
        if (
            char not in self.missing
            and any(ord(char) in charmap(path) for path in self.paths)
            and char != "\n"
        ):
            return char
        # Texts that the fonts were not chosen for may hold anything; what leaks here makes matplotlib warn.
        return " " if char.isspace() else "" if _is_invisible(char) else f"U+{ord(char):04X}"

    @property
    def has_bold(self) -> bool:
        """Return whether there are bold letters of all its families; fonts for other scripts seldom have any."""
        return all(map(_has_bold, self.families))

    def width_px(self, text: str, size_px: float) -> float:
        """Return how wide the text is when spelled and drawn at a font size, both in pixels."""
        return _width_at_100(self.paths, self.spell(text)) * size_px / 100 * _HINTING

    def fit(self, text: str, size_px: float, room_px: float) -> str:
        """Return the text spelled, and cut with an ellipsis where it is wider than the room."""
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
    def notes(self) -> list[str]:
        """Return a sentence on missing characters, if there are any."""
        if not self.missing:
            return []
        return [f"no installed font has {_sum_up(self.missing)}: written as their code points"]


def lettering_for(texts: Iterable[str], paper: Paper = SCREEN) -> Lettering:
    """Return fonts that together hold the characters of all texts, as far as such fonts are installed."""
    from matplotlib import font_manager

    # The font that was asked for, then DejaVu.
    chosen = [] if paper.font is None else [find_font(paper.font)]
    first = list(dict.fromkeys([*chosen, (BASE_FAMILY, str(font_manager.findfont(BASE_FAMILY)))]))
    wanted = {c for text in texts for c in text if not c.isspace()}
    # Further fonts join until every character has one.
    missing, families, paths = set(wanted), [], []

    def others() -> Iterator[tuple[str, str]]:  # only texts beyond DejaVu's reach pay for reading these
        yield from (font for font in _other_fonts() if font not in first)

    for family, path in chain(first, others()):
        drawable = {c for c in missing if ord(c) in charmap(path)}
        if drawable or (family, path) in first:  # which hold what figures themselves say
            families.append(family)
            paths.append(path)
            missing -= drawable
        if not missing and len(families) >= len(first):
            break
    # Characters that no font has: invisible ones are left out, others are spelled out.
    invisible = set(filter(_is_invisible, missing)) | (wanted & _BREAKS_PDF)
    return Lettering(
        tuple(families), tuple(paths), frozenset(missing - invisible), frozenset(invisible), paper
    )


@lru_cache(maxsize=16)
def find_font(font: str) -> tuple[str, str]:
    """Return the family and the file of a font, from either of the two; refuses what is neither."""
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
    if font.casefold() not in names:
        raise UsageError(
            f"there is no font {font!r}", "`fc-list : family` names those that are installed"
        )
    name = names[font.casefold()]
    return name, str(font_manager.findfont(name))


def note_missing(texts: Iterable[str], font: str | None = None) -> str:
    """Return a sentence on the fonts to install where figures show code points; empty if every character has one."""
    # Characters that DejaVu Sans may lack.
    wanted = {c for text in texts for c in text if ord(c) >= _FIRST_OF_OTHERS}
    missing = lettering_for(wanted, Paper(font=font)).missing if wanted else frozenset()
    if not missing:
        return ""
    return (
        f"no installed font has {_sum_up(missing)}: figures show their code points; install fonts-noto and "
        "fonts-noto-cjk (Debian, Ubuntu), or name a font with --font"
    )


def _sum_up(missing: Iterable[str]) -> str:
    """Return how many characters are missing, and the first of them."""
    points = [f"U+{ord(c):04X}" for c in sorted(missing)]
    return f"{len(points)} of the characters ({', '.join(points[:4])}{', …' if len(points) > 4 else ''})"


def _is_invisible(char: str) -> bool:
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

    weights = [entry.weight for entry in font_manager.fontManager.ttflist if entry.name == family]
    return any(weight == "bold" or (isinstance(weight, int) and weight >= 600) for weight in weights)


@lru_cache(maxsize=1)
def _other_fonts() -> Sequence[tuple[str, str]]:
    from matplotlib import font_manager

    def rank(entry: font_manager.FontEntry) -> tuple[int, bool, str]:
        preferred = next(
            (i for i, name in enumerate(_PREFERRED) if entry.name.startswith(name)), len(_PREFERRED)
        )
        return (
            preferred,
            entry.style != "normal" or str(entry.weight) not in ("400", "normal"),
            entry.name,
        )

    upright = [
        e for e in font_manager.fontManager.ttflist if e.style == "normal" and "Emoji" not in e.name
    ]
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
