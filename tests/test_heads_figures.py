"""The figures of heads: where everything stands, what scales and numbers say; asserted on artists, not on pixels."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.text import Text as Written

from attnscope.drawing.style import Style
from attnscope.errors import AttnscopeError
from attnscope.report.figures import pages
from attnscope.report.head_maps import choose_scale
from attnscope.results.table import Estimate, Table, number
from tests.findings_helpers import (
    NAN,
    Head,
    described_findings,
    fake_findings,
    head,
    of,
    page_of,
    role,
    written,
)


def with_values(found, name, values):
    heads = found["heads"]
    array = np.full(len(heads), values)
    return replace(
        found, tables={**found.tables, "heads": Table(heads.columns, {**heads.values, name: array})}
    )


def stems_of(found, **how):
    """The names of a result's figures."""
    return [stem for stem, _ in pages(found, **how)]


class TestWhichFigures:
    def test_measures_that_are_named_are_drawn_large(self, tmp_path):
        found = fake_findings(2, 2)
        assert stems_of(found) == ["roles", "measures"]
        assert stems_of(described_findings(2, 2)) == ["roles", "explained", "measures"]
        stems = stems_of(found, measures="local,induction")
        assert stems[2:] == ["measure-local", "measure-induction"]
        stems = stems_of(with_values(found, "local", NAN), measures="all")
        assert len(stems) == 1 + len(found.measure_names)
        assert "measure-local" not in stems
        with pytest.raises(AttnscopeError, match="there is no measure 'lokal'"):
            found.draw(tmp_path, measures="local,lokal")
        with pytest.raises(AttnscopeError, match="nothing to draw"):
            of().draw(tmp_path)
        assert not [*tmp_path.iterdir()]

    def test_names_of_measures_stay_in_the_folder(self):
        names = ("../../x", "/etc/x", "..", "x/../x", "x", "X", "CON\x00", "ä" * 300)
        made = of(Head("encoder", 0, 0, (), 0.5, dict.fromkeys(names, Estimate(0.5))))
        stems = stems_of(made, measures="all")
        assert len({stem.lower() for stem in stems}) == len(stems) >= len(names)
        assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,100}", stem) for stem in stems)


class TestSmallMaps:
    def test_each_says_its_largest_value_and_what_it_means(self):
        found = fake_findings(2, 4)
        texts = written(page_of(found, "measures"))
        heads = found["heads"]
        best = int(heads["local"].argmax())
        assert "local" in texts
        assert "attends within 3 tokens" in texts
        assert any(
            text.startswith("largest ") and text.endswith(heads.head_names()[best]) for text in texts
        )
        assert texts.count("▲") == len(found.measure_names)

    def test_cells_that_are_not_above_the_baseline_are_pale(self):
        parts = {"low": (0.1, 0.2), "high": (0.9, 0.2)}
        made = of(
            *(
                Head(
                    "encoder", 0, n, (), 0.5, {"a": Estimate(value, baseline=even), "b": Estimate(value)}
                )
                for n, (value, even) in enumerate(parts.values())
            )
        )
        fills = [
            tuple(color[:3])
            for cells in page_of(made, "measures").axes.collections
            for color in cells.get_facecolors()
        ]
        # The first map draws its low cell a second time, paler than the second map has it.
        assert len(fills) >= 5
        assert max(map(sum, fills)) > 2.8

    @pytest.mark.parametrize("width", ["column", "page"])
    def test_of_paper_they_take_as_many_pages_as_they_need(self, width):
        found = fake_findings(30, 9)
        sheets = [page for stem, page in pages(found, Style(width=width)) if stem.startswith("measures")]
        assert len(sheets) > 1
        assert all(page.figure.get_size_inches()[1] <= 9.5 for page in sheets)
        bold = [
            text.get_text()
            for page in sheets
            for text in page.figure.findobj(Written)
            if text.get_weight() == "bold"
        ]
        titles = [text for text in bold if text[0].islower() and "·" not in text]
        assert len(titles) == len(found.measure_names)


class TestRoles:
    @pytest.mark.parametrize("kinds", [("encoder",), ("encoder", "decoder", "cross")])
    @pytest.mark.parametrize("shape", [(1, 1), (6, 12), (24, 16), (30, 9), (3, 64)])
    def test_everything_is_on_the_page(self, shape, kinds):
        found = fake_findings(*shape, kinds=kinds)
        page = page_of(found, "roles")
        letters = [one for one in page.cell_numbers if not one.text[0].isdigit()]
        assert len({(one.x, one.y) for one in letters}) == len(found["heads"])
        for text in page.axes.findobj(Written):
            x, y = text.get_position()
            assert 0 <= x <= page.width_px
            assert 0 <= y <= page.height_px

    def test_a_cell_shows_the_first_role_its_value_and_whether_there_are_more(self):
        roles = (role("local", 0.914, active_share=0.4), role("rare"), role("sink"))
        page = page_of(
            of(head(0, 0, *roles), head(0, 1), head(0, 2, role("local", tentative=True))), "roles"
        )
        assert {one.text for one in page.cell_numbers} == {"L+", "0.91", "·", "l", "0.80"}
        assert "local 2" in written(page)

    def test_hostile_names_are_shown_as_they_are(self):
        texts = written(page_of(of(head(0, 0, role("[red]x[/red]\x1b[31m"))), "roles"))
        assert any("[red]x[/red]" in text for text in texts)
        assert not any("\x1b" in text for text in texts)


class TestScales:
    def scale(self, *values, baseline=NAN):
        numbers = Table.of_arrays((number("x"),), x=values, x_baseline=[baseline] * len(values))
        return choose_scale(numbers, "x")

    def test_shares_start_at_nothing(self):
        scale = self.scale(0.1, 0.8)
        assert scale.low == 0
        assert scale.high == 0.8
        assert scale.fraction(0.2) == 0.25

    def test_what_has_two_signs_has_its_zero_in_the_middle(self):
        scale = self.scale(-3.0, 1.0)
        assert scale.low == -3
        assert scale.high == 3
        assert scale.fraction(0) == 0.5

    def test_the_baseline_is_on_the_scale(self):
        scale = self.scale(1.0, 2.0, baseline=4.0)
        assert scale.fraction(4.0) == 1
        assert scale.baseline_text == "4.00"

    @pytest.mark.parametrize("values", [(0.0,), (NAN,), (5.0, 5.0), (-2.0,), (1e-9,), (1e9, -1e9)])
    def test_odd_values_have_a_scale(self, values):
        scale = self.scale(*values)
        assert scale.high > scale.low
        assert all(0 <= scale.fraction(value) <= 1 for value in values if math.isfinite(value))


class TestLargeMaps:
    def test_numbers_are_the_values_and_the_intervals(self):
        made = of(
            Head("encoder", 0, 0, (), NAN, {"x": Estimate(0.5, 0.4, 0.6, 0.2)}),
            Head("encoder", 0, 2, (), NAN, {"x": Estimate(0.25, 0.248, 0.252, 0.2)}),
        )
        numbers = page_of(made, "measure-x").cell_numbers
        assert [one.text for one in numbers] == ["0.500", "0.400–0.600", "0.250", "0.248–0.252"]
        assert numbers[0].color != numbers[2].color
        # No column for a head that is not there.
        assert {"H0", "H2"} <= {*written(page_of(made, "measure-x"))}
        assert "H1" not in written(page_of(made, "measure-x"))

    def test_of_many_cells_the_ten_largest_have_numbers(self):
        values = np.random.default_rng(0).permutation(101) - 50.3
        values[:2] = np.nan
        heads = [
            Head("encoder", n // 10, n % 10, (), NAN, {"x": Estimate(v)})
            for n, v in enumerate(values.tolist())
        ]
        page = page_of(of(*heads), "measure-x")
        largest = sorted(values[2:], key=abs)[-10:]
        assert sorted(one.text for one in page.cell_numbers) == sorted(
            f"{v:.1f}".replace("-", "−") for v in largest
        )
        assert any("numbers: the 10 largest by absolute value" in text for text in written(page))
        assert any(text.endswith("grey: undefined") for text in written(page))
        assert len(page_of(of(*heads[:100]), "measure-x").cell_numbers) == 100

    @pytest.mark.parametrize("shape", [(1, 1), (30, 9), (64, 48)])
    def test_pages_are_wide_enough_and_everything_is_on_them(self, shape):
        found = fake_findings(*shape)
        found = replace(found, options={**found.options, "measures": ["local"]})
        for _, page in pages(found, measures="all"):
            for text in page.axes.findobj(Written):
                x, y = text.get_position()
                assert 0 <= x <= page.width_px
                assert 0 <= y <= page.height_px

    def test_what_is_undefined_is_grey_with_a_dash(self):
        known = Head("encoder", 0, 0, (), NAN, {"x": Estimate(0.5)})
        undefined = Head("encoder", 0, 1, (), NAN, {"x": Estimate(NAN)})
        made = of(known, undefined)
        page = page_of(made, "measure-x")
        assert [one.text for one in page.cell_numbers] == ["0.500", "–"]
        assert any(text.startswith("grey: undefined (–)") for text in written(page))


def test_heads_that_were_not_asked_for_have_no_row_and_no_column():
    found = fake_findings(3, 5).only([(2, 4)])
    for stem, page in pages(found, measures="local"):
        texts = {*written(page)}
        assert {"L2", "H4"} <= texts and not {"L0", "L1", "H0", "H1"} & texts, stem
