"""Where in the pictures words look: each word's attention laid over what the model saw, of models that read both.

Drawn by what draws vision models: words, or layers, stand in the place of heads there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing.page import Page
from attnscope.drawing.style import Style, meanings
from attnscope.errors import AttnscopeError
from attnscope.records import AttentionMap, Heatmap, Tokens
from attnscope.records.maps.pictures import SMALL, Picture
from attnscope.views.maps import figures as heatmap_figures
from attnscope.views.maps.picture_figures import PicturePage
from attnscope.views.maps.sheets import Sheet, sheets_of_heads

MOST_WORDS = 24
"""Words on one figure, and figures of one word each, where none is named."""

_MEANING = meanings(
    "attention weight: the share of attention that a patch gets",
    "attention weight ÷ the largest that a patch gets in the same panel",
)


@dataclass(frozen=True)
class Word:
    """A word of a record, or a token that is part of none; `tokens` are its places among the queries."""

    name: str
    tokens: tuple[int, ...]


ASKERS = {"word": "words", "query": "queries"}
"""The names of what looks at pictures, one and several."""


def asker_of(record: Heatmap) -> str:
    """Whether words look at the pictures ("word"), or queries that the model learned and that stand for no word."""
    first = record.maps[0]
    return "query" if first.kind == "cross" and not first.queries.text else "word"


def words_of(record: Heatmap, query: str | None = None) -> tuple[list[Word], int]:
    """The words whose attention is drawn, and how many there are: those that are named, else those that were written.

    Where the model wrote none, they are the words of the text after the pictures.
    """
    tokens = record.maps[0].queries
    groups = [tuple(group) for group in tokens.word_groups()]
    if query is not None:
        first = 0 if record.maps[0].part is None else record.maps[0].part[0]
        # Places in a query, such as @70, count all tokens, and those of `tokens` the queries alone.
        shifted = re.sub(r"@(\d+)", lambda place: f"@{max(int(place[1]) - first, -1)}", query)
        queries = set(tokens.find(shifted))
        if not queries:
            names = ", ".join(dict.fromkeys(_name(tokens, group) for group in groups if not tokens.special[group[0]]))
            message = f"no word after the pictures is {query!r}"
            if asker_of(record) == "query":
                message = (
                    f"{query!r} is no learned query: these alone look at the picture, and words see it through them"
                )
            raise AttnscopeError(message, f"there are {names}; or name places, such as @{first}")
        groups = [group for group in groups if queries & {*group}]
    else:
        generated = [group for group in groups if tokens.n_given >= 0 and group[0] >= tokens.n_given]
        groups = [group for group in generated or groups if not tokens.special[group[0]]] or groups
    words = [Word(_name(tokens, group), group) for group in groups]
    return (words if query is not None else words[:MOST_WORDS]), len(words)


def _name(tokens: Tokens, group: Sequence[int]) -> str:
    return tokens.merge([group]).labels[0] if len(group) > 1 else tokens.labels[group[0]].removeprefix("·")


def weights_of(record: Heatmap, word: Word, heads: Sequence[tuple[int, int]]) -> NDArray[np.float64]:
    """The attention of a word to each token, (key,): the mean over heads and over its tokens."""
    if not record.maps[0].has_weights:  # only names are asked for, before the model runs
        return np.zeros(len(record.maps[0].keys))
    rows = np.array([record.maps[0].of(*pair)[list(word.tokens)].astype(np.float64).mean(0) for pair in heads])
    n_known = (~np.isnan(rows)).sum(0)  # 0 in damaged records alone
    mean: NDArray[np.float64] = np.nansum(rows, axis=0) / np.maximum(n_known, 1)
    return mean


def share_of(picture: Picture, row: NDArray[np.float64]) -> float:
    """How much of what tokens get goes to a picture."""
    return float(np.nansum(picture.over(row)))


def sheets_of(record: Heatmap, query: str | None = None) -> list[Sheet]:
    """The figures that a record is drawn as: words side by side, each word layer by layer, then the text's own."""
    return [*(figure.sheet for figure in _figures(record, query)), *_named_as_text(_text_of(record))]


def pages(record: Heatmap, style: Style | None = None, query: str | None = None) -> Iterator[tuple[str, Page]]:
    """The figures one after the other, each with its file name without the ending; a query is words, as `cat,dog`."""
    style = style or Style("head")
    for figure in _figures(record, query):
        yield figure.sheet.stem, _WordsPage(figure, style)
    text = _text_of(record)
    for stem, page in heatmap_figures.Painter(style).pages(text, _named_as_text(text)):
        yield stem, cast("Page", page)


def _named_as_text(text: Heatmap) -> list[Sheet]:
    return [
        replace(sheet, stem=f"text-{sheet.stem}", n_layers=text.maps[sheet.map].n_layers)
        for sheet in heatmap_figures.sheets_of(text)
    ]


def _text_of(record: Heatmap) -> Heatmap:
    """The record with each photo as one key; with cross-attention, that of words to each other."""
    flat = record.with_pictures_as_one()
    return replace(flat, maps=flat.maps[1:]) if flat.maps[0].kind == "cross" and len(flat.maps) > 1 else flat


@dataclass(frozen=True, eq=False)
class _Figure:
    """One figure: a record that is drawn as a vision model's is, with panels in the place of heads."""

    sheet: Sheet
    record: Heatmap  # its keys are the patches of one picture
    names: Mapping[tuple[int, int], str]  # of panels
    shares: Mapping[tuple[int, int], float]  # how much of each panel's attention goes to this picture
    title: str
    about: str  # which heads; it stands above the colours
    notes: tuple[str, ...]


def _figures(record: Heatmap, query: str | None) -> Iterator[_Figure]:
    words, n_words = words_of(record, query)
    heads = record.chosen(record.maps[0])
    layers = sorted({layer for layer, _ in heads})
    of_heads = "the mean of all heads" if record.picked is None else "the mean of the heads that were picked"
    asker = asker_of(record)
    looks = "where learned queries look" if asker == "query" else "where words look"
    left_out = (f"the first {len(words)} of {n_words} {ASKERS[asker]}: --query names others",) * (n_words > len(words))
    rows = [weights_of(record, word, heads) for word in words]
    for number, picture in enumerate(record.pictures):
        panels = {(0, at): (word.name, row) for at, (word, row) in enumerate(zip(words, rows, strict=True))}
        yield _figure(record, picture, panels, f"{ASKERS[asker]}{_mark(record, number)}", looks, of_heads, left_out)
    for at, word in enumerate(words):
        for number, picture in enumerate(record.pictures):
            if picture.source.endswith(SMALL):
                continue
            stem = f"{asker}-{at:02d}-{_slug(word.name)}{_mark(record, number)}"
            title = f"where learned query {word.name} looks" if asker == "query" else f"where “{word.name}” looks"
            if record.picked is not None or len(heads) == 1:
                panels = {pair: (f"L{pair[0]}H{pair[1]}", weights_of(record, word, [pair])) for pair in heads}
                yield _figure(record, picture, panels, stem, title, "head by head")
            else:
                panels = {(0, 0): ("all layers", rows[at])}
                for column, layer in enumerate(layers, 1):
                    mean = weights_of(record, word, [pair for pair in heads if pair[0] == layer])
                    panels[0, column] = (f"layer {layer}", mean)
                yield _figure(record, picture, panels, stem, title, "the mean of each layer's heads")
                if query is not None:
                    yield from _head_figures(record, picture, word, stem, title)


def _head_figures(record: Heatmap, picture: Picture, word: Word, stem: str, title: str) -> Iterator[_Figure]:
    """All heads in small, and each layer's, of a word that a query names."""
    heads = record.chosen(record.maps[0])
    panels = {pair: (f"L{pair[0]}H{pair[1]}", weights_of(record, word, [pair])) for pair in heads}
    whole = _figure(record, picture, panels, stem, title, "head by head")
    for sheet in sheets_of_heads(heads, picked=False, before=f"{stem}-", query=0):
        yield replace(whole, sheet=sheet)


def _figure(
    record: Heatmap,
    picture: Picture,
    panels: Mapping[tuple[int, int], tuple[str, NDArray[np.float64]]],
    stem: str,
    title: str,
    about: str,
    notes: tuple[str, ...] = (),
) -> _Figure:
    layers = tuple(sorted({layer for layer, _ in panels}))
    heads = tuple(sorted({head for _, head in panels}))
    rows, columns = picture.grid
    weights = np.full((len(layers), len(heads), 1, 1 + rows * columns), np.nan, np.float32)
    for (layer, head), (_, row) in panels.items():
        over = np.nan_to_num(picture.over(row)).ravel()
        weights[layers.index(layer), heads.index(head), 0] = [1 - over.sum(), *over]
    first, keys = record.maps[0], _patches(picture)
    attention = AttentionMap(
        kind=first.kind, layers=layers, heads=heads, weights=weights,
        queries=replace(keys.take(np.arange(1)), text=first.queries.text), keys=keys,
        n_layers=layers[-1] + 1, n_heads=heads[-1] + 1, n_kv_heads=heads[-1] + 1,
    )  # fmt: skip
    over_picture = Heatmap(record.text, (attention,), record.run, picture=replace(picture, cells=None))
    shares = {pair: share_of(picture, row) for pair, (_, row) in panels.items()}
    names = {pair: name for pair, (name, _) in panels.items()}
    form: Literal["single", "grid"] = "single" if len(panels) == 1 else "grid"
    return _Figure(Sheet(stem, form, tuple(panels), query=0), over_picture, names, shares, title, about, notes)


def _patches(picture: Picture) -> Tokens:
    """A token for everything elsewhere, then the patches."""
    n = 1 + picture.grid[0] * picture.grid[1]
    labels = [f"{row},{column}" for row in range(picture.grid[0]) for column in range(picture.grid[1])]
    none = np.full((n, 2), -1, np.int32)
    return Tokens("", np.arange(n), ("elsewhere", *labels), none, np.arange(n) < 1, None, np.zeros(n, np.int32))


def _mark(record: Heatmap, number: int) -> str:
    """Tells the files of one picture from those of the others."""
    picture = record.pictures[number]
    photo = list(dict.fromkeys(picture.photo for picture in record.pictures)).index(picture.photo)
    return f"-{photo + 1}" * (photo > 0) + "-small" * picture.source.endswith(SMALL)


def _slug(name: str) -> str:
    return re.sub(r"[^\w]+", "-", name.casefold()).strip("-")[:24] or "mark"


class _WordsPage(PicturePage):
    meaning = _MEANING

    def __init__(self, figure: _Figure, style: Style) -> None:
        self.words_figure = figure
        super().__init__(figure.record, figure.sheet, style)

    def name_panel(self, pair: tuple[int, int]) -> str:
        return self.words_figure.names[pair]

    def title(self) -> str:
        return f"{self.words_figure.title} · {self.record.text}"

    def about(self) -> str:
        return self.words_figure.about

    def _caption(self, pair: tuple[int, int], top: float) -> list[str]:
        return [f"{self.words_figure.shares[pair]:.0%}", f"max {top:.2g}"]

    def _notes(self) -> list[str]:
        notes = [note for note in super()._notes() if "has no place in the picture" not in note]
        asker = asker_of(self.words_figure.record)
        shares = f"percentages: how much of the {asker}'s attention goes to this picture, all its patches together"
        about = [] if self.sheet.form == "overview" else [*[self.words_figure.about] * self.beside, shares]
        return [*about, *self.words_figure.notes, *notes]
