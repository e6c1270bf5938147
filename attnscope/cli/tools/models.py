"""`attnscope models` and `attnscope info`."""

from typing import Annotated

import typer

from attnscope.cli import groups, options
from attnscope.studies.inputs.options import LoadOptions


@groups.command()
def models(printing: groups.Printing) -> None:
    """List the models that -m knows by name, and whether they are on this machine."""
    from attnscope.models.catalog import list_models

    entries = list_models()
    if printing.json:
        from attnscope.output import print_json

        listed = [
            {"name": e.name, "state": e.state, "what": e.what, "folder": e.folder and str(e.folder)} for e in entries
        ]
        print_json({"schema": "attnscope.models/1", "models": listed})
        return
    from attnscope.report.plain_text import open_console
    from attnscope.report.table import TextColumn, TextTable

    columns = [
        TextColumn("model", lambda entry: entry.name, wraps=True, least=20),
        TextColumn("state", lambda entry: entry.state, wraps=True, least=13),
        TextColumn("what", lambda entry: entry.what, wraps=True, least=16),
    ]
    open_console().print(TextTable(columns, entries))
    if not printing.quiet:
        print("Any folder with a Hugging Face model, and any Hub id such as org/name, is a model too.")


@groups.command(omit=("device", "dtype", "device_map"))
def info(
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A known name, a folder, or a Hub id.  [default: minilm]",
            autocompletion=options.complete_models,
            show_default=False,
        ),
    ] = None,
    model_too: groups.ModelToo = None,
    loading: LoadOptions,
    printing: groups.Printing,
) -> None:
    """Say what a model is: layers, heads, engine, limit, tokenizer, parameters."""
    from attnscope.models import describe

    about, tokenizer = describe(
        options.one_model(model, model_too) or "minilm", engine=loading.engine, check=loading.check,
        allow_pickle=loading.allow_pickle, trust_remote_code=loading.trust_remote_code, adapter=loading.adapter,
    )  # fmt: skip
    if printing.json:
        from attnscope.output import print_json

        print_json({"schema": "attnscope.info/1", **about.as_json(), "tokenizer": tokenizer.name})
        return
    _print_lines(about.lines(tokenizer.name))


def _print_lines(lines: list[tuple[str, str]]) -> None:
    """A table of names and values; the hash below, on a line of its own."""
    from attnscope.report.plain_text import open_console
    from attnscope.report.table import TextColumn, TextTable

    columns = [TextColumn("", lambda line: line[0], style="dim"), TextColumn("", lambda line: line[1], wraps=True)]
    open_console().print(TextTable(columns, [line for line in lines if line[0] != "sha256"], header=False))
    print(f"sha256 {dict(lines)['sha256']}")
