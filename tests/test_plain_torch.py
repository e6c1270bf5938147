"""What a caller has set in torch does not reach a study: its numbers are those that the record names."""

import contextlib
import inspect

import numpy as np
import pytest
import torch

import attnscope
from tests.ablation_helpers import tiny
from tests.conftest import write_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = ["5 9 7 11 5 9 13", "8 6 7 20 21", "30 31 9 9 5 6"]

STUDIES = {
    "heatmap": lambda model: attnscope.heatmap(model, TEXTS[0]),
    "trace": lambda model: attnscope.trace(model, TEXTS[0], 1),
    "weights": lambda model: attnscope.weights(model),
    "heads": lambda model: attnscope.heads(model, TEXTS),
    "ablate": lambda model: attnscope.ablate(model, TEXTS, attnscope.AblateOptions(importance=True)),
    "compare": lambda model: attnscope.compare(model, TEXTS),
    "atlas": lambda model: attnscope.atlas(model, TEXTS),
}


@contextlib.contextmanager
def default_device(name):
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


SETTINGS = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference_mode": torch.inference_mode,
    "meta": lambda: default_device("meta"),
}


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_gives_the_same_whatever_its_caller_has_set(study):
    model = attnscope.load(tiny("llama").requires_grad_(False))
    plain = STUDIES[study](model)
    for name, setting in SETTINGS.items():
        with setting():
            found = STUDIES[study](model)
        assert not found.run.get("failures"), name
        assert [*found.arrays()] == [*plain.arrays()]
        for of, array in plain.arrays().items():
            np.testing.assert_array_equal(found.arrays()[of], array, err_msg=f"{of} under {name}")


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("engine", ["native", "hf"])
def test_so_does_a_model_that_is_loaded_there(engine, setting, tmp_path):
    folder = write_tiny(tmp_path, kind="AutoModelForMaskedLM")
    plain = attnscope.heatmap(attnscope.load(folder, engine=engine), "the cat").weights
    with SETTINGS[setting]():
        model = attnscope.load(folder, engine=engine)
        np.testing.assert_array_equal(attnscope.heatmap(model, "the cat").weights, plain)
        options = attnscope.AblateOptions(importance=model.loss is not None)
        ablated = attnscope.ablate(model, ["the cat", "a cat"], options)
    assert not ablated.run.get("failures")
    assert ("importance" in ablated["heads"]) == (engine == "hf")


def test_every_study_of_the_public_interface_leaves_its_callers_settings_aside():
    for name, (module, _) in attnscope._find_public_names().items():
        value = getattr(attnscope, name)
        if inspect.isfunction(value) and module.startswith("attnscope.studies."):
            assert value.__globals__["__name__"] == "contextlib", name
