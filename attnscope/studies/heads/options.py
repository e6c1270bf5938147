"""Declare the options of `attnscope heads`, which `atlas` and `training` share, and of their Python functions.

Loads no torch.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from attnscope.errors import UsageError, require_choice
from attnscope.options import (
    chunk_option,
    group,
    option,
    options,
    read_heads,
    read_numbers,
    seed_option,
    stride_option,
)

RETRIEVAL = "retrieval"
"""The role of a head that copies needles: words that are hidden in a long text, see `NeedleOptions`."""

RETRIEVAL_THRESHOLD = 0.1
"""The score from which a head has that role (Wu et al. 2024, section 2)."""

MAX_NEEDLE_TEXT_TOKENS = 1 << 20
"""The largest length of a text with a needle, in tokens: a larger one is a typing error, and would run for days."""


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


def _read_control(control: str) -> bool:
    """Return True for the one control that there is, and refuse others."""
    if control != "untrained":
        raise UsageError(f"there is no control {control!r}", "there is: untrained")
    return True


@options
class DescribeOptions:
    """Hold the options for describing heads."""

    max_terms: int = option("The most terms of a description.", default=6, python_only=True)
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

    Where chunks overlap, a token counts as a query only in the first chunk that has it; special tokens count in every
    chunk. The descriptions of heads rest on texts of the whole corpus.
    """

    thresholds: Mapping[str, float] = option(
        "Threshold that a role must reach, such as induction=0.3.",
        "--threshold",
        default_factory=dict,
        read=read_thresholds,
        is_repeatable=True,
        rare=True,
    )
    chunk: int | None = chunk_option()
    stride: int | None = stride_option()
    control: bool = option(
        "untrained: also study the same architecture with random weights.",
        default=False,
        read=_read_control,
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
        """Refuse a size of chunks and thresholds that are out of range; the stride is checked by `corpus.chunks`.

        Raises:
            UsageError: A chunk has less than one token, or a threshold is not above 0 and at most 1.
        """
        if self.chunk is not None and self.chunk < 1:
            raise UsageError(f"--chunk is {self.chunk}", "it counts tokens, and must be at least 1")
        for role, threshold in self.thresholds.items():
            if not 0 < threshold <= 1:
                raise UsageError(
                    f"the threshold of {role} is {threshold:g}", "thresholds are above 0 and at most 1"
                )


def format_percent(depth: float) -> str:
    """Return a depth from 0 to 1 in per cent, as the names of measures by depth contain it: "12.5" for 0.125."""
    return f"{100 * depth:g}"


@options
class NeedleOptions:
    """Hold the options of `--probe needle`, which hides needles in long texts: some words that the model must find.

    The depth of a needle is where in the text it is hidden, as a share of the length: 0 is the start, 1 the end.
    """

    PANEL: ClassVar[str] = "Text"

    lengths: tuple[int, ...] = option(
        "With --probe needle: lengths of the texts in tokens, such as 1024,4096.",
        default=(1024,),
        read=lambda listed: read_numbers(listed, "--lengths"),
        default_text="1024",
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
        "The score from which a head is one of retrieval, from 0 to 1.",
        default=RETRIEVAL_THRESHOLD,
        least=0,
        most=1,
        python_only=True,
    )
    seed: int = seed_option("needles and haystacks", python_only=True)

    def require(self) -> None:
        """Refuse lengths and numbers of needles that are out of range.

        Raises:
            UsageError: A number is out of range or comes twice, or there are fewer needles than depths. Depths beyond
                0 and 1 are refused where needles are made (`corpus.generate_needles`).
        """
        if not self.lengths or min(self.lengths) < 1 or max(self.lengths) > MAX_NEEDLE_TEXT_TOKENS:
            raise UsageError(
                f"texts of {list(self.lengths)} tokens",
                f"lengths are from 1 to {MAX_NEEDLE_TEXT_TOKENS:,}",
            )
        # Two depths are the same if they are written alike, as measures are named by them.
        names = self.measure_names
        if len({*self.lengths}) < len(self.lengths) or len({*names}) < len(names):
            raise UsageError("a length or a depth is given twice", "give each once")
        # Without a needle for each depth, some columns of the table of heads would be empty.
        if self.n < len(self.depths):
            raise UsageError(
                f"there are fewer needles ({self.n}) than depths", "give at least one for each depth"
            )

    @property
    def measure_names(self) -> tuple[str, ...]:
        """Return the names of a head's measures: score over all depths, decoy, and score at each depth."""
        return (
            "retrieval",
            "decoy",
            *(f"retrieval_at_{format_percent(depth)}" for depth in self.depths),
        )


@options
class ListingOptions:
    """Hold the order in which heads are listed."""

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
class DescribingOptions:
    """Hold which heads get a description, as the command line states it."""

    PANEL: ClassVar[str] = "Heads"

    describe: bool = option("Leave out the one-line descriptions.", "--no-describe", default=True)
    pick: tuple[tuple[int, int], ...] | None = option(
        "Describe only these heads, such as L3H1,L5H11.", default=None, read=read_heads
    )

    def require(self) -> None:
        """Refuse `--pick` beside `--no-describe`.

        Raises:
            UsageError: Both were given.
        """
        if not self.describe and self.pick is not None:
            raise UsageError(
                "--pick names heads to describe, and --no-describe leaves out all descriptions",
                "leave out --pick; to list some heads without descriptions, add -o out, and then run "
                "attnscope show out --pick L3H1",
            )

    def apply(self, options: HeadsOptions) -> HeadsOptions:
        """Return the options of a study with these choices as its `describe`."""
        describe = DescribeOptions(heads=self.pick) if self.describe else None
        return replace(options, describe=describe)


def make_measures_option() -> Any:
    """Return the option `measures` of a command about heads."""
    return option(
        "Also print these measures, such as entropy_nats,window; all: every one. Figures then have a large map "
        "of each.",
        default=None,
    )


@options
class HeadsCommandOptions:
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
    measures: str | None = make_measures_option()
    describing: DescribingOptions = group(DescribingOptions)
    listing: ListingOptions = group(ListingOptions)

    def progress_nouns(self) -> tuple[str, ...]:
        """Return the nouns that the progress line counts, such as "pictures"; empty = its usual ones, for texts."""
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
