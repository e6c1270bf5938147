"""Find the heads that retrieve information from long texts: hide needles in haystacks, and score all heads on them.

`corpus.needle_probe` makes the needles, and `studies.run` goes over them. This module runs the model on some at a time,
tests the scores and fills the tables.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnscope.core.intervals import benjamini_hochberg
from attnscope.core.plain_torch import with_plain_torch
from attnscope.core.sums import RunningSums
from attnscope.corpus import Block, Corpus, CorpusText, Hay, Needle, needle_probe, word_ids
from attnscope.errors import AttnscopeError
from attnscope.models.info import require_length
from attnscope.models.model import Batch, Model, example_tokens
from attnscope.questions.heads import ALL, ROLES, Heads, heads_table
from attnscope.report.wording import NEEDLES
from attnscope.results.result import settle_corpus
from attnscope.results.table import Column, Estimate, Table
from attnscope.studies.heads.options import RETRIEVAL, NeedleOptions, write_percent
from attnscope.studies.heads.roles import (
    CRITERIA,
    FIRM_FROM_TEXTS,
    LEAST_MARGIN,
    LEVEL,
    MARGIN,
    TESTED_FROM_TEXTS,
)
from attnscope.studies.inputs.texts import Report, Texts, describe_texts, special_ids, texts_of
from attnscope.studies.run import Measurer, Part, run_blocks

PASS_TOKENS = 8192
"""Tokens of a forward pass: as many texts as fit, at least one."""

_HAYSTACKS_READ = 8
"""How many times the tokens of the longest haystack are read of a corpus."""

Numbers = NDArray[np.int64]


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
    to its first mistake this is greedy writing; from there on it reads the right answer, not its own. A head has
    copied the token where the query that writes it gives the largest of its weights to that very token in the needle.
    The score of a head is the share of all needle tokens that it has copied, so that no score is above the share that
    the model writes.

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
    first_needles = [next(_needles(hay, options, length)) for length in options.lengths]

    # Read all needles, as many at once as a pass takes.
    n_all = len(options.lengths) * options.n
    needle_run = run_blocks(
        NeedleMeasurer,
        (model,),
        _blocks(hay, options),
        NeedleSums(),
        report=report,
        share=lambda block: (block.texts[-1].index + 1) / n_all,
    )
    done = needle_run.done
    done.left_out.require_some_left(done.n_texts, model.info)
    if not done.n_texts:
        raise KeyboardInterrupt

    # Test the scores, and fill the tables.
    tables = _judge(done, options)
    tables["written"] = _written_table(done)
    notes = []
    copied = float(tables["written"]["copied"][0])
    if copied < options.threshold:
        notes.append(
            f"The model writes {copied:.1%} of the needles' tokens: it copies too little for a head to be one of "
            "retrieval, and no roles are given."
        )
    facts = _describe_needles(done, texts)
    facts["problems"] += needle_run.problems(model.info)
    return Heads(
        run=needle_run.about(model.info, notes) | {"seed": options.seed},
        corpus=settle_corpus(facts, interrupted=not needle_run.complete),
        options=_describe_options(options, len(first_needles[0].places), is_random=hay.encode is None),
        tables=tables,
    )


# Needles


def vocabulary_of(model: Model) -> tuple[Numbers, tuple[int, ...], tuple[int, ...]]:
    """Return the ordinary tokens of a model's vocabulary, and those that stand before and after any text, by number.

    Raises:
        AttnscopeError: The vocabulary is not known.
    """
    ordinary = np.array(model.tokenizer.ordinary_ids(), np.int64)
    if not len(ordinary):
        raise AttnscopeError(
            f"the vocabulary of {model.info.name} is not known", "probes are made of it: give texts"
        )
    example = example_tokens(model.tokenizer)
    first, last = np.flatnonzero(~example.special)[[0, -1]]
    ids = example.ids.tolist()
    return ordinary, tuple(ids[:first]), tuple(ids[last + 1 :])


def _make_hay(model: Model, corpus: Texts | None, options: NeedleOptions) -> Hay:
    """Return the tokens in which needles are hidden.

    Raises:
        AttnscopeError: The vocabulary is not known.
    """
    tokenizer = model.tokenizer
    special = special_ids(model)
    ordinary, before, _ = vocabulary_of(model)
    if corpus is None:
        return Hay(ordinary, before=before)

    def encode(text: str) -> list[int]:
        return [number for number in tokenizer.encode(text).ids.tolist() if number not in special]

    # Join the corpus' texts until they are long enough for every haystack.
    n_wanted = _HAYSTACKS_READ * max(options.lengths)
    ids: list[int] = []
    for text in corpus:
        if text.text is None:
            ids += text.ids or ()
        else:
            ids += encode(text.text + "\n")
        if len(ids) >= n_wanted:
            break
    # Tokens that end a sentence: needles are put after one.
    ends = {number for number in set(ids) if tokenizer.spell(number).rstrip().endswith((".", "!", "?"))}
    words = word_ids(ordinary, tokenizer.spell)
    text_ids = np.array(ids[:n_wanted], np.int64)
    return Hay(words, text_ids=text_ids, encode=encode, sentence_end_ids=frozenset(ends), before=before)


def _needles(hay: Hay, options: NeedleOptions, length: int) -> Iterator[Needle]:
    return needle_probe(hay, options.n, options.depths, length, options.seed, answer=options.answer)


@dataclass(frozen=True, eq=False)
class _Text:
    """Hold a needle as one text of the study: its number among all, and what problems call it."""

    index: int
    source: str
    needle: Needle
    # Problems name the line of a text, too; a needle has none.
    line: None = None

    def __len__(self) -> int:
        return len(self.needle)


def _blocks(hay: Hay, options: NeedleOptions) -> Iterator[Block]:
    """Yield all needles in blocks: those of one length, as many as a pass takes."""
    numbers = count()
    for length in options.lengths:
        needles = _needles(hay, options, length)
        while some := [*islice(needles, max(1, PASS_TOKENS // length))]:
            texts: list[Any] = []
            for needle in some:
                number = next(numbers)
                texts.append(_Text(number, f"needle {number + 1}", needle))
            yield Block(texts[0].index, tuple(texts))


# The model's behaviour on needles


class _Read(NamedTuple):
    """Hold the behaviour of a model and its heads on a needle.

    Attributes:
        needle: The needle.
        written: Which tokens of its answer the model writes, (token,).
        copied: How many of them each head copied from the needle, and from the decoy, (layer, head, 2); -1 = there is
            no such head.
        is_finite: Whether the model computes no NaN or infinity on it.
    """

    needle: Needle
    written: NDArray[np.bool_]
    copied: Numbers
    is_finite: bool

    @property
    def chance(self) -> float:
        """Return how many tokens a head copies on average if each query looks at a random one of its keys."""
        # The query that writes a token stands right before it: its keys are all tokens up to there, (token,).
        n_keys = len(self.needle) - len(self.written) + np.arange(len(self.written))
        return float((self.written / n_keys).sum())


@dataclass(kw_only=True, eq=False)
class NeedleSums(Part):
    """Hold the behaviour of a model and its heads on needles."""

    needles: tuple[_Read, ...] = ()


class NeedleMeasurer(Measurer[NeedleSums]):
    """Read needles of one length, and see which tokens of their answers the model writes and its heads copy."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model

    def start(self, block: Block) -> NeedleSums:
        """Return sums of nothing yet."""
        return NeedleSums()

    def batches(self, block: Block) -> Sequence[Sequence[Any]]:
        """Return all needles of a block together."""
        return [block.texts]

    def measure(self, batch: Sequence[_Text]) -> list[_Read]:
        """Return what the model and its heads do on each needle; all are of one length."""
        import torch

        from attnscope.core.attention.probes import HeadReader
        from attnscope.core.attention.row_samples import rows_of

        # Run all texts but their last token, and keep each head's largest key of the queries that write the answers.
        needles = [text.needle for text in batch]
        right = np.stack([needle.answer for needle in needles])
        n_answer = right.shape[1]
        ids = torch.from_numpy(np.stack([needle.ids[:-1] for needle in needles]))
        queries = torch.arange(ids.shape[1] - n_answer, ids.shape[1])
        probe = HeadReader(lambda call: rows_of(call, queries).argmax(-1).cpu(), kinds=("decoder",))
        with torch.no_grad():
            logits = self._model.outputs(Batch(ids), probe, last=n_answer).logits
        assert logits is not None  # it has a loss
        # Which tokens of the answers the model writes, (needle, token).
        written = logits.argmax(-1).cpu().numpy() == right
        is_finite = logits.isfinite().all(-1).all(-1).tolist()

        # Where the tokens stand in needle and decoy, (needle, 2, token).
        targets = np.stack([[needle.places, needle.decoys] for needle in needles])
        # Of each layer where its heads look as they are written, (needle, head, token).
        keys = probe.maps["decoder"]
        n_heads = max(of_layer.shape[1] for of_layer in keys.values())
        copied = np.full((len(needles), max(keys) + 1, n_heads, 2), -1, np.int64)
        for layer, of_layer in keys.items():
            looked_at = of_layer.numpy()[:, :, None]
            hits = (looked_at == targets[:, None]) & written[:, None, None]
            copied[:, layer, : of_layer.shape[1]] = hits.sum(-1)
        return [*map(_Read, needles, written, copied, is_finite)]

    def add(self, part: NeedleSums, batch: Sequence[_Text], result: list[_Read]) -> None:
        """Add needles, without those on which the model computes NaN or infinity."""
        for text, read in zip(batch, result, strict=True):
            if not read.is_finite:
                # In the last hidden states of the unchanged model, see `failures.Place`.
                part.broken[text.index] = ("", None)
                continue
            part.n_texts += 1
            part.n_tokens += len(text)
            part.needles += (read,)


# Conclusions


def _judge(done: NeedleSums, options: NeedleOptions) -> dict[str, Table]:
    """Return the tables of heads with their scores, and of the roles of those that pass the test."""
    # How many tokens of each needle a measure counts, (needle, measure): none of needles of another depth.
    names = options.measure_names
    counts = np.zeros((len(done.needles), len(names)))
    for row, read in enumerate(done.needles):
        at_depth = f"retrieval_at_{write_percent(read.needle.depth)}"
        counts[row] = np.isin(names, ["retrieval", "decoy", at_depth]) * len(read.written)
    # What the heads copy, and what chance would copy, (needle, head, measure).
    copied = np.stack([read.copied for read in done.needles])
    chance = np.array([read.chance for read in done.needles])
    layers, heads = np.nonzero(copied[0, :, :, 0] >= 0)
    needle_or_decoy = (np.array(names) == "decoy").astype(np.int64)
    # The same for each head, (needle, head, measure).
    counts = np.repeat(counts[:, None], len(heads), axis=1)
    is_counted = counts > 0
    sums = RunningSums(counts.shape[1:])
    sums.add(copied[:, layers, heads][..., needle_or_decoy] * is_counted, counts)
    uniform = RunningSums(counts.shape[1:])
    uniform.add(chance[:, None, None] * is_counted, counts)

    # The test, (head,): above the threshold, and above the decoy and chance by a margin.
    values = sums.ratio()
    by_chance = uniform.ratio()
    low, high = sums.share_interval(hits=True, dependence=1)
    # Measure 0 is retrieval, measure 1 its decoy.
    baseline = np.fmax(values[:, 1], by_chance[:, 0])
    limit = np.fmax(options.threshold, baseline + np.maximum(MARGIN * (1 - baseline), LEAST_MARGIN))
    n_texts = sums.sample().n_texts[:, 0]
    p = sums[:, 0].share_p_above(limit, hits=True, dependence=1)
    p = np.where(n_texts < TESTED_FROM_TEXTS, np.nan, p)
    q = benjamini_hochberg(p)

    has_role = q <= LEVEL
    table = heads_table(
        (["decoder"] * len(heads), layers, heads),
        [Column(name, _describe_measure(name), "share", (0, 1)) for name in names],
        roles=np.where(has_role, RETRIEVAL, "").tolist(),
        resting=np.full(len(heads), np.nan),
        value=values,
        low=low,
        high=high,
        baseline=by_chance,
        # "c": the tokens that were counted.
        count=sums.total("c"),
    )
    roles = []
    for head in np.flatnonzero(has_role):
        roles.append(
            {
                "head": head,
                "role": RETRIEVAL,
                "measure": "retrieval",
                "value": Estimate(values[head, 0], low[head, 0], high[head, 0], baseline[head]),
                "threshold": options.threshold,
                "p": p[head],
                "q": q[head],
                "tentative": min(n_texts[head], done.n_texts) < FIRM_FROM_TEXTS,
                "effective_texts": n_texts[head],
            }
        )
    return {"heads": table, "roles": Table.of(ROLES, roles)}


def _written_table(done: NeedleSums) -> Table:
    """Return the share of needle tokens that the model itself writes, on the whole and by length and depth."""
    # Needles of all lengths and depths, then those of each length and depth.
    cells = {(ALL, np.nan): [read.written for read in done.needles]}
    for read in done.needles:
        cells.setdefault((len(read.needle), read.needle.depth), []).append(read.written)
    rows = []
    for (length, depth), written in sorted(cells.items()):
        # Needles are the units, as one may be copied as a whole or not at all.
        answers = np.stack(written)
        sums = RunningSums()
        sums.add(answers.sum(1), np.full(len(answers), answers.shape[1]))
        low, high = sums.share_interval(hits=True, dependence=1)
        copied = Estimate(float(sums.ratio()), float(low), float(high), count=float(answers.size))
        rows.append({"length": length, "depth": depth, "copied": copied})
    return Table.of(Heads.TABLES["written"], rows)


def _describe_needles(done: NeedleSums, texts: Texts | None) -> dict[str, Any]:
    """Return what the record says of the needles and of the texts that they were hidden in."""
    hay: dict[str, Any] = {"sources": ["random tokens"], "problems": []}
    if texts is not None:
        hay = describe_texts(texts)
    digest = hashlib.sha256()
    for read in done.needles:
        digest.update(read.needle.ids.astype("<i8").tobytes())
    return {
        "of": NEEDLES,
        "sources": hay["sources"],
        "n_texts": done.n_texts,
        "n_tokens": done.n_tokens,
        "sha256": digest.hexdigest(),
        "problems": hay["problems"],
    }


def _describe_options(options: NeedleOptions, n_answer: int, *, is_random: bool) -> dict[str, Any]:
    """Return the choices of the study and the meaning of its role, as the record lists them.

    `n_answer` is how many tokens each needle has to be found.
    """
    what = "attends to the token in the needle that the model writes (Wu 2024)"
    return {
        "probe": "needle",
        **CRITERIA,
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
    meaning = (
        "share of needle tokens that the model writes while the head attends most to that very token"
    )
    _, _, depth = name.partition("_at_")
    if depth:
        meaning += f"; of needles around {depth}% of the haystack"
    return meaning
