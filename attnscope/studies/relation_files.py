"""From annotated files to findings about relations, and from those to files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attnscope.annotated import AnnotatedCorpus
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model
from attnscope.records import relations as records
from attnscope.records.relations import RELATIONS_SCHEMA, Relations
from attnscope.records.storage import schema_of
from attnscope.studies.inputs import LoadOptions, formats_again, named_formats, require_writable
from attnscope.studies.interrupted import settle
from attnscope.studies.relations import RelationsOptions, relations
from attnscope.studies.texts import Report
from attnscope.studies.workers import Workers
from attnscope.views.figures import FIGURE_FORMATS

FORMATS = (*FIGURE_FORMATS, "npz", "csv", "json")
USUAL_FORMATS = ("npz", "csv", "png")
RECORD = "relations"


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
    out: Path | None = None
    formats: str | None = None


def study(
    spec: str, order: RelationsOrder, loading: LoadOptions, report: Report | None, workers: Workers | None = None
) -> tuple[Relations, list[Path]]:
    """Loads a model, studies the relations of annotated files, and writes the files.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    formats = formats_from(order.formats)
    if order.out is None and order.formats is not None:
        raise UsageError("there is no folder to write files to", "give one with --out, or leave out --format")
    corpus = _corpus(order.files, order.kind, order.unit)
    options = RelationsOptions(_labels(order.only), order.chunk, order.stride, order.examples)
    if order.out is not None:
        require_writable(order.out)
    found = relations(loading.load(spec), corpus, options, report, workers)
    found, out = settle(found, order.out, RECORD)
    return found, [] if out is None else write(found, out, formats)


def relations_of(model: Model, file: Path, report: Report | None) -> Relations:
    """The relations of an annotated file, or those that a record of them holds.

    Raises:
        AttnscopeError: It is neither, or no link can be measured.
    """
    if file.is_dir():
        file = file / f"{RECORD}.npz"
    if schema_of(file) == RELATIONS_SCHEMA:
        return records.load(file)
    return relations(model, _corpus((str(file),), "auto", "sentence"), report=report)


def require_relations(file: Path) -> None:
    """Refuses a file that cannot hold relations, before the model runs for minutes.

    Raises:
        AttnscopeError: It is not there, or its name does not tell how it is annotated.
    """
    if not file.exists():
        raise AttnscopeError(f"there is no file {file}", "give annotated texts, or a relations.npz")
    if not file.is_dir() and schema_of(file) != RELATIONS_SCHEMA:
        _corpus((str(file),), "auto", "sentence")


def drawn_again(found: Relations, out: Path | None, formats: str | None) -> list[Path]:
    """Writes the files of relations that were saved before; `text` is what is printed anyway.

    Raises:
        AttnscopeError: There is no such format, or no folder for it.
    """
    wanted = formats_again(out, formats, FORMATS)
    return [] if out is None else write(found, out, wanted)


def write(found: Relations, out: Path, formats: Sequence[str]) -> list[Path]:
    """Writes relations into a folder; each file whole or not at all. What took the time is safe before it is drawn."""
    paths = [found.save(out / f"{RECORD}.{name}") for name in formats if name not in FIGURE_FORMATS]
    figures = [name for name in formats if name in FIGURE_FORMATS]
    if figures and found.relations:
        from attnscope.views.relations_figures import draw

        paths += draw(found, out, figures)
    return paths


def formats_from(given: str | None) -> tuple[str, ...]:
    """The formats in a list such as `npz,csv,png`; None = the usual ones.

    Raises:
        UsageError: There is no such format.
    """
    return USUAL_FORMATS if given is None else named_formats(given, FORMATS)


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
