"""What is said of heads in the terminal: asserted on plain values and text, never on pixels."""

import io
import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console, Group

from attnscope.questions.head_roles import MARKS, RoleGrid, choose_result_marks
from attnscope.report.terminal import show
from attnscope.results.table import Table
from attnscope.results.table import number as numbers
from attnscope.studies.heads.roles import RULES
from tests.findings_helpers import ROLES, described_findings, fake_findings, head, of, role
from tests.heads_helpers import heads_in

HOSTILE = ("[red]x[/red]", "[/]", "a\nb\x1b[31m", "$x^2_{", "[link=file:///etc]y")


def shown(drawing, found, width=80, **console):
    """What a console of a width prints; without colours unless asked for."""
    held = io.StringIO()
    settings = {"color_system": None, "force_terminal": False, "no_color": None} | console
    with_width = Console(file=held, width=width, _environ={}, **settings)
    with_width.print(drawing(found, with_width))
    return held.getvalue()


def grid(found, console):
    """The first role of each head, as --all prints it."""
    return Group(*RoleGrid(found).show(console, every=True))


def whole(found, console):
    """All that --all prints."""
    return show(found, console, every=True)


def measures(*names):
    """What --measures prints."""
    return lambda found, console: show(found, console, measures=",".join(names))


def plain(text):
    """A text without its colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def with_columns(found, **values):
    """The same with other values in columns of its heads."""
    heads = found["heads"]
    return replace(
        found, tables={**found.tables, "heads": Table(heads.columns, {**heads.values, **values})}
    )


class TestMarks:
    def test_every_known_role_has_its_own_letter_and_colour(self):
        assert set(MARKS) == {*RULES, *ROLES}
        marks = list(MARKS.values())
        assert (
            len({mark.glyph for mark in marks})
            == len({mark.color.upper() for mark in marks})
            == len(marks)
        )

    def test_known_roles_can_be_told_apart_without_one_kind_of_cone(self):
        # Machado et al. 2009, severity 1; differences in OKLab, where 0.02 is just noticeable.
        visions = [
            np.eye(3),
            [
                [0.367322, 0.860646, -0.227968],
                [0.280085, 0.672501, 0.047413],
                [-0.011820, 0.042940, 0.968881],
            ],
            [
                [0.152286, 1.052583, -0.204868],
                [0.114503, 0.786281, 0.099216],
                [-0.003882, -0.048116, 1.051998],
            ],
            [
                [1.255528, -0.076749, -0.178779],
                [-0.078411, 0.930809, 0.147602],
                [0.004733, 0.691367, 0.303900],
            ],
        ]
        to_cones = np.array(
            [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
        )
        to_lab = np.array(
            [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
        )

        def seen(color):
            parts = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
            linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
            return [
                to_lab @ np.cbrt(to_cones @ np.clip(np.array(vision) @ linear, 0, 1))
                for vision in visions
            ]

        colors = [seen(mark.color) for mark in MARKS.values()]
        for one, other in itertools.combinations(colors, 2):
            assert min(np.linalg.norm(a - b) for a, b in zip(one, other, strict=True)) > 0.07


class TestGrid:
    def test_a_letter_a_head_and_what_it_means(self):
        findings = of(
            head(0, 0, role("previous_token"), role("local")),
            head(0, 1),
            head(1, 0, role("local", tentative=True)),
            head(1, 2, role("dobj")),
        )
        lines = [line.rstrip() for line in shown(grid, findings).splitlines()]
        assert lines[:3] == ["    0   1   2", "L0  P+  ·", "L1  l       O"]
        legend = "\n".join(lines[3:])
        assert "P  previous token 1" in legend
        assert "L  local 2, first in 1" in legend
        assert "O  dobj 1" in legend
        assert "·  unclassified 1" in legend
        assert "induction" not in legend
        assert "small letter = tentative" in legend

    @pytest.mark.parametrize("width", [20, 40, 79, 80, 133])
    @pytest.mark.parametrize("n_heads", [1, 9, 12, 32, 64])
    def test_every_head_is_there_at_any_width(self, width, n_heads):
        findings = fake_findings(3, n_heads, share_without=0)
        lines = shown(grid, findings, width).splitlines()
        assert all(len(line) <= width for line in lines)
        rows = [line[3:] for line in lines if line.startswith("L1 ")]
        marks = choose_result_marks(findings)
        wanted = [marks[one.roles[0].name].glyph for one in heads_in(findings) if one.layer == 1]
        assert [letter for row in rows for letter in row if letter not in " +"] == wanted
        if (width, n_heads) in ((80, 12), (80, 32)):
            assert len(rows) == 1

    def test_kinds_stand_one_under_the_other(self):
        text = shown(grid, fake_findings(2, 4, kinds=("encoder", "decoder", "cross")))
        places = [text.index(f"{kind} attention") for kind in ("encoder", "decoder", "cross")]
        assert places == sorted(places)
        assert text.count("L1 ") == 3
        assert "attention" not in shown(grid, fake_findings(2, 4))


class TestAnswer:
    def test_heads_are_counted_once_by_their_first_role(self):
        findings = of(
            *(head(0, number, role("first_token")) for number in range(3)),
            head(1, 0, role("local"), role("first_token")),
            head(1, 1),
            run={"model": "tiny"},
        )
        lines = shown(show, findings, 200).splitlines()
        rest = "rest mostly on sinks (special tokens, the first token)"
        assert lines[0] == f"tiny: 3 of 5 heads {rest}, 1 attends to neighbours, 1 has no role"

    def test_a_line_joins_role_and_description(self):
        findings = described_findings(1, 2)
        roles = of(head(0, 0, role("local", 0.91, low=0.9, high=0.93)))["roles"]
        findings = with_columns(findings, role=np.array(["local", ""]))
        text = shown(show, replace(findings, tables={**findings.tables, "roles": roles}), 120)
        row = next(line for line in text.splitlines() if line.startswith("L0H0"))
        assert row.split()[:3] == ["L0H0", "local:", "tokens"]
        assert row.rstrip().endswith("0.91 [0.90, 0.93]  10% [5, 14]")

    def test_the_heads_with_most_to_say_come_first_and_ten_of_them(self):
        findings = described_findings(3, 5)
        named = re.findall(r"^L\dH\d", shown(show, findings), re.MULTILINE)
        assert named == findings.head_names[:4:-1]
        assert "… 5 more with --all" in shown(show, findings)

    def test_without_descriptions_the_largest_values_come_first(self):
        near = head(0, 0, role("local", 0.7))
        rare = head(0, 1, role("rare", 0.9))
        sink = head(0, 2, role("sink", 1.0))
        findings = of(near, rare, sink)
        named = re.findall(r"^L\dH\d", shown(show, findings), re.MULTILINE)
        assert named == ["L0H1", "L0H0", "L0H2"]

    def test_an_order_shows_the_number_that_it_goes_by(self):
        findings = described_findings(2, 3)
        text = shown(lambda f, console: show(f, console, sort="entropy"), findings)
        rows = [line.split() for line in text.splitlines() if re.match(r"L\dH\d", line)]
        values = [float(row[1]) for row in rows]
        assert "entropy nats" in text
        assert len(rows) == 6
        assert values == sorted(values)


class TestEvidence:
    def test_a_row_says_all_that_is_known(self):
        local = role("local", 0.91, low=0.9, high=0.93, baseline=0.2, q=0.0123, active_share=0.37)
        findings = of(head(3, 11, local, role("rare", 0.5)), head(0, 0))
        row = next(
            line for line in shown(whole, findings, 120).splitlines() if line.startswith("local ")
        )
        assert row.split()[:5] == ["local", "L3H11", "0.910", "[0.900,", "0.930]"]
        assert row.split()[5] == "0.012"
        assert row.split()[-3:] == ["0.200", "50%", "37%"]

    @pytest.mark.parametrize("width", [50, 65, 80, 99, 100, 120])
    def test_it_fits_and_every_head_is_there(self, width):
        findings = fake_findings(6, 12)
        text = shown(whole, findings, width)
        assert all(len(line) <= width for line in text.splitlines())
        assert {*re.findall(r"\bL\d+H\d+\b", text)} == {*findings.head_names}


class TestDescriptions:
    def test_heads_that_the_other_half_describes_otherwise_have_a_warning(self):
        found = described_findings(1, 4)
        assert "!" not in shown(whole, found).partition("first role")[0]
        found = with_columns(found, other_half=np.array(["", "", "other half: sentence ends", ""]))
        text = " ".join(shown(whole, found, 200).split())
        assert "! other half: sentence ends" in text
        assert "outside sinks in 2 of 3 heads; ! marks heads" in text


class TestHostileNames:
    @pytest.fixture
    def findings(self):
        made = fake_findings(
            3, 4, roles=HOSTILE, share_without=0.1, model="[bold]m[/]\x1b[2J", kinds=("[b]k",)
        )
        heads = made["heads"]
        for name in HOSTILE:
            heads = heads.with_column(numbers(name, "[red]w\x1b[31m"), heads["local"])
        options = {
            "measures": list(HOSTILE),
            "roles": {"[/]": {"what": "[red]w\x1b[31m", "measure": "x"}},
        }
        corpus = {"sources": ["[red]s\x1b[31m"], "n_texts": 3}
        return replace(made, corpus=corpus, options=options, tables={**made.tables, "heads": heads})

    def test_they_never_reach_markup_or_the_terminal(self, findings):
        for drawing in (grid, whole, lambda f, console: show(f, console, measures="all")):
            text = shown(drawing, findings, 200)
            assert "\x1b" not in text
            assert "[red]x[/red]" in text
            assert "[/]" in text
