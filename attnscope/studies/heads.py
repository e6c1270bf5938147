"""What is each head for? A model and any amount of text in, measures and roles with their evidence out."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.corpus import (
    Chunk,
    Corpus,
    CorpusText,
    block_batches,
    blocks,
    count_tokens,
    read_frequencies,
)
from attnscope.errors import AttnscopeError
from attnscope.findings import Findings
from attnscope.models.model import Batch, Embeds, Model, Projects, Trained
from attnscope.records import Tokens
from attnscope.studies.heatmap import run_of
from attnscope.studies.roles import FEWEST_TEXTS, LEVEL, RULES, judged, thresholds_from
from attnscope.studies.tally import OFFSETS, Tally, pair_hits, tallies_of

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.measures import SumsOf, TextFacts

Report = Callable[["Progress"], None]


@dataclass(frozen=True)
class Progress:
    """How far a study is: texts and tokens done, and the share of the corpus that was read (None = unknown)."""

    n_texts: int
    n_tokens: int
    share: float | None


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
    corpus: Corpus | Sequence[str] | Sequence[CorpusText],
    options: HeadsOptions | None = None,
    report: Report | None = None,
) -> Findings:
    """Measures every head of a model on a corpus, and says what each is for.

    Memory does not grow with the corpus, nor with the square of a text's length. An interruption (KeyboardInterrupt)
    ends the study after the last whole block; what was done is returned, and said to be incomplete.

    Args:
        model: A loaded model, see `attnscope.load`.
        corpus: What to run it on: a Corpus, or a list of texts.
        options: How.
        report: Called after each batch.

    Raises:
        AttnscopeError: There is no text, or the model cannot be measured.
    """
    options = options or HeadsOptions()
    texts: Corpus | tuple[CorpusText, ...]
    texts = corpus if isinstance(corpus, Corpus) else _listed(corpus)
    if len(model.info.kinds) > 1:
        raise AttnscopeError(
            f"{model.info.name} has an encoder and a decoder; heads are studied in models that have one of them",
            "look at single texts with: attnscope heatmap",
        )
    frequencies = _log_frequencies(model, texts, options)
    study = _Study(model, frequencies, options)
    complete = study.run(texts, report)
    control: dict[str, Tally] = {}
    if options.control:
        beside = _Study(_untrained(model, options.seed), frequencies, options)
        beside.run(texts, None)
        control = beside.tallies
    described = {
        "sources": list(texts.sources) if isinstance(texts, Corpus) else ["texts"],
        "n_texts": study.n_texts,
        "n_tokens": study.n_tokens,
        "n_chunked": study.n_chunked,
        "sha256": texts.sha256 if isinstance(texts, Corpus) else "",
        "shards": [f"{options.shard[0]}/{options.shard[1]}"],
        "problems": [asdict(problem) for problem in texts.problems] if isinstance(texts, Corpus) else [],
        "complete": complete,
    }
    arrays = {name: array for tally in study.tallies.values() for name, array in tally.to_arrays().items()}
    arrays |= {f"control-{name}": array for tally in control.values() for name, array in tally.to_arrays().items()}
    return concluded(run_of(model.info), described, arrays, options.thresholds)


def concluded(
    run: Mapping[str, Any],
    corpus: Mapping[str, Any],
    sums: Mapping[str, NDArray[Any]],
    thresholds: Mapping[str, float],
) -> Findings:
    """The findings that exact sums amount to, at given thresholds; needs no model."""
    from attnscope.core.measures import MEASURES

    limits = thresholds_from([]) | dict(thresholds)
    trained = tallies_of({name: array for name, array in sums.items() if not name.startswith("control-")})
    control = tallies_of(
        {name.removeprefix("control-"): array for name, array in sums.items() if name.startswith("control-")}
    )
    return Findings(
        run=run,
        corpus=corpus,
        options={
            "level": LEVEL,
            "fewest_texts": FEWEST_TEXTS,
            "roles": {
                name: {"what": rule.what, "measure": rule.measures[0], "threshold": limits[name]}
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
        },
        heads=judged(list(trained.values()), limits),
        sums=sums,
        control=judged(list(control.values()), limits) if control else (),
    )


def merged(parts: Sequence[Findings]) -> Findings:
    """The findings of several shards of one corpus, as one run over all of it would have found them.

    Bit for bit, in any order.

    Raises:
        AttnscopeError: They are of different models, texts, measures or thresholds, or a shard comes twice.
    """
    first = parts[0]
    for part in parts[1:]:
        for what, a, b in (
            ("models", *(p.run.get("sha256") or p.run.get("model") for p in (first, part))),
            ("precisions", *(p.run.get("dtype") for p in (first, part))),
            ("engines", *(p.run.get("engine") for p in (first, part))),
            ("texts", *(p.corpus.get("sha256") for p in (first, part))),
            ("options", *(p.options for p in (first, part))),
            ("measures", *(sorted(p.sums) for p in (first, part))),
        ):
            if a != b:
                raise AttnscopeError(f"these records are of different {what}: they cannot be merged", _told(a, b))
    shards = [shard for part in parts for shard in part.corpus["shards"]]
    twice = sorted({shard for shard in shards if shards.count(shard) > 1})
    if twice:
        raise AttnscopeError(f"shard {twice[0]} is there twice", "give each part once")
    if len({shard.partition("/")[2] for shard in shards}) > 1:
        raise AttnscopeError(f"shards {', '.join(shards)} are not of one division", "divide the corpus once")
    tallies: dict[str, Tally] = {}
    for part in parts:
        for prefix in ("", "control-"):
            mine = {n.removeprefix(prefix): a for n, a in part.sums.items() if n.startswith("control-") == bool(prefix)}
            for kind, tally in tallies_of(mine).items():
                name = prefix + kind
                tallies[name] = tallies[name].merge(tally) if name in tallies else tally
    arrays = {
        ("control-" if name.startswith("control-") else "") + key: array
        for name, tally in tallies.items()
        for key, array in tally.to_arrays().items()
    }
    corpora = [part.corpus for part in parts]
    corpus = dict(first.corpus) | {
        "n_texts": sum(c["n_texts"] for c in corpora),
        "n_tokens": sum(c["n_tokens"] for c in corpora),
        "n_chunked": sum(c["n_chunked"] for c in corpora),
        "shards": sorted(shards, key=lambda shard: int(shard.partition("/")[0])),
        "complete": all(c["complete"] for c in corpora),
    }
    if len(shards) == int(shards[0].partition("/")[2]):
        corpus["shards"] = ["1/1"]
    limits = {name: rule["threshold"] for name, rule in first.options["roles"].items()}
    return concluded(first.run, corpus, arrays, limits)


class _Study:
    """One model on one corpus, block by block."""

    def __init__(self, model: Model, frequencies: _Frequencies, options: HeadsOptions) -> None:
        self.model, self.options = model, options
        self.tallies: dict[str, Tally] = {}
        self.n_texts = self.n_tokens = self.n_chunked = 0
        self._frequencies = frequencies
        self._projections = _factors(model)

    def run(self, texts: Corpus | Sequence[CorpusText], report: Report | None) -> bool:
        """Goes through a corpus; False if it was interrupted."""
        try:
            for block in blocks(texts, shard=self.options.shard):
                batches = block_batches(
                    block,
                    self.model.tokenizer.encode,
                    limit=self.model.info.max_tokens,
                    chunk=self.options.chunk,
                    stride=self.options.stride,
                )
                self._add_block(batches, len(block.texts), block.texts[0].index, texts, report)
        except KeyboardInterrupt:
            if not self.n_texts:
                raise
            return False
        return True

    def _add_block(
        self,
        batches: Sequence[tuple[Chunk, ...]],
        n_texts: int,
        first: int,
        texts: Corpus | Sequence[CorpusText],
        report: Report | None,
    ) -> None:
        held: dict[str, _BlockSums] = {}
        pairs: dict[int, list[tuple[NDArray[np.float64], ...]]] = {}
        done = 0
        for batch in batches:
            for kind, sums in self._observed(batch).items():
                if kind not in held:
                    held[kind] = _BlockSums(n_texts, sums)
                held[kind].add([part.text - first for part in batch], sums)
            for part in batch:
                done += len(part)
                hits = pair_hits(part.tokens.ids, causal=self.model.info.kinds == ("decoder",))
                pairs.setdefault(part.text - first, []).append(hits)
            if report is not None:
                report(Progress(self.n_texts, self.n_tokens + done, _share(texts)))
        # Only whole blocks count: an interruption above leaves the sums as they were before.
        for kind, block in held.items():
            if kind not in self.tallies:
                self.tallies[kind] = Tally.empty(kind, block.layers, block.n_heads, block.names)
            block.add_to(self.tallies[kind], pairs)
        self.n_texts += len(pairs)
        self.n_tokens += done
        self.n_chunked += sum(len(parts) > 1 for parts in pairs.values())

    def _observed(self, batch: Sequence[Chunk]) -> Mapping[str, Mapping[int, SumsOf]]:
        """The measures of a batch: kind -> layer -> sums, in the order of the batch."""
        import torch

        from attnscope.core.sums import Sums

        tokens = [part.tokens for part in batch]
        facts = self._facts(tokens)
        probe = Sums(facts, output_projections=self._projections)
        segments = torch.from_numpy(_padded([t.segments.astype(np.int64) for t in tokens]))
        whole = all(len(t) == len(tokens[0]) for t in tokens)
        device = self.model.info.device
        with torch.inference_mode():
            self.model.run(
                Batch(facts.ids.to(device), None if whole else facts.real.to(device), segments.to(device)), probe
            )
        return {str(kind): by_layer for kind, by_layer in probe.sums.items()}

    def _facts(self, tokens: Sequence[Tokens]) -> TextFacts:
        import torch

        from attnscope.core.measures import TextFacts

        lengths = np.array([len(t) for t in tokens])
        real = np.arange(lengths.max()) < lengths[:, None]
        ids = _padded([t.ids for t in tokens])
        special = _padded([t.special for t in tokens])
        opening = special & (np.cumsum(~special, axis=1) == 0)
        frequency = self._frequencies.of(ids)
        ordinary = np.where(real & ~special, frequency, np.inf)
        rarest = np.where(np.isfinite(ordinary).any(1), ordinary.argmin(1), -1)
        embeddings = None
        if isinstance(self.model, Embeds):
            found = self.model.static_embeddings(torch.from_numpy(ids).to(self.model.info.device)).float().cpu()
            embeddings = found / found.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        return TextFacts(
            real=torch.from_numpy(real),
            special=torch.from_numpy(special),
            ids=torch.from_numpy(ids),
            cls=torch.from_numpy(opening),
            sep=torch.from_numpy(special & ~opening),
            punctuation=torch.from_numpy(_padded([_punctuation(t) for t in tokens])),
            log_frequency=torch.from_numpy(frequency),
            embeddings=embeddings,
            rarest=torch.from_numpy(rarest),
        )


class _BlockSums:
    """The sums of the texts of one block, in the order of the corpus; chunks of a text are added up."""

    def __init__(self, n_texts: int, by_layer: Mapping[int, SumsOf]) -> None:
        self.layers = tuple(sorted(by_layer))
        self.n_heads = max(sums.sum.shape[2] for sums in by_layer.values())
        self.names = next(iter(by_layer.values())).names
        sizes = {"sum": len(self.names), "offset_sum": len(OFFSETS)}
        parts = {part: sizes["offset_sum" if part.startswith("offset") else "sum"] for part in _SUMS}
        self._held = {part: np.zeros((n_texts, len(self.layers), self.n_heads, size)) for part, size in parts.items()}

    def add(self, places: Sequence[int], by_layer: Mapping[int, SumsOf]) -> None:
        """Adds a batch, whose texts stand at these places of the block."""
        for row, layer in enumerate(self.layers):
            for part, held in self._held.items():
                values = np.moveaxis(getattr(by_layer[layer], part), 0, -1)  # (batch, head, measure)
                for place, value in zip(places, values, strict=True):
                    held[place, row, : value.shape[0]] += value

    def add_to(self, tally: Tally, pairs: Mapping[int, Sequence[tuple[NDArray[np.float64], ...]]]) -> None:
        """Adds the block to a tally."""
        held = self._held
        tally.measures.add(held["sum"], held["count"])
        tally.uniform.add(held["uniform_sum"], held["uniform_count"])
        tally.offsets.add(held["offset_sum"], held["offset_count"])
        tally.offsets_uniform.add(held["offset_uniform"], held["offset_count"])
        hits = [np.sum(list(pairs[place]), axis=0) for place in sorted(pairs)]
        stacked = np.stack(hits)
        tally.pairs.add(stacked[:, 0], stacked[:, 1])


_SUMS = ("sum", "count", "uniform_sum", "uniform_count", "offset_sum", "offset_count", "offset_uniform")


def _padded(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Rows of different lengths as one array, filled up with zeros."""
    padded = np.zeros((len(rows), max(len(row) for row in rows)), rows[0].dtype)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    return padded


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

    def of(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        known = ids < len(self.table)
        return np.where(known, self.table[np.where(known, ids, 0)], self.unseen)


def _log_frequencies(model: Model, texts: Corpus | Sequence[CorpusText], options: HeadsOptions) -> _Frequencies:
    """The log frequency of every token, from the whole corpus whatever the shard, or from a file."""
    encode = model.tokenizer.encode
    counts = (
        count_tokens(texts, encode) if options.frequencies is None else read_frequencies(options.frequencies, encode)
    )
    n_known = max(1, len(counts.counts))
    # Of the vocabulary only the part up to the largest number that was seen is known here.
    return _Frequencies(counts.log_frequency(n_known), -math.log(counts.total + n_known))


def _listed(texts: Sequence[str] | Sequence[CorpusText]) -> tuple[CorpusText, ...]:
    kept = [text for text in texts if not isinstance(text, str) or text.strip()]
    found = tuple(CorpusText(i, "texts", i + 1, text=t) if isinstance(t, str) else t for i, t in enumerate(kept))
    if not found:
        raise AttnscopeError("there is no text to study", "give at least one text with words in it")
    return found


def _untrained(model: Model, seed: int) -> Model:
    if not isinstance(model, Trained):
        raise AttnscopeError(f"{model.info.name} has no untrained twin", "leave out --control")
    return model.untrained(seed)


def _share(texts: Corpus | Sequence[CorpusText]) -> float | None:
    if isinstance(texts, Corpus):
        return min(1.0, texts.bytes_read / texts.n_bytes) if texts.n_bytes else None
    return None


def _finite(bound: float) -> float | None:
    return bound if math.isfinite(bound) else None


def _told(a: Any, b: Any) -> str:
    """Two values that differ, shortly."""
    return f"one has {str(a)[:40]}, another {str(b)[:40]}"
