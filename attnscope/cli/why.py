"""Run `attnscope why`: explain one attention score of one head by what its query and its key read."""

from attnscope.cli.shared import DrawingOptions, FileOptions, ModelOptions
from attnscope.errors import UsageError
from attnscope.questions.why import WhyOptions
from attnscope.studies.inputs.options import OneTextOptions


def why(
    *,
    text_options: OneTextOptions,
    why_options: WhyOptions,
    model_options: ModelOptions,
    drawing_options: DrawingOptions,
    file_options: FileOptions,
) -> None:
    """Say why a head attends from one token to another: which earlier parts of the model its query and its key read.

    The score before softmax is a sum over pairs: what earlier heads, MLPs, embeddings and biases wrote at the query,
    times the same at the key.

    - `attnscope why "The animal didn't cross the street because it was too tired." --pick L3H1 --query it --key animal`
    - `attnscope why "The Xorblax met a fox. Later the Xorblax" -m ./SmolLM2-135M --pick L18H6 --query 15`
    """
    from attnscope.studies.why import why as study

    output = file_options.plan_output("why", **drawing_options.non_default_options())
    # The user must name the head and the query; the key has a default.
    if why_options.pick is None or len(why_options.pick) != 1:
        raise UsageError("no single head is picked", "name the head that attends: --pick L3H1")
    if why_options.query is None:
        raise UsageError(
            "no token is named to explain", "name the token that attends: --query it, or --query @3"
        )
    ((layer, head),) = why_options.pick
    text = text_options.read()
    output.deliver(
        study(
            model_options.load(),
            text,
            layer,
            head,
            why_options.query,
            why_options.key,
            kind=why_options.kind,
        )
    )
