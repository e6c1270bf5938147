"""From annotated files to findings about relations, and from those to files."""

from dataclasses import dataclass
from pathlib import Path

from attnscope.annotated import AnnotatedCorpus
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model
from attnscope.records import file_of
from attnscope.records.frame.reading import schema_of
from attnscope.records.relations.record import Relations
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.texts import Report
from attnscope.studies.relations.sounds import is_spoken, require_no_options, sound_relations
from attnscope.studies.relations.study import RelationsOptions, relations
from attnscope.studies.running.workers import Workers


@dataclass(frozen=True)
class RelationsOrder:
    """What the command line asks for; see `attnscope relations --help`."""

    files: tuple[str, ...]
    kind: str = "auto"
    unit: str = "sentence"
    only: str | None = None
    chunk: int | None = None
    stride: int | None = None
    examples: int = 0
    combine: bool = False


def study(
    spec: str, order: RelationsOrder, loading: LoadOptions, report: Report | None, workers: Workers | None = None
) -> Relations:
    """Loads a model, and studies the relations of annotated files.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    if is_spoken(order.files):
        require_no_options(order)
        return sound_relations(loading.load(spec), order.files, report)
    corpus = _corpus(order.files, order.kind, order.unit)
    options = RelationsOptions(_labels(order.only), order.chunk, order.stride, order.examples, order.combine)
    return relations(loading.load(spec), corpus, options, report, workers)


def relations_of(model: Model, file: Path, report: Report | None) -> Relations:
    """The relations of an annotated file, or those that a record of them holds.

    Raises:
        AttnscopeError: It is neither, or no link can be measured.
    """
    file = file_of(file)
    if schema_of(file) == Relations.SCHEMA:
        return Relations.load(file)
    return relations(model, _corpus((str(file),), "auto", "sentence"), report=report)


def require_relations(file: Path) -> None:
    """Refuses a file that cannot hold relations, before the model runs for minutes.

    Raises:
        AttnscopeError: It is not there, or its name does not tell how it is annotated.
    """
    if not file.exists():
        raise AttnscopeError(f"there is no file {file}", "give annotated texts, or a relations.npz")
    if not file.is_dir() and schema_of(file) != Relations.SCHEMA:
        _corpus((str(file),), "auto", "sentence")


def _corpus(files: tuple[str, ...], kind: str, unit: str) -> AnnotatedCorpus:
    try:
        return AnnotatedCorpus(files, kind=kind, unit=unit)
    except AttnscopeError as error:
        raise UsageError(error.message, error.hint) from None


def _labels(given: str | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    labels = tuple(part.strip() for part in given.split(",") if part.strip())
    if not labels:
        raise UsageError("no relation is named", "such as --only nsubj,obj")
    return labels
