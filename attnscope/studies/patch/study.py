"""Which heads carry this behaviour? A model and pairs with right and wrong answers in, effects of patched heads out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.exact.multiple_tests import benjamini_hochberg
from attnscope.core.exact.pairs import pair_means, shares_of_total, weakest_total
from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus.formats import Problem
from attnscope.corpus.pairs import Pairs
from attnscope.errors import AttnscopeError
from attnscope.models.model import Model
from attnscope.questions.patch import ATTRIBUTION, LOGITS, Patching, PatchOptions, head_columns
from attnscope.results.table import Table
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.texts import Progress, Report
from attnscope.studies.patch.reading import PairBatch, ReadPair, batches_of, independent, read_pairs

if TYPE_CHECKING:
    from attnscope.core.interventions.patched import By
    from attnscope.studies.patch.runs import PairRuns, Unit

    Route = tuple[Unit, Unit | None, By]  # from a head, to what reads it, through what; z: to the logits


Floats = NDArray[np.float64]

CURVE_POINTS = 16
"""Points of a faithfulness curve between no head and all heads, closer together for few heads."""


@with_plain_torch
def patch(
    model: Model,
    pairs: Pairs | str | Path | Sequence[str | Path | Mapping[str, Any]],
    options: PatchOptions | None = None,
    report: Report | None = None,
) -> Patching:
    """Patches heads on pairs, and measures how the logit difference right - wrong changes.

        model = attnscope.load("./SmolLM2-135M")
        result = attnscope.patch(model, "pairs.jsonl")
        result["heads"]["effect"]             # (head,), beside effect_low and effect_high
        result.save("patching.npz")

    An effect is positive where the head carries the behaviour, in both directions. Each pair is run once on either
    side. The changed run is then resumed at the layer of each head. Effects are exact; key/value heads of grouped
    queries are patched once for all heads that read them (the column `patched_with`).

    An answer is one token: the last token of the text predicts it, or the mask of a masked model. The score of several
    answers is the logarithm of the sum of exp over their logits, so that a difference is the log odds of the right
    answers against the wrong ones.

    Pairs that cannot be patched are left out, and `corpus["problems"]` says why: an answer that is not one token,
    answers that are the same, or texts of different lengths. An interruption (KeyboardInterrupt) ends the study with
    the pairs up to there.

    Args:
        model: A decoder, or an encoder with its head for masked words.
        pairs: The pairs; see `attnscope.Pairs`.
        options: What is patched.
        report: Called after each batch of pairs.

    Raises:
        AttnscopeError: No pair can be patched, or the model predicts no tokens.
    """
    options = options or PatchOptions()
    return _Study(model, pairs if isinstance(pairs, Pairs) else Pairs(pairs), options, report).run()


class _Study:
    def __init__(self, model: Model, pairs: Pairs, options: PatchOptions, report: Report | None) -> None:
        self._model, self._pairs, self._options, self._report = model, pairs, options, report
        self._read, problems = read_pairs(model, pairs)
        self._problems = [*pairs.problems, *problems]
        self._chosen = options.choice.within(model.info)
        self._estimates = options.attribution or options.exact is not None
        if self._estimates or options.edges is not None:
            from attnscope.models.inside.linear_runs import require_gradients

            require_gradients(model)
        if options.positions and len({len(each.clean) for each in self._read}) > 1:
            lengths = sorted(len(each.clean) for each in self._read)
            raise AttnscopeError(
                f"pairs of {lengths[0]} to {lengths[-1]} tokens have no common positions",
                "give pairs of one length, or leave out --positions",
            )
        self._units: list[Unit] = []
        n_tokens = len(self._read[0].clean) if options.positions and self._read else 0
        n = len(self._read)
        self._clean, self._corrupt = np.full(n, np.nan), np.full(n, np.nan)
        self._effects, self._estimated = np.zeros((n, 0)), np.zeros((n, 0))
        self._position_effects = np.zeros((n, 0, n_tokens))
        self._inputs: dict[By, list[Unit]] = {}
        self._n_paths, self._path_agreement = 0, float("nan")

    def run(self) -> Patching:
        """Runs all that the options ask for."""
        if not self._read:
            raise AttnscopeError(
                f"no pair can be patched: {self._problems[0]}",
                "a pair has two texts of as many tokens, and answers of one token",
            )
        complete = self._each_batch("patching", range(len(self._read)), self._measure)
        if self._options.exact is not None:
            complete = complete and self._each_batch("exact", range(len(self._read)), self._measure_best)
        there = np.isfinite(self._clean) & np.isfinite(self._corrupt)
        there &= np.isfinite(np.where(self._untried, 0, self._effects)).all(-1)
        for number in np.flatnonzero(~there & ~np.isnan(self._clean)).tolist():
            pair = self._read[number].pair
            self._problems.append(Problem(pair.source, pair.line, "the model computes NaN or infinity"))
        self._finite = np.flatnonzero(there)
        if not len(self._finite):
            raise AttnscopeError("on every pair the model computes NaN or infinity", "try --dtype float32")
        numbers = independent([self._read[number] for number in self._finite.tolist()])
        self._observations = Observations(numbers)
        curve = self._curve() if complete and self._options.curve and self._has_shares else None
        paths = self._paths() if complete and (self._options.paths or self._options.edges) else None
        return self._result(complete, curve, paths)

    def _each_batch(self, step: str, numbers: Sequence[int], measure: Any) -> bool:
        """Measures batch by batch; False if it was interrupted after the first."""
        import torch

        n_done = n_tokens = 0
        for batch in batches_of(self._model, self._read, numbers):
            try:
                with torch.no_grad():
                    measure(batch)
            except KeyboardInterrupt:
                if not n_done:
                    raise
                return False
            n_done, n_tokens = n_done + len(batch.numbers), n_tokens + 2 * batch.clean.ids.numel()
            if self._report is not None:
                self._report(Progress(n_done, n_tokens, n_done / len(numbers), step))
        return True

    def _runs(self, batch: PairBatch, direction: Any = None) -> PairRuns:
        from attnscope.studies.patch.runs import PairRuns

        return PairRuns(self._model, batch, direction or self._options.direction)

    def _measure(self, batch: PairBatch) -> None:
        """Every head on a batch, or with `exact` the estimates of all."""
        runs = self._runs(batch)
        if not self._units:
            self._choose_units(runs)
        self._clean[batch.numbers], self._corrupt[batch.numbers] = runs.clean.numpy(), runs.corrupt.numpy()
        if self._estimates:
            tokens = runs.attribution(self._options.by)
            for number, unit in enumerate(self._units):
                self._estimated[batch.numbers, number] = tokens[unit.place][:, unit.patched].sum((1, 2)).numpy()
        if self._options.exact is None:
            self._measure_units(runs, batch, range(len(self._units)))

    def _measure_best(self, batch: PairBatch) -> None:
        """The heads with the largest estimates on a batch."""
        sizes = np.abs(self._estimated.mean(0))
        best = np.argsort(-sizes, kind="stable")[: self._options.exact]
        self._measure_units(self._runs(batch), batch, sorted(best.tolist()))

    def _measure_units(self, runs: PairRuns, batch: PairBatch, numbers: Sequence[int]) -> None:
        from attnscope.studies.patch.runs import Change

        by, rows = self._options.by, batch.numbers

        def change(number: int, tokens: slice = slice(None)) -> list[Change]:
            return [Change(self._units[number].place, by, self._units[number].patched, tokens)]

        effects = runs.effects(runs.run([change(number) for number in numbers]))
        self._effects[np.ix_(rows, np.array(numbers))] = effects.T.numpy()
        if not self._options.positions:
            return
        # What a decoder computes before the first token that differs is the same in both runs.
        differ = (batch.clean.ids != batch.corrupt.ids).any(0).nonzero()
        first = int(differ[0]) if self._model.loss == "causal" else 0
        positions = range(first, batch.shape[1])
        sets = [change(number, slice(position, position + 1)) for number in numbers for position in positions]
        by_position = runs.effects(runs.run(sets)).numpy().reshape(len(numbers), len(positions), -1)
        self._position_effects[np.ix_(rows, np.array(numbers), np.array(positions))] = by_position.transpose(2, 0, 1)

    def _choose_units(self, runs: PairRuns) -> None:
        """Chooses the heads that the options name, and makes arrays for their effects."""
        layers, heads, picked = self._chosen.layers, self._chosen.heads, self._chosen.picked

        def is_wanted(unit: Unit) -> bool:
            layer = unit.place[1]
            if picked is not None:
                return any((layer, head) in picked for head in unit.heads)
            return layer in layers and any(head in heads for head in unit.heads)

        self._units = [unit for unit in runs.units(self._options.by) if is_wanted(unit)]
        self._inputs = {by: runs.units(by) for by in ("query", "key", "value")}
        if not self._units:
            raise AttnscopeError(f"{self._model.info.name} has no such heads", "choose other layers or heads")
        n, n_units = len(self._read), len(self._units)
        self._effects, self._estimated = np.full((n, n_units), np.nan), np.full((n, n_units), np.nan)
        self._position_effects = np.zeros((n, n_units, self._position_effects.shape[-1]))

    @property
    def _untried(self) -> NDArray[np.bool_]:
        """Which heads were left to their estimates, (unit,)."""
        untried: NDArray[np.bool_] = np.asarray(np.isnan(self._effects).all(0))
        return untried & (self._options.exact is not None)

    @property
    def _total(self) -> Floats:
        """The whole effect on each pair that is finite, (pair,)."""
        total: Floats = (self._clean - self._corrupt)[self._finite]
        return total

    @property
    def _has_shares(self) -> bool:
        """Whether the total effect is strong enough for shares of it."""
        return bool(np.isfinite(self._observations.shares(self._total[:, None], self._total)).all())

    # Faithfulness

    def _curve(self) -> Table:
        """Keep the k best heads, and patch all others from the corrupt run.

        The order of heads is that of one half of the pairs, and is measured on the other half.
        """
        from attnscope.studies.patch.runs import Change

        n_units, by = len(self._units), self._options.by
        # A pair and its mirror image are in the same half.
        halves = [self._finite[self._observations.of_pair % 2 == half] for half in (0, 1)]
        inner = np.unique(np.geomspace(1, n_units, CURVE_POINTS).round().astype(int))
        n_left = [0, *inner.tolist()]
        differences = np.full((len(self._read), len(n_left)), np.nan)
        for measured, others in (halves, halves[::-1]):
            order = np.argsort(-self._effects[others].mean(0), kind="stable")
            changes = [Change(self._units[unit].place, by, self._units[unit].patched) for unit in order.tolist()]
            sets = [changes[kept:] for kept in n_left]

            def measure(batch: PairBatch, sets: Any = sets) -> None:
                differences[batch.numbers] = self._runs(batch, "noise").run(sets).T.numpy()

            if not self._each_batch("curve", measured.tolist(), measure):
                raise KeyboardInterrupt

        # What is left, all heads first; and which heads go from each point to the next, the least effect first.
        left = differences[self._finite] - self._corrupt[self._finite, None]
        shares = self._observations.shares(left, self._total)[::-1]
        names = [self._units[unit].name for unit in np.argsort(self._effects[self._finite].mean(0), kind="stable")]
        n_left.reverse()
        n_gone = [n_units, *n_left]
        removed = [
            " ".join(names[n_units - before : n_units - now]) for before, now in zip(n_gone, n_left, strict=False)
        ]
        value, low, high = shares.T
        return Table.of_arrays(
            Patching.TABLES["curve"],
            n_left=n_left,
            faithfulness=value,
            faithfulness_low=low,
            faithfulness_high=high,
            removed=removed,
        )

    # Path patching

    def _paths(self) -> Table | None:
        """Patch paths between the strongest heads and to the logits, or those with the largest estimates."""
        from attnscope.studies.patch.runs import Change

        if self._options.edges is not None:
            estimates = self._estimate_paths()
        else:
            sizes = np.nan_to_num(np.abs(self._effects[self._finite].mean(0)), nan=-1)
            best = sorted(np.argsort(-sizes, kind="stable")[: self._options.paths].tolist())
            estimates = dict.fromkeys(self._paths_among([self._units[number] for number in best]), np.nan)

        # What each head is read by. A path to the logits has no receiver.
        readers: dict[Unit, list[tuple[Unit, By]]] = {}
        for sender, receiver, by in estimates:
            readers.setdefault(sender, [])
            if receiver is not None:
                readers[sender].append((receiver, by))
        effects = {path: np.full(len(self._read), np.nan) for path in estimates}

        def measure(batch: PairBatch) -> None:
            runs = self._runs(batch)
            for sender, reads in readers.items():
                reached, direct = runs.isolate(sender)
                sets = [[Change(unit.place, by, unit.patched)] for unit, by in reads]
                paths: list[Route] = [(sender, None, "z"), *((sender, unit, by) for unit, by in reads)]
                received = runs.effects(runs.run(sets, reached))
                for path, values in zip(paths, [runs.effects(direct), *received], strict=True):
                    if path in effects:
                        effects[path][batch.numbers] = values.numpy()

        if not effects or not self._each_batch("paths", self._finite.tolist(), measure):
            return None
        values = np.stack([each[self._finite] for each in effects.values()], 1)
        if self._options.edges is not None and len(effects) > 2:
            self._path_agreement = rank_correlation(values.mean(0), np.array(list(estimates.values())))
        means, q = self._observations.means(values)
        return Table.of_arrays(
            Patching.TABLES["paths"],
            sender=[sender.name for sender, _, _ in effects],
            receiver=[LOGITS if receiver is None else receiver.name for _, receiver, _ in effects],
            by=["" if by == "z" else by for _, _, by in effects],
            q=q,
            attribution=list(estimates.values()),
            **_columns("effect", means),
            **_columns("share", self._observations.shares(values, self._total)),
        )

    def _paths_among(self, senders: Sequence[Unit]) -> list[Route]:
        """All paths between heads, through query, key and value, and from each head to the logits."""
        paths: list[Route] = []
        inputs = {
            (by, unit.place, head): unit for by, units in self._inputs.items() for unit in units for head in unit.heads
        }
        for sender in senders:
            paths.append((sender, None, "z"))
            for receiver, by in product(senders, self._inputs):
                if receiver.place[0] == sender.place[0] and receiver.place[1] > sender.place[1]:
                    paths.append((sender, inputs[by, receiver.place, receiver.heads[0]], by))
        return list(dict.fromkeys(paths))

    def _estimate_paths(self) -> dict[Route, float]:
        """The paths with the largest mean estimates among all; none if it is interrupted."""
        sums: dict[Route, float] = {}
        senders = {(unit.place, unit.heads[0]): unit for unit in self._units}
        receivers = {
            (unit.place, by, unit.patched[0]): unit
            for by, units in self._inputs.items() for unit in units
            if any((unit.place, head) in senders for head in unit.heads)
        }  # fmt: skip

        def measure(batch: PairBatch) -> None:
            to_logits, to_heads = self._runs(batch).path_attribution()
            for place, values in to_logits.items():
                for head, value in enumerate(values.sum(0).tolist()):
                    if (place, head) in senders:
                        path: Route = (senders[place, head], None, "z")
                        sums[path] = sums.get(path, 0.0) + value
            for place, by, by_sender in to_heads:
                for origin, values in by_sender.items():
                    for (number, head), value in np.ndenumerate(values.sum(1).numpy()):
                        if (origin, head) in senders and (place, by, number) in receivers:
                            path = (senders[origin, head], receivers[place, by, number], by)
                            sums[path] = sums.get(path, 0.0) + float(value)

        if not self._each_batch("estimates of paths", self._finite.tolist(), measure):
            return {}
        self._n_paths = len(sums)
        best = sorted(sums, key=lambda path: -abs(sums[path]))[: self._options.edges]
        return {path: sums[path] / len(self._finite) for path in best}

    def _result(self, complete: bool, curve: Table | None, paths: Table | None) -> Patching:
        there, options = self._finite, self._options
        total = self._observations.means(np.stack([self._clean[there], self._corrupt[there], self._total], 1))[0]
        tables = {
            "heads": self._heads(),
            "whole": Table.of_arrays(
                Patching.TABLES["whole"],
                quantity=["clean", "corrupt", "total"],
                value_count=[self._observations.n] * 3,
                **_columns("value", total),
            ),
            "pairs": Table.of(Patching.TABLES["pairs"], [self._pair(number) for number in there.tolist()]),
        }
        rows = [number for number, unit in enumerate(self._units) for _ in unit.heads]
        grids = {"by_pair": self._effects[there].T[rows].astype(np.float32)}
        if options.positions:
            labels = self._read[int(there[0])].clean.labels
            tables["positions"] = Table.of_arrays(Patching.TABLES["positions"], token=labels)
            means, _ = self._observations.means(self._position_effects[there].reshape(len(there), -1))
            parts = means.reshape(len(self._units), -1, 3)[rows]
            for name, values in zip(("", "_low", "_high"), np.moveaxis(parts, -1, 0), strict=True):
                grids[f"position_effects{name}"] = values
        if curve is not None:
            tables["curve"] = curve
        if paths is not None:
            tables["paths"] = paths
        return Patching(self._run(total[2]), self._corpus(complete), self._describe(), tables, grids)

    def _heads(self) -> Table:
        """Return the effect of each head; those that are patched together have the same."""
        effects = self._effects[self._finite]
        tried = ~self._untried
        means, shares = np.full((2, len(self._units), 3), np.nan)
        q = np.full(len(self._units), np.nan)
        means[tried], q[tried] = self._observations.means(effects[:, tried])
        shares[tried] = self._observations.shares(effects[:, tried], self._total)
        columns = head_columns(self._options.by, self._options.direction)
        values = {"effect_q": q, **_columns("effect", means), **_columns("share", shares)}
        values["effect_count"] = np.where(tried, self._observations.n, 0)
        if self._estimates:
            columns.append(ATTRIBUTION)
            values |= _columns("attribution", self._observations.means(self._estimated[self._finite])[0])
        units = [unit for unit in self._units for _ in unit.heads]
        rows = [number for number, unit in enumerate(self._units) for _ in unit.heads]
        return Table.of_arrays(
            columns,
            kind=[unit.place[0] for unit in units],
            layer=[unit.place[1] for unit in units],
            head=[head for unit in self._units for head in unit.heads],
            patched_with=[unit.name for unit in units],
            **{name: numbers[rows] for name, numbers in values.items()},
        )

    def _pair(self, number: int) -> dict[str, Any]:
        each = self._read[number]
        spell = self._model.tokenizer.spell
        return {
            "source": each.pair.source,
            "line": each.pair.line,
            "clean": each.pair.clean,
            "corrupt": each.pair.corrupt,
            "right": ", ".join(map(spell, each.right)),
            "wrong": ", ".join(map(spell, each.wrong)),
            "clean_difference": self._clean[number],
            "corrupt_difference": self._corrupt[number],
        }

    def _run(self, total: Floats) -> dict[str, Any]:
        notes = []
        n_pairs, n_observations = len(self._finite), self._observations.n
        if not self._has_shares:
            notes.append(_why_no_shares(total, self._observations.average(self._total)))
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
        read: list[ReadPair] = [self._read[number] for number in self._finite.tolist()]
        return {
            "of": "pairs",
            "sources": list(self._pairs.sources),
            "n_texts": len(read),
            "n_tokens": sum(len(each.clean) + len(each.corrupt) for each in read),
            "sha256": self._pairs.sha256,
            "problems": [asdict(problem) for problem in self._problems],
            "complete": complete,
        }

    def _describe(self) -> dict[str, Any]:
        options, effects = self._options, self._effects[self._finite]
        both = ~self._untried & np.isfinite(self._estimated).any(0)
        agreement = None
        if self._estimates and both.sum() > 2:
            agreement = rank_correlation(effects[:, both].mean(0), self._estimated[self._finite][:, both].mean(0))
        return {
            "by": options.by,
            "direction": options.direction,
            "exact": options.exact,
            "rank_agreement": agreement,
            "edges": options.edges,
            "n_paths": self._n_paths,
            "path_agreement": self._path_agreement if np.isfinite(self._path_agreement) else None,
        }


def _why_no_shares(total: Floats, totals: Floats) -> str:
    """Say why effects have no shares of the total."""
    n = len(totals)
    if n < 2:
        return "Effects have no shares of the total effect: one pair does not tell how sure it is."
    if total[1] <= 0 <= total[2]:
        return (
            "The interval of the total effect holds 0: the model does not show this behaviour here, and effects "
            "have no shares of it."
        )
    strength = abs(total[0]) / (totals.std(ddof=1) / np.sqrt(n))
    return (
        f"Effects have no shares of the total effect, which is {strength:.1f} standard errors away from 0. With "
        f"{n} pairs it must be {weakest_total(n):.1f}, as shares of a weaker one are too often wrong."
    )


# From effects on pairs to means with intervals


@dataclass(frozen=True, eq=False)
class Observations:
    """Which pairs are one observation: a pair and its mirror image, whose effects are averaged.

    Attributes:
        of_pair: The number of the observation of each pair, (pair,), from 0.
    """

    of_pair: NDArray[np.int64]

    @property
    def n(self) -> int:
        """How many there are."""
        return int(self.of_pair.max()) + 1

    def average(self, values: Floats) -> Floats:
        """Return the means over the pairs of each observation, (observation, ...), of values (pair, ...)."""
        sums = np.zeros((self.n, *values.shape[1:]))
        np.add.at(sums, self.of_pair, values)
        counts = np.bincount(self.of_pair).reshape(-1, *[1] * (values.ndim - 1))
        return sums / counts

    def means(self, values: Floats) -> tuple[Floats, Floats]:
        """Return the means of values (pair, quantity) with their intervals, (quantity, 3), and q values of being 0."""
        mean, low, high, p = pair_means(self.average(values))
        return np.stack([mean, low, high], -1), benjamini_hochberg(p)

    def shares(self, values: Floats, total: Floats) -> Floats:
        """Return the mean of values by the mean total, (pair,), with intervals, (quantity, 3); NaN = it is too weak."""
        return np.stack(shares_of_total(self.average(values), self.average(total)[:, None]), -1)


def rank_correlation(first: Floats, second: Floats) -> float:
    """Return Spearman's rank correlation."""
    from scipy.stats import rankdata

    return float(np.corrcoef(rankdata(first), rankdata(second))[0, 1])


def _columns(name: str, parts: Floats) -> dict[str, Floats]:
    """Return numbers with the ends of their intervals, (row, 3), as columns of a table."""
    return {name: parts[:, 0], f"{name}_low": parts[:, 1], f"{name}_high": parts[:, 2]}
