"""`attnscope heads` and `attnscope merge`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.cli import options

if TYPE_CHECKING:
    from attnscope.records.findings import Findings


def heads(
    text: Annotated[str | None, typer.Argument(help="A text; `-` reads stdin.", show_default=False)] = None,
    file: options.Files = None,
    split: options.Split = "line",
    field: options.Field = "text",
    image: Annotated[
        list[str] | None,
        typer.Option(
            help="Photos or patterns, for vision transformers: what heads do in pictures; may be given several times.",
            show_default=False,
        ),
    ] = None,
    audio: Annotated[
        list[str] | None,
        typer.Option(
            help="WAV files or patterns, for models such as Whisper: when heads listen; TEXT is the transcript of one.",
            show_default=False,
        ),
    ] = None,
    probe: Annotated[
        str | None, typer.Option(help="repeat: random tokens that come twice, the standard test for induction.")
    ] = None,
    model: options.Model = "minilm",
    thresholds: Annotated[
        list[str] | None, typer.Option("--threshold", help="What a role must reach, such as induction=0.3.")
    ] = None,
    measures: Annotated[
        str | None, typer.Option(help="Also print these measures, such as entropy_nats,positional.")
    ] = None,
    chunk: Annotated[int | None, typer.Option(help="Cut long texts into chunks of so many tokens.")] = None,
    stride: Annotated[
        int | None, typer.Option(help="How many tokens further the next chunk begins; overlaps count once.")
    ] = None,
    frequencies: Annotated[
        Path | None, typer.Option(help="Word counts (word<tab>count), instead of the corpus's own.")
    ] = None,
    relations: Annotated[
        Path | None,
        typer.Option(help="Annotated texts, or relations.npz: what heads link there joins the roles."),
    ] = None,
    control: Annotated[
        str | None, typer.Option(help="untrained: study the same architecture with random weights beside.")
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal", help="Take each head that has a role out, and say what changes.")
    ] = False,
    shard: Annotated[
        str, typer.Option(help="Study a part of the corpus only, such as 2/8; `merge` joins them.")
    ] = "1/1",
    out: Annotated[Path | None, typer.Option("-o", "--out", help="A folder for the record and figures.")] = None,
    formats: options.RecordFormats = None,
    executor: options.Executor = "local",
    workers: options.Workers = None,
    threads: options.Threads = None,
    ray_address: options.RayAddress = None,
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
    """Say what each head is for: measures and roles with their evidence, over any amount of text.

    The decoder of an encoder-decoder is given the text that its encoder reads, as if it were to write it again.

    - `attnscope heads --file sample_texts/alice.txt --split paragraph`

    - `attnscope heads --file 'corpus/*.txt.gz' -o out`

    - `attnscope heads --file sample_texts/alice.txt --split paragraph --relations treebank.conllu`

    - `attnscope heads --file 'corpus/*.txt.gz' --workers 8 -o out`

    - `attnscope heads --image 'photos/*.jpg' -m ./dinov2-small -o out`

    - `attnscope heads --audio 'talks/*.wav' -m ./whisper-tiny -o out`
    """
    from attnscope.studies.heads_files import Senses, StudyOrder, study, study_senses
    from attnscope.studies.inputs import LoadOptions, TextsWanted
    from attnscope.studies.workers import workers_from

    loading = LoadOptions(engine, device, dtype, not no_check, allow_pickle, trust_remote_code, device_map, adapter)
    if image or audio:
        options.refuse_beside(
            "--image" if image else "--audio", TEXT=image and text, audio=image and audio, file=file,
            split=split != "line", field=field != "text", probe=probe,
            threshold=thresholds, chunk=chunk, stride=stride, frequencies=frequencies, relations=relations,
            control=control, causal=causal, shard=shard != "1/1", executor=executor != "local", workers=workers,
            threads=threads, ray_address=ray_address,
        )  # fmt: skip
        with options.progress(quiet, *(("pictures", "patches") if image else ("recordings", "tokens"))) as report:
            senses = Senses(image or (), audio or (), text)
            findings, paths = study_senses(model, senses, measures, (out, formats), loading, report)
        return _finish(findings, paths, measures, json, quiet)
    order = StudyOrder(
        texts=TextsWanted(text, tuple(file or ()), split, field), probe=probe, thresholds=tuple(thresholds or ()),
        measures=measures, chunk=chunk, stride=stride, frequencies=frequencies, control=control, shard=shard, out=out,
        formats=formats, relations=relations, causal=causal,
    )  # fmt: skip
    shared = workers_from(model, loading, executor=executor, n=workers, threads=threads, address=ray_address)
    with options.progress(quiet) as report:
        findings, paths = study(model, order, loading, report, shared)
    return _finish(findings, paths, measures, json, quiet)


def _finish(findings: "Findings", paths: list[Path], measures: str | None, json: bool, quiet: bool) -> None:
    options.say(findings.run.get("notes", ()), quiet)
    print_findings(findings, paths, measures, json)
    options.fail_if_not_whole(findings.corpus, findings.run)


def merge(
    parts: Annotated[list[Path], typer.Argument(help="Records of shards (heads.npz), or the folders that hold them.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="A folder for the whole.")],
    formats: options.RecordFormats = None,
    json: options.Json = False,
) -> None:
    """Join the records of shards into the record that one run over the whole corpus gives, bit for bit."""
    from attnscope.studies.heads_files import merge_files

    findings, paths = merge_files(parts, out, formats)
    print_findings(findings, paths, None, json)
    options.fail_if_not_whole(findings.corpus, findings.run)


def print_findings(findings: "Findings", paths: list[Path], measures: str | None, json: bool) -> None:
    """The result on stdout: one JSON document; else the grid, the table, and the paths."""
    if json:
        options.print_document(findings.as_json(), paths)
        return
    from attnscope.views.heads_terminal import grid, measure_table, table
    from attnscope.views.picture_heads_terminal import picture_measures
    from attnscope.views.plain_text import open_console

    console = open_console()
    if findings.of_senses:
        console.print(picture_measures(findings, console))
    else:
        console.print(grid(findings, console))
        console.print(table(findings, console))
    if measures:
        console.print(measure_table(findings, [name.strip() for name in measures.split(",")]))
    options.print_paths(paths)


def show_saved(saved: options.Saved) -> None:
    """Shows a record of heads again."""
    from attnscope.records.findings import load
    from attnscope.studies.heads_files import drawn_again

    loaded = load(saved.record)
    paths = drawn_again(loaded, saved.out, saved.formats)
    options.say(loaded.run.get("notes", ()), saved.quiet)
    print_findings(loaded, paths, saved.measures, saved.json)
