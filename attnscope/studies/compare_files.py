"""From what the command line asks to compare to records, and from those to files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from attnscope.errors import UsageError
from attnscope.models.model import Model
from attnscope.records import findings
from attnscope.records.comparison import Comparison
from attnscope.studies.choice import Choice
from attnscope.studies.compare import CompareOptions, compare, compare_models, require_measures
from attnscope.studies.compare_texts import compare_heads, compare_texts
from attnscope.studies.inputs import LoadOptions, TextsWanted, named_formats, require_writable
from attnscope.studies.interrupted import settle
from attnscope.studies.texts import Report
from attnscope.text import read_text, require_text
from attnscope.views.figures import FIGURE_FORMATS

FORMATS = (*FIGURE_FORMATS, "npz", "csv", "json")
USUAL_FORMATS = ("npz", "csv", "png")
RECORD = "compare"


@dataclass(frozen=True)
class CompareOrder:
    """What the command line asks for; see `attnscope compare --help`.

    Attributes:
        texts: The texts.
        choice: Which heads, if not all; single ones are put side by side.
        other_text: A second text: a minimal pair.
        other_model: A second model.
        query: The token at which heads of a minimal pair are ranked.
        measures: Such as "hellinger,jensen-shannon".
        hide_special: Whether special tokens are left out.
        heads_record: A record of heads, for their roles.
        out: The folder for files; None = none are written.
        formats: Such as "npz,csv,png".
    """

    texts: TextsWanted
    choice: Choice
    other_text: str | None
    other_model: str | None
    query: str | None
    measures: str
    hide_special: bool
    heads_record: Path | None
    out: Path | None
    formats: str | None

    def __post_init__(self) -> None:
        picked = self.choice.pick is not None
        shapes = {"--pick": picked, "--with": self.other_text is not None, "--with-model": self.other_model is not None}
        asked = [option for option, given in shapes.items() if given]
        if len(asked) > 1:
            raise UsageError(f"{' and '.join(asked)} are different comparisons", "give one of them")
        if self.query is not None and self.other_text is None:
            raise UsageError("--query ranks the heads of a minimal pair", 'give a second text: --with "…"')
        if self.heads_record is not None and asked:
            raise UsageError("--heads-record tells the roles where all heads are compared", f"leave out {asked[0]}")
        if (picked or self.other_text is not None) and (self.texts.files or self.texts.text is None):
            raise UsageError(f"{asked[0]} takes one TEXT", f'such as: attnscope compare "…" {asked[0]} …')
        if self.other_text is not None and (self.choice.layers is not None or self.choice.heads is not None):
            raise UsageError("--with ranks all heads", "leave out -L and -H")
        if self.out is None and self.formats is not None:
            raise UsageError("there is no folder to write files to", "give one with --out, or leave out --format")

    @property
    def measure_names(self) -> tuple[str, ...]:
        """The measures by their names in records, each once."""
        named = (part.strip().lower().replace("-", "_") for part in self.measures.split(","))
        found = tuple(dict.fromkeys(part for part in named if part))
        require_measures(found)
        return found


def study(spec: str, order: CompareOrder, loading: LoadOptions, report: Report | None) -> tuple[Comparison, list[Path]]:
    """Loads a model, or two, compares what was asked for, and writes the files.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    formats = formats_from(order.formats)
    comparison = _comparison(order, report)
    if order.out is not None:
        require_writable(order.out)
    found = comparison(loading.load(spec), loading)
    found, out = settle(found, order.out, RECORD)
    return found, [] if out is None else write(found, out, formats)


def drawn_again(found: Comparison, out: Path | None, formats: str | None) -> list[Path]:
    """Writes the files of a comparison that was saved before; `text` is what is printed anyway.

    Raises:
        AttnscopeError: There is no such format, or no folder for it.
    """
    names = [name for name in (formats or "text" if out is None else formats or "png").split(",") if name.strip()]
    files = [name for name in names if name.strip().lower() != "text"]
    if out is None:
        if files:
            raise UsageError("there is no folder to write files to", "give one with --out, or leave out --format")
        return []
    wanted = formats_from(",".join(files)) if files else ()
    require_writable(out)
    return write(found, out, wanted)


def write(found: Comparison, out: Path, formats: Sequence[str]) -> list[Path]:
    """Writes a comparison into a folder; each file whole or not at all. The record is safe before it is drawn."""
    paths = [found.save(out / f"{RECORD}.{name}") for name in formats if name not in FIGURE_FORMATS]
    if figures := [name for name in formats if name in FIGURE_FORMATS]:
        from attnscope.views.compare_figures import draw

        paths += draw(found, out, figures)
    return paths


def formats_from(given: str | None) -> tuple[str, ...]:
    """The formats in a list such as `npz,csv,png`; None = the usual ones.

    Raises:
        UsageError: There is no such format.
    """
    return USUAL_FORMATS if given is None else named_formats(given, FORMATS)


def _comparison(order: CompareOrder, report: Report | None) -> Callable[[Model, LoadOptions], Comparison]:
    """What is to be done with the loaded model; all that can be refused before is refused here."""
    measures, texts = order.measure_names, order.texts
    if order.other_text is not None or order.choice.pick is not None:
        text = read_text(texts.text)
        if order.other_text is not None:
            other = order.other_text
            require_text(other, "the second text")
            return lambda model, _: compare_texts(
                model, text, other, query=order.query, measure=measures[0], hide_special=order.hide_special
            )
        pick = order.choice.pick or ()
        return lambda model, _: compare_heads(model, text, pick, measure=measures[0], hide_special=order.hide_special)
    # One literal text is known as such, so that figures can name it.
    corpus = texts.text if texts.text not in (None, "-") and not texts.files else texts.corpus()
    options = CompareOptions(measures, order.hide_special, order.choice)
    if order.other_model is not None:
        second = order.other_model
        return lambda model, loading: compare_models(
            model, replace(loading, adapter=None).load(second), corpus, options, report=report
        )
    roles = None if order.heads_record is None else findings.load(order.heads_record)
    return lambda model, _: compare(model, corpus, options, roles=roles, report=report)
