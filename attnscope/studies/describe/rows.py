"""Rows of attention that descriptions are fitted to: what queries may see in keys, and what heads have of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.annotated import AnnotatedText
from attnscope.corpus import TOKEN_BUDGET, Chunk, CorpusText, batches
from attnscope.models.model import Model
from attnscope.records import Tokens
from attnscope.studies.describe.features import Feature, TextFacts, blocks_of, catalogue
from attnscope.studies.inputs.texts import batch_of
from attnscope.studies.measuring.head_blocks import Frequencies, decoder_start, target_of
from attnscope.studies.running.memory import Room, halves, padded_size

if TYPE_CHECKING:
    from attnscope.core.attention.row_samples import Found
    from attnscope.core.questions.sampled_rows import Rows


@dataclass(eq=False)
class Unit:
    """A sampled text, or a chunk of a long one.

    Attributes:
        text: The text.
        chunk: The chunk.
        queries: (row,): places of its sampled queries, ascending.
        fits: Whether descriptions are fitted on it; else they are scored on it.
        annotation: The text with its links, if it is annotated.
        target: Of an encoder-decoder what its decoder reads as it writes the text again.
    """

    text: CorpusText
    chunk: Chunk
    queries: NDArray[np.int64]
    fits: bool = False
    annotation: AnnotatedText | None = None
    target: Tokens | None = None

    def query_tokens(self, kind: str) -> Tokens:
        """The queries in a kind of attention, as descriptions show them.

        Across, a row is the decoder's as it writes a token: it is shown by that token, and so are the keys.
        """
        return self.target if kind == "decoder" and self.target is not None else self.chunk.tokens


@dataclass(frozen=True, eq=False)
class Group:
    """Heads that may attend to the same keys, and the sampled rows.

    Attributes:
        kind: Of attention.
        heads: (layer, head) of each.
        features: The features.
        rows: The rows.
        keys: (entry,): the place of each entry's key.
    """

    kind: str
    heads: tuple[tuple[int, int], ...]
    features: tuple[Feature, ...]
    rows: Rows
    keys: NDArray[np.int32]

    def matches(self, feature: Feature) -> bool:
        """Whether a feature holds of any key of the rows."""
        return bool(self.rows.features[self.features.index(feature)].any())


@dataclass(eq=False)
class _Read:
    """What was read of a unit."""

    features: NDArray[np.uint8]
    found: Found


def measure(
    model: Model,
    sample: Sequence[Unit],
    frequencies: Frequencies,
    own: Sequence[Feature] = (),
    heads: Sequence[tuple[int, int]] | None = None,
) -> list[Group]:
    """Runs the model on sampled texts, and reads the rows of their queries.

    Args:
        model: The model.
        sample: The texts.
        frequencies: How frequent tokens are.
        own: Further features.
        heads: Which heads are described; None = all.
    """
    start = decoder_start(model)
    for unit in sample:
        unit.target = None if start is None else target_of(start, unit.chunk.tokens)
    tokens = [part for unit in sample for part in (unit.chunk.tokens, unit.target) if part is not None]
    labels = dict.fromkeys(t.labels[i] for t in tokens for i in np.flatnonzero(t.special))
    relations = sorted({link.relation for unit in sample if unit.annotation for link in unit.annotation.links})
    kinds = sorted({kind for unit in sample if unit.annotation for kind in unit.annotation.kinds if kind})
    features = [*catalogue(list(labels), relations, kinds), *own]
    frequent = _frequent(sample, frequencies)
    reads: dict[str, dict[int, _Read]] = {}
    place_of = {id(unit.chunk): number for number, unit in enumerate(sample)}
    levels = np.array([feature.levels for feature in features])

    def block(unit: Unit, kind: str) -> NDArray[np.uint8]:
        facts = _facts(model, unit.query_tokens(kind), unit.annotation, frequencies, frequent)
        return blocks_of(features, facts, unit.queries)

    def run(batch: Sequence[Chunk]) -> list[tuple[str, Chunk, _Read]]:
        units = [sample[place_of[id(chunk)]] for chunk in batch]
        first = model.info.kinds[0]
        blocks = {first: [block(unit, first) for unit in units]}
        for kind in model.info.kinds[1:]:
            blocks[kind] = [block(unit, kind) for unit in units] if kind == "decoder" else blocks[first]
        return [
            (kind, unit.chunk, _Read(held, one))
            for kind, found in _run(model, units, blocks, levels).items()
            for unit, held, one in zip(units, blocks[kind], found, strict=True)
            if one.expected
        ]

    room = Room()
    cut: Sequence[Sequence[Chunk]] = batches([unit.chunk for unit in sample], TOKEN_BUDGET)
    for batch in cut:
        for _, made in room.each(batch, run, halves, padded_size):
            for kind, chunk, read in made:
                reads.setdefault(kind, {})[place_of[id(chunk)]] = read
    pooled = [unit.fits for unit in sample]
    return [group for kind, of_kind in reads.items() for group in _groups(kind, of_kind, features, pooled, heads)]


def _run(
    model: Model, units: Sequence[Unit], blocks: Mapping[str, Sequence[NDArray[np.uint8]]], levels: NDArray[np.int64]
) -> Mapping[str, list[Found]]:
    """The rows of a batch: kind -> what was found of each text."""
    import torch

    from attnscope.core.attention.probes import Weights
    from attnscope.core.attention.row_samples import RowSamples, RowsWanted

    asked: Any = {
        kind: [
            RowsWanted(unit.queries, len(unit.chunk), block, pooled=unit.fits)
            for unit, block in zip(units, of_kind, strict=True)
        ]
        for kind, of_kind in blocks.items()
    }
    probe = RowSamples(asked, levels)
    targets = [unit.target for unit in units if unit.target is not None]
    given = batch_of([unit.chunk.tokens for unit in units], targets).to(model.info.device)
    with torch.no_grad():
        if model.info.path != "eager":
            model.run(given, probe)
        else:
            kept = Weights()
            model.run(given, kept)
            for kind, by_layer in kept.maps.items():
                for layer, weights in by_layer.items():
                    probe.keep(kind, layer, weights)
    return {str(kind): found for kind, found in probe.found.items()}


def _facts(
    model: Model,
    tokens: Tokens,
    annotation: AnnotatedText | None,
    frequencies: Frequencies,
    frequent: frozenset[int],
) -> TextFacts:
    import torch

    ids = torch.from_numpy(tokens.ids)
    found = model.static_embeddings(ids[None].to(model.info.device))[0].float().cpu()
    embeddings = found / found.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return TextFacts(
        tokens,
        frequencies.of(tokens.ids),
        np.array([int(number) in frequent for number in tokens.ids], np.bool_),
        embeddings.numpy(),
        () if annotation is None else annotation.words,
        () if annotation is None else annotation.links,
        () if annotation is None else annotation.kinds,
    )


def _frequent(sample: Sequence[Unit], frequencies: Frequencies) -> frozenset[int]:
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
    features: Sequence[Feature],
    pooled: Sequence[bool],
    chosen: Sequence[tuple[int, int]] | None,
) -> list[Group]:
    """The rows of each set of layers whose queries may attend to the same keys; of chosen heads, if any are."""
    from attnscope.core.questions.sampled_rows import Rows

    units = sorted(reads)
    first = reads[units[0]].found.expected
    mine_of = {
        layer: [head for head in range(held.shape[1]) if chosen is None or (layer, head) in chosen]
        for layer, held in sorted(first.items())
    }
    layers = [layer for layer, mine in mine_of.items() if mine]
    alike: dict[bytes, list[int]] = {}
    for layer in layers:
        digest = hashlib.blake2b()
        for unit in units:
            digest.update(np.packbits(reads[unit].found.allowed[layer]).tobytes())
        alike.setdefault(digest.digest(), []).append(layer)
    made = []
    for mine in alike.values():
        allowed = [reads[unit].found.allowed[mine[0]] for unit in units]
        # A query with one key has no choice.
        kept = [np.flatnonzero(one.sum(1) > 1) for one in allowed]
        lengths = np.concatenate([one[rows].sum(1) for one, rows in zip(allowed, kept, strict=True)])
        starts = np.concatenate([[0], np.cumsum(lengths)])
        held = np.empty((len(features), int(starts[-1])), np.uint8)
        keys = np.concatenate([one[rows].nonzero()[1] for one, rows in zip(allowed, kept, strict=True)])
        at = 0
        for unit, one, rows in zip(units, allowed, kept, strict=True):
            part = reads[unit].features[:, rows][:, one[rows]]
            held[:, at : at + part.shape[1]] = part
            at += part.shape[1]
            if mine is list(alike.values())[-1]:
                reads[unit].features = reads[unit].features[:, :0]
        heads = tuple((layer, head) for layer in mine for head in mine_of[layer])
        expected = np.concatenate(
            [
                np.concatenate(
                    [
                        reads[unit].found.expected[layer][slice(None) if pooled[unit] else rows][:, mine_of[layer]]
                        for layer in mine
                    ],
                    1,
                )
                for unit, rows in zip(units, kept, strict=True)
            ]
        )
        # A row of a text that is fitted shares the record of its text.
        shares = [
            np.zeros(len(rows), np.int64) if pooled[unit] else np.arange(len(rows))
            for unit, rows in zip(units, kept, strict=True)
        ]
        sizes = [share.max(initial=-1) + 1 for share in shares]
        records = np.concatenate([at + share for at, share in zip(np.cumsum([0, *sizes]), shares, strict=False)])
        entropies = np.concatenate(
            [
                np.concatenate([reads[unit].found.entropies[layer][rows][:, mine_of[layer]] for layer in mine], 1)
                for unit, rows in zip(units, kept, strict=True)
            ]
        )
        texts = np.repeat(np.array(units), [len(rows) for rows in kept])
        levels = np.array([feature.levels for feature in features])
        rows_of_group = Rows(held, levels, starts, texts, expected, entropies, records)
        made.append(Group(kind, heads, tuple(features), rows_of_group, keys.astype(np.int32)))
    return made
