"""A text's tokens, and the attention maps that a model gave them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.records.pictures import Picture, picture_from
from attnscope.records.reading import read_arrays, reading, require_places, require_run, require_types, require_weights
from attnscope.records.sounds import Sound, sound_from
from attnscope.records.storage import json_array, json_lists, view, write_whole

if TYPE_CHECKING:
    from attnscope.records.findings import Findings
    from attnscope.views.page import Page

HEATMAP_SCHEMA = "attnscope.heatmap/1"

LEAST_LEFT = 0.01
"""What must be left of a row without special tokens for it to be shown."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """A tokenised text, token by token.

    Attributes:
        text: The text that was tokenised (of a pair: the first).
        ids: The tokenizer's numbers, (token,), int64; -1 for words that were merged from several tokens.
        labels: What to show for each token: pieces as the tokenizer writes them (`##ing`), a leading space as `·`,
            bytes that are no character by themselves as `<0xE4>`. Never empty.
        offsets: First and last + 1 character of each token in its text, (token, 2), int32; (-1, -1) for tokens that
            stand for no text, such as [CLS], and for all tokens where the tokenizer cannot tell.
        special: Whether the tokenizer added the token ([CLS], [SEP], <s>), (token,), bool.
        words: Number of the word that a token is part of, from 0 in each segment, (token,), int32; -1 = part of none.
            None where the tokenizer cannot tell.
        segments: 0 for tokens of the first text, 1 for those of the second of a pair, (token,), int32.
        pair: The second text of a pair, else None.
        n_given: How many tokens were given, the rest was written by the model itself; -1 = all were given.
    """

    text: str
    ids: NDArray[np.int64]
    labels: tuple[str, ...]
    offsets: NDArray[np.int32]
    special: NDArray[np.bool_]
    words: NDArray[np.int32] | None
    segments: NDArray[np.int32]
    pair: str | None = None
    n_given: int = -1

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, keep: NDArray[Any]) -> Tokens:
        """The tokens at the places `keep` (numbers or a boolean mask), in that order."""
        places = np.arange(len(self))[keep]
        given = self.n_given if self.n_given < 0 else int((places < self.n_given).sum())
        return replace(
            self,
            ids=self.ids[places],
            labels=tuple(self.labels[i] for i in places),
            offsets=self.offsets[places],
            special=self.special[places],
            words=None if self.words is None else self.words[places],
            segments=self.segments[places],
            n_given=given,
        )

    def find(self, wanted: str) -> tuple[int, ...]:
        """Places of the tokens that a user means by `wanted`.

        `@9` is the token at place 9. Anything else is a whole word (all its pieces), else a label as it is, else a
        label without the mark of a word piece or a space; then the same without regard to case.

        Returns:
            The places, in order; empty if there is none.
        """
        if wanted.startswith("@") and wanted[1:].isdecimal():
            place = int(wanted[1:])
            return (place,) if place < len(self) else ()
        groups = self.word_groups()
        spelled = [""] * len(self)
        for group in groups if self.words is not None else ():
            for i in group:
                spelled[i] = self._surface(group)
        for fold in (str, str.casefold):
            # Words come first: the end of "bandit" is a piece "it", and is not what is meant.
            for names in (spelled, self.labels, [_bare(label) for label in self.labels]):
                if found := tuple(i for i, name in enumerate(names) if name and fold(name) == fold(wanted)):
                    return found
        return ()

    def word_groups(self) -> list[list[int]]:
        """Tokens grouped by word, in order; a token that is part of no word is a group by itself."""
        groups: list[list[int]] = []
        last: tuple[int, int] | None = None
        for i in range(len(self)):
            word = -1 if self.words is None else int(self.words[i])
            name = (int(self.segments[i]), word)
            if word >= 0 and name == last:
                groups[-1].append(i)
            else:
                groups.append([i])
            last = name if word >= 0 else None
        return groups

    def merged(self, groups: Sequence[Sequence[int]]) -> Tokens:
        """One token for each group of tokens, labelled with the text that the group covers."""
        first = [group[0] for group in groups]
        given = self.n_given if self.n_given < 0 else sum(i < self.n_given for i in first)
        offsets = [
            (self.offsets[group[0], 0], max(self.offsets[i, 1] for i in group))
            if len(group) > 1
            else self.offsets[group[0]]
            for group in groups
        ]
        return replace(
            self,
            ids=np.array([self.ids[g[0]] if len(g) == 1 else -1 for g in groups], np.int64),
            labels=tuple(self.labels[g[0]] if self.special[g[0]] else self._surface(g) for g in groups),
            offsets=np.array(offsets, np.int32).reshape(-1, 2),
            special=self.special[first],
            words=None if self.words is None else self.words[first],
            segments=self.segments[first],
            n_given=given,
        )

    def _surface(self, group: Sequence[int]) -> str:
        """The text that neighbouring tokens cover; their labels where the text is not known."""
        text = self.text if int(self.segments[group[0]]) == 0 or self.pair is None else self.pair
        start, stop = int(self.offsets[group[0], 0]), max(int(self.offsets[i, 1]) for i in group)
        covered = text[start:stop].strip() if start >= 0 else ""
        if covered and covered.isprintable():
            return covered
        return "".join(_bare(self.labels[i]) for i in group)

    def __repr__(self) -> str:
        return f"Tokens({len(self)}: {' '.join(self.labels[:12])}{' …' if len(self) > 12 else ''})"

    def as_json(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON; `tokens_from_json` reads them back."""
        return {
            "text": self.text,
            "pair": self.pair,
            "n_given": self.n_given,
            "labels": list(self.labels),
            "ids": self.ids.tolist(),
            "offsets": self.offsets.tolist(),
            "special": self.special.tolist(),
            "words": None if self.words is None else self.words.tolist(),
            "segments": self.segments.tolist(),
        }


def tokens_from_json(data: Mapping[str, Any]) -> Tokens:
    """The Tokens that `Tokens.as_json` wrote."""
    return Tokens(
        text=data["text"],
        pair=data["pair"],
        n_given=data["n_given"],
        labels=tuple(data["labels"]),
        ids=np.array(data["ids"], np.int64),
        offsets=np.array(data["offsets"], np.int32).reshape(-1, 2),
        special=np.array(data["special"], np.bool_),
        words=None if data["words"] is None else np.array(data["words"], np.int32),
        segments=np.array(data["segments"], np.int32),
    )


@dataclass(frozen=True, eq=False)
class AttentionMap:
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
    """

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

    @property
    def has_weights(self) -> bool:
        """Whether the weights are there; a record that is drawn ahead of its model has none yet."""
        return self.weights.shape[2:] == (len(self.queries), len(self.keys))

    def __repr__(self) -> str:
        return (
            f"AttentionMap({self.kind}, layers {spans(self.layers)}, heads {spans(self.heads)}, {self.weights.shape})"
        )

    def of(self, layer: int, head: int) -> NDArray[np.float32]:
        """The weights of one head, (query, key)."""
        if layer in self.layers and head in self.heads:
            one: NDArray[np.float32] = self.weights[self.layers.index(layer), self.heads.index(head)]
            return one
        raise AttnscopeError(
            f"L{layer}H{head} is not in this record",
            f"it holds layers {spans(self.layers)} and heads {spans(self.heads)}",
        )

    def exists(self, layer: int, head: int) -> bool:
        """Whether the record holds this head."""
        return layer in self.layers and head in self.heads and not bool(np.isnan(self.of(layer, head)).any())


@dataclass(frozen=True, eq=False)
class Heatmap:
    """What every chosen head of a model attends to on one text.

    Attributes:
        text: The text as given.
        maps: The attention, one map a kind: one for encoders and for decoders; encoder, decoder and cross for both.
        run: What made it: model, sha256, engine, versions, dtype, device, notes ... Plain JSON values.
        picked: Single heads that were asked for, as (layer, head); None = all in the maps.
        changes: What was done to the weights after the model gave them, in order: "hide_special", "words".
        picture: Of a vision model: what it saw; the tokens are its patches. None = there is none.
        sound: Of a speech model: what it heard; the keys are frames in time. None = there is none.
    """

    text: str
    maps: tuple[AttentionMap, ...]
    run: Mapping[str, Any]
    picked: tuple[tuple[int, int], ...] | None = None
    changes: tuple[str, ...] = ()
    picture: Picture | None = None
    sound: Sound | None = None

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

    def chosen(self, attention: AttentionMap) -> tuple[tuple[int, int], ...]:
        """The heads to show of a map, as (layer, head): as they were picked, else layer by layer."""
        wanted = self.picked or tuple((layer, head) for layer in attention.layers for head in attention.heads)
        return tuple((layer, head) for layer, head in wanted if attention.exists(layer, head))

    def only(self, picked: Sequence[tuple[int, int]]) -> Heatmap:
        """The same, showing only these heads, as (layer, head).

        Raises:
            AttnscopeError: The record does not hold one of them.
        """
        if not picked:
            raise AttnscopeError("no head is chosen")
        for layer, head in picked:
            if not any(attention.exists(layer, head) for attention in self.maps):
                self.maps[0].of(layer, head)
        return replace(self, picked=tuple(dict.fromkeys(picked)))

    def hide_special(self) -> Heatmap:
        """Without the special tokens: their rows and columns go, every remaining row is divided by what is left of it.

        A row of which less than 1% is left becomes zeros: dividing would make a strong link of next to nothing. A
        record without special tokens, or with hidden ones, stays as it is.
        """
        if "hide_special" in self.changes or not any(
            m.queries.special.any() or m.keys.special.any() for m in self.maps
        ):
            return self
        if any(m.part is not None for m in self.maps):
            raise AttnscopeError("special tokens are hidden in whole maps, not in a part: its rows do not sum to 1")
        if "words" in self.changes:
            raise AttnscopeError("special tokens are hidden before word pieces are merged, not after")
        maps = []
        for attention in self.maps:
            rows, columns = ~attention.queries.special, ~attention.keys.special
            if not rows.any() or not columns.any():
                raise AttnscopeError("nothing is left when special tokens are hidden", "the text has no other tokens")
            queries, keys = attention.queries.take(rows), attention.keys.take(columns)
            shares = attention.weights
            if attention.has_weights:
                shares = divided_by_rest(shares[:, :, rows][:, :, :, columns]).astype(np.float32)
            maps.append(replace(attention, weights=shares, queries=queries, keys=keys))
        return replace(self, maps=tuple(maps), changes=(*self.changes, "hide_special"))

    def merge_words(self) -> Heatmap:
        """Word by word: weights to the pieces of a word are summed, weights from them averaged.

        Rows keep their sum (Clark et al. 2019, section 4.1).

        Raises:
            AttnscopeError: The tokenizer cannot tell which tokens make a word.
        """
        maps = []
        for attention in self.maps:
            if attention.queries.words is None or attention.keys.words is None:
                raise AttnscopeError(
                    "words are not known: this model's tokenizer cannot tell where its tokens stand in the text",
                    "leave out --words",
                )
            rows, columns = attention.queries.word_groups(), attention.keys.word_groups()
            means = attention.weights
            if attention.has_weights:
                summed = np.add.reduceat(means.astype(np.float64), [group[0] for group in columns], axis=3)
                means = np.add.reduceat(summed, [group[0] for group in rows], axis=2)
                means = means / np.array([len(group) for group in rows])[:, None]
            queries, keys = attention.queries.merged(rows), attention.keys.merged(columns)
            maps.append(replace(attention, weights=means.astype(np.float32), queries=queries, keys=keys))
        return replace(self, maps=tuple(maps), changes=(*self.changes, "words"))

    def describe(self) -> dict[str, Any]:
        """All but the weights, as plain JSON values; what made the record (`run`) stands at its top level."""
        return {
            "schema": HEATMAP_SCHEMA,
            "text": self.text,
            **self.run,
            "picked": None if self.picked is None else [list(pair) for pair in self.picked],
            "changes": list(self.changes),
            **({} if self.picture is None else {"picture": self.picture.describe()}),
            **({} if self.sound is None else {"sound": self.sound.describe()}),
            "maps": [
                {
                    "kind": m.kind,
                    "layers": list(m.layers),
                    "heads": list(m.heads),
                    "n_layers": m.n_layers,
                    "n_heads": m.n_heads,
                    "n_kv_heads": m.n_kv_heads,
                    **({} if m.part is None else {"part": list(m.part)}),
                    "queries": m.queries.as_json(),
                    "keys": m.keys.as_json(),
                }
                for m in self.maps
            ],
        }

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The maps as arrays by name: `weights`, `layers`, `heads`, `tokens`, `offsets` of the first map.

        Those of further maps have the kind before their name: `decoder_weights`, `cross_tokens` ...; a cross map has
        `cross_query_tokens` beside. What a vision model saw is `picture`, (height, width, 3), uint8;
        of what a speech model heard, `envelope` is the loudest sample of each frame.
        """
        named: dict[str, NDArray[Any]] = {}
        for number, m in enumerate(self.maps):
            mark = "" if number == 0 else f"{m.kind}_"
            named[f"{mark}weights"] = m.weights
            named[f"{mark}layers"] = np.array(m.layers, np.int32)
            named[f"{mark}heads"] = np.array(m.heads, np.int32)
            named[f"{mark}tokens"] = np.array(m.keys.labels)
            named[f"{mark}offsets"] = m.keys.offsets
            if m.kind == "cross":
                named[f"{mark}query_tokens"] = np.array(m.queries.labels)
        if self.picture is not None:
            named["picture"] = self.picture.pixels
        if self.sound is not None:
            named["envelope"] = self.sound.envelope
        return named

    def to_json(self, **more: Any) -> str:
        """One JSON document: the schema, the run, `arrays()` as nested lists, and `describe()` under "record".

        Weights are written with as many digits as float32 needs to be read back unchanged; NaN becomes null.

        Args:
            more: Further members of the document, such as the files that were written.
        """
        head = json.dumps({"schema": HEATMAP_SCHEMA, "run": dict(self.run), **more}, ensure_ascii=False)[:-1]
        lists = (
            f'"{name}": {json_array(array) if array.dtype == np.float32 else json_lists(array)}'
            for name, array in self.arrays().items()
        )
        return f'{head}, {", ".join(lists)}, "record": {json_lists(self.describe())}}}'

    def save(self, path: str | Path) -> Path:
        """Writes the record to a file, whole or not at all: `.npz` (arrays) or `.json` (lists); `load` reads both back.

        The npz holds `weights`, `layers`, `heads`, `tokens`, `offsets` and `record` (JSON); further maps of an
        encoder-decoder under `decoder_weights`, `cross_weights` and so on. It loads with allow_pickle=False.
        """
        path = Path(path)
        if path.suffix == ".json":
            # A folder's name that is no text holds lone surrogates; this writes them as JSON's own \udc80.
            return write_whole(path, self.to_json().encode("utf-8", "backslashreplace"))
        if path.suffix == ".npz":
            return write_whole(path, self._npz())
        raise AttnscopeError(f"a record is saved as .npz or .json, not {path.suffix or path.name!r}")

    def of(self, layer: int, head: int, kind: str | None = None) -> NDArray[np.float32]:
        """The weights of one head by its numbers, (query, key).

        Args:
            layer: Number of the layer in the model, from 0.
            head: Number of the head, from 0.
            kind: "encoder", "decoder" or "cross"; None = that of the first map.

        Raises:
            AttnscopeError: The record does not hold it.
        """
        for attention in self.maps:
            if kind in (None, attention.kind):
                return attention.of(layer, head)
        raise AttnscopeError(f"this record has no {kind} attention", f"it has {', '.join(m.kind for m in self.maps)}")

    def draw(
        self,
        folder: str | Path,
        formats: str | Sequence[str] = ("png",),
        *,
        scale: str = "fixed",
        cmap: str = "Blues",
        query: str | None = None,
    ) -> list[Path]:
        """Draws the record's figures into a folder, each file whole or not at all.

        Args:
            folder: Where to; made if it is not there.
            formats: Some of "png", "svg", "pdf".
            scale: What the darkest colour means: weight 1 ("fixed"), each head's largest weight ("head"), or the
                figure's ("figure").
            cmap: Name of a matplotlib colormap.
            query: Also draws bars of what this token attends to: a token, a word, or a place such as `@3`. Of a
                picture: which token's attention is laid over it; see `attnscope.picture_heatmap`.

        Returns:
            The files, overview first.

        Raises:
            AttnscopeError: An unknown format, scale, colormap or token; the folder cannot be written.
        """
        wanted = [formats] if isinstance(formats, str) else formats
        style = view("figures:Style")(scale, cmap)
        paths: list[Path] = view("figures:draw")(self, Path(folder), wanted, style=style, query=query)
        return paths

    def page(self, *, findings: Findings | None = None) -> Page:
        """The record as one HTML file to look into all heads with; a notebook shows it, `.save(path)` writes it.

        Args:
            findings: What `attnscope.heads` found about the heads of the same model: names their roles.

        Raises:
            AttnscopeError: The weights are more than a browser would hold.
        """
        made: Page = view("page:page_of_record")(self, findings=findings)
        return made

    def _npz(self) -> bytes:
        held = io.BytesIO()
        described = np.array(json.dumps(self.describe()))
        np.savez(held, allow_pickle=False, **self.arrays(), record=described)
        return held.getvalue()

    def _repr_png_(self) -> bytes:
        png: bytes = view("figures:glance")(self)
        return png

    def __repr__(self) -> str:
        shapes = ", ".join(f"{m.kind} {m.weights.shape}" for m in self.maps)
        return f"Heatmap({self.run.get('model')!r} on {self.text[:40]!r}: {shapes})"


def load(path: str | Path) -> Heatmap:
    """Reads a record that `Heatmap.save` wrote, without loss.

    Raises:
        AttnscopeError: The file is not there, damaged, or no such record.
    """
    path = Path(path)
    with reading(path, "attnscope record of attention", "give what `heatmap --format npz` or `json` wrote"):
        held, described = read_arrays(path)
        if described["schema"] != HEATMAP_SCHEMA:
            if described["schema"] == "attnscope.pooled/1":
                raise AttnscopeError(f"{path} holds pooled maps", "attnscope.load_pooled reads it")
            raise AttnscopeError(f"{path} holds {described['schema']!r}, which this version cannot read")
        names = ["weights", *(f"{entry['kind']}_weights" for entry in described["maps"][1:])]
        # Through float64: JSON's null is NaN there, and every float32 survives.
        arrays = [np.array(held[name], np.float64).astype(np.float32) for name in names]
        record = _heatmap_from_json(described, arrays)
        record = replace(
            record,
            picture=picture_from(described.get("picture"), held.get("picture")),
            sound=sound_from(described.get("sound"), held.get("envelope")),
        )
        _require_whole(record)
    return record


def _require_whole(record: Heatmap) -> None:
    """Refuses a record whose parts do not fit each other, before a picture of it fails or lies.

    Raises:
        ValueError: They do not.
    """
    if not record.maps:
        raise ValueError("it holds no attention")
    require_types(record)
    require_run(record.run)
    for attention in record.maps:
        if attention.kind not in ("encoder", "decoder", "cross"):  # it becomes part of file names
            raise ValueError(f"there is no {attention.kind!r} attention")
        shape = (len(attention.layers), len(attention.heads), len(attention.queries), len(attention.keys))
        if attention.weights.shape != shape or 0 in shape:
            raise ValueError(f"its weights have shape {attention.weights.shape}, its tokens and heads say {shape}")
        # NaN stands for heads that a layer lacks. Rounding, in 16 bits too, stays far below the upper bound.
        if np.any(attention.weights < 0) or np.any(attention.weights > 1.1):
            raise ValueError("its weights are not between 0 and 1")
        require_weights(attention.weights)
        require_places(attention.layers, attention.heads)
        for tokens in (attention.queries, attention.keys):
            require_whole_tokens(tokens)
    if record.picture is not None:
        n_patches = record.picture.grid[0] * record.picture.grid[1]
        if any(int((~tokens.special).sum()) != n_patches for m in record.maps for tokens in (m.queries, m.keys)):
            raise ValueError("its tokens are not the patches of its picture")
    if record.sound is not None and any(len(m.keys) != len(record.sound.envelope) for m in record.maps):
        raise ValueError("its keys are not the frames of its sound")
    if record.picked is not None and not any(record.chosen(attention) for attention in record.maps):
        raise ValueError("it shows none of its heads")


def require_whole_tokens(tokens: Tokens) -> None:
    """Refuses tokens whose lists do not fit each other, or that can be neither drawn nor printed.

    Raises:
        ValueError: They do not, or cannot.
    """
    n = len(tokens)
    words = n if tokens.words is None else len(tokens.words)
    if {len(tokens.ids), len(tokens.offsets), len(tokens.special), len(tokens.segments), words} != {n}:
        raise ValueError("its lists of tokens differ in length")
    for text in (tokens.text, tokens.pair or "", *tokens.labels):
        text.encode()  # fails on lone surrogates
    if not all(tokens.labels):
        raise ValueError("a token has no label")


def _heatmap_from_json(data: Mapping[str, Any], arrays: Sequence[NDArray[np.float32]]) -> Heatmap:
    fields = {"schema", "text", "picked", "changes", "maps", "picture", "sound"}
    return Heatmap(
        text=data["text"],
        run={name: value for name, value in data.items() if name not in fields},
        picked=None if data["picked"] is None else tuple((int(layer), int(head)) for layer, head in data["picked"]),
        changes=tuple(data["changes"]),
        maps=tuple(
            AttentionMap(
                kind=entry["kind"],
                layers=tuple(map(int, entry["layers"])),
                heads=tuple(map(int, entry["heads"])),
                weights=weights,
                queries=tokens_from_json(entry["queries"]),
                keys=tokens_from_json(entry["keys"]),
                n_layers=entry["n_layers"],
                n_heads=entry["n_heads"],
                n_kv_heads=entry["n_kv_heads"],
                part=_part_from(entry.get("part")),
            )
            for entry, weights in zip(data["maps"], arrays, strict=True)
        ),
    )


def divided_by_rest(weights: NDArray[Any]) -> NDArray[np.float64]:
    """What is left of rows without some of their keys, (..., key), each divided by its sum.

    A row of which less than 1% is left becomes zeros; NaN stays.
    """
    kept = weights.astype(np.float64)
    total = kept.sum(-1, keepdims=True)
    shares: NDArray[np.float64] = np.divide(
        kept, total, out=np.where(np.isnan(kept), np.nan, 0.0), where=total >= LEAST_LEFT
    )
    return shares


def _part_from(given: Any) -> tuple[int, int, int, int] | None:
    if given is None:
        return None
    first_query, first_key, n_queries, n_keys = map(int, given)
    return first_query, first_key, n_queries, n_keys


def spans(numbers: Sequence[int]) -> str:
    """Numbers as people write them: (0, 1, 2, 5) is "0-2,5"."""
    parts: list[str] = []
    start = previous = None
    for number in [*sorted(set(numbers)), None]:
        if previous is not None and number != previous + 1:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = number
        elif previous is None:
            start = number
        previous = number
    return ",".join(parts)


_PIECE_MARKS = ("##", "·")


def _bare(label: str) -> str:
    """A label without the mark of a word piece or of a leading space."""
    for mark in _PIECE_MARKS:
        if label.startswith(mark) and len(label) > len(mark):
            return label[len(mark) :]
    return label
