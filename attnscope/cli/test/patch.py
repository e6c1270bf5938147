"""`attnscope patch`."""

from typing import Annotated

from attnscope.cli import groups, options
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.patch.options import PatchOptions


@groups.command(omit=("scale", "cmap"), pick="Single heads, such as L3H1,L5H11.")
def patch(
    *,
    pairs: Annotated[
        list[str], 'JSONL files or patterns, a {"clean", "corrupt", "right", "wrong"} per line; - is stdin.'
    ],
    model: groups.Model = "minilm",
    order: PatchOptions,
    where: groups.Where,
    drawing: groups.Drawing,
    loading: LoadOptions,
    every: groups.Every = False,
    printing: groups.Printing,
) -> None:
    """Say which heads carry a behaviour: give each head its output from another run, and measure the answer.

    - `attnscope patch sample_texts/pairs/agreement.jsonl -m ./SmolLM2-135M`
    - `attnscope patch sample_texts/pairs/indirect_object.jsonl -m gpt2 --by pattern --direction noise -o out`
    - `attnscope patch pairs.jsonl -m ./model --attribution --exact 20`
    """
    from attnscope.corpus.pairs import Pairs
    from attnscope.studies.patch.study import patch as study

    output = where.plan("patch", printing, every=every, **drawing.options())
    loaded = loading.with_head(model).load(model)
    with options.progress(printing.quiet, "pairs") as report:
        result = study(loaded, Pairs(pairs), order, report)
    output.deliver(result)
