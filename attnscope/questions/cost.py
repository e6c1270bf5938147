"""Declare the result of `attnscope cost`, and its report: the parameters, MACs and memory of a model's attention.

A MAC is a multiply-accumulate: one multiplication and one addition in a matrix product. Each quantity has its formula.
`studies.cost` computes the quantities.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from attnscope.errors import UsageError, amount, require_choice
from attnscope.options import option, options
from attnscope.report.blocks import Block, Ranking, Report, WordsColumn
from attnscope.report.numbers import abbreviate
from attnscope.report.wording import printable, report_on
from attnscope.results.result import Result
from attnscope.results.table import Column, number, text

_GROUP_HEADINGS = {
    "parameters": "parameters",
    "per_token": "MACs per token of a text of {n:,} tokens",
    "memory": "memory for a text of {n:,} tokens",
}
"""The heading of each group of quantities, in the order of the report; {n} is the length of the text in tokens."""


def _read_sizes(sizes_text: str) -> dict[str, int]:
    """Parse a list such as "d_model=768,n_heads=12" into sizes by name."""
    sizes = {}
    for entry in sizes_text.split(","):
        name, _, size = entry.partition("=")
        if not size.strip().isdecimal() or int(size) < 1:
            raise UsageError(
                f"{entry!r} is no size", "such as --sizes d_model=768,n_heads=12,n_layers=12"
            )
        sizes[name.strip()] = int(size)
    return sizes


@options
class CostOptions:
    """Choose the model whose costs are counted, or give sizes by hand."""

    model: str | None = option(
        "bert-base, gpt2, gpt3, llama-2-7b, llama-2-70b; or a known name, a folder, a config.json, a Hub id. "
        "Its configuration is read, never its weights.",
        default=None,
        argument=True,
    )
    tokens: int | None = option(
        "Length of the text.  [default: the model's limit]", "-n", "--tokens", default=None, least=1
    )
    sizes: Mapping[str, int] = option(
        "Sizes without a model, or instead of its own: d_model=768,n_heads=12,n_layers=12,n_kv_heads=12.",
        default_factory=dict,
        read=_read_sizes,
    )
    dtype: str = option(
        "Precision of scores, keys and values: float32, float16, bfloat16, int8.", default="float16"
    )


class Cost(Result):
    """Hold the parameters, MACs and memory of a model's attention.

    `options` holds the `sizes` of the model, the length of the text (`n_tokens`), the precision (`dtype`) and `notes`.
    """

    SCHEMA: ClassVar[str] = "attnscope.cost/2"
    TABLES: ClassVar[Mapping[str, Sequence[Column]]] = {
        "quantities": (
            text("group", "parameters, per_token or memory"),
            text("name", "such as projections_per_layer"),
            text("what", "what it is, for people"),
            text("formula", "such as n_heads · N² · bytes"),
            text("numbers", "the formula with numbers put in"),
            number("value", "what it comes to", range=(0, None)),
            text("unit", "parameters, MACs, bytes or share"),
        ),
    }

    @property
    def sizes(self) -> Mapping[str, Any]:
        """Return the sizes of the model by name, such as `n_heads`. `kind`, the architecture, is the only text."""
        sizes: Mapping[str, Any] = self.options["sizes"]
        return sizes

    def value(self, name: str) -> int | float:
        """Return the value of a quantity, such as "projections_per_layer": a float if its unit is "share", else an int.

        Raises:
            AttnscopeError: There is no quantity of that name.
        """
        table = self.table("quantities")
        names = table["name"].tolist()
        require_choice("quantity", name, names)
        row = names.index(name)
        value = float(table["value"][row])
        return value if table["unit"][row] == "share" else int(value)

    def require_whole(self) -> None:
        """Raise ValueError if the result is damaged: checks of `Result`, the sizes, and the length of the text."""
        super().require_whole()
        names = ("n_layers", "n_decoder_layers", "n_heads", "n_kv_heads", "d_head", "d_model")
        if not all(isinstance(self.sizes.get(name), int) for name in names):
            raise ValueError("its sizes are none")
        if not isinstance(self.options.get("n_tokens"), int):
            raise ValueError("it does not say for how many tokens it is")

    def report(self, **shown: Any) -> Report:
        """Return the report: attention's share of parameters and of MACs, then each quantity with its formula.

        Options in `shown` change nothing: this report is always whole.
        """
        guide = "MAC: a multiplication and an addition in a matrix product; norms and activations are left out"
        return report_on(
            self,
            _summarize(self),
            _yield_blocks(self),
            [guide],
            source=f"sizes: {printable(self.run.get('source', ''), 300)}",
            subtitle=_describe_sizes(self),
            notes=[printable(note, 400) for note in self.options.get("notes", ())],
        )


def _summarize(cost: Cost) -> list[str]:
    """Say attention's share of parameters and MACs, the sizes of the model, and the memory that attention takes."""
    length = f"{cost.options['n_tokens']:,}"
    # MACs of attention per token ÷ all MACs per token.
    attention_quantities = ("projections_per_token", "scores_per_token", "values_per_token")
    mac_share = sum(map(cost.value, attention_quantities)) / cost.value("per_token")
    # `abbreviate` returns two units, such as "9.66 GB (9.00 GiB)": keep the first.
    scores_memory = abbreviate(cost.value("scores_bytes"), "bytes").split(" (")[0]
    model_line = (
        f"{printable(cost.run.get('model', ''))}: attention is {cost.value('attention_share'):.0%} of "
        f"{abbreviate(cost.value('parameters'), '')} parameters, and {mac_share:.0%} of the multiply-accumulates "
        f"(MACs) of a token at {length} tokens"
    )
    memory_line = f"memory for the scores of one layer on {length} tokens in {cost.options['dtype']}: {scores_memory}"
    if "kv_cache_bytes" in cost.table("quantities")["name"]:
        memory_line += f"; KV cache: {abbreviate(cost.value('kv_cache_bytes'), 'bytes')}"
    return [model_line, _describe_sizes(cost), memory_line]


def _describe_sizes(cost: Cost) -> str:
    """Say how many layers and heads the model has, and their sizes."""
    sizes = cost.sizes
    # Only an encoder-decoder counts its decoder layers apart.
    if sizes["n_decoder_layers"]:
        layers = f"{sizes['n_layers']} encoder and {sizes['n_decoder_layers']} decoder layers"
    else:
        layers = amount(sizes["n_layers"], "layer")
    heads = f"{amount(sizes['n_heads'], 'head')} of {sizes['d_head']}"
    if sizes["n_kv_heads"] != sizes["n_heads"]:
        heads += f" on {sizes['n_kv_heads']} key/value heads"
    return f"{printable(sizes.get('kind', ''))}, {layers}, {heads}, d_model {sizes['d_model']}"


def _yield_blocks(cost: Cost) -> Iterator[Block]:
    """Yield a table for each group of quantities, then the formula behind each number, which needs --all."""
    table = cost.table("quantities")
    descriptions = table["what"].tolist()
    formula_lines = []
    for formula, numbers in zip(table["formula"].tolist(), table["numbers"].tolist(), strict=True):
        formula_lines.append(printable(f"{formula} = {numbers}" if numbers else formula, 200))
    values = list(map(abbreviate, table["value"].tolist(), table["unit"].tolist()))
    value_column = WordsColumn("value", values, is_right_aligned=True)
    for group, heading in _GROUP_HEADINGS.items():
        group_rows = np.flatnonzero(table["group"] == group).tolist()
        yield Ranking(
            heading=heading.format(n=cost.options["n_tokens"]),
            header="",
            names=descriptions,
            table=table,
            columns=[value_column],
            order=group_rows,
            n_printed=len(group_rows),
        )
    yield Ranking(
        heading="formulas",
        printed="with --all",
        header="",
        names=descriptions,
        table=table,
        columns=[value_column, WordsColumn("formula", formula_lines, wraps=True)],
    )
