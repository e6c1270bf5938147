"""Every view of a record shows the parts of its study that failed: terminal, notebook, figures and page."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.text import Text

from attnscope.drawing.canvas import FigureRenderer
from attnscope.errors import AttnscopeError
from attnscope.report.plain_text import open_console, print_record, to_html
from attnscope.results.result import load_record as load
from tests.made_records import RECORDS
from tests.page_helpers import Opened

FAILURE = {"step": "--frobnicate", "error": "a bug", "hint": "mend it"}
SENTENCE = "--frobnicate failed: a bug"


def failed_record(name):
    """A saved record, whose study failed in part."""
    record = load(RECORDS / name)
    return replace(record, run={**record.run, "failures": [FAILURE]})


WITH_RUN = [
    name
    for name in sorted(path.name for path in RECORDS.iterdir())
    if hasattr(load(RECORDS / name), "run")
]


@pytest.mark.parametrize("name", WITH_RUN)
def test_tables_name_the_part_that_failed(name, run, tmp_path):
    record = failed_record(name)
    console = open_console(record=True, file=io.StringIO(), width=100)
    print_record(record, console)
    assert SENTENCE in console.export_text()
    assert SENTENCE in to_html(record)
    path = record.save(tmp_path / f"failed.{Path(name).suffix.removeprefix('.')}")
    status, out, err = run("show", path, "--quiet")
    assert (status, SENTENCE in out) == (0, True), err


@pytest.mark.parametrize(
    "name", [*(name for name in WITH_RUN if load(RECORDS / name).record_kind().figure_formats)]
)
def test_figures_name_the_part_that_failed(name, tmp_path, monkeypatch):
    said = []

    def look(self, kind):
        said.append(any("--frobnicate" in str(text.get_text()) for text in self.figure.findobj(Text)))
        return b""  # writing it takes most of the time

    monkeypatch.setattr(FigureRenderer, "render_vector", look)
    record = failed_record(name)
    assert len(record.draw(tmp_path, "svg")) == len(said) > 0
    assert all(said)


def test_a_record_whose_failures_say_nothing_is_refused(tmp_path):
    record = failed_record("heads.npz")
    for wrong in ("--frobnicate", [{"step": "--frobnicate"}], [1]):
        path = replace(record, run={**record.run, "failures": wrong}).save(tmp_path / "heads.npz")
        with pytest.raises(AttnscopeError, match="failure"):
            load(path)


def test_a_page_names_the_part_that_failed(browser, tmp_path):
    for name in ("heads.npz", "atlas.npz"):
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        opened = Opened(page, failed_record(name).page().save(tmp_path / f"{name}.html"))
        opened.until("document.querySelector('footer .failed')")
        assert opened.text("footer .failed") == SENTENCE
        page.close()
