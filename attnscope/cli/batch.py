"""`attnscope batch`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.cli import options

if TYPE_CHECKING:
    from attnscope.records.batches import Batch


def batch(
    files: Annotated[
        list[str], typer.Argument(help="Files or patterns: txt, jsonl, csv, also .gz and .zst; `-` reads stdin.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to write to, or to go on in.")],
    split: options.Split = "line",
    field: options.Field = "text",
    chat: Annotated[bool, typer.Option("--chat", help="Put each text into the model's chat template.")] = False,
    generate: Annotated[
        int, typer.Option(min=0, max=10000, help="Let a decoder write that many tokens, and show them too.")
    ] = 0,
    model: options.Model = "minilm",
    layers: options.Layers = None,
    heads: options.Heads = None,
    pick: options.Pick = None,
    query: Annotated[
        str | None, typer.Option(help="Also show what this token attends to, in the texts that have it.")
    ] = None,
    words: options.Words = False,
    hide_special: options.HideSpecial = False,
    formats: Annotated[str, typer.Option("-f", "--format", help="Several of png, svg, pdf, npz, json.")] = "png",
    scale: options.Scale = "fixed",
    cmap: options.Cmap = "Blues",
    workers: Annotated[
        int | None,
        typer.Option(
            help="Workers that draw, each with its own model.  [default: one a core, as memory allows]",
            show_default=False,
        ),
    ] = None,
    threads: Annotated[
        int, typer.Option(help="Threads that each of them computes with; more than 1 for large models.")
    ] = 1,
    executor: options.Executor = "local",
    ray_address: options.RayAddress = None,
    force: Annotated[bool, typer.Option("--force", help="Draw again what is done already.")] = False,
    adapter: options.Adapter = None,
    engine: options.Engine = "auto",
    device: options.Device = "cpu",
    dtype: options.Dtype = "float32",
    device_map: options.DeviceMap = None,
    no_check: options.NoCheck = False,
    allow_pickle: options.AllowPickle = False,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Draw every text of a file as `heatmap` draws one, with a manifest and an index.html of all.

    The same command goes on where it was stopped, and draws nothing twice.

    - `attnscope batch sample_texts/sentences.txt -o figures`

    - `attnscope batch 'corpus/*.jsonl.gz' -o figures -L 3-5 --format svg --workers 2`
    """
    from attnscope.studies.batch import BatchOptions
    from attnscope.studies.batch import batch as draw
    from attnscope.studies.heatmap_files import FILE_FORMATS
    from attnscope.studies.inputs import LoadOptions, TextsWanted, named_formats
    from attnscope.views.figures import Style

    how = BatchOptions(
        options.numbers_from(layers), options.numbers_from(heads), options.heads_from(pick),
        named_formats(formats, FILE_FORMATS), Style(scale, cmap),  # type: ignore[arg-type]  # Style refuses others
        query, words, hide_special, chat, generate, workers, threads, force,
        LoadOptions(engine, device, dtype, not no_check, allow_pickle, trust_remote_code, device_map, adapter),
        executor, ray_address,  # type: ignore[arg-type]  # Workers refuse others
    )  # fmt: skip
    texts = TextsWanted(None, tuple(files), split, field).corpus()
    with options.progress(quiet) as report:
        result = draw(model, texts, out, how, report)
    print_batch(result, out, json, quiet)
    fail_if_not_whole(result)


def print_batch(result: "Batch", out: Path, json: bool, quiet: bool) -> None:
    """The result on stdout: one JSON document, else the paths of the index and the manifest, which name the others."""
    before = len(result.drawn) - result.n_fresh
    options.say([f"{before:,} of {result.n_texts:,} texts were drawn before"] if before else [], quiet)
    paths = [str(out / "index.html"), str(out / "manifest.jsonl")]
    if json:
        from json import dumps

        options.print_json(dumps(result.as_json() | {"files": paths}, ensure_ascii=False))
        return
    options.print_paths(paths)


def fail_if_not_whole(result: "Batch") -> None:
    """Ends with exit status 1 where texts failed, 130 where it was interrupted; all the rest is drawn by then."""
    from attnscope.errors import AttnscopeError

    for failure in result.failed:
        print("failed: " + options.one_line(str(failure)), file=sys.stderr)
    if not result.complete:
        done = len(result.drawn)
        print(f"note: {done:,} of {result.n_texts:,} texts are drawn; the same command goes on", file=sys.stderr)
        raise KeyboardInterrupt
    if result.failed:
        n = len(result.failed)
        what = "1 text" if n == 1 else f"{n:,} texts"
        raise AttnscopeError(f"{what} could not be read or drawn", "all others are drawn" if result.drawn else "")
