"""Turn texts with links into batches, and measure what heads reach on them. Verdicts are left to `evidence`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from attnscope.annotated import AnnotatedText
from attnscope.annotated.alignment import Placed, place_links
from attnscope.corpus import TOKEN_BUDGET, batches, chunks, fold
from attnscope.models.model import Model
from attnscope.questions.relations import RelationsOptions
from attnscope.studies.failures import Place, broken_rows
from attnscope.studies.heads.measuring import decoder_start
from attnscope.studies.inputs.texts import batch_of, pad_rows
from attnscope.studies.relations.evidence import Cell, LinkPart, Lots, right_rules
from attnscope.studies.run import Measurer

if TYPE_CHECKING:
    from attnscope.core.attention.seam import Kind
    from attnscope.core.relations import LinkFacts

COPY = "texts that were there before"
MIXED = "texts with a target among others without, or the other way round"
TOO_LONG = "texts or targets longer than the model takes"

Hits = NDArray[np.float64]
"""Hits and mass of heads in each cell of a piece, (cell, layer, head, 2)."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Hold a chunk with its links, and the cells that they are added to."""

    placed: Placed
    cells: tuple[Cell, ...]

    def __len__(self) -> int:
        """Return its tokens; of a pair the longer of both."""
        return max(len(self.placed.chunk), len(self.placed.target or ()))


@dataclass(frozen=True, eq=False)
class LinkText:
    """Hold a text whose links are aligned with tokens and dealt to halves.

    Attributes:
        index: Its number in the block.
        source: The file it is from; `line`: where.
        n_texts: How many texts it stands for: equal ones are merged.
        pieces: Its chunks.
    """

    index: int
    source: str
    line: int
    n_texts: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, eq=False)
class LinkBlock:
    """Hold a block of texts.

    Attributes:
        texts: The texts.
        unmeasured: Links that cannot be measured, by relation and reason.
        n_copies: How many texts are copies of earlier ones.
    """

    texts: tuple[LinkText, ...]
    unmeasured: Mapping[tuple[str, str], int]
    n_copies: int


# Into the model


class Linker:
    """Align links with tokens, and deal texts to halves, one after the other."""

    def __init__(self, model: Model, options: RelationsOptions, kind: str) -> None:
        self._model = model
        self._options = options
        self._kind = kind
        start = decoder_start(model)  # what the decoder reads while the encoder alone is studied
        self._start = None if start is None else start.take(np.arange(1))
        self._lots: defaultdict[str, Lots] = defaultdict(Lots)
        self._seen: set[int] = set()

    def block(self, texts: Sequence[AnnotatedText]) -> LinkBlock:
        """Return texts as a block."""
        unmeasured: Counter[tuple[str, str]] = Counter()
        linked = []
        n_copies = 0
        for number, text in enumerate(texts):
            text = replace(text, links=tuple(link for link in text.links if self._is_wanted(link.relation)))
            n_copies += text.n_merged
            placed: list[Placed] = []
            key = hash((fold(text.text), fold(text.target or "")))
            if key in self._seen:
                n_copies += 1
                unmeasured.update((link.relation, COPY) for link in text.links)
            else:
                self._seen.add(key)
                placed, left_out = self._place(text, number)
                unmeasured += left_out
            pieces = tuple(self._deal(text, part) for part in placed)
            linked.append(LinkText(number, text.source, text.line, 1 + text.n_merged, pieces))
        return LinkBlock(tuple(linked), unmeasured, n_copies)

    def _is_wanted(self, relation: str) -> bool:
        """Return whether a relation is studied: by its whole name, or by a label in it."""
        only = self._options.only
        return only is None or not {relation, *relation.split("→")}.isdisjoint({*only} - {"parent"})

    def _place(self, text: AnnotatedText, number: int) -> tuple[list[Placed], Counter[tuple[str, str]]]:
        """Return a text's chunks with their links in tokens, and how many links have none, by relation and reason."""
        limit = self._model.info.max_tokens
        if (text.target is not None) != (self._kind == "cross"):
            return [], Counter((link.relation, MIXED) for link in text.links)
        # Texts of a model without cross-attention: cut long ones into chunks.
        tokens = self._model.tokenizer.encode(text.text)
        if text.target is None:
            parts = chunks(tokens, number, limit=limit, chunk=self._options.chunk, stride=self._options.stride)
            placed, left_out = place_links(text, parts, tokens, causal=self._kind == "decoder")
            return [replace(part, target=self._start) for part in placed], left_out
        # Pairs of text and target stay whole.
        assert self._model.writer is not None
        target = self._model.writer.encode_target(text.target)
        if limit is not None and max(len(tokens), len(target)) > limit:
            return [], Counter((link.relation, TOO_LONG) for link in text.links)
        return place_links(text, chunks(tokens, number), tokens, target=target)

    def _deal(self, text: AnnotatedText, part: Placed) -> Piece:
        """Return a chunk with its cells, each relation's links dealt to halves."""
        # Chunks of one text are in one half, whatever else it belongs to.
        source = text.document
        if source is None and part.chunk.n_chunks > 1:
            source = f"{text.source}, line {text.line}"
        links = [link.link for link in part.links]
        is_right = right_rules(text, links)
        relation_of = np.array([link.relation for link in links])
        cells = []
        for relation, n_links in Counter(relation_of.tolist()).items():
            rules = is_right[relation_of == relation].sum(0)
            cells.append(Cell(relation, *self._lots[relation].deal(source), n_links, rules))
        return Piece(part, tuple(cells))


# Out of the model


@dataclass(kw_only=True, eq=False)
class MeasuredPart(LinkPart):
    """Hold the sums over texts, and the hits of the block at hand."""

    _texts: tuple[LinkText, ...] = ()
    _hits: dict[Piece, Hits] = field(default_factory=dict)

    def _is_whole(self, text: LinkText) -> bool:
        return text.index not in self.broken and all(piece in self._hits for piece in text.pieces)

    def add_hits(self, piece: Piece, hits: Hits) -> None:
        """Add what heads reach in the cells of a piece, and count its text if that was the last one."""
        self._hits[piece] = hits
        text = self._texts[piece.placed.chunk.text]
        if self._is_whole(text):
            self.n_texts += text.n_texts
            self.n_tokens += sum(len(each.placed.chunk) for each in text.pieces)

    def add_up(self) -> None:
        """Add up the texts of which all chunks were measured; each chunk counts as a text."""
        texts = [text for text in self._texts if self._is_whole(text)]
        pieces = [piece for text in texts for piece in text.pieces]
        cells = [cell for piece in pieces for cell in piece.cells]
        self.add_cells(cells, [hits for piece in pieces for hits in self._hits[piece]])
        self.n_texts = sum(text.n_texts for text in texts)
        self.n_tokens = sum(len(piece.placed.chunk) for piece in pieces)
        self.n_chunked = sum(text.pieces[0].placed.chunk.n_chunks > 1 for text in texts if text.pieces)


class LinkMeasurer(Measurer[MeasuredPart]):
    """Measure what the heads of one kind of attention do on blocks of pieces."""

    def __init__(self, model: Model, kind: str) -> None:
        super().__init__()
        self._model = model
        self._kind = cast("Kind", kind)
        self._is_dense = model.info.path == "eager"
        self._shape = shape_of(model, kind)

    def start(self, block: LinkBlock) -> MeasuredPart:
        """Return sums of nothing yet."""
        return MeasuredPart(_texts=block.texts, unmeasured=dict(block.unmeasured), n_copies=block.n_copies)

    def batches(self, block: LinkBlock) -> Sequence[Sequence[Piece]]:
        """Cut a block into batches, the longest chunks first."""
        pieces = {(text.index, piece.placed.chunk.number): piece for text in block.texts for piece in text.pieces}
        cut = batches((piece.placed.chunk for piece in pieces.values()), TOKEN_BUDGET)
        return [[pieces[chunk.text, chunk.number] for chunk in batch] for batch in reversed(cut)]

    def measure(self, pieces: Sequence[Piece]) -> tuple[list[Hits], dict[int, Place]]:
        """Return hits and mass in the cells of each piece, NaN where a layer has fewer heads; and broken pieces."""
        import torch

        from attnscope.core.attention.probes import Weights, probe_by_kind
        from attnscope.core.relations import Links, links_of_weights

        info = self._model.info
        placed = [piece.placed for piece in pieces]
        facts = _facts_of(placed, self._kind, "cpu" if self._is_dense else info.device)
        targets = [part.target for part in placed if part.target is not None]
        batch = batch_of([part.chunk.tokens for part in placed], targets).to(info.device)
        with torch.no_grad():
            if self._is_dense:
                dense = Weights()
                self._model.run(batch, dense)
                by_layer = {layer: links_of_weights(maps, facts) for layer, maps in dense.maps[self._kind].items()}
            else:
                links = Links(facts)
                self._model.run(batch, probe_by_kind({self._kind: links}))
                by_layer = links.sums[self._kind]

        # Cells of all pieces: (cell, layer, head, 2).
        numbers = {layer: sums.cpu().double().numpy() for layer, sums in by_layer.items()}
        values = np.full((facts.n_cells, *self._shape, 2), np.nan)
        for layer, of_layer in numbers.items():
            values[:, layer, : of_layer.shape[1]] = of_layer
        # Find the pieces with NaN or infinity, lowest layer first.
        broken = broken_rows({self._kind: numbers})
        n_cells = [len(piece.cells) for piece in pieces]
        piece_of_cell = np.repeat(np.arange(len(pieces)), n_cells).tolist()
        broken_pieces: dict[int, Place] = {}
        for cell in sorted(broken, key=lambda cell: broken[cell][1] or 0):
            broken_pieces.setdefault(piece_of_cell[cell], broken[cell])
        return np.split(values, np.cumsum(n_cells)[:-1]), broken_pieces

    def add(
        self, part: MeasuredPart, batch: Sequence[Piece], result: tuple[Sequence[Hits], Mapping[int, Place]]
    ) -> None:
        """Add what heads reach in the cells of each piece."""
        values, broken = result
        for number, piece in enumerate(batch):
            if number in broken:
                part.broken.setdefault(piece.placed.chunk.text, broken[number])
            part.add_hits(piece, values[number])

    def finish(self, part: MeasuredPart) -> MeasuredPart:
        """Add up the whole texts of the block."""
        part.add_up()
        return part


def _facts_of(chunks: Sequence[Placed], kind: str, device: str) -> LinkFacts:
    """Return the links of a batch of chunks for `core.relations`: a cell for each relation in a chunk."""
    import torch

    from attnscope.core.relations import LinkFacts

    units = pad_rows([chunk.unit_of_token + 1 for chunk in chunks]) - 1
    # Number the rows, cells and targets of all links of the batch.
    rows: dict[tuple[int, tuple[int, ...]], int] = {}  # chunk and tokens that look
    cells: dict[tuple[int, str], int] = {}
    targets: list[tuple[int, int]] = []
    link_row: list[int] = []
    link_cell: list[int] = []
    for number, chunk in enumerate(chunks):
        for link in chunk.links:
            targets += [(len(link_row), unit) for unit in link.targets]
            link_row.append(rows.setdefault((number, link.tokens), len(rows)))
            link_cell.append(cells.setdefault((number, link.link.relation), len(cells)))

    def tensor(numbers: Sequence[Any]) -> Any:
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    return LinkFacts(
        units=torch.from_numpy(units).to(device),
        row_text=tensor([number for number, _ in rows]),
        pieces=tensor([(row, token) for (_, tokens), row in rows.items() for token in tokens]).view(-1, 2),
        link_row=tensor(link_row),
        targets=tensor(targets).view(-1, 2),
        link_cell=tensor(link_cell),
        n_cells=len(cells),
        is_across=kind == "cross",
    )


def shape_of(model: Model, kind: str) -> tuple[int, int]:
    """Return how many layers of a kind of attention a model has, and how many heads in each."""
    number = model.info.kinds.index(kind)
    return model.info.n_layers[number], model.info.n_heads[number]
