"""Write numbers for every view: tables, figures and sentences; and choose those that are shown."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.results.table import Floats, Table

UNDEFINED = "–"


def number(value: float) -> str:
    """Return a number with three digits or so; `–` where it is undefined."""
    if not math.isfinite(value):
        return UNDEFINED
    size = abs(value)
    text = f"{value:,.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
    return text.replace("-", "−" if _is_not_zero(text) else "")  # -0.001 is 0.00, not -0.00


def _is_not_zero(text: str) -> bool:
    return any(digit in text for digit in "123456789")


def signed(value: float) -> str:
    """Return a number as `number` does, with a + if it is above 0."""
    text = number(value)
    return text if text.startswith("−") or not _is_not_zero(text) else f"+{text}"


def small_number(value: float) -> str:
    """Return a number with two or three significant digits, as effects of heads are small; `–` = undefined."""
    if not math.isfinite(value):
        return UNDEFINED
    size = abs(value)
    # Three decimals from 1% on, four from 0.1% on, then a power of ten.
    if size >= 0.9995:
        return number(value)
    if size >= 0.0095:
        text = f"{value:.3f}"
    elif size >= 0.00095:
        text = f"{value:.4f}"
    else:
        mantissa, _, exponent = f"{value:.0e}".partition("e")
        text = f"{mantissa}e{int(exponent)}" if size else "0"
    return text.replace("-", "−")


def fixed(value: float, decimals: int) -> str:
    """Return a number with a number of decimals; `–` = undefined."""
    return f"{value:.{decimals}f}".replace("-", "−") if math.isfinite(value) else UNDEFINED


def digits(value: float, most: int = 3) -> str:
    """Return a number with a limited number of significant digits, such as a tick of an axis."""
    return f"{value:.{most}g}".replace("-", "−")


def tick_texts(ticks: Sequence[float]) -> dict[float, str]:
    """Return the numbers below a colour bar: three significant digits, and more where these would move a tick."""
    ordered = sorted(ticks)
    gap = min(np.diff(ordered), default=math.inf)
    most = 3
    while most < 12 and any(abs(float(f"{tick:.{most}g}") - tick) > 0.05 * gap for tick in ordered):
        most += 1
    return {tick: digits(tick, most) for tick in ticks}


def weight(value: float) -> str:
    """Return an attention weight with two decimals, or, below 0.005, by its power of ten."""
    return f"{value:.2f}" if value >= 0.005 else f"{value:.0e}"


def four_decimals(value: float) -> str:
    """Return a number with four decimals; nothing is minus zero."""
    if math.isinf(value):
        return "-inf" if value < 0 else "inf"
    text = f"{value:.4f}"
    return "0.0000" if text == "-0.0000" else text


def percent(share: float | None, decimals: int = 0) -> str:
    """Return a share as percent; `–` where it is undefined."""
    return f"{share:.{decimals}%}" if share is not None and math.isfinite(share) else UNDEFINED


ROUNDING = 1e-6
"""A number that is less than this share of the largest of its column is what float32 leaves of 0."""

Q_VALUE = "q value"
"""The unit of columns of false discovery rates."""


def writer_for(table: Table, name: str) -> Callable[[float], str]:
    """Return what writes the numbers of a column: q values as such, others so that rounding errors are 0."""
    column = table.columns[name]
    if column.unit == Q_VALUE:
        return q_value
    return writer_of(table[name]) if column.kind == "number" else str


def writer_of(values: NDArray[np.float64]) -> Callable[[float], str]:
    """Return what writes some numbers, so that rounding errors are 0."""
    sizes = np.abs(values)
    least = ROUNDING * float(sizes[np.isfinite(sizes)].max(initial=0.0))
    return lambda value: "0" if abs(value) < least else small_number(value)


def even_writer(values: NDArray[np.float64]) -> Callable[[float], str]:
    """Return what writes some numbers with the same decimals: three digits of the largest; `–` = undefined."""
    largest = float(np.abs(values[np.isfinite(values)]).max(initial=0.0)) or 1.0
    decimals = min(max(0, 2 - math.floor(math.log10(largest))), 6)
    return lambda value: fixed(value, decimals)


def q_value(q: float) -> str:
    """Return a q value with three decimals; `–` where it is undefined."""
    return "<0.001" if q < 0.001 else fixed(q, 3)


def interval(low: float, high: float, written: Callable[[float], str] = number) -> str:
    """Return an interval such as [0.91, 0.95]; `–` where it is undefined."""
    return (
        f"[{written(low)}, {written(high)}]" if math.isfinite(low) and math.isfinite(high) else UNDEFINED
    )


def with_interval(estimate: Floats, written: Callable[[float], str] = number, unit: str = "") -> str:
    """Return a value with its unit and, where there is one, its interval; an estimate is both, (3,)."""
    value, low, high = estimate
    text = f"{written(value)} {unit}".rstrip()
    ends = interval(low, high, written)
    return text if ends == UNDEFINED else f"{text} {ends}"


def step_text(step: int) -> str:
    """Return a step of training as it is written: 500, 2k, 143k."""
    return f"{step // 1000}k" if step >= 1000 and step % 1000 == 0 else str(step)


def abbreviate(value: float, unit: str) -> str:
    """Return a number in short, such as 9.66 GB (9.00 GiB), 109.5 M or 25.9%; B is 10^9, T is 10^12.

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


# What is shown where there is little room


def spread_evenly(n: int, room: int) -> list[int]:
    """Return at most `room` of n places, spread evenly, the first and the last among them."""
    return sorted({*np.linspace(0, n - 1, min(n, max(2, room))).round().astype(int).tolist()})


def largest_first(values: Any, most: int | None = None) -> list[int]:
    """Return the places of numbers in a flat array, the largest first, at most so many; NaN is left out."""
    n_known = int((~np.isnan(values)).sum())
    order: list[int] = np.argsort(-np.asarray(values), axis=None, kind="stable")[:n_known][
        :most
    ].tolist()
    return order


def find_moving(values: Floats, most: int) -> list[int]:
    """Return the columns, (step, column), that change most between any two steps, in their order.

    Of a single step they are those with the largest values.
    """
    is_known: NDArray[np.bool_] = np.isfinite(values)
    highest = np.where(is_known, values, -np.inf).max(0)
    lowest = np.where(is_known, values, np.inf).min(0)
    # Columns without any number come last, (column,).
    spread = np.full(values.shape[1], -np.inf)
    some: NDArray[np.bool_] = np.any(is_known, 0)
    spread[some] = highest[some] - (lowest[some] if len(values) > 1 else 0)
    return sorted(column for column in largest_first(spread, most) if some[column])
