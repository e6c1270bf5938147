"""`attnscope heads`."""

from dataclasses import replace

from attnscope.cli import groups, options
from attnscope.options import refuse_beside
from attnscope.studies.heads.options import HeadsOrder
from attnscope.studies.inputs.options import LoadOptions, TextsWanted
from attnscope.studies.running.options import SharedWork


@groups.command(omit=("scale", "cmap"))
def heads(
    *,
    texts: TextsWanted,
    model: groups.Model = "minilm",
    order: HeadsOrder,
    describing: groups.Describing,
    where: groups.Where,
    drawing: groups.Drawing,
    running: SharedWork,
    loading: LoadOptions,
    printing: groups.Printing,
) -> None:
    """Say what each head does: roles with their evidence, and a one-line description.

    Evidence is counted in texts. A text is a line of a file, or with `--split` a paragraph or the whole file. In an
    encoder-decoder, the decoder gets the same text as the encoder.

    - `attnscope heads --file sample_texts/alice.txt --split paragraph`
    - `attnscope heads --file 'corpus/*.txt.gz' -o out`
    - `attnscope heads --file 'corpus/*.txt.gz' --sort explained`
    - `attnscope heads --file 'corpus/*.txt.gz' --workers 8 -o out`
    - `attnscope heads --probe needle --file book.txt --lengths 2048 --causal -m ./smollm2`
    - `attnscope heads --image 'photos/*.jpg' -m ./dinov2-small -o out`
    - `attnscope heads --audio 'talks/*.wav' -m ./whisper-tiny -o out`
    """
    from attnscope.studies.heads.study import study

    if order.image or order.audio:
        refuse_beside(
            "--image" if order.image else "--audio",
            texts if order.image else replace(texts, text=None),  # a recording has its transcript
            running,
            order.heads,
            replace(describing, no_describe=False),
            audio=order.image and order.audio,
            probe=order.probe,
        )
    output = where.plan("heads", printing, measures=order.measures, **order.listing.plan_options(), **drawing.options())
    order = replace(order, heads=replace(order.heads, describe=describing.options()))
    shared = running.share(model, loading)
    with options.progress(printing.quiet, *order.counted()) as report:
        record = study(model, texts, order, loading, report, shared)
    output.deliver(record)
