"""The page of an atlas of 1,024 heads in headless Chromium, beside bertviz's model_view of one text.

The atlas is made up (from a seed): what is timed is the page, not what it says. Opened from disk without a GPU, under
Chrome's own trace: the time to the first picture of all heads; the longest task of the main thread while a brush goes
over the scatter, while heads are filtered by an expression, and while one opens. Where other work shares the machine,
time on the processor says what a task would take alone. bertviz shows the 72 heads of minilm on one text of 64 tokens;
its page gets jQuery, d3 and require.js from the network, which is not there: its time is that of its own file alone.

usage: python -m benchmarks.atlas_page [--layers 32] [--heads 32] [--tokens 64]
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from attnscope.pages import page_of_record
from benchmarks.page import Traced, recorded, rival
from tests.atlas_helpers import small_atlas
from tests.page_helpers import open_browser

BRUSH_STEPS = 120


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "atlas_page", "heads": given.layers * given.heads}
    with tempfile.TemporaryDirectory() as folder:
        atlas = small_atlas(given.layers, given.heads, n_tokens=given.tokens, n_top=10)
        path = page_of_record(atlas).save(Path(folder) / "atlas.html")
        result["examples"] = len(atlas["examples"])
        result["page_mb"] = round(path.stat().st_size / 1e6, 1)
        result |= browse(path)
        result["bertviz_one_text"] = browse_rival(Path(folder), given.tokens)
    print(json.dumps(result))


def browse(file: Path) -> dict[str, Any]:
    """Open the page of an atlas, brushes, filters and open a head."""
    found: dict[str, Any] = {}
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        traced = Traced(page)
        with traced:
            page.goto(f"{file.as_uri()}#ax=layer&ay=induction", wait_until="commit")
            page.wait_for_selector(".view.atlas[data-shown]", timeout=60000)
            found["first_picture_ms"] = round(page.evaluate("performance.now()"))
        found["opening"] = traced.tally()
        box = page.locator(".scatter").bounding_box()
        assert box is not None
        with traced:
            page.mouse.move(box["x"] + 60, box["y"] + 20)
            page.mouse.down()
            for step in range(BRUSH_STEPS):
                page.mouse.move(box["x"] + 60 + 3 * step, box["y"] + 20 + 3 * (step % 130))
            page.mouse.up()
        found["brush"] = traced.tally()
        page.keyboard.press("Escape")
        with traced:
            page.type("input.filter", "induction > 0.4 & layer > 3 & !role:local", delay=10)
        found["filter"] = traced.tally()
        with traced:
            page.evaluate("location.hash = 'v=head&head=L3H1'")
            page.wait_for_selector(".view.head[data-shown=L3H1]")
            page.wait_for_timeout(300)
        found["head"] = traced.tally()
    return found


def browse_rival(folder: Path, n_tokens: int) -> dict[str, Any]:
    """bertviz's model_view of one text: its size, and the time until the browser has read it."""
    import torch

    import attnscope

    record = recorded(attnscope.load("minilm"), n_tokens)
    attention = [torch.from_numpy(layer)[None] for layer in record.weights]
    html = rival()(attention, list(record.tokens), html_action="return").data
    path = folder / "bertviz.html"
    path.write_text(html, "utf-8")
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        traced = Traced(page)
        with traced:
            page.goto(path.as_uri(), wait_until="load")
            read_ms = round(page.evaluate("performance.now()"))
        return {"mb": round(path.stat().st_size / 1e6, 1), "read_ms": read_ms, "opening": traced.tally()}


if __name__ == "__main__":
    main()
