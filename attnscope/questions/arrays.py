"""Attention that was computed elsewhere, by JAX, vLLM, llama.cpp or code of one's own, as a record that draws."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attnscope.errors import AttnscopeError, amount, first_line
from attnscope.questions.heatmap import AttentionMap, Heatmap
from attnscope.questions.maps import KINDS
from attnscope.results import reading
from attnscope.results.tokens import Tokens
from attnscope.version import VERSION

NAMES = ("weights", "tokens", "keys", "kind", "layers", "heads", "special", "text", "model")
"""What an npz archive of such attention may hold, of which the first two must be there."""

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
    """Makes a record of attention weights that were computed elsewhere; it draws, saves and opens as every other.

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
    try:
        given = np.asarray(weights)
        if given.dtype.kind in "biuc":
            raise AttnscopeError(f"the weights are of type {given.dtype}", "give floating-point numbers")
        array = given.astype(np.float32)
    except (TypeError, ValueError) as error:
        raise AttnscopeError(
            f"the weights are no array of numbers: {first_line(error)}",
            "give NumPy's array (layer, head, query, key)",
        ) from None
    missing = np.isnan(array) if array.ndim == 4 else np.zeros((1, 1, 1, 1), bool)
    partly = np.argwhere(missing.any((2, 3)) & ~missing.all((2, 3)))
    if len(partly):
        raise AttnscopeError(
            f"the weights at layer {partly[0][0]}, head {partly[0][1]} are NaN in part",
            "NaN throughout stands for a head that a layer lacks",
        )
    labels = _labels(tokens, "tokens")
    key_labels = labels if keys is None else _labels(keys, "keys")
    if array.ndim != 4 or array.shape[2:] != (len(labels), len(key_labels)) or 0 in array.shape:
        raise AttnscopeError(
            f"the weights have shape {array.shape}, not (layer, head, {amount(len(labels), 'query', 'queries')}, "
            f"{amount(len(key_labels), 'key')})",
            "drop the axis of the batch: weights[:, 0]"
            if array.ndim == 5
            else "one number for each pair of tokens: weights[layer, head, query, key]",
        )
    if kind is None:
        kind = "cross" if keys is not None else "decoder" if _looks_back_only(array) else "encoder"
    if kind not in KINDS:
        raise AttnscopeError(f"there is no {kind!r} attention", f"choose from {', '.join(KINDS)}")
    layer_numbers, head_numbers = _numbers("layers", layers, array.shape[0]), _numbers("heads", heads, array.shape[1])
    text = " ".join(label.strip("·") for label in labels) if text is None else text
    queries = _tokens_of(text, labels, special)
    attention = AttentionMap(
        kind=kind,
        layers=layer_numbers,
        heads=head_numbers,
        weights=array,
        queries=queries,
        keys=queries if keys is None else _tokens_of(" ".join(key_labels), key_labels, ()),
        n_layers=max(layer_numbers) + 1,
        n_heads=max(head_numbers) + 1,
        n_kv_heads=max(head_numbers) + 1,
    )
    record = Heatmap(text, (attention,), _run_of(model, str(np.asarray(weights).dtype)))
    try:
        record.require_sound()
    except ValueError as error:
        raise AttnscopeError(f"this is no attention: {error}", "give weights after the softmax") from None
    return record


def load_arrays(path: Path) -> Heatmap | None:
    """The record of an archive of bare arrays, named as the arguments of `record_from_arrays`; None = it is none."""
    hint = "name its arrays weights and tokens; see attnscope.record_from_arrays"
    with reading.reading(path, "archive of attention weights", hint):
        if not path.is_file() or not zipfile.is_zipfile(path):
            return None
        with zipfile.ZipFile(path) as archive:
            names = {name.removesuffix(".npy") for name in archive.namelist()}
            bare = all(name.endswith(".npy") for name in archive.namelist())
        if "record" not in names and bare and names and not {"weights", "tokens"} <= names:
            raise AttnscopeError(f"{path} holds {', '.join(sorted(names)[:5])}: neither a record nor attention", hint)
        if "record" in names or not {"weights", "tokens"} <= names:
            return None
        unknown = sorted(names - set(NAMES))
        if unknown:
            raise AttnscopeError(f"{path} holds an array {unknown[0]!r}", f"name its arrays {', '.join(NAMES)}")
        arrays = reading.read_archive(path) or {}
        weights = arrays.pop("weights")
        return record_from_arrays(weights, **{"model": path.stem, **{n: array.tolist() for n, array in arrays.items()}})


def _labels(tokens: Sequence[str], what: str) -> tuple[str, ...]:
    if isinstance(tokens, str) or not all(isinstance(token, str) for token in tokens):
        raise AttnscopeError(f"the {what} are no list of texts", "give the label of each token")
    return tuple(token.translate(_SPACES) or " " for token in tokens)


def _numbers(what: str, named: Sequence[int] | None, n: int) -> tuple[int, ...]:
    numbers = tuple(range(n)) if named is None else _whole(what, named)
    if len(numbers) != n or len(set(numbers)) != n:
        raise AttnscopeError(f"{len(set(numbers))} {what} are named, and the weights have {n}", f"give {n} numbers")
    return numbers


def _whole(what: str, numbers: Sequence[int]) -> tuple[int, ...]:
    """Return whole numbers as Python's; refuse others, such as 1.5 or True."""
    for number in numbers:
        if isinstance(number, bool | np.bool_) or not isinstance(number, int | np.integer):
            raise AttnscopeError(f"the {what} are named by {number!r}, which is no whole number", "count them from 0")
    return tuple(map(int, numbers))


def _looks_back_only(weights: Any) -> bool:
    n = weights.shape[-1]
    return weights.shape[-2] == n > 1 and not np.nan_to_num(weights)[..., *np.triu_indices(n, 1)].any()


def _tokens_of(text: str, labels: tuple[str, ...], special: Sequence[int]) -> Tokens:
    """Tokens of which no more is known than what they are called; where they stand in the text, if it holds them."""
    n, offsets, at = len(labels), [], 0
    added = np.zeros(n, bool)
    places = _whole("special tokens", special)
    if any(not 0 <= place < n for place in places):
        raise AttnscopeError(f"there is no token {max(places, key=abs)} to be special", f"there are {n}, from 0")
    added[places] = True
    for label, is_special in zip(labels, added, strict=True):
        bare = label.removeprefix("##").strip("·")
        start = -1 if is_special or not bare else text.find(bare, at)
        offsets.append((start, start + len(bare)) if start >= 0 else (-1, -1))
        at = start + len(bare) if start >= 0 else at
    return Tokens(
        text=text, ids=np.full(n, -1, np.int64), labels=labels, offsets=np.array(offsets, np.int32), special=added,
        words=None, segments=np.zeros(n, np.int32),
    )  # fmt: skip


def _run_of(model: str, dtype: str) -> dict[str, Any]:
    return {
        "model": model, "source": "arrays", "sha256": "", "architecture": "", "engine": "elsewhere", "dtype": dtype,
        "device": "", "checked": None, "seed": None, "versions": {"attnscope": VERSION},
        "notes": ["The weights were computed elsewhere: attnscope has checked their form, not how they came about."],
    }  # fmt: skip
