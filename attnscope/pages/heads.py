"""Make heads ready for a page: their numbers as labelled columns, what each does in words, and the cards of an atlas.

A page holds packed data in blocks. One block describes all heads. For an atlas there is a further block per head, its
card, which the page unpacks when a reader opens the head. The page's script draws every column that it finds here,
whatever its name.
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
from attnscope.questions.head_lines import describe_sample
from attnscope.questions.head_roles import choose_marks
from attnscope.questions.heads import Heads as HeadsResult
from attnscope.report.numbers import format_percent, largest_first
from attnscope.report.wording import label
from attnscope.results.storage import to_plain
from attnscope.results.table import Table

N_NEAREST_HEADS = 12
"""The number of nearest heads (by the atlas's `distance`) that a head's card names."""

N_DIGITS = 8
"""Significant digits of the numbers in a block."""

FIRST_COLUMNS = ("kl_explained", "nats", "score_median", "score_p90")
"""The columns that come first in the menu of axes; they are no measures of heads."""

OTHER_AXES = ("map_x", "map_y", "resting_share", "active_share")
"""Other columns that are axes but no measures: a head's coordinates on the map of heads, and its attention on sinks and
outside of sinks."""

NOT_AXES = ("whole_explained", "whole_nats")
"""Columns that are no axes. They cover all attention; `kl_explained` and `nats` say the same of attention outside
sinks."""


@dataclass(frozen=True)
class PageHeads:
    """Hold what a page shows of heads.

    Attributes:
        blocks: Packed blocks: the first describes all heads; for an atlas, the card of each head follows.
        roles: Two mappings. `marks` has the letter, colour, label and meaning of each role, by the role's name. `heads`
            has the roles of each head, by its kind of attention, then by layer and number, such as "3.1".
    """

    blocks: Sequence[str]
    roles: Mapping[str, Any]


def prepare_heads(record: HeadsResult | Atlas, findings: HeadsResult | None = None) -> PageHeads:
    """Return what a page shows of a record about heads.

    Args:
        record: The record.
        findings: A result of `attnscope.heads` whose roles replace those of an atlas; None = keep the atlas's roles.

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
    # The page shows facts of the corpus, not the text itself.
    corpus = {**record.corpus}
    corpus.pop("text", None)
    content = {
        "run": record.run,
        "corpus": corpus,
        "heads": heads,
        "columns": _describe_columns(record, heads),
        **atlas_facts,
        "sampled": describe_sample(record),
    }
    return PageHeads([_pack(content), *cards], to_plain(_describe_roles(record, heads), _shorten))


# Tables of heads


def _describe_columns(
    record: HeadsResult | Atlas, heads: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the numbers of all heads as columns (see `_describe_column`), then a column for each role."""
    table = record.table("heads")
    # Every number of heads is an axis; FIRST_COLUMNS come first. `quantities` names the effects of ablations.
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
    # A reader filters heads by expressions, which can name a role only if it is an identifier.
    for role in ("unclassified", *record.options.get("roles", {})):
        if role.isidentifier():
            columns.append(_describe_role(heads, role, table))
    return columns


def _describe_roles(record: HeadsResult | Atlas, heads: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the marks of roles and the roles of each head, as `PageHeads.roles` has them."""
    meanings = record.options.get("roles", {})
    marks = {}
    for role, mark in choose_marks({*record.table("roles")["role"].tolist()}).items():
        facts = meanings.get(role)
        meaning = str(facts.get("what", "")) if isinstance(facts, Mapping) else ""
        marks[role] = {"glyph": mark.glyph, "color": mark.color, "label": label(role), "what": meaning}
    roles_by_kind: dict[str, dict[str, Any]] = {}
    for head in heads:
        roles_by_head = roles_by_kind.setdefault(head["kind"], {})
        roles_by_head[f"{head['layer']}.{head['head']}"] = head["roles"]
    return {"marks": marks, "heads": roles_by_kind}


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
    # A row of the table of roles is one role of one head; its `head` is a row of the table of heads.
    for role in roles.as_dicts():
        evidence = {"name": role["role"]}
        for name in ("measure", "tentative", "value", "threshold", "q"):
            evidence[name] = role[name]
        for end in ("low", "high", "baseline"):
            evidence[end] = role.get(f"value_{end}")
        heads[role["head"]]["roles"].append(evidence)
    return heads


def _say_explained(heads: Table, row: int) -> str:
    """Return a line on how much of a head's attention its description explains; "" if that is unknown."""
    explained, low, high = heads.interval("kl_explained")[row]
    if not math.isfinite(explained):
        return ""
    interval = (
        f"{format_percent(low)}, {format_percent(high)}"
        if math.isfinite(low)
        else "these texts cannot tell"
    )
    return f"KL explained {format_percent(explained)} [{interval}] of {heads['nats'][row]:.2f} nats from uniform"


def _describe_column(table: Table, name: str, kind: str) -> dict[str, Any]:
    """Return a column of numbers as the page's script reads it: its labels, and its value for each head.

    `kind` is "measure", "effect" (of an ablation) or "" (neither); the page groups axes by it.
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
    """Return a column that says whether each head has a role. It is no axis, only a name for a reader's expressions."""
    values = []
    for head in heads:
        names = [evidence["name"] for evidence in head["roles"]]
        values.append(role in (names or ["unclassified"]))
    # If a measure has the name of the role, the role's column needs another name.
    name = f"is_{role}" if role in table else role
    return {"name": name, "label": label(name), "kind": "role", "hidden": True, "values": values}


# Atlases


def _with_roles(atlas: Atlas, findings: HeadsResult) -> Atlas:
    """Return the atlas with the roles of its heads replaced by those in findings, another result on the same heads."""
    row_by_name = {name: row for row, name in enumerate(atlas.table("heads").head_names(with_kind=True))}
    names = findings.table("heads").head_names(with_kind=True)
    roles = findings.table("roles")
    # The row in the atlas of each role's head, (role,); -1 = the atlas lacks it.
    rows = np.array([row_by_name.get(names[head], -1) for head in roles["head"]], np.int64)
    new_roles = Table(roles.columns, {**roles.values, "head": rows}).select(rows >= 0)
    options = {**atlas.options, "roles": findings.options.get("roles", {})}
    return replace(atlas, options=options, tables={**atlas.tables, "roles": new_roles})


def _describe_atlas(atlas: Atlas) -> tuple[dict[str, Any], list[str]]:
    """Return an atlas's facts for the block of all heads, and the packed card of each head.

    A card has the head's tokens, its profile (attention by offset), its nearest heads and its examples.
    """
    all_tokens = atlas.table("tokens")
    cards = []
    # One entry per head: its pairs of tokens, [query, key, lift, low end of the lift], and all its tokens, sorted.
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
        # The rows of the other heads, the nearest one first. The distance of a head to itself is 0, so leave it out.
        nearest_heads = [other for other in largest_first(-distances) if other != head][:N_NEAREST_HEADS]
        examples = np.flatnonzero(atlas.table("examples")["head"] == head).tolist()
        card = {
            "tables": token_rows,
            "profile": atlas["profile"][head],
            "even": atlas["even_profile"][head],
            "near": list(zip(nearest_heads, distances[nearest_heads].tolist(), strict=True)),
            "examples": [_describe_example(atlas, example) for example in examples],
        }
        cards.append(_pack(card, _collect_kept_weights(atlas, examples)))
    meanings = {name: atlas.options.get(name, "") for name in ("rank", "score", "lift")}
    return {"meanings": meanings, "deciles": atlas["deciles"], "tokens": tokens, "pairs": pairs}, cards


def _describe_token(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of an atlas's table of tokens, with the query, the key, or both as `tokens`, by its side.

    The sides are "asks" (a query), "gets" (a key) and "pairs" (a query and a key).
    """
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

    `places` has the positions of the shown tokens in their text as runs of adjacent positions: (run, [first, count]).
    """
    examples = atlas.table("examples")
    shown = atlas.table("shown").select(atlas.tokens_of(example))
    # A run begins where a position is not the one before it plus 1. Prepending -2 makes the first token begin a run.
    places = shown["place"]
    run_starts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    lengths = np.diff([*run_starts, len(places)])
    described = {
        "labels": atlas.labels(example),
        "excerpt": atlas.excerpt(example),
        "offsets": np.stack([shown["start"], shown["stop"]], 1),
        "places": np.stack([places[run_starts], lengths], 1),
        "special": np.flatnonzero(shown["special"]),
    }
    for name in ("why", "rank", "score", "source", "n_tokens", "focus"):
        described[name] = examples[name][example]
    return described


def _collect_kept_weights(atlas: Atlas, examples: Sequence[int]) -> list[NDArray[np.uint8]]:
    """Return the weights of examples as an atlas keeps them: the largest of each shown token, quantised to codes.

    The arrays are, for all examples: the number of keys that each token keeps, then the keys, then their codes.
    """
    shown = atlas.table("shown")
    # One array per example: (token,), (kept,) and (kept,). The kept keys of a token follow those of the token before.
    counts = []
    keys = []
    codes = []
    for example in examples:
        rows = atlas.tokens_of(example)
        n_kept = shown["n_kept"][rows]
        if not len(n_kept):
            continue
        start = int(shown["first_kept"][rows.start])
        kept_slice = slice(start, start + int(n_kept.sum()))
        counts.append(n_kept)
        keys.append(atlas["kept_key"][kept_slice])
        codes.append(atlas["kept_code"][kept_slice])
    return [numbers.astype(np.uint8) for numbers in (*counts, *keys, *codes)]


# Blocks


def _pack(content: Mapping[str, Any], arrays: Sequence[NDArray[Any]] = ()) -> str:
    """Return a block in base64: zlib data of the JSON's length (4 bytes, little-endian), the JSON, and the arrays."""
    json_bytes = json.dumps(to_plain(content, _shorten), separators=(",", ":"), allow_nan=False).encode()
    content_bytes = b"".join(
        [len(json_bytes).to_bytes(4, "little"), json_bytes, *map(np.ndarray.tobytes, arrays)]
    )
    return base64.b64encode(zlib.compress(content_bytes)).decode("ascii")


def _shorten(value: float) -> float | None:
    """Return a number rounded to N_DIGITS significant digits; None if it is not finite, as JSON cannot write that."""
    return float(f"{value:.{N_DIGITS}g}") if math.isfinite(value) else None
