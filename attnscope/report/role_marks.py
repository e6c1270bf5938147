"""Declare the letter and the colour of each role. Plain values."""

from __future__ import annotations

import colorsys
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

UNCLASSIFIED = "·"


@dataclass(frozen=True)
class Mark:
    """The letter and colour "#rrggbb" of a role: a capital letter, whose small form marks tentative roles."""

    glyph: str
    color: str

    def letter(self, *, tentative: bool) -> str:
        """Return the glyph as it stands for a role: small where the role is tentative."""
        return self.glyph.lower() if tentative else self.glyph


# Okabe and Ito's seven, then colours that were chosen one by one to be as far as possible from all before them: OKLab
# distance, the smallest of normal, deutan, protan and tritan vision (Machado 2009).
MARKS = {
    "previous_token": Mark("P", "#0072B2"),
    "next_token": Mark("N", "#56B4E9"),
    "self_token": Mark("S", "#15197C"),
    "local": Mark("L", "#927EEC"),
    "same_token": Mark("E", "#009E73"),
    "induction": Mark("I", "#D55E00"),
    "similar_token": Mark("M", "#5C0300"),
    "rare": Mark("R", "#CC79A7"),
    "first_token": Mark("F", "#F0E442"),
    "outlier_token": Mark("T", "#88FCA4"),
    "sink": Mark("K", "#E69F00"),
    "delimiter": Mark("D", "#694C50"),
    "diffuse": Mark("U", "#AFC9B4"),
}
MORE_COLORS = (
    "#7C677A",
    "#901308",
    "#F4C26A",
    "#2E40A3",
    "#8AB181",
    "#4C3A69",
    "#5D5588",
)
_LATIN = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_BEYOND = "ΓΔΘΛΞΠΣΦΨΩБДЖЗИЛФЦЧШЩЭЮЯÄÖÜÉÈÊÅÆØÑÇÀÂÎÔÕÐÞŁŠŽČĐ"
_NO_GLYPH_LEFT = "Ŋ"


def marks_for(names: AbstractSet[str]) -> dict[str, Mark]:
    """Return a mark for each of these roles: the known ones first, each in its fixed place.

    Roles that are not known get a letter of their name, then any that is left. No two roles share a colour; nor a
    glyph, up to about 60 roles.
    """
    marks = {name: mark for name, mark in MARKS.items() if name in names}
    taken = {mark.glyph for mark in MARKS.values()}
    for at, name in enumerate(sorted(names - MARKS.keys())):
        wanted = [letter for letter in name.upper() if letter in _LATIN]
        glyph = next((letter for letter in (*wanted, *_LATIN, *_BEYOND) if letter not in taken), _NO_GLYPH_LEFT)
        taken.add(glyph)
        marks[name] = Mark(glyph, _further_color(at))
    return marks


def _further_color(number: int) -> str:
    if number < len(MORE_COLORS):
        return MORE_COLORS[number]
    # Hues a golden angle apart never repeat; by now the glyph has to tell roles apart.
    rest = number - len(MORE_COLORS)
    parts = colorsys.hls_to_rgb(rest * 0.618034 % 1, (0.38, 0.55, 0.72)[rest % 3], 0.6)
    return "#" + "".join(f"{round(part * 255):02X}" for part in parts)
