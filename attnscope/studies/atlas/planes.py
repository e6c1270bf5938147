"""Queries, keys and outputs of every head at some tokens of the sampled texts, and what an atlas says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.models.model import Model
from attnscope.records import Tokens
from attnscope.records.atlas.planes import N_DIRECTIONS, SIDES, STEPS, Plane, PlaneToken, TokenKind, share_by_place
from attnscope.records.atlas.record import LEFT_OUT

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.studies.atlas.tables import ReadText

N_TOKENS = 512
"""Tokens that are drawn, at most: 9 bytes each and head."""

_MOST_BYTES = 2**29
"""Memory for vectors: of models with many wide heads fewer tokens are drawn."""

_AROUND = 6
"""Tokens on either side that are quoted with one."""

Head = tuple[str, int, int]


def draw_tokens(texts: Sequence[ReadText], lots: Sequence[int], model: Model) -> list[NDArray[np.int64]]:
    """Which tokens of each text are shown as points, rising: drawn by a hash of text and position, each as likely.

    Special tokens, the first one of a text, and those that were in the chunk before are not drawn.

    Args:
        texts: What is read.
        lots: The hash of each text.
        model: Its heads' width limits how many tokens fit into memory.
    """
    positions = [np.flatnonzero(text.asks & text.outside_sinks) for text in texts]
    n_heads = max(model.info.n_heads) * max(model.info.n_layers)
    room = _MOST_BYTES // max(1, 3 * 4 * n_heads * (model.info.d_model // max(model.info.n_heads)))
    tickets = [_mix(np.uint64(lot) + of_text.astype(np.uint64)) for lot, of_text in zip(lots, positions, strict=True)]
    every = np.concatenate([np.zeros(0, np.uint64), *tickets])
    most = min(N_TOKENS, room)
    if len(every) <= most:
        return positions
    last = np.partition(every, most - 1)[most - 1]
    return [of_text[ticket <= last] for of_text, ticket in zip(positions, tickets, strict=True)]


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash of 64-bit numbers that no two share (the finaliser of splitmix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        z = numbers * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


class PlaneSums:
    """The vectors of drawn tokens, text by text.

    Attributes:
        tokens: The tokens, by kind of attention, in the order of the vectors.
    """

    def __init__(self) -> None:
        self.tokens: dict[str, list[PlaneToken]] = {}
        self._vectors: dict[tuple[str, int], list[tuple[Tensor, Tensor, Tensor]]] = {}
        self._turned: dict[tuple[str, int], str] = {}

    def add(
        self,
        kind: str,
        number: int,
        tokens: Tokens,
        positions: NDArray[np.int64],
        vectors: Any,
        turned: Mapping[int, str],
    ) -> None:
        """Adds the vectors of a text.

        Args:
            kind: The kind of attention.
            number: The text's number in the corpus.
            tokens: What was read.
            positions: Which of them were drawn.
            vectors: For each layer queries, keys and outputs.
            turned: For each layer, whether they were taken before or after the rotary turn.
        """
        sampled = [plane_token(kind, number, tokens, position) for position in positions.tolist()]
        self.tokens.setdefault(kind, []).extend(sampled)
        for layer, of_layer in vectors.items():
            self._vectors.setdefault((kind, layer), []).append(of_layer)
            self._turned[kind, layer] = turned[layer]

    def finish(self, heads: Sequence[Head], model: Model) -> dict[str, Any]:
        """Fields of an atlas; `heads` are all heads, by kind and layer."""
        if not any(self.tokens.values()):
            return {}
        planes: list[Plane] = []
        points: dict[str, list[NDArray[np.int8]]] = {side: [] for side in SIDES}
        factors: Mapping[Any, Tensor] = model.output_projections()
        for kind, layer in dict.fromkeys(head[:2] for head in heads):
            n_heads = sum(head[:2] == (kind, layer) for head in heads)
            of_layer, coded = self._layer(kind, layer, n_heads, factors.get((kind, layer)))
            planes += of_layer
            for side in SIDES:
                points[side].append(coded[side].reshape(-1, N_DIRECTIONS))
        return {
            "plane_tokens": tuple(token for of_kind in self.tokens.values() for token in of_kind),
            "planes": tuple(planes),
            "points": {side: np.concatenate(of_side) for side, of_side in points.items()},
        }

    def _layer(
        self, kind: str, layer: int, n_heads: int, output: Tensor | None
    ) -> tuple[list[Plane], dict[str, NDArray[np.int8]]]:
        """What is known of the heads of a layer, and their points' codes, (head, token, direction)."""
        import torch

        from attnscope.core.attention.projections import output_directions, score_directions
        from attnscope.core.measures.facts import output_factor

        queries, keys, outputs = (
            torch.cat(of_texts, 1).nan_to_num(0.0, 0.0, 0.0)
            for of_texts in zip(*self._vectors[kind, layer], strict=True)
        )
        if output is not None:
            # Lengths and angles of what is written to the stream, in as few coordinates as a head has.
            outputs = outputs @ output_factor(output, n_heads).cpu().float().mT
        scores = score_directions(queries, keys.repeat_interleave(n_heads // len(keys), 0), N_DIRECTIONS)
        written, explained = output_directions(outputs, N_DIRECTIONS)
        largest = torch.maximum(scores.queries.abs().amax((1, 2)), scores.keys.abs().amax((1, 2)))
        largest_output = written.abs().amax((1, 2))
        coded = {
            side: torch.round(STEPS * part / scale.clamp(min=1e-300)[:, None, None]).to(torch.int8).numpy()
            for side, part, scale in (
                ("queries", scores.queries, largest),
                ("keys", scores.keys, largest),
                ("outputs", written, largest_output),
            )
        }
        positions = np.array([token.place for token in self.tokens[kind]])
        planes = [
            Plane(
                tuple(scores.explained[head].tolist()), tuple(scores.common[head].tolist()),
                tuple(share_by_place(scores.keys[head].numpy(), positions).tolist()),
                tuple(explained[head].tolist()), float(largest[head]), float(largest_output[head]),
                queries.shape[-1], self._turned[kind, layer],
            )
            for head in range(n_heads)
        ]  # fmt: skip
        return planes, coded


def plane_token(kind: str, number: int, tokens: Tokens, position: int) -> PlaneToken:
    """The facts of a token that is shown as a point."""
    around = np.arange(max(0, position - _AROUND), min(len(tokens), position + _AROUND + 1))
    own, label = position - int(around[0]), tokens.labels[position]
    excerpt, offsets = excerpt_of(tokens, around)
    if excerpt:
        start, stop = offsets[own]
    else:
        labels = [tokens.labels[each] for each in around]
        start = sum(len(each) + 1 for each in labels[:own])
        excerpt, stop = " ".join(labels), start + len(label)
    return PlaneToken(kind, number, position, label, kind_of_token(label, excerpt, start, stop), excerpt, start, stop)


def kind_of_token(label: str, excerpt: str, start: int, stop: int) -> TokenKind:
    """What a token is by its letters, and by the character before it."""
    spelled = excerpt[start:stop].strip() or label.removeprefix("##").strip("·")
    if any(letter.isdigit() for letter in spelled):
        return "number"
    if not any(letter.isalpha() for letter in spelled):
        return "punctuation"
    before = excerpt[start - 1 : start]
    if label.startswith("##") or (excerpt[start : start + 1].isalpha() and before.isalpha()):
        return "piece"
    return "capitalised" if spelled[0].isupper() else "word"


def excerpt_of(tokens: Tokens, positions: NDArray[np.int64]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The source's own characters of some tokens, rising, and where in them each token stands.

    As `ExampleFacts.excerpt` and its `offsets`; empty if the tokenizer has no offsets.
    """
    written = ""
    offsets: list[tuple[int, int]] = []
    end = -1  # in the source, of what is written; -1: tokens were left out since
    for number, position in enumerate(positions.tolist()):
        start, stop = tokens.offsets[position].tolist()
        if number and position != positions[number - 1] + 1:
            written, end = written + LEFT_OUT, -1
        if start < 0 or stop <= start:
            offsets.append((len(written), len(written)))
            continue
        if end < 0:
            end = start
        written += tokens.text[end : max(start, end)]
        # Tokens that are bytes of one character share it.
        first = len(written) - max(0, end - start)
        written += tokens.text[max(start, end) : stop]
        end = max(end, stop)
        offsets.append((first, len(written)))
    return (written, tuple(offsets)) if any(stop > start for start, stop in offsets) else ("", ())
