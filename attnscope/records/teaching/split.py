"""The same queries, keys and values seen with different numbers of heads. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.records.frame.checks import shaped
from attnscope.records.frame.record import Record

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Drop:
    """What changes when a head puts out zeros.

    Attributes:
        head: Its number.
        l2: The L2 (Frobenius) norm of the change of the output, over all queries and columns.
        share: The same divided by the norm of the output.
        l2_by_query: The norm of the change of each query's output, (query,).
    """

    head: int
    l2: float
    share: float
    l2_by_query: Array = field(metadata=shaped("queries"))


@dataclass(frozen=True, eq=False)
class Seen:
    """Attention with one number of heads.

    Attributes:
        n_heads: How many heads.
        d_head: Columns of each.
        scale: 1 / sqrt(d_head).
        columns: First column and one past the last of each head, (head, 2).
        weights: (head, query, key).
        mean_weights: Mean over the heads, (query, key): what is often drawn, and no head's own.
        output: The heads side by side, after W_O if there is one, (query, d_model).
        entropy_nats: Mean entropy of each head's rows, (head,); 0 to ln(key).
        uniform: How many rows of each head are uniform, (head,).
        rank: Rank of each head's dot products, (head,); at most d_head.
        disagreement_nats: Jensen-Shannon divergence of the heads' rows for each query, (query,); 0 to ln(n_heads).
        mixing: From which head each output column comes, (head, output), shares; None without W_O.
        drops: The heads that were dropped, one by one.
    """

    n_heads: int
    d_head: int
    scale: float
    columns: NDArray[np.int64] = field(metadata=shaped("n_heads 2"))
    weights: Array = field(metadata=shaped("n_heads queries keys", filled=True, weights=True))
    mean_weights: Array = field(metadata=shaped("queries keys"))
    output: Array = field(metadata=shaped("queries n_output"))
    entropy_nats: Array = field(metadata=shaped("n_heads"))
    uniform: NDArray[np.int64] = field(metadata=shaped("n_heads"))
    rank: NDArray[np.int64] = field(metadata=shaped("n_heads"))
    disagreement_nats: Array = field(metadata=shaped("queries"))
    mixing: Array | None = field(metadata=shaped("n_heads n_output"))
    drops: tuple[Drop, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Split(Record):
    """The same queries, keys and values with different numbers of heads.

    Attributes:
        run: What made it; plain JSON values.
        text: The text; the worked example's tokens joined by blanks.
        queries: Labels of the tokens that attend.
        keys: Labels of the tokens that are attended to.
        d_model: Columns of queries, keys and values.
        same_columns: Whether head 1 got the columns of head 0.
        project: What W_O is: "" (none), "orthogonal", "permute", or a file's name.
        w_o: W_O as torch.nn.Linear stores it, (output, d_model); None = none.
        seen: One entry a number of heads, in the order asked for.
    """

    SCHEMA: ClassVar[str] = "attnscope.split/1"

    run: Mapping[str, Any]
    text: str
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    d_model: int
    same_columns: bool
    project: str
    w_o: Array | None
    seen: tuple[Seen, ...]

    def of(self, n_heads: int) -> Seen:
        """What was seen with that many heads."""
        for seen in self.seen:
            if seen.n_heads == n_heads:
                return seen
        counts = ", ".join(str(seen.n_heads) for seen in self.seen)
        raise AttnscopeError(f"{n_heads} heads are not in this record", f"it has {counts}")
