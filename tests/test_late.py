"""What fails late loses nothing that was measured before: each command that runs long."""

import json
from pathlib import Path

import numpy as np
import pytest

import attnscope
from attnscope import AblateOptions, ablate, heads
from attnscope.choice import Choice
from attnscope.errors import AttnscopeError
from attnscope.results.result import load_record
from attnscope.studies.heads import study as studying
from attnscope.studies.heads.measuring import HeadMeasurer
from tests.ablation_helpers import save_tiny
from tests.heads_helpers import heads_in
from tests.pretend_workers import Here

TEXTS = ["the cat sat, the cat sat", "a dog ran off", "off the cat ran", "the dog sat"]


def test_heads_of_an_encoder_decoder_are_taken_out_kind_by_kind(run, tmp_path):
    folder = save_tiny(tmp_path / "t5", "t5")
    sentences = (
        (Path(__file__).parent.parent / "sample_texts" / "sentences.txt").read_text("utf-8").splitlines()
    )
    (tmp_path / "t.txt").write_text("\n".join(sentence[:24] for sentence in sentences[:5]), "utf-8")
    status, out, err = run(
        "heads",
        "--file",
        "t.txt",
        "-m",
        folder,
        "--causal",
        "--json",
        "--threshold",
        "diffuse=0.01",
        "--no-describe",
    )
    assert status == 0, err
    found = json.loads(out)
    labelled = [head for head in found["heads"] if head["role"]]
    assert len({head["kind"] for head in labelled}) > 1
    for head in found["heads"]:
        assert bool(head["role"]) == (head["zero_kl"] is not None)
    # Each head by its own kind, not by the first that has such a number.
    model = attnscope.load(str(folder))
    for kind in ("decoder", "cross"):
        picked = [(head["layer"], head["head"]) for head in labelled if head["kind"] == kind]
        if not picked:
            continue
        options = AblateOptions(choice=Choice(pick=tuple(picked)), kind=kind)
        alone = ablate(model, (tmp_path / "t.txt").read_text().splitlines(), options)
        kl = dict(zip(alone.head_names, alone["heads"]["zero_kl"].tolist(), strict=True))
        for head in labelled:
            if head["kind"] == kind:
                value = kl[f"{kind} L{head['layer']}H{head['head']}"]
                np.testing.assert_allclose(head["zero_kl"], value, rtol=1e-6)


@pytest.mark.parametrize(
    ("option", "patched", "error"),
    [
        (["--causal"], "add_ablation_effects", RuntimeError("a bug")),
        (["--causal"], "add_ablation_effects", AttnscopeError("too bad", "do better")),
        (["--causal"], "add_ablation_effects", MemoryError()),
    ],
)
def test_heads_are_written_where_a_later_step_fails(run, tmp_path, monkeypatch, option, patched, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(studying, patched, fail)
    status, out, err = run(
        "heads", "the cat. the cat", "-m", "own", *option, "--json", "-o", "out", "-f", "npz"
    )
    assert status == 1
    assert json.loads(out)["heads"]
    assert f"\nerror: {option[0]} failed: " in err
    assert ("failed: RuntimeError: a bug" in err) == (type(error) is RuntimeError)
    assert "what was measured before is in the result" in err
    saved = load_record(tmp_path / "out" / "heads.npz")
    assert len(saved["heads"])
    assert saved.run["failures"][0]["step"] == option[0]


@pytest.mark.parametrize("first", [1, 2])
def test_heads_keep_the_texts_before_a_failure(run, tmp_path, monkeypatch, first):
    (tmp_path / "t.txt").write_text("\n".join(TEXTS))
    monkeypatch.setattr(studying, "BLOCK", first)
    usual = HeadMeasurer.batches

    def batches(measurer, block):
        if block.texts[0].index >= 2:
            raise AttnscopeError("one text does not fit into memory", "cut it")
        return usual(measurer, block)

    monkeypatch.setattr(HeadMeasurer, "batches", batches)
    status, out, err = run("heads", "--file", "t.txt", "-m", "own", "--json", "-o", "out", "-f", "npz")
    assert status == 1
    assert "error: the study of a later text failed: one text does not fit into memory" in err
    found = json.loads(out)
    assert (found["corpus"]["n_texts"], found["corpus"]["complete"]) == (2, False)
    monkeypatch.setattr(HeadMeasurer, "batches", usual)
    alone = heads(attnscope.load("own"), TEXTS[:2])
    saved = load_record(tmp_path / "out" / "heads.npz")
    for mine, other in zip(heads_in(saved), heads_in(alone), strict=True):
        np.testing.assert_allclose(
            mine.measures["entropy_nats"].value, other.measures["entropy_nats"].value, rtol=1e-6
        )


@pytest.mark.usefixtures("worker_here")
def test_a_batch_indexes_what_was_drawn_before_a_failure(run, tmp_path, monkeypatch):
    (tmp_path / "t.txt").write_text("\n".join(TEXTS))
    usual = Here.map_blocks

    def carry_out(*given):
        yield next(usual(*given))
        raise RuntimeError("a bug")

    monkeypatch.setattr(Here, "map_blocks", carry_out)
    status, _, err = run("batch", "t.txt", "-m", "own", "-o", "out", "--workers", "1")
    assert status == 1
    assert "a bug" in err
    assert (tmp_path / "out" / "index.html").exists()
    assert len((tmp_path / "out" / "manifest.jsonl").read_text().splitlines()) >= 1
