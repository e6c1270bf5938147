"""Runs the benchmark: attnscope on every model whose heads are known, scored on texts that it did not see.

    python -m benchmarks.known                       # everything, on two cores; writes docs/known-answers.json and .md
    python -m benchmarks.known --small               # two minutes: a few models of each part; writes nothing
    python -m benchmarks.known --smollm2 FOLDER      # SmolLM2-135M too

Each model is a job of its own, so that equal seeds give equal results whatever runs beside it. Results of finished jobs
are kept in --out, and taken from there when a run goes on.
"""

import argparse
import json
import os
from pathlib import Path

from benchmarks.known import page
from benchmarks.known.running import PARTS, jobs, run

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Parse options, runs, and write the page."""
    parser = argparse.ArgumentParser(
        description="Known answers: attnscope on models whose heads are known."
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="which parts, with commas between")
    parser.add_argument("--small", action="store_true", help="a few models of each part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smollm2", help="a folder with SmolLM2-135M")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, help="folder for the results of single models")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    todo = jobs(options.parts.split(","), options.small, options.seed, options.smollm2)
    results = run(todo, options.out, options.workers)
    summary = page.summarize_run(results, options.seed)
    if not options.small and set(options.parts.split(",")) == set(PARTS):
        page.write(summary, ROOT / "docs")
    print(json.dumps(summary["parts"]))


if __name__ == "__main__":
    main()
