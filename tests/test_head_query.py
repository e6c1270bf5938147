"""Conditions on heads: a small language that is parsed, never run."""

from dataclasses import replace
from pathlib import Path

import pytest

from attnscope.errors import UsageError
from attnscope.records.heads.descriptions import Descriptions, HeadDescription, Term
from attnscope.records.heads.findings import Findings
from attnscope.records.heads.query import HeadQuery, choose
from tests.atlas_page_helpers import ATLAS, CONDITIONS
from tests.conftest import Run
from tests.findings_helpers import fake_findings as make_findings


@pytest.fixture
def found() -> Findings:
    return make_findings(3, 4)


def described(found: Findings) -> Findings:
    """The same with descriptions: each head explains a tenth more than the one before."""
    term = Term("near", "near tokens", 1.0, 0.5, 0.1, 0.3)
    heads = tuple(
        HeadDescription(head.kind, head.layer, head.head, (term,), 1.0, 0.1 * n, 0.0, 1.0, 0.5)
        for n, head in enumerate(found.heads)
    )
    return replace(found, descriptions=Descriptions(heads, 4, 20, 2))


def names(found: Findings, where: str) -> list[str]:
    return [found.heads[at].name for at in HeadQuery(where).select(found.head_table())]


def test_numbers_are_compared(found: Findings) -> None:
    every = [head.name for head in found.heads]
    assert names(found, "layer >= 0") == every
    assert names(found, "layer == 0") == [head.name for head in found.heads if head.layer == 0]
    assert names(found, "layer < 1 & head > 0 || layer > 1000") == names(
        found, "layer < 1 and head > 0 or layer > 1000"
    )
    assert names(found, "not layer == 0") == [head.name for head in found.heads if head.layer]
    assert names(found, "0 <= head < 1 and layer < 1 or layer > 1000") == [
        head.name for head in found.heads if not head.head and not head.layer
    ]
    assert names(found, "2 * head - layer / 2 > -layer + 1") == [
        head.name for head in found.heads if 2 * head.head - head.layer / 2 > -head.layer + 1
    ]
    assert names(found, "layer / 0 > 0") == []


def test_measures_and_roles_are_names(found: Findings) -> None:
    measure = found.measure_names[0]
    values = {head.name: head.measures[measure].value for head in found.heads}
    middle = sorted(values.values())[len(values) // 2]
    assert names(found, f"{measure} > {middle!r}") == [name for name, value in values.items() if value > middle]
    assert names(found, "unclassified") == [head.name for head in found.heads if not head.roles]
    role = next(head.roles[0].name for head in found.heads if head.roles)
    named = f"is_{role}" if role in found.measure_names else role
    assert names(found, named) == [h.name for h in found.heads if any(one.name == role for one in h.roles)]


def test_what_is_not_known_fulfils_nothing(found: Findings) -> None:
    known = described(found)
    assert known.descriptions is not None
    first = replace(known.descriptions.heads[0], explained=float("nan"))
    known = replace(known, descriptions=replace(known.descriptions, heads=(first, *known.descriptions.heads[1:])))
    for condition in ("explained > -9", "explained != 3", "explained"):
        assert found.heads[0].name not in names(known, condition)
    assert names(known, "explained > 0.05") == [head.name for head in found.heads[1:]]


@pytest.mark.parametrize(
    "condition",
    [
        "", "layer >", "__import__('os') > 1", "layer.real > 1", "layer[0] > 1", "lambda: 1", "'a' < layer",
        '"a" < layer', "layer ** 9", "[layer] > 1", "layer := 3", "1j < layer", "(layer > 1", "layer > 1)", '"open',
        "& layer > 1", "it ->", "zebra:local", "(" * 500 + "1" + ")" * 500,
    ],
)  # fmt: skip
def test_all_else_is_refused_before_anything_runs(condition: str) -> None:
    with pytest.raises(UsageError, match="condition"):
        HeadQuery(condition)


@pytest.mark.parametrize("condition", ["__import__('os')", "layer.real", "layer[0]", "f(layer)"])
def test_what_looks_like_python_is_words_that_no_head_has(found: Findings, condition: str) -> None:
    assert names(found, condition) == []


@pytest.mark.parametrize(("condition", "heads"), CONDITIONS)
def test_the_grammar_of_the_filter_box(condition: str, heads: list[str]) -> None:
    assert [head.name for head in choose(ATLAS, condition)] == heads


def test_a_misspelt_role_is_refused_and_quotes_search_for_it(found: Findings) -> None:
    with pytest.raises(UsageError, match="there is no 'unclassifed'") as error:
        names(found, "unclassifed")
    assert "did you mean unclassified?" in error.value.hint and "double quotes" in error.value.hint
    assert names(found, '"unclassifed"') == []


def test_one_sign_of_equality_is_enough(found: Findings) -> None:
    assert choose(found, "layer=1 and head != 0") == choose(found, "layer == 1 and head!=0")
    assert choose(found, "layer = 1 or layer>=2") == choose(found, "layer == 1 or layer >= 2")


def test_a_name_that_there_is_not_is_said(found: Findings) -> None:
    with pytest.raises(UsageError, match="there is no 'laier'") as error:
        choose(found, "laier > 1")
    assert "layer" in error.value.hint
    with pytest.raises(UsageError, match="there is no 'explained'"):
        choose(found, "explained > 1")


def test_heads_come_in_the_order_that_is_asked_for(found: Findings) -> None:
    known = described(found)
    assert [head.name for head in choose(known, sort="explained")] == [head.name for head in found.heads][::-1]
    assert choose(known, sort="layer") == list(found.heads)
    with pytest.raises(UsageError, match="there is no order"):
        choose(known, sort="size")


@pytest.mark.parametrize("more", [("a b",), ("--file", "nothing.txt", "--no-describe"), ("--image", "nothing.png")])
def test_a_name_that_there_is_not_is_said_before_a_model_is_loaded(run: Run, more: tuple[str, ...]) -> None:
    status, out, err = run("heads", *more, "-m", "no/such-model", "--where", "entropi_nats > 0.4 or reach > 2")
    assert (status, out) == (2, "")
    assert err.startswith("error: there is no 'entropi_nats' to choose heads by\nhint: ")


def test_a_number_of_descriptions_is_refused_without_them(run: Run) -> None:
    status, _, err = run("heads", "--file", "nothing.txt", "--no-describe", "--where", "from_both > 0.5")
    assert status == 2
    assert (
        err
        == "error: from_both is a number of descriptions, and these heads have none\nhint: leave out --no-describe\n"
    )


def test_a_name_that_a_record_has_not_is_said_before_figures_are_drawn(
    run: Run, found: Findings, tmp_path: Path
) -> None:
    found.save(tmp_path / "heads.npz")
    status, out, err = run("show", tmp_path, "--where", "induktion > 0.4", "-o", tmp_path / "drawn")
    assert (status, out) == (2, "") and "did you mean induction?" in err
    assert not (tmp_path / "drawn").exists()
