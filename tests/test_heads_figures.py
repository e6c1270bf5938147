"""The figures of findings: where everything stands, what scales and numbers say; asserted on artists, not on pixels."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.text import Text as Written

from attnscope.drawing import head_maps as measure_figures
from attnscope.drawing.lettering import lettering_for
from attnscope.drawing.style import Style
from attnscope.errors import AttnscopeError
from attnscope.records.heads.findings import Estimate, Findings, Head
from attnscope.report.role_marks import MARKS
from attnscope.views.heads import figures as heads_figures
from tests.findings_helpers import MEASURES, NAN, ROLES, UNDEFINED, fake_findings, head, of, page_of, role, written


class TestMeasuresPage:
    def test_measures_that_no_head_has_are_named_and_not_drawn(self) -> None:
        findings = fake_findings(30, 9)
        gone = next(iter(findings.measure_names))
        heads = tuple(
            replace(one, measures=dict(one.measures) | {gone: replace(one.measures[gone], value=NAN)})
            for one in findings.heads
        )
        findings = replace(findings, heads=heads)
        lettering = lettering_for([])
        scales = {name: measure_figures.scale_of(findings, name) for name in findings.measure_names}
        (page,) = measure_figures.measures_pages(findings, scales, lettering)
        texts = page.figure.findobj(Written)
        assert not [text for text in texts if text.get_text() == gone and text.get_weight() == "bold"]
        said = " ".join(text.get_text() for text in texts)
        assert f"left out, as undefined for all heads: {gone}" in said
        assert f"{len(scales) - 1} measures" in said
        # Seen at half its size, a name of a layer still has 7 pixels.
        names = [text for text in texts if text.get_text() == "L0"]
        assert names and all(text.get_fontsize() * page.figure.dpi / 72 >= 14 for text in names)

    @pytest.mark.parametrize("width", ["column", "page"])
    def test_of_paper_they_take_as_many_pages_as_they_need(self, width: str) -> None:
        findings = fake_findings(30, 9)
        drawn = [(stem, page) for stem, page in heads_figures.pages(findings, Style(width=width), measures="local")]
        assert all(page.figure.get_size_inches()[1] <= 9.5 for _, page in drawn)
        sheets = [page for stem, page in drawn if stem.startswith("measures")]
        assert [stem for stem, _ in drawn][1 : len(sheets) + 1] == ["measures", "measures-2", "measures-3"][
            : len(sheets)
        ]
        assert len(sheets) > 1 and all(page.figure.get_size_inches()[1] <= 9 for page in sheets)
        bold = [
            text.get_text() for page in sheets for text in page.figure.findobj(Written) if text.get_weight() == "bold"
        ]
        names = sorted(text.rstrip("…") for text in bold if text[0].islower() and "·" not in text)
        assert len(names) == len(findings.measure_names)  # some are cut short
        assert all(name.startswith(short) for name, short in zip(sorted(findings.measure_names), names, strict=True))
        last = " ".join(text.get_text() for text in sheets[-1].figure.findobj(Written))
        assert "rows: layers, columns: heads" in last and f"({len(sheets)} of {len(sheets)})" in last

    def test_those_that_are_named_are_drawn_large(self, tmp_path: Path) -> None:
        findings = fake_findings(2, 2)
        stems = [stem for stem, _ in heads_figures.pages(findings, measures="local,induction")]
        assert {stem for stem in stems if stem.startswith("measure-")} == {"measure-local", "measure-induction"}
        assert [stem for stem, _ in heads_figures.pages(findings)] == ["roles", "measures"]
        nowhere = dict.fromkeys(["local"], replace(UNDEFINED))
        undefined = tuple(replace(one, measures={**one.measures, **nowhere}) for one in findings.heads)
        stems = [stem for stem, _ in heads_figures.pages(replace(findings, heads=undefined), measures="all")]
        assert len(stems) == 1 + len(findings.measure_names) and "measure-local" not in stems
        with pytest.raises(AttnscopeError, match="there is no measure 'lokal'") as refused:
            findings.draw(tmp_path, measures="local,lokal")
        assert refused.value.hint == "did you mean local?"
        assert not [*tmp_path.iterdir()]


class TestAtlas:
    def layout(self, findings: Findings) -> heads_figures.Atlas:
        return heads_figures.atlas_layout(findings, lettering_for(["abc"]))

    @pytest.mark.parametrize("kinds", [("encoder",), ("encoder", "decoder", "cross")])
    @pytest.mark.parametrize("shape", [(1, 1), (2, 4), (6, 12), (12, 12), (24, 16), (30, 9), (32, 32), (3, 64)])
    def test_everything_is_on_the_page_and_nothing_overlaps(
        self, shape: tuple[int, int], kinds: tuple[str, ...]
    ) -> None:
        atlas = self.layout(fake_findings(*shape, kinds=kinds))
        width, height = atlas.size
        assert width >= 1600
        boxes = np.array([cell.box for cell in atlas.cells])
        assert len({tuple(box[:2]) for box in boxes}) == shape[0] * shape[1] * len(kinds)
        for top, before in zip(atlas.tops[1:], atlas.tops, strict=False):
            assert top - before - shape[0] * atlas.cell[1] > 60  # room for a title and the heads' names
        assert atlas.cell[0] > boxes[:, 2].max()
        assert atlas.cell[1] > boxes[:, 3].max()
        right, low = boxes[:, 0] + boxes[:, 2], boxes[:, 1] + boxes[:, 3]
        assert right.max() <= width
        for x, y, entry in atlas.legend:
            assert x + 400 <= width
            assert y + entry.height_px <= atlas.footer_y
            assert x >= right.max() or y >= low.max()
        assert low.max() < atlas.footer_y < height

    def test_a_cell_shows_the_strongest_role_and_marks_for_the_others(self) -> None:
        roles = (role("local", 0.914, active_share=0.4), role("rare"), role("sink", tentative=True))
        cell, empty = self.layout(of(head(0, 0, *roles), head(0, 1, resting=NAN))).cells
        assert (cell.glyph, cell.value, cell.active, cell.fill) == (
            "L",
            "0.91",
            True,
            MARKS["local"].color,
        )
        assert cell.further == (("R", MARKS["rare"]), ("k", MARKS["sink"]))
        assert cell.resting == 0.5
        assert (empty.glyph, empty.value, empty.further) == ("·", "", ())

    def test_more_roles_than_fit_become_a_plus(self) -> None:
        roles = [role(name) for name in ROLES]
        cells = self.layout(of(*(head(0, number, *roles) for number in range(32)))).cells
        assert cells[0].further[-1] == ("+", None)
        assert 1 < len(cells[0].further) < len(roles) - 1

    def test_tentative_cells_are_pale_with_a_small_letter(self) -> None:
        (cell,) = self.layout(of(head(0, 0, role("local", tentative=True)))).cells
        assert cell.glyph == "l"
        assert cell.fill != MARKS["local"].color

    def test_the_legend_has_the_roles_that_occur(self) -> None:
        findings = fake_findings(4, 4, roles=("local", "induction"))
        entries = {entry.name: entry for _, _, entry in self.layout(findings).legend}
        assert list(entries) == ["local", "induction", "unclassified"]
        assert entries["induction"].lines[-1] == "induction ≥ 0.40"
        assert entries["induction"].lines[0].startswith("attends to what followed")
        n = sum(any(role.name == "local" for role in one.roles) for one in findings.heads)
        assert entries["local"].heads.startswith(f"{n} heads")

    def test_the_legend_says_what_its_heads_had_to_exceed(self) -> None:
        roles = [replace(role("diffuse"), threshold=least) for least in (0.78, 0.84)]
        findings = fake_findings(1, 2, roles=("diffuse",))
        findings = replace(findings, heads=tuple(head(0, number, one) for number, one in enumerate(roles)))
        entries = {entry.name: entry for _, _, entry in self.layout(findings).legend}
        assert entries["diffuse"].lines[-1].endswith(" ≥ 0.78 to 0.84")

    def test_what_is_drawn_is_what_was_laid_out(self) -> None:
        findings = fake_findings(3, 4, kinds=("encoder", "cross"))
        page = page_of(findings, "roles")
        texts = set(written(page))
        assert {"encoder attention", "cross attention", "minilm · what its 24 heads do", "previous token"} <= texts
        cells = self.layout(findings).cells
        wanted = [text for cell in cells for text in (cell.glyph, cell.value, *(letter for letter, _ in cell.further))]
        assert sorted(number.text for number in page.written_numbers) == sorted(text for text in wanted if text)
        assert sum(number.font == "italic" for number in page.written_numbers) == sum(cell.active for cell in cells)

    def test_it_needs_no_facts(self) -> None:
        legend = self.layout(fake_findings(2, 3, options=False)).legend
        assert all(entry.lines for _, _, entry in legend)


class TestScales:
    def scale(self, *values: float, uniform: float = NAN) -> measure_figures.Scale:
        heads = [
            Head("encoder", 0, number, (), NAN, {"x": Estimate(value, NAN, NAN, uniform, 1)})
            for number, value in enumerate(values)
        ]
        return measure_figures.scale_of(of(*heads), "x")

    def test_shares_start_at_nothing(self) -> None:
        scale = self.scale(0.1, 0.8)
        assert (scale.low, scale.high, scale.share(0.2)) == (0, 0.8, 0.25)
        assert scale.ticks == (0, 0.2, 0.4, 0.6, 0.8)

    def test_what_has_two_signs_has_its_zero_in_the_middle(self) -> None:
        scale = self.scale(-3.0, 1.0)
        assert (scale.low, scale.high, scale.share(0)) == (-3, 3, 0.5)
        assert scale.ticks == (-3, -2, -1, 0, 1, 2, 3)

    def test_what_is_far_from_zero_starts_at_a_round_number(self) -> None:
        scale = self.scale(7.1, 9.2)
        assert (scale.low, scale.ticks) == (7, (7, 7.5, 8, 8.5, 9))

    def test_uniform_is_on_the_scale(self) -> None:
        scale = self.scale(1.0, 2.0, uniform=4.0)
        assert scale.share(4.0) == 1
        assert scale.uniform_text == "4.00"

    @pytest.mark.parametrize("values", [(0.0,), (NAN,), (5.0, 5.0), (-2.0,), (1e-9,), (1e9, -1e9), ()])
    def test_odd_values_have_a_scale(self, values: tuple[float, ...]) -> None:
        scale = self.scale(*values, 0.0) if values else self.scale(NAN)
        assert scale.high > scale.low
        assert all(0 <= scale.share(value) <= 1 for value in values if math.isfinite(value))
        assert all(scale.low <= tick <= scale.high * 1.001 for tick in scale.ticks)


class TestMeasurePages:
    def test_numbers_are_the_values_and_the_intervals(self) -> None:
        estimate = {"x": Estimate(0.5, 0.4, 0.6, 0.2, 9)}
        small = {"x": Estimate(0.25, 0.248, 0.252, 0.2, 9)}
        findings = of(Head("encoder", 0, 0, (), NAN, estimate), Head("encoder", 0, 2, (), NAN, small))
        scale = measure_figures.scale_of(findings, "x")
        numbers = measure_figures.numbers_of(findings, "x", scale, {"encoder": (100, 10)}, (60, 50), 15, 9)
        assert [one.text for one in numbers] == ["0.50", "0.40–0.60", "0.25", "0.248–0.252"]
        assert numbers[0].x == pytest.approx(129)
        assert numbers[2].x == pytest.approx(189)  # no column for a head that is not there
        assert numbers[0].color != numbers[2].color
        alone = measure_figures.numbers_of(findings, "x", scale, {"encoder": (0, 0)}, (60, 50), 15, 0)
        assert [one.text for one in alone] == ["0.50", "0.25"]

    @pytest.mark.parametrize(
        ("low", "high", "said"),
        [(0, 0.031, "0.00–0.03"), (0, 0.0031, "0.000–0.003"), (0.9996, 1, "0.9996–1.0000"), (0, 0, "0.00–0.00"),
         (-0.2, 0.1, "−0.20 to 0.10"), (12.31, 12.36, "12.31–12.36"), (101.2, 140, "101–140"), (NAN, NAN, "")],
    )  # fmt: skip
    def test_intervals_have_the_decimals_that_tell_their_ends_apart(self, low: float, high: float, said: str) -> None:
        one = Head("encoder", 0, 0, (), NAN, {"x": Estimate(low, low, high, NAN, 9)})
        assert measure_figures._interval(one, "x") == said

    def test_numbers_go_where_cells_are_too_small(self) -> None:
        few, many = fake_findings(1, 32), fake_findings(1, 64)
        assert len(page_of(few, "measure-local").written_numbers) == 32
        assert not page_of(many, "measure-local").written_numbers

    def test_uniform_and_meaning_are_said(self) -> None:
        texts = written(page_of(fake_findings(2, 4), "measure-distance_tokens"))
        assert "minilm · distance_tokens" in texts
        assert "uniform 11.4 tokens" in texts
        assert any(text.startswith("mean distance to the key · 812 texts") for text in texts)

    def test_small_maps_are_there_for_all(self) -> None:
        texts = written(page_of(fake_findings(2, 4), "measures"))
        assert set(MEASURES) <= set(texts)
        assert texts.count("▲") == len(MEASURES)

    @pytest.mark.parametrize("shape", [(1, 1), (2, 4), (30, 9), (32, 32), (64, 48)])
    def test_pages_are_wide_enough_and_everything_is_on_them(self, shape: tuple[int, int]) -> None:
        findings = fake_findings(*shape)
        only = tuple(replace(one, measures={"local": one.measures["local"]}) for one in findings.heads)
        for _, page in heads_figures.pages(replace(findings, heads=only), measures="all"):
            assert page.width_px >= 1600
            for text in page.axes.findobj(Written):
                x, y = text.get_position()
                assert 0 <= x <= page.width_px
                assert 0 <= y <= page.height_px

    def test_pages_that_share_a_canvas_are_those_of_their_own(self) -> None:
        findings = fake_findings(3, 4)
        lettering = heads_figures.lettering_for(heads_figures._texts(findings))
        n_same = 0
        for stem, page in heads_figures.pages(findings, measures="all"):
            if stem.startswith("measure-"):
                name = stem.removeprefix("measure-")
                alone = measure_figures.measure_page(
                    findings, name, measure_figures.scale_of(findings, name), lettering
                )
                assert page is not alone
                np.testing.assert_array_equal(page.pixels(), alone.pixels(), err_msg=name)
                assert page.written_numbers == alone.written_numbers
                n_same += 1
        assert n_same > 5

    @pytest.mark.parametrize("picked", [[(2, head) for head in range(5)], [(2, 4)]])
    def test_layers_and_heads_that_were_not_asked_for_have_no_row_and_no_column(
        self, picked: list[tuple[int, int]]
    ) -> None:
        findings = fake_findings(3, 5).only(picked)
        for stem, page in heads_figures.pages(findings, measures="local"):
            texts = set(written(page))
            assert "L2" in texts, stem
            assert not {"L0", "L1", "L3"} & texts, stem
            assert {f"H{head}" for head in range(5)} & texts == {f"H{head}" for _, head in picked}, stem

    def test_heads_that_are_not_there_are_left_blank(self) -> None:
        findings = of(head(0, 0), head(1, 3))
        lettering = lettering_for(["abc"])
        page = measure_figures.measure_page(findings, "local", measure_figures.scale_of(findings, "local"), lettering)
        assert [len(cells.get_paths()) for cells in page.axes.collections][0] == 2
