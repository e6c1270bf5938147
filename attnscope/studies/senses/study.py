"""Measure the heads of models that see or hear, on any number of photos or recordings.

Measures are those of `core.catalogue`; `senses` reads the files, and `studies.run` goes over them one by one. There are
no roles here.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnscope.core.catalogue import PICTURE_MEASURES, SOUND_MEASURES, Measure
from attnscope.core.plain_torch import with_plain_torch
from attnscope.core.sums import RunningSums
from attnscope.corpus import Block, expand
from attnscope.errors import AttnscopeError, amount
from attnscope.models.model import Model, eyes_of
from attnscope.questions.heads import Heads, heads_table
from attnscope.report.wording import PICTURES, RECORDINGS
from attnscope.results.table import Table
from attnscope.senses.photos import read_photo
from attnscope.senses.recordings import read_recording
from attnscope.studies.failures import broken_rows
from attnscope.studies.heads.roles import measure_column
from attnscope.studies.inputs.reading import Reading, Speech, read
from attnscope.studies.inputs.texts import Report
from attnscope.studies.maps.running import run_probe
from attnscope.studies.run import Measurer, Part, run_blocks

if TYPE_CHECKING:
    from attnscope.core.attention.seam import Kind
    from attnscope.core.facts import TextFacts

Floats = NDArray[np.float64]

_BLANK = np.full((256, 256, 3), 128, np.uint8)
"""A grey picture, (height, width, 3)."""


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
    if model.eyes is None and model.viewer is not None:
        raise AttnscopeError(
            f"{model.info.name} reads pictures among words; heads are measured on photos in vision transformers alone",
            "look at single photos with: attnscope heatmap --image",
        )
    model = eyes_of(model)
    inputs = _list_inputs(images, "picture")
    # Try a blank picture first: an error here is the model's, and would come with every picture.
    read(model, read_photo(_BLANK))
    return _study(model, _Pictures, inputs, report)


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
    # One transcript for each recording, or none.
    inputs = _list_inputs(audio, "recording")
    texts: list[str | None] = [None] * len(inputs)
    if isinstance(text, str):
        texts = [text]
    elif text:
        texts = [*text]
    if len(texts) != len(inputs):
        raise AttnscopeError(
            f"{amount(len(inputs), 'recording')} and {amount(len(texts), 'transcript')}",
            "give one for each, or leave out the text",
        )
    inputs = [replace(each, text=text) for each, text in zip(inputs, texts, strict=True)]
    return _study(model, _Recordings, inputs, report)


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
    # (head, token) each
    share, moment = rows.transpose(2, 0, 1)
    # Tokens that hear something have a time, (head, token). Each pair of them is in order, 1, or not, -1, (head, pair).
    times = np.divide(moment, share, out=np.full(share.shape, np.nan), where=share > 0)
    first, second = np.triu_indices(share.shape[1], 1)
    order = np.sign(times[:, second] - times[:, first])
    n_pairs = (~np.isnan(order)).sum(1)
    sums = np.stack([np.nansum(order, 1) / np.maximum(n_pairs, 1), share.sum(1)], 1)
    counts = np.stack([n_pairs > 0, np.full(len(rows), share.shape[1])], 1)
    return sums, counts.astype(np.float64)


# Measuring


@dataclass(frozen=True, eq=False)
class _Input:
    """Hold a picture or recording, as one text of the study.

    Attributes:
        index: Its number, from 0.
        source: What problems call it.
        content: The name of its file, or what Python users give; once it was read, a `Photo` or a `Recording`.
        text: The transcript of a recording; None = what the model writes.
        line: Of texts the line of the file; it has none.
    """

    index: int
    source: str
    content: Any
    text: str | None = None
    line: None = None

    def __len__(self) -> int:
        return 1


@dataclass(kw_only=True, eq=False)
class SenseSums(Part):
    """Hold the sums over pictures or recordings by layer: of heads, and of uniform attention, (2, head, measure).

    Attributes:
        grids: Rows and columns of patches of each picture.
        notes: What was noted as they were read.
        problems: What cannot be studied, as problems of a corpus.
    """

    measures: dict[int, RunningSums] = field(default_factory=dict)
    grids: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[dict[str, Any], ...] = ()


class _Measured(NamedTuple):
    """Hold what was measured on one input.

    Attributes:
        reading: How it was read.
        n_tokens: How many queries it has.
        by_layer: Layer -> sums of heads and of uniform attention, ([unit,] 2, head, measure), and counts that broadcast
            to them.
    """

    reading: Reading
    n_tokens: int
    by_layer: Mapping[int, tuple[Floats, Floats]]


class _Sense(Measurer[SenseSums]):
    """Measure one input at a time, by measures of a sense.

    Attributes:
        noun: What an input is called; `of` is what several are called in records.
        kind: The kind of attention.
        catalogue: The measures.
        read: The function that reads a file, or what Python users give.
        values: The field of what was read that holds its numbers.
        resting: The function that returns how much of each head's attention rests, (head,), from the values of its
            measures by name, (head,) each.
    """

    noun: str
    of: str
    kind: Kind
    catalogue: Mapping[str, Measure]
    read: Callable[[Any], Any]
    values: str
    resting: Callable[[Mapping[str, Floats]], Floats]

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def start(self, block: Block) -> SenseSums:
        """Return sums of nothing yet."""
        return SenseSums()

    def batches(self, block: Block) -> Sequence[Any]:
        """Return the one input of a block."""
        return [block.texts]

    def add(self, part: SenseSums, batch: Sequence[_Input], result: _Measured) -> None:
        """Add an input to all of the sums; one that is broken or empty to none."""
        (each,) = batch
        # The whole input is one row, (1, …).
        rows = {layer: sums[None] for layer, (sums, _) in result.by_layer.items()}
        broken = broken_rows({self.kind: rows})
        if broken:
            part.broken[each.index] = broken[0]
        elif not rows:
            part.problems += (_problem(each.source, "there is no token in what is written"),)
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
    of = PICTURES
    kind = "encoder"
    catalogue = PICTURE_MEASURES
    read = staticmethod(read_photo)
    values = "image"
    resting = staticmethod(lambda values: values["resting"])

    def measure(self, batch: Sequence[_Input]) -> _Measured:
        """Measure the heads on a photo."""
        from attnscope.core.measures import HeadMeasures

        reading = read(self.model, batch[0].content)
        assert reading.picture is not None
        grid = reading.picture.grid
        probe = HeadMeasures(_picture_facts(len(reading.tokens), grid), catalogue=PICTURE_MEASURES)
        run_probe(self.model, reading, probe)
        # The keys outside sinks are the patches, so the sums over patches alone are the `_active` ones.
        names = []
        for name, measure in PICTURE_MEASURES.items():
            names.append(f"{name}_active" if measure.has_active else name)
        by_layer = {}
        for layer, sums in probe.sums[self.kind].items():
            columns = [sums.names.index(name) for name in names]
            # (measure, unit, head) → (unit, 2, head, measure)
            both = np.stack([sums.sum[columns], sums.uniform_sum[columns]])
            by_layer[layer] = both.transpose(2, 0, 3, 1), sums.count[columns].transpose(1, 2, 0)[:, None]
        return _Measured(reading, math.prod(grid), by_layer)


class _Recordings(_Sense):
    """Measure cross-attention on recordings, with their transcripts or with what the model writes."""

    noun = "recording"
    of = RECORDINGS
    kind = "cross"
    catalogue = SOUND_MEASURES
    read = staticmethod(read_recording)
    values = "samples"
    resting = staticmethod(lambda values: 1 - values["sound"])

    def measure(self, batch: Sequence[_Input]) -> _Measured:
        """Measure the heads on a recording; on one without a written token, no layer is measured."""
        from attnscope.core.attention.probes import HeadReader, key_sums

        reading = read(self.model, Speech(batch[0].content, batch[0].text))
        sound = reading.sound
        if reading.target is None or sound is None:
            raise AttnscopeError(
                f"{self.model.info.name} has no decoder, so there is no cross-attention to measure",
                "look at single recordings with: attnscope heatmap --audio",
            )
        # Special tokens write no words: their rows say nothing of listening.
        asks = ~reading.target.special
        if not asks.any():
            return _Measured(reading, 0, {})
        # Weights of the sums over frames with sound, (frame, 2): 1, and seconds from the middle of the sound.
        n_sound = len(sound.envelope)
        times = (np.arange(n_sound) + 0.5 - n_sound / 2) * sound.seconds_per_frame
        functions = np.stack([np.ones(n_sound), times], 1)
        probe = HeadReader(lambda call: key_sums(call, functions), kinds=[self.kind])
        run_probe(self.model, reading, probe)
        # Uniform attention, (measure,): no token listens further on than another, and sound gets its share of frames.
        even = np.array([0.0, n_sound / round(sound.window_seconds / sound.seconds_per_frame)])
        by_layer = {}
        for layer, rows in probe.maps[self.kind].items():
            sums, counts = sound_sums(rows.numpy()[0][:, asks])
            by_layer[layer] = np.stack([sums, counts * even]), counts
        return _Measured(reading, int(asks.sum()), by_layer)


def _study(model: Model, sense: type[_Sense], inputs: Sequence[_Input], report: Report | None) -> Heads:
    """Measure the inputs one after the other, and list those that cannot be studied.

    Raises:
        AttnscopeError: No input could be studied.
    """
    problems: list[dict[str, Any]] = []
    digest = hashlib.sha256()

    def read_inputs() -> Iterator[Block]:
        for each in inputs:
            try:
                content = sense.read(each.content)
            except AttnscopeError as error:
                problems.append(_problem(each.source, error.message.replace(f"{each.source} ", "", 1)))
                continue
            numbers = np.asarray(getattr(content, sense.values))
            digest.update(f"{sense.noun} {numbers.shape}\n".encode() + numbers.tobytes())
            text: Any = replace(each, content=content)
            yield Block(each.index, (text,))

    # Each input is a block, and counts as soon as it is done.
    going = run_blocks(
        sense,
        (model,),
        read_inputs(),
        SenseSums(),
        report=report,
        share=lambda block: (block.index + 1) / len(inputs),
    )
    done = going.done
    problems += [*done.problems, *going.problems(model.info)]
    if not done.n_texts:
        if not going.complete:
            raise KeyboardInterrupt
        first = f"{problems[0]['source']}: {problems[0]['reason']}"
        raise AttnscopeError(
            f"no {sense.noun} is left of {len(inputs)}: {first}", "give files that can be read"
        )
    # Of notes that differ only in the file at their start or the text that they quote, keep the last.
    by_gist = {re.sub(r"^\S+\.\w+ ", "", note).partition("“")[0]: note for note in done.notes}
    if done.n_texts == 1:
        going.notes.append(f"of one {sense.noun} there are no intervals")
    # The texts of the record are pictures or recordings.
    corpus = {
        "of": sense.of,
        "sources": [each.source for each in inputs],
        "n_texts": done.n_texts,
        "n_tokens": done.n_tokens,
        "sha256": digest.hexdigest(),
        "problems": problems,
        "complete": going.complete,
    }
    if done.grids:
        corpus["grids"] = sorted(set(done.grids))
    about = going.about(model.info, list(by_gist.values()))
    options = {"roles": {}, "measures": list(sense.catalogue)}
    return Heads(about, corpus, options, {"heads": _table(sense, done)})


def _problem(name: str, reason: str) -> dict[str, Any]:
    return {"source": name, "line": None, "reason": reason}


def _table(sense: type[_Sense], done: SenseSums) -> Table:
    """Return the table of all heads; a measure that nothing counts is NaN."""
    columns = [measure_column(name, sense.catalogue) for name in sense.catalogue]
    # Intervals are cut to the range of each measure.
    lowest = [measure.low for measure in sense.catalogue.values()]
    highest = [measure.high for measure in sense.catalogue.values()]
    tables = []
    for layer, sums in sorted(done.measures.items()):
        # Sums are those of heads and of uniform attention, (2, head, measure). Keep the heads that have a count.
        counts = sums.total("c")[0]
        heads = np.flatnonzero(counts.any(-1))
        values, baseline = sums.ratio()[:, heads]
        low, high = np.clip(np.stack(sums.interval())[:, 0, heads], lowest, highest)
        table = heads_table(
            ([sense.kind] * len(heads), np.full(len(heads), layer), heads),
            columns,
            roles=[""] * len(heads),
            resting=sense.resting(dict(zip(sense.catalogue, values.T, strict=True))),
            value=values,
            low=low,
            high=high,
            baseline=baseline,
            count=counts[heads],
        )
        tables.append(table)
    return Table.stack(tables)


def _list_inputs(items: Any, noun: str) -> list[_Input]:
    """Return pictures or recordings; files and patterns are looked up, and stand before what is no file.

    Raises:
        AttnscopeError: There is none.
    """
    items = items if isinstance(items, list) else [items]
    files = []
    contents: dict[str, Any] = {}
    for number, item in enumerate(items, 1):
        if isinstance(item, str | Path):
            files.append(item)
        else:
            contents[f"{noun} {number}"] = item
    inputs = [_Input(index, name, name) for index, name in enumerate(expand(files))]
    inputs += [_Input(index, *each) for index, each in enumerate(contents.items(), len(inputs))]
    if not inputs:
        raise AttnscopeError(f"there is no {noun} to study", "give at least one file")
    return inputs
