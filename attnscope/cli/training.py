"""Run `attnscope training`: measure the heads of each checkpoint of a training run, to see when they appear."""

from dataclasses import replace

from attnscope.cli.progress import progress
from attnscope.cli.shared import DrawingOptions, FileOptions
from attnscope.errors import UsageError, require_choice
from attnscope.options import group, option, options
from attnscope.studies.inputs.options import LoadOptions, TextFileOptions
from attnscope.studies.training.options import TrainingOptions


@options
class CheckpointOptions:
    """Hold the options for checkpoints, and for loading them."""

    checkpoints: tuple[str, ...] = option(
        "Folders of one training, a quoted pattern such as 'run/checkpoint-*', or Hub revisions org/name@rev.",
        argument=True,
    )
    probe: str | None = option(
        "repeat: random tokens that come twice, the standard test for induction.",
        default=None,
        panel="Text",
    )
    loading: LoadOptions = group(LoadOptions)


def training(
    *,
    checkpoint_options: CheckpointOptions,
    text_options: TextFileOptions,
    training_options: TrainingOptions,
    drawing_options: DrawingOptions,
    file_options: FileOptions,
) -> None:
    """Say when heads appeared, over the checkpoints of a training run.

    Checkpoints are loaded one at a time. One that cannot be read is reported and skipped; Ctrl-C keeps what is
    done.

    - `attnscope training 'run/checkpoint-*' --probe repeat`
    - `attnscope training 'run/checkpoint-*' --file texts.txt --measures induction,entropy_nats -o out`
    - `attnscope training EleutherAI/pythia-14m@step{0,512,1000,3000} --probe repeat -o out`
    """
    from attnscope.studies.training.study import training as study

    # Exactly one of --file and --probe must be given: a probe makes its own texts.
    if (checkpoint_options.probe is None) != text_options.is_given:
        raise UsageError(
            "give one of --file and --probe", 'such as --file "corpus/*.txt", or --probe repeat'
        )
    if checkpoint_options.probe is not None:
        require_choice("probe", checkpoint_options.probe, ("repeat",))
    output = file_options.plan_output("training", **drawing_options.non_default_options())
    # None = the study makes the texts of the probe.
    corpus = None if checkpoint_options.probe else text_options.corpus()
    with progress(file_options.quiet) as report_progress:
        study_options = replace(training_options, loading=checkpoint_options.loading)
        record = study(list(checkpoint_options.checkpoints), corpus, study_options, report_progress)
    output.deliver(record)
