"""Compute the cost of a model's attention from its sizes alone: parameters, MACs and memory.

A MAC (multiply-accumulate) is one multiplication and one addition in a matrix product, two floating-point operations.
Each *quantity*, such as the size of the KV cache, is declared once, as a formula that the user also sees. `Sizes` has
the numbers of layers, heads, dimensions and so on.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from attnscope.core.plain_torch import with_default_torch
from attnscope.errors import AttnscopeError, UsageError, amount, require_choice
from attnscope.models import read_configuration
from attnscope.models.catalog import resolve
from attnscope.models.sizes import PRESETS, Sizes, change_sizes, sizes_from_options, sizes_of
from attnscope.questions.cost import Cost
from attnscope.results.storage import to_plain
from attnscope.results.table import Table

BYTES_BY_PRECISION = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
"""Precision -> the bytes of a number."""

DEFAULT_N_TOKENS = 2048
"""The length of the text if the user gives none and the model has no limit."""

SIZE_OPTIONS = ("d_model", "n_heads", "n_layers", "n_kv_heads", "d_head", "d_ff", "vocab_size")
"""The sizes of a model that a user may replace."""


class CostFormula(NamedTuple):
    """Declare a quantity. A quantity that is 0 is not listed.

    Attributes:
        name: The name by which later formulas use it.
        what: Its description for the user.
        formula: How it is computed. It may name the numbers that `_make_facts` returns, and earlier quantities.
    """

    name: str
    what: str
    formula: str


ATTENTION_PARAMETERS = (
    CostFormula(
        "projections_per_layer",
        "W_Q, W_K, W_V and W_O of one layer",
        "2 · d_model · d_head · (n_heads + n_kv_heads)",
    ),
    CostFormula("projections", "projections, all layers", "attentions · projections_per_layer"),
    CostFormula(
        "projection_biases",
        "biases of projections, all layers",
        "attentions · (qkv_bias · d_head · (n_heads + 2 · n_kv_heads) + o_bias · d_model)",
    ),
)

OTHER_PARAMETERS = (
    CostFormula(
        "feed_forward",
        "feed-forward, all layers",
        "layers · (ff_matrices · d_model · d_ff + ff_bias · ((ff_matrices - 1) · d_ff + d_model))",
    ),
    CostFormula("embeddings", "token embeddings", "vocab_size · d_embedding"),
    CostFormula(
        "position_embeddings",
        "position and segment embeddings",
        "(n_positions + n_segments) · d_embedding",
    ),
    CostFormula(
        "embedding_projection", "from embeddings to layers", "is_projected · (d_embedding + 1) · d_model"
    ),
    CostFormula("norms", "norms", "norm_vectors · n_layers · d_model + norms_outside"),
    CostFormula("pooler", "pooler", "pooler · (d_model² + d_model)"),
    CostFormula("unembedding", "unembedding", "is_own · vocab_size · d_model"),
)
"""Parameters outside attention. They are computed only if `Sizes.counted` is None."""

ATTENTION_SHARE = CostFormula(
    "attention_share", "attention's share of them", "(projections + projection_biases) / parameters"
)

MACS_PER_TOKEN = (
    CostFormula(
        "projections_per_token",
        "projections (W_Q, W_K, W_V, W_O)",
        "attentions · projections_per_layer",
    ),
    CostFormula("scores_per_token", "scores (q · k with N keys)", "attentions · n_heads · d_head · N"),
    CostFormula(
        "values_per_token", "weighted values (with N values)", "attentions · n_heads · d_head · N"
    ),
    CostFormula("feed_forward_per_token", "feed-forward", "layers · ff_matrices · d_model · d_ff"),
    CostFormula("unembedding_per_token", "unembedding", "is_unembedded · d_model · vocab_size"),
)

MEMORY_BYTES = (
    CostFormula("scores_bytes", "scores of one layer, kept whole", "n_heads · N² · bytes"),
    CostFormula("tiled_bytes", "tiled attention: log-sum-exp of one layer (float32)", "n_heads · N · 4"),
    CostFormula("kv_cache_bytes", "KV cache", "2 · caching_layers · n_kv_heads · d_head · N · bytes"),
)

_NAME = re.compile("[A-Za-z_]+")
"""A name in a formula."""


def find_sizes(spec: str | None = None, **changes: int | None) -> Sizes:
    """Return the sizes of a preset or of a model's configuration, or sizes given by hand.

    Args:
        spec: A preset, a known name, a folder, a config.json, or a Hub id; None = all sizes are in `changes`.
        changes: New values for some of `SIZE_OPTIONS`; None = the model's own value.

    Raises:
        UsageError: There is neither a model nor d_model, n_heads and n_layers.
        AttnscopeError: There is no such model, or its sizes make no sense.
    """
    for name in changes:
        require_choice("size", name, SIZE_OPTIONS)
    if spec is None:
        if any(changes.get(name) is None for name in ("d_model", "n_heads", "n_layers")):
            raise UsageError(
                "no model is given, nor all of --sizes d_model, n_heads and n_layers",
                f"presets: {', '.join(PRESETS)}; or a folder, or a Hub id",
            )
        return sizes_from_options(**changes)  # type: ignore[arg-type]  # these three are not None
    if spec in PRESETS:
        return change_sizes(PRESETS[spec], **changes)
    try:
        source = resolve(spec, config_only=True)
    except AttnscopeError as error:
        # Suggest a preset with a similar name. If there is none, append all presets to the error's own hint.
        similar_names = difflib.get_close_matches(spec.lower(), PRESETS, n=1, cutoff=0.75)
        if similar_names:
            hint = f"did you mean the preset {similar_names[0]}?"
        else:
            # The hint may be empty.
            hint = f"{error.hint}; presets: {', '.join(PRESETS)}".removeprefix("; ")
        raise AttnscopeError(error.message, hint) from None
    return change_sizes(sizes_of(read_configuration(source), source.name, source.origin), **changes)


@with_default_torch
def cost(
    model: str | Sizes, n_tokens: int | None = None, *, dtype: str = "float16", **changes: int | None
) -> Cost:
    """Count what a model's attention costs.

    Only MACs of matrix products count: norms, activations and additions are small.

    Args:
        model: The sizes of the model, or a `spec` as `find_sizes` takes it.
        n_tokens: The length of the text, N; None = the model's limit, or 2048 if it has none.
        dtype: The precision of scores, keys and values: float32, float16, bfloat16 or int8.
        changes: Sizes that replace the model's, such as n_kv_heads=8.

    Raises:
        AttnscopeError: There is no such model, or its sizes make no sense.
        UsageError: The precision is unknown, or the text has no tokens.
    """
    require_choice("precision", dtype, tuple(BYTES_BY_PRECISION))
    if n_tokens is not None and n_tokens < 1:
        raise UsageError(f"a text of {n_tokens} tokens is none", "give at least 1")
    if not isinstance(model, str | Sizes):
        raise UsageError(
            "a loaded model has no list of sizes", "give the name or the folder that it was loaded from"
        )
    sizes = find_sizes(model, **changes) if isinstance(model, str) else change_sizes(model, **changes)
    n_tokens = n_tokens or sizes.max_tokens or DEFAULT_N_TOKENS
    costs = _CostList(_make_facts(sizes, n_tokens, dtype))

    # List the parameters of attention.
    costs.compute(ATTENTION_PARAMETERS, "parameters", unit="parameters")
    # List all parameters: the number that was counted in the model, or else the sum of its parts.
    what = "all parameters"
    if sizes.counted is None:
        costs.compute(OTHER_PARAMETERS, "parameters", unit="parameters")
        # The projections of one layer are listed too, but they are part of the projections of all layers.
        total = costs.sum("parameters") - costs.facts["projections_per_layer"]
        formula = "the sum"
        if not sizes.vocab_size:
            what = "all but the embeddings"
    else:
        total = sizes.counted
        formula = "counted in the model, built without weights"
    costs.put(CostFormula("parameters", what, formula), total, "parameters", unit="parameters")
    costs.compute([ATTENTION_SHARE], "parameters", unit="share")

    # List MACs, and memory.
    costs.compute(MACS_PER_TOKEN, "per_token", unit="MACs")
    what = "all MACs, per token"
    if sizes.kind == "encoder-decoder":
        what = "all MACs, one token of the source and one of the target"
    macs = CostFormula("per_token", what, "the sum")
    costs.put(macs, costs.sum("per_token"), "per_token", unit="MACs")
    costs.compute(MEMORY_BYTES, "memory", unit="bytes")

    tables = {"quantities": Table.of(Cost.TABLES["quantities"], costs.rows)}
    options = {
        "sizes": to_plain(asdict(sizes)),
        "n_tokens": n_tokens,
        "dtype": dtype,
        "notes": _write_notes(sizes, n_tokens),
    }
    # A cost has neither a corpus nor arrays.
    return Cost({"model": sizes.name, "source": sizes.source}, {}, options, tables, {})


class _CostList:
    """Compute quantities one after the other, and list them.

    Attributes:
        facts: Name -> number, for all names in formulas: sizes, and all quantities so far.
        rows: The rows of the table of quantities. A `group` of rows, such as "memory", is a section of the report.
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.rows: list[dict[str, Any]] = []

    def compute(self, quantities: Sequence[CostFormula], group: str, *, unit: str) -> None:
        """Compute quantities by their formulas, and list them."""
        for quantity in quantities:
            # Replace names by numbers: the table shows the formula in this form, such as "12 · 1,024² · 2".
            numbers = _NAME.sub(lambda match: f"{self.facts[match[0]]:,}", quantity.formula)
            # Turn it into a Python expression of numbers alone. All formulas stand in this file, so `eval` is safe.
            expression = numbers.replace(",", "").replace("·", "*").replace("²", "**2")
            value = eval(expression, {"__builtins__": {}})
            self.put(quantity, value, group, numbers, unit=unit)

    def put(
        self, quantity: CostFormula, value: float, group: str, numbers: str = "", *, unit: str
    ) -> None:
        """List a quantity, unless its value is 0. `numbers` is its formula in numbers; "" = it has no such formula."""
        self.facts[quantity.name] = value
        if value:
            row = {"group": group, "numbers": numbers, "value": value, "unit": unit}
            self.rows.append(row | quantity._asdict())

    def sum(self, group: str) -> int:
        """Return the sum of the values of a group so far."""
        return sum(int(row["value"]) for row in self.rows if row["group"] == group)


def _make_facts(sizes: Sizes, n_tokens: int, dtype: str) -> dict[str, Any]:
    """Return the numbers that formulas name: all sizes, and numbers derived from them. False and True are 0 and 1."""
    facts = {name: int(value) for name, value in asdict(sizes).items() if isinstance(value, int)}
    has_vocabulary = bool(sizes.vocab_size)
    # The width of the norms outside layers. In an encoder it is the norm of the embeddings.
    width_outside = sizes.d_embedding if sizes.kind == "encoder" else sizes.d_model
    return facts | {
        "N": n_tokens,
        "bytes": BYTES_BY_PRECISION[dtype],
        "attentions": sizes.n_attentions,
        "caching_layers": sizes.caching_layers,
        "layers": sizes.n_layers + sizes.n_decoder_layers,
        "norms_outside": sizes.norm_vectors_outside * width_outside if sizes.norm_vectors else 0,
        "is_projected": int(has_vocabulary and sizes.d_embedding != sizes.d_model),
        "is_own": int(sizes.unembedding == "own"),
        "is_unembedded": int(bool(sizes.unembedding)),
    }


def _write_notes(sizes: Sizes, n_tokens: int) -> list[str]:
    """Return notes for the user on how costs are counted."""
    notes = list(sizes.notes)
    if sizes.kind != "encoder":
        notes.append(
            "a causal mask needs half of the scores and values of a text, N·(N + 1)/2 of N²; kernels that skip the "
            "rest compute so much, dense ones all"
        )
    if sizes.kind == "encoder-decoder":
        notes.append("attentions: those of encoder layers, and two of each decoder layer")
    if sizes.max_tokens and n_tokens > sizes.max_tokens:
        limit = amount(sizes.max_tokens, "token")
        notes.append(f"{sizes.name} takes {limit}; {n_tokens:,} are asked for")
    return notes
