"""Compute colours: of text on a background (its ink), between two colours, and of a colormap."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.colors import Colormap


def ink_on(color: str) -> str:
    """Return the colour of text on a background "#rrggbb": black or white, whichever has more contrast."""
    red, green, blue = _channels(color)
    return "#ffffff" if is_dark(red / 255, green / 255, blue / 255) else "#000000"


def is_dark(red: float, green: float, blue: float) -> bool:
    """Return whether white text has more contrast than black text on a colour, whose channels are 0 to 1 (WCAG 2)."""
    luminance = 0.0
    for weight, channel in ((0.2126, red), (0.7152, green), (0.0722, blue)):
        linear = channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
        luminance += weight * linear
    # White text has the contrast 1.05 / (L + 0.05), and black text (L + 0.05) / 0.05.
    return (luminance + 0.05) ** 2 <= 1.05 * 0.05


def blend(share: float, pale: str, dark: str) -> str:
    """Return the colour "#rrggbb" between two others: `pale` at the share 0, `dark` at 1."""
    mixed = (
        round(start + (end - start) * share)
        for start, end in zip(_channels(pale), _channels(dark), strict=True)
    )
    return "#" + bytes(mixed).hex()


def _channels(color: str) -> bytes:
    """Return red, green and blue of a colour "#rrggbb", 0 to 255."""
    return bytes.fromhex(color[1:])


def hex_of(cmap: Colormap, share: float) -> str:
    """Return the colour "#rrggbb" at a place in a colormap, from 0 for its first colour to 1 for its last."""
    return "#" + bytes(round(channel * 255) for channel in cmap(share)[:3]).hex()
