"""`attnscope split`."""

from typing import Annotated

import typer

from attnscope.cli import groups
from attnscope.errors import UsageError
from attnscope.options import numbers_from


@groups.command(
    omit=("scale", "cmap"),
    text="A text; `-` reads stdin.  [default: the worked example]",
    out="A folder for the record and a figure.",
    formats="Files: several of json, png, svg, pdf.  [default: json,png]",
)
def split(
    *,
    one: groups.OneText,
    counts: Annotated[str, "Numbers of heads to cut into."] = "1,2,4",
    same_columns: Annotated[bool, "Give head 1 the columns of head 0: the two then compute the same."] = False,
    project: Annotated[
        str,
        "Mix the heads by a W_O: orthogonal or permute (random, see --seed), or a file with a matrix.",
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of a random W_O.")] = 0,
    drop: Annotated[
        str | None, "Set the output of these heads to zero, one by one, and measure the change, such as 0,1."
    ] = None,
    model: groups.Model = "minilm",
    layer: groups.Layer = None,
    where: groups.Where,
    drawing: groups.Drawing,
    loading: groups.Loading,
    printing: groups.Printing,
) -> None:
    """See the same queries, keys and values with more and fewer heads.

    Without a text: the worked example of `attnscope trace`.

    - `attnscope split --counts 1,2,4 --drop 0,1`
    - `attnscope split "The cat sat on the mat." -L 3 --counts 1,12,384 -o out`
    """
    from attnscope.studies.inputs.reading import Prompt
    from attnscope.studies.teaching.split import SplitOptions, split_example
    from attnscope.studies.teaching.split import split as study

    output, numbers = where.plan("split", printing, **drawing.options()), numbers_from
    how = SplitOptions(numbers(counts), same_columns, project, seed, () if drop is None else numbers(drop))
    if not one.given:
        if layer:
            raise UsageError("without a text the worked example is cut, which has one layer", "give a TEXT")
        return output.deliver(split_example(how))
    if layer is None:
        raise UsageError("of a model, the heads of one layer are cut", "give a layer, such as -L 3")
    prompt = Prompt(one.read())
    return output.deliver(study(loading.options().load(model), prompt, layer, how))
