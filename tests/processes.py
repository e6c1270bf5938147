"""Processes that tests start: none is waited for without a limit, none outlives its test.

They take Ctrl-C as the system does, however pytest was started: see conftest.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

LIMIT_S = 120
"""Seconds that a process may take; what it does takes a few on a machine that does nothing else."""


def python(*arguments: object, **how: Any) -> "subprocess.CompletedProcess[str]":
    """Runs Python in a process of its own.

    Args:
        arguments: Of the command line, such as "-c" and a program.
        how: Further arguments of `subprocess.run`.

    Returns:
        Its exit status, stdout and stderr as text.
    """
    how = {"capture_output": True, "text": True, "timeout": LIMIT_S} | how
    done: subprocess.CompletedProcess[str] = subprocess.run([sys.executable, *map(str, arguments)], **how)
    return done


def modules_after(
    arguments: Sequence[object], names: Sequence[str], **how: Any
) -> "tuple[subprocess.CompletedProcess[str], list[str]]":
    """Runs a command line of attnscope, which must succeed, in a process of its own.

    Returns:
        The process, and which of some modules it has loaded.
    """
    code = (
        "import sys\nfrom attnscope.cli import main\n"
        "names, sys.argv = sys.argv[1].split(), ['attnscope', *sys.argv[2:]]\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert not ended.code, ended.code\n"
        "print('loaded:', *(name for name in names if name in sys.modules), file=sys.stderr)"
    )
    done = python("-c", code, " ".join(names), *arguments, **how)
    assert done.returncode == 0, done.stderr
    return done, done.stderr.splitlines()[-1].split()[1:]


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
