"""The view "Head count": the same queries, keys and values with 1, 2 and 4 heads, step by step, in numbers and words.

Five tokens of width 4 are few enough to read. Embeddings are one-hot: row i of a projection is what token i gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import amount

Floats = NDArray[np.float64]

TOKENS = ("The", "cat", "sat", "on", "mat")
WIDTH = 4
COUNTS = (1, 2, 4)

_W_Q = np.array([[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]], float)
_W_K = np.array([[0, 1, 0, 1], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0.5, 0.5]], float)
_W_V = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0.5, 0.5, 0.5, 0.5]])
_OUTPUTS = {
    "identity": np.eye(WIDTH),
    "mixing": np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2,
}


@cache
def head_count() -> dict[str, Any]:
    """The document that `headcount.js` draws."""
    return {"tokens": TOKENS, "outputs": list(_OUTPUTS), "counts": [_count(n) for n in COUNTS]}


def _count(n: int) -> dict[str, Any]:
    """All of it with n heads: matrices by name, (token, column); of each head its map and what goes into it."""
    width = WIDTH // n
    x = np.eye(len(TOKENS))
    q, k, v = (np.split(x @ w, n, axis=1) for w in (_W_Q, _W_K, _W_V))  # by head: (token, column)
    heads, outputs = [], []
    for head in range(n):
        scores = q[head] @ k[head].T / np.sqrt(width)
        raised = np.exp(scores - scores.max(1, keepdims=True))
        weights = raised / raised.sum(1, keepdims=True)
        outputs.append(weights @ v[head])
        name = "the one head" if n == 1 else f"head {head}"
        numbers = {"scores": scores, "weights": weights, "v": v[head], "output": outputs[head]}
        heads.append({"name": name, **_listed(numbers)})
    joined = np.hstack(outputs)
    vectors: dict[str, Floats] = {"x": x, "q": np.hstack(q), "k": np.hstack(k), "v": np.hstack(v), "c": joined}
    vectors |= {name: joined @ w for name, w in _OUTPUTS.items()}
    vectors |= {"z" if n == 1 else f"z, head {head}": output for head, output in enumerate(outputs)}
    return {
        "n": n,
        "name": amount(n, "head"),
        "width": width,
        "heads": heads,
        "vectors": list(_listed(vectors).items()),
        "steps": _steps(n, width, [name for name in vectors if name.startswith("z")]),
    }


def _listed(arrays: Mapping[str, Floats]) -> dict[str, Any]:
    """With more decimals than the page shows, and fewer than a float has; whole numbers without a point."""
    return {name: [[_short(x) for x in row] for row in values.tolist()] for name, values in arrays.items()}


def _short(number: float) -> float:
    return int(number) if number.is_integer() else round(number, 7)


def _steps(n: int, width: int, outputs: list[str]) -> list[dict[str, Any]]:
    """Name, formula, line of NumPy and meaning of each step, and what it shows: (label, vector, whether split by head).

    An empty name is the output, by the projection that is chosen. The step that attends shows tables of its own.
    """
    dealt = f"The {WIDTH} columns are dealt out to {n} heads, {width} to each."
    return [
        {
            "name": "project",
            "formula": "Q = X W_Q,  K = X W_K,  V = X W_V",
            "numpy": "Q, K, V = X @ W_Q, X @ W_K, X @ W_V",
            "what": "Each token asks (query), offers itself (key) and has something to give (value). Embeddings are "
            "one-hot here, so a token's rows of W are what it gets.",
            "caption": "before and after",
            "rows": [(name, name, False) for name in "xqkv"],
        },
        {
            "name": "split",
            "formula": f"q_h = Q[:, {width}h : {width}(h + 1)],  h = 0 … {n - 1};  d_head = {WIDTH} / {n} = {width}",
            "numpy": f"q, k, v = (M.reshape({len(TOKENS)}, {n}, {width}).transpose(1, 0, 2) for M in (Q, K, V))",
            "what": "One head has all four columns." if n == 1 else
            f"{dealt} Nothing is computed, and nothing is added: more heads are narrower heads.",
            "caption": "columns by head",
            "rows": [(name, name, True) for name in "qkv"],
        },
        {
            "name": "attend",
            "formula": "A_h = softmax(q_h k_hᵀ / √d_head),  Z_h = A_h v_h",
            "numpy": f"E = np.exp(q @ k.transpose(0, 2, 1) / np.sqrt({width})); A = E / E.sum(-1, keepdims=True); "
            "Z = A @ v",
            "what": "Each head compares its own columns alone, and so has a map of its own; its output is the mean of "
            "the values by its weights.",
        },
        {
            "name": "concatenate",
            "formula": f"C = [{' | '.join(f'Z_{head}' for head in range(n))}]",
            "numpy": f"C = Z.transpose(1, 0, 2).reshape({len(TOKENS)}, {WIDTH})",
            "what": "The heads' outputs stand side by side again, as wide as before.",
            "caption": "the heads' outputs, joined",
            "rows": [*((name, name, False) for name in outputs), ("c", "c", True)],
        },
        {
            "name": "project",
            "formula": "O = C W_O",
            "numpy": "O = C @ W_O",
            "what": "Only here do heads meet: each column of the output is a sum over all of them. With the identity "
            "they stay side by side.",
            "caption": "after the output projection",
            "rows": [("c", "c", True), ("o", "", False)],
        },
    ]  # fmt: skip
