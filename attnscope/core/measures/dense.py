"""The definition of all measures on dense weights, and what it shares with `sums`, which needs none.

The source of each is in the catalogue; how they are added up is ours.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnscope.core.measures.catalogue import MEASURES, Keys, Row, Statistic, measure_names, unit_queries
from attnscope.core.measures.facts import OFF_REST, TextFacts, value_norms
from attnscope.core.measures.queries import BEYOND_UNIFORM, MASS, Ground, Rows, at_offsets, ground, linear_rows
from attnscope.core.measures.totals import SumsOf, Totals, internal_names, join_totals

NORMS = {
    name: measure.family
    for name, measure in MEASURES.items()
    if isinstance(measure.family, Keys) and measure.family.of_layer and not measure.family.is_set
}
"""Measures of the norms that keys have to give in a layer."""


OUTLYING_TOLD = tuple(
    name for name, measure in MEASURES.items() if isinstance(measure.family, Keys) and measure.family.fact == "outlying"
)
"""Measures of the mass on outlying tokens."""


def add_rows(totals: Totals, units: slice, rows: Rows, base: Ground) -> None:
    """Adds up measures that are known query by query, by their rows, (unit, head, query), OFF_REST among them.

    `base` is what the mask and the texts say of these queries.
    """
    names = [name for name in base.defined if name in totals]
    if not names:
        return
    counts = torch.stack([base.defined[name] for name in names]).to(base.n_allowed.dtype)
    is_active = torch.tensor([name.endswith("_active") for name in names], device=counts.device)
    share = torch.where(is_active[:, None, None, None], rows[OFF_REST], 1.0)
    totals.add_several(names, units, (counts * share).sum(-1), "count")
    valued = [i for i, name in enumerate(names) if name in rows]
    if not valued:
        return
    values = torch.stack([rows[names[i]].expand_as(rows[OFF_REST]) for i in valued])
    totals.add_several([names[i] for i in valued], units, (values * counts[valued]).sum(-1), "sum")


def add_uniform(totals: Totals, units: slice, base: Ground) -> Tensor:
    """Adds the values of uniform attention on some queries, except for `_active`.

    Returns:
        1 where a query may attend to the key at an offset, else 0, (unit, mask head, query, offset).
    """
    of_all = {name: part for name, part in base.defined.items() if not name.endswith("_active")}
    add_rows(totals, units, base.even, replace(base, defined=of_all))
    band = base.band.to(base.n_allowed.dtype)
    share = 1 / base.n_allowed.clamp(min=1)
    totals.add_offsets(units, (band * share[..., None]).sum(2), band.sum(2))
    return band


def measures_of_weights(
    weights: Float[Tensor, "batch head query key"],
    keys: TextFacts,
    queries: TextFacts | None = None,
    *,
    allowed: Tensor | None = None,
    values: Float[Tensor, "batch kv_head key d_value"] | None = None,
    factor: Float[Tensor, "head d d_value"] | None = None,
    measures: Iterable[str] | None = None,
    outlying: Bool[Tensor, "batch key"] | None = None,
) -> SumsOf:
    """All measures of one layer from its dense weights: their definition, and the way of models that only have these.

    Computed in float64, one text at a time, as MEASURES states them. It takes a few arrays as large as a text's
    weights.

    Args:
        weights: In any precision.
        keys: The texts that the keys are of.
        queries: In cross attention the texts that the queries are of; None = the same. Measures that compare places are
            undefined in cross attention.
        allowed: Which query may attend to which key, boolean, broadcastable to (batch, head, query, key). None = where
            any head puts weight: right, except for weights so small that they are 0 in every head.
        values: For value_weighted; None leaves it undefined.
        factor: `output_factor` of the layer, for norm_weighted; None leaves it undefined.
        measures: Which of MEASURES; None = all.
        outlying: Which keys are outlying (`facts.outlying`), for outlier_token; None leaves it undefined.

    Returns:
        Sums and counts by unit and head. Blocks of `unit_queries` of a longer text are units of their own.

    Raises:
        ValueError: Shapes do not fit together, or a measure is unknown.
    """
    own_text = queries is None
    of_queries = keys if queries is None else queries
    batch, n_heads, n_queries, n_keys = weights.shape
    if keys.real.shape != (batch, n_keys) or of_queries.real.shape != (batch, n_queries):
        raise ValueError(
            f"weights {tuple(weights.shape)} are not of texts of {tuple(of_queries.real.shape)} queries and "
            f"{tuple(keys.real.shape)} keys"
        )
    names = internal_names(measures)
    size = unit_queries(n_queries)
    parts = [slice(start, min(start + size, n_queries)) for start in range(0, n_queries, size)] or [slice(0, 0)]
    every_key = slice(0, n_keys)
    may = (weights > 0).any(1, keepdim=True) if allowed is None else allowed
    may = may[(None,) * (4 - may.ndim)].expand(batch, -1, n_queries, n_keys)
    totals, uniform = (Totals(names, batch * len(parts), n_heads) for _ in range(2))
    norms = key_norms(totals, values, n_heads, factor)
    received = torch.zeros(batch, n_heads, n_keys, dtype=torch.float64, device=weights.device)
    evenly = torch.zeros(batch, may.shape[1], n_keys, dtype=torch.float64, device=weights.device)
    counted = torch.zeros(batch, may.shape[1], dtype=torch.float64, device=weights.device)
    for unit, (t, some) in enumerate((t, some) for t in range(batch) for some in parts):
        texts, units, here = slice(t, t + 1), slice(unit, unit + 1), (some, every_key)
        text = keys.part(texts)
        part, may_here = weights[texts, :, some].double(), may[texts, :, some]
        base = ground(may_here, text, of_queries.asking[texts, some], here, own_text=own_text)
        band = add_uniform(uniform, units, base)
        rows = linear_rows(part, text, *here, own_text=own_text)
        rows |= _rows_of_weights(part, text, base, rows)
        add_rows(totals, units, rows, base)
        active = {name: part for name, part in base.defined.items() if name.endswith("_active")}
        even = {name: base.even[name] * rows[OFF_REST] for name in active if name in base.even}
        even[OFF_REST] = rows[OFF_REST]
        add_rows(uniform, units, even, replace(base, defined=active))
        largest = part.amax(-1, keepdim=True) if n_keys else part.sum(-1, keepdim=True)
        hits = (at_offsets(part, *here) == largest) / (part == largest).sum(-1, keepdim=True).clamp(min=1)
        totals.add_offsets(units, (hits * band).sum(2), band.sum(2))
        is_counted = base.counted.double()
        share = rows[OFF_REST] * is_counted / base.n_active.clamp(min=1)
        of_unit = Received(
            (part * is_counted[..., None]).sum(2),
            (may_here * (is_counted / base.n_allowed.clamp(min=1))[..., None]).sum(2),
            (may_here * share[..., None]).sum(2),
        )
        off_rest = (text.real & ~text.resting).double()
        add_received(totals, uniform, units, off_rest, of_unit, {name: norm[texts] for name, norm in norms.items()})
        received[texts] += of_unit.mass
        evenly[texts] += of_unit.evenly
        counted[texts] += is_counted.sum(-1)
        if outlying is not None:
            sees = (may_here & outlying[texts, None, None]).any(-1) * is_counted
            counts = torch.stack([sees.expand_as(rows[OFF_REST]), rows[OFF_REST] * sees], -1).sum(2)
            add_outlying(totals, uniform, units, outlying[texts], of_unit, counts)
    for of, mass in ((totals, received), (uniform, evenly)):
        clear_unknown(of, norms)
        of.finish_texts(mass, counted)
    return join_totals(totals, uniform, measure_names(measures))


def _rows_of_weights(weights: Tensor, keys: TextFacts, base: Ground, linear: Rows) -> Rows:
    """What is not linear in the weights, query by query, and what exceeds uniform attention."""
    entropy = torch.special.entr(weights).sum(-1)
    ends = torch.arange(weights.shape[3], device=weights.device) == keys.final_special[:, None, None, None]
    padded = torch.nn.functional.pad(weights, (0, 1))  # a row of no keys has no largest one
    largest = padded.amax(-1)
    statistics: dict[Statistic, Tensor] = {
        "entropy": entropy,
        "relative_entropy": entropy / base.n_allowed.clamp(min=2).log(),
        "max_weight": torch.nn.functional.pad(weights.masked_fill(ends, 0.0), (0, 1)).amax(-1),
    }
    if keys.rarest is not None:
        assert base.n_rarest is not None
        ties = (weights == largest[..., None]).sum(-1).clamp(min=1)
        hits = ((weights == largest[..., None]) & keys.rarest[:, None, None]).sum(-1)
        statistics["rarest"] = hits / ties / base.n_rarest.clamp(min=1)
    rows: Rows = {}
    for name, measure in MEASURES.items():
        if isinstance(measure.family, Row) and measure.family.statistic in statistics:
            rows[name] = statistics[measure.family.statistic]
        elif name in BEYOND_UNIFORM and name in linear:
            for ending, mass in (("", MASS), ("_active", OFF_REST)):
                rows[name + ending] = linear[name + ending] - linear[mass] * base.uniform[name + ending]
    return rows


@dataclass(frozen=True, eq=False)
class Received:
    """What keys receive from the queries of some units, one unit of a text.

    Attributes:
        mass: Sum over the queries of A_qk.
        evenly: Likewise under uniform attention.
        evenly_active: What each key would receive if a head spread its mass off the sinks evenly over the keys outside
            them, resting keys included.
    """

    mass: Float[Tensor, "unit head key"]
    evenly: Float[Tensor, "unit mask_head key"]
    evenly_active: Float[Tensor, "unit head key"]


def add_outlying(
    totals: Totals, uniform: Totals, units: slice, mask: Tensor, received: Received, counts: Tensor
) -> None:
    """Adds the mass on outlying tokens, `mask`, (unit, key); none is a resting key, so `_active` has the same sum.

    `counts`: queries that may attend to an outlying token, and their mass off resting keys, (unit, head, 2).
    """
    worth = mask.to(received.mass.dtype)[:, None]
    for name in OUTLYING_TOLD:
        for ending, even, i in (("", received.evenly, 0), ("_active", received.evenly_active, 1)):
            totals.add(name + ending, units, (received.mass * worth).sum(-1), counts[..., i])
            uniform.add(name + ending, units, (even * worth).sum(-1))


def key_norms(wanted: Totals, values: Tensor | None, n_heads: int, factor: Tensor | None) -> Rows:
    """Norms of what each key has to give, by wanted measure, (batch, head, key), at least 0; unknown ones are missing.

    Values are (batch, kv_head, key, d_value), of width 0 or None if they are not known; `factor` is `output_factor`, or
    None.
    """
    if values is None or not values.shape[-1]:
        return {}
    by = {"value_norm": None} | ({"output_norm": factor} if factor is not None else {})
    return {
        name: value_norms(values, n_heads, by[family.fact])
        for name, family in NORMS.items()
        if name in wanted and family.fact in by
    }


def add_received(
    totals: Totals, uniform: Totals, units: slice, off_rest: Tensor, received: Received, norms: Rows
) -> None:
    """Adds the norms behind the mass that keys received; `off_rest` is 1 for keys outside the sinks, (unit, key)."""
    if not norms:
        return
    names = [name + ending for name in norms for ending in ("", "_active")]
    worth = torch.stack(list(norms.values())).to(received.mass.dtype)  # (measure, unit, head, key)
    both = torch.stack([torch.ones_like(off_rest), off_rest], -1)  # (unit, key, 2)
    even = (received.evenly * worth).sum(-1), (received.evenly_active * off_rest[:, None] * worth).sum(-1)
    for of, sums in ((totals, (received.mass * worth) @ both), (uniform, torch.stack(even, -1))):
        of.add_several(names, units, sums.permute(0, 3, 1, 2).flatten(0, 1), "sum")


def clear_unknown(part: Totals, norms: Rows) -> None:
    """Makes measures undefined that are missing in `norms`, as `key_norms` gives them."""
    for name in set(NORMS) - norms.keys():
        part.clear(name)
