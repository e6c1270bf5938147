"""`attnscope heads` and `attnscope merge`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from attnscope.cli import groups, options
from attnscope.studies.inputs.options import LoadOptions, TextsWanted
from attnscope.studies.running.options import SharedWork


@groups.command(omit=("scale", "cmap"))
def heads(
    *,
    texts: TextsWanted,
    image: Annotated[
        list[str] | None,
        "Photos or patterns, for vision transformers: what heads do in pictures; with TEXT, a question, for models "
        "that read both: which heads look; may be given several times.",
        "Text",
    ] = None,
    audio: Annotated[
        list[str] | None,
        "WAV files or patterns, for models such as Whisper: when heads listen; TEXT is the transcript of one.",
        "Text",
    ] = None,
    probe: Annotated[
        str | None,
        "repeat: random tokens that come twice, the standard test for induction; needle: words hidden in a long text, "
        "that of --file or random tokens, for retrieval heads.",
    ] = None,
    needles: groups.Needles,
    model: groups.Model = "minilm",
    measuring: groups.Measuring,
    relations: Annotated[
        Path | None,
        "Annotated texts, or relations.npz: what heads link there joins the roles.",
    ] = None,
    control: Annotated[str | None, "untrained: study the same architecture with random weights beside."] = None,
    causal: Annotated[bool, "Take each head that has a role out, and say what changes."] = False,
    writes: Annotated[
        bool, "Say what each head adds to the logits of right answers, next tokens or masked ones."
    ] = False,
    shard: groups.Shard = "1/1",
    describing: groups.Describing,
    listing: groups.Listing,
    where: groups.Where,
    drawing: groups.Drawing,
    running: SharedWork,
    loading: LoadOptions,
    printing: groups.Printing,
) -> None:
    """Say what each head is for: roles with their evidence, and a one-line description fitted to the data.

    The decoder of an encoder-decoder is given the text that its encoder reads, as if it were to write it again.

    - `attnscope heads --file sample_texts/alice.txt --split paragraph`
    - `attnscope heads --file 'corpus/*.txt.gz' -o out`
    - `attnscope heads --file 'corpus/*.txt.gz' --sort explained --feature 'months=(?i)january|february|march'`
    - `attnscope heads --file sample_texts/alice.txt --split paragraph --relations treebank.conllu`
    - `attnscope heads --file 'corpus/*.txt.gz' --workers 8 -o out`
    - `attnscope heads --probe needle --file book.txt --lengths 2048 --causal -m ./smollm2`
    - `attnscope heads --image 'photos/*.jpg' -m ./dinov2-small -o out`
    - `attnscope heads --image 'photos/*.jpg' "What is in the picture?" -m ./smolvlm`
    - `attnscope heads --audio 'talks/*.wav' -m ./whisper-tiny -o out`
    """
    from attnscope.studies.heads.order import Senses, StudyOrder, study, study_senses

    if image or audio:
        options.refuse_beside(
            "--image" if image else "--audio", replace(texts, text=None), running, audio=image and audio, probe=probe,
            threshold=measuring.thresholds, chunk=measuring.chunk, stride=measuring.stride, control=control,
            frequencies=measuring.frequencies, relations=relations, causal=causal, writes=writes, shard=shard != "1/1",
            feature=describing.feature, describe=describing.describe, weigh=measuring.weigh != "texts",
        )  # fmt: skip
    output = where.plan("heads", printing, measures=measuring.measures, **listing.shown(), **drawing.options())
    if image or audio:
        senses = Senses(image or (), audio or (), texts.text, listing.only)
        with options.progress(printing.quiet, *senses.counted) as report:
            output.deliver(study_senses(model, senses, measuring.measures, loading, report))
        return
    order = StudyOrder(
        texts=texts, probe=probe, **measuring.order(), control=control, shard=shard, relations=relations,
        causal=causal, writes=writes, describe=describing.options(), where=listing.only,
        needles=needles.options(probe, measuring.thresholds or (), ablate=causal),
    )  # fmt: skip
    shared = running.share(model, loading)
    with options.progress(printing.quiet) as report:
        found = study(model, order, loading, report, shared)
    output.deliver(found)


@groups.command(omit=("out", "scale", "cmap", "engine", "dtype"))
def merge(
    *,
    parts: Annotated[list[Path], "Records of shards (heads.npz, atlas.npz), or the folders that hold them."],
    model: Annotated[
        str | None,
        typer.Option("-m", "--model", help="Of an atlas, whose texts are read again.  [default: as its parts name it]"),
        "Model",
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="A folder for the whole."), "Output"],
    where: groups.Where,
    drawing: groups.Drawing,
    loading: LoadOptions,
    printing: groups.Printing,
) -> None:
    """Join the records of shards into the record that one run over the whole corpus gives, bit for bit."""
    from attnscope.output import plan
    from attnscope.records import file_of, load
    from attnscope.records.atlas.record import Atlas
    from attnscope.records.heads.findings import Findings
    from attnscope.studies.heads.merging import merge_findings

    paths = [file_of(part) for part in parts]
    if isinstance(load(paths[0]), Atlas):
        from attnscope.studies.atlas.parts import merge_files

        output = plan("atlas", out, where.formats, **vars(printing), **drawing.options())
        with options.progress(printing.quiet) as report:
            found = merge_files([(path, Atlas.load(path)) for path in paths], model, loading, report)
        return output.deliver(found)
    options.refuse_beside("parts of heads", model=model)
    output = plan("heads", out, where.formats, **vars(printing), **drawing.options())
    return output.deliver(merge_findings([Findings.load(path) for path in paths], [str(path) for path in paths]))
