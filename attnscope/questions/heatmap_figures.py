"""Make the figures of attention maps: of pictures here, of texts in `heatmap_plates`, of sound in `heatmap_sounds`.

A record holds the maps of a model on one input. Figures of a vision model show what one query attends to in the
picture. Figures of a vision-language model, whose input has pictures among words, show what each word attends to in
each picture. A photo is the user's file. A `Picture` is what the model was given of it: one photo may become several
pictures, such as detailed ones of its parts and a small one of the whole photo (its source ends in THUMBNAIL_SUFFIX).

A `NamedFigure` holds a figure with its values and the stem of its file name. A `FigureSpec` is the plan of one figure.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np

from attnscope.arrays import Floats
from attnscope.drawing.canvas import FigureRenderer
from attnscope.drawing.files import render_first_png
from attnscope.drawing.map_figure import Axis, MapsFigure
from attnscope.drawing.style import Style, scale_meanings
from attnscope.errors import AttnscopeError, UsageError, amount
from attnscope.questions.heatmap import AttentionMap, Heatmap, Rollout
from attnscope.questions.heatmap_plates import (
    FigureSpec,
    LayerHead,
    NamedFigure,
    draw_figures,
    make_captions,
    name_model,
    plan_figures,
    yield_pooled_figures,
    yield_text_figures,
)
from attnscope.questions.heatmap_sounds import yield_sound_figures
from attnscope.questions.maps import ROLLOUT
from attnscope.questions.places import MEAN_QUERY, THUMBNAIL_SUFFIX, Picture
from attnscope.questions.pooled import PooledHeatmap
from attnscope.report.wording import change_notes, run_notes
from attnscope.results.tokens import Tokens

MAX_DRAWN_WORDS = 24
"""If no query names words, at most so many are drawn. Each is on an overview and on a figure of its own."""

MEAN_OF_PATCHES = -1
"""In place of the index of a query: the mean over all patches as queries."""

_MAX_SINGLE_PANEL_PX = 760
"""The largest width of a map over a picture, if the figure has one map."""

_MAX_PANEL_PX = 420
"""The largest width of a map over a picture, if the figure has several maps."""

_MAX_MAPS_IN_A_ROW = 3
"""Up to so many maps are in one row with the photo. More maps are laid out so that the page is near 4:3."""

# Notes at the foot of figures over a photo. The overlay is translucent, so the colour bar shows each colour twice: over
# white, and over black.
_PATCHES_NOTE = "a square is a patch, nothing is smoothed"
_SMOOTH_NOTE = "weights are interpolated between the middles of patches (--smooth)"
_COLOR_BAR_NOTE = "upper half of the bar: over white, lower half: over black"
_PICTURE_MEANING = scale_meanings(
    "attention weight: the share of the query's attention that a patch gets",
    "attention weight ÷ the largest weight of the same panel on a patch",
)


def make_figures(
    record: Heatmap | PooledHeatmap, style: Style | None = None, query: str | None = None
) -> Iterator[NamedFigure]:
    """Return the figures of a record with their values, the overview first.

    Args:
        record: The record to draw.
        style: Colours and sizes; None = the usual style of the record.
        query: For text, names tokens; each of them gets a figure of all heads. For a picture, names the token whose
            attention is drawn, or is "mean". For pictures among words, names the words whose attention is drawn.

    Raises:
        AttnscopeError: The query names no token.
        UsageError: A recording has no query.
    """
    style = style or record.style()
    if isinstance(record, PooledHeatmap):
        return yield_pooled_figures(record, style, query)
    if record.is_of_text:
        return yield_text_figures(record, style, query)
    # `picture` is the input of a vision model, `pictures` are those among the words of a vision-language model.
    if record.picture is not None:
        return _yield_picture_figures(record, style, query)
    if record.pictures:
        return _yield_word_figures(record, style, query)
    if query is not None:
        raise UsageError("over time every token has its row: there is no --query", "leave it out")
    return yield_sound_figures(record, style)


def draw_pages(
    record: Heatmap | PooledHeatmap, style: Style, query: str | None = None
) -> Iterator[tuple[str, FigureRenderer]]:
    """Yield the pages of a record's figures, each with the stem of its file name."""
    return draw_figures(make_figures(record, style, query), style)


def render_first_figure(record: Heatmap | PooledHeatmap) -> bytes:
    """Return the first figure of a record as the bytes of a PNG, for notebooks."""
    return render_first_png(draw_pages(record, record.style()))


def require_query(record: Heatmap | PooledHeatmap, query: str | None) -> None:
    """Raise an AttnscopeError if a query names no token of the record; None is allowed."""
    if query is not None:
        # The generator raises before its first figure.
        next(make_figures(record, query=query), None)


# Vision models ------------------------------------------------------------------------------------------------------


def find_query(attention: AttentionMap, query: str | None) -> tuple[int, str]:
    """Return the index of the query whose attention is drawn, or `MEAN_OF_PATCHES`; and its name.

    `query` is "CLS", "REG0", a patch as "row,column", a position such as "@3", or "mean"; None = "CLS", or "mean" if
    there is no CLS token.
    """
    queries = attention.queries
    if query is None:
        query = "CLS" if "CLS" in queries.labels else MEAN_QUERY
    if query.casefold() == MEAN_QUERY:
        return MEAN_OF_PATCHES, "the mean over all patches"
    # Positions of the tokens of that name, of which the first counts. A user may write the patch "2,1" as "2, 1".
    tokens_found = queries.find_one(query.replace(" ", ""))
    if not tokens_found:
        known_names = ", ".join([*compress(queries.labels, queries.special), MEAN_QUERY])
        raise AttnscopeError(
            f"no patch is {query!r}",
            f"there are {known_names}, and patches from 0,0 to {queries.labels[-1]} (row,column)",
        )
    query_index = tokens_found[0]
    query_label = queries.labels[query_index]
    return query_index, query_label if queries.special[query_index] else f"patch {query_label}"


def weigh_keys(attention: AttentionMap, layer_head: LayerHead, query_index: int) -> Floats:
    """Return the attention of a query to each token, (key,); `query_index` is from `find_query`."""
    weights = attention.of(*layer_head).astype(np.float64)
    if query_index != MEAN_OF_PATCHES:
        return np.asarray(weights[query_index])
    is_patch = ~attention.queries.special
    return np.asarray(weights[is_patch].mean(0))


def weigh_patches(record: Heatmap, layer_head: LayerHead, query_index: int) -> Floats:
    """Return the attention of a query to each patch of the picture, (row, column); see `weigh_keys`."""
    attention = record.maps[0]
    picture = record.picture
    assert picture is not None
    return weigh_keys(attention, layer_head, query_index)[~attention.keys.special].reshape(picture.grid)


def _yield_picture_figures(record: Heatmap, style: Style, query: str | None) -> Iterator[NamedFigure]:
    """Yield figures of what a query attends to: an overview and one per layer, or one figure of picked heads.

    A rollout has figures of where the query came from instead.
    """
    attention = record.maps[0]
    picture = record.picture
    assert picture is not None
    query_index, query_label = find_query(attention, query)
    is_patch = ~attention.queries.special
    notes = []
    framed_boxes: tuple[Any, ...] = ()
    if query_index != MEAN_OF_PATCHES and is_patch[query_index]:
        # Count the patches before the query. Special tokens may stand before and between patches.
        patch_number = int(is_patch[:query_index].sum())
        row, column = divmod(patch_number, picture.grid[1])
        framed_boxes = ((column, row, column + 1, row + 1),)
        notes.append("framed: the query")
    # Special tokens get attention that the picture cannot show. `without_sinks` has set it to 0.
    special_names = ", ".join(compress(attention.keys.labels, attention.keys.special))
    has_special = bool(special_names) and "without_sinks" not in record.changes
    if has_special:
        notes.append(f"what goes to {special_names} has no place in the picture")
    notes += change_notes(record, attention.kind)
    if isinstance(record, Rollout):
        notes.append(record.method)
    # The query in file names: the patch 3,5 is 3-5 there.
    query_name = (
        MEAN_QUERY
        if query_index == MEAN_OF_PATCHES
        else attention.queries.labels[query_index].replace(",", "-")
    )
    for figure_spec in plan_figures(record, attention, suffix=f"-{query_name}"):
        maps = []
        map_facts = []
        for layer_head in figure_spec.heads:
            maps.append(weigh_patches(record, layer_head, query_index))
            special_weight = weigh_keys(attention, layer_head, query_index)[attention.keys.special].sum()
            map_facts.append(f"{special_weight:.2f} off the picture" if has_special else "")
        subject = f"{figure_spec.subject}: what {query_label} attends to"
        if attention.kind == ROLLOUT:
            if figure_spec.form == "overview":
                layers_phrase = f"over {amount(len(attention.layers), 'layer')}"
            else:
                layers_phrase = f"up to layer {figure_spec.heads[0][0]}"
            # A rollout has two maps per layer, numbered as heads: 0 is mean attention, 1 is rollout (or relevance).
            subject = f"{attention.head_name(1)} {layers_phrase}: where {query_label} came from"
        yield _make_picture_figure(
            record,
            picture,
            figure_spec,
            subject,
            maps,
            map_facts,
            notes,
            style,
            framed_boxes=framed_boxes,
        )


def _make_picture_figure(
    record: Heatmap,
    picture: Picture,
    figure_spec: FigureSpec,
    subject: str,
    maps: Sequence[Floats],
    map_facts: Sequence[str],
    notes: Sequence[str],
    style: Style,
    **fields: Any,
) -> NamedFigure:
    """Return a figure of maps laid over a picture.

    Args:
        record: The record of the maps.
        picture: The picture.
        figure_spec: The stem of the file name, and the heads.
        subject: The end of the figure's title, which says what the maps show.
        maps: The weights of each map, (row, column) of patches.
        map_facts: A fact on each map, which stands beside its largest weight; "" = no fact.
        notes: Notes at the foot.
        style: Colours and sizes.
        fields: Two optional fields of `MapsFigure`: `framed_boxes` on all maps, and `titles` of maps, which replace the
            names of heads.
    """
    n_maps = len(maps)
    rows, columns = picture.grid
    title = f"{name_model(record)} · {subject}"
    figure = MapsFigure(
        **{**figure_spec.titles(record.maps[0]), **fields},
        subtitle=picture.facts,
        notes=(
            *notes,
            _SMOOTH_NOTE if style.smooth else _PATCHES_NOTE,
            _COLOR_BAR_NOTE,
            *run_notes(record.run),
        ),
        axes=((Axis(n=rows), Axis(n=columns)),),
        meaning=_PICTURE_MEANING[style.scale],
        cmap=style.cmap,
        is_smooth=style.smooth,
        captions=make_captions(maps, map_facts),
        picture=picture,
        max_panel_px=_MAX_SINGLE_PANEL_PX if n_maps == 1 else _MAX_PANEL_PX,
        # The photo itself takes one more column. 0 = the layout makes the page near 4:3.
        columns=n_maps + 1 if n_maps <= _MAX_MAPS_IN_A_ROW else 0,
        font_texts=(title, *fields.get("titles", ())),
    )
    return NamedFigure(figure_spec.stem, title, figure, maps)


# Pictures among words -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Word:
    """Hold a word, or a token that is no part of a word.

    Attributes:
        name: Its text.
        tokens: The indices of its tokens (word pieces) among the queries.
    """

    name: str
    tokens: tuple[int, ...]


def choose_words(record: Heatmap, query: str | None = None) -> tuple[list[Word], str]:
    """Return the words whose attention is drawn, and a note if only the first words are ("" = all words are).

    With a query they are the words that it names. Without, they are the words that the model generated, or all words if
    it generated none. Special tokens are left out, unless all generated words are special.
    """
    queries = record.maps[0].queries
    words = [Word(_name_word(queries, pieces), tuple(pieces)) for pieces in queries.word_groups()]
    if query is not None:
        named_queries = _find_words(record, query, words)
        return [word for word in words if not named_queries.isdisjoint(word.tokens)], ""
    # `n_given` counts the tokens of the prompt, before the generated ones; -1 = nothing was generated.
    generated_words = [word for word in words if 0 <= queries.n_given <= word.tokens[0]]
    candidate_words = generated_words or words
    # If all candidates are special tokens, fall back on all words.
    ordinary_words = [word for word in candidate_words if not queries.special[word.tokens[0]]]
    drawn_words = ordinary_words or words
    if len(drawn_words) <= MAX_DRAWN_WORDS:
        return drawn_words, ""
    note = f"the first {MAX_DRAWN_WORDS} of {len(drawn_words)} words: --query names others"
    return drawn_words[:MAX_DRAWN_WORDS], note


def _find_words(record: Heatmap, query: str, words: Sequence[Word]) -> set[int]:
    """Return the indices of the queries that a user names. A position such as @70 counts all tokens of the input."""
    attention = record.maps[0]
    queries = attention.queries
    first_query, _ = attention.origin

    # The map may begin at a later token of the input, `first_query`, where `find` starts to count. So @70 becomes @20
    # if `first_query` is 50. A position before `first_query` becomes @-1, which names no token.
    def count_from_first_query(position: re.Match[str]) -> str:
        return f"@{max(int(position[1]) - first_query, -1)}"

    named_queries = set(queries.find(re.sub(r"@(\d+)", count_from_first_query, query)))
    if named_queries:
        return named_queries
    word_names = [word.name for word in words if not queries.special[word.tokens[0]]]
    raise AttnscopeError(
        f"no word that looks at the pictures is {query!r}",
        f"there are {', '.join(dict.fromkeys(word_names))}; or name places, such as @{first_query}",
    )


def _name_word(tokens: Tokens, pieces: Sequence[int]) -> str:
    """Return the text of a word. The label of a single token may begin with "·", which stands for a space."""
    if len(pieces) > 1:
        return tokens.merge([pieces]).labels[0]
    return tokens.labels[pieces[0]].removeprefix("·")


def weigh_keys_of_word(record: Heatmap, word: Word, heads: Iterable[LayerHead]) -> Floats:
    """Return the attention of a word to each token, (key,): the mean over heads and over its tokens."""
    queries = list(word.tokens)
    # Each head's mean over the tokens of the word, (head, key).
    weights_by_head = []
    for layer_head in heads:
        weights = record.maps[0].of(*layer_head)[queries].astype(np.float64)
        weights_by_head.append(weights.mean(0))
    # The mean over heads, without NaN. Dividing by at least 1 avoids a warning for keys of a damaged record, all NaN.
    n_known = (~np.isnan(weights_by_head)).sum(0)
    return np.asarray(np.nansum(weights_by_head, axis=0) / np.maximum(n_known, 1))


def compute_picture_share(picture: Picture, key_weights: Floats) -> float:
    """Return the share of one query's attention, `key_weights`, (key,), that goes to the patches of a picture."""
    return float(np.nansum(picture.over(key_weights)))


def _yield_word_figures(record: Heatmap, style: Style, query: str | None) -> Iterator[NamedFigure]:
    """Yield figures of all words over each picture, then of each word by layer or by head, then of the text."""
    attention = record.maps[0]
    words, words_note = choose_words(record, query)
    heads = record.chosen(attention)
    # In titles and file names. Learned queries, as of a Q-Former, have no text and are no words.
    noun, plural_noun = "word", "words"
    if attention.kind == "cross" and not attention.queries.text:
        noun, plural_noun = "query", "queries"
    heads_phrase = "all heads" if record.picked is None else "the heads that were picked"
    overview_notes = [f"the mean of {heads_phrase}"]
    if words_note:
        overview_notes.append(words_note)
    # All words over each picture: (title, weights (key,)).
    titled_weights = [(word.name, weigh_keys_of_word(record, word, heads)) for word in words]
    for picture in record.pictures:
        figure_spec = FigureSpec(
            f"{plural_noun}{_make_picture_suffix(record, picture)}", "grid", heads, f"{plural_noun} look"
        )
        yield _make_word_figure(record, picture, figure_spec, titled_weights, overview_notes, style)
    # Each word alone, over the detailed pictures; small pictures of whole photos are left out.
    detailed_pictures = [
        picture for picture in record.pictures if not picture.source.endswith(THUMBNAIL_SUFFIX)
    ]
    for word_index, word in enumerate(words):
        titled_weights, rows_note = _titled_weights_of_word(record, word, heads)
        for picture in detailed_pictures:
            suffix = _make_picture_suffix(record, picture)
            stem = f"{noun}-{word_index:02d}-{_make_slug(word.name)}{suffix}"
            figure_spec = FigureSpec(stem, "grid", heads, f"“{word.name}” looks")
            yield _make_word_figure(record, picture, figure_spec, titled_weights, [rows_note], style)
    # The maps of the text, in which each photo is one key. If the pictures are reached by cross-attention, which is the
    # first map and drawn above, only the other maps are left.
    text_record = record.with_pictures_as_one()
    if text_record.maps[0].kind == "cross" and text_record.has_several_kinds:
        text_record = replace(text_record, maps=text_record.maps[1:])
    yield from yield_text_figures(text_record, style, prefix="text-")


def _titled_weights_of_word(
    record: Heatmap, word: Word, heads: Sequence[LayerHead]
) -> tuple[list[tuple[str, Floats]], str]:
    """Return what is drawn of a word alone: its title and weights, (key,), for each map; and a note on the maps.

    There is a map for each head if heads were picked. Else there is one over all layers, and one for each layer.
    """
    if record.picked is not None or len(heads) == 1:
        name_of = record.maps[0].name_of
        return [
            (name_of(*layer_head), weigh_keys_of_word(record, word, [layer_head]))
            for layer_head in heads
        ], "head by head"
    titled_weights = [("all layers", weigh_keys_of_word(record, word, heads))]
    for layer in sorted({layer for layer, _ in heads}):
        layer_heads = [layer_head for layer_head in heads if layer_head[0] == layer]
        titled_weights.append((f"layer {layer}", weigh_keys_of_word(record, word, layer_heads)))
    return titled_weights, "the mean of each layer's heads"


def _make_word_figure(
    record: Heatmap,
    picture: Picture,
    figure_spec: FigureSpec,
    titled_weights: Sequence[tuple[str, Floats]],
    notes: Sequence[str],
    style: Style,
) -> NamedFigure:
    """Return a figure of maps over a picture, from a title and weights, (key,), for each map."""
    maps = []
    map_facts = []
    titles = []
    for title, key_weights in titled_weights:
        maps.append(np.nan_to_num(picture.over(key_weights)))
        map_facts.append(f"{compute_picture_share(picture, key_weights):.0%} on the picture")
        titles.append(title)
    notes = [*notes, "percentages: how much of the attention goes to this picture, all patches together"]
    subject = f"where {figure_spec.subject} · {record.text}"
    return _make_picture_figure(
        record, picture, figure_spec, subject, maps, map_facts, notes, style, titles=tuple(titles)
    )


def _make_picture_suffix(record: Heatmap, picture: Picture) -> str:
    """Return the end of a picture's file names: "" for the first photo, "-2" for the second, "-2-small" if small."""
    photos = list(dict.fromkeys(other.photo for other in record.pictures))
    photo_index = photos.index(picture.photo)
    suffix = f"-{photo_index + 1}" if photo_index else ""
    return f"{suffix}-small" if picture.source.endswith(THUMBNAIL_SUFFIX) else suffix


def _make_slug(name: str) -> str:
    """Return a word as part of a file name; "mark" if it has neither letters nor digits."""
    return re.sub(r"[^\w]+", "-", name.casefold()).strip("-")[:24] or "mark"
