"""Measure the heads of models that see or hear, on any number of photos or recordings.

Measures are those of `core.catalogue`; `senses` reads the files. There are no roles here.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.plain_torch import with_plain_torch
from attnscope.core.sums import RunningSums
from attnscope.corpus import expand
from attnscope.errors import AttnscopeError, amount
from attnscope.host import delay_interrupts
from attnscope.models.model import Model, eyes_of
from attnscope.questions.heads import Heads, heads_table
from attnscope.report.wording import PICTURES, RECORDINGS
from attnscope.results.table import Table
from attnscope.senses.photos import read_photo
from attnscope.senses.recordings import read_recording
from attnscope.studies.failures import broken_rows, require_finite
from attnscope.studies.heads.measuring import stack_layers
from attnscope.studies.heads.roles import measure_column
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.reading import Speech, read
from attnscope.studies.inputs.texts import Progress, Report
from attnscope.studies.maps.running import run_probe

if TYPE_CHECKING:
    from attnscope.core.catalogue import Measure
    from attnscope.core.facts import TextFacts

Floats = NDArray[np.float64]

_BLANK = np.full((256, 256, 3), 128, np.uint8)


@with_plain_torch
def picture_heads(model: Model, images: Any, report: Report | None = None) -> Heads:
    """Measure every head of a vision transformer on photos.

        found = attnscope.picture_heads(model, "photos/*.jpg")
        found["heads"].grid("distance_patches", "encoder")  # (layer, head)
        found["heads"].interval("near_patches")  # (head, 3): value, and its 95% interval over pictures
        found["heads"].columns["near_patches"].meaning
        found.save("heads.npz")

    The measures are `core.catalogue.PICTURE_MEASURES`; there are no roles. Every picture is run by itself, and
    no map is kept. What cannot be read is listed in `corpus["problems"]`, and the others are studied. An interruption
    (KeyboardInterrupt) ends the study: what was done is returned, and said to be incomplete.

    Args:
        model: A loaded vision model whose layers all see all patches: ViT, DeiT, DINOv2 …
        images: A file or a pattern, a list of these, or of images of Pillow or arrays (height, width, 3) of uint8.
        report: Called after each picture.

    Returns:
        The findings: `corpus["of"]` is "pictures", so its texts are pictures and its tokens are patches.

    Raises:
        AttnscopeError: The model sees no pictures, or there is not one that can be read.
    """
    from attnscope.core.catalogue import PICTURE_MEASURES
    from attnscope.core.measures import HeadMeasures

    if model.eyes is None and model.viewer is not None:
        raise AttnscopeError(
            f"{model.info.name} reads pictures among words; heads are measured on photos in vision transformers alone",
            "look at single photos with: attnscope heatmap --image",
        )
    model = eyes_of(model)
    inputs = _list_inputs(images, "picture")
    # Try a blank picture first: an error here is the model's, and would come with every picture.
    read(model, read_photo(_BLANK))

    def measure(number: int) -> _Measured:
        name, image = inputs[number]
        # Read the photo, and add up its measures as the model runs.
        with _leave_out(name):
            photo = read_photo(image)
            reading = read(model, photo)
            picture = reading.picture
            assert picture is not None
            pixels, grid = np.asarray(photo.image), picture.grid
            probe = HeadMeasures(_picture_facts(len(reading.tokens), grid), catalogue=PICTURE_MEASURES)
            run_probe(model, reading, probe)
            by_layer = probe.sums["encoder"]
            require_finite({"encoder": {layer: of.sum for layer, of in by_layer.items()}}, model.info, picture.source)
        # The keys outside sinks are the patches, so `_active` sums are those of patches.
        names = [f"{name}_active" if measure.has_active else name for name, measure in PICTURE_MEASURES.items()]
        columns = [next(iter(by_layer.values())).names.index(name) for name in names]
        sums, counts, uniform = (stack_layers(by_layer, part)[..., columns] for part in ("sum", "count", "uniform_sum"))
        return _Measured(
            tuple(sorted(by_layer)),
            sums,
            counts,
            uniform,
            math.prod(grid),
            reading.notes,
            f"picture {pixels.shape}\n",
            pixels.tobytes(),
            grid,
        )

    sense = _Sense(
        PICTURES,
        "picture",
        "encoder",
        PICTURE_MEASURES,
        lambda heads: heads["resting"],
        "give photos, such as --image 'photos/*.jpg'",
    )
    return _study(model, inputs, measure, sense, report)


@with_plain_torch
def sound_heads(
    model: Model, audio: Any, text: str | Sequence[str] | None = None, report: Report | None = None
) -> Heads:
    """Measure every head of a speech model's cross-attention on recordings.

        found = attnscope.sound_heads(attnscope.load("./whisper-tiny"), "talks/*.wav")
        found["heads"].grid("monotonicity", "cross")  # (layer, head): 1 = listens further on with each token

    The measures are `core.catalogue.SOUND_MEASURES`; there are no roles. Every recording is run by itself, with
    its transcript or what the model writes; no map is kept. What cannot be read is listed in `corpus["problems"]`, and
    the others are studied. An interruption (KeyboardInterrupt) ends the study: what was done is returned.

    Args:
        model: A loaded model that listens as Whisper does.
        audio: A file or a pattern, a list of these, or of (samples, rate).
        text: The transcript of one recording, or a list with that of each; None = what the model itself writes.
        report: Called after each recording.

    Returns:
        The findings: `corpus["of"]` is "recordings", so its texts are recordings and its tokens those of transcripts.

    Raises:
        AttnscopeError: The model hears nothing, or there is not one recording that can be read.
    """
    from attnscope.core.attention.probes import OfChosen, key_sums
    from attnscope.core.catalogue import SOUND_MEASURES

    # One transcript for each recording, or none.
    inputs = _list_inputs(audio, "recording")
    texts = [text] if isinstance(text, str) else [None] * len(inputs) if text is None else list(text)
    if len(texts) != len(inputs):
        n = f"{len(texts)} transcript{'s' * (len(texts) != 1)}"
        raise AttnscopeError(f"{amount(len(inputs), 'recording')} and {n}", "give one for each, or leave out the text")

    def measure(number: int) -> _Measured:
        name, recorded = inputs[number]
        # Read the recording with its transcript, or with what the model writes.
        with _leave_out(name):
            recording = read_recording(recorded)
        reading = read(model, Speech(recording, texts[number]))
        sound = reading.sound
        if reading.target is None or sound is None:
            raise AttnscopeError(
                f"{model.info.name} has no decoder, so there is no cross-attention to measure",
                "look at single recordings with: attnscope heatmap --audio",
            )
        # Special tokens write no words: their rows say nothing of listening.
        asks = ~reading.target.special
        if not asks.any():
            raise _LeftOutError("there is no token in what is written")
        # Weights of the sums over frames with sound, (frame, 2): 1, and seconds from the middle of the sound.
        n_sound = len(sound.envelope)
        times = (np.arange(n_sound) + 0.5 - n_sound / 2) * sound.seconds_per_frame
        functions = np.stack([np.ones(n_sound), times], 1)
        probe = OfChosen(lambda call: key_sums(call, functions), kinds=["cross"])
        run_probe(model, reading, probe)
        # Attention of each token on sound, (1, head, token, 2) per layer. One NaN leaves the recording out.
        rows = {layer: of_layer.numpy() for layer, of_layer in probe.maps["cross"].items()}
        for _, layer in broken_rows({"cross": rows}).values():
            raise _LeftOutError(f"attention is not finite (NaN) in layer {layer} in {model.info.dtype}: not studied")
        n_frames = round(sound.window_seconds / sound.seconds_per_frame)
        by_layer = [sound_sums(rows[layer][0][:, asks]) for layer in sorted(rows)]
        sums, counts = (np.stack(part) for part in zip(*by_layer, strict=True))
        # Attending to all frames alike, no token listens further on than another.
        uniform = counts * [0.0, n_sound / n_frames]
        samples = recording.samples
        return _Measured(
            tuple(sorted(rows)),
            sums,
            counts,
            uniform,
            int(asks.sum()),
            reading.notes,
            f"recording {len(samples)}\n",
            samples.tobytes(),
        )

    sense = _Sense(
        RECORDINGS,
        "recording",
        "cross",
        SOUND_MEASURES,
        lambda heads: 1 - heads["sound"],
        "give WAV files: --audio 'talks/*.wav'",
    )
    return _study(model, inputs, measure, sense, report)


def _picture_facts(n_tokens: int, grid: tuple[int, int]) -> TextFacts:
    """Return the facts that measures need of a picture: patches are queries, and the tokens before them are not."""
    import torch

    from attnscope.core.facts import TextFacts

    # The patches are the last tokens, (1, token).
    is_special = torch.arange(n_tokens)[None] < n_tokens - math.prod(grid)
    return TextFacts(
        real=torch.ones_like(is_special),
        special=is_special,
        ids=torch.arange(n_tokens)[None],
        context=is_special,
        n_columns=grid[1],
    )


def sound_sums(rows: Floats) -> tuple[Floats, Floats]:
    """Return the SOUND_MEASURES of one recording as sums and counts, (head, measure) each.

    A token that gives nothing to sound has no time: only `sound` counts it.

    Args:
        rows: How much of its attention each token gives to sound, and that times the time of each frame,
            (head, token, 2).
    """
    sums, counts = np.zeros((2, len(rows), 2))
    # Tokens that hear something have a time; pairs of them are in order or not.
    for head, (share, moment) in enumerate(rows.transpose(0, 2, 1)):
        is_heard = share > 0
        time = moment[is_heard] / share[is_heard]
        pairs = np.triu_indices(len(time), 1)
        if len(time) > 1:
            sums[head, 0] = np.sign(time[pairs[1]] - time[pairs[0]]).mean()
            counts[head, 0] = 1
        sums[head, 1] = share.sum()
        counts[head, 1] = len(share)
    return sums, counts


class _LeftOutError(Exception):
    """A picture or recording cannot be studied; the message says why."""


@contextmanager
def _leave_out(name: str) -> Iterator[None]:
    """Turn an error within a `with` block into one that leaves out this picture or recording alone."""
    try:
        yield
    except AttnscopeError as error:
        raise _LeftOutError(error.message.replace(f"{name} ", "", 1)) from None


@dataclass(frozen=True)
class _Sense:
    """The differences between senses: their names, the kind of attention, its measures, and how much of it rests."""

    of: str
    noun: str
    kind: str
    catalogue: Mapping[str, Measure]
    resting: Callable[[Mapping[str, Any]], Any]
    hint: str


@dataclass(frozen=True, eq=False)
class _Measured:
    """The sums of one picture or recording, (unit, layer, head, measure) or (layer, head, measure)."""

    layers: tuple[int, ...]
    sums: Floats
    counts: Floats
    uniform: Floats
    n_tokens: int
    notes: tuple[str, ...]
    shape: str
    content: bytes
    grid: tuple[int, int] | None = None


@dataclass
class _Done:
    """The sums over all pictures or recordings, (layer, head, measure), and the same under uniform attention.

    A picture or recording is in all of it or in nothing.
    """

    sense: _Sense
    measures: RunningSums = field(default_factory=RunningSums)
    uniform: RunningSums = field(default_factory=RunningSums)
    layers: tuple[int, ...] = ()
    n: int = 0
    n_tokens: int = 0
    grids: set[tuple[int, int]] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    def add(self, measured: _Measured) -> None:
        """Add the sums of one picture or recording."""
        # The first one tells how many layers and heads there are.
        if not self.n:
            self.layers = measured.layers
            self.measures, self.uniform = (RunningSums(measured.counts.shape[-3:]) for _ in range(2))
        self.measures.add(measured.sums, measured.counts)
        self.uniform.add(measured.uniform, measured.counts)
        self.n += 1
        self.n_tokens += measured.n_tokens
        self.grids |= set() if measured.grid is None else {measured.grid}
        self.notes += measured.notes
        self.digest.update(measured.shape.encode() + measured.content)

    def heads(self) -> Table:
        """Return every head with its measures; a measure that nothing counts is NaN."""
        sense, sums = self.sense, self.measures
        counts = sums.total("c")
        # Heads with any count, and intervals that are cut to the range of each measure.
        layers, heads = np.nonzero(counts.any(-1))
        ends = [np.array([getattr(measure, end) for measure in sense.catalogue.values()]) for end in ("low", "high")]
        low, high = (np.clip(end, *ends) for end in sums.interval())
        even = np.broadcast_to(self.uniform.ratio(), counts.shape)
        parts = {"value": sums.ratio(), "low": low, "high": high, "baseline": even, "count": counts}
        return heads_table(
            ([sense.kind] * len(heads), np.array(self.layers)[layers], heads),
            [measure_column(name, sense.catalogue) for name in sense.catalogue],
            roles=[""] * len(heads),
            resting=sense.resting(dict(zip(sense.catalogue, sums.ratio()[layers, heads].T, strict=True))),
            **{part: array[layers, heads] for part, array in parts.items()},
        )


def _study(
    model: Model,
    inputs: Sequence[tuple[str, Any]],
    measure: Callable[[int], _Measured],
    sense: _Sense,
    report: Report | None,
) -> Heads:
    """Measure the inputs one after the other, and list those that cannot be studied.

    Raises:
        AttnscopeError: No input could be studied.
    """
    done, complete = _Done(sense), True
    # One input after the other; an interruption keeps what is done.
    problems: list[dict[str, Any]] = []
    try:
        for number, (name, _) in enumerate(inputs):
            try:
                measured = measure(number)
            except _LeftOutError as error:
                problems.append({"source": name, "line": None, "reason": str(error)})
            else:
                with delay_interrupts():
                    done.add(measured)
            if report is not None:
                report(Progress(done.n, done.n_tokens, (number + 1) / len(inputs)))
    except KeyboardInterrupt:
        if not done.n:
            raise
        complete = False
    if not done.n:
        first = f"{problems[0]['source']}: {problems[0]['reason']}"
        raise AttnscopeError(f"no {sense.noun} is left of {len(inputs)}: {first}", sense.hint)
    # Describe what was studied.
    corpus = {
        "of": sense.of,
        "sources": [name for name, _ in inputs],
        "n_texts": done.n,
        "n_tokens": done.n_tokens,
        **({"grids": sorted(done.grids)} if done.grids else {}),
        "sha256": done.digest.hexdigest(),
        "problems": problems,
        "complete": complete,
    }
    notes = _say_once(done.notes, sense.noun)
    if done.n == 1:
        notes.append(f"of one {sense.noun} there are no intervals")
    options = {"roles": {}, "measures": list(sense.catalogue)}
    return Heads(run_of(model.info, notes), corpus, options, {"heads": done.heads()})


def _say_once(notes: Sequence[str], noun: str) -> list[str]:
    """Return notes as one that differ only in the file that they open with, or in the text that they quote."""
    # Notes by their text without the file and from the first quotation on.
    alike: dict[str, list[str]] = {}
    for note in dict.fromkeys(notes):
        without_file = re.sub(r"^\S+\.\w+ ", "", note)
        alike.setdefault(without_file.partition("“")[0], []).append(note)
    return [
        first if not more else f"{first}; likewise for {amount(len(more), f'more {noun}')}"
        for first, *more in alike.values()
    ]


def _list_inputs(items: Any, what: str) -> list[tuple[str, Any]]:
    """Return pictures or recordings, each with its name; files and patterns are looked up.

    Raises:
        AttnscopeError: There is none.
    """
    items = items if isinstance(items, list) else [items]
    files = [path for path in items if isinstance(path, str | Path)]
    arrays = [(f"{what} {n}", array) for n, array in enumerate(items, 1) if not isinstance(array, str | Path)]
    inputs = [(name, name) for name in expand(files)] + arrays
    if not inputs:
        raise AttnscopeError(f"there is no {what} to study", "give at least one file")
    return inputs
