"""Go over texts once, and add up what a study measures on them.

A study is a `Measurer`: it cuts a block of texts into batches, measures one by a forward pass or several, and adds the
result to a `Part`. Parts of different blocks merge. This loop does all the rest: it leaves out copies, halves batches
that do not fit into memory, says how far it is, keeps what is done after Ctrl-C or a failure, and shares blocks among
workers (`studies.workers`). It knows no measure.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import closing
from copy import copy
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from typing import Any, Generic, Self, TypeVar

from attnscope.corpus import Copies, Problem, blocks, distinct
from attnscope.errors import AttnscopeError, amount, is_out_of_memory
from attnscope.host import delay_interrupts
from attnscope.models.info import ModelInfo
from attnscope.models.model import MixedLengthsError, Model, Tokenizer
from attnscope.studies.failures import LeftOut, Place, failure
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.texts import (
    Progress,
    Report,
    Texts,
    UnknownWords,
    describe_texts,
    share_read,
)
from attnscope.studies.workers import Outcome, Workers

STEP = "the study of a later text"
"""What the record of a failure calls the step that failed, if the study does not name it."""

R = TypeVar("R")


# What a study brings


@dataclass(kw_only=True, eq=False)
class Part:
    """Hold sums over some texts. A study adds fields: numbers, tuples, objects with `merge`, and mappings of these.

    A field whose name opens with an underscore holds what one block needs while it is measured, and no sum.

    Attributes:
        n_texts: How many whole texts were added.
        n_tokens: Their tokens.
        n_chunked: How many of them came in several chunks.
        broken: Texts of this block on which the model computes NaN or infinity: index in the corpus → where. Nothing
            of them is added.
        left_out: The broken texts of all finished blocks.
        halved_to: To how few tokens batches were halved for want of memory; None = they were not.
        unknown: Words that the tokenizer does not know.
    """

    n_texts: int = 0
    n_tokens: int = 0
    n_chunked: int = 0
    broken: dict[int, Place] = field(default_factory=dict)
    left_out: LeftOut = LeftOut()
    halved_to: int | None = None
    unknown: UnknownWords = UnknownWords()
    _n_rows: dict[int, int] = field(default_factory=dict)
    _whole: set[int] = field(default_factory=set)

    def complete_text(self, text: int, n_rows: int) -> bool:
        """Count a measured row of a text, such as a chunk; return whether that was its last, and no row is broken.

        Such texts are whole: `_whole` holds their indexes.
        """
        n_measured = self._n_rows.get(text, 0) + 1
        self._n_rows[text] = n_measured
        is_whole = n_measured == n_rows and text not in self.broken
        if is_whole:
            self._whole.add(text)
        return is_whole

    def merge(self, other: Self) -> Self:
        """Return the sums over the texts of this part and of another; neither is changed."""
        both = copy(self)
        for name, value in other.lasting_fields().items():
            setattr(both, name, _add(getattr(self, name), value))
        both.halved_to = min(filter(None, (self.halved_to, other.halved_to)), default=None)
        return both

    def lasting_fields(self) -> dict[str, Any]:
        """Return the fields that outlast a block: those whose names open with no underscore."""
        names = [each.name for each in fields(self) if not each.name.startswith("_")]
        return {name: getattr(self, name) for name in names}


def _add(first: Any, second: Any) -> Any:
    """Return the sum of the values that a field has in two parts; None adds nothing."""
    if first is None:
        return second
    if second is None:
        return first
    if isinstance(first, Mapping):
        sums = dict(first)
        for name, value in second.items():
            sums[name] = _add(first.get(name), value)
        return sums
    # Tuples are joined.
    if isinstance(first, int | tuple):
        return first + second
    return first.merge(second)


P = TypeVar("P", bound=Part)


class Measurer(ABC, Generic[P]):
    """Measure blocks for a study. Each worker has a measurer of its own.

    A block is any object with `texts`, each of which has an `index` in the corpus, a `source` and a `line`.

    Attributes:
        room: Halves batches that do not fit into memory.
        tokenizer: The tokenizer of its texts; None = it measures no texts, or random tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self.room = Room()
        self.tokenizer = tokenizer

    @abstractmethod
    def start(self, block: Any) -> P:
        """Return an empty part, to which the texts of a block will be added."""

    @abstractmethod
    def batches(self, block: Any) -> Iterable[Sequence[Any]]:
        """Cut a block into batches, the longest texts first: shorter ones fit into the memory that those have freed."""

    @abstractmethod
    def measure(self, batch: Any) -> Any:
        """Run the model on a batch. It must change no part: where memory runs out, it is called again on half of it."""

    @abstractmethod
    def add(self, part: P, batch: Any, result: Any) -> None:
        """Add what was measured on a batch to a part. Ctrl-C waits until that is done."""

    def finish(self, part: P) -> P:
        """Return the part of a block that is done, in its final form."""
        return part


# What comes of it


@dataclass
class Run(Generic[P]):
    """Hold the sums over a corpus, and what happened on the way.

    Attributes:
        done: The sums over all texts that were measured.
        complete: Whether the loop came to the end of the corpus.
        lost: Blocks that were given up as their workers died, as problems of a corpus.
        failures: The failure that ended the loop, as `failure` describes it; empty = there was none.
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
        """Return the texts that were not studied, as problems of a corpus."""
        return [*self.lost, *self.done.left_out.problems(info)]

    def about(self, info: ModelInfo, notes: Sequence[str] = ()) -> dict[str, Any]:
        """Return the `run` of a record: the model, notes and failures."""
        about = run_of(info, [*notes, *self.notes])
        if self.failures:
            about["failures"] = self.failures
        return about

    def corpus(self, texts: Texts, info: ModelInfo) -> dict[str, Any]:
        """Return the `corpus` of a record: the texts, how many were measured, and what became of the others."""
        described = describe_texts(texts)
        return described | {
            "n_texts": self.done.n_texts,
            "n_tokens": self.done.n_tokens,
            "n_chunked": self.done.n_chunked,
            "n_copies": self.n_copies,
            "problems": [*described["problems"], *self.problems(info)],
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
    block: int,
    **options: Any,
) -> Run[P]:
    """Cut a corpus into blocks, and go over them. Copies of earlier texts are left out and counted.

    Args:
        measurer: Makes the measurer of the models; with workers it is pickled.
        models: The models, as a rule one.
        texts: The corpus.
        empty: A part without texts.
        block: The most texts of a block.
        options: `workers`, `report` and `step` of `run_blocks`.
    """
    copies = Copies()
    result = run_blocks(
        measurer,
        models,
        blocks(distinct(texts, copies), block),
        empty,
        share=lambda cut: share_read(texts, cut.texts[-1].index),
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
    workers: Sequence[Workers] | None = None,
    report: Report | None = None,
    step: str = STEP,
    share: Callable[[Any], float | None] = lambda _: None,
) -> Run[P]:
    """Measure blocks, and merge their parts in the order of the blocks.

    After Ctrl-C, or a failure after some texts, the blocks that are done count. If Ctrl-C comes within the first block,
    its texts that are done count: they are its longest, and a note says so.

    Args:
        measurer: Makes the measurer of the models; with workers it is pickled.
        models: The models, as a rule one.
        all_blocks: The blocks; they are read one after the other as they are needed.
        empty: A part without texts.
        workers: How workers load each model; None = this process measures.
        report: Called with the progress after each batch; with workers after each block.
        step: What the record of a failure calls this step.
        share: Returns, for a block that was just read, how much of the corpus has been read, 0 to 1; None = unknown.

    Raises:
        AttnscopeError: Something fails before any block is done, or no worker could begin.
    """
    result = Run(empty)
    sums = _InOrder(empty)
    # How much of the corpus had been read before the first block, and after each block.
    shares_read: list[float | None] = [0.0]

    def read_blocks() -> Iterator[Any]:
        for block in all_blocks:
            shares_read.append(share(block))
            yield block

    def tell(number: int, fraction: float, part: P) -> None:
        """Report that a fraction of a block is done; its part is not among the sums yet."""
        if report is None:
            return
        before, after = shares_read[number : number + 2]
        share_done = None
        if after is not None:
            share_done = (before or 0.0) * (1 - fraction) + after * fraction
        report(Progress(sums.n_texts + part.n_texts, sums.n_tokens + part.n_tokens, share_done))

    try:
        # Measure the blocks in this process, or by workers.
        if workers is None:
            outcomes = _measure_here(measurer(*models), read_blocks(), tell)
        else:
            outcomes = _measure_by_workers(measurer, models, read_blocks(), workers)
        # Add their parts. Ctrl-C waits until a part is added as a whole.
        with closing(outcomes):
            for outcome in outcomes:
                with delay_interrupts():
                    sums.take(outcome.number, outcome.result)
                if outcome.lost:
                    result.lost.append(_describe_lost(outcome.block, outcome.lost))
                if workers is not None:
                    tell(outcome.number, 1.0, empty)
    # Keep what was done before an interruption or a failure.
    except KeyboardInterrupt as interruption:
        result.complete = False
        result.notes += interruption.args
    except Exception as error:
        if not sums.n_texts:
            raise
        result.error = error
        result.failures.append(failure(step, error))
        result.complete = False
    # Blocks count as well that were done before an earlier one.
    if sums.add_waiting() and not result.failures:
        result.notes.append(
            "Interrupted: these are whole blocks of texts, but not the first ones of the corpus."
        )
    result.done = sums.done
    if result.done.halved_to is not None:
        result.notes.append("Memory did not suffice for whole batches: they were halved.")
    return result


def _describe_lost(block: Any, why: str) -> dict[str, Any]:
    """Return a block that was given up as a problem of the corpus."""
    n_lost = amount(len(block.texts), "text from here on was", "texts from here on were")
    first = block.texts[0]
    return asdict(Problem(first.source, first.line, f"{n_lost} not studied: {why}"))


class _InOrder(Generic[P]):
    """Add up the parts of blocks in the order of the corpus, in whatever order they come.

    Attributes:
        done: The sum of the parts that were added.
        n_texts: The texts of all parts, also of those that wait for the part of an earlier block.
        n_tokens: Their tokens.
    """

    def __init__(self, empty: P) -> None:
        self.done = empty
        self.n_texts = 0
        self.n_tokens = 0
        self._waiting: dict[int, P | None] = {}
        self._next = 0

    def take(self, number: int, part: P | None) -> None:
        """Take the part of a block by its number; None = the block was given up."""
        self._waiting[number] = part
        if part is not None:
            self.n_texts += part.n_texts
            self.n_tokens += part.n_tokens
        # Add all parts whose earlier ones are there.
        while self._next in self._waiting:
            self._add(self._next)
            self._next += 1

    def add_waiting(self) -> bool:
        """Add the parts that still wait, as no further one will come; return whether there are any."""
        numbers = sorted(self._waiting)
        for number in numbers:
            self._add(number)
        return bool(numbers)

    def _add(self, number: int) -> None:
        part = self._waiting.pop(number)
        if part is not None:
            self.done = self.done.merge(part)


# Where blocks are measured


def _measure_here(
    measurer: Measurer[P], all_blocks: Iterable[Any], tell: Callable[[int, float, P], None]
) -> Generator[Outcome, None, None]:
    """Measure blocks in this process, one after the other, and yield the part of each.

    If Ctrl-C comes while no earlier block has a text that counts, the texts of this block that are done are kept.

    Args:
        measurer: The measurer.
        all_blocks: The blocks.
        tell: Called after each batch with the number of the block, the fraction of it that is done, and its part.

    Raises:
        KeyboardInterrupt: The user ended it; with a note if only some texts of a block are kept.
    """
    n_texts = 0
    for number, block in enumerate(all_blocks):
        part = measurer.start(block)
        try:
            for fraction in _add_batches(measurer, block, part):
                tell(number, fraction, part)
        except KeyboardInterrupt:
            # Earlier blocks are there, or no text is done: this block counts nothing.
            if n_texts or not part.n_texts:
                raise
            done = _finish(measurer, block, part)
            yield Outcome(number, block, done)
            # Say so, unless Ctrl-C came after the last text.
            n_all = len(block.texts)
            if done.n_texts + done.left_out.n == n_all:
                raise
            note = "Interrupted in the first block of texts, which begins with the longest"
            raise KeyboardInterrupt(f"{note}: these are {done.n_texts:,} of its {n_all:,}.") from None
        done = _finish(measurer, block, part)
        n_texts += done.n_texts
        yield Outcome(number, block, done)


def _add_batches(measurer: Measurer[P], block: Any, part: P) -> Iterator[float]:
    """Measure a block and add it to its part, batch by batch; yield after each the fraction of tokens that is done."""
    batches = list(measurer.batches(block))
    # Unknown words in the order of the corpus; `text_index` is the index of an item's text.
    if measurer.tokenizer is not None:
        items = sorted(chain(*batches), key=lambda item: item.text_index)
        part.unknown = UnknownWords.of(measurer.tokenizer, [item.tokens for item in items])
    n_tokens = sum(map(padded_size, batches))
    n_done = 0
    for batch in batches:
        # Where memory does not suffice, the batch comes in several pieces.
        for piece, result in measurer.room.each(batch, measurer.measure):
            with delay_interrupts():
                measurer.add(part, piece, result)
        n_done += padded_size(batch)
        yield n_done / max(1, n_tokens)


def _finish(measurer: Measurer[P], block: Any, part: P) -> P:
    """Return the part of a block that is done: it names the texts left out, and drops what only this block needed."""
    lasting = measurer.finish(part).lasting_fields()
    lasting |= {
        "broken": {},
        "left_out": LeftOut.of(block.texts, part.broken),
        "halved_to": measurer.room.tokens,
    }
    return type(part)(**lasting)


def _measure_by_workers(
    measurer: Callable[..., Measurer[P]],
    models: Sequence[Model],
    all_blocks: Iterable[Any],
    workers: Sequence[Workers],
) -> Generator[Outcome, None, None]:
    """Measure blocks by workers, each of which loads the models once, and yield their parts in any order."""
    loaders = [each.loader(model) for each, model in zip(workers, models, strict=True)]
    executor = workers[0].executor_on(models[0].info.device)
    return executor.map_blocks(_InWorker(loaders, measurer), all_blocks)


@dataclass(eq=False)
class _InWorker(Generic[P]):
    """Measure blocks in a worker, which loads the models once. It is pickled before that.

    Attributes:
        loaders: Each loads one of the models.
        make: Makes the measurer of the models.
        measurer: The measurer, once the models are loaded.
    """

    loaders: Sequence[Callable[[], Model]]
    make: Callable[..., Measurer[P]]
    measurer: Measurer[P] = field(init=False)

    def load(self) -> None:
        """Load the models, and make their measurer."""
        self.measurer = self.make(*(load() for load in self.loaders))

    def __call__(self, block: Any) -> P:
        """Return the part of a block."""
        outcome = next(_measure_here(self.measurer, [block], lambda *_: None))
        part: P = outcome.result
        return part


# Memory


class Room:
    """Halve batches that do not fit into the memory of the device, and later ones of their size at once.

    It also halves batches of texts that must not be padded together (`MixedLengthsError`), whatever their size. Results
    agree up to rounding: torch may sum a batch of another shape in another order.

    Attributes:
        tokens: The most tokens, padding included, of several texts that are tried together; None = no batch failed yet.
    """

    def __init__(self) -> None:
        self.tokens: int | None = None

    def each(self, batch: Sequence[Any], do: Callable[[Any], R]) -> Iterator[tuple[Sequence[Any], R]]:
        """Call `do` with a batch, or with pieces of it that fit; yield each piece and its result.

        Raises:
            AttnscopeError: A single text does not fit.
        """
        n_tokens = padded_size(batch)
        middle = len(batch) // 2
        # Try it whole, unless as many tokens did not fit before. A single text is always tried.
        if not middle or self.tokens is None or n_tokens <= self.tokens:
            result = self._try(batch, do)
            if result is not None:
                yield batch, result[0]
                return
        if not middle:
            raise AttnscopeError(
                f"one text of {n_tokens:,} tokens does not fit into memory",
                "cut it into chunks (--chunk), choose fewer layers, --dtype bfloat16, or --device cpu",
            )
        # Try both halves, and halves of these.
        for half in (batch[:middle], batch[middle:]):
            yield from self.each(half, do)

    def _try(self, batch: Sequence[Any], do: Callable[[Any], R]) -> tuple[R] | None:
        """Return the result as a tuple, as it may be None itself; None = the batch must be halved."""
        try:
            return (do(batch),)
        except MixedLengthsError:
            if len(batch) == 1:
                raise
            return None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # Now the exception is gone, and with it its frames, which held the tensors that filled the memory.
        _give_memory_back()
        self.tokens = max(1, padded_size(batch) // 2)
        return None


def padded_size(batch: Sequence[Sized]) -> int:
    """Return how many tokens a batch has, padding included; the length of an item is its number of tokens."""
    return len(batch) * max(map(len, batch), default=0)


def _give_memory_back() -> None:
    """Give back what torch keeps of a device's memory for later."""
    torch = sys.modules["torch"]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
