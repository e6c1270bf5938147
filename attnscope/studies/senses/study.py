"""Measure the heads of vision and speech models on any number of photos or recordings.

`core.catalogue` defines the measures, and `attnscope.senses` reads the files. `studies.run` calls the measurers of this
file for one photo or recording at a time. Heads get no roles here.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attnscope.arrays import Floats
from attnscope.core.catalogue import PICTURE_MEASURES, SOUND_MEASURES, Measure
from attnscope.core.plain_torch import with_default_torch
from attnscope.core.sums import RunningSums
from attnscope.corpus import Problem, TextBlock, expand_patterns
from attnscope.errors import AttnscopeError, amount
from attnscope.models.model import Model, image_model_of
from attnscope.questions.heads import Heads, make_heads_table
from attnscope.report.wording import PICTURES, RECORDINGS
from attnscope.results.table import Table
from attnscope.senses.photos import read_photo
from attnscope.senses.recordings import read_recording
from attnscope.studies.failures import find_broken_rows
from attnscope.studies.heads.roles import make_measure_column
from attnscope.studies.inputs.reading import Reading, Speech, read
from attnscope.studies.inputs.texts import ReportProgress
from attnscope.studies.maps.running import run_probe
from attnscope.studies.run import Measurer, PartialSums, run_blocks

if TYPE_CHECKING:
    from attnscope.core.attention.seam import Kind
    from attnscope.core.facts import TextFacts


_GREY_IMAGE = np.full((256, 256, 3), 128, np.uint8)
"""A uniform grey picture, (height, width, 3), to try a model on."""


@with_default_torch
def picture_heads(model: Model, images: Any, report: ReportProgress | None = None) -> Heads:
    """Measure every head of a vision transformer on photos.

        found = attnscope.picture_heads(model, "photos/*.jpg")
        found["heads"].grid("distance_patches", "encoder")  # (layer, head)
        found["heads"].interval("near_patches")  # (head, 3): value, and its 95% interval over pictures
        found["heads"].columns["near_patches"].meaning
        found.save("heads.npz")

    The measures are `core.catalogue.PICTURE_MEASURES`; there are no roles. The model runs on one picture at a time, and
    no attention map is kept. Files that cannot be read are listed in `corpus["problems"]`, and the others are studied.
    After an interruption (KeyboardInterrupt), the result covers the pictures measured so far, and says that it is
    incomplete.

    Args:
        model: A loaded vision model in which every layer attends to all patches, such as ViT, DeiT or DINOv2.
        images: A file, a pattern such as "photos/*.jpg", or a list. Items of a list may also be Pillow images, or
            arrays (height, width, 3) of uint8.
        report: Called after each picture.

    Returns:
        The findings. `corpus["of"]` is "pictures": `n_texts` counts pictures, and `n_tokens` their patches.

    Raises:
        AttnscopeError: The model takes no pictures, or no picture can be read.
    """
    if model.image_reader is None and model.image_text_reader is not None:
        raise AttnscopeError(
            f"{model.info.name} reads pictures among words; heads are measured on photos in vision transformers alone",
            "look at single photos with: attnscope heatmap --image",
        )
    model = image_model_of(model)
    inputs = _list_inputs(images, "picture")
    # Try a grey picture first, called only to raise: an error here comes from the model, not from the user's pictures.
    read(model, read_photo(_GREY_IMAGE))
    return _measure_inputs(model, _PictureMeasurer, inputs, report)


@with_default_torch
def sound_heads(
    model: Model,
    audio: Any,
    text: str | Sequence[str] | None = None,
    report: ReportProgress | None = None,
) -> Heads:
    """Measure every head of a speech model's cross-attention on recordings.

        found = attnscope.sound_heads(attnscope.load("./whisper-tiny"), "talks/*.wav")
        found["heads"].grid("monotonicity", "cross")  # (layer, head): 1 = each token attends to later sound

    The measures are `core.catalogue.SOUND_MEASURES`; there are no roles. The model runs on one recording at a time,
    with its transcript, or with the text that the model writes itself. No attention map is kept. Files that cannot be
    read are listed in `corpus["problems"]`, and the others are studied. After an interruption (KeyboardInterrupt), the
    result covers the recordings measured so far, and says that it is incomplete.

    Args:
        model: A loaded speech model with an encoder and a decoder, such as Whisper.
        audio: A file, a pattern such as "talks/*.wav", or a list. Items of a list may also be pairs (samples, rate).
        text: The transcript of the recording, or a list with one transcript per recording; None = the text that the
            model itself writes.
        report: Called after each recording.

    Returns:
        The findings. `corpus["of"]` is "recordings": `n_texts` counts recordings, and `n_tokens` the tokens of their
        transcripts.

    Raises:
        AttnscopeError: The model takes no sound, or no recording can be read.
    """
    inputs = _list_inputs(audio, "recording")
    transcripts = [text] if isinstance(text, str) else text
    if transcripts:
        if len(transcripts) != len(inputs):
            raise AttnscopeError(
                f"{amount(len(inputs), 'recording')} and {amount(len(transcripts), 'transcript')}",
                "give one for each, or leave out the text",
            )
        inputs = [
            replace(recording, text=transcript)
            for recording, transcript in zip(inputs, transcripts, strict=True)
        ]
    return _measure_inputs(model, _RecordingMeasurer, inputs, report)


def _picture_facts(n_tokens: int, grid: tuple[int, int]) -> TextFacts:
    """Return what measures need to know of a picture: which tokens are its patches, and how they form a grid.

    `grid` is how many rows and columns of patches there are. All other tokens count as special.
    """
    import torch

    from attnscope.core.facts import TextFacts

    # (1, token). Special tokens, such as [CLS], stand before the patches. They are also `context`: tokens that count as
    # keys but not as queries.
    ids = torch.arange(n_tokens)[None]
    is_special = ids < n_tokens - math.prod(grid)
    return TextFacts(
        real=torch.ones_like(is_special),
        special=is_special,
        ids=ids,
        context=is_special,
        n_columns=grid[1],
    )


def sum_sound_measures(rows: Floats) -> tuple[Floats, Floats]:
    """Return the SOUND_MEASURES of one recording, monotonicity and sound, as sums and counts, (head, measure) each.

    A token without attention on frames with sound has no mean time, so it counts for `sound` only.

    Args:
        rows: For each head and token q, two sums over the frames f with sound: its attention Σ A_qf, and Σ A_qf · time
            of f, (head, token, 2).
    """
    n_heads, n_tokens, _ = rows.shape
    sound_share = rows[..., 0]
    # The mean time of the frames that each token attends to, (head, token); NaN = it attends to no sound.
    times = np.divide(
        rows[..., 1], sound_share, out=np.full(sound_share.shape, np.nan), where=sound_share > 0
    )
    # For each pair of tokens: 1 if the later token attends to later sound, -1 if to earlier sound. (head, pair)
    earlier, later = np.triu_indices(n_tokens, 1)
    directions = np.sign(times[:, later] - times[:, earlier])
    # Monotonicity is the mean over pairs, so a recording counts once. `sound` is summed over tokens.
    n_pairs = (~np.isnan(directions)).sum(1)
    monotonicity = np.nansum(directions, 1) / np.maximum(n_pairs, 1)
    sums = np.stack([monotonicity, sound_share.sum(1)], 1)
    counts = np.stack([n_pairs > 0, np.full(n_heads, n_tokens)], 1)
    return sums, counts.astype(np.float64)


# Measuring


@dataclass(frozen=True, eq=False)
class _Input:
    """Hold a picture or recording. It takes the place of a text in `studies.run`.

    Attributes:
        index: Its number, from 0.
        source: The name of its file. For data in memory, it is "picture 1" or "recording 1", for example.
        content: The name of its file, or data in memory; after it is read, a `Photo` or a `Recording`.
        text: The transcript of a recording; None = the text that the model writes.
        line: None, since `studies.run` asks each text for its line in a file.
    """

    index: int
    source: str
    content: Any
    text: str | None = None
    line: None = None

    def __len__(self) -> int:
        # For `studies.run`, a batch of one picture or recording has the size 1.
        return 1


@dataclass(kw_only=True, eq=False)
class ModalitySums(PartialSums):
    """Hold the sums over pictures or recordings.

    Attributes:
        measures: Layer -> the measures of its heads, and their values under uniform attention, (2, head, measure).
        grids: How many rows and columns of patches each picture has.
        notes: The notes on each input, such as that a recording was cut.
        problems: The inputs that cannot be studied, as entries for `problems` of a corpus.
    """

    measures: dict[int, RunningSums] = field(default_factory=dict)
    grids: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[dict[str, Any], ...] = ()


class _InputMeasures(NamedTuple):
    """Hold what was measured on one input.

    Attributes:
        reading: The input as the model reads it.
        n_tokens: How many queries were measured.
        by_layer: Layer -> sums and counts, as `RunningSums.add` takes them. Sums are (2, head, measure): those of the
            heads, and those under uniform attention. For pictures they are (unit, 2, head, measure). A picture with few
            patches is one unit. A picture with many is cut into several units, blocks of patches as queries; see
            `core.catalogue.queries_per_unit`. Counts broadcast to the shape of the sums.
    """

    reading: Reading
    n_tokens: int
    by_layer: Mapping[int, tuple[Floats, Floats]]


class _ModalityMeasurer(Measurer[ModalitySums]):
    """Measure one input at a time: a batch is one `_Input`. There is a subclass for pictures and one for recordings.

    Attributes:
        noun: The word for one input, such as "picture".
        plural: The word for several inputs, which results hold as `corpus["of"]`.
        kind: The kind of attention that is measured.
        catalogue: The measures, by name.
        read_content: A function that reads a file or data in memory as a `Photo` or a `Recording`.
        data_field: The field of `Photo` or `Recording` that holds the pixels or samples.
        resting: A function that takes the values of the measures, (head,) each, by name. It returns the share of each
            head's attention on sinks or, for recordings, on silence, (head,).
    """

    noun: str
    plural: str
    kind: Kind
    catalogue: Mapping[str, Measure]
    read_content: Callable[[Any], Any]
    data_field: str
    resting: Callable[[Mapping[str, Floats]], Floats]

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def start(self, block: TextBlock) -> ModalitySums:
        """Return empty sums; `studies.run` calls it for each block."""
        return ModalitySums()

    def batches(self, block: TextBlock) -> Sequence[Any]:
        """Return the block as one batch: it has one input."""
        return [block.texts]

    def add(self, part: ModalitySums, batch: Sequence[_Input], result: _InputMeasures) -> None:
        """Add an input to the sums. If it has NaN or infinity, note it as broken; if no tokens, as a problem."""
        (measured_input,) = batch
        # `find_broken_rows` takes an array per layer, with a row for each text. This input is row 0, (1, …).
        rows_by_layer = {layer: sums[None] for layer, (sums, _) in result.by_layer.items()}
        broken_rows = find_broken_rows({self.kind: rows_by_layer})
        if broken_rows:
            part.broken[measured_input.index] = broken_rows[0]
        elif not rows_by_layer:
            problem = Problem(measured_input.source, None, "there is no token in what is written")
            part.problems += (asdict(problem),)
        else:
            # Sums are (2, head, measure), or (unit, 2, head, measure): `add` takes one text or a batch, here of units.
            for layer, (sums, counts) in result.by_layer.items():
                part.measures.setdefault(layer, RunningSums(sums.shape[-3:])).add(sums, counts)
            part.n_texts += 1
            part.n_tokens += result.n_tokens
            part.notes += result.reading.notes
            if result.reading.picture is not None:
                part.grids += (result.reading.picture.grid,)


class _PictureMeasurer(_ModalityMeasurer):
    """Measure self-attention on photos, each patch as a query."""

    noun = "picture"
    plural = PICTURES
    kind = "encoder"
    catalogue = PICTURE_MEASURES
    read_content = staticmethod(read_photo)
    data_field = "image"
    resting = staticmethod(lambda values: values["resting"])

    def measure(self, batch: Sequence[_Input]) -> _InputMeasures:
        """Measure the heads on a photo."""
        from attnscope.core.measures import HeadMeasures

        reading = read(self.model, batch[0].content)
        assert reading.picture is not None
        grid = reading.picture.grid
        probe = HeadMeasures(_picture_facts(len(reading.tokens), grid), catalogue=PICTURE_MEASURES)
        run_probe(self.model, reading, probe)
        # Some measures have a second version, "<name>_active", over the keys that are no sinks. The sinks of a picture
        # are its special tokens, so that version is over patches alone. It is taken, and shown under the plain name.
        names = []
        for name, measure in PICTURE_MEASURES.items():
            names.append(f"{name}_active" if measure.has_active else name)
        by_layer = {}
        for layer, measured in probe.sums[self.kind].items():
            columns = [measured.names.index(name) for name in names]
            # Pick the columns of these measures: (2, measure, unit, head) → (unit, 2, head, measure).
            sums = np.stack([measured.sum, measured.uniform_sum])[:, columns].transpose(2, 0, 3, 1)
            # (measure, unit, head) → (unit, 1, head, measure)
            counts = measured.count[columns].transpose(1, 2, 0)[:, None]
            by_layer[layer] = sums, counts
        return _InputMeasures(reading, math.prod(grid), by_layer)


class _RecordingMeasurer(_ModalityMeasurer):
    """Measure cross-attention on recordings, with their transcripts or with what the model writes."""

    noun = "recording"
    plural = RECORDINGS
    kind = "cross"
    catalogue = SOUND_MEASURES
    read_content = staticmethod(read_recording)
    data_field = "samples"
    resting = staticmethod(lambda values: 1 - values["sound"])

    def measure(self, batch: Sequence[_Input]) -> _InputMeasures:
        """Measure the heads on a recording. If its transcript has no token, `by_layer` is empty."""
        from attnscope.core.attention.probes import HeadRecorder, sum_over_keys

        reading = read(self.model, Speech(batch[0].content, batch[0].text))
        sound = reading.sound
        if reading.target is None or sound is None:
            raise AttnscopeError(
                f"{self.model.info.name} has no decoder, so there is no cross-attention to measure",
                "look at single recordings with: attnscope heatmap --audio",
            )
        # Measure the tokens of words, not special ones.
        is_query = ~reading.target.special
        if not is_query.any():
            return _InputMeasures(reading, 0, {})
        # Two functions of the frames with sound, (frame, 2): 1, and the seconds from the middle of the sound. The probe
        # multiplies attention by each, and adds up over frames.
        n_frames = len(sound.envelope)
        times = (np.arange(n_frames) + 0.5 - n_frames / 2) * sound.seconds_per_frame
        factors = np.stack([np.ones(n_frames), times], 1)
        probe = HeadRecorder(lambda call: sum_over_keys(call, factors), kinds=[self.kind])
        run_probe(self.model, reading, probe)
        # Under uniform attention all tokens have one mean time, so monotonicity is 0. `sound` is the share of frames
        # with sound; the others pad the recording to the length of the encoder's window.
        uniform = np.array([0.0, n_frames / round(sound.window_seconds / sound.seconds_per_frame)])
        by_layer = {}
        for layer, rows in probe.maps[self.kind].items():
            sums, counts = sum_sound_measures(rows.numpy()[0][:, is_query])
            by_layer[layer] = np.stack([sums, counts * uniform]), counts
        return _InputMeasures(reading, int(is_query.sum()), by_layer)


def _measure_inputs(
    model: Model,
    modality: type[_ModalityMeasurer],
    inputs: Sequence[_Input],
    report: ReportProgress | None,
) -> Heads:
    """Measure inputs one after the other, and return the result. It lists the inputs that cannot be studied.

    Raises:
        AttnscopeError: No input could be studied.
        KeyboardInterrupt: The user pressed Ctrl-C before one input was measured.
    """
    problems: list[dict[str, Any]] = []
    digest = hashlib.sha256()

    def read_inputs() -> Iterator[TextBlock]:
        for unread_input in inputs:
            source = unread_input.source
            try:
                content = modality.read_content(unread_input.content)
            except AttnscopeError as error:
                # The entry has the source in a field of its own, so cut it from the message.
                reason = error.message.replace(f"{source} ", "", 1)
                problems.append(asdict(Problem(source, None, reason)))
                continue
            data = np.asarray(getattr(content, modality.data_field))
            digest.update(f"{modality.noun} {data.shape}\n".encode() + data.tobytes())
            read_input: Any = replace(unread_input, content=content)
            yield TextBlock(read_input.index, (read_input,))

    # Each input is a block of its own: after an interruption, all finished blocks count.
    study_run = run_blocks(
        modality,
        (model,),
        read_inputs(),
        ModalitySums(),
        report=report,
        get_share=lambda block: (block.index + 1) / len(inputs),
    )
    done = study_run.done
    problems += [*done.problems, *study_run.problems(model.info)]
    if not done.n_texts:
        if not study_run.complete:
            raise KeyboardInterrupt
        problem = f"{problems[0]['source']}: {problems[0]['reason']}"
        raise AttnscopeError(
            f"no {modality.noun} is left of {len(inputs)}: {problem}", "give files that can be read"
        )
    # Notes on several inputs may be the same but for the file name at their start, such as "a.wav ", and the text in
    # quotes “…” at their end. Of these, keep the last note.
    note_by_wording = {}
    for note in done.notes:
        without_file = re.sub(r"^\S+\.\w+ ", "", note)
        note_by_wording[without_file.partition("“")[0]] = note
    if done.n_texts == 1:
        study_run.notes.append(f"of one {modality.noun} there are no intervals")
    corpus = {
        "of": modality.plural,
        "sources": [item.source for item in inputs],
        "n_texts": done.n_texts,
        "n_tokens": done.n_tokens,
        "sha256": digest.hexdigest(),
        "problems": problems,
        "complete": study_run.complete,
    }
    if done.grids:
        corpus["grids"] = sorted(set(done.grids))
    run = study_run.describe_run(model.info, list(note_by_wording.values()))
    options = {"roles": {}, "measures": list(modality.catalogue)}
    return Heads(run, corpus, options, {"heads": _build_table(modality, done)})


def _build_table(modality: type[_ModalityMeasurer], done: ModalitySums) -> Table:
    """Return the table of all heads; a measure that is undefined on all inputs is NaN."""
    columns = [make_measure_column(name, modality.catalogue) for name in modality.catalogue]
    # Intervals are clipped to the range of each measure.
    lowest = [measure.low for measure in modality.catalogue.values()]
    highest = [measure.high for measure in modality.catalogue.values()]
    tables = []
    for layer, sums in sorted(done.measures.items()):
        # Each array is (2, head, measure): index 0 is the heads, and index 1 uniform attention. Of the sums of counts,
        # "c", and of the intervals, only those of the heads are shown.
        values, baseline = sums.ratio()
        counts, _ = sums.total("c")
        low, high = np.clip(np.stack(sums.interval())[:, 0], lowest, highest)
        n_heads = len(values)
        table = make_heads_table(
            ([modality.kind] * n_heads, [layer] * n_heads, range(n_heads)),
            columns,
            roles=[""] * n_heads,
            sink_shares=modality.resting(dict(zip(modality.catalogue, values.T, strict=True))),
            value=values,
            low=low,
            high=high,
            baseline=baseline,
            count=counts,
        )
        tables.append(table)
    return Table.stack(tables)


def _list_inputs(items: Any, noun: str) -> list[_Input]:
    """Return the inputs of a study: first the files, with patterns expanded, then images or samples in memory.

    `noun` is "picture" or "recording".

    Raises:
        AttnscopeError: There is no input.
    """
    items = items if isinstance(items, list) else [items]
    files = [item for item in items if isinstance(item, str | Path)]
    # The source and the content of each input.
    pairs: list[tuple[str, Any]] = [(name, name) for name in expand_patterns(files)]
    for number, item in enumerate(items, 1):
        if not isinstance(item, str | Path):
            pairs.append((f"{noun} {number}", item))
    if not pairs:
        raise AttnscopeError(f"there is no {noun} to study", "give at least one file")
    return [_Input(index, source, content) for index, (source, content) in enumerate(pairs)]
