"""What the self-check costs, as a share of what the user waits for: transformers' import, files, tokenizer, check.

    python -m benchmarks.selfcheck [FOLDER ...]

Every measurement is a process of its own, with the check and without in turn. Prints one JSON line last.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

PROGRAM = """
import json, sys, time
start = time.perf_counter()
from attnscope.models.catalog import resolve
source = resolve(sys.argv[1])
import attnscope.models.hf.assembling as engine
from attnscope.models.hf.loading import load_huggingface
loaded = time.perf_counter()
spent = []
survey_attention = engine.survey_attention
def timed(*given, **more):
    begin = time.perf_counter()
    found = survey_attention(*given, **more)
    spent.append(time.perf_counter() - begin)
    return found
engine.survey_attention = timed
model = load_huggingface(source, check=sys.argv[2] == "check")
end = time.perf_counter()
print(json.dumps({"total_s": end - start, "import_s": loaded - start, "survey_s": spent[0]}))
"""


def measure(spec: str, mode: str) -> dict[str, float]:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, spec, mode],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    return dict(json.loads(process.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("specs", nargs="*", default=["minilm"])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    results = {}
    for spec in given.specs:
        rounds = [(measure(spec, "check"), measure(spec, "skip")) for _ in range(given.rounds)]
        with_check = [one["total_s"] for one, _ in rounds]
        cost = [one["survey_s"] - other["survey_s"] for one, other in rounds]
        results[spec] = {
            "elapsed_s": round(statistics.median(with_check), 3),
            "elapsed_s_without_import": round(
                statistics.median(a["total_s"] - a["import_s"] for a, _ in rounds), 3
            ),
            "check_s": round(statistics.median(cost), 4),
            "dry_run_s": round(statistics.median(other["survey_s"] for _, other in rounds), 4),
            "check_share": round(
                statistics.median(c / t for c, t in zip(cost, with_check, strict=True)), 4
            ),
        }
        print(spec, results[spec])
    print(json.dumps({"benchmark": "selfcheck", "goal": "check_share < 0.05", "models": results}))


if __name__ == "__main__":
    main()
