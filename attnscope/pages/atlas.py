"""An atlas as a page: what the landing needs in one block, and one block a head, unpacked when it is asked for."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.pages.document import Page, page_of
from attnscope.records.atlas.record import Atlas, Example
from attnscope.records.frame import codec
from attnscope.records.frame.head_table import Column, HeadTable
from attnscope.records.heads.findings import Findings
from attnscope.report.wording import label
from attnscope.results.storage import plain

N_NEAR = 12
"""How many heads like it a head's card names."""

_DIGITS = 6

_FIRST = (
    "explained", "nats", "active_explained", "active_share", "active_nats", "score", "score_p90",
)  # fmt: skip
"""The columns that stand first where an axis is chosen."""

_HIDDEN = ("terms",)
"""Columns that are no axes."""


def page_of_atlas(atlas: Atlas, *, findings: Findings | None = None) -> Page:
    """The page of an atlas. Findings name the roles of heads, in place of those in the atlas."""
    if atlas.is_empty:
        raise AttnscopeError("there is no head to show")
    if findings is not None:
        roles = {head.address: head.roles for head in findings.heads}
        heads = [replace(head, roles=roles.get(head.address, ())) for head in atlas.heads]
        options = {**atlas.options, "roles": findings.options.get("roles", {})}
        atlas = replace(atlas, heads=tuple(heads), options=options)
    return page_of([], findings=atlas.findings, atlas=pack_atlas(atlas))


def pack_atlas(atlas: Atlas) -> list[str]:
    """The blocks of an atlas in a page: the landing's, then one a head."""
    described = atlas.describe()
    described = {name: value for name, value in described.items() if name not in ("facts", "tables")}
    heads = [{name: head[name] for name in ("kind", "layer", "head", "roles")} for head in described["heads"]]
    options = {name: value for name, value in atlas.options.items() if name != "measures"}
    table = atlas.head_table()
    (tokens,) = (column.values for column in table.columns if column.name == "tokens")
    pairs = [[(*row.tokens, row.mass) for row in rows if row.side == "pairs"] for rows in atlas.tables]
    landing = {**described, "heads": heads, "options": options, "deciles": atlas.deciles, "table": table_of(table)}
    blocks = [_pack({**landing, "tokens": tokens, "pairs": pairs})]
    by_head: list[list[Example]] = [[] for _ in atlas.heads]
    for example in atlas.examples():
        by_head[example.facts.head].append(example)
    for number, examples in enumerate(by_head):
        card: dict[str, Any] = {
            "tables": [codec.describe(row) for row in atlas.tables[number]],
            "profile": atlas.profiles[number],
            "even": atlas.even_profiles[number],
            "near": _near(atlas.distances[number], number),
            "examples": [_example(example) for example in examples],
        }
        counts = [np.diff(example.starts).astype(np.uint8) for example in examples]
        keys, codes = [example.keys for example in examples], [example.codes for example in examples]
        blocks.append(_pack(card, [*counts, *keys, *codes]))
    return blocks


def table_of(table: HeadTable) -> list[dict[str, Any]]:
    """The columns of numbers of a table of heads, as `catalog.js` reads them; `hidden` ones serve conditions only."""
    columns = {(column.names or (column.name,))[0]: column for column in table.columns if column.is_number}
    order = [*(name for name in _FIRST if name in columns), *(name for name in columns if name not in _FIRST)]
    return [_column(name, columns[name]) for name in order if columns[name].kind != "role" or columns[name].names]


def _column(name: str, column: Column) -> dict[str, Any]:
    parts = {part: column.parts[part] for part in ("low", "high", "uniform") if part in column.parts}
    return {
        "name": name,
        "label": column.label or label(name),
        "kind": column.kind,
        "what": column.what,
        "unit": column.unit,
        "range": column.range,
        "hidden": column.kind == "role" or name in _HIDDEN,
        "values": column.values,
        **{part: values for part, values in parts.items() if np.isfinite(values).any()},
    }


def _example(example: Example) -> dict[str, Any]:
    places = example.places
    first = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    runs = np.diff([*first, len(places)])
    return {
        **codec.describe(example.facts),
        "places": np.stack([places[first], runs], 1),
        "special": np.flatnonzero(example.special),
    }


def _near(distances: NDArray[np.float32], number: int) -> list[tuple[int, float]]:
    """The heads that are nearest, and how far they are."""
    others = [head for head in np.argsort(distances, kind="stable") if head != number and np.isfinite(distances[head])]
    return [(int(head), float(distances[head])) for head in others[:N_NEAR]]


def _pack(content: dict[str, Any], arrays: Sequence[NDArray[Any]] = ()) -> str:
    """The length of the JSON (4 bytes, the low one first), the JSON and the arrays' bytes, in zlib and base64."""
    text = json.dumps(plain(content, _shorten), separators=(",", ":"), allow_nan=False).encode()
    whole = b"".join([len(text).to_bytes(4, "little"), text, *(array.tobytes() for array in arrays)])
    return base64.b64encode(zlib.compress(whole)).decode("ascii")


def _shorten(number: float) -> float | None:
    """A number with few digits; None where JSON has no word for it."""
    return float(f"{number:.{_DIGITS}g}") if np.isfinite(number) else None
