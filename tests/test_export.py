"""Lists of heads for other programs: what is written is what the other program reads."""

import base64
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

import attnscope
from attnscope.errors import AttnscopeError, UsageError
from attnscope.records.ablation import Effect
from attnscope.records.heads.findings import Estimate, Findings, Head, Role
from attnscope.records.heads.needles import Needles
from attnscope.records.patch import Patching
from attnscope.records.relations.record import Relation, Relations
from attnscope.views.export.formats import FORMATS
from tests.cli_helpers import require_one_line
from tests.conftest import Run

RECORDS = Path(__file__).parent / "records"
RETRIEVAL = [[0.5, 0.0, 0.25, 0.0], [0.0, 0.125, 0.0, 1.0]]
"""(layer, head); two query heads read each key/value head."""


def findings(kv_heads: int | None = 2, **changes: Any) -> Findings:
    """Needles of four tokens: three at the first depth and one at the second."""

    def head(layer: int, number: int) -> Head:
        score = RETRIEVAL[layer][number]
        numbers = {"retrieval": score, "decoy": 0.125 if number == 2 else 0.0}
        numbers |= {"retrieval_at_0": score, "retrieval_at_100": score}
        counts = {"retrieval_at_0": 12.0, "retrieval_at_100": 4.0}
        measures = {
            name: Estimate(value, value / 2, min(1, 2 * value), 0.01, counts.get(name, 16.0))
            for name, value in numbers.items()
        }
        role = Role("retrieval", "retrieval", score, 0, 1, 0.0, 0.1, 0.01, 0.01, False)
        return Head("decoder", layer, number, (role,) if score > 0.2 else (), float("nan"), measures)

    run = {"model": "tiny", "source": "folder ./tiny", "sha256": "ab", "notes": []}
    run |= {"n_layers": {"decoder": 2}, "n_heads": {"decoder": 4}}
    run |= {} if kv_heads is None else {"n_kv_heads": {"decoder": kv_heads}}
    heads = tuple(head(layer, number) for layer in range(2) for number in range(4))
    made = Findings(run, {"of": "needles"}, {"n_answer": 4}, heads, {}, needles=Needles(Effect(1, 1, 1, 1), ()))
    return replace(made, **changes)


def relations(kind: str = "cross", of: str = "recordings", found: bool = True) -> Relations:
    accuracy = np.array([[0.2, 0.1, 0.3], [0.9, 0.3, 0.95]])
    passes = (accuracy > 0.5) & found
    numbers = dict.fromkeys(("choice", "accuracy", "low", "high", "mass", "p", "q"), accuracy)
    relation = Relation("word→sound", 40, 20, 20, 10, {}, "diagonal", 0.4, "", **numbers, found=passes)
    return Relations({"model": "tiny\nwhisper", "notes": []}, {"of": of}, {}, kind, (relation,))


def patching() -> Patching:
    made = attnscope.load_record(RECORDS / "patching.npz")
    assert isinstance(made, Patching)
    return replace(made, q=np.arange(len(made.heads)) / 60)  # three above the level, or one of no effect


# Each form --------------------------------------------------------------------------------------------------------


def test_scores_are_a_table_of_all_heads(tmp_path: Path) -> None:
    (path,) = attnscope.export(findings(), "scores", tmp_path / "scores.json")
    told = json.loads(path.read_text())
    assert (told["n_layers"], told["n_heads"], told["n_kv_heads"], told["score"]) == (2, 4, 2, "retrieval")
    assert told["chosen"] == [[1, 3], [0, 0], [0, 2]]
    assert [row["kv_head"] for row in told["heads"]] == [0, 0, 1, 1] * 2
    row = {"layer": 0, "head": 2, "kv_head": 1, "score": 0.25, "low": 0.125, "high": 0.5, "decoy": 0.125}
    assert told["heads"][2] == row
    (path,) = attnscope.export(findings(), "scores", tmp_path / "scores.safetensors")
    with safe_open(path, "numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("score").reshape(2, 4), RETRIEVAL)
        assert {*file.keys()} == {*row}
        assert json.loads(file.metadata()["run"])["sha256"] == "ab"


def test_scores_of_every_record_with_heads(tmp_path: Path) -> None:
    found = attnscope.export(patching(), "scores", tmp_path / "a.json")[0].read_text()
    assert json.loads(found)["score"] == "effect" and '"baseline": null' in found
    attnscope.export(findings(), "scores", tmp_path / "b.json", score="decoy")
    told = json.loads(attnscope.export(relations(), "scores", tmp_path / "c.json")[0].read_text())
    assert [row["score"] for row in told["heads"]][3] == 0.9 and told["heads"][0]["baseline"] == 0.4


def test_retrieval_heads_are_ranked_as_their_reader_ranks_them(tmp_path: Path) -> None:
    (path,) = attnscope.export(findings(), "retrieval", tmp_path / "head_score.json")
    with path.open() as file:
        listed = json.loads(file.readline())  # readers take the first line
    means = {tuple(map(int, name.split("-"))): np.mean(scores) for name, scores in listed.items()}
    assert {len(scores) for scores in listed.values()} == {4}  # one per needle
    np.testing.assert_array_equal([[means[layer, head] for head in range(4)] for layer in range(2)], RETRIEVAL)


def test_full_attention_heads_are_the_largest_of_their_group(tmp_path: Path) -> None:
    paths = attnscope.export(findings(), "duo", tmp_path / "pattern", recent_size=128)
    assert [path.name for path in paths] == ["full_attention_heads.tsv", "config.json"]
    values = np.loadtxt(paths[0], dtype=float, delimiter="\t")
    np.testing.assert_array_equal(np.clip(values, 0, 1), [[0.5, 0.125], [0.125, 1.0]])  # the decoy's share is off
    sizes = json.loads(paths[1].read_text())
    assert (sizes["sink_size"], sizes["recent_size"]) == (64, 128)


def test_sink_shares_order_heads_that_retrieve_nothing(tmp_path: Path) -> None:
    one = findings()
    rests = replace(one, needles=None, heads=tuple(replace(h, resting_share=h.head / 4) for h in one.heads))
    nothing = replace(one.heads[0].measures["retrieval"], value=0.0)
    measures = {"retrieval": nothing, "decoy": nothing}
    still = replace(one, heads=tuple(replace(head, measures=measures) for head in one.heads))
    attnscope.export(still, "duo", tmp_path, sinks=rests)
    np.testing.assert_allclose(np.loadtxt(tmp_path / "full_attention_heads.tsv"), [[1e-3, 5e-4]] * 2)
    other = replace(rests, run={**rests.run, "sha256": "cd"})
    with pytest.raises(AttnscopeError, match="sink shares are of tiny"):
        attnscope.export(still, "duo", tmp_path, sinks=other)
    nameless, other = (replace(each, run={**each.run, "sha256": ""}) for each in (still, rests))
    with pytest.raises(AttnscopeError, match="both lack a sha256"):
        attnscope.export(nameless, "duo", tmp_path, sinks=other)
    with pytest.raises(AttnscopeError, match="not of the same heads"):
        attnscope.export(still, "duo", tmp_path, sinks=replace(rests, heads=rests.heads[:3]))


def test_alignment_heads_for_transformers(tmp_path: Path) -> None:
    from transformers import GenerationConfig

    before = GenerationConfig(max_length=77)
    before.save_pretrained(tmp_path)
    attnscope.export(relations(), "whisper", tmp_path / "generation_config.json")
    after = GenerationConfig.from_pretrained(tmp_path)
    assert after.alignment_heads == [[1, 0], [1, 2]] and after.max_length == 77  # other fields stay
    attnscope.export(relations(), "whisper", tmp_path / "generation_config.json", top=1)
    assert GenerationConfig.from_pretrained(tmp_path).alignment_heads == [[1, 2]]
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(AttnscopeError, match="is no JSON with fields"):
        attnscope.export(relations(), "whisper", tmp_path / "list.json")


def test_alignment_heads_for_other_whispers(tmp_path: Path) -> None:
    attnscope.export(relations(), "openai-whisper", tmp_path / "heads.txt")
    raw = gzip.decompress(base64.b85decode((tmp_path / "heads.txt").read_bytes()))
    mask = np.frombuffer(raw, dtype=bool).reshape(2, 3)
    assert np.argwhere(mask).tolist() == [[1, 0], [1, 2]]
    code = attnscope.export(relations(), "whisper.cpp", tmp_path / "heads.h")[0].read_text()
    assert "whisper_ahead aheads[] = { {1, 0}, {1, 2} };" in code and "{ 2, aheads };" in code
    assert all(line.startswith(("//", "static")) for line in code.splitlines())  # no name breaks out of a comment


def test_important_heads_are_the_best_first(tmp_path: Path) -> None:
    told = json.loads(attnscope.export(findings(), "vllm-hook", tmp_path / "a.json", top=2)[0].read_text())
    assert told["params"]["important_heads"] == [[1, 3], [0, 0]]
    assert told["hookq"]["hookq_mode"] == "all_tokens" and told["model_info"]["name"] == "tiny"
    made = patching()
    heads = json.loads(attnscope.export(made, "vllm-hook", tmp_path / "b.json")[0].read_text())["params"]
    effects = [made.heads[place].effects["effect"].value for place in range(len(made.heads))]
    passing = [place for place in np.argsort(effects)[::-1] if made.q[place] <= 0.05 and effects[place] > 0]
    assert heads["important_heads"] == [[made.heads[place].layer, made.heads[place].head] for place in passing]


def test_translation_heads_have_their_share_of_right_words(tmp_path: Path) -> None:
    told = json.loads(attnscope.export(relations("decoder", "texts"), "alignatt", tmp_path / "a.json")[0].read_text())
    assert told["token_alignment_heads"] == [{"layer": 1, "head": 2, "ts": 0.95}, {"layer": 1, "head": 0, "ts": 0.9}]
    assert np.array(told["ts_matrix"]).shape == (told["num_layers"], told["num_heads"]) == (2, 3)


def test_every_form_names_its_source() -> None:
    for name, form in FORMATS.items():
        assert form.write.__doc__ and re.search(r"[\w./-]+\.(py|md|h|json)\b", form.source), name


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    whisper, model = tmp_path / "whisper.json", tmp_path / "config.json"
    whisper.write_text('{"least": -Infinity}')
    attnscope.export(relations(), "whisper", whisper)
    assert json.loads(whisper.read_text())["least"] == float("-inf")
    model.write_text('{"model_type": "llama"}')
    with pytest.raises(AttnscopeError, match="config.json belongs to something else"):
        attnscope.export(findings(), "duo", tmp_path)
    assert json.loads(model.read_text()) == {"model_type": "llama"}
    for _ in range(2):  # its own files are replaced
        attnscope.export(findings(), "duo", tmp_path / "pattern")
    with pytest.raises(AttnscopeError, match="cannot read"):
        attnscope.export(relations(), "whisper", tmp_path / ("x" * 300))


# What cannot answer -----------------------------------------------------------------------------------------------


def without_decoy() -> Findings:
    one = findings()
    return replace(
        one,
        heads=tuple(
            replace(head, measures={name: each for name, each in head.measures.items() if name != "decoy"})
            for head in one.heads
        ),
    )


def damaged(**changes: Any) -> Findings:
    """Needles with one head changed, or all its measures."""
    one, *others = findings().heads
    of_measure = {name: changes.pop(name) for name in ("count",) if name in changes}
    measures = {name: replace(each, **of_measure) for name, each in one.measures.items()}
    return findings(heads=(replace(one, **changes, measures=measures), *others))


@pytest.mark.parametrize(
    ("form", "record", "said"),
    [
        ("retrieval", damaged(count=float("nan")), "does not say how many needles"),
        ("retrieval", damaged(count=float("inf")), "does not say how many needles"),
        ("retrieval", damaged(count=1e12), "does not say how many needles"),
        ("duo", damaged(layer=10**12), "has a head L1000000000000H0, which its model has not"),
        ("scores", damaged(layer=-1), "has a head L-1H0"),
        ("retrieval", damaged(head=4), "has a head L0H4"),
        ("vllm-hook", damaged(layer=2), "has a head L2H0"),
        ("duo", findings(heads=findings().heads[1:]), "some heads have no scores"),
        ("duo", findings(kv_heads=True), "does not say how many key/value heads"),
        ("duo", findings(kv_heads=None), "does not say how many key/value heads"),
        ("duo", findings(kv_heads=3), "does not say how many key/value heads"),
        ("duo", without_decoy(), "has no decoy"),
        ("duo", relations(), "does not say which heads retrieve"),
        ("retrieval", patching(), "does not say which heads retrieve"),
        ("retrieval", findings(options={}), "does not say how long its needles are"),
        ("duo", findings(needles=None), "has no retrieval scores"),
        ("retrieval", findings(needles=None), "has no retrieval scores"),
        ("whisper", findings(), "does not say which heads listen"),
        ("whisper", relations(of="texts"), "does not say which heads listen"),
        ("whisper.cpp", relations(found=False), "no head passes the test on word→sound"),
        ("vllm-hook", relations(), "is of cross attention"),
        ("alignatt", patching(), "does not say which heads align words"),
        ("scores", attnscope.load_record(RECORDS / "cost.json"), "has no scores of heads"),
    ],
)
def test_records_that_cannot_answer_are_refused(form: str, record: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(AttnscopeError, match=said) as error:
        attnscope.export(record, form, tmp_path / "out")
    assert error.value.hint and not any(tmp_path.iterdir())


def test_what_is_asked_for_wrongly_is_refused(tmp_path: Path) -> None:
    for wrong, said in (
        ({"for_": "bert"}, "there is no form 'bert'"),
        ({"for_": "scores", "score": "loudness"}, "has no score 'loudness'"),
        ({"for_": "retrieval", "sinks": findings()}, "sink shares are for duo"),
        ({"for_": "vllm-hook", "top": -1}, "top is -1"),
        ({"for_": "duo", "recent_size": float("nan")}, "recent_size is nan"),
        ({"for_": "scores", "out": tmp_path / "scores.txt"}, "is no name for scores"),
    ):
        with pytest.raises(UsageError, match=said):
            attnscope.export(findings(), **({"out": tmp_path / "x.json"} | wrong))
    for form in ("scores", "duo", "whisper"):
        record = relations() if form == "whisper" else findings()
        with pytest.raises(AttnscopeError, match="a name holds no NUL"):
            attnscope.export(record, form, tmp_path / "a\0b")
    with pytest.raises(AttnscopeError, match="a name holds no NUL"):
        findings().save(tmp_path / "a\0.npz")
    several = replace(relations(), relations=relations().relations * 2)
    with pytest.raises(UsageError, match="a record of several relations"):
        attnscope.export(several, "scores", tmp_path / "x.json")


# From the command line --------------------------------------------------------------------------------------------


def test_the_command_writes_files_and_names_them(run: Run) -> None:
    findings().save("heads.npz")
    assert run("export", "heads.npz", "--for", "duo", "-o", "pattern").out.split() == [
        "pattern/full_attention_heads.tsv", "pattern/config.json",
    ]  # fmt: skip
    told = json.loads(run("export", "heads.npz", "--for", "retrieval", "-o", "a.json", "--json").out)
    assert told["files"] == ["a.json"] and told["for"] == "retrieval"
    assert json.loads(run("export", "heads.npz", "--for", "scores", "-o", "-").out)["score"] == "retrieval"
    require_one_line(run("export", "heads.npz", "--for", "whisper", "-o", "b.json"), "does not say which heads listen")
    require_one_line(run("export", "heads.npz", "--for", "x", "-o", "b.json"), "there is no form 'x'", 2)
    require_one_line(run("export", "heads.npz", "--for", "duo", "-o", "p", "-m", "own"), "--model cannot be given", 2)
    require_one_line(run("export", "heads.npz", "--for", "scores", "-o", "p", "--stream"), "--stream cannot be", 2)
    require_one_line(run("export", "none.npz", "--for", "scores", "-o", "p"), "none.npz")
