"""Run `attnscope patch`."""

from attnscope.cli.progress import progress
from attnscope.cli.shared import DrawingOptions, FileOptions, ModelOptions
from attnscope.options import option, options
from attnscope.questions.patch import PatchOptions


@options
class PairFiles:
    """Hold the option for the files of pairs."""

    pairs: tuple[str, ...] = option(
        'JSONL files or patterns, one {"clean", "corrupt", "right", "wrong"} per line; - is stdin.',
        argument=True,
    )


def patch(
    *,
    sources: PairFiles,
    order: PatchOptions,
    model: ModelOptions,
    drawing: DrawingOptions,
    files: FileOptions,
) -> None:
    """Say which heads carry a behaviour: give each head its output from another run, and measure the answer.

    - `attnscope patch sample_texts/pairs/agreement.jsonl -m ./SmolLM2-135M`
    - `attnscope patch sample_texts/pairs/indirect_object.jsonl -m gpt2 --by pattern --direction noise -o out`
    - `attnscope patch pairs.jsonl -m ./model --attribution 20`
    """
    from attnscope.corpus.pairs import Pairs
    from attnscope.studies.patch.study import patch as study

    output = files.plan("patch", **drawing.changes())
    loaded = model.load_with_head()
    with progress(files.quiet, "pairs") as report:
        record = study(loaded, Pairs(list(sources.pairs)), order, report)
    output.deliver(record)
