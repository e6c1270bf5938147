"""A page in a real browser: opened from disk, worked with real keys and a real pointer, watched for complaints."""

import base64
import contextlib
import csv
import io
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from matplotlib import colormaps

SEEN = 0.0005
"""How far a shown value may be from the weight."""

VIEWS = ("grid", "matrix", "links", "text", "compare")
"""The views of a page of texts, in the order of their tabs."""

STANDS = "main [data-shown], main [data-painted], .alert"
"""What a page has as soon as its first view can be seen."""


def chromium_path() -> str:
    """Where Chromium is; without it tests are skipped, but in CI they fail."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None and os.environ.get("CI"):
        pytest.fail(
            "no chromium is installed: pages are tested in a real browser (apt-get install chromium)"
        )
    if found is None:
        pytest.skip(
            "no chromium is installed: pages are tested in a real browser (apt-get install chromium)"
        )
    return found


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    """A headless Chromium; see `chromium_path`."""
    from playwright.sync_api import sync_playwright

    path = chromium_path()
    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-background-networking"]
        )
        yield browser
        browser.close()


class Opened:
    """A page that was opened, and what happened in it.

    Attributes:
        page: Playwright's page.
        complaints: Errors, warnings and dialogs so far.
        requests: Addresses that were asked for, but for the file itself and what the page makes of its own data.
    """

    def __init__(self, page: Any, file: Path) -> None:
        self.page, self.file = page, file
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.shows = 0
        self.saves: deque[float] = deque(maxlen=8)
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: self.requests.append(request.url))
        page.set_default_timeout(60000)
        if slowdown := os.environ.get("ATTNSCOPE_TEST_SLOWDOWN"):  # how many times slower scripts run
            throttled = page.context.new_cdp_session(page)
            throttled.send("Emulation.setCPUThrottlingRate", {"rate": float(slowdown)})
        page.goto(file.as_uri())
        page.wait_for_selector(STANDS, state="attached")
        self.requests.clear()

    def watched(self) -> Iterator[Self]:
        """The page for one test; whatever it does, the page must not complain, and ask nobody for anything."""
        self.complaints.clear()
        self.requests.clear()
        self.page.mouse.move(0, 0)
        yield self
        assert self.complaints == [], self.complaints
        assert [url for url in self.requests if not url.startswith(("blob:", "file:"))] == []

    def show(self, **state: object) -> None:
        """Goes to an address of the page, and waits until the view stands."""
        self.shows += 1  # the same address again would be no change
        told = "&".join(f"{name}={value}" for name, value in {**state, "_": self.shows}.items())
        view = state.get("v", "grid")
        self.page.evaluate(
            "document.querySelectorAll('[data-shown]').forEach(e => delete e.dataset.shown)"
        )
        self.page.evaluate("to => { location.hash = to; }", told)
        self.settle(str(view))

    def settle(self, view: str) -> None:
        """Waits until a view stands."""
        mark = ".view.grid .heads[data-painted]" if view == "grid" else f".view.{view}[data-shown]"
        self.page.wait_for_selector(mark, state="attached", timeout=60000)
        self.page.evaluate(
            "() => new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))"
        )

    def text(self, selector: str) -> str:
        """The text of an element, white space made plain."""
        return " ".join(self.page.inner_text(selector).split())

    def place(self, panel: str = ".heat") -> tuple[float, float, float, float, float, dict[str, float]]:
        """Where cells stand in a heatmap: left, top, cell, x, y, and the box of its canvas."""
        host = self.page.locator(panel)
        left, top, cell, x, y = map(float, host.get_attribute("data-place").split(","))
        return left, top, cell, x, y, host.locator("canvas").last.bounding_box()

    def hover(self, row: int, column: int, panel: str = ".heat", click: bool = False) -> None:
        """Points at a cell."""
        left, top, cell, x, y, box = self.place(panel)
        at = (box["x"] + left + (column + 0.5) * cell - x, box["y"] + top + (row + 0.5) * cell - y)
        self.page.mouse.move(*at)
        if click:
            self.page.mouse.click(*at)
        self.frame()

    def frame(self) -> None:
        """Waits for the next picture."""
        self.page.evaluate(
            "() => new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))"
        )

    def click(self, selector: str) -> None:
        """Clicks on an element, and waits for the next picture."""
        self.page.click(selector)
        self.frame()

    def press(self, *keys: str) -> None:
        """Presses keys one after the other, and waits for the next picture after each."""
        for key in keys:
            self.page.keyboard.press(key)
            self.frame()

    def until(self, true: str) -> None:
        """Waits until an expression holds. Playwright's own waiting evaluates strings, which the page forbids."""
        for _ in range(1000):
            if self.page.evaluate(true):
                return
            self.frame()
        raise AssertionError(f"never: {true}")

    def download(self, kind: str) -> Any:
        """The file that one of the save buttons gives, as Playwright's download.

        Chromium drops the eleventh file that a page hands over within a second, so more than eight wait for the next.
        """
        if len(self.saves) == 8 and (left := self.saves[0] + 1.2 - time.monotonic()) > 0:
            self.page.wait_for_timeout(1000 * left)
        self.saves.append(time.monotonic())
        with self.page.expect_download() as download:
            self.page.click(f"[data-save={kind}]")
        return download.value

    def saved(self, kind: str) -> bytes:
        """What one of the save buttons gives."""
        return Path(self.download(kind).path()).read_bytes()

    def table(self) -> list[list[str]]:
        """What the CSV button gives."""
        return list(csv.reader(io.StringIO(self.saved("csv").decode())))

    def matrix(self) -> np.ndarray:
        """The numbers of the CSV of a matrix."""
        return np.array([[float(x or 0) for x in row[1:]] for row in self.table()[1:]])


@contextlib.contextmanager
def page_opener(browser: Any, folder: Path) -> Iterator[Callable[..., Any]]:
    """Opens pages, or files, each in a window of its own; at the end these close, and none may have complained."""
    made: list[Opened] = []

    def open_page(page: Any, of: type[Opened] = Opened, width: int = 1280, height: int = 800) -> Opened:
        file = page if isinstance(page, Path) else page.save(folder / f"page-{len(made)}.html")
        window = {"viewport": {"width": width, "height": height}, "accept_downloads": True}
        context = browser.new_context(**window, permissions=["clipboard-read", "clipboard-write"])
        made.append(of(context.new_page(), file))
        return made[-1]

    yield open_page
    for opened in made:
        opened.page.context.close()
        assert opened.complaints == [], opened.complaints


def number(text: str) -> float:
    """The first weight in a text."""
    found = re.search(r"[+\u2212]?\d\.\d{4}", text)
    assert found, text
    return float(found[0].replace("\u2212", "-"))


def blues(values: np.ndarray, high: float = 1.0) -> np.ndarray:
    """The figures' colours of weights, (…, 3)."""
    return np.asarray(colormaps["Blues"](np.asarray(values, float) / high, bytes=True))[..., :3].astype(
        int
    )


def pixels(opened: Opened, canvas: str) -> np.ndarray:
    """The pixels of a canvas, (row, column, 3)."""
    width, height, data = opened.page.eval_on_selector(
        canvas,
        """c => {
            const copy = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
            [copy.canvas.width, copy.canvas.height] = [c.width, c.height];
            copy.drawImage(c, 0, 0);
            const bytes = copy.getImageData(0, 0, c.width, c.height).data, parts = [];
            for (let at = 0; at < bytes.length; at += 32768)
                parts.push(String.fromCharCode(...bytes.subarray(at, at + 32768)));
            return [c.width, c.height, btoa(parts.join(''))];  // as text: a list of numbers takes seconds to send
        }""",
    )
    return np.frombuffer(base64.b64decode(data), np.uint8).reshape(height, width, 4)[..., :3].astype(int)
