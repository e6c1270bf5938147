"""Results of heads made up from a seed, with what a corpus would give: a few clear roles, intervals, resting heads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from matplotlib.text import Text as Written

from attnscope.drawing.canvas import Canvas
from attnscope.questions.heads import ROLE_EVIDENCE_COLUMNS as ROLE_COLUMNS
from attnscope.questions.heads import Heads
from attnscope.report.figures import pages
from attnscope.results.table import Column, Estimate, Table
from attnscope.studies.describe.study import add_lines

NAN = math.nan

# role: (threshold, uniform's value, what it is)
ROLES = {
    "previous_token": (0.4, 0.03, "attends to the token before"),
    "next_token": (0.4, 0.03, "attends to the token after"),
    "self_token": (0.4, 0.03, "attends to itself"),
    "same_token": (0.4, 0.01, "attends to the same token elsewhere in the text"),
    "induction": (0.4, 0.01, "attends to what followed an earlier occurrence of the same token"),
    "local": (0.6, 0.2, "attends within 3 tokens"),
    "first_token": (0.3, 0.03, "attends to the first token of the text"),
    "sink": (0.3, 0.03, "one key receives more than 0.3 of all attention"),
    "delimiter": (0.5, 0.12, "attends to special tokens and punctuation"),
    "rare": (0.4, 0.04, "attends most to the rarest token of the text"),
    "diffuse": (0.9, NAN, "spreads its attention over nearly all keys that it may attend to"),
    "similar_token": (0.2, 0.0, "attends to tokens whose static embedding is similar to the query's"),
}
# measure: (what, unit, least, largest, uniform's value)
MEASURES: dict[str, tuple[str, str, float | None, float | None, float]] = {
    "entropy_nats": ("entropy of the attention weights", "nats", 0, None, 3.3),
    "relative_entropy": ("entropy over ln of the keys that the mask allows", "share", 0, 1, 1.0),
    "max_weight": ("largest weight of a query, special tokens left out", "share", 0, 1, 0.03),
    "distance_tokens": ("mean distance to the key", "tokens", 0, None, 11.4),
    "signed_distance_tokens": (
        "mean signed distance, negative = to the left",
        "tokens",
        None,
        None,
        0.0,
    ),
    **{
        name: (what, "share", -1 if name == "similar_token" else 0, 1, uniform)
        for name, (_, uniform, what) in ROLES.items()
        if name not in ("diffuse", "sink", "delimiter", "rare")
    },
    "previous_token_active": ("the same without the resting keys", "share", 0, 1, 0.04),
    "punctuation": ("mass on punctuation", "share", 0, 1, 0.09),
}


@dataclass(frozen=True)
class Head:
    """A head of a made-up result; each role is a row of the table of roles."""

    kind: str
    layer: int
    head: int
    roles: Sequence[Mapping[str, Any]] = ()
    resting: float = 0.5
    measures: Mapping[str, Estimate] = field(default_factory=dict)


def heads_of(
    made: Sequence[Head],
    columns: Mapping[str, Column] = {},
    *,
    control: Sequence[Head] = (),
    run: Mapping[str, Any] = {},
    corpus: Mapping[str, Any] = {},
    options: Mapping[str, Any] = {},
) -> Heads:
    """A result of some heads; `columns` says what their measures are."""
    names = list(dict.fromkeys(name for head in made for name in head.measures))
    tables = {
        "heads": _table(made, [columns.get(name, Column(name)) for name in names]),
        "control": _table(control, []),
    }
    rows = [{"head": row, **role} for row, head in enumerate(made) for role in head.roles]
    parts = ("value_low", "value_high", "value_baseline")
    known = [*(column.name for column in ROLE_COLUMNS), *parts]
    tables["roles"] = Table.of_arrays(
        ROLE_COLUMNS, **{name: [row[name] for row in rows] for name in known}
    )
    return Heads(run, corpus, {"measures": names, **options}, tables)


def _table(made: Sequence[Head], measures: Sequence[Column]) -> Table:
    rows = []
    for head in made:
        role_names = "+".join(str(role["role"]) for role in head.roles)
        place = {"kind": head.kind, "layer": head.layer, "head": head.head, "role": role_names}
        rows.append({**place, "resting_share": head.resting, **head.measures})
    return Table.of([*Heads.TABLES["heads"], *measures], rows)


def fake_findings(
    n_layers: int = 6,
    n_heads: int = 12,
    *,
    kinds: tuple[str, ...] = ("encoder",),
    seed: int = 0,
    tentative: bool = False,
    control: bool = False,
    roles: tuple[str, ...] = tuple(ROLES),
    share_without: float = 0.35,
    model: str = "minilm",
) -> Heads:
    """A result of `n_layers` x `n_heads` heads a kind; about `share_without` of them are unclassified."""
    chance = np.random.default_rng(seed)
    places = [
        (kind, layer, head) for kind in kinds for layer in range(n_layers) for head in range(n_heads)
    ]
    made = [_head(chance, *place, roles, tentative, share_without) for place in places]
    compared = [_head(chance, *place, ("diffuse",), tentative, 0.1) for place in places]
    columns = {
        name: Column(name, what, unit, (least, largest))
        for name, (what, unit, least, largest, _) in MEASURES.items()
    }
    facts = {
        name: {"what": what, "measure": name, "threshold": threshold}
        for name, (threshold, _, what) in ROLES.items()
    }
    return heads_of(
        made,
        columns,
        control=compared if control else (),
        run={"model": model, "seed": seed},
        corpus={
            "sources": ["alice.txt"],
            "n_texts": 6 if tentative else 812,
            "n_tokens": 41234,
            "complete": True,
        },
        options={"level": 0.05, "split": "paragraph", "roles": facts},
    )


def role(name: str, value: float = 0.8, **changes: Any) -> dict[str, Any]:
    """A row of the table of roles."""
    threshold, baseline, _ = ROLES.get(name, (0.4, 0.02, ""))
    usual: dict[str, Any] = {
        "role": name,
        "measure": name,
        "value": value,
        "value_low": value - 0.02,
        "value_high": min(1.0, value + 0.02),
        "value_baseline": baseline,
        "threshold": threshold,
        "p": 1e-9,
        "q": 3e-8,
        "tentative": False,
        "active_share": NAN,
        "effective_texts": 50.0,
    }
    return usual | {
        f"value_{name}" if name in ("low", "high", "baseline") else name: one
        for name, one in changes.items()
    }


def _head(
    chance: np.random.Generator,
    kind: str,
    layer: int,
    head: int,
    names: tuple[str, ...],
    tentative: bool,
    none: float,
) -> Head:
    resting = float(chance.beta(0.6, 0.9))
    measures = {
        name: _estimate(chance, least, largest, uniform, tentative)
        for name, (_, _, least, largest, uniform) in MEASURES.items()
    }
    n_roles = 0 if chance.random() < none else int(chance.choice([1, 1, 1, 2, 2, 3, 4]))
    chosen = []
    for name in chance.permutation(names)[:n_roles]:
        threshold = ROLES.get(name, (0.4,))[0]
        chosen.append((name, float(chance.uniform(threshold, 1))))
    chosen.sort(key=lambda pair: -pair[1])
    nothing = {"value_low": NAN, "value_high": NAN, "p": NAN, "q": NAN, "tentative": True}
    given = []
    for number, (name, value) in enumerate(chosen):
        active = number == 0 and chance.random() < 0.3
        resting_on = {"measure": f"{name}_active", "active_share": 1 - resting} if active else {}
        given.append(role(str(name), value, **resting_on, **(nothing if tentative else {})))
    return Head(kind, layer, head, given, resting, measures)


def _estimate(
    chance: np.random.Generator,
    least: float | None,
    largest: float | None,
    uniform: float,
    tentative: bool,
) -> Estimate:
    if largest is not None:
        value = float(chance.beta(0.5, 2.5)) * largest
    elif least is not None:
        value = uniform * float(chance.beta(3, 2))
    else:
        value = float(chance.normal(0, 4))
    wide = abs(value) * 0.05
    low, high = (NAN, NAN) if tentative else (value - wide, value + wide)
    return Estimate(value, low, high, uniform, 41234.0)


def described_findings(
    n_layers: int = 3, n_heads: int = 4, kinds: tuple[str, ...] = ("encoder",)
) -> Heads:
    """The same, with a line for each head but the second, which spreads evenly; each explains more."""
    found = fake_findings(n_layers, n_heads, kinds=kinds)
    heads = found["heads"]
    summary = "tokens at most 4 away to the left (46%; uniform 10%)"
    lines: list[dict[str, Any]] = []
    for row, place in enumerate(
        zip(*(heads[name].tolist() for name in ("kind", "layer", "head")), strict=True)
    ):
        explained = 0.1 + 0.8 * row / len(heads)
        estimate = Estimate(explained, explained - 0.05, explained + 0.04)
        line = {
            "place": place,
            "description": f"{summary}; rests 30% on [CLS]",
            "summary": summary,
            "kl_explained": estimate,
            "nats": 2.0,
            "active_share": 0.7,
            "whole_explained": estimate,
            "whole_nats": 2.0,
            "first_term": "within_left",
            "other_half": "",
        }
        if row == 1:
            nothing = dict.fromkeys(("summary", "first_term", "other_half"), "")
            line = {
                "place": place,
                "description": "spreads evenly",
                **nothing,
                "nats": 0.04,
                "whole_nats": 0.04,
            }
        elif explained < 0.3:
            line["description"] = f"{summary}; mostly undescribed; rests 30% on [CLS]"
        lines.append(line)
    described = {"n_texts": 54, "n_queries": 2000, "n_scored": 27}
    return add_lines(replace(found, options={**found.options, "described": described}), lines)


def of(*made: Head, **more: Any) -> Heads:
    """A result of some heads alone."""
    return heads_of(made, **more)


def head(
    layer: int, number: int, *roles: Mapping[str, Any], kind: str = "encoder", resting: float = 0.5
) -> Head:
    """A head of one measure, with some roles."""
    return Head(kind, layer, number, roles, resting, {"local": Estimate(0.5, 0.4, 0.6, 0.2, 9)})


def written(page: Canvas) -> list[str]:
    """All texts on a page."""
    return [text.get_text() for text in page.axes.findobj(Written) if text.get_text()]


def page_of(found: Heads, stem: str) -> Any:
    """The figure of a name, such as measure-local."""
    named = stem.removeprefix("measure-") if stem.startswith("measure-") else None
    return next(page for name, page in pages(found, measures=named) if name == stem)
