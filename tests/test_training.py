"""A training says of each checkpoint what `heads` and `ablate` say of it, and loses none for the sake of another."""

import gc
import json
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import attnscope
from attnscope.errors import AttnscopeError
from attnscope.models import catalog
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.training import study
from attnscope.studies.training.options import TrainingOptions
from attnscope.studies.training.study import find_checkpoints, find_step
from examples.decoder import decoder, wrap
from tests.heads_helpers import heads_in
from tests.training_helpers import TEXTS, small_training, train

MEASURES = ("induction", "entropy_nats")
QUICK = TrainingOptions(measures=("induction",), loss="none")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("training") / "run")


@pytest.fixture
def own_run(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_each_checkpoint_is_what_a_study_of_it_alone_finds(trained):
    found = attnscope.training(f"{trained}/checkpoint-*", TEXTS, TrainingOptions(measures=MEASURES))
    assert found.steps == (0, 5, 10)
    assert found.run["model"] == "run"
    for number, step in enumerate(found.steps):
        model = attnscope.load(trained / f"checkpoint-{step}")
        alone = attnscope.heads(model, TEXTS, attnscope.HeadsOptions(describe=None))
        for place, head in enumerate(heads_in(alone)):
            assert [*found["heads"].rows()][1 + place] == (head.kind, head.layer, head.head)
            for row, name in enumerate(MEASURES):
                one = head.measures[name]
                assert found.interval("value")[row, number, place].tolist() == [
                    one.value,
                    one.low,
                    one.high,
                ]
            roles = found["roles"]["name"][found["has_role"][:, number, place] > 0]
            assert {*roles.tolist()} == {role.name for role in head.roles}
        whole = attnscope.ablate(model, TEXTS, attnscope.AblateOptions(modes=("zero",))).row(
            "whole", "loss"
        )
        assert whole is not None
        np.testing.assert_allclose(found["checkpoints"].interval("loss")[number], whole)
        assert found["checkpoints"]["sha256"][number] == model.info.sha256
    losses = found["checkpoints"]["loss"].tolist()
    assert losses == sorted(losses, reverse=True)


def test_models_in_memory_are_given_by_step():
    networks = {step: decoder(["a", "b"], n_heads=1, d_model=4, seed=step) for step in (7, 2)}
    models = {step: wrap(network) for step, network in networks.items()}
    found = attnscope.training(
        models, ["a b a b", "b b a"], TrainingOptions(measures=("induction",), loss="none")
    )
    assert found.steps == (2, 7)
    assert found["checkpoints"]["name"].tolist() == ["step 2", "step 7"]
    assert np.isnan(found["checkpoints"]["loss"]).all()


def test_models_are_loaded_one_at_a_time_and_let_go(trained, monkeypatch):
    networks = []
    alive = []
    load = LoadOptions.load

    def count(self, spec):
        gc.collect()
        alive.append(sum(one() is not None for one in networks))
        model = load(self, spec)
        networks.append(weakref.ref(model))
        return model

    monkeypatch.setattr(LoadOptions, "load", count)
    attnscope.training(f"{trained}/checkpoint-*", TEXTS, QUICK)
    assert alive == [0, 0, 0]


# What cannot be measured -----------------------------------------------------------------------------------------


def test_a_checkpoint_that_cannot_be_read_is_one_line_and_the_rest_go_on(own_run, run):
    (own_run / "checkpoint-5" / "model.safetensors").write_bytes(b"{}")
    (own_run / "checkpoint-7").mkdir()
    decoder(["the", "cat"], n_layers=1).save(own_run / "checkpoint-8")
    texts = own_run.parent / "texts.txt"
    texts.write_text("\n".join(TEXTS))
    status, out, err = run(
        "training",
        own_run / "checkpoint-*",
        "--file",
        texts,
        "-f",
        "npz,svg",
        "-o",
        "out",
        "--measures",
        "induction",
    )
    lines = err.splitlines()
    assert status == 1, err
    assert len(lines) == 5
    assert "checkpoint-5" in lines[0]
    assert "cannot load checkpoint-5" in lines[0]
    assert "checkpoint-7" in lines[1]
    assert "holds no config.json" in lines[1]
    assert "checkpoint-8" in lines[2]
    assert lines[3] == "error: 3 checkpoints could not be measured"
    found = attnscope.load_record("out/training.npz")
    assert found.steps == (0, 10)
    assert [Path(one["source"]).name for one in found.run["skipped"]] == [
        "checkpoint-5",
        "checkpoint-7",
        "checkpoint-8",
    ]
    assert "attends to all keys alike" in Path("out/training.svg").read_text("utf-8")


def test_whatever_one_checkpoint_raises_the_others_are_not_lost(trained, monkeypatch):
    load = LoadOptions.load

    def stumble(self, spec):
        if "checkpoint-5" in str(spec):
            raise RuntimeError("mat1 and mat2\nshapes")
        return load(self, spec)

    monkeypatch.setattr(LoadOptions, "load", stumble)
    found = attnscope.training(f"{trained}/checkpoint-*", TEXTS, QUICK)
    assert found.steps == (0, 10)
    assert [one["reason"] for one in found.run["skipped"]] == ["RuntimeError: mat1 and mat2"]


@pytest.mark.parametrize("at", ["loading", "measuring"])
def test_ctrl_c_keeps_what_was_done(own_run, run, monkeypatch, at):
    load = LoadOptions.load
    heads = study.heads

    def stop_loading(self, spec):
        if "checkpoint-10" in str(spec):
            raise KeyboardInterrupt
        return load(self, spec)

    def stop_measuring(model, *rest):
        found = heads(model, *rest)
        if model.info.name == "checkpoint-10":  # as `heads` gives what it has where it is interrupted
            return replace(found, corpus={**found.corpus, "complete": False})
        return found

    if at == "loading":
        monkeypatch.setattr(LoadOptions, "load", stop_loading)
    else:
        monkeypatch.setattr(study, "heads", stop_measuring)
    texts = own_run.parent / "texts.txt"
    texts.write_text("\n".join(TEXTS))
    status, _, err = run(
        "training",
        own_run / "checkpoint-*",
        "--file",
        texts,
        "--loss",
        "none",
        "-o",
        "out",
        "-f",
        "npz",
        "-q",
    )
    assert status == 130
    assert err.splitlines() == ["note: incomplete: this is what 2 checkpoints say", "error: interrupted"]
    found = attnscope.load_record("out/training.npz")
    assert (found.steps, found.corpus["complete"]) == ((0, 5), False)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("run/checkpoint-*",), "give one of --file and --probe"),
        (("nowhere/checkpoint-*", "--probe", "repeat"), "no folder matches nowhere/checkpoint-*"),
        (("run", "--probe", "needle"), "there is no probe 'needle'"),
        (("run", "--probe", "repeat", "--measures", "inducton"), "there is no measure 'inducton'"),
        (("run", "--probe", "repeat", "--threshold", "induction=2"), "the threshold of induction is 2"),
        (("run", "--probe", "repeat", "-f", "gif", "-o", "out"), "there is no format 'gif'"),
    ],
)
def test_wrong_usage_is_one_line(given, told, run, tmp_path):
    status, out, err = run("training", *given)
    assert status == 2, err
    assert out == ""
    assert err.startswith(f"error: {told}")
    assert not [*tmp_path.iterdir()]


# Which checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("run/checkpoint-500", 500),
        ("EleutherAI/pythia-14m@step143000", 143000),
        ("allenai/OLMo-2@stage1-step1000-tokens5B", 1000),
        ("run/epoch-3-iter_250", 250),
        ("run2/step-007", 7),
        ("run2/final", None),
        ("org/name7@main", None),
        ("run/3", 3),
        ("run/0003", 3),
        ("run/checkpoint-" + "9" * 25, None),
    ],
)
def test_a_step_is_read_off_a_name(name, step):
    assert find_step(name) == step


def test_what_transformers_wrote_beside_it_wins(tmp_path):
    folder = tmp_path / "final"
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 77}))
    assert find_step(str(folder)) == 77
    for damaged in ("[", '{"global_step": 1' + 400 * "0" + "}"):
        (folder / "trainer_state.json").write_text(damaged)
        assert find_step(str(folder)) is None


def test_checkpoints_come_in_the_order_of_their_steps_once_each(tmp_path):
    for name in ("checkpoint-10", "checkpoint-9", "checkpoint-100", "final", "step9"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-1.txt").write_text("")
    stages, skipped = find_checkpoints([f"{tmp_path}/*", f"{tmp_path}/checkpoint-9"])
    assert [Path(stage.name).name for stage in stages] == [
        "checkpoint-9",
        "checkpoint-10",
        "checkpoint-100",
    ]
    told = [(Path(one["source"]).name, one["reason"]) for one in skipped]
    assert told[0][0] == "final"
    assert "no step" in told[0][1]
    assert told[1][0] == "step9"
    assert "its step 9 is that of" in told[1][1]


def test_revisions_of_the_hub_are_checkpoints(trained, monkeypatch):
    """As the cache holds them: a snapshot a revision, of which `refs` names the commit."""
    asked = []

    def snapshot(repo_id, allow_pickle, revision, config_only):
        asked.append((repo_id, revision))
        return trained / f"checkpoint-{revision.removeprefix('step')}"

    monkeypatch.setattr(catalog, "cached_folder", snapshot)
    names = ["org/name@step10", "org/name@step0", "org/name@step5"]
    found = attnscope.training(names, TEXTS, QUICK)
    assert found.steps == (0, 5, 10)
    assert found.run["model"] == "org/name"
    assert {*asked} == {("org/name", f"step{n}") for n in (0, 5, 10)}
    folders = attnscope.training(f"{trained}/checkpoint-*", TEXTS, QUICK)
    np.testing.assert_array_equal(found["value"], folders["value"])


# The record ------------------------------------------------------------------------------------------------------


def test_since_when_a_head_has_had_a_role():
    found = small_training()
    assert found.since("induction") == {"L1H1": 20}
    assert found.since("previous_token") == {}
    assert found.report().answer[1] == "induction (attends to what followed): L1H1 since step 20"
    gap = found["has_role"].copy()
    gap[1, :, 0] = (1, 2, 0, 2)
    gap[1, :, 1] = 2
    found = replace(found, grids={**found.grids, "has_role": gap})
    assert found.since("induction") == {"L0H0": 40, "L0H1": 0, "L1H1": 20}
    assert "L0H1" in found.report().answer[1]
    with pytest.raises(AttnscopeError, match="no role 'sink'"):
        found.since("sink")


def test_steps_ascend_and_are_steps():
    with pytest.raises(ValueError, match="ascend"):
        small_training(steps=(0, 10, 10, 20)).require_whole()
    with pytest.raises(ValueError, match="not between"):
        small_training(steps=(-1, 10, 11, 20)).require_whole()
