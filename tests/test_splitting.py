"""The same queries, keys and values in more and fewer heads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnscope
from attnscope.core import splitting
from attnscope.errors import AttnscopeError
from attnscope.questions.split import SplitOptions
from attnscope.studies.split import split
from tests import oracle
from tests.core_helpers import EXACT, few_examples
from tests.rounding import require_no_worse
from tests.test_trace import tiny

TEXT = "The cat sat on the mat."


def plain_entropy(row):
    return -sum(p * np.log(p) for p in row if p > 0)


@given(
    n_queries=st.integers(1, 5),
    n_keys=st.integers(1, 7),
    count=st.sampled_from([1, 2, 3, 6, 12]),
    seed=st.integers(0, 99),
)
@few_examples
def test_heads_and_what_is_said_of_them_are_the_loops(n_queries, n_keys, count, seed):
    chance = np.random.default_rng(seed)
    q, k, v = (chance.standard_normal((n, 12)) for n in (n_queries, n_keys, n_keys))
    may = chance.random((n_queries, n_keys)) > 0.5
    may[:, 0] = True
    found = splitting.split_heads(q, k, v, count, mask=may)
    output, weights = oracle.multi_head(q, k, v, count, mask=may)
    np.testing.assert_allclose(found.weights, weights, **EXACT)
    np.testing.assert_allclose(found.concat_output, output, **EXACT)
    for head in range(count):
        entropies = [plain_entropy(row) for row in weights[head]]
        np.testing.assert_allclose(found.entropy_nats[head], np.mean(entropies), rtol=1e-9, atol=1e-12)
        d = 12 // count
        dots = q[:, head * d : (head + 1) * d] @ k[:, head * d : (head + 1) * d].T
        assert found.rank[head] == np.linalg.matrix_rank(dots) <= d
    for query in range(n_queries):
        rows = weights[:, query]
        shannon = plain_entropy(rows.mean(0)) - np.mean([plain_entropy(row) for row in rows])
        np.testing.assert_allclose(
            found.disagreement_nats[query], max(0.0, shannon), rtol=1e-9, atol=1e-12
        )
        assert found.disagreement_nats[query] <= np.log(count) + 1e-12


# The worked example


def test_a_count_that_does_not_fit_says_which_do():
    with pytest.raises(AttnscopeError, match="into 3 heads.*1, 2, 4"):
        split(options=SplitOptions((3,)))


# Models


def test_a_models_own_number_of_heads_gives_its_own_weights(minilm_folder):
    del minilm_folder
    model = attnscope.load("minilm")
    record = split(model, TEXT, 3, SplitOptions((1, 12)))
    exact = attnscope.heatmap(attnscope.load("minilm", dtype="float64"), TEXT, layers=3).weights[0]
    require_no_worse(
        record.of(12)["weights"], attnscope.heatmap(model, TEXT, layers=3).weights[0], exact
    )
    assert record.run["model"] == "minilm"


def test_causal_models_stay_causal():
    model = tiny("gpt2")
    record = split(model, "5 3 9 17", 1, SplitOptions((2, 4)))
    heat = attnscope.heatmap(model, "5 3 9 17", layers=1)
    np.testing.assert_allclose(record.of(4)["weights"], heat.weights[0], atol=1e-6)
    assert not np.triu(record.of(2)["weights"], 1).any()


@pytest.mark.parametrize(
    ("family", "says"), [("llama", "grouped queries"), ("gemma2", "grouped"), ("t5", "single heads")]
)
def test_heads_that_cannot_be_cut_otherwise_are_refused(family, says):
    from attnscope.studies.inputs.reading import Prompt

    prompt = Prompt("5 3 9", target="4 7" if family == "t5" else None)
    with pytest.raises(AttnscopeError, match=says):
        split(tiny(family), prompt, 0)
