"""The sample texts are what their README says: readable, whole, and each with a source."""

import re

import pytest

from tests.conftest import SAMPLES

LINE_BY_LINE = ["sentences.txt", "multilingual.txt"]


def read(name):
    return (SAMPLES / name).read_bytes().decode("utf-8")


def sourced_lines(name):
    """The line numbers that the section `name` of the README gives a source for."""
    section = read("README.md").split(f"## {name}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| ([\d, ]+) \|", section, flags=re.MULTILINE)
    return [int(number) for cell in cells for number in cell.split(",")]


TEXTS = [
    path for path in sorted(SAMPLES.rglob("*")) if path.is_file() and path.suffix not in (".jpg", ".wav")
]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_is_utf8_without_surprises(path):
    text = path.read_bytes().decode("utf-8")
    assert text.endswith("\n")
    assert not text.startswith("\ufeff")
    assert "\r" not in text
    assert "\t" not in text or path.suffix == ".conllu"


@pytest.mark.parametrize("name", LINE_BY_LINE)
def test_every_line_is_a_text_with_a_source(name):
    lines = read(name).splitlines()
    assert all(line and line == line.strip() for line in lines)
    assert len(set(lines)) == len(lines)
    assert sourced_lines(name) == list(range(1, len(lines) + 1))
