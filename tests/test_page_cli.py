"""`attnscope page`, `attnscope.page` and `record.page()`: from a text or a record to the file."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import attnscope
from attnscope.errors import AttnscopeError
from attnscope.pages import choose_opening_head
from tests.atlas_helpers import small_atlas
from tests.conftest import write_tiny
from tests.findings_helpers import fake_findings
from tests.heads_helpers import heads_in
from tests.record_helpers import simple


def held(path):
    """What a page says that it shows."""
    html = Path(path).read_text("utf-8")
    (found,) = re.findall(r'<script type="application/json" id="manifest">(.*?)</script>', html)
    return json.loads(found)


def texts(path):
    return [text["text"] for text in held(path)["texts"]]


def test_a_text_becomes_a_file(run, tiny_bert, tmp_path):
    status, out, err = run("page", "the cat", "-m", tiny_bert, "-o", "sub/page.html", "-q")
    assert status == 0
    assert out == "sub/page.html\n"
    assert err == ""
    shown = held("sub/page.html")
    assert shown["schema"] == "attnscope.page/1"
    (text,) = shown["texts"]
    (attention,) = text["maps"]
    assert attention["heads"] == [[layer, head] for layer in range(2) for head in range(3)]
    assert attention["full"] == [0, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sub", "tiny-bert"]


def test_texts_and_files_in_their_order(run, tiny_bert, tmp_path):
    (tmp_path / "lines.txt").write_text("the cat.\n\na cat'\n", "utf-8")
    status, _, err = run(
        "page",
        "cat the",
        "the",
        "--file",
        "lines.txt",
        "--split",
        "line",
        "-m",
        tiny_bert,
        "-o",
        "p.html",
    )
    assert status == 0, err
    assert texts("p.html") == ["cat the", "the", "the cat.", "a cat'"]
    status, _, err = run("page", "--file", "lines.txt", "-m", tiny_bert, "-o", "p.html")
    assert texts("p.html") == ["the cat.\n\na cat'"]


def test_records_by_file_and_by_folder(run, tmp_path):
    first = simple(5)
    second = simple(6, seed=1)
    first.save(tmp_path / "one" / "heatmap.npz")
    second.save(tmp_path / "two.npz")
    status, out, err = run(
        "page", "--record", "one", "--record", "two.npz", "-o", "p.html", "--pick", "L1H2"
    )
    assert status == 0, err
    assert out.endswith("/p.html\np.html\n")
    assert texts("p.html") == [first.text, second.text]
    assert held("p.html")["texts"][0]["maps"][0]["heads"] == [[1, 2]]
    assert held("p.html")["texts"][0]["maps"][0]["full"] == []
    assert held("p.html")["start"] == {"v": "matrix", "h": "1.2"}


def test_roles_come_from_a_record_of_heads(run, tmp_path):
    record = simple(5)
    record.save(tmp_path / "heatmap.npz")
    findings = fake_findings(2, 3)
    findings.save(tmp_path / "heads.npz")
    status, _, err = run("page", "--record", "heatmap.npz", "--record", "heads.npz", "-o", "p.html")
    assert status == 0, err
    roles = held("p.html")["roles"]
    for head in heads_in(findings):
        found = roles["heads"]["encoder"][f"{head.layer}.{head.head}"]
        assert [role["name"] for role in found] == [role.name for role in head.roles]
    replace(findings, run={"model": "other", "sha256": "cd" * 32}).save(tmp_path / "heads.npz")
    status, out, err = run("page", "--record", "heatmap.npz", "--record", "heads.npz", "-o", "q.html")
    assert status == 1
    assert out == ""
    assert "of another model" in err
    assert not Path("q.html").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("page", "--record", "heatmap.npz"),
        ("show", "atlas.npz"),
        ("atlas", "a cat", "-m", "own"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_file_that_is_no_page_is_not_replaced(run, tmp_path, arguments):
    simple(5).save(tmp_path / "heatmap.npz")
    small_atlas().save(tmp_path / "atlas.npz")
    notes = tmp_path / "notes.html"
    notes.write_text("<p>a year of work</p>", "utf-8")
    status, _, err = run(*arguments, "-o", "notes.html")
    assert status == 1
    assert notes.read_text("utf-8") == "<p>a year of work</p>"
    assert "cannot replace notes.html: attnscope did not write it" in err
    notes.write_bytes(b"")
    for _ in range(2):  # an empty file is no loss, nor is a page of ours
        assert run(*arguments, "-o", "notes.html")[0] == 0
        assert notes.stat().st_size > 10_000
        notes.write_bytes(notes.read_bytes() + b"older")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ([], 2, "nothing to show"),
        (["a", "--split", "word"], 2, "no split 'word'"),
        (["a", "--scale", "log"], 2, "--scale has no 'log'"),
        (["a", "-o", "."], 2, "is a folder"),
        (["--record", "gone.npz"], 1, "there is no file gone.npz"),
        (["--file", "gone.txt"], 1, "gone.txt"),
        ([" "], 1, "text"),
        (["a", "--record", "gone.npz"], 1, "there is no file gone.npz"),
        (["a", "-L", "9"], 1, "there is no layer 9"),
    ],
)
def test_bad_input_is_one_line(run, tiny_bert, arguments, status, said):
    found, out, err = run("page", *arguments, "-m", tiny_bert)
    assert found == status, err
    assert out == ""
    assert said in err.splitlines()[0]
    assert len(err.splitlines()) <= 2
    assert not list(Path().glob("**/*.html"))


def test_it_is_refused_before_the_model_runs(tiny_bert, monkeypatch):
    model = attnscope.load(tiny_bert)
    monkeypatch.setattr("attnscope.pages.texts.MAX_WEIGHTS", 1)
    monkeypatch.setattr("attnscope.studies.maps.page.run_model", lambda *_: pytest.fail("the model ran"))
    with pytest.raises(AttnscopeError, match="too large for a browser"):
        attnscope.page(model, "the cat")


def test_grouped_queries_have_a_full_width_head(run, tmp_path):
    folder = write_tiny(
        tmp_path / "llama",
        "llama",
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=16,
        head_dim=4,
    )
    status, _, err = run("page", "the cat", "-m", folder, "-o", "p.html")
    assert status == 0, err
    (attention,) = held("p.html")["texts"][0]["maps"]
    assert attention["kind"] == "decoder"
    assert attention["full"] == [0, 1]


def test_python(tiny_bert, tmp_path):
    model = attnscope.load(tiny_bert)
    made = attnscope.page(model, ["the cat", "a"])
    assert texts(made.save(tmp_path / "page.html")) == ["the cat", "a"]
    assert "MiB of HTML" in repr(made)
    assert attnscope.page(model, "the cat").html.count('id="d0"') == 1
    with pytest.raises(AttnscopeError, match="of another model"):
        attnscope.page(model, "a", findings=replace(fake_findings(2, 3), run={"sha256": "00"}))


def test_what_is_no_attention_names_the_command_that_shows_it(run, tmp_path):
    file = small_atlas().save(tmp_path / "atlas.npz")
    status, out, err = run("page", "--record", str(file), "-o", "p.html")
    assert status == 2
    assert out == ""
    assert f"attnscope show {file} -f html -o FOLDER" in err
    status, out, err = run("show", str(file), "-f", "html", "-o", "made", "-q")
    assert status == 0, err
    assert "made/atlas.html" in out.splitlines()[-1]


def test_a_page_opens_on_the_head_whose_queries_choose_distant_tokens(tmp_path):
    record = simple(8, layers=1, heads=4)
    weights = np.full((1, 4, 8, 8), 1 / 8)
    weights[0, 0] = np.eye(8)[0]  # all rest on the first token
    weights[0, 1] = np.eye(8, k=1) + np.eye(8)[0]  # the next token
    weights[0, 2] = np.eye(8)[3]  # all attend to the same token
    weights[0, 3] = 0.5 * np.eye(8, k=4) + 0.5 * np.eye(8, k=-4)  # each to a token of its own
    attention = replace(record.maps[0], weights=weights / weights.sum(-1, keepdims=True))
    assert choose_opening_head(replace(record, maps=(attention,))) == (0, 3)
    assert choose_opening_head(simple(3)) is None
    replace(record, maps=(attention,)).page().save(tmp_path / "p.html")
    assert held(tmp_path / "p.html")["start"] == {"h": "0.3"}
