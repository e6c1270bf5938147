"""`attnscope why`."""

from attnscope.cli import groups, options
from attnscope.errors import UsageError
from attnscope.options import refuse_beside
from attnscope.studies.inputs.choice import Choice
from attnscope.studies.inputs.options import LoadOptions, TextsWanted
from attnscope.studies.why.options import WhyOptions


@groups.command(
    omit=("scale", "cmap", "layers", "heads"),
    pick="The head, such as L18H6; with --file several, and all where none is named.",
    kind="Of an encoder-decoder: encoder, decoder or cross attention.  [default: encoder]",
)
def why(
    *,
    texts: TextsWanted,
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
    times the same at the key. With --file, over many texts: the share of the variance of a head's scores that each part
    explains.

    - `attnscope why "The animal didn't cross the street because it was too tired." --pick L3H1 --query it --key animal`
    - `attnscope why "The Xorblax met a fox. Later the Xorblax" -m ./SmolLM2-135M --pick L18H6 --query 15`
    - `attnscope why --file corpus.txt --pick L3H1,L5H11`
    """
    from attnscope.studies.why.heads import why_heads
    from attnscope.studies.why.study import why as study
    from attnscope.text import read_text

    output = where.plan("why-heads" if texts.files else "why", printing, **drawing.options())
    if texts.files:
        refuse_beside("--file", order, text=texts.text)
        corpus = texts.corpus()
        with options.progress(printing.quiet) as report:
            output.deliver(why_heads(loading.load(model), corpus, which, report))
        return
    if which.pick is None or len(which.pick) != 1:
        raise UsageError(
            "no single head is picked", "name the head that attends: --pick L3H1; or give many texts: --file corpus.txt"
        )
    if order.query is None:
        raise UsageError("no token is named to explain", "name the token that attends: --query it, or --query @3")
    text, ((layer, head),) = read_text(texts.text, None), which.pick
    output.deliver(study(loading.load(model), text, layer, head, order.query, order.key, kind=order.kind))
