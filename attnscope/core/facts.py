"""Work out the facts that measures weigh attention with: a number per token, or per pair of a query and a key.

Such as 1 for punctuation and 0 for other tokens, or the distance of query and key. The catalogue names the source of
each measure (a paper, et al., or ours). This module knows no attention weights, no tokenizer and no model.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnscope.core.attention.precision import move
from attnscope.core.catalogue import OUTLYING


@dataclass(frozen=True, eq=False)
class TextFacts:
    """What is known of the tokens of a padded batch of texts. Measures that need a field that is None are undefined.

    A picture is a batch of one text, whose tokens are special ones, then patches.

    Attributes:
        real: True = a token, False = padding.
        special: Tokens that the tokenizer added, such as [CLS], <s>.
        ids: Token ids: two tokens are the same if their ids are equal.
        cls: The opening special token.
        sep: Separating and closing special tokens.
        punctuation: Punctuation.
        log_frequency: Natural logarithm of each token's relative frequency in the corpus, finite.
        embeddings: Each token's static embedding (the input layer's row), of length 1; the same for the same token.
        rarest: The text's rarest tokens: one, or several that are equally rare.
        context: Tokens that are keys alone: as queries they do not count.
        added: Sets of tokens that plugins define, by name.
        n_columns: How many patches a row of a picture has; the patches are the last tokens. None for texts.

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
    added: Mapping[str, Bool[Tensor, "batch token"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, tensor in self._tensors().items():
            if tensor.shape[:2] != self.real.shape:
                raise ValueError(
                    f"{name} {tuple(tensor.shape)} does not fit texts of {tuple(self.real.shape)}"
                )

    @property
    def asking(self) -> Tensor:
        """Return the tokens that count as queries, (batch, token), bool."""
        return self.real if self.context is None else self.real & ~self.context

    @property
    def first(self) -> Tensor:
        """Return the first real token of each text, (batch, token), bool; a picture has none."""
        if self.n_columns is not None:
            return torch.zeros_like(self.real)
        return self.real & (self.real.cumsum(1) == 1)

    @property
    def resting(self) -> Tensor:
        """Return the sinks, on which most trained heads rest: special tokens and the first, (batch, token), bool."""
        return (self.special & self.real) | self.first

    def on(self, device: torch.device) -> "TextFacts":
        """Return the same facts on a device, because layers may lie on several."""
        return self._changed(lambda tensor: move(tensor, device))

    def part(self, texts: slice) -> "TextFacts":
        """Return the facts of some of the texts."""
        return self._changed(lambda tensor: tensor[texts])

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "TextFacts":
        """Return the facts with a change of each tensor, also of each one in `added`."""
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self._tensors().items()}
        added = {name: change(tensor) for name, tensor in self.added.items()}
        return replace(self, added=added, **changed)

    def _tensors(self) -> dict[str, Tensor]:
        """Return the fields that hold a tensor, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


def outlying(norms: Float[Tensor, "batch token"], texts: TextFacts) -> Bool[Tensor, "batch token"]:
    """Return which tokens have a hidden state far longer than the others of their text, (batch, token), bool.

    Such tokens are sinks too. Their norms come and go between layers, so each layer has its own (Sun et al. 2024,
    Massive Activations in Large Language Models, section 2). Special tokens and the first are never among them, because
    `resting` has these.

    Args:
        norms: |h_k|, the lengths of the hidden states that the layer reads.
        texts: The texts.

    Returns:
        True = longer than OUTLYING medians of the text's own tokens.
    """
    real_norms = norms.masked_fill(~texts.real, torch.nan)
    median = real_norms.nanmedian(1, keepdim=True).values
    return texts.real & ~texts.resting & (norms > OUTLYING * median)


def key_facts(keys: TextFacts, dtype: torch.dtype) -> dict[str, Float[Tensor, "batch key"]]:
    """Return the value of each key for all facts of single keys, by the names that `catalogue.Keys` uses.

    Returns:
        Fact -> (batch, key): 1 in a set of keys and 0 outside, or a number. Padding has 0. Unknown facts are missing.
    """
    # Sets of keys by name; None = not known.
    real = keys.real
    sets: dict[str, Tensor | None] = {
        "resting": keys.resting,
        "first": keys.first,
        "special": keys.special,
        "cls": keys.cls,
        "sep": keys.sep,
        "punctuation": keys.punctuation,
        **keys.added,
    }
    facts = {}
    for fact, members in sets.items():
        if members is not None:
            facts[fact] = (members & real).to(dtype)
    if keys.log_frequency is not None:
        facts["rarity"] = torch.where(real, -keys.log_frequency, 0.0).to(dtype)
    return facts


# Facts of pairs: q are the positions of queries, (query, 1), and k those of keys, (key,) --------------------------


def _are_same(
    texts: TextFacts,
    q: Tensor,
    k: Tensor,
) -> Tensor:
    """Return which pairs are of the same token, (batch, query, key)."""
    # Ids are never negative, so padding equals nothing: -1 as a query, -2 as a key.
    query_ids = torch.where(texts.real, texts.ids, -1)
    key_ids = torch.where(texts.real, texts.ids, -2)
    return query_ids[:, q] == key_ids[:, None, k]


def _induction(
    texts: TextFacts,
    q: Tensor,
    k: Tensor,
) -> Tensor:
    """Return which keys follow an earlier occurrence of the query's token, (batch, query, key)."""
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
    """Return how many rows and columns two patches are apart, (2, 1, query, key)."""
    n_columns = texts.n_columns
    assert n_columns is not None
    # Patch i is in row i // n_columns and column i % n_columns. Special tokens stand before the patches. As many of
    # them as fill whole rows change no difference of rows, so only the remainder is subtracted from positions.
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
"""For each fact of pairs the function that returns it, (batch or 1, query, key)."""


def pair_facts(
    names: Iterable[str],
    texts: TextFacts,
    queries: slice,
    keys: slice,
    dtype: torch.dtype,
) -> dict[str, Float[Tensor, "#batch query key"]]:
    """Return the value of each pair, for a range of queries and one of keys: 1 or 0, a cosine, or a distance.

    `names` are those of the facts, as in PAIR_FACTS.
    """
    device = texts.real.device
    q = torch.arange(queries.start, queries.stop, device=device)[:, None]
    k = torch.arange(keys.start, keys.stop, device=device)
    return {name: PAIR_FACTS[name](texts, q, k).to(dtype) for name in names}
