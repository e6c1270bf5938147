"""The mean output of each head over all texts, which may take its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attnscope.corpus import Block, Copies
from attnscope.models.model import Model
from attnscope.studies.ablation.reading import ReadBatch, Reader
from attnscope.studies.ablation.sweep import BLOCK, Going, StandIns, require_rerunnable
from attnscope.studies.inputs.texts import Report
from attnscope.studies.running.passes import tasks_of

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention.probes import Means, Place


def heads_of(going: Going) -> StandIns:
    """How many heads each attention has, seen on the first batch."""
    measurer = MeanMeasurer(going.model, going.reader)
    for task in tasks_of(going.texts, Copies(), BLOCK):
        sums = measurer.begin(task.block)
        for _ in measurer.steps(task.block, sums):
            return _means_of(sums)
    return StandIns({})


def means_of(going: Going, report: Report | None = None) -> tuple[StandIns, list[dict[str, Any]]]:
    """The mean output of each head over all texts; and the blocks over which workers were lost."""
    result = going.run(MeanMeasurer, {}, BlockMeans(), report)
    if not result.complete:
        raise KeyboardInterrupt
    return _means_of(result.done), result.lost


class BlockMeans:
    """Sums of the outputs of heads, batch by batch.

    Attributes:
        sums: Of all finite batches, one after the other.
        counts: Over how many queries.
        blank: Zeros of the same shape, for every attention that there is.
    """

    def __init__(self) -> None:
        self.n_texts = self.n_tokens = 0
        self.sums: dict[Place, Tensor] = {}
        self.counts: dict[Place, int] = {}
        self.blank: dict[Place, Tensor] = {}

    def merge(self, other: BlockMeans) -> BlockMeans:
        """Adds those of a later block; sums are rounded, so that their order counts."""
        for place, blank in other.blank.items():
            self._add(place, blank, other.sums.get(place), other.counts.get(place, 0))
        self.n_texts, self.n_tokens = self.n_texts + other.n_texts, self.n_tokens + other.n_tokens
        return self

    def add(self, probe: Means, *, finite: bool) -> None:
        """Adds the sums of a batch, if they are finite."""
        import torch

        for place, total in probe.sums.items():
            self._add(place, torch.zeros_like(total), total if finite else None, probe.counts[place])

    def _add(self, place: Place, blank: Tensor, total: Tensor | None, count: int) -> None:
        self.blank.setdefault(place, blank)
        if total is not None:
            self.sums[place] = total if place not in self.sums else self.sums[place] + total
            self.counts[place] = self.counts.get(place, 0) + count


class MeanMeasurer:
    """Adds up the outputs of heads over the texts of blocks."""

    def __init__(self, model: Model, reader: Reader) -> None:
        self._runs, self._reader = require_rerunnable(model), reader

    def begin(self, block: Block) -> BlockMeans:
        """Sums of nothing yet."""
        return BlockMeans()

    def steps(self, block: Block, sums: BlockMeans) -> Iterator[None]:
        """Adds a block, batch by batch."""
        for read in self._reader.batches(block):
            for _, probes in self._reader.room.each(read, self._run_batch, self._reader.halves, lambda part: part.size):
                for probe, finite in probes:
                    sums.add(probe, finite=finite)
            sums.n_texts, sums.n_tokens = sums.n_texts + len(read.texts), sums.n_tokens + read.n_tokens
            yield

    def finish(self, block: Block, sums: BlockMeans, *, whole: bool) -> BlockMeans:
        """The sums themselves."""
        return sums

    def _run_batch(self, read: ReadBatch) -> list[tuple[Means, bool]]:
        import torch

        from attnscope.core.attention.probes import Means

        probe = Means(read.queries)
        with torch.no_grad():
            self._runs.outputs(read.batch, probe, logits=False)
        finite = all(bool(total.isfinite().all()) for total in probe.sums.values())
        # One row that is no number would be in every mean: it is found by halves, and left out.
        halves = [] if finite else self._reader.halves(read)
        return [(probe, finite), *(part for half in halves for part in self._run_batch(half))]


def _means_of(sums: BlockMeans) -> StandIns:
    means = {place: total / max(1, sums.counts[place]) for place, total in sums.sums.items()}
    return StandIns({place: len(total) for place, total in sums.blank.items()}, {**sums.blank, **means})
