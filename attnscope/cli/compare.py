"""Run `attnscope compare`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attnscope.cli.progress import progress
from attnscope.cli.shared import DrawingOptions, FileOptions, ModelOptions
from attnscope.errors import UsageError
from attnscope.studies.compare.options import CompareCommandOptions
from attnscope.studies.inputs.options import CorpusOptions, WorkerOptions

if TYPE_CHECKING:
    from attnscope.questions.compare import Comparison
    from attnscope.studies.inputs.texts import ReportProgress


def compare(
    *,
    texts: CorpusOptions,
    order: CompareCommandOptions,
    model: ModelOptions,
    running: WorkerOptions,
    drawing: DrawingOptions,
    files: FileOptions,
) -> None:
    """Compare heads with each other, on two texts, or between two models.

    - `attnscope compare --file sample_texts/alice.txt --split paragraph -o out`
    - `attnscope compare "The cat sat on the mat because it was tired." --pick L3H1,L5H11 -o out`
    - `attnscope compare "It was too tired." --with "It was too wide." --query it`
    - `attnscope compare --file texts.txt -m checkpoint-1 --with-model checkpoint-2`
    """
    # Refuse wrong options before a model is loaded.
    output = files.plan("compare", **drawing.changes())
    order.require_for(texts)
    with progress(files.quiet) as report:
        if order.choice.pick is None and order.other_text is None:
            record = _over_corpus(texts, order, model, running, report)
        else:
            record = _on_one_text(texts, order, model, running, report)
    output.deliver(record)


def _over_corpus(
    texts: CorpusOptions,
    order: CompareCommandOptions,
    model: ModelOptions,
    running: WorkerOptions,
    report: ReportProgress | None,
) -> Comparison:
    """Compare all heads with each other, or with those of a second model, which may be this one with heads ablated."""
    from attnscope.studies.compare import study

    workers = running.share(model.model, model.loading)
    if workers is not None and order.ablated is not None:
        raise UsageError(
            "workers have no heads taken out", "leave out --workers, --executor and --threads"
        )
    # TEXT is a list of one text here. Figures show the text in their titles if the study gets it as a string.
    corpus_or_list = texts.corpus()
    corpus = corpus_or_list[0] if isinstance(corpus_or_list, list) else corpus_or_list
    loaded = model.load()
    if order.ablated is not None:
        ablated = study.without_heads(loaded, order.ablated)
        return study.compare_models(loaded, ablated, corpus, order, report=report)
    if order.other_model is None:
        return study.compare(loaded, corpus, order, report=report, workers=workers)
    # --adapter changes the first model alone.
    other_loading = replace(model.loading, adapter=None)
    other = other_loading.load(order.other_model)
    workers_of_both = None
    if workers is not None:
        workers_of_both = workers, replace(workers, spec=order.other_model, loading=other_loading)
    return study.compare_models(loaded, other, corpus, order, report=report, workers=workers_of_both)


def _on_one_text(
    texts: CorpusOptions,
    order: CompareCommandOptions,
    model: ModelOptions,
    running: WorkerOptions,
    report: ReportProgress | None,
) -> Comparison:
    """Compare picked heads on one text, or each head on two texts."""
    from attnscope.studies.compare.texts import compare_heads, compare_texts
    from attnscope.text import read_text, require_text

    if running.share(model.model, model.loading) is not None:
        raise UsageError(
            "workers share many texts: here is one", "leave out --workers, --executor and --threads"
        )
    text = read_text(texts.text)
    # Without a second text, `compare` has made sure that heads are picked.
    if order.other_text is None:
        return compare_heads(model.load(), text, order.choice.pick or (), order)
    require_text(order.other_text, "the second text")
    return compare_texts(model.load(), text, order.other_text, order, query=order.query)
