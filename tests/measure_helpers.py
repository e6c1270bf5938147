"""The head measures in plain loops, one text, head and query at a time: what both roads are tested against."""

import math

import numpy as np
import torch
from torch import Tensor

from attnscope.core.attention.seam import AttentionCall, allowed
from attnscope.core.catalogue import measure_names
from attnscope.core.facts import TextFacts

PLACES = (
    "previous_token",
    "self_token",
    "next_token",
    "window",
    "distance_tokens",
    "signed_distance_tokens",
    "same_token",
    "induction",
    "similar_token",
)
SHIFTS = {"previous_token": (-1,), "self_token": (0,), "next_token": (1,), "window": tuple(range(-3, 4))}


def make_facts(
    lengths: list[int],
    n: int,
    *,
    seed: int = 0,
    vocabulary: int = 5,
    special_ends: bool = True,
    left: bool = False,
    d: int = 3,
    context: bool = False,
) -> TextFacts:
    """Random texts of few different tokens, some of them mere context; padded on the right, or on the left."""
    generator = torch.Generator().manual_seed(seed)
    batch = len(lengths)
    place = torch.arange(n).expand(batch, n)
    length = torch.tensor(lengths)[:, None]
    start = n - length if left else torch.zeros_like(length)
    real = (place >= start) & (place < start + length)
    cls = real & (place == start)
    sep = real & (place == start + length - 1) & (length > 1)
    if not special_ends:
        cls = torch.zeros_like(real)
        sep = torch.zeros_like(real)
    ids = torch.randint(0, vocabulary, (batch, n), generator=generator)
    embeddings = torch.randn(vocabulary, d, generator=generator, dtype=torch.float64)[ids]
    # One rarest token, or two of them that are equally rare.
    rarest = real & ((place == start + length // 2) | (place == start + length // 4)) & (place > start)
    return TextFacts(
        real=real,
        special=cls | sep,
        ids=ids,
        cls=cls,
        sep=sep,
        punctuation=torch.rand(batch, n, generator=generator) < 0.2,
        log_frequency=-3 * torch.rand(batch, n, generator=generator, dtype=torch.float64),
        embeddings=embeddings / embeddings.norm(dim=-1, keepdim=True),
        rarest=rarest,
        context=torch.rand(batch, n, generator=generator) < 0.3 if context else None,
    )


class Expected:
    """Sums and counts as `Measured` has them."""

    def __init__(self, batch: int, n_heads: int) -> None:
        names = measure_names()
        self.names = names
        self.sum = np.zeros((len(names), batch, n_heads))
        self.count = np.zeros_like(self.sum)
        # `_active` of a head that spreads evenly what it does not rest.
        self.even = np.zeros_like(self.sum)

    def put(self, name: str, text: int, head: int, value: float, count: float = 1.0) -> None:
        i = self.names.index(name)
        self.sum[i, text, head] += value
        self.count[i, text, head] += count


def expected(
    weights: Tensor,
    may: Tensor | None,
    keys: TextFacts,
    queries: TextFacts | None = None,
    outlying: Tensor | None = None,
) -> Expected:
    """All measures of dense float64 weights by their definitions."""
    batch, n_heads, n_queries, n_keys = weights.shape
    may = torch.ones(1, 1, 1, 1, dtype=torch.bool) if may is None else may[(None,) * (4 - may.ndim)]
    may_all = may.expand(batch, n_heads, n_queries, n_keys).numpy()
    weights_all = weights.double().numpy()
    result = Expected(batch, n_heads)
    asking = queries or keys
    counting = (asking.real if asking.context is None else asking.real & ~asking.context).numpy()
    for b in range(batch):
        text = _Text(keys, b, outlying)
        for h in range(n_heads):
            for q in range(n_queries):
                row = weights_all[b, h, q]
                seen = [k for k in range(n_keys) if may_all[b, h, q, k]]
                if not seen or not counting[b, q]:
                    continue
                _add_query(result, b, h, q, row, seen, text, own_text=queries is None)
    return result


class _Text:
    def __init__(self, facts: TextFacts, b: int, outlying: Tensor | None) -> None:
        self.real, self.special = facts.real[b].tolist(), facts.special[b].tolist()
        self.ids = facts.ids[b].tolist()
        tokens = [k for k, real in enumerate(self.real) if real]
        self.first = tokens[0] if tokens else -1
        self.rest = {k for k in tokens if self.special[k] or k == self.first}
        self.sets = {"first_token": {self.first}, "special": {k for k in tokens if self.special[k]}}
        self.sets["outlier_token"] = set() if outlying is None else {k for k in tokens if outlying[b, k]}
        for name in ("cls", "sep", "punctuation"):
            given = getattr(facts, name)
            self.sets[name] = set() if given is None else {k for k in tokens if given[b, k]}
        self.frequency = None if facts.log_frequency is None else facts.log_frequency[b].tolist()
        self.directions = None if facts.embeddings is None else facts.embeddings[b].double().numpy()
        self.rarest = set() if facts.rarest is None else set(facts.rarest[b].nonzero()[:, 0].tolist())

    def targets(self, name: str, q: int) -> set[int]:
        """The keys whose mass a measure is."""
        n = len(self.ids)
        if name in self.sets:
            return self.sets[name]
        if name in SHIFTS:
            return {q + o for o in SHIFTS[name]}
        if name == "same_token":
            return {k for k in range(n) if k != q and self.real[k] and self.ids[k] == self.ids[q]}
        following = set()
        for j in range(q - 1):
            both_real = self.real[j] and self.real[j + 1]
            if both_real and self.ids[j] == self.ids[q]:
                following.add(j + 1)
        return following


def _add_query(result, b, h, q, row, seen, text, *, own_text: bool) -> None:
    def put(name: str, value: float, count: float = 1.0) -> None:
        result.put(name, b, h, float(value), float(count))

    def even(name: str, value: float) -> None:
        result.even[result.names.index(name), b, h] += float(value)

    off = [k for k in seen if k not in text.rest and text.real[k]]
    active = sum(row[k] for k in off)
    put("resting", sum(row[k] for k in seen if k in text.rest))
    entropy = -sum(row[k] * math.log(row[k]) for k in seen if row[k] > 0)
    put("entropy_nats", entropy)
    if len(seen) > 1:
        put("relative_entropy", entropy / math.log(len(seen)))
    largest = max(row)
    ties = sum(weight == largest for weight in row)
    rarest = [k for k in seen if k in text.rarest]
    if rarest:
        put("rarest_token", sum(row[k] == largest for k in rarest) / ties / len(rarest))
    for name in (
        "first_token",
        "outlier_token",
        "cls",
        "sep",
        "special",
        "punctuation",
        *SHIFTS,
        "same_token",
        "induction",
    ):
        if name in PLACES and not own_text:
            continue
        targets = text.targets(name, q)
        hit = [k for k in seen if k in targets]
        if hit:
            put(name, sum(row[k] for k in hit))
        hit = [k for k in hit if k in off]
        if hit and f"{name}_active" in result.names:
            put(f"{name}_active", sum(row[k] for k in hit), active)
            even(f"{name}_active", active * len(hit) / len(off))
    functions = {}
    if text.frequency is not None:
        functions["rarity"] = lambda k: -text.frequency[k]
    if own_text:
        functions["distance_tokens"] = lambda k: abs(k - q)
        functions["signed_distance_tokens"] = lambda k: k - q
        if text.directions is not None:
            cosine = text.directions @ text.directions[q]
            mean = sum(cosine[k] for k in seen) / len(seen)
            put("similar_token", sum(row[k] * (cosine[k] - mean) for k in seen))
            if off:
                mean = sum(cosine[k] for k in off) / len(off)
                put("similar_token_active", sum(row[k] * (cosine[k] - mean) for k in off), active)
    for name, function in functions.items():
        real = [k for k in seen if text.real[k]] if name == "rarity" else seen
        put(name, sum(row[k] * function(k) for k in real))
        if off and f"{name}_active" in result.names:
            put(f"{name}_active", sum(row[k] * function(k) for k in off), active)
            even(f"{name}_active", active * sum(function(k) for k in off) / len(off))


def uniform_weights(call: AttentionCall) -> Tensor:
    """Equal weight on every key that the mask allows, (batch, head, query, key), float64."""
    shape = (*call.query.shape[:3], call.key.shape[2])
    may = allowed(call)
    even = torch.ones(shape, dtype=torch.float64) if may is None else may.expand(shape).double()
    return even / even.sum(-1, keepdim=True).clamp(min=1)
