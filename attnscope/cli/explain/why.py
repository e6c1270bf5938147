"""`attnscope why`."""

from attnscope.choice import Choice
from attnscope.cli import groups
from attnscope.errors import UsageError
from attnscope.studies.inputs.options import LoadOptions, OneText
from attnscope.studies.why.options import WhyOptions


@groups.command(
    omit=("scale", "cmap", "layers", "heads"),
    pick="The head, such as L18H6.",
    kind="In an encoder-decoder: encoder, decoder or cross attention.  [default: encoder]",
)
def why(
    *,
    source: OneText,
    model: groups.Model = "minilm",
    which: Choice,
    order: WhyOptions,
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
        raise UsageError("no single head is picked", "name the head that attends: --pick L3H1")
    if order.query is None:
        raise UsageError("no token is named to explain", "name the token that attends: --query it, or --query @3")
    ((layer, head),) = which.pick
    text = source.read()
    output.deliver(study(loading.load(model), text, layer, head, order.query, order.key, kind=order.kind))
