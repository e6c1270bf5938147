"""Find the heads that retrieve information from long texts.

A *needle* is a few tokens, the answer, hidden in a long text, the *haystack*. The end of the text asks for the answer
and repeats it. A head retrieves if it attends to the hidden answer while the model predicts the answer at the end. A
*decoy* is a second needle in the same haystack, which answers another question.

`corpus.generate_needles` makes these texts, and `studies.run` loops over them. This module runs the model on several
texts at a time, scores the heads, tests the scores and fills the tables.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnscope.arrays import Integers
from attnscope.core.intervals import benjamini_hochberg
from attnscope.core.plain_torch import with_default_torch
from attnscope.core.sums import RunningSums
from attnscope.corpus import Needle, NeedleSource, TextBlock, generate_needles, select_word_ids
from attnscope.errors import AttnscopeError
from attnscope.models.info import require_length
from attnscope.models.model import Batch, Model, example_tokens
from attnscope.questions.heads import ALL_LENGTHS, ROLE_EVIDENCE_COLUMNS, Heads, make_heads_table
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
"""The most tokens in a forward pass, unless a single text has more."""

_N_HAYSTACKS_READ = 8
"""How much of a corpus is read, in multiples of the longest haystack. Each haystack is a random part of this text."""


@with_default_torch
def retrieval_heads(
    model: Model,
    corpus: AnyTexts | None = None,
    options: NeedleOptions | None = None,
    report: ReportProgress | None = None,
) -> Heads:
    """Find the heads by which a model copies from far back in a text.

        found = attnscope.retrieval_heads(model, attnscope.Corpus("book.txt", split="file"))
        found["heads"].grid("retrieval", "decoder")  # (layer, head): the share of needle tokens that it copied
        found["written"]["copied"][0]                # the share that the model itself wrote

    In one forward pass, the model reads a long text with a needle in it, a question at the end, and the right answer:

    - The model *writes* a token of the answer if it gives that token the largest probability. The tokens before it are
      the right ones (teacher forcing). Up to the model's first mistake, this equals greedy decoding.
    - A head *copies* a token that the model writes if the query that predicts the token has its largest weight on the
      same token in the needle.
    - The score of a head, `retrieval`, is the share of all answer tokens that the head copies. So no score is above the
      share that the model writes.
    - The baseline `decoy` is the same share for the decoy: how often the head's largest weight is on the token in the
      same place of the decoy.

    A head has the role if its score is above the threshold, and by a margin above both the decoy and a random key. The
    test is one-sided, over needles, and controls the false discovery rate over heads. Memory grows less than with the
    square of a text's length.

    Args:
        model: A decoder with its language-model head, see `attnscope.load`.
        corpus: Texts to hide needles in, joined one after the other; None = random tokens of the model's vocabulary.
        options: The number of needles, the lengths of texts, and the depths at which needles are hidden.
        report: Called after each forward pass.

    Returns:
        The findings. `corpus["of"]` is "needles", and `corpus["n_texts"]` counts needles. After an interruption, the
        findings cover the needles that were measured.

    Raises:
        AttnscopeError: The model cannot continue a text, the vocabulary is not known, or a text is too short for its
            needle.

    Source:
        Wu et al. 2024, Retrieval Head Mechanistically Explains Long-Context Factuality, section 2 (the score and its
        threshold). Ours: decoys, the test, teacher forcing. Wu et al. only count needles of which the model writes
        half or more; here all needles count.
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
    haystack = _make_haystack(model, texts, options)
    # Make one needle of each length now, so that errors come before the model runs.
    for length in options.lengths:
        next(_make_needles(haystack, options, length))

    # Run the model on all needles, block by block. Their indexes run through all lengths.
    n_needles = len(options.lengths) * options.n
    needle_run = run_blocks(
        NeedleMeasurer,
        (model,),
        _make_blocks(haystack, options),
        NeedleSums(),
        report=report,
        get_share=lambda block: (block.texts[-1].index + 1) / n_needles,
    )
    sums = needle_run.done
    sums.left_out.require_some_left(sums.n_texts, model.info)
    # After an interruption before the first needle, there is nothing to show.
    if not sums.n_texts:
        raise KeyboardInterrupt

    # Test the scores, and fill the tables. The first row of `written` is of all needles.
    tables = _test_heads(sums, options)
    tables["written"] = _make_written_table(sums)
    notes = []
    copied = float(tables["written"]["copied"][0])
    if copied < options.threshold:
        notes.append(
            f"The model writes {copied:.1%} of the needles' tokens: it copies too little for a head to be one of "
            "retrieval, and no roles are given."
        )
    facts = _describe_needles(sums, texts)
    facts["problems"] += needle_run.problems(model.info)
    return Heads(
        run=needle_run.describe_run(model.info, notes) | {"seed": options.seed},
        corpus=settle_corpus(facts, interrupted=not needle_run.complete),
        options=_describe_options(options, len(sums.results[0].is_written), is_random=texts is None),
        tables=tables,
    )


# Needles


def read_vocabulary(model: Model) -> tuple[Integers, tuple[int, ...], tuple[int, ...]]:
    """Return three sequences of token ids: a model's ordinary tokens, and the special tokens before and after any text.

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
    """Return the text that haystacks are cut from, and the tokens that needles are made of.

    Raises:
        AttnscopeError: The vocabulary is not known.
    """
    tokenizer = model.tokenizer
    special = special_ids(model)
    ordinary, prefix_ids, _ = read_vocabulary(model)
    if corpus is None:
        return NeedleSource(ordinary, prefix_ids=prefix_ids)

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
    # Needles are only hidden after tokens that end a sentence.
    end_ids = {token for token in set(ids) if tokenizer.spell(token).rstrip().endswith((".", "!", "?"))}
    words = select_word_ids(ordinary, tokenizer.spell)
    text_ids = np.array(ids[:n_wanted], np.int64)
    return NeedleSource(
        words,
        text_ids=text_ids,
        encode=encode,
        sentence_end_ids=frozenset(end_ids),
        prefix_ids=prefix_ids,
    )


def _make_needles(haystack: NeedleSource, options: NeedleOptions, length: int) -> Iterator[Needle]:
    """Yield the needles in texts of one length."""
    return generate_needles(
        haystack, options.n, options.depths, length, options.seed, n_answer_tokens=options.answer
    )


@dataclass(frozen=True, eq=False)
class _NeedleText:
    """Hold a needle as a text for `studies.run`, which needs an index, and a source and a line to report problems.

    Attributes:
        needle: The needle, with its haystack.
        index: Its index among the needles of all lengths.
        line: None, as the text is in no file.
    """

    needle: Needle
    index: int
    line: None = None

    @property
    def source(self) -> str:
        return f"needle {self.index + 1}"

    def __len__(self) -> int:
        return len(self.needle)


def _make_blocks(haystack: NeedleSource, options: NeedleOptions) -> Iterator[TextBlock]:
    """Yield all needles in blocks. A block has texts of one length, as many as fit into a forward pass."""
    indexes = count()
    for length in options.lengths:
        # `map` asks its first iterator first. At the end of the needles it stops there, and so wastes no index.
        texts: Iterator[Any] = map(_NeedleText, _make_needles(haystack, options, length), indexes)
        while block_texts := tuple(islice(texts, max(1, MAX_PASS_TOKENS // length))):
            yield TextBlock(block_texts[0].index, block_texts)


# What the model does on needles


class _NeedleResult(NamedTuple):
    """Hold what a model and its heads do on one needle.

    Attributes:
        needle: The needle, with its haystack.
        is_written: Whether the model writes each token of the answer, (token,).
        n_copied: The number of written tokens that each head copies from the needle and from the decoy,
            (layer, head, needle or decoy); -1 for a head that the layer does not have.
        is_finite: Whether the model computes neither NaN nor infinity.
    """

    needle: Needle
    is_written: NDArray[np.bool_]
    n_copied: Integers
    is_finite: bool

    @property
    def n_copied_by_chance(self) -> float:
        """Return how many tokens a head copies on average if each query has its largest weight on a random key."""
        # The query before a token predicts it. Its keys are all tokens up to the query itself, (token,).
        n_keys = len(self.needle) - len(self.is_written) + np.arange(len(self.is_written))
        return float((self.is_written / n_keys).sum())


@dataclass(kw_only=True, eq=False)
class NeedleSums(PartialSums):
    """Hold what a model and its heads do on each needle that was measured.

    Attributes:
        results: The results in the order of the needles.
    """

    results: tuple[_NeedleResult, ...] = ()


class NeedleMeasurer(Measurer[NeedleSums]):
    """Run a model on needles, and find which tokens of the answers it writes and which of these each head copies."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model

    def start(self, block: TextBlock) -> NeedleSums:
        """Return the sums of a block of which nothing is measured yet."""
        return NeedleSums()

    def batches(self, block: TextBlock) -> Sequence[Sequence[Any]]:
        """Return all needles of a block together."""
        return [block.texts]

    def measure(self, batch: Sequence[_NeedleText]) -> list[_NeedleResult]:
        """Return what the model and its heads do on each needle; all texts are of one length."""
        import torch

        from attnscope.core.attention.probes import HeadRecorder
        from attnscope.core.attention.row_samples import rows_of

        # Each text ends with its answer; `answers` is (needle, token). The query before a token predicts it, so the
        # model does not need the last token.
        needles = [text.needle for text in batch]
        answers = np.stack([needle.answer for needle in needles])
        n_answer = answers.shape[1]
        ids = torch.from_numpy(np.stack([needle.ids[:-1] for needle in needles]))
        queries = torch.arange(ids.shape[1] - n_answer, ids.shape[1])
        # Run the model. For each head and each of these queries, keep the key with the largest weight.
        probe = HeadRecorder(lambda call: rows_of(call, queries).argmax(-1).cpu(), kinds=("decoder",))
        with torch.no_grad():
            logits = self._model.outputs(Batch(ids), probe, last=n_answer).logits
        assert logits is not None  # the model has a language-model head
        # Whether the model writes each token of the answers, (needle, token).
        is_written = logits.argmax(-1).cpu().numpy() == answers
        is_finite = logits.isfinite().all(-1).all(-1).tolist()

        # The positions of the answer's tokens in the needle and in the decoy, (needle, needle or decoy, token).
        positions = np.stack([[needle.answer_positions, needle.decoy_positions] for needle in needles])
        # Layer -> the positions of the keys with the largest weights, (needle, head, token).
        keys_by_layer = probe.maps["decoder"]
        n_heads = max(keys.shape[1] for keys in keys_by_layer.values())
        n_copied = np.full((len(needles), max(keys_by_layer) + 1, n_heads, 2), -1, np.int64)
        for layer, keys in keys_by_layer.items():
            # Compare as (needle, head, needle or decoy, token), and count over the tokens.
            is_hit = keys.numpy()[:, :, None] == positions[:, None]
            n_copied[:, layer, : keys.shape[1]] = (is_hit & is_written[:, None, None]).sum(-1)
        return list(map(_NeedleResult, needles, is_written, n_copied, is_finite))

    def add(self, part: NeedleSums, batch: Sequence[_NeedleText], result: list[_NeedleResult]) -> None:
        """Add the results of a batch to the sums of its block, except for needles with NaN or infinity."""
        for text, needle_result in zip(batch, result, strict=True):
            if needle_result.is_finite:
                part.n_texts += 1
                part.n_tokens += len(text)
                part.results += (needle_result,)
            else:
                # ("", None) = in the last hidden states of the unchanged model, see `failures.NanOrigin`.
                part.broken[text.index] = ("", None)


# Tests and tables


def _test_heads(needle_sums: NeedleSums, options: NeedleOptions) -> dict[str, Table]:
    """Test the scores of all heads.

    Returns:
        The table `heads`, with the scores of all heads, and the table `roles`, with the heads that pass the test.
    """
    names = options.measure_names
    # From (needle, layer, head, needle or decoy) to (needle, head, needle or decoy), without the heads of -1.
    n_copied = np.stack([result.n_copied for result in needle_sums.results])
    layers, heads = np.nonzero(n_copied[0, :, :, 0] >= 0)
    sums, uniform = _sum_over_needles(needle_sums, names, n_copied[:, layers, heads])

    # Values and ends of intervals are (head, measure).
    values = sums.ratio()
    uniform_values = np.broadcast_to(uniform.ratio(), values.shape)
    # A head may copy all tokens of a needle or none. So needles are the independent units: `dependence` is 1.
    low, high = sums.share_interval(hits=True, dependence=1)
    # Test each head, (head,): its score must be above the threshold, and by a margin above the decoy and chance. The
    # first two measures are "retrieval", the score, and "decoy".
    score, decoy = 0, 1
    baseline = np.fmax(values[:, decoy], uniform_values[:, score])
    limit = np.fmax(options.threshold, baseline + np.maximum(MARGIN * (1 - baseline), MIN_MARGIN))
    n_texts = sums.sample().n_texts[:, score]
    p = sums[:, score].share_p_above(limit, hits=True, dependence=1)
    p = np.where(n_texts < MIN_TESTED_TEXTS, np.nan, p)
    q = benjamini_hochberg(p)

    has_role = q <= LEVEL
    table = make_heads_table(
        (["decoder"] * len(heads), layers, heads),
        [Column(name, _describe_measure(name), "share", (0, 1)) for name in names],
        roles=np.where(has_role, RETRIEVAL, "").tolist(),
        sink_shares=np.full(len(heads), np.nan),
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
                "tentative": min(n_texts[head], needle_sums.n_texts) < MIN_FIRM_TEXTS,
                "effective_texts": n_texts[head],
            }
        )
    return {"heads": table, "roles": Table.of(ROLE_EVIDENCE_COLUMNS, roles)}


def _sum_over_needles(
    needle_sums: NeedleSums, names: Sequence[str], n_copied: Integers
) -> tuple[RunningSums, RunningSums]:
    """Return the sums of the measures over needles: of the heads, (head, measure), and of chance, (1, measure).

    Args:
        needle_sums: The results on the needles.
        names: The names of the measures.
        n_copied: The number of tokens that each head copies, (needle, head, needle or decoy).
    """
    # The number of tokens of each needle that a measure counts, (needle, 1, measure). A measure such as
    # "retrieval_at_25" only counts needles at this depth.
    counts = np.zeros((len(needle_sums.results), 1, len(names)))
    for row, result in enumerate(needle_sums.results):
        depth_name = f"retrieval_at_{format_percent(result.needle.depth)}"
        counts[row] = np.isin(names, ["retrieval", "decoy", depth_name]) * len(result.is_written)
    # For each measure, the index on the last axis of `n_copied`: 1 for "decoy", 0 for all others, (measure,).
    needle_or_decoy = (np.array(names) == "decoy").astype(np.int64)
    sums = RunningSums((n_copied.shape[1], len(names)))
    sums.add(n_copied[..., needle_or_decoy] * (counts > 0), counts)
    # Chance is the same for all heads.
    n_by_chance = np.array([result.n_copied_by_chance for result in needle_sums.results])
    uniform = RunningSums((1, len(names)))
    uniform.add(n_by_chance[:, None, None] * (counts > 0), counts)
    return sums, uniform


def _make_written_table(needle_sums: NeedleSums) -> Table:
    """Return the share of answer tokens that the model writes: a row for all needles, and one per length and depth."""
    # Group needles by (length, depth). ALL_LENGTHS is less than any length, so the group of all needles comes first.
    groups = {(ALL_LENGTHS, np.nan): [result.is_written for result in needle_sums.results]}
    for needle, is_written, *_ in needle_sums.results:
        groups.setdefault((len(needle), needle.depth), []).append(is_written)
    rows = []
    for (length, depth), group in sorted(groups.items()):
        is_token_written = np.stack(group)  # (needle, token)
        n_needles, n_tokens = is_token_written.shape
        sums = RunningSums()
        sums.add(is_token_written.sum(1), np.full(n_needles, n_tokens))
        # Needles are the independent units, as for heads.
        low, high = sums.share_interval(hits=True, dependence=1)
        copied = Estimate(
            float(sums.ratio()), float(low), float(high), count=float(is_token_written.size)
        )
        rows.append({"length": length, "depth": depth, "copied": copied})
    return Table.of(Heads.TABLES["written"], rows)


def _describe_needles(needle_sums: NeedleSums, texts: Texts | None) -> dict[str, Any]:
    """Return the `corpus` of the record: the needles, and the texts that hide them (None = random tokens)."""
    haystack: dict[str, Any] = {"sources": ["random tokens"], "problems": []}
    if texts is not None:
        haystack = describe_texts(texts)
    # Hash the token ids as 8 little-endian bytes each, so that the hash is the same on every machine.
    digest = hashlib.sha256()
    for result in needle_sums.results:
        digest.update(result.needle.ids.astype("<i8").tobytes())
    return {
        "of": NEEDLES,
        "sources": haystack["sources"],
        "n_texts": needle_sums.n_texts,
        "n_tokens": needle_sums.n_tokens,
        "sha256": digest.hexdigest(),
        "problems": haystack["problems"],
    }


def _describe_options(options: NeedleOptions, n_answer: int, *, is_random: bool) -> dict[str, Any]:
    """Return the choices of the study and the meaning of its role, as the record lists them.

    Args:
        options: The choices.
        n_answer: The number of tokens in an answer: fewer than `options.answer` if the vocabulary is small.
        is_random: Whether needles and haystacks are random tokens.
    """
    meaning = "attends to the token in the needle that the model writes (Wu 2024)"
    return {
        "probe": "needle",
        **CRITERIA,
        "lengths": list(options.lengths),
        "depths": list(options.depths),
        "n_needles": options.n,
        "n_answer": n_answer,
        "needle": "random tokens" if is_random else "a sentence of random words",
        "roles": {RETRIEVAL: {"what": meaning, "measure": "retrieval", "threshold": options.threshold}},
        "measures": list(options.measure_names),
    }


def _describe_measure(name: str) -> str:
    """Return the meaning of a measure, for the column of the measure in the table of heads."""
    if name == "decoy":
        return "as retrieval, of a second needle, which answers another question, for the place that is attended to"
    meaning = (
        "share of needle tokens that the model writes while the head attends most to that very token"
    )
    # The depth is empty for "retrieval", the score over all depths.
    _, _, depth = name.partition("_at_")
    if depth:
        meaning += f"; of needles around {depth}% of the haystack"
    return meaning
