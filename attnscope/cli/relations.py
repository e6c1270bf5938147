"""`attnscope relations`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.cli import groups, options

if TYPE_CHECKING:
    from attnscope.records.relations import Relations


@groups.command()
def relations(
    *,
    files: Annotated[
        list[str], "Annotated files or patterns: .conllu, .jsonl with links, .py; also .gz and .zst; - is stdin."
    ],
    kind: Annotated[str, "How the files are annotated: conllu, jsonl, python; auto: by their names."] = "auto",
    unit: Annotated[
        str, "How CoNLL-U is split into texts: sentence, or document (coreference across sentences)."
    ] = "sentence",
    only: Annotated[str | None, "Only these relations, such as nsubj,obj.  [default: all]"] = None,
    model: groups.Model = "minilm",
    chunk: Annotated[int | None, "Cut long texts into chunks of so many tokens."] = None,
    stride: Annotated[int | None, "How many tokens further the next chunk begins; overlaps count once."] = None,
    examples: Annotated[
        int, typer.Option(min=0, max=100, help="Show so many texts of each relation that a head expresses.")
    ] = 0,
    where: groups.Where,
    running: groups.Running,
    loading: groups.Loading,
    printing: groups.Printing,
) -> None:
    """Say which head links X to Y: verbs to objects, pronouns to what they mean, brackets to brackets.

    - `attnscope relations sample_texts/dependencies.conllu --examples 3`
    - `attnscope relations 'treebank/*.conllu.gz' --only nsubj,obj -o out`
    - `attnscope relations sample_texts/library.py --chunk 40`
    """
    from attnscope.studies.relation_files import RelationsOrder, study

    order = RelationsOrder(tuple(files), kind, unit, only, chunk, stride, examples, **vars(where))
    load = loading.options()
    shared = running.share(model, load)
    with options.progress(printing.quiet) as report:
        found, paths = study(model, order, load, report, shared)
    options.say(found.run.get("notes", ()), printing.quiet)
    print_relations(found, paths, printing.json)
    options.fail_if_not_whole(found.corpus, found.run)


def print_relations(found: "Relations", paths: list[Path], json: bool) -> None:
    """The result on stdout: one JSON document; else the table, the examples, and the paths."""
    if json:
        options.print_document(found.as_json(), paths)
        return
    from attnscope.views.plain_text import open_console
    from attnscope.views.relations_terminal import examples, table

    console = open_console()
    console.print(table(found, console))
    if found.examples:
        console.print(examples(found))
    options.print_paths(paths)


def show_saved(saved: options.Saved) -> None:
    """Shows a record of relations again."""
    from attnscope.records.relations import load
    from attnscope.studies.relation_files import drawn_again

    loaded = load(saved.record)
    paths = drawn_again(loaded, saved.out, saved.formats)
    options.say(loaded.run.get("notes", ()), saved.quiet)
    print_relations(loaded, paths, saved.json)
