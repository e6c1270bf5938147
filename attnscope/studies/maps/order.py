"""From what the command line asks of a heatmap to its record; drawing is got ready while the model still loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from attnscope import models
from attnscope.errors import UsageError
from attnscope.models.catalog import read_config
from attnscope.models.own.layouts import native_info
from attnscope.records import Heatmap
from attnscope.records.frame.kinds import SIZES
from attnscope.records.maps.pooled import PooledHeatmap
from attnscope.studies.inputs.choice import Choice, Cut
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.provenance import fingerprint
from attnscope.studies.inputs.reading import Given, Prompt, Reading, Speech, View, read, reader_of, truncate
from attnscope.studies.maps.pooled import CELLS, POOLED_OVER, longest, pool_maps, require_cells
from attnscope.studies.maps.study import apply_changes, outline, run_model
from attnscope.studies.maps.word_times import heads_to_follow, time_words
from attnscope.text import slug
from attnscope.views.drawing.style import Style
from attnscope.views.maps.pages import require_query


@dataclass(frozen=True)
class MapOrder:
    """What is asked of the maps of a text, a photo or a recording.

    Attributes:
        choice: Which heads.
        query: A token whose attention is shown too.
        words: Whether word pieces are merged.
        hide_special: Whether special tokens are hidden.
        cut: Which part of the map.
        pooled: Rows and columns of cells that maps are pooled to, at most; 0 = not pooled; None = pooled where the text
            is too long for labels, unless something is asked for that pooled maps do not have.
        pool: What a cell shows: "mean" or "max".
        times: Whether the words of a recording are timed.
    """

    choice: Choice
    query: str | None = None
    words: bool = False
    hide_special: bool = False
    cut: Cut = Cut()
    pooled: int | None = None
    pool: str = "mean"
    times: bool = False

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

    def require_for(self, given: Given) -> None:
        """Refuses what a photo or a recording does not have.

        Raises:
            UsageError: It is asked for.
        """
        if self.times and not isinstance(given, Speech):
            raise UsageError("only the words of a recording are timed", "leave out --times, or give --audio")
        if isinstance(given, Prompt):
            return
        lacking = {"--words": self.words, "--rows or --cols": self.cut, "--pooled": self.pooled}
        what, option = ("recording", "--audio") if isinstance(given, Speech) else ("picture", "--image")
        if isinstance(given, View):
            lacking = {"--cols": self.cut.cols, "--pooled": self.pooled, "--hide-special": self.hide_special}
        if isinstance(given, Speech):
            lacking |= {"--query": self.query, "--hide-special": self.hide_special}
        for name, asked in lacking.items():
            if asked:
                raise UsageError(f"a {what} has no {name}", f"leave it out, or leave out {option}")

    def cells(self, n_tokens: int, path: str = "seam") -> int:
        """To how many rows and columns the maps of a text of so many tokens are pooled; 0 = they are not."""
        if self.pooled is not None:
            return self.pooled
        wants_exact = any(given for _, given in self._exact_only()) or path != "seam"
        return CELLS if n_tokens > POOLED_OVER and not wants_exact else 0


def study(
    spec: str,
    given: Given,
    order: MapOrder,
    loading: LoadOptions,
    foresee: Callable[[Heatmap], None] | None = None,
) -> Heatmap | PooledHeatmap:
    """Loads a model, and runs it on a text, a photo or a recording.

    Args:
        spec: The model.
        given: What it reads.
        order: What is asked of its maps.
        loading: How it is loaded.
        foresee: Is told before the model is loaded what the record will be like but for its weights, where that is
            known.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    order.require_for(given)
    source = loading.resolve(spec)
    if foresee is not None and (foreseen := _foresee(source, given, order, loading)) is not None:
        foresee(foreseen)
    if isinstance(given, Prompt) and not order.pooled:
        model = loading.load_to_look(source, [given])
    else:
        model = reader_of(loading.load(source), given)
    chosen = order.choice.within(model.info)
    followed = heads_to_follow(model, chosen.picked) if order.times else ()
    reading = read(model, given)
    if isinstance(given, Prompt) and (cells := order.cells(longest(reading), model.info.path)):
        return pool_maps(model, reading, chosen, cells, order.pool)
    record = outline(model.info, reading, chosen, order.cut)
    # An unknown query is said before the model runs.
    require_query(apply_changes(record, hide_special=order.hide_special, words=order.words), order.query)
    made = run_model(model, record, reading)
    made = time_words(made, followed) if order.times else made
    return apply_changes(made, hide_special=order.hide_special, words=order.words)


def _foresee(source: models.Source, given: Given, order: MapOrder, loading: LoadOptions) -> Heatmap | None:
    """The record as it will be but for its weights, known from the model's files alone; None where that cannot be.

    It may be wrong without harm: what is drawn in the end depends on the true record only.
    """
    tokenizer = None if loading.engine == "hf" else models.open_tokenizer(source)
    if tokenizer is None or not isinstance(given, Prompt) or given != Prompt(given.text, given.pair):
        return None
    info = native_info(source, read_config(source), sha256="")
    tokens, cut = truncate(tokenizer.encode(given.text, given.pair), info.max_tokens)
    if order.cells(len(tokens)):
        return None
    reading = Reading(given.text, tokens, None, (cut,) if cut else ())
    record = outline(info, reading, order.choice.within(info), order.cut)
    return apply_changes(record, hide_special=order.hide_special, words=order.words)


def home_of(record: Heatmap | PooledHeatmap, order: MapOrder, style: Style) -> Path:
    """How its own folder is called: `<model>-<slug of the text>-<8 hex of text, model and options>`."""
    chosen: dict[str, object] = {"query": order.query, "scale": style.scale, "cmap": style.cmap}
    chosen |= {name: getattr(style, name) for name in SIZES if getattr(style, name) != getattr(Style, name)}
    if isinstance(record, PooledHeatmap):
        chosen["cells"] = list(record.maps[0].cells.shape[2:])
    elif record.maps[0].part is not None:
        chosen["part"] = list(record.maps[0].part)
    return Path(f"{slug(str(record.run['model']))}-{slug(record.text)}-{fingerprint(record, **chosen)}")
