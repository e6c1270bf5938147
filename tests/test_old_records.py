"""Records that an earlier version wrote, one of every kind: they load, and say what that version read in them.

`records/told.json` holds the SHA-256 of what it printed with `show --json`, as JSON with its keys sorted.
"""

import hashlib
import json
from pathlib import Path

import pytest

from attnscope.records import load_record as load
from attnscope.records.frame.kinds import KINDS
from tests.conftest import Run

RECORDS = Path(__file__).parent / "records"
TOLD = json.loads((RECORDS / "told.json").read_text("utf-8"))


def test_every_kind_is_here() -> None:
    held = {load(RECORDS / name).record_kind().schema for name in TOLD}
    assert held == {*KINDS}
    assert {*TOLD} == {path.name for path in RECORDS.iterdir()} - {"told.json"}


@pytest.mark.parametrize("name", TOLD)
def test_a_record_of_an_earlier_version_says_what_it_said(name: str, run: Run) -> None:
    status, out, err = run("show", RECORDS / name, "--json")
    assert status == 0, err
    assert hashlib.sha256(json.dumps(json.loads(out), sort_keys=True).encode()).hexdigest() == TOLD[name]


@pytest.mark.parametrize("name", TOLD)
def test_a_record_of_an_earlier_version_is_saved_as_it_was(name: str, tmp_path: Path) -> None:
    """Each number is what it was, whatever the archive's compression."""
    record = load(RECORDS / name)
    again = load(record.save(tmp_path / f"again{Path(name).suffix}"))
    assert {key: (array.dtype, array.tobytes()) for key, array in again.arrays().items()} == {
        key: (array.dtype, array.tobytes()) for key, array in record.arrays().items()
    }
    assert repr(again.as_json()) == repr(record.as_json())
