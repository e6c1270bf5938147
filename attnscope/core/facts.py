"""Work out the facts of texts that measures need: of tokens, and of pairs of a query and a key.

The catalogue names the source of each measure (a paper, et al., or ours). This module knows no attention weights, no
tokenizer and no model.
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
    """The facts that measures need of a padded batch of texts. A fact that is None leaves its measures undefined.

    A picture is a batch of one text, whose tokens are special ones, then patches.

    Attributes:
        real: True = a token, False = padding.
        special: Tokens that the tokenizer added, such as [CLS], <s>.
        ids: The tokenizer's numbers, by which tokens are the same.
        cls: The opening special token.
        sep: Separating and closing special tokens.
        punctuation: Punctuation.
        log_frequency: Natural logarithm of each token's relative frequency in the corpus, finite.
        embeddings: Each token's static embedding (the input layer's row), of length 1; the same for the same token.
        rarest: The text's rarest tokens: one, or several that are equally rare.
        context: Tokens that are there for others to attend to: as queries they count nothing.
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
        """Return special tokens and the first, on which most trained heads rest, (batch, token), bool."""
        return (self.special & self.real) | self.first

    def on(self, device: torch.device) -> "TextFacts":
        """Return the same facts on a device, because layers may lie on several."""
        if self.real.device == device:
            return self
        return self._changed(lambda tensor: move(tensor, device))

    def part(self, texts: slice) -> "TextFacts":
        """Return the facts of some of the texts."""
        return self._changed(lambda tensor: tensor[texts])

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "TextFacts":
        """Return the facts with a change of every tensor, `added` ones too."""
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self._tensors().items()}
        added = {name: change(tensor) for name, tensor in self.added.items()}
        return replace(self, added=added, **changed)

    def _tensors(self) -> dict[str, Tensor]:
        """Return the fields that are tensors, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


def outlying(norms: Float[Tensor, "batch token"], texts: TextFacts) -> Bool[Tensor, "batch token"]:
    """Return which tokens are second sinks by their hidden states: far longer than the others of their text, bool.

    Such norms come and go between layers, so each layer has its own (Sun et al. 2024, Massive Activations in Large
    Language Models, section 2). Special tokens and the first are left out: `resting` has them.

    Args:
        norms: |h_k| of the hidden states that the layer reads.
        texts: The texts.

    Returns:
        True = longer than OUTLYING medians of the text's own tokens.
    """
    real_norms = norms.masked_fill(~texts.real, torch.nan)
    median = real_norms.nanmedian(1, keepdim=True).values
    return texts.real & ~texts.resting & (norms > OUTLYING * median)


def key_facts(keys: TextFacts, dtype: torch.dtype) -> dict[str, Float[Tensor, "batch key"]]:
    """Return the value of each key by fact (`catalogue.Keys`). Facts of keys alone are made here and nowhere else.

    Returns:
        Fact -> (batch, key): 1 in a set, or the value of the key. Padding has 0. Unknown facts are missing.
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


# Pairs of queries at the positions q, (query, 1), and keys at the positions k, (key,) ----------------------------


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
    """Return which keys followed the query's own token before, (batch, query, key)."""
    before = (k - 1).clamp(min=0)
    is_earlier = (k > 0) & (k < q)
    return _are_same(texts, q, before) & is_earlier & texts.real[:, None, k]


def _cosine(
    texts: TextFacts,
    q: Tensor,
    k: Tensor,
) -> Tensor:
    """Return the cosine of the embeddings of each pair, (batch, query, key)."""
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
    # Patch i is in row i // n_columns and column i % n_columns. Before the patches stand special tokens; whole rows of
    # these would move all patches alike, so the others are what counts.
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
"""Functions by the name of their fact, which return the value of each pair, (batch or 1, query, key)."""


def pair_facts(
    names: Iterable[str],
    texts: TextFacts,
    queries: slice,
    keys: slice,
    dtype: torch.dtype,
) -> dict[str, Float[Tensor, "#batch query key"]]:
    """Return the value of each pair of a range of queries and one of keys by fact: 1 or 0, a cosine, or a distance."""
    device = texts.real.device
    q = torch.arange(queries.start, queries.stop, device=device)[:, None]
    k = torch.arange(keys.start, keys.stop, device=device)
    return {name: PAIR_FACTS[name](texts, q, k).to(dtype) for name in names}
