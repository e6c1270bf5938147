"""That the tests mean the same however they are started, and wherever they run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import variants
from tests.processes import python, started


def test_ctrl_c_reaches_what_a_test_starts_though_pytest_was_to_ignore_it():
    code = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"  # as from a shell without job control
        "import tests.conftest\n"
        "tests.conftest.pytest_configure()\n"
        "ask = 'import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)'\n"
        "exec(ask, {})\n"
        "sys.stdout.flush()\n"
        "subprocess.run([sys.executable, '-c', ask], check=True)\n"
    )
    assert python("-c", code, check=True).stdout.split() == ["True", "True"]


def test_nothing_of_a_process_outlives_its_block():
    waits = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    )
    with started(
        [sys.executable, "-c", waits], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "1\n"
    assert run.returncode is not None
    with pytest.raises(ProcessLookupError):  # but for one that the system has yet to bury
        while True:
            os.killpg(run.pid, 0)


def test_the_tests_of_numbers_are_where_they_are_said_to_be():
    for name in variants.NUMERIC:
        module, _, test = name.removesuffix(".py").partition(".py::")
        assert f"def {test}" in (Path(__file__).parent / f"test_{module}.py").read_text("utf-8"), name


@pytest.mark.slow
@pytest.mark.timeout(len(variants.variants()) * variants.LIMIT_S)
def test_numbers_hold_on_other_processors_and_threads():
    """See tests.variants."""
    done = python("-m", "tests.variants", timeout=len(variants.variants()) * variants.LIMIT_S)
    assert done.returncode == 0, done.stdout
