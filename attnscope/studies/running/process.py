"""Workers that are processes of this machine, and how they are spoken to.

A process ends when the one that started it ends, however that happens: then its stdin closes.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import IO, Any

from attnscope.errors import AttnscopeError
from attnscope.host import claim_process
from attnscope.studies.running.worker import Doer, WorkerLostError
from attnscope.views.maps.process import start_python

_PATIENCE_S = 5


class LocalExecutor:
    """Processes of this machine: `n` of them, each with so many threads. They hold `files` open while they live."""

    def __init__(self, n: int, threads: int, files: tuple[int, ...] = ()) -> None:
        self.n, self._threads, self._files = n, threads, files

    def __enter__(self) -> LocalExecutor:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def worker(self) -> ProcessWorker:
        """Starts a process."""
        return ProcessWorker(self._threads, self._files)


class ProcessWorker:
    """A process that does tasks, seen from outside; see `Remote`."""

    def __init__(self, threads: int, files: tuple[int, ...] = ()) -> None:
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        how: dict[str, Any] = {} if sys.platform == "win32" else {"pass_fds": list(files)}
        try:
            self.child = start_python(__name__, env=dict.fromkeys(names, str(threads)), **how)
        except OSError as error:
            raise AttnscopeError(
                f"cannot start a process: {error.strerror or error}", "choose fewer --workers"
            ) from None

    def ask(self, message: object) -> object:
        """Sends a message, and waits for its answer."""
        assert self.child.stdin is not None and self.child.stdout is not None
        try:
            pickle.dump(message, self.child.stdin, pickle.HIGHEST_PROTOCOL)
            self.child.stdin.flush()
            return pickle.load(self.child.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            raise WorkerLostError(self._how_it_died()) from None

    def end(self) -> None:
        """Closes its stdin, by which it ends, and waits for that."""
        assert self.child.stdin is not None and self.child.stdout is not None
        with contextlib.suppress(OSError):
            self.child.stdin.close()
        self.child.wait()
        self.child.stdout.close()

    def stop(self) -> None:
        """Ends it now; it leaves no part of a file if it can still be reached."""
        with contextlib.suppress(OSError):
            self.child.terminate()
        try:
            self.child.wait(_PATIENCE_S + 1)
        except subprocess.TimeoutExpired:
            self.child.kill()

    def _how_it_died(self) -> str:
        status = self.child.wait()
        if status == -signal.SIGTERM or status >= 0:
            return f"its process ended with status {status}"
        killed = f"its process was killed by signal {-status}"
        return killed + (": perhaps for want of memory" if -status == 9 else "")


def main() -> None:
    """What the process runs: messages arrive, and are answered, until the other side closes."""
    signal.signal(signal.SIGTERM, _leave)
    claim_process()
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print must not get between the answers
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # Not sys.stdin, which python closes as it ends: it would wait in vain for who reads it.
    source = os.fdopen(os.dup(0), "rb")
    threading.Thread(target=_listen, args=(source, inbox), daemon=True).start()
    doer = Doer()
    while (message := inbox.get()) is not None:
        pickle.dump(doer.answer(message), sink, pickle.HIGHEST_PROTOCOL)
        sink.flush()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _leave(*_: object) -> None:
    """Ends this process once: what arrives as it ends would only be reported on stderr."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def _listen(source: IO[bytes], inbox: queue.SimpleQueue[Any]) -> None:
    """Puts what arrives into the inbox; at its end ends this process, in the middle of a task too."""
    try:
        while True:
            inbox.put(pickle.load(source))
    except (EOFError, OSError, pickle.UnpicklingError):
        pass
    except Exception:  # what cannot be read is never answered: whoever waits for it must see this process end
        traceback.print_exc()
    inbox.put(None)
    _thread.interrupt_main(signal.SIGTERM)  # so that a file that is being written leaves no part behind
    time.sleep(_PATIENCE_S)
    os._exit(1)
