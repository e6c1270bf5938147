"""Run `attnscope relations`."""

from attnscope.cli.progress import progress
from attnscope.cli.shared import DrawingOptions, FileOptions, ModelOptions
from attnscope.errors import UsageError
from attnscope.options import option, options
from attnscope.questions.relations import AnnotationOptions, RelationsOptions
from attnscope.studies.inputs.options import WorkerOptions


@options
class AnnotatedFiles(AnnotationOptions):
    """Hold annotated files, and how they are read."""

    files: tuple[str, ...] = option(
        "Annotated files or patterns: .conllu, .jsonl with links, .py; also gzipped; - is stdin.",
        default=(),
        argument=True,
        is_required=True,
    )


def relations(
    *,
    source: AnnotatedFiles,
    order: RelationsOptions,
    model: ModelOptions,
    running: WorkerOptions,
    drawing: DrawingOptions,
    files: FileOptions,
) -> None:
    """Find the heads that link X to Y: verbs to subjects, pronouns to names, brackets, quotes.

    - `attnscope relations sample_texts/dependencies.conllu`
    - `attnscope relations 'treebank/*.conllu.gz' --only nsubj,obj -o out`
    - `attnscope relations sample_texts/library.py --chunk 40`
    - `attnscope relations contacts.jsonl -m ./esm2`
    """
    from attnscope.annotated import AnnotatedCorpus
    from attnscope.studies.relations import sounds, study

    # Plan the output before the model loads.
    output = files.plan("relations", **drawing.changes())
    workers = running.share(model.model, model.loading)
    patterns = list(source.files)
    with progress(files.quiet) as report:
        # Recordings have a single relation: from a written token to the frame in which it is spoken.
        if sounds.has_word_times(patterns):
            if order != RelationsOptions():
                raise UsageError("of recordings one relation is asked", "leave out --only and --chunk")
            record = sounds.sound_relations(model.load(), patterns, report)
        else:
            corpus = AnnotatedCorpus(patterns, kind=source.kind, unit=source.unit)
            record = study.relations(model.load(), corpus, order, report, workers)
    output.deliver(record)
