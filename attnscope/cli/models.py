"""`attnscope models` and `attnscope info`."""

from typing import Annotated

import typer

from attnscope.cli import options


def models(json: options.Json = False) -> None:
    """List the models that can be named, and whether they are on this machine."""
    from attnscope.models.catalog import known

    entries = known()
    if json:
        from json import dumps

        listed = [
            {"name": e.name, "state": e.state, "what": e.what, "folder": e.folder and str(e.folder)} for e in entries
        ]
        options.print_json(dumps({"schema": "attnscope.models/1", "models": listed}, ensure_ascii=False))
        return
    from rich.table import Table

    from attnscope.views.plain_text import open_console

    table = Table("model", "state", "what", box=None, pad_edge=False, header_style="dim")
    for entry in entries:
        table.add_row(entry.name, entry.state, entry.what)
    open_console().print(table)
    print("Any folder with a Hugging Face model, and any Hub id such as org/name, is a model too.")


def info(
    model: Annotated[str, typer.Argument(help="A known name, a folder, or a Hub id.")] = "minilm",
    adapter: options.Adapter = None,
    engine: options.Engine = "auto",
    allow_pickle: options.AllowPickle = False,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Say what a model is: layers, heads, engine, limit, tokenizer, parameters."""
    from attnscope.models import describe

    about, tokenizer = describe(
        model, engine=engine, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code, adapter=adapter
    )
    described = about.as_json() | {"tokenizer": tokenizer.name}
    if json:
        from json import dumps

        options.print_json(dumps({"schema": "attnscope.info/1", **described}, ensure_ascii=False))
        return
    from rich.table import Table

    from attnscope.views.plain_text import open_console

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in about.lines(tokenizer.name):
        if name != "sha256":
            table.add_row(name, value)
    open_console().print(table)
    print(f"sha256 {dict(about.lines(tokenizer.name))['sha256']}")
