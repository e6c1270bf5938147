"""In what order heads are listed, and which measures there are."""

from dataclasses import replace

import pytest

from attnscope.errors import UsageError
from attnscope.questions.heads import sort_heads
from attnscope.records.heads.descriptions import Descriptions, HeadDescription, Term
from attnscope.records.heads.findings import Findings
from tests.conftest import Run
from tests.findings_helpers import fake_findings as make_findings


@pytest.fixture
def found() -> Findings:
    return make_findings(3, 4)


def described(found: Findings) -> Findings:
    """The same with descriptions: each head explains a tenth more than the one before."""
    term = Term("near", "near tokens", 1.0, 0.5, 0.1, 0.3)
    heads = tuple(
        HeadDescription(head.kind, head.layer, head.head, (term,), 1.0, 0.1 * n, 0.0, 1.0)
        for n, head in enumerate(found.heads)
    )
    return replace(found, descriptions=Descriptions(heads, 4, 20, 2))


def test_heads_come_in_the_order_that_is_asked_for(found: Findings) -> None:
    known = described(found)
    assert sort_heads(known, "explained") == [*range(len(found.heads))][::-1]
    assert sort_heads(known, "layer") == [*range(len(found.heads))]
    with pytest.raises(UsageError, match="there is no order"):
        sort_heads(known, "size")


@pytest.mark.parametrize("more", [("a b",), ("--file", "nothing.txt", "--no-describe"), ("--image", "nothing.png")])
def test_a_measure_that_there_is_not_is_said_before_a_model_is_loaded(run: Run, more: tuple[str, ...]) -> None:
    status, out, err = run("heads", *more, "-m", "no/such-model", "--measures", "reach,entropi_nats")
    assert (status, out) == (2, "")
    assert "entropi_nats" in err or "reach" in err
