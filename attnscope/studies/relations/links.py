"""Turn annotated texts into batches, and measure how many of their links each head hits. `evidence` gives verdicts.

A link leads from source words to target words, such as from a verb to its subject. A head hits it if its largest weight
is on a target; the head's mass is its attention to the targets. A cell has the links of one relation in one chunk of a
text. `Linker` finds the tokens of links before the model runs. `LinkMeasurer` runs the model. `study` uses both, and
`sounds` uses `LinkMeasurer`.
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
from attnscope.arrays import Floats
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
from attnscope.studies.relations.evidence import HalfSplitter, LinkPart, TextHits, check_rules
from attnscope.studies.run import Measurer

UnmeasuredLinks = Counter[tuple[str, str]]
"""How many links cannot be measured, by (relation, reason). The reasons are those below, and those of `align_links`."""

REASON_COPY = "texts that were there before"
REASON_MIXED = "texts with a target among others without, or the other way round"
REASON_TOO_LONG = "texts or targets longer than the model takes"


@dataclass(frozen=True, eq=False, kw_only=True)
class LinkedChunk(AlignedChunk):
    """Hold a chunk with its links in tokens, and its cells: one for each relation."""

    cells: tuple[TextHits, ...]

    @property
    def text_index(self) -> int:
        """Return the index of the chunk's text in the block."""
        return self.chunk.text_index

    @property
    def number(self) -> int:
        """Return the number of the chunk in its text, from 0."""
        return self.chunk.number

    @property
    def tokens(self) -> Tokens:
        """Return the tokens of the chunk."""
        return self.chunk.tokens

    def __len__(self) -> int:
        """Return the number of tokens of the chunk or of its target, whichever is longer: batches are cut by it."""
        return max(len(self.chunk), len(self.target or ()))


@dataclass(frozen=True, eq=False)
class LinkText:
    """Hold a text with its chunks, whose links are placed in tokens and assigned to halves.

    Attributes:
        index: The index of the text in the block.
        source: The file that the text is from.
        line: The line of the text in the file, from 1.
        n_texts: How many equal texts were merged into this one, itself included.
        n_tokens: The number of tokens of its chunks; for a recording, the number of its words.
        linked_chunks: The chunks that have links.
    """

    index: int
    source: str
    line: int
    n_texts: int
    n_tokens: int
    linked_chunks: tuple[LinkedChunk, ...]


class LinkBlock(NamedTuple):
    """Hold a block of texts.

    Attributes:
        texts: The texts.
        unmeasured: How many links cannot be measured, by (relation, reason).
        n_copies: How many texts are copies of earlier texts.
    """

    texts: tuple[LinkText, ...]
    unmeasured: UnmeasuredLinks
    n_copies: int = 0


# Before the model runs


class Linker:
    """Find the tokens of links, and assign texts to the halves that select and score heads, block after block.

    Args:
        model: The model.
        options: Which relations are studied, and how long texts are cut into chunks.
        kind: The kind of attention.
    """

    def __init__(self, model: Model, options: RelationsOptions, kind: str) -> None:
        self._model = model
        self._options = options
        self._kind = kind
        # If the encoder of an encoder-decoder is studied, its decoder reads this start token alone. None = no decoder.
        self._decoder_start = encode_decoder_start(model)
        # The halves of each relation's texts.
        self._splitters: defaultdict[str, HalfSplitter] = defaultdict(HalfSplitter)
        # Hashes of all texts of this and earlier blocks, to find copies.
        self._text_hashes: set[int] = set()

    def make_block(self, texts: Sequence[AnnotatedText]) -> LinkBlock:
        """Return a block of texts with their links placed in tokens."""
        unmeasured: UnmeasuredLinks = Counter()
        link_texts = []
        n_hashes_before = len(self._text_hashes)
        n_all = 0
        for index, text in enumerate(texts):
            studied_links = tuple(link for link in text.links if self._is_studied(link.relation))
            aligned_chunks, unmeasured_links = self._place(replace(text, links=studied_links), index)
            unmeasured += unmeasured_links
            linked_chunks = tuple(
                self._link_chunk(text, aligned_chunk) for aligned_chunk in aligned_chunks
            )
            n_tokens = sum(len(aligned_chunk.chunk) for aligned_chunk in aligned_chunks)
            n_texts = 1 + text.n_merged
            n_all += n_texts
            link_texts.append(LinkText(index, text.source, text.line, n_texts, n_tokens, linked_chunks))
        # `_place` adds the hash of each new text to `_text_hashes`. All other texts are copies.
        n_new = len(self._text_hashes) - n_hashes_before
        return LinkBlock(tuple(link_texts), unmeasured, n_all - n_new)

    def _is_studied(self, relation: str) -> bool:
        """Return whether --only names a relation, such as nsubj→parent, or a label in it, such as nsubj."""
        only = self._options.only
        if only is None:
            return True
        # "parent" is not a label: many relations have it at one end.
        names = {relation, *relation.split("→")} - {"parent"}
        return not names.isdisjoint(only)

    def _place(self, text: AnnotatedText, index: int) -> tuple[list[AlignedChunk], UnmeasuredLinks]:
        """Return the chunks of a text that have links, with the links in tokens; and the links without tokens."""
        is_cross = self._kind == "cross"
        limit = self._model.info.max_tokens
        tokens = self._model.tokenizer.encode(text.text)
        target = None
        if is_cross and text.target is not None:
            assert self._model.text_generator is not None
            target = self._model.text_generator.encode_target(text.target)
        # Leave out all links of a copy, of a text whose target does not fit the kind of attention, and of a text with a
        # target too long for the model: such a pair cannot be cut into chunks.
        text_hash = hash((normalise_text(text.text), normalise_text(text.target or "")))
        reason = ""
        if text_hash in self._text_hashes:
            reason = REASON_COPY
        elif (text.target is not None) != is_cross:
            reason = REASON_MIXED
        elif target is not None and limit is not None and max(len(tokens), len(target)) > limit:
            reason = REASON_TOO_LONG
        self._text_hashes.add(text_hash)
        if reason:
            return [], Counter((link.relation, reason) for link in text.links)
        # Cut long texts into chunks, and place the links in their tokens.
        text_chunks = chunks(
            tokens, index, limit=limit, chunk=self._options.chunk, stride=self._options.stride
        )
        aligned_chunks, unmeasured_links = align_links(
            text, text_chunks, tokens, causal=self._kind == "decoder", target=target
        )
        if target is None:
            aligned_chunks = [
                replace(aligned_chunk, target=self._decoder_start) for aligned_chunk in aligned_chunks
            ]
        return aligned_chunks, unmeasured_links

    def _link_chunk(self, text: AnnotatedText, aligned_chunk: AlignedChunk) -> LinkedChunk:
        """Return a chunk with a cell for each of its relations; each relation assigns the text to halves."""
        # The source of a text is its document. Without a document, the chunks of a text have the text as their source,
        # so that all go to the same half. None = the text is a source of its own.
        source = text.document
        if source is None and aligned_chunk.chunk.n_chunks > 1:
            source = f"{text.source}, line {text.line}"
        links = [aligned_link.link for aligned_link in aligned_chunk.links]
        is_hit = check_rules(text, links)
        relation_by_link = np.array([link.relation for link in links])
        cells = []
        for relation, n_links in Counter(relation_by_link.tolist()).items():
            rule_hits = is_hit[relation_by_link == relation].sum(0)
            halves, is_first = self._splitters[relation].assign(source)
            cells.append(TextHits(relation, halves, is_first, n_links, rule_hits))
        # The linked chunk has all fields of the aligned chunk, and the cells.
        return LinkedChunk(**vars(aligned_chunk), cells=tuple(cells))


# Running the model


@dataclass(kw_only=True, eq=False)
class MeasuredPart(LinkPart):
    """Hold the sums over texts. While a block is measured, also hold its texts and their hits.

    Attributes:
        word_timings: What `sounds` needs of each recording to time its words.
    """

    word_timings: tuple[Any, ...] = ()
    _texts: tuple[LinkText, ...] = ()
    # Hits and mass of heads in the cells of each measured chunk, (cell, 2, layer, head).
    _hits_by_chunk: dict[LinkedChunk, Floats] = field(default_factory=dict)


class LinkMeasurer(Measurer[MeasuredPart]):
    """Measure the hits of all heads of one kind of attention on the links of blocks."""

    def __init__(self, model: Model, kind: str) -> None:
        super().__init__(model.tokenizer)
        self._model = model
        self._kind = cast(Kind, kind)

    def start(self, block: LinkBlock) -> MeasuredPart:
        """Return a part for a block, still without hits."""
        return MeasuredPart(_texts=block.texts, unmeasured=block.unmeasured, n_copies=block.n_copies)

    def batches(self, block: LinkBlock) -> Sequence[Sequence[LinkedChunk]]:
        """Cut a block into batches, the longest chunks first."""
        linked_chunks: Any = chain.from_iterable(text.linked_chunks for text in block.texts)
        return make_batches(linked_chunks)[::-1]  # type: ignore[return-value]  # chunks in, chunks out

    def measure(self, batch: Sequence[LinkedChunk]) -> Any:
        """Run the model on chunks, and return their hits and the broken chunks, as `split_hits` does."""
        info = self._model.info
        facts = make_link_facts(batch, self._kind)
        texts = [linked_chunk.tokens for linked_chunk in batch]
        targets = [linked_chunk.target for linked_chunk in batch if linked_chunk.target is not None]
        inputs = batch_of(texts, targets).to(info.device)
        with torch.no_grad():
            # The seam is the one function that computes attention (`core.attention.seam`). Models with attention of
            # their own ("eager") give whole maps, (text, head, query, key), on the CPU. At the seam, hits are added up
            # within each call, and no map is kept.
            if info.path == "eager":
                dense_recorder = WeightsRecorder()
                self._model.run(inputs, dense_recorder)
                by_layer = {}
                for layer, weights in dense_recorder.maps[self._kind].items():
                    by_layer[layer] = score_links(weights, facts)
            else:
                link_recorder = record_links(facts.to(torch.device(info.device)))
                self._model.run(inputs, probe_by_kind({self._kind: link_recorder}))
                by_layer = link_recorder.maps[self._kind]
        return self.split_hits(batch, by_layer)

    def split_hits(
        self, batch: Sequence[LinkedChunk], by_layer: Mapping[int, Tensor]
    ) -> tuple[list[Floats], dict[int, NanOrigin]]:
        """Split the hits and mass in the cells of a batch by chunk.

        Args:
            batch: The chunks.
            by_layer: Layer -> hits and mass, (cell, head, 2), as `core.relations` returns them.

        Returns:
            For each chunk, the hits and mass in its cells, (cell, 2, layer, head), NaN if the layer lacks the head.
            For each broken chunk, by its index in the batch, the first layer with NaN or infinity.
        """
        n_cells = [len(linked_chunk.cells) for linked_chunk in batch]
        first_cells = np.cumsum([0, *n_cells[:-1]])
        hits = np.full((sum(n_cells), 2, *head_grid_shape(self._model, self._kind)), np.nan)
        # Add up the cells of each chunk, (chunk, head, 2): the sum is NaN or infinite if the chunk is broken.
        sums_by_layer = {}
        for layer, tensor in by_layer.items():
            layer_hits = tensor.cpu().double().numpy()
            n_heads = layer_hits.shape[1]
            hits[:, :, layer, :n_heads] = layer_hits.swapaxes(1, 2)
            sums_by_layer[layer] = np.add.reduceat(layer_hits, first_cells)
        return np.split(hits, first_cells[1:]), find_broken_rows({self._kind: sums_by_layer})

    def add(self, part: MeasuredPart, batch: Sequence[LinkedChunk], result: Any) -> None:
        """Keep the hits of each chunk, and count the texts that are complete; leave out texts with a broken chunk."""
        hits, broken = result
        for index, linked_chunk in enumerate(batch):
            part._hits_by_chunk[linked_chunk] = hits[index]
            text = part._texts[linked_chunk.text_index]
            if index in broken:
                part.broken.setdefault(text.index, broken[index])
            if part.count_row(text.index, len(text.linked_chunks)):
                part.n_texts += text.n_texts
                part.n_tokens += text.n_tokens
                if linked_chunk.chunk.n_chunks > 1:
                    part.n_chunked += 1

    def finish(self, part: MeasuredPart) -> MeasuredPart:
        """Add up the hits of the complete texts in the order of the block; intervals count each chunk as a text."""
        # Collect the cells and the hits of all chunks, in the same order.
        cells: list[TextHits] = []
        hits = []
        for text in part._texts:
            # `add` never sees a text without linked chunks: count it here.
            if not text.linked_chunks:
                part.n_texts += text.n_texts
            if text.index in part._whole_texts:
                for linked_chunk in text.linked_chunks:
                    cells += linked_chunk.cells
                    hits.append(part._hits_by_chunk[linked_chunk])
        if hits:
            part.add_cells(cells, np.concatenate(hits))
        return part


def make_link_facts(batch: Sequence[AlignedChunk], kind: str) -> LinkFacts:
    """Return the links of a batch of chunks in the form that `core.relations` takes, on the CPU.

    A row is a source in a chunk, and a cell is a relation in a chunk. Rows and cells are numbered over the whole batch.
    """
    # The word of each token, (chunk, token); -1 for tokens of no word and for padding. `pad_rows` pads with 0, so shift
    # by 1.
    words = pad_rows([chunk.unit_of_token + 1 for chunk in batch]) - 1
    # Number rows and cells in the order in which they appear: `setdefault` gives a new key the next number.
    rows: dict[tuple[int, tuple[int, ...]], int] = {}
    cells: dict[tuple[int, str], int] = {}
    targets: list[tuple[int, int]] = []
    link_row: list[int] = []
    link_cell: list[int] = []
    for chunk_index, chunk in enumerate(batch):
        for link in chunk.links:
            targets += [(len(link_row), word) for word in link.targets]
            # Links from the same words share a row. Links of one relation share a cell.
            row_key = (chunk_index, link.tokens)
            link_row.append(rows.setdefault(row_key, len(rows)))
            cell_key = (chunk_index, link.link.relation)
            link_cell.append(cells.setdefault(cell_key, len(cells)))
    # The pieces of a row are the tokens of its source: (row, token).
    pieces: list[tuple[int, int]] = []
    for (_, tokens), row in rows.items():
        pieces += [(row, token) for token in tokens]
    return LinkFacts(
        word_of_token=torch.from_numpy(words),
        row_text=torch.tensor([chunk_index for chunk_index, _ in rows]),
        pieces=torch.tensor(pieces),
        link_row=torch.tensor(link_row),
        targets=torch.tensor(targets),
        link_cell=torch.tensor(link_cell),
        n_cells=len(cells),
        is_across=kind == "cross",
    )


def head_grid_shape(model: Model, kind: str) -> tuple[int, int]:
    """Return how many layers of a kind of attention a model has, and how many heads in each."""
    kind_index = model.info.kinds.index(kind)
    return model.info.n_layers[kind_index], model.info.n_heads[kind_index]
