"""`attnscope relations`."""

from attnscope.cli.progress import progress
from attnscope.cli.shared import Chosen, Drawing, Files
from attnscope.options import option, options
from attnscope.questions.relations import AnnotationOptions, RelationsOptions
from attnscope.studies.inputs.options import SharedWork


@options
class AnnotatedFiles(AnnotationOptions):
    """Annotated files, and how they are read."""

    files: tuple[str, ...] = option(
        "Annotated files or patterns: .conllu, .jsonl with links, .py; also gzipped; - is stdin.",
        default=(), argument=True, needed=True,
    )  # fmt: skip


def relations(
    *,
    source: AnnotatedFiles,
    order: RelationsOptions,
    model: Chosen,
    running: SharedWork,
    drawing: Drawing,
    files: Files,
) -> None:
    """Find the heads that link X to Y: verbs to subjects, pronouns to names, brackets, quotes.

    - `attnscope relations sample_texts/dependencies.conllu --examples 3`
    - `attnscope relations 'treebank/*.conllu.gz' --only nsubj,obj -o out`
    - `attnscope relations sample_texts/library.py --chunk 40`
    - `attnscope relations contacts.jsonl -m ./esm2`
    """
    from attnscope.studies.relations.sounds import is_spoken, study_recordings
    from attnscope.studies.relations.study import study_files

    output = files.plan("relations", **drawing.changes())
    shared = running.share(model.model, model.loading)
    named = list(source.files)
    with progress(files.quiet) as report:
        if is_spoken(named):
            record = study_recordings(model.model, named, order, model.loading, report)
        else:
            record = study_files(model.model, named, source, order, model.loading, report, shared)
    output.deliver(record)
