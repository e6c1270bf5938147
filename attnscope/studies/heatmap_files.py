"""From a text to heatmap files in one go, with drawing got ready while the model still loads."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attnscope import models
from attnscope.errors import UsageError
from attnscope.models.catalog import read_config
from attnscope.models.layouts import native_info
from attnscope.records import Heatmap
from attnscope.records.pooled import PooledHeatmap
from attnscope.studies.choice import Choice, Cut
from attnscope.studies.heatmap import apply_changes, outline, run_model
from attnscope.studies.inputs import LoadOptions, named_formats, require_writable
from attnscope.studies.pooled import CELLS, POOLED_OVER, longest, pool_maps, require_cells
from attnscope.studies.provenance import fingerprint
from attnscope.studies.reading import Prompt, Reading, read, truncate
from attnscope.text import slug
from attnscope.views.figures import draw
from attnscope.views.heatmap_figures import sheets_of
from attnscope.views.process import DrawingProcess
from attnscope.views.style import FIGURE_FORMATS, Style

FILE_FORMATS = (*FIGURE_FORMATS, "npz", "json")
DEFAULT_HOME = Path("attnscope-out")


@dataclass(frozen=True)
class Wanted:
    """What is to be made of a text.

    Attributes:
        choice: Which heads.
        formats: Which files: some of "png", "svg", "pdf", "npz", "json"; may be empty.
        out: The folder for them; None = one under `attnscope-out/` named after model, text and options.
        style: How figures are coloured.
        query: A token whose attention is drawn as bars too.
        words: Whether word pieces are merged.
        hide_special: Whether special tokens are hidden.
        cut: Which part of the map.
        pooled: Rows and columns of cells that maps are pooled to, at most; 0 = not pooled; None = pooled where the text
            is too long for labels, unless something is asked for that pooled maps do not have.
        pool: What a cell shows: "mean" or "max".
    """

    choice: Choice
    formats: tuple[str, ...] = ("png",)
    out: Path | None = None
    style: Style = Style()
    query: str | None = None
    words: bool = False
    hide_special: bool = False
    cut: Cut = Cut()
    pooled: int | None = None
    pool: str = "mean"

    def __post_init__(self) -> None:
        if self.pooled:
            require_cells(self.pooled, self.pool)
            for name, given in self._exact_only():
                if given:
                    raise UsageError(f"pooled maps have no {name}", "leave out one of them")
        else:
            require_cells(CELLS, self.pool)

    def _exact_only(self) -> tuple[tuple[str, object], ...]:
        return (
            ("--words", self.words),
            ("--hide-special", self.hide_special),
            ("--query", self.query),
            ("part (--rows, --cols)", self.cut),
        )

    def cells(self, n_tokens: int, road: str = "seam") -> int:
        """To how many rows and columns the maps of a text of so many tokens are pooled; 0 = they are not."""
        if self.pooled is not None:
            return self.pooled
        wants_exact = any(given for _, given in self._exact_only()) or road != "seam"
        return CELLS if n_tokens > POOLED_OVER and not wants_exact else 0


def write_heatmap(
    spec: str, prompt: Prompt, wanted: Wanted, loading: LoadOptions
) -> tuple[Heatmap | PooledHeatmap, list[Path]]:
    """Loads a model, runs it on a prompt, and writes the files that are wanted.

    Returns:
        The record, and the files.

    Raises:
        AttnscopeError: Anything that the user can mend; no file is half-written then.
    """
    source = loading.resolve(spec)
    with contextlib.ExitStack() as stack:
        drawing: DrawingProcess | None = None
        if wanted.formats:
            require_writable(wanted.out or DEFAULT_HOME)
        if any(name in FIGURE_FORMATS for name in wanted.formats):
            drawing = stack.enter_context(DrawingProcess())
            foreseen = _foreseen(source, prompt, wanted, loading)
            if foreseen is not None:
                drawing.expect(foreseen, wanted.style, wanted.query, wanted.formats)
        model = loading.load(source)
        chosen, reading = wanted.choice.within(model.info), read(model, prompt)
        if cells := wanted.cells(longest(reading), model.info.path):
            long = pool_maps(model, reading, chosen, cells, wanted.pool)
            return long, _write_pooled(long, wanted)
        record = run_model(model, outline(model.info, reading, chosen, wanted.cut), reading)
        record = apply_changes(record, hide_special=wanted.hide_special, words=wanted.words)
        sheets_of(record, wanted.query)  # an unknown query is said before anything is written
        return record, _write(record, wanted, drawing)


def redraw(record: Heatmap, out: Path, formats: Sequence[str], style: Style, query: str | None) -> list[Path]:
    """Writes the files of a record that was saved before."""
    if record.sound is not None:
        from attnscope.studies.sound_files import redraw as redraw_sound

        return redraw_sound(record, out, formats, style, query)
    if record.picture is not None:
        from attnscope.studies.picture_files import redraw as redraw_picture

        return redraw_picture(record, out, formats, style, query)
    figures = [name for name in formats if name in FIGURE_FORMATS]
    paths = draw(record, out, figures, style=style, query=query)
    return paths + save_data(record, out, formats)


def require_query(record: Heatmap, query: str | None) -> None:
    """Refuses a query that no token is meant by.

    Raises:
        AttnscopeError: There is none.
    """
    if record.sound is not None and query is not None:
        raise UsageError("over time every token has its row: there is no --query", "leave it out")
    if record.picture is None:
        sheets_of(record, query)
        return
    from attnscope.views.picture_figures import query_of

    query_of(record.maps[0], query)


def redraw_pooled(record: PooledHeatmap, out: Path, formats: Sequence[str], style: Style) -> list[Path]:
    """Writes the files of a pooled record."""
    figures = [name for name in formats if name in FIGURE_FORMATS]
    # What took the time is safe before it is drawn.
    saved = save_data(record, out, formats)
    return draw(record, out, figures, style=style) + saved


def _foreseen(source: models.Source, prompt: Prompt, wanted: Wanted, loading: LoadOptions) -> Heatmap | None:
    """The record as it will be but for its weights, told from the model's files alone; None where that cannot be.

    It may be wrong without harm: what is drawn in the end depends on the true record only.
    """
    tokenizer = None if loading.engine == "hf" else models.open_tokenizer(source)
    if tokenizer is None or prompt != Prompt(prompt.text, prompt.pair):
        return None
    info = native_info(source, read_config(source), sha256="")
    tokens, cut = truncate(tokenizer.encode(prompt.text, prompt.pair), info.max_tokens)
    if wanted.cells(len(tokens)):
        return None
    reading = Reading(prompt.text, tokens, None, (cut,) if cut else ())
    record = outline(info, reading, wanted.choice.within(info), wanted.cut)
    return apply_changes(record, hide_special=wanted.hide_special, words=wanted.words)


def _write(record: Heatmap, wanted: Wanted, drawing: DrawingProcess | None) -> list[Path]:
    folder = wanted.out or DEFAULT_HOME / folder_name(record, wanted)
    figures = [name for name in wanted.formats if name in FIGURE_FORMATS]
    paths: list[Path] = []
    if drawing is not None:
        paths += drawing.draw(record, folder, figures, style=wanted.style, query=wanted.query)
    return paths + save_data(record, folder, wanted.formats)


def _write_pooled(record: PooledHeatmap, wanted: Wanted) -> list[Path]:
    folder = wanted.out or DEFAULT_HOME / folder_name(record, wanted)
    return redraw_pooled(record, folder, wanted.formats, wanted.style)


def save_data(record: Heatmap | PooledHeatmap, folder: Path, formats: Sequence[str]) -> list[Path]:
    """Writes those files of a record that hold its weights: of "npz" and "json" what is among the formats."""
    files = {"npz": "weights.npz" if isinstance(record, Heatmap) else "pooled.npz", "json": "record.json"}
    return [record.save(folder / files[name]) for name in formats if name in files]


def folder_name(record: Heatmap | PooledHeatmap, wanted: Wanted) -> str:
    """`<model>-<slug of the text>-<8 hex of text, model and options>`."""
    style: dict[str, object] = {"query": wanted.query, "scale": wanted.style.scale, "cmap": wanted.style.cmap}
    if isinstance(record, PooledHeatmap):
        style["cells"] = list(record.maps[0].cells.shape[2:])
    elif record.maps[0].part is not None:
        style["part"] = list(record.maps[0].part)
    mark = fingerprint(record, **style)
    return f"{slug(str(record.run['model']))}-{slug(record.text)}-{mark}"


def formats_from(given: str) -> tuple[str, ...]:
    """The formats in a list such as `png,npz`; "text" is one of them.

    Raises:
        UsageError: There is no such format.
    """
    return named_formats(given, (*FILE_FORMATS, "text"))
