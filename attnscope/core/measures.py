"""The catalogue of head measures, what they must know of a text, and their definition on dense weights.

Every measure is a sum and a count for each text and head, never a mean: padding, batches, shards and merges then stay
exact, and a value is sum / count over whatever was added up. Two rules hold for all:

* Queries that are padding, or that may attend to nothing, count 0. A query for which a measure makes no sense counts 0
  too: for a measure of the mass on certain keys, one that may attend to none of them (no previous token, no token like
  it elsewhere, no punctuation before it).
* `<name>_active` is the same without the keys on which trained heads rest (special tokens and the first): the sum over
  the other keys, divided by all the mass that is on them. Both are sums, so a value is again sum / count.

This module knows no models and no tokenizers. `core.sums` computes the same without dense weights.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscope.core import apart
from attnscope.core.precision import in_float64, moved

How = Literal["columns", "gather", "tile"]
"""Linear in the weights with a column by key; single weights by place; or what needs all weights of a query at once."""

REACH = 8
"""Offsets up to this many tokens before and after the query are candidates for a positional head."""

OFFSETS = tuple(range(-REACH, REACH + 1))
"""Key minus query, in tokens."""

WINDOW = 3
"""Tokens before and after the query that `window` takes in."""

SINK_THRESHOLD = 0.3
"""Mean attention to the first token above which a head is an attention sink on a text (Gu et al. 2024)."""


@dataclass(frozen=True)
class Measure:
    """One head measure.

    Attributes:
        name: What results and records call it; its unit is part of the name where it has one.
        what: What a large value says, in one line.
        formula: What is added up for one query q (or as said), in terms of weights A, keys k and tokens x.
        unit: Of the value: "share" of attention or of queries, "nats", "tokens", or what the model's vectors have.
        low: Smallest possible value.
        high: Largest possible value.
        source: The publication that the definition is from, or "ours".
        how: How `core.sums` computes it.
        has_active: Whether there is also `<name>_active`.
        needs_places: Whether queries and keys must be of one text, so that it is undefined in cross attention.
    """

    name: str
    what: str
    formula: str
    unit: str
    low: float
    high: float
    source: str
    how: How
    has_active: bool = False
    needs_places: bool = False


_CLARK = "Clark et al. 2019, section 3"
_VOITA = "Voita et al. 2019"
_KOBAYASHI = "Kobayashi et al. 2020, section 2"
_INF = math.inf

MEASURES: dict[str, Measure] = {
    measure.name: measure
    for measure in (
        Measure("resting", "rests on special tokens or the first one",
                "sum of A_qk over k special or first", "share", 0, 1, "ours; " + _CLARK, "columns"),
        Measure("entropy_nats", "spreads over many keys",
                "- sum over k of A_qk ln A_qk", "nats", 0, _INF, _CLARK + ".3", "columns"),
        Measure("relative_entropy", "spreads evenly over the keys that the mask allows",
                "entropy_nats_q / ln n_q, n_q >= 2 keys allowed", "share", 0, 1, "ours", "columns"),
        Measure("max_weight", "is confident: puts much on a single key",
                "max of A_qk over k but the text's final special token", "share", 0, 1,
                _VOITA + ", confidence", "tile"),
        Measure("previous_token", "attends to the token before",
                "A[q, q-1]", "share", 0, 1, _CLARK + ".1", "gather", True, True),
        Measure("self_token", "attends to the token itself",
                "A[q, q]", "share", 0, 1, _CLARK + ".1", "gather", True, True),
        Measure("next_token", "attends to the token after",
                "A[q, q+1]", "share", 0, 1, _CLARK + ".1", "gather", True, True),
        Measure("window", "attends within three tokens",
                "sum of A_qk over |q - k| <= 3", "share", 0, 1, "ours", "gather", True, True),
        Measure("positional", "has its largest weight at one fixed offset",
                "1 if k = q + o has the largest A_qk (1/t if t share it), o the head's most frequent of -8 to 8",
                "share", 0, 1, _VOITA + ", positional heads", "tile", False, True),
        Measure("distance_tokens", "attends far away",
                "sum over k of A_qk |k - q|", "tokens", 0, _INF, "Vig and Belinkov 2019, section 4.2", "tile",
                True, True),
        Measure("signed_distance_tokens", "attends ahead (positive) or back (negative)",
                "sum over k of A_qk (k - q)", "tokens", -_INF, _INF, "ours", "columns", True, True),
        Measure("rms_distance_tokens", "attends far away, the farthest counting most",
                "square root of the sum over k of A_qk (k - q)^2", "tokens", 0, _INF, "ours", "tile", False, True),
        Measure("first_token", "attends to the text's first token",
                "A[q, first]", "share", 0, 1, "Xiao et al. 2024, section 3.1", "columns"),
        Measure("cls", "attends to [CLS]", "sum of A_qk over k = [CLS]", "share", 0, 1, _CLARK + ".2", "columns"),
        Measure("sep", "attends to [SEP]", "sum of A_qk over k = [SEP]", "share", 0, 1, _CLARK + ".2", "columns"),
        Measure("special", "attends to special tokens",
                "sum of A_qk over k special", "share", 0, 1, "Kovaleva et al. 2019, section 4.1", "columns"),
        Measure("punctuation", "attends to punctuation",
                "sum of A_qk over k punctuation", "share", 0, 1, _CLARK + ".2", "columns", True),
        Measure("same_token", "attends to the same token elsewhere in the text",
                "sum of A_qk over k != q with x_k = x_q", "share", 0, 1, "ours", "gather", True, True),
        Measure("induction", "attends to what followed the same token before",
                "sum of A[q, j+1] over j < q with x_j = x_q, j+1 != q", "share", 0, 1,
                "Olsson et al. 2022, section 2", "gather", True, True),
        Measure("similar_token", "attends to tokens of similar static embedding, more than uniform attention does",
                "sum over k of (A_qk - 1/n_q) cos(e_q, e_k), k allowed", "cosine", -2, 2, "ours", "tile", True, True),
        Measure("rarest_token", "has its largest weight on the text's rarest token",
                "1 if k = rarest has the largest A_qk (1/t if t share it)", "share", 0, 1,
                _VOITA + ", rare words", "tile"),
        Measure("rarity", "attends to rare tokens",
                "- sum over k of A_qk ln frequency(x_k)", "nats", 0, _INF, "ours", "columns", True),
        Measure("sink", "is an attention sink on a text, which counts 1 if so",
                "1 if the text's mean of A[q, first] > 0.3", "share of texts", 0, 1,
                "Gu et al. 2024, section 3.1", "columns"),
        Measure("received", "gives much of all its attention to one key of a text",
                "max over k of the sum over q of A_qk, each text counting its queries", "share", 0, 1, "ours", "tile"),
        Measure("value_weighted", "reads large value vectors",
                "sum over k of A_qk |v_k|", "norm of values", 0, _INF, _KOBAYASHI, "columns", True),
        Measure("norm_weighted", "writes large vectors to its output",
                "sum over k of A_qk |W_O v_k|", "norm of outputs", 0, _INF, _KOBAYASHI, "columns", True),
    )
}  # fmt: skip
"""All head measures by name."""

FROM_OFFSETS = "positional"
"""The measure that has no sum of its own: which offset counts is known once the whole corpus has been seen."""


def measure_names(chosen: Iterable[str] | None = None) -> tuple[str, ...]:
    """Names of the sums that measures need, `…_active` after each, in the catalogue's order; `positional` has none.

    Args:
        chosen: Names in MEASURES, or None for all of them.

    Raises:
        ValueError: A name is unknown.
    """
    wanted = set(MEASURES if chosen is None else chosen)
    unknown = sorted(wanted - set(MEASURES))
    if unknown:
        raise ValueError(f"there is no measure {unknown[0]!r}; there are {', '.join(MEASURES)}")
    names: list[str] = []
    for name, measure in MEASURES.items():
        if name in wanted and name != FROM_OFFSETS:
            names += [name, f"{name}_active"] if measure.has_active else [name]
    return tuple(names)


# What measures must know of texts ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TextFacts:
    """What measures must know of a padded batch of texts. What is None leaves its measures undefined (count 0).

    Attributes:
        real: (batch, token), bool; True = a token, False = padding.
        special: (batch, token), bool: tokens that the tokenizer added, such as [CLS], <s>.
        ids: (batch, token), int64: the tokenizer's numbers, by which tokens are the same.
        cls: (batch, token), bool: the opening special token.
        sep: (batch, token), bool: separating and closing special tokens.
        punctuation: (batch, token), bool.
        log_frequency: (batch, token), float, finite: natural log of each token's relative frequency in the corpus.
        embeddings: (batch, token, d), float: each token's static embedding (the input layer's row), of length 1.
        rarest: (batch,), int64: where the text's rarest token lies; -1 = there is none.
        context: (batch, token), bool: tokens that are there for others to attend to: as queries they count nothing.

    Raises:
        ValueError: Shapes do not fit together, or a log frequency is not finite.
        TypeError: A mask is not boolean.
    """

    real: Tensor
    special: Tensor
    ids: Tensor
    cls: Tensor | None = None
    sep: Tensor | None = None
    punctuation: Tensor | None = None
    log_frequency: Tensor | None = None
    embeddings: Tensor | None = None
    rarest: Tensor | None = None
    context: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.real.shape
        if len(shape) != 2:
            raise ValueError(f"facts of texts are (batch, token); got {tuple(shape)}")
        for name in (field.name for field in fields(self)):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            expected = shape[:1] if name == "rarest" else shape
            if tensor.shape[: len(expected)] != expected or tensor.ndim != len(expected) + (name == "embeddings"):
                raise ValueError(f"{name} {tuple(tensor.shape)} does not fit texts of {tuple(shape)}")
            if name in ("real", "special", "cls", "sep", "punctuation", "context") and tensor.dtype != torch.bool:
                raise TypeError(f"{name} must be boolean; got {tensor.dtype}")
        if self.log_frequency is not None and not bool(self.log_frequency[self.real].isfinite().all()):
            raise ValueError("log_frequency must be finite: a token that was never counted has no frequency of 0")

    @functools.cached_property
    def asking(self) -> Tensor:
        """(batch, token), bool: the tokens that count as queries."""
        return self.real if self.context is None else self.real & ~self.context

    @functools.cached_property
    def first(self) -> Tensor:
        """(batch, token), bool: the first real token of each text."""
        return self.real & (self.real.cumsum(1) == 1)

    @functools.cached_property
    def resting(self) -> Tensor:
        """(batch, token), bool: special tokens and the first, on which most trained heads rest."""
        return (self.special & self.real) | self.first

    @functools.cached_property
    def final_special(self) -> Tensor:
        """(batch,), int64: where the text ends, if it ends with a special token ([SEP], </s>); else -1."""
        places = torch.arange(self.real.shape[1], device=self.real.device)
        last = torch.where(self.real, places, -1).amax(1) if self.real.shape[1] else self.real.sum(1) - 1
        ends = (self.special & (places == last[:, None])).any(1)
        return last.masked_fill(~ends, -1)

    def on(self, device: torch.device) -> "TextFacts":
        """The same facts on a device, for layers may lie on several."""
        if self.real.device == device:
            return self
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: moved(tensor, device) for name, tensor in given.items() if tensor is not None})

    def part(self, texts: slice) -> "TextFacts":
        """The facts of some of the texts."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: tensor[texts] for name, tensor in given.items() if tensor is not None})


def key_columns(keys: TextFacts, dtype: torch.dtype) -> dict[str, Tensor]:
    """What each key is worth to the measures that ask for the key alone.

    Args:
        keys: The texts.
        dtype: Of the result.

    Returns:
        Name -> (batch, key); `active` is 1 for keys that nobody rests on. Padding is worth 0. Measures whose facts are
        missing are not there.
    """
    real, active = keys.real, keys.real & ~keys.resting
    columns: dict[str, Tensor] = {"resting": keys.resting, "active": active, "first_token": keys.first}
    columns["special"] = keys.special & real
    for name in ("cls", "sep", "punctuation"):
        given = getattr(keys, name)
        if given is not None:
            columns[name] = given & real
    if keys.punctuation is not None:
        columns["punctuation_active"] = keys.punctuation & active
    found = {name: column.to(dtype) for name, column in columns.items()}
    if keys.log_frequency is not None:
        rarity = torch.where(real, -keys.log_frequency, 0.0).to(dtype)
        found |= {"rarity": rarity, "rarity_active": rarity * found["active"]}
    return found


def pair_targets(facts: TextFacts, queries: slice, keys: slice) -> tuple[Tensor, Tensor]:
    """Which keys are the same token as the query, elsewhere, and which followed it before.

    Args:
        facts: The texts.
        queries: A range of queries.
        keys: A range of keys.

    Returns:
        `same`: k != q, x_k = x_q; and `induction`: k - 1 < q, x_(k-1) = x_q, k != q; both (batch, query, key), bool,
        and False for padding.
    """
    device = facts.ids.device
    q = torch.arange(queries.start, queries.stop, device=device)[:, None]
    k = torch.arange(keys.start, keys.stop, device=device)
    # Tokens are never negative: padding is like nothing.
    of_query = torch.where(facts.real, facts.ids, -1)[:, queries, None]
    of_key = torch.where(facts.real, facts.ids, -2)
    same = (of_query == of_key[:, None, keys]) & (q != k)
    before = torch.cat([torch.full_like(of_key[:, :1], -2), of_key[:, :-1]], 1)
    followed = (of_query == before[:, None, keys]) & (k < q) & facts.real[:, None, keys]
    return same, followed


# The definition on dense weights ----------------------------------------------------------------------------------


Sum = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SumsOf:
    """The measures of one layer on one batch, as sums and counts.

    Attributes:
        names: What the first axis of the sums holds (`measure_names`).
        sum: (measure, batch, head), float64.
        count: Likewise: a value is sum / count, pooled over texts by adding both first. Undefined where 0.
        uniform_sum: The same under uniform attention over the keys that the mask allows.
        uniform_count: Its count; differs from `count` for `…_active` alone.
        offset_sum: (offset, batch, head): queries whose largest weight is at the offset (OFFSETS); of t keys that share
            the largest weight each counts 1/t.
        offset_count: Queries that may attend to a key at the offset.
        offset_uniform: The sum under uniform attention, where all allowed keys share the largest weight.
    """

    names: tuple[str, ...]
    sum: Sum
    count: Sum
    uniform_sum: Sum
    uniform_count: Sum
    offset_sum: Sum
    offset_count: Sum
    offset_uniform: Sum

    def value(self, name: str) -> Sum:
        """Pooled over the batch: sum / count, (head,); NaN where nothing was counted."""
        return self._ratio(self.sum, self.count, name)

    def uniform(self, name: str) -> Sum:
        """The value under uniform attention, (head,); NaN where nothing was counted."""
        return self._ratio(self.uniform_sum, self.uniform_count, name)

    def _ratio(self, sums: Sum, counts: Sum, name: str) -> Sum:
        i = self.names.index(name)
        total, count = sums[i].sum(0), counts[i].sum(0)
        ratio: Sum = np.divide(total, count, out=np.full_like(total, np.nan), where=count != 0)
        return ratio


Rows = dict[str, Tensor]
"""Name -> a number for each query, (batch, head, query)."""


def linear_rows(
    weights: Tensor,
    keys: TextFacts,
    queries: slice,
    key_range: slice,
    *,
    own_text: bool,
    columns: dict[str, Tensor] | None = None,
    cosines: Tensor | None = None,
) -> Rows:
    """What is linear in the weights, query by query.

    Args:
        weights: Of some queries on some keys, (batch, head, query, key).
        keys: The texts of the keys.
        queries: Which queries these are.
        key_range: Which keys these are.
        own_text: Whether the queries are tokens of the same texts.
        columns: What `key_columns` says of the keys, where that is known already.
        cosines: Of static embeddings, (batch, query, key), where they are known already.

    Returns:
        Name -> (batch, head, query), for the measures and their `_active`; `active`, the mass on keys that nobody rests
        on; and `mass`, on all keys. similar_token is not yet less what uniform attention has.
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
        defined: Name -> likewise, bool: whether the measure, or its `_active`, counts the query.
        uniform: Name -> likewise: the measure's value under uniform attention; 0 where it is undefined.
        band: (batch, mask head, query, offset), bool: whether the query may attend to its key at the offset.
    """

    counted: Tensor
    n_allowed: Tensor
    defined: dict[str, Tensor]
    uniform: Rows
    band: Tensor


def ground(
    allowed: Tensor, keys: TextFacts, asking: Tensor, queries: slice, key_range: slice, *, own_text: bool,
    dtype: torch.dtype = torch.float64, columns: dict[str, Tensor] | None = None, cosines: Tensor | None = None,
) -> Ground:  # fmt: skip
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
    uniform["rarest_token"] = share
    defined["entropy_nats"] = counted
    defined["relative_entropy"] = counted & (n_allowed >= 2)
    defined["max_weight"] = counted & (n_allowed > at_key(allowed, keys.final_special, key_range).to(dtype))
    if keys.rarest is not None:
        defined["rarest_token"] = counted & at_key(allowed, keys.rarest, key_range)
    for name in ("value_weighted", "norm_weighted"):
        defined[name], defined[f"{name}_active"] = counted, some_active
    band = at_offsets(allowed, queries, key_range) & counted[..., None]
    if not own_text:
        band = torch.zeros_like(band)
    if "similar_token" in uniform:
        # Less uniform's own: what is left to subtract from the heads stands here, uniform attention itself has 0.
        active = uniform["active"].clamp(min=torch.finfo(dtype).tiny)
        uniform["similar_token_active"] = uniform["similar_token_active"] / active
    return Ground(counted, n_allowed, defined, uniform, band)


def at_key(rows: Tensor, places: Tensor, key_range: slice) -> Tensor:
    """What rows have at one key of each text: (batch, head, query) of (batch, head, query, key); 0 where it is -1."""
    index = places - key_range.start
    inside = (places >= 0) & (index >= 0) & (index < rows.shape[3])
    if rows.shape[3] == 0:
        return rows.new_zeros(rows.shape[:3])
    index = index.clamp(0, rows.shape[3] - 1)[:, None, None, None].expand(-1, rows.shape[1], rows.shape[2], 1)
    found: Tensor = rows.gather(-1, index).squeeze(-1)
    return found.masked_fill_(~inside[:, None, None], 0)


def at_offsets(rows: Tensor, queries: slice, key_range: slice) -> Tensor:
    """What rows have at each of OFFSETS from the query: (batch, head, query, offset); 0 beyond the keys."""
    device = rows.device
    if rows.shape[3] == 0:
        return rows.new_zeros(*rows.shape[:3], len(OFFSETS))
    index = torch.arange(queries.start, queries.stop, device=device)[:, None] + torch.tensor(OFFSETS, device=device)
    index = index - key_range.start
    inside = (index >= 0) & (index < rows.shape[3])
    found = rows.gather(-1, index.clamp(0, rows.shape[3] - 1).expand(*rows.shape[:2], -1, -1))
    return found.masked_fill_(~inside, 0)


def output_factor(weight: Tensor, n_heads: int) -> Tensor:
    """Makes the output projection small, so that norms behind it cost little: |W_O v| = |R v|, W_O = Q R.

    Args:
        weight: The output projection as torch.nn.Linear stores it, (d_model, n_heads * d_value).
        n_heads: How many heads' outputs it joins.

    Returns:
        R of each head, (n_heads, at most d_value, d_value), float64 for a float64 weight, else float32.

    Raises:
        ValueError: The width is not a multiple of the heads.
    """
    if weight.ndim != 2 or weight.shape[1] % n_heads:
        raise ValueError(f"an output projection of {n_heads} heads is (d_model, heads * d_value); got {weight.shape}")
    by_head = in_float64(weight.detach()).reshape(weight.shape[0], n_heads, -1).transpose(0, 1)
    small: Tensor = torch.linalg.qr(by_head, mode="r").R.to(
        weight.device, torch.promote_types(weight.dtype, torch.float32)
    )
    return small


def value_norms(values: Tensor, n_heads: int, factor: Tensor | None = None) -> Tensor:
    """|v_k|, or |W_O v_k| of each head.

    Args:
        values: (batch, n_kv_heads, key, d_value).
        n_heads: How many query heads there are.
        factor: What `output_factor` made of the output projection; None = plain norms.

    Returns:
        (batch, n_heads, key).
    """
    group = n_heads // values.shape[1]
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    if factor is None:
        return wide.square().sum(-1).sqrt().repeat_interleave(group, 1)
    # Heads first: one product a head serves all texts.
    by_head = wide.transpose(0, 1).repeat_interleave(group, 0).flatten(1, 2)
    norms = torch.bmm(by_head, factor.to(wide.dtype).mT).square_().sum(-1).sqrt_()
    return norms.view(n_heads, values.shape[0], values.shape[2]).transpose(0, 1)


_AT_ONCE = 1000
"""So many handfuls of numbers wait before they are converted together."""


class Totals:
    """Adds up one layer's measures text by text, and assembles SumsOf. Shared by both roads.

    Args:
        names: Which sums are wanted.
        batch: How many texts.
        n_heads: How many heads.
    """

    def __init__(self, names: tuple[str, ...], batch: int, n_heads: int) -> None:
        self.names = names
        shape = (len(names), batch, n_heads)
        self.sum, self.count = np.zeros(shape), np.zeros(shape)
        offsets = (len(OFFSETS), batch, n_heads)
        self.offset_sum, self.offset_count = np.zeros(offsets), np.zeros(offsets)
        self._place = {name: i for i, name in enumerate(names)}
        self._waiting: list[tuple[str, int | slice | list[int], slice, Tensor]] = []

    def __contains__(self, name: str) -> bool:
        return name in self._place

    def add(self, name: str, texts: slice, sums: Tensor | None, counts: Tensor | None = None) -> None:
        """Adds sums and counts of some texts, each (text, head or 1); what nobody asked for is passed over."""
        i = self._place.get(name)
        if i is None:
            return
        for kind, numbers in (("sum", sums), ("count", counts)):
            if numbers is not None:
                self._later(kind, i, texts, numbers)

    def add_several(self, names: list[str], texts: slice, numbers: Tensor, kind: Literal["sum", "count"]) -> None:
        """Adds sums or counts of several measures, (measure, text, head or 1); what nobody asked for is passed over."""
        known = [i for i, name in enumerate(names) if name in self._place]
        if known:
            numbers = numbers if len(known) == len(names) else numbers[known]
            self._later(kind, [self._place[names[i]] for i in known], texts, numbers)

    def add_offsets(self, texts: slice, sums: Tensor, counts: Tensor) -> None:
        """Adds the counts of largest weights by offset, each (text, head or 1, offset)."""
        self._later("offset_sum", slice(None), texts, sums.permute(2, 0, 1))
        self._later("offset_count", slice(None), texts, counts.permute(2, 0, 1))

    def _later(self, kind: str, place: int | slice | list[int], texts: slice, numbers: Tensor) -> None:
        # A tile has some fifty handfuls of numbers: converted one by one they would take as long as the tile itself.
        self._waiting.append((kind, place, texts, numbers))
        if len(self._waiting) >= _AT_ONCE:
            self.settle()

    def settle(self) -> None:
        """Adds what was put off; before anything is read."""
        if not self._waiting:
            return
        flat = torch.cat([numbers.detach().flatten() for *_, numbers in self._waiting]).cpu().double().numpy()
        start = 0
        for kind, place, texts, numbers in self._waiting:
            end = start + numbers.numel()
            getattr(self, kind)[place, texts] += flat[start:end].reshape(numbers.shape)
            start = end
        self._waiting.clear()

    def finish_keys(self, largest: Tensor, counted: Tensor, norms: dict[str, Tensor]) -> None:
        """Adds what follows from the mass that each key received.

        Args:
            largest: What the most attended key of each text received, (batch, head).
            counted: How many queries were counted, (batch, head or 1).
            norms: Measure -> sum over keys of the mass received times the value's norm: of all keys, and of those that
                nobody rests on, (batch, head, 2).
        """
        whole = slice(0, self.sum.shape[1])
        self.add("received", whole, largest, counted.expand(largest.shape))
        for name in ("value_weighted", "norm_weighted"):
            if name in norms:
                self.add(name, whole, norms[name][..., 0])
                self.add(f"{name}_active", whole, norms[name][..., 1])
            else:
                self.clear(name)

    def finish_sinks(self) -> None:
        """Adds which texts a head is a sink on, from what first_token came to."""
        self.settle()
        if "sink" in self:
            i, first = self._place["sink"], self._place["first_token"]
            self.sum[i] = self.sum[first] > SINK_THRESHOLD * self.count[first]
            self.count[i] = self.count[first] > 0

    def clear(self, name: str) -> None:
        """Makes a measure undefined, and its `_active`."""
        self.settle()
        for i in (self._place.get(name), self._place.get(f"{name}_active")):
            if i is not None:
                self.sum[i] = self.count[i] = 0.0

    def copy(self) -> "Totals":
        """The same sums, to be added to apart."""
        self.settle()
        other = Totals(self.names, self.sum.shape[1], self.sum.shape[2])
        other.sum[:], other.count[:] = self.sum, self.count
        other.offset_sum[:], other.offset_count[:] = self.offset_sum, self.offset_count
        return other

    def take_counts(self, uniform: "Totals") -> None:
        """Takes over the counts of everything but the `_active` measures, which no weights enter."""
        self.settle()
        uniform.settle()
        for name, i in self._place.items():
            if not name.endswith("_active"):
                self.count[i] = uniform.count[i]

    def widen(self, n_heads: int) -> None:
        """Repeats sums that all heads share."""
        self.settle()
        for name in ("sum", "count", "offset_sum", "offset_count"):
            given = getattr(self, name)
            setattr(self, name, np.repeat(given, n_heads // given.shape[2], axis=2))


def joined(heads: Totals, uniform: Totals, names: tuple[str, ...]) -> SumsOf:
    """Puts the totals of a layer's heads beside those of uniform attention; drops what only others needed."""
    keep = [heads.names.index(name) for name in names]
    shared = [heads.sum[keep], heads.count[keep], uniform.sum[keep], uniform.count[keep]]
    # They stay while the next layers run.
    return SumsOf(names, *apart.copies([*shared, heads.offset_sum, heads.offset_count, uniform.offset_sum]))


def internal_names(measures: Iterable[str] | None) -> tuple[str, ...]:
    """`measure_names`, and what these need to be computed: a sink is told by first_token."""
    chosen = None if measures is None else set(measures)
    names = measure_names(chosen)
    return measure_names(chosen | {"first_token"}) if chosen is not None and "sink" in names else names


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
    """Adds what uniform attention has on some queries; returns the defined queries' `share` at each offset."""
    rows = given.uniform | {
        name: torch.zeros_like(row) for name, row in given.uniform.items() if name.startswith("similar_token")
    }
    add_rows(totals, texts, rows, given)
    band = given.band.to(given.n_allowed.dtype)
    share = 1 / given.n_allowed.clamp(min=1)
    totals.add_offsets(texts, (band * share[..., None]).sum(2), band.sum(2))
    return band


def measures_of_weights(
    weights: Tensor,
    keys: TextFacts,
    queries: TextFacts | None = None,
    *,
    allowed: Tensor | None = None,
    values: Tensor | None = None,
    factor: Tensor | None = None,
    measures: Iterable[str] | None = None,
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
    totals, uniform = Totals(names, batch, n_heads), Totals(names, batch, may.shape[1])
    received = torch.zeros(batch, n_heads, n_keys, dtype=torch.float64, device=weights.device)
    evenly = torch.zeros(batch, may.shape[1], n_keys, dtype=torch.float64, device=weights.device)
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
        largest = part.amax(-1, keepdim=True) if n_keys else part.sum(-1, keepdim=True)
        hits = (at_offsets(part, *everything) == largest) / (part == largest).sum(-1, keepdim=True).clamp(min=1)
        totals.add_offsets(texts, (hits * band).sum(2), band.sum(2))
        is_counted = given.counted.double()
        received[texts] = (part * is_counted[..., None]).sum(2)
        evenly[texts] = (may[texts] * (is_counted / given.n_allowed.clamp(min=1))[..., None]).sum(2)
        counted[texts] = is_counted.sum(-1)
    finish(totals, uniform, keys, received, evenly, counted, values, factor)
    return joined(totals, uniform, measure_names(measures))


def _rows_of_weights(weights: Tensor, keys: TextFacts, given: Ground, linear: Rows) -> Rows:
    """What is not linear in the weights, query by query, and similar_token less what uniform attention has."""
    whole = slice(0, weights.shape[3])
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
        rows["rarest_token"] = (at_key(weights, keys.rarest, whole) == largest) / ties
    if "similar_token" in linear:
        for name, mass in (("similar_token", "mass"), ("similar_token_active", "active")):
            rows[name] = linear[name] - linear[mass] * given.uniform[name]
    return rows


def finish(
    totals: Totals,
    uniform: Totals,
    keys: TextFacts,
    received: Tensor,
    evenly: Tensor,
    counted: Tensor,
    values: Tensor | None,
    factor: Tensor | None,
) -> None:
    """Adds what needs all queries of a text: received mass, the norms behind it, and sinks.

    Args:
        totals: Of the heads.
        uniform: Of uniform attention.
        keys: The texts of the keys.
        received: The mass that each key received, (batch, head, key).
        evenly: Likewise under uniform attention, (batch, mask head, key).
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
        if evenly.shape[1] == 1:
            of_uniform[name] = norm @ (evenly[:, 0, :, None] * both)
        else:
            of_uniform[name] = (evenly * norm) @ both
    # Uniform attention reads each head's own values, so its heads are no longer one for all.
    uniform.widen(n_heads)
    for part, mass, norms in ((totals, received, of_heads), (uniform, evenly, of_uniform)):
        largest = mass.amax(-1) if mass.shape[2] else mass.sum(-1)
        part.finish_keys(largest.expand(-1, n_heads), counted, norms)
        part.finish_sinks()
