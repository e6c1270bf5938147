"""What attention costs: parameters, MACs and memory, each as a formula with its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from attnscope.errors import AttnscopeError, amount
from attnscope.options import option, options
from attnscope.report.blocks import Block, Curves, Ranking, Report, Series, Words
from attnscope.report.numbers import abbreviate
from attnscope.report.wording import printable
from attnscope.results.result import Result
from attnscope.results.table import Array, Column, Table, count, flag, number, text

GROUPS = {
    "parameters": "parameters",
    "per_token": "MACs per token of a text of {n:,} tokens",
    "per_text": "MACs for the whole text",
    "memory": "memory of the scores",
    "kv_cache": "keys and values kept while writing {n:,} tokens (KV cache)",
}
"""The groups of quantities in their order, and what they are called."""

MAIN = (
    "projections",
    "parameters",
    "projections_per_token",
    "scores_per_token",
    "values_per_token",
    "per_token",
    "scores_bytes",
    "tiled_bytes",
    "kv_cache_own_float16",
)
"""The quantities that are shown without --all."""

EXACT_TO = 2**53
"""Whole numbers up to which float64 holds every one."""


@options
class CostOptions:
    """Whose costs are counted: a model by its configuration, or sizes by hand."""

    model: str | None = option(
        "bert-base, gpt2, gpt3, llama-2-7b, llama-2-70b; or a known name, a folder, a config.json, a Hub id. "
        "Its configuration is read, never its weights.",
        default=None, argument=True,
    )  # fmt: skip
    tokens: int | None = option(
        "Length of the text.  [default: the model's limit]", "-n", "--tokens", default=None, least=1
    )
    d_model: int | None = option("Width; without a model, or instead of its own.", default=None, least=1)
    n_heads: int | None = option("Query heads per layer.", default=None, least=1)
    n_layers: int | None = option("Layers.", default=None, least=1)
    n_kv_heads: int | None = option("Key/value heads.  [default: as query heads]", default=None, least=1)
    dtype: str = option("Precision of the scores: float32, float16, bfloat16, int8.", default="float16")


class Cost(Result):
    """What a model's attention costs.

    Its `options` have the sizes, the length of the text (`n_tokens`), the precision of scores (`dtype`), and notes.
    """

    SCHEMA: ClassVar[str] = "attnscope.cost/2"
    TABLES: ClassVar[Mapping[str, Sequence[Column]]] = {
        "quantities": (
            text("group", "parameters, per_token, per_text, memory or kv_cache"),
            text("name", "such as projections_per_layer"),
            text("what", "what it is, for people"),
            text("formula", "such as 4 · d_model²"),
            text("numbers", "the formula with numbers put in"),
            number("value", "what it comes to", range=(0, None)),
            text("unit", "parameters, MACs, exponentials, bytes, share or times"),
        ),
        "heads": (
            count("n_heads", "how many heads d_model is cut into", label="heads"),
            count("d_head", "columns of each: d_model / n_heads", label="d_head"),
            number("scale", "1 / sqrt(d_head)"),
            count(
                "projections", "parameters of the projections of a layer: 4 · d_model²", label="parameters per layer"
            ),
            count("projections_mqa", "the same with one key/value head", label="with 1 kv head"),
            count("scores_bytes", "memory of the scores of one layer, bytes"),
            flag("chosen", "whether the model has so many"),
        ),
        "lengths": (count("n_tokens", "a length of text"),),
        "curves": (text("panel", "MACs or bytes"), text("what", "what is counted")),
    }
    ARRAYS: ClassVar[Sequence[Array]] = (
        Array("curve_values", "what each curve comes to at each length", axes=("curves", "lengths")),
    )

    @property
    def sizes(self) -> Mapping[str, Any]:
        """The sizes of the model, by their names in a configuration."""
        sizes: Mapping[str, Any] = self.options["sizes"]
        return sizes

    def value(self, name: str) -> int | float:
        """Return what a quantity comes to: a whole number, but for shares.

        Raises:
            AttnscopeError: There is none of that name.
        """
        table = self.table("quantities")
        names = table["name"].tolist()
        if name not in names:
            raise AttnscopeError(f"there is no quantity {name!r}", f"there are: {', '.join(names)}")
        row = names.index(name)
        value = float(table["value"][row])
        return value if table["unit"][row] in ("share", "times") else int(value)

    def __repr__(self) -> str:
        layers = amount(self.sizes["n_layers"] + self.sizes["n_decoder_layers"], "layer")
        heads = amount(self.sizes["n_heads"], "head")
        return f"Cost({self.run['model']!r}, {layers} of {heads}, texts of {amount(self.options['n_tokens'], 'token')})"

    def require_whole(self) -> None:
        """Refuse what `Result` does, and sizes that lack a number."""
        super().require_whole()
        names = ("n_layers", "n_decoder_layers", "n_heads", "n_kv_heads", "d_head", "d_model")
        if not all(isinstance(self.sizes.get(name), int) for name in names):
            raise ValueError("its sizes are none")
        if not isinstance(self.options.get("n_tokens"), int):
            raise ValueError("it does not say for how many tokens it is")

    def report(self, **shown: Any) -> Report:
        """Return attention's share of parameters and of work, then each quantity with its formula."""
        return Report(
            model=printable(self.run.get("model", "")),
            answer=_answer(self),
            blocks=list(_blocks(self)),
            guide=["MAC: a multiplication and an addition in a matrix product; norms and activations are left out"],
            source=f"sizes: {printable(self.run.get('source', ''), 300)}",
            subtitle=_sizes_line(self),
            notes=[printable(note, 400) for note in self.options.get("notes", ())],
        )


def _answer(cost: Cost) -> list[str]:
    """Say what share attention has of parameters and of MACs, and what its memory is."""
    n = f"{cost.options['n_tokens']:,}"
    attention = sum(cost.value(name) for name in ("projections_per_token", "scores_per_token", "values_per_token"))
    share = attention / cost.value("per_token")
    scores = abbreviate(cost.value("scores_bytes"), "bytes").split(" (")[0]
    first = (
        f"{printable(cost.run.get('model', ''))}: attention is {cost.value('attention_share'):.0%} of "
        f"{abbreviate(cost.value('parameters'), '')} parameters, and {share:.0%} of the MACs of a token at {n} tokens"
    )
    memory = f"scores of one layer on {n} tokens: {scores}"
    if "kv_cache_own_float16" in cost.table("quantities")["name"]:
        cache = abbreviate(cost.value("kv_cache_own_float16"), "bytes").split(" (")[0]
        memory += f"; KV cache in float16: {cache}"
    return [first, _sizes_line(cost), memory]


def _sizes_line(cost: Cost) -> str:
    """Say how large the model is."""
    sizes = cost.sizes
    layers = amount(sizes["n_layers"], "layer")
    if sizes["n_decoder_layers"]:
        layers = f"{sizes['n_layers']} encoder and {sizes['n_decoder_layers']} decoder layers"
    shared = "" if sizes["n_kv_heads"] == sizes["n_heads"] else f" on {sizes['n_kv_heads']} key/value heads"
    heads = f"{amount(sizes['n_heads'], 'head')} of {sizes['d_head']}{shared}"
    return f"{printable(sizes.get('kind', ''))}, {layers}, {heads}, d_model {sizes['d_model']}"


def _blocks(cost: Cost) -> Iterator[Block]:
    table = cost.table("quantities")
    names = table["name"].tolist()
    main = [names.index(name) for name in MAIN if name in names]
    short = []
    for value, unit in zip(table["value"].tolist(), table["unit"].tolist(), strict=True):
        short.append(abbreviate(value, unit) + (f" {unit}" if unit in ("parameters", "MACs") else ""))
    is_cache = table["group"] == "kv_cache"
    yield Ranking(
        what="",
        names=np.where(is_cache, np.char.add("KV cache ", table["what"]), table["what"]).tolist(),
        table=table,
        columns=[Words("", short, right=True)],
        order=main,
        most=len(main),
    )
    for group, title in GROUPS.items():
        rows = np.flatnonzero(table["group"] == group).tolist()
        heading = title.format(n=cost.options["n_tokens"])
        if rows:
            yield _quantities(table, rows, heading=heading, printed="with --all")
    heads = cost.table("heads")
    marks = np.where(heads["chosen"], "<", "")
    yield Ranking(
        heading=f"the same d_model of {cost.sizes['d_model']:,} in other heads",
        what="heads",
        names=[f"{n} {mark}".strip() for n, mark in zip(heads["n_heads"], marks, strict=True)],
        table=heads,
        columns=[
            "d_head",
            "scale",
            *(
                Words(heads.columns[name].title, [f"{value:,}" for value in heads[name].tolist()], right=True)
                for name in ("projections", "projections_mqa")
            ),
            Words(
                "scores",
                [abbreviate(value, "bytes").split(" (")[0] for value in heads["scores_bytes"].tolist()],
                right=True,
            ),
        ],
        order=range(len(heads)),
        most=len(heads),
    )
    curves = cost.table("curves")
    for panel, title in (("MACs", "MACs for a text of N tokens"), ("bytes", "memory for a text of N tokens")):
        chosen = np.flatnonzero(curves["panel"] == panel).tolist()
        yield Curves(
            printed="never",
            figure=f"cost-{panel.lower()}",
            title=title,
            y=panel,
            across="N, tokens",
            x=cost.table("lengths")["n_tokens"].tolist(),
            series=[Series(str(curves["what"][row]), np.stack([cost["curve_values"][row]] * 3, -1)) for row in chosen],
            logarithmic=True,
        )


def _quantities(table: Table, rows: Sequence[int], **how: Any) -> Ranking:
    """Show quantities with their formulas."""
    exact = [_exact(*pair) for pair in zip(table["value"].tolist(), table["unit"].tolist(), strict=True)]
    formulas = []
    for formula, numbers in zip(table["formula"].tolist(), table["numbers"].tolist(), strict=True):
        formulas.append(printable(f"{formula} = {numbers}" if numbers else formula, 200))
    return Ranking(
        what="",
        names=table["what"].tolist(),
        table=table,
        columns=[Words("value", exact, right=True), Words("formula", formulas, wraps=True)],
        order=rows,
        most=len(rows),
        **how,
    )


def _exact(value: float, unit: str) -> str:
    """Return a whole number with all its digits, as far as they are known."""
    is_whole = unit not in ("share", "times") and value <= EXACT_TO
    return f"{value:,.0f}" if is_whole else abbreviate(value, unit)
