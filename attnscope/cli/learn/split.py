"""`attnscope split`."""

from attnscope.cli import groups
from attnscope.errors import UsageError
from attnscope.studies.inputs.options import LoadOptions, OneText
from attnscope.studies.teaching.options import SplitOptions


@groups.command(
    omit=("scale", "cmap"),
    text="A text; `-` reads stdin.  [default: the worked example]",
    out="A folder for the record and a figure.",
    formats="Files: several of json, png, svg, pdf.  [default: json,png]",
)
def split(
    *,
    source: OneText,
    order: SplitOptions,
    model: groups.Model = "minilm",
    layer: groups.Layer = None,
    where: groups.Where,
    drawing: groups.Drawing,
    loading: LoadOptions,
    printing: groups.Printing,
) -> None:
    """See the same queries, keys and values with more and fewer heads.

    Without a text: the worked example of `attnscope trace`.

    - `attnscope split --counts 1,2,4 --drop 0,1`
    - `attnscope split "The cat sat on the mat." -L 3 --counts 1,12,384 -o out`
    """
    from attnscope.studies.inputs.reading import Prompt
    from attnscope.studies.teaching.split import split as study
    from attnscope.studies.teaching.split import split_example

    output = where.plan("split", printing, **drawing.options())
    if not source.is_given:
        if layer:
            raise UsageError("without a text the worked example is cut, which has one layer", "give a TEXT")
        return output.deliver(split_example(order))
    if layer is None:
        raise UsageError("of a model, the heads of one layer are cut", "give a layer, such as -L 3")
    prompt = Prompt(source.read())
    return output.deliver(study(loading.load(model), prompt, layer, order))
