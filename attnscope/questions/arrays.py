"""Make a record of attention that other software computed, such as JAX, vLLM, llama.cpp or your own code.

`attnscope.record_from_arrays` is the function of this module.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnscope.errors import AttnscopeError, first_line, require_choice
from attnscope.questions.heatmap import AttentionMap, Heatmap
from attnscope.questions.maps import KINDS
from attnscope.results.tokens import Tokens
from attnscope.version import VERSION

_SPACE_MARKS = str.maketrans({"Ġ": "·", "▁": "·"})
"""Marks of a leading space in vocabularies, and the dot that is shown instead."""


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
    """Make a record of attention weights that were computed elsewhere; it draws, saves and opens like any record.

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
        heads: The number of each head in its layer; None = from 0.
        special: The places of special tokens, which `hide_special` leaves out.
        text: The text; None = the labels, joined.
        model: What to call the model.

    Raises:
        AttnscopeError: The shapes do not fit, a weight is negative, or a row sums to more than 1.
    """
    # (layer, head, query, key)
    array = _to_float_weights(weights)
    key_labels = tokens if keys is None else keys
    if array.shape[2:] != (len(tokens), len(key_labels)):
        raise AttnscopeError(
            f"the weights have shape {array.shape}, not (layer, head, {len(tokens)}, {len(key_labels)}) as the tokens "
            "say",
            "give one label for each query, and keys where they are others",
        )
    if kind is None:
        kind = _guess_kind(array) if keys is None else "cross"
    require_choice("kind of attention", kind, KINDS)
    layer_numbers = _number_axis("layers", layers, array.shape[0])
    head_numbers = _number_axis("heads", heads, array.shape[1])
    query_tokens = _label_tokens(text, tokens, special)
    # In self-attention, keys are the same tokens as queries.
    key_tokens = query_tokens if keys is None else _label_tokens(None, keys, ())
    n_heads = max(head_numbers) + 1
    attention = AttentionMap(
        kind=kind,
        layers=layer_numbers,
        heads=head_numbers,
        weights=array,
        queries=query_tokens,
        keys=key_tokens,
        n_layers=max(layer_numbers) + 1,
        n_heads=n_heads,
        n_kv_heads=n_heads,
    )
    note = (
        "The weights were computed elsewhere: attnscope has checked their form, not how they came about."
    )
    # A record has all these fields; those that nobody knows are empty.
    run = {
        "model": model,
        "source": "arrays",
        "engine": "elsewhere",
        "dtype": str(np.asarray(weights).dtype),
        "sha256": "",
        "architecture": "",
        "device": "",
        "checked": None,
        "seed": None,
        "versions": {"attnscope": VERSION},
        "notes": [note],
    }
    record = Heatmap(text=query_tokens.text, maps=(attention,), run=run)
    try:
        record.require_whole()
    except ValueError as error:
        raise AttnscopeError(
            f"this is no attention: {error}", "give weights after the softmax"
        ) from None
    return record


def _to_float_weights(weights: ArrayLike) -> NDArray[np.float32]:
    """Return weights as a float32 array, (layer, head, query, key).

    Raises:
        AttnscopeError: They are no numbers, have other axes, or a head is NaN in part.
    """
    hint = "give floating-point numbers, (layer, head, query, key)"
    try:
        array = np.asarray(weights).astype(np.float32)
    except (TypeError, ValueError) as error:
        raise AttnscopeError(f"the weights are no array of numbers: {first_line(error)}", hint) from None
    if array.ndim != 4 or not array.size:
        raise AttnscopeError(f"the weights have shape {array.shape}", hint)
    is_nan = np.isnan(array)
    # By (layer, head): some weights are NaN, but not all.
    if (is_nan.any((2, 3)) & ~is_nan.all((2, 3))).any():
        raise AttnscopeError(
            "the weights of a head are NaN in part",
            "NaN throughout stands for a head that a layer lacks",
        )
    return array


def _guess_kind(weights: NDArray[np.float32]) -> str:
    """Return "decoder" if no query attends to later tokens, else "encoder".

    Args:
        weights: Self-attention, (layer, head, query, key).
    """
    n_tokens = weights.shape[-1]
    has_later = np.nan_to_num(np.triu(weights, 1)).any()
    return "decoder" if n_tokens > 1 and not has_later else "encoder"


def _number_axis(axis: str, numbers: Sequence[int] | None, size: int) -> tuple[int, ...]:
    """Return the numbers of the "layers" or "heads" along an axis of the weights, by default those from 0.

    Raises:
        AttnscopeError: There are not as many different numbers as the axis has entries.
    """
    required = tuple(map(int, range(size) if numbers is None else numbers))
    n_named = len({*required})
    if n_named != size:
        raise AttnscopeError(
            f"{n_named} {axis} are named, and the weights have {size}", f"give {size} numbers"
        )
    return required


def _label_tokens(text: str | None, labels: Sequence[str], special: Sequence[int]) -> Tokens:
    """Return tokens with given labels, and find them in the text; ids and words are unknown.

    Args:
        text: The text; None = the labels, joined by blanks.
        labels: The label of each token, as the vocabulary writes it.
        special: The places of special tokens.

    Raises:
        AttnscopeError: The labels are no list of texts, or a special token is beyond the last token.
    """
    if isinstance(labels, str) or not all(isinstance(label, str) for label in labels):
        raise AttnscopeError("the tokens are no list of texts", "give the label of each token")
    shown = tuple(label.translate(_SPACE_MARKS) or " " for label in labels)
    n = len(shown)
    if len(special) and not 0 <= min(special) <= max(special) < n:
        raise AttnscopeError(
            f"there is no token {max(special, key=abs)} to be special", f"there are {n}, from 0"
        )
    # (token,)
    is_special = np.isin(np.arange(n), list(special))
    if text is None:
        text = " ".join(label.strip("·") for label in shown)
    # The first character of each token and the one after its last, (token, 2); -1 = it is not in the text.
    offsets = np.full((n, 2), -1, np.int32)
    # Search from left to right, each token behind the one before it.
    position = 0
    for token in np.flatnonzero(~is_special).tolist():
        # Without WordPiece's mark of a continued word, and without marks of spaces.
        piece = shown[token].removeprefix("##").strip("·")
        start = text.find(piece, position)
        if piece and start >= 0:
            position = start + len(piece)
            offsets[token] = start, position
    return Tokens(
        text=text,
        ids=np.full(n, -1, np.int64),
        labels=shown,
        offsets=offsets,
        special=is_special,
        words=None,
        segments=np.zeros(n, np.int32),
    )
