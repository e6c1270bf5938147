"""`attnscope trace`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.cli import groups, options

if TYPE_CHECKING:
    from attnscope.records.trace import Trace


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
    ] = None,
    model: groups.Model = "minilm",
    layer: groups.Layer = None,
    heads: Annotated[str | None, typer.Option("-H", "--heads", help="Heads of that layer, such as 1,8-10.")] = None,
    token: Annotated[str | None, "Follow this query: a token, a word, or a place such as @3.  [default: all]"] = None,
    kind: Annotated[str | None, "Of an encoder-decoder: encoder, decoder or cross.  [default: the first]"] = None,
    where: groups.Where,
    loading: groups.Loading,
    printing: groups.Printing,
) -> None:
    """Compute one attention step by step, with every number, its formula and its line of NumPy.

    Without a text: a worked example of 5 tokens, d_model 4 and 2 heads, small enough for pen and paper.

    - `attnscope trace --token cat`
    - `attnscope trace "The cat sat on the mat." -L 3 -H 1 --token cat`
    """
    from attnscope.studies.trace_files import TraceOrder, traced

    plain = loading.engine == "reference"
    order = TraceOrder(
        one.text, one.file, target, layer, options.numbers_from(heads), token, kind, plain, where.out
    )  # fmt: skip
    record, paths = traced(model, order, loading.options(engine="auto") if plain else loading.options())
    options.say(record.run["notes"], printing.quiet)
    print_trace(record, paths, printing.json)


def print_trace(record: "Trace", paths: list[Path], json: bool) -> None:
    """The result on stdout: one JSON document; else the numbers, then the paths."""
    if json:
        options.print_document(record.as_json(), paths)
        return
    from attnscope.views.plain_text import open_console
    from attnscope.views.trace_terminal import walk

    console = open_console(highlight=False)
    console.print(walk(record, console))
    options.print_paths(paths)


def show_saved(saved: options.Saved) -> None:
    """Shows a trace again; with a folder, writes its files there."""
    from attnscope.records.trace import load
    from attnscope.studies import trace_files

    loaded = load(saved.record)
    options.say(loaded.run["notes"], saved.quiet)
    paths = [] if saved.out is None else trace_files.saved(loaded, saved.out, trace_files.RECORDS)
    print_trace(loaded, paths, saved.json)
