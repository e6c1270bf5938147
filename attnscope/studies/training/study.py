"""Measure all heads at each checkpoint of a training run, and follow their measures and roles over its steps.

This is the study of `attnscope training` and `attnscope.training`. It calls `studies.heads` for each checkpoint.
"""

import contextlib
import gc
import glob
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from attnscope.core.plain_torch import with_default_torch
from attnscope.corpus import Problem
from attnscope.errors import AttnscopeError, UsageError, amount, one_line, parse_json
from attnscope.models.model import Model
from attnscope.questions.heads import Heads
from attnscope.questions.training import HAS_ROLE, MAX_STEPS, NO_ROLE, TENTATIVE, Training
from attnscope.results.result import failure_line
from attnscope.results.table import HEADS, Column, Estimate, Table
from attnscope.studies.ablate.measurers import PassSettings, Replacements, measure_interventions
from attnscope.studies.ablate.reading import BatchReader
from attnscope.studies.failures import describe_failure
from attnscope.studies.heads.roles import RULES
from attnscope.studies.heads.study import heads, make_probe_texts
from attnscope.studies.inputs.texts import AnyTexts, ReportProgress, Texts, scale_report, texts_of
from attnscope.studies.training.options import TrainingOptions

Name = str | os.PathLike[str]
Spec = Name | Model
"""A model, or the name that it is loaded by."""

Checkpoints = Name | Sequence[Name] | Mapping[int, Spec]
"""Names or patterns of checkpoints, or models or names by step."""


@with_default_torch
def training(
    models: Checkpoints,
    corpus: AnyTexts | None = None,
    options: TrainingOptions | None = None,
    report: ReportProgress | None = None,
) -> Training:
    """Measure all heads of a model at each checkpoint of its training.

        training = attnscope.training("run/checkpoint-*", attnscope.Corpus("texts.txt"))
        training.of("induction", 1, 0)  # layer 1, head 0: (checkpoint, 3), the value and the ends of its interval
        training.since("induction")  # {"L1H0": 300}: an induction head since step 300
        training.draw("figures")

    Checkpoints are loaded one at a time, measured by `heads`, and released. A checkpoint is skipped if it cannot be
    loaded or measured, or if its heads or its number of tokens differ from those of the first checkpoint.
    `run["skipped"]` says why. After an interruption (KeyboardInterrupt), the result has the finished checkpoints, and
    says that it is incomplete.

    The step of a folder is the `global_step` of its trainer_state.json, which transformers writes. Otherwise it is a
    number in the folder's name or in the revision of `org/name@revision`: a number after "step" or "checkpoint", such
    as 500 in "checkpoint-500", else the last number. If no name has a number, names are numbered in order: 0, 1, 2 …

    Args:
        models: A pattern of folders such as "run/checkpoint-*"; a list of folders, patterns and Hub models
            `org/name@revision` in any order; or a mapping from steps to models or names.
        corpus: The texts to run each checkpoint on; None = repeated random tokens of the first checkpoint's vocabulary,
            the standard test for induction.
        options: The measures and roles that are followed.
        report: Called after each batch.

    Raises:
        AttnscopeError: No folder matches, there is no text, or no checkpoint can be measured.
        KeyboardInterrupt: The user pressed Ctrl-C before any checkpoint was done.
    """
    options = options or TrainingOptions()
    all_planned, skipped = find_checkpoints(models)
    texts = None if corpus is None else texts_of(corpus)
    results: list[_CheckpointResult] = []
    first_error: Exception | None = None
    complete = True
    for number, planned in enumerate(all_planned):
        try:
            result = _measure_checkpoint(
                planned, texts, options, scale_report(report, number, len(all_planned))
            )
            # Keep the texts, since the first checkpoint may have made them: random tokens of its vocabulary.
            texts = result.texts
            if results:
                _require_alike(result, results[0])
            results.append(result)
        except KeyboardInterrupt:
            complete = False
            break
        except Exception as error:
            # A library may raise any error on a damaged checkpoint. Skip it, and go on with the others.
            first_error = first_error or error
            reason = one_line(describe_failure(planned.name, error)["error"])
            skipped.append(asdict(Problem(planned.name, None, reason)))
        # Modules of a network refer to each other in cycles. Free their memory before the next network is loaded.
        gc.collect()
    if not results:
        # At least one checkpoint was planned. So either an interruption ended the loop, or there is a first error.
        if complete and first_error is not None:
            raise first_error
        raise KeyboardInterrupt
    return _assemble(results, options, skipped, complete)


# Which checkpoints


@dataclass(frozen=True)
class PlannedCheckpoint:
    """Hold a checkpoint that will be measured.

    Attributes:
        name: Its name in the result.
        step: Its step in the training.
        spec: The model, or the name to load it by.
    """

    name: str
    step: int
    spec: Spec


def find_checkpoints(models: Checkpoints) -> tuple[list[PlannedCheckpoint], list[dict[str, Any]]]:
    """Return the checkpoints in the order of their steps, and an entry for `run["skipped"]` for each skipped name.

    If some names have a step, names without a step are skipped. So is a second name with the same step.
    """
    if not models:
        raise UsageError("no checkpoint is given", "such as 'run/checkpoint-*'")
    all_planned: dict[int, PlannedCheckpoint] = {}
    skipped: list[dict[str, Any]] = []
    if isinstance(models, Mapping):
        for given_step in sorted(models):
            spec = models[given_step]
            if not 0 <= given_step <= MAX_STEPS:
                raise UsageError(
                    "a checkpoint is given at what is no step", f"steps are from 0 to {MAX_STEPS:,}"
                )
            name = f"step {given_step}"
            if isinstance(spec, str | os.PathLike):
                name = os.fspath(spec) or name
            all_planned[given_step] = PlannedCheckpoint(name, given_step, spec)
        return list(all_planned.values()), skipped
    # Expand patterns to names. A set, so that a name that several patterns match counts once.
    patterns = [models] if isinstance(models, str | os.PathLike) else models
    names = set(chain.from_iterable(_expand_pattern(os.fspath(pattern)) for pattern in patterns))
    steps = {name: find_step(name) for name in sorted(names)}
    # If no name has a step, number the names in order: 0, 1, 2 …
    if set(steps.values()) == {None}:
        steps = {name: number for number, name in enumerate(steps)}
    for name, step in steps.items():
        if step is None:
            reason = "its name has no step; from Python, checkpoints are given by step"
        elif step in all_planned:
            reason = f"its step {step} is that of {all_planned[step].name}"
        else:
            all_planned[step] = PlannedCheckpoint(name, step, name)
            continue
        skipped.append(asdict(Problem(name, None, reason)))
    return [all_planned[step] for step in sorted(all_planned)], skipped


def _expand_pattern(name: str) -> list[str]:
    """Return the folders that a pattern matches; for a name that is no pattern, the name itself."""
    path = os.path.expanduser(name)  # noqa: PTH111  # Path would change how a pattern is written
    if not glob.has_magic(path) or os.path.exists(path):  # noqa: PTH110  # Path raises for names that are too long
        return [name]
    folders = [match for match in glob.glob(path) if Path(match).is_dir()]  # noqa: PTH207  # absolute patterns too
    if not folders:
        raise UsageError(f"no folder matches {name}", "quote patterns, such as 'run/checkpoint-*'")
    return folders


_NAMED_STEP = re.compile(r"(?:step|checkpoint|ckpt|iter|iteration)[-_]?(\d+)", re.IGNORECASE | re.ASCII)
"""Matches a number that a name calls a step, such as 500 in checkpoint-500."""


def find_step(name: str) -> int | None:
    """Return the step of a checkpoint: from its trainer_state.json, else from its name; None if neither has a step.

    A number above MAX_STEPS is no step.
    """
    folder = Path(os.path.expanduser(name))  # noqa: PTH111  # Path refuses ~nobody
    with contextlib.suppress(OSError, ValueError, AttributeError):
        step = parse_json((folder / "trainer_state.json").read_text("utf-8")).get("global_step")
        # `type`, not isinstance: true and false are no steps.
        if type(step) is int and 0 <= step <= MAX_STEPS:
            return step
    # Without this file, take the last number in the folder's name, or in the revision on the Hub, after "@".
    _, at_sign, revision = name.partition("@")
    is_folder = os.path.exists(folder)  # noqa: PTH110  # Path raises for names that no folder can have
    label = folder.name
    if at_sign and not is_folder:
        label = revision
    numbers = _NAMED_STEP.findall(label) or re.findall(r"\d+", label, re.ASCII)
    if numbers and int(numbers[-1]) <= MAX_STEPS:
        return int(numbers[-1])
    return None


# Measuring them


@dataclass(frozen=True, eq=False)
class _CheckpointResult:
    """Hold what was measured on a checkpoint.

    Attributes:
        planned: The name and step of the checkpoint.
        sha256: The hash of its weights.
        loss: The mean loss of its predictions, in nats, with its interval.
        elapsed_s: How many seconds it took to measure.
        predicted: Which tokens are predicted for the loss: "causal", "masked" or "target"; None = no loss was measured.
        texts: The texts that it was measured on.
        findings: The measures and roles of its heads.
    """

    planned: PlannedCheckpoint
    sha256: str
    loss: Estimate
    elapsed_s: float
    predicted: str | None
    texts: Texts
    findings: Heads


def _measure_checkpoint(
    planned: PlannedCheckpoint,
    texts: Texts | None,
    options: TrainingOptions,
    report: ReportProgress | None,
) -> _CheckpointResult:
    """Load a checkpoint, and measure it on texts. If `texts` is None, these are random tokens of its vocabulary.

    Raises:
        AttnscopeError: It could not be measured on all texts.
        KeyboardInterrupt: The user pressed Ctrl-C before all texts were measured.
    """
    model = planned.spec
    if isinstance(model, str | os.PathLike):
        loading = options.loading
        # The loss needs the model's prediction head, which is not always loaded by default.
        if options.loss != "none":
            loading = loading.with_head(planned.name)
        model = loading.load(planned.name)
    # Measure its heads. `describe=None` leaves out their descriptions.
    start_s = time.perf_counter()
    if texts is None:
        texts = make_probe_texts(model)
    findings = heads(model, texts, replace(options.heads, describe=None), report)
    if not findings.corpus["complete"]:
        raise KeyboardInterrupt
    if "failures" in findings.run:
        failure = findings.run["failures"][0]
        raise AttnscopeError(failure_line(failure), failure["hint"])
    # An ablation study without interventions measures the loss of the clean run. Classifiers, which have labels, have
    # no such loss.
    predicted = None
    loss = Estimate(np.nan, np.nan, np.nan, count=0)
    if options.loss != "none" and model.loss is not None and not model.labels:
        predicted = model.loss
        ablation_result = measure_interventions(
            PassSettings(BatchReader(model, predicted), texts), (), Replacements()
        )
        if not ablation_result.complete:
            raise KeyboardInterrupt
        # In `loss_sums`, a RunningSums, s of a text is the sum of its losses, and c is the number of its predictions. A
        # loss is not negative, so neither is the low end of its interval.
        loss_sums = ablation_result.done.clean_loss
        low, high = map(float, loss_sums.interval())
        n_predictions = float(loss_sums.total("c"))
        loss = Estimate(float(loss_sums.ratio()), max(low, 0.0), high, count=n_predictions)
    elapsed_s = time.perf_counter() - start_s
    return _CheckpointResult(planned, model.info.sha256, loss, elapsed_s, predicted, texts, findings)


def _require_alike(result: _CheckpointResult, first_result: _CheckpointResult) -> None:
    """Refuse a checkpoint whose heads or number of tokens differ from those of the first checkpoint."""
    name = first_result.planned.name
    first_heads = first_result.findings.table("heads").head_names(with_kind=True)
    head_names = result.findings.table("heads").head_names(with_kind=True)
    if head_names != first_heads:
        raise AttnscopeError(f"it has {len(head_names)} heads, and not those of {name}")
    n_first_tokens = first_result.findings.corpus["n_tokens"]
    n_tokens = result.findings.corpus["n_tokens"]
    if n_tokens != n_first_tokens:
        raise AttnscopeError(
            f"it makes {amount(n_tokens, 'token')} of the texts, and {name} {n_first_tokens:,}"
        )


def _assemble(
    results: Sequence[_CheckpointResult],
    options: TrainingOptions,
    skipped: Sequence[dict[str, Any]],
    complete: bool,
) -> Training:
    """Return the result of the study. `results` are those of the measured checkpoints, in the order of their steps.

    Facts that all checkpoints share, such as the options, come from the last checkpoint.
    """
    last_findings = results[-1].findings
    tables = [result.findings.table("heads") for result in results]
    n_heads = len(tables[-1])

    # The measures with their intervals, (measure, checkpoint, head, 3); NaN if a checkpoint has no such measure.
    intervals = np.full((len(options.measures), len(tables), n_heads, 3), np.nan)
    # The measures under uniform attention, which tables of heads hold as baselines, (measure, head).
    uniform_values = []
    measure_rows = []
    for measure_index, measure in enumerate(options.measures):
        for number, table in enumerate(tables):
            if measure in table:
                intervals[measure_index, number] = table.interval(measure)
        uniform_values.append(tables[-1].companion(measure, "baseline"))
        column = tables[-1].columns.get(measure, Column(measure))
        least, most = column.range
        measure_rows.append({**vars(column), "least": least, "most": most})

    # The roles that any head has at any checkpoint, in the order of RULES; and for each role which heads have it at
    # which checkpoint, (role, checkpoint, head).
    role_tables = [result.findings.table("roles") for result in results]
    found_roles = set(chain.from_iterable(table["role"].tolist() for table in role_tables))
    roles = [role for role in RULES if role in found_roles]
    has_role = np.full((len(roles), len(tables), n_heads), NO_ROLE, np.int8)
    for number, table in enumerate(role_tables):
        # A table has one row for each role of each head; its column "head" is a row of the table of heads. All rows are
        # assigned at once.
        role_indices = [roles.index(role) for role in table["role"]]
        values = np.where(table["tentative"], TENTATIVE, HAS_ROLE)
        has_role[role_indices, number, table["head"]] = values

    # A row of the table `checkpoints` takes name and step from `planned`, and its other columns from the result.
    rows = [{**vars(result.planned), **vars(result)} for result in results]
    columns_by_table = Training.TABLES
    result_tables = {
        "checkpoints": Table.of(columns_by_table["checkpoints"], rows),
        "heads": Table.of_arrays(HEADS, **{column.name: tables[-1][column.name] for column in HEADS}),
        "measures": Table.of(columns_by_table["measures"], measure_rows),
        "roles": Table.of_arrays(columns_by_table["roles"], name=roles),
    }
    arrays = {
        "value": intervals[..., 0],
        "value_low": intervals[..., 1],
        "value_high": intervals[..., 2],
        "uniform": np.array(uniform_values),
        "has_role": has_role,
    }
    recorded_options = {
        **last_findings.options,
        "measures": list(options.measures),
        "loss": results[-1].predicted,
        "roles": {role: last_findings.options["roles"][role] for role in roles},
    }
    names = [result.planned.name for result in results]
    run = {**last_findings.run, "model": _common_name(names, str(last_findings.run["model"]))}
    if skipped:
        run["skipped"] = skipped
    corpus = {**last_findings.corpus, "complete": complete, "n_checkpoints": len(results)}
    return Training(run, corpus, recorded_options, result_tables, arrays)


def _common_name(names: Sequence[str], last_model: str) -> str:
    """Return the name of a training run: the folder that holds all checkpoints, or the model on the Hub.

    If there is one checkpoint, or checkpoints have no common folder or model, it is the name of the last model.
    """
    common_names = set()
    for name in names:
        # "org/name@revision" is a model on the Hub.
        model, at_sign, _ = name.partition("@")
        common_names.add(model if at_sign else Path(name).parent.name)
    if len(names) == 1 or len(common_names) > 1:
        return last_model
    return common_names.pop() or last_model
