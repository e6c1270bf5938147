"""Which heads, and in what order: a condition such as `induction > 0.4 and layer > 3` over what a record says of them.

`condition` has the grammar.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from attnscope.errors import UsageError, require_choice
from attnscope.records.frame.head_table import HeadTable
from attnscope.records.heads.condition import Condition, Facts, GrammarError, truth
from attnscope.records.heads.findings import Head, condition_name

_SOURCES = ("from_position", "from_token", "from_both")
_ORDERS = {"explained": ("explained", 1), "entropy": ("entropy_nats", -1), **{name: (name, 1) for name in _SOURCES}}
"""By the name of an order: the column that it goes by, and 1 where the largest value comes first."""

SORTS = ("layer", *_ORDERS)
"""Orders: as in the model; the best described, the sharpest, or what follows most from positions and tokens first."""

_OF_DESCRIPTIONS = (
    "explained", "nats", "active_explained", "active_nats", "active_share", "terms", *_SOURCES,
)  # fmt: skip
_DESCRIBE = "leave out --no-describe"

_HINT = "such as 'induction > 0.4 and layer > 3'; names have no blanks: previous_token, is_induction, unclassified"

_ALIKE = 0.8
"""From which similarity on a bare word is taken for a misspelt name."""


class HeadQuery:
    """A condition on heads, in the grammar of docs/atlas.md.

    Names are a head's `layer` and `head`; its measures; of its description `explained` (a share), `nats` (from
    uniform) and `terms` (how many); and its roles, which are 1 or 0 (a role that is called as a measure is one with
    `is_` before it: `is_induction`; `unclassified` has none). What is not known of a head (NaN) fulfils no comparison.
    A bare role's name is a condition. Other words are searched in names, kinds, roles, descriptions and tokens.

    Args:
        text: The condition.

    Raises:
        UsageError: It does not fit the grammar.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._condition = Condition(text)
        except GrammarError as error:
            raise UsageError(f"the condition {text!r} cannot be read: {error}", _HINT) from None
        except RecursionError:
            raise UsageError(f"the condition {text[:40]!r}… is too long", _HINT) from None

    def require_known(self, known: Sequence[str], described: bool = True) -> None:
        """Refuses names that a record will not have, and bare words that look like a misspelt name.

        Args:
            known: The names that it will have.
            described: Whether it will have descriptions; a name that only they have is refused with this reason.
        """
        for name in sorted(self._condition.names):
            if name not in known and name.lower() not in known:
                if not described and name.lower() in _OF_DESCRIPTIONS:
                    raise UsageError(f"{name} is a number of descriptions, and these heads have none", _DESCRIBE)
                close = difflib.get_close_matches(name, known)
                more = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
                raise UsageError(f"there is no {name!r} to choose heads by", more)
        for word in sorted(self._condition.words - {*known}):
            if close := difflib.get_close_matches(word, known, cutoff=_ALIKE):
                raise UsageError(
                    f"there is no {word!r} to choose heads by",
                    f"did you mean {close[0]}? To search for the word, put it in double quotes",
                )

    def select(self, table: HeadTable) -> list[int]:
        """The rows of the heads of which it holds; refuses names by which the table says nothing."""
        facts = facts_of(table)
        texts = [text for column in facts.texts.values() for text in column]
        in_texts = {word for word in self._condition.words if any(word.lower() in text for text in texts)}
        self.require_known((*facts.numbers, *in_texts))
        return [at for at in range(len(table.heads)) if truth(self._condition.holds(facts, at))]


def facts_of(table: HeadTable) -> Facts:
    """What conditions can ask about the heads of a table."""
    columns = {column.name: column for column in table.columns}
    n = len(table.heads)

    def texts(name: str) -> list[Any]:
        return list(columns[name].values) if name in columns else [()] * n

    has_kinds = len({kind for kind, _, _ in table.heads}) > 1
    names = [f"{kind} " * has_kinds + f"L{layer}H{head}" for kind, layer, head in table.heads]
    roles = ["\n".join(f"{role} {role.replace('_', ' ')}" for role in mine) for mine in texts("roles")]
    searched = {
        "name": names,
        "kind": [kind for kind, _, _ in table.heads],
        "role": [names or "unclassified" for names in roles],
        "description": [line or "" for line in texts("description")],
        "token": ["\n".join(tokens) for tokens in texts("tokens")],
    }
    return Facts(
        table.numbers(),
        frozenset(name for column in table.columns if column.kind == "role" for name in column.names),
        {place: [text.lower() for text in mine] for place, mine in searched.items()},
        [[tuple(_PIECE.sub("", token.lower()) for token in pair) for pair in mine] for mine in texts("pairs")],
    )


_PIECE = re.compile(r"^(##|·)(?=.)")
"""What marks pieces of words; pairs are asked for without it."""


def names_for(roles: Sequence[str], measures: Sequence[str], has_descriptions: bool) -> tuple[str, ...]:
    """The names that conditions may hold where heads have these roles and measures, and descriptions or none."""
    described = _OF_DESCRIPTIONS if has_descriptions else ()
    named = (condition_name(role, measures) for role in roles)
    return ("layer", "head", "resting_share", *described, "unclassified", *measures, *(name for name in named if name))


def require_named(
    measures: str | None, where: str | None, known: Sequence[str], roles: Sequence[str] = (), described: bool = False
) -> None:
    """Refuses measures that are not known, and a condition with names that are neither measures nor roles.

    Args:
        measures: Their names, with commas between; "all" is every one.
        where: The condition.
        known: The measures that there will be.
        roles: The roles that there may be.
        described: Whether there will be descriptions.
    """
    for name in () if measures in (None, "all") else [name.strip() for name in str(measures).split(",")]:
        require_choice("measure", name, known)
    if where is not None:
        HeadQuery(where).require_known(names_for(roles, known, described), described)


class _WithHeads(Protocol):
    @property
    def heads(self) -> tuple[Head, ...]: ...

    def head_table(self) -> HeadTable: ...


def choose(record: _WithHeads, where: str | None = None, sort: str | None = None) -> list[Head]:
    """The heads of findings or an atlas of which a condition holds, in an order.

    Args:
        record: The record.
        where: See `HeadQuery`; None = all heads.
        sort: One of SORTS; None = as in the model.
    """
    require_sort(sort)
    if where is None and sort in (None, "layer"):
        return list(record.heads)
    table = record.head_table()
    rows = range(len(table.heads)) if where is None else HeadQuery(where).select(table)
    if sort in _ORDERS:
        name, sign = _ORDERS[sort]
        values = table.numbers().get(name, np.full(len(table.heads), np.nan))
        rows = sorted(rows, key=lambda row: -sign * values[row] if np.isfinite(values[row]) else math.inf)
    return [record.heads[row] for row in rows]


def require_sort(sort: str | None) -> None:
    """Refuses an order that there is not."""
    if sort is not None and sort not in SORTS:
        raise UsageError(f"there is no order {sort!r}", f"choose from {', '.join(SORTS)}")
