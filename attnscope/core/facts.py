"""Facts of texts that measures need; the catalogue has the source of each measure (et al. or ours)."""

import functools
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnscope.core.attention.precision import in_float64, move
from attnscope.core.catalogue import OUTLYING


@dataclass(frozen=True, eq=False)
class TextFacts:
    """What measures must know of a padded batch of texts. A fact that is None leaves its measures undefined (count 0).

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

    Raises:
        ValueError: Shapes do not fit together, or a log frequency is not finite.
        TypeError: A mask is not boolean.
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

    def __post_init__(self) -> None:
        shape = self.real.shape
        if len(shape) != 2:
            raise ValueError(f"facts of texts are (batch, token); got {tuple(shape)}")
        for name, tensor in self._tensors().items():
            if tensor.shape[:2] != shape or tensor.ndim != 2 + (name == "embeddings"):
                raise ValueError(f"{name} {tuple(tensor.shape)} does not fit texts of {tuple(shape)}")
            if (
                name in ("real", "special", "cls", "sep", "punctuation", "rarest", "context")
                and tensor.dtype != torch.bool
            ):
                raise TypeError(f"{name} must be boolean; got {tensor.dtype}")
        if self.log_frequency is not None and not bool(self.log_frequency[self.real].isfinite().all()):
            raise ValueError("log_frequency must be finite: a token that was never counted has no frequency of 0")

    @functools.cached_property
    def asking(self) -> Tensor:
        """(batch, token), bool: the tokens that count as queries."""
        return self.real if self.context is None else self.real & ~self.context

    @functools.cached_property
    def first(self) -> Tensor:
        """(batch, token), bool: the first real token of each text."""
        return self.real & (self.real.cumsum(1) == 1)

    @functools.cached_property
    def resting(self) -> Tensor:
        """(batch, token), bool: special tokens and the first, on which most trained heads rest."""
        return (self.special & self.real) | self.first

    @functools.cached_property
    def final_special(self) -> Tensor:
        """(batch,), int64: where the text ends, if it ends with a special token ([SEP], </s>); else -1."""
        positions = torch.arange(self.real.shape[1], device=self.real.device)
        last = torch.where(self.real, positions, -1).amax(1) if self.real.shape[1] else self.real.sum(1) - 1
        ends = (self.special & (positions == last[:, None])).any(1)
        return last.masked_fill(~ends, -1)

    def on(self, device: torch.device) -> "TextFacts":
        """Return the same facts on a device, because layers may lie on several."""
        if self.real.device == device:
            return self
        return replace(self, **{name: move(tensor, device) for name, tensor in self._tensors().items()})

    def part(self, texts: slice) -> "TextFacts":
        """Return the facts of some of the texts."""
        return replace(self, **{name: tensor[texts] for name, tensor in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in values.items() if tensor is not None}


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
    median = norms.masked_fill(~texts.real, torch.nan).nanmedian(1, keepdim=True).values
    return texts.real & ~texts.resting & (norms > OUTLYING * median)


def key_facts(keys: TextFacts, dtype: torch.dtype) -> dict[str, Float[Tensor, "batch key"]]:
    """Return what each key is worth, by fact (`catalogue.Keys`): the one place where a fact of keys alone is made.

    Returns:
        Fact -> (batch, key): 1 in a set, or what the key is worth. Padding is worth 0. Unknown facts are missing.
    """
    real = keys.real
    sets: dict[str, Tensor | None] = {"resting": keys.resting, "first": keys.first, "special": keys.special}
    sets |= {"cls": keys.cls, "sep": keys.sep, "punctuation": keys.punctuation}
    facts = {fact: (members & real).to(dtype) for fact, members in sets.items() if members is not None}
    if keys.log_frequency is not None:
        facts["rarity"] = torch.where(real, -keys.log_frequency, 0.0).to(dtype)
    return facts


def pair_facts(
    texts: TextFacts, queries: slice, keys: slice, dtype: torch.dtype
) -> dict[str, Float[Tensor, "#batch query key"]]:
    """Return functions of query and key in one text, by fact (`catalogue.Pairs`): the one place where one is made.

    Args:
        texts: The texts.
        queries: A range of queries.
        keys: A range of keys.
        dtype: Of the result.

    Returns:
        Fact -> (batch or 1, query, key); 0 for padding in "same_token" and "induction". Unknown facts are missing.
    """
    device = texts.real.device
    q = torch.arange(queries.start, queries.stop, device=device)[:, None]
    k = torch.arange(keys.start, keys.stop, device=device)
    ahead = (k - q).to(dtype)[None]

    # Tokens are never negative: padding is like nothing.
    of_query = torch.where(texts.real, texts.ids, -1)[:, queries, None]
    of_key = torch.where(texts.real, texts.ids, -2)
    before = torch.cat([torch.full_like(of_key[:, :1], -2), of_key[:, :-1]], 1)
    is_same = (of_query == of_key[:, None, keys]) & (q != k)
    has_followed = (of_query == before[:, None, keys]) & (k < q) & texts.real[:, None, keys]
    facts = {
        "distance": ahead.abs(),
        "signed_distance": ahead,
        "same_token": is_same.to(dtype),
        "induction": has_followed.to(dtype),
    }
    if texts.embeddings is not None:
        directions = texts.embeddings.to(dtype)
        facts["cosine"] = directions[:, queries] @ directions[:, keys].mT
    return facts


def output_factor(weight: Float[Tensor, "d_model joined"], n_heads: int) -> Float[Tensor, "n_heads d d_value"]:
    """Make the output projection small, so that norms behind it cost little: |W_O v| = |R v|, W_O = Q R.

    Args:
        weight: The output projection as torch.nn.Linear stores it, (d_model, n_heads * d_value).
        n_heads: How many heads' outputs it joins.

    Returns:
        R of each head, (n_heads, at most d_value, d_value), float64 for a float64 weight, else float32.

    Raises:
        ValueError: The width is not a multiple of the heads.
    """
    if weight.ndim != 2 or weight.shape[1] % n_heads:
        raise ValueError(f"an output projection of {n_heads} heads is (d_model, heads * d_value); got {weight.shape}")
    by_head = in_float64(weight.detach()).reshape(weight.shape[0], n_heads, -1).transpose(0, 1)
    small: Tensor = torch.linalg.qr(by_head, mode="r").R
    return small.to(weight.device, torch.promote_types(weight.dtype, torch.float32))


def value_norms(
    values: Float[Tensor, "batch n_kv_heads key d_value"],
    n_heads: int,
    factor: Float[Tensor, "n_heads d d_value"] | None = None,
) -> Float[Tensor, "batch n_heads key"]:
    """Return |v_k|, or |W_O v_k| of each head by its `output_factor` (Kobayashi et al. 2020, section 2).

    At least 0, in the unit of the values; float32 or better.
    """
    group = n_heads // values.shape[1]
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    if factor is None:
        norms: Tensor = torch.linalg.vector_norm(wide, dim=-1)
        return norms if group == 1 else norms.repeat_interleave(group, 1)
    # Heads first: one product a head serves all texts.
    by_head = wide.transpose(0, 1)
    by_head = (by_head if group == 1 else by_head.repeat_interleave(group, 0)).flatten(1, 2)
    norms = torch.linalg.vector_norm(torch.bmm(by_head, factor.to(wide.dtype).mT), dim=-1)
    return norms.view(n_heads, values.shape[0], values.shape[2]).transpose(0, 1)
