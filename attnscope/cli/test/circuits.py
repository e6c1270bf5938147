"""`attnscope circuits`."""

from attnscope.cli import groups, options
from attnscope.studies.circuits.options import CircuitsOptions
from attnscope.studies.inputs.choice import Choice
from attnscope.studies.inputs.options import LoadOptions


@groups.command(
    omit=("scale", "cmap", "layers", "heads"), pick="Print everything about these heads, such as L3H1,L5H11."
)
def circuits(
    *,
    model: groups.Model = "minilm",
    order: CircuitsOptions,
    which: Choice,
    where: groups.Where,
    drawing: groups.Drawing,
    loading: LoadOptions,
    printing: groups.Printing,
) -> None:
    """Read the weights, without any text: what heads copy and write, and which head feeds which.

    For text encoders and decoders that use transformers' attention interface, including grouped queries and rotary
    positions.

    - `attnscope circuits`
    - `attnscope circuits --pick L3H1,L0H2`
    - `attnscope circuits -m ./SmolLM2-135M -o out`
    """
    from attnscope.studies.circuits.study import circuits as study

    output = where.plan("circuits", printing, **drawing.options())
    loaded = loading.with_head(model).load(model)
    with options.progress_of_steps(printing.quiet, "layers") as report:
        record = study(loaded, order, report=report)
    output.deliver(record if which.pick is None else record.only(which.pick))
