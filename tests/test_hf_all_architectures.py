"""Every text architecture of transformers: equal to its own eager attention, or refused in one line."""

import pytest

from tests.processes import python


@pytest.mark.slow
def test_all_architectures_are_exact_or_refused() -> None:
    # A process of its own: hundreds of modelling files warn, and some switch things for good.
    process = python("-m", "tests.hf_tally", timeout=3000)
    *lines, last = process.stdout.splitlines() or [""]
    print(last)
    assert [line for line in lines if line[29:].startswith("WRONG")] == []
    assert process.returncode == 0, process.stderr[-2000:]
    assert int(last.split(" exact through")[0].rsplit(" ", 1)[1]) >= 190
