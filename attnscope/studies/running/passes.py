"""One pass of a study over all texts, block by block, to the end, an interruption or a failure.

An executor says where blocks are measured (`studies.run`). Here a block is measured batch by batch, and what comes of
blocks is added up in the order of the corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import islice
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

from attnscope.corpus import Block, Copies, CorpusText, Problem, blocks, distinct
from attnscope.errors import amount
from attnscope.host import delay_interrupts
from attnscope.models.model import Model
from attnscope.studies.inputs.texts import Progress, Report, Texts, share_read, special_ids
from attnscope.studies.run import Outcome, ThisProcess
from attnscope.studies.running.late import failure
from attnscope.studies.running.overflow import LeftOut
from attnscope.studies.running.workers import Workers, WorkersModel


class Sums(Protocol):
    """What is added up over a block; texts and tokens so far."""

    n_texts: int
    n_tokens: int


class Done(Protocol):
    """What is found on blocks."""

    @property
    def n_texts(self) -> int:
        """Texts in it."""

    @property
    def n_tokens(self) -> int:
        """Their tokens."""

    def merge(self, other: Self) -> Self:
        """What is found on both."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Totals:
    """What is found on some texts. A study adds fields: numbers, tuples, what merges, and maps of these.

    Attributes:
        n_texts: Texts in it.
        n_tokens: Their tokens.
        n_chunked: How many of them came in several chunks.
        halved_to: As `Room.tokens`.
        left_out: Texts on which a model computes NaN or infinity.
    """

    n_texts: int = 0
    n_tokens: int = 0
    n_chunked: int = 0
    halved_to: int | None = None
    left_out: LeftOut = LeftOut()

    def merge(self, other: Self) -> Self:
        """What is found on the texts of both."""
        both = {each.name: _add(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)}
        return replace(self, **both | {"halved_to": merge_halving(self.halved_to, other.halved_to)})


def _add(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, Mapping):
        return {**first, **{name: _add(first.get(name), value) for name, value in second.items()}}
    return first + second if isinstance(first, int | tuple) else first.merge(second)


B = TypeVar("B")
S = TypeVar("S", bound=Sums)
D = TypeVar("D", bound=Done)
B_contra = TypeVar("B_contra", contravariant=True)
D_co = TypeVar("D_co", covariant=True)


class Measurer(Protocol[B_contra, S, D_co]):
    """What is done with each block. A worker has one of its own."""

    def begin(self, block: B_contra) -> S:
        """Sums of nothing yet."""

    def steps(self, block: B_contra, sums: S) -> Iterator[None]:
        """Runs the model on a block batch by batch, and adds to its sums."""

    def finish(self, block: B_contra, sums: S, *, whole: bool) -> D_co:
        """What the sums amount to; not whole where the block was not gone through to its end."""


@dataclass(frozen=True)
class Task(Generic[B]):
    """A block, and where it is among the texts.

    Attributes:
        source: Where its first text is from, and on which `line` that is.
        n_texts: How many texts it has.
        share: How much of all texts had been read when it was made; None = unknown.
    """

    block: B
    source: str
    line: int
    n_texts: int
    share: float | None


def tasks_of(texts: Texts, copies: Copies, n: int) -> Iterator[Task[Block]]:
    """Cut a corpus into blocks of at most n texts; copies of earlier texts are left out, and counted."""
    for block in blocks(distinct(texts, copies), n):
        first = block.texts[0]
        yield Task(block, first.source, first.line, len(block.texts), share_read(texts))


Keeps = Literal["blocks", "first", "texts"]
"""What counts of a block in which a pass ends early: nothing; the texts that were done, if it is the first block and
the user ended it; or always the texts that were done. Of workers only whole blocks count."""


@dataclass
class Pass(Generic[D]):
    """What a pass over texts came to.

    Attributes:
        complete: Whether all texts were gone through.
        lost: Blocks over which workers died, as problems of a corpus.
        failures: What failed after some blocks, as `late.failure` tells it.
        notes: What must be known of an interruption.
        n_copies: How many texts were left out as copies of earlier ones.
    """

    done: D
    complete: bool = True
    lost: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    n_copies: int = 0


@dataclass(frozen=True, eq=False)
class Driver(Generic[B, D]):
    """How a study goes over its texts.

    Attributes:
        make: Makes a measurer of the models; with workers it is pickled.
        workers: Who measures, for each model; None = this process.
        keeps: What counts of a block in which this process stops.
        step: What is at work, for the record of a failure after some blocks; None = a failure is raised.
    """

    make: Callable[..., Measurer[B, Any, D]]
    models: tuple[Model, ...]
    workers: tuple[Workers, ...] | None = None
    keeps: Keeps = "blocks"
    step: str | None = None

    def run_texts(self: Driver[Block, D], texts: Texts, n: int, nothing: D, report: Report | None) -> Pass[D]:
        """Go over the blocks of a corpus, of at most n texts, as `run` does. Copies of earlier texts are left out."""
        copies = Copies()
        going = self.run(tasks_of(texts, copies, n), nothing, report)
        going.n_copies = copies.n
        return going

    def run(self, tasks: Iterable[Task[B]], nothing: D, report: Report | None) -> Pass[D]:
        """Go over the blocks, and add up what comes of each in their order.

        The pass ends early if the user ends it, or if something fails after some texts. `report` hears how far it is
        after each batch; with workers after each block.

        Raises:
            AttnscopeError: Something fails before any text is done, or no worker could begin.
        """
        going = Pass(nothing)
        sums = _InOrder(nothing)
        here: _Here[B, D] | None = None
        try:
            if self.workers is None:
                here = _Here(self.make(*self.models), self.keeps, report)
            for outcome in self._outcomes(here, tasks):
                task = outcome.block
                with delay_interrupts():
                    sums.take(outcome.number, outcome.result)
                if outcome.lost:
                    n_lost = amount(task.n_texts, "text from here on was", "texts from here on were")
                    problem = Problem(task.source, task.line, f"{n_lost} not studied: {outcome.lost}")
                    going.lost.append(asdict(problem))
                if report is not None and here is None:
                    report(Progress(sums.n_texts, sums.n_tokens, task.share))
        except KeyboardInterrupt:
            going.complete = False
        except Exception as error:
            is_worthless = not sums.n_texts and (here is None or here.partial is None)
            if self.step is None or is_worthless:
                raise
            going.failures.append(failure(self.step, error))
            going.complete = False
        if sums.take_rest() and not going.failures:
            going.notes.append("Interrupted: these are whole blocks of texts, but not the first ones of the corpus.")
        if here is not None:
            sums.add(here.partial)
        going.done = sums.done
        return going

    def _outcomes(self, here: _Here[B, D] | None, tasks: Iterable[Task[B]]) -> Iterator[Outcome[Task[B]]]:
        """Measure the blocks in this process, or by workers."""
        if here is not None:
            yield from ThisProcess().map_blocks(here, tasks)
            return
        assert self.workers is not None
        specs = tuple(who.model(model) for who, model in zip(self.workers, self.models, strict=True))
        executor = self.workers[0].executor_on(self.models[0].info.device)
        with closing(executor.map_blocks(_Elsewhere(specs, self.make), tasks)) as outcomes:
            yield from outcomes


class _InOrder(Generic[D]):
    """Add up the results of blocks in the order of the corpus, whichever comes first.

    Attributes:
        done: The sum.
        n_texts: Texts of all results, those that wait for an earlier one included; `n_tokens` likewise.
    """

    def __init__(self, nothing: D) -> None:
        self.done = nothing
        self.n_texts = self.n_tokens = 0
        self._waiting: dict[int, D | None] = {}
        self._next = 0

    def take(self, number: int, result: D | None) -> None:
        """Take the result of a block; None if it was given up."""
        self._waiting[number] = result
        if result is not None:
            self.n_texts += result.n_texts
            self.n_tokens += result.n_tokens
        while self._next in self._waiting:
            self.add(self._waiting.pop(self._next))
            self._next += 1

    def take_rest(self) -> bool:
        """Add the results that wait for a block which will not come; return whether there are any."""
        for number in sorted(self._waiting):
            self.add(self._waiting[number])
        return bool(self._waiting)

    def add(self, result: D | None) -> None:
        """Add what was found on further texts, if anything."""
        if result is not None:
            self.done = self.done.merge(result)


class _Here(Generic[B, D]):
    """Measure blocks in this process.

    Attributes:
        partial: What was found on the block in which this process stopped, where that counts.
    """

    def __init__(self, measurer: Measurer[B, Any, D], keeps: Keeps, report: Report | None) -> None:
        self.partial: D | None = None
        self._measurer, self._keeps, self._report = measurer, keeps, report
        self._n_texts = self._n_tokens = 0

    def load(self) -> None:
        """Do nothing: the models are loaded."""

    def __call__(self, task: Task[B]) -> D:
        """Measure a block batch by batch."""
        sums = self._measurer.begin(task.block)
        try:
            for _ in self._measurer.steps(task.block, sums):
                if self._report is not None:
                    n_texts, n_tokens = self._n_texts + sums.n_texts, self._n_tokens + sums.n_tokens
                    self._report(Progress(n_texts, n_tokens, task.share))
        except BaseException as error:
            # After a first whole block only such count: the first texts of the corpus, and not the shortest of some.
            is_first = isinstance(error, KeyboardInterrupt) and not self._n_texts
            if sums.n_texts and (self._keeps == "texts" or (self._keeps == "first" and is_first)):
                self.partial = self._measurer.finish(task.block, sums, whole=False)
            raise
        result = self._measurer.finish(task.block, sums, whole=True)
        self._n_texts += result.n_texts
        self._n_tokens += result.n_tokens
        return result


@dataclass(eq=False)
class _Elsewhere(Generic[B, D]):
    """Measure blocks in a worker, which loads the models once; it is pickled before that."""

    models: tuple[WorkersModel, ...]
    make: Callable[..., Measurer[B, Any, D]]
    measurer: Measurer[B, Any, D] | None = None

    def load(self) -> None:
        """Load the models, unless that is done."""
        if self.measurer is None:
            self.measurer = self.make(*(model.load() for model in self.models))

    def __call__(self, task: Task[B]) -> D:
        """Measure a block."""
        assert self.measurer is not None
        sums = self.measurer.begin(task.block)
        for _ in self.measurer.steps(task.block, sums):
            pass
        return self.measurer.finish(task.block, sums, whole=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class Reading:
    """A model, and the texts that all passes of a study of it read in the same way.

    `chunk` and `stride` are those of `HeadsOptions`. A block has at most `block` texts. Without workers, this
    process measures.
    """

    model: Model
    texts: Texts
    chunk: int | None
    stride: int | None
    block: int
    workers: Workers | None

    @cached_property
    def special(self) -> frozenset[int]:
        """As `special_ids`."""
        return special_ids(self.model)

    def first(self, n: int) -> list[CorpusText]:
        """The first n texts of the corpus, without copies."""
        return list(islice(distinct(self.texts, Copies()), n))

    def run(
        self,
        make: Callable[..., Measurer[Block, Any, D]],
        nothing: D,
        report: Report | None,
        step: str,
        keeps: Keeps = "texts",
    ) -> Pass[D]:
        """Makes one pass over the texts; arguments as of `Driver`."""
        driver = Driver(make, (self.model,), (self.workers,) if self.workers else None, keeps=keeps, step=step)
        return driver.run_texts(self.texts, self.block, nothing, report)


def merge_halving(*tokens: int | None) -> int | None:
    """To how few tokens batches of several parts were halved for want of memory; None = they were not."""
    return min((n for n in tokens if n is not None), default=None)
