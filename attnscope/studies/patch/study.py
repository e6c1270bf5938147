"""Find the heads that carry a behaviour, by patching them on pairs of texts: `attnscope patch` and `attnscope.patch`.

`pairs` reads the texts, and `runs` makes the forward passes. What is patched of a head is called `by`: its output
("z"), query, key, value or pattern. A unit is what is patched at once: one head, or, for keys and values, all heads
that share them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch import Tensor

from attnscope.core.intervals import benjamini_hochberg
from attnscope.core.interventions import ActivationName, ActivationRecorder
from attnscope.core.pairs import min_total_strength, pair_means, shares_of_total
from attnscope.core.plain_torch import with_default_torch
from attnscope.corpus.formats import Problem
from attnscope.corpus.pairs import Pairs
from attnscope.errors import AttnscopeError
from attnscope.models.info import run_facts
from attnscope.models.inside.linear_runs import require_gradients
from attnscope.models.model import Model
from attnscope.questions.patch import (
    ATTRIBUTION_COLUMN,
    LOGITS,
    Patching,
    PatchOptions,
    make_head_columns,
)
from attnscope.results.table import Floats, Table
from attnscope.studies.inputs.texts import Progress, ReportProgress, UnknownWords
from attnscope.studies.patch.pairs import ReadPair, batches_of, read_pairs, spell_answer
from attnscope.studies.patch.runs import PairRuns, PatchedHeads, PatchSpec, units_of

READS: tuple[ActivationName, ...] = ("query", "key", "value")
"""The values that a head computes from what earlier heads wrote."""

Measured = dict[str, NDArray[Any]]
"""Arrays of some pairs by name, each (pair, …): `number`, the number of each pair among all, ascending; `clean` and
`corrupt`, the logit differences; `estimated`, `effects` and `positions`, what units change, (pair, unit, …)."""


@with_default_torch
def patch(
    model: Model,
    pairs: Pairs | str | Path | Sequence[str | Path | Mapping[str, Any]],
    options: PatchOptions | None = None,
    report: ReportProgress | None = None,
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
    classifier are its classes; a classifier of tokens is asked at the first token that differs. The score of several
    answers is the logarithm of the sum of exp over their logits, so that a difference is the log odds of the right
    answers against the wrong ones.

    Pairs that cannot be patched are left out, and `corpus["problems"]` says why. An interruption (KeyboardInterrupt)
    ends the study with the pairs up to there.

    Args:
        model: A decoder, a classifier, or an encoder with its head for masked words.
        pairs: The pairs; see `attnscope.Pairs`.
        options: What is patched.
        report: Called after each pass of the model, with how far the study is.

    Raises:
        AttnscopeError: No pair can be patched, or the model has no answers, or no such class.
    """
    listed = pairs if isinstance(pairs, Pairs) else Pairs(pairs)
    return _Study(model, listed, options or PatchOptions(), report).run()


class HeadPath(NamedTuple):
    """A path from heads to what reads them, through no other head.

    `receiver` is the query, key or value of later heads that takes what the sender wrote; None = the logits.
    """

    sender: PatchedHeads
    receiver: PatchSpec | None = None


class _Study:
    """Run one study, batch by batch, on the units of the chosen heads: single heads, or groups patched together."""

    def __init__(
        self, model: Model, pairs: Pairs, options: PatchOptions, report: ReportProgress | None
    ) -> None:
        self._model = model
        self._pairs = pairs
        self._options = options
        self._report = report
        # Read the pairs, and refuse options that do not fit them.
        self._read_pairs, problems = read_pairs(model, pairs, options.answer)
        self._problems = [*pairs.problems, *problems]
        if not self._read_pairs:
            raise AttnscopeError(
                f"no pair can be patched: {self._problems[0]}",
                "a pair has two texts of as many tokens, and answers of one token",
            )
        chosen = options.choice.within(model.info)
        # None = all units are patched; N = estimates of all units, and the N with the largest are patched too.
        self._n_exact = options.attribution
        if self._n_exact is not None:
            require_gradients(model)
        lengths = sorted({len(pair.clean) for pair in self._read_pairs})
        if options.positions and len(lengths) > 1:
            raise AttnscopeError(
                f"pairs of {lengths[0]} to {lengths[-1]} tokens have no common positions",
                "give pairs of one length, or leave out --positions",
            )
        # Positions are asked only of pairs of this one length.
        self._n_tokens = lengths[0]
        # A run of the first pair shows which heads there are.
        seen = ActivationRecorder()
        (first,) = batches_of(model, self._read_pairs, [0])
        with torch.no_grad():
            model.outputs(first.clean, seen, last=first.last)
        # The heads that were picked one by one, or else all chosen heads of all chosen layers.
        heads = set(chosen.picked or product(chosen.layers, chosen.heads))
        self._units: list[PatchedHeads] = []
        for ((_, layer), head), unit in units_of(seen.calls, options.by).items():
            if (layer, head) in heads and unit not in self._units:
                self._units.append(unit)
        if not self._units:
            raise AttnscopeError(f"{model.info.name} has no such heads", "choose other layers or heads")
        # The indices of the units that are patched. Estimates may first say which.
        self._tried: list[int] = []
        if not self._n_exact:
            self._tried = list(range(len(self._units)))
        # The units of all heads, as these read what earlier heads wrote.
        self._readers = {by: units_of(seen.calls, by) for by in READS}

    def run(self) -> Patching:
        """Return the result, with all that the options ask for."""
        options = self._options
        measured, complete = self._measure_pairs()
        # A pair and its mirror image are one observation: their values are averaged.
        numbers = measured["number"].tolist()
        pairs = [self._read_pairs[number] for number in numbers]
        observations = observations_of(pairs)
        averages: Measured = {}
        for name, values in measured.items():
            averages[name] = average(values, observations)
        total = averages["clean"] - averages["corrupt"]
        # Heads that share a key/value head have one effect: (unit, …) -> (head, …).
        rows = np.repeat(np.arange(len(self._units)), [unit.group for unit in self._units])
        tables = {
            "heads": self._heads(averages, total, rows),
            "whole": _table_of_totals(averages, total),
            "pairs": self._table_of_pairs(pairs, measured),
        }
        if complete and options.paths:
            paths = self._paths(_largest(measured["effects"], options.paths))
            measure = partial(_measure_paths, paths)
            by_path, complete = self._each_batch("paths", numbers, measure)
            if complete:
                effects = average(by_path["effects"], observations)
                tables["paths"] = _table_of_paths(paths, effects, total)
        by_pair = measured["effects"].T[rows]
        arrays: Measured = {"by_pair": by_pair.astype(np.float32)}
        if options.positions:
            tokens = pairs[0].clean.labels
            tables["positions"] = Table.of_arrays(Patching.TABLES["positions"], token=tokens)
            by_position = _columns("position_effects", *pair_means(averages["positions"]))
            for name, values in by_position.items():
                arrays[name] = values[rows]
        result_options = {
            "by": options.by,
            "direction": options.direction,
            "answer": options.answer,
            "exact": self._n_exact or None,
            "rank_agreement": _rank_agreement(measured),
        }
        run = run_facts(self._model.info, self._notes(len(pairs), total))
        run["kinds"] = list(self._model.info.kinds)
        return Patching(run, self._corpus(pairs, complete), result_options, tables, arrays)

    def _measure_pairs(self) -> tuple[Measured, bool]:
        """Return what was measured of all pairs, and whether it was not interrupted.

        Effects are NaN for units that were not tried.
        """
        numbers = list(range(len(self._read_pairs)))
        measured, complete = self._each_batch("patching", numbers, self._measure)
        if not measured:
            raise KeyboardInterrupt
        measured = self._leave_out_broken(measured)
        if complete and self._n_exact:
            self._tried = _largest(measured["estimated"], self._n_exact)
            numbers = measured["number"].tolist()
            exact, complete = self._each_batch("exact", numbers, self._measure_effects)
            if exact:
                # Keep the pairs that were measured exactly too. Their effects take the place of the empty ones.
                exact = self._leave_out_broken(exact)
                is_exact = np.isin(measured["number"], exact["number"])
                measured = _select(measured, is_exact) | exact
            else:
                self._tried = []
        untried = np.delete(np.arange(len(self._units)), self._tried)
        measured["effects"][:, untried] = np.nan
        return measured, complete

    def _each_batch(
        self,
        step: str,
        numbers: list[int],
        measure: Callable[[PairRuns, Callable[[float], None]], Measured],
    ) -> tuple[Measured, bool]:
        """Measure pairs batch by batch; return what was measured, and whether all were.

        After an interruption these are the pairs up to there, and {} if there is none. `measure` calls the function
        that it gets with the share of the batch that is done: a batch may take minutes.
        """
        parts: list[Measured] = []
        n_done = 0
        n_tokens = 0

        def report(share_of_batch: float) -> None:
            if self._report is not None:
                share = (n_done + share_of_batch * len(batch.numbers)) / len(numbers)
                self._report(Progress(n_done, n_tokens, share, step))

        complete = True
        for batch in batches_of(self._model, self._read_pairs, numbers):
            try:
                with torch.no_grad():
                    part = measure(PairRuns(self._model, batch, self._options.direction), report)
                parts.append({"number": batch.numbers, **part})
                n_done += len(batch.numbers)
                n_tokens += 2 * batch.clean.ids.numel()
                report(0.0)
            except KeyboardInterrupt:
                complete = False
                break
        if not parts:
            return {}, complete
        # Batches are of pairs of one length: put the pairs back into their order.
        joined: Measured = {}
        for name in parts[0]:
            joined[name] = np.concatenate([part[name] for part in parts])
        return _select(joined, np.argsort(joined["number"])), complete

    def _measure(self, runs: PairRuns, report: Callable[[float], None]) -> Measured:
        """Return all that is measured of a batch; where they are asked for, also the estimates of all units."""
        measured: Measured = {"clean": runs.clean.numpy(), "corrupt": runs.corrupt.numpy()}
        if self._n_exact is not None:
            by_token = runs.attribution(self._options.by)
            estimates = []
            for unit in self._units:
                of_unit = by_token[unit.layer_key][:, unit.number]  # (pair, token)
                estimates.append(of_unit.sum(1))
            measured["estimated"] = torch.stack(estimates, 1).numpy()
        return measured | self._measure_effects(runs, report)

    def _measure_effects(self, runs: PairRuns, report: Callable[[float], None]) -> Measured:
        """Return the effects of all units on a batch, (pair, unit), and with `positions` of each position alone.

        They are 0 for units that are not tried.
        """
        n_units = len(self._units)
        units = [self._units[column] for column in self._tried]
        # At all tokens, and with `positions` at each one. What a decoder computes before the first that differs is the
        # same in both runs.
        first = runs.batch.first_difference if "decoder" in self._model.info.kinds else 0
        spans = [slice(None)]
        if self._options.positions:
            spans += [slice(token, token + 1) for token in range(first, self._n_tokens)]
        changes = []
        for unit, span in product(units, spans):
            changes.append(PatchSpec(unit, self._options.by, span))
        # (change, pair) -> (pair, unit, span). The first span is all tokens, the others are single ones.
        by_change = runs.effects(changes, report=report).T.numpy()
        n_pairs = len(by_change)
        by_span = by_change.reshape(n_pairs, len(units), len(spans))
        at_all_tokens = by_span[..., 0]
        at_each_token = by_span[..., 1:]
        effects = np.zeros((n_pairs, n_units))
        effects[:, self._tried] = at_all_tokens
        if not self._options.positions:
            return {"effects": effects}
        positions = np.zeros((n_pairs, n_units, self._n_tokens))
        positions[:, self._tried, first:] = at_each_token
        return {"effects": effects, "positions": positions}

    def _leave_out_broken(self, measured: Measured) -> Measured:
        """Return the pairs on which all that was measured is a number; add the others to the problems."""
        is_sound = np.ones(len(measured["number"]), np.bool_)
        for values in measured.values():
            rows = values.reshape(len(values), -1)
            is_sound &= np.isfinite(rows).all(1)
        for number in measured["number"][~is_sound].tolist():
            pair = self._read_pairs[number].pair
            self._problems.append(Problem(pair.source, pair.line, "the model computes NaN or infinity"))
        if not is_sound.any():
            raise AttnscopeError(
                "on every pair the model computes NaN or infinity", "try --dtype float32"
            )
        return _select(measured, is_sound)

    def _paths(self, columns: Sequence[int]) -> list[HeadPath]:
        """Return the paths from some units: to the logits, and to queries, keys and values of those in later layers."""
        paths: list[HeadPath] = []
        senders = [self._units[column] for column in columns]
        for sender in senders:
            kind, layer = sender.layer_key
            paths.append(HeadPath(sender))
            for later, by in product(senders, READS):
                if later.layer_key[0] != kind or later.layer_key[1] <= layer:
                    continue
                # Several heads may read one key/value head: the path counts once. A unit is found by its first head.
                reader = self._readers[by][later.layer_key, later.heads.start]
                path = HeadPath(sender, PatchSpec(reader, by))
                if path not in paths:
                    paths.append(path)
        return paths

    # From effects to tables

    def _heads(self, averages: Measured, total: Floats, rows: NDArray[np.int64]) -> Table:
        """Return the table of heads, each with the values of its unit; `rows` has the unit of each head, (head,)."""
        columns = make_head_columns(self._options.by, self._options.direction)
        # (unit,), then a row for each head of a unit.
        # The column of q-values has another name here than in the table of paths.
        values = _effects_and_shares(averages["effects"], total)
        values["effect_q"] = values.pop("q")
        if "estimated" in averages:
            columns.append(ATTRIBUTION_COLUMN)
            values |= _columns("attribution", *pair_means(averages["estimated"]))
        units = [self._units[row] for row in rows]
        return Table.of_arrays(
            columns,
            kind=[unit.layer_key[0] for unit in units],
            layer=[unit.layer_key[1] for unit in units],
            head=list(chain.from_iterable(unit.heads for unit in self._units)),
            patched_with=[unit.name for unit in units],
            **{name: of_units[rows] for name, of_units in values.items()},
        )

    def _table_of_pairs(self, pairs: Sequence[ReadPair], measured: Measured) -> Table:
        """Return the texts of pairs, the answers as they are spelled, and the logit differences."""
        rows = []
        for number, read in enumerate(pairs):
            row = {
                **asdict(read.pair),
                "clean_difference": measured["clean"][number],
                "corrupt_difference": measured["corrupt"][number],
            }
            for side in ("right", "wrong"):
                answers = [spell_answer(self._model, answer) for answer in getattr(read, side)]
                row[side] = ", ".join(answers)
            rows.append(row)
        return Table.of(Patching.TABLES["pairs"], rows)

    # What the result says of itself

    def _notes(self, n_pairs: int, total: Floats) -> list[str]:
        """Say what a reader must know of the shares, of the number of pairs, and of how heads were patched."""
        notes = []
        reason = _why_no_shares(total)
        if reason:
            notes.append(reason)
        if len(total) < n_pairs:
            notes.append(
                f"The {n_pairs} pairs count as {len(total)}: some are another with its two texts the other way "
                "round, and such two count as one."
            )
        if not self._model.resumes:
            notes.append(
                "This model cannot be run again from a layer on: every head takes a whole forward."
            )
        if any(len(unit.heads) > 1 for unit in self._units):
            notes.append(
                f"The {self._options.by} of heads that share a key/value head is patched for all of them together."
            )
        return notes

    def _corpus(self, pairs: Sequence[ReadPair], complete: bool) -> dict[str, Any]:
        """Return what the result says of its texts."""
        texts = []
        for pair in pairs:
            texts += [pair.clean, pair.corrupt]
        return {
            "of": "pairs",
            "sources": list(self._pairs.sources),
            "n_texts": len(pairs),
            "n_tokens": sum(map(len, texts)),
            "sha256": self._pairs.sha256,
            "problems": [asdict(problem) for problem in self._problems],
            "unknown_words": UnknownWords.find(self._model.tokenizer, texts).note,
            "complete": complete,
        }


def _select(measured: Measured, rows: NDArray[Any]) -> Measured:
    """Return what was measured of some pairs."""
    return {name: values[rows] for name, values in measured.items()}


def _measure_paths(
    paths: Sequence[HeadPath], runs: PairRuns, report: Callable[[float], None]
) -> Measured:
    """Return the effects of paths on a batch, (pair, path); those of a sender follow each other, the logits first."""
    effects: list[Tensor] = []
    for sender in dict.fromkeys(path.sender for path in paths):
        report(len(effects) / len(paths))
        # Change what one head writes, and see how far the logits and each reader carry it.
        reached, to_logits = runs.isolate(sender)
        effects.append(to_logits)
        receivers = [path.receiver for path in paths if path.sender == sender and path.receiver]
        effects += runs.effects(receivers, reached)
    return {"effects": torch.stack(effects, 1).numpy()}


def _table_of_paths(paths: Sequence[HeadPath], effects: Floats, total: Floats) -> Table:
    """Return the table of paths, of their effects, (observation, path), and the total effect, (observation,)."""
    return Table.of_arrays(
        Patching.TABLES["paths"],
        sender=[path.sender.name for path in paths],
        receiver=[path.receiver.unit.name if path.receiver else LOGITS for path in paths],
        by=[path.receiver.by if path.receiver else "" for path in paths],
        **_effects_and_shares(effects, total),
    )


def _table_of_totals(averages: Measured, total: Floats) -> Table:
    """Return the mean logit differences of both runs, and the total effect."""
    values = np.stack([averages["clean"], averages["corrupt"], total], 1)
    return Table.of_arrays(
        Patching.TABLES["whole"],
        quantity=["clean", "corrupt", "total"],
        value_count=[len(total)] * 3,
        **_columns("value", *pair_means(values)),
    )


def _rank_agreement(measured: Measured) -> float | None:
    """Return the rank correlation of effects and estimates; None if fewer than three heads have both."""
    tried = np.isfinite(measured["effects"]).all(0)
    if "estimated" not in measured or tried.sum() < 3:
        return None
    # Means over pairs, (unit,) each.
    effects = measured["effects"][:, tried].mean(0)
    estimates = measured["estimated"][:, tried].mean(0)
    return float(spearmanr(effects, estimates).statistic)


# Means over observations


def observations_of(pairs: Sequence[ReadPair]) -> list[list[int]]:
    """Return the rows of the pairs of each observation.

    The mirror image of a pair has its two texts the other way round, and tells little that the pair does not: both are
    one observation.
    """
    # Both texts in no order: those of a mirror image are the same.
    rows: dict[frozenset[bytes], list[int]] = {}
    for row, pair in enumerate(pairs):
        rows.setdefault(frozenset(pair.ids), []).append(row)
    return list(rows.values())


def average(values: NDArray[Any], observations: Sequence[list[int]]) -> Floats:
    """Return the means of values, (pair, …), over the pairs of each observation, (observation, …)."""
    return np.stack([values[rows].mean(0) for rows in observations])


def _columns(name: str, mean: Floats, low: Floats, high: Floats, *_: Floats) -> dict[str, Floats]:
    """Return means and the ends of their intervals as the columns of a quantity."""
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def _effects_and_shares(effects: Floats, total: Floats) -> dict[str, Floats]:
    """Return the columns of effects, (observation, quantity), and of their shares of the total, (observation,)."""
    # Means over observations, (quantity,).
    mean, low, high, p = pair_means(effects)
    shares = shares_of_total(effects, total[:, None])
    counts = np.isfinite(mean) * float(len(total))
    return {
        **_columns("effect", mean, low, high),
        **_columns("share", *shares),
        "effect_count": counts,
        "share_count": counts,
        "q": benjamini_hochberg(p),
    }


def _why_no_shares(total: Floats) -> str:
    """Say why effects have no shares of the total, (observation,); "" = they have."""
    n = len(total)
    if n < 2:
        return "Effects have no shares of the total effect: one pair does not tell how sure it is."
    with np.errstate(divide="ignore", invalid="ignore"):
        error = total.std(ddof=1) / np.sqrt(n)
        strength = float(np.abs(total.mean()) / error)
    weakest = min_total_strength(n)
    if strength >= weakest:
        return ""
    return (
        f"Effects have no shares of the total effect, which is {strength:.1f} standard errors away from 0. With "
        f"{n} pairs it must be {weakest:.1f}, as shares of a weaker one are too often wrong."
    )


def _largest(values: Floats, n: int) -> list[int]:
    """Return the columns, ascending, with the n largest absolute means over pairs of values, (pair, unit)."""
    # NumPy's sorting puts NaN last: units that were not tried are chosen last.
    order = np.argsort(-np.abs(values.mean(0)), kind="stable")
    return sorted(order[:n].tolist())
