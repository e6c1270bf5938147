"""What does every head attend to? The attention maps that a model gave a text, a picture or a recording. NumPy only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError, amount, require_choice
from attnscope.questions.map_changes import (
    AXES,
    MEAN_OF,
    average,
    divide_by_rest,
    largest_of_rows,
    merge_weights,
)
from attnscope.questions.maps import LINK, MAP_TABLES, ROLLOUT, HeadMaps, MapsResult, freeze, spans
from attnscope.questions.places import Picture, Sound, SpokenWord
from attnscope.results.result import Result
from attnscope.results.table import Array, Table, count, number, text

_MOST = 1.1
"""More than this a row cannot sum to, however it was rounded."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class AttentionMap(HeadMaps):
    """The attention weights of one kind of attention of one model on one text; see `HeadMaps` for its other fields.

    Attributes:
        weights: Attention weights after the softmax, (layer, head, query, key), float32, 0 to 1; each row sums to 1
            (less where a model has sinks, 0 where a query may attend to nothing). NaN where a layer has no such head.
    """

    ARRAYS: ClassVar[tuple[str, ...]] = ("weights",)

    weights: NDArray[np.float32]


@dataclass(frozen=True, eq=False, repr=False)
class Heatmap(MapsResult[AttentionMap]):
    """The exact attention weights of the chosen heads on one text; `MapsResult` has text, maps, run and picked.

    Attributes:
        changes: What was done to the weights after the model gave them, in order: "hide_special", "words", and
            "mean of …", what was averaged.
        picture: Of a vision model: what it saw; the tokens are its patches. None = there is none.
        sound: Of a speech model: what it heard; the keys are frames in time. None = there is none.
        pictures: Of a model that reads pictures among words: what it saw; their `cells` are places among the keys. Of
            one photo there may be several: all of it in detail, and all of it small.
        top: How many of each query's largest weights CSV and JSON have; 0 = all. It is not saved.
    """

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
        Array(
            "weights", "attention after the softmax", "share", (0, 1), axes=("heads", "queries", "keys")
        ),
        Array(
            "pixels",
            "a picture as the model saw it",
            range=(0, 255),
            kind="count",
            axes=("height", "width", "3"),
        ),
        Array(
            "cells",
            "the key that is a patch; -1 = none",
            range=(-1, None),
            kind="count",
            axes=("rows", "columns"),
        ),
        Array("envelope", "the loudest sample of each frame", range=(0, 1), axes=("frames",)),
        Array(
            "spectrogram", "how loud each band is", range=(0, 255), kind="count", axes=("bands", "steps")
        ),
    )
    MAPS: ClassVar[Any] = AttentionMap
    FIELDS: ClassVar[tuple[str, ...]] = ("changes",)

    changes: tuple[str, ...] = ()
    picture: Picture | None = None
    sound: Sound | None = None
    pictures: tuple[Picture, ...] = ()
    top: int = 0

    @property
    def weights(self) -> NDArray[np.float32]:
        """Return the weights of the first map, (layer, head, query, key)."""
        return self.maps[0].weights

    @property
    def tokens(self) -> tuple[str, ...]:
        """Return the labels of the tokens of the first map."""
        return self.maps[0].keys.labels

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the numbers of the layers of the first map."""
        return self.maps[0].layers

    @property
    def heads(self) -> tuple[int, ...]:
        """Return the numbers of the heads of the first map."""
        return self.maps[0].heads

    @property
    def is_of_text(self) -> bool:
        """Return whether it is neither of a picture nor of a recording."""
        return self.picture is None and self.sound is None and not self.pictures

    @property
    def usual_scale(self) -> Any:
        """Return what is drawn darkest: weight 1; of pictures and sound each head's largest."""
        return "fixed" if self.is_of_text else "head"

    # Changes

    def sinks(self, attention: AttentionMap) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which queries and which keys of one of its maps are sinks, as `Tokens.sinks` has them.

        The first token of a decoder is one where its text is words, begins in this map, and has its sinks still.
        """
        # Without a kind only special tokens count; a part that begins later does not have the first token.
        first_query, first_key = attention.first
        kind = attention.kind if self.is_of_text and "hide_special" not in self.changes else ""
        return attention.queries.sinks("" if first_query else kind), attention.keys.sinks(
            "" if first_key else kind
        )

    def without_sinks(self) -> Heatmap:
        """Return the same where sinks get nothing: each row is divided by what other keys get, as by `hide_special`.

        Rows and columns stay. A record without sinks, or whose special tokens are hidden, stays as it is.

        Raises:
            AttnscopeError: It is a part of a map, or its word pieces are merged.
        """
        has_sinks = any(keys.any() for _, keys in map(self.sinks, self.maps))
        if {"hide_special", "without_sinks"} & {*self.changes} or not has_sinks:
            return self
        if "words" in self.changes or self.pictures or any(m.part is not None for m in self.maps):
            raise AttnscopeError("sinks are left out of whole maps of tokens, not of a part or of words")
        maps = []
        for attention in self.maps:
            others = np.where(self.sinks(attention)[1], 0, attention.weights)
            maps.append(replace(attention, weights=divide_by_rest(others).astype(np.float32)))
        return replace(self, maps=tuple(maps), changes=(*self.changes, "without_sinks"))

    def hide_special(self, *, keep: str | None = None) -> Heatmap:
        """Return the same without the special tokens: each row that stays is divided by what is left of it.

        Of a decoder the first token goes too, see `Tokens.sinks`. A row of which less than 1% is left becomes zeros:
        dividing would make a strong link of next to nothing. A record without such tokens, or with hidden ones, stays
        as it is.

        Args:
            keep: Tokens whose rows stay, though their columns go.

        Raises:
            AttnscopeError: It is a part of a map, its word pieces are merged, or nothing would be left.
        """
        if "hide_special" in self.changes or not any(
            side.any() for m in self.maps for side in self.sinks(m)
        ):
            return self
        if any(m.part is not None for m in self.maps) or self.pictures:
            raise AttnscopeError(
                "special tokens are hidden in whole maps, not in a part: its rows do not sum to 1"
            )
        if "words" in self.changes:
            raise AttnscopeError("special tokens are hidden before word pieces are merged, not after")
        maps = []
        for attention in self.maps:
            rows, columns = (~side for side in self.sinks(attention))
            if keep is not None:
                rows[list(attention.queries.find(keep))] = True
            if not rows.any() or not columns.any():
                raise AttnscopeError(
                    "nothing is left when special tokens are hidden", "the text has no other tokens"
                )
            shares = divide_by_rest(attention.weights[:, :, rows][:, :, :, columns]).astype(np.float32)
            queries, keys = attention.queries.take(rows), attention.keys.take(columns)
            maps.append(replace(attention, weights=shares, queries=queries, keys=keys))
        return replace(self, maps=tuple(maps), changes=(*self.changes, "hide_special"))

    def merge_words(self) -> Heatmap:
        """Return the same word by word: weights to the pieces of a word are summed, weights from them averaged.

        Rows keep their sum (Clark et al. 2019, section 4.1); pieces whose row is empty take no part.

        Raises:
            AttnscopeError: The tokenizer cannot tell which tokens make a word.
        """
        if any(side.words is None for m in self.maps for side in (m.queries, m.keys)):
            raise AttnscopeError(
                "words are not known: this model's tokenizer cannot tell where its tokens stand in the text",
                "leave out --words",
            )
        maps = []
        pictures = self.pictures
        for attention in self.maps:
            rows, columns = attention.queries.word_groups(), attention.keys.word_groups()
            word_of = np.repeat(np.arange(len(columns)), [len(group) for group in columns])
            part = attention.part  # (first query, first key, queries of the whole, keys of the whole)
            if attention is self.maps[0]:
                pictures = tuple(picture.move(word_of) for picture in self.pictures)
            if self.pictures and part is not None and attention.kind != "cross":
                # Of all keys: words before the pictures may have been merged.
                part = (int(word_of[part[0]]), 0, len(columns), len(columns))
            queries, keys = attention.queries.merge(rows), attention.keys.merge(columns)
            weights = merge_weights(attention.weights, [g[0] for g in rows], [g[0] for g in columns])
            maps.append(replace(attention, weights=weights, queries=queries, keys=keys, part=part))
        # The queries of cross-attention are the words of the next map, which were counted there.
        if (
            len(maps) > 1
            and maps[0].kind == "cross"
            and maps[0].part is not None
            and maps[1].part is not None
        ):
            whole = (maps[1].part[0], 0, maps[1].part[2], len(maps[0].keys))
            maps[0] = replace(maps[0], part=whole)
        return replace(self, maps=tuple(maps), changes=(*self.changes, "words"), pictures=pictures)

    @property
    def averaged(self) -> str:
        """Return what its maps are the mean of, such as "mean of 72 heads"; empty = they are those of heads."""
        return next((change for change in self.changes if change.startswith(MEAN_OF)), "")

    def average(self, over: str) -> Heatmap:
        """Return the same with means of the heads that are shown, in place of heads.

        Args:
            over: "heads" of each layer, "layers" for each head, or "all" of both.

        Raises:
            AttnscopeError: There is no such mean.
        """
        require_choice("mean over", over, [*AXES])
        if self.averaged:
            return self
        shown = [(attention, self.chosen(attention)) for attention in self.maps]
        maps = tuple(average(attention, heads, over) for attention, heads in shown if heads)
        # What the mean is of, in words: by the heads of the first map, or of the last if that shows none.
        heads = shown[0][1] or shown[-1][1]
        layers = spans(sorted({layer for layer, _ in heads}))
        numbers = spans(sorted({head for _, head in heads}))
        change = f"{MEAN_OF}{amount(len(heads), 'head')}"
        if over == "heads":
            change = f"{MEAN_OF}heads {numbers} in each layer"
        elif over == "layers":
            change = f"{MEAN_OF}layers {layers} for each head"
        return replace(self, maps=maps, picked=None, changes=(*self.changes, change))

    def with_pictures_as_one(self) -> Heatmap:
        """Return the same with each photo as one key, that gets what all its patches get: a map of words is left.

        What stands between its patches (ends of rows, marks of tiles) is one key more. Where words attend across to
        the pictures, all else that they look at is one key, and maps of other kinds stay as they are.
        """
        attention = self.maps[0]
        is_across = attention.kind == "cross"
        photos: dict[str, list[int]] = {}
        for picture in self.pictures:
            assert picture.cells is not None
            photos.setdefault(picture.photo, []).extend(picture.cells[picture.cells >= 0].tolist())
        # The keys that become one, by what that is called.
        merged = {**photos}
        if is_across:
            merged["elsewhere"] = sorted({*range(len(attention.keys))} - {*sum(photos.values(), [])})
        else:
            for photo, places in photos.items():
                merged[f"marks of {photo}"] = sorted({*range(min(places), max(places))} - {*places})
        # The first key of its group, for each key.
        group = np.arange(len(attention.keys))
        names = {}
        for name, places in merged.items():
            if places:
                names[min(places)] = name
                group[places] = min(places)
        firsts, inverse = np.unique(group, return_inverse=True)
        labels = tuple(names.get(place, attention.keys.labels[place]) for place in firsts.tolist())
        keys = replace(attention.keys.take(firsts), labels=labels)
        # Weights, (layer, head, query, key), summed by group.
        order = np.argsort(inverse, kind="stable")
        starts = np.searchsorted(inverse[order], np.arange(len(firsts)))
        weights = np.add.reduceat(
            attention.weights[..., order], starts, axis=3, dtype=np.float64
        ).astype(np.float32)
        part = attention.part
        if part is not None and is_across:
            part = (part[0], 0, part[2], len(firsts))
        elif part is not None:
            # Where no row is kept, the first one lies behind all keys.
            part = (int(inverse[min(part[0], len(inverse) - 1)]), 0, len(firsts), len(firsts))
        folded = replace(attention, weights=weights, keys=keys, part=part)
        return replace(self, maps=(folded, *self.maps[1:]), pictures=())

    def make_square(self) -> Heatmap:
        """Return the same with as many rows as columns, and pictures as one key each: rows not kept are empty.

        Raises:
            AttnscopeError: It is a part that holds some of the keys alone.
        """
        record = self.with_pictures_as_one() if self.pictures else self
        return replace(
            record, maps=tuple(_with_all_rows(attention, record.maps) for attention in record.maps)
        )

    # Files

    def rows(self) -> Iterator[Sequence[Any]]:
        """Return a row for each weight of the heads that are shown, the names of columns first."""
        yield LINK
        for attention in self.maps:
            first_query, first_key = attention.first
            for layer, head in self.chosen(attention):
                layer_name = "mean" if self.averaged and attention.n_layers == 1 else layer
                name = attention.head_name(head) if attention.head_names else head
                weights = attention.of(layer, head)
                for query, key in largest_of_rows(weights, self.top):
                    weight = weights[query, key]
                    tokens = attention.queries.labels[query], attention.keys.labels[key]
                    yield (
                        attention.kind,
                        layer_name,
                        name,
                        first_query + query,
                        first_key + key,
                        *tokens,
                        float(str(weight)),  # no more digits than float32 has
                    )

    def as_json(self) -> dict[str, Any]:
        """Return what `Result` does; with `top` the largest weights are in `links`, the others are left out."""
        document = super().as_json()
        if self.top:
            header, *rows = self.rows()
            document = {
                name: value for name, value in document.items() if name.partition(":")[0] != "weights"
            }
            document["links"] = [dict(zip(header, row, strict=True)) for row in rows]
        return document

    def more_parts(self) -> tuple[dict[str, Table], dict[str, NDArray[Any]], dict[str, Any]]:
        """Return the words of a recording, what was seen and heard, and what describes it."""
        tables: dict[str, Table] = {}
        arrays: dict[str, NDArray[Any]] = {}
        options: dict[str, Any] = {
            "picture": None if self.picture is None else self.picture.describe(),
            "pictures": [picture.describe() for picture in self.pictures],
            "sound": None if self.sound is None else self.sound.describe(),
        }
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
            if self.sound.words:
                rows = [(word.text, word.start, word.end, *word.tokens) for word in self.sound.words]
                tables["words"] = Table.of_rows(self.TABLES["words"], rows)
        return tables, arrays, options

    @classmethod
    def read_more(cls, stored: Result) -> dict[str, Any]:
        """Return the pictures and the sound that were kept."""
        options, arrays = stored.options, stored.grids
        more: dict[str, Any] = {"pictures": []}
        # The one picture has no number in the names of its arrays, those among words have :0, :1 and so on.
        described = [
            ("", options["picture"]),
            *((f":{n}", each) for n, each in enumerate(options["pictures"])),
        ]
        for name, fields in described:
            if fields is None:
                continue
            cells = arrays[f"cells{name}"].astype(np.int32) if name else None
            known = {key: freeze(value) for key, value in fields.items()}
            picture = Picture(pixels=arrays[f"pixels{name}"].astype(np.uint8), cells=cells, **known)
            picture.require_whole()
            if name:
                more["pictures"].append(picture)
            else:
                more["picture"] = picture
        more["pictures"] = tuple(more["pictures"])
        if options["sound"] is not None:
            words: tuple[SpokenWord, ...] = ()
            if "words" in stored.tables:
                _, *rows = stored.tables["words"].rows()  # the names of columns come first
                words = tuple(
                    SpokenWord(word, start, end, (first, stop)) for word, start, end, first, stop in rows
                )
            known = {key: freeze(value) for key, value in options["sound"].items()}
            sound = Sound.rebuild(known, arrays["envelope"], arrays.get("spectrogram"), words)
            sound.require_whole()
            more["sound"] = sound
        return more

    def require_whole(self) -> None:
        """Refuse weights that are none, and tokens that are not those of its picture or sound."""
        super().require_whole()
        # Weights, and the tokens that they are of.
        for attention in self.maps:
            weights = attention.weights
            if not weights.size:
                raise ValueError("its weights are empty")
            if np.nansum(weights, -1).max() > _MOST:
                raise ValueError("its weights sum to more than 1 in a row")
            if self.sound is not None and len(attention.keys) != len(self.sound.envelope):
                raise ValueError("its keys are not the frames of its sound")
            for tokens in (attention.queries, attention.keys):
                if self.picture is not None and int((~tokens.special).sum()) != np.prod(
                    self.picture.grid
                ):
                    raise ValueError("its tokens are not the patches of its picture")
        for picture in self.pictures:
            cells = picture.cells
            if cells is None or not -1 <= cells.min() <= cells.max() < len(self.maps[0].keys):
                raise ValueError("its tokens are not the patches of its pictures")


@dataclass(frozen=True, eq=False, repr=False)
class Rollout(Heatmap):
    """Attention rollout of one model on one text (Abnar & Zuidema 2020), beside the mean attention of each layer.

    The two stand in the place of heads. The columns of mean attention are the layer's keys, those of rollout are the
    input tokens: how much of each is in each place after the layer.

    With a target it is relevance for that (Chefer et al. 2021), beside the gradient × attention of each layer: of both
    each row is divided by its sum.

    Attributes:
        residual: The share of the identity in each layer, for the residual connection.
        target: The next or masked token, or the class, whose score is explained; empty = it is rollout.
        answer_token: The token whose row says what matters for the target; -1 = it is rollout.
    """

    FIELDS: ClassVar[tuple[str, ...]] = ("changes", "residual", "target", "answer_token")
    SCHEMA: ClassVar[str] = "attnscope.rollout/2"
    _repr_html_ = Result._repr_html_  # type: ignore[assignment]  # a notebook shows its tables, as the terminal does
    _repr_png_ = None  # type: ignore[assignment]

    residual: float = 0.5
    target: str = ""
    answer_token: int = -1

    @property
    def mean(self) -> NDArray[np.float32]:
        """Return what the heads of each layer attend to on average, (layer, query, key)."""
        return self.maps[0].weights[:, 0]

    @property
    def rollout(self) -> NDArray[np.float32]:
        """Return the share of each input token at each place after each layer, (layer, query, token); rows sum to 1."""
        return self.maps[0].weights[:, 1]

    @property
    def usual_scale(self) -> Any:
        """Return the figure's largest; over a picture, each map's."""
        return "figure" if self.picture is None else "head"

    @property
    def method(self) -> str:
        """Return how it was computed, in a sentence."""
        if self.target:
            return (
                f"relevance for “{self.target}”: gradient × attention through all layers, in shares of each row "
                "(Chefer et al. 2021)"
            )
        return (
            f"rollout: the identity has {self.residual:g} of each layer, for the residual connection "
            "(Abnar & Zuidema 2020)"
        )

    @classmethod
    def of_layers(
        cls,
        record: Heatmap,
        mean: NDArray[Any],
        rolled: NDArray[Any],
        residual: float,
        target: str = "",
        answer_token: int = -1,
    ) -> Rollout:
        """Return the rollout of all layers of a record, (layer, query, key), beside the mean over heads."""
        names = ("gradient × attention", "relevance") if target else ("mean attention", "rollout")
        attention = replace(
            record.maps[0],
            kind=ROLLOUT,
            heads=(0, 1),
            n_heads=2,
            n_kv_heads=2,
            weights=np.stack([mean, rolled], 1).astype(np.float32),
            head_names=names,
        )
        return cls(
            run=record.run,
            text=record.text,
            maps=(attention,),
            picture=record.picture,
            residual=residual,
            target=target,
            answer_token=answer_token,
        )


def _with_all_rows(attention: AttentionMap, maps: Sequence[AttentionMap]) -> AttentionMap:
    """Return a part with empty rows for the queries that it lacks: a word has the same row in all maps.

    A part of what words look at across stays as it is where no other map has those words.
    """
    if attention.part is None:
        return attention
    first, first_key, n_queries, n_keys = attention.part
    queries = attention.keys
    if attention.kind == "cross":
        others = [m.keys for m in maps if m.kind != "cross" and len(m.keys) == n_queries]
        if not others:
            return replace(attention, part=None)
        queries = others[0]
    rows = slice(first, first + len(attention.queries))
    if first_key or len(attention.keys) != n_keys or queries.labels[rows] != attention.queries.labels:
        raise AttnscopeError("a part of a map with some of its keys has no page", "leave out --cols")
    weights = np.zeros((*attention.weights.shape[:2], len(queries), len(attention.keys)), np.float32)
    weights[:, :, rows] = attention.weights
    return replace(attention, weights=weights, queries=queries, part=None)
