"""From what the command line asks of a heatmap to its record; drawing is got ready while the model still loads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from attnscope import models
from attnscope.drawing.style import Style
from attnscope.models.catalog import read_config
from attnscope.models.info import ModelInfo
from attnscope.models.own.layouts import native_info
from attnscope.questions.heatmap import Heatmap
from attnscope.questions.pooled import PooledHeatmap
from attnscope.results.kinds import SIZES
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.provenance import fingerprint
from attnscope.studies.inputs.reading import Given, Prompt, Reading, encode_within, read, reader_of
from attnscope.studies.maps.options import MapOptions
from attnscope.studies.maps.pooled import CELLS, POOLED_OVER, longest, pool_maps
from attnscope.studies.maps.study import apply_changes, outline, run_model
from attnscope.studies.maps.word_times import heads_to_follow, time_words
from attnscope.text import slug
from attnscope.views.maps.pages import require_query


def study(
    spec: str, given: Given, options: MapOptions, loading: LoadOptions, foresee: Callable[[Heatmap], None] | None = None
) -> Heatmap | PooledHeatmap:
    """Loads a model, and runs it on a text, a photo or a recording.

    If the model's files tell what the record will be like but for its weights, `foresee` gets that before the model is
    loaded.
    """
    options.require_for(given)
    never_pooled = bool(options.exact_only)
    source = loading.resolve(spec)

    def cells(n_tokens: int, path: str = "seam") -> int:
        """The most rows and columns of cells; 0 = maps are not pooled."""
        if options.pooled is not None:
            return options.pooled
        return CELLS if n_tokens > POOLED_OVER and path == "seam" and not never_pooled else 0

    def sketch(info: ModelInfo, reading: Reading) -> Heatmap:
        """The record without weights."""
        return outline(info, reading, options.choice.within(info), options.cut)

    change = partial(apply_changes, hide_special=options.hide_special, words=options.words)
    if foresee is not None and (foreseen := _foresee(source, given, loading)) is not None:
        info, reading = foreseen
        if not cells(len(reading.tokens)):
            foresee(change(sketch(info, reading)))
    if isinstance(given, Prompt) and not options.pooled:
        model = loading.load_to_look(source, [given])
    else:
        model = reader_of(loading.load(source), given)
    chosen = options.choice.within(model.info)
    followed = heads_to_follow(model, chosen.picked) if options.times else ()
    reading = read(model, given)
    if isinstance(given, Prompt) and (n_cells := cells(longest(reading), model.info.path)):
        return pool_maps(model, reading, chosen, n_cells, options.pool)
    record = sketch(model.info, reading)
    require_query(change(record), options.query)  # before the model runs
    record = run_model(model, record, reading)
    return change(time_words(record, followed) if options.times else record)


def _foresee(source: models.Source, given: Given, loading: LoadOptions) -> tuple[ModelInfo, Reading] | None:
    """The model and what it reads, known from the model's files alone; None if they do not tell.

    It may be wrong without harm: what is drawn in the end depends on the true record only.
    """
    tokenizer = None if loading.engine == "hf" else models.open_tokenizer(source)
    if tokenizer is None or not isinstance(given, Prompt) or given != Prompt(given.text, given.pair):
        return None
    info = native_info(source, read_config(source), sha256="")
    text, tokens, cut = encode_within(info.max_tokens, tokenizer.encode, given.text, given.pair)
    return info, Reading(text, tokens, None, (cut,) if cut else ())


def home_of(record: Heatmap | PooledHeatmap, query: str | None, style: Style) -> Path:
    """The name of the record's own folder: `<model>-<slug of the text>-<8 hex of text, model and options>`."""
    marks: dict[str, object] = {"query": query, "scale": style.scale, "cmap": style.cmap}
    marks |= {name: getattr(style, name) for name in SIZES if getattr(style, name) != getattr(Style, name)}
    if isinstance(record, PooledHeatmap):
        marks["cells"] = list(record.maps[0].cells.shape[2:])
    elif record.maps[0].part is not None:
        marks["part"] = list(record.maps[0].part)
    return Path(f"{slug(str(record.run['model']))}-{slug(record.text)}-{fingerprint(record, **marks)}")
