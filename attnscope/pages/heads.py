"""Make heads ready for a page: their numbers as labelled columns, what each does in words, and the cards of an atlas.

A page holds packed data in blocks: one that describes all heads and, for an atlas, a card per head, which is unpacked
when a reader opens the head. The page's script draws whatever columns it finds: it does not know their names.
"""

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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

N_NEAREST_HEADS = 12
"""How many of the nearest heads a head's card names."""

N_DIGITS = 8
"""Significant digits of the numbers in a block."""

FIRST_COLUMNS = ("kl_explained", "nats", "score_median", "score_p90")
"""The columns that stand first where a reader chooses an axis; they are no measures."""

OTHER_AXES = ("map_x", "map_y", "resting_share", "active_share")
"""Other columns that are axes but no measures: where heads lie on their map, and their attention on sinks or not."""

NOT_AXES = ("whole_explained", "whole_nats")
"""Columns that no axis shows: `kl_explained` and `nats` say the same of the attention outside sinks."""


@dataclass(frozen=True)
class PageHeads:
    """Hold what a page shows of heads.

    Attributes:
        blocks: Packed blocks: the first describes all heads; in an atlas, a card for each head follows.
        roles: `marks`, the letter, colour, label and meaning of each role by name; and `heads`, the roles of each head
            by its kind, then by layer and number, such as "3.1".
    """

    blocks: Sequence[str]
    roles: Mapping[str, Any]


def prepare_heads(record: HeadsResult | Atlas, findings: HeadsResult | None = None) -> PageHeads:
    """Return what a page shows of a record about heads.

    Args:
        record: The record.
        findings: The result of `attnscope.heads` that names the roles of an atlas's heads, in place of its own.

    Raises:
        AttnscopeError: The record holds no heads.
    """
    if record.is_empty:
        raise AttnscopeError("there is no head to show")
    atlas_facts: Mapping[str, Any] = {}
    cards: Sequence[str] = ()
    if isinstance(record, Atlas):
        if findings is not None:
            record = _with_roles(record, findings)
        atlas_facts, cards = _describe_atlas(record)
    heads = _describe_heads(record.table("heads"), record.table("roles"))
    # The page shows facts of the corpus, not its text.
    corpus = {**record.corpus}
    corpus.pop("text", None)
    content = {
        "run": record.run,
        "corpus": corpus,
        "heads": heads,
        "columns": _describe_columns(record, heads),
        **atlas_facts,
        "sampled": sample_line(record),
    }
    return PageHeads([_pack(content), *cards], plain(_describe_roles(record, heads), _shorten))


# Tables of heads


def _describe_columns(
    record: HeadsResult | Atlas, heads: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the numbers of all heads as columns, see `_describe_column`, and a column for each role."""
    table = record.table("heads")
    # Every number is an axis; the best-known ones come first.
    effects = record.options.get("quantities", {})
    columns = []
    for name in dict.fromkeys((*FIRST_COLUMNS, *table.number_columns)):
        if name in NOT_AXES or name not in table or not np.isfinite(table[name]).any():
            continue
        kind = "measure"
        if name in FIRST_COLUMNS or name in OTHER_AXES:
            kind = ""
        elif name in effects:
            kind = "effect"
        columns.append(_describe_column(table, name, kind))
    # The expressions of a query can name a role only if it is an identifier.
    for role in ("unclassified", *record.options.get("roles", {})):
        if role.isidentifier():
            columns.append(_describe_role(heads, role, table))
    return columns


def _describe_roles(record: HeadsResult | Atlas, heads: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the marks of roles, and the roles of each head, see `PageHeads.roles`."""
    meanings = record.options.get("roles", {})
    marks = {}
    for role, mark in marks_for({*record.table("roles")["role"].tolist()}).items():
        facts = meanings.get(role)
        meaning = str(facts.get("what", "")) if isinstance(facts, Mapping) else ""
        marks[role] = {"glyph": mark.glyph, "color": mark.color, "label": label(role), "what": meaning}
    by_kind: dict[str, dict[str, Any]] = {}
    for head in heads:
        roles_by_head = by_kind.setdefault(head["kind"], {})
        roles_by_head[f"{head['layer']}.{head['head']}"] = head["roles"]
    return {"marks": marks, "heads": by_kind}


def _describe_heads(table: Table, roles: Table) -> list[dict[str, Any]]:
    """Return for each head its kind, layer, number and roles with their evidence, and what it does in words."""
    heads: list[dict[str, Any]] = []
    for row, (layer, number) in enumerate(table.layer_heads):
        head = {"kind": str(table["kind"][row]), "layer": layer, "head": number, "roles": []}
        # Descriptions, with how well they predict held-out texts.
        if "description" in table:
            head["words"] = str(table["description"][row])
            head["explained"] = _say_explained(table, row)
            head["warning"] = str(table["other_half"][row])
        heads.append(head)
    # In the table of roles, `head` is a row of the table of heads.
    for role in roles.as_dicts():
        evidence = {"name": role["role"]}
        for name in ("measure", "tentative", "value", "threshold", "q"):
            evidence[name] = role[name]
        for end in ("low", "high", "baseline"):
            evidence[end] = role.get(f"value_{end}")
        heads[role["head"]]["roles"].append(evidence)
    return heads


def _say_explained(heads: Table, row: int) -> str:
    """Return a sentence on how much of a head's attention its description explains; "" = it is unknown."""
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
        names = [evidence["name"] for evidence in head["roles"]]
        values.append(role in (names or ["unclassified"]))
    # A measure may have the role's name.
    name = f"is_{role}" if role in table else role
    return {"name": name, "label": label(name), "kind": "role", "hidden": True, "values": values}


# Atlases


def _with_roles(atlas: Atlas, findings: HeadsResult) -> Atlas:
    """Return an atlas whose heads have the roles that they have in findings."""
    row_of = {name: row for row, name in enumerate(atlas.table("heads").head_names(with_kind=True))}
    names = findings.table("heads").head_names(with_kind=True)
    roles = findings.table("roles")
    # The row in the atlas of each role's head, (role,); -1 = the atlas lacks it.
    rows = np.array([row_of.get(names[head], -1) for head in roles["head"]], np.int64)
    moved = Table(roles.columns, {**roles.values, "head": rows}).select(rows >= 0)
    options = {**atlas.options, "roles": findings.options.get("roles", {})}
    return replace(atlas, options=options, tables={**atlas.tables, "roles": moved})


def _describe_atlas(atlas: Atlas) -> tuple[dict[str, Any], list[str]]:
    """Return what an atlas says beside its columns, and the packed card of each head.

    A card has the head's tokens, profile of offsets, nearest heads and examples.
    """
    all_tokens = atlas.table("tokens")
    cards = []
    # For each head: its pairs, [query, key, lift, low end of the lift], and all tokens of its rows in order.
    pairs = []
    tokens = []
    for head, distances in enumerate(atlas["distance"]):
        token_rows = []
        head_pairs = []
        head_tokens: set[str] = set()
        for row in all_tokens.select(all_tokens["head"] == head).as_dicts():
            token_row = _describe_token(row)
            token_rows.append(token_row)
            head_tokens.update(token_row["tokens"])
            if token_row["side"] == "pairs":
                head_pairs.append([*token_row["tokens"], token_row["lift"], token_row["low"]])
        pairs.append(head_pairs)
        tokens.append(sorted(head_tokens))
        # Pack the card by itself: the page opens it when the reader asks for it. The nearest heads come first.
        near = [other for other in largest_first(-distances) if other != head][:N_NEAREST_HEADS]
        examples = np.flatnonzero(atlas.table("examples")["head"] == head).tolist()
        card = {
            "tables": token_rows,
            "profile": atlas["profile"][head],
            "even": atlas["even_profile"][head],
            "near": list(zip(near, distances[near].tolist(), strict=True)),
            "examples": [_describe_example(atlas, example) for example in examples],
        }
        cards.append(_pack(card, _collect_kept_weights(atlas, examples)))
    meanings = {name: atlas.options.get(name, "") for name in ("rank", "score", "lift")}
    facts = {"meanings": meanings, "deciles": atlas["deciles"], "tokens": tokens, "pairs": pairs}
    return facts, cards


def _describe_token(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of an atlas's table of tokens, with the query, the key, or both as `tokens`."""
    side = row["side"]
    tokens = []
    if side in ("asks", "pairs"):
        tokens.append(row["query"])
    if side != "asks":
        tokens.append(row["key"])
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
    """Return an example without its weights.

    The `places` of its tokens are runs of adjacent ones, (run, 2): the first place, and the number of places.
    """
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


def _collect_kept_weights(atlas: Atlas, examples: Sequence[int]) -> list[NDArray[np.uint8]]:
    """Return the weights of examples as an atlas keeps them: of each shown token the largest, quantised to codes.

    First how many keys each token keeps, then these keys, then their codes, each of them for all examples.
    """
    shown = atlas.table("shown")
    # Of each example: (token,), (kept,) and (kept,). The kept keys of its tokens follow each other.
    counts = []
    keys = []
    codes = []
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
    """Return a block, zlib in base64: the length of the JSON (4 bytes, little-endian), the JSON, then the arrays."""
    written = json.dumps(plain(content, _shorten), separators=(",", ":"), allow_nan=False).encode()
    whole = b"".join([len(written).to_bytes(4, "little"), written, *map(np.ndarray.tobytes, arrays)])
    return base64.b64encode(zlib.compress(whole)).decode("ascii")


def _shorten(value: float) -> float | None:
    """Return a number rounded to N_DIGITS significant digits; None if it is not finite, as JSON cannot write that."""
    return float(f"{value:.{N_DIGITS}g}") if math.isfinite(value) else None
