"""Go over texts once, and add up what a study measures on them.

A study brings a `Measurer`. It cuts a block of texts into batches, runs the model on each batch, and adds what it
measured to a `PartialSums`: the sums over the texts of one block. Parts of different blocks merge. This loop does all
the
rest: it leaves out copies of texts, halves batches that do not fit into memory, reports progress, keeps the finished
blocks after Ctrl-C or a failure, and shares blocks among workers (`studies.workers`). It knows no measure.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import closing
from copy import copy
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Generic, Self, TypeVar

from attnscope.corpus import CopyFilter, Problem, blocks, distinct
from attnscope.errors import AttnscopeError, amount, is_out_of_memory
from attnscope.host import delay_interrupts
from attnscope.models.info import ModelInfo, run_facts
from attnscope.models.model import MixedLengthsError, Model, Tokenizer
from attnscope.studies.failures import BrokenTexts, NanOrigin, describe_failure
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
"""The name of the loop in the record of a failure, if the study gives it none."""

R = TypeVar("R")


# What a study brings


@dataclass(kw_only=True, eq=False)
class PartialSums:
    """Hold sums over some texts. A study adds fields: numbers, tuples, objects with `merge`, and mappings of these.

    Fields whose names begin with an underscore serve one block while it is measured. They are not merged.

    Attributes:
        n_texts: How many whole texts were added.
        n_tokens: How many tokens these texts have.
        n_chunked: How many of these texts came in several chunks.
        broken: The texts of the block being measured on which the model computes NaN or infinity: index in the corpus
            → where it came up first. They are not part of any sum.
        left_out: The broken texts of all finished blocks.
        n_halved: In how many blocks batches were halved for want of memory.
        unknown: Words that the tokenizer does not know.
        _n_rows: How many rows of each text were measured: index in the corpus → count. See `count_row`.
        _whole_texts: The indexes of the texts whose rows all were measured, none of them broken.
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
        """Count a measured row of a text; return whether the text is whole now: it has all rows, and none is broken.

        A row is one input of the model, such as a chunk of the text. The text has `n_rows` of them.
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
        """Return the fields that are merged over blocks, by name: those that begin with no underscore."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


def _add(first: Any, second: Any) -> Any:
    """Return the sum of a field's values in two parts; None = this part has no value.

    Numbers are added, tuples joined, mappings added key by key, and other objects merged.
    """
    if first is None:
        return second
    if second is None:
        return first
    if isinstance(first, Mapping):
        sums = dict(first)
        for name, value in second.items():
            sums[name] = _add(first.get(name), value)
        return sums
    if isinstance(first, int | tuple):
        return first + second
    return first.merge(second)


P = TypeVar("P", bound=PartialSums)


class Measurer(ABC, Generic[P]):
    """Measure blocks for a study. Each worker has a measurer of its own.

    A block is any object with `texts`, each of which has an `index` in the corpus, a `source` and a `line`.

    Attributes:
        halver: Halves batches that do not fit into memory.
        tokenizer: The tokenizer whose unknown words are listed; None = no words are read, such as of random tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self.halver = BatchHalver()
        self.tokenizer = tokenizer

    @abstractmethod
    def start(self, block: Any) -> P:
        """Return an empty part, to which the texts of a block will be added."""

    @abstractmethod
    def batches(self, block: Any) -> Iterable[Sequence[Any]]:
        """Cut a block into batches, the longest texts first: shorter ones fit into the memory that those have freed.

        If the measurer has a tokenizer, each item of a batch has `tokens`, and the `text_index` of its text.
        """

    @abstractmethod
    def measure(self, batch: Any) -> Any:
        """Run the model on a batch, and return what was measured.

        It must change no part: if memory runs out, it is called again on each half of the batch.
        """

    @abstractmethod
    def add(self, part: P, batch: Any, result: Any) -> None:
        """Add what was measured on a batch to a part. The loop puts Ctrl-C off until this returns."""

    def finish(self, part: P) -> P:
        """Return the part of a block after its last batch, in its final form."""
        return part


# What the loop returns


@dataclass
class CorpusRun(Generic[P]):
    """Hold the sums over a corpus, and what happened on the way.

    Attributes:
        done: The merged parts of all blocks that were measured.
        complete: Whether the loop came to the end of the corpus.
        lost: The blocks that were given up since their workers died, each as an entry for `problems` of a corpus.
        failures: The failure that ended the loop, as `describe_failure` describes it; empty = there was none.
        error: The exception of that failure; None = there was none.
        notes: Sentences on an interruption and on halved batches, for a reader of the result.
        n_copies: How many texts were left out as copies of earlier ones.
    """

    done: P
    complete: bool = True
    lost: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    error: Exception | None = None
    notes: list[str] = field(default_factory=list)
    n_copies: int = 0

    def problems(self, info: ModelInfo) -> list[dict[str, Any]]:
        """Return the texts that were not studied, as entries for `problems` in the `corpus` of a record."""
        return [*self.lost, *self.done.left_out.list_problems(info)]

    def about(self, info: ModelInfo, notes: Sequence[str] = ()) -> dict[str, Any]:
        """Return what a record holds as its `run`: the model, notes and failures."""
        about = run_facts(info, [*notes, *self.notes])
        if self.failures:
            about["failures"] = self.failures
        return about

    def corpus(self, texts: Texts, info: ModelInfo) -> dict[str, Any]:
        """Return what a record holds as its `corpus`: the texts, how many were measured, and why others were not."""
        description = describe_texts(texts)
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
    measurer: Callable[..., Measurer[P]],
    models: Sequence[Model],
    texts: Texts,
    empty: P,
    *,
    block_size: int,
    **options: Any,
) -> CorpusRun[P]:
    """Cut a corpus into blocks, and measure them. Copies of earlier texts are left out and counted.

    Args:
        measurer: As for `run_blocks`.
        models: As for `run_blocks`.
        texts: The corpus.
        empty: As for `run_blocks`.
        block_size: The most texts of a block.
        options: `workers`, `report` and `step` of `run_blocks`.
    """
    copies = CopyFilter()
    result = run_blocks(
        measurer,
        models,
        blocks(distinct(texts, copies), block_size),
        empty,
        share=lambda block: share_read(texts, block.texts[-1].index),
        **options,
    )
    result.n_copies = copies.n
    return result


def run_blocks(
    measurer: Callable[..., Measurer[P]],
    models: Sequence[Model],
    all_blocks: Iterable[Any],
    empty: P,
    *,
    share: Callable[[Any], float | None],
    workers: Sequence[Workers] | None = None,
    report: ReportProgress | None = None,
    step: str = STEP,
) -> CorpusRun[P]:
    """Measure blocks, and merge their parts in the order of the blocks.

    If Ctrl-C or an error ends the loop, the finished blocks are kept. If Ctrl-C comes within the first block, its
    finished texts are kept: they are its longest, and a note says so.

    Args:
        measurer: A function of the models that makes their measurer; with workers it is pickled.
        models: The models, as a rule one.
        all_blocks: The blocks; they are read one after the other as they are needed.
        empty: A part without texts.
        share: A function of a block that was just read: how much of the corpus has been read, 0 to 1; None = unknown.
        workers: For each model, how workers load it; None = this process measures.
        report: Called with the progress after each batch; with workers after each block.
        step: The name of this loop in the record of a failure.

    Raises:
        AttnscopeError: No worker could begin.
        Exception: Any other error, if it comes before a block with texts is done.
    """
    result = CorpusRun(empty)
    sums = _SumsInOrder(empty)
    # How much of the corpus had been read before the first block, and after each block.
    shares_read: list[float | None] = [0.0]

    def read_blocks() -> Iterator[Any]:
        for block in all_blocks:
            shares_read.append(share(block))
            yield block

    def report_progress(number: int, fraction: float, part: P) -> None:
        """Report that a fraction of block `number` is done. `part` holds those of its texts that `sums` lacks."""
        if report is None:
            return
        # Interpolate between the shares that were read before and after the block.
        before, after = shares_read[number : number + 2]
        share_done = None
        if after is not None:
            share_done = (before or 0.0) * (1 - fraction) + after * fraction
        report(Progress(sums.n_texts + part.n_texts, sums.n_tokens + part.n_tokens, share_done))

    try:
        if workers is None:
            outcomes = _measure_here(measurer(*models), read_blocks(), report_progress)
        else:
            loaders = [each.loader(model) for each, model in zip(workers, models, strict=True)]
            executor = workers[0].executor_on(models[0].info.device)
            outcomes = executor.map_blocks(_WorkerFunction(loaders, measurer), read_blocks())
        # Add the part of each block. Ctrl-C waits until all of it is added.
        with closing(outcomes):
            for outcome in outcomes:
                # A block that was given up has no result, and adds an empty part.
                with delay_interrupts():
                    sums.take(outcome.number, outcome.result or empty)
                if outcome.lost:
                    result.lost.append(_describe_lost(outcome.block, outcome.lost))
                # Workers do not report their batches. The texts of the block are in `sums` already.
                if workers is not None:
                    report_progress(outcome.number, 1.0, empty)
    # Keep what was done before an interruption or a failure.
    except KeyboardInterrupt as interruption:
        result.complete = False
        result.notes += interruption.args
    except Exception as error:
        if not sums.n_texts:
            raise
        result.error = error
        result.failures.append(describe_failure(step, error))
        result.complete = False
    # Workers may have finished later blocks while an earlier one was not done: these count too.
    has_gap = sums.add_waiting()
    if has_gap and not result.failures:
        result.notes.append(
            "Interrupted: these are whole blocks of texts, but not the first ones of the corpus."
        )
    result.done = sums.done
    if result.done.n_halved:
        result.notes.append("Memory did not suffice for whole batches: they were halved.")
    return result


def _describe_lost(block: Any, why: str) -> dict[str, Any]:
    """Return an entry for `problems` of a corpus: the block was given up, and why."""
    n_lost = amount(len(block.texts), "text from here on was", "texts from here on were")
    first = block.texts[0]
    return asdict(Problem(first.source, first.line, f"{n_lost} not studied: {why}"))


class _SumsInOrder(Generic[P]):
    """Merge the parts of blocks in the order of the corpus, though workers finish them in any order.

    Attributes:
        done: The merged parts; a part waits until those of all earlier blocks are merged.
        n_texts: The texts of the merged and the waiting parts.
        n_tokens: The tokens of these texts.
    """

    def __init__(self, empty: P) -> None:
        self.done = empty
        self.n_texts = 0
        self.n_tokens = 0
        # The parts that wait, by the number of their block.
        self._waiting: dict[int, P] = {}
        # The number of the block whose part is merged next.
        self._next = 0

    def take(self, number: int, part: P) -> None:
        """Take the part of block `number`."""
        self._waiting[number] = part
        self.n_texts += part.n_texts
        self.n_tokens += part.n_tokens
        while self._next in self._waiting:
            self.done = self.done.merge(self._waiting.pop(self._next))
            self._next += 1

    def add_waiting(self) -> bool:
        """Merge the parts that still wait, since no further one will come; return whether there were any."""
        numbers = sorted(self._waiting)
        for number in numbers:
            self.done = self.done.merge(self._waiting.pop(number))
        return bool(numbers)


# Where blocks are measured


def _measure_here(
    measurer: Measurer[P], all_blocks: Iterable[Any], report: Callable[[int, float, P], None]
) -> Generator[BlockOutcome, None, None]:
    """Measure blocks in this process, one after the other, and yield the part of each.

    A block that Ctrl-C cuts off is dropped, unless there would be no text at all without it.

    Args:
        measurer: The measurer.
        all_blocks: The blocks.
        report: Called after each batch with the number of the block, the fraction of it that is done, and its part.

    Raises:
        KeyboardInterrupt: The user ended it; with a note if only some texts of a block are kept.
    """
    n_texts = 0
    for number, block in enumerate(all_blocks):
        part = measurer.start(block)
        interruption = None
        try:
            for fraction in _add_batches(measurer, block, part):
                report(number, fraction, part)
        except KeyboardInterrupt as error:
            # Drop the block if an earlier one has texts, or if none of its own is done.
            if n_texts or not part.n_texts:
                raise
            interruption = error
        done = _finish(measurer, block, part)
        n_texts += done.n_texts
        yield BlockOutcome(number, block, done)
        if interruption is not None:
            # A note is due, unless Ctrl-C came after the last text.
            n_all = len(block.texts)
            if done.n_texts + done.left_out.n != n_all:
                note = "Interrupted in the first block of texts, which begins with the longest"
                interruption = KeyboardInterrupt(f"{note}: these are {done.n_texts:,} of its {n_all:,}.")
            raise interruption


def _add_batches(measurer: Measurer[P], block: Any, part: P) -> Iterator[float]:
    """Measure a block and add it to its part, batch by batch; yield after each the fraction of tokens that is done."""
    batches = list(measurer.batches(block))
    # List unknown words in the order of the corpus, not in that of the batches.
    if measurer.tokenizer is not None:
        items = sorted(chain(*batches), key=lambda item: item.text_index)
        part.unknown = UnknownWords.find(measurer.tokenizer, [item.tokens for item in items])
    n_tokens = sum(map(padded_size, batches))
    n_done = 0
    for batch in batches:
        # A batch that does not fit into memory comes in several pieces.
        for piece, result in measurer.halver.run(batch, measurer.measure):
            with delay_interrupts():
                measurer.add(part, piece, result)
        n_done += padded_size(batch)
        yield n_done / max(1, n_tokens)


def _finish(measurer: Measurer[P], block: Any, part: P) -> P:
    """Return the part of a measured block as it is merged with others: without the fields that serve this block."""
    finished = measurer.finish(part)
    merged_fields = finished.lasting_fields() | {
        "broken": {},
        "left_out": BrokenTexts.select(block.texts, part.broken),
        "n_halved": int(measurer.halver.max_batch_tokens is not None),
    }
    return type(part)(**merged_fields)


@dataclass(eq=False)
class _WorkerFunction(Generic[P]):
    """Measure blocks in a worker. It is pickled before `load`, as a `studies.workers.WorkerFunction`.

    Attributes:
        loaders: A function for each model, which loads it.
        make: A function of the models that makes their measurer.
        measurer: The measurer; `load` sets it.
    """

    loaders: Sequence[Callable[[], Model]]
    make: Callable[..., Measurer[P]]
    measurer: Measurer[P] = field(init=False)

    def load(self) -> None:
        """Load the models, and make their measurer."""
        self.measurer = self.make(*(load() for load in self.loaders))

    def __call__(self, block: Any) -> P:
        """Return the part of a block."""
        part = self.measurer.start(block)
        for _ in _add_batches(self.measurer, block, part):
            pass
        return _finish(self.measurer, block, part)


# Memory


class BatchHalver:
    """Run a function on batches, and halve those that do not fit into the memory of the device.

    Later batches of that size are halved at once. Texts that must not be padded together (`MixedLengthsError`) are
    halved too. Results agree up to rounding, since torch may sum batches of another shape in another order.

    Attributes:
        max_batch_tokens: The most tokens of a batch of several texts, padding included; None = no limit yet.
    """

    def __init__(self) -> None:
        self.max_batch_tokens: int | None = None

    def run(self, batch: Sequence[Any], do: Callable[[Any], R]) -> Iterator[tuple[Sequence[Any], R]]:
        """Call `do` with a batch, or with pieces of it that fit; yield each piece and its result.

        Raises:
            AttnscopeError: A single text does not fit.
        """
        n_tokens = padded_size(batch)
        is_single = len(batch) < 2
        # Try the whole batch, unless as many tokens did not fit before. A single text is always tried.
        if is_single or self.max_batch_tokens is None or n_tokens <= self.max_batch_tokens:
            is_memory_full = False
            try:
                result = do(batch)
            except MixedLengthsError:
                if is_single:
                    raise
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                is_memory_full = True
            else:
                yield batch, result
                return
            # Now the exception is gone, and with it its frames, which held the tensors that filled the memory.
            if is_memory_full:
                _empty_cache()
                self.max_batch_tokens = max(1, n_tokens // 2)
        if is_single:
            raise AttnscopeError(
                f"one text of {n_tokens:,} tokens does not fit into memory",
                "cut it into chunks (--chunk), choose fewer layers, --dtype bfloat16, or --device cpu",
            )
        # Run both halves, and halve them in turn if they do not fit either.
        middle = len(batch) // 2
        for half in (batch[:middle], batch[middle:]):
            yield from self.run(half, do)


def padded_size(batch: Sequence[Sized]) -> int:
    """Return how many tokens a batch has, padding included; the length of an item is its number of tokens."""
    return len(batch) * max(map(len, batch), default=0)


def _empty_cache() -> None:
    """Have torch give back the memory of the device that it keeps for later tensors."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
