"""Declare the exact attention maps of a model on a text, a picture or a recording, and the changes to their weights.

A map is a matrix of attention weights, (query, key), of one head. A record (`Heatmap`) has one `AttentionMap` per kind
of attention, which holds the maps of all its heads. The changes, such as `hide_special`, return a changed copy.

NumPy only: `heatmap_figures` draws the maps, `heatmap_terminal` prints them.
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
"""A row of weights sums to 1 at most. Rounding explains sums up to this; a larger sum means a damaged file."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class AttentionMap(HeadMaps):
    """Hold the weights of one kind of attention, for all layers and heads; `HeadMaps` explains the other fields.

    Attributes:
        weights: Attention weights after the softmax, (layer, head, query, key), float32, 0 to 1. Each row sums to 1. It
            sums to less in a model with learned sinks, and to 0 if the mask leaves the query no key. NaN if the layer
            has no head of that number.
    """

    ARRAYS: ClassVar[tuple[str, ...]] = ("weights",)

    weights: NDArray[np.float32]


@dataclass(frozen=True, eq=False, repr=False)
class Heatmap(MapsResult[AttentionMap]):
    """Hold the exact attention weights of the chosen heads on one input; `MapsResult` explains the other fields.

    Attributes:
        changes: The changes to the model's weights, in order: "hide_special", "without_sinks", "words", or the name
            of a mean, such as "mean of 72 heads".
        picture: The input of a vision model; the tokens are its patches. None = the input is no single picture.
        sound: The input of a speech model; the keys are frames in time. None = the input is no recording.
        pictures: The pictures among the words of a vision-language model's input; their `cells` are indices of keys of
            the first map. A photo may be there twice: as detailed pictures of its parts, and as a small picture.
        top: How many of each query's largest weights `rows` and `as_json` return; 0 = all. Files do not store it.
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
        """Return the weights of the first kind of attention, (layer, head, query, key)."""
        return self.maps[0].weights

    @property
    def tokens(self) -> tuple[str, ...]:
        """Return the labels of the keys of the first kind of attention."""
        return self.maps[0].keys.labels

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the numbers of the layers with the first kind of attention."""
        return self.maps[0].layers

    @property
    def heads(self) -> tuple[int, ...]:
        """Return the numbers of the heads of the first kind of attention."""
        return self.maps[0].heads

    @property
    def is_of_text(self) -> bool:
        """Return whether the input is text alone, without pictures or a recording."""
        return self.picture is None and self.sound is None and not self.pictures

    @property
    def usual_scale(self) -> Any:
        """Return the usual `Style.scale` of colours: "fixed", from 0 to 1, for text, else "head", one per head."""
        return "fixed" if self.is_of_text else "head"

    # Changes

    def sinks(self, attention: AttentionMap) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which queries, (query,), and which keys, (key,), of a map are sinks, bool; see `Tokens.sinks`.

        Special tokens are sinks. The first token of a decoder's text is one too, if the map begins with it: if the map
        is not cropped there, and sinks are not hidden yet.
        """
        first_query, first_key = attention.origin
        # With the kind "", `Tokens.sinks` finds special tokens only, not the first token.
        sink_kind = attention.kind if self.is_of_text and "hide_special" not in self.changes else ""
        query_sinks = attention.queries.sinks("" if first_query else sink_kind)
        key_sinks = attention.keys.sinks("" if first_key else sink_kind)
        return query_sinks, key_sinks

    @property
    def _is_partial(self) -> bool:
        """Return whether a map may lack rows or columns of the whole map. Leaving out sinks needs whole maps."""
        return bool(self.pictures) or any(attention.part is not None for attention in self.maps)

    def without_sinks(self) -> Heatmap:
        """Return a record in which weights on sinks are 0 and the rows are divided by their new sums.

        Rows and columns stay. A record that has no sinks, or none any more, is returned unchanged.

        Raises:
            AttnscopeError: A map is cropped, or word pieces are merged.
        """
        # Which keys of each map are sinks, (key,).
        key_sinks = [self.sinks(attention)[1] for attention in self.maps]
        is_without_sinks = "hide_special" in self.changes or "without_sinks" in self.changes
        if is_without_sinks or not np.concatenate(key_sinks).any():
            return self
        if "words" in self.changes or self._is_partial:
            raise AttnscopeError("sinks are left out of whole maps of tokens, not of a part or of words")
        maps = []
        for attention, is_sink in zip(self.maps, key_sinks, strict=True):
            weights = renormalise(np.where(is_sink, 0, attention.weights)).astype(np.float32)
            maps.append(replace(attention, weights=weights))
        return replace(self, maps=tuple(maps), changes=(*self.changes, "without_sinks"))

    def hide_special(self, *, keep: str | None = None) -> Heatmap:
        """Return a record without the rows and columns of sinks; the other rows are divided by their new sums.

        A row that sums to less than 1% without sinks becomes zeros: dividing would turn tiny weights into strong links.
        A record that has no sinks, or hides them already, is returned unchanged.

        Args:
            keep: Names queries, as `Tokens.find` takes it, whose rows stay even if they are sinks. None = no query.

        Raises:
            AttnscopeError: A map is cropped, word pieces are merged, or no row or no column would be left.
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
            kept_map = replace(
                attention,
                weights=renormalise(kept_weights).astype(np.float32),
                queries=attention.queries.take(kept_queries),
                keys=attention.keys.take(kept_keys),
            )
            maps.append(kept_map)
        return replace(self, maps=tuple(maps), changes=(*self.changes, "hide_special"))

    def merge_words(self) -> Heatmap:
        """Return a record with the pieces of each word merged: columns are summed, rows averaged.

        Rows then sum to 1 as before (Clark et al. 2019, section 4.1). Rows of zeros do not count in the average.

        Raises:
            AttnscopeError: The tokenizer cannot tell which tokens make a word.
        """
        if any(
            attention.queries.words is None or attention.keys.words is None for attention in self.maps
        ):
            raise AttnscopeError(
                "words are not known: this model's tokenizer cannot tell where its tokens stand in the text",
                "leave out --words",
            )
        maps = []
        pictures = self.pictures
        for attention in self.maps:
            # The indices of the pieces of each word, among the queries and among the keys.
            query_words = attention.queries.word_groups()
            key_words = attention.keys.word_groups()
            # The index of each key's word, (key,).
            word_by_key = np.repeat(np.arange(len(key_words)), [len(pieces) for pieces in key_words])
            # Cells of pictures are indices of the first map's keys, which now are words.
            if attention is self.maps[0]:
                pictures = tuple(picture.renumber(word_by_key) for picture in self.pictures)
            map_part = attention.part
            if self.pictures and map_part is not None and attention.kind != "cross":
                # A cropped self-attention map has all keys here, and its first query is one of them. So `word_by_key`
                # tells the word of that query.
                first_word = int(word_by_key[map_part.first_query])
                map_part = MapPart(first_word, 0, len(key_words), len(key_words))
            merged_map = replace(
                attention,
                weights=merge_weights(attention.weights, query_words, key_words),
                queries=attention.queries.merge(query_words),
                keys=attention.keys.merge(key_words),
                part=map_part,
            )
            maps.append(merged_map)
        # If the first map is cross-attention, its queries are those of the self-attention map after it. That map tells
        # the place of these queries, counted in words.
        if len(maps) > 1 and maps[0].kind == "cross":
            cross_map, self_map = maps[:2]
            if cross_map.part is not None and self_map.part is not None:
                first_query, _, n_queries, _ = self_map.part
                maps[0] = replace(
                    cross_map, part=MapPart(first_query, 0, n_queries, len(cross_map.keys))
                )
        return replace(self, maps=tuple(maps), changes=(*self.changes, "words"), pictures=pictures)

    @property
    def mean_name(self) -> str:
        """Return the name of the mean in `changes`, such as "mean of 72 heads"; empty = heads were not averaged."""
        return next((change for change in self.changes if change.startswith(MEAN_NAME_PREFIX)), "")

    def average(self, over: str) -> Heatmap:
        """Return a record of means over the heads that are shown. A record of means is returned unchanged.

        Args:
            over: "heads" = over the heads of each layer, "layers" = over the layers for each head, "all" = over both.

        Raises:
            AttnscopeError: `over` is another text.
        """
        require_choice("mean over", over, [*MEAN_AXES])
        if self.mean_name:
            return self
        maps = []
        named_heads: tuple[tuple[int, int], ...] = ()
        for attention in self.maps:
            heads = self.chosen(attention)
            if heads:
                maps.append(average_heads(attention, heads, over))
            # The name of the mean tells the heads of the first map that shows any.
            named_heads = named_heads or heads
        if over == "heads":
            name = f"{MEAN_NAME_PREFIX}heads {format_ranges([head for _, head in named_heads])} in each layer"
        elif over == "layers":
            name = f"{MEAN_NAME_PREFIX}layers {format_ranges([layer for layer, _ in named_heads])} for each head"
        else:
            name = f"{MEAN_NAME_PREFIX}{amount(len(named_heads), 'head')}"
        return replace(self, maps=tuple(maps), picked=None, changes=(*self.changes, name))

    def with_pictures_as_one(self) -> Heatmap:
        """Return a record where all patches of a photo are one key of the first map; its weight is their sum."""
        first_map, *other_maps = self.maps
        return replace(self, maps=(merge_pictures(first_map, self.pictures), *other_maps), pictures=())

    def make_square(self) -> Heatmap:
        """Return a record of square maps: each photo is one key, queries that a cropped map lacks are rows of zeros.

        Raises:
            AttnscopeError: A map lacks some of the keys.
        """
        record = self.with_pictures_as_one() if self.pictures else self
        maps = tuple(fill_missing_rows(attention, record.maps) for attention in record.maps)
        return replace(record, maps=maps)

    # Files

    def rows(self) -> Iterator[Sequence[Any]]:
        """Yield the rows of a CSV file: the names of columns, then each weight of the heads that are shown."""
        yield LINK_COLUMNS
        for attention in self.maps:
            first_query, first_key = attention.origin
            for layer, head in self.chosen(attention):
                # A mean over layers has no layer number. Means over heads, and rollout, have names in place of head
                # numbers.
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
                        # Through `str`, a float32 of 0.1 becomes 0.1; without, 0.10000000149.
                        float(str(weights[query, key])),
                    )

    def as_json(self) -> dict[str, Any]:
        """Return the record as JSON values. With `top`, "links", each query's largest weights, replaces all weights."""
        document = super().as_json()
        if self.top:
            # "weights" of the first map, and further maps such as "weights:cross".
            for name in list(document):
                if name.partition(":")[0] == "weights":
                    del document[name]
            header, *rows = self.rows()
            document["links"] = [dict(zip(header, row, strict=True)) for row in rows]
        return document

    def extra_contents(self) -> tuple[dict[str, Table], dict[str, NDArray[Any]], dict[str, Any]]:
        """Return what files store of pictures and sound: the table of words, arrays by name, JSON values by name."""
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
                word_rows = [
                    (word.text, word.start, word.end, *word.tokens) for word in self.sound.words
                ]
                tables["words"] = Table.of_rows(self.TABLES["words"], word_rows)
        return tables, arrays, options

    @classmethod
    def read_extra(cls, stored: Result) -> dict[str, Any]:
        """Return the fields `picture`, `pictures` and `sound` from a stored result: the inverse of `extra_contents`."""
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
            spoken_words = []
            if "words" in stored.tables:
                # The first row holds the names of columns.
                _, *rows = stored.tables["words"].rows()
                for word, start, end, first_token, stop_token in rows:
                    spoken_words.append(SpokenWord(word, start, end, (first_token, stop_token)))
            description = tuples_of_lists(options["sound"])
            levels = arrays.get("spectrogram")
            sound = Sound.rebuild(description, arrays["envelope"], levels, tuple(spoken_words))
            sound.require_whole()
            fields["sound"] = sound
        return fields

    def require_whole(self) -> None:
        """Raise ValueError for a damaged record: impossible weights, or tokens that do not fit pictures or sound."""
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
                # All tokens of a vision model but special ones are patches.
                for tokens in (attention.queries, attention.keys):
                    if np.sum(~tokens.special) != np.prod(self.picture.grid):
                        raise ValueError("its tokens are not the patches of its picture")
        # A cell of a picture among words is the index of the key that is the patch; -1 = no key is.
        n_keys = len(self.maps[0].keys)
        for picture in self.pictures:
            cells = picture.cells
            if cells is None or cells.min() < -1 or cells.max() >= n_keys:
                raise ValueError("its tokens are not the patches of its pictures")


def _read_picture(description: dict[str, Any], pixels: NDArray[Any], cells: Any) -> Picture:
    """Rebuild a picture from its description (see `Picture.describe`) and its arrays; `cells` as in `Picture`."""
    picture = Picture(pixels=pixels.astype(np.uint8), cells=cells, **tuples_of_lists(description))
    picture.require_whole()
    return picture


@dataclass(frozen=True, eq=False, repr=False)
class Rollout(Heatmap):
    """Hold attention rollout on one input (Abnar & Zuidema 2020), beside each layer's mean attention.

    Each layer has two maps in place of heads. Map 0 is the mean attention over heads, from queries to the keys of the
    layer. Map 1 is the rollout: its row says which share each input token has in a position after the layer.

    With a target, map 0 is the layer's gradient × attention, and map 1 is relevance for the target (Chefer et al.
    2021). Rows of both are divided by their sums.

    Attributes:
        residual: The weight of the identity matrix in each layer, which stands for the residual connection; 0 to 1.
        target: The token (next or masked) or the class whose score relevance explains; empty = rollout, not relevance.
        answer_token: The position where the model predicts the target, whose row explains it; -1 = rollout.
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
        """Return map 0 of each layer, the mean attention over heads, (layer, query, key)."""
        return self.maps[0].weights[:, 0]

    @property
    def rollout(self) -> NDArray[np.float32]:
        """Return map 1 of each layer, the share of each input token, (layer, query, token); rows sum to 1."""
        return self.maps[0].weights[:, 1]

    @property
    def usual_scale(self) -> Any:
        """Return the usual `Style.scale` of colours: "head", one per map, over a picture, else "figure"."""
        return "figure" if self.picture is None else "head"

    @property
    def method(self) -> str:
        """Return a phrase that says how the maps were computed."""
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
        mean_maps: NDArray[Any],
        rolled_maps: NDArray[Any],
        residual: float,
        target: str = "",
        answer_token: int = -1,
    ) -> Rollout:
        """Make a rollout from its two maps per layer; with a target it is relevance.

        Args:
            record: The record of the weights; its text, tokens and run are taken over.
            mean_maps: Map 0: mean attention over heads, or gradient × attention, (layer, query, key).
            rolled_maps: Map 1: rollout or relevance, (layer, query, key).
            residual: As in `Rollout`.
            target: As in `Rollout`.
            answer_token: As in `Rollout`.
        """
        map_names = ("gradient × attention", "relevance") if target else ("mean attention", "rollout")
        # The two maps are stacked on the axis of heads: (layer, 2, query, key).
        attention = replace(
            record.maps[0],
            kind=ROLLOUT,
            heads=(0, 1),
            n_heads=2,
            n_kv_heads=2,
            weights=np.stack([mean_maps, rolled_maps], 1).astype(np.float32),
            head_names=map_names,
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
