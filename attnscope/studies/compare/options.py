"""What `attnscope compare`, `attnscope.compare` and `compare_models` are asked with. Loads nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnscope.choice import Choice, heads_from
from attnscope.errors import UsageError
from attnscope.options import group, option, options, read_names
from attnscope.questions.distances import MEASURES
from attnscope.studies.inputs.options import refuse_file_names

if TYPE_CHECKING:
    from attnscope.studies.inputs.options import TextsWanted


def require_measures(measures: Sequence[str]) -> None:
    """Refuses measures that there are not, and none."""
    for measure in measures:
        if measure not in MEASURES:
            raise UsageError(f"there is no measure {measure!r}", f"choose from {', '.join(MEASURES)}")
    if not measures:
        raise UsageError("no measure is given", f"choose from {', '.join(MEASURES)}")


def _measures(listed: str) -> tuple[str, ...]:
    return read_names(listed.replace("-", "_"), MEASURES, "measure")


@options
class CompareOptions:
    """How heads are compared."""

    measures: tuple[str, ...] = option(
        "The distance: hellinger (fast), jensen-shannon (Clark et al. 2019), or hellinger,jensen-shannon for both.",
        "--measures", default=MEASURES[:1], read=_measures, written="hellinger",
    )  # fmt: skip
    hide_special: bool = option(
        "Show what is left without special tokens (in decoders also the first), rows renormalised.",
        default=False, panel="Drawing",
    )  # fmt: skip
    choice: Choice = group(Choice)

    def require(self) -> None:
        """Refuses measures that there are not."""
        require_measures(self.measures)

    @property
    def tables(self) -> tuple[tuple[str, bool], ...]:
        """Measure and whether special tokens take part, of each table in its order."""
        return tuple(
            (measure, special) for special in (not self.hide_special, self.hide_special) for measure in self.measures
        )


@options
class CompareOrder(CompareOptions):
    """How heads are compared, and with what."""

    other_text: str | None = option(
        "The second text of a minimal pair: which heads change most?", "--with", default=None
    )
    other_model: str | None = option(
        "A second model or checkpoint.",
        "--with-model", default=None, complete="models", panel="Model",
    )  # fmt: skip
    ablated: tuple[tuple[int, int], ...] | None = option(
        "The same model without these heads, such as L3H1,L4H2: which later heads change most?",
        default=None, read=heads_from,
    )  # fmt: skip
    query: str | None = option(
        "With --with: rank heads at this token, a word, or a place such as @3.",
        default=None, panel="Drawing",
    )  # fmt: skip
    heads_record: Path | None = option(
        "A heads.npz of the same model, or its folder: colours the map by role too.", "--record", default=None
    )

    def require_for(self, texts: TextsWanted) -> None:
        """Refuses comparisons that do not go together, or not with the texts."""
        choice, picked = self.choice, self.choice.pick is not None
        refuse_file_names(self.other_text, hint="give the text itself")
        names = {"--pick": picked, "--with": self.other_text is not None, "--with-model": self.other_model is not None}
        names["--ablated"] = self.ablated is not None
        comparisons = [name for name, is_given in names.items() if is_given]
        if len(comparisons) > 1:
            raise UsageError(f"{' and '.join(comparisons)} are different comparisons", "give one of them")
        if self.query is not None and self.other_text is None:
            raise UsageError("--query ranks the heads of a minimal pair", 'give a second text: --with "…"')
        if self.heads_record is not None and comparisons:
            raise UsageError("--record tells the roles where all heads are compared", f"leave out {comparisons[0]}")
        if (picked or self.other_text is not None) and (texts.files or texts.text is None):
            raise UsageError(f"{comparisons[0]} takes one TEXT", f'such as: attnscope compare "…" {comparisons[0]} …')
        if self.other_text is not None and (choice.layers is not None or choice.heads is not None):
            raise UsageError("--with ranks all heads", "leave out -L and -H")
