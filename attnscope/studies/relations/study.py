"""Which head links X to Y? A model and annotated texts in, the heads that express each relation out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.annotated import AnnotatedCorpus, AnnotatedText
from attnscope.annotated.alignment import UNALIGNED, Placed, placed, placed_pair
from attnscope.annotated.texts import merged
from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus import TOKEN_BUDGET, Problem, batches, chunks, copy_key, runs
from attnscope.errors import AttnscopeError, UsageError, amount
from attnscope.models.model import Model, example_tokens
from attnscope.records import file_of
from attnscope.records.frame.reading import schema_of
from attnscope.records.relations.combined import Combined
from attnscope.records.relations.record import LEAST_MASS, Relation, Relations
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.texts import Report
from attnscope.studies.measuring.head_blocks import decoder_start
from attnscope.studies.relations.evidence import (
    FEWEST_LINKS,
    FEWEST_TEXTS,
    LEVEL,
    MARGIN,
    Cell,
    Lots,
    Tally,
    contact_pairs,
    contact_rule_hits,
    judge,
    mixed_halves,
    rules_of,
)
from attnscope.studies.relations.options import AnnotationOptions, RelationsOptions
from attnscope.studies.relations.sounds import is_spoken, sound_relations
from attnscope.studies.relations.sums import Found, LinkBlock, LinkMeasurer, Piece
from attnscope.studies.running.memory import halving_note
from attnscope.studies.running.passes import Driver, Pass, Task
from attnscope.studies.running.workers import Workers

COPY = "texts that were there before"
MIXED = "texts with a target among others without, or the other way round"
NEAR = "undirected links whose words are too near each other"
TOO_LONG = "texts or targets longer than the model takes"

HAS_REGRESSION = find_spec("sklearn") is not None

BLOCK = 512
"""Most texts that are cut into batches together; long ones are fewer: see `attnscope.corpus.runs`."""


@with_plain_torch
def relations(
    model: Model,
    texts: AnnotatedCorpus | Sequence[AnnotatedText] | str,
    options: RelationsOptions | None = None,
    report: Report | None = None,
    workers: Workers | None = None,
) -> Relations:
    """Measures how well every head of a model expresses every relation of annotated texts.

        model = attnscope.load("minilm")
        links = attnscope.relations(model, "sample_texts/dependencies.conllu")
        links["nsubj→parent"].best, links["nsubj→parent"].accuracy  # (layer, head); of every head
        links.save("relations.npz")

    Attention between tokens becomes attention between words by the rules of Clark et al. 2019 (see `core.relations`).
    For each relation, the texts are split at random into two halves. One half chooses the head, and the other half
    scores it against the best simple rule of that half.

    Memory does not grow with the corpus. It does not grow with the square of a text's length either, unless the model
    only has dense weights. After an interruption (KeyboardInterrupt), the record covers the texts up to the last whole
    block, and says that it is incomplete.

    With `workers`, the model runs in them block by block, and the result is that of one process with as many threads.
    If three workers are lost over a block, `corpus["problems"]` lists it, and the other blocks are in the result.

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
    going = study.run(corpus, report, workers)
    done, complete = going.done, going.complete
    if complete and not going.lost and not any(tally.n for tally in done.tallies.values()):
        raise AttnscopeError(*_nothing(done, options, model))
    described = {
        "sources": list(corpus.sources) if isinstance(corpus, AnnotatedCorpus) else ["texts"],
        "unit": corpus.unit if isinstance(corpus, AnnotatedCorpus) else None,
        "n_texts": done.n_texts,
        "n_tokens": done.n_tokens,
        "n_chunked": done.n_chunked,
        "n_copies": done.n_copies,
        "n_not_finite": len(done.not_finite),
        "sha256": corpus.sha256 if isinstance(corpus, AnnotatedCorpus) else "",
        "problems": [
            *(asdict(problem) for problem in (corpus.problems if isinstance(corpus, AnnotatedCorpus) else ())),
            *going.lost,
            *_not_finite(done, model),
        ],
        "complete": complete,
    }
    chosen = {
        "only": options.only, "chunk": options.chunk, "stride": options.stride, "level": LEVEL, "margin": MARGIN,
        "fewest_links": FEWEST_LINKS, "fewest_texts": FEWEST_TEXTS,
        "least_mass": LEAST_MASS,
    }  # fmt: skip
    found = judge(done.tallies)
    shown = study.examples(found) if options.n_examples else ()
    combined: tuple[Combined, ...] = ()
    if options.combine and complete:
        combined, described["complete"] = _together(model, corpus, options, found, (report, workers))
    halving = [] if done.halved_to is None else [halving_note(done.halved_to)]
    notes = [*_notes(done, found), *going.notes, *halving]
    if options.combine and not HAS_REGRESSION:
        notes.append("No regression over all heads: scikit-learn is not installed.")
    return Relations(run_of(model.info, notes), described, chosen, study.kind, found, shown, combined)


def _require_measurable(model: Model, options: RelationsOptions) -> None:
    """Raises an AttnscopeError before anything is read where nothing could come of it."""
    example = example_tokens(model.tokenizer)
    if not (example.offsets >= 0).any():
        raise AttnscopeError(
            f"the tokenizer of {model.info.name} does not tell which characters its tokens are",
            "relations need a fast tokenizer, with offsets",
        )
    # Chunks that do not fit the model are refused here.
    chunks(example, limit=model.info.max_tokens, chunk=options.chunk, stride=options.stride)


def _nothing(done: Found, options: RelationsOptions, model: Model) -> tuple[str, str]:
    for problem in _not_finite(done, model):
        return f"no link can be measured: {problem['reason']}", "compute with another precision: --dtype float32"
    reasons = Counter[str]()
    for tally in done.tallies.values():
        reasons.update(tally.left_out)
    if reasons:
        reason, n = reasons.most_common(1)[0]
        return (
            f"no link can be measured: {n:,} were left out: {reason}",
            "give a model whose tokens are no longer than the units (of proteins one that reads residues one by one)"
            if reason == UNALIGNED
            else "choose other texts, another --unit, or longer chunks",
        )
    if options.only is not None:
        return f"there is no relation {', '.join(options.only)} in these texts", "leave out --only to see all"
    return "there is no link in these texts", "give texts whose annotation has some"


def _not_finite(done: Found, model: Model) -> list[dict[str, Any]]:
    """Texts that were left out as attention is NaN on them, as one entry among the problems of a corpus."""
    if not done.not_finite:
        return []
    first, n = done.not_finite[0], len({(one.source, one.line) for one in done.not_finite})
    which = amount(n, "text was", "texts, of which this is the first, were")
    reason = f"{which} not studied: attention is not finite (NaN) in layer {first.layer} in {model.info.dtype}"
    return [asdict(Problem(first.source, first.line, reason))]


def _notes(done: Found, found: Sequence[Relation]) -> list[str]:
    said = []
    if done.n_copies:
        many = done.n_copies != 1
        said.append(
            f"{done.n_copies:,} text{'s are copies' if many else ' is a copy'} of others, case and whitespace apart: "
            "of each the first counts, and of those right after it the links that it lacks."
        )
    said += mixed_halves(found)
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


def _together(
    model: Model,
    texts: Iterable[AnnotatedText],
    options: RelationsOptions,
    found: Sequence[Relation],
    passing: tuple[Report | None, Workers | None],
) -> tuple[tuple[Combined, ...], bool]:
    """What heads reach together, and whether all texts were gone through: see `relation_combined`."""
    from attnscope.studies.relations import combined as parts

    def go(tried: Mapping[str, parts.Tried]) -> Pass[Any]:
        # A study anew deals the same lots, and knows the same copies.
        return _Study(model, options).run(
            texts, *passing, partial(parts.TogetherMeasurer, tried=tried), parts.FoundTogether()
        )

    means = parts.to_choose(found)
    chosen = go(means) if means else Pass(parts.FoundTogether())
    tried = parts.to_score(found, chosen.done)
    scored = go(tried) if tried and chosen.complete else Pass(parts.FoundTogether())
    return parts.together(found, chosen.done, tried, scored.done), chosen.complete and scored.complete


class _Study:
    """One model on annotated texts: puts links into their places, and deals them to halves."""

    def __init__(self, model: Model, options: RelationsOptions) -> None:
        self.model, self.options = model, options
        self.kind: str = model.info.kinds[0]
        opening = decoder_start(model)  # what the decoder reads while the encoder alone is studied
        self._start = None if opening is None else opening.take(np.arange(1))
        self._lots: dict[str, Lots] = {}
        self._seen: set[bytes] = set()
        self._shown: dict[tuple[str, str], list[Piece]] = {}

    def run(
        self,
        texts: Iterable[AnnotatedText],
        report: Report | None,
        workers: Workers | None,
        make: Callable[..., Any] = LinkMeasurer,
        nothing: Any = None,
    ) -> Pass[Any]:
        """Goes through all texts; `make` makes what measures them, and `nothing` is what that finds on none."""
        nothing = Found() if nothing is None else nothing
        try:
            each = merged(texts)
            for first in each:
                self.kind = self._kind_for(first)
                driver = Driver(
                    partial(make, kind=self.kind), (self.model,), (workers,) if workers else None, in_order=True
                )
                return driver.run(self._tasks(chain([first], each), texts), nothing, report)
        except KeyboardInterrupt:
            return Pass(nothing, complete=False)
        return Pass(nothing)

    def _kind_for(self, text: AnnotatedText) -> str:
        """The kind of attention that links like a text's are about."""
        info = self.model.info
        if text.target is None:
            return info.kinds[0]
        if "cross" not in info.kinds or self.model.writer is None:
            raise AttnscopeError(
                f"{info.name} has no cross-attention, by which a target would look at its text",
                'texts with a "target" are for encoder-decoders that read text, such as Marian or T5',
            )
        if self.options.chunk is not None or self.options.stride is not None:
            raise AttnscopeError("texts with a target are not cut into chunks", "leave out --chunk and --stride")
        return "cross"

    def _tasks(self, texts: Iterable[AnnotatedText], corpus: Iterable[AnnotatedText]) -> Iterator[Task[LinkBlock]]:
        for number, held in enumerate(runs(texts, BLOCK, lambda text: len(text.text))):
            share = _share(corpus)
            block = self._block(held)
            yield Task(number, block, held[0].source, held[0].line, block.known.n_texts, share)

    def _block(self, texts: Sequence[AnnotatedText]) -> LinkBlock:
        tallies: dict[str, Tally] = {}
        parts: dict[tuple[int, int], Piece] = {}
        n_chunked = n_copies = 0
        for place, text in enumerate(texts):
            found, copies = self._place(text, place, tallies)
            n_copies += copies + text.n_merged
            n_chunked += bool(found) and found[0].placed.chunk.n_chunks > 1
            for part in found:
                parts[place, part.placed.chunk.number] = part
        cut = batches((part.placed.chunk for part in parts.values()), TOKEN_BUDGET)
        # The longest first: what shorter ones need fits into what those have freed.
        made = tuple(tuple(parts[chunk.text, chunk.number] for chunk in batch) for batch in reversed(cut))
        known = Found(
            tallies=tallies, n_texts=sum(1 + text.n_merged for text in texts), n_chunked=n_chunked, n_copies=n_copies,
            n_tokens=sum(len(part.placed.chunk) for part in parts.values()),
        )  # fmt: skip
        return LinkBlock(known, made)

    def _place(self, text: AnnotatedText, number: int, tallies: dict[str, Tally]) -> tuple[list[Piece], int]:
        """A text's chunks with its links in them, and how many chunks were there before; counts what is left out."""
        wanted = tuple(link for link in text.links if self.options.wants(link.relation))
        text = replace(text, links=wanted)
        made, left_out = self._in_tokens(text, number)
        for relation, reasons in (*left_out.items(), *text.left_out.items()):
            if self.options.wants(relation):
                tallies.setdefault(relation, Tally()).left_out.update(reasons)
        # Chunks of one text are in one half, whatever else it belongs to.
        alone = None if not made or made[0].chunk.n_chunks == 1 else f"{text.source}, line {text.line}"
        found, n_copies = [], 0
        for one in made:
            links: dict[str, list[Any]] = {}
            for link in one.links:
                links.setdefault(link.link.relation, []).append(link.link)
            key = copy_key(_written(text, one))
            if key in self._seen:
                n_copies += 1
                for relation, mine in links.items():
                    tallies.setdefault(relation, Tally()).left_out[COPY] += len(mine)
                continue
            self._seen.add(key)
            directed = {relation: mine for relation, mine in links.items() if not mine[0].is_mutual}
            right: dict[str, tuple[int, NDArray[np.int64], NDArray[np.int64] | None]] = {
                name: (len(links[name]), hits, None) for name, hits in rules_of(text, directed).items()
            }
            for relation in [name for name in links if name not in directed]:
                pairs = contact_pairs(one, relation)
                right[relation] = (*contact_rule_hits(one, pairs), pairs)
                if not len(pairs):
                    tallies.setdefault(relation, Tally()).left_out[NEAR] += len(links.pop(relation))
            cells = []
            for relation in links:
                by_source, by_text, first = self._lots.setdefault(relation, Lots()).deal(text.document or alone)
                n, hits, contacts = right[relation]
                cells.append(Cell(relation, (by_source, by_text), n, hits, first, contacts))
            if not cells:
                continue
            part = Piece(text, one, tuple(cells))
            for cell in cells:
                for by, half in zip(("sources", "texts"), cell.halves, strict=True):
                    shown = self._shown.setdefault((cell.relation, by), [])
                    if half == 1 and len(shown) < self.options.n_examples:
                        shown.append(part)
            found.append(part)
        return found, n_copies

    def _in_tokens(self, text: AnnotatedText, number: int) -> tuple[list[Placed], Mapping[str, Mapping[str, int]]]:
        """A text's chunks with the links in their places, and the links that have none, by relation and reason."""
        if (text.target is not None) != (self.kind == "cross"):
            return [], _all_left_out(text, MIXED)
        tokens, limit = self.model.tokenizer.encode(text.text), self.model.info.max_tokens
        if text.target is not None:
            assert self.model.writer is not None
            target = self.model.writer.encode_target(text.target)
            if limit is not None and max(len(tokens), len(target)) > limit:
                return [], _all_left_out(text, TOO_LONG)
            return placed_pair(text, chunks(tokens, number)[0], target)
        parts = chunks(tokens, number, limit=limit, chunk=self.options.chunk, stride=self.options.stride)
        made, left_out = placed(text, parts, tokens, causal=self.kind == "decoder")
        return [replace(one, target=self._start) for one in made], left_out

    def examples(self, found: Sequence[Any]) -> tuple[Any, ...]:
        """Texts of the scored half, with what the best head does on them, of relations that one expresses."""
        from attnscope.studies.relations.examples import example

        made = []
        for relation in sorted(found, key=lambda one: -one.n):
            if relation.best_found or (self.options.only is not None and relation.best is not None):
                for part in self._shown.get((relation.name, relation.halves), ()):
                    shown = example(self.model, self.kind, relation, part.text, part.placed)
                    made += [] if shown is None else [shown]
        return tuple(made)


def _all_left_out(text: AnnotatedText, reason: str) -> dict[str, dict[str, int]]:
    return {relation: {reason: n} for relation, n in Counter(link.relation for link in text.links).items()}


def _written(text: AnnotatedText, part: Placed) -> str:
    """The characters of a chunk, and its target's."""
    offsets = part.chunk.tokens.offsets
    real = offsets[(offsets >= 0).all(1) & ~part.chunk.tokens.special]
    whole = part.chunk.n_chunks == 1 or not len(real)
    written = text.text if whole else text.text[int(real.min()) : int(real.max())]
    return written if text.target is None else f"{written}\n{text.target}"


def _share(texts: Iterable[AnnotatedText]) -> float | None:
    if isinstance(texts, AnnotatedCorpus) and texts.n_bytes:
        return min(1.0, texts.bytes_read / texts.n_bytes)
    return None


# From files ------------------------------------------------------------------------------------------------------


def study_files(
    spec: str,
    files: Sequence[str],
    annotation: AnnotationOptions,
    options: RelationsOptions,
    loading: LoadOptions,
    report: Report | None,
    workers: Workers | None = None,
) -> Relations:
    """Loads a model, and studies the relations of annotated files, or of recordings with their words.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    if is_spoken(files):
        if options != RelationsOptions():
            raise UsageError("of recordings one relation is asked", "leave out --only, --chunk, --examples, --combine")
        return sound_relations(loading.load(spec), files, report)
    corpus = _corpus(files, annotation)
    return relations(loading.load(spec), corpus, options, report, workers)


def open_relations(file: Path) -> Relations | AnnotatedCorpus:
    """The record of relations in a file, or the annotated texts to study, before the model runs for minutes.

    Raises:
        AttnscopeError: The file is not there, or its name does not tell how it is annotated.
    """
    if not file.exists():
        raise AttnscopeError(f"there is no file {file}", "give annotated texts, or a relations.npz")
    file = file_of(file)
    if schema_of(file) == Relations.SCHEMA:
        return Relations.read(file)
    return _corpus([str(file)], AnnotationOptions())


def _corpus(files: Sequence[str], annotation: AnnotationOptions) -> AnnotatedCorpus:
    try:
        return AnnotatedCorpus(files, kind=annotation.kind, unit=annotation.unit)
    except AttnscopeError as error:
        raise UsageError(error.message, error.hint) from None
