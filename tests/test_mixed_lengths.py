"""Models that compute a text otherwise when it is padded to a longer one: their short and long texts stay apart."""

import pytest
import torch

import attnscope
from attnscope.core.attention.probes import WeightsRecorder
from attnscope.core.attention.seam import attend
from attnscope.models.hf.examples import depends_on_batch
from attnscope.models.model import Batch, MixedLengthsError
from attnscope.studies.ablate import reading
from attnscope.studies.atlas import rows as atlas_rows
from attnscope.studies.compare import study as comparing
from attnscope.studies.heads import measuring as head_blocks
from tests.ablation_helpers import tiny
from tests.record_helpers import require_close

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT = 16
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": [1.5, 9.0]}


def phi3():
    """Reads texts of more than 16 tokens by long factors."""
    rope = {**LONGROPE, "rope_theta": 100.0, "original_max_position_embeddings": LIMIT}
    sizes = {"max_position_embeddings": 64, "original_max_position_embeddings": LIMIT}
    return attnscope.load(tiny("phi3", rope_parameters=rope, **sizes).requires_grad_(False))


def llama_dynamic():
    """Scales its rotary positions by a text's length, beyond 16 tokens."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    return attnscope.load(tiny("llama", rope_parameters=rope, max_position_embeddings=LIMIT))


def text(n, seed=0):
    return torch.randint(3, 41, (1, n), generator=torch.Generator().manual_seed(seed + n))


def padded(lengths, *, left=False):
    width = max(lengths)
    ids = torch.full((len(lengths), width), 7)
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, n in enumerate(lengths):
        part = slice(width - n, None) if left else slice(n)
        ids[row, part], mask[row, part] = text(n)[0], True
    return Batch(ids, mask)


@pytest.mark.parametrize("make", [phi3, llama_dynamic])
def test_what_padding_would_change_is_refused(make):
    model = make()
    mixed = padded([9, 40])
    for run, probe in ((model.run, attend), (model.run, WeightsRecorder()), (model.outputs, attend)):
        with pytest.raises(MixedLengthsError, match="padding a text of 9 tokens to 40"):
            run(mixed, probe)
    with pytest.raises(MixedLengthsError):
        model.rerun(mixed)
    with pytest.raises(MixedLengthsError):
        model.run_inputs({"input_ids": mixed.ids, "attention_mask": mixed.mask.long()}, attend)  # type: ignore[union-attr]
    model.run(padded([9, 16, 3]), attend)


def test_texts_of_one_kind_are_padded_together():
    longrope = phi3().base.config
    dynamic = llama_dynamic().base.config
    plain = attnscope.load(tiny("llama")).base.config  # type: ignore[attr-defined]
    for lengths, in_longrope, in_dynamic in (
        ([3, 16], False, False),
        ([16, 17], True, True),
        ([17, 40], False, True),
        ([40, 40], False, False),
    ):
        mask = padded(lengths).mask
        assert [depends_on_batch(config, mask) for config in (longrope, dynamic, plain)] == [
            in_longrope,
            in_dynamic,
            False,
        ]
    assert depends_on_batch(longrope, padded([9, 20]).mask[:1])  # type: ignore[index]  # one text, padded beyond
    assert not depends_on_batch(longrope, None)


STUDIES = {
    "heads": lambda model, texts: attnscope.heads(model, texts),
    "heads described": lambda model, texts: attnscope.heads(
        model, texts, attnscope.HeadsOptions(describe=attnscope.DescribeOptions())
    ),
    "ablate": lambda model, texts: attnscope.ablate(
        model, texts, attnscope.AblateOptions(importance=True)
    ),
    "compare": lambda model, texts: attnscope.compare(model, texts),
    "atlas": lambda model, texts: attnscope.atlas(model, texts),
}


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_of_short_and_long_texts_gives_what_each_text_gives_alone(study, monkeypatch):
    model = phi3()
    texts = [
        " ".join(map(str, text(n, seed)[0].tolist()))
        for seed, n in enumerate((9, 40, 12, 33, 15, 20, 30, 6))
    ]
    together = STUDIES[study](model, texts)
    for module, name in (
        (head_blocks, "TOKEN_BUDGET"),
        (comparing, "TOKEN_BUDGET"),
        (atlas_rows, "TOKEN_BUDGET"),
        (reading, "BATCH_TOKENS"),
    ):
        monkeypatch.setattr(module, name, 1)
    alone = STUDIES[study](model, texts)
    require_close(together, alone, study, rtol=1e-3, atol=1e-4)
    assert not together.run.get("failures")
    assert not any("Memory did not suffice" in note for note in together.run["notes"])
