"""Split a layer's queries, keys and values into different numbers of heads, and compare what the heads attend to.

Each head gets d_model / n_heads columns. `core.splitting` splits the columns and computes attention. `questions.split`
holds the result, and draws it.
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

_MAX_ATTENTION_WEIGHTS = 20_000_000
"""How many attention weights all splits may have together, since they are kept in memory at once."""


@with_default_torch
def split(
    model: Model | None = None,
    text: str | Prompt | None = None,
    layer: int = 0,
    options: SplitOptions | None = None,
    *,
    kind: str | None = None,
) -> Split:
    """Split one layer's queries, keys and values for a text into different numbers of heads.

    Args:
        model: A loaded model, see `attnscope.load`; None = the worked example, "The cat sat on mat" with d_model 4.
        text: The text or prompt to run it on.
        layer: The number of the layer.
        options: The numbers of heads to split into, and the heads to drop; None = the defaults.
        kind: "encoder", "decoder" or "cross"; None = the model's first.

    Returns:
        The result. If the model's own number of heads is among the numbers, its weights are those of the model.

    Raises:
        AttnscopeError: The layer cannot be split, since its heads differ in more than their columns: grouped queries,
            position biases per head, or sinks.
        UsageError: A number of heads does not divide d_model.
    """
    options = options or SplitOptions()
    # Run the model. `inputs` are the layer's queries, keys and values, with heads side by side: (token, d_model).
    layer_run = read_layer(model, text, layer, kind)
    inputs = layer_run.inputs
    _require_splittable(str(layer_run.run["model"]), inputs, options.counts)

    d_model = inputs.Q.shape[1]
    # True = the query may attend to the key. All heads have one mask, see `_require_splittable`: (1, query, key) →
    # (query, key).
    mask = None if inputs.may is None else inputs.may[0]
    # The tables and arrays of the result, by the names that `Split` declares. An array is a list of one per split.
    rows_by_table: dict[str, list[dict[str, Any]]] = {"heads": [], "counts": [], "drops": []}
    arrays_by_name: dict[str, list[NDArray[np.float64]]] = defaultdict(list)
    for n_heads in dict.fromkeys(options.counts):
        d_head = d_model // n_heads
        head_split = splitting.split_heads(inputs.Q, inputs.K, inputs.V, n_heads, mask=mask)
        rows_by_table["counts"].append({"n_heads": n_heads, "d_head": d_head, "scale": d_head**-0.5})
        # (query, key), then (query, d_model), the heads' outputs side by side, then (query,)
        arrays_by_name["mean_weights"].append(head_split.weights.mean(0))
        arrays_by_name["output"].append(head_split.concat_output)
        arrays_by_name["disagreement_nats"].append(head_split.disagreement_nats)
        # One (query, key) per head
        arrays_by_name["weights"] += [*head_split.weights]

        for head in range(n_heads):
            row = {
                "n_heads": n_heads,
                "head": head,
                "entropy_nats": head_split.entropy_nats[head],
                "uniform": head_split.n_uniform_rows[head],
                "rank": head_split.rank[head],
                "first_column": head * d_head,
                "last_column": (head + 1) * d_head - 1,
            }
            rows_by_table["heads"].append(row)

        # Dropping a head sets its columns of the joined output to 0. So the output changes by the head's output,
        # (query, d_head). "drop_l2" has an entry per drop; without drops it has none, and is no key.
        output_norm = np.linalg.norm(head_split.concat_output)
        for head in options.drop:
            if head < n_heads:
                change = head_split.head_outputs[head]
                l2 = np.linalg.norm(change)
                share = l2 / output_norm if output_norm else float("nan")
                rows_by_table["drops"].append(
                    {"n_heads": n_heads, "head": head, "l2": l2, "share": share}
                )
                arrays_by_name["drop_l2"].append(np.linalg.norm(change, axis=1))

    tables = {
        name: Table.of(Split.TABLES[name], table_rows) for name, table_rows in rows_by_table.items()
    }
    for name, tokens in (("queries", layer_run.queries), ("keys", layer_run.keys)):
        tables[name] = Table.of_arrays(Split.TABLES[name], token=tokens.labels)
    arrays = {name: np.stack(values) for name, values in arrays_by_name.items()}
    # The second argument is the `corpus`, which is empty: there is one text.
    return Split(layer_run.run, {}, {"text": layer_run.text, "d_model": d_model}, tables, arrays)


def _require_splittable(name: str, inputs: AttentionInputs, head_counts: tuple[int, ...]) -> None:
    """Refuse layers whose heads differ in more than their columns, too many weights, and numbers that do not divide.

    Args:
        name: The name of the model.
        inputs: The inputs of the attention.
        head_counts: The numbers of heads to split into. Each must divide d_model.
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
    # A split scales scores by 1 / sqrt(d_head), where d_head is the width of its queries and of its values.
    if inputs.d_head != inputs.d_value or abs(inputs.scale * inputs.d_head**0.5 - 1) > 1e-6:
        raise AttnscopeError(
            f"{name} does not scale its scores by 1 / sqrt(d_head)", "choose another model"
        )
    if inputs.may is not None and inputs.may.shape[0] > 1:
        raise AttnscopeError(f"{name} masks its heads each in its own way", "choose another model")
    n_queries, d_model = inputs.Q.shape
    n_weights = sum(head_counts) * n_queries * len(inputs.K)
    if n_weights > _MAX_ATTENTION_WEIGHTS:
        raise AttnscopeError(
            f"the weights of {sum(head_counts)} heads on {n_queries} tokens are {n_weights:,} numbers",
            "choose fewer heads (--counts) or a shorter text",
        )
    for n_heads in head_counts:
        if d_model % n_heads:
            divisors = [str(n) for n in range(1, d_model + 1) if d_model % n == 0]
            raise UsageError(
                f"{d_model} columns cannot be cut into {n_heads} heads",
                f"what fits: {', '.join(divisors)}",
            )
