"""What holds of queries that may attend to all keys from one to another, whatever their weights; by prefix sums. Ours.

Uniform attention over a range of keys is a difference of two prefix sums of the keys' worth, so no query is compared
with each of its keys: the cost of a text is linear in its length, not quadratic. The definition is in `queries`.
"""

from functools import cached_property

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from attnscope.core.measures.catalogue import MEASURES, OFFSETS, REACH, Pairs, Places, Row
from attnscope.core.measures.facts import OFF_REST, TextFacts, key_columns
from attnscope.core.measures.queries import MASS, Ground, Rows, ground_of

RARE, PLACE, PLACE_OFF, SQUARE = "rare", "place", "place off rest", "square of place"
"""Columns of prefix sums beside those of measures."""

TOGETHER = 512
"""Queries whose prefix sums of embeddings are made together."""

Edge = Tensor
"""A key of each query, (text, mask head or 1, query or 1), int64."""


class Ranges:
    """Uniform attention over ranges of keys; all in float64, on the texts' device or, if that has none, the processor.

    A range is `first`, the first key of each query, and `last`, the key after the last one; both are the same if there
    is none. `own_text`: whether queries are tokens of the same texts as the keys.
    """

    def __init__(self, keys: TextFacts, *, own_text: bool) -> None:
        self._keys, self._own_text = keys, own_text
        columns = key_columns(keys, torch.float64)
        self._off_rest = columns[OFF_REST]
        self._names = list(columns)
        more = {} if keys.rarest is None else {RARE: keys.rarest}
        self._places = torch.arange(keys.real.shape[1], device=keys.real.device, dtype=torch.float64)
        if own_text:
            here = self._places.expand(keys.real.shape)
            more |= {PLACE: here, PLACE_OFF: here * self._off_rest, SQUARE: here.square()}
        columns |= {name: column.double() for name, column in more.items()}
        self._at = {name: i for i, name in enumerate(columns)}
        self._sums = _prefix(torch.stack(list(columns.values()), -1))
        self._texts = torch.arange(len(keys.real), device=keys.real.device)[:, None, None]
        if own_text:
            self._group_tokens()

    def ground(self, first: Edge, last: Edge, asking: Tensor, queries: slice) -> Ground:
        """As `queries.ground`, for some queries that may attend to a range of keys; `asking` is (text, query), bool."""
        sums = self._between(first, last)
        n_allowed = (last - first).double()
        share = 1 / n_allowed.clamp(min=1)
        uniform: Rows = {name: sums[..., self._at[name]] * share for name in self._names}
        uniform[MASS] = n_allowed * share
        at = torch.arange(queries.start, queries.stop, device=first.device)
        keys = at[:, None] + torch.tensor(OFFSETS, device=first.device)
        band = (keys >= first[..., None]) & (keys < last[..., None])
        if self._own_text:
            uniform |= self._of_pairs(first, last, queries, sums, share)
            even = band * share[..., None]
            off_rest = self._off_rest[:, keys.clamp(0, self._off_rest.shape[1] - 1)]
            for name, measure in MEASURES.items():
                if isinstance(measure.family, Places):
                    index = [REACH + offset for offset in measure.family.offsets]
                    uniform[name] = even[..., index].sum(-1)
                    uniform[f"{name}_active"] = (even[..., index] * off_rest[:, None, :, index]).sum(-1)
        end = self._keys.final_special[:, None, None]
        sees_end = (end >= first) & (end < last)
        n_rarest = sums[..., self._at[RARE]] if RARE in self._at else None
        return ground_of(n_allowed, uniform, n_rarest, sees_end, band, asking, own_text=self._own_text)

    def _between(self, first: Edge, last: Edge) -> Tensor:
        """Sums over the keys of each query, (text, mask head, query or 1, column)."""
        return self._sums[self._texts, last] - self._sums[self._texts, first]

    def _of_pairs(self, first: Edge, last: Edge, queries: slice, sums: Tensor, share: Tensor) -> Rows:
        """Uniform attention's values of functions of query and key, by measure."""
        q = self._places[queries]
        middle = torch.maximum(torch.minimum(q.long(), last), first)
        before = self._between(first, middle)
        n, n_off = (last - first).double(), sums[..., self._at[OFF_REST]]
        position, position_off = (sums[..., self._at[of]] for of in (PLACE, PLACE_OFF))
        n_before, n_off_before = (middle - first).double(), before[..., self._at[OFF_REST]]
        ahead = position - q * n, position_off - q * n_off
        behind = before[..., self._at[PLACE]] - q * n_before, before[..., self._at[PLACE_OFF]] - q * n_off_before
        sums_of = {
            "signed_distance": ahead,
            "distance": tuple(of_all - 2 * part for of_all, part in zip(ahead, behind, strict=True)),
            "same_token": self._alike(first, last, queries),
            "induction": self._followers(first, torch.minimum(last, q.long()), queries),
        }
        if self._keys.embeddings is not None:
            sums_of["cosine"] = self._cosines(first, last, queries)
        squares = sums[..., self._at[SQUARE]] - 2 * q * position + q.square() * n
        rows: Rows = {}
        for name, measure in MEASURES.items():
            match measure.family:
                case Pairs(fact) if fact in sums_of:
                    rows[name], rows[f"{name}_active"] = (of * share for of in sums_of[fact])
                case Row("rms_distance"):
                    rows[name] = (squares * share).clamp(min=0).sqrt()
        return rows

    def _group_tokens(self) -> None:
        """Lists the real tokens of all texts, like ones of a text together, in the order of their positions."""
        real, ids = self._keys.real, self._keys.ids
        n_tokens = real.shape[1]
        _, which = ids.unique(return_inverse=True)  # type: ignore[no-untyped-call]  # torch's own
        n_ids = int(which.max()) + 1 if which.numel() else 0
        # A number of each text and token, so far apart that a place can be added.
        self._begins = (self._texts[..., 0] * n_ids + which) * (n_tokens + 1)
        positions = torch.arange(n_tokens, device=ids.device)
        self._listed, order = (self._begins + positions)[real].sort()
        after = F.pad(real, (0, 1))[:, 1:] * 1.0, F.pad(self._off_rest, (0, 1))[:, 1:]
        worth = torch.stack([torch.ones_like(self._off_rest), self._off_rest, *after], -1)
        self._of_listed = _prefix(worth[real][order][None])[0]

    def _among_alike(self, first: Edge, last: Edge, queries: slice) -> Tensor:
        """Sums over the like tokens of each query in a range: of 1, of `off rest`, and of the next key's."""
        begins = self._begins[:, None, queries]
        last = torch.maximum(first, last)
        edges = (torch.searchsorted(self._listed, begins + edge) for edge in (first, last))
        start, stop = (self._of_listed[edge] for edge in edges)
        return (stop - start) * self._keys.real[:, None, queries, None]

    def _alike(self, first: Edge, last: Edge, queries: slice) -> tuple[Tensor, ...]:
        """How many keys of each query are the same token elsewhere; and of those outside the sinks."""
        q = torch.arange(queries.start, queries.stop, device=first.device)
        itself = ((q >= first) & (q < last) & self._keys.real[:, None, queries]).double()
        n, n_off = self._among_alike(first, last, queries)[..., :2].unbind(-1)
        return n - itself, n_off - itself * self._off_rest[:, None, queries]

    def _followers(self, first: Edge, last: Edge, queries: slice) -> tuple[Tensor, ...]:
        """How many keys of each query followed the same token before it; and of those outside the sinks."""
        return self._among_alike((first - 1).clamp(min=0), last - 1, queries)[..., 2:].unbind(-1)

    def _cosines(self, first: Edge, last: Edge, queries: slice) -> tuple[Tensor, ...]:
        """The sum of the cosines of each query's embedding and its keys'; and of those outside the sinks."""
        directions = self._keys.embeddings
        assert directions is not None
        both = torch.stack([torch.ones_like(self._off_rest), self._off_rest], 1)
        if first.shape[2] == last.shape[2] == 1:  # all queries of a text have the same keys
            positions = torch.arange(directions.shape[1], device=directions.device)
            inside = (positions >= first) & (positions < last)  # (text, mask head, key)
            worth = inside[:, :, None] * both[:, None]
            of_keys = worth.flatten(1, 2).to(directions.dtype) @ directions  # (text, mask head * 2, width)
            products = directions[:, queries] @ of_keys.mT
            sums = products.view(*products.shape[:2], -1, 2).transpose(1, 2).double()
            return sums[..., 0], sums[..., 1]
        shape = len(directions), max(first.shape[1], last.shape[1]), queries.stop - queries.start
        first, last = first.expand(shape), last.expand(shape)
        sums_so_far = directions.new_zeros(*shape, 2, dtype=torch.float64)
        together = max(TOGETHER // max(directions.shape[1], 1), 1)
        for texts in (slice(t, t + together) for t in range(0, shape[0], together)):
            for some in (slice(start, start + TOGETHER) for start in range(0, shape[2], TOGETHER)):
                of_queries = directions[texts, queries][:, some].double()
                for sign, edge in ((1, last), (-1, first)):
                    sums_so_far[texts, :, some] += sign * self._up_to(texts, edge[texts, :, some], of_queries)
        return sums_so_far[..., 0], sums_so_far[..., 1]

    def _up_to(self, texts: slice, edge: Edge, of_queries: Tensor) -> Tensor:
        """Products of queries' embeddings with the sums of all before one key each, (text, mask head, query, 2)."""
        low, high = int(edge.min()) // TOGETHER * TOGETHER, int(edge.max())
        if high == 0:
            return of_queries.new_zeros(*edge.shape, 2)
        if high - low > 2 * TOGETHER and edge.shape[2] > 1:  # far from each other: no long array between them
            half = edge.shape[2] // 2
            parts = ((edge[..., some], of_queries[:, some]) for some in (slice(half), slice(half, None)))
            return torch.cat([self._up_to(texts, *part) for part in parts], 2)
        begun = self._begun[texts, :, low // TOGETHER]
        sums = torch.cat([begun[:, :, None], self._weighted(texts, slice(low, high))], 2).cumsum(2)
        of_keys = sums[torch.arange(len(sums), device=sums.device)[:, None, None], :, edge - low]
        return (of_keys * of_queries[:, None, :, None]).sum(-1)

    @cached_property
    def _begun(self) -> Tensor:
        """Sums of all embeddings before each TOGETHER-th key, (text, 2, key // TOGETHER, width)."""
        texts, n_keys = slice(None), self._off_rest.shape[1]
        edges = range(0, n_keys + 1, TOGETHER)
        sums = [self._weighted(texts, slice(start, start + TOGETHER)).sum(2) for start in edges[:-1]]
        return F.pad(torch.stack(sums, 2).cumsum(2), (0, 0, 1, 0)) if sums else self._weighted(texts, slice(0, 1)) * 0

    def _weighted(self, texts: slice, keys: slice) -> Tensor:
        """Embeddings of keys, and of those outside the sinks alone, (text, 2, key, width)."""
        assert self._keys.embeddings is not None
        directions = self._keys.embeddings[texts, keys].double()
        return torch.stack([directions, directions * self._off_rest[texts, keys, None]], 1)


def _prefix(numbers: Tensor) -> Tensor:
    """Sums of all that stand before each place, (text, place, column) -> (text, place + 1, column)."""
    return F.pad(numbers.cumsum(1), (0, 0, 1, 0))


def spread_over(steps: Tensor, first: Edge, last: Edge, shares: Tensor) -> Tensor:
    """Adds a share of each query, (text, head, query), to each key of its range: as steps, (text, head, key + 1).

    The steps are written to and returned; their running sums are what each key receives.
    """
    shares = shares.to(steps.dtype)
    return steps.scatter_add_(2, first, shares).scatter_add_(2, last, -shares)
