"""Lines that people read: short whatever was given, on stderr or nowhere."""

import subprocess
import sys

import pytest

from attnscope.errors import MAX_MESSAGE_CHARACTERS, MAX_QUOTE_CHARACTERS
from tests.processes import LIMIT_S


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
    assert status in (1, 2), err[:3000]
    assert all(len(line) <= MAX_MESSAGE_CHARACTERS + len("error: ") for line in err.splitlines())
    assert "q" * (MAX_QUOTE_CHARACTERS + 1) not in err


def test_with_stderr_closed_nothing_of_an_error_goes_to_stdout(tmp_path):
    call = 'exec "$0" -m attnscope "$@" 2>&-'
    ran = ["sh", "-c", call, sys.executable, "show", "none.npz"]
    done = subprocess.run(ran, stdout=subprocess.PIPE, cwd=tmp_path, timeout=LIMIT_S)
    assert done.returncode == 1
    assert done.stdout == b""
