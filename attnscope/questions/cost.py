"""Declare the result on what attention costs: parameters, MACs and memory, each with its formula; and its report."""

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

_GROUPS = {
    "parameters": "parameters",
    "per_token": "MACs per token of a text of {n:,} tokens",
    "memory": "memory for a text of {n:,} tokens",
}
"""The headings of the groups of quantities, in the order of the report; n is the length of the text."""


def _read_sizes(listed: str) -> dict[str, int]:
    """Return the sizes in a list such as "d_model=768,n_heads=12", by name."""
    sizes = {}
    for entry in listed.split(","):
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
    """Hold the parameters, operations and memory of a model's attention.

    Its `options` have the sizes, the length of the text (`n_tokens`), the precision (`dtype`) and notes.
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
        """Return the sizes of the model, by their names in a configuration."""
        sizes: Mapping[str, Any] = self.options["sizes"]
        return sizes

    def value(self, name: str) -> int | float:
        """Return the value of a quantity, such as "projections_per_layer": a whole number, unless it is a share.

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
        """Refuse what `Result` does, and sizes that lack a number."""
        super().require_whole()
        names = ("n_layers", "n_decoder_layers", "n_heads", "n_kv_heads", "d_head", "d_model")
        if not all(isinstance(self.sizes.get(name), int) for name in names):
            raise ValueError("its sizes are none")
        if not isinstance(self.options.get("n_tokens"), int):
            raise ValueError("it does not say for how many tokens it is")

    def report(self, **shown: Any) -> Report:
        """Return the report: attention's share of parameters and of MACs, then each quantity with its formula."""
        guide = "MAC: a multiplication and an addition in a matrix product; norms and activations are left out"
        return report_on(
            self,
            _answer(self),
            _blocks(self),
            [guide],
            source=f"sizes: {printable(self.run.get('source', ''), 300)}",
            subtitle=_sizes_line(self),
            notes=[printable(note, 400) for note in self.options.get("notes", ())],
        )


def _answer(cost: Cost) -> list[str]:
    """Say attention's share of parameters and MACs, the sizes of the model, and the memory that attention takes."""
    n = f"{cost.options['n_tokens']:,}"
    # MACs of attention per token, as a share of all MACs.
    quantities = ("projections_per_token", "scores_per_token", "values_per_token")
    share = sum(map(cost.value, quantities)) / cost.value("per_token")
    # Of "9.66 GB (9.00 GiB)" only the first unit.
    scores = abbreviate(cost.value("scores_bytes"), "bytes").split(" (")[0]
    first = (
        f"{printable(cost.run.get('model', ''))}: attention is {cost.value('attention_share'):.0%} of "
        f"{abbreviate(cost.value('parameters'), '')} parameters, and {share:.0%} of the multiply-accumulates "
        f"(MACs) of a token at {n} tokens"
    )
    memory = f"memory for the scores of one layer on {n} tokens in {cost.options['dtype']}: {scores}"
    if "kv_cache_bytes" in cost.table("quantities")["name"]:
        memory += f"; KV cache: {abbreviate(cost.value('kv_cache_bytes'), 'bytes')}"
    return [first, _sizes_line(cost), memory]


def _sizes_line(cost: Cost) -> str:
    """Say how many layers and heads the model has, and their sizes."""
    sizes = cost.sizes
    if sizes["n_decoder_layers"]:
        layers = f"{sizes['n_layers']} encoder and {sizes['n_decoder_layers']} decoder layers"
    else:
        layers = amount(sizes["n_layers"], "layer")
    heads = f"{amount(sizes['n_heads'], 'head')} of {sizes['d_head']}"
    if sizes["n_kv_heads"] != sizes["n_heads"]:
        heads += f" on {sizes['n_kv_heads']} key/value heads"
    return f"{printable(sizes.get('kind', ''))}, {layers}, {heads}, d_model {sizes['d_model']}"


def _blocks(cost: Cost) -> Iterator[Block]:
    """Show a table for each group of quantities, then with --all the formula behind each number."""
    table = cost.table("quantities")
    names = table["what"].tolist()
    formulas = []
    for formula, numbers in zip(table["formula"].tolist(), table["numbers"].tolist(), strict=True):
        formulas.append(printable(f"{formula} = {numbers}" if numbers else formula, 200))
    values = list(map(abbreviate, table["value"].tolist(), table["unit"].tolist()))
    value_column = WordsColumn("value", values, right=True)
    for group, title in _GROUPS.items():
        rows = np.flatnonzero(table["group"] == group).tolist()
        yield Ranking(
            heading=title.format(n=cost.options["n_tokens"]),
            header="",
            names=names,
            table=table,
            columns=[value_column],
            order=rows,
            n_printed=len(rows),
        )
    yield Ranking(
        heading="formulas",
        printed="with --all",
        header="",
        names=names,
        table=table,
        columns=[value_column, WordsColumn("formula", formulas, wraps=True)],
    )
