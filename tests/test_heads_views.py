"""What the views of findings say: asserted on plain values, artists and text, never on pixels."""

import io
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console, RenderableType

from attnscope.drawing import head_maps as measure_figures
from attnscope.drawing import inks
from attnscope.errors import AttnscopeError
from attnscope.records.ablation import Effect
from attnscope.records.heads.findings import Findings
from attnscope.report.numbers import interval, number, percent
from attnscope.report.wording import corpus_line, title_of
from attnscope.studies.heads.rules import RULES
from attnscope.views.heads import figures as heads_figures
from attnscope.views.heads import summary as heads_summary
from attnscope.views.heads import terminal as heads_terminal
from tests.findings_helpers import MEASURES, NAN, ROLES, UNDEFINED, fake_findings, head, of, page_of, role, written

HOSTILE = ("[red]x[/red]", "[/]", "a\nb\x1b[31m", "$x^2_{", "[link=file:///etc]y")


def shown(
    drawing: Callable[[Findings, Console], RenderableType], findings: Findings, width: int = 80, **console: object
) -> str:
    """What a console of a width prints; without colours unless asked for."""
    held = io.StringIO()
    settings: dict = {"color_system": None, "force_terminal": False, "no_color": None} | console
    with_width = Console(file=held, width=width, _environ={}, **settings)
    with_width.print(drawing(findings, with_width))
    return held.getvalue()


def plain(text: str) -> str:
    """A text without its colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def undefined(findings: Findings) -> Findings:
    """The same where every number is NaN."""
    nothing = dict.fromkeys(("value", "low", "high", "baseline", "threshold", "p", "q"), NAN)
    heads = tuple(
        replace(
            one,
            roles=tuple(replace(role, **nothing) for role in one.roles),
            resting_share=NAN,
            measures=dict.fromkeys(one.measures, UNDEFINED),
        )
        for one in findings.heads
    )
    return replace(findings, heads=heads, options={})


class TestMarks:
    def test_every_known_role_has_its_own_letter_and_colour(self) -> None:
        assert set(heads_summary.MARKS) == {*RULES, *ROLES}
        marks = list(heads_summary.MARKS.values())
        assert len({mark.glyph for mark in marks}) == len({mark.color.upper() for mark in marks}) == len(marks)

    def test_unknown_roles_get_letters_and_colours_of_their_own(self) -> None:
        names = [f"relation_{number}" for number in range(37)]
        findings = of(head(0, 0, *(role(name) for name in (*ROLES, *names))))
        marks = heads_summary.marks_of(findings)
        assert set(marks) == {*ROLES, *names}
        assert len({mark.glyph for mark in marks.values()}) == len(marks)
        assert len({mark.color.upper() for mark in marks.values()}) == len(marks)

    def test_every_letter_has_a_small_one_for_tentative_roles(self) -> None:
        marks = heads_summary.marks_of(of(head(0, 0, *(role(f"r{number}") for number in range(90)))))
        letters = [mark.letter(role("x", tentative=True)) for mark in marks.values()]
        assert all(len(letter) == 1 and letter.islower() for letter in letters)

    def test_a_role_keeps_its_mark_whatever_else_occurs(self) -> None:
        alone, among = of(head(0, 0, role("rare"))), fake_findings(6, 12)
        assert heads_summary.marks_of(alone)["rare"] == heads_summary.marks_of(among)["rare"]

    def test_letters_come_from_the_name_where_they_are_free(self) -> None:
        marks = heads_summary.marks_of(of(head(0, 0, role("coreference"), role("dobj"))))
        assert (marks["coreference"].glyph, marks["dobj"].glyph) == ("C", "O")

    def test_known_roles_can_be_told_apart_without_one_kind_of_cone(self) -> None:
        # Machado et al. 2009, severity 1; differences in OKLab, where 0.02 is just noticeable.
        visions = [
            np.eye(3),
            [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
            [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
            [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
        ]
        to_cones = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
        to_lab = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])

        def seen(color: str) -> list[np.ndarray]:
            parts = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
            linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
            return [to_lab @ np.cbrt(to_cones @ np.clip(np.array(vision) @ linear, 0, 1)) for vision in visions]

        colors = [seen(mark.color) for mark in heads_summary.MARKS.values()]
        for one, other in itertools.combinations(colors, 2):
            assert min(np.linalg.norm(a - b) for a, b in zip(one, other, strict=True)) > 0.07

    @pytest.mark.parametrize("color", [mark.color for mark in heads_summary.MARKS.values()])
    def test_letters_can_be_read_on_their_colour(self, color: str) -> None:
        def luminance(color: str) -> float:
            parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
            r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
            return 0.2126 * r + 0.7152 * g + 0.0722 * b

        dark, light = sorted((luminance(color), luminance(inks.ink_on(color))))
        assert (light + 0.05) / (dark + 0.05) >= 4.5


class TestNumbers:
    @pytest.mark.parametrize(
        ("value", "text"),
        [(0.5, "0.50"), (-0.001, "0.00"), (-1.5, "−1.50"), (9.996, "10.0"), (99.96, "100"), (12345.6, "12,346"),
         (NAN, "–"), (math.inf, "–")],
    )  # fmt: skip
    def test_numbers_have_about_three_digits(self, value: float, text: str) -> None:
        assert number(value) == text

    def test_what_is_undefined_is_a_dash(self) -> None:
        assert interval(NAN, 0.5) == percent(NAN) == percent(None) == "–"

    def test_a_corpus_is_said_in_a_line(self) -> None:
        sources = {"sources": ["a", "b\x1b]0;x\x07", "c", "d", "e"], "n_texts": 1, "n_tokens": 1234}
        assert corpus_line(of(corpus=sources)) == "1 text, 1,234 tokens: a, b\ufffd]0;x\ufffd, c, and 2 more"
        assert corpus_line(of(corpus={"sources": None, "n_texts": None})) == ""


class TestGrid:
    def test_a_letter_a_head_and_what_it_means(self) -> None:
        findings = of(
            head(0, 0, role("previous_token"), role("local")),
            head(0, 1),
            head(1, 0, role("local", tentative=True)),
            head(1, 2, role("dobj")),
        )
        lines = [line.rstrip() for line in shown(heads_terminal.grid, findings).splitlines()]
        assert lines[:3] == ["    0   1   2", "L0  P+  ·", "L1  l       O"]
        legend = "\n".join(lines[3:])
        assert "P  previous token 1" in legend
        assert "L  local 2, first in 1" in legend
        assert "O  dobj 1" in legend
        assert "·  unclassified 1" in legend
        assert "induction" not in legend
        assert "small letter = tentative" in legend

    def test_no_hints_at_what_does_not_occur(self) -> None:
        text = shown(heads_terminal.grid, of(head(0, 0, role("local"))))
        assert "tentative" not in text
        assert "unclassified" not in text
        assert "more" not in text

    @pytest.mark.parametrize("width", [20, 40, 79, 80, 133])
    @pytest.mark.parametrize("n_heads", [1, 9, 12, 32, 64])
    def test_every_head_is_there_at_any_width(self, width: int, n_heads: int) -> None:
        findings = fake_findings(3, n_heads, share_without=0)
        lines = shown(heads_terminal.grid, findings, width).splitlines()
        assert all(len(line) <= width for line in lines)
        rows = [line[3:] for line in lines if line.startswith("L1 ")]
        marks = heads_summary.marks_of(findings)
        wanted = [marks[one.roles[0].name].glyph for one in findings.heads if one.layer == 1]
        assert [letter for row in rows for letter in row if letter not in " +"] == wanted
        if (width, n_heads) in ((80, 12), (80, 32)):
            assert len(rows) == 1

    @pytest.mark.parametrize("n_heads", [12, 32])
    def test_numbers_stand_over_their_heads(self, n_heads: int) -> None:
        findings = fake_findings(1, n_heads, share_without=0)
        numbers, row = shown(heads_terminal.grid, findings).splitlines()[:2]
        places = [at for at, letter in enumerate(row[3:], 3) if letter.isalpha()]
        for found in re.finditer(r"\d+", numbers):
            assert abs(found.start() - places[int(found[0])]) <= 1

    def test_without_colours_nothing_but_text(self) -> None:
        findings = fake_findings(6, 12)
        bare = shown(heads_terminal.grid, findings)
        assert "\x1b" not in bare
        coloured = shown(heads_terminal.grid, findings, color_system="truecolor", force_terminal=True)
        assert "\x1b[1;38;2;255;255;255;48;2;0;114;178m P" in coloured
        assert plain(coloured) == bare

    def test_no_color_is_respected(self) -> None:
        held = io.StringIO()
        console = Console(
            file=held, width=80, force_terminal=True, color_system="truecolor", _environ={"NO_COLOR": "1"}
        )
        console.print(heads_terminal.grid(fake_findings(2, 5), console))
        assert not re.search(r"\x1b\[[0-9;]*(38|48);", held.getvalue())

    def test_kinds_stand_one_under_the_other(self) -> None:
        text = shown(heads_terminal.grid, fake_findings(2, 4, kinds=("encoder", "decoder", "cross")))
        places = [text.index(f"{kind} attention") for kind in ("encoder", "decoder", "cross")]
        assert places == sorted(places)
        assert text.count("L1 ") == 3
        assert "attention" not in shown(heads_terminal.grid, fake_findings(2, 4))


class TestTable:
    def test_a_row_says_all_that_is_known(self) -> None:
        local = role("local", 0.91, low=0.9, high=0.93, baseline=0.2, q=0.0123, active_share=0.37)
        findings = of(head(3, 11, local, role("rare", 0.5)), head(0, 0))
        row = next(line for line in shown(heads_terminal.table, findings).splitlines() if " L  local" in line)
        assert row.split() == ["L", "local", "L3H11", "50%", "0.91", "[0.90,", "0.93]", "0.20", "0.012", "37%", "R"]

    def test_heads_stand_under_each_of_their_roles_the_largest_value_first(self) -> None:
        findings = of(
            head(0, 0, role("local", 0.7)),
            head(0, 1, role("rare", 0.9), role("local", 0.8)),
            head(0, 2, role("local", NAN)),
        )
        lines = shown(heads_terminal.table, findings).splitlines()
        named = [found[0] for line in lines[1:5] if (found := re.search(r"L\dH\d", line))]
        assert named == ["L0H1", "L0H0", "L0H2", "L0H1"]

    def test_what_has_no_role_is_counted_and_named(self) -> None:
        findings = of(*(head(0, number) for number in range(30)), head(1, 0, role("rare")))
        text = " ".join(shown(heads_terminal.table, findings).split())
        assert "unclassified: 30 of 31 heads: L0H0, L0H1," in text
        assert "L0H23 and 6 more" in text

    def test_nothing_found_is_said(self) -> None:
        text = shown(heads_terminal.table, of(head(0, 0), head(0, 1)))
        assert text.splitlines() == ["unclassified: 2 of 2 heads: L0H0, L0H1"]

    def test_long_lists_are_cut_and_say_so(self) -> None:
        findings = of(*(head(0, number, role("sink")) for number in range(50)))
        text = shown(heads_terminal.table, findings)
        assert text.count("L0H") == 20
        assert "and 30 more" in text

    @pytest.mark.parametrize("width", [30, 50, 65, 80, 99, 100, 120])
    def test_it_fits_and_no_number_is_cut(self, width: int) -> None:
        findings = fake_findings(6, 12)
        text = shown(heads_terminal.table, findings, width)
        assert all(len(line) <= width for line in text.splitlines())
        assert "…" not in text
        header = text.split("\n")[0].split()
        for name in ("value", "baseline", "share", "also", "otherwise"):  # each is whole, or named below
            assert name in header or name in text.split("not shown in")[1].split(";")[0]
        for one in findings.heads:
            for given in one.roles[:1]:
                assert number(given.value) in text

    def test_only_columns_that_are_shown_are_explained_and_the_effect_always_is(self) -> None:
        findings = fake_findings(6, 12)
        heads = tuple(replace(one, effects={"zero_l2": Effect(0.25, 0.2, 0.3, 9.0)}) for one in findings.heads)
        causal = {"quantity": "l2", "what": "change of the hidden states", "nothing_below": 0.01}
        findings = replace(findings, heads=heads, options={**findings.options, "causal": causal})
        for width in (60, 80, 200):
            text = " ".join(shown(heads_terminal.table, findings, width).split())
            assert " 0.250" in text
            assert "effect: change of the hidden states without the head" in text
            assert ("otherwise: if a head" in text) == (width == 200)

    def test_tentative_roles_are_said_in_a_line(self) -> None:
        text = " ".join(shown(heads_terminal.table, fake_findings(2, 5, tentative=True)).split())
        assert text.count("tentative (small letter): a role that rests on its value alone") == 1
        assert "nan" not in text

    def test_notes_tell_of_the_texts_and_the_control(self) -> None:
        findings = fake_findings(2, 5, control=True)
        problems = {"complete": False, "problems": [{"source": "x", "line": 3, "reason": "?"}]}
        findings = replace(findings, corpus=dict(findings.corpus) | problems)
        text = " ".join(shown(heads_terminal.table, findings).split())
        assert "812 texts, 41,234 tokens: alice.txt" in text
        assert re.search(r"untrained control \(random weights, same texts\), 10 heads: \d+ diffuse", text)
        assert "stopped early" in text
        assert "left out: x, line 3: ?" in text
        more = dict(findings.corpus) | {
            "problems": [*problems["problems"], {"source": "y", "line": None, "reason": ""}]
        }
        text = " ".join(shown(heads_terminal.table, replace(findings, corpus=more)).split())
        assert "left out: 2 parts of the texts; first x, line 3: ?" in text


class TestMeasureTable:
    def test_one_measure_comes_with_interval_and_uniform(self) -> None:
        text = shown(lambda findings, _: heads_terminal.measure_table(findings, ["local"]), of(head(2, 3)))
        assert text.splitlines()[0].split() == ["head", "local", "95%", "interval", "uniform"]
        assert text.splitlines()[1].split() == ["L2H3", "0.50", "[0.40,", "0.60]", "0.20"]

    @pytest.mark.parametrize("width", [24, 40, 80, 300])
    def test_many_measures_go_on_below(self, width: int) -> None:
        findings = fake_findings(2, 3)
        text = shown(lambda f, _: heads_terminal.measure_table(f, list(MEASURES)), findings, width)
        assert all(len(line) <= width for line in text.splitlines())
        tables = text.count("L1H2")
        assert (tables == 1) == (width == 300)
        for name in MEASURES:
            assert number(findings.heads[0].measures[name].value) in text

    def test_units_and_meanings_are_said(self) -> None:
        findings = fake_findings(1, 1)
        text = shown(lambda f, _: heads_terminal.measure_table(f, ["entropy_nats"]), findings)
        assert "entropy_nats: entropy of the attention weights" in text
        assert title_of(findings, "entropy_nats") == "entropy_nats"
        options = {"measures": {"rarity": {"unit": "nats"}, "local": {"unit": "share"}}}
        assert title_of(replace(findings, options=options), "rarity") == "rarity (nats)"
        assert title_of(replace(findings, options=options), "local") == "local"

    def test_a_typo_is_told_what_was_meant(self) -> None:
        with pytest.raises(AttnscopeError, match="did you mean induction"):
            heads_terminal.measure_table(fake_findings(1, 1), ["inductoin"])


class TestHostileNames:
    @pytest.fixture
    def findings(self) -> Findings:
        given = fake_findings(3, 4, roles=HOSTILE, share_without=0.1, model="[bold]m[/]\x1b[2J", kinds=("[b]k",))
        heads = tuple(replace(one, measures=dict.fromkeys(HOSTILE, one.measures["local"])) for one in given.heads)
        corpus = {"sources": ["[red]s\x1b[31m"], "n_texts": 3}
        options = {name: {"[/]": {"what": "[red]w\x1b[31m"}} for name in ("roles", "measures")}
        return replace(given, heads=heads, corpus=corpus, options=options)

    def test_they_never_reach_markup_or_the_terminal(self, findings: Findings) -> None:
        for drawing in (
            heads_terminal.grid,
            heads_terminal.table,
            lambda f, _: heads_terminal.measure_table(f, HOSTILE[:2]),
            lambda f, _: heads_terminal.measure_table(f, HOSTILE),
        ):
            text = shown(drawing, findings, 200)
            assert "\x1b" not in text
            assert "[red]x[/red]" in text
            assert "[/]" in text

    def test_files_stay_in_their_folder(self, findings: Findings, tmp_path: Path) -> None:
        names = ("../../x", "/etc/x", "..", "x/../x", "x", "X", "", "CON\x00", "ä" * 300)
        known = findings.heads[0].measures[HOSTILE[0]]
        heads = tuple(replace(one, measures=dict.fromkeys(names, known)) for one in findings.heads[:2])
        stems = [stem for stem, _ in heads_figures.pages(replace(findings, heads=heads), measures="all")]
        assert len({stem.lower() for stem in stems}) == 2 + len(names)
        assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,100}", stem) for stem in stems)

    def test_figures_show_them_as_they_are(self, findings: Findings) -> None:
        texts = written(page_of(findings, "roles"))
        assert "[red]x[/red]" in texts
        assert any("a b\ufffd[31m" in text for text in texts)
        assert not any("\x1b" in text or "\n" in text for text in texts)


class TestUndefined:
    @pytest.mark.parametrize("width", [40, 80])
    def test_the_terminal_has_dashes(self, width: int) -> None:
        findings = undefined(fake_findings(2, 5))
        for drawing in (
            heads_terminal.grid,
            heads_terminal.table,
            lambda f, _: heads_terminal.measure_table(f, ["local"]),
        ):
            text = shown(drawing, findings, width)
            assert "nan" not in text.lower()
        assert "–" in text

    def test_figures_have_dashes_and_no_scale(self) -> None:
        for _, page in heads_figures.pages(undefined(fake_findings(2, 5))):
            assert not any("nan" in text.lower() for text in written(page))
            assert not page.axes.get_images()

    def test_numbers_are_dashes(self) -> None:
        findings = undefined(fake_findings(1, 2))
        scale = measure_figures.scale_of(findings, "local")
        numbers = measure_figures.numbers_of(findings, "local", scale, {"encoder": (0, 0)}, (50, 50), 13, True)
        assert [one.text for one in numbers] == ["–", "–"]


class TestNoHeads:
    def test_no_heads_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(AttnscopeError, match="about no heads"):
            of().draw(tmp_path)

    def test_no_heads_print_nothing_odd(self) -> None:
        assert shown(heads_terminal.grid, of()).strip() == ""
        assert "0 of 0 heads" in shown(heads_terminal.table, of())
