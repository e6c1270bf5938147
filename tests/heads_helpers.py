"""What tests of the study of heads share: how findings are read, and what interrupts the study."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import attnscope.studies.heads.study as study
from attnscope.core.plain_torch import with_default_torch
from attnscope.corpus import CopyFilter, count_tokens, distinct
from attnscope.models.model import Model
from attnscope.questions.heads import Heads
from attnscope.results.table import Estimate, Table, count, text
from attnscope.studies.describe.rows import SampledText, TextSampler
from attnscope.studies.heads.measuring import HeadMeasurer, HeadSums, KindSums
from attnscope.studies.heads.options import DescribeOptions, HeadsOptions
from attnscope.studies.inputs.texts import special_ids, texts_of
from attnscope.studies.run import run
from tests.record_helpers import require_close


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 texts, so that a few texts make several."""
    monkeypatch.setattr(study, "BLOCK", 4)


class Seen:
    """A head of a result, as tests ask for it: its place, its roles as rows by name, and its measures."""

    def __init__(self, heads: Table, row: int, roles: Table) -> None:
        self.kind = heads["kind"][row].item()
        self.layer = heads["layer"][row].item()
        self.head = heads["head"][row].item()
        self.name = f"L{self.layer}H{self.head}"
        self.resting_share = (
            float(heads["resting_share"][row]) if "resting_share" in heads else float("nan")
        )
        self.roles = []
        header, *rows = roles.rows()
        for values in rows:
            facts = {
                name.removeprefix("value_"): value for name, value in zip(header, values, strict=True)
            }
            if facts["head"] == row:
                self.roles.append(SimpleNamespace(**facts, name=facts["role"]))
        parts = ("low", "high", "baseline", "count")
        self.measures = {
            name: Estimate(
                float(heads[name][row]), *(float(heads.companion(name, part)[row]) for part in parts)
            )
            for name in heads.number_columns
            if f"{name}_count" in heads
        }


def heads_in(found: Heads | Mapping[str, Table], table: str = "heads") -> list[Seen]:
    """The heads of a result, or of its tables, in their order."""
    roles = found["roles"]
    if table == "control":  # which has the names of roles alone
        names = [role.split("+") for role in found[table]["role"].tolist()]
        rows = [(row, name) for row, of_head in enumerate(names) for name in of_head if name]
        numbers, named = zip(*rows, strict=True) if rows else ((), ())
        roles = Table.of_arrays((count("head"), text("role")), head=numbers, role=named)
    return [Seen(found[table], row, roles) for row in range(len(found[table]))]


def names_of(head: Seen) -> set[str]:
    return {role.name for role in head.roles}


def head_of(found: Heads, name: str) -> Seen:
    row = found["heads"].head_names().index(name)
    return Seen(found["heads"], row, found["roles"])


def require_same(one: Heads, other: Heads) -> None:
    """Within the roundings of float64."""
    require_close(one, other, rtol=1e-9, atol=1e-12)


def study_tallies(
    model: Any, texts: Any, options: HeadsOptions | None = None
) -> tuple[Heads, Mapping[str, KindSums]]:
    """What `attnscope.heads` finds, and the sums over texts that it rests on, by kind of attention."""
    options = options or HeadsOptions()
    found, done = with_default_torch(study.study_heads)(model, texts_of(texts, model), options)
    return found, done.sums_by_kind


def fix_counts(monkeypatch: pytest.MonkeyPatch, model: Any, text: str) -> None:
    """Lets the tokens of a text say how frequent tokens are, whatever texts are studied."""
    counts = np.bincount(model.tokenizer.encode(text).ids)

    def count(texts: Iterable[Any], *_: Any) -> Any:
        for _text in texts:
            pass
        return counts

    monkeypatch.setattr(study, "count_tokens", count)


def words(n: int, chance: np.random.Generator, known: Sequence[str]) -> str:
    return " ".join(chance.choice(known) for _ in range(n))


def after(n: int, step: str | None = None) -> Callable[[Any], None]:
    """What interrupts a study once, when it has reported n times; of one of its steps, if one is named."""
    reports = iter([False] * n + [True])

    def report(done: Any) -> None:
        if step in (None, done.step) and next(reports, False):
            raise KeyboardInterrupt

    return report


def read_sample(
    model: Model, texts: Iterable[str], options: DescribeOptions, *, with_rows: bool = True
) -> tuple[list[SampledText], NDArray[np.int64]]:
    """The texts that are drawn for descriptions, with the rows of their queries; and how often tokens occur."""
    drawing = TextSampler(options.seed)
    listed = texts_of(list(texts))
    special = special_ids(model)
    counts = count_tokens(drawing.watch(distinct(listed, CopyFilter())), model.tokenizer.encode, special)
    units = drawing.sample(model, options)
    if with_rows:
        sampled = {(unit.chunk.text_index, unit.chunk.number): unit.queries for unit in units}
        make = partial(HeadMeasurer, counts=counts, special=special, sampled=sampled)
        rows = run(make, (model,), listed, HeadSums(), block_size=len(listed)).done.rows
        for unit in units:
            unit.rows = rows[unit.chunk.text_index, unit.chunk.number]
    return units, counts
