"""Model types of transformers: what docs/architectures.json says of them is what comes of them again."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from tests.hf_tally import judge, runs_as_configured

KEPT = Path(__file__).parent.parent / "docs" / "architectures.json"


def test_none_is_shown_wrongly_and_most_are_shown():
    types = json.loads(KEPT.read_text("utf-8"))["types"]
    verdicts = [one["verdict"] for one in types.values()]
    assert verdicts.count("wrong") == 0
    assert verdicts.count("exact") >= 340
    assert len(types) > 600
    for name, one in types.items():
        if one["verdict"] == "exact":
            assert one["differences"] and max(one["differences"].values()) < 2e-4, name
        else:
            assert one["why"] and "\n" not in one["why"], name


@pytest.mark.filterwarnings("ignore")
def test_a_type_whose_shrunk_copy_alone_fails_is_not_said_to_be_refused():
    verdict = judge("levit")
    assert verdict.verdict == "unbuilt"
    assert verdict.why[:34] == "as configured it runs, shrunk to t"
    assert not runs_as_configured("bros")  # it asks for boxes


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_sample_of_model_types_has_the_same_verdict_again(tmp_path):
    held = json.loads(KEPT.read_text("utf-8"))
    if held["transformers"] != transformers.__version__:
        pytest.skip(f"the table is of transformers {held['transformers']}")
    types = {name: one for name, one in held["types"].items() if "more than" not in one["why"]}
    chosen = random.Random(0).sample(sorted(types), 40)
    # Processes of their own: hundreds of modelling files warn, and some switch things for good.
    command = [sys.executable, "-m", "tests.hf_tally", "--json", str(tmp_path / "again.json"), *chosen]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr[-2000:]
    again = json.loads((tmp_path / "again.json").read_text("utf-8"))["types"]
    for name in chosen:
        assert [again[name][k] for k in ("verdict", "reads", "road")] == [
            types[name][k] for k in ("verdict", "reads", "road")
        ]
