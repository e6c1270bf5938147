"""Run `attnscope compare`: compare heads over a corpus or on one text, on two texts, or between two models."""

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
    corpus_options: CorpusOptions,
    compare_options: CompareCommandOptions,
    model_options: ModelOptions,
    worker_options: WorkerOptions,
    drawing_options: DrawingOptions,
    file_options: FileOptions,
) -> None:
    """Compare heads with each other, on two texts, or between two models.

    - `attnscope compare --file sample_texts/alice.txt --split paragraph -o out`
    - `attnscope compare "The cat sat on the mat because it was tired." --pick L3H1,L5H11 -o out`
    - `attnscope compare "It was too tired." --with "It was too wide." --query it`
    - `attnscope compare --file texts.txt -m checkpoint-1 --with-model checkpoint-2`
    """
    # Refuse wrong options before a model is loaded.
    output = file_options.plan_output("compare", **drawing_options.non_default_options())
    # Refuse options that contradict each other, or do not fit the texts.
    compare_options.require_for(corpus_options)
    is_over_corpus = compare_options.choice.pick is None and compare_options.other_text is None
    make_comparison = _compare_over_corpus if is_over_corpus else _compare_on_one_text
    with progress(file_options.quiet) as report_progress:
        record = make_comparison(
            corpus_options, compare_options, model_options, worker_options, report_progress
        )
    output.deliver(record)


def _compare_over_corpus(
    corpus_options: CorpusOptions,
    compare_options: CompareCommandOptions,
    model_options: ModelOptions,
    worker_options: WorkerOptions,
    report_progress: ReportProgress | None,
) -> Comparison:
    """Compare all heads with each other, or with the heads of a second model: one by name, or this one, ablated."""
    from attnscope.studies.compare import study

    workers = worker_options.make_workers(model_options.model, model_options.loading)
    # Each worker loads the model by its name, so it would have all heads.
    if workers is not None and compare_options.ablated is not None:
        raise UsageError(
            "workers have no heads taken out", "leave out --workers, --executor and --threads"
        )
    # A text on the command line comes as a list of one text. Pass the string: the study then shows it in titles.
    corpus_or_list = corpus_options.corpus()
    text_or_corpus = corpus_or_list[0] if isinstance(corpus_or_list, list) else corpus_or_list
    model = model_options.load()
    if compare_options.ablated is not None:
        ablated_model = study.without_heads(model, compare_options.ablated)
        return study.compare_models(
            model, ablated_model, text_or_corpus, compare_options, report=report_progress
        )
    if compare_options.other_model is None:
        return study.compare(
            model, text_or_corpus, compare_options, report=report_progress, workers=workers
        )
    # --adapter is for the first model alone.
    other_loading = replace(model_options.loading, adapter=None)
    other_model = other_loading.load(compare_options.other_model)
    # Each model has workers of its own.
    workers_of_both = None
    if workers is not None:
        workers_of_both = (
            workers,
            replace(workers, spec=compare_options.other_model, loading=other_loading),
        )
    return study.compare_models(
        model,
        other_model,
        text_or_corpus,
        compare_options,
        report=report_progress,
        workers=workers_of_both,
    )


def _compare_on_one_text(
    corpus_options: CorpusOptions,
    compare_options: CompareCommandOptions,
    model_options: ModelOptions,
    worker_options: WorkerOptions,
    report_progress: ReportProgress | None,
) -> Comparison:
    """Compare picked heads on one text, or each head on two texts."""
    from attnscope.studies.compare.texts import compare_heads, compare_texts
    from attnscope.text import read_text, require_text

    if worker_options.make_workers(model_options.model, model_options.loading) is not None:
        raise UsageError(
            "workers share many texts: here is one", "leave out --workers, --executor and --threads"
        )
    text = read_text(corpus_options.text)
    # Without a second text, heads are picked: `compare` chose this function by that.
    if compare_options.other_text is None:
        return compare_heads(
            model_options.load(), text, compare_options.choice.pick or (), compare_options
        )
    require_text(compare_options.other_text, "the second text")
    return compare_texts(
        model_options.load(),
        text,
        compare_options.other_text,
        compare_options,
        query=compare_options.query,
    )
