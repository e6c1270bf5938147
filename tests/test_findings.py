"""The record of what heads do: it saves and loads without loss, and its CSV and JSON are what others can read."""

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnscope.records.heads import findings
from attnscope.records.heads.findings import Estimate, Findings, Head, Role
from tests.findings_helpers import NAN, fake_findings, role

numbers = st.floats(allow_nan=True, allow_infinity=True)
estimates = st.builds(Estimate, *[numbers] * 5)
roles = st.builds(
    Role, st.text(), st.text(), *[numbers] * 7, st.booleans(), active_share=st.none() | st.floats(allow_nan=False)
)
heads = st.builds(
    Head,
    st.sampled_from(["encoder", "decoder", "cross"]),
    st.integers(0, 99),
    st.integers(0, 99),
    st.lists(roles, max_size=2).map(tuple),
    numbers,
    st.dictionaries(st.text(max_size=5), estimates, max_size=3),
)
plain = st.dictionaries(
    st.text(max_size=5), st.none() | st.booleans() | st.integers() | numbers | st.text(), max_size=3
)


def one(*given_roles: Role, resting: float = 0.25, **measures: Estimate) -> Findings:
    """Findings about a single head."""
    return Findings({}, {}, {}, (Head("encoder", 2, 5, given_roles, resting, measures),))


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@given(
    st.lists(heads, max_size=3, unique_by=lambda head: (head.kind, head.layer, head.head)).map(tuple),
    st.lists(heads, max_size=1).map(tuple),
    plain,
    plain,
)
def test_a_record_reads_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory,
    found: tuple[Head, ...],
    control: tuple[Head, ...],
    run: dict,
    corpus: dict,
) -> None:
    record = Findings(run, corpus, {}, found, control)
    back = findings.Findings.load(record.save(tmp_path_factory.mktemp("findings") / "heads.npz"))
    # repr tells every bit of a float, and NaN from NaN it does not.
    assert repr((back.run, back.corpus, back.heads, back.control)) == repr((run, corpus, found, control))


def test_json_is_strict_and_says_null_for_what_is_undefined(tmp_path: Path) -> None:
    record = one(role("induction", q=NAN), resting=NAN, entropy_nats=Estimate(1.5, -math.inf, math.inf, NAN, 0.0))
    record = replace(record, corpus={"mean": NAN, "deep": [{"nan": math.inf}]})
    path = record.save(tmp_path / "heads.json")

    def refuse(literal: str) -> None:
        raise AssertionError(f"{literal} is not JSON")

    document = json.loads(path.read_text(), parse_constant=refuse)
    assert document["schema"] == "attnscope.heads/1"
    assert document["corpus"] == {"mean": None, "deep": [{"nan": None}]}
    (head,) = document["heads"]
    assert head["measures"] == {
        "entropy_nats": {"value": 1.5, "low": None, "high": None, "uniform": None, "count": 0.0}
    }
    assert head["resting_share"] is None
    assert head["roles"][0]["q"] is None
    assert head["roles"][0]["value"] == 0.8
    assert "control" not in document


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    estimate = Estimate(np.float64(0.1), np.float32(0.5), np.float64(0.25), np.float64(NAN), np.int64(7))  # type: ignore[arg-type]
    record = one(
        role("local", np.float64(0.7), tentative=np.bool_(False)), resting=np.float64(0.125), previous_token=estimate
    )
    record = replace(record, options={"seeds": np.array([1, 2]), "level": np.float64(0.05)})
    (row,) = rows_of(record.to_csv())
    assert (row["resting_share"], row["previous_token"], row["previous_token_low"]) == ("0.125", "0.1", "0.5")
    assert (row["previous_token_uniform"], row["previous_token_count"]) == ("", "7.0")
    document = json.loads(record.save(tmp_path / "heads.json").read_text())
    assert document["options"] == {"seeds": [1, 2], "level": 0.05}
    assert document["heads"][0]["roles"][0]["tentative"] is False
    assert findings.Findings.load(record.save(tmp_path / "heads.npz")).heads[0].measures["previous_token"].low == 0.5


def test_file_names_that_are_no_text_are_saved(tmp_path: Path) -> None:
    """Such as a path of another encoding, which Python holds with lone surrogates."""
    record = replace(one(), corpus={"sources": ["caf\udce9.txt"]})
    assert findings.Findings.load(record.save(tmp_path / "heads.npz")).corpus == record.corpus
    assert json.loads(record.save(tmp_path / "heads.json").read_text())["corpus"] == record.corpus


def test_csv_has_a_row_a_head_and_five_columns_a_measure() -> None:
    named = (role("local"), role('a,b\n"c"', tentative=True))
    two = (
        Head("encoder", 0, 0, named, NAN, {"x": Estimate(0.1, 0, 1, NAN, 3)}),
        Head("encoder", 0, 1, (), 0.5, {"y": Estimate(1 / 3, NAN, NAN, 0.25, 9.0)}),
    )
    first, second = rows_of(Findings({}, {}, {}, two).to_csv())
    assert first["roles"] == 'a,b\n"c"+local'
    assert (first["tentative"], second["tentative"]) == ("True", "False")
    assert second["roles"] == "unclassified"
    assert (first["resting_share"], second["resting_share"]) == ("", "0.5")
    measured = ["x", "x_low", "x_high", "x_uniform", "x_count", "y", "y_low", "y_high", "y_uniform", "y_count"]
    assert [first[name] for name in measured] == ["0.1", "0.0", "1.0", "", "3.0", *[""] * 5]
    assert [second[name] for name in measured] == [*[""] * 5, "0.3333333333333333", "", "", "0.25", "9.0"]


def test_csv_of_nothing_has_a_header() -> None:
    assert Findings({}, {}, {}, ()).to_csv() == (
        "kind,layer,head,roles,tentative,role_value,role_value_low,role_value_high,role_value_uniform,resting_share\n"
    )


def test_a_grid_has_nan_where_there_is_no_such_head() -> None:
    value = {"x": Estimate(2.0, NAN, NAN, NAN, 1.0)}
    ragged = (
        Head("encoder", 0, 2, (), NAN, value),
        Head("encoder", 1, 0, (), NAN, {}),
        Head("cross", 4, 0, (), NAN, {}),
    )
    record = Findings({}, {}, {}, ragged)
    assert record.kinds == ("encoder", "cross")
    np.testing.assert_array_equal(record.grid("encoder", "x"), [[NAN, NAN, 2.0], [NAN, NAN, NAN]])
    assert record.grid("decoder", "x").shape == (0, 0)


def test_facts_come_from_the_options() -> None:
    record = fake_findings(1, 2)
    assert record.measure_facts("entropy_nats").unit == "nats"
    assert record.measure_facts("entropy_nats").low == 0
    assert math.isnan(record.measure_facts("entropy_nats").high)
    active = record.measure_facts("local_active")
    assert active.what == "attends within 3 tokens (excluding sinks)"
    assert (active.unit, active.low, active.high) == ("share", 0, 1)
    facts = record.role_facts("induction")
    assert (facts.measure, facts.threshold) == ("induction", 0.4)
    assert facts.what.startswith("attends to what followed")


TELLING_NOTHING: list[dict] = [
    {},
    {"roles": 3, "measures": []},
    {"roles": {"dobj": 1}, "measures": {"x": None}},
    {"roles": {"dobj": {"what": None}}, "measures": {"x": {"range": 5}}},
]


@pytest.mark.parametrize("options", TELLING_NOTHING)
def test_facts_that_a_record_does_not_tell_are_empty(options: dict) -> None:
    record = replace(one(role("dobj", measure="arc_active", threshold=0.5)), options=options)
    facts = record.role_facts("dobj")
    assert (facts.what, facts.measure) == ("", "arc")
    assert record.measure_facts("x") == record.measure_facts("x_active")
    assert record.measure_facts("x").what == ""
    assert math.isnan(record.measure_facts("x").low)


def test_facts_that_a_record_does_not_tell_are_those_of_its_heads() -> None:
    assert one(role("dobj", threshold=0.5)).role_facts("dobj").threshold == 0.5
    assert math.isnan(one().role_facts("dobj").threshold)


def test_heads_that_do_nothing_are_told_by_the_upper_ends_of_all_ablations() -> None:
    from attnscope.questions.head_roles import idle_line
    from attnscope.records.ablation import Effect
    from attnscope.records.heads.findings import Findings, Head

    role = Role("previous_token", "previous_token", 0.9, 0.8, 1.0, 0.1, 0.4, 0.0, 0.0, tentative=False)
    small, large = Effect(0.005, 0.004, 0.006, 9.0), Effect(0.005, -0.001, 0.011, 9.0)
    lone = Effect(0.005, math.nan, math.nan, 1.0)
    cases = [({"zero_l2": small, "mean_l2": small}, True), ({"zero_l2": small, "mean_l2": large}, False),
             ({"zero_l2": lone}, True), ({}, False), ({"zero_kl": small}, False)]  # fmt: skip
    heads = tuple(Head("encoder", 0, i, (role,), 0.0, {}, effects) for i, (effects, _) in enumerate(cases))
    causal = {"quantity": "l2", "what": "change", "nothing_below": 0.01}
    found = Findings({}, {}, {"causal": causal}, heads)
    assert [found.does_nothing(head) for head in heads] == [idle for _, idle in cases]
    assert idle_line(found).endswith(": L0H0 (previous token), L0H2 (previous token)")
    assert not any(Findings({}, {}, {}, heads).does_nothing(head) for head in heads)
    twice = (*heads, *(replace(head, kind="cross") for head in heads))
    assert idle_line(Findings({}, {}, {"causal": causal}, twice)).endswith(
        ": encoder L0H0 (previous token), encoder L0H2 (previous token), cross L0H0 (previous token), "
        "cross L0H2 (previous token)"
    )


def test_roles_of_a_table_stand_in_the_order_of_the_record_whichever_is_strongest() -> None:
    roles = [role("local", 0.9), role("previous_token", 0.8), role("a_new_one", 0.7)]
    listed = {name: {"what": "", "measure": name, "threshold": 0.4} for name in ("previous_token", "local")}
    found = Findings({}, {}, {"roles": listed}, (Head("encoder", 0, 0, tuple(roles), 0.2, {}),))
    same = replace(found, heads=(replace(found.heads[0], roles=tuple(roles[::-1])),))
    assert (
        found.head_table().flat()["roles"]
        == same.head_table().flat()["roles"]
        == [["previous_token", "local", "a_new_one"]]
    )
    assert "previous_token+local+a_new_one" in found.to_csv() and "previous_token+local+a_new_one" in same.to_csv()
    assert [one.name for one in found.heads[0].roles] == ["local", "previous_token", "a_new_one"]
