"""Run `attnscope heatmap`."""

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
    """Hold a text, photos or a recording, and how they are shown."""

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

    def adapt(self, maps: MapOptions) -> MapOptions:
        """Return the options for maps with `--pool` among them. Of a recording, `--words` asks when each is spoken."""
        if self.audio is not None and maps.words:
            maps = dataclasses.replace(maps, words=False, times=True)
        return dataclasses.replace(maps, pooled=self.pool)


def heatmap(
    *,
    source: HeatmapInput,
    reading: ReadingOptions,
    maps: MapOptions,
    model: ModelOptions,
    drawing: MapDrawingOptions,
    files: FileOptions,
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
    from attnscope.studies.maps.study import home_of, study

    # Rollout and relevance: follow tokens through all layers.
    if source.rollout or source.relevance is not None:
        output = files.plan("rollout", query=maps.query, **drawing.changes())
        return _roll_out(output, source, maps, model)
    # --from and --to: sum up the weights from one phrase to another.
    maps = source.adapt(maps)
    if maps.between:
        from attnscope.questions.shares import find_shares

        output = files.plan("shares", **drawing.changes())
        record = study(model.model, _read_input(source, reading), maps, model.loading)
        return output.deliver(find_shares(record, *maps.between.parts))  # type: ignore[arg-type]  # not pooled
    # Else draw maps.
    output = files.plan("heatmap", has_default_folder=True, query=maps.query, **drawing.changes())
    record = study(model.model, _read_input(source, reading), maps, model.loading)
    # Without -o, figures go to a folder whose name depends on what they show.
    folder = DEFAULT_FOLDER / home_of(record, output.options.get("query"), output.style(record))
    return output.deliver(record, folder)


def _roll_out(output: Output, source: HeatmapInput, maps: MapOptions, model: ModelOptions) -> None:
    """Follow tokens through the layers: by attention alone (Abnar & Zuidema 2020), or with gradients."""
    from attnscope.senses.photos import read_photo
    from attnscope.studies.inputs.reading import Prompt
    from attnscope.studies.maps.derived import relevance, rollout

    # Of the options for maps, only --query may be given.
    target = source.relevance
    other_maps = dataclasses.replace(maps, query=None)
    if target is None:
        refuse_beside("--rollout", other_maps, audio=source.audio)
    else:
        refuse_beside("--relevance", other_maps, audio=source.audio, rollout=source.rollout)
    # A photo.
    if source.image:
        refuse_beside("--image", OneTextOptions(source.text, source.file))
        if len(source.image) > 1:
            raise UsageError("one picture is followed through the layers", "give one --image")
        # Read the photo before the model loads: a wrong file fails at once.
        photo = read_photo(source.image[0])
        loaded = model.load_with_head()
        if target is None:
            return output.deliver(rollout(loaded, image=photo))
        return output.deliver(relevance(loaded, target, image=photo))
    # A text.
    text = source.read()
    if target is not None:
        return output.deliver(relevance(model.load_with_head(), target, text, query=maps.query))
    # NumPy alone runs the model if the text is short: it starts faster than torch.
    loaded = model.loading.load_for_maps(model.model, [Prompt(text)])
    return output.deliver(rollout(loaded, text, query=maps.query))


def _read_input(source: HeatmapInput, reading: ReadingOptions) -> UserInput:
    """Read photos, a recording or a text, before the model is loaded. The type of the input tells a study what it is.

    Raises:
        AttnscopeError: There is no input, or a file cannot be read.
        UsageError: There is more than one input, or an option that does not fit it.
    """
    from attnscope.senses.photos import read_photo
    from attnscope.senses.recordings import read_recording
    from attnscope.studies.inputs.reading import PhotoPrompt, Speech

    # --size is refused for anything but a photo alone: `is_given` says whether there is a text.
    if source.size and (not source.image or source.is_given or reading.generate):
        raise UsageError("--size is of a photo alone", "give --image without TEXT, or leave out --size")
    # Photos with a text, or before a text that the model writes (--generate).
    if source.image and (source.is_given or reading.generate):
        refuse_beside("--image", dataclasses.replace(reading, generate=0), audio=source.audio)
        text = source.read(may_be_blank=True) if source.is_given else ""
        return PhotoPrompt(tuple(map(read_photo, source.image)), text, reading.generate)
    # A photo alone.
    if source.image:
        refuse_beside("--image", reading, audio=source.audio)
        if len(source.image) > 1:
            raise UsageError("several pictures are shown among words", "give one --image, or a TEXT too")
        return dataclasses.replace(read_photo(source.image[0]), size=source.size)
    # A recording, with or without its transcript.
    if source.audio is not None:
        refuse_beside("--audio", reading)
        return Speech(read_recording(source.audio), source.read() if source.is_given else None)
    # A text.
    return reading.prompt(source.read())
