"""Find the heads that listen to a word as it is written, on recordings with known word times.

    {"audio": "speech.wav", "words": [{"word": "the", "start": 0.0, "end": 0.21}, {"word": "cat", "start": 0.21, …

Each line is one recording. Sound files are looked for beside the file that names them. Times are in seconds, and words
stand in the order in which they start. An optional "document" names what recordings have in common, such as a speaker.
Recordings with the same sound have the same source anyway, and with the same words too they count once.

A token is written in the row of the token before it, and a word's row is the mean of the rows of its tokens. A head
hits the word if the largest weight of that row, among frames with sound, is on a frame of the word. So there is one
relation, "word→sound". Its simple rules are the diagonal: the frame as far along the recording as the word is along the
transcript.

If some heads follow the words, the words are timed by them, by dynamic time warping. Heads that one half of the
recordings ranks time the words of the other half. So no recording is timed by heads that it helped to choose.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import quantile_test

from attnscope.annotated import Link
from attnscope.annotated.alignment import UNALIGNED, PlacedLink, WordUnits
from attnscope.core.alignment import cheapest_paths, standardise
from attnscope.core.attention.probes import HeadRecorder
from attnscope.core.attention.row_samples import rows_of
from attnscope.core.relations import links_of_weights
from attnscope.corpus import Chunk, Corpus, CorpusText, Problem
from attnscope.corpus.formats import json_object, name_problems, suffix_of
from attnscope.errors import AttnscopeError
from attnscope.models.model import Model
from attnscope.questions.relations import BY_BEST_HEADS, BY_UPPER_HALF, MIN_MASS, Relations
from attnscope.report.wording import RECORDINGS
from attnscope.results.table import Table
from attnscope.results.tokens import Tokens
from attnscope.senses.recordings import Recording, read_recording
from attnscope.studies.inputs.reading import Reading, Speech, read
from attnscope.studies.inputs.texts import Progress, ReportProgress, share_read
from attnscope.studies.maps.running import run_probe
from attnscope.studies.relations.evidence import (
    DIAGONAL_STEPS,
    FIRST_DIAGONAL,
    RULES,
    THRESHOLDS,
    CorpusHalf,
    Floats,
    HalfSplitter,
    TextHits,
)
from attnscope.studies.relations.links import (
    LinkBlock,
    LinkedChunk,
    LinkMeasurer,
    LinkText,
    MeasuredPart,
    Reasons,
    facts_of,
    shape_of,
)
from attnscope.studies.relations.study import conclude
from attnscope.studies.run import run_blocks

NAME = "word→sound"
CUT = "words that the recording or the transcript does not reach"

MAX_KEPT = 2**30
"""The most bytes of attention that are kept for timing words; recordings beyond that are not timed."""


class TimedWord(NamedTuple):
    """Hold a word, with single blanks in it, if any, and when it begins and ends in the recording, in seconds."""

    text: str
    start_s: float
    end_s: float


def sound_relations(
    model: Model, files: Sequence[str], report: ReportProgress | None = None
) -> Relations:
    """Measure which heads of a speech model's cross-attention listen to each word as it is written.

        result = sound_relations(attnscope.load("./whisper-tiny"), ["timed.jsonl"])
        result.alignment_heads    # as in Whisper's generation_config.json

    After an interruption (KeyboardInterrupt), the result covers the recordings up to there, and says so.

    Raises:
        AttnscopeError: There is no recording with word times.
    """
    corpus = _lines(files)
    run = run_blocks(
        SoundMeasurer,
        (model,),
        _recordings(model, corpus),
        MeasuredPart(),
        report=report,
        share=lambda _: share_read(corpus),
    )
    result = conclude(model, "cross", run, corpus, {"unit": None, "of": RECORDINGS}, THRESHOLDS)
    if run.complete and not result.tables:
        raise AttnscopeError(
            f"there is no recording with word times{name_problems(corpus.problems)}",
            "give JSON lines with audio and words",
        )
    heard = run.done.heard
    if not (run.complete and heard and result.alignment_heads):
        return result

    # How well the heads that follow the words time them.
    try:
        n_heads = len(result.alignment_heads)
        times = _time_words(run.done, shape_of(model, "cross"), n_heads, report)
    except KeyboardInterrupt:
        return replace(result, corpus={**result.corpus, "complete": False})
    n_words = sum(len(timing.rows) for timing in heard)
    counts = {"n_recordings": len(heard), "n_words": n_words}
    tables = {**result.tables, "word_times": times}
    return replace(result, tables=tables, options={**THRESHOLDS, "word_times": counts})


# Reading recordings


def is_spoken(files: Sequence[str]) -> bool:
    """Return whether the first line of the first file names a recording and its words."""
    if not files or suffix_of(files[0]) != ".jsonl":
        return False
    text = next(iter(_lines(files[:1])))
    entry = json_object(text.text or "")
    return isinstance(entry, dict) and "audio" in entry and "words" in entry


def _lines(files: Sequence[str]) -> Corpus:
    """Return the lines of files as texts."""
    return Corpus(files, split="line", format="txt", max_characters=None)


def _read_line(text: CorpusText) -> tuple[Recording, tuple[TimedWord, ...], str | None]:
    """Return the recording of a line, its words, and the document that it shares with others; None = it has none.

    Raises:
        AttnscopeError: The line is malformed, or its sound cannot be read.
    """
    # If the line is no JSON object, `entry` is a message, which has no "words".
    entry: Any = json_object(text.text or "")
    words = []
    try:
        for word in entry["words"]:
            spelled = " ".join(str(word["word"]).split())
            words.append(TimedWord(spelled, float(word["start"]), float(word["end"])))
        audio = str(Path(text.source).parent / entry["audio"])
    except (ValueError, KeyError, TypeError):
        raise AttnscopeError('not {"audio": …, "words": [{"word", "start", "end"}, …]}') from None
    # A word is not blank, and ends after it begins. Words come in the order of their starts; they may overlap.
    are_timed = all(word.text and 0 <= word.start_s <= word.end_s < math.inf for word in words)
    starts_s = [word.start_s for word in words]
    if not words or not are_timed or starts_s != sorted(starts_s):
        raise AttnscopeError("its words are none, or not one after the other in time")
    document = entry.get("document")
    return read_recording(audio), tuple(words), None if document is None else str(document)


class Timing(NamedTuple):
    """Hold what is needed to time the words of a recording, but for the first: it always begins with the recording.

    Attributes:
        halves: The halves that the recording is in: by sources, and recording by recording.
        rows: For each word the row of `levels` in which its first token is written, (word,).
        starts_s: When each word begins, in seconds, (word,).
        frame_s: How long a frame lasts, in seconds.
        levels: The weights of each head on frames, standardised by `standardise`, (layer · head, row, frame); None =
            the model has not run yet.
    """

    halves: tuple[int, int]
    rows: list[int]
    starts_s: Floats
    frame_s: float
    levels: Any = None


@dataclass(frozen=True, eq=False, kw_only=True)
class LinkedRecording(LinkedChunk):
    """Hold a recording, whose words are links from the rows in which they are written to frames.

    Attributes:
        reading: What the model hears and writes.
        rows: The queries in which the transcript is written, (row,). Rows of links are counted from the first of them.
        timing: What is needed to time the words.
    """

    reading: Reading
    rows: NDArray[np.int64]
    timing: Timing


def _recordings(model: Model, corpus: Corpus) -> Iterator[LinkBlock]:
    """Yield each recording as a block; lines that hold none are listed in the problems of the corpus."""
    lots = HalfSplitter()
    seen: set[tuple[str, tuple[TimedWord, ...]]] = set()
    for text in corpus:
        try:
            recording, words, document = _read_line(text)
        except AttnscopeError as error:
            corpus.problems.append(Problem(text.source, text.line, error.message))
            continue
        # A recording with the same sound and words counts once.
        digest = hashlib.blake2b(recording.samples.tobytes(), digest_size=16).hexdigest()
        if (digest, words) in seen:
            yield LinkBlock((), Counter(), n_copies=1)
            continue
        seen.add((digest, words))

        # The model hears the recording, and writes its words.
        reading = read(model, Speech(recording, " ".join(word.text for word in words)))
        if reading.target is None or reading.sound is None:
            raise AttnscopeError(
                f"{model.info.name} has no decoder, so there is no cross-attention to measure"
            )
        # Queries: the rows in which the transcript is written, each one before its token. Keys: the frames with sound.
        transcript = np.flatnonzero(~reading.target.special)
        first_row = max(int(transcript[0]) - 1, 0)
        rows = np.arange(first_row, int(transcript[-1]) + 1)
        n_frames = len(reading.sound.envelope)
        frame_s = reading.sound.seconds_per_frame
        links, unmeasured = _place_words(words, reading.target, first_row, n_frames, frame_s)
        if not links:
            corpus.problems.append(Problem(text.source, text.line, "none of its words could be placed"))
            yield LinkBlock((), unmeasured)
            continue
        rule_hits = _count_rule_hits(links, len(words), n_frames)
        halves, is_first = lots.deal(document or digest)
        cell = TextHits(NAME, halves, is_first, len(links), rule_hits)
        # The path of dynamic time warping begins with the recording, so the first word is not timed.
        later = [link for link in links if link.link.source[0] > 0]
        starts_s = np.array([words[link.link.source[0]].start_s for link in later])
        timing = Timing(halves, [link.tokens[0] for link in later], starts_s, frame_s)
        piece = LinkedRecording(
            chunk=Chunk(0, 0, 1, reading.target),
            unit_of_token=np.arange(n_frames),
            links=tuple(links),
            cells=(cell,),
            reading=reading,
            rows=rows,
            timing=timing,
        )
        linked = LinkText(0, text.source, text.line, n_texts=1, n_tokens=len(links), pieces=(piece,))
        yield LinkBlock((linked,), unmeasured)


def _frames_of(word: TimedWord, frame_s: float) -> range:
    """Return the frames in which a word is spoken, at least one; `frame_s` is how long a frame lasts."""
    # Times at the border of two frames may be off by rounding.
    first = int(word.start_s / frame_s + 1e-6)
    stop = math.ceil(word.end_s / frame_s - 1e-6)
    return range(first, max(first + 1, stop))


def _place_words(
    words: Sequence[TimedWord],
    target: Tokens,
    first_row: int,
    n_frames: int,
    frame_s: float,
) -> tuple[list[PlacedLink], Reasons]:
    """Link each word, from the rows in which it is written to the frames in which it is spoken.

    Args:
        words: The words; the transcript has them with blanks between.
        target: The tokens of the transcript.
        first_row: The first row in which the transcript is written: rows of links are counted from it.
        n_frames: How many frames have sound.
        frame_s: How long a frame lasts, in seconds.

    Returns:
        The links, and how many words have none, by relation and reason.
    """
    spans = []
    start = 0
    for word in words:
        stop = start + len(word.text)
        spans.append((start, stop))
        start = stop + 1
    units = WordUnits(spans, target)
    links = []
    unmeasured: Reasons = Counter()
    for number, (tokens, word) in enumerate(zip(units.tokens_of_word, words, strict=True)):
        spoken = _frames_of(word, frame_s)
        # By rounding, the last word may end in the frame after the sound.
        if not tokens or spoken.start >= n_frames or spoken.stop > n_frames + 1:
            unmeasured[NAME, CUT] += 1
        elif tokens[0] < 1 or number not in units.unit_of_word:
            unmeasured[NAME, UNALIGNED] += 1
        else:
            # A token is written in the row before it.
            rows = tuple(token - 1 - first_row for token in tokens)
            frames = tuple(spoken[: n_frames - spoken.start])
            links.append(PlacedLink(Link(NAME, (number,), frames), rows, frames))
    return links, unmeasured


def _count_rule_hits(links: Sequence[PlacedLink], n_words: int, n_frames: int) -> NDArray[np.int64]:
    """Return how many words each simple rule hits, (rule,); only the diagonals look at frames, all others hit none."""
    hits = np.zeros(len(RULES), np.int64)
    for link in links:
        (word,) = link.link.source
        for rule, step in enumerate(DIAGONAL_STEPS, FIRST_DIAGONAL):
            frame = int((word + step + 0.5) / n_words * n_frames)
            hits[rule] += frame in link.targets
    return hits


# Running the model


class SoundMeasurer(LinkMeasurer):
    """Measure what heads listen to, recording by recording."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, "cross")
        self._n_bytes = 0

    def measure(self, batch: Sequence[Any]) -> Any:
        """Return what `LinkMeasurer.measure` does, and the levels of `Timing`, (layer · head, row, frame)."""
        # Keep the rows in which words are written, on frames with sound: layer -> (1, head, row, frame).
        (piece,) = batch
        rows = torch.from_numpy(piece.rows)
        frames = slice(len(piece.unit_of_token))
        probe = HeadRecorder(
            lambda call: rows_of(call, rows, keys=frames).float().cpu(), kinds=["cross"]
        )
        run_probe(self._model, piece.reading, probe)
        by_layer = probe.maps["cross"]
        facts = facts_of(batch, "cross")
        sums = {layer: links_of_weights(weights, facts) for layer, weights in by_layer.items()}
        hits, broken = self.hits_of_pieces(batch, sums)
        of_heads = torch.cat([by_layer[layer] for layer in sorted(by_layer)], 1)[0]
        levels = standardise(of_heads.numpy())
        return hits, broken, levels.astype(np.float32)

    def add(self, part: MeasuredPart, batch: Sequence[Any], result: Any) -> None:
        """Keep the hits of a recording, and its levels while they take no more than MAX_KEPT bytes."""
        hits, broken, levels = result
        super().add(part, batch, (hits, broken))
        # A recording without levels is not timed, but still counts for the relation.
        timing = batch[0].timing
        self._n_bytes += levels.nbytes
        if timing.rows and not broken and self._n_bytes <= MAX_KEPT:
            part.heard += (timing._replace(levels=levels),)


# Timing words


def _time_words(
    part: MeasuredPart, shape: tuple[int, int], n_heads: int, report: ReportProgress | None
) -> Table:
    """Time the words of each recording by the best heads, and by all heads of the upper half of the layers.

    The best heads of a recording are those that are best on the half that it is not in.

    Args:
        part: The sums over all recordings, and the recordings that are timed.
        shape: How many layers there are, and heads in each.
        n_heads: How many heads follow the words.
        report: Called after each recording.

    Returns:
        The errors: a row for the best head, one for the `n_heads` best, and one for the upper half.
    """
    # For the recordings of either half, rank all heads on the other half: the most accurate first, but after all
    # others those with little weight on the words.
    chosen_on, scored_on, dealt = part.halve(NAME)
    ranked = []
    for other_half in (CorpusHalf([scored_on]), CorpusHalf([chosen_on])):
        # There is one relation: (head,).
        (accuracy,) = other_half.hits.ratio()
        (mass,) = other_half.mass.ratio()
        ranked.append(np.lexsort((-accuracy, mass < MIN_MASS)))
    # Which of a recording's two halves counts: that by sources, or the other one.
    deal = ("sources", "texts").index(dealt)
    n_layers, n_per_layer = shape
    upper = np.arange(n_layers // 2 * n_per_layer, n_layers * n_per_layer)

    # The mean error on each recording by each list of heads: (recording, list).
    sizes = sorted({1, n_heads})
    errors_s = np.zeros((len(part.heard), len(sizes) + 1))
    n_words = 0
    for number, timing in enumerate(part.heard):
        best = ranked[timing.halves[deal]]
        lists = [best[:size] for size in sizes]
        lists.append(upper)
        # A path goes through the mean levels of the heads of a list: (list, row, frame) -> (list, word).
        levels = np.stack([timing.levels[heads].mean(0, dtype=np.float64) for heads in lists])
        frames = cheapest_paths(-levels)[:, timing.rows]
        errors_s[number] = np.abs(frames * timing.frame_s - timing.starts_s).mean(1)
        n_words += len(timing.rows)
        if report is not None:
            n_timed = number + 1
            report(Progress(n_timed, n_words, n_timed / len(part.heard), "word times"))

    # Medians over recordings, and the difference from the upper half, which is the last list.
    median, median_low, median_high = _median_interval(errors_s)
    change, change_low, change_high = _median_interval(errors_s - errors_s[:, [-1]])
    return Table.of_arrays(
        Relations.TABLES["word_times"],
        by=[BY_BEST_HEADS] * len(sizes) + [BY_UPPER_HALF],
        n_heads=[*sizes, len(upper)],
        median=median,
        median_low=median_low,
        median_high=median_high,
        mean=errors_s.mean(0),
        change=change,
        change_low=change_low,
        change_high=change_high,
    )


def _median_interval(values: Floats) -> tuple[Floats, Floats, Floats]:
    """Return medians over the first axis with the ends of their 95% intervals; NaN for ends of fewer than 6 values.

    The ends are order statistics, which assume no distribution. Errors of times are skewed, and on some recordings all
    words are off: Student's interval of the mean held the truth in 41% to 93% of samples of 10 (simulated, for 6
    distributions).
    """
    ends = [quantile_test(column, p=0.5).confidence_interval() for column in values.T]
    low, high = np.transpose(ends)
    return np.median(values, axis=0), low, high
