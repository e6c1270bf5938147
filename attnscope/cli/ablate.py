"""Run `attnscope ablate`: measure what heads contribute, or save a model without some heads."""

from attnscope.cli.progress import progress
from attnscope.cli.shared import DrawingOptions, FileOptions, ModelOptions
from attnscope.questions.ablate import AblateOptions
from attnscope.studies.inputs.options import CorpusOptions, WorkerOptions


def ablate(
    *,
    corpus_options: CorpusOptions,
    ablate_options: AblateOptions,
    model_options: ModelOptions,
    worker_options: WorkerOptions,
    drawing_options: DrawingOptions,
    file_options: FileOptions,
) -> None:
    """Take heads out of the model, and measure what changes.

    `--save` writes the model without the heads that `--pick` names, as a folder that transformers loads. Their rows of
    W_Q, W_K and W_V, and their slice of W_O, become zero. attnscope checks that the folder computes what was measured.

    - `attnscope ablate --file sample_texts/sentences.txt`
    - `attnscope ablate --file corpus.txt -m ./SmolLM2-135M --importance -o out`
    - `attnscope ablate "The cat sat." --pick L3H1,L5H5 --save minilm-pruned`
    """
    from attnscope.studies.ablate.save import prune
    from attnscope.studies.ablate.study import ablate as study

    # Plan the output before the model loads: a wrong path fails at once.
    output = file_options.plan_output("ablate", **drawing_options.non_default_options())
    corpus = corpus_options.corpus()
    # Save the model without the picked heads as a folder.
    if ablate_options.save is not None:
        with progress(file_options.quiet) as report_progress:
            record = prune(
                model_options.model, corpus, ablate_options, model_options.loading, report_progress
            )
        output.deliver(record, other_paths=[ablate_options.save])
        return
    # Without --save, measure the effect of each head. A loss needs the model's prediction head.
    load_options = model_options.loading
    if ablate_options.loss != "none":
        load_options = load_options.with_head(model_options.model)
    # None = no workers: this process runs the whole study.
    workers = worker_options.make_workers(model_options.model, load_options)
    with progress(file_options.quiet) as report_progress:
        model = load_options.load(model_options.model)
        record = study(model, corpus, ablate_options, report_progress, workers)
    output.deliver(record)
