"""What is each head for? A model and any amount of text in, measures and roles with their evidence out."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.corpus import (
    BLOCK,
    TOKEN_BUDGET,
    Block,
    Chunk,
    Corpus,
    CorpusText,
    TokenCounts,
    block_batches,
    blocks,
    chunks,
    count_tokens,
    read_frequencies,
)
from attnscope.errors import AttnscopeError
from attnscope.models.model import Batch, Embeds, Model, Projects, Trained
from attnscope.records import Tokens
from attnscope.records.findings import Findings
from attnscope.studies.heatmap import run_of
from attnscope.studies.merging import concluded, sums_of
from attnscope.studies.roles import FEWEST_TEXTS, LEAST_ACTIVE, LEVEL, MARGIN, RULES, thresholds_from
from attnscope.studies.tally import Tally, pair_hits
from attnscope.studies.texts import (
    Progress,
    Report,
    padded,
    problems_of,
    scaled,
    sha256_of,
    share_read,
    special_ids,
    texts_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention import AttentionCall, Probe
    from attnscope.core.measures import SumsOf, TextFacts

LONG = 128
"""Tokens of a text from which on memory is given back after each layer, not only after each batch."""

DENSE_BUDGET = 1024
"""Tokens in a batch, padding included, for models that only have dense weights: those of all layers are held."""


@dataclass(frozen=True)
class HeadsOptions:
    """How heads are studied.

    Attributes:
        thresholds: What a role's measure must reach, by role; roles that are not named keep theirs.
        chunk: Texts over the model's limit are cut into chunks of at most so many tokens; None = the limit.
        stride: How many tokens further the next chunk begins; None = no token comes twice.
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
) -> Findings:
    """Measures every head of a model on a corpus, and says what each is for.

        model = attnscope.load("minilm")
        found = attnscope.heads(model, attnscope.Corpus(["corpus/*.txt"], split="paragraph"))
        found.heads[2].name, found.heads[2].roles  # L0H2: previous_token, with its value, interval and q
        found.grid("encoder", "entropy_nats")      # (layer, head)
        found.save("heads.npz")

    Memory does not grow with the corpus, nor (but for models that only have dense weights) with the square of a text's
    length. An interruption (KeyboardInterrupt) ends the study: what was found up to the last whole block of texts is
    returned, and said to be incomplete.

    Sums over texts are exact, so that shards merge into what one run would give, bit for bit; each text's own sums are
    rounded by torch, which rounds otherwise with another number of threads.

    Args:
        model: A loaded model, see `attnscope.load`.
        corpus: What to run it on: a Corpus, or a list of texts.
        options: How.
        report: Called after each batch.

    Raises:
        AttnscopeError: There is no text, or the model cannot be measured.
    """
    options = options or HeadsOptions()
    texts = texts_of(corpus)
    _require_measurable(model, options)
    special = special_ids(model)
    counts = _counts(model, texts, options, special)
    frequencies = _Frequencies.of_counts(counts)
    # Of the reading that is known to have come to the end.
    sha256, problems = ("", []) if options.frequencies is not None else (sha256_of(texts), problems_of(texts))
    study = _Study(model, frequencies, options, special)
    beside = _Study(_untrained(model, options.seed), frequencies, options, special) if options.control else None
    complete = study.run(texts, scaled(report, 0, 2 if beside else 1))
    if beside is not None and complete:
        complete = beside.run(texts, scaled(report, 1, 2))
    done = study.done
    if complete and not done.n_tokens and options.shard == (1, 1):
        raise AttnscopeError("no text is left: none has any token", "give texts with words in them")
    described = {
        "sources": list(texts.sources) if isinstance(texts, Corpus) else ["texts"],
        "n_texts": done.n_texts,
        "n_tokens": done.n_tokens,
        "n_chunked": done.n_chunked,
        "sha256": sha256 or sha256_of(texts),
        "shards": ["{}/{}".format(*options.shard)],
        "problems": problems or problems_of(texts),
        "complete": complete,
    }
    run = run_of(model.info, _notes(model, done, options))
    run |= {"seed": options.seed if options.control else None, "threads": _n_threads()}
    return concluded(
        run, described, _described(options, frequencies), sums_of(done.tallies, beside.done.tallies if beside else {})
    )


def _require_measurable(model: Model, options: HeadsOptions) -> None:
    """Raises an AttnscopeError before anything is read where nothing could come of it."""
    if len(model.info.kinds) > 1:
        raise AttnscopeError(
            f"{model.info.name} has an encoder and a decoder; heads are studied in models that have one of them",
            "look at single texts with: attnscope heatmap",
        )
    # Chunks that do not fit the model are refused here.
    chunks(model.tokenizer.encode("a"), limit=model.info.max_tokens, chunk=options.chunk, stride=options.stride)


def _notes(model: Model, done: _Done, options: HeadsOptions) -> list[str]:
    notes = []
    if model.info.road == "eager":
        notes.append(
            "Measured on the model's own dense weights: memory grows with the square of a text's length, and what "
            "needs the values (value_weighted, norm_weighted) is undefined."
        )
    if not done.n_texts and options.shard != (1, 1):
        notes.append(f"This shard holds no text: the corpus has fewer blocks of {BLOCK} texts than shards.")
    return notes


def _described(options: HeadsOptions, frequencies: _Frequencies) -> dict[str, Any]:
    """What was chosen, and what names mean: all that shards of one run have in common."""
    from attnscope.core.measures import MEASURES

    thresholds = thresholds_from([]) | dict(options.thresholds)
    return {
        "level": LEVEL,
        "fewest_texts": FEWEST_TEXTS,
        "least_active": LEAST_ACTIVE,
        "margin": MARGIN,
        "chunk": options.chunk,
        "stride": options.stride,
        "block": BLOCK,
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
    """What a study has added up: whole blocks only. Replaced as a whole, so that an interruption finds it whole."""

    tallies: Mapping[str, Tally] = field(default_factory=dict)
    n_texts: int = 0
    n_tokens: int = 0
    n_chunked: int = 0


class _Study:
    """One model on one corpus, block by block."""

    def __init__(self, model: Model, frequencies: _Frequencies, options: HeadsOptions, special: frozenset[int]) -> None:
        self.model, self.options = model, options
        self.done = _Done()
        self._frequencies, self._special = frequencies, special
        self._dense = model.info.road == "eager"
        self._factors = None if self._dense else _factors(model)

    def run(self, texts: Corpus | Sequence[CorpusText], report: Report | None) -> bool:
        """Goes through a corpus; False if it was interrupted."""
        try:
            for block in blocks(texts, BLOCK, shard=self.options.shard):
                self._add_block(block, texts, report)
        except KeyboardInterrupt:
            return False
        return True

    def _add_block(self, block: Block, texts: Corpus | Sequence[CorpusText], report: Report | None) -> None:
        held: dict[str, _BlockSums] = {}
        pairs: dict[int, list[tuple[NDArray[np.float64], ...]]] = {}
        n_tokens = 0
        batches = block_batches(
            block,
            self.model.tokenizer.encode,
            limit=self.model.info.max_tokens,
            chunk=self.options.chunk,
            stride=self.options.stride,
            budget=DENSE_BUDGET if self._dense else TOKEN_BUDGET,
            special_ids=self._special,
        )
        for batch in reversed(batches):  # the longest first: what shorter ones need fits into what those have freed
            for kind, sums in self._observed(batch).items():
                if kind not in held:
                    held[kind] = _BlockSums(kind, sums)
                held[kind].add(batch, sums)
            for part in batch:
                n_tokens += len(part)
                hits = pair_hits(part.tokens.ids, causal=self.model.info.kinds == ("decoder",))
                pairs.setdefault(part.text, []).append(hits)
            _give_memory_back()
            if report is not None:
                report(Progress(self.done.n_texts + len(pairs), self.done.n_tokens + n_tokens, share_read(texts)))
        found = {kind: sums.finish(list(pairs.values())) for kind, sums in held.items()}
        known = self.done.tallies
        # Whole blocks alone count, and only in one step: an interruption leaves either the old sums or the new ones.
        self.done = _Done(
            {kind: known[kind].merge(tally) if kind in known else tally for kind, tally in found.items()} or known,
            self.done.n_texts + len(pairs),
            self.done.n_tokens + n_tokens,
            self.done.n_chunked + sum(len(parts) > 1 for parts in pairs.values()),
        )

    def _observed(self, batch: Sequence[Chunk]) -> Mapping[str, Mapping[int, SumsOf]]:
        """The measures of a batch: kind -> layer -> sums, in the order of the batch."""
        import torch

        from attnscope.core.measures import measures_of_weights
        from attnscope.core.probes import Weights
        from attnscope.core.sums import Sums

        tokens = [part.tokens for part in batch]
        device = self.model.info.device
        facts = self._facts(tokens, "cpu" if self._dense else device)
        segments = torch.from_numpy(padded([t.segments.astype(np.int64) for t in tokens]))
        mask = None if bool(facts.real.all()) else facts.real.to(device)
        given = Batch(facts.ids.to(device), mask, segments.to(device))
        with torch.no_grad():  # not inference_mode: its tensors do not tell when they change, which Sums asks
            if not self._dense:
                probe = Sums(facts, output_projections=self._factors)
                self.model.run(given, probe if facts.real.shape[1] < LONG else _sparing(probe))
                return {str(kind): by_layer for kind, by_layer in probe.sums.items()}
            kept = Weights()
            self.model.run(given, kept)
            return {
                str(kind): {layer: measures_of_weights(weights, facts) for layer, weights in by_layer.items()}
                for kind, by_layer in kept.maps.items()
            }

    def _facts(self, tokens: Sequence[Tokens], device: str) -> TextFacts:
        import torch

        from attnscope.core.measures import TextFacts

        lengths = np.array([len(t) for t in tokens])
        real = np.arange(lengths.max()) < lengths[:, None]
        ids = padded([t.ids for t in tokens])
        special = padded([t.special for t in tokens])
        opening = special & (np.cumsum(~special, axis=1) == 0)
        # Special tokens are in every text, and not rare at all.
        frequency = np.where(special, 0.0, self._frequencies.of(ids))
        ordinary = np.where(real & ~special, frequency, np.inf)
        rarest = np.where(np.isfinite(ordinary).any(1), ordinary.argmin(1), -1)

        def tensor(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).to(device)

        embeddings = None
        if isinstance(self.model, Embeds):
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
        )


class _BlockSums:
    """The sums over the texts of one block. Holds texts apart only as long as chunks of theirs are to come."""

    def __init__(self, kind: str, by_layer: Mapping[int, SumsOf]) -> None:
        n_heads = max(sums.sum.shape[2] for sums in by_layer.values())
        self._tally = Tally.empty(kind, sorted(by_layer), n_heads, next(iter(by_layer.values())).names)
        self._open: dict[int, dict[str, NDArray[np.float64]]] = {}

    def add(self, batch: Sequence[Chunk], by_layer: Mapping[int, SumsOf]) -> None:
        """Adds a batch; chunks of a text are added up, in the order in which they come."""
        found = {part: self._stacked(part, by_layer) for part in _SUMS}
        whole = [row for row, part in enumerate(batch) if part.n_chunks == 1]
        if whole:
            self._add_texts({part: values[whole] for part, values in found.items()})
        for row, part in enumerate(batch):
            if part.n_chunks > 1:
                mine = {name: values[row : row + 1] for name, values in found.items()}
                known = self._open.get(part.text)
                self._open[part.text] = {n: v if known is None else known[n] + v for n, v in mine.items()}

    def finish(self, pairs: Sequence[Sequence[tuple[NDArray[np.float64], ...]]]) -> Tally:
        """The sums over all texts; of each text the hits of `pair_hits`, chunk by chunk."""
        for text in self._open.values():
            self._add_texts(text)
        hits = np.stack([np.sum(list(chunks_of_text), axis=0) for chunks_of_text in pairs])
        self._tally.pairs.add(hits[:, 0], hits[:, 1])
        return self._tally

    def _stacked(self, part: str, by_layer: Mapping[int, SumsOf]) -> NDArray[np.float64]:
        """One of _SUMS of a batch, (text, layer, head, measure); 0 where a layer has fewer heads."""
        arrays = [np.moveaxis(getattr(by_layer[layer], part), 0, -1) for layer in self._tally.layers]
        stacked = np.zeros((len(arrays[0]), len(arrays), self._tally.measures.shape[1], arrays[0].shape[2]))
        for row, array in enumerate(arrays):
            stacked[:, row, : array.shape[1]] = array
        return stacked

    def _add_texts(self, found: Mapping[str, NDArray[np.float64]]) -> None:
        self._tally.measures.add(found["sum"], found["count"])
        self._tally.uniform.add(found["uniform_sum"], found["uniform_count"])
        self._tally.offsets.add(found["offset_sum"], found["offset_count"])
        self._tally.offsets_uniform.add(found["offset_uniform"], found["offset_count"])


_SUMS = ("sum", "count", "uniform_sum", "uniform_count", "offset_sum", "offset_count", "offset_uniform")


def _punctuation(tokens: Tokens) -> NDArray[np.bool_]:
    """Which tokens are punctuation and nothing else."""
    bare = [label.removeprefix("##").replace("·", "") for label in tokens.labels]
    marks = [bool(label) and all(unicodedata.category(c)[0] in "PS" for c in label) for label in bare]
    return np.array(marks, np.bool_) & ~tokens.special


def _factors(model: Model) -> dict[tuple[Any, int], Tensor] | None:
    """What the measures need of the output projections, worked out once for all batches."""
    from attnscope.core.measures import output_factor

    if not isinstance(model, Projects):
        return None
    n_heads = model.info.n_heads[0]
    return {place: output_factor(weight, n_heads) for place, weight in model.output_projections().items()}


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
    model: Model, texts: Corpus | Sequence[CorpusText], options: HeadsOptions, special: frozenset[int]
) -> TokenCounts:
    """How often each token comes: in the whole corpus whatever the shard, or by a file."""
    encode = model.tokenizer.encode
    if options.frequencies is not None:
        return read_frequencies(options.frequencies, encode)
    return count_tokens(texts, encode, special)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """What glibc has for giving freed memory back to the system; None elsewhere."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
        return found
    return None


def _give_memory_back() -> None:
    """Gives back what batches have freed: glibc keeps it, in pieces that the next batch's other shapes do not fit.

    Without, a process holds four times as much after 90,000 tokens as after 9,000.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


def _sparing(probe: Probe) -> Probe:
    """A probe that gives memory back after each layer, which costs long texts little."""

    def observed(call: AttentionCall) -> Tensor:
        output = probe(call)
        _give_memory_back()
        return output

    return observed


def _n_threads() -> int:
    import torch

    return torch.get_num_threads()


def _untrained(model: Model, seed: int) -> Model:
    if not isinstance(model, Trained):
        raise AttnscopeError(f"{model.info.name} has no untrained twin", "leave out --control")
    return model.untrained(seed)


def _finite(bound: float) -> float | None:
    return bound if math.isfinite(bound) else None
