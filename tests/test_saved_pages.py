"""The page of a saved record, whose npz the browser reads: each number is the record's."""

import csv
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.findings_helpers import described_findings
from tests.heads_helpers import heads_in
from tests.page_helpers import SEEN, Opened
from tests.record_helpers import map_of, record_of, tokens_of

Show = Callable[[Any], Opened]


@pytest.fixture
def show(browser, tmp_path):
    """Opens the page of a record; it must not complain, and ask nobody for anything."""
    shown = []

    def show(record):
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        shown.append(Opened(page, record.page().save(tmp_path / f"page-{len(shown)}.html")))
        return shown[-1]

    yield show
    for opened in shown:
        assert opened.complaints == []
        assert [url for url in opened.requests if not url.startswith(("blob:", "file:"))] == []
        opened.page.close()


def test_hiding_special_tokens_hides_the_first_token_of_a_decoder(show):
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
        np.testing.assert_allclose(
            shown.matrix(), (whole.merge_words() if words else whole).of(1, 2), atol=SEEN
        )


def test_heads_have_their_table_and_scatter(show):
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
