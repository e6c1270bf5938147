"""Run `attnscope learn`: how attention is computed, how heads split it, and what it costs."""

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
class Quiz:
    """Hold the option that turns a trace into a quiz."""

    quiz: bool = option("Ask you for the numbers of a query, and grade your answers.", default=False)


def trace(
    *, source: ExampleOrText, order: TraceOptions, quiz: Quiz, model: ModelOptions, files: FileOptions
) -> None:
    """Compute one attention step by step, with every number and its line of NumPy.

    Without a text: a worked example of 5 tokens, d_model 4 and 2 heads, small enough for pen and paper.

    - `attnscope learn trace --query cat`
    - `attnscope learn trace --query sat -H 0 --quiz`
    - `attnscope learn trace "The cat sat on the mat." -L 3 -H 1 --query cat`
    """
    from attnscope.studies.trace import trace_text_or_example

    output = files.plan("trace")
    # Without a text (None), the study computes the worked example.
    text = source.read() if source.is_given else None
    if quiz.quiz:
        refuse_beside("--quiz", out=files.out, json=files.json)
    record = trace_text_or_example(model.model, text, source.layer, order, model.loading)
    if not quiz.quiz:
        return output.deliver(record)
    # The quiz prints the numbers itself, after the user's answers, and writes no files.
    from attnscope.cli.quiz import ask
    from attnscope.report.plain_text import open_console

    return ask(record, open_console(highlight=False), sys.stdin.readline)


def split(
    *,
    source: ExampleOrText,
    order: SplitOptions,
    model: ModelOptions,
    drawing: DrawingOptions,
    files: FileOptions,
) -> None:
    """See the same queries, keys and values with more and fewer heads.

    Without a text: the worked example of `attnscope learn trace`.

    - `attnscope learn split --counts 1,2,4 --drop 0,1`
    - `attnscope learn split "The cat sat on the mat." -L 3 --counts 1,12,384 -o out`
    """
    from attnscope.studies.inputs.reading import Prompt
    from attnscope.studies.split import split as study

    output = files.plan("split", **drawing.changes())
    # The worked example has a single layer, 0.
    if not source.is_given:
        if source.layer:
            raise UsageError(
                "without a text the worked example is cut, which has one layer", "give a TEXT"
            )
        return output.deliver(study(options=order))
    # A text, and a layer of a model.
    if source.layer is None:
        raise UsageError("of a model, the heads of one layer are cut", "give a layer, such as -L 3")
    prompt = Prompt(source.read())
    return output.deliver(study(model.load(), prompt, source.layer, order))


def cost(*, order: CostOptions, files: FileOptions) -> None:
    """Count what attention costs: parameters, multiply-adds, memory and KV cache.

    - `attnscope learn cost bert-base`
    - `attnscope learn cost llama-2-7b --tokens 32768 --sizes n_kv_heads=8`
    - `attnscope learn cost --sizes d_model=768,n_heads=12,n_layers=12`
    """
    from attnscope.studies.cost import cost as count
    from attnscope.studies.cost import find_sizes

    output = files.plan("cost")
    sizes = find_sizes(order.model, **order.sizes)
    output.deliver(count(sizes, order.tokens, dtype=order.dtype))
