"""Find the heads that listen to a word as it is written, on recordings with known word times.

    {"audio": "speech.wav", "words": [{"word": "the", "start": 0.0, "end": 0.21}, {"word": "cat", "start": 0.21, …

Each line is one recording. Sound files are looked for beside the file that names them. Times are in seconds, and words
stand in the order in which they start. An optional "document" names what recordings have in common, such as a speaker.
Recordings with the same sound have the same source anyway, and with the same words too they count once.

A word's row is the mean of the rows in which its tokens are written, each of which stands before its token. A head is
right if the largest weight of that row, among frames with sound, is on a frame of the word. So there is one relation,
"word→sound". Its simple rules are the diagonal: the word as far along the recording as it is along the transcript.

If heads listen to the words, the words are timed by them, by dynamic time warping. Heads are ranked on one half of the
recordings and timed on the other, and the other way round. So no recording is timed by heads that it helped to choose.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from attnscope.annotated.alignment import UNALIGNED, pieces_of
from attnscope.core.alignment import cheapest_paths, level_weights
from attnscope.corpus import Problem
from attnscope.corpus.formats import json_object
from attnscope.errors import AttnscopeError
from attnscope.models.model import Model
from attnscope.questions.relations import BEST, LEAST_MASS, UPPER, Relations
from attnscope.results.table import Table
from attnscope.senses.recordings import Recording, read_recording
from attnscope.studies.failures import broken_rows
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.reading import Speech, read
from attnscope.studies.inputs.texts import Progress, Report
from attnscope.studies.maps.running import run_probe
from attnscope.studies.relations.evidence import (
    ALONG,
    FIRST_DIAGONAL,
    RULES,
    THRESHOLDS,
    Cell,
    Half,
    LinkPart,
    Lots,
    halve,
    judge,
)
from attnscope.studies.relations.study import note_mixed_halves

NAME = "word→sound"
CUT = "words that the recording or the transcript does not reach"

MOST_KEPT = 2**30
"""Bytes of attention that are kept for timing words; recordings beyond it are not timed."""

Words = tuple[tuple[str, float, float], ...]
"""Each word, and when it begins and ends, in seconds."""

Floats = NDArray[np.float64]


# Recordings on their way in


@dataclass(frozen=True)
class Spoken:
    """Hold a recording and the times of its words, in seconds."""

    audio: str
    words: Words
    source: str
    line: int
    document: str | None = None


def is_spoken(files: Sequence[str]) -> bool:
    """Return whether the first line of the first file is about a recording."""
    first = Path(files[0]) if files else None
    if first is None or first.suffix != ".jsonl" or not first.is_file():
        return False
    with first.open(encoding="utf-8", errors="surrogateescape") as lines:
        entry = json_object(next((line for line in lines if line.strip()), ""))
    return isinstance(entry, dict) and "audio" in entry and "words" in entry


def _read_spoken(files: Sequence[str], problems: list[Problem]) -> Iterator[Spoken]:
    """Return the recordings of files of JSON lines; other lines are added to the problems."""
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
                starts = [start for _, start, _ in words]
                are_timed = all(word.split() and 0 <= start <= end < math.inf for word, start, end in words)
                if not words or not are_timed or starts != sorted(starts):
                    problems.append(Problem(name, number, "its words are none, or not one after the other in time"))
                    continue
                document = entry.get("document")
                yield Spoken(audio, words, name, number, None if document is None else str(document))


def sound_relations(model: Model, files: Sequence[str], report: Report | None = None) -> Relations:
    """Measure which heads of a speech model's cross-attention listen to each word as it is written.

        result = sound_relations(attnscope.load("./whisper-tiny"), ["timed.jsonl"])
        result.alignment_heads    # as in Whisper's generation_config.json

    After an interruption (KeyboardInterrupt), the result covers the recordings up to there, and says so.

    Raises:
        AttnscopeError: There is no recording with word times.
    """
    # Hear the recordings; an interruption keeps those so far.
    problems: list[Problem] = []
    part = LinkPart()
    heard: list[_Heard] = []
    is_complete = True
    try:
        for each in _hear_all(model, files, part, problems):
            heard.append(each)
            if report is not None:
                report(Progress(len(heard), part.n_tokens, None))
    except KeyboardInterrupt:
        is_complete = False
    if is_complete and not heard:
        why = f": {problems[0]}" if problems else ""
        raise AttnscopeError(f"there is no recording with word times{why}", "give JSON lines with audio and words")
    corpus = {
        "sources": list(files),
        "unit": None,
        "of": "recordings",
        "n_texts": len(heard),
        "n_tokens": part.n_tokens,
        "n_chunked": 0,
        "n_copies": part.n_copies,
        "n_not_finite": 0,
        "sha256": "",
        "complete": is_complete,
        "problems": [asdict(problem) for problem in problems],
    }
    # Judge heads on the one relation.
    shape = heard[0].shape if heard else (0, 0)
    tables, grids = judge(part, "cross", shape)
    about = run_of(model.info, note_mixed_halves(tables))
    result = Relations(about, corpus, THRESHOLDS, tables, grids)
    if not is_complete or not result.alignment_heads:
        return result

    # How well the heads that follow the words time them.
    try:
        times, counts = _time_words(part, heard, len(result.alignment_heads), report)
    except KeyboardInterrupt:
        return replace(result, corpus={**corpus, "complete": False})
    return replace(result, tables={**tables, "word_times": times}, options={**THRESHOLDS, "word_times": counts})


# Hearing


@dataclass(frozen=True, eq=False)
class _Heard:
    """Hold a recording that was heard.

    Attributes:
        shape: Layers and heads.
        halves: The halves that it is in, by sources and by texts.
        levels: What each head listens to as it writes a row of the transcript, (layer and head, row, frame), by
            `level_weights`; None = there is no room to keep it.
        rows: For each word that is timed the row that writes its first token.
        starts_s: When each of them is spoken.
        frame_s: How long a frame lasts.
    """

    shape: tuple[int, int]
    halves: tuple[int, int]
    levels: NDArray[np.float32] | None
    rows: list[int]
    starts_s: Floats
    frame_s: float


class _LeftOutError(Exception):
    """A recording cannot be studied; the message says why."""


def _hear_all(model: Model, files: Sequence[str], part: LinkPart, problems: list[Problem]) -> Iterator[_Heard]:
    """Run the model on each recording, and add what heads listen to."""
    lots = Lots()
    seen: set[tuple[str, Words]] = set()
    n_bytes = 0
    for spoken in _read_spoken(files, problems):
        try:
            recording = read_recording(spoken.audio)
        except AttnscopeError as error:
            problems.append(Problem(spoken.source, spoken.line, error.message))
            continue
        # A recording with the same sound and words counts once.
        digest = hashlib.blake2b(recording.samples.tobytes(), digest_size=16).hexdigest()
        if (digest, spoken.words) in seen:
            part.n_copies += 1
            continue
        seen.add((digest, spoken.words))
        try:
            weights, words, frame_s = _hear(model, spoken, recording, part)
        except _LeftOutError as error:
            problems.append(Problem(spoken.source, spoken.line, str(error)))
            continue

        # What heads and rules reach on its words.
        halves, is_first = lots.deal(spoken.document or digest)
        rules = _rule_hits(words, len(spoken.words), weights.shape[-1])
        part.add_cells([Cell(NAME, halves, is_first, len(words), rules)], [_hits(weights, words)])
        part.n_tokens += len(words)

        # What word times need. Every path begins with the recording, so the first word says nothing of the heads.
        timed = [word for word in words if word.number > 0]
        levels = level_weights(weights.reshape(-1, *weights.shape[2:])).astype(np.float32) if timed else None
        n_bytes += levels.nbytes if levels is not None else 0
        yield _Heard(
            shape=weights.shape[:2],
            halves=halves,
            levels=levels if n_bytes <= MOST_KEPT else None,
            rows=[word.rows[0] for word in timed],
            starts_s=np.array([spoken.words[word.number][1] for word in timed]),
            frame_s=frame_s,
        )


@dataclass(frozen=True)
class _Word:
    """A word that can be aligned: its number, the rows that write it, and its first frame and the one after it."""

    number: int
    rows: list[int]
    frames: tuple[int, int]


def _hear(
    model: Model, spoken: Spoken, recording: Recording, part: LinkPart
) -> tuple[NDArray[np.float32], list[_Word], float]:
    """Run the model on a recording and its transcript.

    Returns:
        The weights, (layer, head, row, frame): the rows that write the transcript, on frames with sound. The words,
        and how long a frame lasts.
    """
    import torch

    from attnscope.core.attention.probes import OfChosen
    from attnscope.core.attention.row_samples import rows_of

    transcript = " ".join(" ".join(word.split()) for word, *_ in spoken.words)
    reading = read(model, Speech(recording, transcript))
    if reading.target is None or reading.sound is None:
        raise AttnscopeError(f"{model.info.name} has no decoder, so there is no cross-attention to measure")
    frame_s, n_frames = reading.sound.seconds_per_frame, len(reading.sound.envelope)

    # The words in tokens, which are each written in the row before them, and in frames.
    spans = []
    start = 0
    for word, *_ in spoken.words:
        n = len(" ".join(word.split()))
        spans.append((start, start + n))
        start += n + 1
    pieces = pieces_of(spans, reading.target)
    owners = [token for tokens in pieces for token in tokens]
    written = np.flatnonzero(~reading.target.special)
    first_row = max(int(written[0]) - 1, 0)
    # Place each word: its rows in the transcript, its frames in the recording.
    words = []
    for number, (tokens, (_, begin, end)) in enumerate(zip(pieces, spoken.words, strict=True)):
        first = int(begin / frame_s + 1e-6)
        last = max(first + 1, math.ceil(end / frame_s - 1e-6))
        reason = ""
        if not tokens or last > n_frames + 1:
            reason = CUT
        elif tokens[0] < 1 or any(owners.count(token) > 1 for token in tokens):
            reason = UNALIGNED
        if reason:
            part.unmeasured[NAME, reason] = part.unmeasured.get((NAME, reason), 0) + 1
        elif first < n_frames:
            words.append(_Word(number, [token - 1 - first_row for token in tokens], (first, min(last, n_frames))))
    if not words:
        raise _LeftOutError("none of its words could be placed")

    # Run the model, and keep the rows that write words, on frames with sound. (layer, head, row, frame)
    queries = torch.arange(first_row, int(written[-1]) + 1)
    probe = OfChosen(lambda call: rows_of(call, queries, keys=slice(n_frames)).float().cpu(), kinds=["cross"])
    run_probe(model, reading, probe)
    weights = np.stack([maps[0].numpy() for _, maps in sorted(probe.maps["cross"].items())])
    if broken_rows({"cross": {0: weights[None]}}):
        raise _LeftOutError(f"attention is not finite (NaN) in {model.info.dtype}")
    return weights, words, frame_s


def _hits(weights: NDArray[np.float32], words: Sequence[_Word]) -> Floats:
    """Return on how many words each head is right, and its mass there, (layer, head, 2).

    A word's row is the mean of the rows that write it. If several frames share its largest weight, a frame of the word
    counts as its share of them.
    """
    sums = np.zeros((*weights.shape[:2], 2))
    for word in words:
        row = weights[:, :, word.rows].mean(2, dtype=np.float64).astype(np.float32)  # (layer, head, frame)
        is_largest = (row == row.max(-1, keepdims=True)) & (row > 0)
        mine = slice(*word.frames)
        sums[..., 0] += is_largest[..., mine].sum(-1) / np.maximum(is_largest.sum(-1), 1)
        sums[..., 1] += row[..., mine].sum(-1, dtype=np.float64)
    return sums


def _rule_hits(words: Sequence[_Word], n_words: int, n_frames: int) -> NDArray[np.int64]:
    """Return for how many words each simple rule is right, (rule,)."""
    hits = np.zeros(len(RULES), np.int64)
    for word in words:
        for rule, step in enumerate(ALONG, FIRST_DIAGONAL):
            frame = int((word.number + step + 0.5) / n_words * n_frames)
            hits[rule] += word.frames[0] <= frame < word.frames[1]
    return hits


# Word times


def _time_words(
    part: LinkPart, heard: Sequence[_Heard], n_heads: int, report: Report | None
) -> tuple[Table, dict[str, int]]:
    """Time the words of each recording by the heads that are best on the half that it is not in.

    Returns:
        The table `word_times`, and of how many recordings and words it is.
    """
    # Rank the heads of each half on the other half.
    chosen_on, scored_on, dealt = halve(part, NAME)
    ranked = [_rank_heads(Half.of([sums])) for sums in (scored_on, chosen_on)]
    axis = ("sources", "texts").index(dealt)
    timed = [each for each in heard if each.levels is not None]
    n_layers, n_per_layer = timed[0].shape
    upper = np.arange(n_layers // 2 * n_per_layer, n_layers * n_per_layer)

    # The mean error on each recording by each list of heads: (recording, list).
    sizes = sorted({1, n_heads})
    lists = [*((BEST, size) for size in sizes), (UPPER, len(upper))]
    errors_s = np.zeros((len(timed), len(lists)))
    n_words = 0
    for number, each in enumerate(timed):
        best = ranked[each.halves[axis]]
        errors_s[number] = _errors(each, [*(best[:size] for size in sizes), upper])
        n_words += len(each.rows)
        if report is not None:
            report(Progress(number + 1, n_words, (number + 1) / len(timed), "word times"))

    # Medians over recordings, and the change against the upper half of the layers.
    median, median_low, median_high = median_interval(errors_s)
    change, change_low, change_high = median_interval(errors_s - errors_s[:, [-1]])
    times = Table.of_arrays(
        Relations.TABLES["word_times"],
        by=[by for by, _ in lists],
        n_heads=[size for _, size in lists],
        median=median,
        median_low=median_low,
        median_high=median_high,
        mean=errors_s.mean(0),
        change=change,
        change_low=change_low,
        change_high=change_high,
    )
    return times, {"n_recordings": len(timed), "n_words": n_words}


def _rank_heads(half: Half) -> NDArray[np.int64]:
    """Return all heads, the most accurate ones first; those that give the words little weight come last."""
    accuracy, mass = half.hits.ratio()[0], half.mass.ratio()[0]
    return np.lexsort((-accuracy, mass < LEAST_MASS))


def _errors(heard: _Heard, lists: Sequence[NDArray[np.int64]]) -> Floats:
    """Return the mean error of word starts by each list of heads, in seconds."""
    assert heard.levels is not None
    costs = np.stack([-heard.levels[heads].mean(0, dtype=np.float64) for heads in lists])
    starts_s = cheapest_paths(costs)[:, heard.rows] * heard.frame_s
    errors_s: Floats = np.abs(starts_s - heard.starts_s).mean(1)
    return errors_s


def median_interval(values: Floats) -> tuple[Floats, Floats, Floats]:
    """Return medians over the first axis with the ends of their 95% intervals; NaN for ends of fewer than 6 values.

    The interval is the narrowest symmetric one of order statistics that covers the median in 95% of samples. Errors of
    times are skewed, and some recordings fail whole: Student's interval of their mean held the truth in 41% to 93% of
    samples of 10 (simulated: 6 shapes). This one assumes no shape.
    """
    ordered = np.sort(values, axis=0)
    n = len(ordered)
    below = int(binom.ppf(0.025, n, 0.5)) - 1
    middle: Floats = np.median(ordered, axis=0)
    if below < 0:
        unknown = np.full(middle.shape, math.nan)
        return middle, unknown, unknown
    return middle, ordered[below], ordered[n - 1 - below]
