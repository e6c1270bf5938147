"""Run the command `attnscope`, also as `python -m attnscope`, so that Ctrl-C always ends it in one line."""

import os
import sys

from attnscope.host import delay_interrupts_in_imports, end_process_on_interrupt


def main() -> None:
    """Run the command line; see `attnscope.cli.main`."""
    # Set before NumPy is imported. Its matrix products are small here: more threads would cost more than they give.
    # Torch has threads of its own.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # If stderr is closed, sys.stderr is None, and print(file=sys.stderr) would write to stdout. The next file that is
    # opened would get the file descriptor of stderr, 2, and messages of C libraries would end up in it.
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115  # pathlib takes longer to load
    try:
        delay_interrupts_in_imports()
        from attnscope.cli import main as run

        run()
    except KeyboardInterrupt:
        # Ctrl-C came before the command began, or after it ended. In between, the command handles it.
        os.write(2, b"error: interrupted\n")
        os._exit(130)  # as shells count: 128 + SIGINT
    finally:
        # Python shuts down: from now on, Ctrl-C ends it without a traceback.
        end_process_on_interrupt()


if __name__ == "__main__":
    main()
