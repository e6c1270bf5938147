"""What a study of heads adds up over one block of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.corpus import Chunk
from attnscope.studies.failures import broken_rows
from attnscope.studies.measuring.tally import Tally, weigh_units
from attnscope.studies.run import Part

if TYPE_CHECKING:
    from attnscope.core.measures import Measured

Hits = tuple[NDArray[np.float64], NDArray[np.float64]]
"""What `pair_hits` gives: hits and counts."""

_OF_TEXTS = ("sink", "first_token", "resting")
"""What a text is as a whole, however many chunks it has, and by which measures that is known."""

_SUMS = ("sum", "count", "uniform_sum", "offset_sum", "offset_count", "offset_uniform")


@dataclass(kw_only=True, eq=False)
class HeadSums(Part):
    """The sums over the texts of one block. Each chunk of a text is a unit of evidence of its own, or several.

    One sum for all of a text would leave the evidence of one text, however long it is, and that of little more where
    all others are short: the longest one outweighs them. A chunk is as long as what the model takes, and where that is
    much, blocks of its queries count apart (`unit_queries`): what a unit says depends little on the one before it,
    beyond what all texts like these have in common (the reasoning of the block bootstrap: Künsch 1989, Annals of
    Statistics 17; Politis & Romano 1994, JASA 89).

    All texts weigh the same: the sums and counts of a text of n queries are divided by n.

    A text in chunks of which one is broken is left out from that chunk on. Of a token that two chunks share, `n_tokens`
    counts one.

    Attributes:
        tallies: The sums by kind of attention; of nothing where no text is whole.
    """

    tallies: dict[str, Tally] = field(default_factory=dict)
    _pairs: dict[str, list[Hits]] = field(default_factory=dict)
    _open: dict[int, _OpenText] = field(default_factory=dict)

    def add(
        self,
        batch: Sequence[Chunk],
        sums: Mapping[str, Mapping[int, Measured]],
        hits: Sequence[Mapping[str, Hits]],
    ) -> None:
        """Adds the chunks of a batch.

        `sums` are their measures: kind -> layer -> sums by unit, in the order of the batch; each chunk has as many
        units as the longest. `hits` are those of `pair_hits` by kind, for each chunk.
        """
        from attnscope.core.catalogue import unit_queries

        for kind, by_layer in sums.items():
            if kind not in self.tallies:
                self.tallies[kind] = _empty(kind, by_layer)
        by_text = {kind: {at: of.sum.swapaxes(0, 1) for at, of in by_layer.items()} for kind, by_layer in sums.items()}
        each = unit_queries(max(map(len, batch)))
        step = -(-max(map(len, batch)) // each)
        for row, place in broken_rows(by_text).items():
            index = batch[row // step].text
            self.broken.setdefault(index, place)
            self._open.pop(index, None)
        well = [row for row, chunk in enumerate(batch) if chunk.text not in self.broken]
        if not well:
            return
        chunks = [batch[row] for row in well]
        # Units of padding alone are none.
        units = [row * step + unit for row in well for unit in range(-(-len(batch[row]) // each))]
        stacked = {
            kind: {
                part: stack_layers([np.moveaxis(getattr(of, part), 0, -1) for _, of in sorted(by_layer.items())])[units]
                for part in _SUMS
            }
            for kind, by_layer in sums.items()
        }
        for row, chunk in zip(well, chunks, strict=True):
            if chunk.n_chunks > 1:
                mine = [at for at, unit in enumerate(units) if unit // step == row]
                self._open.setdefault(chunk.text, _OpenText()).take(mine, stacked, self.tallies)
        weights = np.array([1 / batch[unit // step].n_queries for unit in units])
        for kind, of in stacked.items():
            tally = self.tallies[kind]
            of = weigh_units(tally.names, weights, of)
            tally.measures.add(of["sum"], of["count"])
            tally.uniform.add(of["uniform_sum"], of["count"])
            tally.offsets.add(of["offset_sum"], of["offset_count"])
            tally.offsets_uniform.add(of["offset_uniform"], of["offset_count"])
        for chunk, of_chunk in zip(chunks, (hits[row] for row in well), strict=True):
            weight = 1 / chunk.n_queries
            for kind, (of_hits, of_counts) in of_chunk.items():
                self._pairs.setdefault(kind, []).append((of_hits * weight, of_counts * weight))
            self.n_tokens += len(chunk) - chunk.n_repeated
            if chunk.n_chunks > 1:
                text = self._open[chunk.text]
                text.n_done += 1
                if text.n_done < chunk.n_chunks:
                    continue
                text.close(self.tallies)
                del self._open[chunk.text]
                self.n_chunked += 1
            self.n_texts += 1
            for tally in self.tallies.values():
                tally.lengths.add(1 / chunk.n_queries, 1.0)

    def finish(self) -> None:
        """Add the hits of pairs, all at once; without a whole text there are no sums."""
        for kind, hits in self._pairs.items():
            pairs = np.stack(hits)
            self.tallies[kind].pairs.add(pairs[:, 0], pairs[:, 1])
        if not self.n_texts:
            self.tallies = {}
            self.n_tokens = 0


class _OpenText:
    """A text in chunks: what holds of it as a whole, and is known when the last one has come."""

    def __init__(self) -> None:
        self.n_done = 0
        self._sums: dict[str, dict[str, NDArray[np.float64]]] = {}

    def take(
        self, units: Sequence[int], sums: Mapping[str, Mapping[str, NDArray[np.float64]]], tallies: Mapping[str, Tally]
    ) -> None:
        """Takes what the units of a chunk say of the whole text out of the sums of a batch."""
        for kind, of in sums.items():
            if "sink" not in tallies[kind].names:
                continue
            columns = [tallies[kind].names.index(name) for name in _OF_TEXTS]
            of_text = self._sums.setdefault(kind, {})
            for part in ("sum", "count", "uniform_sum"):
                of_text[part] = of_text.get(part, 0.0) + of[part][units][..., columns].sum(0, keepdims=True)
                of[part][units, ..., columns[0]] = 0.0

    def close(self, tallies: Mapping[str, Tally]) -> None:
        """Adds which heads are sinks on the text: it counts once, not chunk by chunk."""
        from attnscope.core.measures import tell_sinks

        for kind, sums in self._sums.items():
            tally = tallies[kind]
            of_text = {}
            for part in ("sum", "uniform_sum"):  # of uniform attention the counts are the heads'
                tell_sinks(_OF_TEXTS, np.moveaxis(sums[part], -1, 0), np.moveaxis(sums["count"], -1, 0))
            for part, array in sums.items():
                of_text[part] = np.zeros((1, *tally.measures.shape))
                of_text[part][..., tally.names.index("sink")] = array[..., 0]
            tally.measures.add(of_text["sum"], of_text["count"])
            tally.uniform.add(of_text["uniform_sum"], of_text["count"])


def _empty(kind: str, by_layer: Mapping[int, Measured]) -> Tally:
    n_heads = max(sums.sum.shape[2] for sums in by_layer.values())
    return Tally.empty(kind, sorted(by_layer), n_heads, next(iter(by_layer.values())).names)


def stack_layers(arrays: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Layers of (text, head, measure) as one (text, layer, head, measure); 0 where a layer has fewer heads."""
    stacked = np.zeros((len(arrays[0]), len(arrays), max(array.shape[1] for array in arrays), arrays[0].shape[2]))
    for row, array in enumerate(arrays):
        stacked[:, row, : array.shape[1]] = array
    return stacked
