"""No command line that is made by lot ends in a traceback, in silence, or in files where none should be."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.check import RECORDS, clean, problems, run_case
from tests.hostile.generator import BASES, COMMANDS, Generator

FEW, MANY = 300, 4000


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Generator:
    return Generator(tmp_path_factory.mktemp("home"), RECORDS)


@pytest.fixture
def home(generator: Generator) -> Iterator[Path]:
    folder = generator.inputs.parent
    yield folder
    clean(folder, generator)


def test_every_command_is_attacked() -> None:
    assert set(BASES) == set(COMMANDS)


@pytest.mark.parametrize(("name", "number"), [(name, number) for name in BASES for number in range(len(BASES[name]))])
def test_what_is_changed_by_lot_works_unchanged(name: str, number: int, generator: Generator, home: Path) -> None:
    status, _, err = run_case(generator.base(name, number), home)
    assert status == 0, err


def attack(seeds: range, generator: Generator, home: Path) -> list[str]:
    found = []
    for seed in seeds:
        case = generator.case(seed)
        found += [f"seed {seed}, {[*case.arguments]}: {one}" for one in problems(case, home)]
        clean(home, generator)
    return found


def test_whatever_is_given_one_line_says_why(generator: Generator, home: Path) -> None:
    assert not attack(range(FEW), generator, home)


@pytest.mark.slow
def test_much_that_is_given(generator: Generator, home: Path) -> None:
    assert not attack(range(FEW, MANY), generator, home)
