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
"""What failed, if the study does not name it."""

R = TypeVar("R")


# What a study brings


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
        """Return what was added up over the texts of both; neither is changed."""
        # Fields of one block stay those of this part: nobody reads them any more.
        both = copy(self)
        for name, value in other.lasting_fields().items():
            setattr(both, name, _add(getattr(self, name), value))
        both.halved_to = min(filter(None, (self.halved_to, other.halved_to)), default=None)
        return both

    def lasting_fields(self) -> dict[str, Any]:
        """Return the fields that outlast the block."""
        names = [each.name for each in fields(self) if not each.name.startswith("_")]
        return {name: getattr(self, name) for name in names}


def _add(first: Any, second: Any) -> Any:
    """Return the sum of two values of a field; None adds nothing."""
    if first is None:
        return second
    if second is None:
        return first
    if isinstance(first, Mapping):
        return {**first, **{name: _add(first.get(name), value) for name, value in second.items()}}
    if isinstance(first, int | tuple):
        return first + second
    return first.merge(second)


P = TypeVar("P", bound=Part)


class Measurer(ABC, Generic[P]):
    """Measure blocks for a study. Each worker has a measurer of its own.

    A block has `texts`, in one place; each text has an `index`, a `source` and a `line`.

    Attributes:
        room: How much of a batch fits into memory at once.
        tokenizer: What reads its texts; None = they are no texts, or random tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self.room = Room()
        self.tokenizer = tokenizer

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


# What comes of it


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
        if self.failures:
            about["failures"] = self.failures
        return about

    def corpus(self, texts: Texts, info: ModelInfo) -> dict[str, Any]:
        """Return what a record says of the texts."""
        about = describe_texts(texts)
        return about | {
            "n_texts": self.done.n_texts,
            "n_tokens": self.done.n_tokens,
            "n_chunked": self.done.n_chunked,
            "n_copies": self.n_copies,
            "problems": [*about["problems"], *self.problems(info)],
            "unknown_words": self.done.unknown.note,
            "complete": self.complete,
        }


# The loop


def run(
    measurer: Callable[..., Measurer[P]],
    models: Sequence[Model],
    texts: Texts,
    nothing: P,
    *,
    block: int,
    **how: Any,
) -> Run[P]:
    """Go over a corpus, block by block, as `run_blocks` does. Copies of earlier texts are left out and counted.

    Args:
        measurer: As in `run_blocks`, and so are `models` and `nothing`.
        models: See there.
        texts: The corpus.
        nothing: See there.
        block: The most texts of a block.
        how: `workers`, `report` and `step` of `run_blocks`.
    """
    copies = Copies()

    def share(cut: Any) -> float | None:
        return share_read(texts, cut.texts[-1].index)

    going = run_blocks(
        measurer,
        models,
        blocks(distinct(texts, copies), block),
        nothing,
        share=share,
        **how,
    )
    going.n_copies = copies.n
    return going


def run_blocks(
    measurer: Callable[..., Measurer[P]],
    models: Sequence[Model],
    cut: Iterable[Any],
    nothing: P,
    *,
    workers: Sequence[Workers] | None = None,
    report: Report | None = None,
    step: str = STEP,
    share: Callable[[Any], float | None] = lambda _: None,
) -> Run[P]:
    """Go over blocks, and add up what comes of each in their order.

    If the user ends it, or if something fails after some texts, whole blocks count. Before the first whole block, an
    interruption keeps the texts that are done: they are the longest of the first block, and a note says so.

    Args:
        measurer: Makes the measurer of the models; with workers it is pickled.
        models: The models, as a rule one.
        cut: The blocks.
        nothing: The part of no text.
        workers: How workers load each model; None = this process measures.
        report: Hears how far it is after each batch; with workers after each block.
        step: What is at work, for the record of a failure.
        share: Returns how much of all texts has been read, 0 to 1, when a block was cut; None = unknown.

    Raises:
        AttnscopeError: Something fails before any block is done, or no worker could begin.
    """
    # What comes of the texts, the sums so far, and how much of all texts had been read before each block.
    going = Run(nothing)
    order = _InOrder(nothing)
    shares_read: list[float | None] = [0.0]

    def read_blocks() -> Iterator[Any]:
        for block in cut:
            shares_read.append(share(block))
            yield block

    def tell(number: int, fraction: float, part: P) -> None:
        """Report that a fraction of a block is done, with a part that is not among the sums yet."""
        if report is not None:
            before, after = shares_read[number : number + 2]
            done = None if after is None else (before or 0.0) * (1 - fraction) + after * fraction
            report(Progress(order.n_texts + part.n_texts, order.n_tokens + part.n_tokens, done))

    # Measure the blocks, in this process or by workers, each of which loads the models once.
    try:
        if workers is None:
            outcomes = _measure_here(measurer(*models), read_blocks(), tell)
        else:
            loaders = [each.loader(model) for each, model in zip(workers, models, strict=True)]
            executor = workers[0].executor_on(models[0].info.device)
            outcomes = executor.map_blocks(_InWorker(loaders, measurer), read_blocks())
        # Add up what comes of them. Ctrl-C waits until a part is added as a whole.
        with closing(outcomes):
            for outcome in outcomes:
                with delay_interrupts():
                    order.take(outcome.number, outcome.result)
                if outcome.lost:
                    going.lost.append(_describe_lost(outcome.block, outcome.lost))
                if workers is not None:
                    tell(outcome.number, 1.0, nothing)
    # Keep what was done before an interruption or a failure.
    except KeyboardInterrupt as interruption:
        going.complete = False
        going.notes += interruption.args
    except Exception as error:
        if not order.n_texts:
            raise
        going.error = error
        going.failures.append(failure(step, error))
        going.complete = False
    # Blocks that were done out of their order count as well.
    if order.take_rest() and not going.failures:
        going.notes.append(
            "Interrupted: these are whole blocks of texts, but not the first ones of the corpus."
        )
    going.done = order.done
    if going.done.halved_to is not None:
        going.notes.append("Memory did not suffice for whole batches: they were halved.")
    return going


def _describe_lost(block: Any, why: str) -> dict[str, Any]:
    """Return the problem of a block that was given up."""
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

    def take(self, number: int, part: P | None) -> None:
        """Take the part of a block; None if it was given up."""
        self._waiting[number] = part
        if part is not None:
            self.n_texts += part.n_texts
            self.n_tokens += part.n_tokens
        # Add the parts that no earlier block holds up.
        while self._next in self._waiting:
            self._add(self._next)
            self._next += 1

    def take_rest(self) -> bool:
        """Add the parts that wait for a block which will not come; return whether there are any."""
        rest = sorted(self._waiting)
        for number in rest:
            self._add(number)
        return bool(rest)

    def _add(self, number: int) -> None:
        part = self._waiting.pop(number)
        if part is not None:
            self.done = self.done.merge(part)


# Where blocks are measured


def _measure_here(
    measurer: Measurer[P], cut: Iterable[Any], tell: Callable[[int, float, P], None]
) -> Generator[Outcome, None, None]:
    """Measure blocks in this process, one after the other, and tell how far each is after each batch.

    If it is interrupted before any text of an earlier block counts, the texts of this one that are done are kept.

    Raises:
        KeyboardInterrupt: With a note, if only some texts of a block were kept.
    """
    n_texts = 0
    for number, block in enumerate(cut):
        part = measurer.start(block)
        try:
            for fraction in _add_batches(measurer, block, part):
                tell(number, fraction, part)
        except KeyboardInterrupt:
            # Whole blocks are there, or nothing at all: this one counts nothing.
            if n_texts or not part.n_texts:
                raise
            done = _finish(measurer, block, part)
            yield Outcome(number, block, done)
            # Say so, unless the block was done just before.
            n_all = len(block.texts)
            if done.n_texts + done.left_out.n == n_all:
                raise
            note = "Interrupted in the first block of texts, which begins with the longest"
            raise KeyboardInterrupt(f"{note}: these are {done.n_texts:,} of its {n_all:,}.") from None
        done = _finish(measurer, block, part)
        n_texts += done.n_texts
        yield Outcome(number, block, done)


def _add_batches(measurer: Measurer[P], block: Any, part: P) -> Iterator[float]:
    """Add a block to its part, batch by batch; yield which fraction of its tokens is done."""
    batches = list(measurer.batches(block))
    if measurer.tokenizer is not None:
        items = sorted((item for batch in batches for item in batch), key=lambda item: item.text)
        part.unknown = UnknownWords.of(measurer.tokenizer, [item.tokens for item in items])
    n_tokens = sum(map(padded_size, batches))
    n_done = 0
    for batch in batches:
        # Where memory does not suffice, `some` is a part of the batch.
        for some, result in measurer.room.each(batch, measurer.measure):
            with delay_interrupts():
                measurer.add(part, some, result)
        n_done += padded_size(batch)
        yield n_done / max(1, n_tokens)


def _finish(measurer: Measurer[P], block: Any, part: P) -> P:
    """Return the part of a block, with the texts that were left out, and without what only this block needed."""
    lasting = measurer.finish(part).lasting_fields()
    lasting |= {
        "broken": {},
        "left_out": LeftOut.of(block.texts, part.broken),
        "halved_to": measurer.room.tokens,
    }
    return type(part)(**lasting)


@dataclass(eq=False)
class _InWorker(Generic[P]):
    """Measure blocks in a worker, which loads the models once. It is pickled before that."""

    loaders: Sequence[Callable[[], Model]]
    make: Callable[..., Measurer[P]]
    measurer: Measurer[P] = field(init=False)

    def load(self) -> None:
        """Load the models."""
        self.measurer = self.make(*(load() for load in self.loaders))

    def __call__(self, block: Any) -> P:
        """Measure a block."""
        outcome = next(_measure_here(self.measurer, [block], lambda *_: None))
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

    def each(self, batch: Sequence[Any], do: Callable[[Any], R]) -> Iterator[tuple[Sequence[Any], R]]:
        """Do something with a batch, or with parts of it; yield each part that fitted, and the result.

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
        """Return the result, or None if the batch must be halved."""
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
    """Return how many tokens a batch has, padding included."""
    return len(batch) * max(map(len, batch), default=0)


def _give_memory_back() -> None:
    """Give back what torch keeps of a device's memory for later."""
    torch = sys.modules["torch"]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
