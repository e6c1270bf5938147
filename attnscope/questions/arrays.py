"""Attention that was computed elsewhere, by JAX, vLLM, llama.cpp or code of one's own, as a record that draws."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnscope.errors import AttnscopeError, first_line
from attnscope.questions.heatmap import AttentionMap, Heatmap
from attnscope.questions.maps import KINDS
from attnscope.results.tokens import Tokens
from attnscope.version import VERSION

_SPACES = str.maketrans({"Ġ": "·", "▁": "·"})


def record_from_arrays(
    weights: ArrayLike,
    tokens: Sequence[str],
    *,
    keys: Sequence[str] | None = None,
    kind: str | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    special: Sequence[int] = (),
    text: str | None = None,
    model: str = "arrays",
) -> Heatmap:
    """Make a record of attention weights that were computed elsewhere; it draws, saves and opens as every other.

        record = attnscope.record_from_arrays(weights, ["[CLS]", "the", "cat"], model="mine", special=[0])
        record.only([(3, 1)]).draw("figures")

    Args:
        weights: After the softmax, (layer, head, query, key), 0 to 1, any floating type; a row sums to at most 1. NaN
            throughout stands for a head that a layer lacks.
        tokens: The label of each query, as the tokenizer writes the piece; a mark of a leading space (`Ġ`, `▁`) is
            shown as `·`.
        keys: The labels of the keys, where they are not the queries: cross-attention.
        kind: "encoder", "decoder" or "cross"; None = "cross" with keys, "decoder" where no query attends to later
            tokens, else "encoder".
        layers: The number of each layer in its model; None = from 0.
        heads: Likewise of the heads.
        special: The places of special tokens, which `hide_special` leaves out.
        text: The text; None = the labels, joined.
        model: What to call the model.

    Raises:
        AttnscopeError: The shapes do not fit, a weight is negative, or a row sums to more than 1.
    """
    array = _weights_of(weights)
    key_tokens = tokens if keys is None else keys
    if array.shape[2:] != (len(tokens), len(key_tokens)):
        raise AttnscopeError(
            f"the weights have shape {array.shape}, not (layer, head, {len(tokens)}, {len(key_tokens)}) as the tokens "
            "say",
            "give one label for each query, and keys where they are others",
        )
    # The kind, if that is not said.
    if kind is None:
        later = np.triu_indices(len(tokens), 1)
        looks_back = (
            keys is None and len(tokens) > 1 and not np.nan_to_num(array)[..., later[0], later[1]].any()
        )
        kind = "cross" if keys is not None else "decoder" if looks_back else "encoder"
    if kind not in KINDS:
        raise AttnscopeError(f"there is no {kind!r} attention", f"choose from {', '.join(KINDS)}")
    layer_numbers, head_numbers = (
        _numbers("layers", layers, array.shape[0]),
        _numbers("heads", heads, array.shape[1]),
    )
    queries = _tokens_of(text, tokens, special)
    attention = AttentionMap(
        kind=kind,
        layers=layer_numbers,
        heads=head_numbers,
        weights=array,
        queries=queries,
        keys=queries if keys is None else _tokens_of(None, keys, ()),
        n_layers=max(layer_numbers) + 1,
        n_heads=max(head_numbers) + 1,
        n_kv_heads=max(head_numbers) + 1,
    )
    # What made it is not known.
    note = (
        "The weights were computed elsewhere: attnscope has checked their form, not how they came about."
    )
    run: dict[str, Any] = {
        "model": model,
        "source": "arrays",
        "engine": "elsewhere",
        "dtype": str(np.asarray(weights).dtype),
    }
    run |= dict.fromkeys(("sha256", "architecture", "device"), "")
    run |= {"checked": None, "seed": None, "versions": {"attnscope": VERSION}, "notes": [note]}
    record = Heatmap(text=queries.text, maps=(attention,), run=run)
    try:
        record.require_whole()
    except ValueError as error:
        raise AttnscopeError(
            f"this is no attention: {error}", "give weights after the softmax"
        ) from None
    return record


def _weights_of(weights: ArrayLike) -> NDArray[np.float32]:
    """Return weights as an array, (layer, head, query, key).

    Raises:
        AttnscopeError: They are none.
    """
    hint = "give floating-point numbers, (layer, head, query, key)"
    try:
        array = np.asarray(weights).astype(np.float32)
    except (TypeError, ValueError) as error:
        raise AttnscopeError(f"the weights are no array of numbers: {first_line(error)}", hint) from None
    if array.ndim != 4 or not array.size:
        raise AttnscopeError(f"the weights have shape {array.shape}", hint)
    # NaN throughout stands for a head that a layer lacks.
    missing = np.isnan(array)
    if (missing.any((2, 3)) & ~missing.all((2, 3))).any():
        hint = "NaN throughout stands for a head that a layer lacks"
        raise AttnscopeError("the weights of a head are NaN in part", hint)
    return array


def _numbers(what: str, named: Sequence[int] | None, n: int) -> tuple[int, ...]:
    """Return the numbers of layers or heads, each once, `n` of them."""
    numbers = tuple(range(n)) if named is None else tuple(map(int, named))
    if len({*numbers}) != n:
        raise AttnscopeError(
            f"{len({*numbers})} {what} are named, and the weights have {n}", f"give {n} numbers"
        )
    return numbers


def _tokens_of(text: str | None, tokens: Sequence[str], special: Sequence[int]) -> Tokens:
    """Return tokens of which only the labels are known, and where they stand in the text, if it holds them.

    Raises:
        AttnscopeError: They are no labels, or there are no such special tokens.
    """
    if isinstance(tokens, str) or not all(isinstance(token, str) for token in tokens):
        raise AttnscopeError("the tokens are no list of texts", "give the label of each token")
    labels = tuple(token.translate(_SPACES) or " " for token in tokens)
    n = len(labels)
    if any(not 0 <= place < n for place in special):
        raise AttnscopeError(
            f"there is no token {max(special, key=abs)} to be special", f"there are {n}, from 0"
        )
    is_special = np.isin(np.arange(n), list(special))
    text = " ".join(label.strip("·") for label in labels) if text is None else text
    # Where each label stands in the text, from left to right.
    offsets = np.full((n, 2), -1, np.int32)
    position = 0
    for token, label in enumerate(labels):
        bare = label.removeprefix("##").strip("·")
        start = -1 if is_special[token] or not bare else text.find(bare, position)
        if start >= 0:
            position = start + len(bare)
            offsets[token] = start, position
    return Tokens(
        text, np.full(n, -1, np.int64), labels, offsets, is_special, None, np.zeros(n, np.int32)
    )
