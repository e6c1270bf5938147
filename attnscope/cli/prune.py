"""`attnscope prune`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.cli import options

if TYPE_CHECKING:
    from attnscope.studies.pruning import Pruned


def prune(
    text: Annotated[
        str | None, typer.Argument(help="A text to measure the change on; `-` reads stdin.", show_default=False)
    ] = None,
    pick: Annotated[str | None, typer.Option("--pick", help="The heads to prune, such as L3H1,L5H11.")] = None,
    kind: options.Kind = None,
    model: options.Model = "minilm",
    file: options.Files = None,
    split: options.Split = "line",
    field: options.Field = "text",
    target: Annotated[
        str | None, typer.Option(help="What an encoder-decoder is to write.  [default: its own answer to each text]")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The folder to write; a new one.")] = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "float32",
    device_map: options.DeviceMap = None,
    no_check: options.NoCheck = False,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write a model without some heads, as a folder that transformers loads.

    Their rows of W_Q, W_K and W_V and their slice of W_O are zero, everything else is as it was. Where queries are
    grouped, W_K and W_V of a group only if all its heads go. What is written is compared with the model whose heads
    are gated.

    - `attnscope prune --pick L3H1,L5H11 -o minilm-pruned`
    """
    from attnscope.errors import UsageError
    from attnscope.studies.inputs import LoadOptions, TextsWanted
    from attnscope.studies.pruning import PruneOrder, prune

    if out is None:
        raise UsageError("there is no folder to write", "name a new one with --out")
    texts = TextsWanted(text, tuple(file or ()), split, field)
    order = PruneOrder(options.heads_from(pick), out, kind, texts if texts.given else None, target)
    loading = LoadOptions("hf", device, dtype, not no_check, trust_remote_code=trust_remote_code, device_map=device_map)
    pruned = prune(model, order, loading)
    options.say(pruned.effect.run.get("notes", ()), quiet)
    print_pruned(pruned, json)
    options.fail_if_not_whole(pruned.effect.corpus, pruned.effect.run)


def print_pruned(pruned: "Pruned", json: bool) -> None:
    """The result on stdout: one JSON document; else what changes, and the folder."""
    if json:
        from json import dumps

        options.print_json(dumps(pruned.as_json() | {"files": [str(pruned.folder)]}, ensure_ascii=False))
        return
    from attnscope.views.ablation_terminal import drawing
    from attnscope.views.plain_text import open_console

    console = open_console()
    console.print(drawing(pruned.effect, console))
    zeroed = ", ".join(f"{n:,} of {role}" for role, n in pruned.zeroed.items())
    print(f"zero now: {zeroed}; largest difference of its outputs from the gated model's: {pruned.difference:.1g}")
    options.print_paths([pruned.folder])
