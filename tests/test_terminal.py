"""Records in the terminal: within its width, in its colours, and with nothing in them that it would obey."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from attnscope.questions.heatmap_terminal import show
from attnscope.questions.links import compute_sink_share, find_strongest_links
from tests.record_helpers import map_of, record_of, simple, tokens_of

ESC = "\x1b"


def printed(record, width=80, query=None, colour=False, encoding="utf-8"):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding, errors="backslashreplace", newline="\n")
    console = Console(
        file=file, width=width, force_terminal=colour, color_system="truecolor" if colour else None
    )
    console.print(show(record, console, query=query))
    file.flush()
    return raw.getvalue().decode(encoding)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize(
    "record",
    [
        simple(1, heads=1),
        simple(16, heads=12),
        simple(16, layers=1, heads=2),
        simple(40, layers=1, heads=5),
        simple(150, layers=1, heads=1),
        simple(150, layers=1, heads=6),
        record_of(map_of(tokens_of(["字" * 30, "x" * 200, "👩\u200d👧", "y"]))),
    ],
    ids=["one", "layers", "two heads", "40 tokens", "150 large", "150 small", "wide labels"],
)
def test_nothing_is_wider_than_the_terminal(record, width):
    lines = printed(record, width, "@0").splitlines()
    assert max(cell_len(line) for line in lines) <= width
    # And a map's row is one line: none is broken by its own blanks.
    maps = [line for line in lines if set(line) <= set(" ·░▒▓█")]
    assert len(maps) <= len(record.chosen(record.maps[0])) * (len(record.tokens) + 1) + 20


def test_a_map_has_a_line_a_query_and_its_own_shades():
    record = simple(4, layers=1, heads=1)
    record.maps[0].weights[0, 0] = [
        [1, 0, 0, 0],
        [0.04, 0.06, 0.3, 0.6],
        [0.25, 0.25, 0.25, 0.25],
        [0, 0, 0.2, 0.8],
    ]
    lines = printed(record).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("L0H0"))
    assert lines[start + 1].split() == ["0"]
    body = [line[11:] for line in lines[start + 2 : start + 6]]
    assert [line.rstrip() for line in body] == ["██", "  ··░░▓▓", "░░░░░░░░", "    ░░██"]
    assert [line.split()[:2] for line in lines[start + 2 : start + 6]] == [
        ["[CLS]", "0"],
        ["t1", "1"],
        ["t2", "2"],
        ["[SEP]", "3"],
    ]


def test_no_colour_means_no_escape_codes(monkeypatch):
    record = simple(6, layers=1, heads=2)
    assert ESC not in printed(record, query="t1")
    assert ESC in printed(record, colour=True)
    monkeypatch.setenv("NO_COLOR", "1")
    out = printed(record, colour=True)
    assert "38;2" not in out
    assert "48;2" not in out
    assert "█" in out


def test_colours_are_the_weights():
    record = simple(2, layers=1, heads=1)
    record.maps[0].weights[0, 0] = [[1, 0], [0.5, 0.5]]
    out = printed(record, colour=True)
    assert "48;2;8;48;107m" in out
    assert "48;2;255;255;255m" in out
    assert "48;2;132;152;181m" in out


# What is said of heads


@given(
    st.integers(1, 9),
    st.integers(0, 50),
    st.sets(st.integers(0, 8)),
    st.sampled_from(["encoder", "decoder", "cross"]),
)
def test_strongest_links_are_those_of_a_plain_search(n, seed, special, kind):
    attention = map_of(tokens_of([f"t{i}" for i in range(n)], sorted(special)), kind=kind, seed=seed)
    weights = attention.of(1, 2)
    sinks = special | ({0} if kind == "decoder" else set())
    links = sorted(
        (-float(weights[q, k]), q, k)
        for q in range(n)
        for k in range(n)
        if q not in sinks and k not in sinks and (q != k or kind == "cross") and weights[q, k] >= 0.005
    )
    assert find_strongest_links(record_of(attention), attention, (1, 2)) == [
        (q, k, -w) for w, q, k in links[:3]
    ]


def test_the_share_of_special_tokens_leaves_out_rows_that_attend_to_nothing():
    record = simple(4, layers=1, heads=1)
    record.maps[0].weights[0, 0] = [[0.5, 0, 0, 0.5], [0.1, 0.4, 0.4, 0.1], [0, 0, 0, 0], [0, 1, 0, 0]]
    assert compute_sink_share(record, record.maps[0], (0, 0)) == pytest.approx((1 + 0.2 + 0) / 3)
    record.maps[0].weights[:] = 0
    assert compute_sink_share(record, record.maps[0], (0, 0)) == 0


def test_tables_name_links_and_what_a_query_attends_to():
    record = simple(5, layers=1, heads=1)
    record.maps[0].weights[0, 0] = 0
    record.maps[0].weights[0, 0, 2, [1, 3, 0]] = [0.6, 0.3, 0.1]
    record.maps[0].weights[0, 0, 3, 3] = 0.9
    out = printed(record, query="t2")
    assert (
        "t2 → t1 0.60   t2 → t3 0.30\n" in "\n".join(line.rstrip() for line in out.splitlines()) + "\n"
    )
    assert "what “t2” (token 2) attends to" in out
    assert "L0H0  t1 0.60   t3 0.30   [CLS] 0.10" in out


def test_of_many_heads_those_are_listed_in_which_the_query_attends_elsewhere():
    record = record_of(map_of(tokens_of(["When", "Mary", "it"]), kind="decoder", layers=10, heads=3))
    weights = record.maps[0].weights
    weights[:, :, 2] = [0.7, 0, 0.3]  # the first token is a sink, and the last the query itself
    weights[2:, :, 2] = [0.1, 0.5, 0.4]
    weights[7, 1, 2] = [0.1, 0.9, 0]
    out = printed(record, query="it")
    table = out[out.index("what “it”") :]
    assert "L7H1  Mary 0.90" in table
    assert "L0H0" not in table
    assert table.count("Mary") == 24
    assert "the 24 of 30 heads with the largest weight on another token outside sinks" in " ".join(
        table.split()
    )
    assert out.strip().startswith("what “it”")  # the maps would hide it


def test_each_kind_of_attention_is_named():
    source = tokens_of(["a", "b"])
    target = tokens_of(["x"])
    maps = map_of(source), map_of(target, kind="decoder"), map_of(target, source, kind="cross")
    out = printed(record_of(*maps))
    assert [kind for kind in ("encoder", "decoder", "cross") if f"{kind} attention" in out] == [
        "encoder",
        "decoder",
        "cross",
    ]


# What a terminal would obey


HOSTILE = [
    "[bold]",
    "[/]",
    "[red]x[/red]",
    "[link=http://x]",
    ":smile:",
    "\x1b[31m",
    "\x1b]0;x\x07",
    "\x9b1m",
    "\u202e",
    "\r\n",
]


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("heads", [1, 5])
def test_labels_are_shown_literally(heads, colour):
    tokens = tokens_of(HOSTILE)
    record = record_of(map_of(tokens, layers=1, heads=heads), text="\x1b[2J")
    for place in range(len(HOSTILE)):
        out = printed(record, 200, f"@{place}", colour)
        for harm in ("\x1b[31m", "\x1b]0", "\x07", "\x9b", "\u202e", "\r", "\x1b[2J"):
            assert harm not in out
        shown = "".join(c if c.isprintable() else f"<U+{ord(c):04X}>" for c in HOSTILE[place])
        assert f"what “{shown}” (token {place})" in out
