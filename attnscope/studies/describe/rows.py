"""Rows of attention that descriptions are fitted to: what queries may see in keys, and what heads have of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.annotated import AnnotatedText
from attnscope.corpus import TOKEN_BUDGET, Chunk, CorpusText, batches
from attnscope.errors import AttnscopeError
from attnscope.models.model import Model
from attnscope.records import Tokens
from attnscope.studies.describe.facts import TextFacts
from attnscope.studies.describe.features import RESTING, SINK, Feature, blocks_of, catalogue
from attnscope.studies.inputs.texts import batch_of
from attnscope.studies.measuring.head_blocks import Frequencies, decoder_start, target_of, unit_embeddings
from attnscope.studies.run import Room

if TYPE_CHECKING:
    from attnscope.core.attention.row_samples import SampledRows
    from attnscope.core.questions.sampled_rows import Part, Rows


@dataclass(eq=False)
class Unit:
    """A sampled text, or a chunk of a long one.

    Attributes:
        queries: (row,): places of its sampled queries, ascending.
        fits: Whether descriptions are fitted on it; else they are scored on it.
        annotation: The text with its links, if it is annotated.
        target: In an encoder-decoder, what the decoder reads as it writes the text again.
    """

    text: CorpusText
    chunk: Chunk
    queries: NDArray[np.int64]
    fits: bool = False
    annotation: AnnotatedText | None = None
    target: Tokens | None = None

    def tokens(self, kind: str) -> Tokens:
        """The queries and keys in a kind of attention, as descriptions show them.

        Across, a row is the decoder's as it writes a token: it is shown by that token, and so are the keys.
        """
        return self.target if kind == "decoder" and self.target is not None else self.chunk.tokens


@dataclass(frozen=True, eq=False)
class Types:
    """The types of token that the sample holds.

    Attributes:
        ids: (type,): their numbers in the vocabulary, ascending.
        embeddings: (type, d): their static embeddings; zeros if they are not known.
    """

    ids: NDArray[np.int64]
    labels: tuple[str, ...]
    embeddings: NDArray[np.float32]

    @classmethod
    def of(cls, model: Model, tokens: Sequence[Tokens], also: Mapping[int, str]) -> Types:
        """The types of some texts, and further ones."""
        import torch

        labels = {int(i): label for of in tokens for i, label in zip(of.ids, of.labels, strict=True)}
        labels = {**also, **labels}
        ids = np.array(sorted(labels), np.int64)
        rows = model.static_embeddings(torch.from_numpy(ids)[None].to(model.info.device))
        embeddings = np.zeros((len(ids), 1), np.float32) if rows is None else rows[0].float().cpu().numpy()
        return cls(ids, tuple(labels[int(i)] for i in ids), embeddings)

    def places(self, ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """The type of each token."""
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        unknown = ids[self.ids[places] != ids]
        if len(unknown):
            raise AttnscopeError(
                f"descriptions were fitted without knowing token {unknown[0]}", "name the texts to come when you fit"
            )
        return places.astype(np.int32)


@dataclass(frozen=True, eq=False)
class Group:
    """Heads that may attend to the same keys, and the sampled rows in two parts: where they rest, and the rest.

    Attributes:
        heads: (layer, head) of each.
        active: The rows without the keys on which heads rest, if they have two other keys.
        sinks: All rows. The first entry stands for all keys that are not resting, if there are any; the others are the
            resting keys.
        sink_features: The numbers of the features that `sinks` has, in its order.
        sink_rows: (active row,): the row of `sinks` that it is part of.
        ordinary: (active row,): whether its query is no special token. Descriptions are fitted to these rows.
        offsets: (active entry,): how far each key is behind its query, in tokens.
        queries: (active row,): the place of each query.
        gates: The numbers of the features that are classes of queries too, in the order of `active.gates`.
    """

    kind: str
    heads: tuple[tuple[int, int], ...]
    features: tuple[Feature, ...]
    active: Rows
    sinks: Rows
    sink_features: tuple[int, ...]
    sink_rows: NDArray[np.int64]
    ordinary: NDArray[np.bool_]
    offsets: NDArray[np.int32]
    queries: NDArray[np.int64]
    gates: tuple[int, ...]
    types: Types

    @property
    def resting(self) -> int:
        """The number of the feature of keys on which heads rest."""
        return [feature.name for feature in self.features].index(RESTING)

    @cached_property
    def all_rows(self) -> Part:
        """All active rows, those of special tokens too."""
        from attnscope.core.questions.sampled_rows import Part

        return Part(self.active, np.arange(len(self.active.texts)))

    def part(self, texts: Sequence[int]) -> Part:
        """The active rows of some texts whose queries are ordinary."""
        from attnscope.core.questions.sampled_rows import Part

        return Part(self.active, np.flatnonzero(np.isin(self.active.texts, np.asarray(texts)) & self.ordinary))


@dataclass(eq=False)
class _Read:
    """What was read of a unit."""

    features: NDArray[np.uint8]
    rows: SampledRows


def measure(
    model: Model,
    sample: Sequence[Unit],
    frequencies: Frequencies,
    heads: Sequence[tuple[int, int]] | None = None,
    also: Mapping[int, str] | None = None,
) -> list[Group]:
    """Runs the model on sampled texts, and reads the rows of their queries.

    `also` are types of token that other texts have: their numbers and labels.
    """
    start = decoder_start(model)
    for unit in sample:
        unit.target = None if start is None else target_of(start, unit.chunk.tokens)
    tokens = [part for unit in sample for part in (unit.chunk.tokens, unit.target) if part is not None]
    labels = dict.fromkeys(t.labels[i] for t in tokens for i in np.flatnonzero(t.special))
    relations = sorted({link.relation for unit in sample if unit.annotation for link in unit.annotation.links})
    kinds = sorted({kind for unit in sample if unit.annotation for kind in unit.annotation.kinds if kind})
    features = catalogue(list(labels), relations, kinds)
    frequent = frequent_words(sample, frequencies)
    reads: dict[str, dict[int, _Read]] = {}
    place_of = {id(unit.chunk): number for number, unit in enumerate(sample)}
    types = Types.of(model, tokens, also or {})

    def block(unit: Unit, kind: str) -> NDArray[np.uint8]:
        facts = text_facts(model, unit.tokens(kind), unit.annotation, frequencies, frequent)
        return blocks_of(features, facts, unit.queries)

    def run(batch: Sequence[Chunk]) -> list[tuple[str, Chunk, _Read]]:
        units = [sample[place_of[id(chunk)]] for chunk in batch]
        first = model.info.kinds[0]
        blocks = {first: [block(unit, first) for unit in units]}
        for kind in model.info.kinds[1:]:
            blocks[kind] = [block(unit, kind) for unit in units] if kind == "decoder" else blocks[first]
        return [
            (kind, unit.chunk, _Read(levels, sample_rows))
            for kind, samples in _run(model, units, blocks).items()
            for unit, levels, sample_rows in zip(units, blocks[kind], samples, strict=True)
            if sample_rows.weights
        ]

    room = Room()
    cut: Sequence[Sequence[Chunk]] = batches([unit.chunk for unit in sample], TOKEN_BUDGET)
    for batch in cut:
        for _, results in room.each(batch, run):
            for kind, chunk, read in results:
                reads.setdefault(kind, {})[place_of[id(chunk)]] = read
    return [group for kind in reads for group in _groups(kind, reads[kind], sample, features, types, heads)]


def _run(
    model: Model, units: Sequence[Unit], blocks: Mapping[str, Sequence[NDArray[np.uint8]]]
) -> Mapping[str, list[SampledRows]]:
    """The rows of a batch: kind -> the sampled rows of each text."""
    import torch

    from attnscope.core.attention.probes import Weights
    from attnscope.core.attention.row_samples import RowSamples, RowsWanted

    wanted: Any = {kind: [RowsWanted(unit.queries, len(unit.chunk)) for unit in units] for kind in blocks}
    probe = RowSamples(wanted)
    targets = [unit.target for unit in units if unit.target is not None]
    batch = batch_of([unit.chunk.tokens for unit in units], targets).to(model.info.device)
    with torch.no_grad():
        if model.info.path != "eager":
            model.run(batch, probe)
        else:
            probe_of_maps = Weights()
            model.run(batch, probe_of_maps)
            for kind, by_layer in probe_of_maps.maps.items():
                for layer, weights in by_layer.items():
                    probe.keep(kind, layer, weights)
    return {str(kind): rows for kind, rows in probe.rows.items()}


def text_facts(
    model: Model,
    tokens: Tokens,
    annotation: AnnotatedText | None,
    frequencies: Frequencies,
    frequent: frozenset[int],
) -> TextFacts:
    """What features know of a text."""
    import torch

    embeddings = unit_embeddings(model, torch.from_numpy(tokens.ids)[None])
    return TextFacts(
        tokens,
        frequencies.of(tokens.ids),
        np.array([int(number) in frequent for number in tokens.ids], np.bool_),
        None if embeddings is None else embeddings[0].cpu().numpy(),
        () if annotation is None else annotation.words,
        () if annotation is None else annotation.links,
        () if annotation is None else annotation.kinds,
    )


def frequent_words(sample: Sequence[Unit], frequencies: Frequencies) -> frozenset[int]:
    """The most frequent words, which together are half of all words."""
    words: set[int] = set()
    for unit in sample:
        tokens = unit.chunk.tokens
        words |= {
            int(number)
            for number, label, special in zip(tokens.ids, tokens.labels, tokens.special, strict=True)
            if not special and any(c.isalpha() for c in label)
        }
    ids = np.array(sorted(words), np.int64)
    if not len(ids):
        return frozenset()
    share = np.exp(frequencies.of(ids))
    order = np.argsort(-share, kind="stable")
    before = np.cumsum(share[order]) - share[order]
    return frozenset(ids[order[before < share.sum() / 2]].tolist())


def _groups(
    kind: str,
    reads: dict[int, _Read],
    sample: Sequence[Unit],
    features: Sequence[Feature],
    types: Types,
    chosen: Sequence[tuple[int, int]] | None,
) -> list[Group]:
    """The rows of each set of layers whose queries may attend to the same keys; of chosen heads alone, if any are."""
    units = sorted(reads)
    mine_of = {
        layer: [head for head in range(weights.shape[1]) if chosen is None or (layer, head) in chosen]
        for layer, weights in sorted(reads[units[0]].rows.weights.items())
    }
    alike: dict[bytes, list[int]] = {}
    for layer in (layer for layer, mine in mine_of.items() if mine):
        digest = hashlib.blake2b()
        for unit in units:
            digest.update(np.packbits(reads[unit].rows.allowed[layer]).tobytes())
        alike.setdefault(digest.digest(), []).append(layer)
    return [
        _group(kind, reads, sample, features, types, {layer: mine_of[layer] for layer in of}) for of in alike.values()
    ]


@dataclass(frozen=True, eq=False)
class _UnitRows:
    """The rows of one text, in both parts."""

    active: Rows
    sinks: Rows
    sink_rows: NDArray[np.int64]
    ordinary: NDArray[np.bool_]
    offsets: NDArray[np.int32]
    queries: NDArray[np.int64]


def _group(
    kind: str,
    reads: dict[int, _Read],
    sample: Sequence[Unit],
    features: Sequence[Feature],
    types: Types,
    heads: Mapping[int, Sequence[int]],
) -> Group:
    sink_features = [n for n, feature in enumerate(features) if SINK.match(feature.base or feature.name)]
    units = [
        _unit_rows(kind, number, sample[number], reads[number], features, sink_features, types, heads)
        for number in sorted(reads)
    ]
    before = np.cumsum([0, *(len(of.sinks.texts) for of in units)])
    return Group(
        kind, tuple((layer, head) for layer, mine in heads.items() for head in mine), tuple(features),
        _join_rows([of.active for of in units]), _join_rows([of.sinks for of in units]), tuple(sink_features),
        np.concatenate([of.sink_rows + at for of, at in zip(units, before, strict=False)]),
        np.concatenate([of.ordinary for of in units]), np.concatenate([of.offsets for of in units]),
        np.concatenate([of.queries for of in units]), tuple(gates_of(features)), types,
    )  # fmt: skip


def gates_of(features: Sequence[Feature]) -> list[int]:
    """The numbers of the features that are classes of queries too: binary ones that depend on the token alone."""
    return [
        number
        for number, feature in enumerate(features)
        if feature.family == "key" and feature.levels == 2 and not SINK.match(feature.name)
    ]


def _unit_rows(
    kind: str,
    number: int,
    unit: Unit,
    read: _Read,
    features: Sequence[Feature],
    sink_features: Sequence[int],
    types: Types,
    heads: Mapping[int, Sequence[int]],
) -> _UnitRows:
    from attnscope.core.questions.sampled_rows import Rows

    allowed = read.rows.allowed[next(iter(heads))]
    weights = np.concatenate([read.rows.weights[layer][:, mine] for layer, mine in heads.items()], 1)
    resting = next(n for n, feature in enumerate(features) if feature.name == RESTING)
    rests = read.features[resting] > 0
    free = allowed & ~rests
    levels = np.array([feature.levels for feature in features])
    rows = np.flatnonzero(allowed.sum(1) > 1)  # a query with one key has no choice
    used = rows[free[rows].sum(1) > 1]
    tokens = unit.tokens(kind)
    of_row, keys = free[used].nonzero()
    token_types = types.places(tokens.ids)
    query_types = token_types[unit.queries]
    active = Rows(
        np.ascontiguousarray(read.features[:, used][:, free[used]]), levels, _starts(free[used].sum(1)),
        np.full(len(used), number), np.ascontiguousarray(weights.transpose(1, 0, 2)[:, used][:, free[used]]),
        key_types=token_types[keys], query_types=query_types[used],
        gates=read.features[gates_of(features)][:, used, unit.queries[used]] > 0,
    )  # fmt: skip
    # The first entry of a row stands for all keys that are free.
    n_free = free[rows].sum(1)
    mask = np.concatenate([n_free[:, None] > 0, (allowed & rests)[rows]], 1)
    levels_there = np.concatenate(
        [np.zeros((len(sink_features), len(rows), 1), np.uint8), read.features[sink_features][:, rows]], 2
    )
    on_free = np.where(free[:, None], weights, 0).sum(2, dtype=np.float32)[rows]
    of_sinks = np.concatenate([on_free[:, :, None], weights[rows]], 2).transpose(1, 0, 2)
    counts = np.concatenate([n_free[:, None], np.ones((len(rows), allowed.shape[1]))], 1)
    sinks = Rows(
        np.ascontiguousarray(levels_there[:, mask]), levels[list(sink_features)], _starts(mask.sum(1)),
        np.full(len(rows), number), np.ascontiguousarray(of_sinks[:, mask], np.float32), counts[mask],
        query_types=query_types[rows],
    )  # fmt: skip
    return _UnitRows(
        active, sinks, np.searchsorted(rows, used), ~tokens.special[unit.queries[used]],
        (keys - unit.queries[used][of_row]).astype(np.int32), unit.queries[used],
    )  # fmt: skip


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _join_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of several texts, one after the other."""
    from attnscope.core.questions.sampled_rows import Rows

    def join(name: str, axis: int = 0) -> Any:
        arrays = [getattr(of, name) for of in parts]
        return None if arrays[0] is None else np.concatenate(arrays, axis)

    lengths = np.concatenate([np.diff(of.starts) for of in parts])
    return Rows(
        join("features", 1), parts[0].levels, _starts(lengths), join("texts"), join("weights", 1),
        join("counts"), join("key_types"), join("query_types"), join("gates", 1),
    )  # fmt: skip
