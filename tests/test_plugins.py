"""Plugins: the example package, installed into a folder of its own, adds a measure and a command."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "plugin"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder that holds the example as pip lays it out: the module, and its metadata with the entry point."""
    site = tmp_path_factory.mktemp("site")
    install(site, "attnscope_digits", (EXAMPLE / "attnscope_digits.py").read_text("utf-8"))
    return site


def install(site, module, code):
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text("utf-8"))["project"]
    (site / f"{module}.py").write_text(code, "utf-8")
    metadata = site / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Name: {project['name']}\nVersion: {project['version']}\n", "utf-8"
    )
    (metadata / "entry_points.txt").write_text(f"[attnscope.plugins]\nplugin = {module}\n", "utf-8")
    assert set(project["entry-points"]) == {"attnscope.plugins"}


def attnscope(site, *arguments):
    path = os.pathsep.join([str(site), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "attnscope", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )


def test_a_plugins_command_is_listed_and_runs(site):
    assert "count-digits" in attnscope(site, "--help").stdout
    result = attnscope(site, "count-digits", "In 1887, 3 men")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "5\n"


def test_a_plugins_measure_is_measured_saved_and_shown(site, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text(
        "\n".join(f"In {1880 + i} there were {i} men and a dog." for i in range(3)), "utf-8"
    )
    out = tmp_path / "out"
    arguments = ["heads", "--file", str(texts), "-m", "own", "--measures", "digits", "--no-describe"]
    result = attnscope(site, *arguments, "-f", "npz,json", "-o", str(out))
    assert result.returncode == 0, result.stderr

    heads = json.loads((out / "heads.json").read_text("utf-8"))["heads"]
    assert all(0 <= head["digits"] <= 1 for head in heads)
    assert any(head["digits"] > 0 for head in heads)
    assert attnscope(site, "show", str(out)).returncode == 0


def test_a_plugin_that_does_not_load_is_named_in_one_line(site, tmp_path):
    broken = tmp_path / "site"
    shutil.copytree(site, broken)
    install(broken, "broken_plugin", "import nothing_of_this_name\n")
    result = attnscope(broken, "--help")
    assert result.returncode == 1
    assert result.stderr.startswith("error: the plugin plugin cannot be loaded: ModuleNotFoundError")


def test_a_plugin_that_imports_the_catalogue_too_early_is_told_so(tmp_path):
    install(tmp_path, "early_plugin", "from attnscope.core.catalogue import Measure\n")
    result = attnscope(tmp_path, "--help")
    assert result.returncode == 1
    assert "import it within measures()" in result.stderr
