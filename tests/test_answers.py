"""What `heatmap`, `page` and `batch` answer of attention, beside figures: strongest links, means, words by words."""

import json
from pathlib import Path

import numpy as np
import pytest

from attnscope.questions.heatmap_terminal import show
from attnscope.questions.links import find_links
from attnscope.report.plain_text import open_console
from attnscope.results.record import load_record as load
from tests.cli_helpers import TIRED, elsewhere, loaded_once
from tests.conftest import Run
from tests.record_helpers import map_of, record_of, tokens_of

__all__ = ["elsewhere", "loaded_once"]


def test_a_heatmap_answers_before_it_lists_its_files(run: Run) -> None:
    result = run("heatmap", TIRED, "-L", "3", "-o", "out", "--query", "it")
    title, *links, opened, first, _, _ = result.out.splitlines()
    assert len(links) == 5 and max(map(len, [title, *links])) <= 80
    assert title.startswith("where it looks most") and links[0] == "L3H1  it → animal  0.68"
    assert len({line.split()[0] for line in links}) == 5  # heads, each once
    assert opened == f"open {Path(first).resolve().as_uri()}" and first == "out/L03.png"
    assert run("heatmap", TIRED, "-L", "3", "-o", "out", "-q").out == "out/L03.png\nout/heatmap.npz\n"
    answer, opened, path = run("page", "--record", "out", "-o", "page.html").out.splitlines()
    assert answer.startswith("strongest link: L3H") and opened == f"open {Path(path).resolve().as_uri()}"
    assert json.loads(run("page", "--record", "out", "-o", "page.html", "--json").out)["files"] == ["page.html"]


def test_strongest_links_are_those_of_numpy_outside_sinks() -> None:
    tokens = tokens_of(["[CLS]", "a", "b", "c"], special=[0])
    attention = map_of(tokens, layers=2, heads=3, seed=1)
    weights = attention.weights.astype(np.float64)
    weights[:, :, 0] = weights[:, :, :, 0] = 0
    weights[:, :, range(4), range(4)] = 0
    expected = np.sort(weights.max((2, 3)).ravel())[::-1]
    assert [link.weight for link in find_links(record_of(attention), most=6)] == pytest.approx(expected.tolist())


def test_a_nearly_uniform_model_is_told_how_to_see_more() -> None:
    flat = np.full((1, 2, 8, 8), 1 / 8, np.float32)
    np.savez("flat.npz", weights=flat, tokens=np.array([f"t{place}" for place in range(8)]))
    lines = str(show(load("flat.npz"), open_console(), drawn=False, answered=True)).splitlines()
    assert lines[-1] == "none is above 0.2: --scale head shades each head by its own largest weight"
