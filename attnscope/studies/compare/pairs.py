"""Add up how far all pairs of heads are apart, of one model or of two, text by text.

Each distance is measured twice: on all tokens, and without those that heads rest on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attnscope.choice import Choice, Chosen
from attnscope.core.distance import LARGEST, SUMS, classical_mds, cluster_heads
from attnscope.core.sums import RunningSums
from attnscope.corpus import TOKEN_BUDGET, Block, Chunk, batches, block_batches
from attnscope.errors import AttnscopeError
from attnscope.host import require_memory
from attnscope.models.model import Batch, Model
from attnscope.questions.distances import WITHOUT_SPECIAL
from attnscope.questions.map_changes import divide_by_rest
from attnscope.results.table import HEADS, Table
from attnscope.results.tokens import Tokens
from attnscope.studies.failures import Place
from attnscope.studies.inputs.texts import batch_of, special_ids
from attnscope.studies.run import Measurer, Part
from attnscope.studies.seen import Attention, count_heads, read_rows, see

Floats = NDArray[np.float64]

HeadPlace = tuple[int, int]
"""Layer and head."""

WEIGHTS_AT_ONCE = 2**20
"""Distances are computed on so many weights at once, those of all layers and models together."""

_BYTES_AT_ONCE = 2**28
"""The sums of texts are held up to this size before they are added."""

_BYTES_A_PAIR = 600  # sums and moments, and what is computed from them


@dataclass(frozen=True, eq=False)
class PairSums:
    """Hold sums over texts for all pairs of heads.

    Attributes:
        heads: The heads of the model, or of each of two.
        divergences: With all tokens and without those that heads rest on, (2, head, head).
    """

    heads: tuple[tuple[HeadPlace, ...], ...]
    divergences: RunningSums

    def merge(self, other: PairSums) -> PairSums:
        """Return the sums over the texts of both."""
        return replace(self, divergences=self.divergences.merge(other.divergences))

    def distances(self, measure: str) -> dict[str, Floats]:
        """Return distances by the names of a result's arrays, each (head, head).

        A distance is the root of the mean divergence. Its interval is over texts; NaN with fewer than 2.
        """
        parts = {"": self.divergences.ratio()}
        for end, values in zip(("_low", "_high"), self.divergences.interval(), strict=True):
            parts[end] = np.clip(values, 0.0, LARGEST[measure])  # type: ignore[index]  # one of MEASURES
        arrays = {}
        for table, name in enumerate((measure, f"{measure}{WITHOUT_SPECIAL}")):
            for part, values in parts.items():
                arrays[f"distance{part}:{name}"] = np.sqrt(values[table])
            arrays[f"distance_count:{name}"] = self.divergences.total("c")[table]
        return arrays

    @property
    def layers(self) -> list[int]:
        """Return the layers of the first model."""
        return sorted({layer for layer, _ in self.heads[0]})

    def arrangement(self, measure: str, distances: Mapping[str, Floats]) -> dict[str, NDArray[Any]]:
        """Return order, clusters, places and the distances of layers, by the names of a result's arrays."""
        arrays: dict[str, NDArray[Any]] = {}
        # Sums over the pairs of heads of two layers, each pair once, (2, layer, layer).
        members = np.array([[float(layer == own) for own, _ in self.heads[0]] for layer in self.layers])
        sums, counts = (members @ np.triu(self.divergences.total(part), 1) @ members.T for part in ("s", "c"))
        between = np.sqrt(np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0))
        for table, name in enumerate((measure, f"{measure}{WITHOUT_SPECIAL}")):
            arrays[f"merges:{name}"], arrays[f"order:{name}"] = cluster_heads(distances[f"distance:{name}"])
            arrays[f"places:{name}"], arrays[f"explained:{name}"] = classical_mds(distances[f"distance:{name}"])
            layers = between[table]
            arrays[f"layer_distance:{name}"] = np.where(np.isnan(layers), layers.T, layers)
        return arrays


@dataclass(kw_only=True, eq=False)
class PairPart(Part):
    """Hold sums over texts.

    Attributes:
        sums: The sums of all pairs; None before any text.
    """

    sums: PairSums | None = None
    _open: Floats | None = None
    _n_open_tokens: int = 0


@dataclass(frozen=True, eq=False)
class _Seen:
    """Hold a model's attention on a batch, and the heads that are compared, in order of layers."""

    model: Model
    layers: Mapping[int, Attention]
    heads: tuple[HeadPlace, ...]
    kept: Sequence[int]

    @classmethod
    def of(cls, model: Model, batch: Batch, chosen: Chosen) -> _Seen:
        by_kind = see(model, batch, chosen.layers)
        layers = dict(sorted(next(iter(by_kind.values()), {}).items()))
        places = [(layer, head) for layer, attention in layers.items() for head in range(count_heads(attention))]
        if chosen.picked is None:
            kept = [row for row, (_, head) in enumerate(places) if head in chosen.heads]
        else:
            kept = [row for row, place in enumerate(places) if place in chosen.picked]
        if not kept:
            raise AttnscopeError("none of the chosen layers and heads has attention", "choose others with -L and -H")
        return cls(model, layers, tuple(places[row] for row in kept), kept)

    def rows(self, text: int, queries: torch.Tensor, n_keys: int) -> NDArray[Any]:
        """Return the weights of some queries of a text, (head, query, key)."""
        kind = self.model.info.kinds[0]
        rows = [read_rows(attention, kind, text, queries, n_keys)[0] for attention in self.layers.values()]
        return torch.cat(rows).numpy()[self.kept]


@dataclass(frozen=True, eq=False)
class _Measured:
    """Hold a batch's results: the heads of each model, and each text's sums or the place where it is broken."""

    heads: tuple[tuple[HeadPlace, ...], ...]
    texts: Sequence[Floats | Place]


class PairMeasurer(Measurer[PairPart]):
    """Compares the heads of one model, or of two, on blocks of texts.

    Two models have to cut every text into the same tokens.
    """

    def __init__(self, *models: Model, choice: Choice, measure: str) -> None:
        super().__init__()
        self._models = models
        self._measure = measure
        self._chosen = [choice.within(model.info) for model in models]
        self._shape = self._chosen[0].n_heads, self._chosen[-1].n_heads
        _require_memory(self._shape)

    def start(self, block: Block) -> PairPart:
        """Return sums of nothing yet."""
        return PairPart()

    def batches(self, block: Block) -> list[Sequence[Chunk]]:
        """Cut a block into batches: chunks of long texts one by one, in order, then whole texts, the longest first."""
        # Every model must cut the texts into the same tokens.
        limits = [model.info.max_tokens for model in self._models if model.info.max_tokens is not None]
        how: dict[str, Any] = {"limit": min(limits, default=None), "special_ids": special_ids(self._models[0])}
        parts, *others = (
            [part for batch in block_batches(block, model.tokenizer.encode, **how) for part in batch]
            for model in self._models
        )
        for theirs in others:
            _require_same_tokens(self._models, parts, theirs)
        long = sorted((part for part in parts if part.n_chunks > 1), key=lambda part: (part.text, part.number))
        # Each text has sums of its own until they are added: of many heads fewer texts fit into memory.
        most = max(1, _BYTES_AT_ONCE // (4 * 8 * math.prod(self._shape)))
        cut: list[Sequence[Chunk]] = [(part,) for part in long]
        for batch in reversed(batches((part for part in parts if part.n_chunks == 1), TOKEN_BUDGET)):
            cut += [batch[first : first + most] for first in range(0, len(batch), most)]
        return cut

    def measure(self, batch: Sequence[Chunk]) -> _Measured:
        """Return the sums of each text of a batch."""
        inputs = batch_of([part.tokens for part in batch])
        seen = [_Seen.of(model, inputs, chosen) for model, chosen in zip(self._models, self._chosen, strict=True)]
        texts = [self._sum_text(seen, row, part) for row, part in enumerate(batch)]
        return _Measured(tuple(each.heads for each in seen), texts)

    def add(self, part: PairPart, batch: Sequence[Chunk], result: _Measured) -> None:
        """Add the texts of a batch; without those on which a model computes NaN or infinity."""
        finished = []
        for chunk, sums in zip(batch, result.texts, strict=True):
            if isinstance(sums, tuple):
                part.broken.setdefault(chunk.text, sums)
            if isinstance(sums, tuple) or chunk.text in part.broken:
                continue
            # Chunks of a long text add up to one text; the last one finishes it.
            if chunk.number == 0 or part._open is None:
                part._open = np.zeros_like(sums)
                part._n_open_tokens = 0
            part._open = part._open + sums
            part._n_open_tokens += len(chunk)
            if chunk.number + 1 == chunk.n_chunks:
                finished.append(part._open)
                part.n_texts += 1
                part.n_tokens += part._n_open_tokens
                part.n_chunked += chunk.n_chunks > 1
        if not finished:
            return
        # Sums and counts of the finished texts, (text, 2, head, head) each.
        sums, counts = np.stack(finished, 1)
        if part.sums is None:
            part.sums = PairSums(result.heads, RunningSums(sums.shape[1:]))
        part.sums.divergences.add(sums, counts)

    def _sum_text(self, seen: Sequence[_Seen], row: int, part: Chunk) -> Floats | Place:
        """Return the sums and counts of a chunk, (2, 2, head, head); or where a weight is NaN or infinite."""
        # Take so many queries at a time that all heads' weights fit WEIGHTS_AT_ONCE.
        n_tokens = len(part)
        n_heads = sum(len(each.kept) for each in seen)
        step = max(16, WEIGHTS_AT_ONCE // max(1, n_tokens * n_heads))
        ordinary = ~part.tokens.sinks(self._models[0].info.kinds[0])
        total = np.zeros((2, 2, len(seen[0].kept), len(seen[-1].kept)))
        for first in range(0, n_tokens, step):
            queries = torch.arange(first, min(n_tokens, first + step))
            weights = [each.rows(row, queries, n_tokens) for each in seen]
            for each, rows in zip(seen, weights, strict=True):
                is_finite = np.isfinite(rows).all((1, 2))
                if not is_finite.all():
                    return each.model.info.kinds[0], each.heads[int(is_finite.argmin())][0]
            # With all tokens, and without those that heads rest on. (2, head, head) each
            whole = sum_rows(self._measure, weights)
            rest = whole
            if not ordinary.all():
                chosen = ordinary[queries.numpy()]
                rest = sum_rows(self._measure, [divide_by_rest(rows[:, chosen][:, :, ordinary]) for rows in weights])
            total += np.stack([whole, rest], 1)
        return total


def sum_rows(measure: str, rows: Sequence[NDArray[Any]]) -> Floats:
    """Return the divergences of all pairs of heads, summed over queries, and over how many, (2, head, head).

    `rows` are weights of one model, or of two, each (head, query, key).
    """
    first, *others = (torch.from_numpy(weights) for weights in rows)
    sums = SUMS[measure](first, others[0] if others else None)  # type: ignore[index]  # one of MEASURES
    return np.stack([part.numpy() for part in sums])


def heads_table(model: Model, heads: Sequence[HeadPlace]) -> Table:
    """Return a table of heads, by layer and number."""
    layers, numbers = zip(*heads, strict=True)
    return Table.of_arrays(HEADS, kind=[model.info.kinds[0]] * len(heads), layer=layers, head=numbers)


def require_one_kind(model: Model) -> None:
    """Refuse encoder-decoders."""
    if len(model.info.kinds) > 1:
        raise AttnscopeError(
            f"{model.info.name} has an encoder and a decoder; heads are compared in models that have one of them",
            "look at single texts with: attnscope heatmap",
        )


def _require_same_tokens(models: Sequence[Model], ours: Sequence[Chunk], theirs: Sequence[Chunk]) -> None:
    """Refuse texts that two models cut into different tokens."""
    # Batches are sorted by length, so chunks of one place in the lists may be of different texts.
    first, second = ({(part.text, part.number): part for part in parts} for parts in (ours, theirs))
    for key in sorted(first.keys() | second.keys()):
        cuts = first.get(key), second.get(key)
        if cuts[0] and cuts[1] and _are_equal(cuts[0].tokens, cuts[1].tokens):
            continue
        beginnings = [f"{' '.join(part.tokens.labels[:8])} …" for part in cuts if part]
        raise AttnscopeError(
            f"{' and '.join(model.info.name for model in models)} split the same text into different tokens: "
            + " and ".join(beginnings),
            "compare models that share a tokenizer, such as two checkpoints of one",
        )


def _are_equal(a: Tokens, b: Tokens) -> bool:
    return a.labels == b.labels and np.array_equal(a.ids, b.ids) and np.array_equal(a.special, b.special)


def _require_memory(shape: tuple[int, int]) -> None:
    """Refuse pairs whose sums could not be held, before the models run for minutes."""
    said = f"all pairs of {shape[0]} and {shape[1]} heads"
    require_memory(math.prod(shape) * _BYTES_A_PAIR, said, "choose fewer layers and heads (-L, -H)")
