"""A timeline of heads that is written while a model is trained by transformers' Trainer."""

from __future__ import annotations

import contextlib
import random
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from attnscope.core.plain_torch import with_plain_torch
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.hf.model import wrap
from attnscope.records.timeline import Timeline
from attnscope.studies.inputs.texts import texts_of
from attnscope.studies.timeline.options import TimelineOptions
from attnscope.studies.timeline.study import Given, Growing, Stage


class HeadWatch(TrainerCallback):
    """Measures all heads every so many steps of a training, and writes them as a timeline.

        watch = attnscope.HeadWatch(["a few texts", "that stay the same"], every=100)
        Trainer(model, args, train_dataset=texts, processing_class=tokenizer, callbacks=[watch]).train()
        watch.timeline.since("induction")            # also in args.output_dir/timeline.npz, after each measurement

    The training goes on as if nobody had looked: dropout, random numbers, gradients and the mode of every module are as
    they were, so that losses are the same bit for bit. What it costs is the time of the measurements, which
    `elapsed_s` adds up. A model that cannot be measured is warned of once, and is trained on. In a training of several
    processes the first one measures; a model whose weights are spread over processes (FSDP, ZeRO-3) is whole in none,
    and is for `attnscope timeline` after the training.

    Args:
        corpus: What to run the model on: texts or a Corpus; few, as each measurement reads them all. None = repeated
            random tokens of its vocabulary, the standard test for induction.
        every: How many steps lie between two measurements; the first and the last step are measured too.
        out: The file to write, such as "heads/timeline.npz"; None = timeline.npz in the training's output_dir.
        options: What is followed.
        tokenizer: What makes tokens of the texts; None = the Trainer's processing_class.

    Attributes:
        elapsed_s: How many seconds measuring has taken until now, writing included.

    Raises:
        AttnscopeError: There is no text.
        UsageError: `every` is less than 1.
    """

    def __init__(
        self,
        corpus: Given = None,
        *,
        every: int = 500,
        out: str | Path | None = None,
        options: TimelineOptions | None = None,
        tokenizer: Any = None,
    ) -> None:
        if every < 1:
            raise UsageError(f"heads are measured every {every} steps", "give a number of steps, at least 1")
        self._every, self._tokenizer = every, tokenizer
        self._out = None if out is None else Path(out)
        self._growing = Growing(options or TimelineOptions(), None if corpus is None else texts_of(corpus))
        self._last: int | None = None
        self._checked = self._warned = False
        self.elapsed_s = 0.0

    @property
    def timeline(self) -> Timeline:
        """What has been measured until now.

        Raises:
            AttnscopeError: The model cannot be measured, or nothing was measured yet.
        """
        if self._last is None:
            raise AttnscopeError("nothing was measured yet", "train first")
        return self._growing.record()

    @with_plain_torch
    def measure(self, model: PreTrainedModel, step: int, tokenizer: Any = None) -> None:
        """Measures a model as it is now, and writes the timeline: for trainings without Trainer, too.

        Args:
            model: The model, which is left as it is.
            step: Its step; the last one's is not measured again.
            tokenizer: Its tokenizer, unless the watch has one.
        """
        if self._last is not None and step <= self._last:
            return
        began, name = time.perf_counter(), f"step {step}"
        try:
            with _preserve_state(model):
                own_tokenizer = tokenizer if self._tokenizer is None else self._tokenizer
                # Compared with its own eager attention once: its code stays the same.
                seen = wrap(model, own_tokenizer, check=not self._checked)
                self._checked = True
                self._growing.add(Stage(name, step, seen))
                if self._out is not None:
                    self._growing.record().save(self._out)
        except Exception as error:  # a training of days does not end because nobody can look at it
            reason = self._growing.skip(name, error)
            if not self._warned:
                warnings.warn(f"attnscope cannot measure the heads at {name}: {reason}", stacklevel=3)
            self._warned = True
        self._last = step
        self.elapsed_s += time.perf_counter() - began

    # What the Trainer calls ----------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        """Measures the model that training begins with."""
        if self._out is None:
            # A training that goes on from a checkpoint leaves what was written before it.
            self._out = Path(args.output_dir) / (
                f"timeline-from-{state.global_step}.npz" if state.global_step else "timeline.npz"
            )
        self._look(state, facts)

    def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        """Measures the model every so many steps."""
        if state.global_step % self._every == 0:
            self._look(state, facts)

    def on_train_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        """Measures the model that came of it."""
        self._look(state, facts)

    def _look(self, state: Any, facts: dict[str, Any]) -> None:
        if state.is_world_process_zero:
            self.measure(facts["model"], int(state.global_step), facts.get("processing_class"))


@contextlib.contextmanager
def _preserve_state(model: nn.Module) -> Iterator[None]:
    """Leaves random numbers, modes and what needs gradients as they were, after a model was looked at."""
    training = [(module, module.training) for module in model.modules()]
    wanting = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    numbers, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002  # what others draw from
    devices = {parameter.device.index for parameter, _ in wanting if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(index for index in devices if index is not None)), torch.no_grad():
        try:
            model.eval()
            yield
        finally:
            for module, mode in training:
                module.training = mode
            for parameter, wants in wanting:
                parameter.requires_grad_(wants)
            random.setstate(numbers)
            np.random.set_state(legacy)  # noqa: NPY002
