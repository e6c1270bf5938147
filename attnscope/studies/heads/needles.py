"""Find the heads that retrieve information from long texts.

A needle is a few tokens, the answer, hidden in a long text, the haystack. At its end the text asks for the answer and
gives it. A head retrieves if it attends to the hidden answer while the model writes the one at the end.

`corpus.needle_probe` makes such texts, and `studies.run` goes over them. This module runs the model on several of them
at a time, scores the heads, tests the scores and fills the tables.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnscope.core.intervals import benjamini_hochberg
from attnscope.core.plain_torch import with_default_torch
from attnscope.core.sums import RunningSums
from attnscope.corpus import Needle, NeedleSource, TextBlock, needle_probe, word_ids
from attnscope.errors import AttnscopeError
from attnscope.models.info import require_length
from attnscope.models.model import Batch, Model, example_tokens
from attnscope.questions.heads import ALL_LENGTHS, ROLES, Heads, heads_table
from attnscope.report.wording import NEEDLES
from attnscope.results.result import settle_corpus
from attnscope.results.table import Column, Estimate, Table
from attnscope.studies.heads.options import RETRIEVAL, NeedleOptions, format_percent
from attnscope.studies.heads.roles import (
    CRITERIA,
    LEVEL,
    MARGIN,
    MIN_FIRM_TEXTS,
    MIN_MARGIN,
    MIN_TESTED_TEXTS,
)
from attnscope.studies.inputs.texts import (
    AnyTexts,
    ReportProgress,
    Texts,
    describe_texts,
    special_ids,
    texts_of,
)
from attnscope.studies.run import Measurer, PartialSums, run_blocks

MAX_PASS_TOKENS = 8192
"""The most tokens of a forward pass, unless one text alone has more."""

_N_HAYSTACKS_READ = 8
"""How much of a corpus is read, in multiples of the longest haystack: each haystack is a random part of it."""

Numbers = NDArray[np.int64]


@with_default_torch
def retrieval_heads(
    model: Model,
    corpus: AnyTexts | None = None,
    options: NeedleOptions | None = None,
    report: ReportProgress | None = None,
) -> Heads:
    """Find the heads that a model copies with from far back in a text.

        found = attnscope.retrieval_heads(model, attnscope.Corpus("book.txt", split="file"))
        found["heads"].grid("retrieval", "decoder")  # (layer, head): the share of needle tokens that it copied
        found["written"]["copied"][0]                # the share that the model itself wrote

    In one pass, the model reads a long text with a needle in it, a question at the end, and the right answer to it:

    - The model *writes* a token of the answer if it gives that token the largest probability. It has read the right
      tokens before it, whatever it would have written itself. Up to its first mistake, this is greedy writing.
    - A head *copies* a token that the model writes if the query that writes it has its largest weight on that very
      token in the needle.
    - The score of a head, `retrieval`, is the share of all needle tokens that it copies. So no score is above the share
      that the model writes.
    - The baseline `decoy` is the same share for a second needle, which answers another question: how often the head's
      largest weight is on the token in the same place of that needle.

    A head has the role if its score is above the threshold, and by a margin above both the decoy and a key at random.
    The test is one-sided, over needles, and holds the false discovery rate over heads. Memory does not grow with the
    square of a text's length.

    Args:
        model: A decoder that writes, see `attnscope.load`.
        corpus: Texts to hide needles in, joined one after the other; None = random tokens of the model's vocabulary.
        options: The number of needles, the lengths of texts, and the depths at which needles are hidden.
        report: Called after each pass.

    Returns:
        The findings: `corpus["of"]` is "needles", and each text counted is one needle. After an interruption they cover
        the needles that were done.

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
    hay = _make_haystack(model, texts, options)
    # Make a needle of each length now, so that errors come before the model runs.
    for length in options.lengths:
        next(_make_needles(hay, options, length))

    # Read all needles, as many at once as a pass takes.
    n_needles = len(options.lengths) * options.n
    needle_run = run_blocks(
        NeedleMeasurer,
        (model,),
        _make_blocks(hay, options),
        NeedleSums(),
        report=report,
        share=lambda block: (block.texts[-1].index + 1) / n_needles,
    )
    done = needle_run.done
    done.left_out.require_some_left(done.n_texts, model.info)
    # An interruption before the first needle leaves nothing to show.
    if not done.n_texts:
        raise KeyboardInterrupt

    # Test the scores, and fill the tables.
    tables = _test_heads(done, options)
    tables["written"] = _make_written_table(done)
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
        options=_describe_options(options, len(done.needles[0].written), is_random=texts is None),
        tables=tables,
    )


# Needles


def read_vocabulary(model: Model) -> tuple[Numbers, tuple[int, ...], tuple[int, ...]]:
    """Return three lists of token ids: a model's ordinary tokens, and the special ones before and after any text.

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


def _make_haystack(model: Model, corpus: Texts | None, options: NeedleOptions) -> NeedleSource:
    """Return the haystack from which texts are cut, and the tokens of which needles are made.

    Raises:
        AttnscopeError: The vocabulary is not known.
    """
    tokenizer = model.tokenizer
    special = special_ids(model)
    ordinary, before, _ = read_vocabulary(model)
    if corpus is None:
        return NeedleSource(ordinary, before=before)

    def encode(text: str) -> list[int]:
        return [token for token in tokenizer.encode(text).ids.tolist() if token not in special]

    # Join the texts of the corpus until they are long enough for every haystack.
    n_wanted = _N_HAYSTACKS_READ * max(options.lengths)
    ids: list[int] = []
    for text in corpus:
        if text.text is None:
            ids += text.ids or ()
        else:
            ids += encode(text.text + "\n")
        if len(ids) >= n_wanted:
            break
    # A needle is hidden after the end of a sentence.
    ends = {token for token in set(ids) if tokenizer.spell(token).rstrip().endswith((".", "!", "?"))}
    words = word_ids(ordinary, tokenizer.spell)
    text_ids = np.array(ids[:n_wanted], np.int64)
    return NeedleSource(
        words, text_ids=text_ids, encode=encode, sentence_end_ids=frozenset(ends), before=before
    )


def _make_needles(hay: NeedleSource, options: NeedleOptions, length: int) -> Iterator[Needle]:
    """Yield the needles of one length."""
    return needle_probe(hay, options.n, options.depths, length, options.seed, answer=options.answer)


@dataclass(frozen=True, eq=False)
class _NeedleText:
    """Hold a needle with what `studies.run` asks of a text: its index among all, a source and a line, for problems."""

    needle: Needle
    index: int
    # The text of a needle is in no file, so it has no line.
    line: None = None

    @property
    def source(self) -> str:
        return f"needle {self.index + 1}"

    def __len__(self) -> int:
        return len(self.needle)


def _make_blocks(hay: NeedleSource, options: NeedleOptions) -> Iterator[TextBlock]:
    """Yield all needles in blocks. The needles of a block are of one length, and as many as fit into a pass."""
    indexes = count()
    for length in options.lengths:
        # The needles come first in `map`: where they end, it takes no index.
        texts: Iterator[Any] = map(_NeedleText, _make_needles(hay, options, length), indexes)
        while of_block := tuple(islice(texts, max(1, MAX_PASS_TOKENS // length))):
            yield TextBlock(of_block[0].index, of_block)


# The model's behaviour on needles


class _NeedleResult(NamedTuple):
    """Hold what a model and its heads do on one needle.

    Attributes:
        needle: The needle.
        written: Whether the model writes each token of the answer, (token,).
        copied: How many of the tokens that it writes each head copies from the needle, and from the decoy,
            (layer, head, 2); -1 if the layer has fewer heads.
        is_finite: Whether the model computes neither NaN nor infinity.
    """

    needle: Needle
    written: NDArray[np.bool_]
    copied: Numbers
    is_finite: bool

    @property
    def copied_by_chance(self) -> float:
        """Return how many tokens a head copies on average if each query has its largest weight on a random key."""
        # A token is written by the query before it, whose keys are all tokens up to itself, (token,).
        n_keys = len(self.needle) - len(self.written) + np.arange(len(self.written))
        return float((self.written / n_keys).sum())


@dataclass(kw_only=True, eq=False)
class NeedleSums(PartialSums):
    """Hold what a model and its heads do on each needle that was read."""

    needles: tuple[_NeedleResult, ...] = ()


class NeedleMeasurer(Measurer[NeedleSums]):
    """Run a model on needles, and find which tokens of the answers it writes, and which of these its heads copy."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model

    def start(self, block: TextBlock) -> NeedleSums:
        """Return sums of nothing yet."""
        return NeedleSums()

    def batches(self, block: TextBlock) -> Sequence[Sequence[Any]]:
        """Return all needles of a block together."""
        return [block.texts]

    def measure(self, batch: Sequence[_NeedleText]) -> list[_NeedleResult]:
        """Return what the model and its heads do on each needle; all texts are of one length."""
        import torch

        from attnscope.core.attention.probes import HeadRecorder
        from attnscope.core.attention.row_samples import rows_of

        # The answers end the texts, (needle, token). The query before a token writes it, so the last token is not run.
        needles = [text.needle for text in batch]
        answers = np.stack([needle.answer for needle in needles])
        n_answer = answers.shape[1]
        ids = torch.from_numpy(np.stack([needle.ids[:-1] for needle in needles]))
        queries = torch.arange(ids.shape[1] - n_answer, ids.shape[1])
        # Run the model, and keep for each head the key with the largest weight of these queries.
        probe = HeadRecorder(lambda call: rows_of(call, queries).argmax(-1).cpu(), kinds=("decoder",))
        with torch.no_grad():
            logits = self._model.outputs(Batch(ids), probe, last=n_answer).logits
        assert logits is not None  # the model has a language-model head
        # Which tokens of the answers the model writes, (needle, token).
        written = logits.argmax(-1).cpu().numpy() == answers
        is_finite = logits.isfinite().all(-1).all(-1).tolist()

        # The positions of the answer's tokens in the needle, and of those of the decoy, (needle, 2, token).
        positions = np.stack([[needle.places, needle.decoys] for needle in needles])
        # By layer, the key with the largest weight, (needle, head, token).
        keys = probe.maps["decoder"]
        n_heads = max(of_layer.shape[1] for of_layer in keys.values())
        copied = np.full((len(needles), max(keys) + 1, n_heads, 2), -1, np.int64)
        for layer, of_layer in keys.items():
            # Compare as (needle, head, 2, token), and count the tokens.
            is_hit = of_layer.numpy()[:, :, None] == positions[:, None]
            copied[:, layer, : of_layer.shape[1]] = (is_hit & written[:, None, None]).sum(-1)
        return list(map(_NeedleResult, needles, written, copied, is_finite))

    def add(self, part: NeedleSums, batch: Sequence[_NeedleText], result: list[_NeedleResult]) -> None:
        """Add needles, without those on which the model computes NaN or infinity."""
        for text, behaviour in zip(batch, result, strict=True):
            if behaviour.is_finite:
                part.n_texts += 1
                part.n_tokens += len(text)
                part.needles += (behaviour,)
            else:
                # This says: in the last hidden states of the unchanged model, see `failures.NanOrigin`.
                part.broken[text.index] = ("", None)


# Conclusions


def _test_heads(done: NeedleSums, options: NeedleOptions) -> dict[str, Table]:
    """Return the table `heads`, with the scores of all heads, and `roles`, of those that pass the test."""
    names = options.measure_names
    # From (needle, layer, head, 2) to (needle, head, 2).
    copied = np.stack([behaviour.copied for behaviour in done.needles])
    layers, heads = np.nonzero(copied[0, :, :, 0] >= 0)
    sums, uniform = _sum_over_needles(done, names, copied[:, layers, heads])

    # The test, (head,): the score is above the threshold, and by a margin above the decoy and chance.
    values = sums.ratio()
    uniform_values = np.broadcast_to(uniform.ratio(), values.shape)
    # A needle may be copied as a whole or not at all, so this is the interval of hits, with needles as the units.
    low, high = sums.share_interval(hits=True, dependence=1)
    # The first two columns are the score and the decoy's.
    score, decoy = 0, 1
    baseline = np.fmax(values[:, decoy], uniform_values[:, score])
    limit = np.fmax(options.threshold, baseline + np.maximum(MARGIN * (1 - baseline), MIN_MARGIN))
    n_texts = sums.sample().n_texts[:, score]
    p = sums[:, score].share_p_above(limit, hits=True, dependence=1)
    p = np.where(n_texts < MIN_TESTED_TEXTS, np.nan, p)
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
        baseline=uniform_values,
        count=sums.total("c"),
    )
    roles = []
    for head in np.flatnonzero(has_role):
        roles.append(
            {
                "head": head,
                "role": RETRIEVAL,
                "measure": "retrieval",
                "value": Estimate(
                    values[head, score], low[head, score], high[head, score], baseline[head]
                ),
                "threshold": options.threshold,
                "p": p[head],
                "q": q[head],
                "tentative": min(n_texts[head], done.n_texts) < MIN_FIRM_TEXTS,
                "effective_texts": n_texts[head],
            }
        )
    return {"heads": table, "roles": Table.of(ROLES, roles)}


def _sum_over_needles(
    done: NeedleSums, names: Sequence[str], copied: Numbers
) -> tuple[RunningSums, RunningSums]:
    """Return the sums of the measures over needles: those of heads, (head, measure), and those of chance, (1, measure).

    Args:
        done: The needles.
        names: The measures.
        copied: How many tokens each head copies from needle and decoy, (needle, head, 2).
    """
    # How many tokens of each needle a measure counts, (needle, 1, measure). A score at a depth counts needles there.
    counts = np.zeros((len(done.needles), 1, len(names)))
    for row, behaviour in enumerate(done.needles):
        at_depth = f"retrieval_at_{format_percent(behaviour.needle.depth)}"
        counts[row] = np.isin(names, ["retrieval", "decoy", at_depth]) * len(behaviour.written)
    # The measure "decoy" is of what heads copy from the decoy, all others of what they copy from the needle.
    needle_or_decoy = (np.array(names) == "decoy").astype(np.int64)
    sums = RunningSums((copied.shape[1], len(names)))
    sums.add(copied[..., needle_or_decoy] * (counts > 0), counts)
    # Chance is the same for all heads.
    by_chance = np.array([behaviour.copied_by_chance for behaviour in done.needles])
    uniform = RunningSums((1, len(names)))
    uniform.add(by_chance[:, None, None] * (counts > 0), counts)
    return sums, uniform


def _make_written_table(done: NeedleSums) -> Table:
    """Return the share of needle tokens that the model writes: a row for all needles, and one per length and depth."""
    # Group needles by (length, depth); the group of all comes first, as ALL_LENGTHS is less than any length.
    groups = {(ALL_LENGTHS, np.nan): [behaviour.written for behaviour in done.needles]}
    for needle, written, *_ in done.needles:
        groups.setdefault((len(needle), needle.depth), []).append(written)
    rows = []
    for (length, depth), of_group in sorted(groups.items()):
        is_written = np.stack(of_group)  # (needle, token)
        sums = RunningSums()
        sums.add(is_written.sum(1), np.full(len(is_written), is_written.shape[1]))
        # As for heads, needles are the units.
        low, high = sums.share_interval(hits=True, dependence=1)
        copied = Estimate(float(sums.ratio()), float(low), float(high), count=float(is_written.size))
        rows.append({"length": length, "depth": depth, "copied": copied})
    return Table.of(Heads.TABLES["written"], rows)


def _describe_needles(done: NeedleSums, texts: Texts | None) -> dict[str, Any]:
    """Return the `corpus` of the record: the needles, and the texts that hide them (None = random tokens)."""
    hay: dict[str, Any] = {"sources": ["random tokens"], "problems": []}
    if texts is not None:
        hay = describe_texts(texts)
    # The hash is of token ids, 8 bytes each on every machine.
    digest = hashlib.sha256()
    for behaviour in done.needles:
        digest.update(behaviour.needle.ids.astype("<i8").tobytes())
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

    Args:
        options: The choices.
        n_answer: How many tokens the answer of a needle has: fewer than asked for if the vocabulary is small.
        is_random: Whether needles and haystacks are random tokens.
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
    """Return the meaning of a measure, as its column states it."""
    if name == "decoy":
        return "as retrieval, of a second needle, which answers another question, for the place that is attended to"
    meaning = (
        "share of needle tokens that the model writes while the head attends most to that very token"
    )
    _, _, depth = name.partition("_at_")
    if depth:
        meaning += f"; of needles around {depth}% of the haystack"
    return meaning
