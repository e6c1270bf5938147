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
from attnscope.studies.heads.measure_intervals import divide
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

    def mean(name: str, sums_of: NDArray[np.float64]) -> NDArray[np.float64]:
        # From (measure, text x unit, head) to (text, head).
        number = sums.names.index(name)
        totals = sums_of[number].reshape(n_texts, -1, sums_of.shape[2]).sum(1)
        counts = sums.count[number].reshape(n_texts, -1, sums_of.shape[2]).sum(1)
        return divide(totals, counts)

    if rank != CONTENT:
        return mean(rank, sums.sum)
    nats = mean("entropy_nats", sums.uniform_sum) - mean("entropy_nats", sums.sum)
    return (1 - mean("resting", sums.sum)) * np.maximum(nats, 0.0)


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

        def lot_of_text(number: int) -> tuple[int, int, int]:
            scored = texts[number]
            return scored.lot, scored.text.index, scored.number

        order = np.array(sorted(range(len(texts)), key=lot_of_text), np.int64)
        every = cls(tuple(heads), tuple(texts), values[order], n_top, n_sample)
        # Keep the sample and the best of each head.
        best = every.best()
        numbers = np.union1d(every.sample, best[best >= 0]).astype(np.int64)
        return replace(every, texts=tuple(texts[number] for number in order[numbers]), values=every.values[numbers])

    def of_heads(self, heads: Sequence[Place]) -> Scores:
        """Return the scores of some heads, in their order."""
        columns = [self.heads.index(head) for head in heads]
        return replace(self, heads=tuple(heads), values=self.values[:, columns])

    def merge(self, other: Scores) -> Scores:
        """Return the scores of the texts of both, which have no text in common."""
        values = np.concatenate([self.values, other.values])
        return self.of(self.heads, (*self.texts, *other.texts), values, self.n_top, self.n_sample)

    def best(self) -> NDArray[np.int64]:
        """Return the best texts of each head, (head, place), as numbers of texts; -1 where there are no more."""
        # Texts are in the order of their lots, and ties go to it.
        order = np.argsort(-self.values.astype(np.float64), axis=0, kind="stable")[: self.n_top]
        is_undefined = np.isnan(np.take_along_axis(self.values, order, 0))
        return np.where(is_undefined, -1, order).T.astype(np.int64)

    @property
    def sample(self) -> range:
        """Return the texts of the sample, as numbers of texts."""
        return range(min(self.n_sample, len(self.texts)))

    def deciles(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the deciles of each head's scores in the sample.

        With m texts, sorted by score and hash, decile d begins at text d m / 10.

        Returns:
            Their ends, (head, 11), NaN if no text has a score: the lowest score of each decile, and last the highest of
            all. And the text with the least hash in each decile, (head, 10), -1 if it has none.
        """
        values = self.values[: len(self.sample)]
        n_heads = values.shape[1]
        ends = np.full((n_heads, 11), np.nan, np.float32)
        examples = np.full((n_heads, 10), -1, np.int64)
        for head in range(n_heads):
            # NaN is sorted last.
            ranked = np.argsort(values[:, head].astype(np.float64), kind="stable")
            ranked = ranked[~np.isnan(values[ranked, head])]
            if not len(ranked):
                continue
            edges = np.arange(11) * len(ranked) // 10
            ends[head] = values[ranked[np.minimum(edges, len(ranked) - 1)], head]
            # The least number of a text is that of the least hash.
            for decile in range(10):
                members = ranked[edges[decile] : edges[decile + 1]]
                examples[head, decile] = members.min() if len(members) else -1
        return ends, examples


@dataclass(kw_only=True, eq=False)
class ScoredSums(HeadSums):
    """Hold sums over texts, and the texts that show what heads do.

    Attributes:
        scores: The texts that are kept, with their scores; None before any text.
    """

    scores: Scores | None = None
    _block: dict[int, CorpusText] = field(default_factory=dict)


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
        self._rank = rank
        self._n_top = n_top
        self._n_sample = n_sample
        self._seed = seed

    def start(self, block: Block) -> ScoredSums:
        """Return sums of nothing yet."""
        return ScoredSums(_block={text.index: text for text in block.texts})

    def add(self, part: HeadSums, batch: Sequence[Chunk], result: BatchResult) -> None:
        """Add a batch, and the score of each text by each head; but not of texts that are left out."""
        assert isinstance(part, ScoredSums)
        super().add(part, batch, result)
        # Scores by the heads of each layer in turn, (text, head).
        heads: list[Place] = []
        values: list[NDArray[np.float64]] = []
        for kind, by_layer in result.sums.items():
            for layer, sums in sorted(by_layer.items()):
                values.append(score(sums, self._rank, len(batch)))
                heads += [(kind, layer, head) for head in range(sums.sum.shape[2])]
        # Texts that are whole.
        rows = [row for row, chunk in enumerate(batch) if chunk.text not in part.broken]
        if not rows:
            return
        texts = [self._scored(part, batch[row]) for row in rows]
        every = np.concatenate(values, 1).astype(np.float32)[rows]
        scores = Scores.of(heads, texts, every, self._n_top, self._n_sample)
        part.scores = part.scores.merge(scores) if part.scores else scores

    def _scored(self, part: ScoredSums, chunk: Chunk) -> ScoredText:
        text = part._block[chunk.text]
        lot = int.from_bytes(lot_of(text, self._seed, chunk.number), "big")
        return ScoredText(text, chunk.number, len(chunk), lot)
