"""Find the heads that express each relation of annotated texts: `attnscope relations` and `attnscope.relations`.

A relation is a kind of link between words, such as from a subject to its verb. The module `links` measures how much
attention follows the links, and `evidence` decides which heads express a relation. Relations between words and sound
are in `sounds`.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from attnscope.annotated import AnnotatedCorpus, AnnotatedText
from attnscope.annotated.alignment import UNALIGNED
from attnscope.annotated.texts import merge_equal_texts
from attnscope.core.plain_torch import with_default_torch
from attnscope.corpus import chunks, cut_into_runs
from attnscope.errors import AttnscopeError, amount
from attnscope.models.model import Model, example_tokens
from attnscope.questions.relations import Relations, RelationsOptions
from attnscope.results.table import Table
from attnscope.studies.inputs.texts import ReportProgress, share_read
from attnscope.studies.relations.evidence import THRESHOLDS, judge
from attnscope.studies.relations.links import Linker, LinkMeasurer, MeasuredPart, head_grid_shape
from attnscope.studies.run import CorpusRun, run_blocks
from attnscope.studies.workers import Workers

BLOCK = 512
"""The most texts of a block. Blocks of long texts are cut earlier, by `attnscope.corpus.cut_into_runs`."""


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

    Memory does not grow with the corpus. It grows with the square of a text's length only if the model's attention can
    be read in no other form than dense weights. After an interruption (KeyboardInterrupt), the result covers the texts
    up to the last whole block, and says that it is incomplete.

    With `workers`, the model runs in other processes, block by block. The result equals that of one process with as
    many threads as a worker has. If three workers die over a block, the block is left out of the result and listed in
    `corpus["problems"]`.

    Args:
        model: A loaded model, see `attnscope.load`.
        texts: Annotated texts: an AnnotatedCorpus, a list, or the name of a file.
        options: Which relations are measured, and how long texts are cut; None = the defaults.
        report: Called after each batch; with workers after each block.
        workers: Processes that load the model by its name and run it; None = the model runs in this process.

    Raises:
        AttnscopeError: No link can be measured, the model does not suit the texts, or no worker can start.
    """
    options = options or RelationsOptions()
    corpus: Any = AnnotatedCorpus(texts) if isinstance(texts, str) else texts
    # Equal texts that follow each other become one text with all their links. Texts are read one by one, as needed.
    merged_texts = merge_equal_texts(corpus)
    first_text = next(merged_texts, None)
    if first_text is None:
        raise AttnscopeError("there is no text", "give texts whose annotation has links")
    kind = _choose_kind(first_text, model, options)

    # Links are aligned with tokens in this process; the model runs here or in workers.
    linker = Linker(model, options, kind)
    blocks = cut_into_runs(chain([first_text], merged_texts), BLOCK, lambda text: len(text.text))
    corpus_run = run_blocks(
        partial(LinkMeasurer, kind=kind),
        (model,),
        map(linker.make_block, blocks),
        MeasuredPart(),
        workers=(workers,) if workers else None,
        report=report,
        get_share=lambda _: share_read(corpus),
    )
    sums = corpus_run.done
    recorded_options = {
        "only": options.only,
        "chunk": options.chunk,
        "stride": options.stride,
        **THRESHOLDS,
    }
    # What a text is, such as "sentence". A list of texts has no such attribute.
    corpus_facts = {"unit": getattr(corpus, "unit", None)}
    result = build_result(
        model, kind, corpus_run, corpus, corpus_facts, recorded_options, _make_notes(sums)
    )
    # An interrupted run, or one that lost blocks, may lack tables only because the links come later.
    if corpus_run.complete and not corpus_run.lost and not result.tables:
        raise _make_no_link_error(sums, options)
    return result


def build_result(
    model: Model,
    kind: str,
    corpus_run: CorpusRun[Any],
    texts: Any,
    corpus_facts: Mapping[str, Any],
    options: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> Relations:
    """Judge the heads by the sums over all texts, and return the result. `sounds` ends with it too.

    Args:
        model: The model.
        kind: The kind of attention.
        corpus_run: The run over the texts. Its sums, `done`, are a `MeasuredPart`.
        texts: The corpus.
        corpus_facts: Further entries for the `corpus` of the result.
        options: The `options` of the result.
        notes: The first notes of the result, such as on links that were left out.

    Raises:
        AttnscopeError: The model computes NaN or infinity on all texts.
    """
    sums = corpus_run.done
    # `left_out` holds the texts on which the model computes NaN or infinity. Refuse if no other text is left.
    sums.left_out.require_some_left(sums.n_texts, model.info)
    tables, grids = judge(sums, kind, head_grid_shape(model, kind))
    corpus = {
        **corpus_run.corpus(texts, model.info),
        **corpus_facts,
        "n_copies": sums.n_copies,
        "n_not_finite": sums.left_out.n,
    }
    # `split` says how plain text was split into texts. For annotated texts, `unit` says what a text is.
    del corpus["split"]
    run_facts = corpus_run.describe_run(model.info, [*notes, *_note_mixed_halves(tables)])
    return Relations(run_facts, corpus, dict(options), tables, grids)


def _choose_kind(text: AnnotatedText, model: Model, options: RelationsOptions) -> str:
    """Return the kind of attention in which links are measured.

    It is "cross" if texts have targets. Otherwise it is the model's first kind, self-attention on the text.

    Args:
        text: The first text; all others are taken to be like it.
        model: The model.
        options: The options of the study.

    Raises:
        AttnscopeError: The model or the options do not suit such texts.
    """
    info = model.info
    # Tokens of a short example text. Offsets are -1 if the tokenizer does not give them.
    example = example_tokens(model.tokenizer)
    if not (example.offsets >= 0).any():
        raise AttnscopeError(
            f"the tokenizer of {info.name} does not tell which characters its tokens are",
            "relations need a fast tokenizer, with offsets",
        )
    if text.target is None:
        # Called only to raise: `chunks` refuses chunks that are longer than the model takes.
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


def _make_no_link_error(sums: MeasuredPart, options: RelationsOptions) -> AttnscopeError:
    """Return the error that says why no link was measured, and what would help."""
    # Add up the links that were left out for each reason, over all relations.
    n_by_reason: Counter[str] = Counter()
    for (_, reason), n in sums.unmeasured.items():
        n_by_reason[reason] += n
    if n_by_reason:
        reason, n = n_by_reason.most_common(1)[0]
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


def _make_notes(sums: MeasuredPart) -> list[str]:
    """Return notes on copies of texts, links that were left out, and texts that were cut into chunks."""
    notes = []
    if sums.n_copies:
        notes.append(
            f"{amount(sums.n_copies, 'text is a copy', 'texts are copies')} of others, case and whitespace apart: "
            "of each the first counts, and of those right after it the links that it lacks."
        )
    # For each reason, name the three relations that lost the most links, such as "nsubj→parent 12".
    relations_by_reason: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for (name, reason), n in sums.unmeasured.items():
        relations_by_reason[reason][name] += n
    for reason, n_by_relation in relations_by_reason.items():
        relation_names = ", ".join(f"{name} {n}" for name, n in n_by_relation.most_common(3))
        if len(n_by_relation) > 3:
            relation_names += " …"
        notes.append(f"Left out, {reason}: {n_by_relation.total():,} links ({relation_names}).")
    if sums.n_chunked:
        notes.append(
            f"{amount(sums.n_chunked, 'text was', 'texts were')} longer than the model takes, and cut into chunks; "
            "each chunk counts as a text."
        )
    return notes


def _note_mixed_halves(tables: dict[str, Table]) -> list[str]:
    """Return a note that names the relations with a verdict whose halves share sources, if there are any."""
    if not tables:
        return []
    table = tables["relations"]
    # Texts of one source are in the same half. If sources are too few for that, single texts are split: "texts".
    # Relations without a verdict need no warning: `no_verdict` says why there is none, and "" = there is one.
    is_mixed = (table["halves"] == "texts") & (table["no_verdict"] == "")
    mixed_relations = table["relation"][is_mixed].tolist()
    if not mixed_relations:
        return []
    relation_names = ", ".join(mixed_relations[:3])
    if len(mixed_relations) > 3:
        relation_names += " …"
    return [
        f"Too few sources to keep each in one half (for {amount(len(mixed_relations), 'relation')}: {relation_names}): "
        "texts or chunks of one source are in both halves, and the result holds for these sources alone."
    ]
