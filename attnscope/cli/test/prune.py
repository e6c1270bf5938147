"""`attnscope prune`."""

from dataclasses import replace
from typing import TYPE_CHECKING

from attnscope.cli import groups, options
from attnscope.studies.ablation.options import PruneOrder
from attnscope.studies.inputs.options import LoadOptions, TextsWanted

if TYPE_CHECKING:
    from attnscope.studies.ablation.pruning import Pruned


@groups.command(
    omit=("adapter", "engine"),
    text="A text to measure the change on; `-` reads stdin.  "
    "[default: The animal didn't cross the street because it was too tired.]",
)
def prune(
    *,
    pruning: PruneOrder,
    model: groups.Model = "minilm",
    texts: TextsWanted,
    loading: LoadOptions,
    printing: groups.Printing,
) -> None:
    """Write a model without some heads, as a folder that transformers loads.

    Sets the heads' rows of W_Q, W_K and W_V, and their slice of W_O, to zero, and changes nothing else. With grouped
    queries, W_K and W_V of a group become zero only if all its heads are pruned. attnscope compares the written model
    with the model in which these heads are switched off.

    - `attnscope prune --pick L3H1,L5H11 -o minilm-pruned`
    """
    from attnscope.output import print_document, say
    from attnscope.studies.ablation.pruning import prune
    from attnscope.unfinished import fail_if_not_whole

    order = replace(pruning, texts=texts if texts.is_given else None)
    with options.progress(printing.quiet) as report:
        pruned = prune(model, order, replace(loading, engine="hf"), report)
    run = pruned.effect.run
    say(run.get("notes", ()), printing.quiet)
    if not printing.json:
        show(pruned)
    print_document(pruned.as_json, [pruned.folder], printing.json)
    fail_if_not_whole(pruned.effect.corpus, run)


def show(pruned: "Pruned") -> None:
    """Prints what pruning changes."""
    from attnscope.report.plain_text import open_console, print_record

    print_record(pruned.effect, open_console())
    zeroed = ", ".join(f"{n:,} of {role}" for role, n in pruned.zeroed.items())
    print(f"set to zero: {zeroed}; largest difference of its outputs from the gated model's: {pruned.difference:.1g}")
