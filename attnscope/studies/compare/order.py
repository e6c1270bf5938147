"""From what the command line asks to compare to records, and from those to files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from attnscope.errors import UsageError
from attnscope.models.model import Model
from attnscope.questions.compare import Comparison
from attnscope.questions.heads import Heads
from attnscope.studies.compare.options import CompareOrder
from attnscope.studies.compare.study import compare, compare_models, without_heads
from attnscope.studies.compare.texts import compare_heads, compare_texts
from attnscope.studies.inputs.options import LoadOptions, TextsWanted
from attnscope.studies.inputs.texts import Report
from attnscope.studies.workers import Workers
from attnscope.text import read_text, require_text


def study(
    spec: str,
    texts: TextsWanted,
    order: CompareOrder,
    loading: LoadOptions,
    report: Report | None,
    workers: Workers | None = None,
) -> Comparison:
    """Loads a model, or two, and compares as the order says."""
    comparison = _comparison(spec, texts, order, report, workers)  # what can be refused is, before a model is loaded
    return comparison(loading.load(spec), loading)


def _comparison(
    spec: str, texts: TextsWanted, order: CompareOrder, report: Report | None, workers: Workers | None
) -> Callable[[Model, LoadOptions], Comparison]:
    """A function from the loaded model to the comparison; all that can be refused before is refused here."""
    order.require_for(texts)
    measure = order.measures[0]
    if order.other_text is not None or order.choice.pick is not None:
        if workers is not None:
            raise UsageError("workers share many texts: here is one", "leave out --workers, --executor and --threads")
        text = read_text(texts.text)
        if order.other_text is not None:
            other = order.other_text
            require_text(other, "the second text")
            return lambda model, _: compare_texts(
                model, text, other, query=order.query, measure=measure, hide_special=order.hide_special
            )
        pick = order.choice.pick or ()
        return lambda model, _: compare_heads(model, text, pick, measure=measure, hide_special=order.hide_special)
    # One literal text is known as such, so that figures can name it.
    corpus = texts.text if texts.text not in (None, "-") and not texts.files else texts.corpus()
    if order.other_model is not None:
        second = order.other_model

        def compare_two(model: Model, loading: LoadOptions) -> Comparison:
            loading = replace(loading, adapter=None)
            pair = None if workers is None else (workers, replace(workers, spec=second, loading=loading))
            return compare_models(model, loading.load(second), corpus, order, report=report, workers=pair)

        return compare_two
    if order.ablated is not None:
        if workers is not None:
            raise UsageError("workers have no heads taken out", "leave out --workers, --executor and --threads")
        heads = order.ablated
        return lambda model, _: compare_models(model, without_heads(model, heads), corpus, order, report=report)
    roles = None if order.heads_record is None else Heads.load(order.heads_record)

    def compare_one(model: Model, _: LoadOptions) -> Comparison:
        return compare(model, corpus, order, roles=roles, report=report, workers=workers)

    return compare_one
