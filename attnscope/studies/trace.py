"""How is this attention computed? One head, number by number, beside what the kernel computed."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from attnscope.choice import Choice
from attnscope.core.exact import reference
from attnscope.core.plain_torch import with_plain_torch
from attnscope.core.teaching import example, stepwise
from attnscope.core.teaching.stepwise import Inputs, Line
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.catalog import read_config
from attnscope.models.model import Model
from attnscope.models.own.layouts import supports
from attnscope.questions.trace import HEAD_STEPS, JOINT_STEPS, Trace, TraceOptions
from attnscope.results.table import Table
from attnscope.studies.failures import require_finite
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.reading import Prompt, Reading, batch_of, read
from attnscope.studies.trace_check import (
    Array,
    Kernel,
    check_steps,
    read_kernel,
    run_example,
    run_lines,
    to_float64,
)
from attnscope.version import VERSION

if TYPE_CHECKING:
    from attnscope.models.inside.around import Surroundings
    from attnscope.models.own.plain import PlainEncoder
    from attnscope.results.tokens import Tokens


EDGES = (0.0, 10.0, 100.0, 1000.0, 10000.0, math.inf)
"""Bounds of bands of wavelengths of rotary positions, in tokens: a pair of columns turns once round in so many."""

NEAR_TOKENS = 3
"""How far a key may be to count as near, in the summary of rotary positions."""

_MOST_NUMBERS = 50_000_000
"""How many numbers a matrix of all queries and keys may have, by heads, before it is refused."""


@with_plain_torch
def trace_example(query: str | int | None = None, heads: Sequence[int] | None = None, *, engine: str = "auto") -> Trace:
    """The worked example, step by step: "The cat sat on mat", d_model 4, 2 heads, no projections.

    Args:
        query: The query to follow, such as "cat", or its place; None = all of them, as matrices.
        heads: Which heads; None = both.
        engine: "auto": NumPy, held against attnscope's MultiHeadAttention on torch. "reference": plain loops, held
            against NumPy, without torch.

    Raises:
        AttnscopeError: There is no such token or head.
        UsageError: There is no such engine.
    """
    if engine not in ("auto", "native", "reference"):
        raise UsageError(
            f"the worked example does not run on the engine {engine!r}", "choose auto, native or reference"
        )
    chosen = _heads(heads, example.N_HEADS, "the worked example")
    place = _position(query, example.TOKENS)
    inputs = Inputs(
        example.Q, example.K, example.V, example.N_HEADS, example.N_HEADS, 1 / math.sqrt(4 / example.N_HEADS)
    )  # fmt: skip
    kernel = run_lines(inputs) if engine == "reference" else run_example()
    run = {
        "model": "worked example",
        "engine": "reference" if engine == "reference" else "native",
        "dtype": "float64",
        "device": "cpu",
        "sha256": "",
        "seed": None,
        "versions": {"attnscope": VERSION, "python": platform.python_version(), "numpy": version("numpy")},
        "notes": ["no projections: heads take columns of Q, K and V as they stand, and joined they are the output"],
    }
    selection = _Selection(" ".join(example.TOKENS), "encoder", 0, chosen, example.TOKENS, example.TOKENS, place)
    return selection.build(inputs, kernel, run, loops=engine == "reference")


@with_plain_torch
def trace(
    model: Model | None = None,
    text: str | Prompt | None = None,
    layer: int = 0,
    heads: int | Sequence[int] | None = None,
    *,
    query: str | int | None = None,
    kind: str | None = None,
    loops: bool = False,
) -> Trace:
    """Compute some heads of one layer on a text, step by step, from what reaches the model's attention.

    Args:
        model: A loaded model, see `attnscope.load`; None = the worked example, see `trace_example`.
        text: What to run it on.
        layer: Which layer.
        heads: Which heads; None = all.
        query: The query to follow: a token, a word, or a place such as "@3" or 3; None = all, as matrices.
        kind: "encoder", "decoder" or "cross"; None = the model's first.
        loops: Whether steps are computed in plain Python loops instead of NumPy's operations.

    Returns:
        The record. Queries, keys and values are the model's own; the steps are computed from them in float64.

    Raises:
        AttnscopeError: There is no such layer, head or token; the model does not show its queries and keys; or the
            steps are further from the model's own output than rounding.
    """
    from attnscope.models.inside.around import surroundings

    if model is None:
        chosen = (heads,) if isinstance(heads, int) else heads
        return trace_example(query, chosen, engine="reference" if loops else "auto")
    if text is None:
        raise UsageError("no text is given", "a model is traced on a text")
    prompt = Prompt(text) if isinstance(text, str) else text
    reading, selection = _select(model, prompt, layer, heads, query, kind)
    around = surroundings(model, batch_of(reading, model.info.device), selection.kind, layer)
    inputs, kernel = _inputs_of(around), read_kernel(around)
    _require_numbers(model, inputs, selection.kind, layer)
    run = run_of(model.info, (*reading.notes, *around.notes))
    return selection.build(inputs, kernel, run, loops=loops)


def trace_plain(
    model: PlainEncoder,
    text: str | Prompt,
    layer: int,
    heads: int | Sequence[int] | None = None,
    *,
    query: str | int | None = None,
) -> Trace:
    """`trace` for a BERT-family encoder without torch: queries, keys and values by NumPy, the steps by plain loops.

    The steps are compared with the lines of NumPy, in float64 like them.
    """
    prompt = Prompt(text) if isinstance(text, str) else text
    reading, selection = _select(cast("Model", model), prompt, layer, heads, query, None)
    inputs = model.inputs(reading.tokens, layer)
    run = run_of(model.info, reading.notes) | {"engine": "reference"}
    return selection.build(inputs, run_lines(inputs), run, loops=True)


def _select(
    model: Model,
    prompt: Prompt,
    layer: int,
    heads: int | Sequence[int] | None,
    query: str | int | None,
    kind: str | None,
) -> tuple[Reading, _Selection]:
    """What a model reads, and what of it is traced, once it is known that the model has it."""
    head_numbers = (heads,) if isinstance(heads, int) else None if heads is None else tuple(heads)
    traced = Choice((layer,), head_numbers).within(model.info).heads
    kind = model.info.choose_kind(kind)
    reading = read(model, prompt)
    queries, keys = reading.queries_and_keys(kind)
    place = _query_of(query, queries)
    n_numbers = len(keys) * (1 if place is not None else len(queries)) * len(traced)
    if n_numbers > _MOST_NUMBERS:
        raise AttnscopeError(
            f"the scores of {len(traced)} heads on {len(queries)} queries and {len(keys)} keys are "
            f"{n_numbers:,} numbers",
            "trace one query (--query) or fewer heads (-H)",
        )
    return reading, _Selection(prompt.text, kind, layer, traced, queries.labels, keys.labels, place)


def layer_inputs(
    model: Model, reading: Reading, kind: str, layer: int
) -> tuple[Inputs, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """What reaches a layer's attention, its queries and keys as they are when they meet; labels of both; notes."""
    from attnscope.models.inside.around import surroundings

    Choice((layer,)).within(model.info)
    queries, keys = reading.queries_and_keys(kind)
    around = replace(
        surroundings(model, batch_of(reading, model.info.device), kind, layer), unrotated=None, rotation=None
    )
    inputs = _inputs_of(around)
    _require_numbers(model, inputs, kind, layer)
    return inputs, queries.labels, keys.labels, around.notes


def _require_numbers(model: Model, inputs: Inputs, kind: str, layer: int) -> None:
    """Raises an AttnscopeError where queries, keys or values are NaN or infinite."""
    for numbers in (inputs.Q, inputs.K, inputs.V):
        require_finite({kind: {layer: numbers[None]}}, model.info)


# Steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Selection:
    """The heads and the query of a text that are traced; as the fields of `Trace`."""

    text: str
    kind: str
    layer: int
    heads: tuple[int, ...]
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    query: int | None

    def build(self, inputs: Inputs, kernel: Kernel, run: dict[str, Any], *, loops: bool) -> Trace:
        """Compute the steps, and compare them with the kernel."""
        others = kernel.outputs.copy()
        others[list(self.heads)] = 0  # the concatenation also has the heads that are not traced
        inputs = replace(inputs, H=others)
        query = self.query
        lines = stepwise.all_lines(inputs, self.heads, query)
        values = _by_loops(lines, inputs, query) if loops else stepwise.compute(lines, inputs)
        grids = self._values(lines, values)
        if np.isnan(grids["weights"]).any():
            raise AttnscopeError("a query of this text may attend to nothing", "trace another one with --query")
        for name, value in inputs.names().items():
            if name != "np":
                grids[f"input_{name}"] = np.asarray(value)
        if inputs.rotation is not None:
            grids["radians_per_token"] = inputs.rotation.radians_per_token
        bands, scores = _bands(grids.get("scores_by_pair"), inputs, self.heads, query)
        if bands:
            grids["band_scores"] = np.stack(scores)
        steps = [
            {**vars(line), "axes": " ".join(line.axes), "head": -1 if line.head is None else line.head}
            for line in lines
        ]
        traced = range(len(self.queries)) if query is None else [query]
        known = Trace.TABLES
        tables = {
            "steps": Table.of(known["steps"], steps),
            "heads": Table.of_arrays(known["heads"], head=list(self.heads)),
            "queries": Table.of_arrays(known["queries"], token=list(self.queries)),
            "keys": Table.of_arrays(known["keys"], token=list(self.keys)),
            "traced": Table.of_arrays(known["traced"], query=list(traced)),
            "bands": Table.of(known["bands"], bands),
        }
        about = {
            "text": self.text, "kind": self.kind, "layer": self.layer, "n_heads": inputs.n_heads,
            "n_kv_heads": inputs.n_kv_heads, "one_query": query is not None,
            "check": check_steps(lines, values, kernel, inputs, query),
        }  # fmt: skip
        return Trace(run, {}, about, tables, grids)

    def _values(self, lines: list[Line], values: list[Array]) -> dict[str, Any]:
        """Return the values of each step, those of heads stacked, (head, …); one query keeps its axis."""
        grids: dict[str, Any] = {}
        for line, value in zip(lines, values, strict=True):
            axes = HEAD_STEPS.get(line.name) or JOINT_STEPS[line.name]
            if self.query is not None and axes[0] == "traced":
                value = value[None]
            if line.head is None:
                grids[line.name] = value
            else:
                grids.setdefault(line.name, []).append(value)
        return {name: np.stack(value) if isinstance(value, list) else value for name, value in grids.items()}


def _by_loops(lines: list[Line], inputs: Inputs, query: int | None) -> list[Array]:
    """The same values by core.reference, one number at a time."""
    outputs = inputs.names()["H"]
    rows = slice(None) if query is None else slice(query, query + 1)
    values: dict[tuple[int | None, str], Array] = {}
    for head in dict.fromkeys(line.head for line in lines if line.head is not None):
        group = head // (inputs.n_heads // inputs.n_kv_heads)
        q = inputs.Q[rows, head * inputs.d_head : (head + 1) * inputs.d_head]
        k = inputs.K[:, group * inputs.d_head : (group + 1) * inputs.d_head]
        v = inputs.V[:, group * inputs.d_value : (group + 1) * inputs.d_value]
        of_head = {"query": q, "keys": k, "values": v}
        if inputs.rotation is not None:
            turn = inputs.rotation
            partner = [int(p) for p in turn.partner]
            q = of_head["rotated_query"] = reference.rotate(q, turn.cos[rows], turn.sin[rows], partner)
            k = of_head["rotated_keys"] = reference.rotate(k, turn.cos, turn.sin, partner)
        of_head |= reference.head_steps(
            q, k, v, inputs.scale,
            mask=_of_head(inputs.may, head, rows), bias=_of_head(inputs.bias, head, rows), softcap=inputs.softcap,
            sink=None if inputs.sinks is None else float(inputs.sinks[head]),
        )  # fmt: skip
        if inputs.rotation is not None and query is not None:
            products = np.array([[q[0, i] * key[i] for i in range(len(key))] for key in k]) * inputs.scale
            pairs, rest = inputs.rotation.pairs, inputs.rotation.unpaired
            of_head["scores_by_pair"] = np.array([[[row[a] + row[b] for a, b in pairs] for row in products]])
            of_head["scores_unrotated"] = np.array([[sum(row[i] for i in rest) for row in products]])
        outputs[head, rows] = of_head["head_output"]
        values |= {(head, name): value for name, value in of_head.items()}
    joined = np.array([[outputs[h, i, d] for h in range(inputs.n_heads) for d in range(inputs.d_value)]
                       for i in range(*rows.indices(len(inputs.Q)))])  # fmt: skip
    values[None, "joined"] = joined
    if inputs.W_O is not None:
        projection = reference.Projection(inputs.W_O, inputs.b_O)
        values[None, "output"] = reference.project(joined, projection)
    in_order = [values[line.head, line.name] for line in lines]
    # Of one query, whatever has queries first loses that axis.
    whole = {"keys", "rotated_keys", "values"}
    return [v if query is None or line.name in whole else v[0] for line, v in zip(lines, in_order, strict=True)]


def _bands(
    by_pair: Array | None, inputs: Inputs, heads: tuple[int, ...], query: int | None
) -> tuple[list[dict[str, Any]], list[Array]]:
    """Return bands of wavelengths, one per decade and head, and what each adds to the scores of the one query.

    Args:
        by_pair: The scores by rotary pair, (head, key, pair); None = there are no rotary positions.
        inputs: What the steps start from.
        heads: The heads that are traced.
        query: The query; None = all, which have no bands.
    """
    bands: list[dict[str, Any]] = []
    scores: list[Array] = []
    if inputs.rotation is None or query is None or by_pair is None:
        return bands, scores
    wavelengths = inputs.rotation.wavelengths
    distance = np.abs(np.arange(by_pair.shape[1]) - query)
    for head, of_head in zip(heads, by_pair, strict=True):
        allowed = np.ones(len(of_head), np.bool_)
        if inputs.may is not None:
            allowed = inputs.may[head if inputs.may.shape[0] > 1 else 0, query]
        for low, high in pairwise(EDGES):
            in_band = (wavelengths >= low) & (wavelengths < high)
            if math.isinf(high):
                in_band = wavelengths >= low
            if not in_band.any():
                continue
            of_band = of_head[:, in_band].sum(1)
            means = []
            for keys in (allowed & (distance <= NEAR_TOKENS), allowed & (distance > NEAR_TOKENS)):
                means.append(float(of_band[keys].mean() - of_band[allowed].mean()) if keys.any() else math.nan)
            near, far = means
            n_pairs = int(in_band.sum())
            bands.append({"head": head, "low": low, "high": high, "n_pairs": n_pairs, "near": near, "far": far})
            scores.append(of_band)
    return bands, scores


# Inputs -----------------------------------------------------------------------------------------------------------


def _inputs_of(around: Surroundings) -> Inputs:
    from attnscope.core.attention.seam import allowed

    call = around.call
    query, key = (call.query[0], call.key[0]) if around.unrotated is None else around.unrotated
    may = allowed(call)
    return Inputs(
        Q=_join(query), K=_join(key), V=_join(call.value[0]), n_heads=call.n_heads, n_kv_heads=call.n_kv_heads,
        scale=call.scale,
        may=None if may is None or bool(may.all()) else _whole(may, call).astype(np.bool_),
        bias=None if call.bias is None else _whole(call.bias, call), softcap=call.softcap,
        sinks=None if call.sinks is None else to_float64(call.sinks), rotation=around.rotation,
        W_O=None if around.w_o is None else to_float64(around.w_o),
        b_O=None if around.b_o is None else to_float64(around.b_o),
    )  # fmt: skip


def _join(heads: Any) -> Array:
    """(head, token, width) -> (token, head * width)."""
    return to_float64(heads.transpose(0, 1).flatten(1))


def _whole(tensor: Any, call: Any) -> Array:
    """A mask or bias as (1 or n_heads, query, key)."""
    four = tensor[(None,) * (4 - tensor.ndim)][0]
    return np.array(to_float64(four.expand(-1, call.query.shape[2], call.key.shape[2])))


def _of_head(array: NDArray[Any] | None, head: int, rows: slice) -> NDArray[Any] | None:
    return None if array is None else array[head if array.shape[0] > 1 else 0, rows]


def _query_of(token: str | int | None, queries: Tokens) -> int | None:
    if token is None or isinstance(token, int):
        return _position(token, queries.labels)
    places = queries.find_one(token)
    if not places:
        raise queries.refuse(token)
    return places[0]


def _position(token: str | int | None, labels: Sequence[str]) -> int | None:
    """The position of a token by its label, `@3` or number."""
    if token is None:
        return None
    if isinstance(token, int) or (token.startswith("@") and token[1:].isdigit()):
        number = token if isinstance(token, int) else int(token[1:])
        if not 0 <= number < len(labels):
            raise AttnscopeError(f"there is no token @{number}", f"the {len(labels)} tokens are numbered from 0")
        return number
    folded = [label.casefold() for label in labels]
    if token.casefold() in folded:
        return folded.index(token.casefold())
    raise AttnscopeError(f"no token is {token!r}", f"the tokens are: {' '.join(labels)[:300]}; or give a position, @3")


def _heads(heads: Sequence[int] | None, n: int, name: str) -> tuple[int, ...]:
    if heads is None:
        return tuple(range(n))
    beyond = [head for head in heads if not 0 <= head < n]
    if beyond or not heads:
        raise AttnscopeError(
            f"there is no head {beyond[0] if beyond else ''}: {name} has {n}", f"they are numbered 0 to {n - 1}"
        )  # fmt: skip
    return tuple(sorted(set(heads)))


def study(
    spec: str, text: str | None, layer: int | None, options: TraceOptions, loading: LoadOptions, *, loops: bool
) -> Trace:
    """Traces heads of a layer on a text, or the worked example if there is no text; in plain loops or by NumPy."""
    if text is None:
        if layer or options.target is not None or options.kind is not None:
            raise UsageError("without a text the worked example is traced, which has one layer", "give a TEXT")
        return trace_example(options.query, options.heads, engine="reference" if loops else loading.engine)
    if layer is None or options.heads is None:
        raise UsageError("the trace of a text shows single heads", "give a layer and heads, such as -L 3 -H 1")
    prompt = Prompt(text, target=options.target)
    source = loading.resolve(spec)
    is_plain = source.folder is not None and not source.file and supports(read_config(source)) is None
    if loops and is_plain:
        from attnscope.models.own.plain import load_plain

        return trace_plain(load_plain(source, "float64"), prompt, layer, options.heads, query=options.query)
    return trace(
        loading.load(source), prompt, layer, options.heads, query=options.query, kind=options.kind, loops=loops
    )
