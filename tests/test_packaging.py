"""What the package says about itself is true, and the tested set covers what it needs."""

import re
import tomllib
from importlib import metadata, resources
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import attnscope

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def constraint_lines():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pinned():
    pairs = (line.split("==") for line in constraint_lines())
    return {canonicalize_name(name): version for name, version in pairs}


def declared_requirements():
    extras = PROJECT["optional-dependencies"].values()
    everything = PROJECT["dependencies"] + [line for extra in extras for line in extra]
    parsed = [Requirement(line) for line in everything]
    return [requirement for requirement in parsed if requirement.name != PROJECT["name"]]


def test_the_oldest_set_to_test_is_the_oldest_allowed():
    page = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    command = next(line for line in page.splitlines() if ".venv-oldest/bin/pip" in line)
    wanted = dict(re.findall(r"(\w+)==([\d.]+)", command))
    allowed = {
        r.name: str(r.specifier).removeprefix(">=") for r in declared_requirements() if r.name in wanted
    }
    assert wanted == allowed
    assert set(wanted) == {"transformers", "huggingface_hub", "tokenizers"}


def test_one_version_everywhere():
    assert attnscope.__version__ == PROJECT["version"]
    assert metadata.version("attnscope") == PROJECT["version"]


def test_type_hints_are_shipped():
    assert resources.files("attnscope").joinpath("py.typed").is_file()


def test_console_script_is_installed():
    (script,) = metadata.entry_points(group="console_scripts", name="attnscope")
    assert script.value == PROJECT["scripts"]["attnscope"] == "attnscope.__main__:main"


def test_licence_is_the_one_declared():
    assert PROJECT["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.mark.parametrize("line", constraint_lines())
def test_constraint_is_an_exact_public_version(line):
    # No address, no hash, and no local label such as +cpu: those exist on one machine and not on the next.
    assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line)


def test_nothing_is_pinned_twice():
    assert len(pinned()) == len(constraint_lines())


@pytest.mark.parametrize("requirement", declared_requirements(), ids=str)
def test_tested_version_is_one_we_declare_to_support(requirement):
    assert requirement.specifier.contains(pinned()[canonicalize_name(requirement.name)])


def test_figures_were_measured_with_these_versions():
    pins = pinned()
    assert pins["torch"] == "2.13.0"
    assert pins["transformers"] == "5.23.0"


def test_the_readme_has_no_gaps():
    assert not re.search(r"@[A-Z]+@", (ROOT / "README.md").read_text(encoding="utf-8"))
