"""What heads reach on the links of texts: chunks of texts on their way into a model, and sums on their way out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from attnscope.annotated import AnnotatedText
from attnscope.annotated.alignment import Placed
from attnscope.models.model import Batch, Model
from attnscope.studies.failures import Place, broken_rows
from attnscope.studies.inputs.texts import batch_of, pad_rows
from attnscope.studies.relations.evidence import Cell, CellSums, Tally
from attnscope.studies.run import Measurer, Part

if TYPE_CHECKING:
    from attnscope.core.attention.seam import Kind
    from attnscope.core.relations import LinkFacts


@dataclass(frozen=True, eq=False)
class Piece:
    """A chunk with its links, and where those are added."""

    text: AnnotatedText
    placed: Placed
    cells: tuple[Cell, ...]

    def __len__(self) -> int:
        """Return its tokens; of a pair the longer of both."""
        return self.placed.size


@dataclass(frozen=True, eq=False)
class LinkText:
    """A text whose links are aligned with tokens and dealt to halves.

    Attributes:
        index: Its number in the block.
        n_texts: How many texts it stands for: equal ones are merged.
        n_copies: How many of these, and of its chunks, are copies of earlier ones.
        pieces: Its chunks.
        left_out: How many links are left out, by relation and reason.
    """

    index: int
    source: str
    line: int
    n_texts: int
    n_copies: int
    pieces: tuple[Piece, ...]
    left_out: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, eq=False)
class LinkBlock:
    """A block of texts, and their chunks in batches."""

    texts: tuple[LinkText, ...]
    batches: tuple[tuple[Piece, ...], ...]


Hits = NDArray[np.float64]
"""Hits and mass of heads in each cell of a piece, (cell, layer, head, 2)."""


@dataclass(kw_only=True, eq=False)
class LinkPart(Part):
    """What heads reach on some texts.

    Attributes:
        tallies: By relation.
        n_copies: How many texts or chunks are copies of earlier ones.
    """

    tallies: dict[str, Tally] = field(default_factory=dict)
    n_copies: int = 0
    _texts: tuple[LinkText, ...] = ()
    _hits: dict[tuple[int, int], Hits] = field(default_factory=dict)


class LinkMeasurer(Measurer[LinkPart]):
    """Measures what the heads of one kind of attention do on blocks of pieces."""

    def __init__(self, model: Model, kind: str) -> None:
        super().__init__()
        self.model, self.kind = model, cast("Kind", kind)
        self._dense = model.info.path == "eager"

    def start(self, block: LinkBlock) -> LinkPart:
        """Return sums of nothing yet."""
        return LinkPart(_texts=block.texts)

    def batches(self, block: LinkBlock) -> Sequence[Sequence[Piece]]:
        """Return the batches of a block, the longest pieces first."""
        return block.batches

    def add(self, part: LinkPart, batch: Sequence[Piece], result: tuple[Sequence[Hits], Mapping[int, Place]]) -> None:
        """Add what heads reach in the cells of each piece."""
        values, broken = result
        for number, piece in enumerate(batch):
            chunk = piece.placed.chunk
            part._hits[chunk.text, chunk.number] = values[number]
            if number in broken:
                part.broken.setdefault(chunk.text, broken[number])
            text = part._texts[chunk.text]
            if _is_done(part, text):
                part.n_texts += text.n_texts
                part.n_tokens += _n_tokens(text)

    def finish(self, part: LinkPart) -> LinkPart:
        """Add up the texts of which all chunks were measured; each chunk counts as a text."""
        texts = [text for text in part._texts if text.index not in part.broken and _is_done(part, text)]
        cells: defaultdict[str, list[CellSums]] = defaultdict(list)
        tallies: defaultdict[str, Tally] = defaultdict(Tally)
        for text in texts:
            for relation, reasons in text.left_out.items():
                tallies[relation].left_out.update(reasons)
            for piece in text.pieces:
                values = part._hits[piece.placed.chunk.text, piece.placed.chunk.number]
                for cell, sums in zip(piece.cells, values, strict=True):
                    cells[cell.relation].append((cell, sums))
        for relation, of_relation in cells.items():
            tallies[relation].add(of_relation)
        part.tallies = dict(tallies)
        part.n_texts = sum(text.n_texts for text in texts)
        part.n_tokens = sum(map(_n_tokens, texts))
        part.n_chunked = sum(text.pieces[0].placed.chunk.n_chunks > 1 for text in texts if text.pieces)
        part.n_copies = sum(text.n_copies for text in texts)
        return part

    def measure(self, pieces: Sequence[Piece]) -> tuple[list[Hits], dict[int, Place]]:
        """Return hits and mass in the cells of each piece, NaN where a layer has fewer heads; and broken pieces."""
        import torch

        from attnscope.core.attention.probes import Weights, probe_by_kind
        from attnscope.core.relations import Links, links_of_weights

        n_cells = sum(len(piece.cells) for piece in pieces)
        facts = facts_of(pieces, "cpu" if self._dense else self.model.info.device)
        batch = batch_of_placed([piece.placed for piece in pieces], self.model.info.device)
        with torch.no_grad():
            if self._dense:
                dense = Weights()
                self.model.run(batch, dense)
                by_layer = {layer: links_of_weights(maps, facts) for layer, maps in dense.maps[self.kind].items()}
            else:
                links = Links(facts)
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
        by_piece: list[Hits] = []
        broken_pieces: dict[int, Place] = {}
        first = 0
        for number, piece in enumerate(pieces):
            last = first + len(piece.cells)
            places = [broken[cell] for cell in range(first, last) if cell in broken]
            if places:
                broken_pieces[number] = min(places, key=lambda place: place[1] or 0)
            by_piece.append(values[first:last])
            first = last
        return by_piece, broken_pieces


def _is_done(part: LinkPart, text: LinkText) -> bool:
    return all((piece.placed.chunk.text, piece.placed.chunk.number) in part._hits for piece in text.pieces)


def _n_tokens(text: LinkText) -> int:
    return sum(len(piece.placed.chunk) for piece in text.pieces)


def batch_of_placed(chunks: Sequence[Placed], device: str) -> Batch:
    """Token numbers of chunks, padded; of pairs those of the decoder too."""
    targets = [chunk.target for chunk in chunks if chunk.target is not None]
    return batch_of([chunk.chunk.tokens for chunk in chunks], targets).to(device)


def facts_of(pieces: Sequence[Piece], device: str) -> LinkFacts:
    """The links of a batch for `core.relations`."""
    import torch

    from attnscope.core.relations import LinkFacts

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
