"""Declare the exact attention maps of a model on a text, a picture or a recording, and the changes to their weights.

NumPy only: `heatmap_figures` draws them, `heatmap_terminal` prints them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError, amount, require_choice
from attnscope.questions.map_changes import (
    MEAN_AXES,
    MEAN_NAME_PREFIX,
    average_heads,
    fill_missing_rows,
    merge_pictures,
    merge_weights,
    renormalise,
    yield_largest_pairs,
)
from attnscope.questions.maps import (
    LINK_COLUMNS,
    MAP_TABLES,
    ROLLOUT,
    HeadMaps,
    MapPart,
    MapsResult,
    format_ranges,
    tuples_of_lists,
)
from attnscope.questions.places import Picture, Sound, SpokenWord
from attnscope.results.result import Result
from attnscope.results.table import Array, Table, count, number, text

MAX_ROW_SUM = 1.1
"""The largest sum of a row of weights that rounding explains; a larger sum is damage."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class AttentionMap(HeadMaps):
    """Hold the weights of one kind of attention of one model on one text; `HeadMaps` has its other fields.

    Attributes:
        weights: Attention weights after the softmax, (layer, head, query, key), float32, 0 to 1; each row sums to 1
            (less where a model has sinks, 0 where a query may attend to nothing). NaN where a layer has no such head.
    """

    ARRAYS: ClassVar[tuple[str, ...]] = ("weights",)

    weights: NDArray[np.float32]


@dataclass(frozen=True, eq=False, repr=False)
class Heatmap(MapsResult[AttentionMap]):
    """Hold the exact attention weights of the chosen heads on one text; `MapsResult` has text, maps, run and picked.

    Attributes:
        changes: What was done to the model's weights, in order: "hide_special", "without_sinks", "words", or the name
            of a mean, such as "mean of 72 heads".
        picture: Of a vision model: what it saw; the tokens are its patches. None = there is none.
        sound: Of a speech model: what it heard; the keys are frames in time. None = there is none.
        pictures: The pictures of a model whose input has pictures and words; their `cells` are indices of keys. A photo
            may be there twice: cut into detailed pictures, and whole as a small one.
        top: How many of each query's largest weights `rows` and `as_json` return; 0 = all. It is not saved.
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
        """Return the scale of its figures, see `Style`: "fixed" for text; "head" for pictures and sound."""
        return "fixed" if self.is_of_text else "head"

    # Changes

    def sinks(self, attention: AttentionMap) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which queries, (query,), and which keys, (key,), of a map are sinks, see `Tokens.sinks`.

        The first token of a decoder is one if the map is of a text and begins with it, and no sinks are hidden.
        """
        first_query, first_key = attention.origin
        # With an empty kind, `Tokens.sinks` finds special tokens alone, not the first token.
        kind = attention.kind if self.is_of_text and "hide_special" not in self.changes else ""
        queries = attention.queries.sinks("" if first_query else kind)
        keys = attention.keys.sinks("" if first_key else kind)
        return queries, keys

    @property
    def _is_partial(self) -> bool:
        """Return whether a map may lack rows or columns of the whole, so that sinks cannot be left out of it."""
        return bool(self.pictures) or any(attention.part is not None for attention in self.maps)

    def without_sinks(self) -> Heatmap:
        """Return the same with the weights of sinks set to 0, and each row renormalised as by `renormalise`.

        Rows and columns stay. A record that has no sinks, or from which they were taken before, is returned as it is.

        Raises:
            AttnscopeError: It is a part of a map, or its word pieces are merged.
        """
        # Which keys of each map are sinks, (key,).
        key_sinks = [self.sinks(attention)[1] for attention in self.maps]
        is_done = "hide_special" in self.changes or "without_sinks" in self.changes
        if is_done or not np.concatenate(key_sinks).any():
            return self
        if "words" in self.changes or self._is_partial:
            raise AttnscopeError("sinks are left out of whole maps of tokens, not of a part or of words")
        maps = []
        for attention, is_sink in zip(self.maps, key_sinks, strict=True):
            weights = renormalise(np.where(is_sink, 0, attention.weights)).astype(np.float32)
            maps.append(replace(attention, weights=weights))
        return replace(self, maps=tuple(maps), changes=(*self.changes, "without_sinks"))

    def hide_special(self, *, keep: str | None = None) -> Heatmap:
        """Return the same without the rows and columns of sinks (see `sinks`), and the other rows renormalised.

        A row that sums to less than 1% without sinks becomes zeros: dividing would make a strong link of next to
        nothing. A record that has no sinks, or where they are hidden already, is returned as it is.

        Args:
            keep: Names tokens, as `Tokens.find` takes them, whose rows stay although they are sinks.

        Raises:
            AttnscopeError: It is a part of a map, its word pieces are merged, or nothing would be left.
        """
        has_sinks = any(np.concatenate(self.sinks(attention)).any() for attention in self.maps)
        if "hide_special" in self.changes or not has_sinks:
            return self
        if self._is_partial:
            raise AttnscopeError(
                "special tokens are hidden in whole maps, not in a part: its rows do not sum to 1"
            )
        if "words" in self.changes:
            raise AttnscopeError("special tokens are hidden before word pieces are merged, not after")
        maps = []
        for attention in self.maps:
            query_sinks, key_sinks = self.sinks(attention)
            # Which queries and keys stay, (query,) and (key,).
            kept_queries = ~query_sinks
            kept_keys = ~key_sinks
            if keep is not None:
                kept_queries[list(attention.queries.find(keep))] = True
            if not kept_queries.any() or not kept_keys.any():
                raise AttnscopeError(
                    "nothing is left when special tokens are hidden", "the text has no other tokens"
                )
            kept_weights = attention.weights[:, :, kept_queries][:, :, :, kept_keys]
            weights = renormalise(kept_weights).astype(np.float32)
            queries = attention.queries.take(kept_queries)
            keys = attention.keys.take(kept_keys)
            maps.append(replace(attention, weights=weights, queries=queries, keys=keys))
        return replace(self, maps=tuple(maps), changes=(*self.changes, "hide_special"))

    def merge_words(self) -> Heatmap:
        """Return the same with the pieces of each word merged: their columns are summed, their rows averaged.

        Rows keep their sum (Clark et al. 2019, section 4.1). A row of zeros does not count in the average.

        Raises:
            AttnscopeError: The tokenizer cannot tell which tokens make a word.
        """
        if any(m.queries.words is None or m.keys.words is None for m in self.maps):
            raise AttnscopeError(
                "words are not known: this model's tokenizer cannot tell where its tokens stand in the text",
                "leave out --words",
            )
        maps = []
        pictures = self.pictures
        for attention in self.maps:
            # The pieces of each word, among the queries and among the keys.
            query_words = attention.queries.word_groups()
            key_words = attention.keys.word_groups()
            # The word of each key, (key,).
            word_of = np.repeat(np.arange(len(key_words)), [len(pieces) for pieces in key_words])
            # The cells of pictures are indices of the first map's keys.
            if attention is self.maps[0]:
                pictures = tuple(picture.renumber(word_of) for picture in self.pictures)
            part = attention.part
            if self.pictures and part is not None and attention.kind != "cross":
                # The part has all keys, and its first query is one of them: this tells its word.
                first_word = int(word_of[part.first_query])
                part = MapPart(first_word, 0, len(key_words), len(key_words))
            weights = merge_weights(attention.weights, query_words, key_words)
            queries = attention.queries.merge(query_words)
            keys = attention.keys.merge(key_words)
            maps.append(replace(attention, weights=weights, queries=queries, keys=keys, part=part))
        # Cross-attention has the queries of the map after it, where their words are known now.
        if len(maps) > 1 and maps[0].kind == "cross":
            across, among_words = maps[:2]
            if across.part is not None and among_words.part is not None:
                first_query, _, n_queries, _ = among_words.part
                maps[0] = replace(across, part=MapPart(first_query, 0, n_queries, len(across.keys)))
        return replace(self, maps=tuple(maps), changes=(*self.changes, "words"), pictures=pictures)

    @property
    def mean_name(self) -> str:
        """Return the name of the mean that its maps are, such as "mean of 72 heads"; empty = nothing was averaged."""
        return next((change for change in self.changes if change.startswith(MEAN_NAME_PREFIX)), "")

    def average(self, over: str) -> Heatmap:
        """Return the same with means over the heads that are shown; a record of means is returned as it is.

        Args:
            over: "heads" of each layer, "layers" for each head, or "all" of both.

        Raises:
            AttnscopeError: There is no such mean.
        """
        require_choice("mean over", over, [*MEAN_AXES])
        if self.mean_name:
            return self
        maps = []
        named: tuple[tuple[int, int], ...] = ()
        for attention in self.maps:
            heads = self.chosen(attention)
            if heads:
                maps.append(average_heads(attention, heads, over))
            # The name of the mean is about the first map that shows heads.
            named = named or heads
        if over == "heads":
            name = f"{MEAN_NAME_PREFIX}heads {format_ranges([head for _, head in named])} in each layer"
        elif over == "layers":
            name = (
                f"{MEAN_NAME_PREFIX}layers {format_ranges([layer for layer, _ in named])} for each head"
            )
        else:
            name = f"{MEAN_NAME_PREFIX}{amount(len(named), 'head')}"
        return replace(self, maps=tuple(maps), picked=None, changes=(*self.changes, name))

    def with_pictures_as_one(self) -> Heatmap:
        """Return the same where the patches of each photo are one key of the first map, as by `merge_pictures`."""
        first, *others = self.maps
        return replace(self, maps=(merge_pictures(first, self.pictures), *others), pictures=())

    def make_square(self) -> Heatmap:
        """Return the same with a row for each column: each photo is one key, and rows that a part lacks are zeros.

        Raises:
            AttnscopeError: It is a part that lacks some of the keys.
        """
        record = self.with_pictures_as_one() if self.pictures else self
        maps = tuple(fill_missing_rows(attention, record.maps) for attention in record.maps)
        return replace(record, maps=maps)

    # Files

    def rows(self) -> Iterator[Sequence[Any]]:
        """Yield the names of columns, then a row for each weight of the heads that are shown."""
        yield LINK_COLUMNS
        for attention in self.maps:
            first_query, first_key = attention.origin
            for layer, head in self.chosen(attention):
                # A mean over layers has no layer number; means over heads, and rollout, have names in place of heads.
                layer_name = "mean" if self.mean_name and attention.n_layers == 1 else layer
                head_name = attention.head_name(head) if attention.head_names else head
                weights = attention.of(layer, head)
                for query, key in yield_largest_pairs(weights, self.top):
                    yield (
                        attention.kind,
                        layer_name,
                        head_name,
                        first_query + query,
                        first_key + key,
                        attention.queries.labels[query],
                        attention.keys.labels[key],
                        # The shortest decimal of a float32: 0.1, where `float` alone makes 0.10000000149.
                        float(str(weights[query, key])),
                    )

    def as_json(self) -> dict[str, Any]:
        """Return what `Result.as_json` does; with `top`, each query's largest weights, "links", in place of all."""
        document = super().as_json()
        if self.top:
            # The arrays of further maps have names such as "weights:cross".
            for name in list(document):
                if name.partition(":")[0] == "weights":
                    del document[name]
            header, *rows = self.rows()
            document["links"] = [dict(zip(header, row, strict=True)) for row in rows]
        return document

    def extra_contents(self) -> tuple[dict[str, Table], dict[str, NDArray[Any]], dict[str, Any]]:
        """Return the table of spoken words, the arrays of pictures and sound, and what else is known of them."""
        tables: dict[str, Table] = {}
        arrays: dict[str, NDArray[Any]] = {}
        options: dict[str, Any] = {
            "picture": None if self.picture is None else self.picture.describe(),
            "pictures": [picture.describe() for picture in self.pictures],
            "sound": None if self.sound is None else self.sound.describe(),
        }
        if self.picture is not None:
            arrays["pixels"] = self.picture.pixels
        for index, picture in enumerate(self.pictures):
            assert picture.cells is not None
            arrays[f"pixels:{index}"] = picture.pixels
            arrays[f"cells:{index}"] = picture.cells
        if self.sound is not None:
            arrays["envelope"] = self.sound.envelope
            if self.sound.spectrogram is not None:
                arrays["spectrogram"] = self.sound.spectrogram.levels
            if self.sound.words:
                rows = [(word.text, word.start, word.end, *word.tokens) for word in self.sound.words]
                tables["words"] = Table.of_rows(self.TABLES["words"], rows)
        return tables, arrays, options

    @classmethod
    def read_extra(cls, stored: Result) -> dict[str, Any]:
        """Return the fields `picture`, `pictures` and `sound` from what `extra_contents` returned."""
        options, arrays = stored.options, stored.grids
        fields: dict[str, Any] = {}
        if options["picture"] is not None:
            fields["picture"] = _read_picture(options["picture"], arrays["pixels"], None)
        pictures = []
        for index, description in enumerate(options["pictures"]):
            cells = arrays[f"cells:{index}"].astype(np.int32)
            pictures.append(_read_picture(description, arrays[f"pixels:{index}"], cells))
        fields["pictures"] = tuple(pictures)
        if options["sound"] is not None:
            words = []
            if "words" in stored.tables:
                # The names of columns come first.
                _, *rows = stored.tables["words"].rows()
                for word, start, end, first, stop in rows:
                    words.append(SpokenWord(word, start, end, (first, stop)))
            description = tuples_of_lists(options["sound"])
            levels = arrays.get("spectrogram")
            sound = Sound.rebuild(description, arrays["envelope"], levels, tuple(words))
            sound.require_whole()
            fields["sound"] = sound
        return fields

    def require_whole(self) -> None:
        """Refuse weights that cannot be weights, and tokens that are not those of its pictures or sound."""
        super().require_whole()
        for attention in self.maps:
            weights = attention.weights
            if not weights.size:
                raise ValueError("its weights are empty")
            if np.nansum(weights, -1).max() > MAX_ROW_SUM:
                raise ValueError("its weights sum to more than 1 in a row")
            if self.sound is not None and len(attention.keys) != len(self.sound.envelope):
                raise ValueError("its keys are not the frames of its sound")
            if self.picture is not None:
                # The tokens of a vision model are patches, apart from special ones.
                for tokens in (attention.queries, attention.keys):
                    if np.sum(~tokens.special) != np.prod(self.picture.grid):
                        raise ValueError("its tokens are not the patches of its picture")
        # A cell of a picture among words is the index of the patch's key; -1 = the patch has none.
        n_keys = len(self.maps[0].keys)
        for picture in self.pictures:
            cells = picture.cells
            if cells is None or cells.min() < -1 or cells.max() >= n_keys:
                raise ValueError("its tokens are not the patches of its pictures")


def _read_picture(description: dict[str, Any], pixels: NDArray[Any], cells: Any) -> Picture:
    """Return a picture from what `Picture.describe` returned, and its arrays; `cells` may be None."""
    picture = Picture(pixels=pixels.astype(np.uint8), cells=cells, **tuples_of_lists(description))
    picture.require_whole()
    return picture


@dataclass(frozen=True, eq=False, repr=False)
class Rollout(Heatmap):
    """Hold attention rollout of one model on one text (Abnar & Zuidema 2020), beside each layer's mean attention.

    Each layer has these two maps in place of heads: 0 is the mean attention over heads, from queries to the layer's
    keys; 1 is the rollout, whose row says how much of each input token is in a position after the layer.

    With a target, 0 is the layer's gradient × attention, and 1 is relevance for the target (Chefer et al. 2021); each
    row of both is divided by its sum.

    Attributes:
        residual: The share of the identity in each layer, for the residual connection.
        target: The token (next or masked) or the class whose score relevance explains; empty = it is rollout.
        answer_token: The position where the model predicts the target; its row explains it. -1 = it is rollout.
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
        """Return the share of each input token in each position after a layer, (layer, query, token); rows sum to 1."""
        return self.maps[0].weights[:, 1]

    @property
    def usual_scale(self) -> Any:
        """Return the scale of its figures, see `Style`: "figure", or over a picture "head", each map's largest."""
        return "figure" if self.picture is None else "head"

    @property
    def method(self) -> str:
        """Return a sentence on how it was computed."""
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
        """Return a rollout, or with a target relevance, from its two maps per layer, both (layer, query, key).

        Args:
            record: Has the text, the tokens and the run.
            mean: Mean attention over heads, or gradient × attention.
            rolled: Rollout or relevance.
            residual: As in `Rollout`.
            target: As in `Rollout`.
            answer_token: As in `Rollout`.
        """
        names = ("gradient × attention", "relevance") if target else ("mean attention", "rollout")
        # The weights are (layer, 2, query, key): the two maps are on the axis of heads.
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
