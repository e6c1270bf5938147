"""The sample texts are what their README says: readable, whole, and each with a source."""

import re
import unicodedata

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


TEXTS = [path for path in sorted(SAMPLES.rglob("*")) if path.is_file() and path.suffix not in (".jpg", ".wav")]


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


@pytest.mark.parametrize(
    "sentence",
    [
        "The animal didn't cross the street because it was too tired.",
        "The animal didn't cross the street because it was too wide.",
        "The cat sat on the mat.",
        "The Law will never be perfect, but its application should be just.",
    ],
)
def test_well_known_sentence_is_there(sentence):
    assert sentence in read("sentences.txt").splitlines()


def test_the_sleepy_black_cat_is_there():
    assert "The black cat that sleepily sat on the mat" in read("sentences.txt")


def test_prose_is_two_whole_chapters():
    text = read("alice.txt")
    assert len(text.split()) > 4000
    assert re.findall(r"^CHAPTER (\w+)$", text, flags=re.MULTILINE) == ["I", "II"]
    assert text.endswith("Alice led the way, and the whole party swam to the shore.\n")
    assert "Gutenberg" not in text


@pytest.mark.parametrize(
    "script",
    ["CYRILLIC", "GREEK", "HEBREW", "ARABIC", "DEVANAGARI", "HIRAGANA", "CJK UNIFIED", "HANGUL", "ZERO WIDTH JOINER"],
)
def test_script_is_there(script):
    names = {unicodedata.name(character, "") for character in read("multilingual.txt")}
    assert any(name.startswith(script) for name in names)


def test_signs_that_mean_something_elsewhere_are_there():
    assert r"$x_1 < y & z\n$" in read("multilingual.txt")
