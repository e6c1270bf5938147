"""What does every head attend to? The attention maps that a model gave a text, a picture or a recording. NumPy only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.questions.maps import MAP_TABLES, ROLLOUT, HeadMaps, MapsResult
from attnscope.questions.places import Picture, Sound, SpokenWord
from attnscope.results.record import Record
from attnscope.results.result import Result
from attnscope.results.table import Array, Table, count, number, text
from attnscope.results.tokens import Tokens

LEAST_LEFT = 0.01
"""What must be left of a row without special tokens for it to be shown."""

_MOST = 1.1
"""More than this a row cannot sum to, however it was rounded."""


class StoredHeatmap(Result):
    """The tables and arrays of a heatmap, as files keep them."""

    SCHEMA: ClassVar[str] = "attnscope.heatmap/2"
    TABLES: ClassVar[Any] = {
        **MAP_TABLES,
        "words": (
            text("word", "a word of the transcript, with the punctuation after it"),
            number("start_s", "when it begins", "s", range=(0, None)),
            number("end_s", "when the next word begins", "s", range=(0, None)),
            count("first_token", "its first token in the transcript", range=(0, None)),
            count("stop_token", "the token after its last one", range=(0, None)),
        ),
    }
    ARRAYS: ClassVar[Any] = (
        Array("weights", "attention after the softmax", "share", (0, 1), axes=("heads", "queries", "keys")),
        Array("pixels", "a picture as the model saw it", range=(0, 255), kind="count", axes=("height", "width", "3")),
        Array("cells", "the key that is a patch; -1 = none", range=(-1, None), kind="count", axes=("rows", "columns")),
        Array("envelope", "the loudest sample of each frame", range=(0, 1), axes=("frames",)),
        Array("spectrogram", "how loud each band is", range=(0, 255), kind="count", axes=("bands", "steps")),
    )


@dataclass(frozen=True, eq=False, repr=False)
class AttentionMap(HeadMaps):
    """The attention weights of one kind of attention of one model on one text.

    Attributes:
        kind: "encoder", "decoder" (its own), or "cross" (a decoder's on the encoder).
        layers: Numbers of the layers in `weights`, from 0.
        heads: Numbers of the heads in `weights`, from 0.
        weights: Attention weights after the softmax, (layer, head, query, key), float32, 0 to 1; each row sums to 1
            (less where a model has sinks, 0 where a query may attend to nothing). NaN where a layer has no such head.
        queries: The tokens that attend, row by row.
        keys: The tokens that are attended to, column by column; `queries` itself but for cross-attention.
        n_layers: How many layers of this kind the model has.
        n_heads: How many heads a layer has (the most, where layers differ).
        n_kv_heads: How many key/value heads a layer has; fewer than n_heads where query heads share them.
        part: Of which map this is a part: (first query, first key, queries of the whole, keys of the whole); None = it
            is the whole.
        head_names: What stands in the place of heads is called, such as "mean attention"; empty = they are heads.
    """

    ARRAYS: ClassVar[tuple[str, ...]] = ("weights",)

    kind: str
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    weights: NDArray[np.float32]
    queries: Tokens
    keys: Tokens
    n_layers: int
    n_heads: int
    n_kv_heads: int
    part: tuple[int, int, int, int] | None = None
    head_names: tuple[str, ...] = ()

    @property
    def has_weights(self) -> bool:
        """Whether the weights are there; a record that is drawn ahead of its model has none yet."""
        return self.weights.shape[2:] == (len(self.queries), len(self.keys))


@dataclass(frozen=True, eq=False, repr=False)
class Heatmap(MapsResult[AttentionMap]):
    """What every chosen head of a model attends to on one text.

    Attributes:
        text: The text as given.
        maps: The attention, one map a kind: one for encoders and for decoders; encoder, decoder and cross for both.
        run: What made it: model, sha256, engine, versions, dtype, device, notes ... Plain JSON values.
        picked: Single heads that were asked for, as (layer, head); None = all in the maps.
        changes: What was done to the weights after the model gave them, in order: "hide_special", "words".
        picture: Of a vision model: what it saw; the tokens are its patches. None = there is none.
        sound: Of a speech model: what it heard; the keys are frames in time. None = there is none.
        pictures: Of a model that reads pictures among words: what it saw; their `cells` are places among the keys. Of
            one photo there may be several: all of it in detail, and all of it small.
    """

    SCHEMA: ClassVar[str] = StoredHeatmap.SCHEMA
    STORED: ClassVar[type[Result]] = StoredHeatmap
    MAPS: ClassVar[Any] = AttentionMap
    FIELDS: ClassVar[tuple[str, ...]] = ("changes",)

    text: str
    maps: tuple[AttentionMap, ...]
    run: Mapping[str, Any]
    picked: tuple[tuple[int, int], ...] | None = None
    changes: tuple[str, ...] = ()
    picture: Picture | None = None
    sound: Sound | None = None
    pictures: tuple[Picture, ...] = ()

    @property
    def weights(self) -> NDArray[np.float32]:
        """The weights of the first map, (layer, head, query, key)."""
        return self.maps[0].weights

    @property
    def tokens(self) -> tuple[str, ...]:
        """The labels of the tokens of the first map."""
        return self.maps[0].keys.labels

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers of the first map."""
        return self.maps[0].layers

    @property
    def heads(self) -> tuple[int, ...]:
        """Numbers of the heads of the first map."""
        return self.maps[0].heads

    def sinks(self, attention: AttentionMap) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which queries and which keys of one of its maps are sinks, as `Tokens.sinks` has them.

        The first token of a decoder is one where its text is words, begins in this map, and has its sinks still.
        """
        first_query, first_key = (0, 0) if attention.part is None else attention.part[:2]
        kind = attention.kind if self.is_of_text and "hide_special" not in self.changes else ""
        return (
            attention.queries.sinks("" if first_query else kind),
            attention.keys.sinks("" if first_key else kind),
        )

    def hide_special(self) -> Heatmap:
        """Without the special tokens: their rows and columns go, every remaining row is divided by what is left of it.

        Of a decoder the first token goes too, see `Tokens.sinks`. A row of which less than 1% is left becomes zeros:
        dividing would make a strong link of next to nothing. A record without such tokens, or with hidden ones, stays
        as it is.
        """
        if "hide_special" in self.changes or not any(side.any() for m in self.maps for side in self.sinks(m)):
            return self
        if any(m.part is not None for m in self.maps) or self.pictures:
            raise AttnscopeError("special tokens are hidden in whole maps, not in a part: its rows do not sum to 1")
        if "words" in self.changes:
            raise AttnscopeError("special tokens are hidden before word pieces are merged, not after")
        maps = []
        for attention in self.maps:
            rows, columns = (~side for side in self.sinks(attention))
            if not rows.any() or not columns.any():
                raise AttnscopeError("nothing is left when special tokens are hidden", "the text has no other tokens")
            queries, keys = attention.queries.take(rows), attention.keys.take(columns)
            shares = attention.weights
            if attention.has_weights:
                shares = divide_by_rest(shares[:, :, rows][:, :, :, columns]).astype(np.float32)
            maps.append(replace(attention, weights=shares, queries=queries, keys=keys))
        return replace(self, maps=tuple(maps), changes=(*self.changes, "hide_special"))

    def merge_words(self) -> Heatmap:
        """Word by word: weights to the pieces of a word are summed, weights from them averaged.

        Rows keep their sum (Clark et al. 2019, section 4.1); pieces whose row is empty take no part.

        Raises:
            AttnscopeError: The tokenizer cannot tell which tokens make a word.
        """
        maps = []
        pictures = self.pictures
        for place, attention in enumerate(self.maps):
            if attention.queries.words is None or attention.keys.words is None:
                raise AttnscopeError(
                    "words are not known: this model's tokenizer cannot tell where its tokens stand in the text",
                    "leave out --words",
                )
            rows, columns = attention.queries.word_groups(), attention.keys.word_groups()
            place_of = np.repeat(np.arange(len(columns)), [len(group) for group in columns])
            if place == 0:
                pictures = tuple(picture.move(place_of) for picture in self.pictures)
            means: NDArray[np.floating[Any]] = attention.weights
            if attention.has_weights:
                summed = np.add.reduceat(means.astype(np.float64), [group[0] for group in columns], axis=3)
                starts = [group[0] for group in rows]
                # A piece whose row is empty says nothing of its word.
                filled = np.add.reduceat(summed.any(-1), starts, axis=2, dtype=np.int64)
                means = np.add.reduceat(summed, starts, axis=2) / np.maximum(filled, 1)[..., None]
            queries, keys = attention.queries.merge(rows), attention.keys.merge(columns)
            part = attention.part
            if self.pictures and part is not None and attention.kind != "cross":
                # Of all keys: words before the pictures may have been merged.
                part = (int(place_of[part[0]]), 0, len(columns), len(columns))
            maps.append(replace(attention, weights=means.astype(np.float32), queries=queries, keys=keys, part=part))
        if len(maps) > 1 and maps[0].kind == "cross" and maps[0].part is not None and maps[1].part is not None:
            whole = (maps[1].part[0], 0, maps[1].part[2], len(maps[0].keys))  # its queries are these
            maps[0] = replace(maps[0], part=whole)
        return replace(self, maps=tuple(maps), changes=(*self.changes, "words"), pictures=pictures)

    def with_pictures_as_one(self) -> Heatmap:
        """The same with each photo as one key, that gets what all its patches get: what is left is a map of words.

        What stands between its patches (ends of rows, marks of tiles) is one key more. Where words attend across to
        the pictures, all else that they look at is one key, and maps of other kinds stay as they are.
        """
        attention = self.maps[0]
        photos: dict[str, list[int]] = {}
        for picture in self.pictures:
            assert picture.cells is not None
            photos.setdefault(picture.photo, []).extend(picture.cells[picture.cells >= 0].tolist())
        group = np.arange(len(attention.keys))
        starts: dict[int, str] = {}
        for photo, places in photos.items():
            between = sorted({*range(min(places), max(places))} - {*places})
            for name, some in ((photo, places), (f"marks of {photo}", between)):
                if some:
                    starts[min(some)] = name
                    group[some] = min(some)
        if attention.kind == "cross":
            elsewhere = sorted({*range(len(group))} - {place for places in photos.values() for place in places})
            starts = {min(places): photo for photo, places in photos.items()}
            if elsewhere:
                starts[elsewhere[0]] = "elsewhere"
                group[elsewhere] = elsewhere[0]
        firsts, inverse = np.unique(group, return_inverse=True)
        keys = attention.keys.take(firsts)
        labels = zip(firsts.tolist(), keys.labels, strict=True)
        keys = replace(keys, labels=tuple(starts.get(place, label) for place, label in labels))
        weights: NDArray[np.floating[Any]] = attention.weights
        if attention.has_weights:
            order = np.argsort(inverse, kind="stable")
            starting = np.searchsorted(inverse[order], np.arange(len(firsts)))
            weights = np.add.reduceat(weights[..., order], starting, axis=3, dtype=np.float64)
        first = 0 if attention.part is None else int(inverse[min(attention.part[0], len(inverse) - 1)])
        part = None if attention.part is None else (first, 0, len(firsts), len(firsts))
        if attention.part is not None and attention.kind == "cross":
            part = (attention.part[0], 0, attention.part[2], len(firsts))
        folded = replace(attention, weights=weights.astype(np.float32), keys=keys, part=part)
        return replace(self, maps=(folded, *self.maps[1:]), pictures=())

    def make_square(self) -> Heatmap:
        """The same with as many rows as columns, and pictures as one key each: rows that are not kept are empty.

        Raises:
            AttnscopeError: It is a part that holds some of the keys alone.
        """
        record = self.with_pictures_as_one() if self.pictures else self
        maps = []
        for attention in record.maps:
            if attention.part is not None and attention.kind == "cross":
                attention = _with_empty_rows(attention, record.maps)
            if attention.part is not None:
                n, (first, left, _, n_keys) = len(attention.keys), attention.part
                rows = slice(first, first + len(attention.queries))
                if left or n != n_keys or attention.keys.labels[rows] != attention.queries.labels:
                    raise AttnscopeError("a part of a map with some of its keys alone has no page", "leave out --cols")
                weights = np.zeros((*attention.weights.shape[:2], n, n), np.float32)
                weights[:, :, rows] = attention.weights
                attention = replace(attention, weights=weights, queries=attention.keys, part=None)
            maps.append(attention)
        return replace(record, maps=tuple(maps))

    @property
    def is_of_text(self) -> bool:
        """Whether it is neither of a picture nor of a recording."""
        return self.picture is None and self.sound is None and not self.pictures

    @property
    def usual_scale(self) -> Any:
        """Weight 1; of pictures and sound each head's largest."""
        return "fixed" if self.is_of_text else "head"

    def rows(self) -> Iterator[Sequence[Any]]:
        """Return a row for each weight of the heads that are shown, the names of columns first."""
        yield "kind", "layer", "head", "query", "key", "query_token", "key_token", "weight"
        for attention in self.maps:
            first_query, first_key = (0, 0) if attention.part is None else attention.part[:2]
            for layer, head in self.chosen(attention):
                name = attention.head_name(head) if attention.head_names else head
                for (query, key), weight in np.ndenumerate(attention.of(layer, head)):
                    tokens = attention.queries.labels[query], attention.keys.labels[key]
                    yield attention.kind, layer, name, first_query + query, first_key + key, *tokens, float(str(weight))

    def more_tables(self) -> dict[str, Table]:
        """Return the words of a recording."""
        words = self.sound.words if self.sound is not None else ()
        if not words:
            return {}
        table = Table.of_arrays(
            StoredHeatmap.TABLES["words"],
            word=[word.text for word in words],
            start_s=[word.start for word in words],
            end_s=[word.end for word in words],
            first_token=[word.tokens[0] for word in words],
            stop_token=[word.tokens[1] for word in words],
        )
        return {"words": table}

    def more_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the pixels of pictures, and what was heard."""
        arrays: dict[str, NDArray[Any]] = {}
        if self.picture is not None:
            arrays["pixels"] = self.picture.pixels
        for place, picture in enumerate(self.pictures):
            assert picture.cells is not None
            arrays[f"pixels:{place}"] = picture.pixels
            arrays[f"cells:{place}"] = picture.cells
        if self.sound is not None:
            arrays["envelope"] = self.sound.envelope
            if self.sound.spectrogram is not None:
                arrays["spectrogram"] = self.sound.spectrogram.levels
        return arrays

    def more_options(self) -> dict[str, Any]:
        """Return what describes pictures and sound."""
        return {
            "picture": None if self.picture is None else self.picture.describe(),
            "pictures": [picture.describe() for picture in self.pictures],
            "sound": None if self.sound is None else self.sound.describe(),
        }

    @classmethod
    def read_more(cls, stored: Result) -> dict[str, Any]:
        """Return the pictures and the sound that were kept."""
        options, arrays = stored.options, stored.grids
        more: dict[str, Any] = {}
        if options["picture"] is not None:
            more["picture"] = Picture.rebuild(options["picture"], arrays["pixels"])
        more["pictures"] = tuple(
            Picture.rebuild(described, arrays[f"pixels:{place}"], arrays[f"cells:{place}"])
            for place, described in enumerate(options["pictures"])
        )
        if options["sound"] is not None:
            words = tuple(
                SpokenWord(word, start, end, (first, stop)) for word, start, end, first, stop in _rows(stored, "words")
            )
            levels = arrays.get("spectrogram")
            more["sound"] = Sound.rebuild(options["sound"], arrays["envelope"], levels, words)
        return more

    def require_whole(self) -> None:
        """Refuse weights that are none, and tokens that are not those of its picture or sound."""
        super().require_whole()
        for attention in self.maps:
            weights = attention.weights
            if not weights.size:
                raise ValueError("its weights are empty")
            if np.any(weights < 0) or np.any(weights > _MOST):
                raise ValueError("its weights are not between 0 and 1")
            if np.nansum(weights, -1).max() > _MOST:
                raise ValueError("its weights sum to more than 1 in a row")
        if self.picture is not None:
            n_patches = self.picture.grid[0] * self.picture.grid[1]
            sides = [tokens for attention in self.maps for tokens in (attention.queries, attention.keys)]
            if any(int((~tokens.special).sum()) != n_patches for tokens in sides):
                raise ValueError("its tokens are not the patches of its picture")
        for picture in self.pictures:
            cells = picture.cells
            if cells is None or not -1 <= cells.min() <= cells.max() < len(self.maps[0].keys):
                raise ValueError("its tokens are not the patches of its pictures")
        if self.sound is not None and any(len(m.keys) != len(self.sound.envelope) for m in self.maps):
            raise ValueError("its keys are not the frames of its sound")


@dataclass(frozen=True, eq=False, repr=False)
class Rollout(Heatmap):
    """Attention rollout of one model on one text (Abnar & Zuidema 2020), beside the mean attention of each layer.

    The two stand in the place of heads. Of mean attention columns are the keys of the layer, of rollout they are the
    input tokens: how much of each is in each place after the layer.

    Attributes:
        residual: The share of the identity in each layer, for the residual connection.
    """

    FIELDS: ClassVar[tuple[str, ...]] = ("changes", "residual")
    SCHEMA: ClassVar[str] = "attnscope.rollout/2"
    _repr_html_ = Record._repr_html_  # type: ignore[assignment]  # a notebook shows its tables, as the terminal does
    _repr_png_ = None  # type: ignore[assignment]

    residual: float = 0.5

    @property
    def mean(self) -> NDArray[np.float32]:
        """What the heads of each layer attend to on average, (layer, query, key)."""
        return self.maps[0].weights[:, 0]

    @property
    def rollout(self) -> NDArray[np.float32]:
        """How much of each input token is in each place after each layer, (layer, query, token); rows sum to 1."""
        return self.maps[0].weights[:, 1]

    @property
    def usual_scale(self) -> Any:
        """The figure's largest; over a picture, each map's."""
        return "figure" if self.picture is None else "head"

    @property
    def method(self) -> str:
        """How it was computed, in a sentence."""
        return (
            f"rollout: the identity has {self.residual:g} of each layer, for the residual connection "
            "(Abnar & Zuidema 2020)"
        )

    @classmethod
    def of_layers(cls, record: Heatmap, mean: NDArray[Any], rolled: NDArray[Any], residual: float) -> Rollout:
        """Return the rollout of all layers of a record, (layer, query, key), beside the mean over heads."""
        attention = record.maps[0]
        names = ("mean attention", "rollout")
        maps = replace(
            attention,
            kind=ROLLOUT,
            heads=(0, 1),
            n_heads=2,
            n_kv_heads=2,
            weights=np.stack([mean, rolled], 1).astype(np.float32),
            head_names=names,
        )
        return cls(record.text, (maps,), record.run, picture=record.picture, residual=residual)


class StoredRollout(StoredHeatmap):
    """The tables and arrays of a rollout."""

    SCHEMA: ClassVar[str] = Rollout.SCHEMA


Rollout.STORED = StoredRollout


def _rows(stored: Result, table: str) -> Iterator[Sequence[Any]]:
    """Return the rows of a table; none where there is no such table."""
    if table in stored.tables:
        _, *rows = stored.table(table).rows()
        yield from rows


def _with_empty_rows(across: AttentionMap, maps: tuple[AttentionMap, ...]) -> AttentionMap:
    """A part of what words look at across, with empty rows for those before: a word has the same row in all maps.

    As it is where no other map has those words.
    """
    assert across.part is not None
    first, _, n, _ = across.part
    words = next((m.keys for m in maps if m.kind != "cross" and len(m.keys) == n), None)
    if words is None:
        return replace(across, part=None)
    weights = np.zeros((*across.weights.shape[:2], n, len(across.keys)), np.float32)
    weights[:, :, first:] = across.weights
    return replace(across, weights=weights, queries=words, part=None)


def divide_by_rest(weights: NDArray[Any]) -> NDArray[np.float64]:
    """What is left of rows without some of their keys, (..., key), each divided by its sum.

    A row of which less than 1% is left becomes zeros; NaN stays.
    """
    exact = weights.astype(np.float64)
    total = exact.sum(-1, keepdims=True)
    nothing = np.where(np.isnan(exact), np.nan, 0.0)
    shares: NDArray[np.float64] = np.divide(exact, total, out=nothing, where=total >= LEAST_LEFT)
    return shares
