"""The viewer: an empty page that shows what is dropped on it, read in the browser; and what it says of damage."""

import csv
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnscope.cli import app
from attnscope.records import Heatmap
from attnscope.records import load_record as load
from attnscope.views.page import empty_page
from tests.atlas_helpers import small_atlas
from tests.findings_helpers import described_findings
from tests.page_helpers import SEEN, Opened
from tests.record_helpers import map_of, record_of, simple, tokens_of
from tests.test_page_access import serious


class OpenedViewer(Opened):
    """The viewer, in which files are opened."""

    def open(self, file: Path) -> None:
        """Chooses a file."""
        self.page.evaluate("document.querySelectorAll('[data-shown]').forEach(e => delete e.dataset.shown)")
        self.page.set_input_files("#file", file)

    def shown(self) -> list[str]:
        """The views there are."""
        names: list[str] = self.page.eval_on_selector_all("[data-view]", "all => all.map(e => e.dataset.view)")
        return names

    def says(self) -> str:
        """What it says of a file that it cannot show."""
        self.until("[...document.querySelectorAll('[role=alert]')].some(e => e.textContent)")
        return self.text("[role=alert]")


@pytest.fixture
def viewer(browser: Any, tmp_path: Path) -> Iterator[OpenedViewer]:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    opened = OpenedViewer(page, empty_page().save(tmp_path / "viewer.html"))
    yield opened
    assert opened.complaints == []
    assert [url for url in opened.requests if not url.startswith(("blob:", "file:"))] == []
    page.close()


TOKENS = tokens_of(
    ["[CLS]", "un", "##able", "cat", "[SEP]"], (0, 4), words=np.array([-1, 0, 0, 1, -1], np.int32), text="unable cat",
    offsets=np.array([[-1, -1], [0, 2], [2, 6], [7, 10], [-1, -1]], np.int32),
)  # fmt: skip
HEATMAP = record_of(map_of(TOKENS, layers=2, heads=3, seed=1))


@pytest.mark.parametrize("ending", ["npz", "json"])
def test_attention_is_as_the_record_has_it(viewer: OpenedViewer, tmp_path: Path, ending: str) -> None:
    viewer.open(HEATMAP.save(tmp_path / f"weights.{ending}"))
    viewer.settle("grid")
    for hide, words in product((0, 1), repeat=2):
        record = HEATMAP.hide_special() if hide else HEATMAP
        record = record.merge_words() if words else record
        viewer.show(v="matrix", h="1.2", hide=hide, words=words)
        assert tuple(viewer.table()[0][1:]) == record.tokens
        np.testing.assert_allclose(viewer.matrix(), record.of(1, 2), atol=5.1e-5)


@pytest.mark.parametrize("saved", ["a record", "a page"])
def test_hiding_special_tokens_hides_the_first_token_of_a_decoder(
    viewer: OpenedViewer, open_page: Callable[..., Any], tmp_path: Path, saved: str
) -> None:
    tokens = tokens_of(
        ["un", "##able", "##s", "cat", "sat"], words=np.array([0, 0, 0, 1, 2], np.int32), text="unables cat sat",
        offsets=np.array([[0, 2], [2, 6], [6, 7], [8, 11], [12, 15]], np.int32),
    )  # fmt: skip
    whole = record_of(map_of(tokens, kind="decoder", layers=2, heads=3, seed=3))
    if saved == "a record":
        shown: Any = viewer
        viewer.open(whole.save(tmp_path / "weights.npz"))
        viewer.settle("grid")
    else:
        shown = open_page(whole.page())
    for words in (0, 1):
        shown.show(v="matrix", h="1.2", hide=1, words=words)
        assert shown.text(".controls .tick >> nth=0") == "hide first token"
        record = whole.hide_special()
        record = record.merge_words() if words else record
        assert tuple(shown.table()[0][1:]) == record.tokens
        np.testing.assert_allclose(shown.matrix(), record.of(1, 2), atol=SEEN)
        shown.show(v="matrix", h="1.2", hide=0, words=words)
        np.testing.assert_allclose(shown.matrix(), (whole.merge_words() if words else whole).of(1, 2), atol=SEEN)


def test_an_encoder_decoder_has_its_maps(viewer: OpenedViewer, tmp_path: Path) -> None:
    here, there = tokens_of(["<pad>", "das", "Haus"], (0,)), tokens_of(["the", "house"])
    record: Heatmap = record_of(
        map_of(there, kind="encoder", seed=4), map_of(here, kind="decoder", seed=5),
        map_of(here, there, kind="cross", seed=6),
    )  # fmt: skip
    viewer.open(record.save(tmp_path / "both.npz"))
    viewer.settle("grid")
    for number, attention in enumerate(record.maps):
        viewer.show(v="matrix", m=number, h="0.1")
        np.testing.assert_allclose(viewer.matrix(), attention.of(0, 1), atol=5.1e-5)


def test_bare_arrays(viewer: OpenedViewer, tmp_path: Path) -> None:
    weights = np.random.default_rng(0).dirichlet(np.ones(3), (2, 2, 3)).astype(np.float16)
    np.savez_compressed(tmp_path / "theirs.npz", weights=weights, tokens=["the", "été", "猫"])
    viewer.open(tmp_path / "theirs.npz")
    viewer.settle("grid")
    viewer.show(v="matrix", h="1.0")
    np.testing.assert_allclose(viewer.matrix(), weights[1, 0].astype(float), atol=5.1e-5)
    assert viewer.table()[0][1:] == ["the", "été", "猫"]


@pytest.mark.parametrize("ending", ["npz", "json"])
def test_heads_have_their_table_and_scatter(viewer: OpenedViewer, tmp_path: Path, ending: str) -> None:
    findings = described_findings()
    viewer.open(findings.save(tmp_path / f"heads.{ending}"))
    viewer.settle("atlas")
    assert viewer.shown() == ["atlas", "head"]
    rows = list(csv.DictReader(io.StringIO(viewer.saved("csv").decode())))
    assert findings.descriptions is not None
    for row, head, one in zip(rows, findings.heads, findings.descriptions.heads, strict=True):
        assert row["roles"] == "+".join(role.name for role in head.roles)
        assert row["description"] == one.words
        for name, estimate in head.measures.items():
            assert float(row[name]) == estimate.value, name
    viewer.page.keyboard.press("2")
    viewer.page.wait_for_selector(".view.head[data-shown]")
    assert viewer.page.locator(".showcase").is_hidden()


def test_an_atlas_is_the_same_as_its_own_page(viewer: OpenedViewer, tmp_path: Path, browser: Any) -> None:
    atlas = replace(small_atlas(), descriptions=described_findings(2, 3).descriptions)
    viewer.open(atlas.save(tmp_path / "atlas.npz"))
    viewer.settle("atlas")
    page = Opened(browser.new_page(viewport={"width": 1280, "height": 800}), atlas_page(atlas, tmp_path))
    for state in ({"v": "head", "head": "L1H2"}, {"v": "head", "head": "L0H1", "tab": "decile", "ex": 5, "q": 4}):
        for opened in (viewer, page):
            opened.show(**state)
        assert viewer.text("#stage") == page.text("#stage")
    viewer.show(v="matrix", head="L0H1", ex=2)
    example = next(one for one in atlas.examples() if one.facts.head == 1 and one.facts.rank == 2)
    np.testing.assert_allclose(viewer.matrix(), example.weights(), atol=5.1e-5)
    page.page.close()


def atlas_page(atlas: Any, folder: Path) -> Path:
    from attnscope.views.page.atlas import page_of_atlas

    return page_of_atlas(atlas).save(folder / "atlas.html")


COMMANDS = {
    "relations": ["relations", "sample_texts/dependencies.conllu"],
    "ablation": ["ablate", "Time flies.", "--importance"],
    "compare": ["compare", "--file", "sample_texts/sentences.txt"],
}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What three commands write of the model whose heads are known."""
    folder = tmp_path_factory.mktemp("records")
    for name, asked in COMMANDS.items():
        app([*asked, "-m", "own", "-f", "npz,json", "-o", str(folder / name), "-q"], standalone_mode=False)
    return folder


def test_a_comparison_of_texts_is_the_two_texts(viewer: OpenedViewer, tmp_path: Path) -> None:
    asked = ["compare", "-m", "own", "Time flies.", "--with", "Time crawls.", "-f", "npz", "-o", str(tmp_path), "-q"]
    app(asked, standalone_mode=False)
    viewer.open(tmp_path / "compare.npz")
    viewer.settle("grid")
    held = np.load(tmp_path / "compare.npz")
    for number, name in enumerate(("weights", "other_weights")):
        viewer.show(v="matrix", t=number, h="1.2")
        np.testing.assert_allclose(viewer.matrix(), held[name][9], atol=5.1e-5)


@pytest.mark.parametrize(
    ("name", "ending"), [("relations", "npz"), ("ablation", "npz"), ("compare", "npz"), ("compare", "json")]
)
def test_records_about_heads_are_tables_of_heads(viewer: OpenedViewer, records: Path, name: str, ending: str) -> None:
    viewer.open(records / name / f"{name}.{ending}")
    viewer.settle("atlas" if name == "ablation" else "numbers")
    viewer.show(v="atlas")
    rows = list(csv.DictReader(io.StringIO(viewer.saved("csv").decode())))
    told = json.loads((records / name / f"{name}.json").read_text("utf-8"))
    assert len(rows) == 14
    for row in rows:
        layer, head = int(row["layer"]), int(row["head"])
        if name == "ablation":
            one = next(one for one in told["heads"] if (one["layer"], one["head"]) == (layer, head))
            assert float(row["zero_l2"]) == one["effects"]["zero_l2"]["value"]
        elif name == "relations":
            for relation in told["relations"]:
                value = relation["accuracy"][layer][head]
                shown = row[relation["name"].replace(":", "_")]
                assert (float(shown) if shown else None) == value
        else:
            mine = np.sqrt(np.maximum(told["hellinger.mean"][told["heads"].index(f"L{layer}H{head}")], 0))
            others = np.delete(mine, told["heads"].index(f"L{layer}H{head}"))
            assert float(row["nearest_distance"]) == pytest.approx(others.min())


def named(label: str) -> str:
    """A relation as the page calls it."""
    return label.replace("_", " ")


def test_relations_have_a_grid_of_relations_and_heads(viewer: OpenedViewer, records: Path) -> None:
    viewer.open(records / "relations" / "relations.npz")
    viewer.settle("numbers")
    told = json.loads((records / "relations" / "relations.json").read_text("utf-8"))["relations"]
    table = viewer.table()
    assert [row[0] for row in table[1:]] == [named(one["name"]) for one in told]
    for row, one in zip(table[1:], told, strict=True):
        shown = [float(x) if x else None for x in row[1:]]
        assert shown == pytest.approx([x for layer in one["accuracy"] for x in layer], rel=1e-6, nan_ok=True)
    at = next(at for at, one in enumerate(told) if one["n_scored"] > 5)
    viewer.hover(at, 9)
    value, low, high = (told[at][name][1][2] for name in ("accuracy", "low", "high"))
    said = viewer.text("#readout")
    assert said.startswith(f"L1H2 {named(told[at]['name'])} {value:.2f} [{low:.2f}, {high:.2f}]"), said
    assert f"{told[at]['n_scored']} links scored" in said
    left, _, cell, _, _, box = viewer.place()
    viewer.page.mouse.click(box["x"] + left / 2, box["y"] + float(viewer.place()[1]) + (at + 0.5) * cell)
    viewer.until("location.hash.includes('o=-')")
    first = [float(x or -1) for x in viewer.table()[1 + at][1:]]
    assert first == sorted(first, reverse=True), "a click on its name sorts heads by it"
    viewer.hover(at, 0, click=True)
    viewer.settle("head")
    assert viewer.page.locator(".view.head").is_visible()


def test_a_comparison_has_a_grid_of_layers_and_heads(viewer: OpenedViewer, records: Path) -> None:
    viewer.open(records / "compare" / "compare.npz")
    viewer.settle("numbers")
    held = np.load(records / "compare" / "compare.npz")
    table = "hellinger"
    mine = np.sqrt(np.maximum(held[f"{table}.mean"][8], 0))
    other = int(np.argmin(np.where(np.arange(14) == 8, np.inf, mine)))
    viewer.show(v="numbers", head="L1H0")
    viewer.page.locator(".numbers .heat canvas").last.press("ArrowRight")
    viewer.until("location.hash.includes('L1H1')")
    assert float(viewer.table()[2][2]) == pytest.approx(mine[other], rel=1e-6)
    low, high = (np.sqrt(max(0.0, held[f"{table}.{end}"][8, other])) for end in ("low", "high"))
    assert f"[{low:.2f}, {high:.2f}]" in viewer.text("#readout")
    viewer.page.locator(".numbers .heat canvas").last.press("Enter")
    viewer.settle("head")


@pytest.mark.parametrize(("name", "scheme", "width"), [("relations", "light", 1280), ("compare", "dark", 390)])
def test_grids_are_for_all(browser: Any, records: Path, name: str, scheme: str, width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme, bypass_csp=True)
    opened = Opened(context.new_page(), load(records / name / f"{name}.npz").page().save(records / f"{name}.html"))
    opened.settle("numbers")
    assert serious(opened) == []
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.complaints == []
    context.close()


def test_another_file_takes_the_place_of_the_first(viewer: OpenedViewer, tmp_path: Path) -> None:
    viewer.open(simple(4).save(tmp_path / "four.npz"))
    viewer.settle("grid")
    viewer.show(v="matrix", h="0.1", q=3)
    viewer.open(simple(6, seed=3).save(tmp_path / "six.npz"))
    viewer.settle("grid")
    viewer.show(v="matrix", h="0.1")
    np.testing.assert_allclose(viewer.matrix(), simple(6, seed=3).of(0, 1), atol=5.1e-5)
    viewer.open(described_findings().save(tmp_path / "heads.npz"))
    viewer.settle("atlas")
    assert viewer.page.locator("header").count() == 1


def test_a_file_may_be_dropped(viewer: OpenedViewer, tmp_path: Path) -> None:
    content = list(simple(4).save(tmp_path / "four.npz").read_bytes())
    viewer.page.evaluate(
        """bytes => {
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File([Uint8Array.from(bytes)], 'four.npz'));
            dispatchEvent(new DragEvent('drop', {dataTransfer, cancelable: true}));
        }""",
        content,
    )
    viewer.settle("grid")


def test_damage_is_said_in_a_line_and_loses_nothing(viewer: OpenedViewer, tmp_path: Path) -> None:
    content = simple(9).content("npz")
    damages = {
        "cut off": content[: len(content) // 2],
        "damaged": content[:2000] + bytes([content[2000] ^ 255]) + content[2001:],
        "neither an archive": b"",
        "neither an archive ": b"no record at all",
        "is cut off": b'{"schema": "attnscope.heads/1", "heads": [',
        "names no schema": b'{"name": 1}',
        "attnscope.trace/1, which this page does not show": b'{"schema": "attnscope.trace/1"}',
        "holds no heads": b'{"schema": "attnscope.heads/1", "heads": []}',
        "no layer and number": b'{"schema": "attnscope.heads/1", "heads": [{"kind": 3}]}',
    }
    whole = simple(4).save(tmp_path / "four.npz")
    for number, (says, damaged) in enumerate(damages.items()):
        file = tmp_path / f"odd-{number}.npz"
        file.write_bytes(damaged)
        viewer.open(file)
        viewer.until(f"document.querySelector('[role=alert]')?.textContent.includes('{file.name}')")
        assert viewer.says().startswith(f"{file.name} cannot be shown: ") and says.strip() in viewer.says()
        if not number:
            viewer.open(whole)
            viewer.settle("grid")
            continue
        viewer.show(v="matrix", h="0.0")
        assert viewer.matrix().shape == (4, 4)


def test_weights_that_do_not_fit_their_tokens(viewer: OpenedViewer, tmp_path: Path) -> None:
    np.savez(tmp_path / "odd.npz", weights=np.ones((1, 1, 3, 3)), tokens=["a", "b"])
    viewer.open(tmp_path / "odd.npz")
    assert "1 × 1 × 3 × 3, which does not fit its tokens" in viewer.says()


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app(["viewer", "-o", str(tmp_path / "v.html"), "--json"], standalone_mode=False)
    told = json.loads(capsys.readouterr().out)
    assert told["files"] == [str(tmp_path / "v.html")]
    assert told["bytes"] == (tmp_path / "v.html").stat().st_size < 400_000
    assert (tmp_path / "v.html").read_text("ascii") == empty_page().html
