"""Declare the options of a study, each once: one field carries its type, default, help, range and parser.

The same dataclass gives a command its options and the Python function its argument. This module loads neither torch,
nor NumPy, nor typer.
"""

import dataclasses
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

from attnscope.errors import UsageError, require_choice, suggest

OptionsClass = TypeVar("OptionsClass", bound=type)

Heads = tuple[tuple[int, int], ...]
"""Single heads, as (layer, head)."""


@dataclass(frozen=True)
class Option:
    """The declaration of an option, beside its type and default."""

    # What it does, for `--help` and the docstring of the dataclass
    help: str
    # How it is written, such as ("-o", "--out"); empty = its name after two dashes
    flags: tuple[str, ...] = ()
    # The smallest and the largest number; None = there is no bound
    least: float | None = None
    most: float | None = None
    # The values that it may have, or that the members of a tuple may have; empty = any
    choices: tuple[str, ...] = ()
    # Parses the value from the command line; None = its type decides
    read: Callable[[Any], Any] | None = None
    # The default in the words of the command line, such as "zero,mean"; `read` parses it
    default_text: Any = None
    # Whether the command line does not have it
    python_only: bool = False
    # What a shell completes it with: "models"; None = nothing
    completion: str | None = None
    # The heading of the help that it stands under; None = that of its group
    panel: str | None = None
    # Whether it is an argument of the command line, by position and without a flag
    argument: bool = False
    # What the help calls the value of an argument; None = as typer does
    metavar: str | None = None
    # Whether the command line requires it, though it has a default in Python
    is_required: bool = False
    # Whether only --help-all shows it
    rare: bool = False
    # Whether it may be repeated on the command line, and `read` takes the list of all values
    is_repeatable: bool = False

    def require(self, name: str, value: Any) -> None:
        """Refuse a value outside the range or the choices; `name` is what messages call the option."""
        members = value if isinstance(value, tuple) else (value,)
        for member in members:
            if self.choices and member is not None and member not in self.choices:
                raise UsageError(f"{name} has no {member!r}", suggest(str(member), self.choices))
        if isinstance(value, int | float):
            if self.least is not None and value < self.least:
                raise UsageError(f"{name} is {value}", f"it must be at least {self.least}")
            if self.most is not None and value > self.most:
                raise UsageError(f"{name} is {value}", f"it must be at most {self.most}")


def option(
    help: str,
    *flags: str,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    **settings: Any,
) -> Any:
    """Return a field of a dataclass of options; a bool whose default is True is switched off by its flag.

    Args:
        help: `Option.help`.
        flags: `Option.flags`.
        default: The default of the field.
        default_factory: A function that makes the default, as in `dataclasses.field`.
        settings: Further fields of `Option`, such as `least` and `rare`.
    """
    defaults: dict[str, Any] = {"default": default, "default_factory": default_factory}
    return dataclasses.field(**defaults, metadata={"option": Option(help, flags, **settings)})


def group(options_class: type) -> Any:
    """Return a field that is itself a dataclass of options; the command line takes its options too."""
    return dataclasses.field(default_factory=options_class, metadata={"group": options_class})


def name_option(field: dataclasses.Field[Any]) -> str:
    """Return what messages call the option of a field: its long flag, or TEXT for the argument `text`."""
    # A field that `option` did not declare has no flags.
    declared = field.metadata.get("option", Option(""))
    if declared.argument:
        return field.name.upper()
    for flag in declared.flags:
        if flag.startswith("--"):
            return str(flag)
    return f"--{field.name.replace('_', '-')}"


@dataclass_transform(frozen_default=True, field_specifiers=(option, dataclasses.field))
def options(cls: OptionsClass) -> OptionsClass:
    """Make a class a frozen dataclass of options: ranges are checked, and its docstring lists them.

    A method `require` of the class, where it has one, refuses options that do not go together by a UsageError.
    """

    # Dataclasses call this when all fields are set: each value is checked alone, then the class checks all together.
    def check(self: Any) -> None:
        for field in dataclasses.fields(self):
            if "option" in field.metadata:
                field.metadata["option"].require(name_option(field), getattr(self, field.name))
        if hasattr(self, "require"):
            self.require()

    cls.__post_init__ = check  # type: ignore[attr-defined]
    new_class: Any = dataclass(frozen=True)(cls)
    # The docstring lists the help of each option.
    lines = [textwrap.dedent(cls.__doc__ or "").strip(), "", "    Attributes:"]
    for field in dataclasses.fields(new_class):
        if "option" in field.metadata:
            text = f"{field.name}: {field.metadata['option'].help}"
            lines.append(textwrap.indent(textwrap.fill(text, 104, subsequent_indent="    "), " " * 8))
    new_class.__doc__ = "\n".join(lines)
    return new_class  # type: ignore[no-any-return]  # the class, as a dataclass


def refuse_beside(option: str, *groups: Any, **others: object) -> None:
    """Refuse options that cannot be given together with one option.

    Args:
        option: What messages call that option.
        groups: Dataclasses of options; all of these must have their defaults.
        others: Values of further options by name; all must be false, empty or None.
    """
    names = [f"--{name.replace('_', '-')}" for name, value in others.items() if value]
    for group in groups:
        names += _changed_options(group)
    if names:
        raise UsageError(f"{names[0]} cannot be given beside {option}", "leave out one of them")


def _changed_options(group: Any) -> list[str]:
    """Return what messages call those options of a group, and of the groups in it, that differ from their defaults."""
    names = []
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        if "group" in field.metadata:
            names += _changed_options(value)
        elif value != getattr(type(group)(), field.name):
            names.append(name_option(field))
    return names


# Options that mean the same in every question --------------------------------------------------------------------


MAX_SEED = 2**32 - 1
"""The largest seed that every generator takes."""


def seed_option(drawn: str, *, python_only: bool = False) -> Any:
    """Return the field `seed` of a dataclass of options; `drawn` says what is drawn at random."""
    return option(
        f"Seed of {drawn}.", default=0, least=0, most=MAX_SEED, python_only=python_only, rare=True
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


# Parsers of values on the command line -------------------------------------------------------------------------------

_RANGE_PATTERN = re.compile(r"\d+(-\d+)?", re.ASCII)
_SPAN_PATTERN = re.compile(r"(\d*):(\d*)", re.ASCII)
_HEAD_PATTERN = re.compile(r"L?(\d+)[H.:](\d+)", re.IGNORECASE | re.ASCII)

_MAX_DIGITS = 18
"""The most digits of a number that fits into 64 bits."""

_MAX_RANGE_END = 9999
"""More layers or heads than any model has. It keeps the tuple of a mistyped range, such as 0-99999999, small."""


def read_ranges(listed: str) -> tuple[int, ...]:
    """Return the numbers in a list of numbers and ranges: `0,3-5` becomes (0, 3, 4, 5)."""
    hint = "layers and heads are chosen like this: 0,3-5; --mean shows means"
    numbers: list[int] = []
    for part in _split_at_commas(listed, "layer or head", hint):
        if not _RANGE_PATTERN.fullmatch(part):
            raise UsageError(f"{part!r} is not a number or a range", hint)
        ends = [read_number(digits, "a layer or head") for digits in part.split("-")]
        first = ends[0]
        last = ends[-1]
        if not first <= last <= _MAX_RANGE_END:
            raise UsageError(
                f"{part!r} is not a range of layers or heads", "a range goes up, such as 3-5"
            )
        numbers += range(first, last + 1)
    return tuple(dict.fromkeys(numbers))


def read_numbers(listed: str, option: str) -> tuple[int, ...]:
    """Return the numbers in a list without ranges, such as `1024,4096`; `option` is what messages call the option."""
    hint = "numbers with commas between, such as 1024,4096"
    parts = _split_at_commas(listed, option, hint)
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise UsageError(f"{option} is {listed!r}", hint)
    return tuple(read_number(part, option) for part in parts)


def read_number(digits: str, what: str) -> int:
    """Return a whole number from its digits; refuse more digits than any size has. Messages call the number `what`."""
    if len(digits) > _MAX_DIGITS:
        raise UsageError(
            f"{what} has {len(digits):,} digits", f"give a number of at most {_MAX_DIGITS} digits"
        )
    return int(digits)


def read_heads(listed: str) -> Heads:
    """Return the heads in a list such as `L3H1,L5H11`, as (layer, head)."""
    hint = "single heads are chosen like this: L3H1,L5H11"
    heads: list[tuple[int, int]] = []
    for part in _split_at_commas(listed, "head", hint):
        match = _HEAD_PATTERN.fullmatch(part)
        if not match:
            raise UsageError(f"{part!r} is not a head", hint)
        heads.append((read_number(match[1], "a layer"), read_number(match[2], "a head")))
    return tuple(dict.fromkeys(heads))


def _split_at_commas(listed: str, what: str, hint: str) -> list[str]:
    """Split a list at its commas; refuse an empty part: the user may have forgotten a head there.

    Messages call a part `what`.
    """
    parts = [part.strip() for part in listed.split(",")]
    if not any(parts):
        raise UsageError(f"no {what} is given", hint)
    if not all(parts):
        raise UsageError(f"{listed!r} has a comma too many", hint)
    return parts


def read_columns(listed: str) -> tuple[str, ...]:
    """Return the names of columns in a list such as `layer,head`."""
    return tuple(_split_at_commas(listed, "name", "such as layer,head"))


def read_span(default_text: str, option: str) -> tuple[int, int | None]:
    """Return the start and the stop of a range of tokens, written as a slice; messages call the option `option`.

    `1000:1064` becomes (1000, 1064), `:64` becomes (0, 64), and `1000:` becomes (1000, None).
    """
    match = _SPAN_PATTERN.fullmatch(default_text.strip())
    if not match or match[0] == ":" or len(default_text) > 20:
        raise UsageError(
            f"{option} {default_text!r} is not a range",
            "tokens are numbered from 0, from:to, such as 1000:1064",
        )
    return int(match[1] or 0), int(match[2]) if match[2] else None


def read_names(listed: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    """Return the names in a list such as `zero,mean`, each once; refuse unknown ones, and an empty list.

    Messages call a name `what`.
    """
    parts = [part.strip().lower() for part in listed.split(",")]
    names = tuple(dict.fromkeys(part for part in parts if part))
    for name in names:
        require_choice(what, name, known)
    if not names:
        raise UsageError(f"no {what} is given", f"choose from {', '.join(known)}")
    return names
