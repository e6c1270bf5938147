"""`attnscope compare` and `show` of what it wrote, as a user runs them: what is printed and written, how they fail."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import attnscope
from attnscope.questions.compare_figures import tree_of
from attnscope.report.figures import pages
from attnscope.results.record import load_record as load
from tests.conftest import Run

SENTENCES = str(Path(__file__).parent.parent / "sample_texts" / "sentences.txt")
TIRED = "The animal didn't cross the street because it was too tired."
WIDE = "The animal didn't cross the street because it was too wide."


def test_all_heads_as_tables_and_files(run: Run, tmp_path: Path) -> None:
    status, out, err = run("compare", "-m", "own", "--file", SENTENCES, "-o", "out", "-q")
    assert (status, err) == (0, "")
    assert "most alike, by Hellinger distance" in out
    assert "most alone" in out
    names = ["compare.npz", "compare.csv", "layer-by-layer.png", "matrix.png", "map.png"]
    assert out.splitlines()[-5:] == [f"out/{name}" for name in names]


def test_one_json_document(run: Run) -> None:
    status, out, _ = run("compare", "-m", "own", TIRED, "--json", "--measures", "jensen-shannon,hellinger", "-q")
    document = json.loads(out)
    assert status == 0
    options = document["options"]
    assert (document["schema"], options["compared"], document["files"]) == ("attnscope.compare/2", "heads", [])
    assert options["distances"][:2] == ["jensen_shannon", "hellinger"]
    assert document["run"]["model"] == "own"
    assert document["distance_low:hellinger"][0][1] is None


def test_a_minimal_pair(run: Run, tmp_path: Path) -> None:
    status, out, err = run("compare", TIRED, "--with", WIDE, "--query", "it", "-o", "out", "--all")
    assert (status, err) == (0, "")
    assert "−tired  +wide" in out
    first = next(line for line in out.splitlines() if line.startswith("L3H1"))
    assert "animal 0.68 → 0.28" in first
    ranked = [line.split()[0] for line in out.splitlines() if line.startswith("L") and "→" in line]
    assert "L3H1" in ranked[:5]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "compare.npz", "compare.csv", "change.png", "change-overall.png", "differences.png", "maps.png",
        "query-010.png",
    }  # fmt: skip


def test_texts_between_which_nothing_changes_are_drawn(run: Run, tmp_path: Path) -> None:
    """Heads of `own` look at places, so that another last word changes nothing; the scale of that ends near 0."""
    result = run("compare", "the cat was tired", "--with", "the cat was wide", "-m", "own", "-o", "out")
    assert result.status == 0, result.err
    assert (tmp_path / "out" / "differences.png").is_file()


def test_names_that_change_places_keep_their_weights(run: Run) -> None:
    """What stands where the other name stood is compared with it; a token without a partner has a dash, not a 0."""
    texts = "Tom met Ann and he left.", "Ann met Tom and he left."
    status, out, _ = run("compare", texts[0], "--with", texts[1], "--query", "he", "--all")
    assert status == 0
    assert "−tom  +ann" in out
    assert "−ann  +tom" in out
    assert "→ –" not in out
    assert "– →" not in out
    assert "overall: the root mean square over the tokens that both texts share" in out
    status, out, _ = run("compare", texts[0], "--with", "Tom met Ann and so he left.", "--query", "he")
    assert status == 0
    assert re.search(r"so +– → [01]\.\d\d", out)
    assert "–: the other text has no token for this one" in out


def test_a_query_that_stands_twice_is_said_to_be_pooled(run: Run) -> None:
    pair = ("compare", "the cat saw the dog", "--with", "the cat saw the cow")
    _, out, err = run(*pair, "--query", "the")
    assert "'the' stands at @1, @4: heads are ranked by all together; --query @1 takes one" in err
    assert "72 heads at “the”: median 0." in out
    assert run(*pair, "--query", "@4")[2] == run(*pair)[2] == ""


def test_the_figure_shows_what_it_attends_to_in_both_texts(run: Run) -> None:
    run("compare", TIRED, "--with", WIDE, "--query", "it", "-o", "out", "-f", "npz")
    drawn = dict(pages(load("out/compare.npz")))
    page = drawn["query-010"]
    texts = {(round(t.get_position()[1]), t.get_text()): t for t in page.axes.texts}
    heads = [text for _, text in texts if text.startswith("L3H1 · ")]
    assert heads == ["L3H1 · 0.341"]
    animal = next(y for y, text in texts if text == "animal")
    beside = [t.get_text() for (y, _), t in texts.items() if abs(y - animal) < 14 and t.get_position()[0] < 560]
    assert {"0.68", "0.28"} <= set(beside)


def test_picked_heads(run: Run) -> None:
    status, out, _ = run("compare", TIRED, "--pick", "L3H1,L5H11", "-o", "out", "-f", "svg,pdf,json")
    assert status == 0
    assert "no one head of the model could compute it" in " ".join(out.split())
    assert out.splitlines()[-5:] == [
        "out/compare.json", "out/picked.svg", "out/picked.pdf", "out/differences.svg", "out/differences.pdf",
    ]  # fmt: skip


def test_two_models(run: Run) -> None:
    status, out, _ = run("compare", "-m", "own", "--file", SENTENCES, "--with-model", "own", "-o", "out", "-q")
    assert status == 0
    assert "match one of another number" in out
    assert "out/same-heads.png" in out.splitlines()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give one of TEXT and --file"),
        (["a", "--pick", "L0H0,L0H1", "--with", "b"], "different comparisons"),
        (["a", "--query", "a"], "--query ranks the heads of a minimal pair"),
        (["a", "--measures", "cosine"], "there is no measure 'cosine'"),
        (["a", "--measures", ","], "no measure is given"),
        (["--file", SENTENCES, "--with", "b"], "--with takes one TEXT"),
        (["a", "--with", "b", "-L", "0"], "--with ranks all heads"),
        (["a", "--format", "png"], "there is no folder"),
        (["a", "--pick", "L0H0"], "nothing to compare"),
        (["a", "-o", "out", "--format", "gif"], "there is no format 'gif'"),
        (["a", "-f", "npz, Text"], "there is no format 'text'"),
        (["a", "--record", "h.npz", "--with-model", "own"], "--record tells the roles"),
    ],
)
def test_wrong_usage_is_one_line_and_a_hint(run: Run, arguments: list[str], said: str) -> None:
    status, out, err = run("compare", "-m", "own", *arguments)
    assert (status, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) <= 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a cat", "--with", " "], "the second text is blank"),
        (["a cat", "--with", "a dog", "--query", "horse"], "no token is 'horse'"),
        (["a cat", "-L", "7"], "there is no layer 7"),
        (["a cat", "--record", "none.npz"], "there is no file"),
        (["a cat", "--with-model", "minilm"], "split the same text into different tokens"),
    ],
)
def test_what_cannot_be_is_one_line_and_a_hint(run: Run, arguments: list[str], said: str) -> None:
    status, out, err = run("compare", "-m", "own", *arguments)
    assert (status, out) == (1, "")
    assert said in err


def test_what_could_not_be_read_is_said_and_the_rest_is_compared(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "the cat sat"}\n{broken\n{"text": "the mat"}\n', "utf-8")
    status, out, err = run("compare", "-m", "own", "--file", "bad.jsonl", "-q")
    assert status == 1
    assert "bad.jsonl, line 2" in err
    assert "most alike" in out


def test_roles_colour_the_map(run: Run) -> None:
    status, _, err = run("heads", "-m", "own", "--file", SENTENCES, "-o", "h", "-f", "npz", "-q")
    assert (status, err) == (0, "")
    status, out, err = run("compare", "-m", "own", "--file", SENTENCES, "--record", "h", "-o", "out", "-f", "npz", "-q")
    assert (status, err) == (0, "")
    assert "(previous token)" in out
    found = load("out/compare.npz")
    written = [text.get_text() for name, page in pages(found) if name == "map" for text in page.axes.texts]  # type: ignore[attr-defined]
    assert any(text.startswith("previous token (") for text in written)


class TestTree:
    def test_branches_stand_over_their_heads(self) -> None:
        merges = np.array([[0, 2, 1.0, 2], [1, 3, 4.0, 3]])
        branches, highest = tree_of(merges, np.array([1, 0, 2]))
        assert highest == 4.0
        assert branches[0] == ((1.5, 0.0), (1.5, 1.0), (2.5, 1.0), (2.5, 0.0))
        assert branches[1] == ((0.5, 0.0), (0.5, 4.0), (2.0, 4.0), (2.0, 1.0))

    def test_one_head_has_none(self) -> None:
        assert tree_of(np.zeros((0, 4)), np.array([0]))[0] == []


def test_changed_tokens_are_told_stretch_by_stretch(run: Run) -> None:
    other = "the big cat sat under the mat there"
    _, out, _ = run("compare", "the cat sat on the mat", "--with", other, "--all", "-q")
    lines = [line for line in out.splitlines() if line.startswith(("+", "−"))]
    assert lines == ["+big", "−on  +under", "+there"]


def test_hostile_records_are_drawn(tmp_path: Path) -> None:
    model = attnscope.load("minilm")
    found = attnscope.compare_texts(model, "a $x^$ \u202e cat 你", "a $y^$ \u202e dog 你", query="a")
    for name, page in pages(found):
        assert page.pixels().size, name
    one = attnscope.compare(model, "cat", attnscope.CompareOptions(choice=_one_head()))
    for name, page in pages(one):
        assert page.pixels().size, name


def _one_head() -> object:
    from attnscope.choice import Choice

    return Choice(layers=(0,), heads=(0,))
