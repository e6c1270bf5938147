"""An option of a question, said once: one field carries its type, default, help, range and what reads it.

The same dataclass is the group of a command's options and the argument of the Python function. It loads neither torch,
nor NumPy, nor typer.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

from attnscope.errors import UsageError

C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Option:
    """What is known of an option beside its type and default.

    Attributes:
        help: What it does, for `--help` and the docstring of the dataclass.
        flags: How it is written, such as ("-o", "--out"); empty = its name after two dashes.
        least: Its least value; None = there is no bound.
        most: Its largest value.
        choices: The values that it may have; of a tuple, those that its members may have.
        read: What makes a value of the words on the command line; None = it is taken as its type says.
        written: The default as the command line has it, where `read` reads it.
        python_only: Whether the command line does not have it.
    """

    help: str
    flags: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    read: Callable[[Any], Any] | None = None
    written: Any = None
    python_only: bool = False

    def require(self, name: str, value: Any) -> None:
        """Refuses a value outside its range or choices.

        Raises:
            UsageError: It is.
        """
        option = next((flag for flag in self.flags if flag.startswith("--")), f"--{name.replace('_', '-')}")
        if self.choices:
            for each in value if isinstance(value, tuple) else () if value is None else (value,):
                if each not in self.choices:
                    raise UsageError(f"{option} has no {each!r}", f"choose from {', '.join(self.choices)}")
        if isinstance(value, int | float):
            if self.least is not None and value < self.least:
                raise UsageError(f"{option} is {value}", f"it is at least {self.least}")
            if self.most is not None and value > self.most:
                raise UsageError(f"{option} is {value}", f"it is at most {self.most}")


def option(
    help: str, *flags: str, default: Any = dataclasses.MISSING, default_factory: Any = dataclasses.MISSING, **more: Any
) -> Any:
    """A field of a dataclass of options.

    Args:
        help: As of `Option`.
        flags: As of `Option`.
        default: Its default.
        default_factory: What makes its default, where each has one of its own.
        more: Further fields of `Option`.
    """
    how: dict[str, Any] = {"default": default, "default_factory": default_factory}
    return dataclasses.field(**how, metadata={"option": Option(help, flags, **more)})


@dataclass_transform(frozen_default=True, field_specifiers=(option, dataclasses.field))
def options(cls: C) -> C:
    """Makes a class a frozen dataclass of options: ranges are checked, and its docstring lists them.

    A method `require` of the class, where it has one, refuses options that do not go together.
    """

    def check(self: Any) -> None:
        for field in dataclasses.fields(self):
            if (known := field.metadata.get("option")) is not None:
                known.require(field.name, getattr(self, field.name))
        if hasattr(self, "require"):
            self.require()

    cls.__post_init__ = check  # type: ignore[attr-defined]  # what dataclasses call
    made: Any = dataclass(frozen=True)(cls)
    listed = [
        textwrap.fill(f"{field.name}: {known.help}", 112, initial_indent=" " * 8, subsequent_indent=" " * 12)
        for field in dataclasses.fields(made)
        if (known := field.metadata.get("option")) is not None
    ]
    made.__doc__ = "\n".join([textwrap.dedent(cls.__doc__ or "").strip(), "", "    Attributes:", *listed])
    return made  # type: ignore[no-any-return]  # the class, as a dataclass
