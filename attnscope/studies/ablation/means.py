"""The mean output of each head over all texts, which may take its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attnscope.corpus import Block, Copies, blocks, distinct
from attnscope.models.model import Model
from attnscope.studies.ablation.reading import Reader, Row
from attnscope.studies.ablation.sweep import BLOCK, Going, StandIns, require_rerunnable
from attnscope.studies.inputs.texts import Report
from attnscope.studies.run import Measurer, Part, Run, halves

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention.probes import Means, Place


def heads_of(going: Going) -> StandIns:
    """Return how many heads each attention has, seen on the first batch."""
    measurer = MeanMeasurer(going.model, going.reader)
    for block in blocks(distinct(going.texts, Copies()), BLOCK):
        part = measurer.start(block)
        for batch in measurer.batches(block)[:1]:
            for some, result in measurer.room.each(batch, measurer.measure):
                measurer.add(part, some, result)
            return _means_of(part)
    return StandIns({})


def means_of(going: Going, report: Report | None = None) -> tuple[StandIns, Run[MeanPart]]:
    """Return the mean output of each head over all texts, and what going over these came to.

    Raises:
        KeyboardInterrupt: It was interrupted: means of some texts are none.
        Exception: What failed.
    """
    result = going.run(MeanMeasurer, {}, MeanPart(), report)
    if result.error is not None:
        raise result.error
    if not result.complete:
        raise KeyboardInterrupt
    return _means_of(result.done), result


@dataclass(kw_only=True, eq=False)
class MeanPart(Part):
    """Sums of the outputs of heads.

    Attributes:
        places: For every attention that there is, the sums of all finite batches, one after the other.
    """

    places: dict[Place, _Outputs] = field(default_factory=dict)


@dataclass(frozen=True)
class _Outputs:
    """The sum of the outputs of heads, (head, d), over so many queries."""

    total: Tensor
    count: int

    def merge(self, other: _Outputs) -> _Outputs:
        """Return the sum over both. It is rounded, so that the order counts."""
        return _Outputs(self.total + other.total, self.count + other.count)


class MeanMeasurer(Measurer[MeanPart]):
    """Adds up the outputs of heads over the texts of blocks."""

    def __init__(self, model: Model, reader: Reader) -> None:
        super().__init__()
        self._runs, self._reader = require_rerunnable(model), reader

    def start(self, block: Block) -> MeanPart:
        """Return sums of nothing yet."""
        return MeanPart()

    def batches(self, block: Block) -> Sequence[Sequence[Row]]:
        """Cut a block into batches of rows."""
        return self._reader.batches(block)

    def measure(self, batch: Sequence[Row]) -> list[tuple[Means, bool]]:
        """Return the sums of a batch, and whether they are finite; if not, also those of its halves."""
        import torch

        from attnscope.core.attention.probes import Means

        read = self._reader.read(batch)
        probe = Means(read.queries)
        with torch.no_grad():
            self._runs.outputs(read.batch, probe, logits=False)
        finite = all(bool(total.isfinite().all()) for total in probe.sums.values())
        # One row that is no number would be in every mean: it is found by halves, and left out.
        smaller = [] if finite else halves(batch)
        return [(probe, finite), *(measured for half in smaller for measured in self.measure(half))]

    def add(self, part: MeanPart, batch: Sequence[Row], result: Sequence[tuple[Means, bool]]) -> None:
        """Add the sums that are finite."""
        for probe, finite in result:
            for place, total in probe.sums.items():
                outputs = _Outputs(total, probe.counts[place]) if finite else _Outputs(total.new_zeros(total.shape), 0)
                part.places[place] = part.places[place].merge(outputs) if place in part.places else outputs
        part.n_texts += len(batch)
        part.n_tokens += sum(row.n_tokens for row in batch)


def _means_of(part: MeanPart) -> StandIns:
    n_heads = {place: len(outputs.total) for place, outputs in part.places.items()}
    return StandIns(n_heads, {place: outputs.total / max(1, outputs.count) for place, outputs in part.places.items()})
