"""`attnscope ablate`."""

from attnscope.cli import groups, options
from attnscope.studies.ablation.options import AblateOptions
from attnscope.studies.inputs.options import LoadOptions, TextsWanted
from attnscope.studies.running.options import SharedWork


@groups.command(omit=("scale", "cmap"), pick="Single heads, such as L3H1,L5H11: each, and all together.")
def ablate(
    *,
    texts: TextsWanted,
    model: groups.Model = "minilm",
    order: AblateOptions,
    where: groups.Where,
    drawing: groups.Drawing,
    running: SharedWork,
    loading: LoadOptions,
    printing: groups.Printing,
) -> None:
    """Take heads out of the model, and measure what changes.

    - `attnscope ablate --file sample_texts/sentences.txt`
    - `attnscope ablate "The cat sat." --pick L3H1,L5H5`
    - `attnscope ablate --file corpus.txt -m ./SmolLM2-135M --importance -o out`
    """
    from attnscope.studies.ablation.study import ablate as study

    output = where.plan("ablate", printing, **drawing.options())
    corpus = texts.corpus()
    load = loading if order.loss == "none" else loading.with_head(model)
    shared = running.share(model, load)
    with options.progress(printing.quiet) as report:
        loaded = load.load(model)
        record = study(loaded, corpus, order, report, shared)
    output.deliver(record)
