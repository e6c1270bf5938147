"""Descriptions in the terminal and on cards: what is said, in which order, and that it fits."""

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from attnscope.drawing.lettering import lettering_for
from attnscope.drawing.style import Style
from attnscope.errors import UsageError
from attnscope.questions.heads import show
from attnscope.records.heads.descriptions import Descriptions, Term
from attnscope.records.heads.findings import Findings
from attnscope.views.describe.figures import _wrap_terms, cards_layout, cards_page, short_terms, texts_of
from attnscope.views.heads import figures as heads_figures
from tests.findings_helpers import CLS, described_findings, fake_findings
from tests.test_paper_figures import require_fit_for_print


def printed(found: Findings, width: int = 80, **how: Any) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(show(found, console, **how))
    return console.export_text()


def rows(text: str) -> list[str]:
    """The lines of heads: with --all those of every head."""
    after = text[max(text.find("\nevery head\n"), 0) :].partition("\nfirst role of each head\n")[0]
    return [line for line in after.splitlines() if re.match(r"L\dH\d", line)]


def test_each_head_has_a_row_that_fits_80_columns() -> None:
    text = printed(described_findings())
    assert max(map(len, text.splitlines())) <= 80
    assert [row[:4] for row in rows(text)][:2] == ["L2H3", "L2H2"] and len(rows(text)) == 10  # the most to say first
    assert "2 more with --all" in text
    text = printed(described_findings(), every=True)
    listed = rows(text)
    assert len(listed) == 12
    assert "[CLS] (27%; uniform 2%; more" in " ".join(printed(described_findings(), 200, every=True).split())
    assert "spreads evenly" in text and "%" not in listed[1]
    assert "mostly undescribed" in " ".join(text.split())
    said = " ".join(text.split())
    assert "described from 54 of 812 texts (2,000 queries): fitted on 27, scored on 27 others" in said


def test_heads_that_the_other_half_describes_otherwise_have_a_warning(tmp_path: Path) -> None:
    found = described_findings()
    assert found.descriptions is not None
    assert "!" not in "".join(rows(printed(found))) and "stability" not in printed(found)
    contents = ({"content": "near", "other_half": "sentence ends"}, {"content": "near"}, {})
    heads = [
        replace(one, **contents[number - 2] if 2 <= number < 5 else {})
        for number, one in enumerate(found.descriptions.heads)
    ]
    found = replace(found, descriptions=replace(found.descriptions, heads=tuple(heads)))
    names = [one.name for one in heads]
    said = printed(found, 400, every=True)
    warned = {row.split()[0]: row for row in rows(said) if "!" in row}
    assert [*warned] == [names[2]]
    assert "! other half: sentence ends" in warned[names[2]]
    stability = "both halves of the texts have the same first term outside sinks in 1 of 2 heads"
    assert stability in " ".join(said.split())
    described = found.descriptions
    assert described is not None and stability in str(described) and "(! other half: sentence ends)" in str(described)
    assert described.sample_line() in str(described)
    (tmp_path / "heads.json").write_text(found.to_json())
    saved = json.loads((tmp_path / "heads.json").read_text())["descriptions"]["heads"]
    assert [one.get("other_half") for one in saved[2:5]] == ["sentence ends", None, None]
    page = cards_page(found, lettering_for(texts_of(found)))
    drawn = [text.get_text() for text in page.axes.texts]
    assert sum(text.endswith("% !") for text in drawn) == 1
    assert stability in " ".join(drawn)


def test_heads_are_sorted() -> None:
    found = described_findings()
    best = rows(printed(found, sort="explained"))
    assert best[0].startswith("L2H3") and best[-1].startswith("L0H1")  # what has no share comes last
    with pytest.raises(UsageError):
        printed(found, sort="size")


def test_without_descriptions_heads_can_be_sorted_too() -> None:
    text = printed(fake_findings(2, 3), sort="layer")
    assert [row[:4] for row in rows(text)][:4] == ["L0H0", "L0H1", "L0H2", "L1H0"]


def test_too_few_texts_are_said() -> None:
    found = replace(described_findings(), descriptions=Descriptions((), 1, 8, 0))
    assert "takes at least two texts" in printed(found)


@pytest.mark.parametrize(("n_layers", "n_heads"), [(3, 4), (6, 12), (30, 9), (2, 32)])
def test_cards_stand_in_rows_of_layers_and_hold_their_words(n_layers: int, n_heads: int) -> None:
    found = described_findings(n_layers, n_heads)
    lettering = lettering_for([])
    placed = cards_layout(found, lettering)
    assert len(placed.cards) == n_layers * n_heads
    for card, head in zip(placed.cards, found.heads, strict=True):
        x, y, width, height = card.box
        assert 0 < x < x + width < placed.size[0] and 0 < y < y + height < placed.size[1]
        assert len(card.lines) <= 2
        assert all(lettering.width_px(line, 11.5) <= width for line in card.lines), (head.name, card.lines)
    assert (placed.cards[0].share, placed.cards[0].rest) == ("10%", "of 2.0 nats") and not placed.cards[1].share
    assert len(placed.strips) == n_layers
    assert len(placed.strips[0][1]) == n_heads - 1  # the one that spreads evenly has no share


def test_short_terms_leave_out_shares_and_parts() -> None:
    found = described_findings().descriptions
    assert found is not None
    assert ", ".join(short_terms(found.heads[0])) == "[CLS], at most 4 away to the left"
    assert ", ".join(short_terms(found.heads[1])) == "spreads evenly"


def test_the_figure_is_written_where_heads_are_described(tmp_path: Path) -> None:
    names = [name for name, _ in heads_figures.pages(described_findings())]
    assert names[:2] == ["roles", "descriptions"]
    assert "descriptions" not in [name for name, _ in heads_figures.pages(fake_findings(2, 2))]


def test_all_lists_every_head() -> None:
    found = described_findings()
    everything = set(re.findall(r"\bL\dH\d\b", printed(found, every=True)))
    assert everything == {head.name for head in found.heads}


@pytest.mark.parametrize(
    ("n_layers", "n_heads", "kinds"),
    [(6, 12, ("encoder",)), (30, 9, ("encoder",)), (2, 32, ("encoder", "cross")), (2, 2, ("encoder",))],
)
@pytest.mark.parametrize(("width", "inches", "points"), [("column", 3.3, 6.5), ("page", 6.9, 7.0), (3.3, 3.3, 13.0)])
def test_cards_are_as_wide_as_asked_with_letters_no_smaller(
    n_layers: int, n_heads: int, kinds: tuple[str, ...], width: str, inches: float, points: float
) -> None:
    found = described_findings(n_layers, n_heads, kinds)
    lettering = lettering_for(texts_of(found), Style(width=width, font_size=points).paper)
    require_fit_for_print(inches, points)(cards_page(found, lettering))
    cards = cards_layout(found, lettering).cards
    assert len(cards) == len(found.heads) and len({card.box for card in cards}) == len(cards)
    for card in cards:
        size = lettering.paper.letters(11.5)
        assert card.lines and all(lettering.width_px(line, size) <= card.box[2] for line in card.lines)


def test_cards_have_whole_terms_and_say_how_many_more() -> None:
    lettering = lettering_for(["abc"])
    terms = ["the previous token", "nearby capitals", "punctuation"]
    assert _wrap_terms(terms, 3, 11.5, 116, lettering) == ["the previous", "token, nearby", "capitals, +1 more"]
    assert _wrap_terms(terms, 9, 11.5, 900, lettering) == ["the previous token, nearby capitals, punctuation"]
    (line,) = _wrap_terms(["x" * 99], 1, 11.5, 116, lettering)
    assert line.endswith("…")


def test_capitals_inside_sentences_are_called_so() -> None:
    term = Term("name", "capitalised words within a sentence", 1.0, 0.3, 0.1, 0.2)
    found = described_findings().descriptions
    assert found is not None
    assert ", ".join(short_terms(replace(found.heads[0], terms=(CLS, term)))) == "[CLS], capitals inside sentences"


def test_notes_say_how_a_line_reads() -> None:
    said = " ".join(printed(described_findings(), every=True).split())
    assert "share of attention there, and under uniform attention;" in said


def test_a_head_that_is_picked_alone_has_all_its_measures_and_its_place_among_all() -> None:
    whole = described_findings()
    one = whole.heads[7]
    text = printed(whole.only([(one.layer, one.head)]), among=whole)
    table = [line.split() for line in text[text.index("rank of 12") :].splitlines()[1:]]
    table = [cells for cells in table if cells]
    assert set(re.findall(r"\bL\dH\d\b", text)) == {one.name}
    assert [cells[0] for cells in table[: len(one.measures)]] == [*one.measures]
    for (name, estimate), cells in zip(one.measures.items(), table, strict=False):
        above = sum(head.measures[name].value > estimate.value for head in whole.heads)
        assert cells[-1] == f"{1 + above}", name
        assert len(re.findall(r"\[.*?\]", " ".join(cells))) == math.isfinite(estimate.low), name
    assert "  0  1  2  3" not in text
    with pytest.raises(UsageError, match="there is no head L9H9 in these findings"):
        whole.only([(9, 9)])


def test_heads_of_another_kind_are_said_to_be_left_out_and_chosen_ones_are_not() -> None:
    found = described_findings()
    assert found.descriptions is not None
    chosen = replace(found, descriptions=replace(found.descriptions, heads=found.descriptions.heads[:3]))
    assert "not described" not in printed(chosen)
    cross = tuple(replace(one, kind="cross") for one in found.heads[:2])
    assert "2 heads are not described: only the first kind" in " ".join(
        printed(replace(found, heads=(*found.heads, *cross)), every=True).split()
    )


def test_heads_of_several_kinds_are_ranked_apart() -> None:
    whole = fake_findings(2, 3, kinds=("encoder", "decoder"))
    text = printed(whole.only([(1, 2)]), among=whole, measures="entropy_nats")
    assert text.count("rank of 6") == 2 and "encoder L1H2" in text and "decoder L1H2" in text
    assert "rank of" not in printed(whole.only([(1, 2), (0, 0)]), among=whole)
