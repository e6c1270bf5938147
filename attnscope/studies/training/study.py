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
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from attnscope.core.plain_torch import with_plain_torch
from attnscope.errors import AttnscopeError, UsageError, amount, one_line, parse_json
from attnscope.models.model import Model
from attnscope.questions.heads import Heads
from attnscope.questions.training import HAS_ROLE, MOST_STEPS, NO_ROLE, TENTATIVE, Training
from attnscope.results.result import failure_line
from attnscope.results.table import HEADS, Column, Estimate, Table
from attnscope.studies.ablate.measurers import Passes, StandIns, measure_cuts
from attnscope.studies.ablate.reading import Reader
from attnscope.studies.failures import failure
from attnscope.studies.heads.roles import RULES
from attnscope.studies.heads.study import heads, probe_texts
from attnscope.studies.inputs.texts import AnyTexts, Report, Texts, scale_report, texts_of
from attnscope.studies.training.options import TrainingOptions

Name = str | os.PathLike[str]
Spec = Name | Model
"""A model, or what it is loaded by."""

Checkpoints = Name | Sequence[Name] | Mapping[int, Spec]
"""Names or patterns of checkpoints, or models by step."""


@with_plain_torch
def training(
    models: Checkpoints,
    corpus: AnyTexts | None = None,
    options: TrainingOptions | None = None,
    report: Report | None = None,
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
            step_report = scale_report(report, number, len(stages))
            checkpoint = _measure(stage, texts, options, step_report)
            # Random tokens are those of the first checkpoint's vocabulary.
            texts = checkpoint.texts
            if checkpoints:
                _require_alike(checkpoint, checkpoints[0])
            checkpoints.append(checkpoint)
        except KeyboardInterrupt:
            complete = False
            break
        except Exception as error:
            # Whatever a library raises on one checkpoint, the others are not lost for it.
            first_error = first_error or error
            reason = one_line(failure(stage.name, error)["error"])
            skipped.append(_problem(stage.name, reason))
        # A network's modules refer to each other: without this the next one would stand beside it in memory.
        gc.collect()
    # Without any checkpoint there is nothing to tell but why.
    if not checkpoints:
        raise first_error if complete and first_error else KeyboardInterrupt
    return _assemble(checkpoints, options, skipped, complete)


# Which checkpoints


@dataclass(frozen=True)
class Stage:
    """Hold a checkpoint that is to be measured.

    Attributes:
        name: What it is called in the result.
        step: Its step in the training.
        spec: The model, or the name to load it by.
    """

    name: str
    step: int
    spec: Spec


def stages_of(models: Checkpoints) -> tuple[list[Stage], list[dict[str, Any]]]:
    """Return the checkpoints by step, and the problems of those without a step among others that have one."""
    # Models by step: the steps are the caller's.
    stages: dict[int, Stage] = {}
    if isinstance(models, Mapping):
        for number, spec in models.items():
            if not 0 <= number <= MOST_STEPS:
                raise UsageError(
                    "a checkpoint is given at what is no step", f"steps are from 0 to {MOST_STEPS:,}"
                )
            name = f"step {number}"
            if isinstance(spec, str | os.PathLike):
                name = os.fspath(spec) or name
            stages[number] = Stage(name, number, spec)
        return [stages[step] for step in sorted(stages)], []
    # Expand patterns to names; a name that comes twice counts once.
    patterns = [models] if isinstance(models, str | os.PathLike) else models
    names = set(chain.from_iterable(_expand(os.fspath(pattern)) for pattern in patterns))
    if not names:
        raise UsageError("no checkpoint is given", "such as 'run/checkpoint-*'")
    # If no name has a step, count them in order; otherwise skip names without one.
    steps = {name: step_of(name) for name in sorted(names)}
    if set(steps.values()) == {None}:
        steps = {name: number for number, name in enumerate(steps)}
    skipped = []
    for name, step in steps.items():
        if step is None:
            reason = "its name has no step; from Python, checkpoints are given by step"
            skipped.append(_problem(name, reason))
        elif step in stages:
            skipped.append(_problem(name, f"its step {step} is that of {stages[step].name}"))
        else:
            stages[step] = Stage(name, step, name)
    return [stages[step] for step in sorted(stages)], skipped


def _expand(name: str) -> list[str]:
    """Return the folders that a pattern matches; a plain name as it is."""
    path = os.path.expanduser(name)  # noqa: PTH111  # Path would change how a pattern is written
    if not glob.has_magic(path) or os.path.exists(path):  # noqa: PTH110  # Path raises for names that are too long
        return [name]
    folders = [match for match in glob.glob(path) if Path(match).is_dir()]  # noqa: PTH207  # absolute patterns too
    if not folders:
        raise UsageError(f"no folder matches {name}", "quote patterns, such as 'run/checkpoint-*'")
    return folders


_NAMED_STEP = re.compile(r"(?:step|checkpoint|ckpt|iter|iteration)[-_]?(\d+)", re.IGNORECASE | re.ASCII)
"""A number in a name that is said to be a step, such as that of checkpoint-500."""


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint, by what transformers wrote beside it, else by its name; None if neither says.

    A number with more digits than a count of steps can have is no step.
    """
    # What the trainer wrote counts first.
    folder = Path(os.path.expanduser(name))  # noqa: PTH111  # Path refuses ~nobody
    with contextlib.suppress(OSError, ValueError, AttributeError):
        step = parse_json((folder / "trainer_state.json").read_text("utf-8")).get("global_step")
        if type(step) is int and 0 <= step <= MOST_STEPS:
            return step
    # Else the last number of the folder's name counts, or of the revision on the Hub.
    _, at_sign, revision = name.partition("@")
    is_folder = os.path.exists(folder)  # noqa: PTH110  # Path raises for names that no folder can have
    label = folder.name
    if at_sign and not is_folder:
        label = revision
    numbers = _NAMED_STEP.findall(label) or re.findall(r"\d+", label, re.ASCII)
    if not numbers or len(numbers[-1]) > len(str(MOST_STEPS)):
        return None
    step = int(numbers[-1])
    return step if step <= MOST_STEPS else None


def _problem(source: str, reason: str) -> dict[str, Any]:
    """Return why a checkpoint was skipped, as a record lists it."""
    return {"source": source, "line": None, "reason": reason}


# Measuring them


@dataclass(frozen=True, eq=False)
class _Checkpoint:
    """Hold what was measured of a checkpoint.

    Attributes:
        stage: The checkpoint.
        sha256: A column of that name, as are `loss` and `elapsed_s`.
        predicted: What the loss is of; None = none was measured.
        texts: What it was measured on.
        findings: The measures and roles of its heads.
    """

    stage: Stage
    sha256: str
    loss: Estimate
    elapsed_s: float
    predicted: str | None
    texts: Texts
    findings: Heads


def _measure(
    stage: Stage, texts: Texts | None, options: TrainingOptions, report: Report | None
) -> _Checkpoint:
    """Load and measure a checkpoint, on texts or, for None, on repeated random tokens.

    Raises:
        KeyboardInterrupt: It was interrupted, and is left out.
    """
    model = stage.spec
    if isinstance(model, str | os.PathLike):
        loading = options.loading
        if options.loss != "none":
            loading = loading.with_head(stage.name)
        model = loading.load(stage.name)
    # Measure its heads as a study of them does.
    began = time.perf_counter()
    if texts is None:
        texts = probe_texts(model)
    findings = heads(model, texts, options.heads_options, report)
    if not findings.corpus["complete"]:
        raise KeyboardInterrupt
    for failed in findings.run.get("failures", ())[:1]:
        raise AttnscopeError(failure_line(failed), failed["hint"])
    # The loss is that of a pass which takes no head out.
    predicted = None
    loss = Estimate(np.nan, np.nan, np.nan, count=0)
    if options.loss != "none" and model.loss is not None and not model.labels:
        predicted = model.loss
        result = measure_cuts(Passes(Reader(model, predicted), texts), (), StandIns())
        if not result.complete:
            raise KeyboardInterrupt
        whole = result.done.whole
        low, high = map(float, whole.interval())
        n_predictions = float(whole.total("c"))
        loss = Estimate(float(whole.ratio()), max(low, 0.0), high, count=n_predictions)
    elapsed_s = time.perf_counter() - began
    return _Checkpoint(stage, model.info.sha256, loss, elapsed_s, predicted, texts, findings)


def _require_alike(checkpoint: _Checkpoint, first: _Checkpoint) -> None:
    """Refuse a checkpoint whose heads or tokens differ from those of the first one."""
    name = first.stage.name
    of_first = first.findings.table("heads").head_names(with_kind=True)
    of_this = checkpoint.findings.table("heads").head_names(with_kind=True)
    if of_this != of_first:
        raise AttnscopeError(f"it has {len(of_this)} heads, and not those of {name}")
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
    """Return the result about the checkpoints that were measured, in the order of their steps."""
    last = checkpoints[-1].findings
    tables = [checkpoint.findings.table("heads") for checkpoint in checkpoints]
    n_heads = len(tables[-1])

    # The measures with their intervals, (measure, checkpoint, head, 3); NaN if a model has no such measure.
    intervals = np.full((len(options.measures), len(tables), n_heads, 3), np.nan)
    uniform = []
    measures = []
    for number, name in enumerate(options.measures):
        for step, table in enumerate(tables):
            if name in table:
                intervals[number, step] = table.interval(name)
        uniform.append(tables[-1].part(name, "baseline"))
        column = tables[-1].columns.get(name, Column(name))
        least, most = column.range
        measures.append({**vars(column), "least": least, "most": most})

    # The roles that any head has, and which head has them when, (role, checkpoint, head).
    evidence = [checkpoint.findings.table("roles") for checkpoint in checkpoints]
    named = set(chain.from_iterable(table["role"].tolist() for table in evidence))
    roles = [name for name in RULES if name in named]
    has_role = np.full((len(roles), len(tables), n_heads), NO_ROLE, np.int8)
    for step, table in enumerate(evidence):
        rows = list(map(roles.index, table["role"].tolist()))
        has_role[rows, step, table["head"]] = np.where(table["tentative"], TENTATIVE, HAS_ROLE)

    # The tables and arrays.
    stages = []
    names = []
    for checkpoint in checkpoints:
        stages.append({**vars(checkpoint.stage), **vars(checkpoint)})
        names.append(checkpoint.stage.name)
    columns = Training.TABLES
    filled = {
        "checkpoints": Table.of(columns["checkpoints"], stages),
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
    # What else the result says is that of the last checkpoint.
    described = {
        **last.options,
        "measures": list(options.measures),
        "loss": checkpoints[-1].predicted,
        "roles": {name: last.options["roles"][name] for name in roles},
    }
    run = {**last.run, "model": _common_name(names, str(last.run["model"]))}
    if skipped:
        run["skipped"] = skipped
    corpus = {**last.corpus, "complete": complete, "n_checkpoints": len(checkpoints)}
    return Training(run, corpus, described, filled, arrays)


def _common_name(names: Sequence[str], alone: str) -> str:
    """Return what a training is called: the folder that all folders are in, or the model of all revisions.

    It is `alone` if there is one checkpoint, or nothing in common.
    """
    wholes = set()
    for name in names:
        model, at_sign, _ = name.partition("@")
        wholes.add(model if at_sign else Path(name).parent.name)
    if len(names) == 1 or len(wholes) > 1:
        return alone
    return wholes.pop() or alone
