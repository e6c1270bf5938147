"""What heads reach on the links of texts: chunks of texts on their way into a model, and sums on their way out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from attnscope.annotated import AnnotatedText
from attnscope.annotated.alignment import Placed
from attnscope.models.model import Batch, Model
from attnscope.studies.inputs.texts import batch_of, pad_rows
from attnscope.studies.relations.evidence import Cell, CellSums, Tally
from attnscope.studies.running import passes
from attnscope.studies.running.memory import Room, halves
from attnscope.studies.running.overflow import broken_rows

if TYPE_CHECKING:
    from attnscope.core.attention.seam import Kind
    from attnscope.core.questions.relations import LinkFacts


@dataclass(frozen=True, eq=False)
class Piece:
    """A chunk with its links, and where those are added."""

    text: AnnotatedText
    placed: Placed
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class NotFinite:
    """A text on which attention is NaN or infinite: the first layer where it is."""

    source: str
    line: int
    layer: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Found(passes.Totals):
    """What heads reach on some blocks, by relation.

    Attributes:
        n_copies: How many texts or chunks are copies of earlier ones.
        not_finite: Chunks that are left out, as attention is NaN on them.
    """

    tallies: Mapping[str, Tally] = field(default_factory=dict)
    n_copies: int = 0
    not_finite: tuple[NotFinite, ...] = ()


@dataclass(frozen=True, eq=False)
class LinkBlock:
    """A block of texts whose links are aligned with tokens and dealt to halves; `counts` lacks only what heads do."""

    counts: Found
    batches: tuple[tuple[Piece, ...], ...]


class BlockLinks:
    """Pieces with the hits and mass of heads in each of their cells, (cell, layer, head, 2)."""

    def __init__(self, n_texts: int) -> None:
        self.n_texts, self.n_tokens = n_texts, 0
        self.pieces: list[tuple[Piece, NDArray[np.float64]]] = []
        self.not_finite: list[NotFinite] = []

    def by_relation(self) -> dict[str, list[CellSums]]:
        """The cells of all pieces, by relation."""
        cells: defaultdict[str, list[CellSums]] = defaultdict(list)
        for piece, values in self.pieces:
            for cell, sums in zip(piece.cells, values, strict=True):
                cells[cell.relation].append((cell, sums))
        return cells


class LinkMeasurer:
    """Measures what the heads of one kind of attention do on blocks of pieces."""

    def __init__(self, model: Model, kind: str) -> None:
        from attnscope.core.attention.tiles import Buffers

        self.model, self.kind = model, cast("Kind", kind)
        self._room = Room()
        self._buffers = Buffers()
        self._dense = model.info.path == "eager"

    def begin(self, block: LinkBlock) -> BlockLinks:
        """Sums of nothing yet."""
        return BlockLinks(block.counts.n_texts)

    def steps(self, block: LinkBlock, sums: BlockLinks) -> Iterator[None]:
        """Adds what heads reach on each batch."""
        groups: Sequence[Sequence[Piece]] = block.batches
        for batch in groups:
            for _, (pieces, not_finite) in self._room.each(batch, self._run_batch, halves, _padded_size):
                sums.pieces += pieces
                sums.not_finite += not_finite
            sums.n_tokens += sum(len(piece.placed.chunk) for piece in batch)
            yield

    def finish(self, block: LinkBlock, sums: BlockLinks, *, whole: bool) -> Found:
        """What all of these amount to."""
        tallies: defaultdict[str, Tally] = defaultdict(Tally)
        for relation, cells in sums.by_relation().items():
            tallies[relation].add(cells)
        measured = Found(tallies=tallies, not_finite=tuple(sums.not_finite), halved_to=self._room.tokens)
        return block.counts.merge(measured)

    def _run_batch(self, pieces: Sequence[Piece]) -> tuple[list[tuple[Piece, NDArray[np.float64]]], list[NotFinite]]:
        """Hits and mass in the cells of each piece, NaN where a layer has fewer heads; and pieces that are left out."""
        import torch

        from attnscope.core.attention.probes import Weights, probe_by_kind
        from attnscope.core.questions.relations import Links, links_of_weights

        n_cells = sum(len(piece.cells) for piece in pieces)
        facts = facts_of(pieces, "cpu" if self._dense else self.model.info.device)
        batch = batch_of_placed([piece.placed for piece in pieces], self.model.info.device)
        with torch.no_grad():
            if self._dense:
                dense = Weights()
                self.model.run(batch, dense)
                by_layer = {layer: links_of_weights(maps, facts) for layer, maps in dense.maps[self.kind].items()}
            else:
                links = Links(facts, self._buffers)
                self.model.run(batch, probe_by_kind({self.kind: links}))
                by_layer = links.sums[self.kind]
        layers = sorted(by_layer)
        n_heads = max(by_layer[layer].hits.shape[1] for layer in layers)
        values = np.full((n_cells, len(layers), n_heads, 2), np.nan)
        numbers: dict[int, NDArray[np.float64]] = {}
        for row, layer in enumerate(layers):
            of_layer = torch.stack([by_layer[layer].hits, by_layer[layer].mass], -1).cpu().double().numpy()
            values[:, row, : of_layer.shape[1]] = numbers[layer] = of_layer
        broken = broken_rows({self.kind: numbers})
        measured: list[tuple[Piece, NDArray[np.float64]]] = []
        not_finite: list[NotFinite] = []
        first = 0
        for piece in pieces:
            cells = range(first, first + len(piece.cells))
            wrong = [layer for cell in cells if cell in broken for layer in broken[cell][1:] if layer is not None]
            if wrong:
                not_finite.append(NotFinite(piece.text.source, piece.text.line, min(wrong)))
            else:
                measured.append((piece, values[cells.start : cells.stop]))
            first = cells.stop
        return measured, not_finite


def _padded_size(pieces: Sequence[Piece]) -> int:
    return len(pieces) * max((piece.placed.size for piece in pieces), default=0)


def batch_of_placed(chunks: Sequence[Placed], device: str) -> Batch:
    """Token numbers of chunks, padded; of pairs those of the decoder too."""
    targets = [chunk.target for chunk in chunks if chunk.target is not None]
    return batch_of([chunk.chunk.tokens for chunk in chunks], targets).to(device)


def facts_of(pieces: Sequence[Piece], device: str) -> LinkFacts:
    """The links of a batch for `core.questions.relations`."""
    import torch

    from attnscope.core.questions.relations import LinkFacts

    units = pad_rows([piece.placed.unit + 1 for piece in pieces]) - 1
    row_text: list[int] = []
    looking: list[tuple[int, int]] = []
    own: list[tuple[int, int]] = []
    targets: list[tuple[int, int]] = []
    link_row: list[int] = []
    link_cell: list[int] = []
    first_cell = 0
    for text, piece in enumerate(pieces):
        cells = {cell.relation: number for number, cell in enumerate(piece.cells, first_cell)}
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
        pairs(targets), tensor(link_cell), first_cell,
    )  # fmt: skip
