"""`attnscope trace`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.cli import options

if TYPE_CHECKING:
    from attnscope.records.trace import Trace


def trace(
    text: Annotated[
        str | None,
        typer.Argument(help="A text; `-` reads stdin.  [default: the worked example]", show_default=False),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read the text from a file (UTF-8).")] = None,
    target: Annotated[
        str | None,
        typer.Option(help="What an encoder-decoder is to write.  [default: its own greedy output]", show_default=False),
    ] = None,
    model: options.Model = "minilm",
    layer: Annotated[int | None, typer.Option("-L", "--layer", min=0, help="The layer, counted from 0.")] = None,
    heads: Annotated[str | None, typer.Option("-H", "--heads", help="Heads of that layer, such as 1,8-10.")] = None,
    token: Annotated[
        str | None, typer.Option(help="Follow this query: a token, a word, or a place such as @3.  [default: all]")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="Of an encoder-decoder: encoder, decoder or cross.  [default: the first]")
    ] = None,
    adapter: options.Adapter = None,
    engine: Annotated[
        str,
        typer.Option(
            help="auto, native, hf: what runs the model; reference: plain Python loops, which need no torch for "
            "the worked example."
        ),
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="A folder for trace.npz, trace.json, and trace.py to run again.")
    ] = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "float32",
    device_map: options.DeviceMap = None,
    no_check: options.NoCheck = False,
    allow_pickle: options.AllowPickle = False,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Compute one attention step by step, with every number, its formula and its line of NumPy.

    Without a text: a worked example of 5 tokens, d_model 4 and 2 heads, small enough for pen and paper.

    - `attnscope trace --token cat`

    - `attnscope trace "The cat sat on the mat." -L 3 -H 1 --token cat`
    """
    from attnscope.studies.inputs import LoadOptions
    from attnscope.studies.trace_files import TraceOrder, traced

    order = TraceOrder(text, file, target, layer, options.numbers_from(heads), token, kind, engine == "reference", out)
    engine = "auto" if engine == "reference" else engine
    loading = LoadOptions(engine, device, dtype, not no_check, allow_pickle, trust_remote_code, device_map, adapter)
    record, paths = traced(model, order, loading)
    options.say(record.run["notes"], quiet)
    print_trace(record, paths, json)


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
