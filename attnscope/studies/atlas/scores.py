"""Choose the texts that show a head's behaviour: the best of each head, and a sample drawn by hash.

Both are the same for every cut of a corpus: the best of all texts are among the best of its parts, and the texts with
the least hashes among those with the least of its parts. Ties go to the lesser hash, so no order of texts matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.corpus import Block, Chunk, CorpusText
from attnscope.studies.atlas.options import CONTENT
from attnscope.studies.describe.rows import lot_of
from attnscope.studies.heads.measuring import BatchResult, HeadMeasurer, HeadSums

if TYPE_CHECKING:
    from attnscope.core.catalogue import Measured

CONTENT_WHAT = (
    "the share of attention that rests on neither special tokens nor the first one, times the nats that attention is "
    "from uniform: means over the queries of the text"
)

Place = tuple[str, int, int]
"""A head: kind of attention, layer, number."""


def score(sums: Measured, rank: str, n_texts: int) -> NDArray[np.float64]:
    """Return each text's score by each head of a layer, (text, head); NaN if undefined. Texts have as many units."""

    def value(name: str, sums_of: NDArray[np.float64]) -> NDArray[np.float64]:
        at = sums.names.index(name)
        total, count = (part[at].reshape(n_texts, -1, part.shape[2]).sum(1) for part in (sums_of, sums.count))
        mean: NDArray[np.float64] = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
        return mean

    if rank != CONTENT:
        return value(rank, sums.sum)
    nats = value("entropy_nats", sums.uniform_sum) - value("entropy_nats", sums.sum)
    return (1 - value("resting", sums.sum)) * np.maximum(nats, 0.0)


@dataclass(frozen=True, eq=False)
class ScoredText:
    """Hold a text, or a chunk of a long one.

    Attributes:
        number: Which chunk of it.
        lot: Its hash, by which it is drawn.
    """

    text: CorpusText
    number: int
    n_tokens: int
    lot: int

    @property
    def order(self) -> tuple[int, int, int]:
        """Return what texts are sorted by."""
        return self.lot, self.text.index, self.number


@dataclass(frozen=True, eq=False)
class Scores:
    """Hold the texts that are among the best of a head, or of the sample, with their scores by all heads.

    Attributes:
        texts: The texts, by their lots.
        values: (text, head), float32; NaN where a score is undefined.
        n_top: How many are the best of a head.
        n_sample: How many are the sample.
    """

    heads: tuple[Place, ...]
    texts: tuple[ScoredText, ...]
    values: NDArray[np.float32]
    n_top: int
    n_sample: int

    @classmethod
    def of(
        cls, heads: Sequence[Place], texts: Sequence[ScoredText], values: NDArray[np.float32], n_top: int, n_sample: int
    ) -> Scores:
        """Return the texts that are kept among all given."""
        order = sorted(range(len(texts)), key=lambda at: texts[at].order)
        every = cls(tuple(heads), tuple(texts[at] for at in order), values[order], n_top, n_sample)
        # Keep the sample and the best of each head.
        keeps = np.zeros(len(texts), np.bool_)
        keeps[:n_sample] = True
        best = every.best()
        keeps[best[best >= 0]] = True
        return replace(
            every,
            texts=tuple(text for text, is_kept in zip(every.texts, keeps, strict=True) if is_kept),
            values=every.values[keeps],
        )

    def of_heads(self, heads: Sequence[Place]) -> Scores:
        """Return the scores of some heads, in their order."""
        columns = [self.heads.index(head) for head in heads]
        return replace(self, heads=tuple(heads), values=self.values[:, columns])

    def merge(self, other: Scores) -> Scores:
        """Return those of the texts of both, which have no text in common."""
        heads = self.heads or other.heads
        return self.of(
            heads, (*self.texts, *other.texts), np.concatenate([self.values, other.values]), self.n_top, self.n_sample
        )

    def best(self) -> NDArray[np.int64]:
        """Return the best texts of each head, (head, place), as numbers of texts; -1 where there are no more."""
        most = min(self.n_top, len(self.texts))
        below = np.where(np.isnan(self.values), np.inf, -self.values.astype(np.float64))
        order = np.argsort(below, axis=0, kind="stable")[:most]  # texts are in the order of their lots: ties go to it
        undefined = np.isnan(np.take_along_axis(self.values, order, 0)) if most else order
        return np.where(undefined, -1, order).T.astype(np.int64)

    @property
    def sample(self) -> range:
        """Return the texts of the sample, as numbers of texts."""
        return range(min(self.n_sample, len(self.texts)))

    def deciles(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the deciles of each head's scores in the sample.

        Returns:
            Their ends, (head, 11), NaN if no text has a score: the lowest score of each decile, and last the highest of
            all. And the text with the least hash in each decile, (head, 10), -1 if it has none. With m texts, sorted by
            score and hash, decile d begins at text d m / 10.
        """
        values = self.values[: len(self.sample)]
        n_heads = values.shape[1]
        ends, examples = np.full((n_heads, 11), np.nan, np.float32), np.full((n_heads, 10), -1, np.int64)
        for head in range(n_heads):
            defined = np.flatnonzero(~np.isnan(values[:, head]))
            if not len(defined):
                continue
            own = values[defined, head].astype(np.float64)
            ranked = defined[np.argsort(own, kind="stable")]
            edges = [decile * len(ranked) // 10 for decile in range(11)]
            ends[head] = values[ranked[np.minimum(edges, len(ranked) - 1)], head]
            for decile, (first, last) in enumerate(zip(edges, edges[1:], strict=False)):
                if last > first:
                    examples[head, decile] = ranked[first:last].min()  # texts are in the order of their lots
        return ends, examples


@dataclass(kw_only=True, eq=False)
class ScoredSums(HeadSums):
    """Hold sums over texts, and the texts that show what heads do.

    Attributes:
        scores: The texts that are kept, with their scores; None before any text.
    """

    scores: Scores | None = None
    _block: dict[int, CorpusText] = field(default_factory=dict)
    _heads: tuple[Place, ...] = ()
    _texts: list[ScoredText] = field(default_factory=list)
    _values: list[NDArray[np.float32]] = field(default_factory=list)


class AtlasMeasurer(HeadMeasurer):
    """Measure heads as a study of heads does, and keep the texts that show them.

    Args:
        arguments: Positional arguments of `HeadMeasurer`.
        rank: What texts are ranked by.
        n_top: How many best texts of each head are kept.
        n_sample: How many texts are sampled.
        seed: Of the hashes.
        named: Keyword arguments of `HeadMeasurer`.
    """

    def __init__(self, *arguments: Any, rank: str, n_top: int, n_sample: int, seed: int = 0, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._rank, self._n_top, self._n_sample, self._seed = rank, n_top, n_sample, seed

    def start(self, block: Block) -> ScoredSums:
        """Return sums of nothing yet."""
        return ScoredSums(_block={text.index: text for text in block.texts})

    def add(self, part: HeadSums, batch: Sequence[Chunk], result: BatchResult) -> None:
        """Add a batch, and the score of each text by each head; but not of texts that are left out."""
        assert isinstance(part, ScoredSums)
        super().add(part, batch, result)
        # Scores of the batch, heads in order of kind, layer and number. (text, head)
        layers = [
            (kind, layer, sums) for kind, of_kind in result.sums.items() for layer, sums in sorted(of_kind.items())
        ]
        part._heads = tuple((kind, layer, head) for kind, layer, sums in layers for head in range(sums.sum.shape[2]))
        scores = np.concatenate([score(sums, self._rank, len(batch)) for *_, sums in layers], 1).astype(np.float32)
        for values, chunk in zip(scores, batch, strict=True):
            if chunk.text not in part.broken:
                text = part._block[chunk.text]
                lot = int.from_bytes(lot_of(text, self._seed, chunk.number), "big")
                part._texts.append(ScoredText(text, chunk.number, len(chunk), lot))
                part._values.append(values)

    def finish(self, part: HeadSums) -> ScoredSums:
        """Return the sums, and the texts that are kept."""
        assert isinstance(part, ScoredSums)
        super().finish(part)
        if part._values:
            part.scores = Scores.of(part._heads, part._texts, np.stack(part._values), self._n_top, self._n_sample)
        return part
