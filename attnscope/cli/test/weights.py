"""`attnscope weights`."""

from attnscope.choice import Choice
from attnscope.cli import groups, options
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.weights.options import WeightsOptions


@groups.command(
    omit=("scale", "cmap", "layers", "heads"), pick="Print everything about these heads, such as L3H1,L5H11."
)
def weights(
    *,
    model: groups.Model = "minilm",
    order: WeightsOptions,
    which: Choice,
    where: groups.Where,
    drawing: groups.Drawing,
    loading: LoadOptions,
    printing: groups.Printing,
) -> None:
    """Read the weights, without any text: what heads copy and write, and which head feeds which.

    For text encoders and decoders that use transformers' attention interface, including grouped queries and rotary
    positions.

    - `attnscope weights`
    - `attnscope weights --pick L3H1,L0H2`
    - `attnscope weights -m ./SmolLM2-135M -o out`
    """
    from attnscope.studies.weights.study import weights as study

    output = where.plan("weights", printing, **drawing.options())
    loaded = loading.with_head(model).load(model)
    with options.progress_of_steps(printing.quiet, "layers") as report:
        record = study(loaded, order, report=report)
    output.deliver(record if which.pick is None else record.only(which.pick))
