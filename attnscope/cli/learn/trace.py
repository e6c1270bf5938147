"""`attnscope trace`."""

from typing import Annotated

import typer

from attnscope.cli import groups
from attnscope.options import numbers_from


@groups.command(
    omit=("formats",),
    text="A text; `-` reads stdin.  [default: the worked example]",
    engine="auto, native, hf: what runs the model; reference: plain Python loops, which need no torch for the worked "
    "example.",
    out="A folder for trace.npz, trace.json, and trace.py to run again.",
)
def trace(
    *,
    one: groups.OneText,
    target: Annotated[
        str | None,
        "What an encoder-decoder is to write.  [default: its own greedy output]",
        "Text",
    ] = None,
    model: groups.Model = "minilm",
    layer: groups.Layer = None,
    heads: Annotated[
        str | None, typer.Option("-H", "--heads", help="Heads of that layer, such as 1,8-10."), "Heads"
    ] = None,
    token: Annotated[
        str | None, "Follow this query: a token, a word, or a place such as @3.  [default: all]", "Drawing"
    ] = None,
    kind: Annotated[
        str | None, "Of an encoder-decoder: encoder, decoder or cross.  [default: the first]", "Heads"
    ] = None,
    where: groups.Where,
    loading: groups.Loading,
    printing: groups.Printing,
) -> None:
    """Compute one attention step by step, with every number, its formula and its line of NumPy.

    Without a text: a worked example of 5 tokens, d_model 4 and 2 heads, small enough for pen and paper.

    - `attnscope trace --token cat`
    - `attnscope trace "The cat sat on the mat." -L 3 -H 1 --token cat`
    """
    from attnscope.studies.teaching.trace_order import TraceOrder, study

    output, plain = where.plan("trace", printing), loading.engine == "reference"
    order = TraceOrder(
        one.text, one.file, target, layer, None if heads is None else numbers_from(heads), token, kind, plain
    )
    output.deliver(study(model, order, loading.options(engine="auto") if plain else loading.options()))
