"""Options of a study, each declared once: one field carries its type, default, help, range and parser.

The same dataclass gives a command its options and the Python function its argument. It loads neither torch, nor NumPy,
nor typer.
"""

import dataclasses
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

from attnscope.errors import UsageError, require_choice, suggest

C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Option:
    """The declaration of an option, beside its type and default.

    Attributes:
        help: What it does, for `--help` and the docstring of the dataclass.
        flags: How it is written, such as ("-o", "--out"); empty = its name after two dashes.
        least: Its least value; None = there is no bound.
        most: Its largest value.
        choices: The values that it may have; of a tuple, those that its members may have.
        read: Parses the value from the command line; None = its type decides.
        written: The default as written on the command line, for `read` to parse.
        python_only: Whether only Python has it.
        complete: What a shell completes it with: "models".
        panel: Under which heading of the help it stands; None = under that of its group.
        argument: Whether the command line takes it by its place, without a flag.
        metavar: What the help calls the value of an argument; None = as typer does.
        needed: Whether the command line has to give it, though Python has a default.
        rare: Whether the help leaves it to --help-all.
        several: Whether `read` takes the list of all values, as the option may be given several times.
    """

    help: str
    flags: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    read: Callable[[Any], Any] | None = None
    written: Any = None
    python_only: bool = False
    complete: str | None = None
    panel: str | None = None
    argument: bool = False
    metavar: str | None = None
    needed: bool = False
    rare: bool = False
    several: bool = False

    def require(self, option: str, value: Any) -> None:
        """Refuse a value outside its range or choices; `option` is what a message calls the option."""
        members = value if isinstance(value, tuple) else (value,)
        for each in members:
            if self.choices and each is not None and each not in self.choices:
                raise UsageError(f"{option} has no {each!r}", suggest(str(each), self.choices))
        if isinstance(value, int | float):
            is_low = self.least is not None and value < self.least
            if is_low or (self.most is not None and value > self.most):
                limit = f"at least {self.least}" if is_low else f"at most {self.most}"
                raise UsageError(f"{option} is {value}", f"it must be {limit}")


def option(
    help: str,
    *flags: str,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    **more: Any,
) -> Any:
    """Return a field of a dataclass of options; a bool whose default is True is switched off by its flag.

    Args:
        help: As of `Option`.
        flags: As of `Option`.
        default: Its default.
        default_factory: What makes its default, where each has one of its own.
        more: Further fields of `Option`.
    """
    how: dict[str, Any] = {"default": default, "default_factory": default_factory}
    return dataclasses.field(**how, metadata={"option": Option(help, flags, **more)})


def group(kind: type) -> Any:
    """Return a field that is itself a dataclass of options; the command line takes its options too."""
    return dataclasses.field(default_factory=kind, metadata={"group": kind})


def name_option(field: dataclasses.Field[Any]) -> str:
    """Return what a message calls the option of a field: its long flag, or TEXT for the argument `text`."""
    known = field.metadata.get("option", Option(""))
    flags = [flag for flag in known.flags if flag.startswith("--")]
    return field.name.upper() if known.argument else [*flags, f"--{field.name.replace('_', '-')}"][0]


@dataclass_transform(frozen_default=True, field_specifiers=(option, dataclasses.field))
def options(cls: C) -> C:
    """Make a class a frozen dataclass of options: ranges are checked, and its docstring lists them.

    A method `require` of the class, where it has one, refuses options that do not go together by a UsageError.
    """

    # Each option checks its own range, then the class checks how they go together.
    def check(self: Any) -> None:
        for field in dataclasses.fields(self):
            if (known := field.metadata.get("option")) is not None:
                known.require(name_option(field), getattr(self, field.name))
        if hasattr(self, "require"):
            self.require()

    # `check` runs when an object is made.
    cls.__post_init__ = check  # type: ignore[attr-defined]  # what dataclasses call
    new_class: Any = dataclass(frozen=True)(cls)
    # The docstring lists the help of each option.
    listed = [
        textwrap.fill(
            f"{field.name}: {known.help}", 112, initial_indent=" " * 8, subsequent_indent=" " * 12
        )
        for field in dataclasses.fields(new_class)
        if (known := field.metadata.get("option")) is not None
    ]
    new_class.__doc__ = "\n".join(
        [textwrap.dedent(cls.__doc__ or "").strip(), "", "    Attributes:", *listed]
    )
    return new_class  # type: ignore[no-any-return]  # the class, as a dataclass


def refuse_beside(option: str, *groups: Any, **others: object) -> None:
    """Refuse what cannot be given together with an option: anything true, and any field of a group that is changed."""
    names = [f"--{name.replace('_', '-')}" for name, value in others.items() if value]
    for group in groups:
        names += _changed(group)
    if names:
        raise UsageError(f"{names[0]} cannot be given beside {option}", "leave out one of them")


def _changed(group: Any) -> list[str]:
    """Return what messages call the options of a group, and of the groups in it, that are changed."""
    names = []
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        if "group" in field.metadata:
            names += _changed(value)
        elif value != getattr(type(group)(), field.name):
            names.append(name_option(field))
    return names


# Options that mean the same in every question --------------------------------------------------------------------


MOST_SEED = 2**32 - 1
"""The largest seed that every generator takes."""


def seed_option(of: str, *, python_only: bool = False) -> Any:
    """Return the field `seed` of a dataclass of options; `of` names what is drawn by it."""
    return option(
        f"Seed of {of}.", default=0, least=0, most=MOST_SEED, python_only=python_only, rare=True
    )


def kind_option() -> Any:
    """Return the field `kind` of a dataclass of options."""
    return option(
        "In an encoder-decoder: only encoder, decoder or cross attention.  [default: all]",
        "--kind",
        default=None,
        choices=("encoder", "decoder", "cross"),
        panel="Heads",
        rare=True,
    )


def target_option() -> Any:
    """Return the field `target` of a dataclass of options about many texts."""
    return option(
        "What an encoder-decoder is to write.  [default: its own answer to each text]",
        default=None,
        panel="Text",
        rare=True,
    )


def chunk_option() -> Any:
    """Return the field `chunk` of a dataclass of options."""
    return option("Cut long texts into chunks of this many tokens.", default=None, rare=True)


def stride_option() -> Any:
    """Return the field `stride` of a dataclass of options."""
    return option(
        "How many tokens later the next chunk starts; overlaps count once.",
        default=None,
        python_only=True,
    )


# How values are read -------------------------------------------------------------------------------------------------

_NUMBERS = re.compile(r"\d+(-\d+)?", re.ASCII)
_SPAN = re.compile(r"(\d*):(\d*)", re.ASCII)
_MOST_DIGITS = 18
_MOST_LAYERS = 9999
_HEAD = re.compile(r"L?(\d+)[H.:](\d+)", re.IGNORECASE | re.ASCII)


def numbers_from(listed: str) -> tuple[int, ...]:
    """Return the numbers of a list such as `0,3-5`."""
    hint = "layers and heads are chosen like this: 0,3-5; --mean shows means"
    numbers: list[int] = []
    for part in _parts(listed, "layer or head", hint):
        if not _NUMBERS.fullmatch(part):
            raise UsageError(f"{part!r} is not a number or a range", hint)
        first, _, last = part.partition("-")
        start, stop = (read_number(digits, "a layer or head") for digits in (first, last or first))
        if not start <= stop <= _MOST_LAYERS:
            raise UsageError(
                f"{part!r} is not a range of layers or heads", "a range goes up, such as 3-5"
            )
        numbers += range(start, stop + 1)
    return tuple(dict.fromkeys(numbers))


def whole_numbers(listed: str, option: str) -> tuple[int, ...]:
    """Return the numbers of a command-line list such as `1024,4096`."""
    hint = "numbers with commas between, such as 1024,4096"
    parts = _parts(listed, option, hint)
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise UsageError(f"{option} is {listed!r}", hint)
    return tuple(read_number(part, option) for part in parts)


def read_number(digits: str, what: str) -> int:
    """Return a whole number from its digits; refuse more digits than any size has. `what` names it in a message."""
    if len(digits) > _MOST_DIGITS:
        raise UsageError(
            f"{what} has {len(digits):,} digits", f"give a number of at most {_MOST_DIGITS} digits"
        )
    return int(digits)


def heads_from(listed: str) -> tuple[tuple[int, int], ...]:
    """Return single heads in a list such as `L3H1,L5H11`, as (layer, head)."""
    hint = "single heads are chosen like this: L3H1,L5H11"
    heads: list[tuple[int, int]] = []
    for part in _parts(listed, "head", hint):
        match = _HEAD.fullmatch(part)
        if not match:
            raise UsageError(f"{part!r} is not a head", hint)
        heads.append((read_number(match[1], "a layer"), read_number(match[2], "a head")))
    return tuple(dict.fromkeys(heads))


def _parts(listed: str, what: str, hint: str) -> list[str]:
    """Return the parts of a list, of which none may be empty: a comma too many may be a head too few."""
    parts = [part.strip() for part in listed.split(",")]
    if not all(parts):
        raise UsageError(
            f"no {what} is given" if not any(parts) else f"{listed!r} has a comma too many", hint
        )
    return parts


def names_from(listed: str) -> tuple[str, ...]:
    """Return the names in a list such as `layer,head`."""
    return tuple(_parts(listed, "name", "such as layer,head"))


def read_span(written: str, option: str) -> tuple[int, int | None]:
    """Return a range of numbers without its end: `1000:1064`, `:64`, `1000:`."""
    match = _SPAN.fullmatch(written.strip())
    if not match or (not match[1] and not match[2]) or len(written) > 20:
        raise UsageError(
            f"{option} {written!r} is not a range",
            "tokens are numbered from 0, from:to, such as 1000:1064",
        )
    return int(match[1] or 0), int(match[2]) if match[2] else None


def read_names(listed: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    """Return the names in a list such as `zero,mean`, each once; refuses unknown ones, and an empty list."""
    names = tuple(dict.fromkeys(part.strip().lower() for part in listed.split(",") if part.strip()))
    for name in names:
        require_choice(what, name, known)
    if not names:
        raise UsageError(f"no {what} is given", f"choose from {', '.join(known)}")
    return names
