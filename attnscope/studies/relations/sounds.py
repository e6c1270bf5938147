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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.annotated.alignment import pieces_of
from attnscope.corpus import Problem
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model
from attnscope.records.maps.sounds import Sound
from attnscope.records.relations.record import LEAST_MASS, Relation, Relations
from attnscope.records.relations.word_times import WordTimes
from attnscope.senses.recordings import Recording, read_recording
from attnscope.studies.failures import broken_rows
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.reading import Reading, Speech, read
from attnscope.studies.inputs.texts import Progress, Report
from attnscope.studies.maps.study import run_probe
from attnscope.studies.relations.evidence import ALONG, RULES, THRESHOLDS, Cell, Lots, Tally, judge
from attnscope.studies.relations.evidence import Part as EvidencePart
from attnscope.studies.relations.options import RelationsOptions
from attnscope.studies.relations.study import note_mixed_halves
from attnscope.studies.relations.word_errors import WordErrors, sizes_of

NAME = "word→sound"
CUT = "words that the recording or the transcript does not reach"
UNALIGNED = "words that the tokens do not tell apart"


@dataclass(frozen=True)
class Spoken:
    """A recording and when each of its words is spoken, in seconds."""

    audio: str
    words: tuple[tuple[str, float, float], ...]
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
    """Measures which heads of a speech model's cross-attention listen to each word as it is written.

    record = attnscope.studies.relations.sounds.sound_relations(attnscope.load("./whisper-tiny"), ["timed.jsonl"])
    record["word→sound"].best    # for: attnscope heatmap --audio speech.wav --words --pick L3H1
    """
    problems: list[Problem] = []
    tally, lots, complete = Tally(), Lots(), True
    seen: set[tuple[str, tuple[tuple[str, float, float], ...]]] = set()
    n_copies = 0
    studied: list[tuple[Spoken, tuple[int, int]]] = []
    results: tuple[Relation, ...] = ()
    word_times, n_tokens = None, 0
    try:
        for spoken in read_spoken(files, problems):
            try:
                recording = _recording(spoken)
                sound_digest = hashlib.blake2b(recording.samples.tobytes(), digest_size=16).hexdigest()
                if (sound_digest, spoken.words) in seen:
                    n_copies += 1
                    continue
                seen.add((sound_digest, spoken.words))
                cell = _measure(model, spoken, recording, lots, tally, spoken.document or sound_digest)
            except _LeftOutError as error:
                problems.append(Problem(spoken.source, spoken.line, str(error)))
                continue
            studied.append((spoken, cell.halves))
            n_tokens += cell.n
            if report is not None:
                report(Progress(len(studied), n_tokens, None))
        results = judge({NAME: tally})
        word_times = _time_words(model, studied, tally, results, report)
    except KeyboardInterrupt:
        complete = False
        results = results or judge({NAME: tally})
    if complete and not tally.n:
        why = f": {problems[0]}" if problems else ""
        raise AttnscopeError(f"there is no recording with word times{why}", "give JSON lines with audio and words")
    corpus = {
        "sources": list(files), "unit": None, "of": "recordings", "n_texts": len(studied), "n_tokens": n_tokens,
        "n_chunked": 0, "n_copies": n_copies, "n_not_finite": 0, "sha256": "", "complete": complete,
        "problems": [asdict(problem) for problem in problems],
    }  # fmt: skip
    notes = [_advise(results), *note_mixed_halves(results)] if results else []
    return Relations(run_of(model.info, notes), corpus, dict(THRESHOLDS), "cross", results, word_times=word_times)


class _LeftOutError(Exception):
    """A recording cannot be studied; the message says why."""


def _advise(results: Sequence[Relation]) -> str:
    """Which heads to time words by."""
    (relation,) = results
    if not relation.found.any():
        return "No head listens to the words surely enough to time them by."
    heads = [relation.best] if relation.best is not None and relation.best_found else []
    heads += [head for head in relation.others_found() if relation.mass[head] >= LEAST_MASS]
    named = ",".join(f"L{layer}H{head}" for layer, head in heads[:8])
    return f"Heads that listen to the words: attnscope heatmap --audio … --words --pick {named}"


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


def _measure(model: Model, spoken: Spoken, recording: Recording, lots: Lots, tally: Tally, source: str) -> Cell:
    """Adds what the heads reach on one recording to the tally; returns its words, and the halves that it is in."""
    import torch

    from attnscope.core.attention.probes import probe_by_kind
    from attnscope.core.questions.relations import LinkFacts, Links

    reading, sound = _read(model, spoken, recording)
    rows, spans, numbers = _align_words(spoken, reading, sound, tally)
    if not rows:
        raise _LeftOutError("none of its words could be placed")
    n_frames = len(sound.envelope)
    units = np.full((1, round(sound.window_seconds / sound.seconds_per_frame)), -1, np.int64)
    units[0, :n_frames] = np.arange(n_frames)
    pieces = [(row, token) for row, tokens in enumerate(rows) for token in tokens]
    targets = [(row, frame) for row, span in enumerate(spans) for frame in range(*span)]

    def tensor(values: Any, *shape: int) -> Any:
        return torch.tensor(values, dtype=torch.int64, device=model.info.device).view(*shape)

    facts = LinkFacts(
        torch.from_numpy(units).to(model.info.device), tensor([0] * len(rows), -1), tensor(pieces, -1, 2),
        tensor([], -1, 2), tensor(range(len(rows)), -1), tensor(targets, -1, 2), tensor([0] * len(rows), -1), 1,
    )  # fmt: skip
    probe = Links(facts)
    run_probe(model, reading, probe_by_kind({"cross": probe}))
    by_layer: dict[int, NDArray[np.float64]] = {
        layer: torch.stack([sums.hits[0], sums.mass[0]], -1).cpu().double().numpy()
        for layer, sums in probe.sums["cross"].items()
    }
    if broken_rows({"cross": {layer: heads[None] for layer, heads in by_layer.items()}}):
        raise _LeftOutError(f"attention is not finite (NaN) in {model.info.dtype}")
    values = np.full((len(by_layer), max(map(len, by_layer.values())), 2), np.nan)
    for row, layer in enumerate(sorted(by_layer)):
        values[row, : len(by_layer[layer])] = by_layer[layer]
    by_source, by_text, first = lots.deal(source)
    hits = np.zeros(len(RULES), np.int64)
    for step in ALONG:
        for number, span in zip(numbers, spans, strict=True):
            frame = int((number + step + 0.5) / len(spoken.words) * n_frames)
            hits[RULES.index("diagonal") + step] += span[0] <= frame < span[1]
    cell = Cell(NAME, (by_source, by_text), len(rows), hits, first)
    tally.add([(cell, values)])
    return cell


def _time_words(
    model: Model, studied: Sequence[tuple[Spoken, tuple[int, int]]], tally: Tally, results: Sequence[Relation],
    report: Report | None,
) -> WordTimes | None:  # fmt: skip
    """How well the listening heads time words, each half of the recordings by those best on the other half."""
    from attnscope.core.attention.probes import Part

    n_listed = sum(int((relation.found & (relation.mass >= LEAST_MASS)).sum()) for relation in results)
    if not n_listed:
        return None
    halves = tally.halve()
    axis = 0 if halves.by == "sources" else 1
    errors = WordErrors([_rank_heads(tally, part) for part in (halves.scored_on, halves.chosen_on)], sizes_of(n_listed))
    n_words = 0
    for number, (spoken, by) in enumerate(studied, 1):
        reading, sound = _read(model, spoken, _recording(spoken))
        rows, _, numbers = _align_words(spoken, reading, sound, Tally())
        assert reading.target is not None
        written = np.flatnonzero(~reading.target.special)
        first, n_frames = max(int(written[0]) - 1, 0), len(sound.envelope)
        # Every path begins with the recording, so the first word says nothing of the heads.
        timed = [(tokens[0] - first, word) for tokens, word in zip(rows, numbers, strict=True) if word > 0]
        if not timed or n_frames == 0:
            continue
        probe = Part(slice(first, int(written[-1]) + 1), slice(0, n_frames), kinds=["cross"])
        run_probe(model, reading, probe)
        maps = {layer: weights[0].numpy() for layer, weights in probe.maps["cross"].items()}
        starts_s = [spoken.words[word][1] for _, word in timed]
        even_s = [word / len(spoken.words) * n_frames * sound.seconds_per_frame for _, word in timed]
        errors.add(by[axis], maps, [row for row, _ in timed], starts_s, even_s, sound.seconds_per_frame)
        n_words += len(timed)
        if report is not None:
            report(Progress(number, n_words, number / len(studied), "word times"))
    return errors.word_times()


def _rank_heads(tally: Tally, part: EvidencePart) -> list[tuple[int, int]]:
    """All heads by their accuracy on a half, the best first; heads that give the words little weight come last."""
    assert part.sums is not None
    accuracy, mass = (tally.only_there(values) for values in np.moveaxis(part.sums.ratio(), -1, 0))
    heads = [(int(layer), int(head)) for layer, head in np.argwhere(np.isfinite(accuracy))]
    return sorted(heads, key=lambda head: (bool(mass[head] < LEAST_MASS), -accuracy[head]))


def _align_words(
    spoken: Spoken, reading: Reading, sound: Sound, tally: Tally
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
            tally.left_out[CUT] += 1
        elif tokens[0] < 1 or any(owners.count(token) > 1 for token in tokens):
            tally.left_out[UNALIGNED] += 1
        elif first < len(sound.envelope):
            rows.append([token - 1 for token in tokens])
            frames.append((first, min(last, len(sound.envelope))))
            numbers.append(number)
    return rows, frames, numbers
