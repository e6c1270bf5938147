"""Declare the options of a study, each once: one field carries its type, default, help, range and parser.

One dataclass serves both sides: `attnscope.cli` makes the flags of a command from it, and the Python function of the
same name takes an instance of it as its argument. This module loads neither torch, nor NumPy, nor typer.
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
"""Heads of a model, each as (layer, head)."""


@dataclass(frozen=True)
class Option:
    """The declaration of an option. The dataclass field that holds it gives the option's type and default."""

    # What it does, for `--help` and the docstring of the dataclass
    help: str
    # Its flags on the command line, such as ("-o", "--out"); empty = two dashes and the name of the field
    flags: tuple[str, ...] = ()
    # The smallest and the largest number allowed; None = no bound
    least: float | None = None
    most: float | None = None
    # The allowed values, or the allowed members if the value is a tuple; empty = any
    choices: tuple[str, ...] = ()
    # Parses the string from the command line; None = typer converts it to the type of the field
    read: Callable[[Any], Any] | None = None
    # The default as a user would type it, such as "zero,mean"; `read` parses it
    default_text: Any = None
    # Whether only the Python function has it, and the command line does not
    python_only: bool = False
    # What a shell completes the value with: "models" = the names of known models; None = nothing
    completion: str | None = None
    # The heading above it in the help; None = the heading of its dataclass
    panel: str | None = None
    # Whether it is a positional argument of the command line, without a flag
    argument: bool = False
    # What the help calls the value of a positional argument; None = the name of the field in capitals
    metavar: str | None = None
    # Whether the command line requires a value, although the field has a default in Python
    is_required: bool = False
    # Whether --help omits it, and only --help-all shows it
    rare: bool = False
    # Whether the flag may be repeated on the command line; `read` then gets the list of all values
    is_repeatable: bool = False

    def require(self, name: str, value: Any) -> None:
        """Raise a UsageError if a value is outside the range or the choices; messages call the option `name`."""
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
    """Return a field of a dataclass of options.

    The flag of a bool sets it to True, or to False if its default is True, such as --no-check.

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
    """Return a field that holds another dataclass of options (a group); the command line has the options of both."""
    return dataclasses.field(default_factory=options_class, metadata={"group": options_class})


def name_option(field: dataclasses.Field[Any]) -> str:
    """Return what messages call a field: its long flag such as --out, or TEXT for a positional argument `text`."""
    # A field that `option` did not declare is named as an option without flags: two dashes and its own name.
    declared = field.metadata.get("option", Option(""))
    if declared.argument:
        return field.name.upper()
    for flag in declared.flags:
        if flag.startswith("--"):
            return str(flag)
    return f"--{field.name.replace('_', '-')}"


@dataclass_transform(frozen_default=True, field_specifiers=(option, dataclasses.field))
def options(cls: OptionsClass) -> OptionsClass:
    """Make a class a frozen dataclass of options. A new instance checks its values; the docstring lists its options.

    The class may have a method `require()`, which raises a UsageError if its options contradict each other.
    """

    # A dataclass calls __post_init__ when all fields are set. Check each value alone, then all values together.
    def check(self: Any) -> None:
        for field in dataclasses.fields(self):
            if "option" in field.metadata:
                field.metadata["option"].require(name_option(field), getattr(self, field.name))
        if hasattr(self, "require"):
            self.require()

    cls.__post_init__ = check  # type: ignore[attr-defined]
    new_class: Any = dataclass(frozen=True)(cls)
    # Append the help of each option to the docstring.
    lines = [textwrap.dedent(cls.__doc__ or "").strip(), "", "    Attributes:"]
    for field in dataclasses.fields(new_class):
        if "option" in field.metadata:
            text = f"{field.name}: {field.metadata['option'].help}"
            lines.append(textwrap.indent(textwrap.fill(text, 104, subsequent_indent="    "), " " * 8))
    new_class.__doc__ = "\n".join(lines)
    return new_class  # type: ignore[no-any-return]  # the class, as a dataclass


def refuse_beside(option: str, *groups: Any, **others: object) -> None:
    """Raise a UsageError if options are set that contradict one option.

    Args:
        option: What messages call the one option, such as "-o -".
        groups: Dataclasses of options that contradict it: every option of these must have its default.
        others: The values of further options that contradict it, by name: each must be False, empty or None.
    """
    names = [f"--{name.replace('_', '-')}" for name, value in others.items() if value]
    for group in groups:
        names += _changed_options(group)
    if names:
        raise UsageError(f"{names[0]} cannot be given beside {option}", "leave out one of them")


def _changed_options(group: Any) -> list[str]:
    """Return what messages call the options of a group whose values are not their defaults, nested groups included."""
    names = []
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        if "group" in field.metadata:
            names += _changed_options(value)
        elif value != getattr(type(group)(), field.name):
            names.append(name_option(field))
    return names


# Fields that several dataclasses of options share --------------------------------------------------------------------


MAX_SEED = 2**32 - 1
"""The largest seed: the random generators of Python, NumPy and torch all accept seeds up to it."""


def seed_option(random_noun: str, *, python_only: bool = False) -> Any:
    """Return the field `seed` of a dataclass of options; `random_noun` says what is random, such as "masked tokens"."""
    return option(
        f"Seed of {random_noun}.", default=0, least=0, most=MAX_SEED, python_only=python_only, rare=True
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
"""The most digits of a number. Every number of 18 digits fits into 64 bits."""

_MAX_RANGE_END = 9999
"""The largest end of a range of layers or heads. It keeps a typing error such as 0-99999999 from filling memory."""


def read_ranges(comma_list: str) -> tuple[int, ...]:
    """Return the numbers in a list of numbers and ranges, each once: `0,3-5` becomes (0, 3, 4, 5)."""
    hint = "layers and heads are chosen like this: 0,3-5; --mean shows means"
    numbers: list[int] = []
    for part in _split_at_commas(comma_list, "layer or head", hint):
        if not _RANGE_PATTERN.fullmatch(part):
            raise UsageError(f"{part!r} is not a number or a range", hint)
        # One end for a single number such as 3, two for a range such as 3-5.
        ends = [read_number(digits, "a layer or head") for digits in part.split("-")]
        first_number = ends[0]
        last_number = ends[-1]
        if not first_number <= last_number <= _MAX_RANGE_END:
            raise UsageError(
                f"{part!r} is not a range of layers or heads", "a range goes up, such as 3-5"
            )
        numbers += range(first_number, last_number + 1)
    return tuple(dict.fromkeys(numbers))


def read_numbers(comma_list: str, option: str) -> tuple[int, ...]:
    """Return the numbers in a list without ranges, such as `1024,4096`; `option` is what messages call the option."""
    hint = "numbers with commas between, such as 1024,4096"
    parts = _split_at_commas(comma_list, option, hint)
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise UsageError(f"{option} is {comma_list!r}", hint)
    return tuple(read_number(part, option) for part in parts)


def read_number(digits: str, noun: str) -> int:
    """Return a number from its digits, and refuse more than 18 digits; messages call the number `noun`."""
    if len(digits) > _MAX_DIGITS:
        raise UsageError(
            f"{noun} has {len(digits):,} digits", f"give a number of at most {_MAX_DIGITS} digits"
        )
    return int(digits)


def read_heads(comma_list: str) -> Heads:
    """Return the heads in a list such as `L3H1,L5H11`, as (layer, head)."""
    hint = "single heads are chosen like this: L3H1,L5H11"
    heads: list[tuple[int, int]] = []
    for part in _split_at_commas(comma_list, "head", hint):
        match = _HEAD_PATTERN.fullmatch(part)
        if not match:
            raise UsageError(f"{part!r} is not a head", hint)
        heads.append((read_number(match[1], "a layer"), read_number(match[2], "a head")))
    return tuple(dict.fromkeys(heads))


def _split_at_commas(comma_list: str, noun: str, hint: str) -> list[str]:
    """Split a list at its commas, and refuse an empty part such as in "L3H1,,L5H11".

    Messages call a part `noun`; `hint` is the hint of the error.
    """
    parts = [part.strip() for part in comma_list.split(",")]
    if not any(parts):
        raise UsageError(f"no {noun} is given", hint)
    if not all(parts):
        raise UsageError(f"{comma_list!r} has a comma too many", hint)
    return parts


def read_columns(comma_list: str) -> tuple[str, ...]:
    """Return the names of columns in a list such as `layer,head`."""
    return tuple(_split_at_commas(comma_list, "name", "such as layer,head"))


def read_span(default_text: str, option: str) -> tuple[int, int | None]:
    """Return the start and the stop of a range of tokens, given as a slice; messages call the option `option`.

    `1000:1064` becomes (1000, 1064), `:64` becomes (0, 64), and `1000:` becomes (1000, None): up to the last token.
    """
    match = _SPAN_PATTERN.fullmatch(default_text.strip())
    if not match or match[0] == ":" or len(default_text) > 20:
        raise UsageError(
            f"{option} {default_text!r} is not a range",
            "tokens are numbered from 0, from:to, such as 1000:1064",
        )
    return int(match[1] or 0), int(match[2]) if match[2] else None


def read_names(comma_list: str, known: Sequence[str], noun: str) -> tuple[str, ...]:
    """Return the names in a list such as `zero,mean`, each once; refuse unknown names, and an empty list.

    Messages call a name `noun`, such as "format".
    """
    parts = [part.strip().lower() for part in comma_list.split(",")]
    names = tuple(dict.fromkeys(part for part in parts if part))
    for name in names:
        require_choice(noun, name, known)
    if not names:
        raise UsageError(f"no {noun} is given", f"choose from {', '.join(known)}")
    return names
