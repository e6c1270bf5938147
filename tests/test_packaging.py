"""What the package says about itself is true."""

import re
import tomllib
from importlib import metadata, resources
from pathlib import Path

from packaging.requirements import Requirement

import attnscope

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def declared_requirements():
    # What a benchmark compiles its programs with is pinned where it is declared: the tests do not install it.
    extras = [lines for name, lines in PROJECT["optional-dependencies"].items() if name != "known"]
    everything = PROJECT["dependencies"] + [line for extra in extras for line in extra]
    parsed = [Requirement(line) for line in everything]
    return [requirement for requirement in parsed if requirement.name != PROJECT["name"]]


def test_the_oldest_set_to_test_is_the_oldest_allowed():
    page = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    command = next(line for line in page.splitlines() if ".venv-oldest/bin/pip" in line)
    wanted = dict(re.findall(r"(\w+)==([\d.]+)", command))
    allowed = {r.name: str(r.specifier).removeprefix(">=") for r in declared_requirements() if r.name in wanted}
    assert wanted == allowed and set(wanted) == {"transformers", "huggingface_hub", "tokenizers"}


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


def test_the_readme_has_no_gaps():
    assert not re.search(r"@[A-Z]+@", (ROOT / "README.md").read_text(encoding="utf-8"))
