"""Declare the result about training, which shows when the heads of a model formed: its columns and its report.

A checkpoint is the model at one step of its training. A measure is a number per head, such as the mean attention to the
previous token. A head has a role, such as "previous token", if a test across texts finds its measure large.
`studies.training` computes the result.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from attnscope.errors import amount, require_choice
from attnscope.report.blocks import Block, Ranking, Report, Trends, WordsColumn
from attnscope.report.wording import label, printable, report_on
from attnscope.results.result import Result, is_interrupted
from attnscope.results.table import HEADS, Array, Column, Table, count, number, text

NO_ROLE, TENTATIVE, HAS_ROLE = range(3)
"""The values of the array `has_role`. A role is tentative if the head was tested on few texts."""

MAX_STEPS = 1 << 53
"""The largest step, 2**53: JSON and the axes of figures use float64, which is exact for integers up to it."""

_PREDICTED_TOKENS = {
    "causal": "each next token",
    "masked": "masked tokens",
    "target": "the decoder's target",
}
"""The tokens that the loss is measured on, by `options["loss"]`."""

_MAX_NAMED_HEADS = 6
"""The most heads that the report names per role."""

_NO_HEAD = "no head at the last step"
_FIGURE = "training"


class Training(Result):
    """Hold the measures and roles of all heads over the checkpoints of one training.

    `run`, which says how the result was computed, is that of the last checkpoint. `run["skipped"]` lists the
    checkpoints that could not be measured, with the reason. `options["loss"]` says which tokens were predicted: causal,
    masked or target.
    """

    SCHEMA: ClassVar[str] = "attnscope.training/2"
    TABLES: ClassVar[Mapping[str, Sequence[Column]]] = {
        "checkpoints": (
            text("name", "what it was asked for by, such as a folder"),
            count("step", "its step", range=(0, MAX_STEPS)),
            text("sha256", "hash of its weights; empty for one in memory"),
            number("loss", "mean loss of its predictions on the texts; NaN = not measured", "nats"),
            number("elapsed_s", "how long it took to measure, without loading", "seconds"),
        ),
        "heads": HEADS,
        "measures": (
            text("name"),
            text("meaning"),
            text("unit"),
            number("least", "its least possible value"),
            number("most", "its largest possible value"),
        ),
        "roles": (text("name", "a role that any head has at any step"),),
    }
    CSV: ClassVar[tuple[str, ...]] = ("checkpoints", "heads")
    ARRAYS: ClassVar[Sequence[Array]] = (
        Array("value", "of each measure; NaN = undefined", axes=("measures", "checkpoints", "heads")),
        Array("uniform", "the same under uniform attention", axes=("measures", "heads")),
        Array(
            "has_role",
            "0 no, 1 tentatively (few texts), 2 yes",
            range=(0, 2),
            kind="count",
            axes=("roles", "checkpoints", "heads"),
        ),
    )

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the steps of the checkpoints, ascending."""
        return tuple(self.table("checkpoints")["step"].tolist())

    def since(self, role: str) -> dict[str, int]:
        """Return since which step each head has had a role, without a gap up to the last step, by the head's name.

        Heads without the role at the last step are left out. For example, {"L1H0": 300} says that only L1H0 has the
        role at the last step, and that it has had the role at each checkpoint since step 300.

        Raises:
            AttnscopeError: There is no such role.
        """
        names = self.table("roles")["name"].tolist()
        if role not in names:
            # A role that was tested, and that no head has at any step, is known: it has no row in the table.
            require_choice("role", role, [*self.options.get("roles", {}), *names])
            return {}
        # (checkpoint, head)
        has_role = self["has_role"][names.index(role)] > NO_ROLE
        # Count backwards from the last checkpoint, up to the first one without the role: (head,).
        n_trailing = np.logical_and.accumulate(has_role[::-1]).sum(0)
        first_step_by_head = {}
        for name, n_checkpoints in zip(self.head_names, n_trailing.tolist(), strict=True):
            if n_checkpoints:
                first_step_by_head[name] = self.steps[-n_checkpoints]
        return first_step_by_head

    def require_whole(self) -> None:
        """Refuse a damaged result, and one whose steps do not ascend."""
        super().require_whole()
        if (np.diff(self.table("checkpoints")["step"]) <= 0).any():
            raise ValueError("its steps do not ascend")

    def report(self, **shown: Any) -> Report:
        """Return the report: since when heads have had their roles, then how their measures changed.

        `shown`, which other kinds of results read, is ignored.
        """
        first, last = self.steps[0], self.steps[-1]
        if first == last:
            checkpoints_text = f"1 checkpoint, step {first:,}"
            question = (
                f"heads with a role at {checkpoints_text}; to see since when, name several checkpoints"
            )
        else:
            checkpoints_text = f"{amount(len(self.steps), 'checkpoint')}, steps {first:,} to {last:,}"
            question = f"heads with a role at the last of {checkpoints_text}, and since when"
        heads_by_role = _list_heads_by_role(self)
        blocks = [*_yield_trends(self)]
        if heads_by_role:
            roles_column = WordsColumn(
                "heads that have it at the last step", [*heads_by_role.values()], wraps=True
            )
            blocks.append(
                Ranking(
                    heading="roles",
                    printed="with --all",
                    header="role",
                    names=[*heads_by_role],
                    table=Table({}, {}),
                    columns=[roles_column],
                )
            )
        # A role that is named like a measure is explained by the measure's meaning.
        meanings = {}
        for measure in self.table("measures").as_dicts():
            meanings[label(measure["name"])] = f" ({measure['meaning']})"
        role_lines = []
        for role, heads_text in heads_by_role.items():
            if heads_text != _NO_HEAD:
                role_lines.append(f"{role}{meanings.get(role, '')}: {heads_text}")
        return report_on(
            self,
            # The answer names the first three roles that any head has at the last step.
            [question, *(role_lines[:3] or ["No head has a role at the last step"])],
            blocks,
            _explain_numbers(self),
            subtitle=checkpoints_text,
            problems=list(_list_problems(self)),
        )


# The answer and the blocks


def _list_heads_by_role(training: Training) -> dict[str, str]:
    """List by role the heads that have it at the last step, such as "L1H0 since step 300, L1H1".

    A head that has had the role at every checkpoint, such as L1H1, has no "since". A role without heads has _NO_HEAD.
    """
    texts = {}
    for role in training.table("roles")["name"].tolist():
        first_step_by_head = training.since(role)
        # Heads that got the role earlier come first; `sorted` keeps heads of the same step in the order of the model.
        names = sorted(first_step_by_head, key=first_step_by_head.__getitem__)
        phrases = []
        for name in names[:_MAX_NAMED_HEADS]:
            has_it_always = first_step_by_head[name] == training.steps[0]
            phrases.append(name if has_it_always else f"{name} since step {first_step_by_head[name]:,}")
        if len(names) > _MAX_NAMED_HEADS:
            phrases.append(f"and {len(names) - _MAX_NAMED_HEADS} more")
        texts[label(role)] = ", ".join(phrases) or _NO_HEAD
    return texts


def _yield_trends(training: Training) -> Iterator[Block]:
    """Yield a plot of the loss, if it was measured, then a plot of each measure."""
    steps, head_names = training.steps, training.head_names
    # (step, 3): value, low and high end of its interval.
    loss = training.table("checkpoints").interval("loss")
    if np.isfinite(loss[:, 0]).any():
        yield Trends(
            figure=_FIGURE,
            y="loss, nats",
            noun="texts",
            steps=steps,
            names=["all texts"],
            # (step, curve, 3), with a single curve.
            points=loss[:, None],
        )
    # Measures with the name of a role that some head has at the last step come first, as False sorts before True.
    measures = training.table("measures").as_dicts()
    current_roles = [role for role in training.table("roles")["name"].tolist() if training.since(role)]
    intervals = training.interval("value")
    for row in sorted(range(len(measures)), key=lambda row: measures[row]["name"] not in current_roles):
        measure = measures[row]
        # (step, head, 3): value, low and high.
        points = intervals[row]
        name, unit = measure["name"], measure["unit"]
        # The unit stands behind a comma, not in the name.
        title = label(name.removesuffix("_nats").removesuffix("_tokens"))
        if unit and unit != "share":
            title += f", {printable(unit, 40)}"
        # The axis of a measure from 0 to 1 always ends at 1 or at 0.5, so that figures can be compared.
        y_limits = None
        if (measure["least"], measure["most"]) == (0, 1):
            y_limits = (0.0, 1.0 if np.nanmax(points[..., 0], initial=0.0) > 0.5 else 0.5)
        # The measure of uniform attention is a horizontal line, drawn only if all heads have the same value (up to
        # rounding). Heads with other masks, such as a sliding window, have other values.
        uniform = training["uniform"][row]
        uniform = uniform[np.isfinite(uniform)]
        uniform_level = None
        if len(uniform) and np.ptp(uniform) < 1e-6:
            uniform_level = float(uniform[0])
        unit_words = "mean attention weight, 0 to 1" if unit == "share" else printable(unit, 40)
        yield Trends(
            heading=f"{label(name)}: {measure['meaning']} ({unit_words}); heads with and without the role",
            figure=_FIGURE,
            y=title,
            noun="heads",
            steps=steps,
            names=head_names,
            points=points,
            y_limits=y_limits,
            uniform_level=uniform_level,
        )


# Sentences


def _explain_numbers(training: Training) -> Iterator[str]:
    """Explain what the intervals are over, and which tokens were predicted."""
    if np.isfinite(training.grids.get("value_low", np.nan)).any():
        yield "intervals: 95% over texts, of each checkpoint for itself"
    if predicted := _PREDICTED_TOKENS.get(str(training.options.get("loss"))):
        yield f"predicted: {predicted}"


def _list_problems(training: Training) -> Iterator[str]:
    """List warnings: uncertain roles, unknown words, checkpoints left out, and an interrupted run."""
    if (training["has_role"] == TENTATIVE).any():
        yield "some roles rest on few texts, and are tentative"
    if unknown := training.corpus.get("unknown_words"):
        yield printable(unknown)
    if skipped := training.run.get("skipped"):
        yield f"{amount(len(skipped), 'checkpoint')} left out"
    if is_interrupted(training.corpus):
        yield "interrupted: later checkpoints were not measured"
