"""What was found about the heads of a model: measures with intervals, roles with evidence. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.records.ablation import Effect
from attnscope.records.frame.codec import OMITTED
from attnscope.records.frame.head_table import Column, HeadTable, number_column, read_numbers
from attnscope.records.frame.pair_tables import HeadOfKind, require_known
from attnscope.records.frame.record import StudyRecord
from attnscope.records.heads.descriptions import Descriptions, HeadDescription
from attnscope.records.heads.needles import Needles
from attnscope.results.storage import csv_text
from attnscope.results.table import HEADS, Table
from attnscope.results.table import Column as TableColumn

PICTURES = "pictures"
RECORDINGS = "recordings"
NEEDLES = "needles"
"""What `corpus["of"]` says of texts that are pictures, whose tokens are patches or words about them; recordings; or
needles in haystacks."""


FIRST = (
    *("kind", "layer", "head", "roles", "role_value", "role_value_low", "role_value_high", "role_value_uniform"),
    *("description", "active_explained", "active_explained_low", "active_explained_high", "active_nats"),
    *("resting_share", "entropy_nats", "previous_token", "next_token", "same_token", "induction", "first_token"),
)
"""The columns that people use first, which a CSV has."""

MUCH_OF_A_SUM = 1 / 3
"""A note says so if one text holds more than this part of what a measure adds up."""


@dataclass(frozen=True)
class Estimate:
    """A measure of one head over a corpus.

    Attributes:
        value: Σ w sum / Σ w count over all texts, w = 1 / n for a text of n queries; NaN where the measure is undefined
            everywhere.
        low: Lower end of its 95% interval; NaN with fewer than 2 texts.
        high: Upper end.
        uniform: The measure's value under uniform attention over the keys that the mask allows.
        count: How many queries of texts of one length would say as much.
        largest_part: The part of Σ w sum that one text holds, if that is more than MUCH_OF_A_SUM; else None.
    """

    value: float
    low: float
    high: float
    uniform: float
    count: float
    largest_part: float | None = field(default=None, metadata=OMITTED)


UNKNOWN = Estimate(math.nan, math.nan, math.nan, math.nan, 0.0)
"""A measure that a record does not have of a head."""


@dataclass(frozen=True)
class Role:
    """A role that a head has, with the evidence for it.

    Attributes:
        name: Such as "previous_token".
        measure: The measure that it rests on; may be an `_active` one.
        value: Value of that measure.
        low: Lower end of its 95% interval; NaN where the record has none.
        high: Upper end.
        baseline: What it had to beat beside the threshold: uniform attention, or the best fixed offset.
        threshold: What it had to reach; of relations, what the lower end had to reach.
        p: One-sided p-value against the larger of threshold and baseline (of relations, against the baseline), of all
            measures that the role may rest on together (Simes).
        q: The same after Benjamini-Hochberg over heads x roles.
        tentative: True where the evidence amounts to fewer texts than `options["fewest_texts"]`.
        active_share: For roles on an `_active` measure: the share of attention that it speaks of; else None.
        effective_texts: How many texts of one length the evidence amounts to; None where the record does not say.
    """

    name: str
    measure: str
    value: float
    low: float
    high: float
    baseline: float
    threshold: float
    p: float
    q: float
    tentative: bool
    active_share: float | None = None
    effective_texts: float | None = None


@dataclass(frozen=True)
class Head(HeadOfKind):
    """One head: its roles, the strongest first but sinks last (none = unclassified), and its measures by name.

    With `--causal`, `effects` has what changes without it, as `records.ablation` names it; else it is empty.
    """

    roles: tuple[Role, ...]
    resting_share: float
    measures: Mapping[str, Estimate]
    effects: Mapping[str, Effect] = field(default_factory=dict, metadata=OMITTED)

    def estimate(self, measure: str) -> Estimate:
        """One of its measures; `UNKNOWN` where the record does not have it."""
        return self.measures.get(measure, UNKNOWN)


@dataclass(frozen=True)
class RoleFacts:
    """What a record says about a role beside who has it.

    Attributes:
        what: Its definition in a few words; empty if the record does not say.
        measure: The measure that it rests on, without `_active`.
        threshold: What that measure must reach; NaN if the record does not say.
    """

    what: str
    measure: str
    threshold: float


@dataclass(frozen=True)
class MeasureFacts:
    """What a record says about a measure beside its values.

    Attributes:
        what: Its definition in a few words; empty if the record does not say.
        unit: Such as "nats", "tokens" or "share"; empty where the record does not say.
        low: Its least possible value; NaN where it has no bound or the record does not say.
        high: Its largest possible value.
    """

    what: str
    unit: str
    low: float
    high: float


@dataclass(frozen=True, eq=False, repr=False)
class Findings(StudyRecord):
    """What every head of a model does on a corpus.

    Attributes:
        run: What made it: model, sha256, engine, versions, dtype, device, notes ... Plain JSON values.
        corpus: What it was made on: `sources`, `n_texts`, `n_tokens`, `sha256` of the texts, `problems` (file, line,
            reason), `complete` (False after an interruption). Plain JSON values. Of pictures: `of` is "pictures",
            `grids` are the rows and columns of patches that occur.
        options: What was chosen, as plain JSON values: `level` (of the false discovery rate), how texts were split
            ..., and what names mean, so that a saved record explains itself:
            `roles`: {name: {"what": str, "measure": str, "threshold": float}} and
            `measures`: {name: {"what": str, "unit": str, "range": [least, largest], null = no bound}}.
        heads: One entry a head, by kind, layer, head.
        control: Findings of the same architecture with random weights, on the same texts, if asked for.
        descriptions: What each head does, found and not asked for; None where heads were not described.
        needles: Of needles in haystacks, what the model finds, and what it finds without some heads; else None.
    """

    SCHEMA: ClassVar[str] = "attnscope.heads/1"
    HOLDS: ClassVar[str] = "heads"

    heads: tuple[Head, ...] = field(metadata={"distinct": "address"})
    control: tuple[Head, ...] = field(default=(), metadata={"distinct": "address", **OMITTED})
    descriptions: Descriptions | None = field(default=None, metadata=OMITTED)
    needles: Needles | None = field(default=None, metadata=OMITTED)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of attention in it, in their order."""
        return tuple(dict.fromkeys(head.kind for head in self.heads))

    @property
    def of_senses(self) -> bool:
        """Whether it was made on pictures or recordings: heads then have measures, and no roles."""
        return self.corpus.get("of") in (PICTURES, RECORDINGS)

    def head_table(self) -> HeadTable:
        """Everything that is known per head: roles, measures with intervals, effects, descriptions."""
        measures = [
            number_column(name, [head.measures.get(name) for head in self.heads], **self._column_facts(name))
            for name in self.measure_names
        ]
        columns = (*self._role_columns(), *measures, *self._effect_columns(), *self._description_columns())
        return HeadTable(tuple(head.address for head in self.heads), columns)

    def table(self, name: str = "heads") -> Table:
        """Return the numbers and words of every head as a table, as `Result.table` does.

        Raises:
            KeyError: There is no such table.
        """
        if name != "heads":
            raise KeyError(f"findings have no table {name!r}: there is heads")
        found = self.head_table()
        flat = found.flat()
        columns = {column.name: column for column in HEADS}
        values: dict[str, NDArray[Any]] = {name: np.array(flat[name]) for name in columns}
        for column in found.columns:
            if not column.in_files:
                continue
            shown = TableColumn(column.name, column.what, column.unit, column.range, label=column.label)
            if isinstance(column.values, np.ndarray):
                values[column.name] = column.values
                for part, numbers in column.parts.items():
                    values[f"{column.name}_{'baseline' if part == 'uniform' else part}"] = numbers
            else:
                shown = replace(shown, kind="flag" if column.name == "tentative" else "text")
                texts = [" + ".join(cell) if isinstance(cell, list) else cell for cell in column.values]
                values[column.name] = np.array(texts, np.bool_ if shown.kind == "flag" else np.str_)
            columns[column.name] = shown
        return Table(columns, values)

    def __getitem__(self, name: str) -> Table:
        """Return a table by name: `findings["heads"]["entropy_nats"]` is an array."""
        return self.table(name)

    def _effect_columns(self) -> Iterator[Column]:
        for name in dict.fromkeys(name for head in self.heads for name in head.effects):
            facts = _recorded(self.options, "quantities", name)
            yield number_column(
                name, [head.effects.get(name) for head in self.heads], ("low", "high", "count"), kind="effect",
                what=_words(facts.get("what")) or "what changes without the head", unit=_words(facts.get("unit")),
            )  # fmt: skip

    def _column_facts(self, measure: str) -> dict[str, Any]:
        facts = self.measure_facts(measure)
        bounds = tuple(None if math.isnan(bound) else bound for bound in (facts.low, facts.high))
        recorded_label = _words(_recorded(self.options, "measures", measure).get("label"))
        return {"kind": "measure", "what": facts.what, "unit": facts.unit, "range": bounds, "label": recorded_label}

    def _role_columns(self) -> Iterator[Column]:
        yield Column("roles", [self._in_order(role.name for role in head.roles) for head in self.heads])
        yield Column("tentative", [any(role.tentative for role in head.roles) for head in self.heads])
        firsts = [head.roles[0] if head.roles else None for head in self.heads]
        parts = {"low": read_numbers(firsts, "low"), "high": read_numbers(firsts, "high")}
        parts["uniform"] = read_numbers(firsts, "baseline")
        what = "value of the measure that the first of its roles rests on; its baseline beside it"
        yield Column("role_value", read_numbers(firsts, "value"), parts, what)
        resting = np.array([head.resting_share for head in self.heads], np.float64)
        what = "share of its attention on sinks: special tokens and the first"
        yield Column("resting_share", resting, what=what, unit="share", range=(0, 1), label="sink share")
        for name, holds in {
            "unclassified": [not head.roles for head in self.heads],
            **{name: [any(r.name == name for r in head.roles) for head in self.heads] for name in self.role_names},
        }.items():
            named = condition_name(name, self.measure_names)
            yield Column(
                name, np.array(holds, np.float64), names=(named,) if named else (), in_files=False, kind="role"
            )

    @property
    def role_names(self) -> tuple[str, ...]:
        """The roles that the record defines, and any others that a head has."""
        mine = (role.name for head in self.heads for role in head.roles)
        return tuple(dict.fromkeys([*_defined_roles(self.options), *mine]))

    def _description_columns(self) -> Iterator[Column]:
        """What the descriptions say, where there are any."""
        if self.descriptions is None:
            return
        known = self.descriptions.by_head
        mine = [known.get(head.address) for head in self.heads]
        active = [None if each is None else each.active for each in mine]

        def column(name: str, of: Sequence[Any], part: str, what: str, **more: Any) -> Column:
            bounds = {end: read_numbers(of, end) for end in ("low", "high") if part == "explained"}
            return Column(name, read_numbers(of, part), bounds, what, in_files=any(of), **more)

        n_terms = [
            math.nan if each is None else float(len(each.terms) + (len(each.active.terms) if each.active else 0))
            for each in mine
        ]
        yield Column("description", ["" if each is None else each.words for each in mine], in_files=bool(known))
        what = "how far its attention is from uniform: mean KL divergence"
        yield column("nats_from_uniform", mine, "nats", what, unit="nats", names=("nats",))
        what = "share of what sets its attention apart from uniform attention that the description predicts, held out"
        yield column("explained", mine, "explained", what, unit="share", range=(None, 1))
        what = "share of its attention on keys that are neither special tokens nor the first"
        yield column("active_share", active, "share", what, unit="share", range=(0, 1))
        what = "how far that attention is from uniform: mean KL divergence"
        yield column("active_nats", active, "nats", what, unit="nats")
        what = "share of what sets that attention apart from uniform attention that its terms predict, held out"
        yield column("active_explained", active, "explained", what, unit="share", range=(None, 1))
        yield Column("terms", np.array(n_terms, np.float64), in_files=False)

    def grid(self, kind: str, measure: str) -> NDArray[np.float64]:
        """The values of a measure, (layer, head); NaN where there is no such head."""
        column = number_column(measure, [head.measures.get(measure) for head in self.heads], ())
        return HeadTable(tuple(head.address for head in self.heads), (column,)).grid(kind, measure)

    def description(self, layer: int, head: int, kind: str | None = None) -> HeadDescription:
        """What a head does in a line, and how much of its attention that explains.

        Args:
            layer: Its layer.
            head: Its number.
            kind: Of attention; None = the first that the model has.

        Raises:
            AttnscopeError: Heads were not described, or there is no such head.
        """
        if self.descriptions is None or not self.descriptions.heads:
            raise AttnscopeError(
                "these findings have no descriptions of heads",
                "study at least two texts, without --no-describe (in Python HeadsOptions(describe=None))",
            )
        try:
            return self.descriptions.of(layer, head, kind)
        except KeyError as error:
            raise AttnscopeError(error.args[0], "layers and heads count from 0") from None

    def only(self, picked: Sequence[tuple[int, int]]) -> Findings:
        """The same findings about some heads, (layer, head), of every kind."""
        require_known([(head.layer, head.head) for head in self.heads], picked, "these findings")

        def choose(heads: Iterable[HeadOfKind]) -> Any:
            return tuple(head for head in heads if (head.layer, head.head) in picked)

        described = self.descriptions and replace(self.descriptions, heads=choose(self.descriptions.heads))
        return replace(self, heads=choose(self.heads), control=choose(self.control), descriptions=described)

    def does_nothing(self, head: Head) -> bool:
        """Whether a head that was taken out (`--causal`) makes no difference by any ablation.

        That is so where the upper end of each effect's interval (its value, where a text alone gives none) is below
        what `options["causal"]` calls nothing.
        """
        causal = self.options.get("causal")
        if not isinstance(causal, Mapping) or not head.effects:
            return False
        quantity, least = str(causal.get("quantity")), _bound(causal.get("nothing_below"))
        effects = [head.effects.get(f"{mode}_{quantity}") for mode in causal.get("modes", ("zero", "mean"))]
        tops = [effect.high if math.isfinite(effect.high) else effect.value for effect in effects if effect]
        return bool(tops) and max(tops) < least

    @property
    def measure_names(self) -> tuple[str, ...]:
        """The measures that any head has, in their order."""
        return tuple(dict.fromkeys(name for head in self.heads for name in head.measures))

    def role_facts(self, role: str) -> RoleFacts:
        """What the record says about a role: in `options`, else by the heads that have it."""
        recorded = _recorded(self.options, "roles", role)
        seen = next((r for head in (*self.heads, *self.control) for r in head.roles if r.name == role), None)
        measure = recorded.get("measure", seen.measure.removesuffix("_active") if seen else "")
        threshold = _bound(recorded.get("threshold", seen.threshold if seen else None))
        return RoleFacts(_words(recorded.get("what")), str(measure), threshold)

    def measure_facts(self, measure: str) -> MeasureFacts:
        """What the record says about a measure in `options`; of an `_active` one, what follows from the whole one."""
        return read_measure_facts(self.options, measure)

    def rows(self) -> Iterator[Sequence[Any]]:
        """One row per head: kind, layer, head, roles, tentative, resting share, then each measure.

        A measure has five columns: its value under its name, and `_low`, `_high`, `_uniform` and `_count`. What changes
        without the head (`--causal`) follows, in four columns each, and what its description says.
        """
        return self.head_table().rows()

    def to_csv(self, *, every: bool = False) -> str:
        """The table as CSV: several roles have a + between them, in the catalogue's order; none are "unclassified".

        Args:
            every: Whether it has all columns; else those of `FIRST`. Pictures, recordings and needles have all.
        """
        flat = self.head_table().flat()
        if not every and self.descriptions is not None:
            flat = {name: flat[name] for name in FIRST if name in flat}
        flat["roles"] = ["+".join(names) or "unclassified" for names in flat["roles"]]
        return csv_text([list(flat), *zip(*flat.values(), strict=True)])

    def _in_order(self, roles: Iterable[str]) -> list[str]:
        """Roles in the order in which the record lists them all, so that a table can be sorted and grouped by them."""
        order = _defined_roles(self.options)
        return sorted(roles, key=lambda name: (order.index(name) if name in order else len(order), name))


def _defined_roles(options: Mapping[str, Any]) -> list[str]:
    defined = options.get("roles")
    return [str(name) for name in defined] if isinstance(defined, Mapping) else []


def condition_name(role: str, measures: Sequence[str]) -> str:
    """What conditions call a role: with `is_` before the name where a measure has it; empty where it is no name."""
    if not role.isidentifier():
        return ""
    return f"is_{role}" if role in measures else role


def read_measure_facts(options: Mapping[str, Any], measure: str) -> MeasureFacts:
    """As `Findings.measure_facts`, of the options of a record."""
    recorded, beside = _recorded(options, "measures", measure), ""
    if not recorded and measure.endswith("_active"):
        recorded = _recorded(options, "measures", measure.removesuffix("_active"))
        beside = " (excluding sinks)"
    what = _words(recorded.get("what"))
    bounds = recorded.get("range")
    low, high = bounds if isinstance(bounds, Sequence) and len(bounds) == 2 else (None, None)
    return MeasureFacts(what and what + beside, _words(recorded.get("unit")), _bound(low), _bound(high))


def _recorded(options: Mapping[str, Any], what: str, name: str) -> Mapping[str, Any]:
    """What `options[what]` says about a name; nothing where it is missing or of another form."""
    table = options.get(what)
    recorded = table.get(name) if isinstance(table, Mapping) else None
    return recorded if isinstance(recorded, Mapping) else {}


def _words(value: Any) -> str:
    return "" if value is None else str(value)


def _bound(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan
