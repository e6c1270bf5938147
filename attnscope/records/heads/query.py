"""Which heads, and in what order: a condition such as `induction > 0.4 and layer > 3` over what a record says of them.

A condition is parsed, never run: names, numbers, comparisons, and, or, not, and the four operations are all it holds.
"""

from __future__ import annotations

import ast
import difflib
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from attnscope.errors import UsageError
from attnscope.records.frame.head_table import Floats, HeadTable
from attnscope.records.heads.findings import Findings, Head, condition_name

_ORDERS = {"explained": ("explained", 1), "entropy": ("entropy_nats", -1)}
"""By the name of an order: the column that it goes by, and 1 where the largest value comes first."""

SORTS = ("layer", *_ORDERS)
"""Orders: as in the model, the best described first, or the sharpest first."""

_HINT = "such as 'induction > 0.4 and layer > 3'; names have no blanks: previous_token, is_induction, unclassified"

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip
_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


class HeadQuery:
    """A condition on heads.

    Names are a head's `layer` and `head`; its measures; of its description `explained` (a share), `nats` (from
    uniform) and `terms` (how many); and its roles, which are 1 or 0 (a role that is called as a measure is one with
    `is_` before it: `is_induction`; `unclassified` has none). What is not known of a head (NaN) fulfils no comparison.
    `&` and `|` are `and` and `or`, and `=` is `==`, as on the page of an atlas.

    Args:
        text: The condition.

    Raises:
        UsageError: It is none.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            spelled = re.sub(r"(?<![<>=!:])=(?!=)", "==", re.sub("&+", " and ", re.sub(r"\|+", " or ", text)))
            tree = ast.parse(spelled.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise UsageError(f"the condition {text!r} cannot be read", _HINT) from None
        self._body = tree.body
        self.names = frozenset(node.id for node in ast.walk(self._body) if isinstance(node, ast.Name))
        try:
            self._require(self._body)
        except RecursionError:
            raise UsageError(f"the condition {text[:40]!r}… is too long", _HINT) from None

    def _require(self, node: ast.expr) -> None:
        """Refuses all that is not of the small language."""
        match node:
            case ast.BoolOp():
                parts = node.values
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                parts = [node.operand]
            case ast.Compare() if all(type(op) in _COMPARISONS for op in node.ops):
                parts = [node.left, *node.comparators]
            case ast.BinOp() if type(node.op) in _OPERATIONS:
                parts = [node.left, node.right]
            case ast.Name():
                parts = []
            case ast.Constant(value=int() | float()):
                parts = []
            case _:
                raise UsageError(
                    f"the condition {self.text!r} holds {ast.unparse(node)!r}: it is made of names, numbers, "
                    "comparisons, and, or, not, + - * /",
                    _HINT,
                )
        for part in parts:
            self._require(part)

    def require_known(self, known: Sequence[str]) -> None:
        """Refuses names that are not among those that a record will have.

        Raises:
            UsageError: There is one.
        """
        for name in sorted(self.names):
            if name not in known:
                close = difflib.get_close_matches(name, known)
                more = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
                raise UsageError(f"there is no {name!r} to choose heads by", more)

    def select(self, table: HeadTable) -> list[int]:
        """The places of the heads of which it holds.

        Raises:
            UsageError: The table says nothing by one of its names.
        """
        numbers = table.numbers()
        self.require_known(tuple(numbers))
        return [at for at in range(len(table.heads)) if _truth(self._value(self._body, numbers, at))]

    def _value(self, node: ast.expr, numbers: Mapping[str, Floats], at: int) -> float:
        def value(part: ast.expr) -> float:
            return self._value(part, numbers, at)

        match node:
            case ast.BoolOp(op=ast.And()):
                return float(all(_truth(value(part)) for part in node.values))
            case ast.BoolOp():
                return float(any(_truth(value(part)) for part in node.values))
            case ast.UnaryOp(op=ast.Not()):
                return float(not _truth(value(node.operand)))
            case ast.UnaryOp():
                return -value(node.operand)
            case ast.BinOp():
                left, right = value(node.left), value(node.right)
                if isinstance(node.op, ast.Div) and not right:
                    return math.nan
                return _OPERATIONS[type(node.op)](left, right)
            case ast.Compare():
                values = [value(part) for part in (node.left, *node.comparators)]
                pairs = zip(node.ops, values, values[1:], strict=False)
                # NaN differs from all, and fulfils nothing.
                return float(
                    not any(map(math.isnan, values)) and all(_COMPARISONS[type(op)](a, b) for op, a, b in pairs)
                )
            case ast.Name():
                return float(numbers[node.id][at])
            case ast.Constant():
                return float(node.value)  # type: ignore[arg-type]  # _require lets numbers alone through
        raise AssertionError("`_require` lets nothing else through")


def _truth(value: float) -> bool:
    return bool(value) and not math.isnan(value)


def names_for(roles: Sequence[str], measures: Sequence[str], has_descriptions: bool) -> tuple[str, ...]:
    """The names that conditions may hold where heads have these roles and measures, and descriptions or none."""
    described = ("explained", "explained_beside", "nats", "terms") if has_descriptions else ()
    named = (condition_name(role, measures) for role in roles)
    return ("layer", "head", "resting_share", *described, "unclassified", *measures, *(name for name in named if name))


def choose(findings: Findings, where: str | None = None, sort: str | None = None) -> list[Head]:
    """The heads of a record of which a condition holds, in an order.

    Args:
        findings: The record.
        where: See `HeadQuery`; None = all heads.
        sort: One of SORTS; None = as in the model.

    Raises:
        UsageError: The condition or the order is none.
    """
    require_sort(sort)
    if where is None and sort in (None, "layer"):
        return list(findings.heads)
    table = findings.head_table()
    places = range(len(table.heads)) if where is None else HeadQuery(where).select(table)
    if sort in _ORDERS:
        name, sign = _ORDERS[sort]
        values = table.numbers().get(name, np.full(len(table.heads), np.nan))
        places = sorted(places, key=lambda at: -sign * values[at] if np.isfinite(values[at]) else math.inf)
    return [findings.heads[at] for at in places]


def require_sort(sort: str | None) -> None:
    """Refuses an order that there is not.

    Raises:
        UsageError: There is none of that name.
    """
    if sort is not None and sort not in SORTS:
        raise UsageError(f"there is no order {sort!r}", f"choose from {', '.join(SORTS)}")
