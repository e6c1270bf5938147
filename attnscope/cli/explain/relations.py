"""`attnscope relations`."""

from typing import Annotated

import typer

from attnscope.cli import groups, options


@groups.command(omit=("scale", "cmap"))
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
    combine: Annotated[
        bool, typer.Option("--combine", help="Also try combined heads: the mean of several, a regression over all.")
    ] = False,
    where: groups.Where,
    drawing: groups.Drawing,
    running: groups.Running,
    loading: groups.Loading,
    printing: groups.Printing,
) -> None:
    """Say which head links X to Y: verbs to objects, pronouns to what they mean, brackets to brackets.

    - `attnscope relations sample_texts/dependencies.conllu --examples 3`
    - `attnscope relations 'treebank/*.conllu.gz' --only nsubj,obj -o out`
    - `attnscope relations sample_texts/library.py --chunk 40`
    - `attnscope relations contacts.jsonl -m ./esm2 --combine`
    """
    from attnscope.studies.relations.order import RelationsOrder, study

    output = where.plan("relations", printing, **drawing.options())
    order, load = RelationsOrder(tuple(files), kind, unit, only, chunk, stride, examples, combine), loading.options()
    shared = running.share(model, load)
    with options.progress(printing.quiet) as report:
        found = study(model, order, load, report, shared)
    output.deliver(found)
