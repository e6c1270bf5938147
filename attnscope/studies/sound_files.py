"""From a recording to heatmap files in one go, and from a saved record to its figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attnscope.errors import UsageError
from attnscope.records import Heatmap
from attnscope.senses.recordings import read_recording
from attnscope.studies import picture_files
from attnscope.studies.heatmap import outline, run_model
from attnscope.studies.heatmap_files import DEFAULT_HOME, Wanted, folder_name, save_data
from attnscope.studies.inputs import LoadOptions, require_writable
from attnscope.studies.reading import Speech, read
from attnscope.views.figures import FIGURE_FORMATS, Style


def write_sound(
    spec: str, audio: Path, text: str | None, wanted: Wanted, loading: LoadOptions
) -> tuple[Heatmap, list[Path]]:
    """Loads a speech model, runs it on a recording, and writes the files that are wanted.

    Raises:
        AttnscopeError: Anything that the user can mend; no file is half-written then.
    """
    for option, given in (
        ("--query", wanted.query),
        ("--words", wanted.words),
        ("--hide-special", wanted.hide_special),
        ("--rows or --cols", bool(wanted.cut)),
        ("--pooled", wanted.pooled),
    ):
        if given:
            raise UsageError(f"a recording has no {option}", "leave it out, or leave out --audio")
    if wanted.formats:
        require_writable(wanted.out or DEFAULT_HOME)
    recording = read_recording(audio)  # before the model takes its time
    model = loading.load(spec)
    chosen, reading = wanted.choice.within(model.info), read(model, Speech(recording, text))
    record = run_model(model, outline(model.info, reading, chosen), reading)
    folder = wanted.out or DEFAULT_HOME / folder_name(record, wanted)
    return record, redraw(record, folder, wanted.formats, wanted.style, None)


def redraw(record: Heatmap, out: Path, formats: Sequence[str], style: Style, query: str | None) -> list[Path]:
    """Writes the files of a record."""
    if record.picture is not None:  # a spectrogram
        return picture_files.redraw(record, out, formats, style, query)
    from attnscope.views.figures import draw

    figures = [name for name in formats if name in FIGURE_FORMATS]
    return draw(record, out, figures, style=style, query=query) + save_data(record, out, formats)
