"""Compute colours: blends of two, colours of a colormap, and inks that can be read on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.colors import Colormap


def ink_on(color: str) -> str:
    """Black or white, whichever reads better on a colour "#rrggbb" (contrast of WCAG 2)."""
    red, green, blue = (int(color[start : start + 2], 16) / 255 for start in (1, 3, 5))
    return "#ffffff" if is_dark(red, green, blue) else "#000000"


def is_dark(red: float, green: float, blue: float) -> bool:
    """Return whether white letters have more contrast than black ones on a colour, parts 0 to 1 (WCAG 2)."""
    parts = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in (red, green, blue)
    )
    luminance = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))
    return (luminance + 0.05) ** 2 <= 1.05 * 0.05


def blend(share: float, pale: str, dark: str) -> str:
    """Return the colour "#rrggbb" at a share of the way from one to another."""
    ends = ((int(pale[start : start + 2], 16), int(dark[start : start + 2], 16)) for start in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in ends)


def hex_of(cmap: Colormap, share: float) -> str:
    """Return the colour "#rrggbb" at a share of a colormap, 0 to 1."""
    return "#" + "".join(f"{round(part * 255):02x}" for part in cmap(share)[:3])
