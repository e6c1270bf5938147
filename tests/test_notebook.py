"""Records in notebooks: traits, what stays in the file, and a page worked in a real JupyterLab."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import attnscope
from attnscope.errors import AttnscopeError
from attnscope.records import Heatmap
from attnscope.views.pages import notebook
from tests.atlas_helpers import small_atlas
from tests.findings_helpers import described_findings
from tests.record_helpers import map_of, record_of, tokens_of

TOKENS = tokens_of(["[CLS]", "the", "cat", "sat", "the", "[SEP]"], (0, 5))
RECORD = record_of(map_of(TOKENS, layers=2, heads=3, seed=1))
VIEW = "application/vnd.jupyter.widget-view+json"


def traits() -> Any:
    pytest.importorskip("anywidget")
    import traitlets

    return traitlets


def test_head_and_layer_follow_each_other() -> None:
    traits()
    shown = attnscope.widget(RECORD)
    assert (shown.head, shown.layer, shown.query) == ("", None, None)
    shown.head = "L0H2"
    assert shown.layer == 0
    shown.layer = 1
    assert shown.head == "L1H2"
    shown.head = "mean"
    assert shown.layer is None
    shown.head = "mean0"
    shown.layer = 1
    assert shown.head == "mean1"


def test_a_query_is_a_place_or_what_means_one() -> None:
    traits()
    shown = attnscope.widget(RECORD)
    for given, place in (("cat", 2), (3, 3), ("@5", 5), ("the", 1), (None, None)):
        shown.query = given
        assert shown.query == place
    shown.key = "[SEP]"
    assert shown.key == 5


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("head", "L2H0", "does not show head L2H0"),
        ("head", "third", "names no head"),
        ("layer", 5, "does not show head L5H0"),
        ("query", "dog", "@2 cat"),
        ("query", 6, "no token 6 of 6"),
        ("view", "grids", "there are grid, matrix"),
        ("view", "photo", "there are grid, matrix, links, text, compare, headcount$"),
        ("kind", "cross", "there is encoder$"),
    ],
)
def test_what_is_not_there_is_refused_and_changes_nothing(name: str, value: object, says: str) -> None:
    traitlets = traits()
    shown = attnscope.widget(RECORD)
    shown.head = "L1H0"
    before = {trait: getattr(shown, trait) for trait in ("head", "layer", "query", "view")}
    with pytest.raises(traitlets.TraitError, match=says):
        setattr(shown, name, value)
    assert {trait: getattr(shown, trait) for trait in before} == before


def test_a_name_that_nothing_has_is_refused() -> None:
    traits()
    shown = attnscope.widget(RECORD)
    with pytest.raises(AttributeError, match="no 'heads' to choose; there are view, text, kind, head"):
        shown.heads = "L0H0"
    shown.height = 300


def test_records_about_heads_have_views_of_their_own() -> None:
    traitlets = traits()
    for record, views in ((described_findings(), "atlas, head$"), (small_atlas(), "atlas, head, matrix, links$")):
        with pytest.raises(traitlets.TraitError, match=f"there are {views}"):
            attnscope.widget(record).view = "grid"


def test_what_the_page_says_arrives() -> None:
    traits()
    shown, heard = attnscope.widget(RECORD), []
    shown.observe(lambda change: heard.append(change["new"]), "head")
    shown.set_state({"head": "L1H1", "query": 4, "view": "matrix"})  # as messages of the page do
    assert heard == ["L1H1"]
    assert (shown.layer, shown.query, shown.view) == (1, 4, "matrix")


def test_what_has_no_page_is_said() -> None:
    traits()
    with pytest.raises(AttnscopeError, match="a cost has no page"):
        attnscope.widget(attnscope.cost("gpt3", 2048))


def test_without_anywidget_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "attnscope.views.pages.widget", raising=False)
    monkeypatch.setitem(sys.modules, "anywidget", None)
    with pytest.raises(AttnscopeError, match="needs anywidget") as told:
        attnscope.widget(RECORD)
    assert "attnscope[notebook]" in told.value.hint


def copy_of(record: Heatmap, folder: Path) -> Heatmap:
    """One that was not shown yet."""
    return Heatmap.load(record.save(folder / "weights.npz"))


def test_in_a_terminal_a_record_is_still(tmp_path: Path) -> None:
    assert copy_of(RECORD, tmp_path)._repr_mimebundle_(include=None, exclude=None) == {}


def test_in_a_kernel_a_record_is_live_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traits()
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setattr(pytest.importorskip("IPython"), "get_ipython", lambda: shell)
    record = copy_of(RECORD, tmp_path)
    bundle = record._repr_mimebundle_()
    assert list(bundle) == [VIEW], "the picture and the text come from elsewhere"
    assert record._repr_mimebundle_() == bundle, "shown again it is the same page"
    assert record._repr_png_().startswith(b"\x89PNG")
    monkeypatch.setenv(notebook.STILL, "1")
    assert record._repr_mimebundle_() == {}
    monkeypatch.delenv(notebook.STILL)
    monkeypatch.setattr(notebook, "MOST_LIVE", 2 * 3 * 6 * 6 - 1)
    assert record._repr_mimebundle_() == {}


def test_records_about_heads_are_live_too() -> None:
    traits()
    shown = attnscope.widget(described_findings())
    shown.head = "L1H2"
    with pytest.raises(Exception, match="number of a token"):
        shown.query = "cat"


# In a page that stands for a notebook --------------------------------------------------------------------------------

HARNESS = """([module, page]) => {
    const script = document.createElement('script');
    script.type = 'module';
    script.textContent = module.replace('export default', 'window.widget =');
    document.head.append(script);
    const held = {view: '', text: 0, kind: '', head: '', query: null, key: null, height: 640, _page: page};
    const listeners = {};
    window.held = held;
    window.model = {
        get: (name) => held[name],
        set: (name, value) => { held[name] = value; (listeners['change:' + name] || []).forEach((one) => one()); },
        on: (event, listener) => (listeners[event] ||= []).push(listener),
        off() {},
        save_changes() {},
    };
}"""
"""What anywidget gives to the module: a model whose values change and are heard."""


def test_what_is_about_heads_follows_too(browser: Any) -> None:
    traits()
    from attnscope.views.pages.widget import Widget

    page = browser.new_page(viewport={"width": 1200, "height": 800})
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.set_content("<body></body>")
    page.evaluate(HARNESS, [str(Widget._esm), small_atlas().page().html])
    page.wait_for_function("window.widget")
    page.evaluate("() => { widget.render({model, el: document.body}); }")
    page.wait_for_function("held.view === 'atlas' && held.head === 'L0H0'")
    page.evaluate("model.set('head', 'L1H2')")
    page.wait_for_function("held.view === 'head' && held.head === 'L1H2'")
    page.evaluate("model.set('view', 'matrix')")
    page.wait_for_function("held.view === 'matrix' && held.query === 3")
    page.evaluate("model.set('view', 'grid')")  # there is none
    page.wait_for_function("held.view === 'matrix'")
    page.evaluate("model.set('head', 'L0H1')")
    page.wait_for_function("held.view === 'head' && held.head === 'L0H1' && held.query === null")
    page.frames[1].click(".examples [data-token='2'] >> nth=0")
    page.wait_for_function("held.query === 2")
    assert wrong == []
    page.close()


# In a real JupyterLab -------------------------------------------------------------------------------------------------

LIMIT_S = 240
"""Of each wait: what hangs is found, and a machine that has much else to do is waited for; quiet, all take 20."""

CELLS = (
    "import attnscope\nrecord = attnscope.load_record('weights.npz')\nshown = attnscope.widget(record)\nshown",
    "print('chosen:', shown.head, shown.query, shown.view)",
    "shown.head, shown.query = 'L0H1', 'sat'",
    "record",
)


def write_notebook(path: Path) -> None:
    cells = [
        {"cell_type": "code", "id": f"c{at}", "execution_count": None, "metadata": {}, "outputs": [], "source": text}
        for at, text in enumerate(CELLS)
    ]
    spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    told = {"cells": cells, "metadata": {"kernelspec": spec}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(told), "utf-8")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """The address of a JupyterLab that serves a folder, with settings of its own."""
    jupyterlab = pytest.importorskip("jupyterlab")
    share = Path(jupyterlab.__file__).parents[4] / "share" / "jupyter"
    runtime = tmp_path / "runtime"
    env = {
        **os.environ,
        "JUPYTER_PATH": str(share), "JUPYTERLAB_DIR": str(share / "lab"),
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"), "JUPYTER_RUNTIME_DIR": str(runtime),
        "JUPYTER_DATA_DIR": str(tmp_path / "data"), "HOME": str(tmp_path), "IPYTHONDIR": str(tmp_path / "ipython"),
        "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"), "PYTHONPATH": str(Path.cwd()),
    }  # fmt: skip
    quiet = tmp_path / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    quiet.parent.mkdir(parents=True)
    quiet.write_text('{"fetchNews": "false", "checkForUpdates": false}', "utf-8")  # it would ask, and look for news
    folder = tmp_path / "served"
    folder.mkdir()
    RECORD.save(folder / "weights.npz")
    write_notebook(folder / "look.ipynb")
    asked = [
        "--no-browser", "--allow-root", "--port=0", "--IdentityProvider.token=", f"--ServerApp.root_dir={folder}",
        "--LabApp.expose_app_in_browser=True",
    ]  # fmt: skip
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen([sys.executable, "-m", "jupyterlab", *asked], env=env, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + LIMIT_S
            while not (url := address_in(runtime)):
                assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.05)  # another process is waited for
            yield url
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait(20)


def address_in(runtime: Path) -> str:
    """What a server has written about itself, once that is whole."""
    for file in runtime.glob("jpserver-*.json"):
        with contextlib.suppress(ValueError):
            return str(json.loads(file.read_text("utf-8"))["url"])
    return ""


READY = """() => {
    const kernel = window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel;
    return kernel?.connectionStatus === 'connected' && kernel.status === 'idle';
}"""
"""Whether the kernel hears: JupyterLab shows it as idle before, and cancels without a word what runs then."""


def run_cell(cells: Any, at: int) -> Any:
    """Runs a cell as a reader does, once, and returns it when the kernel has answered."""
    cell = cells.nth(at)
    cell.page.wait_for_function(READY)
    cell.locator(".cm-content").click()
    cell.locator(".cm-focused").wait_for()
    cell.page.keyboard.press("Shift+Enter")
    cell.locator(".jp-InputArea-prompt", has_text=re.compile(r"\d")).wait_for()
    return cell


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S)
def test_in_jupyterlab(browser: Any, lab: str, tmp_path: Path) -> None:
    pytest.importorskip("anywidget")
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.set_default_timeout(LIMIT_S * 1000)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(f"{lab}doc/tree/look.ipynb")
    cells = page.locator(".jp-CodeCell")
    inside = run_cell(cells, 0).frame_locator("iframe[title=attnscope]")
    inside.locator(".heads.large [data-spec='1.2']").click()
    inside.locator(".view.matrix[data-shown]").wait_for()
    inside.locator(".heat canvas").last.press("ArrowDown")
    inside.locator(".side section").first.wait_for()

    said = run_cell(cells, 1).locator(".jp-OutputArea-output")
    assert said.inner_text().strip() == "chosen: L1H2 1 matrix"

    run_cell(cells, 2)
    inside.locator(".view.matrix .title", has_text="L0H1").wait_for()
    inside.locator("#readout, .side", has_text="sat").first.wait_for()

    beside = run_cell(cells, 3).frame_locator("iframe[title=attnscope]")
    beside.locator(".heads.large [data-spec='1.2']").wait_for()
    assert inside.locator(".view.matrix .title").inner_text().startswith("L0H1"), "each widget is its own"
    page.evaluate("() => jupyterapp.commands.execute('docmanager:save')")  # until it is saved
    outputs = json.loads((tmp_path / "served" / "look.ipynb").read_text("utf-8"))["cells"][3]["outputs"]
    assert {VIEW, "image/png", "text/plain"} <= set(outputs[0]["data"])
    assert wrong == []
    page.close()
