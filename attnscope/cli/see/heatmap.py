"""`attnscope heatmap`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from attnscope.cli import groups
from attnscope.options import refuse_beside
from attnscope.studies.inputs.options import LoadOptions, OneText, ReadingOptions
from attnscope.studies.maps.options import MapOptions

if TYPE_CHECKING:
    from attnscope.studies.inputs.reading import Given


@groups.command(
    out="The folder to write to.  [default: attnscope-out/MODEL-TEXT-HASH]",
    formats="Several of png, svg, pdf (figures), npz, json (data), text (in the terminal).  [default: png,npz]",
    scale="The weight of the darkest colour: 1 (fixed), each head's largest (head), the figure's (figure).  "
    "[default: fixed; head for pictures and sound]",
)
def heatmap(
    *,
    source: OneText,
    image: Annotated[
        list[Path] | None,
        "A photo, with attention drawn over it; may be given several times. Alone, for vision transformers: --query is "
        "CLS, REG0, a patch as ROW,COLUMN, or mean (over all patches). With TEXT, for models that read both: --query "
        "is a word, and --generate lets the model answer.",
        "Text",
    ] = None,
    audio: Annotated[
        Path | None,
        "A WAV file. Whisper: what it attends to as it writes TEXT, the transcript (default: its own). wav2vec 2.0 and "
        "other encoders: attention over time.",
        "Text",
    ] = None,
    reading: ReadingOptions,
    model: groups.Model = "minilm",
    maps: MapOptions,
    where: groups.Where,
    drawing: groups.Drawing,
    loading: LoadOptions,
    printing: groups.Printing,
) -> None:
    """Draw what every head attends to on a text.

    Writes an overview of all heads and one figure per layer, and prints their paths.

    - `attnscope heatmap "The animal didn't cross the street because it was too tired."`
    - `attnscope heatmap "It was too tired." --pick L3H1 --query it -f png,pdf,npz -o out`
    - `attnscope heatmap --file text.txt -L 0-2 --words --hide-special`
    - `attnscope heatmap --file book.txt --pick L3H1 --rows 1000:1064 --cols 0:64`
    - `attnscope heatmap --image photo.jpg -m ./dinov2-small --query 3,5`
    - `attnscope heatmap --image photo.jpg "What is on the table?" -m ./smolvlm --generate 20`
    - `attnscope heatmap --audio speech.wav -m ./whisper-tiny "What is said in it." --times`
    """
    from attnscope.output import HOME
    from attnscope.studies.maps.order import home_of, study

    how = {"query": maps.query, **drawing.options()}
    output = where.plan("heatmap", printing, has_folder=True, **how)
    what = _read_input(source, reading, image, audio)
    with output.draw_ahead() as drawn_ahead:
        expect = None if image or audio else drawn_ahead.expect
        record = study(model, what, maps, loading, expect)
        home = home_of(record, output.options.get("query"), output.style(record))
        output.deliver(record, HOME / home, drawn_ahead.draw)


def _read_input(source: OneText, reading: ReadingOptions, image: list[Path] | None, audio: Path | None) -> "Given":
    """What the model is to read; files are read before it takes its time.

    Raises:
        AttnscopeError: There is none, or a file cannot be read.
        UsageError: There is more than one, or an option that it has no use for.
    """
    from attnscope.errors import UsageError
    from attnscope.senses.photos import read_photo
    from attnscope.senses.recordings import read_recording
    from attnscope.studies.inputs.reading import Speech, View

    if image and (source.is_given or reading.generate):
        refuse_beside("--image", dataclasses.replace(reading, generate=0), audio=audio)
        text = source.read(may_be_blank=True) if source.is_given else ""
        return View(tuple(map(read_photo, image)), text, reading.generate)
    if image:
        refuse_beside("--image", source, reading, audio=audio)
        if len(image) > 1:
            raise UsageError("several pictures are shown among words", "give one --image, or a TEXT too")
        return read_photo(image[0])
    if audio is not None:
        refuse_beside("--audio", reading)
        return Speech(read_recording(audio), source.read() if source.is_given else None)
    return reading.prompt(source.read())
