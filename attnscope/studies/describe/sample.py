"""Which texts and queries descriptions are made of: drawn by a hash of what texts say, whatever their order."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable

import numpy as np

from attnscope.corpus import Copies, CorpusText, chunks, distinct, essence
from attnscope.corpus.batching import tokens_of
from attnscope.models.model import Model
from attnscope.studies.describe.rows import Unit
from attnscope.studies.heads.options import DescribeOptions
from attnscope.studies.inputs.texts import Texts, special_ids

QUERIES_A_TEXT = 8
"""How many queries of a text are sampled at least, while that leaves texts out."""

MOST_ENTRIES = 120_000
"""Pairs of a sampled query and a key of its text: what a description takes time for."""

MOST_BYTES = 160 * 2**20
"""What the features of sampled rows, and what heads have of them, may take."""

MOST_TEXTS, MOST_CHARACTERS = 1024, 4_000_000
"""Texts that are drawn before they are tokenised, and their characters."""

FEWEST_TEXTS = 2
"""Below so many texts (chunks of long ones) nothing can be scored on others."""


def draw(model: Model, texts: Texts, options: DescribeOptions) -> list[Unit]:
    """Draws texts and queries by a hash of what they say; those that are fitted come first."""
    special = special_ids(model)
    n_heads = max(1, sum(model.info.n_heads[i] * model.info.n_layers[i] for i in range(len(model.info.kinds))))
    units: list[tuple[bytes, bytes, Unit]] = []
    for text in _draw_texts(distinct(texts, Copies()), options.seed):
        tokens = tokens_of(text, model.tokenizer.encode, special)
        limit = model.info.max_tokens
        for part in chunks(tokens, text.index, limit=limit, chunk=options.chunk, stride=options.stride):
            queries = np.flatnonzero(~part.repeated)
            if len(part) > 1 and len(queries):
                of_text = lot_of(text, options.seed)
                units.append((lot_of(text, options.seed, part.number), of_text, Unit(text, part, queries)))
    units.sort(key=lambda lots: lots[0])
    sizes = np.array([(len(unit.queries), len(unit.chunk)) for *_, unit in units]).reshape(-1, 2)

    def fits(n_units: int, each: int) -> bool:
        rows = np.minimum(sizes[:n_units, 0], each)
        n_rows, n_entries = int(rows.sum()), int((rows * sizes[:n_units, 1]).sum())
        size = n_entries * (_N_FEATURES * len(model.info.kinds) + 2 * n_heads)
        is_small = size <= MOST_BYTES and n_entries <= MOST_ENTRIES
        return n_rows <= options.queries and (is_small or n_rows <= _FEWEST_ROWS)

    n_units = len(units)
    each = QUERIES_A_TEXT
    while n_units > FEWEST_TEXTS and not fits(n_units, each):
        n_units -= max(1, n_units // 50)
    longest = int(sizes[:n_units, 0].max(initial=0))
    low, high = 1, max(1, longest)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(n_units, middle) else (low, middle - 1)
    chosen = units[:n_units]
    for lot, _, unit in chosen:
        rng = np.random.default_rng(int.from_bytes(lot, "little"))
        unit.queries = np.sort(rng.permutation(unit.queries)[:low]).astype(np.int64)
    # Chunks of one text are in one half, where there are texts enough.
    of_texts = sorted({of_text for _, of_text, _ in chosen})
    apart = len(of_texts) >= 6
    names = [of_text if apart else lot for lot, of_text, _ in chosen]
    order = {name: number for number, name in enumerate(sorted(set(names), key=lambda name: name[::-1]))}
    for name, (*_, unit) in zip(names, chosen, strict=True):
        unit.fits = order[name] % 2 == 0
    return sorted((unit for *_, unit in chosen), key=lambda unit: not unit.fits)


_N_FEATURES, _FEWEST_ROWS = 132, 200
"""About how many features there are; and how many rows are read whatever they take."""


def _draw_texts(texts: Iterable[CorpusText], seed: int) -> list[CorpusText]:
    """The texts with the smallest hashes, as many as are held."""
    heap: list[tuple[int, int, CorpusText]] = []
    characters = 0
    for text in texts:
        lot = -int.from_bytes(lot_of(text, seed), "big")
        heapq.heappush(heap, (lot, text.index, text))
        characters += text.n_characters
        while len(heap) > FEWEST_TEXTS and (len(heap) > MOST_TEXTS or characters > MOST_CHARACTERS):
            characters -= heapq.heappop(heap)[2].n_characters
    return [text for *_, text in sorted(heap, key=lambda item: -item[0])]


def lot_of(text: CorpusText, seed: int, part: int = -1) -> bytes:
    """A number that depends only on what a text says: its copies have the same, so that any may be drawn."""
    return hashlib.blake2b(essence(text) + f"{seed} {part}".encode(), digest_size=8).digest()
