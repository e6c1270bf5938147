"""Run `attnscope relations`: find the heads that follow annotated links, or the words of recordings."""

from attnscope.cli.progress import progress
from attnscope.cli.shared import DrawingOptions, FileOptions, ModelOptions
from attnscope.errors import UsageError
from attnscope.options import option, options
from attnscope.questions.relations import AnnotationOptions, RelationsOptions
from attnscope.studies.inputs.options import WorkerOptions


@options
class AnnotatedFiles(AnnotationOptions):
    """Hold the names of annotated files, and the options for reading them."""

    files: tuple[str, ...] = option(
        "Annotated files or patterns: .conllu, .jsonl with links, .py; also gzipped; - is stdin.",
        default=(),
        argument=True,
        is_required=True,
    )


def relations(
    *,
    annotated_files: AnnotatedFiles,
    relations_options: RelationsOptions,
    model_options: ModelOptions,
    worker_options: WorkerOptions,
    drawing_options: DrawingOptions,
    file_options: FileOptions,
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
    output = file_options.plan_output("relations", **drawing_options.non_default_options())
    workers = worker_options.make_workers(model_options.model, model_options.loading)
    patterns = list(annotated_files.files)
    with progress(file_options.quiet) as report_progress:
        # A jsonl file may name recordings with their words. Recordings have a single relation: from a token of the
        # transcript to the audio frames in which it is spoken.
        if sounds.has_word_times(patterns):
            if relations_options != RelationsOptions():
                raise UsageError("of recordings one relation is asked", "leave out --only and --chunk")
            record = sounds.sound_relations(model_options.load(), patterns, report_progress)
        else:
            corpus = AnnotatedCorpus(patterns, kind=annotated_files.kind, unit=annotated_files.unit)
            record = study.relations(
                model_options.load(), corpus, relations_options, report_progress, workers
            )
    output.deliver(record)
