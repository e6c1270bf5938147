"""Records that pages of tests show, whose numbers are known, and the page of all of them, opened once a module."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnscope.pages import PageText, page_of
from attnscope.questions.heatmap import Heatmap
from tests.findings_helpers import fake_findings
from tests.page_helpers import Opened, page_opener
from tests.record_helpers import map_of, record_of, shares, tokens_of

LABELS = ("[CLS]", "the", "un", "##believ", "##able", "cat", "sat", "on", "the", "mat", ".", "[SEP]")
WORDS = np.array([-1, 0, 1, 1, 1, 2, 3, 4, 5, 6, 7, -1], np.int32)
PROSE = "the unbelievable cat\nsat on the mat."


def sentence(*changes: tuple[int, str]) -> Any:
    """Twelve tokens of a text of two lines; the word of three pieces counts as one."""
    labels = list(LABELS)
    text = ""
    offsets = []
    at = 0
    for place, label in changes:
        labels[place] = label
    for place, label in enumerate(labels):
        bare = label.removeprefix("##")
        if place in (0, 11):
            offsets.append((-1, -1))
            continue
        if text and place not in (3, 4, 10):
            text += "\n" if place == 6 else " "
        at = len(text)
        text += bare
        offsets.append((at, at + len(bare)))
    return tokens_of(labels, (0, 11), words=WORDS, text=text, offsets=np.array(offsets, np.int32))


def resting(record: Heatmap) -> Heatmap:
    """The same with heads that rest on the first token, each row a little more; the last row all but wholly."""
    (attention,) = record.maps
    weights = attention.weights.copy()
    rest = np.linspace(0.1, 0.985, weights.shape[2], dtype=np.float32)
    rest[-1] = 0.995
    weights *= 1 - rest[:, None]
    weights[..., 0] += rest
    return replace(record, maps=(replace(attention, weights=weights),))


FIRST = resting(record_of(map_of(sentence(), layers=2, heads=3, seed=1)))
SECOND = record_of(map_of(sentence((9, "rug")), layers=2, heads=3, seed=2))
SHORTER = record_of(
    map_of(tokens_of(["[CLS]", "the", "cat", "sat", "[SEP]"], (0, 4)), layers=2, heads=3, seed=3)
)
BOTH = record_of(
    map_of(tokens_of(["the", "house", "</s>"], (2,)), kind="encoder", seed=4),
    map_of(tokens_of(["<pad>", "das", "Haus", "ist"], (0,)), kind="decoder", seed=5),
    map_of(
        tokens_of(["<pad>", "das", "Haus", "ist"], (0,)),
        tokens_of(["the", "house", "</s>"], (2,)),
        kind="cross",
        seed=6,
    ),
)
FULL = shares(2, 12, 12, seed=7)
FINDINGS = fake_findings(2, 3, seed=3, share_without=0.2)
W = FIRST.maps[0].weights


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [PageText(FIRST, {"encoder": FULL}), PageText(SECOND), PageText(SHORTER), PageText(BOTH)]
    return page_of(texts, findings=FINDINGS).save(tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture(scope="module")
def _opened(browser: Any, page_file: Path) -> Iterator[Opened]:
    with page_opener(browser, page_file.parent) as open_page:
        yield open_page(page_file, height=860)
