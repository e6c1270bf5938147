"""Find the heads that carry a behaviour, by patching them on pairs of texts. Forward passes are left to `runs`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr

from attnscope.core.attention.probes import Place
from attnscope.core.intervals import benjamini_hochberg
from attnscope.core.interventions import By
from attnscope.core.pairs import pair_means, shares_of_total, weakest_total
from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus.formats import Problem
from attnscope.corpus.pairs import Pairs
from attnscope.errors import AttnscopeError
from attnscope.models.inside.linear_runs import require_gradients
from attnscope.models.model import Model
from attnscope.questions.patch import ATTRIBUTION, LOGITS, Patching, PatchOptions, head_columns
from attnscope.results.table import Table
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.texts import Progress, Report, UnknownWords
from attnscope.studies.patch.pairs import PairBatch, ReadPair, batches_of, read_pairs, spell_answer
from attnscope.studies.patch.runs import Change, PairRuns, Unit

Floats = NDArray[np.float64]

Route = tuple[Unit, Unit | None, By]
"""A path from a head to what reads it, and through what; None and z: to the logits."""


@with_plain_torch
def patch(
    model: Model,
    pairs: Pairs | str | Path | Sequence[str | Path | Mapping[str, Any]],
    options: PatchOptions | None = None,
    report: Report | None = None,
) -> Patching:
    """Patch heads on pairs, and measure how the logit difference right - wrong changes.

        model = attnscope.load("./SmolLM2-135M")
        result = attnscope.patch(model, "pairs.jsonl")
        result["heads"]["effect"]             # (head,), beside effect_low and effect_high
        result.save("patching.npz")

    An effect is positive where the head carries the behaviour, in both directions. Each pair is run once on either
    side. The changed run is then resumed at the layer of each head. Effects are exact; key/value heads of grouped
    queries are patched once for all heads that read them (the column `patched_with`).

    An answer is one token: the last token of the text predicts it, or the mask of a masked model. Answers of a
    classifier are its classes; one of tokens is asked at the first token in which the texts differ. The score of
    several answers is the logarithm of the sum of exp over their logits, so that a difference is the log odds of the
    right answers against the wrong ones.

    Pairs that cannot be patched are left out, and `corpus["problems"]` says why. An interruption (KeyboardInterrupt)
    ends the study with the pairs up to there.

    Args:
        model: A decoder, a classifier, or an encoder with its head for masked words.
        pairs: The pairs; see `attnscope.Pairs`.
        options: What is patched.
        report: Called after each batch of pairs.

    Raises:
        AttnscopeError: No pair can be patched, or the model has no answers, or no such class.
    """
    listed = pairs if isinstance(pairs, Pairs) else Pairs(pairs)
    return _Study(model, listed, options or PatchOptions(), report).run()


class _Study:
    """Run one study, batch by batch. Effects are (pair, unit), NaN where nothing was measured."""

    def __init__(self, model: Model, pairs: Pairs, options: PatchOptions, report: Report | None) -> None:
        self._model = model
        self._pairs = pairs
        self._options = options
        self._report = report
        # Read the pairs, and refuse options that do not fit them.
        self._read, problems = read_pairs(model, pairs, options.answer)
        self._problems = [*pairs.problems, *problems]
        if not self._read:
            raise AttnscopeError(
                f"no pair can be patched: {self._problems[0]}",
                "a pair has two texts of as many tokens, and answers of one token",
            )
        self._chosen = options.choice.within(model.info)
        self._estimates = options.attribution is not None
        if self._estimates:
            require_gradients(model)
        lengths = sorted({len(pair.clean) for pair in self._read})
        if options.positions and len(lengths) > 1:
            raise AttnscopeError(
                f"pairs of {lengths[0]} to {lengths[-1]} tokens have no common positions",
                "give pairs of one length, or leave out --positions",
            )
        self._n_positions = lengths[0] if options.positions else 0
        self._units: list[Unit] = []
        self._readers: dict[By, list[Unit]] = {}
        n_pairs = len(self._read)
        self._clean = np.full(n_pairs, np.nan)
        self._corrupt = np.full(n_pairs, np.nan)
        self._is_done = np.zeros(n_pairs, np.bool_)

    def run(self) -> Patching:
        """Run all that the options ask for."""
        # Measure all pairs, with `attribution` the heads with the largest estimates once more.
        every = range(len(self._read))
        complete = self._each_batch("patching", every, self._measure)
        if complete and self._options.attribution:
            complete = self._each_batch("exact", every, self._measure_best)

        # Pairs on which all that was measured is a number.
        self._is_tried = np.ones(len(self._units), np.bool_)
        if self._options.attribution:
            self._is_tried = ~np.isnan(self._effects).all(0)
        is_sound = np.isfinite(self._clean + self._corrupt) & np.isfinite(self._effects[:, self._is_tried]).all(1)
        if self._estimates:
            is_sound &= np.isfinite(self._estimated).all(1)
        self._sound = np.flatnonzero(is_sound & self._is_done)
        for number in np.flatnonzero(~is_sound & self._is_done).tolist():
            pair = self._read[number].pair
            self._problems.append(Problem(pair.source, pair.line, "the model computes NaN or infinity"))
        if not len(self._sound):
            raise AttnscopeError("on every pair the model computes NaN or infinity", "try --dtype float32")
        # Tables of heads, totals and pairs; paths if asked for.
        self._observations = Observations([self._read[number] for number in self._sound.tolist()])
        self._total = (self._clean - self._corrupt)[self._sound]

        tables = {"heads": self._heads(), "whole": self._whole(), "pairs": self._table_of_pairs()}
        paths = self._paths() if complete and self._options.paths else None
        if paths is not None:
            tables["paths"] = paths
        rows = [row for row, unit in enumerate(self._units) for _ in unit.heads]
        arrays: dict[str, NDArray[Any]] = {"by_pair": self._effects[self._sound].T[rows].astype(np.float32)}
        if self._n_positions:
            labels = self._read[int(self._sound[0])].clean.labels
            tables["positions"] = Table.of_arrays(Patching.TABLES["positions"], token=labels)
            arrays |= self._positions(rows)
        return Patching(self._run(), self._corpus(complete), self._describe(), tables, arrays)

    def _each_batch(self, step: str, numbers: Iterable[int], measure: Callable[[PairRuns, PairBatch], None]) -> bool:
        """Measure batch by batch; return False if it was interrupted after the first."""
        n_done = 0
        n_tokens = 0
        batches = batches_of(self._model, self._read, numbers)
        n_pairs = sum(len(batch.numbers) for batch in batches)
        for batch in batches:
            try:
                with torch.no_grad():
                    measure(PairRuns(self._model, batch, self._options.direction), batch)
                n_done += len(batch.numbers)
                n_tokens += 2 * batch.clean.ids.numel()
                if self._report is not None:
                    self._report(Progress(n_done, n_tokens, n_done / n_pairs, step))
            except KeyboardInterrupt:
                if not n_done:
                    raise
                return False
        return True

    def _measure(self, runs: PairRuns, batch: PairBatch) -> None:
        """Measure every head on a batch, or with `exact` estimate all."""
        if not self._units:
            self._choose_units(runs)
        self._clean[batch.numbers] = runs.clean.numpy()
        self._corrupt[batch.numbers] = runs.corrupt.numpy()
        if self._estimates:
            by_token = runs.attribution(self._options.by)
            for column, unit in enumerate(self._units):
                self._estimated[batch.numbers, column] = by_token[unit.place][:, unit.patched].sum((1, 2)).numpy()
        if not self._options.attribution:
            self._measure_units(runs, batch, np.arange(len(self._units)))

    def _measure_best(self, runs: PairRuns, batch: PairBatch) -> None:
        """Measure the heads with the largest estimates on a batch."""
        # A pair on which the model computes no number is left out: it must not rank heads.
        estimates = self._estimated[np.isfinite(self._estimated).all(1)]
        if len(estimates):
            self._measure_units(runs, batch, _largest(estimates, self._options.attribution))

    def _measure_units(self, runs: PairRuns, batch: PairBatch, columns: NDArray[np.int64]) -> None:
        sets = [[Change(self._units[column], self._options.by)] for column in columns]
        effects = runs.effects(sets)
        self._effects[np.ix_(batch.numbers, columns)] = effects.T.numpy()
        if self._n_positions:
            self._measure_positions(runs, batch, columns)
        self._is_done[batch.numbers] = True

    def _measure_positions(self, runs: PairRuns, batch: PairBatch, columns: NDArray[np.int64]) -> None:
        units = [self._units[column] for column in columns]
        # What a decoder computes before the first token that differs is the same in both runs.
        differ = (batch.clean.ids != batch.corrupt.ids).any(0).nonzero()
        first = int(differ[0]) if "decoder" in self._model.info.kinds else 0
        positions = np.arange(first, self._n_positions)
        by = self._options.by
        sets = [[Change(unit, by, slice(token, token + 1))] for unit, token in product(units, positions.tolist())]
        by_position = runs.effects(sets).numpy().reshape(len(units), len(positions), -1)
        self._position_effects[np.ix_(batch.numbers, columns, positions)] = by_position.transpose(2, 0, 1)

    def _choose_units(self, runs: PairRuns) -> None:
        """Choose the heads that the options name, and make arrays for their effects."""
        chosen = self._chosen

        def is_wanted(unit: Unit) -> bool:
            layer = unit.place[1]
            if chosen.picked is not None:
                return any((layer, head) in chosen.picked for head in unit.heads)
            return layer in chosen.layers and any(head in chosen.heads for head in unit.heads)

        self._units = [unit for unit in runs.units(self._options.by) if is_wanted(unit)]
        self._readers = {by: runs.units(by) for by in ("query", "key", "value")}
        if not self._units:
            raise AttnscopeError(f"{self._model.info.name} has no such heads", "choose other layers or heads")
        shape = (len(self._read), len(self._units))
        self._effects = np.full(shape, np.nan)
        self._estimated = np.full(shape, np.nan)
        self._position_effects = np.zeros((*shape, self._n_positions))

    # Path patching

    def _paths(self) -> Table | None:
        """Patch paths between the strongest heads, and from each of them to the logits."""
        # Choose the strongest heads, and list the paths between them.
        strongest = _largest(self._effects[self._sound], self._options.paths)
        readers = self._readers_among([self._units[column] for column in strongest])
        paths: list[Route] = []
        for sender, reads in readers.items():
            paths += [(sender, None, "z"), *((sender, unit, by) for unit, by in reads)]
        # Change what one head writes, and see how far each reader and the logits carry it.
        effects = np.full((len(self._read), len(paths)), np.nan)

        def measure(runs: PairRuns, batch: PairBatch) -> None:
            columns = []
            for sender, reads in readers.items():
                reached, to_logits = runs.isolate(sender)
                received = runs.effects([[Change(unit, by)] for unit, by in reads], reached)
                columns += [to_logits, *received]
            effects[batch.numbers] = torch.stack(columns, 1).numpy()

        if not self._each_batch("paths", self._sound.tolist(), measure):
            return None
        return Table.of_arrays(
            Patching.TABLES["paths"],
            sender=[sender.name for sender, _, _ in paths],
            receiver=[LOGITS if receiver is None else receiver.name for _, receiver, _ in paths],
            by=["" if by == "z" else by for _, _, by in paths],
            **self._observations.effects_and_shares(effects[self._sound], self._total, q="q"),
        )

    def _readers_among(self, senders: Sequence[Unit]) -> dict[Unit, list[tuple[Unit, By]]]:
        """Return what reads each head, through query, key and value, among the same heads of later layers."""
        unit_of: dict[tuple[By, Place, int], Unit] = {}
        for by, units in self._readers.items():
            unit_of |= {(by, unit.place, head): unit for unit in units for head in unit.heads}
        readers: dict[Unit, list[tuple[Unit, By]]] = {}
        for sender in senders:
            kind, layer = sender.place
            later = [unit for unit in senders if unit.place[0] == kind and unit.place[1] > layer]
            reads = [(unit_of[by, unit.place, unit.heads[0]], by) for unit, by in product(later, self._readers)]
            readers[sender] = list(dict.fromkeys(reads))
        return readers

    # From effects to tables

    def _heads(self) -> Table:
        """Return the effect of each head; those that are patched together have the same."""
        tried = self._is_tried
        columns = head_columns(self._options.by, self._options.direction)
        known = self._observations.effects_and_shares(self._effects[np.ix_(self._sound, tried)], self._total)
        values = {}
        for name, numbers in known.items():
            values[name] = np.full(len(tried), 0.0 if name.endswith("_count") else np.nan)
            values[name][tried] = numbers
        if self._estimates:
            columns.append(ATTRIBUTION)
            means, _ = self._observations.means(self._estimated[self._sound])
            values |= _columns("attribution", means)
        # Heads that share a key/value head have one effect.
        rows = [row for row, unit in enumerate(self._units) for _ in unit.heads]
        units = [self._units[row] for row in rows]
        return Table.of_arrays(
            columns,
            kind=[unit.place[0] for unit in units],
            layer=[unit.place[1] for unit in units],
            head=[head for unit in self._units for head in unit.heads],
            patched_with=[unit.name for unit in units],
            **{name: numbers[rows] for name, numbers in values.items()},
        )

    def _whole(self) -> Table:
        numbers = np.stack([self._clean[self._sound], self._corrupt[self._sound], self._total], 1)
        means, _ = self._observations.means(numbers)
        quantities = ["clean", "corrupt", "total"]
        counts = [self._observations.n] * 3
        columns = _columns("value", means)
        return Table.of_arrays(Patching.TABLES["whole"], quantity=quantities, value_count=counts, **columns)

    def _table_of_pairs(self) -> Table:
        rows = []
        for number in self._sound.tolist():
            read = self._read[number]
            row = {name: getattr(read.pair, name) for name in ("source", "line", "clean", "corrupt")}
            for side in ("right", "wrong"):
                row[side] = ", ".join(spell_answer(self._model, answer) for answer in getattr(read, side))
            row |= {"clean_difference": self._clean[number], "corrupt_difference": self._corrupt[number]}
            rows.append(row)
        return Table.of(Patching.TABLES["pairs"], rows)

    def _positions(self, rows: Sequence[int]) -> dict[str, Floats]:
        """Return the mean effect of each position alone and its interval, each (head, position)."""
        effects = self._position_effects[self._sound].reshape(len(self._sound), -1)
        means, _ = self._observations.means(effects)
        parts = means.reshape(len(self._units), self._n_positions, 3)[rows]
        return _columns("position_effects", parts)

    # What the result says of itself

    def _run(self) -> dict[str, Any]:
        notes = []
        n_pairs, n_observations = len(self._sound), self._observations.n
        reason = self._observations.why_no_shares(self._total)
        if reason:
            notes.append(reason)
        if n_observations < n_pairs:
            notes.append(
                f"The {n_pairs} pairs count as {n_observations}: some are another with its two texts the other way "
                "round, and such two count as one."
            )
        if not self._model.resumes:
            notes.append("This model cannot be run again from a layer on: every head takes a whole forward.")
        if any(len(unit.heads) > 1 for unit in self._units):
            notes.append(
                f"The {self._options.by} of heads that share a key/value head is patched for all of them together."
            )
        return run_of(self._model.info, notes) | {"kinds": list(self._model.info.kinds)}

    def _corpus(self, complete: bool) -> dict[str, Any]:
        read = [self._read[number] for number in self._sound.tolist()]
        texts = [tokens for pair in read for tokens in (pair.clean, pair.corrupt)]
        return {
            "of": "pairs",
            "sources": list(self._pairs.sources),
            "n_texts": len(read),
            "n_tokens": sum(2 * len(pair.clean) for pair in read),
            "sha256": self._pairs.sha256,
            "problems": [asdict(problem) for problem in self._problems],
            "unknown_words": UnknownWords.of(self._model.tokenizer, texts).note,
            "complete": complete,
        }

    def _describe(self) -> dict[str, Any]:
        agreement = None
        if self._estimates and self._is_tried.sum() > 2:
            means = [each[np.ix_(self._sound, self._is_tried)].mean(0) for each in (self._effects, self._estimated)]
            agreement = float(spearmanr(*means).statistic)
        options = self._options
        return {
            "by": options.by,
            "direction": options.direction,
            "answer": options.answer,
            "exact": options.attribution or None,
            "rank_agreement": agreement,
        }


class Observations:
    """Pairs as independent observations: a pair and its mirror image are one, and their effects are averaged.

    The mirror image of a pair has its two texts the other way round, and tells little that the pair does not.

    Attributes:
        of_pair: The number of the observation of each pair, (pair,), from 0.
        n: How many there are.
    """

    def __init__(self, read: Sequence[ReadPair]) -> None:
        numbers: dict[frozenset[bytes], int] = {}
        self.of_pair = np.array([numbers.setdefault(frozenset(pair.ids), len(numbers)) for pair in read])
        self.n = len(numbers)

    def average(self, values: Floats) -> Floats:
        """Return the means over the pairs of each observation, (observation, quantity), of (pair, quantity)."""
        sums = np.zeros((self.n, values.shape[1]))
        np.add.at(sums, self.of_pair, values)
        return sums / np.bincount(self.of_pair)[:, None]

    def means(self, values: Floats) -> tuple[Floats, Floats]:
        """Return the means of values (pair, quantity) with their intervals, (quantity, 3), and q values of being 0."""
        mean, low, high, p = pair_means(self.average(values))
        return np.stack([mean, low, high], -1), benjamini_hochberg(p)

    def effects_and_shares(self, values: Floats, total: Floats, q: str = "effect_q") -> dict[str, Floats]:
        """Return the columns of effects (pair, quantity), and of their shares of the total, (pair,); NaN = too weak."""
        means, rates = self.means(values)
        shares = np.stack(shares_of_total(self.average(values), self.average(total[:, None])), -1)
        counts = np.full(len(means), float(self.n))
        columns = {**_columns("effect", means), **_columns("share", shares)}
        return {**columns, "effect_count": counts, "share_count": counts, q: rates}

    def why_no_shares(self, total: Floats) -> str:
        """Say why effects have no shares of the total; "" = they have."""
        totals = self.average(total[:, None])
        if self.n < 2:
            return "Effects have no shares of the total effect: one pair does not tell how sure it is."
        if np.isfinite(shares_of_total(totals, totals)[0]).all():
            return ""
        with np.errstate(divide="ignore", invalid="ignore"):
            strength = float(np.abs(totals.mean()) / (totals.std(ddof=1) / np.sqrt(self.n)))
        return (
            f"Effects have no shares of the total effect, which is {strength:.1f} standard errors away from 0. With "
            f"{self.n} pairs it must be {weakest_total(self.n):.1f}, as shares of a weaker one are too often wrong."
        )


def _largest(values: Floats, n: int | None) -> NDArray[np.int64]:
    """Return the columns with the n largest means over pairs, (pair, unit), in their order; unknown ones come last."""
    sizes = np.nan_to_num(np.abs(values.mean(0)), nan=-1)
    return np.sort(np.argsort(-sizes, kind="stable")[:n])


def _columns(name: str, parts: Floats) -> dict[str, Floats]:
    """Return numbers with the ends of their intervals, (..., 3), by the names of columns."""
    return {name: parts[..., 0], f"{name}_low": parts[..., 1], f"{name}_high": parts[..., 2]}
