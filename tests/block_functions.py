"""What tests have workers do with blocks. Loads no test library, as each worker imports it."""

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnscope.studies.heads.measuring import HeadMeasurer


@dataclass
class Square:
    """Squares numbers. Over a number in `deadly`, the worker is killed the first so many times.

    Attributes:
        marks: A folder in which each death leaves a file, as processes share nothing else.
    """

    marks: Path
    deadly: dict[int, int] = field(default_factory=dict)
    signal: int = signal.SIGKILL
    loaded_by: int = 0

    def load(self) -> None:
        if not self.loaded_by:
            self.loaded_by = os.getpid()
            self._die(-1)

    def __call__(self, number: int) -> tuple[int, int]:
        self._die(number)
        return number**2, self.loaded_by

    def _die(self, number: int) -> None:
        n_deaths = len(list(self.marks.glob(f"death-{number}-*")))
        if n_deaths < self.deadly.get(number, 0):
            (self.marks / f"death-{number}-{n_deaths}").touch()
            os.kill(os.getpid(), self.signal)


class Raises:
    """Raises what it is given."""

    def load(self) -> None:
        pass

    def __call__(self, error: Exception) -> None:
        raise error


class Environment:
    """Tells what a worker finds around it."""

    def load(self) -> None:
        pass

    def __call__(self, name: str) -> str | None:
        return os.environ.get(name)


@dataclass
class Slow:
    """Is done with even numbers at once, and with odd ones never; leaves a file for each that it is at."""

    marks: Path

    def load(self) -> None:
        pass

    def __call__(self, number: int) -> int:
        (self.marks / f"{number}-{os.getpid()}").touch()
        while number % 2:
            time.sleep(0.01)
        return number


class DeadlyMeasurer(HeadMeasurer):
    """Measures heads as a study does; the first so many workers that get a certain text are killed."""

    def __init__(self, *arguments: Any, marks: Path, text: int, n_deaths: int, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._marks, self._text, self._n_deaths = marks, text, n_deaths

    def start(self, block: Any) -> Any:
        n_deaths = len(list(self._marks.iterdir()))
        if any(text.index == self._text for text in block.texts) and n_deaths < self._n_deaths:
            (self._marks / f"death-{n_deaths}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().start(block)
