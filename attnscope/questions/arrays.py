"""Make a record of attention weights that other software computed, such as JAX, vLLM, llama.cpp or your own code.

`record_from_arrays`, the only public function, checks the weights and labels before it makes the record.
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
"""Characters that mark a leading space in vocabularies, each with the dot that stands for it in labels."""


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
    """Make a record of attention weights that were computed elsewhere. You can draw, save and load it like any record.

        record = attnscope.record_from_arrays(weights, ["[CLS]", "the", "cat"], model="mine", special=[0])
        record.only([(3, 1)]).draw("figures")

    Args:
        weights: Attention weights after the softmax, (layer, head, query, key), 0 to 1, of any floating-point type. A
            row sums to at most 1. If a layer lacks a head, all weights of that head are NaN.
        tokens: The label of each query, as the tokenizer's vocabulary writes it. A mark of a leading space (`Ġ`, `▁`)
            is shown as `·`.
        keys: The label of each key in cross-attention; None = self-attention, where the keys are the queries.
        kind: "encoder", "decoder" or "cross". None = "cross" if there are keys; "decoder" if no query attends to later
            tokens; otherwise "encoder".
        layers: The number of each layer in its model; None = 0, 1, 2 and so on.
        heads: The number of each head in its layer; None = 0, 1, 2 and so on.
        special: The positions of special tokens among `tokens`; `hide_special` leaves them out.
        text: The text; None = the labels, joined by blanks.
        model: The name of the model in titles.

    Raises:
        AttnscopeError: The shape does not fit the labels, a weight is negative, or a row sums to more than 1.
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
    # Every record has these facts of its run; the unknown ones are empty or None.
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
    # `require_whole` checks shapes, negative weights and row sums.
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
        AttnscopeError: They are no numbers, they do not have four axes, or only a part of a head is NaN.
    """
    hint = "give floating-point numbers, (layer, head, query, key)"
    try:
        array = np.asarray(weights).astype(np.float32)
    except (TypeError, ValueError) as error:
        raise AttnscopeError(f"the weights are no array of numbers: {first_line(error)}", hint) from None
    if array.ndim != 4 or not array.size:
        raise AttnscopeError(f"the weights have shape {array.shape}", hint)
    is_nan = np.isnan(array)
    # Whether some weights of a head are NaN, but not all: (layer, head).
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
    # Weights of keys after the query are above the diagonal. With one token both kinds fit.
    has_later = np.nan_to_num(np.triu(weights, 1)).any()
    return "decoder" if n_tokens > 1 and not has_later else "encoder"


def _number_axis(axis: str, numbers: Sequence[int] | None, size: int) -> tuple[int, ...]:
    """Return the numbers of the layers or heads along an axis of the weights, by default 0, 1, 2 and so on.

    Args:
        axis: "layers" or "heads".
        numbers: The numbers that the user gave; None = the default.
        size: The length of the axis.

    Raises:
        AttnscopeError: The user gave more or fewer different numbers than the axis is long.
    """
    axis_numbers = tuple(map(int, range(size) if numbers is None else numbers))
    n_given = len({*axis_numbers})
    if n_given != size:
        raise AttnscopeError(
            f"{n_given} {axis} are named, and the weights have {size}", f"give {size} numbers"
        )
    return axis_numbers


def _label_tokens(text: str | None, labels: Sequence[str], special: Sequence[int]) -> Tokens:
    """Return tokens with the user's labels, located in the text. Ids are -1 and words None, as both are unknown.

    Args:
        text: The text; None = the labels, joined by blanks.
        labels: The label of each token, as the vocabulary writes it.
        special: The positions of special tokens.

    Raises:
        AttnscopeError: The labels are no list of strings, or a position is beyond the last token.
    """
    if isinstance(labels, str) or not all(isinstance(label, str) for label in labels):
        raise AttnscopeError("the tokens are no list of texts", "give the label of each token")
    shown_labels = tuple(label.translate(_SPACE_MARKS) or " " for label in labels)
    n_tokens = len(shown_labels)
    if len(special) and not 0 <= min(special) <= max(special) < n_tokens:
        raise AttnscopeError(
            f"there is no token {max(special, key=abs)} to be special", f"there are {n_tokens}, from 0"
        )
    # Whether each token is special, (token,).
    is_special = np.isin(np.arange(n_tokens), list(special))
    if text is None:
        text = " ".join(label.strip("·") for label in shown_labels)
    # The [start, stop) character offsets of each token, (token, 2); -1 = the token is not in the text.
    offsets = np.full((n_tokens, 2), -1, np.int32)
    # Search from left to right. A token begins at or after `position`, the end of the token before it.
    position = 0
    for token in np.flatnonzero(~is_special).tolist():
        # Strip "##", WordPiece's mark of a continued word, and the marks of spaces.
        piece = shown_labels[token].removeprefix("##").strip("·")
        start = text.find(piece, position)
        if piece and start >= 0:
            position = start + len(piece)
            offsets[token] = start, position
    return Tokens(
        text=text,
        ids=np.full(n_tokens, -1, np.int64),
        labels=shown_labels,
        offsets=offsets,
        special=is_special,
        words=None,
        segments=np.zeros(n_tokens, np.int32),
    )
