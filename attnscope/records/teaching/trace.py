"""One attention computed step by step: every number, its formula, and the line of NumPy that made it. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.records.frame import codec
from attnscope.records.frame.checks import shaped
from attnscope.records.frame.record import Record
from attnscope.results.storage import finite, plain

_MOST_IN_JSON = 4096


@dataclass(frozen=True, eq=False)
class Step:
    """One step.

    Attributes:
        name: Such as "dot_products".
        title: For people.
        formula: The mathematics.
        code: The line of NumPy that computes it.
        variable: The expression that holds the value after it.
        axes: What the axes of the value are: "query", "key", "column", "joined", "output", "pair", "sink".
        head: Which head it belongs to; None = all.
        value: The numbers, float64.
    """

    name: str
    title: str
    formula: str
    code: str
    variable: str
    axes: tuple[str, ...]
    head: int | None
    value: NDArray[np.float64] = field(metadata=codec.beside(""))

    TOLD: ClassVar[tuple[str, ...]] = ("shape",)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self.value.shape


EDGES = (0.0, 10.0, 100.0, 1000.0, 10000.0, math.inf)
"""Bounds of bands of wavelengths of rotary positions, in tokens: a pair of columns turns once round in so many."""


def name_range(low: float, high: float) -> str:
    """What a band of wavelengths is called, such as "10 to 100"."""
    if low == 0:
        return f"below {high:g}"
    return f"{low:g} and more" if math.isinf(high) else f"{low:g} to {high:g}"


@dataclass(frozen=True, eq=False)
class Band:
    """What the pairs of rotary positions within a range of wavelengths bring to a query's scores.

    Attributes:
        head: Which head.
        low: Shortest wavelength of the range, in tokens (a pair has turned once round after so many).
        high: Longest, not included; infinity for the last.
        n_pairs: How many pairs it has.
        scores: What they add to the score of each key, (key,), float64. All bands, and the columns that are not
            turned, sum to the score.
        near: Mean of `scores` over the keys at most 3 tokens away, less the mean over all keys that the query may
            attend to; NaN if there are none.
        far: The same over the keys further away.
    """

    head: int
    low: float
    high: float
    n_pairs: int
    scores: NDArray[np.float64] = field(metadata=shaped("keys"))
    near: float
    far: float


@dataclass(frozen=True)
class Check:
    """How far the steps are from what the model's own kernel computed.

    Attributes:
        kernel: What they were compared with.
        weights: Largest difference of a weight; NaN where the kernel gives none.
        outputs: Largest difference of a number that a head puts out.
        projected: Largest difference after W_O; NaN where it is not known.
        rounding: What `outputs` may be, by the kernel's precision.
    """

    kernel: str
    weights: float
    outputs: float
    projected: float
    rounding: float


@dataclass(frozen=True, eq=False, repr=False)
class Trace(Record):
    """One attention, step by step.

    Attributes:
        run: What made it: model, sha256, engine, versions, notes ... Plain JSON values.
        text: The text; the worked example's tokens joined by blanks.
        kind: "encoder", "decoder" or "cross".
        layer: Which layer.
        heads: Which heads have their steps in it.
        n_heads: How many the layer has.
        n_kv_heads: How many key/value heads it has.
        queries: Labels of the tokens that attend.
        keys: Labels of the tokens that are attended to.
        query: Place of the one query that is traced; None = all of them.
        inputs: What the lines start from, by the names that they use. Running all `code` lines in order on copies of
            them gives every value again.
        steps: The steps in order, head after head, then what joins them.
        bands: The scores by wavelength, where there are rotary positions and one query.
        radians_per_token: How far each pair of rotary columns turns from token to token; empty where there are none.
        check: The comparison with the kernel in use.
    """

    SCHEMA: ClassVar[str] = "attnscope.trace/1"

    run: Mapping[str, Any]
    text: str
    kind: str
    layer: int
    heads: tuple[int, ...]
    n_heads: int
    n_kv_heads: int
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    query: int | None = field(metadata={"index": "queries"})
    inputs: Mapping[str, NDArray[Any] | float] = field(metadata=codec.beside("input_"))
    steps: tuple[Step, ...] = field(metadata=codec.parts(lambda _, number: f"step_{number}"))
    bands: tuple[Band, ...]
    radians_per_token: NDArray[np.float64]
    check: Check

    def of(self, name: str, head: int | None = None) -> NDArray[np.float64]:
        """The value of a step by its name; of the first head that has it, or of `head`."""
        for step in self.steps:
            if step.name == name and (head is None or step.head == head):
                return step.value
        known = ", ".join(dict.fromkeys(step.name for step in self.steps))
        raise AttnscopeError(f"there is no step {name!r}", f"the steps are: {known}")

    def as_json(self) -> dict[str, Any]:
        """All of it as plain JSON values; of inputs with more than 4096 numbers the shape alone, -inf and NaN null."""
        inputs = {
            name: value if np.size(value) <= _MOST_IN_JSON else {"shape": list(np.shape(value))}
            for name, value in self.inputs.items()
        }
        steps = [codec.describe(step) | {"value": step.value} for step in self.steps]
        whole: dict[str, Any] = plain(self.describe() | {"steps": steps, "inputs": inputs}, finite)
        return whole

    def require_whole(self) -> None:
        """Refuses values that do not have the axes that their step says, or not a place for each of their tokens."""
        sizes = {"query": len(self.queries), "key": len(self.keys)}
        for step in self.steps:
            if len(step.axes) != step.value.ndim:
                raise ValueError("a step's value does not have its axes")
            if any(sizes.get(axis, n) != n for axis, n in zip(step.axes, step.value.shape, strict=True)):
                raise ValueError("a step's value does not fit its tokens")

    def to_py(self) -> str:
        """The script of the file `trace.py`; see `script`."""
        return self.script()

    def script(self) -> str:
        """A Python script that computes everything again from the `.npz` beside it."""
        head = (
            f"# {self.kind} attention, layer {self.layer}. Reads trace.npz, which lies beside this file.",
            "from pathlib import Path",
            "",
            "import numpy as np",
            "",
            'with np.load(Path(__file__).with_name("trace.npz")) as given:',
            '    globals().update({name[6:]: given[name] for name in given.files if name.startswith("input_")})',
            "np.set_printoptions(precision=4, suppress=True)",
        )
        body = [
            f"\n# {step.title}: {step.formula}\n{step.code}\nprint({step.variable!r}, {step.variable}, sep='\\n')"
            for step in self.steps
        ]
        return "\n".join((*head, *body)) + "\n"
