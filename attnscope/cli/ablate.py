"""`attnscope ablate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.cli import options

if TYPE_CHECKING:
    from attnscope.records.ablation import Ablation


def ablate(
    text: Annotated[str | None, typer.Argument(help="A text; `-` reads stdin.", show_default=False)] = None,
    file: options.Files = None,
    split: options.Split = "line",
    field: options.Field = "text",
    target: Annotated[
        str | None,
        typer.Option(help="What an encoder-decoder is to write.  [default: its own answer to each text]"),
    ] = None,
    model: options.Model = "minilm",
    layers: options.Layers = None,
    heads: options.Heads = None,
    pick: Annotated[
        str | None, typer.Option("--pick", help="Single heads, such as L3H1,L5H11: each, and all together.")
    ] = None,
    kind: options.Kind = None,
    ablation: Annotated[
        str, typer.Option(help="What is put in a head's place: zero, mean (of its outputs), or both; none: no sweep.")
    ] = "zero,mean",
    loss: Annotated[
        str, typer.Option(help="What is predicted: causal, masked, target, none; auto: what the model's head predicts.")
    ] = "auto",
    masked: Annotated[
        str, typer.Option(help="The share of tokens that a masked model has to fill in; each: every one in turn.")
    ] = "15%",
    importance: Annotated[
        bool, typer.Option("--importance", help="Also E |dL/dξ| of each head, by one backward pass (Michel et al.).")
    ] = False,
    normalize: Annotated[
        str | None, typer.Option(help="layer: divide importances by the norm of those of their layer.")
    ] = None,
    curve: Annotated[
        bool, typer.Option("--curve", help="Take heads out one after another: by importance, by effect, at random.")
    ] = False,
    joint: Annotated[
        bool, typer.Option("--joint", help="Pairs of the picked heads, else of the 8 without which most changes.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of masked tokens, random orders and directions.")] = 0,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="A folder for the record and figures.")] = None,
    formats: options.RecordFormats = None,
    adapter: options.Adapter = None,
    engine: options.Engine = "auto",
    device: options.Device = "cpu",
    dtype: options.Dtype = "float32",
    device_map: options.DeviceMap = None,
    no_check: options.NoCheck = False,
    allow_pickle: options.AllowPickle = False,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Say what each head does for the model: take it out, and measure what changes.

    - `attnscope ablate --file sample_texts/sentences.txt`

    - `attnscope ablate "The cat sat." --pick L3H1,L5H5 --joint`

    - `attnscope ablate --file corpus.txt -m ./SmolLM2-135M --importance --curve -o out`
    """
    from attnscope.studies.ablation import AblateOptions
    from attnscope.studies.ablation_files import AblateOrder, by_layer_from, masked_from, modes_from, study
    from attnscope.studies.heatmap import Choice
    from attnscope.studies.inputs import LoadOptions, TextsWanted

    wanted = AblateOptions(
        modes=modes_from(ablation), importance=importance, by_layer=by_layer_from(normalize), curve=curve, joint=joint,
        choice=Choice(options.numbers_from(layers), options.numbers_from(heads), options.heads_from(pick)),
        kind=kind, loss=loss, masked=masked_from(masked), target=target, seed=seed,
    )  # fmt: skip
    order = AblateOrder(TextsWanted(text, tuple(file or ()), split, field), wanted, out, formats)
    loading = LoadOptions(engine, device, dtype, not no_check, allow_pickle, trust_remote_code, device_map, adapter)
    with options.progress(quiet) as report:
        found, paths = study(model, order, loading, report)
    options.say(found.run.get("notes", ()), quiet)
    print_ablation(found, paths, json)
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
