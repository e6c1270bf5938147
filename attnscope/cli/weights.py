"""Run `attnscope weights`."""

from attnscope.cli.progress import progress_of_layers
from attnscope.cli.shared import DrawingOptions, FileOptions, ModelOptions
from attnscope.questions.weights import WeightsOptions


def weights(
    *, order: WeightsOptions, model: ModelOptions, drawing: DrawingOptions, files: FileOptions
) -> None:
    """Read the weights, without any text: what heads copy and write, and which head feeds which.

    For text encoders and decoders that use transformers' attention interface, including grouped queries and rotary
    positions.

    - `attnscope weights`
    - `attnscope weights --pick L3H1,L0H2`
    - `attnscope weights -m ./SmolLM2-135M -o out`
    """
    from attnscope.studies.weights import weights as study

    # Plan the output before the model loads.
    output = files.plan("weights", **drawing.changes())
    loaded = model.load_with_head()
    with progress_of_layers(files.quiet) as report:
        record = study(loaded, order, report=report)
    output.deliver(record if order.pick is None else record.only(order.pick))
