"""Find the heads that attend to the sound of a word while the decoder writes it, on recordings with known word times.

The corpus is JSON lines:

    {"audio": "speech.wav", "words": [{"word": "the", "start": 0.0, "end": 0.21}, {"word": "cat", "start": 0.21, …

Each line is one recording. The path of its sound file is relative to the folder of the JSON file. Times are in seconds,
and words stand in the order in which they start. An optional "document" names what recordings have in common, such as a
speaker. Recordings with the same sound share a source without it. If their words are the same too, they count once.

The decoder predicts a token at the query before it. So the row of a token is the attention of that query to the frames
of sound, and the row of a word is the mean over its tokens. A head hits the word if the largest weight of the word's
row, among frames with sound, is on a frame of the word. The one relation is "word→sound". Its simple rules, which heads
must beat, are diagonals: the frame that is as far along the recording as the word is along the transcript.

If some heads follow the words, their attention gives the words' times, by dynamic time warping. The recordings are
split into two halves. The heads that rank best on one half time the words of the other half, so no recording is timed
by heads that it helped to choose.
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
from attnscope.annotated.alignment import UNALIGNED, AlignedLink, WordUnits
from attnscope.arrays import Floats
from attnscope.core.alignment import find_cheapest_paths, standardise_weights
from attnscope.core.attention.probes import HeadRecorder
from attnscope.core.attention.row_samples import rows_of
from attnscope.core.relations import score_links
from attnscope.corpus import Chunk, Corpus, CorpusText, Problem
from attnscope.corpus.formats import describe_problems, parse_json_object, suffix_of
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
    HalfSplitter,
    TextHits,
)
from attnscope.studies.relations.links import (
    LinkBlock,
    LinkedChunk,
    LinkMeasurer,
    LinkText,
    MeasuredPart,
    UnmeasuredLinks,
    head_grid_shape,
    make_link_facts,
)
from attnscope.studies.relations.study import build_result
from attnscope.studies.run import run_blocks

RELATION = "word→sound"
"""The one relation of this study, as results name it."""

NOT_REACHED = "words that the recording or the transcript does not reach"
"""The reason for which such words are left out, as results state it."""

MAX_WEIGHT_BYTES = 2**30
"""The most bytes of attention weights that are kept for timing words; recordings beyond that are not timed."""


class TimedWord(NamedTuple):
    """Hold a word, and when it begins and ends in the recording. White space within the word is one blank."""

    text: str
    start_s: float
    end_s: float


def sound_relations(
    model: Model, files: Sequence[str], report: ReportProgress | None = None
) -> Relations:
    """Measure which heads of a speech model's cross-attention attend to the sound of each word while it is written.

        result = sound_relations(attnscope.load("./whisper-tiny"), ["timed.jsonl"])
        result.alignment_heads    # as in Whisper's generation_config.json

    After an interruption (KeyboardInterrupt), the result covers the recordings measured so far, and says so.

    Raises:
        AttnscopeError: There is no recording with word times.
    """
    corpus = _corpus_of_lines(files)
    # `run_blocks` adds up the parts of all recordings, from an empty part. Its progress is the share of the files read.
    run = run_blocks(
        SoundMeasurer,
        (model,),
        _read_recordings(model, corpus),
        MeasuredPart(),
        report=report,
        get_share=lambda _: share_read(corpus),
    )
    # In the `corpus` of the result, "of" says that the texts are recordings. No unit, such as sentences, was chosen.
    result = build_result(model, "cross", run, corpus, {"unit": None, "of": RECORDINGS}, THRESHOLDS)
    if run.complete and not result.tables:
        raise AttnscopeError(
            f"there is no recording with word times{describe_problems(corpus.problems)}",
            "give JSON lines with audio and words",
        )
    word_timings = run.done.word_timings
    if not (run.complete and word_timings and result.alignment_heads):
        return result

    # Measure how well the heads that follow the words time them. Their number is known, but each half ranks its own.
    try:
        n_heads = len(result.alignment_heads)
        times = _time_words(run.done, head_grid_shape(model, "cross"), n_heads, report)
    except KeyboardInterrupt:
        return replace(result, corpus={**result.corpus, "complete": False})
    n_words = sum(len(timing.rows) for timing in word_timings)
    counts = {"n_recordings": len(word_timings), "n_words": n_words}
    tables = {**result.tables, "word_times": times}
    return replace(result, tables=tables, options={**THRESHOLDS, "word_times": counts})


# Reading recordings


def has_word_times(files: Sequence[str]) -> bool:
    """Return whether the first line of the first file names a recording and its words."""
    if not files or suffix_of(files[0]) != ".jsonl":
        return False
    text = next(iter(_corpus_of_lines(files[:1])))
    # `text.text` is the line. It is None only for texts given as token ids, which files never hold.
    entry = parse_json_object(text.text or "")
    return isinstance(entry, dict) and "audio" in entry and "words" in entry


def _corpus_of_lines(files: Sequence[str]) -> Corpus:
    """Return a corpus in which each line of the files is a text, as it stands: the JSON is not parsed yet."""
    return Corpus(files, split="line", format="txt", max_characters=None)


def _read_line(text: CorpusText) -> tuple[Recording, tuple[TimedWord, ...], str | None]:
    """Return the recording of a line, its words, and its "document"; None = the line names no document.

    Raises:
        AttnscopeError: The line is malformed, or its sound cannot be read.
    """
    # If the line is no JSON object, `parse_json_object` returns a message, a str. Then `entry["words"]` raises a
    # TypeError.
    entry: Any = parse_json_object(text.text or "")
    words = []
    try:
        for word in entry["words"]:
            word_text = " ".join(str(word["word"]).split())
            words.append(TimedWord(word_text, float(word["start"]), float(word["end"])))
        audio = str(Path(text.source).parent / entry["audio"])
    except (ValueError, KeyError, TypeError):
        raise AttnscopeError('not {"audio": …, "words": [{"word", "start", "end"}, …]}') from None
    # A word is not blank, and does not end before it begins. Words come in the order of their starts; they may overlap.
    are_timed = all(word.text and 0 <= word.start_s <= word.end_s < math.inf for word in words)
    starts_s = [word.start_s for word in words]
    if not words or not are_timed or starts_s != sorted(starts_s):
        raise AttnscopeError("its words are none, or not one after the other in time")
    document = entry.get("document")
    return read_recording(audio), tuple(words), None if document is None else str(document)


class Timing(NamedTuple):
    """Hold what is needed to time the words of a recording, except its first word.

    The path of dynamic time warping always starts at the first frame, so it says nothing of when the first word begins.

    Attributes:
        halves: Two numbers, 0 or 1 each, see `HalfSplitter`. The first is the recording's half if all recordings of a
            source go to the same half, the second if each recording is assigned alone.
        rows: For each word the row of `weights` in which its first token is written, (word,).
        starts_s: When each word begins, in seconds, (word,).
        frame_s: How long a frame lasts, in seconds.
        weights: The weights of all heads, layer by layer, after `core.alignment.standardise_weights`, (layer ·
            head, row, frame); None = the model has not run yet.
    """

    halves: tuple[int, int]
    rows: list[int]
    starts_s: Floats
    frame_s: float
    weights: Any = None


@dataclass(frozen=True, eq=False, kw_only=True)
class LinkedRecording(LinkedChunk):
    """Hold a recording as a chunk with links. Each word is a link from the queries that write it to its frames.

    Attributes:
        reading: The model's inputs: the sound for the encoder, and the transcript for the decoder.
        rows: The positions of the queries that write the transcript, (row,). Links count rows from the first of them.
        timing: What is needed to time the words.
    """

    reading: Reading
    rows: NDArray[np.int64]
    timing: Timing


def _read_recordings(model: Model, corpus: Corpus) -> Iterator[LinkBlock]:
    """Yield each recording as a block. Lines without a readable recording are added to `corpus.problems`."""
    half_splitter = HalfSplitter()
    seen_recordings: set[tuple[str, tuple[TimedWord, ...]]] = set()
    for text in corpus:
        try:
            recording, words, document = _read_line(text)
        except AttnscopeError as error:
            corpus.problems.append(Problem(text.source, text.line, error.message))
            continue
        # A recording with the same sound and words counts once.
        digest = hashlib.blake2b(recording.samples.tobytes(), digest_size=16).hexdigest()
        if (digest, words) in seen_recordings:
            yield LinkBlock((), Counter(), n_copies=1)
            continue
        seen_recordings.add((digest, words))

        # Prepare the model's inputs: the recording for the encoder, and its words for the decoder.
        reading = read(model, Speech(recording, " ".join(word.text for word in words)))
        if reading.target is None or reading.sound is None:
            raise AttnscopeError(
                f"{model.info.name} has no decoder, so there is no cross-attention to measure"
            )
        # The queries are the positions that write the transcript, each one before its token. The last query, at the
        # last token, writes what follows the transcript. The keys are the frames with sound, without the silence that
        # pads the recording.
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
        # Assign the recording to a half. Without a document, recordings with the same sound are of one source.
        halves, is_first = half_splitter.assign(document or digest)
        text_hits = TextHits(RELATION, halves, is_first, len(links), rule_hits)
        # The first word is not timed, see `Timing`. The `source` of a link is the index of its word.
        timed_links = [aligned for aligned in links if aligned.link.source[0] > 0]
        starts_s = np.array([words[aligned.link.source[0]].start_s for aligned in timed_links])
        timing = Timing(halves, [aligned.tokens[0] for aligned in timed_links], starts_s, frame_s)
        # A block has one text, the recording, which is its own only chunk: number 0 of 1. The cell adds up its hits.
        linked_recording = LinkedRecording(
            chunk=Chunk(0, 0, 1, reading.target),
            # The keys are not tokens but frames, and links point to single frames. So each frame is a unit of its own.
            unit_of_token=np.arange(n_frames),
            links=tuple(links),
            cells=(text_hits,),
            reading=reading,
            rows=rows,
            timing=timing,
        )
        link_text = LinkText(
            0, text.source, text.line, n_texts=1, n_tokens=len(links), linked_chunks=(linked_recording,)
        )
        yield LinkBlock((link_text,), unmeasured)


def _frames_of(word: TimedWord, frame_s: float) -> range:
    """Return the frames in which a word is spoken, at least one; `frame_s` is how many seconds a frame lasts."""
    # 1e-6 of a frame allows for rounding of times that lie at the border of two frames.
    first = int(word.start_s / frame_s + 1e-6)
    stop = math.ceil(word.end_s / frame_s - 1e-6)
    return range(first, max(first + 1, stop))


def _place_words(
    words: Sequence[TimedWord],
    target: Tokens,
    first_row: int,
    n_frames: int,
    frame_s: float,
) -> tuple[list[AlignedLink], UnmeasuredLinks]:
    """Link each word, from the rows in which it is written to the frames in which it is spoken.

    Args:
        words: The words. The transcript is these words, joined by blanks.
        target: The tokens of the transcript.
        first_row: The position of the first query that writes the transcript. It is row 0 of the links.
        n_frames: How many frames have sound.
        frame_s: How long a frame lasts, in seconds.

    Returns:
        The links; and how many words could not be linked, by relation and reason.
    """
    # Where each word stands in the transcript, (start, stop) in characters.
    spans = []
    start = 0
    for word in words:
        stop = start + len(word.text)
        spans.append((start, stop))
        start = stop + 1
    # `tokens_of_word` has the tokens of each word. `unit_of_word` has only words that share no token with another word.
    units = WordUnits(spans, target)
    links = []
    unmeasured: UnmeasuredLinks = Counter()
    for number, (tokens, word) in enumerate(zip(units.tokens_of_word, words, strict=True)):
        spoken_frames = _frames_of(word, frame_s)
        # The end of the last word may be rounded up to the frame after the sound.
        if not tokens or spoken_frames.start >= n_frames or spoken_frames.stop > n_frames + 1:
            unmeasured[RELATION, NOT_REACHED] += 1
        elif tokens[0] < 1 or number not in units.unit_of_word:
            # No query precedes token 0, and a word that shares a token with another has no row of its own.
            unmeasured[RELATION, UNALIGNED] += 1
        else:
            # The query that writes a token stands one position before it.
            rows = tuple(token - 1 - first_row for token in tokens)
            frames = tuple(spoken_frames[: n_frames - spoken_frames.start])
            links.append(AlignedLink(Link(RELATION, (number,), frames), rows, frames))
    return links, unmeasured


def _count_rule_hits(links: Sequence[AlignedLink], n_words: int, n_frames: int) -> NDArray[np.int64]:
    """Return how many words each simple rule hits, (rule,). Only the rules "diagonal" apply to frames: others hit 0."""
    hits = np.zeros(len(RULES), np.int64)
    for aligned in links:
        (word,) = aligned.link.source
        # The rules "diagonal" stand side by side in `RULES`, one for each step, from the index FIRST_DIAGONAL on.
        for rule, step in enumerate(DIAGONAL_STEPS, FIRST_DIAGONAL):
            # The frame as far along the recording as the middle of the word `step` words later is along the text.
            frame = int((word + step + 0.5) / n_words * n_frames)
            hits[rule] += frame in aligned.targets
    return hits


# Running the model


class SoundMeasurer(LinkMeasurer):
    """Measure which frames heads attend to, recording by recording: a batch is one `LinkedRecording`."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, "cross")
        self._n_bytes = 0

    def measure(self, batch: Sequence[Any]) -> Any:
        """Return hits and broken recordings as `LinkMeasurer.measure` does, and the weights that time the words.

        These are `Timing.weights`, (layer · head, row, frame).
        """
        # Record the weights of the queries that write words, on frames with sound: layer -> (1, head, row, frame).
        (linked_recording,) = batch
        rows = torch.from_numpy(linked_recording.rows)
        frames = slice(len(linked_recording.unit_of_token))
        probe = HeadRecorder(
            lambda call: rows_of(call, rows, keys=frames).float().cpu(), kinds=["cross"]
        )
        run_probe(self._model, linked_recording.reading, probe)
        weights_by_layer = probe.maps["cross"]
        link_facts = make_link_facts(batch, "cross")
        # (cell, head, 2) per layer: hits and mass in each cell; here there is one cell, of the one relation. `broken`
        # is empty unless the model computes NaN or infinity on this recording.
        sums_by_layer = {
            layer: score_links(weights, link_facts) for layer, weights in weights_by_layer.items()
        }
        hits, broken = self.split_hits(batch, sums_by_layer)
        # (layer · head, row, frame)
        head_weights = torch.cat([weights_by_layer[layer] for layer in sorted(weights_by_layer)], 1)[0]
        standardised_weights = standardise_weights(head_weights.numpy())
        return hits, broken, standardised_weights.astype(np.float32)

    def add(self, part: MeasuredPart, batch: Sequence[Any], result: Any) -> None:
        """Keep the hits of a recording. Keep its weights too, as long as all take at most MAX_WEIGHT_BYTES."""
        hits, broken, weights = result
        super().add(part, batch, (hits, broken))
        # A recording whose weights are not kept is not timed, but still counts for the relation.
        timing = batch[0].timing
        self._n_bytes += weights.nbytes
        if timing.rows and not broken and self._n_bytes <= MAX_WEIGHT_BYTES:
            part.word_timings += (timing._replace(weights=weights),)


# Timing words


def _time_words(
    part: MeasuredPart, shape: tuple[int, int], n_heads: int, report: ReportProgress | None
) -> Table:
    """Time the words of each recording by the best heads, and by all heads of the upper half of the layers.

    A recording is timed by the heads that are best on the half of the recordings that it is not in.

    Args:
        part: The sums over all recordings, and the recordings that are timed.
        shape: How many layers there are, and heads in each.
        n_heads: How many heads follow the words.
        report: Called after each recording.

    Returns:
        The table of timing errors: a row for the best head, one for the `n_heads` best heads, and one for all heads of
        the upper half. The first two are one row if `n_heads` is 1.
    """
    # For the recordings of each half, rank all heads on the other half: the most accurate first. Heads with little
    # attention on the words come last, whatever their accuracy. Half 0 is timed by the ranking on half 1, which comes
    # first in the list, and half 1 by the ranking on half 0.
    sums_of_half_0, sums_of_half_1, split_by = part.sum_halves(RELATION)
    heads_by_half = []
    for other_half in (CorpusHalf([sums_of_half_1]), CorpusHalf([sums_of_half_0])):
        # There is one relation, so (1, head) becomes (head,).
        (accuracy,) = other_half.head_hits.ratio()
        (mass,) = other_half.head_mass.ratio()
        heads_by_half.append(np.lexsort((-accuracy, mass < MIN_MASS)))
    # The entry of `Timing.halves` for the way in which the corpus was split: 0 by sources, 1 recording by recording.
    split_index = ("sources", "texts").index(split_by)
    n_layers, n_per_layer = shape
    upper_heads = np.arange(n_layers // 2 * n_per_layer, n_layers * n_per_layer)

    # The mean error of each recording with each list of heads, in seconds: (recording, list).
    list_sizes = sorted({1, n_heads})
    errors_s = np.zeros((len(part.word_timings), len(list_sizes) + 1))
    n_words = 0
    for number, timing in enumerate(part.word_timings):
        best_heads = heads_by_half[timing.halves[split_index]]
        head_lists = [best_heads[:size] for size in list_sizes]
        head_lists.append(upper_heads)
        # Average the weights over the heads of each list: (list, row, frame).
        mean_weights = np.stack(
            [timing.weights[heads].mean(0, dtype=np.float64) for heads in head_lists]
        )
        # The path through the largest mean weights gives the frame at which each word begins: (list, word).
        frames = find_cheapest_paths(-mean_weights)[:, timing.rows]
        errors_s[number] = np.abs(frames * timing.frame_s - timing.starts_s).mean(1)
        n_words += len(timing.rows)
        if report is not None:
            n_timed = number + 1
            report(Progress(n_timed, n_words, n_timed / len(part.word_timings), "word times"))

    # Take medians over recordings: of the errors, and of their differences from those of the upper half, the last list.
    median, median_low, median_high = _median_interval(errors_s)
    change, change_low, change_high = _median_interval(errors_s - errors_s[:, [-1]])
    return Table.of_arrays(
        Relations.TABLES["word_times"],
        by=[BY_BEST_HEADS] * len(list_sizes) + [BY_UPPER_HALF],
        n_heads=[*list_sizes, len(upper_heads)],
        median=median,
        median_low=median_low,
        median_high=median_high,
        mean=errors_s.mean(0),
        change=change,
        change_low=change_low,
        change_high=change_high,
    )


def _median_interval(values: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the medians over recordings, and the low and high ends of their 95% intervals, (list,) each.

    `values` is (recording, list). With fewer than 6 recordings the ends are NaN.

    The ends are order statistics, which assume no distribution. Errors of times are skewed, and on some recordings all
    words are off. In simulated samples of 10, Student's interval of the mean covered the true mean in 41% to 93% of
    samples, for 6 distributions.
    """
    intervals = [quantile_test(column, p=0.5).confidence_interval() for column in values.T]
    low, high = np.transpose(intervals)
    return np.median(values, axis=0), low, high
