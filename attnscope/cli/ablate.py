"""Run `attnscope ablate`."""

from attnscope.cli.progress import progress
from attnscope.cli.shared import DrawingOptions, FileOptions, ModelOptions
from attnscope.questions.ablate import AblateOptions
from attnscope.studies.inputs.options import CorpusOptions, WorkerOptions


def ablate(
    *,
    texts: CorpusOptions,
    order: AblateOptions,
    model: ModelOptions,
    running: WorkerOptions,
    drawing: DrawingOptions,
    files: FileOptions,
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

    # Plan the output before the model takes its time: a wrong path fails at once.
    output = files.plan("ablate", **drawing.changes())
    corpus = texts.corpus()
    # Save the model without the picked heads as a folder.
    if order.save is not None:
        with progress(files.quiet) as report:
            record = prune(model.model, corpus, order, model.loading, report)
        return output.deliver(record, other_paths=[order.save])
    # Without --save, measure the effect of each head. A loss needs the language-model head.
    loading = model.loading if order.loss == "none" else model.loading.with_head(model.model)
    workers = running.share(model.model, loading)
    with progress(files.quiet) as report:
        record = study(loading.load(model.model), corpus, order, report, workers)
    return output.deliver(record)
