"""`attnscope cost`."""

from typing import Annotated

import typer

from attnscope.cli import groups, options


@groups.command(
    omit=("scale", "cmap"),
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
    model_too: groups.ModelToo = None,
    tokens: Annotated[
        int | None, typer.Option("-n", "--tokens", min=1, help="Length of the text.  [default: the model's limit]")
    ] = None,
    d_model: Annotated[int | None, typer.Option(min=1, help="Width; without a model, or instead of its own.")] = None,
    n_heads: Annotated[int | None, typer.Option(min=1, help="Query heads per layer.")] = None,
    n_layers: Annotated[int | None, typer.Option(min=1, help="Layers.")] = None,
    n_kv_heads: Annotated[int | None, typer.Option(min=1, help="Key/value heads.  [default: as query heads]")] = None,
    d_head: Annotated[int | None, typer.Option(min=1, help="Width of a head.  [default: d_model / n_heads]")] = None,
    d_ff: Annotated[int | None, typer.Option(min=1, help="Width of the feed-forward.  [default: 4 * d_model]")] = None,
    vocab: Annotated[int | None, typer.Option(min=1, help="Tokens in the vocabulary.")] = None,
    dtype: Annotated[str, "Precision of the scores: float32, float16, bfloat16, int8."] = "float16",
    plot: Annotated[bool, "Draw the costs against the length of the text."] = False,
    where: groups.Where,
    drawing: groups.Drawing,
    printing: groups.Printing,
) -> None:
    """Count what attention costs: parameters, multiply-adds, memory and KV cache.

    - `attnscope cost bert-base`
    - `attnscope cost llama-2-7b --tokens 32768 --n-kv-heads 8 --plot`
    - `attnscope cost --d-model 768 --n-heads 12 --n-layers 12`
    """
    from attnscope.output import HOME
    from attnscope.studies.teaching.cost import cost as count
    from attnscope.studies.teaching.cost import find_sizes
    from attnscope.text import slug

    sizes = {
        "d_model": d_model, "n_heads": n_heads, "n_layers": n_layers, "n_kv_heads": n_kv_heads, "d_head": d_head,
        "d_ff": d_ff, "vocab_size": vocab,
    }  # fmt: skip
    output = where.plan("cost", printing, has_folder=plot, **drawing.options())
    costs = count(find_sizes(options.one_model(model, model_too), **sizes), tokens, dtype=dtype)
    output.deliver(costs, HOME / f"cost-{slug(costs.name)}" if plot else None)
