"""Run the command `attnscope`, also as `python -m attnscope`, so that Ctrl-C always ends it in one line."""

import os
import sys

from attnscope.host import die_at_once, wait_for_imports


def main() -> None:
    """Run the command line; see `attnscope.cli.main`."""
    # NumPy's matrix products are small here: more threads would cost more than they give. Torch has threads of its own.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # If stderr is closed, print would write to stdout, and C into the next file that is opened.
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115  # pathlib takes longer to load
    try:
        wait_for_imports()
        from attnscope.cli import main as run

        run()
    # Ctrl-C before the command began, or after its last line; else the command handles it.
    except KeyboardInterrupt:
        os.write(2, b"error: interrupted\n")
        os._exit(130)  # as shells count: 128 + SIGINT
    finally:
        die_at_once()


if __name__ == "__main__":
    main()
