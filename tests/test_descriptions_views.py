"""Descriptions in the terminal and on cards: what is said, in which order, and that it fits."""

import io
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from attnscope.errors import UsageError
from attnscope.records.descriptions import Descriptions, HeadDescription, Term
from attnscope.records.findings import Findings
from attnscope.views import heads_figures
from attnscope.views.descriptions_figures import cards_layout, short_words
from attnscope.views.heads_terminal import show
from attnscope.views.lettering import lettering_for
from tests.findings_helpers import fake_findings

CLS = Term("special:[CLS]", "[CLS]", 3.0, 0.27, 0.02, 0.9)
NEAR = Term("within_left", "tokens at most 4 away to the left", 2.0, 0.46, 0.1, 0.3)
MORE = Term("special:[CLS] by rarity", "from rare tokens", 2.0, math.nan, math.nan, 0.2, part_of="special:[CLS]")


def described(n_layers: int = 3, n_heads: int = 4) -> Findings:
    found = fake_findings(n_layers, n_heads)
    heads = []
    for n, head in enumerate(found.heads):
        explained = 0.1 + 0.8 * n / len(found.heads)
        one = HeadDescription(
            head.kind,
            head.layer,
            head.head,
            (CLS, NEAR, MORE),
            2.0,
            explained,
            explained - 0.05,
            explained + 0.04,
            0.95,
        )
        heads.append(one)
    heads[1] = replace(heads[1], terms=(), nats=0.04, explained=math.nan, low=math.nan, high=math.nan)
    return replace(found, descriptions=Descriptions(tuple(heads), 54, 2000, 27))


def printed(found: Findings, width: int = 80, **how: str) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    show(found, console, **how)
    return console.export_text()


def rows(text: str) -> list[str]:
    """The table of descriptions: its first lines of each head."""
    after = text[text.index("what it does") :]
    return [line for line in after.splitlines() if line.startswith("L")]


def test_each_head_has_a_row_that_fits_80_columns() -> None:
    text = printed(described())
    assert max(map(len, text.splitlines())) <= 80
    listed = rows(text)
    assert len(listed) == 12
    assert " ".join(listed[0].split()).startswith("L0H0 2.00 10% 5-14 [CLS] (27%; even 2%; more")
    assert listed[1].rstrip().endswith("spreads evenly") and "%" not in listed[1]
    assert "mostly undescribed" in " ".join(text.split())
    assert "27 texts and tried on 27 others (2,000 queries)" in " ".join(text.split())
    assert "sinks known" not in text
    assert "sinks known" in printed(described(), 120)


def test_heads_are_chosen_and_sorted() -> None:
    found = described()
    best = rows(printed(found, sort="explained"))
    assert best[0].startswith("L2H3") and best[-1].startswith("L0H1")  # what has no share comes last
    assert [row[:4] for row in rows(printed(found, where="explained > 0.8"))] == ["L2H3"]
    assert "no head fulfils the condition" in printed(found, where="explained > 2")
    with pytest.raises(UsageError):
        printed(found, where="explained >")


def test_without_descriptions_heads_can_be_chosen_too() -> None:
    text = printed(fake_findings(2, 3), where="layer == 1")
    assert "chosen: L1H0, L1H1, L1H2" in text
    assert "what it does" not in text


def test_too_few_texts_are_said() -> None:
    found = replace(described(), descriptions=Descriptions((), 1, 8, 0))
    assert "takes at least two texts" in printed(found)


@pytest.mark.parametrize(("n_layers", "n_heads"), [(3, 4), (6, 12), (30, 9), (2, 32)])
def test_cards_stand_in_rows_of_layers_and_hold_their_words(n_layers: int, n_heads: int) -> None:
    found = described(n_layers, n_heads)
    lettering = lettering_for([])
    placed = cards_layout(found, lettering)
    assert len(placed.cards) == n_layers * n_heads
    for card, head in zip(placed.cards, found.heads, strict=True):
        x, y, width, height = card.box
        assert 0 < x < x + width < placed.size[0] and 0 < y < y + height < placed.size[1]
        assert len(card.lines) <= 2
        assert all(lettering.width_px(line, 11.5) <= width for line in card.lines), (head.name, card.lines)
    assert placed.cards[0].share == "10% of 2.0" and not placed.cards[1].share
    assert len(placed.strips) == n_layers
    assert len(placed.strips[0][1]) == n_heads - 1  # the one that spreads evenly has no share


def test_short_words_leave_out_shares_and_parts() -> None:
    found = described().descriptions
    assert found is not None
    assert short_words(found.heads[0]) == "[CLS], at most 4 away to the left"
    assert short_words(found.heads[1]) == "spreads evenly"


def test_the_figure_is_written_where_heads_are_described(tmp_path: Path) -> None:
    names = [name for name, _ in heads_figures.pages(described())]
    assert names[:2] == ["roles", "descriptions"]
    assert "descriptions" not in [name for name, _ in heads_figures.pages(fake_findings(2, 2))]


def test_a_condition_leaves_out_all_other_heads() -> None:
    found = described()
    text = printed(found, where="layer == 2 and head > 1", measures="entropy_nats")
    assert text.startswith("2 of 12 heads")
    named = set(re.findall(r"\bL\dH\d\b", text))
    assert named == {"L2H2", "L2H3"}
    letters = next(line for line in text.splitlines() if line.startswith("L0 "))
    assert letters.split() == ["L0"]  # the others are blank in the grid
    assert printed(found, where="explained > 2").strip() == "no head fulfils the condition"
    everything = set(re.findall(r"\bL\dH\d\b", printed(found)))
    assert everything == {head.name for head in found.heads}


def test_an_own_feature_that_is_found_nowhere_is_said() -> None:
    found = described()
    assert found.descriptions is not None
    found = replace(found, descriptions=replace(found.descriptions, unmatched=("months",)))
    assert "Your feature months was found nowhere in the sampled texts." in " ".join(printed(found).split())
