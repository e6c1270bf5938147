"""Which head links X to Y? A model and annotated texts in, the heads that express each relation out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from attnscope.annotated import AnnotatedCorpus, AnnotatedText, Link
from attnscope.annotated.alignment import UNALIGNED, Placed, place_links, place_target_links
from attnscope.annotated.texts import merge_equal
from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus import TOKEN_BUDGET, batches, chunks, copy_key, runs
from attnscope.errors import AttnscopeError, UsageError, amount
from attnscope.models.model import Model, example_tokens
from attnscope.questions.relations import AnnotationOptions, Relations, RelationsOptions
from attnscope.results.table import Table
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.texts import Report
from attnscope.studies.measuring.head_blocks import decoder_start
from attnscope.studies.relations.evidence import (
    THRESHOLDS,
    Cell,
    Lots,
    judge,
    rules_of,
)
from attnscope.studies.relations.links import LinkBlock, LinkMeasurer, LinkPart, LinkText, Piece
from attnscope.studies.run import Run, run_blocks
from attnscope.studies.workers import Workers

COPY = "texts that were there before"
MIXED = "texts with a target among others without, or the other way round"
TOO_LONG = "texts or targets longer than the model takes"

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

    Attention between tokens becomes attention between words by the rules of Clark et al. 2019 (see
    `core.relations`). For each relation, the texts are split at random into two halves. One half chooses the
    head, and the other half scores it against the best simple rule of that half.

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
    tables, grids = judge(done.tallies, study.kind)
    done.left_out.require_some_left(done.n_texts, model.info)
    if complete and not going.lost and not len(tables["relations"]):
        raise AttnscopeError(*_explain_nothing(done, options))
    files = corpus if isinstance(corpus, AnnotatedCorpus) else None
    problems = [] if files is None else [asdict(problem) for problem in files.problems]
    corpus_facts = {
        "sources": ["texts"] if files is None else list(files.sources),
        "unit": None if files is None else files.unit,
        "n_texts": done.n_texts,
        "n_tokens": done.n_tokens,
        "n_chunked": done.n_chunked,
        "n_copies": done.n_copies,
        "n_not_finite": done.left_out.n,
        "sha256": "" if files is None else files.sha256,
        "problems": [*problems, *going.problems(model.info)],
        "complete": complete,
    }
    option_facts = {"only": options.only, "chunk": options.chunk, "stride": options.stride, **THRESHOLDS}
    about = run_of(model.info, [*_notes(done, note_mixed_halves(tables["relations"])), *going.notes])
    if going.failures:
        about["failures"] = going.failures
    result = Relations(about, corpus_facts, option_facts, tables, grids)
    return replace(result, tables={**tables, **study.examples(result)}) if options.n_examples else result


def _require_measurable(model: Model, options: RelationsOptions) -> None:
    """Raises an AttnscopeError before any text is read if the model or the options cannot work."""
    example = example_tokens(model.tokenizer)
    if not (example.offsets >= 0).any():
        raise AttnscopeError(
            f"the tokenizer of {model.info.name} does not tell which characters its tokens are",
            "relations need a fast tokenizer, with offsets",
        )
    # Chunks that do not fit the model are refused here.
    chunks(example, limit=model.info.max_tokens, chunk=options.chunk, stride=options.stride)


def _explain_nothing(done: LinkPart, options: RelationsOptions) -> tuple[str, str]:
    """Why no link was measured, and what would help."""
    reasons = Counter[str]()
    for tally in done.tallies.values():
        reasons.update(tally.left_out)
    if reasons:
        reason, n = reasons.most_common(1)[0]
        return (
            f"no link can be measured: {n:,} were left out: {reason}",
            "give a model whose tokens are no longer than the units (of proteins one that reads residues one by one)"
            if reason == UNALIGNED
            else "choose other texts, another --split, or longer chunks",
        )
    if options.only is not None:
        return f"there is no relation {', '.join(options.only)} in these texts", "leave out --only to see all"
    return "there is no link in these texts", "give texts whose annotation has some"


def _notes(done: LinkPart, mixed: Sequence[str]) -> list[str]:
    notes = []
    if done.n_copies:
        notes.append(
            f"{amount(done.n_copies, 'text is a copy', 'texts are copies')} of others, case and whitespace apart: "
            "of each the first counts, and of those right after it the links that it lacks."
        )
    notes += mixed
    reasons: dict[str, Counter[str]] = {}
    for name, tally in done.tallies.items():
        for reason, n in tally.left_out.items():
            reasons.setdefault(reason, Counter())[name] += n
    for reason, by_relation in reasons.items():
        most = ", ".join(f"{name} {n}" for name, n in by_relation.most_common(3))
        more = " …" if len(by_relation) > 3 else ""
        notes.append(f"Left out, {reason}: {by_relation.total():,} links ({most}{more}).")
    if done.n_chunked:
        notes.append(
            f"{amount(done.n_chunked, 'text was', 'texts were')} longer than the model takes, and cut into chunks; "
            "each chunk counts as a text."
        )
    return notes


def note_mixed_halves(relations: Table) -> list[str]:
    """Return a note where too few sources let texts of one source into both halves; else nothing."""
    is_mixed = (relations["halves"] == "texts") & (relations["no_verdict"] == "")
    mixed = relations["relation"][is_mixed].tolist()
    if not mixed:
        return []
    named = ", ".join(mixed[:3]) + (" …" if len(mixed) > 3 else "")
    return [
        f"Too few sources to keep each in one half (for {amount(len(mixed), 'relation')}: {named}): "
        "texts or chunks of one source are in both halves, and the result holds for these sources alone."
    ]


class _Study:
    """One model on annotated texts: aligns links with tokens, and deals texts to halves."""

    def __init__(self, model: Model, options: RelationsOptions) -> None:
        self.model, self.options = model, options
        self.kind: str = model.info.kinds[0]
        opening = decoder_start(model)  # what the decoder reads while the encoder alone is studied
        self._start = None if opening is None else opening.take(np.arange(1))
        self._lots: defaultdict[str, Lots] = defaultdict(Lots)
        self._seen: set[bytes] = set()
        self._examples: defaultdict[tuple[str, str], list[Piece]] = defaultdict(list)

    def run(self, texts: Iterable[AnnotatedText], report: Report | None, workers: Workers | None) -> Run[LinkPart]:
        """Read and measure all texts."""
        try:
            each = merge_equal(texts)
            first = next(each, None)
            if first is None:
                return Run(LinkPart())
            self.kind = self._kind_for(first)
            make = partial(LinkMeasurer, kind=self.kind)
            texts_by_block = runs(chain([first], each), BLOCK, lambda text: len(text.text))
            cut = (self._block(block_texts) for block_texts in texts_by_block)
            sharing = (workers,) if workers else None
            share = partial(_share_read, texts)
            return run_blocks(make, (self.model,), cut, LinkPart(), workers=sharing, report=report, share=share)
        except KeyboardInterrupt:
            return Run(LinkPart(), complete=False)

    def _kind_for(self, text: AnnotatedText) -> str:
        """The kind of attention that the links of a text like this one are about."""
        info = self.model.info
        if text.target is None:
            return info.kinds[0]
        if "cross" not in info.kinds or self.model.writer is None:
            raise AttnscopeError(
                f"{info.name} has no cross-attention, by which a target would look at its text",
                'texts with a "target" are for encoder-decoders that read text, such as Marian or T5',
            )
        if self.options.chunk is not None or self.options.stride is not None:
            raise AttnscopeError("texts with a target are not cut into chunks", "leave out --chunk")
        return "cross"

    def _block(self, texts: Sequence[AnnotatedText]) -> LinkBlock:
        linked = tuple(self._link(text, number) for number, text in enumerate(texts))
        pieces = {(text.index, piece.placed.chunk.number): piece for text in linked for piece in text.pieces}
        cut = batches((piece.placed.chunk for piece in pieces.values()), TOKEN_BUDGET)
        # The longest first: what shorter ones need fits into what those have freed.
        return LinkBlock(
            linked, tuple(tuple(pieces[chunk.text, chunk.number] for chunk in batch) for batch in reversed(cut))
        )

    def _link(self, text: AnnotatedText, number: int) -> LinkText:
        """Align the links of a text with its chunks, and deal these to halves."""
        text = replace(text, links=tuple(link for link in text.links if self._wants(link.relation)))
        parts, left_out = self._align(text, number)
        unmeasured: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for relation, reasons in (*left_out.items(), *text.left_out.items()):
            if self._wants(relation):
                unmeasured[relation].update(reasons)
        # Chunks of one text are in one half, whatever else it belongs to.
        alone = None if not parts or parts[0].chunk.n_chunks == 1 else f"{text.source}, line {text.line}"
        pieces, n_copies = [], 0
        for part in parts:
            links: defaultdict[str, list[Link]] = defaultdict(list)
            for link in part.links:
                links[link.link.relation].append(link.link)
            key = copy_key(_characters_of(text, part))
            if key in self._seen:
                n_copies += 1
                for relation, copied in links.items():
                    unmeasured[relation][COPY] += len(copied)
                continue
            self._seen.add(key)
            rule_hits = rules_of(text, links)
            cells = []
            for relation, group in links.items():
                by_source, by_text, first = self._lots[relation].deal(text.document or alone)
                cells.append(Cell(relation, (by_source, by_text), len(group), rule_hits[relation], first))
            piece = Piece(text, part, tuple(cells))
            for cell in cells:
                for by, half in zip(("sources", "texts"), cell.halves, strict=True):
                    examples = self._examples[cell.relation, by]
                    if half == 1 and len(examples) < self.options.n_examples:
                        examples.append(piece)
            pieces.append(piece)
        return LinkText(
            number, text.source, text.line, 1 + text.n_merged, n_copies + text.n_merged, tuple(pieces), unmeasured
        )

    def _wants(self, relation: str) -> bool:
        """Whether a relation is studied: by its whole name, or by a label in it."""
        only, labels = self.options.only, set(relation.split("→")) - {"parent"}
        return only is None or any(name == relation or name in labels for name in only)

    def _align(self, text: AnnotatedText, number: int) -> tuple[list[Placed], Mapping[str, Mapping[str, int]]]:
        """A text's chunks with their links in tokens, and the links that have none, by relation and reason."""
        if (text.target is not None) != (self.kind == "cross"):
            return [], _leave_out_all(text, MIXED)
        tokens, limit = self.model.tokenizer.encode(text.text), self.model.info.max_tokens
        if text.target is not None:
            assert self.model.writer is not None
            target = self.model.writer.encode_target(text.target)
            if limit is not None and max(len(tokens), len(target)) > limit:
                return [], _leave_out_all(text, TOO_LONG)
            return place_target_links(text, chunks(tokens, number)[0], target)
        parts = chunks(tokens, number, limit=limit, chunk=self.options.chunk, stride=self.options.stride)
        aligned, left_out = place_links(text, parts, tokens, causal=self.kind == "decoder")
        return [replace(part, target=self._start) for part in aligned], left_out

    def examples(self, result: Relations) -> dict[str, Table]:
        """Return texts of the scored half with what the best head does on them, for relations that a head expresses."""
        from attnscope.studies.relations.examples import example_of

        relations, heads = result.table("relations"), result.table("heads")
        examples: list[dict[str, Any]] = []
        links: list[dict[str, Any]] = []
        for row in range(len(relations)):
            best = int(relations["best"][row])
            if best < 0 or not (result["found"][row, best] or self.options.only is not None):
                continue
            place = int(heads["layer"][best]), int(heads["head"][best])
            name = str(relations["relation"][row])
            for piece in self._examples[name, str(relations["halves"][row])]:
                made = example_of(self.model, self.kind, name, place, piece.text, piece.placed)
                if made is not None:
                    links += [{**link, "example": len(examples)} for link in made[1]]
                    examples.append({**made[0], "relation": row})
        rows = {"examples": examples, "links": links}
        return {name: Table.of(Relations.TABLES[name], cells) for name, cells in rows.items()}


def _leave_out_all(text: AnnotatedText, reason: str) -> dict[str, dict[str, int]]:
    return {relation: {reason: n} for relation, n in Counter(link.relation for link in text.links).items()}


def _characters_of(text: AnnotatedText, part: Placed) -> str:
    """The characters of a chunk, and its target's."""
    offsets = part.chunk.tokens.offsets
    real = offsets[(offsets >= 0).all(1) & ~part.chunk.tokens.special]
    whole = part.chunk.n_chunks == 1 or not len(real)
    written = text.text if whole else text.text[int(real.min()) : int(real.max())]
    return written if text.target is None else f"{written}\n{text.target}"


def _share_read(texts: Iterable[AnnotatedText], _: LinkBlock) -> float | None:
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
    """Loads a model, and studies the relations of annotated files."""
    return relations(loading.load(spec), _open_corpus(files, annotation), options, report, workers)


def _open_corpus(files: Sequence[str], annotation: AnnotationOptions) -> AnnotatedCorpus:
    try:
        return AnnotatedCorpus(files, kind=annotation.kind, unit=annotation.unit)
    except AttnscopeError as error:
        raise UsageError(error.message, error.hint) from None
