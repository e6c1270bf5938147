"""Measure all heads at each checkpoint of a training, and follow their measures and roles over its steps."""

from __future__ import annotations

import contextlib
import gc
import glob
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus import Corpus, CorpusText
from attnscope.errors import AttnscopeError, UsageError, amount, one_line, parse_json
from attnscope.models.model import Model
from attnscope.questions.heads import Heads
from attnscope.questions.training import HAS_ROLE, MOST_STEPS, NO_ROLE, TENTATIVE, Training
from attnscope.results.result import failure_line
from attnscope.results.table import HEADS, Column, Estimate, Floats, Table
from attnscope.studies.ablate.measurers import StandIns, measure_cuts
from attnscope.studies.ablate.reading import Passes, Reader
from attnscope.studies.failures import failure
from attnscope.studies.heads.roles import RULES
from attnscope.studies.heads.study import heads, probe_texts
from attnscope.studies.inputs.texts import Report, Texts, scale_report, texts_of
from attnscope.studies.training.options import TrainingOptions

Spec = str | os.PathLike[str] | Model
Given = Corpus | str | Sequence[str] | Sequence[CorpusText] | None


@with_plain_torch
def training(
    models: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[int, Spec],
    corpus: Given = None,
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
    growing = Growing(options, None if corpus is None else texts_of(corpus))
    growing.skipped += skipped
    complete = True
    # A training survives checkpoints that fail.
    for number, stage in enumerate(stages):
        try:
            growing.add(stage, scale_report(report, number, len(stages)))
        except KeyboardInterrupt:
            complete = False
            break
        except Exception as error:  # whatever a library raises on one checkpoint, the others are not lost for it
            growing.skip(stage.name, error)
        gc.collect()  # a network's modules refer to each other: the next one is not to stand beside it
    return growing.record(complete=complete)


# Which checkpoints -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """Hold a checkpoint to measure: its name, its step, and the model or the name to load it by."""

    name: str
    step: int
    spec: Spec


def stages_of(
    models: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[int, Spec],
) -> tuple[list[Stage], list[dict[str, Any]]]:
    """Return the checkpoints by step, and the problems of those without a step among others that have one."""
    # Models by step: the steps are the caller's.
    if isinstance(models, Mapping):
        if not all(0 <= step <= MOST_STEPS for step in models):
            raise UsageError("a checkpoint is given at what is no step", f"steps are from 0 to {MOST_STEPS:,}")
        return [Stage(_name(models[step]) or f"step {step}", step, models[step]) for step in sorted(models)], []
    # Expand patterns to names; a name that comes twice counts once.
    patterns = [models] if isinstance(models, str | os.PathLike) else list(models)
    names: set[str] = set()
    for pattern in patterns:
        names |= {*_expand(os.fspath(pattern))}
    if not names:
        raise UsageError("no checkpoint is given", "such as 'run/checkpoint-*'")
    # If no name has a step, count them in order; otherwise skip names without one.
    steps = {name: step_of(name) for name in sorted(names)}
    if all(step is None for step in steps.values()):
        return [Stage(name, number, name) for number, name in enumerate(steps)], []
    stages: dict[int, Stage] = {}
    skipped = []
    for name, step in steps.items():
        if step is None:
            skipped.append(_problem(name, "its name has no step; from Python, checkpoints are given by step"))
        elif step in stages:
            skipped.append(_problem(name, f"its step {step} is that of {stages[step].name}"))
        else:
            stages[step] = Stage(name, step, name)
    return [stages[step] for step in sorted(stages)], skipped


def _name(spec: Spec) -> str:
    """Return what a model is loaded by; empty if it is loaded already."""
    return os.fspath(spec) if isinstance(spec, str | os.PathLike) else ""


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


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint, by what transformers wrote beside it, else by its name; None if neither says.

    A number with more digits than a count of steps can have is no step.
    """
    folder = Path(os.path.expanduser(name))  # noqa: PTH111  # Path refuses ~nobody
    with contextlib.suppress(OSError, ValueError, AttributeError):
        step = parse_json((folder / "trainer_state.json").read_text("utf-8")).get("global_step")
        if type(step) is int and 0 <= step <= MOST_STEPS:
            return step
    _, has_revision, revision = name.partition("@")
    is_there = os.path.exists(folder)  # noqa: PTH110  # Path raises for names that no folder can have
    last = revision if has_revision and not is_there else folder.name
    numbers = _NAMED_STEP.findall(last) or re.findall(r"\d+", last, re.ASCII)
    if not numbers or len(numbers[-1]) > len(str(MOST_STEPS)):
        return None
    step = int(numbers[-1])
    return step if step <= MOST_STEPS else None


def _problem(source: str, reason: str) -> dict[str, Any]:
    return {"source": source, "line": None, "reason": reason}


# Measuring them -------------------------------------------------------------------------------------------------


class Growing:
    """Hold a training that grows checkpoint by checkpoint.

    Attributes:
        skipped: What could not be measured, and why.
    """

    def __init__(self, options: TrainingOptions, texts: Texts | None) -> None:
        self._options = options
        self._texts = texts
        self._rows: list[dict[str, Any]] = []
        self._findings: list[Heads] = []
        self._predicted: str | None = None
        self._error: Exception | None = None
        self.skipped: list[dict[str, Any]] = []

    def add(self, stage: Stage, report: Report | None = None) -> None:
        """Measure a checkpoint; refuse one of another training. An interruption leaves it out."""
        model = self._load(stage.spec)
        began = time.perf_counter()
        texts = self._texts = probe_texts(model) if self._texts is None else self._texts
        findings = heads(model, texts, self._options.heads_options, report)
        if not findings.corpus["complete"]:
            raise KeyboardInterrupt
        for failed in findings.run.get("failures", ())[:1]:
            raise AttnscopeError(failure_line(failed), failed["hint"])
        self._require_alike(findings)
        row = {"name": stage.name, "step": stage.step, "sha256": model.info.sha256, "loss": self._loss_of(model, texts)}
        self._rows.append(row | {"elapsed_s": time.perf_counter() - began})
        self._findings.append(findings)

    def skip(self, name: str, error: Exception) -> None:
        """Note that a checkpoint could not be measured, and why."""
        self._error = self._error or error
        self.skipped.append(_problem(name, one_line(failure(name, error)["error"])))

    def record(self, *, complete: bool = True) -> Training:
        """Return the training until now.

        Raises:
            Exception: There is no checkpoint: the first one's error, or the interruption.
        """
        if not self._findings:
            if self._error is None or not complete:
                raise KeyboardInterrupt
            raise self._error
        last = self._findings[-1]
        tables = [findings.table("heads") for findings in self._findings]
        roles, has_role = self._roles()

        # The measures with their intervals, (measure, checkpoint, head).
        names = self._options.measures
        intervals = np.array([[_interval(table, name) for table in tables] for name in names])
        value, low, high = np.moveaxis(intervals, 3, 0)
        uniform = np.array([tables[-1].part(name, "baseline") for name in names])
        arrays = {"value": value, "value_low": low, "value_high": high, "uniform": uniform, "has_role": has_role}

        # What they are.
        known = Training.TABLES
        measures = []
        for name in names:
            column = tables[-1].columns.get(name, Column(name))
            least, most = column.range
            measures.append(
                {"name": name, "meaning": column.meaning, "unit": column.unit, "least": least, "most": most}
            )
        filled = {
            "checkpoints": Table.of(known["checkpoints"], self._rows),
            "heads": Table.of_arrays(HEADS, **{column.name: tables[-1][column.name] for column in HEADS}),
            "measures": Table.of(known["measures"], measures),
            "roles": Table.of(known["roles"], [{"name": name} for name in roles]),
        }
        options = dict(last.options) | {"measures": list(names), "loss": self._predicted}
        options["roles"] = {name: last.options["roles"][name] for name in roles}
        run = dict(last.run)
        run["model"] = _common_name([row["name"] for row in self._rows], str(run["model"]))
        if self.skipped:
            run["skipped"] = self.skipped
        corpus = dict(last.corpus) | {"complete": complete, "n_checkpoints": len(self._rows)}
        return Training(run, corpus, options, filled, arrays)

    def _roles(self) -> tuple[list[str], NDArray[np.int8]]:
        """Return the roles that any head has, and which head has them when, (role, checkpoint, head)."""
        tables = [findings.table("roles") for findings in self._findings]
        named = {name for table in tables for name in table["role"].tolist()}
        roles = [name for name in RULES if name in named]
        has_role = np.full((len(roles), len(tables), len(self._findings[-1].table("heads"))), NO_ROLE, np.int8)
        for step, table in enumerate(tables):
            rows = [roles.index(name) for name in table["role"].tolist()]
            has_role[rows, step, table["head"]] = np.where(table["tentative"], TENTATIVE, HAS_ROLE)
        return roles, has_role

    def _load(self, spec: Spec) -> Model:
        if not isinstance(spec, str | os.PathLike):
            return spec
        name = os.fspath(spec)
        loading = self._options.loading
        return (loading.with_head(name) if self._options.loss != "none" else loading).load(name)

    def _require_alike(self, findings: Heads) -> None:
        if not self._findings:
            return
        name, first = self._rows[0]["name"], self._findings[0]
        heads = findings.table("heads")
        if heads.head_names(with_kind=True) != first.table("heads").head_names(with_kind=True):
            raise AttnscopeError(f"it has {len(heads)} heads, and not those of {name}")
        if findings.corpus["n_tokens"] != first.corpus["n_tokens"]:
            raise AttnscopeError(
                f"it makes {amount(findings.corpus['n_tokens'], 'token')} of the texts, and {name} "
                f"{first.corpus['n_tokens']:,}"
            )

    def _loss_of(self, model: Model, texts: Texts) -> Estimate:
        """Return the model's loss on the texts: a pass that takes no head out."""
        self._predicted = model.loss if self._options.loss != "none" and not model.labels else None
        if self._predicted is None:
            return Estimate(np.nan, np.nan, np.nan, count=0)
        result = measure_cuts(Passes(model, Reader(model, model.loss), texts), (), StandIns())
        if not result.complete:
            raise KeyboardInterrupt
        whole = result.done.whole
        low, high = whole.interval()
        return Estimate(float(whole.ratio()), max(float(low), 0.0), float(high), count=float(whole.total("c")))


def _interval(heads: Table, name: str) -> Floats:
    """Return a measure of all heads with its interval, (head, 3); NaN if the model has no such measure."""
    return heads.interval(name) if name in heads else np.full((len(heads), 3), np.nan)


def _common_name(names: Sequence[str], alone: str) -> str:
    """Return what a training is called: the folder that all folders are in, or the model of all revisions."""
    wholes = {name.partition("@")[0] if "@" in name else Path(name).parent.name for name in names}
    return wholes.pop() or alone if len(wholes) == 1 and len(names) > 1 else alone
