"""Which heads find things in long texts? Needles in haystacks in, retrieval scores of all heads out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.intervals import benjamini_hochberg
from attnscope.core.plain_torch import with_plain_torch
from attnscope.core.sums import RunningSums
from attnscope.corpus import DEPTH_TOKENS, Corpus, CorpusText, Hay, Needle, depth_range, needle_probe, word_ids
from attnscope.errors import AttnscopeError, amount
from attnscope.host import delay_interrupts
from attnscope.models.info import require_length
from attnscope.models.model import Batch, Model, example_tokens
from attnscope.questions.heads import ROLES, Heads, heads_table
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


# What is seen of needles


@dataclass(frozen=True, eq=False)
class _Seen:
    """What a model does on one needle.

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
        """How many tokens a head copies that looks at one of the keys up to its query at random."""
        n = len(self.written)
        return float((self.written / (len(self.needle) - n + np.arange(n))).sum())


@dataclass(frozen=True, eq=False)
class _Numbered:
    """A needle with its number among all."""

    number: int
    needle: Needle

    def __len__(self) -> int:
        return len(self.needle)


class _Study:
    """Needles, and the model that is to find them.

    Attributes:
        seen: What the model does on each needle, in their order; None = it computes NaN or infinity on it.
        places: Kind of attention and layer of each row of `_Seen.copied`.
        n_heads: How many heads each of these layers has.
    """

    def __init__(self, model: Model, hay: Hay, options: NeedleOptions) -> None:
        self.model, self.hay, self.options = model, hay, options
        self.room = Room()
        self.n_all = len(options.lengths) * options.n
        self.seen: list[_Seen | None] = []
        self.places: list[Place] = []
        self.n_heads: list[int] = []
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

    def _batches(self) -> Iterator[Sequence[_Numbered]]:
        """Yield all needles, as many at once as a pass takes."""
        number = 0
        for length in self.options.lengths:
            needles = self._needles(length)
            while batch := tuple(islice(needles, max(1, PASS_TOKENS // length))):
                yield [_Numbered(number + row, needle) for row, needle in enumerate(batch)]
                number += len(batch)

    def run(self, texts: Texts | None, report: Report | None) -> Heads:
        """Return the scores of all heads; an interruption ends it, and what was done counts.

        `texts` are what haystacks are made of.
        """
        digest, complete = hashlib.sha256(), True
        n_tokens = 0
        try:
            for batch in self._batches():
                for part, seen in self.room.each(batch, self._look):
                    with delay_interrupts():
                        self.seen += seen
                        for each in part:
                            digest.update(each.needle.ids.astype("<i8").tobytes())
                        n_tokens += sum(len(one.needle) for one in seen if one is not None)
                if report is not None:
                    report(Progress(len(self.seen), n_tokens, len(self.seen) / self.n_all))
        except KeyboardInterrupt:
            if not any(self.seen):
                raise
            complete = False
        reason = f"{self.model.info.name} computes NaN or infinity on it"
        broken = [number for number, one in enumerate(self.seen, 1) if one is None]
        problems = [{"source": f"needle {number}", "line": None, "reason": reason} for number in broken]
        done = [one for one in self.seen if one is not None]
        if not done:
            raise AttnscopeError(f"no needle is left of {len(problems)}: {reason}", "try float32")
        corpus = {
            "of": NEEDLES,
            "sources": ["random tokens"] if texts is None else sources_of(texts),
            "n_texts": len(done),
            "n_tokens": n_tokens,
            "sha256": digest.hexdigest(),
            "problems": [*([] if texts is None else problems_of(texts)), *problems],
            "complete": complete,
        }
        tables = {**self._judge(done), "written": _written_table(done)}
        notes = self._notes(len(done), float(tables["written"]["copied"][0]))
        run = run_of(self.model.info, notes) | {"seed": self.options.seed}
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

    def _look(self, batch: Sequence[_Numbered]) -> list[_Seen | None]:
        """Return what the model and its heads do on needles of one length."""
        from attnscope.core.attention.probes import Strongest

        needles = [each.needle for each in batch]
        n = len(needles[0]) - 1
        probe = Strongest(slice(n - self.n_answer, n), kinds=("decoder",))
        written, is_finite = self._write(needles, probe)
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

    def _write(self, needles: Sequence[Needle], probe: Any) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which tokens of the answers are written, (needle, token); and where all scores are numbers."""
        import torch

        ids = torch.from_numpy(np.stack([needle.ids[:-1] for needle in needles]))
        with torch.no_grad():
            logits = self.model.outputs(Batch(ids), probe, last=self.n_answer).logits
        assert logits is not None  # it has a loss
        right = np.stack([needle.answer for needle in needles])
        return logits.argmax(-1).cpu().numpy() == right, logits.isfinite().all(-1).all(-1).cpu().numpy()

    def _judge(self, done: Sequence[_Seen]) -> dict[str, Table]:
        """Return the tables of heads with their scores, and of the roles of those that pass the test."""
        names = self.options.measure_names

        # What each measure adds up, (needle, layer, head, measure): it counts the needles of its depth.
        counts = np.zeros((len(done), len(names)))
        for row, one in enumerate(done):
            mine = ("retrieval", "decoy", f"retrieval_at_{write_percent(one.needle.depth)}")
            counts[row, np.isin(names, mine)] = self.n_answer
        copied = np.stack([one.copied for one in done])
        source = (np.array(names) == "decoy").astype(np.int64)
        weights = (counts > 0)[:, None, None]
        every = np.broadcast_to(counts[:, None, None], (*copied.shape[:3], len(names)))
        chance = np.array([one.by_chance for one in done])[:, None, None, None]
        sums, uniform = RunningSums(every.shape[1:]), RunningSums(every.shape[1:])
        sums.add(copied[..., source] * weights, every)
        uniform.add(np.broadcast_to(chance * weights, every.shape), every)

        # The test, (layer, head).
        values, even = sums.ratio(), uniform.ratio()
        low, high = sums.share_interval(hits=True, dependence=1)
        threshold = self.options.threshold
        baseline = np.fmax(values[..., 1], even[..., 0])
        limit = np.fmax(threshold, baseline + np.maximum(MARGIN * (1 - baseline), LEAST_MARGIN))
        texts = sums.effective_texts()[..., 0]
        p = sums.share_p_above(limit[..., None], hits=True, dependence=1)[..., 0]
        p = np.where(texts < LEAST_TEXTS, np.nan, p)
        q = benjamini_hochberg(p.ravel()).reshape(p.shape)

        # A row per head; layers may have different numbers of them.
        rows = np.nonzero(np.arange(p.shape[1]) < np.array(self.n_heads)[:, None])
        has_role = (q <= LEVEL)[rows]
        kinds, layers = zip(*(self.places[row] for row in rows[0]), strict=True)
        parts = {"value": values, "low": low, "high": high, "baseline": even, "count": sums.total("c")}
        heads = heads_table(
            (kinds, layers, rows[1]),
            [Column(name, _describe_measure(name), "share", (0, 1)) for name in names],
            roles=np.where(has_role, RETRIEVAL, "").tolist(),
            resting=np.full(len(kinds), np.nan),
            **{part: array[rows] for part, array in parts.items()},
        )
        roles = []
        for head, at in enumerate(zip(*rows, strict=True)):
            if has_role[head]:
                score = Estimate(values[*at, 0], low[*at, 0], high[*at, 0], baseline[at])
                evidence = {"value": score, "threshold": threshold, "p": p[at], "q": q[at]}
                evidence |= {"effective_texts": texts[at], "tentative": min(texts[at], len(done)) < FEWEST_TEXTS}
                roles.append({"head": head, "role": RETRIEVAL, "measure": "retrieval", **evidence})
        return {"heads": heads, "roles": Table.of(ROLES, roles)}

    # Heads taken out

    def take_heads_out(self, result: Heads, report: Report | None) -> Heads:
        """Add what is still written without the retrieval heads, and without others.

        The heads are chosen on one half of the needles and taken out on the other: on needles on which they were chosen
        for having copied, what is lost without them would be too much.
        """
        half = [one for number, one in enumerate(self.seen) if one is not None and self._chooses(number)]
        chosen = _with_role(self._judge(half)["heads"]) if half else []
        with_role = _with_role(result.table("heads"))
        if not chosen:
            if not with_role:
                return result
            note = "Half of the needles are too few to choose heads on: none was taken out."
            return replace(result, run={**result.run, "notes": [*result.run["notes"], note]})
        others = [head for head in _places_of(result.table("heads")) if head not in {*chosen, *with_role}]
        sums = {what: (RunningSums(), RunningSums()) for what in ("retrieval", "random")}
        n_tokens = n_cut = 0
        for batch in self._batches():
            cut = [each for each in batch if self.seen[each.number] is not None and not self._chooses(each.number)]
            for part in self.room.each(cut, lambda part: self._cut(part, chosen, others)) if cut else ():
                for (still, change), (before, after) in zip(sums.values(), part[1], strict=True):
                    counts = np.full(len(part[0]), float(self.n_answer))
                    still.add(after, counts)
                    change.add((counts + before - after) / 2, counts)  # from 0, all more, to 1, all less
            n_cut += len(cut)
            n_tokens += sum(map(len, cut))
            if report is not None and cut:
                number = batch[-1].number + 1
                report(Progress(number, n_tokens, number / self.n_all, "taking heads out"))
        if not n_cut:
            return result
        taken = {"retrieval": chosen, "random": draw_others(chosen, others, self.options.seed, 0)}
        rows = [
            {
                "what": what,
                "n_heads": len(taken[what]),
                "heads": ", ".join(f"L{layer}H{head}" for layer, head in chosen) if what == "retrieval" else "",
                "copied": _share_of_tokens(still),
                "change": _change_of_share(change),
                "n_needles": n_cut,
            }
            for what, (still, change) in sums.items()
        ]
        return replace(result, tables={**result.tables, "without": Table.of(Heads.TABLES["without"], rows)})

    def _chooses(self, number: int) -> bool:
        """Return whether heads are chosen on a needle, by its number; else they are taken out on it."""
        turn, depth = divmod(number % self.options.n, len(self.options.depths))
        return (turn + depth) % 2 == 0  # of each depth every other one

    def _cut(
        self, batch: Sequence[_Numbered], chosen: Places, others: Places
    ) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Return how many tokens are written by the whole model and without some heads, (needle,) each.

        First without the chosen heads, then without as many others, which are drawn anew for each needle.
        """
        import torch

        from attnscope.core.attention.probes import Gate
        from attnscope.core.attention.tiles import attend_lean

        needles = [each.needle for each in batch]
        whole = [self.seen[each.number] for each in batch]
        before = np.array([one.written.sum() for one in whole if one is not None])
        drawn = [draw_others(chosen, others, self.options.seed, each.number + 1) for each in batch]
        counts = []
        for sets in ([chosen] * len(batch), drawn):
            factors: dict[Place, Tensor] = {}  # 1, and 0 for the heads that are taken out of each needle's run
            for row, heads in enumerate(sets):
                for layer, head in heads:
                    n_heads = self.n_heads[self.places.index(("decoder", layer))]
                    factors.setdefault(("decoder", layer), torch.ones(len(batch), n_heads))[row, head] = 0
            after = self._write(needles, Gate(factors, compute=attend_lean))[0].sum(1)
            counts.append((before, after))
        return counts

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


def _written_table(done: Sequence[_Seen]) -> Table:
    """Return what the model itself writes, on the whole and by length and depth."""
    cells: dict[tuple[int, float], list[_Seen]] = {}
    for one in done:
        cells.setdefault((len(one.needle), one.needle.depth), []).append(one)
    rows: list[dict[str, Any]] = [{"length": ALL, "depth": None, "copied": _share_written(done)}]
    for length, depth in sorted(cells):
        rows.append({"length": length, "depth": depth, "copied": _share_written(cells[length, depth])})
    return Table.of(Heads.TABLES["written"], rows)


def _share_written(some: Sequence[_Seen]) -> Estimate:
    sums = RunningSums()
    sums.add(np.array([float(one.written.sum()) for one in some]), np.array([float(len(one.written)) for one in some]))
    return _share_of_tokens(sums)


def _share_of_tokens(sums: RunningSums) -> Estimate:
    """Return a share of tokens; needles are the units, as one may be copied as a whole or not at all."""
    low, high = sums.share_interval(hits=True, dependence=1)
    return Estimate(float(sums.ratio()), float(low), float(high), count=float(sums.total("c")))


def _change_of_share(sums: RunningSums) -> Estimate:
    """Return a difference of two shares of the same needles, from sums of (1 + difference) / 2, a share itself."""
    value, low, high = (2 * float(share) - 1 for share in (sums.ratio(), *sums.share_interval(dependence=1)))
    return Estimate(value, low, high, count=float(sums.total("c")))


def _places_of(heads: Table) -> list[tuple[int, int]]:
    """Return (layer, head) of each head."""
    return list(zip(heads["layer"].tolist(), heads["head"].tolist(), strict=True))


def _with_role(heads: Table) -> list[tuple[int, int]]:
    """Return (layer, head) of the heads that have a role."""
    return _places_of(heads.select(heads["role"] != ""))


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
    """Return what a score means."""
    if name == "decoy":
        return "as retrieval, of a second needle, which answers another question, for the place that is attended to"
    meaning = "share of needle tokens that the model writes while the head attends most to that very token"
    _, _, depth = name.partition("_at_")
    return f"{meaning}; of needles around {depth}% of the haystack" if depth else meaning
