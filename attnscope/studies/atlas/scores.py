"""Choose the texts that show what each head does: its best-scoring texts, and a random sample of all texts.

This is the first pass of an atlas: `AtlasMeasurer` scores texts while it measures heads. The texts with the smallest
hashes of their content are the sample. If two texts have equal scores, the one with the smaller hash comes first.
Therefore the choice depends neither on the order of texts nor on how workers share a corpus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.arrays import Floats, Integers, divide
from attnscope.corpus import Chunk, CorpusText, TextBlock
from attnscope.studies.atlas.options import CONTENT_SCORE, AtlasOptions
from attnscope.studies.describe.rows import hash_text
from attnscope.studies.heads.measuring import BatchResult, HeadMeasurer, HeadSums

if TYPE_CHECKING:
    from attnscope.core.catalogue import MeasureSums

CONTENT_MEANING = (
    "the share of attention that rests on neither special tokens nor the first one, times the nats that attention is "
    "from uniform: means over the queries of the text"
)


def score_texts(sums: MeasureSums, score_name: str, n_texts: int) -> Floats:
    """Return the score of each text by each head of a layer, (text, head); NaN if undefined.

    Args:
        sums: The sums of all measures of a layer on a batch.
        score_name: The name of a measure, or `CONTENT_SCORE`.
        n_texts: The number of texts in the batch.
    """

    def mean(name: str, totals: Floats) -> Floats:
        """Return the mean of a measure over the queries of each text, (text, head)."""
        # `sums` has a row for each unit, a block of queries of one text. All texts have the same number of units:
        # (text · unit, head) -> (text, unit, head) -> (text, head).
        measure = sums.names.index(name)
        shape = n_texts, -1, totals.shape[-1]
        total = totals[measure].reshape(shape).sum(1)
        count = sums.count[measure].reshape(shape).sum(1)
        return divide(total, count)

    if score_name != CONTENT_SCORE:
        return mean(score_name, sums.sum)
    # CONTENT_MEANING is this formula in words. "resting" is the share of attention on special and first tokens.
    # The entropy of uniform attention, less that of the head's attention, is the head's distance from uniform in nats.
    nats = mean("entropy_nats", sums.uniform_sum) - mean("entropy_nats", sums.sum)
    return (1 - mean("resting", sums.sum)) * np.maximum(nats, 0.0)


@dataclass(frozen=True, order=True)
class ScoredText:
    """Hold a text, or a chunk of a long text. The order of scored texts is by hash, then by index and number.

    Attributes:
        digest: The hash of the text's content and of the chunk's number.
        index: The index of the text in the corpus.
        number: The index of the chunk in its text; 0 for a text of one chunk.
        text: The text.
        n_tokens: The number of tokens in the chunk.
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
        texts: The texts, by ascending hash. `choose` sorts them; before it is called, they may be in any order.
        values: The scores of the texts, (text, head), float32; NaN = undefined. Heads are ordered by layer.
        n_top: The maximum number of best texts per head.
        n_sample: The maximum number of texts in the sample.
    """

    texts: Sequence[ScoredText] = ()
    values: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    n_top: int = 0
    n_sample: int = 0

    def merge(self, other: Scores) -> Scores:
        """Return the chosen texts from both. The two have no text in common."""
        values = np.concatenate([self.values, other.values])
        return replace(self, texts=[*self.texts, *other.texts], values=values).choose()

    def choose(self) -> Scores:
        """Return only the texts of the sample and the best texts of each head, with their scores."""
        # Sort first, because `sample` and `best` rely on the order by hash.
        sorted_scores = self._take(sorted(range(len(self.texts)), key=self.texts.__getitem__))
        best = sorted_scores.best()
        return sorted_scores._take(sorted({*sorted_scores.sample, *best[best >= 0].tolist()}))

    def _take(self, indices: Sequence[int]) -> Scores:
        """Return only the texts at some indices, in that order, with their scores."""
        texts = [self.texts[index] for index in indices]
        return replace(self, texts=texts, values=self.values[indices])

    def best(self) -> Integers:
        """Return the indices of each head's best texts, (head, rank), the best first; -1 = there are no more texts."""
        # NaN is sorted last. The sort is stable, so with equal scores the text with the smaller hash comes first.
        order = np.argsort(-self.values.astype(np.float64), axis=0, kind="stable")[: self.n_top]
        # A text without a score is not an example.
        is_undefined = np.isnan(np.take_along_axis(self.values, order, 0))
        return np.where(is_undefined, -1, order).T.astype(np.int64)

    @property
    def sample(self) -> range:
        """Return the indices of the texts in the sample: the first texts, which have the smallest hashes."""
        return range(min(self.n_sample, len(self.texts)))

    def deciles(self) -> tuple[Floats, Integers]:
        """Return the deciles of each head's scores in the sample, and an example text of each decile.

        The m texts that have a score are sorted by score, then by hash. Decile d begins with text d m / 10.

        Returns:
            The edges of the deciles, (head, 11): the lowest score of each decile, then the highest score of all. NaN =
            no text has a score. And the index of each decile's example, (head, 10): its text with the smallest hash.
            -1 = the decile has no text.
        """
        # The scores of the texts in the sample, (head, text). The sample is at the front.
        values = self.values[: len(self.sample)].T.astype(np.float64)
        edges = np.full((len(values), 11), np.nan)
        examples = np.full((len(values), 10), -1)
        for head, scores in enumerate(values):
            # The indices of the texts that have a score, by ascending score. NaN is sorted last, and cut off.
            order = np.argsort(scores, kind="stable")[: np.isfinite(scores).sum()]
            starts = np.arange(11) * len(order) // 10
            if len(order):
                # The last edge, 10, has no text of its own, so clip it to the text with the highest score.
                edges[head] = scores[order[starts.clip(max=len(order) - 1)]]
            # Texts are sorted by hash, so the smallest index in a decile has the smallest hash.
            for decile, (start, stop) in enumerate(pairwise(starts)):
                if start < stop:
                    examples[head, decile] = order[start:stop].min()
        return edges, examples


@dataclass(kw_only=True, eq=False)
class ScoredSums(HeadSums):
    """Hold the sums of `HeadMeasurer` over texts, and the texts that an atlas keeps.

    Attributes:
        scores: The kept texts with their scores; None = no text was scored yet.
    """

    scores: Scores | None = None
    # The texts of the current block, by their index in the corpus
    _block: dict[int, CorpusText] = field(default_factory=dict)


class AtlasMeasurer(HeadMeasurer):
    """Measure heads as `HeadMeasurer` does, with the same arguments, and keep the texts that an atlas shows."""

    def __init__(self, *arguments: Any, options: AtlasOptions, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._options = options

    def start(self, block: TextBlock) -> ScoredSums:
        """Return empty sums for a block of texts."""
        return ScoredSums(_block={text.index: text for text in block.texts})

    def add(self, part: HeadSums, batch: Sequence[Chunk], result: BatchResult) -> None:
        """Add a batch, and the score of each text for each head, except for broken texts (NaN in their attention)."""
        assert isinstance(part, ScoredSums)
        super().add(part, batch, result)
        rows = [row for row, chunk in enumerate(batch) if chunk.text_index not in part.broken]
        if not rows:
            return
        # Hash the texts. Each chunk of a long text is scored like a text of its own.
        texts = []
        for row in rows:
            chunk = batch[row]
            text = part._block[chunk.text_index]
            digest = int.from_bytes(hash_text(text, self._options.seed, chunk.number), "big")
            texts.append(ScoredText(digest, chunk.text_index, chunk.number, text, len(chunk)))
        # Score them for the heads of each layer: one (text, head) array per layer.
        layer_scores = []
        for by_layer in result.sums.values():
            for layer in sorted(by_layer):
                layer_scores.append(score_texts(by_layer[layer], self._options.rank, len(batch)))
        values = np.concatenate(layer_scores, 1).astype(np.float32)[rows]
        scores = Scores(texts, values, self._options.examples, self._options.sample)
        part.scores = part.scores.merge(scores) if part.scores else scores.choose()
