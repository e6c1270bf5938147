"""Declare the options of `attnscope heads`, `atlas` and `training`, and of their Python functions. Loads no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from attnscope.errors import UsageError, require_choice
from attnscope.options import (
    chunk_option,
    group,
    heads_from,
    option,
    options,
    seed_option,
    stride_option,
    whole_numbers,
)

RETRIEVAL = "retrieval"
"""The role that heads may have by needles."""

THRESHOLD = 0.1
"""The score from which a head is one of retrieval (Wu et al. 2024, section 2)."""

MOST_TOKENS = 1 << 20
"""The longest text in tokens: a longer one is a slip of the pen, which would run for days."""


def read_thresholds(listed: list[str]) -> dict[str, float]:
    """Return thresholds by role from strings such as `induction=0.3`.

    Raises:
        UsageError: A threshold is no number.
    """
    thresholds: dict[str, float] = {}
    for item in listed:
        name, _, number = item.partition("=")
        try:
            thresholds[name] = float(number)
        except ValueError:
            raise UsageError(f"{number!r} is no threshold for {name}", f"such as {name}=0.3") from None
    return thresholds


def _is_untrained(control: str) -> bool:
    if control != "untrained":
        raise UsageError(f"there is no control {control!r}", "there is: untrained")
    return True


@options
class DescribeOptions:
    """Hold the options for describing heads."""

    most_terms: int = option("The most terms of a description.", default=6, python_only=True)
    queries: int = option("How many queries are sampled.", default=4000, python_only=True)
    heads: tuple[tuple[int, int], ...] | None = option(
        "(layer, head) of the heads that are described, of every kind; None = all.",
        default=None,
        python_only=True,
    )
    seed: int = seed_option("the draw of texts and queries", python_only=True)


@options
class HeadsOptions:
    """Hold the options for studying heads.

    Chunks that overlap count a token as a query in the first of its chunks alone; special tokens count in each. Heads
    are described by texts of the whole corpus.
    """

    thresholds: Mapping[str, float] = option(
        "Threshold that a role must reach, such as induction=0.3.",
        "--threshold",
        default_factory=dict,
        read=read_thresholds,
        several=True,
        rare=True,
    )
    chunk: int | None = chunk_option()
    stride: int | None = stride_option()
    control: bool = option(
        "untrained: also study the same architecture with random weights.",
        default=False,
        read=_is_untrained,
        rare=True,
    )
    causal: bool = option(
        "Ablate each head that has a role, and print how the model's output changes.", default=False
    )
    seed: int = seed_option("the random weights of the control", python_only=True)
    describe: DescribeOptions | None = option(
        "How heads are described; None = they are not.",
        default_factory=DescribeOptions,
        python_only=True,
    )

    def require(self) -> None:
        """Refuse numbers that are out of range.

        Raises:
            UsageError: A size is below 1, or a threshold not above 0 and at most 1.
        """
        for name in ("chunk", "stride"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise UsageError(f"--{name} is {number}", "it counts tokens, and must be at least 1")
        for role, threshold in self.thresholds.items():
            if not 0 < threshold <= 1:
                raise UsageError(
                    f"the threshold of {role} is {threshold:g}", "thresholds are above 0 and at most 1"
                )


def write_percent(depth: float) -> str:
    """Return a depth from 0 to 1 in per cent, as names of measures have it: "12.5" for 0.125."""
    return f"{100 * depth:g}"


@options
class NeedleOptions:
    """Hold the options for the needles of `--probe needle`: how many, how long, how deep."""

    PANEL: ClassVar[str] = "Text"

    lengths: tuple[int, ...] = option(
        "With --probe needle: lengths of the texts in tokens, such as 1024,4096.",
        default=(1024,),
        read=lambda listed: whole_numbers(listed, "--lengths"),
        written="1024",
        rare=True,
    )
    depths: tuple[float, ...] = option(
        "Where in the text the needle is, as shares of its length.",
        default=(0.0, 0.25, 0.5, 0.75, 1.0),
        python_only=True,
    )
    n: int = option(
        "With --probe needle: needles per length.", "--needles", default=50, least=1, rare=True
    )
    answer: int = option(
        "How many tokens of each are to be found; fewer where a vocabulary is too small.",
        default=8,
        least=1,
        python_only=True,
    )
    threshold: float = option(
        "The score from which a head is one of retrieval, above 0 and at most 1.",
        default=THRESHOLD,
        python_only=True,
    )
    seed: int = seed_option("needles and haystacks", python_only=True)

    def require(self) -> None:
        """Refuse lengths, depths and thresholds that are out of range.

        Raises:
            UsageError: A number is out of range or comes twice, or there are fewer needles than depths.
        """
        if not _are_within(self.lengths, 1, MOST_TOKENS):
            raise UsageError(
                f"texts of {list(self.lengths)} tokens", f"lengths are from 1 to {MOST_TOKENS:,}"
            )
        percents = list(map(write_percent, self.depths))
        if not _are_within(self.depths, 0, 1):
            raise UsageError(
                f"depths of {percents} %", "they are from 0 to 100 per cent; in Python from 0 to 1"
            )
        if len({*self.lengths}) < len(self.lengths) or len({*percents}) < len(percents):
            raise UsageError("a length or a depth is given twice", "give each once")
        # Each depth needs a needle, or its column would be empty.
        if self.n < len(self.depths):
            raise UsageError(
                f"there are fewer needles ({self.n}) than depths", "give at least one for each depth"
            )
        if not 0 < self.threshold <= 1:
            raise UsageError(f"a threshold of {self.threshold}", "it must be above 0 and at most 1")

    @property
    def measure_names(self) -> tuple[str, ...]:
        """Return the names of a head's measures: its score over all depths, that of the decoy, and those by depth."""
        return ("retrieval", "decoy", *(f"retrieval_at_{write_percent(depth)}" for depth in self.depths))


def _are_within(numbers: Sequence[float], least: float, most: float) -> bool:
    """Return whether there are numbers, and all of them lie between two ends or at one."""
    return bool(numbers) and all(least <= number <= most for number in numbers)


@options
class Listing:
    """Hold the order of the list of heads."""

    PANEL: ClassVar[str] = "Heads"

    sort: str | None = option(
        "List heads by layer, by explained (the best described first), or by entropy (the sharpest first).  "
        "[default: the ten heads with most to say; with --all, by layer]",
        default=None,
    )

    def require(self) -> None:
        """Refuse an unknown order.

        Raises:
            UsageError: There is no such order.
        """
        from attnscope.questions.head_lines import require_sort

        require_sort(self.sort)


@options
class Describing:
    """Hold which heads are described."""

    PANEL: ClassVar[str] = "Heads"

    describe: bool = option("Leave out the one-line descriptions.", "--no-describe", default=True)
    pick: tuple[tuple[int, int], ...] | None = option(
        "Describe only these heads, such as L3H1,L5H11.", default=None, read=heads_from
    )

    def require(self) -> None:
        """Refuse `--pick` beside `--no-describe`.

        Raises:
            UsageError: Both were given.
        """
        if not self.describe and self.pick is not None:
            raise UsageError(
                "--pick names heads to describe, --no-describe none", "leave out one of them"
            )

    def apply(self, options: HeadsOptions) -> HeadsOptions:
        """Return options of a study that describes these heads, or none."""
        describing = DescribeOptions(heads=self.pick) if self.describe else None
        return replace(options, describe=describing)


def measures_option() -> Any:
    """Return the option `measures` of a command about heads."""
    return option(
        "Also print these measures, such as entropy_nats,window; all: every one. Figures then have a large map "
        "of each.",
        default=None,
    )


@options
class HeadsOrder:
    """Hold the options of `attnscope heads`: its input, how heads are studied, and what is listed of them."""

    image: tuple[str, ...] = option(
        "Photos or patterns, for vision transformers: what heads do in pictures; may be given several times.",
        default=(),
        panel="Text",
    )
    audio: tuple[str, ...] = option(
        "WAV files or patterns, for models such as Whisper: when heads listen; TEXT is the transcript of one.",
        default=(),
        panel="Text",
    )
    probe: str | None = option(
        "repeat: random tokens that come twice, the standard test for induction; needle: words hidden in a long text, "
        "that of --file or random tokens, for retrieval heads.",
        default=None,
    )
    needles: NeedleOptions = group(NeedleOptions)
    heads: HeadsOptions = group(HeadsOptions)
    measures: str | None = measures_option()
    describing: Describing = group(Describing)
    listing: Listing = group(Listing)

    def counted(self) -> tuple[str, ...]:
        """Return the nouns of what progress counts, in the plural; none for texts and tokens."""
        if self.image:
            return "pictures", "patches"
        return ("recordings",) if self.audio else ()

    def require(self) -> None:
        """Refuse a probe that does not exist, and options of needles without `--probe needle`.

        Raises:
            UsageError: A choice is not possible.
        """
        if self.probe is not None:
            require_choice("probe", self.probe, ("repeat", "needle"))
        if self.probe != "needle" and self.needles != NeedleOptions():
            raise UsageError("--lengths and --needles are of --probe needle", "add --probe needle")
