"""`attnscope cost`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.cli import groups, options

if TYPE_CHECKING:
    from attnscope.records.cost import Cost


@groups.command(
    omit=("quiet",),
    out="A folder for cost.json and figures.  [default with --plot: attnscope-out]",
    formats="Files: several of json, png, svg, pdf.  [default: json,png]",
)
def cost(
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            help="bert-base, gpt2, gpt3, llama-2-7b, llama-2-70b; or a known name, a folder, a config.json, a Hub id. "
            "Its configuration is read, never its weights.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("-n", "--tokens", min=1, help="Length of the text.  [default: the model's limit]")
    ] = None,
    d_model: Annotated[int | None, typer.Option(min=1, help="Width; without a model, or instead of its own.")] = None,
    n_heads: Annotated[int | None, typer.Option(min=1, help="Query heads a layer.")] = None,
    n_layers: Annotated[int | None, typer.Option(min=1, help="Layers.")] = None,
    n_kv_heads: Annotated[int | None, typer.Option(min=1, help="Key/value heads.  [default: as query heads]")] = None,
    d_head: Annotated[int | None, typer.Option(min=1, help="Width of a head.  [default: d_model / n_heads]")] = None,
    d_ff: Annotated[int | None, typer.Option(min=1, help="Width of the feed-forward.  [default: 4 * d_model]")] = None,
    vocab: Annotated[int | None, typer.Option(min=1, help="Tokens in the vocabulary.")] = None,
    dtype: Annotated[str, "Precision of the scores: float32, float16, bfloat16, int8."] = "float16",
    plot: Annotated[bool, "Draw the costs against the length of the text."] = False,
    where: groups.Where,
    printing: groups.Printing,
) -> None:
    """Count what attention costs: parameters, multiply-adds, memory of scores and KV cache, with formulas.

    - `attnscope cost bert-base`
    - `attnscope cost llama-2-7b --tokens 32768 --n-kv-heads 8 --plot`
    - `attnscope cost --d-model 768 --n-heads 12 --n-layers 12`
    """
    from attnscope.studies.cost_files import CostOrder, counted

    sizes = {
        "d_model": d_model, "n_heads": n_heads, "n_layers": n_layers, "n_kv_heads": n_kv_heads, "d_head": d_head,
        "d_ff": d_ff, "vocab_size": vocab,
    }  # fmt: skip
    record, paths = counted(CostOrder(model, tokens, dtype, sizes, plot, **vars(where)))
    print_cost(record, paths, printing.json)


def print_cost(record: "Cost", paths: list[Path], json: bool) -> None:
    """The result on stdout: one JSON document; else the numbers, then the paths."""
    if json:
        options.print_document(record.as_json(), paths)
        return
    from attnscope.views.cost_terminal import table
    from attnscope.views.plain_text import open_console

    console = open_console(highlight=False)
    console.print(table(record, console))
    options.print_paths(paths)


def show_saved(saved: options.Saved) -> None:
    """Shows costs again; with a folder, writes their files there."""
    from attnscope.records.cost import load
    from attnscope.studies.cost_files import drawn
    from attnscope.studies.inputs import named_formats
    from attnscope.views.figures import FIGURE_FORMATS

    formats = named_formats(saved.formats or "json,png", ("json", *FIGURE_FORMATS))
    loaded = load(saved.record)
    print_cost(loaded, [] if saved.out is None else drawn(loaded, saved.out, formats), saved.json)
