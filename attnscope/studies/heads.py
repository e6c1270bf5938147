"""What is each head for? A model and any amount of text in, measures and roles with their evidence out."""

from __future__ import annotations

import hashlib
import math
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.corpus import (
    BLOCK,
    BLOCK_CHARACTERS,
    TOKEN_BUDGET,
    Block,
    Chunk,
    Copies,
    Corpus,
    CorpusText,
    TokenCounts,
    block_batches,
    blocks,
    chunks,
    count_tokens,
    distinct,
    read_frequencies,
)
from attnscope.errors import AttnscopeError
from attnscope.models.model import Batch, Model, example_tokens
from attnscope.records import Tokens
from attnscope.records.findings import Findings
from attnscope.studies.block_sums import BlockSums, Hits, undisturbed
from attnscope.studies.late import failure
from attnscope.studies.memory import Room, give_memory_back, halves, halving_note, padded_size, sparing
from attnscope.studies.merging import concluded, sums_of
from attnscope.studies.overflow import LeftOut
from attnscope.studies.provenance import run_of
from attnscope.studies.roles import FEWEST_TEXTS, LEAST_ACTIVE, LEAST_TEXTS, LEVEL, MARGIN, RULES, thresholds_from
from attnscope.studies.tally import OFFSETS, PAIR_MEASURES, Tally, pair_hits
from attnscope.studies.texts import (
    Progress,
    Report,
    Texts,
    padded,
    problems_of,
    scaled,
    sha256_of,
    share_read,
    special_ids,
    texts_of,
)
from attnscope.studies.workers import Lost, Workers, WorkersModel, carried_out, lost

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.measures import SumsOf, TextFacts


@dataclass(frozen=True)
class HeadsOptions:
    """How heads are studied.

    Attributes:
        thresholds: What a role's measure must reach, by role; roles that are not named keep theirs.
        chunk: Texts over the model's limit are cut into chunks of at most so many tokens; None = the limit.
        stride: How many tokens further the next chunk begins; None = no token comes twice. Those that do count as
            queries in the first of their chunks alone; special tokens count in each.
        shard: (k, n): only the k-th of n shards of the corpus.
        frequencies: A file of word or token counts; None = counted in the corpus itself.
        control: Whether the same architecture with random weights is studied beside.
        seed: Of the random weights.
    """

    thresholds: Mapping[str, float] = field(default_factory=dict)
    chunk: int | None = None
    stride: int | None = None
    shard: tuple[int, int] = (1, 1)
    frequencies: Path | None = None
    control: bool = False
    seed: int = 0


def heads(
    model: Model,
    corpus: Corpus | str | Sequence[str] | Sequence[CorpusText],
    options: HeadsOptions | None = None,
    report: Report | None = None,
    workers: Workers | None = None,
) -> Findings:
    """Measures every head of a model on a corpus, and says what each is for.

        model = attnscope.load("minilm")
        found = attnscope.heads(model, attnscope.Corpus(["corpus/*.txt"], split="paragraph"))
        found.heads[2].name, found.heads[2].roles  # L0H2: previous_token, with its value, interval and q
        found.grid("encoder", "entropy_nats")      # (layer, head)
        found.save("heads.npz")

    Memory does not grow with the corpus, nor (but for models that only have dense weights) with the square of a text's
    length. A text that is a copy of an earlier one (`corpus.Copies`) is no further evidence: it is left out, and
    `corpus["n_copies"]` says how many were. An interruption (KeyboardInterrupt) ends the study: what was found up to
    the last whole block of texts (of the first one, in all texts that were done) is returned, and said to be
    incomplete. Likewise where something fails after a block: `run["failures"]` says what.

    In an encoder-decoder the decoder is given the same text that the encoder reads, as if it were to write it again
    (its start token first, each next token whatever it would have written). Its own heads, and those across, are listed
    by kind; what asks for places in one text is undefined across.

    Sums over texts are exact, so that shards merge into what one run would give, bit for bit; each text's own sums are
    rounded by torch, which rounds otherwise with another number of threads.

    With `workers`, whole blocks are studied by them, and the result is that of one process with as many threads. After
    an interruption all blocks that were done count. A block over which three workers were lost is listed in
    `corpus["problems"]`, and all others are in the result.

    Args:
        model: A loaded model, see `attnscope.load`.
        corpus: What to run it on: a Corpus, or a list of texts.
        options: How.
        report: Called after each batch; with workers after each block.
        workers: Who studies the blocks; None = this process. They load the model by its name.

    Raises:
        AttnscopeError: There is no text, the model cannot be measured, or no worker can begin.
    """
    options = options or HeadsOptions()
    texts = texts_of(corpus)
    _require_measurable(model, options)
    special = special_ids(model)
    counts, n_copies = _counts(model, texts, options, special)
    frequencies = _Frequencies.of_counts(counts)
    # Of the reading that is known to have come to the end.
    sha256, problems = ("", []) if options.frequencies is not None else (sha256_of(texts), problems_of(texts))
    study = _Study(model, frequencies, options, special)
    beside = None
    if options.control:
        beside = _Study(model.untrained(options.seed), frequencies, options, special, trained=model)
    complete = study.run(texts, scaled(report, 0, 2 if beside else 1), workers)
    if beside is not None and complete:
        complete = beside.run(texts, scaled(report, 1, 2), workers)
    done = study.done
    missing = [*study.missing, *(beside.missing if beside else ())]
    if options.shard == (1, 1):
        done.left_out.require_some_left(done.n_texts, model.info)
    if complete and not done.n_tokens and not missing and options.shard == (1, 1):
        raise AttnscopeError("no text is left: none has any token", "give texts with words in them")
    described = {
        "sources": list(texts.sources) if isinstance(texts, Corpus) else ["texts"],
        "n_texts": done.n_texts,
        "n_tokens": done.n_tokens,
        "n_chunked": done.n_chunked,
        "n_copies": study.n_copies if n_copies is None else n_copies,
        "sha256": sha256 or sha256_of(texts),
        "shards": ["{}/{}".format(*options.shard)],
        "problems": [*(problems or problems_of(texts)), *missing],
        "complete": complete,
    }
    run = run_of(model.info, [*_notes(model, done, options), *study.unprojected(), *study.notes])
    threads = workers.threads if workers else _n_threads()
    run |= {"seed": options.seed if options.control else None, "threads": threads}
    if failures := [*study.failures, *(beside.failures if beside else ())]:
        run["failures"] = failures
    return concluded(
        run, described, _described(options, frequencies), sums_of(done.tallies, beside.done.tallies if beside else {})
    )


def _require_measurable(model: Model, options: HeadsOptions) -> None:
    """Raises an AttnscopeError before anything is read where nothing could come of it."""
    # Chunks that do not fit the model are refused here.
    chunks(example_tokens(model.tokenizer), limit=model.info.max_tokens, chunk=options.chunk, stride=options.stride)


def _notes(model: Model, done: _Done, options: HeadsOptions) -> list[str]:
    notes = []
    if len(model.info.kinds) > 1:
        notes.append("The decoder was given the text that the encoder read, as if it were to write it again.")
    if model.info.path == "eager":
        notes.append(
            "Measured on the model's own dense weights: memory grows with the square of a text's length, and what "
            "needs the values (value_weighted, norm_weighted) is undefined."
        )
    if done.longest_of is not None:
        notes.append(
            f"Interrupted in the first block of texts, which begins with the longest: these are {done.n_texts:,} of "
            f"its {done.longest_of:,}."
        )
    if done.halved_to is not None:
        notes.append(halving_note(done.halved_to))
    if not done.n_texts and options.shard != (1, 1):
        notes.append(f"This shard holds no text: the corpus has fewer blocks of up to {BLOCK} texts than shards.")
    return notes


def _described(options: HeadsOptions, frequencies: _Frequencies) -> dict[str, Any]:
    """What was chosen, and what names mean: all that shards of one run have in common."""
    from attnscope.core.measures import MEASURES

    thresholds = thresholds_from([]) | dict(options.thresholds)
    return {
        "level": LEVEL,
        "fewest_texts": FEWEST_TEXTS,
        "least_texts": LEAST_TEXTS,
        "least_active": LEAST_ACTIVE,
        "margin": MARGIN,
        "chunk": options.chunk,
        "stride": options.stride,
        "block": BLOCK,
        "block_characters": BLOCK_CHARACTERS,
        "frequencies": {
            "source": "corpus" if options.frequencies is None else Path(options.frequencies).name,
            "sha256": frequencies.sha256,
        },
        "control": f"untrained, seed {options.seed}" if options.control else None,
        "roles": {
            name: {"what": rule.what, "measure": rule.measures[0], "threshold": thresholds[name]}
            for name, rule in RULES.items()
        },
        "measures": {
            name: {
                "what": measure.what,
                "unit": measure.unit,
                "range": [_finite(measure.low), _finite(measure.high)],
            }
            for name, measure in MEASURES.items()
        },
    }


@dataclass(frozen=True)
class _Done:
    """What a study has added up. Replaced as a whole, so that an interruption finds it whole.

    Of whole blocks only; but where the first was interrupted, `longest_of` is how many texts that has.
    `halved_to` is as `Room.tokens`.
    """

    tallies: Mapping[str, Tally] = field(default_factory=dict)
    n_texts: int = 0
    n_tokens: int = 0
    n_chunked: int = 0
    longest_of: int | None = None
    halved_to: int | None = None
    left_out: LeftOut = LeftOut()

    def and_of(self, other: _Done) -> _Done:
        """What both have added up."""
        known = self.tallies
        return _Done(
            {kind: known[kind].merge(tally) if kind in known else tally for kind, tally in other.tallies.items()}
            or known,
            self.n_texts + other.n_texts,
            self.n_tokens + other.n_tokens,
            self.n_chunked + other.n_chunked,
            halved_to=min((n for n in (self.halved_to, other.halved_to) if n is not None), default=None),
            left_out=self.left_out.and_of(other.left_out),
        )


def _done_of(sums: BlockSums, block: Block, room: Room) -> _Done:
    left_out = LeftOut.of(block.texts, sums.broken)
    n_tokens = sums.n_tokens if sums.n_texts else 0
    return _Done(sums.finish(), sums.n_texts, n_tokens, sums.n_chunked, halved_to=room.tokens, left_out=left_out)


@dataclass(frozen=True, eq=False)
class _Work:
    """What workers begin with: all that a study of a block depends on."""

    model: WorkersModel
    frequencies: _Frequencies
    options: HeadsOptions
    special: frozenset[int]
    untrained: bool

    def begin(self) -> Callable[[tuple[Block, object]], _Done]:
        """Loads the model; what it returns adds up a block."""
        model = self.model.load()
        if self.untrained:
            model = model.untrained(self.options.seed)
        study = _Study(model, self.frequencies, self.options, self.special)
        return lambda task: _done_of(study.sums_of(task[0]), task[0], study.room)


class _Study:
    """One model on one corpus, block by block."""

    def __init__(
        self,
        model: Model,
        frequencies: _Frequencies,
        options: HeadsOptions,
        special: frozenset[int],
        trained: Model | None = None,
    ) -> None:
        from attnscope.core.tiles import Buffers
        from attnscope.models.residual import HiddenNorms

        self.model, self.options = model, options
        self.done = _Done()
        self.room = Room()
        self.lost: list[dict[str, Any]] = []
        self._copies: Copies | None = None
        self.notes: tuple[str, ...] = ()
        self.failures: list[dict[str, str]] = []
        self._frequencies, self._special, self._trained = frequencies, special, trained
        self._dense = model.info.path == "eager"
        self._start = _start(model)
        self._factors = None if self._dense else _factors(model)
        self._norms = HiddenNorms(model.blocks())
        self._buffers = Buffers()

    def unprojected(self) -> list[str]:
        """What is to be said where norm_weighted is undefined, as W_O is not known; `_notes` tells of dense weights."""
        missing = [
            f"{kind} layer {layer}"
            for kind, tally in self.done.tallies.items()
            for layer in tally.layers
            if self._factors is not None and (kind, layer) not in self._factors
        ]
        if not missing:
            return []
        which = missing[0] if len(missing) == 1 else f"{len(missing)} layers, the first of them {missing[0]}"
        return [
            f"norm_weighted is undefined in {which}: the output projection is not known (what the heads put out is "
            "changed before it, or its weights are quantised, adapted, or not in memory)."
        ]

    def run(self, texts: Texts, report: Report | None, workers: Workers | None) -> bool:
        """Goes through a corpus; False if it was interrupted."""
        try:
            if workers is not None:
                self._run_shared(texts, report, workers)
                return True
            for block in self._blocks(texts):
                self._add_block(block, texts, report)
        except KeyboardInterrupt:
            return False
        except Exception as error:
            if not self.done.n_texts:
                raise
            self.failures.append(failure("the study of a later text", error))
            return False
        return True

    @property
    def n_copies(self) -> int:
        """How many texts of the whole corpus were left out, whatever the shard."""
        return self._copies.n if self._copies else 0

    def _blocks(self, texts: Texts) -> Iterator[Block]:
        self._copies = Copies()
        return blocks(distinct(texts, self._copies), BLOCK, shard=self.options.shard)

    def _run_shared(self, texts: Texts, report: Report | None, workers: Workers) -> None:
        """Has workers study the blocks; takes what comes of each as it comes, as sums are the same in any order."""
        named = workers.model(self._trained or self.model)
        work = _Work(named, self._frequencies, self.options, self._special, self._trained is not None)
        tasks = ((block, share_read(texts)) for block in self._blocks(texts))
        last, n_done = -1, 0
        shares = [0.0]
        try:
            with (
                workers.open(self.model.info.device) as executor,
                closing(carried_out(executor, work, tasks)) as outcomes,
            ):
                for outcome in outcomes:
                    block, share = outcome.task
                    if isinstance(outcome, Lost):
                        self.lost.append(lost(block.texts[0], len(block.texts), outcome.reason))
                    else:
                        self.done = self.done.and_of(outcome.result)
                    last, n_done = max(last, block.index), n_done + 1
                    if share is not None:
                        shares.append(share)
                    if report is not None:
                        report(Progress(self.done.n_texts, self.done.n_tokens, share and max(shares)))
        except KeyboardInterrupt:
            if last // self.options.shard[1] >= n_done:
                self.notes = ("Interrupted: these are whole blocks of texts, but not the first ones of the corpus.",)
            raise

    def _add_block(self, block: Block, texts: Texts, report: Report | None) -> None:
        sums = BlockSums()
        try:
            for _ in self._steps(block, sums):
                if report is not None:
                    done = self.done
                    report(Progress(done.n_texts + sums.n_texts, done.n_tokens + sums.n_tokens, share_read(texts)))
        except KeyboardInterrupt:
            # After a first whole block only such count: the first texts of the corpus, and not the longest of some.
            if not self.done.n_texts and sums.n_texts:
                self._take(sums, block)
                if sums.n_texts + len(sums.broken) < len(block.texts):
                    self.done = replace(self.done, longest_of=len(block.texts))
            raise
        self._take(sums, block)

    def sums_of(self, block: Block) -> BlockSums:
        """The sums over a block."""
        sums = BlockSums()
        for _ in self._steps(block, sums):
            pass
        return sums

    def _steps(self, block: Block, sums: BlockSums) -> Iterator[None]:
        """Adds a block to sums, batch by batch."""
        batches: Sequence[Sequence[Chunk]] = block_batches(
            block,
            self.model.tokenizer.encode,
            limit=self.model.info.max_tokens,
            chunk=self.options.chunk,
            stride=self.options.stride,
            budget=TOKEN_BUDGET,
            special_ids=self._special,
        )
        for batch in reversed(batches):  # the longest first: what shorter ones need fits into what those have freed
            for some, found in self.room.each(batch, self._observed, halves, padded_size):
                hits = [self._pair_hits(part) for part in some]
                with undisturbed():
                    sums.add(some, found, hits)
                give_memory_back()
                yield

    def _take(self, sums: BlockSums, block: Block) -> None:
        """Adds a block, in one step: an interruption leaves either the old sums or the new ones."""
        self.done = self.done.and_of(_done_of(sums, block, self.room))

    @property
    def missing(self) -> list[dict[str, Any]]:
        """Texts that are not in it: those that workers were lost over, and those on which the model overflows."""
        return [*self.lost, *self.done.left_out.problems(self.model.info)]

    def _observed(self, batch: Sequence[Chunk]) -> Mapping[str, Mapping[int, SumsOf]]:
        """The measures of a batch: kind -> layer -> sums, in the order of the batch."""
        import torch

        from attnscope.core.measures import measures_of_weights
        from attnscope.core.probes import Weights
        from attnscope.core.sums import Sums

        tokens = [part.tokens for part in batch]
        device = self.model.info.device
        repeated = [part.repeated for part in batch]
        facts = self._facts(tokens, repeated, "cpu" if self._dense else device)
        written, targets = None, [self._target(t) for t in tokens if self._start is not None]
        if targets:
            written = self._facts(targets, [_after_start(r) for r in repeated], "cpu" if self._dense else device)
        segments = torch.from_numpy(padded([t.segments.astype(np.int64) for t in tokens]))
        mask = None if bool(facts.real.all()) else facts.real.to(device)
        given = Batch(facts.ids.to(device), mask, segments.to(device))
        if written is not None:
            given = replace(given, target_ids=written.ids.to(device), target_mask=written.real.to(device))
        with torch.no_grad():  # not inference_mode: its tensors do not tell when they change, which Sums asks
            if not self._dense:
                probe = Sums(facts, query_facts=written, output_projections=self._factors, buffers=self._buffers,
                             norms=self._norms.of, in_units=True)  # fmt: skip
                with self._norms.watch():
                    self.model.run(given, sparing(probe, facts.real.shape[1]))
                return {str(kind): by_layer for kind, by_layer in probe.sums.items()}
            kept = Weights()
            self.model.run(given, kept)
            read = facts if written is None else written
            texts = {"encoder": (facts, None), "decoder": (read, None), "cross": (facts, read)}
            return {
                str(kind): {
                    layer: measures_of_weights(weights, *texts[kind], in_units=True)
                    for layer, weights in by_layer.items()
                }
                for kind, by_layer in kept.maps.items()
            }

    def _target(self, tokens: Tokens) -> Tokens:
        """What a decoder beside an encoder reads as it writes the text again: its start token, then all but the end."""
        assert self._start is not None
        return replace(
            tokens,
            ids=np.concatenate([self._start.ids[:1], tokens.ids[:-1]]),
            labels=(*self._start.labels[:1], *tokens.labels[:-1]),
            special=np.concatenate([self._start.special[:1], tokens.special[:-1]]),
        )

    def _pair_hits(self, part: Chunk) -> Mapping[str, Hits]:
        """The hits of `pair_hits` for each kind of attention; across two texts no offset means anything."""
        kinds = self.model.info.kinds
        read = {"encoder": (part.tokens, part.repeated), "decoder": (part.tokens, part.repeated)}
        if self._start is not None:
            read["decoder"] = self._target(part.tokens), _after_start(part.repeated)
        hits = {
            kind: pair_hits(read[kind][0].ids, causal=kind == "decoder", context=read[kind][1])
            for kind in kinds
            if kind != "cross"
        }
        nothing = np.zeros((len(PAIR_MEASURES), len(OFFSETS)))
        return hits | {kind: (nothing, nothing) for kind in kinds if kind == "cross"}

    def _facts(self, tokens: Sequence[Tokens], repeated: Sequence[NDArray[np.bool_]], device: str) -> TextFacts:
        import torch

        from attnscope.core.measures import TextFacts
        from attnscope.core.precision import move

        lengths = np.array([len(t) for t in tokens])
        real = np.arange(lengths.max()) < lengths[:, None]
        ids = padded([t.ids for t in tokens])
        special = padded([t.special for t in tokens])
        opening = special & (np.cumsum(~special, axis=1) == 0)
        # Special tokens are in every text, and not rare at all.
        frequency = np.where(special, 0.0, self._frequencies.of(ids))
        # The first token is left out too: where there is no [CLS], heads rest on it, however rare it is.
        ordinary = np.where(real & ~special & (np.arange(ids.shape[1]) > 0), frequency, np.inf)
        rarest = np.isfinite(ordinary) & (ordinary == ordinary.min(1, keepdims=True))

        def tensor(array: NDArray[Any]) -> Tensor:
            return move(torch.from_numpy(array), device)

        found = self.model.static_embeddings(tensor(ids).to(self.model.info.device)).float().to(device)
        embeddings = found / found.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        return TextFacts(
            real=tensor(real),
            special=tensor(special),
            ids=tensor(ids),
            cls=tensor(opening),
            sep=tensor(special & ~opening),
            punctuation=tensor(padded([_punctuation(t) for t in tokens])),
            log_frequency=tensor(frequency),
            embeddings=embeddings,
            rarest=tensor(rarest),
            context=tensor(padded(repeated)) if any(map(np.any, repeated)) else None,
        )


def _punctuation(tokens: Tokens) -> NDArray[np.bool_]:
    """Which tokens are punctuation and nothing else."""
    bare = [label.removeprefix("##").replace("·", "") for label in tokens.labels]
    marks = [bool(label) and all(unicodedata.category(c)[0] in "PS" for c in label) for label in bare]
    return np.array(marks, np.bool_) & ~tokens.special


def _after_start(repeated: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which tokens of a target are repeated: its start token stands before them, and the last one is not in it."""
    return np.concatenate([[False], repeated[:-1]])


def _start(model: Model) -> Tokens | None:
    """Tokens that begin with the one that a decoder beside an encoder starts with; None for other models."""
    if len(model.info.kinds) == 1 or model.writer is None:
        return None
    return model.writer.encode_target("a")


def _factors(model: Model) -> dict[tuple[Any, int], Tensor]:
    """What the measures need of the output projections, worked out once for all batches."""
    from attnscope.core.measures import output_factor

    n_heads = dict(zip(model.info.kinds, model.info.n_heads, strict=True))
    return {place: output_factor(weight, n_heads[place[0]]) for place, weight in model.output_projections().items()}


@dataclass(frozen=True, eq=False)
class _Frequencies:
    """The log frequency of each token, and of one that was never counted."""

    table: NDArray[np.float64]
    unseen: float
    sha256: str

    @classmethod
    def of_counts(cls, counts: TokenCounts) -> _Frequencies:
        numbers = counts.counts
        # Of the vocabulary only the part up to the largest number that was seen is known here.
        n_known = max(1, len(numbers))
        digest = hashlib.sha256(numbers.astype("<i8").tobytes()).hexdigest()
        return cls(counts.log_frequency(n_known), -math.log(counts.total + n_known), digest)

    def of(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        known = ids < len(self.table)
        return np.where(known, self.table[np.where(known, ids, 0)], self.unseen)


def _counts(
    model: Model, texts: Texts, options: HeadsOptions, special: frozenset[int]
) -> tuple[TokenCounts, int | None]:
    """How often each token comes: in the whole corpus whatever the shard, without copies, or by a file.

    And how many texts were copies; None where the corpus was not read for it.
    """
    encode = model.tokenizer.encode
    if options.frequencies is not None:
        return read_frequencies(options.frequencies, encode), None
    copies = Copies()
    counts = count_tokens(distinct(texts, copies), encode, special)
    return counts, copies.n


def _n_threads() -> int:
    import torch

    return torch.get_num_threads()


def _finite(bound: float) -> float | None:
    return bound if math.isfinite(bound) else None
