"""Compare what every question answers here with what it answered at an earlier commit.

    python -m benchmarks.before --models minilm,own,smollm2=/path/to/folder

Checks the earlier commit out into a worktree, runs each question in both trees, and compares what they write: columns
of CSV, arrays and records of npz, and the pixels of figures. Columns and fields that only one side has are listed,
not compared. It prints one JSON line last.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

HERE = Path(__file__).resolve().parent.parent
COMMIT = "d78a52e4"
TOLERANCE = 1e-6
"""Largest difference of two numbers that count as equal, relative to the larger of 1 and the number."""

TIRED = "The animal didn't cross the street because it was too tired."
WIDE = "The animal didn't cross the street because it was too wide."
LONG = "The keys of the old house, which nobody had opened for years, were lying under the stone beside the door."
NOT_COMPARED = {
    "versions",
    "elapsed_s",
    "seconds",
    "time",
    "attnscope",
    "threads",
    "path",
    "created",
    "road",
    "sha256",
}
"""Fields of a record that tell of the run, not of the answer."""


@dataclass(frozen=True)
class Question:
    """A command line: the name of its output folder, its arguments, and what its model must be."""

    name: str
    arguments: tuple[str, ...]
    needs: str = "text"
    formats: str | None = None


def questions(samples: Path, pairs: Path, photo: str | None) -> Iterator[Question]:
    """Yield every question that both commits can be asked, with the kind of model that it needs."""
    sentences = str(samples / "sentences.txt")
    alice = ("--file", str(samples / "alice.txt"), "--split", "paragraph")
    yield Question("heatmap", ("heatmap", TIRED), formats="png,npz,json")
    yield Question(
        "heatmap-words", ("heatmap", LONG, "--words", "--hide-special", "-L", "0-1"), formats="png,npz"
    )
    yield Question(
        "heatmap-query", ("heatmap", TIRED, "--pick", "L1H1", "--query", "it"), formats="png,svg,npz"
    )
    yield Question(
        "heatmap-rows", ("heatmap", *alice[:2], "--pick", "L1H1", "--rows", "8:20"), formats="png,npz"
    )
    yield Question("rollout", ("rollout", TIRED))
    yield Question("compare-texts", ("compare", TIRED, "--with", WIDE))
    yield Question("heads", ("heads", *alice), formats="png,npz")
    yield Question("heads-probe", ("heads", "--probe", "repeat", "--no-describe"), needs="causal")
    yield Question("atlas", ("atlas", "--file", sentences), formats="html,npz")
    treebank = str(samples / "dependencies.conllu")
    yield Question("relations", ("relations", treebank))
    yield Question("relations-python", ("relations", str(samples / "library.py"), "--chunk", "40"))
    yield Question("why", ("why", TIRED, "--pick", "L1H1", "--query", "it", "--key", "animal"))
    yield Question("ablate", ("ablate", "--file", sentences))
    yield Question("ablate-importance", ("ablate", "--file", sentences, "--importance"))
    yield Question("patch", ("patch", str(pairs / "agreement.jsonl")), needs="causal")
    yield Question("weights", ("weights",))
    yield Question("trace", ("trace", "The cat sat on the mat.", "-L", "1", "-H", "1", "--token", "cat"))
    yield Question("split", ("split", "The cat sat on the mat.", "-L", "1"))
    yield Question("batch", ("batch", sentences), formats="png,npz")
    if photo:
        yield Question(
            "picture", ("heatmap", "--image", photo, "-L", "0,5"), needs="picture", formats="png,npz"
        )


@dataclass
class Comparison:
    """What two folders of output have in common, and what they have not."""

    n_numbers: int = 0
    largest: float = 0.0
    differences: list[str] = field(default_factory=list)
    only_before: set[str] = field(default_factory=set)
    only_after: set[str] = field(default_factory=set)
    n_figures: int = 0
    unequal_figures: list[str] = field(default_factory=list)

    def compare_numbers(self, where: str, before: np.ndarray, after: np.ndarray) -> None:
        """Compare two arrays of numbers of one shape."""
        self.n_numbers += before.size
        if not before.size:
            return
        scale = np.maximum(1.0, np.nan_to_num(np.abs(before), nan=1.0, posinf=1.0))
        equal = (before == after) | (np.isnan(before) & np.isnan(after))
        with np.errstate(invalid="ignore"):
            distance = np.where(equal, 0.0, np.abs(before - after) / scale)
        distance = np.where(np.isnan(distance), np.inf, distance)
        worst = float(distance.max())
        self.largest = max(self.largest, worst if math.isfinite(worst) else 0.0)
        if worst > TOLERANCE:
            self.differences.append(
                f"{where}: {worst:.3g}, {int((distance > TOLERANCE).sum())} of {before.size}"
            )

    def compare_values(self, where: str, before: Any, after: Any) -> None:
        """Compare two values of JSON, and what is in them by name or place."""
        if isinstance(before, dict) and isinstance(after, dict):
            self.only_before |= {f"{where}.{name}" for name in before.keys() - after.keys()}
            self.only_after |= {f"{where}.{name}" for name in after.keys() - before.keys()}
            for name in sorted(before.keys() & after.keys()):
                if name not in NOT_COMPARED:
                    self.compare_values(f"{where}.{name}", before[name], after[name])
        elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
            for first, second in zip(before, after, strict=True):
                self.compare_values(f"{where}[]", first, second)
        elif _is_number(before) and _is_number(after):
            self.compare_numbers(where, np.array([float(before)]), np.array([float(after)]))
        elif before != after:
            self.differences.append(f"{where}: {str(before)[:90]!r} became {str(after)[:90]!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _compare_tables(comparison: Comparison, before: Path, after: Path) -> None:
    """Compare two CSV files column by column."""
    with before.open(encoding="utf-8") as first, after.open(encoding="utf-8") as second:
        rows_before = list(csv.DictReader(first))
        rows_after = list(csv.DictReader(second))
    name = before.name
    if len(rows_before) != len(rows_after):
        comparison.differences.append(f"{name}: {len(rows_before)} rows became {len(rows_after)}")
        return
    if not rows_before:
        return
    columns = [column for column in rows_before[0] if column in rows_after[0]]
    comparison.only_before |= {
        f"{name}:{column}" for column in rows_before[0].keys() - rows_after[0].keys()
    }
    comparison.only_after |= {
        f"{name}:{column}" for column in rows_after[0].keys() - rows_before[0].keys()
    }
    for column in columns:
        pair = [[row[column] or "nan" for row in rows] for rows in (rows_before, rows_after)]
        try:
            numbers = [np.array(values, dtype=float) for values in pair]
        except ValueError:
            n_changed = sum(first != second for first, second in zip(*pair, strict=True))
            if n_changed:
                comparison.differences.append(
                    f"{name}:{column}: {n_changed} of {len(rows_before)} texts changed"
                )
        else:
            comparison.compare_numbers(f"{name}:{column}", *numbers)


def _record(array: np.ndarray) -> Any:
    """Return the JSON of a record, which npz files hold as bytes or as a string."""
    text = array.tobytes().decode("utf-8") if array.dtype == np.uint8 else str(array)
    return json.loads(text)


def _compare_archives(comparison: Comparison, before: Path, after: Path) -> None:
    """Compare the arrays and the record of two npz files."""
    with np.load(before) as first, np.load(after) as second:
        comparison.only_before |= {
            f"{before.name}:{name}" for name in set(first.files) - set(second.files)
        }
        comparison.only_after |= {
            f"{before.name}:{name}" for name in set(second.files) - set(first.files)
        }
        for name in sorted(set(first.files) & set(second.files)):
            where = f"{before.name}:{name}"
            if name == "record":
                comparison.compare_values(where, _record(first[name]), _record(second[name]))
            elif first[name].shape != second[name].shape:
                comparison.differences.append(
                    f"{where}: shape {first[name].shape} became {second[name].shape}"
                )
            elif first[name].dtype.kind in "fiub":
                comparison.compare_numbers(where, first[name].astype(float), second[name].astype(float))
            elif (first[name] != second[name]).any():
                comparison.differences.append(f"{where}: texts changed")


def _compare_figures(comparison: Comparison, before: Path, after: Path) -> None:
    """Compare the pixels of two figures."""
    comparison.n_figures += 1
    with Image.open(before) as first, Image.open(after) as second:
        same_size = first.size == second.size
        if same_size and (np.asarray(first.convert("RGB")) == np.asarray(second.convert("RGB"))).all():
            return
        comparison.unequal_figures.append(before.name if same_size else f"{before.name} (size)")


def compare_folders(before: Path, after: Path) -> Comparison:
    """Compare the files of the same name in two folders."""
    comparison = Comparison()
    names_before = {path.relative_to(before) for path in before.rglob("*") if path.is_file()}
    names_after = {path.relative_to(after) for path in after.rglob("*") if path.is_file()}
    comparison.only_before |= {str(name) for name in names_before - names_after}
    comparison.only_after |= {str(name) for name in names_after - names_before}
    compare_by_suffix = {".csv": _compare_tables, ".npz": _compare_archives, ".png": _compare_figures}
    for name in sorted(names_before & names_after):
        compare = compare_by_suffix.get(name.suffix)
        if compare is not None:
            compare(comparison, before / name, after / name)
    return comparison


def run(tree: Path, question: Question, model: str, out: Path) -> str | None:
    """Ask one question of one tree; returns the error, if it ended with one."""
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "120",
    }
    arguments = [*question.arguments, "-m", model, "-o", str(out)]
    if question.name == "atlas":
        arguments[-1] = str(out / "atlas.html")
    if question.formats and question.name != "atlas":
        arguments += ["-f", question.formats]
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "attnscope", *arguments]
    done = subprocess.run(
        command, cwd=out.parent, env=environment, capture_output=True, text=True, check=False
    )
    (out / "stdout.txt").write_text(done.stdout.replace(str(out), "OUT"), encoding="utf-8")
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[0]
    return None


def check_out(folder: Path) -> Path:
    """Return a worktree of the earlier commit; it is made on the first call."""
    tree = folder / "tree"
    if not tree.exists():
        subprocess.run(
            ["git", "-C", str(HERE), "worktree", "add", "--detach", str(tree), COMMIT], check=True
        )
    return tree


def main() -> None:
    """Compare all questions on the models that were named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="minilm,own,own-causal", help="names, or NAME=FOLDER")
    parser.add_argument("--only", default="", help="questions, by the beginning of their names")
    parser.add_argument("--picture-model", default="", help="the folder of a vision transformer")
    parser.add_argument("--photo", default="", help="the photo for it")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "attnscope-before")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    earlier = check_out(asked.folder)
    models = dict(model.partition("=")[::2] for model in asked.models.split(","))
    if asked.picture_model:
        models["picture"] = asked.picture_model
    wanted = tuple(asked.only.split(","))
    totals = {"equal": 0, "different": 0, "failed": 0, "numbers": 0, "figures": 0, "unequal_figures": 0}
    for model_name, spec in models.items():
        for question in questions(
            HERE / "sample_texts", HERE / "sample_texts/pairs", asked.photo or None
        ):
            is_picture = question.needs == "picture"
            if not question.name.startswith(wanted) or is_picture != (model_name == "picture"):
                continue
            if question.needs == "causal" and model_name in ("minilm", "own"):
                continue
            label = f"{model_name}/{question.name}"
            errors = {}
            for side, tree in (("before", earlier), ("after", HERE)):
                out = asked.folder / side / model_name / question.name
                if side == "after" or not (out / "stdout.txt").exists():
                    errors[side] = run(tree, question, spec or model_name, out)
            if any(errors.values()):
                totals["failed"] += 1
                print(f"{label}: {errors}")
                continue
            comparison = compare_folders(
                *(asked.folder / side / model_name / question.name for side in ("before", "after"))
            )
            _print(label, comparison)
            totals["different" if comparison.differences or comparison.unequal_figures else "equal"] += 1
            totals["numbers"] += comparison.n_numbers
            totals["figures"] += comparison.n_figures
            totals["unequal_figures"] += len(comparison.unequal_figures)
    print(json.dumps(totals))


def _print(label: str, comparison: Comparison) -> None:
    """Print what two runs of a question have in common, and what they have not."""
    figures = f"{comparison.n_figures - len(comparison.unequal_figures)} of {comparison.n_figures} figures equal"
    print(
        f"{label}: {comparison.n_numbers} numbers, largest difference {comparison.largest:.2g}, {figures}"
    )
    for difference in comparison.differences[:20]:
        print(f"    {difference}")
    if len(comparison.differences) > 20:
        print(f"    and {len(comparison.differences) - 20} more")
    if comparison.unequal_figures:
        print(f"    figures that differ: {', '.join(comparison.unequal_figures)}")
    for side, names in (("before", comparison.only_before), ("now", comparison.only_after)):
        if names:
            print(f"    only {side}: {', '.join(sorted(names)[:12])}{' …' if len(names) > 12 else ''}")


if __name__ == "__main__":
    main()
