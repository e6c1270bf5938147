"""Measure all heads at each checkpoint of a training, and follow their measures and roles over its steps.

This is `attnscope training` and `attnscope.training`. A checkpoint is measured by `studies.heads`.
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
"""A model, or what it is loaded by."""

Checkpoints = Name | Sequence[Name] | Mapping[int, Spec]
"""Names or patterns of checkpoints, or models by step."""


@with_default_torch
def training(
    models: Checkpoints,
    corpus: AnyTexts | None = None,
    options: TrainingOptions | None = None,
    report: ReportProgress | None = None,
) -> Training:
    """Measure all heads of a model at each checkpoint of its training.

        training = attnscope.training("run/checkpoint-*", attnscope.Corpus("texts.txt"))
        training.of("induction", 1, 0)  # layer 1, head 0: (checkpoint, 3), value and interval
        training.since("induction")  # {"L1H0": 300}: an induction head since step 300
        training.draw("figures")

    Checkpoints are loaded one at a time, measured by `heads`, and released. A checkpoint is skipped if it cannot be
    loaded or measured, or if its heads or tokens differ from those of the first one. `run["skipped"]` says why. After
    an interruption (KeyboardInterrupt), the record has the finished checkpoints, and says that it is incomplete.

    The step of a folder is the `global_step` of its trainer_state.json, which transformers writes. Otherwise it is a
    number in the folder's name or in the revision of `org/name@revision`: the one after "step" or "checkpoint", else
    the last one. If no name has a number, steps count the names in order: 0, 1, 2 …

    Args:
        models: A pattern of folders such as "run/checkpoint-*"; folders, patterns and Hub models `org/name@revision` in
            any order; or models or names by step.
        corpus: What to run each on; None = repeated random tokens of the first one's vocabulary, the standard test for
            induction.
        options: What is followed.
        report: Called after each batch.

    Raises:
        AttnscopeError: No folder matches, there is no text, or no checkpoint can be measured.
        KeyboardInterrupt: It was interrupted before any checkpoint was done.
    """
    options = options or TrainingOptions()
    stages, skipped = stages_of(models)
    texts = None if corpus is None else texts_of(corpus)
    checkpoints: list[_Checkpoint] = []
    first_error: Exception | None = None
    complete = True
    for number, stage in enumerate(stages):
        try:
            checkpoint = _measure(stage, texts, options, scale_report(report, number, len(stages)))
            # Keep the texts, since the first checkpoint may have made them: random tokens of its vocabulary.
            texts = checkpoint.texts
            if checkpoints:
                _require_alike(checkpoint, checkpoints[0])
            checkpoints.append(checkpoint)
        except KeyboardInterrupt:
            complete = False
            break
        except Exception as error:
            # Skip this checkpoint, whatever a library raises on it, and go on with the others.
            first_error = first_error or error
            reason = one_line(describe_failure(stage.name, error)["error"])
            skipped.append(asdict(Problem(stage.name, None, reason)))
        # Modules of a network refer to each other. Free their memory before the next network is loaded.
        gc.collect()
    if not checkpoints:
        if complete and first_error is not None:
            raise first_error
        raise KeyboardInterrupt
    return _assemble(checkpoints, options, skipped, complete)


# Which checkpoints


@dataclass(frozen=True)
class MeasuredCheckpoint:
    """Hold a checkpoint that is to be measured.

    Attributes:
        name: Its name in the result.
        step: Its step in the training.
        spec: The model, or the name to load it by.
    """

    name: str
    step: int
    spec: Spec


def stages_of(models: Checkpoints) -> tuple[list[MeasuredCheckpoint], list[dict[str, Any]]]:
    """Return the checkpoints in the order of their steps, and an entry for `run["skipped"]` for each left out.

    If some names have a step, those without one are left out, and so is a second name with the same step.
    """
    if not models:
        raise UsageError("no checkpoint is given", "such as 'run/checkpoint-*'")
    stages: dict[int, MeasuredCheckpoint] = {}
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
            stages[given_step] = MeasuredCheckpoint(name, given_step, spec)
        return list(stages.values()), skipped
    # Expand patterns to names; a name that comes twice counts once.
    patterns = [models] if isinstance(models, str | os.PathLike) else models
    names = set(chain.from_iterable(_expand(os.fspath(pattern)) for pattern in patterns))
    steps = {name: step_of(name) for name in sorted(names)}
    # If no name has a step, count them in order: 0, 1, 2 …
    if set(steps.values()) == {None}:
        steps = {name: number for number, name in enumerate(steps)}
    for name, step in steps.items():
        if step is None:
            reason = "its name has no step; from Python, checkpoints are given by step"
            skipped.append(asdict(Problem(name, None, reason)))
        elif step in stages:
            reason = f"its step {step} is that of {stages[step].name}"
            skipped.append(asdict(Problem(name, None, reason)))
        else:
            stages[step] = MeasuredCheckpoint(name, step, name)
    return [stages[step] for step in sorted(stages)], skipped


def _expand(name: str) -> list[str]:
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


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint: from its trainer_state.json, else from its name; None if neither has one.

    A number above MAX_STEPS is no step.
    """
    folder = Path(os.path.expanduser(name))  # noqa: PTH111  # Path refuses ~nobody
    with contextlib.suppress(OSError, ValueError, AttributeError):
        step = parse_json((folder / "trainer_state.json").read_text("utf-8")).get("global_step")
        if type(step) is int and 0 <= step <= MAX_STEPS:
            return step
    # Without that file, take the last number in the folder's name, or in the revision on the Hub.
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
class _Checkpoint:
    """Hold what was measured on a checkpoint.

    Attributes:
        stage: The checkpoint.
        sha256: The hash of its weights.
        loss: The mean loss of its predictions, in nats, with its interval.
        elapsed_s: How many seconds it took to measure.
        predicted: Which tokens the loss is of: "causal", "masked" or "target"; None = it was not measured.
        texts: The texts that it was measured on.
        findings: The measures and roles of its heads.
    """

    stage: MeasuredCheckpoint
    sha256: str
    loss: Estimate
    elapsed_s: float
    predicted: str | None
    texts: Texts
    findings: Heads


def _measure(
    stage: MeasuredCheckpoint,
    texts: Texts | None,
    options: TrainingOptions,
    report: ReportProgress | None,
) -> _Checkpoint:
    """Load a checkpoint, and measure it on texts; None = on repeated random tokens of its vocabulary.

    Raises:
        AttnscopeError: It could not be measured on all texts.
        KeyboardInterrupt: The user ended it before all texts were measured.
    """
    model = stage.spec
    if isinstance(model, str | os.PathLike):
        loading = options.loading
        if options.loss != "none":
            loading = loading.with_head(stage.name)
        model = loading.load(stage.name)
    # Measure its heads, but do not describe them.
    began = time.perf_counter()
    if texts is None:
        texts = make_probe_texts(model)
    findings = heads(model, texts, replace(options.heads, describe=None), report)
    if not findings.corpus["complete"]:
        raise KeyboardInterrupt
    if "failures" in findings.run:
        failed = findings.run["failures"][0]
        raise AttnscopeError(failure_line(failed), failed["hint"])
    # The loss comes from a study of ablation without any cut: it also measures the whole model.
    predicted = None
    loss = Estimate(np.nan, np.nan, np.nan, count=0)
    if options.loss != "none" and model.loss is not None and not model.labels:
        predicted = model.loss
        result = measure_interventions(
            PassSettings(BatchReader(model, predicted), texts), (), Replacements()
        )
        if not result.complete:
            raise KeyboardInterrupt
        # Sums of losses (s) and counts of predictions (c).
        whole = result.done.clean_loss
        low, high = map(float, whole.interval())
        n_predictions = float(whole.total("c"))
        loss = Estimate(float(whole.ratio()), max(low, 0.0), high, count=n_predictions)
    elapsed_s = time.perf_counter() - began
    return _Checkpoint(stage, model.info.sha256, loss, elapsed_s, predicted, texts, findings)


def _require_alike(checkpoint: _Checkpoint, first: _Checkpoint) -> None:
    """Refuse a checkpoint whose heads or tokens differ from those of the first one."""
    name = first.stage.name
    first_heads = first.findings.table("heads").head_names(with_kind=True)
    head_names = checkpoint.findings.table("heads").head_names(with_kind=True)
    if head_names != first_heads:
        raise AttnscopeError(f"it has {len(head_names)} heads, and not those of {name}")
    n_first = first.findings.corpus["n_tokens"]
    n_tokens = checkpoint.findings.corpus["n_tokens"]
    if n_tokens != n_first:
        raise AttnscopeError(
            f"it makes {amount(n_tokens, 'token')} of the texts, and {name} {n_first:,}"
        )


def _assemble(
    checkpoints: Sequence[_Checkpoint],
    options: TrainingOptions,
    skipped: Sequence[dict[str, Any]],
    complete: bool,
) -> Training:
    """Return the result on the checkpoints that were measured, in the order of their steps.

    What the result says apart from them, such as its options, comes from the last checkpoint.
    """
    last = checkpoints[-1].findings
    tables = [checkpoint.findings.table("heads") for checkpoint in checkpoints]
    n_heads = len(tables[-1])

    # The measures with their intervals, (measure, checkpoint, head, 3); NaN if a checkpoint has no such measure.
    intervals = np.full((len(options.measures), len(tables), n_heads, 3), np.nan)
    uniform = []
    measures = []
    for measure, name in enumerate(options.measures):
        for number, table in enumerate(tables):
            if name in table:
                intervals[measure, number] = table.interval(name)
        uniform.append(tables[-1].companion(name, "baseline"))
        column = tables[-1].columns.get(name, Column(name))
        least, most = column.range
        measures.append({**vars(column), "least": least, "most": most})

    # The roles that any head has at any checkpoint, and which heads have them at which: (role, checkpoint, head).
    role_tables = [checkpoint.findings.table("roles") for checkpoint in checkpoints]
    found = set(chain.from_iterable(table["role"].tolist() for table in role_tables))
    roles = [role for role in RULES if role in found]
    has_role = np.full((len(roles), len(tables), n_heads), NO_ROLE, np.int8)
    for number, table in enumerate(role_tables):
        # One row for each role of each head.
        role_indices = [roles.index(role) for role in table["role"]]
        values = np.where(table["tentative"], TENTATIVE, HAS_ROLE)
        has_role[role_indices, number, table["head"]] = values

    # A row of the table `checkpoints` takes name and step from the stage, all else from the checkpoint.
    rows = [{**vars(checkpoint.stage), **vars(checkpoint)} for checkpoint in checkpoints]
    columns = Training.TABLES
    result_tables = {
        "checkpoints": Table.of(columns["checkpoints"], rows),
        "heads": Table.of_arrays(HEADS, **{column.name: tables[-1][column.name] for column in HEADS}),
        "measures": Table.of(columns["measures"], measures),
        "roles": Table.of_arrays(columns["roles"], name=roles),
    }
    arrays = {
        "value": intervals[..., 0],
        "value_low": intervals[..., 1],
        "value_high": intervals[..., 2],
        "uniform": np.array(uniform),
        "has_role": has_role,
    }
    recorded_options = {
        **last.options,
        "measures": list(options.measures),
        "loss": checkpoints[-1].predicted,
        "roles": {role: last.options["roles"][role] for role in roles},
    }
    names = [checkpoint.stage.name for checkpoint in checkpoints]
    run = {**last.run, "model": _common_name(names, str(last.run["model"]))}
    if skipped:
        run["skipped"] = skipped
    corpus = {**last.corpus, "complete": complete, "n_checkpoints": len(checkpoints)}
    return Training(run, corpus, recorded_options, result_tables, arrays)


def _common_name(names: Sequence[str], last: str) -> str:
    """Return the name of a training: the folder that holds all checkpoints, or the model on the Hub.

    If there is one checkpoint, or they have no such name in common, it is that of the last model.
    """
    common = set()
    for name in names:
        model, at_sign, _ = name.partition("@")
        common.add(model if at_sign else Path(name).parent.name)
    if len(names) == 1 or len(common) > 1:
        return last
    return common.pop() or last
