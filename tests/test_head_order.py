"""In what order heads are listed, and which measures there are."""

import pytest

from attnscope.errors import UsageError
from attnscope.questions.head_lines import order_heads, require_sort
from tests.findings_helpers import described_findings


def test_heads_come_in_the_order_that_is_asked_for():
    found = described_findings(3, 4)
    order = [*range(12)]
    assert order_heads(found, "layer") == order
    assert order_heads(found, "explained") == [*order[:1:-1], 0, 1]  # what is unknown comes last
    with pytest.raises(UsageError, match="there is no order"):
        require_sort("size")


@pytest.mark.parametrize(
    "more", [("a b",), ("--file", "nothing.txt", "--no-describe"), ("--image", "nothing.png")]
)
def test_a_measure_that_there_is_not_is_said_before_a_model_is_loaded(run, more):
    status, out, err = run("heads", *more, "-m", "no/such-model", "--measures", "reach,entropi_nats")
    assert (status, out) == (2, "")
    assert "entropi_nats" in err or "reach" in err
