"""Drawing in a second process, which loads matplotlib and draws all labels while the first one loads torch."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from attnscope.drawing.style import Style
from attnscope.errors import AttnscopeError
from attnscope.host import block_interrupts, delay_interrupts, tame_matplotlib
from attnscope.questions.heatmap import Heatmap
from attnscope.results.kinds import FIGURE_FORMATS
from attnscope.views.maps.figures import Painter, sheets_of
from attnscope.views.maps.sheets import Sheet

_PATIENCE_S = 10


@dataclass(frozen=True)
class _Order:
    """Sheets to draw into a folder; without one, to prepare: the record has no weights yet."""

    record: Heatmap
    style: Style
    sheets: list[Sheet]
    formats: Sequence[str]
    folder: Path | None = None


def start_python(module: str, **options: Any) -> subprocess.Popen[bytes]:
    """Starts a process that runs `main()` of a module of attnscope, with pipes to its stdin and from its stdout.

    Ctrl-C does not reach it: the first process decides when it ends. Options are of `subprocess.Popen`.
    """
    # This very package is imported, wherever it lies; last, as its folder may hold much else.
    home = str(Path(__file__).parents[3])
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        f"import sys; sys.path.append({home!r}); from {module} import main; main()"
    )
    # -P: a numpy.py that lies where the user stands must not be imported.
    command = [sys.executable, "-P", "-c", code]
    with block_interrupts():
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)


class DrawingProcess:
    """A process that draws records.

    If it cannot be started, or dies, this process draws: slower, the same files. Use it as a context manager; it ends
    with the block. Starting costs milliseconds here, as nothing waits for it.
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError, ValueError):
            self._child = start_python("attnscope.views.maps.process")

    def __enter__(self) -> DrawingProcess:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._child is not None:
            if raised[0] is not None:
                self._end()
            with contextlib.suppress(OSError, ValueError):  # its pipes are closed where it was ended before
                self._child.communicate()

    def _end(self) -> None:
        """Ends the process, and waits: it ends what it is writing, so that no part of a file stays."""
        assert self._child is not None
        self._child.terminate()
        with delay_interrupts(), contextlib.suppress(OSError, ValueError):
            try:
                self._child.communicate(timeout=_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.communicate()

    def expect(self, record: Heatmap, style: Style, query: str | None, formats: Sequence[str]) -> None:
        """Lets the process draw all that does not depend on the weights, which `record` need not have yet."""
        figures = [name for name in formats if name in FIGURE_FORMATS]
        self._send(_Order(record, style, sheets_of(record, query), figures))

    def draw(
        self, record: Heatmap, folder: Path, formats: Sequence[str], *, style: Style, query: str | None
    ) -> list[Path]:
        """Draws its figures into a folder."""
        order = _Order(record, style, sheets_of(record, query), formats, folder)
        if self._send(order):
            assert self._child is not None and self._child.stdout is not None
            answer: list[Path] | AttnscopeError | None = None
            try:
                with contextlib.suppress(Exception):  # what is no whole pickle can raise anything
                    answer = pickle.load(self._child.stdout)
            except BaseException:
                self._end()  # else it would go on to write into a folder that is removed
                raise
            if isinstance(answer, AttnscopeError):
                raise answer
            if isinstance(answer, list):
                return answer
        return Painter(style).draw(record, order.sheets, folder, formats)

    def _send(self, message: object) -> bool:
        if self._child is None or self._child.stdin is None:
            return False
        try:
            pickle.dump(message, self._child.stdin, pickle.HIGHEST_PROTOCOL)
            self._child.stdin.flush()
        except OSError:
            return False
        return True


def serve(source: IO[bytes], sink: IO[bytes]) -> None:
    """Draws what arrives, until the other side closes."""
    painters: dict[Style, Painter] = {}
    with contextlib.suppress(EOFError):
        while True:
            order: _Order = pickle.load(source)
            try:
                painter = painters.setdefault(order.style, Painter(order.style))
                if order.folder is None:
                    painter.prepare(order.record, order.sheets, order.formats)
                    continue
                answer: object = painter.draw(order.record, order.sheets, order.folder, order.formats)
            except AttnscopeError as error:
                if order.folder is None:
                    continue  # drawing says it again
                answer = error
            pickle.dump(answer, sink)
            sink.flush()


def main() -> None:
    """Runs in the process."""
    tame_matplotlib()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except Exception:
        # The first process then draws by itself, and says what is wrong if that fails too.
        if os.environ.get("ATTNSCOPE_TRACEBACK"):
            raise
        sys.exit(1)
