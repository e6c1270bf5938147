"""The definition of all measures on dense weights, and what it shares with `core.sums`, which needs none."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from attnscope.core.measures.catalogue import measure_names
from attnscope.core.measures.facts import TextFacts
from attnscope.core.measures.norms import value_norms
from attnscope.core.measures.queries import Ground, Rows, at_offsets, ground, linear_rows
from attnscope.core.measures.totals import SumsOf, Totals, internal_names, joined


def add_rows(totals: Totals, texts: slice, rows: Rows, given: Ground) -> None:
    """Adds up measures that are known query by query.

    Args:
        totals: What to add to.
        texts: Which texts the rows are of.
        rows: Name -> (text, head, query); `active` among them.
        given: What the mask and the texts say of these queries.
    """
    names = [name for name in given.defined if name in totals]
    if not names:
        return
    counts = torch.stack([given.defined[name] for name in names]).to(given.n_allowed.dtype)
    is_active = torch.tensor([name.endswith("_active") for name in names], device=counts.device)
    share = torch.where(is_active[:, None, None, None], rows["active"], 1.0)
    totals.add_several(names, texts, (counts * share).sum(-1), "count")
    known = [i for i, name in enumerate(names) if name in rows]
    if not known:
        return
    values = torch.stack([rows[names[i]].expand_as(rows["active"]) for i in known])
    totals.add_several([names[i] for i in known], texts, (values * counts[known]).sum(-1), "sum")


def add_uniform(totals: Totals, texts: slice, given: Ground) -> Tensor:
    """Adds what uniform attention has on some queries, but for `_active`; returns which offsets each may attend to."""
    rows = given.uniform | uniform_likeness(given)
    of_all = {name: part for name, part in given.defined.items() if not name.endswith("_active")}
    add_rows(totals, texts, rows, replace(given, defined=of_all))
    band = given.band.to(given.n_allowed.dtype)
    share = 1 / given.n_allowed.clamp(min=1)
    totals.add_offsets(texts, (band * share[..., None]).sum(2), band.sum(2))
    return band


def uniform_likeness(given: Ground) -> Rows:
    """Likeness under uniform attention: none, as it is told less what that has, which `given.uniform` holds."""
    return {name: torch.zeros_like(row) for name, row in given.uniform.items() if name.startswith("similar_token")}


def measures_of_weights(
    weights: Tensor,
    keys: TextFacts,
    queries: TextFacts | None = None,
    *,
    allowed: Tensor | None = None,
    values: Tensor | None = None,
    factor: Tensor | None = None,
    measures: Iterable[str] | None = None,
    outlying: Tensor | None = None,
) -> SumsOf:
    """All measures of one layer from its dense weights: their definition, and the road for models that only have these.

    Computed in float64, one text at a time, as MEASURES states them. A few arrays as large as a text's weights.

    Args:
        weights: (batch, head, query, key), any precision.
        keys: The texts that the keys are of.
        queries: In cross attention the texts that the queries are of; None = the same. Measures that compare places
            are undefined in cross attention.
        allowed: Which query may attend to which key, boolean, broadcastable to (batch, head, query, key). None = where
            any head puts weight: right but for weights so small that they are 0 in every head.
        values: (batch, kv_head, key, d_value), for value_weighted; None leaves it undefined.
        factor: `output_factor` of the layer, for norm_weighted; None leaves it undefined.
        measures: Which of MEASURES; None = all.
        outlying: Which keys are outlying (`facts.outlying`), (batch, key), for outlier_token; None leaves it undefined.

    Returns:
        Sums and counts by text and head.

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
    everything = (slice(0, n_queries), slice(0, n_keys))
    may = (weights > 0).any(1, keepdim=True) if allowed is None else allowed
    may = may[(None,) * (4 - may.ndim)].expand(batch, -1, n_queries, n_keys)
    totals, uniform = Totals(names, batch, n_heads), Totals(names, batch, n_heads)
    received = torch.zeros(batch, n_heads, n_keys, dtype=torch.float64, device=weights.device)
    evenly = torch.zeros(batch, may.shape[1], n_keys, dtype=torch.float64, device=weights.device)
    evenly_active = torch.zeros_like(received)
    seeing = torch.zeros(batch, n_heads, 2, dtype=torch.float64, device=weights.device)
    counted = torch.zeros(batch, may.shape[1], dtype=torch.float64, device=weights.device)
    for t in range(batch):
        texts = slice(t, t + 1)
        text = keys.part(texts)
        part = weights[texts].double()
        given = ground(may[texts], text, of_queries.asking[texts], *everything, own_text=own_text)
        band = add_uniform(uniform, texts, given)
        rows = linear_rows(part, text, *everything, own_text=own_text)
        rows |= _rows_of_weights(part, text, given, rows)
        add_rows(totals, texts, rows, given)
        active = {name: part for name, part in given.defined.items() if name.endswith("_active")}
        even = given.uniform | uniform_likeness(given)
        even = {name: even[name] * rows["active"] for name in active if name in even} | {"active": rows["active"]}
        add_rows(uniform, texts, even, replace(given, defined=active))
        largest = part.amax(-1, keepdim=True) if n_keys else part.sum(-1, keepdim=True)
        hits = (at_offsets(part, *everything) == largest) / (part == largest).sum(-1, keepdim=True).clamp(min=1)
        totals.add_offsets(texts, (hits * band).sum(2), band.sum(2))
        is_counted = given.counted.double()
        received[texts] = (part * is_counted[..., None]).sum(2)
        evenly[texts] = (may[texts] * (is_counted / given.n_allowed.clamp(min=1))[..., None]).sum(2)
        share = rows["active"] * is_counted / given.n_active.clamp(min=1)
        evenly_active[texts] = (may[texts] * share[..., None]).sum(2)
        counted[texts] = is_counted.sum(-1)
        if outlying is not None:
            sees = (may[texts] & outlying[texts, None, None]).any(-1) * is_counted
            seeing[texts] = torch.stack([sees.expand_as(rows["active"]), rows["active"] * sees], -1).sum(2)
    if outlying is not None:
        add_outlying(totals, uniform, outlying, received, (evenly, evenly_active), seeing)
    finish(totals, uniform, keys, received, (evenly, evenly_active), counted, values, factor)
    return joined(totals, uniform, measure_names(measures))


def _rows_of_weights(weights: Tensor, keys: TextFacts, given: Ground, linear: Rows) -> Rows:
    """What is not linear in the weights, query by query, and similar_token less what uniform attention has."""
    entropy = torch.special.entr(weights).sum(-1)
    ends = torch.arange(weights.shape[3], device=weights.device) == keys.final_special[:, None, None, None]
    padded = torch.nn.functional.pad(weights, (0, 1))  # a row of no keys has no largest one
    largest = padded.amax(-1)
    ties = (weights == largest[..., None]).sum(-1).clamp(min=1)
    rows = {
        "entropy_nats": entropy,
        "relative_entropy": entropy / given.n_allowed.clamp(min=2).log(),
        "max_weight": torch.nn.functional.pad(weights.masked_fill(ends, 0.0), (0, 1)).amax(-1),
    }
    if keys.rarest is not None:
        assert given.n_rarest is not None
        hits = ((weights == largest[..., None]) & keys.rarest[:, None, None]).sum(-1)
        rows["rarest_token"] = hits / ties / given.n_rarest.clamp(min=1)
    if "similar_token" in linear:
        for name, mass in (("similar_token", "mass"), ("similar_token_active", "active")):
            rows[name] = linear[name] - linear[mass] * given.uniform[name]
    return rows


def add_outlying(
    totals: Totals, uniform: Totals, mask: Tensor, received: Tensor, evenly: tuple[Tensor, Tensor], counts: Tensor
) -> None:
    """Adds the mass on outlying tokens; none of them is a resting key, so that `_active` has the same sum.

    Args:
        totals: Of the heads.
        uniform: Of uniform attention, for each head.
        mask: Which tokens are outlying, (batch, key), bool.
        received: As for `finish`.
        evenly: Likewise.
        counts: Queries that may attend to an outlying token, and their mass off resting keys, (batch, head, 2).
    """
    whole, worth = slice(0, len(mask)), mask.to(received.dtype)[:, None]
    for ending, even, i in (("", evenly[0], 0), ("_active", evenly[1], 1)):
        totals.add(f"outlier_token{ending}", whole, (received * worth).sum(-1), counts[..., i])
        uniform.add(f"outlier_token{ending}", whole, (even * worth).sum(-1))


def finish(
    totals: Totals,
    uniform: Totals,
    keys: TextFacts,
    received: Tensor,
    evenly: tuple[Tensor, Tensor],
    counted: Tensor,
    values: Tensor | None,
    factor: Tensor | None,
) -> None:
    """Adds what needs all queries of a text: received mass, the norms behind it, and sinks.

    Args:
        totals: Of the heads.
        uniform: Of uniform attention, for each head.
        keys: The texts of the keys.
        received: The mass that each key received, (batch, head, key).
        evenly: Likewise under uniform attention, (batch, mask head, key); and what each key would receive if a head
            spread what it does not rest evenly over the keys that nobody rests on, (batch, head, key), resting keys
            included.
        counted: How many queries were counted, (batch, mask head).
        values: (batch, kv_head, key, d_value), or None.
        factor: `output_factor`, or None.
    """
    n_heads = received.shape[1]
    off_rest = (keys.real & ~keys.resting).to(received.dtype)
    both = torch.stack([torch.ones_like(off_rest), off_rest], -1)  # (batch, key, 2)
    of_heads: dict[str, Tensor] = {}
    of_uniform: dict[str, Tensor] = {}
    for name, by in (("value_weighted", None), ("norm_weighted", factor)):
        if values is None or name not in totals or (name == "norm_weighted" and factor is None):
            continue
        norm = value_norms(values, n_heads, by).to(received.dtype)
        of_heads[name] = (received * norm) @ both
        parts = (evenly[0] * norm).sum(-1), (evenly[1] * norm * off_rest[:, None]).sum(-1)
        of_uniform[name] = torch.stack(parts, -1)
    for part, mass, norms in ((totals, received, of_heads), (uniform, evenly[0], of_uniform)):
        largest = mass.amax(-1) if mass.shape[2] else mass.sum(-1)
        part.finish_keys(largest.expand(-1, n_heads), counted, norms)
        part.finish_sinks()
