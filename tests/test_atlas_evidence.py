"""What records of relations, ablations, circuits and needles add to an atlas of the same model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnscope.errors import AttnscopeError
from attnscope.records.ablation import Ablation
from attnscope.records.atlas.evidence import STRONGEST, with_records
from attnscope.records.atlas.record import Atlas
from attnscope.records.circuits import COMPOSITIONS, Circuits, Score
from attnscope.records.relations.record import Relation, Relations
from attnscope.views.page.atlas import page_of_atlas
from tests.atlas_page_helpers import OpenedAtlas
from tests.conftest import Run
from tests.needle_helpers import planted_findings

RECORDS = Path(__file__).parent / "records"
PLAIN = Atlas.load(RECORDS / "atlas.npz")
ABLATION = Ablation.load(RECORDS / "ablation.npz")


def express(relation: Relation) -> Relation:
    """The same relation, which some heads express: one of them with too little weight to be its role."""
    found, mass = np.zeros_like(relation.found), np.full_like(relation.mass, 0.5)
    found[0, 1] = found[1, 5] = found[0, 3] = True
    mass[0, 3] = 0.01
    low = relation.accuracy - 0.1
    return replace(relation, found=found, mass=mass, low=low, high=low + 0.2, p=mass / 100, q=mass / 50)


_made = Relations.load(RECORDS / "relations.npz")
RELATIONS = replace(_made, relations=tuple(express(one) if "nsubj" in one.name else one for one in _made.relations))
_weights = Circuits.load(RECORDS / "circuits.npz")
CIRCUITS = replace(
    _weights,
    heads=tuple(replace(one, copying=Score(at / 10, 0, -1, 1)) for at, one in enumerate(_weights.heads)),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("beside")
    return [one.save(folder / one.record_kind().file("npz")) for one in (RELATIONS, CIRCUITS, ABLATION)]


@pytest.fixture(scope="module")
def told(files: list[Path]) -> Atlas:
    return with_records(PLAIN, files)


def test_numbers_of_heads_are_those_of_the_records(told: Atlas, tmp_path: Path) -> None:
    by_place = {(head.layer, head.head): head for head in told.heads}
    for one in RELATIONS.relations:
        name = "relation_" + one.name.replace("→", "_")
        assert one.found.any() == (name in told.options["measures"])
        for (layer, head), expressed in np.ndenumerate(one.found & (one.mass >= 0.1)):
            assert (one.name in {role.name for role in by_place[layer, head].roles}) == expressed
            if one.found.any():
                assert by_place[layer, head].measures[name].value == one.accuracy[layer, head]
    for head in ABLATION.heads:
        for name in ABLATION.names:
            assert by_place[head.layer, head.head].measures[name].value == head.effects[name].value
            assert told.options["measures"][name]["what"] == ABLATION.facts(name).what
    for number, head in enumerate(CIRCUITS.heads):
        assert by_place[head.layer, head.head].measures["copying"].value == head.copying.value
        for which, by in enumerate(COMPOSITIONS):
            for side, excess in (
                ("sent", CIRCUITS.excess[which, number]),
                ("received", CIRCUITS.excess[which, :, number]),
            ):
                mine = by_place[head.layer, head.head].measures[f"{by.lower()}_composition_{side}"].value
                if np.isfinite(excess).any():
                    assert mine == pytest.approx(float(np.nanmax(excess)))
                else:
                    assert np.isnan(mine)
    again = Atlas.load(told.save(tmp_path / "atlas.npz"))
    assert repr(again.as_json()) == repr(told.as_json())
    assert told.to_csv().splitlines()[0].count("copying_low") == 1


def test_partners_are_the_strongest_both_ways(told: Atlas) -> None:
    names = [head.name for head in told.heads]
    assert names == [head.name for head in CIRCUITS.heads]
    for which, by in enumerate(COMPOSITIONS):
        for number in range(len(names)):
            received = {one.sender: one for one in told.compositions if one.by == by and one.receiver == number}
            excess = np.nan_to_num(CIRCUITS.excess[which, :, number], nan=-np.inf)
            best = [at for at in np.argsort(-excess, kind="stable")[:STRONGEST] if np.isfinite(excess[at])]
            assert {int(at) for at in best} <= {*received}
            for sender, one in received.items():
                assert one.share == CIRCUITS.composition[which, sender, number]
                assert one.share - one.expected == pytest.approx(excess[sender])


def test_what_was_told_twice_is_told_once(told: Atlas, files: list[Path]) -> None:
    twice = with_records(told, files)
    assert repr(twice.as_json()) == repr(told.as_json())


def test_a_record_of_another_model_is_refused(tmp_path: Path) -> None:
    other = replace(CIRCUITS, run={**CIRCUITS.run, "model": "other", "sha256": "0" * 64}).save(tmp_path / "other.npz")
    with pytest.raises(AttnscopeError, match=r"other\.npz is of another model than the atlas: other, not own"):
        with_records(PLAIN, [other])
    with pytest.raises(AttnscopeError, match="another model"):
        with_records(replace(PLAIN, run={"model": "own"}), [RECORDS / "relations.npz"])
    with pytest.raises(AttnscopeError, match=r"heads\.npz is a record of heads, which --with does not take"):
        with_records(PLAIN, [RECORDS / "heads.npz"])


def test_scores_on_needles_are_measures_of_heads(tmp_path: Path) -> None:
    found = planted_findings()
    heads = tuple(replace(head, kind=PLAIN.heads[0].kind) for head in found.heads)
    path = replace(found, heads=heads, run={**found.run, "sha256": PLAIN.run["sha256"]}).save(tmp_path / "needles.npz")
    told = with_records(PLAIN, [path])
    assert told.options["measures"]["retrieval"]["of"] == "needles"
    scores = {head.name: head.measures["retrieval"].value for head in told.heads if "retrieval" in head.measures}
    shown = {head.name for head in PLAIN.heads}
    assert scores == {head.name: head.measures["retrieval"].value for head in heads if head.name in shown}
    assert scores["L1H0"] == 1


def test_the_commands_take_records(run: Run, tmp_path: Path, files: list[Path]) -> None:
    beside = [part for path in files for part in ("--with", str(path))]
    status, _, err = run("show", RECORDS / "atlas.npz", *beside, "-o", "a.html", "-f", "html,npz")
    assert status == 0, err
    shown = Atlas.load(tmp_path / "a.npz")
    assert shown.compositions
    assert run("show", RECORDS / "heads.npz", *beside)[0] == 2
    (tmp_path / "texts.txt").write_text("the cat sat\na dog ran", "utf-8")
    status, _, err = run("atlas", "--file", "texts.txt", "-m", "own", *beside, "-o", "b", "-f", "npz")
    assert status == 0 and Atlas.load(tmp_path / "b" / "atlas.npz").compositions == shown.compositions, err
    status, _, err = run("atlas", "--file", "texts.txt", "-m", "own", "--with", "texts.txt", "-o", "c")
    assert status == 1 and "texts.txt" in err


def test_the_card_shows_relations_effects_and_partners(open_page: Callable[..., Any], told: Atlas) -> None:
    # By chance no pair of these composes above random directions: every other one is made to, the rest are not shown.
    raised = [replace(one, share=one.expected + 0.01 * (n + 1)) for n, one in enumerate(told.compositions[::2])]
    told = replace(told, compositions=(*raised, *told.compositions[1::2]))
    opened = open_page(page_of_atlas(told), OpenedAtlas, height=900)
    names = [head.name for head in told.heads]
    at, head = next((at, one) for at, one in enumerate(told.heads) if any("→" in role.name for role in one.roles))
    opened.go(names[at])
    said = opened.text(".evidence")
    assert "Relations that it expresses" in said
    for facts in told.options["measures"].values():
        if facts.get("of") == "relations":
            assert (f"accuracy on {facts['relation']}" in said) == (
                facts["relation"] in {role.name for role in head.roles}
            )
    receiver = raised[0].receiver
    opened.go(names[receiver])
    mine = sorted(
        (one for one in told.compositions if one.receiver == receiver), key=lambda one: one.expected - one.share
    )
    first = opened.page.locator(".evidence [data-partner]").first
    assert first.inner_text().split()[:2] == [names[mine[0].sender], mine[0].by]
    first.click()
    opened.page.wait_for_selector(f".view.head[data-shown='{names[mine[0].sender]}']")
    lacking = next(name for name, one in zip(names, told.heads, strict=True) if "zero_l2" in one.measures)
    opened.go(lacking)
    said = opened.text(".evidence")
    assert "What changes without it" in said and "zero ablation: change of the last layer's hidden states" in said
    assert "by, share" not in said and "+\u2212" not in said
    opened.go(ax="k_composition_sent", ay="v_composition_received")
