"""`attnscope relations`."""

from typing import Annotated

from attnscope.cli import groups, options
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.relations.options import AnnotationOptions, RelationsOptions
from attnscope.studies.running.options import SharedWork


@groups.command(omit=("scale", "cmap"))
def relations(
    *,
    files: Annotated[
        list[str], "Annotated files or patterns: .conllu, .jsonl with links, .py; also gzipped; - is stdin."
    ],
    annotation: AnnotationOptions,
    model: groups.Model = "minilm",
    order: RelationsOptions,
    where: groups.Where,
    drawing: groups.Drawing,
    running: SharedWork,
    loading: LoadOptions,
    printing: groups.Printing,
) -> None:
    """Find the heads that link X to Y: verbs to subjects, pronouns to names, brackets, quotes.

    - `attnscope relations sample_texts/dependencies.conllu --examples 3`
    - `attnscope relations 'treebank/*.conllu.gz' --only nsubj,obj -o out`
    - `attnscope relations sample_texts/library.py --chunk 40`
    - `attnscope relations contacts.jsonl -m ./esm2`
    """
    from attnscope.studies.relations.sounds import is_spoken, study_recordings
    from attnscope.studies.relations.study import study_files

    output = where.plan("relations", printing, **drawing.options())
    shared = running.share(model, loading)
    with options.progress(printing.quiet) as report:
        if is_spoken(files):
            record = study_recordings(model, files, order, loading, report)
        else:
            record = study_files(model, files, annotation, order, loading, report, shared)
    output.deliver(record)
