import dataclasses
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from attnscope.core.attention.seam import attention_weights
from attnscope.core.catalogue import MEASURES, PICTURE_MEASURES, SOUND_MEASURES, measure_names
from attnscope.core.facts import TextFacts
from attnscope.core.measures import measures_of_weights
from tests.core_helpers import make_call
from tests.measure_helpers import make_facts
from tests.processes import LIMIT_S

ROOT = Path(__file__).parent.parent


def plain_text(ids, **facts):
    """One text without special tokens."""
    real = torch.ones(1, len(ids), dtype=torch.bool)
    given = {"real": real, "special": torch.zeros_like(real), "ids": torch.tensor([ids])} | facts
    return TextFacts(**given)


def shift(n, offset):
    """A head that looks at one fixed offset, and at itself where that is beyond the text."""
    q = torch.arange(n)
    target = torch.where((q + offset >= 0) & (q + offset < n), q + offset, q)
    return torch.eye(n, dtype=torch.float64)[target][None, None]


EVERYWHERE = torch.ones(1, 1, 1, 1, dtype=torch.bool)


def test_the_catalogues_say_what_their_measures_are():
    for catalogue in (MEASURES, PICTURE_MEASURES, SOUND_MEASURES):
        for measure in catalogue.values():
            assert all((measure.what, measure.formula, measure.unit, measure.source))
            assert measure.low < measure.high
    names = measure_names()
    assert names.index("induction_active") == names.index("induction") + 1


def test_uniform_attention_in_closed_form():
    n = 11
    got = measures_of_weights(torch.full((1, 1, n, n), 1 / n), plain_text([1] * n), allowed=EVERYWHERE)
    np.testing.assert_allclose(got.value("entropy_nats"), math.log(n))
    np.testing.assert_allclose(got.value("relative_entropy"), 1)
    np.testing.assert_allclose(got.value("same_token"), (n - 1) / n)
    np.testing.assert_allclose(got.value("distance_tokens"), (n**2 - 1) / (3 * n))


def test_active_measures_leave_resting_keys_out():
    # Half of every row rests on [CLS]; the rest is on the token before.
    n = 7
    facts = plain_text(list(range(n)), special=torch.tensor([[True] + [False] * (n - 1)]))
    rows = shift(n, -1) / 2
    rows[..., 0] += 0.5
    got = measures_of_weights(rows, facts, allowed=EVERYWHERE)
    i = got.names.index("previous_token_active")
    # Queries 0 and 1 have no token before them that nobody rests on.
    np.testing.assert_allclose(got.count[i], (n - 2) / 2)
    np.testing.assert_allclose(got.value("previous_token_active"), 1)
    np.testing.assert_allclose(got.value("resting"), (0.5 * (n - 2) + 2) / n)
    # Spread evenly over the six keys that nobody rests on, the token before would have a sixth.
    np.testing.assert_allclose(got.uniform_sum[i] / got.count[i], 1 / (n - 1))


def measure_of_the_docs():
    """The files that the example of contributing.md changes, and what they hold then."""
    page = (ROOT / "docs" / "contributing.md").read_text("utf-8")
    (diff,) = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    assert len(diff.splitlines()) < 30
    for path, hunks in re.findall(
        r"^\+\+\+ (\S+)\n(.*?)(?=^\+\+\+ |\Z)", diff, re.DOTALL | re.MULTILINE
    ):
        text = (ROOT / path).read_text("utf-8")
        for after, added in re.findall(r"^ (.*\n)((?:\+.*\n)+)", hunks, re.MULTILINE):
            assert text.count("\n" + after) == 1, after
            text = text.replace(
                "\n" + after, "\n" + after + re.sub(r"^\+", "", added, flags=re.MULTILINE)
            )
        yield path, text


def test_the_measure_of_the_docs_fits_into_what_is_there():
    assert all(
        compile(text, path, "exec") for path, text in measure_of_the_docs() if path.endswith(".py")
    )


@pytest.mark.slow
def test_the_measure_of_the_docs_is_all_that_it_takes(tmp_path):
    """It is held against the definition by every engine, in a copy."""
    for name in ("attnscope", "sample_texts", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path, text in measure_of_the_docs():
        (tmp_path / path).write_text(text, "utf-8")
    chosen = ["-k", "looks_two_back or every_measure_is_its_definition"]
    tests = [f"tests/test_{name}.py" for name in ("measures", "sums")]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-x", *tests, *chosen],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        check=True,
        timeout=LIMIT_S,
    )


# More cases in closed form.


def test_padding_fully_masked_queries_and_empty_texts_count_nothing():
    facts = make_facts([5, 0], 7)
    call = make_call(n_queries=7, n_keys=7, mask=facts.real[:, None, None])
    got = measures_of_weights(attention_weights(call), facts, allowed=call.mask)
    assert (got.sum[:, 1] == 0).all()
    assert (got.count[:, 1] == 0).all()
    assert (got.count[got.names.index("entropy_nats"), 0] == 5).all()
    assert np.isfinite(got.sum).all()
    assert np.isfinite(got.uniform_sum).all()


def test_the_mask_can_be_told_from_the_weights():
    facts = make_facts([7, 5], 7)
    call = make_call(n_queries=7, n_keys=7, mask=facts.real[:, None, None], is_causal=True)
    weights = attention_weights(call)
    causal = torch.ones(7, 7, dtype=torch.bool).tril() & facts.real[:, None, None]
    told = measures_of_weights(weights, facts, allowed=causal)
    guessed = measures_of_weights(weights, facts)
    np.testing.assert_array_equal(told.sum, guessed.sum)
    np.testing.assert_array_equal(told.count, guessed.count)
    np.testing.assert_array_equal(told.uniform_sum, guessed.uniform_sum)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"special": torch.zeros(2, 6, dtype=torch.bool)}, ValueError, r"special \(2, 6\) does not fit"),
        ({"rarest": torch.zeros(3, 7, dtype=torch.bool)}, ValueError, r"rarest \(3, 7\)"),
    ],
)
def test_facts_that_do_not_fit_are_refused(change, error, says):
    with pytest.raises(error, match=says):
        dataclasses.replace(make_facts([7, 5], 7), **change)
