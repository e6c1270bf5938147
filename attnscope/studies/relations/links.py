"""Turn texts with links into batches, and measure how many links each head hits. Verdicts are left to `evidence`.

`Linker` finds the tokens of links before the model runs, and `LinkMeasurer` runs it. `study` uses both, and `sounds`
the second one.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from attnscope.annotated import AnnotatedText
from attnscope.annotated.alignment import AlignedChunk, align_links
from attnscope.core.attention.probes import WeightsRecorder, probe_by_kind
from attnscope.core.attention.seam import Kind
from attnscope.core.relations import LinkFacts, record_links, score_links
from attnscope.corpus import chunks, make_batches, normalise_text
from attnscope.models.model import Model
from attnscope.questions.relations import RelationsOptions
from attnscope.results.tokens import Tokens
from attnscope.studies.failures import NanOrigin, find_broken_rows
from attnscope.studies.heads.measuring import encode_decoder_start
from attnscope.studies.inputs.texts import batch_of, pad_rows
from attnscope.studies.relations.evidence import Floats, HalfSplitter, LinkPart, TextHits, right_rules
from attnscope.studies.run import Measurer

Reasons = Counter[tuple[str, str]]
"""How many links cannot be measured, by relation and reason; the reasons are these, and those of `align_links`."""

COPY = "texts that were there before"
MIXED = "texts with a target among others without, or the other way round"
TOO_LONG = "texts or targets longer than the model takes"


@dataclass(frozen=True, eq=False, kw_only=True)
class LinkedChunk(AlignedChunk):
    """Hold a chunk with its links, and the cells to which their hits are added: one for each relation."""

    cells: tuple[TextHits, ...]

    @property
    def text_index(self) -> int:
        """Return the index of its text in the block."""
        return self.chunk.text_index

    @property
    def number(self) -> int:
        """Return the number of the chunk in its text."""
        return self.chunk.number

    @property
    def tokens(self) -> Tokens:
        """Return its tokens."""
        return self.chunk.tokens

    def __len__(self) -> int:
        """Return how many tokens it has, or its target, if that is longer."""
        return max(len(self.chunk), len(self.target or ()))


@dataclass(frozen=True, eq=False)
class LinkText:
    """Hold a text with its chunks, whose links have their tokens and halves.

    Attributes:
        index: Its index in the block.
        source: The file that it is from.
        line: Its line there, from 1.
        n_texts: How many texts it stands for: equal ones are merged.
        n_tokens: How many tokens are counted for it: those of its chunks; of a recording, its words.
        pieces: Its chunks that have links.
    """

    index: int
    source: str
    line: int
    n_texts: int
    n_tokens: int
    pieces: tuple[LinkedChunk, ...]


class LinkBlock(NamedTuple):
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
    """Find the tokens of links, and deal texts to the halves that choose and score heads, block after block.

    Args:
        model: The model.
        options: Which relations are studied, and how long texts are cut.
        kind: The kind of attention.
    """

    def __init__(self, model: Model, options: RelationsOptions, kind: str) -> None:
        self._model = model
        self._options = options
        self._kind = kind
        # Where only the encoder is studied, the decoder beside it reads this start token alone; None = no decoder.
        self._start = encode_decoder_start(model)
        # The deals of each relation.
        self._lots: defaultdict[str, HalfSplitter] = defaultdict(HalfSplitter)
        # Hashes of the texts so far.
        self._seen: set[int] = set()

    def block(self, texts: Sequence[AnnotatedText]) -> LinkBlock:
        """Return texts as a block."""
        unmeasured: Reasons = Counter()
        linked = []
        n_seen_before = len(self._seen)
        n_all = 0
        for index, text in enumerate(texts):
            wanted = tuple(link for link in text.links if self._is_wanted(link.relation))
            placed, left_out = self._place(replace(text, links=wanted), index)
            unmeasured += left_out
            pieces = tuple(self._deal(text, part) for part in placed)
            n_tokens = sum(len(part.chunk) for part in placed)
            n_texts = 1 + text.n_merged
            n_all += n_texts
            linked.append(LinkText(index, text.source, text.line, n_texts, n_tokens, pieces))
        # `_place` adds each new text to `_seen`; all others are copies.
        n_new = len(self._seen) - n_seen_before
        return LinkBlock(tuple(linked), unmeasured, n_all - n_new)

    def _is_wanted(self, relation: str) -> bool:
        """Return whether a relation is studied: by its whole name, such as nsubj→parent, or by a label in it."""
        only = self._options.only
        if only is None:
            return True
        # "parent" is no label: it stands for the other end of many relations.
        names = {relation, *relation.split("→")} - {"parent"}
        return not names.isdisjoint(only)

    def _place(self, text: AnnotatedText, index: int) -> tuple[list[AlignedChunk], Reasons]:
        """Return the chunks of a text that have links, with the links in tokens; and what links have no tokens."""
        is_across = self._kind == "cross"
        limit = self._model.info.max_tokens
        tokens = self._model.tokenizer.encode(text.text)
        target = None
        if is_across and text.target is not None:
            assert self._model.text_generator is not None
            target = self._model.text_generator.encode_target(text.target)
        # Leave out all links of copies, and of pairs of text and target that do not fit into the model whole.
        key = hash((normalise_text(text.text), normalise_text(text.target or "")))
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
            tokens, index, limit=limit, chunk=self._options.chunk, stride=self._options.stride
        )
        placed, left_out = align_links(
            text, parts, tokens, causal=self._kind == "decoder", target=target
        )
        if target is None:
            placed = [replace(part, target=self._start) for part in placed]
        return placed, left_out

    def _deal(self, text: AnnotatedText, part: AlignedChunk) -> LinkedChunk:
        """Return a chunk with a cell for each of its relations, in which the text is dealt to halves."""
        # Without a document, chunks of one text have that text as their source, so that they go to one half.
        source = text.document
        if source is None and part.chunk.n_chunks > 1:
            source = f"{text.source}, line {text.line}"
        links = [link.link for link in part.links]
        is_right = right_rules(text, links)
        relation_of = np.array([link.relation for link in links])
        cells = []
        for relation, n_links in Counter(relation_of.tolist()).items():
            rule_hits = is_right[relation_of == relation].sum(0)
            halves, is_first = self._lots[relation].deal(source)
            cells.append(TextHits(relation, halves, is_first, n_links, rule_hits))
        # A piece has the fields of the aligned chunk, and the cells.
        return LinkedChunk(**vars(part), cells=tuple(cells))


# Out of the model


@dataclass(kw_only=True, eq=False)
class MeasuredPart(LinkPart):
    """Hold the sums over texts; and while a block is measured, its texts and their hits.

    Attributes:
        word_timings: What `sounds` keeps of recordings, to time their words.
    """

    word_timings: tuple[Any, ...] = ()
    _texts: tuple[LinkText, ...] = ()
    # Hits and mass of heads in the cells of each measured chunk, (cell, 2, layer, head).
    _hits: dict[LinkedChunk, Floats] = field(default_factory=dict)


class LinkMeasurer(Measurer[MeasuredPart]):
    """Measure the hits of all heads of one kind of attention on the links of blocks."""

    def __init__(self, model: Model, kind: str) -> None:
        super().__init__(model.tokenizer)
        self._model = model
        self._kind = cast(Kind, kind)

    def start(self, block: LinkBlock) -> MeasuredPart:
        """Return a part for a block, as yet without hits."""
        return MeasuredPart(_texts=block.texts, unmeasured=block.unmeasured, n_copies=block.n_copies)

    def batches(self, block: LinkBlock) -> Sequence[Sequence[LinkedChunk]]:
        """Cut a block into batches, the longest chunks first."""
        pieces: Any = chain.from_iterable(text.pieces for text in block.texts)
        return make_batches(pieces)[::-1]  # type: ignore[return-value]  # pieces, as they came

    def measure(self, batch: Sequence[LinkedChunk]) -> Any:
        """Run the model on chunks, and return their hits and the broken ones, as `hits_of_pieces` does."""
        info = self._model.info
        facts = facts_of(batch, self._kind)
        texts = [piece.tokens for piece in batch]
        targets = [piece.target for piece in batch if piece.target is not None]
        inputs = batch_of(texts, targets).to(info.device)
        with torch.no_grad():
            # Models outside the seam give whole maps, (text, head, query, key) on the CPU; at the seam none is kept.
            if info.path == "eager":
                dense = WeightsRecorder()
                self._model.run(inputs, dense)
                by_layer = {}
                for layer, weights in dense.maps[self._kind].items():
                    by_layer[layer] = score_links(weights, facts)
            else:
                links = record_links(facts.to(torch.device(info.device)))
                self._model.run(inputs, probe_by_kind({self._kind: links}))
                by_layer = links.maps[self._kind]
        return self.hits_of_pieces(batch, by_layer)

    def hits_of_pieces(
        self, batch: Sequence[LinkedChunk], by_layer: Mapping[int, Tensor]
    ) -> tuple[list[Floats], dict[int, NanOrigin]]:
        """Divide the hits and mass in the cells of a batch among its chunks.

        Args:
            batch: The chunks.
            by_layer: Layer -> (cell, head, 2), as `core.relations` returns them.

        Returns:
            For each chunk, the hits and mass in its cells, (cell, 2, layer, head), NaN where a layer has fewer heads.
            For each broken chunk, by its index in the batch, the first layer with a number that is not finite.
        """
        n_cells = [len(piece.cells) for piece in batch]
        first_cells = np.cumsum([0, *n_cells[:-1]])
        hits = np.full((sum(n_cells), 2, *shape_of(self._model, self._kind)), np.nan)
        # The sums over the cells of each chunk, (chunk, head, 2), are not finite where the chunk is broken.
        sums = {}
        for layer, tensor in by_layer.items():
            of_layer = tensor.cpu().double().numpy()
            n_heads = of_layer.shape[1]
            hits[:, :, layer, :n_heads] = of_layer.swapaxes(1, 2)
            sums[layer] = np.add.reduceat(of_layer, first_cells)
        return np.split(hits, first_cells[1:]), find_broken_rows({self._kind: sums})

    def add(self, part: MeasuredPart, batch: Sequence[LinkedChunk], result: Any) -> None:
        """Keep the hits of each chunk, and count the texts that are done; a text with a broken chunk is left out."""
        hits, broken = result
        for index, piece in enumerate(batch):
            part._hits[piece] = hits[index]
            text = part._texts[piece.text_index]
            if index in broken:
                part.broken.setdefault(text.index, broken[index])
            if part.count_row(text.index, len(text.pieces)):
                part.n_texts += text.n_texts
                part.n_tokens += text.n_tokens
                if piece.chunk.n_chunks > 1:
                    part.n_chunked += 1

    def finish(self, part: MeasuredPart) -> MeasuredPart:
        """Add up the hits of the whole texts, in the order of the block; for the intervals, each chunk is a text."""
        # The cells and hits of all chunks, in the same order.
        cells: list[TextHits] = []
        hits = []
        for text in part._texts:
            # Texts without a link that can be measured are studied too.
            if not text.pieces:
                part.n_texts += text.n_texts
            if text.index in part._whole_texts:
                for piece in text.pieces:
                    cells += piece.cells
                    hits.append(part._hits[piece])
        if hits:
            part.add_cells(cells, np.concatenate(hits))
        return part


def facts_of(batch: Sequence[AlignedChunk], kind: str) -> LinkFacts:
    """Return the links of a batch of chunks as `core.relations` takes them, on the CPU.

    A row is a source in a chunk, and a cell a relation in a chunk.
    """
    # The word of each token, (chunk, token). It is -1 for tokens of no word and for padding, which `pad_rows` makes 0.
    words = pad_rows([chunk.unit_of_token + 1 for chunk in batch]) - 1
    # Number rows and cells in the order in which they first come: a new one gets the next number.
    rows: dict[tuple[int, tuple[int, ...]], int] = {}
    cells: dict[tuple[int, str], int] = {}
    targets: list[tuple[int, int]] = []
    link_row: list[int] = []
    link_cell: list[int] = []
    for number, chunk in enumerate(batch):
        for link in chunk.links:
            targets += [(len(link_row), word) for word in link.targets]
            # Links from the same words share a row, those of one relation a cell.
            row_key = (number, link.tokens)
            link_row.append(rows.setdefault(row_key, len(rows)))
            cell_key = (number, link.link.relation)
            link_cell.append(cells.setdefault(cell_key, len(cells)))
    # Row and token of each token of a source.
    pieces: list[tuple[int, int]] = []
    for (_, tokens), row in rows.items():
        pieces += [(row, token) for token in tokens]
    return LinkFacts(
        word_of_token=torch.from_numpy(words),
        row_text=torch.tensor([number for number, _ in rows]),
        pieces=torch.tensor(pieces),
        link_row=torch.tensor(link_row),
        targets=torch.tensor(targets),
        link_cell=torch.tensor(link_cell),
        n_cells=len(cells),
        is_across=kind == "cross",
    )


def shape_of(model: Model, kind: str) -> tuple[int, int]:
    """Return how many layers of a kind of attention a model has, and how many heads in each."""
    kind_index = model.info.kinds.index(kind)
    return model.info.n_layers[kind_index], model.info.n_heads[kind_index]
