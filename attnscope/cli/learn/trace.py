"""`attnscope trace`."""

import sys
from dataclasses import replace
from typing import Annotated

from attnscope.cli import groups
from attnscope.options import refuse_beside
from attnscope.studies.inputs.options import LoadOptions, OneText
from attnscope.studies.teaching.options import TraceOptions


@groups.command(
    omit=("formats", "engine"),
    text="A text; `-` reads stdin.  [default: the worked example]",
    out="A folder for trace.npz, trace.json, and trace.py, which computes it again.",
)
def trace(
    *,
    source: OneText,
    model: groups.Model = "minilm",
    layer: groups.Layer = None,
    order: TraceOptions,
    where: groups.Where,
    engine: Annotated[
        str,
        "auto, native, hf: what runs the model; reference: plain Python loops, which need no torch for the worked "
        "example and for BERT-like models.",
        "Model",
    ] = "auto",
    quiz: Annotated[bool, "Ask you for the numbers of a query, and grade your answers.", "Output"] = False,
    loading: LoadOptions,
    printing: groups.Printing,
) -> None:
    """Compute one attention step by step, with every number and its line of NumPy.

    Without a text: a worked example of 5 tokens, d_model 4 and 2 heads, small enough for pen and paper.

    - `attnscope trace --token cat`
    - `attnscope trace --token sat -H 0 --quiz`
    - `attnscope trace "The cat sat on the mat." -L 3 -H 1 --token cat`
    """
    from attnscope.studies.teaching.trace import study

    output, loops = where.plan("trace", printing), engine == "reference"
    text = source.read() if source.is_given else None
    load = loading if loops else replace(loading, engine=engine)
    if quiz:
        refuse_beside("--quiz", out=where.out, json=printing.json)
    record = study(model, text, layer, order, load, loops=loops)
    if not quiz:
        return output.deliver(record)
    from attnscope.report.plain_text import open_console
    from attnscope.views.teaching.quiz import ask

    return ask(record, open_console(highlight=False), sys.stdin.readline)
