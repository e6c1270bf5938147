"""`attnscope why`."""

from attnscope.cli import groups
from attnscope.errors import UsageError
from attnscope.studies.inputs.choice import Choice
from attnscope.studies.inputs.options import LoadOptions, OneText
from attnscope.studies.why.options import WhyOptions


@groups.command(
    omit=("scale", "cmap", "layers", "heads"),
    pick="The head, such as L18H6.",
    kind="Of an encoder-decoder: encoder, decoder or cross attention.  [default: encoder]",
)
def why(
    *,
    one: OneText,
    model: groups.Model = "minilm",
    which: Choice,
    asked: WhyOptions,
    where: groups.Where,
    drawing: groups.Drawing,
    loading: LoadOptions,
    printing: groups.Printing,
) -> None:
    """Say why a head attends from one token to another: which earlier parts of the model its query and its key read.

    The score before softmax is a sum over pairs: what earlier heads, MLPs, embeddings and biases wrote at the query,
    times the same at the key.

    - `attnscope why "The animal didn't cross the street because it was too tired." --pick L3H1 --query it --key animal`
    - `attnscope why "The Xorblax met a fox. Later the Xorblax" -m ./SmolLM2-135M --pick L18H6 --query 15`
    """
    from attnscope.studies.why.study import why as study

    output = where.plan("why", printing, **drawing.options())
    if which.pick is None or len(which.pick) != 1:
        raise UsageError("a score is of one head", "name it: --pick L3H1")
    if asked.query is None:
        raise UsageError("a score is of one token that attends", "name it: --query it, or --query @3")
    text = one.read()
    ((layer, head),) = which.pick
    output.deliver(study(loading.load(model), text, layer, head, asked.query, asked.key, kind=asked.kind))
