"""Find the heads that express each relation of annotated texts: `attnscope relations` and `attnscope.relations`.

`links` measures the heads, and `evidence` judges them. For recordings see `sounds`.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from attnscope.annotated import AnnotatedCorpus, AnnotatedText
from attnscope.annotated.alignment import UNALIGNED
from attnscope.annotated.texts import merge_equal
from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus import chunks, runs
from attnscope.errors import AttnscopeError, amount
from attnscope.models.model import Model, example_tokens
from attnscope.questions.relations import Relations, RelationsOptions
from attnscope.results.table import Table
from attnscope.studies.inputs.texts import Report, share_read
from attnscope.studies.relations.evidence import THRESHOLDS, judge
from attnscope.studies.relations.links import Linker, LinkMeasurer, MeasuredPart, shape_of
from attnscope.studies.run import Run, run_blocks
from attnscope.studies.workers import Workers

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
    """Measure how well every head of a model expresses every relation of annotated texts.

        model = attnscope.load("minilm")
        links = attnscope.relations(model, "sample_texts/dependencies.conllu")
        links["accuracy"][links.row("nsubj→parent")]  # of every head
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
    corpus: Any = AnnotatedCorpus(texts) if isinstance(texts, str) else texts
    each = merge_equal(corpus)
    first = next(each, None)
    if first is None:
        raise AttnscopeError("there is no text", "give texts whose annotation has links")
    kind = _kind_for(first, model, options)

    # Links are aligned in this process; the model runs here or in workers.
    linker = Linker(model, options, kind)
    cut = runs(chain([first], each), BLOCK, lambda text: len(text.text))
    going = run_blocks(
        partial(LinkMeasurer, kind=kind),
        (model,),
        map(linker.block, cut),
        MeasuredPart(),
        workers=(workers,) if workers else None,
        report=report,
        share=lambda _: share_read(corpus),
    )
    # Judge what was added up.
    facts = {"unit": getattr(corpus, "unit", None)}
    asked = {
        "only": options.only,
        "chunk": options.chunk,
        "stride": options.stride,
        **THRESHOLDS,
    }
    notes = _notes(going.done)
    result = conclude(model, kind, going, corpus, facts, asked, notes)
    if going.complete and not going.lost and not result.tables:
        raise AttnscopeError(*_explain_nothing(going.done, options))
    return result


def conclude(
    model: Model,
    kind: str,
    going: Run[Any],
    texts: Any,
    facts: Mapping[str, Any],
    options: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> Relations:
    """Judge what was added up over texts, and return the result.

    Args:
        model: The model.
        kind: The kind of attention.
        going: The sums over the texts, a `LinkPart`, and how they were gone over.
        texts: The corpus.
        facts: What else the result says of it.
        options: What was asked for.
        notes: What few need to know.

    Raises:
        AttnscopeError: The model computes NaN or infinity on all texts.
    """
    done = going.done
    done.left_out.require_some_left(done.n_texts, model.info)
    tables, grids = judge(done, kind, shape_of(model, kind))
    corpus = {**going.corpus(texts, model.info), **facts}
    corpus |= {"n_copies": done.n_copies, "n_not_finite": done.left_out.n}
    del corpus["split"]  # annotated texts have a unit
    about = going.about(model.info, [*notes, *_note_mixed_halves(tables)])
    return Relations(about, corpus, dict(options), tables, grids)


def _kind_for(text: AnnotatedText, model: Model, options: RelationsOptions) -> str:
    """Return the kind of attention that the links of a text like this one are about.

    Raises:
        AttnscopeError: The model or the options do not suit it.
    """
    info = model.info
    example = example_tokens(model.tokenizer)
    if not (example.offsets >= 0).any():
        raise AttnscopeError(
            f"the tokenizer of {info.name} does not tell which characters its tokens are",
            "relations need a fast tokenizer, with offsets",
        )
    if text.target is None:
        # Chunks that do not fit the model are refused here.
        chunks(example, limit=info.max_tokens, chunk=options.chunk, stride=options.stride)
        return info.kinds[0]
    if "cross" not in info.kinds or model.writer is None:
        raise AttnscopeError(
            f"{info.name} has no cross-attention, by which a target would look at its text",
            'texts with a "target" are for encoder-decoders that read text, such as Marian or T5',
        )
    if options.chunk is not None or options.stride is not None:
        raise AttnscopeError("texts with a target are not cut into chunks", "leave out --chunk")
    return "cross"


# What is said


def _explain_nothing(done: MeasuredPart, options: RelationsOptions) -> tuple[str, str]:
    """Say why no link was measured, and what would help."""
    # How many links each reason left out, over all relations.
    reasons: Counter[str] = Counter()
    for (_, reason), n in done.unmeasured.items():
        reasons[reason] += n
    if reasons:
        reason, n = reasons.most_common(1)[0]
        hint = "choose other texts, another --split, or longer chunks"
        if reason == UNALIGNED:
            hint = "give a model whose tokens are no longer than the units (of proteins one that reads single residues)"
        return f"no link can be measured: {n:,} were left out: {reason}", hint
    if options.only is not None:
        return (
            f"there is no relation {', '.join(options.only)} in these texts",
            "leave out --only to see all",
        )
    return "there is no link in these texts", "give texts whose annotation has some"


def _notes(done: MeasuredPart) -> list[str]:
    """Say what was not measured as it was given."""
    notes = []
    if done.n_copies:
        notes.append(
            f"{amount(done.n_copies, 'text is a copy', 'texts are copies')} of others, case and whitespace apart: "
            "of each the first counts, and of those right after it the links that it lacks."
        )
    # Links that were left out: of each reason the relations that lost most.
    by_reason: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for (name, reason), n in done.unmeasured.items():
        by_reason[reason][name] += n
    for reason, by_relation in by_reason.items():
        most = ", ".join(f"{name} {n}" for name, n in by_relation.most_common(3))
        more = " …" if len(by_relation) > 3 else ""
        notes.append(f"Left out, {reason}: {by_relation.total():,} links ({most}{more}).")
    if done.n_chunked:
        notes.append(
            f"{amount(done.n_chunked, 'text was', 'texts were')} longer than the model takes, and cut into chunks; "
            "each chunk counts as a text."
        )
    return notes


def _note_mixed_halves(tables: dict[str, Table]) -> list[str]:
    """Say which relations with a verdict have texts of one source in both halves."""
    if not tables:
        return []
    table = tables["relations"]
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
