"""The shapes in core's signatures hold: tests of core run again under jaxtyping's import hook."""

from pathlib import Path

from tests.processes import LIMIT_S, python

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
    for path in (ROOT / "attnscope" / "core").rglob("*.py")
    if "from jaxtyping import" in path.read_text("utf-8")
)
HOOK = f"--jaxtyping-packages={','.join(MODULES)},tests.check_annotations"

TESTS = (  # a module's tests
    ("test_tiles", "oracle or nothing or no_keys or cover or hold"),
    # The measure of the docs starts tests of its own, which have no hook.
    ("test_measures", "not refused and not docs"),
    ("test_full_width", "not refused"),
    ("test_sums", "512 or planned_apart or bfloat16"),
    ("test_distance", "empty_rows or sinks or alone"),
    ("test_pooling", "each_is_there or mean_map or alone"),
    ("test_relations_core", "hand or tie or twice"),
)


def test_there_are_shapes_to_check():
    assert len(MODULES) >= 10


def test_shapes_hold():
    modules = [f"tests/{module}.py" for module, _ in TESTS]
    chosen = " or ".join(f"({module} and ({names}))" for module, names in TESTS)
    done = python(
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        HOOK,
        *modules,
        "-k",
        chosen,
        cwd=ROOT,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr


def test_a_shape_that_does_not_hold_is_noticed():
    program = (
        "import torch; from jaxtyping import install_import_hook\n"
        f"with install_import_hook({MODULES!r}, 'tests.check_annotations'):"
        " from attnscope.core.attention import tiles\n"
        "tiles.weighted_values(torch.ones(1, 2, 3, 5), torch.ones(1, 2, 7, 4))"
    )
    done = python("-c", program, cwd=ROOT)
    assert "TypeCheckError" in done.stderr
