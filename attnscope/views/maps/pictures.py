"""Attention laid over pictures: what patches attend to in a vision model, and where words look in one that reads both.

A weight is a colour of the colormap, the same everywhere on a figure; the photo, in grey, only makes it lighter or
darker, by no more than a part, so that weights can be told on dark photos and on bright ones. Nothing is smoothed:
a patch is a square.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, MARK, Canvas, colormap
from attnscope.drawing.lettering import Lettering, lettering_for
from attnscope.drawing.page import Page
from attnscope.drawing.style import Style, meanings
from attnscope.errors import AttnscopeError, amount
from attnscope.questions.heatmap import AttentionMap, Heatmap, Rollout
from attnscope.questions.maps import ROLLOUT
from attnscope.questions.places import MEAN, SMALL, Picture
from attnscope.report.wording import run_notes
from attnscope.results.tokens import Tokens
from attnscope.views.maps import figures as text_figures
from attnscope.views.maps.sheets import Sheet, sheets_of_heads

if TYPE_CHECKING:
    from matplotlib.colors import Colormap

Pixels = NDArray[np.uint8]
Heads = Sequence[tuple[int, int]]
Row = tuple[str, NDArray[np.float64]]
"""A name, and the attention to each token, (key,)."""

DARKEST = 0.6
"""How much of a colour is left where the photo is black."""

MOST_WORDS = 24
"""Words on one figure, and figures of one word each, where none is named."""

_HALO = "#ffffff"
_LARGEST_SINGLE_PX, _LARGEST_PANEL_PX, _LARGEST_SMALL_PX, _PHOTO_PX = 760, 420, 300, 224
_GAP_PX = 10
_MOST_IN_A_ROW = 3  # overlays that stand in one row with the photo
_MEANING = meanings(
    "attention weight: the share of the query's attention that a patch gets",
    "attention weight ÷ the largest weight of the same panel on a patch",
)


# A page ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Overlay:
    """A number for each patch, laid over the picture.

    Attributes:
        name: What stands above it.
        patches: The numbers, (row, column).
        facts: What stands beside its name, the most important first.
        place: The name of its row and of its column in an overview.
    """

    name: str
    patches: NDArray[np.float64]
    facts: Sequence[str]
    place: tuple[str, str] = ("", "")

    @property
    def top(self) -> float:
        """The largest number."""
        return float(self.patches.max())


@dataclass(frozen=True, eq=False)
class PictureFigure:
    """What is in a figure of a picture.

    Attributes:
        stem: The name of its file, without ending.
        title: Its title.
        picture: The picture.
        overlays: What is laid over it.
        notes: What its reader must know.
        framed: The patch with a frame, (row, column); None = none.
        is_overview: Whether overlays are small, in rows and columns with names.
    """

    stem: str
    title: str
    picture: Picture
    overlays: Sequence[Overlay]
    notes: Sequence[str]
    framed: tuple[int, int] | None = None
    is_overview: bool = False


def overlay(picture: Picture, patches: NDArray[np.float64], cell: int, cmap: Colormap, top: float) -> Pixels:
    """Lay a number for each patch, (row, column), over a picture: (row * cell, column * cell, 3).

    The colormap is of 0 to `top`; a patch is `cell` pixels wide and high.
    """
    photo = _resize(picture, cell).astype(np.float64) / 255
    grey = np.asarray(photo @ np.array([0.2126, 0.7152, 0.0722]))
    return _tint(cmap(np.clip(patches / top, 0, 1))[:, :, :3].repeat(cell, 0).repeat(cell, 1), grey)


def _tint(colours: NDArray[np.float64], grey: NDArray[np.float64]) -> Pixels:
    """Lay colours over a photo, which is 0 to 1."""
    return np.rint(255 * colours * (DARKEST + (1 - DARKEST) * grey[:, :, None])).astype(np.uint8)


def _resize(picture: Picture, cell: int) -> Pixels:
    """Return the picture, a patch being `cell` pixels wide and high."""
    from PIL import Image

    rows, columns = picture.grid
    size = (columns * cell, rows * cell)
    return np.asarray(Image.fromarray(picture.pixels).resize(size, Image.Resampling.LANCZOS))


class PicturePage(Page):
    """The photo and overlays of it; the photo is the first panel, in an overview it stands above them."""

    def __init__(self, figure: PictureFigure, style: Style) -> None:
        paper = style.paper
        texts = [figure.title, figure.picture.facts, *(overlay.name for overlay in figure.overlays)]
        lettering = lettering_for(texts, paper)
        self.content = figure
        self.places = layout.arrange(self._wanted(lettering), paper)
        super().__init__(self.places.width_px, lettering)
        self.head(figure.title, figure.picture.facts)
        cmap = colormap(style.cmap)
        limits = style.limits([one.top for one in figure.overlays])
        cell = self.places.cell[0]
        corners = self._place_photo()
        for corner, one, limit in zip(corners, figure.overlays, limits, strict=True):
            pixels = overlay(figure.picture, one.patches, paper.image_px(cell), cmap, limit)
            self._put(corner, pixels, cell)
            if not figure.is_overview:
                self._write_caption(corner, one)
        meaning = _MEANING[style.scale]
        end = limits[0] if style.scale == "figure" else 1.0
        ticks = {tick: f"{tick:g}" for tick in layout.nice_ticks(end)}
        bar = self.end_with_bar(
            self.places.bottom, None, meaning, [*figure.notes, *lettering.notes], limits=(0, end), ticks=ticks
        )
        self._tint_bar(bar, cmap)

    def _wanted(self, lettering: Lettering) -> layout.Wanted:
        figure, paper = self.content, lettering.paper
        n = len(figure.overlays)
        if figure.is_overview:
            places = [one.place for one in figure.overlays]
            columns = len({column for _, column in places})
            self._row_names = list(dict.fromkeys(row for row, _ in places))
            return layout.Wanted(
                n=len(self._row_names) * columns,
                columns=columns,
                shape=figure.picture.grid,
                around=lambda cell: layout.Around(below=_GAP_PX),
                names_px=20 + max(lettering.width_px(name, 16.5) for name in self._row_names),
                gap_px=_GAP_PX,
                top_px=layout.HEADER_PX + self._photo_px(paper)[1] + 44,
                largest_px=_LARGEST_SMALL_PX,
                largest_cell_px=_LARGEST_SMALL_PX,
                least_width_px=layout.NARROWEST_PX,
            )
        largest = _LARGEST_SINGLE_PX if n == 1 else _LARGEST_PANEL_PX
        return layout.Wanted(
            n=n + 1,
            columns=n + 1 if n <= _MOST_IN_A_ROW and not paper.is_narrow else 0,
            shape=figure.picture.grid,
            around=lambda cell: layout.Around(above=layout.PANEL_HEADER_PX, below=_GAP_PX),
            gap_px=_GAP_PX,
            largest_px=largest,
            largest_cell_px=largest,
            least_width_px=layout.NARROWEST_PX,
        )

    def _photo_px(self, paper: layout.Paper) -> tuple[float, float]:
        """Return the width and height of the photo above an overview."""
        rows, columns = self.content.picture.grid
        cell = paper.whole(min(_PHOTO_PX, paper.room_px / 3) / max(rows, columns))
        return columns * cell, rows * cell

    def _place_photo(self) -> list[tuple[float, float]]:
        """Draw the photo, and the names of an overview; return where overlays stand."""
        figure = self.content
        photo, *others = self.places.corners
        if not figure.is_overview:
            self._put(photo, _resize(figure.picture, self.paper.image_px(self.places.cell[0])), self.places.cell[0])
            self.entitle(photo[0], photo[1] - 12, "the picture")
            return others
        cell = self._photo_px(self.paper)[0] / figure.picture.grid[1]
        pixels = _resize(figure.picture, self.paper.image_px(cell))
        self._put((layout.MARGIN_PX, layout.HEADER_PX + 8), pixels, cell)
        columns = self.places.columns
        names = [one.place for one in figure.overlays]
        column_names = list(dict.fromkeys(column for _, column in names))
        corners = [
            self.places.corners[self._row_names.index(row) * columns + column_names.index(column)]
            for row, column in names
        ]
        self.name_panels(names, corners, self.places.panel, self.places.pitch_px)
        return corners

    def _put(self, corner: tuple[float, float], pixels: Pixels, cell: float) -> None:
        """Draw a picture, and a frame around the patch that is marked."""
        rows, columns = self.content.picture.grid
        self.image((*corner, columns * cell, rows * cell)).set_data(pixels)
        if self.content.framed is None:
            return
        row, column = self.content.framed
        x, y = corner[0] + column * cell, corner[1] + row * cell
        for color, gap, thick in ((_HALO, 2.0, 3.0), (MARK, 1.0, 2.0)):
            self.outline([(x - gap, y - gap, cell + 2 * gap, cell + 2 * gap)], color, thick, animated=True)

    def _write_caption(self, corner: tuple[float, float], one: Overlay) -> None:
        """Write the name of an overlay above it, and as many facts as have room."""
        x, y = corner
        width = self.places.panel[0]
        self.entitle(x, y - 12, self.lettering.fit(one.name, layout.PANEL_TITLE_PX * 1.12, width))
        room = width - self.lettering.width_px(one.name, layout.PANEL_TITLE_PX) * 1.2 - 10
        facts = list(one.facts)
        while len(facts) > 1 and self.lettering.width_px(" · ".join(facts), layout.CAPTION_PX) > room:
            facts.pop()
        text = " · ".join(facts)
        if self.lettering.width_px(text, layout.CAPTION_PX) <= room:
            self.write(x + width, y - 12, text, layout.CAPTION_PX, ha="right", color=FAINT)

    def _tint_bar(self, bar: tuple[float, float, float, float], cmap: Colormap) -> None:
        """Show the colours as they are over bright and over dark parts of the photo."""
        ramp = cmap(np.linspace(0, 1, 256))[None, :, :3].repeat(2, 0)
        grey = np.array([[1.0], [0.0]]).repeat(256, 1)
        self.image(bar).set_data(_tint(ramp, grey))
        self.frames([bar])


# Vision models --------------------------------------------------------------------------------------------------------


def query_of(attention: AttentionMap, query: str | None) -> tuple[int, str]:
    """Return the token whose attention is drawn, -1 for the mean over all patches; and its name.

    A query is "CLS", "REG0", a patch as "row,column", a place such as `@3`, or "mean"; None = CLS, or where there is
    none, "mean".
    """
    tokens = attention.queries
    if query is None:
        query = "CLS" if "CLS" in tokens.labels else MEAN
    if query.casefold() == MEAN:
        return -1, "mean over patches"
    places = tokens.find_one(query.replace(" ", ""))
    if not places:
        special = "".join(f"{tokens.labels[token]}, " for token in np.flatnonzero(tokens.special))
        raise AttnscopeError(
            f"no patch is {query!r}",
            f"there are {special}mean, and patches from 0,0 to {tokens.labels[-1]} (row,column)",
        )
    return places[0], tokens.labels[places[0]]


def row_of(attention: AttentionMap, pair: tuple[int, int], query: int) -> NDArray[np.float64]:
    """Return the attention of a query to each token, (key,); for -1 the mean over all patches."""
    weights = attention.of(*pair).astype(np.float64)
    row: NDArray[np.float64] = weights[~attention.queries.special].mean(0) if query < 0 else weights[query]
    return row


def over_patches(record: Heatmap, pair: tuple[int, int], query: int) -> NDArray[np.float64]:
    """Return the attention of a query to each patch, (row, column)."""
    attention, picture = record.maps[0], record.picture
    assert picture is not None
    return row_of(attention, pair, query)[~attention.keys.special].reshape(picture.grid)


def _vision_sheets(record: Heatmap, query: str | None) -> list[Sheet]:
    """List an overview and a figure per layer, or one of the heads that were picked."""
    token, name = query_of(record.maps[0], query)
    mark = MEAN if token < 0 else name.replace(",", "-")
    heads = record.chosen(record.maps[0])
    return sheets_of_heads(heads, picked=record.picked is not None, query=token, after=f"-{mark}")


def _vision_figure(record: Heatmap, sheet: Sheet) -> PictureFigure:
    attention, picture = record.maps[0], record.picture
    assert picture is not None
    tokens, query = attention.queries, sheet.query
    is_patch = query >= 0 and not tokens.special[query]
    name = "the mean over all patches"
    framed = None
    if query >= 0:
        name = f"patch {tokens.labels[query]}" if is_patch else tokens.labels[query]
    if is_patch:
        row, column = divmod(int((~tokens.special[:query]).sum()), picture.grid[1])
        framed = (row, column)
    names = dict(zip(sheet.heads, sheet.names(attention), strict=True))
    overlays = []
    for pair in sheet.heads:
        patches = over_patches(record, pair, query)
        facts = [f"max {patches.max():.3g}", *_elsewhere(attention, pair, query)]
        overlays.append(Overlay(attention.name_of(*pair), patches, facts, names[pair]))
    subject = f"{sheet.subject}: what {name} attends to"
    if attention.kind == ROLLOUT:
        part = f"rollout over {amount(len(attention.layers), 'layer')}"
        part = part if sheet.form == "overview" else f"rollout up to layer {sheet.layers[0]}"
        subject = f"{part}: where {name} came from"
    title = f"{record.run.get('model', 'model')} · {subject}"
    notes = _vision_notes(record, query, is_patch)
    return PictureFigure(sheet.stem, title, picture, overlays, notes, framed, sheet.form == "overview")


def _elsewhere(attention: AttentionMap, pair: tuple[int, int], query: int) -> list[str]:
    """Return how much goes to tokens without a place in the picture, such as CLS; registers together."""
    row, keys = row_of(attention, pair, query), attention.keys
    shares: dict[str, float] = {}
    for key in np.flatnonzero(keys.special):
        name = keys.labels[key].rstrip("0123456789")
        shares[name] = shares.get(name, 0.0) + float(row[key])
    return [f"{name} {share:.2f}" for name, share in shares.items()]


_OVER_PHOTO = "a square is a patch, nothing is smoothed · upper half of the bar: over white, lower half: over black"


def _vision_notes(record: Heatmap, query: int, is_patch: bool) -> list[str]:
    keys = record.maps[0].keys
    notes = [_OVER_PHOTO]
    if query < 0:
        notes.append("the mean over all patches as queries")
    elif is_patch:
        notes.append("framed: the query")
    special = [keys.labels[key] for key in np.flatnonzero(keys.special)]
    if special:
        notes.append(f"what goes to {', '.join(special)} has no place in the picture")
    if "hide_special" in record.changes:
        notes.append("tokens that are no patches are hidden; each row is divided by what is left of it")
    if isinstance(record, Rollout):
        notes.append(record.method)
    return notes + run_notes(record.run)


# Pictures among words ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Word:
    """A word of a record, or a token that is part of none; `tokens` are its places among the queries."""

    name: str
    tokens: tuple[int, ...]


ASKERS = {"word": "words", "query": "queries"}
"""The names of what looks at pictures, one and several."""


def asker_of(record: Heatmap) -> str:
    """Return whether words look at the pictures ("word"), or queries that the model learned, which are no words."""
    first = record.maps[0]
    return "query" if first.kind == "cross" and not first.queries.text else "word"


def words_of(record: Heatmap, query: str | None = None) -> tuple[list[Word], int]:
    """Return the words whose attention is drawn, and how many there are.

    They are those that are named, else those that the model wrote; where it wrote none, the words after the pictures.
    """
    tokens = record.maps[0].queries
    groups = [tuple(group) for group in tokens.word_groups()]
    if query is not None:
        named = _find_words(record, query, groups)
        words = [Word(_name(tokens, group), group) for group in groups if named & {*group}]
        return words, len(words)
    generated = [group for group in groups if tokens.n_given >= 0 and group[0] >= tokens.n_given]
    groups = [group for group in generated or groups if not tokens.special[group[0]]] or groups
    words = [Word(_name(tokens, group), group) for group in groups]
    return words[:MOST_WORDS], len(words)


def _find_words(record: Heatmap, query: str, groups: Sequence[tuple[int, ...]]) -> set[int]:
    """Return the places among the queries that a user names; places such as @70 count all tokens."""
    tokens = record.maps[0].queries
    first = 0 if record.maps[0].part is None else record.maps[0].part[0]
    shifted = re.sub(r"@(\d+)", lambda place: f"@{max(int(place[1]) - first, -1)}", query)
    named = set(tokens.find(shifted))
    if named:
        return named
    names = ", ".join(dict.fromkeys(_name(tokens, group) for group in groups if not tokens.special[group[0]]))
    message = f"no word after the pictures is {query!r}"
    if asker_of(record) == "query":
        message = f"{query!r} is no learned query: these alone look at the picture, and words see it through them"
    raise AttnscopeError(message, f"there are {names}; or name places, such as @{first}")


def _name(tokens: Tokens, group: Sequence[int]) -> str:
    return tokens.merge([group]).labels[0] if len(group) > 1 else tokens.labels[group[0]].removeprefix("·")


def weights_of(record: Heatmap, word: Word, heads: Heads) -> NDArray[np.float64]:
    """Return the attention of a word to each token, (key,): the mean over heads and over its tokens."""
    if not record.maps[0].has_weights:  # only names are asked for, before the model runs
        return np.zeros(len(record.maps[0].keys))
    rows = np.array([record.maps[0].of(*pair)[list(word.tokens)].astype(np.float64).mean(0) for pair in heads])
    n_known = (~np.isnan(rows)).sum(0)  # 0 in damaged records alone
    mean: NDArray[np.float64] = np.nansum(rows, axis=0) / np.maximum(n_known, 1)
    return mean


def share_of(picture: Picture, row: NDArray[np.float64]) -> float:
    """Return how much of what tokens get goes to a picture."""
    return float(np.nansum(picture.over(row)))


def _word_figures(record: Heatmap, query: str | None) -> Iterator[PictureFigure]:
    """List the figures: words side by side over each picture, then each word layer by layer or head by head."""
    words, n_words = words_of(record, query)
    heads = record.chosen(record.maps[0])
    asker = asker_of(record)
    looks = "where learned queries look" if asker == "query" else "where words look"
    notes = ["the mean of all heads" if record.picked is None else "the mean of the heads that were picked"]
    if n_words > len(words):
        notes.append(f"the first {len(words)} of {n_words} {ASKERS[asker]}: --query names others")
    for number, picture in enumerate(record.pictures):
        rows = [(word.name, weights_of(record, word, heads)) for word in words]
        stem = f"{ASKERS[asker]}{_mark(record, number)}"
        yield _word_figure(record, picture, rows, stem, looks, notes)
    for place, word in enumerate(words):
        looks = f"where learned query {word.name} looks" if asker == "query" else f"where “{word.name}” looks"
        for number, picture in enumerate(record.pictures):
            if picture.source.endswith(SMALL):
                continue
            stem = f"{asker}-{place:02d}-{_slug(word.name)}{_mark(record, number)}"
            if record.picked is not None or len(heads) == 1:
                by_head = _by_head(record, word, heads)
                yield _word_figure(record, picture, by_head, stem, looks, ["head by head"])
                continue
            by_layer = [("all layers", weights_of(record, word, heads))]
            for layer in sorted({layer for layer, _ in heads}):
                mine = [pair for pair in heads if pair[0] == layer]
                by_layer.append((f"layer {layer}", weights_of(record, word, mine)))
            yield _word_figure(record, picture, by_layer, stem, looks, ["the mean of each layer's heads"])
            if query is not None:
                yield from _head_figures(record, picture, word, stem, looks)


def _by_head(record: Heatmap, word: Word, heads: Heads) -> list[Row]:
    attention = record.maps[0]
    return [(attention.name_of(*pair), weights_of(record, word, [pair])) for pair in heads]


def _head_figures(record: Heatmap, picture: Picture, word: Word, stem: str, looks: str) -> Iterator[PictureFigure]:
    """List all heads in small, and each layer's, of a word that a query names."""
    attention = record.maps[0]
    for sheet in sheets_of_heads(record.chosen(attention), picked=False, before=f"{stem}-", query=0):
        figure = _word_figure(record, picture, _by_head(record, word, sheet.heads), sheet.stem, looks, ["head by head"])
        if sheet.form == "overview":
            places = sheet.names(attention)
            overlays = [replace(one, place=place) for one, place in zip(figure.overlays, places, strict=True)]
            figure = replace(figure, overlays=overlays, is_overview=True)
        yield figure


def _word_figure(
    record: Heatmap,
    picture: Picture,
    rows: Sequence[Row],
    stem: str,
    looks: str,
    notes: Sequence[str],
) -> PictureFigure:
    """Lay rows of attention, (key,), over a picture, each by its name."""
    overlays = []
    for name, row in rows:
        patches = np.nan_to_num(picture.over(row))
        overlays.append(Overlay(name, patches, [f"{share_of(picture, row):.0%}", f"max {patches.max():.2g}"]))
    title = f"{record.run.get('model', 'model')} · {looks} · {record.text}"
    share = (
        f"percentages: how much of the {asker_of(record)}'s attention goes to this picture, all its patches together"
    )
    return PictureFigure(stem, title, picture, overlays, [*notes, share, _OVER_PHOTO, *run_notes(record.run)])


def _mark(record: Heatmap, number: int) -> str:
    """Return what tells the files of one picture from those of the others."""
    picture = record.pictures[number]
    photos = list(dict.fromkeys(picture.photo for picture in record.pictures))
    photo = photos.index(picture.photo)
    mark = f"-{photo + 1}" if photo else ""
    return f"{mark}-small" if picture.source.endswith(SMALL) else mark


def _slug(name: str) -> str:
    return re.sub(r"[^\w]+", "-", name.casefold()).strip("-")[:24] or "mark"


def _text_of(record: Heatmap) -> Heatmap:
    """Return the record with each photo as one key; with cross-attention, that of words to each other."""
    flat = record.with_pictures_as_one()
    if flat.maps[0].kind == "cross" and len(flat.maps) > 1:
        return replace(flat, maps=flat.maps[1:])
    return flat


def _text_sheets(text: Heatmap) -> list[Sheet]:
    return [
        replace(sheet, stem=f"text-{sheet.stem}", n_layers=text.maps[sheet.map].n_layers)
        for sheet in text_figures.sheets_of(text)
    ]


# Either ---------------------------------------------------------------------------------------------------------------


def sheets_of(record: Heatmap, query: str | None = None) -> list[Any]:
    """List the figures that a record is drawn as, each with its `stem`; refuse a query that names nothing."""
    if record.picture is not None:
        return _vision_sheets(record, query)
    return [*_word_figures(record, query), *_text_sheets(_text_of(record))]


def pages(record: Heatmap, style: Style | None = None, query: str | None = None) -> Iterator[tuple[str, Canvas]]:
    """Draw the figures one after the other, each with its file name without the ending.

    Args:
        record: Of a picture, or of pictures among words.
        style: By default each panel is coloured by its own largest number.
        query: Of a picture as of `query_of`; among words it is words, as `cat,dog`.
    """
    style = style or Style(record.usual_scale)
    if record.picture is not None:
        for sheet in _vision_sheets(record, query):
            yield sheet.stem, PicturePage(_vision_figure(record, sheet), style)
        return
    for figure in _word_figures(record, query):
        yield figure.stem, PicturePage(figure, style)
    text = _text_of(record)
    yield from text_figures.Painter(style).pages(text, _text_sheets(text))
