"""Cut a layer's queries, keys and values into different numbers of heads, and compare the results.

Each head gets d_model / n_heads columns. `core.splitting` cuts and attends; `questions.split` draws.
"""

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core import splitting
from attnscope.core.plain_torch import with_default_torch
from attnscope.core.stepwise import AttentionInputs
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model
from attnscope.questions.split import Split, SplitOptions
from attnscope.results.table import Table
from attnscope.studies.inputs.reading import Prompt
from attnscope.studies.one_layer import read_layer

_MAX_WEIGHTS = 20_000_000
"""How many weights all heads may have together, since all are held at once."""


@with_default_torch
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
        model: A loaded model, see `attnscope.load`; None = the worked example, "The cat sat on mat" with d_model 4.
        text: The text or prompt to run it on.
        layer: The number of the layer.
        options: The numbers of heads, and which heads to leave out; None = the defaults.
        kind: "encoder", "decoder" or "cross"; None = the model's first.

    Returns:
        The record. With the model's own number of heads, weights are those of the model.

    Raises:
        AttnscopeError: The layer's heads cannot be cut otherwise: grouped queries, position biases by head, sinks.
        UsageError: A number of heads does not divide the layer's width.
    """
    options = options or SplitOptions()
    layer_run = read_layer(model, text, layer, kind)
    inputs = layer_run.inputs
    _require_fit(str(layer_run.run["model"]), inputs, options.counts)

    d_model = inputs.Q.shape[1]
    # All heads have one mask, see `_require_fit`: (1, query, key) → (query, key).
    mask = None if inputs.may is None else inputs.may[0]
    # The rows of tables, and the arrays beside them, by the names in `Split`.
    rows: dict[str, list[dict[str, Any]]] = {"heads": [], "counts": [], "drops": []}
    grids: dict[str, list[NDArray[np.float64]]] = defaultdict(list)
    for count in dict.fromkeys(options.counts):
        d_head = d_model // count
        cut = splitting.cut(inputs.Q, inputs.K, inputs.V, count, may=mask)
        rows["counts"].append({"n_heads": count, "d_head": d_head, "scale": d_head**-0.5})
        # (query, key), (query, d_model) and (query,)
        grids["mean_weights"].append(cut.weights.mean(0))
        grids["output"].append(cut.joined)
        grids["disagreement_nats"].append(cut.disagreement_nats)
        # (query, key) of each head
        grids["weights"] += [*cut.weights]

        for head in range(count):
            row = {
                "n_heads": count,
                "head": head,
                "entropy_nats": cut.entropy_nats[head],
                "uniform": cut.uniform[head],
                "rank": cut.rank[head],
                "first_column": head * d_head,
                "last_column": (head + 1) * d_head - 1,
            }
            rows["heads"].append(row)

        # Without a head, its columns of the joined output are 0. So the output changes by the head's output.
        size = np.linalg.norm(cut.joined)
        for head in options.drop:
            if head < count:
                change = cut.heads_out[head]
                l2 = np.linalg.norm(change)
                share = l2 / size if size else float("nan")
                rows["drops"].append({"n_heads": count, "head": head, "l2": l2, "share": share})
                grids["drop_l2"].append(np.linalg.norm(change, axis=1))

    tables = {name: Table.of(Split.TABLES[name], of_table) for name, of_table in rows.items()}
    for name, tokens in (("queries", layer_run.queries), ("keys", layer_run.keys)):
        tables[name] = Table.of_arrays(Split.TABLES[name], token=tokens.labels)
    arrays = {name: np.stack(values) for name, values in grids.items()}
    return Split(layer_run.run, {}, {"text": layer_run.text, "d_model": d_model}, tables, arrays)


def _require_fit(name: str, inputs: AttentionInputs, counts: tuple[int, ...]) -> None:
    """Refuse layers whose heads differ in more than their columns, and numbers of heads that do not divide d_model.

    Args:
        name: The name of the model.
        inputs: The inputs of the attention.
        counts: The wanted numbers of heads.
    """
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
        raise AttnscopeError(
            f"{name} does not scale its scores by 1 / sqrt(d_head)", "choose another model"
        )
    if inputs.may is not None and inputs.may.shape[0] > 1:
        raise AttnscopeError(f"{name} masks its heads each in its own way", "choose another model")
    n_queries, d_model = inputs.Q.shape
    n_weights = sum(counts) * n_queries * len(inputs.K)
    if n_weights > _MAX_WEIGHTS:
        raise AttnscopeError(
            f"the weights of {sum(counts)} heads on {n_queries} tokens are {n_weights:,} numbers",
            "choose fewer heads (--counts) or a shorter text",
        )
    for count in counts:
        if d_model % count:
            divisors = [str(n) for n in range(1, d_model + 1) if d_model % n == 0]
            raise UsageError(
                f"{d_model} columns cannot be cut into {count} heads",
                f"what fits: {', '.join(divisors)}",
            )
