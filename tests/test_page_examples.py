"""An example of an atlas opened as a map: what was kept of it is told apart; and the command that draws it."""

import re
import shlex
from dataclasses import replace

import numpy as np
import pytest

from attnscope.pages import page_of_record
from tests.atlas_helpers import examples_of, small_atlas, weights_of, with_examples
from tests.findings_helpers import fake_findings

FINDINGS = fake_findings(2, 3)


def cut_atlas():
    """One whose examples are windows: between the first token and the next, and after the last, some are left out."""
    made = small_atlas(findings=FINDINGS)
    positions = np.where(np.arange(20) == 0, 0, np.arange(20) + 7)
    cut = {
        "excerpt": "",
        "offsets": np.zeros((20, 2), np.int64),
        "n_tokens": 60,
        "positions": positions,
        "special": np.arange(20) == 0,
    }
    examples = [replace(one, labels=(*one.labels[:-1], "##ing"), **cut) for one in examples_of(made)]
    return with_examples(made, examples)


ATLAS = cut_atlas()


@pytest.fixture
def opened(open_page):
    return open_page(page_of_record(ATLAS))


def example(head, number):
    return [one for one in examples_of(ATLAS) if one.wanted.head == head][number]


def test_what_was_not_kept_is_said(opened):
    weights = weights_of(example(4, 1))
    opened.show(v="matrix", head="L1H1", ex=1, q=5)
    missing = round(100 * (1 - float(weights[5].sum())))
    assert f"{missing}% of the row" in opened.text(".kept") or (
        missing == 0 and "hardly any" in opened.text(".kept")
    )
    empty = int(np.flatnonzero(weights[5] == 0)[0])
    opened.hover(5, empty)
    assert "not kept" in opened.text("#readout")
    opened.hover(5, int(weights[5].argmax()))
    assert "not kept" not in opened.text("#readout")
    table = opened.table()
    assert table[6][1 + empty] == "", "what is not known is no 0"
    assert table[2][0].startswith("… "), "a gap in the text is marked"


def test_links_of_an_example_offer_no_other_head(opened):
    opened.show(v="links", head="L1H1", ex=1)
    assert opened.page.locator("label.field", has_text="add a head").is_hidden()
    assert "of a row, on average" in opened.text(".view.links .kept")


def test_an_example_opens_with_its_own_query(opened):
    opened.show(v="head", head="L1H1", ex=0, q=9)
    opened.page.click("article[data-example='1'] [data-open=matrix]")
    opened.settle("matrix")
    label = example(4, 1).labels[3]
    assert f"“{label}”" in opened.text(".kept"), (
        "of the example that is opened, not of the one that was looked at"
    )
    opened.show(v="head", head="L1H1", ex=1, q=9)
    opened.page.click("article[data-example='1'] [data-open=links]")
    opened.settle("links")
    assert f"“{example(4, 1).labels[9]}”" in opened.text(".view.links .kept")


def test_the_command_draws_what_is_chosen(opened):
    for number, query in ((1, 9), (2, 4)):
        opened.show(v="head", head="L1H1", ex=number, q=query)
        labels = example(4, number).labels
        program, command, text, *options = shlex.split(opened.text(".headcard pre"))
        assert program == "attnscope"
        assert command == "heatmap"
        assert text.split() == list(labels[1:18]), (
            "the run around the query in whole words: the last may go on"
        )
        assert options == ["-m", "minilm", "--pick", "L1H1", "--query", labels[query]]
    assert "20 of the 60 tokens" in opened.text(".headcard")


def test_a_saved_card_shows_how_far_a_head_looks(opened):
    opened.show(v="head", head="L1H1")
    drawn = opened.saved("svg").decode()
    said = [" ".join(text.split()) for text in re.findall(r"<text[^>]*>([^<]*)</text>", drawn)]
    assert said[0] == "L1H1"
    assert "100%" in said
    assert opened.saved("png").startswith(b"\x89PNG")
