"""`attnscope page`."""

from pathlib import Path
from typing import Annotated

import typer

from attnscope.cli import options


def page(
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts; `-` reads one from stdin.")
    ] = None,
    file: options.Files = None,
    split: options.Split = "file",
    field: options.Field = "text",
    record: Annotated[
        list[Path] | None,
        typer.Option(help="Show a saved record (weights.npz, or its folder); may be given several times."),
    ] = None,
    heads_record: Annotated[
        Path | None, typer.Option(help="What `attnscope heads` saved (heads.npz): names the heads' roles.")
    ] = None,
    pair: Annotated[str | None, typer.Option(help="A second text, for models that read pairs.")] = None,
    target: Annotated[
        str | None,
        typer.Option(help="What an encoder-decoder is to write.  [default: its own greedy output]", show_default=False),
    ] = None,
    generate: Annotated[
        int, typer.Option(min=0, max=10000, help="Let a decoder write that many tokens, and show them too.")
    ] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Put texts into the model's chat template.")] = False,
    model: options.Model = "minilm",
    layers: options.Layers = None,
    heads: options.Heads = None,
    pick: Annotated[str | None, typer.Option("--pick", help="Single heads, such as L3H1,L5H11.")] = None,
    words: Annotated[bool, typer.Option("--words", help="Open with word pieces merged.")] = False,
    hide_special: Annotated[bool, typer.Option("--hide-special", help="Open with special tokens hidden.")] = False,
    scale: options.Scale = "fixed",
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", help="The file to write; `-` is stdout.  [default: attnscope-out/MODEL-TEXT-HASH.html]"
        ),
    ] = None,
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
    """Write one HTML file to look into all heads with: no server, no network, nothing to install.

    - `attnscope page "The animal didn't cross the street because it was too tired." -o page.html`

    - `attnscope page "It was too tired." "It was too wide." --heads-record out/heads.npz`

    - `attnscope page --record weights.npz`
    """
    from attnscope.studies.heatmap import Choice
    from attnscope.studies.inputs import LoadOptions
    from attnscope.studies.page import PageWanted, write_page

    if str(out) == "-":
        options.refuse_beside("-o -", json=json)
    choice = Choice(options.numbers_from(layers), options.numbers_from(heads), options.heads_from(pick))
    wanted = PageWanted(
        texts=tuple(texts or ()), files=tuple(file or ()), split=split, field=field, pair=pair, target=target,
        chat=chat, generate=generate, records=tuple(record or ()), heads_record=heads_record, choice=choice, out=out,
        words=words, hide_special=hide_special, scale=scale,
    )  # fmt: skip
    written = write_page(
        model,
        wanted,
        LoadOptions(engine, device, dtype, not no_check, allow_pickle, trust_remote_code, device_map, adapter),
    )
    options.say(written.notes, quiet)
    if json:
        from json import dumps

        options.print_json(dumps(written.as_json(), ensure_ascii=False))
    elif not written.is_stream:
        options.print_paths([written.path])
