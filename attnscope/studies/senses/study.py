"""Measure the heads of models that see or hear, on any number of photos or recordings.

The measures are those of `core.catalogue`. `senses` reads the files, and `studies.run` goes over them one by one. Heads
get no roles here.
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
from numpy.typing import NDArray

from attnscope.core.catalogue import PICTURE_MEASURES, SOUND_MEASURES, Measure
from attnscope.core.plain_torch import with_default_torch
from attnscope.core.sums import RunningSums
from attnscope.corpus import Problem, TextBlock, expand_patterns
from attnscope.errors import AttnscopeError, amount
from attnscope.models.model import Model, image_model_of
from attnscope.questions.heads import Heads, heads_table
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

Floats = NDArray[np.float64]

_BLANK = np.full((256, 256, 3), 128, np.uint8)
"""A grey picture, (height, width, 3)."""


@with_default_torch
def picture_heads(model: Model, images: Any, report: ReportProgress | None = None) -> Heads:
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
        The findings. `corpus["of"]` is "pictures": `n_texts` counts pictures, and `n_tokens` their patches.

    Raises:
        AttnscopeError: The model sees no pictures, or there is not one that can be read.
    """
    if model.image_reader is None and model.image_text_reader is not None:
        raise AttnscopeError(
            f"{model.info.name} reads pictures among words; heads are measured on photos in vision transformers alone",
            "look at single photos with: attnscope heatmap --image",
        )
    model = image_model_of(model)
    inputs = _list_inputs(images, "picture")
    # Try a blank picture first: an error here is the model's, and would come with every picture.
    read(model, read_photo(_BLANK))
    return _study(model, _Pictures, inputs, report)


@with_default_torch
def sound_heads(
    model: Model,
    audio: Any,
    text: str | Sequence[str] | None = None,
    report: ReportProgress | None = None,
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
        The findings. `corpus["of"]` is "recordings": `n_texts` counts them, and `n_tokens` the tokens of transcripts.

    Raises:
        AttnscopeError: The model hears nothing, or there is not one recording that can be read.
    """
    inputs = _list_inputs(audio, "recording")
    transcripts = [text] if isinstance(text, str) else text
    if transcripts:
        if len(transcripts) != len(inputs):
            raise AttnscopeError(
                f"{amount(len(inputs), 'recording')} and {amount(len(transcripts), 'transcript')}",
                "give one for each, or leave out the text",
            )
        inputs = [replace(each, text=own) for each, own in zip(inputs, transcripts, strict=True)]
    return _study(model, _Recordings, inputs, report)


def _picture_facts(n_tokens: int, grid: tuple[int, int]) -> TextFacts:
    """Return what measures need to know of a picture: its patches are queries and keys, other tokens are special."""
    import torch

    from attnscope.core.facts import TextFacts

    # Special tokens, such as [CLS], stand before the patches. (1, token)
    ids = torch.arange(n_tokens)[None]
    is_special = ids < n_tokens - math.prod(grid)
    return TextFacts(
        real=torch.ones_like(is_special),
        special=is_special,
        ids=ids,
        context=is_special,
        n_columns=grid[1],
    )


def sound_sums(rows: Floats) -> tuple[Floats, Floats]:
    """Return the SOUND_MEASURES of one recording, monotonicity and sound, as sums and counts, (head, measure) each.

    A token that gives no attention to frames with sound counts for `sound` only: it listens at no time.

    Args:
        rows: Two sums over the frames f with sound, Σ A_qf and Σ A_qf · time of f, (head, token, 2).
    """
    n_heads, n_tokens, _ = rows.shape
    share = rows[..., 0]
    # The mean time at which each token listens, (head, token); NaN = at none.
    times = np.divide(rows[..., 1], share, out=np.full(share.shape, np.nan), where=share > 0)
    # For each pair of tokens, whether the later one listens later: 1, or -1 if earlier. (head, pair)
    first, second = np.triu_indices(n_tokens, 1)
    order = np.sign(times[:, second] - times[:, first])
    n_pairs = (~np.isnan(order)).sum(1)
    sums = np.stack([np.nansum(order, 1) / np.maximum(n_pairs, 1), share.sum(1)], 1)
    counts = np.stack([n_pairs > 0, np.full(n_heads, n_tokens)], 1)
    return sums, counts.astype(np.float64)


# Measuring


@dataclass(frozen=True, eq=False)
class _Input:
    """Hold a picture or recording, as one text of the study.

    Attributes:
        index: Its number, from 0.
        source: The name of its file, or "picture 1" or "recording 1" for what is no file.
        content: The name of its file, or what a Python user gives; after it is read, a `Photo` or a `Recording`.
        text: The transcript of a recording; None = what the model writes.
        line: None. `studies.run` asks each text for its line in a file.
    """

    index: int
    source: str
    content: Any
    text: str | None = None
    line: None = None

    def __len__(self) -> int:
        return 1


@dataclass(kw_only=True, eq=False)
class SenseSums(PartialSums):
    """Hold the sums over pictures or recordings.

    Attributes:
        measures: Layer -> the measures of its heads, and what they are under uniform attention, (2, head, measure).
        grids: Rows and columns of patches of each picture.
        notes: What the reader noted on each input, such as that it was cut.
        problems: The inputs that cannot be studied, as entries for `problems` of a corpus.
    """

    measures: dict[int, RunningSums] = field(default_factory=dict)
    grids: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[dict[str, Any], ...] = ()


class _Measured(NamedTuple):
    """Hold what was measured on one input.

    Attributes:
        reading: The input as the model reads it.
        n_tokens: How many queries were measured.
        by_layer: Layer -> sums and counts. Sums are those of the heads and those under uniform attention, (2, head,
            measure), or (unit, 2, head, measure) where queries come in units. Counts broadcast to them.
    """

    reading: Reading
    n_tokens: int
    by_layer: Mapping[int, tuple[Floats, Floats]]


class _Sense(Measurer[SenseSums]):
    """Measure one input at a time. Its subclasses are the senses: sight and hearing.

    Attributes:
        noun: The word for one input, such as "picture".
        plural: The word for several, which records hold as `corpus["of"]`.
        kind: The kind of attention that is measured.
        catalogue: The measures.
        read_content: A function that reads a file, or what a Python user gives, as a `Photo` or a `Recording`.
        data_field: The field of these that holds the pixels or samples.
        resting: A function of the values of the measures, by name and (head,) each. It returns the share of each head's
            attention that rests on sinks or, of recordings, on silence, (head,).
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

    def start(self, block: TextBlock) -> SenseSums:
        """Return empty sums."""
        return SenseSums()

    def batches(self, block: TextBlock) -> Sequence[Any]:
        """Return the one input of a block."""
        return [block.texts]

    def add(self, part: SenseSums, batch: Sequence[_Input], result: _Measured) -> None:
        """Add an input to the sums. One with NaN or infinity is noted as broken, one without tokens as a problem."""
        (measured_input,) = batch
        # `find_broken_rows` takes a row per text. This one has row 0, (1, …).
        rows = {layer: sums[None] for layer, (sums, _) in result.by_layer.items()}
        broken = find_broken_rows({self.kind: rows})
        if broken:
            part.broken[measured_input.index] = broken[0]
        elif not rows:
            problem = Problem(measured_input.source, None, "there is no token in what is written")
            part.problems += (asdict(problem),)
        else:
            for layer, (sums, counts) in result.by_layer.items():
                part.measures.setdefault(layer, RunningSums(sums.shape[-3:])).add(sums, counts)
            part.n_texts += 1
            part.n_tokens += result.n_tokens
            part.notes += result.reading.notes
            if result.reading.picture is not None:
                part.grids += (result.reading.picture.grid,)


class _Pictures(_Sense):
    """Measure self-attention on photos, each patch as a query."""

    noun = "picture"
    plural = PICTURES
    kind = "encoder"
    catalogue = PICTURE_MEASURES
    read_content = staticmethod(read_photo)
    data_field = "image"
    resting = staticmethod(lambda values: values["resting"])

    def measure(self, batch: Sequence[_Input]) -> _Measured:
        """Measure the heads on a photo."""
        from attnscope.core.measures import HeadMeasures

        reading = read(self.model, batch[0].content)
        assert reading.picture is not None
        grid = reading.picture.grid
        probe = HeadMeasures(_picture_facts(len(reading.tokens), grid), catalogue=PICTURE_MEASURES)
        run_probe(self.model, reading, probe)
        # "…_active" is a measure over keys that are no sinks: here over patches alone, as special tokens are the sinks.
        names = []
        for name, measure in PICTURE_MEASURES.items():
            names.append(f"{name}_active" if measure.has_active else name)
        by_layer = {}
        for layer, measured in probe.sums[self.kind].items():
            columns = [measured.names.index(name) for name in names]
            # (2, measure, unit, head) → (unit, 2, head, measure)
            sums = np.stack([measured.sum, measured.uniform_sum])[:, columns].transpose(2, 0, 3, 1)
            # (measure, unit, head) → (unit, 1, head, measure)
            counts = measured.count[columns].transpose(1, 2, 0)[:, None]
            by_layer[layer] = sums, counts
        return _Measured(reading, math.prod(grid), by_layer)


class _Recordings(_Sense):
    """Measure cross-attention on recordings, with their transcripts or with what the model writes."""

    noun = "recording"
    plural = RECORDINGS
    kind = "cross"
    catalogue = SOUND_MEASURES
    read_content = staticmethod(read_recording)
    data_field = "samples"
    resting = staticmethod(lambda values: 1 - values["sound"])

    def measure(self, batch: Sequence[_Input]) -> _Measured:
        """Measure the heads on a recording; on one without a written token, no layer is measured."""
        from attnscope.core.attention.probes import HeadRecorder, sum_over_keys

        reading = read(self.model, Speech(batch[0].content, batch[0].text))
        sound = reading.sound
        if reading.target is None or sound is None:
            raise AttnscopeError(
                f"{self.model.info.name} has no decoder, so there is no cross-attention to measure",
                "look at single recordings with: attnscope heatmap --audio",
            )
        # Measure the tokens that write words, not special ones.
        is_query = ~reading.target.special
        if not is_query.any():
            return _Measured(reading, 0, {})
        # Sum over the frames with sound: attention times 1, and times seconds from the middle of the sound. (frame, 2)
        n_frames = len(sound.envelope)
        times = (np.arange(n_frames) + 0.5 - n_frames / 2) * sound.seconds_per_frame
        factors = np.stack([np.ones(n_frames), times], 1)
        probe = HeadRecorder(lambda call: sum_over_keys(call, factors), kinds=[self.kind])
        run_probe(self.model, reading, probe)
        # Under uniform attention all tokens listen at one time, and `sound` is the share of frames with sound.
        uniform = np.array([0.0, n_frames / round(sound.window_seconds / sound.seconds_per_frame)])
        by_layer = {}
        for layer, rows in probe.maps[self.kind].items():
            sums, counts = sound_sums(rows.numpy()[0][:, is_query])
            by_layer[layer] = np.stack([sums, counts * uniform]), counts
        return _Measured(reading, int(is_query.sum()), by_layer)


def _study(
    model: Model, sense: type[_Sense], inputs: Sequence[_Input], report: ReportProgress | None
) -> Heads:
    """Measure inputs one after the other, and return the record, which lists those that cannot be studied.

    Raises:
        AttnscopeError: No input could be studied.
    """
    problems: list[dict[str, Any]] = []
    digest = hashlib.sha256()

    def read_inputs() -> Iterator[TextBlock]:
        for each in inputs:
            try:
                content = sense.read_content(each.content)
            except AttnscopeError as error:
                # The entry names the source already.
                reason = error.message.replace(f"{each.source} ", "", 1)
                problems.append(asdict(Problem(each.source, None, reason)))
                continue
            data = np.asarray(getattr(content, sense.data_field))
            digest.update(f"{sense.noun} {data.shape}\n".encode() + data.tobytes())
            text: Any = replace(each, content=content)
            yield TextBlock(each.index, (text,))

    # Each input is a block, so it counts as soon as it is done.
    study_run = run_blocks(
        sense,
        (model,),
        read_inputs(),
        SenseSums(),
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
            f"no {sense.noun} is left of {len(inputs)}: {problem}", "give files that can be read"
        )
    # Notes on several inputs may differ only in the file at their start or the text that they quote: keep the last.
    note_of = {}
    for note in done.notes:
        without_file = re.sub(r"^\S+\.\w+ ", "", note)
        note_of[without_file.partition("“")[0]] = note
    if done.n_texts == 1:
        study_run.notes.append(f"of one {sense.noun} there are no intervals")
    corpus = {
        "of": sense.plural,
        "sources": [each.source for each in inputs],
        "n_texts": done.n_texts,
        "n_tokens": done.n_tokens,
        "sha256": digest.hexdigest(),
        "problems": problems,
        "complete": study_run.complete,
    }
    if done.grids:
        corpus["grids"] = sorted(set(done.grids))
    run = study_run.describe_run(model.info, list(note_of.values()))
    options = {"roles": {}, "measures": list(sense.catalogue)}
    return Heads(run, corpus, options, {"heads": _table(sense, done)})


def _table(sense: type[_Sense], done: SenseSums) -> Table:
    """Return the table of all heads; a measure that is undefined on all inputs is NaN."""
    columns = [make_measure_column(name, sense.catalogue) for name in sense.catalogue]
    # Intervals are clipped to the range of each measure.
    lowest = [measure.low for measure in sense.catalogue.values()]
    highest = [measure.high for measure in sense.catalogue.values()]
    tables = []
    for layer, sums in sorted(done.measures.items()):
        # Index 0 is the heads, and index 1 uniform attention. (head, measure) each.
        values, baseline = sums.ratio()
        counts, _ = sums.total("c")
        low, high = np.clip(np.stack(sums.interval())[:, 0], lowest, highest)
        n_heads = len(values)
        table = heads_table(
            ([sense.kind] * n_heads, [layer] * n_heads, range(n_heads)),
            columns,
            roles=[""] * n_heads,
            resting=sense.resting(dict(zip(sense.catalogue, values.T, strict=True))),
            value=values,
            low=low,
            high=high,
            baseline=baseline,
            count=counts,
        )
        tables.append(table)
    return Table.stack(tables)


def _list_inputs(items: Any, noun: str) -> list[_Input]:
    """Return the inputs of a study: first those from files and patterns, then images or samples in memory.

    Raises:
        AttnscopeError: There is none.
    """
    items = items if isinstance(items, list) else [items]
    files = []
    in_memory = []
    for number, item in enumerate(items, 1):
        if isinstance(item, str | Path):
            files.append(item)
        else:
            in_memory.append((f"{noun} {number}", item))
    # The source and the content of each input.
    pairs: list[tuple[str, Any]] = [(name, name) for name in expand_patterns(files)]
    pairs += in_memory
    if not pairs:
        raise AttnscopeError(f"there is no {noun} to study", "give at least one file")
    return [_Input(index, source, content) for index, (source, content) in enumerate(pairs)]
