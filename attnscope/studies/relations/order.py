"""From annotated files to findings about relations, and from those to files."""

from collections.abc import Sequence
from pathlib import Path

from attnscope.annotated import AnnotatedCorpus
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model
from attnscope.records import file_of
from attnscope.records.frame.reading import schema_of
from attnscope.records.relations.record import Relations
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.texts import Report
from attnscope.studies.relations.options import AnnotationOptions, RelationsOptions
from attnscope.studies.relations.sounds import is_spoken, sound_relations
from attnscope.studies.relations.study import relations
from attnscope.studies.running.workers import Workers


def study(
    spec: str,
    files: Sequence[str],
    annotation: AnnotationOptions,
    options: RelationsOptions,
    loading: LoadOptions,
    report: Report | None,
    workers: Workers | None = None,
) -> Relations:
    """Loads a model, and studies the relations of annotated files, or of recordings with their words.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    if is_spoken(files):
        if options != RelationsOptions():
            raise UsageError("of recordings one relation is asked", "leave out --only, --chunk, --examples, --combine")
        return sound_relations(loading.load(spec), files, report)
    corpus = _corpus(files, annotation)
    return relations(loading.load(spec), corpus, options, report, workers)


def relations_of(model: Model, file: Path, report: Report | None) -> Relations:
    """The relations of an annotated file, or those that a record of them holds.

    Raises:
        AttnscopeError: It is neither, or no link can be measured.
    """
    file = file_of(file)
    if schema_of(file) == Relations.SCHEMA:
        return Relations.load(file)
    return relations(model, _corpus([str(file)], AnnotationOptions()), report=report)


def require_relations(file: Path) -> None:
    """Refuses a file that cannot hold relations, before the model runs for minutes.

    Raises:
        AttnscopeError: It is not there, or its name does not tell how it is annotated.
    """
    if not file.exists():
        raise AttnscopeError(f"there is no file {file}", "give annotated texts, or a relations.npz")
    if not file.is_dir() and schema_of(file) != Relations.SCHEMA:
        _corpus([str(file)], AnnotationOptions())


def _corpus(files: Sequence[str], annotation: AnnotationOptions) -> AnnotatedCorpus:
    try:
        return AnnotatedCorpus(files, kind=annotation.kind, unit=annotation.unit)
    except AttnscopeError as error:
        raise UsageError(error.message, error.hint) from None
