"""How much do heads attend from one zone of a conversation to another? Findings in, the same with measures of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from attnscope.corpus import TOKEN_BUDGET, Block, Chunk, Corpus, block_batches
from attnscope.corpus.chats import Zone, zones_of_tokens
from attnscope.errors import AttnscopeError
from attnscope.models.model import Model
from attnscope.records.heads.findings import Findings
from attnscope.studies.heads.merging import add_zones
from attnscope.studies.inputs.texts import Report, Texts, batch_of, pad_rows
from attnscope.studies.measuring.head_blocks import HeadTotals, decoder_start, target_of
from attnscope.studies.measuring.tally import ZONE, Tally
from attnscope.studies.running.memory import Room, give_memory_back, halves, padded_size, spare_memory
from attnscope.studies.running.passes import Reading

MOST_ZONES = 12
"""Zones of a corpus at most: each pair of them is a measure."""

Floats = NDArray[np.float64]


def zones_of(texts: Texts) -> tuple[str, ...]:
    """The names of all zones of some texts, sorted; of a Corpus that has been read to its end."""
    if isinstance(texts, Corpus):
        return texts.zones
    return tuple(sorted({name for text in texts for *_, name in text.zones}))


def require_few_zones(texts: Texts) -> tuple[str, ...]:
    """The names of all zones, as `zones_of` lists them; a corpus that has not been read has none.

    Raises:
        AttnscopeError: There are more than MOST_ZONES zones.
    """
    zones = zones_of(texts)
    if len(zones) > MOST_ZONES:
        raise AttnscopeError(
            f"the texts have {len(zones)} zones: {', '.join(zones[:MOST_ZONES])} …",
            f"give messages and spans at most {MOST_ZONES} different zones",
        )
    return zones


def with_zones(findings: Findings, reading: Reading, report: Report | None = None) -> Findings:
    """Adds how much the queries of each zone give to the keys of each zone, on the texts that have zones.

    In a text, a measure is the mean over the zone's queries that may attend to some key of the other zone. Each text
    counts once, so that intervals are over texts. In an encoder-decoder it is about the encoder.

    Raises:
        AttnscopeError: There are more than MOST_ZONES zones.
    """
    zones = require_few_zones(reading.texts)
    how = {"chunk": reading.chunk, "stride": reading.stride}
    make = partial(ZoneMeasurer, zones=zones, special=reading.special, how=how)
    done = reading.run(make, HeadTotals(), report, "zones of a later text")
    measures = {
        name: {"what": f"attention from {a} to {b}", "unit": "share", "range": [0, 1], "label": f"{a} → {b}"}
        for name, (a, b) in zip(names_of(zones), _pairs(zones), strict=True)
    }
    options = {**findings.options, "measures": {**findings.options["measures"], **measures}, "zones": list(zones)}
    return add_zones(findings, done, options, names_of(zones))


def _pairs(zones: Sequence[str]) -> list[tuple[str, str]]:
    return [(a, b) for a in zones for b in zones]


def names_of(zones: Sequence[str]) -> tuple[str, ...]:
    """The measures of all pairs of zones, such as zone_answer_to_document."""
    return tuple(f"{ZONE}{a}_to_{b}" for a, b in _pairs(zones))


class _BlockZones:
    """Sums over the texts of one block, in which the chunks of a text are joined.

    `tally` holds the means of whole texts; None = there are none yet.
    """

    def __init__(self) -> None:
        self.n_texts = self.n_tokens = 0
        self.tally: Tally | None = None
        self._open: dict[int, tuple[int, Floats]] = {}

    def add(self, chunk: Chunk, sums: Floats, empty: Tally) -> None:
        """Adds mass, even mass and counts of a chunk, (3, layer, head, pair)."""
        n_done, open_sums = self._open.pop(chunk.text, (0, np.zeros_like(sums)))
        self.n_tokens += len(chunk) - chunk.n_repeated
        if n_done + 1 < chunk.n_chunks:
            self._open[chunk.text] = n_done + 1, open_sums + sums
            return
        self.n_texts += 1
        mass, even, count = open_sums + sums
        if not np.isfinite(mass).all():  # the pass before this one has listed the text
            return
        self.tally = self.tally or empty
        there = count > 0
        for part, of in ((self.tally.measures, mass), (self.tally.uniform, even)):
            part.add(np.divide(of, count, out=np.zeros_like(of), where=there)[None], there.astype(np.float64)[None])


class ZoneMeasurer:
    """Measures what zones give to zones on blocks of texts; see `with_zones`."""

    def __init__(
        self, model: Model, *, zones: Sequence[str], special: frozenset[int], how: Mapping[str, int | None]
    ) -> None:
        from attnscope.core.attention.tiles import Buffers

        self._model, self._names, self._special, self._how = model, tuple(zones), special, how
        self._kind, self._start = str(model.info.kinds[0]), decoder_start(model)
        self._room, self._buffers = Room(), Buffers()

    def begin(self, block: Block) -> _BlockZones:
        """Sums of nothing yet."""
        return _BlockZones()

    def steps(self, block: Block, sums: _BlockZones) -> Iterator[None]:
        """Adds the texts of a block that have zones, batch by batch."""
        zones = {text.index: text.zones for text in block.texts if text.zones}
        zoned = replace(block, texts=tuple(text for text in block.texts if text.zones))
        cut = block_batches(
            zoned, self._model.tokenizer.encode, limit=self._model.info.max_tokens, budget=TOKEN_BUDGET,
            special_ids=self._special, **self._how,
        )  # fmt: skip
        batches: Sequence[Sequence[Chunk]] = cut
        for batch in reversed(batches):
            for some, by_layer in self._room.each(batch, partial(self._run_batch, zones), halves, padded_size):
                layers = sorted(by_layer)
                n_heads = max(of.shape[2] for of in by_layer.values())
                whole = np.zeros((len(some), 3, len(layers), n_heads, len(self._names) ** 2))
                for row, layer in enumerate(layers):
                    whole[:, :, row, : by_layer[layer].shape[2]] = by_layer[layer]
                for chunk, of_chunk in zip(some, whole, strict=True):
                    sums.add(chunk, of_chunk, Tally.empty(self._kind, layers, n_heads, names_of(self._names)))
                give_memory_back()
            yield

    def finish(self, block: Block, sums: _BlockZones, *, whole: bool) -> HeadTotals:
        """What the sums amount to."""
        tallies = {} if sums.tally is None else {self._kind: sums.tally}
        return HeadTotals(tallies=tallies, n_texts=sums.n_texts, n_tokens=sums.n_tokens, halved_to=self._room.tokens)

    def _run_batch(self, zones: Mapping[int, Sequence[Zone]], batch: Sequence[Chunk]) -> dict[int, Floats]:
        """Layer -> mass, even mass and counts, (text, 3, head, pair)."""
        import torch

        from attnscope.core.attention.probes import Weights, probe_by_kind
        from attnscope.core.questions.zones import ZoneFacts, Zones, zones_of_weights

        tokens = [chunk.tokens for chunk in batch]
        targets = [] if self._start is None else [target_of(self._start, text) for text in tokens]
        inputs = batch_of(tokens, targets).to(self._model.info.device)
        numbers = pad_rows([1 + zones_of_tokens(c.tokens, zones[c.text], self._names) for c in batch]) - 1
        real = pad_rows([np.ones(len(chunk), np.bool_) for chunk in batch])
        asking = pad_rows([~chunk.repeated for chunk in batch])
        which = numbers[..., None] == np.arange(len(self._names))
        facts = ZoneFacts(*map(torch.from_numpy, (which, real, asking)))
        probe = Zones(facts, self._buffers)
        with torch.no_grad():
            if self._model.info.path == "eager":
                weights_probe = Weights()
                self._model.run(inputs, weights_probe)
                maps = {str(kind): by_layer for kind, by_layer in weights_probe.maps.items()}[self._kind]
                sums = {layer: zones_of_weights(weights, facts) for layer, weights in maps.items()}
            else:
                self._model.run(inputs, spare_memory(probe_by_kind({self._kind: probe}), numbers.shape[1]))
                sums = {str(kind): by_layer for kind, by_layer in probe.sums.items()}[self._kind]
        return {
            layer: torch.stack([of.mass, of.even, of.count], 1).flatten(-2).cpu().double().numpy()
            for layer, of in sums.items()
        }
