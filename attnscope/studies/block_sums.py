"""What a study of heads adds up over one block of texts."""

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core import apart
from attnscope.corpus import Chunk
from attnscope.studies.overflow import Place, broken_rows
from attnscope.studies.tally import Tally

if TYPE_CHECKING:
    from attnscope.core.measures import SumsOf

Hits = tuple[NDArray[np.float64], NDArray[np.float64]]
"""What `pair_hits` gives: hits and counts."""

_SUMS = ("sum", "count", "uniform_sum", "offset_sum", "offset_count", "offset_uniform")


class BlockSums:
    """The sums over the texts of one block. Holds texts apart only as long as chunks of theirs are to come.

    Attributes:
        n_texts: Texts that are whole in it.
        n_chunked: How many of them came in several chunks.
        n_tokens: Their tokens; one that two chunks share counts once.
        broken: Texts that are left out, as the model computes NaN or infinity on them, and where.
    """

    def __init__(self) -> None:
        self.broken: dict[int, Place] = {}
        self.n_texts = self.n_chunked = self.n_tokens = 0
        self._tallies: dict[str, Tally] = {}
        self._pairs: dict[str, list[Hits]] = {}
        self._open: dict[int, _OpenText] = {}

    def add(
        self,
        batch: Sequence[Chunk],
        sums: Mapping[str, Mapping[int, "SumsOf"]],
        hits: Sequence[Mapping[str, Hits]],
    ) -> None:
        """Adds a batch; chunks of a text are added up, in the order in which they come.

        Args:
            batch: The chunks.
            sums: Their measures: kind -> layer -> sums, in the order of the batch.
            hits: Of each chunk, the hits of `pair_hits` by kind.
        """
        for kind, by_layer in sums.items():
            if kind not in self._tallies:
                self._tallies[kind] = _empty(kind, by_layer)
        by_text = {kind: {at: of.sum.swapaxes(0, 1) for at, of in by_layer.items()} for kind, by_layer in sums.items()}
        for row, place in broken_rows(by_text).items():
            self.broken.setdefault(batch[row].text, place)
            self._open.pop(batch[row].text, None)
        found = {
            kind: {part: _stacked(part, by_layer, self._tallies[kind]) for part in _SUMS}
            for kind, by_layer in sums.items()
        }
        well = [row for row, chunk in enumerate(batch) if chunk.text not in self.broken]
        whole = [row for row in well if batch[row].n_chunks == 1]
        if whole:
            self._add_texts({kind: {part: array[whole] for part, array in of.items()} for kind, of in found.items()})
            for row in whole:
                self._close(len(batch[row]), hits[row])
        for row in well:
            chunk = batch[row]
            if chunk.n_chunks > 1:
                mine = {kind: {part: array[row : row + 1] for part, array in of.items()} for kind, of in found.items()}
                text = self._open.setdefault(chunk.text, _OpenText())
                text.add(chunk, mine, hits[row])
                if text.n_chunks == chunk.n_chunks:
                    for kind, of in text.sums.items():
                        _tell_sinks(self._tallies[kind].names, of)
                    self._add_texts(text.sums)
                    self._close(text.n_tokens, text.hits)
                    self.n_chunked += 1
                    del self._open[chunk.text]

    def finish(self) -> Mapping[str, Tally]:
        """The sums over all texts that are whole, by kind."""
        for kind, hits in self._pairs.items():
            pairs = np.stack(hits)
            self._tallies[kind].pairs.add(pairs[:, 0], pairs[:, 1])
        self._pairs = {}
        return self._tallies if self.n_texts else {}

    def _close(self, n_tokens: int, hits: Mapping[str, Hits]) -> None:
        self.n_texts += 1
        self.n_tokens += n_tokens
        for kind, of_kind in hits.items():
            self._pairs.setdefault(kind, []).append(of_kind)

    def _add_texts(self, found: Mapping[str, Mapping[str, NDArray[np.float64]]]) -> None:
        for kind, of in found.items():
            tally = self._tallies[kind]
            tally.measures.add(of["sum"], of["count"])
            tally.uniform.add(of["uniform_sum"], of["count"])
            tally.offsets.add(of["offset_sum"], of["offset_count"])
            tally.offsets_uniform.add(of["offset_uniform"], of["offset_count"])


class _OpenText:
    """A text of which chunks are to come."""

    def __init__(self) -> None:
        self.n_chunks = self.n_tokens = 0
        self.sums: dict[str, dict[str, NDArray[np.float64]]] = {}
        self.hits: dict[str, Hits] = {}

    def add(
        self, chunk: Chunk, sums: Mapping[str, Mapping[str, NDArray[np.float64]]], hits: Mapping[str, Hits]
    ) -> None:
        """Adds a chunk."""
        self.n_chunks += 1
        self.n_tokens += len(chunk) - chunk.n_repeated
        for kind, of in sums.items():
            known = self.sums.get(kind)
            if known is None:
                self.sums[kind] = dict(zip(of, apart.copies(list(of.values())), strict=True))
            else:
                for part, array in of.items():
                    known[part] += array
        for kind, (hit, count) in hits.items():
            before: Any = self.hits.get(kind, (0.0, 0.0))
            self.hits[kind] = before[0] + hit, before[1] + count


@contextmanager
def undisturbed() -> Iterator[None]:
    """Puts Ctrl-C off until all within is done: sums that were added in part would be worth nothing."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came = False

    def later(*_: object) -> None:
        nonlocal came
        came = True

    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


def _empty(kind: str, by_layer: Mapping[int, "SumsOf"]) -> Tally:
    n_heads = max(sums.sum.shape[2] for sums in by_layer.values())
    return Tally.empty(kind, sorted(by_layer), n_heads, next(iter(by_layer.values())).names)


def _tell_sinks(names: Sequence[str], text: Mapping[str, NDArray[np.float64]]) -> None:
    """Tells anew, of a text that came in chunks, which heads are sinks on it: it counts once, not chunk by chunk."""
    from attnscope.core.measures.totals import tell_sinks

    if "sink" not in names:
        return
    for part in ("sum", "uniform_sum"):
        # Of uniform attention the counts are the heads'.
        tell_sinks(names, np.moveaxis(text[part], -1, 0), np.moveaxis(text["count"], -1, 0))


def _stacked(part: str, by_layer: Mapping[int, "SumsOf"], tally: Tally) -> NDArray[np.float64]:
    """One of _SUMS of a batch, (text, layer, head, measure); 0 where a layer has fewer heads."""
    arrays = [np.moveaxis(getattr(by_layer[layer], part), 0, -1) for layer in tally.layers]
    stacked = np.zeros((len(arrays[0]), len(arrays), tally.measures.shape[1], arrays[0].shape[2]))
    for row, array in enumerate(arrays):
        stacked[:, row, : array.shape[1]] = array
    return stacked
