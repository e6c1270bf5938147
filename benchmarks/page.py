"""`attnscope page` against bertviz's model_view of the same attention, in turn; and what a large page costs to use.

bertviz 1.4.1 is installed for this benchmark alone (`pip install --no-deps bertviz==1.4.1`). It imports IPython for two
classes that show HTML in a notebook; where IPython is not installed, two that only hold it stand in. Nothing else that
it asks for is needed for model_view.

Written: minilm's 72 heads on 256 tokens of prose. Timed is what comes after the forward: from the weights at hand to
the finished file on disk, the median of some runs, each of the two in turn.

Used: 144 heads (minilm's, twice) on 512 tokens, in headless Chromium without a GPU, under Chrome's own trace. While a
task of the main thread lasts no frame can be drawn; where other work shares the machine, its time on the processor says
what it would take alone.

usage: python -m benchmarks.page [--runs 5] [--tokens 256]
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
import types
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import attnscope
from attnscope.pages import PageText, page_of
from attnscope.questions.heatmap import AttentionMap, Heatmap
from tests.page_helpers import open_browser

PROSE = Path(__file__).parent.parent / "sample_texts" / "alice.txt"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    given = parser.parse_args()
    model = attnscope.load("minilm")
    record = recorded(model, given.tokens)
    result: dict[str, Any] = {
        "benchmark": "page",
        "heads": record.weights.shape[0] * record.weights.shape[1],
    }
    result["tokens"] = len(record.tokens)
    with tempfile.TemporaryDirectory() as folder:
        result |= written(model, record, Path(folder), given.runs)
        large = page_of([PageText(twice(recorded(model, 512)))]).save(Path(folder) / "large.html")
        result["used"] = {
            "heads": 144,
            "tokens": 512,
            "page_mb": round(large.stat().st_size / 1e6, 1),
        } | used(large)
    print(json.dumps(result))


def recorded(model: Any, n_tokens: int) -> Heatmap:
    """Return a record of prose of so many tokens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the text was cut is what is wanted
        words = PROSE.read_text("utf-8").split()
        record = attnscope.heatmap(model, " ".join(words[60 : 60 + n_tokens]))
    n = min(n_tokens, len(record.tokens))
    (attention,) = record.maps
    if n < len(record.tokens):
        keep = np.r_[0 : n - 1, len(record.tokens) - 1]
        weights = attention.weights[:, :, keep][:, :, :, keep]
        tokens = attention.keys.take(keep)
        attention = replace(
            attention, weights=weights / weights.sum(-1, keepdims=True), queries=tokens, keys=tokens
        )
    elif n < n_tokens:
        attention = tiled(attention, n_tokens)
    return replace(record, maps=(attention,))


def tiled(attention: AttentionMap, n: int) -> AttentionMap:
    """Return a map made larger by its own rows and columns, where a model takes fewer tokens."""
    at = np.minimum(np.arange(n), len(attention.keys) - 1)
    weights = attention.weights[:, :, at][:, :, :, at]
    tokens = attention.keys.take(at)
    return replace(
        attention, weights=weights / weights.sum(-1, keepdims=True), queries=tokens, keys=tokens
    )


def twice(record: Heatmap) -> Heatmap:
    """Return the layers, and the same again above them."""
    (attention,) = record.maps
    weights = np.concatenate([attention.weights, attention.weights])
    layers = tuple(range(len(weights)))
    return replace(
        record, maps=(replace(attention, weights=weights, layers=layers, n_layers=len(layers)),)
    )


def written(model: Any, record: Heatmap, folder: Path, runs: int) -> dict[str, Any]:
    """Time and size of both pages of the same attention."""
    model_view = rival()
    attention = [torch.from_numpy(layer)[None] for layer in record.weights]
    tokens = list(record.tokens)

    def ours() -> Path:
        return page_of([PageText(record)]).save(folder / "ours.html")

    def theirs() -> Path:
        html = model_view(attention, tokens, html_action="return").data
        path = folder / "bertviz.html"
        path.write_text(html, "utf-8")
        return path

    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    sizes: dict[str, int] = {}
    for number in range(runs + 1):  # the first pair warms caches and is not counted
        for name, make in (("ours", ours), ("theirs", theirs)):
            started = time.perf_counter()
            path = make()
            elapsed_s = time.perf_counter() - started
            sizes[name] = path.stat().st_size
            if number:
                times[name].append(elapsed_s)
    # The whole study with the full-width heads, as the command makes it, beyond its forward.
    return {
        "attnscope_s": round(statistics.median(times["ours"]), 3),
        "bertviz_s": round(statistics.median(times["theirs"]), 3),
        "time_ratio_median": round(
            statistics.median(b / a for a, b in zip(times["ours"], times["theirs"], strict=True)), 1
        ),
        "attnscope_mb": round(sizes["ours"] / 1e6, 2),
        "bertviz_mb": round(sizes["theirs"] / 1e6, 2),
        "size_ratio": round(sizes["theirs"] / sizes["ours"], 1),
        "with_full_width": with_full_width(model, record, folder, runs),
        "runs": runs,
    }


def with_full_width(model: Any, record: Heatmap, folder: Path, runs: int) -> dict[str, Any]:
    """The same page made by the study, which keeps one more map a layer, against the plain forward of `heatmap`."""
    from attnscope.choice import Choice
    from attnscope.studies.inputs.reading import Prompt
    from attnscope.studies.maps.page import read_page_text

    text = " ".join(record.text.split())
    times: dict[str, list[float]] = {"forward": [], "page": []}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(runs + 1):
            started = time.perf_counter()
            attnscope.heatmap(model, text)
            between = time.perf_counter()
            path = page_of([read_page_text(model, Prompt(text), Choice())]).save(folder / "full.html")
            ended = time.perf_counter()
            if number:
                times["forward"].append(between - started)
                times["page"].append(ended - between)
    beyond = [page - forward for forward, page in zip(times["forward"], times["page"], strict=True)]
    return {
        "forward_s": round(statistics.median(times["forward"]), 3),
        "beyond_the_forward_s": round(statistics.median(beyond), 3),
        "mb": round(path.stat().st_size / 1e6, 2),
    }


def rival() -> Any:
    """bertviz's model_view, with or without IPython."""
    with contextlib.suppress(ImportError):
        import IPython.display  # noqa: F401  # is it there?
    if "IPython" not in sys.modules:
        package, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")

        class Held:
            def __init__(self, data: str) -> None:
                self.data = data

        display.HTML = display.Javascript = Held  # type: ignore[attr-defined]
        display.display = lambda *shown: None  # type: ignore[attr-defined]
        core = types.ModuleType("IPython.core")
        core.display = display  # type: ignore[attr-defined]
        sys.modules |= {
            "IPython": package,
            "IPython.display": display,
            "IPython.core": core,
            "IPython.core.display": display,
        }
    from bertviz.model_view import model_view

    return model_view


class Traced:
    """Chrome's own trace of what the page's main thread does."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.session = page.context.new_cdp_session(page)
        self.events: list[dict[str, Any]] = []
        self.complete = False
        self.session.on("Tracing.dataCollected", lambda data: self.events.extend(data["value"]))
        self.session.on("Tracing.tracingComplete", lambda _: setattr(self, "complete", True))

    def __enter__(self) -> "Traced":
        self.events.clear()
        self.complete = False
        config = {"includedCategories": ["devtools.timeline", "toplevel", "__metadata"]}
        self.session.send("Tracing.start", {"transferMode": "ReportEvents", "traceConfig": config})
        return self

    def __exit__(self, *_: object) -> None:
        self.session.send("Tracing.end")
        while not self.complete:
            self.page.wait_for_timeout(20)

    def tally(self) -> dict[str, float]:
        """Return the longest tasks: by the clock, and by time on the processor, which other work does not stretch."""
        names = [event for event in self.events if event.get("name") == "thread_name"]
        mains = {(e["pid"], e["tid"]) for e in names if e["args"]["name"] == "CrRendererMain"}
        tasks = [
            event
            for event in self.events
            if event.get("ph") == "X"
            and event["name"].endswith("RunTask")
            and (event["pid"], event["tid"]) in mains
        ]
        clock = sorted((event.get("dur", 0) / 1000 for event in tasks), reverse=True) or [0.0]
        processor = sorted((event.get("tdur", 0) / 1000 for event in tasks), reverse=True) or [0.0]
        return {
            "longest_task_ms": round(clock[0], 1),
            "over_50_ms": sum(time_ms > 50 for time_ms in clock),
            "longest_task_cpu_ms": round(processor[0], 1),
            "over_50_ms_cpu": sum(time_ms > 50 for time_ms in processor),
        }


def used(file: Path) -> dict[str, Any]:
    """Open a page and works it: the longest tasks of its main thread, and the time from the pointer to the picture."""
    found: dict[str, Any] = {}
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        traced = Traced(page)
        with traced:
            page.goto(file.as_uri(), wait_until="commit")
            page.wait_for_selector(".view.grid .heads button[data-spec]", timeout=60000)
            found["first_heads_ms"] = round(page.evaluate("performance.now()"))
            page.wait_for_selector(".view.grid .heads[data-painted]", timeout=60000, state="attached")
            found["visible_heads_painted_ms"] = round(page.evaluate("performance.now()"))
        found["opening"] = traced.tally()
        with traced:
            page.evaluate("location.hash = 'v=matrix&h=3.1'")
            page.wait_for_selector(".view.matrix[data-shown]")
            page.wait_for_timeout(1000)  # the thumbnails beside it
        found["matrix"] = traced.tally()
        box = page.locator(".heat canvas").last.bounding_box()
        with traced:
            for step in range(120):
                page.mouse.move(box["x"] + 150 + 4 * (step % 100), box["y"] + 150 + 3 * (step % 90))
        found["hover"] = traced.tally()
        found["hover_answer_ms"] = answer(page, box)
        page.mouse.move(box["x"] + 300, box["y"] + 300)
        with traced:
            for _ in range(6):
                page.mouse.wheel(0, -200)
                page.wait_for_timeout(30)
        found["zoom"] = traced.tally()
        for view in ("links", "text", "compare"):
            with traced:
                page.evaluate(f"location.hash = 'v={view}&h=3.1&q=40'")
                page.wait_for_selector(f".view.{view}[data-shown]")
                page.wait_for_timeout(500)
            found[view] = traced.tally()
    return found


def answer(page: Any, box: dict[str, float]) -> float:
    """Median time from a pointer event to the frame that shows its answer, as the page itself measures it."""
    page.evaluate(
        """() => {
            window.answers = [];
            document.querySelector('.heat').addEventListener('pointermove', event => {
                const seen = event.timeStamp;
                requestAnimationFrame(() => setTimeout(() => window.answers.push(performance.now() - seen)));
            }, true);
        }"""
    )
    for step in range(40):
        page.mouse.move(box["x"] + 160 + 5 * step, box["y"] + 200 + 3 * step)
        page.wait_for_timeout(20)
    times: list[float] = page.evaluate("window.answers")
    return round(statistics.median(times), 1)


if __name__ == "__main__":
    main()
