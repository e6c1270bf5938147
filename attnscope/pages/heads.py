"""Heads on a page: their numbers as labelled columns, what each does in words, and of an atlas the texts behind them.

A page holds one block that describes all heads, and of an atlas one block per head, which is unpacked when a reader
opens the head. The page's script reads the columns and nothing else; it knows no question.
"""

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.questions.atlas import Atlas
from attnscope.questions.head_lines import sample_line
from attnscope.questions.head_roles import marks_for
from attnscope.questions.heads import Heads as HeadsResult
from attnscope.report.numbers import largest_first, percent
from attnscope.report.wording import label
from attnscope.results.storage import plain
from attnscope.results.table import Table

N_NEAR = 12
"""How many of the nearest heads a head's card names."""

N_DIGITS = 8

FIRST_COLUMNS = ("kl_explained", "nats", "score_median", "score_p90")
"""The columns that stand first where a reader chooses an axis. They and the next ones are no measures."""

WHOLE = ("whole_explained", "whole_nats")
"""Columns that are no axes, as others say the same of attention outside sinks."""

PLACES = ("map_x", "map_y", "resting_share", "active_share")


@dataclass(frozen=True, eq=False)
class Heads:
    """The heads of a page: their numbers, roles, words and marks.

    Attributes:
        run: What made it.
        corpus: What it was made on.
        heads: Per head its `kind`, `layer` and `head`, its `roles`, and what it does in `words`.
        columns: The numbers, see `describe_column`.
        marks: The mark of each role.
        more: What else the page's script reads.
        cards: Of an atlas, the block of each head.
    """

    run: Mapping[str, Any]
    corpus: Mapping[str, Any]
    heads: Sequence[Mapping[str, Any]]
    columns: Sequence[Mapping[str, Any]]
    marks: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    cards: Sequence[str] = ()

    @property
    def blocks(self) -> list[str]:
        """Return the blocks of a page: first that of all heads, then one per head where there are cards."""
        described = {
            "run": self.run,
            "corpus": {name: value for name, value in self.corpus.items() if name != "text"},
            "heads": self.heads,
            "columns": self.columns,
            **self.more,
        }
        return [_pack(described), *self.cards]

    @property
    def roles(self) -> dict[str, Any]:
        """Return the marks of roles, and the roles of each head by kind and place, such as "3.1"."""
        by_kind: dict[str, dict[str, Any]] = {}
        for head in self.heads:
            by_kind.setdefault(head["kind"], {})[f"{head['layer']}.{head['head']}"] = head["roles"]
        roles: dict[str, Any] = plain({"marks": self.marks, "heads": by_kind}, _shorten)
        return roles


def heads_of(record: Any, findings: HeadsResult | None = None) -> Heads:
    """Return what a page shows of a record about heads.

    Args:
        record: Heads or an atlas.
        findings: Of an atlas: name the roles of heads, in place of its own.

    Raises:
        AttnscopeError: The record holds no heads.
    """
    # Each kind of record has its own table of heads.
    if record.is_empty:
        raise AttnscopeError("there is no head to show")
    if isinstance(record, Atlas):
        return _heads_of_atlas(record if findings is None else _with_roles(record, findings))
    if isinstance(record, HeadsResult):
        return _heads_of_tables(record)
    raise AttnscopeError(
        "this record has no table of heads that a page could show", "`attnscope show` draws it"
    )


# Tables of heads


def describe_column(table: Table, name: str, **more: Any) -> dict[str, Any]:
    """Return a column of numbers as the page's script reads it: labels, and the values per head."""
    column = table.columns[name]
    beside = {part: table.part(name, part) for part in ("low", "high", "baseline")}
    return {
        "name": name,
        "label": column.title,
        "unit": column.unit,
        "meaning": column.meaning,
        "range": column.range,
        "values": table[name],
        **{part: values for part, values in beside.items() if np.isfinite(values).any()},
        **more,
    }


def _heads_of_tables(record: Any, **more: Any) -> Heads:
    """Return what a page shows of the tables of heads and of their roles."""
    heads, roles = record.table("heads"), record.table("roles")
    more = {"sampled": sample_line(record), **more}
    # Roles of each head, with the evidence for them.
    places = zip(heads["kind"].tolist(), heads.places, strict=True)
    shown = [{"kind": kind, "layer": layer, "head": head, "roles": []} for kind, (layer, head) in places]
    for row in range(len(roles)):
        role: dict[str, Any] = {"name": str(roles["role"][row]), "measure": str(roles["measure"][row])}
        role |= {"tentative": bool(roles["tentative"][row])}
        role |= {name: float(roles[name][row]) for name in ("value", "threshold", "q")}
        role |= {part: float(roles.part("value", part)[row]) for part in ("low", "high", "baseline")}
        shown[roles["head"][row]]["roles"].append(role)
    # Descriptions, with how well they predict held-out texts.
    if "description" in heads:
        for row, head in enumerate(shown):
            head["words"] = str(heads["description"][row])
            head["explained"] = _explained(heads, row)
            head["warning"] = str(heads["other_half"][row])
    # Every number is an axis; the best-known ones come first.
    axes = [name for name in heads.numbers if name not in WHOLE]
    names = sorted(axes, key=lambda name: (*FIRST_COLUMNS, name).index(name))
    quantities = record.options.get("quantities", {})
    columns = []
    for name in names:
        kind = "" if name in (*FIRST_COLUMNS, *PLACES) else "effect" if name in quantities else "measure"
        if np.isfinite(heads[name]).any():
            columns.append(describe_column(heads, name, kind=kind))
    # A role as a column of yes and no.
    meanings = record.options.get("roles", {})
    flags = [
        _flag_column(shown, name, heads) for name in ("unclassified", *meanings) if name.isidentifier()
    ]
    return Heads(record.run, record.corpus, shown, [*columns, *flags], _marks_of(shown, meanings), more)


def _explained(heads: Table, row: int) -> str:
    """Return how much of a head's attention its line explains, in words."""
    explained, low, high = heads.interval("kl_explained")[row]
    if not math.isfinite(explained):
        return ""
    interval = f"{percent(low)}, {percent(high)}" if math.isfinite(low) else "these texts cannot tell"
    return (
        f"KL explained {percent(explained)} [{interval}] of {heads['nats'][row]:.2f} nats from uniform"
    )


def _flag_column(heads: Sequence[Mapping[str, Any]], role: str, table: Table) -> dict[str, Any]:
    """Return whether each head has a role, as a column that expressions may name alone, and that is no axis."""
    names = [{role["name"] for role in head["roles"]} or {"unclassified"} for head in heads]
    name = f"is_{role}" if role in table else role
    return {
        "name": name,
        "label": label(name),
        "kind": "role",
        "hidden": True,
        "values": [role in of for of in names],
    }


def _marks_of(heads: Sequence[Mapping[str, Any]], meanings: Mapping[str, Any]) -> dict[str, Any]:
    marks = {}
    for name, mark in marks_for({role["name"] for head in heads for role in head["roles"]}).items():
        facts = meanings.get(name)
        meaning = str(facts.get("what", "")) if isinstance(facts, Mapping) else ""
        marks[name] = {"glyph": mark.glyph, "color": mark.color, "label": label(name), "what": meaning}
    return marks


# Atlases


def _with_roles(atlas: Atlas, findings: HeadsResult) -> Atlas:
    """Return an atlas whose heads have the roles that they have in findings."""
    numbers = {name: row for row, name in enumerate(atlas.table("heads").head_names(with_kind=True))}
    names = findings.table("heads").head_names(with_kind=True)
    roles = findings.table("roles")
    rows = np.array([numbers.get(names[head], -1) for head in roles["head"]], np.int64)
    moved = Table(roles.columns, {**roles.values, "head": rows}).select(rows >= 0)
    options = {**atlas.options, "roles": findings.options.get("roles", {})}
    return replace(atlas, options=options, tables={**atlas.tables, "roles": moved})


def _heads_of_atlas(atlas: Atlas) -> Heads:
    heads, tokens, examples = (atlas.table(name) for name in ("heads", "tokens", "examples"))
    # Rows of tokens and examples of each head.
    rows_of = [np.flatnonzero(tokens["head"] == head).tolist() for head in range(len(heads))]
    examples_of = [np.flatnonzero(examples["head"] == head).tolist() for head in range(len(heads))]
    # A token is described once, for its card and for the table of heads.
    described = [_describe_token(tokens, row) for row in range(len(tokens))]
    pairs = []
    words = []
    for rows in rows_of:
        mine = [described[row] for row in rows]
        pairs.append(
            [[*row["tokens"], row["lift"], row["low"]] for row in mine if row["side"] == "pairs"]
        )
        words.append(sorted({token for row in mine for token in row["tokens"]}))
    # One card per head: it is packed apart, and opened when the reader asks for it.
    cards = []
    for head, rows in enumerate(rows_of):
        card = {
            "tables": [described[row] for row in rows],
            "profile": atlas["profile"][head],
            "even": atlas["even_profile"][head],
            "near": _nearest(atlas["distance"][head], head)[:N_NEAR],
            "examples": [_describe_example(atlas, example) for example in examples_of[head]],
        }
        cards.append(_pack(card, _kept_bytes(atlas, examples_of[head])))
    # What all heads share.
    meanings = {name: atlas.options.get(name, "") for name in ("rank", "score", "lift")}
    more = {"meanings": meanings, "deciles": atlas["deciles"], "tokens": words, "pairs": pairs}
    return replace(_heads_of_tables(atlas, **more), cards=cards)


def _describe_token(tokens: Table, row: int) -> dict[str, Any]:
    """Return a row of a token table."""
    labels = [str(tokens[side][row]) for side in ("query", "key")]
    side = str(tokens["side"][row])
    named = labels if side == "pairs" else [labels[0] if side == "asks" else labels[1]]
    low, high = (float(tokens.part("lift", part)[row]) for part in ("low", "high"))
    numbers = {name: tokens[name][row].item() for name in ("mass", "lift", "n_queries", "n_texts")}
    return {"side": side, "tokens": named, "low": low, "high": high, **numbers}


def _describe_example(atlas: Atlas, example: int) -> dict[str, Any]:
    """Return all of an example but its weights; `places` are runs: the first place, and how many follow."""
    examples = atlas.table("examples")
    shown = atlas.table("shown").select(atlas.tokens_of(example))
    # Runs of places that follow each other, as (first, length).
    places = shown["place"]
    first = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    runs = np.diff([*first, len(places)])
    # Numbers as JSON has them.
    described = {
        name: examples[name][example].item()
        for name in ("why", "rank", "score", "source", "n_tokens", "focus")
    }
    described |= {
        "labels": atlas.labels(example),
        "excerpt": atlas.excerpt(example),
        "offsets": np.stack([shown["start"], shown["stop"]], 1),
        "places": np.stack([places[first], runs], 1),
        "special": np.flatnonzero(shown["special"]),
    }
    return described


def _kept_bytes(atlas: Atlas, examples: Sequence[int]) -> list[NDArray[np.uint8]]:
    """Return how many keys each shown token of some examples keeps; then the keys, and then their codes."""
    shown = atlas.table("shown")
    # Numbers of kept keys, (token,), and the keys and codes of all tokens in a row.
    counts, keys, codes = [], [], []
    for example in examples:
        rows = atlas.tokens_of(example)
        n_kept = shown["n_kept"][rows]
        first = int(shown["first_kept"][rows][0]) if len(n_kept) else 0
        kept = slice(first, first + int(n_kept.sum()))
        counts.append(n_kept.astype(np.uint8))
        keys.append(atlas["kept_key"][kept].astype(np.uint8))
        codes.append(atlas["kept_code"][kept].astype(np.uint8))
    return [*counts, *keys, *codes]


def _nearest(distances: NDArray[np.floating[Any]], own: int) -> list[tuple[int, float]]:
    """Return the heads that are nearest to one, and how far they are: numbers of heads, the nearest first."""
    return [(head, float(distances[head])) for head in largest_first(-distances) if head != own]


# Blocks


def _pack(content: Mapping[str, Any], arrays: Sequence[NDArray[Any]] = ()) -> str:
    """Return a block: the length of the JSON (4 bytes, the low one first), the JSON and the arrays, zlib and base64."""
    written = json.dumps(plain(content, _shorten), separators=(",", ":"), allow_nan=False).encode()
    whole = b"".join(
        [len(written).to_bytes(4, "little"), written, *(array.tobytes() for array in arrays)]
    )
    return base64.b64encode(zlib.compress(whole)).decode("ascii")


def _shorten(value: float) -> float | None:
    """Return a number with few digits; None where JSON has no word for it."""
    return float(f"{value:.{N_DIGITS}g}") if math.isfinite(value) else None
