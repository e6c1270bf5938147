"""What descriptions expect of heads on other texts: weights, from where a head rests and what it attends to.

Benchmarks hold these beside the weights of heads whose rule is known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from attnscope.corpus import CorpusText
from attnscope.corpus.batching import tokens_of
from attnscope.models.model import Model
from attnscope.results.tokens import Tokens
from attnscope.studies.describe.features import RESTING, compute_levels
from attnscope.studies.describe.rows import HeadGroup, compute_text_facts, find_frequent_words, join_rows
from attnscope.studies.describe.study import FittedGroup, compute_active_losses, fit_group
from attnscope.studies.heads.options import DescribeOptions
from attnscope.studies.inputs.texts import Texts, special_ids
from benchmarks.sampling import read_sample

if TYPE_CHECKING:
    from attnscope.core.attention.probes import LayerKey
    from attnscope.core.descriptions import Description
    from attnscope.core.sampled_rows import FittedFeature

Singles = NDArray[np.float32]

MAX_KEPT = 2**21
"""Pairs of a query and a key whose features are kept, a byte for each of about 120."""


@dataclass(frozen=True, eq=False)
class _Text:
    """A text as the terms of a group see it.

    Attributes:
        features: (feature, query, key), uint8: levels.
        types: (token,): the type of each.
        resting: (key,): on which keys heads rest.
        special: (query,): special tokens.
    """

    features: NDArray[np.uint8]
    types: NDArray[np.int32]
    resting: NDArray[np.bool_]
    special: NDArray[np.bool_]


@dataclass(eq=False)
class Expectations:
    """Descriptions of a model's heads, for texts whose types of tokens are known.

    `counts` and `frequent` are those of the texts on which the descriptions were fitted.
    """

    model: Model
    fits: tuple[FittedGroup, ...]
    counts: NDArray[np.int64]
    frequent: NDArray[np.int64]
    _follow: dict[tuple[int, int], bool] = field(default_factory=dict, repr=False)
    _texts: OrderedDict[int, tuple[Tokens, dict[int, _Text]]] = field(
        default_factory=OrderedDict, repr=False
    )

    def scores(self, tokens: Tokens, place: LayerKey, head: int, allowed: NDArray[np.bool_]) -> Singles:
        """Return the logarithm of the weights that a head's description expects, up to a constant of each query.

        Resting keys have the score of the head's rest. All others together have that of one key times their number,
        divided among them by the terms of what the head attends to. What was made of the last texts is kept, as many as
        a batch has. `allowed` says which keys each query may attend to.

        Returns:
            (query, key), finite.
        """
        which, number = self._find(place, head)
        fit = self.fits[which]
        text = self._text(tokens, which)
        active = _sum_terms(self._attended(fit, number, text), len(tokens))
        if not self._follows(which, number):
            active[text.special] = 0.0
        free = allowed & ~text.resting
        n_free = np.maximum(free.sum(1), 1)
        total = logsumexp(np.where(free, active, -np.inf), axis=1)
        total = np.where(np.isfinite(total), total, 0.0)
        matches = total - np.log(n_free)
        rests = _sum_terms(
            _values_of_terms(
                fit.sink_descriptions[number], (), fit.group, text, fit.group.sink_features
            ),
            len(tokens),
        )
        scores: Singles = np.where(text.resting, rests, active - matches[:, None]).astype(np.float32)
        return scores

    def terms(
        self, tokens: Tokens, place: LayerKey, head: int
    ) -> list[tuple[float, NDArray[np.float64]]]:
        """Return what a head attends to when it attends: the weight of each term, and its values, (query, key).

        Values are 0 to 1; 0 on the keys on which heads rest.
        """
        which, number = self._find(place, head)
        fit, text = self.fits[which], self._text(tokens, which)
        return [(weight, values * ~text.resting) for weight, values in self._attended(fit, number, text)]

    def features(self, tokens: Tokens) -> dict[str, NDArray[np.float64]]:
        """Return the features that all heads share, by name, 0 to 1, (query, key)."""
        text, group = self._text(tokens, 0), self.fits[0].group
        return {
            feature.name: block / (feature.levels - 1)
            for feature, block in zip(group.features, text.features, strict=True)
        }

    def _find(self, place: LayerKey, head: int) -> tuple[int, int]:
        for which, fit in enumerate(self.fits):
            if fit.group.kind == place[0] and (place[1], head) in fit.group.heads:
                return which, fit.group.heads.index((place[1], head))
        raise KeyError(f"there is no description of L{place[1]}H{head}")

    def _text(self, tokens: Tokens, which: int) -> _Text:
        # The tokens are kept too: another text could get the number of one that is gone.
        by_group = self._texts.setdefault(id(tokens), (tokens, {}))[1]
        self._texts.move_to_end(id(tokens))
        while len(self._texts) > 1 and sum(len(of) ** 2 for of, _ in self._texts.values()) > MAX_KEPT:
            self._texts.popitem(last=False)
        if which not in by_group:
            group = self.fits[which].group
            facts = compute_text_facts(self.model, tokens, self.counts, self.frequent)
            blocks = compute_levels(group.features, facts, np.arange(len(tokens)))
            resting = blocks[[feature.name for feature in group.features].index(RESTING), 0] > 0
            by_group[which] = _Text(
                blocks, group.types.find_indices(tokens.ids), resting, tokens.special
            )
        return by_group[which]

    @staticmethod
    def _attended(
        fit: FittedGroup, number: int, text: _Text
    ) -> Iterator[tuple[float, NDArray[np.float64]]]:
        """Yield the terms of what a head attends to when it attends."""
        group = fit.group
        return _values_of_terms(
            fit.active_descriptions[number],
            group.active_rows.columns[number],
            group,
            text,
            range(len(group.features)),
        )

    def _follows(self, which: int, number: int) -> bool:
        if (which, number) not in self._follow:
            self._follow[which, number] = compute_active_losses(self.fits[which], number)[1]
        return self._follow[which, number]


def _sum_terms(terms: Iterable[tuple[float, NDArray[np.float64]]], n: int) -> NDArray[np.float64]:
    """Σ w f of terms in a text of n tokens, (query, key)."""
    sums = np.zeros((n, n))
    for weight, values in terms:
        sums += weight * values
    return sums


def _values_of_terms(
    description: Description,
    columns: Sequence[FittedFeature],
    group: HeadGroup,
    text: _Text,
    shared: Sequence[int],
) -> Iterator[tuple[float, NDArray[np.float64]]]:
    """Yield the weight of each of a head's terms, and its values, 0 to 1, (query, key).

    `shared` are the numbers of the features that all heads share.
    """
    n = len(text.types)

    def values_of(term: int) -> NDArray[np.float64]:
        if term < len(shared):
            return np.asarray(text.features[shared[term]] / (group.features[shared[term]].levels - 1))
        own = columns[term - len(shared)]
        keys = own.key_values[own.key_levels[text.types]][None]
        if own.query_levels is None:
            return np.broadcast_to(keys, (n, n))
        values: NDArray[np.float64] = own.query_values[own.query_levels[text.types]][:, None] * keys
        return values

    for term, weight in zip(description.terms, description.weights, strict=True):
        yield float(weight), values_of(term)


def describe_to_expect(
    model: Model, texts: Texts, others: Sequence[CorpusText], options: DescribeOptions | None = None
) -> Expectations:
    """Fit descriptions on texts, for weights that are expected on others.

    The types of tokens in the other texts are known then.
    """
    options = options or DescribeOptions()
    extra_labels: dict[int, str] = {}
    for text in others:
        tokens = tokens_of(text, model.tokenizer.encode, special_ids(model))
        extra_labels |= dict(zip(tokens.ids.tolist(), tokens.labels, strict=True))
    if (mask := model.tokenizer.mask_id) is not None:
        extra_labels[mask] = "[MASK]"
    sample, counts = read_sample(model, texts, options)
    groups = join_rows(model, sample, counts, extra_labels=extra_labels)
    fits = tuple(fit_group(group, sample, options) for group in groups)
    return Expectations(model, fits, counts, find_frequent_words(sample, counts))
