"""Run `attnscope atlas`."""

from dataclasses import replace

from attnscope.cli.progress import progress
from attnscope.cli.shared import FileOptions, ModelOptions
from attnscope.studies.atlas.options import AtlasOptions
from attnscope.studies.heads.options import DescribingOptions
from attnscope.studies.inputs.options import CorpusOptions, WorkerOptions


def atlas(
    *,
    texts: CorpusOptions,
    order: AtlasOptions,
    describing: DescribingOptions,
    model: ModelOptions,
    running: WorkerOptions,
    files: FileOptions,
) -> None:
    """Show every head of a model with the texts that show what it does, in one page.

    Each head has the texts on which it does most, and one of each decile. You also see where it attends, and which
    queries, keys and pairs stand out.

    - `attnscope atlas --file sample_texts/alice.txt -o atlas.html`
    - `attnscope atlas --file 'corpus/*.txt.gz' -m ./model --workers 8 -o atlas.html -f html,npz`
    - `attnscope atlas --file 'corpus/*.txt.gz' --examples-by induction -o induction.html`
    """
    from attnscope.studies.atlas.study import atlas as study
    from attnscope.studies.heads.study import require_names

    # Refuse wrong options and files before the model loads.
    heads_options = describing.apply(order.heads)
    output = files.plan("atlas")
    workers = running.share(model.model, model.loading)
    require_names(heads_options, measures=None)
    order = replace(order, heads=heads_options)
    corpus = texts.corpus()
    with progress(files.quiet) as report:
        record = study(model.load(), corpus, order, report, workers)
    output.deliver(record)
