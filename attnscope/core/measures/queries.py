"""Measures query by query: what is linear in the weights, and what holds whatever the weights are.

The catalogue has the source of each; the sums by query are ours.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from attnscope.core.attention.precision import move
from attnscope.core.measures.catalogue import MEASURES, OFFSETS, REACH, Keys, Pairs, Places, Row, Statistic
from attnscope.core.measures.facts import OFF_REST, TextFacts, key_columns, pair_facts

MASS = "mass"
"""The row of what a query gives to all keys together."""

BEYOND_UNIFORM = tuple(
    name for name, measure in MEASURES.items() if isinstance(measure.family, Pairs) and measure.family.beyond_uniform
)
"""Measures from which the value of uniform attention of the same mass is subtracted."""

Rows = dict[str, Tensor]
"""Name -> a number for each query, (batch, head, query)."""


def linear_rows(
    weights: Float[Tensor, "#batch head #query #key"],
    keys: TextFacts,
    queries: slice,
    key_range: slice,
    *,
    own_text: bool,
    columns: dict[str, Tensor] | None = None,
    cosines: Float[Tensor, "batch query key"] | None = None,
) -> Rows:
    """What is linear in the weights, query by query.

    Args:
        weights: Of some queries on some keys; with a single query if all have the same.
        keys: The texts of the keys.
        queries: Which queries these are.
        key_range: Which keys these are.
        own_text: Whether the queries are tokens of the same texts.
        columns: The `key_columns`, (batch, key) each, if they are known already.
        cosines: Of static embeddings, if they are known already.

    Returns:
        Name -> (batch, head, query), for the measures and their `_active`; OFF_REST, the mass on keys outside the
        sinks; and MASS, on all keys, 0 to 1. Units are the catalogue's. Uniform attention is not subtracted.
    """
    columns = key_columns(keys, weights.dtype) if columns is None else columns
    table = torch.stack(list(columns.values()), -1)[:, None, key_range]
    rows: Rows = dict(zip(columns, (weights @ table).unbind(-1), strict=True))
    rows[MASS] = weights.sum(-1)
    if not own_text:
        return rows
    off_rest = columns[OFF_REST][:, None, None, key_range]
    both = torch.stack([torch.ones_like(off_rest), off_rest], -1)[:, 0]
    pairs = pair_facts(keys, queries, key_range, weights.dtype, cosines)
    band = at_offsets(weights.expand(-1, -1, queries.stop - queries.start, -1), queries, key_range)
    band_active = band * at_offsets(off_rest.expand(-1, -1, band.shape[2], -1), queries, key_range)

    def add_up(function: Tensor, columns: Tensor) -> Tensor:
        if weights.shape[2] == 1:
            return function[:, None] @ (weights.mT * columns)
        return (weights * function[:, None]) @ columns

    for name, measure in MEASURES.items():
        match measure.family:
            case Places(offsets):
                index = [REACH + offset for offset in offsets]
                rows[name], rows[f"{name}_active"] = (part[..., index].sum(-1) for part in (band, band_active))
            case Pairs(fact) if fact in pairs:
                rows[name], rows[f"{name}_active"] = add_up(pairs[fact], both).unbind(-1)
            case Row("rms_distance"):
                rows[name] = add_up(pairs["distance"].square(), both[..., :1]).squeeze(-1).sqrt()
    return rows


@dataclass(frozen=True, eq=False)
class Ground:
    """What holds for some queries whatever the head's weights are: what is counted, and uniform attention.

    Each is (batch, mask head, query).

    Attributes:
        counted: Real queries that may attend to something, bool.
        n_allowed: How many keys the query may attend to.
        n_active: How many of them are outside the sinks.
        defined: Name -> whether the measure, or its `_active`, counts the query, bool.
        uniform: Name -> the measure's value under uniform attention; 0 where it is undefined. Under `_active` the value
            of attention that is uniform over the keys outside the sinks.
        worth: Statistic -> what a row's statistic is multiplied by: 1 where it counts, for relative_entropy
            1 / ln n_allowed, for rarest 1 / n_rarest.
        n_rarest: How many of the text's rarest tokens the query may attend to; None if they are unknown.
        band: (batch, mask head, query, offset), bool: whether the query may attend to its key at the offset.
    """

    counted: Tensor
    n_allowed: Tensor
    n_active: Tensor
    defined: dict[str, Tensor]
    uniform: Rows
    worth: dict[Statistic, Tensor]
    n_rarest: Tensor | None
    band: Tensor

    @cached_property
    def even(self) -> Rows:
        """`uniform`, with 0 for the measures that are told beyond it."""
        names = [name + ending for name in BEYOND_UNIFORM for ending in ("", "_active")]
        return self.uniform | {name: torch.zeros_like(self.uniform[name]) for name in names if name in self.uniform}

    def on(self, device: torch.device) -> "Ground":
        """The same on a device."""
        if self.counted.device == device:
            return self
        return Ground(**{field.name: _move(getattr(self, field.name), device) for field in fields(self)})


def ground(
    allowed: Bool[Tensor, "#batch mask_head #query #key"],
    keys: TextFacts,
    asking: Bool[Tensor, "batch query"],
    here: tuple[slice, slice],
    *,
    own_text: bool,
    dtype: torch.dtype = torch.float64,
    columns: dict[str, Tensor] | None = None,
    cosines: Float[Tensor, "batch query key"] | None = None,
) -> Ground:
    """Works out for some queries what does not depend on the head.

    Args:
        allowed: Which key each may attend to; a mask head or query of 1 stands for all.
        keys: The texts of the keys.
        asking: Which of the queries are tokens that count.
        here: Which queries and which keys these are; queries may attend to no other keys.
        own_text: Whether queries and keys are of one text.
        dtype: Precision of uniform values.
        columns: As for linear_rows.
        cosines: As for linear_rows.
    """
    may, n_queries = allowed.to(dtype), asking.shape[1]
    allowed = allowed.expand(-1, -1, n_queries, -1)
    even = may / may.sum(-1, keepdim=True).clamp(min=1)
    uniform = linear_rows(even, keys, *here, own_text=own_text, columns=columns, cosines=cosines)
    n_rarest = None if keys.rarest is None else (may * keys.rarest[:, None, None, here[1]]).sum(-1)
    sees_end = at_key(allowed, keys.final_special, here[1])
    band = at_offsets(allowed, *here)
    return ground_of(may.sum(-1), uniform, n_rarest, sees_end, band, asking, own_text=own_text)


def ground_of(
    n_allowed: Float[Tensor, "#batch mask_head #query"],
    uniform: Rows,
    n_rarest: Float[Tensor, "#batch mask_head #query"] | None,
    sees_end: Bool[Tensor, "#batch mask_head #query"],
    band: Bool[Tensor, "#batch mask_head query offset"],
    asking: Bool[Tensor, "batch query"],
    *,
    own_text: bool,
) -> Ground:
    """What is counted of queries, from the rows of uniform attention.

    Args:
        n_allowed: How many keys each may attend to.
        uniform: As `linear_rows`, of uniform attention; shapes as of n_allowed.
        n_rarest: How many of the text's rarest tokens each may attend to; None if they are unknown.
        sees_end: Whether it may attend to the text's final special token.
        band: Whether it may attend to its key at each offset.
        asking: Which queries are tokens that count.
        own_text: Whether queries and keys are of one text.
    """
    dtype, shape = n_allowed.dtype, (len(asking), n_allowed.shape[1], asking.shape[1])
    n_allowed = n_allowed.expand(shape)
    uniform = {name: row.expand(shape) for name, row in uniform.items()}
    counted = (n_allowed > 0) & asking[:, None]
    share = 1 / n_allowed.clamp(min=1)
    some_active = counted & (uniform[OFF_REST] > 0)
    defined = {}
    for name, row in uniform.items():
        measure = MEASURES.get(name.removesuffix("_active"))
        basis = some_active if name.endswith("_active") else counted
        is_set = measure is not None and (
            isinstance(measure.family, Places) or getattr(measure.family, "is_set", False)
        )
        defined[name] = basis & (row > 0) if is_set else basis
    n_active = (uniform[OFF_REST] * n_allowed).round()
    statistics: dict[Statistic, tuple[Tensor, Tensor]] = {
        "entropy": (counted, n_allowed.clamp(min=1).log()),
        "relative_entropy": (counted & (n_allowed >= 2), torch.ones_like(share)),
        "max_weight": (counted & (n_allowed > sees_end.to(dtype)), share),
    }
    if n_rarest is not None:
        n_rarest = n_rarest.expand(shape)
        statistics["rarest"] = counted & (n_rarest > 0), share
    worth = {statistic: of.to(dtype) for statistic, (of, _) in statistics.items()}
    worth["relative_entropy"] /= n_allowed.clamp(min=2).log()
    if n_rarest is not None:
        worth["rarest"] /= n_rarest.clamp(min=1)
    for name, measure in MEASURES.items():
        if isinstance(measure.family, Row) and measure.family.statistic in statistics:
            defined[name], uniform[name] = statistics[measure.family.statistic]
        elif isinstance(measure.family, Keys) and measure.family.of_layer and not measure.family.is_set:
            defined[name], defined[f"{name}_active"] = counted, some_active
    band = band & counted[..., None] if own_text else torch.zeros_like(band).expand(*shape, -1)
    active = uniform[OFF_REST].clamp(min=torch.finfo(dtype).tiny)
    uniform |= {name: row / active for name, row in uniform.items() if name.endswith("_active")}
    return Ground(counted, n_allowed, n_active, defined, uniform, worth, n_rarest, band)


def _move(numbers: Any, device: torch.device) -> Any:
    if isinstance(numbers, dict):
        return {name: move(part, device) for name, part in numbers.items()}
    return None if numbers is None else move(numbers, device)


def at_key(
    rows: Shaped[Tensor, "batch head query key"], keys: Int[Tensor, " batch"], key_range: slice
) -> Shaped[Tensor, "batch head query"]:
    """The number of each row at one key of each text; 0 where the key is -1 or not among these."""
    index = keys - key_range.start
    inside = (keys >= 0) & (index >= 0) & (index < rows.shape[3])
    if rows.shape[3] == 0:
        return rows.new_zeros(rows.shape[:3])
    index = index.clamp(0, rows.shape[3] - 1)[:, None, None, None].expand(-1, rows.shape[1], rows.shape[2], 1)
    return rows.gather(-1, index).squeeze(-1).masked_fill_(~inside[:, None, None], 0)


def at_offsets(
    rows: Shaped[Tensor, "batch head query key"], queries: slice, key_range: slice
) -> Shaped[Tensor, "batch head query offset"]:
    """The numbers of each row at each of OFFSETS from the query; 0 beyond the keys."""
    device = rows.device
    if rows.shape[3] == 0:
        return rows.new_zeros(*rows.shape[:3], len(OFFSETS))
    index = torch.arange(queries.start, queries.stop, device=device)[:, None] + torch.tensor(OFFSETS, device=device)
    index = index - key_range.start
    inside = (index >= 0) & (index < rows.shape[3])
    band = rows.gather(-1, index.clamp(0, rows.shape[3] - 1).expand(*rows.shape[:2], -1, -1))
    return band.masked_fill_(~inside, 0)
