"""Choose the texts that show a head's behaviour: the best of each head, and a sample drawn by hash.

This is the first pass of an atlas: `AtlasMeasurer` scores texts as it measures heads. Both choices are the same for
every cut of a corpus: the best of all texts are among the best of its parts, and the texts with the least hashes among
those with the least of its parts. Ties go to the lesser hash, so no order of texts matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.corpus import Block, Chunk, CorpusText
from attnscope.studies.atlas.options import CONTENT, AtlasOptions
from attnscope.studies.describe.rows import lot_of
from attnscope.studies.heads.measure_intervals import divide
from attnscope.studies.heads.measuring import BatchResult, HeadMeasurer, HeadSums

if TYPE_CHECKING:
    from attnscope.core.catalogue import Measured

CONTENT_MEANING = (
    "the share of attention that rests on neither special tokens nor the first one, times the nats that attention is "
    "from uniform: means over the queries of the text"
)


def score(sums: Measured, rank: str, n_texts: int) -> NDArray[np.float64]:
    """Return the score of each text by each head of a layer, (text, head); NaN if undefined.

    Args:
        sums: The measures of the layer on a batch.
        rank: The measure that texts are ranked by, or `CONTENT`.
        n_texts: How many texts the batch has.
    """

    def mean(name: str, totals: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean of a measure over the queries of each text, (text, head)."""
        # All texts have as many units: (measure, text x unit, head) -> (text, head).
        number = sums.names.index(name)
        both = np.stack([totals[number], sums.count[number]])
        total, count = both.reshape(2, n_texts, -1, both.shape[-1]).sum(2)
        return divide(total, count)

    # The mean of a measure, or the content.
    if rank != CONTENT:
        return mean(rank, sums.sum)
    nats = mean("entropy_nats", sums.uniform_sum) - mean("entropy_nats", sums.sum)
    return (1 - mean("resting", sums.sum)) * np.maximum(nats, 0.0)


@dataclass(frozen=True, order=True)
class ScoredText:
    """Hold a text, or a chunk of a long one. Texts are in the order of their hashes.

    Attributes:
        lot: The hash of the text, by which it is drawn.
        index: The number of the text in the corpus.
        number: The number of the chunk in the text, from 0.
        text: The text.
        n_tokens: How many tokens the chunk has.
    """

    lot: int
    index: int
    number: int
    text: CorpusText = field(compare=False)
    n_tokens: int = field(compare=False)


@dataclass(frozen=True, eq=False)
class Scores:
    """Hold the texts that are among the best of a head, or of the sample, with their scores by all heads.

    Attributes:
        texts: The texts, by their hashes.
        values: Their scores, (text, head), float32; NaN where undefined. Heads are those of each layer in turn.
        n_top: How many texts of a head are its best.
        n_sample: How many texts are the sample.
    """

    texts: Sequence[ScoredText] = ()
    values: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    n_top: int = 0
    n_sample: int = 0

    def merge(self, other: Scores) -> Scores:
        """Return the scores of the texts of both, which have no text in common."""
        texts = [*self.texts, *other.texts]
        return replace(
            self,
            texts=texts,
            values=np.concatenate([self.values, other.values]),
        ).choose()

    def choose(self) -> Scores:
        """Return the scores of the texts that are kept among all these, which are in any order."""
        # Put them into their order, by which the best and the sample are chosen.
        every = self._take(sorted(range(len(self.texts)), key=self.texts.__getitem__))
        best = every.best()
        return every._take(sorted({*every.sample, *best[best >= 0].tolist()}))

    def _take(self, numbers: Sequence[int]) -> Scores:
        """Return the scores of some texts."""
        texts = [self.texts[number] for number in numbers]
        return replace(self, texts=texts, values=self.values[numbers])

    def best(self) -> NDArray[np.int64]:
        """Return the best texts of each head, (head, rank), as numbers of texts; -1 where there are no more."""
        # Texts are in the order of their hashes: of equal scores the lesser hash comes first.
        order = np.argsort(
            -self.values.astype(np.float64),
            axis=0,
            kind="stable",
        )[: self.n_top]
        # Texts without a score come last, and are no examples.
        is_undefined = np.isnan(np.take_along_axis(self.values, order, 0))
        return np.where(is_undefined, -1, order).T.astype(np.int64)

    @property
    def sample(self) -> range:
        """Return the texts of the sample, as numbers of texts."""
        return range(min(self.n_sample, len(self.texts)))

    def deciles(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the deciles of each head's scores in the sample.

        With m texts, sorted by score and hash, decile d begins at text d m / 10.

        Returns:
            Their ends, (head, 11), NaN if no text has a score: the lowest score of each decile, and last the highest of
            all. And the text with the least hash in each decile, (head, 10), -1 if it has none.
        """
        values = self.values[: len(self.sample)].astype(np.float64)
        n_texts, n_heads = values.shape
        # Texts by their scores, NaN last, (rank, head), and where deciles begin, (11, head).
        order = np.argsort(values, axis=0, kind="stable")
        n_scored = np.isfinite(values).sum(0)
        edges = np.arange(11)[:, None] * n_scored // 10
        ends = np.take_along_axis(
            values,
            np.take_along_axis(order, edges.clip(max=n_texts - 1), 0),
            0,
        )
        ends[-1] = np.fmax.reduce(values)
        # The least number of a text is that of the least hash. Texts without a score are in an 11th decile.
        decile = (np.arange(n_texts)[:, None, None] >= edges).sum(1) - 1
        examples = np.full((11, n_heads), n_texts)
        np.minimum.at(examples, (decile, np.arange(n_heads)), order)
        return ends.T, np.where(examples == n_texts, -1, examples)[:10].T


@dataclass(kw_only=True, eq=False)
class ScoredSums(HeadSums):
    """Hold sums over texts, and the texts that show what heads do.

    Attributes:
        scores: The texts that are kept, with their scores; None before any text.
    """

    scores: Scores | None = None
    _block: dict[int, CorpusText] = field(default_factory=dict)


class AtlasMeasurer(HeadMeasurer):
    """Measure heads as `HeadMeasurer` does, whose other arguments it takes, and keep the texts that show them."""

    def __init__(self, *arguments: Any, options: AtlasOptions, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._options = options

    def start(self, block: Block) -> ScoredSums:
        """Return sums of nothing yet."""
        return ScoredSums(_block={text.index: text for text in block.texts})

    def add(self, part: HeadSums, batch: Sequence[Chunk], result: BatchResult) -> None:
        """Add a batch, and the score of each text by each head; but not of texts that are left out."""
        assert isinstance(part, ScoredSums)
        super().add(part, batch, result)
        rows = [row for row, chunk in enumerate(batch) if chunk.text_index not in part.broken]
        if not rows:
            return
        # The texts with their hashes. Each chunk of a long text counts as one.
        texts = []
        for row in rows:
            chunk = batch[row]
            text = part._block[chunk.text_index]
            lot = int.from_bytes(lot_of(text, self._options.seed, chunk.number), "big")
            texts.append(
                ScoredText(
                    lot,
                    chunk.text_index,
                    chunk.number,
                    text,
                    len(chunk),
                )
            )
        # Scores by the heads of each layer in turn, (text, head).
        values = []
        for by_layer in result.sums.values():
            for layer in sorted(by_layer):
                values.append(score(by_layer[layer], self._options.rank, len(batch)))
        every = np.concatenate(values, 1).astype(np.float32)[rows]
        scores = Scores(
            texts,
            every,
            self._options.examples,
            self._options.sample,
        )
        part.scores = part.scores.merge(scores) if part.scores else scores.choose()
