"""Which heads find things in long texts? Needles in haystacks in, retrieval scores of all heads out."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.exact.multiple_tests import benjamini_hochberg
from attnscope.core.plain_torch import with_plain_torch
from attnscope.core.sums import RunningSums
from attnscope.corpus import DEPTH_TOKENS, Corpus, CorpusText, Hay, Needle, depth_range, needle_probe, word_ids
from attnscope.errors import AttnscopeError, amount
from attnscope.host import delay_interrupts
from attnscope.models.info import require_length
from attnscope.models.model import Batch, Model, example_tokens
from attnscope.questions.heads import ROLES, Heads
from attnscope.questions.needles import ALL
from attnscope.report.wording import NEEDLES
from attnscope.results.table import Column, Estimate, Table
from attnscope.studies.failures import add_steps
from attnscope.studies.heads.options import RETRIEVAL, NeedleOptions, write_percent
from attnscope.studies.heads.roles import FEWEST_TEXTS, LEAST_MARGIN, LEAST_TEXTS, LEVEL, MARGIN
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.texts import (
    Progress,
    Report,
    Texts,
    problems_of,
    scale_report,
    sources_of,
    special_ids,
    texts_of,
)
from attnscope.studies.run import Room

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention.probes import Place

PASS_TOKENS = 8192
"""Tokens of a forward pass: as many texts as fit, at least one."""

_TEXT_TIMES = 8
"""At most this many times the longest haystack is read of a corpus."""

Places = Sequence[tuple[int, int]]
"""(layer, head) of each."""


@with_plain_torch
def retrieval_heads(
    model: Model,
    corpus: Corpus | str | Sequence[str] | Sequence[CorpusText] | None = None,
    options: NeedleOptions | None = None,
    report: Report | None = None,
) -> Heads:
    """Finds the heads that a model copies with from far back in a text.

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
        options: What is hidden, and where; whether heads are taken out.
        report: Called after each pass.

    Returns:
        The findings: `corpus["of"]` is "needles", and each text is a needle.

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
    study = _Study(model, _make_hay(model, texts, options), options)
    n_passes = 1 + options.ablate
    findings = study.run(texts, scale_report(report, 0, n_passes))
    step = scale_report(report, 1, n_passes)
    steps = [("--causal", lambda record: study.take_heads_out(record, step))] if options.ablate else []
    return add_steps(findings, steps)


def _make_hay(model: Model, corpus: Texts | None, options: NeedleOptions) -> Hay:
    """What needles are hidden in.

    Raises:
        AttnscopeError: The vocabulary is not known, or there is no text.
    """
    tokenizer, special = model.tokenizer, special_ids(model)
    ordinary = np.array(tokenizer.ordinary_ids(), np.int64)
    if not len(ordinary):
        raise AttnscopeError(f"the vocabulary of {model.info.name} is not known", "needles are made of its tokens")
    example = example_tokens(tokenizer)
    before = tuple(example.ids[: int(np.flatnonzero(~example.special)[0])].tolist())
    if corpus is None:
        return Hay(ordinary, before=before)

    def encode(text: str) -> list[int]:
        return [number for number in tokenizer.encode(text).ids.tolist() if number not in special]

    n_wanted = _TEXT_TIMES * max(options.lengths)
    ids: list[int] = []
    for text in corpus:
        ids += text.ids or () if text.text is None else encode(text.text + "\n")
        if len(ids) >= n_wanted:
            break
    stack = np.array(ids[:n_wanted], np.int64)
    ends = frozenset(number for number in set(ids) if tokenizer.spell(number).rstrip()[-1:] in tuple(".!?"))
    return Hay(word_ids(ordinary, tokenizer.spell), stack, encode, ends, before)


# What is added up over needles ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Seen:
    """What a model does on some needles.

    Attributes:
        written: Which tokens of the answers the model writes, (needle, token).
        finite: Whether all its scores are numbers, (needle,).
        keys: By place the key that each head gives most, (needle, head, token).
    """

    written: NDArray[np.bool_]
    finite: NDArray[np.bool_]
    keys: Mapping[Place, NDArray[np.int64]]


class _Scores:
    """What is added up over needles, (layer, head, measure)."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.n = self.n_tokens = 0
        self._places: list[Place] = []
        self._sums = self._uniform = RunningSums()
        self._written: dict[tuple[int, float], RunningSums] = {}
        self._n_heads: dict[int, int] = {}

    def add(self, needle: Needle, seen: _Seen, row: int) -> None:
        if not self._places:
            self._places = sorted(seen.keys)
            self._n_heads = {place[1]: seen.keys[place].shape[1] for place in self._places}
            shape = len(self._places), max(self._n_heads.values()), len(self.names)
            self._sums, self._uniform = RunningSums(shape), RunningSums(shape)
        written, n = seen.written[row], len(needle.places)
        s, c, u = (np.zeros(self._sums.shape) for _ in range(3))
        measured = ["retrieval", f"retrieval_at_{write_percent(needle.depth)}", f"retrieval_in_{len(needle)}"]
        columns = [self.names.index(name) for name in measured if name in self.names]
        # A key at random is one of those up to the query.
        chance = float((written / (len(needle) - n + np.arange(n))).sum())
        for number, place in enumerate(self._places):
            keys = seen.keys[place][row]
            heads = slice(0, len(keys))
            s[number][heads, columns] = ((keys == needle.places) & written).sum(1)[:, None]
            s[number][heads, 1] = ((keys == needle.decoys) & written).sum(1)
            c[number][heads, columns] = c[number][heads, 1] = n
            u[number][heads, columns] = u[number][heads, 1] = chance
        self._sums.add(s[None], c[None])
        self._uniform.add(u[None], c[None])
        at = self._written.setdefault((len(needle), needle.depth), RunningSums())
        at.add(np.array([float(written.sum())]), np.array([float(n)]))
        self.n, self.n_tokens = self.n + 1, self.n_tokens + len(needle)

    def written(self) -> Table:
        """Return what the model itself writes, on the whole and by length and depth."""
        whole = RunningSums()
        for sums in self._written.values():
            whole = whole.merge(sums)
        rows: list[dict[str, Any]] = [{"length": ALL, "depth": None, "copied": _share_of_tokens(whole)}]
        for length, depth in sorted(self._written):
            copied = _share_of_tokens(self._written[length, depth])
            rows.append({"length": length, "depth": depth, "copied": copied})
        return Table.of(Heads.TABLES["written"], rows)

    def tables(self, threshold: float) -> dict[str, Table]:
        """Return every head with its scores, and the roles of those that pass the test."""
        values, counts, even = self._sums.ratio(), self._sums.total("c"), self._uniform.ratio()
        low, high = self._sums.share_interval(hits=True, dependence=1)
        baseline = np.fmax(values[..., 1], even[..., 0])
        limit = np.fmax(threshold, baseline + np.maximum(MARGIN * (1 - baseline), LEAST_MARGIN))
        texts = self._sums.effective_texts()[..., 0]
        p = self._sums.share_p_above(limit[..., None], hits=True, dependence=1)[..., 0]
        p = np.where(texts < LEAST_TEXTS, np.nan, p)
        q = benjamini_hochberg(p.ravel()).reshape(p.shape)

        # A row per head; layers may have different numbers of them.
        n_heads = np.array([self._n_heads[layer] for _, layer in self._places])
        rows = np.nonzero(np.arange(p.shape[1]) < n_heads[:, None])
        has_role = (q <= LEVEL)[rows]
        kinds, layers = zip(*(self._places[row] for row in rows[0]), strict=True)
        heads = Table.of_arrays(
            Heads.TABLES["heads"],
            kind=kinds,
            layer=layers,
            head=rows[1],
            role=np.where(has_role, RETRIEVAL, ""),
            resting_share=np.full(len(kinds), np.nan),
        )
        for number, name in enumerate(self.names):
            score, *parts = (array[*rows, number] for array in (values, low, high, even, counts))
            beside = dict(zip(("low", "high", "baseline", "count"), parts, strict=True))
            column = Column(name, _describe_measure(name), "share", (0, 1))
            heads = heads.with_column(column, score, **beside)

        found = tuple(axis[has_role] for axis in rows)
        n_found = len(found[0])
        roles = Table.of_arrays(
            ROLES,
            head=np.flatnonzero(has_role),
            role=[RETRIEVAL] * n_found,
            measure=["retrieval"] * n_found,
            value=values[..., 0][found],
            value_low=low[..., 0][found],
            value_high=high[..., 0][found],
            value_baseline=baseline[found],
            threshold=np.full(n_found, threshold),
            p=p[found],
            q=q[found],
            tentative=np.minimum(texts[found], self.n) < FEWEST_TEXTS,
            active_share=np.full(n_found, np.nan),
            effective_texts=texts[found],
            largest_part=np.full(n_found, np.nan),
        )
        return {"heads": heads, "roles": roles}


def _share_of_tokens(sums: RunningSums) -> Estimate:
    """A share of tokens; needles are the units, as one may be copied as a whole or not at all."""
    low, high = sums.share_interval(hits=True, dependence=1)
    return Estimate(float(sums.ratio()), float(low), float(high), count=float(sums.total("c")))


def _change_of_share(sums: RunningSums) -> Estimate:
    """A difference of two shares of the same needles, from sums of (1 + difference) / 2, which is a share itself."""
    value, low, high = (2 * float(share) - 1 for share in (sums.ratio(), *sums.share_interval(dependence=1)))
    return Estimate(value, low, high, count=float(sums.total("c")))


# The study --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Cut:
    """A needle, which of its tokens the whole model writes, and the sets of heads to be taken out."""

    needle: Needle
    written: NDArray[np.bool_]
    sets: tuple[Places, ...]

    def __len__(self) -> int:
        return len(self.needle)


class _Study:
    """Needles, and the model that is to find them."""

    def __init__(self, model: Model, hay: Hay, options: NeedleOptions) -> None:
        self.model, self.hay, self.options = model, hay, options
        self.room = Room()
        self.n_all = len(options.lengths) * options.n
        self._written: list[NDArray[np.bool_] | None] = []
        self._scores_to_choose = _Scores(options.measure_names)
        # What the first needle refuses is refused before the model runs.
        first = [next(self._needles(length)) for length in options.lengths]
        self.n_answer = len(first[0].places)
        self._crowded = [len(needle) for needle in first if self._overlap(needle.room)]

    def _needles(self, length: int) -> Iterator[Needle]:
        options = self.options
        return needle_probe(self.hay, options.n, options.depths, length, options.seed, answer=options.answer)

    def _overlap(self, room: int) -> bool:
        ranges = [depth_range(depth, room) for depth in sorted(self.options.depths)]
        return any(following <= last for (_, last), (following, _) in pairwise(ranges))

    def _batches(self) -> Iterator[Sequence[Needle]]:
        for length in self.options.lengths:
            needles = self._needles(length)
            while batch := tuple(islice(needles, max(1, PASS_TOKENS // length))):
                yield batch

    def run(self, texts: Texts | None, report: Report | None) -> Heads:
        """Scores of all heads; an interruption ends it, and what was done counts.

        `texts` are what haystacks are made of.
        """
        scores = _Scores(self.options.measure_names)
        digest, complete = hashlib.sha256(), True
        problems: list[dict[str, Any]] = []
        try:
            for needles in self._batches():
                for part, seen in self.room.each(needles, self._look):
                    with delay_interrupts():
                        for row, needle in enumerate(part):
                            digest.update(needle.ids.astype("<i8").tobytes())
                            self._written.append(seen.written[row] if seen.finite[row] else None)
                            if seen.finite[row]:
                                scores.add(needle, seen, row)
                                if self._chooses(len(self._written) - 1):
                                    self._scores_to_choose.add(needle, seen, row)
                            else:
                                reason = f"{self.model.info.name} computes NaN or infinity on it"
                                name = f"needle {len(self._written)}"
                                problems.append({"source": name, "line": None, "reason": reason})
                if report is not None:
                    report(Progress(len(self._written), scores.n_tokens, len(self._written) / self.n_all))
        except KeyboardInterrupt:
            if not scores.n:
                raise
            complete = False
        if not scores.n:
            raise AttnscopeError(f"no needle is left of {len(problems)}: {problems[0]['reason']}", "try float32")
        corpus = {
            "of": NEEDLES,
            "sources": ["random tokens"] if texts is None else sources_of(texts),
            "n_texts": scores.n,
            "n_tokens": scores.n_tokens,
            "sha256": digest.hexdigest(),
            "problems": [*([] if texts is None else problems_of(texts)), *problems],
            "complete": complete,
        }
        tables = {**scores.tables(self.options.threshold), "written": scores.written()}
        copied = float(tables["written"]["copied"][0])
        run = run_of(self.model.info, self._notes(scores.n, copied)) | {"seed": self.options.seed}
        return Heads(run, corpus, self._describe(), tables)

    def _notes(self, n: int, copied: float) -> list[str]:
        notes = []
        if self._crowded:
            notes.append(
                f"Texts of {', '.join(f'{length:,}' for length in self._crowded)} tokens are too short to tell depths "
                f"apart: needles of one depth are spread over {DEPTH_TOKENS} tokens, or all there are."
            )
        if n < FEWEST_TEXTS:
            notes.append(
                f"{amount(n, 'needle is', 'needles are')} few: with fewer than {FEWEST_TEXTS} every role is "
                "tentative, and intervals are wide; --needles 20 or more tell heads apart."
            )
        if copied < self.options.threshold:
            notes.append(
                f"The model writes {copied:.1%} of the needles' tokens: it copies too little for a head to be "
                "one of retrieval, and no roles are given."
            )
        return notes

    def _look(self, needles: Sequence[Needle]) -> _Seen:
        from attnscope.core.attention.probes import Strongest

        n = len(needles[0]) - 1
        probe = Strongest(slice(n - self.n_answer, n), kinds=("decoder",))
        written, finite = self._write(needles, probe)
        keys = {(kind, layer): best.numpy() for kind, by in probe.maps.items() for layer, best in by.items()}
        return _Seen(written, finite, keys)

    def _write(self, needles: Sequence[Needle], probe: Any) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which tokens of the answers are written, (needle, token); and where all scores are numbers."""
        import torch

        ids = torch.from_numpy(np.stack([needle.ids[:-1] for needle in needles]))
        with torch.no_grad():
            logits = self.model.outputs(Batch(ids), probe, last=self.n_answer).logits
        assert logits is not None  # it has a loss
        right = np.stack([needle.answer for needle in needles])
        return logits.argmax(-1).cpu().numpy() == right, logits.isfinite().all(-1).all(-1).cpu().numpy()

    def take_heads_out(self, findings: Heads, report: Report | None) -> Heads:
        """Adds what is still written without the retrieval heads, and without others.

        The heads are chosen on one half of the needles and taken out on the other: on needles on which they were chosen
        for having copied, what is lost without them would be too much.
        """
        heads = findings.table("heads")
        choosing = self._scores_to_choose
        chosen = _with_role(choosing.tables(self.options.threshold)["heads"]) if choosing.n else []
        with_role = _with_role(heads)
        if not chosen:
            if with_role:
                note = "Half of the needles are too few to choose heads on: none was taken out."
                return replace(findings, run=dict(findings.run) | {"notes": [*findings.run["notes"], note]})
            return findings
        places = list(zip(heads["layer"].tolist(), heads["head"].tolist(), strict=True))
        others = [place for place in places if place not in {*chosen, *with_role}]
        n_heads = Counter(layer for layer, _ in places)
        sums = {what: (RunningSums(), RunningSums()) for what in ("retrieval", "random")}
        number = n_tokens = n_cut = 0
        for needles in self._batches():
            cuts: Sequence[_Cut] = [
                _Cut(needle, written, (chosen, draw_others(chosen, others, self.options.seed, at + 1)))
                for at, needle in enumerate(needles, number)
                if (written := self._written[at]) is not None and not self._chooses(at)
            ]
            number += len(needles)
            if not cuts:
                continue
            for part, written_without in self.room.each(cuts, partial(self._cut, n_heads)):
                for (still, change), written in zip(sums.values(), written_without, strict=True):
                    counts = np.full(len(part), float(self.n_answer))
                    still.add(written.sum(1).astype(float), counts)
                    before = np.array([cut.written.sum() for cut in part])
                    change.add((counts + before - written.sum(1)) / 2, counts)  # from 0, all more, to 1, all less
            n_tokens += sum(map(len, cuts))
            n_cut += len(cuts)
            if report is not None:
                report(Progress(number, n_tokens, number / self.n_all, "taking heads out"))
        if not n_cut:
            return findings
        taken = {"retrieval": chosen, "random": draw_others(chosen, others, self.options.seed, 0)}
        names = tuple(f"L{layer}H{head}" for layer, head in chosen)
        n_chosen, n_random = (Counter(layer for layer, _ in taken[what]) for what in ("retrieval", "random"))
        moved = {"retrieval": 0, "random": (n_random - n_chosen).total()}
        rows = [
            {
                "what": what,
                "n_heads": len(taken[what]),
                "heads": ", ".join(names) if what == "retrieval" else "",
                "copied": _share_of_tokens(still),
                "change": _change_of_share(change),
                "n_moved": moved[what],
                "n_needles": n_cut,
            }
            for what, (still, change) in sums.items()
        ]
        return replace(findings, tables={**findings.tables, "without": Table.of(Heads.TABLES["without"], rows)})

    def _chooses(self, number: int) -> bool:
        """Whether heads are chosen on a needle, by its number; else they are taken out on it."""
        turn, depth = divmod(number % self.options.n, len(self.options.depths))
        return (turn + depth) % 2 == 0  # of each depth every other one

    def _cut(self, n_heads: Mapping[int, int], cuts: Sequence[_Cut]) -> list[NDArray[np.bool_]]:
        """What is written without each set of heads: (needle, token) each."""
        import torch

        from attnscope.core.attention.probes import Gate
        from attnscope.core.attention.tiles import attend_lean

        needles, written = [cut.needle for cut in cuts], []
        for sets in zip(*(cut.sets for cut in cuts), strict=True):
            factors: dict[Place, Tensor] = {}  # 1, and 0 for the heads that are taken out of each needle's run
            for row, heads in enumerate(sets):
                for layer, head in heads:
                    factors.setdefault(("decoder", layer), torch.ones(len(sets), n_heads[layer]))[row, head] = 0
            written.append(self._write(needles, Gate(factors, compute=attend_lean))[0])
        return written

    def _describe(self) -> dict[str, Any]:
        options = self.options
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
            "n_answer": self.n_answer,
            "needle": "random tokens" if self.hay.encode is None else "a sentence of random words",
            "roles": {RETRIEVAL: {"what": what, "measure": "retrieval", "threshold": options.threshold}},
            "measures": list(options.measure_names),
        }


def _with_role(heads: Table) -> list[tuple[int, int]]:
    """Return (layer, head) of the heads that have a role."""
    rows = heads.select(heads["role"] != "")
    return list(zip(rows["layer"].tolist(), rows["head"].tolist(), strict=True))


def draw_others(chosen: Places, others: Places, seed: int, number: int) -> list[tuple[int, int]]:
    """As many heads as were chosen, at random from others: from the same layers where these have enough.

    Each `number` is another draw.
    """
    chance = np.random.PCG64(np.random.SeedSequence([seed, number, 1]))
    order = chance.random_raw(max(1, len(others))).argsort(kind="stable").tolist()
    left = [others[at] for at in order if at < len(others)]
    of_same_layers: list[tuple[int, int]] = []
    for layer, _ in chosen:
        head = next((head for head in left if head[0] == layer), None)
        if head is not None:
            left.remove(head)
            of_same_layers.append(head)
    return [*of_same_layers, *left[: len(chosen) - len(of_same_layers)]]


def _describe_measure(name: str) -> str:
    first, _, depth = name.partition("_at_")
    first, _, length = first.partition("_in_")
    what = {
        "retrieval": "share of needle tokens that the model writes while the head attends most to that very token",
        "decoy": "the same with a second needle, which answers another question, for the place that is attended to",
    }[first]
    if depth:
        return f"{what}; of needles around {depth}% of the haystack"
    return f"{what}; in texts of {length} tokens" if length else what
