"""Find the heads that express each relation of annotated texts: `attnscope relations` and `attnscope.relations`.

A relation is a kind of link between words, such as from a subject to its verb. `links` measures how much attention
follows the links, and `evidence` judges the heads. Relations between words and sound are in `sounds`.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from attnscope.annotated import AnnotatedCorpus, AnnotatedText
from attnscope.annotated.alignment import UNALIGNED
from attnscope.annotated.texts import merge_equal
from attnscope.core.plain_torch import with_default_torch
from attnscope.corpus import chunks, runs
from attnscope.errors import AttnscopeError, amount
from attnscope.models.model import Model, example_tokens
from attnscope.questions.relations import Relations, RelationsOptions
from attnscope.results.table import Table
from attnscope.studies.inputs.texts import ReportProgress, share_read
from attnscope.studies.relations.evidence import THRESHOLDS, judge
from attnscope.studies.relations.links import Linker, LinkMeasurer, MeasuredPart, shape_of
from attnscope.studies.run import CorpusRun, run_blocks
from attnscope.studies.workers import Workers

BLOCK = 512
"""The most texts of a block; of long texts it has fewer, see `attnscope.corpus.runs`."""


@with_default_torch
def relations(
    model: Model,
    texts: AnnotatedCorpus | Sequence[AnnotatedText] | str,
    options: RelationsOptions | None = None,
    report: ReportProgress | None = None,
    workers: Workers | None = None,
) -> Relations:
    """Measure how well every head of a model expresses every relation of annotated texts.

        model = attnscope.load("minilm")
        links = attnscope.relations(model, "sample_texts/dependencies.conllu")
        links["accuracy"][links.row("nsubj→parent")]  # of every head
        links.save("relations.npz")

    Attention between tokens becomes attention between words by the rules of Clark et al. 2019 (see
    `core.relations`). For each relation, the texts are split at random into two halves. The head that is most accurate
    on one half is scored on the other half, against the simple rule that is best there.

    Memory does not grow with the corpus. It does not grow with the square of a text's length either, unless the model
    only has dense weights. After an interruption (KeyboardInterrupt), the record covers the texts up to the last whole
    block, and says that it is incomplete.

    With `workers`, the model runs in them block by block, and the result is that of one process with as many threads as
    a worker has. A block over which three workers die is listed in `corpus["problems"]`, and left out of the result.

    Args:
        model: A loaded model, see `attnscope.load`.
        texts: Annotated texts: an AnnotatedCorpus, a list, or the name of a file.
        options: Which relations are measured, and how long texts are cut; None = the defaults.
        report: Called after each batch; with workers after each block.
        workers: Processes that load the model by its name and run it; None = it runs in this process.

    Raises:
        AttnscopeError: There is no link that can be measured, the model does not suit, or no worker can begin.
    """
    options = options or RelationsOptions()
    corpus: Any = AnnotatedCorpus(texts) if isinstance(texts, str) else texts
    # Equal texts that follow each other become one text with all their links.
    merged_texts = merge_equal(corpus)
    first = next(merged_texts, None)
    if first is None:
        raise AttnscopeError("there is no text", "give texts whose annotation has links")
    kind = _kind_for(first, model, options)

    # Links are aligned with tokens in this process; the model runs here or in workers.
    linker = Linker(model, options, kind)
    blocks = runs(chain([first], merged_texts), BLOCK, lambda text: len(text.text))
    link_run = run_blocks(
        partial(LinkMeasurer, kind=kind),
        (model,),
        map(linker.block, blocks),
        MeasuredPart(),
        workers=(workers,) if workers else None,
        report=report,
        share=lambda _: share_read(corpus),
    )
    done = link_run.done
    recorded_options = {
        "only": options.only,
        "chunk": options.chunk,
        "stride": options.stride,
        **THRESHOLDS,
    }
    facts = {"unit": getattr(corpus, "unit", None)}
    result = conclude(model, kind, link_run, corpus, facts, recorded_options, _notes(done))
    if link_run.complete and not link_run.lost and not result.tables:
        raise _nothing_measured(done, options)
    return result


def conclude(
    model: Model,
    kind: str,
    link_run: CorpusRun[Any],
    texts: Any,
    facts: Mapping[str, Any],
    options: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> Relations:
    """Judge the heads by the sums over all texts, and return the result.

    Args:
        model: The model.
        kind: The kind of attention.
        link_run: The run over the texts, whose sums are a `LinkPart`.
        texts: The corpus.
        facts: Further entries for the `corpus` of the result.
        options: The `options` of the result.
        notes: The first notes of the result, such as on links that were left out.

    Raises:
        AttnscopeError: The model computes NaN or infinity on all texts.
    """
    done = link_run.done
    done.left_out.require_some_left(done.n_texts, model.info)
    tables, grids = judge(done, kind, shape_of(model, kind))
    corpus = {
        **link_run.corpus(texts, model.info),
        **facts,
        "n_copies": done.n_copies,
        "n_not_finite": done.left_out.n,
    }
    # `split` says how plain text was split into texts. Annotated texts have a `unit` in its place.
    del corpus["split"]
    about = link_run.about(model.info, [*notes, *_note_mixed_halves(tables)])
    return Relations(about, corpus, dict(options), tables, grids)


def _kind_for(text: AnnotatedText, model: Model, options: RelationsOptions) -> str:
    """Return the kind of attention to measure links in: "cross" if the texts have targets, else that of the text.

    Args:
        text: The first text; all others are taken to be like it.
        model: The model.
        options: The options of the study.

    Raises:
        AttnscopeError: The model or the options do not suit such texts.
    """
    info = model.info
    example = example_tokens(model.tokenizer)
    if not (example.offsets >= 0).any():
        raise AttnscopeError(
            f"the tokenizer of {info.name} does not tell which characters its tokens are",
            "relations need a fast tokenizer, with offsets",
        )
    if text.target is None:
        # This refuses chunks that are longer than the model takes.
        chunks(example, limit=info.max_tokens, chunk=options.chunk, stride=options.stride)
        return info.kinds[0]
    if "cross" not in info.kinds or model.text_generator is None:
        raise AttnscopeError(
            f"{info.name} has no cross-attention, by which a target would look at its text",
            'texts with a "target" are for encoder-decoders that read text, such as Marian or T5',
        )
    if options.chunk is not None or options.stride is not None:
        raise AttnscopeError("texts with a target are not cut into chunks", "leave out --chunk")
    return "cross"


# Errors and notes


def _nothing_measured(done: MeasuredPart, options: RelationsOptions) -> AttnscopeError:
    """Return the error that says why no link was measured, and what would help."""
    # How many links were left out for each reason, over all relations.
    reasons: Counter[str] = Counter()
    for (_, reason), n in done.unmeasured.items():
        reasons[reason] += n
    if reasons:
        reason, n = reasons.most_common(1)[0]
        hint = "choose other texts, another --split, or longer chunks"
        if reason == UNALIGNED:
            hint = "give a model whose tokens are no longer than the units (of proteins one that reads single residues)"
        return AttnscopeError(f"no link can be measured: {n:,} were left out: {reason}", hint)
    if options.only is not None:
        return AttnscopeError(
            f"there is no relation {', '.join(options.only)} in these texts",
            "leave out --only to see all",
        )
    return AttnscopeError("there is no link in these texts", "give texts whose annotation has some")


def _notes(done: MeasuredPart) -> list[str]:
    """Return notes on copies of texts, links that were left out, and texts that were cut into chunks."""
    notes = []
    if done.n_copies:
        notes.append(
            f"{amount(done.n_copies, 'text is a copy', 'texts are copies')} of others, case and whitespace apart: "
            "of each the first counts, and of those right after it the links that it lacks."
        )
    # For each reason, name the three relations that lost most links by it.
    by_reason: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for (name, reason), n in done.unmeasured.items():
        by_reason[reason][name] += n
    for reason, by_relation in by_reason.items():
        named = ", ".join(f"{name} {n}" for name, n in by_relation.most_common(3))
        if len(by_relation) > 3:
            named += " …"
        notes.append(f"Left out, {reason}: {by_relation.total():,} links ({named}).")
    if done.n_chunked:
        notes.append(
            f"{amount(done.n_chunked, 'text was', 'texts were')} longer than the model takes, and cut into chunks; "
            "each chunk counts as a text."
        )
    return notes


def _note_mixed_halves(tables: dict[str, Table]) -> list[str]:
    """Return a note that names the relations with a verdict whose halves share sources, if there are any."""
    if not tables:
        return []
    table = tables["relations"]
    # Halves are made of whole sources, or text by text ("texts") where there are too few sources.
    is_mixed = (table["halves"] == "texts") & (table["no_verdict"] == "")
    mixed = table["relation"][is_mixed].tolist()
    if not mixed:
        return []
    named = ", ".join(mixed[:3])
    if len(mixed) > 3:
        named += " …"
    return [
        f"Too few sources to keep each in one half (for {amount(len(mixed), 'relation')}: {named}): "
        "texts or chunks of one source are in both halves, and the result holds for these sources alone."
    ]
