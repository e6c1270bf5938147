"""Records: lossless on disk, true to their definition when changed, and refused when damaged."""

import errno
import io
import json
import os
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attnscope.errors import AttnscopeError
from attnscope.questions.heads import Heads
from attnscope.questions.heatmap import AttentionMap, Heatmap
from attnscope.results.result import load_record as load
from attnscope.results.storage import write_whole
from attnscope.results.tokens import Tokens
from tests.findings_helpers import fake_findings
from tests.record_helpers import RUN, simple, tokens_of


def same_tokens(a, b):
    for field in fields(Tokens):
        one = getattr(a, field.name)
        other = getattr(b, field.name)
        if field.name == "n_given":  # -1 = all
            assert (one if one >= 0 else len(a)) == (other if other >= 0 else len(b))
        elif isinstance(one, np.ndarray):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
        else:
            assert one == other, field.name


def same_record(a, b):
    assert a.text == b.text
    assert dict(a.run) == dict(b.run)
    assert a.picked == b.picked
    assert a.changes == b.changes
    assert len(a.maps) == len(b.maps)
    for one, other in zip(a.maps, b.maps, strict=True):
        for field in fields(AttentionMap):
            if field.name not in ("weights", "queries", "keys"):
                assert getattr(one, field.name) == getattr(other, field.name), field.name
        assert other.weights.dtype == np.float32
        # Bits, not values: -0.0 and the kind of NaN aside, a lossless file gives back what it was given.
        np.testing.assert_array_equal(one.weights, other.weights)
        same_tokens(one.queries, other.queries)
        same_tokens(one.keys, other.keys)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
LABEL = TEXT.filter(lambda label: label and label[-1] != "\0")  # a label never is, or ends in, NUL
WEIGHT = st.one_of(
    st.floats(0, 1, width=32),
    st.sampled_from(
        [0.0, 1.0, 1e-45, float(np.finfo(np.float32).tiny), 0.1, 1 / 3, float(np.float32(1) - 2**-24)]
    ),
)


@st.composite
def any_tokens(draw, n):
    numbers = st.lists(st.integers(-1, 9), min_size=n, max_size=n)
    return Tokens(
        text=draw(TEXT),
        ids=np.array(draw(st.lists(st.integers(-1, 2**40), min_size=n, max_size=n)), np.int64),
        labels=tuple(draw(st.lists(LABEL, min_size=n, max_size=n))),
        offsets=np.array(
            draw(st.lists(st.tuples(*[st.integers(-1, 99)] * 2), min_size=n, max_size=n)), np.int32
        ),
        special=np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n))),
        words=draw(st.one_of(st.none(), numbers.map(lambda w: np.array(w, np.int32)))),
        segments=np.array(draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)), np.int32),
        pair=draw(st.one_of(st.none(), TEXT)),
        n_given=draw(st.integers(-1, n)),
    )


@st.composite
def any_record(draw):
    maps = []
    for kind in draw(st.sampled_from([("encoder",), ("decoder",), ("encoder", "decoder", "cross")])):
        layers = draw(st.lists(st.integers(0, 40), min_size=1, max_size=2, unique=True).map(sorted))
        heads = draw(st.lists(st.integers(0, 40), min_size=1, max_size=3, unique=True).map(sorted))
        queries = draw(any_tokens(draw(st.integers(1, 3))))
        keys = draw(any_tokens(draw(st.integers(1, 3)))) if kind == "cross" else queries
        size = len(layers) * len(heads) * len(queries) * len(keys)
        values = np.array(draw(st.lists(WEIGHT, min_size=size, max_size=size)), np.float32)
        weights = values.reshape(len(layers), len(heads), len(queries), len(keys))
        weights /= np.maximum(1, weights.sum(-1, keepdims=True))  # a row has no more than 1 to give
        if len(heads) > 1 and draw(st.booleans()):
            weights[0, -1] = np.nan  # a head that the first layer lacks
        maps.append(
            AttentionMap(
                kind=kind,
                layers=tuple(layers),
                heads=tuple(heads),
                weights=weights,
                queries=queries,
                keys=keys,
                n_layers=41,
                n_heads=41,
                n_kv_heads=41,
            )
        )
    run = RUN | {"model": draw(TEXT), "notes": draw(st.lists(TEXT, max_size=2)), "seed": None}
    changes = draw(st.sampled_from([(), ("hide_special",), ("hide_special", "words")]))
    picked = ((maps[0].layers[0], maps[0].heads[0]),) if draw(st.booleans()) else None
    return Heatmap(text=draw(TEXT), maps=tuple(maps), run=run, picked=picked, changes=changes)


# On disk


@given(any_record())
@example(simple(text='"quoted"\n\\ \u2028 \x7f 😀 שלום'))
def test_what_is_saved_is_read_back_bit_by_bit(tmp_path_factory, record):
    same_record(record, load(record.save(tmp_path_factory.mktemp("saved") / "record.npz")))


def test_npz_holds_what_is_promised_and_loads_without_pickle(tmp_path):
    record = simple(5)
    with np.load(record.save(tmp_path / "heatmap.npz"), allow_pickle=False) as held:
        assert {name.partition("/")[0] for name in held.files} == {
            "record",
            "weights",
            "maps",
            "heads",
            "queries",
            "keys",
        }
        assert held["weights"].dtype == np.float32
        assert held["weights"].shape == (6, 5, 5)
        assert held["keys/token"].tolist() == ["[CLS]", "t1", "t2", "t3", "[SEP]"]
        assert held["heads/layer"].tolist() == [0, 0, 0, 1, 1, 1]
        assert held["heads/head"].tolist() == [0, 1, 2, 0, 1, 2]
        assert held["keys/start"].tolist() == [-1, 6, 9, 12, -1]
        assert held["keys/stop"].tolist() == [-1, 8, 11, 14, -1]
        described = json.loads(held["record"].tobytes())
    assert described["schema"] == "attnscope.heatmap/2"
    assert described["options"]["text"] == record.text
    for name in ("model", "sha256", "versions", "dtype", "engine"):
        assert name in described["run"], name


def test_json_holds_the_same_as_lists(tmp_path):
    record = simple(3, layers=1)
    record.maps[0].weights[0, 2] = np.nan
    held = json.loads(record.save(tmp_path / "heatmap.json").read_text("utf-8"))
    assert held["schema"] == "attnscope.heatmap/2"
    assert held["run"]["sha256"] == "ab" * 32
    for name, array in record.arrays().items():
        table, _, column = name.partition("/")
        if column:
            assert [row[column] for row in held[table]] == array.tolist(), name
        else:
            assert np.shape(held[name]) == array.shape
    assert held["weights"][2] == [[None] * 3] * 3
    np.testing.assert_array_equal(np.array(held["weights"][:2], np.float32), record.weights[0, :2])


def npz(**changes):
    """A saved record with some of its arrays or of what describes it changed; None = left out."""
    record = simple(3)
    described = record.describe()
    for name in [name for name in changes if name in described]:
        described[name] = changes.pop(name)
    arrays = (
        record.arrays() | {"record": np.frombuffer(json.dumps(described).encode(), np.uint8)} | changes
    )
    held = io.BytesIO()
    np.savez(held, **{name: array for name, array in arrays.items() if array is not None})
    return held.getvalue()


def longest(label):
    return np.array([label, "b", "c"])


PICKLED = np.array([{"a": 1}], dtype=object)
DAMAGED = {
    "empty": b"",
    "a picture": b"\x89PNG\r\n\x1a\n" + b"\0" * 50,
    "text": b"hello",
    "cut": npz()[:-300],
    "half": npz()[:400],
    "a plain array": (lambda held: (np.save(held, np.zeros(3)), held.getvalue())[1])(io.BytesIO()),
    "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a\x94K\x01s.",
    "objects": npz(weights=PICKLED),
    "no record": npz(record=None),
    "no weights": npz(weights=None),
    "another schema": npz(schema="someone.else/7"),
    "no maps": npz(**{"maps/kind": None}),
    "no JSON": npz(record=np.frombuffer(b"{", np.uint8)),
    "a list": npz(record=np.frombuffer(b"[]", np.uint8)),
    "fewer heads": npz(weights=simple(3).arrays()["weights"][:4]),
    "fewer tokens": npz(weights=simple(2).arrays()["weights"]),
    "negative weights": npz(weights=-simple(3).arrays()["weights"]),
    "weights beyond 1": npz(weights=simple(3).arrays()["weights"] * 10),
    "infinite weights": npz(weights=simple(3).arrays()["weights"] * np.inf),
    "a kind that is a path": npz(**{"maps/kind": np.array(["../../tmp/x"])}),
    "layers that are words": npz(**{"heads/layer": np.array(["one", "two", "x", "y", "z", "u"])}),
    "an empty label": npz(**{"keys/token": longest("")}),
    "fewer ids": npz(**{"keys/id": np.array([1])}),
    "ids that are no numbers": npz(**{"keys/id": np.array([0.5, 0, 0])}),
    "a head picked that is not there": npz(
        options={**simple(3).describe()["options"], "picked": [[9, 9]]}
    ),
    "options that are none": npz(options=[]),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_and_foreign_files_are_refused_in_one_line(tmp_path, name):
    path = tmp_path / "heatmap.npz"
    path.write_bytes(DAMAGED[name])
    with pytest.raises(AttnscopeError, match="heatmap.npz") as caught:
        load(path)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'{"record": 3}', b'{"record": {}}', b"\xff\xfe", b"[" * 100_000],
)
def test_damaged_json_is_refused(tmp_path, content):
    (tmp_path / "heatmap.json").write_bytes(content)
    with pytest.raises(AttnscopeError, match="is no attnscope record"):
        load(tmp_path / "heatmap.json")


def test_every_byte_of_an_npz_may_be_damaged(tmp_path):
    whole = npz()
    path = tmp_path / "heatmap.npz"
    for place in range(0, len(whole), 41):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            load(path)  # a byte that means nothing may change
        except AttnscopeError:
            continue


def test_a_record_is_known_by_its_content_not_by_its_name(tmp_path):
    saved = simple().save(tmp_path / "record.npz").rename(tmp_path / "out.txt")
    same_record(load(saved), simple())


def test_a_record_is_read_from_its_folder_among_others(tmp_path):
    fake_findings(1, 2).save(tmp_path / "heads.npz")
    simple().save(tmp_path / "heatmap.npz")
    same_record(type(simple()).load(tmp_path), simple())
    assert len(Heads.load(tmp_path)["heads"]) == 2


# Whole or not at all


class _FullDisk(io.BytesIO):
    def write(self, content):
        super().write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("before", [None, b"what was there before"])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, before):
    path = tmp_path / "file"
    real = Path.open
    if before is not None:
        path.write_bytes(before)

    def opened(self, mode="r", *rest, **more):
        if mode != "xb":
            return real(self, mode, *rest, **more)
        real(self, mode).close()
        return _FullDisk()

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(AttnscopeError, match=r"cannot write .*file: No space left on device \("):
        write_whole(path, b"x" * 1000)
    assert [p.name for p in tmp_path.iterdir()] == ([] if before is None else ["file"])
    assert before is None or path.read_bytes() == before


@pytest.mark.parametrize("where", ["/dev/full/x", "/proc/attnscope/x", "a-file/x", "a-folder"])
def test_places_that_take_no_file_say_so(tmp_path, where):
    (tmp_path / "a-file").write_bytes(b"kept")
    (tmp_path / "a-folder" / "inner").mkdir(parents=True)
    with pytest.raises(AttnscopeError, match="cannot write"):
        write_whole(tmp_path / where, b"x")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a-file", "a-folder", "inner"]
    assert (tmp_path / "a-file").read_bytes() == b"kept"


# Choosing


PIECES = replace(
    tokens_of(
        ["[CLS]", "The", "·the", "em", "##bed", "It", "band", "##it", "it", "@2", "[SEP]"], (0, 10)
    ),
    text="The the embed It bandit it @2",
    offsets=np.array(
        [
            (-1, -1),
            (0, 3),
            (3, 7),
            (8, 10),
            (10, 13),
            (14, 16),
            (17, 21),
            (21, 23),
            (24, 26),
            (27, 29),
            (-1, -1),
        ],
        np.int32,
    ),
    words=np.array([-1, 0, 1, 2, 2, 3, 4, 4, 5, 6, -1], np.int32),
)


@pytest.mark.parametrize(
    ("wanted", "places"),
    [
        ("it", (8,)),  # the word, not the end of another, and not in other cases
        ("##it", (7,)),
        ("IT", (5, 8)),
        ("bandit", (6, 7)),
        ("the", (2,)),  # without the mark of a leading space
        ("THE", (1, 2)),
        ("bed", (4,)),
        ("embed", (3, 4)),  # a whole word
        ("Embed", (3, 4)),
        ("@2", (2,)),  # a place, whatever tokens are called
        ("@0", (0,)),
        ("@11", ()),
        ("@", ()),
        ("@x", ()),
        ("@²", ()),  # a digit to Python, but no number
        ("@-1", ()),
        ("[cls]", (0,)),
        ("absent", ()),
        ("", ()),
    ],
)
def test_tokens_are_found_as_people_name_them(wanted, places):
    assert PIECES.find(wanted) == places
