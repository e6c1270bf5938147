"""What does a head's choice of keys follow from: positions, tokens, or both? The rest is context.

Queries and keys are replaced by their means over the fitted texts, given the token's position, its type, or both. The
seam computes the attention that follows from them, in the rows that descriptions are scored on.

They are averaged as they are before rotary positions and turned afterwards. Queries and keys are linear in the normed
states, so that these are those of the mean normed state; where they are normed themselves, they are averaged after
that. Nothing that knows only tokens may know positions: there, turns are averaged over the text's positions, and
position biases are left out. Masks stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.corpus import TOKEN_BUDGET, Chunk, batches
from attnscope.models.model import Model
from attnscope.records.heads.descriptions import HeadDescription, Sources, SourceShare
from attnscope.studies.describe.rows import Group, Unit
from attnscope.studies.inputs.texts import batch_of
from attnscope.studies.running.memory import Room, halves, padded_size

if TYPE_CHECKING:
    from torch import Tensor, nn

    from attnscope.core.attention.seam import AttentionCall
    from attnscope.core.questions.mean_vectors import MeanVectors
    from attnscope.core.teaching.stepwise import Rotation
    from attnscope.models.inside.around import TurnWatch

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]
Place = tuple[str, int]
"""Kind of attention, layer."""

MOST_BYTES = 2**28
"""About what queries and keys of fitted texts may take; for layers beyond that the texts are read again."""

KNOWN = ("position", "token", "both")

_UNSEEN = "positions turn its queries and keys in a way that attnscope cannot see"

_SAME, _APART = 1e-4, 1e-2
"""Relative differences: below, two states are the same; above, two queries are not."""

_MOVES = 1e-3
"""Nats by which a position bias differs between texts if it depends on words."""


@dataclass(frozen=True, eq=False)
class _Means:
    """Mean queries and keys of a layer."""

    queries: MeanVectors
    keys: MeanVectors

    def vectors(self, condition: str, types: Sequence[Numbers], rotation: Rotation | None) -> tuple[Floats, Floats]:
        """The queries and keys of a text's tokens, (head, token, d_head) each, turned by their positions.

        `condition` is one of KNOWN. `types` are those of the tokens that attend, and of those that are attended to.
        Without a rotation, positions turn nothing.
        """
        turned = []
        for means, mine in zip((self.queries, self.keys), types, strict=True):
            if condition == "position":
                vectors = means.given_position(len(mine))
            else:
                vectors = means.given_token(mine) if condition == "token" else means.given_both(mine)
            if rotation is not None:
                cos, sin = (turn[: len(mine)] for turn in (rotation.cos, rotation.sin))
                if condition == "token":
                    cos, sin = cos.mean(0), sin.mean(0)
                vectors = vectors * cos + vectors[..., rotation.partner] * sin
            turned.append(vectors)
        return turned[0], turned[1]


class _Study:
    """The rows of all heads, and what is left of their nats.

    Attributes:
        unseen: Share of the scored texts' tokens whose type the fitted texts lack.
        left: By group, (KNOWN, row, head): KL(A ‖ p) of each row, in nats.
        reasons: By place, why there are no numbers.
    """

    def __init__(self, model: Model, sample: Sequence[Unit], groups: Sequence[Group]) -> None:
        self._model, self._sample, self._groups = model, sample, groups
        self._halves = [[unit for unit in sample if unit.fits == fits] for fits in (True, False)]
        fitted, scored = ([unit.chunk.tokens.ids for unit in units] for units in self._halves)
        self._ids = np.unique(np.concatenate([*fitted, *(unit.target.ids for unit in self._halves[0] if unit.target)]))
        self.unseen = float(np.mean(self._types(np.concatenate(scored)) == len(self._ids)))
        self._numbers = {id(unit.chunk): number for number, unit in enumerate(sample)}
        self.left = [np.zeros((len(KNOWN), len(group.active.texts), len(group.heads))) for group in groups]
        self.reasons: dict[Place, str] = {}
        # In the first layer of a self-attention tokens may have equal states; later ones have met others.
        blocks = model.blocks().items()
        self._first = {block: (str(kind), layer) for (kind, layer), block in blocks if not layer and kind != "cross"}
        self._states: dict[Place, Tensor] = {}
        self._hides_turns: set[str] = set()

    def run(self) -> None:
        """Averages and scores, a few layers at a time."""
        places = sorted({(group.kind, layer) for group in self._groups for layer, _ in group.heads})
        info, n_tokens = self._model.info, sum(len(unit.chunk) for unit in self._halves[0])
        shares = [1 + info.n_kv_heads[at] / info.n_heads[at] for at in range(len(info.kinds))]
        size = 4 * info.d_model * max(shares) * max(n_tokens, 2 * len(self._ids))
        at_once = max(1, int(MOST_BYTES / size))
        for start in range(0, len(places), at_once):
            means = self._average(places[start : start + at_once])
            for of, rows, left in self._read(1, partial(self._score, means)):
                self.left[of][:, rows.rows, rows.heads] = left

    def _types(self, ids: Numbers) -> Numbers:
        """The number of each token's type; types that the fitted texts lack have the last one."""
        numbers = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        return np.where(self._ids[numbers] == ids, numbers, len(self._ids))

    def _types_of(self, unit: Unit, kind: str) -> tuple[Numbers, Numbers]:
        """The types of what a text's states read: of those that attend, and of those that are attended to."""
        read = unit.chunk.tokens if kind == "encoder" or unit.target is None else unit.target
        return self._types(read.ids), self._types(unit.tokens(kind).ids)

    def _read(self, half: int, visit: Callable[[AttentionCall, Sequence[Unit], TurnWatch], list[Any]]) -> Iterator[Any]:
        """Runs the model on the fitted texts (0) or the scored ones (1); yields what visits to attentions return."""
        import torch

        from attnscope.core.attention.tiles import attend_lean
        from attnscope.models.inside.around import TurnWatch
        from attnscope.models.inside.projections import hooks

        def run(batch: Sequence[Chunk]) -> list[Any]:
            units = [self._sample[self._numbers[id(chunk)]] for chunk in batch]
            visited: list[Any] = []
            turns = TurnWatch()

            def probe(call: AttentionCall) -> Tensor:
                visited.extend(visit(call, units, turns))
                turns.take()
                return attend_lean(call)

            targets = [unit.target for unit in units if unit.target is not None]
            inputs = batch_of([chunk.tokens for chunk in batch], targets).to(self._model.info.device)
            modules = self._model.modules()
            with torch.no_grad(), turns.watch(modules), hooks(self._first, self._note_states, before=True):
                self._model.run(inputs, probe)
            return visited

        room = Room()
        cut: Sequence[Sequence[Chunk]] = batches([unit.chunk for unit in self._halves[half]], TOKEN_BUDGET)
        for batch in cut:
            for _, visited in room.each(batch, run, halves, padded_size):
                yield from visited

    def _note_states(self, block: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        states: Any = inputs[0] if inputs else named.get("hidden_states")
        self._states.pop(self._first[block], None)
        if getattr(states, "ndim", 0) == 3:
            self._states[self._first[block]] = states

    def _average(self, places: Sequence[Place]) -> dict[Place, _Means]:
        """The mean queries and keys of some layers, over the fitted texts."""
        from attnscope.core.questions.mean_vectors import mean_vectors

        unturned: set[Place] = set()

        def visit(call: AttentionCall, units: Sequence[Unit], turns: TurnWatch) -> list[Any]:
            place, states = (call.kind, call.layer), self._states.pop((call.kind, call.layer), None)
            if states is None and place not in places:
                return []
            query, key, turned = turns.bare(call)
            types = [self._types_of(unit, call.kind) for unit in units]
            if turned == "never":
                unturned.add(place)
                if states is not None and _is_turned_unseen(call, states, types):
                    self._hides_turns.add(call.kind)
            elif turned == "after":
                self.reasons[place] = _UNSEEN
            if place not in places or place in self.reasons:
                return []
            return [
                (place, mine, [_rows(of, text, len(numbers)) for of, numbers in zip((query, key), mine, strict=True)])
                for text, mine in enumerate(types)
            ]

        by_place: dict[Place, list[tuple[Any, Any]]] = {}
        for place, types, vectors in self._read(0, visit):
            by_place.setdefault(place, []).append((types, vectors))
        self.reasons |= {place: _UNSEEN for place in unturned if place[0] in self._hides_turns}
        means = {}
        for place in [place for place in by_place if place not in self.reasons]:
            of_texts, sides = by_place.pop(place), []
            for side in (0, 1):
                types = [mine[side] for mine, _ in of_texts]
                positions = np.concatenate([np.arange(len(mine)) for mine in types])
                vectors = np.concatenate([vectors[side] for _, vectors in of_texts])
                sides.append(mean_vectors(vectors, np.concatenate(types), positions, len(self._ids) + 1))
            means[place] = _Means(*sides)
        return means

    def _score(
        self, means: Mapping[Place, _Means], call: AttentionCall, units: Sequence[Unit], turns: TurnWatch
    ) -> list[Any]:
        """What is left of the rows of each text: the group's number, the rows, and (KNOWN, row, head)."""
        place = (call.kind, call.layer)
        if place not in means or place in self.reasons:
            return []
        rotation, reason = turns.rotation(call, max(range(len(units)), key=lambda at: len(units[at].chunk)))
        if not reason and _bias_varies(call, units):
            reason = "it adds a bias to scores that depends on the words"
        if reason:
            self.reasons[place] = reason
            return []
        left_of_groups = []
        for at, unit in enumerate(units):
            number = self._numbers[id(unit.chunk)]
            for of, group in enumerate(self._groups):
                first, last = np.searchsorted(group.active.texts, [number, number + 1])
                heads = [n for n, (layer, _) in enumerate(group.heads) if (group.kind, layer) == place]
                if heads and first < last:
                    types = self._types_of(unit, call.kind)
                    rows = _Rows(group, slice(int(first), int(last)), heads)
                    left = [
                        rows.left(call, at, means[place].vectors(condition, types, rotation), condition)
                        for condition in KNOWN
                    ]
                    left_of_groups.append((of, rows, np.stack(left)))
        return left_of_groups


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows of one text, and heads of one layer: active rows of the group, and numbers of its heads."""

    group: Group
    rows: slice
    heads: Sequence[int]

    def left(self, call: AttentionCall, text: int, queries_and_keys: tuple[Floats, Floats], condition: str) -> Floats:
        """KL(A ‖ p), (row, head), in nats.

        `text` is the number of the text in the batch of `call`. The mean queries and keys of its tokens are
        (head, token, d_head) each; `condition` is one of KNOWN.
        """
        import torch

        from attnscope.core.attention.row_samples import rows_of
        from attnscope.core.attention.seam import AttentionCall, attention_weights

        active = self.group.active
        starts = active.starts[self.rows.start : self.rows.stop + 1]
        entries = slice(int(starts[0]), int(starts[-1]))
        queries, row_of = self.group.queries[self.rows], np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        keys = queries[row_of] + self.group.offsets[entries]
        free = np.zeros((len(queries), queries_and_keys[1].shape[1]), np.bool_)
        free[row_of, keys] = True
        part, _ = rows_of(call, text, torch.from_numpy(queries), free.shape[1])
        both = queries_and_keys[0][:, queries], queries_and_keys[1]
        query, key = (torch.from_numpy(np.ascontiguousarray(vectors))[None] for vectors in both)
        predicted = AttentionCall(
            call.layer, call.kind, query, key, key[..., :0], call.scale, torch.from_numpy(free)[None, None],
            bias=None if condition == "token" or part.bias is None else part.bias.cpu(), softcap=call.softcap,
        )  # fmt: skip
        numbers = [self.group.heads[number][1] for number in self.heads]
        p = attention_weights(predicted)[0, numbers].numpy()[:, row_of, keys]
        mass, entropies = (of[self.rows][:, self.heads] for of in (active.mass, active.entropies))
        on = active.weights[self.heads, entries] * np.log(np.maximum(p, 1e-300))
        sums = np.add.reduceat(on, starts[:-1] - starts[0], axis=1, dtype=np.float64).T
        left: Floats = np.maximum(-sums / np.maximum(mass, 1e-30) - entropies, 0.0)
        return left


def _rows(vectors: Tensor, text: int, n_tokens: int) -> NDArray[np.float32]:
    """A text's queries or keys, (token, head, d_head)."""
    rows: NDArray[np.float32] = vectors[text, :, :n_tokens].transpose(0, 1).float().cpu().numpy().copy()
    return rows


def _is_turned_unseen(
    call: AttentionCall, states: Tensor, types: Sequence[tuple[Numbers, Numbers]]
) -> bool:  # fmt: skip
    """Whether tokens of one state have other queries or keys at another position.

    `states`, (batch, token, d_model), are what the layer reads; `types` are those of each text's tokens.
    """
    for text, (mine, _) in enumerate(types):
        order = np.argsort(mine, kind="stable")
        again = mine[order[1:]] == mine[order[:-1]]
        if not again.any():
            continue
        states_apart, *turned = (
            _distance(_rows(x, text, len(mine)), order[1:][again], order[:-1][again])
            for x in (states[:, None], call.query, call.key)
        )
        if ((states_apart < _SAME) & (np.maximum(*turned) > _APART)).any():
            return True
    return False


def _distance(vectors: NDArray[np.float32], these: Numbers, those: Numbers) -> Floats:
    """How far pairs of tokens' vectors are apart, relative to their lengths."""
    flat = vectors.reshape(len(vectors), -1).astype(np.float64)
    size = np.linalg.norm(flat, axis=1)
    apart: Floats = np.linalg.norm(flat[these] - flat[those], axis=1) / np.maximum(size[these] + size[those], 1e-30)
    return apart


def _bias_varies(call: AttentionCall, units: Sequence[Unit]) -> bool:
    """Whether a bias differs between texts at the same positions, beyond what softmax does not see."""
    if call.bias is None or call.bias.ndim < 4 or len(call.bias) == 1:
        return False
    bias, sizes = call.bias.float(), [len(unit.chunk) for unit in units]
    longest = int(np.argmax(sizes))
    for text, n in enumerate(sizes):
        apart = bias[text, :, :n, :n] - bias[longest, :, :n, :n]
        if float((apart - apart.mean(-1, keepdim=True)).abs().max()) > _MOVES:
            return True
    return False


@dataclass(frozen=True, eq=False)
class FoundSources:
    """What heads' attention follows from, by kind, layer and head.

    Attributes:
        unseen: The share of the scored texts' tokens whose type the fitted texts lack; None = nothing was averaged.
        reason: Why there are no numbers of some layers; "" = there are of all.
    """

    heads: Mapping[tuple[str, int, int], Sources]
    unseen: float | None = None
    reason: str = ""

    def beside(self, head: HeadDescription) -> HeadDescription:
        """A head's description with its sources."""
        if head.active is None:
            return head
        return replace(head, active=replace(head.active, sources=self.heads.get((head.kind, head.layer, head.head))))


def find_sources(model: Model, sample: Sequence[Unit], groups: Sequence[Group]) -> FoundSources:
    """How well each head's attention on keys that are no sinks follows from positions, tokens, and both.

        share = 1 - Σ_t KL(A ‖ p) / Σ_t KL(A ‖ uniform),  p = the attention that mean queries and keys give

    Means are over the fitted texts of the sample; the others are scored.
    """
    from attnscope.core.questions.descriptions import score_of_texts

    if not groups:
        return FoundSources({})
    if model.info.path != "seam" or not list(model.modules()):
        return FoundSources({}, None, "the model does not show how its queries and keys are made")
    study = _Study(model, sample, groups)
    study.run()
    sources: dict[tuple[str, int, int], Sources] = {}
    scored = [number for number, unit in enumerate(sample) if not unit.fits]
    for group, left in zip(groups, study.left, strict=True):
        part = group.part(scored)
        for number, (layer, head) in enumerate(group.heads):
            if (group.kind, layer) in study.reasons:
                continue
            mass = part.mass[:, number]
            nats = group.active.uniform_nats[part.index, number] * mass
            scores = [score_of_texts(part.texts, of[part.index, number] * mass, nats) for of in left]
            shares = (SourceShare(how.explained, how.low, how.high) for how in scores)
            sources[group.kind, layer, head] = Sources(*shares)
    return FoundSources(sources, study.unseen, "; ".join(dict.fromkeys(study.reasons.values())))
