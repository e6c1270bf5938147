"""Texts weigh the same in measures and roles."""

import numpy as np
import pytest

from attnscope.studies.heads.measuring import weigh_units
from attnscope.studies.heads.study import heads
from tests.conftest import SAMPLES, SENTENCES
from tests.heads_helpers import heads_in

LONG = " ".join((SAMPLES / "alice.txt").read_text("utf-8").split()[:300])


def value(found, name, field="value"):
    heads_of = {(head.layer, head.head): getattr(head.measures[name], field) for head in heads_in(found)}
    return np.array([heads_of[place] for place in sorted(heads_of)]).reshape(
        found["heads"].grid(name, "encoder").shape
    )


def test_a_text_weighs_the_same_however_long_it_is(own):
    texts = [*SENTENCES[:4], LONG]
    together = heads(own, texts)
    alone = [heads(own, [text]) for text in texts]
    sizes = np.array([found.corpus["n_tokens"] for found in alone], float)[:, None, None]
    for name in ("entropy_nats", "special", "induction", "relative_entropy"):
        values = np.stack([value(found, name) for found in alone])
        # For how many queries it is defined.
        counts = np.stack([value(found, name, "count") for found in alone])
        weights = counts / sizes
        expected = (np.nan_to_num(values) * weights).sum(0) / weights.sum(0)
        np.testing.assert_allclose(value(together, name), expected, atol=1e-6, err_msg=name)
    assert together.corpus["effective_texts"] == pytest.approx(5, abs=0.01)


def test_what_rounding_leaves_outside_a_sink_has_no_value():
    """A head that puts all but 1e-40 on sinks had values of `_active` measures, from rounding alone."""
    sums = {name: np.array([0.5, 1e-40]).reshape(1, 1, 1, 2) for name in ("sum", "uniform_sum")}
    sums["count"] = np.array([4.0, 3e-40]).reshape(1, 1, 1, 2)
    weighed = weigh_units(np.array([0.25]), sums)
    assert weighed["count"].ravel().tolist() == [1.0, 0.0]
    assert weighed["sum"].ravel().tolist() == [0.125, 0.0]
