"""Format numbers for tables, figures and sentences; and choose which of many values or columns are shown."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.arrays import Floats
from attnscope.results.table import Table

# The text of a number that is NaN or infinite.
UNDEFINED = "–"


def number(value: float) -> str:
    """Return a number with two decimals, one from 10 on, none from 100 on, such as "−0.31"; `–` if it is undefined."""
    if not math.isfinite(value):
        return UNDEFINED
    # At 9.995, two decimals would give 10.00; at 99.95, one decimal would give 100.0.
    decimals = 2
    if abs(value) >= 99.95:
        decimals = 0
    elif abs(value) >= 9.995:
        decimals = 1
    text = f"{value:,.{decimals}f}"
    if _is_zero(text):
        return text.removeprefix("-")
    return text.replace("-", "−")


def _is_zero(text: str) -> bool:
    """Return whether the text of a number shows 0, such as "-0.00", so that a minus would mislead."""
    return not text.strip("-0.")


def format_signed(value: float) -> str:
    """Return a number as `number` does, with a + if it is above 0."""
    text = number(value)
    return f"+{text}" if 0 < value < math.inf and not _is_zero(text) else text


def format_small(value: float) -> str:
    """Return a number with up to three significant digits, such as the effect of a head; `–` if it is undefined."""
    if not math.isfinite(value):
        return UNDEFINED
    if value == 0:
        return "0"
    magnitude = abs(value)
    # Three decimals from 0.01 on, four from 0.001 on, then a power of ten.
    if magnitude >= 0.9995:
        return number(value)
    if magnitude >= 0.0095:
        text = f"{value:.3f}"
    elif magnitude >= 0.00095:
        text = f"{value:.4f}"
    else:
        mantissa, _, exponent = f"{value:.0e}".partition("e")
        text = f"{mantissa}e{int(exponent)}"
    return text.replace("-", "−")


def format_fixed(value: float, decimals: int) -> str:
    """Return a number with exactly `decimals` decimals; `–` if it is undefined."""
    if not math.isfinite(value):
        return UNDEFINED
    return f"{value:.{decimals}f}".replace("-", "−")


def format_digits(value: float, max_count: int = 3) -> str:
    """Return a number with at most `max_count` significant digits, such as a tick of an axis."""
    return f"{value:.{max_count}g}".replace("-", "−")


def format_ticks(ticks: Sequence[float]) -> dict[float, str]:
    """Return the text of each tick of a colour bar, all with the same number of significant digits.

    It is the least number from three to twelve with which rounding moves no tick by more than a twentieth of the
    smallest gap between ticks.
    """
    tick_values = np.array(ticks)
    gap = min(np.diff(np.sort(tick_values)), default=math.inf)
    for n_digits in range(3, 13):
        rounded = np.array([float(f"{tick:.{n_digits}g}") for tick in ticks])
        if (np.abs(rounded - tick_values) <= 0.05 * gap).all():
            break
    return {tick: format_digits(tick, n_digits) for tick in ticks}


def weight(value: float) -> str:
    """Return an attention weight with two decimals, such as "0.31", or as a power of ten if below 0.005: "2e-04"."""
    return f"{value:.2f}" if value >= 0.005 else f"{value:.0e}"


def format_four_decimals(value: float) -> str:
    """Return a number with four decimals, without a minus before 0.0000."""
    text = f"{value:.4f}"
    return text.removeprefix("-") if _is_zero(text) else text


def format_percent(share: float, decimals: int = 0) -> str:
    """Return a share as percent; `–` where it is undefined."""
    if not math.isfinite(share):
        return UNDEFINED
    return f"{share:.{decimals}%}"


_ZERO_SHARE = 1e-6
"""Numbers below this share of the largest number of their column are rounding errors of float32, written as 0."""

Q_VALUE = "q value"
"""The unit of columns of q values: p values that are corrected for the false discovery rate."""


def choose_formatter(table: Table, name: str) -> Callable[[float], str]:
    """Return the function that formats the values of a column, which depends on the unit and the kind of the column."""
    column = table.columns[name]
    if column.unit == Q_VALUE:
        return q_value
    if column.kind != "number":
        return str
    magnitudes = np.abs(table[name])
    zero_threshold = _ZERO_SHARE * float(magnitudes[np.isfinite(magnitudes)].max(initial=0.0))
    return lambda value: "0" if abs(value) < zero_threshold else format_small(value)


def choose_shared_formatter(values: NDArray[np.float64]) -> Callable[[float], str]:
    """Return a function that formats all these numbers with the same number of decimals, six at most.

    The decimals show three significant digits of the largest number, such as 0.123, 1.23 or 12.3.
    """
    largest = float(np.abs(values[np.isfinite(values)]).max(initial=0.0)) or 1.0
    # log10 rounded down is 0 for numbers from 1 to 10, -1 from 0.1 to 1, and so on.
    decimals = min(max(0, 2 - math.floor(math.log10(largest))), 6)
    return lambda value: format_fixed(value, decimals)


def q_value(q: float) -> str:
    """Return a q value with three decimals; `–` where it is undefined."""
    return "<0.001" if q < 0.001 else format_fixed(q, 3)


def format_interval(low: float, high: float, format_value: Callable[[float], str] = number) -> str:
    """Return an interval such as [0.91, 0.95], with its ends formatted by `format_value`; `–` if it is undefined."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return UNDEFINED
    return f"[{format_value(low)}, {format_value(high)}]"


def format_with_interval(
    estimate: Floats, format_value: Callable[[float], str] = number, unit: str = ""
) -> str:
    """Return an estimate, (value, low, high), as text: "0.93 nats [0.91, 0.95]".

    An undefined interval is left out.
    """
    value, low, high = estimate
    text = f"{format_value(value)} {unit}".rstrip()
    ends = format_interval(low, high, format_value)
    return text if ends == UNDEFINED else f"{text} {ends}"


def format_step(step: int) -> str:
    """Return a training step as text: 500, 2k, 143k."""
    return f"{step // 1000}k" if step >= 1000 and step % 1000 == 0 else str(step)


def abbreviate(value: float, unit: str) -> str:
    """Return a number in short: "25.9%" for a share, "12x" for times, "9.66 GB (9.00 GiB)" for bytes, else "109.5 M".

    Bytes are given in units of 1000 and of 1024, as other tools call both GB. Without a unit, B is 10^9, T is 10^12.
    """
    if unit == "share":
        return f"{value:.1%}"
    if unit == "times":
        return f"{value:,.0f}x"
    if unit == "bytes":
        decimal_text = _format_scaled(value, 1000, ("B", "kB", "MB", "GB", "TB", "PB"))
        binary_text = _format_scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
        return decimal_text if value < 1000 else f"{decimal_text} ({binary_text})"
    return _format_scaled(value, 1000, ("", "k", "M", "B", "T"), n_digits=4)


def _format_scaled(value: float, base: int, units: tuple[str, ...], n_digits: int = 3) -> str:
    """Return a number in the largest unit that does not exceed it; `units` names 1, base, base², and so on."""
    power = 0
    while value >= base and power < len(units) - 1:
        value /= base
        power += 1
    if power == 0:
        return f"{value:,.0f} {units[0]}".strip()
    # Digits before the point are never left out; decimals fill up the number to `n_digits` digits.
    decimals = max(0, n_digits - len(str(int(value))))
    return f"{value:,.{decimals}f} {units[power]}"


# Which of many values or columns are shown


def spread_evenly(n_items: int, max_count: int) -> list[int]:
    """Return at most `max_count` of `n_items` indices, ascending and evenly spaced, with the first and the last."""
    indices = np.linspace(0, n_items - 1, min(n_items, max(2, max_count)))
    return sorted({*indices.round().astype(int).tolist()})


def largest_first(values: Any, max_count: int | None = None) -> list[int]:
    """Return the indices of the `max_count` largest values, the largest first (None = of all values). NaN is left out.

    Values may be of any shape: indices are those of the flattened array.
    """
    flat_values = np.ravel(values)
    n_defined = np.count_nonzero(~np.isnan(flat_values))
    # Sorting puts NaN last.
    order: list[int] = np.argsort(-flat_values, kind="stable")[:n_defined].tolist()
    return order[:max_count]


def find_most_changed(values: Floats, max_count: int) -> list[int]:
    """Return the indices, ascending, of the `max_count` columns of (step, column) that change most over the steps.

    The change of a column is its largest value minus its smallest. If there is a single step, it is the value itself.
    Columns without a finite value are left out.
    """
    is_finite = np.isfinite(values)
    # (column,)
    change = np.where(is_finite, values, -np.inf).max(0)
    if len(values) > 1:
        change -= np.where(is_finite, values, np.inf).min(0)
    change[~is_finite.any(0)] = np.nan
    return sorted(largest_first(change, max_count))
