"""Which heads listen to a word as it is written? Recordings with known word times in, a relation out.

    {"audio": "speech.wav", "words": [{"word": "the", "start": 0.0, "end": 0.21}, {"word": "cat", "start": 0.21, …

Each line is one recording. Sound files are looked for beside the file that names them. Times are in seconds, and words
stand in the order in which they start. An optional "document" names what recordings have in common, such as a speaker.
Recordings with the same sound have the same source anyway, and with the same words too they count once.

A word's row is the mean of the rows in which its tokens are written, each of which stands before its token. A head is
right if the largest weight of that row, among frames with sound, is on a frame of the word. So there is one relation,
"word→sound". Its simple rules are the diagonal: the word as far along the recording as it is along the transcript. If
heads listen to the words, a second pass times the words by them (`word_errors`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from attnscope.annotated.alignment import pieces_of
from attnscope.corpus import Problem
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model
from attnscope.questions.places import Sound
from attnscope.questions.relations import LEAST_MASS, Relations, RelationsOptions
from attnscope.results.table import Table
from attnscope.senses.recordings import Recording, read_recording
from attnscope.studies.failures import broken_rows
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.reading import Reading, Speech, read
from attnscope.studies.inputs.texts import Progress, Report
from attnscope.studies.maps.study import run_probe
from attnscope.studies.relations.evidence import ALONG, RULES, THRESHOLDS, Cell, Lots, Tally, judge
from attnscope.studies.relations.study import note_mixed_halves
from attnscope.studies.relations.word_errors import WordErrors, sizes_of

NAME = "word→sound"

MOST_KEPT = 2**28
"""Bytes of attention that are kept from hearing the recordings to timing their words."""

Words = tuple[tuple[str, float, float], ...]
"""Each word, and when it begins and ends, in seconds."""
CUT = "words that the recording or the transcript does not reach"
UNALIGNED = "words that the tokens do not tell apart"


@dataclass(frozen=True)
class Spoken:
    """A recording and when each of its words is spoken, in seconds."""

    audio: str
    words: Words
    source: str
    line: int
    document: str | None = None


def is_spoken(files: Sequence[str]) -> bool:
    """Whether the first line of the first file is about a recording."""
    first = Path(files[0]) if files else None
    if first is None or first.suffix != ".jsonl" or not first.is_file():
        return False
    try:
        with first.open(encoding="utf-8") as lines:
            entry = json.loads(next((line for line in lines if line.strip()), ""))
    except (OSError, ValueError):
        return False
    return isinstance(entry, dict) and "audio" in entry and "words" in entry


def read_spoken(files: Sequence[str], problems: list[Problem]) -> Iterator[Spoken]:
    """The recordings of files of JSON lines; other lines are added to the problems."""
    for name in files:
        with Path(name).open(encoding="utf-8", errors="surrogateescape") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    entry = json.loads(line)
                    words = tuple(
                        (str(word["word"]), float(word["start"]), float(word["end"])) for word in entry["words"]
                    )
                    audio = str(Path(name).parent / entry["audio"])
                except (ValueError, KeyError, TypeError):
                    problems.append(Problem(name, number, 'not {"audio": …, "words": [{"word", "start", "end"}, …]}'))
                    continue
                if not _one_after_the_other(words):
                    problems.append(Problem(name, number, "its words are none, or not one after the other in time"))
                    continue
                document = entry.get("document")
                yield Spoken(audio, words, name, number, None if document is None else str(document))


def _one_after_the_other(words: Sequence[tuple[str, float, float]]) -> bool:
    """Whether there are words, and all have finite times in order; words may overlap."""
    starts = [start for _, start, _ in words]
    return (
        bool(words)
        and starts == sorted(starts)
        and all(word.split() and 0 <= start <= end < math.inf for word, start, end in words)
    )


def study_recordings(
    spec: str, files: Sequence[str], options: RelationsOptions, loading: LoadOptions, report: Report | None
) -> Relations:
    """Loads a model, and studies which of its heads listen to the words of recordings."""
    if options != RelationsOptions():
        raise UsageError("of recordings one relation is asked", "leave out --only, --chunk, --examples")
    return sound_relations(loading.load(spec), files, report)


def sound_relations(model: Model, files: Sequence[str], report: Report | None = None) -> Relations:
    """Measure which heads of a speech model's cross-attention listen to each word as it is written.

        result = sound_relations(attnscope.load("./whisper-tiny"), ["timed.jsonl"])
        result.alignment_heads    # as in Whisper's generation_config.json

    After an interruption (KeyboardInterrupt), the result covers the recordings up to there, and says so.

    Raises:
        AttnscopeError: There is no recording with word times.
    """
    problems: list[Problem] = []
    tally, lots, complete = Tally(), Lots(), True
    seen: set[tuple[str, Words]] = set()
    heard: list[_Heard] = []
    n_copies = n_tokens = n_bytes = 0
    try:
        for spoken in read_spoken(files, problems):
            try:
                recording = _recording(spoken)
                sound_digest = hashlib.blake2b(recording.samples.tobytes(), digest_size=16).hexdigest()
                if (sound_digest, spoken.words) in seen:
                    n_copies += 1
                    continue
                seen.add((sound_digest, spoken.words))
                listened = _listen(model, spoken, recording, tally.left_out)
                by_source, by_text, first = lots.deal(spoken.document or sound_digest)
                cell = Cell(NAME, (by_source, by_text), len(listened.rows), _rule_hits(listened), first)
                tally.add([(cell, _hits(listened))])
            except _LeftOutError as error:
                problems.append(Problem(spoken.source, spoken.line, str(error)))
                continue
            # Of many recordings the last ones are heard again to time their words.
            n_bytes += sum(weights.nbytes for weights in listened.maps.values())
            heard.append(_Heard(spoken, cell.halves, listened if n_bytes <= MOST_KEPT else None))
            n_tokens += cell.n
            if report is not None:
                report(Progress(len(heard), n_tokens, None))
    except KeyboardInterrupt:
        complete = False
    if complete and not tally.n:
        why = f": {problems[0]}" if problems else ""
        raise AttnscopeError(f"there is no recording with word times{why}", "give JSON lines with audio and words")
    tables, grids = judge({NAME: tally}, "cross")
    corpus = {
        "sources": list(files),
        "unit": None,
        "of": "recordings",
        "n_texts": len(heard),
        "n_tokens": n_tokens,
        "n_chunked": 0,
        "n_copies": n_copies,
        "n_not_finite": 0,
        "sha256": "",
        "complete": complete,
        "problems": [asdict(problem) for problem in problems],
    }
    result = Relations(run_of(model.info, note_mixed_halves(tables["relations"])), corpus, THRESHOLDS, tables, grids)
    if not complete or not result.alignment_heads:
        return result

    # How well the heads that follow the words time them.
    errors = WordErrors(_rank_heads(tally), sizes_of(len(result.alignment_heads)))
    try:
        _time_words(model, heard, errors, 0 if tally.halve().by == "sources" else 1, report)
    except KeyboardInterrupt:
        return replace(result, corpus={**corpus, "complete": False})
    times = Table.of(Relations.TABLES["word_times"], errors.rows())
    known = {"n_recordings": errors.n_recordings, "n_words": errors.n_words}
    return replace(result, tables={**tables, "word_times": times}, options={**THRESHOLDS, "word_times": known})


class _LeftOutError(Exception):
    """A recording cannot be studied; the message says why."""


def _recording(spoken: Spoken) -> Recording:
    """The sound itself, at the rate of its file."""
    try:
        return read_recording(spoken.audio)
    except AttnscopeError as error:
        raise _LeftOutError(error.message) from None


def _read(model: Model, spoken: Spoken, recording: Recording) -> tuple[Reading, Sound]:
    """A recording and its transcript, as the model takes them."""
    transcript = " ".join(" ".join(word.split()) for word, *_ in spoken.words)
    reading = read(model, Speech(recording, transcript))
    if reading.target is None or reading.sound is None:
        raise AttnscopeError(f"{model.info.name} has no decoder, so there is no cross-attention to measure")
    return reading, reading.sound


@dataclass(frozen=True, eq=False)
class _Listened:
    """What heads listen to as they write the words of a recording.

    Attributes:
        maps: Layer -> weights, (head, row, frame): the rows that write the transcript, on frames with sound.
        rows: For each word that can be aligned the rows that write it.
        frames: The frames in which it is spoken, and the one after them.
        numbers: Its number in the recording.
        spoken: All words.
        frame_s: How long a frame lasts.
    """

    maps: Mapping[int, NDArray[np.float32]]
    rows: list[list[int]]
    frames: list[tuple[int, int]]
    numbers: list[int]
    spoken: Spoken
    frame_s: float

    @property
    def n_frames(self) -> int:
        """How many frames have sound."""
        n_frames: int = next(iter(self.maps.values())).shape[2]
        return n_frames


@dataclass(frozen=True, eq=False)
class _Heard:
    """A recording that was studied, the halves that it is in, and what was listened to, if that is kept."""

    spoken: Spoken
    halves: tuple[int, int]
    listened: _Listened | None


def _listen(model: Model, spoken: Spoken, recording: Recording, left_out: Counter[str]) -> _Listened:
    """Run the model on a recording and its transcript."""
    from attnscope.core.attention.probes import Part

    reading, sound = _read(model, spoken, recording)
    rows, frames, numbers = _align_words(spoken, reading, sound, left_out)
    if not rows:
        raise _LeftOutError("none of its words could be placed")
    assert reading.target is not None
    written = np.flatnonzero(~reading.target.special)
    first = max(int(written[0]) - 1, 0)
    probe = Part(slice(first, int(written[-1]) + 1), slice(0, len(sound.envelope)), kinds=["cross"])
    run_probe(model, reading, probe)
    maps = {layer: weights[0].numpy() for layer, weights in probe.maps["cross"].items()}
    if broken_rows({"cross": {layer: weights[None] for layer, weights in maps.items()}}):
        raise _LeftOutError(f"attention is not finite (NaN) in {model.info.dtype}")
    in_maps = [[row - first for row in of_word] for of_word in rows]
    return _Listened(maps, in_maps, frames, numbers, spoken, sound.seconds_per_frame)


def _hits(listened: _Listened) -> NDArray[np.float64]:
    """Return on how many words each head is right, and its mass there, (layer, head, 2); NaN = no such head.

    A word's row is the mean of the rows that write it. If several frames share its largest weight, a frame of the word
    counts as its share of them.
    """
    n_heads = max(map(len, listened.maps.values()))
    sums = np.full((len(listened.maps), n_heads, 2), np.nan)
    for row, (_, weights) in enumerate(sorted(listened.maps.items())):
        sums[row, : len(weights)] = 0
        for rows, (first, last) in zip(listened.rows, listened.frames, strict=True):
            word = weights[:, rows].mean(1, dtype=np.float64).astype(np.float32)  # (head, frame)
            is_largest = (word == word.max(1, keepdims=True)) & (word > 0)
            sums[row, : len(weights), 0] += is_largest[:, first:last].sum(1) / np.maximum(is_largest.sum(1), 1)
            sums[row, : len(weights), 1] += word[:, first:last].sum(1, dtype=np.float64)
    return sums


def _rule_hits(listened: _Listened) -> NDArray[np.int64]:
    """Return for how many words each simple rule is right, (rule,)."""
    hits = np.zeros(len(RULES), np.int64)
    n_words = len(listened.spoken.words)
    for number, (first, last) in zip(listened.numbers, listened.frames, strict=True):
        for step in ALONG:
            frame = int((number + step + 0.5) / n_words * listened.n_frames)
            hits[RULES.index("diagonal") + step] += first <= frame < last
    return hits


def _time_words(model: Model, heard: Sequence[_Heard], errors: WordErrors, axis: int, report: Report | None) -> None:
    """Add the errors of word times on each recording, by the heads that are best on the half that it is not in.

    `axis` says which of the two halves of a recording counts: that by sources, or that by texts.
    """
    for number, each in enumerate(heard, 1):
        listened = each.listened or _listen(model, each.spoken, _recording(each.spoken), Counter())
        # Every path begins with the recording, so the first word says nothing of the heads.
        timed = [(rows[0], word) for rows, word in zip(listened.rows, listened.numbers, strict=True) if word > 0]
        if not timed or not listened.n_frames:
            continue
        words = each.spoken.words
        starts_s = [words[word][1] for _, word in timed]
        even_s = [word / len(words) * listened.n_frames * listened.frame_s for _, word in timed]
        errors.add(each.halves[axis], listened.maps, [row for row, _ in timed], starts_s, even_s, listened.frame_s)
        if report is not None:
            report(Progress(number, errors.n_words, number / len(heard), "word times"))


def _rank_heads(tally: Tally) -> list[list[tuple[int, int]]]:
    """Return for each half of the recordings all heads, those first that are most accurate on the other half.

    Heads that give the words little weight come last.
    """
    halves = tally.halve()
    ranked = []
    for part in (halves.scored_on, halves.chosen_on):
        assert part.sums is not None
        accuracy, mass = (tally.only_there(values) for values in np.moveaxis(part.sums.ratio(), -1, 0))
        heads = [(int(layer), int(head)) for layer, head in np.argwhere(np.isfinite(accuracy))]
        is_weak = mass < LEAST_MASS
        ranked.append(sorted(heads, key=lambda head: (bool(is_weak[head]), -accuracy[head])))
    return ranked


def _align_words(
    spoken: Spoken, reading: Reading, sound: Sound, left_out: Counter[str]
) -> tuple[list[list[int]], list[tuple[int, int]], list[int]]:
    """For each word that can be aligned: the rows that write it, the frames in which it is spoken, and its number."""
    assert reading.target is not None
    spans, start = [], 0
    for word, *_ in spoken.words:
        n = len(" ".join(word.split()))
        spans.append((start, start + n))
        start += n + 1
    rows, frames, numbers = [], [], []
    every = pieces_of(spans, reading.target)
    owners = [token for tokens in every for token in tokens]
    for number, (tokens, (_, begin, end)) in enumerate(zip(every, spoken.words, strict=True)):
        first = int(begin / sound.seconds_per_frame + 1e-6)
        last = max(first + 1, int(np.ceil(end / sound.seconds_per_frame - 1e-6)))
        if not tokens or last > len(sound.envelope) + 1:
            left_out[CUT] += 1
        elif tokens[0] < 1 or any(owners.count(token) > 1 for token in tokens):
            left_out[UNALIGNED] += 1
        elif first < len(sound.envelope):
            rows.append([token - 1 for token in tokens])
            frames.append((first, min(last, len(sound.envelope))))
            numbers.append(number)
    return rows, frames, numbers
