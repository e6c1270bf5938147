"""What `heatmap` draws it also saves, for `show` and `page --record`; and a query that no token is meant by."""

import shutil
from pathlib import Path

import pytest

import attnscope
from attnscope import output
from attnscope.questions.maps import choose_heads
from tests.record_helpers import map_of, record_of, tokens_of


def test_what_was_drawn_is_shown_again_from_its_folder(run):
    status, out, err = run("heatmap", "the cat", "-m", "own", "-o", "drawn")
    assert status == 0, err
    assert out.split()[-1] == "drawn/heatmap.npz"
    status, out, err = run("show", "drawn", "--pick", "L0H1")
    assert status == 0, err
    assert "L0H1" in out
    assert attnscope.load_record("drawn").of(0, 1).sum(-1) == pytest.approx(1)


def test_weights_that_would_fill_a_disk_are_saved_where_that_is_asked_for(run, tmp_path, monkeypatch):
    monkeypatch.setattr(output, "MAX_SAVED_BYTES", 100)
    status, out, err = run("heatmap", "the cat", "-m", "own", "-L", "0", "-o", "drawn")
    assert status == 0
    assert out.split()[-1] == "drawn/L00.png"
    assert "note: the weights, 0 MiB, are not saved: --format png,npz does\n" in err
    run("heatmap", "the cat", "-m", "own", "-L", "0", "-o", "drawn", "-f", "png,npz")
    assert (tmp_path / "drawn/heatmap.npz").is_file()


def test_of_a_list_of_queries_the_missing_one_is_named(tmp_path):
    record = record_of(map_of(tokens_of(["[CLS]", "the", "cat"], (0,)), layers=1, heads=1))
    for query, missing in (
        ("cat,dog", "dog"),
        ("dog,@9,the", "dog,@9"),
        ("dog,bird", "dog,bird"),
        ("dog", "dog"),
    ):
        with pytest.raises(
            attnscope.AttnscopeError, match=rf"no token is '{missing}' \(the tokens are: @0 \[CLS\]"
        ):
            record.draw(tmp_path, query=query)


@pytest.fixture
def drawn(run):
    assert run("heatmap", "the cat sat", "-m", "own", "-f", "npz", "-o", "drawn")[0] == 0
    return "drawn"


def test_show_takes_layers_and_heads_words_and_special_tokens_as_heatmap_does(run, drawn):
    for choice in (
        ("-L", "0"),
        ("-H", "1-2"),
        ("-L", "1", "-H", "0"),
        ("--words",),
        ("--hide-special",),
    ):
        formats = "npz,png" if len(choice) == 4 else "npz"
        again = run("show", drawn, *choice, "-o", "again", "-f", formats, "-q")
        anew = run("heatmap", "the cat sat", "-m", "own", *choice, "-o", "anew", "-f", formats, "-q")
        assert again[0] == anew[0] == 0, (again, anew)
        assert Path("again/heatmap.npz").read_bytes() == Path("anew/heatmap.npz").read_bytes(), choice
        drawn_again = sorted(Path(line).name for line in again[1].split())
        assert drawn_again == sorted(Path(line).name for line in anew[1].split())
        shutil.rmtree("again")


@pytest.mark.parametrize(
    ("choice", "status", "said"),
    [
        (("-L", "9"), 1, "there is no layer 9 in this record"),
        (("-H", "0,8"), 1, "there is no head 8 in this record"),
        (("-L", "0", "--pick", "L0H0"), 2, "either singly or by layers and heads"),
    ],
)
def test_heads_that_a_record_lacks_are_refused(run, drawn, choice, status, said):
    found = run("show", drawn, *choice)
    assert found[0] == status
    assert found[1] == ""
    assert said in found[2]


def test_pooled_maps_are_shown_by_layers_too():
    record = attnscope.pooled_heatmap(attnscope.load("own"), "the cat sat on the mat " * 4, cells=8)
    some = choose_heads(record, None, (1,), (2, 4))
    assert some.maps[0].layers == (1,)
    assert some.maps[0].heads == (2, 4)
    assert (some.of(1, 4) == record.of(1, 4)).all()
    assert some.links(1, 4) == record.links(1, 4)
