"""What must hold whatever is given: an exit status that means something, one line of why, nothing lost, nothing left.

    python -m tests.hostile.check SEED ...

runs cases again and says what came of them.
"""

import contextlib
import faulthandler
import hashlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from attnscope.cli import main
from tests.hostile.generator import Case, Generator

LIMIT_S = 60
"""Seconds of the processor after which a case counts as hanging."""
WAIT_S = 900
"""Seconds by the clock after which it does, for one that waits: longer, as the machine may have much else to do."""
BINARY_LIMIT = 8 << 30
"""Bytes of address space that a case may take beyond what this process has already."""

RECORDS = Path(__file__).parent.parent / "records"


class Hanging(BaseException):
    """A case went on for LIMIT_S, or WAIT_S."""


def _stop(*_: object) -> None:
    raise Hanging


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Ends what takes too long, and refuses what takes too much memory."""
    import resource

    with Path("/proc/self/statm").open() as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + BINARY_LIMIT, hard))
    signals = (signal.SIGALRM, signal.SIGPROF)
    before = [signal.signal(one, _stop) for one in signals]
    signal.alarm(WAIT_S)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for one, handler in zip(signals, before, strict=True):
            signal.signal(one, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def snapshot(home: Path) -> dict[Path, str]:
    """All files below a folder, by what is in them."""
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in home.rglob("*")
        if not path.is_symlink()
    }


def run_case(case: Case, home: Path) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a case, run in this process with nothing on its stdin."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="surrogateescape") as out,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="surrogateescape") as err,
        open(os.devnull) as nothing,  # noqa: PTH123
        patch.object(sys, "argv", ["attnscope", *case.arguments]),
        patch.object(sys, "stdin", nothing),
        contextlib.chdir(home),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = 0
        try:
            with limited():
                main()
        except SystemExit as ended:
            status = int(ended.code or 0)
        for stream in (out, err):
            stream.flush()
            stream.seek(0)
        return status, out.read(), err.read()


def problems(case: Case, home: Path) -> list[str]:
    """Runs a case; what does not hold of it."""
    before = snapshot(home)
    try:
        status, out, err = run_case(case, home)
    except Hanging:
        return [f"goes on for more than {LIMIT_S} s of the processor, or waits for {WAIT_S}"]
    except BaseException as error:
        return [f"raises {type(error).__name__}: {error}"]
    found = []
    if status not in (0, 1, 2, 130):
        found.append(f"exit status {status}")
    for sign in ("Traceback", "internal error", "this is a bug", "Warning:"):
        if sign in out + err:
            found.append(f"says {sign!r}")
    if status in (1, 2) and not _tells_why(err):
        found.append("does not say why in one line")
    after = snapshot(home)
    for path in sorted({*before, *after}):
        if before.get(path) != after.get(path) and not _may_write(path, case.out, before):
            found.append(f"writes {path.relative_to(home)}")
    found += [f"leaves {path.name}" for path in after if path.name.endswith(".part")]
    return [f"{one}\n    {err.strip()[-700:]}" for one in found]


def _tells_why(err: str) -> bool:
    """Whether stderr ends in one line of why and perhaps a hint; or lists what was skipped, where the rest was done."""
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    return len(errors) == 1 and len(errors[0]) > len("error: ")


def _may_write(path: Path, out: Path | None, before: dict[Path, str]) -> bool:
    if "attnscope-out" in path.parts:  # where results go without -o
        return True
    if out is None:
        return False
    if path == out or path in out.parents:
        return path not in before or before[path] == "folder"
    return out in path.parents and path not in before


def main_of_check(seeds: list[int]) -> int:
    """Runs the cases of some seeds, and prints those that fail."""
    faulthandler.enable()
    n_failed = 0
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        generator = Generator(home, RECORDS)
        for seed in seeds:
            case = generator.case(seed)
            found = problems(case, home)
            n_failed += bool(found)
            if found or len(seeds) < 10:
                print(
                    seed, [argument[:200] for argument in case.arguments], *found, sep="\n  ", flush=True
                )
            clean(home, generator)
    print(f"{n_failed} of {len(seeds)} fail")
    return n_failed


def clean(home: Path, generator: Generator) -> None:
    """Removes what a case has left, but for the inputs."""
    import shutil

    for path in home.iterdir():
        if path != generator.inputs:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


if __name__ == "__main__":
    given = sys.argv[1:]
    first, _, last = given[0].partition("-")
    sys.exit(
        bool(
            main_of_check([*range(int(first), int(last) + 1)] if last else [int(seed) for seed in given])
        )
    )
