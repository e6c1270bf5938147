"""`attnscope training`."""

from dataclasses import replace
from typing import Annotated

from attnscope.cli import groups, options
from attnscope.errors import UsageError, require_choice
from attnscope.studies.inputs.options import LoadOptions, TextsWanted
from attnscope.studies.training.options import TrainingOptions


@groups.command(
    omit=(
        "text",
        "scale",
        "cmap",
        "chunk",
        "stride",
        "control",
        "causal",
    )
)
def training(
    *,
    checkpoints: Annotated[
        list[str],
        "Folders of one training, a quoted pattern such as 'run/checkpoint-*', or Hub revisions org/name@rev.",
    ],
    texts: TextsWanted,
    probe: Annotated[str | None, "repeat: random tokens that come twice, the standard test for induction."] = None,
    order: TrainingOptions,
    where: groups.Where,
    drawing: groups.Drawing,
    loading: LoadOptions,
    printing: groups.Printing,
) -> None:
    """Say when heads appeared, over the checkpoints of a training run.

    Checkpoints are loaded one at a time. One that cannot be read is reported and skipped; Ctrl-C keeps what is
    done.

    - `attnscope training 'run/checkpoint-*' --probe repeat`
    - `attnscope training 'run/checkpoint-*' --file texts.txt --measures induction,explained -o out`
    - `attnscope training EleutherAI/pythia-14m@step{0,512,1000,3000} --probe repeat -o out`
    """
    from attnscope.studies.training.study import training as study

    if (probe is None) != texts.is_given:
        raise UsageError("give one of --file and --probe", 'such as --file "corpus/*.txt", or --probe repeat')
    if probe is not None:
        require_choice("probe", probe, ("repeat",))
    output = where.plan("training", printing, **drawing.options())
    corpus = None if probe else texts.corpus()
    with options.progress(printing.quiet) as report:
        record = study(checkpoints, corpus, replace(order, loading=loading), report)
    output.deliver(record)
