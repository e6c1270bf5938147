"""Run `attnscope why`."""

from attnscope.cli.shared import DrawingOptions, FileOptions, ModelOptions
from attnscope.errors import UsageError
from attnscope.questions.why import WhyOptions
from attnscope.studies.inputs.options import OneTextOptions


def why(
    *,
    source: OneTextOptions,
    order: WhyOptions,
    model: ModelOptions,
    drawing: DrawingOptions,
    files: FileOptions,
) -> None:
    """Say why a head attends from one token to another: which earlier parts of the model its query and its key read.

    The score before softmax is a sum over pairs: what earlier heads, MLPs, embeddings and biases wrote at the query,
    times the same at the key.

    - `attnscope why "The animal didn't cross the street because it was too tired." --pick L3H1 --query it --key animal`
    - `attnscope why "The Xorblax met a fox. Later the Xorblax" -m ./SmolLM2-135M --pick L18H6 --query 15`
    """
    from attnscope.studies.why import why as study

    output = files.plan("why", **drawing.changes())
    # The head and the token that attends must be named; the key has a default.
    if order.pick is None or len(order.pick) != 1:
        raise UsageError("no single head is picked", "name the head that attends: --pick L3H1")
    if order.query is None:
        raise UsageError(
            "no token is named to explain", "name the token that attends: --query it, or --query @3"
        )
    ((layer, head),) = order.pick
    text = source.read()
    output.deliver(study(model.load(), text, layer, head, order.query, order.key, kind=order.kind))
