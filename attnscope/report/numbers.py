"""Write numbers as text for tables, figures and sentences; and choose which of many values or columns are shown."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.results.table import Floats, Table

UNDEFINED = "–"


def number(value: float) -> str:
    """Return a number with two decimals, fewer from 10 on; `–` where it is undefined."""
    if not math.isfinite(value):
        return UNDEFINED
    # The bounds are those at which rounding adds a digit.
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
    """Return whether a number was written as 0, such as "-0.00"."""
    return not text.strip("-0.")


def signed(value: float) -> str:
    """Return a number as `number` does, with a + if it is above 0."""
    text = number(value)
    return f"+{text}" if 0 < value < math.inf and not _is_zero(text) else text


def small_number(value: float) -> str:
    """Return a number with two or three significant digits, as effects of heads are small; `–` = undefined."""
    if not math.isfinite(value):
        return UNDEFINED
    if value == 0:
        return "0"
    size = abs(value)
    # Three decimals from 0.01 on, four from 0.001 on, then a power of ten.
    if size >= 0.9995:
        return number(value)
    if size >= 0.0095:
        text = f"{value:.3f}"
    elif size >= 0.00095:
        text = f"{value:.4f}"
    else:
        mantissa, _, exponent = f"{value:.0e}".partition("e")
        text = f"{mantissa}e{int(exponent)}"
    return text.replace("-", "−")


def fixed(value: float, decimals: int) -> str:
    """Return a number with so many decimals; `–` = undefined."""
    if not math.isfinite(value):
        return UNDEFINED
    return f"{value:.{decimals}f}".replace("-", "−")


def digits(value: float, most: int = 3) -> str:
    """Return a number with at most so many significant digits, such as a tick of an axis."""
    return f"{value:.{most}g}".replace("-", "−")


def tick_texts(ticks: Sequence[float]) -> dict[float, str]:
    """Return the text of each tick of a colour bar, all with equally many significant digits: three to twelve.

    They are as many as keep rounding from moving a tick by over a twentieth of the smallest gap between ticks.
    """
    positions = np.array(ticks)
    gap = min(np.diff(np.sort(positions)), default=math.inf)
    n_digits = 3
    while n_digits < 12:
        rounded = np.array([float(f"{tick:.{n_digits}g}") for tick in ticks])
        if (np.abs(rounded - positions) <= 0.05 * gap).all():
            break
        n_digits += 1
    return {tick: digits(tick, n_digits) for tick in ticks}


def weight(value: float) -> str:
    """Return an attention weight with two decimals, or, below 0.005, by its power of ten."""
    return f"{value:.2f}" if value >= 0.005 else f"{value:.0e}"


def four_decimals(value: float) -> str:
    """Return a number with four decimals, without a minus before 0.0000."""
    text = f"{value:.4f}"
    return text.removeprefix("-") if _is_zero(text) else text


def percent(share: float, decimals: int = 0) -> str:
    """Return a share as percent; `–` where it is undefined."""
    if not math.isfinite(share):
        return UNDEFINED
    return f"{share:.{decimals}%}"


_ROUNDING = 1e-6
"""Numbers below this share of the largest number of their column are written as 0: float32 is no more exact."""

Q_VALUE = "q value"
"""The unit of columns of false discovery rates."""


def writer_for(table: Table, name: str) -> Callable[[float], str]:
    """Return the function that writes the values of a column, by its unit and its kind."""
    column = table.columns[name]
    if column.unit == Q_VALUE:
        return q_value
    if column.kind != "number":
        return str
    sizes = np.abs(table[name])
    threshold = _ROUNDING * float(sizes[np.isfinite(sizes)].max(initial=0.0))
    return lambda value: "0" if abs(value) < threshold else small_number(value)


def writer_for_all(values: NDArray[np.float64]) -> Callable[[float], str]:
    """Return a function that writes all these numbers with equally many decimals.

    They are as many as show three significant digits of the largest number: 0.123, 1.23, 12.3. At most six.
    """
    largest = float(np.abs(values[np.isfinite(values)]).max(initial=0.0)) or 1.0
    # log10 rounded down is 0 for numbers from 1 to 10, -1 from 0.1 to 1, and so on.
    decimals = min(max(0, 2 - math.floor(math.log10(largest))), 6)
    return lambda value: fixed(value, decimals)


def q_value(q: float) -> str:
    """Return a q value with three decimals; `–` where it is undefined."""
    return "<0.001" if q < 0.001 else fixed(q, 3)


def interval(low: float, high: float, write: Callable[[float], str] = number) -> str:
    """Return an interval such as [0.91, 0.95], its ends written by `write`; `–` where it is undefined."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return UNDEFINED
    return f"[{write(low)}, {write(high)}]"


def with_interval(estimate: Floats, write: Callable[[float], str] = number, unit: str = "") -> str:
    """Return an estimate, (value, low, high), as text: "0.93 nats [0.91, 0.95]".

    There is no interval where it is undefined.
    """
    value, low, high = estimate
    text = f"{write(value)} {unit}".rstrip()
    ends = interval(low, high, write)
    return text if ends == UNDEFINED else f"{text} {ends}"


def step_text(step: int) -> str:
    """Return a step of training as it is written: 500, 2k, 143k."""
    return f"{step // 1000}k" if step >= 1000 and step % 1000 == 0 else str(step)


def abbreviate(value: float, unit: str) -> str:
    """Return a number in short: 25.9% of a share, 12x of times, 9.66 GB (9.00 GiB) of bytes, else 109.5 M.

    Bytes are given in units of 1000 and of 1024, as other tools call both GB. Without a unit, B is 10^9, T is 10^12.
    """
    if unit == "share":
        return f"{value:.1%}"
    if unit == "times":
        return f"{value:,.0f}x"
    if unit == "bytes":
        decimal = _scale(value, 1000, ("B", "kB", "MB", "GB", "TB", "PB"))
        binary = _scale(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
        return decimal if value < 1000 else f"{decimal} ({binary})"
    return _scale(value, 1000, ("", "k", "M", "B", "T"), n_digits=4)


def _scale(value: float, base: int, units: tuple[str, ...], n_digits: int = 3) -> str:
    """Return a number in the largest unit that is not above it; `units` are the names of 1, base, base², and so on."""
    power = 0
    while value >= base and power < len(units) - 1:
        value /= base
        power += 1
    if power == 0:
        return f"{value:,.0f} {units[0]}".strip()
    # Of `n_digits`, those before the point are never left out; the others are decimals.
    decimals = max(0, n_digits - len(str(int(value))))
    return f"{value:,.{decimals}f} {units[power]}"


# Which of many values or columns are shown


def spread_evenly(n: int, room: int) -> list[int]:
    """Return at most `room` of n indices, ascending and spread evenly, with the first and the last: two at least."""
    indices = np.linspace(0, n - 1, min(n, max(2, room)))
    return sorted({*indices.round().astype(int).tolist()})


def largest_first(values: Any, most: int | None = None) -> list[int]:
    """Return the indices of at most `most` values, the largest first; NaN is left out.

    Values may be of any shape: indices are those of the flattened array.
    """
    flat = np.ravel(values)
    n_known = np.count_nonzero(~np.isnan(flat))
    # Sorting puts NaN last.
    order: list[int] = np.argsort(-flat, kind="stable")[:n_known].tolist()
    return order[:most]


def find_most_changed(values: Floats, most: int) -> list[int]:
    """Return the indices, ascending, of the `most` columns of (step, column) with the largest range over the steps.

    Of a single step they are the columns with the largest values. Columns without a finite value are left out.
    """
    is_known = np.isfinite(values)
    # The score of each column, (column,): its largest value, less its smallest if there are several steps.
    score = np.where(is_known, values, -np.inf).max(0)
    if len(values) > 1:
        score -= np.where(is_known, values, np.inf).min(0)
    score[~is_known.any(0)] = np.nan
    return sorted(largest_first(score, most))
