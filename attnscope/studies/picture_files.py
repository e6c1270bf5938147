"""From a photo to heatmap files in one go, and from a saved record to its figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attnscope.errors import UsageError
from attnscope.records import Heatmap
from attnscope.senses.photos import read_photo
from attnscope.studies.heatmap import apply_changes, outline, run_model
from attnscope.studies.heatmap_files import DEFAULT_HOME, Wanted, folder_name, save_data
from attnscope.studies.inputs import LoadOptions, require_writable
from attnscope.studies.reading import read, reader_of
from attnscope.views.figures import FIGURE_FORMATS, Style


def write_picture(spec: str, image: Path, wanted: Wanted, loading: LoadOptions) -> tuple[Heatmap, list[Path]]:
    """Loads a vision model, runs it on a photo, and writes the files that are wanted.

    Raises:
        AttnscopeError: Anything that the user can mend; no file is half-written then.
    """
    from attnscope.views.picture_figures import sheets_of

    for option, given in (
        ("--words", wanted.words),
        ("--rows or --cols", bool(wanted.cut)),
        ("--pooled", wanted.pooled),
    ):
        if given:
            raise UsageError(f"a picture has no {option}", "leave it out, or leave out --image")
    if wanted.formats:
        require_writable(wanted.out or DEFAULT_HOME)
    photo = read_photo(image)  # before the model takes its time
    model = reader_of(loading.load(spec), photo)
    chosen, reading = wanted.choice.within(model.info), read(model, photo)
    record = outline(model.info, reading, chosen)
    sheets_of(record, wanted.query)  # an unknown query is said before the model runs
    record = apply_changes(run_model(model, record, reading), hide_special=wanted.hide_special)
    folder = wanted.out or DEFAULT_HOME / folder_name(record, wanted)
    return record, redraw(record, folder, wanted.formats, wanted.style, wanted.query)


def redraw(record: Heatmap, out: Path, formats: Sequence[str], style: Style, query: str | None) -> list[Path]:
    """Writes the files of a record."""
    from attnscope.views.figures import draw

    figures = [name for name in formats if name in FIGURE_FORMATS]
    return draw(record, out, figures, style=style, query=query) + save_data(record, out, formats)
