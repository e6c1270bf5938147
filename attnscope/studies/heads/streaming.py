"""What does a model lose where the key/value heads that retrieve least stream? Loss and needles, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.core.exact.running import RunningSums
from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus import Corpus, CorpusText, Needle, needle_probe
from attnscope.errors import AttnscopeError
from attnscope.models.model import Batch, Model
from attnscope.records import Record
from attnscope.records.ablation import Effect
from attnscope.records.heads.findings import Findings
from attnscope.records.heads.needles import Streamed, StreamingCheck
from attnscope.records.heads.scores import full_attention_values, scores_of
from attnscope.studies.heads.needles import change_of_share, make_hay, share_of_tokens
from attnscope.studies.heads.options import NeedleOptions, StreamingOptions
from attnscope.studies.inputs.texts import Progress, Report, texts_of
from attnscope.studies.running.memory import give_memory_back

if TYPE_CHECKING:
    from attnscope.core.attention.probes import Place
    from attnscope.core.attention.seam import Probe
    from attnscope.core.interventions.replaced import Replacement

LOSS_TOKENS = 2048
"""Tokens at the end of a text whose loss counts: logits of more take more memory than all else."""


@with_plain_torch
def check_streaming(
    model: Model,
    found: Findings,
    texts: Corpus | str | Sequence[str] | Sequence[CorpusText] | None = None,
    options: StreamingOptions | None = None,
    sinks: Record | None = None,
    report: Report | None = None,
) -> StreamingCheck:
    """Gives the key/value heads that retrieve least a sink and a window, and measures what the model loses.

        found = attnscope.load_record("needles/heads.npz")
        check = attnscope.check_streaming(attnscope.load("./model"), found, attnscope.Corpus("book.txt", split="file"))
        check.streamed[0].loss_rise, check.streamed[0].recall

    Heads are ordered by `records.heads.scores.full_attention_values`; those with the smallest values stream first. The
    needles are new ones, of the lengths and depths of the record. The loss is of each next token before the answer.

    Args:
        model: The model that the record is of.
        found: What `retrieval_heads` found.
        texts: What needles are hidden in; None = random tokens, whose loss says little.
        options: Sizes of sink and window, and which shares of the heads stream.
        sinks: What `heads` found of the same model on texts: sink shares order heads that retrieve nothing.
        report: Called after each text.

    Returns:
        Loss and recall of the whole model, and for each share with the chosen heads streaming and with random ones.

    Raises:
        AttnscopeError: The record is of another model or cannot say which heads retrieve, or texts have no room.
    """
    options = options or StreamingOptions()
    if any(found.run.get(name) != getattr(model.info, name) for name in ("sha256", "n_parameters")):
        raise AttnscopeError(
            f"the record is of other weights than {model.info.name}: of {found.run.get('model')}",
            "name the model of the record with --model",
        )
    values = full_attention_values(scores_of(found), None if sinks is None else scores_of(sinks, "resting_share"))
    needles = _needles_like(found, options.n)
    study = _Study(model, values, options)
    hay = make_hay(model, None if texts is None else texts_of(texts), needles)
    n_all = len(needles.lengths) * needles.n
    for length in needles.lengths:
        for needle in needle_probe(hay, needles.n, needles.depths, length, needles.seed, answer=needles.answer):
            study.add(needle)
            give_memory_back()
            if report is not None:
                report(Progress(study.n, study.n_tokens, study.n / n_all, "streaming"))
    return study.result(needles.lengths)


def _needles_like(findings: Findings, n: int) -> NeedleOptions:
    """New needles of the lengths, depths and answers of a record.

    Raises:
        AttnscopeError: It does not say how they were hidden.
    """
    try:
        lengths, depths = tuple(findings.options["lengths"]), tuple(findings.options["depths"])
        seed, answer = int(findings.run.get("seed") or 0) + 1, int(findings.options["n_answer"])
        return NeedleOptions(lengths=lengths, depths=depths, n=max(n, len(depths)), answer=answer, seed=seed)
    except (KeyError, TypeError, ValueError):
        raise AttnscopeError("the record does not say how its needles were hidden", "make it again") from None


class _Study:
    """The sums of each variant: the whole model, and each share of heads that stream, by scores and at random."""

    def __init__(self, model: Model, values: NDArray[np.float64], options: StreamingOptions) -> None:
        self._model, self._options, self._shape = model, options, values.shape
        self._order = np.argsort(values, axis=None, kind="stable")
        self._variants = [(share, by) for share in options.shares for by in ("scores", "random")]
        self._whole_loss, self._whole_recall = RunningSums(), RunningSums()
        self._loss, self._recall, self._rise, self._drop = ([RunningSums() for _ in self._variants] for _ in range(4))
        self._n_heads = [round(share * values.size) for share, _ in self._variants]
        self.n = self.n_tokens = 0

    def add(self, needle: Needle) -> None:
        """Adds a text, read by the whole model and by each variant."""
        from attnscope.core.attention.tiles import attend_lean
        from attnscope.core.interventions.replaced import Replaced

        loss, n_loss, written = self._read(needle, attend_lean)
        n = len(needle.places)
        self._whole_loss.add(loss, n_loss)
        self._whole_recall.add(written, n)
        chance = np.random.PCG64(np.random.SeedSequence([self._options.seed, self.n, 2]))
        random_order = chance.random_raw(self._order.size).argsort(kind="stable")
        for number, (_, by) in enumerate(self._variants):
            chosen = (self._order if by == "scores" else random_order)[: self._n_heads[number]]
            other_loss, _, other_written = self._read(needle, Replaced(self._streaming(chosen), attend_lean))
            self._loss[number].add(other_loss, n_loss)
            self._rise[number].add(other_loss - loss, n_loss)
            self._recall[number].add(other_written, n)
            self._drop[number].add((n + written - other_written) / 2, n)
        self.n, self.n_tokens = self.n + 1, self.n_tokens + len(needle) * (1 + len(self._variants))

    def _streaming(self, chosen: NDArray[np.int64]) -> dict[Place, list[Replacement]]:
        """A sink and a window for the query heads that read some key/value heads."""
        from attnscope.core.interventions.replaced import Replacement
        from attnscope.core.interventions.streaming import attend_streaming

        options, group = self._options, self._model.info.n_heads[0] // self._shape[1]
        compute = partial(attend_streaming, sink_size=options.sink_size, recent_size=options.recent_size)
        replacements: dict[Place, list[Replacement]] = {}
        for layer, kv_head in zip(*np.unravel_index(chosen, self._shape), strict=True):
            heads = tuple(range(kv_head * group, (kv_head + 1) * group))
            replacements.setdefault(("decoder", int(layer)), []).append(Replacement(heads, compute=compute))
        return replacements

    def _read(self, needle: Needle, probe: Probe) -> tuple[float, int, float]:
        """The summed loss of a text and of how many tokens, and how many tokens of the answer are written."""
        import torch

        n = len(needle.places)
        ids = torch.from_numpy(needle.ids)[None].to(self._model.info.device)
        last = min(len(needle) - 1, LOSS_TOKENS + n)
        with torch.no_grad():
            logits = self._model.outputs(Batch(ids[:, :-1]), probe, last=last).logits
        if logits is None or not bool(logits.isfinite().all()):
            raise AttnscopeError(f"{self._model.info.name} gives no finite predictions", "try --dtype float32")
        right = ids[0, -last:]
        loss = torch.nn.functional.cross_entropy(logits[0, :-n].float(), right[:-n], reduction="sum")
        return float(loss), last - n, float((logits[0, -n:].argmax(-1) == right[-n:]).sum())

    def result(self, lengths: tuple[int, ...]) -> StreamingCheck:
        """The check of the texts so far."""
        streamed = tuple(
            Streamed(
                share, by, self._n_heads[number], _mean(self._loss[number]), _mean(self._rise[number]),
                share_of_tokens(self._recall[number]), change_of_share(self._drop[number]),
            )
            for number, (share, by) in enumerate(self._variants)
        )  # fmt: skip
        return StreamingCheck(
            self._model.info.name, self._order.size, self._options.sink_size, self._options.recent_size, lengths,
            self.n, _mean(self._whole_loss), share_of_tokens(self._whole_recall), streamed,
        )  # fmt: skip


def _mean(sums: RunningSums) -> Effect:
    """Nats per token, with Student's interval over texts."""
    low, high = sums.interval()
    return Effect(float(sums.ratio()), float(low), float(high), float(sums.total("c")))
