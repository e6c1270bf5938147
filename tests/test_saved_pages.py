"""The page of a saved record, whose npz the browser reads: each number is the record's."""

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnscope.cli import build_app
from attnscope.results.result import load_record as load
from tests.findings_helpers import described_findings
from tests.heads_helpers import heads_in
from tests.page_helpers import SEEN, Opened
from tests.record_helpers import map_of, record_of, tokens_of
from tests.test_page_access import serious

Show = Callable[[Any], Opened]


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Show]:
    """Opens the page of a record; it must not complain, and ask nobody for anything."""
    shown: list[Opened] = []

    def show(record: Any) -> Opened:
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        shown.append(Opened(page, record.page().save(tmp_path / f"page-{len(shown)}.html")))
        return shown[-1]

    yield show
    for opened in shown:
        assert opened.complaints == []
        assert [url for url in opened.requests if not url.startswith(("blob:", "file:"))] == []
        opened.page.close()


def test_hiding_special_tokens_hides_the_first_token_of_a_decoder(show: Show) -> None:
    tokens = tokens_of(
        ["un", "##able", "##s", "cat", "sat"],
        words=np.array([0, 0, 0, 1, 2], np.int32),
        text="unables cat sat",
        offsets=np.array([[0, 2], [2, 6], [6, 7], [8, 11], [12, 15]], np.int32),
    )
    whole = record_of(map_of(tokens, kind="decoder", layers=2, heads=3, seed=3))
    shown = show(whole)
    for words in (0, 1):
        shown.show(v="matrix", h="1.2", hide=1, words=words)
        assert shown.text(".controls .tick >> nth=0") == "hide first token"
        record = whole.hide_special()
        record = record.merge_words() if words else record
        assert tuple(shown.table()[0][1:]) == record.tokens
        np.testing.assert_allclose(shown.matrix(), record.of(1, 2), atol=SEEN)
        shown.show(v="matrix", h="1.2", hide=0, words=words)
        np.testing.assert_allclose(shown.matrix(), (whole.merge_words() if words else whole).of(1, 2), atol=SEEN)


def test_a_pooled_map_has_a_cell_for_so_many_tokens(show: Show, made: Path) -> None:
    record = load(made / "pooled.npz")
    opened = show(record)
    opened.show(v="matrix", h="0.1")
    np.testing.assert_allclose(opened.matrix(), record.maps[0].cells[0, 1], atol=5.1e-5)


def test_heads_have_their_table_and_scatter(show: Show) -> None:
    findings = described_findings()
    opened = show(findings)
    opened.settle("atlas")
    views = opened.page.eval_on_selector_all("[data-view]", "all => all.map(e => e.dataset.view)")
    assert views == ["atlas", "head"]
    rows = list(csv.DictReader(io.StringIO(opened.saved("csv").decode())))
    assert [row["description"] for row in rows] == findings["heads"]["description"].tolist()
    for row, head in zip(rows, heads_in(findings), strict=True):
        assert row["roles"] == "+".join(role.name for role in head.roles)
        for name, estimate in head.measures.items():
            assert float(row[name]) == pytest.approx(estimate.value, rel=1e-6), name
    opened.page.keyboard.press("2")
    opened.page.wait_for_selector(".view.head[data-shown]")
    assert opened.page.locator(".showcase").is_hidden()


COMMANDS = {
    "relations": ["relations", "sample_texts/dependencies.conllu"],
    "ablation": ["ablate", "Time flies."],
    "compare": ["compare", "--file", "sample_texts/sentences.txt"],
}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What three commands write of the model whose heads are known."""
    folder = tmp_path_factory.mktemp("records")
    for name, asked in COMMANDS.items():
        build_app()([*asked, "-m", "own", "-f", "npz,json", "-o", str(folder / name), "-q"], standalone_mode=False)
    return folder


def test_a_comparison_of_texts_is_the_two_texts(show: Show, tmp_path: Path) -> None:
    asked = ["compare", "-m", "own", "Time flies.", "--with", "Time crawls.", "-f", "npz", "-o", str(tmp_path), "-q"]
    build_app()(asked, standalone_mode=False)
    opened = show(load(tmp_path / "compare.npz"))
    opened.settle("grid")
    held = np.load(tmp_path / "compare.npz")
    for number, name in enumerate(("weights:first", "weights:second")):
        opened.show(v="matrix", t=number, h="1.2")
        np.testing.assert_allclose(opened.matrix(), held[name][9], atol=5.1e-5)


@pytest.mark.parametrize("name", ["relations", "ablation", "compare"])
def test_records_about_heads_are_tables_of_heads(show: Show, records: Path, name: str) -> None:
    opened = show(load(records / name / f"{name}.npz"))
    opened.settle("atlas" if name == "ablation" else "numbers")
    opened.show(v="atlas")
    rows = list(csv.DictReader(io.StringIO(opened.saved("csv").decode())))
    told = json.loads((records / name / f"{name}.json").read_text("utf-8"))
    assert len(rows) == 14
    for row in rows:
        layer, head = int(row["layer"]), int(row["head"])
        if name == "ablation":
            one = next(one for one in told["heads"] if (one["layer"], one["head"]) == (layer, head))
            assert float(row["zero_l2"]) == pytest.approx(one["zero_l2"], rel=1e-6)
        elif name == "relations":
            place = next(
                place for place, one in enumerate(told["heads"]) if (one["layer"], one["head"]) == (layer, head)
            )
            for relation, accuracy in zip(told["relations"], told["accuracy"], strict=True):
                value = accuracy[place]
                shown = row[relation["relation"].replace(":", "_")]
                assert (float(shown) if shown else None) == pytest.approx(value, rel=1e-6)
        else:
            number = [(one["layer"], one["head"]) for one in told["heads"]].index((layer, head))
            others = np.delete(told["distance:hellinger"][number], number)
            assert float(row["nearest_distance"]) == pytest.approx(others.min())


def named(label: str) -> str:
    """A relation as the page calls it."""
    return label.replace("_", " ")


def test_relations_have_a_grid_of_relations_and_heads(show: Show, records: Path) -> None:
    opened = show(load(records / "relations" / "relations.npz"))
    opened.settle("numbers")
    document = json.loads((records / "relations" / "relations.json").read_text("utf-8"))
    told = document["relations"]
    table = opened.table()
    assert [row[0] for row in table[1:]] == [named(one["relation"]) for one in told]
    for row, accuracy in zip(table[1:], document["accuracy"], strict=True):
        shown = [float(x) if x else None for x in row[1:]]
        assert shown == pytest.approx(accuracy, rel=1e-6, nan_ok=True)
    at = next(at for at, one in enumerate(told) if one["n_scored"] > 5)
    opened.hover(at, 9)
    value, low, high = (document[name][at][9] for name in ("accuracy", "accuracy_low", "accuracy_high"))
    said = opened.text("#readout")
    assert said.startswith(f"L1H2 {named(told[at]['relation'])} {value:.2f} [{low:.2f}, {high:.2f}]"), said
    assert f"{told[at]['n_scored']} links scored" in said
    left, _, cell, _, _, box = opened.place()
    opened.page.mouse.click(box["x"] + left / 2, box["y"] + float(opened.place()[1]) + (at + 0.5) * cell)
    opened.until("location.hash.includes('o=-')")
    first = [float(x or -1) for x in opened.table()[1 + at][1:]]
    assert first == sorted(first, reverse=True), "a click on its name sorts heads by it"
    opened.hover(at, 0, click=True)
    opened.settle("head")
    assert opened.page.locator(".view.head").is_visible()


def test_a_comparison_has_a_grid_of_layers_and_heads(show: Show, records: Path) -> None:
    opened = show(load(records / "compare" / "compare.npz"))
    opened.settle("numbers")
    held = np.load(records / "compare" / "compare.npz")
    mine = held["distance:hellinger"][8]
    other = int(np.argmin(np.where(np.arange(14) == 8, np.inf, mine)))
    opened.show(v="numbers", head="L1H0")
    opened.page.locator(".numbers .heat canvas").last.press("ArrowRight")
    opened.until("location.hash.includes('L1H1')")
    assert float(opened.table()[2][2]) == pytest.approx(mine[other], rel=1e-6)
    low, high = (held[f"distance_{end}:hellinger"][8, other] for end in ("low", "high"))
    assert f"[{low:.2f}, {high:.2f}]" in opened.text("#readout")
    opened.page.locator(".numbers .heat canvas").last.press("Enter")
    opened.settle("head")


@pytest.mark.parametrize(("name", "scheme", "width"), [("relations", "light", 1280), ("compare", "dark", 390)])
def test_grids_are_for_all(browser: Any, records: Path, name: str, scheme: str, width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme, bypass_csp=True)
    opened = Opened(context.new_page(), load(records / name / f"{name}.npz").page().save(records / f"{name}.html"))
    opened.settle("numbers")
    assert serious(opened) == []
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.complaints == []
    context.close()
