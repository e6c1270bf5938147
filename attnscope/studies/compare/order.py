"""From what the command line asks to compare to records, and from those to files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from attnscope.errors import UsageError
from attnscope.models.model import Model
from attnscope.records.comparison import Comparison
from attnscope.records.heads.findings import Findings
from attnscope.senses.photos import Photo
from attnscope.studies.compare.pictures import compare_pictures
from attnscope.studies.compare.study import CompareOptions, compare, compare_models, require_measures
from attnscope.studies.compare.texts import compare_heads, compare_texts
from attnscope.studies.inputs.choice import Choice
from attnscope.studies.inputs.options import LoadOptions, TextsWanted
from attnscope.studies.inputs.texts import Report
from attnscope.studies.running.workers import Workers
from attnscope.text import read_text, require_text


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
        photos: Two photos, that one question is asked about; or one, and two questions.
    """

    texts: TextsWanted
    choice: Choice
    other_text: str | None
    other_model: str | None
    query: str | None
    measures: str
    hide_special: bool
    heads_record: Path | None
    photos: tuple[Photo, ...] = ()

    def __post_init__(self) -> None:
        picked = self.choice.pick is not None
        shapes = {"--pick": picked, "--with": self.other_text is not None, "--with-model": self.other_model is not None}
        if self.photos:
            self._require_pair_of_pictures()
        asked = [option for option, given in shapes.items() if given]
        if len(asked) > 1:
            raise UsageError(f"{' and '.join(asked)} are different comparisons", "give one of them")
        if self.query is not None and self.other_text is None and not self.photos:
            raise UsageError("--query ranks the heads of a minimal pair", 'give a second text: --with "…"')
        if self.heads_record is not None and asked:
            raise UsageError("--heads-record tells the roles where all heads are compared", f"leave out {asked[0]}")
        if (picked or self.other_text is not None) and (self.texts.files or self.texts.text is None):
            raise UsageError(f"{asked[0]} takes one TEXT", f'such as: attnscope compare "…" {asked[0]} …')
        if self.other_text is not None and (self.choice.layers is not None or self.choice.heads is not None):
            raise UsageError("--with ranks all heads", "leave out -L and -H")

    def _require_pair_of_pictures(self) -> None:
        refused = {
            "--pick": self.choice.pick, "-L": self.choice.layers, "-H": self.choice.heads, "--file": self.texts.files,
            "--with-model": self.other_model, "--heads-record": self.heads_record, "--hide-special": self.hide_special,
        }  # fmt: skip
        for option, given in refused.items():
            if given:
                raise UsageError(f"{option} cannot be given beside --image", "leave out one of them")
        if self.texts.text is None:
            raise UsageError("what is compared is where words look", "give a TEXT, such as a question about the photos")
        if len(self.photos) + (self.other_text is not None) != 2:
            raise UsageError(
                "two photos are compared, or two questions about one",
                'such as: attnscope compare --image a.jpg --image b.jpg "…", or --image a.jpg "…" --with "…"',
            )

    @property
    def measure_names(self) -> tuple[str, ...]:
        """The measures by their names in records, each once."""
        named = (part.strip().lower().replace("-", "_") for part in self.measures.split(","))
        found = tuple(dict.fromkeys(part for part in named if part))
        require_measures(found)
        return found


def study(
    spec: str, order: CompareOrder, loading: LoadOptions, report: Report | None, workers: Workers | None = None
) -> Comparison:
    """Loads a model, or two, and compares what was asked for.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    comparison = _comparison(order, report, workers)  # what can be refused is, before a model is loaded
    return comparison(loading.load(spec), loading)


def _comparison(
    order: CompareOrder, report: Report | None, workers: Workers | None
) -> Callable[[Model, LoadOptions], Comparison]:
    """What is to be done with the loaded model; all that can be refused before is refused here."""
    measures, texts = order.measure_names, order.texts
    if order.other_text is not None or order.choice.pick is not None or order.photos:
        if workers is not None:
            raise UsageError("workers share many texts: here is one", "leave out --workers, --executor and --threads")
        text = read_text(texts.text)
        if order.photos:
            asked = [text] if order.other_text is None else [text, order.other_text]
            return lambda model, _: compare_pictures(model, order.photos, asked, query=order.query, measure=measures[0])
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

        def compare_two(model: Model, loading: LoadOptions) -> Comparison:
            loading = replace(loading, adapter=None)
            pair = None if workers is None else (workers, replace(workers, spec=second, loading=loading))
            return compare_models(model, loading.load(second), corpus, options, report=report, workers=pair)

        return compare_two
    roles = None if order.heads_record is None else Findings.load(order.heads_record)
    return lambda model, _: compare(model, corpus, options, roles=roles, report=report, workers=workers)
