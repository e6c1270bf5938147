"""`attnscope timeline`."""

from typing import Annotated

import typer

from attnscope.cli import groups, options
from attnscope.errors import UsageError
from attnscope.options import read_names
from attnscope.studies.inputs.options import LoadOptions, TextsWanted


@groups.command(omit=("text", "scale", "cmap"))
def timeline(
    *,
    checkpoints: Annotated[
        list[str],
        "Folders of one training, a quoted pattern such as 'run/checkpoint-*', or Hub revisions org/name@rev.",
    ],
    texts: TextsWanted,
    probe: Annotated[str | None, "repeat: random tokens that come twice, the standard test for induction."] = None,
    measures: Annotated[
        str | None,
        typer.Option(
            help="Measures to follow, such as induction,entropy_nats; explained: what a description explains.  "
            "[default: previous_token,induction,first_token,entropy_nats]",
            autocompletion=options.complete_measures,
        ),
    ] = None,
    composition: Annotated[
        str | None, "Also follow which heads read what others write, by the weights: Q, K or V, or several with commas."
    ] = None,
    thresholds: groups.Thresholds = None,
    no_loss: Annotated[bool, "Leave out the loss of each checkpoint on the texts."] = False,
    where: groups.Where,
    drawing: groups.Drawing,
    loading: LoadOptions,
    printing: groups.Printing,
) -> None:
    """Say how heads came to be: measures and roles of all heads over the checkpoints of a training.

    Checkpoints are loaded one at a time. One that cannot be read is named, and the rest go on; Ctrl-C keeps what is
    done.

    - `attnscope timeline 'run/checkpoint-*' --probe repeat`
    - `attnscope timeline 'run/checkpoint-*' --file texts.txt --measures induction,explained -o out`
    - `attnscope timeline EleutherAI/pythia-14m@step{0,512,1000,3000} --probe repeat -o out`
    """
    from attnscope.records.circuits import COMPOSITIONS
    from attnscope.studies.heads.roles import thresholds_from
    from attnscope.studies.heads.study import HeadsOptions
    from attnscope.studies.timeline.study import MEASURES, TimelineOptions, known_measures
    from attnscope.studies.timeline.study import timeline as study

    if (probe is None) != texts.given:
        raise UsageError("give one of --file and --probe", 'such as --file "corpus/*.txt", or --probe repeat')
    if probe not in (None, "repeat"):
        raise UsageError(f"there is no probe {probe!r}", "there is: repeat")
    by = () if composition is None else read_names(composition, [one.lower() for one in COMPOSITIONS], "composition")
    wanted = TimelineOptions(
        composition=tuple(one.upper() for one in by),
        measures=MEASURES if measures is None else read_names(measures, known_measures(), "measure"),
        loss=not no_loss, heads=HeadsOptions(thresholds=thresholds_from(thresholds or ())), loading=loading,
    )  # fmt: skip
    output = where.plan("timeline", printing, **drawing.options())
    corpus = None if probe else texts.corpus()
    with options.progress(printing.quiet) as report:
        found = study(checkpoints, corpus, wanted, report)
    output.deliver(found)
