"""Which heads find things in long texts? Needles in haystacks in, retrieval scores of all heads out."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from attnscope.core.exact.running import RunningSums
from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus import DEPTH_TOKENS, Corpus, CorpusText, Hay, Needle, depth_range, needle_probe, word_ids
from attnscope.errors import AttnscopeError, amount
from attnscope.host import delay_interrupts
from attnscope.models.info import require_length
from attnscope.models.model import Batch, Model, example_tokens
from attnscope.records.heads.findings import NEEDLES, Findings
from attnscope.records.heads.needles import CopiedWithout, Needles
from attnscope.studies.heads.needle_scores import NeedleScores, Seen, change_of_share, share_of_tokens
from attnscope.studies.heads.options import RETRIEVAL, NeedleOptions
from attnscope.studies.heads.roles import FEWEST_TEXTS, LEAST_TEXTS, LEVEL, MARGIN
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
from attnscope.studies.running.late import add_steps
from attnscope.studies.running.memory import Room, give_memory_back, halves, padded_size

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention.probes import Place

PASS_TOKENS = 8192
"""Tokens of a forward pass: so many texts as fit, at least one."""

_TEXT_TIMES = 8
"""So many times the longest haystack are read of a corpus, at most."""

Floats = NDArray[np.float64]


@with_plain_torch
def retrieval_heads(
    model: Model,
    corpus: Corpus | str | Sequence[str] | Sequence[CorpusText] | None = None,
    options: NeedleOptions | None = None,
    report: Report | None = None,
) -> Findings:
    """Finds the heads that a model copies with from far back in a text.

        found = attnscope.retrieval_heads(model, attnscope.Corpus("book.txt", split="file"))
        found.grid("decoder", "retrieval")     # (layer, head): the share of needle tokens that it copied
        found.needles.copied                   # the share that the model itself wrote

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
            f"{model.info.name} does not write a text on, and so copies nothing",
            "needles are for decoders with their language-model head, such as GPT-2 or Llama",
        )
    for length in options.lengths:
        require_length(model.info, length)
    texts = None if corpus is None else texts_of(corpus)
    study = _Study(model, make_hay(model, texts, options), options)
    n_passes = 1 + options.ablate
    found = study.run(texts, scale_report(report, 0, n_passes))
    step = scale_report(report, 1, n_passes)
    return add_steps(found, [("--causal", lambda known: study.without_heads(known, step))] if options.ablate else [])


def make_hay(model: Model, corpus: Texts | None, options: NeedleOptions) -> Hay:
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


@dataclass(frozen=True, eq=False)
class _Cut:
    """A needle, which of its tokens the whole model writes, and the sets of heads, (layer, head), to be taken out."""

    needle: Needle
    written: NDArray[np.bool_]
    sets: tuple[Sequence[tuple[int, int]], ...]

    def __len__(self) -> int:
        return len(self.needle)


class _Study:
    """Needles, and the model that is to find them."""

    def __init__(self, model: Model, hay: Hay, options: NeedleOptions) -> None:
        self.model, self.hay, self.options = model, hay, options
        self.room = Room()
        self.n_all = len(options.lengths) * options.n
        self._whole: list[NDArray[np.bool_] | None] = []
        self._half = NeedleScores(options)
        # What the first needle refuses is refused before the model runs.
        first = [next(self._needles(length)) for length in options.lengths]
        self.n_answer = len(first[0].places)
        self._crowded = [len(needle) for needle in first if self._overlap(needle.room)]

    def _needles(self, length: int) -> Iterator[Needle]:
        options = self.options
        return needle_probe(
            self.hay, options.n, options.depths, length, options.seed, answer=options.answer
        )  # fmt: skip

    def _overlap(self, room: int) -> bool:
        ranges = [depth_range(depth, room) for depth in sorted(self.options.depths)]
        return any(following <= last for (_, last), (following, _) in pairwise(ranges))

    def _batches(self) -> Iterator[Sequence[Needle]]:
        for length in self.options.lengths:
            n, held = max(1, PASS_TOKENS // length), []
            for needle in self._needles(length):
                held.append(needle)
                if len(held) == n:
                    yield tuple(held)
                    held = []
            if held:
                yield tuple(held)

    # The heads ------------------------------------------------------------------------------------------------------

    def run(self, texts: Texts | None, report: Report | None) -> Findings:
        """Scores of all heads; an interruption ends it, and what was done counts.

        Args:
            texts: What haystacks were made of.
            report: Called after each pass.

        Raises:
            KeyboardInterrupt: Nothing was done yet.
        """
        done = NeedleScores(self.options)
        digest, complete = hashlib.sha256(), True
        problems: list[dict[str, Any]] = []
        try:
            for needles in self._batches():
                for part, seen in self.room.each(needles, self._look, halves, padded_size):
                    with delay_interrupts():
                        for row, needle in enumerate(part):
                            digest.update(needle.ids.astype("<i8").tobytes())
                            self._whole.append(seen.written[row] if seen.finite[row] else None)
                            if seen.finite[row]:
                                done.add(needle, seen, row)
                                if self._chooses(len(self._whole) - 1):
                                    self._half.add(needle, seen, row)
                            else:
                                problems.append(_broken(len(self._whole), self.model))
                give_memory_back()
                if report is not None:
                    report(Progress(len(self._whole), done.n_tokens, len(self._whole) / self.n_all))
        except KeyboardInterrupt:
            if not done.n:
                raise
            complete = False
        if not done.n:
            raise AttnscopeError(f"no needle is left of {len(problems)}: {problems[0]['reason']}", "try float32")
        corpus = {
            "of": NEEDLES,
            "sources": ["random tokens"] if texts is None else sources_of(texts),
            "n_texts": done.n,
            "n_tokens": done.n_tokens,
            "sha256": digest.hexdigest(),
            "shards": ["1/1"],
            "problems": [*([] if texts is None else problems_of(texts)), *problems],
            "complete": complete,
        }
        copied, at = done.copied()
        notes = []
        if self._crowded:
            notes.append(
                f"Texts of {', '.join(f'{length:,}' for length in self._crowded)} tokens are too short to tell depths "
                f"apart: needles of one depth are spread over {DEPTH_TOKENS} tokens, or all there are."
            )
        if done.n < FEWEST_TEXTS:
            notes.append(
                f"{amount(done.n, 'needle is', 'needles are')} few: with fewer than {FEWEST_TEXTS} every role is "
                "tentative, and intervals are wide; --needles 20 or more tell heads apart."
            )
        if copied.value < self.options.threshold:
            notes.append(
                f"The model writes {copied.value:.1%} of the needles' tokens: it copies too little for a head to be "
                "one of retrieval, and no roles are given."
            )
        run = run_of(self.model.info, notes) | {"seed": self.options.seed}
        heads = done.heads(self.options.threshold)
        return Findings(run, corpus, self._describe(done.names), heads, {}, needles=Needles(copied, at))

    def _look(self, needles: Sequence[Needle]) -> Seen:
        from attnscope.core.attention.probes import Strongest

        n = len(needles[0]) - 1
        probe = Strongest(slice(n - self.n_answer, n), kinds=("decoder",))
        written, finite = self._write(needles, probe)
        keys = {(kind, layer): one.numpy() for kind, by in probe.maps.items() for layer, one in by.items()}
        return Seen(written, finite, keys)

    def _write(self, needles: Sequence[Needle], probe: Any) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which tokens of the answers are written, (needle, token); and where all scores are numbers."""
        import torch

        ids = torch.from_numpy(np.stack([needle.ids[:-1] for needle in needles]))
        with torch.no_grad():
            logits = self.model.outputs(Batch(ids), probe, last=self.n_answer).logits
        assert logits is not None  # it has a loss
        right = np.stack([needle.answer for needle in needles])
        return logits.argmax(-1).cpu().numpy() == right, logits.isfinite().all(-1).all(-1).cpu().numpy()

    # Without them ---------------------------------------------------------------------------------------------------

    def without_heads(self, found: Findings, report: Report | None) -> Findings:
        """The same findings, with what is still written without the retrieval heads, and without others.

        The heads are chosen on one half of the needles and taken out on the other: on needles on which they were chosen
        for having copied, what is lost without them would be too much.
        """
        assert found.needles is not None
        half = self._half.heads(self.options.threshold) if self._half.n else ()
        chosen = [(head.layer, head.head) for head in half if head.roles]
        if not chosen:
            if any(head.roles for head in found.heads):
                note = "Half of the needles are too few to choose heads on: none was taken out."
                return replace(found, run=dict(found.run) | {"notes": [*found.run["notes"], note]})
            return found
        known = [(head.layer, head.head) for head in found.heads]
        with_role = {(head.layer, head.head) for head in found.heads if head.roles}
        others = [place for place in known if place not in {*chosen, *with_role}]
        n_heads = Counter(layer for layer, _ in known)
        sums = {what: (RunningSums(), RunningSums()) for what in ("retrieval", "random")}
        number = n_tokens = n_cut = 0
        for needles in self._batches():
            held: list[_Cut] = []
            for needle in needles:
                whole_run, number = self._whole[number], number + 1
                if whole_run is not None and not self._chooses(number - 1):
                    held.append(
                        _Cut(needle, whole_run, (chosen, draw_others(chosen, others, self.options.seed, number)))
                    )
            if not (cuts := cast("Sequence[_Cut]", held)):
                continue
            for part, found_without in self.room.each(cuts, partial(self._cut, n_heads), halves, padded_size):
                for (still, change), written in zip(sums.values(), found_without, strict=True):
                    counts = np.full(len(part), float(self.n_answer))
                    still.add(written.sum(1).astype(float), counts)
                    before = np.array([cut.written.sum() for cut in part])
                    change.add((counts + before - written.sum(1)) / 2, counts)  # from 0, all more, to 1, all less
            n_tokens += sum(map(len, cuts))
            n_cut += len(cuts)
            give_memory_back()
            if report is not None:
                report(Progress(number, n_tokens, number / self.n_all, "taking heads out"))
        if not n_cut:
            return found
        taken = {"retrieval": chosen, "random": draw_others(chosen, others, self.options.seed, 0)}
        names = tuple(f"L{layer}H{head}" for layer, head in chosen)
        wanted, drawn = (Counter(layer for layer, _ in taken[what]) for what in ("retrieval", "random"))
        moved = {"retrieval": 0, "random": (drawn - wanted).total()}
        without = tuple(
            CopiedWithout(
                what, len(taken[what]), names if what == "retrieval" else (), share_of_tokens(still),
                change_of_share(change), moved[what], n_cut,
            )
            for what, (still, change) in sums.items()
        )  # fmt: skip
        return replace(found, needles=replace(found.needles, without=without))

    def _chooses(self, number: int) -> bool:
        """Whether heads are chosen on a needle, by its number; else they are taken out on it."""
        turn, depth = divmod(number % self.options.n, len(self.options.depths))
        return (turn + depth) % 2 == 0  # of each depth every other one

    def _cut(self, n_heads: Mapping[int, int], cuts: Sequence[_Cut]) -> list[NDArray[np.bool_]]:
        """What is written without each set of heads: (needle, token) each."""
        from attnscope.core.attention.probes import Gate
        from attnscope.core.attention.tiles import attend_lean

        needles, found = [cut.needle for cut in cuts], []
        for sets in zip(*(cut.sets for cut in cuts), strict=True):
            gate = Gate(self._factors(sets, n_heads), compute=attend_lean)
            found.append(self._write(needles, gate)[0])
        return found

    @staticmethod
    def _factors(sets: Sequence[Sequence[tuple[int, int]]], n_heads: Mapping[int, int]) -> dict[Place, Tensor]:
        """1, and 0 for the heads that are taken out of each needle's run."""
        import torch

        factors: dict[Place, Tensor] = {}
        for row, heads in enumerate(sets):
            for layer, head in heads:
                place: Place = ("decoder", layer)
                factors.setdefault(place, torch.ones(len(sets), n_heads[layer]))[row, head] = 0
        return factors

    def _describe(self, names: Sequence[str]) -> dict[str, Any]:
        options = self.options
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
            "roles": {RETRIEVAL: {"what": _WHAT_ROLE, "measure": "retrieval", "threshold": options.threshold}},
            "measures": {name: {"what": _what(name), "unit": "share", "range": [0, 1]} for name in names},
        }


def draw_others(
    chosen: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]], seed: int, number: int
) -> list[tuple[int, int]]:
    """As many heads as were chosen, by chance from others, (layer, head): from the same layers where there are enough.

    Args:
        chosen: Those that they stand beside.
        others: What they are drawn from.
        seed: Of the draw.
        number: Which draw; each is another one.
    """
    chance = np.random.PCG64(np.random.SeedSequence([seed, number, 1]))
    order = chance.random_raw(max(1, len(others))).argsort(kind="stable").tolist()
    left = [others[place] for place in order if place < len(others)]
    drawn: list[tuple[int, int]] = []
    for layer, _ in chosen:
        one = next((place for place in left if place[0] == layer), None)
        if one is not None:
            left.remove(one)
            drawn.append(one)
    return [*drawn, *left[: len(chosen) - len(drawn)]]


_WHAT_ROLE = "attends to the token in the needle that the model writes (Wu 2024)"


def _what(name: str) -> str:
    first, _, at = name.partition("_at_")
    meanings = {
        "retrieval": "share of needle tokens that the model writes while the head attends most to that very token",
        "decoy": "the same with a second needle, which answers another question, for the place that is attended to",
    }[first.partition("_in_")[0]]
    if at:
        return f"{meanings}; of needles around {at}% of the haystack"
    length = first.partition("_in_")[2]
    return f"{meanings}; in texts of {length} tokens" if length else meanings


def _broken(number: int, model: Model) -> dict[str, Any]:
    return {"source": f"needle {number}", "line": None, "reason": f"{model.info.name} computes NaN or infinity on it"}
