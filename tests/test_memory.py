"""Batches that do not fit into memory are halved; the result is that of whole ones, and says so."""

import numpy as np
import pytest
import torch

import attnscope
from attnscope import models
from attnscope.errors import AttnscopeError
from attnscope.models.own.native import NativeModel
from tests.test_devices import numbers_of

TEXTS = [
    "the cat",
    "a cat sat",
    "the mat",
    "it ran on",
    "the cat ran",
    "on a mat",
    "so it sat",
    "the end",
]

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    ),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes."),
    RuntimeError("MPS backend out of memory (MPS allocated: 9.0 GB)"),
    MemoryError(),
]


class Small:
    """Memory for so many tokens, padding included; counts what was tried."""

    def __init__(self, monkeypatch, tokens, error=ERRORS[0]):
        self.tokens, self.tried = tokens, []
        whole = NativeModel.run

        def run(model, batch, probe):
            self.tried.append(batch.ids.numel())
            if batch.ids.numel() > self.tokens:
                raise error
            return whole(model, batch, probe)

        monkeypatch.setattr(NativeModel, "run", run)


STUDIES = {
    "heads": lambda model: attnscope.heads(model, TEXTS),
    "compare": lambda model: attnscope.compare(model, TEXTS),
    "relations": lambda model: attnscope.relations(
        model, "sample_texts/library.py", attnscope.RelationsOptions(chunk=20)
    ),
    "ablate": lambda model: attnscope.ablate(
        model, TEXTS, attnscope.AblateOptions(modes=("zero", "mean"))
    ),
}


@pytest.mark.parametrize("name", STUDIES)
def test_a_batch_that_does_not_fit_is_halved_and_the_result_is_the_same(name, tiny_bert, monkeypatch):
    model = models.load(str(tiny_bert))
    whole = STUDIES[name](model)
    small = Small(monkeypatch, tokens=30)
    found = STUDIES[name](model)
    assert max(small.tried) > 30
    assert len([n for n in small.tried if n <= 30]) > 1
    ours, theirs = (
        numbers_of({k: v for k, v in vars(one).items() if k != "run"}) for one in (whole, found)
    )
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        # Ends of intervals over few texts magnify what float32 rounds.
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-6)
    (note,) = set(found.run["notes"]) - set(whole.run["notes"])
    assert "halved" in note
    assert [n for n in found.run["notes"] if n == note] == [note]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_every_way_of_saying_that_memory_is_full_is_understood(error, tiny_bert, monkeypatch):
    model = models.load(str(tiny_bert))
    Small(monkeypatch, 40, error)
    assert attnscope.heads(model, TEXTS).corpus["n_texts"] == len(TEXTS)


def test_other_errors_are_not_taken_for_it(tiny_bert, monkeypatch):
    model = models.load(str(tiny_bert))
    small = Small(monkeypatch, 40, RuntimeError("shapes do not fit"))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        attnscope.heads(model, TEXTS)
    assert len(small.tried) == 1


@pytest.mark.parametrize("name", STUDIES)
def test_one_text_that_does_not_fit_is_one_clear_line(name, tiny_bert, monkeypatch):
    model = models.load(str(tiny_bert))
    Small(monkeypatch, tokens=3)
    with pytest.raises(
        AttnscopeError, match=r"one text of \d+ tokens does not fit into memory"
    ) as raised:
        STUDIES[name](model)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "command", [["heads"], ["heatmap", "--engine", "native"], ["ablate"]], ids=" ".join
)
def test_the_command_line_says_it_once_or_fails_in_one_line(command, tiny_bert, run, monkeypatch):
    Small(monkeypatch, tokens=3)
    status, _, err = run(*command, "the cat", "-m", tiny_bert, "-o", "o")
    assert status == 1
    assert "memory" in err
    assert "hint: " in err
    assert "Traceback" not in err
