"""`attnscope export`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from attnscope.cli import groups, options
from attnscope.options import refuse_beside
from attnscope.studies.heads.options import StreamingOptions
from attnscope.studies.inputs.options import LoadOptions, TextsWanted


def complete_forms(incomplete: str) -> list[str]:
    """For the shell: forms that begin so."""
    from attnscope.views.export.formats import FORMATS

    return [name for name in FORMATS if name.startswith(incomplete)]


@groups.command(omit=("text",), files="With --stream: texts to hide needles in.  [default: random tokens]")
def export(
    *,
    record: Annotated[
        Path, typer.Argument(help="A record that attnscope saved, such as weights.npz or heads.npz, or its folder.")
    ],
    for_: Annotated[
        str,
        typer.Option(
            "--for",
            help="The format: scores (a plain table), retrieval, duo, whisper, whisper.cpp, openai-whisper, "
            "vllm-hook, alignatt.",
            autocompletion=complete_forms,
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The file, or for duo a folder. `-` is stdout."), "Output"],
    score: Annotated[
        str | None, "The number or relation that ranks heads.  [default: what the record ranks them by]", "Heads"
    ] = None,
    kind: Annotated[str | None, "encoder, decoder or cross.  [default: the only one with this score]", "Heads"] = None,
    top: Annotated[
        int | None, typer.Option(min=1, help="List the best N heads.  [default: all that pass the test]"), "Heads"
    ] = None,
    beside: Annotated[
        Path | None,
        typer.Option(
            "--with",
            help="For duo: heads.npz of the same model on texts. Heads with equal scores are ordered by its sink "
            "shares.",
        ),
        "Heads",
    ] = None,
    stream: Annotated[
        bool, "For duo and retrieval: let heads stream, and report loss and needle recall before and after."
    ] = False,
    streaming: StreamingOptions,
    model: Annotated[
        str | None,
        typer.Option("-m", "--model", help="With --stream: the model.  [default: as the record names it]"),
        "Model",
    ] = None,
    texts: TextsWanted,
    loading: LoadOptions,
    printing: groups.Printing,
) -> None:
    """Write a list of heads that another program reads, from a saved record.

    - `attnscope export needles --for duo --with heads -o pattern --stream --file book.txt`
    - `attnscope export needles --for retrieval -o head_score.json`
    - `attnscope export relations.npz --for whisper -o my-whisper/generation_config.json`
    - `attnscope export patching.npz --for scores -o scores.safetensors`
    """
    from attnscope.output import print_document
    from attnscope.records import load_record
    from attnscope.views.export.formats import SCHEMA, WHISPER, export

    if not stream:
        refuse_beside("a list alone", texts, file=texts.files, model=model)
    elif for_ not in ("duo", "retrieval"):
        refuse_beside(f"--for {for_}", stream=stream)
    scores, sinks = load_record(record), None if beside is None else load_record(beside)
    sizes = {"sink_size": streaming.sink_size, "recent_size": streaming.recent_size}
    paths = export(scores, for_, out, score=score, kind=kind, top=top, sinks=sinks, **sizes)
    document: dict[str, object] = {"schema": SCHEMA, "for": for_}
    if stream:
        document["check"] = _stream(scores, sinks, streaming, loading, model, texts, printing)
    if for_ in WHISPER:
        document |= _word_times(scores, score, top, printing, show=bool(paths))
    print_document(lambda: document, paths, printing.json)


def _word_times(
    record: Any, score: str | None, top: int | None, printing: groups.Printing, *, show: bool
) -> dict[str, object]:
    """Prints how well as many heads as are listed time words; the same as plain JSON values."""
    from dataclasses import asdict

    from attnscope.records.heads.scores import scores_of
    from attnscope.views.relations.terminal import word_times_table
    from attnscope.views.tables.plain_text import open_console

    if record.word_times is None:
        return {}
    lists = record.word_times.for_list(len(scores_of(record, score).chosen[:top]))
    if show and not printing.json:
        open_console().print(word_times_table(record.word_times, lists))
    return {"word_times": {**asdict(record.word_times), "lists": [asdict(each) for each in lists]}}


def _stream(
    scores: Any, sinks: Any, streaming: StreamingOptions, loading: LoadOptions, model: str | None, texts: TextsWanted,
    printing: groups.Printing,
) -> dict[str, object]:  # fmt: skip
    """Lets heads of the record's model stream, and prints what that changes; the same as plain JSON values."""
    from attnscope.studies.heads.streaming import check_streaming
    from attnscope.studies.inputs.provenance import model_of
    from attnscope.views.export.terminal import show_streaming
    from attnscope.views.tables.plain_text import open_console

    loaded = loading.load(model or model_of(scores.run))
    with options.progress(printing.quiet) as report:
        check = check_streaming(loaded, scores, texts.corpus() if texts.is_given else None, streaming, sinks, report)
    if not printing.json:
        show_streaming(check, open_console())
    return check.as_json()
