"""Choose the texts that show a head's behaviour: the best of each head, and a random sample.

This is the first pass of an atlas: `AtlasMeasurer` scores texts as it measures heads. The sample is the texts with the
smallest hashes, and of two texts with equal scores the one with the smaller hash comes first. So the choice depends
neither on the order of texts nor on how a corpus is shared among workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.sampled_rows import Floats, Integers
from attnscope.corpus import Chunk, CorpusText, TextBlock
from attnscope.studies.atlas.options import CONTENT, AtlasOptions
from attnscope.studies.describe.rows import hash_text
from attnscope.studies.heads.measure_intervals import divide
from attnscope.studies.heads.measuring import BatchResult, HeadMeasurer, HeadSums

if TYPE_CHECKING:
    from attnscope.core.catalogue import MeasureSums

CONTENT_MEANING = (
    "the share of attention that rests on neither special tokens nor the first one, times the nats that attention is "
    "from uniform: means over the queries of the text"
)


def score(sums: MeasureSums, rank: str, n_texts: int) -> Floats:
    """Return the score of each text by each head of a layer, (text, head); NaN if undefined.

    Args:
        sums: The measures of the layer on a batch.
        rank: The measure that texts are ranked by, or `CONTENT`.
        n_texts: How many texts the batch has.
    """

    def mean(name: str, totals: Floats) -> Floats:
        """Return the mean of a measure over the queries of each text, (text, head)."""
        # A unit is a block of a text's queries, and all texts have as many: (text x unit, head) -> (text, head).
        measure = sums.names.index(name)
        shape = n_texts, -1, totals.shape[-1]
        total = totals[measure].reshape(shape).sum(1)
        count = sums.count[measure].reshape(shape).sum(1)
        return divide(total, count)

    if rank != CONTENT:
        return mean(rank, sums.sum)
    # See CONTENT_MEANING; "resting" is the share of attention on special tokens and the first one.
    nats = mean("entropy_nats", sums.uniform_sum) - mean("entropy_nats", sums.sum)
    return (1 - mean("resting", sums.sum)) * np.maximum(nats, 0.0)


@dataclass(frozen=True, order=True)
class ScoredText:
    """Hold a text, or a chunk of a long one. Scored texts sort by hash, then by index and number.

    Attributes:
        digest: The hash of the text's content and of the chunk's number.
        index: The index of the text in the corpus.
        number: The number of the chunk in its text, from 0.
        text: The text.
        n_tokens: How many tokens the chunk has.
    """

    digest: int
    index: int
    number: int
    text: CorpusText = field(compare=False)
    n_tokens: int = field(compare=False)


@dataclass(frozen=True, eq=False)
class Scores:
    """Hold the best texts of each head and the texts of the sample, with their scores by all heads.

    Attributes:
        texts: The texts, by rising hash; those that `choose` is called on may be in any order.
        values: Their scores, (text, head), float32; NaN where undefined. The heads of the first layer come first.
        n_top: How many best texts each head has, at most.
        n_sample: How many texts the sample has, at most.
    """

    texts: Sequence[ScoredText] = ()
    values: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    n_top: int = 0
    n_sample: int = 0

    def merge(self, other: Scores) -> Scores:
        """Choose among the texts of both, which have no text in common."""
        values = np.concatenate([self.values, other.values])
        return replace(self, texts=[*self.texts, *other.texts], values=values).choose()

    def choose(self) -> Scores:
        """Return the scores of the sample's texts and of each head's best ones, without the other texts."""
        # `sample` and `best` take texts in the order of their hashes.
        sorted_scores = self._take(sorted(range(len(self.texts)), key=self.texts.__getitem__))
        best = sorted_scores.best()
        return sorted_scores._take(sorted({*sorted_scores.sample, *best[best >= 0].tolist()}))

    def _take(self, indices: Sequence[int]) -> Scores:
        """Return the scores of some texts, in the order of their indices."""
        texts = [self.texts[index] for index in indices]
        return replace(self, texts=texts, values=self.values[indices])

    def best(self) -> Integers:
        """Return the indices of each head's best texts, (head, rank), the best first; -1 where there are no more."""
        # The sort is stable and NaN comes last: of equal scores the text with the smaller hash comes first.
        order = np.argsort(-self.values.astype(np.float64), axis=0, kind="stable")[: self.n_top]
        # Texts without a score are no examples.
        is_undefined = np.isnan(np.take_along_axis(self.values, order, 0))
        return np.where(is_undefined, -1, order).T.astype(np.int64)

    @property
    def sample(self) -> range:
        """Return the indices of the sample's texts: these have the smallest hashes."""
        return range(min(self.n_sample, len(self.texts)))

    def deciles(self) -> tuple[Floats, Integers]:
        """Return the deciles of each head's scores in the sample, and an example of each decile.

        The m texts that have a score are sorted by score, then by hash. Decile d begins with text d m / 10.

        Returns:
            The lowest score of each decile, and behind them the highest score of all, (head, 11); NaN if no text has a
            score. And the index of the text with the smallest hash in each decile, (head, 10); -1 if it is empty.
        """
        # Scores of the sample's texts, (head, text).
        values = self.values[: len(self.sample)].T.astype(np.float64)
        ends = np.full((len(values), 11), np.nan)
        examples = np.full((len(values), 10), -1)
        for head, scores in enumerate(values):
            # The texts that have a score, by rising score; NaN comes last.
            order = np.argsort(scores, kind="stable")[: np.isfinite(scores).sum()]
            starts = np.arange(11) * len(order) // 10
            if len(order):
                ends[head] = scores[order[starts.clip(max=len(order) - 1)]]
            # Indices rise with hashes: the smallest index of a decile has the smallest hash.
            for decile, (start, stop) in enumerate(pairwise(starts)):
                if start < stop:
                    examples[head, decile] = order[start:stop].min()
        return ends, examples


@dataclass(kw_only=True, eq=False)
class ScoredSums(HeadSums):
    """Hold sums over texts, and the texts that show what heads do.

    Attributes:
        scores: The texts that are kept, with their scores; None before any text.
    """

    scores: Scores | None = None
    # The texts of the block that is measured, by their index in the corpus
    _block: dict[int, CorpusText] = field(default_factory=dict)


class AtlasMeasurer(HeadMeasurer):
    """Measure heads as `HeadMeasurer` does, and keep the texts that show them; it takes the same arguments."""

    def __init__(self, *arguments: Any, options: AtlasOptions, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._options = options

    def start(self, block: TextBlock) -> ScoredSums:
        """Return sums of nothing yet."""
        return ScoredSums(_block={text.index: text for text in block.texts})

    def add(self, part: HeadSums, batch: Sequence[Chunk], result: BatchResult) -> None:
        """Add a batch, and the score of each text by each head, except for broken texts."""
        assert isinstance(part, ScoredSums)
        super().add(part, batch, result)
        rows = [row for row, chunk in enumerate(batch) if chunk.text_index not in part.broken]
        if not rows:
            return
        # Hash the texts; each chunk of a long text counts as a text.
        texts = []
        for row in rows:
            chunk = batch[row]
            text = part._block[chunk.text_index]
            digest = int.from_bytes(hash_text(text, self._options.seed, chunk.number), "big")
            texts.append(ScoredText(digest, chunk.text_index, chunk.number, text, len(chunk)))
        # Score them by the heads of each layer, (text, head).
        layers = []
        for by_layer in result.sums.values():
            for layer in sorted(by_layer):
                layers.append(score(by_layer[layer], self._options.rank, len(batch)))
        values = np.concatenate(layers, 1).astype(np.float32)[rows]
        scores = Scores(texts, values, self._options.examples, self._options.sample)
        part.scores = part.scores.merge(scores) if part.scores else scores.choose()
