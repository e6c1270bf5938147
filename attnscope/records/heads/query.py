"""Which heads, and in what order: a condition such as `induction > 0.4 and layer > 3` over what a record says of them.

A condition is parsed, never run: names, numbers, comparisons, and, or, not, and the four operations are all it holds.
"""

from __future__ import annotations

import ast
import difflib
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from attnscope.errors import UsageError
from attnscope.records.heads.findings import Findings, Head

SORTS = ("layer", "explained", "entropy")
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

    def select(self, findings: Findings) -> list[Head]:
        """The heads of which it holds.

        Raises:
            UsageError: The record says nothing by one of its names.
        """
        self.require_known(names_of(findings))
        return [head for head in findings.heads if _truth(self._value(self._body, _Known(findings, head)))]

    def _value(self, node: ast.expr, known: _Known) -> float:
        match node:
            case ast.BoolOp(op=ast.And()):
                return float(all(_truth(self._value(part, known)) for part in node.values))
            case ast.BoolOp():
                return float(any(_truth(self._value(part, known)) for part in node.values))
            case ast.UnaryOp(op=ast.Not()):
                return float(not _truth(self._value(node.operand, known)))
            case ast.UnaryOp():
                return -self._value(node.operand, known)
            case ast.BinOp():
                left, right = self._value(node.left, known), self._value(node.right, known)
                if isinstance(node.op, ast.Div) and not right:
                    return math.nan
                return _OPERATIONS[type(node.op)](left, right)
            case ast.Compare():
                values = [self._value(part, known) for part in (node.left, *node.comparators)]
                pairs = zip(node.ops, values, values[1:], strict=False)
                # NaN differs from all, and fulfils nothing.
                return float(
                    not any(map(math.isnan, values)) and all(_COMPARISONS[type(op)](a, b) for op, a, b in pairs)
                )
            case ast.Name():
                return known.value(node.id)
            case ast.Constant():
                return float(node.value)  # type: ignore[arg-type]  # _require lets numbers alone through
        raise AssertionError("`_require` lets nothing else through")


def _truth(value: float) -> bool:
    return bool(value) and not math.isnan(value)


class _Known:
    """What a record says of a head, by name."""

    def __init__(self, findings: Findings, head: Head) -> None:
        self._findings, self._head = findings, head

    def value(self, name: str) -> float:
        """A number; NaN where it is not known."""
        head = self._head
        if name in ("layer", "head"):
            return float(getattr(head, name))
        if name in head.measures:
            return head.measures[name].value
        if name == "unclassified":
            return float(not head.roles)
        if name in ("explained", "nats", "terms"):
            described = described_as(self._findings, head)
            if described is None:
                return math.nan
            return float(len(described.terms)) if name == "terms" else float(getattr(described, name))
        return float(any(role.name == name.removeprefix("is_") for role in head.roles))


def names_of(findings: Findings) -> tuple[str, ...]:
    """The names that conditions on a record's heads may hold."""
    roles = dict.fromkeys([*_options(findings), *(role.name for head in findings.heads for role in head.roles)])
    return names_for(tuple(roles), findings.measure_names, findings.descriptions is not None)


def names_for(roles: Sequence[str], measures: Sequence[str], has_descriptions: bool) -> tuple[str, ...]:
    """The names that conditions may hold where heads have these roles and measures, and descriptions or none."""
    described = ("explained", "nats", "terms") if has_descriptions else ()
    is_roles = [name if name not in measures else f"is_{name}" for name in roles if name.isidentifier()]
    return ("layer", "head", *described, "unclassified", *measures, *is_roles)


def _options(findings: Findings) -> Sequence[str]:
    roles = findings.options.get("roles")
    return [str(name) for name in roles] if isinstance(roles, dict) else []


def described_as(findings: Findings, head: Head) -> Any:
    """The description of a head, if there is one."""
    if findings.descriptions is None:
        return None
    known = (one for one in findings.descriptions.heads if (one.kind, one.layer, one.head) == _place(head))
    return next(known, None)


def _place(head: Head) -> tuple[str, int, int]:
    return head.kind, head.layer, head.head


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
    heads = list(findings.heads) if where is None else HeadQuery(where).select(findings)
    if sort == "explained":
        described = {_place(head): described_as(findings, head) for head in heads}
        heads.sort(key=lambda head: -_number(getattr(described[_place(head)], "explained", math.nan)))
    elif sort == "entropy":
        heads.sort(key=lambda head: -_number(-head.measures["entropy_nats"].value if "entropy_nats" in head.measures
                                             else math.nan))  # fmt: skip
    return heads


def _number(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def require_sort(sort: str | None) -> None:
    """Refuses an order that there is not.

    Raises:
        UsageError: There is none of that name.
    """
    if sort is not None and sort not in SORTS:
        raise UsageError(f"there is no order {sort!r}", f"choose from {', '.join(SORTS)}")
