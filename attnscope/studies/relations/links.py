"""Turn texts with links into batches, and measure which links heads hit. Verdicts are left to `evidence`.

`Linker` aligns links with tokens, before the model runs, and `LinkMeasurer` runs it; `study` and `sounds` use them.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from attnscope.annotated import AnnotatedText
from attnscope.annotated.alignment import Placed, place_links
from attnscope.core.attention.probes import Weights, probe_by_kind
from attnscope.core.attention.seam import Kind
from attnscope.core.relations import LinkFacts, keep_links, links_of_weights
from attnscope.corpus import TOKEN_BUDGET, batches, chunks, fold
from attnscope.models.model import Model
from attnscope.questions.relations import RelationsOptions
from attnscope.results.tokens import Tokens
from attnscope.studies.failures import Place, broken_rows
from attnscope.studies.heads.measuring import decoder_start
from attnscope.studies.inputs.texts import batch_of, pad_rows
from attnscope.studies.relations.evidence import Cell, Floats, LinkPart, Lots, right_rules
from attnscope.studies.run import Measurer

Reasons = Counter[tuple[str, str]]
"""How many links cannot be measured, by relation and reason."""

COPY = "texts that were there before"
MIXED = "texts with a target among others without, or the other way round"
TOO_LONG = "texts or targets longer than the model takes"


@dataclass(frozen=True, eq=False, kw_only=True)
class Piece(Placed):
    """Hold a chunk with its links, and the cells that they are added to: one for each relation."""

    cells: tuple[Cell, ...]

    @property
    def text_index(self) -> int:
        """Return the number of its text in the block."""
        return self.chunk.text_index

    @property
    def number(self) -> int:
        """Return the number of its chunk in the text."""
        return self.chunk.number

    @property
    def tokens(self) -> Tokens:
        """Return its tokens."""
        return self.chunk.tokens

    def __len__(self) -> int:
        """Return its length in tokens; of a text and its target the longer."""
        return max(len(self.chunk), len(self.target or ()))


@dataclass(frozen=True, eq=False)
class LinkText:
    """Hold a text whose links are aligned with tokens and dealt to halves.

    Attributes:
        index: Its number in the block.
        source: The file that it is from.
        line: Its line there.
        n_texts: How many texts it stands for: equal ones are merged.
        n_tokens: How many tokens its chunks have.
        pieces: Its chunks.
    """

    index: int
    source: str
    line: int
    n_texts: int
    n_tokens: int
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
    unmeasured: Reasons
    n_copies: int = 0


# Into the model


class Linker:
    """Align links with tokens, and deal texts to halves, block after block.

    Args:
        model: The model.
        options: Which relations are studied, and how long texts are cut.
        kind: The kind of attention.
    """

    def __init__(self, model: Model, options: RelationsOptions, kind: str) -> None:
        self._model = model
        self._options = options
        self._kind = kind
        # The target that a decoder reads while the encoder alone is studied: its start token.
        start = decoder_start(model)
        self._start = None if start is None else start.take(np.arange(1))
        # By relation, and the hashes of the texts so far.
        self._lots: defaultdict[str, Lots] = defaultdict(Lots)
        self._seen: set[int] = set()

    def block(self, texts: Sequence[AnnotatedText]) -> LinkBlock:
        """Return texts as a block."""
        unmeasured: Reasons = Counter()
        linked = []
        n_seen = len(self._seen)
        n_all = 0
        for number, text in enumerate(texts):
            wanted = tuple(link for link in text.links if self._is_wanted(link.relation))
            placed, left_out = self._place(replace(text, links=wanted), number)
            unmeasured += left_out
            pieces = tuple(self._deal(text, part) for part in placed)
            n_tokens = sum(len(part.chunk) for part in placed)
            n_texts = 1 + text.n_merged
            n_all += n_texts
            linked.append(LinkText(number, text.source, text.line, n_texts, n_tokens, pieces))
        # All texts are copies but those that were seen here for the first time.
        n_new = len(self._seen) - n_seen
        return LinkBlock(tuple(linked), unmeasured, n_all - n_new)

    def _is_wanted(self, relation: str) -> bool:
        """Return whether a relation is studied: by its whole name, or by a label in it."""
        only = self._options.only
        if only is None:
            return True
        names = {relation, *relation.split("→")} - {"parent"}
        return not names.isdisjoint(only)

    def _place(self, text: AnnotatedText, number: int) -> tuple[list[Placed], Reasons]:
        """Return a text's chunks with their links in tokens, and how many links have none, by relation and reason."""
        is_across = self._kind == "cross"
        limit = self._model.info.max_tokens
        tokens = self._model.tokenizer.encode(text.text)
        target = None
        if is_across and text.target is not None:
            assert self._model.writer is not None
            target = self._model.writer.encode_target(text.target)
        # Copies count once; pairs of text and target must stay whole.
        folded = (fold(text.text), fold(text.target or ""))
        key = hash(folded)
        reason = ""
        if key in self._seen:
            reason = COPY
        elif (text.target is not None) != is_across:
            reason = MIXED
        elif target is not None and limit is not None and max(len(tokens), len(target)) > limit:
            reason = TOO_LONG
        self._seen.add(key)
        if reason:
            return [], Counter((link.relation, reason) for link in text.links)
        # Long texts are cut into chunks.
        parts = chunks(
            tokens,
            number,
            limit=limit,
            chunk=self._options.chunk,
            stride=self._options.stride,
        )
        is_causal = self._kind == "decoder"
        placed, left_out = place_links(text, parts, tokens, causal=is_causal, target=target)
        if target is None:
            placed = [replace(part, target=self._start) for part in placed]
        return placed, left_out

    def _deal(self, text: AnnotatedText, part: Placed) -> Piece:
        """Return a chunk with its cells: one for each relation, which is dealt to halves."""
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
            halves, is_first = self._lots[relation].deal(source)
            cells.append(Cell(relation, halves, is_first, n_links, rules))
        return Piece(**vars(part), cells=tuple(cells))


# Out of the model


@dataclass(kw_only=True, eq=False)
class MeasuredPart(LinkPart):
    """Hold the sums over texts, and the hits of the block at hand.

    Attributes:
        heard: The timings of recordings by `sounds`, which times their words.
    """

    heard: tuple[Any, ...] = ()
    _texts: tuple[LinkText, ...] = ()
    _hits: dict[Piece, Floats] = field(default_factory=dict)

    def add_hits(self, piece: Piece, hits: Floats, broken_at: Place | None) -> None:
        """Keep the hits and mass of heads in the cells of a piece, (cell, 2, layer, head).

        A text of which any piece is broken, where `broken_at` says, is left out.
        """
        text = self._texts[piece.text_index]
        self._hits[piece] = hits
        if broken_at is not None:
            self.broken.setdefault(text.index, broken_at)
        if self.complete_text(text.index, len(text.pieces)):
            self.n_texts += text.n_texts
            self.n_tokens += text.n_tokens
            self.n_chunked += piece.chunk.n_chunks > 1

    def add_up(self) -> None:
        """Add up the whole texts of the block, in their order; each chunk counts as a text."""
        # Cells and hits of all chunks, in the same order.
        cells: list[Cell] = []
        hits = []
        for text in self._texts:
            # Texts without any link that can be measured are studied too.
            if not text.pieces:
                self.n_texts += text.n_texts
            if text.index in self._whole:
                for piece in text.pieces:
                    cells += piece.cells
                    hits.append(self._hits[piece])
        if hits:
            self.add_cells(cells, np.concatenate(hits))


class LinkMeasurer(Measurer[MeasuredPart]):
    """Measure what the heads of one kind of attention do on blocks of pieces."""

    def __init__(self, model: Model, kind: str) -> None:
        super().__init__(model.tokenizer)
        self._model = model
        self._kind = cast(Kind, kind)

    def start(self, block: LinkBlock) -> MeasuredPart:
        """Return sums of nothing yet."""
        return MeasuredPart(
            _texts=block.texts,
            unmeasured=block.unmeasured,
            n_copies=block.n_copies,
        )

    def batches(self, block: LinkBlock) -> Sequence[Sequence[Piece]]:
        """Cut a block into batches, the longest chunks first."""
        pieces: Any = chain.from_iterable(text.pieces for text in block.texts)
        return batches(pieces, TOKEN_BUDGET)[::-1]  # type: ignore[return-value]  # pieces, as they came

    def measure(self, batch: Sequence[Piece]) -> Any:
        """Return hits and mass in the cells of each piece, and the broken pieces: see `hits_of_pieces`."""
        # Models outside the seam give dense weights alone, on the CPU.
        info = self._model.info
        is_dense = info.path == "eager"
        facts = facts_of(batch, self._kind, "cpu" if is_dense else info.device)
        texts = [piece.tokens for piece in batch]
        targets = [piece.target for piece in batch if piece.target is not None]
        inputs = batch_of(texts, targets).to(info.device)
        with torch.no_grad():
            if is_dense:
                dense = Weights()
                self._model.run(inputs, dense)
                by_layer = {}
                for layer, weights in dense.maps[self._kind].items():
                    by_layer[layer] = links_of_weights(weights, facts)
            else:
                links = keep_links(facts)
                self._model.run(inputs, probe_by_kind({self._kind: links}))
                by_layer = links.maps[self._kind]
        return self.hits_of_pieces(batch, by_layer)

    def hits_of_pieces(
        self, batch: Sequence[Piece], by_layer: Mapping[int, Tensor]
    ) -> tuple[list[Floats], dict[int, Place]]:
        """Divide what `core.relations` measured, layer -> (cell, head, 2), among pieces.

        Returns:
            Hits and mass in the cells of each piece, (cell, 2, layer, head), NaN where a layer has fewer heads; and
            where the first number that is not finite was computed, by piece.
        """
        n_cells = [len(piece.cells) for piece in batch]
        first_cells = np.cumsum([0, *n_cells[:-1]])
        shape = shape_of(self._model, self._kind)
        values = np.full((sum(n_cells), 2, *shape), np.nan)
        # By layer: its values, and its sums over the cells of each piece, in which NaN stays.
        sums = {}
        for layer, of_layer in by_layer.items():
            numbers = of_layer.cpu().double().numpy()
            n_heads = numbers.shape[1]
            values[:, :, layer, :n_heads] = numbers.swapaxes(1, 2)
            sums[layer] = np.add.reduceat(numbers, first_cells)  # (piece, head, 2)
        return np.split(values, first_cells[1:]), broken_rows({self._kind: sums})

    def add(self, part: MeasuredPart, batch: Sequence[Piece], result: Any) -> None:
        """Keep the hits of each piece."""
        hits, broken = result
        for number, piece in enumerate(batch):
            part.add_hits(piece, hits[number], broken.get(number))

    def finish(self, part: MeasuredPart) -> MeasuredPart:
        """Add up the whole texts of the block."""
        part.add_up()
        return part


def facts_of(chunks: Sequence[Placed], kind: str, device: str) -> LinkFacts:
    """Return the links of a batch of chunks for `core.relations`: a cell for each relation in a chunk."""
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
            # Links from the same words share a row, those of one relation a cell.
            row_key = (number, link.tokens)
            link_row.append(rows.setdefault(row_key, len(rows)))
            cell_key = (number, link.link.relation)
            link_cell.append(cells.setdefault(cell_key, len(cells)))

    # The tokens of each row, in its order.
    pieces: list[tuple[int, int]] = []
    for (_, tokens), row in rows.items():
        pieces += [(row, token) for token in tokens]

    def tensor(numbers: Sequence[Any]) -> Any:
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    return LinkFacts(
        word_of_token=torch.from_numpy(units).to(device),
        row_text=tensor([number for number, _ in rows]),
        pieces=tensor(pieces).view(-1, 2),
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
