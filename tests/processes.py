"""Processes that tests start: none is waited for without a limit, none outlives its test.

They take Ctrl-C as the system does, however pytest was started: see conftest.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

LIMIT_S = 900
"""Seconds after which a process is given up as one that hangs. On a busy machine all take long."""


def python(*arguments: object, **how: Any) -> "subprocess.CompletedProcess[str]":
    """Runs Python in a process of its own.

    Args:
        arguments: Of the command line, such as "-c" and a program.
        how: Further arguments of `subprocess.run`.

    Returns:
        Its exit status, stdout and stderr as text.
    """
    how = {"capture_output": True, "text": True, "timeout": LIMIT_S} | how
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [sys.executable, *map(str, arguments)], **how
    )
    return done


def modules_after(
    *lines: Sequence[object], **how: Any
) -> "tuple[subprocess.CompletedProcess[str], set[str]]":
    """Runs command lines of attnscope, which must all succeed, in a process of their own.

    Returns:
        The process, and the modules that it has loaded.
    """
    code = (
        "import json, sys\nfrom attnscope.cli import main\n"
        "for line in json.loads(sys.argv[1]):\n    sys.argv = ['attnscope', *line]\n"
        "    try:\n        main()\n    except SystemExit as ended:\n        assert not ended.code, line\n"
        "print('loaded:', *sys.modules, file=sys.stderr)"
    )
    done = python("-c", code, json.dumps([[*map(str, line)] for line in lines]), **how)
    assert done.returncode == 0, done.stderr
    return done, set(done.stderr.splitlines()[-1].split())


def least(measure: Callable[[], int], bound: float, tries: int = 3) -> int:
    """The first of some measurements that is below a bound, else the least: what else happens can only add."""
    values = []
    while not values or (values[-1] >= bound and len(values) < tries):
        values.append(measure())
    return min(values)


@contextlib.contextmanager
def started(command: Sequence[str], **how: Any) -> "Iterator[subprocess.Popen[Any]]":
    """Starts a process in a session of its own; at the end of the block what is left of the session is killed.

    Args:
        command: What to run.
        how: Further arguments of `subprocess.Popen`.
    """
    run = subprocess.Popen(command, start_new_session=True, **how)
    try:
        yield run
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait(LIMIT_S)
        for pipe in (run.stdin, run.stdout, run.stderr):
            if pipe is not None:
                pipe.close()
