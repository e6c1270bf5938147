"""From what the command line asks of a heatmap to its record; drawing is got ready while the model still loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from attnscope import models
from attnscope.models.catalog import read_config
from attnscope.models.own.layouts import native_info
from attnscope.records import Heatmap
from attnscope.records.frame.kinds import SIZES
from attnscope.records.maps.pooled import PooledHeatmap
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.provenance import fingerprint
from attnscope.studies.inputs.reading import Given, Prompt, Reading, read, reader_of, truncate
from attnscope.studies.maps.options import MapOptions
from attnscope.studies.maps.pooled import longest, pool_maps
from attnscope.studies.maps.study import apply_changes, outline, run_model
from attnscope.studies.maps.word_times import heads_to_follow, time_words
from attnscope.text import slug
from attnscope.views.drawing.style import Style
from attnscope.views.maps.pages import require_query


def study(
    spec: str,
    given: Given,
    options: MapOptions,
    loading: LoadOptions,
    foresee: Callable[[Heatmap], None] | None = None,
) -> Heatmap | PooledHeatmap:
    """Loads a model, and runs it on a text, a photo or a recording.

    Args:
        spec: The model.
        given: What it reads.
        options: What is asked of its maps.
        loading: How it is loaded.
        foresee: Is told before the model is loaded what the record will be like but for its weights, where that is
            known.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    options.require_for(given)
    source = loading.resolve(spec)
    if foresee is not None and (foreseen := _foresee(source, given, options, loading)) is not None:
        foresee(foreseen)
    if isinstance(given, Prompt) and not options.pooled:
        model = loading.load_to_look(source, [given])
    else:
        model = reader_of(loading.load(source), given)
    chosen = options.choice.within(model.info)
    followed = heads_to_follow(model, chosen.picked) if options.times else ()
    reading = read(model, given)
    if isinstance(given, Prompt) and (cells := options.cells(longest(reading), model.info.path)):
        return pool_maps(model, reading, chosen, cells, options.pool)
    record = outline(model.info, reading, chosen, options.cut)
    # An unknown query is said before the model runs.
    require_query(apply_changes(record, hide_special=options.hide_special, words=options.words), options.query)
    made = run_model(model, record, reading)
    made = time_words(made, followed) if options.times else made
    return apply_changes(made, hide_special=options.hide_special, words=options.words)


def _foresee(source: models.Source, given: Given, options: MapOptions, loading: LoadOptions) -> Heatmap | None:
    """The record as it will be but for its weights, known from the model's files alone; None where that cannot be.

    It may be wrong without harm: what is drawn in the end depends on the true record only.
    """
    tokenizer = None if loading.engine == "hf" else models.open_tokenizer(source)
    if tokenizer is None or not isinstance(given, Prompt) or given != Prompt(given.text, given.pair):
        return None
    info = native_info(source, read_config(source), sha256="")
    tokens, cut = truncate(tokenizer.encode(given.text, given.pair), info.max_tokens)
    if options.cells(len(tokens)):
        return None
    reading = Reading(given.text, tokens, None, (cut,) if cut else ())
    record = outline(info, reading, options.choice.within(info), options.cut)
    return apply_changes(record, hide_special=options.hide_special, words=options.words)


def home_of(record: Heatmap | PooledHeatmap, options: MapOptions, style: Style) -> Path:
    """How its own folder is called: `<model>-<slug of the text>-<8 hex of text, model and options>`."""
    chosen: dict[str, object] = {"query": options.query, "scale": style.scale, "cmap": style.cmap}
    chosen |= {name: getattr(style, name) for name in SIZES if getattr(style, name) != getattr(Style, name)}
    if isinstance(record, PooledHeatmap):
        chosen["cells"] = list(record.maps[0].cells.shape[2:])
    elif record.maps[0].part is not None:
        chosen["part"] = list(record.maps[0].part)
    return Path(f"{slug(str(record.run['model']))}-{slug(record.text)}-{fingerprint(record, **chosen)}")
