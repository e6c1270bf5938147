"""Find the heads that retrieve information from long texts: hide needles in haystacks, and score all heads on them.

`corpus.needle_probe` makes the needles. This module runs the model on them, tests the scores and fills the tables.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.intervals import benjamini_hochberg
from attnscope.core.plain_torch import with_plain_torch
from attnscope.core.sums import RunningSums
from attnscope.corpus import Corpus, CorpusText, Hay, Needle, needle_probe, word_ids
from attnscope.errors import AttnscopeError, amount
from attnscope.host import delay_interrupts
from attnscope.models.info import require_length
from attnscope.models.model import Batch, Model, example_tokens
from attnscope.questions.heads import ALL, ROLES, Heads, heads_table
from attnscope.report.wording import NEEDLES
from attnscope.results.table import Column, Estimate, Table
from attnscope.studies.heads.options import RETRIEVAL, NeedleOptions, write_percent
from attnscope.studies.heads.roles import FEWEST_TEXTS, LEAST_MARGIN, LEAST_TEXTS, LEVEL, MARGIN
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.texts import Progress, Report, Texts, problems_of, sources_of, special_ids, texts_of
from attnscope.studies.run import Room

if TYPE_CHECKING:
    from attnscope.core.attention.probes import Place

PASS_TOKENS = 8192
"""Tokens of a forward pass: as many texts as fit, at least one."""

_TEXT_TIMES = 8
"""At most this many times the longest haystack is read of a corpus."""


@with_plain_torch
def retrieval_heads(
    model: Model,
    corpus: Corpus | str | Sequence[str] | Sequence[CorpusText] | None = None,
    options: NeedleOptions | None = None,
    report: Report | None = None,
) -> Heads:
    """Find the heads that a model copies with from far back in a text.

        found = attnscope.retrieval_heads(model, attnscope.Corpus("book.txt", split="file"))
        found["heads"].grid("retrieval", "decoder")  # (layer, head): the share of needle tokens that it copied
        found["written"]["copied"][0]                # the share that the model itself wrote

    The model reads a long text with a needle in it, a question at its end, and the right answer, in one pass. A token
    of the answer counts as written where the model gives it the most probability after the right tokens before it: up
    to the first mistake that is greedy writing, after it the model is put right. A head has copied it where the
    query that writes it gives the largest of its weights to that very token in the needle. The score of a head is the
    share of all needle tokens that it has copied, so that no score is above the share that the model writes.

    Beside it stands `decoy`, the share of needle tokens at which the head looks at the same place of a second needle,
    which answers another question. A head is one of retrieval where its score is above the threshold, and above that
    of the decoy and of a key at random by a margin, by a one-sided test over needles, with the false discovery rate
    over heads held. Nothing is made that grows with the square of a text's length.

    Args:
        model: A decoder that writes, see `attnscope.load`.
        corpus: Texts to hide needles in, one after the other; None = random tokens of the model's vocabulary.
        options: The needles: how many, how long, how deep.
        report: Called after each pass.

    Returns:
        The findings: `corpus["of"]` is "needles", and each text is a needle. After an interruption they cover the
        needles that were done.

    Raises:
        AttnscopeError: The model does not write, the vocabulary is not known, or a text has no room.

    Source:
        Wu et al. 2024, Retrieval Head Mechanistically Explains Long-Context Factuality, section 2 (the score and its
        threshold). Ours: decoys, the test, the answer given in one pass; Wu et al. count needles of which the model
        wrote half or more, here all count.
    """
    options = options or NeedleOptions()
    if model.loss != "causal":
        raise AttnscopeError(
            f"{model.info.name} cannot continue a text, so it copies no needle",
            "needles are for decoders with their language-model head, such as GPT-2 or Llama",
        )
    for length in options.lengths:
        require_length(model.info, length)
    texts = None if corpus is None else texts_of(corpus)
    hay = _make_hay(model, texts, options)
    # Make the first needle of each length now, so that errors come before the model runs.
    first = [next(_needles(hay, options, length)) for length in options.lengths]
    n_answer = len(first[0].places)

    # Read all needles, as many at once as a pass takes.
    run = _Run(model)
    n_all = len(options.lengths) * options.n
    complete = True
    try:
        for batch in _batches(hay, options):
            run.read(batch)
            if report is not None:
                report(Progress(run.n_read, run.n_tokens, run.n_read / n_all))
    except KeyboardInterrupt:
        if not run.seen:
            raise
        complete = False
    reason = f"{model.info.name} computes NaN or infinity on it"
    if not run.seen:
        raise AttnscopeError(f"no needle is left of {run.n_read}: {reason}", "try float32")

    # Test the scores, and fill the tables.
    problems = [] if texts is None else problems_of(texts)
    problems += [{"source": f"needle {number}", "line": None, "reason": reason} for number in run.broken]
    tables = _judge(run, options)
    tables["written"] = _written_table(run.seen)
    return Heads(
        run=run_of(model.info, _notes(run, options, tables["written"])) | {"seed": options.seed},
        corpus={
            "of": NEEDLES,
            "sources": ["random tokens"] if texts is None else sources_of(texts),
            "n_texts": len(run.seen),
            "n_tokens": run.n_tokens,
            "sha256": run.digest.hexdigest(),
            "problems": problems,
            "complete": complete,
        },
        options=_describe(options, n_answer, is_random=hay.encode is None),
        tables=tables,
    )


# Needles


def _make_hay(model: Model, corpus: Texts | None, options: NeedleOptions) -> Hay:
    """Return the tokens in which needles are hidden.

    Raises:
        AttnscopeError: The vocabulary is not known.
    """
    tokenizer = model.tokenizer
    special = special_ids(model)
    # Ordinary tokens make needles; special tokens before a text stay before it.
    ordinary = np.array(tokenizer.ordinary_ids(), np.int64)
    if not len(ordinary):
        raise AttnscopeError(f"the vocabulary of {model.info.name} is not known", "needles are made of its tokens")
    example = example_tokens(tokenizer)
    before = tuple(example.ids[: int(np.flatnonzero(~example.special)[0])].tolist())
    if corpus is None:
        return Hay(ordinary, before=before)

    def encode(text: str) -> list[int]:
        return [number for number in tokenizer.encode(text).ids.tolist() if number not in special]

    # Join the corpus' texts until they are long enough for every haystack.
    n_wanted = _TEXT_TIMES * max(options.lengths)
    ids: list[int] = []
    for text in corpus:
        ids += text.ids or () if text.text is None else encode(text.text + "\n")
        if len(ids) >= n_wanted:
            break
    stack = np.array(ids[:n_wanted], np.int64)
    # Tokens that end a sentence: needles are put after one.
    ends = frozenset(number for number in set(ids) if tokenizer.spell(number).rstrip()[-1:] in tuple(".!?"))
    return Hay(word_ids(ordinary, tokenizer.spell), stack, encode, ends, before)


def _needles(hay: Hay, options: NeedleOptions, length: int) -> Iterator[Needle]:
    return needle_probe(hay, options.n, options.depths, length, options.seed, answer=options.answer)


def _batches(hay: Hay, options: NeedleOptions) -> Iterator[Sequence[Needle]]:
    """Yield all needles, those of one length together."""
    for length in options.lengths:
        needles = _needles(hay, options, length)
        while batch := tuple(islice(needles, max(1, PASS_TOKENS // length))):
            yield batch


# The model's behaviour on needles


@dataclass(frozen=True, eq=False)
class _Seen:
    """The behaviour of a model and its heads on one needle.

    Attributes:
        needle: The needle.
        written: Which tokens of the answer the model writes, (token,).
        copied: How many of them each head copied, (layer, head, 2): from the needle, and from the decoy.
    """

    needle: Needle
    written: NDArray[np.bool_]
    copied: NDArray[np.int64]

    @property
    def by_chance(self) -> float:
        """Return how many tokens a head copies that looks at one of the keys up to its query at random."""
        n = len(self.written)
        return float((self.written / (len(self.needle) - n + np.arange(n))).sum())


class _Run:
    """A model that reads needles, and its behaviour on each.

    Attributes:
        seen: The behaviour on each needle, without those on which the model computes NaN or infinity.
        broken: The numbers of these, from 1.
        places: Kind of attention and layer of each row of `_Seen.copied`.
        n_heads: How many heads each of these layers has.
    """

    def __init__(self, model: Model) -> None:
        self.seen: list[_Seen] = []
        self.broken: list[int] = []
        self.n_read = 0
        self.n_tokens = 0
        self.digest = hashlib.sha256()
        self.places: list[Place] = []
        self.n_heads: list[int] = []
        self._model = model
        self._room = Room()

    def read(self, batch: Sequence[Needle]) -> None:
        """Add needles of one length."""
        for part, seen in self._room.each(batch, self._look):
            with delay_interrupts():
                for needle, of_needle in zip(part, seen, strict=True):
                    self.n_read += 1
                    self.digest.update(needle.ids.astype("<i8").tobytes())
                    if of_needle is None:
                        self.broken.append(self.n_read)
                    else:
                        self.seen.append(of_needle)
                        self.n_tokens += len(needle)

    def _look(self, needles: Sequence[Needle]) -> list[_Seen | None]:
        """Return the behaviour of the model and its heads on needles; None where it computes NaN or infinity."""
        import torch

        from attnscope.core.attention.probes import OfChosen
        from attnscope.core.attention.row_samples import rows_of

        # Which tokens of the answers are written, (needle, token).
        n = len(needles[0]) - 1
        right = np.stack([needle.answer for needle in needles])
        n_answer = right.shape[1]
        answer = torch.arange(n - n_answer, n)
        probe = OfChosen(lambda call: rows_of(call, answer).argmax(-1).cpu(), kinds=("decoder",))
        ids = torch.from_numpy(np.stack([needle.ids[:-1] for needle in needles]))
        with torch.no_grad():
            logits = self._model.outputs(Batch(ids), probe, last=n_answer).logits
        assert logits is not None  # it has a loss
        written = logits.argmax(-1).cpu().numpy() == right
        is_finite = logits.isfinite().all(-1).all(-1).cpu().numpy()

        # Where the heads look as these are written.
        keys = {(kind, layer): best.numpy() for kind, layers in probe.maps.items() for layer, best in layers.items()}
        self.places = sorted(keys)
        self.n_heads = [keys[place].shape[1] for place in self.places]
        targets = np.stack([[needle.places, needle.decoys] for needle in needles])  # (needle, 2, token)
        copied = np.zeros((len(needles), len(keys), max(self.n_heads), 2), np.int64)
        for row, place in enumerate(self.places):
            looked = keys[place][:, :, None]  # (needle, head, 1, token)
            hits = (looked == targets[:, None]) & written[:, None, None]
            copied[:, row, : self.n_heads[row]] = hits.sum(-1)
        return [
            _Seen(needle, written[row], copied[row]) if is_finite[row] else None for row, needle in enumerate(needles)
        ]


# Conclusions


def _judge(run: _Run, options: NeedleOptions) -> dict[str, Table]:
    """Return the tables of heads with their scores, and of the roles of those that pass the test."""
    names = options.measure_names

    # The sums of each measure, (needle, layer, head, measure): it counts the needles of its depth.
    counts = np.zeros((len(run.seen), len(names)))
    for row, one in enumerate(run.seen):
        its_measures = ("retrieval", "decoy", f"retrieval_at_{write_percent(one.needle.depth)}")
        counts[row, np.isin(names, its_measures)] = len(one.written)
    copied = np.stack([one.copied for one in run.seen])
    source = (np.array(names) == "decoy").astype(np.int64)
    weights = (counts > 0)[:, None, None]
    every = np.broadcast_to(counts[:, None, None], (*copied.shape[:3], len(names)))
    chance = np.array([one.by_chance for one in run.seen])[:, None, None, None]
    sums = RunningSums(every.shape[1:])
    sums.add(copied[..., source] * weights, every)
    uniform = RunningSums(every.shape[1:])
    uniform.add(np.broadcast_to(chance * weights, every.shape), every)

    # The test, (layer, head).
    values = sums.ratio()
    even = uniform.ratio()
    low, high = sums.share_interval(hits=True, dependence=1)
    baseline = np.fmax(values[..., 1], even[..., 0])
    limit = np.fmax(options.threshold, baseline + np.maximum(MARGIN * (1 - baseline), LEAST_MARGIN))
    texts = sums.effective_texts()[..., 0]
    p = sums.share_p_above(limit[..., None], hits=True, dependence=1)[..., 0]
    p = np.where(texts < LEAST_TEXTS, np.nan, p)
    q = benjamini_hochberg(p.ravel()).reshape(p.shape)

    # A row per head; layers may have different numbers of them.
    rows = np.nonzero(np.arange(p.shape[1]) < np.array(run.n_heads)[:, None])
    has_role = (q <= LEVEL)[rows]
    kinds, layers = zip(*(run.places[row] for row in rows[0]), strict=True)
    parts = {"value": values, "low": low, "high": high, "baseline": even, "count": sums.total("c")}
    heads = heads_table(
        (kinds, layers, rows[1]),
        [Column(name, _describe_measure(name), "share", (0, 1)) for name in names],
        roles=np.where(has_role, RETRIEVAL, "").tolist(),
        resting=np.full(len(kinds), np.nan),
        **{part: array[rows] for part, array in parts.items()},
    )
    chosen = tuple(axis[has_role] for axis in rows)
    score = {part: array[..., 0][chosen] for part, array in (("value_low", low), ("value_high", high))}
    n = len(chosen[0])
    roles = Table.of_arrays(
        ROLES,
        head=np.flatnonzero(has_role),
        role=[RETRIEVAL] * n,
        measure=["retrieval"] * n,
        value=values[..., 0][chosen],
        value_baseline=baseline[chosen],
        threshold=np.full(n, options.threshold),
        p=p[chosen],
        q=q[chosen],
        tentative=np.minimum(texts[chosen], len(run.seen)) < FEWEST_TEXTS,
        active_share=np.full(n, np.nan),
        effective_texts=texts[chosen],
        **score,
    )
    return {"heads": heads, "roles": roles}


def _written_table(done: Sequence[_Seen]) -> Table:
    """Return the share of needle tokens that the model itself writes, on the whole and by length and depth."""
    # Needles by length and depth, then one row for all and one for each.
    cells: dict[tuple[int, float], list[_Seen]] = {}
    for one in done:
        cells.setdefault((len(one.needle), one.needle.depth), []).append(one)
    rows: list[dict[str, Any]] = [{"length": ALL, "depth": None, "copied": _share_written(done)}]
    for length, depth in sorted(cells):
        rows.append({"length": length, "depth": depth, "copied": _share_written(cells[length, depth])})
    return Table.of(Heads.TABLES["written"], rows)


def _share_written(some: Sequence[_Seen]) -> Estimate:
    """Return a share of tokens; needles are the units, as one may be copied as a whole or not at all."""
    sums = RunningSums()
    sums.add(np.array([float(one.written.sum()) for one in some]), np.array([float(len(one.written)) for one in some]))
    low, high = sums.share_interval(hits=True, dependence=1)
    return Estimate(float(sums.ratio()), float(low), float(high), count=float(sums.total("c")))


def _notes(run: _Run, options: NeedleOptions, written: Table) -> list[str]:
    notes = []
    n = len(run.seen)
    if n < FEWEST_TEXTS:
        notes.append(
            f"{amount(n, 'needle is', 'needles are')} few: with fewer than {FEWEST_TEXTS} every role is "
            "tentative, and intervals are wide; --needles 20 or more tell heads apart."
        )
    copied = float(written["copied"][0])
    if copied < options.threshold:
        notes.append(
            f"The model writes {copied:.1%} of the needles' tokens: it copies too little for a head to be "
            "one of retrieval, and no roles are given."
        )
    return notes


def _describe(options: NeedleOptions, n_answer: int, *, is_random: bool) -> dict[str, Any]:
    """Return the choices of the study and the meaning of its role, as the record lists them."""
    what = "attends to the token in the needle that the model writes (Wu 2024)"
    return {
        "probe": "needle",
        "level": LEVEL,
        "fewest_texts": FEWEST_TEXTS,
        "least_texts": LEAST_TEXTS,
        "margin": MARGIN,
        "lengths": list(options.lengths),
        "depths": list(options.depths),
        "n_needles": options.n,
        "n_answer": n_answer,
        "needle": "random tokens" if is_random else "a sentence of random words",
        "roles": {RETRIEVAL: {"what": what, "measure": "retrieval", "threshold": options.threshold}},
        "measures": list(options.measure_names),
    }


def _describe_measure(name: str) -> str:
    """Return the meaning of a score, in one line."""
    if name == "decoy":
        return "as retrieval, of a second needle, which answers another question, for the place that is attended to"
    meaning = "share of needle tokens that the model writes while the head attends most to that very token"
    _, _, depth = name.partition("_at_")
    return f"{meaning}; of needles around {depth}% of the haystack" if depth else meaning
