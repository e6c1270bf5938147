"""Large numbers for people."""

from __future__ import annotations


def abbreviate(value: float, unit: str) -> str:
    """A number in short, such as 9.66 GB (9.00 GiB), 109.5 M or 25.9%; B is a thousand millions, T a million millions.

    Bytes have both their decimal and their binary name, as both are called GB elsewhere.
    """
    if unit == "share":
        return f"{value:.1%}"
    if unit == "times":
        return f"{value:,.0f}x"
    if unit == "bytes":
        decimal = _scale(value, 1000, ("B", "kB", "MB", "GB", "TB", "PB"))
        binary = _scale(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
        return decimal if value < 1000 else f"{decimal} ({binary})"
    return _scale(value, 1000, ("", "k", "M", "B", "T"), digits=4)


def _scale(value: float, base: int, names: tuple[str, ...], digits: int = 3) -> str:
    step = 0
    while value >= base and step < len(names) - 1:
        value /= base
        step += 1
    if step == 0:
        return f"{value:,.0f} {names[0]}".strip()
    decimals = max(0, digits - len(str(int(value))))
    return f"{value:,.{decimals}f} {names[step]}"
