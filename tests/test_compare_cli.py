"""`attnscope compare` and `show` of what it wrote, as a user runs them: what is printed and written, how they fail."""

import json
import re
from pathlib import Path

import pytest

import attnscope
from tests.conftest import names_in

SENTENCES = str(Path(__file__).parent.parent / "sample_texts" / "sentences.txt")
TIRED = "The animal didn't cross the street because it was too tired."
WIDE = "The animal didn't cross the street because it was too wide."


def test_all_heads_as_tables_and_files(run, tmp_path):
    status, out, err = run("compare", "-m", "own", "--file", SENTENCES, "-o", "out", "-q")
    assert (status, err) == (0, "")
    assert "most alike, by Hellinger distance" in out
    assert "least like any other" in out
    names = ["compare.npz", "compare.csv", "matrix.png"]
    assert out.splitlines()[-3:] == [f"out/{name}" for name in names]


def test_one_json_document(run):
    status, out, _ = run("compare", "-m", "own", TIRED, "--json", "--measures", "jensen-shannon", "-q")
    document = json.loads(out)
    assert status == 0
    options = document["options"]
    assert document["schema"] == "attnscope.compare/2"
    assert options["compared"] == "heads"
    assert document["files"] == []
    assert options["distances"] == ["jensen_shannon"]
    assert document["run"]["model"] == "own"
    assert document["distance_low:jensen_shannon"][0][1] is None


def test_a_minimal_pair(run, tmp_path):
    status, out, err = run("compare", TIRED, "--with", WIDE, "--query", "it", "-o", "out", "--all")
    assert (status, err) == (0, "")
    first = next(line for line in out.splitlines() if line.startswith("L3H1"))
    assert (
        "differs most between the texts, at “it”" in first
        and "most where it looks from “it”: weight on animal 0.68 → 0.28" in out
    )
    ranked = [line.split()[0] for line in out.splitlines() if line.startswith("L") and "→" in line]
    assert "L3H1" in ranked[:5]
    assert set(names_in(tmp_path / "out")) == {
        "compare.npz",
        "compare.csv",
        "change.png",
        "change-overall.png",
        "differences.png",
        "maps.png",
        "query-010.png",
    }


def test_names_that_change_places_keep_their_weights(run):
    """What stands where the other name stood is compared with it; a token without a partner has a dash, not a 0."""
    texts = "Tom met Ann and he left.", "Ann met Tom and he left."
    status, out, _ = run("compare", texts[0], "--with", texts[1], "--query", "he", "--all")
    assert status == 0
    assert "→ –" not in out
    assert "– →" not in out
    assert "overall: the root mean square over the tokens that both texts share" in out
    status, out, _ = run("compare", texts[0], "--with", "Tom met Ann and so he left.", "--query", "he")
    assert status == 0
    assert re.search(r"so +– → [01]\.\d\d", out)
    assert "–: the other text has no token for this one" in out


def test_a_query_that_stands_twice_is_said_to_be_pooled(run):
    pair = ("compare", "the cat saw the dog", "--with", "the cat saw the cow")
    _, out, err = run(*pair, "--query", "the")
    assert "'the' names @1, @4: heads are ranked by all of these together" in err
    assert run(*pair, "--query", "@4")[2] == run(*pair)[2] == ""


def test_the_figure_shows_what_it_attends_to_in_both_texts():
    found = attnscope.compare_texts(attnscope.load("minilm"), TIRED, WIDE, query="it")
    (grid,) = found.report().blocks_by_figure()["query-010"]
    assert grid.rows[:2] == ["L3H1 · 0.341: first text", "second text"]
    animal = grid.columns.index("animal")
    assert grid.values[:2, animal] == pytest.approx([0.68, 0.28], abs=0.005)


def test_picked_heads(run):
    status, out, _ = run("compare", TIRED, "--pick", "L3H1,L5H11", "-o", "out", "-f", "svg,pdf,json")
    assert status == 0
    assert "no one head of the model could compute it" in " ".join(out.split())
    assert out.splitlines()[-5:] == [
        "out/compare.json",
        "out/picked.svg",
        "out/picked.pdf",
        "out/differences.svg",
        "out/differences.pdf",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give one of TEXT and --file"),
        (["a", "--pick", "L0H0,L0H1", "--with", "b"], "different comparisons"),
        (["a", "--query", "a"], "--query ranks the heads of a minimal pair"),
        (["a", "--measures", "cosine"], "there is no measure 'cosine'"),
        (["a", "--pick", "L0H0"], "nothing to compare"),
    ],
)
def test_wrong_usage_is_one_line_and_a_hint(run, arguments, said):
    status, out, err = run("compare", "-m", "own", *arguments)
    assert (status, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) <= 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a cat", "--with", " "], "the second text is blank"),
        (["a cat", "--with", "a dog", "--query", "horse"], "no token is 'horse'"),
        (["a cat", "--with-model", "minilm"], "split the same text into different tokens"),
    ],
)
def test_what_cannot_be_is_one_line_and_a_hint(run, arguments, said):
    status, out, err = run("compare", "-m", "own", *arguments)
    assert (status, out) == (1, "")
    assert said in err
