"""Run `attnscope models`."""

from attnscope.cli.shared import PrintingOptions
from attnscope.options import group, option, options
from attnscope.studies.inputs.options import LoadOptions


@options
class OptionalModel:
    """Hold the model to describe, if one is named, and how it is loaded."""

    model: str | None = option(
        "A known name, a folder, or a Hub id.", default=None, argument=True, completion="models"
    )
    loading: LoadOptions = group(LoadOptions)


def models(*, named: OptionalModel, printing: PrintingOptions) -> None:
    """List the models that -m knows by name; or say what one is: layers, heads, engine, limit, tokenizer, parameters.

    - `attnscope models`
    - `attnscope models minilm`
    - `attnscope models ./SmolLM2-135M`
    """
    if named.model is None:
        _list(printing)
    else:
        _describe(named.model, named.loading, printing)


def _list(printing: PrintingOptions) -> None:
    """Print the known models, and whether they are on this machine."""
    from attnscope.models.catalog import list_models
    from attnscope.output import print_json
    from attnscope.report.plain_text import open_console
    from attnscope.report.table import TextColumn, TextTable

    entries = list_models()
    # JSON for programs, a table for people.
    if printing.json:
        listed = []
        for entry in entries:
            folder = None if entry.folder is None else str(entry.folder)
            fields = {"name": entry.name, "state": entry.state, "what": entry.about, "folder": folder}
            listed.append(fields)
        return print_json({"schema": "attnscope.models/1", "models": listed})
    columns = [
        TextColumn("model", lambda entry: entry.name, wraps=True, least=20),
        TextColumn("state", lambda entry: entry.state, wraps=True, least=13),
        TextColumn("what", lambda entry: entry.about, wraps=True, least=16),
    ]
    open_console().print(TextTable(columns, entries))
    if not printing.quiet:
        print("Any folder with a Hugging Face model, and any Hub id such as org/name, is a model too.")
    return None


def _describe(spec: str, loading: LoadOptions, printing: PrintingOptions) -> None:
    """Print the facts of a model, and the name of its tokenizer."""
    from attnscope.models import describe
    from attnscope.output import print_json
    from attnscope.report.plain_text import open_console
    from attnscope.report.table import TextColumn, TextTable

    info, tokenizer = describe(
        spec,
        engine=loading.engine,
        check=loading.check,
        allow_pickle=loading.allow_pickle,
        trust_remote_code=loading.trust_remote_code,
        adapter=loading.adapter,
    )
    if printing.json:
        return print_json({"schema": "attnscope.model/1", **info.as_json(), "tokenizer": tokenizer.name})
    facts = info.listing(tokenizer.name)
    columns = [
        TextColumn("", lambda fact: fact[0], style="dim"),
        TextColumn("", lambda fact: fact[1], wraps=True),
    ]
    open_console().print(TextTable(columns, facts, header=False))
    return None
