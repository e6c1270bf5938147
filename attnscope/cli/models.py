"""Run `attnscope models`: list the models that are known by name, or describe one model."""

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


def models(*, model_options: OptionalModel, printing_options: PrintingOptions) -> None:
    """List the models that -m knows by name; or say what one is: layers, heads, engine, limit, tokenizer, parameters.

    - `attnscope models`
    - `attnscope models minilm`
    - `attnscope models ./SmolLM2-135M`
    """
    if model_options.model is None:
        _print_known_models(printing_options)
    else:
        _print_facts(model_options.model, model_options.loading, printing_options)


def _print_known_models(printing_options: PrintingOptions) -> None:
    """Print the models that are known by name, and whether each is on this machine."""
    from attnscope.models.catalog import list_models
    from attnscope.output import print_json
    from attnscope.report.plain_text import open_console
    from attnscope.report.table import TextColumn, TextTable

    entries = list_models()
    # JSON for programs, a table for people.
    if printing_options.json:
        model_objects = []
        for entry in entries:
            # None = the model's files are not on this machine.
            folder = None if entry.folder is None else str(entry.folder)
            model_objects.append(
                {"name": entry.name, "state": entry.state, "what": entry.about, "folder": folder}
            )
        print_json({"schema": "attnscope.models/1", "models": model_objects})
        return
    # `least` is the smallest width of a column, in characters.
    columns = [
        TextColumn("model", lambda entry: entry.name, wraps=True, min_width=20),
        TextColumn("state", lambda entry: entry.state, wraps=True, min_width=13),
        TextColumn("what", lambda entry: entry.about, wraps=True, min_width=16),
    ]
    open_console().print(TextTable(columns, entries))
    if not printing_options.quiet:
        print("Any folder with a Hugging Face model, and any Hub id such as org/name, is a model too.")


def _print_facts(spec: str, load_options: LoadOptions, printing_options: PrintingOptions) -> None:
    """Print the facts of a model, and the name of its tokenizer."""
    from attnscope.models import describe
    from attnscope.output import print_json
    from attnscope.report.plain_text import open_console
    from attnscope.report.table import TextColumn, TextTable

    info, tokenizer = describe(
        spec,
        engine=load_options.engine,
        check=load_options.check,
        allow_pickle=load_options.allow_pickle,
        trust_remote_code=load_options.trust_remote_code,
        adapter=load_options.adapter,
    )
    if printing_options.json:
        print_json({"schema": "attnscope.model/1", **info.as_json(), "tokenizer": tokenizer.name})
        return
    # (label, value) of each fact, for a table without a header
    facts = info.listing(tokenizer.name)
    columns = [
        TextColumn("", lambda fact: fact[0], style="dim"),
        TextColumn("", lambda fact: fact[1], wraps=True),
    ]
    open_console().print(TextTable(columns, facts, header=False))
