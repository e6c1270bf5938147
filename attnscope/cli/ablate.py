"""`attnscope ablate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.cli import groups, options

if TYPE_CHECKING:
    from attnscope.records.ablation import Ablation


@groups.command(pick="Single heads, such as L3H1,L5H11: each, and all together.")
def ablate(
    *,
    texts: groups.Texts,
    target: Annotated[
        str | None,
        "What an encoder-decoder is to write.  [default: its own answer to each text]",
    ] = None,
    model: groups.Model = "minilm",
    which: groups.Heads,
    kind: groups.Kind = None,
    ablation: Annotated[
        str, "What is put in a head's place: zero, mean (of its outputs), or both; none: no sweep."
    ] = "zero,mean",
    loss: Annotated[
        str, "What is predicted: causal, masked, target, none; auto: what the model's head predicts."
    ] = "auto",
    masked: Annotated[str, "The share of tokens that a masked model has to fill in; each: every one in turn."] = "15%",
    importance: Annotated[bool, "Also E |dL/dξ| of each head, by one backward pass (Michel et al.)."] = False,
    normalize: Annotated[str | None, "layer: divide importances by the norm of those of their layer."] = None,
    curve: Annotated[bool, "Take heads out one after another: by importance, by effect, at random."] = False,
    joint: Annotated[bool, "Pairs of the picked heads, else of the 8 without which most changes."] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of masked tokens, random orders and directions.")] = 0,
    where: groups.Where,
    loading: groups.Loading,
    printing: groups.Printing,
) -> None:
    """Say what each head does for the model: take it out, and measure what changes.

    - `attnscope ablate --file sample_texts/sentences.txt`
    - `attnscope ablate "The cat sat." --pick L3H1,L5H5 --joint`
    - `attnscope ablate --file corpus.txt -m ./SmolLM2-135M --importance --curve -o out`
    """
    from attnscope.studies.ablation import AblateOptions
    from attnscope.studies.ablation_files import AblateOrder, by_layer_from, masked_from, modes_from, study

    wanted = AblateOptions(
        modes=modes_from(ablation), importance=importance, by_layer=by_layer_from(normalize), curve=curve, joint=joint,
        choice=which.choice(), kind=kind, loss=loss, masked=masked_from(masked), target=target, seed=seed,
    )  # fmt: skip
    order = AblateOrder(texts.wanted(), wanted, where.out, where.formats)
    with options.progress(printing.quiet) as report:
        found, paths = study(model, order, loading.options(), report)
    options.say(found.run.get("notes", ()), printing.quiet)
    print_ablation(found, paths, printing.json)
    options.fail_if_not_whole(found.corpus, found.run)


def print_ablation(found: "Ablation", paths: list[Path], json: bool) -> None:
    """The result on stdout: one JSON document; else the tables, and the paths."""
    if json:
        options.print_document(found.as_json(), paths)
        return
    from attnscope.views.ablation_terminal import drawing
    from attnscope.views.plain_text import open_console

    console = open_console()
    console.print(drawing(found, console))
    options.print_paths(paths)


def show_saved(saved: options.Saved) -> None:
    """Shows a record of heads taken out again."""
    from attnscope.records.ablation import load
    from attnscope.studies.ablation_files import drawn_again

    loaded = load(saved.record)
    paths = drawn_again(loaded, saved.out, saved.formats)
    options.say(loaded.run.get("notes", ()), saved.quiet)
    print_ablation(loaded, paths, saved.json)
