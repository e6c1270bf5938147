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

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import quantile_test
from torch import Tensor

from attnscope.annotated import Link
from attnscope.annotated.alignment import UNALIGNED, PlacedLink, WordUnits
from attnscope.core.alignment import cheapest_paths, standardise
from attnscope.core.attention.probes import OfChosen
from attnscope.core.attention.row_samples import rows_of
from attnscope.core.attention.seam import AttentionCall
from attnscope.core.relations import links_of_weights
from attnscope.corpus import Chunk, Corpus, CorpusText, Problem
from attnscope.corpus.formats import json_object, name_problems, suffix_of
from attnscope.errors import AttnscopeError
from attnscope.models.model import Model
from attnscope.questions.relations import BEST, LEAST_MASS, UPPER, Relations
from attnscope.report.wording import RECORDINGS
from attnscope.results.table import Table
from attnscope.results.tokens import Tokens
from attnscope.senses.recordings import Recording, read_recording
from attnscope.studies.inputs.reading import Reading, Speech, read
from attnscope.studies.inputs.texts import Progress, Report, share_read
from attnscope.studies.maps.running import run_probe
from attnscope.studies.relations.evidence import (
    ALONG,
    FIRST_DIAGONAL,
    RULES,
    THRESHOLDS,
    Cell,
    Floats,
    Half,
    Lots,
)
from attnscope.studies.relations.links import (
    LinkBlock,
    LinkMeasurer,
    LinkText,
    MeasuredPart,
    Piece,
    Reasons,
    facts_of,
    shape_of,
)
from attnscope.studies.relations.study import conclude
from attnscope.studies.run import run_blocks

NAME = "word→sound"
CUT = "words that the recording or the transcript does not reach"

MOST_KEPT = 2**30
"""Bytes of attention that are kept for timing words; recordings beyond it are not timed."""

Words = tuple[tuple[str, float, float], ...]
"""The words of a recording: each word, and when it begins and ends, in seconds."""


def sound_relations(model: Model, files: Sequence[str], report: Report | None = None) -> Relations:
    """Measure which heads of a speech model's cross-attention listen to each word as it is written.

        result = sound_relations(attnscope.load("./whisper-tiny"), ["timed.jsonl"])
        result.alignment_heads    # as in Whisper's generation_config.json

    After an interruption (KeyboardInterrupt), the result covers the recordings up to there, and says so.

    Raises:
        AttnscopeError: There is no recording with word times.
    """
    corpus = _lines(files)
    blocks = _recordings(model, corpus)
    going = run_blocks(
        SoundMeasurer,
        (model,),
        blocks,
        MeasuredPart(),
        report=report,
        share=lambda _: share_read(corpus),
    )
    facts = {"unit": None, "of": RECORDINGS}
    result = conclude(model, "cross", going, corpus, facts, THRESHOLDS)
    if going.complete and not result.tables:
        why = name_problems(corpus.problems)
        raise AttnscopeError(
            f"there is no recording with word times{why}", "give JSON lines with audio and words"
        )
    heard = going.done.heard
    if not (going.complete and heard and result.alignment_heads):
        return result

    # How well the heads that follow the words time them.
    try:
        shape = shape_of(model, "cross")
        times = _time_words(going.done, shape, len(result.alignment_heads), report)
    except KeyboardInterrupt:
        return replace(result, corpus={**result.corpus, "complete": False})
    n_words = sum(len(each.rows) for each in heard)
    counts = {"n_recordings": len(heard), "n_words": n_words}
    tables = {**result.tables, "word_times": times}
    return replace(result, tables=tables, options={**THRESHOLDS, "word_times": counts})


# Recordings on their way in


def is_spoken(files: Sequence[str]) -> bool:
    """Return whether the first line of the first file is about a recording."""
    if not files or suffix_of(files[0]) != ".jsonl":
        return False
    text = next(iter(_lines(files[:1])))
    entry = json_object(text.text or "")
    return isinstance(entry, dict) and "audio" in entry and "words" in entry


def _lines(files: Sequence[str]) -> Corpus:
    """Return the lines of files as texts."""
    return Corpus(files, split="line", format="txt", most_characters=None)


def _read_line(text: CorpusText) -> tuple[Recording, Words, str | None]:
    """Return the recording of a line, its words, and what it has in common with others.

    Raises:
        AttnscopeError: The line is malformed, or its sound cannot be read.
    """
    try:
        entry = json.loads(text.text or "")
        words = tuple(map(_read_word, entry["words"]))
        audio = str(Path(text.source).parent / entry["audio"])
    except (ValueError, KeyError, TypeError):
        raise AttnscopeError('not {"audio": …, "words": [{"word", "start", "end"}, …]}') from None
    # Words are no blanks, end after they begin, and come in the order of their starts; they may overlap.
    starts_s = [start for _, start, _ in words]
    are_timed = all(word.split() and 0 <= start <= end < math.inf for word, start, end in words)
    if not words or not are_timed or starts_s != sorted(starts_s):
        raise AttnscopeError("its words are none, or not one after the other in time")
    document = entry.get("document")
    return read_recording(audio), words, None if document is None else str(document)


def _read_word(entry: Any) -> tuple[str, float, float]:
    """Return a word, and when it begins and ends, in seconds."""
    return str(entry["word"]), float(entry["start"]), float(entry["end"])


@dataclass(frozen=True, eq=False)
class Timing:
    """Hold what word times need of a recording, from its second word on: every path begins with the first one.

    Attributes:
        halves: The halves that it is in, by sources and by texts.
        rows: For each word the row that writes its first token, (word,).
        starts_s: When each word begins, (word,).
        frame_s: How long a frame lasts.
        levels: What each head listens to as it writes a row of the transcript, (layer · head, row, frame), by
            `level_weights`; None = it was not run yet.
    """

    halves: tuple[int, int]
    rows: list[int]
    starts_s: Floats
    frame_s: float
    levels: Any = None


@dataclass(frozen=True, eq=False, kw_only=True)
class SoundPiece(Piece):
    """Hold a recording: its words are links from the rows that write them to frames.

    Attributes:
        reading: What the model hears and writes.
        rows: The queries that write the transcript, from which the rows of links are counted, (row,).
        timing: How its words are timed.
    """

    reading: Reading
    rows: NDArray[np.int64]
    timing: Timing


def _recordings(model: Model, corpus: Corpus) -> Iterator[LinkBlock]:
    """Yield each recording as a block; lines that hold none are listed in the problems of the corpus."""
    lots = Lots()
    seen: set[tuple[str, Words]] = set()
    for text in corpus:
        try:
            recording, words, document = _read_line(text)
        except AttnscopeError as error:
            corpus.problems.append(Problem(text.source, text.line, error.message))
            continue
        # A recording with the same sound and words counts once.
        samples = recording.samples.tobytes()
        digest = hashlib.blake2b(samples, digest_size=16).hexdigest()
        if (digest, words) in seen:
            yield LinkBlock((), Counter(), n_copies=1)
            continue
        seen.add((digest, words))

        # The model writes the words, and hears the recording: the words in rows and in frames.
        spelled = [" ".join(word.split()) for word, *_ in words]
        reading = read(model, Speech(recording, " ".join(spelled)))
        if reading.target is None or reading.sound is None:
            raise AttnscopeError(
                f"{model.info.name} has no decoder, so there is no cross-attention to measure"
            )
        frame_s = reading.sound.seconds_per_frame
        n_frames = len(reading.sound.envelope)
        written = np.flatnonzero(~reading.target.special)
        first_row = max(int(written[0]) - 1, 0)
        rows = np.arange(first_row, int(written[-1]) + 1)
        frames = [_frames_of(start, end, frame_s) for _, start, end in words]
        links, unmeasured = _place_words(spelled, frames, reading.target, first_row, n_frames)
        if not links:
            corpus.problems.append(Problem(text.source, text.line, "none of its words could be placed"))
            yield LinkBlock((), unmeasured)
            continue
        rule_hits = _count_rule_hits(links, len(words), n_frames)
        halves, is_first = lots.deal(document or digest)
        cell = Cell(NAME, halves, is_first, len(links), rule_hits)
        # Every path begins with the recording, so the first word is not timed.
        later = [link for link in links if link.link.source[0] > 0]
        starts_s = np.array([words[link.link.source[0]][1] for link in later])
        timing = Timing(halves, [link.tokens[0] for link in later], starts_s, frame_s)
        piece = SoundPiece(
            chunk=Chunk(0, 0, 1, reading.target),
            unit_of_token=np.arange(n_frames),
            links=tuple(links),
            cells=(cell,),
            reading=reading,
            rows=rows,
            timing=timing,
        )
        linked = LinkText(0, text.source, text.line, 1, len(links), (piece,))
        yield LinkBlock((linked,), unmeasured)


def _frames_of(start_s: float, end_s: float, frame_s: float) -> range:
    """Return the frames in which a word is spoken, at least one."""
    first = int(start_s / frame_s + 1e-6)
    stop = math.ceil(end_s / frame_s - 1e-6)
    return range(first, max(first + 1, stop))


def _place_words(
    spelled: Sequence[str],
    frames: Sequence[range],
    target: Tokens,
    first_row: int,
    n_frames: int,
) -> tuple[list[PlacedLink], Reasons]:
    """Link each word from the rows that write it, counted from the first row, to the frames in which it is spoken.

    Returns:
        The links, and how many words have none, by relation and reason.
    """
    # Words stand in the transcript with a blank between them.
    spans = []
    start = 0
    for word in spelled:
        spans.append((start, start + len(word)))
        start += len(word) + 1
    units = WordUnits(spans, target)
    links = []
    unmeasured: Reasons = Counter()
    for number, (tokens, spoken) in enumerate(zip(units.pieces, frames, strict=True)):
        if not tokens or spoken.stop > n_frames + 1:
            unmeasured[NAME, CUT] += 1
        elif tokens[0] < 1 or number not in units.unit_of_word:
            unmeasured[NAME, UNALIGNED] += 1
        elif spoken.start < n_frames:
            # A token is written in the row before it.
            rows = tuple(token - 1 - first_row for token in tokens)
            heard = tuple(spoken[: n_frames - spoken.start])
            links.append(PlacedLink(Link(NAME, (number,), heard), rows, heard))
    return links, unmeasured


def _count_rule_hits(links: Sequence[PlacedLink], n_words: int, n_frames: int) -> NDArray[np.int64]:
    """Return for how many words each simple rule is right, (rule,): the diagonals alone look at frames."""
    hits = np.zeros(len(RULES), np.int64)
    for link in links:
        (word,) = link.link.source
        for rule, step in enumerate(ALONG, FIRST_DIAGONAL):
            frame = int((word + step + 0.5) / n_words * n_frames)
            hits[rule] += frame in link.targets
    return hits


# Hearing


class SoundMeasurer(LinkMeasurer):
    """Measure what heads listen to, recording by recording."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, "cross")
        self._n_bytes = 0

    def measure(self, batch: Sequence[Any]) -> Any:
        """Return what `LinkMeasurer` does, and the levels of all heads, (layer · head, row, frame)."""
        # Keep the rows that write words, on frames with sound: (1, head, row, frame) by layer.
        (piece,) = batch
        rows = torch.from_numpy(piece.rows)
        frames = slice(len(piece.unit_of_token))

        def keep(call: AttentionCall) -> Tensor:
            return rows_of(call, rows, keys=frames).float().cpu()

        probe = OfChosen(keep, kinds=["cross"])
        run_probe(self._model, piece.reading, probe)
        weights = dict(sorted(probe.maps["cross"].items()))
        facts = facts_of(batch, "cross", "cpu")
        sums = {layer: links_of_weights(of_layer, facts) for layer, of_layer in weights.items()}
        of_heads = torch.cat(list(weights.values()), 1)[0]
        levels = standardise(of_heads.numpy())
        return *self.hits_of_pieces(batch, sums), levels.astype(np.float32)

    def add(self, part: MeasuredPart, batch: Sequence[Any], result: Any) -> None:
        """Add what heads listen to, and keep the levels while there is room."""
        hits, broken, levels = result
        super().add(part, batch, (hits, broken))
        # Without room the recording still counts for the relation.
        timing = batch[0].timing
        self._n_bytes += levels.nbytes
        if timing.rows and not broken and self._n_bytes <= MOST_KEPT:
            part.heard += (replace(timing, levels=levels),)


# Word times


def _time_words(
    part: MeasuredPart, shape: tuple[int, int], n_heads: int, report: Report | None
) -> Table:
    """Time the words of each recording by the heads that are best on the half that it is not in.

    Args:
        part: What was heard.
        shape: How many layers there are, and heads in each.
        n_heads: How many heads follow the words.
        report: Called after each recording.
    """
    # Rank the heads of each half on the other half: the most accurate first, those with little weight on words last.
    chosen_on, scored_on, dealt = part.halve(NAME)
    ranked = []
    for half in (Half([scored_on]), Half([chosen_on])):
        # There is one relation: (head,).
        (accuracy,) = half.hits.ratio()
        (mass,) = half.mass.ratio()
        ranked.append(np.lexsort((-accuracy, mass < LEAST_MASS)))
    axis = ("sources", "texts").index(dealt)
    n_layers, n_per_layer = shape
    upper = np.arange(n_layers // 2 * n_per_layer, n_layers * n_per_layer)

    # The mean error on each recording by each list of heads: (recording, list).
    sizes = sorted({1, n_heads})
    errors_s = np.zeros((len(part.heard), len(sizes) + 1))
    n_words = 0
    for number, timing in enumerate(part.heard):
        best = ranked[timing.halves[axis]]
        lists = [best[:size] for size in sizes]
        lists.append(upper)
        # A path collects what the heads of a list listen to, in their mean: (list, row, frame) -> (list, word).
        levels = np.stack([timing.levels[heads].mean(0, dtype=np.float64) for heads in lists])
        frames = cheapest_paths(-levels)[:, timing.rows]
        errors_s[number] = np.abs(frames * timing.frame_s - timing.starts_s).mean(1)
        n_words += len(timing.rows)
        if report is not None:
            n_timed = number + 1
            report(Progress(n_timed, n_words, n_timed / len(part.heard), "word times"))

    # Medians over recordings, and the change against the upper half of the layers.
    median, median_low, median_high = _median_interval(errors_s)
    change, change_low, change_high = _median_interval(errors_s - errors_s[:, [-1]])
    return Table.of_arrays(
        Relations.TABLES["word_times"],
        by=[BEST] * len(sizes) + [UPPER],
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

    The ends are order statistics. Errors of times are skewed, and some recordings fail whole: Student's interval of
    their mean held the truth in 41% to 93% of samples of 10 (simulated: 6 shapes). This one assumes no shape.
    """
    ends = [quantile_test(column, p=0.5).confidence_interval() for column in values.T]
    low, high = np.transpose(ends)
    return np.median(values, axis=0), low, high
