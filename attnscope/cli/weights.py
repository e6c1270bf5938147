"""Run `attnscope weights`: say from a model's weights alone what its heads copy, write and read."""

from attnscope.cli.progress import progress_of_layers
from attnscope.cli.shared import DrawingOptions, FileOptions, ModelOptions
from attnscope.questions.weights import WeightsOptions


def weights(
    *,
    weights_options: WeightsOptions,
    model_options: ModelOptions,
    drawing_options: DrawingOptions,
    file_options: FileOptions,
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
    output = file_options.plan_output("weights", **drawing_options.non_default_options())
    model = model_options.load_with_head()
    with progress_of_layers(file_options.quiet) as report_progress:
        record = study(model, weights_options, report=report_progress)
    output.deliver(record if weights_options.pick is None else record.only(weights_options.pick))
