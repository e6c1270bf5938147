"""Make heads ready for a page: their numbers as labelled columns, what each does in words, and the cards of an atlas.

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
"""Significant digits of the numbers in a block."""

FIRST_COLUMNS = ("kl_explained", "nats", "score_median", "score_p90")
"""The columns that stand first where a reader chooses an axis; they are no measures."""

PLACES = ("map_x", "map_y", "resting_share", "active_share")
"""Further columns that are axes and no measures."""

WHOLE = ("whole_explained", "whole_nats")
"""Columns that are no axes, as others say the same of attention outside sinks."""


@dataclass(frozen=True, eq=False)
class Heads:
    """Hold the heads of a page: their numbers, roles, words and marks.

    Attributes:
        run: The record's `run`: the model, and how the record was made.
        corpus: The record's `corpus`: the texts it was made on.
        heads: For each head its `kind`, `layer`, `head` (its number) and `roles`, and what it does in `words`.
        columns: The numbers of all heads, see `_describe_column`.
        marks: The letter, colour, label and meaning of each role.
        more: What else the page's script reads, by name.
        cards: The packed card of each head of an atlas.
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
        """Return the blocks of a page: first one that describes all heads, then the cards."""
        # The page shows facts of the corpus, not its text.
        corpus = {**self.corpus}
        corpus.pop("text", None)
        described = {
            "run": self.run,
            "corpus": corpus,
            "heads": self.heads,
            "columns": self.columns,
            **self.more,
        }
        return [_pack(described), *self.cards]

    @property
    def roles(self) -> dict[str, Any]:
        """Return the marks of roles, and the roles of each head by its kind and by layer and number, such as "3.1"."""
        by_kind: dict[str, dict[str, Any]] = {}
        for head in self.heads:
            of_kind = by_kind.setdefault(head["kind"], {})
            of_kind[f"{head['layer']}.{head['head']}"] = head["roles"]
        roles: dict[str, Any] = plain({"marks": self.marks, "heads": by_kind}, _shorten)
        return roles


def heads_of(record: Any, findings: HeadsResult | None = None) -> Heads:
    """Return what a page shows of a record about heads.

    Args:
        record: `Heads` or an `Atlas`.
        findings: The result of `attnscope.heads` that names the roles of an atlas's heads, in place of its own.

    Raises:
        AttnscopeError: The record holds no heads.
    """
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


def _heads_of_tables(record: HeadsResult | Atlas, **more: Any) -> Heads:
    """Return the heads of a record's tables `heads` and `roles`; `more` is what else the page's script reads."""
    table = record.table("heads")
    roles = record.table("roles")
    heads = _describe_heads(table, roles)
    # Every number is an axis; the best-known ones come first.
    effects = record.options.get("quantities", {})
    columns = []
    for name in dict.fromkeys((*FIRST_COLUMNS, *table.number_columns)):
        if name in WHOLE or name not in table or not np.isfinite(table[name]).any():
            continue
        kind = "measure"
        if name in FIRST_COLUMNS or name in PLACES:
            kind = ""
        elif name in effects:
            kind = "effect"
        columns.append(_describe_column(table, name, kind))
    # Each role is a column of yes and no.
    meanings = record.options.get("roles", {})
    for role in ("unclassified", *meanings):
        if role.isidentifier():
            columns.append(_describe_role(heads, role, table))
    # The marks of roles, with their meanings.
    marks = {}
    for role, mark in marks_for({*roles["role"].tolist()}).items():
        facts = meanings.get(role)
        meaning = str(facts.get("what", "")) if isinstance(facts, Mapping) else ""
        marks[role] = {"glyph": mark.glyph, "color": mark.color, "label": label(role), "what": meaning}
    more["sampled"] = sample_line(record)
    return Heads(record.run, record.corpus, heads, columns, marks, more)


def _describe_heads(table: Table, roles: Table) -> list[dict[str, Any]]:
    """Return for each head its kind, layer, number and roles with their evidence, and what it does in words."""
    heads: list[dict[str, Any]] = []
    for row, (layer, head) in enumerate(table.layer_heads):
        described = {"kind": str(table["kind"][row]), "layer": layer, "head": head, "roles": []}
        # Descriptions, with how well they predict held-out texts.
        if "description" in table:
            described["words"] = str(table["description"][row])
            described["explained"] = _explained(table, row)
            described["warning"] = str(table["other_half"][row])
        heads.append(described)
    for role in roles.as_dicts():
        evidence = {"name": role["role"]}
        for name in ("measure", "tentative", "value", "threshold", "q"):
            evidence[name] = role[name]
        for part in ("low", "high", "baseline"):
            evidence[part] = role.get(f"value_{part}")
        heads[role["head"]]["roles"].append(evidence)
    return heads


def _explained(heads: Table, row: int) -> str:
    """Return how much of a head's attention its line explains, in words."""
    explained, low, high = heads.interval("kl_explained")[row]
    if not math.isfinite(explained):
        return ""
    interval = f"{percent(low)}, {percent(high)}" if math.isfinite(low) else "these texts cannot tell"
    return (
        f"KL explained {percent(explained)} [{interval}] of {heads['nats'][row]:.2f} nats from uniform"
    )


def _describe_column(table: Table, name: str, kind: str) -> dict[str, Any]:
    """Return a column of numbers as the page's script reads it: its labels, and its value for each head.

    Its kind is "measure", "effect" or "", by which the page groups axes.
    """
    column = table.columns[name]
    described = {
        "name": name,
        "label": column.title,
        "unit": column.unit,
        "meaning": column.meaning,
        "range": column.range,
        "values": table[name],
        "kind": kind,
    }
    for part in ("low", "high", "baseline"):
        values = table.companion(name, part)
        if np.isfinite(values).any():
            described[part] = values
    return described


def _describe_role(heads: Sequence[Mapping[str, Any]], role: str, table: Table) -> dict[str, Any]:
    """Return whether each head has a role, as a column that expressions may name alone, and that is no axis."""
    values = []
    for head in heads:
        names = [own["name"] for own in head["roles"]]
        values.append(role in (names or ["unclassified"]))
    # A measure may have the role's name.
    name = f"is_{role}" if role in table else role
    return {"name": name, "label": label(name), "kind": "role", "hidden": True, "values": values}


# Atlases


def _with_roles(atlas: Atlas, findings: HeadsResult) -> Atlas:
    """Return an atlas whose heads have the roles that they have in findings."""
    # The row in the atlas of each role's head, (role,); -1 = the atlas lacks it.
    row_of = {name: row for row, name in enumerate(atlas.table("heads").head_names(with_kind=True))}
    names = findings.table("heads").head_names(with_kind=True)
    roles = findings.table("roles")
    rows = np.array([row_of.get(names[head], -1) for head in roles["head"]], np.int64)
    moved = Table(roles.columns, {**roles.values, "head": rows}).select(rows >= 0)
    options = {**atlas.options, "roles": findings.options.get("roles", {})}
    return replace(atlas, options=options, tables={**atlas.tables, "roles": moved})


def _heads_of_atlas(atlas: Atlas) -> Heads:
    """Return the heads of an atlas, each with a card: its tokens, offsets, nearest heads and examples."""
    tokens = atlas.table("tokens")
    cards = []
    # Per head, for the table of heads: [query, key, lift, its low end] of pairs, and all tokens in order.
    pairs = []
    words = []
    for head, distances in enumerate(atlas["distance"]):
        described = []
        own_pairs = []
        own_words: set[str] = set()
        for row in tokens.select(tokens["head"] == head).as_dicts():
            token = _describe_token(row)
            described.append(token)
            own_words.update(token["tokens"])
            if token["side"] == "pairs":
                own_pairs.append([*token["tokens"], token["lift"], token["low"]])
        pairs.append(own_pairs)
        words.append(sorted(own_words))
        # The card is packed by itself, and opened when the reader asks for it.
        near = [n for n in largest_first(-distances) if n != head][:N_NEAR]
        examples = np.flatnonzero(atlas.table("examples")["head"] == head).tolist()
        card = {
            "tables": described,
            "profile": atlas["profile"][head],
            "even": atlas["even_profile"][head],
            "near": list(zip(near, distances[near].tolist(), strict=True)),
            "examples": [_describe_example(atlas, example) for example in examples],
        }
        cards.append(_pack(card, _kept_weights(atlas, examples)))
    # What all heads share.
    meanings = {name: atlas.options.get(name, "") for name in ("rank", "score", "lift")}
    more = {"meanings": meanings, "deciles": atlas["deciles"], "tokens": words, "pairs": pairs}
    return replace(_heads_of_tables(atlas, **more), cards=cards)


def _describe_token(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of an atlas's table of tokens, with the query, the key, or both as `tokens`."""
    side = row["side"]
    tokens = {"asks": [row["query"]], "pairs": [row["query"], row["key"]]}.get(side, [row["key"]])
    described = {
        "side": side,
        "tokens": tokens,
        "low": row.get("lift_low"),
        "high": row.get("lift_high"),
    }
    for name in ("mass", "lift", "n_queries", "n_texts"):
        described[name] = row[name]
    return described


def _describe_example(atlas: Atlas, example: int) -> dict[str, Any]:
    """Return an example without its weights; its `places` are runs, (run, 2): the first place, and how many follow."""
    examples = atlas.table("examples")
    shown = atlas.table("shown").select(atlas.tokens_of(example))
    # A run begins where a place does not follow the one before it.
    places = shown["place"]
    first = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    lengths = np.diff([*first, len(places)])
    described = {
        "labels": atlas.labels(example),
        "excerpt": atlas.excerpt(example),
        "offsets": np.stack([shown["start"], shown["stop"]], 1),
        "places": np.stack([places[first], lengths], 1),
        "special": np.flatnonzero(shown["special"]),
    }
    for name in ("why", "rank", "score", "source", "n_tokens", "focus"):
        described[name] = examples[name][example]
    return described


def _kept_weights(atlas: Atlas, examples: Sequence[int]) -> list[NDArray[np.uint8]]:
    """Return the weights of examples: how many keys each shown token keeps, then these keys, then their codes."""
    shown = atlas.table("shown")
    # Of each example: (token,), (kept,) and (kept,). Kept keys of all its tokens stand in a row.
    counts, keys, codes = [], [], []
    for example in examples:
        rows = atlas.tokens_of(example)
        n_kept = shown["n_kept"][rows]
        if not len(n_kept):
            continue
        first = int(shown["first_kept"][rows.start])
        kept = slice(first, first + int(n_kept.sum()))
        counts.append(n_kept)
        keys.append(atlas["kept_key"][kept])
        codes.append(atlas["kept_code"][kept])
    return [numbers.astype(np.uint8) for numbers in (*counts, *keys, *codes)]


# Blocks


def _pack(content: Mapping[str, Any], arrays: Sequence[NDArray[Any]] = ()) -> str:
    """Return a block: the length of the JSON (4 bytes, the low one first), the JSON and the arrays, zlib and base64."""
    written = json.dumps(plain(content, _shorten), separators=(",", ":"), allow_nan=False).encode()
    whole = b"".join([len(written).to_bytes(4, "little"), written, *map(np.ndarray.tobytes, arrays)])
    return base64.b64encode(zlib.compress(whole)).decode("ascii")


def _shorten(value: float) -> float | None:
    """Return a number with few digits; None where JSON has no word for it."""
    return float(f"{value:.{N_DIGITS}g}") if math.isfinite(value) else None
