"""Compute colours: black or white text for a background, mixtures of two colours, and the colours of a colormap."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.colors import Colormap


def text_color_on(color: str) -> str:
    """Return the colour of text on a background of colour "#rrggbb": black or white, whichever has more contrast."""
    red, green, blue = _rgb_channels(color)
    return "#ffffff" if is_dark(red / 255, green / 255, blue / 255) else "#000000"


def is_dark(red: float, green: float, blue: float) -> bool:
    """Return whether white text has more contrast on a colour than black text, by WCAG 2. Channels are 0 to 1."""
    luminance = 0.0
    for weight, channel in ((0.2126, red), (0.7152, green), (0.0722, blue)):
        linear = channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
        luminance += weight * linear
    # With luminance L, white text has the contrast 1.05 / (L + 0.05), and black text (L + 0.05) / 0.05. The next line
    # compares the two, without division.
    return (luminance + 0.05) ** 2 <= 1.05 * 0.05


def blend_colors(share: float, pale: str, dark: str) -> str:
    """Interpolate linearly between two colours "#rrggbb": `pale` at `share` 0, `dark` at `share` 1."""
    mixed = (
        round(start + (end - start) * share)
        for start, end in zip(_rgb_channels(pale), _rgb_channels(dark), strict=True)
    )
    return "#" + bytes(mixed).hex()


def _rgb_channels(color: str) -> bytes:
    """Return the red, green and blue of a colour "#rrggbb" as three bytes, 0 to 255."""
    return bytes.fromhex(color[1:])


def colormap_hex(cmap: Colormap, share: float) -> str:
    """Return the colour of a colormap as "#rrggbb". `share` is 0 for the first colour and 1 for the last one."""
    return "#" + bytes(round(channel * 255) for channel in cmap(share)[:3]).hex()
