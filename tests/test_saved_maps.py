"""What `heatmap` draws it also saves, for `show` and `page --record`; and a query that no token is meant by."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import attnscope
from attnscope import output
from attnscope.models.model import ShownModel
from tests.conftest import Run
from tests.record_helpers import map_of, record_of, tokens_of


def test_what_was_drawn_is_shown_again_from_its_folder(run: Run) -> None:
    status, out, err = run("heatmap", "the cat", "-m", "own", "-o", "drawn")
    assert (status, out.split()[-1]) == (0, "drawn/weights.npz"), err
    status, out, err = run("show", "drawn", "--pick", "L0H1")
    assert status == 0 and "L0H1" in out, err
    assert attnscope.load_record("drawn").of(0, 1).sum(-1) == pytest.approx(1)


def test_figures_named_by_format_are_all_that_is_written(run: Run, tmp_path: Path) -> None:
    assert run("heatmap", "the cat", "-m", "own", "-L", "0", "-f", "png", "-o", "drawn")[1].split() == ["drawn/L00.png"]
    assert [path.name for path in (tmp_path / "drawn").iterdir()] == ["L00.png"]


def test_a_figure_beside_the_record_of_other_heads_leaves_that_record(run: Run, tmp_path: Path) -> None:
    run("heatmap", "the cat", "-m", "own", "--pick", "L0H1", "-o", "drawn")
    kept = (tmp_path / "drawn/weights.npz").read_bytes()
    status, out, err = run("heatmap", "the cat", "-m", "own", "--pick", "L1H2", "-o", "drawn")
    assert (status, out.split()) == (0, ["drawn/L01H02.png"])
    assert "drawn/weights.npz is of other maps: heads L0H1, now L1H2: it stays" in err
    assert (tmp_path / "drawn/weights.npz").read_bytes() == kept
    run("heatmap", "the cat", "-m", "own", "--pick", "L1H2", "-o", "drawn", "--replace")
    assert (tmp_path / "drawn/weights.npz").read_bytes() != kept


def test_weights_that_would_fill_a_disk_are_saved_where_that_is_asked_for(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "MOST_SAVED", 100)
    status, out, err = run("heatmap", "the cat", "-m", "own", "-L", "0", "-o", "drawn")
    assert (status, out.split()) == (0, ["drawn/L00.png"])
    assert "note: the weights, 0 MiB, are not saved: --format png,npz does\n" in err
    run("heatmap", "the cat", "-m", "own", "-L", "0", "-o", "drawn", "-f", "png,npz")
    assert (tmp_path / "drawn/weights.npz").is_file()


def test_of_a_list_of_queries_the_missing_one_is_named(tmp_path: Path) -> None:
    record = record_of(map_of(tokens_of(["[CLS]", "the", "cat"], (0,)), layers=1, heads=1))
    for query, missing in (("cat,dog", "dog"), ("dog,@9,the", "dog,@9"), ("dog,bird", "dog,bird"), ("dog", "dog")):
        with pytest.raises(attnscope.AttnscopeError, match=rf"no token is '{missing}' \(the tokens are: @0 \[CLS\]"):
            record.draw(tmp_path, query=query)


def test_a_model_shows_itself_in_a_line_and_as_a_table() -> None:
    model = attnscope.load("own")
    assert repr(model) == "OwnModel('own', own: 2 layers of 7 heads)"
    shown = model._repr_html_()  # type: ignore[attr-defined]
    assert shown.startswith("<table><tr><th>model</th><td>own</td></tr>") and "<th>L0H1</th>" in shown


def test_what_a_folder_is_called_cannot_write_into_a_notebook() -> None:
    model, shown = attnscope.load("own"), ShownModel()
    shown.info, shown.tokenizer = replace(model.info, name="<script>"), model.tokenizer
    assert set(re.findall(r"</?(\w+)", shown._repr_html_())) == {"table", "tr", "th", "td"}
