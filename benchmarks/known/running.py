"""The benchmark's models as jobs: each is known, verified, described and scored on its own."""

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

PARTS = ("planted", "grown", "real")
PLANTED_SEEDS = 11
Job = tuple[str, str, int]
"""A part, which of its models, and the seed."""


def jobs(parts: Sequence[str], small: bool, seed: int, smollm2: str | None) -> list[Job]:
    """Return all models, those that take longest first."""
    from benchmarks.known import grown
    from benchmarks.known.families import FAMILIES

    made: list[Job] = []
    if "planted" in parts:
        made += [
            ("planted", family, seed + n)
            for n in range(1 if small else PLANTED_SEEDS)
            for family in FAMILIES
        ]
    if "grown" in parts:
        made += [("grown", task.name, seed) for task in grown.TASKS[: 1 if small else None]]
    if "real" in parts:
        made += [("real", name, seed) for name in ("minilm", *([smollm2] if smollm2 else []))][
            : 1 if small else None
        ]
    return made


def run_job(job: Job) -> dict[str, Any]:
    """One model: what is known of it is verified, attnscope answers, and is scored."""
    import torch

    from benchmarks.known import causes, grown, planted, real
    from benchmarks.known.scores import score_tool
    from benchmarks.known.tools import Attnscope
    from benchmarks.known.truth import attention_of, verify

    torch.set_num_threads(1)
    part, name, seed = job
    began = time.process_time()
    if part == "planted":
        known = planted.plant(name, seed)
    elif part == "grown":
        ((task, weights, told),) = [one for one in grown.load() if one[0].name == name]
        known = grown.known_model(task, weights, told)
    else:
        known = real.known_model(name)
    attention, held_out = attention_of(known, known.texts), attention_of(known, known.held_out)
    verify(known, held_out)
    scored = score_tool(Attnscope(), known, attention, held_out, seed)
    return {
        "job": job,
        "model": known.name,
        "heads": [asdict(score) for score in scored],
        "causes": causes.score(known),
        "cpu_s": round(time.process_time() - began, 2),
    }


def run(todo: Sequence[Job], out: Path | None, workers: int) -> list[dict[str, Any]]:
    """Return the results of all jobs, in their order; finished ones are kept in `out`."""
    done: dict[Job, dict[str, Any]] = {}
    for job in todo:
        if out is not None and (file := _file(out, job)).exists():
            done[job] = json.loads(file.read_text("utf-8"))
    waiting = [job for job in todo if job not in done]
    if workers > 1 and len(waiting) > 1:
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            futures = {pool.submit(run_job, job): job for job in waiting}
            for future in as_completed(futures):
                _keep(futures[future], future.result(), done, out)
    else:
        for job in waiting:
            _keep(job, run_job(job), done, out)
    return [done[job] for job in todo]


def _keep(job: Job, result: dict[str, Any], done: dict[Job, dict[str, Any]], out: Path | None) -> None:
    done[job] = json.loads(json.dumps(result))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        _file(out, job).write_text(json.dumps(result), "utf-8")
    print(f"{result['model']}: {result['cpu_s']} s of processor time", file=sys.stderr, flush=True)


def _file(out: Path, job: Job) -> Path:
    return out / ("-".join(map(str, (job[0], Path(job[1]).name, job[2]))).replace(" ", "_") + ".json")
