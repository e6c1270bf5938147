"""Run `attnscope heatmap`: draw attention on a text, photos or a recording, or follow it through the layers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from attnscope.cli.shared import FileOptions, MapDrawingOptions, ModelOptions
from attnscope.errors import UsageError
from attnscope.options import option, options, refuse_beside
from attnscope.studies.inputs.options import OneTextOptions, ReadingOptions
from attnscope.studies.maps.options import MapOptions

if TYPE_CHECKING:
    from attnscope.output import Output
    from attnscope.studies.inputs.reading import UserInput


@options
class HeatmapInput(OneTextOptions):
    """Hold a text, photos or a recording, and the options for what is drawn of them."""

    image: tuple[Path, ...] = option(
        "A photo, with attention drawn over it; may be given several times. Alone, for vision transformers: --query is "
        "CLS, REG0, a patch as ROW,COLUMN, or mean (over all patches). With TEXT, for models that read both.",
        default=(),
    )
    size: int | None = option(
        "Show a photo to the model at this many pixels a side, such as 518: more and smaller patches, where the model "
        "interpolates their positions (DINOv2, ViT).",
        default=None,
        least=16,
        most=2048,
        rare=True,
    )
    audio: Path | None = option(
        "A WAV file, for Whisper, wav2vec 2.0 and other encoders. TEXT is the transcript; Whisper writes its own else.",
        default=None,
    )
    rollout: bool = option(
        "Attention rollout instead: how much of each input token reaches a position.",
        default=False,
        panel="Heads",
    )
    relevance: str | None = option(
        "Relevance for this prediction instead, by gradients: the next or masked token, or a class by label or number.",
        default=None,
        metavar="TARGET",
        panel="Heads",
        rare=True,
    )
    pool: int | None = option(
        "Pool a long text to at most this many rows and columns, 8 to 1024; 0: never.  [default: 256 for more than 400 "
        "tokens]",
        default=None,
        rare=True,
    )

    def adapt(self, map_options: MapOptions) -> MapOptions:
        """Return the options for maps, with --pool added. For a recording, --words becomes a request for word times."""
        if self.audio is not None and map_options.words:
            map_options = dataclasses.replace(map_options, words=False, times=True)
        return dataclasses.replace(map_options, pooled=self.pool)


def heatmap(
    *,
    heatmap_input: HeatmapInput,
    reading_options: ReadingOptions,
    map_options: MapOptions,
    model_options: ModelOptions,
    drawing_options: MapDrawingOptions,
    file_options: FileOptions,
) -> None:
    """Draw what every head attends to on a text.

    Writes an overview of all heads and one figure per layer into attnscope-out, or with -o elsewhere.

    - `attnscope heatmap "The animal didn't cross the street because it was too tired."`
    - `attnscope heatmap "It was too tired." --pick L3H1 --query it -f png,pdf,npz -o out`
    - `attnscope heatmap "The animal was tired." --from "was tired" --to "the animal"`
    - `attnscope heatmap --file text.txt -L 0-2 --words --hide-special`
    - `attnscope heatmap --image photo.jpg -m ./dinov2-small --query 3,5`
    - `attnscope heatmap --audio speech.wav -m ./whisper-tiny "What is said in it." --words`
    """
    from attnscope.output import DEFAULT_FOLDER
    from attnscope.studies.maps.study import name_figure_folder, study

    # Rollout and relevance: follow tokens through all layers.
    if heatmap_input.rollout or heatmap_input.relevance is not None:
        output = file_options.plan_output(
            "rollout", query=map_options.query, **drawing_options.non_default_options()
        )
        return _roll_out(output, heatmap_input, map_options, model_options)
    # Plan the output before the model loads: wrong options fail at once.
    map_options = heatmap_input.adapt(map_options)
    if map_options.between:
        output = file_options.plan_output("shares", **drawing_options.non_default_options())
    else:
        output = file_options.plan_output(
            "heatmap",
            has_default_folder=True,
            query=map_options.query,
            **drawing_options.non_default_options(),
        )
    user_input = _read_input(heatmap_input, reading_options)
    record = study(model_options.model, user_input, map_options, model_options.loading)
    # --from and --to: add up the weights from one phrase to another.
    if map_options.between:
        from attnscope.questions.shares import find_shares

        return output.deliver(find_shares(record, *map_options.between.parts))  # type: ignore[arg-type]  # not pooled
    # Without -o, figures go to a folder whose name has a hash of all that they depend on.
    folder = DEFAULT_FOLDER / name_figure_folder(
        record, output.options.get("query"), output.style(record)
    )
    return output.deliver(record, folder)


def _roll_out(
    output: Output, heatmap_input: HeatmapInput, map_options: MapOptions, model_options: ModelOptions
) -> None:
    """Follow tokens through the layers: by attention alone (rollout, Abnar & Zuidema 2020), or with gradients."""
    from attnscope.senses.photos import read_photo
    from attnscope.studies.inputs.reading import Prompt
    from attnscope.studies.maps.derived import relevance, rollout

    # Of the options for maps, only --query may be given.
    target = heatmap_input.relevance
    refused_map_options = dataclasses.replace(map_options, query=None)
    if target is None:
        refuse_beside("--rollout", refused_map_options, audio=heatmap_input.audio)
    else:
        refuse_beside(
            "--relevance", refused_map_options, audio=heatmap_input.audio, rollout=heatmap_input.rollout
        )
    # A photo.
    if heatmap_input.image:
        refuse_beside("--image", OneTextOptions(heatmap_input.text, heatmap_input.file))
        if len(heatmap_input.image) > 1:
            raise UsageError("one picture is followed through the layers", "give one --image")
        # Read the photo before the model loads: a wrong file fails at once.
        photo = read_photo(heatmap_input.image[0])
        model = model_options.load_with_head()
        if target is None:
            return output.deliver(rollout(model, image=photo))
        return output.deliver(relevance(model, target, image=photo))
    # A text.
    text = heatmap_input.read()
    if target is not None:
        return output.deliver(
            relevance(model_options.load_with_head(), target, text, query=map_options.query)
        )
    # NumPy alone runs the model if the text is short: it starts faster than torch.
    model = model_options.loading.load_for_maps(model_options.model, [Prompt(text)])
    return output.deliver(rollout(model, text, query=map_options.query))


def _read_input(heatmap_input: HeatmapInput, reading_options: ReadingOptions) -> UserInput:
    """Read photos, a recording or a text, before the model is loaded.

    A study tells kinds of input apart by their types: photos with a text, a photo alone, a recording, or a text.

    Raises:
        AttnscopeError: There is no input, or a file cannot be read.
        UsageError: There is more than one input, or an option that does not fit it.
    """
    from attnscope.senses.photos import read_photo
    from attnscope.senses.recordings import read_recording
    from attnscope.studies.inputs.reading import PhotoPrompt, Speech

    # --size is only for a photo alone, without a text that the user gives or the model writes.
    has_text = heatmap_input.is_given or reading_options.generate > 0
    if heatmap_input.size and (not heatmap_input.image or has_text):
        raise UsageError("--size is of a photo alone", "give --image without TEXT, or leave out --size")
    # Photos with a text, or before a text that the model writes (--generate).
    if heatmap_input.image and has_text:
        refuse_beside(
            "--image", dataclasses.replace(reading_options, generate=0), audio=heatmap_input.audio
        )
        text = heatmap_input.read(may_be_blank=True) if heatmap_input.is_given else ""
        return PhotoPrompt(tuple(map(read_photo, heatmap_input.image)), text, reading_options.generate)
    # A photo alone.
    if heatmap_input.image:
        refuse_beside("--image", reading_options, audio=heatmap_input.audio)
        if len(heatmap_input.image) > 1:
            raise UsageError("several pictures are shown among words", "give one --image, or a TEXT too")
        return dataclasses.replace(read_photo(heatmap_input.image[0]), size=heatmap_input.size)
    # A recording, with or without its transcript.
    if heatmap_input.audio is not None:
        refuse_beside("--audio", reading_options)
        return Speech(
            read_recording(heatmap_input.audio), heatmap_input.read() if heatmap_input.is_given else None
        )
    # A text.
    return reading_options.prompt(heatmap_input.read())
