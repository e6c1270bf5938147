"""Run `attnscope learn`: its commands `trace` (compute attention step by step), `split` (into heads) and `cost`."""

import sys

from attnscope.cli.shared import DrawingOptions, FileOptions, ModelOptions
from attnscope.errors import UsageError
from attnscope.options import option, options, refuse_beside
from attnscope.questions.cost import CostOptions
from attnscope.questions.split import SplitOptions
from attnscope.questions.trace import TraceOptions
from attnscope.studies.inputs.options import OneTextOptions


@options
class ExampleOrText(OneTextOptions):
    """Hold a text and a layer; without a text, the worked example of 5 tokens, d_model 4 and 2 heads."""

    text: str | None = option(
        "A text; `-` reads stdin.  [default: the worked example]", default=None, argument=True
    )
    layer: int | None = option(
        "The layer, counted from 0.", "-L", "--layers", default=None, least=0, panel="Heads"
    )


@options
class QuizOptions:
    """Hold the option that turns a trace into a quiz."""

    quiz: bool = option("Ask you for the numbers of a query, and grade your answers.", default=False)


def trace(
    *,
    text_options: ExampleOrText,
    trace_options: TraceOptions,
    quiz_options: QuizOptions,
    model_options: ModelOptions,
    file_options: FileOptions,
) -> None:
    """Compute one attention step by step, with every number and its line of NumPy.

    Without a text: a worked example of 5 tokens, d_model 4 and 2 heads, small enough for pen and paper.

    - `attnscope learn trace --query cat`
    - `attnscope learn trace --query sat -H 0 --quiz`
    - `attnscope learn trace "The cat sat on the mat." -L 3 -H 1 --query cat`
    """
    from attnscope.studies.trace import trace_text_or_example

    output = file_options.plan_output("trace")
    # Without a text (None), the study computes the worked example.
    text = text_options.read() if text_options.is_given else None
    if quiz_options.quiz:
        refuse_beside("--quiz", out=file_options.out, json=file_options.json)
    record = trace_text_or_example(
        model_options.model, text, text_options.layer, trace_options, model_options.loading
    )
    if not quiz_options.quiz:
        return output.deliver(record)
    # The quiz prints the numbers itself, after the user's answers, and writes no files.
    from attnscope.cli.quiz import run_quiz
    from attnscope.report.plain_text import open_console

    return run_quiz(record, open_console(highlight=False), sys.stdin.readline)


def split(
    *,
    text_options: ExampleOrText,
    split_options: SplitOptions,
    model_options: ModelOptions,
    drawing_options: DrawingOptions,
    file_options: FileOptions,
) -> None:
    """See the same queries, keys and values with more and fewer heads.

    Without a text: the worked example of `attnscope learn trace`.

    - `attnscope learn split --counts 1,2,4 --drop 0,1`
    - `attnscope learn split "The cat sat on the mat." -L 3 --counts 1,12,384 -o out`
    """
    from attnscope.studies.inputs.reading import Prompt
    from attnscope.studies.split import split as study

    output = file_options.plan_output("split", **drawing_options.non_default_options())
    # Without a text, the study splits the worked example, whose only layer is 0.
    if not text_options.is_given:
        if text_options.layer:
            raise UsageError(
                "without a text the worked example is cut, which has one layer", "give a TEXT"
            )
        return output.deliver(study(options=split_options))
    # With a text, the heads of one layer of a model are split.
    if text_options.layer is None:
        raise UsageError("split cuts the heads of one layer of a model", "give a layer, such as -L 3")
    prompt = Prompt(text_options.read())
    return output.deliver(study(model_options.load(), prompt, text_options.layer, split_options))


def cost(*, cost_options: CostOptions, file_options: FileOptions) -> None:
    """Count what attention costs: parameters, multiply-adds, memory and KV cache.

    - `attnscope learn cost bert-base`
    - `attnscope learn cost llama-2-7b --tokens 32768 --sizes n_kv_heads=8`
    - `attnscope learn cost --sizes d_model=768,n_heads=12,n_layers=12`
    """
    from attnscope.studies.cost import cost as count_cost
    from attnscope.studies.cost import find_sizes

    output = file_options.plan_output("cost")
    sizes = find_sizes(cost_options.model, **cost_options.sizes)
    output.deliver(count_cost(sizes, cost_options.tokens, dtype=cost_options.dtype))
