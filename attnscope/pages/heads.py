"""Heads on a page: their numbers as labelled columns, what each does in words, and of an atlas the texts behind them.

A page holds one block that describes all heads, and of an atlas one block per head, which is unpacked when a reader
opens the head. The page's script reads the columns and nothing else; it knows no question.
"""

from __future__ import annotations

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
from attnscope.questions.compare import Comparison
from attnscope.questions.distances import distance_line
from attnscope.questions.relations import Relations
from attnscope.records.atlas.record import Atlas, Example
from attnscope.records.frame import codec
from attnscope.records.frame.head_table import Column, HeadTable
from attnscope.records.heads.descriptions import HeadDescription, Term
from attnscope.records.heads.findings import Findings
from attnscope.report.numbers import number as written
from attnscope.report.numbers import percent
from attnscope.report.wording import label
from attnscope.results.result import Result
from attnscope.results.storage import plain

N_NEAR = 12
"""How many of the nearest heads a head's card names."""

N_DIGITS = 8

FIRST_COLUMNS = ("explained", "nats", "score", "score_p90")
"""The columns that stand first where a reader chooses an axis."""


@dataclass(frozen=True, eq=False)
class Heads:
    """What a page shows of heads.

    Attributes:
        run: What made it.
        corpus: What it was made on.
        heads: Per head its `kind`, `layer` and `head`, its `roles`, and what it does in `words`.
        columns: The numbers, see `describe_column`.
        findings: Names the roles; None = there are none.
        more: What else the page's script reads: `grid` is the grid that it opens with, "layers" or "measures"; `rows`
            and `quantity` name what stands in it; `baseline` names that of the numbers.
        cards: Of an atlas, the block of each head.
    """

    run: Mapping[str, Any]
    corpus: Mapping[str, Any]
    heads: Sequence[Mapping[str, Any]]
    columns: Sequence[Mapping[str, Any]]
    findings: Findings | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    cards: Sequence[str] = ()

    @property
    def blocks(self) -> list[str]:
        """The blocks of a page: first that of all heads, then one per head where there are cards."""
        described = {
            "run": self.run,
            "corpus": {name: value for name, value in self.corpus.items() if name != "text"},
            "heads": self.heads,
            "columns": self.columns,
            **self.more,
        }
        return [_pack(described), *self.cards]


def heads_of(record: Any, findings: Findings | None = None) -> Heads:
    """Return what a page shows of a record about heads.

    Args:
        record: Heads, an atlas, a comparison of heads, relations or an ablation.
        findings: Of an atlas: name the roles of heads, in place of its own.

    Raises:
        AttnscopeError: The record holds no heads.
    """
    if record.is_empty:
        raise AttnscopeError("there is no head to show")
    if isinstance(record, Atlas):
        return _heads_of_atlas(record if findings is None else _with_roles(record, findings))
    if isinstance(record, Findings):
        return _heads_of_findings(record, record.head_table())
    if isinstance(record, Comparison):
        return _heads_of_comparison(record)
    if isinstance(record, Relations):
        return _heads_of_relations(record)
    if isinstance(record, Result) and "heads" in record.tables:
        return _heads_of_result(record)
    raise AttnscopeError("this record has no table of heads that a page could show", "`attnscope show` draws it")


# Columns


def name_of(column: Column) -> str:
    """Return the name of a column in the page's expressions."""
    return column.names[0] if column.names else column.name


def describe_column(column: Column, **more: Any) -> dict[str, Any]:
    """Return a column of numbers as the page's script reads it: labels, and the values per head."""
    parts = {"low": "low", "high": "high", "uniform": "baseline"}
    beside = {parts[part]: values for part, values in column.parts.items() if part in parts}
    name = name_of(column)
    return {
        "name": name,
        "label": column.label or label(name),
        "unit": column.unit,
        "meaning": column.what,
        "range": column.range,
        "kind": column.kind,
        "hidden": column.kind == "role" or name == "terms",
        "values": column.values,
        **{part: values for part, values in beside.items() if np.isfinite(values).any()},
        **more,
    }


def _heads_of_result(result: Result) -> Heads:
    """Return the heads of a result, with every number that is known of them."""
    table = result.table("heads")
    places = zip(*(table[name].tolist() for name in ("kind", "layer", "head")), strict=True)
    heads = [{"kind": kind, "layer": layer, "head": head, "roles": []} for kind, layer, head in places]
    columns = []
    for name in table.numbers:
        column = table.columns[name]
        beside = {part: table.part(name, part) for part in ("low", "high", "baseline")}
        columns.append(
            {
                "name": name,
                "label": column.title,
                "unit": column.unit,
                "meaning": column.meaning,
                "range": column.range,
                "kind": "effect",
                "hidden": False,
                "values": table[name],
                **{part: values for part, values in beside.items() if np.isfinite(values).any()},
            }
        )
    return Heads(result.run, result.corpus, heads, columns)


def _columns_of(table: HeadTable) -> list[dict[str, Any]]:
    """Return the columns of numbers of a table of heads, those first that readers use most."""
    numbers = [column for column in table.columns if column.is_number]
    named = [column for column in numbers if column.kind != "role" or column.names]
    columns = [describe_column(column) for column in named]
    return sorted(columns, key=lambda column: _rank_of(column["name"]))


def _rank_of(name: str) -> int:
    return FIRST_COLUMNS.index(name) if name in FIRST_COLUMNS else len(FIRST_COLUMNS)


# Heads with roles and descriptions, and atlases


def _heads_of_findings(findings: Findings, table: HeadTable, **more: Any) -> Heads:
    described = {} if findings.descriptions is None else findings.descriptions.by_head
    heads = []
    for head in findings.heads:
        shown = {"kind": head.kind, "layer": head.layer, "head": head.head}
        shown["roles"] = [codec.describe(role) for role in head.roles]
        if head.address in described:
            shown |= _words_of(described[head.address])
        heads.append(shown)
    if findings.descriptions is not None:
        more["sampled"] = findings.descriptions.sample_line(findings.corpus.get("n_texts"))
    table = replace(table, columns=tuple(_explained_as_said(table, described)))
    return Heads(findings.run, findings.corpus, heads, _columns_of(table), findings, more)


def _words_of(description: HeadDescription) -> dict[str, str]:
    """Return what a head does in words: the line, how much of its attention it explains, and what more there is."""
    main = description.main
    is_even = description.spreads_evenly or main.nats < 0.1
    low, high = (percent(end) for end in (main.low, main.high))
    interval = "these texts cannot tell" if math.isnan(main.low) else f"{low}, {high}"
    explained = (
        f"{main.nats:.2f} nats from uniform" if is_even else f"KL explained {percent(main.explained)} [{interval}]"
    )
    terms = [_words_of_term(term) for term in (*main.terms, *(description.terms if description.active else ()))]
    return {
        "words": description.words,
        "explained": explained,
        "warning": description.warning,
        "terms": "; ".join(terms),
    }


def _words_of_term(term: Term) -> str:
    words = f"not {term.words}" if term.is_avoided else term.words
    return f"{words} ({percent(term.share)}; uniform {percent(term.even)})" if math.isfinite(term.share) else words


def _explained_as_said(table: HeadTable, described: Mapping[Any, HeadDescription]) -> list[Column]:
    """Return the columns with the one number of each head that its card says: the KL that its line explains."""
    if not described:
        return list(table.columns)
    mains = [described[head].main if head in described else None for head in table.heads]

    def read(part: str) -> NDArray[np.float64]:
        return np.array([math.nan if main is None else getattr(main, part) for main in mains])

    meaning = "share of its KL from uniform attention that its line explains on texts it was not fitted on"
    parts = {"low": read("low"), "high": read("high")}
    explained = Column("explained", read("explained"), parts, meaning, "share", (None, 1), label="KL explained")
    nats = Column("nats", read("nats"), {}, "KL from uniform attention", "nats", label="nats from uniform")
    gone = ("explained", "nats", "active_explained", "active_nats")
    return [explained, nats, *(column for column in table.columns if name_of(column) not in gone)]


def _with_roles(atlas: Atlas, findings: Findings) -> Atlas:
    """Return an atlas whose heads have the roles that they have in findings."""
    roles = {head.address: head.roles for head in findings.heads}
    heads = tuple(replace(head, roles=roles.get(head.address, ())) for head in atlas.heads)
    return replace(atlas, heads=heads, options={**atlas.options, "roles": findings.options.get("roles", {})})


def _heads_of_atlas(atlas: Atlas) -> Heads:
    table = atlas.head_table()
    (tokens,) = (column.values for column in table.columns if column.name == "tokens")
    pairs = []
    for rows in atlas.tables:
        pairs.append([(*row.tokens, row.lift, row.low) for row in rows if row.side == "pairs"])
    by_head: list[list[Example]] = [[] for _ in atlas.heads]
    for example in atlas.examples():
        by_head[example.facts.head].append(example)
    described = {} if atlas.descriptions is None else atlas.descriptions.by_head
    failures = [getattr(described.get(head.address), "failures", ()) for head in atlas.heads]
    cards = [_card(atlas, number, by_head[number], failures[number]) for number in range(len(atlas.heads))]
    meanings = {"rank": atlas.rank, "score": atlas.options.get("rank", ""), "lift": atlas.options.get("lift", "")}
    shown = _heads_of_findings(
        atlas.findings, table, meanings=meanings, deciles=atlas.deciles, tokens=tokens, pairs=pairs
    )
    return replace(shown, cards=cards)


def _card(atlas: Atlas, number: int, examples: Sequence[Example], failures: Sequence[Any]) -> str:
    """Return the block of one head of an atlas."""
    card = {
        "tables": [codec.describe(row) for row in atlas.tables[number]],
        "profile": atlas.profiles[number],
        "even": atlas.even_profiles[number],
        "near": _nearest(atlas.distances[number], number),
        "examples": [_describe_example(example, failures) for example in examples],
    }
    counts = [np.diff(example.starts).astype(np.uint8) for example in examples]
    keys = [example.keys for example in examples]
    codes = [example.codes for example in examples]
    return _pack(card, [*counts, *keys, *codes])


def _describe_example(example: Example, failures: Sequence[Any]) -> dict[str, Any]:
    """Return all of an example but its weights; `places` are runs: the first place, and how many follow."""
    places = example.places
    first = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    runs = np.diff([*first, len(places)])
    described = {
        **codec.describe(example.facts),
        "places": np.stack([places[first], runs], 1),
        "special": np.flatnonzero(example.special),
    }
    facts = example.facts
    if facts.why == "failure" and facts.rank < len(failures):
        described["failure"] = {
            "nats": failures[facts.rank].nats,
            "expected": [codec.describe(key) for key in failures[facts.rank].predicted],
        }
    return described


def _nearest(distances: NDArray[np.floating[Any]], own: int) -> list[tuple[int, float]]:
    """Return the heads that are nearest to one, and how far they are: numbers of heads, the nearest first."""
    order = [head for head in np.argsort(distances, kind="stable").tolist() if head != own]
    return [(head, float(distances[head])) for head in order if np.isfinite(distances[head])][:N_NEAR]


# Relations and comparisons


def _heads_of_relations(result: Relations) -> Heads:
    names = result.table("relations")["relation"]
    heads = []
    for place, (kind, layer, head) in enumerate(list(result.table("heads").rows())[1:]):
        expressed = names[result["found"][:, place]].tolist()
        words = f"expresses {', '.join(expressed)}" if expressed else ""
        heads.append({"kind": kind, "layer": layer, "head": head, "roles": [], "words": words})
    more = {
        "grid": "measures",
        "rows": "relation",
        "baseline": "baseline",
        "quantity": "accuracy; after each name its n and its baseline; grey: too few for a verdict",
    }
    columns = [_column_of_relation(result, row) for row in range(len(names))]
    return Heads(result.run, result.corpus, heads, columns, more=more)


def _column_of_relation(result: Relations, row: int) -> dict[str, Any]:
    names = ("relation", "no_verdict", "n_scored", "baseline", "rule")
    relation, no_verdict, n_scored, baseline, rule = (result.table("relations")[name][row].item() for name in names)
    scored = f"{n_scored} links scored" + (f"; no verdict: {no_verdict}" if no_verdict else "")
    accuracy = result["accuracy"][row]
    column = Column(
        relation.replace(":", "_").replace(" ", "_"),
        accuracy,
        {
            "low": result["accuracy_low"][row],
            "high": result["accuracy_high"][row],
            "uniform": np.full(accuracy.size, baseline),
        },
        f"accuracy of {relation}; baseline: {rule or 'none'}; {scored}",
        "share",
        (0, 1),
        kind="measure",
        label=label(relation),
    )
    beside = f" · n {n_scored} · {written(baseline)}"
    return describe_column(column, beside=beside, note=scored, unsettled=bool(no_verdict))


def _heads_of_comparison(comparison: Comparison) -> Heads:
    """Return each head with its nearest other one, and of two models with the distance to the head of its number."""
    name = comparison.distance_names[0]
    distances, others = comparison.distance(), comparison.other_head_names
    is_self = comparison.compared == "heads"
    where = "" if is_self else f"in {comparison.options['other_run'].get('model', 'the other')} "
    same = dict(comparison.same_heads().tolist())
    table = comparison.table("heads")
    heads = []
    rows: list[dict[str, tuple[float, float, float]]] = []
    places = zip(table["kind"].tolist(), table["layer"].tolist(), table["head"].tolist(), strict=True)
    for number, (kind, layer, head) in enumerate(places):
        near = _nearest_pairs(distances[number], number if is_self else -1)
        shown: dict[str, Any] = {"kind": kind, "layer": layer, "head": head, "roles": []}
        row = {"mean_distance": (float(np.mean([d for _, d in near] or [math.nan])), math.nan, math.nan)}
        if near:
            nearest, distance = near[0]
            shown["words"] = f"nearest {where}is {others[nearest]}, {distance:.3f} away"
            row["nearest_distance"] = comparison.distance_interval(number, nearest)
        if is_self:
            shown["near"] = near[:N_NEAR]
        elif number in same:
            row["same_number_distance"] = comparison.distance_interval(number, same[number])
        heads.append(shown)
        rows.append(row)
    measure = distance_line(name)
    meanings = {
        "nearest_distance": f"{measure} to the nearest head",
        "mean_distance": f"mean {measure} to all others",
        "same_number_distance": f"{measure} to the head of the same number in the other model",
    }
    columns = [_distance_column(column, meaning, rows) for column, meaning in meanings.items()]
    if is_self:
        columns += _map_columns(comparison[f"places:{name}"])
    more = {"grid": "layers", "rows": "distance", "quantity": "distance"}
    shown_columns = [column for column in columns if np.isfinite(column["values"]).any()]
    return Heads(comparison.run, comparison.corpus, heads, shown_columns, more=more)


def _nearest_pairs(distances: NDArray[np.float64], own: int) -> list[tuple[int, float]]:
    order = [head for head in np.argsort(distances, kind="stable").tolist() if head != own]
    return [(head, float(distances[head])) for head in order if np.isfinite(distances[head])]


def _distance_column(name: str, meaning: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    unknown = (math.nan, math.nan, math.nan)
    values, low, high = np.array([row.get(name, unknown) for row in rows], np.float64).T
    return describe_column(Column(name, values, {"low": low, "high": high}, meaning, range=(0, 1), kind="measure"))


def _map_columns(places: NDArray[np.floating[Any]]) -> list[dict[str, Any]]:
    """Return where heads stand on the map of distances, (head, 2), as two columns."""
    meaning = "heads that attend alike stand near each other"
    return [
        describe_column(Column(f"map_{axis}", places[:, number].astype(np.float64), {}, meaning))
        for number, axis in enumerate("xy")
    ]


# Blocks


def _pack(content: Mapping[str, Any], arrays: Sequence[NDArray[Any]] = ()) -> str:
    """Return a block: the length of the JSON (4 bytes, the low one first), the JSON and the arrays, zlib and base64."""
    text = json.dumps(plain(content, _shorten), separators=(",", ":"), allow_nan=False).encode()
    whole = b"".join([len(text).to_bytes(4, "little"), text, *(array.tobytes() for array in arrays)])
    return base64.b64encode(zlib.compress(whole)).decode("ascii")


def _shorten(number: float) -> float | None:
    """Return a number with few digits; None where JSON has no word for it."""
    return float(f"{number:.{N_DIGITS}g}") if math.isfinite(number) else None
