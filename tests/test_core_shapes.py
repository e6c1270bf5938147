"""The shapes in core's signatures hold: tests of core run again under jaxtyping's import hook."""

from pathlib import Path

import pytest

from tests.processes import python

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
    for path in (ROOT / "attnscope" / "core").rglob("*.py")
    if "from jaxtyping import" in path.read_text("utf-8")
)
HOOK = f"--jaxtyping-packages={','.join(MODULES)},tests.check_annotations"

TESTS = {
    "tiles": ["tests/test_tiles.py", "-k", "oracle or nothing or no_keys or cover or hold"],
    # The measure of the docs starts tests of its own, which have no hook.
    "measures": ["tests/test_measures.py", "tests/test_full_width.py", "-k", "not refused and not docs"],
    "sums": ["tests/test_sums.py", "-k", "512 or planned_apart or bfloat16"],
    "rows": ["tests/test_distance.py", "tests/test_pooling.py", "tests/test_relations_core.py",
             "-k", "hand or each_word or twice or each_is_there or mean_map or empty_rows or sinks or alone"],
}  # fmt: skip


def test_there_are_shapes_to_check() -> None:
    assert len(MODULES) >= 10


@pytest.mark.parametrize("which", TESTS)
def test_shapes_hold(which: str) -> None:
    done = python("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", HOOK, *TESTS[which], cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr


def test_a_shape_that_does_not_hold_is_noticed() -> None:
    program = (
        "import torch; from jaxtyping import install_import_hook\n"
        f"with install_import_hook({MODULES!r}, 'tests.check_annotations'):"
        " from attnscope.core.attention import tiles\n"
        "tiles.times_values(torch.ones(1, 2, 3, 5), torch.ones(1, 2, 7, 4))"
    )
    done = python("-c", program, cwd=ROOT)
    assert "TypeCheckError" in done.stderr
