"""Find the heads that carry a behaviour, by patching them on pairs of texts: `attnscope patch` and `attnscope.patch`.

`pairs` reads the texts, and `runs` makes the forward passes. The option `by` names the activation of a head that is
patched: its output ("z"), query, key, value or pattern. A unit is patched at once: it is one head, or, for keys and
values, all heads that share a key/value head. Arrays of effects have a column for each unit.
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

from attnscope.arrays import Floats
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
from attnscope.results.table import Table
from attnscope.studies.inputs.texts import Progress, ReportProgress, UnknownWords
from attnscope.studies.patch.pairs import ReadPair, make_pair_batches, read_pairs, spell_answer
from attnscope.studies.patch.runs import PairRuns, PatchedHeads, PatchSpec, list_units

RECEIVER_INPUTS: tuple[ActivationName, ...] = ("query", "key", "value")
"""The inputs of a head's attention: the activations through which it reads the outputs of earlier heads."""

Measured = dict[str, NDArray[Any]]
"""Arrays of some pairs by name, each (pair, …): `pair_index`, the index of each pair among all pairs, ascending;
`clean` and `corrupt`, the logit differences of both runs; `effects` and `estimated`, the measured and the estimated
effects of units, (pair, unit); `positions`, the effects at single positions, (pair, unit, token)."""


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

    `options.direction` says which run is patched: "denoise" copies activations of the clean run into the corrupt run,
    and "noise" copies those of the corrupt run into the clean run. In both directions, an effect is positive if the
    head carries the behaviour.

    Each text of a pair is run once. The patched run is then resumed at the layer of each head. Effects are exact. In
    grouped-query attention, a key/value head is patched once for all heads that share it (the column `patched_with`).

    An answer is one token, predicted at the last token of the text, or at the mask of a masked model. Answers of a
    classifier are its classes; a classifier of tokens is asked at the first token that differs. The score of several
    answers is the logsumexp of their logits, so that a difference is the log odds of the right answers against the
    wrong answers.

    Pairs that cannot be patched are left out, and `corpus["problems"]` says why. After an interruption
    (KeyboardInterrupt), the result has the pairs measured so far.

    Args:
        model: A decoder, a classifier, or an encoder with its head for masked words.
        pairs: The pairs; see `attnscope.Pairs`.
        options: Which activations of which heads are patched, and what is measured.
        report: Called after each pass of the model with the progress of the study.

    Raises:
        AttnscopeError: No pair can be patched, the model predicts neither tokens nor classes, or it has no such class.
    """
    pair_list = pairs if isinstance(pairs, Pairs) else Pairs(pairs)
    return _Study(model, pair_list, options or PatchOptions(), report).run()


class HeadPath(NamedTuple):
    """Name a direct path from a sender to a receiver, through no other head.

    `receiver` is the query, key or value of a later unit, into which the sender's output flows; None = the logits.
    """

    sender: PatchedHeads
    receiver: PatchSpec | None = None


class _Study:
    """Measure the effects of the units of the chosen heads, batch by batch, and make the result."""

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
        # None = patch all units. N = estimate all units, and patch the N units with the largest estimates. 0 = estimate
        # all units, and patch all.
        self._n_exact = options.attribution
        if self._n_exact is not None:
            require_gradients(model)
        lengths = sorted({len(pair.clean) for pair in self._read_pairs})
        if options.positions and len(lengths) > 1:
            raise AttnscopeError(
                f"pairs of {lengths[0]} to {lengths[-1]} tokens have no common positions",
                "give pairs of one length, or leave out --positions",
            )
        # Used only with --positions, when all pairs have one length.
        self._n_tokens = lengths[0]
        # Run the first pair to find which heads there are.
        first_activations = ActivationRecorder()
        (first_batch,) = make_pair_batches(model, self._read_pairs, [0])
        with torch.no_grad():
            model.outputs(first_batch.clean, first_activations, last=first_batch.last)
        # The single heads of --pick, (layer, head), or else all chosen heads of all chosen layers. Keep their units,
        # without repeats. A key of `list_units` is ((kind of attention, layer), head); --pick names no kind.
        chosen_heads = set(chosen.picked or product(chosen.layers, chosen.heads))
        self._units: list[PatchedHeads] = []
        for ((_, layer), head), unit in list_units(first_activations.calls, options.by).items():
            if (layer, head) in chosen_heads and unit not in self._units:
                self._units.append(unit)
        if not self._units:
            raise AttnscopeError(f"{model.info.name} has no such heads", "choose other layers or heads")
        # The columns (unit indices) of the units that are patched. With N estimates, they are known only later.
        self._patched_columns: list[int] = []
        if not self._n_exact:
            self._patched_columns = list(range(len(self._units)))
        # For paths: the unit of each head that receives at its query, key or value. The chosen `by` may be z, whose
        # units are others.
        self._receivers = {by: list_units(first_activations.calls, by) for by in RECEIVER_INPUTS}

    def run(self) -> Patching:
        """Measure all pairs, and return the result with the tables that the options ask for."""
        options = self._options
        measured, is_complete = self._measure_pairs()
        # A pair and its mirror image are one observation: average their values. (pair, …) -> (observation, …)
        pair_indices = measured["pair_index"].tolist()
        pairs = [self._read_pairs[index] for index in pair_indices]
        observations = group_observations(pairs)
        averages: Measured = {}
        for name, values in measured.items():
            averages[name] = average_observations(values, observations)
        total = averages["clean"] - averages["corrupt"]
        # Heads that share a key/value head have one effect. This index, (head,), takes (unit, …) to (head, …).
        unit_of_head = np.repeat(np.arange(len(self._units)), [unit.n_heads for unit in self._units])
        tables = {
            "heads": self._head_table(averages, total, unit_of_head),
            "whole": _total_table(averages, total),
            "pairs": self._pair_table(pairs, measured),
        }
        if is_complete and options.paths:
            paths = self._list_paths(_find_largest(measured["effects"], options.paths))
            measure = partial(_measure_paths, paths)
            by_path, is_complete = self._measure_batches("paths", pair_indices, measure)
            if is_complete:
                effects = average_observations(by_path["effects"], observations)
                tables["paths"] = _path_table(paths, effects, total)
        # (pair, unit) -> (head, pair)
        arrays: Measured = {"by_pair": measured["effects"].T[unit_of_head].astype(np.float32)}
        if options.positions:
            tables["positions"] = Table.of_arrays(
                Patching.TABLES["positions"], token=pairs[0].clean.labels
            )
            by_position = _bound_columns("position_effects", *pair_means(averages["positions"]))
            for name, values in by_position.items():
                arrays[name] = values[unit_of_head]
        result_options = {
            "by": options.by,
            "direction": options.direction,
            "answer": options.answer,
            "exact": self._n_exact or None,
            "rank_agreement": _rank_agreement(measured),
        }
        run = run_facts(self._model.info, self._make_notes(len(pairs), total))
        run["kinds"] = list(self._model.info.kinds)
        return Patching(run, self._describe_corpus(pairs, is_complete), result_options, tables, arrays)

    def _measure_pairs(self) -> tuple[Measured, bool]:
        """Return the measurements of all pairs, and whether they are complete: False after an interruption.

        Effects are NaN for units that were not patched.
        """
        pair_indices = list(range(len(self._read_pairs)))
        measured, is_complete = self._measure_batches("patching", pair_indices, self._measure_batch)
        if not measured:
            # Ctrl-C came before the first batch was finished: there is no result.
            raise KeyboardInterrupt
        measured = self._drop_nonfinite_pairs(measured)
        if is_complete and self._n_exact:
            self._patched_columns = _find_largest(measured["estimated"], self._n_exact)
            pair_indices = measured["pair_index"].tolist()
            exact_part, is_complete = self._measure_batches("exact", pair_indices, self._measure_effects)
            if exact_part:
                # Keep the pairs that were also patched. Their effects replace the zeros of the first pass.
                exact_part = self._drop_nonfinite_pairs(exact_part)
                is_measured_exactly = np.isin(measured["pair_index"], exact_part["pair_index"])
                measured = _select_pairs(measured, is_measured_exactly) | exact_part
            else:
                self._patched_columns = []
        unpatched_columns = np.delete(np.arange(len(self._units)), self._patched_columns)
        measured["effects"][:, unpatched_columns] = np.nan
        return measured, is_complete

    def _measure_batches(
        self,
        step: str,
        pair_indices: list[int],
        measure: Callable[[PairRuns, Callable[[float], None]], Measured],
    ) -> tuple[Measured, bool]:
        """Measure pairs batch by batch; return the measurements, and whether they are complete.

        After an interruption, the measurements are those of the batches so far; {} if there is none. A batch may take
        minutes, so `measure` gets a function to call with the share of the batch that is done.
        """
        batch_results: list[Measured] = []
        n_done = 0
        n_tokens = 0

        def report(share_of_batch: float) -> None:
            if self._report is not None:
                share = (n_done + share_of_batch * len(batch.pair_indices)) / len(pair_indices)
                self._report(Progress(n_done, n_tokens, share, step))

        is_complete = True
        for batch in make_pair_batches(self._model, self._read_pairs, pair_indices):
            try:
                with torch.no_grad():
                    batch_result = measure(PairRuns(self._model, batch, self._options.direction), report)
                batch_results.append({"pair_index": batch.pair_indices, **batch_result})
                n_done += len(batch.pair_indices)
                n_tokens += 2 * batch.clean.ids.numel()
                report(0.0)
            except KeyboardInterrupt:
                is_complete = False
                break
        if not batch_results:
            return {}, is_complete
        # A batch has pairs of one length. Put the pairs of all batches back into their order.
        joined: Measured = {}
        for name in batch_results[0]:
            joined[name] = np.concatenate([batch_result[name] for batch_result in batch_results])
        return _select_pairs(joined, np.argsort(joined["pair_index"])), is_complete

    def _measure_batch(self, runs: PairRuns, report: Callable[[float], None]) -> Measured:
        """Return the logit differences and effects of a batch; with attribution also the estimates of all units."""
        measured: Measured = {
            "clean": runs.clean_differences.numpy(),
            "corrupt": runs.corrupt_differences.numpy(),
        }
        if self._n_exact is not None:
            by_token = runs.estimate_effects(self._options.by)
            estimates = []
            for unit in self._units:
                unit_estimates = by_token[unit.layer_key][:, unit.number]  # (pair, token)
                estimates.append(unit_estimates.sum(1))
            measured["estimated"] = torch.stack(estimates, 1).numpy()
        return measured | self._measure_effects(runs, report)

    def _measure_effects(self, runs: PairRuns, report: Callable[[float], None]) -> Measured:
        """Return the effects of units on a batch, `effects` (pair, unit), and with --positions those of single tokens.

        Effects are 0 for units that are not in `_patched_columns`.
        """
        n_units = len(self._units)
        units = [self._units[column] for column in self._patched_columns]
        # Patch at all tokens at once, and with --positions also at each token. A decoder computes the same in both runs
        # before the first token that differs, so effects there are 0.
        first_token = runs.batch.first_difference if "decoder" in self._model.info.kinds else 0
        spans = [slice(None)]
        if self._options.positions:
            spans += [slice(token, token + 1) for token in range(first_token, self._n_tokens)]
        patch_specs = []
        for unit, span in product(units, spans):
            patch_specs.append(PatchSpec(unit, self._options.by, span))
        # (patch, pair) -> (pair, unit, span). The first span is all tokens, the others are single tokens.
        effects_by_patch = runs.measure_effects(patch_specs, report=report).T.numpy()
        n_pairs = len(effects_by_patch)
        by_span = effects_by_patch.reshape(n_pairs, len(units), len(spans))
        at_all_tokens = by_span[..., 0]
        at_each_token = by_span[..., 1:]
        effects = np.zeros((n_pairs, n_units))
        effects[:, self._patched_columns] = at_all_tokens
        if not self._options.positions:
            return {"effects": effects}
        positions = np.zeros((n_pairs, n_units, self._n_tokens))
        positions[:, self._patched_columns, first_token:] = at_each_token
        return {"effects": effects, "positions": positions}

    def _drop_nonfinite_pairs(self, measured: Measured) -> Measured:
        """Return the measurements of the pairs whose values are all finite; add the other pairs to the problems."""
        is_finite = np.ones(len(measured["pair_index"]), np.bool_)
        for values in measured.values():
            rows = values.reshape(len(values), -1)
            is_finite &= np.isfinite(rows).all(1)
        for index in measured["pair_index"][~is_finite].tolist():
            pair = self._read_pairs[index].pair
            self._problems.append(Problem(pair.source, pair.line, "the model computes NaN or infinity"))
        if not is_finite.any():
            raise AttnscopeError(
                "on every pair the model computes NaN or infinity", "try --dtype float32"
            )
        return _select_pairs(measured, is_finite)

    def _list_paths(self, columns: Sequence[int]) -> list[HeadPath]:
        """Return the paths from each of some units to the logits, and to the inputs of those in later layers."""
        paths: list[HeadPath] = []
        senders = [self._units[column] for column in columns]
        for sender in senders:
            kind, layer = sender.layer_key
            paths.append(HeadPath(sender))
            for later_unit, by in product(senders, RECEIVER_INPUTS):
                if later_unit.layer_key[0] != kind or later_unit.layer_key[1] <= layer:
                    continue
                # Find the receiving unit by the first head of the later unit. Heads that share a key/value head have
                # the same receiver, so list the path once.
                receiver = self._receivers[by][later_unit.layer_key, later_unit.heads.start]
                path = HeadPath(sender, PatchSpec(receiver, by))
                if path not in paths:
                    paths.append(path)
        return paths

    # From effects to tables

    def _head_table(self, averages: Measured, total: Floats, unit_of_head: NDArray[np.int64]) -> Table:
        """Return the table of heads. A head has the values of its unit, whose index is in `unit_of_head`, (head,)."""
        columns = make_head_columns(self._options.by, self._options.direction)
        # The columns of values, (unit,). The q-values are named `effect_q` here, and `q` in the table of paths.
        values = _effects_and_shares(averages["effects"], total)
        values["effect_q"] = values.pop("q")
        if "estimated" in averages:
            columns.append(ATTRIBUTION_COLUMN)
            values |= _bound_columns("attribution", *pair_means(averages["estimated"]))
        units = [self._units[column] for column in unit_of_head]
        return Table.of_arrays(
            columns,
            kind=[unit.layer_key[0] for unit in units],
            layer=[unit.layer_key[1] for unit in units],
            head=list(chain.from_iterable(unit.heads for unit in self._units)),
            patched_with=[unit.name for unit in units],
            **{name: by_unit[unit_of_head] for name, by_unit in values.items()},
        )

    def _pair_table(self, pairs: Sequence[ReadPair], measured: Measured) -> Table:
        """Return the table of pairs: their texts, their answers spelled as text, and their logit differences."""
        rows = []
        for number, read in enumerate(pairs):
            row = {
                **asdict(read.pair),
                "clean_difference": measured["clean"][number],
                "corrupt_difference": measured["corrupt"][number],
            }
            for side in ("right", "wrong"):
                answers = [spell_answer(self._model, answer) for answer in getattr(read, f"{side}_ids")]
                row[side] = ", ".join(answers)
            rows.append(row)
        return Table.of(Patching.TABLES["pairs"], rows)

    # Notes and description of the corpus

    def _make_notes(self, n_pairs: int, total: Floats) -> list[str]:
        """Return notes on missing shares, mirrored pairs, slow reruns, and heads that are patched together."""
        notes = []
        reason = _why_no_shares(total)
        if reason:
            notes.append(reason)
        # `total` has a number per observation. A pair and its mirror image are one observation.
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

    def _describe_corpus(self, pairs: Sequence[ReadPair], is_complete: bool) -> dict[str, Any]:
        """Return the description of the pairs that the result holds: sources, counts, hash and problems."""
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
            "complete": is_complete,
        }


def _select_pairs(measured: Measured, rows: NDArray[Any]) -> Measured:
    """Return the measurements of some pairs."""
    return {name: values[rows] for name, values in measured.items()}


def _measure_paths(
    paths: Sequence[HeadPath], runs: PairRuns, report: Callable[[float], None]
) -> Measured:
    """Return the effects of paths on a batch, (pair, path). `paths` lists each sender's path to the logits first."""
    effects: list[Tensor] = []
    for sender in dict.fromkeys(path.sender for path in paths):
        report(len(effects) / len(paths))
        # Patch the sender's output with all other heads frozen. Then patch each receiver alone with the activations
        # that result.
        later_activations, effect_on_logits = runs.isolate_sender(sender)
        effects.append(effect_on_logits)
        receivers = [path.receiver for path in paths if path.sender == sender and path.receiver]
        effects += runs.measure_effects(receivers, later_activations)
    return {"effects": torch.stack(effects, 1).numpy()}


def _path_table(paths: Sequence[HeadPath], effects: Floats, total: Floats) -> Table:
    """Return the table of paths from their effects, (observation, path), and the total effect, (observation,)."""
    return Table.of_arrays(
        Patching.TABLES["paths"],
        sender=[path.sender.name for path in paths],
        receiver=[path.receiver.unit.name if path.receiver else LOGITS for path in paths],
        by=[path.receiver.by if path.receiver else "" for path in paths],
        **_effects_and_shares(effects, total),
    )


def _total_table(averages: Measured, total: Floats) -> Table:
    """Return the table of the mean logit differences of both runs and the mean total effect, clean - corrupt."""
    values = np.stack([averages["clean"], averages["corrupt"], total], 1)
    return Table.of_arrays(
        Patching.TABLES["whole"],
        quantity=["clean", "corrupt", "total"],
        value_count=[len(total)] * 3,
        **_bound_columns("value", *pair_means(values)),
    )


def _rank_agreement(measured: Measured) -> float | None:
    """Return the rank correlation of effects and estimates; None if fewer than three units have both."""
    tried = np.isfinite(measured["effects"]).all(0)
    if "estimated" not in measured or tried.sum() < 3:
        return None
    # Means over pairs, (unit,) each.
    effects = measured["effects"][:, tried].mean(0)
    estimates = measured["estimated"][:, tried].mean(0)
    return float(spearmanr(effects, estimates).statistic)


# Means over observations


def group_observations(pairs: Sequence[ReadPair]) -> list[list[int]]:
    """Return the rows of the pairs of each observation, such as [[0, 3], [1], [2]].

    The mirror image of a pair has the clean and the corrupt text swapped. It adds little information, so the two pairs
    are one observation.
    """
    # A set of both texts has no order: a pair and its mirror image have the same set.
    rows: dict[frozenset[bytes], list[int]] = {}
    for row, pair in enumerate(pairs):
        rows.setdefault(frozenset(pair.id_bytes), []).append(row)
    return list(rows.values())


def average_observations(values: NDArray[Any], observations: Sequence[list[int]]) -> Floats:
    """Return the means of values, (pair, …), over the pairs of each observation, (observation, …)."""
    return np.stack([values[rows].mean(0) for rows in observations])


def _bound_columns(name: str, mean: Floats, low: Floats, high: Floats, *_: Floats) -> dict[str, Floats]:
    """Return means and the ends of their intervals as columns, such as effect, effect_low and effect_high."""
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def _effects_and_shares(effects: Floats, total: Floats) -> dict[str, Floats]:
    """Return the columns of effects, (observation, unit or path), and of their shares of the total, (observation,)."""
    # Means over observations, (unit,) or (path,).
    mean, low, high, p = pair_means(effects)
    shares = shares_of_total(effects, total[:, None])
    counts = np.isfinite(mean) * float(len(total))
    return {
        **_bound_columns("effect", mean, low, high),
        **_bound_columns("share", *shares),
        "effect_count": counts,
        "share_count": counts,
        "q": benjamini_hochberg(p),
    }


def _why_no_shares(total: Floats) -> str:
    """Say why effects have no shares of the total effect, (observation,); "" = they have shares."""
    n_observations = len(total)
    # The standard error of the total effect needs two observations.
    if n_observations < 2:
        return "Effects have no shares of the total effect: one pair does not tell how sure it is."
    with np.errstate(divide="ignore", invalid="ignore"):
        error = total.std(ddof=1) / np.sqrt(n_observations)
        strength = float(np.abs(total.mean()) / error)
    weakest = min_total_strength(n_observations)
    if strength >= weakest:
        return ""
    return (
        f"Effects have no shares of the total effect, which is {strength:.1f} standard errors away from 0. With "
        f"{n_observations} pairs it must be {weakest:.1f}, as shares of a weaker one are too often wrong."
    )


def _find_largest(values: Floats, n: int) -> list[int]:
    """Return the n columns, ascending, of `values` (pair, unit) with the largest absolute means over pairs."""
    # NumPy sorts NaN last, so units that were not patched are chosen last.
    order = np.argsort(-np.abs(values.mean(0)), kind="stable")
    return sorted(order[:n].tolist())
