"""Heads are watched while a model is trained, and the training does not notice."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnscope
from attnscope.errors import AttnscopeError, UsageError
from attnscope.studies.timeline.options import TimelineOptions
from attnscope.studies.timeline.study import Growing
from attnscope.studies.timeline.watch import HeadWatch

pytest.importorskip("accelerate")

TEXTS = ["1 2 3 1 2 3 1 2", "5 4 6 5 4 6"]
OPTIONS = TimelineOptions(measures=("induction", "entropy_nats"), composition=("K",))


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(11, (5,), generator=torch.Generator().manual_seed(place)).repeat(2)
        return {"input_ids": ids, "labels": ids}


def gpt2() -> Any:
    """A tiny model with dropout, which draws random numbers at every step."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    sizes = {"n_embd": 12, "n_head": 3, "n_layer": 2, "n_positions": 32, "vocab_size": 11}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3, bos_token_id=0))


def train(folder: Path, watch: HeadWatch | None, steps: int = 5) -> tuple[list[float], Any]:
    """The losses of a training, and the model that came of it."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=4, learning_rate=0.01, logging_steps=1, use_cpu=True,
        report_to=[], save_strategy="no", seed=7, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(gpt2(), arguments, train_dataset=Rows(), callbacks=[watch] if watch else [])
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer.model


@pytest.mark.filterwarnings("ignore")  # of transformers and accelerate, about pinned memory and tokens
def test_a_training_that_is_watched_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    watch = HeadWatch(TEXTS, every=2, options=OPTIONS)
    losses, model = train(tmp_path / "alone", None)
    seen, watched = train(tmp_path / "watched", watch)
    assert losses == seen and len(losses) == 5
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, watched.state_dict()[name]), name
    assert not (tmp_path / "alone" / "timeline.npz").exists()
    found = attnscope.load_record(tmp_path / "watched" / "timeline.npz")
    assert found.steps == (0, 2, 4, 5) == watch.timeline.steps
    assert found.has_loss and not found.run.get("skipped")
    assert 0 < sum(one.elapsed_s for one in found.checkpoints) <= watch.elapsed_s
    # What it wrote of the last step is what a study of the model that came of it finds.
    alone = attnscope.heads(attnscope.load(watched.eval()), TEXTS)
    expected = [head.measures["induction"].value for head in alone.heads]
    np.testing.assert_array_equal(found.value[0, -1], expected)
    # So is composition, which is of the weights at each step alone: it moves as they are trained.
    excess = attnscope.circuits(attnscope.load(watched.eval())).excess[1]
    assert len(found.pairs) == 9
    for sender in range(3):
        for receiver in range(3):
            shares = found.composition("K", (0, sender), (1, receiver))
            np.testing.assert_allclose(shares[-1], excess[sender, 3 + receiver], atol=1e-6)
            assert np.isfinite(shares).all() and len(np.unique(shares)) == 4


def test_nothing_of_a_model_is_changed_by_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a study draws and changes: here more than any does."""
    model = gpt2().train()
    add = Growing.add

    def careless(self: Growing, *given: Any) -> None:
        assert not any(module.training for module in model.modules()) and not torch.is_grad_enabled()
        draws()
        add(self, *given)
        model.train().requires_grad_(False)

    monkeypatch.setattr(Growing, "add", careless)
    model.transformer.h[1].eval()
    model.lm_head.weight.requires_grad_(False)
    ids = torch.tensor([[1, 2, 3, 1, 2]])
    model(input_ids=ids, labels=ids).loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    copies = {name: None if grad is None else grad.clone() for name, grad in gradients.items()}
    modes = {name: module.training for name, module in model.named_modules()}
    wanting = {name: weight.requires_grad for name, weight in model.named_parameters()}
    implementation = model.config._attn_implementation

    def draws() -> tuple[Any, ...]:
        return torch.rand(2).tolist(), random.random(), np.random.rand()  # noqa: NPY002

    for seeded in (torch.manual_seed, random.seed, np.random.seed):  # noqa: NPY002
        seeded(5)
    expected = draws()
    for seeded in (torch.manual_seed, random.seed, np.random.seed):  # noqa: NPY002
        seeded(5)
    HeadWatch(TEXTS, out=tmp_path / "timeline.npz", options=OPTIONS).measure(model, 3)
    assert draws() == expected
    for name, weight in model.named_parameters():
        assert weight.grad is gradients[name]
        assert copies[name] is None or torch.equal(weight.grad, copies[name])
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert {name: weight.requires_grad for name, weight in model.named_parameters()} == wanting
    assert model.config._attn_implementation == implementation


def test_a_model_that_cannot_be_measured_is_trained_on(tmp_path: Path) -> None:
    watch = HeadWatch(["1 2 99"], out=tmp_path / "timeline.npz", options=OPTIONS)
    model = gpt2()
    with pytest.warns(UserWarning, match="attnscope cannot measure the heads at step 0: "):
        watch.measure(model, 0)
    watch.measure(model, 1)  # which is not warned of again, or would fail here
    assert not [*tmp_path.iterdir()]
    with pytest.raises(AttnscopeError, match="99"):
        _ = watch.timeline


def test_a_step_is_measured_once_and_a_resumed_training_keeps_what_was_written(tmp_path: Path) -> None:
    watch, model = HeadWatch(TEXTS, options=OPTIONS, every=10), gpt2()
    with pytest.raises(AttnscopeError, match="nothing was measured yet"):
        _ = watch.timeline

    class State:
        global_step, is_world_process_zero = 30, True

    class Arguments:
        output_dir = str(tmp_path)

    for event in (watch.on_train_begin, watch.on_step_end, watch.on_train_end):
        event(Arguments, State, None, model=model)
    assert watch.timeline.steps == (30,)
    assert [path.name for path in tmp_path.iterdir()] == ["timeline-from-30.npz"]
    State.is_world_process_zero, State.global_step = False, 40
    watch.on_step_end(Arguments, State, None, model=model)
    assert watch.timeline.steps == (30,)


def test_a_watch_makes_sense() -> None:
    with pytest.raises(UsageError, match="every 0 steps"):
        HeadWatch(TEXTS, every=0)
    with pytest.raises(AttnscopeError, match="no text"):
        HeadWatch([])
