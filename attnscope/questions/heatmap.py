"""Declare the exact attention maps of a model on a text, a picture or a recording, and what may be done to them.

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
    AXES,
    MEAN_OF,
    average,
    largest_of_rows,
    merge_pictures,
    merge_weights,
    renormalise,
    with_all_rows,
)
from attnscope.questions.maps import (
    LINK_COLUMNS,
    MAP_TABLES,
    ROLLOUT,
    HeadMaps,
    MapPart,
    MapsResult,
    freeze,
    spans,
)
from attnscope.questions.places import Picture, Sound, SpokenWord
from attnscope.results.result import Result
from attnscope.results.table import Array, Table, count, number, text

MOST_ROW_SUM = 1.1
"""What a row of weights sums to at most, however it was rounded."""


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
        """Return which queries, (query,), and which keys, (key,), of one of its maps are sinks, as of `Tokens.sinks`.

        The first token of a decoder is a sink where the map is of a text, holds it, and no sinks were hidden.
        """
        first_query, first_key = attention.origin
        # Without a kind only special tokens are sinks; it is empty where the first token is missing or no sink.
        kind = attention.kind if self.is_of_text and "hide_special" not in self.changes else ""
        queries = attention.queries.sinks("" if first_query else kind)
        keys = attention.keys.sinks("" if first_key else kind)
        return queries, keys

    @property
    def _has_parts(self) -> bool:
        """Return whether a map is a part of a whole one, so that the sums of rows are not known."""
        return bool(self.pictures) or any(attention.part is not None for attention in self.maps)

    def without_sinks(self) -> Heatmap:
        """Return the same where sinks get nothing: each row is divided by what other keys get, as by `hide_special`.

        Rows and columns stay. A record without sinks, or whose special tokens are hidden, stays as it is.

        Raises:
            AttnscopeError: It is a part of a map, or its word pieces are merged.
        """
        # Of each map, (key,).
        key_sinks = [keys for _, keys in map(self.sinks, self.maps)]
        is_done = "hide_special" in self.changes or "without_sinks" in self.changes
        if is_done or not np.concatenate(key_sinks).any():
            return self
        if "words" in self.changes or self._has_parts:
            raise AttnscopeError("sinks are left out of whole maps of tokens, not of a part or of words")
        maps = []
        for attention, sinks in zip(self.maps, key_sinks, strict=True):
            weights = renormalise(np.where(sinks, 0, attention.weights)).astype(np.float32)
            maps.append(replace(attention, weights=weights))
        return replace(self, maps=tuple(maps), changes=(*self.changes, "without_sinks"))

    def hide_special(self, *, keep: str | None = None) -> Heatmap:
        """Return the same without the special tokens: each row that stays is divided by what is left of it.

        Of a decoder the first token goes too, see `Tokens.sinks`. A row of which less than 1% is left becomes zeros:
        dividing would make a strong link of next to nothing. A record without such tokens, or with hidden ones, stays
        as it is.

        Args:
            keep: Tokens whose rows stay, though their columns go, as `Tokens.find` takes them.

        Raises:
            AttnscopeError: It is a part of a map, its word pieces are merged, or nothing would be left.
        """
        has_sinks = any(np.concatenate(self.sinks(attention)).any() for attention in self.maps)
        if "hide_special" in self.changes or not has_sinks:
            return self
        if self._has_parts:
            raise AttnscopeError(
                "special tokens are hidden in whole maps, not in a part: its rows do not sum to 1"
            )
        if "words" in self.changes:
            raise AttnscopeError("special tokens are hidden before word pieces are merged, not after")
        maps = []
        for attention in self.maps:
            # Which rows and columns stay, (query,) and (key,).
            rows, columns = map(np.logical_not, self.sinks(attention))
            if keep is not None:
                rows[list(attention.queries.find(keep))] = True
            if not rows.any() or not columns.any():
                raise AttnscopeError(
                    "nothing is left when special tokens are hidden", "the text has no other tokens"
                )
            left = attention.weights[:, :, rows][:, :, :, columns]
            weights = renormalise(left).astype(np.float32)
            queries, keys = attention.queries.take(rows), attention.keys.take(columns)
            maps.append(replace(attention, weights=weights, queries=queries, keys=keys))
        return replace(self, maps=tuple(maps), changes=(*self.changes, "hide_special"))

    def merge_words(self) -> Heatmap:
        """Return the same word by word: weights to the pieces of a word are summed, weights from them averaged.

        Rows keep their sum (Clark et al. 2019, section 4.1); pieces whose row is empty take no part.

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
            # The pieces of each word among queries and among keys, and the word of each key, (key,).
            rows = attention.queries.word_groups()
            columns = attention.keys.word_groups()
            word_of = np.repeat(np.arange(len(columns)), list(map(len, columns)))
            # The cells of pictures are keys of the first map.
            if attention is self.maps[0]:
                pictures = tuple(picture.move(word_of) for picture in self.pictures)
            part = attention.part
            if self.pictures and part is not None and attention.kind != "cross":
                # A part of rows has all keys, so these tell which word its first query is now.
                part = MapPart(int(word_of[part.first_query]), 0, len(columns), len(columns))
            weights = merge_weights(attention.weights, rows, columns)
            queries, keys = attention.queries.merge(rows), attention.keys.merge(columns)
            maps.append(replace(attention, weights=weights, queries=queries, keys=keys, part=part))
        # Which word the first query of cross-attention is, the next map tells: its keys are these queries.
        if len(maps) > 1 and maps[0].kind == "cross":
            across, among_words = maps[:2]
            if across.part is not None and among_words.part is not None:
                first_query, _, n_queries, _ = among_words.part
                maps[0] = replace(across, part=MapPart(first_query, 0, n_queries, len(across.keys)))
        return replace(self, maps=tuple(maps), changes=(*self.changes, "words"), pictures=pictures)

    @property
    def mean_name(self) -> str:
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
        if self.mean_name:
            return self
        heads_of_maps = [self.chosen(attention) for attention in self.maps]
        maps = []
        for attention, heads in zip(self.maps, heads_of_maps, strict=True):
            if heads:
                maps.append(average(attention, heads, over))
        # The mean in words: by the heads of the first map, or of the last one if the first shows none.
        heads = heads_of_maps[0] or heads_of_maps[-1]
        layers = [layer for layer, _ in heads]
        numbers = [head for _, head in heads]
        change = f"{MEAN_OF}{amount(len(heads), 'head')}"
        if over == "heads":
            change = f"{MEAN_OF}heads {spans(numbers)} in each layer"
        elif over == "layers":
            change = f"{MEAN_OF}layers {spans(layers)} for each head"
        return replace(self, maps=tuple(maps), picked=None, changes=(*self.changes, change))

    def with_pictures_as_one(self) -> Heatmap:
        """Return the same with each photo as one key, as `merge_pictures` does; maps but the first stay as they are."""
        first, *others = self.maps
        return replace(self, maps=(merge_pictures(first, self.pictures), *others), pictures=())

    def make_square(self) -> Heatmap:
        """Return the same with as many rows as columns, zeros for those that a part lacks, and each picture as one key.

        Raises:
            AttnscopeError: It is a part that lacks some of the keys.
        """
        record = self.with_pictures_as_one() if self.pictures else self
        maps = tuple(with_all_rows(attention, record.maps) for attention in record.maps)
        return replace(record, maps=maps)

    # Files

    def rows(self) -> Iterator[Sequence[Any]]:
        """Return a row for each weight of the heads that are shown, the names of columns first."""
        yield LINK_COLUMNS
        for attention in self.maps:
            first_query, first_key = attention.origin
            queries, keys = attention.queries.labels, attention.keys.labels
            for layer, head in self.chosen(attention):
                # A mean over layers has no layer, and what stands in the place of heads has a name.
                layer_name = "mean" if self.mean_name and attention.n_layers == 1 else layer
                head_name = attention.head_name(head) if attention.head_names else head
                weights = attention.of(layer, head)
                for query, key in largest_of_rows(weights, self.top):
                    yield (
                        attention.kind,
                        layer_name,
                        head_name,
                        first_query + query,
                        first_key + key,
                        queries[query],
                        keys[key],
                        # No more digits than float32 has.
                        float(str(weights[query, key])),
                    )

    def as_json(self) -> dict[str, Any]:
        """Return what `Result` does; with `top` the largest weights are in `links`, the others are left out."""
        document = super().as_json()
        if self.top:
            # "weights", and of further maps names such as "weights:cross".
            for name in list(document):
                if name.partition(":")[0] == "weights":
                    del document[name]
            header, *rows = self.rows()
            document["links"] = [dict(zip(header, row, strict=True)) for row in rows]
        return document

    def extra_contents(self) -> tuple[dict[str, Table], dict[str, NDArray[Any]], dict[str, Any]]:
        """Return the words of a recording as a table, pictures and sound as arrays, and what describes these."""
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
        """Return the pictures and the sound that were kept."""
        options, arrays = stored.options, stored.grids
        more: dict[str, Any] = {}
        if options["picture"] is not None:
            more["picture"] = _read_picture(options["picture"], arrays["pixels"], None)
        pictures = []
        for index, fields in enumerate(options["pictures"]):
            cells = arrays[f"cells:{index}"].astype(np.int32)
            pictures.append(_read_picture(fields, arrays[f"pixels:{index}"], cells))
        more["pictures"] = tuple(pictures)
        if options["sound"] is not None:
            words = []
            if "words" in stored.tables:
                _, *rows = stored.tables["words"].rows()  # the names of columns come first
                for word, start, end, first, stop in rows:
                    words.append(SpokenWord(word, start, end, (first, stop)))
            fields = {key: freeze(value) for key, value in options["sound"].items()}
            sound = Sound.rebuild(fields, arrays["envelope"], arrays.get("spectrogram"), tuple(words))
            sound.require_whole()
            more["sound"] = sound
        return more

    def require_whole(self) -> None:
        """Refuse weights that cannot be weights, and tokens that are not those of its pictures or sound."""
        super().require_whole()
        for attention in self.maps:
            weights = attention.weights
            if not weights.size:
                raise ValueError("its weights are empty")
            if np.nansum(weights, -1).max() > MOST_ROW_SUM:
                raise ValueError("its weights sum to more than 1 in a row")
            if self.sound is not None and len(attention.keys) != len(self.sound.envelope):
                raise ValueError("its keys are not the frames of its sound")
            if self.picture is None:
                continue
            # Of a vision model all tokens but special ones are patches.
            for tokens in (attention.queries, attention.keys):
                if int((~tokens.special).sum()) != np.prod(self.picture.grid):
                    raise ValueError("its tokens are not the patches of its picture")
        # Among words each patch names its key; -1 = none stands for it.
        for picture in self.pictures:
            cells = picture.cells
            if cells is None or not -1 <= cells.min() <= cells.max() < len(self.maps[0].keys):
                raise ValueError("its tokens are not the patches of its pictures")


def _read_picture(fields: dict[str, Any], pixels: NDArray[Any], cells: Any) -> Picture:
    """Return the picture that `Picture.describe` was made of, with its arrays; `cells` may be None."""
    frozen = {key: freeze(value) for key, value in fields.items()}
    picture = Picture(pixels=pixels.astype(np.uint8), cells=cells, **frozen)
    picture.require_whole()
    return picture


@dataclass(frozen=True, eq=False, repr=False)
class Rollout(Heatmap):
    """Hold attention rollout of one model on one text (Abnar & Zuidema 2020), beside each layer's mean attention.

    The two stand in the place of heads. The columns of mean attention are the layer's keys. Those of rollout are the
    input tokens: how much of each is in each place after the layer.

    With a target it is relevance for that target (Chefer et al. 2021), beside the gradient × attention of each layer;
    each row of both is divided by its sum.

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
        """Return what is drawn darkest: the figure's largest value; over a picture each map's."""
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
        """Return the mean over heads of a record, and `rolled` (rollout or relevance), both (layer, query, key)."""
        names = ("gradient × attention", "relevance") if target else ("mean attention", "rollout")
        # (layer, 2, query, key): the two stand where heads do.
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
