"""Measures query by query: what is linear in the weights, and what holds whatever the weights are.

The source of each is in the catalogue; that they are told query by query is ours.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from attnscope.core.measures.catalogue import OFFSETS, REACH, WINDOW
from attnscope.core.measures.facts import TextFacts, key_columns, pair_targets

Rows = dict[str, Tensor]
"""Name -> a number for each query, (batch, head, query)."""


def linear_rows(
    weights: Float[Tensor, "batch head query key"],
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
        weights: Of some queries on some keys, (batch, head, query, key).
        keys: The texts of the keys.
        queries: Which queries these are.
        key_range: Which keys these are.
        own_text: Whether the queries are tokens of the same texts.
        columns: What `key_columns` says of the keys, (batch, key) each, where that is known already.
        cosines: Of static embeddings, (batch, query, key), where they are known already.

    Returns:
        Name -> (batch, head, query), for the measures and their `_active`; `active`, the mass on keys that nobody rests
        on; and `mass`, on all keys, 0 to 1. Units are the catalogue's. similar_token is not yet less what uniform
        attention has.
    """
    columns = key_columns(keys, weights.dtype) if columns is None else columns
    table = torch.stack(list(columns.values()), -1)[:, None, key_range]
    rows: Rows = dict(zip(columns, (weights @ table).unbind(-1), strict=True))
    rows["mass"] = weights.sum(-1)
    if not own_text:
        return rows
    device, dtype = weights.device, weights.dtype
    q = torch.arange(queries.start, queries.stop, device=device)
    k = torch.arange(key_range.start, key_range.stop, device=device)
    off_rest = columns["active"][:, None, None, key_range]
    band = at_offsets(weights, queries, key_range)
    band_active = band * at_offsets(off_rest.expand(-1, -1, len(q), -1), queries, key_range)
    for ending, part in (("", band), ("_active", band_active)):
        for name, offset in (("previous_token", -1), ("self_token", 0), ("next_token", 1)):
            rows[name + ending] = part[..., REACH + offset]
        rows[f"window{ending}"] = part[..., REACH - WINDOW : REACH + WINDOW + 1].sum(-1)
    distances = (k - q[:, None]).to(dtype)
    same, followed = pair_targets(keys, queries, key_range)
    pairs: dict[str, Tensor] = {
        "distance_tokens": distances.abs(),
        "signed_distance_tokens": distances,
        "same_token": same[:, None].to(dtype),
        "induction": followed[:, None].to(dtype),
    }
    if keys.embeddings is not None:
        directions = keys.embeddings.to(dtype)
        likeness = directions[:, queries] @ directions[:, key_range].mT if cosines is None else cosines
        pairs["similar_token"] = likeness[:, None]
    for name, worth in pairs.items():
        weighted = weights * worth
        rows[name] = weighted.sum(-1)
        rows[f"{name}_active"] = (weighted * off_rest).sum(-1)
    rows["rms_distance_tokens"] = (weights * distances.square()).sum(-1).sqrt()
    return rows


_SETS = frozenset(
    {"first_token", "cls", "sep", "special", "punctuation", "previous_token", "self_token", "next_token", "window"}
    | {"same_token", "induction"}
)
"""Measures of the mass on certain keys: undefined for a query that may attend to none of them."""


@dataclass(frozen=True, eq=False)
class Ground:
    """What holds for some queries whatever the head's weights are: what is counted, and uniform attention.

    Attributes:
        counted: (batch, mask head, query), bool: real queries that may attend to something.
        n_allowed: Likewise: how many keys the query may attend to.
        n_active: Likewise: how many of them nobody rests on.
        defined: Name -> likewise, bool: whether the measure, or its `_active`, counts the query.
        uniform: Name -> likewise: the measure's value under uniform attention; 0 where it is undefined. Of `_active`
            the value of attention that is uniform over the keys that nobody rests on.
        n_rarest: Likewise: how many of the text's rarest tokens the query may attend to; None where they are unknown.
        band: (batch, mask head, query, offset), bool: whether the query may attend to its key at the offset.
    """

    counted: Tensor
    n_allowed: Tensor
    n_active: Tensor
    defined: dict[str, Tensor]
    uniform: Rows
    n_rarest: Tensor | None
    band: Tensor


def ground(
    allowed: Bool[Tensor, "batch mask_head query key"],
    keys: TextFacts,
    asking: Bool[Tensor, "batch query"],
    queries: slice,
    key_range: slice,
    *,
    own_text: bool,
    dtype: torch.dtype = torch.float64,
    columns: dict[str, Tensor] | None = None,
    cosines: Float[Tensor, "batch query key"] | None = None,
) -> Ground:
    """Works out for some queries what does not depend on the head.

    Args:
        allowed: Which key each may attend to, (batch, mask head, query, key), bool; mask head is 1 if all share it.
        keys: The texts of the keys.
        asking: Which of the queries are tokens that count, (batch, query).
        queries: Which queries these are.
        key_range: Which keys these are; queries may attend to no others.
        own_text: Whether queries and keys are of one text.
        dtype: Precision of uniform values.
        columns: As for linear_rows.
        cosines: As for linear_rows.
    """
    may = allowed.to(dtype)
    n_allowed = may.sum(-1)
    counted = (n_allowed > 0) & asking[:, None]
    share = 1 / n_allowed.clamp(min=1)
    uniform = linear_rows(
        may * share[..., None], keys, queries, key_range, own_text=own_text, columns=columns, cosines=cosines
    )
    some_active = counted & (uniform["active"] > 0)
    defined = {}
    for name, row in uniform.items():
        base = name.removesuffix("_active")
        basis = counted if base == name else some_active
        defined[name] = basis & (row > 0) if base in _SETS else basis
    uniform["entropy_nats"] = n_allowed.clamp(min=1).log()
    uniform["relative_entropy"] = torch.ones_like(share)
    uniform["max_weight"] = share
    defined["entropy_nats"] = counted
    defined["relative_entropy"] = counted & (n_allowed >= 2)
    defined["max_weight"] = counted & (n_allowed > at_key(allowed, keys.final_special, key_range).to(dtype))
    n_rarest = None
    if keys.rarest is not None:
        n_rarest = (may * keys.rarest[:, None, None, key_range]).sum(-1)
        defined["rarest_token"] = counted & (n_rarest > 0)
        uniform["rarest_token"] = share
    for name in ("value_weighted", "norm_weighted"):
        defined[name], defined[f"{name}_active"] = counted, some_active
    band = at_offsets(allowed, queries, key_range) & counted[..., None]
    if not own_text:
        band = torch.zeros_like(band)
    active = uniform["active"].clamp(min=torch.finfo(dtype).tiny)
    uniform |= {name: row / active for name, row in uniform.items() if name.endswith("_active")}
    return Ground(counted, n_allowed, (uniform["active"] * n_allowed).round(), defined, uniform, n_rarest, band)


def at_key(
    rows: Shaped[Tensor, "batch head query key"], places: Int[Tensor, " batch"], key_range: slice
) -> Shaped[Tensor, "batch head query"]:
    """What rows have at one key of each text: (batch, head, query) of (batch, head, query, key); 0 where it is -1."""
    index = places - key_range.start
    inside = (places >= 0) & (index >= 0) & (index < rows.shape[3])
    if rows.shape[3] == 0:
        return rows.new_zeros(rows.shape[:3])
    index = index.clamp(0, rows.shape[3] - 1)[:, None, None, None].expand(-1, rows.shape[1], rows.shape[2], 1)
    found: Tensor = rows.gather(-1, index).squeeze(-1)
    return found.masked_fill_(~inside[:, None, None], 0)


def at_offsets(
    rows: Shaped[Tensor, "batch head query key"], queries: slice, key_range: slice
) -> Shaped[Tensor, "batch head query offset"]:
    """What rows have at each of OFFSETS from the query: (batch, head, query, offset); 0 beyond the keys."""
    device = rows.device
    if rows.shape[3] == 0:
        return rows.new_zeros(*rows.shape[:3], len(OFFSETS))
    index = torch.arange(queries.start, queries.stop, device=device)[:, None] + torch.tensor(OFFSETS, device=device)
    index = index - key_range.start
    inside = (index >= 0) & (index < rows.shape[3])
    found = rows.gather(-1, index.clamp(0, rows.shape[3] - 1).expand(*rows.shape[:2], -1, -1))
    return found.masked_fill_(~inside, 0)
