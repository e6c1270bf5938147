"""Declare the options of `attnscope compare`, `attnscope.compare` and `compare_models`.

This module imports neither torch nor matplotlib, so `--help` is fast. `option` declares one option, and `group`
includes the options of another class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnscope.choice import Choice
from attnscope.errors import UsageError, require_choice
from attnscope.options import group, option, options, read_heads
from attnscope.questions.distances import DISTANCE_NAMES, WITHOUT_SPECIAL_SUFFIX
from attnscope.studies.inputs.options import refuse_file_names

if TYPE_CHECKING:
    from attnscope.studies.inputs.options import CorpusOptions


@options
class CompareOptions:
    """Hold the options for comparing heads."""

    measure: str = option(
        "The distance: hellinger (fast) or jensen-shannon (as in Clark 2019).",
        "--measures",
        default=DISTANCE_NAMES[0],
        read=lambda name: name.replace("-", "_"),
    )
    hide_special: bool = option(
        "Compare what is left without special tokens (in decoders also the first), rows renormalised.",
        default=False,
        panel="Drawing",
    )
    choice: Choice = group(Choice)

    def require(self) -> None:
        """Refuse an unknown measure."""
        require_choice("measure", self.measure, DISTANCE_NAMES)

    @property
    def distance(self) -> str:
        """Return the name of the distance in results: the measure, with a suffix if special tokens are hidden."""
        return f"{self.measure}{WITHOUT_SPECIAL_SUFFIX}" if self.hide_special else self.measure


@options
class CompareCommandOptions(CompareOptions):
    """Hold the options for comparing heads with each other, between two texts or two models, or after an ablation."""

    other_text: str | None = option(
        "The second text of a minimal pair: which heads change most?", "--with", default=None
    )
    other_model: str | None = option(
        "A second model or checkpoint.",
        "--with-model",
        default=None,
        completion="models",
        panel="Model",
    )
    ablated: tuple[tuple[int, int], ...] | None = option(
        "The same model without these heads, such as L3H1,L4H2: which later heads change most?",
        default=None,
        read=read_heads,
    )
    query: str | None = option(
        "With --with: rank heads at this token, a word, or a place such as @3.",
        default=None,
        panel="Drawing",
    )

    def require_for(self, texts: CorpusOptions) -> None:
        """Refuse options that contradict each other, and comparisons that do not fit the texts."""
        choice = self.choice
        refuse_file_names(self.other_text, hint="give the text itself")
        # Each of these options asks for another comparison: at most one may be given.
        value_by_option: dict[str, object] = {
            "--pick": choice.pick,
            "--with": self.other_text,
            "--with-model": self.other_model,
            "--ablated": self.ablated,
        }
        given_options = [name for name, value in value_by_option.items() if value is not None]
        if len(given_options) > 1:
            raise UsageError(
                f"{' and '.join(given_options)} are different comparisons", "give one of them"
            )
        if self.query is not None and self.other_text is None:
            raise UsageError(
                "--query ranks the heads of a minimal pair", 'give a second text: --with "…"'
            )
        # The rest is about --pick and --with, which take one text. The only given option is then one of the two.
        if choice.pick is None and self.other_text is None:
            return
        if texts.text is None or texts.files:
            name = given_options[0]
            raise UsageError(f"{name} takes one TEXT", f'such as: attnscope compare "…" {name} …')
        # `Choice` itself refuses --pick together with -L or -H, so only --with can reach this error.
        if choice.layers is not None or choice.heads is not None:
            raise UsageError("--with ranks all heads", "leave out -L and -H")
