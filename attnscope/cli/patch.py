"""Run `attnscope patch`: activation patching of heads, over pairs of a clean and a corrupt text."""

from attnscope.cli.progress import progress
from attnscope.cli.shared import DrawingOptions, FileOptions, ModelOptions
from attnscope.options import option, options
from attnscope.questions.patch import PatchOptions


@options
class PairFiles:
    """Hold the names of the files with pairs of texts."""

    pairs: tuple[str, ...] = option(
        'JSONL files or patterns, one {"clean", "corrupt", "right", "wrong"} per line; - is stdin.',
        argument=True,
    )


def patch(
    *,
    pair_files: PairFiles,
    patch_options: PatchOptions,
    model_options: ModelOptions,
    drawing_options: DrawingOptions,
    file_options: FileOptions,
) -> None:
    """Say which heads carry a behaviour: give each head its output from another run, and measure the answer.

    - `attnscope patch sample_texts/pairs/agreement.jsonl -m ./SmolLM2-135M`
    - `attnscope patch sample_texts/pairs/indirect_object.jsonl -m gpt2 --by pattern --direction noise -o out`
    - `attnscope patch pairs.jsonl -m ./model --attribution 20`
    """
    from attnscope.corpus.pairs import Pairs
    from attnscope.studies.patch.study import patch as study

    # Plan the output before the model loads: wrong options fail at once.
    output = file_options.plan_output("patch", **drawing_options.non_default_options())
    model = model_options.load_with_head()
    with progress(file_options.quiet, "pairs") as report_progress:
        record = study(model, Pairs(list(pair_files.pairs)), patch_options, report_progress)
    output.deliver(record)
