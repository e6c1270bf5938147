"""A result of any question: tables, arrays along them, files, and damage that is refused."""

from typing import Any, ClassVar

import numpy as np
import pytest

from attnscope.errors import AttnscopeError, UsageError
from attnscope.questions import ablate
from attnscope.report.blocks import Report, rank_heads
from attnscope.results import kinds
from attnscope.results.kinds import ResultKind
from attnscope.results.result import Result
from attnscope.results.table import HEADS, Array, Table, count, number, share, text


class Effects(Result):
    SCHEMA: ClassVar[str] = "attnscope.effects/1"
    TABLES: ClassVar[Any] = {
        "heads": (*HEADS, number("effect", "what changes", "nats", label="KL_1")),
        "pairs": (text("name"), count("head", refers_to="heads")),
        "tokens": (text("token"),),
    }
    ARRAYS: ClassVar[Any] = (
        Array("shares", "of each pair", "share", (0, 1), axes=("heads", "pairs")),
        Array("weights", axes=("heads", "tokens")),
    )

    def report(self):
        return Report("m", [], [rank_heads(self, ["effect"], [1, 0], n_printed=1)])


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    kind = ResultKind("effects", "record of effects", "questions.ablate:Effects")
    monkeypatch.setattr(ablate, "Effects", Effects, raising=False)
    monkeypatch.setitem(kinds.KINDS, "effects", kind)


def effects():
    heads = Table.of(
        Effects.TABLES["heads"],
        [
            {"kind": "encoder", "layer": 0, "head": 0, "effect": 0.5},
            {"kind": "encoder", "layer": 0, "head": 1},
        ],
    )
    pairs = Table.of_arrays(Effects.TABLES["pairs"], name=["=1+1", "b", "c"], head=[1, 0, -1])
    tables = {
        "heads": heads,
        "pairs": pairs,
        "tokens:cross": Table.of(Effects.TABLES["tokens"], [{"token": "a"}]),
    }
    arrays = {
        "shares": np.array([[0, 0.5, 1], [np.nan, 0.1, 0.2]]),
        "weights:cross": np.array([[1.0], [0.5]]),
    }
    return Effects({"model": "m"}, {"n_texts": 2}, {"loss": "kl"}, tables, arrays)


def change(result, **changes):
    """The same with other values of columns, by "table/column", and of arrays."""
    held = {**result.arrays(), **changes}
    return Effects.rebuild(result.describe(), held)


def test_a_saved_result_is_the_same_when_it_is_loaded(tmp_path):
    result = effects()
    loaded = Effects.load(result.save(tmp_path / "effects.npz"))
    assert loaded.run == result.run
    assert loaded.corpus == result.corpus
    assert loaded.options == result.options
    assert loaded["heads"].columns == result["heads"].columns
    assert loaded.arrays().keys() == result.arrays().keys()
    for name, values in result.arrays().items():
        np.testing.assert_array_equal(loaded.arrays()[name], values)


def test_a_result_gives_tables_and_arrays_by_name():
    result = effects()
    np.testing.assert_array_equal(result["heads"]["effect"], [0.5, np.nan])
    assert result["shares"].shape == (2, 3)
    assert result.head_names == ["L0H0", "L0H1"]
    np.testing.assert_array_equal(result["heads"].grid("effect", "encoder"), [[0.5, np.nan]])


def test_csv_holds_the_first_table_and_json_all():
    result = effects()
    assert result.to_csv() == "kind,layer,head,effect\nencoder,0,0,0.5\nencoder,0,1,\n"
    assert (
        result.to_table("md", columns=["effect", "layer"])
        == "| KL_1 | layer |\n| --: | --: |\n|  | 0 |\n"
    )
    assert result.to_table("latex", columns=["kind", "effect"], every=True).splitlines()[1:5] == [
        r"\toprule",
        r"kind & KL\_1 \\",
        r"\midrule",
        r"encoder & 0.5 \\",
    ]
    with pytest.raises(UsageError, match="no column 'x'.*choose from kind, layer, head, effect"):
        result.to_csv(columns=["x"])
    document = result.as_json()
    assert document["heads"][1] == {"kind": "encoder", "layer": 0, "head": 1, "effect": None}
    assert document["shares"][1] == [None, 0.1, 0.2]


def test_an_interval_stands_beside_its_column():
    class Estimate:
        value = 0.5
        low = 0.25
        high = 0.75

    table = Table.of((share("accuracy"),), [{"accuracy": Estimate()}, {"accuracy": None}])
    np.testing.assert_array_equal(table.interval("accuracy")[0], [0.5, 0.25, 0.75])
    assert np.isnan(table.interval("accuracy")[1]).all()


def test_a_selection_keeps_arrays_and_references_in_step():
    result = effects().select("heads", [1])
    result.require_whole()
    assert result.head_names == ["L0H1"]
    assert result["pairs"]["head"].tolist() == [0, -1, -1]
    np.testing.assert_array_equal(result["shares"], [[np.nan, 0.1, 0.2]])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"heads/effect": np.zeros(1)}, "shape"),
        ({"heads/layer": np.array([0, -2])}, "not between"),
        ({"heads/head": np.array([0, 0])}, "the same"),
        ({"heads/effect": np.array(["a", "b"])}, "array of <U1"),
        ({"heads/other": np.zeros(2)}, "not declared"),
        ({"pairs/head": np.array([0, 0, 2])}, "not between"),
        ({"shares": np.zeros((2, 2))}, "does not fit"),
        ({"shares": np.full((2, 3), 1.5)}, "not between"),
        ({"weights:cross": np.zeros((2, 2))}, "does not fit"),
        ({"unknown": np.zeros(2)}, "not declared"),
    ],
)
def test_damage_is_refused(tmp_path, changes, says):
    path = change(effects(), **changes).save(tmp_path / "effects.npz")
    with pytest.raises(AttnscopeError, match=says):
        Effects.load(path)
