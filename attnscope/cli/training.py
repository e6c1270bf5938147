"""Run `attnscope training`."""

from dataclasses import replace

from attnscope.cli.progress import progress
from attnscope.cli.shared import DrawingOptions, FileOptions
from attnscope.errors import UsageError, require_choice
from attnscope.options import group, option, options
from attnscope.studies.inputs.options import LoadOptions, TextFileOptions
from attnscope.studies.training.options import TrainingOptions


@options
class Checkpoints:
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
    models: Checkpoints,
    texts: TextFileOptions,
    order: TrainingOptions,
    drawing: DrawingOptions,
    files: FileOptions,
) -> None:
    """Say when heads appeared, over the checkpoints of a training run.

    Checkpoints are loaded one at a time. One that cannot be read is reported and skipped; Ctrl-C keeps what is
    done.

    - `attnscope training 'run/checkpoint-*' --probe repeat`
    - `attnscope training 'run/checkpoint-*' --file texts.txt --measures induction,entropy_nats -o out`
    - `attnscope training EleutherAI/pythia-14m@step{0,512,1000,3000} --probe repeat -o out`
    """
    from attnscope.studies.training.study import training as study

    # Either --file or --probe must be given: a probe makes its own texts.
    if (models.probe is None) != texts.is_given:
        raise UsageError(
            "give one of --file and --probe", 'such as --file "corpus/*.txt", or --probe repeat'
        )
    if models.probe is not None:
        require_choice("probe", models.probe, ("repeat",))
    output = files.plan("training", **drawing.changes())
    corpus = None if models.probe else texts.corpus()
    with progress(files.quiet) as report:
        record = study(list(models.checkpoints), corpus, replace(order, loading=models.loading), report)
    output.deliver(record)
