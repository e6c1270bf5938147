"""Which head links X to Y? A model and annotated texts in, the heads that express each relation out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.annotated import AnnotatedCorpus, AnnotatedText
from attnscope.annotated.alignment import Placed, placed
from attnscope.corpus import TOKEN_BUDGET, Chunk, batches, chunks, runs
from attnscope.errors import AttnscopeError
from attnscope.models.model import Batch, Model, example_tokens
from attnscope.records.relations import Relations
from attnscope.studies.heatmap import run_of
from attnscope.studies.memory import Room, give_memory_back, halves, halving_note, sparing
from attnscope.studies.relation_evidence import (
    FEWEST_LINKS,
    FEWEST_TEXTS,
    LEVEL,
    MARGIN,
    Tally,
    judged,
    like_words,
    rule_hits,
)
from attnscope.studies.texts import Progress, Report, padded
from attnscope.studies.workers import Lost, Workers, WorkersModel, carried_out, lost

if TYPE_CHECKING:
    from attnscope.core.relations import LinkFacts, LinkSums

BLOCK = 512
"""Most texts that are cut into batches together; long ones are fewer: see `attnscope.corpus.runs`."""


@dataclass(frozen=True)
class RelationsOptions:
    """How relations are studied.

    Attributes:
        only: Labels ("nsubj") or whole names ("nsubj→head") of the relations that are wanted; None = all.
        chunk: Texts over the model's limit are cut into chunks of at most so many tokens; None = the limit. Each
            counts as a text.
        stride: How many tokens further the next chunk begins; None = no token comes twice.
        n_examples: How many texts to show for each relation that a head expresses.
    """

    only: tuple[str, ...] | None = None
    chunk: int | None = None
    stride: int | None = None
    n_examples: int = 0

    def wants(self, relation: str) -> bool:
        """Whether a relation is among those that are wanted."""
        labels = set(relation.split("→")) - {"head"}
        return self.only is None or any(name == relation or name in labels for name in self.only)


def relations(
    model: Model,
    texts: AnnotatedCorpus | Sequence[AnnotatedText] | str,
    options: RelationsOptions | None = None,
    report: Report | None = None,
    workers: Workers | None = None,
) -> Relations:
    """Measures how well every head of a model expresses every relation of annotated texts.

        model = attnscope.load("minilm")
        found = attnscope.relations(model, "sample_texts/relations.conllu")
        found["nsubj→head"].best, found["nsubj→head"].accuracy  # (layer, head); of every head
        found.save("relations.npz")

    To words from tokens by the rules of Clark et al. 2019 (see `core.relations`). For each relation the texts are
    divided by lot into halves: the head is chosen on the one and scored on the other, against the simple rule that does
    best on that other half itself. Memory does not grow with the corpus, nor (but for models that only have dense
    weights) with the square of a text's length. An interruption (KeyboardInterrupt) ends the study: what was found up
    to the last whole block of texts is returned, and said to be incomplete.

    With `workers`, the model runs in them, block by block, and the result is that of one process with as many threads;
    what needs no model (tokens, places of links, lots) is done here. A block over which three workers were lost is
    listed in `corpus["problems"]`, and all others are in the result.

    Args:
        model: A loaded model, see `attnscope.load`.
        texts: Annotated texts: an AnnotatedCorpus, a list, or the name of a file.
        options: How.
        report: Called after each batch; with workers after each block.
        workers: Where the model runs; None = in this process. They load it by its name.

    Raises:
        AttnscopeError: There is no link that can be measured, the model cannot be, or no worker can begin.
    """
    options = options or RelationsOptions()
    corpus = AnnotatedCorpus([texts]) if isinstance(texts, str) else texts
    _require_measurable(model, options)
    study = _Study(model, options)
    complete = study.run(corpus, report, workers)
    done = study.done
    if complete and not study.lost and not any(tally.n for tally in done.tallies.values()):
        raise AttnscopeError(*_nothing(done, options))
    described = {
        "sources": list(corpus.sources) if isinstance(corpus, AnnotatedCorpus) else ["texts"],
        "unit": corpus.unit if isinstance(corpus, AnnotatedCorpus) else None,
        "n_texts": done.n_texts,
        "n_tokens": done.n_tokens,
        "n_chunked": done.n_chunked,
        "sha256": corpus.sha256 if isinstance(corpus, AnnotatedCorpus) else "",
        "problems": [
            *(asdict(problem) for problem in (corpus.problems if isinstance(corpus, AnnotatedCorpus) else ())),
            *study.lost,
        ],
        "complete": complete,
    }
    chosen = {
        "only": options.only, "chunk": options.chunk, "stride": options.stride, "level": LEVEL, "margin": MARGIN,
        "fewest_links": FEWEST_LINKS, "fewest_texts": FEWEST_TEXTS,
    }  # fmt: skip
    found = judged(done.tallies)
    shown = study.examples(found) if options.n_examples else ()
    notes = [*_notes(done), *study.notes, *study.halving_notes]
    return Relations(run_of(model.info, notes), described, chosen, model.info.kinds[0], found, shown)


def _require_measurable(model: Model, options: RelationsOptions) -> None:
    """Raises an AttnscopeError before anything is read where nothing could come of it."""
    if len(model.info.kinds) > 1:
        raise AttnscopeError(
            f"{model.info.name} has an encoder and a decoder; relations are studied in models that have one of them",
            "look at single texts with: attnscope heatmap",
        )
    example = example_tokens(model.tokenizer)
    if not (example.offsets >= 0).any():
        raise AttnscopeError(
            f"the tokenizer of {model.info.name} does not tell which characters its tokens are",
            "relations need a fast tokenizer, with offsets",
        )
    # Chunks that do not fit the model are refused here.
    chunks(example, limit=model.info.max_tokens, chunk=options.chunk, stride=options.stride)


def _nothing(done: _Done, options: RelationsOptions) -> tuple[str, str]:
    reasons = Counter[str]()
    for tally in done.tallies.values():
        reasons.update(tally.left_out)
    if reasons:
        reason, n = reasons.most_common(1)[0]
        return (
            f"no link can be measured: of most ({n}) {reason}",
            "choose other texts, another --unit, or longer chunks",
        )
    if options.only is not None:
        return f"there is no relation {', '.join(options.only)} in these texts", "leave out --only to see all"
    return "there is no link in these texts", "give texts whose annotation has some"


def _notes(done: _Done) -> list[str]:
    said = []
    reasons: dict[str, Counter[str]] = {}
    for name, tally in done.tallies.items():
        for reason, n in tally.left_out.items():
            reasons.setdefault(reason, Counter())[name] += n
    for reason, by_relation in reasons.items():
        most = ", ".join(f"{name} {n}" for name, n in by_relation.most_common(3))
        more = " …" if len(by_relation) > 3 else ""
        said.append(f"Left out, {reason}: {by_relation.total():,} links ({most}{more}).")
    if done.n_chunked:
        many = done.n_chunked != 1
        said.append(
            f"{done.n_chunked:,} text{'s were' if many else ' was'} longer than the model takes, and cut into chunks; "
            "each chunk counts as a text."
        )
    return said


@dataclass(frozen=True)
class _Done:
    """What a study has added up: whole blocks only. Replaced as a whole, so that an interruption finds it whole."""

    tallies: Mapping[str, Tally] = field(default_factory=dict)
    n_texts: int = 0
    n_tokens: int = 0
    n_chunked: int = 0


@dataclass(frozen=True)
class _Cell:
    """The links of one relation in one chunk: what they are added up to, and to which half they go."""

    relation: str
    half: int
    n: int


_CellSums = tuple[_Cell, NDArray[np.float64]]
"""A cell, and the hits and mass of heads in it, (layer, head, 2)."""


@dataclass(frozen=True, eq=False)
class _Part:
    """A chunk with its links, and where those are added."""

    text: AnnotatedText
    placed: Placed
    cells: tuple[_Cell, ...]


@dataclass(frozen=True, eq=False)
class _Block:
    """A block of texts whose links are in their places and dealt to halves: all but what the heads do.

    Attributes:
        number: Its number, from 0.
        first: Its first text.
        n_texts: How many texts it has.
        n_chunked: How many of them came in several chunks.
        tallies: What is known of it without the model, by relation.
        batches: Its parts, as the model is given them.
        share: How much of all texts had been read then.
    """

    number: int
    first: AnnotatedText
    n_texts: int
    n_chunked: int
    tallies: Mapping[str, Tally]
    batches: Batches
    share: float | None

    @property
    def n_tokens(self) -> int:
        """Its tokens."""
        return sum(len(part.placed.chunk) for batch in self.batches for part in batch)


Batches = tuple[tuple[_Part, ...], ...]
"""Parts as the model is given them together."""


@dataclass(frozen=True, eq=False)
class _Work:
    """What workers begin with."""

    model: WorkersModel

    def begin(self) -> Callable[[_Block], tuple[Mapping[str, Tally], int | None]]:
        """Loads the model; what it returns adds up what heads reach on a block, and says if batches were halved."""
        observer = _Observer(self.model.load())

        def add_up(block: _Block) -> tuple[Mapping[str, Tally], int | None]:
            found = _summed([sums for step in observer.steps(block.batches) for sums in step])
            return found, observer.room.tokens

        return add_up


class _Study:
    """One model on annotated texts, block by block."""

    def __init__(self, model: Model, options: RelationsOptions) -> None:
        self.model, self.options = model, options
        self.done = _Done()
        self.lost: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._halved_to: set[int] = set()
        self._causal = model.info.kinds == ("decoder",)
        self._dealt = Counter[str]()
        self._shown: dict[str, list[_Part]] = {}

    def run(self, texts: Iterable[AnnotatedText], report: Report | None, workers: Workers | None) -> bool:
        """Goes through all texts; False if it was interrupted."""
        try:
            if workers is not None:
                self._run_shared(texts, report, workers)
                return True
            observer = _Observer(self.model)
            for block in self._blocks(texts):
                self._add_block(block, observer, report)
                self._halved_to.update(() if observer.room.tokens is None else (observer.room.tokens,))
        except KeyboardInterrupt:
            return False
        return True

    @property
    def halving_notes(self) -> list[str]:
        """What was done for want of memory."""
        return [halving_note(min(self._halved_to))] if self._halved_to else []

    def _run_shared(self, texts: Iterable[AnnotatedText], report: Report | None, workers: Workers) -> None:
        """Has workers look at the blocks; what they find is added in the order of the texts."""
        found: dict[int, tuple[_Block, Mapping[str, Tally] | None]] = {}
        n_added, share = 0, 0.0
        try:
            with (
                workers.open(self.model.info.device) as executor,
                closing(carried_out(executor, _Work(workers.model(self.model)), self._blocks(texts))) as outcomes,
            ):
                for outcome in outcomes:
                    block = outcome.task
                    if isinstance(outcome, Lost):
                        self.lost.append(lost(block.first, block.n_texts, outcome.reason))
                        found[block.number] = block, None
                    else:
                        sums, halved_to = outcome.result
                        found[block.number] = block, sums
                        self._halved_to.update(() if halved_to is None else (halved_to,))
                    while n_added in found:
                        self._take(*found.pop(n_added))
                        n_added += 1
                    share = max(share, block.share or 0.0)
                    if report is not None:
                        report(Progress(self.done.n_texts, self.done.n_tokens, block.share and share))
        except KeyboardInterrupt:
            if found:
                self.notes.append("Interrupted: these are whole blocks of texts, but not the first ones.")
            for number in sorted(found):
                self._take(*found[number])
            raise

    def _blocks(self, texts: Iterable[AnnotatedText]) -> Iterator[_Block]:
        for number, held in enumerate(runs(texts, BLOCK, lambda text: len(text.text))):
            yield self._block(held, number, _share(texts))

    def _block(self, texts: Sequence[AnnotatedText], number: int, share: float | None) -> _Block:
        tallies: dict[str, Tally] = {}
        parts: dict[tuple[int, int], _Part] = {}
        n_chunked = 0
        for place, text in enumerate(texts):
            found = self._placed(text, place, tallies)
            n_chunked += bool(found) and found[0].placed.chunk.n_chunks > 1
            for part in found:
                parts[place, part.placed.chunk.number] = part
        cut = batches((part.placed.chunk for part in parts.values()), TOKEN_BUDGET)
        # The longest first: what shorter ones need fits into what those have freed.
        made = tuple(tuple(parts[chunk.text, chunk.number] for chunk in batch) for batch in reversed(cut))
        return _Block(number, texts[0], len(texts), n_chunked, tallies, made, share)

    def _add_block(self, block: _Block, observer: _Observer, report: Report | None) -> None:
        sums: list[_CellSums] = []
        n_tokens = 0
        for batch, step in zip(block.batches, observer.steps(block.batches), strict=True):
            sums += step
            n_tokens += sum(len(part.placed.chunk) for part in batch)
            if report is not None:
                report(Progress(self.done.n_texts + block.n_texts, self.done.n_tokens + n_tokens, block.share))
        self._take(block, _summed(sums))

    def _take(self, block: _Block, sums: Mapping[str, Tally] | None) -> None:
        """Adds a block, in one step: an interruption leaves either the old sums or the new ones. None = it is lost."""
        if sums is None:
            return
        done, tallies = self.done, dict(self.done.tallies)
        for name, tally in block.tallies.items():
            whole = tally.merge(sums[name]) if name in sums else tally
            tallies[name] = tallies[name].merge(whole) if name in tallies else whole
        self.done = _Done(
            tallies, done.n_texts + block.n_texts, done.n_tokens + block.n_tokens, done.n_chunked + block.n_chunked
        )

    def _placed(self, text: AnnotatedText, number: int, tallies: dict[str, Tally]) -> list[_Part]:
        """A text's chunks with its links in them; counts what is left out, and what simple rules reach."""
        wanted = [link for link in text.links if self.options.wants(link.relation)]
        text = AnnotatedText(text.text, text.words, tuple(wanted), text.source, text.line, text.left_out)
        tokens = self.model.tokenizer.encode(text.text)
        parts = chunks(
            tokens, number, limit=self.model.info.max_tokens, chunk=self.options.chunk, stride=self.options.stride
        )
        made, left_out = placed(text, parts, tokens, causal=self._causal)
        for relation, reasons in (*left_out.items(), *text.left_out.items()):
            if self.options.wants(relation):
                tallies.setdefault(relation, Tally()).left_out.update(reasons)
        alike, found = like_words(text) if made else [], []
        for one in made:
            cells = []
            by_relation: dict[str, list[Any]] = {}
            for link in one.links:
                by_relation.setdefault(link.link.relation, []).append(link)
            for relation, links in by_relation.items():
                tally = tallies.setdefault(relation, Tally())
                half = tally.deal(rule_hits([link.link for link in links], alike), len(links), self._dealt[relation])
                self._dealt[relation] += 1
                cells.append(_Cell(relation, half, len(links)))
            part = _Part(text, one, tuple(cells))
            for cell in cells:
                shown = self._shown.setdefault(cell.relation, [])
                if cell.half == 1 and len(shown) < self.options.n_examples:
                    shown.append(part)
            found.append(part)
        return found

    def examples(self, found: Sequence[Any]) -> tuple[Any, ...]:
        """Texts of the scored half, with what the best head does on them, of relations that one expresses."""
        from attnscope.studies.relation_examples import example

        made = []
        for relation in sorted(found, key=lambda one: -one.n):
            if relation.best_found or (self.options.only is not None and relation.best is not None):
                for part in self._shown.get(relation.name, ()):
                    shown = example(self.model, relation, part.text, part.placed)
                    made += [] if shown is None else [shown]
        return tuple(made)


class _Observer:
    """Looks at what the heads of a model do on batches of parts."""

    def __init__(self, model: Model) -> None:
        from attnscope.core.wide import Buffers

        self.model = model
        self.room = Room()
        self._buffers = Buffers()
        self._dense = model.info.road == "eager"

    def steps(self, batches: Batches) -> Iterator[list[_CellSums]]:
        """What heads reach on each batch, cell by cell."""
        for batch in batches:
            whole: Sequence[_Part] = batch
            step: list[_CellSums] = []
            for _, found in self.room.each(whole, self._cells, halves, _padded_size):
                step += found
                give_memory_back()
            yield step

    def _cells(self, parts: Sequence[_Part]) -> list[_CellSums]:
        cells = [cell for part in parts for cell in part.cells]
        return list(zip(cells, self._observed(parts, len(cells)), strict=True))

    def _observed(self, parts: Sequence[_Part], n_cells: int) -> NDArray[np.float64]:
        """Hits and mass of a batch's cells, (cell, layer, head, 2); NaN where a layer has fewer heads."""
        import torch

        from attnscope.core.probes import Weights
        from attnscope.core.relations import Links, links_of_weights

        device = "cpu" if self._dense else self.model.info.device
        facts = _facts(parts, device, n_cells)
        given = _batch([part.placed.chunk for part in parts], self.model.info.device)
        with torch.no_grad():
            if self._dense:
                kept = Weights()
                self.model.run(given, kept)
                (maps,) = kept.maps.values()
                by_layer: Mapping[int, LinkSums] = {
                    layer: links_of_weights(weights, facts) for layer, weights in maps.items()
                }
            else:
                probe = Links(facts, self._buffers)
                self.model.run(given, sparing(probe, facts.units.shape[1]))
                (by_layer,) = probe.sums.values()
        n_heads = max(sums.hits.shape[1] for sums in by_layer.values())
        found = np.full((n_cells, len(by_layer), n_heads, 2), np.nan)
        for row, layer in enumerate(sorted(by_layer)):
            for column, part in enumerate((by_layer[layer].hits, by_layer[layer].mass)):
                found[:, row, : part.shape[1], column] = part.cpu().numpy()
        return found


def _padded_size(parts: Sequence[_Part]) -> int:
    return len(parts) * max((len(part.placed.chunk) for part in parts), default=0)


def _summed(found: Sequence[_CellSums]) -> dict[str, Tally]:
    """What heads reach on all cells of each relation; who was dealt to which half is counted elsewhere."""
    cells: dict[tuple[str, int], list[tuple[int, NDArray[np.float64]]]] = {}
    for cell, values in found:
        cells.setdefault((cell.relation, cell.half), []).append((cell.n, values))
    tallies: dict[str, Tally] = {}
    for (relation, half), sums in cells.items():
        tallies.setdefault(relation, Tally()).add(half, sums)
    return tallies


def _batch(batch: Sequence[Chunk], device: str) -> Batch:
    """Token numbers of chunks, padded."""
    import torch

    tokens = [chunk.tokens for chunk in batch]
    ids, segments = padded([t.ids for t in tokens]), padded([t.segments.astype(np.int64) for t in tokens])
    real = padded([np.ones(len(t), np.bool_) for t in tokens])
    mask = None if real.all() else torch.from_numpy(real).to(device)
    return Batch(torch.from_numpy(ids).to(device), mask, torch.from_numpy(segments).to(device))


def _facts(parts: Sequence[_Part], device: str, n_cells: int) -> LinkFacts:
    """The links of a batch as `core.relations` wants them."""
    import torch

    from attnscope.core.relations import LinkFacts

    units = padded([part.placed.unit + 1 for part in parts]) - 1
    row_text: list[int] = []
    pieces: list[tuple[int, int]] = []
    own: list[tuple[int, int]] = []
    targets: list[tuple[int, int]] = []
    link_row: list[int] = []
    link_cell: list[int] = []
    first_cell = 0
    for text, part in enumerate(parts):
        cells = {cell.relation: first_cell + place for place, cell in enumerate(part.cells)}
        first_cell += len(part.cells)
        rows: dict[tuple[int, ...], int] = {}
        for link in part.placed.links:
            row = rows.get(link.own)
            if row is None:
                row = rows[link.own] = len(row_text)
                row_text.append(text)
                pieces += [(row, token) for token in link.tokens]
                own += [(row, unit) for unit in link.own]
            targets += [(len(link_row), unit) for unit in link.targets]
            link_row.append(row)
            link_cell.append(cells[link.link.relation])

    def tensor(rows: Sequence[Any]) -> Any:
        return torch.tensor(rows, dtype=torch.int64, device=device)

    return LinkFacts(
        torch.from_numpy(units).to(device), tensor(row_text), tensor(pieces), tensor(own), tensor(link_row),
        tensor(targets), tensor(link_cell), n_cells,
    )  # fmt: skip


def _share(texts: Iterable[AnnotatedText]) -> float | None:
    if isinstance(texts, AnnotatedCorpus) and texts.n_bytes:
        return min(1.0, texts.bytes_read / texts.n_bytes)
    return None
