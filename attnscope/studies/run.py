"""Run a study's measurements over a corpus in one pass, block by block, and add up the results.

A block is a run of texts, such as 512. A study brings a `Measurer`, which cuts a block into batches, runs the model on
each batch, and adds what it measured to a `PartialSums`. This object is called a part: the sums over one block. The
loop merges the parts of all blocks.

The loop also leaves out copies of texts, halves batches that do not fit into memory, reports progress, keeps the
finished blocks after Ctrl-C or a failure, and shares blocks among worker processes (`studies.workers`). It knows no
measure.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Generic, Self, TypeVar

from attnscope.corpus import CopyFilter, Problem, cut_into_blocks, distinct
from attnscope.errors import amount
from attnscope.host import delay_interrupts
from attnscope.models.info import ModelInfo, run_facts
from attnscope.models.model import Model, Tokenizer
from attnscope.studies.failures import BrokenTexts, NanOrigin, describe_failure
from attnscope.studies.halving import BatchHalver, padded_size
from attnscope.studies.inputs.texts import (
    Progress,
    ReportProgress,
    Texts,
    UnknownWords,
    describe_texts,
    share_read,
)
from attnscope.studies.workers import BlockOutcome, Workers

STEP = "the study of a later text"
"""What failed, as the result's `failures` say it, if the study gives no other name."""


# What a study brings


@dataclass(kw_only=True, eq=False)
class PartialSums:
    """Hold the sums over some texts. Each study derives a class from this one, and adds fields for its measures.

    The values of these fields can be added: numbers, tuples, objects with a method `merge`, and mappings of these.
    Fields whose names begin with an underscore are for the block that is being measured. They are not merged.

    Attributes:
        n_texts: How many texts were added. A text counts once all of its rows are measured.
        n_tokens: How many tokens these texts have.
        n_chunked: How many of these texts were cut into several chunks.
        broken: The texts of the block being measured on which the model computes NaN or infinity: index in the corpus
            → the attention layer where it happened first. They are not part of any sum.
        left_out: The broken texts of all finished blocks.
        n_halved: In how many blocks batches were halved, since they did not fit into memory.
        unknown: Words that the tokenizer does not know.
        _n_rows: How many rows of each text were measured: index in the corpus → count. See `count_row`.
        _whole_texts: The indices of the texts whose rows were all measured, and of which no row is broken.
    """

    n_texts: int = 0
    n_tokens: int = 0
    n_chunked: int = 0
    broken: dict[int, NanOrigin] = field(default_factory=dict)
    left_out: BrokenTexts = BrokenTexts()
    n_halved: int = 0
    unknown: UnknownWords = UnknownWords()
    _n_rows: Counter[int] = field(default_factory=Counter)
    _whole_texts: set[int] = field(default_factory=set)

    def count_row(self, text_index: int, n_rows: int) -> bool:
        """Count a measured row of a text. Return whether this was the text's last row, and no row is broken.

        A row is one entry of a batch, such as a chunk of the text. The text has `n_rows` rows.
        """
        self._n_rows[text_index] += 1
        is_whole = self._n_rows[text_index] == n_rows and text_index not in self.broken
        if is_whole:
            self._whole_texts.add(text_index)
        return is_whole

    def merge(self, other: Self) -> Self:
        """Return the sums over the texts of this part and of another; neither is changed."""
        both = copy(self)
        for name, value in other.lasting_fields().items():
            setattr(both, name, _add(getattr(self, name), value))
        return both

    def lasting_fields(self) -> dict[str, Any]:
        """Return the values of the fields that are merged over blocks, by name: no underscore begins them."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


def _add(value: Any, other: Any) -> Any:
    """Return the sum of the values that a field has in two parts; None = a part has no value yet.

    Numbers are added, tuples joined, mappings added key by key, and other objects merged.
    """
    if value is None:
        return other
    if other is None:
        return value
    if isinstance(value, Mapping):
        sums = dict(value)
        for key, addend in other.items():
            sums[key] = _add(value.get(key), addend)
        return sums
    if isinstance(value, int | tuple):
        return value + other
    return value.merge(other)


P = TypeVar("P", bound=PartialSums)


class Measurer(ABC, Generic[P]):
    """Measure blocks for a study. Each worker process has a measurer of its own.

    A block is any object with `texts`. Each text has an `index` in the corpus, and its `source` file and `line`.

    Attributes:
        halver: Halves batches that do not fit into memory.
        tokenizer: The tokenizer whose unknown words are listed; None = the inputs have no words, such as random tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self.halver = BatchHalver()
        self.tokenizer = tokenizer

    @abstractmethod
    def start(self, block: Any) -> P:
        """Return an empty part, to which the texts of a block will be added."""

    @abstractmethod
    def batches(self, block: Any) -> Iterable[Sequence[Any]]:
        """Cut a block into batches, the longest texts first, so that later batches fit into the memory that is freed.

        If the measurer has a tokenizer, each item of a batch has `tokens`, and the `text_index` of its text.
        """

    @abstractmethod
    def measure(self, batch: Any) -> Any:
        """Run the model on a batch, and return what was measured.

        This must not change the part. If memory runs out, it is called again with each half of the batch.
        """

    @abstractmethod
    def add(self, part: P, batch: Any, result: Any) -> None:
        """Add to a part what `measure` returned for a batch. The loop delays Ctrl-C until this returns."""

    def finish(self, part: P) -> P:
        """Return the part of a block after its last batch, in its final form."""
        return part


# What the loop returns


@dataclass
class CorpusRun(Generic[P]):
    """Hold the sums over a corpus, and what happened on the way.

    Attributes:
        done: The sums over all blocks that were measured.
        complete: Whether the loop reached the end of the corpus.
        lost: An entry for `problems` of a corpus for each block that was given up, since workers died over it.
        failures: The failure that ended the loop, as `describe_failure` describes it; empty = no failure.
        error: The exception of that failure; None = no failure.
        notes: Sentences on an interruption and on halved batches, which the report shows.
        n_copies: How many texts were left out as copies of earlier texts.
    """

    done: P
    complete: bool = True
    lost: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    error: Exception | None = None
    notes: list[str] = field(default_factory=list)
    n_copies: int = 0

    def problems(self, info: ModelInfo) -> list[dict[str, Any]]:
        """Return an entry for each text that was not studied, for `problems` in the `corpus` of a result."""
        return [*self.lost, *self.done.left_out.list_problems(info)]

    def describe_run(self, info: ModelInfo, notes: Sequence[str] = ()) -> dict[str, Any]:
        """Return the field `run` of a result: the model, library versions, notes and failures."""
        facts = run_facts(info, [*notes, *self.notes])
        if self.failures:
            facts["failures"] = self.failures
        return facts

    def corpus(self, texts: Texts, info: ModelInfo) -> dict[str, Any]:
        """Return the field `corpus` of a result: the texts, how many were measured, and why others were not."""
        description = describe_texts(texts)
        # `|` overrides the `problems` of the description, which are texts that could not be read.
        return description | {
            "n_texts": self.done.n_texts,
            "n_tokens": self.done.n_tokens,
            "n_chunked": self.done.n_chunked,
            "n_copies": self.n_copies,
            "problems": [*description["problems"], *self.problems(info)],
            "unknown_words": self.done.unknown.note,
            "complete": self.complete,
        }


# The loop


def run(
    make_measurer: Callable[..., Measurer[P]],
    models: Sequence[Model],
    texts: Texts,
    empty_part: P,
    *,
    block_size: int,
    **options: Any,
) -> CorpusRun[P]:
    """Cut a corpus into blocks, and measure them. Copies of earlier texts are left out and counted.

    Args:
        make_measurer: As for `run_blocks`.
        models: As for `run_blocks`.
        texts: The corpus.
        empty_part: As for `run_blocks`.
        block_size: The most texts of a block.
        options: `workers`, `report` and `step` of `run_blocks`.
    """
    # `distinct` drops copies while the loop reads the texts, and counts them in `copies`.
    copies = CopyFilter()
    result = run_blocks(
        make_measurer,
        models,
        cut_into_blocks(distinct(texts, copies), block_size),
        empty_part,
        get_share=lambda block: share_read(texts, block.texts[-1].index),
        **options,
    )
    result.n_copies = copies.n_dropped
    return result


def run_blocks(
    make_measurer: Callable[..., Measurer[P]],
    models: Sequence[Model],
    all_blocks: Iterable[Any],
    empty_part: P,
    *,
    get_share: Callable[[Any], float | None],
    workers: Sequence[Workers] | None = None,
    report: ReportProgress | None = None,
    step: str = STEP,
) -> CorpusRun[P]:
    """Measure blocks, and merge their parts in the order of the blocks.

    If Ctrl-C or an error ends the loop, the finished blocks are kept. If Ctrl-C comes within the first block, its
    finished texts are kept. These are its longest texts, so a note says so.

    Args:
        make_measurer: A function that takes the models, and returns a measurer for them. It is pickled for workers.
        models: The models, one in most studies.
        all_blocks: The blocks, in the order of the corpus. They are read one by one, as they are needed.
        empty_part: A part without texts.
        get_share: Takes a block that was just read. Returns the share of the corpus that is read by now, 0 to 1; None =
            unknown.
        workers: For each model, how worker processes load it; None = this process measures.
        report: Called with the progress after each batch; with workers after each block.
        step: What this loop does, for the `failures` of the result.

    Raises:
        AttnscopeError: No worker could start.
        Exception: Any other error, if it is raised before a block with texts is done.
    """
    result = CorpusRun(empty_part)
    sums = _CorpusSums(empty_part, get_share, report)
    unread_blocks = sums.watch(all_blocks)
    try:
        if workers is None:
            outcomes = _measure_here(make_measurer(*models), unread_blocks, sums.report_block)
        else:
            loaders = [
                model_workers.loader(model) for model_workers, model in zip(workers, models, strict=True)
            ]
            # All workers run in one executor, such as processes of this machine.
            executor = workers[0].executor_on(models[0].info.device)
            outcomes = executor.map_blocks(_MeasureBlock(loaders, make_measurer), unread_blocks)
        # `closing` ends the workers, also if the loop breaks off.
        with closing(outcomes):
            for outcome in outcomes:
                # Delay Ctrl-C, so that a part is added as a whole. A block that was given up has no result.
                with delay_interrupts():
                    sums.add(outcome.number, outcome.result or empty_part)
                if outcome.death_reason:
                    result.lost.append(_describe_given_up(outcome.block, outcome.death_reason))
                # Workers do not report their batches. The texts of the block are in `sums` already.
                if workers is not None:
                    sums.report_block(outcome.number, 1.0, empty_part)
    # Keep what was done before an interruption or a failure. An interruption may carry a note, see `_measure_here`.
    except KeyboardInterrupt as interruption:
        result.complete = False
        result.notes += interruption.args
    except Exception as error:
        if not sums.n_texts:
            raise
        result.error = error
        result.failures.append(describe_failure(step, error))
        result.complete = False
    # Workers may have finished later blocks while an earlier block was not done: add these too.
    has_gap = sums.merge_waiting()
    if has_gap and not result.failures:
        result.notes.append(
            "Interrupted: these are whole blocks of texts, but not the first ones of the corpus."
        )
    result.done = sums.done
    if result.done.n_halved:
        result.notes.append("Memory did not suffice for whole batches: they were halved.")
    return result


def _describe_given_up(block: Any, reason: str) -> dict[str, Any]:
    """Return an entry for `problems` of a corpus: which block was given up, and why."""
    texts_were = amount(len(block.texts), "text from here on was", "texts from here on were")
    first_text = block.texts[0]
    return asdict(Problem(first_text.source, first_text.line, f"{texts_were} not studied: {reason}"))


class _CorpusSums(Generic[P]):
    """Add up the parts of blocks in the order of the corpus, and report how much of the corpus is done.

    Workers finish blocks in any order. Parts are merged in the order of their blocks, since rounding depends on it, and
    so does the order of notes.

    Attributes:
        done: The merged parts. A part waits until the parts of all earlier blocks are merged.
        n_texts: How many texts the merged and the waiting parts have.
        n_tokens: How many tokens these texts have.
    """

    def __init__(
        self, empty_part: P, get_share: Callable[[Any], float | None], report: ReportProgress | None
    ) -> None:
        self.done = empty_part
        self.n_texts = 0
        self.n_tokens = 0
        self._get_share = get_share
        self._report = report
        # The share of the corpus that had been read before the first block, and after each block.
        self._shares_read: list[float | None] = [0.0]
        # The parts that wait, by the number of their block.
        self._waiting_parts: dict[int, P] = {}
        # The number of the block whose part is merged next.
        self._next_number = 0

    def watch(self, all_blocks: Iterable[Any]) -> Iterator[Any]:
        """Yield the blocks, and note after each how much of the corpus has been read."""
        for block in all_blocks:
            self._shares_read.append(self._get_share(block))
            yield block

    def add(self, number: int, part: P) -> None:
        """Add the part of block `number`, and merge all parts whose turn has come."""
        self._waiting_parts[number] = part
        self.n_texts += part.n_texts
        self.n_tokens += part.n_tokens
        while self._next_number in self._waiting_parts:
            self.done = self.done.merge(self._waiting_parts.pop(self._next_number))
            self._next_number += 1

    def report_block(self, number: int, fraction: float, part: P) -> None:
        """Report that a fraction of block `number` is done. `part` has those of its texts that are not added yet."""
        if self._report is None:
            return
        # Interpolate between the shares of the corpus before and after the block. A share is None if it is unknown.
        before, after = self._shares_read[number : number + 2]
        share_done = None
        if after is not None:
            share_done = (before or 0.0) * (1 - fraction) + after * fraction
        n_texts = self.n_texts + part.n_texts
        self._report(Progress(n_texts, self.n_tokens + part.n_tokens, share_done))

    def merge_waiting(self) -> bool:
        """Merge the parts that still wait, after the loop has ended; return whether there were any."""
        numbers = sorted(self._waiting_parts)
        for number in numbers:
            self.done = self.done.merge(self._waiting_parts.pop(number))
        return bool(numbers)


# Where blocks are measured


def _measure_here(
    measurer: Measurer[P], all_blocks: Iterable[Any], report: Callable[[int, float, P], None]
) -> Generator[BlockOutcome, None, None]:
    """Measure blocks in this process, one after the other, and yield the part of each.

    A block that Ctrl-C cuts short is dropped, unless the result would have no text without it.

    Args:
        measurer: The measurer.
        all_blocks: The blocks.
        report: Called after each batch with the number of the block, the fraction of it that is done, and its part.

    Raises:
        KeyboardInterrupt: The user pressed Ctrl-C. Its argument is a note, if only some texts of a block are kept.
    """
    # How many texts the earlier blocks have.
    n_texts = 0
    for number, block in enumerate(all_blocks):
        part = measurer.start(block)
        interruption = None
        try:
            for fraction in _add_batches(measurer, block, part):
                report(number, fraction, part)
        except KeyboardInterrupt as error:
            # Drop the block if an earlier block has texts, or if no text of this block is done.
            if n_texts or not part.n_texts:
                raise
            interruption = error
        finished = _finish_part(measurer, block, part)
        n_texts += finished.n_texts
        yield BlockOutcome(number, block, finished)
        if interruption is not None:
            # Add a note, unless Ctrl-C came after the last text of the block. Broken texts were measured too.
            n_all = len(block.texts)
            if finished.n_texts + finished.left_out.n != n_all:
                interruption = KeyboardInterrupt(
                    "Interrupted in the first block of texts, which begins with the longest: "
                    f"these are {finished.n_texts:,} of its {n_all:,}."
                )
            raise interruption


def _add_batches(measurer: Measurer[P], block: Any, part: P) -> Iterator[float]:
    """Measure a block, and add to its part, batch by batch. Yield after each batch the fraction of tokens done."""
    batches = list(measurer.batches(block))
    # List unknown words in the order of the corpus. The batches are ordered by length.
    if measurer.tokenizer is not None:
        items = sorted(chain(*batches), key=lambda item: item.text_index)
        part.unknown = UnknownWords.find(measurer.tokenizer, [item.tokens for item in items])
    n_tokens = sum(map(padded_size, batches))
    n_done = 0
    for batch in batches:
        # If a batch does not fit into memory, the halver runs it in several smaller batches.
        for small_batch, result in measurer.halver.run(batch, measurer.measure):
            with delay_interrupts():
                measurer.add(part, small_batch, result)
        n_done += padded_size(batch)
        yield n_done / max(1, n_tokens)


def _finish_part(measurer: Measurer[P], block: Any, part: P) -> P:
    """Return the part of a measured block in the form in which parts are merged and sent between processes.

    Fields for this block alone are empty. The broken texts of the block become its `left_out`.
    """
    finished = measurer.finish(part)
    merged_fields = finished.lasting_fields() | {
        "broken": {},
        "left_out": BrokenTexts.select(block.texts, part.broken),
        # The halver sets a limit at the first batch that did not fit. From then on, each block counts as halved.
        "n_halved": int(measurer.halver.max_batch_tokens is not None),
    }
    return type(part)(**merged_fields)


@dataclass(eq=False)
class _MeasureBlock(Generic[P]):
    """Measure blocks in a worker process: a `studies.workers.WorkerFunction`.

    It is pickled for the worker before `load` is called, so the model itself is never pickled.

    Attributes:
        loaders: For each model a function that loads it.
        make_measurer: As for `run_blocks`.
        measurer: The measurer; `load` sets it.
    """

    loaders: Sequence[Callable[[], Model]]
    make_measurer: Callable[..., Measurer[P]]
    measurer: Measurer[P] = field(init=False)

    def load(self) -> None:
        """Load the models, and make a measurer for them."""
        self.measurer = self.make_measurer(*(load() for load in self.loaders))

    def __call__(self, block: Any) -> P:
        """Return the part of a block."""
        part = self.measurer.start(block)
        # Each step of the generator measures a batch. Its progress is not reported.
        for _ in _add_batches(self.measurer, block, part):
            pass
        return _finish_part(self.measurer, block, part)
