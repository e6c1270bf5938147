"""Which heads listen to a word as it is written? Recordings with known word times in, a relation out.

    {"audio": "speech.wav", "words": [{"word": "the", "start": 0.0, "end": 0.21}, {"word": "cat", "start": 0.21, …

A line a recording; files are looked for beside the one that names them; times in seconds. A word's row is the mean of
those in which its tokens are written, each of which stands before its token. A head is right where the largest weight
of that row, among frames with sound, is on a frame of the word. So one relation, "word→sound", goes through the
evidence of all others; its simple rules are the diagonal: the word as far along the recording as it is along the
transcript.
"""

from __future__ import annotations

import json
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
from attnscope.senses.recordings import read_recording
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
)
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
                times = [at for _, start, end in words for at in (start, end)]
                if not words or times != sorted(times) or times[0] < 0 or not all(word.split() for word, *_ in words):
                    problems.append(Problem(name, number, "its words are none, or not one after the other in time"))
                    continue
                yield Spoken(audio, words, name, number)


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
    n_texts = n_tokens = 0
    try:
        for spoken in read_spoken(files, problems):
            try:
                measured = _measure(model, spoken, lots, tally)
            except _LeftOutError as error:
                problems.append(Problem(spoken.source, spoken.line, str(error)))
                continue
            n_texts, n_tokens = n_texts + 1, n_tokens + measured
            if report is not None:
                report(Progress(n_texts, n_tokens, None))
    except KeyboardInterrupt:
        complete = False
    if complete and not tally.n:
        why = f": {problems[0]}" if problems else ""
        raise AttnscopeError(f"there is no recording with word times{why}", "give JSON lines with audio and words")
    corpus = {
        "sources": list(files), "unit": None, "of": "recordings", "n_texts": n_texts, "n_tokens": n_tokens,
        "n_chunked": 0, "n_copies": 0, "n_not_finite": 0, "sha256": "", "complete": complete,
        "problems": [asdict(problem) for problem in problems],
    }  # fmt: skip
    options = {
        "level": LEVEL, "margin": MARGIN, "fewest_links": FEWEST_LINKS, "fewest_texts": FEWEST_TEXTS,
        "least_mass": LEAST_MASS,
    }  # fmt: skip
    found = judge({NAME: tally})
    notes = [_advice(found)] if found else []
    return Relations(run_of(model.info, notes), corpus, options, "cross", found)


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


def _measure(model: Model, spoken: Spoken, lots: Lots, tally: Tally) -> int:
    """Adds what the heads reach on one recording; how many words it has."""
    import torch

    from attnscope.core.attention.probes import probe_by_kind
    from attnscope.core.questions.relations import LinkFacts, Links

    try:
        recording = read_recording(spoken.audio)
    except AttnscopeError as error:
        raise _LeftOutError(error.message) from None
    transcript = " ".join(" ".join(word.split()) for word, *_ in spoken.words)
    reading = read(model, Speech(recording, transcript))
    if reading.target is None or reading.sound is None:
        raise AttnscopeError(f"{model.info.name} has no decoder, so there is no cross-attention to measure")
    rows, spans, chosen = _places(spoken, reading, reading.sound, tally)
    if not rows:
        raise _LeftOutError("none of its words could be placed")
    n_frames = len(reading.sound.envelope)
    units = np.full((1, round(reading.sound.window_seconds / reading.sound.seconds_per_frame)), -1, np.int64)
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
    by_source, by_text, first = lots.deal(spoken.audio)
    hits = np.zeros(len(RULES), np.int64)
    for step in ALONG:
        for number, span in zip(chosen, spans, strict=True):
            frame = int((number + step + 0.5) / len(spoken.words) * n_frames)
            hits[RULES.index("diagonal") + step] += span[0] <= frame < span[1]
    tally.add([(Cell(NAME, (by_source, by_text), len(rows), hits, first), values)])
    return len(rows)


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
