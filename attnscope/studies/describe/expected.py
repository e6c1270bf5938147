"""What descriptions expect of heads on any text: the weights that their terms predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.corpus import Copies, count_tokens, distinct
from attnscope.models.model import Model
from attnscope.records import Tokens
from attnscope.records.heads.descriptions import Descriptions, HeadDescription
from attnscope.studies.describe.features import Feature, blocks_of, catalogue
from attnscope.studies.describe.own_features import own_features
from attnscope.studies.describe.rows import _facts, _frequent
from attnscope.studies.describe.study import DescribeOptions, describe_texts, draw
from attnscope.studies.inputs.texts import Texts, special_ids
from attnscope.studies.measuring.head_blocks import Frequencies

if TYPE_CHECKING:
    from attnscope.core.attention.probes import Place


@dataclass(eq=False)
class Expectations:
    """Descriptions of a model's heads, and what their features need to be seen in other texts.

    Attributes:
        model: The model.
        descriptions: The descriptions.
        features: Their features, by name.
        frequencies: How frequent tokens are where they were fitted.
        frequent: The most frequent words there.
    """

    model: Model
    descriptions: Descriptions
    features: Mapping[str, Feature]
    frequencies: Frequencies
    frequent: frozenset[int]
    _text: Tokens | None = field(default=None, repr=False)
    _values: dict[str, NDArray[np.float32]] = field(default_factory=dict, repr=False)

    def scores(self, tokens: Tokens, place: Place, head: int) -> NDArray[np.float32]:
        """What a head's terms add to the log odds of each key, (query, key); 0 of a head without terms.

        The weights that they expect are the softmax over the keys that a query may attend to.

        Args:
            tokens: A text. What was made of the last one is kept.
            place: Kind and layer.
            head: The head.
        """
        if self._text is not tokens:
            self._text, self._values = tokens, self._values_of(tokens)
        made = np.zeros((len(tokens), len(tokens)), np.float32)
        for term in self._of(place, head).terms:
            made += np.float32(term.weight) * self._values[term.feature]
        return made

    def _of(self, place: Place, head: int) -> HeadDescription:
        kind, layer = place
        return self.descriptions.of(layer, head, kind)

    def _values_of(self, tokens: Tokens) -> dict[str, NDArray[np.float32]]:
        """The features of all terms in a text, each 0 to 1, (query, key)."""
        wanted = dict.fromkeys(term.feature for head in self.descriptions.heads for term in head.terms)
        features = [self.features[name] for name in wanted]
        facts = _facts(self.model, tokens, None, self.frequencies, self.frequent)
        levels = np.array([feature.levels for feature in features], np.float32)[:, None, None]
        values = blocks_of(features, facts, np.arange(len(tokens))) / (levels - 1)
        return dict(zip(wanted, values, strict=True))


def describe_to_expect(model: Model, texts: Texts, options: DescribeOptions | None = None) -> Expectations:
    """Describes the heads of a model on texts, and keeps what is needed to expect their weights on others."""
    options = options or DescribeOptions()
    counts = count_tokens(distinct(texts, Copies()), model.tokenizer.encode, special_ids(model))
    frequencies = Frequencies.of_counts(counts)
    sample = draw(model, texts, options)
    found = describe_texts(model, texts, frequencies, options)
    labels = dict.fromkeys(
        unit.chunk.tokens.labels[at] for unit in sample for at in np.flatnonzero(unit.chunk.tokens.special)
    )
    features: Sequence[Feature] = [*catalogue(list(labels)), *own_features(options.features)]
    return Expectations(
        model, found, {feature.name: feature for feature in features}, frequencies, _frequent(sample, frequencies)
    )
