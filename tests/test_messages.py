"""Lines that people read: short whatever was given, on stderr or nowhere."""

import subprocess
import sys

import pytest

from attnscope.errors import MOST_QUOTED, MOST_SAID, one_line
from tests.processes import LIMIT_S


@pytest.mark.parametrize(
    "given", ["x" * 10**6, "a b " * 10**5, "it's " * 10**5, 'say "it\'s" ' * 10**4, "\n\t" * 10**5]
)
def test_what_was_given_is_repeated_up_to_80_characters(given):
    line = one_line(f"there is no format {given!r} here")
    quoted = line.removeprefix("there is no format ").removesuffix(" here")
    assert len(quoted) <= MOST_QUOTED + 2 or "'" in given and len(line) <= MOST_SAID
    assert line.startswith("there is no format ") and line.endswith(" here") and "…" in line


def test_what_is_not_quoted_is_shortened_if_it_is_longer_than_a_name():
    path = "/".join(["folder"] * 30)
    assert one_line(f"cannot write {path}/heads.npz: it is a link") == f"cannot write {path}/heads.npz: it is a link"
    line = one_line(f"cannot write /{'a' * 10**6}/heads.npz: it is a link")
    assert len(line) < 130 and line.endswith("aaa/heads.npz: it is a link")
    assert len(one_line("word " * 10**5)) == MOST_SAID
    plain = "it's 'fine' and doesn't end " + "here " * 30
    assert one_line(plain) == plain.strip()


@pytest.mark.parametrize(
    "arguments",
    [
        ("heatmap", "a", "-f", "LONG"),
        ("heatmap", "a", "-m", "LONG"),
        ("heatmap", "a", "--pick", "LONG"),
        ("heatmap", "a", "--query", "LONG"),
        ("heads", "a", "--sort", "LONG"),
        ("show", "LONG"),
        ("LONG",),
        ("heatmap", "a", "-L", "LONG"),
        ("heatmap", "a", "--LONG"),
        ("heatmap", "a", "LONG"),
        ("atlas", "a", "--examples-by", "LONG"),
    ],
)
def test_no_command_repeats_a_long_argument(arguments, run):
    given = "q" * 100_000
    model = [] if "-m" in arguments or "LONG" in arguments[:2] else ["-m", "own"]
    status, _, err = run(*(word.replace("LONG", given) for word in arguments), *model)
    assert status in (1, 2) and all(len(line) <= MOST_SAID + len("error: ") for line in err.splitlines()), err[:3000]
    assert "q" * (MOST_QUOTED + 1) not in err


def test_with_stderr_closed_nothing_of_an_error_goes_to_stdout(tmp_path):
    call = 'exec "$0" -m attnscope "$@" 2>&-'
    ran = ["sh", "-c", call, sys.executable, "show", "none.npz"]
    done = subprocess.run(ran, stdout=subprocess.PIPE, cwd=tmp_path, timeout=LIMIT_S)
    assert (done.returncode, done.stdout) == (1, b"")
