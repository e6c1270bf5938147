"""Run `attnscope heads`: say what each head does, over texts, photos or recordings."""

from dataclasses import replace

from attnscope.cli.progress import progress
from attnscope.cli.shared import DrawingOptions, FileOptions, ModelOptions
from attnscope.options import refuse_beside
from attnscope.studies.heads.options import HeadsCommandOptions
from attnscope.studies.inputs.options import CorpusOptions, WorkerOptions


def heads(
    *,
    corpus_options: CorpusOptions,
    command_options: HeadsCommandOptions,
    model_options: ModelOptions,
    worker_options: WorkerOptions,
    drawing_options: DrawingOptions,
    file_options: FileOptions,
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

    # Texts, and options for texts, cannot be given beside photos or recordings.
    if command_options.image or command_options.audio:
        if command_options.image:
            flag = "--image"
            refused_text_options = corpus_options
        else:
            flag = "--audio"
            # TEXT is allowed: it is the transcript of the recording.
            refused_text_options = replace(corpus_options, text=None)
        # Raise an error if any of these options is set. `audio` is refused beside --image, and not beside itself.
        refuse_beside(
            flag,
            refused_text_options,
            worker_options,
            command_options.heads,
            pick=command_options.describing.pick,
            audio=command_options.image and command_options.audio,
            probe=command_options.probe,
        )
    # Plan the output before the model loads. The options for describing heads become part of the study's.
    command_options = replace(
        command_options, heads=command_options.describing.apply(command_options.heads)
    )
    output = file_options.plan_output(
        "heads",
        measures=command_options.measures,
        sort=command_options.listing.sort,
        **drawing_options.non_default_options(),
    )
    workers = worker_options.make_workers(model_options.model, model_options.loading)
    # The progress line counts texts, pictures or recordings.
    with progress(file_options.quiet, *command_options.progress_nouns()) as report_progress:
        record = study(
            model_options.model,
            corpus_options,
            command_options,
            model_options.loading,
            report_progress,
            workers,
        )
    output.deliver(record)
