"""Heads together: what the mean of the heads that express a relation best, and a regression over all, reach.

Two more passes. On the half that heads are chosen on: the mean of the best k, for several k, and the weights of all
heads on some words, which a logistic regression is fitted to. On the other half: what the best head, the mean of as
many heads as did best, and the regression reach. So nothing is scored on what it was chosen or fitted on.

Source of the regression: Rao et al. 2020, "Transformer protein language models are unsupervised structure learners",
who fit it, with an L1 penalty, to the contacts of 20 proteins.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.exact.running import RunningSums
from attnscope.models.model import Model
from attnscope.records.relations.combined import Combined, Precision, Score
from attnscope.records.relations.record import Relation
from attnscope.studies.relations.evidence import Cell
from attnscope.studies.relations.sums import BlockLinks, LinkBlock, LinkMeasurer, NotFinite, Piece
from attnscope.studies.running import passes
from attnscope.studies.running.overflow import broken_rows

if TYPE_CHECKING:
    from attnscope.core.questions.combined import Combinations
    from attnscope.core.questions.relations import LinkFacts

NUMBERS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48)
"""How many heads are tried together."""

FIT_TEXTS, FIT_CONTACT_TEXTS = 200, 20
"""Texts that a regression is fitted on at the most; those with undirected links hold far more of them."""

OTHERS = 7
"""Words that are drawn beside each right one, or all there are."""

MOST_CONTACTS, OTHER_PAIRS = 300, 5
"""Undirected links that are drawn of a text at the most, and how many other pairs beside each."""

PENALTIES = (0.02, 0.15, 1.0)
"""Inverse strengths of the L1 penalty that are tried, on heads scaled alike; 0.15 is that of Rao et al. 2020."""

_BEST, _MEAN, _REGRESSION = 0, 1, 2
_RIGHT, _GAIN, _CHANCE = 0, 1, 2  # what `add_up` adds


@dataclass(frozen=True, eq=False)
class Tried:
    """What is tried on one relation.

    Attributes:
        axis: Which halves count: 0 = by sources, 1 = by texts.
        half: Which of them the texts are taken from.
        coefficients: The number of each head, (combination, layer, head).
        draws: Whether weights are drawn to fit to.
    """

    axis: int
    half: int
    coefficients: NDArray[np.float32]
    draws: bool = False


@dataclass(frozen=True, eq=False)
class Drawn:
    """Weights of all heads on some words or pairs.

    Attributes:
        most: Texts that are kept.
        texts: For each text the weights, (sample, layer, head) in float16, and whether they are on what is right.
    """

    most: int
    texts: tuple[tuple[NDArray[np.float16], NDArray[np.bool_]], ...] = ()

    def merge(self, other: Drawn) -> Drawn:
        """The first texts of both."""
        return replace(self, texts=(*self.texts, *other.texts)[: self.most])


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundTogether(passes.Found):
    """What combinations reach on some blocks.

    Attributes:
        sums: By relation, as `add_up` makes them.
        drawn: By relation.
    """

    sums: Mapping[str, RunningSums] = field(default_factory=dict)
    drawn: Mapping[str, Drawn] = field(default_factory=dict)


class TogetherMeasurer(LinkMeasurer):
    """Looks at what combinations of heads reach on blocks of pieces.

    Args:
        model: The model.
        kind: The kind of attention.
        tried: What is tried on each relation; others are passed over.
    """

    def __init__(self, model: Model, kind: str, tried: Mapping[str, Tried]) -> None:
        super().__init__(model, kind)
        self.tried = tried

    def begin(self, block: LinkBlock) -> BlockLinks:
        """Sums of nothing yet."""
        self._drawn: dict[str, Drawn] = {}
        return super().begin(block)

    def _run_batch(self, pieces: Sequence[Piece]) -> tuple[list[tuple[Piece, NDArray[np.float64]]], list[NotFinite]]:
        """Of each piece that has what is tried: (cell, what, combination, asked)."""
        from attnscope.core.questions.combined import CombinedLinks

        wanted = [replace(piece, cells=tuple(filter(self._wants, piece.cells))) for piece in pieces]
        wanted = [piece for piece in wanted if piece.cells]
        if not wanted:
            return [], []
        facts = self._facts(wanted)
        drawn = _draw(wanted, facts, self.tried)
        probe = CombinedLinks(facts, self._combinations(wanted, drawn), self._buffers)
        layers = self._each_layer(wanted, probe, probe.read_weights)
        found = probe.result()
        n_heads = max(part.shape[1] for part in layers.values())
        weights = np.zeros((len(drawn.right), max(layers) + 1, n_heads), np.float16)
        for layer, part in layers.items():
            weights[:, layer, : part.shape[1]] = part.numpy()
        hits, precisions, chance = (part.double().numpy() for part in (found.hits, found.precisions, found.chance))
        right = np.concatenate([hits[..., None], precisions], -1)
        values = np.stack([right, np.broadcast_to(chance[:, None], right.shape)], 1)
        made, first = [], 0
        for piece in wanted:
            cells = slice(first, first := first + len(piece.cells))
            # What is not finite on a text was said by the first pass.
            if np.isnan(values[cells, 0, :, 0]).any() or broken_rows({self.kind: {0: values[cells, :, :, 0]}}):
                continue
            made.append((piece, values[cells]))
            for cell in range(cells.start, cells.stop):
                mine = drawn.cell == cell
                if mine.any():
                    relation = piece.cells[cell - cells.start].relation
                    held = self._drawn.setdefault(relation, Drawn(_most_texts(piece.cells[cell - cells.start])))
                    self._drawn[relation] = held.merge(Drawn(held.most, ((weights[mine], drawn.right[mine]),)))
        return made, []

    def finish(self, block: LinkBlock, sums: BlockLinks, *, whole: bool) -> FoundTogether:  # type: ignore[override]
        """What all of these amount to."""
        by_relation: dict[str, list[tuple[Cell, NDArray[np.float64]]]] = {}
        for piece, values in sums.pieces:
            for cell, mine in zip(piece.cells, values, strict=True):
                by_relation.setdefault(cell.relation, []).append((cell, mine))
        made = {}
        for relation, found in by_relation.items():
            values = np.stack([mine for _, mine in found])
            counts = np.where(np.isnan(values), 0.0, 1.0)
            counts[..., 0] *= np.array([cell.n if cell.pairs is None else 0 for cell, _ in found])[:, None, None]
            made[relation] = add_up(values[:, 0], values[:, 1], counts[:, 0])
        drawn = dict(self._drawn)
        return FoundTogether(
            n_texts=block.known.n_texts, n_tokens=sums.n_tokens, sums=made, drawn=drawn, halved_to=self._room.tokens
        )

    def _wants(self, cell: Cell) -> bool:
        tried = self.tried.get(cell.relation)
        return tried is not None and cell.halves[tried.axis] == tried.half

    def _combinations(self, pieces: Sequence[Piece], drawn: _Draws) -> Combinations:
        import torch

        from attnscope.core.questions.combined import Combinations

        names = sorted({cell.relation for piece in pieces for cell in piece.cells})
        relations = [names.index(cell.relation) for piece in pieces for cell in piece.cells]
        numbers = np.stack([self.tried[name].coefficients for name in names])
        return Combinations(
            torch.from_numpy(numbers), torch.tensor(relations), torch.from_numpy(drawn.links),
            torch.from_numpy(drawn.pairs), is_causal=self.kind == "decoder",
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Draws:
    """What is drawn of a batch, links first: as `core.combined.Combinations` has them, with cells and what is right."""

    links: NDArray[np.int64]
    pairs: NDArray[np.int64]
    cell: NDArray[np.int64]
    right: NDArray[np.bool_]


def _most_texts(cell: Cell) -> int:
    return FIT_TEXTS if cell.pairs is None else FIT_CONTACT_TEXTS


def _draw(pieces: Sequence[Piece], facts: LinkFacts, tried: Mapping[str, Tried]) -> _Draws:
    """Draws words beside the right ones of each link, and pairs beside the linked ones; the same each time."""
    from attnscope.core.questions.contacts import pairs_of

    links: list[tuple[int, int]] = []
    pairs: list[tuple[int, int, int]] = []
    of_links: list[tuple[int, bool]] = []
    of_pairs: list[tuple[int, bool]] = []
    number = first = contacts = 0
    for piece in pieces:
        chance = np.random.default_rng(zlib.crc32(piece.text.text.encode("utf-8", "surrogatepass")))
        directed: dict[str, int] = {}
        for place, cell in enumerate(piece.cells, first):
            draws = tried[cell.relation].draws
            if cell.pairs is None:
                directed[cell.relation] = place
                continue
            if draws:
                mine = cell.pairs
                if len(mine) > MOST_CONTACTS:
                    mine = mine[np.sort(chance.choice(len(mine), MOST_CONTACTS, replace=False))]
                every = pairs_of(facts.units[facts.contacts[contacts].text])
                n = min(len(every.first), OTHER_PAIRS * len(mine))
                at = chance.choice(len(every.first), n, replace=False)
                other = np.stack([part.cpu().numpy()[at] for part in (every.first, every.second)], 1)
                linked = {(int(a), int(b)) for a, b in cell.pairs}
                drawn = [(int(a), int(b), True) for a, b in mine]
                drawn += [(int(a), int(b), False) for a, b in other if (int(a), int(b)) not in linked]
                pairs += [(contacts, a, b) for a, b, _ in drawn]
                of_pairs += [(place, right) for _, _, right in drawn]
            contacts += 1
        first += len(piece.cells)
        for link in piece.placed.links:
            if link.link.relation not in directed:
                continue
            if tried[link.link.relation].draws:
                others = np.setdiff1d(np.arange(piece.placed.n_units), (*link.own, *link.targets))
                if len(others) > OTHERS:
                    others = chance.choice(others, OTHERS, replace=False)
                words = [*((unit, True) for unit in link.targets), *((int(unit), False) for unit in others)]
                links += [(number, unit) for unit, _ in words]
                of_links += [(directed[link.link.relation], right) for _, right in words]
            number += 1
    both = [*of_links, *of_pairs]
    return _Draws(
        np.array(links, np.int64).reshape(-1, 2), np.array(pairs, np.int64).reshape(-1, 3),
        np.array([cell for cell, _ in both], np.int64), np.array([right for _, right in both], np.bool_),
    )  # fmt: skip


# From sums to findings --------------------------------------------------------------------------------------------


def to_choose(relations: Iterable[Relation]) -> dict[str, Tried]:
    """What is tried on the half that heads are chosen on: means of the best heads. Relations with a verdict alone."""
    made = {}
    for one in relations:
        if one.why_no_verdict or one.best is None:
            continue
        order = _ranked(one)
        numbers = [n for n in NUMBERS if n <= len(order)]
        coefficients = np.stack([_mean_of(one, order[: min(n, len(order))]) for n in _padded(numbers)])
        made[one.name] = Tried(_axis(one), 0, coefficients, find_spec("sklearn") is not None)
    return made


def to_score(relations: Iterable[Relation], found: FoundTogether) -> dict[str, Tried]:
    """What is scored on the other half: the best head, the mean of as many as did best, the regression."""
    made = {}
    for one in relations:
        if one.name in found.sums:
            order = _ranked(one)
            held = found.drawn.get(one.name)
            fitted = None if held is None else fit(held)
            none = np.zeros(one.choice.shape, np.float32)
            mean = _mean_of(one, order[: _number(one, found)])
            coefficients = [_mean_of(one, order[:1]), mean, none if fitted is None else fitted]
            made[one.name] = Tried(_axis(one), 1, np.stack(coefficients))
    return made


def together(
    relations: Iterable[Relation], chosen: FoundTogether, tried: Mapping[str, Tried], found: FoundTogether
) -> tuple[Combined, ...]:
    """What heads reach together, in the order of the relations."""
    from attnscope.core.questions.combined import ASKED
    from attnscope.core.questions.contacts import SEPARATIONS

    made = []
    for one in relations:
        sums = found.sums.get(one.name)
        if sums is None:
            continue
        first = 1 if one.is_mutual else 0
        coefficients = tried[one.name].coefficients
        numbers = coefficients[_REGRESSION]
        chance = sums.ratio()[_CHANCE, 0]
        scores = find_scores(sums, (coefficients == coefficients[_BEST]).all((1, 2)), hits=not one.is_mutual)
        fitted = numbers.any()

        def of(asked: int, scores: Any = scores, fitted: Any = fitted) -> tuple[Score, Score, Score | None]:
            return scores[_BEST][asked], scores[_MEAN][asked], scores[_REGRESSION][asked] if fitted else None

        precisions = []
        for place, (separation, cut) in enumerate(ASKED, 1):
            least, below = SEPARATIONS[separation]
            if one.is_mutual and not math.isnan(chance[place]):
                best, mean, regression = of(place)
                held = (float(chance[place]), best, mean, regression)
                precisions.append(Precision(least, cut, *held, below=below, range=separation))
        best, mean, regression = of(first)
        places = sorted(map(tuple, np.argwhere(numbers).tolist()), key=lambda place: -abs(float(numbers[place])))
        made.append(
            Combined(
                relation=one.name,
                heads=tuple(_ranked(one)[: _number(one, chosen)]),
                tried=_tried(one, chosen),
                n_scored=round(float(sums.total("c")[0, 0, first])),
                n_texts_scored=sums.n_texts,
                chance=float(chance[first]),
                best_head=best,
                mean=mean,
                regression=regression,
                coefficients=tuple((layer, head, float(numbers[layer, head])) for layer, head in places),
                n_texts_fitted=len(chosen.drawn[one.name].texts) if fitted else 0,
                precisions=tuple(precisions),
            )
        )
    return tuple(made)


def add_up(right: NDArray[np.float64], chance: NDArray[np.float64], counts: NDArray[np.float64]) -> RunningSums:
    """Sums over texts: (what, combination, asked), to which `find_scores` gives intervals.

    What is how often a combination is right, how much oftener than the first one, chance, and the count of the texts
    on which it is as often right as the first one is. Asked is as `core.combined.CombinedSums` has it, links first.

    Args:
        right: How often each combination is right on each text, (text, combination, asked); NaN = not asked.
        chance: How often picking at random is, of the same shape.
        counts: Of how many links, of the same shape; 0 where nothing is asked.
    """
    gain = right - right[:, :1]
    values = np.stack([right, gain, chance, (np.abs(gain) < 1e-6) * counts], 1)
    counts = np.broadcast_to(counts[:, None], values.shape)
    sums = RunningSums(values.shape[1:])
    sums.add(np.where(counts > 0, values, 0.0), counts)
    return sums


def find_scores(sums: RunningSums, same: NDArray[np.bool_], *, hits: bool) -> list[list[Score]]:
    """What is in the sums of a relation, by combination and by what is asked.

    The interval of a gain is Student's over texts, which says nothing of differences that no text has shown: where
    all agree its width is 0. So it holds at least what may be unseen (`RunningSums.share_interval`): among n texts of
    which a share e agree, e · (1 - 0.025^(1/n)) may really be texts where one of both is right and the other wrong.

    Args:
        sums: As `add_up` makes them.
        same: Which combinations are the first one by another name, (combination,): their gain is 0, and surely.
        hits: Whether links are right or wrong; else they are the precisions of texts.
    """
    low, high = (end[_RIGHT] for end in sums.share_interval(hits=hits))
    value, gain, _, agreed = sums.ratio()
    gain_low, gain_high = (end[_GAIN] for end in sums.interval())
    unseen = np.where(same[:, None], 0.0, agreed * sums.most_unseen()[_GAIN])
    gain_low, gain_high = np.minimum(gain_low, gain - unseen), np.maximum(gain_high, gain + unseen)
    gain_low, gain_high = np.maximum(gain_low, -1.0), np.minimum(gain_high, 1.0)
    parts = np.stack([value, low, high, gain, gain_low, gain_high], -1)
    return [[Score(*map(float, numbers)) for numbers in row] for row in parts]


def fit(drawn: Drawn) -> NDArray[np.float32] | None:
    """Coefficients of a logistic regression over all heads, (layer, head); None where there is nothing to tell apart.

    Each head is divided by its standard deviation first, so that the L1 penalty is the same for all. Its strength is
    the one that does best, by the likelihood, on the last quarter of the texts after a fit on the others.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss

    def samples(texts: Sequence[Any]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        weights = np.concatenate([weights for weights, _ in texts]).astype(np.float64)
        return weights.reshape(len(weights), -1), np.concatenate([right for _, right in texts])

    def fitted(given: NDArray[np.float64], right: NDArray[np.bool_], penalty: float) -> Any:
        model = LogisticRegression(l1_ratio=1, C=penalty, solver="liblinear", random_state=0)
        return model.fit(given / scale, right)

    if len(drawn.texts) < 4:
        return None
    weights, right = samples(drawn.texts)
    shape = drawn.texts[0][0].shape[1:]
    spread = weights.std(0)
    scale = np.where(spread > 0, spread, 1.0)
    n = len(drawn.texts) * 3 // 4
    some, mine = samples(drawn.texts[:n])
    rest, theirs = samples(drawn.texts[n:])
    if len(np.unique(mine)) < 2 or len(np.unique(theirs)) < 2:
        return None
    losses = [log_loss(theirs, fitted(some, mine, one).predict_proba(rest / scale)[:, 1]) for one in PENALTIES]
    found = fitted(weights, right, PENALTIES[int(np.argmin(losses))]).coef_[0] / scale
    return found.reshape(shape).astype(np.float32) if found.any() else None


def _axis(one: Relation) -> int:
    return 0 if one.halves == "sources" else 1


def _ranked(one: Relation) -> list[tuple[int, int]]:
    """Heads by what they reach on the half for choosing, the best first."""
    flat = np.where(np.isnan(one.choice), -np.inf, one.choice).ravel()
    order = [int(at) for at in np.argsort(-flat, kind="stable") if np.isfinite(flat[at])]
    return [(at // one.choice.shape[1], at % one.choice.shape[1]) for at in order]


def _mean_of(one: Relation, heads: Sequence[tuple[int, int]]) -> NDArray[np.float32]:
    coefficients = np.zeros(one.choice.shape, np.float32)
    for place in heads:
        coefficients[place] = 1 / len(heads)
    return coefficients


def _padded(numbers: Sequence[int]) -> list[int]:
    """As many as are tried anywhere: a model's relations are laid on one another."""
    return [*numbers, *[numbers[-1]] * (len(NUMBERS) - len(numbers))]


def _tried(one: Relation, found: FoundTogether) -> tuple[tuple[int, float], ...]:
    reached = found.sums[one.name].ratio()[0, :, 1 if one.is_mutual else 0]
    n_heads = len(_ranked(one))
    return tuple((n, float(value)) for n, value in zip(NUMBERS, reached, strict=True) if n <= n_heads)


def _number(one: Relation, found: FoundTogether) -> int:
    """How many heads do best on the half for choosing; the fewest where several do."""
    tried = _tried(one, found)
    most = max(value for _, value in tried)
    return next(n for n, value in tried if value >= most - 1e-9)
