"""Run `attnscope atlas`: write a page with the texts that show what each head does."""

from dataclasses import replace

from attnscope.cli.progress import progress
from attnscope.cli.shared import FileOptions, ModelOptions
from attnscope.studies.atlas.options import AtlasOptions
from attnscope.studies.heads.options import DescribingOptions
from attnscope.studies.inputs.options import CorpusOptions, WorkerOptions


def atlas(
    *,
    corpus_options: CorpusOptions,
    atlas_options: AtlasOptions,
    describing_options: DescribingOptions,
    model_options: ModelOptions,
    worker_options: WorkerOptions,
    file_options: FileOptions,
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

    # Refuse wrong options and files before the model loads. The options for describing heads override some of theirs.
    heads_options = describing_options.apply(atlas_options.heads)
    output = file_options.plan_output("atlas")
    workers = worker_options.make_workers(model_options.model, model_options.loading)
    # Heads and measures that the options name must exist.
    require_names(heads_options, measures=None)
    atlas_options = replace(atlas_options, heads=heads_options)
    corpus = corpus_options.corpus()
    with progress(file_options.quiet) as report_progress:
        record = study(model_options.load(), corpus, atlas_options, report_progress, workers)
    output.deliver(record)
