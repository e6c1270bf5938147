"""Where models run: every study on a device that is not the processor gives what the processor gives.

The device is pretended (tests/pretend_device.py): a tensor that is made in the wrong place, or read without being
moved, raises there as it would on CUDA.
"""

import numpy as np
import pytest
import torch

import attnscope
from attnscope import models
from attnscope.choice import Choice
from attnscope.core.attention import precision
from attnscope.errors import AttnscopeError
from attnscope.models import devices
from attnscope.studies.inputs.reading import Prompt
from attnscope.studies.maps.page import read_page_text
from tests.ablation_helpers import save_tiny
from tests.pretend_device import NAME, pretending
from tests.processes import python

TEXTS = ["The cat sat on the mat.", "It was tired.", "Time flies like an arrow."]


@pytest.fixture(params=[True, False], ids=["float64", "no-float64"])
def elsewhere(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(precision, "WITHOUT_FLOAT64", frozenset({NAME}))
    # Of tensors of this kind torch's inference mode cannot make views; gradients are off all the same.
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)
    with pretending(float64=request.param) as moves:
        yield moves


def numbers_of(found):
    """All floating-point numbers of a record, in the order of its fields."""
    if isinstance(found, torch.Tensor):
        found = found.cpu().numpy()
    if isinstance(found, np.ndarray):
        return [found.astype(np.float64)] if found.dtype.kind == "f" else []
    if isinstance(found, float):
        return [np.array(found)]
    if isinstance(found, dict):
        return [x for value in found.values() for x in numbers_of(value)]
    if isinstance(found, list | tuple):
        return [x for value in found for x in numbers_of(value)]
    if hasattr(found, "__dict__"):
        return [
            x
            for name, value in vars(found).items()
            if not name.startswith("_")
            for x in numbers_of(value)
        ]
    return []


STUDIES = {
    "heatmap": lambda model: attnscope.heatmap(model, TEXTS[0]),
    "one-head": lambda model: attnscope.heatmap(model, TEXTS[0], pick=[(1, 1)]),
    "part": lambda model: attnscope.heatmap(model, TEXTS[1], rows=(2, 5), cols=(1, 4)),
    "pooled": lambda model: attnscope.pooled_heatmap(model, TEXTS[1], cells=8),
    "heads": lambda model: attnscope.heads(model, TEXTS),
    "compare": lambda model: attnscope.compare(model, TEXTS, attnscope.CompareOptions("jensen_shannon")),
    "compare-heads": lambda model: attnscope.compare_heads(model, TEXTS[0], [(0, 0), (0, 1)]),
    "compare-texts": lambda model: attnscope.compare_texts(model, TEXTS[0], "The dog sat on the mat."),
    "relations": lambda model: attnscope.relations(model, "sample_texts/dependencies.conllu"),
    "rollout": lambda model: attnscope.rollout(model, TEXTS[0]),
    "ablate": lambda model: attnscope.ablate(
        model, TEXTS, attnscope.AblateOptions(modes=("zero", "mean"))
    ),
    "page": lambda model: vars(read_page_text(model, Prompt(TEXTS[0]), Choice())),
    "trace": lambda model: attnscope.trace(model, TEXTS[0], 1),
    "split": lambda model: attnscope.split(model, TEXTS[0], 1, attnscope.SplitOptions(counts=(1, 3))),
}


def agree(spec, name):
    here = models.load(spec, device="cpu")
    there = models.load(spec, device=NAME)
    assert there.info.device == f"{NAME}:0"
    ours = numbers_of(STUDIES[name](here))
    theirs = numbers_of(STUDIES[name](there))
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_elsewhere_gives_what_the_processor_gives(name, elsewhere, tiny_bert):
    agree(str(tiny_bert), name)
    assert elsewhere[f"index to {NAME}"] == 0


GRADIENTS = """
import sys
import numpy as np
import attnscope
from attnscope.core.attention import precision
from tests.pretend_device import NAME, pretending
from tests.test_devices import TEXTS, numbers_of

gpt2, bert = sys.argv[1:]
options = attnscope.AblateOptions(importance=True)
studies = [
    (gpt2, lambda model: attnscope.ablate(model, TEXTS, options)),
    (bert, attnscope.weights),
    (bert, lambda model: attnscope.why(model, TEXTS[0], 1, 1, "@4", "@2")),
]
for float64, without in ((True, frozenset()), (False, frozenset({NAME}))):
    precision.WITHOUT_FLOAT64 = without
    for folder, study in studies:
        with pretending(float64=float64):
            models = [attnscope.load(folder, device=device) for device in (NAME, "cpu")]
            found, expected = (numbers_of(study(model)) for model in models)
        assert len(found) == len(expected) > 0
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
"""


def test_gradients_elsewhere_are_those_of_the_processor(tmp_path, tiny_bert):
    # A process of its own: torch counts the devices when it first goes backward, and knows no later ones.
    done = python("-c", GRADIENTS, str(save_tiny(tmp_path / "gpt2", "gpt2")), str(tiny_bert))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("elsewhere", [False], indirect=True, ids=["no-float64"])
@pytest.mark.parametrize("name", ["pooled", "heads", "ablate", "trace"])
def test_so_do_transformers_models(name, elsewhere, tmp_path):
    agree(str(save_tiny(tmp_path / "llama", "llama")), name)


@pytest.mark.parametrize("elsewhere", [False], indirect=True, ids=["no-float64"])
def test_so_do_encoder_decoders(elsewhere, tmp_path):
    agree(str(save_tiny(tmp_path / "bart", "bart")), "heads")


@pytest.mark.parametrize("elsewhere", [False], indirect=True, ids=["no-float64"])
@pytest.mark.parametrize("name", ["heatmap", "heads", "compare"])
def test_so_does_the_glass_box(name, elsewhere):
    agree("own-causal", name)


def test_the_pretended_device_finds_what_a_true_one_would(elsewhere):
    there = torch.zeros(3, 4, device=NAME)
    with pytest.raises(RuntimeError, match="at least two devices"):
        there * torch.arange(4)
    with pytest.raises(TypeError, match="Use Tensor.cpu"):
        there.numpy()
    assert not elsewhere
    assert there.cpu().numpy().shape == (3, 4)
    assert elsewhere == {f"{NAME} to cpu": 1}


def test_auto_takes_the_best_device_there_is(monkeypatch):
    assert devices.choose_device("auto", "bfloat16") == (torch.device("cpu"), torch.bfloat16)
    with pretending():
        monkeypatch.setattr(devices, "_best_device", lambda: NAME)
        assert models.load("own", device="auto").info.device == f"{NAME}:0"


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "mps", "meta", "toaster"])
def test_a_device_that_is_not_there_is_refused_in_one_line_with_a_hint(device):
    if device.startswith("cuda") and torch.cuda.is_available():
        pytest.skip("there is one here")
    with pytest.raises(AttnscopeError) as raised:
        models.load("own", device=device)
    assert device.partition(":")[0] in raised.value.message
    assert "\n" not in str(raised.value)
    assert "cpu is always there" in raised.value.hint


def test_float64_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr(precision, "WITHOUT_FLOAT64", frozenset({NAME}))
    with pretending(float64=False), pytest.raises(AttnscopeError, match="has no float64"):
        models.load("own", device=NAME, dtype="float64")
