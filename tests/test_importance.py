"""Importance by one backward pass: against finite differences, and text by text."""

import numpy as np
import pytest
import torch

from attnscope.core.attention.probes import HeadGate
from attnscope.corpus import CorpusText
from attnscope.models.hf.assembling import wrap
from attnscope.studies.ablate.measurers import (
    PassSettings,
    find_head_shapes,
    iterate_head_outputs,
    measure_importance,
)
from attnscope.studies.ablate.reading import BatchReader
from tests.ablation_helpers import VOCABULARY, tiny

TEXTS = [
    CorpusText(
        i,
        "texts",
        i + 1,
        ids=tuple(3 + (7 * i + 5 * j * j) % (VOCABULARY - 3) for j in range(4 + 2 * i)),
    )
    for i in range(3)
]
STEP = 1e-5


def _model(name, **more):
    return wrap(tiny(name, dtype=torch.float64, **more))


def _loss(model, read, place, head, factor):
    factors = torch.ones(model.info.n_heads[0], dtype=torch.float64)
    factors[head] = factor
    with torch.no_grad():
        logits = model.outputs(read.batch, HeadGate({place: factors})).logits
    assert logits is not None
    logs = logits[read.prediction_rows, read.positions].log_softmax(-1)
    return float(-logs.gather(-1, read.answers[:, None]).mean())


@pytest.mark.parametrize(("name", "kind"), [("gpt2", "decoder"), ("gpt_neox", "decoder")])
def test_it_is_the_mean_absolute_finite_difference_of_the_loss(name, kind):
    model = _model(name)
    reader = BatchReader(model, "causal")
    known = find_head_shapes(iterate_head_outputs(PassSettings(reader, TEXTS)))
    found = measure_importance(PassSettings(reader, TEXTS), known)
    for place, head in [((kind, 0), 0), ((kind, 1), 1)]:
        slopes = []
        for text in TEXTS:
            (read,) = _reads(reader, [text])
            high, low = (_loss(model, read, place, head, 1 + sign * STEP) for sign in (1, -1))
            slopes.append((high - low) / (2 * STEP))
        assert min(map(abs, slopes)) > 1e-4  # not the difference of nothing
        # RunningSums keeps 26 bits of each text's number.
        np.testing.assert_allclose(ratio_of(found.done, place, head), np.mean(np.abs(slopes)), rtol=1e-6)


def ratio_of(part, place, head):
    """The mean of one of the three heads that each layer has."""
    return float(part.sums.ratio()[3 * place[1] + head])


def _reads(reader, texts):
    from attnscope.corpus import TextBlock

    return [reader.read(rows) for rows in reader.batches(TextBlock(0, tuple(texts)))]


def test_a_text_without_predictions_counts_nothing():
    model = _model("gpt2")
    reader = BatchReader(model, "causal")
    lone = CorpusText(3, "texts", 4, ids=(5,))
    known = find_head_shapes(iterate_head_outputs(PassSettings(reader, TEXTS)))
    found = measure_importance(PassSettings(reader, [*TEXTS, lone]), known)
    assert found.done.sums.total("c")[0] == 3
