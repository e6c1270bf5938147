"""What heads reach on the links of texts: parts of texts on their way into a model, and sums on their way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.annotated import AnnotatedText
from attnscope.annotated.alignment import Placed
from attnscope.models.model import Batch, Model
from attnscope.records import Tokens
from attnscope.studies.memory import Room, give_memory_back, halves, sparing
from attnscope.studies.relation_evidence import Cell, CellSums, Tally
from attnscope.studies.texts import padded
from attnscope.studies.workers import WorkersModel

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention import AttentionCall, Probe
    from attnscope.core.relations import LinkFacts, LinkSums


@dataclass(frozen=True, eq=False)
class Piece:
    """A chunk with its links, and where those are added."""

    text: AnnotatedText
    placed: Placed
    cells: tuple[Cell, ...]


Batches = tuple[tuple[Piece, ...], ...]
"""Pieces as the model is given them together."""


@dataclass(frozen=True)
class NotFinite:
    """A text on which attention is NaN or infinite: the first layer where it is."""

    source: str
    line: int
    layer: int


@dataclass(frozen=True, eq=False)
class Found:
    """What heads reach on some batches.

    Attributes:
        tallies: By relation, without what could not be measured.
        not_finite: Pieces of texts that are left out, as attention is NaN on them.
        halved_to: As `Room.tokens`.
    """

    tallies: Mapping[str, Tally] = field(default_factory=dict)
    not_finite: tuple[NotFinite, ...] = ()
    halved_to: int | None = None


@dataclass(frozen=True, eq=False)
class RelationsWork:
    """What workers begin with; a task has `batches`."""

    model: WorkersModel
    kind: str

    def begin(self) -> Callable[[Any], Found]:
        """Loads the model; what it returns adds up what heads reach on a block."""
        observer = Observer(self.model.load(), self.kind)
        return lambda block: observer.sum_up(list(observer.steps(block.batches)))


Step = list[tuple[Piece, NDArray[np.float64]]]
"""Pieces with the hits and mass of heads in each of their cells, (cell, layer, head, 2)."""


class Observer:
    """Looks at what the heads of a model do on batches of pieces.

    Args:
        model: The model.
        kind: The kind of attention: "encoder", "decoder" or "cross".
    """

    def __init__(self, model: Model, kind: str) -> None:
        from attnscope.core.tiles import Buffers

        self.model, self.kind = model, kind
        self.room = Room()
        self._buffers = Buffers()
        self._dense = model.info.path == "eager"
        self._n_heads: NDArray[np.int64] = np.zeros(0, np.int64)  # of each layer

    def steps(self, batches: Batches) -> Iterator[Step]:
        """What heads reach on each batch."""
        for batch in batches:
            whole: Sequence[Piece] = batch
            step: Step = []
            for _, found in self.room.each(whole, self._observed, halves, _padded_size):
                step += found
                give_memory_back()
            yield step

    def sum_up(self, steps: Sequence[Step]) -> Found:
        """What all of these amount to; pieces on which a number is NaN or infinite are left out as a whole."""
        cells: dict[str, list[CellSums]] = {}
        wrong: list[NotFinite] = []
        for piece, values in (one for step in steps for one in step):
            there = np.arange(values.shape[2]) < self._n_heads[:, None]
            layers = (~np.isfinite(values) & there[..., None]).any((0, 2, 3))
            if layers.any():
                wrong.append(NotFinite(piece.text.source, piece.text.line, int(layers.argmax())))
                continue
            for cell, mine in zip(piece.cells, values, strict=True):
                cells.setdefault(cell.relation, []).append((cell, mine))
        tallies = {relation: Tally() for relation in cells}
        for relation, sums in cells.items():
            tallies[relation].add(sums)
        return Found(tallies, tuple(wrong), self.room.tokens)

    def _observed(self, pieces: Sequence[Piece]) -> Step:
        """Hits and mass in the cells of each piece; NaN where a layer has fewer heads."""
        import torch

        from attnscope.core.probes import Weights
        from attnscope.core.relations import Links, links_of_weights

        n_cells = sum(len(piece.cells) for piece in pieces)
        facts = _facts(pieces, "cpu" if self._dense else self.model.info.device, n_cells)
        given = batch_of([piece.placed for piece in pieces], self.model.info.device)
        with torch.no_grad():
            if self._dense:
                kept = Weights()
                self.model.run(given, kept)
                by_layer: Mapping[int, LinkSums] = {
                    layer: links_of_weights(weights, facts) for layer, weights in _of(kept.maps, self.kind).items()
                }
            else:
                probe = Links(facts, self._buffers)
                self.model.run(given, sparing(only(self.kind, probe), facts.units.shape[1]))
                by_layer = _of(probe.sums, self.kind)
        layers = sorted(by_layer)
        self._n_heads = np.array([by_layer[layer].hits.shape[1] for layer in layers])
        found = np.full((n_cells, len(layers), int(self._n_heads.max()), 2), np.nan)
        for row, layer in enumerate(layers):
            for column, part in enumerate((by_layer[layer].hits, by_layer[layer].mass)):
                found[:, row, : part.shape[1], column] = part.cpu().numpy()
        ends = np.cumsum([len(piece.cells) for piece in pieces])[:-1]
        return list(zip(pieces, np.split(found, ends), strict=True))


def only(kind: str, probe: Probe) -> Probe:
    """A probe that sees one kind of attention; all others are computed as they are."""
    from attnscope.core.attention import attend

    def observed(call: AttentionCall) -> Tensor:
        return probe(call) if call.kind == kind else attend(call)

    return observed


def _of(by_kind: Mapping[Any, Any], kind: str) -> Any:
    return next(found for name, found in by_kind.items() if name == kind)


def _padded_size(pieces: Sequence[Piece]) -> int:
    return len(pieces) * max((piece.placed.size for piece in pieces), default=0)


def batch_of(given: Sequence[Placed], device: str) -> Batch:
    """Token numbers of chunks, padded; of pairs those of the decoder too."""
    import torch

    def numbers(texts: Sequence[Tokens]) -> tuple[Tensor, Tensor | None]:
        ids, real = padded([t.ids.astype(np.int64) for t in texts]), padded([np.ones(len(t), np.bool_) for t in texts])
        return torch.from_numpy(ids).to(device), None if real.all() else torch.from_numpy(real).to(device)

    tokens = [one.chunk.tokens for one in given]
    segments = torch.from_numpy(padded([t.segments.astype(np.int64) for t in tokens])).to(device)
    targets = [one.target for one in given if one.target is not None]
    return Batch(*numbers(tokens), segments, *(numbers(targets) if targets else (None, None)))


def _facts(pieces: Sequence[Piece], device: str, n_cells: int) -> LinkFacts:
    """The links of a batch as `core.relations` wants them."""
    import torch

    from attnscope.core.relations import LinkFacts

    units = padded([piece.placed.unit + 1 for piece in pieces]) - 1
    row_text: list[int] = []
    looking: list[tuple[int, int]] = []
    own: list[tuple[int, int]] = []
    targets: list[tuple[int, int]] = []
    link_row: list[int] = []
    link_cell: list[int] = []
    first_cell = 0
    for text, piece in enumerate(pieces):
        cells = {cell.relation: first_cell + place for place, cell in enumerate(piece.cells)}
        first_cell += len(piece.cells)
        rows: dict[tuple[int, ...], int] = {}
        for link in piece.placed.links:
            row = rows.get(link.tokens)
            if row is None:
                row = rows[link.tokens] = len(row_text)
                row_text.append(text)
                looking += [(row, token) for token in link.tokens]
                own += [(row, unit) for unit in link.own]
            targets += [(len(link_row), unit) for unit in link.targets]
            link_row.append(row)
            link_cell.append(cells[link.link.relation])

    def tensor(rows: Sequence[Any]) -> Any:
        return torch.tensor(rows, dtype=torch.int64, device=device)

    def pairs(rows: Sequence[Any]) -> Any:
        return tensor(rows).view(-1, 2)

    return LinkFacts(
        torch.from_numpy(units).to(device), tensor(row_text), pairs(looking), pairs(own), tensor(link_row),
        pairs(targets), tensor(link_cell), n_cells,
    )  # fmt: skip
