"""Which heads listen to a word as it is written? Recordings with known word times in, a relation out.

    {"audio": "speech.wav", "words": [{"word": "the", "start": 0.0, "end": 0.21}, {"word": "cat", "start": 0.21, …

A line a recording; files are looked for beside the one that names them; times in seconds. Words stand in the order in
which they start. An optional "document" names what recordings have in common, such as a speaker; recordings with the
same sound have the same source anyway, and with the same words too they count once. A word's row is the mean of those
in which its tokens are written, each of which stands before its token. A head is right where the largest weight
of that row, among frames with sound, is on a frame of the word. So one relation, "word→sound", goes through the
evidence of all others; its simple rules are the diagonal: the word as far along the recording as it is along the
transcript. If heads listen to the words, a second pass times the words by them (`word_errors`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.annotated.alignment import pieces_of
from attnscope.corpus import Problem
from attnscope.errors import AttnscopeError
from attnscope.models.model import Model
from attnscope.records.maps.sounds import Sound
from attnscope.records.relations.record import LEAST_MASS, Relation, Relations
from attnscope.records.relations.word_times import WordTimes
from attnscope.senses.recordings import Recording, read_recording
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.reading import Reading, Speech, read
from attnscope.studies.inputs.texts import Progress, Report
from attnscope.studies.maps.study import run_probe
from attnscope.studies.relations.evidence import (
    ALONG,
    FEWEST_LINKS,
    FEWEST_TEXTS,
    LEVEL,
    MARGIN,
    RULES,
    Cell,
    Lots,
    Tally,
    judge,
    mixed_halves,
)
from attnscope.studies.relations.evidence import Part as EvidencePart
from attnscope.studies.relations.word_errors import WordErrors, sizes_of
from attnscope.studies.running.overflow import broken_rows

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
    """The recordings of files of JSON lines; lines that are none are added to the problems."""
    for name in files:
        with Path(name).open(encoding="utf-8", errors="surrogateescape") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    entry = json.loads(line)
                    words = tuple((str(one["word"]), float(one["start"]), float(one["end"])) for one in entry["words"])
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


def sound_relations(model: Model, files: Sequence[str], report: Report | None = None) -> Relations:
    """Measures which heads of a speech model's cross-attention listen to each word as it is written.

        found = attnscope.studies.relations.sounds.sound_relations(attnscope.load("./whisper-tiny"), ["timed.jsonl"])
        found["word→sound"].best    # for: attnscope heatmap --audio speech.wav --times --pick L3H1

    Args:
        model: A model that listens as Whisper does.
        files: JSON lines, see above.
        report: Called after each recording.

    Raises:
        AttnscopeError: There is no recording with times, or the model has no cross-attention.
    """
    problems: list[Problem] = []
    tally, lots, complete = Tally(), Lots(), True
    seen: set[tuple[str, tuple[tuple[str, float, float], ...]]] = set()
    n_copies = 0
    studied: list[tuple[Spoken, tuple[int, int]]] = []
    found: tuple[Relation, ...] = ()
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
        found = judge({NAME: tally})
        word_times = _time_words(model, studied, tally, found, report)
    except KeyboardInterrupt:
        complete = False
        found = found or judge({NAME: tally})
    if complete and not tally.n:
        why = f": {problems[0]}" if problems else ""
        raise AttnscopeError(f"there is no recording with word times{why}", "give JSON lines with audio and words")
    corpus = {
        "sources": list(files), "unit": None, "of": "recordings", "n_texts": len(studied), "n_tokens": n_tokens,
        "n_chunked": 0, "n_copies": n_copies, "n_not_finite": 0, "sha256": "", "complete": complete,
        "problems": [asdict(problem) for problem in problems],
    }  # fmt: skip
    options = {
        "level": LEVEL, "margin": MARGIN, "fewest_links": FEWEST_LINKS, "fewest_texts": FEWEST_TEXTS,
        "least_mass": LEAST_MASS,
    }  # fmt: skip
    notes = [_advice(found), *mixed_halves(found)] if found else []
    return Relations(run_of(model.info, notes), corpus, options, "cross", found, word_times=word_times)


class _LeftOutError(Exception):
    """A recording cannot be studied; the message says why."""


def _advice(found: Sequence[Relation]) -> str:
    """Which heads to time words by."""
    (one,) = found
    if not one.found.any():
        return "No head listens to the words surely enough to time them by."
    heads = [place for place in (one.best,) if place is not None and one.best_found]
    heads += [place for place in one.others_found() if one.mass[place] >= LEAST_MASS]
    named = ",".join(f"L{layer}H{head}" for layer, head in heads[:8])
    return f"Heads that listen to the words: attnscope heatmap --audio … --times --pick {named}"


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
    """Adds what the heads reach on one recording; its words, and the halves that it is in."""
    import torch

    from attnscope.core.attention.probes import probe_by_kind
    from attnscope.core.questions.relations import LinkFacts, Links

    reading, sound = _read(model, spoken, recording)
    rows, spans, chosen = _places(spoken, reading, sound, tally)
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
    by_layer = {layer: torch.stack([one.hits[0], one.mass[0]], -1) for layer, one in probe.sums["cross"].items()}
    found: Mapping[int, NDArray[np.float64]] = {layer: one.cpu().double().numpy() for layer, one in by_layer.items()}
    if broken_rows({"cross": {layer: one[None] for layer, one in found.items()}}):
        raise _LeftOutError(f"attention is not finite (NaN) in {model.info.dtype}")
    values = np.full((len(found), max(map(len, found.values())), 2), np.nan)
    for at, layer in enumerate(sorted(found)):
        values[at, : len(found[layer])] = found[layer]
    by_source, by_text, first = lots.deal(source)
    hits = np.zeros(len(RULES), np.int64)
    for step in ALONG:
        for number, span in zip(chosen, spans, strict=True):
            frame = int((number + step + 0.5) / len(spoken.words) * n_frames)
            hits[RULES.index("diagonal") + step] += span[0] <= frame < span[1]
    cell = Cell(NAME, (by_source, by_text), len(rows), hits, first)
    tally.add([(cell, values)])
    return cell


def _time_words(
    model: Model, studied: Sequence[tuple[Spoken, tuple[int, int]]], tally: Tally, found: Sequence[Relation],
    report: Report | None,
) -> WordTimes | None:  # fmt: skip
    """How well the heads that are found time words, each half of the recordings by those best on the other half."""
    from attnscope.core.attention.probes import Part

    n_listed = sum(int((one.found & (one.mass >= LEAST_MASS)).sum()) for one in found)
    if not n_listed:
        return None
    halves = tally.halved()
    axis = 0 if halves.by == "sources" else 1
    errors = WordErrors([_ranked(tally, part) for part in (halves.scored_on, halves.chosen_on)], sizes_of(n_listed))
    n_words = 0
    for number, (spoken, by) in enumerate(studied, 1):
        reading, sound = _read(model, spoken, _recording(spoken))
        rows, _, chosen = _places(spoken, reading, sound, Tally())
        assert reading.target is not None
        written = np.flatnonzero(~reading.target.special)
        first, n_frames = max(int(written[0]) - 1, 0), len(sound.envelope)
        # Every path begins with the recording, so the first word says nothing of the heads.
        timed = [(tokens[0] - first, word) for tokens, word in zip(rows, chosen, strict=True) if word > 0]
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


def _ranked(tally: Tally, part: EvidencePart) -> list[tuple[int, int]]:
    """All heads by their accuracy on a half, the best first; those that give the words little come after the others."""
    assert part.sums is not None
    accuracy, mass = (tally.only_there(values) for values in np.moveaxis(part.sums.ratio(), -1, 0))
    places = [(int(layer), int(head)) for layer, head in np.argwhere(np.isfinite(accuracy))]
    return sorted(places, key=lambda place: (bool(mass[place] < LEAST_MASS), -accuracy[place]))


def _places(
    spoken: Spoken, reading: Reading, sound: Sound, tally: Tally
) -> tuple[list[list[int]], list[tuple[int, int]], list[int]]:
    """For each word that can be placed the rows that write it, the frames in which it is spoken, and its number."""
    assert reading.target is not None
    spans, start = [], 0
    for word, *_ in spoken.words:
        n = len(" ".join(word.split()))
        spans.append((start, start + n))
        start += n + 1
    rows, frames, chosen = [], [], []
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
            chosen.append(number)
    return rows, frames, chosen
