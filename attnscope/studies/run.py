"""Go over texts once, and add up what a study measures on them.

A study is a `Measurer`: it cuts a block of texts into batches, measures one by a forward pass or several, and adds the
result to a `Part`. Parts of different blocks merge. This loop does all the rest: it leaves out copies, halves batches
that do not fit into memory, says how far it is, keeps what is done after Ctrl-C or a failure, and shares blocks among
workers (`studies.workers`). It knows no measure.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import closing
from copy import copy
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Generic, Protocol, Self, TypeVar

from attnscope.corpus import Copies, Problem, blocks, distinct
from attnscope.errors import AttnscopeError, amount, is_out_of_memory
from attnscope.host import delay_interrupts
from attnscope.models.info import ModelInfo
from attnscope.models.model import MixedLengthsError, Model
from attnscope.studies.failures import LeftOut, Place, failure
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.texts import (
    Progress,
    Report,
    Texts,
    problems_of,
    sha256_of,
    share_read,
    sources_of,
    split_of,
)
from attnscope.studies.workers import Outcome, Workers, WorkersModel

STEP = "the study of a later text"
"""What failed, if the study does not name it."""

R = TypeVar("R")


class Block(Protocol):
    """Hold texts that are measured together, in one place."""

    @property
    def texts(self) -> Sequence[Any]:
        """Return its texts; each has an `index`, a `source` and a `line`."""


@dataclass(kw_only=True, eq=False)
class Part:
    """Hold sums over some texts. A study adds fields: numbers, tuples, objects with `merge`, and mappings of these.

    Fields whose names open with an underscore are of one block, while it is measured.

    Attributes:
        n_texts: Whole texts in it.
        n_tokens: Their tokens.
        n_chunked: How many of them came in several chunks.
        broken: Texts of the block at hand on which the model computes NaN or infinity, by index. They count nothing.
        left_out: The same of all finished blocks.
        halved_to: To how few tokens batches were halved for want of memory; None = they were not.
    """

    n_texts: int = 0
    n_tokens: int = 0
    n_chunked: int = 0
    broken: dict[int, Place] = field(default_factory=dict)
    left_out: LeftOut = LeftOut()
    halved_to: int | None = None

    def merge(self, other: Self) -> Self:
        """Return what was added up over the texts of both; neither is changed."""
        both = copy(self)
        for each in fields(self):
            if not each.name.startswith("_"):
                setattr(both, each.name, _add(getattr(self, each.name), getattr(other, each.name)))
        both.halved_to = min((part.halved_to for part in (self, other) if part.halved_to is not None), default=None)
        return both


def _add(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, Mapping):
        return {**first, **{name: _add(first.get(name), value) for name, value in second.items()}}
    return first + second if isinstance(first, int | tuple) else first.merge(second)


P = TypeVar("P", bound=Part)


class Measurer(ABC, Generic[P]):
    """Measure blocks for a study. Each worker has a measurer of its own.

    Attributes:
        room: How much of a batch fits into memory at once.
    """

    def __init__(self) -> None:
        self.room = Room()

    @abstractmethod
    def start(self, block: Any) -> P:
        """Return the part of no text, for a block."""

    @abstractmethod
    def batches(self, block: Any) -> Iterable[Sequence[Any]]:
        """Cut a block into batches, the longest texts first: what shorter ones need fits into what those have freed."""

    @abstractmethod
    def measure(self, batch: Any) -> Any:
        """Run the model on a batch. It adds to nothing, as it starts anew on a half where memory runs out."""

    @abstractmethod
    def add(self, part: P, batch: Any, result: Any) -> None:
        """Add what was measured on a batch to a part. Ctrl-C waits until that is done."""

    def finish(self, part: P) -> P:
        """Return the part of a block, without what only later batches of the block needed."""
        return part


@dataclass
class Run(Generic[P]):
    """Hold the result of going over the texts.

    Attributes:
        done: What was added up.
        complete: Whether all texts were gone through.
        lost: Blocks that were given up as their workers died, as problems of a corpus.
        failures: What failed after some blocks, as `failure` tells it.
        error: The exception that this was; None = nothing failed.
        notes: What a reader of the result must know of an interruption, and of memory.
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
        """Return what made a record: the model, notes and what failed."""
        about = run_of(info, [*notes, *self.notes])
        return about | {"failures": self.failures} if self.failures else about

    def corpus(self, texts: Texts, info: ModelInfo) -> dict[str, Any]:
        """Return what a record says of the texts."""
        return {
            "sources": sources_of(texts),
            "split": split_of(texts),
            "n_texts": self.done.n_texts,
            "n_tokens": self.done.n_tokens,
            "n_chunked": self.done.n_chunked,
            "n_copies": self.n_copies,
            "sha256": sha256_of(texts),
            "problems": [*problems_of(texts), *self.problems(info)],
            "complete": self.complete,
        }


def run(
    measurer: Callable[..., Measurer[P]],
    models: Sequence[Model],
    texts: Texts,
    nothing: P,
    *,
    block: int,
    workers: Sequence[Workers] | None = None,
    report: Report | None = None,
    step: str = STEP,
) -> Run[P]:
    """Go over a corpus, block by block, as `run_blocks` does. Copies of earlier texts are left out and counted.

    Args:
        measurer: Makes the measurer of the models; with workers it is pickled.
        models: The models, as a rule one.
        texts: The corpus.
        nothing: The part of no text.
        block: The most texts of a block.
        workers: How workers load each model; None = this process measures.
        report: Hears how far it is after each batch; with workers after each block.
        step: What is at work, for the record of a failure.
    """
    copies = Copies()

    def share(cut: Block) -> float | None:
        return share_read(texts, cut.texts[-1].index)

    cut = blocks(distinct(texts, copies), block)
    going = run_blocks(measurer, models, cut, nothing, workers=workers, report=report, step=step, share=share)
    going.n_copies = copies.n
    return going


def run_blocks(
    measurer: Callable[..., Measurer[P]],
    models: Sequence[Model],
    cut: Iterable[Block],
    nothing: P,
    *,
    workers: Sequence[Workers] | None = None,
    report: Report | None = None,
    step: str = STEP,
    share: Callable[[Any], float | None] = lambda _: None,
) -> Run[P]:
    """Go over blocks, and add up what comes of each in their order.

    If the user ends it, or if something fails after some texts, whole blocks count. Before the first whole block, an
    interruption keeps the texts that are done: they are the longest of the first block, and a note says so. `share`
    says how much of all texts had been read when a block was cut.

    Raises:
        AttnscopeError: Something fails before any block is done, or no worker could begin.
    """
    going = Run(nothing)
    order = _InOrder(nothing)
    tasks = _tasks(cut, share)
    try:
        if workers is None:
            outcomes = _here(measurer(*models), tasks, report)
        else:
            loaded = tuple(each.model(model) for each, model in zip(workers, models, strict=True))
            executor = workers[0].executor_on(models[0].info.device)
            outcomes = executor.map_blocks(_InWorker(loaded, measurer), tasks)
        with closing(outcomes):
            for outcome in outcomes:
                with delay_interrupts():
                    order.take(outcome)
                if outcome.lost:
                    going.lost.append(_describe_lost(outcome.block.block, outcome.lost))
                if report is not None and workers is not None:
                    report(Progress(order.n_texts, order.n_tokens, outcome.block.share_at(1.0)))
    except KeyboardInterrupt as interruption:
        going.complete = False
        going.notes += interruption.args
    except Exception as error:
        if not order.n_texts:
            raise
        going.error = error
        going.failures.append(failure(step, error))
        going.complete = False
    if order.take_rest() and not going.failures:
        going.notes.append("Interrupted: these are whole blocks of texts, but not the first ones of the corpus.")
    going.done = order.done
    if going.done.halved_to is not None:
        going.notes.append("Memory did not suffice for whole batches: they were halved.")
    return going


@dataclass(frozen=True)
class _Task:
    """Hold a block, and how much of all texts had been read before and after it; None = unknown."""

    block: Any
    before: float
    after: float | None

    def share_at(self, fraction: float) -> float | None:
        """Return how much of all texts is done with a fraction of the block."""
        return None if self.after is None else self.before + (self.after - self.before) * fraction


def _tasks(cut: Iterable[Block], share: Callable[[Any], float | None]) -> Iterator[_Task]:
    before = 0.0
    for block in cut:
        after = share(block)
        yield _Task(block, before, after)
        before = after or before


def _describe_lost(block: Block, why: str) -> dict[str, Any]:
    n_lost = amount(len(block.texts), "text from here on was", "texts from here on were")
    first = block.texts[0]
    return asdict(Problem(first.source, first.line, f"{n_lost} not studied: {why}"))


class _InOrder(Generic[P]):
    """Add up the parts of blocks in the order of the corpus, whichever comes first.

    Attributes:
        done: The sum.
        n_texts: Texts of all parts, those that wait for an earlier one included; `n_tokens` likewise.
    """

    def __init__(self, nothing: P) -> None:
        self.done = nothing
        self.n_texts = 0
        self.n_tokens = 0
        self._waiting: dict[int, P | None] = {}
        self._next = 0

    def take(self, outcome: Outcome[_Task]) -> None:
        """Take the part of a block; None if it was given up."""
        part: P | None = outcome.result
        self._waiting[outcome.number] = part
        if part is not None:
            self.n_texts += part.n_texts
            self.n_tokens += part.n_tokens
        while self._next in self._waiting:
            self._add(self._waiting.pop(self._next))
            self._next += 1

    def take_rest(self) -> bool:
        """Add the parts that wait for a block which will not come; return whether there are any."""
        for number in sorted(self._waiting):
            self._add(self._waiting[number])
        return bool(self._waiting)

    def _add(self, part: P | None) -> None:
        if part is not None:
            self.done = self.done.merge(part)


# Where blocks are measured


def _here(
    measurer: Measurer[P], tasks: Iterable[_Task], report: Report | None
) -> Generator[Outcome[_Task], None, None]:
    """Measure blocks in this process, one after the other, and report after each batch.

    If it is interrupted before any text of an earlier block counts, the texts of this one that are done are kept.

    Raises:
        KeyboardInterrupt: With a note, if only some texts of a block were kept.
    """
    n_texts = 0
    n_tokens = 0
    for number, task in enumerate(tasks):
        part = measurer.start(task.block)
        try:
            for fraction in _steps(measurer, task.block, part):
                if report is not None:
                    share = task.share_at(fraction)
                    report(Progress(n_texts + part.n_texts, n_tokens + part.n_tokens, share))
        except KeyboardInterrupt:
            if n_texts or not part.n_texts:
                raise
            done = _finish(measurer, task.block, part)
            yield Outcome(number, task, done)
            n_all = len(task.block.texts)
            if done.n_texts + done.left_out.n < n_all:
                note = "Interrupted in the first block of texts, which begins with the longest"
                raise KeyboardInterrupt(f"{note}: these are {done.n_texts:,} of its {n_all:,}.") from None
            raise
        done = _finish(measurer, task.block, part)
        n_texts += done.n_texts
        n_tokens += done.n_tokens
        yield Outcome(number, task, done)


def _steps(measurer: Measurer[P], block: Any, part: P) -> Iterator[float]:
    """Add a block to its part, batch by batch; yield which fraction of its tokens is done."""
    batches = list(measurer.batches(block))
    n_tokens = sum(map(padded_size, batches))
    n_done = 0
    for batch in batches:
        for some, result in measurer.room.each(batch, measurer.measure):
            with delay_interrupts():
                measurer.add(part, some, result)
        n_done += padded_size(batch)
        yield n_done / max(1, n_tokens)


def _finish(measurer: Measurer[P], block: Block, part: P) -> P:
    """Return the part of a block, with the texts that were left out."""
    finished = measurer.finish(part)
    names = [each.name for each in fields(finished) if not each.name.startswith("_")]
    done = type(finished)(**{name: getattr(finished, name) for name in names})
    done.left_out = LeftOut.of(block.texts, part.broken)
    done.broken = {}
    done.halved_to = measurer.room.tokens
    return done


@dataclass(eq=False)
class _InWorker(Generic[P]):
    """Measure blocks in a worker, which loads the models once. It is pickled before that."""

    models: tuple[WorkersModel, ...]
    make: Callable[..., Measurer[P]]
    measurer: Measurer[P] | None = None

    def load(self) -> None:
        """Load the models, unless that is done."""
        if self.measurer is None:
            self.measurer = self.make(*(model.load() for model in self.models))

    def __call__(self, task: _Task) -> P:
        """Measure a block."""
        assert self.measurer is not None
        (outcome,) = _here(self.measurer, [task], None)
        part: P = outcome.result
        return part


# Memory


class Room:
    """Halve a batch that does not fit into the memory of the device, and later batches of its size.

    It also halves batches of texts that must not be padded together (`MixedLengthsError`), whatever their size. Results
    agree up to rounding: torch may sum a batch of another shape in another order.

    Attributes:
        tokens: The most tokens that are tried at once from now on, if there are several texts; None = any number.
    """

    def __init__(self) -> None:
        self.tokens: int | None = None

    def size(self, batch: Sequence[Any]) -> int:
        """Return how many tokens are measured at once."""
        return padded_size(batch)

    def parts(self, batch: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """Return what is tried in place of a batch that does not fit; nothing if it cannot be less."""
        return halves(batch)

    def each(self, batch: Sequence[Any], do: Callable[[Any], R]) -> Iterator[tuple[Sequence[Any], R]]:
        """Do something with a batch, or with parts of it; yield each part that fitted, and the result.

        Raises:
            AttnscopeError: A single text does not fit.
        """
        n_tokens = self.size(batch)
        parts: Sequence[Sequence[Any]] = ()
        if self.tokens is not None and n_tokens > self.tokens:
            parts = self.parts(batch)
        if not parts:
            try:
                result = _try(do, batch)
            except MixedLengthsError:
                parts = halves(batch)
                if not parts:
                    raise
            else:
                if result is not None:
                    yield batch, result[0]
                    return
                _give_memory_back()
                self.tokens = max(1, n_tokens // 2)
                parts = self.parts(batch)
                if not parts:
                    raise AttnscopeError(
                        f"one text of {n_tokens:,} tokens does not fit into memory",
                        "cut it into chunks (--chunk), choose fewer layers, --dtype bfloat16, or --device cpu",
                    )
        for part in parts:
            yield from self.each(part, do)


def _try(do: Callable[[Any], R], batch: Sequence[Any]) -> tuple[R] | None:
    """Return the result; None if memory ran out."""
    # A function of its own: as long as the exception is there, its frames hold the tensors that filled the memory.
    try:
        return (do(batch),)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    return None


def halves(batch: Sequence[Any]) -> Sequence[Sequence[Any]]:
    """Return the two halves of a batch; nothing of a single text."""
    middle = len(batch) // 2
    return (batch[:middle], batch[middle:]) if middle else ()


def padded_size(batch: Sequence[Sized]) -> int:
    """Return how many tokens a batch has, padding included."""
    return len(batch) * max(map(len, batch), default=0)


def _give_memory_back() -> None:
    """Give back what torch keeps of a device's memory for later."""
    torch = sys.modules["torch"]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
