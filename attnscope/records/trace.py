"""One attention computed step by step: every number, its formula, and the line of NumPy that made it. NumPy only."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.records.reading import read_record, reading, require_archive, require_run, require_types
from attnscope.records.storage import finite, plain, write_whole

TRACE_SCHEMA = "attnscope.trace/1"

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
    value: NDArray[np.float64]


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
    scores: NDArray[np.float64]
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


@dataclass(frozen=True, eq=False)
class Trace:
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

    run: Mapping[str, Any]
    text: str
    kind: str
    layer: int
    heads: tuple[int, ...]
    n_heads: int
    n_kv_heads: int
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    query: int | None
    inputs: Mapping[str, NDArray[Any] | float]
    steps: tuple[Step, ...]
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
        document: dict[str, Any] = plain(self._document() | {"inputs": inputs}, finite)
        return document

    def _document(self) -> dict[str, Any]:
        return {
            "schema": TRACE_SCHEMA,
            "run": self.run,
            "text": self.text,
            "kind": self.kind,
            "layer": self.layer,
            "heads": self.heads,
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "queries": self.queries,
            "keys": self.keys,
            "query": self.query,
            "steps": [asdict(step) | {"shape": step.value.shape} for step in self.steps],
            "bands": [asdict(band) for band in self.bands],
            "radians_per_token": self.radians_per_token,
            "check": asdict(self.check),
        }

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

    def save(self, path: str | Path) -> Path:
        """Writes the record, whole or not at all: `.npz` (lossless), `.json`, or `.py` (the lines, as a script)."""
        path = Path(path)
        if path.suffix == ".json":
            return write_whole(path, json.dumps(self.as_json(), allow_nan=False, ensure_ascii=False).encode())
        if path.suffix == ".py":
            return write_whole(path, self.script().encode())
        if path.suffix != ".npz":
            raise AttnscopeError(f"a trace is saved as .npz, .json or .py, not {path.suffix or path.name!r}")
        held = io.BytesIO()
        document = self._document()
        for step in document["steps"]:
            del step["value"]
        described = np.frombuffer(json.dumps(plain(document)).encode(), np.uint8)
        values = {f"step_{number}": step.value for number, step in enumerate(self.steps)}
        inputs = {f"input_{name}": np.asarray(value) for name, value in self.inputs.items()}
        np.savez(held, allow_pickle=False, record=described, **values, **inputs)
        return write_whole(path, held.getvalue())


def load(path: str | Path) -> Trace:
    """Reads a trace that `Trace.save` wrote as npz, without loss.

    Raises:
        AttnscopeError: The file is not there, damaged, or no such record.
    """
    path = Path(path)
    with reading(path, "trace", "give the trace.npz that `trace -o` wrote"):
        data, held = read_record(path, TRACE_SCHEMA)
        require_archive(held)
        del data["schema"]
        steps = []
        for number, told in enumerate(data.pop("steps")):
            del told["shape"]
            steps.append(Step(**told | {"axes": tuple(told["axes"])}, value=held[f"step_{number}"]))
        bands = tuple(Band(**told | {"scores": np.array(told["scores"])}) for told in data.pop("bands"))
        inputs = {name[6:]: value for name, value in held.items() if name.startswith("input_")}
        for name in ("heads", "queries", "keys"):
            data[name] = tuple(data[name])
        check = Check(**data.pop("check"))
        speeds = np.array(data.pop("radians_per_token"), np.float64)
        found = Trace(**data, inputs=inputs, steps=tuple(steps), bands=bands, radians_per_token=speeds, check=check)
        require_types(found)
        require_run(found.run)
        if any(len(step.axes) != step.value.ndim for step in steps):
            raise ValueError("a step's value does not have its axes")
    return found
