"""Compute *facts*: the functions of tokens by which measures weigh attention.

A measure is a sum over keys k of A_qk f(k) or A_qk f(q, k), and f is a fact. It has one number per key (`key_facts`),
such as 1 for punctuation and 0 for other tokens, or one number per pair of query and key (`pair_facts`), such as their
distance.

`core.catalogue` names the source of each measure (a paper, et al., or ours). This module knows no attention weights, no
tokenizer and no model.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnscope.core.attention.precision import move
from attnscope.core.catalogue import OUTLIER_NORM_RATIO


@dataclass(frozen=True, eq=False)
class TextFacts:
    """Hold what is known of the tokens of a padded batch of texts.

    A field is None if it is not known; then measures that need it are undefined. Fields of booleans are sets of tokens:
    True = the token is in the set.

    A picture is a batch of one text, whose tokens are special tokens, then patches.

    Attributes:
        real: Tokens of the text; False = padding.
        special: Tokens that the tokenizer added, such as [CLS] or <s>.
        ids: Token ids. Two tokens are the same if their ids are equal.
        cls: The opening special token.
        sep: Separating and closing special tokens.
        punctuation: Punctuation.
        log_frequency: Natural logarithm of each token's relative frequency in the corpus, finite.
        embeddings: Each token's static embedding (its row of the input embedding matrix), scaled to length 1.
        rarest: The text's rarest tokens: one, or several that are equally rare.
        context: Tokens that count as keys but not as queries; None = every token counts as a query.
        n_columns: How many patches a row of a picture has; None for texts.
        plugin_sets: Sets of tokens that plugins define, by name.

    Raises:
        ValueError: Shapes do not fit together.
    """

    real: Bool[Tensor, "batch token"]
    special: Bool[Tensor, "batch token"]
    ids: Int[Tensor, "batch token"]
    cls: Bool[Tensor, "batch token"] | None = None
    sep: Bool[Tensor, "batch token"] | None = None
    punctuation: Bool[Tensor, "batch token"] | None = None
    log_frequency: Float[Tensor, "batch token"] | None = None
    embeddings: Float[Tensor, "batch token d"] | None = None
    rarest: Bool[Tensor, "batch token"] | None = None
    context: Bool[Tensor, "batch token"] | None = None
    n_columns: int | None = None
    plugin_sets: Mapping[str, Bool[Tensor, "batch token"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, tensor in self._tensors().items():
            if tensor.shape[:2] != self.real.shape:
                raise ValueError(
                    f"{name} {tuple(tensor.shape)} does not fit texts of {tuple(self.real.shape)}"
                )

    @property
    def is_query(self) -> Tensor:
        """Return the tokens that count as queries, (batch, token), bool."""
        return self.real if self.context is None else self.real & ~self.context

    @property
    def is_first(self) -> Tensor:
        """Return the first real token of each text, (batch, token), bool; a picture has none."""
        if self.n_columns is not None:
            return torch.zeros_like(self.real)
        return self.real & (self.real.cumsum(1) == 1)

    @property
    def is_sink(self) -> Tensor:
        """Return the sinks: special tokens and the first token of each text, (batch, token), bool.

        Most trained heads attend to these when they find nothing else to attend to.
        """
        return (self.special & self.real) | self.is_first

    def to(self, device: torch.device) -> "TextFacts":
        """Return the facts on a device. The layers of a model may be on different devices."""
        return self._map_tensors(lambda tensor: move(tensor, device))

    def select_texts(self, texts: slice) -> "TextFacts":
        """Return the facts of some of the texts."""
        return self._map_tensors(lambda tensor: tensor[texts])

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> "TextFacts":
        """Return the facts with a function applied to each tensor, also to those in `plugin_sets`."""
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self._tensors().items()}
        plugin_sets = {name: change(tensor) for name, tensor in self.plugin_sets.items()}
        return replace(self, plugin_sets=plugin_sets, **changed)

    def _tensors(self) -> dict[str, Tensor]:
        """Return the fields that hold a tensor, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


def find_outlier_tokens(
    norms: Float[Tensor, "batch token"], texts: TextFacts
) -> Bool[Tensor, "batch token"]:
    """Return which tokens have a hidden state of far larger norm than others of their text, (batch, token), bool.

    Heads rest on such tokens too. The norms grow and shrink from layer to layer, so each layer has its own outliers
    (Sun et al. 2024, Massive Activations in Large Language Models, section 2). Special tokens and the first token are
    never outliers, because they are in `is_sink` already.

    Args:
        norms: |h_k|, the norms of the hidden states that the layer reads.
        texts: The texts.

    Returns:
        True = the norm is more than OUTLIER_NORM_RATIO times the median norm of the text's real tokens.
    """
    # nanmedian ignores NaN, so padding does not count.
    real_norms = norms.masked_fill(~texts.real, torch.nan)
    median = real_norms.nanmedian(1, keepdim=True).values
    return texts.real & ~texts.is_sink & (norms > OUTLIER_NORM_RATIO * median)


def key_facts(keys: TextFacts, dtype: torch.dtype) -> dict[str, Float[Tensor, "batch key"]]:
    """Return the facts of single keys, by the names that `catalogue.KeyMeasure.fact` uses.

    Returns:
        Name of the fact -> its value for each key, (batch, key): 1 or 0 for a set of keys, or a number. Padding has 0.
        A fact is missing if the field that it needs is None.
    """
    # Sets of keys by name; None = not known. Users know the sinks as "resting".
    real = keys.real
    sets: dict[str, Tensor | None] = {
        "resting": keys.is_sink,
        "first": keys.is_first,
        "special": keys.special,
        "cls": keys.cls,
        "sep": keys.sep,
        "punctuation": keys.punctuation,
        **keys.plugin_sets,
    }
    facts = {}
    for fact, members in sets.items():
        if members is not None:
            facts[fact] = (members & real).to(dtype)
    if keys.log_frequency is not None:
        facts["rarity"] = torch.where(real, -keys.log_frequency, 0.0).to(dtype)
    return facts


# Facts of pairs. q holds the positions of queries, (query, 1), and k the positions of keys, (key,). ---------------


def _are_same(
    texts: TextFacts,
    q: Tensor,
    k: Tensor,
) -> Tensor:
    """Return in which pairs query and key are the same token, (batch, query, key)."""
    # Ids are never negative. Padding gets -1 as a query and -2 as a key, so that it equals no token, nor itself.
    query_ids = torch.where(texts.real, texts.ids, -1)
    key_ids = torch.where(texts.real, texts.ids, -2)
    return query_ids[:, q] == key_ids[:, None, k]


def _induction(
    texts: TextFacts,
    q: Tensor,
    k: Tensor,
) -> Tensor:
    """Return which keys come right after an earlier occurrence of the query's token, (batch, query, key)."""
    # Key 0 has no key before it; clamping its index avoids -1, and `is_earlier` is False for it.
    before = (k - 1).clamp(min=0)
    is_earlier = (k > 0) & (k < q)
    return _are_same(texts, q, before) & is_earlier & texts.real[:, None, k]


def _cosine(
    texts: TextFacts,
    q: Tensor,
    k: Tensor,
) -> Tensor:
    """Return the cosine between the embeddings of query and key, (batch, query, key)."""
    assert texts.embeddings is not None
    return texts.embeddings[:, q[:, 0]] @ texts.embeddings[:, k].mT


def _grid_steps(
    texts: TextFacts,
    q: Tensor,
    k: Tensor,
) -> Tensor:
    """Return how many rows and how many columns two patches are apart, (2, 1, query, key)."""
    n_columns = texts.n_columns
    assert n_columns is not None
    # Patch i is in row i // n_columns and column i % n_columns. Special tokens come before the patches, so a patch's
    # position is i plus their number. The patches fill whole rows, so the remainder of the number of tokens is that of
    # the number of special tokens. To subtract the remainder is enough: it leaves every row number too large by the
    # same whole number, which cancels in differences.
    n_before = texts.real.shape[1] % n_columns
    query_patch = q - n_before
    key_patch = k - n_before
    rows = query_patch // n_columns - key_patch // n_columns
    columns = query_patch % n_columns - key_patch % n_columns
    return torch.stack([rows, columns]).abs()[:, None]


PAIR_FACTS: dict[str, Callable[[TextFacts, Tensor, Tensor], Tensor]] = {
    "distance": lambda texts, q, k: (k - q).abs()[None],
    "signed_distance": lambda texts, q, k: (k - q)[None],
    "same_token": lambda texts, q, k: _are_same(texts, q, k) & (q != k),
    "induction": _induction,
    "cosine": _cosine,
    "grid_distance": lambda texts, q, k: torch.hypot(*_grid_steps(texts, q, k).float()),
    "grid_neighbour": lambda texts, q, k: _grid_steps(texts, q, k).amax(0) == 1,
}
"""Name of a fact of pairs -> the function (texts, q, k) that returns its values, (batch or 1, query, key)."""


def pair_facts(
    names: Iterable[str],
    texts: TextFacts,
    queries: slice,
    keys: slice,
    dtype: torch.dtype,
) -> dict[str, Float[Tensor, "#batch query key"]]:
    """Return facts of all pairs of a range of queries and a range of keys.

    `names` says which facts, as in PAIR_FACTS. Values are 1 or 0, a cosine, or a distance.
    """
    device = texts.real.device
    q = torch.arange(queries.start, queries.stop, device=device)[:, None]
    k = torch.arange(keys.start, keys.stop, device=device)
    return {name: PAIR_FACTS[name](texts, q, k).to(dtype) for name in names}
