"""Heads together: what the mean of the heads that express a relation best, and a regression over all, reach.

There are two more passes. The first reads the half that heads are chosen on: it scores the mean of the best k heads for
several k, and draws weights of all heads on some words, to which a logistic regression is fitted. The second reads the
other half: it scores the best head, the mean of the k heads that did best, and the regression. So nothing is scored on
what it was chosen or fitted on.

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
class Trial:
    """The combinations that are tried on one half of one relation's texts.

    Attributes:
        axis: Which halves count: 0 = by sources, 1 = by texts.
        coefficients: The number of each head, (combination, layer, head).
        draws: Whether weights are drawn to fit to.
    """

    axis: int
    half: int
    coefficients: NDArray[np.float32]
    draws: bool = False


@dataclass(frozen=True, eq=False)
class Samples:
    """Weights of all heads on some words or pairs.

    Attributes:
        most: The most texts that are kept.
        texts: For each text the weights, (sample, layer, head) in float16, and whether they are on what is right.
    """

    most: int
    texts: tuple[tuple[NDArray[np.float16], NDArray[np.bool_]], ...] = ()

    def merge(self, other: Samples) -> Samples:
        """The first texts of both."""
        return replace(self, texts=(*self.texts, *other.texts)[: self.most])


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundCombined(passes.Totals):
    """What combinations reach on some blocks, by relation; the sums are those of `add_up`."""

    sums: Mapping[str, RunningSums] = field(default_factory=dict)
    samples: Mapping[str, Samples] = field(default_factory=dict)


class CombinedMeasurer(LinkMeasurer):
    """Measures what combinations of heads reach on blocks of pieces; relations without a trial are skipped."""

    def __init__(self, model: Model, kind: str, trials: Mapping[str, Trial]) -> None:
        super().__init__(model, kind)
        self.trials = trials

    def begin(self, block: LinkBlock) -> BlockLinks:
        """Sums of nothing yet."""
        self._samples: dict[str, Samples] = {}
        return super().begin(block)

    def _run_batch(self, pieces: Sequence[Piece]) -> tuple[list[tuple[Piece, NDArray[np.float64]]], list[NotFinite]]:
        """How often combinations are right on pieces with a trial: (cell, right or chance, combination, asked)."""
        from attnscope.core.questions.combined import CombinedLinks

        pieces = [replace(piece, cells=tuple(filter(self._has_trial, piece.cells))) for piece in pieces]
        pieces = [piece for piece in pieces if piece.cells]
        if not pieces:
            return [], []
        facts = self._facts(pieces)
        draws = _draw(pieces, facts, self.trials)
        probe = CombinedLinks(facts, self._combinations(pieces, draws), self._buffers)
        layers = self._each_layer(pieces, probe, probe.read_weights)
        sums = probe.result()
        n_heads = max(heads.shape[1] for heads in layers.values())
        weights = np.zeros((len(draws.right), max(layers) + 1, n_heads), np.float16)
        for layer, heads in layers.items():
            weights[:, layer, : heads.shape[1]] = heads.numpy()
        hits, precisions, chance = (part.double().numpy() for part in (sums.hits, sums.precisions, sums.chance))
        right = np.concatenate([hits[..., None], precisions], -1)
        values = np.stack([right, np.broadcast_to(chance[:, None], right.shape)], 1)
        measured, first = [], 0
        for piece in pieces:
            cells = slice(first, first := first + len(piece.cells))
            # The first pass has listed the texts that are not finite.
            if np.isnan(values[cells, 0, :, 0]).any() or broken_rows({self.kind: {0: values[cells, :, :, 0]}}):
                continue
            measured.append((piece, values[cells]))
            for number, cell in enumerate(piece.cells, cells.start):
                rows = draws.cell == number
                if rows.any():
                    most = FIT_TEXTS if cell.pairs is None else FIT_CONTACT_TEXTS
                    earlier = self._samples.get(cell.relation, Samples(most))
                    self._samples[cell.relation] = earlier.merge(Samples(most, ((weights[rows], draws.right[rows]),)))
        return measured, []

    def finish(self, block: LinkBlock, sums: BlockLinks, *, whole: bool) -> FoundCombined:  # type: ignore[override]
        """What all of these amount to."""
        by_relation = {}
        for relation, cells in sums.by_relation().items():
            values = np.stack([of_cell for _, of_cell in cells])
            counts = np.where(np.isnan(values), 0.0, 1.0)
            counts[..., 0] *= np.array([cell.n if cell.pairs is None else 0 for cell, _ in cells])[:, None, None]
            by_relation[relation] = add_up(values[:, 0], values[:, 1], counts[:, 0])
        return FoundCombined(
            n_texts=block.counts.n_texts, n_tokens=sums.n_tokens, sums=by_relation, samples=dict(self._samples),
            halved_to=self._room.tokens,
        )  # fmt: skip

    def _has_trial(self, cell: Cell) -> bool:
        trial = self.trials.get(cell.relation)
        return trial is not None and cell.halves[trial.axis] == trial.half

    def _combinations(self, pieces: Sequence[Piece], draws: _Draws) -> Combinations:
        import torch

        from attnscope.core.questions.combined import Combinations

        names = sorted({cell.relation for piece in pieces for cell in piece.cells})
        relations = [names.index(cell.relation) for piece in pieces for cell in piece.cells]
        coefficients = np.stack([self.trials[name].coefficients for name in names])
        return Combinations(
            torch.from_numpy(coefficients), torch.tensor(relations), torch.from_numpy(draws.links),
            torch.from_numpy(draws.pairs), is_causal=self.kind == "decoder",
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Draws:
    """Draws from a batch as `Combinations` takes them; for each, links first, its cell and whether it is right."""

    links: NDArray[np.int64]
    pairs: NDArray[np.int64]
    cell: NDArray[np.int64]
    right: NDArray[np.bool_]


def _draw(pieces: Sequence[Piece], facts: LinkFacts, trials: Mapping[str, Trial]) -> _Draws:
    """Draws words beside the right ones of each link, and pairs beside the linked ones; the same each time."""
    from attnscope.core.questions.contacts import pairs_of

    links: list[tuple[int, int]] = []
    pairs: list[tuple[int, int, int]] = []
    of_links: list[tuple[int, bool]] = []
    of_pairs: list[tuple[int, bool]] = []
    n_links = n_cells = n_contacts = 0
    for piece in pieces:
        random = np.random.default_rng(zlib.crc32(piece.text.text.encode("utf-8", "surrogatepass")))
        directed: dict[str, int] = {}
        for number, cell in enumerate(piece.cells, n_cells):
            if cell.pairs is None:
                directed[cell.relation] = number
                continue
            if trials[cell.relation].draws:
                linked = cell.pairs
                if len(linked) > MOST_CONTACTS:
                    linked = linked[np.sort(random.choice(len(linked), MOST_CONTACTS, replace=False))]
                every = pairs_of(facts.units[facts.contacts[n_contacts].text])
                n = min(len(every.first), OTHER_PAIRS * len(linked))
                at = random.choice(len(every.first), n, replace=False)
                others = np.stack([part.cpu().numpy()[at] for part in (every.first, every.second)], 1).tolist()
                contacts = set(map(tuple, cell.pairs.tolist()))
                sampled = [(a, b, True) for a, b in linked.tolist()]
                sampled += [(a, b, False) for a, b in others if (a, b) not in contacts]
                pairs += [(n_contacts, a, b) for a, b, _ in sampled]
                of_pairs += [(number, right) for _, _, right in sampled]
            n_contacts += 1
        n_cells += len(piece.cells)
        for link in piece.placed.links:
            if link.link.relation not in directed:
                continue
            if trials[link.link.relation].draws:
                others = np.setdiff1d(np.arange(piece.placed.n_units), (*link.own, *link.targets))
                if len(others) > OTHERS:
                    others = random.choice(others, OTHERS, replace=False)
                words = [*((unit, True) for unit in link.targets), *((int(unit), False) for unit in others)]
                links += [(n_links, unit) for unit, _ in words]
                of_links += [(directed[link.link.relation], right) for _, right in words]
            n_links += 1
    both = [*of_links, *of_pairs]
    return _Draws(
        np.array(links, np.int64).reshape(-1, 2), np.array(pairs, np.int64).reshape(-1, 3),
        np.array([cell for cell, _ in both], np.int64), np.array([right for _, right in both], np.bool_),
    )  # fmt: skip


# From sums to findings --------------------------------------------------------------------------------------------


def to_choose(relations: Iterable[Relation]) -> dict[str, Trial]:
    """The trials on the half that heads are chosen on: means of the best heads, for relations with a verdict."""
    trials = {}
    for relation in relations:
        if relation.why_no_verdict or relation.best is None:
            continue
        order = _rank_heads(relation)
        numbers = [n for n in NUMBERS if n <= len(order)]
        # All relations have as many combinations: the last one is repeated.
        numbers += [numbers[-1]] * (len(NUMBERS) - len(numbers))
        coefficients = np.stack([_mean_of(relation, order[:n]) for n in numbers])
        trials[relation.name] = Trial(_axis(relation), 0, coefficients, find_spec("sklearn") is not None)
    return trials


def to_score(relations: Iterable[Relation], chosen: FoundCombined) -> dict[str, Trial]:
    """The trials on the other half: the best head, the mean of the number of heads that did best, the regression."""
    trials = {}
    for relation in relations:
        if relation.name in chosen.sums:
            order = _rank_heads(relation)
            samples = chosen.samples.get(relation.name)
            regression = None if samples is None else fit(samples)
            if regression is None:
                regression = np.zeros(relation.choice.shape, np.float32)
            mean = _mean_of(relation, order[: _best_number(relation, chosen)])
            coefficients = np.stack([_mean_of(relation, order[:1]), mean, regression])
            trials[relation.name] = Trial(_axis(relation), 1, coefficients)
    return trials


def combine_heads(
    relations: Iterable[Relation], chosen: FoundCombined, trials: Mapping[str, Trial], scored: FoundCombined
) -> tuple[Combined, ...]:
    """What heads reach together, in the order of the relations.

    `chosen` is what the first pass came to, and `scored` what the trials of the second came to.
    """
    from attnscope.core.questions.combined import ASKED
    from attnscope.core.questions.contacts import SEPARATIONS

    records = []
    for relation in relations:
        sums = scored.sums.get(relation.name)
        if sums is None:
            continue
        best_heads = tuple(_rank_heads(relation)[: _best_number(relation, chosen)])
        by_number = _accuracy_by_number(relation, chosen)
        coefficients = trials[relation.name].coefficients
        regression = coefficients[_REGRESSION]
        chance = sums.ratio()[_CHANCE, 0]
        same = (coefficients == coefficients[_BEST]).all((1, 2))
        # By what is asked: the scores of the best head, the mean and the regression.
        scores = [
            (best, mean, of_regression if regression.any() else None)
            for best, mean, of_regression in zip(*find_scores(sums, same, hits=not relation.is_mutual), strict=True)
        ]
        precisions = []
        for column, (separation, cut) in enumerate(ASKED, 1):
            least, below = SEPARATIONS[separation]
            if relation.is_mutual and not math.isnan(chance[column]):
                precisions.append(
                    Precision(least, cut, float(chance[column]), *scores[column], below=below, range=separation)
                )
        first = 1 if relation.is_mutual else 0
        heads = sorted(map(tuple, np.argwhere(regression).tolist()), key=lambda head: -abs(float(regression[head])))
        records.append(
            Combined(
                relation.name,
                best_heads,
                by_number,
                round(float(sums.total("c")[0, 0, first])),
                sums.n_texts,
                float(chance[first]),
                *scores[first],
                coefficients=tuple((layer, head, float(regression[layer, head])) for layer, head in heads),
                n_texts_fitted=len(chosen.samples[relation.name].texts) if regression.any() else 0,
                precisions=tuple(precisions),
            )
        )
    return tuple(records)


def add_up(right: NDArray[np.float64], chance: NDArray[np.float64], counts: NDArray[np.float64]) -> RunningSums:
    """Sums over texts: (what, combination, asked), to which `find_scores` gives intervals.

    "What" is how often a combination is right, how much oftener than the first one, chance, and the count of the texts
    on which it is right as often as the first one. "Asked" is as in `CombinedSums`, links first.

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
        same: Which combinations equal the first one, (combination,): their gain is exactly 0.
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


def fit(samples: Samples) -> NDArray[np.float32] | None:
    """Coefficients of a logistic regression over all heads, (layer, head); None where there is nothing to tell apart.

    Each head is divided by its standard deviation first, so that the L1 penalty is the same for all. Its strength is
    the one that does best, by the likelihood, on the last quarter of the texts after a fit on the others.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss

    def join(texts: Sequence[Any]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        weights = np.concatenate([weights for weights, _ in texts]).astype(np.float64)
        return weights.reshape(len(weights), -1), np.concatenate([right for _, right in texts])

    def regress(weights: NDArray[np.float64], right: NDArray[np.bool_], penalty: float) -> Any:
        model = LogisticRegression(l1_ratio=1, C=penalty, solver="liblinear", random_state=0)
        return model.fit(weights / scale, right)

    if len(samples.texts) < 4:
        return None
    weights, right = join(samples.texts)
    spread = weights.std(0)
    scale = np.where(spread > 0, spread, 1.0)
    n = len(samples.texts) * 3 // 4
    (fitted, fitted_right), (rest, rest_right) = join(samples.texts[:n]), join(samples.texts[n:])
    if len(np.unique(fitted_right)) < 2 or len(np.unique(rest_right)) < 2:
        return None
    losses = [
        log_loss(rest_right, regress(fitted, fitted_right, penalty).predict_proba(rest / scale)[:, 1])
        for penalty in PENALTIES
    ]
    coefficients = regress(weights, right, PENALTIES[int(np.argmin(losses))]).coef_[0] / scale
    return coefficients.reshape(samples.texts[0][0].shape[1:]).astype(np.float32) if coefficients.any() else None


def _axis(relation: Relation) -> int:
    return 0 if relation.halves == "sources" else 1


def _rank_heads(relation: Relation) -> list[tuple[int, int]]:
    """Heads by what they reach on the half for choosing, the best first."""
    flat = np.where(np.isnan(relation.choice), -np.inf, relation.choice).ravel()
    order = [int(at) for at in np.argsort(-flat, kind="stable") if np.isfinite(flat[at])]
    return [divmod(at, relation.choice.shape[1]) for at in order]


def _mean_of(relation: Relation, heads: Sequence[tuple[int, int]]) -> NDArray[np.float32]:
    coefficients = np.zeros(relation.choice.shape, np.float32)
    for head in heads:
        coefficients[head] = 1 / len(heads)
    return coefficients


def _accuracy_by_number(relation: Relation, chosen: FoundCombined) -> tuple[tuple[int, float], ...]:
    """What the mean of the best n heads reaches on the half for choosing, for each n that is tried."""
    accuracy = chosen.sums[relation.name].ratio()[0, :, 1 if relation.is_mutual else 0]
    n_heads = len(_rank_heads(relation))
    return tuple((n, float(value)) for n, value in zip(NUMBERS, accuracy, strict=True) if n <= n_heads)


def _best_number(relation: Relation, chosen: FoundCombined) -> int:
    """How many heads do best on the half for choosing; the fewest where several do."""
    by_number = _accuracy_by_number(relation, chosen)
    most = max(value for _, value in by_number)
    return next(n for n, value in by_number if value >= most - 1e-9)
