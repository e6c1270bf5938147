"""From a text to the files of a rollout, and from a saved one to its figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from attnscope.errors import UsageError
from attnscope.records.pictures import MEAN
from attnscope.records.rollouts import Rollout
from attnscope.senses.photos import read_photo
from attnscope.studies.inputs import LoadOptions, named_formats, require_writable
from attnscope.views.figures import FIGURE_FORMATS, Style

FORMATS = (*FIGURE_FORMATS, "npz", "json")
USUAL_FORMATS = ("npz", "png")
RECORD = "rollout"


@dataclass(frozen=True)
class RolloutFiles:
    """What is written of a rollout.

    Attributes:
        out: The folder; None = nothing is written.
        formats: Some of "png", "svg", "pdf", "npz", "json".
        style: How figures are coloured.
        query: A token whose row is drawn as bars too.
    """

    out: Path | None = None
    formats: tuple[str, ...] = USUAL_FORMATS
    style: Style = Style("figure")
    query: str | None = None


def write_rollout(
    spec: str,
    text: str,
    files: RolloutFiles,
    loading: LoadOptions,
    *,
    residual: float = 0.5,
    flow: bool | None = None,
    report: Callable[[int, int], None] | None = None,
) -> tuple[Rollout, list[Path]]:
    """Loads a model, finds rollout and flow, and writes the files that are wanted.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    from attnscope.studies.rollout import rollout

    if files.out is not None:
        require_writable(files.out)
    found = rollout(loading.load(spec), text, residual=residual, query=files.query, flow=flow, report=report)
    return found, [] if files.out is None else write(found, files.out, files)


def write_picture_rollout(
    spec: str, image: Path, files: RolloutFiles, loading: LoadOptions, *, residual: float = 0.5
) -> tuple[Rollout, list[Path]]:
    """Loads a vision model, finds the rollout over a photo, and writes the files that are wanted.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    from attnscope.studies.rollout import picture_rollout

    if files.out is not None:
        require_writable(files.out)
    photo = read_photo(image)  # before the model takes its time
    found = picture_rollout(loading.load(spec), photo, residual=residual)
    require_query(found, files.query)
    return found, [] if files.out is None else write(found, files.out, files)


def require_query(found: Rollout, query: str | None) -> None:
    """Refuses a query that no token is meant by.

    Raises:
        AttnscopeError: There is none.
    """
    if query is not None and not (found.picture is not None and query.casefold() == MEAN):
        found.require(query)


def write(found: Rollout, out: Path, files: RolloutFiles) -> list[Path]:
    """Writes a rollout into a folder; each file whole or not at all."""
    paths = [found.save(out / f"{RECORD}.{name}") for name in files.formats if name not in FIGURE_FORMATS]
    figures = [name for name in files.formats if name in FIGURE_FORMATS]
    if figures:
        from attnscope.views.rollout_figures import draw

        paths += draw(found, out, figures, style=files.style, query=files.query)
    return paths


def drawn_again(found: Rollout, formats: str | None, files: RolloutFiles) -> list[Path]:
    """Writes the files of a rollout that was saved before; `text` is what is printed anyway.

    Raises:
        AttnscopeError: There is no such format or token, or no folder for it.
    """
    names = [name for name in (formats or "png").split(",") if name.strip() and name.strip().lower() != "text"]
    require_query(found, files.query)
    if files.out is None:
        if formats is not None and names:
            raise UsageError("there is no folder to write files to", "give one with --out, or leave out --format")
        return []
    wanted = formats_from(",".join(names)) if names else ()
    require_writable(files.out)
    return write(found, files.out, replace(files, formats=wanted))


def formats_from(given: str | None) -> tuple[str, ...]:
    """The formats in a list such as `npz,png`; None = the usual ones.

    Raises:
        UsageError: There is no such format.
    """
    return USUAL_FORMATS if given is None else named_formats(given, FORMATS)
