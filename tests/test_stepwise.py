"""Attention line by line: the lines that are shown compute what the loops compute."""

import ast
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from attnscope.core import example, stepwise
from attnscope.core.stepwise import AttentionInputs
from tests import oracle
from tests.core_helpers import WORKED, few_examples


def inputs_of(
    n_queries=5,
    n_keys=7,
    n_kv_heads=2,
    group=3,
    d_head=4,
    d_value=3,
    seed=0,
    **others,
):
    chance = np.random.default_rng(seed)
    n_heads = n_kv_heads * group
    given = {
        "Q": chance.standard_normal((n_queries, n_heads * d_head)),
        "K": chance.standard_normal((n_keys, n_kv_heads * d_head)),
        "V": chance.standard_normal((n_keys, n_kv_heads * d_value)),
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "scale": 0.37,
    }
    return AttentionInputs(**given | others)  # type: ignore[arg-type]


def steps(inputs, head, query):
    lines = stepwise.head_steps(inputs, head, query)
    return dict(zip((line.name for line in lines), stepwise.run_steps(lines, inputs), strict=True))


def test_the_lines_share_no_code_with_what_they_are_checked_by():
    tree = ast.parse(Path(stepwise.__file__).read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {module for module in modules if module and module.startswith("attnscope")}


@given(
    n_queries=st.integers(1, 5),
    n_keys=st.integers(1, 7),
    group=st.integers(1, 3),
    seed=st.integers(0, 99),
    softcap=st.sampled_from([None, 0.8]),
    has_bias=st.booleans(),
    has_mask=st.booleans(),
    has_sinks=st.booleans(),
    one_query=st.booleans(),
)
@few_examples
def test_lines_and_loops_agree(
    n_queries, n_keys, group, seed, softcap, has_bias, has_mask, has_sinks, one_query
):
    chance = np.random.default_rng(seed + 1000)
    n_heads = 2 * group
    may = chance.random((n_heads, n_queries, n_keys)) > 0.4
    may[..., 0] = True
    inputs = inputs_of(
        n_queries,
        n_keys,
        group=group,
        seed=seed,
        softcap=softcap,
        bias=chance.standard_normal((n_heads, n_queries, n_keys)) if has_bias else None,
        may=may if has_mask else None,
        sinks=chance.standard_normal(n_heads) if has_sinks else None,
    )
    head = int(chance.integers(n_heads))
    query = int(chance.integers(n_queries)) if one_query else None
    found = steps(inputs, head, query)
    read = head // group
    d = inputs.d_head
    d_value = inputs.d_value
    rows = slice(None) if query is None else slice(query, query + 1)
    output, weights = oracle.attention(
        inputs.Q[rows, head * d : (head + 1) * d],
        inputs.K[:, read * d : (read + 1) * d],
        inputs.V[:, read * d_value : (read + 1) * d_value],
        scale=inputs.scale,
        mask=may[head, rows] if has_mask else None,
        softcap=softcap,
        bias=None if inputs.bias is None else inputs.bias[head, rows],
        sinks=None if inputs.sinks is None else float(inputs.sinks[head]),
    )
    for name, value in (("weights", weights), ("head_output", output)):
        np.testing.assert_allclose(
            found[name], value if query is None else value[0], rtol=1e-12, atol=1e-13
        )
    assert {"dot_products", "scores", "exponentials", "weights", "head_output"} <= set(found)
    assert ("capped_scores" in found) == (softcap is not None)


def test_the_example_is_the_one_worked_by_hand():
    inputs = AttentionInputs(example.Q, example.K, example.V, 2, 2, 2**-0.5)
    for head, name in enumerate(("weights_head_1", "weights_head_2")):
        np.testing.assert_allclose(
            steps(inputs, head, None)["weights"], WORKED[name], atol=5.1e-5, rtol=0
        )
    assert not any(array.flags.writeable for array in (example.Q, example.K, example.V))
