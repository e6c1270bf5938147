"""One pass of a study over all texts, block by block: here or by workers, to the end, an interruption or a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import islice
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

from attnscope.corpus import Block, Copies, CorpusText, Problem, blocks, distinct
from attnscope.errors import amount
from attnscope.models.model import Model
from attnscope.studies.inputs.texts import Progress, Report, Texts, share_read, special_ids
from attnscope.studies.running.late import failure
from attnscope.studies.running.overflow import LeftOut
from attnscope.studies.running.workers import Lost, Workers, WorkersModel, start_workers


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


def measure_block(measurer: Measurer[B, S, D], block: B) -> D:
    """What is found on a whole block."""
    sums = measurer.begin(block)
    for _ in measurer.steps(block, sums):
        pass
    return measurer.finish(block, sums, whole=True)


@dataclass(frozen=True)
class Task(Generic[B]):
    """A block, and where it is among the texts.

    Attributes:
        number: How many blocks of the pass come before it.
        source: Where its first text is from, and on which `line` that is.
        share: How much of all texts had been read when it was made; None = unknown.
    """

    number: int
    block: B
    source: str
    line: int
    n_texts: int
    share: float | None


def tasks_of(texts: Texts, copies: Copies, n: int) -> Iterator[Task[Block]]:
    """The blocks of a corpus, of at most n texts; copies of earlier texts are left out, and counted."""
    for number, block in enumerate(blocks(distinct(texts, copies), n)):
        first = block.texts[0]
        yield Task(number, block, first.source, first.line, len(block.texts), share_read(texts))


@dataclass(frozen=True, eq=False)
class Work:
    """What workers begin with: the models, as they load them, and what makes their measurer; it can be pickled."""

    models: tuple[WorkersModel, ...]
    make: Callable[..., Measurer[Any, Any, Any]]

    def begin(self) -> Callable[[Task[Any]], Any]:
        """Loads the models; what it returns measures a block."""
        measurer = self.make(*(model.load() for model in self.models))
        return lambda task: measure_block(measurer, task.block)


Keeps = Literal["blocks", "first", "texts"]
"""What counts of a block in which a pass ends early: nothing; the texts that were done, if it is the first block and
the user ended it; or always the texts that were done."""


@dataclass
class Pass(Generic[D]):
    """What a pass over texts came to.

    Attributes:
        complete: Whether all texts were gone through.
        lost: Blocks over which workers were lost, as problems of a corpus.
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
        keeps: See `Keeps`; of workers only whole blocks count.
        step: What is at work, for the record of a failure after some blocks; None = a failure is raised.
    """

    make: Callable[..., Measurer[B, Any, D]]
    models: tuple[Model, ...]
    workers: tuple[Workers, ...] | None = None
    keeps: Keeps = "blocks"
    step: str | None = None

    def run_texts(self: Driver[Block, D], texts: Texts, n: int, nothing: D, report: Report | None) -> Pass[D]:
        """As `run`, over the blocks of a corpus, of at most n texts; copies of earlier texts are left out."""
        copies = Copies()
        going = self.run(tasks_of(texts, copies, n), nothing, report)
        going.n_copies = copies.n
        return going

    def run(self, tasks: Iterable[Task[B]], nothing: D, report: Report | None) -> Pass[D]:
        """Goes over the blocks; ends early if the user ends it, or something fails after some texts.

        `report` hears how far it is after each batch; with workers after each block.

        Raises:
            AttnscopeError: Something fails before any text is done, or no worker could begin.
        """
        going = Pass(nothing)
        try:
            if self.workers is None:
                self._measure(tasks, going, report)
            else:
                self._share(self.workers, tasks, going, report)
        except KeyboardInterrupt:
            going.complete = False
        except Exception as error:
            if self.step is None or not going.done.n_texts:
                raise
            going.failures.append(failure(self.step, error))
            going.complete = False
        return going

    def _measure(self, tasks: Iterable[Task[B]], going: Pass[D], report: Report | None) -> None:
        measurer = self.make(*self.models)
        for task in tasks:
            sums = measurer.begin(task.block)
            n_texts, n_tokens = going.done.n_texts, going.done.n_tokens
            try:
                for _ in measurer.steps(task.block, sums):
                    if report is not None:
                        report(Progress(n_texts + sums.n_texts, n_tokens + sums.n_tokens, task.share))
            except BaseException as error:
                # After a first whole block only such count: the first texts of the corpus, and not the longest of some.
                first = isinstance(error, KeyboardInterrupt) and not going.done.n_texts
                if sums.n_texts and (self.keeps == "texts" or (self.keeps == "first" and first)):
                    going.done = going.done.merge(measurer.finish(task.block, sums, whole=False))
                raise
            # In one step: an interruption leaves either the old sums or the new ones.
            going.done = going.done.merge(measurer.finish(task.block, sums, whole=True))

    def _share(
        self, workers: tuple[Workers, ...], tasks: Iterable[Task[B]], going: Pass[D], report: Report | None
    ) -> None:
        """Has workers measure the blocks; adds what comes of each in the order of the texts.

        Sums depend in their last digits on that order: whichever worker is first, the numbers are the same.
        """
        work = Work(tuple(who.model(model) for who, model in zip(workers, self.models, strict=True)), self.make)
        waiting: dict[int, Any] = {}
        last, n_done, n_added, share = -1, 0, 0, 0.0

        def take(number: int) -> None:
            result = waiting.pop(number)
            if result is not None:
                going.done = going.done.merge(result)

        try:
            with (
                workers[0].open(self.models[0].info.device) as executor,
                closing(start_workers(executor, work, tasks)) as outcomes,
            ):
                for outcome in outcomes:
                    task = outcome.task
                    if isinstance(outcome, Lost):
                        n_lost = amount(task.n_texts, "text from here on was", "texts from here on were")
                        reason = f"{n_lost} not studied: {outcome.reason}"
                        going.lost.append(asdict(Problem(task.source, task.line, reason)))
                        waiting[task.number] = None
                    else:
                        waiting[task.number] = outcome.result
                    last, n_done = max(last, task.number), n_done + 1
                    while n_added in waiting:
                        take(n_added)
                        n_added += 1
                    share = max(share, task.share or 0.0)
                    if report is not None:
                        report(Progress(going.done.n_texts, going.done.n_tokens, task.share and share))
        except KeyboardInterrupt:
            if last >= n_done:
                going.notes.append(
                    "Interrupted: these are whole blocks of texts, but not the first ones of the corpus."
                )
            for number in sorted(waiting):
                take(number)
            raise


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
