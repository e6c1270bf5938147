"""What tests of the study of heads share: how findings are read, and what interrupts the study."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import attnscope.studies.heads.study as study
from attnscope.corpus import TokenCounts
from attnscope.records.heads.findings import Findings, Head
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
    assert sorted(one.sums) == sorted(other.sums)
    require_close(one, replace(other, sums={name: other.sums[name] for name in one.sums}), rtol=1e-9, atol=1e-12)


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
