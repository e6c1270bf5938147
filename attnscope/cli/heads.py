"""Run `attnscope heads`."""

from dataclasses import replace

from attnscope.cli.progress import progress
from attnscope.cli.shared import DrawingOptions, FileOptions, ModelOptions
from attnscope.options import refuse_beside
from attnscope.studies.heads.options import HeadsCommandOptions
from attnscope.studies.inputs.options import CorpusOptions, WorkerOptions


def heads(
    *,
    texts: CorpusOptions,
    order: HeadsCommandOptions,
    model: ModelOptions,
    running: WorkerOptions,
    drawing: DrawingOptions,
    files: FileOptions,
) -> None:
    """Say what each head does: roles with their evidence, and a one-line description.

    Evidence is counted in texts. In an encoder-decoder, the decoder gets the same text as the encoder.

    - `attnscope heads --file sample_texts/alice.txt -o out`
    - `attnscope heads --file 'corpus/*.txt.gz' --workers 8 --sort explained`
    - `attnscope heads --probe needle --file book.txt --lengths 2048 -m ./smollm2`
    - `attnscope heads --image 'photos/*.jpg' -m ./dinov2-small -o out`
    - `attnscope heads --audio 'talks/*.wav' -m ./whisper-tiny -o out`
    """
    from attnscope.studies.heads.study import study

    # Refuse texts, and options for texts, beside photos and recordings.
    if order.image or order.audio:
        if order.image:
            option = "--image"
            refused_texts = texts
        else:
            option = "--audio"
            # TEXT is allowed: it is the transcript of the recording.
            refused_texts = replace(texts, text=None)
        # Photos and recordings cannot be given together.
        refuse_beside(
            option,
            refused_texts,
            running,
            order.heads,
            pick=order.describing.pick,
            audio=order.image and order.audio,
            probe=order.probe,
        )
    # Plan the output before the model loads.
    order = replace(order, heads=order.describing.apply(order.heads))
    output = files.plan("heads", measures=order.measures, sort=order.listing.sort, **drawing.changes())
    workers = running.share(model.model, model.loading)
    # The progress line counts texts, pictures or recordings.
    with progress(files.quiet, *order.progress_nouns()) as report:
        record = study(model.model, texts, order, model.loading, report, workers)
    output.deliver(record)
