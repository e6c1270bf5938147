"""The result of a study of heads: it saves and loads without loss, and its CSV and JSON are what others can read."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from attnscope.errors import AttnscopeError, UsageError
from attnscope.questions.head_roles import describe_idle_heads, find_idle_heads
from attnscope.results.table import Estimate, Table, number
from tests.conftest import csv_rows
from tests.findings_helpers import NAN, Head, described_findings, fake_findings, head, of, role
from tests.record_helpers import require_lossless


@pytest.mark.parametrize("found", [fake_findings(2, 3, control=True), described_findings(2, 3), of()])
def test_a_result_reads_back_as_it_was(found, tmp_path):
    require_lossless(replace(found, corpus={**found.corpus, "sources": ["caf\udce9.txt"]}), tmp_path)


def test_json_is_strict_and_says_null_for_what_is_undefined(tmp_path):
    estimate = Estimate(1.5, -math.inf, math.inf, NAN, 0.0)
    made = Head("encoder", 2, 5, [role("induction", q=NAN)], NAN, {"entropy_nats": estimate})
    path = of(made, corpus={"mean": NAN, "deep": [{"nan": math.inf}]}).save(tmp_path / "heads.json")

    def refuse(literal):
        raise AssertionError(f"{literal} is not JSON")

    document = json.loads(path.read_text(), parse_constant=refuse)
    assert document["schema"] == "attnscope.heads/2"
    assert document["corpus"] == {"mean": None, "deep": [{"nan": None}]}
    ((row,), (evidence,)) = document["heads"], document["roles"]
    assert row["role"] == "induction"
    assert row["resting_share"] is None
    assert row["entropy_nats"] == 1.5
    assert row["entropy_nats_low"] is None
    assert row["entropy_nats_baseline"] is None
    assert row["entropy_nats_count"] == 0.0
    assert evidence["head"] == 0
    assert evidence["value"] == 0.8
    assert evidence["q"] is None


def test_csv_has_a_row_a_head_and_five_columns_a_measure():
    named = [role("local", 0.7), role('a,b\n"c"')]
    first, second = csv_rows(
        of(
            Head("encoder", 0, 0, named, NAN, {"x": Estimate(0.1, 0, 1, NAN, 3)}),
            Head("encoder", 0, 1, (), 0.5, {"y": Estimate(1 / 3, NAN, NAN, 0.25, 9.0)}),
        ).to_csv()
    )
    assert first["role"] == 'local+a,b\n"c"'
    assert second["role"] == ""
    assert first["role_value"] == "0.7"
    assert first["role_value_low"] == "0.6799999999999999"
    assert second["role_value"] == ""
    assert first["resting_share"] == ""
    assert second["resting_share"] == "0.5"
    parts = ("", "_low", "_high", "_baseline", "_count")
    assert [first[f"x{part}"] for part in parts] == ["0.1", "0.0", "1.0", "", "3.0"]
    assert [second[f"y{part}"] for part in parts] == ["0.3333333333333333", "", "", "0.25", "9.0"]
    assert first["y"] == second["x"] == ""


def test_a_csv_of_described_heads_has_the_twenty_columns_that_people_use_first(tmp_path):
    found = described_findings(1, 2)
    few = csv_rows(found.save(tmp_path / "a.csv").read_text("utf-8"))[0]
    every = csv_rows(found.save(tmp_path / "b.csv", every=True).read_text("utf-8"))[0]
    assert len(few) <= 20 < len(every)
    assert few.keys() < every.keys()


def test_columns_are_arrays_and_grids_have_nan_where_there_is_no_such_head():
    value = {"x": Estimate(2.0, 1.0, 3.0, 0.5, 1.0)}
    found = of(Head("encoder", 0, 2, (), NAN, value), Head("encoder", 1, 0), Head("cross", 4, 0))
    assert found.kinds == ("encoder", "cross")
    np.testing.assert_array_equal(found["heads"]["x"], [2.0, NAN, NAN])
    np.testing.assert_array_equal(found["heads"].interval("x")[0], [2.0, 1.0, 3.0])
    np.testing.assert_array_equal(
        found["heads"].grid("x", "encoder"), [[NAN, NAN, 2.0], [NAN, NAN, NAN]]
    )
    assert found["heads"].grid("x", "decoder").shape == (0, 0)


def test_a_head_is_found_with_the_evidence_for_its_roles():
    found = of(
        head(0, 0, role("rare")), head(0, 1), head(0, 1, role("local"), role("sink"), kind="cross")
    )
    assert found.row(0, 1) == 1
    assert found.row(0, 1, "cross") == 2
    assert found.roles_of(2)["role"].tolist() == ["local", "sink"]
    assert not len(found.roles_of(1))
    with pytest.raises(AttnscopeError, match="no head L7H0"):
        found.row(7, 0)


def test_heads_are_picked_with_all_that_belongs_to_them():
    found = described_findings(2, 3).only([(1, 2), (0, 0)])
    assert found.head_names == ["L0H0", "L1H2"]
    whole = described_findings(2, 3)
    for row, before in enumerate((0, 5)):
        assert found.roles_of(row)["value"].tolist() == whole.roles_of(before)["value"].tolist()
        terms = [
            result["terms"]["words"][result["terms"]["head"] == at]
            for result, at in ((found, row), (whole, before))
        ]
        assert terms[0].tolist() == terms[1].tolist()
    with pytest.raises(UsageError, match="there is no head L9H9 in this record of heads"):
        found.only([(9, 9)])


def test_two_heads_of_one_place_are_refused():
    with pytest.raises(ValueError, match="two of its heads are the same"):
        of(head(0, 1), head(0, 1)).require_whole()


def test_heads_that_do_nothing_are_told_by_the_upper_ends_of_all_ablations():
    small = Estimate(0.005, 0.004, 0.006, count=9.0)
    large = Estimate(0.005, -0.001, 0.011, count=9.0)
    lone = Estimate(0.005, NAN, NAN, count=1.0)
    cases = [
        ((small, small), True),
        ((small, large), False),
        ((lone, lone), True),
        ((None, None), False),
    ]
    effects = Table.of(
        [number("zero_l2"), number("mean_l2")],
        [dict(zip(("zero_l2", "mean_l2"), pair, strict=True)) for pair, _ in cases],
    )
    # With one kind of attention and with two, whose names tell them apart.
    for kinds in (("encoder",), ("encoder", "cross")):
        made = [
            head(0, n, role("previous_token"), kind=kind) for kind in kinds for n in range(len(cases))
        ]
        causal = {"quantity": "l2", "what": "change", "nothing_below": 0.01, "modes": ["zero", "mean"]}
        found = of(*made, options={"causal": causal})
        heads = found["heads"]
        columns = {**heads.columns, **effects.columns}
        values = {**heads.values}
        values |= {name: np.tile(array, len(kinds)) for name, array in effects.values.items()}
        found = replace(found, tables={**found.tables, "heads": Table(columns, values)})
        assert find_idle_heads(found).tolist() == [idle for _, idle in cases] * len(kinds)
        names = [f"{kind} L0H{n}" if len(kinds) > 1 else f"L0H{n}" for kind in kinds for n in (0, 2)]
        assert describe_idle_heads(found).endswith(
            ": " + ", ".join(f"{name} (previous token)" for name in names)
        )
