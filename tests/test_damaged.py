"""Records that are damaged, or made to do harm: `show` draws them or says in one line why not, whatever is in them."""

import io
import json
import os
import random
import zipfile
from pathlib import Path

import numpy as np
import pytest

from attnscope import load_record
from attnscope.errors import AttnscopeError
from attnscope.results import reading
from tests.conftest import VOCABULARY, write_tokenizer
from tests.made_records import EVERY, RECORDS
from tests.record_helpers import simple


def require_one_line(status, err):
    assert status in (0, 1, 2), err
    assert "internal error" not in err
    assert "Traceback" not in err
    if status:
        # What the record notes of its run may have been said before it failed.
        lines = [line for line in err.splitlines() if not line.startswith("note: ")]
        assert lines[0].startswith("error: ")
        assert len(lines) <= 2


@pytest.mark.parametrize("name", EVERY)
def test_every_kind_is_shown(name, made, run):
    status, out, err = run("show", made / name)
    assert status == 0, err
    assert out


@pytest.mark.parametrize("stem", ["heads", "compare", "relations", "ablation", "trace"])
def test_the_json_of_a_record_says_which_file_opens(stem, made, run):
    copy = made / f"{stem}.npz.out" / f"{stem}.json"
    status, out, err = run("show", copy)
    assert (status, out) == (1, "")
    assert err.splitlines()[0].endswith(": it is the JSON of one, a copy for other programs")
    assert ".npz" in err.splitlines()[1]


# Damage ----------------------------------------------------------------------------------------------------------


def members(path):
    with np.load(path) as archive:
        return {name: archive[name] for name in archive.files}


def with_record(path, change):
    """The file with its description changed."""
    if path.suffix == ".json":
        document = json.loads(path.read_text("utf-8"))
        change(document)
        return json.dumps(document).encode()
    held = members(path)
    described = held["record"]
    document = json.loads(described.tobytes() if described.dtype == np.uint8 else str(described))
    change(document)
    held["record"] = np.frombuffer(json.dumps(document).encode(), np.uint8)
    return saved(held)


def saved(held):
    out = io.BytesIO()
    np.savez(out, **held)
    return out.getvalue()


def zipped(path, edit, compression=zipfile.ZIP_DEFLATED):
    out = io.BytesIO()
    with zipfile.ZipFile(path) as given, zipfile.ZipFile(out, "w", compression) as archive:
        for name in given.namelist():
            archive.writestr(name, given.read(name))
    content = bytearray(out.getvalue())
    edit(content)
    return bytes(content)


def mark_all(content, offset, central_offset, value):
    """Writes into each member's header, in both places where an archive has it."""
    for mark, place in ((b"PK\x03\x04", offset), (b"PK\x01\x02", central_offset)):
        start = content.find(mark)
        while start >= 0:
            content[start + place] = value
            start = content.find(mark, start + 4)


def spoil(content):
    for i in range(len(content) // 3, len(content) // 3 + 40):
        content[i] ^= 0x5A


ARCHIVE_DAMAGE = {
    "compression method 99": lambda path: zipped(path, lambda content: mark_all(content, 8, 10, 99)),
    "encrypted": lambda path: zipped(path, lambda content: mark_all(content, 6, 8, 1)),
    "a spoilt stream": lambda path: zipped(path, spoil),
    "cut off": lambda path: path.read_bytes()[:-100],
    "a description that is deep": lambda path: saved(
        members(path) | {"record": np.frombuffer(b"[" * 100_000, np.uint8)}
    ),
    "a description of one dimension too few": lambda path: saved(
        members(path) | {"record": np.uint8(3)}
    ),
    "a description that is a list": lambda path: saved(
        members(path) | {"record": np.frombuffer(b"[1]", np.uint8)}
    ),
    "no description": lambda path: saved({"a": np.zeros(3)}),
}
ARCHIVES = [name for name in EVERY if name.endswith("npz")]


@pytest.mark.parametrize("damage", ARCHIVE_DAMAGE)
@pytest.mark.parametrize("name", ARCHIVES)
def test_a_damaged_archive_is_one_line(name, damage, made, run):
    broken = Path("x.npz")
    broken.write_bytes(ARCHIVE_DAMAGE[damage](made / name))
    status, out, err = run("show", broken)
    assert (status, out) == (1, "")
    require_one_line(status, err)


@pytest.mark.parametrize("name", EVERY)
def test_another_version_is_refused(name, made, run):
    def raise_version(document):
        document["schema"] = document["schema"].rpartition("/")[0] + "/99"

    broken = Path(f"x{Path(name).suffix}")
    broken.write_bytes(with_record(made / name, raise_version))
    status, out, err = run("show", broken)
    assert (status, out) == (1, "")
    assert "/99" in err.splitlines()[0]


def places(value, path=()):
    """The places of all values in a document, but for what says how it was made."""
    if path:
        yield path
    items = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, inner in items:
        yield from places(inner, (*path, key))


WRONG = [None, -1, 10**9, 1e308, "", "x\ny", [], {}, [[]], True, "\ud800", [None, 1], 10**30, -0.5]


def change_one(document, lot):
    # Each field as often as any other, however long the lists are.
    fields = {}
    for place in places(document):
        fields[tuple("#" if isinstance(key, int) else key for key in place)] = place
    path = lot.choice(list(fields.values()))
    for key in path[:-1]:
        document = document[key]
    if lot.random() < 0.2:
        del document[path[-1]]
    else:
        document[path[-1]] = lot.choice(WRONG)


def change_array(held, lot):
    name = lot.choice([name for name in held if name != "record"] or ["record"])
    array = held[name]
    damages = [
        lambda: array[..., :-1] if array.ndim else array[None],
        lambda: array.astype("U3"),
        lambda: array.astype(np.complex64),
        lambda: np.full(array.shape, np.nan),
        lambda: np.full(array.shape, np.inf),
        lambda: -(array.astype(float)) - 1,
        lambda: array[None],
        lambda: np.zeros(0),
        lambda: np.full(array.shape, 1e300),
        lambda: array.astype(np.int8),
    ]
    with np.errstate(all="ignore"):
        try:
            held[name] = lot.choice(damages)()
        except ValueError:  # names are no numbers
            held[name] = np.zeros(0)


def damaged(path, lot):
    if path.suffix == ".npz" and lot.random() < 0.4:
        held = members(path)
        change_array(held, lot)
        return saved(held)
    return with_record(path, lambda document: change_one(document, lot))


def show_damaged(made, name, seeds, run):
    for seed in seeds:
        lot = random.Random(f"{name} {seed}")
        broken = Path(f"x{Path(name).suffix}")
        broken.write_bytes(damaged(made / name, lot))
        arguments = lot.choice([[], [], ["--json"], ["--query", "@1"], ["--pick", "L0H0"]])
        status, _, err = run("show", broken, *arguments)
        try:
            require_one_line(status, err)
        except AssertionError as error:
            raise AssertionError(f"{name}, seed {seed}, {arguments}: {err}") from error


@pytest.mark.parametrize("name", EVERY)
def test_any_damage_is_shown_or_is_one_line(name, made, run):
    show_damaged(made, name, range(8), run)


@pytest.mark.parametrize(
    ("name", "member", "value", "told"),
    [
        ("looking.npz", "weights", 1e300, "a number of weights is not between 0 and 1"),
        ("looking.npz", "pixels:0", np.nan, "pixels:0 is an array of float64"),
        ("looking.npz", "pixels:0", 256.0, "pixels:0 is an array of float64"),
        ("listening.npz", "spectrogram", np.nan, "spectrogram is an array of float64"),
        ("looking.npz", "weights", 1j, "its weights is of complex128, which is in no record"),
    ],
)
def test_numbers_that_are_none_are_refused_without_a_warning(name, member, value, told, run, tmp_path):
    held = members(RECORDS / name)
    held[member] = np.full(held[member].shape, value)
    (tmp_path / name).write_bytes(saved(held))
    status, out, err = run("show", name)
    assert (status, out) == (1, "")
    assert told in err
    require_one_line(status, err)


class Trap:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def cut_off(path, lot):
    content = path.read_bytes()
    return content[: lot.randrange(len(content))]


def with_flipped_bits(path, lot):
    content = bytearray(path.read_bytes())
    for _ in range(lot.randint(1, 20)):
        content[lot.randrange(len(content))] ^= 1 << lot.randrange(8)
    return bytes(content)


def without_a_member(path, lot):
    held = members(path)
    del held[lot.choice([*held])]
    return saved(held)


def with_a_wrong_array(path, lot):
    held = members(path)
    change_array(held, lot)
    return saved(held)


def with_a_wrong_description(path, lot):
    return with_record(path, lambda document: change_one(document, lot))


def with_an_object(path, lot):
    held = members(path)
    held[lot.choice([*held])] = np.array([Trap(Path("sprung").absolute())], object)
    return saved(held)


def with_a_bomb(path, lot):
    held = members(path)
    held[lot.choice([*held])] = np.zeros(10**7, np.uint8)
    out = io.BytesIO()
    np.savez_compressed(out, **held)
    return out.getvalue()


REFUSED = (cut_off, with_an_object, with_a_bomb)
DAMAGES = (*REFUSED, without_a_member, with_flipped_bits, with_a_wrong_array, with_a_wrong_description)


@pytest.mark.parametrize("part", range(4))
def test_six_hundred_damaged_files(part, made, run, monkeypatch):
    """600 in all: each is shown or refused in one line, and none runs what it holds."""
    monkeypatch.setattr(reading, "MAX_BYTES", 10**6)
    copies = sorted(made.glob("*.out/*.json"))
    for number in range(part * 150, part * 150 + 150):
        lot = random.Random(number)
        damage = DAMAGES[number % len(DAMAGES)]
        path = made / EVERY[number % len(EVERY)]
        # Every tenth is a copy in JSON, which has no members.
        if number % 10 == 0:
            path = lot.choice(copies)
            damage = lot.choice((cut_off, with_flipped_bits, with_a_wrong_description))
        broken = Path(f"x{path.suffix}")
        broken.write_bytes(damage(path, lot))
        status, out, err = run("show", broken)
        case = f"{number}, {damage.__name__} of {path.name}: {status} {err}"
        try:
            require_one_line(status, err)
        except AssertionError:
            pytest.fail(case)
        if damage in REFUSED or path.suffix == ".json":
            assert (status, out) == (1, ""), case
        assert not Path("sprung").exists(), case


PLANTED = [
    ("trace.npz", ("options", "one_query"), None, "which queries are traced"),
    ("cost.npz", ("options", "n_tokens"), None, "for how many tokens"),
    ("cost.npz", ("options", "sizes", "n_heads"), "many", "its sizes are none"),
    ("ablation.npz", ("run", "kinds"), 3, "kinds of its run"),
    ("ablation.npz", ("corpus", "n_copies"), [], "a number of its corpus"),
    ("models.npz", ("corpus", "n_texts"), "many", "a number of its corpus"),
]
"""Damage that was drawn, or failed in `repr` or in a notebook, once: record, place, value, what is said."""


@pytest.mark.parametrize(("name", "place", "value", "told"), PLANTED)
def test_damage_is_refused_before_it_is_shown(name, place, value, told, tmp_path):
    def plant(document):
        for key in place[:-1]:
            document = document[key]
        document[place[-1]] = value

    broken = tmp_path / name
    broken.write_bytes(with_record(RECORDS / name, plant))
    with pytest.raises(AttnscopeError) as refused:
        load_record(broken)
    assert told in refused.value.message


# Bombs -----------------------------------------------------------------------------------------------------------


def test_an_archive_that_would_unpack_to_far_more_is_not_unpacked(run, tmp_path, monkeypatch):
    path = simple(5).save(tmp_path / "heatmap.npz")
    np.savez_compressed(path, **members(path))
    assert run("show", path)[0] == 0
    np.savez_compressed(path, **members(path), more=np.zeros(10**6))
    monkeypatch.setattr(reading, "MAX_BYTES", 10**6)
    monkeypatch.setattr(np, "load", lambda *_, **__: pytest.fail("it was unpacked"))
    status, out, err = run("show", path)
    assert (status, out) == (1, "")
    assert "it would unpack to 8," in err


def test_two_members_of_one_name_are_refused(run, tmp_path):
    path = simple(5).save(tmp_path / "heatmap.npz")
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("weights.npy", archive.read("weights.npy"))
    assert "two of its members have one name" in run("show", path)[2]


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_model_whose_json_is_nested_deeply_is_refused_in_one_line(name, tiny_bert, run):
    (tiny_bert / name).write_text("[" * 3000, "utf-8")
    status, _, err = run("heatmap", "--rollout", "the cat", "-m", tiny_bert)
    require_one_line(status, err)
    assert status == 1
    assert "nested too deeply" in err


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_a_tokenizer_without_the_unknown_token_is_refused_in_one_line(engine, tiny_bert, run):
    path = tiny_bert / "tokenizer.json"
    path.write_text(path.read_text("utf-8").replace('"[UNK]":', '"[GONE]":'), "utf-8")
    status, _, err = run("heatmap", "--rollout", "the 7 cat", "-m", tiny_bert, "--engine", engine)
    require_one_line(status, err)
    assert status == 1
    assert "tokenizer" in err


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_token_numbers_beyond_the_embedding_are_refused_in_one_line(engine, tiny_bert, run):
    write_tokenizer(tiny_bert, [*VOCABULARY[:5], *(f"[{i}]" for i in range(200)), *VOCABULARY[5:]])
    status, _, err = run("heads", "the cat", "-m", tiny_bert, "--engine", engine)
    require_one_line(status, err)
    assert status == 1
    assert "token number" in err
