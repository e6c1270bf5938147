"""What tests of the study of heads share: how findings are read, and what interrupts the study."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import attnscope.studies.heads.study as study
from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus import TokenCounts
from attnscope.records.heads.findings import Findings, Head
from attnscope.studies.heads.options import HeadsOptions
from attnscope.studies.inputs.texts import texts_of
from attnscope.studies.measuring.tally import Tally
from tests.record_helpers import require_close


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 texts, so that a few texts make several."""
    monkeypatch.setattr(study, "BLOCK", 4)


def names_of(head: Head) -> set[str]:
    return {role.name for role in head.roles}


def head_of(found: Findings, name: str) -> Head:
    return next(head for head in found.heads if head.name == name)


def require_same(one: Findings, other: Findings) -> None:
    """Within the roundings of float64."""
    require_close(one, other, rtol=1e-9, atol=1e-12)


def study_tallies(model: Any, texts: Any, options: HeadsOptions | None = None) -> tuple[Findings, Mapping[str, Tally]]:
    """What `attnscope.heads` finds, and the sums over texts that it rests on, by kind of attention."""
    options = options or HeadsOptions()
    found, done = with_plain_torch(study.study_heads)(model, texts_of(texts, model), options)
    return found, done.tallies


def fix_counts(monkeypatch: pytest.MonkeyPatch, model: Any, text: str) -> None:
    """Lets the tokens of a text say how frequent tokens are, whatever texts are studied."""
    counts = TokenCounts()
    counts.add(model.tokenizer.encode(text).ids)

    def count(texts: Iterable[Any], *_: Any) -> TokenCounts:
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
