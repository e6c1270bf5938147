"""Cut the same queries, keys and values into more and fewer heads, and compare the results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core import example, splitting
from attnscope.core.plain_torch import with_plain_torch
from attnscope.core.stepwise import Inputs
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model
from attnscope.questions.split import Split, SplitOptions
from attnscope.results.table import Table
from attnscope.studies.inputs.provenance import run_of, run_of_example
from attnscope.studies.inputs.reading import Prompt, read

Array = NDArray[np.float64]

_MOST_NUMBERS = 20_000_000


@with_plain_torch
def split_example(options: SplitOptions | None = None) -> Split:
    """Return the worked example with different numbers of heads.

    Raises:
        UsageError: A number of heads does not divide 4.
    """
    options = options or SplitOptions()
    _require_fit(options.counts, example.Q.shape[1], UsageError)
    inputs = Inputs(example.Q, example.K, example.V, example.N_HEADS, example.N_HEADS, 1.0)
    return _split(inputs, options, run_of_example(), " ".join(example.TOKENS), example.TOKENS, example.TOKENS)


@with_plain_torch
def split(
    model: Model | None = None,
    text: str | Prompt | None = None,
    layer: int = 0,
    options: SplitOptions | None = None,
    *,
    kind: str | None = None,
) -> Split:
    """Split one layer's queries, keys and values on a text into different numbers of heads.

    Args:
        model: A loaded model, see `attnscope.load`; None = the worked example, see `split_example`.
        text: What to run it on.
        layer: Which layer.
        options: How they are cut.
        kind: "encoder", "decoder" or "cross"; None = the model's first.

    Returns:
        The record. With the model's own number of heads it has the model's own weights.

    Raises:
        AttnscopeError: The layer's heads cannot be cut otherwise: grouped queries, position biases by head, sinks; or a
            number of heads does not divide its width.
    """
    from attnscope.studies.trace import layer_inputs

    if model is None:
        return split_example(options)
    if text is None:
        raise UsageError("no text is given", "a model is looked at on a text")
    options = options or SplitOptions()
    kind = model.info.choose_kind(kind)
    prompt = Prompt(text) if isinstance(text, str) else text
    reading = read(model, prompt)
    inputs, queries, keys, notes = layer_inputs(model, reading, kind, layer)
    # Refuse layers whose heads cannot be cut otherwise.
    name = model.info.name
    if inputs.n_kv_heads != inputs.n_heads:
        raise AttnscopeError(
            f"{name} has {inputs.n_heads} query heads on {inputs.n_kv_heads} key/value heads: its queries are wider "
            "than its keys, and cannot be cut otherwise",
            "choose a model without grouped queries",
        )
    if inputs.bias is not None or inputs.softcap is not None or inputs.sinks is not None:
        raise AttnscopeError(
            f"{name} adds to its scores what belongs to single heads (position biases, soft cap or sinks)",
            "choose a model without",
        )
    if inputs.d_head != inputs.d_value or abs(inputs.scale * inputs.d_head**0.5 - 1) > 1e-6:
        raise AttnscopeError(f"{name} does not scale its scores by 1 / sqrt(d_head)", "choose another model")
    if inputs.may is not None and inputs.may.shape[0] > 1:
        raise AttnscopeError(f"{name} masks its heads each in its own way", "choose another model")
    numbers = sum(options.counts) * len(queries) * len(keys)
    if numbers > _MOST_NUMBERS:
        raise AttnscopeError(
            f"the weights of {sum(options.counts)} heads on {len(queries)} tokens are {numbers:,} numbers",
            "choose fewer heads (--counts) or a shorter text",
        )
    run = run_of(model.info, (*reading.notes, *notes))
    return _split(inputs, options, run, prompt.text, queries, keys)


def _split(
    inputs: Inputs, options: SplitOptions, run: dict[str, Any], text: str, queries: Sequence[str], keys: Sequence[str]
) -> Split:
    """Cut queries, keys and values (token, d_model) into each number of heads."""
    d_model = inputs.Q.shape[1]
    may = None if inputs.may is None else inputs.may[0]
    _require_fit(options.counts, d_model, AttnscopeError)
    # Cut into each number of heads. Weights are (head, query, key), outputs (query, d_model).
    rows: dict[str, list[dict[str, Any]]] = {"heads": [], "counts": [], "drops": []}
    grids: dict[str, list[Array]] = defaultdict(list)
    for count in dict.fromkeys(options.counts):
        d_head = d_model // count
        cut = splitting.cut(inputs.Q, inputs.K, inputs.V, count, may=may)
        rows["counts"].append({"n_heads": count, "d_head": d_head, "scale": d_head**-0.5})
        grids["mean_weights"].append(cut.weights.mean(0))
        grids["output"].append(cut.joined)
        grids["disagreement_nats"].append(cut.disagreement_nats)

        # Its heads.
        for head, (first, end) in enumerate(cut.columns.tolist()):
            facts = {"n_heads": count, "head": head, "first_column": first, "last_column": end - 1}
            facts |= {name: getattr(cut, name)[head] for name in ("entropy_nats", "uniform", "rank")}
            rows["heads"].append(facts)
        grids["weights"] += [*cut.weights]

        # What changes without some of them.
        whole = float(np.linalg.norm(cut.joined))
        for head in options.drop:
            if head < count:
                change = cut.joined - _without(cut, head)
                l2 = float(np.linalg.norm(change))
                share = l2 / whole if whole else float("nan")
                rows["drops"].append({"n_heads": count, "head": head, "l2": l2, "share": share})
                grids["drop_l2"].append(np.linalg.norm(change, axis=1))
    # Store the rows and grids.
    tables = {name: Table.of(Split.TABLES[name], listed) for name, listed in rows.items()}
    for name, tokens in (("queries", queries), ("keys", keys)):
        tables[name] = Table.of_arrays(Split.TABLES[name], token=list(tokens))
    arrays = {name: np.stack(values) for name, values in grids.items()}
    return Split(run, {}, {"text": text, "d_model": d_model}, tables, arrays)


def _require_fit(counts: Sequence[int], d_model: int, error: type[AttnscopeError]) -> None:
    """Refuse numbers of heads that columns cannot be cut into, by an error of this kind."""
    if unfit := [count for count in counts if d_model % count]:
        fits = ", ".join(str(n) for n in range(1, d_model + 1) if d_model % n == 0)
        raise error(f"{d_model} columns cannot be cut into {unfit[0]} heads", f"what fits: {fits}")


def _without(cut: splitting.Cut, head: int) -> Array:
    """Return the output where a head puts out zeros, (query, output)."""
    heads_out = cut.heads_out.copy()
    heads_out[head] = 0
    return heads_out.transpose(1, 0, 2).reshape(heads_out.shape[1], -1)
