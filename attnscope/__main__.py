"""The command `attnscope`, also as `python -m attnscope`: from its first line on Ctrl-C ends it in one line."""

import os
import sys

from attnscope.host import die_at_once, wait_for_imports


def main() -> None:
    """Run the command line; see `attnscope.cli.main`."""
    # Of NumPy's matrix products, which are small here, a second thread costs more than it gives; torch has its own.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # It is closed: print would write to stdout, and C into the next file that is opened.
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115  # pathlib takes longer to load
    try:
        wait_for_imports()
        from attnscope.cli import main as run

        run()
    except KeyboardInterrupt:  # before it began, or as it was to end: nothing is left to do
        os.write(2, b"error: interrupted\n")
        os._exit(130)  # as shells count: 128 + SIGINT
    finally:
        die_at_once()


if __name__ == "__main__":
    main()
