"""Compute colours: blends of two, colours of a colormap, and inks that can be read on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.colors import Colormap


def ink_on(color: str) -> str:
    """Return black or white, whichever has more contrast on a colour "#rrggbb"."""
    red, green, blue = _parts(color)
    return "#ffffff" if is_dark(red / 255, green / 255, blue / 255) else "#000000"


def is_dark(red: float, green: float, blue: float) -> bool:
    """Return whether white letters have more contrast than black ones on a colour, whose parts are 0 to 1 (WCAG 2)."""
    luminance = 0.0
    for weight, part in ((0.2126, red), (0.7152, green), (0.0722, blue)):
        linear = part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        luminance += weight * linear
    # The contrasts are 1.05 / (L + 0.05) and (L + 0.05) / 0.05.
    return (luminance + 0.05) ** 2 <= 1.05 * 0.05


def blend(share: float, pale: str, dark: str) -> str:
    """Return the colour "#rrggbb" at a share of the way from one to another, 0 to 1."""
    mixed = (
        round(start + (end - start) * share)
        for start, end in zip(_parts(pale), _parts(dark), strict=True)
    )
    return "#" + bytes(mixed).hex()


def _parts(color: str) -> bytes:
    """Return red, green and blue of a colour "#rrggbb", 0 to 255."""
    return bytes.fromhex(color[1:])


def hex_of(cmap: Colormap, share: float) -> str:
    """Return the colour "#rrggbb" at a share of a colormap, 0 to 1."""
    return "#" + bytes(round(part * 255) for part in cmap(share)[:3]).hex()
